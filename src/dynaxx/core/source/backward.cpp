// SPDX-License-Identifier: Apache-2.0
// Backward pass. One task computes one row of blocks of keys of one kv head, for the q heads of its group.
//
// Legend: B batch; N queries, M keys; D head_dim of q and k, E head_dim of v. Keys lie in panels of 16 tokens; queries
// and the gradient of out are the visited rows. With s = scale * q . k, p = exp(s - lse) and delta = rowsum(grad * out)
// - lse_grad:
//     dv = p^T grad,    ds = p * (grad . v - delta) * scale,    dk = ds^T q,    dq = ds k
// For each visited pair of blocks these are five matmuls: two compute score tiles, two add to panels, one adds to rows
// of dq.
//
//     q, grad --> step of 128 rows -----+                     +--> dk, dv panels (task's own)
//     k, v    --> panels of 16 keys ----+--> p, ds (tiles) ---+
//                                                             +--> dq rows (shared, in order of rows)
//
// A task owns its dk and dv. Several tasks add to the same rows of dq, in the order of their keys: every block of
// queries counts the rows of keys that have added to it, and each task waits for its turn. Results are therefore
// bitwise equal for any number of threads, and partial sums need no memory. fp32 sums are stored in dq itself; for bf16
// and fp16, the high half of a sum is stored in dq and the low half in dq_low.
//
// Heads are processed in waves, large enough to keep threads from waiting and small enough to keep dq_low small. If a
// group is too large for one wave, its q heads are processed in parts, and sums of dk and dv are stored in halves, too.
#include "prefetch.h"
#include "gradient_tiles.h"
#include "scratch.h"
#include "tasks.h"
#include "ordered_tasks.h"

using namespace dynaxx;

namespace {

constexpr int MAX_PANELS = 8;  // panels of one block of keys

// The inputs for the gradients of a panel of keys, and the gradients so far.
struct KeyPanel {
  float* k;   // (D, PANEL) times the scale's sign, or packed in pairs
  float* v;   // (E, PANEL), or packed in pairs
  float* dk;  // (D, PANEL)
  float* dv;  // (E, PANEL)
};

// A range of rows of a step.
struct RowRange {
  int begin, end;
};

int64_t group_size(const BackwardArgs& args) { return args.q_heads / args.kv_heads; }
int64_t num_q_blocks(const Plan& plan) { return (plan.visited_seqlen + plan.visited_block - 1) / plan.visited_block; }

// One kv head of a wave, and the q heads of its group that belong to the current part.
struct KeyHead {
  int64_t batch, head, place;  // place: index in the wave
  int64_t begin, end;          // range of q heads in the group
};

// One q head of a part, and its slices of the working memory.
struct QueryHead {
  int64_t batch, head, slot;

  QueryHead(const BackwardArgs& args, const KeyHead& keys, int64_t g)
      : batch(keys.batch),
        head(keys.head * group_size(args) + g),
        slot(keys.place * args.part + g - keys.begin) {}

  const float* lse(const BackwardArgs& args) const { return args.lse + of_all(args) * args.plan->visited_seqlen; }
  const float* lse_grad(const BackwardArgs& args) const {
    return args.lse_grad ? args.lse_grad + of_all(args) * args.plan->visited_seqlen : nullptr;
  }
  float* delta(const BackwardArgs& args) const { return args.delta + slot * args.plan->visited_seqlen; }
  int32_t* turns(const BackwardArgs& args) const { return args.turns + slot * (num_q_blocks(*args.plan) + 1); }
  const float* bias(const BackwardArgs& args) const { return args.bias + of_all(args) * bias_size(*args.plan); }
  float* bias_grad(const BackwardArgs& args) const { return args.bias_grad + of_all(args) * bias_size(*args.plan); }
  uint16_t* dq_low(const BackwardArgs& args) const {
    return args.dq_low + slot * args.plan->visited_seqlen * args.head_dim;
  }
  Results dq(const BackwardArgs& args) const { return {args.dq, args.element, args.dq_strides, batch, head}; }

