// stage.h - some layers of a network for the digits: forward, backward and step on one rank
#ifndef EXAMPLES_STAGE_H
#define EXAMPLES_STAGE_H

#include "dense.h"

enum {
    LAYERS = 4,
    WIDEST = 64,
    BATCH = 64,
    MICROS = 8, // micro-batches of a batch
    MICRO = BATCH / MICROS,
    TRAIN = 22 * BATCH,
    TEST = 6 * BATCH,
    EPOCHS = 6
};

static const int width[LAYERS + 1] = {DIGITS_PIXELS, 48, 40, 32, DIGITS_CLASSES};

// Data of a micro-batch that a rank keeps between its forward and its backward pass.
typedef struct micro {
    double out[LAYERS + 1][MICRO * WIDEST]; // out[k]: output of layer k - 1, input of layer k
    double back[MICRO * WIDEST];            // gradient of the input of this rank's first layer
} micro;

typedef struct stage {
    int first, last;        // layers first .. last - 1
    size_t inputs, outputs; // elements per micro-batch
    double *w, *g, *speed;  // of these layers only
    double loss;            // of the epoch so far, on the rank of the last layer
} stage;

// Returns the first layer of rank r of n. The last layer of rank r precedes the first layer of rank
// r + 1.
static inline int stage_begin(int r, int n) { return LAYERS * r / n; }

// Returns the number of parameters of the layers from .. to - 1.
static inline int stage_params(int from, int to) {
    int n = 0;

    for (; from < to; from++) n += dense_params(width[from], width[from + 1]);
    return n;
}

// Returns the number of parameters of rank r of n.
static inline size_t stage_size(int r, int n) {
    return (size_t)stage_params(stage_begin(r, n), stage_begin(r + 1, n));
}

// Creates the layers of rank r of n. Every rank draws the weights of all layers, so the weights do
// not depend on the division into ranks.
static inline bool stage_create(stage *s, int r, int n) {
    static double all[LAYERS * (WIDEST + 1) * WIDEST];
    int first = stage_begin(r, n), last = stage_begin(r + 1, n);
    size_t count = stage_size(r, n);
    uint64_t seed = 1;

    for (int k = 0; k < LAYERS; k++)
        dense_initialize(all + stage_params(0, k), width[k], width[k + 1], &seed);
    s->first = first;
    s->last = last;
    s->inputs = (size_t)(MICRO * width[first]);
    s->outputs = (size_t)(MICRO * width[last]);
    s->loss = 0;
    s->w = (double *)calloc(3 * count, sizeof *s->w);
    if (!s->w) return fprintf(stderr, "out of memory\n"), false;
    memcpy(s->w, all + stage_params(0, first), count * sizeof *s->w);
    s->g = s->w + count;
    s->speed = s->g + count;
    return true;
}

// Returns the n-th image in a shuffled order. Every image occurs once, because 1001 and the number
// of images are coprime. The first TRAIN images are for training, and the next TEST images are for
// the test.
static inline int stage_image(int n) { return n * 1001 % DIGITS_COUNT; }

static inline void stage_load(micro *m, const digits *d, int first) {
    for (int i = 0; i < MICRO; i++)
        memcpy(m->out[0] + i * width[0], d->pixels[stage_image(first + i)], sizeof d->pixels[0]);
}

static inline void stage_forward(const stage *s, micro *m) {
    for (int k = s->first; k < s->last; k++) {
        const double *w = s->w + stage_params(s->first, k);
        int in = width[k], out = width[k + 1];

        for (int i = 0; i < MICRO; i++)
            dense_forward(w, m->out[k] + i * in, in, m->out[k + 1] + i * out, out, k + 1 < LAYERS);
    }
}

// Computes the gradients of a micro-batch. `grad` is the gradient of the output of this rank's last
// layer, and is overwritten. Leaves the gradient of the input in m->back.
static inline void stage_backward(const stage *s, micro *m, double *grad) {
    for (int k = s->last; k-- > s->first;) {
        int at = stage_params(s->first, k), in = width[k], out = width[k + 1];

        for (int i = 0; i < MICRO; i++)
            dense_backward(s->w + at, s->g + at, m->out[k] + i * in, in, m->back + i * in,
                           m->out[k + 1] + i * out, grad + i * out, out, k + 1 < LAYERS);
        if (k > s->first) memcpy(grad, m->back, sizeof m->back);
    }
}

// Adds the loss of a micro-batch to s->loss, and writes its gradient to grad. Only the rank of the
// last layer calls this function.
static inline void stage_loss(stage *s, const digits *d, int first, const micro *m, double *grad) {
    for (int i = 0; i < MICRO; i++) {
        const double *logit = m->out[LAYERS] + i * DIGITS_CLASSES;
        int label = d->label[stage_image(first + i)];

        s->loss += digits_loss(logit, label, grad + i * DIGITS_CLASSES) / (double)TRAIN;
    }
}

static inline void stage_step(stage *s) {
    int n = stage_params(s->first, s->last);

    for (int i = 0; i < n; i++) s->g[i] /= (double)BATCH;
    sgd_step(s->w, s->speed, s->g, n, 0.05);
    memset(s->g, 0, (size_t)n * sizeof *s->g);
}

// Returns how many test images a stage of all layers classifies correctly.
static inline int stage_test(const stage *s, const digits *d) {
    static micro m;
    int right = 0;

    for (int n = TRAIN; n < TRAIN + TEST; n += MICRO) {
        stage_load(&m, d, n);
        stage_forward(s, &m);
        for (int i = 0; i < MICRO; i++)
            right +=
                digits_best(m.out[LAYERS] + i * DIGITS_CLASSES) == d->label[stage_image(n + i)];
    }
    return right;
}

// Repeats the training on this rank alone, and compares its weights with `expected`. Returns 0 if
// they are the same and the accuracy is 90 % or more.
static inline int stage_compare(const double *expected, const digits *d) {
    static micro m;
    double grad[MICRO * WIDEST];
    stage s;
    bool same;
    int right;

    if (!stage_create(&s, 0, 1)) return 1;
    for (int n = 0; n < EPOCHS * TRAIN; n += MICRO) {
        stage_load(&m, d, n % TRAIN);
        stage_forward(&s, &m);
        stage_loss(&s, d, n % TRAIN, &m, grad);
        stage_backward(&s, &m, grad);
        if ((n + MICRO) % BATCH == 0) stage_step(&s);
    }
    right = stage_test(&s, d);
    same = memcmp(expected, s.w, (size_t)stage_params(0, LAYERS) * sizeof *expected) == 0;
    free(s.w);
    printf("weights: %s bits as those of training on 1 rank\n", same ? "the same" : "NOT the same");
    printf("accuracy: %d of %d test images\n", right, TEST);
    return same && 100 * right >= 90 * TEST ? 0 : 1;
}

#endif // EXAMPLES_STAGE_H
