// SPDX-License-Identifier: Apache-2.0
// Rules over positions as the core reads them, and what each shows of a row of blocks.
//
// Query i stands at key position i + offset. A distance is a query's position minus a key's.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <vector>

namespace dynaxx {

enum Op : int64_t {  // what `program` of a pattern in Python lists, each with its numbers
  BAND,              // lo, hi: lo <= distance <= hi
  MULTIPLES,         // n: distances that are multiples of n
  KEYS,              // n, then n times first, end: keys at these positions, ascending, apart
  QUERIES,           // the same: queries that stand there
  DOCUMENTS,         // n, then n cumulative lengths from 0
  LOCAL_BLOCKS,      // n: the last n kv blocks up to the one in which the q block ends
  RANDOM_BLOCKS,     // n, start of the hash
  ANY,               // n: of the n rules before, either shows a pair
  ALL                // n: all of them do
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
  int64_t last(int64_t row) const;                                       // and of its last
  int64_t limit(int64_t row) const;  // kv blocks that a row may see: those before this one
};

inline int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }

// What a rule shows of a block. From CUT on: some pairs, those of a mask of this number.
enum Kind : int32_t { NOTHING = 0, WHOLE = 1, CUT = 2 };

struct Run {
  int32_t start, end, kind;  // kv blocks start .. end - 1
};

// One rule on all rows: lists of runs that ascend, which of them a row has, and how many blocks it stands to the right.
struct Track {
  std::vector<Run> runs;
  std::vector<int64_t> ends{0};         // list i is runs ends[i] .. ends[i + 1] - 1
  std::vector<int32_t> list, shift;     // of each row; empty where all have list 0, and where all stand at 0
  int32_t kinds = CUT;                  // how many
  std::function<void(int32_t, uint32_t*)> mask;  // of a kind from CUT on: (q_block, words), all written

  void add(int64_t start, int64_t end, int32_t kind);  // to the last list; empty runs are left out
  void close() { ends.push_back(int64_t(runs.size())); }
};

// Of a rule on distances alone, or of KEYS, QUERIES, DOCUMENTS, LOCAL_BLOCKS or RANDOM_BLOCKS.
Track track_of(const Rule& rule, const Grid& grid);
bool only_distances(const Rule& rule);

}  // namespace dynaxx