 private:
  int64_t of_all(const BackwardArgs& args) const { return batch * args.q_heads + head; }
};

// Computation of one row of blocks of keys.
class BackwardRow {
 public:
  BackwardRow(const BackwardArgs& args, const KeyHead& head, int64_t row, const std::atomic<int>& failed, float* memory)
      : args_(args), plan_(*args.plan), head_(head), row_(row), D_(args.head_dim), E_(args.head_dim_v),
        k_stride_((args.head_dim + PANEL - 1) / PANEL * PANEL), scale_(args.scale, args.softcap, args.bias),
        pairs_(multiplies_pairs(args.element, scale_)), failed_(failed), memory_(memory) {
    keys_ = int(std::min(plan_.block, plan_.seqlen - row * plan_.block));
    num_panels_ = (keys_ + PANEL - 1) / PANEL;
  }

  static int64_t memory_needed(const BackwardArgs& args) {
    const int64_t D = args.head_dim, E = args.head_dim_v, block = args.plan->block;
    return block * (2 * D + 2 * E) + block * (D + PANEL) + PANEL * std::max(D, E) +
           STEP_ROWS * (D + E + PANEL + MAX_PANELS * PANEL + 2) + (args.bias_grad ? num_bias_sums(*args.plan) : 0) +
           (HAS_PAIRS ? STEP_ROWS * (num_pairs(D) + num_pairs(E)) : 0);
  }

  void run() {
    load_keys();
    q_packed_ = take(STEP_ROWS * D_);
    grad_packed_ = take(STEP_ROWS * E_);
    p_ = take(STEP_ROWS * PANEL);
    ds_ = take(num_panels_ * STEP_ROWS * PANEL);
    base_ = (Base*)take(2 * STEP_ROWS);
    if (pairs_) {
      q_pairs_ = take(STEP_ROWS * num_pairs(D_));
      grad_pairs_ = take(STEP_ROWS * num_pairs(E_));
    }
    if (args_.bias_grad) bias_sums_ = take(num_bias_sums(plan_));
    for (int64_t g = head_.begin; g < head_.end; g++) add_head(QueryHead(args_, head_, g));
    store_key_grads();
  }

 private:
  float* take(int64_t floats) {
    float* taken = memory_;
    memory_ += floats;
    return taken;
  }

  Rows rows_of(const void* tensor, const Strides& at, const QueryHead& head, int64_t width, float* packed) const {
    const Tokens tokens(tensor, args_.element, at, head.batch, head.head);
    return {tokens, width, worth_packing(tokens, width, num_panels_) ? packed : nullptr};
  }

  // Load the block's keys and values as panels, and its keys as rows padded to whole vectors for dq.
  void load_keys() {
    const int64_t first = row_ * plan_.block;
    const Tokens k(args_.k, args_.element, args_.k_strides, head_.batch, head_.head);
    const Tokens v(args_.v, args_.element, args_.v_strides, head_.batch, head_.head);
    space_ = take(PANEL * std::max(D_, E_));
    for (int p = 0; p < num_panels_; p++) {
      const int rows = std::min(PANEL, keys_ - p * PANEL);
      panels_[p] = {take(D_ * PANEL), take(E_ * PANEL), take(D_ * PANEL), take(E_ * PANEL)};
      const auto pack = pairs_ ? pack_pairs : pack_panel;
      pack(k, first + p * PANEL, rows, D_, scale_.sign, space_, panels_[p].k);
      pack(v, first + p * PANEL, rows, E_, 1.f, space_, panels_[p].v);
      load_sums(dk(), args_.dk_low, p, D_, panels_[p].dk);
      load_sums(dv(), args_.dv_low, p, E_, panels_[p].dv);
    }
    k_rows_ = take(keys_ * k_stride_);
    for (int r = 0; r < keys_; r++) {
      k.read(first + r, D_, k_rows_ + r * k_stride_);
      for (int64_t d = D_; d < k_stride_; d++) k_rows_[r * k_stride_ + d] = 0;
    }
  }

