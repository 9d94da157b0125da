// SPDX-License-Identifier: Apache-2.0
// Work shared out to the threads of torch's own OpenMP runtime: from a counter, one task at a time.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "status.h"

// The entry point of every OpenMP runtime that GCC's code can run on (libgomp; LLVM's libomp has it too). Called by name
// instead of through `#pragma omp`, so that any compiler will do and no runtime is linked: the symbol resolves to the
// runtime that torch has loaded. Weak: without one, tasks run on the calling thread.
extern "C" void GOMP_parallel(void (*run)(void*), void* data, unsigned threads, unsigned flags) __attribute__((weak));

namespace dynaxx {

// The process that loaded the library. A child forked from it has none of the runtime's threads and would wait for them
// for ever: there, tasks run on the calling thread.
inline const pid_t HOME_PROCESS = getpid();

// Run `run(task)` for every task in [0, num_tasks), begun in that order, on up to `threads` threads.
//
// No exception may leave a thread of the runtime. The first one becomes `status`, which running tasks can watch, and the
// tasks that have not begun are left out.
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
  threads = std::min({threads, num_tasks, MOST_THREADS});
  if (threads > 1 && GOMP_parallel && getpid() == HOME_PROCESS)
    GOMP_parallel(work, &shared, unsigned(threads), 0);
  else
    work(&shared);
}

// Raise in the calling thread what a task has raised.
inline void rethrow(const std::atomic<int>& status) {
  switch (status.load()) {
    case OK: return;
    case NO_MEMORY: throw std::bad_alloc();
    case BAD_INPUT: throw BadInput();
    default: throw std::runtime_error("a task of the core failed");
  }
}

// `for_each_task` where no task needs to know of the others.
template <class Run>
void for_each_task(int64_t num_tasks, int64_t threads, const Run& run) {
  std::atomic<int> status{OK};
  for_each_task(num_tasks, threads, status, run);
  rethrow(status);
}

}  // namespace dynaxx
