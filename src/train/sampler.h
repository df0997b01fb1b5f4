// train/sampler.h: which sample goes to which rank
//
// Each rank computes the order of the whole epoch. From the part of the order that is still to be
// processed, each of n ranks takes every n-th index, starting with its rank. For 3 ranks and 10
// samples, without drop_last:
//
//     order      7 2 9 4 0 5 8 1 3 6 | 7 2     padded with the beginning
//     rank 0     7     4     8     6
//     rank 1       2     0     1       7
//     rank 2         9     5     3       2
//
// idist_sampler_reshard skips the first `processed` indices of the order. It deals out the rest
// among the current ranks, and pads the rest with its own beginning.
#pragma once

#include "base/fail.h"
#include "base/text.h"
#include "train/permutation.h"
#include "train/agree.h"

// The largest data set, in samples. Its indices, including the padding, must fit in memory.
static const size_t IDIST__SAMPLES_MAX = SIZE_MAX / 64;

// The largest list for idist_partition. For longer lists, Python's shuffle draws more than 32 bits
// at a time, which idist__permutation_below cannot do.
static const size_t IDIST__PARTITION_MAX =
    (size_t)(SIZE_MAX / 64 < UINT32_MAX ? SIZE_MAX / 64 : UINT32_MAX);

struct idist_sampler {
    idist_sampler_desc desc; // with num_replicas and rank filled in
    bool fixed_replicas;     // the caller set num_replicas
    uint64_t epoch;
    size_t *indices;     // dealt out to this rank
    size_t count;        // number of indices
    size_t position;     // of the next index
    bool ended;          // the last pass reached the end of the indices; position is 0
    bool resumed;        // the last call was idist_sampler_set_state
    size_t recorded;     // indices counted as done; see idist_sampler_record
    size_t processed;    // samples that all ranks together had done when the indices were dealt out
    uint64_t deal_count; // incremented when indices are dealt out; the loader compares it
};

// Calls order_fn. Returns false if order_fn throws an exception; in that case idist_last_error
// returns the exception's text.
IDIST__NOINLINE static bool idist__sampler_call_order(const idist_sampler_desc *desc,
                                                      size_t *indices, uint64_t epoch, int run) {
    IDIST__TRY(desc->order_fn(indices, desc->length, epoch, run, desc->arg));
    return !idist__callback_threw("sampler", "order_fn");
}

// Returns the order of an epoch, which the caller frees. Pads the order to `total` indices with the
// indices that follow the first `processed`, or with further runs of order_fn. On failure returns
// NULL and sets *status.
static size_t *idist__sampler_order(const idist_sampler_desc *desc, uint64_t epoch,
                                    size_t processed, size_t total, idist_status *status) {
    size_t length = desc->length, runs = (total + length - 1) / length, run, i;
    size_t capacity = total > length ? total : length;
    size_t *order;

    if (desc->order_fn) capacity = runs * length;
    order = (size_t *)malloc((capacity + 1) * sizeof *order);

    if (!order) {
        *status = idist__fail(IDIST_ERR_NO_MEMORY, "sampler: no memory for %zu indices", length);
        return NULL;
    }

    if (desc->order_fn) {
        for (run = 0; run < runs; run++)
            if (!idist__sampler_call_order(desc, order + run * length, epoch, (int)run)) {
                *status = IDIST_ERR_CALLBACK;
                free(order);
                return NULL;
            }
        return order;
    }

    if (desc->in_order)
        for (i = 0; i < length; i++) order[i] = i;
    else idist__permutation_make(order, length, desc->seed + epoch, IDIST__RANDOM_LARGE);
    for (i = length; i < total; i++) order[i] = order[i - (length - processed)];

    return order;
}

// Returns the number of samples that each rank gets when `processed` samples of the epoch are done.
static size_t idist__sampler_share(const idist_sampler_desc *desc, size_t replicas,
                                   size_t processed) {
    size_t left = desc->length - processed;
    return desc->drop_last ? left / replicas : (left + replicas - 1) / replicas;
}

