// A CUDA device that computes nothing, for programs that are asked how much memory they take.
//
// Here is what torch, Triton and their libraries call of CUDA's runtime and driver: memory, streams,
// events and captures. Kernels are dropped, and of copies only small ones are made. Functions that
// are neither here nor in libraries.h, of cuBLAS, cuDNN, NCCL and the others, do nothing and say
// that all is well: rest.h, which build.py writes. It is preloaded, and is libcuda.so.1 too.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <driver_types.h>
#include <vector_types.h>
typedef int E;
#define TOTAL (80ull << 30)  // bytes of its memory
#define SMALL (1ull << 20)   // bytes up to which copies are made
enum { DEVICE = 1, HOST = 2 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
typedef struct Block { char *at; size_t size; int kind; struct Block *next; } Block;
static Block *blocks; static size_t used;
static void *take(size_t size, int kind) {
  size_t n = size ? (size + 4095) & ~4095ull : 4096;
  if (kind == DEVICE && used + n > TOTAL) return 0;
  // aligned to 2 MiB
  size_t A = 2u << 20;
  char *raw = mmap(0, n + A, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return 0;
  char *at = (char *)(((uintptr_t)raw + A - 1) & ~(A - 1));
  if (at > raw) munmap(raw, at - raw);
  munmap(at + n, raw + A - at);
  Block *b = malloc(sizeof *b);
  pthread_mutex_lock(&lock);
  *b = (Block){at, n, kind, blocks}; blocks = b; if (kind == DEVICE) used += n;
  pthread_mutex_unlock(&lock);
  return at;
}
static void drop(void *p) {
  if (!p) return;
  pthread_mutex_lock(&lock);
  for (Block **q = &blocks; *q; q = &(*q)->next) if ((*q)->at == p) {
    Block *b = *q; *q = b->next; if (b->kind == DEVICE) used -= b->size; munmap(b->at, b->size); free(b); break; }
  pthread_mutex_unlock(&lock);
}
static int kind_of(const void *p) {
  int k = 0; pthread_mutex_lock(&lock);
  for (Block *b = blocks; b; b = b->next) if ((char *)p >= b->at && (char *)p < b->at + b->size) { k = b->kind; break; }
  pthread_mutex_unlock(&lock); return k;
}
// device
E cudaGetDeviceCount(int *n) { *n = 1; return 0; }
E cudaGetDevice(int *d) { *d = 0; return 0; }
E cudaSetDevice(int d) { return 0; }
E cudaDriverGetVersion(int *v) { *v = 13000; return 0; }
E cudaRuntimeGetVersion(int *v) { *v = 13000; return 0; }
E cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "Phantom of an H100"); p->totalGlobalMem = TOTAL; p->sharedMemPerBlock = 49152;
  p->regsPerBlock = 65536; p->warpSize = 32; p->memPitch = 2147483647; p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536; p->major = 9; p->minor = 0; p->textureAlignment = 512; p->multiProcessorCount = 132;
  p->unifiedAddressing = 1; p->memoryBusWidth = 5120; p->l2CacheSize = 52428800; p->maxThreadsPerMultiProcessor = 2048;
  p->streamPrioritiesSupported = 1; p->sharedMemPerMultiprocessor = 233472; p->regsPerMultiprocessor = 65536;
  p->managedMemory = 1; p->concurrentManagedAccess = 1; p->cooperativeLaunch = 1; p->sharedMemPerBlockOptin = 232448;
  p->canMapHostMemory = 1; p->concurrentKernels = 1; p->asyncEngineCount = 3; p->maxBlocksPerMultiProcessor = 32;
  p->memoryPoolsSupported = 1; p->reservedSharedMemPerBlock = 1024;
  return 0; }
E cudaDeviceGetAttribute(int *v, int a, int d) {
  switch (a) {
    case cudaDevAttrMaxThreadsPerBlock: *v = 1024; break; case cudaDevAttrWarpSize: *v = 32; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *v = 49152; break; case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *v = 233472; break; case cudaDevAttrMultiProcessorCount: *v = 132; break;
    case cudaDevAttrComputeCapabilityMajor: *v = 9; break; case cudaDevAttrComputeCapabilityMinor: *v = 0; break;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *v = 65536; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *v = 2048; break; case cudaDevAttrL2CacheSize: *v = 52428800; break;
    case cudaDevAttrMaxGridDimX: *v = 2147483647; break; case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *v = 65535; break;
    case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *v = 1024; break; case cudaDevAttrMaxBlockDimZ: *v = 64; break;
    case cudaDevAttrClockRate: *v = 1980000; break; case cudaDevAttrMemoryClockRate: *v = 2619000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *v = 5120; break;
    default: *v = 1; }
  return 0; }
