// metrics.c - batch statistics and clipped gradients, compared with PyTorch (tests/data/norm.txt,
// made by norm.py in that folder); accuracy, means, confusion and epoch metrics over ranks.
//
// The malloc below can make a rank run out of memory.
#define malloc test_malloc
#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "idist_train.h"

#include "ranks.h"

// Size in bytes from which allocations of this thread fail.
static __thread size_t no_memory_from = SIZE_MAX;

void *test_malloc(size_t nbytes) {
    return nbytes >= no_memory_from ? NULL : calloc(nbytes ? nbytes : 1, 1);
}

static double distance(double a, double b) { return a < b ? b - a : a - b; }
static double size_of(double a) { return a < 0 ? -a : a; }
static bool near(double a, double b, double relative) {
    return distance(a, b) <= relative * (size_of(b) + 1e-30);
}

static void read_floats(FILE *f, float *x, size_t n) {
    for (size_t i = 0; i < n; i++) {
        double value;
        TAP_REQUIRE(fscanf(f, "%la", &value) == 1);
        x[i] = (float)value;
    }
}

// Checks idist__norm_root: the square of the root must be x, apart from rounding. The test does not
// use libm for comparison.
static void roots(void) {
    uint64_t seed = tap_seed();
    int n_wrong = 0;
    for (int i = 0; i < 100000; i++) {
        uint64_t bits = tap_rand(&seed) >> 1;
        double x, r;
        memcpy(&x, &bits, sizeof x);
        if (!(x - x == 0)) continue;
        r = idist__norm_root(x);
        double error = distance(r * r, x);
        if (x > 1e-280 ? error > 1e-15 * x : error > 1e-12 * x + 5e-324) n_wrong++;
    }
    tap_is(n_wrong, 0, "square roots of all magnitudes");
    tap_ok(idist__norm_root(0) == 0 && idist__norm_root(1) == 1 && idist__norm_root(49) == 7 &&
               idist__norm_root(2.25) == 1.5,
           "and those of squares");
}

//------------------------------------------------------------------------------
// against PyTorch
//------------------------------------------------------------------------------

typedef struct batch {
    int channels;
    int counts[RANKS_MAX];
    float x[1000], dy[1000], dx[1000], mean[8], var[8];
} batch;

static void local_statistics(const float *x, int rows, int channels, float *mean, float *var) {
    for (int c = 0; c < channels; c++) {
        double m = 0, v = 0;
        for (int i = 0; i < rows; i++) m += (double)x[i * channels + c] / rows;
        for (int i = 0; i < rows; i++)
            v += ((double)x[i * channels + c] - m) * ((double)x[i * channels + c] - m) / rows;
        // A rank without values has no mean. The placeholder must not count.
        mean[c] = rows ? (float)m : 99;
        var[c] = rows ? (float)v : 99;
    }
}

static void batch_norm(idist_group *world, int rank, int n, void *arg) {
    const batch *b = (const batch *)arg;
    idist_opts o = opts_of(world);
    float mean[8], var[8], sum_dy[8] = {0}, sum_dy_xmu[8] = {0};
    int first = 0, total = 0, rows = b->counts[rank];
    for (int k = 0; k < n; k++) total += b->counts[k];
    for (int k = 0; k < rank; k++) first += b->counts[k] * b->channels;
    local_statistics(b->x + first, rows, b->channels, mean, var);
    uint64_t count = (uint64_t)rows;
    rank_ok(rank, idist_sync_batch_norm(mean, var, b->channels, &count, &o));
    rank_check(count == (uint64_t)total, "rank %d: %llu values", rank, (unsigned long long)count);
    for (int c = 0; c < b->channels; c++) {
        rank_check(near((double)mean[c], (double)b->mean[c], 1e-6) &&
                       near((double)var[c], (double)b->var[c], 1e-5),
                   "rank %d, channel %d: %g %g expected %g %g", rank, c, (double)mean[c],
                   (double)var[c], (double)b->mean[c], (double)b->var[c]);
        for (int i = first + c; i < first + rows * b->channels; i += b->channels) {
            sum_dy[c] += b->dy[i];
            sum_dy_xmu[c] += b->dy[i] * (b->x[i] - mean[c]);
        }
    }
    rank_ok(rank, idist_sync_batch_norm_backward(sum_dy, sum_dy_xmu, b->channels, &o));
    for (int i = first; i < first + rows * b->channels; i++) {
        int c = i % b->channels;
        double v = (double)var[c] + 1e-5, xmu = (double)(b->x[i] - mean[c]);
        double dx = ((double)b->dy[i] - (double)sum_dy[c] / total -
                     xmu * (double)sum_dy_xmu[c] / total / v) /
                    idist__norm_root(v);
        rank_check(distance(dx, (double)b->dx[i]) < 2e-5, "rank %d: dx %d is %g, not %g", rank, i,
                   dx, (double)b->dx[i]);
    }
}

