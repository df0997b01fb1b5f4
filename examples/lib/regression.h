// regression.h - a network with one hidden layer, and AdamW; a function computes one element, so a
// GPU can compute all elements in parallel
#ifndef EXAMPLES_REGRESSION_H
#define EXAMPLES_REGRESSION_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

// SAMPLES is the number of samples per rank. W1 to B2 are the offsets of the parameters of each
// layer.
enum {
    INPUTS = 8,
    HIDDEN = 1000,
    SAMPLES = 32,
    W1 = 0,
    B1 = W1 + INPUTS * HIDDEN,
    W2 = B1 + HIDDEN,
    B2 = W2 + HIDDEN,
    PARAMS = B2 + 1
};

typedef struct model { // one on the host, and one on the device if there is one
    float x[SAMPLES * INPUTS], y[SAMPLES], hidden[SAMPLES * HIDDEN], error[SAMPLES];
    float w[PARAMS], g[PARAMS]; // parameters and gradients
} model;

typedef struct adam {                     // the arrays are on the device, if there is one
    float *w;                             // parameters
    const float *g;                       // their gradients
    float *m, *v;                         // their moments
    float power_m, power_v, fix_m, fix_v; // fix_m and fix_v correct the bias of m and v
} adam;

// ---- elements: each is one GPU thread or one iteration of a loop ----

HOST_DEVICE static inline void hidden(model *t, adam a, int i) {
    float sum = t->w[B1 + i % HIDDEN];

    (void)a;
    for (int k = 0; k < INPUTS; k++)
        sum += t->x[i / HIDDEN * INPUTS + k] * t->w[W1 + k * HIDDEN + i % HIDDEN];
    t->hidden[i] = tanhf(sum);
}

HOST_DEVICE static inline void output(model *t, adam a, int n) {
    float sum = t->w[B2];

    (void)a;
    for (int unit = 0; unit < HIDDEN; unit++) sum += t->hidden[n * HIDDEN + unit] * t->w[W2 + unit];
    t->error[n] = sum - t->y[n];
}

// Computes the gradient of half the mean squared error.
HOST_DEVICE static inline void gradient(model *t, adam a, int i) {
    float sum = 0;

    (void)a;
    for (int n = 0; n < SAMPLES; n++) {
        float h = i < B2 ? t->hidden[n * HIDDEN + i % HIDDEN] : 1, flow = t->error[n];

        if (i < W2) flow *= t->w[W2 + i % HIDDEN] * (1 - h * h);
        sum += flow * (i < B1 ? t->x[n * INPUTS + i / HIDDEN] : i < W2 ? 1 : h);
    }
    t->g[i] = sum / (float)SAMPLES;
}

HOST_DEVICE static inline void adamw(model *t, adam a, int i) {
    (void)t;
    a.m[i] = 0.9f * a.m[i] + 0.1f * a.g[i];
    a.v[i] = 0.999f * a.v[i] + 0.001f * a.g[i] * a.g[i];
    a.w[i] -= 1e-3f * (a.m[i] * a.fix_m / (sqrtf(a.v[i] * a.fix_v) + 1e-8f) + 0.01f * a.w[i]);
}

// ---- on the host ----

// Sets the factors for the next step. The factors correct the moments, which start at 0 and are too
// small in the first steps.
static inline void adam_next(adam *a) {
    a->power_m *= 0.9f;
    a->power_v *= 0.999f;
    a->fix_m = 1 / (1 - a->power_m);
    a->fix_v = 1 / (1 - a->power_v);
}

static inline float regression_random(uint32_t *state) { // -1 .. 1
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / 8388608 - 1;
}

// Sets the same initial parameters on every rank, and different samples.
static inline void regression_begin(model *host, int rank) {
    uint32_t same = 1, own = 1000u + (uint32_t)rank;

    memset(host, 0, sizeof *host);
    for (int i = 0; i < PARAMS; i++)
        host->w[i] = (i < W2 ? 0.5f : 0.05f) * regression_random(&same);
    for (int i = 0; i < SAMPLES * INPUTS; i++) host->x[i] = regression_random(&own);
    for (int n = 0; n < SAMPLES; n++) {
        const float *x = host->x + n * INPUTS;

        host->y[n] = x[0] * x[1] + x[2];
    }
}

static inline double regression_loss(const model *host) {
    double loss = 0;

    for (int n = 0; n < SAMPLES; n++)
        loss += (double)host->error[n] * (double)host->error[n] / (double)SAMPLES;
    return loss;
}

// Returns the largest difference between two corresponding elements, or NaN if an element is NaN.
static inline double largest_difference(const float *a, const float *b, int n) {
    double largest = 0;

    for (int i = 0; i < n; i++) {
        double d = fabs((double)a[i] - (double)b[i]);

        if (d > largest || d != d) largest = d;
    }
    return largest;
}

#endif // EXAMPLES_REGRESSION_H
