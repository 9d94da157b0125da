// SPDX-License-Identifier: Apache-2.0
// Return the hash of the sources that this library was built from. The loader refuses a library with another hash than
// its own.
#include "vec.h"

extern "C" DYNAXX_EXPORT const char* dynaxx_cpu_source_hash() { return DYNAXX_SOURCE_HASH; }

