// reduce.cu - out = in[0] (op) in[1] ... (op) in[n - 1] on a GPU: the source of the PTX in
// src/gpu/ipc/ptx.h
//
//     tests/gpu/make_ptx.sh --write     compiles this with nvcc and puts the text into ptx.h
//
// The results have the same bits as idist__reduce_many on the host. Operands are combined from left
// to right, without fused multiply-add. Denormals are kept. 16-bit floats are reduced as float and
// rounded once. MIN and MAX are NaN if any operand is NaN; only a NaN's sign and payload differ.
//
// This file is also plain C, so that tests without a GPU run the same lines. idist_reduce_f32 and
// the other kernels are then functions. They are called for each thread of the grid, with the
// thread's number (`first`) and the number of threads (`step`).
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const void *in[16]; // aligned to the size of an element, like out
    void *out;          // may be any one of in[]
    void *also;         // gets the same data; may be any one of in[], or NULL
    unsigned long long count;
    double factor;
    int n;  // 1 to 16
    int op; // an idist_op, or 16: the sum of the operands, each times factor
} idist_reduce_args;

enum {
    IDIST_REDUCE_PROD = 1,
    IDIST_REDUCE_MIN,
    IDIST_REDUCE_MAX,
    IDIST_REDUCE_AVG,
    IDIST_REDUCE_SCALED = 16
};

typedef unsigned long long idist_reduce_size;
typedef unsigned idist_reduce_word;
typedef unsigned short idist_reduce_short;
typedef struct {
    idist_reduce_word w[4];
} idist_reduce_vector;

#ifdef __CUDACC__
#define IDIST_REDUCE_FN static __device__ __forceinline__
#define IDIST_REDUCE_UNROLL _Pragma("unroll")
#define IDIST_REDUCE_LOOP _Pragma("unroll 1")
#define IDIST_REDUCE_KERNEL(name)                                                       \
    extern "C" __global__ void __launch_bounds__(512) name(const idist_reduce_args a) { \
        name##_thread(&a, blockIdx.x *(idist_reduce_size)blockDim.x + threadIdx.x,      \
                      gridDim.x * (idist_reduce_size)blockDim.x);                       \
    }
IDIST_REDUCE_FN float idist_reduce_to_float(unsigned u) { return __uint_as_float(u); }
IDIST_REDUCE_FN unsigned idist_reduce_to_bits(float x) { return __float_as_uint(x); }
IDIST_REDUCE_FN float idist_reduce_add(float x, float y) { return __fadd_rn(x, y); }
IDIST_REDUCE_FN float idist_reduce_mul(float x, float y) { return __fmul_rn(x, y); }
IDIST_REDUCE_FN float idist_reduce_div(float x, float y) { return __fdiv_rn(x, y); }
IDIST_REDUCE_FN double idist_reduce_add(double x, double y) { return __dadd_rn(x, y); }
IDIST_REDUCE_FN double idist_reduce_mul(double x, double y) { return __dmul_rn(x, y); }
IDIST_REDUCE_FN double idist_reduce_div(double x, double y) { return __ddiv_rn(x, y); }
IDIST_REDUCE_FN float idist_reduce_from_half(unsigned h) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((idist_reduce_short)h));
    return x;
}
IDIST_REDUCE_FN unsigned idist_reduce_to_half(float x) {
    idist_reduce_short h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}
IDIST_REDUCE_FN idist_reduce_vector idist_reduce_load(const void *p) {
    const uint4 v = *(const uint4 *)p;
    const idist_reduce_vector r = {{v.x, v.y, v.z, v.w}};
    return r;
}
IDIST_REDUCE_FN void idist_reduce_store(void *p, idist_reduce_vector v) {
    *(uint4 *)p = make_uint4(v.w[0], v.w[1], v.w[2], v.w[3]);
}
#else
#define IDIST_REDUCE_FN static inline
#define IDIST_REDUCE_UNROLL
#define IDIST_REDUCE_LOOP
#define IDIST_REDUCE_KERNEL(name)                                         \
    static inline void name(idist_reduce_args a, idist_reduce_size first, \
                            idist_reduce_size step) {                     \
        name##_thread(&a, first, step);                                   \
    }
