// The two matmuls of a panel, in register tiles of up to TILE_ROWS rows by PANEL queries.
//
// R rows of the tile; D head_dim of q and k, E of v; every right operand is a panel row of PANEL queries, every left
// one a broadcast scalar, so neither needs packing and the softmax between them never crosses lanes.
#pragma once
#include <array>
#include <utility>

#include "vec.h"

namespace dynaxx {

// Keys that one panel visits together: consecutive rows of k and of v, and who sees them.
struct Span {
  const float* k;
  const float* v;
  int rows;
  const uint16_t* words;  // (rows,) which queries see the key, null for all
};

// The next tile's rows of `left`: even shares, so that no tile is left with too few accumulators to hide latency.
DYNAXX_INLINE int next_tile(int left, int most) {
  return left >= 2 * most ? most : left > most ? (left + 1) / 2 : left;
}

constexpr int64_t DOT_PART = 128;  // terms summed in a row: sums of sums keep the rounding of long rows down

// scores[r][i] = sum_d k[r][d] * q[d][i], hidden pairs -inf; top[i] = max(top[i], scores[..][i]).
template <int R>
static void score_tile(const float* __restrict k, int64_t k_stride, const float* __restrict q, int64_t D,
                       const uint16_t* words, float* __restrict scores, float* __restrict top) {
  vec sum[R][VECS] = {};
  for (int64_t first = 0; first < D; first += DOT_PART) {
    const int64_t end = first + DOT_PART < D ? first + DOT_PART : D;
    for (int64_t d = first; d < end; d++) {
      vec b[VECS];
      DYNAXX_UNROLL
      for (int i = 0; i < VECS; i++) b[i] = load(q + d * PANEL + i * LANES);
      DYNAXX_UNROLL
      for (int r = 0; r < R; r++) {
        const vec a = splat(k[r * k_stride + d]);
        DYNAXX_UNROLL
        for (int i = 0; i < VECS; i++) sum[r][i] += a * b[i];
      }
    }
    if (first == 0 && end == D) break;
    DYNAXX_UNROLL
    for (int r = 0; r < R; r++)
      DYNAXX_UNROLL
    for (int i = 0; i < VECS; i++) {
      float* part = scores + r * PANEL + i * LANES;
      const vec total = first ? load(part) + sum[r][i] : sum[r][i];
      if (end < D) store(part, total);
      sum[r][i] = end < D ? vec{} : total;
    }
  }
  if (words) {
    DYNAXX_UNROLL
    for (int r = 0; r < R; r++)
      DYNAXX_UNROLL
    for (int i = 0; i < VECS; i++) sum[r][i] = lanes_set(words[r], i) ? sum[r][i] : splat(NEG_INF);
  }
  DYNAXX_UNROLL
  for (int i = 0; i < VECS; i++) {
    vec highest = load(top + i * LANES);
    DYNAXX_UNROLL
    for (int r = 0; r < R; r++) {
      highest = max_second_if_nan(highest, sum[r][i]);
      store(scores + r * PANEL + i * LANES, sum[r][i]);
    }
    store(top + i * LANES, highest);
  }
}

// out[r][i] = out[r][i] * alpha[i] + sum over the keys of all spans v[key][r] * weights[key][i].
template <int R>
static void value_tile(const Span* spans, int num_spans, int64_t first, int64_t v_stride,
                       const float* __restrict weights, const float* __restrict alpha, float* __restrict out) {
  vec sum[R][VECS];
  DYNAXX_UNROLL
  for (int r = 0; r < R; r++)
    DYNAXX_UNROLL
  for (int i = 0; i < VECS; i++) sum[r][i] = load(out + r * PANEL + i * LANES) * load(alpha + i * LANES);
  for (int s = 0; s < num_spans; s++) {
    const float* v = spans[s].v + first;
    for (int key = 0; key < spans[s].rows; key++, v += v_stride, weights += PANEL) {
      vec b[VECS];
      DYNAXX_UNROLL
      for (int i = 0; i < VECS; i++) b[i] = load(weights + i * LANES);
      DYNAXX_UNROLL
      for (int r = 0; r < R; r++) {
        const vec a = splat(v[r]);
        DYNAXX_UNROLL
        for (int i = 0; i < VECS; i++) sum[r][i] += a * b[i];
      }
    }
  }
  DYNAXX_UNROLL
  for (int r = 0; r < R; r++)
    DYNAXX_UNROLL
  for (int i = 0; i < VECS; i++) store(out + r * PANEL + i * LANES, sum[r][i]);
}

using ScoreTile = decltype(&score_tile<1>);
using ValueTile = decltype(&value_tile<1>);

template <int... R>
constexpr std::array<ScoreTile, sizeof...(R)> score_tiles(std::integer_sequence<int, R...>) {
  return {&score_tile<R + 1>...};
}

template <int... R>
constexpr std::array<ValueTile, sizeof...(R)> value_tiles(std::integer_sequence<int, R...>) {
  return {&value_tile<R + 1>...};
}

constexpr auto SCORE_TILES = score_tiles(std::make_integer_sequence<int, SCORE_ROWS>());  // [R - 1]
constexpr auto VALUE_TILES = value_tiles(std::make_integer_sequence<int, VALUE_ROWS>());

}  // namespace dynaxx
