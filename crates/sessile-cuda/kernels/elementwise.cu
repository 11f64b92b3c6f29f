// Element by element. Compiled without contraction: each product and each sum is rounded to nearest.
//
// Each thread takes eight elements at a time where all operands are aligned to 16 bytes, one at a time otherwise. The
// arithmetic of an element is the same in both, so bits do not depend on where operands lie.

struct Eight {
    float v[8];
};

__device__ __forceinline__ Eight load8(const u16* p) {
    uint4 raw = *(const uint4*)p;
    u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
    Eight r;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        r.v[2 * i] = __uint_as_float(words[i] << 16);
        r.v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
    return r;
}

__device__ __forceinline__ Eight load8(const float* p) {
    float4 a = ((const float4*)p)[0], b = ((const float4*)p)[1];
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

__device__ __forceinline__ void store8(float* p, const Eight& r) {
    ((float4*)p)[0] = make_float4(r.v[0], r.v[1], r.v[2], r.v[3]);
    ((float4*)p)[1] = make_float4(r.v[4], r.v[5], r.v[6], r.v[7]);
}

__device__ __forceinline__ void store8(u16* p, const Eight& r) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) words[i] = (u32)narrow(r.v[2 * i]) | ((u32)narrow(r.v[2 * i + 1]) << 16);
    *(uint4*)p = make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ void store1(float* p, float x) { *p = x; }
__device__ __forceinline__ void store1(u16* p, float x) { *p = narrow(x); }

__device__ __forceinline__ bool aligned(const void* p) { return ((u64)p & 15) == 0; }

// to[i] = f(to[i], from[i])
template <class From, class To, class F>
__device__ __forceinline__ void combine(const From* from, To* to, u64 n, F f) {
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    u64 wide = aligned(from) && aligned(to) ? n / 8 : 0;
    for (u64 at = thread; at < wide; at += threads) {
        Eight x = load8(from + 8 * at), y = load8(to + 8 * at);
#pragma unroll
        for (int i = 0; i < 8; i++) y.v[i] = f(y.v[i], x.v[i]);
        store8(to + 8 * at, y);
    }
    for (u64 at = 8 * wide + thread; at < n; at += threads) store1(to + at, f(widen(to[at]), widen(from[at])));
}

// to[i] = f(from[i])
template <class From, class To, class F>
__device__ __forceinline__ void map(const From* from, To* to, u64 n, F f) {
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    u64 wide = aligned(from) && aligned(to) ? n / 8 : 0;
    for (u64 at = thread; at < wide; at += threads) {
        Eight x = load8(from + 8 * at);
#pragma unroll
        for (int i = 0; i < 8; i++) x.v[i] = f(x.v[i]);
        store8(to + 8 * at, x);
    }
    for (u64 at = 8 * wide + thread; at < n; at += threads) store1(to + at, f(widen(from[at])));
}

template <class T>
__device__ __forceinline__ void fill(T* to, u64 n, T value) {
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    for (u64 at = thread; at < n; at += threads) to[at] = value;
}

// dst[i] = src[0][i] + src[1][i] + ..., in that order, from the first.
template <class From>
__device__ __forceinline__ void sum_ranks(const From* src, float* dst, u64 n, u32 parts) {
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    u64 wide = aligned(src) && aligned(dst) && n % 8 == 0 ? n / 8 : 0;
    for (u64 at = thread; at < wide; at += threads) {
        Eight sum = load8(src + 8 * at);
        for (u32 part = 1; part < parts; part++) {
            Eight x = load8(src + part * n + 8 * at);
#pragma unroll
            for (int i = 0; i < 8; i++) sum.v[i] = sum.v[i] + x.v[i];
        }
        store8(dst + 8 * at, sum);
    }
    for (u64 at = 8 * wide + thread; at < n; at += threads) {
        float sum = widen(src[at]);
        for (u32 part = 1; part < parts; part++) sum = sum + widen(src[part * n + at]);
        dst[at] = sum;
    }
}

