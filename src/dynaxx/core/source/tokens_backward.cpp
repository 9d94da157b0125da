// SPDX-License-Identifier: Apache-2.0
// Backward over chosen tokens: one task is a window of keys of one kv head, which goes through all queries that see it.
//
// With s = scale * q . k, p = exp(s - lse) and delta = grad . out - lse_grad:
//     dv += p grad,    ds = p * (grad . v - delta) * scale,    dk += ds q,    dq += ds k
// dk and dv of a window are the task's own and stay in the second-level cache. dq is summed over windows in their order: a
// tile of queries counts the windows that have added to it, and each waits for its turn. So results are bitwise the same
// on any number of threads, and nothing of the size of queries x choices is kept.
#include "gradient_tiles.h"
#include "ordered_tasks.h"
#include "scratch.h"
#include "tasks.h"
#include "token_args.h"
#include "token_softmax.h"

using namespace dynaxx;

namespace {

constexpr int64_t POSITIONS = 16;            // of a tile of queries, which has one turn
constexpr int64_t WINDOW_FLOATS = 128 << 10;  // keys, values and their gradients of a window: half a second-level cache
constexpr int64_t WINDOW_STEP = 128;         // keys; a multiple of every block, so that none is cut

struct Window {
  int64_t sequence, kv_head, index, first, stop;
};

int64_t window_width(const TokenArgs& args) {
  const int64_t floats = 2 * (args.k_row + args.v_row);
  return std::max<int64_t>(1, WINDOW_FLOATS / floats / WINDOW_STEP) * WINDOW_STEP;
}

class TokenBackward {
 public:
  TokenBackward(const TokenBackwardArgs& args, const Window& window, const std::atomic<int>& failed)
      : args_(args.common), grads_(args), window_(window), span_(span_of(args_, window.sequence)), failed_(failed),
        rows_(args_.q_heads / units_of(args_)), D_(whole_vectors(args_.head_dim)), E_(whole_vectors(args_.head_dim_v)),
        scale_(args_.scale, args_.softcap) {}

  static int64_t memory_needed(const TokenArgs& args) {
    const int64_t rows = args.q_heads / units_of(args);
    return rows * (whole_vectors(args.head_dim) + whole_vectors(args.head_dim_v) + 2 * TOKEN_CHUNK);
  }

  void run(float* memory) {
    q_ = memory;
    grad_ = q_ + rows_ * D_;
    p_ = grad_ + rows_ * E_;
    ds_ = p_ + rows_ * TOKEN_CHUNK;
    q_rows_.resize(rows_);
    grad_rows_.resize(rows_);
    const int64_t tokens_k = args_.ends_k[args_.sequences], at = window_.kv_head * tokens_k + span_.first_k;
    k_ = args_.k + at * args_.k_row;
    v_ = args_.v + at * args_.v_row;
    dk_ = grads_.dk + at * grads_.d_row;
    dv_ = grads_.dv + at * grads_.e_row;
    const int64_t units = units_of(args_) / args_.kv_heads;
    for (int64_t first = 0; first < span_.queries; first += POSITIONS) {
      const int64_t stop = std::min(first + POSITIONS, span_.queries);
      if (span_.visible(stop - 1) <= window_.first) continue;
      int32_t* turn = grads_.turns + window_.kv_head * args_.ends_q[args_.sequences] + span_.first_q + first / POSITIONS;
      await_turn(turn, int32_t(window_.index), failed_);
      for (int64_t i = first; i < stop; i++)
        for (int64_t u = 0; u < units; u++) add_position(i, window_.kv_head * units + u);
      end_turn(turn, int32_t(window_.index));
    }
  }

 private:
  void add_position(int64_t i, int64_t unit) {
    const int64_t token = span_.first_q + i, select_head = unit * args_.select_heads / units_of(args_);
    const int32_t* chosen = args_.chosen + (token * args_.select_heads + select_head) * args_.slots;
    const int64_t stop = std::min(window_.stop, span_.visible(i));
    const auto below = [](int32_t block, int64_t bound) { return block >= 0 && block < bound; };
    const int32_t* from = std::lower_bound(chosen, chosen + args_.slots, window_.first / args_.grain, below);
    const int32_t* to = std::lower_bound(from, chosen + args_.slots, (stop + args_.grain - 1) / args_.grain, below);
    keys_.clear();
    list_keys(from, to - from, args_.grain, window_.first, stop, keys_);
    if (keys_.empty()) return;
    const int64_t tokens = args_.ends_q[args_.sequences];
    for (int64_t r = 0; r < rows_; r++) {
      const int64_t head = unit * rows_ + r;
      const Tokens q(args_.q, args_.element, args_.q_strides, 0, head), grad(grads_.grad, args_.element, grads_.grad_strides, 0, head);
      q_rows_[r] = in_place_or_read(q, token, args_.head_dim, q_ + r * D_);
      grad_rows_[r] = in_place_or_read(grad, token, args_.head_dim_v, grad_ + r * E_);
    }
    q_step_ = rows_ > 1 ? q_rows_[1] - q_rows_[0] : D_;
    grad_step_ = rows_ > 1 ? grad_rows_[1] - grad_rows_[0] : E_;
    for (size_t at = 0; at < keys_.size(); at += TOKEN_CHUNK) add_chunk(at, token, unit * rows_, tokens);
  }

