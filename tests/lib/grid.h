// grid.h - the test grid: ranks x algorithm x transport x count x dtype x op x in place x root x
// alignment x memory
//
// A test provides one function that makes one call and checks it. grid_run calls the function for
// every combination. It opens one world per (ranks, algorithm, transport) and prints one TAP line
// for each world. All other parameters vary inside the world. Small counts are combined with all
// dtypes, and large counts with few dtypes. Some counts are close to the sizes at which the library
// changes its algorithm.
//
// The op, the root, the alignment, blocking or not, and the memory are not enumerated. They come
// from a hash of the case's number, which is the same on all ranks. In some cases, however, each
// rank decides by itself whether a buffer comes from idist_alloc.
//
// Values come from two families. Both are computed from (rank, index), so that every element can be
// checked:
//     pattern_*   random bits, for operations that only move data
//     reduced_*   for all other operations: values whose reduction is exact in the dtype (integers
//                 modulo 2^bits, small whole floats); floats of 8 bits are rounded once
#ifndef GRID_H
#define GRID_H

#include "ranks.h"

//------------------------------------------------------------------------------
// buffers between guards
//------------------------------------------------------------------------------

#define GUARD_NBYTES 64

typedef struct guarded_buffer {
    unsigned char *base; // GUARD_NBYTES of guard, then nbytes of buffer, then GUARD_NBYTES of guard
    unsigned char *p;
    size_t nbytes;
    bool shared; // the buffer comes from idist_alloc
} guarded_buffer;

// Where this thread's next buffers come from. If the lowest bit of `which` is set, the next buffer
// comes from idist_alloc.
typedef struct guarded_source {
    idist_group *world;
    uint64_t which;
} guarded_source;

static inline guarded_source *guarded__source(void) {
    static __thread guarded_source source;
    return &source;
}

static inline guarded_buffer guarded_buffer_make(size_t nbytes, size_t misalign) {
    guarded_source *source = guarded__source();
    idist_opts o = {source->world, NULL, NULL, 0, NULL};
    guarded_buffer b;
    b.shared = source->which & 1;
    source->which >>= 1;
    if (b.shared) b.base = (unsigned char *)idist_alloc(nbytes + 2 * GUARD_NBYTES + 16, &o);
    else b.base = (unsigned char *)malloc(nbytes + 2 * GUARD_NBYTES + 16);
    TAP_REQUIRE(b.base != NULL);
    b.nbytes = nbytes;
    b.p = b.base + GUARD_NBYTES + misalign;
    memset(b.base, 0xA5, GUARD_NBYTES + misalign);
    memset(b.p, 0x5A, nbytes);
    memset(b.p + nbytes, 0xA5, GUARD_NBYTES);
    return b;
}

static inline void guarded_buffer_free(guarded_buffer *b) {
    if (b->shared) idist_free(b->base);
    else free(b->base);
    b->base = NULL;
}

static inline bool guarded_buffer_guards_hold(const guarded_buffer *b) {
    for (const unsigned char *c = b->base; c < b->p; c++)
        if (*c != 0xA5) return false;
    for (size_t i = 0; i < GUARD_NBYTES; i++)
        if (b->p[b->nbytes + i] != 0xA5) return false;
    return true;
}

// Returns true if nothing was ever written to the buffer or its guards.
static inline bool guarded_buffer_untouched(const guarded_buffer *b) {
    for (size_t i = 0; i < b->nbytes; i++)
        if (b->p[i] != 0x5A) return false;
    return guarded_buffer_guards_hold(b);
}

//------------------------------------------------------------------------------
// random bits for operations that move data
//------------------------------------------------------------------------------

// Number of elements after which values repeat. The period is not a multiple of any number by which
// the library divides. After the first period, a large buffer is filled and compared as a whole.
#define PAT_PERIOD ((size_t)16381)

// Number of dtypes that are plain numbers. The other dtypes are pairs.
enum { N_NUMBERS = IDIST_F8E5M2 + 1 };
enum { ELEMENT_MAX = 5000 }; // size in bytes of the largest element that the grid moves

static inline uint64_t pattern_bits(int rank, size_t index, uint64_t salt) {
    index %= PAT_PERIOD;
    uint64_t x = ((uint64_t)index + 1) * 0x9E3779B97F4A7C15u +
                 (uint64_t)(rank + 1) * 0xC2B2AE3D27D4EB4Fu + salt;
    x = (x ^ (x >> 29)) * 0xBF58476D1CE4E5B9u;
    return x ^ (x >> 32);
}

static inline size_t pattern__least(size_t count) {
    return count < PAT_PERIOD ? count : PAT_PERIOD;
}

// Writes one element of any size.
static inline void pattern_element(void *at, size_t esize, int rank, size_t index, uint64_t salt) {
    uint64_t bits = pattern_bits(rank, index, salt);
    unsigned char *p = (unsigned char *)at;
    memcpy(p, &bits, esize < 8 ? esize : 8);
    for (size_t j = 8; j < esize; j++) p[j] = (unsigned char)(p[j - 8] + j);
}