extern "C" {

__global__ void fill_u16(u16* to, u64 n, u32 value) { fill<u16>(to, n, (u16)value); }
__global__ void fill_u32(u32* to, u64 n, u32 value) { fill<u32>(to, n, value); }

__global__ void cast_bf16_f32(const u16* from, float* to, u64 n) {
    map(from, to, n, [](float x) { return x; });
}
__global__ void cast_f32_bf16(const float* from, u16* to, u64 n) {
    map(from, to, n, [](float x) { return x; });
}

__global__ void add_bf16(const u16* from, float* to, u64 n) {
    combine(from, to, n, [](float y, float x) { return y + x; });
}
__global__ void add_f32(const float* from, float* to, u64 n) {
    combine(from, to, n, [](float y, float x) { return y + x; });
}
__global__ void add_scaled_bf16(const u16* from, float* to, u64 n, float scale) {
    combine(from, to, n, [scale](float y, float x) { return y + scale * x; });
}
__global__ void add_scaled_f32(const float* from, float* to, u64 n, float scale) {
    combine(from, to, n, [scale](float y, float x) { return y + scale * x; });
}
__global__ void scale_f32(float* to, u64 n, float factor) {
    map(to, to, n, [factor](float x) { return x * factor; });
}

__global__ void sum_ranks_bf16(const u16* src, float* dst, u64 n, u32 parts) { sum_ranks(src, dst, n, parts); }
__global__ void sum_ranks_f32(const float* src, float* dst, u64 n, u32 parts) { sum_ranks(src, dst, n, parts); }

// The end of an all-reduce: the sum of all parts, rounded once to the dtype that travelled.
__global__ void reduce_ranks_bf16(const u16* src, u16* dst, u64 n, u32 parts) {
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    for (u64 at = thread; at < n; at += threads) {
        float sum = widen(src[at]);
        for (u32 part = 1; part < parts; part++) sum = sum + widen(src[part * n + at]);
        dst[at] = narrow(sum);
    }
}

__global__ void squared_relu_forward(const u16* x, u16* y, u64 n) {
    map(x, y, n, [](float x) { return x <= 0.0f ? 0.0f : x * x; });
}
__global__ void squared_relu_backward(const u16* dy, const u16* x, u16* dx, u64 n) {
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    for (u64 at = thread; at < n; at += threads) {
        float v = widen(x[at]);
        dx[at] = narrow(widen(dy[at]) * (v <= 0.0f ? 0.0f : 2.0f * v));
    }
}

// `weight` may be null. The corrections are 1 - beta^step, computed by the host in f64.
__global__ void adamw(const float* grad, float* master, float* m, float* v, u16* weight, u64 n, float lr,
                      float beta1, float beta2, float eps, float decay, float correct1, float correct2) {
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    for (u64 at = thread; at < n; at += threads) {
        float g = grad[at];
        float m1 = beta1 * m[at] + (1.0f - beta1) * g;
        float v1 = beta2 * v[at] + (1.0f - beta2) * g * g;
        float update = (m1 / correct1) / (sqrtf(v1 / correct2) + eps);
        float w = master[at];
        w = w - lr * (update + decay * w);
        m[at] = m1;
        v[at] = v1;
        master[at] = w;
        if (weight) weight[at] = narrow(w);
    }
}

// Occupies one thread for about `micros`.
__global__ void spin(u64 micros) {
    u64 begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do {
        __nanosleep(200);
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - begin < micros * 1000);
}

// Appends (key, time) to a log of `room` entries; entries beyond are counted and not kept.
__global__ void stamp(u64* log, u32* count, u32 room, u64 key) {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    u32 at = atomicAdd(count, 1u);
    if (at < room) {
        log[2 * (u64)at] = key;
        log[2 * (u64)at + 1] = now;
    }
}

}
