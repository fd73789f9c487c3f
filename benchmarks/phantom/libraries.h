// Functions of CUDA's libraries that have to answer something: a handle, a version, a text.
#define HANDLE(NAME) \
  E NAME(void **handle) { return (*handle = calloc(1, 64)) ? 0 : 2; }
#define TEXT(NAME) \
  const char *NAME() { return "of the phantom"; }
#define VERSION(NAME, NUMBER) \
  E NAME(int *version) { return *version = NUMBER, 0; }

HANDLE(cublasCreate_v2)
HANDLE(cublasLtCreate)
HANDLE(cudnnCreate)
HANDLE(cusolverDnCreate)
HANDLE(cusparseCreate)
HANDLE(ncclCommInitRank)
HANDLE(ncclCommInitRankConfig)
TEXT(cublasGetStatusString)
TEXT(cudnnGetErrorString)
TEXT(cusolverGetErrorString)
TEXT(cusparseGetErrorString)
TEXT(ncclGetErrorString)
TEXT(ncclGetLastError)
VERSION(ncclGetVersion, 22809)
VERSION(cuptiGetVersion, 130000)

size_t cublasLtGetVersion(void) { return 130100; }
size_t cudnnGetCudartVersion(void) { return 13000; }
size_t cudnnGetVersion(void) { return 91900; }
E cublasGetVersion_v2(void *h, int *v) { return *v = 130100, 0; }
E cublasGetMathMode(void *h, int *m) { return *m = 0; }
E cublasGetPointerMode_v2(void *h, int *m) { return *m = 0; }
// One algorithm, without a workspace.
E cublasLtMatmulAlgoGetHeuristic(void *h, void *desc, void *a, void *b, void *c, void *d, void *p,
                                 int n, void *results, int *found) {
  memset(results, 0, 96);
  return *found = 1, 0;
}
E cudnnBackendCreateDescriptor(int type, void **d) { return (*d = calloc(1, 64)) ? 0 : 2; }
// NCCL: one rank.
E ncclGetUniqueId(void *id) { return memset(id, 1, 128), 0; }
E ncclCommGetAsyncError(void *c, int *e) { return *e = 0; }
E ncclCommCount(void *c, int *n) { return *n = 1, 0; }
E ncclCommUserRank(void *c, int *n) { return *n = 0; }
E ncclMemAlloc(void **p, size_t n) { return (*p = take(n, DEVICE)) ? 0 : 2; }
E ncclMemFree(void *p) { return drop(p), 0; }
E ncclCommWindowRegister(void *c, void *b, size_t n, void **w, int f) { return (*w = malloc(8)) ? 0 : 2; }
E ncclCommRegister(void *c, void *b, size_t n, void **w) { return (*w = malloc(8)) ? 0 : 2; }
// The profiler: nothing was recorded.
E cuptiActivityGetNextRecord(char *b, size_t n, void **r) { return 8; }
E cuptiGetResultString(int r, const char **s) { return *s = "of the phantom", 0; }
