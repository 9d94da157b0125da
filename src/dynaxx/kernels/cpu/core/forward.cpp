// Forward: one task is one row of blocks of one or more q heads that share their keys.
//
// B batch, N / M queries and keys, D / E head_dim of q, k and of v. A task packs its queries into panels of 16 and
// walks its visited blocks in steps of about KEYS keys: the step's rows of k and v come together in the cache, then
// each panel meets them. Panels, not blocks, are what element masks cut: a panel visits only keys it can see.
#include <cmath>

#include "pack.h"
#include "panel.h"
#include "plan.h"
#include "scratch.h"
#include "tasks.h"

using namespace dynaxx;

namespace {

constexpr int KEYS = 128;                            // keys per softmax step; a block is never split
constexpr int MAX_BLOCKS = KEYS / 16;                // blocks per step
constexpr int MAX_SPANS = MAX_BLOCKS * MAX_RUNS;     // spans per step and panel
constexpr int MAX_PANELS = 16;                       // panels per task: their state stays in the second-level cache
constexpr double LOG2_E = 1.4426950408889634, LN_2 = 0.6931471805599453;

struct Task {
  int64_t batch, head, num_heads;  // q heads [head, head + num_heads) of one kv head
  int64_t row;
};

struct Block {
  const float* k;
  const float* v;
  int rows;
  int32_t mask;
};

// Blocks that one step visits.
struct Step {
  Block blocks[MAX_BLOCKS];
  int num_blocks = 0;
  int keys = 0;
  int64_t k_stride, v_stride;
};

class Row {
 public:
  Row(const ForwardArgs& args, const Task& task, float* memory)
      : args_(args), plan_(*args.plan), task_(task), D_(args.head_dim), E_(args.head_dim_v), memory_(memory) {
    queries_ = std::min(plan_.q_block, plan_.seqlen_q - task.row * plan_.q_block);
    panels_per_head_ = (queries_ + PANEL - 1) / PANEL;
  }

  static int64_t memory_needed(const ForwardArgs& args, int64_t heads) {
    const int64_t panels = heads * (args.plan->q_block / PANEL);
    return panels * (args.head_dim + args.head_dim_v + 2) * PANEL + KEYS * (PANEL + args.head_dim + args.head_dim_v);
  }

  void run() {
    load_queries();
    scores_ = take(KEYS * PANEL);
    packed_k_ = take(KEYS * D_);
    packed_v_ = take(KEYS * E_);
    const int64_t layout_batch = plan_.layout_batch == 1 ? 0 : task_.batch;
    const int64_t layout_head = plan_.layout_heads == 1 ? 0 : task_.head;
    const int64_t q_blocks = (plan_.seqlen_q + plan_.q_block - 1) / plan_.q_block;
    const int32_t* indptr =
        plan_.kv_indptr + (layout_batch * plan_.layout_heads + layout_head) * (q_blocks + 1) + task_.row;
    for (int64_t entry = indptr[0]; entry < indptr[1];) {
      Step step;
      entry = gather(entry, indptr[1], step);
      for (int p = 0; p < num_panels_; p++) {
        Span spans[MAX_SPANS];
        const int num_spans = list_spans(step, p % panels_per_head_, spans);
        if (num_spans) attend(panels_[p], spans, num_spans, step.k_stride, step.v_stride, D_, E_, scores_);
      }
    }
    store_results();
  }

 private:
  float* take(int64_t floats) {
    float* taken = memory_;
    memory_ += floats;
    return taken;
  }

  void load_queries() {
    const float factor = float(args_.scale * LOG2_E);
    const Strides& at = args_.q_strides;
    for (int64_t h = 0; h < task_.num_heads; h++) {
      const float* q = (const float*)args_.q + task_.batch * at.batch + (task_.head + h) * at.head;
      for (int64_t i = 0; i < queries_; i += PANEL) {
        Panel& panel = panels_[num_panels_++];
        panel = {take(D_ * PANEL), take(E_ * PANEL), take(PANEL), take(PANEL)};
        const int rows = int(std::min<int64_t>(PANEL, queries_ - i));
        pack_panel(q + (task_.row * plan_.q_block + i) * at.token, at.token, rows, D_, factor, panel.q);
        reset(panel, E_);
      }
    }
  }

  // The next blocks, together at most KEYS keys; returns the first entry not taken.
  int64_t gather(int64_t entry, int64_t end, Step& step) {
    const int64_t kv_head = task_.head / (args_.q_heads / args_.kv_heads);
    const Strides &k_at = args_.k_strides, &v_at = args_.v_strides;
    const float* k = (const float*)args_.k + task_.batch * k_at.batch + kv_head * k_at.head;
    const float* v = (const float*)args_.v + task_.batch * v_at.batch + kv_head * v_at.head;
    const bool pack_k = num_panels_ > 1 && k_at.token != D_, pack_v = num_panels_ > 1 && v_at.token != E_;
    step.k_stride = pack_k ? D_ : k_at.token;
    step.v_stride = pack_v ? E_ : v_at.token;
    for (; entry < end; entry++) {
      const int64_t first = plan_.kv_indices[entry] * plan_.kv_block;
      const int rows = int(std::min(plan_.kv_block, plan_.seqlen_k - first));
      if (step.keys + rows > KEYS) break;
      Block& block = step.blocks[step.num_blocks++];
      block = {k + first * k_at.token, v + first * v_at.token, rows, plan_.kv_masks[entry]};
      if (pack_k) {
        float* to = packed_k_ + step.keys * D_;
        copy_rows(block.k, k_at.token, rows, D_, to);
        block.k = to;
      }
      if (pack_v) {
        float* to = packed_v_ + step.keys * E_;
        copy_rows(block.v, v_at.token, rows, E_, to);
        block.v = to;
      }
      step.keys += rows;
    }
    return entry;
  }

