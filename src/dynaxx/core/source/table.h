// SPDX-License-Identifier: Apache-2.0
// A hash table from keys to numbers in one allocation, because a node per key, as in std::unordered_map, is too expensive.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace dynaxx {

class Table {
 public:
  // Return a pointer to the key's number, valid until the next call, and whether the key is new; then it gets `number`.
  std::pair<int32_t*, bool> insert(uint64_t key, int32_t number) {
    if (2 * (count_ + 1) > slots_.size()) grow();
    Slot& slot = slot_of(key);
    const bool is_new = slot.key != key;
    if (is_new) slot = {key, number};
    count_ += is_new;
    return {&slot.number, is_new};
  }

 private:
  struct Slot {
    uint64_t key = 0;  // 0 in free slots; no key is 0
    int32_t number = 0;
  };

  Slot& slot_of(uint64_t key) {
    const size_t last = slots_.size() - 1;
    size_t at = key * 0x9E3779B97F4A7C15u >> 32 & last;
    while (slots_[at].key && slots_[at].key != key) at = (at + 1) & last;
    return slots_[at];
  }

  void grow() {
    std::vector<Slot> old(std::max<size_t>(64, 2 * slots_.size()));
    old.swap(slots_);
    for (const Slot& slot : old)
      if (slot.key) slot_of(slot.key) = slot;
  }

  std::vector<Slot> slots_;  // its size is a power of two
  size_t count_ = 0;
};

}  // namespace dynaxx
