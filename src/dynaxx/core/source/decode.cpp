// SPDX-License-Identifier: Apache-2.0
// Decoding: the queries of a step attend to selected pages of a cache, or to all pages.
//
//     page list --> parts (one task each) --> chunks of 32 keys --> scores --> online softmax --> partial out --> merge
//
// One task processes a run of pages of one sequence and kv head. Its rows are the q heads of the group times the
// queries of the step, and every row visits every page. Long page lists are split so that all threads have work.
// Partial results are merged in a fixed order, so the result depends on the number of threads but not on their timing.
#include <vector>

#include "decode_tiles.h"
#include "exp2.h"
#include "scratch.h"
#include "tasks.h"

using namespace dynaxx;

namespace {

constexpr int64_t MIN_KEYS = 256;  // keys per part at least, so that merging stays cheap

// The first key that any query of a sequence sees.
int64_t first_visible(const DecodeArgs& args, const Cache& cache, int64_t b) {
  const int64_t first = cache.first_key(b);
  return args.left < 0 ? first : std::max(first, cache.used(b) - args.seqlen_q - std::min(args.left, cache.max_keys));
}

// A run of pages of one sequence and kv head.
struct Part {
  int64_t batch, head;
  const int32_t* pages;
  int64_t num_pages;
  bool last;  // last part of its head, which also processes the exact tokens
};

// Up to CHUNK keys of one page, or of the exact tokens.
struct KeyChunk {
  const char *k, *v;
  Stored stored;
  int64_t k_stride, v_stride;  // between tokens, in elements
  int64_t position;            // of the first key
  int keys;
  float k_scale, v_scale;
};

class Decoder {
 public:
  Decoder(const DecodeArgs& args, const Cache& cache, const Part& part)
      : args_(args), cache_(cache), part_(part), used_(cache_.used(part.batch)), first_(cache_.first_key(part.batch)),
        from_(first_visible(args, cache, part.batch)), to_(used_),
        exact_sinks_stop_(std::min(first_ + args.exact_sinks, used_)), exact_(first_),
        group_(args.q_heads / cache_.kv_heads), rows_(group_ * args.seqlen_q), D_(whole_vectors(cache_.head_dim)),
        E_(whole_vectors(cache_.head_dim_v)), scale_(args.scale, args.softcap) {
    if (!args.exact_k) return;
    from_ = std::max(from_, exact_sinks_stop_);
    to_ = std::max(exact_sinks_stop_, used_ - (args.exact_slots - args.exact_sinks));
  }

  // Floats of a partial result: out (rows, head_dim_v in whole vectors), then largest scores (rows,), weight sums
  // (rows,).
  static int64_t result_size(const DecodeArgs& args) {
    return args.q_heads / args.cache->kv_heads * args.seqlen_q * (whole_vectors(args.cache->head_dim_v) + 2);
  }

  static int64_t memory_needed(const DecodeArgs& args) {
    const int64_t rows = args.q_heads / args.cache->kv_heads * args.seqlen_q;
    const int64_t D = whole_vectors(args.cache->head_dim), E = whole_vectors(args.cache->head_dim_v);
    return rows * (D + CHUNK) + CHUNK * (D + E);
  }

  void run(float* memory, float* result) {
    q_ = memory;
    scores_ = q_ + rows_ * D_;
    k_wide_ = scores_ + rows_ * CHUNK;
    v_wide_ = k_wide_ + CHUNK * D_;
    out_ = result;
    top_ = out_ + rows_ * E_;
    sum_ = top_ + rows_;
    std::fill(out_, out_ + rows_ * E_, 0.f);
    std::fill(top_, top_ + rows_, NEG_INF);
    std::fill(sum_, sum_ + rows_, 0.f);
    for (int64_t r = 0; r < rows_; r++) {
      const Tokens q(args_.q, args_.element, args_.q_strides, part_.batch, part_.head * group_ + r % group_);
      read_query(q, r / group_, cache_.head_dim, scale_.sign, q_ + r * D_);
    }
    KeyChunk chunk, next;
    for (bool more = advance(chunk); more; chunk = next) {
      more = advance(next);
      if (!more) next.keys = 0;
      attend(chunk, next);
    }
  }

