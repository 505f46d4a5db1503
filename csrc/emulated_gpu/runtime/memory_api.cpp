// Memory of the CUDA runtime: allocations, pinned memory, copies and fills.
//
// Rules from the reference ("API synchronization behavior" and each function's page):
// - A copy between device memory and pinned memory is asynchronous.
// - From pageable memory to the device, the source is staged before the call returns: it may change at once. The
//   synchronous call waits until the data is on the device, the asynchronous one does not. But a driver may wait for
//   the stream before it stages, so both count as waits of the host.
// - From the device to pageable memory, both calls return only after the copy is done.
// - cudaFree, cudaFreeHost and cudaHostUnregister end memory that work may still use; each waits for the device first.
// - A copy that reaches outside an allocation is cudaErrorInvalidValue; a copy whose memory is gone when it runs is
//   cudaErrorIllegalAddress, which sticks.
// Without numbers, large copies and fills only keep their place on their stream; a copy to pageable memory writes
// zeros.
#include "process.h"

#include <cstring>
#include <utility>

using namespace emulated;

namespace {

// Drivers from r580 on refuse to register so many bytes in one call (NVIDIA/open-gpu-kernel-modules pull 1234).
constexpr size_t kTooManyToRegister = size_t{512} << 30;

// The name of a copy in counters and reports, by its source and target.
const char* copy_name(bool to_device, bool from_device) {
  if (to_device) return from_device ? "copy device to device" : "copy host to device";
  return from_device ? "copy device to host" : "copy host to host";
}

bool is_device_kind(const Block* block) {
  return block != nullptr && (block->kind == Kind::kDevice || block->kind == Kind::kManaged);
}

bool is_still_there(const Range& range, const char* name) {
  Process& p = process();
  {
    const Lock lock(p.mutex);
    if (p.memory.covers(range)) return true;
  }
  fail_for_good(cudaErrorIllegalAddress, std::string(name) + ": the memory was freed before the work ran");
  return false;
}

struct Ends {
  bool to_device, from_device, is_pageable, is_inside;
};

// A copy within the device is a kernel that reads and writes. The link to the host has an engine for each direction.
Load load_of_copy(const Ends& ends, size_t num_bytes) {
  if (ends.to_device && ends.from_device) return load_of(Engine::kKernels, "memory", 2 * num_bytes);
  if (ends.to_device) return load_of(Engine::kToDevice, "prefetch", num_bytes);
  return ends.from_device ? load_of(Engine::kToHost, "offload", num_bytes) : Load{};
}

Ends ends_of(const void* to, const void* from, size_t num_bytes) {
  Process& p = process();
  const Lock lock(p.mutex);
  const Block *target = p.memory.find(to), *source = p.memory.find(from);
  const bool is_inside = (target == nullptr || p.memory.covers(bytes_at(to, num_bytes))) &&
                         (source == nullptr || p.memory.covers(bytes_at(from, num_bytes)));
  const Ends ends{is_device_kind(target), is_device_kind(source), target == nullptr || source == nullptr, is_inside};
  const char* const name = copy_name(ends.to_device, ends.from_device);
  p.count(name);
  p.count(std::string(name) + ", bytes", static_cast<int64_t>(num_bytes));
  return ends;
}

cudaError_t copy(void* to, const void* from, size_t num_bytes, cudaStream_t stream, bool is_asynchronous) {
  if (num_bytes == 0) return done();
  if (thread().mute > 0) {
    // The numbers do not exist; host code that reads them must get the same values each time.
    if (!emulated_is_device_memory(to)) std::memset(to, 0, num_bytes);
    return done();
  }
  const Ends ends = ends_of(to, from, num_bytes);
  if (!ends.is_inside) return done(cudaErrorInvalidValue);
  const char* const name = copy_name(ends.to_device, ends.from_device);
  const bool has_numbers = emulated_has_numbers(num_bytes) || (!ends.to_device && !ends.from_device);
  const bool is_read_by_host = ends.is_pageable && !ends.to_device;
  const Range target = bytes_at(to, num_bytes), source = bytes_at(from, num_bytes);
  const Load load = load_of_copy(ends, num_bytes);
  Access access;
  if (!ends.is_pageable || ends.to_device) access.writes.push_back(target);
  if (!ends.is_pageable || ends.from_device) access.reads.push_back(source);
  if (ends.is_pageable && ends.to_device) {
    note_synchronization("copy from pageable memory");
    const auto* const bytes = static_cast<const char*>(from);
    const size_t num_staged = has_numbers ? num_bytes : 0;
    const auto staged = std::make_shared<const std::vector<char>>(bytes, bytes + num_staged);
    const auto work = [to, staged, target, name] {
      if (!is_still_there(target, name)) return true;
      std::memcpy(to, staged->data(), staged->size());
      emulated_set_absent(&target, false);
      return true;
    };
    if (const cudaError_t error = issue(stream, name, work, &access, load); error != cudaSuccess) return error;
    return is_asynchronous ? done() : wait_for_stream(stream, "cudaMemcpy");
  }
  const auto work = [=] {
    if (!access.writes.empty() && !is_still_there(target, name)) return true;
    if (!access.reads.empty() && !is_still_there(source, name)) return true;
    if (has_numbers) {
      std::memmove(to, from, num_bytes);
      emulated_set_absent(&target, emulated_is_absent(&source));
    } else if (is_read_by_host) {
      std::memset(to, 0, num_bytes);
    }
    return true;
  };
  if (const cudaError_t error = issue(stream, name, work, &access, load); error != cudaSuccess) return error;
  if (ends.is_pageable) return wait_for_stream(stream, "copy to pageable memory");
  return is_asynchronous ? done() : wait_for_stream(stream, "cudaMemcpy");
}

cudaError_t allocate(void** address, size_t num_bytes, Kind kind, const char* name) {
  Process& p = process();
  const Lock lock(p.mutex);
  p.count(name);
  *address = p.memory.allocate(num_bytes, kind, thread().device);
  if (*address == nullptr) p.count("out of memory");
  return done(*address == nullptr ? cudaErrorMemoryAllocation : cudaSuccess);
}

// `end` removes the memory from the process's and returns its range.
template <class End>
cudaError_t wait_and_end(const char* name, cudaError_t otherwise, End end) {
  if (const cudaError_t error = wait_for_device(name); error != cudaSuccess) return error;
  Process& p = process();
  const Lock lock(p.mutex);
  const std::optional<Range> range = end(p.memory);
  if (!range) return done(otherwise);
  p.scheduler.races.forget(*range);
  return done();
}

}  // namespace

