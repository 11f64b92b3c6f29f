// Matrix products that cuBLASLt has no kernel for (f32 operands with a bf16 result): C = op(A) op(B), row-major, sums in
// FP32 in the order of k. A block computes 16 x 16 elements of C.

template <class AB, class C>
__device__ __forceinline__ void product(const AB* a, const AB* b, C* c, u64 m, u64 n, u64 k, u32 ta, u32 tb, u32 accumulate) {
    __shared__ float left[16][17], right[16][17];
    u64 row = (u64)blockIdx.y * 16 + threadIdx.y, col = (u64)blockIdx.x * 16 + threadIdx.x;
    float sum = 0.0f;
    for (u64 base = 0; base < k; base += 16) {
        u64 ka = base + threadIdx.x, kb = base + threadIdx.y;
        left[threadIdx.y][threadIdx.x] = row < m && ka < k ? widen(ta ? a[ka * m + row] : a[row * k + ka]) : 0.0f;
        right[threadIdx.y][threadIdx.x] = col < n && kb < k ? widen(tb ? b[col * k + kb] : b[kb * n + col]) : 0.0f;
        __syncthreads();
        for (int i = 0; i < 16; i++) sum += left[threadIdx.y][i] * right[i][threadIdx.x];
        __syncthreads();
    }
    if (row < m && col < n) {
        C* to = c + row * n + col;
        float value = accumulate ? widen(*to) + sum : sum;
        if constexpr (sizeof(C) == 2) *to = narrow(value);
        else *to = value;
    }
}

#define PRODUCT(NAME, AB, C)                                                                                           \
    extern "C" __global__ void __launch_bounds__(256) NAME(const AB* a, const AB* b, C* c, u64 m, u64 n, u64 k,       \
                                                           u32 ta, u32 tb, u32 accumulate) {                           \
        product<AB, C>(a, b, c, m, n, k, ta, tb, accumulate);                                                          \
    }

PRODUCT(product_bf16_bf16, u16, u16)
PRODUCT(product_bf16_f32, u16, float)
PRODUCT(product_f32_bf16, float, u16)
PRODUCT(product_f32_f32, float, float)