 private:
  // Find the part's next chunk that contains a key in use.
  bool advance(KeyChunk& chunk) {
    for (; page_ < part_.num_pages; page_++, offset_ = 0) {
      const int64_t logical = part_.pages[page_], start = logical * cache_.page_size;
      const int64_t from = std::max(start + offset_, from_);
      const int64_t to = std::min({start + cache_.page_size, to_, from + CHUNK});
      if (from >= to) continue;
      const int64_t physical = cache_.physical(part_.batch, logical), b = part_.batch, h = part_.head;
      chunk.stored = Stored(cache_.stored);
      chunk.k_stride = cache_.k_strides.token;
      chunk.v_stride = cache_.v_strides.token;
      const int64_t bytes = bytes_of(chunk.stored);
      chunk.k = (const char*)cache_.k + bytes * (cache_.k_strides.at(b, physical, h) + (from - start) * cache_.k_strides.token);
      chunk.v = (const char*)cache_.v + bytes * (cache_.v_strides.at(b, physical, h) + (from - start) * cache_.v_strides.token);
      chunk.position = from;
      chunk.keys = int(to - from);
      chunk.k_scale = cache_.k_scale ? cache_.k_scale[cache_.k_scale_strides.at(b, physical, h)] : 1.f;
      chunk.v_scale = cache_.v_scale ? cache_.v_scale[cache_.v_scale_strides.at(b, physical, h)] : 1.f;
      offset_ = to - start;
      return true;
    }
    return part_.last && args_.exact_k && advance_exact(chunk);
  }

  // Find the next exact tokens with consecutive slots: first those at the start of the sequence, then those at its end.
  bool advance_exact(KeyChunk& chunk) {
    if (exact_ >= exact_sinks_stop_) exact_ = std::max(exact_, to_);
    if (exact_ >= used_) return false;
    const int64_t sinks = args_.exact_sinks, slots = args_.exact_slots, H = cache_.kv_heads;
    const bool sink = exact_ < exact_sinks_stop_;
    const int64_t slot = sink ? exact_ - first_ : sinks + exact_ % (slots - sinks);
    const int64_t row = (part_.batch * slots + slot) * H + part_.head;
    chunk.stored = Stored(args_.exact_stored);
    chunk.k_stride = H * cache_.head_dim;
    chunk.v_stride = H * cache_.head_dim_v;
    chunk.k = (const char*)args_.exact_k + bytes_of(chunk.stored) * row * cache_.head_dim;
    chunk.v = (const char*)args_.exact_v + bytes_of(chunk.stored) * row * cache_.head_dim_v;
    chunk.position = exact_;
    chunk.keys = int(std::min<int64_t>({sink ? exact_sinks_stop_ - exact_ : used_ - exact_, slots - slot, CHUNK}));
    chunk.k_scale = chunk.v_scale = 1.f;
    exact_ += chunk.keys;
    return true;
  }

  void attend(const KeyChunk& chunk, const KeyChunk& next) {
    const int64_t bytes = bytes_of(chunk.stored), next_bytes = bytes_of(next.stored);
    const PrefetchRows values = {chunk.v, chunk.v_stride * bytes, cache_.head_dim_v * bytes, chunk.keys};
    const PrefetchRows keys = {next.k, next.k_stride * next_bytes, cache_.head_dim * next_bytes, next.keys};
    int64_t k_stride, v_stride;
    const float* k = in_place_or_wide(chunk.stored, chunk.k, chunk.k_stride, cache_.head_dim, D_, chunk.keys, k_wide_, k_stride);
    for (int64_t r = 0; r < rows_; r += QUERY_ROWS) {
      const int tile = int(std::min<int64_t>(QUERY_ROWS, rows_ - r));
      SCORE_KEYS[tile - 1](q_ + r * D_, k, k_stride, chunk.keys, D_, r ? NOTHING : values, scores_ + r * CHUNK);
    }
    for (int64_t r = 0; r < rows_; r++) weigh(chunk, r);
    const float* v = in_place_or_wide(chunk.stored, chunk.v, chunk.v_stride, cache_.head_dim_v, E_, chunk.keys, v_wide_, v_stride);
    for (int64_t r = 0; r < rows_; r += QUERY_ROWS) {
      const int tile = int(std::min<int64_t>(QUERY_ROWS, rows_ - r));
      ADD_VALUES[tile - 1](scores_ + r * CHUNK, v, v_stride, chunk.keys, E_, r ? NOTHING : keys, out_ + r * E_);
    }
  }

  // Return rows of whole fp32 vectors: the cache's own memory if it has this form, else a copy.
  static const float* in_place_or_wide(Stored stored, const char* data, int64_t stride, int64_t width, int64_t padded,
                                       int rows, float* wide, int64_t& wide_stride) {
    if (stored == Stored::FP32 && width == padded) {
      wide_stride = stride;
      return (const float*)data;
    }
    wide_stride = padded;
    for (int j = 0; j < rows; j++) {
      widen(stored, data + j * stride * bytes_of(stored), width, wide + j * padded);
      std::fill(wide + j * padded + width, wide + (j + 1) * padded, 0.f);
    }
    return wide;
  }

