// libcufile on its own over the stand-in: `alone LIBCUFILE FILE` opens the driver, reads FILE through it, closes, and prints
// contexts and threads after each step. The first GPU's context is the caller's own, as a loader's.
#define _GNU_SOURCE
#include "cufile.h"
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern void fake_report(FILE *);
#define LEN (1 << 20)

static int threads(void) {
    DIR *folder = opendir("/proc/self/task");
    int count = -2;
    while (folder && readdir(folder)) count++;
    return count;
}

static void say(const char *step, int code) {
    printf("%s code %d; now threads %d; ", step, code, threads());
    fake_report(stdout);
}

int main(int count, char **words) {
    if (count != 3) return 2;
    CUcontext context;
    CUdeviceptr memory;
    cuInit(0);
    cuDevicePrimaryCtxRetain(&context, 0);
    cuCtxPushCurrent(context);
    cuMemAlloc(&memory, LEN);
    void *library = dlopen(words[1], RTLD_NOW | RTLD_LOCAL);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 3;
#define GET(name) __typeof__(&name) get_##name = (__typeof__(&name))dlsym(library, #name)
    GET(cuFileDriverOpen);
    GET(cuFileHandleRegister);
    GET(cuFileHandleDeregister);
    GET(cuFileBufRegister);
    GET(cuFileBufDeregister);
    GET(cuFileRead);
    CUfileError_t (*close_driver)(void) = (CUfileError_t (*)(void))dlsym(library, "cuFileDriverClose_v2");
    if (!close_driver) close_driver = (CUfileError_t (*)(void))dlsym(library, "cuFileDriverClose");
    say("before", 0);
    say("open", get_cuFileDriverOpen().err);
    int fd = open(words[2], O_RDONLY | O_DIRECT);
    CUfileDescr_t descr;
    memset(&descr, 0, sizeof descr);
    descr.type = CU_FILE_HANDLE_TYPE_OPAQUE_FD;
    descr.handle.fd = fd;
    CUfileHandle_t handle = NULL;
    int registered = get_cuFileHandleRegister(&handle, &descr).err;
    say("file", registered);
    say("buffer", get_cuFileBufRegister((void *)memory, LEN, 0).err);
    if (!registered) {
        ssize_t got = get_cuFileRead(handle, (void *)memory, LEN, 0, 0);
        char *right = malloc(LEN);
        int plain = open(words[2], O_RDONLY);
        int same = got == LEN && pread(plain, right, LEN, 0) == LEN && !memcmp(right, (void *)memory, LEN);
        say("read", same ? 0 : (int)got ? (int)got : -1);
        get_cuFileHandleDeregister(handle);
    }
    get_cuFileBufDeregister((void *)memory);
    say("close", close_driver().err);
    fflush(stdout);
    _exit(0);
}
