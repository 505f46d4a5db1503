// Kernels: their registration when a library is loaded, and their launches.
//
// Machine code for a GPU cannot run here. Host code of torch's operators is called with launches switched off, and
// operators/ queues the kernel's computation. A launch that arrives here while launches are on belongs to a kernel
// without an emulation: it is refused with its name, so that no number is ever silently wrong.
#include "process.h"

#include <cstdio>
#include <memory>

using namespace emulated;

namespace {

struct Configuration {
  dim3 grid, block;
  size_t shared_bytes;
  void* stream;
};
thread_local Configuration configuration;

std::map<const void*, const char*>& kernel_names() {
  static auto* const names = new std::map<const void*, const char*>;
  return *names;
}

constexpr double kCyclesPerSecond = 2e9;  // of torch.cuda._sleep

// Queues one waiting thread of the device: other kernels can run beside it.
cudaError_t sleep(cudaStream_t stream, int64_t num_cycles) {
  const double seconds = static_cast<double>(num_cycles) / kCyclesPerSecond;
  if (emulated_is_timed()) return issue(stream, "sleep", [] { return true; }, nullptr, {Engine::kNone, seconds, nullptr});
  const auto end_s = std::make_shared<double>(0);
  const auto work = [=] {
    const double now_s = process().scheduler.timeline().now_s();
    if (*end_s == 0) *end_s = now_s + seconds;
    return now_s >= *end_s;
  };
  return issue(stream, "sleep", work, nullptr, {});
}

cudaError_t launch(const void* kernel, void** arguments, cudaStream_t stream) {
  if (thread().mute > 0) return done();
  const auto found = kernel_names().find(kernel);
  const std::string name = found == kernel_names().end() ? "a kernel without a name" : found->second;
  if (name.find("spin_kernel") != std::string::npos) return sleep(stream, *static_cast<int64_t*>(arguments[0]));
  std::fprintf(stderr, "emulated GPU: %s was launched outside of an operator that is emulated\n", name.c_str());
  return done(cudaErrorNotSupported);
}

}  // namespace

EXPORTED unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void* stream) {
  configuration = {grid, block, shared_bytes, stream};
  return 0;
}

EXPORTED cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared_bytes = configuration.shared_bytes;
  *static_cast<void**>(stream) = configuration.stream;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return launch(kernel, arguments, stream);
}

EXPORTED cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t,
                                        cudaStream_t stream) {
  return launch(reinterpret_cast<const void*>(kernel), arguments, stream);
}

EXPORTED cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
  return launch(kernel, arguments, config->stream);
}

EXPORTED cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host_function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host_function));
  return cudaSuccess;
}

EXPORTED void** __cudaRegisterFatBinary(void*) {
  static void* handle[1];
  return handle;
}
EXPORTED void __cudaRegisterFatBinaryEnd(void**) {}
EXPORTED void __cudaUnregisterFatBinary(void**) {}
EXPORTED char __cudaInitModule(void**) { return 1; }
EXPORTED void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EXPORTED void __cudaRegisterFunction(void**, const char* host_function, char*, const char* name, int, void*, void*,
                                     void*, void*, int*) {
  kernel_names()[host_function] = name;
}

// The architecture in torch's wheels (torch.cuda.get_arch_list(), 2.13) that runs on the device: the newest of its
// major version that is no newer (CUDA programming guide, "Binary Compatibility"). CUB refuses one that was not
// compiled.
static int binary_version() {
  const int wanted = settings().capability;
  int found = wanted;
  for (int compiled : {75, 80, 86, 90, 100, 120})
    if (compiled <= wanted && compiled / 10 == wanted / 10) found = compiled;
  return found;
}

// Host code calls it before it chooses a launch. Any plausible answer will do: no launch follows.
EXPORTED cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = binary_version();
  attributes->maxDynamicSharedSizeBytes = 227 << 10;
  return done();
}
EXPORTED cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return done(); }
EXPORTED cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return done(); }
EXPORTED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, size_t,
                                                                            unsigned) {
  *count = 2;
  return done();
}

// Constants of kernels have no memory here; host code only passes their address on.
EXPORTED cudaError_t cudaGetSymbolAddress(void** address, const void*) {
  static char symbols[1 << 20];
  *address = symbols;
  return done();
}
EXPORTED cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return done(); }
EXPORTED cudaError_t cudaProfilerStart() { return done(); }
EXPORTED cudaError_t cudaProfilerStop() { return done(); }
