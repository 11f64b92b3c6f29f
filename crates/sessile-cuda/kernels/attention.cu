// Causal self-attention in FP32, 32 queries against 32 keys at a time.
//
// P = softmax(Q K^T scale) over keys up to the query's own place; O = P V; lse = log sum exp(scores). Backward rebuilds
// P from lse; with D = rowsum(dO O): dV = P^T dO, dS = P (dO V^T - D) scale, dQ = dS K, dK = dS^T Q.
//
// A block has 4 warps. Forward and dQ: a warp has 8 queries, a lane one key of the tile. dK, dV: a warp has 8 keys, a
// lane one query of the tile. Sums over a tile run from lane 0 to 31, tiles in order.

struct Shape {
    u64 seq, heads, dim;
};

// Copies one head of 32 tokens from `first` on into `tile` as FP32, rows of dim + 1; absent tokens are zero.
__device__ __forceinline__ void load_tile(const u16* from, float* tile, const Shape& s, u64 first, u64 stride) {
    for (u64 at = threadIdx.x; at < 32 * s.dim; at += blockDim.x) {
        u64 row = at / s.dim, col = at % s.dim, token = first + row;
        tile[row * (s.dim + 1) + col] = token < s.seq ? widen(from[token * stride + col]) : 0.0f;
    }
}

__device__ __forceinline__ float dot(const float* a, const float* b, u64 dim) {
    float sum = 0.0f;
#pragma unroll 4
    for (u64 at = 0; at < dim; at++) sum += a[at] * b[at];
    return sum;
}

// N = ceil(dim / 32): elements of a row that a lane keeps.
template <int N>
__device__ __forceinline__ void forward(const u16* qkv, u16* out, float* lse, Shape s, float scale) {
    extern __shared__ float memory[];
    u64 pitch = s.dim + 1, hidden = s.heads * s.dim;
    float *q = memory, *k = q + 32 * pitch, *v = k + 32 * pitch;
    u64 first = (u64)blockIdx.x * 32, head = blockIdx.y, batch = blockIdx.z;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u16* base = qkv + batch * s.seq * 3 * hidden + head * s.dim;
    float acc[8][N], top[8], sum[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        top[i] = __uint_as_float(0xff800000u);
        sum[i] = 0.0f;
#pragma unroll
        for (int n = 0; n < N; n++) acc[i][n] = 0.0f;
    }
    load_tile(base, q, s, first, 3 * hidden);
    for (u64 tile = 0; tile <= first; tile += 32) {
        __syncthreads();
        load_tile(base + hidden, k, s, tile, 3 * hidden);
        load_tile(base + 2 * hidden, v, s, tile, 3 * hidden);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 row = warp * 8 + i;
            bool seen = tile + lane <= first + row;
            float score = seen ? dot(q + row * pitch, k + lane * pitch, s.dim) * scale : __uint_as_float(0xff800000u);
            float high = score;
            _Pragma("unroll") for (int step = 16; step > 0; step /= 2) high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, step));
            high = fmaxf(high, top[i]);
            float p = seen ? expf(score - high) : 0.0f, keep = expf(top[i] - high), all = p;
            _Pragma("unroll") for (int step = 16; step > 0; step /= 2) all += __shfl_xor_sync(0xffffffffu, all, step);
            sum[i] = sum[i] * keep + all;
            top[i] = high;
#pragma unroll
            for (int n = 0; n < N; n++) acc[i][n] *= keep;
#pragma unroll 1
            for (int key = 0; key < 32; key++) {
                float weight = __shfl_sync(0xffffffffu, p, key);
#pragma unroll
                for (int n = 0; n < N; n++)
                    if (n * 32 + lane < s.dim) acc[i][n] += weight * v[key * pitch + n * 32 + lane];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        u64 token = first + warp * 8 + i;
        if (token >= s.seq) continue;
        if (lane == 0) lse[(batch * s.heads + head) * s.seq + token] = top[i] + logf(sum[i]);
#pragma unroll
        for (int n = 0; n < N; n++)
            if (n * 32 + lane < s.dim)
                out[(batch * s.seq + token) * hidden + head * s.dim + n * 32 + lane] = narrow(acc[i][n] / sum[i]);
    }
}

// D of 32 queries from `first` on, into `delta`. `o` and `d_o` are tiles.
__device__ __forceinline__ void deltas(const u16* out, const float* d_o, float* delta, const Shape& s, u64 first,
                                       u64 hidden) {
    if (threadIdx.x < 32) {
        float sum = 0.0f;
        u64 token = first + threadIdx.x;
        if (token < s.seq)
            for (u64 at = 0; at < s.dim; at++)
                sum += d_o[threadIdx.x * (s.dim + 1) + at] * widen(out[token * hidden + at]);
        delta[threadIdx.x] = sum;
    }
}

