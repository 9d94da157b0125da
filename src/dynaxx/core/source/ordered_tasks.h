// SPDX-License-Identifier: Apache-2.0
// Turns: tasks that add to the same memory do so in a fixed order, so that sums round the same way every time.
#pragma once
#include <atomic>
#include <cstdint>
#include <new>
#include <thread>

namespace dynaxx {

// Spin until `turn` earlier tasks have finished. Tasks begin in the order of their turns, so the one waited for is
// running. It never finishes where a task has failed, which `failed` says.
inline void await_turn(const int32_t* done, int32_t turn, const std::atomic<int>& failed) {
  constexpr int PATIENCE = 256;  // looks before the processor is offered to others
  for (int look = 0; __atomic_load_n(done, __ATOMIC_ACQUIRE) != turn; look++) {
    if (failed) throw std::bad_alloc();
    if (look > PATIENCE) std::this_thread::yield();
  }
}

inline void end_turn(int32_t* done, int32_t turn) { __atomic_store_n(done, turn + 1, __ATOMIC_RELEASE); }

}  // namespace dynaxx
