// calls/user_op.h: the program's own ops and dtypes
#pragma once

#include "os/thread.h"
#include "base/fail.h"
#include "base/text.h"
#include "base/dtype.h"
#include "base/reduce_op.h"
#include "base/hash.h"
#include "core/model.h"
#include "core/fingerprint.h"
#include "core/call.h"

static idist_status idist__user_op_add(const char *name, const idist__user_op *user,
                                       idist_group *group, idist_op *op) {
    idist_group *g;
    idist_status status;
    size_t i;

    if (!op) return idist__fail(IDIST_ERR_ARG, "%s: op is NULL", name);
    *op = IDIST_OP_COUNT;
    status = idist__call_enter(name, group, &g);
    if (status != IDIST_OK) return status;
    for (i = 0; i < IDIST__COUNT_OF(g->w->user.ops) && g->w->user.ops[i].used; i++) continue;

    if (i == IDIST__COUNT_OF(g->w->user.ops)) {
        status = idist__fail(IDIST_ERR_NO_SPACE,
                             "%s: a world can have %zu ops; free one with idist_op_free", name, i);
    } else {
        g->w->user.ops[i] = *user;
        g->w->user.ops[i].used = true;
        *op = (idist_op)(IDIST_OP_USER + (int)i);
    }

    idist__os_mutex_unlock(&g->w->lock);

    return status;
}

idist_status idist_op_create(idist_op_fn fn, void *arg, bool commutative, idist_group *group,
                             idist_op *op) {
    idist__user_op user;

    if (!fn) return idist__fail(IDIST_ERR_ARG, "op_create: fn is NULL");
    memset(&user, 0, sizeof user);
    user.fn = fn;
    user.arg = arg;
    user.factor = 1;
    user.commutative = commutative;
    return idist__user_op_add("op_create", &user, group, op);
}

idist_status idist_op_create_premul_sum(double factor, idist_group *group, idist_op *op) {
    idist__user_op user;

    memset(&user, 0, sizeof user);
    user.factor = factor;
    user.commutative = true;
    return idist__user_op_add("op_create_premul_sum", &user, group, op);
}

idist_status idist_op_free(idist_op op, idist_group *group) {
    idist_group *g;
    idist_status status = idist__call_enter("op_free", group, &g);

    if (status != IDIST_OK) return status;
    if (!idist__reduce_op_is_user(op) || !g->w->user.ops[op - IDIST_OP_USER].used)
        status = idist__fail(IDIST_ERR_ARG, "op_free: invalid user op %d in this world", (int)op);
    else g->w->user.ops[op - IDIST_OP_USER].used = false;
    idist__os_mutex_unlock(&g->w->lock);

    return status;
}

// Returns the user dtype number i. The lowest byte is IDIST_DTYPE_USER + i, and the bits above are
// the size in bytes.
static idist_dtype idist__user_op_new_dtype(size_t nbytes, int i) {
    return (idist_dtype)(((unsigned)nbytes << 8) | (unsigned)(IDIST_DTYPE_USER + i));
}

idist_status idist_dtype_create(size_t nbytes, const char *name, idist_group *group,
                                idist_dtype *dtype) {
    idist__user_dtype *user;
    idist_group *g;
    idist_status status;
    uint64_t hash;
    int i;

    if (!dtype) return idist__fail(IDIST_ERR_ARG, "dtype_create: dtype is NULL");
    *dtype = IDIST_DTYPE_COUNT;
    if (!name || !name[0]) return idist__fail(IDIST_ERR_ARG, "dtype_create: the name is missing");
    if (nbytes < 1 || nbytes > IDIST__DTYPE_MAX_NBYTES)
        return idist__fail(
            IDIST_ERR_ARG,
            "dtype_create: the size of an element must be between 1 and %d bytes, got %zu",
            (int)IDIST__DTYPE_MAX_NBYTES, nbytes);
    status = idist__call_enter("dtype_create", group, &g);
    if (status != IDIST_OK) return status;
    for (i = 0; i < IDIST__USER_DTYPES && g->w->user.dtypes[i].used; i++) continue;

    if (i == IDIST__USER_DTYPES) {
        status =
            idist__fail(IDIST_ERR_NO_SPACE,
                        "dtype_create: a world can have %d dtypes; free one with idist_dtype_free",
                        i);
    } else {
        user = &g->w->user.dtypes[i];
        idist__text_copy(user->name, sizeof user->name, name);
        hash = idist__hash_mix(idist__hash(user->name, strlen(user->name)), nbytes);
        user->tag = (uint32_t)(hash >> (64 - IDIST__TAG_BITS)) | 1;
        user->dtype = idist__user_op_new_dtype(nbytes, i);
        user->used = true;
        *dtype = user->dtype;
    }

    idist__os_mutex_unlock(&g->w->lock);

    return status;
}

idist_status idist_dtype_free(idist_dtype dtype, idist_group *group) {
    int user = idist__dtype_user_number(dtype);
    idist_group *g;
    idist_status status = idist__call_enter("dtype_free", group, &g);

    if (status != IDIST_OK) return status;
    if (user < 0 || !g->w->user.dtypes[user].used || g->w->user.dtypes[user].dtype != dtype)
        status = idist__fail(IDIST_ERR_ARG, "dtype_free: %d is not a user dtype of this world",
                             (int)dtype);
    else g->w->user.dtypes[user].used = false;
    idist__os_mutex_unlock(&g->w->lock);

    return status;
}
