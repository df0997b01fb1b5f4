// cifar10_validation.h - accuracy, loss and confusion matrix of apps/cifar10, over the images of
// one rank
#ifndef CIFAR10_VALIDATION_H
#define CIFAR10_VALIDATION_H
#include "cifar10_report.h"

typedef struct validation {
    double start_s;
    idist_accuracy hits; // hits, loss, confusion and cells are of this rank
    idist_mean loss;
    idist_confusion confusion;
    uint64_t cells[CLASSES * CLASSES];
    uint64_t confused[CLASSES * CLASSES]; // the confusion matrix of all ranks
    double accuracy, mean_loss;           // over all ranks
} validation;

static idist_status validation_update(validation *v, net *n) {
    size_t images = (size_t)n->images;
    idist_status status = idist_accuracy_update(&v->hits, n->scores, n->labels, images, CLASSES);

    if (status != IDIST_OK) return status;
    idist_mean_update(&v->loss, cross_entropy(n, n->labels), n->images);
    predict(n);

    return idist_confusion_update(&v->confusion, n->predicted, n->labels, images);
}

// Runs a new validation with the images of this rank, in order. If the images do not divide evenly
// among the ranks, some ranks get one of the first images again. The duplicates come last here and
// are not counted.
static idist_status classify(validation *v, net *n, const source *images) {
    int ranks = idist_get_world_size(), all = images->set.count;
    int left = (all - idist_get_rank() + ranks - 1) / ranks;
    idist_batch batch;
    idist_status status;

    memset(v, 0, sizeof *v);
    v->confusion.cells = v->cells;
    v->confusion.classes = CLASSES;
    v->start_s = seconds_now();
    n->training = false;
    for (;;) {
        status = idist_loader_next(images->loader, &batch);
        if (status != IDIST_OK || batch.n == 0) return status;
        forward(n, take_batch(n, &images->set, &batch));
        if (n->images > left) n->images = left;
        left -= n->images;
        if (n->images > 0) status = validation_update(v, n);
        if (status != IDIST_OK) return status;
    }
}

// Logs the two classes that were confused most often, if any were.
static void report_confusion(const validation *v, const char *const *names) {
    int label = 0, taken_for = 0;
    uint64_t most = 0, total = 0;

    for (int i = 0; i < CLASSES * CLASSES; i++) {
        if (i / CLASSES == i % CLASSES || v->confused[i] <= most) continue;
        most = v->confused[i];
        label = i / CLASSES;
        taken_for = i % CLASSES;
    }
    for (int k = 0; k < CLASSES; k++) total += v->confused[label * CLASSES + k];

    if (most > 0)
        idist_train_log(NAME, "Most confused: %s is taken for %s, %" PRIu64 " of %" PRIu64 " times",
                        names[label], names[taken_for], most, total);
}

#endif // CIFAR10_VALIDATION_H
