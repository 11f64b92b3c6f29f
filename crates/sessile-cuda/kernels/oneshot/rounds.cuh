// Reduce-scatter and accumulation in one launch: every rank sums its block of every rank's input in FP32, in rank order
// from 0, and adds `scale` times the sum to its own FP32 accumulator, or stores it there. Compiled without contraction.
//
// Several ways, same bits. All count rounds in device memory, in the kernel: a graph replays with the next number each
// time. Numbers are compared by the sign of their difference, so they may wrap. Each word has one writer. Who waits longer
// than `patience` writes down for whom, does nothing more, and neither do the rank's later launches.
//
//   push    sends every rank its block of my input, in packets that are there as soon as they are whole, and waits for
//           theirs. Nobody reads my input but me, so there is no entry and no exit.
//   pull    entry: tells every rank "my input is written, round e"; every block waits until all ranks have said so
//           body:  reads every rank's input over NVLink, sums, adds
//           exit:  the last block tells every rank "I have read, round e", and waits until all have
//   bulk    as pull, and the bulk-copy engine of each multiprocessor reads: few blocks keep a link busy
//   copy    entry and exit are launches of one block, the copy engines bring the inputs between them, a last launch sums
//
// So a reduce-scatter ends on a rank only when nobody reads its input any more. The first warp of a block keeps its
// rounds, so that no thread that moves data waits at a fence. `src/oneshot/protocol.rs` checks this in every interleaving.

const int MOST_RANKS = 16;
const int MOST_TRANSFERS = 8;

template <int S>
struct Transfer {
    u64 from[S];  // pull, bulk: my block in each rank's input; push: each rank's block in my input
    float* to;
    u64 n;
    u32 first, blocks;  // which blocks of the launch do it
};

// One for each rank and group; mapped by all ranks of the group. Two mailboxes follow, for even and odd rounds.
struct Pad {
    u32 round;    // the last one that all blocks know
    u32 failed;
    u32 done;     // blocks of the running launch that know their round and have read
    u32 unused[29];
    u32 written[32];  // by rank: the last round whose input it has written
    u32 read[32];     // by rank: the last round in which it has read mine
};

template <int S>
struct Batch {
    Transfer<S> transfers[MOST_TRANSFERS];
    Pad* pads[S];
    u32 count, rank, size;
    float scale;
    u64 patience;
    volatile u32* words;  // 0: what failed (0 nothing), 1: for which rank, 2: in which round, 3: set by the host to end waits
    u64 box;              // bytes of a mailbox
    u32 omit_exit;        // a control of tests: shows what the exit is for
    u32 stages;           // bulk
    u32 store;            // whether the accumulator's old value does not matter
    u32 in_order;         // to measure: all ranks begin with rank 0, where each would begin with the one after it
};

