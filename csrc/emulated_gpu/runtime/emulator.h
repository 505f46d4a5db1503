// The interface of the emulated runtime (libcudart) for the other parts: operators, collectives, and Python by ctypes.
//
// A piece of device work is a closure with the byte ranges that it reads and writes. Closures hold addresses, never
// tensors: on a GPU, too, a kernel that was launched does not keep its memory alive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace emulated {

struct Range {
  uintptr_t begin;
  uintptr_t end;
};

struct Access {
  std::vector<Range> reads;
  std::vector<Range> writes;
};

inline Range bytes_at(const void* address, size_t num_bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  return {begin, begin + num_bytes};
}

// With the setting without_numbers, tensors larger than this have no content: nothing is computed, copied or filled.
// Smaller tensors have content, because the host decides by it: the plans of ranks, a number of tokens. Small tensors
// that depend on larger ones (a loss, a norm) are absent: zeros, and so is everything that depends on them.
constexpr size_t kMostRealBytes = size_t{64} << 10;

// Runs some of the work and never blocks. False: the work waits for another process; it is called again later.
using Work = std::function<bool()>;

// The engine of a device that does the work (timeline.h). kNone: none that other work could need at the same time.
enum class Engine { kNone, kKernels, kToDevice, kToHost };

// A message between processes: the runtime sets the time at which this side reaches it before the work runs; the work
// sets the time of its end before it is done.
struct Meeting {
  double here_s = 0;
  double over_s = 0;
};

// The virtual time of a piece of work. With a meeting, its end is the meeting's.
struct Load {
  Engine engine = Engine::kNone;
  double seconds = 0;
  std::shared_ptr<Meeting> meeting;
};

}  // namespace emulated

extern "C" {

// Appends work to a CUDA stream (cudaStream_t; nullptr: the default stream of the calling thread's device).
// `name` must live as long as the process.
void emulated_enqueue(void* stream, const char* name, emulated::Work* work, const emulated::Access* access,
                      const emulated::Load* load);

// Whether time is virtual.
int emulated_is_timed();
// The seconds of a piece of work by the model of the hardware; 0 without a model. `kind` and its sizes are those of
// memo/emulated_gpu/timing.py, `dtype` is torch's name of one. It calls Python: hold no lock.
double emulated_seconds(const char* kind, const char* dtype, const double* sizes, int num_sizes);

// Between +1 and -1 the calling thread's launches, copies and fills do nothing: an operator's host code runs only for
// its checks, its shapes and its requests for memory.
void emulated_mute(int change);
int emulated_is_mute();

// An operator of the host reads and writes these bytes now; bytes outside pinned memory are ignored.
void emulated_use_on_host(const char* name, const emulated::Access* access);

// The host waits for a stream, like an operator that must read its own numbers; `why` is the name in the counters.
void emulated_wait_for_stream(void* stream, const char* why);

// A kernel had an error that its launch could not find: from now on every call fails (cudaErrorLaunchFailure).
void emulated_kernel_failed(const char* message);

void emulated_count(const char* what);
int emulated_is_device_memory(const void* address);
int emulated_checks_races();
// Whether memory of this size has content.
int emulated_has_numbers(size_t num_bytes);
// The first returns whether numbers in the range are absent, the second sets it from now on.
int emulated_is_absent(const emulated::Range* range);
void emulated_set_absent(const emulated::Range* range, int is_absent);
int emulated_poisons();
double emulated_max_product_gflop();

// `tell` is called when the host has waited too long, after the runtime's own message. It must not call the runtime.
void emulated_on_hang(void (*tell)());

// From now on the device also works while no thread of the host waits for it: other processes wait for its work.
void emulated_work_unattended();
}
