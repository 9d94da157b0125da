// SPDX-License-Identifier: Apache-2.0
// Working memory per thread, kept between launches: page faults of fresh memory would cost more than a small problem.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <new>

namespace dynaxx {

class Scratch {
 public:
  ~Scratch() { std::free(data_); }

  // Return at least `floats` floats, aligned to a cache line. Previous contents are lost.
  float* reserve(int64_t floats) {
    if (floats > size_) {
      std::free(data_);
      size_ = (floats + 15) / 16 * 16;
      data_ = static_cast<float*>(std::aligned_alloc(64, size_ * sizeof(float)));
      if (!data_) {
        size_ = 0;
        throw std::bad_alloc();
      }
    }
    return data_;
  }

 private:
  float* data_ = nullptr;
  int64_t size_ = 0;
};

inline Scratch& thread_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}

}  // namespace dynaxx
