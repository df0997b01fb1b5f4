// ddp_overhead - compares an iteration of idist_ddp with all_reduces of the same sizes
//
//     cc -O2 -DIDIST_IMPLEMENTATION -I. tests/bench/ddp_overhead.c -o ddp_overhead &&
//     ./ddp_overhead [ranks [rounds]]
//
// The gradients have one size, or the sizes of ResNet-18. The ways are:
//
//     all_reduces    one call after the other
//     wait           idist_ddp allocates the gradients, and idist_ddp_wait does everything
//     requests       all_reduces, all except the last as requests, as in a program that computes
//                    meanwhile
//     ready          as wait, after idist_ddp_ready for each gradient, which makes such requests
//     scattered      the gradients are separate in the program's memory; with idist_ddp_wait alone,
//                    and with idist_ddp_ready
//
// The ways take turns within a round, and the medians of all rounds are compared. Ways without
// idist_ddp_ready are compared with all_reduces, and ways with idist_ddp_ready with requests. A
// second row shows the shortest times, which other work on the machine disturbs less. Every result
// is checked.
#include "idist.h"

#include "idist_train.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_N = 3200, MAX_ROUNDS = 1000 };
enum { BARE, REQUESTS, WAIT, READY, SCATTERED_WAIT, SCATTERED, WAYS };

// Number of elements of each parameter of ResNet-18, in torchvision's order.
static const size_t resnet18[] = {9408,    64,  64,  36864,   64,  64,  36864,  64,  64,
                                  36864,   64,  64,  36864,   64,  64,  73728,  128, 128,
                                  147456,  128, 128, 8192,    128, 128, 147456, 128, 128,
                                  147456,  128, 128, 294912,  256, 256, 589824, 256, 256,
                                  32768,   256, 256, 589824,  256, 256, 589824, 256, 256,
                                  1179648, 512, 512, 2359296, 512, 512, 131072, 512, 512,
                                  2359296, 512, 512, 2359296, 512, 512, 512000, 1000};

// Number of gradients and elements of each gradient. The totals go from 64 KiB to 122 MiB, then 25
// MB and 100 MB in few and in many gradients, then a real model.
typedef struct shape {
    int n;
    size_t each; // 0 to use `sizes`
    const size_t *sizes;
} shape;
static const shape shapes[] = {{32, 500, NULL},    {32, 8000, NULL},    {32, 50000, NULL},
                               {32, 300000, NULL}, {32, 1000000, NULL}, {4, 1562500, NULL},
                               {32, 195312, NULL}, {800, 7812, NULL},   {3200, 1953, NULL},
                               {4, 6250000, NULL}, {32, 781250, NULL},  {3200, 7812, NULL},
                               {62, 0, resnet18}};

