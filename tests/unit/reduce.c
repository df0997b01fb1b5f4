// reduce.c - compares the loops over elements with a plain reference, bit for bit, in every
// instruction set of this processor.
//
// idist__reduce_use replaces the detection of the instruction set. Results must have the same bits
// everywhere, including payloads of NaNs, signs of zeros, and subnormals. Most operands lie at
// random addresses, which are rarely aligned, with guard bytes around the result.
#define IDIST_IMPLEMENTATION
#define IDIST_NO_RING // compiles in half the time
#include "idist.h"

#include "grid.h"

#define MAX_N 9
#define MAX_COUNT 9001 // more than two pieces of any dtype

static const char *const isa_names[IDIST__ISA_COUNT] = {"base", "AVX2", "AVX-512"};

//------------------------------------------------------------------------------
// the reference: one element at a time, as bits of the dtype (F32 for floats of 16 and 8 bits)
//------------------------------------------------------------------------------

static bool is_narrow(idist_dtype d) {
    return dtype_is_float(d) && d != IDIST_F32 && d != IDIST_F64;
}

static uint32_t ref_widen(idist_dtype d, uint16_t h) {
    uint32_t sign = (uint32_t)h << (dtype_is_f8(d) ? 24 : 16) & 0x80000000;
    if (d == IDIST_F16 && (h & 0x7fff) > 0x7c00)
        return sign | 0x7fc00000 | (uint32_t)(h & 0x3ff) << 13;
    if (d == IDIST_F8E5M2 && (h & 0x7f) > 0x7c) return sign | 0x7fc00000 | (uint32_t)(h & 3) << 21;
    if (d == IDIST_F8E4M3 && (h & 0x7f) == 0x7f) return sign | 0x7ff00000;
    if (dtype_is_f8(d)) return f32_bits(f32_of_f8(d, (uint8_t)h));
    return f32_bits(d == IDIST_F16 ? f32_of_f16(h) : f32_of_bf16(h));
}

static uint16_t ref_narrow(idist_dtype d, uint32_t u) {
    if (d == IDIST_F16 && (u & 0x7fffffff) > 0x7f800000)
        return (uint16_t)((u >> 16 & 0x8000) | 0x7e00 | (u >> 13 & 0x3ff));
    if (dtype_is_f8(d)) return f8_of_f32(d, f32_of_bits(u));
    return d == IDIST_F16 ? f16_of_f32(f32_of_bits(u)) : bf16_of_f32(f32_of_bits(u));
}

static uint64_t load(idist_dtype d, const unsigned char *p) {
    size_t size = idist_dtype_size(d);
    uint64_t bits = tap_load_bits(p, size);
    if (dtype_is_signed(d) && bits >> (8 * size - 1)) bits |= ~(uint64_t)0 << (8 * size - 1);
    return is_narrow(d) ? ref_widen(d, (uint16_t)bits) : bits;
}

static void store(idist_dtype d, unsigned char *p, uint64_t bits) {
    tap_store_bits(p, is_narrow(d) ? ref_narrow(d, (uint32_t)bits) : bits, idist_dtype_size(d));
}

