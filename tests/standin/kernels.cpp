// Runs the GPU's kernels on the CPU: their source, with what CUDA adds to C++ defined here.
//
//   void run_NAME(const unsigned grid[3], const unsigned block[3], const void* const params[])
//
// runs the kernel NAME for each thread of each block, one after the other, with parameters as cuLaunchKernel takes them: the
// places of the values. May be called from any thread. A kernel may have one barrier, before which it fills shared memory: each
// thread of a block first runs up to it and leaves, then all run as a whole.
//
//   void limit_loads(const void* from, const void* to)
//
// ends the process when a kernel on this thread loads pixels or rows outside of [from, to); null: from anywhere.
//
// Compiled with the sanitizer for undefined behaviour set to trap: a misaligned vector access, an error on a GPU, ends
// the process here.

#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <utility>

#define __global__
#define __device__
#define __shared__ thread_local
#define __forceinline__ inline
#define __launch_bounds__(...)

struct Dim {
    unsigned x, y, z;
};
static thread_local Dim threadIdx, blockIdx, blockDim, gridDim;

// Threads run to the barrier alone, or past it.
static thread_local bool to_barrier = false;
static thread_local std::jmp_buf leave;

static inline void __syncthreads() {
    if (to_barrier) std::longjmp(leave, 1);
}

static thread_local std::uintptr_t loads_from = 0, loads_to = UINTPTR_MAX;

extern "C" void limit_loads(const void* from, const void* to) {
    loads_from = (std::uintptr_t)from;
    loads_to = to == nullptr ? UINTPTR_MAX : (std::uintptr_t)to;
}

template <class T>
static inline T __ldg(const T* at) {
    const std::uintptr_t address = (std::uintptr_t)at;
    if (address < loads_from || address > loads_to - sizeof *at) {
        std::fprintf(stderr, "a kernel loads from %p, outside of its buffer\n", (const void*)at);
        std::abort();
    }
    return *at;
}

static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    const std::uint64_t both = (std::uint64_t)high << 32 | low;
    return (unsigned)(both >> (by & 31));
}

#include "../../crates/device/src/cuda/kernels/finish.cu"

template <class... Args, std::size_t... I>
static void call(void (*kernel)(Args...), const void* const* params, std::index_sequence<I...>) {
    kernel(*static_cast<const Args*>(params[I])...);
}

// Runs one thread; whether it has left at the barrier.
template <class... Args>
static bool leaves(void (*kernel)(Args...), const void* const* params) {
    if (setjmp(leave) != 0) return true;
    call(kernel, params, std::index_sequence_for<Args...>{});
    return false;
}

template <class... Args>
static void run(void (*kernel)(Args...), const unsigned* grid, const unsigned* block, const void* const* params) {
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    for (unsigned b = 0; b < grid[0] * grid[1] * grid[2]; b++) {
        blockIdx = {b % grid[0], b / grid[0] % grid[1], b / grid[0] / grid[1]};
        // Once, or twice if threads have left at a barrier.
        bool left = true;
        for (to_barrier = true; left; to_barrier = false) {
            left = false;
            for (unsigned t = 0; t < block[0] * block[1] * block[2]; t++) {
                threadIdx = {t % block[0], t / block[0] % block[1], t / block[0] / block[1]};
                left |= leaves(kernel, params);
            }
        }
    }
}

#define RUN(NAME)                                                                                                      \
    extern "C" void run_##NAME(const unsigned* grid, const unsigned* block, const void* const* params) {               \
        run(NAME, grid, block, params);                                                                                \
    }
RUN(feedline_finish_2)
RUN(feedline_finish_4)
RUN(feedline_gather)
