// train/zero/zero_step.h: the public functions of an iteration
#pragma once

#include "base/fail.h"
#include "train/agree.h"
#include "train/compress/tensor_memory.h"
#include "train/ddp/ddp_model.h"
#include "train/ddp/ddp_step.h"
#include "train/zero/zero_model.h"

void *idist_zero_grad(const idist_zero *z, int i) { return z ? idist_ddp_grad(z->ddp, i) : NULL; }

int idist_zero_shards(const idist_zero *z) { return z ? z->shard_count : 0; }

const idist_shard *idist_zero_shard(const idist_zero *z, int k) {
    return z && k >= 0 && k < z->shard_count ? &z->shards[k] : NULL;
}

const idist_tensor *idist_zero_shard_grads(const idist_zero *z) {
    return z ? z->shard_grads : NULL;
}

idist_status idist_zero_ready(idist_zero *z, int i) {
    if (!z) return idist__fail(IDIST_ERR_ARG, "zero_ready: zero is NULL");
    return idist_ddp_ready(z->ddp, i);
}

idist_status idist_zero_wait(idist_zero *z) {
    if (!z) return idist__fail(IDIST_ERR_ARG, "zero_wait: zero is NULL");
    return idist_ddp_wait(z->ddp);
}

idist_status idist_zero_no_sync(idist_zero *z, bool on) {
    if (!z) return idist__fail(IDIST_ERR_ARG, "zero_no_sync: zero is NULL");
    return idist_ddp_no_sync(z->ddp, on);
}

//------------------------------------------------------------------------------
// sending the updated parameters
//------------------------------------------------------------------------------

// Copies the weights of a shard to its place in `to`, the memory for all parameters of the bucket,
// and rounds master weights.
static idist_status idist__zero_step_pack(const idist_zero *z, const idist_bucket *bucket,
                                          const idist_shard *shard, size_t in_bucket, char *to) {
    char *at = idist__zero_at(bucket, to, in_bucket);

    if (idist__zero_is_narrow(bucket))
        return idist__zero_convert(z, bucket, at, shard->weights, shard->count, true);

    return idist__tensor_memory_copy(&z->ddp->reduction.memory, at, shard->weights,
                                     shard->count * sizeof(float));
}

// Copies all parameters of a bucket from the memory of their gradients to their own memory.
static idist_status idist__zero_step_unpack(const idist_zero *z, const idist_bucket *bucket) {
    idist_status status = IDIST_OK;
    int k;

    for (k = 0; k < bucket->gradient_count && status == IDIST_OK; k++) {
        const idist_tensor *param = &z->ddp->params[bucket->gradients[k]];

        status = idist__tensor_memory_copy(&z->ddp->reduction.memory, param->data,
                                           idist__zero_at(bucket, bucket->data, bucket->displs[k]),
                                           idist__ddp_nbytes(param));
    }

    return status;
}

// Copies the weights of a bucket's shards to the parameters of all ranks. Collective.
static idist_status idist__zero_step_gather(const idist_zero *z, int b, const idist_opts *opts) {
    const idist_bucket *bucket = idist__zero_exposed(z, b);
    const idist__zero_bucket *own = &z->buckets[b];
    char *to = own->param_memory ? own->param_memory : (char *)bucket->data;
    char *range = idist__zero_at(bucket, to, own->first);
    size_t in_bucket = own->first;
    int s;
    idist_status status = IDIST_OK;

    for (s = own->first_shard; s < own->first_shard + own->shard_count; s++) {
        if (status == IDIST_OK)
            status = idist__zero_step_pack(z, bucket, &z->shards[s], in_bucket, to);
        in_bucket += z->shards[s].count;
    }

    if (status != IDIST_OK) return idist__agree_break("zero_gather", z->ddp->desc.group, status);
    if (z->group_size == 1) status = IDIST_OK; // all weights are there already
    else if (bucket->count % (size_t)z->group_size == 0)
        status = idist_all_gather(range, to, own->counts[0], bucket->dtype, opts);
    else
        status = idist_all_gatherv(range, own->counts[z->rank], to, own->counts, NULL,
                                   bucket->dtype, opts);

    if (status != IDIST_OK || own->param_memory) return status;
    return idist__zero_step_unpack(z, bucket);
}

idist_status idist_zero_gather(idist_zero *z) {
    idist_opts opts;
    int b;
    idist_status status;

    if (!z) return idist__fail(IDIST_ERR_ARG, "zero_gather: zero is NULL");
    if (idist__ddp_step_is_open(z->ddp))
        return idist__fail(IDIST_ERR_STATE,
                           "zero_gather: gradients are ready; call zero_wait before this");
    opts = idist__ddp_opts(z->ddp, z->ddp->desc.on_device);
    status = idist__ddp_check_size(z->ddp);
    if (status == IDIST_OK) status = idist__ddp_check_group(z->ddp);

    for (b = 0; b < z->ddp->bucket_count && status == IDIST_OK; b++)
        status = idist__zero_step_gather(z, b, &opts);

    return status;
}
