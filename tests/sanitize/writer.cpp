// SPDX-License-Identifier: Apache-2.0
// A thread that is not the core's own, as ThreadSanitizer sees it: it writes to numbers that the core is reading.
#include <cstdint>

extern "C" __attribute__((visibility("default"))) void dynaxx_test_write(int32_t* to, const int32_t* values,
                                                                         int64_t count, int64_t rounds) {
  for (int64_t round = 0; round < rounds; round++)
    for (int64_t i = 0; i < count; i++) __atomic_store_n(to + i, values[(round + i) % count], __ATOMIC_RELAXED);
}
