// train/ddp/ddp_bucket.h: which gradients share a bucket, where buckets lie, and calls of hooks
//
// Functions: idist__ddp_bucket_*, idist__ddp_hook_*.
#pragma once

#include "base/fail.h"
#include "base/isa.h"
#include "train/compress/tensor_memory.h"
#include "train/ddp/ddp_model.h"

//------------------------------------------------------------------------------
// which gradients share a bucket, and where the bucket is in memory
//------------------------------------------------------------------------------

// Assigns gradients to buckets in the given order, or from the last to the first if `order` is
// NULL. Sets bucket_of[i] to the bucket of gradient i. Each dtype has one open bucket. The gradient
// that reaches the limit closes the bucket. Buckets are numbered in the order in which they are
// opened. Returns the number of buckets.
static int idist__ddp_bucket_assign(const idist_ddp *d, const int32_t *order, int *bucket_of) {
    size_t limit = d->desc.bucket_nbytes, nbytes[IDIST_DTYPE_COUNT], limits[IDIST_DTYPE_COUNT];
    int open[IDIST_DTYPE_COUNT], i, k, count = 0;

    for (i = 0; i < IDIST_DTYPE_COUNT; i++) {
        open[i] = -1;
        nbytes[i] = 0;
        limits[i] = limit ? limit : IDIST__DDP_FIRST_NBYTES;
    }

    for (k = 0; k < d->desc.n; k++) {
        int dtype;

        i = order ? order[k] : d->desc.n - 1 - k;
        dtype = (int)d->grads[i].dtype;
        if (open[dtype] < 0) open[dtype] = count++;
        bucket_of[i] = open[dtype];
        nbytes[dtype] += idist__ddp_nbytes(&d->grads[i]);
        if (nbytes[dtype] < limits[dtype]) continue;

        open[dtype] = -1;
        nbytes[dtype] = 0;
        limits[dtype] = limit ? limit : IDIST__DDP_BUCKET_NBYTES;
    }

    return count;
}

// Returns true if a gradient can be reduced where it is. Compression and kernels need an aligned
// gradient.
static bool idist__ddp_bucket_can_view(const idist_ddp *d, const idist_tensor *gradient) {
    if (!gradient->data) return false;
    if (!d->desc.compression && !d->desc.on_device) return true;
    return (uintptr_t)gradient->data % idist_dtype_size(gradient->dtype) == 0;
}

// Returns true if buckets may be reduced in pieces (train/ddp/ddp_piece.h). The result is the same
// on all ranks.
static bool idist__ddp_bucket_may_split(const idist_ddp *d) {
    return !d->desc.hook && !d->desc.compression && !d->desc.find_unused && !d->desc.on_device;
}

// Finds the buckets whose gradients are contiguous in the program's memory, and the buckets whose
// gradients are scattered. Sets exposed.data to the memory of the first gradient.
static void idist__ddp_bucket_find_views(idist_ddp *d) {
    int b, i;

    for (b = 0; b < d->bucket_count; b++) {
        d->buckets[b].view = true;
        d->buckets[b].scattered = false;
        d->buckets[b].end = NULL;
    }

    for (i = 0; i < d->desc.n; i++) {
        const idist_tensor *gradient = &d->grads[i];
        idist__ddp_bucket *bucket = &d->buckets[d->param_states[i].bucket];
        char *data = (char *)gradient->data;

        if (!gradient->count) continue;
        if (!idist__ddp_bucket_can_view(d, gradient)) bucket->view = false;
        if (bucket->end && bucket->end != data) bucket->view = false;
        if (!data) continue;
        if (!bucket->end) bucket->exposed.data = data;
        bucket->end = data + idist__ddp_nbytes(gradient);
    }

    for (b = 0; b < d->bucket_count && idist__ddp_bucket_may_split(d); b++)
        d->buckets[b].scattered = !d->buckets[b].view && d->buckets[b].end;
}

// Returns true if a bucket needs a part of bucket_memory. A scattered bucket needs memory only for
// gradients for which the program provides none.
static bool idist__ddp_bucket_needs_memory(const idist_ddp *d, const idist__ddp_bucket *bucket) {
    int k;

    if (bucket->view || !bucket->scattered) return !bucket->view;

    for (k = 0; k < bucket->exposed.gradient_count; k++) {
        const idist_tensor *gradient = &d->grads[bucket->exposed.gradients[k]];

        if (gradient->count && !gradient->data) return true;
    }

    return false;
}

