// SPDX-License-Identifier: Apache-2.0
// The two matrix products of decoding. A few query rows stay in registers while keys, then values, stream past them.
//
// Widths are multiples of LANES. These loops also prefetch the rows of k and v that come next, because pages lie at
// arbitrary addresses that no hardware prefetcher predicts.
#pragma once

#include "cache.h"

namespace dynaxx {

constexpr int CHUNK = 32;                         // keys per softmax step; divides every page size above 16
constexpr int QUERY_ROWS = LANES == 16 ? 4 : 2;   // query rows per tile
constexpr int KEYS = 4;                           // keys per tile: 4 x 4 accumulators of 32 registers, or 2 x 4 of 16
constexpr int VALUE_VECS = 4;                     // vectors of values per tile, for the same numbers of accumulators

// Rows to prefetch: one of them for every row that is processed.
struct PrefetchRows {
  const char* data;
  int64_t stride, bytes;  // distance between rows, and length of each
  int rows;

  static void fetch(const PrefetchRows& ahead, int row) {
    if (row < ahead.rows) prefetch(ahead.data + row * ahead.stride, ahead.bytes);
  }
};

// scores (R, CHUNK) = q (R, width) k^T (keys, width).
template <int R>
static void score_keys(const float* q, const float* k, int64_t k_stride, int keys, int64_t width,
                       const PrefetchRows& ahead, float* scores) {
  int j = 0;
  for (; j + KEYS <= keys; j += KEYS) {
    vec sum[R][KEYS] = {};
    DYNAXX_UNROLL
    for (int i = 0; i < KEYS; i++) PrefetchRows::fetch(ahead, j + i);
    for (int64_t d = 0; d < width; d += LANES) {
      vec row[KEYS];
      DYNAXX_UNROLL
      for (int i = 0; i < KEYS; i++) row[i] = load(k + (j + i) * k_stride + d);
      DYNAXX_UNROLL
      for (int r = 0; r < R; r++) {
        const vec query = load(q + r * width + d);
        DYNAXX_UNROLL
        for (int i = 0; i < KEYS; i++) sum[r][i] += query * row[i];
      }
    }
    DYNAXX_UNROLL
    for (int r = 0; r < R; r++)
      DYNAXX_UNROLL
    for (int i = 0; i < KEYS; i += 4)
      *(vec4*)(scores + r * CHUNK + j + i) = sums_of(sum[r][i], sum[r][i + 1], sum[r][i + 2], sum[r][i + 3]);
  }
  for (; j < keys; j++) {
    PrefetchRows::fetch(ahead, j);
    for (int r = 0; r < R; r++) {
      vec sum = {};
      for (int64_t d = 0; d < width; d += LANES) sum += load(q + r * width + d) * load(k + j * k_stride + d);
      scores[r * CHUNK + j] = sum_of(sum);
    }
  }
}

// out (R, width) += weights (R, CHUNK) v (keys, width), for VECS vectors starting at column d.
template <int R, int VECS>
DYNAXX_INLINE void add_value_tile(const float* weights, const float* v, int64_t v_stride, int keys, int64_t width,
                                  int64_t d, const PrefetchRows& ahead, float* out) {
  vec sum[R][VECS];
  DYNAXX_UNROLL
  for (int r = 0; r < R; r++)
    DYNAXX_UNROLL
  for (int i = 0; i < VECS; i++) sum[r][i] = load(out + r * width + d + i * LANES);
  for (int j = 0; j < keys; j++) {
    if (d == 0) PrefetchRows::fetch(ahead, j);
    vec row[VECS];
    DYNAXX_UNROLL
    for (int i = 0; i < VECS; i++) row[i] = load(v + j * v_stride + d + i * LANES);
    DYNAXX_UNROLL
    for (int r = 0; r < R; r++) {
      const vec weight = splat(weights[r * CHUNK + j]);
      DYNAXX_UNROLL
      for (int i = 0; i < VECS; i++) sum[r][i] += weight * row[i];
    }
  }
  DYNAXX_UNROLL
  for (int r = 0; r < R; r++)
    DYNAXX_UNROLL
  for (int i = 0; i < VECS; i++) store(out + r * width + d + i * LANES, sum[r][i]);
}

template <int R>
static void add_values(const float* weights, const float* v, int64_t v_stride, int keys, int64_t width,
                       const PrefetchRows& ahead, float* out) {
  int64_t d = 0;
  for (; d + VALUE_VECS * LANES <= width; d += VALUE_VECS * LANES)
    add_value_tile<R, VALUE_VECS>(weights, v, v_stride, keys, width, d, ahead, out);
  for (; d < width; d += LANES) add_value_tile<R, 1>(weights, v, v_stride, keys, width, d, ahead, out);
}

constexpr auto SCORE_KEYS = tiles_of<QUERY_ROWS>([](auto rows) { return &score_keys<rows()>; });
constexpr auto ADD_VALUES = tiles_of<QUERY_ROWS>([](auto rows) { return &add_values<rows()>; });

}  // namespace dynaxx
