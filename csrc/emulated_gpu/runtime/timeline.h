// The time that events of the emulated device tell. Today it is the host's; a clock that follows a model of the
// hardware needs to replace this file alone.
#pragma once

#include <chrono>

namespace emulated {

class Timeline {
 public:
  double now_s() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
};

}  // namespace emulated
