// SPDX-License-Identifier: Apache-2.0
// Layouts of static patterns: the runs of all rules are merged row by row, and each element mask is computed once.
//
// A block's mask depends only on the kind that each rule has there. The kinds are encoded as one number, the key. The
// mask id of a key (full, empty, or index of a mask) is computed when the key first occurs.
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>

#include "rules.h"
#include "status.h"
#include "table.h"
#include "vec.h"

using namespace dynaxx;

namespace {

constexpr int32_t FULL = -1, EMPTY = -2;  // as in layout/masks.py
constexpr uint64_t MAX_KINDS = 1ull << 60;
constexpr int64_t MAX_BLOCKS = 1 << 29;      // per side, so that indices of blocks fit into int32
constexpr int64_t FAR = int64_t(1) << 62;     // as in patterns/program.py
constexpr size_t DEEPEST = 64;                // nesting depth of rules, which are processed recursively
constexpr size_t MAX_KEPT = 1 << 18;         // entries of a layout whose memory is reused
constexpr size_t MAX_WORDS_KEPT = 1 << 20;   // words of its masks

using Mask = std::vector<uint32_t>;  // (q_block, words)

struct Layout {
  std::vector<int32_t> indptr, num_partial, indices, mask_ids, bits, bands, order;  // as fields of `BlockLayout`

  std::array<std::vector<int32_t>*, 7> parts() {
    return {&indptr, &num_partial, &indices, &mask_ids, &bits, &bands, &order};
  }
};

// The memory of a layout that was handed over, reused for this thread's next layout.
thread_local std::unique_ptr<Layout> spare;

// Return a hash that is never 0; `size` must be a power of two.
uint64_t hash_of(const uint32_t* words, size_t size) {
  std::array<uint32_t, 64> lanes{};
  const size_t width = std::min(size, lanes.size());
  for (size_t i = 0; i < size; i += width)
    for (size_t j = 0; j < width; j++) {
      lanes[j] = (lanes[j] ^ words[i + j]) * 0x9E3779B1u;
      lanes[j] ^= lanes[j] >> 15;
    }
  uint64_t hash = 0;
  for (size_t j = 0; j < lanes.size(); j++) hash += lanes[j] * (0x9E3779B97F4A7C15u * (2 * j + 1));
  return hash ? hash : 1;
}

void check(const Grid& grid) {
  require(is_block_size(grid.q_block) && is_block_size(grid.kv_block));
  const int64_t longest = MAX_BLOCKS * std::min(grid.q_block, grid.kv_block);
  require(within(grid.seqlen_q, 1, longest) && within(grid.seqlen_k, 1, longest));
}

// Reject invalid numbers of an op; there are `rule.count` of them.
void check(const Rule& rule) {
  const int64_t *numbers = rule.numbers, *end = numbers + rule.count;
  const bool hashed = rule.op == RANDOM_BLOCKS;  // its last number may have any value
  require(std::all_of(numbers, end - hashed, [](int64_t number) { return within(number, -FAR, FAR); }));
  switch (rule.op) {
    case MULTIPLES: case LOCAL_BLOCKS: return require(numbers[0] >= 1);
    case RANDOM_BLOCKS: return require(numbers[0] >= 0);
    case KEYS: case QUERIES: return require(std::is_sorted(numbers + 1, end));
    case DOCUMENTS: return require(rule.count >= 3 && numbers[1] == 0 && std::is_sorted(numbers + 1, end));
    default: return;
  }
}

// Return how many numbers follow an op; `left` numbers are available.
int64_t count_of(int64_t op, const int64_t* numbers, int64_t left) {
  require(left >= 1 && within(op, BAND, ALL));
  const int64_t n = numbers[0];
  switch (op) {
    case BAND: case RANDOM_BLOCKS: return 2;
    case KEYS: case QUERIES: return require(within(n, 0, left)), 1 + 2 * n;
    case DOCUMENTS: return require(within(n, 0, left)), 1 + n;
    default: return 1;
  }
}

// Parse a program in postfix order: ANY and ALL take as operands the rules before them. Returns the last rule.
Rule parsed(const int64_t* program, int64_t size) {
  std::vector<Rule> rules;
  std::vector<size_t> depths;
  for (int64_t at = 0; at < size;) {
    const int64_t left = size - at - 1;
    Rule rule{Op(program[at]), program + at + 1, count_of(program[at], program + at + 1, left), {}};
    require(rule.count <= left);
    check(rule);
    size_t depth = 1;
    if (rule.op == ANY || rule.op == ALL) {
      const int64_t n = rule.numbers[0];
      require(within(n, 1, int64_t(rules.size())));
      depth += *std::max_element(depths.end() - n, depths.end());
      rule.parts.assign(rules.end() - n, rules.end());
      rules.resize(rules.size() - n);
      depths.resize(depths.size() - n);
    }
    require(depth <= DEEPEST);
    at += 1 + rule.count;
    rules.push_back(std::move(rule));
    depths.push_back(depth);
  }
  require(rules.size() == 1);
  return std::move(rules.back());
}

class Builder {
 public:
  Builder(const Grid& grid, const Rule& rule, Layout& layout) : grid_(grid), rule_(rule), layout_(layout) {
    collect(rule_);
    uint64_t count = 1;
    for (const Track& track : tracks_) {
      radix_.push_back(count);
      if (count > MAX_KINDS / uint64_t(track.kinds)) throw std::bad_alloc();
      count *= uint64_t(track.kinds);
    }
    kinds_.resize(tracks_.size());
    whole_.assign(grid.q_block * grid.words(), grid.kv_block < 32 ? 0xFFFF : ~0u);
    if (grid.seqlen_q % grid.q_block) ragged_row_ = grid.q_blocks() - 1;
    if (grid.seqlen_k % grid.kv_block) ragged_col_ = grid.kv_blocks() - 1;
  }

