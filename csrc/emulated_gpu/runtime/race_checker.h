// Finds two accesses to the same bytes, one of them a write, that nothing orders. Knows neither CUDA nor torch.
//
// Shadow memory is a map of byte ranges. Of each it knows the last write and, for each stream, the last read since. A
// new access must come after the write, and a new write after the reads as well; "after" is what vector clocks say, so
// the answer is the same in whichever order the operations really ran. Memory that is unmapped is forgotten: what has
// the address next starts anew. Memory that torch's caching allocator hands on to another tensor is not, which is how
// a missing record_stream shows.
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

  // What was found, by its text, with how often.
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