typedef struct clip {
    double max_norm, norm;
    int n, counts[8];
    float before[8][1000], after[8][1000];
} clip;

// Clips gradients. If `shared` is true, all ranks have all gradients. Otherwise rank i % n has
// gradient i.
static void clipped(idist_group *world, int rank, int n, void *arg) {
    const clip *c = (const clip *)arg;
    idist_opts o = opts_of(world);
    for (int shared = 0; shared < 2; shared++) {
        static __thread float x[8][1000];
        idist_tensor t[8];
        int count = 0;
        double norm = -1;
        memcpy(x, c->before, sizeof x);
        for (int i = 0; i < c->n; i++) {
            const idist_tensor one = {x[i], (size_t)c->counts[i], IDIST_F32};
            if (shared || i % n == rank) t[count++] = one;
        }
        rank_ok(rank, idist_clip_grad_norm(t, count, c->max_norm, shared != 0, &norm, &o));
        rank_check(near(norm, c->norm, 1e-6), "rank %d: norm %g expected %g", rank, norm, c->norm);
        for (int i = 0; i < c->n; i++)
            for (int k = 0; k < c->counts[i]; k++) {
                double want = (double)(shared || i % n == rank ? c->after : c->before)[i][k];
                rank_check(near((double)x[i][k], want, 1e-6),
                           "rank %d: gradient %d [%d] is %g, not %g", rank, i, k, (double)x[i][k],
                           want);
            }
    }
}

static void against_torch(void) {
    static batch b;
    static clip c;
    char word[16], line[256];
    int n, n_bn = 0, n_clip = 0;
    FILE *f = fopen("tests/data/norm.txt", "r");
    TAP_REQUIRE(f && fgets(line, sizeof line, f));
    ranks_reset();
    while (fscanf(f, "%15s %d", word, &n) == 2) {
        if (strcmp(word, "bn") == 0) {
            size_t total = 0;
            TAP_REQUIRE(fscanf(f, "%d", &b.channels) == 1);
            for (int k = 0; k < n; k++) {
                TAP_REQUIRE(fscanf(f, "%d", &b.counts[k]) == 1);
                total += (size_t)(b.counts[k] * b.channels);
            }
            read_floats(f, b.x, total);
            read_floats(f, b.dy, total);
            read_floats(f, b.dx, total);
            read_floats(f, b.mean, (size_t)b.channels);
            read_floats(f, b.var, (size_t)b.channels);
            ranks_threads(n, NULL, batch_norm, &b);
            n_bn++;
            continue;
        }
        c.n = n;
        TAP_REQUIRE(strcmp(word, "clip") == 0 && fscanf(f, "%la %la", &c.max_norm, &c.norm) == 2);
        for (int i = 0; i < n; i++) {
            TAP_REQUIRE(fscanf(f, "%d", &c.counts[i]) == 1);
            read_floats(f, c.before[i], (size_t)c.counts[i]);
            read_floats(f, c.after[i], (size_t)c.counts[i]);
        }
        ranks_threads(1 + n_clip % 3, NULL, clipped, &c);
        n_clip++;
    }
    fclose(f);
    ranks_report("%d batches and %d clippings as in PyTorch", n_bn, n_clip);
    tap_ok(n_bn == 5 && n_clip == 25, "all of them");
}

