// The requests of one iteration as they come: the content of a memory trace.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace memo {

struct Event {
  int64_t phase;
  int64_t id;         // numbers the requests from 0
  int64_t num_bytes;  // 0: the request is freed
};

class EventLog {
 public:
  void clear() {
    events_.clear();
    ids_.clear();
    next_id_ = 0;
  }

  void malloced(const void* address, int64_t num_bytes, int64_t phase) {
    ids_[address] = next_id_;
    events_.push_back({phase, next_id_++, num_bytes});
  }

  // Frees of blocks that were allocated before the recording are not recorded.
  void freed(const void* address, int64_t phase) {
    const auto found = ids_.find(address);
    if (found == ids_.end()) return;
    events_.push_back({phase, found->second, 0});
    ids_.erase(found);
  }

  const std::vector<Event>& events() const { return events_; }

 private:
  std::vector<Event> events_;
  std::unordered_map<const void*, int64_t> ids_;  // of live blocks
  int64_t next_id_ = 0;
};

}  // namespace memo
