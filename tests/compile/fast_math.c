// fast_math.c - prints digests of the results of the loops over floats.
//
// tests/compile/fast_math.sh builds this file with and without -Ofast and compares the output.
// Values are stored as bits, because a compiler that may assume that there are no NaNs can remove a
// test for NaN.
#define IDIST_IMPLEMENTATION
#include "idist_train.h"

static const char *const isa_names[IDIST__ISA_COUNT] = {"base", "avx2", "avx512"};

static uint64_t digest;

static void eat(const void *data, size_t nbytes) {
    const unsigned char *p = (const unsigned char *)data;
    size_t i;

    for (i = 0; i < nbytes; i++) digest = (digest ^ p[i]) * UINT64_C(0x100000001b3);
}

static void tell(const char *what, const char *which, idist__isa isa) {
    printf("%s %s %s %016llx\n", isa_names[isa], what, which, (unsigned long long)digest);
    digest = UINT64_C(0xcbf29ce484222325);
}

// Widens every code, and narrows floats around every border between two codes. Each count leaves a
// remainder after the last full vector.
static void conversions(idist_dtype dtype, idist__isa isa) {
    enum { N = 65536 + 13 };
    static uint16_t codes[N];
    static float wide[N];
    static uint32_t bits[N];
    uint32_t i, step;

    for (i = 0; i < N; i++) {
        if (idist_dtype_size(dtype) == 1) ((uint8_t *)codes)[i] = (uint8_t)i;
        else codes[i] = (uint16_t)i;
    }
    idist__small_float_widen(wide, codes, N, dtype);
    eat(wide, sizeof wide);
    tell("widen", idist_dtype_name(dtype), isa);

    for (step = 0; step < 8; step++) {
        static const uint32_t low[8] = {0, 1, 0xfff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001};

        for (i = 0; i < N; i++) bits[i] = i << 16 | low[step];
        memcpy(wide, bits, sizeof wide);
        memset(codes, 0, sizeof codes);
        idist__small_float_narrow(codes, wide, N, dtype);
        eat(codes, N * idist_dtype_size(dtype));
    }
    tell("narrow", idist_dtype_name(dtype), isa);
}

// Reduces every pair of these values. No value is a subnormal of F32 or F64, and no product of two
// values is subnormal. The start code that -Ofast links makes the processor treat subnormals as
// zero, which the user of -Ofast accepts. Subnormals of F16 are normal in F32 and must survive.
static void reductions(idist_dtype dtype, idist_op op, idist__isa isa) {
    static const uint64_t f64[] = {0,
                                   UINT64_C(1) << 63,
                                   UINT64_C(0x3ff0000000000000),
                                   UINT64_C(0xbff8000000000001),
                                   UINT64_C(0x7ff0000000000000),
                                   UINT64_C(0xfff0000000000000),
                                   UINT64_C(0x7ff8000000000005),
                                   UINT64_C(0xfff8000000000006),
                                   UINT64_C(0x7fefffffffffffff),
                                   UINT64_C(0x3fd5555555555555),
                                   UINT64_C(0x3ca0000000000000)};
    static const uint32_t f32[] = {0,          0x80000000u, 0x3f800000, 0xbfc00001u,
                                   0x7f800000, 0xff800000u, 0x7fc00005, 0xffc00006u,
                                   0x7f7fffff, 0x3eaaaaab,  0x33800000};
    static const uint16_t f16[] = {0,      0x8000, 0x3c00, 0xbe01, 0x7c00, 0xfc00,
                                   0x7e05, 0xfe06, 0x7bff, 0x0001, 0x83ff};
    static const uint16_t bf16[] = {0,      0x8000, 0x3f80, 0xbfc1, 0x7f80, 0xff80,
                                    0x7fc5, 0xffc6, 0x7f7f, 0x3eab, 0x3380};
    enum { N = 11, PAIRS = N * N };
    unsigned char x[PAIRS * 8], y[PAIRS * 8], out[PAIRS * 8];
    const void *operands[3];
    size_t size = idist_dtype_size(dtype), i, j;
    const unsigned char *values = (const unsigned char *)f64;

    if (dtype == IDIST_F32) values = (const unsigned char *)f32;
    if (dtype == IDIST_F16) values = (const unsigned char *)f16;
    if (dtype == IDIST_BF16) values = (const unsigned char *)bf16;
    for (i = 0; i < N; i++)
        for (j = 0; j < N; j++) {
            memcpy(x + (i * N + j) * size, values + i * size, size);
            memcpy(y + (i * N + j) * size, values + j * size, size);
        }

    operands[0] = operands[2] = x;
    operands[1] = y;
    idist__reduce_many(out, operands, 2, PAIRS, dtype, op, op == IDIST_AVG ? 2 : 0);
    eat(out, PAIRS * size);
    idist__reduce_many(out, operands, 3, PAIRS, dtype, op, op == IDIST_AVG ? 3 : 0);
    eat(out, PAIRS * size);
    tell(idist_op_name(op), idist_dtype_name(dtype), isa);

    memcpy(out, x, sizeof out);
    idist__reduce_scale(out, PAIRS, dtype, 1.0 / 3);
    eat(out, PAIRS * size);
    tell("premul", idist_dtype_name(dtype), isa);
}

// Clips gradients that contain `bad`. idist_clip_grad_norm must refuse a NaN or an infinity.
static void training(uint32_t bad) {
    static float x[1024];
    uint32_t i;
    idist_tensor tensor;
    idist_status status;
    double norm = 0;

    for (i = 0; i < 1024; i++) x[i] = (float)(i % 7) - 3.0f;
    memcpy(&x[17], &bad, sizeof bad);
    memset(&tensor, 0, sizeof tensor);
    tensor.data = x;
    tensor.count = 1024;
    tensor.dtype = IDIST_F32;
    status = idist_clip_grad_norm(&tensor, 1, 1.0, false, &norm, NULL);
    eat(&norm, sizeof norm);
    printf("clip_grad_norm %s ", status == IDIST_OK ? "scales" : "refuses");
    tell("", "", IDIST__BASE);

    eat(x, sizeof x);
    tell("", "", IDIST__BASE);
}

int main(void) {
    static const idist_dtype narrow[] = {IDIST_F16, IDIST_BF16, IDIST_F8E4M3, IDIST_F8E5M2};
    static const idist_dtype reduced[] = {IDIST_F16, IDIST_BF16, IDIST_F32, IDIST_F64};
    static const idist_op ops[] = {IDIST_SUM, IDIST_PROD, IDIST_MIN, IDIST_MAX, IDIST_AVG};
    int isa, best = (int)idist__isa_best();
    size_t i, j;

    digest = UINT64_C(0xcbf29ce484222325);
    for (isa = 0; isa <= best; isa++) {
        idist__reduce_use((idist__isa)isa);
        for (i = 0; i < 4; i++) conversions(narrow[i], (idist__isa)isa);
        for (i = 0; i < 4; i++)
            for (j = 0; j < 5; j++) reductions(reduced[i], ops[j], (idist__isa)isa);
    }
    if (idist_initialize(NULL) != IDIST_OK) return 1;
    training(0x3f800000);
    training(0x7fc00000);
    training(0x7f800000);
    training(0xff800000u);
    return idist_finalize() == IDIST_OK ? 0 : 1;
}
