// The shape of a block's work in the fused backward kernel, and its tiles.
#pragma once

#include "../attention/gradient.cuh"
#include "../attention/schedule.cuh"
#include "copy.cuh"

namespace cf {

// Config::split_late: each warp splits what it reads of Q and dO for 3xTF32, as it does K and V.
// Without it the block does so once, in twice the shared memory.
template <typename Config, typename = void>
struct SplitsLate {
  static CF_HOST_DEVICE constexpr bool value() { return false; }
};
template <typename Config>
struct SplitsLate<Config, decltype(void(Config::split_late))> {
  static CF_HOST_DEVICE constexpr bool value() { return Config::split_late != 0; }
};

// Whether one warp of a strip computes scores for all parts, where there are too few rows for each;
// of roles, one warp for each role.
template <typename Config>
CF_HOST_DEVICE constexpr bool one_scores() {
  return Config::Br < 16 * Config::parts;
}

template <typename Config>
struct BackwardSm80Traits {
  using T = typename Config::element;
  using A = accumulator<T>;
  static constexpr int threads = 32 * Config::warps;
  static constexpr int strips = Config::warps / Config::roles / Config::parts;
  static constexpr int strip = Config::Bc / strips;      // keys whose dK and dV a warp sums up
  // Rows whose scores it computes for them.
  static constexpr int part = Config::Br / (one_scores<Config>() ? 1 : Config::parts);
  static_assert(!one_scores<Config>() || Config::roles > 1 || sizeof(T) == 8,
                "operands that lie in registers do so in all warps");
  static constexpr int piece = Config::roles > 1 ? part : min(part, 32);   // ... at a time
  static constexpr int d_part = Config::d / Config::parts, v_part = Config::d_v / Config::parts;
  // P and dS become operands in the registers that hold them, and pass through shared memory for
  // the other warps of a strip. In float64 they pass through it for all, since operands from
  // registers would cost conflicts of banks where dO and Q are read; P and dS share its memory,
  // but for roles, which need both at a time.
  static constexpr bool exchange = Config::parts > 1 && Config::roles == 1 && sizeof(T) < 8;
  static constexpr bool own = sizeof(T) < 8;            // operands in registers, of the warp's rows
  static constexpr int state_bytes = 2 * Config::Br * int(sizeof(A));
  static constexpr int rests = SplitsLate<Config>::value() ? 0 : rest_rows<Config>(Config::Br);
  static constexpr int rows_bytes =
      (Config::Br + rests) * (rows_pitch<T>(Config::d) + rows_pitch<T>(Config::d_v))
      * int(sizeof(T));
  static constexpr int keys_bytes =
      Config::Bc * (rows_pitch<T>(Config::d) + rows_pitch<T>(Config::d_v)) * int(sizeof(T));
  static constexpr int score_bytes = Config::Bc * rows_pitch<T>(Config::Br) * int(sizeof(T));
  static constexpr int own_bytes = 18 * 8 + 4 * 8;      // OwnKeys and four of SeenSpan
  // Of each thread, a sum of dbias for each of its keys.
  static CF_HOST_DEVICE constexpr int dbias_bytes() {
    return dbias_is<Config>(OVER_ROWS) ? threads * (strip / 8) * int(sizeof(double)) : 0;
  }
  // With features, rows of all stages, and who sees the keys of four tiles.
  static constexpr int feature_bytes =
      changes_scores<Config>() ? Config::stages * Config::Br * (int(sizeof(ScoreRow<A>)) + 8)
                             + 4 * Config::parts * Config::Bc + dbias_bytes()
                       : 0;
  static constexpr int smem_bytes =
      keys_bytes + (exchange || (Config::roles > 1 && !own) ? 2 : 1) * score_bytes
      + (Config::roles > 1 && own ? Config::Br * Config::Bc * int(sizeof(A)) : 0)
      + Config::stages * (rows_bytes + state_bytes + Config::Br * 8) + feature_bytes + own_bytes;
  static_assert(Config::Bc * (max(Config::d, Config::d_v) + 4) * int(sizeof(A))
                    <= smem_bytes - own_bytes - feature_bytes,
                "dK and dV must fit in shared memory on their way out");
  // Warps stand in a grid over the tile of dQ.
  static constexpr int warps_m = Config::Br / 16 < Config::warps / 2 ? Config::Br / 16
                                 : Config::warps >= 4                ? 2
                                                                     : 1;
  static constexpr int warps_n = Config::warps / warps_m;
  // Threads that copy tiles: those of dP's warps where they have time, or all.
  static constexpr int copiers = Config::stages > 1 ? threads / Config::roles : threads;
  // Whether Q and dO of a tile can be replaced once its dS is there for all, since nobody reads
  // them after that. 3xTF32 has no registers to spare then.
  static constexpr bool free_early = own && Config::parts == 1 && Config::precision != 2;
  // Whether the next rows are awaited together with dS.
  static constexpr bool arrives_early = free_early && Config::roles > 1 && Config::stages > 1;
  // The walk over the rows is long enough in the wide types to begin slowly, with less to compile.
  static constexpr bool compact = sizeof(T) > 2;
  // Wide tiles of dQ are added in two passes with other products between them: all at once, the
  // additions would fill the queue that loads stand in, too. Nor do all sums of 3xTF32 fit at once.
  static constexpr bool halves_dq = Config::parts > 1 || Config::precision == 2;
  static constexpr int dq_passes = halves_dq && Config::d / warps_n >= 64 ? 2 : 1;
  static_assert(Config::warps % (Config::parts * Config::roles) == 0
                    && Config::Bc % (16 * strips) == 0,
                "the keys must be whole fragments for each strip of warps");
  static_assert(part % 16 == 0 && Config::d % (16 * Config::parts) == 0
                    && Config::d_v % (16 * Config::parts) == 0,
                "rows and columns must be whole fragments for each warp of a strip");
  static_assert(Config::Br % (16 * warps_m) == 0 && Config::d % (16 * warps_n * dq_passes) == 0,
                "the tile of dQ must be whole fragments for each warp and pass");
};

// The lane, and its row and column in a fragment, found anew at every use: addresses that depend on
// them would be kept through the walk, and registers are scarce.
CF_DEVICE int here() { return int(uint32(ptx::opaque(int(threadIdx.x))) % 32); }
CF_DEVICE int row_here() { return here() / 4; }
CF_DEVICE int column_here() { return here() % 4 * 2; }

// The keys that any row of a tile sees, counted from the block's first.
struct SeenSpan {
  int first, end;
};

// How whole tiles of packed rows lie in memory: bytes from tile to tile, and from a thread's row to
// its next one.
struct Steps {
  int64 tile, row;
};

// The keys that a block owns, and who sees them. Lies in shared memory: registers are scarce.
struct OwnKeys : KeyBand {
  int64 head, key0;          // of all key heads; the first key
  int64 keys;                // how many there are
  int64 offset, kv_len;
  uint64 k, v;               // the first rows of the key head
  uint64 q, dout;            // the first rows of the first query head
  Steps q_steps, dout_steps;
  int regular;               // whether tiles of real rows can be copied by steps
  float scale;
};

// Shared memory of a block. Q, dO, lse, delta and ranges are those of the first stage.
template <typename Config>
struct FusedTiles {
  using Traits = BackwardSm80Traits<Config>;
  using T = typename Config::element;
  using A = accumulator<T>;
  static constexpr int q_pitch = rows_pitch<T>(Config::d), v_pitch = rows_pitch<T>(Config::d_v);
  static constexpr int s_pitch = rows_pitch<T>(Config::Br);
  static constexpr int q_step = (Config::Br + Traits::rests) * q_pitch;
  static constexpr int v_step = (Config::Br + Traits::rests) * v_pitch;
  T *K, *V;            // [Bc, d], [Bc, d_v]
  T *Q, *dO;           // [stages, Br, d], [stages, Br, d_v], in 3xTF32 each followed by its rests
  T *dS, *P;           // [Bc, Br]: transposed
  A* P_sums;           // [Bc, Br] in the order of registers, where P and dP have warps of their
                       // own; not in float64
  A* state;            // [stages, lse or delta, Br]; lse is +inf where no key is seen
  KeyRange* ranges;    // [stages, Br], of tiles in which keys are hidden
  SeenSpan* seen;      // [4], of such tiles by their number: some warps still read the last but one
  ScoreRow<A>* rows;   // with features: [stages, Br]
  uint64* dbias;       // with features: [stages, Br], where such rows begin in dbias or in sums of
                       // it; 0: nowhere, and nothing is stored
  unsigned char* seen_keys;  // with features: [4, parts, Bc], whether a part's rows see a key
  double* dbias_sums;  // OVER_ROWS: [keys of a lane, threads]
  OwnKeys* own;

