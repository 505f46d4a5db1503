#include "process.h"

#include <atomic>
#include <cstdio>
#include <utility>

namespace emulated {
namespace {

constexpr double kGib = double(size_t{1} << 30);

std::atomic<cudaError_t> lasting_error{cudaSuccess};

size_t bytes_of(double gib) { return static_cast<size_t>(gib * kGib); }

}  // namespace

Process::Process()
    : memory({bytes_of(settings().memory_gib), bytes_of(settings().context_gib), bytes_of(settings().host_memory_gib),
              settings().without_numbers}),
      scheduler(settings()) {}

Process& process() {
  static auto* const only = new Process;
  return *only;
}

Thread& thread() {
  thread_local Thread mine;
  return mine;
}

Stream* Process::find_stream(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy) {
    Stream*& found = default_streams_[thread().device];
    if (found == nullptr) found = scheduler.add_stream(thread().device, 0, true, false);
    return found;
  }
  auto* const stream = reinterpret_cast<Stream*>(handle);
  return streams_.count(stream) != 0 ? stream : nullptr;
}

cudaStream_t Process::add_stream(unsigned flags, int priority) {
  Stream* const stream = scheduler.add_stream(thread().device, priority, false, (flags & cudaStreamNonBlocking) == 0);
  streams_.insert(stream);
  return reinterpret_cast<cudaStream_t>(stream);
}

bool Process::remove_stream(cudaStream_t handle) { return streams_.erase(reinterpret_cast<Stream*>(handle)) != 0; }

cudaError_t done(cudaError_t error) {
  const cudaError_t lasting = lasting_error.load();
  const cudaError_t result = lasting != cudaSuccess ? lasting : error;
  if (result != cudaSuccess) thread().last_error = result;
  return result;
}

void fail_for_good(cudaError_t error, const std::string& message) {
  cudaError_t none = cudaSuccess;
  if (lasting_error.compare_exchange_strong(none, error)) {
    std::fprintf(stderr, "emulated GPU: %s\n", message.c_str());
  }
}

void note_synchronization(const char* what) {
  Process& p = process();
  {
    const Lock lock(p.mutex);
    p.count(what);
  }
  if (p.on_synchronization != nullptr) p.on_synchronization(what);
}

cudaError_t wait_for_stream(cudaStream_t handle, const char* what) {
  note_synchronization(what);
  Process& p = process();
  Lock lock(p.mutex);
  Stream* const stream = p.find_stream(handle);
  if (stream == nullptr) return done(cudaErrorInvalidResourceHandle);
  p.scheduler.synchronize_stream(lock, stream);
  return done();
}

cudaError_t wait_for_device(const char* what) {
  note_synchronization(what);
  Process& p = process();
  Lock lock(p.mutex);
  p.scheduler.synchronize_device(lock, thread().device);
  return done();
}

cudaError_t issue(cudaStream_t handle, const char* name, Work work, const Access* access, const Load& load) {
  Process& p = process();
  Lock lock(p.mutex);
  Stream* const stream = p.find_stream(handle);
  if (stream == nullptr) return done(cudaErrorInvalidResourceHandle);
  if (thread().timeless == 0) p.scheduler.timeline().queue();
  p.scheduler.issue(lock, stream, name, std::move(work), access, load);
  return done();
}

Load load_of(Engine engine, const char* kind, size_t num_bytes) {
  const auto size = static_cast<double>(num_bytes);
  return {engine, emulated_seconds(kind, "", &size, 1), nullptr};
}

}  // namespace emulated
