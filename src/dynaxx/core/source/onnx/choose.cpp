// SPDX-License-Identifier: Apache-2.0
// Choose blocks by the data, as selection/ defines it: score kv blocks for each row of q blocks, and keep the best.
//
// A task scores some rows of one kv head's q heads: each kv block is read once for all of them and stays in the first
// cache. B batch, H kv heads, R rows of q blocks, C kv blocks, D head_dim.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <numeric>

#define KEYS KEYS_OF_TILE  // the core uses the name twice, for a rule and for a tile's size
#include "decode_tiles.h"
#undef KEYS
#include "exp2.h"
#include "layer_rules.h"
#include "tasks.h"

extern "C" int dynaxx_cpu_plan_rows(const int32_t* indptr, int64_t heads, int64_t rows, int32_t* order);

namespace dynaxx_onnx {

namespace {

constexpr int64_t ROWS_AT_ONCE = 16;     // of q blocks, in a task
constexpr float SMALLEST = -80.f;        // beside a best of 0: nothing in fp32, as in selection/scorers/query.py
const PrefetchRows NONE_AHEAD = {nullptr, 0, 0, 0};

// The q heads of one group that read one kv head.
struct Cluster {
  int64_t kv_head;
  std::vector<size_t> members;  // places in the group
};

std::vector<Cluster> clusters_of(const Group& group, int64_t group_size) {
  std::vector<Cluster> found;
  for (size_t at = 0; at < group.heads.size(); at++) {
    const int64_t kv_head = group.heads[at] / group_size;
    if (found.empty() || found.back().kv_head != kv_head) found.push_back({kv_head, {}});
    found.back().members.push_back(at);
  }
  return found;
}

// Summaries of kv blocks whose product with a query's summary is a block's score; unused by MEAN_QUERY.
struct Summaries {
  int64_t width = 0;          // in whole vectors
  std::vector<float> blocks;  // (C, width)
};

Summaries summarize(const TopK& choice, const Grid& grid, const Tensor& k, int64_t b, int64_t h) {
  Summaries made;
  if (choice.scorer == MEAN_QUERY) return made;
  const int64_t D = k.dim, parts = choice.scorer == MIN_MAX ? 2 : 1;
  made.width = whole_vectors(parts * D);
  made.blocks.assign(grid.kv_blocks() * made.width, 0.f);
  std::vector<float> mean(D), low(D), high(D);
  for (int64_t c = 0; c < grid.kv_blocks(); c++) {
    const int64_t first = c * grid.kv_block, end = std::min(first + grid.kv_block, grid.seqlen_k);
    std::fill(mean.begin(), mean.end(), 0.f);
    std::fill(low.begin(), low.end(), INFINITY);
    std::fill(high.begin(), high.end(), -INFINITY);
    for (int64_t t = first; t < end; t++) {
      const float* row = k.row(b, h, t);
      for (int64_t d = 0; d < D; d++) {
        mean[d] += row[d];
        low[d] = std::min(low[d], row[d]);
        high[d] = std::max(high[d], row[d]);
      }
    }
    float* to = made.blocks.data() + c * made.width;
    for (int64_t d = 0; d < D; d++) {
      mean[d] /= float(end - first);
      if (choice.scorer == MEAN_POOL) {
        to[d] = mean[d];
      } else {
        to[d] = mean[d] + float(choice.parameter) * (high[d] - mean[d]);
        to[D + d] = mean[d] + float(choice.parameter) * (low[d] - mean[d]);
      }
    }
  }
  return made;
}

class Chooser {
 public:
  Chooser(const LayerRules& rules, const Prepared& prepared, const Tensor& q, const Tensor& k, double scale)
      : rules_(rules), prepared_(prepared), grid_(prepared.grid), q_(q), k_(k), scale_(scale),
        group_size_(q.heads / k.heads), R_(grid_.q_blocks()), C_(grid_.kv_blocks()),
        entries_(q.batch * q.heads * R_) {}

  // The entries of each (batch, q head, row): blocks with a mask first, then full ones; mask ids beside them.
  struct Row {
    std::vector<int32_t> blocks, mask_ids;
  };

