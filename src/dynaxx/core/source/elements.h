// SPDX-License-Identifier: Apache-2.0
// Element types of the user's tensors. All computation is in fp32: bf16 and fp16 are widened when rows are gathered, and
// results are rounded when they are stored.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

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

// A multiplication changes the exponent bias from 15 to 127, which also handles subnormals; inf and NaN are separate.
DYNAXX_INLINE float widen_fp16(uint16_t x) {
  const uint32_t magnitude = uint32_t(x & 0x7fff) << 13, sign = uint32_t(x & 0x8000) << 16;
  const float finite = from_bits(magnitude) * 0x1p112f;
  uint32_t bits;
  std::memcpy(&bits, &finite, sizeof bits);
  return from_bits(((x & 0x7c00) == 0x7c00 ? magnitude | 0x7f800000 : bits) | sign);
}

DYNAXX_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// Round to nearest, ties to even, as torch does.
DYNAXX_INLINE uint16_t narrow_bf16(float x) {
  const uint32_t bits = bits_of(x), rounded = bits + 0x7fff + (bits >> 16 & 1);
  return uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 | bits >> 16 : rounded >> 16);
}

// Round like narrow_bf16. For magnitudes below 2 ** -14, adding 1/2 rounds to a multiple of the smallest subnormal and
// leaves it in the low bits.
DYNAXX_INLINE uint16_t narrow_fp16(float x) {
  const uint32_t sign = bits_of(x) >> 16 & 0x8000, magnitude = bits_of(x) & 0x7fffffff;
  const uint32_t subnormal = bits_of(from_bits(magnitude) + 0.5f) - 0x3f000000;
  const uint32_t normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  const uint32_t large = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
  return uint16_t(sign | (magnitude >= 0x47800000 ? large : magnitude < 0x38800000 ? subnormal : normal));
}

// Widen rows of fp16: eight elements per instruction if the processor supports it, the rest one by one.
DYNAXX_INLINE void widen_fp16(const uint16_t* __restrict from, int64_t width, float* __restrict to) {
  int64_t d = 0;
#if defined(__F16C__)
  for (; d + 8 <= width; d += 8) _mm256_storeu_ps(to + d, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + d))));
#endif
  for (; d < width; d++) to[d] = widen_fp16(from[d]);
}

DYNAXX_INLINE void narrow_fp16(const float* __restrict from, int64_t width, uint16_t* __restrict to) {
  int64_t d = 0;
#if defined(__F16C__)
  for (; d + 8 <= width; d += 8)
    _mm_storeu_si128((__m128i*)(to + d), _mm256_cvtps_ph(_mm256_loadu_ps(from + d), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; d < width; d++) to[d] = narrow_fp16(from[d]);
}

// The tokens of one batch entry and head of an input tensor.
struct Tokens {
  const void* data;
  Element element;
  int64_t start, stride;  // in elements: offset of token 0, and distance between tokens

  Tokens(const void* tensor, int64_t element, const Strides& strides, int64_t batch, int64_t head)
      : data(tensor),
        element(Element(element)),
        start(batch * strides.batch + head * strides.head),
        stride(strides.token) {}

  // Pointer to a token; fp32 only.
  const float* row(int64_t token) const { return (const float*)data + start + token * stride; }

  // Pointer to a token; bf16 and fp16 only.
  const uint16_t* half_row(int64_t token) const { return (const uint16_t*)data + start + token * stride; }

  // Prefetch a token into the second-level cache.
  void prefetch(int64_t token, int64_t width) const {
    const int64_t size = element == Element::FP32 ? 4 : 2;
    const char* from = (const char*)data + (start + token * stride) * size;
    for (int64_t at = 0; at < width * size; at += 64) __builtin_prefetch(from + at, 0, 2);
  }

  void read(int64_t token, int64_t width, float* __restrict to) const {
    const int64_t at = start + token * stride;
    const uint16_t* __restrict half = (const uint16_t*)data + at;
    if (element == Element::FP32)
      std::memcpy(to, (const float*)data + at, sizeof(float) * width);
    else if (element == Element::BF16)
      for (int64_t d = 0; d < width; d++) to[d] = widen_bf16(half[d]);
    else
      widen_fp16(half, width, to);
  }
};

// Read fp32 sums that are stored as two 16-bit halves. The high half lies in the memory of a bf16 or fp16 result. Sums
// round like fp32 and need only half the extra memory.
DYNAXX_INLINE void read_halves(const uint16_t* __restrict high, const uint16_t* __restrict low, int64_t width,
                               float* __restrict to) {
  for (int64_t d = 0; d < width; d++) to[d] = from_bits(uint32_t(high[d]) << 16 | low[d]);
}

DYNAXX_INLINE void write_halves(const float* __restrict from, int64_t width, uint16_t* __restrict high,
                                uint16_t* __restrict low) {
  for (int64_t d = 0; d < width; d++) high[d] = uint16_t(bits_of(from[d]) >> 16), low[d] = uint16_t(bits_of(from[d]));
}

// The tokens of one batch entry and head of an output tensor.
struct Results {
  void* data;
  Element element;
  int64_t start, stride;

  Results(void* tensor, int64_t element, const Strides& strides, int64_t batch, int64_t head)
      : data(tensor),
        element(Element(element)),
        start(batch * strides.batch + head * strides.head),
        stride(strides.token) {}

  // Pointer to a token; fp32 only.
  float* row(int64_t token) const { return (float*)data + start + token * stride; }

  // Pointer to a token; bf16 and fp16 only.
  uint16_t* half_row(int64_t token) const { return (uint16_t*)data + start + token * stride; }

  void write(int64_t token, int64_t width, const float* __restrict from) const {
    if (element == Element::FP32) {
      std::memcpy(row(token), from, sizeof(float) * width);
      return;
    }
    uint16_t* __restrict to = half_row(token);
    if (element == Element::BF16)
      for (int64_t d = 0; d < width; d++) to[d] = narrow_bf16(from[d]);
    else
      narrow_fp16(from, width, to);
  }
};

}  // namespace dynaxx
