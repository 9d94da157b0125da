// SPDX-License-Identifier: Apache-2.0
// Preparation of a layout: element masks transposed to panels, their runs of visible tokens, and the order of rows.
#include "plan.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "shared.h"

using namespace dynaxx;

namespace {

// An element mask, (q_block, row_words) words of 32 bits.
struct Mask {
  const uint32_t* bits;
  int64_t row_words;

  bool visible(int64_t query, int64_t key) const { return bits[query * row_words + key / 32] >> (key % 32) & 1; }
};

// Set bit i of words[x] if token first + i of the rows' side and token x of the visited side see each other.
void panel_words(const Mask& mask, bool rows_are_keys, int64_t first, int64_t visited_block, uint16_t* words) {
  for (int64_t x = 0; x < visited_block; x++) {
    words[x] = 0;
    for (int64_t i = 0; i < PANEL; i++)
      words[x] |= uint16_t((rows_are_keys ? mask.visible(x, first + i) : mask.visible(first + i, x)) << i);
  }
}

void find_runs(const uint16_t* words, int64_t visited_block, uint8_t* runs) {
  std::memset(runs, 0, 2 * MAX_RUNS);
  int count = 0;
  for (int64_t c = 0; c < visited_block; c++) {
    if (!words[c]) continue;
    const bool joins = count && (c - runs[2 * count - 1] <= MIN_GAP || count == MAX_RUNS);
    if (!joins) runs[2 * count++] = uint8_t(c);
    runs[2 * count - 1] = uint8_t(c + 1);
  }
}

}  // namespace

// Check the index ranges of `heads` heads with `rows` rows each, like `check_values` in layout/validate.py. Offsets
// must start at 0, never decrease, continue from one head to the next and end within `capacity`. The first
// `num_partial` blocks of a row must have a mask and the others none. Indices must be below `visited` and occur once
// per row. Other threads may write to the arrays during the check. Returns OK or BAD_INPUT.
extern "C" DYNAXX_EXPORT int dynaxx_cpu_plan_check(const int32_t* indptr, const int32_t* num_partial,
                                                   const int32_t* indices, const int32_t* masks, int64_t heads,
                                                   int64_t rows, int64_t visited, int64_t num_masks,
                                                   int64_t capacity) {
  return status_of([&] {
    require(within(rows, 0, INT32_MAX) && countable(heads, rows + 1) && within(visited, 0, INT32_MAX) && capacity >= 0);
    std::vector<int64_t> seen(visited, -1);  // last row that visited each block
    int64_t entry = 0;
    for (int64_t row = 0; row < heads * rows; row++) {
      const int32_t* ends = indptr + row / rows * (rows + 1) + row % rows;
      const int64_t stop = read_once(ends + 1), count = stop - entry, partial = read_once(num_partial + row);
      require(read_once(ends) == entry && count >= 0 && stop <= capacity && within(partial, 0, count));
      for (int64_t i = 0; i < count; i++, entry++) {
        const int32_t block = read_once(indices + entry), mask = read_once(masks + entry);
        require(block >= 0 && block < visited && seen[block] != row);
        require(i < partial ? mask >= 0 && mask < num_masks : mask == -1);
        seen[block] = row;
      }
    }
  });
}

// Convert bits (num_masks, q_block, ceil(kv_block / 32)) to the words and runs of a Plan whose rows are queries or
// keys. Returns a `Status`.
extern "C" DYNAXX_EXPORT int dynaxx_cpu_plan_masks(const uint32_t* bits, int64_t num_masks, int64_t q_block,
                                                   int64_t kv_block, int64_t rows_are_keys, uint16_t* words,
                                                   uint8_t* runs) {
  return status_of([&] {
    require(is_block_size(q_block) && is_block_size(kv_block) && countable(num_masks, q_block, kv_block));
    const int64_t row_words = (kv_block + 31) / 32;
    const int64_t block = rows_are_keys ? kv_block : q_block, visited_block = rows_are_keys ? q_block : kv_block;
    for (int64_t mask = 0; mask < num_masks; mask++, bits += q_block * row_words)
      for (int64_t first = 0; first < block; first += PANEL) {
        panel_words({bits, row_words}, rows_are_keys, first, visited_block, words);
        find_runs(words, visited_block, runs);
        words += visited_block;
        runs += 2 * MAX_RUNS;
      }
  });
}

// Sort the rows of each of `heads` CSR index ranges by length, longest first and stable, so that the last tasks are
// short. Returns a `Status`.
extern "C" DYNAXX_EXPORT int dynaxx_cpu_plan_rows(const int32_t* indptr, int64_t heads, int64_t rows, int32_t* order) {
  return status_of([&] {
    require(within(rows, 0, INT32_MAX) && countable(heads, rows + 1));
    for (int64_t head = 0; head < heads; head++, indptr += rows + 1, order += rows) {
      for (int64_t row = 0; row < rows; row++) order[row] = int32_t(row);
      const auto length = [&](int32_t row) { return int64_t(indptr[row + 1]) - indptr[row]; };
      std::stable_sort(order, order + rows, [&](int32_t a, int32_t b) { return length(a) > length(b); });
    }
  });
}

// Count for each entry of `heads` CSR index ranges how many earlier rows visit the same block. `dynaxx_cpu_plan_check`
// must have accepted the ranges. `counts` is working memory for `visited` numbers. Returns a `Status`.
extern "C" DYNAXX_EXPORT int dynaxx_cpu_plan_ranks(const int32_t* indptr, const int32_t* indices, int64_t heads,
                                                   int64_t rows, int64_t visited, int32_t* counts, int32_t* ranks) {
  return status_of([&] {
    require(within(rows, 0, INT32_MAX) && countable(heads, rows + 1) && within(visited, 0, INT32_MAX));
    for (int64_t head = 0; head < heads; head++, indptr += rows + 1) {
      std::fill(counts, counts + visited, 0);
      for (int32_t entry = indptr[0]; entry < indptr[rows]; entry++) {
        require(indices[entry] >= 0 && indices[entry] < visited);
        ranks[entry] = counts[indices[entry]]++;
      }
    }
  });
}
