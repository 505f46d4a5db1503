// The state of the emulated GPUs in one process: mutex, memory, scheduler, streams, counters and errors.
//
// Errors as CUDA documents them: a call returns its own error and stores it as the thread's last one, which
// cudaGetLastError() returns and clears and cudaPeekAtLastError() only returns. An error of a kernel is returned by the
// next synchronisation or call, belongs to the whole process and sticks: every call returns it until the process ends.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "absent.h"
#include "memory.h"
#include "scheduler.h"
#include "settings.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace emulated {

struct Process {
  Process();

  // The stream of a handle; nullptr: there is none (cudaErrorInvalidResourceHandle).
  Stream* find_stream(cudaStream_t handle);
  cudaStream_t add_stream(unsigned flags, int priority);
  bool remove_stream(cudaStream_t handle);

  void count(const std::string& what, int64_t times = 1) { counts[what] += times; }

  std::mutex mutex;
  Memory memory;
  Scheduler scheduler;
  AbsentNumbers absent;
  std::map<std::string, int64_t> counts;
  // Called without the mutex, with the name of the call that made the host wait; nullptr: nothing is called.
  void (*on_synchronization)(const char* what) = nullptr;

 private:
  std::set<Stream*> streams_;               // those that the program made and did not destroy
  std::map<int, Stream*> default_streams_;  // by device
};

// One for each process, never destroyed: threads may still call while static objects end.
Process& process();

// The calling thread's device, and its nesting in host code that launches nothing, or whose work takes no time.
struct Thread {
  int device = 0;
  int mute = 0;
  int timeless = 0;
  cudaError_t last_error = cudaSuccess;
};
Thread& thread();

// The return value of a call: `error`, or the error that sticks. Every call ends with it.
cudaError_t done(cudaError_t error = cudaSuccess);
// From now on this error sticks.
void fail_for_good(cudaError_t error, const std::string& message);

// The host waits for a device, stream or event: counted under `what`, and reported to on_synchronization.
void note_synchronization(const char* what);
cudaError_t wait_for_stream(cudaStream_t handle, const char* what);
cudaError_t wait_for_device(const char* what);

// Appends work to a stream; fails if the handle has none.
cudaError_t issue(cudaStream_t handle, const char* name, Work work, const Access* access, const Load& load);

// The load of a copy, or of a kernel that only reads and writes: `kind` as of emulated_seconds.
Load load_of(Engine engine, const char* kind, size_t num_bytes);

}  // namespace emulated
