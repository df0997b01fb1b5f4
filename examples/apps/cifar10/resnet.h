// resnet.h - the residual network of apps/cifar10, forward and backward, in floats
//
// The network of He et al. (2015) for CIFAR-10 is 6 n + 2 layers deep. It has a convolution, three
// stages of n blocks, the mean of each channel, and a dense layer. The stages have 16, 32 and 64
// channels, or another width that doubles from stage to stage.
//
//     block:   in --+-- conv 3x3 -- norm -- relu -- conv 3x3 -- norm --(+)-- relu -- out
//                   `------ conv 1x1 -- norm where a stage begins -----'
//
// To use it, call net_create and point n.grads[i] to memory for the gradients. Then, for each
// batch, set n.images and n.training, and call forward, cross_entropy and backward. With n.add,
// gradients are added to the values in memory. The share of this batch in the loss is n.weight.
//
// Nothing in this file communicates. A program with several ranks sets n.hooks, which the passes
// call.
//
// With -DUSE_BLAS, cblas_sgemm computes the matrix products; link with -lopenblas or -lblas.
// Otherwise the loops of multiply compute the products. These loops are compiled for AVX-512, for
// AVX2 and for the target of the build line; the processor decides which version runs.
#ifndef RESNET_H
#define RESNET_H
#include "../../../idist_train.h"

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef USE_BLAS
#include <cblas.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3") // gcc's -O2 leaves most of the loops below unchanged
#endif

enum { CLASSES = 10, COLOURS = 3, MAX_BLOCKS = 18 };

// Number of floats before and after a map. Rows are read and written from one column before their
// beginning to one column after their end: see gather.
enum { MARGIN = 16 };

// ---- small things ----

// Computes e to the power of x. The program has its own functions, so that it links without -lm.
static double exp_of(double x) { // x <= 0
    double y = x / 1024, sum = 1;
    if (x < -700) return 0;
    for (int k = 12; k >= 1; k--) sum = 1 + sum * y / k; // Taylor; |y| < 0.7
    for (int k = 0; k < 10; k++) sum *= sum;
    return sum;
}

static double log_of(double x) { // 1 <= x <= CLASSES: Halley's iteration on exp
    double y = 0;
    for (int k = 0; k < 8; k++) {
        double inverse = exp_of(-y);
        y += 2 * (x * inverse - 1) / (x * inverse + 1);
    }
    return y;
}

static double sqrt_of(double x) { // x > 0: Heron's iteration, from above
    double y = x > 1 ? x : 1, before;
    do {
        before = y;
        y = (y + x / y) / 2;
    } while (y < before);
    return before;
}

static uint64_t random_u64(uint64_t *state) { // splitmix64
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

// ---- matrix product ----

// A vector of 16 floats: one register with AVX-512, two with AVX2, four with SSE or NEON. Compilers
// without vector types process single floats.
#ifdef __GNUC__
typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))
#else
typedef float vec;
#define INLINE static inline
#endif
enum { LANES = sizeof(vec) / sizeof(float) };

// A matrix product c (m x n) = a (m x l) * b (l x n), or c += a * b with `add`. Element a[i][k] is
// at a[i * a_row + k * a_col], so a may also be a transposed matrix. Rows of b and c are
// contiguous.
typedef struct product {
    int m, n, l;
    const float *a;
    ptrdiff_t a_row, a_col;
    const float *b;
    ptrdiff_t b_row;
    float *c;
    ptrdiff_t c_row;
    bool add;
} product;

#ifdef USE_BLAS
enum { PANEL = 1024 };

static void multiply(const product *p) {
    bool turned = p->a_col != 1;
    cblas_sgemm(CblasRowMajor, turned ? CblasTrans : CblasNoTrans, CblasNoTrans, p->m, p->n, p->l,
                1, p->a, (int)(turned ? p->a_col : p->a_row), p->b, (int)p->b_row, p->add ? 1 : 0,
                p->c, (int)p->c_row);
}
#else
// Number of output positions that a convolution processes at a time. A panel of 32 columns stays in
// the fast caches.
enum { PANEL = 32 };

