// SPDX-License-Identifier: Apache-2.0
// From the numbers of `plan` to the layouts of static rules, and to what a choice of blocks starts from.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <list>
#include <mutex>

#include "layer_rules.h"
#include "tasks.h"

extern "C" {
int dynaxx_cpu_static_layout(const int64_t* program, int64_t size, const dynaxx::Grid* grid, int64_t* sizes, void** built);
int dynaxx_cpu_take_layout(void* built, int32_t* numbers, int64_t capacity);
int dynaxx_cpu_plan_masks(const uint32_t* bits, int64_t num_masks, int64_t q_block, int64_t kv_block,
                          int64_t rows_are_keys, uint16_t* words, uint8_t* runs);
}

namespace dynaxx_onnx {

namespace {

constexpr size_t MAX_KEPT = 8;  // pairs of lengths and rules whose layouts are kept

class Reader {
 public:
  explicit Reader(const std::vector<int64_t>& numbers) : numbers_(numbers) {}

  int64_t next() {
    require(at_ < numbers_.size());
    return numbers_[at_++];
  }
  bool next_flag() {
    const int64_t flag = next();
    require(within(flag, 0, 1));
    return flag;
  }
  double next_real() {
    const int64_t bits = next();
    double x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  }
  int64_t next_count() {
    const int64_t count = next();
    require(count >= 0 && uint64_t(count) <= numbers_.size() - at_);
    return count;
  }
  std::vector<int64_t> next_list() {
    std::vector<int64_t> list(next_count());
    for (int64_t& each : list) each = next();
    return list;
  }
  size_t at() const { return at_; }
  bool done() const { return at_ == numbers_.size(); }