template <int N>
__device__ __forceinline__ void backward_q(const u16* dout, const u16* qkv, const u16* out, const float* lse,
                                           u16* dqkv, Shape s, float scale) {
    extern __shared__ float memory[];
    u64 pitch = s.dim + 1, hidden = s.heads * s.dim;
    float *q = memory, *d_o = q + 32 * pitch, *k = d_o + 32 * pitch, *v = k + 32 * pitch, *delta = v + 32 * pitch;
    u64 first = (u64)blockIdx.x * 32, head = blockIdx.y, batch = blockIdx.z;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u16* base = qkv + batch * s.seq * 3 * hidden + head * s.dim;
    u64 narrow_base = batch * s.seq * hidden + head * s.dim;
    const float* own = lse + (batch * s.heads + head) * s.seq;
    float acc[8][N];
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int n = 0; n < N; n++) acc[i][n] = 0.0f;
    load_tile(base, q, s, first, 3 * hidden);
    load_tile(dout + narrow_base, d_o, s, first, hidden);
    __syncthreads();
    deltas(out + narrow_base, d_o, delta, s, first, hidden);
    for (u64 tile = 0; tile <= first; tile += 32) {
        __syncthreads();
        load_tile(base + hidden, k, s, tile, 3 * hidden);
        load_tile(base + 2 * hidden, v, s, tile, 3 * hidden);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 row = warp * 8 + i;
            float ds = 0.0f;
            if (first + row < s.seq && tile + lane <= first + row) {
                float p = expf(dot(q + row * pitch, k + lane * pitch, s.dim) * scale - own[first + row]);
                ds = p * (dot(d_o + row * pitch, v + lane * pitch, s.dim) - delta[row]) * scale;
            }
#pragma unroll 1
            for (int key = 0; key < 32; key++) {
                float weight = __shfl_sync(0xffffffffu, ds, key);
#pragma unroll
                for (int n = 0; n < N; n++)
                    if (n * 32 + lane < s.dim) acc[i][n] += weight * k[key * pitch + n * 32 + lane];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        u64 token = first + warp * 8 + i;
        if (token >= s.seq) continue;
#pragma unroll
        for (int n = 0; n < N; n++)
            if (n * 32 + lane < s.dim)
                dqkv[(batch * s.seq + token) * 3 * hidden + head * s.dim + n * 32 + lane] = narrow(acc[i][n]);
    }
}

template <int N>
__device__ __forceinline__ void backward_kv(const u16* dout, const u16* qkv, const u16* out, const float* lse,
                                            u16* dqkv, Shape s, float scale) {
    extern __shared__ float memory[];
    u64 pitch = s.dim + 1, hidden = s.heads * s.dim;
    float *q = memory, *d_o = q + 32 * pitch, *k = d_o + 32 * pitch, *v = k + 32 * pitch, *delta = v + 32 * pitch;
    u64 first = (u64)blockIdx.x * 32, head = blockIdx.y, batch = blockIdx.z;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u16* base = qkv + batch * s.seq * 3 * hidden + head * s.dim;
    u64 narrow_base = batch * s.seq * hidden + head * s.dim;
    const float* own = lse + (batch * s.heads + head) * s.seq;
    float dk[8][N], dv[8][N];
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int n = 0; n < N; n++) dk[i][n] = dv[i][n] = 0.0f;
    load_tile(base + hidden, k, s, first, 3 * hidden);
    load_tile(base + 2 * hidden, v, s, first, 3 * hidden);
    for (u64 tile = first; tile < s.seq; tile += 32) {
        __syncthreads();
        load_tile(base, q, s, tile, 3 * hidden);
        load_tile(dout + narrow_base, d_o, s, tile, hidden);
        __syncthreads();
        deltas(out + narrow_base, d_o, delta, s, tile, hidden);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 row = warp * 8 + i;
            float p = 0.0f, ds = 0.0f;
            if (tile + lane < s.seq && first + row <= tile + lane) {
                p = expf(dot(q + lane * pitch, k + row * pitch, s.dim) * scale - own[tile + lane]);
                ds = p * (dot(d_o + lane * pitch, v + row * pitch, s.dim) - delta[lane]) * scale;
            }
#pragma unroll 1
            for (int query = 0; query < 32; query++) {
                float w = __shfl_sync(0xffffffffu, p, query), dw = __shfl_sync(0xffffffffu, ds, query);
#pragma unroll
                for (int n = 0; n < N; n++)
                    if (n * 32 + lane < s.dim) {
                        dv[i][n] += w * d_o[query * pitch + n * 32 + lane];
                        dk[i][n] += dw * q[query * pitch + n * 32 + lane];
                    }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        u64 token = first + warp * 8 + i;
        if (token >= s.seq) continue;
#pragma unroll
        for (int n = 0; n < N; n++)
            if (n * 32 + lane < s.dim) {
                u64 at = (batch * s.seq + token) * 3 * hidden + head * s.dim + n * 32 + lane;
                dqkv[at + hidden] = narrow(dk[i][n]);
                dqkv[at + 2 * hidden] = narrow(dv[i][n]);
            }
    }
}

#define ATTENTION(N)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(128) attention_forward_##N(                                          \
        const u16* qkv, u16* out, float* lse, u64 seq, u64 heads, u64 dim, float scale) {                             \
        forward<N>(qkv, out, lse, {seq, heads, dim}, scale);                                                          \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(128) attention_backward_q_##N(                                       \
        const u16* dout, const u16* qkv, const u16* out, const float* lse, u16* dqkv, u64 seq, u64 heads, u64 dim,    \
        float scale) {                                                                                                \
        backward_q<N>(dout, qkv, out, lse, dqkv, {seq, heads, dim}, scale);                                           \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(128) attention_backward_kv_##N(                                      \
        const u16* dout, const u16* qkv, const u16* out, const float* lse, u16* dqkv, u64 seq, u64 heads, u64 dim,    \
        float scale) {                                                                                                \
        backward_kv<N>(dout, qkv, out, lse, dqkv, {seq, heads, dim}, scale);                                          \
    }

ATTENTION(1)
ATTENTION(2)
ATTENTION(4)
