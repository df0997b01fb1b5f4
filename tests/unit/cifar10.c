// cifar10.c - the network of examples/resnet.h: the matrix product against a plain one, every
// gradient against finite differences
#include "../../examples/resnet.h"
#include "tap.h"

static float any(uint64_t *state) {
    return (float)((double)(random_u64(state) >> 11) / 4503599627370496.0 - 1);
}

static double length_of(const float *x, size_t count) {
    double sum = 0;
    for (size_t i = 0; i < count; i++) sum += (double)x[i] * x[i];
    return sqrt_of(sum + 1e-30);
}

static void fill(float *x, size_t count, uint64_t seed) {
    for (size_t i = 0; i < count; i++) x[i] = any(&seed);
}

// Sizes around the blocks of the kernels; a as it is and turned; with and without what c holds.
static void test_product(int m, int n, int l, bool turned, bool add) {
    static float a[64 * 64], b[64 * 64], c[64 * 64], want[64 * 64];
    product p = {m, n, l, a, turned ? 1 : 64, turned ? 64 : 1, b, 63, c, 62, add};
    double worst = 0;
    fill(a, 64 * 64, 1);
    fill(b, 64 * 64, 2);
    fill(c, 64 * 64, 3);
    memcpy(want, c, sizeof want);
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            double sum = add ? want[i * 62 + j] : 0;
            for (int k = 0; k < l; k++)
                sum += (double)a[turned ? k * 64 + i : i * 64 + k] * b[k * 63 + j];
            want[i * 62 + j] = (float)sum;
        }
    multiply(&p);
    for (int i = 0; i < 64 * 64; i++) {
        double d = c[i] > want[i] ? c[i] - want[i] : want[i] - c[i];
        if (!(d <= worst)) worst = d;
    }
    tap_ok(worst < 1e-4, "product of %d x %d and %d x %d%s%s", m, l, l, n, turned ? ", turned" : "",
           add ? ", added" : "");
}

static double loss_at(net *n, const float *before, const float *along, double step, int i,
                      const float *in, const int *labels) {
    float *p = (float *)n->params[i].data;
    for (size_t k = 0; k < n->params[i].count; k++) p[k] = (float)(before[k] + step * along[k]);
    forward(n, in);
    return cross_entropy(n, labels);
}

// Along the gradient of one parameter the loss rises as steeply as the gradient is long. (In other
// directions one would see little but the rounding of floats.) Long steps are wrong where relus
// switch, short ones by rounding: one of them is good.
static bool check_gradient(net *n, int i, const float *in, const int *labels) {
    static const double steps[] = {1e-3, 3e-4, 1e-4};
    float *g = (float *)n->grads[i].data;
    size_t count = n->params[i].count;
    double length = length_of(g, count), slope = 0;
    float *before = (float *)malloc(count * sizeof *before),
          *along = (float *)malloc(count * sizeof *along);
    bool good = false;
    memcpy(before, n->params[i].data, count * sizeof *before);
    for (size_t k = 0; k < count; k++) along[k] = (float)(g[k] / length);
    for (int s = 0; s < 3 && !good; s++) {
        slope = loss_at(n, before, along, steps[s], i, in, labels) -
                loss_at(n, before, along, -steps[s], i, in, labels);
        slope /= 2 * steps[s];
        good = slope > 0.98 * length && slope < 1.02 * length;
    }
    memcpy(n->params[i].data, before, count * sizeof *before);
    free(before);
    free(along);
    if (!good)
        tap_diag("parameter %d: the loss rises by %g, the gradient says %g", i, slope, length);
    return good;
}

static void test_gradients(int blocks, int width, int side, int images) {
    static net n;
    size_t count = (size_t)(COLOURS * images * side * side);
    int labels[16], wrong = 0;
    tap_ok(net_create(&n, blocks, width, side, images, 5), "a network of %d blocks per stage",
           blocks);
    float *in = new_floats(&n, count), *grads = new_floats(&n, n.n_values), *at = grads;
    for (int i = 0; i < n.n_params; at += n.params[i++].count) {
        n.grads[i] = n.params[i];
        n.grads[i].data = at;
    }
    fill(in, count, 6);
    fill(grads, n.n_values, 7); // what was there before does not count
    for (int i = 0; i < images; i++) labels[i] = i * 7 % CLASSES;
    n.training = true;
    forward(&n, in);
    cross_entropy(&n, labels);
    backward(&n, in);
    for (int i = 0; i < n.n_params; i++) wrong += !check_gradient(&n, i, in, labels);
    tap_ok(wrong == 0,
           "%d x %d pixels, %d images, %d channels: %d gradients are those of finite differences",
           side, side, images, width, n.n_params);
    net_free(&n);
}

int main(void) {
    tap_deadline(60);
    static const int sizes[] = {1, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 48};
    enum { N = sizeof sizes / sizeof sizes[0] };
    for (int i = 0; i < N; i++)
        test_product(sizes[i], sizes[(5 * i + 3) % N], sizes[(7 * i + 2) % N], i % 2, i / 2 % 2);
    for (int i = 0; i < N; i++)
        test_product(sizes[(7 * i + 1) % N], sizes[i], sizes[(5 * i + 2) % N], i / 2 % 2, i % 2);
    test_gradients(1, 4, 16, 7);
    test_gradients(2, 6, 16, 5);
    test_gradients(1, 16, 32, 3);
    return tap_done();
}
