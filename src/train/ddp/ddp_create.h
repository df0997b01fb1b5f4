// train/ddp/ddp_create.h: creates a ddp from a desc, and frees it
//
//     idist__ddp_create_copy         copies the caller's lists
//     idist__ddp_create_check        checks the lists and the desc
//     idist__ddp_bucket_form         forms the buckets
//     idist__ddp_create_set_hook     chooses the hook, and allocates the state of a compression
//     idist__ddp_create_agree        collective: compares arguments, and fails if any rank failed
//     idist__ddp_bucket_agree        collective: agrees on the buckets that are reduced in pieces
//     idist__ddp_create_broadcast    collective: copies rank 0's parameters and buffers to all
#pragma once

#include "base/fail.h"
#include "base/text.h"
#include "base/log.h"
#include "base/dtype.h"
#include "core/model.h"
#include "core/world.h"
#include "train/agree.h"
#include "train/auto.h"
#include "train/tensor.h"
#include "train/compress/tensor_memory.h"
#include "train/compress/compress.h"
#include "train/compress/powersgd.h"
#include "train/compress/on_device.h"
#include "train/ddp/ddp_model.h"
#include "train/ddp/ddp_bucket.h"

// Starts the built-in reduction of a bucket. This is the `start` function of the hook that does not
// compress.
static idist_status idist__ddp_create_start(idist_bucket *b, void *arg) {
    const idist__reduction *reduction = (const idist__reduction *)arg;

    if (reduction->group_size == 1) return IDIST_OK; // the sum over one rank is the bucket itself
    return idist_all_reduce(b->data, b->data, b->count, b->dtype, reduction->op, &b->opts);
}

static idist_status idist__ddp_create_finish(idist_bucket *b, void *arg) {
    const idist__reduction *reduction = (const idist__reduction *)arg;

    return idist__tensor_memory_scale(&reduction->memory, b->data, b->count, b->dtype,
                                      reduction->postscale);
}

// The hooks on the host, indexed by idist_compression. An entry without functions is not a valid
// compression.
static const idist_ddp_hook idist__ddp_host_hooks[] = {
    {idist__ddp_create_start, idist__ddp_create_finish, NULL, NULL},
    {idist__half_start, idist__half_finish, idist__compress_free, NULL},
    {idist__half_start, idist__half_finish, idist__compress_free, NULL},
    {NULL, NULL, NULL, NULL},
    {idist__powersgd_start, idist__powersgd_finish, idist__powersgd_free, NULL},
};

#ifdef IDIST_NCCL_H
static const idist_ddp_hook idist__ddp_device_hooks[] = {
    {idist__ddp_create_start, idist__ddp_create_finish, NULL, NULL},
    {idist__on_device_half_start, idist__on_device_half_finish, idist__compress_free, NULL},
    {idist__on_device_half_start, idist__on_device_half_finish, idist__compress_free, NULL},
};
#endif

static bool idist__ddp_create_has_factors(const idist_ddp_desc *desc) {
    if (desc->prescale != 0 && desc->prescale != 1) return true;
    if (desc->postscale != 0 && desc->postscale != 1) return true;
    return desc->divide_by_active;
}

// Allocates the state that a compression needs for each bucket. Local.
static idist_status idist__ddp_create_compression(idist_ddp *d) {
    idist_status status = IDIST_OK;
    int b;

    for (b = 0; b < d->bucket_count && status == IDIST_OK; b++) {
        idist_bucket *exposed = &d->buckets[b].exposed;

        if (d->desc.compression == IDIST_COMPRESS_POWERSGD)
            status = idist__powersgd_alloc(&d->reduction, exposed);
        else status = idist__compress_alloc(&d->reduction, exposed);
    }

    return status;
}

// Chooses the hook and allocates the state of a compression. Local.
static idist_status idist__ddp_create_set_hook(idist_ddp *d) {
    const idist_ddp_desc *desc = &d->desc;
    idist_status status = IDIST_OK;

    if (desc->on_device) // kernels compress and scale
        status =
            IDIST__OWN(idist__own_ready("ddp_create", &d->reduction.memory.opts,
                                        desc->compression || idist__ddp_create_has_factors(desc)));

    d->reduction.wire = desc->compression == IDIST_COMPRESS_F16 ? IDIST_F16 : IDIST_BF16;
    d->hook = idist__ddp_host_hooks[desc->compression];
#ifdef IDIST_NCCL_H
    if (desc->on_device) d->hook = idist__ddp_device_hooks[desc->compression];
#endif
    d->hook.arg = &d->reduction;
    if (desc->hook) d->hook = *desc->hook;
    if (status == IDIST_OK && desc->compression) status = idist__ddp_create_compression(d);

    return status;
}

