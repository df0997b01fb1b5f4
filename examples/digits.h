// digits.h - what the examples 21 to 25 share: the images of data/digits.csv, a
// network of fully connected layers, its loss. C and C++; nothing in here communicates, and
// nothing needs -lm.
#ifndef DIGITS_H
#define DIGITS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DIGITS_COUNT = 1797, DIGITS_PIXELS = 64, DIGITS_CLASSES = 10 };

typedef struct digits {
    double pixels[DIGITS_COUNT][DIGITS_PIXELS]; // 0 .. 1
    int label[DIGITS_COUNT];                    // 0 .. 9
} digits;

// ---- the program's start ----

// The number of ranks that the only argument asks for, or `none_given`; 0 when it is wrong, and
// says so.
static inline int digits_ranks(int argc, char **argv, int none_given, int min, int max) {
    char *end = NULL;
    long ranks = argc > 1 ? strtol(argv[1], &end, 10) : none_given;
    if (argc <= 2 && (!end || (end != argv[1] && !*end)) && ranks >= min && ranks <= max)
        return (int)ranks;
    fprintf(stderr, "usage: %s [number of ranks, %d to %d]\n", argv[0], min, max);
    return 0;
}

// Below the current folder, or beside this file. False, and says why, when it is not there or not
// what it should be.
static inline bool digits_load(digits *d) {
    char beside[1024];
    const char *slash = strrchr(__FILE__, '/');
    int n = 0;
    FILE *f = fopen("examples/data/digits.csv", "r");
    snprintf(beside, sizeof beside, "%.*sdata/digits.csv", slash ? (int)(slash - __FILE__) + 1 : 0,
             __FILE__);
    if (!f) f = fopen(beside, "r");
    if (!f) {
        fprintf(
            stderr,
            "examples/data/digits.csv is not here: run this in the folder that has examples/\n");
        return false;
    }
    for (; n < DIGITS_COUNT * (DIGITS_PIXELS + 1);
         n++) { // 64 pixels of 0 .. 16 and the label, divided by commas
        int image = n / (DIGITS_PIXELS + 1), k = n % (DIGITS_PIXELS + 1), value = 0;
        if (fscanf(f, k < DIGITS_PIXELS ? "%d," : "%d", &value) != 1 || value < 0) break;
        if (value > (k < DIGITS_PIXELS ? 16 : DIGITS_CLASSES - 1)) break;
        if (k < DIGITS_PIXELS) d->pixels[image][k] = value / 16.0;
        else d->label[image] = value;
    }
    fclose(f);
    if (n == DIGITS_COUNT * (DIGITS_PIXELS + 1)) return true;
    fprintf(stderr, "digits.csv: line %d is not 64 pixels and a label\n",
            n / (DIGITS_PIXELS + 1) + 1);
    return false;
}

// ---- a layer ----

// Its parameters lie together: a row of `inputs` weights per output, then the biases.
static inline int dense_params(int inputs, int outputs) { return (inputs + 1) * outputs; }

// Weights uniform with He's bound sqrt(6 / inputs), biases 0.
static inline void dense_initialise(double *w, int inputs, int outputs, uint64_t *state) {
    double bound = 6.0 / inputs, root = 1;
    int i;
    for (i = 0; i < 20; i++) root = (root + bound / root) / 2; // Newton's square root
    for (i = 0; i < dense_params(inputs, outputs); i++) {
        uint64_t z = (*state += 0x9e3779b97f4a7c15u); // splitmix64
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        w[i] = i < inputs * outputs
                   ? root * ((double)((z ^ (z >> 31)) >> 11) / 4503599627370496.0 - 1)
                   : 0;
    }
}

static inline void dense_forward(const double *w, const double *in, int inputs, double *out,
                                 int outputs, bool relu) {
    int i, o;
    for (o = 0; o < outputs; o++) {
        double sum = w[inputs * outputs + o];
        for (i = 0; i < inputs; i++) sum += w[o * inputs + i] * in[i];
        out[o] = relu && sum < 0 ? 0 : sum;
    }
}

