// train/metric.h: metrics that are summed over the ranks, or computed on rank 0
//
// Functions: idist__metric_*, idist__epoch_metric_*.
#pragma once

#include "base/fail.h"
#include "base/small_float.h"
#include "train/agree.h"

//------------------------------------------------------------------------------
// numbers summed over all ranks
//------------------------------------------------------------------------------

// Computes the ratio of two numbers of a metric, each summed over all ranks. The ratio is NaN if
// the denominator is 0. Collective.
static idist_status idist__metric_ratio(const char *name, const void *metric, double numerator,
                                        double denominator, double *value, const idist_opts *opts) {
    double sums[2];
    idist_opts own_opts;
    idist_status status = idist__agree_enter(name, opts, &own_opts);

    if (status != IDIST_OK) return status;
    if (!metric) return idist__fail(IDIST_ERR_ARG, "%s: the metric is NULL", name);

    sums[0] = numerator;
    sums[1] = denominator;
    status = idist_all_reduce(sums, sums, 2, IDIST_F64, IDIST_SUM, &own_opts);
    if (status == IDIST_OK && value)
        *value =
            sums[1] != 0 ? sums[0] / sums[1] : (double)idist__small_float_from_bits(0x7fc00000u);

    return status;
}

// Returns true if the label is the first class with the highest score in a row. Returns false if
// the row contains a NaN.
static bool idist__metric_is_correct(const float *row, int label, int classes) {
    float score = row[label];
    bool correct = score == score; // not a NaN
    int k;

    for (k = 0; k < classes && correct; k++) {
        if (k < label) correct = score > row[k];
        else if (k > label) correct = score >= row[k];
    }

    return correct;
}

idist_status idist_accuracy_update(idist_accuracy *m, const float *scores, const int *labels,
                                   size_t n, int classes) {
    size_t i;

    if (!m || (n && (!scores || !labels)) || classes < 1)
        return idist__fail(IDIST_ERR_ARG, "accuracy_update: %d classes, or a pointer is NULL",
                           classes);
    for (i = 0; i < n; i++)
        if (labels[i] < 0 || labels[i] >= classes)
            return idist__fail(IDIST_ERR_ARG,
                               "accuracy_update: label %d of sample %zu is not in 0 .. %d",
                               labels[i], i, classes - 1);

    for (i = 0; i < n; i++)
        m->correct += idist__metric_is_correct(scores + i * (size_t)classes, labels[i], classes);
    m->total += n;

    return IDIST_OK;
}

idist_status idist_accuracy_compute(const idist_accuracy *m, double *value,
                                    const idist_opts *opts) {
    double correct = m ? (double)m->correct : 0, total = m ? (double)m->total : 0;
    return idist__metric_ratio("accuracy_compute", m, correct, total, value, opts);
}

void idist_mean_update(idist_mean *mean, double value, double weight) {
    if (weight == 0) return; // a NaN times 0 is a NaN
    mean->sum += value * weight;
    mean->weight += weight;
}

idist_status idist_mean_compute(const idist_mean *mean, double *value, const idist_opts *opts) {
    return idist__metric_ratio("mean_compute", mean, mean ? mean->sum : 0, mean ? mean->weight : 0,
                               value, opts);
}

void idist_running_average_update(idist_running_average *m, double value) {
    double alpha = m->alpha != 0 ? m->alpha : 0.98;

    if (!m->begun) m->value = value;
    else if (alpha != 1) m->value = alpha * m->value + (1 - alpha) * value;
    m->begun = true;
}

idist_status idist_running_average_compute(const idist_running_average *m, double *value,
                                           const idist_opts *opts) {
    bool begun = m && m->begun;
    return idist__metric_ratio("running_average_compute", m, begun ? m->value : 0, begun ? 1 : 0,
                               value, opts);
}

static bool idist__metric_is_class(const idist_confusion *confusion, int number) {
    return number >= 0 && number < confusion->classes;
}

