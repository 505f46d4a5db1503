// Freed blocks that another stream may still be reading, each with the event that ends the reading.
//
// A freed address is free for the plan at once. Before an address that overlaps a pending block is given out, the
// arena's stream must wait for the event. Pending blocks never overlap one another, so they stay few.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace memo {

template <class Event>
class PendingEvents {
 public:
  void add(const void* block, size_t num_bytes, Event event) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto begin = reinterpret_cast<uintptr_t>(block);
    pending_.push_back({begin, begin + num_bytes, std::move(event)});
    count_.store(pending_.size(), std::memory_order_release);
  }

  // Calls wait(event) for every pending block that overlaps [block, block + num_bytes), and forgets it: the arena has
  // one stream, and all of its later work comes after the wait.
  template <class Wait>
  void take(const void* block, size_t num_bytes, Wait wait) {
    if (count_.load(std::memory_order_acquire) == 0) return;  // nearly always
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto begin = reinterpret_cast<uintptr_t>(block);
    const uintptr_t end = begin + num_bytes;
    for (size_t i = 0; i < pending_.size();) {
      if (pending_[i].begin >= end || begin >= pending_[i].end) {
        ++i;
        continue;
      }
      wait(pending_[i].event);  // if it throws, the block stays pending
      pending_[i] = std::move(pending_.back());
      pending_.pop_back();
      count_.store(pending_.size(), std::memory_order_release);
    }
  }

 private:
  struct Entry {
    uintptr_t begin;
    uintptr_t end;
    Event event;
  };
  std::mutex mutex_;
  std::vector<Entry> pending_;
  std::atomic<size_t> count_{0};
};

}  // namespace memo
