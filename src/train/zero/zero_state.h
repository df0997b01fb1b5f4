// train/zero/zero_state.h: the state of all ranks on one rank, for checkpoints
//
// Functions: idist__zero_state_*.
#pragma once

#include "base/fail.h"
#include "train/agree.h"
#include "train/tensor.h"
#include "train/ddp/ddp_model.h"
#include "train/ddp/ddp_step.h"
#include "train/zero/zero_model.h"

int idist_zero_state_count(const idist_zero *z) {
    return z ? z->states + (z->has_masters ? 1 : 0) : 0;
}

// Checks the tensors on root, and that this rank can make the calls. All ranks get the same status.
// Collective.
static idist_status idist__zero_state_check(const idist_zero *z, const char *name,
                                            const idist_tensor *states, int root,
                                            idist_opts *opts) {
    int count = idist_zero_state_count(z), k;
    idist_opts given;
    idist_status status;

    if (!z) return idist__fail(IDIST_ERR_ARG, "%s: zero is NULL", name);
    given = idist__ddp_opts(z->ddp, false);
    status = idist__agree_enter(name, &given, opts);
    if (status != IDIST_OK) return status;

    status = idist__ddp_check_size(z->ddp);
    if (status != IDIST_OK) return idist__agree(status, opts);
    if (idist__ddp_step_is_open(z->ddp))
        status = idist__fail(IDIST_ERR_STATE, "%s: gradients are ready; call zero_wait before this",
                             name);
    else if (root < 0 || root >= z->group_size)
        status = idist__fail(IDIST_ERR_ARG, "%s: root %d is not a rank of a group of %d", name,
                             root, z->group_size);
    else if (z->rank == root && count)
        status = idist__tensor_check(name, "state", states, count * z->ddp->desc.n, true);

    for (k = 0; z->rank == root && status == IDIST_OK && k < count * z->ddp->desc.n; k++) {
        size_t wanted = z->ddp->params[k % z->ddp->desc.n].count;

        if (states[k].dtype != IDIST_F32 || states[k].count != wanted)
            status = idist__fail(IDIST_ERR_ARG, "%s: state %d is %s x %zu, not F32 x %zu", name, k,
                                 idist_dtype_name(states[k].dtype), states[k].count, wanted);
    }

    return idist__agree(status, opts);
}

// Returns array j of a shard: state j, or the weights after the last state.
static float *idist__zero_state_of(const idist_zero *z, int j, int param) {
    int s = z->shard_of[param];

    if (s < 0) return NULL;
    return j < z->states ? z->shards[s].states[j] : z->shards[s].weights;
}

// Sets z->param_counts to the number of elements of a parameter in the shard of each rank.
static void idist__zero_state_count_elements(const idist_zero *z, int param) {
    const idist_bucket *bucket = idist__zero_exposed(z, z->ddp->param_states[param].bucket);
    size_t first = 0, end;
    int rank, k = 0;

    while (bucket->gradients[k] != param) k++;
    first = bucket->displs[k];
    end = first + z->ddp->params[param].count;

    for (rank = 0; rank < z->group_size; rank++) {
        size_t from = idist__zero_begin(z, bucket, rank);
        size_t to = idist__zero_begin(z, bucket, rank + 1);

        if (from < first) from = first;
        if (to > end) to = end;
        z->param_counts[rank] = from < to ? to - from : 0;
    }
}

// Returns true if array j of a parameter has values that only the shards have. The last array of an
// F32 parameter, which has no master weights, has not: it is a copy of the parameter.
static bool idist__zero_state_is_own(const idist_zero *z, int j, int param) {
    return j < z->states || z->ddp->params[param].dtype != IDIST_F32;
}

// Gathers array j of a parameter on root, or scatters the array from root. Collective.
static idist_status idist__zero_state_move(const idist_zero *z, const idist_tensor *states, int j,
                                           int param, int root, bool gather) {
    idist_opts opts = idist__ddp_opts(z->ddp, z->ddp->desc.on_device);
    float *own = idist__zero_state_of(z, j, param);
    void *all = z->rank == root ? states[j * z->ddp->desc.n + param].data : NULL;
    size_t count;

    idist__zero_state_count_elements(z, param);
    count = z->param_counts[z->rank];
    if (gather)
        return idist_gatherv(own, count, all, z->param_counts, NULL, IDIST_F32, root, &opts);

    return idist_scatterv(all, z->param_counts, NULL, own, count, IDIST_F32, root, &opts);
}

static idist_status idist__zero_state_move_all(const idist_zero *z, const idist_tensor *states,
                                               int root, bool gather) {
    int j, param;
    idist_status status = IDIST_OK;

    for (j = 0; j < idist_zero_state_count(z); j++)
        for (param = 0; param < z->ddp->desc.n && status == IDIST_OK; param++)
            if (gather || idist__zero_state_is_own(z, j, param))
                status = idist__zero_state_move(z, states, j, param, root, gather);
    if (status == IDIST_OK) return IDIST_OK;

    return idist__agree_break("zero", z->ddp->desc.group, status); // other ranks may wait
}

idist_status idist_zero_get_state(idist_zero *z, const idist_tensor *states, int root) {
    idist_opts opts;
    idist_status status = idist__zero_state_check(z, "zero_get_state", states, root, &opts);

    return status == IDIST_OK ? idist__zero_state_move_all(z, states, root, true) : status;
}

idist_status idist_zero_set_state(idist_zero *z, const idist_tensor *states, int root) {
    idist_opts opts;
    idist_status status = idist__zero_state_check(z, "zero_set_state", states, root, &opts);

    if (status != IDIST_OK) return status;
    opts = idist__ddp_opts(z->ddp, z->ddp->desc.on_device);
    status = idist__tensor_broadcast(z->ddp->params, z->ddp->desc.n, root, &opts);
    if (status == IDIST_OK) status = idist__zero_state_move_all(z, states, root, false);
    if (status != IDIST_OK || !z->has_masters) return status;

    return idist_zero_gather(z); // the parameters become the rounded master weights
}
