// A stand-in for libcuda for NVIDIA's own libcufile and for feedline: FAKE_GPUS devices, host memory as device memory, all
// work done when it is asked for. It counts the primary contexts that are held on each device. A generated file
// beside it has every other name that libcufile looks for; each answers 801 (not supported).
#define _GNU_SOURCE
#include "cuda.h"
#include <dirent.h>
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define GPUS_MAX 16
#define BLOCKS 4096
#define PAGE 4096ul
#define BODY __attribute__((visibility("default")))

struct fake_context { int device; };
static struct fake_context contexts[GPUS_MAX];
static atomic_int held[GPUS_MAX], retained[GPUS_MAX];
static atomic_int copies, threads_at_copy;
static _Thread_local struct fake_context *stack[64];
static _Thread_local int depth;

// Device memory: where each block lies and on which device.
static struct { atomic_ulong start; size_t len; int device; } blocks[BLOCKS];

static int gpus(void) {
    const char *told = getenv("FAKE_GPUS");
    int count = told ? atoi(told) : 8;
    return count > GPUS_MAX ? GPUS_MAX : count;
}

static int threads(void) {
    DIR *folder = opendir("/proc/self/task");
    int count = 0;
    if (!folder) return -1;
    for (struct dirent *entry; (entry = readdir(folder));) count += entry->d_name[0] != '.';
    closedir(folder);
    return count;
}

static struct fake_context *current(void) { return depth ? stack[depth - 1] : NULL; }

static int block_of(unsigned long address) {
    for (int at = 0; at < BLOCKS; at++) {
        unsigned long start = blocks[at].start;
        if (start && address >= start && address < start + blocks[at].len) return at;
    }
    return -1;
}

// What a test asks for: one line, `held G0 G1 …; retained …; threads at the last copy …`.
BODY void fake_report(FILE *out) {
    fprintf(out, "held");
    for (int gpu = 0; gpu < gpus(); gpu++) fprintf(out, " %d", held[gpu]);
    fprintf(out, "; retained");
    for (int gpu = 0; gpu < gpus(); gpu++) fprintf(out, " %d", retained[gpu]);
    fprintf(out, "; copies %d; threads %d\n", copies, threads_at_copy);
    fflush(out);
}

// Contexts as they are at the end of the process' own work: libraries' terminators run after this one.
static void at_end(void) {
    const char *path = getenv("FAKE_REPORT");
    FILE *out = path ? fopen(path, "w") : NULL;
    if (!out) return;
    fake_report(out);
    fclose(out);
}

static void copied(void) {
    // The count of threads while a loader runs: once some batches have come.
    if (atomic_fetch_add(&copies, 1) % 16 == 8) {
        threads_at_copy = threads();
        at_end();
    }
}

BODY CUresult cuInit(unsigned flags) { (void)flags; return CUDA_SUCCESS; }
BODY CUresult cuDriverGetVersion(int *version) { *version = 13000; return CUDA_SUCCESS; }
BODY CUresult cuDeviceGetCount(int *count) { *count = gpus(); return CUDA_SUCCESS; }
BODY CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    if (ordinal < 0 || ordinal >= gpus()) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}
BODY CUresult cuDeviceGetName(char *name, int len, CUdevice device) { snprintf(name, len, "stand-in %d", device); return CUDA_SUCCESS; }
BODY CUresult cuDeviceGetPCIBusId(char *name, int len, CUdevice device) { snprintf(name, len, "0000:%02X:00.0", 0x10 + device); return CUDA_SUCCESS; }
BODY CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *name) {
    unsigned domain, bus;
    if (sscanf(name, "%x:%x", &domain, &bus) != 2) return CUDA_ERROR_INVALID_VALUE;
    return cuDeviceGet(device, (int)bus - 0x10);
}
BODY CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) { (void)device; *bytes = 16ul << 30; return CUDA_SUCCESS; }
BODY CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) { memset(uuid, device + 1, sizeof *uuid); return CUDA_SUCCESS; }
#undef cuDeviceGetUuid
BODY CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) { return cuDeviceGetUuid_v2(uuid, device); }
BODY CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    *value = 0;
    if (attribute == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID) *value = 0x10 + device;
    if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) *value = 9;
    if (attribute == CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING || attribute == CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY) *value = 1;
    return CUDA_SUCCESS;
}

