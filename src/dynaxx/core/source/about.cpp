// SPDX-License-Identifier: Apache-2.0
// What the loader reads to verify a library.
#include "vec.h"

extern "C" DYNAXX_EXPORT const char* dynaxx_cpu_source_hash() { return DYNAXX_SOURCE_HASH; }

