// The begin and end of work of the emulated device.
//
// Without modelled hardware (setting `timed`), time is the host's clock, and the time of an event is when the scheduler
// reached it. With a model, time is virtual and does not depend on work having run: all that a piece of work waits for
// was issued before it, so its begin and end are computed when it is issued, and are the same under every schedule.
//
//   begin   the latest of: the end of the stream's last work, of the events that the stream waits for, the time of the
//           host's call; then the first time at which its engine is free for the whole duration
//   end     begin + the duration of the work by the hardware's model
//
// A device has an engine for kernels and one for copies in each direction. Kernels are assumed to fill their device, so
// two of them never run at the same time; copies and collectives do not slow them down, nor each other. All of these
// are the assumptions of memo.simulate. An engine takes work in the order in which it becomes ready, as far as that is
// known: work that is issued later may use a gap between earlier work.
//
// Each call that queues work and each query whether work is over advances the host's clock by a constant; a wait of the
// host moves it to the end of the work waited for. The host's own computations take no time.
//
// The end of a message between processes is known only when all sides have reached it; work issued behind it waits for
// that (settle). Work that has run always has a known end: all work that it waited for has run, too.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "emulator.h"
#include "settings.h"

namespace emulated {

// The end of something, or any other point in time that may not be known yet.
struct Moment {
  double at_s = 0;
  bool is_known = false;
};
using MomentPtr = std::shared_ptr<Moment>;

class Timeline {
 public:
  explicit Timeline(const Settings& settings);

  bool is_virtual() const { return is_virtual_; }
  // The host's clock.
  double now_s() const;
  // Whether a moment is known not to have come yet.
  bool is_ahead(const Moment& moment) const { return is_virtual_ && moment.is_known && moment.at_s > host_s_; }

  // Called when the host queues work; when it queries whether work is over; when it has waited for a moment.
  void queue() { host_s_ += launch_s_; }
  void ask() { host_s_ += kQuestion_s; }
  void wait_for(const Moment& moment);

  // The end of work that begins at the host's now at the earliest, and after two moments, of which either may be null.
  MomentPtr end_of(const MomentPtr& first, const MomentPtr& second, int device, const Load& load);
  // The later of now and the two.
  MomentPtr joined(const MomentPtr& first, const MomentPtr& second) { return end_of(first, second, 0, {}); }
  // From now on a moment is known, and with it the moments of the work that waited for it.
  void settle(const MomentPtr& moment, double at_s);

  // Seconds by name of work, since the last clear.
  void note(const char* name, double seconds) { taken_s_[name] += seconds; }
  const std::map<std::string, double>& taken_s() const { return taken_s_; }
  void clear_taken() { taken_s_.clear(); }

 private:
  static constexpr double kQuestion_s = 1e-6;  // assumed: cudaEventQuery

  // The busy times of an engine: begins and ends; adjacent ones are one entry.
  class Lane {
   public:
    double take(double ready_s, double seconds);  // the begin
    void forget_before(double at_s);

   private:
    std::map<double, double> busy_;
  };

  struct Unsettled {
    MomentPtr first, second, end;
    double not_before_s;
    int device;
    Load load;
  };

  bool settle_if_possible(const Unsettled& work);

  bool is_virtual_;
  double launch_s_;
  double host_s_ = 0;
  std::map<std::pair<int, Engine>, Lane> lanes_;  // by device
  std::deque<Unsettled> unsettled_;               // in the order of issue
  std::map<std::string, double> taken_s_;
};

}  // namespace emulated
