// SPDX-License-Identifier: Apache-2.0
// A kv cache in pages, as in `layout/paging/paged_cache.py`: arguments, addresses, and conversion of stored elements to fp32.
#pragma once
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "args.h"
#include "pack.h"
#include "shared.h"
#include "status.h"

namespace dynaxx {

// The element types of elements.h, and two 8-bit types that are stored with scales.
enum class Stored : int64_t { FP32 = 0, BF16 = 1, FP16 = 2, INT8 = 3, FP8 = 4 };

DYNAXX_INLINE int64_t bytes_of(Stored stored) { return stored == Stored::FP32 ? 4 : stored <= Stored::FP16 ? 2 : 1; }

// Strides in elements; see PageStrides in layout/paging/pages.py.
struct PageStrides {
  int64_t batch, page, token, head;

  int64_t at(int64_t b, int64_t p, int64_t h) const { return b * batch + p * page + h * head; }
};

struct CacheArgs {
  const void *k, *v;
  int64_t stored;
  PageStrides k_strides, v_strides;
  const float *k_scale, *v_scale;  // null: 1
  PageStrides k_scale_strides, v_scale_strides;
  const int32_t* page_table;  // (batch, max_pages); null: contiguous
  int64_t table_stride;
  const int32_t* seqused;  // (batch,)
  const int32_t* leftpad;  // (batch,); null: zeros
  int64_t batch, kv_heads, max_pages, page_size, head_dim, head_dim_v;
  int64_t num_pages;  // physical pages; max_pages for a contiguous cache
  int64_t max_keys;   // per sequence
};

// A decoding step over a cache.
struct DecodeArgs {
  const CacheArgs* cache;
  const void* q;  // (batch, seqlen_q, q_heads, head_dim), any strides
  int64_t element;
  Strides q_strides;
  int64_t seqlen_q, q_heads;
  const int32_t* pages;  // (batch, kv_heads, slots) logical pages, -1 = empty, contiguous; null: all pages
  int64_t slots;
  float* out;  // (batch, seqlen_q, q_heads, head_dim_v) contiguous
  float* lse;  // (batch, q_heads, seqlen_q) contiguous
  double scale;
  int64_t threads;
  const void *exact_k, *exact_v;  // (batch, exact_slots, kv_heads, head_dim) contiguous, see exact_tokens.py, or null
  int64_t exact_stored, exact_slots, exact_sinks;
  double softcap;            // 0: none
  const float* sink_logits;  // (q_heads,); null: none
  int64_t left;              // keys that a query sees before its own; -1: all
};

// A cache with its own copy of lengths and pages. Those in `CacheArgs` belong to an engine that may write to them
// during the step. They are read once and clamped to valid values, so a concurrent write at worst changes the results.
struct Cache : CacheArgs {
  explicit Cache(const CacheArgs& args) : CacheArgs(args) {
    require(within(batch, 0, MAX_BATCH) && within(kv_heads, 1, MAX_HEADS) && within(page_size, 1, MAX_PAGE));
    require(within(head_dim, 1, MAX_DIM) && within(head_dim_v, 1, MAX_DIM) && within(stored, 0, 4));
    require(within(num_pages, 0, INT32_MAX) && within(max_pages, 0, INT32_MAX) && within(max_keys, 0, INT32_MAX));
    require(page_table || max_pages <= num_pages || batch == 0);
    require(countable(max_pages, page_size) && max_keys <= max_pages * page_size);
    require(countable(batch, kv_heads, max_pages) && countable(batch, kv_heads, page_size, head_dim));
    used_.reserve(batch);
    first_.reserve(batch);
    for (int64_t b = 0; b < batch; b++) {
      used_.push_back(std::clamp<int64_t>(read_once(args.seqused + b), 0, max_keys));
      first_.push_back(args.leftpad ? std::clamp<int64_t>(read_once(args.leftpad + b), 0, used_[b]) : 0);
      width_ = std::max(width_, stop_page(b));
    }
    if (page_table) copy_pages(args);
  }

  int64_t used(int64_t b) const { return used_[b]; }
  int64_t first_key(int64_t b) const { return first_[b]; }
  int64_t first_page(int64_t b) const { return first_[b] / page_size; }
  int64_t stop_page(int64_t b) const { return (used_[b] + page_size - 1) / page_size; }
  int64_t width() const { return width_; }  // pages of the longest sequence

  // The physical page of a logical one, -1 if it is missing; `page` must be in [first_page, stop_page).
  int64_t physical(int64_t b, int64_t page) const { return page_table ? pages_[b * width_ + page] : page; }

