// SPDX-License-Identifier: Apache-2.0
// The visible pairs of each rule, per row of blocks, in closed form.
#include "rules.h"

#include <algorithm>
#include <map>

#include "table.h"

namespace dynaxx {

int64_t Grid::last(int64_t row) const { return std::min(first(row) + q_block, seqlen_k) - 1; }

int64_t Grid::limit(int64_t row) const {
  if (!causal) return kv_blocks();
  return std::clamp<int64_t>(floor_div(last(row), kv_block) + 1, 0, kv_blocks());
}

void Track::add(int64_t start, int64_t end, int32_t kind) {
  if (kind == NOTHING || start >= end) return;
  const bool joins = int64_t(runs.size()) > ends.back() && runs.back().end == start && runs.back().kind == kind;
  if (joins)
    runs.back().end = int32_t(end);
  else
    runs.push_back({int32_t(start), int32_t(end), kind});
}

namespace {

// Set bits first .. end - 1 in a row of words.
template <typename Word>
void set_bits(Word* words, int64_t first, int64_t end) {
  constexpr int64_t width = 8 * sizeof(Word);
  while (first < end) {
    const int64_t at = first % width, count = std::min(end - first, width - at);
    words[first / width] |= Word(~Word(0) >> (width - count)) << at;
    first += count;
  }
}

// ---- rules over distances ----

// The distances that a block shows: bit i is the distance between its last query and first key, minus i. Row r of the
// block's mask begins at bit q_block - 1 - r.
using Line = std::array<uint64_t, 5>;

// Classify a rule over `count` distances starting at `from`: WHOLE or NOTHING if that is certain, else CUT.
Kind plain_kind(const Rule& rule, int64_t from, int64_t count) {
  if (rule.op == BAND) {
    const int64_t lo = rule.numbers[0], hi = rule.numbers[1];
    if (from > hi || from + count - 1 < lo) return NOTHING;
    return from >= lo && from + count - 1 <= hi ? WHOLE : CUT;
  }
  if (rule.op == MULTIPLES) {
    const int64_t apart = rule.numbers[0];
    return apart == 1 ? WHOLE : floor_div(from + count - 1, apart) * apart < from ? NOTHING : CUT;
  }
  const Kind decides = rule.op == ANY ? WHOLE : NOTHING, neutral = rule.op == ANY ? NOTHING : WHOLE;
  Kind found = neutral;
  for (const Rule& part : rule.parts) {
    const Kind kind = plain_kind(part, from, count);
    if (kind == decides) return decides;
    if (kind != neutral) found = CUT;
  }
  return found;
}

Line line_of(const Rule& rule, int64_t from, int64_t count) {
  Line line{};
  if (rule.op == BAND) {
    const int64_t lo = std::max(rule.numbers[0], from), hi = std::min(rule.numbers[1], from + count - 1);
    if (lo <= hi) set_bits(line.data(), from + count - 1 - hi, from + count - lo);
  } else if (rule.op == MULTIPLES) {
    const int64_t apart = rule.numbers[0], far = from + count - 1;
    for (int64_t at = far - floor_div(far, apart) * apart; at < count; at += apart) line[at / 64] |= 1ull << at % 64;
  } else {
    line = line_of(rule.parts[0], from, count);
    for (size_t i = 1; i < rule.parts.size(); i++) {
      const Line other = line_of(rule.parts[i], from, count);
      for (size_t w = 0; w < line.size(); w++) line[w] = rule.op == ANY ? line[w] | other[w] : line[w] & other[w];
    }
  }
  return line;
}

std::vector<uint32_t> rows_of(const Line& line, const Grid& grid) {
  const uint32_t in_block = grid.kv_block < 32 ? 0xFFFF : ~0u;
  std::vector<uint32_t> mask;
  for (int64_t r = 0; r < grid.q_block; r++)
    for (int64_t w = 0; w < grid.words(); w++) {
      const int64_t at = grid.q_block - 1 - r + 32 * w, bit = at % 64;
      const uint64_t above = bit > 32 ? line[at / 64 + 1] << (64 - bit) : 0;
      mask.push_back(uint32_t(line[at / 64] >> bit | above) & in_block);
    }
  return mask;
}

// Build the track of a rule over distances. All rows see the same distances, so there is one list of runs for each
// offset of a row within a kv block.
Track by_distance(const Rule& rule, const Grid& grid) {
  const int64_t step = std::min(grid.q_block, grid.kv_block), up = grid.q_block / step, down = grid.kv_block / step;
  const int64_t rows = grid.q_blocks(), count = grid.q_block + grid.kv_block - 1;
  const int64_t most = (rows - 1) * up;
  int64_t least = -(grid.kv_blocks() - 1) * down;
  if (grid.causal) least = std::max(least, -floor_div(grid.offset(), step) - up - 1);  // smaller ones are not visible
  Line whole{};
  set_bits(whole.data(), 0, count);
  Track track;
  std::map<Line, int32_t> known;
  std::vector<Line> lines;
  for (int64_t phase = 0; phase < down; phase++) {
    for (int64_t at = floor_div(most - phase, down); phase + at * down >= least; at--) {
      const int64_t from = (phase + at * down) * step + grid.offset() - (grid.kv_block - 1);
      int32_t kind = plain_kind(rule, from, count);
      if (kind == CUT) {
        const Line line = line_of(rule, from, count);
        const auto [found, is_new] = known.try_emplace(line, CUT + int32_t(lines.size()));
        kind = line == Line{} ? NOTHING : line == whole ? WHOLE : found->second;
        if (is_new) lines.push_back(line);
      }
      track.add(-at, -at + 1, kind);
    }
    track.close();
  }
  for (int64_t row = 0; row < rows; row++) {
    track.list.push_back(int32_t(row % down));
    track.shift.push_back(int32_t(down > 1 ? row / down : row * up));
  }
  track.kinds = CUT + int32_t(lines.size());
  track.mask = [lines, grid, made = int32_t(NOTHING), mask = std::vector<uint32_t>()](int32_t kind,
                                                                                      uint32_t* out) mutable {
    if (kind != made) mask = rows_of(lines[kind - CUT], grid);  // else reuse the mask of the previous block
    made = kind;
    std::copy(mask.begin(), mask.end(), out);
  };
  return track;
}

// ---- rules over positions ----

struct Held {
  std::vector<Run> runs;                         // blocks that contain positions of the rule
  std::vector<std::array<uint64_t, 2>> tokens;   // for each kind from CUT on: bits of the tokens in the rule
};

// List which of `blocks` blocks of `size` tokens contain positions of a KEYS or QUERIES rule. The first block begins at
// position `offset`.
Held held_by(const Rule& rule, int64_t size, int64_t blocks, int64_t offset) {
  Held held;
  Track track;
  int64_t block = -1;  // the block whose tokens are being collected
  std::array<uint64_t, 2> tokens{}, whole{};
  set_bits(whole.data(), 0, size);
  const auto finish = [&] {
    if (block >= 0 && tokens != whole) held.tokens.push_back(tokens);
    if (block >= 0) track.add(block, block + 1, tokens == whole ? WHOLE : CUT + int32_t(held.tokens.size()) - 1);
    tokens = {};
  };
  for (int64_t i = 0; i < rule.numbers[0]; i++) {
    int64_t at = std::max<int64_t>(rule.numbers[1 + 2 * i] - offset, 0);
    const int64_t end = std::min(rule.numbers[2 + 2 * i] - offset, blocks * size);
    for (; at < end; at = (at / size + 1) * size) {
      if (at / size != block) finish();
      block = at / size;
      set_bits(tokens.data(), at % size, std::min(end - block * size, size));
    }
  }
  finish();
  held.runs = std::move(track.runs);
  return held;
}

Track by_key(const Rule& rule, const Grid& grid) {
  const Held held = held_by(rule, grid.kv_block, grid.kv_blocks(), 0);
  Track track;
  track.runs = held.runs;
  track.close();
  track.kinds = CUT + int32_t(held.tokens.size());
  track.mask = [held, grid](int32_t kind, uint32_t* out) {
    const auto& tokens = held.tokens[kind - CUT];
    for (int64_t r = 0; r < grid.q_block; r++)
      for (int64_t w = 0; w < grid.words(); w++) *out++ = uint32_t(tokens[w / 2] >> 32 * (w % 2));
  };
  return track;
}

Track by_query(const Rule& rule, const Grid& grid) {
  const Held held = held_by(rule, grid.q_block, grid.q_blocks(), grid.offset());
  Track track;
  track.list.assign(grid.q_blocks(), 0);
  track.close();  // list 0 is empty
  for (const Run& run : held.runs) {
    for (int64_t row = run.start; row < run.end; row++) track.list[row] = int32_t(track.ends.size()) - 1;
    track.add(0, grid.kv_blocks(), run.kind);
    track.close();
  }
  track.kinds = CUT + int32_t(held.tokens.size());
  track.mask = [held, grid](int32_t kind, uint32_t* out) {
    const auto& tokens = held.tokens[kind - CUT];
    const uint32_t in_block = grid.kv_block < 32 ? 0xFFFF : ~0u;
    for (int64_t r = 0; r < grid.q_block; r++)
      for (int64_t w = 0; w < grid.words(); w++) *out++ = tokens[r / 64] >> r % 64 & 1 ? in_block : 0;
  };
  return track;
}

// ---- documents ----

struct Documents {
  const int64_t* ends;  // cumulative lengths from 0
  int64_t count;        // number of documents

