// SPDX-License-Identifier: Apache-2.0
// How the tasks of a call reach other threads.
#pragma once
#include <cstdint>

namespace dynaxx {

// Run `run(data)` on the calling thread and, at the same time, on up to `threads` - 1 others. `run` is a loop that takes
// tasks from a shared counter and throws nothing.
using Launch = void (*)(void (*run)(void*), void* data, int64_t threads);

// The calling thread's launch; null for torch's OpenMP runtime.
Launch& current_launch();

// Whether this process is not the one that loaded the library. A forked child has none of the threads and would wait for
// them forever, so there, tasks run on the calling thread.
bool is_forked();

// Remember the process that loaded the library. Callers do so before any other call.
void remember_process();

}  // namespace dynaxx
