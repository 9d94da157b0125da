// 2 ** x for x <= 0, exactly 0 below -127 (and for -inf), NaN for NaN. Relative error below 8e-8, and exactly 1 for 0.
#pragma once
#include "vec.h"

namespace dynaxx {

// x = n + f with n whole and |f| <= 1/2. Adding ROUND rounds x to n and leaves n + 127, the biased exponent of 2 ** n,
// in the low bits of the float. The clamp makes that exponent 0 at the least, and a float of exponent 0 is 0.
DYNAXX_INLINE vec exp2_nonpositive(vec x) {
  constexpr float ROUND = 12582912.f + 127.f;  // 1.5 * 2 ** 23 + 127
  x = max_second_if_nan(splat(-127.f), x);
  const vec shifted = x + splat(ROUND);
  const vec f = x - (shifted - splat(ROUND));
  // Minimax of 2 ** f in relative error among the polynomials that are 1 at 0: a running maximum that stays must not
  // rescale what was summed, or the error would grow with every step.
  vec p = splat(0x1.41fbbcp-13f);
  p = p * f + splat(0x1.5f3e52p-10f);
  p = p * f + splat(0x1.3b2d4cp-7f);
  p = p * f + splat(0x1.c6aee8p-5f);
  p = p * f + splat(0x1.ebfbdcp-3f);
  p = p * f + splat(0x1.62e430p-1f);
  p = p * f + splat(1.f);
  return p * (vec)((ivec)shifted << 23);
}

constexpr double LOG2_E = 1.4426950408889634, LN_2 = 0.6931471805599453;

// exp(scale * x) as 2 ** (factor * (sign * x)), factor > 0. The operand takes the sign, which is exact; the factor is
// applied with the subtraction of the largest, in one rounding. A scale of 0 is in the sign: hidden scores stay -inf.
struct Scale {
  float sign, factor;

  explicit Scale(double scale)
      : sign(scale > 0 ? 1.f : scale < 0 ? -1.f : 0.f),
        factor(scale == 0 ? 1.f : float((scale < 0 ? -scale : scale) * LOG2_E)) {}
};

}  // namespace dynaxx
