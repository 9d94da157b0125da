// SPDX-License-Identifier: Apache-2.0
// Functions that the loader calls to verify a library.
#include "tasks.h"
#include "vec.h"

extern "C" DYNAXX_EXPORT const char* dynaxx_cpu_source_hash() { return DYNAXX_SOURCE_HASH; }

extern "C" DYNAXX_EXPORT int dynaxx_cpu_has_threads() { return GOMP_parallel != nullptr; }
