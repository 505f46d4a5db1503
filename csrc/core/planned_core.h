// Decides where each request goes: to its planned address, or to the native allocator. Knows neither torch nor CUDA.
//
// The caller is an allocator that has a native allocator under it:
//
//   allocate(n):  p = core.request(n, stream); if (!p) { p = native(n); core.note_native(p, n, stream); }
//                 where p cannot be handed out after all: core.forgo(p)
//   free(p):      if (!core.release(p)) native_free(p);
//
// Blocks are freed where nothing may be thrown: in deleters, while other errors are on their way. What goes wrong there
// is kept (fail) and told when the iteration is over (take_fault).
//
// A request is compared with the plan's next one and nothing else. Does it not match, it is served natively and the
// plan waits: a superfluous request costs one fallback, and where one is missing the rest of the phase falls back.
// Every phase starts anew. So a wrong plan costs memory, never correctness.
//
// Attention over packed documents asks for sizes that depend on where they end. A phase of it has one request in the
// plan, its block. All that is asked for goes to the lowest part of the block that is free. What does not fit in there
// is served natively.
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

using StreamId = uintptr_t;  // one number a stream; 0 where the device has none

class PlannedCore {
 public:
  using Fill = void (*)(void* block, size_t num_bytes);

  // --- the two hot calls

  // A planned address, or nullptr: the native allocator is to be asked.
  void* request(size_t num_bytes, StreamId stream = 0);
  // True: the block was a planned one. An address inside the arena that is not a block, a double free, is a fault.
  bool release(void* block) noexcept;
  // Takes back what request() has just given: nobody has used it, and nothing is filled.
  void forgo(void* block) noexcept;
  // After a native allocation; before it is freed, release() is called.
  void note_native(const void* block, size_t num_bytes, StreamId stream = 0) noexcept;

  // --- where training is

  void begin_iteration();
  // Phase number `phase` of the plan, or of the recording, begins; kNoPhase: one that the plan does not have. The
  // calling thread is the one whose requests are planned or recorded: backward may run in a thread of its own.
  void mark(int64_t phase);
  void end_iteration();

  // --- set-up; while it goes on, requests are served natively

  void set_mode(Mode mode);
  Mode mode() const { return mode_.load(std::memory_order_acquire); }
  // The arena belongs to one stream, in whose order addresses are used again; requests on others are not served.
  void set_stream(StreamId stream);
  // The plan must have no fault (find_fault) and fit in the arena. Passthrough until the mode is set again.
  void load(Plan plan);
  void set_arena(char* base, size_t num_bytes);
  // What set_arena was given, now the caller's again (nullptr: nothing); nullopt while blocks in it are alive.
  std::optional<char*> unload_arena();
  // What to overwrite freed blocks with; nullptr: nothing. For tests.
  void set_fill(Fill fill);

  // --- what went wrong where nothing can be thrown

  void fail(const char* what) noexcept;
  // The first of them since the last call, empty: none. `num_faults`: how many there were.
  std::string take_fault(int64_t* num_faults = nullptr);

  // --- around fork(): the child must not find the mutex held by a thread that it does not have

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
  void* hit(int64_t offset);  // the block there is alive already
  void* fall_back(Reason reason, int64_t num_bytes);
  void leave_phase();

  mutable std::mutex mutex_;
  // Read without the mutex, so that requests and frees that are none of our business cost nothing.
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
  std::array<char, 256> fault_{};  // no memory is asked for where memory may be what is missing
  int64_t num_faults_ = 0;

  bool in_iteration_ = false;
  int64_t phase_ = kNoPhase;
  int64_t cursor_ = 0;  // the next request of plan_; the block of attention stays the next
  std::thread::id owner_;
  StreamId stream_ = 0;
};

}  // namespace memo
