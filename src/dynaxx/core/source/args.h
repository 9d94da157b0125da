// SPDX-License-Identifier: Apache-2.0
// What Python passes, field by field as `arguments.py` lists them. Strides count elements; the last dimension is
// contiguous. Everything is 8 bytes wide, so that both sides agree without thinking of padding.
#pragma once
#include <cstdint>

namespace dynaxx {

struct Strides {
  int64_t batch, token, head;
};

// Rows of blocks of one side, and the blocks of the other side that each row visits. Forward, a row is a block of
// queries that visits blocks of keys; backward, a block of keys that visits blocks of queries. Made once per layout.
struct Plan {
  int64_t seqlen, block;                  // tokens of the rows' side and of its blocks
  int64_t visited_seqlen, visited_block;  // the same of the visited side
  int64_t layout_batch, layout_heads;     // 1 where shared
  const int32_t* indptr;                  // (layout_batch, layout_heads, rows + 1)
  const int32_t* indices;                 // (nnz,) visited blocks
  const int32_t* masks;                   // (nnz,) entry of the mask table, -1 for a full block
  const int32_t* row_order;               // (layout_batch, layout_heads, rows), longest first
  const uint16_t* mask_words;             // (num_masks, panels, visited_block): bit i is token i of the row's panel
  const uint8_t* mask_runs;               // (num_masks, panels, MAX_RUNS, 2): begin, end of visited tokens with a bit
  const int32_t* ranks;  // (nnz,) how many rows before this one visit the same block; null for rows of queries
};

struct ForwardArgs {
  const void *q, *k, *v;  // (batch, seqlen, heads, head_dim), any strides
  void* out;              // (batch, seqlen_q, q_heads, head_dim_v) contiguous
  float* lse;             // (batch, q_heads, seqlen_q) contiguous
  int64_t element;        // of q, k, v and out; see elements.h
  int64_t batch, q_heads, kv_heads, head_dim, head_dim_v;
  Strides q_strides, k_strides, v_strides;
  const Plan* plan;  // rows of queries
  double scale, softcap;  // softcap 0 for none
  int64_t threads;
  const float* sinks;  // (q_heads,), null for none
};

struct BackwardArgs {
  const void *q, *k, *v;   // (batch, seqlen, heads, head_dim), any strides
  const void *out, *grad;  // (batch, seqlen_q, q_heads, head_dim_v), any strides: out and its gradient
  void *dq, *dk, *dv;      // as q, k and v, any strides
  int64_t element;         // of all eight
  const float* lse;        // (batch, q_heads, seqlen_q) contiguous
  const float* lse_grad;   // the same, or null for none
  // Memory to work in. The halves are null for fp32, those of dk and dv also where part is the whole group.
  float* delta;                // (wave, part, seqlen_q)
  int32_t* turns;              // (wave, part, q_blocks)
  uint16_t* dq_low;            // (wave, part, seqlen_q, head_dim)
  uint16_t *dk_low, *dv_low;   // (wave, seqlen_k, head_dim and head_dim_v)
  int64_t batch, q_heads, kv_heads, head_dim, head_dim_v;
  Strides q_strides, k_strides, v_strides, out_strides, grad_strides, dq_strides, dk_strides, dv_strides;
  const Plan* plan;       // rows of keys
  double scale, softcap;  // softcap 0 for none
  int64_t threads;
  int64_t wave, part;  // at a time: kv heads, and q heads of the group of each
};

}  // namespace dynaxx