  Chosen run(int64_t threads) {
    struct Task {
      size_t group, cluster;
      int64_t batch, first_row;
    };
    std::vector<Task> tasks;
    std::vector<std::vector<Cluster>> clusters;
    std::vector<std::vector<Summaries>> summaries(rules_.groups.size());
    for (size_t g = 0; g < rules_.groups.size(); g++) {
      const Group& group = rules_.groups[g];
      clusters.push_back(clusters_of(group, group_size_));
      if (!group.chooses) {
        copy_static(g);
        continue;
      }
      for (int64_t b = 0; b < q_.batch; b++)
        for (size_t i = 0; i < clusters[g].size(); i++) {
          summaries[g].push_back(summarize(group.choice, grid_, k_, b, clusters[g][i].kv_head));
          const int64_t pieces = (R_ + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
          for (int64_t piece = pieces - 1; piece >= 0; piece--) tasks.push_back({g, i, b, piece * ROWS_AT_ONCE});
        }
    }
    std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.first_row > b.first_row; });
    for_each_task(int64_t(tasks.size()), threads, [&](int64_t at) {
      const Task& task = tasks[at];
      const auto& own = clusters[task.group];
      choose_rows(task.group, own[task.cluster], task.batch, task.first_row,
                  summaries[task.group][task.batch * own.size() + task.cluster]);
    });
    return put_together();
  }

 private:
  void copy_static(size_t g) {
    const Static& pattern = prepared_.patterns[g];
    for (int64_t b = 0; b < q_.batch; b++)
      for (const int64_t head : rules_.groups[g].heads)
        for (int64_t row = 0; row < R_; row++) {
          Row& to = entry(b, head, row);
          const int32_t first = pattern.indptr[row], last = pattern.indptr[row + 1];
          to.blocks.assign(pattern.indices.data() + first, pattern.indices.data() + last);
          to.mask_ids.assign(pattern.mask_ids.data() + first, pattern.mask_ids.data() + last);
        }
  }

  Row& entry(int64_t b, int64_t head, int64_t row) { return entries_[(b * q_.heads + head) * R_ + row]; }

  int64_t end_of(int64_t row) const {  // past the last key that a row sees
    return grid_.causal ? std::clamp<int64_t>((row + 1) * grid_.q_block + grid_.offset(), 0, grid_.seqlen_k) : grid_.seqlen_k;
  }

  // The mean query of a row of blocks, times `factor`.
  void mean_query(int64_t b, int64_t head, int64_t row, float factor, float* to) const {
    const int64_t first = row * grid_.q_block, end = std::min(first + grid_.q_block, grid_.seqlen_q);
    std::fill(to, to + q_.dim, 0.f);
    for (int64_t t = first; t < end; t++) {
      const float* from = q_.row(b, head, t);
      for (int64_t d = 0; d < q_.dim; d++) to[d] += from[d];
    }
    for (int64_t d = 0; d < q_.dim; d++) to[d] = to[d] / float(end - first) * factor;
  }

  void choose_rows(size_t g, const Cluster& cluster, int64_t b, int64_t first_row, const Summaries& summaries) {
    const Group& group = rules_.groups[g];
    const TopK& choice = group.choice;
    const int64_t rows = std::min(ROWS_AT_ONCE, R_ - first_row), heads = int64_t(cluster.members.size());
    const int64_t D = k_.dim, width = choice.scorer == MEAN_QUERY ? whole_vectors(D) : summaries.width;
    const float factor = float(choice.scorer == MEAN_QUERY ? scale_ * choice.parameter : scale_);
    // Rows of all heads side by side, (rows * heads, width): the later a row is, the more it sees.
    std::vector<float> queries(rows * heads * width + LANES), scores(rows * heads * C_, NEG_INF), mean(D);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t i = 0; i < heads; i++) {
        float* to = queries.data() + (r * heads + i) * width;
        mean_query(b, group.heads[cluster.members[i]], first_row + r, factor, mean.data());
        for (int64_t d = 0; d < D; d++) {
          to[d] = choice.scorer == MIN_MAX ? std::max(mean[d], 0.f) : mean[d];
          if (choice.scorer == MIN_MAX) to[D + d] = std::min(mean[d], 0.f);
        }
      }
    if (choice.scorer == MEAN_QUERY)
      score_keys(b, cluster.kv_head, first_row, rows, heads, width, queries.data(), scores.data());
    else
      score_summaries(summaries, first_row, rows, heads, queries.data(), scores.data());
    for (float& score : scores)  // NaN ranks first, so that it reaches the output of attention
      if (!(score <= FLT_MAX)) score = FLT_MAX;
    for (int64_t r = 0; r < rows; r++) keep_best(g, cluster, b, first_row + r, scores.data() + r * heads * C_);
  }

