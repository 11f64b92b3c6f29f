// The kernels, for 2, 4 and 8 ranks and for any number up to 16.

#ifdef TOGETHER
// All ranks in one launch, each with a row of blocks: none waits for a launch that a tool holds back.
#define KERNEL(NAME, S, THREADS, BLOCKS, BODY)                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME(const Batch<S>* batches) {               \
        const Batch<S>& batch = batches[blockIdx.y];                                                            \
        BODY;                                                                                                   \
    }
#else
#define KERNEL(NAME, S, THREADS, BLOCKS, BODY)                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME(const __grid_constant__ Batch<S> batch) { BODY; }
#endif

#define WAYS(TYPE, T, RANKS, R, S, DEEP, PACKS, FIT)                                                               \
    KERNEL(one_shot_push_##TYPE##_##RANKS, S, 288, FIT, (push<T, R, 128>(batch)))                               \
    KERNEL(one_shot_pull_##TYPE##_##RANKS, S, 288, 1, (pull<T, R, DEEP, false>(batch)))                         \
    KERNEL(one_shot_shift_##TYPE##_##RANKS, S, 288, 1, (pull<T, R, DEEP, true>(batch)))                         \
    KERNEL(one_shot_sum_##TYPE##_##RANKS, S, 512, 1, (sum_copied<T, R, DEEP>(batch)))                           \
    BULK(one_shot_bulk_##TYPE##_##RANKS, S, PACKS + 32, (bulk<T, R, PACKS>(batch)))

#if __CUDA_ARCH__ >= 900
#define BULK(NAME, S, THREADS, BODY) KERNEL(NAME, S, THREADS, 1, BODY)
#else
#define BULK(NAME, S, THREADS, BODY)
#endif

WAYS(bf16, u16, 2, 2, 2, 2, 512, 4)
WAYS(bf16, u16, 4, 4, 4, 2, 512, 3)
WAYS(bf16, u16, 8, 8, 8, 1, 256, 2)
WAYS(bf16, u16, any, 0, MOST_RANKS, 1, 128, 2)
WAYS(f32, float, 2, 2, 2, 2, 512, 4)
WAYS(f32, float, 4, 4, 4, 2, 512, 3)
WAYS(f32, float, 8, 8, 8, 1, 256, 2)
WAYS(f32, float, any, 0, MOST_RANKS, 1, 128, 2)
KERNEL(one_shot_enter, MOST_RANKS, 32, 1, enter_alone(batch))
KERNEL(one_shot_leave, MOST_RANKS, 32, 1, leave_alone(batch))
