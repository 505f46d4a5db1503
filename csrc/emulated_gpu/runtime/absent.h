// Without numbers: the bytes of small tensors that have none, because they depend on larger ones. They are zeros, and
// so are results computed from them, so that no logarithm of zero or quotient by it ever reaches the host.
#pragma once

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "emulator.h"

namespace emulated {

class AbsentNumbers {
 public:
  bool holds(const Range& range) const {
    const auto after = ranges_.lower_bound(range.end);
    return after != ranges_.begin() && std::prev(after)->second > range.begin;
  }

  void set(const Range& range, bool is_absent) {
    split(range.begin);
    split(range.end);
    ranges_.erase(ranges_.lower_bound(range.begin), ranges_.lower_bound(range.end));
    if (is_absent && range.begin < range.end) ranges_[range.begin] = range.end;
  }

 private:
  // Afterwards no entry reaches across the address.
  void split(uintptr_t at) {
    const auto after = ranges_.lower_bound(at);
    if (after == ranges_.begin() || std::prev(after)->second <= at) return;
    ranges_[at] = std::exchange(std::prev(after)->second, at);
  }

  std::map<uintptr_t, uintptr_t> ranges_;  // ends by begins; they never overlap
};

}  // namespace emulated
