#include "race_checker.h"

#include <algorithm>
#include <cstdio>
#include <iterator>

namespace emulated {

void RaceChecker::access(const Operation& operation, const Access& access) {
  for (const Range& range : access.reads) read(operation, range);
  for (const Range& range : access.writes) write(operation, range);
}

void RaceChecker::forget(const Range& range) {
  const auto first = split(range.begin), last = split(range.end);
  cells_.erase(first, last);
}

// The first cell at the address or behind it. Splits a cell that reaches across the address.
RaceChecker::Cells::iterator RaceChecker::split(uintptr_t at) {
  const auto after = cells_.lower_bound(at);
  if (after == cells_.begin()) return after;
  Cell& left = std::prev(after)->second;
  if (left.end <= at) return after;
  Cell right = left;
  left.end = at;
  return cells_.emplace_hint(after, at, std::move(right));
}

// Bytes that were never used get a cell.
void RaceChecker::read(const Operation& operation, const Range& range) {
  if (range.begin >= range.end) return;
  const Use use{operation.stream, operation.count, operation.name};
  auto cell = split(range.begin);
  const auto last = split(range.end);
  for (uintptr_t at = range.begin; at < range.end; at = cell->second.end, ++cell) {
    if (cell == last || cell->first > at) {
      const uintptr_t end = cell == last ? range.end : cell->first;
      cell = cells_.emplace_hint(cell, at, Cell{end, {}, {}});
    }
    expect_before(cell->second.write, operation, "read after write");
    auto& reads = cell->second.reads;
    const auto mine = std::find_if(reads.begin(), reads.end(),
                                   [&](const Use& read) { return read.stream == use.stream; });
    if (mine == reads.end()) {
      reads.push_back(use);
    } else {
      *mine = use;
    }
    if (cell->second.end >= range.end) return;
  }
}

// Joins the cells of the bytes into one.
void RaceChecker::write(const Operation& operation, const Range& range) {
  if (range.begin >= range.end) return;
  const auto first = split(range.begin), last = split(range.end);
  for (auto cell = first; cell != last; ++cell) {
    expect_before(cell->second.write, operation, "write after write");
    for (const Use& read : cell->second.reads) expect_before(read, operation, "write after read");
  }
  cells_.erase(first, last);
  cells_.emplace_hint(last, range.begin, Cell{range.end, {operation.stream, operation.count, operation.name}, {}});
}

void RaceChecker::expect_before(const Use& earlier, const Operation& operation, const char* kind) {
  if (earlier.stream == kNobody || earlier.stream == operation.stream) return;
  if (operation.clock.has(earlier.stream, earlier.count)) return;
  const auto place = [](int stream) { return stream == kHost ? "the host" : "stream " + std::to_string(stream); };
  const std::string text = std::string(kind) + ": " + earlier.name + " on " + place(earlier.stream) + " and " +
                           operation.name + " on " + place(operation.stream);
  if (found_[text]++ == 0) std::fprintf(stderr, "emulated GPU: race: %s\n", text.c_str());
}

}  // namespace emulated
