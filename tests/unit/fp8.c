// fp8.c - checks F8E4M3 and F8E5M2: all codes, millions of floats against a search over all codes,
// and conversions by another library (tests/data/fp8.txt). The loops of each instruction set and
// the sums are tested in tests/unit/reduce.c.
#define IDIST_IMPLEMENTATION
#define IDIST_NO_RING // compiles in half the time
#include "idist.h"

#include "grid.h"

static const idist_dtype formats[2] = {IDIST_F8E4M3, IDIST_F8E5M2};

static uint8_t narrow_bits(idist_dtype d, uint32_t bits) {
    float x = f32_of_bits(bits);
    uint8_t code;
    idist__small_float_narrow(&code, &x, 1, d);
    return code;
}

static uint32_t widen_bits(idist_dtype d, uint8_t code) {
    float x;
    idist__small_float_widen(&x, &code, 1, d);
    return f32_bits(x);
}

static bool is_nan(uint32_t bits) { return (bits & 0x7fffffff) > 0x7f800000; }

static void test_codes(idist_dtype d) {
    const char *name = idist_dtype_name(d);
    int wrong = 0, nans = 0, infinite = 0;
    for (int i = 0; i < 256; i++) {
        uint32_t bits = widen_bits(d, (uint8_t)i);
        uint8_t back = narrow_bits(d, bits);
        nans += is_nan(bits);
        if ((bits & 0x7fffffff) == 0x7f800000) {
            infinite++;
            wrong += back != (i & 0x80 ? 0xfb : 0x7b);
        } else if (is_nan(bits) ? back != 0x7f : back != i) {
            wrong++;
            tap_diag("%02x: %08x, and back %02x", (unsigned)i, (unsigned)bits, (unsigned)back);
        }
    }
    tap_is(wrong, 0, "%s: every code, widened and narrowed, is what it was", name);
    tap_is(nans, d == IDIST_F8E4M3 ? 2 : 6, "%s: NaNs", name);
    tap_is(infinite, d == IDIST_F8E4M3 ? 0 : 2, "%s: infinities", name);
}

// Checks known numbers. Their codes come from the standard.
static void test_known(void) {
    static const struct {
        float x;
        uint8_t e4m3, e5m2;
    } known[] = {{0.0f, 0x00, 0x00},     {-0.0f, 0x80, 0x80},     {1.0f, 0x38, 0x3c},
                 {-2.0f, 0xc0, 0xc0},    {448.0f, 0x7e, 0x5f},    {464.0f, 0x7e, 0x5f},
                 {465.0f, 0x7e, 0x5f},   {57344.0f, 0x7e, 0x7b},  {61440.0f, 0x7e, 0x7b},
                 {1e30f, 0x7e, 0x7b},    {-1e30f, 0xfe, 0xfb},    {0x1p-6f, 0x08, 0x24},
                 {0x1p-9f, 0x01, 0x18},  {0x1p-10f, 0x00, 0x14},  {0x1.8p-10f, 0x01, 0x16},
                 {0x1p-14f, 0x00, 0x04}, {-0x1p-16f, 0x80, 0x81}, {-0x1p-17f, 0x80, 0x80},
                 {1e-40f, 0x00, 0x00}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        tap_is(narrow_bits(IDIST_F8E4M3, f32_bits(known[i].x)), known[i].e4m3, "%g as F8E4M3",
               (double)known[i].x);
        tap_is(narrow_bits(IDIST_F8E5M2, f32_bits(known[i].x)), known[i].e5m2, "%g as F8E5M2",
               (double)known[i].x);
    }
    for (uint32_t sign = 0; sign <= 1; sign++) {
        tap_is(narrow_bits(IDIST_F8E4M3, sign << 31 | 0x7f800000), 0x7e | sign << 7,
               "an infinity as F8E4M3");
        tap_is(narrow_bits(IDIST_F8E5M2, sign << 31 | 0x7f800000), 0x7b | sign << 7,
               "an infinity as F8E5M2");
        tap_is(narrow_bits(IDIST_F8E4M3, sign << 31 | 0x7f800001), 0x7f, "a NaN as F8E4M3");
        tap_is(narrow_bits(IDIST_F8E5M2, sign << 31 | 0x7fc00000), 0x7f, "a NaN as F8E5M2");
    }
}

