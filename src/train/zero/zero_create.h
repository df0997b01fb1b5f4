// train/zero/zero_create.h: creates an idist_zero from a desc, and frees it
#pragma once

#include "base/fail.h"
#include "train/agree.h"
#include "train/tensor.h"
#include "train/compress/tensor_memory.h"
#include "train/ddp/ddp_model.h"
#include "train/zero/zero_model.h"

//------------------------------------------------------------------------------
// the communication hook of the ddp
//------------------------------------------------------------------------------

// Starts to average a bucket. Afterwards the range of this rank has the result.
static idist_status idist__zero_create_start(idist_bucket *bucket, void *arg) {
    const idist_zero *z = (const idist_zero *)arg;
    const idist__zero_bucket *own = &z->buckets[bucket->index];
    char *range = idist__zero_at(bucket, bucket->data, own->first);

    if (z->group_size == 1) return IDIST_OK; // the average over one rank is the bucket itself
    if (bucket->count % (size_t)z->group_size == 0) // NCCL has no reduce_scatterv
        return idist_reduce_scatter(bucket->data, range, own->counts[0], bucket->dtype, IDIST_AVG,
                                    &bucket->opts);

    return idist_reduce_scatterv(bucket->data, range, own->counts, bucket->dtype, IDIST_AVG,
                                 &bucket->opts);
}

// Converts the average of F16 and BF16 gradients to F32.
static idist_status idist__zero_create_finish(idist_bucket *bucket, void *arg) {
    const idist_zero *z = (const idist_zero *)arg;
    const idist__zero_bucket *own = &z->buckets[bucket->index];

    if (!idist__zero_is_narrow(bucket)) return IDIST_OK;

    return idist__zero_convert(z, bucket, idist__zero_at(bucket, bucket->data, own->first),
                               z->grads + own->offset, own->counts[z->rank], false);
}

//------------------------------------------------------------------------------
// creating
//------------------------------------------------------------------------------

// Checks that no parameter overlaps another one or a gradient in memory. Otherwise two ranks could
// update the same elements.
static idist_status idist__zero_create_check_overlap(const idist_zero_desc *desc) {
    int n = desc->n, count = desc->grads ? 2 * n : n, first, second;
    idist_tensor *all = (idist_tensor *)malloc(((size_t)count + 1) * sizeof *all);
    idist_status status;

    if (!all) return idist__fail(IDIST_ERR_NO_MEMORY, "zero_create: no memory");
    if (n) memcpy(all, desc->params, (size_t)n * sizeof *all);
    if (n && desc->grads) memcpy(all + n, desc->grads, (size_t)n * sizeof *all);
    status = idist__tensor_find_overlap("zero_create", all, count, &first, &second);
    free(all);

    if (status != IDIST_OK || first < 0) return status;
    if (first >= n)
        return idist__fail(IDIST_ERR_ARG, "zero_create: gradients %d and %d overlap in memory",
                           first - n, second - n);
    if (second >= n)
        return idist__fail(IDIST_ERR_ARG,
                           "zero_create: parameter %d and gradient %d overlap in memory", first,
                           second - n);

    return idist__fail(IDIST_ERR_ARG,
                       "zero_create: parameters %d and %d overlap in memory; list a parameter that "
                       "is used twice only once",
                       first, second);
}

static idist_status idist__zero_create_check(const idist_zero_desc *desc) {
    const char *name = "zero_create";
    int i;
    idist_status status = idist__tensor_check(name, "parameter", desc->params, desc->n, true);

    if (status == IDIST_OK && desc->grads)
        status = idist__tensor_check(name, "gradient", desc->grads, desc->n, false);
    if (status != IDIST_OK) return status;
    if (desc->n < 1)
        return idist__fail(IDIST_ERR_ARG, "%s: n must be positive, got %d parameters", name,
                           desc->n);
    if (desc->states < 0 || desc->states > IDIST__ZERO_STATES)
        return idist__fail(IDIST_ERR_ARG, "%s: states must be from 0 to %d, got %d", name,
                           IDIST__ZERO_STATES, desc->states);

    for (i = 0; i < desc->n; i++) {
        idist_dtype dtype = desc->params[i].dtype;

        if (dtype != IDIST_F32 && dtype != IDIST_F16 && dtype != IDIST_BF16)
            return idist__fail(IDIST_ERR_UNSUPPORTED,
                               "%s: parameters must be F32, F16 or BF16; parameter %d is %s", name,
                               i, idist_dtype_name(dtype));
        if (desc->grads && desc->grads[i].dtype != dtype)
            return idist__fail(IDIST_ERR_UNSUPPORTED,
                               "%s: parameter %d is %s, but its gradient is %s", name, i,
                               idist_dtype_name(dtype), idist_dtype_name(desc->grads[i].dtype));
        if (desc->grads && desc->grads[i].count != desc->params[i].count)
            return idist__fail(IDIST_ERR_ARG,
                               "%s: parameter %d has %zu elements, but its gradient has %zu", name,
                               i, desc->params[i].count, desc->grads[i].count);
    }

    return idist__zero_create_check_overlap(desc);
}