// Sets the place of each gradient in its bucket: in the program's memory, or in bucket_memory once
// bucket_memory is allocated. Returns the size that bucket_memory needs.
static size_t idist__ddp_bucket_place(idist_ddp *d) {
    size_t total = 0;
    int b, i;

    idist__ddp_bucket_find_views(d);

    for (b = 0; b < d->bucket_count; b++) {
        idist__ddp_bucket *bucket = &d->buckets[b];

        if (!bucket->view) bucket->exposed.data = NULL;

        if (idist__ddp_bucket_needs_memory(d, bucket)) {
            if (d->bucket_memory) bucket->exposed.data = (char *)d->bucket_memory + total;
            total += (idist__ddp_model_nbytes(bucket) + 63) / 64 * 64; // whole cache lines
        }

        bucket->end = (char *)bucket->exposed.data;
    }

    for (i = 0; i < d->desc.n; i++) {
        idist__ddp_param *param = &d->param_states[i];
        idist__ddp_bucket *bucket = &d->buckets[param->bucket];

        param->gradient = bucket->end;
        if (bucket->scattered && d->grads[i].data) param->gradient = d->grads[i].data;
        if (bucket->end) bucket->end += idist__ddp_nbytes(&d->grads[i]);
    }

    return total;
}

// Lists the gradients of each bucket.
static void idist__ddp_bucket_list(idist_ddp *d) {
    int b, i, k, listed = 0;

    for (b = 0; b < d->bucket_count; b++) {
        idist_bucket *exposed = &d->buckets[b].exposed;

        exposed->gradients = &d->bucket_gradients[listed];
        exposed->displs = &d->bucket_displs[listed];
        listed += exposed->gradient_count;
        exposed->gradient_count = 0; // counted again below
        exposed->count = 0;
    }

    for (i = 0; i < d->desc.n; i++) {
        idist_bucket *exposed = &d->buckets[d->param_states[i].bucket].exposed;

        k = (int)(exposed->gradients - d->bucket_gradients) + exposed->gradient_count++;
        d->bucket_gradients[k] = i;
        d->bucket_displs[k] = exposed->count;
        exposed->count += d->grads[i].count;
    }
}

// Makes bucket_count buckets, without memory. bucket_of[i] is the bucket of gradient i.
static void idist__ddp_bucket_group(idist_ddp *d, const int *bucket_of, int bucket_count) {
    int b, i;

    memset(d->buckets, 0, (size_t)bucket_count * sizeof *d->buckets);
    d->bucket_count = bucket_count;

    for (b = 0; b < bucket_count; b++) {
        d->buckets[b].exposed.index = b;
        d->launch_order[b] = b;
    }

    for (i = 0; i < d->desc.n; i++) {
        idist__ddp_bucket *bucket = &d->buckets[bucket_of[i]];

        d->param_states[i].bucket = bucket_of[i];
        bucket->exposed.dtype = d->grads[i].dtype;
        bucket->exposed.gradient_count++;
    }

    idist__ddp_bucket_list(d);
}

// Allocates the arrays that are kept per bucket or gradient, large enough for any grouping.
static idist_status idist__ddp_bucket_alloc(idist_ddp *d) {
    size_t n = (size_t)d->desc.n + 1;

    d->buckets = (idist__ddp_bucket *)calloc(n, sizeof *d->buckets);
    d->bucket_of = (int *)malloc(n * sizeof *d->bucket_of);
    d->bucket_gradients = (int *)malloc(n * sizeof *d->bucket_gradients);
    d->bucket_displs = (size_t *)malloc(n * sizeof *d->bucket_displs);
    d->launch_order = (int32_t *)malloc(n * sizeof *d->launch_order);
    d->arrival_order = (int32_t *)malloc(n * sizeof *d->arrival_order);
    d->in_pieces = (uint8_t *)calloc(n, 1);
    if (d->buckets && d->bucket_of && d->bucket_gradients && d->bucket_displs && d->launch_order &&
        d->arrival_order && d->in_pieces)
        return IDIST_OK;

    return idist__ddp_no_memory();
}

// Allocates one slot for each piece that can be in flight. A bucket that is contiguous on this rank
// may also be reduced in pieces, because it is scattered on another rank. Its pieces are counted
// too, because each takes an entry of d->slots, although it needs no memory. Sets in_pieces for the
// buckets that are scattered on this rank.
static idist_status idist__ddp_bucket_alloc_slots(idist_ddp *d) {
    size_t count = 0;
    bool any = false;
    void *memory = NULL;
    int b;
    idist_status status;

    for (b = 0; b < d->bucket_count; b++) {
        d->in_pieces[b] = d->buckets[b].scattered;
        any = any || d->buckets[b].scattered;
        count += idist__ddp_model_nbytes(&d->buckets[b]) / d->piece_nbytes + 1;
    }

    if (count > d->slot_limit) count = d->slot_limit;
    if (!any || count <= d->slot_count) return IDIST_OK;
    status = idist__tensor_memory_alloc(&d->reduction.memory, &memory, count * d->piece_nbytes);
    if (status != IDIST_OK) return status;

    idist__tensor_memory_free(&d->reduction.memory, d->slot_memory);
    d->slot_memory = (char *)memory;
    d->slot_count = count;

    return IDIST_OK;
}