  // Turn the scores of row r into weights, and rescale earlier sums to the new largest score.
  void weigh(const KeyChunk& chunk, int64_t r) {
    float* scores = scores_ + r * CHUNK;
    const int64_t stop = used_ - args_.seqlen_q + r / group_ + 1;  // one past the row's own key
    const int visible = int(std::clamp<int64_t>(stop - chunk.position, 0, chunk.keys));
    const int64_t left = std::min(args_.left, cache_.max_keys);
    const int64_t first = left < 0 ? 0 : stop - 1 - left - chunk.position;
    if (chunk.k_scale != 1.f)
      for (int j = 0; j < visible; j++) scores[j] *= chunk.k_scale;
    if (scale_.capped())
      for (int j = 0; j < visible; j += LANES) store(scores + j, tanh_of(load(scores + j) * splat(scale_.cap)));
    std::fill(scores + visible, scores + CHUNK, NEG_INF);
    std::fill(scores, scores + std::clamp<int64_t>(first, 0, visible), NEG_INF);
    vec largest = splat(NEG_INF);  // NaN if all keys give NaN, since hidden keys would come behind them
    for (int j = 0; j < visible; j += LANES) largest = max_second_if_nan(largest, load(scores + j));
    float top = top_[r];
    for (int i = 0; i < LANES; i++) top = largest[i] > top || largest[i] != largest[i] ? largest[i] : top;
    if (top == NEG_INF) {
      std::fill(scores, scores + CHUNK, 0.f);
      return;
    }
    vec total = {};
    for (int j = 0; j < CHUNK; j += LANES) {
      const vec weight = exp2_nonpositive((load(scores + j) - splat(top)) * splat(scale_.factor));
      total += weight;
      store(scores + j, weight * splat(chunk.v_scale));
    }
    if (top != top_[r]) {
      const vec alpha = exp2_nonpositive(splat((top_[r] - top) * scale_.factor));
      sum_[r] *= alpha[0];
      for (int64_t e = 0; e < E_; e += LANES) store(out_ + r * E_ + e, load(out_ + r * E_ + e) * alpha);
      top_[r] = top;
    }
    sum_[r] += sum_of(total);
  }

  static constexpr PrefetchRows NOTHING = {nullptr, 0, 0, 0};

