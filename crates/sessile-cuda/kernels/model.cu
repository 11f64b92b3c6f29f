// What the proxy transformer needs beside matrix products. Sums run in a fixed order, without atomics on floats.

// Word 0 of `fault` becomes `code` and word 1 `value`, once.
__device__ __forceinline__ void report(volatile u32* fault, u32 code, u32 value) {
    if (fault[0] == 0) {
        fault[1] = value;
        __threadfence_system();
        fault[0] = code;
    }
}

extern "C" {

// A block a token.
__global__ void embedding_forward(const u32* ids, const u16* table, float* out, u64 hidden, u64 vocab,
                                  volatile u32* fault) {
    u32 id = ids[blockIdx.x];
    if (id >= vocab) {
        if (threadIdx.x == 0) report(fault, 1, id);
        return;
    }
    for (u64 at = threadIdx.x; at < hidden; at += blockDim.x)
        out[blockIdx.x * hidden + at] = widen(table[id * hidden + at]);
}

// A block a row of the table: finds the tokens of its id, 256 at a time, and adds them in order.
__device__ __forceinline__ void embedding_row(const u32* ids, const float* dx, u64 tokens, u64 hidden, u64 vocab,
                                              float* row32, u16* row16, volatile u32* fault) {
    __shared__ u32 found[256];
    __shared__ u32 counts[8];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (u64 first = 0; first < hidden; first += blockDim.x) {
        u64 col = first + threadIdx.x;
        float sum = 0.0f;
        for (u64 base = 0; base < tokens; base += 256) {
            u64 token = base + threadIdx.x;
            u32 id = token < tokens ? ids[token] : 0xffffffffu;
            if (token < tokens && id >= vocab && blockIdx.x == 0) report(fault, 1, id);
            bool mine = token < tokens && id == blockIdx.x;
            u32 ballot = __ballot_sync(0xffffffffu, mine);
            if (lane == 0) counts[warp] = __popc(ballot);
            __syncthreads();
            u32 before = __popc(ballot & ((1u << lane) - 1)), all = 0;
            for (u32 w = 0; w < 8; w++) {
                if (w < warp) before += counts[w];
                all += counts[w];
            }
            if (mine) found[before] = threadIdx.x;
            __syncthreads();
            if (col < hidden)
                for (u32 at = 0; at < all; at++) sum += dx[(base + found[at]) * hidden + col];
            __syncthreads();
        }
        if (col < hidden) {
            if (row32) row32[col] = sum;
            if (row16) row16[col] = narrow(sum);
        }
    }
}
__global__ void __launch_bounds__(256) embedding_backward_f32(const u32* ids, const float* dx, float* table,
                                                              u64 tokens, u64 hidden, u64 vocab,
                                                              volatile u32* fault) {
    embedding_row(ids, dx, tokens, hidden, vocab, table + blockIdx.x * hidden, 0, fault);
}
__global__ void __launch_bounds__(256) embedding_backward_bf16(const u32* ids, const float* dx, u16* table,
                                                               u64 tokens, u64 hidden, u64 vocab,
                                                               volatile u32* fault) {
    embedding_row(ids, dx, tokens, hidden, vocab, 0, table + blockIdx.x * hidden, fault);
}

// A block a row.
__global__ void rms_norm_forward(const float* x, const float* weight, u16* y, float* rstd, u64 cols, float eps) {
    __shared__ float shared[33];
    const float* row = x + blockIdx.x * cols;
    float squares = 0.0f;
    for (u64 at = threadIdx.x; at < cols; at += blockDim.x) squares += row[at] * row[at];
    squares = block_sum(squares, shared);
    float r = 1.0f / sqrtf(squares / (float)cols + eps);
    if (threadIdx.x == 0) rstd[blockIdx.x] = r;
    for (u64 at = threadIdx.x; at < cols; at += blockDim.x)
        y[blockIdx.x * cols + at] = narrow(row[at] * r * weight[at]);
}

// dx of a row: a block a row. With g = dy weight and n = x rstd: dx += rstd (g - n mean(g n)).
__global__ void rms_norm_backward(const u16* dy, const float* x, const float* weight, const float* rstd, float* dx,
                                  u64 cols) {
    __shared__ float shared[33];
    u64 base = blockIdx.x * cols;
    float r = rstd[blockIdx.x], dot = 0.0f;
    for (u64 at = threadIdx.x; at < cols; at += blockDim.x)
        dot += widen(dy[base + at]) * weight[at] * (x[base + at] * r);
    float mean = block_sum(dot, shared) / (float)cols;
    for (u64 at = threadIdx.x; at < cols; at += blockDim.x)
        dx[base + at] += r * (widen(dy[base + at]) * weight[at] - x[base + at] * r * mean);
}

// Sums of 64 rows each, a thread a column: partial[chunk][col].
__global__ void rms_norm_dweight_parts(const u16* dy, const float* x, const float* rstd, float* partial, u64 rows,
                                       u64 cols) {
    u64 col = (u64)blockIdx.x * blockDim.x + threadIdx.x, first = (u64)blockIdx.y * 64;
    if (col >= cols) return;
    u64 last = first + 64 < rows ? first + 64 : rows;
    float sum = 0.0f;
    for (u64 row = first; row < last; row++) sum += widen(dy[row * cols + col]) * (x[row * cols + col] * rstd[row]);
    partial[blockIdx.y * cols + col] = sum;
}
__global__ void rms_norm_dweight(const float* partial, float* dweight, u64 chunks, u64 cols) {
    u64 col = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (col >= cols) return;
    float sum = dweight[col];
    for (u64 chunk = 0; chunk < chunks; chunk++) sum += partial[chunk * cols + col];
    dweight[col] = sum;
}

// A block a row: gradient of the row and its loss.
__global__ void cross_entropy_rows(const float* logits, const u32* targets, u16* dlogits, float* losses, u64 classes,
                                   float factor, volatile u32* fault) {
    __shared__ float shared[33];
    u64 base = blockIdx.x * classes;
    u32 target = targets[blockIdx.x];
    if (target >= classes) {
        if (threadIdx.x == 0) report(fault, 2, target);
        return;
    }
    float top = __uint_as_float(0xff800000u);
    for (u64 at = threadIdx.x; at < classes; at += blockDim.x) top = fmaxf(top, logits[base + at]);
    top = block_max(top, shared);
    float sum = 0.0f;
    for (u64 at = threadIdx.x; at < classes; at += blockDim.x) sum += expf(logits[base + at] - top);
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) losses[blockIdx.x] = top + logf(sum) - logits[base + target];
    for (u64 at = threadIdx.x; at < classes; at += blockDim.x) {
        float p = expf(logits[base + at] - top) / sum;
        dlogits[base + at] = narrow((at == target ? p - 1.0f : p) * factor);
    }
}

// One block of 256: the mean of all losses.
__global__ void mean_of_losses(const float* losses, float* loss, u64 rows) {
    __shared__ double parts[256];
    double sum = 0.0;
    for (u64 at = threadIdx.x; at < rows; at += 256) sum += (double)losses[at];
    parts[threadIdx.x] = sum;
    __syncthreads();
    for (int step = 128; step > 0; step /= 2) {
        if (threadIdx.x < step) parts[threadIdx.x] += parts[threadIdx.x + step];
        __syncthreads();
    }
    if (threadIdx.x == 0) *loss = (float)(parts[0] / (double)rows);
}

}