// Creates the ddp, whose hook uses `z` from the first iteration on. Collective.
static idist_status idist__zero_create_ddp(idist_zero *z, const idist_zero_desc *desc) {
    idist_ddp_hook hook;
    idist_ddp_desc ddp;
    idist_status status;

    memset(&hook, 0, sizeof hook);
    hook.start = idist__zero_create_start;
    hook.finish = idist__zero_create_finish;
    hook.arg = z;

    memset(&ddp, 0, sizeof ddp);
    ddp.params = desc->params;
    ddp.grads = desc->grads;
    ddp.n = desc->n;
    ddp.group = desc->group;
    ddp.bucket_nbytes = desc->bucket_nbytes;
    ddp.hook = &hook;
    ddp.on_device = desc->on_device;
    ddp.stream = desc->stream;
    ddp.timeout_ms = desc->timeout_ms;
    status = idist_ddp_create(&ddp, &z->ddp);
    if (status != IDIST_OK) return status;
    z->ddp->name = "zero";
    z->ddp->results_stay = true;

    return IDIST_OK;
}

// Returns the memory of a bucket's parameters if they lie there one after the other. Otherwise
// returns NULL.
static char *idist__zero_create_find_params(const idist_zero *z, const idist_bucket *bucket) {
    char *begin = NULL, *end = NULL;
    int k;

    for (k = 0; k < bucket->gradient_count; k++) {
        const idist_tensor *param = &z->ddp->params[bucket->gradients[k]];

        if (!param->count) continue;
        if (end && end != (char *)param->data) return NULL;
        if (!begin) begin = (char *)param->data;
        end = (char *)param->data + idist__ddp_nbytes(param);
    }

    return begin;
}

// Cuts a bucket into ranges, and counts the shards in the range of this rank.
static void idist__zero_create_ranges(idist_zero *z, int b) {
    const idist_bucket *bucket = idist__zero_exposed(z, b);
    idist__zero_bucket *own = &z->buckets[b];
    size_t end;
    int rank, k;

    own->counts = z->bucket_counts + (size_t)b * (size_t)z->group_size;
    for (rank = 0; rank < z->group_size; rank++)
        own->counts[rank] =
            idist__zero_begin(z, bucket, rank + 1) - idist__zero_begin(z, bucket, rank);

    own->param_memory = idist__zero_create_find_params(z, bucket);
    own->first = idist__zero_begin(z, bucket, z->rank);
    own->offset = z->shard_elements;
    own->first_shard = z->shard_count;
    end = own->first + own->counts[z->rank];
    if (idist__zero_is_narrow(bucket)) z->has_masters = true;

    for (k = 0; k < bucket->gradient_count; k++) {
        int param = bucket->gradients[k];
        size_t begin_k = bucket->displs[k], end_k = begin_k + z->ddp->params[param].count;

        z->shard_of[param] = -1;
        if (begin_k < own->first) begin_k = own->first;
        if (end_k > end) end_k = end;
        if (begin_k >= end_k) continue;

        z->shard_of[param] = z->shard_count;
        z->shards[z->shard_count].param = param;
        z->shards[z->shard_count].first = begin_k - bucket->displs[k];
        z->shards[z->shard_count++].count = end_k - begin_k;
    }

    own->shard_count = z->shard_count - own->first_shard;
    z->shard_elements += own->counts[z->rank];
}

// Sets the arrays of the shards of a bucket.
static void idist__zero_create_place(idist_zero *z, int b) {
    const idist_bucket *bucket = idist__zero_exposed(z, b);
    const idist__zero_bucket *own = &z->buckets[b];
    size_t offset = own->offset, total = z->shard_elements;
    float *states = z->memory + (z->has_masters ? 2 * total : 0);
    int s, j;

    for (s = own->first_shard; s < own->first_shard + own->shard_count; s++) {
        idist_shard *shard = &z->shards[s];
        size_t in_bucket = own->first + offset - own->offset;

        if (idist__zero_is_narrow(bucket)) {
            shard->weights = z->masters + offset;
            shard->grad = z->grads + offset;
        } else {
            shard->weights = (float *)z->ddp->params[shard->param].data + shard->first;
            shard->grad = (float *)bucket->data + in_bucket;
        }

        for (j = 0; j < z->states; j++) shard->states[j] = states + (size_t)j * total + offset;
        z->shard_grads[s].data = shard->grad;
        z->shard_grads[s].count = shard->count;
        z->shard_grads[s].dtype = IDIST_F32;
        offset += shard->count;
    }
}

