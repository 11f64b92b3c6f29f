// The reduce-scatter by sending packets.

// A packet: three words of elements and a fourth of one more BF16 element, or none, and the round's lower half. Threads of
// a tile take neighbouring words, so that every access is of neighbouring bytes: of a tile of P packets, packet t has the
// words t, t + P and t + 2 P, and the element 6 P + t.
template <class T, int P>
__device__ __forceinline__ void load_packet(u64 from, u64 n, u32 t, bool wide, u32* w) {
    if (sizeof(T) == 4) {
#pragma unroll
        for (int j = 0; j < 3; j++) w[j] = j * P + t < n ? fetch4(from + 4 * (j * P + t)) : 0;
        w[3] = 0;
        return;
    }
#pragma unroll
    for (int j = 0; j < 3; j++) {
        u32 at = 2 * (j * P + t);
        if (wide && at + 1 < n)
            w[j] = fetch4(from + 2 * at);
        else {
            u32 low = at < n ? __float_as_uint(fetch((const u16*)0, from + 2 * at)) >> 16 : 0;
            u32 high = at + 1 < n ? __float_as_uint(fetch((const u16*)0, from + 2 * at + 2)) : 0;
            w[j] = low | high;
        }
    }
    w[3] = 6 * P + t < n ? __float_as_uint(fetch((const u16*)0, from + 2 * (6 * P + t))) >> 16 : 0;
}

template <class T, int P>
struct Tile {
    static const int E = sizeof(T) == 2 ? 7 : 3;
    u64 at, n;  // its first element, and elements from there to the end
    u32 packet;

    __device__ __forceinline__ Tile(u64 tile, u64 all, u32 packet) : at(tile * E * P), n(all - at), packet(packet) {}
    __device__ __forceinline__ void load(u64 from, u32* w) const {
        load_packet<T, P>(from + at * sizeof(T), n, packet, (from & 3) == 0, w);
    }
    // Where element e of the packet lies in the tile.
    __device__ __forceinline__ u32 place(int e) const {
        if (sizeof(T) == 4) return e * P + packet;
        return e == 6 ? 6 * P + packet : 2 * (e / 2 * P + packet) + e % 2;
    }
    // Whether elements 2 i and 2 i + 1 can be accessed as one.
    __device__ __forceinline__ bool pairs(const float* to) const {
        return sizeof(T) == 2 && n >= E * P && ((u64)to & 7) == 0;
    }
    __device__ __forceinline__ void get(const float* to, float* m) const {
        bool two = pairs(to);
#pragma unroll
        for (int e = 0; e < E; e++) {
            u32 i = place(e);
            if (two && e < 6) {
                if (e % 2 == 0) {
                    float2 pair = *(const float2*)(to + at + i);
                    m[e] = pair.x, m[(e + 1) % E] = pair.y;
                }
            } else
                m[e] = i < n ? to[at + i] : 0.0f;
        }
    }
    __device__ __forceinline__ void put(float* to, const float* m) const {
        bool two = pairs(to);
#pragma unroll
        for (int e = 0; e < E; e++) {
            u32 i = place(e);
            if (two && e < 6) {
                if (e % 2 == 0) *(float2*)(to + at + i) = make_float2(m[e], m[(e + 1) % E]);
            } else if (i < n)
                to[at + i] = m[e];
        }
    }
};

// P: packets of a tile. After the first warp, P threads send and P receive.
template <class T, int R, int P>
__device__ __forceinline__ void push(const Batch<R ? R : MOST_RANKS>& batch) {
    typedef Tile<T, P> Tiled;
    const int E = Tiled::E, S = R ? R : MOST_RANKS;
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
        __syncthreads();
        if (threadIdx.x == 0) last_of_all(turn);
        return;
    }
    // Tiles of the transfers before this one, and of all.
    u32 before = 0, all = 0;
    for (u32 i = 0; i < batch.count; i++) {
        if (&batch.transfers[i] == &t) before = all;
        all += (u32)((batch.transfers[i].n + E * P - 1) / (E * P));
    }
    const u32 tiles = (u32)((t.n + E * P - 1) / (E * P)), block = blockIdx.x - t.first;
    bool known = false;
    u32 round = 0;
    if (threadIdx.x < 32 + P) {
        for (u32 k = block; k < tiles || !known; k += t.blocks) {
            const Tiled tile(k, t.n, threadIdx.x - 32);
            u32 w[S][4];
#pragma unroll
            for (int p = 0; p < S; p++)
                if ((R || p < size) && p != rank && k < tiles) tile.load(t.from[p], w[p]);
            if (!known) {
                __syncthreads();
                known = true;
                round = round_is;
                if (!go) return;
            }
#pragma unroll
            for (int p = 0; p < S; p++)
                if ((R || p < size) && p != rank && k < tiles) {
                    u64 slot = ((u64)(rank < p ? rank : rank - 1) * all + before + k) * P + tile.packet;
                    send((u64)batch.pads[p] + sizeof(Pad) + (round & 1) * batch.box + 16 * slot,
                         w[p][0] | (u64)w[p][1] << 32, w[p][2] | (u64)(w[p][3] | round << 16) << 32);
                }
        }
        return;
    }
    Pad* pad = batch.pads[0];
    u64 from = t.from[0];
#pragma unroll
    for (int p = 1; p < S; p++)
        if (p == rank) pad = batch.pads[p], from = t.from[p];
    for (u32 k = block; k < tiles || !known; k += t.blocks) {
        const Tiled tile(k, t.n, threadIdx.x - 32 - P);
        float m[E], s[E];
        u32 own[4];
        if (k < tiles) {
            tile.load(from, own);
            tile.get(t.to, m);
        }
        if (!known) {
            __syncthreads();
            known = true;
            round = round_is;
            if (!go || k >= tiles) return;
        }
#pragma unroll
        for (int p = 0; p < S; p++)
            if (R || p < size) {
                u32 w[4] = {own[0], own[1], own[2], own[3]};
                if (p != rank) {
                    u64 slot = ((u64)(p < rank ? p : p - 1) * all + before + k) * P + tile.packet;
                    u64 at = (u64)pad + sizeof(Pad) + (round & 1) * batch.box + 16 * slot, low, high, begin = 0;
                    receive(at, low, high);
                    for (u32 tries = 1; (u16)(high >> 48) != (u16)round; tries++) {
                        if (tries == 256) begin = now();
                        if (tries % 512 == 0 && gives_up(begin, pad, batch.patience, batch.words, 1, p, round)) return;
                        receive(at, low, high);
                    }
                    w[0] = (u32)low, w[1] = (u32)(low >> 32), w[2] = (u32)high, w[3] = (u32)(high >> 32);
                }
#pragma unroll
                for (int e = 0; e < E; e++) {
                    float x = element((const T*)0, w, e);
                    s[e] = p == 0 ? x : s[e] + x;
                }
            }
#pragma unroll
        for (int e = 0; e < E; e++) m[e] = settled(m[e], s[e], scale, store);
        tile.put(t.to, m);
    }
}
