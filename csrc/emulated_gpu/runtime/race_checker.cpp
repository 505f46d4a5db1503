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
  split(range.begin);
  split(range.end);
  cells_.erase(cells_.lower_bound(range.begin), cells_.lower_bound(range.end));
}

// Afterwards no cell reaches across the address.
void RaceChecker::split(uintptr_t at) {
  auto found = cells_.upper_bound(at);
  if (found == cells_.begin()) return;
  --found;
  if (found->first == at || found->second.end <= at) return;
  Cell right = found->second;
  found->second.end = at;
  cells_.emplace_hint(std::next(found), at, std::move(right));
}

// Calls act for cells that cover the range exactly; bytes that nobody used yet get one.
void RaceChecker::visit(const Range& range, const std::function<void(Cell&)>& act) {
  if (range.begin >= range.end) return;
  split(range.begin);
  split(range.end);
  auto cell = cells_.lower_bound(range.begin);
  for (uintptr_t at = range.begin; at < range.end; at = cell->second.end, ++cell) {
    if (cell == cells_.end() || cell->first > at) {
      const uintptr_t end = cell == cells_.end() ? range.end : std::min(range.end, cell->first);
      cell = cells_.emplace_hint(cell, at, Cell{end, {}, {}});
    }
    act(cell->second);
    if (cell->second.end >= range.end) return;
  }
}

void RaceChecker::read(const Operation& operation, const Range& range) {
  const Use use{operation.stream, operation.count, operation.name};
  visit(range, [&](Cell& cell) {
    expect_before(cell.write, operation, "read after write");
    const auto mine = std::find_if(cell.reads.begin(), cell.reads.end(),
                                   [&](const Use& read) { return read.stream == use.stream; });
    if (mine == cell.reads.end()) {
      cell.reads.push_back(use);
    } else {
      *mine = use;
    }
  });
}

void RaceChecker::write(const Operation& operation, const Range& range) {
  visit(range, [&](Cell& cell) {
    expect_before(cell.write, operation, "write after write");
    for (const Use& read : cell.reads) expect_before(read, operation, "write after read");
    cell.write = {operation.stream, operation.count, operation.name};
    cell.reads.clear();
  });
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
