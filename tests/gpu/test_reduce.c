// test_reduce.c - compiles the kernels of reduce.cu and pack.cu for the host. Compares them bit for
// bit with idist__reduce_many and train/compress/compress.h. Only the bits of NaNs may differ.
//
//     cc -std=gnu11 -ffp-contract=off -I. -Itests/lib tests/gpu/test_reduce.c -o test_reduce
//     -lpthread && ./test_reduce
#define IDIST_IMPLEMENTATION
#include "idist.h"
#include "idist_train.h"
#include "pack.cu"
#include "tap.h"

#define MAX_N 16
#define MAX_COUNT 1000
// Size in bytes of one buffer, with spare elements before and after the data.
#define ROOM (8 * (MAX_COUNT + 8))
#define GUARD 0x5C

static const idist_dtype dtypes[] = {IDIST_F32, IDIST_F64, IDIST_F16, IDIST_BF16};
static const int ops[] = {IDIST_SUM, IDIST_PROD, IDIST_MIN,
                          IDIST_MAX, IDIST_AVG,  IDIST_REDUCE_SCALED};
static const int ns[] = {1, 2, 3, 8, 16};
static const size_t counts[] = {0, 1, 2, 3, 7, 8, 9, 17, MAX_COUNT};
static const double factors[] = {0.1, -3, 1e-40, 0x1p-20};
static unsigned char operands[MAX_N][ROOM] __attribute__((aligned(64))),
    output[ROOM] __attribute__((aligned(64)));
static unsigned char expected[ROOM], second[ROOM] __attribute__((aligned(64)));
static float wide[MAX_N][MAX_COUNT];
static double scaled[MAX_N][MAX_COUNT];
static uint64_t state = 1;

// Positions of the buffers of one call, in elements from an aligned address.
typedef struct layout {
    const char *name;
    int in, last, out;
} layout;
static const layout layouts[] = {{"aligned", 0, 0, 0},
                                 {"all off by one", 1, 1, 1},
                                 {"the last off by one", 0, 1, 0},
                                 {"out off by three", 0, 0, 3}};

static bool is_nan(idist_dtype d, const unsigned char *at) {
    double f64;
    float f32;
    if (d == IDIST_F64) return memcpy(&f64, at, 8), f64 != f64;
    if (d == IDIST_F32) return memcpy(&f32, at, 4), f32 != f32;
    idist__small_float_widen(&f32, at, 1, d);
    return f32 != f32;
}

// Writes a random value of one of three kinds. Values of similar magnitude make sums lose bits. The
// other kinds are arbitrary bits, and values at the ends of the range.
static void fill(unsigned char *at, idist_dtype d) {
    static const double ends[] = {0.0,     -0.0,      INFINITY, -INFINITY, NAN,      1,
                                  0x1p-24, 0x1.8p-24, 0x1p-149, 3e-39,     0x1p-133, 65504,
                                  3.38e38, 5e-324,    1.7e308,  65520};
    uint64_t bits = tap_rand(&state);
    unsigned which = (unsigned)tap_rand(&state) % 8;
    size_t size = idist_dtype_size(d);
    double x = which < 2 ? ends[bits % 16] : (double)(int64_t)bits * 0x1p-62;
    float f = (float)x;
    if (which == 2) memcpy(at, &bits, size);
    else if (d == IDIST_F64) memcpy(at, &x, size);
    else if (d == IDIST_F32) memcpy(at, &f, size);
    else idist__small_float_narrow(at, &f, 1, d);
}

static void reference(void *out, const void *const *in, int n, size_t count, idist_dtype d, int op,
                      double factor) {
    bool half = d == IDIST_F16 || d == IDIST_BF16;
    const void *from[MAX_N];
    float sum[MAX_COUNT];
    if (op != IDIST_REDUCE_SCALED) {
        idist__reduce_many(out, in, n, count, d, (idist_op)op, op == IDIST_AVG ? n : 0);
        return;
    }
    for (int k = 0; k < n; k++) {
        from[k] = half ? (void *)wide[k] : (void *)scaled[k];
        if (half) idist__small_float_widen(wide[k], in[k], count, d);
        else memcpy(scaled[k], in[k], count * idist_dtype_size(d));
        idist__reduce_scale(half ? (void *)wide[k] : (void *)scaled[k], count, half ? IDIST_F32 : d,
                            factor);
    }
    idist__reduce_many(half ? (void *)sum : out, from, n, count, half ? IDIST_F32 : d, IDIST_SUM,
                       0);
    if (half) idist__small_float_narrow(out, sum, count, d);
}

