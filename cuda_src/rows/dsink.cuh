// The gradient of the sinks: dsink = sum over rows of P_sink * (dlse - D), with P_sink =
// exp(sink - lse) and delta = D - dlse. In fixed order, in float64.
#pragma once

#include "../attention/gradient.cuh"

namespace cf {

template <typename Config>
struct DsinkTraits {
  static constexpr int threads = 32 * Config::warps;
  static constexpr int smem_bytes = threads * int(sizeof(double));
};

// dlse - D of a row that sees none of the keys here: `state` has no delta of it. If it sees keys of
// another part, out is that of the whole; if it sees none at all, out is 0, and dO may be NaN.
template <typename Config>
CF_DEVICE auto blind_delta(const BackwardParams& p, const Rows& rows) {
  using T = accumulator<typename Config::element>;
  T sum = p.dlse.address != 0 ? at<const T>(rows.address(p.dlse, 0)) : T(0);
  const uint64 out = rows.address(p.out, 0), dout = rows.address(p.dout, 0);
  for (int64 c = 0; c < p.d_v; ++c) {
    const T O = load<T>(out + c * p.out.c, p.out.kind);
    const T dO = load<T>(dout + c * p.dout.c, p.dout.kind);
    if (O != T(0)) sum -= O * widen(to_operand<Config>(dO));
  }
  return sum;
}

// What row `query` of a head adds.
template <typename Config, typename T>
CF_DEVICE double sink_term(const BackwardParams& p, int64 b, int64 head, int64 query, T sink) {
  const Rows rows = open_rows(p, b, head, 1, query, 1);
  if (rows.rows == 0) return 0.;
  const uint64 state = row_state<T>(p, rows, 0);
  if (at<const T>(state) == inf<T>()) {
    const T P = exp(sink - at<const T>(rows.address(p.lse, 0)));
    return double(P) * blind_delta<Config>(p, rows);
  }
  const Normaliser<T> n = normaliser_of<T>(p, rows, 0);
  const T delta = at<const T>(state + p.state_rows * int64(sizeof(T)));
  return double(exp(sink - n.reference - n.log_l)) * -delta;
}

// Tasks: query heads.
template <typename Config>
CF_DEVICE void dsink(const BackwardParams& p) {
  using T = accumulator<typename Config::element>;
  CF_DYNAMIC_SHARED(memory);
  double* const sums = reinterpret_cast<double*>(memory);
  const int thread = int(threadIdx.x);
  for (int64 head = blockIdx.x; head < p.tasks; head += gridDim.x) {
    const T sink = sink_of<T>(p, head);
    double sum = 0.;
    for (int64 i = thread; i < p.batch * p.Nq && sink != -inf<T>();
         i += DsinkTraits<Config>::threads) {
      sum += sink_term<Config>(p, i / p.Nq, head, i % p.Nq, sink);
    }
    sums[thread] = sum;
    ptx::sync_block("sums_written");
    if (thread == 0) {
      for (int t = 1; t < DsinkTraits<Config>::threads; ++t) sum += sums[t];
      store(p.dsink.address + head * p.dsink.b, p.dsink.kind, T(sum));
    }
    ptx::sync_block("sums_read");
  }
}

}  // namespace cf
