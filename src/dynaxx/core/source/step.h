// SPDX-License-Identifier: Apache-2.0
// A step: about 128 visited rows that are gathered in the cache before all panels of a task read them.
#pragma once
#include <algorithm>

#include "args.h"
#include "pack.h"
#include "plan.h"

namespace dynaxx {

constexpr int STEP_ROWS = 128;                         // rows per step; blocks are never split
constexpr int MAX_BLOCKS = STEP_ROWS / 16;             // blocks per step
constexpr int MAX_SPANS = MAX_BLOCKS * MAX_RUNS;       // spans per step and panel

// One of the two tensors whose rows a task visits: k or v; in the backward pass, q or the gradient of out.
struct Rows {
  Tokens tokens;
  int64_t width;
  float* packed;  // (STEP_ROWS, width), or null to read the tensor in place
  bool pairs = false;  // `packed` holds pairs: (STEP_ROWS, num_pairs(width))

  int64_t step_stride() const { return pairs ? num_pairs(width) : packed ? width : tokens.stride; }
};

struct Block {
  const float* k;
  const float* v;
  int64_t token;  // first token
  int rows;
  int at;  // index of its first row in the step
  int32_t mask;
};

struct Step {
  Block blocks[MAX_BLOCKS];
  int num_blocks = 0;
  int rows = 0;

  // Return whether all panels see all rows.
  bool plain() const {
    return std::all_of(blocks, blocks + num_blocks, [](const Block& block) { return block.mask < 0; });
  }
};

// Return whether to copy rows: if they need widening, or if several panels read them and they are not contiguous. With
// other heads in between, rows would conflict in cache sets and touch more pages.
DYNAXX_INLINE bool worth_packing(const Tokens& tokens, int64_t width, int panels) {
  return tokens.element != Element::FP32 || (panels > 1 && tokens.stride != width);
}

DYNAXX_INLINE const float* block_rows(const Rows& rows, int64_t token, int count, int at) {
  if (!rows.packed) return rows.tokens.row(token);
  const int64_t stride = rows.step_stride();
  float* to = rows.packed + at * stride;
  for (int r = 0; r < count; r++)
    if (rows.pairs)
      read_pairs(rows.tokens, token + r, rows.width, to + r * stride);
    else
      rows.tokens.read(token + r, rows.width, to + r * stride);
  return to;
}

// Gather visited blocks starting at `entry`; return the first entry that was not gathered.
inline int64_t gather_step(const Plan& plan, int64_t entry, int64_t end, const Rows& k, const Rows& v, Step& step) {
  for (; entry < end; entry++) {
    const int64_t token = plan.indices[entry] * plan.visited_block;
    const int count = int(std::min(plan.visited_block, plan.visited_seqlen - token));
    if (step.rows + count > STEP_ROWS) break;
    step.blocks[step.num_blocks++] = {block_rows(k, token, count, step.rows), block_rows(v, token, count, step.rows),
                                      token, count, step.rows, plan.masks[entry]};
    step.rows += count;
  }
  return entry;
}

// List the spans of a block that a panel sees; return their number.
inline int block_spans(const Plan& plan, const Block& block, int64_t panel, int64_t k_stride, int64_t v_stride,
                       Span* spans) {
  if (block.mask < 0) {
    spans[0] = {block.k, block.v, block.rows, block.at, nullptr};
    return 1;
  }
  const MaskPanel mask = mask_panel(plan, block.mask, panel);
  int count = 0;
  for (; count < MAX_RUNS; count++) {
    const int begin = mask.runs[2 * count], end = std::min<int>(mask.runs[2 * count + 1], block.rows);
    if (begin >= end) break;
    spans[count] = {block.k + begin * k_stride, block.v + begin * v_stride, end - begin, block.at + begin,
                    mask.words + begin};
  }
  return count;
}

// Return the entries of a head's bias: one per distance, from that of the last visited token, and a panel that is read
// past the end.
inline int64_t bias_size(const Plan& plan) { return plan.seqlen + plan.visited_seqlen - 1 + PANEL; }

// Copy the bias of each row of a step, for the panel of tokens from `first`, to the places of the scores.
inline void load_bias(const Plan& plan, const Step& step, const float* of_head, int64_t first, float* scores) {
  const float* at = of_head + plan.visited_seqlen - 1 + first;
  for (int b = 0; b < step.num_blocks; b++) {
    const Block& block = step.blocks[b];
    for (int r = 0; r < block.rows; r++)
      std::copy_n(at - block.token - r, PANEL, scores + (block.at + r) * PANEL);
  }
}

// Return whether `next` continues `last` without a mask, so that both can form one span.
DYNAXX_INLINE bool joins(const Span& last, const Span& next, int64_t k_stride, int64_t v_stride) {
  return !last.words && !next.words && last.k + last.rows * k_stride == next.k &&
         last.v + last.rows * v_stride == next.v && last.at + last.rows == next.at;
}

// List the spans of a step that a panel sees; return their number.
inline int step_spans(const Plan& plan, const Step& step, int64_t panel, int64_t k_stride, int64_t v_stride,
                      Span* spans) {
  int count = 0;
  for (int b = 0; b < step.num_blocks; b++) {
    const int found = block_spans(plan, step.blocks[b], panel, k_stride, v_stride, spans + count);
    if (found && count && joins(spans[count - 1], spans[count], k_stride, v_stride))
      spans[count - 1].rows += spans[count].rows;
    else
      count += found;
  }
  return count;
}

}  // namespace dynaxx
