#include "timeline.h"

#include <algorithm>
#include <chrono>
#include <iterator>

namespace emulated {
namespace {

bool is_open(const MomentPtr& moment) { return moment != nullptr && !moment->is_known; }

double at_or_zero(const MomentPtr& moment) { return moment == nullptr ? 0 : moment->at_s; }

}  // namespace

Timeline::Timeline(const Settings& settings)
    : is_virtual_(!settings.timed.empty()), launch_s_(settings.host_launch_s) {}

double Timeline::now_s() const {
  if (is_virtual_) return host_s_;
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void Timeline::wait_for(const Moment& moment) { host_s_ = std::max(host_s_, moment.at_s); }

MomentPtr Timeline::end_of(const MomentPtr& first, const MomentPtr& second, int device, const Load& load) {
  Unsettled work{first, second, std::make_shared<Moment>(), host_s_, device, load};
  if (!settle_if_possible(work)) unsettled_.push_back(work);
  return work.end;
}

void Timeline::settle(const MomentPtr& moment, double at_s) {
  *moment = {at_s, true};
  std::deque<Unsettled> left;
  for (const Unsettled& work : unsettled_) {  // each waits only for work issued before it: one pass finds all
    if (!settle_if_possible(work)) left.push_back(work);
  }
  unsettled_.swap(left);
}

bool Timeline::settle_if_possible(const Unsettled& work) {
  if (is_open(work.first) || is_open(work.second)) return false;
  double begin_s = std::max({work.not_before_s, at_or_zero(work.first), at_or_zero(work.second)});
  if (work.load.engine != Engine::kNone && work.load.seconds > 0) {
    Lane& lane = lanes_[{work.device, work.load.engine}];
    // New work does not begin before now; unsettled work may.
    lane.forget_before(unsettled_.empty() ? host_s_ : unsettled_.front().not_before_s);
    begin_s = lane.take(begin_s, work.load.seconds);
  }
  *work.end = {begin_s + work.load.seconds, true};
  return true;
}

double Timeline::Lane::take(double ready_s, double seconds) {
  double begin_s = ready_s;
  auto next = busy_.upper_bound(begin_s);
  if (next != busy_.begin()) begin_s = std::max(begin_s, std::prev(next)->second);
  for (; next != busy_.end() && next->first < begin_s + seconds; ++next) begin_s = std::max(begin_s, next->second);
  double end_s = begin_s + seconds;
  if (next != busy_.end() && next->first == end_s) {
    end_s = next->second;
    next = busy_.erase(next);
  }
  if (next != busy_.begin() && std::prev(next)->second == begin_s) {
    std::prev(next)->second = end_s;
  } else {
    busy_[begin_s] = end_s;
  }
  return begin_s;
}

void Timeline::Lane::forget_before(double at_s) {
  while (!busy_.empty() && busy_.begin()->second <= at_s) busy_.erase(busy_.begin());
}

}  // namespace emulated
