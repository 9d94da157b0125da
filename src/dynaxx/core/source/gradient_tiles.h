// SPDX-License-Identifier: Apache-2.0
// Register tiles that only the backward pass needs: weights, gradients of scores, gradients of queries.
#pragma once
#include "elements.h"
#include "tiles.h"

namespace dynaxx {

// lse in units of log2 e, as the sum of two floats. With one float, its rounding would be a relative error of all
// weights.
struct Base {
  float high, low;
};

// Compute weights p[r][i] = 2 ** (score * factor - base[r]), where score = rows[r] . panel[:][i], plus a bias that lies
// in p; 0 for hidden pairs. If CAPPED, ds receives the derivative of the cap at the score.
template <int R, bool CAPPED, bool PAIRS>
static void weight_tile(const float* rows, int64_t stride, const float* panel, int64_t D, const uint16_t* words,
                        const Scale& scale, const Base* base, float* __restrict p, float* __restrict ds) {
  vec sum[R][VECS];
  dot<R, PAIRS>(rows, stride, panel, D, sum);
  if (CAPPED) {
    cap_scores<R>(scale.cap, sum);
    DYNAXX_UNROLL
    for (int r = 0; r < R; r++)
      DYNAXX_UNROLL
    for (int i = 0; i < VECS; i++) store(ds + r * PANEL + i * LANES, splat(1.f) - sum[r][i] * sum[r][i]);
  }
  if (scale.biased) add_bias<R>(p, sum);
  hide<R>(words, sum);
  DYNAXX_UNROLL
  for (int r = 0; r < R; r++)
    DYNAXX_UNROLL
  for (int i = 0; i < VECS; i++) {
    const vec exponent = sum[r][i] * scale.factor - splat(base[r].high) - splat(base[r].low);
    store(p + r * PANEL + i * LANES, exp2_nonpositive(exponent));
  }
}

// Sums over pairs of equal distance, of a panel with first row 0, for the tokens whose bits are set; null at: none.
struct BiasSums {
  float* at;  // row r adds to at - r ..
  uint16_t bits;
};

// ds[r][i] = p[r][i] * (rows[r] . panel[:][i] - delta[r]) * scale, times the derivative that ds contains if CAPPED.
template <int R, bool CAPPED, bool PAIRS>
static void score_grad_tile(const float* rows, int64_t stride, const float* panel, int64_t E, const float* delta,
                            float scale, const float* __restrict p, float* __restrict ds, const BiasSums& bias) {
  vec sum[R][VECS];
  dot<R, PAIRS>(rows, stride, panel, E, sum);
  DYNAXX_UNROLL
  for (int r = 0; r < R; r++)
    DYNAXX_UNROLL
  for (int i = 0; i < VECS; i++) {
    const int at = r * PANEL + i * LANES;
    const vec slope = CAPPED ? load(ds + at) * splat(scale) : splat(scale);
    const vec grad = load(p + at) * (sum[r][i] - splat(delta[r]));
    store(ds + at, grad * slope);
    if (!bias.at) continue;
    float* to = bias.at - r + i * LANES;
    store(to, load(to) + (lanes_set(bias.bits, i) ? grad : vec{}));
  }
}

// A panel in which some rows have scores: its ds and its keys.
struct RowTerm {
  const float* ds;  // (R, PANEL)
  const float* k;   // (keys, stride)
  int keys;
};

// Rows of fp32 sums that tiles add to.
struct WideSums {
  float* at;
  int64_t stride;

  void add(int row, int64_t col, vec x) const {
    float* to = at + row * stride + col;
    store(to, load(to) + x);
  }
  void add(int row, int64_t col, float x) const { at[row * stride + col] += x; }
};
// Rows of fp32 sums in two halves that tiles add to.
struct SplitSums {
  uint16_t *high, *low;
  int64_t stride, low_stride;

  void add(int row, int64_t col, vec x) const {
    loose_half_vec& top = *(loose_half_vec*)(high + row * stride + col);
    loose_half_vec& rest = *(loose_half_vec*)(low + row * low_stride + col);
    const ivec before = widen_bits(top) << 16 | widen_bits(rest);
    const ivec sum = (ivec)((vec)before + x);
    top = narrow_bits(sum >> 16);
    rest = narrow_bits(sum);
  }
  void add(int row, int64_t col, float x) const {
    uint16_t &top = high[row * stride + col], &rest = low[row * low_stride + col];
    const uint32_t sum = bits_of(from_bits(uint32_t(top) << 16 | rest) + x);
    top = uint16_t(sum >> 16);
    rest = uint16_t(sum);
  }
};

// dq[r][first + c] += sum over terms and keys of ds[r][key] * k[key][first + c], for c < PANEL; only `cols` columns
// exist.
template <class Sums, int R>
static void query_grad_tile(const RowTerm* terms, int num_terms, int64_t first, int64_t k_stride, int cols,
                            const Sums& dq, int row) {
  vec sum[R][VECS] = {};
  for (int t = 0; t < num_terms; t++) {
    const float* k = terms[t].k + first;
    for (int key = 0; key < terms[t].keys; key++, k += k_stride) {
      vec b[VECS];
      DYNAXX_UNROLL
      for (int i = 0; i < VECS; i++) b[i] = load(k + i * LANES);
      DYNAXX_UNROLL
      for (int r = 0; r < R; r++) {
        const vec a = splat(terms[t].ds[r * PANEL + key]);
        DYNAXX_UNROLL
        for (int i = 0; i < VECS; i++) sum[r][i] += a * b[i];
      }
    }
  }
  DYNAXX_UNROLL
  for (int r = 0; r < R; r++) {
    float part[PANEL];
    DYNAXX_UNROLL
    for (int i = 0; i < VECS; i++)
      if (cols == PANEL)
        dq.add(row + r, first + i * LANES, sum[r][i]);
      else
        store(part + i * LANES, sum[r][i]);
    if (cols < PANEL)
      for (int c = 0; c < cols; c++) dq.add(row + r, first + c, part[c]);
  }
}

template <bool CAPPED, bool PAIRS>
constexpr auto WEIGHT_TILES = tiles_of<SCORE_ROWS>([](auto rows) { return &weight_tile<rows(), CAPPED, PAIRS>; });
template <bool CAPPED, bool PAIRS>
constexpr auto SCORE_GRAD_TILES = tiles_of<SCORE_ROWS>([](auto rows) { return &score_grad_tile<rows(), CAPPED, PAIRS>; });
template <class Sums>
constexpr auto QUERY_GRAD_TILES = tiles_of<SCORE_ROWS>([](auto rows) { return &query_grad_tile<Sums, rows()>; });

}  // namespace dynaxx
