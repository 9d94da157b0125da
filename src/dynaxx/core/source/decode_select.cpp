// SPDX-License-Identifier: Apache-2.0
// Page selection: scores of pages from their summaries, selection of the best without sorting, and the summaries.
#include <limits>
#include <vector>

#include "cache.h"
#include "exp2.h"
#include "scratch.h"
#include "tasks.h"

using namespace dynaxx;

struct SummaryArgs {
  const CacheArgs* cache;
  void *low, *high;  // by physical page; the same tensor if both are the mean
  int64_t element;
  PageStrides strides;
  float* scale;  // by physical page, for int8 summaries: value = stored * scale
  PageStrides scale_strides;
  double bound;
  int64_t new_tokens;  // update only pages with the last `new_tokens` keys; -1: all pages
  int64_t threads;
};

struct SelectArgs {
  const SummaryArgs* summaries;
  const void* q;  // (batch, seqlen_q, q_heads, head_dim), any strides
  int64_t element;
  Strides q_strides;
  int64_t seqlen_q, q_heads;
  const float* wanted;  // (2, kv_heads) contiguous: row 0 + ceil(row 1 * pages) pages, besides sinks and window
  int64_t sinks, window;
  int32_t* chosen;  // (batch, kv_heads, slots) contiguous
  int64_t slots;
  double scale;
  int64_t threads;
};

namespace {

constexpr int64_t PAGES_PER_TASK = 128;
constexpr int64_t PAGES_AHEAD = 12;

// ---- scores ---------------------------------------------------------------------------------------------------------

// Sum q over the queries and heads of a group: positive parts into to[0..D), negative parts into to[D..2D).
void sum_queries(const SelectArgs& args, const Cache& cache, int64_t batch, int64_t head, float* space, float* to) {
  const int64_t D = whole_vectors(cache.head_dim), group = args.q_heads / cache.kv_heads;
  std::fill(to, to + 2 * D, 0.f);
  for (int64_t g = 0; g < group; g++)
    for (int64_t i = 0; i < args.seqlen_q; i++) {
      const Tokens q(args.q, args.element, args.q_strides, batch, head * group + g);
      read_query(q, i, cache.head_dim, float(args.scale), space);
      for (int64_t d = 0; d < D; d++) {
        to[d] += std::max(space[d], 0.f);
        to[D + d] += std::min(space[d], 0.f);
      }
    }
}

// Compute scores of a range of pages of one sequence and kv head.
class PageScorer {
 public:
  PageScorer(const SelectArgs& args, const Cache& cache, int64_t batch, int64_t head, const float* queries,
             float* memory)
      : cache_(cache), summaries_(*args.summaries), stored_(Stored(summaries_.element)), batch_(batch),
        head_(head), D_(whole_vectors(cache_.head_dim)), up_(queries), down_(queries + D_), low_(memory),
        high_(memory + D_), mean_(memory + 2 * D_) {
    for (int64_t d = 0; d < D_; d++) mean_[d] = up_[d] + down_[d];
  }

  static int64_t memory_needed(int64_t head_dim) { return 3 * whole_vectors(head_dim); }

  void run(int64_t from, int64_t to, float* scores) const {
    const int64_t bytes = bytes_of(stored_) * cache_.head_dim;
    const bool one = summaries_.low == summaries_.high;
    for (int64_t page = from; page < to; page++) {
      if (page + PAGES_AHEAD < to) {
        prefetch(row(summaries_.high, page + PAGES_AHEAD), bytes);
        if (!one) prefetch(row(summaries_.low, page + PAGES_AHEAD), bytes);
      }
      if (cache_.physical(batch_, page) < 0) continue;
      const float* high = read(row(summaries_.high, page), high_);
      scores[page] = one ? dot(mean_, high) : dot(up_, high) + dot(down_, read(row(summaries_.low, page), low_));
      if (summaries_.scale) scores[page] *= summaries_.scale[at(summaries_.scale_strides, page)];
    }
  }

 private:
  int64_t at(const PageStrides& strides, int64_t page) const {
    return strides.at(batch_, std::max<int64_t>(0, cache_.physical(batch_, page)), head_);
  }

  const char* row(const void* summary, int64_t page) const {
    return (const char*)summary + bytes_of(stored_) * at(summaries_.strides, page);
  }

  const float* read(const char* from, float* space) const {
    if (stored_ == Stored::FP32 && cache_.head_dim == D_) return (const float*)from;
    widen(stored_, from, cache_.head_dim, space);
    std::fill(space + cache_.head_dim, space + D_, 0.f);
    return space;
  }

  float dot(const float* a, const float* b) const {
    vec sum = {}, other = {};
    int64_t d = 0;
    for (; d + 2 * LANES <= D_; d += 2 * LANES) {
      sum += load(a + d) * load(b + d);
      other += load(a + d + LANES) * load(b + d + LANES);
    }
    if (d < D_) sum += load(a + d) * load(b + d);
    return sum_of(sum + other);
  }

