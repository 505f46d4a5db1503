// Keeps which blocks are managed memory, and limits how much of it is allocated at one time. Independent of torch and
// CUDA.
//
// CUDA's managed memory moves between device and host page by page, so a program can have more of it than the device
// has: an iteration that is too large to run can be recorded. But a device that is asked for more than it has free is
// slow at best, and may hang. So the allocated bytes are counted, and a request that would pass the limit is refused.
//
// The caller is an allocator:
//
//   allocate(n):  if (ask(n) == kManaged) { p = managed(n); p ? note(p, n) : forgo(n); }
//   free(p):      if (release(p)) managed_free(p); else native_free(p);
//
// All members may be called from any thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <unordered_map>

namespace memo {

struct ManagedUse {
  int64_t limit_bytes;
  int64_t live_bytes;
  int64_t peak_bytes;     // the largest live_bytes
  int64_t refused_bytes;  // live_bytes if the first refused request had been granted; 0: none was refused
};

class ManagedMemory {
 public:
  enum class Answer { kNative, kManaged, kRefused };

  // Smaller requests are left to the native allocator, as in a plan: each managed block costs a call of the driver.
  static constexpr int64_t kMinBytes = 1 << 20;
  // The bytes counted for a block are a multiple of this: the smallest page on a device.
  static constexpr int64_t kPageBytes = 64 << 10;

  void open(int64_t limit_bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    use_ = {limit_bytes, use_.live_bytes, use_.live_bytes, 0};
    is_open_.store(true, std::memory_order_release);
  }

  // Grants no more blocks; live blocks stay until they are freed.
  void close() { is_open_.store(false, std::memory_order_release); }

  // kManaged: the bytes are counted; note() or forgo() follows.
  Answer ask(size_t num_bytes) {
    if (!is_open_.load(std::memory_order_acquire) || num_bytes < static_cast<size_t>(kMinBytes)) return Answer::kNative;
    const std::lock_guard<std::mutex> lock(mutex_);
    const int64_t wanted_bytes = use_.live_bytes + whole_pages(num_bytes);
    if (wanted_bytes > use_.limit_bytes) {
      if (use_.refused_bytes == 0) use_.refused_bytes = wanted_bytes;
      return Answer::kRefused;
    }
    use_.live_bytes = wanted_bytes;
    use_.peak_bytes = std::max(use_.peak_bytes, wanted_bytes);
    return Answer::kManaged;
  }

  void note(const void* block, size_t num_bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    blocks_.emplace(block, whole_pages(num_bytes));
    count_.store(blocks_.size(), std::memory_order_release);
  }

  // The allocation of the block failed.
  void forgo(size_t num_bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    use_.live_bytes -= whole_pages(num_bytes);
  }

  bool has(const void* block) const {
    if (count_.load(std::memory_order_acquire) == 0) return false;  // nearly always
    const std::lock_guard<std::mutex> lock(mutex_);
    return blocks_.count(block) != 0;
  }

  // True: it was a managed block, and the caller must free its memory.
  bool release(const void* block) {
    if (count_.load(std::memory_order_acquire) == 0) return false;  // nearly always
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = blocks_.find(block);
    if (found == blocks_.end()) return false;
    use_.live_bytes -= found->second;
    blocks_.erase(found);
    count_.store(blocks_.size(), std::memory_order_release);
    return true;
  }

  // Around fork(), as in PlannedCore.
  void lock_for_fork() { mutex_.lock(); }
  void unlock_after_fork() { mutex_.unlock(); }

  ManagedUse use() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return use_;
  }

 private:
  static int64_t whole_pages(size_t num_bytes) {
    // Absurd sizes are refused, not wrapped around.
    constexpr auto kMost = static_cast<size_t>(std::numeric_limits<int64_t>::max() / 4);
    const auto asked_bytes = static_cast<int64_t>(std::min(num_bytes, kMost));
    return (asked_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  }

  mutable std::mutex mutex_;
  std::unordered_map<const void*, int64_t> blocks_;
  ManagedUse use_{};
  // Read without the mutex, so that requests and frees of other blocks cost nothing.
  std::atomic<bool> is_open_{false};
  std::atomic<size_t> count_{0};
};

}  // namespace memo
