// SPDX-License-Identifier: Apache-2.0
// The best keys of each query by an indexer's scores, sum over heads h of weight[h] * relu(q[h] . k), as they come.
//
// One task is 16 neighbouring queries, which lie side by side in vectors. Keys pass by once; a query keeps the best that
// it has met, so that no row of scores is ever in memory.
#include "pack.h"
#include "scratch.h"
#include "shared.h"
#include "tasks.h"
#include "tiles.h"
#include "top_list.h"

using namespace dynaxx;

struct IndexArgs {
  const float *q, *weights;  // (tokens_q, heads, row), (tokens_q, heads)
  const float *k, *k_scale;  // (tokens_k, row), (tokens_k,) that scores are multiplied by, null for 1
  const int64_t *ends_q, *ends_k;  // (sequences + 1,)
  int64_t sequences, heads, row;
  int64_t slots, grain;  // blocks of `grain` keys, whose score is their best
  int32_t* chosen;       // (tokens_q, slots): ascending, then -1
  int64_t threads;
};

namespace {

struct IndexTile {
  int64_t first_q, queries, first_k, visible;  // keys that the first query sees; may be < 0
};

// scores[r][i] = sum over heads of weights[h][i] * max(0, rows[r] . panels[h][:][i]), times scale[r].
template <int R>
void index_tile(const float* rows, int64_t width, const float* panels, int64_t heads, const float* weights,
                const float* scale, float* scores) {
  vec total[R][VECS] = {};
  for (int64_t h = 0; h < heads; h++) {
    vec sum[R][VECS];
    dot<R, false>(rows, width, panels + h * width * PANEL, width, sum);
    DYNAXX_UNROLL
    for (int i = 0; i < VECS; i++) {
      const vec weight = load(weights + h * PANEL + i * LANES);
      DYNAXX_UNROLL
      for (int r = 0; r < R; r++) total[r][i] += max_second_if_nan(splat(0.f), sum[r][i]) * weight;
    }
  }
  DYNAXX_UNROLL
  for (int r = 0; r < R; r++)
    DYNAXX_UNROLL
  for (int i = 0; i < VECS; i++) store(scores + r * PANEL + i * LANES, scale ? total[r][i] * splat(scale[r]) : total[r][i]);
}

constexpr auto INDEX_TILES = tiles_of<SCORE_ROWS>([](auto rows) { return &index_tile<rows()>; });

class IndexQueries {
 public:
  IndexQueries(const IndexArgs& args, const IndexTile& tile) : args_(args), tile_(tile) {}

  static int64_t memory_needed(const IndexArgs& args) {
    return args.heads * (args.row + 1) * PANEL + PANEL * args.row + SCORE_ROWS * PANEL;
  }

  void run(float* memory) {
    static thread_local std::vector<TopList> kept(PANEL);
    float *panels = memory, *weights = panels + args_.heads * args_.row * PANEL, *space = weights + args_.heads * PANEL;
    float* scores = space + PANEL * args_.row;
    load_queries(panels, weights, space);
    for (int i = 0; i < PANEL; i++) {
      kept[i].reset(args_.slots);
      limits_[i] = i < tile_.queries ? tile_.visible + i : 0;
      best_[i] = 0;
      floors_[i] = i < tile_.queries ? NEG_INF : std::numeric_limits<float>::infinity();
    }
    const int64_t keys = std::max<int64_t>(0, tile_.visible + tile_.queries - 1);
    const float* k = args_.k + tile_.first_k * args_.row;
    const float* scale = args_.k_scale ? args_.k_scale + tile_.first_k : nullptr;
    for (int64_t key = 0; key < keys;) {
      const int rows = int(std::min<int64_t>(SCORE_ROWS, keys - key));
      INDEX_TILES[rows - 1](k + key * args_.row, args_.row, panels, args_.heads, weights, scale ? scale + key : nullptr, scores);
      for (int r = 0; r < rows; r++, key++) args_.grain == 1 ? offer(key, scores + r * PANEL, kept) : gather(key, scores + r * PANEL, kept);
    }
    for (int64_t i = 0; i < tile_.queries; i++) {
      if (args_.grain > 1 && limits_[i] > 0 && limits_[i] % args_.grain) kept[i].push(best_[i], int32_t(limits_[i] / args_.grain));
      kept[i].finish(args_.chosen + (tile_.first_q + i) * args_.slots);
    }
  }

 private:
  void load_queries(float* panels, float* weights, float* space) const {
    const int rows = int(tile_.queries);
    for (int64_t h = 0; h < args_.heads; h++) {
      const Tokens q(args_.q, 0, Strides{0, args_.heads * args_.row, args_.row}, 0, h);
      pack_panel(q, tile_.first_q, rows, args_.row, 1.f, space, panels + h * args_.row * PANEL);
      for (int i = 0; i < PANEL; i++)
        weights[h * PANEL + i] = i < rows ? args_.weights[(tile_.first_q + i) * args_.heads + h] : 0.f;
    }
  }

