// Routing tokens to experts, and weighing what the experts give. Compiled without contraction.

// Integers in the order of IEEE 754's totalOrder.
__device__ __forceinline__ int order_of(float x) {
    int bits = __float_as_int(x);
    return bits ^ (int)((u32)(bits >> 31) >> 1);
}

extern "C" {

// A thread a token. An expert is chosen if fewer than top_k come before it: larger ones, and equal ones of lower number.
__global__ void router_forward(const float* logits, float* gates, u64 tokens, u64 experts, u64 top_k) {
    u64 token = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (token >= tokens) return;
    const float* row = logits + token * experts;
    float* out = gates + token * experts;
    float top = row[0];
    for (u64 e = 1; e < experts; e++)
        if (order_of(row[e]) > order_of(top)) top = row[e];
    float sum = 0.0f;
    for (u64 e = 0; e < experts; e++) {
        int own = order_of(row[e]);
        u64 before = 0;
        for (u64 other = 0; other < experts; other++) {
            int its = order_of(row[other]);
            before += its > own || (its == own && other < e);
        }
        float gate = before < top_k ? expf(row[e] - top) : 0.0f;
        out[e] = gate;
        sum = sum + gate;
    }
    for (u64 e = 0; e < experts; e++) out[e] = out[e] / sum;
}

// A thread a token: dlogit = gate (dgate - sum gate dgate).
__global__ void router_backward(const float* dgates, const float* gates, u16* dlogits, u64 tokens, u64 experts) {
    u64 token = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (token >= tokens) return;
    u64 base = token * experts;
    float mean = 0.0f;
    for (u64 e = 0; e < experts; e++) mean = mean + gates[base + e] * dgates[base + e];
    for (u64 e = 0; e < experts; e++) dlogits[base + e] = narrow(gates[base + e] * (dgates[base + e] - mean));
}

// A block a token.
__global__ void combine_forward(const float* gates, const u16* y, u16* out, u64 tokens, u64 experts, u64 hidden) {
    u64 token = blockIdx.x;
    for (u64 at = threadIdx.x; at < hidden; at += blockDim.x) {
        float sum = 0.0f;
        for (u64 e = 0; e < experts; e++) {
            float gate = gates[token * experts + e];
            if (gate != 0.0f) sum = sum + gate * widen(y[(e * tokens + token) * hidden + at]);
        }
        out[token * hidden + at] = narrow(sum);
    }
}

// A block a token and expert.
__global__ void combine_backward(const u16* dout, const float* gates, const u16* y, u16* dy, float* dgates, u64 tokens,
                                 u64 experts, u64 hidden) {
    __shared__ float shared[33];
    u64 token = blockIdx.x / experts, e = blockIdx.x % experts;
    u64 at = (e * tokens + token) * hidden;
    float gate = gates[token * experts + e], dot = 0.0f;
    bool used = gate != 0.0f;
    for (u64 col = threadIdx.x; col < hidden; col += blockDim.x) {
        float d = widen(dout[token * hidden + col]);
        if (used) dot = dot + d * widen(y[at + col]);
        dy[at + col] = used ? narrow(gate * d) : (u16)0;
    }
    dot = block_sum(dot, shared);
    if (threadIdx.x == 0) dgates[token * experts + e] = used ? dot : 0.0f;
}

}