 private:
  const std::vector<int64_t>& numbers_;
  size_t at_ = 0;
};

struct Parts {
  std::array<std::vector<int32_t>, 7> numbers;  // indptr, num_partial, indices, mask ids, bits, bands, order
};

// The program of these lengths: a first query of -n in `plan` is the n-th of the last, or the first of the grid.
std::vector<int64_t> placed(std::vector<int64_t> program, const Grid& grid) {
  Reader from(program);
  std::vector<size_t> starts;
  while (!from.done()) {
    const int64_t op = from.next();
    if (op == QUERIES) {
      const int64_t runs = from.next_count();
      for (int64_t run = 0; run < runs; run++, from.next()) {
        starts.push_back(from.at());
        from.next();
      }
    } else if (op == KEYS || op == DOCUMENTS) {
      const int64_t numbers = from.next_count() * (op == KEYS ? 2 : 1);
      for (int64_t i = 0; i < numbers; i++) from.next();
    } else {
      from.next();
      if (op == BAND || op == RANDOM_BLOCKS) from.next();
    }
  }
  for (const size_t at : starts)
    if (program[at] < 0) program[at] = std::max(grid.seqlen_k + program[at], grid.offset());
  return program;
}

Parts layout_of(const std::vector<int64_t>& numbers, const Grid& grid) {
  const std::vector<int64_t> program = placed(numbers, grid);
  int64_t sizes[7];
  void* built = nullptr;
  rethrow(dynaxx_cpu_static_layout(program.data(), int64_t(program.size()), &grid, sizes, &built));
  int64_t total = 0;
  for (const int64_t size : sizes) total += (size + 3) / 4 * 4;
  std::vector<int32_t> all(total);
  rethrow(dynaxx_cpu_take_layout(built, all.data(), total));
  Parts parts;
  const int32_t* from = all.data();
  for (int i = 0; i < 7; i++) {
    parts.numbers[i].assign(from, from + sizes[i]);
    from += (sizes[i] + 3) / 4 * 4;
  }
  return parts;
}

}  // namespace

namespace {

// Whether the ascending heads of all groups together are 0 .. heads - 1, each once.
bool covers(const std::vector<Group>& groups, int64_t heads) {
  std::vector<bool> seen(heads);
  for (const Group& group : groups)
    for (const int64_t head : group.heads) {
      if (!within(head, 0, heads - 1) || seen[head]) return false;
      seen[head] = true;
    }
  return true;  // as many different heads as there are
}

}  // namespace

LayerRules LayerRules::read(const std::vector<int64_t>& numbers) {
  Reader from(numbers);
  LayerRules rules;
  rules.q_block = from.next();
  rules.kv_block = from.next();
  require(is_block_size(rules.q_block) && is_block_size(rules.kv_block));
  rules.groups.resize(from.next_count());
  require(!rules.groups.empty());
  for (Group& group : rules.groups) {
    group.heads = from.next_list();
    require(!group.heads.empty() && std::is_sorted(group.heads.begin(), group.heads.end()));
    rules.q_heads += int64_t(group.heads.size());
    group.program = from.next_list();
    group.chooses = from.next_flag();
    require(group.chooses || !group.program.empty());
    if (!group.chooses) continue;
    TopK& choice = group.choice;
    choice.scorer = from.next();
    require(within(choice.scorer, MEAN_QUERY, MIN_MAX));
    choice.parameter = from.next_real();
    require(std::isfinite(choice.parameter));
    choice.shares = from.next_flag();
    choice.together = from.next_flag();
    choice.floor = from.next();
    require(within(choice.floor, 0, INT32_MAX));
    choice.budgets.resize(from.next_count());
    for (double& budget : choice.budgets) {
      budget = from.next_real();
      require(budget >= 0 && budget <= (choice.shares ? 1 : INT32_MAX));  // and no NaN
    }
    require(choice.budgets.size() == 1 || choice.budgets.size() == group.heads.size());
  }
  require(from.done() && covers(rules.groups, rules.q_heads));
  return rules;
}

namespace {

std::shared_ptr<const Prepared> prepare(const LayerRules& rules, const Grid& grid, int64_t q_heads) {
  auto made = std::make_shared<Prepared>();
  made->grid = grid;
  const int64_t mask_words = grid.q_block * grid.words(), rows = grid.q_blocks(), words = (grid.kv_blocks() + 31) / 32;
  std::vector<uint32_t> bits;
  // Every distance of a block's first query and key at which the diagonal cuts it: as in layout/masks.py.
  made->cut_step = std::min(grid.q_block, grid.kv_block);
  made->first_cut = 1 - grid.q_block + (grid.offset() - 1 + grid.q_block) % made->cut_step;
  const int64_t last_cut = grid.causal ? grid.kv_block - 2 : made->first_cut - 1;
  for (int64_t distance = made->first_cut; distance <= last_cut; distance += made->cut_step)
    for (int64_t i = 0; i < grid.q_block; i++)
      for (int64_t w = 0; w < grid.words(); w++) {
        uint32_t word = 0;
        for (int64_t j = 0; j < 32 && w * 32 + j < grid.kv_block; j++) word |= uint32_t(distance + i >= w * 32 + j) << j;
        bits.push_back(word);
      }
  std::vector<Parts> parts(rules.groups.size());
  for (size_t g = 0; g < parts.size(); g++) {
    Static pattern;
    pattern.indptr.assign(rows + 1, 0);
    pattern.optional.assign(rows * words, 0);
    for (int64_t row = 0; row < rows; row++)
      for (int64_t col = 0; col < grid.limit(row); col++) pattern.optional[row * words + col / 32] |= 1u << col % 32;
    if (!rules.groups[g].program.empty()) {
      parts[g] = layout_of(rules.groups[g].program, grid);
      auto& [indptr, num_partial, indices, mask_ids, own, bands, order] = parts[g].numbers;
      const int32_t first = int32_t(bits.size() / mask_words);
      bits.insert(bits.end(), own.begin(), own.end());
      pattern.indptr = indptr;
      pattern.indices = indices;
      pattern.mask_ids = mask_ids;
      for (int32_t& mask_id : pattern.mask_ids) mask_id += mask_id >= 0 ? first : 0;
      for (int64_t row = 0; row < rows; row++)
        for (int32_t entry = indptr[row]; entry < indptr[row + 1]; entry++) {
          const int32_t mask_id = pattern.mask_ids[entry], causal = made->causal_mask_id(row, indices[entry]);
          const bool covers =  // it shows all that causality shows
              mask_id == causal || mask_id == FULL ||
              (mask_id >= 0 && causal >= 0 &&
               !std::memcmp(&bits[mask_id * mask_words], &bits[causal * mask_words], mask_words * sizeof(uint32_t)));
          if (covers) pattern.optional[row * words + indices[entry] / 32] &= ~(1u << indices[entry] % 32);
        }
    }
    made->patterns.push_back(std::move(pattern));
  }
  const int64_t num_masks = int64_t(bits.size()) / mask_words, panels = grid.q_block / PANEL;
  made->words.resize(num_masks * panels * grid.kv_block);
  made->runs.resize(num_masks * panels * 2 * MAX_RUNS);
  rethrow(dynaxx_cpu_plan_masks(bits.data(), num_masks, grid.q_block, grid.kv_block, 0, made->words.data(),
                              made->runs.data()));
  if (!rules.is_static()) return made;
  made->layout_heads = rules.groups.size() == 1 ? 1 : q_heads;
  std::vector<const Static*> of_head(made->layout_heads, &made->patterns[0]);
  for (size_t g = 0; g < rules.groups.size() && made->layout_heads > 1; g++)
    for (const int64_t head : rules.groups[g].heads) of_head[head] = &made->patterns[g];
  for (const Static* pattern : of_head) {
    const int32_t before = int32_t(made->indices.size());
    if (made->indices.size() + pattern->indices.size() > INT32_MAX) throw std::bad_alloc();
    for (const int32_t end : pattern->indptr) made->indptr.push_back(before + end);
    made->indices.insert(made->indices.end(), pattern->indices.begin(), pattern->indices.end());
    made->masks.insert(made->masks.end(), pattern->mask_ids.begin(), pattern->mask_ids.end());
  }
  made->order.resize(made->layout_heads * rows);
  rethrow(dynaxx_cpu_plan_rows(made->indptr.data(), made->layout_heads, rows, made->order.data()));
  return made;
}

}  // namespace

std::shared_ptr<const Prepared> Prepared::of(const LayerRules& rules, const std::vector<int64_t>& key, const Grid& grid,
                                             int64_t q_heads) {
  struct Kept {
    std::vector<int64_t> key;
    std::shared_ptr<const Prepared> made;
  };
  static std::mutex mutex;
  static std::list<Kept> kept;  // the last used first
  std::vector<int64_t> whole(key);
  whole.insert(whole.end(), {grid.seqlen_q, grid.seqlen_k, grid.causal, q_heads});
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto at = kept.begin(); at != kept.end(); ++at)
    if (at->key == whole) {
      kept.splice(kept.begin(), kept, at);
      return kept.front().made;
    }
  auto made = prepare(rules, grid, q_heads);
  kept.push_front({std::move(whole), made});
  if (kept.size() > MAX_KEPT) kept.pop_back();
  return made;
}

}  // namespace dynaxx_onnx
