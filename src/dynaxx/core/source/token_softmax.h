// SPDX-License-Identifier: Apache-2.0
// The q heads that share a choice of tokens, at one position: their queries, and the running state of their softmax.
#pragma once
#include <cmath>

#include "exp2.h"
#include "token_tiles.h"

namespace dynaxx {

struct TokenState {
  float* q;    // (rows, D) times the scale's sign
  float* out;  // (rows, E) sum of weights * values so far
  float* top;  // (rows,) largest score so far
  float* sum;  // (rows,) sum of 2 ** ((score - top) * factor) so far

  void reset(int64_t rows, int64_t E) const {
    std::fill(out, out + rows * E, 0.f);
    std::fill(top, top + rows, NEG_INF);
    std::fill(sum, sum + rows, 0.f);
  }
};

// Widths of whole vectors, and how scores are scaled.
struct TokenShape {
  int64_t rows, D, E;
  Scale scale;
};

// Turn `count` scores of one row into weights, in place; return the factor that rescales the sums so far.
inline float weigh_row(const Scale& scale, int count, float& top, float& sum, float* scores) {
  if (scale.capped())
    for (int j = 0; j < count; j += LANES) store(scores + j, tanh_of(load(scores + j) * splat(scale.cap)));
  std::fill(scores + count, scores + (count + LANES - 1) / LANES * LANES, NEG_INF);
  vec largest = splat(NEG_INF);
  for (int j = 0; j < count; j += LANES) largest = max_second_if_nan(largest, load(scores + j));
  float above = top;
  for (int i = 0; i < LANES; i++) above = largest[i] > above || largest[i] != largest[i] ? largest[i] : above;
  if (above == NEG_INF) {
    std::fill(scores, scores + count, 0.f);
    return 1.f;
  }
  const float alpha = above == top ? 1.f : exp2_nonpositive(splat((top - above) * scale.factor))[0];
  vec total = {};
  for (int j = 0; j < count; j += LANES) {
    const vec weight = exp2_nonpositive((load(scores + j) - splat(above)) * splat(scale.factor));
    total += weight;
    store(scores + j, weight);
  }
  top = above;
  sum = sum * alpha + sum_of(total);
  return alpha;
}

// Attend from all rows of a position to a chunk of tokens. `scores` holds rows * TOKEN_CHUNK floats; `next` are the keys
// of the chunk that comes after.
inline void attend_chunk(const TokenShape& shape, const TokenState& state, const TokenRows& k, const TokenRows& v,
                         const TokenRows* next, float* scores) {
  for (int64_t r = 0; r < shape.rows; r += TOKEN_ROWS) {
    const int tile = int(std::min<int64_t>(TOKEN_ROWS, shape.rows - r));
    DOT_ROWS[tile - 1](state.q + r * shape.D, shape.D, k, shape.D, r ? NOTHING_AHEAD : TokensAhead{&v, shape.E},
                       scores + r * TOKEN_CHUNK);
  }
  for (int64_t r = 0; r < shape.rows; r += TOKEN_ROWS) {
    const int tile = int(std::min<int64_t>(TOKEN_ROWS, shape.rows - r));
    float alpha[TOKEN_ROWS];
    float* sums[TOKEN_ROWS];
    for (int i = 0; i < tile; i++) {
      alpha[i] = weigh_row(shape.scale, k.count, state.top[r + i], state.sum[r + i], scores + (r + i) * TOKEN_CHUNK);
      sums[i] = state.out + (r + i) * shape.E;
    }
    SUM_ROWS[tile - 1]({scores + r * TOKEN_CHUNK, TOKEN_CHUNK, 1}, v.at, v.count, shape.E, alpha,
                       r ? NOTHING_AHEAD : TokensAhead{next, shape.D}, sums);
  }
}

// lse of one row, and what its sums are multiplied by; `sink` -inf for none.
inline float finish_row(const Scale& scale, float top, float sum, float sink, float& lse) {
  lse = sink;
  if (top == NEG_INF) return 0.f;
  lse = float(top * scale.factor * LN_2 + std::log(sum));
  return 1.f / (sink == NEG_INF ? sum : sum * add_sink(lse, sink));
}

}  // namespace dynaxx
