// libcudnn: versions and a handle. Attention through cuDNN is emulated above it (operators/attention.cpp).
#include <cstddef>

extern "C" {

static long handle[64];

size_t cudnnGetVersion() { return 92000; }
size_t cudnnGetCudartVersion() { return 13000; }
int cudnnCreate(void** made) { return *made = handle, 0; }
const char* cudnnGetErrorString(int) { return "the emulated cuDNN has no such call"; }
}
