// SPDX-License-Identifier: Apache-2.0
// What the heads of a layer do, as `plan` of the operator lists it, and the layouts that follow from it.
//
// R rows of q blocks, C kv blocks. Codes of blocks as in the core: FULL, EMPTY, or the entry of a mask table.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "plan.h"
#include "rules.h"

extern "C" int dynaxx_cpu_plan_rows(const int32_t* indptr, int64_t heads, int64_t rows, int32_t* order);

namespace dynaxx_onnx {

using namespace dynaxx;

constexpr int32_t FULL = -1, EMPTY = -2;  // as in layout/masks.py

enum Scorer : int64_t { MEAN_QUERY = 0, MEAN_POOL = 1, MIN_MAX = 2 };

// Keep the best blocks: a number of them, or a share of the visible ones.
struct TopK {
  int64_t scorer;
  double parameter;  // sharpness of MEAN_QUERY, bound of MIN_MAX
  bool shares;
  bool together;  // the q heads of a kv head choose together
  int64_t floor;
  std::vector<double> budgets;  // one, or one per head of the group

  int64_t count(size_t head, int64_t visible) const {
    const double budget = budgets[budgets.size() == 1 ? 0 : head];
    const int64_t of = std::max(visible, floor);
    return shares ? int64_t(std::ceil(float(of) * float(budget))) : int64_t(budget);
  }
};

struct Group {
  std::vector<int64_t> heads;    // q heads, ascending
  std::vector<int64_t> program;  // the pattern, empty for none
  bool chooses;
  TopK choice;
};

struct LayerRules {
  int64_t q_block, kv_block;
  int64_t q_heads = 0;  // each of them is in one group
  std::vector<Group> groups;

  // Read `plan`; throws BadInput where it is not one.
  static LayerRules read(const std::vector<int64_t>& numbers);

  bool is_static() const {
    for (const Group& group : groups)
      if (group.chooses) return false;
    return true;
  }
};

// A pattern's blocks on a grid.
struct Static {
  std::vector<int32_t> indptr, indices, mask_ids;  // mask ids count the masks of the whole layer
  std::vector<uint32_t> optional;                  // (R, words) bits of the blocks that it hides, or shows in part
};

// What a layer's rules say of one pair of lengths, before the data is seen. Layers with the same rules share one.
struct Prepared {
  Grid grid;
  std::vector<Static> patterns;                // of each group
  int64_t first_cut = 0, cut_step = 1;  // a block that the diagonal cuts has the mask (distance - first_cut) / cut_step
  std::vector<uint16_t> words;                 // as in the core's Plan
  std::vector<uint8_t> runs;
  std::vector<int32_t> indptr, indices, masks, order;  // of static rules: the layout itself
  int64_t layout_heads = 0;                            // 0 where the data decides

  int32_t causal_mask_id(int64_t row, int64_t col) const {
    const int64_t distance = grid.first(row) - col * grid.kv_block;
    if (!grid.causal || distance >= grid.kv_block - 1) return FULL;
    return distance <= -grid.q_block ? EMPTY : int32_t(floor_div(distance - first_cut, cut_step));
  }

  static std::shared_ptr<const Prepared> of(const LayerRules& rules, const std::vector<int64_t>& key, const Grid& grid,
                                            int64_t q_heads);
};

// A layout that the data chose: CSR per batch entry and q head.
struct Chosen {
  std::vector<int32_t> indptr, indices, masks, order;
};

// One contiguous tensor, (batch, heads, seqlen, head_dim), or (batch, seqlen, heads, head_dim) if `tokens_first`; or some
// tokens of one sequence of it.
struct Tensor {
  const float* data;
  int64_t batch, heads, seqlen, dim;
  bool tokens_first;
  int64_t stored;  // tokens per sequence in memory

  const float* row(int64_t b, int64_t h, int64_t token) const {
    const Strides by = strides();
    return data + b * by.batch + h * by.head + token * by.token;
  }
  Strides strides() const {
    return tokens_first ? Strides{stored * heads * dim, heads * dim, dim} : Strides{heads * stored * dim, dim, stored * dim};
  }
  Tensor part(int64_t b, int64_t first, int64_t end) const {
    return {row(b, 0, first), 1, heads, end - first, dim, tokens_first, stored};
  }
};

Chosen choose(const LayerRules& rules, const Prepared& prepared, const Tensor& q, const Tensor& k, double scale,
              int64_t threads);

}  // namespace dynaxx_onnx
