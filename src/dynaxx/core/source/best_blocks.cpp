// SPDX-License-Identifier: Apache-2.0
// The best kv blocks of each row of q blocks, by the attention of the mean queries of the row's tiles to every key.
//
//     q --> mean queries of tiles, side by side in lanes --+
//     k ---------------------------------------------------+--> scores --> of each block: best, sum of 2 ** (score - best)
//     best, sum of all blocks --> mass of each block --> sum over a row's tiles [and heads] --> bits of the best blocks
//
// One task is a few rows of all q heads of one kv head, so that a block of keys is read from memory once for all of them.
// Heads that take nothing, or everything, are scored only for heads that choose together with them. Heads whose count is
// negative never take part.
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <vector>

#include "args.h"
#include "exp2.h"
#include "pack.h"
#include "scratch.h"
#include "tasks.h"

using namespace dynaxx;

namespace {

constexpr int WIDE = LANES == 16 ? 32 : 16;  // mean queries side by side
constexpr int WIDE_VECS = WIDE / LANES;
constexpr int WIDE_ROWS = LANES == 16 ? 8 : LANES == 8 ? 6 : 2;  // keys per register tile
constexpr int LANES_PER_TASK = 96;
constexpr int32_t NOT_ELIGIBLE = INT32_MIN;

// Return log2(x) for x >= 1, -inf for 0.
DYNAXX_INLINE vec log2_of(vec x) {
  const ivec bits = (ivec)x, power = (bits - (ivec{} + 0x3f400000)) >> 23;  // x = m * 2 ** power, 0.75 <= m < 1.5
  const vec m = (vec)(bits - (power << 23));
  const vec s = (m - splat(1.f)) / (m + splat(1.f)), t = s * s;
  vec p = splat(float(2 * LOG2_E / 9));
  p = p * t + splat(float(2 * LOG2_E / 7));
  p = p * t + splat(float(2 * LOG2_E / 5));
  p = p * t + splat(float(2 * LOG2_E / 3));
  p = p * t + splat(float(2 * LOG2_E));
  const vec found = p * s + __builtin_convertvector(power, vec);
  return x > splat(0.f) ? found : x == splat(0.f) ? splat(NEG_INF) : x;
}

// scores[r][lane] = keys[r] . panel[:][lane], -inf where a lane ends before the key; best = max(best, scores).
template <int R, bool CUT>
void score_keys(const float* keys, int64_t stride, const float* panel, int64_t D, int32_t first, const int32_t* ends,
                float* scores, float* best) {
  vec sum[R][WIDE_VECS] = {};
  for (int64_t d = 0; d < D; d++) {
    vec b[WIDE_VECS];
    DYNAXX_UNROLL
    for (int i = 0; i < WIDE_VECS; i++) b[i] = load(panel + d * WIDE + i * LANES);
    DYNAXX_UNROLL
    for (int r = 0; r < R; r++) {
      const vec a = splat(keys[r * stride + d]);
      DYNAXX_UNROLL
      for (int i = 0; i < WIDE_VECS; i++) sum[r][i] += a * b[i];
    }
  }
  DYNAXX_UNROLL
  for (int i = 0; i < WIDE_VECS; i++) {
    vec top = load(best + i * LANES);
    DYNAXX_UNROLL
    for (int r = 0; r < R; r++) {
      if (CUT) sum[r][i] = (ivec)load((const float*)ends + i * LANES) > first + r - ivec{} ? sum[r][i] : splat(NEG_INF);
      top = max_second_if_nan(top, sum[r][i]);
      store(scores + r * WIDE + i * LANES, sum[r][i]);
    }
    store(best + i * LANES, top);
  }
}

template <bool CUT>
constexpr auto KEY_TILES = tiles_of<WIDE_ROWS>([](auto rows) { return &score_keys<rows(), CUT>; });

// WIDE mean queries: those of one or two panels.
struct Unit {
  float *panel, *best, *sums;  // (D, WIDE), (blocks, WIDE), (blocks, WIDE)
  int32_t ends[WIDE];          // keys that each lane sees
  int32_t least = INT32_MAX, most = 0;  // over the lanes that are used
};

struct Panel {
  int64_t head, row;  // first row
};

class Chooser {
 public:
  Chooser(const BestBlocksArgs& args, int64_t task)
      : args_(args), rows_(args.rows()), blocks_(args.blocks()), words_(args.words()), parts_(args.parts()) {
    const int64_t per_head = tasks_per_head(args), of = task / per_head, at = per_head - 1 - task % per_head;
    batch_ = of / args.kv_heads;
    kv_head_ = of % args.kv_heads;
    first_ = at * rows_per_task(args);  // the last rows see most: first
    last_ = std::min(rows_, first_ + rows_per_task(args));
  }

