// Kernels after a copy: `finish` converts u8 pictures by a table, `gather` packs scattered rows into a dense array.
//
//   finish   [rows, H, W, C] u8  ──►  [rows, H, W, C] or [rows, C, H, W] of 2 or 4 bytes per value, mirrored by `flips`
//   gather   staging[offsets[i] ..][.. row_bytes]  ──►  out[i * row_bytes ..][.. row_bytes]
//
// The table is that of src/device/finish.rs: 256 results per channel. So a kernel rounds nothing, and f16 and bf16 are
// one kernel. Each block copies the table to shared memory, and a value is one load from there. Random values of a warp
// meet about three deep in one of the 32 banks, which takes less time than the traffic with device memory.
//
// build.py makes finish.ptx and finish.fatbin from this file; run it after every change. The same source runs on the CPU
// in the tests (tests/standin/kernels.cpp), which compare it with the rule in src/device/finish.rs.
//
// Limits, checked by the host: H * W * C < 2^31, so indices within a picture have 32 bits; indices of pictures and of
// gathered bytes have 64; 1 <= C <= 4; rows < 2^31. Each group of pixels and each window of 16 bytes belongs to one
// thread, and any grid and block gives the same bytes.

// Needs no header: kernels.cpp has all that a CPU lacks.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned u32;
typedef unsigned long long u64;

// Values of one store.
template <class T, unsigned N>
struct alignas(sizeof(T) * N) Pack {
    T at[N];
};

// The entry of a channel for byte `byte` of `word`: one shift makes its place in the table, a mask cuts it out.
template <class T>
static __device__ __forceinline__ T result(const T* channel, u32 word, unsigned byte) {
    const unsigned scale = sizeof(T) / 2;
    const u32 moved = byte == 0 ? word << scale : word >> (8 * byte - scale);
    return *(const T*)((const u8*)channel + (moved & 0xffu << scale));
}

// One thread makes four neighbouring pixels of an output line: it loads C whole words, and a warp reads and writes
// contiguous memory. Needs aligned arrays and W % 4 == 0: then groups do not cross lines, and a mirrored group is a group.
template <class T, unsigned C>
static __device__ __forceinline__ void by_four(const u8* __restrict__ in, T* __restrict__ out,
                                               const u8* __restrict__ flips, const T* table, unsigned rows,
                                               unsigned height, unsigned width, bool channels_first) {
    const unsigned groups = height * width / 4, across = width / 4;
    const unsigned first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    // Columns of groups are counted along: a division per group would cost as much as three values.
    const unsigned first_column = first % across, column_step = step % across;
    const u64 picture = (u64)groups * C;
    const u32* __restrict__ source = (const u32*)in + blockIdx.y * picture;
    Pack<T, 4>* __restrict__ target = (Pack<T, 4>*)out + blockIdx.y * picture;
    for (unsigned row = blockIdx.y; row < rows; row += gridDim.y) {
        const bool flip = flips != nullptr && flips[row] != 0;
        unsigned column = first_column;
        for (unsigned group = first; group < groups; group += step) {
            const unsigned from = flip ? group + (across - 1) - 2 * column : group;
            u32 words[C];
#pragma unroll
            for (unsigned w = 0; w < C; w++) words[w] = __ldg(source + (u64)from * C + w);
            T made[4 * C];
#pragma unroll
            for (unsigned v = 0; v < 4 * C; v++) {
                const T* channel = table + v % C * 256;
                const unsigned mirrored = (3 - v / C) * C + v % C;
                made[v] = flip ? result(channel, words[mirrored / 4], mirrored % 4) : result(channel, words[v / 4], v % 4);
            }
            // C stores in both layouts: one into each plane, or contiguous.
#pragma unroll
            for (unsigned s = 0; s < C; s++) {
                if (channels_first) {
                    target[(u64)s * groups + group] = {made[s], made[C + s], made[2 * C + s], made[3 * C + s]};
                } else {
                    target[(u64)group * C + s] = {made[4 * s], made[4 * s + 1], made[4 * s + 2], made[4 * s + 3]};
                }
            }
            column += column_step;
            column -= column < across ? 0 : across;
        }
        source += gridDim.y * picture;
        target += gridDim.y * picture;
    }
}

