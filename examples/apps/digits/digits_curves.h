// digits_curves.h - curves of loss and accuracy by epoch, written with --summary FOLDER
#ifndef EXAMPLES_DIGITS_CURVES_H
#define EXAMPLES_DIGITS_CURVES_H

#include "digits_job.h"

static inline idist_status job_begin_curves(job *j) {
    idist_summary_desc desc = {0};

    desc.folder = j->curves;
    return j->curves ? idist_summary_create(&desc, &j->summary) : IDIST_OK;
}

// Adds an epoch to the curves. `test_hits` is the number of recognized images among all test
// images.
static inline idist_status job_add_to_curves(const job *j, int epoch, double test_hits) {
    uint64_t step = (uint64_t)epoch;
    int n = j->train.count;
    idist_status status = idist_summary_add(j->summary, "train/loss", j->loss / n, step);

    if (status == IDIST_OK)
        status = idist_summary_add(j->summary, "train/accuracy", j->hits / n, step);
    if (status == IDIST_OK)
        status = idist_summary_add(j->summary, "test/accuracy", test_hits / j->test.count, step);
    return status;
}

#endif // EXAMPLES_DIGITS_CURVES_H