BODY CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    if (device < 0 || device >= gpus()) return CUDA_ERROR_INVALID_DEVICE;
    contexts[device].device = device;
    held[device]++;
    retained[device]++;
    *context = (CUcontext)&contexts[device];
    return CUDA_SUCCESS;
}
BODY CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) { held[device]--; return CUDA_SUCCESS; }
#undef cuDevicePrimaryCtxRelease
BODY CUresult cuDevicePrimaryCtxRelease(CUdevice device) { return cuDevicePrimaryCtxRelease_v2(device); }
BODY CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) { held[device] = 0; return CUDA_SUCCESS; }
#undef cuDevicePrimaryCtxReset
BODY CUresult cuDevicePrimaryCtxReset(CUdevice device) { return cuDevicePrimaryCtxReset_v2(device); }
BODY CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) { *flags = 0; *active = held[device] > 0; return CUDA_SUCCESS; }
BODY CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)current(); return CUDA_SUCCESS; }
BODY CUresult cuCtxSetCurrent(CUcontext context) {
    if (!depth) depth = 1;
    stack[depth - 1] = (struct fake_context *)context;
    return CUDA_SUCCESS;
}
BODY CUresult cuCtxPushCurrent_v2(CUcontext context) {
    if (depth == 64) return CUDA_ERROR_INVALID_VALUE;
    stack[depth++] = (struct fake_context *)context;
    return CUDA_SUCCESS;
}
BODY CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
    struct fake_context *top = stack[--depth];
    if (context) *context = (CUcontext)top;
    return CUDA_SUCCESS;
}
BODY CUresult cuCtxGetDevice(CUdevice *device) {
    if (!current()) return CUDA_ERROR_INVALID_CONTEXT;
    *device = current()->device;
    return CUDA_SUCCESS;
}
BODY CUresult cuCtxSynchronize(void) { return CUDA_SUCCESS; }
BODY CUresult cuCtxGetApiVersion(CUcontext context, unsigned *version) { (void)context; *version = 3020; return CUDA_SUCCESS; }
BODY CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    static _Thread_local CUstreamCaptureMode now = CU_STREAM_CAPTURE_MODE_GLOBAL;
    CUstreamCaptureMode before = now;
    now = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

BODY CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t len) {
    if (!current()) return CUDA_ERROR_INVALID_CONTEXT;
    size_t whole = (len + PAGE - 1) / PAGE * PAGE;
    void *memory = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    for (int at = 0; at < BLOCKS; at++) {
        unsigned long free = 0;
        if (atomic_compare_exchange_strong(&blocks[at].start, &free, (unsigned long)memory)) {
            blocks[at].len = whole;
            blocks[at].device = current()->device;
            *address = (CUdeviceptr)memory;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_OUT_OF_MEMORY;
}
BODY CUresult cuMemFree_v2(CUdeviceptr address) {
    int at = block_of(address);
    if (at < 0 || blocks[at].start != address) return CUDA_ERROR_INVALID_VALUE;
    munmap((void *)address, blocks[at].len);
    blocks[at].start = 0;
    return CUDA_SUCCESS;
}
BODY CUresult cuMemGetInfo_v2(size_t *free, size_t *total) { *free = 15ul << 30; *total = 16ul << 30; return CUDA_SUCCESS; }
BODY CUresult cuMemGetAddressRange_v2(CUdeviceptr *start, size_t *len, CUdeviceptr address) {
    int at = block_of(address);
    if (at < 0) return CUDA_ERROR_INVALID_VALUE;
    if (start) *start = blocks[at].start;
    if (len) *len = blocks[at].len;
    return CUDA_SUCCESS;
}
BODY CUresult cuMemHostRegister_v2(void *memory, size_t len, unsigned flags) { (void)memory, (void)len, (void)flags; return CUDA_SUCCESS; }
BODY CUresult cuMemHostUnregister(void *memory) { (void)memory; return CUDA_SUCCESS; }
BODY CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *address, void *memory, unsigned flags) { (void)flags; *address = (CUdeviceptr)memory; return CUDA_SUCCESS; }
BODY CUresult cuMemHostAlloc(void **memory, size_t len, unsigned flags) { (void)flags; return posix_memalign(memory, PAGE, len) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS; }
BODY CUresult cuMemAllocHost_v2(void **memory, size_t len) { return cuMemHostAlloc(memory, len, 0); }
BODY CUresult cuMemFreeHost(void *memory) { free(memory); return CUDA_SUCCESS; }

static CUresult move(void *to, const void *from, size_t len) { memmove(to, from, len); return CUDA_SUCCESS; }
BODY CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t len) { return move((void *)to, from, len); }
BODY CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t len) { return move(to, (void *)from, len); }
BODY CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t len) { return move((void *)to, (void *)from, len); }
BODY CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t len) { return move((void *)to, (void *)from, len); }
BODY CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t len, CUstream stream) { (void)stream; return move((void *)to, (void *)from, len); }
BODY CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t len, CUstream stream) { (void)stream; copied(); return move((void *)to, from, len); }
BODY CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t len, CUstream stream) { (void)stream; return move(to, (void *)from, len); }
BODY CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t len, CUstream stream) { (void)stream; return move((void *)to, (void *)from, len); }
BODY CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char byte, size_t len) { memset((void *)to, byte, len); return CUDA_SUCCESS; }
BODY CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char byte, size_t len, CUstream stream) { (void)stream; return cuMemsetD8_v2(to, byte, len); }

