// The kernels, for 2, 4 and 8 ranks and for any number up to 16.

#define KERNEL(NAME, S, THREADS, BLOCKS, BODY)                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME(const __grid_constant__ Batch<S> batch) { BODY; }

#define WAYS(TYPE, T, RANKS, R, S, DEEP, PACKS)                                                        \
    KERNEL(one_shot_push_##TYPE##_##RANKS, S, 288, 1, (push<T, R, 128>(batch)))                                 \
    KERNEL(one_shot_pull_##TYPE##_##RANKS, S, 288, 1, (pull<T, R, DEEP, false, 0>(batch)))                     \
    KERNEL(one_shot_shift_##TYPE##_##RANKS, S, 288, 1, (pull<T, R, DEEP, true, 0>(batch)))                         \
    KERNEL(one_shot_sum_##TYPE##_##RANKS, S, 512, 1, (sum_copied<T, R, DEEP>(batch)))                           \
    BULK(one_shot_bulk_##TYPE##_##RANKS, S, PACKS + 32, (bulk<T, R, PACKS>(batch)))

// Forms that are compared.
#define FORMS(TYPE, T, RANKS, R, S, DEEP, PACKS, WIDE)                                                          \
    KERNEL(one_shot_pull1_##TYPE##_##RANKS, S, 288, 1, (pull<T, R, DEEP, false, 1>(batch)))                     \
    KERNEL(one_shot_shift1_##TYPE##_##RANKS, S, 288, 1, (pull<T, R, DEEP, true, 1>(batch)))                     \
    KERNEL(one_shot_pull2_##TYPE##_##RANKS, S, WIDE, 1, (pull<T, R, DEEP, false, 2>(batch)))                    \
    KERNEL(one_shot_pull3_##TYPE##_##RANKS, S, WIDE, 1, (pull<T, R, DEEP, false, 3>(batch)))                    \
    KERNEL(one_shot_pull4_##TYPE##_##RANKS, S, WIDE, 1, (pull<T, R, DEEP, false, 4>(batch)))                    \
    BULK(one_shot_bulk1_##TYPE##_##RANKS, S, PACKS + 32, (lean<T, R, PACKS, false, false, 3, false>(batch)))    \
    BULK(one_shot_bulk2_##TYPE##_##RANKS, S, PACKS + 32, (lean<T, R, PACKS, false, false, 2, true>(batch)))     \
    BULK(one_shot_bulk3_##TYPE##_##RANKS, S, PACKS + 32, (lean<T, R, PACKS, true, false, 2, true>(batch)))      \
    BULK(one_shot_bulk4_##TYPE##_##RANKS, S, PACKS + 32, (lean<T, R, PACKS, true, true, 1, false>(batch)))

#if __CUDA_ARCH__ >= 900
#define BULK(NAME, S, THREADS, BODY) KERNEL(NAME, S, THREADS, 1, BODY)
#else
#define BULK(NAME, S, THREADS, BODY)
#endif

WAYS(bf16, u16, 2, 2, 2, 2, 512)
WAYS(bf16, u16, 4, 4, 4, 2, 512)
WAYS(bf16, u16, 8, 8, 8, 1, 256)
WAYS(bf16, u16, any, 0, MOST_RANKS, 1, 128)
WAYS(f32, float, 2, 2, 2, 2, 512)
WAYS(f32, float, 4, 4, 4, 2, 512)
WAYS(f32, float, 8, 8, 8, 1, 256)
WAYS(f32, float, any, 0, MOST_RANKS, 1, 128)
FORMS(bf16, u16, 2, 2, 2, 2, 512, 544)
FORMS(bf16, u16, 4, 4, 4, 2, 512, 544)
FORMS(bf16, u16, 8, 8, 8, 1, 256, 544)
FORMS(bf16, u16, any, 0, MOST_RANKS, 1, 128, 288)
FORMS(f32, float, 2, 2, 2, 2, 512, 544)
FORMS(f32, float, 4, 4, 4, 2, 512, 544)
FORMS(f32, float, 8, 8, 8, 1, 256, 544)
FORMS(f32, float, any, 0, MOST_RANKS, 1, 128, 288)
KERNEL(one_shot_enter, MOST_RANKS, 32, 1, enter_alone(batch))
KERNEL(one_shot_leave, MOST_RANKS, 32, 1, leave_alone(batch))