//------------------------------------------------------------------------------
// what PyTorch does not offer
//------------------------------------------------------------------------------

static void norms(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    double x[2] = {3, 4}, norm = -1, huge = 1e300;
    uint16_t half[2], bf16[2];
    uint8_t e4m3[2], e5m2[2];
    char bytes[17]; // a tensor at an odd address
    idist_tensor t[6] = {{x, 2, IDIST_F64},       {half, 2, IDIST_F16},
                         {bf16, 2, IDIST_BF16},   {bytes + 1, 2, IDIST_F32},
                         {e4m3, 2, IDIST_F8E4M3}, {e5m2, 2, IDIST_F8E5M2}};
    float odd[2] = {1, 1}, infinite = 1;
    (void)arg;
    for (int i = 0; i < 2; i++) {
        half[i] = idist__small_float_to_half(6);
        bf16[i] = idist__small_float_to_bf16(-6);
        e4m3[i] = idist__small_float_to_f8e4m3(-6);
        e5m2[i] = idist__small_float_to_f8e5m2(6);
    }
    memcpy(bytes + 1, odd, sizeof odd);
    // The sum of squares is 25 + 4 * 72 + 2 = 315 on each rank.
    rank_ok(rank, idist_clip_grad_norm(t, 6, 1e9, false, &norm, &o));
    rank_check(near(norm * norm, 315.0 * n, 1e-12) && x[0] == 3, "rank %d: norm %g", rank, norm);
    rank_ok(rank, idist_clip_grad_norm(t, 6, norm / 2, false, NULL, &o));
    memcpy(odd, bytes + 1, sizeof odd);
    rank_check(near(x[1], 2, 1e-6) && (double)odd[1] > 0.49999 && (double)odd[1] < 0.50001,
               "rank %d: %g %g", rank, x[1], (double)odd[1]);
    rank_check(idist__small_float_from_half(half[1]) == 3 &&
                   idist__small_float_from_bf16(bf16[0]) == -3,
               "rank %d: 16 bits", rank);
    rank_check(idist__small_float_from_f8e4m3(e4m3[1]) == -3 &&
                   idist__small_float_from_f8e5m2(e5m2[0]) == 3,
               "rank %d: 8 bits", rank);
    // One rank has a gradient that is not finite. All ranks must get an error.
    for (int k = 0; k < 400; k++) infinite *= rank == n - 1 ? 10.0f : 1.0f;
    memcpy(bytes + 1, &infinite, sizeof infinite);
    norm = -1;
    rank_is(rank, idist_clip_grad_norm(t, 4, 0.1, false, &norm, &o), IDIST_ERR_ARG);
    rank_check(near(x[1], 2, 1e-6) && norm == -1, "rank %d: scaled all the same", rank);
    t[0].data = &huge;
    t[0].count = 1;
    rank_is(rank, idist_clip_grad_norm(t, 1, 0.1, true, NULL, NULL), IDIST_ERR_ARG);
    t[0].dtype = IDIST_I64;
    rank_is(rank, idist_clip_grad_norm(t, 1, 1, true, NULL, NULL), IDIST_ERR_ARG);
    rank_is(rank, idist_clip_grad_norm(NULL, 1, 1, true, NULL, NULL), IDIST_ERR_ARG);
    rank_is(rank, idist_clip_grad_norm(t + 1, 1, -1, true, NULL, NULL), IDIST_ERR_ARG);
    // No rank has any values.
    float mean = 5, var = 5;
    uint64_t count = 0;
    rank_ok(rank, idist_sync_batch_norm(&mean, &var, 1, &count, &o));
    rank_check(mean == 0 && var == 0 && count == 0, "rank %d: statistics of nothing", rank);
    rank_is(rank, idist_sync_batch_norm(&mean, &var, 0, &count, &o), IDIST_ERR_ARG);
    rank_is(rank, idist_sync_batch_norm_backward(&mean, NULL, 1, &o), IDIST_ERR_ARG);
}

