// The reduce-scatter by the bulk-copy engine of each multiprocessor; Hopper and later.

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_copy(u32 to, u64 from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Tiles of P packs of every rank and of the accumulator go through shared memory, a tile a stage; all threads but those of
// the first warp sum a tile together. All addresses are multiples of 16.
const u32 MOST_STAGES = 16;

template <class T, int R, int P>
__device__ __forceinline__ void bulk(const Batch<R ? R : MOST_RANKS>& batch) {
    const int E = 16 / sizeof(T), S = R ? R : MOST_RANKS;
    extern __shared__ __align__(128) unsigned char stages_at[];
    __shared__ u64 full[MOST_STAGES], empty[MOST_STAGES];
    __shared__ u32 go;
    const Transfer<S>& t = mine(batch);
    const u32 size = R ? R : batch.size, stages = batch.stages, stage_bytes = 16 * P * size + 4 * E * P;
    const u32 lane = threadIdx.x % 32, block = blockIdx.x - t.first;
    const float scale = batch.scale;
    const u64 packs = t.n / E;
    const u32 tiles = (u32)((packs + P - 1) / P), own = tiles > block ? (tiles - block - 1) / t.blocks + 1 : 0;
    if (threadIdx.x < 32) {
        // The first warp keeps the rounds and fetches.
        Turn turn = begin(batch);
        if (lane < stages) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&full[lane])) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&empty[lane])), "r"(P / 32)
                         : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        refresh(turn, batch);
        bool ok = __all_sync(~0u, turn.ok && enter(turn, batch));
        if (lane == 0) go = ok;
        __syncthreads();
        if (ok) {
            // What peers wrote came through ordinary stores.
            asm volatile("fence.proxy.async;" ::: "memory");
            u32 stage = 0, parity = 1;
            for (u32 k = 0; k < own; k++) {
                u64 at = (u64)(block + k * t.blocks) * P;
                u32 n = packs - at < P ? (u32)(packs - at) : P, barrier = shared_address(&full[stage]);
                u32 to = shared_address(stages_at) + stage * stage_bytes;
                if (k >= stages) barrier_wait(shared_address(&empty[stage]), parity);
                if (lane == 0) barrier_expect(barrier, 16 * n * size + 4 * E * n);
                __syncwarp();
                if (lane < size) bulk_copy(to + 16 * P * lane, t.from[lane] + 16 * at, 16 * n, barrier);
                if (lane == 16) bulk_copy(to + 16 * P * size, (u64)(t.to + E * at), 4 * E * n, barrier);
                if (++stage == stages) stage = 0, parity ^= 1;
            }
            __syncthreads();
            leave(turn, batch);
        }
        end(turn);
        return;
    }
    __syncthreads();
    if (!go) return;
    const u32 pack = threadIdx.x - 32;
    // The ends are one element a thread, by the last block's first threads.
    const u64 end_at = packs * E + pack;
    const bool ends = block == t.blocks - 1 && end_at < t.n;
    float end_sum = 0;
    if (ends) {
        end_sum = fetch((const T*)0, t.from[0] + sizeof(T) * end_at);
        for (u32 p = 1; p < size; p++) end_sum = end_sum + fetch((const T*)0, t.from[p] + sizeof(T) * end_at);
        end_sum = t.to[end_at] + scale * end_sum;
        known(__float_as_uint(end_sum));
    }
    u32 stage = 0, parity = 0;
    const u64 quads = packs * (E / 4), step = (u64)t.blocks * P * (E / 4);
    u64 first = (u64)block * P * (E / 4);
    for (u32 k = 0; k < own; k++, first += step) {
        const unsigned char* tile = stages_at + stage * stage_bytes;
        barrier_wait(shared_address(&full[stage]), parity);
        // Four elements at a time, neighbours beside neighbours, so that no bank is asked twice.
        float4 sum[E / 4];
#pragma unroll
        for (int q = 0; q < E / 4; q++) {
            const u32 quad = q * P + pack;
            sum[q] = ((const float4*)(tile + 16 * P * size))[quad];
            float* m = &sum[q].x;
            float s[4];
#pragma unroll
            for (int p = 0; p < S; p++)
                if (R || p < size) {
                    u32 w[4];
                    const unsigned char* source = tile + 16 * P * p + 4 * sizeof(T) * quad;
                    if (sizeof(T) == 2) {
                        uint2 x = *(const uint2*)source;
                        w[0] = x.x, w[1] = x.y;
                    } else {
                        uint4 x = *(const uint4*)source;
                        w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
                    }
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        s[e] = p == 0 ? element((const T*)0, w, e) : s[e] + element((const T*)0, w, e);
                }
#pragma unroll
            for (int e = 0; e < 4; e++) m[e] = m[e] + scale * s[e];
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&empty[stage]));
#pragma unroll
        for (int q = 0; q < E / 4; q++)
            if (first + q * P + pack < quads) ((float4*)t.to)[first + q * P + pack] = sum[q];
        if (++stage == stages) stage = 0, parity ^= 1;
    }
    __syncthreads();
    if (ends) t.to[end_at] = end_sum;
}

