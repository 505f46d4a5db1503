// Streams, events and host callbacks of the CUDA runtime.
//
// Rules from the reference: an event that was never recorded is done; cudaEventQuery and cudaStreamQuery return
// cudaErrorNotReady while work is left, and store it as the last error, too; the time between two events
// can be asked only when both are done, were recorded and measure time; a destroyed stream finishes its work; a host
// function is work on a stream, runs without the stream's later work beside it, and must not call CUDA.
#include "process.h"

#include <algorithm>

using namespace emulated;

namespace {

struct Event {
  bool measures_time;
  MarkPtr mark;  // of the latest recording
};

Event* event_of(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }

constexpr double kMillisecondsPerSecond = 1e3;

}  // namespace

EXPORTED cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  const Lock lock(process().mutex);
  process().count("cudaStreamCreate");
  *stream = process().add_stream(flags, priority);
  return done();
}

EXPORTED cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

EXPORTED cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}

EXPORTED cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const Lock lock(process().mutex);
  return done(process().remove_stream(stream) ? cudaSuccess : cudaErrorInvalidResourceHandle);
}

EXPORTED cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  const Lock lock(process().mutex);
  const Stream* const stream = process().find_stream(handle);
  if (stream == nullptr) return done(cudaErrorInvalidResourceHandle);
  *priority = stream->priority;
  return done();
}

EXPORTED cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (thread().mute > 0) return done();  // the kernel that it would wait for was not launched
  return wait_for_stream(stream, "cudaStreamSynchronize");
}

EXPORTED cudaError_t cudaStreamQuery(cudaStream_t handle) {
  Lock lock(process().mutex);
  Stream* const stream = process().find_stream(handle);
  if (stream == nullptr) return done(cudaErrorInvalidResourceHandle);
  return done(process().scheduler.query_stream(lock, stream) ? cudaSuccess : cudaErrorNotReady);
}

EXPORTED cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  Lock lock(process().mutex);
  process().count("cudaStreamWaitEvent");
  Stream* const stream = process().find_stream(handle);
  if (stream == nullptr || event == nullptr) return done(cudaErrorInvalidResourceHandle);
  const MarkPtr mark = event_of(event)->mark;
  if (mark == nullptr) {
    process().scheduler.wait_for_nothing();
  } else {
    process().scheduler.wait(lock, stream, mark);
  }
  return done();
}

EXPORTED cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  const Lock lock(process().mutex);
  process().count("cudaEventCreate");
  *event = reinterpret_cast<cudaEvent_t>(new Event{(flags & cudaEventDisableTiming) == 0, nullptr});
  return done();
}

EXPORTED cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }

EXPORTED cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const Lock lock(process().mutex);
  delete event_of(event);
  return done();
}

EXPORTED cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  Lock lock(process().mutex);
  process().count("cudaEventRecord");
  Stream* const stream = process().find_stream(handle);
  if (stream == nullptr || event == nullptr) return done(cudaErrorInvalidResourceHandle);
  event_of(event)->mark = process().scheduler.record(lock, stream);
  return done();
}

EXPORTED cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

EXPORTED cudaError_t cudaEventQuery(cudaEvent_t event) {
  Lock lock(process().mutex);
  process().count("cudaEventQuery");
  const MarkPtr mark = event_of(event)->mark;
  return done(mark == nullptr || process().scheduler.query(lock, mark) ? cudaSuccess : cudaErrorNotReady);
}

EXPORTED cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  note_synchronization("cudaEventSynchronize");
  Lock lock(process().mutex);
  const MarkPtr mark = event_of(event)->mark;
  if (mark == nullptr) {
    process().scheduler.wait_for_nothing();
  } else {
    process().scheduler.synchronize(lock, mark);
  }
  return done();
}

EXPORTED cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  const Lock lock(process().mutex);
  for (const Event* event : {event_of(begin), event_of(end)}) {
    if (event->mark == nullptr || !event->measures_time) return done(cudaErrorInvalidResourceHandle);
    if (!process().scheduler.is_over(*event->mark)) return done(cudaErrorNotReady);
  }
  const double taken_s = event_of(end)->mark->moment->at_s - event_of(begin)->mark->moment->at_s;
  *milliseconds = static_cast<float>(std::max(0.0, taken_s) * kMillisecondsPerSecond);
  return done();
}

EXPORTED cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return issue(stream, "host function", [function, data] { return function(data), true; }, nullptr, {});
}

EXPORTED cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data, unsigned) {
  const auto call = [=] { return callback(stream, cudaSuccess, data), true; };
  return issue(stream, "stream callback", call, nullptr, {});
}

// Graphs are not emulated: no stream is ever captured.
EXPORTED cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return done();
}

EXPORTED cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                              cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                              size_t* num_dependencies) {
  if (status != nullptr) *status = cudaStreamCaptureStatusNone;
  if (id != nullptr) *id = 0;
  if (num_dependencies != nullptr) *num_dependencies = 0;
  return done();
}

EXPORTED cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return done(); }
