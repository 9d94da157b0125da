// SPDX-License-Identifier: Apache-2.0
// Threads of the core's own, for callers that already run on another runtime's threads.
//
// After each parallel region the workers of OpenMP's runtime spin for milliseconds, in case another region follows. Inside
// an engine that goes on with threads of its own, such as OpenVINO, they take the cores away from it. The core's own threads
// spin for microseconds and then sleep.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "launch.h"
#include "vec.h"

// These two read and set the number of threads of the calling thread's OpenMP regions. They are null unless torch has
// loaded an OpenMP runtime.
extern "C" int omp_get_max_threads() __attribute__((weak));
extern "C" void omp_set_num_threads(int) __attribute__((weak));

namespace dynaxx {
namespace {

constexpr int SPINS = 2000;  // tens of microseconds, the time between two launches of one attention call

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Threads that wait for work. They are never joined: the process ends without them. While one call has them, others run
// alone.
class Team {
 public:
  void run(void (*run)(void*), void* data, int64_t threads) {
    const std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (turn.owns_lock()) open(run, data, threads - 1);
    run(data);
    if (turn.owns_lock()) close();
  }

 private:
  void open(void (*run)(void*), void* data, int64_t helpers) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      while (started_ < helpers && start()) started_++;
      run_ = run;
      data_ = data;
      places_ = std::min(helpers, started_);
    }
    wake_.notify_all();
  }

  // Let no helper join any more, and wait for those that have.
  void close() {
    std::unique_lock<std::mutex> lock(mutex_);
    places_ = 0;
    if (!inside_) return;
    lock.unlock();
    for (int i = 0; i < SPINS && inside_; i++) relax();
    lock.lock();
    left_.wait(lock, [this] { return !inside_; });
  }

  bool start() {
    try {
      std::thread([this] { serve(); }).detach();
      return true;
    } catch (const std::system_error&) {  // the system has no more threads: fewer help
      return false;
    }
  }

  void serve() {
    for (;;) {
      for (int i = 0; i < SPINS && !places_; i++) relax();
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [this] { return places_ > 0; });
      places_--;
      inside_++;
      void (*const run)(void*) = run_;
      void* const data = data_;
      lock.unlock();
      run(data);
      lock.lock();
      if (!--inside_) left_.notify_one();
    }
  }

  std::mutex turn_;   // held by the call that has the team
  std::mutex mutex_;  // guards what follows; the counts are atomic to be looked at without it
  std::condition_variable wake_, left_;
  void (*run_)(void*) = nullptr;
  void* data_ = nullptr;
  int64_t started_ = 0;
  std::atomic<int64_t> places_{0}, inside_{0};  // helpers that may still join; helpers at work
};

thread_local int64_t before = 0;  // OpenMP threads of the calling thread before it asked; 0 if it has not asked

void run_on_own_threads(void (*run)(void*), void* data, int64_t threads) {
  static Team* const team = new Team;  // its threads outlive static objects
  team->run(run, data, threads);
}

}  // namespace
}  // namespace dynaxx

// Make the calling thread's launches run on the core's own threads (1) or on OpenMP's again (0). In between, regions of
// OpenMP that this thread starts, such as those of torch's operations, have one thread and wake no worker.
extern "C" DYNAXX_EXPORT int dynaxx_cpu_own_threads(int64_t wanted) {
  if (wanted && !dynaxx::before) {
    dynaxx::before = omp_get_max_threads ? omp_get_max_threads() : 1;
    if (omp_set_num_threads) omp_set_num_threads(1);
    dynaxx::current_launch() = dynaxx::run_on_own_threads;
  } else if (!wanted && dynaxx::before) {
    if (omp_set_num_threads) omp_set_num_threads(int(dynaxx::before));
    dynaxx::before = 0;
    dynaxx::current_launch() = nullptr;
  }
  return 0;
}
