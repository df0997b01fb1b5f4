// types.c - checks element types, operations and statuses: their names and sizes, and
// idist_reduce_local against a plain reference.
//
// The reference does not use the library's kernels. Integers are 64-bit words truncated to the
// width of the type. For floats of 16 and 8 bits the reference searches all values for the nearest
// one.
#include "idist.h"

#include "tap.h"

#include <math.h> // NAN, INFINITY; libm is not needed

#define N_VALUES 26 // number of interesting values per dtype; all pairs are tried

static bool is_float(int dtype) { return dtype >= IDIST_F16; }

static bool is_signed(int dtype) {
    return dtype == IDIST_I8 || dtype == IDIST_I16 || dtype == IDIST_I32 || dtype == IDIST_I64;
}

//------------------------------------------------------------------------------
// floats of 16 and 8 bits
//------------------------------------------------------------------------------

enum { N_NUMBERS = IDIST_F8E5M2 + 1 }; // dtypes that are plain numbers; the other dtypes are pairs

static const struct narrow_format {
    int bits, mantissa_bits, bias;
    int special;    // the first code that is not a finite number
    bool saturates; // a value that is too large becomes the largest finite number
} formats[N_NUMBERS] = {[IDIST_F16] = {16, 10, 15, 0x7c00, false},
                        [IDIST_BF16] = {16, 7, 127, 0x7f80, false},
                        [IDIST_F8E4M3] = {8, 3, 7, 0x7f, true},
                        [IDIST_F8E5M2] = {8, 2, 15, 0x7c, true}};

static bool is_narrow(int dtype) { return formats[dtype].bits != 0; }

static double power_of_two(int e) {
    double x = 1;
    for (; e > 0; e--) x *= 2;
    for (; e < 0; e++) x /= 2;
    return x;
}

static double narrow_decode(int dtype, int code) {
    const struct narrow_format *f = &formats[dtype];
    int top = 1 << (f->bits - 1), mantissa = code & ((1 << f->mantissa_bits) - 1),
        exponent = (code % top) >> f->mantissa_bits;
    double sign = code & top ? -1 : 1;
    if (code % top >= f->special) return mantissa ? (double)NAN : sign * (double)INFINITY;
    if (exponent == 0) return sign * mantissa * power_of_two(1 - f->bias - f->mantissa_bits);
    return sign * (mantissa + (1 << f->mantissa_bits)) *
           power_of_two(exponent - f->bias - f->mantissa_bits);
}

static double narrow_values[N_NUMBERS][65536];

static void narrow_fill_table(void) {
    for (int dtype = 0; dtype < N_NUMBERS; dtype++)
        for (int i = 0; is_narrow(dtype) && i < 1 << formats[dtype].bits; i++)
            narrow_values[dtype][i] = narrow_decode(dtype, i);
}

static double narrow_value(int dtype, int code) { return narrow_values[dtype][code]; }

// Returns the code of the number nearest to x. A tie goes to the even code. Positive numbers are in
// the same order as their codes.
static uint16_t narrow_nearest(int dtype, double x) {
    const struct narrow_format *f = &formats[dtype];
    int sign = x < 0 || (x == 0 && 1 / x < 0) ? 1 << (f->bits - 1) : 0;
    int below = 0, above = f->saturates ? f->special - 1 : f->special;
    double a = sign ? -x : x;
    if (x != x) return (uint16_t)(f->special | 1);
    if (f->saturates && a >= narrow_value(dtype, above)) return (uint16_t)(sign | above);
    while (above - below > 1) {
        int middle = (above + below) / 2;
        if (narrow_value(dtype, middle) <= a) below = middle;
        else above = middle;
    }
    // For rounding, infinity counts as the number that would follow the largest finite number.
    double low = narrow_value(dtype, below);
    double high =
        above == f->special ? 2 * low - narrow_value(dtype, below - 1) : narrow_value(dtype, above);
    if (a - low > high - a || (a - low >= high - a && (below & 1))) below = above;
    return (uint16_t)(sign | below);
}

//------------------------------------------------------------------------------
// the reference
//------------------------------------------------------------------------------

