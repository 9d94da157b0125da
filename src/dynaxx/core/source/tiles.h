// SPDX-License-Identifier: Apache-2.0
// The matmuls of a panel, in register tiles of R rows by PANEL columns.
//
// Every right operand is a row of a panel (PANEL tokens side by side), every left one a broadcast scalar, so neither
// needs packing for the tile, and what stands between the matmuls never crosses lanes.
#pragma once
#include <array>
#include <utility>

#include "exp2.h"
#include "pairs.h"

namespace dynaxx {

// Consecutive visited rows that one panel meets: forward of k and v, backward of q and of out's gradient.
struct Span {
  const float* k;
  const float* v;
  int rows;
  int at;                 // place of the first row's scores in the step
  const uint16_t* words;  // (rows,) which of the panel's tokens see the row, null for all
};

// The next tile's rows of `left`: even shares, so that no tile is left with too few accumulators to hide latency.
DYNAXX_INLINE int next_tile(int left, int most) {
  return left >= 2 * most ? most : left > most ? (left + 1) / 2 : left;
}

constexpr int64_t DOT_PART = 128;  // terms summed in a row: sums of sums keep the rounding of long rows down

// sum[r][i] = sum_d rows[r][d] * panel[d][i]; of PAIRS, D is their number.
template <int R, bool PAIRS>
DYNAXX_INLINE void dot(const float* __restrict rows, int64_t stride, const float* __restrict panel, int64_t D,
                       vec (&sum)[R][VECS]) {
  vec total[R][VECS] = {};
  for (int64_t first = 0; first < D; first += DOT_PART) {
    const int64_t end = first + DOT_PART < D ? first + DOT_PART : D;
    DYNAXX_UNROLL
    for (int r = 0; r < R; r++)
      DYNAXX_UNROLL
    for (int i = 0; i < VECS; i++) sum[r][i] = vec{};
    for (int64_t d = first; d < end; d++) {
      vec b[VECS];
      DYNAXX_UNROLL
      for (int i = 0; i < VECS; i++) b[i] = load(panel + d * PANEL + i * LANES);
      DYNAXX_UNROLL
      for (int r = 0; r < R; r++) {
        const vec a = splat(rows[r * stride + d]);
        DYNAXX_UNROLL
        for (int i = 0; i < VECS; i++) sum[r][i] = PAIRS ? add_pairs(sum[r][i], a, b[i]) : sum[r][i] + a * b[i];
      }
    }
    if (D <= DOT_PART) return;
    for (int r = 0; r < R; r++)
      for (int i = 0; i < VECS; i++) total[r][i] += sum[r][i];
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < VECS; i++) sum[r][i] = total[r][i];
}

// Whether this build has products of pairs for these elements; a scale of 0 must meet inf and NaN as numbers.
DYNAXX_INLINE bool multiplies_pairs(int64_t element, const Scale& scale) {
  return HAS_PAIRS && Element(element) == Element::BF16 && scale.sign != 0;
}

// Hidden pairs become -inf.
template <int R>
DYNAXX_INLINE void hide(const uint16_t* words, vec (&scores)[R][VECS]) {
  if (!words) return;
  DYNAXX_UNROLL
  for (int r = 0; r < R; r++)
    DYNAXX_UNROLL
  for (int i = 0; i < VECS; i++) scores[r][i] = lanes_set(words[r], i) ? scores[r][i] : splat(NEG_INF);
}

// Scores become tanh(cap * score).
template <int R>
DYNAXX_INLINE void cap_scores(float cap, vec (&scores)[R][VECS]) {
  DYNAXX_UNROLL
  for (int r = 0; r < R; r++)
    DYNAXX_UNROLL
  for (int i = 0; i < VECS; i++) scores[r][i] = tanh_of(scores[r][i] * splat(cap));
}

// scores[r][i] = rows[r] . panel[:][i], capped or not, hidden pairs -inf; top[i] = max(top[i], scores[..][i]).
template <int R, bool CAPPED, bool PAIRS>
static void score_tile(const float* rows, int64_t stride, const float* panel, int64_t D, const uint16_t* words,
                       float cap, float* __restrict scores, float* __restrict top) {
  vec sum[R][VECS];
  dot<R, PAIRS>(rows, stride, panel, D, sum);
  if (CAPPED) cap_scores<R>(cap, sum);
  hide<R>(words, sum);
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

// panel[c][i] = panel[c][i] * alpha[i] + sum over the rows of all spans row[first + c] * weights[row][i], c < R.
// A span's row is its v, or its k where FROM_K. The step is summed by itself first: over long rows a sum of sums rounds less.
template <int R, bool FROM_K>
static void sum_tile(const Span* spans, int num_spans, int64_t first, int64_t stride, const float* __restrict weights,
                     const float* __restrict alpha, float* __restrict panel) {
  vec sum[R][VECS];
  DYNAXX_UNROLL
  for (int c = 0; c < R; c++)
    DYNAXX_UNROLL
  for (int i = 0; i < VECS; i++) sum[c][i] = vec{};
  for (int s = 0; s < num_spans; s++) {
    const float* row = (FROM_K ? spans[s].k : spans[s].v) + first;
    const float* weight = weights + spans[s].at * PANEL;
    for (int r = 0; r < spans[s].rows; r++, row += stride, weight += PANEL) {
      vec b[VECS];
      DYNAXX_UNROLL
      for (int i = 0; i < VECS; i++) b[i] = load(weight + i * LANES);
      DYNAXX_UNROLL
      for (int c = 0; c < R; c++) {
        const vec a = splat(row[c]);
        DYNAXX_UNROLL
        for (int i = 0; i < VECS; i++) sum[c][i] += a * b[i];
      }
    }
  }
  DYNAXX_UNROLL
  for (int c = 0; c < R; c++)
    DYNAXX_UNROLL
  for (int i = 0; i < VECS; i++) {
    float* at = panel + c * PANEL + i * LANES;
    const vec before = alpha ? load(at) * load(alpha + i * LANES) : load(at);
    store(at, before + sum[c][i]);
  }
}

// The instances for 1 .. SCORE_ROWS and 1 .. VALUE_ROWS rows: TILES[R - 1].
template <bool CAPPED, bool PAIRS, int... R>
constexpr auto score_tiles(std::integer_sequence<int, R...>) {
  return std::array{&score_tile<R + 1, CAPPED, PAIRS>...};
}

template <bool FROM_K, int... R>
constexpr auto sum_tiles(std::integer_sequence<int, R...>) {
  return std::array{&sum_tile<R + 1, FROM_K>...};
}

template <bool CAPPED, bool PAIRS>
constexpr auto SCORE_TILES = score_tiles<CAPPED, PAIRS>(std::make_integer_sequence<int, SCORE_ROWS>());

template <bool FROM_K>
constexpr auto SUM_TILES = sum_tiles<FROM_K>(std::make_integer_sequence<int, VALUE_ROWS>());

// panel (width, PANEL) = panel * alpha + rows^T weights, over the rows of all spans; alpha null for 1.
template <bool FROM_K>
static void add_rows(const Span* spans, int num_spans, int64_t stride, int64_t width, const float* weights,
                     const float* alpha, float* panel) {
  for (int64_t c = 0; c < width;) {
    const int cols = next_tile(int(width - c), VALUE_ROWS);
    SUM_TILES<FROM_K>[cols - 1](spans, num_spans, c, stride, weights, alpha, panel + c * PANEL);
    c += cols;
  }
}

}  // namespace dynaxx