// Returns the number of samples that are done: `processed` samples before the shares were dealt
// out, and `position` samples of each rank's share. A complete share completes the epoch, including
// a remainder that does not divide evenly. The result is limited to the length, because some
// samples may have been dealt out twice.
static size_t idist__sampler_done(const idist_sampler_desc *desc, size_t replicas, size_t processed,
                                  size_t position) {
    size_t done = processed + position * replicas;

    if (position && position >= idist__sampler_share(desc, replicas, processed))
        return desc->length;

    return done < desc->length ? done : desc->length;
}

// Deals out the samples of an epoch that remain after the first `processed`. Changes nothing on
// failure.
static idist_status idist__sampler_deal(idist_sampler *sampler, const idist_sampler_desc *desc,
                                        uint64_t epoch, size_t processed) {
    size_t replicas = (size_t)desc->num_replicas, i;
    size_t count = idist__sampler_share(desc, replicas, processed);
    idist_status status = IDIST_OK;
    size_t *order =
        idist__sampler_order(desc, epoch, processed, processed + count * replicas, &status);
    size_t *indices = order ? (size_t *)malloc((count + 1) * sizeof *indices) : NULL;

    if (!order) return status;

    if (!indices) {
        free(order);
        return idist__fail(IDIST_ERR_NO_MEMORY, "sampler: no memory for %zu indices", desc->length);
    }

    for (i = 0; i < count; i++) indices[i] = order[processed + (size_t)desc->rank + i * replicas];
    free(order);
    free(sampler->indices);

    sampler->indices = indices;
    sampler->count = count;
    sampler->desc = *desc;
    sampler->epoch = epoch;
    sampler->processed = processed;
    sampler->position = 0;
    sampler->ended = false;
    sampler->resumed = false;
    sampler->recorded = 0;
    sampler->deal_count++;

    return IDIST_OK;
}

// Fills in num_replicas and rank from the group unless they are set, and checks the desc.
static idist_status idist__sampler_resolve(idist_sampler_desc *desc) {
    if (!desc->num_replicas && desc->rank)
        return idist__fail(IDIST_ERR_ARG, "sampler_create: rank is %d, but num_replicas is not set",
                           desc->rank);

    if (!desc->num_replicas) {
        desc->num_replicas = idist_group_size(desc->group);
        desc->rank = idist_group_rank(desc->group);
        if (desc->rank < 0)
            return idist__fail(IDIST_ERR_STATE,
                               "sampler_create: this rank is not a member of the group");
    }

    if (!desc->length || desc->length > IDIST__SAMPLES_MAX)
        return idist__fail(IDIST_ERR_ARG,
                           "sampler_create: length must be between 1 and %zu samples, got %zu",
                           IDIST__SAMPLES_MAX, desc->length);
    if (desc->num_replicas < 1)
        return idist__fail(IDIST_ERR_ARG, "sampler_create: num_replicas must be positive, got %d",
                           desc->num_replicas);
    if (desc->rank < 0 || desc->rank >= desc->num_replicas)
        return idist__fail(IDIST_ERR_ARG, "sampler_create: rank %d is not in 0 .. %d", desc->rank,
                           desc->num_replicas - 1);
    if (desc->order_fn && (desc->drop_last || desc->in_order))
        return idist__fail(
            IDIST_ERR_ARG,
            "sampler_create: order_fn cannot be combined with drop_last or in_order");

    return IDIST_OK;
}

idist_status idist_sampler_create(const idist_sampler_desc *desc, idist_sampler **sampler) {
    idist_sampler *created;
    idist_sampler_desc resolved;
    idist_status status;

    if (!sampler || !desc)
        return idist__fail(IDIST_ERR_ARG, "sampler_create: desc or sampler is NULL");
    *sampler = NULL;
    resolved = *desc;
    status = idist__sampler_resolve(&resolved);
    if (status != IDIST_OK) return status;

    created = (idist_sampler *)calloc(1, sizeof *created);
    if (!created)
        return idist__fail(IDIST_ERR_NO_MEMORY, "sampler_create: no memory for %zu samples",
                           resolved.length);
    created->fixed_replicas = desc->num_replicas != 0;
    status = idist__sampler_deal(created, &resolved, 0, 0);
    if (status == IDIST_OK) *sampler = created;
    else idist_sampler_free(&created);

    return status;
}