static inline void pattern__repeat(unsigned char *p, size_t count, size_t esize) {
    for (size_t have = PAT_PERIOD; have < count; have *= 2)
        memcpy(p + have * esize, p, (count - have < have ? count - have : have) * esize);
}

// Returns the index of the first element that differs from the element one period before it, or
// count if there is none.
static inline size_t pattern__find_break(const unsigned char *p, size_t count, size_t esize) {
    size_t i = pattern__least(count), lag = PAT_PERIOD * esize;
    if (i == count || memcmp(p + lag, p, (count - i) * esize) == 0) return count;
    while (i < count && memcmp(p + i * esize, p + i * esize - lag, esize) == 0) i++;
    return i;
}

static inline void pattern_fill(void *buf, size_t first, size_t count, size_t esize, int rank,
                                uint64_t salt) {
    unsigned char *p = (unsigned char *)buf;
    for (size_t i = 0; i < pattern__least(count); i++)
        pattern_element(p + i * esize, esize, rank, first + i, salt);
    pattern__repeat(p, count, esize);
}

// Returns the index of the first element of buf that is not element first + i of `rank`, or count
// if all elements are right.
static inline size_t pattern_find_wrong(const void *buf, size_t first, size_t count, size_t esize,
                                        int rank, uint64_t salt) {
    const unsigned char *p = (const unsigned char *)buf;
    unsigned char want[ELEMENT_MAX];
    for (size_t i = 0; i < pattern__least(count); i++) {
        pattern_element(want, esize, rank, first + i, salt);
        if (memcmp(p + i * esize, want, esize) != 0) return i;
    }
    return pattern__find_break(p, count, esize);
}

//------------------------------------------------------------------------------
// floats of 16 and 8 bits, converted in the slow and obvious way
//------------------------------------------------------------------------------

static inline uint32_t f32_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static inline float f32_of_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static inline uint16_t bf16_of_f32(float x) {
    uint32_t u = f32_bits(x);
    if (x != x) return (uint16_t)((u >> 16) | 0x40);
    u += 0x7FFF + ((u >> 16) & 1); // rounds to nearest, ties to even
    return (uint16_t)(u >> 16);
}

static inline float f32_of_bf16(uint16_t h) { return f32_of_bits((uint32_t)h << 16); }

static inline uint16_t f16_of_f32(float x) {
    uint32_t u = f32_bits(x), sign = (u >> 16) & 0x8000, mag = u & 0x7FFFFFFF;
    if (mag > 0x7F800000) return (uint16_t)(sign | 0x7E00);
    if (mag >= 0x477FF000) return (uint16_t)(sign | 0x7C00); // 65520 and more round to infinity
    int exponent = (int)(mag >> 23) - 127;
    uint32_t full = (mag & 0x7FFFFF) | 0x800000;
    int shift = exponent < -14 ? 13 + (-14 - exponent) : 13;
    if (exponent < -25) return (uint16_t)sign;
    uint32_t h = full >> shift, rest = full & ((1u << shift) - 1), half = 1u << (shift - 1);
    if (rest > half || (rest == half && (h & 1))) h++;
    if (exponent >= -14)
        h += (uint32_t)(exponent + 14) << 10; // the implicit bit adds one to the exponent field
    return (uint16_t)(sign | h);
}

static inline float f32_of_f16(uint16_t h) {
    uint32_t exponent = (h >> 10) & 31, fraction = h & 1023;
    float value;
    if (exponent == 31) value = fraction ? f32_of_bits(0x7FC00000) : f32_of_bits(0x7F800000);
    else if (exponent == 0) value = (float)fraction / 16777216.0f; // 2^-24
    else value = f32_of_bits(((exponent + 112) << 23) | (fraction << 13));
    return h & 0x8000 ? -value : value;
}

// Returns the value of an 8-bit float. E4M3 codes below 7f are finite. E5M2 codes below 7c are
// finite, and 7c is infinity.
static inline float f32_of_f8(idist_dtype d, uint8_t h) {
    int fraction_bits = d == IDIST_F8E4M3 ? 3 : 2, bias = d == IDIST_F8E4M3 ? 7 : 15,
        code = h & 0x7F;
    int exponent = code >> fraction_bits, fraction = code & ((1 << fraction_bits) - 1);
    float value = (float)(exponent ? fraction + (1 << fraction_bits) : fraction);
    value *= f32_of_bits((uint32_t)((exponent ? exponent : 1) - bias - fraction_bits + 127) << 23);
    if (d == IDIST_F8E4M3 ? code == 0x7F : code > 0x7C) value = f32_of_bits(0x7FC00000);
    if (d == IDIST_F8E5M2 && code == 0x7C) value = f32_of_bits(0x7F800000);
    return h & 0x80 ? -value : value;
}