static uint64_t load_bits(const void *p, int dtype) {
    uint64_t bits = tap_load_bits(p, idist_dtype_size((idist_dtype)dtype));
    if (is_signed(dtype)) {
        int shift = 64 - 8 * (int)idist_dtype_size((idist_dtype)dtype);
        uint64_t top = (uint64_t)1 << (63 - shift);
        bits = (bits ^ top) - top;
    }
    return bits;
}

static double load_float(const void *p, int dtype) {
    float f;
    double d;
    if (dtype == IDIST_F32) return (void)memcpy(&f, p, sizeof f), (double)f;
    if (dtype == IDIST_F64) return (void)memcpy(&d, p, sizeof d), d;
    return narrow_value(dtype, (int)load_bits(p, dtype));
}

static void store_float(void *p, int dtype, double x) {
    float f = (float)x;
    uint16_t h;
    if (dtype == IDIST_F32) {
        memcpy(p, &f, sizeof f);
    } else if (dtype == IDIST_F64) {
        memcpy(p, &x, sizeof x);
    } else {
        h = narrow_nearest(dtype, x);
        tap_store_bits(p, h, (size_t)formats[dtype].bits / 8);
    }
}

static uint64_t reduce_bits(int op, bool with_sign, uint64_t a, uint64_t b) {
    bool less = with_sign ? (int64_t)a < (int64_t)b : a < b;
    switch (op) {
    case IDIST_SUM: return a + b;
    case IDIST_PROD: return a * b;
    case IDIST_MIN: return less ? a : b;
    case IDIST_MAX: return less ? b : a;
    case IDIST_BAND: return a & b;
    case IDIST_BOR: return a | b;
    case IDIST_BXOR: return a ^ b;
    case IDIST_LAND: return a && b;
    case IDIST_LXOR: return !a != !b;
    default: return a || b;
    }
}

static double reduce_float(int op, int dtype, double a, double b) {
    if (op == IDIST_MIN || op == IDIST_MAX) {
        if (a != a || b != b) return (double)NAN;
        return (op == IDIST_MIN) == (a < b) ? a : b;
    }
    if (dtype == IDIST_F64) return op == IDIST_SUM ? a + b : a * b;
    return op == IDIST_SUM ? (double)((float)a + (float)b) : (double)((float)a * (float)b);
}

static void reduce_reference(int op, int dtype, const void *a, const void *b, void *result) {
    if (is_float(dtype)) {
        store_float(result, dtype,
                    reduce_float(op, dtype, load_float(a, dtype), load_float(b, dtype)));
    } else {
        uint64_t bits = reduce_bits(op, is_signed(dtype), load_bits(a, dtype), load_bits(b, dtype));
        tap_store_bits(result, bits, idist_dtype_size((idist_dtype)dtype));
    }
}

// Compares two values. NaN equals NaN. For MIN and MAX the zeros equal each other, because these
// operations may return either zero.
static bool same_value(int op, int dtype, const void *got, const void *expected) {
    if (!is_float(dtype)) return memcmp(got, expected, idist_dtype_size((idist_dtype)dtype)) == 0;
    double x = load_float(got, dtype), y = load_float(expected, dtype);
    if (x != x || y != y) return x != x && y != y;
    if (op == IDIST_MIN || op == IDIST_MAX) return x <= y && x >= y;
    return memcmp(got, expected, idist_dtype_size((idist_dtype)dtype)) == 0;
}

//------------------------------------------------------------------------------
// the cases
//------------------------------------------------------------------------------

// clang-format off
static const double interesting_floats[N_VALUES] = {
    0.0, -0.0, 1.0, -1.0, 0.5, 3.0, -2.5, 65504.0, 65520.0, -7.0, 1e-7, 6e-8, 464.0, -1e-3,
    1e30, 3.4e38, -3.4e38, 1e-40, 1.0009765625, 2049, 0.1, -0.333333, 257.0, 1e-20,
    (double)INFINITY, (double)NAN};
static const uint64_t interesting_words[N_VALUES] = {
    0, 1, 2, 3, 7, 10, 15, 16, 100, 127, 128, 200, 255, 0x7fff, 0x8000, 0x8001, 0x7fffffff,
    0x80000000, 0x8000000000000000,
    0x7fffffffffffffff, 0xffffffffffffffff, 0xfffffffffffffffe, 0x5555555555555555,
    0x0123456789abcdef, 0xaa, 0x40};
