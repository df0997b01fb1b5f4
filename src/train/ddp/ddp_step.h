// train/ddp/ddp_step.h: the public functions of an iteration, and uneven inputs
//
// Functions: idist__ddp_step_*, idist__ddp_join_*.
#pragma once

#include "base/fail.h"
#include "core/backend.h"
#include "core/together.h"
#include "train/agree.h"
#include "train/tensor.h"
#include "train/compress/tensor_memory.h"
#include "train/ddp/ddp_model.h"
#include "train/ddp/ddp_launch.h"
#include "train/ddp/ddp_finish.h"

//------------------------------------------------------------------------------
// the public functions of an iteration
//------------------------------------------------------------------------------

// Returns true if an iteration has begun that idist_ddp_wait must end. Without `uneven`, a forward
// pass alone, for example for validation, needs no idist_ddp_wait.
static bool idist__ddp_step_is_open(const idist_ddp *d) {
    return d->begun && (d->desc.uneven || d->ready_count);
}

idist_status idist_ddp_forward(idist_ddp *d) {
    if (!d) return idist__fail(IDIST_ERR_ARG, "ddp_forward: ddp is NULL");
    if (idist__ddp_step_is_open(d))
        return idist__fail(
            IDIST_ERR_STATE,
            "ddp_forward: the last iteration has not ended; call ddp_wait before this");
    if (d->begun && d->status != IDIST_OK) return idist__fail(d->status, "%s", d->error);

    d->begun = false;

    return d->no_sync ? IDIST_OK : idist__ddp_launch_begin(d);
}

idist_status idist_ddp_ready(idist_ddp *d, int i) {
    idist__ddp_bucket *bucket;
    idist_status status;

    if (!d) return idist__fail(IDIST_ERR_ARG, "ddp_ready: ddp is NULL");
    if (i < 0 || i >= d->desc.n)
        return idist__fail(IDIST_ERR_ARG, "%s_ready: there is no parameter %d of %d", d->name, i,
                           d->desc.n);

    if (d->no_sync) {
        d->param_states[i].no_sync_iteration = d->iteration;
        return IDIST_OK;
    }

    if (idist__ddp_is_ready(d, i))
        return idist__fail(
            IDIST_ERR_STATE,
            "%s_ready: gradient %d is ready already; call %s_wait to end the iteration", d->name, i,
            d->name);
    status = idist__ddp_launch_begin(d);
    if (status != IDIST_OK) return status;
    status = idist__ddp_launch_gather(d, i);
    if (status != IDIST_OK) return status;

    bucket = idist__ddp_model_bucket(d, d->launched_count);

    return idist__ddp_is_full(bucket) ? idist__ddp_launch_full(d, false) : IDIST_OK;
}

idist_status idist_ddp_wait(idist_ddp *d) {
    idist_status status;

    if (!d) return idist__fail(IDIST_ERR_ARG, "ddp_wait: ddp is NULL");
    if (d->no_sync) return IDIST_OK;
    status = idist__ddp_launch_begin(d);
    if (status != IDIST_OK && (!d->begun || idist__together_now.depth)) return status;

    // End the iteration even if it has failed.
    idist__tracer_begin("wait", d->results_stay ? "zero_wait" : "ddp_wait", NULL, NULL);

    return idist__tracer_end(idist__ddp_finish(d));
}

idist_status idist_ddp_no_sync(idist_ddp *d, bool on) {
    if (!d) return idist__fail(IDIST_ERR_ARG, "ddp_no_sync: ddp is NULL");
    if (idist__ddp_step_is_open(d))
        return idist__fail(IDIST_ERR_STATE,
                           "%s_no_sync: the last iteration has not ended; call %s_wait before this",
                           d->name, d->name);

    d->begun = false;
    d->no_sync = on;

    return IDIST_OK;
}

idist_status idist_auto_optim(idist_ddp *d, idist_task_fn step, void *arg) {
    idist_status status;
    int result;

    if (!d || !step) return idist__fail(IDIST_ERR_ARG, "auto_optim: ddp or step is NULL");
    if (d->no_sync) return IDIST_OK;
    status = idist_ddp_wait(d);
    if (status != IDIST_OK) return status;
    result = step(arg);
    if (result == 0) return IDIST_OK;

    return idist__fail(IDIST_ERR_CALLBACK, "auto_optim: the step of the optimizer failed with %d",
                       result);
}

//------------------------------------------------------------------------------
// ranks that have run out of data
//------------------------------------------------------------------------------

// Takes part in an iteration of the other ranks, with zeros.
static idist_status idist__ddp_join_iteration(idist_ddp *d) {
    idist_status status = IDIST_OK, finish_status;
    int b;

    for (b = 0; b < d->bucket_count && status == IDIST_OK; b++)
        status = idist__tensor_memory_copy(&d->reduction.memory, d->buckets[b].exposed.data, NULL,
                                           idist__ddp_model_nbytes(&d->buckets[b]));
    idist__ddp_fail(d, status);
    if (d->desc.find_unused) memset(d->used, 0, (size_t)d->desc.n);
    finish_status = idist__ddp_finish(d);

    return status == IDIST_OK ? finish_status : status;
}

// Takes part in the iterations of the other ranks until no rank has data.
static idist_status idist__ddp_join_others(idist_ddp *d) {
    idist_status status;

    d->joining = true;

    for (;;) {
        status = idist__ddp_launch_begin(d);
        if (status != IDIST_OK || !d->active_count) break;
        status = idist__ddp_join_iteration(d);
        if (status != IDIST_OK) break;
    }

    idist__ddp_finish_reset(d);
    d->joining = false;

    return status;
}

idist_status idist_ddp_join(idist_ddp *d, int *last) {
    idist_opts opts;
    idist_status status;

    if (!d) return idist__fail(IDIST_ERR_ARG, "ddp_join: ddp is NULL");
    if (!d->desc.uneven)
        return idist__fail(IDIST_ERR_STATE,
                           "ddp_join: uneven was not set in the desc of ddp_create");
    if (d->no_sync) return idist__fail(IDIST_ERR_STATE, "ddp_join: no_sync is on");
    if (d->begun)
        return idist__fail(IDIST_ERR_STATE,
                           "ddp_join: the last iteration has not ended; call ddp_wait before this");

    status = idist__ddp_join_others(d);
    d->active_count = d->group_size;
    d->first_active = 0;
    idist__ddp_set_scale(d);

    opts = idist__ddp_opts(d, d->desc.on_device);
    if (status == IDIST_OK)
        status = idist__tensor_broadcast(d->params, d->desc.n, d->last_active, &opts);
    if (status == IDIST_OK)
        status = idist__tensor_broadcast(d->buffers, d->desc.n_buffers, d->last_active, &opts);
    if (last) *last = d->last_active;
    if (status != IDIST_OK) return status;
    opts.stream = NULL;

    return idist__agree(status, &opts);
}
