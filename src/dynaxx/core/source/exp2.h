// SPDX-License-Identifier: Apache-2.0
// Powers of 2, and what rests on them: tanh, and the scale that turns scores into exponents of 2.
#pragma once
#include <algorithm>
#include <cmath>

#include "vec.h"

namespace dynaxx {

constexpr double LOG2_E = 1.4426950408889634, LN_2 = 0.6931471805599453;

// x = n + f with n whole and |f| <= 1/2, for -127 <= x <= 0.
struct Exponent {
  vec power;  // 2 ** n, 0 for n = -127
  vec f;
};

// Adding ROUND rounds x to n and leaves n + 127, the biased exponent of 2 ** n, in the low bits of the float. The clamp
// makes that exponent 0 at the least, and a float of exponent 0 is 0.
DYNAXX_INLINE Exponent split_exponent(vec x) {
  constexpr float ROUND = 12582912.f + 127.f;  // 1.5 * 2 ** 23 + 127
  x = max_second_if_nan(splat(-127.f), x);
  const vec shifted = x + splat(ROUND);
  return {(vec)((ivec)shifted << 23), x - (shifted - splat(ROUND))};
}

// 2 ** f - 1 for |f| <= 1/2: minimax of 2 ** f in relative error among the polynomials that are 1 at 0. A running maximum
// that stays must not rescale what was summed, or the error would grow with every step.
DYNAXX_INLINE vec exp2_minus_one(vec f) {
  vec p = splat(0x1.41fbbcp-13f);
  p = p * f + splat(0x1.5f3e52p-10f);
  p = p * f + splat(0x1.3b2d4cp-7f);
  p = p * f + splat(0x1.c6aee8p-5f);
  p = p * f + splat(0x1.ebfbdcp-3f);
  p = p * f + splat(0x1.62e430p-1f);
  return p * f;
}

// 2 ** x for x <= 0, exactly 0 below -127 (and for -inf), NaN for NaN. Relative error below 8e-8, and exactly 1 for 0.
DYNAXX_INLINE vec exp2_nonpositive(vec x) {
  const Exponent at = split_exponent(x);
  return (exp2_minus_one(at.f) + splat(1.f)) * at.power;
}

// tanh |x| = -m / (m + 2) with m = exp(-2 |x|) - 1, which is 2 ** f - 1 alone for small x: nothing cancels.
DYNAXX_INLINE vec tanh_of(vec x) {
  const ivec sign = (ivec)x & (ivec{} + INT32_MIN);
  const vec magnitude = (vec)((ivec)x ^ sign);
  const Exponent at = split_exponent(magnitude * splat(float(-2 * LOG2_E)));
  const vec m = at.power * exp2_minus_one(at.f) + (at.power - splat(1.f));
  return (vec)((ivec)(-m / (m + splat(2.f))) | sign);
}

// Make lse, a number, that of one more score, the sink; returns by how much the sum of weights grew.
inline float add_sink(float& lse, float sink) {
  const float before = lse, larger = std::max(before, sink);
  lse = larger + std::log1p(std::exp(std::min(before, sink) - larger));
  return 1.f + std::exp(sink - before);
}

// exp(scale * x) as 2 ** (factor * (sign * x)), factor > 0. The operand takes the sign, which is exact; the factor is
// applied with the subtraction of the largest, in one rounding. A scale of 0 is in the sign: hidden scores stay -inf.
// With a softcap c > 0 the score is tanh(cap * (sign * x)), cap = |scale| / c, and the factor is that of c.
struct Scale {
  float sign, cap, factor;  // cap 0 for no softcap

  explicit Scale(double scale, double softcap = 0)
      : sign(scale > 0 ? 1.f : scale < 0 ? -1.f : 0.f),
        cap(softcap > 0 ? std::max(float(std::fabs(scale) / softcap), std::numeric_limits<float>::min()) : 0.f),
        factor(float(softcap > 0 ? softcap * LOG2_E : scale == 0 ? 1. : std::fabs(scale) * LOG2_E)) {}

  bool capped() const { return cap != 0; }
};

}  // namespace dynaxx