// Computes `rows` rows of c from row i on, 16 columns at a time. The sums of these columns stay in
// registers during the loop over l.
INLINE void multiply_rows(const product *p, int i, const int rows) {
    const float *a = p->a + i * p->a_row;
    float *c = p->c + i * p->c_row;
    int j = 0; // the column
    for (; j + LANES <= p->n; j += LANES) {
        vec sum[8] = {0};
        for (int r = 0; r < rows && p->add; r++) sum[r] = *(const vec *)(c + r * p->c_row + j);
        for (int k = 0; k < p->l; k++) {
            const vec *b = (const vec *)(p->b + k * p->b_row + j);
            for (int r = 0; r < rows; r++) sum[r] += a[r * p->a_row + k * p->a_col] * *b;
        }
        for (int r = 0; r < rows; r++) *(vec *)(c + r * p->c_row + j) = sum[r];
    }
    for (; j < p->n; j++)
        for (int r = 0; r < rows; r++) {
            float *to = c + r * p->c_row + j, sum = p->add ? *to : 0;
            for (int k = 0; k < p->l; k++)
                sum += a[r * p->a_row + k * p->a_col] * p->b[k * p->b_row + j];
            *to = sum;
        }
}

INLINE void multiply_by(const product *p, const int rows) {
    int i = 0;
    for (; i + rows <= p->m; i += rows) multiply_rows(p, i, rows);
    for (; i < p->m; i++) multiply_rows(p, i, 1);
}

// Computes the product with the registers of one kind of processor. With AVX-512 they hold 8 x 16
// sums, otherwise 4 x 16.
#if defined(__GNUC__) && defined(__x86_64__)
__attribute__((target("avx512f"))) static void multiply_avx512(const product *p) {
    multiply_by(p, 8);
}
__attribute__((target("avx2,fma"))) static void multiply_avx2(const product *p) {
    multiply_by(p, 4);
}
#endif
static void multiply_plain(const product *p) { multiply_by(p, 4); }

static void multiply(const product *p) {
#if defined(__GNUC__) && defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) multiply_avx512(p);
    else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) multiply_avx2(p);
    else
#endif
        multiply_plain(p);
}
#endif

// Returns the sum of (x[i] - mean) * (y[i] - mean), computed in 16 parts. A compiler must not
// reorder a sum by itself. With few terms in each part, float is precise enough.
static double sum_products(const float *x, const float *y, float mean, size_t n) {
    float part[16] = {0};
    double sum = 0;
    size_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (size_t k = 0; k < 16; k++) part[k] += (x[i + k] - mean) * (y[i + k] - mean);
    for (; i < n; i++) sum += (x[i] - mean) * (y[i] - mean);
    for (int k = 0; k < 16; k++) sum += part[k];
    return sum;
}

static double sum_of(const float *x, size_t n) {
    float part[16] = {0};
    double sum = 0;
    size_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (size_t k = 0; k < 16; k++) part[k] += x[i + k];
    for (; i < n; i++) sum += x[i];
    for (int k = 0; k < 16; k++) sum += part[k];
    return sum;
}

// ---- the network ----
//
// Maps are stored channel by channel, and within a channel image by image. One channel of a batch
// norm's input is therefore one row of memory. So is a row of the matrices that a convolution
// multiplies:
//
//     out (channels x positions) = weights^T * col (taps x positions)
//     d weights                  = col * d out^T
//     d col                      = weights * d out
//
// The matrix col holds the inputs under each tap, which gather collects for a panel of positions at
// a time. To compute d in, scatter adds up d col.

typedef struct unit { // a convolution, and the batch norm after it
    int from, to;     // channels
    int in_side, side;
    int kernel, stride;
    int first; // its parameters: weights (taps x to), then scale and shift of the batch norm
    float *mean, *var; // running
    float *inverse;    // one over the deviation in this batch
    float total;       // values per channel in its statistics
    // normal: input of the batch norm with mean 0 and deviation 1; out: output after skip and relu.
    float *normal, *out;
} unit;

enum { MAX_UNITS = 1 + 2 * 3 * MAX_BLOCKS + 2, MAX_PARAMS = 3 * MAX_UNITS + 2, N_WORK = 4 };

// Functions that are called in the middle of a pass, or NULL. The net keeps the first status that
// is not IDIST_OK.
typedef struct net_hooks {
    // Called when gradient i is complete. The gradient may be sent while the gradients before it
    // are computed. The gradients of the last layer come first.
    idist_status (*gradient)(int i, void *arg);
    // Called in the forward pass of a batch norm, with mean and (biased) variance of *count values
    // per channel. May replace them with the statistics of more values.
    idist_status (*statistics)(float *mean, float *var, int channels, uint64_t *count, void *arg);
    // Called in the backward pass of a batch norm, with two sums over the same values. One is the
    // sum of dy, and the other is the sum of dy times the input with mean 0 and deviation 1. May
    // replace them with sums over more values.
    idist_status (*sums)(float *dy, float *dy_x, int channels, void *arg);
    void *arg;
} net_hooks;

