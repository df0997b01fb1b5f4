// mpi/mpi_type.h: dtypes and ops
#pragma once

#include "os/unwind.h"
#include "base/fail.h"
#include "base/dtype.h"
#include "base/reduce.h"
#include "core/model.h"
#include "mpi/mpi_model.h"

// Returns true if MPI has a datatype for dtype. Pairs, and dtypes that the program creates, have
// none.
static bool idist__mpi_type_exists(idist_dtype dtype) {
    return idist__dtype_is_builtin(dtype) && !idist__dtype_is_pair(dtype);
}

// Returns the MPI datatype of dtype. Floats of 16 and 8 bits are sent as unsigned integers;
// reductions convert them to F32 first.
static MPI_Datatype idist__mpi_type_of(idist_dtype dtype) {
    switch ((int)dtype) {
    case IDIST_I8: return MPI_INT8_T;
    case IDIST_I16: return MPI_INT16_T;
    case IDIST_U16: return MPI_UINT16_T;
    case IDIST_I32: return MPI_INT32_T;
    case IDIST_U32: return MPI_UINT32_T;
    case IDIST_I64: return MPI_INT64_T;
    case IDIST_U64: return MPI_UINT64_T;
    case IDIST_F16: return MPI_UINT16_T;
    case IDIST_BF16: return MPI_UINT16_T;
    case IDIST_F32: return MPI_FLOAT;
    case IDIST_F64: return MPI_DOUBLE;
    default: return MPI_UINT8_T; // U8, the floats of 8 bits, and bytes
    }
}

// Returns the MPI op of a built-in op. Our own SUM, PROD, MIN and MAX replace MPI's where the
// results may differ: MPI does not define MIN and MAX of a NaN, MPICH 4 compares unsigned numbers
// as signed ones, and Open MPI 4 saturates sums of 8 and 16 bits.
static MPI_Op idist__mpi_type_builtin_op(const idist__mpi *mpi, idist_op op, idist_dtype dtype) {
    bool own = idist_dtype_size(dtype) < 4;

    switch ((int)op) {
    case IDIST_PROD: return own ? mpi->ops[IDIST_PROD] : MPI_PROD;
    case IDIST_MIN: return mpi->ops[IDIST_MIN];
    case IDIST_MAX: return mpi->ops[IDIST_MAX];
    case IDIST_BAND: return MPI_BAND;
    case IDIST_BOR: return MPI_BOR;
    case IDIST_BXOR: return MPI_BXOR;
    case IDIST_LAND: return MPI_LAND;
    case IDIST_LOR: return MPI_LOR;
    case IDIST_LXOR: return MPI_LXOR;
    default: return own ? mpi->ops[IDIST_SUM] : MPI_SUM; // AVG is divided at the end
    }
}

static void idist__mpi_type_reduce(void *in, void *inout, int count, MPI_Datatype type,
                                   idist_op op) {
    int dtype = 0;
    while (dtype < IDIST_F64 && type != idist__mpi_type_of((idist_dtype)dtype)) dtype++;
    idist__reduce_table[dtype][op](inout, in, inout, (size_t)count);
}

#define IDIST__MPI_OP(name, op)                                                                 \
    static void idist__mpi_type_##name(void *in, void *inout, int *count, MPI_Datatype *type) { \
        idist__mpi_type_reduce(in, inout, *count, *type, op);                                   \
    }
IDIST__MPI_OP(sum, IDIST_SUM)
IDIST__MPI_OP(prod, IDIST_PROD)
IDIST__MPI_OP(min, IDIST_MIN)
IDIST__MPI_OP(max, IDIST_MAX)

// MINLOC and MAXLOC in the form of user-defined ops, because MPI's pairs have an index of type int.
static void idist__mpi_type_minloc(const void *in, void *inout, size_t count, idist_dtype dtype,
                                   void *arg) {
    (void)arg;
    idist__reduce_table[(unsigned)dtype][IDIST_MINLOC](inout, in, inout, count);
}

static void idist__mpi_type_maxloc(const void *in, void *inout, size_t count, idist_dtype dtype,
                                   void *arg) {
    (void)arg;
    idist__reduce_table[(unsigned)dtype][IDIST_MAXLOC](inout, in, inout, count);
}

static idist__user_op idist__mpi_type_pair_op(idist_op op) {
    idist__user_op user;

    memset(&user, 0, sizeof user);
    user.fn = op == IDIST_MINLOC ? idist__mpi_type_minloc : idist__mpi_type_maxloc;
    user.commutative = true;

    return user;
}

// Key of the attribute that attaches an idist__mpi_hook to the datatype of a call. MPI does not
// pass our dtype and the user's arg to a user-defined op, but it passes the datatype.
static int idist__mpi_keyval = MPI_KEYVAL_INVALID;

// Calls a user-defined op. An exception ends the process here, because MPI cannot be told of it and
// would continue with a wrong operand.
IDIST__NOINLINE static void idist__mpi_type_call_user(const idist__mpi_hook *hook, void *in,
                                                      void *inout, size_t count) {
    IDIST__CALLBACK(hook->user.fn(in, inout, count, hook->dtype, hook->user.arg));
    if (!idist__me.thrown[0]) return;
    fprintf(stderr, "idist: a user op threw an exception inside MPI: %s\n", idist__me.thrown);
    idist__os_unwind_terminate();
}

static void idist__mpi_type_user(void *in, void *inout, int *count, MPI_Datatype *type) {
    idist__mpi_hook *hook = NULL;
    int found = 0;

    MPI_Type_get_attr(*type, idist__mpi_keyval, &hook, &found);
    if (found && hook) idist__mpi_type_call_user(hook, in, inout, (size_t)*count);
}