// Sets the master weights of this rank to its parameters.
static idist_status idist__zero_create_masters(const idist_zero *z) {
    idist_status status = IDIST_OK;
    int s;

    for (s = 0; s < z->shard_count && status == IDIST_OK; s++) {
        const idist_shard *shard = &z->shards[s];
        const idist_tensor *param = &z->ddp->params[shard->param];
        const idist_bucket *bucket =
            idist__zero_exposed(z, z->ddp->param_states[shard->param].bucket);

        if (!idist__zero_is_narrow(bucket)) continue;
        status = idist__zero_convert(z, bucket, idist__zero_at(bucket, param->data, shard->first),
                                     shard->weights, shard->count, false);
    }

    return status;
}

// Allocates zeroed memory for the arrays of all shards.
static idist_status idist__zero_create_memory(idist_zero *z, size_t count) {
    const idist__memory *memory = &z->ddp->reduction.memory;
    void *data = NULL;
    idist_status status = IDIST_OK;

    if (memory->on_device)
        status = idist__tensor_memory_alloc(memory, &data, count * sizeof(float));
    else data = calloc(count, sizeof(float));
    z->memory = (float *)data;
    if (status != IDIST_OK || z->memory) return status;

    return idist__fail(IDIST_ERR_NO_MEMORY, "zero_create: no memory for %zu floats of state",
                       count);
}

static void idist__zero_create_free_memory(idist_zero *z) {
    if (!z->memory) return;
    if (z->ddp->desc.on_device) idist__tensor_memory_free(&z->ddp->reduction.memory, z->memory);
    else free(z->memory);
}

// Allocates the shards and their memory. Local.
static idist_status idist__zero_create_shards(idist_zero *z) {
    size_t ranks = (size_t)z->group_size, n = (size_t)z->ddp->desc.n, arrays;
    size_t bucket_count = (size_t)z->ddp->bucket_count;
    int b;
    idist_status status = IDIST_OK;

    z->buckets = (idist__zero_bucket *)calloc(bucket_count, sizeof *z->buckets);
    z->bucket_counts = (size_t *)malloc(bucket_count * ranks * sizeof *z->bucket_counts);
    z->param_counts = (size_t *)malloc(ranks * sizeof *z->param_counts);
    z->shards = (idist_shard *)calloc(n, sizeof *z->shards); // at most one per parameter
    z->shard_grads = (idist_tensor *)calloc(n, sizeof *z->shard_grads);
    z->shard_of = (int *)malloc(n * sizeof *z->shard_of);
    if (!z->buckets || !z->bucket_counts || !z->param_counts || !z->shards || !z->shard_grads ||
        !z->shard_of)
        return idist__fail(IDIST_ERR_NO_MEMORY, "zero_create: no memory");

    for (b = 0; b < z->ddp->bucket_count; b++) idist__zero_create_ranges(z, b);
    arrays = (size_t)z->states + (z->has_masters ? 2 : 0);
    if (z->shard_elements && arrays)
        status = idist__zero_create_memory(z, arrays * z->shard_elements);
    if (status != IDIST_OK) return status;

    if (z->has_masters) z->masters = z->memory;
    if (z->has_masters) z->grads = z->memory + z->shard_elements;
    for (b = 0; b < z->ddp->bucket_count; b++) idist__zero_create_place(z, b);

    return idist__zero_create_masters(z);
}

void idist_zero_free(idist_zero **zero) {
    idist_zero *z = zero ? *zero : NULL;

    if (!z) return;
    *zero = NULL;
    idist__zero_create_free_memory(z);
    idist_ddp_free(&z->ddp);
    free(z->buckets);
    free(z->bucket_counts);
    free(z->param_counts);
    free(z->shards);
    free(z->shard_grads);
    free(z->shard_of);
    free(z);
}

idist_status idist_zero_create(const idist_zero_desc *desc, idist_zero **zero) {
    idist__shape states;
    idist_opts opts, own_opts;
    idist_zero *z;
    idist_status status;

    if (zero) *zero = NULL;
    if (!desc || !zero) return idist__fail(IDIST_ERR_ARG, "zero_create: desc or zero is NULL");
    memset(&opts, 0, sizeof opts);
    opts.group = desc->group;
    opts.timeout_ms = desc->timeout_ms;
    status = idist__agree_enter("zero_create", &opts, &own_opts);
    if (status != IDIST_OK) return status;

    z = (idist_zero *)calloc(1, sizeof *z);
    status = z ? idist__zero_create_check(desc)
               : idist__fail(IDIST_ERR_NO_MEMORY, "zero_create: no memory");
    states = idist__shape_of_option("states", desc->states);
    status = idist__shape_agree("zero_create", &states, 1, 1, status, 0, &own_opts);

    if (status == IDIST_OK) {
        z->states = desc->states;
        z->group_size = idist_group_size(desc->group);
        z->rank = idist_group_rank(desc->group);
        status = idist__zero_create_ddp(z, desc);
        if (status == IDIST_OK) status = idist__agree(idist__zero_create_shards(z), &own_opts);
    }

    if (status != IDIST_OK) idist_zero_free(&z);
    *zero = z;

    return status;
}
