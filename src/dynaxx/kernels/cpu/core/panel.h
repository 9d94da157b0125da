// One panel of 16 queries meets some spans of keys: scores, one step of the online softmax, weighted values.
#pragma once
#include "exp2.h"
#include "tiles.h"

namespace dynaxx {

// The running state of a panel. Scores are in units of log2 e: q comes scaled by scale * log2(e).
struct Panel {
  float* q;    // (D, PANEL)
  float* out;  // (E, PANEL) sum of weights * values so far
  float* top;  // (PANEL,) largest score so far
  float* sum;  // (PANEL,) sum of 2 ** (score - top) so far
};

DYNAXX_INLINE void reset(const Panel& panel, int64_t E) {
  for (int64_t x = 0; x < E * PANEL; x++) panel.out[x] = 0;
  for (int i = 0; i < PANEL; i++) panel.top[i] = NEG_INF, panel.sum[i] = 0;
}

// Fill scores (keys, PANEL) and raise panel.top.
static void score_spans(const Panel& panel, const Span* spans, int num_spans, int64_t k_stride, int64_t D,
                        float* scores) {
  for (int s = 0; s < num_spans; s++) {
    const Span& span = spans[s];
    for (int r = 0; r < span.rows;) {
      const int rows = next_tile(span.rows - r, SCORE_ROWS);
      SCORE_TILES[rows - 1](span.k + r * k_stride, k_stride, panel.q, D, span.words ? span.words + r : nullptr, scores,
                            panel.top);
      scores += rows * PANEL;
      r += rows;
    }
  }
}

// Turn scores into weights, in place; alpha is what the sums so far shrink by as the top rises.
static void softmax_step(const Panel& panel, const float* top_before, float* scores, int keys, float* alpha) {
  DYNAXX_UNROLL
  for (int i = 0; i < PANEL; i += LANES) {
    const vec top = load(panel.top + i);
    const vec base = top == splat(NEG_INF) ? splat(0.f) : top;  // a query that saw nothing yet: no inf - inf
    const vec shrink = exp2_nonpositive(load(top_before + i) - base);
    vec sum = load(panel.sum + i) * shrink;
    store(alpha + i, shrink);
    for (int key = 0; key < keys; key++) {
      const vec weight = exp2_nonpositive(load(scores + key * PANEL + i) - base);
      store(scores + key * PANEL + i, weight);
      sum += weight;
    }
    store(panel.sum + i, sum);
  }
}

static void add_values(const Panel& panel, const Span* spans, int num_spans, int64_t v_stride, int64_t E,
                       const float* weights, const float* alpha) {
  for (int64_t e = 0; e < E;) {
    const int rows = next_tile(int(E - e), VALUE_ROWS);
    VALUE_TILES[rows - 1](spans, num_spans, e, v_stride, weights, alpha, panel.out + e * PANEL);
    e += rows;
  }
}

static void attend(const Panel& panel, const Span* spans, int num_spans, int64_t k_stride, int64_t v_stride, int64_t D,
                   int64_t E, float* scores) {
  float top_before[PANEL], alpha[PANEL];
  for (int i = 0; i < PANEL; i++) top_before[i] = panel.top[i];
  int keys = 0;
  for (int s = 0; s < num_spans; s++) keys += spans[s].rows;
  score_spans(panel, spans, num_spans, k_stride, D, scores);
  softmax_step(panel, top_before, scores, keys, alpha);
  add_values(panel, spans, num_spans, v_stride, E, scores, alpha);
}

}  // namespace dynaxx