// clang-format on

static void fill_interesting(int dtype, unsigned char *values) {
    size_t size = idist_dtype_size((idist_dtype)dtype);
    for (size_t i = 0; i < N_VALUES; i++) {
        if (is_float(dtype)) store_float(values + i * size, dtype, interesting_floats[i]);
        else tap_store_bits(values + i * size, interesting_words[i], size);
    }
}

// Reduces `count` elements that cover the pairs of interesting values. The address is aligned only
// to the size of an element. Returns the number of wrong elements.
static int count_wrong(int op, int dtype, size_t count, size_t shift) {
    size_t size = idist_dtype_size((idist_dtype)dtype);
    unsigned char values[N_VALUES * 8], want[8];
    unsigned char *in = (unsigned char *)calloc(count + 2, size),
                  *inout = (unsigned char *)calloc(count + 2, size);
    unsigned char *before = (unsigned char *)calloc(count + 2, size);
    int wrong = 0;
    TAP_REQUIRE(in && inout && before);
    fill_interesting(dtype, values);
    for (size_t i = 0; i < count + 2; i++) {
        memcpy(in + i * size, values + i % N_VALUES * size, size);
        memcpy(inout + i * size, values + i / N_VALUES % N_VALUES * size, size);
    }
    memcpy(before, inout, (count + 2) * size);
    if (idist_reduce_local(in + shift * size, inout + shift * size, count, (idist_dtype)dtype,
                           (idist_op)op))
        wrong++;
    for (size_t i = 0; i < count + 2; i++) {
        bool inside = i >= shift && i < shift + count;
        if (inside) reduce_reference(op, dtype, in + i * size, before + i * size, want);
        else memcpy(want, before + i * size, size);
        if (inside ? same_value(op, dtype, inout + i * size, want)
                   : memcmp(inout + i * size, want, size) == 0)
            continue;
        if (wrong++ < 3)
            tap_diag("%s %s element %zu: in %016llx inout %016llx got %016llx expected %016llx",
                     idist_op_name((idist_op)op), idist_dtype_name((idist_dtype)dtype), i,
                     (unsigned long long)load_bits(in + i * size, dtype),
                     (unsigned long long)load_bits(before + i * size, dtype),
                     (unsigned long long)load_bits(inout + i * size, dtype),
                     (unsigned long long)load_bits(want, dtype));
    }
    free(in);
    free(inout);
    free(before);
    return wrong;
}

static void test_pair(int op, int dtype) {
    const char *name = idist_op_name((idist_op)op), *type = idist_dtype_name((idist_dtype)dtype);
    bool fits = op != IDIST_AVG && (op < IDIST_BAND || !is_float(dtype));
    tap_running("idist_reduce_local %s %s", type, name);
    if (!fits) {
        uint64_t a[2] = {1, 2}, b[2] = {3, 4};
        tap_is(idist_reduce_local(a, b, 2, (idist_dtype)dtype, (idist_op)op), IDIST_ERR_ARG,
               "%s %s is refused", type, name);
        tap_ok(b[0] == 3 && b[1] == 4, "%s %s: nothing is written", type, name);
        return;
    }
    int wrong = count_wrong(op, dtype, (size_t)N_VALUES * N_VALUES, 0);
    for (size_t count = 0; count < 70; count++) wrong += count_wrong(op, dtype, count, count % 2);
    tap_is(wrong, 0, "%s %s agrees with the reference", type, name);
}

// Checks that adding 0 keeps every value. Infinities of a saturating dtype must become the largest
// number instead.
static void test_keeps_values(int dtype) {
    static unsigned char zero[65536 * 2], all[65536 * 2];
    size_t size = idist_dtype_size((idist_dtype)dtype), n = (size_t)1 << 8 * size;
    int wrong = 0;
    for (size_t i = 0; i < n; i++) tap_store_bits(all + i * size, i, size);
    tap_is(idist_reduce_local(zero, all, n, (idist_dtype)dtype, IDIST_SUM), IDIST_OK,
           "x + 0 for every %s", idist_dtype_name((idist_dtype)dtype));
    for (size_t i = 0; i < n; i++) {
        double before = narrow_value(dtype, (int)i), after = load_float(all + i * size, dtype);
        if (formats[dtype].saturates && before - before != 0)
            before = narrow_value(dtype, narrow_nearest(dtype, before));
        bool same = before != before ? after != after : before <= after && before >= after;
        if (!same && wrong++ < 3)
            tap_diag("%04x became %04x", (unsigned)i, (unsigned)load_bits(all + i * size, dtype));
    }
    tap_is(wrong, 0, "every %s keeps its value", idist_dtype_name((idist_dtype)dtype));
}

