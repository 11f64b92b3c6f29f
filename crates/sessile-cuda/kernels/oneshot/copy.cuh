// The reduce-scatter by copies, and sums of what they brought.

// The parts of a reduce-scatter whose bytes the copy engines bring: [enter] [copies] [sum] beside [leave].
__device__ __forceinline__ void enter_alone(const Batch<MOST_RANKS>& batch) {
    Turn turn = begin(batch, true);
    if (turn.ok) enter(turn, batch);
}

__device__ __forceinline__ void leave_alone(const Batch<MOST_RANKS>& batch) {
    Turn turn = begin(batch, false);
    if (turn.ok) leave(turn, batch);
}

// Sums what lies on this GPU. U: packs of a thread at once.
template <class T, int R, int U>
__device__ __forceinline__ void sum_copied(const Batch<R ? R : MOST_RANKS>& batch) {
    const int E = 16 / sizeof(T), S = R ? R : MOST_RANKS;
    const Transfer<S>& t = batch.transfers[0];
    const u32 size = R ? R : batch.size;
    const float scale = batch.scale;
    const bool store = batch.store;
    if (look(&batch.pads[batch.rank]->failed)) return;
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
                sum_up<T, R>(sum[u], x[u], size, scale, store);
#pragma unroll
                for (int q = 0; q < E / 4; q++) ((float4*)t.to)[at * (E / 4) + q] = sum[u][q];
            }
        }
    }
    for (u64 at = packs * E + thread; at < t.n; at += threads)
        t.to[at] = settled(t.to[at], summed<T, R>(t, at, size), scale, store);
}
