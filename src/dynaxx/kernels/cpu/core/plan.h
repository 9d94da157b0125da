// Element masks as the panels read them.
#pragma once
#include "args.h"
#include "tiles.h"

namespace dynaxx {

// Runs of visible keys kept apart per mask and panel. A gap of MIN_GAP or fewer hidden keys costs less to compute
// (their bits hide them) than to break a tile for; what does not fit in MAX_RUNS joins the last run.
constexpr int MAX_RUNS = 8;
constexpr int MIN_GAP = 3;

struct MaskPanel {
  const uint16_t* words;
  const uint8_t* runs;
};

DYNAXX_INLINE MaskPanel mask_panel(const Plan& plan, int64_t mask, int64_t panel) {
  const int64_t entry = mask * (plan.q_block / PANEL) + panel;
  return {plan.mask_words + entry * plan.kv_block, plan.mask_runs + entry * 2 * MAX_RUNS};
}

}  // namespace dynaxx
