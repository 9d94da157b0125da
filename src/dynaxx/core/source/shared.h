// SPDX-License-Identifier: Apache-2.0
// Numbers that another thread may be writing while the core reads them.
#pragma once
#include <cstdint>

namespace dynaxx {

// One read of such a number: either the old value or the new one. Whoever decides by it must not read it again.
inline int32_t read_once(const int32_t* from) { return __atomic_load_n(from, __ATOMIC_RELAXED); }

}  // namespace dynaxx
