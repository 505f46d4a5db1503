// Streams are queues of closures, and the scheduler decides when which of them runs.
//
//   eager    at once, as soon as what it waits for is done: a GPU that is always faster than its host
//   lazy     only when the host waits, and only what it waits for: a GPU that is always slower
//   random   a few steps now and then, of streams in an order that changes; a seed gives a different one
//
// A program whose streams are ordered as CUDA asks for has the same results under all of them.
//
// Rules from the CUDA programming guide and the runtime's reference:
// - Work on one stream runs in the order of its issue.
// - An event stands for the work that was on the stream when it was recorded. cudaStreamWaitEvent waits for the most
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
  VectorClock clock;  // what happened before it
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
  MomentPtr last;       // when what was issued so far is over, in virtual time
  VectorClock clock;
  // What happened before its next work if it waits for none of these, whose number and clock they are.
  VectorClock clock_without_waits;
  std::vector<std::pair<uint64_t, VectorClock>> waits;
  double weight = 0;  // of the random schedule
};

enum class Policy { kEager, kLazy, kRandom };

// All members want the mutex of `lock` to be held; while a closure runs it is released.
class Scheduler {
 public:
  explicit Scheduler(const Settings& settings);

  Stream* add_stream(int device, int priority, bool is_legacy, bool is_blocking);
  void issue(Lock& lock, Stream* stream, const char* name, Work work, const Access* access, const Load& load);
  MarkPtr record(Lock& lock, Stream* stream);
  void wait(Lock& lock, Stream* stream, const MarkPtr& mark);
  // The host itself reads or writes memory that the device uses, too.
  void use_on_host(Lock& lock, const char* name, const Access& access);

  // Whether the mark is done, as the host sees it when it asks. In virtual time that is whether its time has come, and
  // what the answer promises has then run; it is no as long as that takes another process.
  bool query(Lock& lock, const MarkPtr& mark);
  bool query_stream(Lock& lock, Stream* stream);
  bool is_over(const Mark& mark) const { return mark.is_done && !timeline_.is_ahead(*mark.moment); }
  // The host waits.
  void synchronize(Lock& lock, const MarkPtr& mark);
  void synchronize_stream(Lock& lock, Stream* stream);
  void synchronize_device(Lock& lock, int device);
  // One step of every stream that can make one. False: there was none.
  bool step_all(Lock& lock);

  // Whether a wait of a stream or of the host orders nothing new: whatever its mark stands for happened before the
  // stream's next work anyhow. Waits count from 0, in the order of their calls; one of no mark must be told.
  uint64_t num_waits() const { return redundant_.size(); }
  bool is_wait_redundant(uint64_t number) const { return number < redundant_.size() && redundant_[number]; }
  void wait_for_nothing() { redundant_.push_back(true); }

  // What the calling thread waits for, or records, from now on keeps its place in time and tells the clocks nothing: the
  // race checker judges the program as if those calls were not in it, and its numbers stay what they are.
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

  std::vector<std::unique_ptr<Stream>> streams_;  // never shortened: work of a destroyed stream goes on
  Policy policy_ = Policy::kEager;
  std::mt19937_64 random_;
  VectorClock host_;  // what happened before whatever the host does next; one for all of its threads
  uint64_t num_host_uses_ = 0;
  std::vector<bool> redundant_;  // by number of the wait
  Timeline timeline_;
  std::condition_variable changed_;
  double hang_s_;
};

}  // namespace emulated
