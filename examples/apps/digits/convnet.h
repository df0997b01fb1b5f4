// convnet.h - the network: two convolutions, a max pool, a dense layer, softmax
#ifndef EXAMPLES_CONVNET_H
#define EXAMPLES_CONVNET_H

#include "../../lib/digits.h"
#include "../../lib/numbers.h"

// Feature maps have CH channels and a border of zeros, so that a 3x3 window fits everywhere. W1 to
// B3 are the offsets of the parameters of each layer. The gradients have the same offsets in an
// array with two more elements, the loss and the hits. One all_reduce sums the whole array.
enum {
    SIDE = DIGITS_SIDE,
    CLASSES = DIGITS_CLASSES,
    CH = 16,
    PAD = SIDE + 2,
    HALF = SIDE / 2,
    POOLED = HALF * HALF * CH,

    W1 = 0,
    B1 = W1 + 9 * CH,
    W2 = B1 + CH,
    B2 = W2 + 9 * CH * CH,
    W3 = B2 + CH,
    B3 = W3 + POOLED * CLASSES,
    PARAMS = B3 + CLASSES,
    LOSS = PARAMS,
    HITS,
    SUMS
};

// Output of each layer for one image, and the gradients of the backward pass.
typedef struct convnet_layers {
    double input[PAD * PAD], map1[PAD * PAD * CH], map2[PAD * PAD * CH];
    double pooled[POOLED], prob[CLASSES];
    double dmap1[PAD * PAD * CH], dmap2[PAD * PAD * CH];
    int winner[POOLED]; // index in map2 of the maximum of each 2x2 window
} convnet_layers;

// ---- parameters ----

// Draws weights uniformly from -bound to bound. He's rule for relu is bound = sqrt(6 / inputs of a
// unit).
static inline void convnet_draw(double *w, int count, double bound, uint64_t *state) {
    for (int i = 0; i < count; i++) w[i] = bound * (2 * random_unit(state) - 1);
}

static inline void convnet_initialize(double *w, uint64_t seed) { // biases stay 0
    convnet_draw(w + W1, 9 * CH, 0.8165, &seed);
    convnet_draw(w + W2, 9 * CH * CH, 0.2041, &seed);
    convnet_draw(w + W3, POOLED * CLASSES, 0.1531, &seed);
}

// Makes a step of SGD with momentum 0.9 and weight decay 1e-3; g is the sum of the gradients of
// `count` images.
static inline void convnet_step(double *w, double *speed, const double *g, int count, double rate) {
    for (int i = 0; i < PARAMS; i++) {
        speed[i] = 0.9 * speed[i] + g[i] / count + 1e-3 * w[i];
        w[i] -= rate * speed[i];
    }
}

// ---- layers ----

static inline int convnet_place(int y, int x) { return (y + 1) * PAD + x + 1; }

// Computes out = relu(conv3x3(in) + b). Channels are innermost, so that the loops over them
// vectorize. After a relu about half of `in` is zero, and zeros are skipped.
static inline void conv_forward(const double *in, int nin, const double *w, const double *b,
                                double *out) {
    for (int at = 0; at < SIDE * SIDE; at++) {
        int y = at / SIDE, x = at % SIDE;
        double sum[CH];

        memcpy(sum, b, sizeof sum);
        for (int tap = 0; tap < 9; tap++) {
            const double *from = in + convnet_place(y + tap / 3 - 1, x + tap % 3 - 1) * nin;

            for (int i = 0; i < nin; i++) {
                const double *row = w + (tap * nin + i) * CH;

                if (from[i] != 0)
                    for (int c = 0; c < CH; c++) sum[c] += from[i] * row[c];
            }
        }
        for (int c = 0; c < CH; c++) out[convnet_place(y, x) * CH + c] = sum[c] > 0 ? sum[c] : 0;
    }
}

