// SPDX-License-Identifier: Apache-2.0
// Status codes of exported functions. No exception may leave the core: crossing `extern "C"` would end the process.
#pragma once
#include <cstdint>
#include <exception>
#include <new>
#include <stdexcept>

namespace dynaxx {

enum Status : int {  // equal to those in core/structures.py
  OK = 0,
  NO_MEMORY = 1,
  BAD_INPUT = 2,  // arguments contradict one another or exceed the limits of the core
  FAILED = 3      // anything else
};

// Thrown if arguments are wrong.
struct BadInput : std::exception {};

inline void require(bool holds) {
  if (!holds) throw BadInput();
}

// Run a function that may throw, and return its status.
template <class Run>
int status_of(const Run& run) noexcept {
  try {
    run();
    return OK;
  } catch (const BadInput&) {
    return BAD_INPUT;
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  } catch (const std::length_error&) {
    return NO_MEMORY;  // a container was asked to exceed its maximum size
  } catch (...) {
    return FAILED;
  }
}

// ---- limits for arguments ----

constexpr int64_t MAX_TOKENS = int64_t(1) << 40, MAX_HEADS = 1 << 20, MAX_DIM = 1 << 20, MAX_THREADS = 1 << 12,
                  MAX_BATCH = 1 << 24, MAX_PAGE = 1 << 20;
constexpr int64_t MAX_ELEMENTS = int64_t(1) << 60;

inline bool within(int64_t value, int64_t least, int64_t most) { return value >= least && value <= most; }

// Return whether the number of elements of a tensor with these sizes, all >= 0, fits into int64.
template <class... Sizes>
bool countable(Sizes... sizes) {
  int64_t count = 1;
  for (const int64_t size : {int64_t(sizes)...}) {
    if (size < 0 || __builtin_mul_overflow(count, size > 0 ? size : 1, &count) || count > MAX_ELEMENTS) return false;
  }
  return true;
}

constexpr int64_t MAX_BLOCK = 128;

inline bool is_block_size(int64_t size) { return size == 16 || size == 32 || size == 64 || size == MAX_BLOCK; }

}  // namespace dynaxx
