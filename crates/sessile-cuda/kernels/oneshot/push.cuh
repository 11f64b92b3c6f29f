// The reduce-scatter by sending packets.

// A packet is 16 bytes of elements, with zeros behind the last. A place of a mailbox where there is none holds NOTHING, all
// bits set. Who receives a packet leaves that behind; no packet is that, since what would be is sent with another NaN as
// its last element.
const u32 NOTHING = 0xffffffffu;

__device__ __forceinline__ bool nothing(const uint4& x) { return (x.x & x.y & x.z & x.w) == NOTHING; }

// Packet `at` of n elements that begin anywhere.
template <class T>
__device__ __forceinline__ uint4 packet(u64 from, u32 at, u32 n) {
    const u32 E = 16 / sizeof(T);
    const u64 first = from + 16 * (u64)at;
    const u32 off = (u32)first & 15;
    uint4 x;
    if (E * at + E <= n) {
        x = fetch16(first - off);
        if (off) x = shifted(x, fetch16(first - off + 16), off);
    } else {
        u32* w = &x.x;
#pragma unroll
        for (u32 e = 0; e < E; e++) {
            u32 bits = E * at + e < n ? __float_as_uint(fetch((const T*)0, first + sizeof(T) * e)) : 0;
            if (sizeof(T) == 4)
                w[e] = bits;
            else
                w[e / 2] = e % 2 ? w[e / 2] | bits : bits >> 16;
        }
    }
    if (nothing(x)) x.w = 0x7fffffffu;
    return x;
}

// Value e of lane l and value l of lane e change places, in each E lanes.
template <int E>
__device__ __forceinline__ void transpose(float* v) {
#pragma unroll
    for (int d = 1; d < E; d *= 2) {
        const bool upper = threadIdx.x & d;
#pragma unroll
        for (int e = 0; e < E; e++)
            if (!(e & d)) {
                const float theirs = __shfl_xor_sync(~0u, upper ? v[e] : v[e + d], d);
                v[e] = upper ? theirs : v[e];
                v[e + d] = upper ? v[e + d] : theirs;
            }
    }
}

// The accumulator's part of a packet; all lanes of a warp call it, for neighbouring packets. An accumulator that is not
// aligned is accessed with values and lanes transposed, so that neighbouring lanes access neighbouring bytes.
template <class T>
struct Sums {
    static const u32 E = 16 / sizeof(T);
    float* to;
    u32 n;
    bool wide;

    __device__ __forceinline__ void get(u32 at, float* m) const {
        if (wide && E * at + E <= n) {
#pragma unroll
            for (u32 q = 0; q < E / 4; q++) ((float4*)m)[q] = ((const float4*)to)[at * (E / 4) + q];
            return;
        }
        const u32 first = wide ? E * at : E * (at - at % E) + at % E, step = wide ? 1 : E;
#pragma unroll
        for (u32 e = 0; e < E; e++) m[e] = first + e * step < n ? to[first + e * step] : 0.0f;
        if (!wide) transpose<E>(m);
    }
    __device__ __forceinline__ void put(u32 at, float* m) const {
        if (wide && E * at + E <= n) {
#pragma unroll
            for (u32 q = 0; q < E / 4; q++) ((float4*)to)[at * (E / 4) + q] = ((const float4*)m)[q];
            return;
        }
        if (!wide) transpose<E>(m);
        const u32 first = wide ? E * at : E * (at - at % E) + at % E, step = wide ? 1 : E;
#pragma unroll
        for (u32 e = 0; e < E; e++)
            if (first + e * step < n) to[first + e * step] = m[e];
    }
};

// Packets use no words, which would seem to be of a round to come after 2^31 rounds of packets alone. So every so many
// rounds they are brought up to date.
const u32 REFRESH = 1u << 24;

template <int S>
__device__ __forceinline__ void refresh(const Turn& turn, const Batch<S>& batch) {
    const u32 p = threadIdx.x;
    if (turn.round % REFRESH || blockIdx.x || p >= batch.size || p == batch.rank) return;
    publish(&batch.pads[p]->written[batch.rank], turn.round - 1);
    publish(&batch.pads[p]->read[batch.rank], turn.round - 1);
}