  void score_summaries(const Summaries& summaries, int64_t first_row, int64_t rows, int64_t heads, const float* queries,
                       float* scores) const {
    float products[QUERY_ROWS * CHUNK];
    const int64_t limit = grid_.limit(first_row + rows - 1);
    for (int64_t c = 0; c < limit; c += CHUNK) {
      const int count = int(std::min<int64_t>(CHUNK, limit - c));
      for (int64_t r = 0; r < rows * heads; r += QUERY_ROWS) {
        const int tile = int(std::min<int64_t>(QUERY_ROWS, rows * heads - r));
        SCORE_KEYS[tile - 1](queries + r * summaries.width, summaries.blocks.data() + c * summaries.width, summaries.width,
                             count, summaries.width, NONE_AHEAD, products);
        for (int i = 0; i < tile; i++)
          for (int j = 0; j < count; j++)
            if (c + j < grid_.limit(first_row + (r + i) / heads)) scores[(r + i) * C_ + c + j] = products[i * CHUNK + j];
      }
    }
  }

  // The log of the sum over each kv block's visible keys of exp(query . key).
  void score_keys(int64_t b, int64_t h, int64_t first_row, int64_t rows, int64_t heads, int64_t width,
                  const float* queries, float* scores) const {
    const int64_t by_token = k_.strides().token;
    const bool in_place = width == k_.dim && width == by_token;
    std::vector<float> copy(in_place ? 0 : grid_.kv_block * width);
    float products[QUERY_ROWS * CHUNK], all[QUERY_ROWS][128];
    for (int64_t c = 0; c < grid_.limit(first_row + rows - 1); c++) {
      const int64_t first = c * grid_.kv_block;
      const int keys = int(std::min(grid_.kv_block, grid_.seqlen_k - first));
      const float* block = k_.row(b, h, first);
      if (!in_place) {
        for (int j = 0; j < keys; j++) std::copy_n(block + j * by_token, k_.dim, copy.data() + j * width);
        block = copy.data();
      }
      int64_t start = 0;  // rows before it see nothing of the block
      while (start < rows && end_of(first_row + start) <= first) start++;
      for (int64_t r = start * heads; r < rows * heads; r += QUERY_ROWS) {
        const int tile = int(std::min<int64_t>(QUERY_ROWS, rows * heads - r));
        for (int j = 0; j < keys; j += CHUNK) {
          const int count = std::min(CHUNK, keys - j);
          SCORE_KEYS[tile - 1](queries + r * width, block + j * width, width, count, width, NONE_AHEAD, products);
          for (int i = 0; i < tile; i++) std::copy_n(products + i * CHUNK, count, all[i] + j);
        }
        for (int i = 0; i < tile; i++) {
          const int64_t seen = std::min<int64_t>(keys, end_of(first_row + (r + i) / heads) - first);
          if (seen > 0) scores[(r + i) * C_ + c] = log_sum(all[i], int(seen));
        }
      }
    }
  }

  static float log_sum(float* x, int count) {
    for (int j = 0; j < count; j++)
      if (std::isnan(x[j])) return x[j];
    const int whole = (count + LANES - 1) / LANES * LANES;
    std::fill(x + count, x + whole, NEG_INF);
    vec largest = splat(NEG_INF);
    for (int j = 0; j < whole; j += LANES) largest = max_second_if_nan(load(x + j), largest);
    float best = NEG_INF;
    for (int i = 0; i < LANES; i++) best = std::max(best, largest[i]);
    vec sum = {};
    for (int j = 0; j < whole; j += LANES) {
      const vec below = max_second_if_nan(load(x + j) - splat(std::max(best, -FLT_MAX)), splat(SMALLEST));
      sum += exp2_nonpositive(below * splat(float(LOG2_E)));
    }
    float total = 0.f;
    for (int i = 0; i < LANES; i++) total += sum[i];
    // Missing keys count as exp(SMALLEST), which is nothing.
    return std::log(total) + best;
  }