  void offer(int64_t key, const float* scores, std::vector<TopList>& kept) {
    if (!any_reaches(scores)) return;
    for (int64_t i = std::max<int64_t>(0, key + 1 - tile_.visible); i < tile_.queries; i++) {
      const uint32_t score = ordered_bits(scores[i]);
      if (score < kept[i].lowest()) continue;
      kept[i].push(score, int32_t(key));
      floors_[i] = kept[i].lowest_score();
    }
  }

  // Whether any query's score is one to keep, or NaN: after the first few thousand keys hardly one is.
  bool any_reaches(const float* scores) const {
    ivec reached = {};
    DYNAXX_UNROLL
    for (int i = 0; i < PANEL; i += LANES) reached |= ~(load(scores + i) < load(floors_ + i));
    int32_t any = 0;
    for (int lane = 0; lane < LANES; lane++) any |= reached[lane];
    return any != 0;
  }

  // The best score of each block so far; a block is offered with its last key.
  void gather(int64_t key, const float* scores, std::vector<TopList>& kept) {
    const bool begins = key % args_.grain == 0, ends = (key + 1) % args_.grain == 0;
    for (int64_t i = std::max<int64_t>(0, key + 1 - tile_.visible); i < tile_.queries; i++) {
      const uint32_t score = ordered_bits(scores[i]);
      best_[i] = begins ? score : std::max(best_[i], score);
      if (ends && best_[i] >= kept[i].lowest()) kept[i].push(best_[i], int32_t(key / args_.grain));
    }
  }

  const IndexArgs& args_;
  const IndexTile tile_;
  int64_t limits_[PANEL];  // keys that each query sees
  uint32_t best_[PANEL];
  float floors_[PANEL];  // what a score must reach to be among the best so far
};

void check(const IndexArgs& args) {
  require(within(args.heads, 1, MAX_HEADS) && within(args.row, 1, MAX_DIM) && within(args.threads, 1, MAX_THREADS));
  require(within(args.slots, 0, INT32_MAX / 4) && within(args.grain, 1, 1 << 20) && within(args.sequences, 0, MAX_BATCH));
  require(args.sequences == 0 || (args.ends_q[0] == 0 && args.ends_k[0] == 0));
  for (int64_t s = 0; s < args.sequences; s++)
    require(args.ends_q[s] <= args.ends_q[s + 1] && args.ends_k[s] <= args.ends_k[s + 1] &&
            within(args.ends_q[s + 1], 0, INT32_MAX) && within(args.ends_k[s + 1], 0, INT32_MAX));
  const int64_t queries = args.sequences ? args.ends_q[args.sequences] : 0, keys = args.sequences ? args.ends_k[args.sequences] : 0;
  require(countable(queries, args.heads, args.row) && countable(queries, args.slots) && countable(keys, args.row));
  require(countable(args.heads, args.row + 1, 4 * PANEL));
}

}  // namespace

// Returns a `Status`.
extern "C" DYNAXX_EXPORT int dynaxx_cpu_index_tokens(const IndexArgs* args) {
  return status_of([&] {
    check(*args);
    std::vector<int64_t> tiles{0};  // before each sequence
    for (int64_t s = 0; s < args->sequences; s++)
      tiles.push_back(tiles.back() + (args->ends_q[s + 1] - args->ends_q[s] + PANEL - 1) / PANEL);
    for_each_task(tiles.back(), args->threads, [&](int64_t task) {
      const int64_t index = tiles.back() - 1 - task;  // the last see most: first
      const int64_t s = std::upper_bound(tiles.begin(), tiles.end(), index) - tiles.begin() - 1;
      const int64_t first = (index - tiles[s]) * PANEL, queries = args->ends_q[s + 1] - args->ends_q[s];
      const int64_t keys = args->ends_k[s + 1] - args->ends_k[s];
      const IndexTile tile{args->ends_q[s] + first, std::min<int64_t>(PANEL, queries - first), args->ends_k[s],
                           keys - queries + first + 1};
      IndexQueries(*args, tile).run(thread_scratch().reserve(IndexQueries::memory_needed(*args)));
    });
  });
}

// The best `slots` of the first counts[row] scores of each row (rows, width), as indices: ascending, then -1. Returns a
// `Status`.
extern "C" DYNAXX_EXPORT int dynaxx_cpu_token_top(const float* scores, int64_t rows, int64_t width, const int32_t* counts,
                                                  int64_t slots, int64_t threads, int32_t* chosen) {
  return status_of([&] {
    require(within(rows, 0, MAX_TOKENS) && within(width, 0, INT32_MAX) && within(slots, 0, INT32_MAX / 4));
    require(countable(rows, width) && countable(rows, slots) && within(threads, 1, MAX_THREADS));
    for_each_task(rows, threads, [&](int64_t row) {
      static thread_local TopList kept;
      kept.reset(slots);
      const int64_t count = std::clamp<int64_t>(read_once(counts + row), 0, width);
      for (int64_t i = 0; i < count; i++) {
        const uint32_t score = ordered_bits(scores[row * width + i]);
        if (score >= kept.lowest()) kept.push(score, int32_t(i));
      }
      kept.finish(chosen + row * slots);
    });
  });
}