__device__ __forceinline__ void publish(u32* p, u32 v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// After a fence.
__device__ __forceinline__ void tell(u32* p, u32 v) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
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
// A packet is written and read as one: its words never mix with those of another.
__device__ __forceinline__ void send(u64 at, const uint4& x) {
    asm volatile("{ .reg .b128 t; mov.b128 t, {%1, %2}; st.relaxed.sys.global.b128 [%0], t; }" ::"l"(at),
                 "l"(x.x | (u64)x.y << 32), "l"(x.z | (u64)x.w << 32)
                 : "memory");
}
__device__ __forceinline__ uint4 receive(u64 at) {
    u64 low, high;
    asm volatile("{ .reg .b128 t; ld.relaxed.sys.global.b128 t, [%2]; mov.b128 {%0, %1}, t; }"
                 : "=l"(low), "=l"(high)
                 : "l"(at)
                 : "memory");
    return make_uint4((u32)low, (u32)(low >> 32), (u32)high, (u32)(high >> 32));
}

// Looks between two calls of `gives_up`; of its calls, one in so many looks at the host's words. They are read over the
// host's bus: were it each time, thousands of threads that wait for a late rank would wait for that, and so be late.
const u32 LOOKS = 512, HOST_LOOKS = 16;

// Whether a wait that began at `begin` is over without what was waited for.
__device__ __noinline__ bool gives_up(u64 begin, u32 tries, Pad* pad, u64 patience, volatile u32* words, u32 code,
                                      u32 rank, u32 round) {
    if (now() - begin <= patience && !look(&pad->failed) && !(tries % (LOOKS * HOST_LOOKS) == 0 && words[3])) return false;
    if (atomicExch(&pad->failed, 1u) == 0) {
        words[1] = rank;
        words[2] = round;
        __threadfence_system();
        words[0] = code;
    }
    return true;
}

// Waits until `word` has reached `round`; ACQUIRE: for what is read afterwards.
template <bool ACQUIRE, int S>
__device__ __forceinline__ bool reaches(const u32* word, u32 round, Pad* pad, const Batch<S>& batch, u32 code,
                                        u32 rank) {
    u64 begin = 0;
    for (u32 tries = 1; (int)((ACQUIRE ? take(word) : look(word)) - round) < 0; tries++) {
        if (tries == 256) begin = now();
        if (tries % LOOKS == 0 && gives_up(begin, tries, pad, batch.patience, batch.words, code, rank, round)) return false;
    }
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
__device__ __forceinline__ u32 fetch4(u64 at) {
    u32 v;
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}
__device__ __forceinline__ float fetch(const u16*, u64 at) {
    u16 v;
    asm volatile("ld.global.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(at));
    return widen(v);
}
__device__ __forceinline__ float fetch(const float*, u64 at) { return __uint_as_float(fetch4(at)); }

// Element e of words.
__device__ __forceinline__ float element(const u16*, const u32* words, int e) {
    return __uint_as_float(e % 2 ? words[e / 2] & 0xffff0000u : words[e / 2] << 16);
}
__device__ __forceinline__ float element(const float*, const u32* words, int e) { return __uint_as_float(words[e]); }

// What becomes of m.
__device__ __forceinline__ float settled(float m, float s, float scale, bool store) {
    float x = scale * s;
    return store ? x : m + x;
}

// Element `at`, summed over the ranks.
template <class T, int R, int S>
__device__ __forceinline__ float summed(const Transfer<S>& t, u64 at, u32 size) {
    float s = fetch((const T*)0, t.from[0] + sizeof(T) * at);
#pragma unroll
    for (int p = 1; p < S; p++)
        if (R || p < size) s = s + fetch((const T*)0, t.from[p] + sizeof(T) * at);
    return s;
}

// Sums a pack of each rank.
template <class T, int R, int S>
__device__ __forceinline__ void sum_up(float4* sum, const uint4 (&x)[S], u32 size, float scale, bool store) {
    const int E = 16 / sizeof(T);
    float* m = &sum[0].x;
#pragma unroll
    for (int e = 0; e < E; e++) {
        float s = element((const T*)0, &x[0].x, e);
#pragma unroll
        for (int p = 1; p < S; p++)
            if (R || p < size) s = s + element((const T*)0, &x[p].x, e);
        m[e] = settled(m[e], s, scale, store);
    }
}

// What comes after a barrier, for others, comes after `x` is known to this thread, and so after what it was made of was
// read: a barrier does not wait for loads under way, but a store does for what it stores.
template <int THREADS>
__device__ __forceinline__ void known(u32 x) {
    __shared__ u32 nowhere[THREADS];
    asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"((u32)__cvta_generic_to_shared(&nowhere[threadIdx.x])), "r"(x)
                 : "memory");
}

// All threads of a block meet, each warp at a place of the program of its own. `__syncthreads` is for one place.
template <int THREADS>
__device__ __forceinline__ void meet() {
    asm volatile("barrier.cta.sync 1, %0;" ::"n"(THREADS) : "memory");
}

// Bytes `by`.. of two packs, one behind the other. `by` is a multiple of 2 below 16.
__device__ __forceinline__ uint4 shifted(const uint4& a, const uint4& b, u32 by) {
    bool two = by & 8, one = by & 4;
    u32 w0 = two ? a.z : a.x, w1 = two ? a.w : a.y, w2 = two ? b.x : a.z, w3 = two ? b.y : a.w, w4 = two ? b.z : b.x,
        w5 = two ? b.w : b.y, bits = 8 * (by & 3);
    u32 v0 = one ? w1 : w0, v1 = one ? w2 : w1, v2 = one ? w3 : w2, v3 = one ? w4 : w3, v4 = one ? w5 : w4;
    return make_uint4(__funnelshift_r(v0, v1, bits), __funnelshift_r(v1, v2, bits), __funnelshift_r(v2, v3, bits),
                      __funnelshift_r(v3, v4, bits));
}

// The first warp of each block keeps its rounds, so that no thread that moves data waits at a fence. On a round's way is
// as little as can be: one fence orders all that comes before the telling, and runs while the round's number is on its
// way; who waits acquires with each look; and nothing comes after the last wait.
struct Turn {
    Pad* pad;
    u32 round;
    bool ok;
};

// `tells`: `enter` follows.
template <int S>
__device__ __forceinline__ Turn begin(const Batch<S>& batch, bool tells) {
    Turn turn;
    turn.pad = batch.pads[0];
#pragma unroll
    for (int p = 1; p < S; p++)
        if (p == batch.rank) turn.pad = batch.pads[p];
    u32 before = look(&turn.pad->round), failed = look(&turn.pad->failed);
    if (tells && blockIdx.x == 0) asm volatile("fence.acq_rel.sys;" ::: "memory");
    turn.round = before + 1;
    turn.ok = failed == 0;
    return turn;
}

__device__ __forceinline__ u32 count(u32* p) {
    u32 before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(p) : "memory");
    return before;
}

// By thread 0, after the block knows the round and has read: whether it is the launch's last one, which moves the round on.
__device__ __forceinline__ bool last_of_all(const Turn& turn) {
    if (count(&turn.pad->done) != gridDim.x - 1) return false;
    turn.pad->done = 0;
    turn.pad->round = turn.round;
    return true;
}

// Tells all ranks, from thread p rank p, and waits for them.
template <int S>
__device__ __forceinline__ bool enter(const Turn& turn, const Batch<S>& batch) {
    u32 p = threadIdx.x;
    if (p >= batch.size || p == batch.rank) return true;
    if (blockIdx.x == 0) tell(&batch.pads[p]->written[batch.rank], turn.round);
    return reaches<true>(&turn.pad->written[p], turn.round, turn.pad, batch, 1, p);
}

// The block that has read last tells all ranks, and waits for them. Nothing is read after the wait, so it does not
// acquire: what follows on the stream does.
template <int S>
__device__ __forceinline__ void leave(const Turn& turn, const Batch<S>& batch) {
    u32 p = threadIdx.x, last = 0;
    if (p == 0) last = last_of_all(turn);
    last = __shfl_sync(~0u, last, 0);
    // A shuffle orders no memory: what the first lane knows of other blocks' reads, the lanes that tell must know.
    __syncwarp();
    if (!last || p >= batch.size || p == batch.rank) return;
    publish(&batch.pads[p]->read[batch.rank], turn.round);
    if (!batch.omit_exit) reaches<false>(&turn.pad->read[p], turn.round, turn.pad, batch, 2, p);
}

template <int S>
__device__ __forceinline__ const Transfer<S>& mine(const Batch<S>& batch) {
    u32 i = 0;
    while (i + 1 < batch.count && blockIdx.x >= batch.transfers[i + 1].first) i++;
    return batch.transfers[i];
}