static idist_status idist__ddp_create_check_gradient(const idist_ddp_desc *desc,
                                                     const idist_tensor *gradient, int i) {
    bool float_or_double = gradient->dtype == IDIST_F32 || gradient->dtype == IDIST_F64;
    bool can_scale = idist__dtype_is_float(gradient->dtype);

    if (!idist__dtype_is_builtin(gradient->dtype) || idist__dtype_is_pair(gradient->dtype))
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "ddp_create: gradient %d is %s, which cannot be summed", i,
                           idist_dtype_name(gradient->dtype));
    if (gradient->count != desc->params[i].count)
        return idist__fail(IDIST_ERR_ARG,
                           "ddp_create: parameter %d has %zu elements, but its gradient has %zu", i,
                           desc->params[i].count, gradient->count);

    if (desc->on_device) {
        float_or_double = gradient->dtype == IDIST_F32;
        if (idist__dtype_is_narrow(gradient->dtype) && idist_dtype_size(gradient->dtype) == 1)
            can_scale = false;
    }

    if (desc->compression && !float_or_double)
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "ddp_create: compression needs %s; gradient %d is %s",
                           desc->on_device ? "F32 on the device" : "F32 or F64", i,
                           idist_dtype_name(gradient->dtype));
    if (idist__ddp_create_has_factors(desc) && !can_scale)
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "ddp_create: factors need F16, BF16, F32 or F64%s; gradient %d is %s",
                           desc->on_device ? " on the device" : " or 8-bit floats", i,
                           idist_dtype_name(gradient->dtype));

    return IDIST_OK;
}

static idist_status idist__ddp_create_check_lists(const idist_ddp_desc *desc) {
    const char *name = "ddp_create";
    char a[IDIST__NUMBER_NBYTES], b[IDIST__NUMBER_NBYTES];
    idist_status status;

    if (desc->n < 1)
        return idist__fail(IDIST_ERR_ARG, "ddp_create: n must be positive, got %d parameters",
                           desc->n);
    if (desc->prescale - desc->prescale != 0 || desc->postscale - desc->postscale != 0)
        return idist__fail(IDIST_ERR_ARG,
                           "ddp_create: prescale and postscale must be finite, got %s and %s",
                           idist__number_print(a, desc->prescale, 6),
                           idist__number_print(b, desc->postscale, 6));

    status = idist__tensor_check(name, "parameter", desc->params, desc->n, true);
    if (status == IDIST_OK && desc->grads)
        status = idist__tensor_check(name, "gradient", desc->grads, desc->n, false);
    if (status == IDIST_OK)
        status = idist__tensor_check(name, "buffer", desc->buffers, desc->n_buffers, true);

    return status;
}

static idist_status idist__ddp_create_check_powersgd(const idist_ddp_desc *desc) {
    int i;
    idist_status status;

    if (desc->compression != IDIST_COMPRESS_POWERSGD) {
        if (!desc->powersgd) return IDIST_OK;
        return idist__fail(IDIST_ERR_ARG, "ddp_create: powersgd is set, but compression is not "
                                          "IDIST_COMPRESS_POWERSGD");
    }

    if (desc->find_unused || desc->on_device)
        return idist__fail(IDIST_ERR_UNSUPPORTED, "ddp_create: PowerSGD cannot be combined with %s",
                           desc->find_unused ? "find_unused" : "on_device");
    if (!desc->powersgd) return IDIST_OK;
    status = idist__powersgd_check(desc->powersgd);

    for (i = 0; i < desc->n && desc->powersgd->rows && status == IDIST_OK; i++) {
        size_t rows = desc->powersgd->rows[i], count = desc->params[i].count;

        if (rows && count % rows)
            status = idist__fail(
                IDIST_ERR_ARG,
                "ddp_create: the %zu elements of gradient %d do not divide into %zu rows", count, i,
                rows);
    }

    return status;
}

// Checks that gradients do not overlap in memory. Overlapping gradients, for example of tied
// weights, would be summed more than once.
static idist_status idist__ddp_create_check_overlap(const idist_ddp *d) {
    int first, second;
    idist_status status =
        idist__tensor_find_overlap("ddp_create", d->grads, d->desc.n, &first, &second);

    if (status != IDIST_OK || first < 0) return status;

    return idist__fail(
        IDIST_ERR_ARG,
        "ddp_create: gradients %d and %d overlap in memory; list a parameter that is "
        "used twice only once",
        first, second);
}