  void build() {
    layout_.indptr.push_back(0);
    for (int64_t row = 0; row < grid_.q_blocks(); row++) {
      full_.clear();
      const size_t before = layout_.indices.size();
      sweep(row);
      layout_.num_partial.push_back(int32_t(layout_.indices.size() - before));
      layout_.indices.insert(layout_.indices.end(), full_.begin(), full_.end());
      layout_.mask_ids.resize(layout_.indices.size(), FULL);
      if (layout_.indices.size() > INT32_MAX) throw std::bad_alloc();
      layout_.indptr.push_back(int32_t(layout_.indices.size()));
    }
    order_rows();
  }

 private:
  // A position in a track during the sweep over a row: at a run, or before it.
  struct Cursor {
    const Run *at, *last;
    int32_t shift;
    uint64_t radix;
    int32_t start, end;  // first column of the run, and last + 1
    uint64_t key;        // the run's contribution to a key

    void read() {
      start = at == last ? INT32_MAX : at->start + shift;
      end = at == last ? INT32_MAX : at->end + shift;
      key = at == last ? 0 : radix * uint64_t(at->kind);
    }
  };

  // Collect the tracks of a rule's parts; a rule over distances alone has one track.
  void collect(const Rule& rule) {
    if (!only_distances(rule) && (rule.op == ANY || rule.op == ALL))
      for (const Rule& part : rule.parts) collect(part);
    else
      tracks_.push_back(track_of(rule, grid_));
  }

  void sweep(int64_t row) {
    const int32_t limit = int32_t(grid_.limit(row));
    cursors_.clear();
    for (size_t i = 0; i < tracks_.size(); i++) {
      const Track& track = tracks_[i];
      const int64_t which = track.list.empty() ? 0 : track.list[row];
      const int32_t shift = track.shift.empty() ? 0 : track.shift[row];
      const Run *begin = track.runs.data() + track.ends[which], *end = track.runs.data() + track.ends[which + 1];
      begin = std::partition_point(begin, end, [&](const Run& run) { return run.end + shift <= 0; });
      if (tracks_.size() == 1) {  // nothing to merge
        for (; begin != end && begin->start + shift < limit; begin++)
          list(row, std::max(begin->start + shift, 0), std::min(begin->end + shift, limit), mask_id_of(begin->kind));
        return;
      }
      cursors_.push_back({begin, end, shift, radix_[i], 0, 0, 0});
      cursors_.back().read();
    }
    for (int32_t col = 0; col < limit;) {
      int32_t until = limit;
      uint64_t key = 0;
      for (Cursor& cursor : cursors_) {
        if (cursor.end <= col) {
          cursor.at++;
          cursor.read();
        }
        const bool within = cursor.start <= col;
        key += within ? cursor.key : 0;
        until = std::min(until, within ? cursor.end : cursor.start);
      }
      if (key) list(row, col, until, mask_id_of(key));
      col = until;
    }
  }

  void list(int64_t row, int32_t start, int32_t end, int32_t mask_id) {
    if (mask_id == EMPTY) return;
    if (mask_id == FULL) {
      full_.resize(full_.size() + end - start);
      std::iota(full_.end() - (end - start), full_.end(), start);
    } else
      for (int32_t col = start; col < end; col++) {
        if (row == ragged_row_ || col == ragged_col_)
          if (!shows_any(mask_id, row, col)) continue;
        layout_.indices.push_back(col);
        layout_.mask_ids.push_back(mask_id);
      }
  }