  // Choose the blocks of one row for the q heads of a cluster; scores is (heads, C).
  void keep_best(size_t g, const Cluster& cluster, int64_t b, int64_t row, float* scores) {
    const Group& group = rules_.groups[g];
    const Static& pattern = prepared_.patterns[g];
    const int64_t limit = grid_.limit(row), heads = int64_t(cluster.members.size());
    std::vector<int32_t> own(limit, EMPTY);
    std::vector<bool> optional(limit, true);
    for (int32_t at = pattern.indptr[row]; at < pattern.indptr[row + 1]; at++) {
      own[pattern.indices[at]] = pattern.mask_ids[at];
      optional[pattern.indices[at]] = !pattern.covered[at];
    }
    std::vector<int32_t> candidates;
    for (int64_t c = 0; c < limit; c++)
      if (optional[c]) candidates.push_back(int32_t(c));
    const bool together = group.choice.together && heads > 1;
    if (together) add_shares(candidates, heads, scores);
    std::vector<int32_t> order(candidates);
    for (int64_t i = 0; i < heads; i++) {
      const float* ranks = scores + (together ? 0 : i * C_);
      const int64_t wanted = group.choice.count(cluster.members[i], limit);
      const size_t count = size_t(std::clamp<int64_t>(wanted, 0, int64_t(order.size())));
      const auto better = [&](int32_t a, int32_t c) { return ranks[a] != ranks[c] ? ranks[a] > ranks[c] : a < c; };
      if (count && count < order.size()) std::nth_element(order.begin(), order.begin() + (count - 1), order.end(), better);
      std::vector<bool> chosen(limit, false);
      for (size_t at = 0; at < count; at++)
        chosen[order[at]] = ranks[order[at]] > NEG_INF || wanted >= limit;
      write_row(b, group.heads[cluster.members[i]], row, own, chosen);
    }
  }

  // Sum exp(score - best score of the head) over the heads for each candidate, into the first head's scores.
  void add_shares(const std::vector<int32_t>& candidates, int64_t heads, float* scores) const {
    std::vector<float> sum(candidates.size(), 0.f);
    for (int64_t i = 0; i < heads; i++) {
      float best = -FLT_MAX;
      for (const int32_t c : candidates) best = std::max(best, scores[i * C_ + c]);
      for (size_t at = 0; at < candidates.size(); at++) sum[at] += std::exp(scores[i * C_ + candidates[at]] - best);
    }
    for (size_t at = 0; at < candidates.size(); at++) scores[candidates[at]] = std::max(sum[at], FLT_MIN);
  }

  void write_row(int64_t b, int64_t head, int64_t row, const std::vector<int32_t>& own, const std::vector<bool>& chosen) {
    Row& to = entry(b, head, row);
    for (const bool full : {false, true})
      for (size_t c = 0; c < own.size(); c++) {
        const int32_t mask_id = chosen[c] ? prepared_.causal_mask_id(row, int64_t(c)) : own[c];
        if (mask_id == EMPTY || (mask_id == FULL) != full) continue;
        to.blocks.push_back(int32_t(c));
        to.mask_ids.push_back(mask_id);
      }
  }

  Chosen put_together() const {
    Chosen made;
    made.indptr.reserve(q_.batch * q_.heads * (R_ + 1));
    size_t total = 0;
    for (const Row& row : entries_) total += row.blocks.size();
    if (total > INT32_MAX) throw std::bad_alloc();
    made.indices.reserve(total);
    made.masks.reserve(total);
    for (int64_t head = 0; head < q_.batch * q_.heads; head++) {
      made.indptr.push_back(int32_t(made.indices.size()));
      for (int64_t row = 0; row < R_; row++) {
        const Row& from = entries_[head * R_ + row];
        made.indices.insert(made.indices.end(), from.blocks.begin(), from.blocks.end());
        made.masks.insert(made.masks.end(), from.mask_ids.begin(), from.mask_ids.end());
        made.indptr.push_back(int32_t(made.indices.size()));
      }
    }
    made.order.resize(q_.batch * q_.heads * R_);
    require(dynaxx_cpu_plan_rows(made.indptr.data(), q_.batch * q_.heads, R_, made.order.data()) == OK);
    return made;
  }

  const LayerRules& rules_;
  const Prepared& prepared_;
  const Grid& grid_;
  const Tensor &q_, &k_;
  const double scale_;
  const int64_t group_size_, R_, C_;
  std::vector<Row> entries_;
};

}  // namespace

Chosen choose(const LayerRules& rules, const Prepared& prepared, const Tensor& q, const Tensor& k, double scale,
              int64_t threads) {
  return Chooser(rules, prepared, q, k, scale).run(threads);
}

}  // namespace dynaxx_onnx