typedef struct net {
    int n_blocks, n_units, n_params, last; // last: channels before the dense layer
    int block[3 * MAX_BLOCKS];             // the first unit of each block
    size_t n_values, n_running; // floats of all parameters, of all running means and variances
    unit units[MAX_UNITS];
    idist_tensor params[MAX_PARAMS], grads[MAX_PARAMS];
    float *values, *running;
    float *work[N_WORK], *col, *turned; // gradients of maps in the backward pass; panels
    float *pooled, *scores, *dscores;   // pooled: last x images; scores: images x CLASSES
    float *velocity;                    // of the optimizer, one per value
    int *labels, *predicted;            // of the images in this batch
    float *row[2];                      // one number per channel of a batch norm
    bool training;                      // batch norms use the batch, otherwise running statistics
    bool add;                           // add gradients to the values in memory
    double weight;                      // of this batch in the loss; net_create sets 1
    int images;                         // in this batch
    void *memory[8 * MAX_UNITS];
    int n_memory;
    bool failed; // out of memory
    net_hooks hooks;
    idist_status status; // the first failure of a hook
} net;

static float *new_floats(net *n, size_t count) {
    float *p = (float *)calloc(count + 2 * MARGIN, sizeof *p);
    n->memory[n->n_memory++] = p;
    if (!p) n->failed = true;
    return p ? p + MARGIN : NULL;
}

static void net_free(net *n) {
    for (int i = 0; i < n->n_memory; i++) free(n->memory[i]);
    n->n_memory = 0;
}

static int taps(const unit *u) { return u->from * u->kernel * u->kernel; }
static size_t map_count(const net *n, int channels, int side) {
    return (size_t)channels * (size_t)(n->images * side * side);
}

static float *values(const net *n, int i) { return (float *)n->params[i].data; }
static float *gradients(const net *n, int i) { return (float *)n->grads[i].data; }

static int add_param(net *n, size_t count) {
    idist_tensor t = {NULL, count, IDIST_F32};
    n->params[n->n_params] = t;
    n->n_values += count;
    return n->n_params++;
}

static void add_unit(net *n, int from, int to, int in_side, int stride, int kernel) {
    unit *u = &n->units[n->n_units++];
    u->from = from;
    u->to = to;
    u->in_side = in_side;
    u->side = in_side / stride;
    u->kernel = kernel;
    u->stride = stride;
    u->first = add_param(n, (size_t)(taps(u) * to));
    add_param(n, (size_t)to);
    add_param(n, (size_t)to);
    n->n_running += 2 * (size_t)to;
}

static bool has_shortcut(const unit *first) {
    return first->from != first->to || first->stride != 1;
}

// Adds three stages, each with twice the channels and half the side of the stage before. A block
// has two units, and a third unit if its input and its output differ in shape.
static void add_units(net *n, int blocks, int width, int side) {
    add_unit(n, COLOURS, width, side, 1, 3);
    for (int stage = 0; stage < 3; stage++)
        for (int b = 0; b < blocks; b++) {
            int to = width << stage, stride = stage > 0 && b == 0 ? 2 : 1, from = to / stride;
            n->block[n->n_blocks++] = n->n_units;
            add_unit(n, from, to, side, stride, 3);
            side /= stride;
            add_unit(n, to, to, side, 1, 3);
            if (stride == 2) add_unit(n, from, to, 2 * side, stride, 1);
        }
    n->last = width << 2;
    add_param(n, (size_t)(n->last * CLASSES));
    add_param(n, CLASSES);
}

