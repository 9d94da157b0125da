// SPDX-License-Identifier: Apache-2.0
// The online softmax for one panel of 16 queries and some spans of keys: scores, weights, weighted values.
#pragma once
#include "tiles.h"

namespace dynaxx {

// The state of a panel.
struct QueryPanel {
  float* q;    // (D, PANEL) times the scale's sign, or packed in pairs
  float* out;  // (E, PANEL) sum of weights * values so far
  float* top;  // (PANEL,) largest score so far
  float* sum;  // (PANEL,) sum of 2 ** (score * factor - base) so far, base = top * factor rounded
};

DYNAXX_INLINE void reset(const QueryPanel& panel, int64_t E) {
  for (int64_t x = 0; x < E * PANEL; x++) panel.out[x] = 0;
  for (int i = 0; i < PANEL; i++) panel.top[i] = NEG_INF, panel.sum[i] = 0;
}

// Compute scores (rows, PANEL) for the spans, and updates panel.top. If q and k are packed in pairs, D counts pairs.
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

// Turn scores into weights, in place. alpha receives the factors that rescale earlier sums to the new largest scores.
inline void softmax_step(const QueryPanel& panel, const Span* spans, int num_spans, const float* top_before,
                         float factor, float* scores, float* alpha) {
  DYNAXX_UNROLL
  for (int i = 0; i < PANEL; i += LANES) {
    const vec top = load(panel.top + i);
    const vec base = top == splat(NEG_INF) ? splat(0.f) : top * factor;  // no inf - inf for queries without keys so far
    const vec shrink = exp2_nonpositive(load(top_before + i) * factor - base);
    vec sum = {};  // sum of this step alone: adding sums of steps rounds less than one long sum
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