// From the gradient of `out`: adds that of the parameters to g, and writes that of `in` to din,
// unless it is NULL.
static inline void dense_backward(const double *w, double *g, const double *in, int inputs,
                                  double *din, const double *out, const double *dout, int outputs,
                                  bool relu) {
    int i, o;
    for (i = 0; din && i < inputs; i++) din[i] = 0;
    for (o = 0; o < outputs; o++) {
        if (relu && out[o] <= 0) continue; // nothing flows back through what the relu cut off
        g[inputs * outputs + o] += dout[o];
        for (i = 0; i < inputs; i++) g[o * inputs + i] += dout[o] * in[i];
        for (i = 0; din && i < inputs; i++) din[i] += dout[o] * w[o * inputs + i];
    }
}

// ---- the loss ----

static inline double digits_exp(double x) { // x <= 0
    double y = x / 1024, sum = 1;
    int k;
    if (x < -700) return 0;
    for (k = 12; k >= 1; k--) sum = 1 + sum * y / k; // Taylor; |y| < 0.7
    for (k = 0; k < 10; k++) sum *= sum;
    return sum;
}

static inline double digits_log(double x) { // 1 <= x <= 10: Halley's iteration on exp
    double y = 0;
    int k;
    for (k = 0; k < 8; k++) {
        double inverse = digits_exp(-y);
        y += 2 * (x * inverse - 1) / (x * inverse + 1);
    }
    return y;
}

static inline int digits_best(const double *logit) {
    int k, best = 0;
    for (k = 1; k < DIGITS_CLASSES; k++)
        if (logit[k] > logit[best]) best = k;
    return best;
}

// Softmax and cross entropy: the loss, and in dlogit its gradient.
static inline double digits_loss(const double *logit, int label, double *dlogit) {
    double sum = 0, top = logit[digits_best(logit)];
    int k;
    for (k = 0; k < DIGITS_CLASSES; k++) sum += dlogit[k] = digits_exp(logit[k] - top);
    for (k = 0; k < DIGITS_CLASSES; k++) dlogit[k] = dlogit[k] / sum - (k == label);
    return digits_log(sum) + top - logit[label];
}

// ---- a small network: 64 pixels, 32 hidden units with relu, 10 classes ----

enum { DIGITS_HIDDEN = 32, DIGITS_LAYER1 = (DIGITS_PIXELS + 1) * DIGITS_HIDDEN };
enum {
    DIGITS_LAYER2 = (DIGITS_HIDDEN + 1) * DIGITS_CLASSES,
    DIGITS_PARAMS = DIGITS_LAYER1 + DIGITS_LAYER2
};

static inline void digits_initialise(double *w, uint64_t seed) {
    dense_initialise(w, DIGITS_PIXELS, DIGITS_HIDDEN, &seed);
    dense_initialise(w + DIGITS_LAYER1, DIGITS_HIDDEN, DIGITS_CLASSES, &seed);
}

static inline bool digits_is_right(const double *w, const digits *d, size_t image) {
    double hidden[DIGITS_HIDDEN], logit[DIGITS_CLASSES];
    dense_forward(w, d->pixels[image], DIGITS_PIXELS, hidden, DIGITS_HIDDEN, true);
    dense_forward(w + DIGITS_LAYER1, hidden, DIGITS_HIDDEN, logit, DIGITS_CLASSES, false);
    return digits_best(logit) == d->label[image];
}

// Adds the gradient of one image to g, and gives its loss.
static inline double digits_gradient(const double *w, const digits *d, size_t image, double *g) {
    double hidden[DIGITS_HIDDEN], logit[DIGITS_CLASSES], dhidden[DIGITS_HIDDEN],
        dlogit[DIGITS_CLASSES], loss;
    dense_forward(w, d->pixels[image], DIGITS_PIXELS, hidden, DIGITS_HIDDEN, true);
    dense_forward(w + DIGITS_LAYER1, hidden, DIGITS_HIDDEN, logit, DIGITS_CLASSES, false);
    loss = digits_loss(logit, d->label[image], dlogit);
    dense_backward(w + DIGITS_LAYER1, g + DIGITS_LAYER1, hidden, DIGITS_HIDDEN, dhidden, logit,
                   dlogit, DIGITS_CLASSES, false);
    dense_backward(w, g, d->pixels[image], DIGITS_PIXELS, NULL, hidden, dhidden, DIGITS_HIDDEN,
                   true);
    return loss;
}

#endif // DIGITS_H
