// Kernels after a copy: `finish` converts u8 pictures to floats, `gather` packs scattered rows into a dense array.
//
//   finish   [rows, H, W, C] u8  ──►  [rows, H, W, C] or [rows, C, H, W] of f32, f16 or bf16, mirrored by `flips`
//   gather   staging[offsets[i] ..][.. row_bytes]  ──►  out[i * row_bytes ..][.. row_bytes]
//
// build.py makes finish.ptx from this file; run it after every change. The same source runs on the CPU in the tests
// (tests/standin/kernels.cpp), which compare it with the rule in src/device/finish.rs.
//
// Limits, checked by the host: H * W * C < 2^31, so indices within a picture have 32 bits; indices of pictures and of
// gathered bytes have 64; 1 <= C <= 4; rows < 2^31; every result is finite. No shared memory, no barrier: each group of
// pixels and each window of 16 bytes belongs to one thread, and any grid and block gives the same bytes.

// Needs no header: this block and kernels.cpp have all code that differs between CPU and GPU.
#ifndef FEEDLINE_ON_CPU
// Rounds to nearest, ties to even; keeps subnormal results.
static __device__ __forceinline__ unsigned short feedline_f16(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
static __device__ __forceinline__ unsigned feedline_bits(float value) { return __float_as_uint(value); }
#endif

typedef unsigned char u8;
typedef unsigned long long u64;

// Per channel: y = (x / 255 - mean) / std. Passed by value; src/device/finish.rs has the same struct.
struct Moments {
    float mean[4];
    float std[4];

    // The rule without the dtype conversion: each operation rounds separately to nearest, ties to even.
    __device__ __forceinline__ float of(unsigned channel, u8 x) const {
        return __fdiv_rn(__fsub_rn(__fdiv_rn((float)x, 255.0f), mean[channel]), std[channel]);
    }
};

// Values of one store.
template <class T, unsigned N>
struct alignas(sizeof(T) * N) Pack {
    T at[N];
};

struct ToF32 {
    typedef float Bits;
    static __device__ __forceinline__ Bits of(float value) { return value; }
};

struct ToF16 {
    typedef unsigned short Bits;
    static __device__ __forceinline__ Bits of(float value) { return feedline_f16(value); }
};

struct ToBf16 {
    typedef unsigned short Bits;
    // Rounds to nearest, ties to even, by integers, because the instruction needs sm_80. Finite values only.
    static __device__ __forceinline__ Bits of(float value) {
        const unsigned bits = feedline_bits(value);
        return (Bits)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    }
};

// Loads V pixels of C bytes from `at`. Four pixels are whole, aligned words.
template <unsigned C, unsigned V>
static __device__ __forceinline__ void load(const u8* __restrict__ at, u8 (&bytes)[V * C]) {
    if constexpr (V == 4) {
        const unsigned* __restrict__ words = (const unsigned*)at;
#pragma unroll
        for (unsigned w = 0; w < C; w++) {
            const unsigned word = __ldg(words + w);
#pragma unroll
            for (unsigned b = 0; b < 4; b++) bytes[4 * w + b] = (u8)(word >> (8 * b));
        }
    } else {
#pragma unroll
        for (unsigned b = 0; b < V * C; b++) bytes[b] = __ldg(at + b);
    }
}

// One thread makes V neighbouring pixels of an output line, so a warp reads and writes contiguous memory. V = 4 needs
// aligned arrays, and W % 4 == 0: then groups do not cross lines, and a mirrored group is a group.
template <class D, unsigned C, unsigned V>
static __device__ __forceinline__ void pictures(const u8* __restrict__ in, typename D::Bits* __restrict__ out,
                                                const u8* __restrict__ flips, unsigned rows, unsigned height,
                                                unsigned width, bool channels_first, const Moments& moments) {
    typedef typename D::Bits T;
    const unsigned plane = height * width;
    const unsigned groups = plane / V, across = width / V;
    for (unsigned row = blockIdx.y; row < rows; row += gridDim.y) {
        const bool flip = flips != nullptr && flips[row] != 0;
        const u8* __restrict__ source = in + (u64)row * plane * C;
        T* __restrict__ target = out + (u64)row * plane * C;
        for (unsigned group = blockIdx.x * blockDim.x + threadIdx.x; group < groups; group += gridDim.x * blockDim.x) {
            unsigned from = group;
            if (flip) {
                const unsigned line = group / across * across;
                from = line + (across - 1 - (group - line));
            }
            u8 bytes[V * C];
            load<C, V>(source + from * (V * C), bytes);
            T made[V][C];
#pragma unroll
            for (unsigned p = 0; p < V; p++) {
#pragma unroll
                for (unsigned c = 0; c < C; c++) {
                    const u8 x = flip ? bytes[(V - 1 - p) * C + c] : bytes[p * C + c];
                    made[p][c] = D::of(moments.of(c, x));
                }
            }
            // C stores of V values in both layouts: one into each plane, or contiguous.
#pragma unroll
            for (unsigned s = 0; s < C; s++) {
                Pack<T, V> pack;
#pragma unroll
                for (unsigned v = 0; v < V; v++) {
                    const unsigned flat = s * V + v;
                    pack.at[v] = channels_first ? made[v][s] : made[flat / C][flat % C];
                }
                const unsigned at = channels_first ? s * plane + group * V : (group * C + s) * V;
                *(Pack<T, V>*)(target + at) = pack;
            }
        }
    }
}

template <class D, unsigned C>
static __device__ __forceinline__ void channels_are(const u8* __restrict__ in, typename D::Bits* __restrict__ out,
                                                    const u8* __restrict__ flips, unsigned rows, unsigned height,
                                                    unsigned width, bool channels_first, const Moments& moments) {
    const bool aligned = width % 4 == 0 && (u64)in % 4 == 0 && (u64)out % (4 * sizeof(typename D::Bits)) == 0;
    if (aligned) {
        pictures<D, C, 4>(in, out, flips, rows, height, width, channels_first, moments);
    } else {
        pictures<D, C, 1>(in, out, flips, rows, height, width, channels_first, moments);
    }
}

template <class D>
static __device__ __forceinline__ void finish(const u8* __restrict__ in, typename D::Bits* __restrict__ out,
                                              const u8* __restrict__ flips, unsigned rows, unsigned height,
                                              unsigned width, unsigned channels, bool channels_first,
                                              const Moments& moments) {
    switch (channels) {
    case 1: return channels_are<D, 1>(in, out, flips, rows, height, width, channels_first, moments);
    case 2: return channels_are<D, 2>(in, out, flips, rows, height, width, channels_first, moments);
    case 3: return channels_are<D, 3>(in, out, flips, rows, height, width, channels_first, moments);
    case 4: return channels_are<D, 4>(in, out, flips, rows, height, width, channels_first, moments);
    }
}

// Grid: x over groups of pixels, y over pictures. `flips`: a byte per picture, 0 = not mirrored; or null.
#define FEEDLINE_FINISH(NAME, D)                                                                                       \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        NAME(const u8* __restrict__ in, D::Bits* __restrict__ out, const u8* __restrict__ flips, unsigned rows,        \
             unsigned height, unsigned width, unsigned channels, int channels_first, Moments moments) {                \
        finish<D>(in, out, flips, rows, height, width, channels, channels_first != 0, moments);                        \
    }