IDIST_REDUCE_FN float idist_reduce_to_float(unsigned u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}
IDIST_REDUCE_FN unsigned idist_reduce_to_bits(float x) {
    unsigned u;
    memcpy(&u, &x, sizeof u);
    return u;
}
#define idist_reduce_add(x, y) ((x) + (y))
#define idist_reduce_mul(x, y) ((x) * (y))
#define idist_reduce_div(x, y) ((x) / (y))
// Converts as the instruction cvt does. The product is exact, because a float can represent every
// half number.
IDIST_REDUCE_FN float idist_reduce_from_half(unsigned h) {
    const unsigned sign = (h & 0x8000u) << 16, rest = (h & 0x7fffu) << 13;
    if (rest >= 0x0f800000u) return idist_reduce_to_float(sign | 0x7f800000u | rest);
    return idist_reduce_to_float(sign | rest) * 5192296858534827628530496329220096.0f; // 2^112
}
IDIST_REDUCE_FN unsigned idist_reduce_to_half(float x) {
    const unsigned u = idist_reduce_to_bits(x), sign = u >> 16 & 0x8000u, rest = u & 0x7fffffffu;
    if (rest > 0x7f800000u) return 0x7fff;
    if (rest >= 0x477ff000u) return sign | 0x7c00u; // 65520 and up
    if (rest < 0x38800000u) // subnormal half: its last bit is 2^-24, as in a float in [0.5, 1)
        return sign | (idist_reduce_to_bits(idist_reduce_to_float(rest) + 0.5f) - 0x3f000000u);
    return sign | (rest - 0x38000000u + 0xfffu + (rest >> 13 & 1u)) >> 13;
}
// Aborts if a vector is not aligned, because a GPU would stop, too.
IDIST_REDUCE_FN idist_reduce_vector idist_reduce_load(const void *p) {
    idist_reduce_vector v;
    if ((size_t)p % sizeof v) abort();
    memcpy(&v, p, sizeof v);
    return v;
}
IDIST_REDUCE_FN void idist_reduce_store(void *p, idist_reduce_vector v) {
    if ((size_t)p % sizeof v) abort();
    memcpy(p, &v, sizeof v);
}
#endif

// Gets or sets element e of a vector, in the type that the kernel computes in.
IDIST_REDUCE_FN float idist_reduce_get_f32(const idist_reduce_vector *v, int e) {
    return idist_reduce_to_float(v->w[e]);
}
IDIST_REDUCE_FN void idist_reduce_put_f32(idist_reduce_vector *v, int e, float x) {
    v->w[e] = idist_reduce_to_bits(x);
}

IDIST_REDUCE_FN double idist_reduce_get_f64(const idist_reduce_vector *v, int e) {
    double x;
    memcpy(&x, &v->w[2 * e], sizeof x);
    return x;
}
IDIST_REDUCE_FN void idist_reduce_put_f64(idist_reduce_vector *v, int e, double x) {
    memcpy(&v->w[2 * e], &x, sizeof x);
}

IDIST_REDUCE_FN float idist_reduce_get_f16(const idist_reduce_vector *v, int e) {
    return idist_reduce_from_half(v->w[e / 2] >> 16 * (e & 1) & 0xffffu);
}
IDIST_REDUCE_FN void idist_reduce_put_f16(idist_reduce_vector *v, int e, float x) {
    const unsigned h = idist_reduce_to_half(x);
    v->w[e / 2] = e & 1 ? v->w[e / 2] | h << 16 : h;
}

IDIST_REDUCE_FN float idist_reduce_get_bf16(const idist_reduce_vector *v, int e) {
    return idist_reduce_to_float(e & 1 ? v->w[e / 2] & 0xffff0000u : v->w[e / 2] << 16);
}
IDIST_REDUCE_FN void idist_reduce_put_bf16(idist_reduce_vector *v, int e, float x) {
    const unsigned u = idist_reduce_to_bits(x), even = 0x7fffu + (u >> 16 & 1u);
    const unsigned h = (x != x ? u | 0x400000u : u + even) >> 16;
    v->w[e / 2] = e & 1 ? v->w[e / 2] | h << 16 : h;
}

// Loads or stores the 16 bytes at p. Only the first `left` units exist.
#define IDIST_REDUCE_ACCESS(unit, units)                                                      \
    IDIST_REDUCE_FN idist_reduce_vector idist_reduce_load_##unit(const void *p,               \
                                                                 idist_reduce_size left) {    \
        idist_reduce_vector v = {{0, 0, 0, 0}};                                               \
        int e;                                                                                \
        IDIST_REDUCE_UNROLL                                                                   \
        for (e = 0; e < units; e++)                                                           \
            if ((unsigned)e < left)                                                           \
                v.w[e * 4 / units] |= (unsigned)((const unit *)p)[e] << e * 128 / units % 32; \
        return v;                                                                             \
    }                                                                                         \
    IDIST_REDUCE_FN void idist_reduce_store_##unit(void *p, idist_reduce_size left,           \
                                                   idist_reduce_vector v) {                   \
        int e;                                                                                \
        IDIST_REDUCE_UNROLL                                                                   \
        for (e = 0; e < units; e++)                                                           \
            if ((unsigned)e < left)                                                           \
                ((unit *)p)[e] = (unit)(v.w[e * 4 / units] >> e * 128 / units % 32);          \
    }
IDIST_REDUCE_ACCESS(idist_reduce_word, 4)
IDIST_REDUCE_ACCESS(idist_reduce_short, 8)

IDIST_REDUCE_FN int idist_reduce_aligned(const idist_reduce_args *a) {
    size_t bits = (size_t)a->out | (size_t)a->also;
    int k = 0;
    IDIST_REDUCE_LOOP
    do bits |= (size_t)a->in[k];
    while (++k < a->n);
    return (bits & 15) == 0;
}

