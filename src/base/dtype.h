// base/dtype.h: names, sizes and classes of dtypes
//
// A dtype that a program creates has its number in the lowest byte and its size in the bytes above.
// The fingerprint of a call (core/fingerprint.h) carries the lowest byte only.
#pragma once

enum {
    IDIST__USER_DTYPES = 128, // numbers from IDIST_DTYPE_USER on
    IDIST__DTYPE_MAX_NBYTES = 1 << 22
};

typedef enum idist__dtype_class {
    IDIST__DTYPE_INTEGER,
    IDIST__DTYPE_FLOAT,
    IDIST__DTYPE_NARROW,    // floats of 16 and 8 bits, which are reduced as F32
    IDIST__DTYPE_PAIR,      // a value and an index
    IDIST__DTYPE_OF_PROGRAM // created by idist_dtype_create, or unknown
} idist__dtype_class;

#define IDIST__DTYPE_MAP(X)                 \
    X(I8, 1, INTEGER)                       \
    X(U8, 1, INTEGER)                       \
    X(I16, 2, INTEGER)                      \
    X(U16, 2, INTEGER)                      \
    X(I32, 4, INTEGER)                      \
    X(U32, 4, INTEGER)                      \
    X(I64, 8, INTEGER)                      \
    X(U64, 8, INTEGER)                      \
    X(F16, 2, NARROW)                       \
    X(BF16, 2, NARROW)                      \
    X(F32, 4, FLOAT)                        \
    X(F64, 8, FLOAT)                        \
    X(F8E4M3, 1, NARROW)                    \
    X(F8E5M2, 1, NARROW)                    \
    X(F32_I64, sizeof(idist_f32_i64), PAIR) \
    X(F64_I64, sizeof(idist_f64_i64), PAIR) \
    X(I32_I64, sizeof(idist_i32_i64), PAIR) \
    X(I64_I64, sizeof(idist_i64_i64), PAIR)

static inline bool idist__dtype_is_builtin(idist_dtype dtype) {
    return (unsigned)dtype < IDIST_DTYPE_COUNT;
}

static inline idist__dtype_class idist__dtype_class_of(idist_dtype dtype) {
    static const uint8_t classes[IDIST_DTYPE_COUNT] = {
#define IDIST__X(name, size, class_) IDIST__DTYPE_##class_,
        IDIST__DTYPE_MAP(IDIST__X)
#undef IDIST__X
    };

    if (!idist__dtype_is_builtin(dtype)) return IDIST__DTYPE_OF_PROGRAM;
    return (idist__dtype_class)classes[(unsigned)dtype];
}

// Returns the number of a dtype that a program created, counted from 0, or -1 for any other dtype.
static int idist__dtype_user_number(idist_dtype dtype) {
    int number = (int)(((unsigned)dtype & 255u) - IDIST_DTYPE_USER);

    if ((int)dtype < IDIST_DTYPE_USER || number < 0 || number >= IDIST__USER_DTYPES) return -1;
    return (unsigned)dtype >> 8 <= IDIST__DTYPE_MAX_NBYTES ? number : -1;
}

size_t idist_dtype_size(idist_dtype dtype) {
    static const uint8_t sizes[IDIST_DTYPE_COUNT] = {
#define IDIST__X(name, size, class_) size,
        IDIST__DTYPE_MAP(IDIST__X)
#undef IDIST__X
    };

    if (idist__dtype_is_builtin(dtype)) return sizes[(unsigned)dtype];
    return idist__dtype_user_number(dtype) >= 0 ? (unsigned)dtype >> 8 : 0;
}

const char *idist_dtype_name(idist_dtype dtype) {
    static const char *const names[IDIST_DTYPE_COUNT] = {
#define IDIST__X(name, size, class_) #name,
        IDIST__DTYPE_MAP(IDIST__X)
#undef IDIST__X
    };

    if (idist__dtype_is_builtin(dtype)) return names[(unsigned)dtype];
    return idist_dtype_size(dtype) ? "user dtype" : "unknown dtype";
}

static inline bool idist__dtype_is_float(idist_dtype dtype) {
    idist__dtype_class class_of = idist__dtype_class_of(dtype);
    return class_of == IDIST__DTYPE_FLOAT || class_of == IDIST__DTYPE_NARROW;
}

IDIST__UNUSED static inline bool idist__dtype_is_integer(idist_dtype dtype) {
    return idist__dtype_class_of(dtype) == IDIST__DTYPE_INTEGER;
}

static inline bool idist__dtype_is_pair(idist_dtype dtype) {
    return idist__dtype_class_of(dtype) == IDIST__DTYPE_PAIR;
}

static inline bool idist__dtype_is_narrow(idist_dtype dtype) {
    return idist__dtype_class_of(dtype) == IDIST__DTYPE_NARROW;
}
