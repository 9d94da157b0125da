// SPDX-License-Identifier: Apache-2.0
// The best of a stream of scores, lowest index first where they are equal, in memory of twice as many as are kept.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "elements.h"

namespace dynaxx {

// Integers in the order of floats; both zeros are one number, and NaN is the greatest, as for torch.topk.
DYNAXX_INLINE uint32_t ordered_bits(float score) {
  const uint32_t bits = bits_of(score + 0.f);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0xffffffffu;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

DYNAXX_INLINE float from_ordered(uint32_t bits) { return from_bits(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits); }

// Scores come with rising indices, and stay in that order: what is kept needs no sorting.
class TopList {
 public:
  void reset(int64_t kept) {
    kept_ = kept;
    size_ = 0;
    lowest_ = 0;
    const size_t room = size_t(std::max<int64_t>(2 * kept, 1024));
    if (scores_.size() < room) scores_.resize(room), indices_.resize(room);
  }

  // A score below this one cannot be among the best.
  uint32_t lowest() const { return lowest_; }
  float lowest_score() const { return lowest_ == 0 ? -std::numeric_limits<float>::infinity() : from_ordered(lowest_); }

  void push(uint32_t score, int32_t index) {
    if (score < lowest_) return;
    scores_[size_] = score;
    indices_[size_] = index;
    if (++size_ == int64_t(scores_.size())) prune();
  }

  // The indices that are kept, ascending, then -1.
  void finish(int32_t* to) {
    if (size_ > kept_) prune();
    std::copy(indices_.begin(), indices_.begin() + size_, to);
    std::fill(to + size_, to + kept_, -1);
  }

 private:
  // Keep the best. The last of them is found by histograms of its bits, the highest first.
  void prune() {
    if (kept_ == 0) {
      size_ = 0;
      return;
    }
    uint32_t prefix = 0;
    int64_t wanted = kept_;  // of the scores that begin with `prefix`
    constexpr int SHIFTS[] = {21, 10, 0}, BITS[] = {11, 11, 10};
    for (int level = 0; level < 3; level++) {
      const int shift = SHIFTS[level], bits = BITS[level];
      uint32_t counts[1 << 11] = {};
      for (int64_t i = 0; i < size_; i++)
        if (level == 0 || scores_[i] >> (shift + bits) == prefix) counts[scores_[i] >> shift & ((1u << bits) - 1)]++;
      uint32_t bin = (1u << bits) - 1;
      for (; counts[bin] < wanted; bin--) wanted -= counts[bin];
      prefix = prefix << bits | bin;
    }
    int64_t size = 0;
    for (int64_t i = 0; i < size_; i++) {
      const bool equal = scores_[i] == prefix, keep = scores_[i] > prefix || (equal && wanted > 0);
      wanted -= equal;
      scores_[size] = scores_[i];
      indices_[size] = indices_[i];
      size += keep;
    }
    size_ = size;
    lowest_ = prefix == UINT32_MAX ? prefix : prefix + 1;  // an equal one comes later: it loses
  }

  std::vector<uint32_t> scores_;
  std::vector<int32_t> indices_;
  int64_t kept_ = 0, size_ = 0;
  uint32_t lowest_ = 0;
};

}  // namespace dynaxx