EXPORTED cudaError_t cudaMalloc(void** address, size_t num_bytes) {
  return allocate(address, num_bytes, Kind::kDevice, "cudaMalloc");
}

EXPORTED cudaError_t cudaMallocManaged(void** address, size_t num_bytes, unsigned) {
  return allocate(address, num_bytes, Kind::kManaged, "cudaMallocManaged");
}

EXPORTED cudaError_t cudaHostAlloc(void** address, size_t num_bytes, unsigned) {
  return allocate(address, num_bytes, Kind::kPinned, "cudaHostAlloc");
}

EXPORTED cudaError_t cudaFree(void* address) {
  if (address == nullptr) return done();  // programs make a context this way
  return wait_and_end("cudaFree", cudaErrorInvalidValue, [&](Memory& memory) { return memory.free(address, false); });
}

EXPORTED cudaError_t cudaFreeHost(void* address) {
  if (address == nullptr) return done();
  return wait_and_end("cudaFreeHost", cudaErrorInvalidValue, [&](Memory& memory) { return memory.free(address, true); });
}

EXPORTED cudaError_t cudaHostRegister(void* address, size_t num_bytes, unsigned) {
  Process& p = process();
  const Lock lock(p.mutex);
  p.count("cudaHostRegister");
  if (num_bytes >= kTooManyToRegister) return done(cudaErrorMemoryAllocation);
  if (p.memory.is_pinned_in_part(address, num_bytes)) return done(cudaErrorHostMemoryAlreadyRegistered);
  return done(p.memory.register_host(address, num_bytes) ? cudaSuccess : cudaErrorMemoryAllocation);
}

EXPORTED cudaError_t cudaHostUnregister(void* address) {
  {
    Process& p = process();
    const Lock lock(p.mutex);
    if (!p.scheduler.is_idle(thread().device)) p.count("cudaHostUnregister while work is queued");
  }
  return wait_and_end("cudaHostUnregister", cudaErrorHostMemoryNotRegistered,
                      [&](Memory& memory) { return memory.unregister_host(address); });
}

EXPORTED cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  Process& p = process();
  const Lock lock(p.mutex);
  p.count("cudaMemGetInfo");
  *total_bytes = p.memory.device_bytes();
  *free_bytes = p.memory.free_bytes(thread().device);
  return done();
}

EXPORTED cudaError_t cudaMemcpy(void* to, const void* from, size_t num_bytes, cudaMemcpyKind) {
  return copy(to, from, num_bytes, nullptr, false);
}

EXPORTED cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t num_bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, from, num_bytes, stream, true);
}

EXPORTED cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t num_bytes, cudaStream_t stream) {
  return copy(to, from, num_bytes, stream, true);
}

EXPORTED cudaError_t cudaMemsetAsync(void* address, int value, size_t num_bytes, cudaStream_t stream) {
  if (thread().mute > 0 || num_bytes == 0) return done();
  const Range range = bytes_at(address, num_bytes);
  {
    const Lock lock(process().mutex);
    if (!process().memory.covers(range)) return done(cudaErrorInvalidValue);
  }
  const Access access{{}, {range}};
  const auto work = [=] {
    if (!is_still_there(range, "fill") || !emulated_has_numbers(num_bytes)) return true;
    std::memset(address, value, num_bytes);
    emulated_set_absent(&range, false);
    return true;
  };
  return issue(stream, "fill", work, &access, load_of(Engine::kKernels, "memory", num_bytes));
}

EXPORTED cudaError_t cudaMemset(void* address, int value, size_t num_bytes) {
  return cudaMemsetAsync(address, value, num_bytes, nullptr);  // asynchronous on device memory, as the reference says
}

EXPORTED cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  const Lock lock(process().mutex);
  const Block* const block = process().memory.find(address);
  *attributes = {};
  attributes->type = cudaMemoryTypeUnregistered;
  if (block == nullptr) return done();
  const bool is_host = !is_device_kind(block);
  attributes->type = is_host                         ? cudaMemoryTypeHost
                     : block->kind == Kind::kManaged ? cudaMemoryTypeManaged
                                                     : cudaMemoryTypeDevice;
  attributes->device = block->device;
  attributes->devicePointer = const_cast<void*>(address);
  attributes->hostPointer = block->kind == Kind::kDevice ? nullptr : const_cast<void*>(address);
  return done();
}
