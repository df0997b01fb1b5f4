// core/check.h: checks of one rank's arguments
//
// Nothing has been sent yet when a check fails, so the group stays usable.
#pragma once

#include "base/fail.h"
#include "base/dtype.h"
#include "base/reduce_op.h"
#include "base/reduce.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/fingerprint.h"
#include "core/together.h"
#include "core/extent.h"

// Checks that a call with only a blocking form has no request and no plan, and is not made between
// idist_group_begin and idist_group_end.
static idist_status idist__check_blocking(const char *name, const idist_opts *opts) {
    if (opts && (opts->request || opts->plan))
        return idist__fail(IDIST_ERR_ARG, "%s: blocking only; opts.%s must be NULL", name,
                           opts->request ? "request" : "plan");
    if (idist__together_now.depth)
        return idist__fail(IDIST_ERR_STATE,
                           "%s: not allowed between idist_group_begin and idist_group_end", name);

    return IDIST_OK;
}

static idist_status idist__check_buffers(const idist_group *g, const idist__call *call) {
    const char *name = idist__kind_names[call->label];
    const char *send = (const char *)call->send, *recv = (const char *)call->recv;
    size_t size, send_nbytes, recv_nbytes;
    idist__extent e;
    bool is_simple = (call->kind == IDIST__ALL_REDUCE && send == recv && send) ||
                     (call->kind == IDIST__SEND && send) || (call->kind == IDIST__RECV && recv);

    if (is_simple && call->count <= SIZE_MAX / 16) return IDIST_OK;

    if (idist__extent_of(g, call, &e) != IDIST_OK)
        return idist__fail(IDIST_ERR_ARG, "%s: the counts are too large for memory", name);
    if (e.send && !send)
        return idist__fail(IDIST_ERR_ARG, "%s: the send buffer is NULL and count is not 0", name);
    if (e.recv && !recv)
        return idist__fail(IDIST_ERR_ARG, "%s: the receive buffer is NULL and count is not 0",
                           name);

    size = idist_dtype_size(call->dtype);
    send_nbytes = e.send * size;
    recv_nbytes = e.recv * size;
    if (!send_nbytes || !recv_nbytes) return IDIST_OK;
    if (send + send_nbytes <= recv || recv + recv_nbytes <= send) return IDIST_OK; // disjoint
    if (idist__extent_in_place(&e, call)) return IDIST_OK;

    return idist__fail(
        IDIST_ERR_ARG,
        "%s: send and receive buffers overlap in a way that the in-place form does not allow",
        name);
}

static idist_status idist__check_builtin_op(const idist__call *call) {
    const char *name = idist__kind_names[call->label];

    if (!idist__dtype_is_builtin(call->dtype))
        return idist__fail(IDIST_ERR_ARG,
                           "%s: %s does not take user-defined dtypes; see idist_op_create", name,
                           idist_op_name(call->op));
    if (!idist__reduce_table[(unsigned)call->dtype][(unsigned)call->op])
        return idist__fail(IDIST_ERR_ARG, "%s: %s takes %s, not %s", name, idist_op_name(call->op),
                           idist__reduce_op_class_of(call->op) == IDIST__OP_OF_PAIRS
                               ? "pairs of value and index"
                           : idist__dtype_is_pair(call->dtype) ? "numbers"
                                                               : "integers",
                           idist_dtype_name(call->dtype));
    if (call->op == IDIST_AVG && (call->kind == IDIST__SCAN || call->kind == IDIST__EXSCAN))
        return idist__fail(IDIST_ERR_ARG,
                           "%s: AVG is not defined for prefixes; use SUM and divide by rank + 1",
                           name);

    return IDIST_OK;
}

static idist_status idist__check_op(const idist__world *w, const idist__call *call) {
    const char *name = idist__kind_names[call->label];
    const idist__user_op *user;

    if (idist__reduce_op_is_builtin(call->op)) return idist__check_builtin_op(call);
    user = idist__reduce_op_is_user(call->op) ? &w->user.ops[call->op - IDIST_OP_USER] : NULL;
    if (!user || !user->used)
        return idist__fail(IDIST_ERR_ARG, "%s: invalid op %d in this world", name, (int)call->op);
    if (!user->fn && !idist__dtype_is_float(call->dtype))
        return idist__fail(IDIST_ERR_ARG, "%s: a premultiplied sum needs a floating dtype, got %s",
                           name, idist_dtype_name(call->dtype));

    return IDIST_OK;
}

