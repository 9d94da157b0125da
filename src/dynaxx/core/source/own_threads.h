// SPDX-License-Identifier: Apache-2.0
// Threads of the core's own, for callers that already run on another runtime's threads.
//
// After each parallel region the workers of OpenMP's runtime spin for milliseconds, in case another region follows. Inside
// an engine that goes on with threads of its own, such as OpenVINO, they take the cores away from it. The core's own threads
// spin for microseconds and then sleep.
#pragma once
#include <cstdint>

namespace dynaxx {

// Whether the calling thread asked for the core's own threads.
bool wants_own_threads();

// Run `run(data)` on the calling thread and, at the same time, on up to `threads` - 1 of the core's own. It must be a loop
// that takes tasks from a shared counter and throws nothing. While another call has the threads, it runs here alone.
void run_on_own_threads(void (*run)(void*), void* data, int64_t threads);

}  // namespace dynaxx