 private:
  void copy_pages(const CacheArgs& args) {
    pages_.reset(new int32_t[batch * width_]);
    for (int64_t b = 0; b < batch; b++)
      for (int64_t page = first_page(b); page < stop_page(b); page++) {
        const int32_t found = read_once(args.page_table + b * table_stride + page);
        pages_[b * width_ + page] = found >= 0 && found < num_pages ? found : -1;
      }
  }

  std::vector<int64_t> used_, first_;
  std::unique_ptr<int32_t[]> pages_;  // (batch, width); only entries of pages in use are initialised
  int64_t width_ = 0;
};

// Except for NaN, e4m3 is fp32 with another exponent bias and fewer bits; the multiplication also handles subnormals.
DYNAXX_INLINE float widen_fp8(uint8_t x) {
  const float magnitude = from_bits(uint32_t(x & 0x7f) << 20) * 0x1p120f;
  uint32_t bits;
  std::memcpy(&bits, &magnitude, sizeof bits);
  return from_bits(((x & 0x7f) == 0x7f ? 0x7fc00000u : bits) | uint32_t(x & 0x80) << 24);
}

// Convert `count` stored elements to fp32, without applying their scale.
inline void widen(Stored stored, const void* from, int64_t count, float* __restrict to) {
  const uint16_t* __restrict half = (const uint16_t*)from;
  const uint8_t* __restrict byte = (const uint8_t*)from;
  if (stored == Stored::FP32)
    std::memcpy(to, from, sizeof(float) * count);
  else if (stored == Stored::BF16)
    for (int64_t i = 0; i < count; i++) to[i] = widen_bf16(half[i]);
  else if (stored == Stored::FP16)
    widen_fp16(half, count, to);
  else if (stored == Stored::INT8)
    for (int64_t i = 0; i < count; i++) to[i] = float(int8_t(byte[i]));
  else
    for (int64_t i = 0; i < count; i++) to[i] = widen_fp8(byte[i]);
}

DYNAXX_INLINE void prefetch(const void* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char*)from + at);
}

// Round a width up to whole vectors.
DYNAXX_INLINE int64_t whole_vectors(int64_t width) { return (width + LANES - 1) / LANES * LANES; }

// Sum groups of four lanes that are LANES / 4 apart.
DYNAXX_INLINE vec4 quarter_sums(vec x) {
  vec4 quarters[LANES / 4];
#if defined(__clang__) || __GNUC__ >= 12
  quarters[0] = __builtin_shufflevector(x, x, 0, 1, 2, 3);
#if defined(__AVX2__)
  quarters[1] = __builtin_shufflevector(x, x, 4, 5, 6, 7);
#endif
#if defined(__AVX512F__)
  quarters[2] = __builtin_shufflevector(x, x, 8, 9, 10, 11);
  quarters[3] = __builtin_shufflevector(x, x, 12, 13, 14, 15);
#endif
#else
  std::memcpy(quarters, &x, sizeof x);
#endif
  vec4 sum = quarters[0];
  for (int i = 1; i < LANES / 4; i++) sum += quarters[i];
  return sum;
}

// Return the sums of four vectors in four lanes. Transposing avoids one horizontal sum per vector.
DYNAXX_INLINE vec4 sums_of(vec a, vec b, vec c, vec d) {
  const vec4 w = quarter_sums(a), x = quarter_sums(b), y = quarter_sums(c), z = quarter_sums(d);
  const vec4 wx = DYNAXX_SHUFFLE(w, x, 0, 4, 1, 5) + DYNAXX_SHUFFLE(w, x, 2, 6, 3, 7);  // w0+w2 x0+x2 w1+w3 x1+x3
  const vec4 yz = DYNAXX_SHUFFLE(y, z, 0, 4, 1, 5) + DYNAXX_SHUFFLE(y, z, 2, 6, 3, 7);
  return DYNAXX_SHUFFLE(wx, yz, 0, 1, 4, 5) + DYNAXX_SHUFFLE(wx, yz, 2, 3, 6, 7);
}

DYNAXX_INLINE float sum_of(vec x) {
  const vec4 sum = quarter_sums(x);
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// Read one token of q as fp32, times `factor`, padded with zeros.
inline void read_query(const Tokens& q, int64_t token, int64_t width, float factor, float* to) {
  q.read(token, width, to);
  for (int64_t d = 0; d < width; d++) to[d] *= factor;
  std::fill(to + width, to + whole_vectors(width), 0.f);
}

}  // namespace dynaxx
