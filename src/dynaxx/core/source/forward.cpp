// SPDX-License-Identifier: Apache-2.0
// Forward pass. One task computes one row of blocks, for one or more q heads that share a kv head.
//
// Legend: B batch; N queries, M keys; D head_dim of q and k, E head_dim of v.
//
//     q    --> panels of 16 queries (state: largest score, sum, out) --+
//     k, v --> step of 128 visited rows in the cache ------------------+--> scores --> weights --> out += weights v
//
// A task packs its queries into panels of 16 and processes its visited blocks in steps. The rows of a step are gathered
// in the cache once, and then every panel reads them. Element masks are applied per panel instead of per block, so a
// panel reads only keys that it can see.
#include <cmath>

#include "prefetch.h"
#include "panel.h"
#include "scratch.h"
#include "tasks.h"

using namespace dynaxx;

namespace {

constexpr int MAX_PANELS = 16;  // panels per task, whose state must fit into the second-level cache

struct Task {
  int64_t batch, head, num_heads;  // q heads [head, head + num_heads) of one kv head
  int64_t row;
};

class ForwardRow {
 public:
  ForwardRow(const ForwardArgs& args, const Task& task, float* memory)
      : args_(args), plan_(*args.plan), task_(task), D_(args.head_dim), E_(args.head_dim_v),
        scale_(args.scale, args.softcap, args.bias),
        pairs_(multiplies_pairs(args.element, scale_)), depth_(pairs_ ? num_pairs(D_) : D_), memory_(memory) {
    queries_ = std::min(plan_.block, plan_.seqlen - task.row * plan_.block);
    panels_per_head_ = (queries_ + PANEL - 1) / PANEL;
  }

  static int64_t memory_needed(const ForwardArgs& args, int64_t heads) {
    const int64_t panels = heads * (args.plan->block / PANEL);
    return panels * (args.head_dim + args.head_dim_v + 2) * PANEL +
           STEP_ROWS * (2 * PANEL + args.head_dim + args.head_dim_v) + PANEL * std::max(args.head_dim, args.head_dim_v);
  }

  void run() {
    load_queries();
    const Rows k = rows_of(args_.k, args_.k_strides, D_, pairs_), v = rows_of(args_.v, args_.v_strides, E_, false);
    const int64_t k_stride = k.step_stride(), v_stride = v.step_stride();
    float* scores = take(2 * STEP_ROWS * PANEL);
    const int32_t* indptr = row_indptr(plan_, task_.batch, task_.head, task_.row);
    for (int64_t entry = indptr[0]; entry < indptr[1];) {
      Step step;
      entry = gather_step(plan_, entry, indptr[1], k, v, step);
      StepPrefetch next(plan_, entry, indptr[1], k, v);
      for (int p = 0; p < num_panels_; p++) {
        next.fetch(num_panels_);
        Span spans[MAX_SPANS];
        const int num_spans = step_spans(plan_, step, p % panels_per_head_, k_stride, v_stride, spans);
        if (!num_spans) continue;
        if (args_.bias) load_bias(plan_, step, bias_of(p), first_query(p), scores);
        if (p + 1 < num_panels_ && step.plain() && pairable(depth_, scale_, pairs_)) {
          attend_pair(panels_[p], panels_[p + 1], spans, num_spans, k_stride, v_stride, depth_, E_, scale_,
                      {scores, scores + STEP_ROWS * PANEL});
          next.fetch(num_panels_);
          p++;
        } else {
          attend(panels_[p], spans, num_spans, k_stride, v_stride, depth_, E_, scale_, pairs_, scores);
        }
      }
    }
    for (int p = 0; p < num_panels_; p++) store_panel(p);
  }

 private:
  float* take(int64_t floats) {
    float* taken = memory_;
    memory_ += floats;
    return taken;
  }

  void load_queries() {
    space_ = take(PANEL * std::max(D_, E_));
    for (int64_t h = 0; h < task_.num_heads; h++) {
      const Tokens q(args_.q, args_.element, args_.q_strides, task_.batch, task_.head + h);
      for (int64_t i = 0; i < queries_; i += PANEL) {
        QueryPanel& panel = panels_[num_panels_++];
        panel = {take(D_ * PANEL), take(E_ * PANEL), take(PANEL), take(PANEL)};
        const int rows = int(std::min<int64_t>(PANEL, queries_ - i));
        (pairs_ ? pack_pairs : pack_panel)(q, task_.row * plan_.block + i, rows, D_, scale_.sign, space_, panel.q);
        reset(panel, E_);
      }
    }
  }

