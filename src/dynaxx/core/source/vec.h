// SPDX-License-Identifier: Apache-2.0
// Vectors of the widest registers that the build may use, and the panel: 16 queries side by side.
//
// Uses plain vector extensions of GCC and Clang: the same source serves SSE2, AVX2, AVX-512 and NEON; only LANES
// differs.
#pragma once
#include <array>
#include <cstdint>
#include <limits>
#include <utility>

#define DYNAXX_EXPORT __attribute__((visibility("default")))
#define DYNAXX_INLINE static inline __attribute__((always_inline))
#define DYNAXX_UNROLL _Pragma("GCC unroll 16")

namespace dynaxx {

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int SCORE_ROWS = 8, VALUE_ROWS = 16;  // more than 8 distant rows would exhaust the address registers
#elif defined(__AVX2__)
constexpr int LANES = 8;
constexpr int SCORE_ROWS = 6, VALUE_ROWS = 6;  // 6 x 2 accumulators, 2 operands and 1 broadcast of 16 registers
#else
constexpr int LANES = 4;
constexpr int SCORE_ROWS = 2, VALUE_ROWS = 2;  // 2 x 4 accumulators, 4 operands and 1 broadcast of 16 registers
#endif

constexpr int PANEL = 16;  // queries per panel: divides every block size, and fills one AVX-512 register
constexpr int VECS = PANEL / LANES;
constexpr float NEG_INF = -std::numeric_limits<float>::infinity();

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef float loose_vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

typedef uint16_t half_vec __attribute__((vector_size(LANES * 2)));
typedef uint16_t loose_half_vec __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

// Conversion of lanes between 16 and 32 bits, keeping the low half.
DYNAXX_INLINE ivec widen_bits(half_vec x) { return __builtin_convertvector(x, ivec); }
DYNAXX_INLINE half_vec narrow_bits(ivec x) { return __builtin_convertvector(x, half_vec); }

DYNAXX_INLINE vec load(const float* p) { return *(const loose_vec*)p; }
DYNAXX_INLINE void store(float* p, vec x) { *(loose_vec*)p = x; }
DYNAXX_INLINE vec splat(float x) { return x - vec{}; }

// Like the maxps instruction: returns the second operand if either is NaN.
DYNAXX_INLINE vec max_second_if_nan(vec a, vec b) { return a > b ? a : b; }

// Return whether a condition holds in any lane.
DYNAXX_INLINE bool any(ivec condition) {
  int32_t found = 0;
  DYNAXX_UNROLL
  for (int lane = 0; lane < LANES; lane++) found |= condition[lane];
  return found != 0;
}

// Return a lane mask from `bits`: lane j of a panel's vector `i` is bit i * LANES + j.
DYNAXX_INLINE ivec lanes_set(uint16_t bits, int i) {
  ivec lane_bit;
  DYNAXX_UNROLL
  for (int lane = 0; lane < LANES; lane++) lane_bit[lane] = 1 << lane;
  const ivec shifted = int32_t(bits >> (i * LANES)) - ivec{};
  return (shifted & lane_bit) != 0;
}

template <class Tile, int... R>
constexpr auto tiles_of(Tile tile, std::integer_sequence<int, R...>) {
  return std::array{tile(std::integral_constant<int, R + 1>())...};
}

// Return an array of a tile's instances for 1 .. MOST rows, at index rows - 1. `tile` returns the instance for `rows()`.
template <int MOST, class Tile>
constexpr auto tiles_of(Tile tile) {
  return tiles_of(tile, std::make_integer_sequence<int, MOST>());
}

}  // namespace dynaxx