void idist_sampler_free(idist_sampler **sampler) {
    if (!sampler || !*sampler) return;
    free((*sampler)->indices);
    free(*sampler);
    *sampler = NULL;
}

idist_status idist_sampler_set_epoch(idist_sampler *sampler, uint64_t epoch) {
    if (!sampler) return idist__fail(IDIST_ERR_ARG, "sampler_set_epoch: sampler is NULL");

    if (sampler->resumed && sampler->epoch == epoch) {
        sampler->resumed = false;
        return IDIST_OK;
    }

    return idist__sampler_deal(sampler, &sampler->desc, epoch, 0);
}

size_t idist_sampler_count(const idist_sampler *sampler) { return sampler ? sampler->count : 0; }

// Ends a pass over the indices.
static void idist__sampler_end(idist_sampler *sampler) {
    sampler->position = 0;
    sampler->ended = true;
}

bool idist_sampler_next(idist_sampler *sampler, size_t *index) {
    if (!sampler || !index) return false;

    sampler->resumed = false;

    if (sampler->position == sampler->count) {
        idist__sampler_end(sampler);
        return false;
    }

    *index = sampler->indices[sampler->position++];

    return true;
}

idist_sampler_state idist_sampler_get_state(const idist_sampler *sampler) {
    idist_sampler_state state;

    memset(&state, 0, sizeof state);
    if (!sampler) return state;
    state.epoch = sampler->epoch;
    state.ranks = (uint64_t)sampler->desc.num_replicas;

    if (sampler->ended && sampler->position == 0) {
        state.epoch++;
    } else {
        state.position = sampler->position;
        state.processed = sampler->processed;
    }

    return state;
}

idist_status idist_sampler_set_state(idist_sampler *sampler, idist_sampler_state state) {
    const idist_sampler_desc *desc;
    uint64_t ranks = state.ranks;
    size_t processed;
    idist_status status;

    if (!sampler) return idist__fail(IDIST_ERR_ARG, "sampler_set_state: sampler is NULL");
    desc = &sampler->desc;
    if (!ranks) ranks = (uint64_t)desc->num_replicas;
    if (state.processed > desc->length || ranks > INT32_MAX)
        return idist__fail(IDIST_ERR_ARG,
                           "sampler_set_state: %llu samples processed by %llu ranks, but there are "
                           "only %zu samples",
                           (unsigned long long)state.processed, (unsigned long long)ranks,
                           desc->length);

    processed = (size_t)state.processed;
    if (state.position > idist__sampler_share(desc, (size_t)ranks, processed))
        return idist__fail(
            IDIST_ERR_ARG,
            "sampler_set_state: position %llu is beyond the end: %zu samples for %llu ranks",
            (unsigned long long)state.position, desc->length - processed,
            (unsigned long long)ranks);

    if (ranks != (uint64_t)desc->num_replicas) {
        processed = idist__sampler_done(desc, (size_t)ranks, processed, (size_t)state.position);
        state.position = 0;
    }

    status = idist__sampler_deal(sampler, desc, state.epoch, processed);
    if (status != IDIST_OK) return status;
    sampler->position = (size_t)state.position;
    sampler->recorded = (size_t)state.position;
    sampler->resumed = true;

    return IDIST_OK;
}

idist_status idist_sampler_record(idist_sampler *sampler, size_t count) {
    if (!sampler) return idist__fail(IDIST_ERR_ARG, "sampler_record: sampler is NULL");
    if (count > sampler->count - sampler->recorded)
        return idist__fail(IDIST_ERR_ARG,
                           "sampler_record: %zu more samples after %zu exceed the %zu of this rank",
                           count, sampler->recorded, sampler->count);
    sampler->recorded += count;

    return IDIST_OK;
}

