// Devices of the CUDA runtime: their properties, the device of a thread, and the errors of calls.
#include "process.h"

#include <cstdio>
#include <cstring>

#undef cudaGetDeviceProperties

using namespace emulated;

namespace emulated {

// The driver's attributes; their numbers equal the runtime's where both name the same attribute.
constexpr int kVirtualMemory = 102;

// Facts of data-center GPUs since compute capability 8.0, from the CUDA programming guide, "Compute Capabilities".
int device_attribute(int attribute) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: return settings().capability / 10;
    case cudaDevAttrComputeCapabilityMinor: return settings().capability % 10;
    case cudaDevAttrMultiProcessorCount: return settings().multiprocessors;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrMaxRegistersPerBlock: return 65536;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 48 << 10;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 227 << 10;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 228 << 10;
    case cudaDevAttrConcurrentManagedAccess:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrUnifiedAddressing: return 1;
    case kVirtualMemory: return 1;
    default: return 0;
  }
}

}  // namespace emulated

EXPORTED cudaError_t cudaGetDeviceCount(int* count) {
  *count = settings().num_devices;
  return done();
}

EXPORTED cudaError_t cudaGetDevice(int* device) {
  *device = thread().device;
  return done();
}

EXPORTED cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= settings().num_devices) return done(cudaErrorInvalidDevice);
  thread().device = device;
  return done();
}

EXPORTED cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return done();
}

EXPORTED cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return done();
}

EXPORTED cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device < 0 || device >= settings().num_devices) return done(cudaErrorInvalidDevice);
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "%s", settings().name.c_str());
  std::memset(properties->uuid.bytes, device + 1, sizeof properties->uuid.bytes);
  properties->totalGlobalMem = process().memory.device_bytes();
  properties->major = device_attribute(cudaDevAttrComputeCapabilityMajor);
  properties->minor = device_attribute(cudaDevAttrComputeCapabilityMinor);
  properties->multiProcessorCount = device_attribute(cudaDevAttrMultiProcessorCount);
  properties->warpSize = device_attribute(cudaDevAttrWarpSize);
  properties->maxThreadsPerBlock = device_attribute(cudaDevAttrMaxThreadsPerBlock);
  properties->maxThreadsPerMultiProcessor = device_attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  properties->maxBlocksPerMultiProcessor = 32;
  properties->sharedMemPerBlock = static_cast<size_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlock));
  properties->sharedMemPerBlockOptin = static_cast<size_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
  properties->sharedMemPerMultiprocessor =
      static_cast<size_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor));
  properties->regsPerBlock = properties->regsPerMultiprocessor = device_attribute(cudaDevAttrMaxRegistersPerBlock);
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = device_attribute(cudaDevAttrMaxGridDimX);
  properties->maxGridSize[1] = properties->maxGridSize[2] = device_attribute(cudaDevAttrMaxGridDimY);
  properties->textureAlignment = 512;
  properties->l2CacheSize = 50 << 20;
  properties->memoryBusWidth = 5120;
  properties->asyncEngineCount = 3;
  properties->concurrentKernels = properties->unifiedAddressing = 1;
  properties->managedMemory = properties->concurrentManagedAccess = 1;
  properties->pciBusID = device + 1;
  return done();
}

EXPORTED cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = device_attribute(attribute);
  return done();
}

EXPORTED cudaError_t cudaDeviceGetPCIBusId(char* text, int num_chars, int device) {
  std::snprintf(text, static_cast<size_t>(num_chars), "0000:%02x:00.0", device + 1);
  return done();
}

EXPORTED cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return done();
}

EXPORTED cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return done();
}

EXPORTED cudaError_t cudaDeviceSynchronize() { return wait_for_device("cudaDeviceSynchronize"); }

EXPORTED cudaError_t cudaGetLastError() {
  const cudaError_t error = done(thread().last_error);
  thread().last_error = cudaSuccess;
  return error;
}

EXPORTED cudaError_t cudaPeekAtLastError() { return done(thread().last_error); }

#define ERROR_TEXTS(_)                                                                             \
  _(cudaSuccess, "no error")                                                                       \
  _(cudaErrorInvalidValue, "invalid argument")                                                     \
  _(cudaErrorMemoryAllocation, "out of memory")                                                    \
  _(cudaErrorInvalidDevice, "invalid device ordinal")                                              \
  _(cudaErrorInvalidResourceHandle, "invalid resource handle")                                     \
  _(cudaErrorNotReady, "device not ready")                                                         \
  _(cudaErrorIllegalAddress, "an illegal memory access was encountered")                           \
  _(cudaErrorLaunchFailure, "unspecified launch failure")                                          \
  _(cudaErrorHostMemoryAlreadyRegistered, "part or all of the requested memory range is already mapped") \
  _(cudaErrorHostMemoryNotRegistered, "pointer does not correspond to a registered memory region") \
  _(cudaErrorNotSupported, "operation not supported: the emulated GPU has no such call or kernel")

EXPORTED const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
#define CASE(code, text) case code: return text;
    ERROR_TEXTS(CASE)
#undef CASE
    default: return "unrecognized error code";
  }
}

EXPORTED const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
#define CASE(code, text) case code: return #code;
    ERROR_TEXTS(CASE)
#undef CASE
    default: return "unrecognized error code";
  }
}