  // Return whether a mask shows a pair within the sequence lengths.
  bool shows_any(int32_t mask_id, int64_t row, int64_t col) const {
    const int64_t height = std::min(grid_.q_block, grid_.seqlen_q - row * grid_.q_block);
    const int64_t width = std::min(grid_.kv_block, grid_.seqlen_k - col * grid_.kv_block);
    const int32_t* bits = layout_.bits.data() + size_t(mask_id) * whole_.size();
    for (int64_t r = 0; r < height; r++, bits += grid_.words())
      for (int64_t w = 0; 32 * w < width; w++)
        if (bits[w] & int32_t(~0u >> std::max<int64_t>(32 - (width - 32 * w), 0))) return true;
    return false;
  }

  int32_t mask_id_of(uint64_t key) {
    const auto [mask_id, is_new] = mask_ids_.insert(key, EMPTY);
    if (is_new) {
      for (size_t i = 0; i < tracks_.size(); i++) kinds_[i] = int32_t(key / radix_[i] % uint64_t(tracks_[i].kinds));
      *mask_id = mask_id_by_kinds();
    }
    return *mask_id;
  }

  // Write the mask after the existing ones, and keep it if it is new.
  int32_t mask_id_by_kinds() {
    const size_t at = layout_.bits.size();
    layout_.bits.resize(at + whole_.size());
    uint32_t* mask = reinterpret_cast<uint32_t*>(layout_.bits.data() + at);
    size_t next = 0;
    const int32_t mask_id = mask_id_by(shown(rule_, next, mask), mask);
    if (mask_id < 0 || size_t(mask_id) < at / whole_.size()) layout_.bits.resize(at);
    return mask_id;
  }

  int32_t mask_id_by(Kind kind, const uint32_t* mask) {
    if (kind == WHOLE || (kind == CUT && std::equal(whole_.begin(), whole_.end(), mask))) return FULL;
    if (kind == NOTHING || std::all_of(mask, mask + whole_.size(), [](uint32_t word) { return !word; })) return EMPTY;
    const int32_t next = int32_t(layout_.bits.size() / whole_.size()) - 1;
    for (uint64_t hash = hash_of(mask, whole_.size());; hash += hash < ~0ull ? 1 : 2) {
      const auto [mask_id, is_new] = masks_.insert(hash, next);
      const int32_t* known = layout_.bits.data() + size_t(*mask_id) * whole_.size();
      if (is_new) add_band(mask);
      if (is_new || !std::memcmp(known, mask, whole_.size() * sizeof(uint32_t))) return *mask_id;
    }
  }

  // Return what a rule shows of a block with the current kinds; for CUT, writes `mask`. `next` is its first track.
  Kind shown(const Rule& rule, size_t& next, uint32_t* mask, size_t depth = 0) {
    if (only_distances(rule) || (rule.op != ANY && rule.op != ALL)) {
      const Track& track = tracks_[next];
      const int32_t kind = kinds_[next++];
      if (kind < CUT) return Kind(kind);
      track.mask(kind, mask);
      return CUT;
    }
    const bool any = rule.op == ANY;
    const Kind decides = any ? WHOLE : NOTHING, neutral = any ? NOTHING : WHOLE;
    if (beside_.size() == depth) beside_.emplace_back(whole_.size());
    Kind all = neutral;
    for (const Rule& part : rule.parts) {
      uint32_t* into = all == CUT ? beside_[depth].data() : mask;
      const Kind kind = shown(part, next, into, depth + 1);
      if (all == decides || kind == neutral) continue;
      if (kind == CUT && all == CUT)
        for (size_t i = 0; i < whole_.size(); i++) mask[i] = any ? mask[i] | into[i] : mask[i] & into[i];
      else
        all = kind;
    }
    return all;
  }

