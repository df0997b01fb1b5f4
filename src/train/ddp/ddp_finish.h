// train/ddp/ddp_finish.h: the end of an iteration
//
// idist_ddp_wait ends an iteration in three steps. First, gradients that are not ready become zeros
// or count as ready. Then the remaining buckets are launched. Finally, each result is finished and
// copied back.
#pragma once

#include "os/clock.h"
#include "train/compress/tensor_memory.h"
#include "train/ddp/ddp_model.h"
#include "train/ddp/ddp_bucket.h"
#include "train/ddp/ddp_launch.h"

// Sets d->used for the gradients that this rank has. Allocates memory for copies of the other
// gradients, if zeros will overwrite them in the program's memory.
static idist_status idist__ddp_finish_alloc_saved(idist_ddp *d) {
    const idist__memory *memory = &d->reduction.memory;
    size_t nbytes = 0;
    idist_status status;
    int i;

    for (i = 0; i < d->desc.n; i++) {
        d->used[i] = idist__ddp_is_ready(d, i);
        if (!d->used[i] && d->param_states[i].gradient == d->grads[i].data)
            nbytes += idist__ddp_nbytes(&d->grads[i]);
    }

    if (nbytes <= d->saved_nbytes) return IDIST_OK;
    idist__tensor_memory_free(memory, d->saved_grads);
    d->saved_nbytes = 0;
    status = idist__tensor_memory_alloc(memory, &d->saved_grads, nbytes);
    if (status == IDIST_OK) d->saved_nbytes = nbytes;

    return status;
}

// Overwrites the gradients that this rank does not have with zeros. Saves the gradients that are
// overwritten in the program's memory. Called with find_unused.
static idist_status idist__ddp_finish_fill(idist_ddp *d) {
    const idist__memory *memory = &d->reduction.memory;
    idist_status status = idist__ddp_finish_alloc_saved(d);
    char *saved = (char *)d->saved_grads;
    int i;

    if (status != IDIST_OK) return status;
    d->filled_with_zeros = true;

    for (i = 0; i < d->desc.n && status == IDIST_OK; i++) {
        void *gradient = d->param_states[i].gradient;
        size_t nbytes = idist__ddp_nbytes(&d->grads[i]);

        if (d->used[i] || !nbytes) continue;

        if (gradient == d->grads[i].data) {
            status = idist__tensor_memory_copy(memory, saved, gradient, nbytes);
            saved += nbytes;
        }

        if (status == IDIST_OK) status = idist__tensor_memory_copy(memory, gradient, NULL, nbytes);
    }

    return status;
}

// Copies the results to the program's gradients. Restores the old contents of a gradient that no
// rank had.
static idist_status idist__ddp_finish_scatter(idist_ddp *d) {
    const idist__memory *memory = &d->reduction.memory;
    const char *saved = (const char *)d->saved_grads;
    idist_status status = IDIST_OK;
    int i;

    if (d->results_stay || (!d->copies && !d->filled_with_zeros)) return IDIST_OK;

    for (i = 0; i < d->desc.n && status == IDIST_OK; i++) {
        const idist_tensor *gradient = &d->grads[i];
        const void *result = d->param_states[i].gradient;
        size_t nbytes = idist__ddp_nbytes(gradient);
        bool in_place = result == gradient->data;
        bool was_saved = d->filled_with_zeros && in_place && !idist__ddp_is_ready(d, i);

        if (!nbytes || (in_place && !was_saved)) continue;
        if (d->used[i]) status = idist__tensor_memory_copy(memory, gradient->data, result, nbytes);
        else if (was_saved)
            status = idist__tensor_memory_copy(memory, gradient->data, saved, nbytes);
        if (was_saved) saved += nbytes;
    }

    return status;
}

// Adds a bucket to the timeline, from its launch to its result.
static void idist__ddp_finish_trace(const idist__ddp_bucket *bucket) {
    char name[32], args[96];

    if (!idist_trace_on()) return;
    snprintf(name, sizeof name, "bucket %d", bucket->exposed.index);
    snprintf(args, sizeof args, "{\"gradients\":%d,\"bytes\":%zu}", bucket->exposed.gradient_count,
             idist__ddp_model_nbytes(bucket));
    idist_trace_span(name, "bucket", bucket->launched_ns, idist__os_clock_now_ns(), args);
}

// Waits for the launched buckets and finishes them. After a failure, only waits for them.
static idist_status idist__ddp_finish_buckets(idist_ddp *d) {
    idist_status settled = idist__ddp_launch_settle(d);
    idist_status status = d->status != IDIST_OK ? d->status : settled;
    int b;

    for (b = 0; b < d->launched_count && status == IDIST_OK; b++) {
        idist__ddp_bucket *bucket = idist__ddp_model_bucket(d, b);

        if (d->in_pieces[bucket->exposed.index]) { // finished piece by piece
            idist__ddp_finish_trace(bucket);
            continue;
        }

        bucket->exposed.opts.request = NULL;
        status = idist__ddp_launch_call_hook(d, IDIST__DDP_FINISH, bucket);
        idist__ddp_finish_trace(bucket);
    }

    return idist__ddp_fail(d, status);
}