static void launch(idist_dtype d, const idist_reduce_args *a, idist_reduce_size nthreads) {
    for (idist_reduce_size i = nthreads; i-- > 0;) {
        if (d == IDIST_F32) idist_reduce_f32(*a, i, nthreads);
        if (d == IDIST_F64) idist_reduce_f64(*a, i, nthreads);
        if (d == IDIST_F16) idist_reduce_f16(*a, i, nthreads);
        if (d == IDIST_BF16) idist_reduce_bf16(*a, i, nthreads);
    }
}

// Makes one call and compares every element. Also checks that nothing else was written. `out` is
// the buffer of operand `same`, or a buffer of its own if `same` is -1.
static bool one_call(idist_dtype d, int op, int n, size_t count, const layout *l, int same) {
    size_t size = idist_dtype_size(d);
    idist_reduce_args a;
    unsigned char *buffer = same < 0 ? output : operands[same], *out, *also;
    memset(&a, 0xA5, sizeof a);
    memset(output, GUARD, sizeof output);
    memset(second, GUARD, sizeof second);
    also = second + 16 + tap_rand(&state) % 4 / 3 * size; // sometimes with another alignment
    for (int k = 0; k < n; k++) {
        size_t at = (size_t)(k == n - 1 ? l->last : l->in) * size;
        memset(operands[k], GUARD, ROOM);
        for (size_t i = 0; i < count; i++) fill(operands[k] + 16 + at + i * size, d);
        a.in[k] = operands[k] + 16 + at;
    }
    out = same < 0 ? output + 16 + (size_t)l->out * size : (unsigned char *)(uintptr_t)a.in[same];
    a.out = out;
    a.also = tap_rand(&state) % 2 ? also : NULL;
    a.count = count;
    a.n = n;
    a.op = op;
    a.factor = factors[tap_rand(&state) % 4];
    memcpy(expected, buffer, ROOM);
    reference(expected + (out - buffer), a.in, n, count, d, op, a.factor);
    launch(d, &a, count == MAX_COUNT ? 96 : 1 + tap_rand(&state) % 3);
    for (size_t i = 0; i < count; i++) {
        unsigned char *got = out + i * size, *want = expected + (got - buffer);
        if (is_nan(d, want) && is_nan(d, got)) memcpy(want, got, size);
        if (memcmp(got, want, size) == 0) continue;
        uint64_t bits[2] = {0, 0};
        memcpy(&bits[0], got, size);
        memcpy(&bits[1], want, size);
        tap_diag("%s, n %d, count %zu, %s, out is operand %d: element %zu is %llx, expected %llx",
                 idist_dtype_name(d), n, count, l->name, same, i, (unsigned long long)bits[0],
                 (unsigned long long)bits[1]);
        return false;
    }
    bool twice = !a.also || memcmp(also, out, count * size) == 0;
    for (unsigned char *at = second; at < second + ROOM && twice; at++)
        if (!a.also || at < also || at >= also + count * size) twice = *at == GUARD;
    if (!twice)
        tap_diag("%s, n %d, count %zu, %s: the second result", idist_dtype_name(d), n, count,
                 l->name);
    if (!twice) return false;
    if (memcmp(buffer, expected, ROOM) == 0) return true;
    tap_diag("%s, n %d, count %zu, %s: it wrote beside the buffer", idist_dtype_name(d), n, count,
             l->name);
    return false;
}

#define FOR_EACH(type, x, list) \
    for (const type *x = list; x < list + sizeof list / sizeof *list; x++)

static void all_calls(idist_dtype d, int op) {
    bool good = true;
    FOR_EACH(int, n, ns)
    FOR_EACH(size_t, count, counts)
    FOR_EACH(layout, l, layouts) {
        good = good && one_call(d, op, *n, *count, l, -1) && one_call(d, op, *n, *count, l, 0);
        if (*n > 1) good = good && one_call(d, op, *n, *count, l, *n - 1);
        if (*n > 2) good = good && one_call(d, op, *n, *count, l, *n / 2);
    }
    tap_ok(good, "%s %s", idist_dtype_name(d),
           op == IDIST_REDUCE_SCALED ? "scaled sum" : idist_op_name((idist_op)op));
}

