// What Python passes, field by field as `arguments.py` lists them. Strides count elements; the last dimension is
// contiguous. Everything is 8 bytes wide, so that both sides agree without thinking of padding.
#pragma once
#include <cstdint>

namespace dynaxx {

struct Strides {
  int64_t batch, token, head;
};

// A BlockLayout prepared for this backend: see plan.cpp. Made once per layout.
struct Plan {
  int64_t seqlen_q, seqlen_k;
  int64_t q_block, kv_block;
  int64_t layout_batch, layout_heads;  // 1 where shared
  const int32_t* kv_indptr;            // (layout_batch, layout_heads, q_blocks + 1)
  const int32_t* kv_indices;           // (nnz,)
  const int32_t* kv_masks;             // (nnz,) entry of the mask table, -1 for a full block
  const int32_t* row_order;            // (layout_batch, layout_heads, q_blocks) rows, longest first
  const uint16_t* mask_words;          // (num_masks, q_panels, kv_block): bit i is query i of the panel
  const uint8_t* mask_runs;            // (num_masks, q_panels, MAX_RUNS, 2): begin, end of keys that some query sees
};

struct ForwardArgs {
  const void *q, *k, *v;  // (batch, seqlen, heads, head_dim), any strides
  void* out;              // (batch, seqlen_q, q_heads, head_dim_v) contiguous
  float* lse;             // (batch, q_heads, seqlen_q) contiguous
  int64_t batch, q_heads, kv_heads, head_dim, head_dim_v;
  Strides q_strides, k_strides, v_strides;
  const Plan* plan;
  double scale;
  int64_t threads;
};

}  // namespace dynaxx
