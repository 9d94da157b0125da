// The register tiles of the backward pass that tiles.h does not have: weights, gradients of scores, gradients of queries.
#pragma once
#include "exp2.h"
#include "tiles.h"

namespace dynaxx {

// lse in units of log2 e, in two floats: its rounding to one would be a relative error of every weight.
struct Base {
  float high, low;
};

// p[r][i] = 2 ** (rows[r] . panel[:][i] * factor - base[r]), 0 for hidden pairs.
template <int R>
static void weight_tile(const float* rows, int64_t stride, const float* panel, int64_t D, const uint16_t* words,
                 float factor, const Base* base, float* __restrict p) {
  vec sum[R][VECS];
  dot<R>(rows, stride, panel, D, sum);
  hide<R>(words, sum);
  DYNAXX_UNROLL
  for (int r = 0; r < R; r++)
    DYNAXX_UNROLL
  for (int i = 0; i < VECS; i++) {
    const vec exponent = sum[r][i] * factor - splat(base[r].high) - splat(base[r].low);
    store(p + r * PANEL + i * LANES, exp2_nonpositive(exponent));
  }
}

// ds[r][i] = p[r][i] * (rows[r] . panel[:][i] - delta[r]) * scale.
template <int R>
static void score_grad_tile(const float* rows, int64_t stride, const float* panel, int64_t E, const float* delta, float scale,
                     const float* __restrict p, float* __restrict ds) {
  vec sum[R][VECS];
  dot<R>(rows, stride, panel, E, sum);
  DYNAXX_UNROLL
  for (int r = 0; r < R; r++)
    DYNAXX_UNROLL
  for (int i = 0; i < VECS; i++) {
    const int at = r * PANEL + i * LANES;
    store(ds + at, load(p + at) * (sum[r][i] - splat(delta[r])) * splat(scale));
  }
}

// Panels whose scores some rows have: where their ds begin, and their keys.
struct RowTerm {
  const float* ds;  // (R, PANEL)
  const float* k;   // (keys, stride)
  int keys;
};

// dq[r][c] += sum over terms and keys ds[r][key] * k[key][first + c], c < PANEL; only `cols` of them are there.
template <int R>
static void query_grad_tile(const RowTerm* terms, int num_terms, int64_t first, int64_t k_stride, int cols, float* dq,
                     int64_t dq_stride) {
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
    for (int i = 0; i < VECS; i++) {
      float* to = dq + r * dq_stride + i * LANES;
      if (cols == PANEL)
        store(to, load(to) + sum[r][i]);
      else
        store(part + i * LANES, sum[r][i]);
    }
    if (cols < PANEL)
      for (int c = 0; c < cols; c++) dq[r * dq_stride + c] += part[c];
  }
}

template <int... R>
constexpr auto weight_tiles(std::integer_sequence<int, R...>) {
  return std::array{&weight_tile<R + 1>...};
}
template <int... R>
constexpr auto score_grad_tiles(std::integer_sequence<int, R...>) {
  return std::array{&score_grad_tile<R + 1>...};
}
template <int... R>
constexpr auto query_grad_tiles(std::integer_sequence<int, R...>) {
  return std::array{&query_grad_tile<R + 1>...};
}
constexpr auto WEIGHT_TILES = weight_tiles(std::make_integer_sequence<int, SCORE_ROWS>());
constexpr auto SCORE_GRAD_TILES = score_grad_tiles(std::make_integer_sequence<int, SCORE_ROWS>());
constexpr auto QUERY_GRAD_TILES = query_grad_tiles(std::make_integer_sequence<int, SCORE_ROWS>());

}  // namespace dynaxx
