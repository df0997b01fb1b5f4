// train/ddp/ddp_launch.h: from a ready gradient to a launched bucket
#pragma once

#include "os/clock.h"
#include "base/fail.h"
#include "core/together.h"
#include "train/tensor.h"
#include "train/compress/tensor_memory.h"
#include "train/ddp/ddp_model.h"
#include "train/ddp/ddp_bucket.h"
#include "train/ddp/ddp_piece.h"

// Determines which ranks have data, and sets the factors that depend on their number. Collective.
static idist_status idist__ddp_launch_count_active(idist_ddp *d) {
    idist_opts opts = idist__ddp_opts(d, false);
    uint8_t mine = !d->joining;
    int rank;
    idist_status status = idist_all_gather(&mine, d->has_data, 1, IDIST_U8, &opts);

    if (status != IDIST_OK) return status;
    d->active_count = 0;

    for (rank = d->group_size; rank-- > 0;) {
        if (!d->has_data[rank]) continue;
        if (!d->active_count) d->last_active = rank;
        d->first_active = rank;
        d->active_count++;
    }

    if (d->active_count) idist__ddp_set_scale(d);

    return IDIST_OK;
}

// Makes the first calls of an iteration.
static idist_status idist__ddp_launch_first_calls(idist_ddp *d) {
    idist_opts opts = idist__ddp_opts(d, d->desc.on_device);
    idist_status status = IDIST_OK;

    status = idist__ddp_check_size(d);
    if (status == IDIST_OK && d->group_size == 1) status = idist__ddp_check_group(d);
    if (status != IDIST_OK) return status;

    d->begun = true;
    if (d->desc.uneven) status = idist__ddp_launch_count_active(d);
    if (status == IDIST_OK && d->active_count)
        status = idist__tensor_broadcast(d->buffers, d->desc.n_buffers, d->first_active, &opts);

    return idist__ddp_fail(d, status);
}

// Begins an iteration unless it has begun already.
static idist_status idist__ddp_launch_begin(idist_ddp *d) {
    if (idist__together_now.depth)
        return idist__fail(IDIST_ERR_STATE,
                           "%s: must not be called between group_begin and group_end", d->name);
    if (!d->begun) return idist__ddp_launch_first_calls(d);
    return d->status != IDIST_OK ? idist__fail(d->status, "%s", d->error) : IDIST_OK;
}

// Finishes all pieces in flight, and waits for the requests of all launched buckets.
static idist_status idist__ddp_launch_settle(idist_ddp *d) {
    idist_status status = idist__ddp_piece_settle(d), request_status;
    int b;

    for (b = 0; b < d->launched_count; b++) {
        idist_request *request = &idist__ddp_model_bucket(d, b)->request;

        if (!request->impl) continue;
        if (d->desc.on_device) request_status = idist_wait_stream(request, d->desc.stream);
        else request_status = idist_wait(request);
        if (status == IDIST_OK) status = request_status;
    }

    return status;
}

// Calls the hook's start or finish. A hook of the program may fail without setting an error text.
// Therefore this function first clears the text of any earlier failure.
static idist_status idist__ddp_launch_call_hook(idist_ddp *d, idist__ddp_stage stage,
                                                idist__ddp_bucket *bucket) {
    idist_status status;

    if (d->desc.hook) idist__me.text[0] = 0;
    if (stage == IDIST__DDP_START) status = idist__ddp_hook_start(d, &bucket->exposed);
    else status = idist__ddp_hook_finish(d, &bucket->exposed);
    if (status == IDIST_OK || idist__me.text[0]) return status;

    return idist__fail(status, "the hook's %s failed for bucket %d: %s",
                       stage == IDIST__DDP_START ? "start" : "finish", bucket->exposed.index,
                       idist_status_string(status));
}

// Launches one bucket as a whole.
static idist_status idist__ddp_launch_bucket(idist_ddp *d, idist__ddp_bucket *bucket,
                                             bool blocking) {
    double prescale = d->desc.prescale != 0 ? d->desc.prescale : 1;
    idist_bucket *exposed = &bucket->exposed;
    idist_status status = idist__tensor_memory_scale(&d->reduction.memory, exposed->data,
                                                     exposed->count, exposed->dtype, prescale);

    if (status != IDIST_OK) return status;
    exposed->scale = d->scale;
    exposed->opts = d->reduction.memory.opts;
    if (!blocking) exposed->opts.request = &bucket->request;
    d->launched_count++;

    return idist__ddp_launch_call_hook(d, IDIST__DDP_START, bucket);
}

// Launches the buckets that are full. Only idist_ddp_wait sets `ending`. Without `ending`, leaves
// the last bucket to idist_ddp_wait, because nothing is computed while that bucket is in flight. In
// idist_ddp_wait the rank has nothing else to do, so the built-in reduction makes blocking calls.
static idist_status idist__ddp_launch_full(idist_ddp *d, bool ending) {
    bool blocking = ending && !d->desc.hook && !d->desc.on_device;
    int limit = ending ? d->bucket_count : d->bucket_count - 1;
    idist_status status = d->status;

    if (status == IDIST_OK && blocking) status = idist__ddp_launch_settle(d);

    while (status == IDIST_OK && d->launched_count < limit) {
        int position = d->launched_count;
        idist__ddp_bucket *bucket = idist__ddp_model_bucket(d, position);

        if (!idist__ddp_is_full(bucket)) break;
        if (!d->next_first) bucket->launched_ns = idist_trace_on() ? idist__os_clock_now_ns() : 0;

        if (d->in_pieces[bucket->exposed.index])
            status = idist__ddp_piece_launch(d, bucket, ending);
        else status = idist__ddp_launch_bucket(d, bucket, blocking);
        if (d->launched_count == position) break; // no slot is free
    }

    return idist__ddp_fail(d, status);
}

// Marks a gradient as ready and copies it into its bucket.
static idist_status idist__ddp_launch_gather(idist_ddp *d, int i) {
    const idist_tensor *gradient = &d->grads[i];
    idist__ddp_param *param = &d->param_states[i];
    idist_status status;

    param->ready_iteration = d->iteration;
    if (!d->learnt) d->arrival_order[d->ready_count] = i;
    d->ready_count++;
    d->buckets[param->bucket].ready_count++;
    if (param->gradient == gradient->data) return IDIST_OK;
    status = idist__tensor_memory_copy(&d->reduction.memory, param->gradient, gradient->data,
                                       idist__ddp_nbytes(gradient));

    return idist__ddp_fail(d, status);
}
