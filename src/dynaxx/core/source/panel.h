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

// Compute scores (rows, PANEL) for the spans, and update panel.top. If q and k are packed in pairs, D counts pairs.
inline void score_spans(const QueryPanel& panel, const Span* spans, int num_spans, int64_t k_stride, int64_t D,
                        const Scale& scale, bool pairs, float* scores) {
  const auto& tiles = HAS_PAIRS && pairs ? (scale.capped() ? SCORE_TILES<true, HAS_PAIRS> : SCORE_TILES<false, HAS_PAIRS>)
                                         : (scale.capped() ? SCORE_TILES<true, false> : SCORE_TILES<false, false>);
  for (int s = 0; s < num_spans; s++) {
    const Span& span = spans[s];
    for (int r = 0; r < span.rows;) {
      const int rows = next_tile(span.rows - r, SCORE_ROWS);
      tiles[rows - 1](span.k + r * k_stride, k_stride, panel.q, D, span.words ? span.words + r : nullptr, scale,
                      scores + (span.at + r) * PANEL, panel.top);
      r += rows;
    }
  }
}

// Beyond this size, the rounding of an exponent of 2 may exceed the distance of two scores, and (score - top) * factor is
// used, which is 0 for the largest score.
constexpr float MAX_EXPONENT = 65536;

// Turn scores into weights, in place, and return their sum. `top` is the largest score, `base` is top * factor rounded.
template <bool LARGE>
DYNAXX_INLINE vec weigh(const Span* spans, int num_spans, vec top, vec base, float factor, float* scores) {
  vec sum = {};  // sum of this step alone: adding sums of steps rounds less than one long sum
  for (int s = 0; s < num_spans; s++) {
    float* score = scores + spans[s].at * PANEL;
    for (int r = 0; r < spans[s].rows; r++, score += PANEL) {
      const vec weight = exp2_nonpositive(LARGE ? (load(score) - top) * factor : load(score) * factor - base);
      store(score, weight);
      sum += weight;
    }
  }
  return sum;
}

// Turn scores into weights, in place. alpha receives the factors that rescale earlier sums to the new largest scores.
//
// Earlier weights are powers of 2 of score * factor - earlier, with `earlier` rounded, and the factor must undo that same
// rounded number: it is exactly 1 for an unchanged largest score, or errors would grow with every step. The maximum
// keeps the compiler from computing top_before * factor - base with one rounding.
inline void softmax_step(const QueryPanel& panel, const Span* spans, int num_spans, const float* top_before,
                         float factor, float* scores, float* alpha) {
  DYNAXX_UNROLL
  for (int i = 0; i < PANEL; i += LANES) {
    vec top = load(panel.top + i);
    top = top == splat(NEG_INF) ? splat(0.f) : top;  // no inf - inf for queries without keys so far
    const vec base = top * factor;
    const bool large = any(base > splat(MAX_EXPONENT)) || any(base < splat(-MAX_EXPONENT));
    const vec earlier = max_second_if_nan(load(top_before + i) * factor, splat(-std::numeric_limits<float>::max()));
    const vec shrink = exp2_nonpositive(large ? (load(top_before + i) - top) * factor : earlier - base);
    store(alpha + i, shrink);
    const vec sum = large ? weigh<true>(spans, num_spans, top, base, factor, scores + i)
                          : weigh<false>(spans, num_spans, top, base, factor, scores + i);
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

// Return whether `attend_pair` serves: the build has registers for two panels, and their sums have one part.
DYNAXX_INLINE bool pairable(int64_t D, const Scale& scale, bool pairs) {
  return LANES == PANEL && D <= DOT_PART && !scale.capped() && !scale.biased && !pairs;
}

// Like `attend` for two panels that see the same spans, without masks. Rows of k and v are loaded once for both; results
// are equal bit by bit.
inline void attend_pair(const QueryPanel& one, const QueryPanel& two, const Span* spans, int num_spans, int64_t k_stride,
                        int64_t v_stride, int64_t D, int64_t E, const Scale& scale, float* const (&scores)[2]) {
  float top_before[2][PANEL], alpha[2][PANEL];
  const QueryPanel* const panels[2] = {&one, &two};
  for (int p = 0; p < 2; p++)
    for (int i = 0; i < PANEL; i++) top_before[p][i] = panels[p]->top[i];
  for (int s = 0; s < num_spans; s++) {
    const Span& span = spans[s];
    for (int r = 0; r < span.rows;) {
      const int rows = next_tile(span.rows - r, SCORE_ROWS);
      const int64_t at = (span.at + r) * PANEL;
      SCORE_PAIR_TILES[rows - 1](span.k + r * k_stride, k_stride, {one.q, two.q}, D, {scores[0] + at, scores[1] + at},
                                 {one.top, two.top});
      r += rows;
    }
  }
  for (int p = 0; p < 2; p++) softmax_step(*panels[p], spans, num_spans, top_before[p], scale.factor, scores[p], alpha[p]);
  for (int64_t c = 0; c < E;) {
    const int cols = next_tile(int(E - c), PAIR_VALUE_ROWS);
    SUM_PAIR_TILES[cols - 1](spans, num_spans, c, v_stride, {scores[0], scores[1]}, {alpha[0], alpha[1]},
                             {one.out + c * PANEL, two.out + c * PANEL});
    c += cols;
  }
}

}  // namespace dynaxx