idist_status idist_sampler_reshard(idist_sampler *sampler, const idist_opts *opts) {
    enum { IDIST__ROOT_EPOCH, IDIST__ROOT_PROCESSED, IDIST__ROOT_LENGTH, IDIST__ROOT_WORDS };
    uint64_t root[IDIST__ROOT_WORDS] = {0, 0, 0}; // values of rank 0
    idist_sampler_desc desc;
    idist_opts own_opts;
    idist_status status = idist__agree_enter("sampler_reshard", opts, &own_opts);

    if (status != IDIST_OK) return status;
    if (!sampler) status = idist__fail(IDIST_ERR_ARG, "sampler_reshard: sampler is NULL");
    else if (sampler->fixed_replicas)
        status = idist__fail(IDIST_ERR_ARG,
                             "sampler_reshard: the sampler was created with num_replicas");
    status = idist__agree(status, &own_opts);
    if (status != IDIST_OK) return status;

    desc = sampler->desc;
    root[IDIST__ROOT_EPOCH] = sampler->epoch;
    root[IDIST__ROOT_PROCESSED] = idist__sampler_done(&desc, (size_t)desc.num_replicas,
                                                      sampler->processed, sampler->recorded);
    root[IDIST__ROOT_LENGTH] = desc.length;
    status = idist_broadcast(root, IDIST__ROOT_WORDS, IDIST_U64, 0, &own_opts);
    if (status != IDIST_OK) return status;

    desc.group = own_opts.group;
    desc.num_replicas = idist_group_size(own_opts.group);
    desc.rank = idist_group_rank(own_opts.group);
    if (root[IDIST__ROOT_LENGTH] != desc.length)
        status =
            idist__fail(IDIST_ERR_MISMATCH, "sampler_reshard: %zu samples here, %llu on rank 0",
                        desc.length, (unsigned long long)root[IDIST__ROOT_LENGTH]);
    else
        status = idist__sampler_deal(sampler, &desc, root[IDIST__ROOT_EPOCH],
                                     (size_t)root[IDIST__ROOT_PROCESSED]);

    return idist__agree(status, &own_opts);
}

// Returns the number of samples in a part. Rounds the product to a double and then truncates it, as
// Python does. Without the volatile variable, the x87 unit of i386 would truncate a product of 64
// binary digits.
static size_t idist__sampler_part(double fraction, size_t length) {
    volatile double part = fraction * (double)length;
    return (size_t)part;
}

static idist_status idist__sampler_check_fractions(const double *fractions, int n) {
    char text[IDIST__NUMBER_NBYTES];
    double sum = 0;
    int i;

    for (i = 0; i < n; i++) {
        if (!(fractions[i] >= 0))
            return idist__fail(IDIST_ERR_ARG,
                               "partition: fractions must not be negative; number %d is %s", i,
                               idist__number_print(text, fractions[i], 6));
        sum += fractions[i];
    }

    if (sum > 1 + 1e-9)
        return idist__fail(IDIST_ERR_ARG, "partition: the fractions add up to %s, more than 1",
                           idist__number_print(text, sum, 6));

    return IDIST_OK;
}

idist_status idist_partition(size_t length, const double *fractions, int n, int which,
                             uint64_t seed, size_t *indices, size_t *count) {
    size_t begin = 0, *all;
    int i;
    idist_status status;

    if (!fractions || !indices || !count)
        return idist__fail(IDIST_ERR_ARG, "partition: fractions, indices or count is NULL");
    if (which < 0 || which >= n)
        return idist__fail(IDIST_ERR_ARG, "partition: there is no part %d of %d", which, n);
    if (length > IDIST__PARTITION_MAX)
        return idist__fail(IDIST_ERR_ARG, "partition: %zu samples are more than %zu", length,
                           IDIST__PARTITION_MAX);
    status = idist__sampler_check_fractions(fractions, n);
    if (status != IDIST_OK) return status;

    all = (size_t *)malloc((length + 1) * sizeof *all);
    if (!all)
        return idist__fail(IDIST_ERR_NO_MEMORY, "partition: no memory for %zu indices", length);
    idist__permutation_shuffle(all, length, seed);

    for (i = 0; i < which; i++) begin += idist__sampler_part(fractions[i], length);
    *count = idist__sampler_part(fractions[which], length);
    if (begin > length) begin = length; // the sum of the fractions may be slightly above 1
    if (*count > length - begin) *count = length - begin;
    memcpy(indices, all + begin, *count * sizeof *indices);
    free(all);

    return IDIST_OK;
}
