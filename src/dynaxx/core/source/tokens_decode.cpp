// SPDX-License-Identifier: Apache-2.0
// Decoding over chosen tokens of a paged cache: one task is a part of the list of one query and unit; parts are merged.
#include "scratch.h"
#include "tasks.h"
#include "token_args.h"
#include "token_softmax.h"

using namespace dynaxx;

struct TokenDecodeArgs {
  const CacheArgs* cache;
  const void* q;  // (batch, seqlen_q, q_heads, head_dim)
  int64_t element;
  Strides q_strides;
  int64_t seqlen_q, q_heads, select_heads;
  const int32_t* chosen;  // (batch, seqlen_q, select_heads, slots): blocks of `grain` keys, -1 for none
  int64_t slots, grain;
  float *out, *lse;  // (batch, seqlen_q, q_heads, head_dim_v), (batch, q_heads, seqlen_q)
  double scale, softcap;
  const float* sinks;  // (q_heads,), null for none
  int64_t threads;
  // Tokens of an 8-bit cache that are read from here instead; see exact_tokens.py.
  const void *exact_k, *exact_v;
  int64_t exact_stored, exact_slots, exact_sinks;
};

namespace {

constexpr int64_t MIN_SLOT_KEYS = 256;  // of a part: merging should stay a small share

// The queries of one task and the keys that they attend to.
struct Part {
  int64_t batch, query, unit;
  int64_t from, to;  // slots
};

class TokenDecoder {
 public:
  TokenDecoder(const TokenDecodeArgs& args, const Cache& cache, const Part& part)
      : args_(args), cache_(cache), part_(part), units_(std::max(args.select_heads, cache.kv_heads)),
        kv_head_(part.unit * cache.kv_heads / units_),
        shape_{args.q_heads / units_, whole_vectors(cache.head_dim), whole_vectors(cache.head_dim_v),
               Scale(args.scale, args.softcap)} {}

  static int64_t result_size(const TokenDecodeArgs& args, const Cache& cache) {
    return args.q_heads / std::max(args.select_heads, cache.kv_heads) * (whole_vectors(cache.head_dim_v) + 2);
  }

  static int64_t memory_needed(const TokenDecodeArgs& args, const Cache& cache) {
    const int64_t D = whole_vectors(cache.head_dim), E = whole_vectors(cache.head_dim_v);
    return args.q_heads / std::max(args.select_heads, cache.kv_heads) * (D + TOKEN_CHUNK) + TOKEN_CHUNK * (2 * D + E);
  }

  void run(float* memory, float* result) {
    const int64_t rows = shape_.rows;
    float *scores = memory + rows * shape_.D, *wide = scores + rows * TOKEN_CHUNK;
    const TokenState state{memory, result, result + rows * shape_.E, result + rows * (shape_.E + 1)};
    state.reset(rows, shape_.E);
    for (int64_t r = 0; r < rows; r++)
      read_query(Tokens(args_.q, args_.element, args_.q_strides, part_.batch, part_.unit * rows + r), part_.query,
                 cache_.head_dim, shape_.scale.sign, state.q + r * shape_.D);
    list();
    float* k_space[2] = {wide, wide + TOKEN_CHUNK * shape_.D};
    float* v_space = wide + 2 * TOKEN_CHUNK * shape_.D;
    TokenRows k, v, ahead;
    gather(0, true, k_space[0], k);
    for (size_t at = 0, turn = 1; at < keys_.size(); at += TOKEN_CHUNK, turn++) {
      gather(at, false, v_space, v);
      gather(at + TOKEN_CHUNK, true, k_space[turn % 2], ahead);
      attend_chunk(shape_, state, k, v, &ahead, scores);
      k = ahead;
    }
  }

 private:
  void list() {
    const int64_t b = part_.batch, select_head = part_.unit * args_.select_heads / units_;
    const int32_t* chosen = args_.chosen + ((b * args_.seqlen_q + part_.query) * args_.select_heads + select_head) * args_.slots;
    const int64_t stop = std::clamp<int64_t>(cache_.used(b) - args_.seqlen_q + part_.query + 1, 0, cache_.used(b));
    list_keys(chosen + part_.from, part_.to - part_.from, args_.grain, cache_.first_key(b), stop, keys_);
    keys_.erase(std::remove_if(keys_.begin(), keys_.end(),
                               [&](int32_t key) { return !exact(key) && cache_.physical(b, key / cache_.page_size) < 0; }),
                keys_.end());
  }

  bool exact(int64_t key) const {
    if (!args_.exact_k) return false;
    const int64_t first = cache_.first_key(part_.batch), used = cache_.used(part_.batch);
    return key < first + args_.exact_sinks || key >= used - (args_.exact_slots - args_.exact_sinks);
  }

  // Rows of k or of v from the `at`-th key on: those of the cache where they are fp32 in whole vectors, else copies.
  void gather(size_t at, bool of_k, float* space, TokenRows& rows) const {
    rows.count = int(at < keys_.size() ? std::min<size_t>(keys_.size() - at, TOKEN_CHUNK) : 0);
    const int64_t width = of_k ? cache_.head_dim : cache_.head_dim_v, padded = whole_vectors(width);
    for (int j = 0; j < rows.count; j++) rows.at[j] = row(keys_[at + j], of_k, width, padded, space + j * padded);
    rows.fill_up();
  }