// Narrows floats with every upper half, combined with lower halves next to the rounding points.
// Then narrows floats over the whole range in steps.
static void test_sweep(idist_dtype d) {
    static const uint32_t lower[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
    int wrong = 0;
    tap_running("%s: sweep", idist_dtype_name(d));
    for (uint64_t i = 0; i < 6 * 65536 + ((uint64_t)1 << 32) / 2003; i++) {
        uint32_t bits = i < 6 * 65536 ? (uint32_t)(i / 6) << 16 | lower[i % 6]
                                      : (uint32_t)((i - 6 * 65536) * 2003);
        uint8_t got = narrow_bits(d, bits), want = f8_of_f32(d, f32_of_bits(bits));
        if (got != want && wrong++ < 3)
            tap_diag("%08x: got %02x expected %02x", (unsigned)bits, got, want);
    }
    tap_is(wrong, 0, "%s: floats over the whole range are rounded to the nearest, ties to even",
           idist_dtype_name(d));
}

static void test_vectors(void) {
    FILE *f = fopen("tests/data/fp8.txt", "r");
    char what[16], name[16], line[200];
    int parts = 0;
    TAP_REQUIRE(f && fgets(line, sizeof line, f) && line[0] == '#');
    while (fscanf(f, "%15s %15s", what, name) == 2) {
        bool widen = strcmp(what, "widen") == 0;
        idist_dtype d = formats[strcmp(name, idist_dtype_name(formats[0])) != 0];
        unsigned n = 256, bits, code;
        int wrong = 0;
        parts++;
        TAP_REQUIRE(strcmp(name, idist_dtype_name(d)) == 0 && (widen || fscanf(f, "%x", &n) == 1));
        for (unsigned i = 0; i < n; i++) {
            TAP_REQUIRE(fscanf(f, "%x", &bits) == 1 && (widen || fscanf(f, "%x", &code) == 1));
            if (widen)
                wrong += is_nan(bits) ? !is_nan(widen_bits(d, (uint8_t)i))
                                      : widen_bits(d, (uint8_t)i) != bits;
            else wrong += narrow_bits(d, bits) != code;
        }
        tap_is(wrong, 0, "%s %s: %u numbers of tests/data/fp8.txt", what, name, n);
    }
    tap_is(parts, 4, "all of the file was read");
    fclose(f);
}

// Checks sums. A sum that is infinite or too large becomes the largest number, and a NaN stays a
// NaN.
static void test_sums(idist_dtype d) {
    uint8_t most = d == IDIST_F8E4M3 ? 0x7e : 0x7b, nan = 0x7f;
    uint8_t in[4] = {most, (uint8_t)(most | 0x80), nan, 0x01},
            sum[4] = {most, (uint8_t)(most | 0x80), most, 0x01};
    tap_is(idist_reduce_local(in, sum, 4, d, IDIST_SUM), IDIST_OK, "%s: a sum",
           idist_dtype_name(d));
    tap_ok(sum[0] == most && sum[1] == (most | 0x80), "%s: the largest twice is the largest",
           idist_dtype_name(d));
    tap_ok(sum[2] == nan && sum[3] == 0x02, "%s: a NaN, and subnormals", idist_dtype_name(d));
    tap_is(idist_reduce_local(in, sum, 4, d, IDIST_BAND), IDIST_ERR_ARG, "%s: BAND is for integers",
           idist_dtype_name(d));
}

int main(void) {
    tap_deadline(100);
    test_known();
    for (int k = 0; k < 2; k++) {
        test_codes(formats[k]);
        test_sweep(formats[k]);
        test_sums(formats[k]);
    }
    test_vectors();
    return tap_done();
}
