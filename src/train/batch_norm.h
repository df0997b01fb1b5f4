// train/batch_norm.h: batch statistics over all ranks
//
// One all_gather distributes a row per rank: count | means | variances. Every rank then merges the
// rows in rank order.
#pragma once

#include "base/fail.h"
#include "base/isa.h"
#include "train/agree.h"

// Merges the mean and variance of set b, with nb values, into the mean and variance of set a, with
// na values:
//
//     n = na + nb    d = mean_b - mean_a    mean = mean_a + d nb / n
//     var n = var_a na + var_b nb + d d na nb / n
static void idist__batch_norm_merge(double *mean, double *var, double na, double mean_b,
                                    double var_b, double nb) {
    double n = na + nb, d = mean_b - *mean;

    *mean += d * (nb / n);
    *var = (*var * na + var_b * nb) / n + d * d * (na / n) * (nb / n);
}

// Computes the mean and variance of one channel from the rows of all ranks. Returns the total
// count.
static uint64_t idist__batch_norm_channel(const char *rows, size_t row_nbytes, int ranks,
                                          int channels, int channel, float *mean, float *var) {
    double all_mean = 0, all_var = 0;
    uint64_t total = 0;
    int rank;

    for (rank = 0; rank < ranks; rank++) {
        const char *row = rows + row_nbytes * (size_t)rank;
        const char *means = row + sizeof total, *vars = means + sizeof(float) * (size_t)channels;
        uint64_t count;
        float rank_mean, rank_var;

        memcpy(&count, row, sizeof count);
        memcpy(&rank_mean, means + sizeof(float) * (size_t)channel, sizeof rank_mean);
        memcpy(&rank_var, vars + sizeof(float) * (size_t)channel, sizeof rank_var);
        if (count)
            idist__batch_norm_merge(&all_mean, &all_var, (double)total, (double)rank_mean,
                                    (double)rank_var, (double)count);
        total += count;
    }

    *mean = (float)all_mean;
    *var = (float)all_var;

    return total;
}

idist_status idist_sync_batch_norm(float *mean, float *var, int channels, uint64_t *count,
                                   const idist_opts *opts) {
    size_t values_nbytes, row_nbytes;
    char *rows, *own;
    int ranks, channel;
    uint32_t mode;
    idist_opts own_opts;
    idist_status status = idist__agree_enter("sync_batch_norm", opts, &own_opts);

    if (status != IDIST_OK) return status;
    if (channels < 1 || !mean || !var || !count)
        return idist__fail(IDIST_ERR_ARG, "sync_batch_norm: %d channels, or a pointer is NULL",
                           channels);

    ranks = idist_group_size(own_opts.group);
    values_nbytes = sizeof *mean * (size_t)channels;
    row_nbytes = sizeof *count + 2 * values_nbytes;
    rows = (char *)malloc(row_nbytes * (size_t)ranks);
    if (!rows) return idist__agree_no_memory("sync_batch_norm", own_opts.group);

    own = rows + row_nbytes * (size_t)idist_group_rank(own_opts.group);
    memcpy(own, count, sizeof *count);
    memcpy(own + sizeof *count, mean, values_nbytes);
    memcpy(own + sizeof *count + values_nbytes, var, values_nbytes);
    status = idist_all_gather(own, rows, row_nbytes, IDIST_U8, &own_opts);
    mode = idist__mode_enter(); // so that all ranks get the same bits

    for (channel = 0; channel < channels && status == IDIST_OK; channel++)
        *count = idist__batch_norm_channel(rows, row_nbytes, ranks, channels, channel,
                                           &mean[channel], &var[channel]);
    idist__mode_leave(mode);
    free(rows);

    return status;
}

idist_status idist_sync_batch_norm_backward(float *sum_dy, float *sum_dy_xmu, int channels,
                                            const idist_opts *opts) {
    size_t nbytes = sizeof(float) * (size_t)(channels > 0 ? channels : 0);
    char *both; // both arrays, reduced by one call instead of two
    idist_opts own_opts;
    idist_status status = idist__agree_enter("sync_batch_norm_backward", opts, &own_opts);

    if (status != IDIST_OK) return status;
    if (channels < 1 || !sum_dy || !sum_dy_xmu)
        return idist__fail(IDIST_ERR_ARG,
                           "sync_batch_norm_backward: %d channels, or a pointer is NULL", channels);
    both = (char *)malloc(2 * nbytes);
    if (!both) return idist__agree_no_memory("sync_batch_norm_backward", own_opts.group);

    memcpy(both, sum_dy, nbytes);
    memcpy(both + nbytes, sum_dy_xmu, nbytes);
    status = idist_all_reduce(both, both, 2 * (size_t)channels, IDIST_F32, IDIST_SUM, &own_opts);
    if (status == IDIST_OK) memcpy(sum_dy, both, nbytes);
    if (status == IDIST_OK) memcpy(sum_dy_xmu, both + nbytes, nbytes);
    free(both);

    return status;
}
