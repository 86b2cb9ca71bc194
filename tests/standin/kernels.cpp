// Runs the GPU's kernels on the CPU: their source, with what CUDA adds to C++ defined here.
//
//   void run_NAME(const unsigned grid[3], const unsigned block[3], const void* const params[])
//
// runs the kernel NAME once for each thread of each block, one after the other (the kernels share no memory and wait
// for nobody), with parameters as cuLaunchKernel takes them: the places of the values. May be called from any thread.
//
//   void limit_loads(const void* from, const void* to)
//
// ends the process when a kernel on this thread loads pixels or rows outside of [from, to); null: from anywhere.
//
// Compiled with the sanitizer for undefined behaviour set to trap: a misaligned vector access, an error on a GPU, ends
// the process here.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#define FEEDLINE_ON_CPU
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)

struct Dim {
    unsigned x, y, z;
};
static thread_local Dim threadIdx, blockIdx, blockDim, gridDim;

// With -ffp-contract=off each operation is rounded by itself.
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsub_rn(float a, float b) { return a - b; }

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

static inline unsigned feedline_bits(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// What cvt.rn.f16.f32 does with finite values that f16 holds: to the nearest, ties to even, with subnormals.
static inline unsigned short feedline_f16(float value) {
    const unsigned bits = feedline_bits(value);
    const unsigned sign = bits >> 16 & 0x8000u;
    const int exponent = (int)(bits >> 23 & 0xff) - 127;
    // Too small even for half of the smallest subnormal, 2^-24.
    if (exponent < -25) return (unsigned short)sign;
    const unsigned mantissa = (bits & 0x7fffffu) | 0x800000u;
    // Bits that are cut off: 13, and one more for each power of two below the smallest normal value, 2^-14.
    const unsigned cut = exponent >= -14 ? 13u : 13u + (unsigned)(-14 - exponent);
    const unsigned kept = mantissa >> cut, rest = mantissa & ((1u << cut) - 1), half = 1u << (cut - 1);
    const unsigned rounded = kept + (rest > half || (rest == half && (kept & 1)) ? 1 : 0);
    // The leading bit of `kept`, and what rounding carries, count the exponent up by themselves.
    const unsigned base = exponent >= -14 ? (unsigned)(exponent + 14) << 10 : 0;
    return (unsigned short)(sign | (base + rounded));
}

#include "../../src/device/cuda/kernels/finish.cu"

template <class... Args, std::size_t... I>
static void call(void (*kernel)(Args...), const void* const* params, std::index_sequence<I...>) {
    kernel(*static_cast<const Args*>(params[I])...);
}

template <class... Args>
static void run(void (*kernel)(Args...), const unsigned* grid, const unsigned* block, const void* const* params) {
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    for (unsigned b = 0; b < grid[0] * grid[1] * grid[2]; b++) {
        blockIdx = {b % grid[0], b / grid[0] % grid[1], b / grid[0] / grid[1]};
        for (unsigned t = 0; t < block[0] * block[1] * block[2]; t++) {
            threadIdx = {t % block[0], t / block[0] % block[1], t / block[0] / block[1]};
            call(kernel, params, std::index_sequence_for<Args...>{});
        }
    }
}

#define RUN(NAME)                                                                                                      \
    extern "C" void run_##NAME(const unsigned* grid, const unsigned* block, const void* const* params) {               \
        run(NAME, grid, block, params);                                                                                \
    }
RUN(feedline_finish_f32)
RUN(feedline_finish_f16)
RUN(feedline_finish_bf16)
RUN(feedline_gather)