  static int64_t panel_rows(const BestBlocksArgs& args) { return PANEL / args.parts(); }
  static int64_t rows_per_task(const BestBlocksArgs& args) {
    return panel_rows(args) * std::max<int64_t>(1, LANES_PER_TASK / PANEL / args.group());
  }
  static int64_t tasks_per_head(const BestBlocksArgs& args) {
    return (args.rows() + rows_per_task(args) - 1) / rows_per_task(args);
  }
  static int64_t most_units(const BestBlocksArgs& args) {
    const int64_t panels = args.group() * rows_per_task(args) / panel_rows(args);
    return (panels * PANEL + WIDE - 1) / WIDE;
  }
  static int64_t padded(int64_t blocks) { return (blocks + PANEL - 1) / PANEL * PANEL; }
  static int64_t memory_needed(const BestBlocksArgs& args) {
    const int64_t unit = WIDE * (args.head_dim + 2 * args.blocks());
    const int64_t space = std::max(PANEL * args.head_dim, WIDE * padded(args.blocks()));
    const int64_t shared = args.together ? rows_per_task(args) * padded(args.blocks()) : 0;
    return most_units(args) * unit + WIDE * args.kv_block + space + padded(args.blocks()) + shared;
  }

  void run(float* memory) {
    find_panels();
    if (panels_.empty()) return;
    take(memory);
    for (size_t i = 0; i < panels_.size(); i++) load_panel(i);
    for (int64_t block = 0; block < blocks_; block++)
      for (Unit& unit : units_)
        if (block * args_.kv_block < unit.most) score_block(block, unit);
    for (size_t i = 0; i < units_.size(); i++) rank(i);
    for (int64_t row = first_; args_.together && row < last_; row++)
      for (int64_t head = kv_head_ * args_.group(); head < (kv_head_ + 1) * args_.group(); head++)
        if (chooses(head, row)) mark_best(shared_of(row), blocks_, -1.f, head, row);
  }

 private:
  uint32_t* chosen_of(int64_t head, int64_t row) const {
    return args_.chosen + ((batch_ * args_.q_heads + head) * rows_ + row) * words_;
  }

  float* shared_of(int64_t row) const { return shared_ + (row - first_) * padded(blocks_); }
  int32_t count_of(int64_t head, int64_t row) const { return args_.counts[head * rows_ + row]; }
  bool chooses(int64_t head, int64_t row) const { return count_of(head, row) > 0 && count_of(head, row) != ALL_OPTIONAL; }

  // Write the rows that need no scores, and list the panels of the others.
  void find_panels() {
    for (int64_t row = first_; row < last_; row += panel_rows(args_)) {
      std::vector<int64_t> heads, scored;  // of the q heads that take part, those that choose
      for (int64_t head = kv_head_ * args_.group(); head < (kv_head_ + 1) * args_.group(); head++) {
        if (count_of(head, row) >= 0) heads.push_back(head);
        bool some = false;
        for (int64_t r = row; r < std::min(last_, row + panel_rows(args_)); r++) {
          uint32_t* to = chosen_of(head, r);
          if (count_of(head, r) == ALL_OPTIONAL)
            std::copy_n(args_.optional + r * words_, words_, to);
          else
            std::fill_n(to, words_, 0);
          some |= chooses(head, r);
        }
        if (some) scored.push_back(head);
      }
      for (const int64_t head : args_.together && !scored.empty() ? heads : scored) panels_.push_back({head, row});
    }
  }

