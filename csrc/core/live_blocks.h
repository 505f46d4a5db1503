// The parts of the arena that are in use now.
//
//   address ^
//           |      +-------+
//           |      |   B   |          At any one time the blocks are disjoint. insert() refuses a block that would
//           |  +---+-------+---+      break that, so two tensors never share memory, however wrong a plan is.
//           |  |       A       |
//           +--+---------------+----> time
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>

namespace memo {

class LiveBlocks {
 public:
  // Returns false and changes nothing if [offset, offset + num_bytes) overlaps a live block. num_bytes > 0.
  bool insert(int64_t offset, int64_t num_bytes) {
    const int64_t end = offset + num_bytes;
    const auto above = ends_.lower_bound(offset);
    if (above != ends_.end() && above->first < end) return false;
    if (above != ends_.begin() && std::prev(above)->second > offset) return false;
    ends_.emplace_hint(above, offset, end);
    num_bytes_ += num_bytes;
    return true;
  }

  // The lowest multiple of `alignment` in [begin, end) from which num_bytes are free before `end`; -1: there is none.
  // `begin` is a multiple of `alignment`.
  int64_t lowest_gap(int64_t begin, int64_t end, int64_t num_bytes, int64_t alignment) const {
    const auto behind = [alignment](int64_t of) { return (of + alignment - 1) / alignment * alignment; };
    auto next = ends_.upper_bound(begin);
    int64_t at = next == ends_.begin() ? begin : std::max(begin, behind(std::prev(next)->second));
    for (; next != ends_.end() && next->first < end && next->first - at < num_bytes; ++next) at = behind(next->second);
    return end - at < num_bytes ? -1 : at;
  }

  // Bytes of the block that starts at offset; 0: there is none.
  int64_t size_at(int64_t offset) const {
    const auto found = ends_.find(offset);
    return found == ends_.end() ? 0 : found->second - offset;
  }

  void erase(int64_t offset) {
    num_bytes_ -= size_at(offset);
    ends_.erase(offset);
  }

  int64_t count() const { return static_cast<int64_t>(ends_.size()); }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  std::map<int64_t, int64_t> ends_;  // offset -> end
  int64_t num_bytes_ = 0;
};

}  // namespace memo
