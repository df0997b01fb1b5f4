// train/roc_auc.h: the area under the ROC curve
//
// The area is the fraction of pairs of a positive and a negative sample in which the positive one
// has the higher score (the statistic U of Mann and Whitney, divided by the number of pairs). A
// pair with equal scores counts one half. Rank 0 sorts the samples of all ranks by their scores:
//
//     score         0.1   0.3   0.3   0.8
//     label          0     0     1     1
//     half pairs                 3     4     of 4, for two negative samples
//
// A positive sample gets 2 half pairs for each negative sample with a lower score, and 1 half pair
// for each negative sample with the same score. Here the area is (3 + 4) / (2 * 4).
//
// The sum of the half pairs may exceed 64 bits. So rank 0 divides the sum by twice the number of
// negative samples while it adds, and keeps the quotient and the remainder, two integers. The
// quotient is at most the number of positive samples.
#pragma once

#include "base/fail.h"
#include "base/small_float.h"
#include "train/agree.h"
#include "train/metric.h"

// A sample, as rank 0 gets it.
typedef struct idist__roc_auc_row {
    float score;
    int32_t label;
} idist__roc_auc_row;

// Compares the scores of two rows, for qsort.
static int idist__roc_auc_compare(const void *a, const void *b) {
    float x = ((const idist__roc_auc_row *)a)->score, y = ((const idist__roc_auc_row *)b)->score;
    return (x > y) - (x < y);
}

// Returns the area of sorted rows, or NaN if all labels are equal.
static double idist__roc_auc_area(const idist__roc_auc_row *rows, size_t n) {
    uint64_t positives = 0, negatives, below = 0, quotient = 0, remainder = 0, i;
    size_t first, end;

    for (first = 0; first < n; first++) positives += (uint64_t)rows[first].label;
    negatives = n - positives;
    if (!positives || !negatives) return (double)idist__small_float_from_bits(0x7fc00000u);

    for (first = 0; first < n; first = end) {
        uint64_t equal[2] = {0, 0}; // negative and positive samples of this score

        for (end = first; end < n && rows[end].score == rows[first].score; end++)
            equal[rows[end].label]++;

        for (i = 0; i < equal[1]; i++) {
            remainder += 2 * below + equal[0]; // adds at most the divisor
            if (remainder < 2 * negatives) continue;
            remainder -= 2 * negatives;
            quotient++;
        }

        below += equal[0];
    }

    return ((double)quotient + (double)remainder / (2 * (double)negatives)) / (double)positives;
}

// Computes the area. Called on rank 0 with the rows of all ranks, in memory that
// idist__epoch_metric_run has allocated.
static int idist__roc_auc_compute(const void *rows, size_t n, void *arg, double *value) {
    idist__roc_auc_row *sorted = (idist__roc_auc_row *)rows;

    (void)arg;
    qsort(sorted, n, sizeof *sorted, idist__roc_auc_compare);
    *value = idist__roc_auc_area(sorted, n);

    return 0;
}

// Checks the samples of this rank, and copies them to rows that the caller frees.
static idist_status idist__roc_auc_pack(const float *scores, const int *labels, size_t n,
                                        idist__roc_auc_row **rows) {
    size_t i;

    if ((n && (!scores || !labels)) || n > SIZE_MAX / 2 / sizeof **rows)
        return idist__fail(IDIST_ERR_ARG, "roc_auc: %zu samples, or a pointer is NULL", n);
    for (i = 0; i < n; i++) {
        if (labels[i] != 0 && labels[i] != 1)
            return idist__fail(IDIST_ERR_ARG, "roc_auc: label %d of sample %zu is neither 0 nor 1",
                               labels[i], i);
        if (scores[i] != scores[i])
            return idist__fail(IDIST_ERR_ARG, "roc_auc: the score of sample %zu is NaN", i);
    }

    *rows = (idist__roc_auc_row *)malloc(n * sizeof **rows + 1);
    if (!*rows) return idist__fail(IDIST_ERR_NO_MEMORY, "roc_auc: no memory for %zu samples", n);

    for (i = 0; i < n; i++) {
        (*rows)[i].score = scores[i];
        (*rows)[i].label = labels[i];
    }

    return IDIST_OK;
}

idist_status idist_roc_auc(const float *scores, const int *labels, size_t n, double *value,
                           const idist_opts *opts) {
    idist__roc_auc_row *rows = NULL;
    idist__epoch_metric metric;
    idist_opts own_opts;
    idist_status status = idist__agree_enter("roc_auc", opts, &own_opts);

    if (status != IDIST_OK) return status;

    status = idist__roc_auc_pack(scores, labels, n, &rows);
    metric.name = "roc_auc";
    metric.rows = rows;
    metric.n = n;
    metric.row_nbytes = sizeof *rows;
    metric.fn = idist__roc_auc_compute;
    metric.arg = NULL;
    metric.opts = &own_opts;
    status = idist__epoch_metric_run(&metric, status, value);
    free(rows);

    return status;
}