// Returns the code of the nearest finite number, or the even code of two equally near ones.
// Searches the codes, which have the same order as the numbers.
static inline uint8_t f8_of_f32(idist_dtype d, float x) {
    uint8_t sign = f32_bits(x) >> 31 ? 0x80 : 0, low = 0, high = d == IDIST_F8E4M3 ? 0x7E : 0x7B;
    double a = sign ? -(double)x : (double)x;
    if (x != x) return 0x7F;
    if (a >= (double)f32_of_f8(d, high)) return sign | high;
    while (high - low > 1) {
        uint8_t middle = (uint8_t)((low + high) / 2);
        if ((double)f32_of_f8(d, middle) <= a) low = middle;
        else high = middle;
    }
    double down = a - (double)f32_of_f8(d, low), up = (double)f32_of_f8(d, high) - a;
    return sign | (down < up || (down <= up && low % 2 == 0) ? low : high);
}

static inline bool dtype_is_f8(idist_dtype d) { return d == IDIST_F8E4M3 || d == IDIST_F8E5M2; }

static inline bool dtype_is_float(idist_dtype d) {
    return d == IDIST_F16 || d == IDIST_BF16 || d == IDIST_F32 || d == IDIST_F64 || dtype_is_f8(d);
}

static inline bool dtype_is_signed(idist_dtype d) {
    return d == IDIST_I8 || d == IDIST_I16 || d == IDIST_I32 || d == IDIST_I64;
}

static inline void store_double(void *at, idist_dtype dtype, double value) {
    float f = (float)value;
    uint16_t h;
    switch (dtype) {
    case IDIST_F64: memcpy(at, &value, 8); break;
    case IDIST_F32: memcpy(at, &f, 4); break;
    case IDIST_F8E4M3:
    case IDIST_F8E5M2: *(uint8_t *)at = f8_of_f32(dtype, f); break;
    case IDIST_F16:
        h = f16_of_f32(f);
        memcpy(at, &h, 2);
        break;
    default:
        h = bf16_of_f32(f);
        memcpy(at, &h, 2);
        break;
    }
}

static inline double load_double(const void *at, idist_dtype dtype) {
    double value;
    float f;
    uint16_t h;
    switch (dtype) {
    case IDIST_F64: memcpy(&value, at, 8); return value;
    case IDIST_F32: memcpy(&f, at, 4); return (double)f;
    case IDIST_F8E4M3:
    case IDIST_F8E5M2: return (double)f32_of_f8(dtype, *(const uint8_t *)at);
    case IDIST_F16: memcpy(&h, at, 2); return (double)f32_of_f16(h);
    default: memcpy(&h, at, 2); return (double)f32_of_bf16(h);
    }
}

//------------------------------------------------------------------------------
// values for reductions, and the serial reference
//------------------------------------------------------------------------------

// Returns the value that a rank contributes. AVG divides by n, so its values are multiples of n and
// the averages are whole numbers. NCCL rounds at every step, so its values must not need rounding
// at any step.
static inline double reduced_float(idist_dtype dtype, idist_op op, int n, int rank, size_t index,
                                   uint64_t salt) {
    static const double powers[4] = {1.0, -1.0, 2.0, 0.5};
    static int on_nccl = -1; // the same for all threads
    uint64_t h = pattern_bits(rank, index, salt) >> 8;
    if (__atomic_load_n(&on_nccl, __ATOMIC_RELAXED) < 0)
        __atomic_store_n(&on_nccl, getenv("IDIST_TEST_NCCL") != NULL, __ATOMIC_RELAXED);
    if (dtype_is_f8(dtype) && __atomic_load_n(&on_nccl, __ATOMIC_RELAXED) &&
        (op == IDIST_SUM || op == IDIST_AVG))
        return (double)(((int)(h % 3) - 1) * (op == IDIST_AVG ? n : 1));
    if (op == IDIST_PROD) return powers[h & 3];
    if (op == IDIST_MIN || op == IDIST_MAX) return (double)(int)(h % 401) - 200;
    // F8E5M2 has three significant bits. They can represent 7 and 14, but not 9 and 18. So for more
    // than 8 ranks, all ranks contribute the same value.
    if (op == IDIST_AVG && dtype == IDIST_F8E5M2 && n > 8)
        return (double)((int)((pattern_bits(0, index, salt) >> 8) % 5) - 2);
    if (op == IDIST_AVG) return (double)(((int)(h % 5) - 2) * n);
    return (double)((int)(h % 17) - 8);
}

static inline uint64_t reduced_integer(idist_dtype dtype, idist_op op, int rank, size_t index,
                                       uint64_t salt) {
    uint64_t h = pattern_bits(rank, index, salt);
    if (op == IDIST_AVG)
        return dtype_is_signed(dtype) ? (uint64_t)((int64_t)(h % 21) - 10) : h % 21;
    if ((op == IDIST_LAND || op == IDIST_LOR || op == IDIST_LXOR) && (h >> 60) < 8) return 0;
    return h;
}