// Checks that no gradient is in device memory unless on_device is set. Without on_device, the host
// itself copies gradients that are not contiguous, so they must be in host memory. The check works
// only if idist_nccl.h was included before idist_train.h.
static idist_status idist__ddp_create_check_device(const idist_ddp *d) {
    int i;

    for (i = 0; i < d->desc.n && !d->desc.on_device; i++) {
        bool on_device;
        idist_status status =
            idist__tensor_memory_on_device(&d->reduction.memory, d->grads[i].data, &on_device);

        if (status != IDIST_OK) return status;
        if (!on_device) continue;
        return idist__fail(IDIST_ERR_ARG,
                           "ddp_create: gradient %d is in device memory: set on_device, or give "
                           "host memory",
                           i);
    }

    return IDIST_OK;
}

// Checks the desc and its lists. Local.
static idist_status idist__ddp_create_check(const idist_ddp *d) {
    const idist_ddp_desc *desc = &d->desc;
    size_t total = 0;
    int i;
    idist_status status = idist__ddp_create_check_lists(desc);

    if (status != IDIST_OK) return status;
    if (desc->compression && desc->hook)
        return idist__fail(IDIST_ERR_ARG, "ddp_create: compression and a hook cannot be combined");
    if ((unsigned)desc->compression > IDIST_COMPRESS_POWERSGD ||
        !idist__ddp_host_hooks[desc->compression].start)
        return idist__fail(IDIST_ERR_ARG, "ddp_create: invalid compression %d",
                           (int)desc->compression);
    status = idist__ddp_create_check_powersgd(desc);
    if (status != IDIST_OK) return status;
    if (desc->hook && (!desc->hook->start || !desc->hook->finish))
        return idist__fail(IDIST_ERR_ARG, "ddp_create: the hook's start or finish is NULL");

    for (i = 0; i < desc->n; i++) {
        total += idist__ddp_nbytes(&d->grads[i]);
        if (total > SIZE_MAX / 4)
            return idist__fail(IDIST_ERR_ARG,
                               "ddp_create: gradients 0 to %d together exceed the address space",
                               i);
        status = idist__ddp_create_check_gradient(desc, &d->grads[i], i);
        if (status != IDIST_OK) return status;
    }

    status = idist__ddp_create_check_overlap(d);
    return status == IDIST_OK ? idist__ddp_create_check_device(d) : status;
}

// Copies the caller's lists, which have not been checked yet. Allocates the arrays that have one
// element per list entry, and has_data, which has one per rank.
static idist_status idist__ddp_create_copy(idist_ddp *d) {
    const idist_ddp_desc *desc = &d->desc;
    size_t n = desc->n > 0 ? (size_t)desc->n : 0, i;
    size_t buffer_count = desc->n_buffers > 0 ? (size_t)desc->n_buffers : 0;

    d->params = (idist_tensor *)calloc(n + 1, sizeof *d->params);
    d->grads = (idist_tensor *)calloc(n + 1, sizeof *d->grads);
    d->buffers = (idist_tensor *)calloc(buffer_count + 1, sizeof *d->buffers);
    d->param_states = (idist__ddp_param *)calloc(n + 1, sizeof *d->param_states);
    d->used = (uint8_t *)malloc(n + 1);
    d->has_data = (uint8_t *)calloc((size_t)d->group_size, 1);
    if (!d->params || !d->grads || !d->buffers || !d->param_states || !d->used || !d->has_data)
        return idist__ddp_no_memory();
    memset(d->used, 1, n + 1);

    for (i = 0; i < n && desc->params; i++) {
        d->params[i] = desc->params[i];
        d->grads[i] = desc->params[i];
        d->grads[i].data = NULL;
        if (desc->grads) d->grads[i] = desc->grads[i];
    }

    for (i = 0; i < buffer_count && desc->buffers; i++) d->buffers[i] = desc->buffers[i];

    return IDIST_OK;
}

// Chooses the number and size of pieces in flight. The choice is the same on all ranks.
static void idist__ddp_create_set_pieces(idist_ddp *d) {
    const idist_group *group = d->desc.group;
    const idist__world *world = group ? group->w : idist__world_default();
    bool one_host = !world || world->nnodes == 1;

    d->slot_limit = one_host ? IDIST__DDP_SLOTS_NEAR : IDIST__DDP_SLOTS;
    d->pieces_overlap = !one_host || !world || !world->backend->takes_parts;
    d->piece_nbytes = one_host ? IDIST__DDP_PIECE_NEAR_NBYTES : IDIST__DDP_PIECE_NBYTES;
}

