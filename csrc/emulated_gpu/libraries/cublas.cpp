// libcublas: what torch's host code reads. All other calls are stubs that do nothing, as launches are off around them.
extern "C" {

static long handle[64];

int cublasCreate_v2(void** made) { return *made = handle, 0; }
int cublasGetVersion_v2(void*, int* version) { return *version = 130100, 0; }
int cublasGetMathMode(void*, int* mode) { return *mode = 0, 0; }
int cublasGetPointerMode_v2(void*, int* mode) { return *mode = 0, 0; }
int cublasGetStream_v2(void*, void** stream) { return *stream = nullptr, 0; }
}
