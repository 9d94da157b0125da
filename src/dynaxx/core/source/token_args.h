// SPDX-License-Identifier: Apache-2.0
// Attention over tokens that each query chooses: what Python passes, field by field as `trained/tokens/kernels/cpu/attention.py` lists them.
#pragma once
#include <algorithm>
#include <vector>

#include "cache.h"

namespace dynaxx {

// Sequences behind one another. A unit is what is computed together: the q heads that share both a kv head and a choice.
struct TokenArgs {
  const void* q;        // (tokens_q, q_heads, head_dim), any strides
  const float *k, *v;   // (kv_heads, tokens_k, row): rows of whole vectors, zeros behind head_dim
  const int32_t* chosen;  // (tokens_q, select_heads, slots): blocks of `grain` keys, ascending, then -1
  const int64_t *ends_q, *ends_k;  // (sequences + 1,)
  int64_t element;      // of q, out, grad
  int64_t sequences, q_heads, kv_heads, select_heads, head_dim, head_dim_v, slots, grain;
  int64_t k_row, v_row;  // floats per row of k and v
  Strides q_strides;
  double scale, softcap;
  int64_t threads;
};

struct TokenForwardArgs {
  TokenArgs common;
  void* out;     // (tokens_q, q_heads, head_dim_v) contiguous
  float* lse;    // (q_heads, tokens_q) contiguous
  const float* sinks;  // (q_heads,), null for none
};

struct TokenBackwardArgs {
  TokenArgs common;
  const void* grad;          // of out, (tokens_q, q_heads, head_dim_v), any strides
  Strides grad_strides;
  const float *lse, *delta;  // (q_heads, tokens_q); delta = grad . out - gradient of lse
  float* dq;                 // (tokens_q, q_heads, d_row), zeros
  float *dk, *dv;            // (kv_heads, tokens_k, d_row) and (.., e_row), zeros
  int64_t d_row, e_row;      // floats per row: whole vectors at least
  int32_t* turns;            // (kv_heads, tokens_q), zeros
};

// A position of a sequence, and the row of `chosen` and of k that it begins at.
struct TokenSpan {
  int64_t first_q, queries, first_k, keys;

  // Keys that the i-th query may see: those up to its own position.
  int64_t visible(int64_t i) const { return std::clamp<int64_t>(keys - queries + i + 1, 0, keys); }
};

inline int64_t units_of(const TokenArgs& args) { return std::max(args.select_heads, args.kv_heads); }

inline TokenSpan span_of(const TokenArgs& args, int64_t s) {
  return {args.ends_q[s], args.ends_q[s + 1] - args.ends_q[s], args.ends_k[s], args.ends_k[s + 1] - args.ends_k[s]};
}

// Refuse sizes that contradict one another.
inline void check(const TokenArgs& args) {
  require(within(args.q_heads, 1, MAX_HEADS) && within(args.kv_heads, 1, args.q_heads) && within(args.select_heads, 1, args.q_heads));
  const int64_t units = units_of(args);
  require(args.q_heads % units == 0 && units % args.kv_heads == 0 && units % args.select_heads == 0);
  require(within(args.head_dim, 1, MAX_DIM) && within(args.head_dim_v, 1, MAX_DIM) && within(args.element, 0, 2));
  require(args.k_row >= whole_vectors(args.head_dim) && args.v_row >= whole_vectors(args.head_dim_v) &&
          within(args.k_row, 1, 2 * MAX_DIM) && within(args.v_row, 1, 2 * MAX_DIM));
  require(within(args.slots, 0, INT32_MAX) && within(args.grain, 1, 128) && within(args.threads, 1, MAX_THREADS));
  require(within(args.sequences, 0, MAX_BATCH));
  require(args.sequences == 0 || (args.ends_q[0] == 0 && args.ends_k[0] == 0));
  for (int64_t s = 0; s < args.sequences; s++)
    require(args.ends_q[s] <= args.ends_q[s + 1] && args.ends_k[s] <= args.ends_k[s + 1] &&
            within(args.ends_q[s + 1], 0, INT32_MAX) && within(args.ends_k[s + 1], 0, INT32_MAX));
  const int64_t queries = args.sequences ? args.ends_q[args.sequences] : 0, keys = args.sequences ? args.ends_k[args.sequences] : 0;
  require(countable(queries, args.q_heads, std::max(args.head_dim, args.head_dim_v) + LANES));
  require(countable(queries, args.select_heads, args.slots) && countable(keys, args.kv_heads, std::max(args.k_row, args.v_row)));
}

// Append the visible keys of chosen blocks within [from, to) to `keys`, in the order of the blocks. A number that is no
// block of the sequence is skipped.
inline void list_keys(const int32_t* chosen, int64_t slots, int64_t grain, int64_t from, int64_t to, std::vector<int32_t>& keys) {
  for (int64_t slot = 0; slot < slots; slot++) {
    const int64_t block = read_once(chosen + slot), first = block * grain;
    if (block < 0 || first >= to) continue;
    for (int64_t key = std::max(first, from); key < std::min(first + grain, to); key++) keys.push_back(int32_t(key));
  }
}

}  // namespace dynaxx
