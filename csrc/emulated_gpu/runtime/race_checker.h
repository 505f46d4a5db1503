// Finds two accesses to the same bytes, one of them a write, that nothing orders. Independent of CUDA and torch.
//
// Shadow memory is a map of byte ranges. For each range it has the last write and, for each stream, the last read
// since. A new access must come after the write, and a new write after the reads as well. Vector clocks decide "after",
// so the answer does not depend on the order in which the operations ran. Unmapped memory is forgotten: the next
// allocation at the address starts anew. Memory that torch's caching allocator hands on to another tensor is not
// forgotten: this shows a missing record_stream.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "emulator.h"
#include "vector_clock.h"

namespace emulated {

class RaceChecker {
 public:
  // Operation number `count` of `stream`, which may be kHost, begins, and `clock` happened before it.
  struct Operation {
    int stream;
    uint64_t count;
    const char* name;
    const VectorClock& clock;
  };

  void access(const Operation& operation, const Access& access);
  void forget(const Range& range);

  // The races that were found: their text and how often.
  const std::map<std::string, int64_t>& found() const { return found_; }
  void clear_found() { found_.clear(); }

 private:
  static constexpr int kNobody = kHost - 1;
  struct Use {
    int stream = kNobody;
    uint64_t count = 0;
    const char* name = "";
  };
  struct Cell {
    uintptr_t end;
    Use write;
    std::vector<Use> reads;
  };
  using Cells = std::map<uintptr_t, Cell>;  // by where they begin; they never overlap

  Cells::iterator split(uintptr_t at);
  void read(const Operation& operation, const Range& range);
  void write(const Operation& operation, const Range& range);
  void expect_before(const Use& earlier, const Operation& operation, const char* kind);

  Cells cells_;
  std::map<std::string, int64_t> found_;
};

}  // namespace emulated