  void take(float* memory) {
    units_.resize((panels_.size() * PANEL + WIDE - 1) / WIDE);
    for (Unit& unit : units_) {
      unit.panel = memory;
      unit.best = unit.panel + args_.head_dim * WIDE;
      unit.sums = unit.best + blocks_ * WIDE;
      memory = unit.sums + blocks_ * WIDE;
      std::memset(unit.panel, 0, sizeof(float) * args_.head_dim * WIDE);
      std::memset(unit.ends, 0, sizeof unit.ends);
    }
    scores_ = memory;
    space_ = scores_ + WIDE * args_.kv_block;
    order_ = (int32_t*)(space_ + std::max(PANEL * args_.head_dim, WIDE * padded(blocks_)));
    shared_ = (float*)(order_ + padded(blocks_));
    if (args_.together) std::fill_n(shared_, (last_ - first_) * padded(blocks_), 0.f);
  }

  // Put the mean queries of a panel's tiles into its lanes.
  void load_panel(size_t index) {
    const Panel& panel = panels_[index];
    Unit& unit = units_[index * PANEL / WIDE];
    const int at = int(index * PANEL % WIDE);
    const Tokens q(args_.q, 0, args_.q_strides, batch_, panel.head);
    const int64_t D = args_.head_dim, tile = args_.tile;
    int lanes = 0;
    for (int64_t first = panel.row * args_.q_block; lanes < PANEL && first < args_.seqlen_q; lanes++, first += tile) {
      if (first >= last_ * args_.q_block) break;
      const int64_t end = std::min(args_.seqlen_q, first + tile);
      float* __restrict mean = space_ + lanes * D;
      std::copy_n(q.row(first), D, mean);
      for (int64_t token = first + 1; token < end; token++) {
        const float* __restrict row = q.row(token);
        for (int64_t d = 0; d < D; d++) mean[d] += row[d];
      }
      const float factor = float(args_.scale / double(end - first));
      for (int64_t d = 0; d < D; d++) mean[d] *= factor;
      const int64_t stop = args_.causal ? first + tile + args_.seqlen_k - args_.seqlen_q : args_.seqlen_k;
      const int32_t seen = int32_t(std::clamp<int64_t>(stop, 0, args_.seqlen_k));
      unit.ends[at + lanes] = seen;
      unit.least = std::min(unit.least, seen);
      unit.most = std::max(unit.most, seen);
    }
    transpose(space_, D, lanes, D, unit.panel + at, WIDE);
  }

  void score_block(int64_t block, const Unit& unit) const {
    const int64_t first = block * args_.kv_block;
    const int keys = int(std::min<int64_t>(args_.kv_block, unit.most - first));
    const bool cut = first + keys > unit.least;
    const Tokens k(args_.k, 0, args_.k_strides, batch_, kv_head_);
    float *best = unit.best + block * WIDE, *sums = unit.sums + block * WIDE;
    for (int i = 0; i < WIDE; i++) best[i] = NEG_INF;
    for (int key = 0; key < keys;) {
      const int rows = keys - key >= 2 * WIDE_ROWS ? WIDE_ROWS : keys - key > WIDE_ROWS ? (keys - key + 1) / 2 : keys - key;
      const auto& tiles = cut ? KEY_TILES<true> : KEY_TILES<false>;
      tiles[rows - 1](k.row(first + key), k.stride, unit.panel, args_.head_dim, int32_t(first + key), unit.ends,
                      scores_ + key * WIDE, best);
      key += rows;
    }
    DYNAXX_UNROLL
    for (int i = 0; i < WIDE; i += LANES) {
      const vec base = max_second_if_nan(splat(-std::numeric_limits<float>::max()), load(best + i));  // not -inf
      vec sum = {};
      for (int key = 0; key < keys; key++) sum += exp2_nonpositive(load(scores_ + key * WIDE + i) - base);
      store(sums + i, sum);
    }
  }