BODY CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    int at = block_of(address);
    if (at < 0) return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(void **)value = &contexts[blocks[at].device]; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)value = CU_MEMORYTYPE_DEVICE; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)value = address; break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(unsigned long *)value = blocks[at].start; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)value = blocks[at].len; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = blocks[at].device; break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)value = at + 1; break;
    default: memset(value, 0, 4);
    }
    return CUDA_SUCCESS;
}
BODY CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes, void **values, CUdeviceptr address) {
    for (unsigned at = 0; at < count; at++) {
        CUresult code = cuPointerGetAttribute(values[at], attributes[at], address);
        if (code) return code;
    }
    return CUDA_SUCCESS;
}
BODY CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr address) { (void)value, (void)attribute, (void)address; return CUDA_SUCCESS; }

// Streams and events: nothing is ever outstanding.
static CUresult object(void **out) { *out = malloc(8); return CUDA_SUCCESS; }
BODY CUresult cuStreamCreate(CUstream *stream, unsigned flags) { (void)flags; return object((void **)stream); }
BODY CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) { (void)flags, (void)priority; return object((void **)stream); }
BODY CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return CUDA_SUCCESS; }
BODY CUresult cuStreamDestroy_v2(CUstream stream) { free(stream); return CUDA_SUCCESS; }
BODY CUresult cuStreamSynchronize(CUstream stream) { (void)stream; return CUDA_SUCCESS; }
BODY CUresult cuStreamQuery(CUstream stream) { (void)stream; return CUDA_SUCCESS; }
BODY CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) { (void)stream, (void)event, (void)flags; return CUDA_SUCCESS; }
BODY CUresult cuStreamGetCtx(CUstream stream, CUcontext *context) { (void)stream; *context = (CUcontext)current(); return CUDA_SUCCESS; }
BODY CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { (void)stream; *status = CU_STREAM_CAPTURE_STATUS_NONE; return CUDA_SUCCESS; }
BODY CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *data) { (void)stream; function(data); return CUDA_SUCCESS; }
BODY CUresult cuEventCreate(CUevent *event, unsigned flags) { (void)flags; return object((void **)event); }
BODY CUresult cuEventDestroy_v2(CUevent event) { free(event); return CUDA_SUCCESS; }
BODY CUresult cuEventRecord(CUevent event, CUstream stream) { (void)event, (void)stream; return CUDA_SUCCESS; }
BODY CUresult cuEventQuery(CUevent event) { (void)event; return CUDA_SUCCESS; }
BODY CUresult cuEventSynchronize(CUevent event) { (void)event; return CUDA_SUCCESS; }
#undef cuEventElapsedTime
BODY CUresult cuEventElapsedTime(float *ms, CUevent start, CUevent end) { (void)start, (void)end; *ms = 0; return CUDA_SUCCESS; }

BODY CUresult cuGetErrorName(CUresult code, const char **name) { (void)code; *name = "CUDA_ERROR"; return CUDA_SUCCESS; }
BODY CUresult cuGetErrorString(CUresult code, const char **name) { (void)code; *name = "an error of the stand-in"; return CUDA_SUCCESS; }

#undef cuGetProcAddress
static CUresult find(const char *name, void **out) {
    char newer[128];
    Dl_info here;
    dladdr((void *)find, &here);
    void *library = dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    for (int version = 3; version > 1; version--) {
        snprintf(newer, sizeof newer, "%s_v%d", name, version);
        if ((*out = dlsym(library, newer))) return CUDA_SUCCESS;
    }
    return (*out = dlsym(library, name)) ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
BODY CUresult cuGetProcAddress(const char *name, void **out, int version, cuuint64_t flags) { (void)version, (void)flags; return find(name, out); }
BODY CUresult cuGetProcAddress_v2(const char *name, void **out, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status) {
    (void)version, (void)flags;
    CUresult code = find(name, out);
    if (status) *status = code ? CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND : CU_GET_PROC_ADDRESS_SUCCESS;
    return code;
}
