// SPDX-License-Identifier: Apache-2.0
// Choose blocks by the data, as selection/ defines it, with the core's choice of the best blocks.
//
// B batch, Hq q heads, R rows of q blocks, C kv blocks.
#include <algorithm>
#include <cmath>

#include "exp2.h"
#include "layer_rules.h"
#include "tasks.h"

extern "C" {
int dynaxx_cpu_best_blocks(const dynaxx::BestBlocksArgs* args);
int dynaxx_cpu_list_blocks(const dynaxx::ListBlocksArgs* args, int64_t threads);
}

namespace dynaxx_onnx {

namespace {

// Call write(mean, smallest, largest, to) for every block of `size` tokens; return (B, blocks, heads, width).
template <class Write>
std::vector<float> summarize(const Tensor& x, int64_t size, int64_t width, int64_t threads, const Write& write) {
  const int64_t blocks = (x.seqlen + size - 1) / size;
  std::vector<float> made(x.batch * blocks * x.heads * width);
  for_each_task(x.batch * blocks, threads, [&](int64_t task) {
    std::vector<float> mean(x.dim), low(x.dim), high(x.dim);
    const int64_t first = task % blocks * size, end = std::min(first + size, x.seqlen);
    for (int64_t head = 0; head < x.heads; head++) {
      std::fill(mean.begin(), mean.end(), 0.f);
      std::fill(low.begin(), low.end(), INFINITY);
      std::fill(high.begin(), high.end(), -INFINITY);
      for (int64_t token = first; token < end; token++) {
        const float* row = x.row(task / blocks, head, token);
        for (int64_t d = 0; d < x.dim; d++) {
          mean[d] += row[d];
          low[d] = std::min(low[d], row[d]);
          high[d] = std::max(high[d], row[d]);
        }
      }
      for (float& each : mean) each /= float(end - first);
      write(mean, low, high, made.data() + (task * x.heads + head) * width);
    }
  });
  return made;
}

// Vectors of blocks whose products are the scores of MEAN_POOL and MIN_MAX.
struct Summaries {
  int64_t width;
  std::vector<float> queries, keys;  // (B, R, Hq, width), (B, C, Hk, width)