static inline uint64_t reduced_widen(idist_dtype dtype, uint64_t bits) {
    unsigned unused = 64 - 8 * (unsigned)idist_dtype_size(dtype);
    if (unused == 0) return bits;
    if (dtype_is_signed(dtype)) return (uint64_t)((int64_t)(bits << unused) >> unused);
    return (bits << unused) >> unused;
}

static inline uint64_t reduced_combine(idist_dtype dtype, idist_op op, uint64_t a, uint64_t b) {
    bool less = dtype_is_signed(dtype) ? (int64_t)a < (int64_t)b : a < b;
    switch (op) {
    case IDIST_PROD: return a * b;
    case IDIST_MIN: return less ? a : b;
    case IDIST_MAX: return less ? b : a;
    case IDIST_BAND: return a & b;
    case IDIST_BOR: return a | b;
    case IDIST_BXOR: return a ^ b;
    case IDIST_LAND: return a != 0 && b != 0;
    case IDIST_LOR: return a != 0 || b != 0;
    case IDIST_LXOR: return (a != 0) != (b != 0);
    default: return a + b;
    }
}

static inline double reduced_combine_float(idist_op op, double a, double b) {
    if (op == IDIST_PROD) return a * b;
    if (op == IDIST_MIN) return a < b ? a : b;
    if (op == IDIST_MAX) return a > b ? a : b;
    return a + b;
}

static inline bool dtype_is_pair(idist_dtype d) {
    return d > IDIST_F8E5M2 && d < IDIST_DTYPE_COUNT;
}

// Computes what a rank contributes to MINLOC and MAXLOC. Uses only a few values, so that many are
// equal.
static inline void reduced_pair(idist_dtype dtype, int rank, size_t index, uint64_t salt,
                                double *value, int64_t *at) {
    uint64_t h = pattern_bits(rank, index, salt) >> 8;
    bool is_float = dtype == IDIST_F32_I64 || dtype == IDIST_F64_I64;
    *value = (double)((int)(h % 5) - 2);
    if (is_float && (h >> 8) % 11 == 0) *value = (double)f32_of_bits(0x7FC00000);
    *at = (int64_t)((h >> 16) % 1000) - 500;
}

static inline void reduced_store_pair(void *out, idist_dtype dtype, double value, int64_t at) {
    idist_f32_i64 f = {(float)value, at};
    idist_f64_i64 d = {value, at};
    idist_i32_i64 i = {value == value ? (int32_t)value : 0, at};
    idist_i64_i64 l = {value == value ? (int64_t)value : 0, at};
    memset(out, 0, idist_dtype_size(dtype)); // clears the padding
    switch (dtype) {
    case IDIST_F32_I64:
        memcpy(out, &f.value, sizeof f.value);
        memcpy((char *)out + offsetof(idist_f32_i64, index), &at, sizeof at);
        break;
    case IDIST_F64_I64: memcpy(out, &d, sizeof d); break;
    case IDIST_I32_I64:
        memcpy(out, &i.value, sizeof i.value);
        memcpy((char *)out + offsetof(idist_i32_i64, index), &at, sizeof at);
        break;
    default: memcpy(out, &l, sizeof l); break;
    }
}

static inline void reduced_expected_pair(void *out, idist_dtype dtype, idist_op op, int lo, int hi,
                                         size_t index, uint64_t salt) {
    double best, value;
    int64_t best_at, at;
    reduced_pair(dtype, lo, index, salt, &best, &best_at);
    for (int k = lo + 1; k < hi; k++) {
        reduced_pair(dtype, k, index, salt, &value, &at);
        bool nan = value != value, best_is_nan = best != best;
        bool equal = nan == best_is_nan && (nan || (value <= best && value >= best));
        bool better =
            nan ? !best_is_nan : !best_is_nan && (op == IDIST_MINLOC ? value < best : value > best);
        if (better || (equal && at < best_at)) {
            best = value;
            best_at = at;
        }
    }
    reduced_store_pair(out, dtype, best, best_at);
}

// Reduces elements of a user-defined dtype with a user-defined op. Adds the bytes at even offsets,
// and keeps the larger byte at odd offsets. The result is wrong if the library passes part of an
// element, or splits elements at the wrong place.
static inline void reduced_user_fn(const void *in, void *inout, size_t count, idist_dtype dtype,
                                   void *arg) {
    const unsigned char *a = (const unsigned char *)in;
    unsigned char *b = (unsigned char *)inout;
    size_t esize = idist_dtype_size(dtype);
    (void)arg;
    for (size_t i = 0; i < count; i++, a += esize, b += esize)
        for (size_t j = 0; j < esize; j++) {
            if (j % 2 == 0) b[j] = (unsigned char)(a[j] + b[j]);
            else if (a[j] > b[j]) b[j] = a[j];
        }
}