// Reduces random pairs, which test rounding and ties far from the hand-picked values.
static void test_narrow_random(int dtype, int op) {
    enum { COUNT = 100000 };
    static uint16_t in[COUNT], inout[COUNT], before[COUNT];
    size_t size = idist_dtype_size((idist_dtype)dtype), n = sizeof in / size;
    uint64_t state = tap_seed();
    int wrong = 0;
    for (int i = 0; i < COUNT; i++) {
        in[i] = (uint16_t)tap_rand(&state);
        before[i] = inout[i] = (uint16_t)tap_rand(&state);
    }
    idist_status status = idist_reduce_local(in, inout, n, (idist_dtype)dtype, (idist_op)op);
    for (size_t i = 0; i < n; i++) {
        const char *a = (const char *)in + i * size, *b = (const char *)before + i * size,
                   *got = (const char *)inout + i * size;
        uint16_t want = 0;
        reduce_reference(op, dtype, a, b, &want);
        if (same_value(op, dtype, got, &want)) continue;
        if (wrong++ < 3)
            tap_diag("%04x %04x: got %04x expected %04x", (unsigned)load_bits(a, dtype),
                     (unsigned)load_bits(b, dtype), (unsigned)load_bits(got, dtype), want);
    }
    tap_ok(status == IDIST_OK && wrong == 0, "%s %s of random pairs (%d wrong)",
           idist_dtype_name((idist_dtype)dtype), idist_op_name((idist_op)op), wrong);
}

static void test_dtypes(void) {
    static const struct {
        int dtype;
        size_t size;
        const char *name;
    } table[IDIST_DTYPE_COUNT] = {
        {IDIST_I8, 1, "I8"},
        {IDIST_U8, 1, "U8"},
        {IDIST_I16, 2, "I16"},
        {IDIST_U16, 2, "U16"},
        {IDIST_I32, 4, "I32"},
        {IDIST_U32, 4, "U32"},
        {IDIST_I64, 8, "I64"},
        {IDIST_U64, 8, "U64"},
        {IDIST_F16, 2, "F16"},
        {IDIST_BF16, 2, "BF16"},
        {IDIST_F32, 4, "F32"},
        {IDIST_F64, 8, "F64"},
        {IDIST_F8E4M3, 1, "F8E4M3"},
        {IDIST_F8E5M2, 1, "F8E5M2"},
        {IDIST_F32_I64, sizeof(idist_f32_i64), "F32_I64"},
        {IDIST_F64_I64, sizeof(idist_f64_i64), "F64_I64"},
        {IDIST_I32_I64, sizeof(idist_i32_i64), "I32_I64"},
        {IDIST_I64_I64, sizeof(idist_i64_i64), "I64_I64"},
    };
    for (int i = 0; i < IDIST_DTYPE_COUNT; i++) {
        tap_is(table[i].dtype, i, "%s has the value %d", table[i].name, i);
        tap_is(idist_dtype_size((idist_dtype)i), table[i].size, "size of %s", table[i].name);
        tap_ok(strcmp(idist_dtype_name((idist_dtype)i), table[i].name) == 0, "name of %s",
               table[i].name);
    }
    tap_is(idist_dtype_size(IDIST_DTYPE_COUNT), 0, "the size of no dtype is 0");
    tap_is(idist_dtype_size((idist_dtype)-1), 0, "the size of dtype -1 is 0");
    tap_ok(idist_dtype_name(IDIST_DTYPE_COUNT) != NULL, "no dtype has a name that is not NULL");
    tap_ok(idist_dtype_name((idist_dtype)-1) != NULL, "dtype -1 has a name that is not NULL");
}