  const Cache& cache_;
  const SummaryArgs& summaries_;
  const Stored stored_;
  const int64_t batch_, head_, D_;
  const float *up_, *down_;
  float *low_, *high_, *mean_;
};

// ---- selection ------------------------------------------------------------------------------------------------------

// A key that ascends with the score and, for equal scores, descends with the page.
DYNAXX_INLINE uint64_t sort_key(float score, int64_t page) {
  uint32_t bits;
  score += 0.f;  // -0 is 0
  std::memcpy(&bits, &score, sizeof bits);
  bits = bits >> 31 ? ~bits : bits | 0x80000000u;
  return uint64_t(bits) << 32 | uint32_t(~uint32_t(page));
}

// The number of pages to select besides sinks and window, at most `pages`. A budget may be any number.
int64_t num_wanted(const SelectArgs& args, const Cache& cache, int64_t head, int64_t pages) {
  const float wanted = args.wanted[head] + std::ceil(args.wanted[cache.kv_heads + head] * float(pages));
  if (!(wanted > 0)) return 0;
  return wanted < float(pages) ? int64_t(wanted) : pages;
}

// Select sinks, window and the best of the other pages; write them in ascending order, padded with -1.
void choose(const SelectArgs& args, const Cache& cache, int64_t batch, int64_t head, const float* scores,
            int32_t* chosen) {
  const int64_t first = cache.first_page(batch), stop = cache.stop_page(batch), size = cache.page_size;
  const int64_t sinks = std::clamp<int64_t>(args.sinks, 0, cache.max_keys);
  const int64_t window = std::clamp<int64_t>(args.window, 0, cache.max_keys);
  const int64_t sinks_stop = sinks ? cache.first_key(batch) + sinks : 0;
  const int64_t window_start = cache.used(batch) - (args.seqlen_q + window - 1);
  const int64_t wanted = num_wanted(args, cache, head, stop - first);
  std::vector<uint64_t> optional;
  std::vector<bool> kept(std::max<int64_t>(0, stop - first));
  for (int64_t page = first; page < stop; page++) {
    if (cache.physical(batch, page) < 0) continue;
    if (page * size < sinks_stop || (page + 1) * size > window_start)
      kept[page - first] = true;
    else
      optional.push_back(sort_key(scores[page], page));
  }
  if (wanted < int64_t(optional.size())) {
    std::nth_element(optional.begin(), optional.begin() + wanted, optional.end(), std::greater<uint64_t>());
    optional.resize(wanted);
  }
  for (const uint64_t key : optional) kept[int64_t(~uint32_t(key)) - first] = true;
  int64_t slot = 0;
  for (int64_t page = first; page < stop && slot < args.slots; page++)
    if (kept[page - first]) chosen[slot++] = int32_t(page);
  std::fill(chosen + slot, chosen + args.slots, -1);
}

// ---- summaries ------------------------------------------------------------------------------------------------------

void narrow(Stored stored, const float* from, int64_t count, char* to) {
  if (stored == Stored::FP16) return narrow_fp16(from, count, (uint16_t*)to);
  for (int64_t i = 0; i < count; i++)
    if (stored == Stored::FP32)
      ((float*)to)[i] = from[i];
    else if (stored == Stored::INT8)
      ((int8_t*)to)[i] = int8_t(std::nearbyint(std::max(-127.f, std::min(127.f, from[i]))));  // NaN becomes 127
    else
      ((uint16_t*)to)[i] = narrow_bf16(from[i]);
}

// Summarize the keys in use of one page into its rows of low and high.
void summarize(const SummaryArgs& args, const Cache& cache, int64_t batch, int64_t head, int64_t page, int64_t physical,
               float* memory) {
  const Stored stored = Stored(cache.stored), element = Stored(args.element);
  const int64_t D = cache.head_dim, start = page * cache.page_size;
  const int64_t from = std::max(start, cache.first_key(batch));
  const int64_t to = std::min<int64_t>(start + cache.page_size, cache.used(batch));
  if (from >= to) return;
  float *mean = memory, *low = memory + D, *high = memory + 2 * D, *wide = memory + 3 * D;
  std::fill(mean, mean + D, 0.f);
  std::fill(low, low + D, -NEG_INF);
  std::fill(high, high + D, NEG_INF);
  const char* base = (const char*)cache.k + bytes_of(stored) * cache.k_strides.at(batch, physical, head);
  for (int64_t token = from; token < to; token++) {
    const char* at = base + bytes_of(stored) * (token - start) * cache.k_strides.token;
    const float* key = (const float*)at;
    if (stored != Stored::FP32) {
      widen(stored, at, D, wide);
      key = wide;
    }
    for (int64_t d = 0; d < D; d++) {
      mean[d] += key[d];
      low[d] = key[d] < low[d] ? key[d] : low[d];
      high[d] = key[d] > high[d] ? key[d] : high[d];
    }
  }
  const float scale = cache.k_scale ? cache.k_scale[cache.k_scale_strides.at(batch, physical, head)] : 1.f;
  const float share = scale / float(to - from), bound = float(args.bound);
  for (int64_t d = 0; d < D; d++) {
    mean[d] *= share;
    low[d] = mean[d] + bound * (low[d] * scale - mean[d]);
    high[d] = mean[d] + bound * (high[d] * scale - mean[d]);
  }
  if (args.scale) {
    float largest = 0.f;
    for (int64_t d = 0; d < D; d++) largest = std::max({largest, std::fabs(low[d]), std::fabs(high[d])});
    const float unit = std::max(largest / 127, std::numeric_limits<float>::min());
    args.scale[args.scale_strides.at(batch, physical, head)] = unit;
    for (int64_t d = 0; d < D; d++) low[d] /= unit, high[d] /= unit;
  }
  const int64_t offset = bytes_of(element) * args.strides.at(batch, physical, head);
  narrow(element, low, D, (char*)args.low + offset);
  if (args.high != args.low) narrow(element, high, D, (char*)args.high + offset);
}

void check(const SummaryArgs& args) {
  require(within(args.element, 0, 3) && within(args.threads, 1, MAX_THREADS));
  require((args.element == int64_t(Stored::INT8)) == (args.scale != nullptr));
}

void check(const SelectArgs& args, const Cache& cache) {
  require(within(args.q_heads, cache.kv_heads, MAX_HEADS) && args.q_heads % cache.kv_heads == 0);
  require(within(args.seqlen_q, 0, INT32_MAX) && within(args.element, 0, 2) && within(args.threads, 1, MAX_THREADS));
  require(within(args.slots, 0, INT32_MAX) && countable(cache.batch, cache.kv_heads, args.slots));
  require(countable(cache.batch, args.q_heads, args.seqlen_q, cache.head_dim));
}

}  // namespace