// Draws the weights from a uniform distribution with variance 2 / taps (He et al. 2015). The factor
// 2 makes up for the relus, each of which halves the mean square of the values that pass through
// it. Sets scales to 1 and shifts to 0.
static void initialise(net *n, uint64_t seed) {
    for (int i = 0; i < n->n_params; i++) {
        float *p = values(n, i);
        int fan_in = i >= n->n_params - 2 ? n->last : taps(&n->units[i / 3]);
        double bound = sqrt_of(6.0 / fan_in);
        bool weights = i % 3 == 0;
        for (size_t k = 0; k < n->params[i].count; k++)
            p[k] =
                weights
                    ? (float)(bound * ((double)(random_u64(&seed) >> 11) / 4503599627370496.0 - 1))
                    : i % 3 == 1;
    }
    // The last parameter is not a scale, but the bias of the dense layer.
    memset(values(n, n->n_params - 1), 0, CLASSES * sizeof(float));
    for (int i = 0; i < n->n_units; i++)
        for (int c = 0; c < n->units[i].to; c++) n->units[i].var[c] = 1;
}

// Creates a network for batches of up to `images` images. Returns false if memory cannot be
// allocated; net_free is then still necessary.
static bool net_create(net *n, int blocks, int width, int side, int images, uint64_t seed) {
    size_t at = 0, largest = 0, widest = 0;
    memset(n, 0, sizeof *n);
    n->images = images;
    n->weight = 1;
    add_units(n, blocks, width, side);
    n->values = new_floats(n, n->n_values);
    n->velocity = new_floats(n, n->n_values);
    n->running = new_floats(n, n->n_running);
    n->labels = (int *)new_floats(n, (size_t)images);
    n->predicted = (int *)new_floats(n, (size_t)images);
    for (int i = 0; i < n->n_params && n->values; at += n->params[i++].count)
        n->params[i].data = n->values + at;
    at = 0;
    for (unit *u = n->units; u < n->units + n->n_units; u++, at += 2 * (size_t)u[-1].to) {
        size_t count = map_count(n, u->to, u->side);
        u->mean = n->running + at;
        u->var = u->mean + u->to;
        u->inverse = new_floats(n, (size_t)u->to);
        u->normal = new_floats(n, count);
        u->out = new_floats(n, count);
        if (count > largest) largest = count;
        if ((size_t)taps(u) > widest) widest = (size_t)taps(u);
    }
    for (int i = 0; i < N_WORK; i++) n->work[i] = new_floats(n, largest);
    for (int i = 0; i < 2; i++) n->row[i] = new_floats(n, (size_t)n->last);
    n->col = new_floats(n, widest * PANEL);
    n->turned = new_floats(n, (size_t)n->last * PANEL);
    n->pooled = new_floats(n, (size_t)(n->last * images));
    n->scores = new_floats(n, (size_t)(CLASSES * images));
    n->dscores = new_floats(n, (size_t)(CLASSES * images));
    if (!n->failed) initialise(n, seed);
    return !n->failed;
}

// Returns the index, in a map, of the input that column kx of a kernel reads for the first output
// of a row. The input is in row y of channel c of an image.
static ptrdiff_t tap_at(const net *n, const unit *u, int c, int image, int y, int kx) {
    return (((ptrdiff_t)c * n->images + image) * u->in_side + y) * u->in_side + kx - u->kernel / 2;
}

// Returns true if column kx of the kernel is left of the map for the first column of the output.
static bool off_left(const unit *u, int kx) { return kx < u->kernel / 2; }
// Returns true if column kx of the kernel is right of the map for the last column of the output.
static bool off_right(const unit *u, int kx) {
    return (u->side - 1) * u->stride + kx - u->kernel / 2 >= u->in_side;
}

// Collects in col the inputs under each tap for `rows` rows of the output, from `row` on. The rows
// of all images count, one image below the other. Because a map has margins, a whole row can be
// copied with an offset of one column. A value that thereby comes from another row, at most one on
// each side, is then overwritten.
static void gather(const net *n, const unit *u, const float *in, int row, int rows, float *col) {
    int side = u->side, stride = u->stride;
    for (int c = 0; c < u->from; c++)
        for (int ky = 0; ky < u->kernel; ky++)
            for (int kx = 0; kx < u->kernel; kx++)
                for (int r = 0; r < rows; r++, col += side) {
                    int y = (row + r) % side * stride + ky - u->kernel / 2;
                    if (y < 0 || y >= u->in_side) {
                        for (int x = 0; x < side; x += 4) memset(col + x, 0, 4 * sizeof *col);
                        continue;
                    }
                    const float *from = in + tap_at(n, u, c, (row + r) / side, y, kx);
                    if (stride == 1)
                        for (int x = 0; x < side; x += 4)
                            memcpy(col + x, from + x, 4 * sizeof *col);
                    else
                        for (int x = 0; x < side; x++) col[x] = from[x * stride];
                    if (off_left(u, kx)) col[0] = 0;
                    if (off_right(u, kx)) col[side - 1] = 0;
                }
}