// Adds to dw and db the gradients that follow from dout. Adds to din only where `in` is not zero,
// because no gradient flows back through a value that a relu set to zero. For the input image, din
// is NULL.
static inline void conv_backward(const double *in, int nin, const double *w, const double *dout,
                                 double *dw, double *db, double *din) {
    for (int k = 0; k < SIDE * SIDE; k++) {
        int y = k / SIDE, x = k % SIDE;
        const double *g = dout + convnet_place(y, x) * CH;

        for (int c = 0; c < CH; c++) db[c] += g[c];
        for (int tap = 0; tap < 9; tap++) {
            int at = convnet_place(y + tap / 3 - 1, x + tap % 3 - 1) * nin;

            for (int i = 0; i < nin; i++) {
                double value = in[at + i], even = 0, odd = 0;
                const double *row = w + (tap * nin + i) * CH;
                double *drow = dw + (tap * nin + i) * CH;

                if (value == 0) continue;
                for (int c = 0; c < CH; c++) drow[c] += value * g[c];
                for (int c = 0; din && c < CH; c += 2) {
                    even += row[c] * g[c];
                    odd += row[c + 1] * g[c + 1];
                }
                if (din) din[at + i] += even + odd;
            }
        }
    }
}

static inline void pool_forward(convnet_layers *l) {
    for (int i = 0; i < POOLED; i++) {
        int c = i % CH, y = i / CH / HALF * 2, x = i / CH % HALF * 2;
        int best = convnet_place(y, x) * CH + c;

        for (int k = 1; k < 4; k++) {
            int at = convnet_place(y + k / 2, x + k % 2) * CH + c;

            if (l->map2[at] > l->map2[best]) best = at;
        }
        l->winner[i] = best;
        l->pooled[i] = l->map2[best];
    }
}

// ---- the network ----

// Fills l->prob. Returns the most likely class, and sets *loss to the cross entropy of the label.
// The image is moved by `shift` places, at most one in each direction, so its edge may move into
// the border.
static inline int convnet_forward(const double *w, const digit *im, int shift, convnet_layers *l,
                                  double *loss) {
    double logit[CLASSES], sum = 0;
    int best = 0;

    memset(l->input, 0, sizeof l->input);
    for (int i = 0; i < SIDE * SIDE; i++)
        l->input[convnet_place(i / SIDE, i % SIDE) + shift] = im->pixels[i] / 16.0;
    conv_forward(l->input, 1, w + W1, w + B1, l->map1);
    conv_forward(l->map1, CH, w + W2, w + B2, l->map2);
    pool_forward(l);

    memcpy(logit, w + B3, sizeof logit);
    for (int i = 0; i < POOLED; i++)
        for (int k = 0; k < CLASSES; k++) logit[k] += l->pooled[i] * w[W3 + i * CLASSES + k];
    for (int k = 1; k < CLASSES; k++)
        if (logit[k] > logit[best]) best = k;
    for (int k = 0; k < CLASSES; k++) sum += l->prob[k] = exp_of(logit[k] - logit[best]);
    for (int k = 0; k < CLASSES; k++) l->prob[k] /= sum;

    *loss = log_of(sum) + logit[best] - logit[im->label];
    return best;
}

// Adds the gradient of one image to `sums`, together with its loss and, if the image was
// recognized, a hit.
static inline void convnet_gradient(const double *w, const digit *im, int shift, convnet_layers *l,
                                    double *sums) {
    double loss, delta[CLASSES];

    sums[HITS] += convnet_forward(w, im, shift, l, &loss) == im->label;
    sums[LOSS] += loss;
    for (int k = 0; k < CLASSES; k++) {
        delta[k] = l->prob[k] - (k == im->label);
        sums[B3 + k] += delta[k];
    }

    memset(l->dmap1, 0, sizeof l->dmap1);
    memset(l->dmap2, 0, sizeof l->dmap2);
    for (int i = 0; i < POOLED; i++) {
        double back = 0;

        if (l->pooled[i] <= 0) continue;
        for (int k = 0; k < CLASSES; k++) {
            sums[W3 + i * CLASSES + k] += l->pooled[i] * delta[k];
            back += w[W3 + i * CLASSES + k] * delta[k];
        }
        l->dmap2[l->winner[i]] = back;
    }
    conv_backward(l->map1, CH, w + W2, l->dmap2, sums + W2, sums + B2, l->dmap1);
    conv_backward(l->input, 1, w + W1, l->dmap1, sums + W1, sums + B1, NULL);
}

#endif // EXAMPLES_CONVNET_H
