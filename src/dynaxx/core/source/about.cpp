// SPDX-License-Identifier: Apache-2.0
// The hash of the sources that this library was built from. The loader refuses a library whose hash differs from its own.
#include "vec.h"

extern "C" DYNAXX_EXPORT const char* dynaxx_cpu_source_hash() { return DYNAXX_SOURCE_HASH; }

