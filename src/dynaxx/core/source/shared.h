// SPDX-License-Identifier: Apache-2.0
// Access to arrays that another thread may write to while the core reads them.
#pragma once
#include <cstdint>

namespace dynaxx {

// Read a number once: the result is either the old or the new value. Callers must not read it a second time.
inline int32_t read_once(const int32_t* from) { return __atomic_load_n(from, __ATOMIC_RELAXED); }

}  // namespace dynaxx
