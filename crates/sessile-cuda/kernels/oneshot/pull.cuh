// The reduce-scatter by reading peers' memory.

// R: ranks, or 0 if only known at run time. U: packs of 16 bytes that a thread has in flight for each rank. `SHIFT`:
// sources lie off 16 bytes. What needs no peer is loaded before they are waited for, and others hear that this block has
// read before it stores its last sums.
template <class T, int R, int U, bool SHIFT>
__device__ __forceinline__ void pull(const Batch<R ? R : MOST_RANKS>& batch) {
    const int E = 16 / sizeof(T), S = R ? R : MOST_RANKS, THREADS = 288;
    const Transfer<S>& t = mine(batch);
    const u32 size = R ? R : batch.size, lane = threadIdx.x % 32;
    const float scale = batch.scale;
    const bool store = batch.store;
    __shared__ u32 go;
    if (threadIdx.x < 32) {
        Turn turn = begin(batch, true);
        bool ok = __all_sync(~0u, turn.ok && enter(turn, batch));
        if (lane == 0) go = ok;
        meet<THREADS>();
        if (!ok) return;
        meet<THREADS>();
        leave(turn, batch);
        return;
    }
    // Elements before the accumulator's first multiple of 16 bytes, and after the last whole pack.
    u64 head = (16 - ((u64)t.to & 15)) % 16 / 4;
    if (head > t.n) head = t.n;
    const u64 packs = (t.n - head) / E;
    const u32 rest = (u32)(t.n - packs * E);
    float* to = t.to + head;
    const u32 worker = threadIdx.x - 32, workers = THREADS - 32, threads = t.blocks * workers;
    const u64 thread = (u64)(blockIdx.x - t.first) * workers + worker;
    // The ends are one element a thread, by the last block's last threads.
    const u32 turned = workers - 1 - worker;
    const bool ends = blockIdx.x - t.first == t.blocks - 1 && turned < rest;
    const u64 end_at = turned < head ? turned : packs * E + turned;

    uint4 x[U][S];
    float4 sum[U][E / 4];
    float end_sum = 0, end_before = 0;
    bool entered = false;
    for (u64 base = 0; base < packs || !entered; base += (u64)U * threads) {
        // As much as possible in flight before anything is waited for.
#pragma unroll
        for (int u = 0; u < U; u++) {
            u64 at = base + thread + (u64)u * threads;
            if (at < packs) {
#pragma unroll
                for (int q = 0; q < E / 4; q++) sum[u][q] = ((const float4*)to)[at * (E / 4) + q];
            }
        }
        if (!entered) {
            if (ends) end_before = t.to[end_at];
            meet<THREADS>();
            entered = true;
            if (!go) return;
            if (ends) end_sum = summed<T, R>(t, end_at, size);
        }
#pragma unroll
        for (int u = 0; u < U; u++) {
            u64 at = base + thread + (u64)u * threads;
            bool in = at < packs;
#pragma unroll
            for (int p = 0; p < S; p++)
                if (R || p < size) {
                    u64 from = t.from[p] + head * sizeof(T) + 16 * at;
                    if (!SHIFT) {
                        if (in) x[u][p] = fetch16(from);
                        continue;
                    }
                    // Aligned packs that hold the bytes: each thread's second one is its neighbour's first.
                    u32 off = (u32)from & 15;
                    bool edge = in && (lane == 31 || at + 1 == packs);
                    uint4 a = make_uint4(0, 0, 0, 0), b = a;
                    if (in) a = fetch16(from - off);
                    if (edge && off) b = fetch16(from - off + 16);
                    uint4 next = make_uint4(__shfl_down_sync(~0u, a.x, 1), __shfl_down_sync(~0u, a.y, 1),
                                            __shfl_down_sync(~0u, a.z, 1), __shfl_down_sync(~0u, a.w, 1));
                    if (edge) next = b;
                    x[u][p] = shifted(a, next, off);
                }
        }
#pragma unroll
        for (int u = 0; u < U; u++) sum_up<T, R>(sum[u], x[u], size, scale, store);
        if (base + (u64)U * threads >= packs) {
            end_sum = settled(end_before, end_sum, scale, store);
            u32 all = __float_as_uint(end_sum);
#pragma unroll
            for (int u = 0; u < U; u++)
#pragma unroll
                for (int e = 0; e < E; e++) all ^= __float_as_uint((&sum[u][0].x)[e]);
            known<THREADS>(all);
            meet<THREADS>();
        }
#pragma unroll
        for (int u = 0; u < U; u++) {
            u64 at = base + thread + (u64)u * threads;
            if (at < packs) {
#pragma unroll
                for (int q = 0; q < E / 4; q++) ((float4*)to)[at * (E / 4) + q] = sum[u][q];
            }
        }
    }
    if (ends) t.to[end_at] = end_sum;
}