__device__ __forceinline__ void prefetch(u64 from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void load_quad(const u16*, u64 at, u32* w) {
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(at));
}
__device__ __forceinline__ void load_quad(const float*, u64 at, u32* w) {
    uint4 x = fetch16(at);
    w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
}
__device__ __forceinline__ void store_quad(u64 at, const float4& v) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
__device__ __forceinline__ void shared_quad(const u16*, u32 at, u32* w) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(at));
}
__device__ __forceinline__ void shared_quad(const float*, u32 at, u32* w) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(at));
}

// The same with less through shared memory. OWN: my block goes through it too; SUM: the accumulator does. What doesn't is
// loaded by the threads that sum, D tiles ahead. NEAR: and brought to L2 when its tile is fetched. The first warp knows
// from the barriers that peers have been read, and leaves while the last tiles are summed.
template <class T, int R, int P, bool OWN, bool SUM, int D, bool NEAR>
__device__ __forceinline__ void lean(const Batch<R ? R : MOST_RANKS>& batch) {
    const int E = 16 / sizeof(T), Q = E / 4, S = R ? R : MOST_RANKS, W = sizeof(T);
    extern __shared__ __align__(128) unsigned char stages_at[];
    __shared__ u64 full[MOST_STAGES], empty[MOST_STAGES];
    __shared__ u32 go;
    const Transfer<S>& t = mine(batch);
    const u32 size = R ? R : batch.size, rank = batch.rank, stages = batch.stages;
    const u32 slots = OWN ? size : size - 1, stage_bytes = 16 * P * slots + (SUM ? 4 * E * P : 0);
    const u32 lane = threadIdx.x % 32, block = blockIdx.x - t.first;
    const float scale = batch.scale;
    const u64 packs = t.n / E;
    const u32 tiles = (u32)((packs + P - 1) / P), own = tiles > block ? (tiles - block - 1) / t.blocks + 1 : 0;
    u64 mine_at = t.from[0];
#pragma unroll
    for (int p = 1; p < S; p++)
        if (p == rank) mine_at = t.from[p];
    if (threadIdx.x < 32) {
        Turn turn = begin_early(batch);
        if (lane < stages) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&full[lane])) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&empty[lane])), "r"(P / 32)
                         : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        refresh(turn, batch);
        bool ok = __all_sync(~0u, turn.ok && enter_early(turn, batch));
        if (lane == 0) go = ok;
        __syncthreads();
        if (!ok) return;
        // What peers wrote came through ordinary stores.
        asm volatile("fence.proxy.async;" ::: "memory");
        const bool fetches = lane < size && (OWN || lane != rank);
        const u32 slot = OWN || lane < rank ? lane : lane - 1;
        const u64 from = lane < size ? t.from[lane] : 0;
        u32 stage = 0, parity = 1;
        for (u32 k = 0; k < own; k++) {
            u64 at = (u64)(block + k * t.blocks) * P;
            u32 n = packs - at < P ? (u32)(packs - at) : P, barrier = shared_address(&full[stage]);
            u32 to = shared_address(stages_at) + stage * stage_bytes;
            if (k >= stages) barrier_wait(shared_address(&empty[stage]), parity);
            if (lane == 0) barrier_expect(barrier, 16 * n * slots + (SUM ? 4 * E * n : 0));
            __syncwarp();
            if (fetches) bulk_copy(to + 16 * P * slot, from + 16 * at, 16 * n, barrier);
            if (SUM && lane == 16) bulk_copy(to + 16 * P * slots, (u64)(t.to + E * at), 4 * E * n, barrier);
            if (NEAR && !SUM && lane == 16 && k >= D) prefetch((u64)(t.to + E * at), 4 * E * n);
            if (NEAR && !OWN && lane == 17 && k >= D) prefetch(mine_at + 16 * at, 16 * n);
            if (++stage == stages) stage = 0, parity ^= 1;
        }
        for (u32 k = own > stages ? own - stages : 0; k < own; k++)
            barrier_wait(shared_address(&full[k % stages]), k / stages & 1);
        asm volatile("barrier.cta.sync 1, %0;" ::"r"(blockDim.x) : "memory");
        leave_and_end<true>(turn, batch);
        return;
    }
    const u32 pack = threadIdx.x - 32;
    // Quads of each tile, and of the last one of mine.
    const u32 all = P * Q, tail = own && block + (own - 1) * t.blocks == tiles - 1 ? (u32)(packs * Q - (u64)(tiles - 1) * all) : all;
    // Quad q of a tile: neighbours beside neighbours, so that no bank is asked twice and every access is of neighbouring
    // bytes.
    u32 near[D][Q][4];
    float4 sum[D][Q];
    const u64 begin = (u64)block * all + pack, step = (u64)t.blocks * all;
    u64 to = (u64)t.to + 16 * begin, next_to = to, next_near = mine_at + 4 * W * begin;
    u32 fetched = 0;
