// Vector clocks: of each stream, how many of its operations happened before a given point of a program. The host counts
// as a stream whose operations are its own reads and writes of pinned memory.
//
// An operation happens before another if it is earlier on the same stream, or a chain of events, legacy-stream rules
// and host synchronisations leads from the one to the other. Two operations of which neither happens before the other
// may run at the same time in another run.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace emulated {

constexpr int kHost = -1;  // in place of a stream's number

class VectorClock {
 public:
  // Everything that happened before `other` now also happened before this.
  void join(const VectorClock& other) {
    if (counts_.size() < other.counts_.size()) counts_.resize(other.counts_.size());
    for (size_t i = 0; i < other.counts_.size(); ++i) counts_[i] = std::max(counts_[i], other.counts_[i]);
  }

  void advance(int stream, uint64_t count) {
    const size_t i = index_of(stream);
    if (counts_.size() <= i) counts_.resize(i + 1);
    counts_[i] = std::max(counts_[i], count);
  }

  bool has_all(const VectorClock& other) const {
    for (size_t i = 0; i < other.counts_.size(); ++i) {
      if (other.counts_[i] > (i < counts_.size() ? counts_[i] : 0)) return false;
    }
    return true;
  }

  bool has(int stream, uint64_t count) const {
    const size_t i = index_of(stream);
    return i < counts_.size() && counts_[i] >= count;
  }

 private:
  static size_t index_of(int stream) { return static_cast<size_t>(stream - kHost); }

  std::vector<uint64_t> counts_;  // by stream, the host first; streams beyond its end have done nothing
};

}  // namespace emulated
