// Serves each request at its planned address or leaves it to the native allocator. Independent of torch and CUDA.
//
// The caller is an allocator on top of a native allocator:
//
//   allocate(n):  p = core.request(n, stream); if (!p) { p = native(n); core.note_native(p, n, stream); }
//                 if p cannot be handed out after all: core.forgo(p)
//   free(p):      if (!core.release(p)) native_free(p);
//
// Blocks are freed where nothing may be thrown: in deleters, possibly while another exception propagates. Errors there
// are kept (fail) and reported when the iteration is over (take_fault).
//
// A request is compared only with the plan's next one. If it does not match, it is served natively and the plan does
// not advance: an extra request costs one fallback; after a missing request the rest of the phase falls back. Every
// phase starts anew. So a wrong plan costs memory, never correctness.
//
// Attention over packed documents asks for sizes that depend on where they end. A phase of it has one request in the
// plan, its block. Its requests go to the lowest free part of the block. Requests that do not fit are served natively.
//
//   address
//      ^   +-----------+ +-----+ +--------------+
//      |   | scratch   | |     | |   +------+   |   the block of the phase: scratch of one kernel after the other
//      |   +-----------+ +-----+ +---+------+---+
//      +--------------------------------------------> time
//
// All members may be called from any thread.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "event_log.h"
#include "live_blocks.h"
#include "plan.h"
#include "statistics.h"

namespace memo {

enum class Mode : int { kPassthrough, kRecord, kPlanned };

constexpr int64_t kNoPhase = -1;

using StreamId = uintptr_t;  // one number for each stream; 0 if the device has none

class PlannedCore {
 public:
  using Fill = void (*)(void* block, size_t num_bytes);

  // --- the two hot calls

  // A planned address, or nullptr: the caller must ask the native allocator.
  void* request(size_t num_bytes, StreamId stream = 0);
  // True: the block was a planned one. An address inside the arena that is not a block, a double free, is a fault.
  bool release(void* block) noexcept;
  // Takes back the block that request() has just given: it was never used, and it is not filled.
  void forgo(void* block) noexcept;
  // Called after a native allocation; before it is freed, release() is called.
  void note_native(const void* block, size_t num_bytes, StreamId stream = 0) noexcept;

  // --- the position of training

  void begin_iteration();
  // Phase number `phase` of the plan, or of the recording, begins; kNoPhase: a phase that the plan does not have. From
  // now on the requests of the calling thread are planned or recorded: backward may run in its own thread.
  void mark(int64_t phase);
  void end_iteration();

  // --- set-up; during it, requests are served natively

  void set_mode(Mode mode);
  Mode mode() const { return mode_.load(std::memory_order_acquire); }
  // The arena belongs to one stream, in whose order addresses are used again; requests on other streams are not served.
  void set_stream(StreamId stream);
  // The plan must have no fault (find_fault) and fit in the arena. Passthrough until the mode is set again.
  void load(Plan plan);
  void set_arena(char* base, size_t num_bytes);
  // Returns the arena that set_arena was given to the caller (nullptr: none); nullopt while blocks in it are alive.
  std::optional<char*> unload_arena();
  // The function that overwrites freed blocks; nullptr: none. For tests.
  void set_fill(Fill fill);

  // --- errors where nothing can be thrown

  void fail(const char* what) noexcept;
  // The first error since the last call, empty: none. `num_faults`: how many there were.
  std::string take_fault(int64_t* num_faults = nullptr);

  // --- around fork(): in the child, the mutex must not be held by a thread that only the parent has

  void lock_for_fork() { mutex_.lock(); }
  void unlock_after_fork() { mutex_.unlock(); }

  std::vector<Event> events() const;  // of the last recorded iteration
  int64_t num_events() const;
  Statistics statistics() const;
  void reset_statistics();

  bool in_arena(const void* address) const;
  char* arena() const { return arena_.load(std::memory_order_acquire); }
  size_t num_bytes_of(const void* block) const;  // of a live planned block; 0: it is none

 private:
  void* serve_attention(int64_t num_bytes);
  void* hit(int64_t offset);  // the block at offset is already alive
  void* fall_back(Reason reason, int64_t num_bytes);
  void leave_phase();

  mutable std::mutex mutex_;
  // Read without the mutex, so that requests and frees of other blocks cost nothing.
  std::atomic<Mode> mode_{Mode::kPassthrough};
  std::atomic<int64_t> min_bytes_{1};
  std::atomic<char*> arena_{nullptr};
  std::atomic<size_t> arena_bytes_{0};

  Plan plan_;
  LiveBlocks live_;
  EventLog log_;
  Statistics statistics_{};
  Fill fill_ = nullptr;

  std::mutex fault_mutex_;  // fail() is also called while mutex_ is held
  std::array<char, 256> fault_{};  // a fixed array, because an allocation may fail when memory is short
  int64_t num_faults_ = 0;

  bool in_iteration_ = false;
  int64_t phase_ = kNoPhase;
  int64_t cursor_ = 0;  // the next request of plan_; in a phase of attention it stays at the block
  std::thread::id owner_;
  StreamId stream_ = 0;
};

}  // namespace memo