  // Return the document of a position, searching upwards from document `from`. Positions before the first document
  // belong to it, and positions past the end belong to the last document.
  int64_t of(int64_t position, int64_t from) const {
    while (from + 1 < count && ends[from + 1] <= position) from++;
    return from;
  }
  int64_t begin(int64_t document) const { return document ? ends[document] : INT64_MIN / 2; }
  int64_t end(int64_t document) const { return document + 1 < count ? ends[document + 1] : INT64_MAX / 2; }
};

// Queries top .. bottom - 1 and keys left .. right - 1 of a block.
struct Rectangle {
  int64_t top, bottom, left, right;
};

struct CutBlock {
  int64_t row, col, first, last;  // first, last: documents of the block's first and last query
};

// Call `use` with the rectangle that each document shows of a block.
template <typename Use>
void rectangles_of(const Documents& documents, const Grid& grid, const CutBlock& block, const Use& use) {
  const int64_t first = grid.first(block.row), first_key = block.col * grid.kv_block;
  const auto within = [](int64_t at, int64_t size) { return std::clamp<int64_t>(at, 0, size); };
  for (int64_t document = block.first; document <= block.last; document++) {
    const int64_t begin = documents.begin(document), end = documents.end(document);
    const Rectangle found{within(begin - first, grid.q_block), within(end - first, grid.q_block),
                          within(begin - first_key, grid.kv_block), within(end - first_key, grid.kv_block)};
    if (found.top < found.bottom && found.left < found.right) use(found);
  }
}

// Encode the rectangles of a block as one number; 0 if there are more than two.
uint64_t number_of(const Documents& documents, const Grid& grid, const CutBlock& block) {
  uint64_t number = 0;
  int64_t count = 0;
  rectangles_of(documents, grid, block, [&](const Rectangle& found) {
    number = number << 32 | uint64_t(found.top << 24 | found.bottom << 16 | found.left << 8 | found.right);
    count++;
  });
  return count > 2 ? 0 : number;
}

Track by_document(const Rule& rule, const Grid& grid) {
  const Documents documents{rule.numbers + 1, rule.numbers[0] - 1};
  std::vector<CutBlock> cut;  // for each kind from CUT on: a block of that kind
  Table known;
  Track track;
  track.list.reserve(grid.q_blocks());
  track.ends.reserve(grid.q_blocks() + 1);
  track.runs.reserve(2 * grid.q_blocks());
  int64_t from = 0, until = 0, to = 0;  // documents of a row's first query, last existing query, and last position
  for (int64_t row = 0; row < grid.q_blocks(); row++) {
    from = documents.of(grid.first(row), from);
    until = documents.of(grid.last(row), from);
    to = documents.of(grid.first(row) + grid.q_block - 1, until);
    const auto add_cut = [&](int64_t start, int64_t end) {
      const bool listed = int64_t(track.runs.size()) > track.ends.back() && track.runs.back().end > start;
      if (listed || start >= end) return;  // the block also contains the end of the previous document
      int32_t kind = CUT + int32_t(cut.size());
      if (const uint64_t number = number_of(documents, grid, {row, start, from, to}))
        kind = *known.insert(number, kind).first;
      track.add(start, end, kind);
      if (kind == CUT + int32_t(cut.size())) cut.push_back({row, start, from, to});
    };
    for (int64_t document = from; document <= until; document++) {
      const int64_t begin = std::max<int64_t>(documents.begin(document), 0), end = documents.end(document);
      if (begin >= std::min(end, grid.seqlen_k)) continue;
      const int64_t start = begin / grid.kv_block, stop = (std::min(end, grid.seqlen_k) - 1) / grid.kv_block + 1;
      const int64_t inner = (begin + grid.kv_block - 1) / grid.kv_block;
      const int64_t inner_end = std::max(inner, std::min(end / grid.kv_block, grid.kv_blocks()));
      add_cut(start, std::min(inner, stop));
      if (from == to)
        track.add(inner, inner_end, WHOLE);
      else
        add_cut(inner, inner_end);
      if (inner_end >= inner) add_cut(std::max(inner_end, start), stop);
    }
    track.list.push_back(int32_t(row));
    track.close();
  }
  track.kinds = CUT + int32_t(cut.size());
  track.mask = [documents, cut, grid](int32_t kind, uint32_t* out) {
    const int64_t words = grid.words();
    int64_t done = 0;  // rows
    rectangles_of(documents, grid, cut[kind - CUT], [&](const Rectangle& found) {  // in descending order of rows
      uint32_t *row = out + found.top * words, *end = out + found.bottom * words;
      std::fill(out + done * words, row + words, 0);
      set_bits(row, found.left, found.right);
      for (int64_t n = words; row + n < end; n *= 2) std::copy_n(row, std::min(n, end - row - n), row + n);
      done = found.bottom;
    });
    std::fill(out + done * words, out + grid.q_block * words, 0);
  };
  return track;
}

// ---- rules over whole blocks ----

Track local_blocks(const Rule& rule, const Grid& grid) {
  Track track;
  for (int64_t row = 0; row < grid.q_blocks(); row++) {
    const int64_t last = floor_div(grid.first(row) + grid.q_block - 1, grid.kv_block);
    track.add(std::max<int64_t>(last - rule.numbers[0] + 1, 0), std::min(last + 1, grid.kv_blocks()), WHOLE);
    track.close();
    track.list.push_back(int32_t(row));
  }
  return track;
}

// The hash `_hash` of patterns/whole_blocks.py: three rounds of multiply and xor-shift in 64 bits with wrap-around.
uint32_t hashed(int64_t start, int64_t row, int64_t slot) {
  uint64_t x = uint64_t(row) * 0x9E3779B1u + uint64_t(slot) * 0x85EBCA77u + uint64_t(start);
  for (int round = 0; round < 3; round++) x = (x ^ uint64_t(int64_t(x) >> 29)) * 0x1B873593CC9E2D51u;
  return uint32_t(x >> 32) & 0x7FFFFFFF;
}

Track random_blocks(const Rule& rule, const Grid& grid) {
  const int64_t blocks = std::min(rule.numbers[0], grid.kv_blocks());  // there are no more blocks to draw
  Track track;
  for (int64_t row = 0; row < grid.q_blocks(); row++) {
    const int64_t available = grid.limit(row);
    for (int64_t slot = 0, low = 0, high; slot < blocks; slot++, low = high) {
      high = (slot + 1) * available / blocks;
      if (low == high) continue;
      const int64_t col = low + int64_t(hashed(rule.numbers[1], row, slot) % uint32_t(high - low));
      track.add(col, col + 1, WHOLE);
    }
    track.close();
    track.list.push_back(int32_t(row));
  }
  return track;
}

}  // namespace

bool only_distances(const Rule& rule) {
  if (rule.op == ANY || rule.op == ALL) return std::all_of(rule.parts.begin(), rule.parts.end(), only_distances);
  return rule.op == BAND || rule.op == MULTIPLES;
}

Track track_of(const Rule& rule, const Grid& grid) {
  switch (rule.op) {
    case KEYS: return by_key(rule, grid);
    case QUERIES: return by_query(rule, grid);
    case DOCUMENTS: return by_document(rule, grid);
    case LOCAL_BLOCKS: return local_blocks(rule, grid);
    case RANDOM_BLOCKS: return random_blocks(rule, grid);
    default: return by_distance(rule, grid);
  }
}

}  // namespace dynaxx