  // Load the sums of earlier parts.
  void load_sums(const Results& sums, const uint16_t* low, int p, int64_t width, float* panel) const {
    std::memset(panel, 0, sizeof(float) * width * PANEL);
    if (head_.begin == 0) return;
    const int64_t first = row_ * plan_.block + p * PANEL;
    const int rows = std::min(PANEL, keys_ - p * PANEL);
    for (int r = 0; r < rows; r++)
      read_halves(sums.half_row(first + r), low_row(low, first + r, width), width, space_ + r * width);
    transpose(space_, width, rows, width, panel, PANEL);
  }

  void add_head(const QueryHead& head) {
    const Rows q = rows_of(args_.q, args_.q_strides, head, D_, q_packed_);
    const Rows grad = rows_of(args_.grad, args_.grad_strides, head, E_, grad_packed_);
    const int32_t* indptr = row_indptr(plan_, head.batch, head.head, row_);
    if (bias_sums_) std::fill_n(bias_sums_, num_bias_sums(plan_), 0.f);
    for (int64_t entry = indptr[0]; entry < indptr[1];) {
      Step step;
      const int32_t* ranks = plan_.ranks + entry;
      entry = gather_step(plan_, entry, indptr[1], q, grad, step);
      load_bases(step, head.lse(args_));
      if (pairs_) load_pairs(step, q.tokens, grad.tokens);
      StepPrefetch next(plan_, entry, indptr[1], q, grad);
      for (int p = 0; p < num_panels_; p++) {
        next.fetch(num_panels_);
        if (args_.bias) load_bias(plan_, step, head.bias(args_), row_ * plan_.block + p * PANEL, p_);
        add_key_grads(step, p, q.step_stride(), grad.step_stride(), head.delta(args_));
      }
      for (int b = 0; b < step.num_blocks; b++) {
        int32_t* turn = head.turns(args_) + step.blocks[b].token / plan_.visited_block;
        await_turn(turn, ranks[b], failed_);
        add_query_grads(step.blocks[b], b, head);
        end_turn(turn, ranks[b]);
      }
    }
    if (bias_sums_) add_bias_grads(head);
  }

  // Distances of this row's keys from all queries, from that of its first key to the last query.
  static int64_t num_bias_sums(const Plan& plan) { return plan.visited_seqlen - 1 + plan.block + PANEL; }

  void add_bias_grads(const QueryHead& head) const {
    int32_t* turn = head.turns(args_) + num_q_blocks(plan_);
    float* sums = head.bias_grad(args_) + row_ * plan_.block;
    const int64_t count = std::min(num_bias_sums(plan_), bias_size(plan_) - row_ * plan_.block);
    await_turn(turn, int32_t(row_), failed_);
    for (int64_t x = 0; x < count; x++) sums[x] += bias_sums_[x];
    end_turn(turn, int32_t(row_));
  }

  // Return where the gradients of a panel's pairs with the query `token` are added.
  BiasSums bias_sums(int panel, int64_t token) const {
    if (!bias_sums_) return {nullptr, 0};
    const int keys = std::min(PANEL, keys_ - panel * PANEL);
    return {bias_sums_ + plan_.visited_seqlen - 1 + panel * PANEL - token, uint16_t((1u << keys) - 1)};
  }

  // Load lse of each row of the step in units of log2 e; 0 for a query that sees nothing, whose scores are all -inf.
  void load_bases(const Step& step, const float* lse) {
    for (int b = 0; b < step.num_blocks; b++) {
      const Block& block = step.blocks[b];
      for (int r = 0; r < block.rows; r++) {
        const float of_row = lse[block.token + r];
        const double base = of_row == NEG_INF ? 0. : of_row * LOG2_E;
        base_[block.at + r] = {float(base), float(base - float(base))};
      }
    }
  }