  // Store (lo, hi) if the mask is exactly lo <= r - c <= hi, else (1, 0). A mask is a band if each row is the previous
  // row shifted by one column, and if the distances visible in the first row and first column have no gap.
  void add_band(const uint32_t* mask) {
    const int64_t rows = grid_.q_block, cols = grid_.kv_block;
    const uint32_t words = uint32_t(grid_.words()), size = uint32_t(whole_.size());
    const auto at = [&](int64_t r, int64_t c) { return mask[r * words + c / 32] >> c % 32 & 1; };
    bool band = true;
    for (int64_t distance = 1 - cols; band && distance < rows; distance += 8) {  // quick test: ends of some diagonals
      const int64_t end = std::min(rows, cols + distance) - 1;
      band = at(std::max<int64_t>(distance, 0), std::max<int64_t>(-distance, 0)) == at(end, end - distance);
    }
    if (band) {
      uint32_t wrong = (mask[words] ^ mask[0] << 1) & ~1u;  // ignore the first column, into which nothing is shifted
      for (uint32_t i = words + 1; i < size; i++)
        wrong |= (mask[i] ^ (mask[i - words] << 1 | mask[i - words - 1] >> 31)) & (i & (words - 1) ? ~0u : ~1u);
      band = !(wrong & whole_[0]);
    }
    int64_t lo = 0, hi = -1, count = 0;
    for (int64_t distance = 1 - cols; band && distance < rows; distance++)
      if (distance < 0 ? at(0, -distance) : at(distance, 0)) {
        if (!count++) lo = distance;
        hi = distance;
      }
    band &= count && hi - lo + 1 == count;
    layout_.bands.push_back(int32_t(band ? lo : 1));
    layout_.bands.push_back(int32_t(band ? hi : 0));
  }

  // Sort rows by number of blocks, longest first, unless row lengths never decrease.
  void order_rows() {
    const std::vector<int32_t>& indptr = layout_.indptr;
    const auto length = [&](int64_t row) { return indptr[row + 1] - indptr[row]; };
    bool falls = false;
    for (int64_t row = 1; row < grid_.q_blocks(); row++) falls |= length(row) < length(row - 1);
    if (!falls) return;
    std::vector<int32_t> places(grid_.kv_blocks() + 2);  // counting sort: positions of rows by number of blocks
    for (int64_t row = 0; row < grid_.q_blocks(); row++) places[grid_.kv_blocks() - length(row) + 1]++;
    for (size_t i = 1; i < places.size(); i++) places[i] += places[i - 1];
    layout_.order.resize(grid_.q_blocks());
    for (int64_t row = 0; row < grid_.q_blocks(); row++)
      layout_.order[places[grid_.kv_blocks() - length(row)]++] = int32_t(row);
  }

  const Grid grid_;
  const Rule rule_;
  Layout& layout_;
  std::vector<Track> tracks_;
  std::vector<uint64_t> radix_;   // factor of each track's kind in a key
  std::vector<int32_t> kinds_;    // kinds of a new key, by track
  Mask whole_;
  int64_t ragged_row_ = -1, ragged_col_ = -1;  // blocks that contain the end of a sequence
  Table mask_ids_;                // by key
  Table masks_;                // mask ids by hash of a mask; on collision, at the next free hash
  std::vector<Mask> beside_;   // by nesting depth: mask of the current part, before it is combined with earlier parts
  std::vector<Cursor> cursors_;
  std::vector<int32_t> full_;  // full blocks of the current row
};

}  // namespace

// Build the layout of a pattern. `built` receives a handle for `dynaxx_cpu_take_layout`, which frees it; `sizes`
// receives the length of each part. Returns a `Status`; unless it is OK, there is no handle.
extern "C" DYNAXX_EXPORT int dynaxx_cpu_static_layout(const int64_t* program, int64_t size, const Grid* grid,
                                                      int64_t* sizes, void** built) {
  return status_of([&] {
    *built = nullptr;
    check(*grid);
    const Rule rule = parsed(program, size);
    std::unique_ptr<Layout> layout = spare ? std::move(spare) : std::make_unique<Layout>();
    for (auto* part : layout->parts()) part->clear();
    Builder(*grid, rule, *layout).build();
    for (const auto* part : layout->parts()) *sizes++ = int64_t(part->size());
    *built = layout.release();
  });
}

// Write the parts of a layout, each aligned to 16 bytes, and free its handle; with null `numbers`, only free it.
// `capacity` is the number of int32 that fit into `numbers`. Returns a `Status`.
extern "C" DYNAXX_EXPORT int dynaxx_cpu_take_layout(void* built, int32_t* numbers, int64_t capacity) {
  return status_of([&] {
    std::unique_ptr<Layout> layout(static_cast<Layout*>(built));
    int64_t needed = 0;
    for (const auto* part : layout->parts()) needed += int64_t(part->size() + 3) / 4 * 4;
    require(!numbers || needed <= capacity);
    for (const auto* part : layout->parts()) {
      if (!numbers) break;
      if (!part->empty()) std::memcpy(numbers, part->data(), part->size() * sizeof(int32_t));
      numbers += (part->size() + 3) / 4 * 4;
    }
    if (layout->indices.capacity() <= MAX_KEPT && layout->bits.capacity() <= MAX_WORDS_KEPT) spare = std::move(layout);
  });
}
