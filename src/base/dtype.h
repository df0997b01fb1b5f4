// base/dtype.h: names and sizes of dtypes and ops
//
// A dtype that a program creates has its number in the lowest byte, which is all that fingerprints
// carry of it, and its size above.
#pragma once

enum {
    IDIST__USER_DTYPES = 128, // numbers from IDIST_DTYPE_USER on
    IDIST__DTYPE_MAX_NBYTES = 1 << 22
};

static const char *const idist__dtype_names[IDIST_DTYPE_COUNT] = {
    "I8",   "U8",  "I16", "U16",    "I32",    "U32",     "I64",     "U64",     "F16",
    "BF16", "F32", "F64", "F8E4M3", "F8E5M2", "F32_I64", "F64_I64", "I32_I64", "I64_I64"};
static const uint8_t idist__dtype_sizes[IDIST_DTYPE_COUNT] = {1,
                                                              1,
                                                              2,
                                                              2,
                                                              4,
                                                              4,
                                                              8,
                                                              8,
                                                              2,
                                                              2,
                                                              4,
                                                              8,
                                                              1,
                                                              1,
                                                              sizeof(idist_f32_i64),
                                                              sizeof(idist_f64_i64),
                                                              sizeof(idist_i32_i64),
                                                              sizeof(idist_i64_i64)};
static const char *const idist__op_names[IDIST_OP_COUNT] = {"SUM",   "PROD", "MIN",  "MAX",
                                                            "AVG",   "BAND", "BOR",  "BXOR",
                                                            "LAND",  "LOR",  "LXOR", "MINLOC",
                                                            "MAXLOC"};

// The number of a dtype that a program created, from 0 on; -1 for all others.
static int idist__dtype_user_number(idist_dtype dtype) {
    int number = (int)(((unsigned)dtype & 255u) - IDIST_DTYPE_USER);

    if ((int)dtype < IDIST_DTYPE_USER || number < 0 || number >= IDIST__USER_DTYPES) return -1;
    return (unsigned)dtype >> 8 <= IDIST__DTYPE_MAX_NBYTES ? number : -1;
}

size_t idist_dtype_size(idist_dtype dtype) {
    if ((unsigned)dtype < IDIST_DTYPE_COUNT) return idist__dtype_sizes[(unsigned)dtype];
    return idist__dtype_user_number(dtype) >= 0 ? (unsigned)dtype >> 8 : 0;
}

const char *idist_dtype_name(idist_dtype dtype) {
    if ((unsigned)dtype < IDIST_DTYPE_COUNT) return idist__dtype_names[(unsigned)dtype];
    return idist_dtype_size(dtype) ? "user dtype" : "unknown dtype";
}

const char *idist_op_name(idist_op op) {
    if ((unsigned)op < IDIST_OP_COUNT) return idist__op_names[(unsigned)op];
    return (int)op >= IDIST_OP_USER && (int)op <= IDIST_OP_LAST ? "user op" : "unknown op";
}

static bool idist__dtype_is_float(idist_dtype dtype) {
    return dtype >= IDIST_F16 && dtype <= IDIST_F8E5M2;
}

// A value and an index.
static bool idist__dtype_is_pair(idist_dtype dtype) {
    return dtype >= IDIST_F32_I64 && dtype <= IDIST_I64_I64;
}

// Floats of 16 and 8 bits, which are reduced as F32.
static bool idist__dtype_is_narrow(idist_dtype dtype) {
    return idist__dtype_is_float(dtype) && dtype != IDIST_F32 && dtype != IDIST_F64;
}