E cudaDeviceGetStreamPriorityRange(int *l, int *g) { *l = 0; *g = -5; return 0; }
E cudaDeviceGetPCIBusId(char *s, int n, int d) { snprintf(s, n, "0000:01:00.0"); return 0; }
E cudaDeviceCanAccessPeer(int *c, int a, int b) { *c = 0; return 0; }
E cudaMemGetInfo(size_t *f, size_t *t) { *t = TOTAL; *f = TOTAL - used; return 0; }
const char *cudaGetErrorName(E e) { return e == 2 ? "cudaErrorMemoryAllocation" : "cudaPhantom"; }
const char *cudaGetErrorString(E e) { return e == 2 ? "out of memory" : "phantom"; }
// memory
static E last;
E cudaGetLastError(void) { E e = last; last = 0; return e; }
E cudaPeekAtLastError(void) { return last; }
E cudaMalloc(void **p, size_t n) { *p = take(n, DEVICE); return last = *p ? 0 : 2; }
E cudaMallocAsync(void **p, size_t n, void *s) { return cudaMalloc(p, n); }
E cudaFree(void *p) { drop(p); return 0; }
E cudaFreeAsync(void *p, void *s) { drop(p); return 0; }
E cudaHostAlloc(void **p, size_t n, unsigned f) { *p = take(n, HOST); return *p ? 0 : 2; }
E cudaFreeHost(void *p) { drop(p); return 0; }
E cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  int k = kind_of(p); memset(a, 0, sizeof *a); a->device = 0;
  a->type = k == DEVICE ? cudaMemoryTypeDevice : k == HOST ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  if (k == DEVICE) a->devicePointer = (void *)p; if (k == HOST) { a->hostPointer = (void *)p; a->devicePointer = (void *)p; }
  return 0; }
static void copy(void *d, const void *s, size_t n) { if (n <= SMALL) memmove(d, s, n); }
E cudaMemcpy(void *d, const void *s, size_t n, int k) { copy(d, s, n); return 0; }
E cudaMemcpyAsync(void *d, const void *s, size_t n, int k, void *st) { copy(d, s, n); return 0; }
E cudaMemcpyPeerAsync(void *d, int dd, const void *s, int sd, size_t n, void *st) { copy(d, s, n); return 0; }
E cudaMemset(void *d, int v, size_t n) { if (n <= SMALL) memset(d, v, n); return 0; }
E cudaMemsetAsync(void *d, int v, size_t n, void *s) { if (n <= SMALL) memset(d, v, n); return 0; }
E cudaGetSymbolAddress(void **p, const void *s) { *p = take(4096, DEVICE); return 0; }
// streams, events, captures
typedef struct { int priority; unsigned long long capture; } Stream;
typedef struct { double at; unsigned long long capture; } Event;
static Stream legacy; static unsigned long long captures; static Stream *all[4096]; static int streams;
static Stream *S(void *s) { return s == 0 || s == (void *)1 || s == (void *)2 ? &legacy : s; }
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e3 + t.tv_nsec * 1e-6; }
E cudaStreamCreateWithPriority(void **s, unsigned f, int p) { Stream *n = calloc(1, sizeof *n); n->priority = p; if (streams < 4096) all[streams++] = n; *s = n; return 0; }
E cudaStreamCreateWithFlags(void **s, unsigned f) { return cudaStreamCreateWithPriority(s, f, 0); }
E cudaStreamCreate(void **s) { return cudaStreamCreateWithPriority(s, 0, 0); }
E cudaStreamGetPriority(void *s, int *p) { *p = S(s)->priority; return 0; }
E cudaStreamBeginCapture(void *s, int mode) { S(s)->capture = ++captures; return 0; }
E cudaStreamEndCapture(void *s, void **g) { unsigned long long id = S(s)->capture; for (int i = 0; i < streams; i++) if (all[i]->capture == id) all[i]->capture = 0; *g = malloc(8); return 0; }
E cudaStreamIsCapturing(void *s, int *st) { *st = S(s)->capture != 0; return 0; }
E cudaStreamGetCaptureInfo(void *s, int *st, unsigned long long *id, void **g, void ***d, void **ed, size_t *n) {
  static void *nodes[1]; *st = S(s)->capture != 0; if (id) *id = S(s)->capture; if (g) *g = (void *)8; if (d) *d = nodes; if (ed) *ed = 0; if (n) *n = 0; return 0; }
