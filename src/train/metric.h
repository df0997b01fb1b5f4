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

// Returns true if fewer than k classes come before the label in a row. A class comes before the
// label if its score is higher, or if its score is equal and its number is lower. Returns false if
// the row contains a NaN.
static bool idist__metric_is_among(const float *row, int label, int classes, int k) {
    float score = row[label];
    int i, before = 0;

    for (i = 0; i < classes && before < k; i++) {
        if (row[i] != row[i]) return false; // a NaN
        if (row[i] > score || (row[i] == score && i < label)) before++;
    }

    return before < k;
}

// Adds n samples. A sample is correct if its label is among the first k classes of its row.
static idist_status idist__metric_add_rows(const char *name, idist_accuracy *m, const float *scores,
                                           const int *labels, size_t n, int classes, int k) {
    size_t i;

    if (!m || (n && (!scores || !labels)) || classes < 1)
        return idist__fail(IDIST_ERR_ARG, "%s: %d classes, or a pointer is NULL", name, classes);
    if (k < 1 || k > classes)
        return idist__fail(IDIST_ERR_ARG, "%s: k is %d, which is not in 1 .. %d", name, k, classes);
    for (i = 0; i < n; i++)
        if (labels[i] < 0 || labels[i] >= classes)
            return idist__fail(IDIST_ERR_ARG, "%s: label %d of sample %zu is not in 0 .. %d", name,
                               labels[i], i, classes - 1);

    for (i = 0; i < n; i++)
        m->correct += idist__metric_is_among(scores + i * (size_t)classes, labels[i], classes, k);
    m->total += n;

    return IDIST_OK;
}

idist_status idist_accuracy_update(idist_accuracy *m, const float *scores, const int *labels,
                                   size_t n, int classes) {
    return idist__metric_add_rows("accuracy_update", m, scores, labels, n, classes, 1);
}