// Forms the buckets and gives each gradient its place. Local.
static idist_status idist__ddp_bucket_form(idist_ddp *d) {
    size_t total;
    int i;
    idist_status status = idist__ddp_bucket_alloc(d);

    if (status != IDIST_OK) return status;
    idist__ddp_bucket_group(d, d->bucket_of, idist__ddp_bucket_assign(d, NULL, d->bucket_of));
    total = idist__ddp_bucket_place(d);

    if (total) {
        status = idist__tensor_memory_alloc(&d->reduction.memory, &d->bucket_memory, total);
        if (status != IDIST_OK) return status;
        idist__ddp_bucket_place(d);
    }

    for (i = 0; i < d->desc.n; i++) {
        const idist__ddp_param *param = &d->param_states[i];

        if (!d->grads[i].data) d->grads[i].data = param->gradient;
        if (d->grads[i].count && d->grads[i].data != param->gradient) d->copies = true;
    }

    return idist__ddp_bucket_alloc_slots(d);
}

// Returns true if gradients may move to other buckets. They may if any bucket is reduced in pieces.
// Otherwise gradients that are reduced in place would have to be copied. The result is the same on
// all ranks.
static bool idist__ddp_bucket_may_regroup(const idist_ddp *d) {
    int b;

    for (b = 0; b < d->bucket_count; b++)
        if (d->in_pieces[b]) return true;

    return false;
}

// Sets in_pieces on all ranks for the buckets that are scattered on any rank. Collective.
static idist_status idist__ddp_bucket_agree(idist_ddp *d) {
    idist_opts opts = idist__ddp_opts(d, false);

    if (!idist__ddp_bucket_may_split(d)) return IDIST_OK;
    return idist_all_reduce(d->in_pieces, d->in_pieces, (size_t)d->bucket_count, IDIST_U8,
                            IDIST_MAX, &opts);
}

// Forms buckets from gradients in the order of arrival, unless the buckets would stay the same.
// Gradients stay where they are. Called between iterations. Collective.
static idist_status idist__ddp_bucket_regroup(idist_ddp *d) {
    int i, count = idist__ddp_bucket_assign(d, d->arrival_order, d->bucket_of);
    bool changes = false;
    idist_status status;

    for (i = 0; i < d->desc.n; i++)
        changes = changes || d->bucket_of[i] != d->param_states[i].bucket;
    if (!changes) return IDIST_OK;

    idist__ddp_bucket_group(d, d->bucket_of, count);
    idist__ddp_bucket_place(d);
    status = idist__ddp_bucket_alloc_slots(d);

    return status == IDIST_OK ? idist__ddp_bucket_agree(d) : status;
}

//------------------------------------------------------------------------------
// calling the communication hook
//
// A hook computes with gradients, so it runs in a floating-point mode that is the same on all
// ranks. A hook of the program may throw an exception if the implementation is compiled as C++.
//------------------------------------------------------------------------------

typedef enum idist__ddp_stage { IDIST__DDP_START, IDIST__DDP_FINISH } idist__ddp_stage;

IDIST__NOINLINE static idist_status idist__ddp_hook_start(const idist_ddp *d,
                                                          idist_bucket *bucket) {
    uint32_t mode = idist__mode_enter();
    idist_status status = IDIST_ERR_CALLBACK;

    IDIST__TRY(status = d->hook.start(bucket, d->hook.arg));
    idist__mode_leave(mode);
    return idist__callback_threw("ddp", "the hook's start") ? IDIST_ERR_CALLBACK : status;
}

IDIST__NOINLINE static idist_status idist__ddp_hook_finish(const idist_ddp *d,
                                                           idist_bucket *bucket) {
    uint32_t mode = idist__mode_enter();
    idist_status status = IDIST_ERR_CALLBACK;

    IDIST__TRY(status = d->hook.finish(bucket, d->hook.arg));
    idist__mode_leave(mode);
    return idist__callback_threw("ddp", "the hook's finish") ? IDIST_ERR_CALLBACK : status;
}

// Frees a state of the hook. Ignores an exception that free_fn throws, because the state is no
// longer needed.
IDIST__NOINLINE static void idist__ddp_hook_free(const idist_ddp *d, void *state) {
    IDIST__TRY(d->hook.free_fn(state, d->hook.arg));
    idist__me.thrown[0] = 0;
}
