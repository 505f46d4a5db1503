// Vector clocks: of each stream, how many of its operations happened before a given point of a program. The host counts
// as a stream whose operations are its own reads and writes of pinned memory.
//
// An operation happens before another if it is earlier on the same stream, or a chain of events, legacy-stream rules
// and host synchronisations leads from the one to the other. Two operations that neither way is true of may run at
// the same time on some day, whatever they did today.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>

namespace emulated {

constexpr int kHost = -1;  // in place of a stream's number

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

  bool has_all(const VectorClock& other) const {
    return std::all_of(other.counts_.begin(), other.counts_.end(),
                       [this](const auto& entry) { return has(entry.first, entry.second); });
  }

  bool has(int stream, uint64_t count) const {
    const auto found = counts_.find(stream);
    return found != counts_.end() && found->second >= count;
  }

 private:
  std::map<int, uint64_t> counts_;
};

}  // namespace emulated
