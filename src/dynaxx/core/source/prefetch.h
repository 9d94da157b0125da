// SPDX-License-Identifier: Apache-2.0
// Prefetching of the next step's rows while panels process the current step.
#pragma once
#include "step.h"

namespace dynaxx {

// The first rows of each run of blocks of k and v (backward: of q and of out's gradient) in the step that begins at
// `entry`, prefetched in shares. The hardware prefetcher continues from there: on Zen 5, prefetching all rows takes 2 to
// 7 % longer.
class StepPrefetch {
 public:
  static constexpr int64_t FIRST_ROWS = 4;

  StepPrefetch(const Plan& plan, int64_t entry, int64_t end, const Rows& k, const Rows& v) : k_(k), v_(v) {
    for (int64_t rows = 0; entry < end; entry++) {
      const int64_t token = plan.indices[entry] * plan.visited_block;
      const int64_t stop = std::min(plan.visited_seqlen, token + plan.visited_block);
      if ((rows += stop - token) > STEP_ROWS) break;
      const bool consecutive = plan.indices[entry] == plan.indices[entry - 1] + 1;
      if (!consecutive) runs_[num_runs_++] = {token, std::min(stop, token + FIRST_ROWS)};
    }
  }

  // Prefetch one of `parts` shares.
  void fetch(int parts) {
    for (int rows = (STEP_ROWS + parts - 1) / parts; rows > 0 && at_ < num_runs_; rows--) {
      Run& run = runs_[at_];
      k_.tokens.prefetch(run.token, k_.width);
      v_.tokens.prefetch(run.token, v_.width);
      if (++run.token == run.stop) at_++;
    }
  }

 private:
  struct Run {
    int64_t token, stop;
  };

  const Rows &k_, &v_;
  Run runs_[MAX_BLOCKS];
  int num_runs_ = 0, at_ = 0;
};

}  // namespace dynaxx
