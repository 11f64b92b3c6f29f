// Reduce-scatter and accumulation in one launch: every rank reads its block of every rank's input over NVLink, sums in FP32
// in rank order from 0, and adds `scale` times the sum to its own FP32 accumulator. Compiled without contraction.
//
//   entry   block 0 tells every rank "my input is written, round e"; every block waits until all ranks have said so
//   body    read, sum, add
//   exit    the last block tells every rank "I have read, round e", and waits until all have; then round e is over
//
// So the launch ends on a rank only when nobody reads its input any more. Rounds are counted in device memory, by the
// kernel: a graph replays with the next number each time. Numbers are compared by the sign of their difference, so they
// may wrap. Each word has one writer. A rank that waits longer than `patience` writes down for whom, does nothing more,
// and neither do its later launches. `src/oneshot.rs` checks this protocol in every interleaving.

const int MOST_RANKS = 16;
const int MOST_TRANSFERS = 8;

struct Transfer {
    u64 from[MOST_RANKS];  // my block in each rank's input
    float* to;
    u64 n;
};

struct Batch {
    Transfer transfers[MOST_TRANSFERS];
};

// One for each rank and group, zero at the start; mapped by all ranks of the group.
struct Pad {
    u32 round;     // the last one that is over
    u32 finished;  // blocks of the running launch that have read; in the upper half, that gave up
    u32 failed;
    u32 unused[29];
    u32 written[32];  // by rank: the last round whose input it has written
    u32 read[32];     // by rank: the last round in which it has read mine
    Pad* pads[MOST_RANKS];
};

