// cifar10_validation.h - accuracy, loss and confusion matrix of 20_cifar10.c, over the images of
// all ranks
#ifndef CIFAR10_VALIDATION_H
#define CIFAR10_VALIDATION_H
#include "cifar10_report.h"

typedef struct validation {
    double start_s;
    idist_accuracy hits;
    idist_mean loss;
    uint64_t cells[CLASSES * CLASSES];    // of the confusion matrix, of this rank
    uint64_t confused[CLASSES * CLASSES]; // and of all ranks
} validation;

static idist_status validation_update(validation *v, net *n) {
    idist_confusion confusion = {v->cells, CLASSES};
    size_t images = (size_t)n->images;
    idist_status status = idist_accuracy_update(&v->hits, n->scores, n->labels, images, CLASSES);

    if (status != IDIST_OK) return status;
    idist_mean_update(&v->loss, cross_entropy(n, n->labels), n->images);
    predict(n);

    return idist_confusion_update(&confusion, n->predicted, n->labels, images);
}

// The images of a set, in order. Where they do not divide evenly among the ranks, the first ones
// are dealt out twice; those come last here, and do not count.
static idist_status evaluate(validation *v, net *n, const image_set *set, idist_loader *loader) {
    int ranks = idist_get_world_size(), left = (set->count - idist_get_rank() + ranks - 1) / ranks;
    idist_batch batch;
    idist_status status;

    memset(v, 0, sizeof *v);
    v->start_s = seconds_now();
    n->training = false;
    for (;;) {
        status = idist_loader_next(loader, &batch);
        if (status != IDIST_OK || batch.n == 0) return status;
        forward(n, take_batch(n, set, &batch));
        if (n->images > left) n->images = left;
        left -= n->images;
        if (n->images > 0) status = validation_update(v, n);
        if (status != IDIST_OK) return status;
    }
}

// Collective: values[0] is the accuracy, [1] the loss, over all ranks. tag: "Test".
static idist_status report_validation(validation *v, uint64_t epoch, const char *tag,
                                      double values[2]) {
    static const char *const names[] = {"Accuracy", "Loss"};
    idist_confusion confusion = {v->cells, CLASSES};
    idist_status status = idist_accuracy_compute(&v->hits, &values[0], NULL);

    if (status == IDIST_OK) status = idist_mean_compute(&v->loss, &values[1], NULL);
    if (status == IDIST_OK) status = idist_confusion_compute(&confusion, v->confused, NULL);
    if (status != IDIST_OK) return status;

    idist_train_log_metrics(NAME, (int)epoch, seconds_now() - v->start_s, tag, names, values, 2);

    return IDIST_OK;
}

// The two classes that were confused most often, if any were.
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
