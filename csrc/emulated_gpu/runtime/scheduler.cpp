#include "scheduler.h"

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <unistd.h>
#include <utility>

namespace emulated {
namespace {

// A loop of the host that queries an event until it is done must end, even on a lazy device.
constexpr int kMostQueries = 100;
constexpr int kMostWaits = 64;            // of one stream for another, for another, and so on
constexpr uint64_t kMostRandomSteps = 3;  // after one call of the host
// Pauses of the host before it queries another process again: each is twice as long as the last, up to the longest.
constexpr auto kFirstPause = std::chrono::microseconds(50), kLongestPause = std::chrono::microseconds(1600);
// In a Python process, this signal makes Python write the stacks of all its threads (memo/emulated_gpu/face.py).
constexpr int kHangSignal = 40;

thread_local bool hides_waits = false, hides_recordings = false;

}  // namespace

void Scheduler::hide(bool waits, bool recordings) {
  hides_waits = waits;
  hides_recordings = recordings;
}

Scheduler::Scheduler(const Settings& settings)
    : checks_races(settings.check_races), timeline_(settings), hang_s_(settings.hang_s) {
  set_policy(settings.schedule, settings.seed);
}

void Scheduler::set_policy(const std::string& name, uint64_t seed) {
  if (name == "eager") {
    policy_ = Policy::kEager;
  } else if (name == "lazy") {
    policy_ = Policy::kLazy;
  } else if (name == "random") {
    policy_ = Policy::kRandom;
  } else {
    std::fprintf(stderr, "emulated GPU: schedule is '%s': it can be eager, lazy or random\n", name.c_str());
    std::exit(2);
  }
  random_.seed(seed);
}

Stream* Scheduler::add_stream(int device, int priority, bool is_legacy, bool is_blocking) {
  auto stream = std::make_unique<Stream>();
  stream->id = static_cast<int>(streams_.size());
  stream->device = device;
  stream->priority = priority;
  stream->is_legacy = is_legacy;
  stream->is_blocking = is_blocking;
  stream->weight = static_cast<double>(random_() % 1000);
  stream->last = std::make_shared<Moment>(Moment{0, true});
  streams_.push_back(std::move(stream));
  return streams_.back().get();
}

void Scheduler::issue(Lock& lock, Stream* stream, const char* name, Work work, const Access* access, const Load& load) {
  order_with_legacy(lock, stream);
  judge_waits(stream);
  stream->clock.join(host_);
  stream->clock.advance(stream->id, ++stream->num_issued);
  if (checks_races && access != nullptr) races.access({stream->id, stream->num_issued, name, stream->clock}, *access);
  stream->queue.push_back({name, std::move(work)});
  if (timeline_.is_virtual()) time(stream, &stream->queue.back(), load);
  work_on(lock);
}

void Scheduler::time(Stream* stream, Item* item, const Load& load) {
  timeline_.note(item->name, load.seconds);
  if (load.meeting == nullptr) {
    stream->last = timeline_.end_of(stream->last, nullptr, stream->device, load);
    return;
  }
  item->meeting = load.meeting;
  item->begin = timeline_.joined(stream->last, nullptr);
  stream->last = item->end = std::make_shared<Moment>();
}

MarkPtr Scheduler::record(Lock& lock, Stream* stream) {
  order_with_legacy(lock, stream);
  MarkPtr mark = append_record(stream);
  work_on(lock);
  return mark;
}

void Scheduler::wait(Lock& lock, Stream* stream, const MarkPtr& mark) {
  order_with_legacy(lock, stream);
  if (!hides_waits) {
    if (stream->waits.empty()) stream->clock_without_waits = stream->clock;
    stream->waits.emplace_back(redundant_.size(), mark->clock);
  }
  redundant_.push_back(false);
  append_wait(stream, mark);
  work_on(lock);
}

// Before the stream's next work, or a mark that hands its clock on: finds which of the waits since the last one could
// be left out, one at a time.
void Scheduler::judge_waits(Stream* stream) {
  for (const auto& [number, clock] : stream->waits) {
    VectorClock known = stream->clock_without_waits;
    known.join(host_);
    for (const auto& [other, others_clock] : stream->waits) {
      if (other != number) known.join(others_clock);
    }
    redundant_[number] = known.has_all(clock);
  }
  stream->waits.clear();
}

void Scheduler::use_on_host(Lock&, const char* name, const Access& access) {
  host_.advance(kHost, ++num_host_uses_);
  races.access({kHost, num_host_uses_, name, host_}, access);
}

void Scheduler::order_with_legacy(Lock&, Stream* stream) {
  if (!stream->is_legacy && !stream->is_blocking) return;
  for (const auto& other : streams_) {
    if (other.get() == stream || other->device != stream->device) continue;
    const bool is_ordered = stream->is_legacy ? other->is_blocking : other->is_legacy;
    if (is_ordered) append_wait(stream, append_record(other.get()));
  }
}

void Scheduler::append_wait(Stream* stream, const MarkPtr& mark) {
  if (!hides_waits) stream->clock.join(mark->clock);
  if (timeline_.is_virtual()) stream->last = timeline_.joined(stream->last, mark->moment);
  if (!mark->is_done) stream->queue.push_back({"wait for an event", nullptr, mark});
}

MarkPtr Scheduler::append_record(Stream* stream) {
  judge_waits(stream);
  auto mark = std::make_shared<Mark>();
  mark->stream = stream;
  if (!hides_recordings) mark->clock = stream->clock;
  mark->moment = timeline_.is_virtual() ? timeline_.joined(stream->last, nullptr) : std::make_shared<Moment>();
  if (stream->queue.empty()) {
    reach(mark.get());
  } else {
    stream->queue.push_back({"record an event", nullptr, nullptr, mark});
  }
  return mark;
}

void Scheduler::reach(Mark* mark) {
  mark->is_done = true;
  if (!timeline_.is_virtual()) timeline_.settle(mark->moment, timeline_.now_s());
}

// The device's own steps after a call of the host.
void Scheduler::work_on(Lock& lock) {
  if (policy_ == Policy::kEager) {
    while (step_all(lock)) {
    }
  } else if (policy_ == Policy::kRandom) {
    step_randomly(lock);
  }
}

// Of the streams that can make a step, the one with the largest weight makes it; now and then a weight changes.
void Scheduler::step_randomly(Lock& lock) {
  std::vector<Stream*> busy;
  for (uint64_t left = random_() % (kMostRandomSteps + 1); left > 0; --left) {
    busy.clear();
    for (const auto& stream : streams_) {
      if (!stream->queue.empty()) busy.push_back(stream.get());
    }
    if (busy.empty()) return;
    if (random_() % 8 == 0) busy[random_() % busy.size()]->weight = static_cast<double>(random_() % 1000);
    std::stable_sort(busy.begin(), busy.end(), [](Stream* a, Stream* b) { return a->weight > b->weight; });
    for (Stream* stream : busy) {
      if (step(lock, stream)) break;
    }
  }
}

bool Scheduler::step_all(Lock& lock) {
  bool did = false;
  for (size_t i = 0; i < streams_.size(); ++i) did |= step(lock, streams_[i].get());
  return did;
}

// The first entry of the queue, if nothing holds it up.
bool Scheduler::step(Lock& lock, Stream* stream) {
  if (stream->is_running || stream->queue.empty()) return false;
  Item& first = stream->queue.front();
  if (first.wait && !first.wait->is_done) return false;
  bool is_done = true;
  if (first.work) {
    // References to the elements of a deque stay valid while others are appended, and only this thread removes.
    stream->is_running = true;
    if (first.meeting) first.meeting->here_s = first.begin->at_s;
    lock.unlock();
    is_done = first.work();
    lock.lock();
    stream->is_running = false;
  }
  if (!is_done) return false;
  if (first.meeting) timeline_.settle(first.end, first.meeting->over_s);
  if (first.record) reach(first.record.get());
  stream->queue.pop_front();
  stream->num_queries = 0;
  changed_.notify_all();
  return true;
}

// One step of the stream, or of the work that it waits for; no other stream makes one.
bool Scheduler::advance_towards(Lock& lock, Stream* stream) {
  for (int depth = 0; depth < kMostWaits && !stream->queue.empty(); ++depth) {
    const MarkPtr& wait = stream->queue.front().wait;
    if (!wait || wait->is_done) return step(lock, stream);
    stream = wait->stream;
  }
  return false;
}

void Scheduler::run_until_done(Lock& lock, const MarkPtr& mark) {
  const auto begin = std::chrono::steady_clock::now();
  auto pause = kFirstPause;
  bool is_told = false;
  while (!mark->is_done) {
    if (advance_towards(lock, mark->stream) || step_all(lock)) {
      pause = kFirstPause;
      continue;
    }
    changed_.wait_for(lock, pause);  // another thread or another process must go on
    pause = std::min(2 * pause, kLongestPause);
    if (!is_told && std::chrono::steady_clock::now() - begin > std::chrono::duration<double>(hang_s_)) {
      is_told = true;
      tell_hang(*mark);
    }
  }
}

void Scheduler::tell_hang(const Mark& mark) const {
  std::fprintf(stderr, "emulated GPU: process %d has waited for stream %d for %.0f s:\n", getpid(), mark.stream->id,
               hang_s_);
  for (const auto& stream : streams_) {
    if (stream->queue.empty()) continue;
    std::fprintf(stderr, "  stream %d has %zu operations left, the first is '%s'\n", stream->id,
                 stream->queue.size(), stream->queue.front().name);
  }
  if (tell_more_of_hang != nullptr) tell_more_of_hang();
  struct sigaction now {};
  if (sigaction(kHangSignal, nullptr, &now) == 0 && now.sa_handler != SIG_DFL) (void)raise(kHangSignal);
}

// Queries never wait: the answer may depend on another process, which may depend on this host's next call.
bool Scheduler::query(Lock& lock, const MarkPtr& mark) {
  if (timeline_.is_virtual()) {
    timeline_.ask();
    if (!timeline_.is_ahead(*mark->moment)) run_what_can(lock, mark->stream, &mark->is_done);
  } else {
    const bool is_asked_often = !mark->is_done && ++mark->stream->num_queries > kMostQueries;
    if (!mark->is_done && (policy_ != Policy::kLazy || is_asked_often)) advance_towards(lock, mark->stream);
  }
  if (is_over(*mark)) host_.join(mark->clock);
  return is_over(*mark);
}

bool Scheduler::query_stream(Lock& lock, Stream* stream) {
  if (timeline_.is_virtual()) {
    timeline_.ask();
    if (!timeline_.is_ahead(*stream->last)) run_what_can(lock, stream, nullptr);
    if (timeline_.is_ahead(*stream->last)) return false;
  } else if (policy_ != Policy::kLazy || ++stream->num_queries > kMostQueries) {
    advance_towards(lock, stream);
  }
  while (!stream->queue.empty() && !stream->queue.front().work && step(lock, stream)) {
  }  // a queue of marks is not work
  if (!stream->queue.empty()) return false;
  synchronize_stream(lock, stream);
  return true;
}

// Runs all of a stream, or until something is done, as far as possible without other threads and processes.
void Scheduler::run_what_can(Lock& lock, Stream* stream, const bool* is_done) {
  while ((is_done == nullptr || !*is_done) && advance_towards(lock, stream)) {
  }
}

void Scheduler::synchronize(Lock& lock, const MarkPtr& mark) {
  redundant_.push_back(host_.has_all(mark->clock));
  run_until_done(lock, mark);
  if (!hides_waits) host_.join(mark->clock);
  timeline_.wait_for(*mark->moment);
}

void Scheduler::synchronize_stream(Lock& lock, Stream* stream) { synchronize(lock, append_record(stream)); }

void Scheduler::synchronize_device(Lock& lock, int device) {
  std::vector<MarkPtr> marks;
  for (const auto& stream : streams_) {
    if (stream->device == device) marks.push_back(append_record(stream.get()));
  }
  for (const MarkPtr& mark : marks) synchronize(lock, mark);
}

bool Scheduler::is_idle(int device) const {
  return std::all_of(streams_.begin(), streams_.end(),
                     [device](const auto& stream) { return stream->device != device || stream->queue.empty(); });
}

}  // namespace emulated