// Returns true if a float is narrowed to both 16-bit types as on the host. A NaN stays a NaN; every
// other number has the bits of the host's conversion.
static bool narrowed(float x) {
    idist_reduce_vector v = {{0, 0, 0, 0}};
    uint16_t half = (uint16_t)idist_reduce_to_half(x), bf16;
    idist_reduce_put_bf16(&v, 0, x);
    bf16 = (uint16_t)v.w[0];
    if (x != x) return (half & 0x7fff) > 0x7c00 && (bf16 & 0x7fff) > 0x7f80;
    return half == idist__small_float_to_half(x) && bf16 == idist__small_float_to_bf16(x);
}

// Widens all 16-bit codes. Narrows some floats with each upper half of the bits, and the floats
// around each midpoint between two F16 numbers.
static bool conversions(void) {
    for (uint32_t h = 0; h < 65536; h++) {
        float f = idist__small_float_from_half((uint16_t)h), g = idist_reduce_from_half(h);
        float middle =
            (float)(((double)f + (double)idist__small_float_from_half((uint16_t)(h + 1))) / 2);
        if (f != f ? g == g : idist__small_float_to_bits(f) != idist__small_float_to_bits(g))
            return false;
        for (uint32_t low = 0; low < 65536; low += low < 4 || (low & 0x7fff) > 0x7ff0 ? 1 : 0xffb)
            if (!narrowed(idist__small_float_from_bits(h << 16 | low))) return false;
        for (uint32_t by = 0; by < 3; by++)
            if (!narrowed(
                    idist__small_float_from_bits(idist__small_float_to_bits(middle) + by - 1)))
                return false;
    }
    return narrowed(idist__small_float_from_bits(0x7fffffff)) &&
           narrowed(idist__small_float_from_bits(0xffffffff));
}

// ---- gradients with fewer bits ----

enum { PACKED = 5120, N_THREADS = 96 };

static float random_float(void) {
    float x;
    fill((unsigned char *)&x, IDIST_F32);
    return x;
}

static bool same_floats(const float *a, const float *b, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (a[i] != a[i] ? b[i] == b[i] : memcmp(&a[i], &b[i], sizeof a[i]) != 0) return false;
    return true;
}

static void run_pack(const idist_pack_args *a) {
    for (idist_reduce_size i = 0; i < N_THREADS; i++) idist_pack_halves(*a, i, N_THREADS);
}

static void halves(int op, idist_dtype wire) {
    static float x[PACKED], back[2][PACKED];
    static uint16_t packed[2][PACKED + 1];
    idist_pack_args a = {x, packed[0], PACKED - 3, op};
    bool good = true;
    for (int round = 0; round < 20 && good; round++) {
        for (int i = 0; i < PACKED; i++) x[i] = random_float();
        idist__small_float_narrow((char *)packed[1], x, PACKED - 3, wire);
        run_pack(&a);
        for (int i = 0; i < PACKED - 3; i++)
            good = good && (x[i] != x[i] || packed[0][i] == packed[1][i]) &&
                   packed[0][PACKED - 3] == 0;
        idist_pack_args b = {packed[1], back[0], PACKED - 3,
                             op + IDIST_UNPACK_F16 - IDIST_PACK_F16};
        run_pack(&b);
        idist__small_float_widen(back[1], packed[1], PACKED - 3, wire);
        good = good && same_floats(back[0], back[1], PACKED);
    }
    tap_ok(good, "packed to %s and back", idist_dtype_name(wire));
}

int main(void) {
    tap_deadline(100);
    tap_ok(conversions(), "16-bit floats to float and back");
    FOR_EACH(idist_dtype, d, dtypes)
    FOR_EACH(int, op, ops) all_calls(*d, *op);
    halves(IDIST_PACK_F16, IDIST_F16);
    halves(IDIST_PACK_BF16, IDIST_BF16);
    return tap_done();
}
