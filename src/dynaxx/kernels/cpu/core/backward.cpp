// Backward: one task is every `strips`-th row of blocks of keys of one q head, in order, so sums have a fixed order.
//
// B batch, N / M queries and keys, D / E head_dim of q, k and of v. Keys lie in panels of 16; queries and the gradient
// of out are the visited rows. With s = scale * q . k, p = exp(s - lse), delta = rowsum(grad * out) - lse_grad:
//     dv = p^T grad,    ds = p * (grad . v - delta) * scale,    dk = ds^T q,    dq = ds k
// which are five matmuls for each visited pair of blocks: two score tiles, two sums into panels, one into rows of dq.
#include "gradient_tiles.h"
#include "scratch.h"
#include "step.h"
#include "tasks.h"

using namespace dynaxx;

namespace {

constexpr int MAX_PANELS = 8;  // panels of one block of keys

// What the gradient of a panel of keys needs, and the gradients so far.
struct KeyPanel {
  float* k;   // (D, PANEL) times the scale's sign
  float* v;   // (E, PANEL)
  float* dk;  // (D, PANEL)
  float* dv;  // (E, PANEL)
};

// Rows of a step.
struct RowRange {
  int begin, end;
};

// One row of blocks of keys of one q head.
class BackwardRow {
 public:
  BackwardRow(const BackwardArgs& args, int64_t batch, int64_t head, int64_t row, int64_t strip, float* memory)
      : args_(args), plan_(*args.plan), batch_(batch), head_(head), row_(row), strip_(strip), D_(args.head_dim),
        E_(args.head_dim_v), k_stride_((args.head_dim + PANEL - 1) / PANEL * PANEL), scale_(args.scale), memory_(memory) {
    keys_ = int(std::min(plan_.block, plan_.seqlen - row * plan_.block));
    num_panels_ = (keys_ + PANEL - 1) / PANEL;
    head_rows_ = (batch * args.q_heads + head) * plan_.visited_seqlen;
  }

  static int64_t memory_needed(const BackwardArgs& args) {
    const int64_t D = args.head_dim, E = args.head_dim_v, block = args.plan->block;
    return block * (2 * D + 2 * E) + block * (D + PANEL) + PANEL * (D + E) +
           STEP_ROWS * (D + E + PANEL + MAX_PANELS * PANEL + 2);
  }

  void run() {
    load_keys();
    const Rows q = rows_of(args_.q, args_.q_strides, D_), grad = rows_of(args_.grad, args_.grad_strides, E_);
    p_ = take(STEP_ROWS * PANEL);
    ds_ = take(num_panels_ * STEP_ROWS * PANEL);
    base_ = (Base*)take(2 * STEP_ROWS);
    const int32_t* indptr = row_indptr(plan_, batch_, head_, row_);
    for (int64_t entry = indptr[0]; entry < indptr[1];) {
      Step step;
      entry = gather_step(plan_, entry, indptr[1], q, grad, step);
      load_bases(step);
      for (int p = 0; p < num_panels_; p++) add_key_grads(step, p, q.step_stride(), grad.step_stride());
      for (int b = 0; b < step.num_blocks; b++) add_query_grads(step.blocks[b], b);
    }
    store_key_grads();
  }

 private:
  float* take(int64_t floats) {
    float* taken = memory_;
    memory_ += floats;
    return taken;
  }

  Rows rows_of(const void* tensor, const Strides& at, int64_t width) {
    const Tokens tokens(tensor, args_.element, at, batch_, head_);
    return {tokens, width, worth_packing(tokens, width, num_panels_) ? take(STEP_ROWS * width) : nullptr};
  }

  // The block's keys and values as panels, and its keys as rows padded to whole vectors for dq.
  void load_keys() {
    const int64_t kv_head = head_ / (args_.q_heads / args_.kv_heads), first = row_ * plan_.block;
    const Tokens k(args_.k, args_.element, args_.k_strides, batch_, kv_head);
    const Tokens v(args_.v, args_.element, args_.v_strides, batch_, kv_head);
    float* space = take(PANEL * std::max(D_, E_));
    for (int p = 0; p < num_panels_; p++) {
      const int rows = std::min(PANEL, keys_ - p * PANEL);
      panels_[p] = {take(D_ * PANEL), take(E_ * PANEL), take(D_ * PANEL), take(E_ * PANEL)};
      pack_panel(k, first + p * PANEL, rows, D_, scale_.sign, space, panels_[p].k);
      pack_panel(v, first + p * PANEL, rows, E_, 1.f, space, panels_[p].v);
      std::memset(panels_[p].dk, 0, sizeof(float) * D_ * PANEL);
      std::memset(panels_[p].dv, 0, sizeof(float) * E_ * PANEL);
    }
    k_rows_ = take(keys_ * k_stride_);
    for (int r = 0; r < keys_; r++) {
      k.read(first + r, D_, k_rows_ + r * k_stride_);
      for (int64_t d = D_; d < k_stride_; d++) k_rows_[r * k_stride_ + d] = 0;
    }
  }

  // lse of each row of the step in units of log2 e; 0 where a query sees nothing: its scores are all -inf.
  void load_bases(const Step& step) {
    for (int b = 0; b < step.num_blocks; b++) {
      const Block& block = step.blocks[b];
      const float* lse = args_.lse + head_rows_ + block.token;
      for (int r = 0; r < block.rows; r++) {
        const double base = lse[r] == NEG_INF ? 0. : lse[r] * LOG2_E;
        base_[block.at + r] = {float(base), float(base - float(base))};
      }
    }
  }

