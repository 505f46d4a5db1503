// The calls of the CUDA driver that torch makes: devices, contexts and virtual memory. torch gets some of them by name
// from the runtime and links others from libcuda; the emulated libcuda defines none of them and depends on this
// library.
//
// Rules from the reference of virtual memory management: addresses are reserved; physical memory is created, mapped
// and given access; released memory stays until its last mapping ends. torch calls cuMemUnmap only after it waited for
// the device, and the call waits here, too: unmapping under running work is an error that a GPU may or may not show.
#include <cuda.h>

#include <cstring>
#include <map>

#include "process.h"

using namespace emulated;

namespace emulated {
int device_attribute(int attribute);
}

namespace {

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

CUresult as_driver(bool ok, CUresult otherwise) { return ok ? CUDA_SUCCESS : otherwise; }

CUcontext the_context() {
  static char context;
  return reinterpret_cast<CUcontext>(&context);
}

}  // namespace

EXPORTED CUresult cuMemGetAllocationGranularity(size_t* num_bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *num_bytes = kGranuleBytes;
  return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemAddressReserve(CUdeviceptr* address, size_t num_bytes, size_t, CUdeviceptr, unsigned long long) {
  const Lock lock(process().mutex);
  *address = reinterpret_cast<CUdeviceptr>(process().memory.reserve(num_bytes));
  return as_driver(*address != 0, CUDA_ERROR_OUT_OF_MEMORY);
}

EXPORTED CUresult cuMemAddressFree(CUdeviceptr address, size_t num_bytes) {
  const Lock lock(process().mutex);
  process().memory.unreserve(pointer(address), num_bytes);
  return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t num_bytes, const CUmemAllocationProp* properties,
                unsigned long long) {
  const Lock lock(process().mutex);
  process().count("cuMemCreate");
  *handle = process().memory.create(num_bytes, properties->location.id);
  if (*handle == 0) process().count("out of memory");
  return as_driver(*handle != 0, CUDA_ERROR_OUT_OF_MEMORY);
}

EXPORTED CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  const Lock lock(process().mutex);
  return as_driver(process().memory.release(handle), CUDA_ERROR_INVALID_VALUE);
}

EXPORTED CUresult cuMemMap(CUdeviceptr address, size_t num_bytes, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
  const Lock lock(process().mutex);
  return as_driver(process().memory.map(pointer(address), num_bytes, handle), CUDA_ERROR_INVALID_VALUE);
}

EXPORTED CUresult cuMemSetAccess(CUdeviceptr address, size_t num_bytes, const CUmemAccessDesc*, size_t) {
  const Lock lock(process().mutex);
  return as_driver(process().memory.grant(pointer(address), num_bytes), CUDA_ERROR_INVALID_VALUE);
}

EXPORTED CUresult cuMemUnmap(CUdeviceptr address, size_t num_bytes) {
  (void)wait_for_device("cuMemUnmap");
  const Lock lock(process().mutex);
  process().scheduler.races.forget(bytes_at(pointer(address), num_bytes));
  return as_driver(process().memory.unmap(pointer(address), num_bytes), CUDA_ERROR_INVALID_VALUE);
}

EXPORTED CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice) {
  *value = device_attribute(which);
  return CUDA_SUCCESS;
}

EXPORTED CUresult cuDeviceGet(CUdevice* found, int ordinal) {
  *found = ordinal;
  return as_driver(ordinal < settings().num_devices, CUDA_ERROR_INVALID_DEVICE);
}

EXPORTED CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "error of the emulated driver";
  return CUDA_SUCCESS;
}

EXPORTED CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = 1;
  return CUDA_SUCCESS;
}

EXPORTED CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = the_context();
  return CUDA_SUCCESS;
}

EXPORTED CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }

EXPORTED CUresult cuPointerGetAttribute(void* value, CUpointer_attribute which, CUdeviceptr address) {
  const Lock lock(process().mutex);
  const Block* const block = process().memory.find(pointer(address));
  if (block == nullptr) return CUDA_ERROR_INVALID_VALUE;
  switch (which) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: return cuCtxGetCurrent(static_cast<CUcontext*>(value));
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *static_cast<CUdeviceptr*>(value) = address; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *static_cast<int*>(value) = block->device; return CUDA_SUCCESS;
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
}

namespace {

// Replaces every call that is not emulated.
CUresult missing() { return CUDA_ERROR_NOT_SUPPORTED; }

void* find(const std::string& name) {
#define ENTRY(function) {#function, reinterpret_cast<void*>(function)}
  static const std::map<std::string, void*> known = {
      ENTRY(cuMemGetAllocationGranularity), ENTRY(cuMemAddressReserve), ENTRY(cuMemAddressFree),
      ENTRY(cuMemCreate), ENTRY(cuMemRelease), ENTRY(cuMemMap), ENTRY(cuMemSetAccess), ENTRY(cuMemUnmap),
      ENTRY(cuDeviceGetAttribute), ENTRY(cuDeviceGet), ENTRY(cuGetErrorString), ENTRY(cuDevicePrimaryCtxGetState),
      ENTRY(cuCtxGetCurrent), ENTRY(cuCtxSetCurrent), ENTRY(cuPointerGetAttribute),
  };
#undef ENTRY
  const auto found = known.find(name);
  return found == known.end() ? reinterpret_cast<void*>(missing) : found->second;
}

}  // namespace

EXPORTED cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                      cudaDriverEntryPointQueryResult* result) {
  *function = find(name);
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return done();
}