  // Load the step's rows as pairs, in addition to the fp32 rows that are summed.
  void load_pairs(const Step& step, const Tokens& q, const Tokens& grad) {
    for (int b = 0; b < step.num_blocks; b++) {
      const Block& block = step.blocks[b];
      for (int r = 0; r < block.rows; r++) {
        read_pairs(q, block.token + r, D_, q_pairs_ + (block.at + r) * num_pairs(D_));
        read_pairs(grad, block.token + r, E_, grad_pairs_ + (block.at + r) * num_pairs(E_));
      }
    }
  }

  // Compute weights and score gradients of one panel, and add their contributions to dk and dv.
  void add_key_grads(const Step& step, int panel, int64_t q_stride, int64_t grad_stride, const float* delta) {
    const KeyPanel& keys = panels_[panel];
    float* ds = ds_ + panel * STEP_ROWS * PANEL;
    Span spans[MAX_SPANS];
    int num_spans = 0;
    for (int b = 0; b < step.num_blocks; b++) {
      const Block& block = step.blocks[b];
      Span* found = spans + num_spans;
      const int count = block_spans(plan_, block, panel, q_stride, grad_stride, found);
      if (block.mask >= 0) std::memset(ds + block.at * PANEL, 0, sizeof(float) * block.rows * PANEL);
      seen_[panel][b] = count ? RowRange{found[0].at, found[count - 1].at + found[count - 1].rows} : RowRange{0, 0};
      for (int s = 0; s < count; s++) {
        const float* of_rows = delta + block.token - block.at;
        const BiasSums bias = bias_sums(panel, block.token - block.at);
        if (HAS_PAIRS && pairs_)
          score_span<HAS_PAIRS>(keys, found[s], q_pairs_ + found[s].at * num_pairs(D_), num_pairs(D_),
                                grad_pairs_ + found[s].at * num_pairs(E_), num_pairs(E_), of_rows, ds, bias);
        else
          score_span<false>(keys, found[s], found[s].k, q_stride, found[s].v, grad_stride, of_rows, ds, bias);
      }
      num_spans += count;
    }
    add_rows<false>(spans, num_spans, grad_stride, E_, p_, nullptr, keys.dv);
    add_rows<true>(spans, num_spans, q_stride, D_, ds, nullptr, keys.dk);
  }

  template <bool PAIRS>
  void score_span(const KeyPanel& keys, const Span& span, const float* q, int64_t q_stride, const float* grad,
                  int64_t grad_stride, const float* delta, float* ds, const BiasSums& bias) {
    const auto& weights = scale_.capped() ? WEIGHT_TILES<true, PAIRS> : WEIGHT_TILES<false, PAIRS>;
    const auto& gradients = scale_.capped() ? SCORE_GRAD_TILES<true, PAIRS> : SCORE_GRAD_TILES<false, PAIRS>;
    const int64_t depth = PAIRS ? num_pairs(D_) : D_, width = PAIRS ? num_pairs(E_) : E_;
    for (int r = 0; r < span.rows;) {
      const int rows = next_tile(span.rows - r, SCORE_ROWS), at = span.at + r;
      weights[rows - 1](q + r * q_stride, q_stride, keys.k, depth, span.words ? span.words + r : nullptr, scale_,
                        base_ + at, p_ + at * PANEL, ds + at * PANEL);
      gradients[rows - 1](grad + r * grad_stride, grad_stride, keys.v, width, delta + at, float(args_.scale),
                          p_ + at * PANEL, ds + at * PANEL, {bias.at ? bias.at - at : nullptr, bias.bits});
      r += rows;
    }
  }

  // Add ds k of one block of queries, over all panels of keys that its rows see.
  void add_query_grads(const Block& block, int index, const QueryHead& head) {
    const Results dq = head.dq(args_);
    if (args_.dq_low)
      add_to_sums(block, index, SplitSums{dq.half_row(block.token), head.dq_low(args_) + block.token * D_, dq.stride, D_});
    else
      add_to_sums(block, index, WideSums{dq.row(block.token), dq.stride});
  }

