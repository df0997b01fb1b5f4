// base/reduce_op.h: names and classes of reduction ops
#pragma once

typedef enum idist__reduce_op_class {
    IDIST__OP_ARITHMETIC, // on all numbers
    IDIST__OP_BITWISE,    // on integers
    IDIST__OP_LOGICAL,    // on integers; the result is 0 or 1
    IDIST__OP_OF_PAIRS,
    IDIST__OP_OF_PROGRAM // created by idist_op_create, or unknown
} idist__reduce_op_class;

#define IDIST__OP_MAP(X) \
    X(SUM, ARITHMETIC)   \
    X(PROD, ARITHMETIC)  \
    X(MIN, ARITHMETIC)   \
    X(MAX, ARITHMETIC)   \
    X(AVG, ARITHMETIC)   \
    X(BAND, BITWISE)     \
    X(BOR, BITWISE)      \
    X(BXOR, BITWISE)     \
    X(LAND, LOGICAL)     \
    X(LOR, LOGICAL)      \
    X(LXOR, LOGICAL)     \
    X(MINLOC, OF_PAIRS)  \
    X(MAXLOC, OF_PAIRS)

static inline bool idist__reduce_op_is_builtin(idist_op op) {
    return (unsigned)op < IDIST_OP_COUNT;
}

// Returns true for the values that idist_op_create may return.
static inline bool idist__reduce_op_is_user(idist_op op) {
    return (int)op >= IDIST_OP_USER && (int)op <= IDIST_OP_LAST;
}

static inline idist__reduce_op_class idist__reduce_op_class_of(idist_op op) {
    switch (op) {
#define IDIST__X(name, class_) \
    case IDIST_##name: return IDIST__OP_##class_;
        IDIST__OP_MAP(IDIST__X)
#undef IDIST__X
    default: return IDIST__OP_OF_PROGRAM;
    }
}

IDIST__UNUSED static inline bool idist__reduce_op_is_arithmetic(idist_op op) {
    return idist__reduce_op_class_of(op) == IDIST__OP_ARITHMETIC;
}

const char *idist_op_name(idist_op op) {
    switch (op) {
#define IDIST__X(name, class_) \
    case IDIST_##name: return #name;
        IDIST__OP_MAP(IDIST__X)
#undef IDIST__X
    default: return idist__reduce_op_is_user(op) ? "user op" : "unknown op";
    }
}