static inline void reduced_expected_user(void *out, idist_dtype dtype, int lo, int hi, size_t index,
                                         uint64_t salt) {
    unsigned char more[ELEMENT_MAX];
    size_t esize = idist_dtype_size(dtype);
    pattern_element(out, esize, lo, index, salt);
    for (int k = lo + 1; k < hi; k++) {
        pattern_element(more, esize, k, index, salt);
        reduced_user_fn(more, out, 1, dtype, NULL);
    }
}

static inline void reduced_fill(void *buf, idist_dtype dtype, idist_op op, int n, size_t first,
                                size_t count, int rank, uint64_t salt) {
    unsigned char *p = (unsigned char *)buf;
    size_t esize = idist_dtype_size(dtype);
    for (size_t i = 0; i < pattern__least(count); i++) {
        if (dtype_is_pair(dtype)) {
            double value;
            int64_t at;
            reduced_pair(dtype, rank, first + i, salt, &value, &at);
            reduced_store_pair(p + i * esize, dtype, value, at);
        } else if (dtype >= IDIST_DTYPE_USER) {
            pattern_element(p + i * esize, esize, rank, first + i, salt);
        } else if (dtype_is_float(dtype)) {
            store_double(p + i * esize, dtype, reduced_float(dtype, op, n, rank, first + i, salt));
        } else {
            uint64_t v = reduced_integer(dtype, op, rank, first + i, salt);
            tap_store_bits(p + i * esize, v, esize);
        }
    }
    pattern__repeat(p, count, esize);
}

// Writes one element of the reduction over ranks lo .. hi-1 to out.
static inline void reduced_expected(void *out, idist_dtype dtype, idist_op op, int n, int lo,
                                    int hi, size_t index, uint64_t salt) {
    if (dtype_is_pair(dtype)) {
        reduced_expected_pair(out, dtype, op, lo, hi, index, salt);
        return;
    }
    if (dtype >= IDIST_DTYPE_USER) {
        reduced_expected_user(out, dtype, lo, hi, index, salt);
        return;
    }
    if (dtype_is_float(dtype)) {
        double acc = reduced_float(dtype, op, n, lo, index, salt);
        for (int k = lo + 1; k < hi; k++)
            acc = reduced_combine_float(op, acc, reduced_float(dtype, op, n, k, index, salt));
        store_double(out, dtype, op == IDIST_AVG ? acc / n : acc);
        return;
    }
    uint64_t acc = reduced_widen(dtype, reduced_integer(dtype, op, lo, index, salt));
    if (hi - lo == 1 && (op == IDIST_LAND || op == IDIST_LOR || op == IDIST_LXOR)) acc = acc != 0;
    for (int k = lo + 1; k < hi; k++)
        acc = reduced_widen(dtype,
                            reduced_combine(dtype, op, acc,
                                            reduced_widen(dtype, reduced_integer(dtype, op, k,
                                                                                 index, salt))));
    if (op == IDIST_AVG)
        acc = dtype_is_signed(dtype) ? (uint64_t)((int64_t)acc / n) : acc / (uint64_t)n;
    tap_store_bits(out, acc, idist_dtype_size(dtype));
}

static inline size_t reduced_find_wrong(const void *buf, idist_dtype dtype, idist_op op, int n,
                                        int lo, int hi, size_t first, size_t count, uint64_t salt) {
    const unsigned char *p = (const unsigned char *)buf;
    size_t esize = idist_dtype_size(dtype);
    unsigned char want[ELEMENT_MAX] = {0};
    for (size_t i = 0; i < pattern__least(count); i++) {
        reduced_expected(want, dtype, op, n, lo, hi, first + i, salt);
        if (memcmp(p + i * esize, want, esize) != 0) return i;
    }
    return pattern__find_break(p, count, esize);
}

static inline bool op_allowed(idist_op op, idist_dtype dtype) {
    bool is_loc = op == IDIST_MINLOC || op == IDIST_MAXLOC;
    if (dtype_is_pair(dtype) || is_loc) return dtype_is_pair(dtype) && is_loc;
    return !dtype_is_float(dtype) || op <= IDIST_AVG;
}

//------------------------------------------------------------------------------
// the grid
//------------------------------------------------------------------------------

typedef struct grid_case {
    idist_group *world;
    int n, rank, root;
    size_t count;
    idist_dtype dtype;
    idist_op op;
    idist_op user_op; // op for user-defined dtypes
    bool in_place;
    bool async;
    idist_plan *plan; // keeps the call, and grid_done starts it; NULL if there is no plan
    size_t misalign;  // offset of the buffers, 0 or 1 byte
    int memory;       // index into grid_memory_names
    uint64_t salt;
    idist_opts opts; // pass its address to the call, then call grid_done
    idist_request request;
    bool broken; // set after a failed call, which makes the rest of this world pointless
    const char *where;
} grid_case;

typedef void (*grid_fn)(grid_case *c);