// After the first warp, P threads send and P receive.
template <class T, int R, int P>
__device__ __forceinline__ void push(const Batch<R ? R : MOST_RANKS>& batch) {
    // C: ranks whose packets a thread waits for at once.
    const u32 E = 16 / sizeof(T), S = R ? R : MOST_RANKS, C = R ? R : 4;
    const u32 size = R ? R : batch.size, rank = batch.rank;
    const float scale = batch.scale;
    const bool store = batch.store;
    const Transfer<S>& t = mine(batch);
    __shared__ u32 round_is, go;
    if (threadIdx.x < 32) {
        Turn turn = begin(batch, false);
        refresh(turn, batch);
        if (threadIdx.x == 0) {
            round_is = turn.round;
            go = turn.ok;
        }
        meet<32 + 2 * P>();
        if (threadIdx.x == 0) last_of_all(turn);
        return;
    }
    // Packets of the transfers before this one, and of all: as many as fit a mailbox.
    u32 before = 0, all = 0;
    for (u32 i = 0; i < batch.count; i++) {
        if (&batch.transfers[i] == &t) before = all;
        all += ((u32)batch.transfers[i].n + E - 1) / E;
    }
    const u32 n = (u32)t.n, packets = (n + E - 1) / E, workers = t.blocks * P;
    const u32 worker = (blockIdx.x - t.first) * P + (threadIdx.x - 32) % P;
    bool known = false;
    u32 round = 0;
    if (threadIdx.x < 32 + P) {
        for (u32 at = worker; at < packets || !known; at += workers) {
            // Each rank sends to the next one first, so that they do not all send to one.
            for (u32 i = 1; i < size; i++) {
                const u32 p = batch.in_order ? i - (i <= rank) : rank + i < size ? rank + i : rank + i - size;
                uint4 x;
                if (at < packets) x = packet<T>(t.from[p], at, n);
                if (!known) {
                    meet<32 + 2 * P>();
                    known = true;
                    round = round_is;
                    if (!go) return;
                }
                const u32 place = (rank < p ? rank : rank - 1) * all + before + at;
                if (at < packets) send((u64)batch.pads[p] + sizeof(Pad) + (round & 1) * batch.box + 16 * (u64)place, x);
            }
        }
        return;
    }
    Pad* pad = batch.pads[0];
    u64 from = t.from[0];
#pragma unroll
    for (u32 p = 1; p < S; p++)
        if (p == rank) pad = batch.pads[p], from = t.from[p];
    const Sums<T> sums = {t.to, n, ((u64)t.to & 15) == 0};
    u64 box = 0;
    // A warp goes on until its last lane is done.
    for (u32 at = worker; at - threadIdx.x % 32 < packets || !known; at += workers) {
        uint4 own;
        alignas(16) float m[E], s[E] = {};
        if (at < packets) own = packet<T>(from, at, n);
        sums.get(at, m);
        if (!known) {
            meet<32 + 2 * P>();
            known = true;
            round = round_is;
            if (!go) return;
            box = (u64)pad + sizeof(Pad) + (round & 1) * batch.box;
        }
        for (u32 first = 0; first < size && at < packets; first += C) {
            uint4 x[C];
#pragma unroll
            for (u32 c = 0; c < C; c++) {
                x[c] = make_uint4(NOTHING, NOTHING, NOTHING, NOTHING);
                if (first + c == rank) x[c] = own;
            }
            const auto place = [&](u32 p) { return box + 16 * (u64)((p < rank ? p : p - 1) * all + before + at); };
            u64 begin = 0;
            for (u32 tries = 1;; tries++) {
                u32 missing = size;
#pragma unroll
                for (u32 c = 0; c < C; c++)
                    if ((R || first + c < size) && nothing(x[c])) x[c] = receive(place(first + c));
#pragma unroll
                for (u32 c = 0; c < C; c++)
                    if ((R || first + c < size) && nothing(x[c])) missing = first + c;
                if (missing == size) break;
                if (tries == 256) begin = now();
                if (tries % LOOKS == 0 && gives_up(begin, tries, pad, batch.patience, batch.words, 1, missing, round))
                    return;
            }
#pragma unroll
            for (u32 c = 0; c < C; c++)
                if (R || first + c < size) {
                    if (first + c != rank) send(place(first + c), make_uint4(NOTHING, NOTHING, NOTHING, NOTHING));
#pragma unroll
                    for (u32 e = 0; e < E; e++) {
                        float y = element((const T*)0, &x[c].x, e);
                        s[e] = first + c == 0 ? y : s[e] + y;
                    }
                }
            if (R) break;
        }
#pragma unroll
        for (u32 e = 0; e < E; e++) m[e] = settled(m[e], s[e], scale, store);
        sums.put(at, m);
    }
}