E cudaEventCreateWithFlags(void **e, unsigned f) { *e = calloc(1, sizeof(Event)); return 0; }
E cudaEventCreate(void **e) { return cudaEventCreateWithFlags(e, 0); }
E cudaEventRecord(void *e, void *s) { ((Event *)e)->at = now(); ((Event *)e)->capture = S(s)->capture; return 0; }
E cudaEventRecordWithFlags(void *e, void *s, unsigned f) { return cudaEventRecord(e, s); }
E cudaEventElapsedTime(float *ms, void *a, void *b) { double d = ((Event *)b)->at - ((Event *)a)->at; *ms = d > 1e-3 ? d : 1e-3; return 0; }
E cudaStreamWaitEvent(void *s, void *e, unsigned f) { if (((Event *)e)->capture) S(s)->capture = ((Event *)e)->capture; return 0; }
E cudaLaunchHostFunc(void *s, void (*f)(void *), void *d) { if (!S(s)->capture) f(d); return 0; }
E cudaStreamAddCallback(void *s, void (*f)(void *, E, void *), void *d, unsigned fl) { f(s, 0, d); return 0; }
E cudaGraphInstantiateWithFlags(void **x, void *g, unsigned long long f) { *x = malloc(8); return 0; }
E cudaGraphInstantiate(void **x, void *g, unsigned long long f) { *x = malloc(8); return 0; }
E cudaGraphGetNodes(void *g, void **n, size_t *k) { *k = 1; return 0; }
E cudaThreadExchangeStreamCaptureMode(int *m) { return 0; }
// kernels
typedef struct { dim3 g, b; size_t m; void *s; } Call; static __thread Call calls[16]; static __thread int depth;
unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t m, void *s) { calls[depth++ & 15] = (Call){g, b, m, s}; return 0; }
E __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *m, void *s) { Call c = calls[--depth & 15]; *g = c.g; *b = c.b; *m = c.m; *(void **)s = c.s; return 0; }
E __cudaLaunchKernel(void *k, dim3 g, dim3 b, void **a, size_t m, void *s) { return 0; }
E cudaLaunchKernel(const void *k, dim3 g, dim3 b, void **a, size_t m, void *s) { return 0; }
E cudaLaunchKernelExC(void *c, const void *f, void **a) { return 0; }
E __cudaGetKernel(void **k, const void *f) { *k = (void *)f; return 0; }
static void *fat[1];
void **__cudaRegisterFatBinary(void *f) { return fat; }
char __cudaInitModule(void **f) { return 0; }
E cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) { memset(a, 0, sizeof *a); a->maxThreadsPerBlock = 1024; a->numRegs = 32; a->maxDynamicSharedSizeBytes = 232448; a->binaryVersion = 90; a->ptxVersion = 90; return 0; }
E cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t m, unsigned fl) { *n = 2; return 0; }
E cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int b, size_t m) { *n = 2; return 0; }
E cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned v, unsigned long long fl, int *st) {
  *f = dlsym(RTLD_DEFAULT, name); if (st) *st = *f ? 0 : 1; return 0; }
E cudaGetDriverEntryPoint(const char *name, void **f, unsigned long long fl, int *st) { return cudaGetDriverEntryPointByVersion(name, f, 0, fl, st); }
// driver
E cuInit(unsigned f) { return 0; }
E cuDriverGetVersion(int *v) { *v = 13000; return 0; }
E cuDeviceGetCount(int *n) { *n = 1; return 0; }
E cuDeviceGet(int *d, int i) { *d = i; return 0; }
E cuDeviceGetAttribute(int *v, int a, int d) { return cudaDeviceGetAttribute(v, a, d); }
E cuGetErrorString(int e, const char **s) { *s = "phantom"; return 0; }
E cuCtxGetCurrent(void **c) { *c = (void *)16; return 0; }
E cuCtxGetDevice(int *d) { *d = 0; return 0; }
E cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)16; return 0; }
E cuDevicePrimaryCtxGetState(int d, unsigned *f, int *a) { *f = 0; *a = 1; return 0; }
E cuModuleLoadData(void **m, const void *i) { *m = malloc(8); return 0; }
E cuModuleLoadDataEx(void **m, const void *i, unsigned n, void *o, void *v) { *m = malloc(8); return 0; }
E cuModuleLoad(void **m, const char *f) { *m = malloc(8); return 0; }
E cuModuleGetFunction(void **f, void *m, const char *n) { *f = malloc(8); return 0; }
E cuFuncGetAttribute(int *v, int a, void *f) { switch (a) { case 0: *v = 1024; break; case 1: *v = 1024; break; case 4: *v = 32; break; default: *v = 0; } return 0; }
E cuLaunchKernel(void *f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned m, void *s, void **p, void **x) { return 0; }
E cuLaunchKernelEx(const void *c, void *f, void **p, void **x) { return 0; }
E cuLaunchCooperativeKernel(void *f) { return 0; }
E cuOccupancyMaxActiveClusters(int *n, void *f, void *c) { *n = 16; return 0; }
E cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int b, size_t m) { *n = 2; return 0; }
E cuStreamIsCapturing(void *s, int *st) { return cudaStreamIsCapturing(s, st); }
E cuCtxGetLimit(size_t *v, int l) { *v = 1 << 20; return 0; }
E cuPointerGetAttribute(void *v, int a, unsigned long long p) { *(unsigned long long *)v = a == 2 ? 2 : p; return kind_of((void *)p) == DEVICE ? 0 : 1; }
E cuMemGetAllocationGranularity(size_t *g, void *p, int o) { *g = 2 << 20; return 0; }
#include "libraries.h"
#include "rest.h"