  const DecodeArgs& args_;
  const Cache& cache_;
  const Part& part_;
  const int64_t used_, first_;
  int64_t from_, to_;               // range of keys that are read from pages
  const int64_t exact_sinks_stop_;  // end of the exact tokens at the start of the sequence
  int64_t exact_;                   // the next exact token
  const int64_t group_, rows_, D_, E_;
  const Scale scale_;
  float *q_, *scores_, *k_wide_, *v_wide_, *out_, *top_, *sum_;
  int64_t page_ = 0, offset_ = 0;
};

// List the pages that each (sequence, kv head) reads: requested, present and with a key in use. `starts` gets one entry
// more than there are lists.
void list_pages(const DecodeArgs& args, const Cache& cache, std::vector<int32_t>& pages, std::vector<int64_t>& starts) {
  for (int64_t b = 0; b < cache.batch; b++) {
    const int64_t first = first_visible(args, cache, b) / cache.page_size, stop = cache.stop_page(b);
    for (int64_t h = 0; h < cache.kv_heads; h++) {
      starts.push_back(int64_t(pages.size()));
      const auto take = [&](int64_t page) {
        if (page >= first && page < stop && cache.physical(b, page) >= 0) pages.push_back(int32_t(page));
      };
      if (args.pages)
        for (int64_t s = 0; s < args.slots; s++) take(read_once(args.pages + (b * cache.kv_heads + h) * args.slots + s));
      else
        for (int64_t page = first; page < stop; page++) take(page);
    }
  }
  starts.push_back(int64_t(pages.size()));
}

// Split the lists into parts of about equal numbers of pages, four per thread if there are enough pages. firsts[i] is
// the first part of (sequence, kv head) i; `firsts` gets one entry more than there are lists.
void split(const DecodeArgs& args, const Cache& cache, const std::vector<int32_t>& pages,
           const std::vector<int64_t>& starts, std::vector<Part>& parts, std::vector<int64_t>& firsts) {
  const int64_t even = args.threads == 1 ? int64_t(pages.size()) : int64_t(pages.size()) / (4 * args.threads);
  const int64_t most = std::max({even, MIN_KEYS / cache.page_size, int64_t(1)});
  for (int64_t i = 0; i < cache.batch * cache.kv_heads; i++) {
    const int64_t count = starts[i + 1] - starts[i], runs = std::max<int64_t>(1, (count + most - 1) / most);
    firsts.push_back(int64_t(parts.size()));
    for (int64_t run = 0; run < runs; run++) {
      const int64_t from = starts[i] + count * run / runs, to = starts[i] + count * (run + 1) / runs;
      parts.push_back({i / cache.kv_heads, i % cache.kv_heads, pages.data() + from, to - from, run == runs - 1});
    }
  }
  firsts.push_back(int64_t(parts.size()));
}

void check(const DecodeArgs& args, const Cache& cache) {
  require(within(args.q_heads, cache.kv_heads, MAX_HEADS) && args.q_heads % cache.kv_heads == 0);
  require(within(args.seqlen_q, 0, INT32_MAX) && within(args.element, 0, 2) && within(args.threads, 1, MAX_THREADS));
  require(within(args.slots, 0, INT32_MAX) && countable(cache.batch, cache.kv_heads, args.slots));
  require(countable(cache.batch, args.q_heads, args.seqlen_q, std::max(cache.head_dim, cache.head_dim_v) + LANES));
  if (args.exact_k)
    require(within(args.exact_stored, 0, 2) && within(args.exact_slots, 1, INT32_MAX) &&
            within(args.exact_sinks, 0, args.exact_slots - 1));
}

// Compute out and lse of one (sequence, kv head) from the results of its parts.
void merge(const DecodeArgs& args, int64_t batch, int64_t head, const float* results, int64_t num_parts) {
  const CacheArgs& cache = *args.cache;
  const Scale scale(args.scale, args.softcap);
  const int64_t group = args.q_heads / cache.kv_heads, rows = group * args.seqlen_q, E = whole_vectors(cache.head_dim_v);
  const int64_t size = Decoder::result_size(args);
  for (int64_t r = 0; r < rows; r++) {
    const int64_t token = r / group, q_head = head * group + r % group;
    const float* tops = results + rows * E + r;
    float top = NEG_INF, sum = 0.f;
    for (int64_t p = 0; p < num_parts; p++)
      if (tops[p * size] > top || tops[p * size] != tops[p * size]) top = tops[p * size];  // keeps NaN
    float* out = args.out + ((batch * args.seqlen_q + token) * args.q_heads + q_head) * cache.head_dim_v;
    float* lse = args.lse + (batch * args.q_heads + q_head) * args.seqlen_q + token;
    std::fill(out, out + cache.head_dim_v, 0.f);
    const float sink = args.sink_logits ? args.sink_logits[q_head] : NEG_INF;
    *lse = sink;
    if (top == NEG_INF) continue;
    for (int64_t p = 0; p < num_parts; p++) {
      const float weight = exp2_nonpositive(splat((tops[p * size] - top) * scale.factor))[0];
      if (weight == 0.f) continue;
      sum += weight * tops[p * size + rows];
      const float* from = results + p * size + r * E;
      for (int64_t e = 0; e < cache.head_dim_v; e++) out[e] += weight * from[e];
    }
    *lse = float(top * scale.factor * LN_2 + std::log(sum));
    if (sink != NEG_INF) sum *= add_sink(*lse, sink);
    for (int64_t e = 0; e < cache.head_dim_v; e++) out[e] /= sum;
  }
}

}  // namespace

// Returns a `Status`.
extern "C" DYNAXX_EXPORT int dynaxx_cpu_decode(const DecodeArgs* args) {
  return status_of([&] {
    const Cache cache(*args->cache);
    check(*args, cache);
    std::vector<int32_t> pages;
    std::vector<int64_t> starts, firsts;
    std::vector<Part> parts;
    list_pages(*args, cache, pages, starts);
    split(*args, cache, pages, starts, parts, firsts);
    const int64_t size = Decoder::result_size(*args), memory = Decoder::memory_needed(*args);
    std::vector<float> results(parts.size() * size);
    for_each_task(int64_t(parts.size()), args->threads, [&](int64_t part) {
      Decoder(*args, cache, parts[part]).run(thread_scratch().reserve(memory), results.data() + part * size);
    });
    for_each_task(int64_t(firsts.size()) - 1, args->threads, [&](int64_t i) {
      merge(*args, i / cache.kv_heads, i % cache.kv_heads, results.data() + firsts[i] * size, firsts[i + 1] - firsts[i]);
    });
  });
}
