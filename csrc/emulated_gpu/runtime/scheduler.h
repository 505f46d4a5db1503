// Streams are queues of closures, and the scheduler decides when each of them runs.
//
//   eager    as soon as the work that it waits for is done: a GPU that is always faster than its host
//   lazy     only if the host waits for it: a GPU that is always slower
//   random   a few steps now and then, of streams in a changing order; each seed gives a different order
//
// A program whose streams are ordered as CUDA asks for has the same results under all of them.
//
// Rules from the CUDA programming guide and the runtime's reference:
// - Work on one stream runs in the order of its issue.
// - An event represents the work that was on the stream when it was recorded. cudaStreamWaitEvent waits for the most
//   recent recording at the time of the call; a later recording changes nothing for it. An event that was never
//   recorded is done.
// - The legacy default stream of a device and its blocking streams (those without cudaStreamNonBlocking) wait for one
//   another: work on the one begins after all earlier work on the others.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "emulator.h"
#include "race_checker.h"
#include "settings.h"
#include "timeline.h"
#include "vector_clock.h"

namespace emulated {

using Lock = std::unique_lock<std::mutex>;

struct Stream;

// One recording of an event: a place in a stream.
struct Mark {
  Stream* stream;
  VectorClock clock;  // of the operations that happened before it
  MomentPtr moment;
  bool is_done = false;
};
using MarkPtr = std::shared_ptr<Mark>;

// One entry of a queue: exactly one of work, wait and record is set.
struct Item {
  const char* name;
  Work work = nullptr;
  MarkPtr wait = nullptr;
  MarkPtr record = nullptr;
  // Of work that is a message between processes, in virtual time.
  std::shared_ptr<Meeting> meeting = nullptr;
  MomentPtr begin = nullptr, end = nullptr;
};

struct Stream {
  int id;
  int device;
  int priority;
  bool is_legacy;
  bool is_blocking;  // it and the legacy stream of its device wait for each other
  std::deque<Item> queue;
  bool is_running = false;  // a thread is inside its first closure
  uint64_t num_issued = 0;
  int num_queries = 0;  // of the host, since the last step
  MomentPtr last;       // the end of the work issued so far, in virtual time
  VectorClock clock;
  // The clock of its next work if it waited for none of `waits`; each of these has its number and clock.
  VectorClock clock_without_waits;
  std::vector<std::pair<uint64_t, VectorClock>> waits;
  double weight = 0;  // of the random schedule
};

enum class Policy { kEager, kLazy, kRandom };

// All members require that the mutex of `lock` is held; while a closure runs it is released.
class Scheduler {
 public:
  explicit Scheduler(const Settings& settings);

  Stream* add_stream(int device, int priority, bool is_legacy, bool is_blocking);
  void issue(Lock& lock, Stream* stream, const char* name, Work work, const Access* access, const Load& load);
  MarkPtr record(Lock& lock, Stream* stream);
  void wait(Lock& lock, Stream* stream, const MarkPtr& mark);
  // The host itself reads or writes memory that the device uses, too.
  void use_on_host(Lock& lock, const char* name, const Access& access);

  // Whether the mark is done, as the host sees it. In virtual time: whether its time has come; the work before it is
  // run before a yes. The answer is no while that work waits for another process.
  bool query(Lock& lock, const MarkPtr& mark);
  bool query_stream(Lock& lock, Stream* stream);
  bool is_over(const Mark& mark) const { return mark.is_done && !timeline_.is_ahead(*mark.moment); }
  // The host waits.
  void synchronize(Lock& lock, const MarkPtr& mark);
  void synchronize_stream(Lock& lock, Stream* stream);
  void synchronize_device(Lock& lock, int device);
  // One step of every stream that can make one. False: there was none.
  bool step_all(Lock& lock);

  // Whether a wait of a stream or of the host orders nothing new: without it, the work before its mark also happened
  // before the stream's next work. Waits count from 0, in the order of their calls; wait_for_nothing() counts a wait
  // without a mark.
  uint64_t num_waits() const { return redundant_.size(); }
  bool is_wait_redundant(uint64_t number) const { return number < redundant_.size() && redundant_[number]; }
  void wait_for_nothing() { redundant_.push_back(true); }

  // From now on the calling thread's waits, or recordings, are kept, but the clocks ignore them: the race checker
  // judges the program as if those calls were not in it, while its numbers stay the same.
  static void hide(bool waits, bool recordings);

  void set_policy(const std::string& name, uint64_t seed);
  bool is_idle(int device) const;
  Timeline& timeline() { return timeline_; }

  void (*tell_more_of_hang)() = nullptr;
  bool checks_races;
  RaceChecker races;

 private:
  void order_with_legacy(Lock& lock, Stream* stream);
  void append_wait(Stream* stream, const MarkPtr& mark);
  MarkPtr append_record(Stream* stream);
  void reach(Mark* mark);
  void time(Stream* stream, Item* item, const Load& load);
  void judge_waits(Stream* stream);
  void work_on(Lock& lock);
  void step_randomly(Lock& lock);
  bool step(Lock& lock, Stream* stream);
  bool advance_towards(Lock& lock, Stream* stream);
  void run_what_can(Lock& lock, Stream* stream, const bool* is_done);
  void run_until_done(Lock& lock, const MarkPtr& mark);
  void tell_hang(const Mark& mark) const;

  std::vector<std::unique_ptr<Stream>> streams_;  // never shortened: work of a destroyed stream continues
  Policy policy_ = Policy::kEager;
  std::mt19937_64 random_;
  VectorClock host_;  // of the operations before the host's next one; one clock for all of its threads
  uint64_t num_host_uses_ = 0;
  std::vector<bool> redundant_;  // by number of the wait
  Timeline timeline_;
  std::condition_variable changed_;
  double hang_s_;
};

}  // namespace emulated
