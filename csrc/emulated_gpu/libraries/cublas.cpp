// libcublas: the calls whose results torch's host code reads. All other calls are stubs that do nothing, because
// launches are off around them. Each handle is a new one: torch has one for each thread that multiplies, and gives each
// its own workspace. It keeps them to the end of the process.
extern "C" {

int cublasCreate_v2(void** made) { return *made = new long, 0; }
int cublasGetVersion_v2(void*, int* version) { return *version = 130100, 0; }
int cublasGetMathMode(void*, int* mode) { return *mode = 0, 0; }
int cublasGetPointerMode_v2(void*, int* mode) { return *mode = 0, 0; }
int cublasGetStream_v2(void*, void** stream) { return *stream = nullptr, 0; }
}