static void metrics(idist_group *world, int rank, int n, void *arg) {
    static const float scores[4][3] = {{1, 2, 3}, {3, 2, 1}, {2, 2, 1}, {0, 5, 5}};
    static const int first[4] = {2, 0, 0, 1}, second[4] = {2, 0, 1, 2};
    idist_opts o = opts_of(world);
    idist_accuracy accuracy = {0, 0};
    idist_mean mean = {0, 0};
    idist_running_average average = {0, 0, false}, half = {0.5, 0, false};
    double value = 7;
    (void)arg;
    rank_ok(rank, idist_accuracy_compute(&accuracy, &value, &o));
    rank_check(value != value, "rank %d: accuracy of nothing is %g", rank, value);
    value = 7;
    rank_ok(rank, idist_mean_compute(&mean, &value, &o));
    rank_check(value != value, "rank %d: mean of nothing is %g", rank, value);
    // Rank 0 has four of four right, and every other rank has two. Computes the result twice,
    // because a second call must work as well.
    rank_ok(rank, idist_accuracy_update(&accuracy, scores[0], rank ? second : first, 4, 3));
    for (int i = 0; i < 2; i++) {
        rank_ok(rank, idist_accuracy_compute(&accuracy, &value, &o));
        rank_check(value == (4.0 + 2.0 * (n - 1)) / (4.0 * n), "rank %d: accuracy %g", rank, value);
    }
    static const int out[2] = {2, 3};
    rank_is(rank, idist_accuracy_update(&accuracy, scores[0], out, 2, 3), IDIST_ERR_ARG);
    rank_check(accuracy.total == 4, "rank %d: what is refused is not counted", rank);
    float not_a_number[2] = {idist__small_float_from_bits(0x7fc00000u), 1};
    static const int ones[2] = {1, 1};
    rank_ok(rank, idist_accuracy_update(&accuracy, not_a_number, ones, 1, 2));
    static const int zero[1] = {0};
    rank_check(accuracy.total == 5 && accuracy.correct == (rank ? 2 : 4), "rank %d: a NaN is right",
               rank);
    idist_accuracy one_class = {0, 0};
    rank_ok(rank, idist_accuracy_update(&one_class, not_a_number, zero, 1, 1));
    rank_ok(rank, idist_accuracy_update(&one_class, not_a_number + 1, zero, 1, 1));
    rank_check(one_class.total == 2 && one_class.correct == 1,
               "rank %d: of one class a NaN is right", rank);
    idist_mean_update(&mean, rank, 1);
    idist_mean_update(&mean, 10, 3);
    rank_ok(rank, idist_mean_compute(&mean, &value, &o));
    rank_check(near(value, (30.0 * n + n * (n - 1) / 2.0) / (4.0 * n), 1e-14), "rank %d: mean %g",
               rank, value);
    // First only rank 0 has an average, then all ranks have one.
    if (rank == 0) idist_running_average_update(&average, 3);
    rank_ok(rank, idist_running_average_compute(&average, &value, &o));
    rank_check(value == 3, "rank %d: running average %g", rank, value);
    if (rank != 0) idist_running_average_update(&average, 3);
    idist_running_average_update(&average, 5);
    rank_ok(rank, idist_running_average_compute(&average, &value, &o));
    rank_check(near(value, 0.98 * 3 + 0.02 * 5, 1e-14), "rank %d: running average %g", rank, value);
    idist_running_average_update(&half, 1);
    idist_running_average_update(&half, 2 + rank);
    rank_ok(rank, idist_running_average_compute(&half, &value, &o));
    rank_check(near(value, 1.5 + (n - 1) / 4.0, 1e-14), "rank %d: running average %g", rank, value);
    rank_is(rank, idist_mean_compute(NULL, &value, &o), IDIST_ERR_ARG);
    // Only rank 0 wants the value.
    rank_ok(rank, idist_accuracy_compute(&accuracy, rank ? NULL : &value, &o));
}