static int rounds = 41;

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e6 * (double)t.tv_sec + 1e-3 * (double)t.tv_nsec;
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, int n) {
    qsort(x, (size_t)n, sizeof *x, compare);
    return n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

static int die(const char *what) {
    fprintf(stderr, "%s: %s\n", what, idist_last_error());
    return 1;
}

static void fill(float *x, size_t count, float value) {
    for (size_t i = 0; i < count; i++) x[i] = value;
}

static bool all_are(const float *x, size_t count, float value) {
    for (size_t i = 0; i < count; i++)
        if (x[i] != value) return false;
    return true;
}

// Runs one way once. `ddp` is NULL for the ways that call all_reduce directly. Returns the time in
// microseconds, or a negative number on failure.
static double once(int way, idist_ddp *ddp, float *const *bare, const size_t *counts, int n,
                   int n_buckets) {
    if (idist_barrier(NULL) != IDIST_OK) return -1;
    static idist_request requests[MAX_N];
    idist_opts o;
    memset(&o, 0, sizeof o);
    memset(requests, 0, sizeof requests);
    double start = now_us();
    for (int b = 0; b < n_buckets && !ddp; b++) {
        bool last = b + 1 == n_buckets;
        o.request = way == REQUESTS && !last ? &requests[b] : NULL;
        if (last && idist_wait_all(requests, (size_t)b) != IDIST_OK) return -1;
        if (idist_all_reduce(bare[b], bare[b], counts[b], IDIST_F32, IDIST_AVG, &o) != IDIST_OK)
            return -1;
    }
    for (int i = n; i-- > 0 && (way == READY || way == SCATTERED);)
        if (idist_ddp_ready(ddp, i) != IDIST_OK) return -1;
    if (ddp && idist_ddp_wait(ddp) != IDIST_OK) return -1;
    return now_us() - start;
}

static size_t size_of(const shape *s, int i) { return s->sizes ? s->sizes[i] : s->each; }

static void print_row(double us[WAYS][MAX_ROUNDS], int row, const shape *s, int n_buckets) {
    size_t total = 0;
    for (int i = 0; i < s->n; i++) total += size_of(s, i);
    double t[WAYS];
    for (int w = 0; w < WAYS; w++) t[w] = row ? us[w][0] : median(us[w], rounds);
    printf("| %s | %d | %.2f | %d | %.1f | %.1f | %.3f | %.1f | %.3f | %.1f | %.1f | %.3f | %.1f | "
           "%.3f |\n",
           row ? "least" : "median", s->n, (double)(total * sizeof(float)) / (1 << 20), n_buckets,
           t[BARE], t[WAIT], t[WAIT] / t[BARE], t[SCATTERED_WAIT], t[SCATTERED_WAIT] / t[BARE],
           t[REQUESTS], t[READY], t[READY] / t[REQUESTS], t[SCATTERED], t[SCATTERED] / t[REQUESTS]);
}

static int measure(const shape *s) {
    static double us[WAYS][MAX_ROUNDS];
    static idist_tensor params[MAX_N], grads[MAX_N];
    static float *bare[2][MAX_N]; // for BARE and REQUESTS
    static size_t counts[MAX_N];
    idist_ddp *ways[WAYS] = {NULL, NULL, NULL, NULL, NULL, NULL};
    int n = s->n, rank = idist_get_rank();
    float mean = (float)(idist_get_world_size() - 1) / 2;
    memset(counts, 0, sizeof counts);
    for (int i = 0; i < n; i++) {
        size_t each = size_of(s, i);
        params[i].data = calloc(each, sizeof(float));
        params[i].count = each;
        params[i].dtype = IDIST_F32;
        grads[i] = params[i];
        grads[i].data = malloc(each * sizeof(float) + 64);
        if (!params[i].data || !grads[i].data) return 1;
    }
    idist_ddp_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.params = params;
    desc.n = n;
    for (int w = WAIT; w < WAYS; w++) {
        if (w == SCATTERED_WAIT) desc.grads = grads;
        if (idist_ddp_create(&desc, &ways[w]) != IDIST_OK) return die("ddp_create");
    }
    int n_buckets = idist_ddp_buckets(ways[WAIT]);
    for (int i = 0; i < n; i++) counts[idist_ddp_bucket(ways[WAIT], i)] += size_of(s, i);
    for (int b = 0; b < 2 * n_buckets; b++)
        if ((bare[b % 2][b / 2] = (float *)idist_alloc(counts[b / 2] * sizeof(float), NULL)) ==
            NULL)
            return die("alloc");
    for (int r = -2; r < rounds; r++) // the first two warm up
        for (int turn = 0; turn < WAYS; turn++) {
            int w = (turn + r + 2) % WAYS;
            float **own = bare[w == REQUESTS];
            for (int b = 0; b < n_buckets && !ways[w]; b++) fill(own[b], counts[b], (float)rank);
            for (int i = 0; i < n && ways[w]; i++)
                fill((float *)idist_ddp_grad(ways[w], i), size_of(s, i), (float)rank);
            double t = once(w, ways[w], own, counts, n, n_buckets);
            bool right = t >= 0;
            for (int b = 0; b < n_buckets && !ways[w]; b++)
                right = right && all_are(own[b], counts[b], mean);
            for (int i = 0; i < n && ways[w]; i++)
                right = right && all_are((float *)idist_ddp_grad(ways[w], i), size_of(s, i), mean);
            if (!right)
                return t < 0 ? die("round") : (fprintf(stderr, "way %d: wrong values\n", w), 1);
            if (r >= 0) us[w][r] = t;
        }
    for (int row = 0; row < 2 && rank == 0; row++) print_row(us, row, s, n_buckets);
    for (int w = WAIT; w < WAYS; w++) idist_ddp_free(&ways[w]);
    for (int b = 0; b < 2 * n_buckets; b++) idist_free(bare[b % 2][b / 2]);
    for (int i = 0; i < n; i++) {
        free(params[i].data);
        free(grads[i].data);
    }
    return 0;
}

static int work(int local_rank, void *arg) {
    (void)arg;
    if (local_rank == 0) {
        printf("%d ranks, %d rounds, microseconds\n\n", idist_get_world_size(), rounds);
        printf("| of rounds | gradients | MiB | buckets | all_reduces | wait | ratio | scattered | "
               "ratio | requests | ready | ratio | scattered | ratio |\n");
        printf("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n");
    }
    for (size_t k = 0; k < sizeof shapes / sizeof shapes[0]; k++) {
        int rc = measure(&shapes[k]);
        if (local_rank == 0) fflush(stdout);
        if (rc) return rc;
    }
    return 0;
}

int main(int argc, char **argv) {
    int ranks = argc > 1 ? atoi(argv[1]) : 2;
    if (argc > 2) rounds = atoi(argv[2]);
    if (ranks < 1 || ranks > 64 || rounds < 1 || rounds > MAX_ROUNDS) {
        fprintf(stderr, "usage: ddp_overhead [ranks [rounds, up to %d]]\n", MAX_ROUNDS);
        return 2;
    }
    idist_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = 60000;
    desc.bind = "core";
    if (idist_spawn(work, NULL, ranks, &desc) == IDIST_OK) return 0;
    return die("ddp_overhead");
}
