// SPDX-License-Identifier: Apache-2.0
// Rules over positions, as the core reads them from a program, and the runs of blocks that each of them shows.
//
// Query i has key position i + offset. A distance is the position of a query minus that of a key.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <vector>

namespace dynaxx {

enum Op : int64_t {  // the ops in `Pattern.program`, with the numbers that follow each
  BAND,              // lo, hi: pairs with lo <= distance <= hi
  MULTIPLES,         // n: distances that are multiples of n
  KEYS,              // n, then n times (first, end): keys in these ranges, ascending and disjoint
  QUERIES,           // n, then n times (first, end): queries in these ranges
  DOCUMENTS,         // n, then n cumulative lengths from 0
  LOCAL_BLOCKS,      // n: the last n kv blocks, up to the one in which the q block ends
  RANDOM_BLOCKS,     // n, start value of the hash
  ANY,               // n: pairs that at least one of the previous n rules shows
  ALL                // n: pairs that all of the previous n rules show
};

struct Rule {
  Op op;
  const int64_t* numbers;
  int64_t count;
  std::vector<Rule> parts;  // of ANY and ALL
};

struct Grid {
  int64_t seqlen_q, seqlen_k, q_block, kv_block, causal;

  int64_t offset() const { return seqlen_k - seqlen_q; }
  int64_t q_blocks() const { return (seqlen_q + q_block - 1) / q_block; }
  int64_t kv_blocks() const { return (seqlen_k + kv_block - 1) / kv_block; }
  int64_t words() const { return (kv_block + 31) / 32; }
  int64_t first(int64_t row) const { return row * q_block + offset(); }  // position of a row's first query
  int64_t last(int64_t row) const;   // position of a row's last query
  int64_t limit(int64_t row) const;  // number of kv blocks that a row may see
};

inline int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }

// The part of a block that a rule shows: nothing, all pairs, or, from CUT on, the pairs of the mask with this number.
enum Kind : int32_t { NOTHING = 0, WHOLE = 1, CUT = 2 };

struct Run {
  int32_t start, end, kind;  // kv blocks start .. end - 1
};

// One rule for all rows: ascending lists of runs, the list of each row, and the number of blocks to shift it right.
struct Track {
  std::vector<Run> runs;
  std::vector<int64_t> ends{0};         // list i is runs ends[i] .. ends[i + 1] - 1
  std::vector<int32_t> list, shift;     // of each row; empty if all rows have list 0, or shift 0
  int32_t kinds = CUT;                  // number of kinds
  std::function<void(int32_t, uint32_t*)> mask;  // writes the mask of a kind from CUT on, (q_block, words)

  void add(int64_t start, int64_t end, int32_t kind);  // to the last list; ignores empty runs
  void close() { ends.push_back(int64_t(runs.size())); }
};

// Build the track of a rule other than ANY and ALL, or of any rule over distances alone.
Track track_of(const Rule& rule, const Grid& grid);
bool only_distances(const Rule& rule);

}  // namespace dynaxx
