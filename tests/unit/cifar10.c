// cifar10.c - checks the network of examples/apps/cifar10/resnet.h. Compares the matrix product
// with a plain implementation and every gradient with finite differences. Also checks gradients
// that are accumulated over parts of a batch.
#include "../../examples/apps/cifar10/resnet.h"
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

// Tests the matrix product with sizes around the block sizes of the kernels. Takes `a` as stored or
// transposed, and overwrites `c` or adds to it.
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

// Checks the gradient of one parameter. Along the gradient, the slope of the loss must equal the
// gradient's length. In other directions the rounding of floats would hide the slope. Long steps
// fail where ReLUs switch, and short steps fail because of rounding. One good step is enough.
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
    fill(grads, n.n_values, 7); // the old contents must not matter
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

// Statistics that each batch norm computed for a whole batch. Passes over parts of the batch use
// them.
typedef struct record {
    float rows[8 * MAX_UNITS][64];
    uint64_t counts[MAX_UNITS];
    int n_rows, n_counts;
    bool replay;
} record;

static void keep_row(record *r, float *row, int channels) {
    float *kept = r->rows[r->n_rows++];

    if (r->replay) memcpy(row, kept, (size_t)channels * sizeof *row);
    else memcpy(kept, row, (size_t)channels * sizeof *row);
}

static idist_status keep_statistics(float *mean, float *var, int channels, uint64_t *count,
                                    void *arg) {
    record *r = (record *)arg;

    keep_row(r, mean, channels);
    keep_row(r, var, channels);
    if (r->replay) *count = r->counts[r->n_counts++];
    else r->counts[r->n_counts++] = *count;

    return IDIST_OK;
}

static idist_status keep_sums(float *dy, float *dy_x, int channels, void *arg) {
    keep_row((record *)arg, dy, channels);
    keep_row((record *)arg, dy_x, channels);

    return IDIST_OK;
}

// Copies images first .. first + images - 1 of `all`, color by color.
static void take_part(const float *all, int total, int first, int images, int area, float *part) {
    for (int c = 0; c < COLOURS; c++)
        memcpy(part + (size_t)(c * images * area), all + (size_t)((c * total + first) * area),
               (size_t)(images * area) * sizeof *part);
}

// Runs forward and backward for some images of the batch. Adds to the gradients if first > 0.
static double pass_over(net *n, record *r, const float *all, const int *labels, int total,
                        int first, int images, int area) {
    static float part[MARGIN + COLOURS * 12 * 256 + MARGIN];
    double loss;

    take_part(all, total, first, images, area, part + MARGIN);
    r->n_rows = r->n_counts = 0;
    n->images = images;
    n->weight = (double)images / total;
    n->add = first > 0;
    forward(n, part + MARGIN);
    loss = cross_entropy(n, labels + first) * n->weight;
    backward(n, part + MARGIN);

    return loss;
}

static void gradients_to(net *n, float *room) {
    for (int i = 0; i < n->n_params; i++) {
        n->grads[i] = n->params[i];
        n->grads[i].data = room + (values(n, i) - n->values);
    }
}

// Returns the distance between two gradients of parameter i, relative to the length of the first.
static double distance(const net *n, int i, const float *whole, const float *added) {
    size_t at = (size_t)(values(n, i) - n->values), count = n->params[i].count;
    double sum = 0;

    for (size_t k = at; k < at + count; k++) {
        double d = (double)added[k] - whole[k];
        sum += d * d;
    }

    return sqrt_of(sum + 1e-30) / length_of(whole + at, count);
}

// Splits a batch into parts whose batch norms use the statistics of the whole batch. The gradients
// of the parts must add up to the gradients of the whole batch. The option --accumulate sums
// gradients in this way, and --sync_bn relies on this property.
static void test_parts(int parts) {
    enum { SIDE = 16, IMAGES = 12, AREA = SIDE * SIDE };
    static net n;
    static record r;
    int labels[IMAGES];
    double loss, sum = 0, worst = 0;

    TAP_REQUIRE(net_create(&n, 1, 4, SIDE, IMAGES, 5));
    float *in = new_floats(&n, COLOURS * IMAGES * AREA), *whole = new_floats(&n, n.n_values);
    float *added = new_floats(&n, n.n_values);
    memset(&r, 0, sizeof r);
    n.hooks = (net_hooks){NULL, keep_statistics, keep_sums, &r};
    n.training = true;
    fill(in, COLOURS * IMAGES * AREA, 6);
    for (int i = 0; i < IMAGES; i++) labels[i] = i * 7 % CLASSES;

    gradients_to(&n, whole);
    loss = pass_over(&n, &r, in, labels, IMAGES, 0, IMAGES, AREA);
    gradients_to(&n, added);
    r.replay = true;
    for (int k = 0; k < parts; k++)
        sum += pass_over(&n, &r, in, labels, IMAGES, k * IMAGES / parts, IMAGES / parts, AREA);

    for (int i = 0; i < n.n_params; i++) {
        double far = distance(&n, i, whole, added);

        if (!(far <= worst)) worst = far;
    }
    tap_ok(worst < 1e-5, "%d parts add up to the gradients of the batch", parts);
    if (worst >= 1e-5) tap_diag("they are %g of the length of one apart", worst);
    tap_ok(sum - loss < 1e-6 && loss - sum < 1e-6, "%d parts have its loss, %g", parts, loss);
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
    test_parts(2);
    test_parts(3);
    return tap_done();
}
