// SPDX-License-Identifier: Apache-2.0
// Forward over chosen tokens: one task is a tile of neighbouring positions of one unit.
//
// Every query attends to its own list, so nothing is masked and no row is met by a query that did not choose it. Sharing
// lies in the order: a tile goes through the keys window by window, and within a window position by position. Rows that
// several positions chose are then read from the second-level cache by all but the first.
#include "scratch.h"
#include "tasks.h"
#include "token_args.h"
#include "token_softmax.h"

using namespace dynaxx;

namespace {

constexpr int64_t MAX_POSITIONS = 32;     // of a tile
constexpr int64_t TILE_FLOATS = 64 << 10;  // of a tile's queries and sums: a share of the second-level cache
constexpr int64_t WINDOW_KEYS = 96;        // that a position meets in a window, about

struct Tile {
  int64_t unit, sequence, first, positions;
};

class TokenForward {
 public:
  TokenForward(const TokenForwardArgs& args, const Tile& tile)
      : args_(args.common), results_(args), tile_(tile), span_(span_of(args_, tile.sequence)),
        shape_{args_.q_heads / units_of(args_), whole_vectors(args_.head_dim), whole_vectors(args_.head_dim_v),
               Scale(args_.scale, args_.softcap)} {}

  static int64_t memory_needed(const TokenArgs& args, int64_t positions) {
    const int64_t rows = args.q_heads / units_of(args);
    return positions * rows * (whole_vectors(args.head_dim) + whole_vectors(args.head_dim_v) + 2) + rows * TOKEN_CHUNK +
           whole_vectors(args.head_dim_v);
  }

  void run(float* memory) {
    const int64_t rows = shape_.rows;
    scores_ = memory + tile_.positions * rows * (shape_.D + shape_.E + 2);
    scaled_ = scores_ + rows * TOKEN_CHUNK;
    for (int64_t i = 0; i < tile_.positions; i++) load_position(i, memory);
    meet_windows();
    for (int64_t i = 0; i < tile_.positions; i++) store_position(i);
  }

 private:
  void load_position(int64_t i, float* memory) {
    const int64_t rows = shape_.rows;
    float* at = memory + i * rows * (shape_.D + shape_.E + 2);
    states_[i] = {at, at + rows * shape_.D, at + rows * (shape_.D + shape_.E), at + rows * (shape_.D + shape_.E + 1)};
    states_[i].reset(rows, shape_.E);
    const int64_t token = span_.first_q + tile_.first + i, units = units_of(args_);
    for (int64_t r = 0; r < rows; r++) {
      const Tokens q(args_.q, args_.element, args_.q_strides, 0, tile_.unit * rows + r);
      read_query(q, token, args_.head_dim, shape_.scale.sign, states_[i].q + r * shape_.D);
    }
    const int64_t select_head = tile_.unit * args_.select_heads / units;
    begins_[i] = int64_t(keys_.size());
    list_keys(args_.chosen + (token * args_.select_heads + select_head) * args_.slots, args_.slots, args_.grain, 0,
              span_.visible(tile_.first + i), keys_);
    begins_[i + 1] = int64_t(keys_.size());
  }

  void meet_windows() {
    const int64_t units = units_of(args_), kv_head = tile_.unit * args_.kv_heads / units;
    const int64_t tokens = args_.ends_k[args_.sequences];
    k_ = args_.k + (kv_head * tokens + span_.first_k) * args_.k_row;
    v_ = args_.v + (kv_head * tokens + span_.first_k) * args_.v_row;
    int64_t longest = 1, next[MAX_POSITIONS];
    for (int64_t i = 0; i < tile_.positions; i++) {
      longest = std::max(longest, begins_[i + 1] - begins_[i]);
      next[i] = begins_[i];
    }
    const int64_t seen = span_.visible(tile_.first + tile_.positions - 1);
    const int64_t width = tile_.positions == 1 ? seen : std::max<int64_t>(1, seen * WINDOW_KEYS / longest);
    for (int64_t stop = width; stop < seen + width; stop += width)
      for (int64_t i = 0; i < tile_.positions; i++) {
        const int64_t from = next[i], end = begins_[i + 1];
        if (stop >= seen)
          next[i] = end;
        else
          while (next[i] < end && keys_[next[i]] < stop) next[i]++;
        if (next[i] > from) meet(states_[i], from, next[i]);
      }
  }

  // A position and the keys [from, to) of its list.
  void meet(const TokenState& state, int64_t from, int64_t to) {
    TokenRows k, v, ahead;
    gather(k_, args_.k_row, from, to, k);
    for (; from < to; from += TOKEN_CHUNK) {
      gather(v_, args_.v_row, from, to, v);
      gather(k_, args_.k_row, from + TOKEN_CHUNK, to, ahead);
      attend_chunk(shape_, state, k, v, &ahead, scores_);
      k = ahead;
    }
  }

