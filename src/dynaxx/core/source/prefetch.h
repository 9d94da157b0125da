// SPDX-License-Identifier: Apache-2.0
// Rows of the next step begin to come into the cache while panels work on this one.
#pragma once
#include "step.h"

namespace dynaxx {

// The rows of k and of v (forward; backward of q and of out's gradient) of the step from `entry` on, a share at a time.
// Blocks that follow one another are left to the processor, which sees them coming.
class Ahead {
 public:
  Ahead(const Plan& plan, int64_t entry, int64_t end, const Rows& k, const Rows& v) : k_(k), v_(v) {
    for (int64_t rows = 0; entry < end; entry++) {
      const int64_t token = plan.indices[entry] * plan.visited_block;
      const int64_t stop = std::min(plan.visited_seqlen, token + plan.visited_block);
      if ((rows += stop - token) > STEP_ROWS) break;
      if (plan.indices[entry] != plan.indices[entry - 1] + 1) runs_[num_runs_++] = {token, stop};
    }
  }

  // One of `parts` shares.
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
