// Which options of a call are compiled into a kernel: what a call does not have adds nothing to it.
#pragma once

#include "../params.cuh"

namespace cf {

// The bits of Config::options, by the names that the planner has for them.
enum Option : int { MASK = 1, BIAS = 2, SOFTCAP = 4, ALIBI = 8 };

template <typename Config>
CF_HOST_DEVICE constexpr bool has(int options) {
  return (Config::options & options) != 0;
}

// Config::wants: the gradients that are asked for, by these bits; without it, all.
enum WantedGradient : int { DQ = 1, DK = 2, DV = 4 };
template <typename Config, typename = void>
struct Wanted {
  static constexpr int value = DQ | DK | DV;
};
template <typename Config>
struct Wanted<Config, decltype(void(Config::wants))> {
  static constexpr int value = Config::wants;
};
template <typename Config>
CF_HOST_DEVICE constexpr bool wants(int gradients) {
  return (Wanted<Config>::value & gradients) != 0;
}

// Whether scores are more than scale * q.k in the range of visible keys.
template <typename Config>
CF_HOST_DEVICE constexpr bool changes_scores() {
  return has<Config>(MASK | BIAS | SOFTCAP | ALIBI);
}

// Whether any key may be hidden, by more than its position.
template <typename Config>
CF_HOST_DEVICE constexpr bool hides_any() {
  return has<Config>(MASK | BIAS);
}

// Whether lse may be too large to give P: see gradient.cuh.
template <typename Config>
CF_HOST_DEVICE constexpr bool has_large_lse() {
  return has<Config>(BIAS | ALIBI);
}

}  // namespace cf
