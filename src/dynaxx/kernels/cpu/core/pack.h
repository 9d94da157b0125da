// Moving rows between the user's tensors and the panel form, where column i of every row belongs to query i.
#pragma once
#include <algorithm>
#include <cstring>

#include "elements.h"

namespace dynaxx {

typedef float vec4 __attribute__((vector_size(16), aligned(4), may_alias));

#if defined(__clang__) || __GNUC__ >= 12
#define DYNAXX_SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
typedef int32_t index4 __attribute__((vector_size(16)));
#define DYNAXX_SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, index4{i, j, k, l})
#endif

// to[j][i] = from[i][j] * factor for i, j < 4.
DYNAXX_INLINE void transpose_4x4(const float* from, int64_t from_stride, float* to, int64_t to_stride, float factor) {
  const vec4 a = *(const vec4*)from, b = *(const vec4*)(from + from_stride);
  const vec4 c = *(const vec4*)(from + 2 * from_stride), d = *(const vec4*)(from + 3 * from_stride);
  const vec4 ab_low = DYNAXX_SHUFFLE(a, b, 0, 4, 1, 5), ab_high = DYNAXX_SHUFFLE(a, b, 2, 6, 3, 7);
  const vec4 cd_low = DYNAXX_SHUFFLE(c, d, 0, 4, 1, 5), cd_high = DYNAXX_SHUFFLE(c, d, 2, 6, 3, 7);
  *(vec4*)to = DYNAXX_SHUFFLE(ab_low, cd_low, 0, 1, 4, 5) * factor;
  *(vec4*)(to + to_stride) = DYNAXX_SHUFFLE(ab_low, cd_low, 2, 3, 6, 7) * factor;
  *(vec4*)(to + 2 * to_stride) = DYNAXX_SHUFFLE(ab_high, cd_high, 0, 1, 4, 5) * factor;
  *(vec4*)(to + 3 * to_stride) = DYNAXX_SHUFFLE(ab_high, cd_high, 2, 3, 6, 7) * factor;
}

// to[j][i] = from[i][j] * factor for i < rows, j < cols.
inline void transpose(const float* from, int64_t from_stride, int rows, int64_t cols, float* to, int64_t to_stride,
                      float factor = 1.f) {
  const int64_t rows4 = rows / 4 * 4, cols4 = cols / 4 * 4;
  for (int64_t j = 0; j < cols4; j += 4)
    for (int64_t i = 0; i < rows4; i += 4)
      transpose_4x4(from + i * from_stride + j, from_stride, to + j * to_stride + i, to_stride, factor);
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = i < rows4 ? cols4 : 0; j < cols; j++) to[j * to_stride + i] = from[i * from_stride + j] * factor;
}

// `rows` (<= PANEL) tokens from `token` on as a panel (width, PANEL), times factor; the panel's other columns are 0.
// `space` holds PANEL * width floats.
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

// The first `rows` columns of a panel (width, PANEL) to tokens from `token` on. `space` holds PANEL * width floats.
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