  template <class Sums>
  void add_to_sums(const Block& block, int index, const Sums& sums) {
    for (int r = 0; r < block.rows;) {
      const int rows = next_tile(block.rows - r, SCORE_ROWS);
      RowTerm terms[MAX_PANELS];
      int num_terms = 0;
      for (int p = 0; p < num_panels_; p++) {
        const int row = block.at + r;
        if (row + rows <= seen_[p][index].begin || row >= seen_[p][index].end) continue;
        terms[num_terms++] = {ds_ + (p * STEP_ROWS + row) * PANEL, k_rows_ + p * PANEL * k_stride_,
                              std::min(PANEL, keys_ - p * PANEL)};
      }
      for (int64_t d = 0; num_terms && d < D_; d += PANEL)
        QUERY_GRAD_TILES<Sums>[rows - 1](terms, num_terms, d, k_stride_, int(std::min<int64_t>(PANEL, D_ - d)), sums, r);
      r += rows;
    }
  }

  void store_key_grads() const {
    for (int p = 0; p < num_panels_; p++) {
      store_sums(panels_[p].dk, p, D_, dk(), args_.dk_low);
      store_sums(panels_[p].dv, p, E_, dv(), args_.dv_low);
    }
  }

  void store_sums(const float* panel, int p, int64_t width, const Results& sums, uint16_t* low) const {
    const int64_t first = row_ * plan_.block + p * PANEL;
    const int rows = std::min(PANEL, keys_ - p * PANEL);
    if (head_.end == group_size(args_)) {
      unpack_panel(panel, width, rows, sums, first, space_);
      return;
    }
    transpose(panel, PANEL, int(width), rows, space_, width);
    for (int r = 0; r < rows; r++)
      write_halves(space_ + r * width, width, sums.half_row(first + r), low_row(low, first + r, width));
  }

  Results dk() const { return {args_.dk, args_.element, args_.dk_strides, head_.batch, head_.head}; }
  Results dv() const { return {args_.dv, args_.element, args_.dv_strides, head_.batch, head_.head}; }

  template <class Half>
  Half* low_row(Half* low, int64_t token, int64_t width) const {
    return low + (head_.place * plan_.seqlen + token) * width;
  }

