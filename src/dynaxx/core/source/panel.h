// SPDX-License-Identifier: Apache-2.0
// One panel of 16 queries meets some spans of keys: scores, one step of the online softmax, weighted values.
#pragma once
#include "tiles.h"

namespace dynaxx {

// The running state of a panel.
struct QueryPanel {
  float* q;    // (D, PANEL) times the scale's sign, or pairs of these
  float* out;  // (E, PANEL) sum of weights * values so far
  float* top;  // (PANEL,) largest score so far
  float* sum;  // (PANEL,) sum of 2 ** (score * factor - base) so far, base = top * factor rounded
};

DYNAXX_INLINE void reset(const QueryPanel& panel, int64_t E) {
  for (int64_t x = 0; x < E * PANEL; x++) panel.out[x] = 0;
  for (int i = 0; i < PANEL; i++) panel.top[i] = NEG_INF, panel.sum[i] = 0;
}

// Fill scores (rows, PANEL) where a span is, and raise panel.top. D is the number of pairs where q and k are such.
inline void score_spans(const QueryPanel& panel, const Span* spans, int num_spans, int64_t k_stride, int64_t D,
                        const Scale& scale, bool pairs, float* scores) {
  const auto& tiles = HAS_PAIRS && pairs ? (scale.capped() ? SCORE_TILES<true, HAS_PAIRS> : SCORE_TILES<false, HAS_PAIRS>)
                                         : (scale.capped() ? SCORE_TILES<true, false> : SCORE_TILES<false, false>);
  for (int s = 0; s < num_spans; s++) {
    const Span& span = spans[s];
    for (int r = 0; r < span.rows;) {
      const int rows = next_tile(span.rows - r, SCORE_ROWS);
      tiles[rows - 1](span.k + r * k_stride, k_stride, panel.q, D, span.words ? span.words + r : nullptr, scale.cap,
                      scores + (span.at + r) * PANEL, panel.top);
      r += rows;
    }
  }
}

// Turn scores into weights, in place; alpha is what the sums so far shrink by as the top rises.
inline void softmax_step(const QueryPanel& panel, const Span* spans, int num_spans, const float* top_before,
                         float factor, float* scores, float* alpha) {
  DYNAXX_UNROLL
  for (int i = 0; i < PANEL; i += LANES) {
    const vec top = load(panel.top + i);
    const vec base = top == splat(NEG_INF) ? splat(0.f) : top * factor;  // a query that saw nothing yet: no inf - inf
    const vec shrink = exp2_nonpositive(load(top_before + i) * factor - base);
    vec sum = {};  // of this step alone: a sum of sums keeps the rounding of long rows down
    store(alpha + i, shrink);
    for (int s = 0; s < num_spans; s++) {
      float* score = scores + spans[s].at * PANEL + i;
      for (int r = 0; r < spans[s].rows; r++, score += PANEL) {
        const vec weight = exp2_nonpositive(load(score) * factor - base);
        store(score, weight);
        sum += weight;
      }
    }
    store(panel.sum + i, load(panel.sum + i) * shrink + sum);
  }
}

inline void attend(const QueryPanel& panel, const Span* spans, int num_spans, int64_t k_stride, int64_t v_stride,
                   int64_t D, int64_t E, const Scale& scale, bool pairs, float* scores) {
  float top_before[PANEL], alpha[PANEL];
  for (int i = 0; i < PANEL; i++) top_before[i] = panel.top[i];
  score_spans(panel, spans, num_spans, k_stride, D, scale, pairs, scores);
  softmax_step(panel, spans, num_spans, top_before, scale.factor, scores, alpha);
  add_rows<false>(spans, num_spans, v_stride, E, scores, alpha, panel.out);
}

}  // namespace dynaxx
