// What the emulated runtime (libcudart) offers to the other parts: operators, collectives, and Python by way of ctypes.
//
// A piece of device work is a closure with the byte ranges that it reads and writes. Closures hold addresses, never
// tensors: on a GPU, too, a kernel that was launched does not keep its memory alive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
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

// Runs some of the work and never blocks. False: it waits for another process; it is called again later.
using Work = std::function<bool()>;

}  // namespace emulated

extern "C" {

// Appends work to a CUDA stream (cudaStream_t; nullptr: the default stream of the calling thread's device).
// `name` must live as long as the process.
void emulated_enqueue(void* stream, const char* name, emulated::Work* work, const emulated::Access* access);

// Between +1 and -1 the calling thread's launches, copies and fills do nothing: an operator's host code runs for its
// checks, its shapes and its requests for memory alone.
void emulated_mute(int change);
int emulated_is_mute();

// The host waits for a stream, as an operator does that must read its own numbers; `why` is what the counters show.
void emulated_wait_for_stream(void* stream, const char* why);

// A kernel met an error that no launch could foresee: from now on every call fails (cudaErrorLaunchFailure).
void emulated_kernel_failed(const char* message);

void emulated_count(const char* what);
int emulated_is_device_memory(const void* address);
int emulated_checks_races();
int emulated_poisons();
double emulated_max_product_gflop();

// From now on the device also works while no thread of the host waits for it: other processes wait for its work.
void emulated_work_unattended();
}