static void test_ops(void) {
    static const char *const names[IDIST_OP_COUNT] = {"SUM",  "PROD",   "MIN",   "MAX",  "AVG",
                                                      "BAND", "BOR",    "BXOR",  "LAND", "LOR",
                                                      "LXOR", "MINLOC", "MAXLOC"};
    for (int i = 0; i < IDIST_OP_COUNT; i++)
        tap_ok(strcmp(idist_op_name((idist_op)i), names[i]) == 0, "name of %s", names[i]);
    tap_ok(idist_op_name(IDIST_OP_COUNT) != NULL, "no op has a name that is not NULL");
    tap_ok(idist_op_name(IDIST_OP_USER) != NULL && idist_op_name(IDIST_OP_LAST) != NULL,
           "user ops have names");
    tap_ok(idist_op_name((idist_op)-1) != NULL, "op -1 has a name that is not NULL");
}

static void test_statuses(void) {
    int n = 0;
#define CHECK_STATUS(name, value, text)                                                           \
    n++;                                                                                          \
    tap_is(IDIST_##name, value, "IDIST_" #name " has its value");                                 \
    tap_ok(strcmp(idist_status_name(IDIST_##name), "IDIST_" #name) == 0, "name of IDIST_" #name); \
    tap_ok(strcmp(idist_status_string(IDIST_##name), text) == 0, "sentence of IDIST_" #name);
    IDIST_STATUS_MAP(CHECK_STATUS)
#undef CHECK_STATUS
    tap_ok(n >= 24, "the list of statuses is whole");
    tap_ok(idist_status_name((idist_status)-999) != NULL &&
               idist_status_string((idist_status)-999) != NULL,
           "an unknown status has a name and a sentence");
    tap_ok(idist_status_name((idist_status)1) != NULL &&
               idist_status_string((idist_status)1) != NULL,
           "a positive status has a name and a sentence");
}

static void test_misuse(void) {
    float a[4] = {1, 2, 3, 4}, b[4] = {5, 6, 7, 8};
    tap_is(idist_reduce_local(NULL, NULL, 0, IDIST_F32, IDIST_SUM), IDIST_OK, "count 0 takes NULL");
    tap_is(idist_reduce_local(NULL, b, 4, IDIST_F32, IDIST_SUM), IDIST_ERR_ARG,
           "in == NULL is refused");
    tap_ok(idist_last_error()[0] != 0, "and idist_last_error says why: %s", idist_last_error());
    tap_is(idist_reduce_local(a, NULL, 4, IDIST_F32, IDIST_SUM), IDIST_ERR_ARG,
           "inout == NULL is refused");
    tap_is(idist_reduce_local(a, b, 4, IDIST_DTYPE_COUNT, IDIST_SUM), IDIST_ERR_ARG,
           "a dtype beyond the list is refused");
    tap_is(idist_reduce_local(a, b, 4, (idist_dtype)-1, IDIST_SUM), IDIST_ERR_ARG,
           "dtype -1 is refused");
    tap_is(idist_reduce_local(a, b, 4, IDIST_F32, IDIST_OP_COUNT), IDIST_ERR_ARG,
           "an op beyond the list is refused");
    tap_is(idist_reduce_local(a, b, 4, IDIST_F32, (idist_op)-1), IDIST_ERR_ARG, "op -1 is refused");
    tap_is(idist_reduce_local(a, b, 4, IDIST_F32, IDIST_OP_USER), IDIST_ERR_ARG,
           "a user op that nobody made is refused");
    tap_ok(b[0] == 5 && b[3] == 8, "none of them wrote anything");
}

static void test_inference(void) {
    bool flag = false;
    char c = 0;
    short s = 0;
    unsigned long ul = 0;
    long long ll = 0;
    double d = 0;
    const float f = 0;
    tap_is(IDIST_DTYPE(&flag), IDIST_U8, "IDIST_DTYPE of bool");
    tap_is(IDIST_DTYPE(&c), IDIST_I8, "IDIST_DTYPE of char");
    tap_is(IDIST_DTYPE(&s), IDIST_I16, "IDIST_DTYPE of short");
    tap_is(IDIST_DTYPE(&ul), sizeof ul == 8 ? IDIST_U64 : IDIST_U32,
           "IDIST_DTYPE of unsigned long");
    tap_is(IDIST_DTYPE(&ll), IDIST_I64, "IDIST_DTYPE of long long");
    tap_is(IDIST_DTYPE(&d), IDIST_F64, "IDIST_DTYPE of double");
    tap_is(IDIST_DTYPE(&f), IDIST_F32, "IDIST_DTYPE of const float");
}

// Checks MINLOC and MAXLOC with ties, NaNs, and operands in either order.
static void test_locations(void) {
    const float nan = (float)NAN;
    static const int64_t big = (int64_t)1 << 40;
    struct {
        idist_f32_i64 in, inout, least, most;
        const char *what;
    } cases[] = {
        {{1, 5}, {2, 3}, {1, 5}, {2, 3}, "in has the smaller value"},
        {{2, 3}, {1, 5}, {1, 5}, {2, 3}, "inout has the smaller value"},
        {{4, big}, {4, -1}, {4, -1}, {4, -1}, "of equal values the lower index wins"},
        {{4, -1}, {4, big}, {4, -1}, {4, -1}, "also in the other order"},
        {{-0.0f, 2}, {0.0f, 1}, {0.0f, 1}, {0.0f, 1}, "both zeros are equal"},
        {{nan, 7}, {1, 1}, {nan, 7}, {nan, 7}, "a NaN in `in` wins"},
        {{1, 1}, {nan, 7}, {nan, 7}, {nan, 7}, "a NaN in `inout` wins"},
        {{nan, 7}, {nan, 3}, {nan, 3}, {nan, 3}, "of two NaNs the lower index wins"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        idist_f32_i64 least = cases[i].inout, most = cases[i].inout;
        tap_is(idist_reduce_local(&cases[i].in, &least, 1, IDIST_F32_I64, IDIST_MINLOC), IDIST_OK,
               "MINLOC");
        tap_is(idist_reduce_local(&cases[i].in, &most, 1, IDIST_F32_I64, IDIST_MAXLOC), IDIST_OK,
               "MAXLOC");
        tap_ok(memcmp(&least.value, &cases[i].least.value, 4) == 0 &&
                   least.index == cases[i].least.index,
               "MINLOC: %s (%g, %lld)", cases[i].what, (double)least.value, (long long)least.index);
        tap_ok(memcmp(&most.value, &cases[i].most.value, 4) == 0 &&
                   most.index == cases[i].most.index,
               "MAXLOC: %s (%g, %lld)", cases[i].what, (double)most.value, (long long)most.index);
    }
    idist_i64_i64 a = {INT64_MIN, 1}, b = {INT64_MAX, 2};
    tap_ok(idist_reduce_local(&b, &a, 1, IDIST_I64_I64, IDIST_MAXLOC) == IDIST_OK &&
               a.value == INT64_MAX && a.index == 2,
           "MAXLOC of 64 bits is exact");
    tap_is(idist_reduce_local(&b, &a, 1, IDIST_I64_I64, IDIST_SUM), IDIST_ERR_ARG,
           "pairs have no sum: %s", idist_last_error());
    tap_is(idist_reduce_local(&b, &a, 1, IDIST_I64, IDIST_MAXLOC), IDIST_ERR_ARG,
           "MAXLOC takes pairs only: %s", idist_last_error());
    tap_is(IDIST_DTYPE(&a), IDIST_I64_I64, "IDIST_DTYPE of idist_i64_i64");
    tap_is(IDIST_DTYPE(&cases[0].in), IDIST_F32_I64, "IDIST_DTYPE of idist_f32_i64");
}

int main(void) {
    tap_deadline(60);
    narrow_fill_table();
    tap_ok(strcmp(idist_last_error(), "") == 0, "idist_last_error is empty before anything failed");
    test_dtypes();
    test_ops();
    test_statuses();
    test_inference();
    test_misuse();
    test_locations();
    for (int dtype = 0; dtype < N_NUMBERS; dtype++)
        for (int op = 0; op < IDIST_MINLOC; op++) test_pair(op, dtype);
    for (int dtype = 0; dtype < N_NUMBERS; dtype++) {
        if (!is_narrow(dtype)) continue;
        test_keeps_values(dtype);
        for (int op = IDIST_SUM; op <= IDIST_MAX; op++) test_narrow_random(dtype, op);
    }
    return tap_done();
}