  // Turn best and sums into logarithms of masses, or into shares if a row has several tiles.
  void weigh(Unit& unit, int64_t blocks) const {
    for (int i = 0; i < WIDE; i += LANES) {
      float *best = unit.best + i, *sums = unit.sums + i;
      if (parts_ == 1) {
        for (int64_t at = 0; at < blocks * WIDE; at += WIDE) store(best + at, load(best + at) + log2_of(load(sums + at)));
        continue;
      }
      vec top = splat(-std::numeric_limits<float>::max()), total = {};
      for (int64_t at = 0; at < blocks * WIDE; at += WIDE) top = max_second_if_nan(top, load(best + at));
      for (int64_t at = 0; at < blocks * WIDE; at += WIDE) {
        const vec mass = load(sums + at) * exp2_nonpositive(load(best + at) - top);
        total += mass;
        store(best + at, mass);
      }
      for (int64_t at = 0; at < blocks * WIDE; at += WIDE) {
        const vec share = load(best + at) / total;
        store(best + at, total == splat(0.f) ? splat(0.f) : share);  // tiles that see no key have no share
      }
    }
  }

  // Choose the blocks of the rows of a unit; where heads choose together, add up their masses.
  void rank(size_t index) {
    Unit& unit = units_[index];
    const int64_t blocks = (unit.most + args_.kv_block - 1) / args_.kv_block, stride = padded(blocks_);
    if (!blocks) return;
    weigh(unit, blocks);
    transpose(unit.best, WIDE, int(blocks), WIDE, space_, stride);
    for (int lane = 0; lane < WIDE; lane += int(parts_)) {
      const size_t panel = (index * WIDE + lane) / PANEL;
      if (panel >= panels_.size()) break;
      const int64_t row = panels_[panel].row + lane % PANEL / parts_, head = panels_[panel].head;
      if (row >= last_) continue;
      if (!args_.together && !chooses(head, row)) continue;
      float* __restrict scores = space_ + lane * stride;
      const int64_t tokens = args_.seqlen_q - row * args_.q_block;  // the last row may have fewer tiles
      for (int64_t part = 1; part < std::min(parts_, (tokens + args_.tile - 1) / args_.tile); part++) {
        const float* __restrict more = scores + part * stride;
        for (int64_t block = 0; block < blocks; block++) scores[block] += more[block];
      }
      if (args_.together)
        add_shares(scores, blocks, row);
      else
        mark_best(scores, blocks, parts_ == 1 ? NEG_INF : 0.f, head, row);
    }
  }

  // Add a head's mass for each block, relative to its best optional one, to those of the heads that choose with it.
  void add_shares(float* scores, int64_t blocks, int64_t row) const {
    constexpr float MOST = std::numeric_limits<float>::max();
    const uint32_t* optional = args_.optional + row * words_;
    float top = parts_ == 1 ? -MOST : std::numeric_limits<float>::min();
    for (int64_t block = 0; block < blocks; block++) {
      if (!(scores[block] <= MOST)) scores[block] = MOST;  // NaN ranks first, so that it reaches the output of attention
      if (optional[block / 32] >> block % 32 & 1) top = std::max(top, scores[block]);
    }
    float* shared = shared_of(row);
    for (int64_t block = 0; block < blocks; block += LANES) {  // padding is not optional
      const vec mass = load(scores + block);
      const vec share = parts_ == 1 ? exp2_nonpositive(mass - splat(top)) : mass / splat(top);
      store(shared + block, load(shared + block) + share);
    }
  }

