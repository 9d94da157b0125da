// Element masks as the panels read them.
#pragma once
#include "args.h"
#include "tiles.h"

namespace dynaxx {

// Runs of visible tokens kept apart per mask and panel. A gap of MIN_GAP or fewer hidden ones costs less to compute
// (their bits hide them) than to break a tile for; what does not fit in MAX_RUNS joins the last run.
constexpr int MAX_RUNS = 8;
constexpr int MIN_GAP = 3;

DYNAXX_INLINE int64_t num_rows(const Plan& plan) { return (plan.seqlen + plan.block - 1) / plan.block; }

DYNAXX_INLINE int64_t layout_head(const Plan& plan, int64_t batch, int64_t head) {
  return (plan.layout_batch == 1 ? 0 : batch) * plan.layout_heads + (plan.layout_heads == 1 ? 0 : head);
}

// The row of blocks that is `rank`-th by length.
DYNAXX_INLINE int64_t row_at(const Plan& plan, int64_t batch, int64_t head, int64_t rank) {
  return plan.row_order[layout_head(plan, batch, head) * num_rows(plan) + rank];
}

// Two offsets into plan.indices: where the row's blocks begin and end.
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

}  // namespace dynaxx