  void gather(const float* rows, int64_t stride, int64_t from, int64_t to, TokenRows& found) const {
    found.count = int(std::clamp<int64_t>(to - from, 0, TOKEN_CHUNK));
    for (int j = 0; j < found.count; j++) found.at[j] = rows + keys_[from + j] * stride;
    found.fill_up();
  }

  void store_position(int64_t i) const {
    const int64_t token = span_.first_q + tile_.first + i, tokens = args_.ends_q[args_.sequences], E = args_.head_dim_v;
    const Strides at{0, args_.q_heads * E, E};
    for (int64_t r = 0; r < shape_.rows; r++) {
      const int64_t head = tile_.unit * shape_.rows + r;
      float& lse = results_.lse[head * tokens + token];
      const float inverse = finish_row(shape_.scale, states_[i].top[r], states_[i].sum[r],
                                       results_.sinks ? results_.sinks[head] : NEG_INF, lse);
      for (int64_t e = 0; e < shape_.E; e += LANES) store(scaled_ + e, load(states_[i].out + r * shape_.E + e) * splat(inverse));
      Results(results_.out, args_.element, at, 0, head).write(token, E, scaled_);
    }
  }

  const TokenArgs& args_;
  const TokenForwardArgs& results_;
  const Tile tile_;
  const TokenSpan span_;
  const TokenShape shape_;
  const float *k_ = nullptr, *v_ = nullptr;
  float *scores_ = nullptr, *scaled_ = nullptr;
  TokenState states_[MAX_POSITIONS];
  int64_t begins_[MAX_POSITIONS + 1] = {};
  std::vector<int32_t> keys_;  // of all positions of the tile, each ascending
};

}  // namespace

// Returns a `Status`.
extern "C" DYNAXX_EXPORT int dynaxx_cpu_token_forward(const TokenForwardArgs* args) {
  return status_of([&] {
    const TokenArgs& common = args->common;
    check(common);
    const int64_t units = units_of(common);
    const int64_t floats = common.q_heads / units * (whole_vectors(common.head_dim) + whole_vectors(common.head_dim_v));
    const int64_t positions = std::clamp<int64_t>(TILE_FLOATS / floats, 1, MAX_POSITIONS);
    std::vector<int64_t> tiles{0};  // before each sequence
    for (int64_t s = 0; s < common.sequences; s++)
      tiles.push_back(tiles.back() + (span_of(common, s).queries + positions - 1) / positions);
    const int64_t memory = TokenForward::memory_needed(common, positions);
    for_each_task(units * tiles.back(), common.threads, [&](int64_t task) {
      const int64_t index = tiles.back() - 1 - task % tiles.back();  // the last see most: first
      const int64_t s = std::upper_bound(tiles.begin(), tiles.end(), index) - tiles.begin() - 1;
      const int64_t first = (index - tiles[s]) * positions;
      const Tile tile{task / tiles.back(), s, first, std::min(positions, span_of(common, s).queries - first)};
      TokenForward(*args, tile).run(thread_scratch().reserve(memory));
    });
  });
}

// Whether rows of choices are blocks below `limits` (one per `rows_per_limit` rows), ascending, then -1. `found` gets the
// first row that holds a number out of range, then the first that is not ascending, -1 for none. Returns a `Status`.
extern "C" DYNAXX_EXPORT int dynaxx_cpu_token_check(const int32_t* chosen, int64_t rows, int64_t slots, const int32_t* limits,
                                                    int64_t rows_per_limit, int64_t threads, int64_t* found) {
  return status_of([&] {
    require(within(rows, 0, MAX_TOKENS) && within(slots, 0, INT32_MAX) && countable(rows, slots));
    require(within(rows_per_limit, 1, MAX_HEADS) && within(threads, 1, MAX_THREADS));
    constexpr int64_t ROWS = 1024;
    const int64_t tasks = (rows + ROWS - 1) / ROWS;
    std::vector<int64_t> wrong(2 * tasks, -1);
    for_each_task(tasks, threads, [&](int64_t task) {
      for (int64_t row = task * ROWS; row < std::min(rows, (task + 1) * ROWS); row++) {
        const int32_t *at = chosen + row * slots, limit = limits[row / rows_per_limit];
        bool outside = false, falls = false;
        for (int64_t i = 0; i < slots; i++) {
          outside |= at[i] < -1 || at[i] >= limit;
          falls |= i > 0 && (at[i - 1] < 0 ? at[i] >= 0 : at[i] >= 0 && at[i] <= at[i - 1]);
        }
        if (outside && wrong[2 * task] < 0) wrong[2 * task] = row;
        if (falls && wrong[2 * task + 1] < 0) wrong[2 * task + 1] = row;
      }
    });
    found[0] = found[1] = -1;
    for (int64_t i = 2 * tasks; i-- > 0;)
      if (wrong[i] >= 0) found[i % 2] = wrong[i];
  });
}
