// SPDX-License-Identifier: Apache-2.0
// The matmuls of a panel, in register tiles of R rows by PANEL columns.
//
// The right operand is always a row of a panel (PANEL tokens side by side), and the left one a broadcast scalar.
// Neither needs further packing, and operations between the matmuls never cross lanes.
#pragma once

#include "exp2.h"
#include "pairs.h"

namespace dynaxx {

// Consecutive visited rows that one panel reads: of k and v, or in the backward pass of q and the gradient of out.
struct Span {
  const float* k;
  const float* v;
  int rows;
  int at;                 // index of the first row in the step
  const uint16_t* words;  // (rows,) bits of the panel's tokens that see each row; null: all
};

// Return the rows of the next tile, given `left` rows. Shares are even, so that no tile has too few accumulators to
// hide latency.
DYNAXX_INLINE int next_tile(int left, int most) {
  return left >= 2 * most ? most : left > most ? (left + 1) / 2 : left;
}

constexpr int64_t DOT_PART = 128;  // terms per partial sum: adding partial sums rounds less than one long sum

// sum[r][i] = sum_d rows[r][d] * panel[d][i]; with PAIRS, D counts pairs.
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

// Return whether this build multiplies these elements in pairs; with scale 0, inf and NaN need fp32 arithmetic.
DYNAXX_INLINE bool multiplies_pairs(int64_t element, const Scale& scale) {
  return HAS_PAIRS && Element(element) == Element::BF16 && scale.sign != 0;
}

// Set hidden pairs to -inf.
template <int R>
DYNAXX_INLINE void hide(const uint16_t* words, vec (&scores)[R][VECS]) {
  if (!words) return;
  DYNAXX_UNROLL
  for (int r = 0; r < R; r++)
    DYNAXX_UNROLL
  for (int i = 0; i < VECS; i++) scores[r][i] = lanes_set(words[r], i) ? scores[r][i] : splat(NEG_INF);
}

// Replace scores by tanh(cap * score).
template <int R>
DYNAXX_INLINE void cap_scores(float cap, vec (&scores)[R][VECS]) {
  DYNAXX_UNROLL
  for (int r = 0; r < R; r++)
    DYNAXX_UNROLL
  for (int i = 0; i < VECS; i++) scores[r][i] = tanh_of(scores[r][i] * splat(cap));
}

// Add the bias that lies in the place of the scores.
template <int R>
DYNAXX_INLINE void add_bias(const float* bias, vec (&scores)[R][VECS]) {
  DYNAXX_UNROLL
  for (int r = 0; r < R; r++)
    DYNAXX_UNROLL
  for (int i = 0; i < VECS; i++) scores[r][i] += load(bias + r * PANEL + i * LANES);
}

// scores[r][i] = rows[r] . panel[:][i], optionally capped, plus a bias, -inf for hidden pairs; top[i] = max(top[i],
// scores[..][i]).
template <int R, bool CAPPED, bool PAIRS>
static void score_tile(const float* rows, int64_t stride, const float* panel, int64_t D, const uint16_t* words,
                       const Scale& scale, float* __restrict scores, float* __restrict top) {
  vec sum[R][VECS];
  dot<R, PAIRS>(rows, stride, panel, D, sum);
  if (CAPPED) cap_scores<R>(scale.cap, sum);
  if (scale.biased) add_bias<R>(scores, sum);
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

// panel[c][i] = panel[c][i] * alpha[i] + sum of row[first + c] * weights[row][i] over the rows of all spans, for c < R.
// Rows are those of v, or of k if FROM_K. Each step is summed separately, because adding partial sums rounds less.
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

// Like score_tile without masks and caps, for two panels that read the same rows; D <= DOT_PART. Sums are equal bit by bit.
template <int R>
static void score_pair_tile(const float* rows, int64_t stride, const float* const (&panels)[2], int64_t D,
                            float* const (&scores)[2], float* const (&tops)[2]) {
  vec sum[2][R][VECS] = {};
  const float *first = panels[0], *second = panels[1];
  for (int64_t d = 0; d < D; d++) {
    vec b[2][VECS];
    DYNAXX_UNROLL
    for (int i = 0; i < VECS; i++) b[0][i] = load(first + d * PANEL + i * LANES), b[1][i] = load(second + d * PANEL + i * LANES);
    DYNAXX_UNROLL
    for (int r = 0; r < R; r++) {
      const vec a = splat(rows[r * stride + d]);
      DYNAXX_UNROLL
      for (int i = 0; i < VECS; i++) sum[0][r][i] += a * b[0][i], sum[1][r][i] += a * b[1][i];
    }
  }
  DYNAXX_UNROLL
  for (int p = 0; p < 2; p++)
    DYNAXX_UNROLL
  for (int i = 0; i < VECS; i++) {
    vec highest = load(tops[p] + i * LANES);
    DYNAXX_UNROLL
    for (int r = 0; r < R; r++) {
      highest = max_second_if_nan(highest, sum[p][r][i]);
      store(scores[p] + r * PANEL + i * LANES, sum[p][r][i]);
    }
    store(tops[p] + i * LANES, highest);
  }
}

// Like sum_tile<R, false> for two panels that read the same rows.
template <int R>
static void sum_pair_tile(const Span* spans, int num_spans, int64_t first, int64_t stride, const float* const (&weights)[2],
                          const float* const (&alphas)[2], float* const (&panels)[2]) {
  vec sum[2][R][VECS] = {};
  for (int s = 0; s < num_spans; s++) {
    const float* row = spans[s].v + first;
    const float *one = weights[0] + spans[s].at * PANEL, *two = weights[1] + spans[s].at * PANEL;
    for (int r = 0; r < spans[s].rows; r++, row += stride, one += PANEL, two += PANEL) {
      vec b[2][VECS];
      DYNAXX_UNROLL
      for (int i = 0; i < VECS; i++) b[0][i] = load(one + i * LANES), b[1][i] = load(two + i * LANES);
      DYNAXX_UNROLL
      for (int c = 0; c < R; c++) {
        const vec a = splat(row[c]);
        DYNAXX_UNROLL
        for (int i = 0; i < VECS; i++) sum[0][c][i] += a * b[0][i], sum[1][c][i] += a * b[1][i];
      }
    }
  }
  DYNAXX_UNROLL
  for (int p = 0; p < 2; p++)
    DYNAXX_UNROLL
  for (int c = 0; c < R; c++)
    DYNAXX_UNROLL
  for (int i = 0; i < VECS; i++) {
    float* at = panels[p] + c * PANEL + i * LANES;
    store(at, load(at) * load(alphas[p] + i * LANES) + sum[p][c][i]);
  }
}

constexpr int PAIR_VALUE_ROWS = VALUE_ROWS / 2;
constexpr auto SCORE_PAIR_TILES = tiles_of<SCORE_ROWS>([](auto rows) { return &score_pair_tile<rows()>; });
constexpr auto SUM_PAIR_TILES = tiles_of<PAIR_VALUE_ROWS>([](auto rows) { return &sum_pair_tile<rows()>; });
template <bool CAPPED, bool PAIRS>
constexpr auto SCORE_TILES = tiles_of<SCORE_ROWS>([](auto rows) { return &score_tile<rows(), CAPPED, PAIRS>; });
template <bool FROM_K>
constexpr auto SUM_TILES = tiles_of<VALUE_ROWS>([](auto rows) { return &sum_tile<rows(), FROM_K>; });

// panel (width, PANEL) = panel * alpha + rows^T weights, over the rows of all spans; null alpha means 1.
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
