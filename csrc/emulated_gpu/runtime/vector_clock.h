// Vector clocks: of each stream, how many of its operations happened before a given point of a program.
//
// An operation happens before another if it is earlier on the same stream, or a chain of events, legacy-stream rules
// and host synchronisations leads from the one to the other. Two operations that neither way is true of may run at
// the same time on some day, whatever they did today.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>

namespace emulated {

class VectorClock {
 public:
  // Everything that happened before `other` happened before this, too.
  void join(const VectorClock& other) {
    for (const auto& [stream, count] : other.counts_) advance(stream, count);
  }

  void advance(int stream, uint64_t count) {
    uint64_t& mine = counts_[stream];
    mine = std::max(mine, count);
  }

  bool has(int stream, uint64_t count) const {
    const auto found = counts_.find(stream);
    return found != counts_.end() && found->second >= count;
  }

 private:
  std::map<int, uint64_t> counts_;
};

}  // namespace emulated