#define AHEAD(d)                                                                                          \
    if (fetched < own) {                                                                                  \
        const u32 n = ++fetched == own ? tail : all;                                                      \
        _Pragma("unroll") for (int q = 0; q < Q; q++) if (q * P + pack < n) {                             \
            if (!OWN) load_quad((const T*)0, next_near + 4 * W * q * P, near[d][q]);                      \
            if (!SUM) {                                                                                   \
                uint4 x = fetch16(next_to + 16 * q * P);                                                  \
                sum[d][q] = make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), \
                                        __uint_as_float(x.w));                                            \
            }                                                                                             \
        }                                                                                                 \
        next_near += 4 * W * step, next_to += 16 * step;                                                  \
    }
    if (!OWN || !SUM) {
#pragma unroll
        for (int d = 0; d < D; d++) { AHEAD(d) }
    }
    // The ends are one element a thread, by the last block's first threads.
    const u64 end_at = packs * E + pack;
    const bool ends = block == t.blocks - 1 && end_at < t.n;
    float end_sum = 0;
    if (ends) end_sum = t.to[end_at];
    __syncthreads();
    if (!go) return;
    if (ends) {
        float s = fetch((const T*)0, t.from[0] + sizeof(T) * end_at);
        for (u32 p = 1; p < size; p++) s = s + fetch((const T*)0, t.from[p] + sizeof(T) * end_at);
        end_sum = end_sum + scale * s;
        known(__float_as_uint(end_sum));
    }
    asm volatile("barrier.cta.arrive 1, %0;" ::"r"(blockDim.x) : "memory");
    if (ends) t.to[end_at] = end_sum;
    u32 stage = 0, parity = 0;
    const u32 full_at = shared_address(full), empty_at = shared_address(empty), tiles_at = shared_address(stages_at) + 4 * W * pack;
    for (u32 k = 0; k < own; k += D) {
#pragma unroll
        for (int d = 0; d < D; d++) {
            if (k + d >= own) break;
            const u32 tile = tiles_at + stage * stage_bytes;
            barrier_wait(full_at + 8 * stage, parity);
#pragma unroll
            for (int q = 0; q < Q; q++) {
                const u32 source = tile + 4 * W * q * P;
                float* m = &sum[d][q].x;
                if (SUM) {
                    u32 w[4];
                    shared_quad((const float*)0, tile + 16 * P * slots + 16 * q * P + (16 - 4 * W) * pack, w);
#pragma unroll
                    for (int e = 0; e < 4; e++) m[e] = __uint_as_float(w[e]);
                }
                float s[4];
#pragma unroll
                for (int p = 0; p < S; p++)
                    if (R || p < size) {
                        u32 w[4];
                        // Of two, either may be first.
                        if (OWN)
                            shared_quad((const T*)0, source + 16 * P * p, w);
                        else if (R == 2 ? p == 1 : p == rank) {
#pragma unroll
                            for (int i = 0; i < W; i++) w[i] = near[d][q][i];
                        } else
                            shared_quad((const T*)0, source + (R == 2 ? 0 : 16 * P * (p < rank ? p : p - 1)), w);
#pragma unroll
                        for (int e = 0; e < 4; e++)
                            s[e] = p == 0 ? element((const T*)0, w, e) : s[e] + element((const T*)0, w, e);
                    }
#pragma unroll
                for (int e = 0; e < 4; e++) m[e] = m[e] + scale * s[e];
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(empty_at + 8 * stage);
            const u32 n = k + d + 1 == own ? tail : all;
#pragma unroll
            for (int q = 0; q < Q; q++)
                if (q * P + pack < n) store_quad(to + 16 * q * P, sum[d][q]);
            to += 16 * step;
            if (!OWN || !SUM) { AHEAD(d) }
            if (++stage == stages) stage = 0, parity ^= 1;
        }
    }
#undef AHEAD
}
#endif
