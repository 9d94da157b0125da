// Element types of the user's tensors. Everything is computed in fp32; bf16 and fp16 are widened as rows are gathered.
#pragma once
#include <cstdint>
#include <cstring>

#include "args.h"
#include "vec.h"

namespace dynaxx {

enum class Element : int64_t { FP32 = 0, BF16 = 1, FP16 = 2 };

DYNAXX_INLINE float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

DYNAXX_INLINE float widen_bf16(uint16_t x) { return from_bits(uint32_t(x) << 16); }

// The exponent moves from bias 15 to 127 by a multiplication, which makes subnormals right too; inf and NaN apart.
DYNAXX_INLINE float widen_fp16(uint16_t x) {
  const uint32_t magnitude = uint32_t(x & 0x7fff) << 13, sign = uint32_t(x & 0x8000) << 16;
  const float finite = from_bits(magnitude) * 0x1p112f;
  uint32_t bits;
  std::memcpy(&bits, &finite, sizeof bits);
  return from_bits(((x & 0x7c00) == 0x7c00 ? magnitude | 0x7f800000 : bits) | sign);
}

// One batch entry and head of a tensor: rows of tokens.
struct Tokens {
  const void* data;
  Element element;
  int64_t start, stride;  // in elements: of token 0, and between tokens

  Tokens(const void* tensor, int64_t element, const Strides& strides, int64_t batch, int64_t head)
      : data(tensor),
        element(Element(element)),
        start(batch * strides.batch + head * strides.head),
        stride(strides.token) {}

  // In place; fp32 only.
  const float* row(int64_t token) const { return (const float*)data + start + token * stride; }

  void read(int64_t token, int64_t width, float* __restrict to) const {
    const int64_t at = start + token * stride;
    const uint16_t* __restrict half = (const uint16_t*)data + at;
    if (element == Element::FP32)
      std::memcpy(to, (const float*)data + at, sizeof(float) * width);
    else if (element == Element::BF16)
      for (int64_t d = 0; d < width; d++) to[d] = widen_bf16(half[d]);
    else
      for (int64_t d = 0; d < width; d++) to[d] = widen_fp16(half[d]);
  }
};

}  // namespace dynaxx
