// pack.cu - gradients with fewer bits on a GPU: with reduce.cu, the source of the PTX in
// src/gpu/ipc/ptx.h
//
// The bits are those of [train:compress] on the host; only a NaN's sign and payload differ. As
// reduce.cu it is plain C too: each kernel is then a function, to be called for each thread of the
// grid.
#include "reduce.cu"

typedef struct {
    const void *in;
    float *error; // of bytes: what rounding took so far, `padded` of them
    void *out;
    unsigned long long count;  // gradients
    unsigned long long padded; // of bytes: and zeros up to whole chunks
    float factor;              // ADD: of the sum
    int n;                     // ADD: contributions that follow one another in `in`
    int op;
} idist_pack_args;

enum {
    IDIST_PACK_F16,
    IDIST_PACK_BF16,
    IDIST_UNPACK_F16,
    IDIST_UNPACK_BF16
};                                        // op of idist_pack_halves
enum { IDIST_PACK_GIVE, IDIST_PACK_ADD }; // op of idist_pack_bytes
enum { IDIST_PACK_CHUNK = 1024, IDIST_PACK_NBYTES = 1028, IDIST_PACK_WARP = 32 };

#ifdef __CUDACC__
#define IDIST_PACK_KERNEL(name)                                                       \
    extern "C" __global__ void __launch_bounds__(512) name(const idist_pack_args a) { \
        name##_thread(&a, blockIdx.x *(idist_reduce_size)blockDim.x + threadIdx.x,    \
                      gridDim.x * (idist_reduce_size)blockDim.x);                     \
    }
#define idist_pack_truncate(x) __float2int_rz(x)
#else
#define IDIST_PACK_KERNEL(name)                                                                   \
    static inline void name(idist_pack_args a, idist_reduce_size first, idist_reduce_size step) { \
        name##_thread(&a, first, step);                                                           \
    }
#define idist_pack_truncate(x) ((int)(x))
#endif

// Floats to 16 bits, or back.
IDIST_REDUCE_FN void idist_pack_halves_thread(const idist_pack_args *a, idist_reduce_size first,
                                              idist_reduce_size step) {
    idist_reduce_vector v = {{0, 0, 0, 0}};
    idist_reduce_size i;
    for (i = first; i < a->count; i += step) {
        if (a->op >= IDIST_UNPACK_F16) {
            v.w[0] = ((const idist_reduce_short *)a->in)[i];
            ((float *)a->out)[i] = a->op == IDIST_UNPACK_F16 ? idist_reduce_get_f16(&v, 0)
                                                             : idist_reduce_get_bf16(&v, 0);
        } else {
            const float x = ((const float *)a->in)[i];
            if (a->op == IDIST_PACK_F16) idist_reduce_put_f16(&v, 0, x);
            else idist_reduce_put_bf16(&v, 0, x);
            ((idist_reduce_short *)a->out)[i] = (idist_reduce_short)v.w[0];
        }
    }
}
IDIST_PACK_KERNEL(idist_pack_halves)

// A lane's part of a chunk: what is to be rounded goes to `error`. The largest of it, infinity when
// one is not finite.
IDIST_REDUCE_FN float idist_pack_first(const idist_pack_args *a, idist_reduce_size chunk,
                                       unsigned lane) {
    float largest = 0, x;
    int r;
    IDIST_REDUCE_LOOP
    for (; lane < IDIST_PACK_CHUNK; lane += IDIST_PACK_WARP) {
        const idist_reduce_size i = chunk * IDIST_PACK_CHUNK + lane;
        x = a->error[i];
        if (a->op == IDIST_PACK_GIVE) {
            if (i < a->count) x = idist_reduce_add(x, ((const float *)a->in)[i]);
        } else {
            const char *from = (const char *)a->in + chunk * IDIST_PACK_NBYTES;
            IDIST_REDUCE_LOOP
            for (r = 0; r < a->n; r++, from += a->padded / IDIST_PACK_CHUNK * IDIST_PACK_NBYTES)
                x = idist_reduce_add(x,
                                     idist_reduce_mul((float)((const signed char *)from)[4 + lane],
                                                      idist_reduce_mul(*(const float *)from,
                                                                       a->factor)));
        }
        a->error[i] = x;
        x = x < 0 ? -x : x;
        if (!(x <= 3.402823466e38f)) x = INFINITY;
        largest = x > largest ? x : largest;
    }
    return largest;
}

// Then each becomes a byte, and what rounding took stays in `error`.
IDIST_REDUCE_FN void idist_pack_second(const idist_pack_args *a, idist_reduce_size chunk,
                                       unsigned lane, float largest) {
    char *to = (char *)a->out + chunk * IDIST_PACK_NBYTES;
    const int finite = largest <= 3.402823466e38f;
    const float scale =
        finite ? idist_reduce_div(largest, 127.0f) : idist_reduce_to_float(0x7fc00000u);
    float inverse = scale > 0 ? idist_reduce_div(1.0f, scale) : 0;
    if (!(inverse <= 3.4e38f)) inverse = 0;
    if (lane == 0) *(float *)to = scale;
    IDIST_REDUCE_LOOP
    for (; lane < IDIST_PACK_CHUNK; lane += IDIST_PACK_WARP) {
        float *error = a->error + chunk * IDIST_PACK_CHUNK + lane;
        const float x = *error, v = idist_reduce_mul(x, inverse);
        const int byte =
            finite ? idist_pack_truncate(idist_reduce_add(v, v < 0 ? -0.5f : 0.5f)) : 0;
        ((signed char *)to)[4 + lane] = (signed char)byte;
        *error = finite ? idist_reduce_add(x, -idist_reduce_mul((float)byte, scale)) : 0;
    }
}

// Chunks of 1,024 floats to a scale and 1,024 bytes; a warp each.
IDIST_REDUCE_FN void idist_pack_bytes_thread(const idist_pack_args *a, idist_reduce_size first,
                                             idist_reduce_size step) {
    idist_reduce_size chunk;
    unsigned lane = (unsigned)(first % IDIST_PACK_WARP);
    float largest;
    for (chunk = first / IDIST_PACK_WARP; chunk * IDIST_PACK_CHUNK < a->padded;
         chunk += step / IDIST_PACK_WARP) {
#ifdef __CUDACC__
        int k;
        largest = idist_pack_first(a, chunk, lane);
        for (k = IDIST_PACK_WARP / 2; k; k /= 2)
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, k));
        idist_pack_second(a, chunk, lane, largest);
#else
        if (lane) return; // the first lane does what the others would
        for (largest = 0; lane < IDIST_PACK_WARP; lane++) {
            const float x = idist_pack_first(a, chunk, lane);
            largest = x > largest ? x : largest;
        }
        while (lane) idist_pack_second(a, chunk, --lane, largest);
#endif
    }
}
IDIST_PACK_KERNEL(idist_pack_bytes)

// And back.
IDIST_REDUCE_FN void idist_unpack_bytes_thread(const idist_pack_args *a, idist_reduce_size first,
                                               idist_reduce_size step) {
    idist_reduce_size i;
    for (i = first; i < a->count; i += step) {
        const char *from = (const char *)a->in + i / IDIST_PACK_CHUNK * IDIST_PACK_NBYTES;
        ((float *)a->out)[i] =
            idist_reduce_mul((float)((const signed char *)from)[4 + i % IDIST_PACK_CHUNK],
                             *(const float *)from);
    }
}
IDIST_PACK_KERNEL(idist_unpack_bytes)
