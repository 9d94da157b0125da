// SPDX-License-Identifier: Apache-2.0
// The matrix products of attention over tokens that lie anywhere: a few rows that stay in registers meet rows by pointer.
//
// Widths are multiples of LANES. Rows by pointer are filled up with one that is there, so that no tile has a tail; what
// those rows give is never used. Rows that come next are asked for a cache line at a time, spread over the work: asked
// for at once they would wait for one another.
#pragma once

#include "cache.h"

namespace dynaxx {

constexpr int TOKEN_CHUNK = LANES == 16 ? 48 : 24;  // rows per softmax step: keys and values of them fit the first cache
constexpr int TOKEN_ROWS = 4;                       // rows of q per tile
constexpr int TOKEN_VECS = LANES == 16 ? 4 : 2;     // vectors of a sum per tile: whole cache lines
constexpr int CACHE_LINE = 16;                      // floats

// Rows by pointer per tile: 12 accumulators of 16 registers or 24 of 32, fewer for fewer rows of q. Divides TOKEN_CHUNK.
constexpr int keys_per_tile(int rows) { return rows == 1 ? 8 : rows < 4 ? 4 : LANES == 16 ? 6 : 3; }

struct TokenRows {
  const float* at[TOKEN_CHUNK];
  int count = 0;

  void fill_up() {
    if (count)
      for (int j = count; j < std::min(count + 8, TOKEN_CHUNK); j++) at[j] = at[count - 1];
  }
};

// Rows that come next, null for none, and how many floats of each.
struct TokensAhead {
  const TokenRows* rows;
  int64_t width;

  void ask(int row, int64_t d) const {
    if (d < width && row < rows->count) __builtin_prefetch(rows->at[row] + d);
  }
};

// scores[r * TOKEN_CHUNK + j] = q[r] . rows[j].
template <int R>
static void dot_rows(const float* q, int64_t q_stride, const TokenRows& rows, int64_t width, TokensAhead ahead, float* scores) {
  constexpr int KEYS = keys_per_tile(R);
  for (int j = 0; j < rows.count; j += KEYS) {
    vec sum[R][KEYS] = {};
    const float* row[KEYS];
    DYNAXX_UNROLL
    for (int i = 0; i < KEYS; i++) row[i] = rows.at[j + i];
    for (int64_t d = 0; d < width; d += LANES) {
      if (ahead.rows && d % CACHE_LINE == 0) {
        DYNAXX_UNROLL
        for (int i = 0; i < KEYS; i++) ahead.ask(j + i, d);
      }
      vec key[KEYS];
      DYNAXX_UNROLL
      for (int i = 0; i < KEYS; i++) key[i] = load(row[i] + d);
      DYNAXX_UNROLL
      for (int r = 0; r < R; r++) {
        const vec query = load(q + r * q_stride + d);
        DYNAXX_UNROLL
        for (int i = 0; i < KEYS; i++) sum[r][i] += query * key[i];
      }
    }
    if constexpr (R == 4) {
      DYNAXX_UNROLL
      for (int i = 0; i < KEYS; i++) {
        const vec4 dots = sums_of(sum[0][i], sum[1][i], sum[2][i], sum[3][i]);
        DYNAXX_UNROLL
        for (int r = 0; r < R; r++) scores[r * TOKEN_CHUNK + j + i] = dots[r];
      }
    } else {
      DYNAXX_UNROLL
      for (int r = 0; r < R; r++)
        DYNAXX_UNROLL
      for (int i = 0; i < KEYS; i += 4)
        *(vec4*)(scores + r * TOKEN_CHUNK + j + i) = sums_of(sum[r][i], sum[r][i + 1], sum[r][i + 2], sum[r][i + 3]);
    }
  }
}

// The weights of sums of rows: the weight of row j in sum r is at[r * of_sum + j * of_row].
struct TokenWeights {
  const float* at;
  int64_t of_sum, of_row;
};

// sums[r] = sums[r] * alpha[r] + sum of weighted rows, VECS vectors from d on; alpha null for 1. Terms are summed by
// themselves first: over long rows a sum of sums rounds less.
template <int R, int VECS>
DYNAXX_INLINE void sum_rows_tile(TokenWeights weights, const float* const* rows, int count, int64_t d, const float* alpha,
                                 TokensAhead ahead, float* const* sums) {
  vec sum[R][VECS] = {};
  for (int j = 0; j < count; j++) {
    if (ahead.rows && d % CACHE_LINE == 0)
      for (int line = 0; line < VECS * LANES; line += CACHE_LINE) ahead.ask(j, d + line);
    vec row[VECS];
    DYNAXX_UNROLL
    for (int i = 0; i < VECS; i++) row[i] = load(rows[j] + d + i * LANES);
    DYNAXX_UNROLL
    for (int r = 0; r < R; r++) {
      const vec weight = splat(weights.at[r * weights.of_sum + j * weights.of_row]);
      DYNAXX_UNROLL
      for (int i = 0; i < VECS; i++) sum[r][i] += weight * row[i];
    }
  }
  DYNAXX_UNROLL
  for (int r = 0; r < R; r++)
    DYNAXX_UNROLL
  for (int i = 0; i < VECS; i++) {
    float* at = sums[r] + d + i * LANES;
    store(at, (alpha ? load(at) * splat(alpha[r]) : load(at)) + sum[r][i]);
  }
}

template <int R>
static void sum_rows(TokenWeights weights, const float* const* rows, int count, int64_t width, const float* alpha,
                     TokensAhead ahead, float* const* sums) {
  int64_t d = 0;
  for (; d + TOKEN_VECS * LANES <= width; d += TOKEN_VECS * LANES)
    sum_rows_tile<R, TOKEN_VECS>(weights, rows, count, d, alpha, ahead, sums);
  for (; d < width; d += LANES) sum_rows_tile<R, 1>(weights, rows, count, d, alpha, ahead, sums);
}

constexpr auto DOT_ROWS = tiles_of<TOKEN_ROWS>([](auto rows) { return &dot_rows<rows()>; });
constexpr auto SUM_ROWS = tiles_of<TOKEN_ROWS>([](auto rows) { return &sum_rows<rows()>; });
constexpr TokensAhead NOTHING_AHEAD = {nullptr, 0};

}  // namespace dynaxx