// Adds each value of col, now a gradient, to the element of the input's gradient at the position
// from which gather reads.
static void scatter(const net *n, const unit *u, float *col, int row, int rows, float *in) {
    int side = u->side, stride = u->stride;
    for (int c = 0; c < u->from; c++)
        for (int ky = 0; ky < u->kernel; ky++)
            for (int kx = 0; kx < u->kernel; kx++)
                for (int r = 0; r < rows; r++, col += side) {
                    int y = (row + r) % side * stride + ky - u->kernel / 2;
                    if (y < 0 || y >= u->in_side) continue;
                    float *to = in + tap_at(n, u, c, (row + r) / side, y, kx);
                    if (off_left(u, kx)) col[0] = 0;
                    if (off_right(u, kx)) col[side - 1] = 0;
                    if (stride == 1)
                        for (int x = 0; x < side; x++) to[x] += col[x];
                    else
                        for (int x = 0; x < side; x++) to[x * stride] += col[x];
                }
}

static void convolve(const net *n, const unit *u, const float *in, float *out) {
    const float *w = values(n, u->first);
    int all = n->images * u->side, rows = PANEL / u->side, out_row = all * u->side;
    for (int row = 0; row < all; row += rows) {
        if (rows > all - row) rows = all - row;
        int columns = rows * u->side;
        product p = {u->to,   columns, taps(u), w, 1, u->to, n->col, columns, out + row * u->side,
                     out_row, false};
        gather(n, u, in, row, rows, n->col);
        multiply(&p);
    }
}

// Computes the gradient of the weights. Adds the gradient of the input to din, unless din is NULL.
static void convolve_back(const net *n, const unit *u, const float *in, const float *dout,
                          float *din) {
    const float *w = values(n, u->first);
    float *dw = gradients(n, u->first);
    int all = n->images * u->side, rows = PANEL / u->side, out_row = all * u->side;
    for (int row = 0; row < all; row += rows) {
        if (rows > all - row) rows = all - row;
        int columns = rows * u->side;
        const float *panel = dout + row * u->side;
        for (int c = 0; c < u->to; c++)
            for (int k = 0; k < columns; k++)
                n->turned[k * u->to + c] = panel[(ptrdiff_t)c * out_row + k];
        gather(n, u, in, row, rows, n->col);
        product of_weights = {taps(u),   u->to, columns, n->col, columns,          1,
                              n->turned, u->to, dw,      u->to,  row > 0 || n->add};
        product of_inputs = {taps(u), columns, u->to,  w,       u->to, 1,
                             panel,   out_row, n->col, columns, false};
        multiply(&of_weights);
        if (!din) continue;
        multiply(&of_inputs);
        scatter(n, u, n->col, row, rows, din);
    }
}

// Writes mean and variance of each channel to n->row. In training these are the statistics of this
// batch, and the running statistics move toward them by a tenth. Otherwise they are the running
// statistics.
static void batch_statistics(net *n, unit *u, size_t count) {
    float *mean = n->row[0], *var = n->row[1];
    uint64_t total = count;

    if (!n->training) {
        memcpy(mean, u->mean, (size_t)u->to * sizeof *mean);
        memcpy(var, u->var, (size_t)u->to * sizeof *var);
        return;
    }

    for (int c = 0; c < u->to; c++) {
        const float *x = u->normal + (size_t)c * count;

        mean[c] = (float)(sum_of(x, count) / (double)count);
        var[c] = (float)(sum_products(x, x, mean[c], count) / (double)count);
    }
    if (n->hooks.statistics && n->status == IDIST_OK)
        n->status = n->hooks.statistics(mean, var, u->to, &total, n->hooks.arg);
    u->total = (float)total;
    for (int c = 0; c < u->to; c++) {
        u->mean[c] += 0.1f * (mean[c] - u->mean[c]);
        u->var[c] += 0.1f * (var[c] * u->total / (u->total - 1) - u->var[c]);
    }
}

