#include "planned_core.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <utility>

namespace memo {

using Lock = std::lock_guard<std::mutex>;

void* PlannedCore::request(size_t size, StreamId stream) {
  const auto num_bytes = static_cast<int64_t>(size);
  if (mode() != Mode::kPlanned || num_bytes < min_bytes_.load(std::memory_order_relaxed)) return nullptr;
  const Lock lock(mutex_);
  if (mode() != Mode::kPlanned) return nullptr;  // it changed before the mutex was locked
  if (phase_ == kNoPhase) {
    ++statistics_.outside;
    return nullptr;
  }
  ++statistics_.requests;
  if (std::this_thread::get_id() != owner_) return fall_back(Reason::kThread, num_bytes);
  if (stream != stream_) return fall_back(Reason::kStream, num_bytes);
  if (plan_.is_attention(phase_)) return serve_attention(num_bytes);
  if (cursor_ == plan_.end_of(phase_)) return fall_back(Reason::kExhausted, num_bytes);
  const Request next = plan_.requests[cursor_];
  if (next.num_bytes != num_bytes) return fall_back(Reason::kSize, num_bytes);
  if (next.offset_bytes == kNative) {
    ++cursor_;
    ++statistics_.native;
    return nullptr;
  }
  const bool is_free = live_.insert(next.offset_bytes, num_bytes);
  // The request is the planned one even if its place is taken. If the plan did not advance here, the rest of the phase
  // would fall back.
  if (!is_free) fall_back(Reason::kOverlap, num_bytes);
  ++cursor_;
  if (!is_free) return nullptr;
  return hit(next.offset_bytes);
}

void* PlannedCore::serve_attention(int64_t num_bytes) {
  const Request block = plan_.requests[static_cast<size_t>(cursor_)];
  const int64_t end = block.offset_bytes + block.num_bytes;
  const int64_t offset = live_.lowest_gap(block.offset_bytes, end, num_bytes, plan_.alignment_bytes);
  if (offset < 0) return fall_back(Reason::kBlock, num_bytes);
  live_.insert(offset, num_bytes);
  return hit(offset);
}

void* PlannedCore::hit(int64_t offset) {
  ++statistics_.hits;
  statistics_.peak_bytes = std::max(statistics_.peak_bytes, live_.num_bytes());
  return arena_.load(std::memory_order_relaxed) + offset;
}

void* PlannedCore::fall_back(Reason reason, int64_t num_bytes) {
  const auto index = static_cast<int64_t>(reason);
  const int64_t count = statistics_.fallbacks[index]++;
  if (count < kNumNamed) {
    const int64_t expected = cursor_ == plan_.end_of(phase_) ? 0 : plan_.requests[cursor_].num_bytes;
    statistics_.first[index][count] = {phase_, cursor_ - plan_.begin_of(phase_), expected, num_bytes};
  }
  return nullptr;
}

bool PlannedCore::release(void* block) noexcept {
  if (!in_arena(block)) {
    // Noted before the native free: afterwards another thread may get, and note, the same address.
    if (mode() == Mode::kRecord) {
      try {
        const Lock lock(mutex_);
        if (phase_ != kNoPhase) log_.freed(block, phase_);
      } catch (const std::exception& error) {
        fail(error.what());
      }
    }
    return false;
  }
  const Lock lock(mutex_);
  if (!in_arena(block)) return false;  // the arena was exchanged after the check without the mutex
  const int64_t offset = static_cast<char*>(block) - arena_.load(std::memory_order_relaxed);
  const int64_t num_bytes = live_.size_at(offset);
  if (num_bytes == 0) {
    std::array<char, 80> told{};
    std::snprintf(told.data(), told.size(), "double free of the planned block at offset %lld",
                  static_cast<long long>(offset));
    fail(told.data());
    return true;  // it lies in the arena, so the native allocator must not free it
  }
  live_.erase(offset);  // first: a fill that throws must not keep the block alive; the mutex excludes other threads
  try {
    if (fill_ != nullptr) fill_(block, static_cast<size_t>(num_bytes));
  } catch (const std::exception& error) {
    fail(error.what());
  }
  return true;
}

void PlannedCore::forgo(void* block) noexcept {
  const Lock lock(mutex_);
  live_.erase(static_cast<char*>(block) - arena_.load(std::memory_order_relaxed));
}

void PlannedCore::fail(const char* what) noexcept {
  const Lock lock(fault_mutex_);
  if (num_faults_++ == 0) std::snprintf(fault_.data(), fault_.size(), "%s", what);
}

std::string PlannedCore::take_fault(int64_t* num_faults) {
  const Lock lock(fault_mutex_);
  if (num_faults != nullptr) *num_faults = num_faults_;
  const std::string first = num_faults_ == 0 ? "" : fault_.data();
  num_faults_ = 0;
  return first;
}

void PlannedCore::note_native(const void* block, size_t num_bytes, StreamId stream) noexcept {
  if (mode() != Mode::kRecord || num_bytes == 0) return;
  try {
    const Lock lock(mutex_);
    if (phase_ == kNoPhase || std::this_thread::get_id() != owner_ || stream != stream_) return;
    log_.malloced(block, static_cast<int64_t>(num_bytes), phase_);
  } catch (const std::exception& error) {  // the block is allocated and belongs to the caller
    fail(error.what());
  }
}

void PlannedCore::begin_iteration() {
  const Lock lock(mutex_);
  leave_phase();
  in_iteration_ = true;
  if (mode() == Mode::kRecord) log_.clear();
}

void PlannedCore::mark(int64_t phase) {
  const Lock lock(mutex_);
  leave_phase();
  const bool is_known = mode() == Mode::kRecord || (mode() == Mode::kPlanned && phase < plan_.num_phases());
  if (!in_iteration_ || !is_known || phase < 0) return;
  phase_ = phase;
  owner_ = std::this_thread::get_id();
  if (mode() == Mode::kPlanned) cursor_ = plan_.begin_of(phase);
}

void PlannedCore::end_iteration() {
  const Lock lock(mutex_);
  leave_phase();
  in_iteration_ = false;
}

void PlannedCore::leave_phase() {
  if (phase_ != kNoPhase && mode() == Mode::kPlanned && !plan_.is_attention(phase_)) {
    statistics_.unasked += plan_.end_of(phase_) - cursor_;
  }
  phase_ = kNoPhase;
}

void PlannedCore::set_mode(Mode mode) {
  const Lock lock(mutex_);
  phase_ = kNoPhase;  // a phase of one mode means nothing in another
  in_iteration_ = false;
  mode_.store(mode, std::memory_order_release);
}

void PlannedCore::set_stream(StreamId stream) {
  const Lock lock(mutex_);
  stream_ = stream;
}

void PlannedCore::load(Plan plan) {
  set_mode(Mode::kPassthrough);
  const Lock lock(mutex_);
  min_bytes_.store(plan.min_bytes, std::memory_order_relaxed);
  plan_ = std::move(plan);
}

void PlannedCore::set_arena(char* base, size_t num_bytes) {
  const Lock lock(mutex_);
  arena_.store(base, std::memory_order_relaxed);
  arena_bytes_.store(num_bytes, std::memory_order_release);
}

std::optional<char*> PlannedCore::unload_arena() {
  const Lock lock(mutex_);
  if (live_.count() != 0) return std::nullopt;
  arena_bytes_.store(0, std::memory_order_release);
  return arena_.exchange(nullptr);
}

void PlannedCore::set_fill(Fill fill) {
  const Lock lock(mutex_);
  fill_ = fill;
}

std::vector<Event> PlannedCore::events() const {
  const Lock lock(mutex_);
  return log_.events();
}

int64_t PlannedCore::num_events() const {
  const Lock lock(mutex_);
  return static_cast<int64_t>(log_.events().size());
}

Statistics PlannedCore::statistics() const {
  const Lock lock(mutex_);
  Statistics now = statistics_;
  now.arena_bytes = static_cast<int64_t>(arena_bytes_.load(std::memory_order_relaxed));
  now.live_blocks = live_.count();
  now.live_bytes = live_.num_bytes();
  return now;
}

void PlannedCore::reset_statistics() {
  const Lock lock(mutex_);
  statistics_ = {};
  statistics_.peak_bytes = live_.num_bytes();
}

bool PlannedCore::in_arena(const void* address) const {
  const size_t num_bytes = arena_bytes_.load(std::memory_order_acquire);
  const char* base = arena_.load(std::memory_order_relaxed);
  return reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(base) < num_bytes;
}

size_t PlannedCore::num_bytes_of(const void* block) const {
  const Lock lock(mutex_);
  if (!in_arena(block)) return 0;
  return static_cast<size_t>(live_.size_at(static_cast<const char*>(block) - arena()));
}

}  // namespace memo