idist_status idist_confusion_update(idist_confusion *confusion, const int *predicted,
                                    const int *labels, size_t n) {
    size_t i;

    if (!confusion || !confusion->cells || confusion->classes < 1 || (n && (!predicted || !labels)))
        return idist__fail(IDIST_ERR_ARG, "confusion_update: no classes, or a pointer is NULL");
    for (i = 0; i < n; i++)
        if (!idist__metric_is_class(confusion, labels[i]) ||
            !idist__metric_is_class(confusion, predicted[i]))
            return idist__fail(
                IDIST_ERR_ARG,
                "confusion_update: label %d or prediction %d of sample %zu is not in 0 .. %d",
                labels[i], predicted[i], i, confusion->classes - 1);

    for (i = 0; i < n; i++)
        confusion->cells[(size_t)labels[i] * (size_t)confusion->classes + (size_t)predicted[i]]++;

    return IDIST_OK;
}

idist_status idist_confusion_compute(const idist_confusion *confusion, uint64_t *cells,
                                     const idist_opts *opts) {
    void *unwanted = NULL;
    size_t count;
    idist_opts own_opts;
    idist_status status = idist__agree_enter("confusion_compute", opts, &own_opts);

    if (status != IDIST_OK) return status;
    if (!confusion || !confusion->cells || confusion->classes < 1)
        return idist__fail(IDIST_ERR_ARG, "confusion_compute: no classes, or a pointer is NULL");
    if (cells == confusion->cells)
        return idist__fail(IDIST_ERR_ARG,
                           "confusion_compute: cells must not be those of the metric");

    count = (size_t)confusion->classes * (size_t)confusion->classes;

    if (!cells) {
        unwanted = malloc(count * sizeof *cells);
        if (!unwanted) return idist__agree_no_memory("confusion_compute", own_opts.group);
    }

    status = idist_all_reduce(confusion->cells, cells ? cells : unwanted, count, IDIST_U64,
                              IDIST_SUM, &own_opts);
    free(unwanted);

    return status;
}

//------------------------------------------------------------------------------
// metrics that rank 0 computes from the rows of all ranks
//
//     gather       rank 0 gets the number and size of each rank's rows, and allocates memory
//     agree        that rank 0 has the memory, and that rows have the same size on all ranks
//     gatherv      the rows
//     agree        that the program's function succeeded on rank 0
//     broadcast    the value
//------------------------------------------------------------------------------

// The words that rank 0 gathers from each rank.
enum { IDIST__EPOCH_ROWS, IDIST__EPOCH_ROW_NBYTES, IDIST__EPOCH_WORDS };

// Checks the row sizes of all ranks and allocates memory for all rows. Sets counts[rank] to the
// number of bytes from each rank, and *total to the number of rows. Called on rank 0.
static idist_status idist__epoch_metric_alloc(const uint64_t *sizes, int ranks, size_t row_nbytes,
                                              size_t *counts, char **rows, uint64_t *total) {
    int rank;

    *rows = NULL;
    *total = 0;

    for (rank = 0; rank < ranks; rank++) {
        const uint64_t *size = sizes + IDIST__EPOCH_WORDS * rank;

        if (size[IDIST__EPOCH_ROW_NBYTES] != row_nbytes)
            return idist__fail(IDIST_ERR_ARG,
                               "epoch_metric: a row has %zu bytes here, but %llu on another rank",
                               row_nbytes, (unsigned long long)size[IDIST__EPOCH_ROW_NBYTES]);
        if (size[IDIST__EPOCH_ROWS] > (SIZE_MAX / 2 - *total * row_nbytes) / row_nbytes)
            return idist__fail(IDIST_ERR_NO_MEMORY,
                               "epoch_metric: no memory for the rows of all ranks");
        *total += size[IDIST__EPOCH_ROWS];
        counts[rank] = (size_t)size[IDIST__EPOCH_ROWS] * row_nbytes;
    }

    *rows = (char *)malloc((size_t)*total * row_nbytes + 1);
    if (!*rows)
        return idist__fail(IDIST_ERR_NO_MEMORY, "epoch_metric: no memory for %llu rows",
                           (unsigned long long)*total);

    return IDIST_OK;
}

