// SPDX-License-Identifier: Apache-2.0
// Products of bf16 in pairs, for processors that multiply two pairs of bf16 and add both products in fp32. A lane holds
// elements 2d and 2d + 1 of a token. Products of bf16 are exact in fp32, so this matmul rounds no more than one of widened
// rows.
//
// A pair is stored as the bits of a float. No arithmetic touches this float, because a build may flush subnormals.
#pragma once
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "elements.h"

namespace dynaxx {

#if defined(__AVX512BF16__)
constexpr bool HAS_PAIRS = true;
DYNAXX_INLINE vec add_pairs(vec sum, vec a, vec b) { return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
#else
constexpr bool HAS_PAIRS = false;
DYNAXX_INLINE vec add_pairs(vec sum, vec, vec) { return sum; }
#endif

typedef uint16_t loose_half __attribute__((may_alias));

DYNAXX_INLINE int64_t num_pairs(int64_t width) { return (width + 1) / 2; }

// Read a row of bf16 as pairs, padded with a 0 to an even length; `flip` = 0x8000 negates it.
DYNAXX_INLINE void read_pairs(const Tokens& tokens, int64_t token, int64_t width, float* to, uint16_t flip = 0) {
  const uint16_t* __restrict from = tokens.half_row(token);
  loose_half* __restrict halves = (loose_half*)to;
  for (int64_t d = 0; d < width; d++) halves[d] = from[d] ^ flip;
  if (width % 2) halves[width] = 0;
}

}  // namespace dynaxx
