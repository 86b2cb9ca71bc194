// A list of kernel modules for machines whose kernel has none: libcufile spins for ever where /proc/modules is missing.
// Preloaded; whoever opens that path gets the file that FAKE_MODULES names.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const char *instead(const char *path) {
    const char *other = getenv("FAKE_MODULES");
    return other && path && !strcmp(path, "/proc/modules") ? other : path;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define MODE(last) va_list list; va_start(list, last); unsigned mode = va_arg(list, unsigned); va_end(list)

int open(const char *path, int flags, ...) { MODE(flags); return NEXT(open)(instead(path), flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags); return NEXT(open64)(instead(path), flags, mode); }
int openat(int folder, const char *path, int flags, ...) { MODE(flags); return NEXT(openat)(folder, instead(path), flags, mode); }
int openat64(int folder, const char *path, int flags, ...) { MODE(flags); return NEXT(openat64)(folder, instead(path), flags, mode); }
FILE *fopen(const char *path, const char *mode) { return NEXT(fopen)(instead(path), mode); }
FILE *fopen64(const char *path, const char *mode) { return NEXT(fopen64)(instead(path), mode); }
int access(const char *path, int mode) { return NEXT(access)(instead(path), mode); }