enum {
    GRID_REDUCES = 1, // op varies
    GRID_NO_AVG = 2,  // ... but is never AVG
    GRID_ROOTED = 4,  // root varies
    GRID_WIDE = 8,    // buffers hold n * count elements, so large counts are divided by n
    GRID_NO_IN_PLACE = 16,
    GRID_BLOCKING = 32,
    GRID_ONE_WAY = 64 // messages go one way only, whatever algorithm is requested
};

typedef struct grid_plan {
    grid_fn fn;
    unsigned flags;
    char where[120];
    bool large;
    unsigned thin; // IDIST_TEST_THIN: runs one of `thin` cases, the same cases on all ranks
} grid_plan;

static const char *const grid_memory_names[3] = {"", " shared", " partly shared"};

static inline void grid_describe(const grid_case *c, char *text, size_t capacity) {
    snprintf(text, capacity, "%s rank %d count %zu %s %s root %d%s%s%s%s salt %llx", c->where,
             c->rank, c->count, idist_dtype_name(c->dtype), idist_op_name(c->op), c->root,
             c->in_place ? " in place" : "",
             c->async  ? " async"
             : c->plan ? " plan"
                       : "",
             c->misalign ? " unaligned" : "", grid_memory_names[c->memory],
             (unsigned long long)c->salt);
}

static inline void grid_fail(const grid_case *c, const char *fmt, ...) TAP_PRINTF(2, 3);
static inline void grid_fail(const grid_case *c, const char *fmt, ...) {
    char head[260], text[300];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    grid_describe(c, head, sizeof head);
    rank_fail("%s: %s", head, text);
}

// Completes the call that returned `status`. If the call failed, reports the failure and returns
// false. There is then nothing to check.
static inline bool grid_done(grid_case *c, idist_status status) {
    if (status == IDIST_OK && c->plan)
        status = idist_plan_start(c->plan, c->async ? &c->request : NULL);
    if (status == IDIST_OK && c->async) status = idist_wait(&c->request);
    if (status == IDIST_OK) return true;
    grid_fail(c, "got %s expected IDIST_OK; last error: %s", idist_status_name(status),
              idist_last_error());
    c->broken = true;
    return false;
}

static inline void grid_hex(const void *at, size_t nbytes, char *text) {
    const unsigned char *p = (const unsigned char *)at;
    for (size_t i = 0; i < nbytes && i < 16; i++)
        snprintf(text + 2 * i, 3, "%02x", p[nbytes - 1 - i]);
}

// Checks that buf[0 .. count) holds the elements from `first` on of the pattern of `rank`.
static inline void grid_check_pattern(const grid_case *c, const void *buf, size_t first,
                                      size_t count, int rank) {
    size_t esize = idist_dtype_size(c->dtype);
    size_t i = pattern_find_wrong(buf, first, count, esize, rank, c->salt);
    if (i == count) return;
    char got[40] = "", want[40] = "";
    unsigned char element[ELEMENT_MAX];
    pattern_element(element, esize, rank, first + i, c->salt);
    grid_hex((const unsigned char *)buf + i * esize, esize, got);
    grid_hex(element, esize, want);
    grid_fail(c, "element %zu of %zu from rank %d: got 0x%s expected 0x%s", i, count, rank, got,
              want);
}

// Checks that buf[0 .. count) holds the reduction of the elements from `first` on over ranks lo ..
// hi-1.
static inline void grid_check_reduced(const grid_case *c, const void *buf, int lo, int hi,
                                      size_t first, size_t count) {
    size_t esize = idist_dtype_size(c->dtype);
    size_t i = reduced_find_wrong(buf, c->dtype, c->op, c->n, lo, hi, first, count, c->salt);
    if (i == count) return;
    char got[40] = "", text[40] = "";
    unsigned char want[ELEMENT_MAX] = {0};
    reduced_expected(want, c->dtype, c->op, c->n, lo, hi, first + i, c->salt);
    grid_hex((const unsigned char *)buf + i * esize, esize, got);
    grid_hex(want, esize, text);
    grid_fail(c, "element %zu of %zu over ranks %d..%d: got 0x%s expected 0x%s", i, count, lo,
              hi - 1, got, text);
}

static inline void grid_check_guards(const grid_case *c, const guarded_buffer *b,
                                     const char *which) {
    if (!guarded_buffer_guards_hold(b)) grid_fail(c, "written outside of the %s buffer", which);
}

static inline void grid_check_untouched(const grid_case *c, const guarded_buffer *b,
                                        const char *which) {
    if (!guarded_buffer_untouched(b))
        grid_fail(c, "the %s buffer of this rank must stay untouched", which);
}

// Checks that the send buffer still holds the elements from `first` on that reduced_fill wrote.
static inline void grid_check_send_reduced(const grid_case *c, const guarded_buffer *b,
                                           size_t first, size_t count) {
    guarded_buffer again = guarded_buffer_make(b->nbytes, 0);
    reduced_fill(again.p, c->dtype, c->op, c->n, first, count, c->rank, c->salt);
    if (b->nbytes && memcmp(again.p, b->p, b->nbytes) != 0)
        grid_fail(c, "the send buffer was modified");
    grid_check_guards(c, b, "send");
    guarded_buffer_free(&again);
}