FEEDLINE_FINISH(feedline_finish_f32, ToF32)
FEEDLINE_FINISH(feedline_finish_f16, ToF16)
FEEDLINE_FINISH(feedline_finish_bf16, ToBf16)

// Loads 16 bytes from any address, by aligned words that each contain at least one of the bytes.
static __device__ __forceinline__ Pack<unsigned, 4> sixteen(const u8* __restrict__ at) {
    if ((u64)at % 16 == 0) return *(const Pack<unsigned, 4>*)at;
    const unsigned past = (unsigned)((u64)at % 4);
    const unsigned* __restrict__ words = (const unsigned*)(at - past);
    unsigned read[5];
#pragma unroll
    for (unsigned w = 0; w < 4; w++) read[w] = __ldg(words + w);
    read[4] = past == 0 ? 0 : __ldg(words + 4);
    Pack<unsigned, 4> out;
#pragma unroll
    for (unsigned w = 0; w < 4; w++) out.at[w] = __funnelshift_r(read[w], read[w + 1], 8 * past);
    return out;
}

// Grid and block: x over the windows of a row, y over rows. A window is 16 aligned bytes of `out`. Neighbouring rows may
// share the first and last window, so each thread writes only its own row's bytes.
extern "C" __global__ void __launch_bounds__(256)
    feedline_gather(const u8* __restrict__ staging, const u64* __restrict__ offsets, u8* __restrict__ out,
                    u64 row_bytes, u64 rows) {
    const u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x, step = (u64)gridDim.x * blockDim.x;
    const u64 down = (u64)gridDim.y * blockDim.y;
    for (u64 row = (u64)blockIdx.y * blockDim.y + threadIdx.y; row < rows; row += down) {
        const u8* __restrict__ source = staging + offsets[row];
        u8* __restrict__ target = out + row * row_bytes;
        const u64 before = (u64)target % 16;
        const u64 windows = (before + row_bytes + 15) / 16;
        for (u64 window = first; window < windows; window += step) {
            // This window contains bytes [from, to) of the row.
            const u64 from = window == 0 ? 0 : window * 16 - before;
            const u64 end = window * 16 + 16 - before, to = end < row_bytes ? end : row_bytes;
            if (to - from == 16) {
                *(Pack<unsigned, 4>*)(target + from) = sixteen(source + from);
            } else {
                for (u64 byte = from; byte < to; byte++) target[byte] = __ldg(source + byte);
            }
        }
    }
}
