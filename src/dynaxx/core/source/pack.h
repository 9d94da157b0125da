// SPDX-License-Identifier: Apache-2.0
// Copies between rows of the user's tensors and panels, in which column i of every row belongs to query i.
#pragma once
#include <algorithm>
#include <cstring>
#include <utility>

#include "pairs.h"

namespace dynaxx {

typedef float vec4 __attribute__((vector_size(16), aligned(4), may_alias));

#if defined(__clang__) || __GNUC__ >= 12
#define DYNAXX_SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#define DYNAXX_SHUFFLE_LANES(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t index4 __attribute__((vector_size(16)));
#define DYNAXX_SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, index4{i, j, k, l})
#define DYNAXX_SHUFFLE_LANES(a, b, ...) __builtin_shuffle(a, b, ivec{__VA_ARGS__})
#endif

// For rows a and b that are G apart: in each pair of groups of G lanes, swap the second group of a with the first of b.
template <int G, int... LANE>
DYNAXX_INLINE void swap_lanes(vec& a, vec& b, std::integer_sequence<int, LANE...>) {
  const vec low = DYNAXX_SHUFFLE_LANES(a, b, (LANE & G ? LANES + LANE - G : LANE)...);
  b = DYNAXX_SHUFFLE_LANES(a, b, (LANE & G ? LANES + LANE : LANE + G)...);
  a = low;
}

template <int G>
DYNAXX_INLINE void swap_all_lanes(vec (&x)[LANES]) {
  DYNAXX_UNROLL
  for (int i = 0; i < LANES; i++)
    if (!(i & G)) swap_lanes<G>(x[i], x[i + G], std::make_integer_sequence<int, LANES>());
}

// A factor that does nothing, to transpose raw bits.
struct Unscaled {
  template <class X>
  friend X operator*(X x, Unscaled) { return x; }
};

// to[j][i] = from[i][j] * factor for i, j < LANES. Reads and writes whole vectors and transposes in registers.
template <class Factor>
DYNAXX_INLINE void transpose_square(const float* from, int64_t from_stride, float* to, int64_t to_stride, Factor factor) {
  vec x[LANES];
  DYNAXX_UNROLL
  for (int i = 0; i < LANES; i++) x[i] = load(from + i * from_stride) * factor;
  swap_all_lanes<1>(x);
  swap_all_lanes<2>(x);
  if constexpr (LANES > 4) swap_all_lanes<4>(x);
  if constexpr (LANES > 8) swap_all_lanes<8>(x);
  DYNAXX_UNROLL
  for (int i = 0; i < LANES; i++) store(to + i * to_stride, x[i]);
}

// to[j][i] = from[i][j] * factor for i < rows, j < cols.
template <class Factor = Unscaled>
inline void transpose(const float* from, int64_t from_stride, int rows, int64_t cols, float* to, int64_t to_stride,
                      Factor factor = {}) {
  const int64_t whole_rows = rows / LANES * LANES, whole_cols = cols / LANES * LANES;
  for (int64_t i = 0; i < whole_rows; i += LANES)
    for (int64_t j = 0; j < whole_cols; j += LANES)
      transpose_square(from + i * from_stride + j, from_stride, to + j * to_stride + i, to_stride, factor);
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = i < whole_rows ? whole_cols : 0; j < cols; j++)
      to[j * to_stride + i] = from[i * from_stride + j] * factor;
}

// Pack `rows` (<= PANEL) tokens, starting at `token`, into a panel (width, PANEL), times factor; zeros the other
// columns. `space` holds PANEL * width floats.
inline void pack_panel(const Tokens& tokens, int64_t token, int rows, int64_t width, float factor, float* space,
                       float* panel) {
  if (rows < PANEL) std::memset(panel, 0, sizeof(float) * width * PANEL);
  if (tokens.element == Element::FP32) {
    transpose(tokens.row(token), tokens.stride, rows, width, panel, PANEL, factor);
    return;
  }
  for (int r = 0; r < rows; r++) tokens.read(token + r, width, space + r * width);
  transpose(space, width, rows, width, panel, PANEL, factor);
}

// Like pack_panel, for bf16 in pairs: a panel (num_pairs(width), PANEL), times a sign.
inline void pack_pairs(const Tokens& tokens, int64_t token, int rows, int64_t width, float sign, float* space,
                       float* panel) {
  const int64_t pairs = num_pairs(width);
  if (rows < PANEL) std::memset(panel, 0, sizeof(float) * pairs * PANEL);
  for (int r = 0; r < rows; r++) read_pairs(tokens, token + r, width, space + r * pairs, sign < 0 ? 0x8000 : 0);
  transpose(space, pairs, rows, pairs, panel, PANEL);
}

// Write the first `rows` columns of a panel (width, PANEL) to tokens, starting at `token`. `space` holds PANEL * width
// floats.
inline void unpack_panel(const float* panel, int64_t width, int rows, const Results& results, int64_t token,
                         float* space) {
  if (results.element == Element::FP32) {
    transpose(panel, PANEL, int(width), rows, results.row(token), results.stride);
    return;
  }
  transpose(panel, PANEL, int(width), rows, space, width);
  for (int r = 0; r < rows; r++) results.write(token + r, width, space + r * width);
}

}  // namespace dynaxx