// Gathers the rows of all ranks on rank 0. `own` contains the number and size of this rank's rows.
// Collective.
static idist_status idist__epoch_metric_gather(const void *rows, const uint64_t *own,
                                               uint64_t *sizes, size_t *counts, char **all,
                                               uint64_t *total, const idist_opts *opts) {
    size_t row_nbytes = (size_t)own[IDIST__EPOCH_ROW_NBYTES];
    size_t nbytes = (size_t)own[IDIST__EPOCH_ROWS] * row_nbytes;
    idist_status status = idist_gather(own, sizes, IDIST__EPOCH_WORDS, IDIST_U64, 0, opts);

    if (status != IDIST_OK) return status;
    if (idist_group_rank(opts->group) == 0)
        status = idist__epoch_metric_alloc(sizes, idist_group_size(opts->group), row_nbytes, counts,
                                           all, total);
    status = idist__agree(status, opts);
    if (status != IDIST_OK) return status;

    return idist_gatherv(rows, nbytes, *all, counts, NULL, IDIST_U8, 0, opts);
}

// Calls the program's function. Called on rank 0.
IDIST__NOINLINE static idist_status idist__epoch_metric_call(idist_epoch_metric_fn fn,
                                                             const void *rows, uint64_t total,
                                                             void *arg, double *value) {
    int result = 1;

    IDIST__CALLBACK(result = fn(rows, (size_t)total, arg, value));
    if (idist__callback_threw("epoch_metric", "the function")) return IDIST_ERR_CALLBACK;
    if (!result) return IDIST_OK;

    return idist__fail(IDIST_ERR_CALLBACK, "epoch_metric: the function failed with %d", result);
}

idist_status idist_epoch_metric(const void *rows, size_t n, size_t row_nbytes,
                                idist_epoch_metric_fn fn, void *arg, double *value,
                                const idist_opts *opts) {
    uint64_t own[IDIST__EPOCH_WORDS], total = 0, *sizes;
    size_t *counts, rank_nbytes;
    char *all = NULL;
    int ranks;
    double computed = 0;
    idist_opts own_opts;
    idist_status status = idist__agree_enter("epoch_metric", opts, &own_opts);

    if (status != IDIST_OK) return status;
    ranks = idist_group_size(own_opts.group);
    rank_nbytes = IDIST__EPOCH_WORDS * sizeof *sizes + sizeof *counts;
    sizes = (uint64_t *)malloc((size_t)ranks * rank_nbytes);
    counts = (size_t *)(void *)(sizes ? sizes + IDIST__EPOCH_WORDS * ranks : NULL);
    if (!sizes)
        status = idist__fail(IDIST_ERR_NO_MEMORY, "epoch_metric: no memory for %d ranks", ranks);
    else if (!row_nbytes || !fn || (n && !rows) || n > SIZE_MAX / 2 / row_nbytes)
        status =
            idist__fail(IDIST_ERR_ARG, "epoch_metric: %zu rows of %zu bytes, or a pointer is NULL",
                        n, row_nbytes);

    own[IDIST__EPOCH_ROWS] = n;
    own[IDIST__EPOCH_ROW_NBYTES] = row_nbytes;
    status = idist__agree(status, &own_opts);
    if (status == IDIST_OK)
        status = idist__epoch_metric_gather(rows, own, sizes, counts, &all, &total, &own_opts);

    if (status == IDIST_OK) {
        if (idist_group_rank(own_opts.group) == 0)
            status = idist__epoch_metric_call(fn, all, total, arg, &computed);
        status = idist__agree(status, &own_opts);
    }

    if (status == IDIST_OK) status = idist_broadcast(&computed, 1, IDIST_F64, 0, &own_opts);
    if (status == IDIST_OK && value) *value = computed;
    free(all);
    free(sizes);

    return status;
}
