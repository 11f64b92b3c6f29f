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

__device__ __forceinline__ void shared_quad(const u16*, u32 at, u32* w) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(at));
}
__device__ __forceinline__ void shared_quad(const float*, u32 at, u32* w) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(at));
}
__device__ __forceinline__ void store_quad(u64 at, const float* v) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}

// Tiles of P packs of every rank, and of the accumulator if its value matters, go through shared memory, a tile a stage. The
// first warp keeps the rounds and fetches: it knows from the barriers that peers have been read, and leaves while the last
// tiles are summed. All other threads sum a tile together. All addresses are multiples of 16.
const u32 MOST_STAGES = 16;

template <class T, int R, int P>
__device__ __forceinline__ void bulk(const Batch<R ? R : MOST_RANKS>& batch) {
    const int E = 16 / sizeof(T), Q = E / 4, S = R ? R : MOST_RANKS, W = sizeof(T);
    extern __shared__ __align__(128) unsigned char stages_at[];
    __shared__ u64 full[MOST_STAGES], empty[MOST_STAGES];
    __shared__ u32 go;
    const Transfer<S>& t = mine(batch);
    const u32 size = R ? R : batch.size, stages = batch.stages, stage_bytes = 16 * P * size + 4 * E * P;
    const u32 lane = threadIdx.x % 32, block = blockIdx.x - t.first;
    const float scale = batch.scale;
    const bool store = batch.store;
    const u64 packs = t.n / E;
    const u32 tiles = (u32)((packs + P - 1) / P), own = tiles > block ? (tiles - block - 1) / t.blocks + 1 : 0;
    if (threadIdx.x < 32) {
        Turn turn = begin(batch, true);
        if (lane < stages) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&full[lane])) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&empty[lane])), "r"(P)
                         : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        bool ok = __all_sync(~0u, turn.ok && enter(turn, batch));
        if (lane == 0) go = ok;
        meet<P + 32>();
        if (!ok) return;
        // What peers wrote came through ordinary stores.
        asm volatile("fence.proxy.async;" ::: "memory");
        // Each rank asks the next one first, so that they do not all ask one.
        const u32 peer = batch.in_order ? lane % size : (lane + batch.rank) % size;
        const u64 from = t.from[peer];
        u32 stage = 0, parity = 1;
        for (u32 k = 0; k < own; k++) {
            u64 at = (u64)(block + k * t.blocks) * P;
            u32 n = packs - at < P ? (u32)(packs - at) : P, barrier = shared_address(&full[stage]);
            u32 to = shared_address(stages_at) + stage * stage_bytes;
            if (k >= stages) barrier_wait(shared_address(&empty[stage]), parity);
            if (lane == 0) barrier_expect(barrier, 16 * n * size + (store ? 0 : 4 * E * n));
            __syncwarp();
            if (lane < size) bulk_copy(to + 16 * P * peer, from + 16 * at, 16 * n, barrier);
            if (lane == 16 && !store) bulk_copy(to + 16 * P * size, (u64)(t.to + E * at), 4 * E * n, barrier);
            if (++stage == stages) stage = 0, parity ^= 1;
        }
        for (u32 k = own > stages ? own - stages : 0; k < own; k++)
            barrier_wait(shared_address(&full[k % stages]), k / stages & 1);
        asm volatile("barrier.cta.sync 2, %0;" ::"n"(P + 32) : "memory");
        leave(turn, batch);
        return;
    }
    const u32 pack = threadIdx.x - 32;
    // Quads of each tile, and of the last one of mine.
    const u32 all = P * Q;
    const u32 tail = own && block + (own - 1) * t.blocks == tiles - 1 ? (u32)(packs * Q - (u64)(tiles - 1) * all) : all;
    // The ends are one element a thread, by the last block's first threads.
    const u64 end_at = packs * E + pack;
    const bool ends = block == t.blocks - 1 && end_at < t.n;
    float end_sum = 0;
    if (ends) end_sum = t.to[end_at];
    meet<P + 32>();
    if (!go) return;
    if (ends) {
        end_sum = settled(end_sum, summed<T, R>(t, end_at, size), scale, store);
        known<P + 32>(__float_as_uint(end_sum));
    }
    asm volatile("barrier.cta.arrive 2, %0;" ::"n"(P + 32) : "memory");
    if (ends) t.to[end_at] = end_sum;
    u64 to = (u64)t.to + 16 * ((u64)block * all + pack);
    u32 stage = 0, parity = 0;
    for (u32 k = 0; k < own; k++, to += 16 * (u64)t.blocks * all) {
        const u32 tile = shared_address(stages_at) + stage * stage_bytes, n = k + 1 == own ? tail : all;
        barrier_wait(shared_address(&full[stage]), parity);
        // Four elements at a time, neighbours beside neighbours, so that no bank is asked twice and every access is of
        // neighbouring bytes.
        float sums[Q][4];
#pragma unroll
        for (int q = 0; q < Q; q++) {
            const u32 quad = q * P + pack;
            float *m = sums[q], s[4];
            u32 w[4];
            shared_quad((const float*)0, tile + 16 * P * size + 16 * quad, w);
#pragma unroll
            for (int e = 0; e < 4; e++) m[e] = __uint_as_float(w[e]);
#pragma unroll
            for (int p = 0; p < S; p++)
                if (R || p < size) {
                    shared_quad((const T*)0, tile + 16 * P * p + 4 * W * quad, w);
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        s[e] = p == 0 ? element((const T*)0, w, e) : s[e] + element((const T*)0, w, e);
                }
#pragma unroll
            for (int e = 0; e < 4; e++) m[e] = settled(m[e], s[e], scale, store);
        }
        barrier_arrive(shared_address(&empty[stage]));
#pragma unroll
        for (int q = 0; q < Q; q++)
            if (q * P + pack < n) store_quad(to + 16 * q * P, sums[q]);
        if (++stage == stages) stage = 0, parity ^= 1;
    }
}
#endif
