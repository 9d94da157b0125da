// Prepare a layout: transpose the element masks to panels, find their runs of visible keys, order the rows.
#include "plan.h"

#include <algorithm>
#include <cstring>

using namespace dynaxx;

namespace {

// words[c] bit i = bit (first_row + i, c) of the mask, whose rows are `row_words` of 32 bits.
void transpose_bits(const uint32_t* bits, int64_t row_words, int64_t kv_block, uint16_t* words) {
  std::memset(words, 0, sizeof(uint16_t) * kv_block);
  for (int64_t i = 0; i < PANEL; i++)
    for (int64_t c = 0; c < kv_block; c++)
      words[c] |= uint16_t((bits[i * row_words + c / 32] >> (c % 32) & 1) << i);
}

void find_runs(const uint16_t* words, int64_t kv_block, uint8_t* runs) {
  std::memset(runs, 0, 2 * MAX_RUNS);
  int count = 0;
  for (int64_t c = 0; c < kv_block; c++) {
    if (!words[c]) continue;
    const bool joins = count && (c - runs[2 * count - 1] <= MIN_GAP || count == MAX_RUNS);
    if (!joins) runs[2 * count++] = uint8_t(c);
    runs[2 * count - 1] = uint8_t(c + 1);
  }
}

}  // namespace

// bits (num_masks, q_block, ceil(kv_block / 32)) -> words, runs as in Plan.
extern "C" DYNAXX_EXPORT void dynaxx_cpu_plan_masks(const uint32_t* bits, int64_t num_masks, int64_t q_block, int64_t kv_block,
                                      uint16_t* words, uint8_t* runs) {
  const int64_t row_words = (kv_block + 31) / 32, panels = q_block / PANEL;
  for (int64_t entry = 0; entry < num_masks * panels; entry++) {
    transpose_bits(bits + entry * PANEL * row_words, row_words, kv_block, words + entry * kv_block);
    find_runs(words + entry * kv_block, kv_block, runs + entry * 2 * MAX_RUNS);
  }
}

// Rows of each of `heads` CSR index ranges, longest first and otherwise in order: the last tasks are short ones.
extern "C" DYNAXX_EXPORT void dynaxx_cpu_plan_rows(const int32_t* indptr, int64_t heads, int64_t rows, int32_t* order) {
  for (int64_t head = 0; head < heads; head++, indptr += rows + 1, order += rows) {
    for (int64_t row = 0; row < rows; row++) order[row] = int32_t(row);
    std::stable_sort(order, order + rows, [&](int32_t a, int32_t b) {
      return indptr[a + 1] - indptr[a] > indptr[b + 1] - indptr[b];
    });
  }
}
