// Work shared out to the threads of torch's own OpenMP runtime: from a counter, one task at a time.
#pragma once
#include <unistd.h>

#include <atomic>
#include <cstdint>

// The entry point of every OpenMP runtime that GCC's code can run on (libgomp; LLVM's libomp has it too). Called by name
// instead of through `#pragma omp`, so that any compiler will do and no runtime is linked: the symbol resolves to the
// runtime that torch has loaded. Weak: without one, tasks run on the calling thread.
extern "C" void GOMP_parallel(void (*run)(void*), void* data, unsigned threads, unsigned flags) __attribute__((weak));

namespace dynaxx {

// The process that loaded the library. A child forked from it has none of the runtime's threads and would wait for them
// for ever: there, tasks run on the calling thread.
inline const pid_t HOME_PROCESS = getpid();

// run(task) for every task in [0, num_tasks), begun in that order, on up to `threads` threads.
template <class Run>
void for_each_task(int64_t num_tasks, int64_t threads, const Run& run) {
  struct Shared {
    const Run& run;
    const int64_t num_tasks;
    std::atomic<int64_t> next{0};
  } shared{run, num_tasks};
  const auto work = [](void* data) {
    Shared& shared = *static_cast<Shared*>(data);
    for (int64_t task; (task = shared.next.fetch_add(1, std::memory_order_relaxed)) < shared.num_tasks;)
      shared.run(task);
  };
  if (threads > num_tasks) threads = num_tasks;
  if (threads > 1 && GOMP_parallel && getpid() == HOME_PROCESS)
    GOMP_parallel(work, &shared, unsigned(threads), 0);
  else
    work(&shared);
}

}  // namespace dynaxx
