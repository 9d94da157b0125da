// SPDX-License-Identifier: Apache-2.0
// Ordering of tasks that add to the same memory, so that sums always round in the same way.
#pragma once
#include <atomic>
#include <cstdint>
#include <new>
#include <thread>

namespace dynaxx {

// Spin until `turn` earlier tasks have finished. Tasks start in the order of their turns, so the earlier task is
// already running. It never finishes if a task has failed; then `failed` is set and this function throws.
inline void await_turn(const int32_t* done, int32_t turn, const std::atomic<int>& failed) {
  constexpr int PATIENCE = 256;  // polls before the thread yields
  for (int look = 0; __atomic_load_n(done, __ATOMIC_ACQUIRE) != turn; look++) {
    if (failed) throw std::bad_alloc();
    if (look > PATIENCE) std::this_thread::yield();
  }
}

inline void end_turn(int32_t* done, int32_t turn) { __atomic_store_n(done, turn + 1, __ATOMIC_RELEASE); }

}  // namespace dynaxx
