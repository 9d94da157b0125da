// SPDX-License-Identifier: Apache-2.0
// Arguments from Python, field by field in the order of `arguments.py`. Strides count elements; the last dimension is
// contiguous. Every field is 8 bytes wide, so that both sides agree without padding.
#pragma once
#include <cstdint>

namespace dynaxx {

struct Strides {
  int64_t batch, token, head;
};

// The rows of blocks on one side, and the blocks of the other side that each row visits. In the forward pass, a row is
// a block of queries that visits blocks of keys; in the backward pass, a block of keys that visits blocks of queries.
// Built once per layout.
struct Plan {
  int64_t seqlen, block;                  // of the rows' side, in tokens
  int64_t visited_seqlen, visited_block;  // of the visited side, in tokens
  int64_t layout_batch, layout_heads;     // 1 if shared
  const int32_t* indptr;                  // (layout_batch, layout_heads, rows + 1)
  const int32_t* indices;                 // (nnz,) visited blocks
  const int32_t* masks;                   // (nnz,) index into the mask table, -1 for a full block
  const int32_t* row_order;               // (layout_batch, layout_heads, rows), longest first
  const uint16_t* mask_words;             // (num_masks, panels, visited_block): bit i is token i of the row's panel
  const uint8_t* mask_runs;               // (num_masks, panels, MAX_RUNS, 2): begin, end of runs of tokens with bits
  const int32_t* ranks;  // (nnz,) number of earlier rows that visit the same block; null if rows are queries
};

struct ForwardArgs {
  const void *q, *k, *v;  // (batch, seqlen, heads, head_dim), any strides
  void* out;              // (batch, seqlen_q, q_heads, head_dim_v) contiguous
  float* lse;             // (batch, q_heads, seqlen_q) contiguous
  int64_t element;        // dtype of q, k, v and out; see elements.h
  int64_t batch, q_heads, kv_heads, head_dim, head_dim_v;
  Strides q_strides, k_strides, v_strides;
  const Plan* plan;  // rows of queries
  double scale, softcap;  // softcap 0: none
  int64_t threads;
  const float* sinks;  // (q_heads,), null: none
  const float* bias;   // (batch, q_heads, bias_size) in units of Scale: index seqlen_k - 1 + query - key; null: none
};

struct BackwardArgs {
  const void *q, *k, *v;   // (batch, seqlen, heads, head_dim), any strides
  const void *out, *grad;  // (batch, seqlen_q, q_heads, head_dim_v), any strides: out and its gradient
  void *dq, *dk, *dv;      // like q, k and v, any strides
  int64_t element;         // dtype of all eight tensors
  const float* lse;        // (batch, q_heads, seqlen_q) contiguous
  const float* lse_grad;   // like lse; null: none
  // Working memory. dq_low, dk_low and dv_low are null for fp32; dk_low and dv_low also if part is the whole group.
  float* delta;                // (wave, part, seqlen_q)
  int32_t* turns;              // (wave, part, q_blocks + 1), the last one for the gradient of the bias
  uint16_t* dq_low;            // (wave, part, seqlen_q, head_dim)
  uint16_t *dk_low, *dv_low;   // (wave, seqlen_k, head_dim and head_dim_v)
  int64_t batch, q_heads, kv_heads, head_dim, head_dim_v;
  Strides q_strides, k_strides, v_strides, out_strides, grad_strides, dq_strides, dk_strides, dv_strides;
  const Plan* plan;       // rows of keys
  double scale, softcap;  // softcap 0: none
  int64_t threads;
  int64_t wave, part;  // heads processed together: kv heads, and q heads of each one's group
  const float* bias;   // like that of the forward pass, but index seqlen_q - 1 + key - query; null: none
  float* bias_grad;    // like bias, receives the gradient of the bias itself; null: none
};

constexpr int32_t ALL_OPTIONAL = INT32_MAX;  // count of a row that takes every optional block

// The choice of the best blocks of each row.
struct BestBlocksArgs {
  const float *q, *k;        // (batch, seqlen_q, q_heads, head_dim), (batch, seqlen_k, kv_heads, head_dim)
  const int32_t* counts;     // (q_heads, rows) blocks that each row takes; ALL_OPTIONAL: every optional one
  const uint32_t* optional;  // (rows, words) bits of the blocks among which a row chooses
  uint32_t* chosen;          // (batch, q_heads, rows, words)
  Strides q_strides, k_strides;
  int64_t batch, seqlen_q, seqlen_k, q_heads, kv_heads, head_dim, q_block, kv_block;
  int64_t tile;    // tokens per mean query; divides q_block into at most PANEL tiles
  int64_t causal;  // hide keys after the last query of a tile
  int64_t together;  // rank blocks for all q heads of a kv head by the sum of their masses, each relative to its best
  double scale;    // of the scores, in powers of two
  int64_t threads;

  int64_t rows() const { return (seqlen_q + q_block - 1) / q_block; }
  int64_t blocks() const { return (seqlen_k + kv_block - 1) / kv_block; }
  int64_t words() const { return (blocks() + 31) / 32; }
  int64_t parts() const { return q_block / tile; }
  int64_t group() const { return q_heads / kv_heads; }
};

// Lists of a pattern's blocks and of chosen ones.
struct ListBlocksArgs {
  const uint32_t* chosen;         // (heads, rows, words) bits; heads of all batch entries
  const int32_t* pattern_indptr;  // (rows + 1,) of the pattern's blocks; null: no pattern
  const int32_t *pattern_indices, *pattern_mask_ids;  // index and mask id of each
  int32_t *indptr, *num_partial;  // (heads, rows + 1) running on from head to head, (heads, rows)
  int32_t *indices, *mask_ids;       // (capacity,); null: only count
  int64_t heads, rows, blocks, capacity;
  int64_t causal, q_block, kv_block, offset;  // as in `BlockGrid`
  int64_t first_cut, cut_step;                // `causal_mask_id_terms`
};

}  // namespace dynaxx