// Checks that the send buffer still holds the elements that pattern_fill wrote.
static inline void grid_check_send_pattern(const grid_case *c, const guarded_buffer *b,
                                           size_t count) {
    if (pattern_find_wrong(b->p, 0, count, idist_dtype_size(c->dtype), c->rank, c->salt) != count)
        grid_fail(c, "the send buffer was modified");
    grid_check_guards(c, b, "send");
}

static inline void grid__run_case(grid_case *c, const grid_plan *plan, unsigned *number,
                                  size_t count, int dtype, bool in_place) {
    uint64_t h = tap_mix(0x5EED + *number);
    (*number)++;
    if (plan->thin > 1 && tap_mix(h) % plan->thin) return;
    if (c->broken || (in_place && (plan->flags & GRID_NO_IN_PLACE))) return;
    c->count = count;
    c->dtype = (idist_dtype)dtype;
    c->op = IDIST_SUM;
    if (plan->flags & GRID_REDUCES) {
        c->op = (idist_op)((h >> 8) % IDIST_MINLOC);
        if (!op_allowed(c->op, c->dtype)) c->op = (idist_op)((h >> 16) % IDIST_AVG);
        if (c->op == IDIST_AVG && (plan->flags & GRID_NO_AVG)) c->op = IDIST_SUM;
        if (dtype_is_pair(c->dtype)) c->op = (h >> 8) % 2 ? IDIST_MINLOC : IDIST_MAXLOC;
        if (c->dtype >= IDIST_DTYPE_USER) c->op = c->user_op;
    }
    c->root = plan->flags & GRID_ROOTED ? (int)((h >> 24) % (uint64_t)c->n) : 0;
    c->in_place = in_place;
    c->async = (h >> 40) % 4 == 3 && !(plan->flags & GRID_BLOCKING);
    c->misalign = (h >> 44) % 3 == 2;
    c->memory = (h >> 48) % 5 < 2 ? 1 + (int)((h >> 48) % 5) : 0;
    c->salt = h & 0xFFFFFFFF;
    c->request.impl = NULL;
    c->opts = c->async ? opts_async(c->world, &c->request) : opts_of(c->world);
    if ((h >> 52) % 8 == 7) {
        rank_ok(c->rank, idist_plan_create(&c->plan));
        c->opts.plan = c->plan;
        c->opts.request = NULL;
    }
    guarded__source()->world = c->world;
    if (c->memory)
        guarded__source()->which =
            c->memory == 1 ? 3 : tap_mix(h + (uint64_t)c->rank) & 3; // bits: send, receive buffer
    plan->fn(c);
    rank_ok(c->rank, idist_plan_free(&c->plan));
    guarded__source()->which = 0;
}

// Runs counts close to a number of bytes where the library changes its algorithm, each count with a
// different dtype. Runs only one of the counts if the number of bytes is large.
static inline void grid__border(grid_case *c, const grid_plan *plan, unsigned *number,
                                size_t nbytes, const int dtypes[3]) {
    int only = nbytes < (100 << 10) / (size_t)c->n ? -1 : (int)(tap_mix(*number) % 3);
    for (int k = 0; k < 3; k++) {
        if (only >= 0 && k != only) continue;
        size_t count = nbytes / idist_dtype_size((idist_dtype)dtypes[k]);
        grid__run_case(c, plan, number, count + (size_t)k - (count ? 1 : 0), dtypes[k],
                       (*number + (unsigned)k) % 2 == 0);
    }
}

static inline void grid__borders(grid_case *c, const grid_plan *plan, unsigned *number) {
    static const int small[3] = {IDIST_I8, IDIST_BF16, IDIST_F32},
                     middle[3] = {IDIST_U32, IDIST_F16, IDIST_F64},
                     large[3] = {IDIST_I64, IDIST_F32, IDIST_F64};
    const size_t m = (size_t)c->n, div = plan->flags & GRID_WIDE ? m : 1;
    for (int d = 0; d < N_NUMBERS; d++) {
        const int same[3] = {d, d, d};
        grid__border(c, plan, number, 4096, same);
    }
    if (div > 1) grid__border(c, plan, number, 4096 / div, small);
    grid__border(c, plan, number, 32, small);
    grid__border(c, plan, number, 8192, middle);
    grid__border(c, plan, number, 131072 / (m * m), small);
    grid__border(c, plan, number, 65536 / div, middle);
    grid__border(c, plan, number, (128 << 10) / div, middle);
    grid__border(c, plan, number, (384 << 10) / div, large);
    if (plan->large) grid__border(c, plan, number, (2 << 20) / div, large);
}