  // Weights and score gradients of one panel, and what they add to dk and dv.
  void add_key_grads(const Step& step, int panel, int64_t q_stride, int64_t grad_stride) {
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
      for (int s = 0; s < count; s++) score_span(keys, found[s], q_stride, grad_stride, block, ds);
      num_spans += count;
    }
    add_rows<false>(spans, num_spans, grad_stride, E_, p_, nullptr, keys.dv);
    add_rows<true>(spans, num_spans, q_stride, D_, ds, nullptr, keys.dk);
  }

  void score_span(const KeyPanel& keys, const Span& span, int64_t q_stride, int64_t grad_stride, const Block& block,
                  float* ds) {
    const float* delta = args_.delta + head_rows_ + block.token - block.at;
    for (int r = 0; r < span.rows;) {
      const int rows = next_tile(span.rows - r, SCORE_ROWS), at = span.at + r;
      WEIGHT_TILES[rows - 1](span.k + r * q_stride, q_stride, keys.k, D_, span.words ? span.words + r : nullptr,
                             scale_.factor, base_ + at, p_ + at * PANEL);
      SCORE_GRAD_TILES[rows - 1](span.v + r * grad_stride, grad_stride, keys.v, E_, delta + at, float(args_.scale),
                                 p_ + at * PANEL, ds + at * PANEL);
      r += rows;
    }
  }

  // ds k of one block of queries, over all panels of keys that its rows see.
  void add_query_grads(const Block& block, int index) {
    const Strides& at = args_.dq_strides;
    const int64_t token = at.token;
    float* dq = args_.dq + strip_ * args_.dq_strip + batch_ * at.batch + head_ * at.head + block.token * token;
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
      for (int64_t d = 0; d < D_; d += PANEL)
        QUERY_GRAD_TILES[rows - 1](terms, num_terms, d, k_stride_, int(std::min<int64_t>(PANEL, D_ - d)),
                                   dq + r * token + d, token);
      r += rows;
    }
  }

  void store_key_grads() const {
    for (int p = 0; p < num_panels_; p++) {
      const int rows = std::min(PANEL, keys_ - p * PANEL);
      const int64_t token = row_ * plan_.block + p * PANEL;
      const Strides &dk_at = args_.dk_strides, &dv_at = args_.dv_strides;
      float* dk = args_.dk + batch_ * dk_at.batch + head_ * dk_at.head + token * dk_at.token;
      float* dv = args_.dv + batch_ * dv_at.batch + head_ * dv_at.head + token * dv_at.token;
      transpose(panels_[p].dk, PANEL, int(D_), rows, dk, dk_at.token);
      transpose(panels_[p].dv, PANEL, int(E_), rows, dv, dv_at.token);
    }
  }

  const BackwardArgs& args_;
  const Plan& plan_;
  const int64_t batch_, head_, row_, strip_, D_, E_, k_stride_;
  const Scale scale_;
  float* memory_;
  int keys_, num_panels_;
  int64_t head_rows_;
  KeyPanel panels_[MAX_PANELS];
  RowRange seen_[MAX_PANELS][MAX_BLOCKS];  // of each block of the step, what each panel sees of it
  float *k_rows_, *p_, *ds_;
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

// delta[i] = grad[i] . out[i] - lse_grad[i] of one block of queries of one head. `space` holds 2 * E floats.
void fill_delta(const BackwardArgs& args, int64_t batch, int64_t head, int64_t first, float* space) {
  const int64_t N = args.plan->visited_seqlen, last = std::min(N, first + args.plan->visited_block);
  const int64_t E = args.head_dim_v;
  const Tokens out(args.out, args.element, args.out_strides, batch, head);
  const Tokens grad(args.grad, args.element, args.grad_strides, batch, head);
  for (int64_t i = first; i < last; i++) {
    out.read(i, E, space);
    grad.read(i, E, space + E);
    const int64_t at = (batch * args.q_heads + head) * N + i;
    args.delta[at] = dot_rows(space, space + E, E) - (args.lse_grad ? args.lse_grad[at] : 0.f);
  }
}

}  // namespace

// Returns 0, or 1 where memory ran out.
extern "C" DYNAXX_EXPORT int dynaxx_cpu_backward(const BackwardArgs* args) {
  const Plan& plan = *args->plan;
  const int64_t rows = num_rows(plan), heads = args->q_heads;
  const int64_t q_blocks = (plan.visited_seqlen + plan.visited_block - 1) / plan.visited_block;
  std::atomic<int> failed{0};
  for_each_task(args->batch * heads * q_blocks, args->threads, [&](int64_t index) {
    try {
      float* space = thread_scratch().reserve(2 * args->head_dim_v);
      const int64_t first = index % q_blocks * plan.visited_block;
      fill_delta(*args, index / q_blocks / heads, index / q_blocks % heads, first, space);
    } catch (const std::bad_alloc&) {
      failed = 1;
    }
  });
  for_each_task(args->batch * heads * args->strips, args->threads, [&](int64_t index) {
    const int64_t strip = index % args->strips, head = index / args->strips % heads;
    const int64_t batch = index / args->strips / heads;
    try {
      for (int64_t row = strip; row < rows; row += args->strips)
        BackwardRow(*args, batch, head, row, strip, thread_scratch().reserve(BackwardRow::memory_needed(*args))).run();
    } catch (const std::bad_alloc&) {
      failed = 1;
    }
  });
  return failed;
}