  Rows rows_of(const void* tensor, const Strides& at, int64_t width, bool pairs) {
    const int64_t kv_head = task_.head / (args_.q_heads / args_.kv_heads);
    const Tokens tokens(tensor, args_.element, at, task_.batch, kv_head);
    return {tokens, width, worth_packing(tokens, width, num_panels_) ? take(STEP_ROWS * width) : nullptr, pairs};
  }

  int64_t head_of(int p) const { return task_.head + p / panels_per_head_; }
  int64_t first_query(int p) const { return task_.row * plan_.block + p % panels_per_head_ * PANEL; }
  const float* bias_of(int p) const {
    return args_.bias + (task_.batch * args_.q_heads + head_of(p)) * bias_size(plan_);
  }

  void store_panel(int p) const {
    const QueryPanel& panel = panels_[p];
    const int64_t head = head_of(p), first = first_query(p);
    const int rows = int(std::min<int64_t>(PANEL, plan_.seqlen - first));
    float* lse = args_.lse + (task_.batch * args_.q_heads + head) * plan_.seqlen + first;
    const float sink = args_.sinks ? args_.sinks[head] : NEG_INF;
    float inverse[PANEL] = {};
    for (int i = 0; i < rows; i++) {
      lse[i] = sink;
      if (panel.top[i] == NEG_INF) continue;
      lse[i] = float(panel.top[i] * scale_.factor * LN_2 + std::log(panel.sum[i]));
      inverse[i] = 1.f / (sink == NEG_INF ? panel.sum[i] : panel.sum[i] * add_sink(lse[i], sink));
    }
    for (int64_t e = 0; e < E_; e++)
      for (int i = 0; i < PANEL; i += LANES) {
        float* x = panel.out + e * PANEL + i;
        store(x, load(x) * load(inverse + i));
      }
    const Strides at{plan_.seqlen * args_.q_heads * E_, args_.q_heads * E_, E_};
    unpack_panel(panel.out, E_, rows, Results(args_.out, args_.element, at, task_.batch, head), first, space_);
  }

  const ForwardArgs& args_;
  const Plan& plan_;
  const Task& task_;
  const int64_t D_, E_;
  const Scale scale_;
  const bool pairs_;  // whether bf16 elements of q and k are multiplied in pairs
  const int64_t depth_;
  float* memory_;
  float* space_;
  int64_t queries_, panels_per_head_;
  int num_panels_ = 0;
  QueryPanel panels_[MAX_PANELS];
};

// Return how many q heads of a group one task computes. Rows of k and v are gathered once for all of them.
int64_t heads_per_task(const ForwardArgs& args, int64_t rows) {
  if (args.plan->layout_heads != 1) return 1;
  const int64_t group = args.q_heads / args.kv_heads;
  int64_t heads = std::min<int64_t>(group, MAX_PANELS / (args.plan->block / PANEL));
  while (heads > 1 && args.batch * args.kv_heads * ((group + heads - 1) / heads) * rows < 4 * args.threads) heads /= 2;
  return heads;
}

}  // namespace

// Returns a `Status`.
extern "C" DYNAXX_EXPORT int dynaxx_cpu_forward(const ForwardArgs* args) {
  return status_of([&] {
    const Plan& plan = *args->plan;
    check(*args, plan);
    const int64_t group = args->q_heads / args->kv_heads, rows = num_rows(plan);
    const int64_t heads = heads_per_task(*args, rows), parts = (group + heads - 1) / heads;
    for_each_task(args->batch * args->kv_heads * parts * rows, args->threads, [&](int64_t index) {
      const int64_t part = index / rows % parts, kv_head = index / rows / parts % args->kv_heads;
      Task task;
      task.batch = index / rows / parts / args->kv_heads;
      task.head = kv_head * group + part * heads;
      task.num_heads = std::min(heads, group - part * heads);
      task.row = row_at(plan, task.batch, task.head, index % rows);
      ForwardRow(*args, task, thread_scratch().reserve(ForwardRow::memory_needed(*args, heads))).run();
    });
  });
}
