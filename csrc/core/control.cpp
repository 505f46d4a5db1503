#include "control.h"

#include <pthread.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>

namespace memo {

PlannedCore& core() {
  static auto* const only = new PlannedCore;
  return *only;
}

ManagedMemory& managed_memory() {
  static auto* const only = new ManagedMemory;
  return *only;
}

namespace {

// Runs a step of the set-up. Turns exceptions into messages, because Python's caller cannot catch them.
template <class Step>
const char* guarded(Step step) {
  static thread_local std::string message;
  try {
    message = step();
  } catch (const std::exception& error) {
    message = error.what();
  }
  return message.empty() ? nullptr : message.c_str();
}

// If a process forks while another of its threads holds a mutex, nobody unlocks the mutex in the child.
void hold_through_forks() {
  const int status = pthread_atfork(
      [] {
        core().lock_for_fork();
        managed_memory().lock_for_fork();
      },
      [] {
        managed_memory().unlock_after_fork();
        core().unlock_after_fork();
      },
      [] {
        managed_memory().unlock_after_fork();
        core().unlock_after_fork();
      });
  if (status != 0) throw std::runtime_error("pthread_atfork failed");
}

// Replaces the arena by one of the new size. Returns a message if blocks of the old arena are alive and the new plan
// does not fit in it.
std::string exchange_arena(int64_t num_bytes) {
  const Statistics now = core().statistics();
  const auto old = core().unload_arena();
  if (!old.has_value()) {
    if (num_bytes <= now.arena_bytes) return "";
    return std::to_string(now.live_blocks) + " planned blocks are alive in an arena of " +
           std::to_string(now.arena_bytes) + " bytes, and the new plan needs " + std::to_string(num_bytes) +
           ": drop the tensors of the last iteration first";
  }
  if (*old != nullptr) give_arena(*old, static_cast<size_t>(now.arena_bytes));
  if (num_bytes == 0) return "";
  core().set_stream(bind_stream());
  try {
    core().set_arena(take_arena(static_cast<size_t>(num_bytes)), static_cast<size_t>(num_bytes));
  } catch (const std::exception& error) {
    const std::string told = error.what();
    return "there is no memory for an arena of " + std::to_string(num_bytes) + " bytes (" +
           told.substr(0, told.find('\n')) + "): leave more free, or train shorter sequences";
  }
  return "";
}

}  // namespace
}  // namespace memo

const char memo_build_key[] = MEMO_BUILD_KEY;

using memo::core;
using memo::guarded;
using memo::managed_memory;

MEMO_API const char* memo_install() {
  static std::once_flag once;
  return guarded([] {
    std::call_once(once, [] {
      memo::hold_through_forks();
      memo::install();
    });
    return "";
  });
}

MEMO_API const char* memo_load_plan(const int64_t* sizes_and_offsets, int64_t num_requests, const int64_t* phase_ends,
                                    int64_t num_phases, const int64_t* has_block, int64_t min_bytes,
                                    int64_t alignment_bytes, int64_t arena_bytes) {
  return guarded([=]() -> std::string {
    if (num_requests < 0 || num_phases < 0) return "it has fewer requests or phases than none";
    memo::Plan plan{{}, {phase_ends, phase_ends + num_phases}, min_bytes, alignment_bytes, arena_bytes, {}};
    plan.has_block.assign(has_block, has_block + num_phases);
    plan.requests.reserve(static_cast<size_t>(num_requests));
    for (int64_t i = 0; i < num_requests; ++i) {
      plan.requests.push_back({sizes_and_offsets[2 * i], sizes_and_offsets[2 * i + 1]});
    }
    if (const auto fault = find_fault(plan)) return *fault;
    core().load({});  // no new planned blocks from here on
    const std::string refusal = memo::exchange_arena(arena_bytes);
    if (!refusal.empty()) return refusal;
    core().load(std::move(plan));
    return "";
  });
}

MEMO_API const char* memo_unload_plan() {
  return guarded([]() -> std::string {
    core().load({});
    return memo::exchange_arena(0);
  });
}

MEMO_API const char* memo_set_mode(int mode) {
  return guarded([=] {
    const auto next = static_cast<memo::Mode>(mode);
    if (next == memo::Mode::kRecord && core().arena() == nullptr) core().set_stream(memo::bind_stream());
    core().set_mode(next);
    return "";
  });
}

MEMO_API void memo_begin_iteration() { core().begin_iteration(); }
MEMO_API void memo_mark(int64_t phase) { core().mark(phase); }
MEMO_API void memo_end_iteration() { core().end_iteration(); }

MEMO_API void memo_settle(void* block) {
  try {
    memo::settle(block);
  } catch (const std::exception& error) {  // the block keeps its streams; freeing it records an event of each
    core().fail(error.what());
  }
}

MEMO_API int64_t memo_num_events() { return core().num_events(); }

MEMO_API void memo_copy_events(memo::Event* out) {
  const auto events = core().events();
  std::copy(events.begin(), events.end(), out);
}

MEMO_API void memo_statistics(memo::Statistics* out) { *out = core().statistics(); }
MEMO_API void memo_reset_statistics() { core().reset_statistics(); }

MEMO_API const char* memo_take_fault() {
  return guarded([]() -> std::string {
    int64_t num_faults = 0;
    const std::string first = core().take_fault(&num_faults);
    return num_faults < 2 ? first : first + " (the first of " + std::to_string(num_faults) + " faults)";
  });
}

MEMO_API void memo_set_poison(int is_on) { core().set_fill(is_on != 0 ? memo::fill_with_nan : nullptr); }

MEMO_API const char* memo_open_managed(int64_t limit_bytes) {
  return guarded([=]() -> std::string {
    if (!memo::has_managed_memory()) return "this device has no managed memory that can be larger than itself";
    if (core().arena() == nullptr) core().set_stream(memo::bind_stream());
    managed_memory().open(limit_bytes);
    return "";
  });
}

MEMO_API void memo_close_managed() { managed_memory().close(); }
MEMO_API void memo_managed_use(memo::ManagedUse* out) { *out = managed_memory().use(); }