// Defines a kernel. One iteration of its outer loop reduces 16 bytes of each operand. It loads two
// operands at a time, so that two loads are in flight. Each result starts with a value that changes
// no bit of the first operand: -0 for a sum, 1 for a product, infinity for MIN. MAX is MIN with all
// signs flipped. `even` and `odd` are the sign bits in a vector's even and odd words.
#define IDIST_REDUCE(f, type, elements, unit, units, even, odd)                                  \
    IDIST_REDUCE_FN void idist_reduce_##f##_thread(const idist_reduce_args *a,                   \
                                                   idist_reduce_size first,                      \
                                                   idist_reduce_size step) {                     \
        const int aligned = idist_reduce_aligned(a), op = a->op,                                 \
                  least = op == IDIST_REDUCE_MIN || op == IDIST_REDUCE_MAX;                      \
        const unsigned flip = op == IDIST_REDUCE_MAX ? ~0u : 0;                                  \
        const float neutral = op == IDIST_REDUCE_PROD ? 1.0f : least ? INFINITY : -0.0f;         \
        idist_reduce_size i;                                                                     \
        IDIST_REDUCE_LOOP                                                                        \
        for (i = first; i * elements < a->count; i += step) {                                    \
            const idist_reduce_size left = (a->count - i * elements) * (units / elements);       \
            const int whole = aligned && left >= units;                                          \
            idist_reduce_vector v = {{0, 0, 0, 0}}, next = v;                                    \
            type sum[elements], x[elements];                                                     \
            int k = 0, e, one_more = 0;                                                          \
            IDIST_REDUCE_UNROLL                                                                  \
            for (e = 0; e < elements; e++) sum[e] = neutral;                                     \
            IDIST_REDUCE_LOOP                                                                    \
            do {                                                                                 \
                if (one_more) {                                                                  \
                    v = next;                                                                    \
                    one_more = 0;                                                                \
                } else if (!whole) {                                                             \
                    v = idist_reduce_load_##unit((const char *)a->in[k] + i * 16, left);         \
                } else {                                                                         \
                    v = idist_reduce_load((const char *)a->in[k] + i * 16);                      \
                    one_more = k + 1 < a->n;                                                     \
                    if (one_more) next = idist_reduce_load((const char *)a->in[k + 1] + i * 16); \
                }                                                                                \
                IDIST_REDUCE_UNROLL                                                              \
                for (e = 0; e < 4; e++) v.w[e] ^= flip & (e % 2 ? odd : even);                   \
                IDIST_REDUCE_UNROLL                                                              \
                for (e = 0; e < elements; e++) x[e] = idist_reduce_get_##f(&v, e);               \
                if (op == IDIST_REDUCE_SCALED) {                                                 \
                    IDIST_REDUCE_UNROLL                                                          \
                    for (e = 0; e < elements; e++)                                               \
                        x[e] = (type)idist_reduce_mul((double)x[e], a->factor);                  \
                }                                                                                \
                if (op == IDIST_REDUCE_PROD) {                                                   \
                    IDIST_REDUCE_UNROLL                                                          \
                    for (e = 0; e < elements; e++) sum[e] = idist_reduce_mul(sum[e], x[e]);      \
                } else if (least) {                                                              \
                    IDIST_REDUCE_UNROLL                                                          \
                    for (e = 0; e < elements; e++)                                               \
                        sum[e] = sum[e] < x[e] || sum[e] != sum[e] ? sum[e] : x[e];              \
                } else {                                                                         \
                    IDIST_REDUCE_UNROLL                                                          \
                    for (e = 0; e < elements; e++) sum[e] = idist_reduce_add(sum[e], x[e]);      \
                }                                                                                \
            } while (++k < a->n);                                                                \
            if (op == IDIST_REDUCE_AVG) {                                                        \
                IDIST_REDUCE_UNROLL                                                              \
                for (e = 0; e < elements; e++) sum[e] = idist_reduce_div(sum[e], (type)a->n);    \
            }                                                                                    \
            IDIST_REDUCE_UNROLL                                                                  \
            for (e = 0; e < elements; e++) idist_reduce_put_##f(&v, e, sum[e]);                  \
            IDIST_REDUCE_UNROLL                                                                  \
            for (e = 0; e < 4; e++) v.w[e] ^= flip & (e % 2 ? odd : even);                       \
            if (whole) idist_reduce_store((char *)a->out + i * 16, v);                           \
            else idist_reduce_store_##unit((char *)a->out + i * 16, left, v);                    \
            if (a->also && whole) idist_reduce_store((char *)a->also + i * 16, v);               \
            else if (a->also) idist_reduce_store_##unit((char *)a->also + i * 16, left, v);      \
        }                                                                                        \
    }                                                                                            \
    IDIST_REDUCE_KERNEL(idist_reduce_##f)

IDIST_REDUCE(f32, float, 4, idist_reduce_word, 4, 0x80000000u, 0x80000000u)
IDIST_REDUCE(f64, double, 2, idist_reduce_word, 4, 0u, 0x80000000u)
IDIST_REDUCE(f16, float, 8, idist_reduce_short, 8, 0x80008000u, 0x80008000u)
IDIST_REDUCE(bf16, float, 8, idist_reduce_short, 8, 0x80008000u, 0x80008000u)