// Returns a `Status`.
extern "C" DYNAXX_EXPORT int dynaxx_cpu_select_pages(const SelectArgs* args) {
  return status_of([&] {
    const Cache cache(*args->summaries->cache);
    check(*args->summaries);
    check(*args, cache);
    const int64_t lists = cache.batch * cache.kv_heads, D = whole_vectors(cache.head_dim), width = cache.width();
    const int64_t tiles = (width + PAGES_PER_TASK - 1) / PAGES_PER_TASK;
    std::vector<float> queries(lists * 2 * D + D), scores(lists * width, NEG_INF);
    for (int64_t i = 0; i < lists; i++)
      sum_queries(*args, cache, i / cache.kv_heads, i % cache.kv_heads, queries.data() + lists * 2 * D,
                  queries.data() + i * 2 * D);
    for_each_task(lists * tiles, args->threads, [&](int64_t task) {
      const int64_t list = task / tiles, batch = list / cache.kv_heads, tile = task % tiles;
      const int64_t from = std::max(tile * PAGES_PER_TASK, cache.first_page(batch));
      const int64_t to = std::min((tile + 1) * PAGES_PER_TASK, cache.stop_page(batch));
      if (from >= to) return;
      float* memory = thread_scratch().reserve(PageScorer::memory_needed(cache.head_dim));
      PageScorer(*args, cache, batch, list % cache.kv_heads, queries.data() + list * 2 * D, memory)
          .run(from, to, scores.data() + list * width);
    });
    for_each_task(lists, args->threads, [&](int64_t i) {
      choose(*args, cache, i / cache.kv_heads, i % cache.kv_heads, scores.data() + i * width,
             args->chosen + i * args->slots);
    });
  });
}

// Returns a `Status`.
extern "C" DYNAXX_EXPORT int dynaxx_cpu_summarize_pages(const SummaryArgs* args) {
  return status_of([&] {
    const Cache cache(*args->cache);
    check(*args);
    // A task owns some pages, because sequences may share one, and computes their heads, which lie side by side, one
    // after the other. With few pages, it computes one head.
    const int64_t owners = 4 * args->threads;
    const bool many = args->new_tokens < 0 || args->new_tokens / cache.page_size * cache.batch >= owners;
    const int64_t parts = many ? 1 : cache.kv_heads, heads = cache.kv_heads / parts;
    for_each_task(parts * owners, args->threads, [&](int64_t i) {
      const int64_t first_head = i / owners * heads, owner = i % owners;
      float* memory = thread_scratch().reserve(4 * cache.head_dim);
      for (int64_t batch = 0; batch < cache.batch; batch++) {
        int64_t page = cache.first_page(batch);
        if (args->new_tokens >= 0)
          page = std::max(page, std::max<int64_t>(0, cache.used(batch) - args->new_tokens) / cache.page_size);
        for (; page < cache.stop_page(batch); page++) {
          const int64_t physical = cache.physical(batch, page);
          if (physical < 0 || physical % owners != owner) continue;
          for (int64_t head = first_head; head < first_head + heads; head++)
            summarize(*args, cache, batch, head, page, physical, memory);
        }
      }
    });
  });
}
