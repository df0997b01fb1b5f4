// pack.cu - gradients with fewer bits on a GPU: with reduce.cu, the source of the PTX in
// src/gpu/ipc/ptx.h
//
// The results have the same bits as train/compress/compress.h on the host; only a NaN's sign and
// payload differ. Like reduce.cu, this file is also plain C. The kernel is then a function that is
// called for each thread of the grid.
#include "reduce.cu"

typedef struct {
    const void *in;
    void *out;
    unsigned long long count; // gradients
    int op;
} idist_pack_args;

enum { IDIST_PACK_F16, IDIST_PACK_BF16, IDIST_UNPACK_F16, IDIST_UNPACK_BF16 }; // op

// Converts floats to 16 bits, or back.
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

#ifdef __CUDACC__
extern "C" __global__ void __launch_bounds__(512) idist_pack_halves(const idist_pack_args a) {
    idist_pack_halves_thread(&a, blockIdx.x * (idist_reduce_size)blockDim.x + threadIdx.x,
                             gridDim.x * (idist_reduce_size)blockDim.x);
}
#else
static inline void idist_pack_halves(idist_pack_args a, idist_reduce_size first,
                                     idist_reduce_size step) {
    idist_pack_halves_thread(&a, first, step);
}
#endif
