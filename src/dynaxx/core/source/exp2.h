// SPDX-License-Identifier: Apache-2.0
// Powers of 2, and functions built on them: tanh, and the scale that turns scores into exponents of 2.
#pragma once
#include <algorithm>
#include <cmath>

#include "vec.h"

namespace dynaxx {

constexpr double LOG2_E = 1.4426950408889634, LN_2 = 0.6931471805599453;

// x = n + f with an integer n and |f| <= 1/2, for -127 <= x <= 0.
struct Exponent {
  vec power;  // 2 ** n; 0 for n = -127
  vec f;
};

// Adding ROUND rounds x to n and leaves n + 127, the biased exponent of 2 ** n, in the low bits of the float. The clamp
// keeps that exponent >= 0, and a float with exponent 0 is 0.
DYNAXX_INLINE Exponent split_exponent(vec x) {
  constexpr float ROUND = 12582912.f + 127.f;  // 1.5 * 2 ** 23 + 127
  x = max_second_if_nan(splat(-127.f), x);
  const vec shifted = x + splat(ROUND);
  return {(vec)((ivec)shifted << 23), x - (shifted - splat(ROUND))};
}

// Return 2 ** f - 1 for |f| <= 1/2. The polynomial minimizes the largest relative error of 2 ** f among those that are
// exactly 1 at f = 0: an unchanged running maximum must not rescale earlier sums, or errors would grow with every step.
DYNAXX_INLINE vec exp2_minus_one(vec f) {
  vec p = splat(0x1.41fbbcp-13f);
  p = p * f + splat(0x1.5f3e52p-10f);
  p = p * f + splat(0x1.3b2d4cp-7f);
  p = p * f + splat(0x1.c6aee8p-5f);
  p = p * f + splat(0x1.ebfbdcp-3f);
  p = p * f + splat(0x1.62e430p-1f);
  return p * f;
}

// Return 2 ** x for x <= 0: exactly 0 below -127 and for -inf, exactly 1 for 0, NaN for NaN; relative error below 8e-8.
DYNAXX_INLINE vec exp2_nonpositive(vec x) {
  const Exponent at = split_exponent(x);
  return (exp2_minus_one(at.f) + splat(1.f)) * at.power;
}

// tanh |x| = -m / (m + 2) with m = exp(-2 |x|) - 1. For small x, m is 2 ** f - 1, so nothing cancels.
DYNAXX_INLINE vec tanh_of(vec x) {
  const ivec sign = (ivec)x & (ivec{} + INT32_MIN);
  const vec magnitude = (vec)((ivec)x ^ sign);
  const Exponent at = split_exponent(magnitude * splat(float(-2 * LOG2_E)));
  const vec m = at.power * exp2_minus_one(at.f) + (at.power - splat(1.f));
  return (vec)((ivec)(-m / (m + splat(2.f))) | sign);
}

// Add the score of a sink to lse, which must be finite; return the factor by which the sum of weights grows.
inline float add_sink(float& lse, float sink) {
  const float before = lse, larger = std::max(before, sink);
  lse = larger + std::log1p(std::exp(std::min(before, sink) - larger));
  return 1.f + std::exp(sink - before);
}

// Compute exp(scale * x) as 2 ** (factor * (sign * x)) with factor > 0. The sign is applied to an operand, exactly; the
// factor is applied when the largest score is subtracted, with one rounding. A scale of 0 becomes sign 0, so that
// hidden scores stay -inf. With a softcap c > 0, the score is tanh(cap * (sign * x)) with cap = |scale| / c, and c
// replaces |scale| in the factor.
struct Scale {
  float sign, cap, factor;  // cap 0: no softcap
  bool biased = false;      // whether scores, then in units of factor, are added to what lies in their place

  explicit Scale(double scale, double softcap = 0, bool biased = false)
      : sign(scale > 0 ? 1.f : scale < 0 ? -1.f : 0.f),
        cap(softcap > 0 ? std::max(float(std::fabs(scale) / softcap), std::numeric_limits<float>::min()) : 0.f),
        factor(float(softcap > 0 ? softcap * LOG2_E : scale == 0 ? 1. : std::fabs(scale) * LOG2_E)),
        biased(biased) {}

  bool capped() const { return cap != 0; }
};

}  // namespace dynaxx
