// Powers of two, which P is made of in the kernels that keep scores in registers.
#pragma once

#include "../convert.cuh"

namespace cf {

// 2^x, as exact as P must be: its errors are the same in acc and in l.
CF_DEVICE float exp2(float x) { return ptx::exp2_approx(x); }

// 2^(x factor), likewise.
CF_DEVICE float exp2_of(float x, float factor) { return exp2(x * factor); }

// 2^(x factor) for x factor < 1000, to 2e-16; 0 below 2^-1022. A polynomial of degree 11 in the
// part of the exponent that is left of the nearest integer, with Chebyshev's error of 2e-17; the
// integer goes into the exponent. Integers are compared, which does not hold up the doubles' pipe.
CF_DEVICE double exp2_of(double x, double factor) {
  constexpr double coefficients[] = {
      4.4558179083360645e-10, 7.074194297288521e-09, 1.0178057087733941e-07, 1.3215432535912375e-06,
      1.5252733841556773e-05, 1.5403530463724353e-04, 1.333355814640647e-03, 9.618129107587256e-03,
      5.5504108664821625e-02, 2.4022650695910158e-01, 6.931471805599453e-01, 1.0};
  constexpr double shift = 6755399441055744.0;          // 1.5 * 2^52: sums end in whole numbers
  const double whole = fma(x, factor, shift), rest = fma(x, factor, -(whole - shift));
  double p = coefficients[0];
#pragma unroll
  for (int i = 1; i < 12; ++i) p = fma(p, rest, coefficients[i]);
  // The integer is n - zero, which wraps where n is the bits of a negative number.
  const int64 n = int64(ptx::double_to_bits(whole));
  constexpr int64 zero = 0x4338000000000000;            // the bits of `shift`
  const uint64 power = ptx::double_to_bits(p) + (uint64(n) << 52);
  const uint32 size = uint32(ptx::double_to_bits(x) >> 32) & 0x7FFFFFFF;
  const bool is_nan = size > 0x7FF00000;                // as all are that a computation gives
  return is_nan ? x : ptx::bits_to_double(n < zero - 1022 ? 0 : power);
}

}  // namespace cf
