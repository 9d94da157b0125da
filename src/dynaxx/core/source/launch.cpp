// SPDX-License-Identifier: Apache-2.0
#include "launch.h"

#include <unistd.h>

#include "vec.h"

namespace dynaxx {
namespace {

pid_t home_process = 0;
thread_local Launch launch = nullptr;

}  // namespace

Launch& current_launch() { return launch; }

bool is_forked() { return getpid() != home_process; }

void remember_process() {
  if (!home_process) home_process = getpid();
}

}  // namespace dynaxx

// The loader calls this function first. Nothing runs by itself when the library is loaded, because a library may be opened on a
// processor that lacks its instructions.
extern "C" DYNAXX_EXPORT int dynaxx_cpu_start() {
  dynaxx::remember_process();
  return 0;
}