  // Set the bits of a row's best optional blocks whose scores are above `lowest`, the first ones of equals. NaN is the
  // best.
  void mark_best(const float* scores, int64_t blocks, float lowest, int64_t head, int64_t row) {
    const int64_t padded_blocks = padded(blocks), count = count_of(head, row);
    const uint32_t* optional = args_.optional + row * words_;
    uint32_t* to = chosen_of(head, row);
    for (int64_t block = 0; block < padded_blocks; block++) {
      const bool eligible = block < blocks && (optional[block / 32] >> block % 32 & 1) && !(scores[block] <= lowest);
      const int32_t bits = !eligible ? 0 : scores[block] == scores[block] ? int32_t(bits_of(scores[block] + 0.f)) : INT32_MAX;
      order_[block] = !eligible ? NOT_ELIGIBLE : bits < 0 ? bits ^ INT32_MAX : bits;
    }
    uint32_t least = 1;  // of the chosen; order_ ^ NOT_ELIGIBLE, as unsigned numbers
    int64_t more = at_least(least, padded_blocks);
    if (more > count) {
      least = 0;
      more = padded_blocks;
      for (int bit = 31; bit >= 0 && more != count; bit--) {
        const int64_t found = at_least(least | 1u << bit, padded_blocks);
        if (found >= count) least |= 1u << bit, more = found;
      }
    }
    const int32_t edge = int32_t(least ^ 0x80000000u);
    int64_t surplus = std::max<int64_t>(0, more - count);  // equals to leave out, the last ones
    for (int64_t block = blocks - 1; block >= 0; block--) {
      if (order_[block] < edge) continue;
      if (surplus && order_[block] == edge)
        surplus--;
      else
        to[block / 32] |= 1u << block % 32;
    }
  }

  int64_t at_least(uint32_t least, int64_t padded_blocks) const {
    const ivec edge = int32_t(least ^ 0x80000000u) - ivec{};
    ivec found = {};
    for (int64_t block = 0; block < padded_blocks; block += LANES)
      found -= (ivec)load((const float*)order_ + block) >= edge;
    int64_t total = 0;
    for (int lane = 0; lane < LANES; lane++) total += found[lane];
    return total;
  }

  const BestBlocksArgs& args_;
  const int64_t rows_, blocks_, words_, parts_;
  int64_t batch_, kv_head_, first_, last_;
  std::vector<Panel> panels_;
  std::vector<Unit> units_;
  float *scores_, *space_, *shared_;
  int32_t* order_;
};

void check(const BestBlocksArgs& args) {
  require(within(args.batch, 0, MAX_BATCH) && within(args.q_heads, 1, MAX_HEADS) && within(args.kv_heads, 1, args.q_heads));
  require(args.q_heads % args.kv_heads == 0 && within(args.head_dim, 1, MAX_DIM) && within(args.threads, 1, MAX_THREADS));
  require(within(args.seqlen_q, 0, INT32_MAX) && within(args.seqlen_k, 0, INT32_MAX));
  require(within(args.q_block, 1, MAX_BLOCK) && within(args.kv_block, 1, MAX_BLOCK));
  require(within(args.tile, 1, args.q_block));
  require(args.q_block % args.tile == 0 && args.parts() <= PANEL && PANEL % args.parts() == 0);
  require(countable(args.batch, args.q_heads, args.rows(), args.words()));
}

}  // namespace

// Returns a `Status`.
extern "C" DYNAXX_EXPORT int dynaxx_cpu_best_blocks(const BestBlocksArgs* args) {
  return status_of([&] {
    check(*args);
    const int64_t tasks = args->batch * args->kv_heads * Chooser::tasks_per_head(*args);
    for_each_task(tasks, args->threads, [&](int64_t task) {
      Chooser(*args, task).run(thread_scratch().reserve(Chooser::memory_needed(*args)));
    });
  });
}
