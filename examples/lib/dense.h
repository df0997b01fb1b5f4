// dense.h - fully connected layers, their loss, and a network of two of them for the digits
#ifndef EXAMPLES_DENSE_H
#define EXAMPLES_DENSE_H

#include "digits.h"
#include "numbers.h"

// ---- a layer ----

// Returns the number of parameters of a layer. The parameters form one array: a row of `inputs`
// weights for each output, then the biases.
static inline int dense_params(int inputs, int outputs) { return (inputs + 1) * outputs; }

// Draws uniform weights with He's bound sqrt(6 / inputs), and sets the biases to 0.
static inline void dense_initialize(double *w, int inputs, int outputs, uint64_t *state) {
    double bound = 6.0 / inputs, root = 1;

    for (int i = 0; i < 20; i++) root = (root + bound / root) / 2; // Newton's square root
    for (int i = 0; i < dense_params(inputs, outputs); i++) {
        double unit = 2 * random_unit(state) - 1;

        w[i] = i < inputs * outputs ? root * unit : 0;
    }
}

static inline void dense_forward(const double *w, const double *in, int inputs, double *out,
                                 int outputs, bool relu) {
    for (int o = 0; o < outputs; o++) {
        double sum = w[inputs * outputs + o];

        for (int i = 0; i < inputs; i++) sum += w[o * inputs + i] * in[i];
        out[o] = relu && sum < 0 ? 0 : sum;
    }
}

// Takes `dout`, the gradient of `out`. Adds the gradient of the parameters to g. Writes the
// gradient of `in` to din, unless din is NULL.
static inline void dense_backward(const double *w, double *g, const double *in, int inputs,
                                  double *din, const double *out, const double *dout, int outputs,
                                  bool relu) {
    for (int i = 0; din && i < inputs; i++) din[i] = 0;
    for (int o = 0; o < outputs; o++) {
        if (relu && out[o] <= 0) continue; // the relu set this output to 0
        g[inputs * outputs + o] += dout[o];
        for (int i = 0; i < inputs; i++) g[o * inputs + i] += dout[o] * in[i];
        for (int i = 0; din && i < inputs; i++) din[i] += dout[o] * w[o * inputs + i];
    }
}

// ---- the loss ----

static inline int digits_best(const double *logit) {
    int best = 0;

    for (int k = 1; k < DIGITS_CLASSES; k++)
        if (logit[k] > logit[best]) best = k;
    return best;
}

// Computes softmax and cross entropy. Returns the loss, and writes the gradient of the logits to
// dlogit.
static inline double digits_loss(const double *logit, int label, double *dlogit) {
    double sum = 0, top = logit[digits_best(logit)];

    for (int k = 0; k < DIGITS_CLASSES; k++) sum += dlogit[k] = exp_of(logit[k] - top);
    for (int k = 0; k < DIGITS_CLASSES; k++) dlogit[k] = dlogit[k] / sum - (k == label);

    return log_of(sum) + top - logit[label];
}

// ---- a small network: 64 pixels, 32 hidden units with relu, 10 classes ----

enum {
    DIGITS_HIDDEN = 32,
    DIGITS_LAYER1 = 65 * DIGITS_HIDDEN,
    DIGITS_LAYER2 = (DIGITS_HIDDEN + 1) * 10,
    DIGITS_PARAMS = DIGITS_LAYER1 + DIGITS_LAYER2
};

static inline void digits_initialize(double *w, uint64_t seed) {
    dense_initialize(w, DIGITS_PIXELS, DIGITS_HIDDEN, &seed);
    dense_initialize(w + DIGITS_LAYER1, DIGITS_HIDDEN, DIGITS_CLASSES, &seed);
}

static inline void digits_forward(const double *w, const double *pixels, double *hidden,
                                  double *logit) {
    dense_forward(w, pixels, DIGITS_PIXELS, hidden, DIGITS_HIDDEN, true);
    dense_forward(w + DIGITS_LAYER1, hidden, DIGITS_HIDDEN, logit, DIGITS_CLASSES, false);
}

static inline bool digits_is_right(const double *w, const digits *d, size_t image) {
    double hidden[DIGITS_HIDDEN], logit[DIGITS_CLASSES];

    digits_forward(w, d->pixels[image], hidden, logit);
    return digits_best(logit) == d->label[image];
}

// Adds the gradient of one image to g, and returns the loss of the image.
static inline double digits_gradient(const double *w, const digits *d, size_t image, double *g) {
    double hidden[DIGITS_HIDDEN], logit[DIGITS_CLASSES];
    double dhidden[DIGITS_HIDDEN], dlogit[DIGITS_CLASSES], loss;

    digits_forward(w, d->pixels[image], hidden, logit);
    loss = digits_loss(logit, d->label[image], dlogit);
    dense_backward(w + DIGITS_LAYER1, g + DIGITS_LAYER1, hidden, DIGITS_HIDDEN, dhidden, logit,
                   dlogit, DIGITS_CLASSES, false);
    dense_backward(w, g, d->pixels[image], DIGITS_PIXELS, NULL, hidden, dhidden, DIGITS_HIDDEN,
                   true);
    return loss;
}

// Makes a step of SGD with momentum 0.9.
static inline void sgd_step(double *w, double *speed, const double *g, int n, double rate) {
    for (int i = 0; i < n; i++) {
        speed[i] = 0.9 * speed[i] + g[i];
        w[i] -= rate * speed[i];
    }
}

#endif // EXAMPLES_DENSE_H
