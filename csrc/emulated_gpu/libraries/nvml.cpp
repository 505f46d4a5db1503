// libnvidia-ml: the devices of runtime/settings.h, for torch and nvidia-ml-py.
#include <cstdio>
#include <cstring>

#include "../runtime/settings.h"

namespace {

constexpr int kNotSupported = 3;  // NVML_ERROR_NOT_SUPPORTED
constexpr unsigned kClockMhz = 1980;

// A handle is the device's number plus one.
void* handle_of(int device) { return reinterpret_cast<void*>(static_cast<size_t>(device) + 1); }
int device_of(void* handle) { return static_cast<int>(reinterpret_cast<size_t>(handle)) - 1; }

struct Pci {  // nvmlPciInfo_t
  char legacy_text[16];
  unsigned domain, bus, device, id, subsystem;
  char text[32];
};

struct FabricInfo {  // nvmlGpuFabricInfo_v2_t
  unsigned version;
  unsigned char cluster[16];
  int status;
  unsigned clique;
  unsigned char state;
  unsigned health;
};

struct MemoryUse {  // nvmlMemory_t
  unsigned long long total, free, used;
};

}  // namespace

extern "C" {

int nvmlInit_v2() { return 0; }
int nvmlInitWithFlags(unsigned) { return 0; }
int nvmlShutdown() { return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { return *version = 13000, 0; }

int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = static_cast<unsigned>(emulated::settings().num_devices);
  return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned device, void** handle) {
  *handle = handle_of(static_cast<int>(device));
  return 0;
}

// Bus numbers and every byte of a UUID are the device's number plus one, as in the runtime.
int nvmlDeviceGetHandleByPciBusId_v2(const char* text, void** handle) {
  unsigned domain = 0, bus = 1;
  std::sscanf(text, "%x:%x", &domain, &bus);
  *handle = handle_of(static_cast<int>(bus) - 1);
  return 0;
}

int nvmlDeviceGetHandleByUUID(const char* text, void** handle) {
  unsigned first = 1;
  std::sscanf(text, "GPU-%2x", &first);
  *handle = handle_of(static_cast<int>(first) - 1);
  return 0;
}

int nvmlDeviceGetName(void*, char* name, unsigned num_chars) {
  std::snprintf(name, num_chars, "%s", emulated::settings().name.c_str());
  return 0;
}

int nvmlDeviceGetUUID(void* handle, char* text, unsigned num_chars) {
  const unsigned n = static_cast<unsigned>(device_of(handle)) + 1;
  const unsigned twice = n << 8 | n;
  std::snprintf(text, num_chars, "GPU-%04x%04x-%04x-%04x-%04x-%04x%04x%04x", twice, twice, twice, twice, twice, twice,
                twice, twice);
  return 0;
}

int nvmlDeviceGetPciInfo_v3(void* handle, Pci* pci) {
  std::memset(pci, 0, sizeof *pci);
  pci->bus = static_cast<unsigned>(device_of(handle)) + 1;
  std::snprintf(pci->text, sizeof pci->text, "00000000:%02x:00.0", pci->bus);
  return 0;
}

int nvmlDeviceGetMemoryInfo(void*, MemoryUse* use) {
  use->total = use->free = static_cast<unsigned long long>(emulated::settings().memory_gib * double(1ull << 30));
  use->used = 0;
  return 0;
}

int nvmlDeviceGetClockInfo(void*, int, unsigned* mhz) { return *mhz = kClockMhz, 0; }
int nvmlDeviceGetMaxClockInfo(void*, int, unsigned* mhz) { return *mhz = kClockMhz, 0; }
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) { return *count = 0, 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return kNotSupported; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return kNotSupported; }
int nvmlDeviceGetGpuFabricInfoV(void*, FabricInfo* info) {
  info->status = 0;
  info->state = 0;  // NVML_GPU_FABRIC_STATE_NOT_SUPPORTED: no switch among nodes
  return 0;
}
const char* nvmlErrorString(int) { return "the emulated NVML has no such answer"; }
}