static double value_of(idist_dtype d, uint64_t bits) {
    double x;
    if (d != IDIST_F64) return (double)f32_of_bits((uint32_t)bits);
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint64_t quiet(idist_dtype d, uint64_t nan) {
    return nan | (d == IDIST_F64 ? (uint64_t)1 << 51 : (uint64_t)1 << 22);
}

// Returns x + y, x * y or x / y. Neither operand is NaN. The variables are volatile because a
// compiler folds inf - inf to a different NaN than the one the processor returns.
static uint64_t ref_arithmetic(char what, idist_dtype d, uint64_t x, uint64_t y) {
    volatile double a = value_of(d, x), b = value_of(d, y), c;
    volatile float fa = (float)a, fb = (float)b, fc;
    uint64_t bits;
    if (d != IDIST_F64)
        return fc = what == '+' ? fa + fb : what == '*' ? fa * fb : fa / fb, f32_bits(fc);
    c = what == '+' ? a + b : what == '*' ? a * b : a / b;
    a = c;
    double result = a;
    memcpy(&bits, &result, sizeof bits);
    return bits;
}

static uint64_t ref_float(idist_op op, idist_dtype d, uint64_t x, uint64_t y) {
    double a = value_of(d, x), b = value_of(d, y);
    if (op == IDIST_MIN) return a < b || a != a ? x : y;
    if (op == IDIST_MAX) return a > b || a != a ? x : y;
    if (a != a) return quiet(d, x);
    if (b != b) return quiet(d, y);
    return ref_arithmetic(op == IDIST_PROD ? '*' : '+', d, x, y);
}

static uint64_t ref_int(idist_op op, idist_dtype d, uint64_t x, uint64_t y) {
    bool less = dtype_is_signed(d) ? (int64_t)x < (int64_t)y : x < y;
    unsigned char wrapped[8];
    switch (op) {
    case IDIST_PROD: store(d, wrapped, x * y); return load(d, wrapped);
    case IDIST_MIN: return less ? x : y;
    case IDIST_MAX: return less ? y : x;
    case IDIST_BAND: return x & y;
    case IDIST_BOR: return x | y;
    case IDIST_BXOR: return x ^ y;
    case IDIST_LAND: return x && y;
    case IDIST_LOR: return x || y;
    case IDIST_LXOR: return !x != !y;
    default: store(d, wrapped, x + y); return load(d, wrapped);
    }
}

static uint64_t ref_divide(idist_dtype d, uint64_t x, int by) {
    double value = (double)by;
    uint64_t bits;
    if (!dtype_is_float(d))
        return dtype_is_signed(d) ? (uint64_t)((int64_t)x / by) : x / (uint64_t)by;
    if (value_of(d, x) != value_of(d, x)) return quiet(d, x);
    memcpy(&bits, &value, sizeof bits);
    return ref_arithmetic('/', d, x, d == IDIST_F64 ? bits : f32_bits((float)by));
}

// Reduces element i of all inputs into `want`.
static void ref_many(unsigned char *want, unsigned char *const *in, int n, size_t i, idist_dtype d,
                     idist_op op, int divide_by) {
    size_t at = i * idist_dtype_size(d);
    uint64_t x = load(d, in[0] + at);
    bool logical = op == IDIST_LAND || op == IDIST_LOR || op == IDIST_LXOR;
    if (n == 1 && !divide_by && !logical) {
        // The element is copied, so a signaling NaN stays signaling.
        memcpy(want, in[0] + at, idist_dtype_size(d));
        return;
    }
    if (n == 1 && logical) x = x != 0;
    for (int k = 1; k < n; k++) {
        uint64_t y = load(d, in[k] + at);
        x = dtype_is_float(d) ? ref_float(op, d, x, y) : ref_int(op, d, x, y);
    }
    store(d, want, divide_by ? ref_divide(d, x, divide_by) : x);
}

//------------------------------------------------------------------------------
// idist__reduce_many
//------------------------------------------------------------------------------

// Returns the bits of a test value. Half of the values are random bits. The other half are near
// special values: 0, 1, infinity, the NaNs and the largest number, each with both signs. Read as
// integers, the special values are small or extreme.
static uint64_t draw(idist_dtype d, uint64_t *state) {
    static const int exponent_bits[N_NUMBERS - IDIST_F16] = {5, 8, 8, 11, 4, 5};
    size_t bits = 8 * idist_dtype_size(d);
    uint64_t r = tap_rand(state), sign = (r >> 8 & 1) << (bits - 1), infinity = 0, one = 1;
    if (r & 1) return tap_rand(state);
    if (dtype_is_float(d)) {
        size_t e = (size_t)exponent_bits[d - IDIST_F16], mantissa = bits - 1 - e;
        infinity = (((uint64_t)1 << e) - 1) << mantissa;
        one = (((uint64_t)1 << (e - 1)) - 1) << mantissa;
    }
    switch (r >> 1 & 7) {
    case 0: return sign;
    case 1: return sign | (r >> 9 & 3); // subnormals
    case 2: return sign | one;
    case 3: return sign | (one + (r >> 9 & 7));
    case 4: return sign | infinity;
    case 5: return sign | (infinity + 1 + (r >> 9 & 1)); // signaling NaNs
    case 6: return sign | (infinity - 1);
    default: return ~(uint64_t)0 >> (r >> 9 & 1 ? 0 : 65 - bits) ^ sign; // quiet NaNs
    }
}

static unsigned char *memory[MAX_N + 1], *before[MAX_N + 1];

// Makes one call of idist__reduce_many and returns the number of wrong elements. The output is
// in[alias], or a separate buffer if alias is -1.
static int many_wrong(idist_dtype d, idist_op op, int n, size_t count, int alias, int divide_by,
                      uint64_t *state) {
    size_t size = idist_dtype_size(d), nbytes = count * size;
    unsigned char *in[MAX_N + 1], *copy[MAX_N], *out, want[8];
    int wrong = 0;
    for (int k = 0; k <= n; k++) {
        unsigned char *p = memory[k] + 64 + tap_rand(state) % 64;
        for (size_t i = 0; i < count; i++) {
            uint64_t bits = draw(d, state);
            tap_store_bits(p + i * size, bits, size);
        }
        memset(p - 32, 0xA5, 32);
        memset(p + nbytes, 0xA5, 32);
        in[k] = p;
        if (k < n) copy[k] = before[k], memcpy(copy[k], p, nbytes);
    }
    out = in[alias >= 0 ? alias : n];
    idist__reduce_many(out, (const void *const *)in, n, count, d, op, divide_by);
    for (size_t i = 0; i < count; i++) {
        ref_many(want, copy, n, i, d, op, divide_by);
        if (memcmp(want, out + i * size, size) == 0 || wrong++ > 2) continue;
        tap_diag("n %d count %zu alias %d divide_by %d element %zu: got %llx expected %llx from "
                 "%llx %llx",
                 n, count, alias, divide_by, i, (unsigned long long)load(d, out + i * size),
                 (unsigned long long)load(d, want), (unsigned long long)load(d, copy[0] + i * size),
                 (unsigned long long)load(d, copy[n - 1] + i * size));
    }
    for (int k = 0; k < n; k++) wrong += in[k] != out && memcmp(in[k], copy[k], nbytes) != 0;
    for (int k = 1; k <= 32; k++) wrong += out[-k] != 0xA5 || out[nbytes + (size_t)k - 1] != 0xA5;
    return wrong;
}

static void test_many(idist__isa isa, idist_dtype d, idist_op op) {
    static const size_t counts[] = {1023, 1025, 4099, MAX_COUNT};
    uint64_t state = tap_seed() + (uint64_t)d * 100 + (uint64_t)op;
    int wrong = 0;
    if (!idist__reduce_table[d][op]) return;
    tap_running("%s %s %s", isa_names[isa], idist_dtype_name(d), idist_op_name(op));
    for (int n = 1; n <= MAX_N; n++) {
        for (size_t count = 0; count <= 70; count += n <= 3 ? 1 : 3) {
            int alias = (int)(tap_rand(&state) % (unsigned)(n + 1)) - 1;
            wrong += many_wrong(d, op, n, count, alias, 0, &state);
            if (op == IDIST_AVG) wrong += many_wrong(d, op, n, count, alias, n, &state);
        }
        for (int alias = -1; alias < n; alias++)
            wrong += many_wrong(d, op, n, 40, alias, 0, &state);
        wrong += many_wrong(d, op, n, counts[n % 4], n / 2, op == IDIST_AVG ? n : 0, &state);
    }
    tap_is(wrong, 0, "%s: %s %s of 1 to %d inputs", isa_names[isa], idist_dtype_name(d),
           idist_op_name(op), MAX_N);
}

// Sums and averages 500 operands. In F16, an odd number above 2048 is rounded to an even one, so
// rounding each partial sum would change the result.
static void test_hundreds(idist__isa isa) {
    enum { N = 500 };
    uint16_t five = 0x4500, out = 0, want = f16_of_f32(2500.0f);
    float one = 1, sum = 0;
    const void *fives[N], *ones[N];
    for (int k = 0; k < N; k++) fives[k] = &five, ones[k] = &one;
    idist__reduce_many(&out, fives, N, 1, IDIST_F16, IDIST_SUM, 0);
    tap_is(out, want, "%s: 500 halves are rounded once", isa_names[isa]);
    idist__reduce_many(&out, fives, N, 1, IDIST_F16, IDIST_AVG, N);
    tap_is(out, five, "%s: the average of 500 halves is rounded after the division",
           isa_names[isa]);
    idist__reduce_many(&sum, ones, N, 1, IDIST_F32, IDIST_SUM, 0);
    tap_ok(sum == 500.0f, "%s: 500 floats, got %g", isa_names[isa], (double)sum);
}

//------------------------------------------------------------------------------
// conversions of floats of 16 and 8 bits
//------------------------------------------------------------------------------

static int narrow_wrong(idist_dtype d, const float *src, size_t count) {
    static unsigned char got[65536 * 2];
    size_t size = idist_dtype_size(d);
    int wrong = 0;
    idist__small_float_narrow(got, src, count, d);
    for (size_t i = 0; i < count; i++) {
        uint16_t h = (uint16_t)tap_load_bits(got + i * size, size),
                 want = ref_narrow(d, f32_bits(src[i]));
        if (h != want && wrong++ < 3)
            tap_diag("%08x: got %04x expected %04x", (unsigned)f32_bits(src[i]), (unsigned)h,
                     (unsigned)want);
    }
    return wrong;
}

static void test_conversions(idist__isa isa, idist_dtype d) {
    static unsigned char all[65536 * 2];
    static float wide[65536], near[65536];
    const char *name = idist_dtype_name(d);
    size_t size = idist_dtype_size(d), n = (size_t)1 << 8 * size;
    uint64_t state = tap_seed();
    int wrong = 0;
    for (size_t i = 0; i < n; i++) tap_store_bits(all + i * size, i, size);
    idist__small_float_widen(wide, all, n, d);
    for (size_t i = 0; i < n; i++) {
        if (f32_bits(wide[i]) != ref_widen(d, (uint16_t)i) && wrong++ < 3)
            tap_diag("%04x: got %08x expected %08x", (unsigned)i, (unsigned)f32_bits(wide[i]),
                     (unsigned)ref_widen(d, (uint16_t)i));
    }
    tap_is(wrong, 0, "%s: every %s widens", isa_names[isa], name);

    // Tries the floats next to every narrow float and next to every midpoint between two narrow
    // floats. Half a unit in the last place is a power of two when counted in units of F32. The
    // power is 2^12 for F16, 2^15 for BF16, and 2^19 or 2^20 for the 8-bit floats. For subnormal
    // numbers it is up to 2^23, which is counted downward from the smallest subnormal.
    wrong = 0;
    for (int shift = 12; shift <= 23; shift++) {
        for (int by = -1; by <= 1; by++) {
            for (size_t i = 0; i < n; i++)
                near[i] = f32_of_bits(f32_bits(wide[i]) + (1u << shift) + (uint32_t)by);
            wrong += narrow_wrong(d, near, n);
            for (size_t i = 0; i < n; i++)
                near[i] = f32_of_bits(f32_bits(wide[i]) - (1u << shift) + (uint32_t)by);
            wrong += narrow_wrong(d, near, n);
        }
    }
    wrong += narrow_wrong(d, wide, n);
    tap_is(wrong, 0, "%s: floats around every %s and every middle narrow", isa_names[isa], name);
    wrong = 0;
    for (int round = 0; round < 16; round++) {
        for (int i = 0; i < 65536; i++) near[i] = f32_of_bits((uint32_t)tap_rand(&state));
        wrong += narrow_wrong(d, near, 65536);
    }
    tap_is(wrong, 0, "%s: random floats narrow to %s", isa_names[isa], name);
    wrong = 0;
    for (size_t count = 0; count <= 40; count++) {
        unsigned char narrow[84];
        size_t some = n / 4; // number of elements
        memset(narrow, 0xA5, sizeof narrow);
        memset(near, 0xA5, 42 * sizeof *near);
        idist__small_float_widen(near, all + 1, count, d);
        idist__small_float_narrow(narrow + 1, wide + some, count, d);
        wrong += f32_bits(near[count]) != 0xA5A5A5A5 || narrow[size * count + 1] != 0xA5;
        if (count) {
            uint64_t last = tap_load_bits(all + 1 + (count - 1) * size, size);
            wrong += f32_bits(near[count - 1]) != ref_widen(d, (uint16_t)last);
        }
        wrong += memcmp(narrow + 1, all + some * size, size * count) != 0;
    }
    tap_is(wrong, 0, "%s: %s of 0 to 40 elements at odd addresses", isa_names[isa], name);
}

int main(void) {
    tap_deadline(100);
    idist__isa best = idist__isa_best();
    tap_is(idist__isa_used, best, "before main, %s was chosen", isa_names[best]);
    tap_ok(idist__reduce_table == idist__reduce_tables[best], "and its kernels");
    for (int k = 0; k <= MAX_N; k++) {
        memory[k] = (unsigned char *)malloc(MAX_COUNT * 8 + 192);
        before[k] = (unsigned char *)malloc(MAX_COUNT * 8);
        TAP_REQUIRE(memory[k] && before[k]);
    }
    for (int isa = 0; isa < IDIST__ISA_COUNT; isa++) {
        if ((idist__isa)isa > best) {
            tap_skip(isa_names[isa], "not on this processor");
            continue;
        }
        idist__reduce_use((idist__isa)isa);
        for (int d = 0; d < N_NUMBERS; d++)
            for (int op = 0; op < IDIST_MINLOC; op++)
                test_many((idist__isa)isa, (idist_dtype)d, (idist_op)op);
        test_hundreds((idist__isa)isa);
        for (int d = 0; d < N_NUMBERS; d++)
            if (is_narrow((idist_dtype)d)) test_conversions((idist__isa)isa, (idist_dtype)d);
    }
    for (int k = 0; k <= MAX_N; k++) free(memory[k]), free(before[k]);
    return tap_done();
}