// Computes out = relu(batch norm(convolution(in)) + skip). A shortcut has no relu and no skip.
static void unit_forward(net *n, unit *u, const float *in, const float *skip, bool relu) {
    size_t count = map_count(n, 1, u->side);

    convolve(n, u, in, u->normal);
    batch_statistics(n, u, count);
    for (int c = 0; c < u->to; c++) {
        float *x = u->normal + (size_t)c * count, *y = u->out + (size_t)c * count;
        float scale = values(n, u->first + 1)[c], shift = values(n, u->first + 2)[c];
        float mean = n->row[0][c];
        float inverse = u->inverse[c] = (float)(1 / sqrt_of(n->row[1][c] + 1e-5));

        for (size_t i = 0; i < count; i++) {
            x[i] = (x[i] - mean) * inverse;
            y[i] = x[i] * scale + shift;
        }
        if (skip)
            for (size_t i = 0; i < count; i++) y[i] += skip[(size_t)c * count + i];
        if (relu)
            for (size_t i = 0; i < count; i++) y[i] = y[i] > 0 ? y[i] : 0;
    }
}

static void gradient_ready(net *n, int i) {
    if (n->hooks.gradient && n->status == IDIST_OK) n->status = n->hooks.gradient(i, n->hooks.arg);
}

// Runs the backward pass of a unit; dout is the gradient before the relu. The gradient before the
// batch norm is written to dconv, which may be dout.
static void unit_backward(net *n, unit *u, const float *in, const float *dout, float *dconv,
                          float *din) {
    size_t count = map_count(n, 1, u->side);
    float *dscale = gradients(n, u->first + 1), *dshift = gradients(n, u->first + 2);
    float *sum = n->row[0], *slope = n->row[1];

    for (int c = 0; c < u->to; c++) {
        const float *g = dout + (size_t)c * count, *x = u->normal + (size_t)c * count;

        sum[c] = (float)sum_of(g, count);
        slope[c] = (float)sum_products(g, x, 0, count);
        dshift[c] = n->add ? dshift[c] + sum[c] : sum[c];
        dscale[c] = n->add ? dscale[c] + slope[c] : slope[c];
    }
    gradient_ready(n, u->first + 2);
    gradient_ready(n, u->first + 1);
    if (n->hooks.sums && n->status == IDIST_OK)
        n->status = n->hooks.sums(sum, slope, u->to, n->hooks.arg);

    for (int c = 0; c < u->to; c++) {
        const float *g = dout + (size_t)c * count, *x = u->normal + (size_t)c * count;
        float *d = dconv + (size_t)c * count;
        float factor = values(n, u->first + 1)[c] * u->inverse[c];
        float mean = sum[c] / u->total, rise = slope[c] / u->total;

        for (size_t i = 0; i < count; i++) d[i] = factor * (g[i] - mean - x[i] * rise);
    }
    convolve_back(n, u, in, dconv, din);
    gradient_ready(n, u->first);
}

// Clears the gradient where the output of the relu is zero.
static void relu_backward(const float *out, float *d, size_t count) {
    for (size_t i = 0; i < count; i++) d[i] = out[i] > 0 ? d[i] : 0;
}

static void dense_forward(net *n, const float *in, size_t area) {
    const float *weights = values(n, n->n_params - 2), *bias = weights + n->last * CLASSES;
    for (int i = 0; i < n->last * n->images; i++)
        n->pooled[i] = (float)(sum_of(in + (size_t)i * area, area) / (double)area);
    for (int i = 0; i < n->images; i++)
        for (int k = 0; k < CLASSES; k++) {
            float sum = bias[k];
            for (int c = 0; c < n->last; c++)
                sum += n->pooled[c * n->images + i] * weights[c * CLASSES + k];
            n->scores[i * CLASSES + k] = sum;
        }
}

// Computes din, the gradient of the last map, from the gradient of the scores.
static void dense_backward(net *n, float *din, size_t area) {
    const float *weights = values(n, n->n_params - 2);
    float *dweights = gradients(n, n->n_params - 2), *dbias = gradients(n, n->n_params - 1);

    if (!n->add) memset(dweights, 0, n->params[n->n_params - 2].count * sizeof *dweights);
    if (!n->add) memset(dbias, 0, CLASSES * sizeof *dbias);
    for (int c = 0; c < n->last; c++)
        for (int i = 0; i < n->images; i++) {
            float back = 0, *to = din + (size_t)(c * n->images + i) * area;
            for (int k = 0; k < CLASSES; k++) {
                dweights[c * CLASSES + k] +=
                    n->pooled[c * n->images + i] * n->dscores[i * CLASSES + k];
                back += weights[c * CLASSES + k] * n->dscores[i * CLASSES + k];
            }
            for (size_t x = 0; x < area; x++) to[x] = back / (float)area;
        }
    for (int i = 0; i < n->images * CLASSES; i++) dbias[i % CLASSES] += n->dscores[i];
    gradient_ready(n, n->n_params - 1);
    gradient_ready(n, n->n_params - 2);
}