  static const float* in_place_or_read(const Tokens& tokens, int64_t token, int64_t width, float* space) {
    if (tokens.element == Element::FP32 && width % LANES == 0) return tokens.row(token);
    read_query(tokens, token, width, 1.f, space);
    return space;
  }

  void add_chunk(size_t at, int64_t token, int64_t first_head, int64_t tokens) {
    TokenRows k, v;
    float *dk[TOKEN_CHUNK], *dv[TOKEN_CHUNK];
    k.count = v.count = int(std::min<size_t>(keys_.size() - at, TOKEN_CHUNK));
    for (int j = 0; j < k.count; j++) {
      const int64_t key = keys_[at + j];
      k.at[j] = k_ + key * args_.k_row;
      v.at[j] = v_ + key * args_.v_row;
      dk[j] = dk_ + key * grads_.d_row;
      dv[j] = dv_ + key * grads_.e_row;
    }
    k.fill_up();
    v.fill_up();
    for (int64_t r = 0; r < rows_; r += TOKEN_ROWS) {
      const int tile = int(std::min<int64_t>(TOKEN_ROWS, rows_ - r));
      DOT_ROWS[tile - 1](q_rows_[r], q_step_, k, D_, r ? NOTHING_AHEAD : TokensAhead{&v, E_}, p_ + r * TOKEN_CHUNK);
      DOT_ROWS[tile - 1](grad_rows_[r], grad_step_, v, E_, NOTHING_AHEAD, ds_ + r * TOKEN_CHUNK);
      float* dq[TOKEN_ROWS];
      for (int i = 0; i < tile; i++) {
        const int64_t head = first_head + r + i;
        weigh(k.count, grads_.lse[head * tokens + token], grads_.delta[head * tokens + token], r + i);
        dq[i] = grads_.dq + (token * args_.q_heads + head) * grads_.d_row;
      }
      SUM_ROWS[tile - 1]({ds_ + r * TOKEN_CHUNK, TOKEN_CHUNK, 1}, k.at, k.count, D_, nullptr, NOTHING_AHEAD, dq);
    }
    for (int j = 0; j < k.count; j += TOKEN_ROWS) {
      const int tile = std::min(TOKEN_ROWS, k.count - j);
      SUM_ROWS[tile - 1]({ds_ + j, 1, TOKEN_CHUNK}, q_rows_.data(), int(rows_), D_, nullptr, NOTHING_AHEAD, dk + j);
      SUM_ROWS[tile - 1]({p_ + j, 1, TOKEN_CHUNK}, grad_rows_.data(), int(rows_), E_, nullptr, NOTHING_AHEAD, dv + j);
    }
  }

  // Products q . k of one row become weights, and grad . v gradients of scores. A row that sees nothing has no keys here.
  void weigh(int count, float lse, float delta, int64_t row) {
    float *p = p_ + row * TOKEN_CHUNK, *ds = ds_ + row * TOKEN_CHUNK;
    const double base = double(lse) * LOG2_E;
    const vec high = splat(float(base)), low = splat(float(base - float(base)));
    for (int j = 0; j < count; j += LANES) {
      vec score = load(p + j) * splat(scale_.sign), slope = splat(float(args_.scale));
      if (scale_.capped()) {
        score = tanh_of(score * splat(scale_.cap));
        slope *= splat(1.f) - score * score;
      }
      const vec weight = exp2_nonpositive(score * splat(scale_.factor) - high - low);
      store(p + j, weight);
      store(ds + j, weight * (load(ds + j) - splat(delta)) * slope);
    }
  }

  const TokenArgs& args_;
  const TokenBackwardArgs& grads_;
  const Window window_;
  const TokenSpan span_;
  const std::atomic<int>& failed_;
  const int64_t rows_, D_, E_;
  const Scale scale_;
  int64_t q_step_ = 0, grad_step_ = 0;  // between rows of heads
  const float *k_ = nullptr, *v_ = nullptr;
  float *q_ = nullptr, *grad_ = nullptr, *p_ = nullptr, *ds_ = nullptr, *dk_ = nullptr, *dv_ = nullptr;
  std::vector<const float*> q_rows_, grad_rows_;
  std::vector<int32_t> keys_;
};

}  // namespace

// Returns a `Status`.
extern "C" DYNAXX_EXPORT int dynaxx_cpu_token_backward(const TokenBackwardArgs* args) {
  return status_of([&] {
    const TokenArgs& common = args->common;
    check(common);
    require(WINDOW_STEP % common.grain == 0);
    require(within(args->d_row, whole_vectors(common.head_dim), 2 * MAX_DIM) &&
            within(args->e_row, whole_vectors(common.head_dim_v), 2 * MAX_DIM));
    const int64_t width = window_width(common), memory = TokenBackward::memory_needed(common);
    std::vector<Window> windows;
    for (int64_t s = 0; s < common.sequences; s++)
      for (int64_t head = 0; head < common.kv_heads; head++)
        for (int64_t first = 0, keys = span_of(common, s).keys; first < keys; first += width)
          windows.push_back({s, head, first / width, first, std::min(first + width, keys)});
    std::atomic<int> failed{OK};
    for_each_task(int64_t(windows.size()), common.threads, failed, [&](int64_t task) {
      TokenBackward(*args, windows[task], failed).run(thread_scratch().reserve(memory));
    });
    rethrow(failed);
  });
}