// One thread makes one pixel, of any width and at any address.
template <class T>
static __device__ __forceinline__ void by_one(const u8* __restrict__ in, T* __restrict__ out,
                                              const u8* __restrict__ flips, const T* table, unsigned rows,
                                              unsigned height, unsigned width, unsigned channels, bool channels_first) {
    const unsigned plane = height * width;
    const unsigned pixel_step = channels_first ? 1 : channels, channel_step = channels_first ? plane : 1;
    for (unsigned row = blockIdx.y; row < rows; row += gridDim.y) {
        const bool flip = flips != nullptr && flips[row] != 0;
        const u8* __restrict__ source = in + (u64)row * plane * channels;
        T* __restrict__ target = out + (u64)row * plane * channels;
        const unsigned first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
        for (unsigned pixel = first; pixel < plane; pixel += step) {
            const unsigned from = flip ? pixel + (width - 1) - 2 * (pixel % width) : pixel;
            u8 bytes[4];
            // All loads first: none waits for another.
#pragma unroll
            for (unsigned c = 0; c < 4; c++) bytes[c] = c < channels ? __ldg(source + from * channels + c) : 0;
#pragma unroll
            for (unsigned c = 0; c < 4; c++) {
                if (c < channels) target[pixel * pixel_step + c * channel_step] = table[c * 256 + bytes[c]];
            }
        }
    }
}

template <class T>
static __device__ __forceinline__ void finish(const u8* __restrict__ in, T* __restrict__ out,
                                              const u8* __restrict__ flips, const T* __restrict__ results,
                                              unsigned rows, unsigned height, unsigned width, unsigned channels,
                                              bool channels_first) {
    typedef Pack<u32, 4> Sixteen;
    alignas(16) static __shared__ T table[4 * 256];
    // One load per thread: 256 threads bring 4 KiB.
    for (unsigned at = threadIdx.x; at < channels * 16 * sizeof(T); at += blockDim.x) {
        ((Sixteen*)table)[at] = ((const Sixteen*)results)[at];
    }
    __syncthreads();
    const bool aligned = width % 4 == 0 && (u64)in % 4 == 0 && (u64)out % (4 * sizeof(T)) == 0;
    switch (aligned ? channels : 0) {
    case 1: return by_four<T, 1>(in, out, flips, table, rows, height, width, channels_first);
    case 2: return by_four<T, 2>(in, out, flips, table, rows, height, width, channels_first);
    case 3: return by_four<T, 3>(in, out, flips, table, rows, height, width, channels_first);
    case 4: return by_four<T, 4>(in, out, flips, table, rows, height, width, channels_first);
    default: return by_one<T>(in, out, flips, table, rows, height, width, channels, channels_first);
    }
}

// Grid: x over groups of pixels, y over pictures; block: x alone. `flips`: a byte per picture, 0 = not mirrored; or null.
// `table`: 256 results for each channel, aligned to 16 bytes. BLOCKS run at once on a multiprocessor of 2048 threads: as
// many as leave registers for all values of a thread.
#define FEEDLINE_FINISH(NAME, T, BLOCKS)                                                                               \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS)                                                          \
        NAME(const u8* __restrict__ in, T* __restrict__ out, const u8* __restrict__ flips, const T* __restrict__ table, \
             unsigned rows, unsigned height, unsigned width, unsigned channels, int channels_first) {                  \
        finish<T>(in, out, flips, table, rows, height, width, channels, channels_first != 0);                          \
    }
FEEDLINE_FINISH(feedline_finish_2, u16, 8)
FEEDLINE_FINISH(feedline_finish_4, u32, 6)

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
