// subset.h - parts of the digits, drawn at random by idist_partition; include idist_train.h first
#ifndef EXAMPLES_SUBSET_H
#define EXAMPLES_SUBSET_H

#include "check.h"
#include "dense.h"

enum { SUBSET_SEED = 1234, SUBSET_MAX_PARTS = 64 };

typedef struct subset {
    size_t count, image[DIGITS_COUNT]; // indices of images
} subset;

// Sets *part to part `which` of n parts of `whole`, or of all images if `whole` is NULL. No
// communication is needed, because all ranks draw the same parts.
static inline int subset_part(const subset *whole, const double *fractions, int n, int which,
                              subset *part) {
    size_t count = whole ? whole->count : (size_t)DIGITS_COUNT;

    CHECK(idist_partition(count, fractions, n, which, SUBSET_SEED, part->image, &part->count));
    for (size_t i = 0; whole && i < part->count; i++) part->image[i] = whole->image[part->image[i]];
    return 0;
}

// Sets *part to part `which` of n equal parts of `whole`, or of all images if `whole` is NULL.
static inline int subset_equal_part(const subset *whole, int n, int which, subset *part) {
    double equal[SUBSET_MAX_PARTS];

    for (int i = 0; i < n; i++) equal[i] = 1.0 / n;
    return subset_part(whole, equal, n, which, part);
}

// Creates a sampler for all images of a subset. The subset belongs to this rank alone, so there is
// one replica.
static inline int subset_sampler(const subset *s, idist_sampler **sampler) {
    idist_sampler_desc desc;

    memset(&desc, 0, sizeof desc);
    desc.length = s->count;
    desc.num_replicas = 1;
    desc.seed = SUBSET_SEED;
    CHECK(idist_sampler_create(&desc, sampler));
    return 0;
}

// Sets *shuffled to the images of a subset in the order of an epoch.
static inline int subset_shuffle(const subset *s, idist_sampler *sampler, int epoch,
                                 subset *shuffled) {
    size_t position;

    CHECK(idist_sampler_set_epoch(sampler, (uint64_t)epoch));
    for (shuffled->count = 0; idist_sampler_next(sampler, &position); shuffled->count++)
        shuffled->image[shuffled->count] = s->image[position];
    return 0;
}

// Sets g to the mean gradient of `count` images from `first` on. After the last image, the first
// image is next. Returns the mean loss of these images.
static inline double subset_gradient(const double *w, const digits *d, const subset *s,
                                     size_t first, size_t count, double *g) {
    double loss = 0;

    memset(g, 0, DIGITS_PARAMS * sizeof *g);
    for (size_t i = first; i < first + count; i++)
        loss += digits_gradient(w, d, s->image[i % s->count], g);
    for (int i = 0; i < DIGITS_PARAMS; i++) g[i] /= (double)count;
    return loss / (double)count;
}

// Returns how many of the images first, first + step, ... are classified correctly.
static inline int subset_count_right(const double *w, const digits *d, const subset *s, int first,
                                     int step) {
    int right = 0;

    for (size_t i = (size_t)first; i < s->count; i += (size_t)step)
        right += digits_is_right(w, d, s->image[i]);
    return right;
}

#endif // EXAMPLES_SUBSET_H