// Computes the scores of a batch of n->images images.
static void forward(net *n, const float *in) {
    const float *x = n->units[0].out;

    idist_trace_begin("forward");
    unit_forward(n, n->units, in, NULL, true);
    for (int b = 0; b < n->n_blocks; b++) {
        unit *u = n->units + n->block[b];
        if (has_shortcut(u)) unit_forward(n, u + 2, x, NULL, false);
        unit_forward(n, u, x, NULL, true);
        unit_forward(n, u + 1, u->out, has_shortcut(u) ? u[2].out : x, true);
        x = u[1].out;
    }
    const unit *top = n->units + n->block[n->n_blocks - 1] + 1;
    dense_forward(n, x, (size_t)(top->side * top->side));
    idist_trace_end();
}

// Sets n->predicted to the class with the highest score, for each image.
static inline void predict(net *n) {
    for (int i = 0; i < n->images; i++) {
        const float *score = n->scores + i * CLASSES;
        int best = 0;

        for (int k = 1; k < CLASSES; k++)
            if (score[k] > score[best]) best = k;
        n->predicted[i] = best;
    }
}

// Returns the mean cross entropy of the scores. Writes its gradient, times n->weight, to dscores.
static double cross_entropy(net *n, const int *labels) {
    double loss = 0;
    for (int i = 0; i < n->images; i++) {
        const float *score = n->scores + i * CLASSES;
        double e[CLASSES], sum = 0, most = score[0];
        for (int k = 1; k < CLASSES; k++) most = score[k] > most ? score[k] : most;
        for (int k = 0; k < CLASSES; k++) sum += e[k] = exp_of(score[k] - most);
        for (int k = 0; k < CLASSES; k++)
            n->dscores[i * CLASSES + k] =
                (float)((e[k] / sum - (k == labels[i])) * n->weight / n->images);
        loss += log_of(sum) + most - score[labels[i]];
    }
    return loss / n->images;
}

// Computes all gradients, from the last to the first, after forward and cross_entropy.
static void backward(net *n, const float *in) {
    const unit *top = n->units + n->block[n->n_blocks - 1] + 1;
    // d is the gradient of the block's output.
    float *d = n->work[0], *other = n->work[1], *middle = n->work[2], *dconv = n->work[3];

    idist_trace_begin("backward");
    dense_backward(n, d, (size_t)(top->side * top->side));
    for (int b = n->n_blocks - 1; b >= 0; b--) {
        unit *u = n->units + n->block[b];
        const float *x = b > 0 ? n->units[n->block[b - 1] + 1].out : n->units[0].out;
        size_t count = map_count(n, u->to, u->side), in_count = map_count(n, u->from, u->in_side);
        relu_backward(u[1].out, d, count);
        memset(middle, 0, count * sizeof *middle);
        unit_backward(n, u + 1, u->out, d, dconv, middle);
        relu_backward(u->out, middle, count);
        if (has_shortcut(u)) { // otherwise, the gradient of the skip is d itself
            float *swap = d;
            memset(other, 0, in_count * sizeof *other);
            unit_backward(n, u + 2, x, d, d, other);
            d = other;
            other = swap;
        }
        unit_backward(n, u, x, middle, middle, d);
    }
    relu_backward(n->units[0].out, d, map_count(n, n->units[0].to, n->units[0].side));
    unit_backward(n, n->units, in, d, d, NULL);
    idist_trace_end();
}

// ---- the optimizer ----

// Makes a step of gradient descent with weight decay and Nesterov momentum, in the form of
// torch.optim.
static inline void sgd_step(net *n, double rate, double momentum, double decay) {
    float m = (float)momentum, w = (float)decay, r = (float)rate, *v = n->velocity;

    for (int i = 0; i < n->n_params; v += n->params[i++].count) {
        float *p = values(n, i);
        const float *grad = gradients(n, i);

        for (size_t k = 0; k < n->params[i].count; k++) {
            float g = grad[k] + w * p[k];

            v[k] = m * v[k] + g;
            p[k] -= r * (g + m * v[k]);
        }
    }
}

#endif
