// SPDX-License-Identifier: Apache-2.0
// The runtime's one entry point, on std::thread: GCC's OpenMP runtime synchronizes through futexes that ThreadSanitizer
// does not see. Compiled into the core with -include; the core itself stays as it is.
#pragma once
#include <thread>
#include <vector>

extern "C" __attribute__((visibility("hidden"))) inline void GOMP_parallel(void (*run)(void*), void* data,
                                                                           unsigned threads, unsigned) {
  std::vector<std::thread> team;
  for (unsigned i = 1; i < threads; i++) team.emplace_back(run, data);
  run(data);
  for (std::thread& thread : team) thread.join();
}