  const BackwardArgs& args_;
  const Plan& plan_;
  const KeyHead head_;
  const int64_t row_, D_, E_, k_stride_;
  const Scale scale_;
  const bool pairs_;  // whether bf16 elements are multiplied in pairs
  const std::atomic<int>& failed_;
  float* memory_;
  int keys_, num_panels_;
  KeyPanel panels_[MAX_PANELS];
  RowRange seen_[MAX_PANELS][MAX_BLOCKS];  // rows of each block of the step that each panel sees
  float *space_, *q_packed_, *grad_packed_, *q_pairs_, *grad_pairs_, *k_rows_, *p_, *ds_;
  float* bias_sums_ = nullptr;
  Base* base_;
};

float dot_rows(const float* a, const float* b, int64_t width) {
  vec sums = {};
  int64_t e = 0;
  for (; e + LANES <= width; e += LANES) sums += load(a + e) * load(b + e);
  float sum = 0;
  for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
  for (; e < width; e++) sum += a[e] * b[e];
  return sum;
}

// Prepare one block of queries before a wave: delta[i] = grad[i] . out[i] - lse_grad[i], and zero sums. `space` holds
// 2 * E floats.
void begin_queries(const BackwardArgs& args, const QueryHead& at, int64_t block, float* space) {
  const int64_t E = args.head_dim_v, D = args.head_dim, first = block * args.plan->visited_block;
  const int64_t last = std::min(args.plan->visited_seqlen, first + args.plan->visited_block);
  const Tokens out(args.out, args.element, args.out_strides, at.batch, at.head);
  const Tokens grad(args.grad, args.element, args.grad_strides, at.batch, at.head);
  const Results dq = at.dq(args);
  const float* lse_grad = at.lse_grad(args);
  at.turns(args)[block] = 0;
  if (block == 0) at.turns(args)[num_q_blocks(*args.plan)] = 0;
  for (int64_t i = first; i < last; i++) {
    out.read(i, E, space);
    grad.read(i, E, space + E);
    at.delta(args)[i] = dot_rows(space, space + E, E) - (lse_grad ? lse_grad[i] : 0.f);
    if (args.dq_low) {
      std::memset(dq.half_row(i), 0, sizeof(uint16_t) * D);
      std::memset(at.dq_low(args) + i * D, 0, sizeof(uint16_t) * D);
    } else
      std::memset(dq.row(i), 0, sizeof(float) * D);
  }
}

// Round sums in two halves to bf16 or fp16 after a wave. `space` holds D floats.
void round_queries(const BackwardArgs& args, const QueryHead& at, int64_t block, float* space) {
  const int64_t D = args.head_dim, first = block * args.plan->visited_block;
  const int64_t last = std::min(args.plan->visited_seqlen, first + args.plan->visited_block);
  const Results dq = at.dq(args);
  for (int64_t i = first; i < last; i++) {
    read_halves(dq.half_row(i), at.dq_low(args) + i * D, D, space);
    dq.write(i, D, space);
  }
}

// Run all tasks of kv heads [first, first + wave) and of q heads [begin, end) in each one's group.
void run_wave(const BackwardArgs& args, int64_t first, int64_t wave, int64_t begin, int64_t end,
              std::atomic<int>& failed) {
  const int64_t rows = num_rows(*args.plan), blocks = num_q_blocks(*args.plan), heads = end - begin;
  const auto for_each = [&](int64_t tasks, int64_t floats, const auto& run) {
    for_each_task(tasks, args.threads, failed, [&](int64_t task) { run(task, thread_scratch().reserve(floats)); });
  };
  const auto key_head = [&](int64_t place) {
    const int64_t index = first + place;
    return KeyHead{index / args.kv_heads, index % args.kv_heads, place, begin, end};
  };
  const auto query_head = [&](int64_t task) {
    return QueryHead(args, key_head(task / blocks / heads), begin + task / blocks % heads);
  };
  for_each(wave * heads * blocks, 2 * args.head_dim_v, [&](int64_t task, float* memory) {
    begin_queries(args, query_head(task), task % blocks, memory);
  });
  for_each(wave * rows, BackwardRow::memory_needed(args), [&](int64_t task, float* memory) {
    const int64_t before = task / (args.threads * rows) * args.threads, side = std::min(args.threads, wave - before);
    task -= before * rows;  // as many heads at once as threads: no thread waits, and each head stays in its caches
    BackwardRow(args, key_head(before + task % side), task / side, failed, memory).run();
  });
  if (args.dq_low)
    for_each(wave * heads * blocks, args.head_dim, [&](int64_t task, float* memory) {
      round_queries(args, query_head(task), task % blocks, memory);
    });
}

}  // namespace

// Returns a `Status`.
extern "C" DYNAXX_EXPORT int dynaxx_cpu_backward(const BackwardArgs* args) {
  return status_of([&] {
    check(*args, *args->plan);
    require(args->wave > 0 && args->part > 0 && args->threads > 0);
    const int64_t heads = args->batch * args->kv_heads, group = group_size(*args);
    std::atomic<int> failed{OK};
    for (int64_t first = 0; first < heads; first += std::min(args->wave, heads))
      for (int64_t begin = 0; begin < group && !failed; begin += std::min(args->part, group))
        run_wave(*args, first, std::min(args->wave, heads - first), begin, begin + std::min(args->part, group - begin), failed);
    rethrow(failed);
  });
}
