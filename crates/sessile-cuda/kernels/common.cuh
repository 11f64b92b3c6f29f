// What all kernels share. No headers: the run-time compiler has no include path.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// bf16 is the upper half of an f32.
__device__ __forceinline__ float widen(u16 x) { return __uint_as_float((u32)x << 16); }
__device__ __forceinline__ float widen(float x) { return x; }

// Round to nearest even; NaN stays NaN, quiet.
__device__ __forceinline__ u16 narrow(float x) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)((bits >> 16) | 0x40u);
    return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Sum over a block of up to 1024 threads, in a fixed order. Every thread gets it. `shared` has 33 floats.
__device__ __forceinline__ float block_sum(float x, float* shared) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    if (threadIdx.x < 32) {
        float part = threadIdx.x < (blockDim.x + 31) / 32 ? shared[threadIdx.x] : 0.0f;
        for (int step = 16; step > 0; step /= 2) part += __shfl_xor_sync(0xffffffffu, part, step);
        if (threadIdx.x == 0) shared[32] = part;
    }
    __syncthreads();
    return shared[32];
}

// As `block_sum`, the maximum; NaN is ignored as by fmaxf.
__device__ __forceinline__ float block_max(float x, float* shared) {
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    if (threadIdx.x < 32) {
        float part = threadIdx.x < (blockDim.x + 31) / 32 ? shared[threadIdx.x] : shared[0];
        for (int step = 16; step > 0; step /= 2) part = fmaxf(part, __shfl_xor_sync(0xffffffffu, part, step));
        if (threadIdx.x == 0) shared[32] = part;
    }
    __syncthreads();
    return shared[32];
}
