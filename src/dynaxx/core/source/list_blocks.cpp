// SPDX-License-Identifier: Apache-2.0
// Lists of the blocks that rows of q blocks visit: those of a pattern, the same for all heads, and those chosen for each
// head. In each row, blocks with an element mask come first, and indices ascend in both parts.
#include <algorithm>
#include <vector>

#include "args.h"
#include "rules.h"
#include "status.h"
#include "tasks.h"
#include "vec.h"

using namespace dynaxx;

namespace {

constexpr int32_t FULL = -1;

class Row {
 public:
  Row(const ListBlocksArgs& args, int64_t row) : args_(args), row_(row), words_((args.blocks + 31) / 32) {
    static thread_local std::vector<int32_t> mask_ids;
    static thread_local std::vector<uint32_t> shown;
    mask_ids.resize(args.blocks);
    shown.assign(words_, 0);
    mask_ids_ = mask_ids.data();
    shown_ = shown.data();
    const int64_t last = args.pattern_indptr ? args.pattern_indptr[row + 1] : 0;
    for (int64_t entry = args.pattern_indptr ? args.pattern_indptr[row] : 0; entry < last; entry++) {
      const int32_t block = args.pattern_indices[entry];
      require(within(block, 0, args.blocks - 1));
      mask_ids_[block] = args.pattern_mask_ids[entry];
      shown_[block / 32] |= 1u << block % 32;
    }
  }

  void count(int64_t head) const {
    int32_t total = 0, partial = 0;
    each(head, [&](int32_t, int32_t mask_id) { total++, partial += mask_id != FULL; });
    args_.indptr[head * (args_.rows + 1) + row_ + 1] = total;
    args_.num_partial[head * args_.rows + row_] = partial;
  }

  void list(int64_t head) const {
    int64_t at = args_.indptr[head * (args_.rows + 1) + row_], full = at + args_.num_partial[head * args_.rows + row_];
    require(args_.indptr[head * (args_.rows + 1) + row_ + 1] <= args_.capacity);
    each(head, [&](int32_t block, int32_t mask_id) {
      int64_t& to = mask_id == FULL ? full : at;
      args_.indices[to] = block;
      args_.mask_ids[to++] = mask_id;
    });
  }

 private:
  template <class Visit>
  void each(int64_t head, const Visit& visit) const {
    const uint32_t* chosen = args_.chosen + (head * args_.rows + row_) * words_;
    for (int64_t word = 0; word < words_; word++)
      for (uint32_t bits = chosen[word] | shown_[word]; bits; bits &= bits - 1) {
        const int bit = __builtin_ctz(bits);
        const int64_t block = word * 32 + bit;
        if (block >= args_.blocks) continue;
        visit(int32_t(block), chosen[word] >> bit & 1 ? causal_mask_id(block) : mask_ids_[block]);
      }
  }

  int32_t causal_mask_id(int64_t block) const {
    if (!args_.causal) return FULL;
    const int64_t distance = row_ * args_.q_block + args_.offset - block * args_.kv_block;
    return distance >= args_.kv_block - 1 ? FULL : int32_t(floor_div(distance - args_.first_cut, args_.cut_step));
  }

  const ListBlocksArgs& args_;
  const int64_t row_, words_;
  int32_t* mask_ids_;
  uint32_t* shown_;
};

}  // namespace

// Count the blocks of all rows, or list them after that. Returns a `Status`.
extern "C" DYNAXX_EXPORT int dynaxx_cpu_list_blocks(const ListBlocksArgs* args, int64_t threads) {
  return status_of([&] {
    require(within(args->heads, 0, MAX_HEADS) && within(args->rows, 0, INT32_MAX) && within(args->blocks, 0, INT32_MAX));
    require(within(threads, 1, MAX_THREADS) && is_block_size(args->q_block) && is_block_size(args->kv_block));
    require(args->cut_step >= 1 && countable(args->heads, args->rows, args->blocks));
    const bool counts = !args->indices;
    for_each_task(args->rows, threads, [&](int64_t index) {
      const Row row(*args, index);
      for (int64_t head = 0; head < args->heads; head++) counts ? row.count(head) : row.list(head);
    });
    int64_t total = 0;
    for (int64_t head = 0; counts && head < args->heads; head++) {
      int32_t* at = args->indptr + head * (args->rows + 1);
      *at = int32_t(total);
      for (int64_t row = 0; row < args->rows; row++) {
        total += *++at;
        require(total <= INT32_MAX);
        *at = int32_t(total);
      }
    }
  });
}