__device__ __forceinline__ void publish(u32* p, u32 v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ u32 look(const u32* p) {
    u32 v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ u32 take(const u32* p) {
    u32 v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ u64 now() {
    u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

// Waits until `word` has reached `round`. `words`: 0 what failed (0 nothing), 1 rank, 2 round, 3 set by the host to end
// all waits.
__device__ __forceinline__ bool reaches(const u32* word, u32 round, Pad* pad, volatile u32* words, u32 code, u32 rank,
                                        u64 patience) {
    u64 begin = 0;
    for (u32 turn = 0; (int)(look(word) - round) < 0; turn++) {
        if (turn % 512 != 511) continue;
        u64 time = now();
        if (begin == 0) begin = time;
        bool late = time - begin > patience;
        if (late || look(&pad->failed) || (time - begin > 100000 && words[3])) {
            if (atomicExch(&pad->failed, 1u) == 0) {
                words[1] = rank;
                words[2] = round;
                __threadfence_system();
                words[0] = code;
            }
            return false;
        }
    }
    take(word);
    return true;
}

// 16 bytes of a peer's memory, or mine: written by another GPU during this launch's life at the earliest before the
// entry, so an ordinary load, and no copy kept in L1. Not the read-only path.
__device__ __forceinline__ uint4 fetch16(u64 at) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
}
__device__ __forceinline__ float fetch(const u16*, u64 at) {
    u16 v;
    asm volatile("ld.global.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(at));
    return widen(v);
}
__device__ __forceinline__ float fetch(const float*, u64 at) {
    float v;
    asm volatile("ld.global.L1::no_allocate.f32 %0, [%1];" : "=f"(v) : "l"(at));
    return v;
}

// Element e of a pack.
__device__ __forceinline__ float element(const u16*, const uint4& v, int e) {
    u32 words[4] = {v.x, v.y, v.z, v.w};
    return __uint_as_float(e % 2 ? words[e / 2] & 0xffff0000u : words[e / 2] << 16);
}
__device__ __forceinline__ float element(const float*, const uint4& v, int e) {
    u32 words[4] = {v.x, v.y, v.z, v.w};
    return __uint_as_float(words[e]);
}

// R: ranks, or 0 if only known at run time. U: packs of 16 bytes that a thread has in flight for each rank.
template <class T, int R, int U>
__device__ __forceinline__ void body(const Transfer& t, u32 size, float scale) {
    const int E = 16 / sizeof(T), S = R ? R : MOST_RANKS;
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    bool wide = ((u64)t.to & 15) == 0;
#pragma unroll
    for (int p = 0; p < S; p++)
        if (R || p < size) wide = wide && (t.from[p] & 15) == 0;
    u64 packs = wide ? t.n / E : 0;
    for (u64 first = thread; first < packs; first += U * threads) {
        uint4 x[U][S];
        float4 sum[U][E / 4];
#pragma unroll
        for (int u = 0; u < U; u++) {
            u64 at = first + u * threads;
            if (at < packs) {
#pragma unroll
                for (int p = 0; p < S; p++)
                    if (R || p < size) x[u][p] = fetch16(t.from[p] + 16 * at);
#pragma unroll
                for (int q = 0; q < E / 4; q++) sum[u][q] = ((const float4*)t.to)[at * (E / 4) + q];
            }
        }
#pragma unroll
        for (int u = 0; u < U; u++) {
            u64 at = first + u * threads;
            if (at < packs) {
                float* m = &sum[u][0].x;
#pragma unroll
                for (int e = 0; e < E; e++) {
                    float s = element((const T*)0, x[u][0], e);
#pragma unroll
                    for (int p = 1; p < S; p++)
                        if (R || p < size) s = s + element((const T*)0, x[u][p], e);
                    m[e] = m[e] + scale * s;
                }
#pragma unroll
                for (int q = 0; q < E / 4; q++) ((float4*)t.to)[at * (E / 4) + q] = sum[u][q];
            }
        }
    }
    for (u64 at = packs * E + thread; at < t.n; at += threads) {
        float s = fetch((const T*)0, t.from[0] + sizeof(T) * at);
#pragma unroll
        for (int p = 1; p < S; p++)
            if (R || p < size) s = s + fetch((const T*)0, t.from[p] + sizeof(T) * at);
        t.to[at] = t.to[at] + scale * s;
    }
}

// Adds to a count of this GPU: what this block did before comes before, what the others did before theirs comes after.
__device__ __forceinline__ u32 count_up(u32* p, u32 by) {
    u32 before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(by) : "memory");
    return before;
}

// A launch of few bytes is all latency: whatever is loaded of the pad is loaded at once, at the start.
template <class T, int R, int U>
__device__ __forceinline__ void one_shot(const Batch& batch, u32 count, Pad* pad, u32 rank, u32 size, float scale,
                                         u64 patience, volatile u32* words) {
    __shared__ u32 go, last;
    u32 round = look(&pad->round) + 1, failed = look(&pad->failed);
    Pad* peer = threadIdx.x < size ? pad->pads[threadIdx.x] : pad;
    if (threadIdx.x == 0) go = failed == 0;
    __syncthreads();
    if (failed == 0 && threadIdx.x < size) {
        if (blockIdx.x == 0) publish(&peer->written[rank], round);
        if (!reaches(&pad->written[threadIdx.x], round, pad, words, 1, threadIdx.x, patience)) go = 0;
    }
    __syncthreads();
    if (go)
        for (u32 i = 0; i < count; i++) body<T, R, U>(batch.transfers[i], size, scale);
    __syncthreads();
    // The upper half counts blocks that gave up.
    if (threadIdx.x == 0) last = count_up(&pad->finished, go ? 1 : 0x10001);
    __syncthreads();
    if ((last & 0xffff) != gridDim.x - 1) return;
    bool whole = go && last >> 16 == 0;
    if (whole && threadIdx.x < size) {
        publish(&peer->read[rank], round);
#ifndef WITHOUT_EXIT
        reaches(&pad->read[threadIdx.x], round, pad, words, 2, threadIdx.x, patience);
#endif
    }
    if (threadIdx.x == 0) {
        pad->finished = 0;
        if (whole) pad->round = round;
    }
}

#define ONE_SHOT(NAME, T, R, U)                                                                                        \
    extern "C" __global__ void __launch_bounds__(512) NAME(const __grid_constant__ Batch batch, u32 count, Pad* pad,  \
                                                           u32 rank, u32 size, float scale, u64 patience,             \
                                                           volatile u32* words) {                                      \
        one_shot<T, R, U>(batch, count, pad, rank, size, scale, patience, words);                                      \
    }

ONE_SHOT(one_shot_bf16_2, u16, 2, 4)
ONE_SHOT(one_shot_bf16_4, u16, 4, 2)
ONE_SHOT(one_shot_bf16_8, u16, 8, 1)
ONE_SHOT(one_shot_bf16_any, u16, 0, 1)
ONE_SHOT(one_shot_f32_2, float, 2, 4)
ONE_SHOT(one_shot_f32_4, float, 4, 2)
ONE_SHOT(one_shot_f32_8, float, 8, 1)
ONE_SHOT(one_shot_f32_any, float, 0, 1)