  // What the panel sees of the step; neighbouring full blocks make one span.
  int list_spans(const Step& step, int64_t panel, Span* spans) const {
    int count = 0;
    for (int b = 0; b < step.num_blocks; b++) {
      const Block& block = step.blocks[b];
      if (block.mask < 0) {
        Span* last = count ? &spans[count - 1] : nullptr;
        if (last && !last->words && last->k + last->rows * step.k_stride == block.k &&
            last->v + last->rows * step.v_stride == block.v)
          last->rows += block.rows;
        else
          spans[count++] = {block.k, block.v, block.rows, nullptr};
        continue;
      }
      const MaskPanel mask = mask_panel(plan_, block.mask, panel);
      for (int run = 0; run < MAX_RUNS; run++) {
        const int begin = mask.runs[2 * run], end = std::min<int>(mask.runs[2 * run + 1], block.rows);
        if (begin >= end) break;
        spans[count++] = {block.k + begin * step.k_stride, block.v + begin * step.v_stride, end - begin,
                          mask.words + begin};
      }
    }
    return count;
  }

  void store_results() {
    const int64_t token = args_.q_heads * E_;
    for (int p = 0; p < num_panels_; p++) {
      const Panel& panel = panels_[p];
      const int64_t head = task_.head + p / panels_per_head_;
      const int64_t first = task_.row * plan_.q_block + p % panels_per_head_ * PANEL;
      const int rows = int(std::min<int64_t>(PANEL, plan_.seqlen_q - first));
      float* lse = args_.lse + (task_.batch * args_.q_heads + head) * plan_.seqlen_q + first;
      float inverse[PANEL];
      for (int i = 0; i < PANEL; i++) inverse[i] = panel.top[i] == NEG_INF ? 0.f : 1.f / panel.sum[i];
      for (int i = 0; i < rows; i++)
        lse[i] = panel.top[i] == NEG_INF ? NEG_INF : float(panel.top[i] * LN_2 + std::log(panel.sum[i]));
      for (int64_t e = 0; e < E_; e++)
        for (int i = 0; i < PANEL; i += LANES) {
          float* x = panel.out + e * PANEL + i;
          store(x, load(x) * load(inverse + i));
        }
      float* out = (float*)args_.out + (task_.batch * plan_.seqlen_q + first) * token + head * E_;
      transpose(panel.out, PANEL, int(E_), rows, out, token);
    }
  }

  const ForwardArgs& args_;
  const Plan& plan_;
  const Task& task_;
  const int64_t D_, E_;
  float* memory_;
  int64_t queries_, panels_per_head_;
  int num_panels_ = 0;
  Panel panels_[MAX_PANELS];
  float *scores_, *packed_k_, *packed_v_;
};

// How many q heads of a group one task serves: rows of k and v are then gathered once for all of them.
int64_t heads_per_task(const ForwardArgs& args, int64_t rows) {
  if (args.plan->layout_heads != 1) return 1;
  const int64_t group = args.q_heads / args.kv_heads;
  int64_t heads = std::min<int64_t>(group, MAX_PANELS / (args.plan->q_block / PANEL));
  while (heads > 1 && args.batch * args.kv_heads * ((group + heads - 1) / heads) * rows < 4 * args.threads) heads /= 2;
  return heads;
}

}  // namespace

// Returns 0, or 1 where memory ran out.
extern "C" DYNAXX_EXPORT int dynaxx_cpu_forward(const ForwardArgs* args) {
  const Plan& plan = *args->plan;
  const int64_t group = args->q_heads / args->kv_heads;
  const int64_t rows = (plan.seqlen_q + plan.q_block - 1) / plan.q_block;
  const int64_t heads = heads_per_task(*args, rows), parts = (group + heads - 1) / heads;
  std::atomic<int> failed{0};
  for_each_task(args->batch * args->kv_heads * parts * rows, args->threads, [&](int64_t index) {
    const int64_t part = index / rows % parts, kv_head = index / rows / parts % args->kv_heads;
    Task task;
    task.batch = index / rows / parts / args->kv_heads;
    task.head = kv_head * group + part * heads;
    task.num_heads = std::min(heads, group - part * heads);
    const int64_t layout_head = (plan.layout_batch == 1 ? 0 : task.batch) * plan.layout_heads +
                                (plan.layout_heads == 1 ? 0 : task.head);
    task.row = plan.row_order[layout_head * rows + index % rows];
    try {
      Row(*args, task, thread_scratch().reserve(Row::memory_needed(*args, heads))).run();
    } catch (const std::bad_alloc&) {
      failed = 1;
    }
  });
  return failed;
}