  CF_DEVICE explicit FusedTiles(unsigned char* memory) {
    constexpr int size = sizeof(T), stages = Config::stages;
    Carver carver{memory};
    K = carver.take<T>(Config::Bc * q_pitch * size);
    V = carver.take<T>(Config::Bc * v_pitch * size);
    Q = carver.take<T>(stages * q_step * size);
    dO = carver.take<T>(stages * v_step * size);
    dS = carver.take<T>(Traits::score_bytes);
    P = dS;
    if constexpr (Traits::exchange || (Config::roles > 1 && !Traits::own)) {
      P = carver.take<T>(Traits::score_bytes);
    }
    if constexpr (Config::roles > 1 && Traits::own) {
      P_sums = carver.take<A>(Config::Br * Config::Bc * int(sizeof(A)));
    }
    state = carver.take<A>(stages * Traits::state_bytes);
    ranges = carver.take<KeyRange>(stages * Config::Br * int(sizeof(KeyRange)));
    if constexpr (changes_scores<Config>()) {
      rows = carver.take<ScoreRow<A>>(stages * Config::Br * int(sizeof(ScoreRow<A>)));
      dbias = carver.take<uint64>(stages * Config::Br * 8);
      seen_keys = carver.take<unsigned char>(4 * Config::parts * Config::Bc);
      dbias_sums = carver.take<double>(Traits::dbias_bytes());
    }
    own = carver.take<OwnKeys>(sizeof(OwnKeys));
    seen = carver.take<SeenSpan>(4 * sizeof(SeenSpan));
  }
};

}  // namespace cf