// Runs pairs and user-defined elements: small elements, an element of several cache lines, and an
// element larger than the blocks in which the library reduces.
static inline void grid__elements(grid_case *c, const grid_plan *plan, unsigned *number) {
    static const size_t sizes[4] = {3, 24, 200, ELEMENT_MAX};
    const size_t m = (size_t)c->n, div = plan->flags & GRID_WIDE ? m : 1;
    const size_t counts[4] = {1, m + 1, 1000 / div, (size_t)40000 / div};
    for (int i = 0; i < 4; i++) {
        for (int d = N_NUMBERS; d < IDIST_DTYPE_COUNT; d++)
            grid__run_case(c, plan, number, i < 3 ? counts[i] : 0, d, (d + i) % 2 == 0);
        char name[16];
        idist_dtype dtype = IDIST_DTYPE_COUNT;
        snprintf(name, sizeof name, "of %zu bytes", sizes[i]);
        rank_ok(c->rank, idist_dtype_create(sizes[i], name, c->world, &dtype));
        for (int k = 0; k < 4; k++) {
            if (counts[k] * sizes[i] > (600 << 10)) continue;
            grid__run_case(c, plan, number, counts[k], (int)dtype, (k + i) % 2 == 0);
        }
        rank_ok(c->rank, idist_dtype_free(dtype, c->world));
    }
}

static inline void grid__rank(idist_group *world, int rank, int n, void *arg) {
    const grid_plan *plan = (const grid_plan *)arg;
    const size_t m = (size_t)n;
    const size_t small[7] = {0, 1, 2, m - 1, m, m + 1, 1000};
    const size_t div = plan->flags & GRID_WIDE ? m : 1;
    unsigned number = 0;
    grid_case c;
    memset(&c, 0, sizeof c);
    c.world = world;
    c.n = n;
    c.rank = rank;
    c.where = plan->where;
    rank_ok(rank, idist_op_create(reduced_user_fn, NULL, true, world, &c.user_op));
    grid__elements(&c, plan, &number);
    for (int k = 0; k < 7; k++) {
        bool again = false;
        for (int j = 0; j < k; j++) again = again || small[j] == small[k];
        for (int d = 0; d < N_NUMBERS && !again; d++) {
            grid__run_case(&c, plan, &number, small[k], d, false);
            grid__run_case(&c, plan, &number, small[k], d, true);
        }
    }
    grid__run_case(&c, plan, &number, 65537 / div, IDIST_F32, false);
    grid__run_case(&c, plan, &number, 65537 / div, IDIST_I8 + n % 8, true);
    grid__run_case(&c, plan, &number, 65537, n % 2 ? IDIST_BF16 : IDIST_F16, false);
    if (plan->large) {
        grid__run_case(&c, plan, &number, ((size_t)1 << 20) / div, IDIST_F32, true);
        grid__run_case(&c, plan, &number, ((size_t)1 << 20) / div + 3, IDIST_U8, false);
    }
    grid__borders(&c, plan, &number);
}

static inline void grid__world(const char *name, grid_fn fn, unsigned flags, int n,
                               const char *algorithm, const char *transport, bool large) {
    grid_plan plan;
    idist_desc desc = desc_with(transport, algorithm);
    plan.fn = fn;
    plan.flags = flags;
    plan.large = large && !test_quick();
    plan.thin = (unsigned)(getenv("IDIST_TEST_THIN") ? atoi(getenv("IDIST_TEST_THIN")) : 1);
    snprintf(plan.where, sizeof plan.where, "%s n=%d algorithm=%s transport=%s", name, n, algorithm,
             transport);
    ranks_case(n, &desc, grid__rank, &plan, "%s", plan.where);
}

// Runs all worlds of one operation.
static inline void grid_run(const char *name, grid_fn fn, unsigned flags) {
    static const int sizes[7] = {1, 2, 3, 4, 5, 7, 8};
    for (int i = 0; i < 7; i++) {
        int n = sizes[i];
        if (test_quick() && n != 1 && n != 2 && n != 3 && n != 5) continue;
        for (int a = 0; a < N_ALGORITHMS; a++) {
            const char *algorithm = algorithm_names[a];
            bool messages = a >= 2;
            if (n == 1 && a > 0) continue; // a single rank runs no algorithm
            if (a == 2 && (flags & GRID_ONE_WAY)) continue;
            grid__world(name, fn, flags, n, algorithm, "auto", n <= 4 && !(messages && n == 2));
            if (n >= 3 && a == 0)
                grid__world(name, fn, flags, n, algorithm, n % 4 ? "blocks" : "hosts", n == 3);
            if (n >= 7 && a == 0)
                grid__world(name, fn, flags, n, algorithm, n % 4 ? "hosts" : "blocks", false);
            if (n == 2 && a == 0) grid__world(name, fn, flags, n, "remote", "auto", true);
            if (n == 2 && a != 1) grid__world(name, fn, flags, n, algorithm, "tcp", true);
            if (n == 5 && messages && !test_quick())
                grid__world(name, fn, flags, n, algorithm, "tcp", false);
            if (n == 3 && !messages) grid__world(name, fn, flags, n, algorithm, "socket", false);
        }
    }
}

#endif // GRID_H
