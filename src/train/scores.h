// train/scores.h: scores of a confusion matrix
//
// Each score of a class is a fraction of three counts of samples:
//
//                                     correct
//     score = ---------------------------------------------------------
//             a * labels  +  b * predictions  +  c * correct predictions
//
// Precision has the factors 0, 1, 0; recall 1, 0, 0; IoU 1, 1, -1. F-beta divides beta^2 and 1 by
// 1 + beta^2. Counts are added in double, so they do not overflow. Sums are exact up to 2^53.
#pragma once

#include "base/fail.h"
#include "base/text.h"

// Samples of a class, or the factors of these counts in the denominator of a score.
typedef struct idist__scores_terms {
    double labels;    // samples with this label
    double predicted; // samples for which the class was predicted
    double correct;   // samples for which the class was predicted correctly
} idist__scores_terms;

// Returns the counts of a class.
static idist__scores_terms idist__scores_count(const uint64_t *cells, int classes, int which) {
    const uint64_t *row = cells + (size_t)which * (size_t)classes, *column = cells + which;
    idist__scores_terms counts;
    int k;

    counts.labels = counts.predicted = 0;
    counts.correct = (double)row[which];

    for (k = 0; k < classes; k++) {
        counts.labels += (double)row[k];
        counts.predicted += (double)column[(size_t)k * (size_t)classes];
    }

    return counts;
}

// Returns the score of a class, which is 0 if nothing is correct.
static double idist__scores_divide(const idist__scores_terms *counts,
                                   const idist__scores_terms *factors) {
    double whole = counts->labels * factors->labels + counts->predicted * factors->predicted +
                   counts->correct * factors->correct;

    if (counts->correct == 0) return 0;
    if (whole < counts->correct) whole = counts->correct; // a rounding error

    return counts->correct / whole;
}

// Computes the scores of all classes, whose denominators have the given factors, and averages them.
static idist_status idist__scores_compute(const char *name, const uint64_t *cells, int classes,
                                          const idist__scores_terms *factors, idist_average average,
                                          double *values) {
    idist__scores_terms all = {0, 0, 0};
    double sum = 0, weighted = 0;
    int k;

    if (!cells || !values || classes < 1)
        return idist__fail(IDIST_ERR_ARG, "%s: %d classes, or a pointer is NULL", name, classes);
    if ((int)average < IDIST_AVERAGE_MACRO || average > IDIST_AVERAGE_NONE)
        return idist__fail(IDIST_ERR_ARG, "%s: invalid average %d", name, (int)average);

    for (k = 0; k < classes; k++) {
        idist__scores_terms counts = idist__scores_count(cells, classes, k);
        double score = idist__scores_divide(&counts, factors);

        all.labels += counts.labels;
        all.predicted += counts.predicted;
        all.correct += counts.correct;
        sum += score;
        weighted += score * counts.labels;
        if (average == IDIST_AVERAGE_NONE) values[k] = score;
    }

    if (average == IDIST_AVERAGE_MACRO) *values = sum / classes;
    if (average == IDIST_AVERAGE_MICRO) *values = idist__scores_divide(&all, factors);
    if (average == IDIST_AVERAGE_WEIGHTED) *values = all.labels > 0 ? weighted / all.labels : 0;

    return IDIST_OK;
}

idist_status idist_precision(const uint64_t *cells, int classes, idist_average average,
                             double *values) {
    static const idist__scores_terms factors = {0, 1, 0};
    return idist__scores_compute("precision", cells, classes, &factors, average, values);
}

idist_status idist_recall(const uint64_t *cells, int classes, idist_average average,
                          double *values) {
    static const idist__scores_terms factors = {1, 0, 0};
    return idist__scores_compute("recall", cells, classes, &factors, average, values);
}

idist_status idist_f_beta(const uint64_t *cells, int classes, double beta, idist_average average,
                          double *values) {
    char text[IDIST__NUMBER_NBYTES];
    idist__scores_terms factors = {0, 0, 0};
    // The square of a large beta could be infinite, so for a beta above 1 this function uses the
    // square of 1 / beta.
    double inverse = beta > 1 ? 1 / beta : 1, square = beta > 1 ? 1 : beta * beta;

    if (!(beta >= 0))
        return idist__fail(IDIST_ERR_ARG, "f_beta: beta must be at least 0, got %s",
                           idist__number_print(text, beta, 6));

    factors.labels = square / (square + inverse * inverse);
    factors.predicted = inverse * inverse / (square + inverse * inverse);

    return idist__scores_compute("f_beta", cells, classes, &factors, average, values);
}

idist_status idist_iou(const uint64_t *cells, int classes, idist_average average, double *values) {
    static const idist__scores_terms factors = {1, 1, -1};
    return idist__scores_compute("iou", cells, classes, &factors, average, values);
}