// Number of options that must be equal on all ranks.
enum { IDIST__DDP_OPTIONS = 13 };

static void idist__ddp_create_options(const idist_ddp_desc *desc, idist__shape *shapes) {
    double postscale = desc->postscale != 0 ? desc->postscale : 1;
    int64_t bits;
    int i = 0;

    memcpy(&bits, &postscale, sizeof bits);
    shapes[i++] = idist__shape_of_option("number of parameters", desc->n);
    shapes[i++] = idist__shape_of_option("number of buffers", desc->n_buffers);
    shapes[i++] = idist__shape_of_option("bucket_nbytes", (int64_t)desc->bucket_nbytes);
    shapes[i++] = idist__shape_of_option("compression", desc->compression);
    shapes[i] = idist__shape_of_option("postscale", bits);
    shapes[i++].dtype = IDIST__SHAPE_REAL;
    shapes[i++] = idist__shape_of_option("sum", desc->sum);
    shapes[i++] = idist__shape_of_option("keep_params", desc->keep_params);
    shapes[i++] = idist__shape_of_option("find_unused", desc->find_unused);
    shapes[i++] = idist__shape_of_option("uneven", desc->uneven);
    shapes[i++] = idist__shape_of_option("divide_by_active", desc->divide_by_active);
    shapes[i++] = idist__shape_of_option("on_device", desc->on_device);
    shapes[i++] = idist__shape_of_option("powersgd (a checksum over its options)",
                                         idist__powersgd_digest(desc->powersgd, desc->n));
    shapes[i] = idist__shape_of_option("hook", desc->hook != NULL);
}

// Checks that all ranks have the same arguments, and that no rank has failed so far. Collective.
static idist_status idist__ddp_create_agree(const idist_ddp *d, idist_status mine) {
    int n = d->desc.n, buffer_count = d->desc.n_buffers, count = 0;
    idist_opts opts = idist__ddp_opts(d, false);
    idist__shape *shapes = NULL, *next;
    idist_status status;

    if (mine == IDIST_OK) {
        count = IDIST__DDP_OPTIONS + 2 * n + buffer_count;
        shapes = (idist__shape *)calloc((size_t)count, sizeof *shapes);
        if (!shapes) mine = idist__ddp_no_memory();
    }

    if (shapes) {
        idist__ddp_create_options(&d->desc, shapes);
        next = shapes + IDIST__DDP_OPTIONS;
        idist__shape_of_tensors(next, "parameter", d->params, n);
        idist__shape_of_tensors(next + n, "gradient", d->grads, n);
        idist__shape_of_tensors(next + 2 * n, "buffer", d->buffers, buffer_count);
    }

    status = idist__shape_agree("ddp_create", shapes, IDIST__DDP_OPTIONS, count, mine, 0, &opts);
    free(shapes);

    return status;
}

// Copies the parameters and buffers of rank 0 to all ranks. Collective.
static idist_status idist__ddp_create_broadcast(const idist_ddp *d) {
    idist_opts opts = idist__ddp_opts(d, d->desc.on_device);
    idist_status status = IDIST_OK;

    if (!d->desc.keep_params) status = idist__tensor_broadcast(d->params, d->desc.n, 0, &opts);
    if (status == IDIST_OK && !d->desc.keep_params)
        status = idist__tensor_broadcast(d->buffers, d->desc.n_buffers, 0, &opts);
    if (status != IDIST_OK) return status;
    opts.stream = NULL;

    return idist__agree(status, &opts);
}

// Returns true if this rank copies no gradient of a bucket.
static bool idist__ddp_create_in_place(const idist_ddp *d, const idist__ddp_bucket *bucket) {
    int k;

    if (bucket->scattered) return false;

    for (k = 0; k < bucket->exposed.gradient_count; k++) {
        int i = bucket->exposed.gradients[k];

        if (d->grads[i].count && d->grads[i].data != d->param_states[i].gradient) return false;
    }

    return true;
}

