// SPDX-License-Identifier: Apache-2.0
// Memory of one thread, kept between launches: a fresh megabyte costs more page faults than a small problem costs time.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <new>

namespace dynaxx {

class Scratch {
 public:
  ~Scratch() { std::free(data_); }

  // At least `floats` floats, on a cache line; what was there is gone.
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
