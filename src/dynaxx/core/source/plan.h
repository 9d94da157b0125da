// SPDX-License-Identifier: Apache-2.0
// Access to a plan: its rows, and the element masks of panels.
#pragma once
#include <algorithm>

#include "args.h"
#include "status.h"
#include "tiles.h"

namespace dynaxx {

// Runs of visible tokens that are stored per mask and panel. Gaps of up to MIN_GAP hidden tokens are computed and
// masked, which is cheaper than interrupting a tile. Runs beyond MAX_RUNS are merged into the last one.
constexpr int MAX_RUNS = 8;
constexpr int MIN_GAP = 3;

DYNAXX_INLINE int64_t num_rows(const Plan& plan) { return (plan.seqlen + plan.block - 1) / plan.block; }

DYNAXX_INLINE int64_t layout_head(const Plan& plan, int64_t batch, int64_t head) {
  return (plan.layout_batch == 1 ? 0 : batch) * plan.layout_heads + (plan.layout_heads == 1 ? 0 : head);
}

// Return the row of blocks with the given rank in order of length.
DYNAXX_INLINE int64_t row_at(const Plan& plan, int64_t batch, int64_t head, int64_t rank) {
  return plan.row_order[layout_head(plan, batch, head) * num_rows(plan) + rank];
}

// Return a pointer to two offsets into plan.indices: begin and end of the row's blocks.
DYNAXX_INLINE const int32_t* row_indptr(const Plan& plan, int64_t batch, int64_t head, int64_t row) {
  return plan.indptr + layout_head(plan, batch, head) * (num_rows(plan) + 1) + row;
}

struct MaskPanel {
  const uint16_t* words;
  const uint8_t* runs;
};

DYNAXX_INLINE MaskPanel mask_panel(const Plan& plan, int64_t mask, int64_t panel) {
  const int64_t entry = mask * (plan.block / PANEL) + panel;
  return {plan.mask_words + entry * plan.visited_block, plan.mask_runs + entry * 2 * MAX_RUNS};
}

// Reject sizes that contradict one another or the plan. The plan's arrays were checked when it was built, on a copy
// that no other thread can write to.
template <class Args>
void check(const Args& args, const Plan& plan) {
  require(within(args.batch, 0, MAX_BATCH) && within(args.q_heads, 1, MAX_HEADS) &&
          within(args.kv_heads, 1, args.q_heads) && args.q_heads % args.kv_heads == 0);
  require(within(args.head_dim, 1, MAX_DIM) && within(args.head_dim_v, 1, MAX_DIM));
  require(within(args.element, 0, 2) && within(args.threads, 1, MAX_THREADS));
  require(within(plan.seqlen, 0, MAX_TOKENS) && within(plan.visited_seqlen, 0, MAX_TOKENS));
  require(is_block_size(plan.block) && is_block_size(plan.visited_block));
  require(plan.layout_batch == 1 || plan.layout_batch == args.batch);
  require(plan.layout_heads == 1 || plan.layout_heads == args.q_heads);
  require(countable(args.batch, args.q_heads, plan.seqlen, std::max(args.head_dim, args.head_dim_v)));
  require(countable(args.batch, args.q_heads, plan.visited_seqlen, std::max(args.head_dim, args.head_dim_v)));
}

}  // namespace dynaxx
