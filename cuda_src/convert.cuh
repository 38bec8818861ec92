// Elements of any kind to and from the accumulators' type, and the roundings before a product.
#pragma once

#include "params.cuh"
#include "ptx.cuh"

namespace cf {

template <typename T>
CF_DEVICE T& at(uint64 address) {
  return *reinterpret_cast<T*>(address);
}

CF_DEVICE float widen(half_t x) { return ptx::half_to_float(x.bits); }
CF_DEVICE float widen(bfloat16_t x) { return ptx::bits_to_float(uint32(x.bits) << 16); }
CF_DEVICE float widen(float x) { return x; }
CF_DEVICE double widen(double x) { return x; }

// x rounded to nearest even in the type T.
template <typename T>
CF_DEVICE T narrow(accumulator<T> x) {
  return x;
}
template <>
CF_DEVICE half_t narrow<half_t>(float x) {
  return {ptx::float_to_half(x)};
}
template <>
CF_DEVICE bfloat16_t narrow<bfloat16_t>(float x) {
  return {ptx::float_to_bfloat16(x)};
}

// x rounded to the 10 mantissa bits of TF32, ties away from zero; a finite value stays finite.
CF_DEVICE uint32 round_to_tf32(uint32 bits) { return ptx::tf32_word(bits) & 0xFFFFE000; }
CF_DEVICE float round_to_tf32(float x) {
  return ptx::bits_to_float(round_to_tf32(ptx::float_to_bits(x)));
}

// What 3xTF32 keeps of x beside `high`, its first part: rounded by half a unit of TF32's last
// place, for the instruction cuts off what is below. Where x is no finite number, `high` says so.
CF_DEVICE uint32 tf32_rest(uint32 x, uint32 high) {
  return ptx::float_to_bits(ptx::bits_to_float(x) - ptx::bits_to_float(high)) + 0x1000;
}

// x as an operand of a product: rounded to the element type, in plain TF32 to that.
template <typename Config>
CF_DEVICE typename Config::element to_operand(accumulator<typename Config::element> x) {
  if constexpr (Config::precision == 1) return round_to_tf32(x);
  return narrow<typename Config::element>(x);
}

// The element of the given kind at an address, as a T.
template <typename T>
CF_DEVICE T load(uint64 address, int64 kind) {
  if (kind == FLOAT16) return T(widen(at<const half_t>(address)));
  if (kind == BFLOAT16) return T(widen(at<const bfloat16_t>(address)));
  if (kind == FLOAT32) return T(at<const float>(address));
  return T(at<const double>(address));
}

// Writes x, rounded to the given kind.
template <typename T>
CF_DEVICE void store(uint64 address, int64 kind, T x) {
  if (kind == FLOAT16) {
    at<half_t>(address) = narrow<half_t>(float(x));
  } else if (kind == BFLOAT16) {
    at<bfloat16_t>(address) = narrow<bfloat16_t>(float(x));
  } else if (kind == FLOAT32) {
    at<float>(address) = float(x);
  } else {
    at<double>(address) = double(x);
  }
}

CF_DEVICE float exp(float x) { return ::expf(x); }
CF_DEVICE double exp(double x) { return ::exp(x); }
CF_DEVICE float log(float x) { return ::logf(x); }
CF_DEVICE double log(double x) { return ::log(x); }
CF_DEVICE float tanh(float x) { return ::tanhf(x); }
CF_DEVICE double tanh(double x) { return ::tanh(x); }

}  // namespace cf