idist_status idist_accuracy_update_top_k(idist_accuracy *m, const float *scores, const int *labels,
                                         size_t n, int classes, int k) {
    return idist__metric_add_rows("accuracy_update_top_k", m, scores, labels, n, classes, k);
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

// Adds the squares or the absolute values of the differences between predictions and targets.
static idist_status idist__metric_add_errors(const char *name, idist_mean *mean,
                                             const float *predicted, const float *targets,
                                             size_t count, bool squared) {
    double sum = 0;
    size_t i;

    if (!mean || (count && (!predicted || !targets)))
        return idist__fail(IDIST_ERR_ARG, "%s: a pointer is NULL", name);

    for (i = 0; i < count; i++) {
        double error = (double)predicted[i] - (double)targets[i];

        if (squared) sum += error * error;
        else sum += error < 0 ? -error : error;
    }

    mean->sum += sum;
    mean->weight += (double)count;

    return IDIST_OK;
}

idist_status idist_mean_squared_error_update(idist_mean *mean, const float *predicted,
                                             const float *targets, size_t count) {
    return idist__metric_add_errors("mean_squared_error_update", mean, predicted, targets, count,
                                    true);
}

idist_status idist_mean_absolute_error_update(idist_mean *mean, const float *predicted,
                                              const float *targets, size_t count) {
    return idist__metric_add_errors("mean_absolute_error_update", mean, predicted, targets, count,
                                    false);
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

// A metric that rank 0 computes.
typedef struct idist__epoch_metric {
    const char *name; // of the public function, for error texts
    const void *rows; // of this rank
    size_t n, row_nbytes;
    idist_epoch_metric_fn fn;
    void *arg;              // passed to fn
    const idist_opts *opts; // from idist__agree_enter
} idist__epoch_metric;

// The words that rank 0 gathers from each rank.
enum { IDIST__EPOCH_ROWS, IDIST__EPOCH_ROW_NBYTES, IDIST__EPOCH_WORDS };

// Checks the row sizes of all ranks and allocates memory for all rows. Sets counts[rank] to the
// number of bytes from each rank, and *total to the number of rows. Called on rank 0.
static idist_status idist__epoch_metric_alloc(const idist__epoch_metric *metric,
                                              const uint64_t *sizes, size_t *counts, char **rows,
                                              uint64_t *total) {
    size_t row_nbytes = metric->row_nbytes;
    int rank, ranks = idist_group_size(metric->opts->group);

    *rows = NULL;
    *total = 0;

    for (rank = 0; rank < ranks; rank++) {
        const uint64_t *size = sizes + IDIST__EPOCH_WORDS * rank;

        if (size[IDIST__EPOCH_ROW_NBYTES] != row_nbytes)
            return idist__fail(IDIST_ERR_ARG,
                               "%s: a row has %zu bytes here, but %llu on another rank",
                               metric->name, row_nbytes,
                               (unsigned long long)size[IDIST__EPOCH_ROW_NBYTES]);
        if (size[IDIST__EPOCH_ROWS] > (SIZE_MAX / 2 - *total * row_nbytes) / row_nbytes)
            return idist__fail(IDIST_ERR_NO_MEMORY, "%s: no memory for the rows of all ranks",
                               metric->name);
        *total += size[IDIST__EPOCH_ROWS];
        counts[rank] = (size_t)size[IDIST__EPOCH_ROWS] * row_nbytes;
    }

    *rows = (char *)malloc((size_t)*total * row_nbytes + 1);
    if (!*rows)
        return idist__fail(IDIST_ERR_NO_MEMORY, "%s: no memory for %llu rows", metric->name,
                           (unsigned long long)*total);

    return IDIST_OK;
}

// Gathers the rows of all ranks on rank 0. Collective.
static idist_status idist__epoch_metric_gather(const idist__epoch_metric *metric, uint64_t *sizes,
                                               size_t *counts, char **all, uint64_t *total) {
    const idist_opts *opts = metric->opts;
    uint64_t own[IDIST__EPOCH_WORDS];
    idist_status status;

    own[IDIST__EPOCH_ROWS] = metric->n;
    own[IDIST__EPOCH_ROW_NBYTES] = metric->row_nbytes;
    status = idist_gather(own, sizes, IDIST__EPOCH_WORDS, IDIST_U64, 0, opts);
    if (status != IDIST_OK) return status;

    if (idist_group_rank(opts->group) == 0)
        status = idist__epoch_metric_alloc(metric, sizes, counts, all, total);
    status = idist__agree(status, opts);
    if (status != IDIST_OK) return status;

    return idist_gatherv(metric->rows, metric->n * metric->row_nbytes, *all, counts, NULL, IDIST_U8,
                         0, opts);
}

// Calls the function of the metric. Called on rank 0.
IDIST__NOINLINE static idist_status idist__epoch_metric_call(const idist__epoch_metric *metric,
                                                             const void *rows, uint64_t total,
                                                             double *value) {
    int result = 1;

    IDIST__CALLBACK(result = metric->fn(rows, (size_t)total, metric->arg, value));
    if (idist__callback_threw(metric->name, "the function")) return IDIST_ERR_CALLBACK;
    if (!result) return IDIST_OK;

    return idist__fail(IDIST_ERR_CALLBACK, "%s: the function failed with %d", metric->name, result);
}

// Computes a metric on rank 0 and gives its value to all ranks. If `mine` is not IDIST_OK, this
// rank cannot take part, and all ranks get this status. Collective.
static idist_status idist__epoch_metric_run(const idist__epoch_metric *metric, idist_status mine,
                                            double *value) {
    const idist_opts *opts = metric->opts;
    int ranks = idist_group_size(opts->group);
    uint64_t total = 0, *sizes;
    size_t *counts, rank_nbytes = IDIST__EPOCH_WORDS * sizeof *sizes + sizeof *counts;
    char *all = NULL;
    double computed = 0;
    idist_status status = mine;

    sizes = (uint64_t *)malloc((size_t)ranks * rank_nbytes);
    counts = (size_t *)(void *)(sizes ? sizes + IDIST__EPOCH_WORDS * ranks : NULL);
    if (!sizes && status == IDIST_OK)
        status =
            idist__fail(IDIST_ERR_NO_MEMORY, "%s: no memory for %d ranks", metric->name, ranks);

    status = idist__agree(status, opts);
    if (status == IDIST_OK)
        status = idist__epoch_metric_gather(metric, sizes, counts, &all, &total);

    if (status == IDIST_OK) {
        if (idist_group_rank(opts->group) == 0)
            status = idist__epoch_metric_call(metric, all, total, &computed);
        status = idist__agree(status, opts);
    }

    if (status == IDIST_OK) status = idist_broadcast(&computed, 1, IDIST_F64, 0, opts);
    if (status == IDIST_OK && value) *value = computed;
    free(all);
    free(sizes);

    return status;
}

idist_status idist_epoch_metric(const void *rows, size_t n, size_t row_nbytes,
                                idist_epoch_metric_fn fn, void *arg, double *value,
                                const idist_opts *opts) {
    idist_opts own_opts;
    idist__epoch_metric metric = {"epoch_metric", rows, n, row_nbytes, fn, arg, &own_opts};
    idist_status status = idist__agree_enter("epoch_metric", opts, &own_opts);

    if (status != IDIST_OK) return status;
    if (!row_nbytes || !fn || (n && !rows) || n > SIZE_MAX / 2 / row_nbytes)
        status =
            idist__fail(IDIST_ERR_ARG, "epoch_metric: %zu rows of %zu bytes, or a pointer is NULL",
                        n, row_nbytes);

    return idist__epoch_metric_run(&metric, status, value);
}
