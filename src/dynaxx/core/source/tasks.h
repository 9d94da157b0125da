// SPDX-License-Identifier: Apache-2.0
// Distribution of tasks to the threads of torch's OpenMP runtime, or to those that the caller has chosen: threads take
// tasks from a shared counter.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "launch.h"
#include "status.h"

// The entry point of all OpenMP runtimes that support code from GCC (libgomp, and LLVM's libomp). Calling it directly,
// without `#pragma omp`, works with any compiler and links no runtime: the symbol resolves to the runtime that torch
// has loaded. It is weak; without a runtime, tasks run on the calling thread.
extern "C" void GOMP_parallel(void (*run)(void*), void* data, unsigned threads, unsigned flags) __attribute__((weak));

namespace dynaxx {

// Run `run(task)` for every task in [0, num_tasks) on up to `threads` threads; tasks start in this order.
//
// No exception may leave a thread of the runtime. The first exception is stored in `status`, which running tasks can
// read; tasks that have not started are skipped.
template <class Run>
void for_each_task(int64_t num_tasks, int64_t threads, std::atomic<int>& status, const Run& run) {
  struct Shared {
    const Run& run;
    const int64_t num_tasks;
    std::atomic<int>& status;
    std::atomic<int64_t> next{0};
  } shared{run, num_tasks, status};
  const auto work = [](void* data) {
    Shared& shared = *static_cast<Shared*>(data);
    for (int64_t task; (task = shared.next.fetch_add(1, std::memory_order_relaxed)) < shared.num_tasks;) {
      if (shared.status.load(std::memory_order_relaxed)) return;
      if (const int failed = status_of([&] { shared.run(task); })) {
        int none = OK;
        shared.status.compare_exchange_strong(none, failed);
      }
    }
  };
  threads = std::min({threads, num_tasks, MAX_THREADS});
  if (threads <= 1 || is_forked())
    work(&shared);
  else if (const Launch launch = current_launch())
    launch(work, &shared, threads);
  else if (GOMP_parallel)
    GOMP_parallel(work, &shared, unsigned(threads), 0);
  else
    work(&shared);
}

// Throw in the calling thread what a task has thrown.
inline void rethrow(int status) {
  switch (status) {
    case OK: return;
    case NO_MEMORY: throw std::bad_alloc();
    case BAD_INPUT: throw BadInput();
    default: throw std::runtime_error("a task of the core failed");
  }
}

// Run `for_each_task` for tasks that need not know whether another task failed.
template <class Run>
void for_each_task(int64_t num_tasks, int64_t threads, const Run& run) {
  std::atomic<int> status{OK};
  for_each_task(num_tasks, threads, status, run);
  rethrow(status.load());
}

}  // namespace dynaxx
