// Behind backward_sm80: dbias from its sums, in fixed order.
#pragma once

#include "../attention/dbias_sums.cuh"

namespace cf {

template <typename Config>
struct DbiasSumTraits {
  static constexpr bool added = dbias_is<Config>(ADDED);
  static constexpr int threads = 32 * Config::warps;
  static constexpr int smem_bytes = added ? 0 : threads * int(sizeof(double));
  static constexpr int columns = added ? 8 * threads : threads;        // of a line, for one task
};

// ADDED: a piece of a line, rounded.
template <typename Config>
CF_DEVICE void round_added(const BackwardParams& p, int64 task) {
  using A = accumulator<typename Config::element>;
  using Traits = DbiasSumTraits<Config>;
  const AddedLines sums(p);
  const int64 pieces = ceil_div(p.Nk, int64(Traits::columns)), line = task / pieces;
  const int64 first = task % pieces * Traits::columns;
  const int64 query = line % p.Nbias_q, head = line / p.Nbias_q;
  const uint64 from = sums.address + line * sums.pitch * int64(sizeof(A));
  const uint64 to = head_address(p.dbias, head / p.heads_bias, head % p.heads_bias)
                    + query * p.dbias.n;
#pragma unroll
  for (int i = 0; i < Traits::columns; i += Traits::threads) {
    const int64 key = first + i + int(threadIdx.x);
    if (key < p.Nk) {
      store(to + key * p.dbias.c, p.dbias.kind, at<const A>(from + key * int64(sizeof(A))));
    }
  }
}

// What OVER_ROWS and OVER_KEYS leave behind: [outer, batch, heads, inner, columns]. A column is a
// key or a row, and `step` is the stride of its element.
struct WideSums {
  int64 outer, heads, inner, columns, step;
  bool folded;                                          // all columns are one element

  template <typename Config>
  static CF_DEVICE WideSums of(const BackwardParams& p, Config) {
    if constexpr (dbias_is<Config>(OVER_ROWS)) {
      return {p.row_splits, p.heads_k, Config::parts, p.Nk, p.dbias.c, p.Nbias_k == 1};
    } else {
      return {Config::key_sums, p.heads_q, 1, p.Nq, p.dbias.n, p.Nbias_q == 1};
    }
  }
};

// One column of them, over all that was broadcast but columns.
CF_DEVICE double sum_column(const BackwardParams& p, const WideSums& s, int64 b, int64 head,
                            int64 column) {
  const int64 b_end = p.batch_bias == 1 ? p.batch : b + 1;
  const int64 head_end = p.heads_bias == 1 ? s.heads : head + 1;
  double sum = 0.;
  for (int64 outer = 0; outer < s.outer; ++outer) {
    for (int64 b_in = b; b_in < b_end; ++b_in) {
      for (int64 head_in = head; head_in < head_end; ++head_in) {
        const int64 first = ((outer * p.batch + b_in) * s.heads + head_in) * s.inner;
        for (int64 i = 0; i < s.inner; ++i) {
          sum += at<const double>(p.dbias_sums + ((first + i) * s.columns + column) * 8);
        }
      }
    }
  }
  return sum;
}

// Elements of dbias: as many as there are threads, one each, or one for all of them.
template <typename Config>
CF_DEVICE void fold_sums(const BackwardParams& p, int64 task, double* memory) {
  constexpr int threads = DbiasSumTraits<Config>::threads;
  const WideSums s = WideSums::of(p, Config{});
  const int thread = int(threadIdx.x);
  const int64 pieces = s.folded ? 1 : ceil_div(s.columns, int64(threads));
  const int64 line = task / pieces, b = line / p.heads_bias, head = line % p.heads_bias;
  const uint64 to = head_address(p.dbias, b, head);
  if (!s.folded) {
    const int64 column = task % pieces * threads + thread;
    if (column < s.columns) {
      store(to + column * s.step, p.dbias.kind, sum_column(p, s, b, head, column));
    }
    return;
  }
  double sum = 0.;
  for (int64 column = thread; column < s.columns; column += threads) {
    sum += sum_column(p, s, b, head, column);
  }
  memory[thread] = sum;
  ptx::sync_block("sums_written");
  if (thread == 0) {
    for (int i = 1; i < threads; ++i) sum += memory[i];
    store(to, p.dbias.kind, sum);
  }
  ptx::sync_block("sums_read");
}

// Tasks: pieces of lines of dbias.
template <typename Config>
CF_DEVICE void dbias_sum(const BackwardParams& p) {
  CF_DYNAMIC_SHARED(memory);
  for (int64 task = blockIdx.x; task < p.tasks; task += gridDim.x) {
    if constexpr (dbias_is<Config>(ADDED)) {
      round_added<Config>(p, task);
    } else {
      fold_sums<Config>(p, task, reinterpret_cast<double*>(memory));
    }
  }
}

}  // namespace cf