static void idist__ddp_finish_reset(idist_ddp *d) {
    int b;

    for (b = 0; b < d->bucket_count; b++) d->buckets[b].ready_count = 0;
    d->iteration++;
    d->ready_count = 0;
    d->launched_count = 0;
    d->next_gradient = 0;
    d->next_first = 0;
    d->started_pieces = 0;
    d->finished_pieces = 0;
    d->filled_with_zeros = false;
    d->status = IDIST_OK;
    d->begun = false;
}

// Treats the gradients that are not ready as ready. With find_unused, these gradients contribute
// zero instead, unless they were ready in a pass with no_sync.
static idist_status idist__ddp_finish_gather(idist_ddp *d) {
    idist_status status = d->status;
    int i;

    if (d->joining) return status; // the buckets are zeroed already

    for (i = d->desc.n; i-- > 0 && status == IDIST_OK;) {
        bool counts = d->copies;

        if (d->desc.find_unused) counts = d->param_states[i].no_sync_iteration == d->iteration;
        if (counts && !idist__ddp_is_ready(d, i)) status = idist__ddp_launch_gather(d, i);
    }

    if (status == IDIST_OK && d->desc.find_unused)
        status = idist__ddp_fail(d, idist__ddp_finish_fill(d));

    return status;
}

// Sets launch_order to the order in which buckets became full.
static void idist__ddp_finish_reorder(idist_ddp *d) {
    int b, k, full = 0;

    for (b = 0; b < d->bucket_count; b++) d->buckets[b].ready_count = 0;

    for (k = 0; k < d->desc.n; k++) {
        idist__ddp_bucket *bucket = &d->buckets[d->param_states[d->arrival_order[k]].bucket];

        bucket->ready_count++;
        if (idist__ddp_is_full(bucket)) d->launch_order[full++] = bucket->exposed.index;
    }
}

// Sets arrival_order on all ranks to the order in which gradients became ready on the first rank
// with data. Gradients that became ready in idist_ddp_wait come last, in descending order.
// Collective.
static idist_status idist__ddp_finish_learn(idist_ddp *d) {
    idist_opts opts = idist__ddp_opts(d, false);
    int i, count = d->ready_count;

    for (i = 0; i < d->desc.n; i++) d->bucket_of[i] = -1; // not in arrival_order
    for (i = 0; i < d->ready_count; i++) d->bucket_of[d->arrival_order[i]] = 0;

    for (i = d->desc.n; i-- > 0;)
        if (d->bucket_of[i] < 0) d->arrival_order[count++] = i;

    return idist_broadcast(d->arrival_order, (size_t)d->desc.n, IDIST_I32, d->first_active, &opts);
}

// Makes buckets follow the order of arrival after the first iteration. With a hook, nothing
// changes, because the hook relies on bucket 0 being launched first. With find_unused, nothing
// changes, because the next iteration may use other parameters. Collective.
static idist_status idist__ddp_finish_follow(idist_ddp *d) {
    idist_status status;

    if (d->learnt || d->desc.hook || d->desc.find_unused || d->desc.n < 2) return IDIST_OK;
    d->learnt = true;
    status = idist__ddp_finish_learn(d);
    if (status != IDIST_OK) return status;
    if (idist__ddp_bucket_may_regroup(d)) return idist__ddp_bucket_regroup(d);
    idist__ddp_finish_reorder(d);

    return IDIST_OK;
}

// Ends an iteration.
static idist_status idist__ddp_finish(idist_ddp *d) {
    idist_opts opts = idist__ddp_opts(d, false);
    idist_status status = idist__ddp_finish_gather(d);
    int b;

    for (b = 0; b < d->bucket_count; b++)
        d->buckets[b].ready_count = d->buckets[b].exposed.gradient_count;
    if (status == IDIST_OK && d->group_size == 1)
        status = idist__ddp_fail(d, idist__ddp_check_group(d));
    if (status == IDIST_OK) status = idist__ddp_launch_full(d, true);

    if (status == IDIST_OK && d->desc.find_unused) {
        status = idist_all_reduce(d->used, d->used, (size_t)d->desc.n, IDIST_U8, IDIST_MAX, &opts);
        idist__ddp_fail(d, status);
    }

    status = idist__ddp_finish_buckets(d); // even after a failure, because it waits for requests
    if (status == IDIST_OK && !d->joining)
        status = idist__ddp_fail(d, idist__ddp_finish_scatter(d));
    if (status == IDIST_OK) status = idist__ddp_fail(d, idist__ddp_finish_follow(d));
    idist__ddp_finish_reset(d);

    return status;
}