// Checks that a value of weight 0 does not count, even if it is NaN or infinite.
static void no_weight(idist_group *world, int rank, int n, void *arg) {
    const double nan = (double)idist__small_float_from_bits(0x7fc00000u);
    const double infinity = (double)idist__small_float_from_bits(0x7f800000u);
    idist_opts o = opts_of(world);
    idist_mean mean = {0, 0};
    idist_running_average constant = {1, 0, false};
    double value = 7;
    (void)arg;
    idist_mean_update(&mean, nan, 0);
    rank_ok(rank, idist_mean_compute(&mean, &value, &o));
    rank_check(value != value && mean.sum == 0, "rank %d: mean of weight 0 is %g", rank, value);
    idist_mean_update(&mean, rank, 2);
    idist_mean_update(&mean, nan, 0);
    idist_mean_update(&mean, infinity, 0);
    idist_mean_update(&mean, -infinity, -0.0);
    rank_ok(rank, idist_mean_compute(&mean, &value, &o));
    rank_check(near(value, (n - 1) / 2.0, 1e-14), "rank %d: mean %g", rank, value);
    idist_running_average_update(&constant, 4);
    idist_running_average_update(&constant, nan);
    idist_running_average_update(&constant, infinity);
    rank_ok(rank, idist_running_average_compute(&constant, &value, &o));
    rank_check(value == 4, "rank %d: a value of weight 0 makes the average %g", rank, value);
}

static void confusion(idist_group *world, int rank, int n, void *arg) {
    static const int labels[3] = {0, 1, 1}, predicted[3] = {0, 0, 1}, out[1] = {2}, below[1] = {-1};
    uint64_t own[4] = {0}, all[4] = {9, 9, 9, 9};
    idist_confusion m = {own, 2};
    idist_opts o = opts_of(world);
    (void)arg;
    for (int i = 0; i <= rank; i++) rank_ok(rank, idist_confusion_update(&m, predicted, labels, 3));
    rank_is(rank, idist_confusion_update(&m, out, labels, 1), IDIST_ERR_ARG);
    rank_is(rank, idist_confusion_update(&m, labels, below, 1), IDIST_ERR_ARG);
    rank_is(rank, idist_confusion_update(&m, below, labels, 1), IDIST_ERR_ARG);
    rank_ok(rank, idist_confusion_compute(&m, all, &o));
    uint64_t each = (uint64_t)(n * (n + 1) / 2);
    rank_check(all[0] == each && all[1] == 0 && all[2] == each && all[3] == each,
               "rank %d: wrong cells", rank);
    rank_check(own[2] == (uint64_t)rank + 1, "rank %d: its own cells have changed", rank);
    rank_is(rank, idist_confusion_compute(&m, own, &o), IDIST_ERR_ARG);
    memset(all, 0, sizeof all);
    // Only the last rank wants the result.
    rank_ok(rank, idist_confusion_compute(&m, rank == n - 1 ? all : NULL, &o));
    rank_check(all[0] == (rank == n - 1 ? each : 0), "rank %d: wrong cells of all", rank);
}

// Computes a number that depends on the order of all rows. Returns *arg as the status of the
// callback.
static int fold(const void *rows, size_t n, void *arg, double *value) {
    const int32_t *x = (const int32_t *)rows;
    *value = (double)n;
    for (size_t i = 0; i < 2 * n; i++) *value = *value * 0.5 + x[i];
    return *(int *)arg;
}