// Checks that this world has created the dtype of a call, and that the count fits beside the
// dtype's tag.
static idist_status idist__check_dtype(const idist__world *w, const idist__call *call) {
    const char *name = idist__kind_names[call->label];
    int user = idist__dtype_user_number(call->dtype);
    uint64_t count = call->count;

    if (user < 0 && idist_dtype_size(call->dtype)) return IDIST_OK;
    if (user < 0 || !w->user.dtypes[user].used || w->user.dtypes[user].dtype != call->dtype)
        return idist__fail(IDIST_ERR_ARG, "%s: invalid dtype %d in this world", name,
                           (int)call->dtype);
    if (count >= IDIST__TAGGED_COUNT)
        return idist__fail(IDIST_ERR_ARG, "%s: the count is too large", name);

    return IDIST_OK;
}

static idist_status idist__check_peer(const idist_group *g, const idist__call *call) {
    const char *name = idist__kind_names[call->label];
    bool receives = call->kind == IDIST__RECV;

    if (!(call->root >= 0 && call->root < g->size) && !(receives && call->root == IDIST_ANY_SOURCE))
        return idist__fail(IDIST_ERR_ARG, "%s: rank %d is not in a group of %d", name, call->root,
                           g->size);
    if (call->tag < 0 && !(receives && call->tag == IDIST_ANY_TAG) &&
        call->label != IDIST__NEW_GROUP_BY_MEMBERS && call->label != IDIST__MRECV)
        return idist__fail(IDIST_ERR_ARG, "%s: tag %d is negative", name, call->tag);
    if (call->label == IDIST__MRECV && // a new group may have the group's address
        (call->u.message->world != g->w->groups.serial || call->u.message->ctx != g->ctx))
        return idist__fail(IDIST_ERR_STATE, "mrecv: the group of the message was freed");

    return IDIST_OK;
}

static idist_status idist__check_counts(const idist_group *g, const idist__call *call) {
    const char *name = idist__kind_names[call->label];
    bool root = call->root == g->rank, to_all = call->kind == IDIST__ALL_TO_ALLV;
    bool gathers = call->kind == IDIST__ALL_GATHERV || (call->kind == IDIST__GATHERV && root);
    bool scatters = call->kind == IDIST__SCATTERV && root;

    if (((gathers || to_all) && !call->recvcounts) ||
        (call->kind == IDIST__REDUCE_SCATTERV && !call->sendcounts))
        return idist__fail(IDIST_ERR_ARG, "%s: recvcounts is NULL", name);
    if ((scatters || to_all) && !call->sendcounts)
        return idist__fail(IDIST_ERR_ARG, "%s: sendcounts is NULL", name);
    if (gathers && call->recvcounts[g->rank] != call->count)
        return idist__fail(IDIST_ERR_ARG, "%s: sendcount is %zu, but recvcounts[%d] is %zu", name,
                           call->count, g->rank, call->recvcounts[g->rank]);
    if (scatters && call->sendcounts[g->rank] != call->count)
        return idist__fail(IDIST_ERR_ARG, "%s: recvcount is %zu, but sendcounts[%d] is %zu", name,
                           call->count, g->rank, call->sendcounts[g->rank]);
    if (to_all && call->sendcounts[g->rank] != call->recvcounts[g->rank])
        return idist__fail(IDIST_ERR_ARG, "%s: sendcounts[%d] and recvcounts[%d] differ", name,
                           g->rank, g->rank);

    return IDIST_OK;
}

static idist_status idist__check_collective(const idist_group *g, const idist__call *call) {
    idist_status status = IDIST_OK;

    if (idist__kind_has_root(call->kind) && (call->root < 0 || call->root >= g->size))
        return idist__fail(IDIST_ERR_ARG, "%s: root %d is not in a group of %d",
                           idist__kind_names[call->label], call->root, g->size);

    if (idist__kind_reduces(call->kind)) status = idist__check_op(g->w, call);
    if (status == IDIST_OK && idist__kind_is_v(call->kind)) status = idist__check_counts(g, call);

    return status;
}

static idist_status idist__check_call(const idist_group *g, const idist__call *call) {
    idist_status status = IDIST_OK;

    if (g->rank < 0)
        return idist__fail(IDIST_ERR_STATE, "%s: this rank is not a member of the group",
                           idist__kind_names[call->label]);
    if (call->kind == IDIST__BARRIER) return IDIST_OK;
    if (!idist__dtype_is_builtin(call->dtype)) status = idist__check_dtype(g->w, call);
    if (status != IDIST_OK) return status;

    status = idist__kind_is_p2p(call->kind) ? idist__check_peer(g, call)
                                            : idist__check_collective(g, call);

    return status == IDIST_OK ? idist__check_buffers(g, call) : status;
}