  const float* row(int64_t key, bool of_k, int64_t width, int64_t padded, float* space) const {
    const int64_t b = part_.batch, page = key / cache_.page_size;
    Stored stored = Stored(cache_.stored);
    const char* from;
    float scale = 1.f;
    if (exact(key)) {
      const int64_t first = cache_.first_key(b), sinks = args_.exact_sinks, slots = args_.exact_slots;
      const int64_t slot = key < first + sinks ? key - first : sinks + key % (slots - sinks);
      stored = Stored(args_.exact_stored);
      from = (const char*)(of_k ? args_.exact_k : args_.exact_v) + bytes_of(stored) * ((b * slots + slot) * cache_.kv_heads + kv_head_) * width;
    } else {
      const int64_t physical = cache_.physical(b, page);
      const PageStrides& at = of_k ? cache_.k_strides : cache_.v_strides;
      const PageStrides& scale_at = of_k ? cache_.k_scale_strides : cache_.v_scale_strides;
      const float* scales = of_k ? cache_.k_scale : cache_.v_scale;
      from = (const char*)(of_k ? cache_.k : cache_.v) + bytes_of(stored) * (at.at(b, physical, kv_head_) + key % cache_.page_size * at.token);
      if (scales) scale = scales[scale_at.at(b, physical, kv_head_)];
    }
    if (stored == Stored::FP32 && width == padded) return (const float*)from;
    widen(stored, from, width, space);
    if (scale != 1.f)
      for (int64_t d = 0; d < width; d++) space[d] *= scale;
    std::fill(space + width, space + padded, 0.f);
    return space;
  }

  const TokenDecodeArgs& args_;
  const Cache& cache_;
  const Part& part_;
  const int64_t units_, kv_head_;
  const TokenShape shape_;
  std::vector<int32_t> keys_;
};

void check(const TokenDecodeArgs& args, const Cache& cache) {
  require(within(args.q_heads, 1, MAX_HEADS) && within(args.select_heads, 1, args.q_heads) && cache.kv_heads <= args.q_heads);
  const int64_t units = std::max(args.select_heads, cache.kv_heads);
  require(args.q_heads % units == 0 && units % cache.kv_heads == 0 && units % args.select_heads == 0);
  require(within(args.seqlen_q, 0, INT32_MAX) && within(args.element, 0, 2) && within(args.threads, 1, MAX_THREADS));
  require(within(args.slots, 0, INT32_MAX) && within(args.grain, 1, 128));
  require(countable(cache.batch, args.seqlen_q, args.select_heads, args.slots));
  require(countable(cache.batch, args.q_heads, args.seqlen_q, std::max(cache.head_dim, cache.head_dim_v) + LANES));
  if (args.exact_k)
    require(within(args.exact_stored, 0, 2) && within(args.exact_slots, 1, INT32_MAX) &&
            within(args.exact_sinks, 0, args.exact_slots - 1));
}

// out and lse of one query and unit from the results of its parts.
void merge(const TokenDecodeArgs& args, const Cache& cache, const Part& part, const float* results, int64_t num_parts) {
  const int64_t rows = args.q_heads / std::max(args.select_heads, cache.kv_heads), E = whole_vectors(cache.head_dim_v);
  const int64_t size = TokenDecoder::result_size(args, cache);
  const Scale scale(args.scale, args.softcap);
  for (int64_t r = 0; r < rows; r++) {
    const int64_t head = part.unit * rows + r;
    const float* tops = results + rows * E + r;
    float top = NEG_INF, sum = 0.f;
    for (int64_t p = 0; p < num_parts; p++) top = tops[p * size] > top || tops[p * size] != tops[p * size] ? tops[p * size] : top;
    float* out = args.out + ((part.batch * args.seqlen_q + part.query) * args.q_heads + head) * cache.head_dim_v;
    std::fill(out, out + cache.head_dim_v, 0.f);
    for (int64_t p = 0; p < num_parts && top != NEG_INF; p++) {
      const float weight = exp2_nonpositive(splat((tops[p * size] - top) * scale.factor))[0];
      if (weight == 0.f) continue;
      sum += weight * tops[p * size + rows];
      for (int64_t e = 0; e < cache.head_dim_v; e++) out[e] += weight * results[p * size + r * E + e];
    }
    float& lse = args.lse[(part.batch * args.q_heads + head) * args.seqlen_q + part.query];
    const float inverse = finish_row(scale, top, sum, args.sinks ? args.sinks[head] : NEG_INF, lse);
    for (int64_t e = 0; e < cache.head_dim_v; e++) out[e] *= inverse;
  }
}

}  // namespace

// Returns a `Status`.
extern "C" DYNAXX_EXPORT int dynaxx_cpu_token_decode(const TokenDecodeArgs* args) {
  return status_of([&] {
    const Cache cache(*args->cache);
    check(*args, cache);
    const int64_t units = std::max(args->select_heads, cache.kv_heads), lists = cache.batch * args->seqlen_q * units;
    const int64_t fewest = std::max<int64_t>(1, MIN_SLOT_KEYS / args->grain);
    const int64_t wanted = args->threads == 1 ? 1 : (4 * args->threads + lists - 1) / std::max<int64_t>(lists, 1);
    const int64_t parts = std::max<int64_t>(1, std::min(wanted, args->slots / fewest));
    const int64_t size = TokenDecoder::result_size(*args, cache), memory = TokenDecoder::memory_needed(*args, cache);
    require(countable(lists, parts, size));
    std::vector<float> results(lists * parts * size);
    const auto part_of = [&](int64_t list, int64_t part) {
      return Part{list / units / std::max<int64_t>(args->seqlen_q, 1), list / units % args->seqlen_q, list % units,
                  args->slots * part / parts, args->slots * (part + 1) / parts};
    };
    for_each_task(lists * parts, args->threads, [&](int64_t task) {
      const Part part = part_of(task / parts, task % parts);
      TokenDecoder(*args, cache, part).run(thread_scratch().reserve(memory), results.data() + task * size);
    });
    for_each_task(lists, args->threads, [&](int64_t list) {
      merge(*args, cache, part_of(list, 0), results.data() + list * parts * size, parts);
    });
  });
}