// Logs what was created, as Ignite's auto_model does. Only the first rank of the group logs.
static void idist__ddp_create_log(const idist_ddp *d) {
    static const char *const encodings[] = {"as they are", "as F16", "as BF16", NULL,
                                            "by PowerSGD"};
    const char *encoding = d->desc.hook ? "by a hook" : encodings[d->desc.compression];
    int b, in_place = 0;
    size_t nbytes = 0;
    idist__log without_world;
    const idist__log *log = idist__auto_log_of(d->desc.group, &without_world);

    if (!log || idist_group_rank(d->desc.group) > 0) return;

    for (b = 0; b < d->bucket_count; b++) {
        in_place += idist__ddp_create_in_place(d, &d->buckets[b]);
        nbytes += idist__ddp_model_nbytes(&d->buckets[b]);
    }

    idist__log_print(log, IDIST_LOG_INFO,
                     "ddp_create: %d gradients, %zu bytes in %d buckets, %d of them in place; "
                     "%s over %d ranks, sent %s%s%s",
                     d->desc.n, nbytes, d->bucket_count, in_place,
                     d->desc.sum ? "summed" : "averaged", d->group_size, encoding,
                     d->desc.find_unused ? ", find_unused" : "", d->desc.uneven ? ", uneven" : "");
}

idist_status idist_ddp_create(const idist_ddp_desc *desc, idist_ddp **ddp) {
    idist_ddp *d;
    idist_opts own, opts;
    idist_status status;

    if (!desc || !ddp) return idist__fail(IDIST_ERR_ARG, "ddp_create: desc or ddp is NULL");
    *ddp = NULL;
    memset(&own, 0, sizeof own);
    own.group = desc->group;
    own.timeout_ms = desc->timeout_ms;
    status = idist__agree_enter("ddp_create", &own, &opts);
    if (status != IDIST_OK) return status;
    d = (idist_ddp *)calloc(1, sizeof *d);
    if (!d) return idist__agree(idist__ddp_no_memory(), &opts);

    d->name = "ddp";
    d->desc = *desc;
    d->group_size = idist_group_size(desc->group);
    d->rank = idist_group_rank(desc->group);
    d->active_count = d->group_size;
    d->last_active = d->group_size - 1;
    d->iteration = 1;
    idist__ddp_create_set_pieces(d);
    d->reduction.group_size = d->group_size;
    d->reduction.memory.on_device = desc->on_device;
    d->reduction.memory.opts = idist__ddp_opts(d, desc->on_device);
    d->reduction.powersgd = idist__powersgd_resolve(desc->powersgd);
    idist__ddp_set_scale(d);

    status = idist__ddp_create_copy(d);
    if (status == IDIST_OK) status = idist__ddp_create_check(d);
    if (status == IDIST_OK) status = idist__ddp_bucket_form(d);
    if (status == IDIST_OK) status = idist__ddp_create_set_hook(d);
    status = idist__ddp_create_agree(d, status);
    if (status == IDIST_OK) status = idist__ddp_bucket_agree(d);
    if (status == IDIST_OK) status = idist__ddp_create_broadcast(d);

    if (status == IDIST_OK) {
        idist__ddp_create_log(d);
        *ddp = d;
    } else {
        idist_ddp_free(&d);
    }

    return status;
}

void idist_ddp_free(idist_ddp **ddp) {
    idist_ddp *d = ddp ? *ddp : NULL;
    const idist__memory *memory;
    int b, k;

    if (!d) return;
    *ddp = NULL;

    for (k = 0; k < IDIST__DDP_SLOTS; k++) idist_wait(&d->slots[k].request);

    for (b = 0; b < d->bucket_count && d->buckets; b++) {
        idist__ddp_bucket *bucket = &d->buckets[b];

        idist_wait(&bucket->request);
        if (bucket->exposed.state && d->hook.free_fn)
            idist__ddp_hook_free(d, bucket->exposed.state);
    }

    memory = &d->reduction.memory;
    idist__tensor_memory_free(memory, d->bucket_memory);
    idist__tensor_memory_free(memory, d->slot_memory);
    idist__tensor_memory_free(memory, d->saved_grads);
    free(d->buckets);
    free(d->bucket_of);
    free(d->launch_order);
    free(d->arrival_order);
    free(d->in_pieces);
    free(d->bucket_gradients);
    free(d->bucket_displs);
    free(d->params);
    free(d->grads);
    free(d->buffers);
    free(d->param_states);
    free(d->used);
    free(d->has_data);
    free(d);
}

void *idist_ddp_grad(const idist_ddp *d, int i) {
    return d && i >= 0 && i < d->desc.n ? d->grads[i].data : NULL;
}

int idist_ddp_bucket(const idist_ddp *d, int i) {
    return d && i >= 0 && i < d->desc.n ? d->param_states[i].bucket : -1;
}

int idist_ddp_buckets(const idist_ddp *d) { return d ? d->bucket_count : 0; }

bool idist_ddp_used(const idist_ddp *d, int i) {
    return d && i >= 0 && i < d->desc.n && d->used[i];
}

int idist_ddp_active(const idist_ddp *d) { return d ? d->active_count : 0; }
