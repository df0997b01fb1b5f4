// cartpole.h - a simulator of a cart with a pole, the policy that pushes the cart, and the policy's
// gradient
#ifndef EXAMPLES_CARTPOLE_H
#define EXAMPLES_CARTPOLE_H

#include "../../lib/numbers.h"

#include <stdbool.h>
#include <string.h>

// Offsets of the policy's weights, which are one array: a hidden layer of 16 units, then the logit
// of a push to the right.
enum {
    STATE = 4,
    HIDDEN = 16,
    W1 = 0,
    B1 = W1 + STATE * HIDDEN,
    W2 = B1 + HIDDEN,
    B2 = W2 + HIDDEN,
    WEIGHTS = B2 + 1
};

typedef struct step {
    float state[STATE]; // position and speed of the cart, angle and angular speed of the pole
    float push;         // 1 to the right, 0 to the left
} step;

// ---- one simulator ----

// Advances a simulator by 1/50 s. Returns false if the pole fell, if the cart left its track, or if
// a number is NaN.
static inline bool move(float *s, bool right) {
    double a = s[2], a2 = a * a; // a is at most 0.21, so a few terms of the series are enough
    double sine = a * (1 - a2 / 6 * (1 - a2 / 20 * (1 - a2 / 42))),
           cosine = 1 - a2 / 2 * (1 - a2 / 12 * (1 - a2 / 30));
    // The units are newtons, meters and kilograms. A push is 10, and half the length of the pole is
    // 0.5. The pole has a mass of 0.1; pole and cart together have a mass of 1.1.
    double push = ((right ? 10 : -10) + 0.05 * s[3] * s[3] * sine) / 1.1;
    double turn = (9.8 * sine - cosine * push) / (0.5 * (4.0 / 3 - 0.1 * cosine * cosine / 1.1));

    // Updates the speeds first (semi-implicit Euler).
    s[1] += (float)(0.02 * (push - 0.05 * turn * cosine / 1.1));
    s[3] += (float)(0.02 * turn);
    s[0] += 0.02f * s[1];
    s[2] += 0.02f * s[3];
    return s[0] > -2.4f && s[0] < 2.4f && s[2] > -0.2095f && s[2] < 0.2095f; // 12 degrees
}

// ---- the policy ----

static inline double exp_within_30(double x) { // |x| <= 30
    double y = x / 64, sum = 1;

    for (int k = 12; k >= 1; k--) sum = 1 + sum * y / k;
    for (int k = 0; k < 6; k++) sum *= sum;
    return sum;
}

// Returns the probability of a push to the right. A hidden unit computes x / (1 + |x|), which is
// shaped like tanh and needs no exp.
static inline double decide(const double *w, const float *state, double *in, double *hidden) {
    static const double scale[STATE] = {0.4, 0.5, 5, 0.5}; // scales the state to about -1 .. 1
    double logit = w[B2];

    for (int i = 0; i < STATE; i++) in[i] = scale[i] * state[i];
    for (int u = 0; u < HIDDEN; u++) {
        double x = w[B1 + u];

        for (int i = 0; i < STATE; i++) x += w[W1 + u * STATE + i] * in[i];
        hidden[u] = x / (1 + (x < 0 ? -x : x));
        logit += w[W2 + u] * hidden[u];
    }
    logit = logit > 30 ? 30 : logit < -30 ? -30 : logit;
    return 1 / (1 + exp_within_30(-logit));
}

// Adds the gradient of advantage * log(probability of the push that was made) to `sum`.
static inline void add_gradient(const double *w, const step *s, double advantage, double *sum) {
    double in[STATE], hidden[HIDDEN], d = advantage * (s->push - decide(w, s->state, in, hidden));

    sum[B2] += d;
    for (int u = 0; u < HIDDEN; u++) {
        double slope = 1 - (hidden[u] < 0 ? -hidden[u] : hidden[u]),
               back = d * w[W2 + u] * slope * slope;

        sum[W2 + u] += d * hidden[u];
        sum[B1 + u] += back;
        for (int i = 0; i < STATE; i++) sum[W1 + u * STATE + i] += back * in[i];
    }
}

#endif // EXAMPLES_CARTPOLE_H