  Summaries(const TopK& choice, const Grid& grid, const Tensor& q, const Tensor& k, int64_t threads)
      : width(choice.scorer == MIN_MAX ? 2 * k.dim : k.dim) {
    const int64_t D = k.dim;
    const bool bounds = choice.scorer == MIN_MAX;
    const float part = float(choice.parameter);
    queries = summarize(q, grid.q_block, width, threads, [=](auto& mean, auto&, auto&, float* to) {
      for (int64_t d = 0; d < D; d++) {
        to[d] = bounds ? std::max(mean[d], 0.f) : mean[d];
        if (bounds) to[D + d] = std::min(mean[d], 0.f);
      }
    });
    keys = summarize(k, grid.kv_block, width, threads, [=](auto& mean, auto& low, auto& high, float* to) {
      for (int64_t d = 0; d < D; d++) {
        to[d] = bounds ? mean[d] + part * (high[d] - mean[d]) : mean[d];
        if (bounds) to[D + d] = mean[d] + part * (low[d] - mean[d]);
      }
    });
  }
};

// Return the bits (B, Hq, R, words) of the blocks that a group's heads choose; none for other heads.
std::vector<uint32_t> best_blocks(const Group& group, const Static& pattern, const Grid& grid, const Tensor& q,
                                  const Tensor& k, double scale, int64_t threads) {
  const int64_t rows = grid.q_blocks(), blocks = grid.kv_blocks(), words = (blocks + 31) / 32;
  std::vector<uint32_t> chosen(q.batch * q.heads * rows * words);
  if (!group.chooses || chosen.empty()) return chosen;
  std::vector<int32_t> counts(q.heads * rows, -1);
  for (size_t i = 0; i < group.heads.size(); i++)
    for (int64_t row = 0; row < rows; row++) {
      const int64_t seen = grid.limit(row), count = group.choice.count(i, seen);
      counts[group.heads[i] * rows + row] = count >= seen ? ALL_OPTIONAL : int32_t(count);
    }
  BestBlocksArgs args{q.data, k.data, counts.data(), pattern.optional.data(), chosen.data(), q.strides(), k.strides()};
  args.batch = q.batch;
  args.q_heads = q.heads;
  args.kv_heads = k.heads;
  args.threads = threads;
  args.together = group.choice.together;
  args.scale = scale * LOG2_E;
  if (group.choice.scorer == MEAN_QUERY) {
    args.seqlen_q = q.seqlen;
    args.seqlen_k = k.seqlen;
    args.head_dim = k.dim;
    args.q_block = args.tile = grid.q_block;
    args.kv_block = grid.kv_block;
    args.causal = grid.causal;
    args.scale *= group.choice.parameter;
    rethrow(dynaxx_cpu_best_blocks(&args));
    return chosen;
  }
  const Summaries summaries(group.choice, grid, q, k, threads);  // blocks become tokens
  args.q = summaries.queries.data();
  args.k = summaries.keys.data();
  args.q_strides = {rows * q.heads * summaries.width, q.heads * summaries.width, summaries.width};
  args.k_strides = {blocks * k.heads * summaries.width, k.heads * summaries.width, summaries.width};
  args.seqlen_q = rows;
  args.seqlen_k = blocks;
  args.head_dim = summaries.width;
  args.q_block = args.kv_block = args.tile = 1;
  rethrow(dynaxx_cpu_best_blocks(&args));
  return chosen;
}

// List the chosen blocks beside those of a pattern, for every q head.
Chosen list_blocks(const std::vector<uint32_t>& chosen, const Static& pattern, const Prepared& prepared, int64_t heads,
                   int64_t threads) {
  const Grid& grid = prepared.grid;
  const int64_t rows = grid.q_blocks();
  Chosen made;
  made.indptr.resize(heads * (rows + 1));
  std::vector<int32_t> num_partial(heads * rows);
  ListBlocksArgs args{};
  args.chosen = chosen.data();
  args.pattern_indptr = pattern.indptr.data();
  args.pattern_indices = pattern.indices.data();
  args.pattern_mask_ids = pattern.mask_ids.data();
  args.indptr = made.indptr.data();
  args.num_partial = num_partial.data();
  args.heads = heads;
  args.rows = rows;
  args.blocks = grid.kv_blocks();
  args.causal = grid.causal;
  args.q_block = grid.q_block;
  args.kv_block = grid.kv_block;
  args.offset = grid.offset();
  args.first_cut = prepared.first_cut;
  args.cut_step = prepared.cut_step;
  rethrow(dynaxx_cpu_list_blocks(&args, threads));
  args.capacity = made.indptr.back();
  made.indices.resize(args.capacity);
  made.masks.resize(args.capacity);
  args.indices = made.indices.data();
  args.mask_ids = made.masks.data();
  if (args.capacity) rethrow(dynaxx_cpu_list_blocks(&args, threads));
  return made;
}

// Take each head's lists from those of its group.
Chosen put_together(const LayerRules& rules, std::vector<Chosen>& groups, int64_t heads, int64_t rows) {
  if (groups.size() == 1) return std::move(groups[0]);
  std::vector<const Chosen*> of_head(rules.q_heads);
  for (size_t g = 0; g < groups.size(); g++)
    for (const int64_t head : rules.groups[g].heads) of_head[head] = &groups[g];
  Chosen made;
  for (int64_t head = 0; head < heads; head++) {
    const Chosen& from = *of_head[head % rules.q_heads];
    const int32_t* ends = from.indptr.data() + head * (rows + 1);
    const int64_t shift = int64_t(made.indices.size()) - ends[0];
    require(shift + ends[rows] <= INT32_MAX);
    for (int64_t row = 0; row <= rows; row++) made.indptr.push_back(int32_t(ends[row] + shift));
    made.indices.insert(made.indices.end(), from.indices.begin() + ends[0], from.indices.begin() + ends[rows]);
    made.masks.insert(made.masks.end(), from.masks.begin() + ends[0], from.masks.begin() + ends[rows]);
  }
  return made;
}

}  // namespace

Chosen choose(const LayerRules& rules, const Prepared& prepared, const Tensor& q, const Tensor& k, double scale,
              int64_t threads) {
  const int64_t heads = q.batch * q.heads, rows = prepared.grid.q_blocks();
  std::vector<Chosen> groups;
  for (size_t g = 0; g < rules.groups.size(); g++) {
    const Static& pattern = prepared.patterns[g];
    const auto chosen = best_blocks(rules.groups[g], pattern, prepared.grid, q, k, scale, threads);
    groups.push_back(list_blocks(chosen, pattern, prepared, heads, threads));
  }
  Chosen made = put_together(rules, groups, heads, rows);
  made.order.resize(heads * rows);
  rethrow(dynaxx_cpu_plan_rows(made.indptr.data(), heads, rows, made.order.data()));
  return made;
}

}  // namespace dynaxx_onnx