static void epoch_metric(idist_group *world, int rank, int n, void *arg) {
    int32_t rows[8][2], all[40][2];
    size_t own = (size_t)(rank * 3 % 7), total = 0;
    int fails = 0;
    double value = 7, want;
    idist_opts o = opts_of(world);
    (void)arg;
    for (int k = 0; k < n; k++)
        for (int i = 0; i < k * 3 % 7; i++, total++)
            for (int j = 0; j < 2; j++) all[total][j] = 100 * k + 10 * i + j;
    for (int i = 0; i < (int)own; i++)
        for (int j = 0; j < 2; j++) rows[i][j] = 100 * rank + 10 * i + j;
    fold(all, total, &fails, &want);
    rank_ok(rank, idist_epoch_metric(own ? rows : NULL, own, 8, fold, &fails, &value, &o));
    rank_check(value == want, "rank %d: %g expected %g", rank, value, want);
    fails = 3;
    rank_is(rank, idist_epoch_metric(rows, own, 8, fold, &fails, &value, &o), IDIST_ERR_CALLBACK);
    rank_check(strstr(idist_last_error(), "failed with 3") && value == want, "rank %d: %s", rank,
               idist_last_error());
    fails = 0;
    if (n > 1)
        rank_is(rank, idist_epoch_metric(rows, own, rank ? 8 : 4, fold, &fails, &value, &o),
                IDIST_ERR_ARG);
    rank_is(rank, idist_epoch_metric(rows, own, 8, rank == n - 1 ? NULL : fold, &fails, &value, &o),
            IDIST_ERR_ARG);
    rank_is(rank, idist_epoch_metric(NULL, 0, 0, fold, &fails, &value, &o), IDIST_ERR_ARG);
    rank_is(rank,
            idist_epoch_metric(rows, rank == n - 1 ? SIZE_MAX / 4 : own, 8, fold, &fails, &value,
                               &o),
            IDIST_ERR_ARG);
    rank_ok(rank, idist_epoch_metric(NULL, 0, 8, fold, &fails, &value, &o));
    rank_check(value == 0, "rank %d: of no rows %g", rank, value);
    rank_ok(rank, idist_epoch_metric(own ? rows : NULL, own, 8, fold, &fails,
                                     rank == n - 1 ? &value : NULL, &o));
    rank_check(value == (rank == n - 1 ? want : 0), "rank %d: %g, which only the last one wants",
               rank, value);
}

// Makes the last rank run out of memory in the middle of a collective call. All ranks must get an
// error that names this rank.
static void no_memory(idist_group *world, int rank, int n, void *arg) {
    enum { CHANNELS = 5000 };
    static __thread float a[CHANNELS], b[CHANNELS];
    static __thread uint64_t cells[100 * 100];
    idist_confusion m = {cells, 100};
    idist_opts o = opts_of(world);
    uint64_t count = 1;
    int which = *(const int *)arg;
    idist_status s;
    if (rank == n - 1) no_memory_from = 30000;
    if (which == 0) s = idist_sync_batch_norm(a, b, CHANNELS, &count, &o);
    else if (which == 1) s = idist_sync_batch_norm_backward(a, b, CHANNELS, &o);
    else s = idist_confusion_compute(&m, NULL, &o);
    no_memory_from = SIZE_MAX;
    rank_is(rank, s, IDIST_ERR_NO_MEMORY);
    rank_check(strstr(idist_last_error(), "no memory") &&
                   text_names_rank(idist_last_error(), n - 1),
               "rank %d: \"%s\"", rank, idist_last_error());
}

static int seeds(int local_rank, void *arg) {
    (void)arg;
    return idist_auto_seed(1u << 31) != (1u << 31) + (uint64_t)local_rank;
}

int main(void) {
    static const int sizes[5] = {1, 2, 3, 4, 7};
    tap_deadline(60);
    tap_is(idist_spawn(seeds, NULL, 2, NULL), IDIST_OK, "a seed for each rank");
    roots();
    against_torch();
    for (int i = 0; i < 5; i++) {
        ranks_case(sizes[i], NULL, norms, NULL, "norms of other kinds, %d ranks", sizes[i]);
        ranks_case(sizes[i], NULL, metrics, NULL, "accuracy and means, %d ranks", sizes[i]);
        ranks_case(sizes[i], NULL, no_weight, NULL, "values of weight 0, %d ranks", sizes[i]);
        ranks_case(sizes[i], NULL, confusion, NULL, "confusion, %d ranks", sizes[i]);
        ranks_case(sizes[i], NULL, epoch_metric, NULL, "epoch metric, %d ranks", sizes[i]);
        for (int k = 0; k < 3; k++)
            ranks_case_fault(sizes[i], NULL, no_memory, &k, "a rank without memory, of %d: %s",
                             sizes[i],
                             k == 2 ? "confusion"
                             : k    ? "backward norm"
                                    : "batch norm");
    }
    double value;
    idist_mean mean = {1, 1};
    tap_is(idist_mean_compute(&mean, &value, NULL), IDIST_ERR_STATE, "no world");
    return tap_done();
}
