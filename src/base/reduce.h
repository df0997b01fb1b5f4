// base/reduce.h: out = lo (op) hi, for all dtypes and ops
#pragma once

#include "base/fail.h"
#include "base/dtype.h"
#include "base/reduce_op.h"
#include "base/isa.h"
#include "base/small_float.h"

// A kernel that computes out = lo (op) hi. `lo` comes from the lower ranks. Equal operands in equal
// order give equal bits on every processor, for every instruction set and every alignment. out may
// be lo or hi, because each element is read before it is written and no other element depends on
// it. IDIST__NO_ALIAS promises this independence to the compiler.
typedef void (*idist__reduce_fn)(void *out, const void *lo, const void *hi, size_t count);
typedef idist__reduce_fn idist__reduce_row[IDIST_OP_COUNT];

#define IDIST__KERNEL(name, isa, type, wide, expr)                                             \
    IDIST__VECTORIZE IDIST__ISA_##isa static void idist__reduce_##name##_##isa(void *out,      \
                                                                               const void *lo, \
                                                                               const void *hi, \
                                                                               size_t count) { \
        idist__any_##type *o = (idist__any_##type *)out;                                       \
        const idist__any_##type *a = (const idist__any_##type *)lo,                            \
                                *b = (const idist__any_##type *)hi;                            \
        size_t i;                                                                              \
        IDIST__NO_ALIAS                                                                        \
        for (i = 0; i < count; i++) {                                                          \
            wide x = (wide)a[i], y = (wide)b[i];                                               \
            o[i] = (idist__any_##type)(expr);                                                  \
        }                                                                                      \
    }

// Sums and products wrap modulo 2^bits. They are computed in an unsigned type that C does not
// promote to a signed type.
#define IDIST__KERNELS_INT(i, u, wide, isa)                       \
    IDIST__KERNEL(min_##i, isa, i, idist__any_##i, x < y ? x : y) \
    IDIST__KERNEL(max_##i, isa, i, idist__any_##i, x > y ? x : y) \
    IDIST__KERNEL(min_##u, isa, u, idist__any_##u, x < y ? x : y) \
    IDIST__KERNEL(max_##u, isa, u, idist__any_##u, x > y ? x : y) \
    IDIST__KERNEL(sum_##u, isa, u, wide, x + y)                   \
    IDIST__KERNEL(prod_##u, isa, u, wide, x *y)                   \
    IDIST__KERNEL(band_##u, isa, u, wide, x &y)                   \
    IDIST__KERNEL(bor_##u, isa, u, wide, x | y)                   \
    IDIST__KERNEL(bxor_##u, isa, u, wide, x ^ y)                  \
    IDIST__KERNEL(land_##u, isa, u, wide, (x && y) ? 1 : 0)       \
    IDIST__KERNEL(lor_##u, isa, u, wide, (x || y) ? 1 : 0)        \
    IDIST__KERNEL(lxor_##u, isa, u, wide, (!x != !y) ? 1 : 0)
// If both operands are NaN, the result is x. Without this rule the result would vary, because a
// processor returns one of two NaNs and a compiler may swap the operands. x < y is false if x or y
// is NaN, so MIN and MAX return the NaN if only one operand is NaN.
#define IDIST__KERNELS_FLOAT(f, wide, isa)                          \
    IDIST__KERNEL(sum_##f, isa, f, wide, x + (x != x ? x : y))      \
    IDIST__KERNEL(prod_##f, isa, f, wide, x *(x != x ? x : y))      \
    IDIST__KERNEL(min_##f, isa, f, wide, (x < y || x != x) ? x : y) \
    IDIST__KERNEL(max_##f, isa, f, wide, (x > y || x != x) ? x : y)

#define IDIST__ROW_INT(type, u, isa)                                            \
    {                                                                           \
        idist__reduce_sum_##u##_##isa, idist__reduce_prod_##u##_##isa,          \
            idist__reduce_min_##type##_##isa, idist__reduce_max_##type##_##isa, \
            idist__reduce_sum_##u##_##isa, idist__reduce_band_##u##_##isa,      \
            idist__reduce_bor_##u##_##isa, idist__reduce_bxor_##u##_##isa,      \
            idist__reduce_land_##u##_##isa, idist__reduce_lor_##u##_##isa,      \
            idist__reduce_lxor_##u##_##isa, 0, 0                                \
    }
#define IDIST__ROW_FLOAT(f, isa)                                          \
    {                                                                     \
        idist__reduce_sum_##f##_##isa, idist__reduce_prod_##f##_##isa,    \
            idist__reduce_min_##f##_##isa, idist__reduce_max_##f##_##isa, \
            idist__reduce_sum_##f##_##isa, 0, 0, 0, 0, 0, 0, 0, 0         \
    }
#define IDIST__ROW_PAIR(pair) \
    { 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, idist__reduce_minloc_##pair, idist__reduce_maxloc_##pair }

// Outside the first-level cache AVX-512 beats AVX2 only where AVX2 lacks an instruction: 64-bit
// products, MIN and MAX. Floats use AVX-512 too, for sums that stay in the first-level cache. More
// instances would only make this header slower to compile.
#define IDIST__KERNELS_NARROW(isa)              \
    IDIST__KERNELS_INT(i8, u8, uint32_t, isa)   \
    IDIST__KERNELS_INT(i16, u16, uint32_t, isa) \
    IDIST__KERNELS_INT(i32, u32, uint32_t, isa)
#define IDIST__KERNELS_WIDE(isa)                \
    IDIST__KERNELS_INT(i64, u64, uint64_t, isa) \
    IDIST__KERNELS_FLOAT(f32, float, isa)       \
    IDIST__KERNELS_FLOAT(f64, double, isa)

IDIST__KERNELS_NARROW(base)
IDIST__KERNELS_WIDE(base)
#ifdef IDIST__X86
IDIST__KERNELS_NARROW(avx2)
IDIST__KERNELS_WIDE(avx2)
IDIST__KERNELS_WIDE(avx512)
#endif

// A kernel that computes out = (lo + hi) / n, the last step of AVG, in one pass over memory instead
// of two. If n is a power of two, multiplying by 1 / n gives the same bits as dividing by n and
// takes less time.
typedef void (*idist__average_fn)(void *out, const void *lo, const void *hi, size_t count, int n);

#define IDIST__KERNEL_AVERAGE(name, f, type, isa, by_n, expr)                                  \
    IDIST__VECTORIZE IDIST__ISA_##isa static void idist__reduce_##name##_##f##_##isa(          \
        void *out, const void *lo, const void *hi, size_t count, int n) {                      \
        idist__any_##f *o = (idist__any_##f *)out;                                             \
        const idist__any_##f *a = (const idist__any_##f *)lo, *b = (const idist__any_##f *)hi; \
        type by = by_n;                                                                        \
        size_t i;                                                                              \
        IDIST__NO_ALIAS                                                                        \
        for (i = 0; i < count; i++) {                                                          \
            type x = a[i], y = b[i], sum = x + (x != x ? x : y);                               \
            o[i] = expr;                                                                       \
        }                                                                                      \
    }
#define IDIST__KERNELS_AVERAGE(f, type, isa)                                \
    IDIST__KERNEL_AVERAGE(average_mul, f, type, isa, 1 / (type)n, sum * by) \
    IDIST__KERNEL_AVERAGE(average_div, f, type, isa, (type)n, sum / by)

IDIST__KERNELS_AVERAGE(f32, float, base)
IDIST__KERNELS_AVERAGE(f64, double, base)
#ifdef IDIST__X86
IDIST__KERNELS_AVERAGE(f32, float, avx2)
IDIST__KERNELS_AVERAGE(f64, double, avx2)
#endif

#ifdef __clang__
#pragma clang diagnostic pop
#endif

// MINLOC and MAXLOC select the pair with the best value, and among equal values the pair with the
// lowest index. A NaN beats every number, and among NaNs the lowest index wins.
#define IDIST__KERNEL_PAIR(name, pair, better, is_nan)                                            \
    static void idist__reduce_##name##_##pair(void *out, const void *lo, const void *hi,          \
                                              size_t count) {                                     \
        size_t i;                                                                                 \
        for (i = 0; i < count; i++) {                                                             \
            idist_##pair x, y;                                                                    \
            bool x_is_nan, y_is_nan, tie, take_y;                                                 \
            memcpy(&x, (const char *)lo + i * sizeof x, sizeof x);                                \
            memcpy(&y, (const char *)hi + i * sizeof y, sizeof y);                                \
            x_is_nan = is_nan(x.value);                                                           \
            y_is_nan = is_nan(y.value);                                                           \
            tie = x.value == y.value || (x_is_nan && y_is_nan);                                   \
            take_y = tie ? y.index < x.index : y_is_nan || (!x_is_nan && y.value better x.value); \
            memcpy((char *)out + i * sizeof x, take_y ? &y : &x, sizeof x);                       \
        }                                                                                         \
    }
#define IDIST__FLOAT_IS_NAN(x) ((x) != (x))
#define IDIST__INT_IS_NAN(x) false
#define IDIST__KERNELS_PAIR(pair, is_nan)       \
    IDIST__KERNEL_PAIR(minloc, pair, <, is_nan) \
    IDIST__KERNEL_PAIR(maxloc, pair, >, is_nan)

IDIST__KERNELS_PAIR(f32_i64, IDIST__FLOAT_IS_NAN)
IDIST__KERNELS_PAIR(f64_i64, IDIST__FLOAT_IS_NAN)
IDIST__KERNELS_PAIR(i32_i64, IDIST__INT_IS_NAN)
IDIST__KERNELS_PAIR(i64_i64, IDIST__INT_IS_NAN)

// The kernels by instruction set, dtype and op. AVG uses a kernel that adds; the division follows
// at the end. Narrow floats are reduced as F32.
#define IDIST__REDUCE_TABLE(narrow, wide)                                                          \
    {                                                                                              \
        IDIST__ROW_INT(i8, u8, narrow), IDIST__ROW_INT(u8, u8, narrow),                            \
            IDIST__ROW_INT(i16, u16, narrow), IDIST__ROW_INT(u16, u16, narrow),                    \
            IDIST__ROW_INT(i32, u32, narrow), IDIST__ROW_INT(u32, u32, narrow),                    \
            IDIST__ROW_INT(i64, u64, wide), IDIST__ROW_INT(u64, u64, wide),                        \
            IDIST__ROW_FLOAT(f32, wide), IDIST__ROW_FLOAT(f32, wide), IDIST__ROW_FLOAT(f32, wide), \
            IDIST__ROW_FLOAT(f64, wide), IDIST__ROW_FLOAT(f32, wide), IDIST__ROW_FLOAT(f32, wide), \
            IDIST__ROW_PAIR(f32_i64), IDIST__ROW_PAIR(f64_i64), IDIST__ROW_PAIR(i32_i64),          \
            IDIST__ROW_PAIR(i64_i64)                                                               \
    }
static const idist__reduce_row idist__reduce_tables[][IDIST_DTYPE_COUNT] = {
    IDIST__REDUCE_TABLE(base, base),
#ifdef IDIST__X86
    IDIST__REDUCE_TABLE(avx2, avx2),
    IDIST__REDUCE_TABLE(avx2, avx512),
#endif
};

// The kernels of AVG by instruction set. In each row, the F32 and F64 kernels for a power-of-two
// number of ranks come first. The F32 and F64 kernels for other numbers of ranks follow.
#define IDIST__ROW_AVERAGE(isa)                                                      \
    {                                                                                \
        idist__reduce_average_mul_f32_##isa, idist__reduce_average_mul_f64_##isa,    \
            idist__reduce_average_div_f32_##isa, idist__reduce_average_div_f64_##isa \
    }
static const idist__average_fn idist__average_tables[][4] = {
    IDIST__ROW_AVERAGE(base),
#ifdef IDIST__X86
    IDIST__ROW_AVERAGE(avx2),
    IDIST__ROW_AVERAGE(avx2),
#endif
};

// The kernels for this processor, by dtype and op.
static const idist__reduce_row *idist__reduce_table = idist__reduce_tables[IDIST__BASE];

static void idist__reduce_use(idist__isa isa) {
    idist__isa_used = isa;
    idist__reduce_table = idist__reduce_tables[isa];
}

// Runs before main, so that no thread sees the table change and no call has to check whether it is
// set.
__attribute__((constructor)) static void idist__reduce_start(void) {
    idist__reduce_use(idist__isa_best());
}

// Returns true if multiplying by 1 / n gives the same bits as dividing by n.
static bool idist__reduce_is_exact(int n) { return (n & (n - 1)) == 0; }

// Returns the kernel that adds the last operand of an AVG over n ranks and divides in the same
// pass, or NULL if that takes two passes. On x87 an AVG always takes two passes, because the sum
// must be rounded first.
static idist__average_fn idist__reduce_average(idist_dtype dtype, int n) {
    const idist__average_fn *row = idist__average_tables[idist__isa_used];
    bool is_rounded = FLT_EVAL_METHOD == 0;

    if (!is_rounded || n == 0 || (dtype != IDIST_F32 && dtype != IDIST_F64)) return NULL;
    if (!idist__reduce_is_exact(n)) row += 2;

    return dtype == IDIST_F64 ? row[1] : row[0];
}

// Divides each element of buf by n, the last step of AVG. The caller has called idist__mode_enter.
IDIST__VECTORIZE static void idist__reduce_quotients(void *buf, size_t count, idist_dtype dtype,
                                                     int n) {
    bool is_power_of_2 = idist__reduce_is_exact(n);
    size_t i;

    if (dtype == IDIST_F32 && is_power_of_2) {
        for (i = 0; i < count; i++) ((idist__any_f32 *)buf)[i] *= 1 / (float)n;
        return;
    }

    if (dtype == IDIST_F64 && is_power_of_2) {
        for (i = 0; i < count; i++) ((idist__any_f64 *)buf)[i] *= 1 / (double)n;
        return;
    }

    switch (dtype) {
#define IDIST__DIVIDE(id, type, cast)                                         \
    case id:                                                                  \
        for (i = 0; i < count; i++)                                           \
            ((idist__any_##type *)buf)[i] =                                   \
                (idist__any_##type)(((idist__any_##type *)buf)[i] / (cast)n); \
        break;
        IDIST__DIVIDE(IDIST_I8, i8, int)
        IDIST__DIVIDE(IDIST_U8, u8, int)
        IDIST__DIVIDE(IDIST_I16, i16, int)
        IDIST__DIVIDE(IDIST_U16, u16, int)
        IDIST__DIVIDE(IDIST_I32, i32, int)
        IDIST__DIVIDE(IDIST_U32, u32, uint32_t)
        IDIST__DIVIDE(IDIST_I64, i64, int64_t)
        IDIST__DIVIDE(IDIST_U64, u64, uint64_t)
        IDIST__DIVIDE(IDIST_F32, f32, float)
        IDIST__DIVIDE(IDIST_F64, f64, double)
    default: break;
#undef IDIST__DIVIDE
    }
}

IDIST__NOINLINE static void idist__reduce_divide(void *buf, size_t count, idist_dtype dtype,
                                                 int n) {
    uint32_t mode = idist__mode_enter();

    idist__reduce_quotients(buf, count, dtype, n);
    idist__mode_leave(mode);
}

// Computes acc[i] = lo[i] (op) hi[i] with a kernel of idist__reduce_table.
IDIST__UNUSED static void idist__reduce_by(idist__reduce_fn kernel, void *acc, const void *lo,
                                           const void *hi, size_t count) {
    uint32_t mode = idist__mode_enter();

    kernel(acc, lo, hi, count);
    idist__mode_leave(mode);
}

// Performs the last step of a reduction, even if only one rank contributes. Divides for AVG, and
// turns the results of logical ops into 0 or 1.
static void idist__reduce_finish(void *buf, size_t count, idist_dtype dtype, idist_op op, int n) {
    if (op == IDIST_AVG) idist__reduce_divide(buf, count, dtype, n);
    if (idist__reduce_op_class_of(op) == IDIST__OP_LOGICAL && idist__dtype_is_integer(dtype))
        idist__reduce_table[(unsigned)dtype][IDIST_LAND](buf, buf, buf, count);
}

// Reduces in pieces of 4 KiB, so that intermediate results stay in the first-level cache. Reads
// each input once and writes `out` once. Only the step for the last operand writes to `out`,
// because `out` may be an input that has not been read yet.
__attribute__((noinline)) static void idist__reduce_pieces(void *out, const void *const *in, int n,
                                                           size_t count, idist_dtype dtype,
                                                           idist_op op, int divide_by) {
    enum { PIECE = 4096 };
    // Buffers for any dtype. Aligned, because vectors that straddle cache lines cost a third of the
    // speed.
    float sum[PIECE / sizeof(float)] __attribute__((aligned(64))),
        wide[PIECE / sizeof(float)] __attribute__((aligned(64)));
    bool narrow = idist__dtype_is_narrow(dtype);
    size_t size = idist_dtype_size(dtype), at, k;
    size_t piece =
        PIECE / (narrow ? sizeof(float) : size); // NOLINT(clang-analyzer-core.DivideZero)
    idist__reduce_fn fn = idist__reduce_table[(unsigned)dtype][(unsigned)op];
    idist__average_fn average = NULL;
    int i;

    if (n > 1) average = idist__reduce_average(narrow ? IDIST_F32 : dtype, divide_by);

    for (at = 0; at < count; at += k) {
        char *o = (char *)out + at * size;
        const void *lo = (const char *)in[0] + at * size;
        k = count - at < piece ? count - at : piece;

        if (narrow) {
            idist__small_float_widen(sum, lo, k, dtype);
            lo = sum;
        }

        for (i = 1; i < n; i++) {
            const void *hi = (const char *)in[i] + at * size;

            if (narrow) {
                idist__small_float_widen(wide, hi, k, dtype);
                hi = wide;
            }

            if (average && i == n - 1) average(narrow ? (void *)sum : o, lo, hi, k, divide_by);
            else fn(narrow || i < n - 1 ? (void *)sum : o, lo, hi, k);
            lo = sum;
        }

        if (divide_by && !average)
            idist__reduce_quotients(narrow ? (void *)sum : o, k, narrow ? IDIST_F32 : dtype,
                                    divide_by);
        if (narrow) idist__small_float_narrow(o, sum, k, dtype);
    }
}

// Computes out = in[0] (op) in[1] ... (op) in[n - 1] from left to right. Divides an AVG by
// `divide_by`, which is 0 for other ops. n >= 1. out may be one of the inputs; otherwise the
// buffers must not overlap. Narrow floats are rounded once, at the end.
static void idist__reduce_many(void *out, const void *const *in, int n, size_t count,
                               idist_dtype dtype, idist_op op, int divide_by) {
    bool narrow = idist__dtype_is_narrow(dtype);
    idist__average_fn average = idist__reduce_average(dtype, divide_by);
    uint32_t mode = idist__mode_enter();

    if (n == 1 && (op == IDIST_LAND || op == IDIST_LOR || op == IDIST_LXOR)) { // gives 0 or 1
        idist__reduce_table[(unsigned)dtype][IDIST_LAND](out, in[0], in[0], count);
    } else if (n == 1 && !(narrow && divide_by)) {
        if (out != in[0] && count) memcpy(out, in[0], count * idist_dtype_size(dtype));
        if (divide_by) idist__reduce_quotients(out, count, dtype, divide_by);
    } else if (n == 2 && !narrow && !divide_by) {
        idist__reduce_table[(unsigned)dtype][(unsigned)op](out, in[0], in[1], count);
    } else if (n == 2 && average) {
        average(out, in[0], in[1], count, divide_by);
    } else {
        idist__reduce_pieces(out, in, n, count, dtype, op, divide_by);
    }

    idist__mode_leave(mode);
}

// Multiplies each element of buf by a factor, for any floating dtype: the first step of a
// premultiplied sum.
static void idist__reduce_scale(void *buf, size_t count, idist_dtype dtype, double factor) {
    uint32_t mode = idist__mode_enter();
    float wide[256];
    size_t at, i, k;

    if (dtype == IDIST_F64)
        for (i = 0; i < count; i++) ((idist__any_f64 *)buf)[i] *= factor;
    if (dtype == IDIST_F32)
        for (i = 0; i < count; i++)
            ((idist__any_f32 *)buf)[i] = (float)(((idist__any_f32 *)buf)[i] * factor);

    for (at = 0; idist__dtype_is_narrow(dtype) && at < count; at += k) {
        char *p = (char *)buf + at * idist_dtype_size(dtype);
        k = count - at < IDIST__COUNT_OF(wide) ? count - at : IDIST__COUNT_OF(wide);
        idist__small_float_widen(wide, p, k, dtype);
        for (i = 0; i < k; i++) wide[i] = (float)(wide[i] * factor);
        idist__small_float_narrow(p, wide, k, dtype);
    }

    idist__mode_leave(mode);
}

idist_status idist_reduce_local(const void *in, void *inout, size_t count, idist_dtype dtype,
                                idist_op op) {
    const void *operands[2];

    if (!idist__dtype_is_builtin(dtype))
        return idist__fail(IDIST_ERR_ARG, "reduce_local: invalid dtype %d", (int)dtype);
    if (!idist__reduce_op_is_builtin(op) || op == IDIST_AVG)
        return idist__fail(IDIST_ERR_ARG, "reduce_local: op %s (%d) is not supported here",
                           idist_op_name(op), (int)op);
    if (!idist__reduce_table[(unsigned)dtype][(unsigned)op])
        return idist__fail(IDIST_ERR_ARG, "reduce_local: %s does not take %s", idist_op_name(op),
                           idist_dtype_name(dtype));
    if (count && (!in || !inout))
        return idist__fail(IDIST_ERR_ARG, "reduce_local: a buffer is NULL");
    operands[0] = in;
    operands[1] = inout;
    idist__reduce_many(inout, operands, 2, count, dtype, op, 0);

    return IDIST_OK;
}
