// SPDX-License-Identifier: Apache-2.0
// Scores of blocks of keys for a mean query per row of blocks: the largest of query . key over the keys of a block that
// the row sees, and the sum of exp(query . key - largest).
//
// `mark_best` chooses blocks by their scores.
//
// One task is 16 neighbouring rows of one head, which lie side by side in vectors. Keys pass by once and are not packed;
// what they give stays in the first cache until a block ends.
#include <functional>
#include <limits>
#include <vector>

#include "pack.h"
#include "scratch.h"
#include "tasks.h"
#include "tiles.h"

using namespace dynaxx;

struct BlockScoreArgs {
  const float *q, *k;  // (batch, q_heads, rows, head_dim) contiguous, times the scale; (batch, seqlen_k, kv_heads, head_dim)
  const int64_t* ends;  // (rows,) keys that each row sees, ascending
  float *best, *sums;   // (batch, q_heads, rows, blocks) contiguous; a block of which a row sees no key gets -inf and 0
  Strides k_strides;
  int64_t batch, q_heads, kv_heads, rows, head_dim, seqlen_k, kv_block, threads;
};

namespace {

class RowPanel {
 public:
  RowPanel(const BlockScoreArgs& args, int64_t task)
      : args_(args),
        panels_((args.rows + PANEL - 1) / PANEL),
        blocks_((args.seqlen_k + args.kv_block - 1) / args.kv_block),
        head_(task / panels_),
        first_((panels_ - 1 - task % panels_) * PANEL),  // the last rows see most: first
        rows_(int(std::min<int64_t>(PANEL, args.rows - first_))) {
    for (int i = 0; i < PANEL; i++)
      ends_[i] = i < rows_ ? std::clamp<int64_t>(args.ends[first_ + i], 0, args.seqlen_k) : 0;
  }

  static int64_t memory_needed(const BlockScoreArgs& args) {
    const int64_t blocks = (args.seqlen_k + args.kv_block - 1) / args.kv_block;
    return PANEL * (2 * args.head_dim + args.kv_block + 2 * blocks);
  }

  void run(float* memory) const {
    const int64_t width = args_.head_dim;
    float *panel = memory, *scores = panel + PANEL * width, *best = scores + PANEL * args_.kv_block;
    float *sums = best + PANEL * blocks_, *space = sums + PANEL * blocks_;
    const Tokens q(args_.q, 0, Strides{0, width, args_.rows * width}, 0, head_);
    pack_panel(q, first_, rows_, width, 1.f, space, panel);
    for (int64_t block = 0; block < blocks_; block++)
      score_block(block, panel, scores, best + block * PANEL, sums + block * PANEL);
    const int64_t at = (head_ * args_.rows + first_) * blocks_;
    transpose(best, PANEL, int(blocks_), rows_, args_.best + at, blocks_);
    transpose(sums, PANEL, int(blocks_), rows_, args_.sums + at, blocks_);
  }

 private:
  void score_block(int64_t block, const float* panel, float* scores, float* best, float* sums) const {
    const int64_t first = block * args_.kv_block, most = *std::max_element(ends_, ends_ + rows_);
    const int keys = int(std::clamp<int64_t>(most - first, 0, args_.kv_block));
    const bool whole = first + keys <= *std::min_element(ends_, ends_ + rows_);
    const Tokens k(args_.k, 0, args_.k_strides, head_ / args_.q_heads, head_ % args_.q_heads / (args_.q_heads / args_.kv_heads));
    for (int i = 0; i < PANEL; i++) best[i] = NEG_INF;
    for (int key = 0; key < keys;) {
      const int rows = next_tile(keys - key, SCORE_ROWS);
      uint16_t words[SCORE_ROWS];
      for (int r = 0; r < rows && !whole; r++) words[r] = rows_that_see(first + key + r);
      SCORE_TILES<false, false>[rows - 1](k.row(first + key), k.stride, panel, args_.head_dim, whole ? nullptr : words, Scale(1),
                                          scores + key * PANEL, best);
      key += rows;
    }
    DYNAXX_UNROLL
    for (int i = 0; i < PANEL; i += LANES) {
      const vec base = max_second_if_nan(splat(-std::numeric_limits<float>::max()), load(best + i));  // not -inf
      vec sum = {};
      for (int key = 0; key < keys; key++)
        sum += exp2_nonpositive((load(scores + key * PANEL + i) - base) * splat(float(LOG2_E)));
      store(sums + i, sum);
    }
  }

  uint16_t rows_that_see(int64_t key) const {
    uint16_t seen = 0;
    for (int i = 0; i < rows_; i++) seen |= uint16_t(key < ends_[i]) << i;
    return seen;
  }

  const BlockScoreArgs& args_;
  const int64_t panels_, blocks_, head_, first_;
  const int rows_;
  int64_t ends_[PANEL];
};

void check(const BlockScoreArgs& args) {
  require(within(args.batch, 0, MAX_BATCH) && within(args.q_heads, 1, MAX_HEADS) && within(args.kv_heads, 1, args.q_heads));
  require(args.q_heads % args.kv_heads == 0 && within(args.head_dim, 1, MAX_DIM) && within(args.threads, 1, MAX_THREADS));
  require(within(args.rows, 0, INT32_MAX) && within(args.seqlen_k, 0, INT32_MAX) && is_block_size(args.kv_block));
  const int64_t blocks = (args.seqlen_k + args.kv_block - 1) / args.kv_block;
  require(countable(args.batch, args.q_heads, args.rows, args.head_dim) && countable(args.batch, args.q_heads, args.rows, blocks));
}

}  // namespace

// Returns a `Status`.
extern "C" DYNAXX_EXPORT int dynaxx_cpu_block_scores(const BlockScoreArgs* args) {
  return status_of([&] {
    check(*args);
    const int64_t panels = (args->rows + PANEL - 1) / PANEL;
    for_each_task(args->batch * args->q_heads * panels, args->threads, [&](int64_t task) {
      RowPanel(*args, task).run(thread_scratch().reserve(RowPanel::memory_needed(*args)));
    });
  });
}

// Mark the best counts[row] of the scores (rows, width) above -inf, the first ones of equals. Returns a `Status`.
extern "C" DYNAXX_EXPORT int dynaxx_cpu_mark_best(const float* scores, int64_t rows, int64_t width, const int64_t* counts,
                                                  int64_t threads, uint8_t* marked) {
  return status_of([&] {
    require(within(rows, 0, MAX_TOKENS) && within(width, 0, INT32_MAX) && within(threads, 1, MAX_THREADS));
    require(countable(rows, width));
    constexpr int64_t ROWS = 16;  // per task
    for_each_task((rows + ROWS - 1) / ROWS, threads, [&](int64_t task) {
      static thread_local std::vector<float> sorted;
      for (int64_t row = task * ROWS; row < std::min(rows, (task + 1) * ROWS); row++) {
        const float* from = scores + row * width;
        uint8_t* to = marked + row * width;
        sorted.clear();
        for (int64_t i = 0; i < width; i++)
          if (from[i] > NEG_INF) sorted.push_back(from[i]);
        const int64_t count = std::clamp<int64_t>(counts[row], 0, int64_t(sorted.size()));
        if (!count) continue;
        std::nth_element(sorted.begin(), sorted.begin() + (count - 1), sorted.end(), std::greater<float>());
        const float least = sorted[count - 1];
        int64_t equals = count - std::count_if(sorted.begin(), sorted.begin() + count, [&](float x) { return x > least; });
        for (int64_t i = 0; i < width; i++) to[i] = from[i] > least || (from[i] == least && equals-- > 0);
      }
    });
  });
}
