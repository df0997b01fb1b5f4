// zero_overhead - compares idist_zero with AdamW on all ranks after idist_ddp: the time of a step,
// and the memory of a rank
//
//     cc -O2 -DIDIST_IMPLEMENTATION -I. tests/bench/zero_overhead.c -o zero_overhead &&
//     ./zero_overhead [ranks [rounds]]
//
// A step writes the gradients, averages them, and updates all parameters. The two ways take turns,
// and each trains in processes of its own. The memory of a process is its Pss, in which a page that
// several processes share counts in equal parts. The gradients are multiples of 1/8, so both ways
// end with the same bits of parameters, which is checked.
#include "idist.h"

#include "idist_train.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { TENSORS = 32, MAX_STEPS = 65, MAX_ROUNDS = 101 };

typedef struct job {
    size_t each; // elements of a tensor
    int steps;
    bool sharded;
} job;

// What rank 0 reports, in memory that the workers share.
typedef struct report {
    double step_ms, mbytes;
    uint64_t checksum;
} report;

static report *result;
static job now;

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, int n) {
    qsort(x, (size_t)n, sizeof *x, compare);
    return n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

static double pss_mbytes(void) {
    char line[256];
    double kbytes = 0;
    FILE *f = fopen("/proc/self/smaps_rollup", "r");

    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "Pss: %lf", &kbytes) == 1) break;
    if (f) fclose(f);
    return kbytes / 1024;
}

// Reports the mean of the memory of all ranks.
static int mean_mbytes(void) {
    double mbytes;

    if (idist_barrier(NULL) != IDIST_OK) return 1;
    mbytes = pss_mbytes();
    if (idist_all_reduce(&mbytes, &mbytes, 1, IDIST_F64, IDIST_AVG, NULL) != IDIST_OK) return 1;
    if (idist_get_rank() == 0) result->mbytes = mbytes;
    return 0;
}

static void adamw(float *w, const float *g, float *m, float *v, size_t count, float step) {
    for (size_t i = 0; i < count; i++) {
        m[i] = 0.875f * m[i] + 0.125f * g[i];
        v[i] = 0.75f * v[i] + 0.25f * g[i] * g[i];
        w[i] -= 0.001f * (m[i] / (v[i] + 1e-8f) + 0.01f * w[i]) / step;
    }
}

static void backward(float *g, size_t count, int tensor, int step) {
    float first = (float)(idist_get_rank() + tensor + step) / 8;
    for (size_t i = 0; i < count; i++) g[i] = first;
}

static uint64_t checksum(const idist_tensor *params) {
    uint64_t sum = 0;
    for (int p = 0; p < TENSORS; p++)
        for (size_t i = 0; i < params[p].count; i++) {
            uint32_t bits;
            memcpy(&bits, (const float *)params[p].data + i, sizeof bits);
            sum = sum * 31 + bits;
        }
    return sum;
}

// Trains with idist_zero, or with idist_ddp and the whole optimizer on every rank.
static int train(const idist_tensor *params, double *ms) {
    size_t each = now.each;
    float *m = NULL, *v = NULL;
    idist_zero_desc sharded = {0};
    idist_ddp_desc whole = {0};
    idist_zero *zero = NULL;
    idist_ddp *ddp = NULL;

    sharded.params = whole.params = params;
    sharded.n = whole.n = TENSORS;
    sharded.states = 2;
    if (now.sharded && idist_zero_create(&sharded, &zero) != IDIST_OK) return 1;
    if (!now.sharded) {
        if (idist_ddp_create(&whole, &ddp) != IDIST_OK) return 1;
        m = (float *)calloc(TENSORS * each, sizeof *m);
        v = (float *)calloc(TENSORS * each, sizeof *v);
        if (!m || !v) return 1;
    }
    for (int step = 0; step < now.steps; step++) {
        if (idist_barrier(NULL) != IDIST_OK) return 1;
        double begin = now_ms();
        for (int p = TENSORS; p-- > 0;) {
            float *g = (float *)(zero ? idist_zero_grad(zero, p) : idist_ddp_grad(ddp, p));
            backward(g, each, p, step);
            if ((zero ? idist_zero_ready(zero, p) : idist_ddp_ready(ddp, p)) != IDIST_OK) return 1;
        }
        if ((zero ? idist_zero_wait(zero) : idist_ddp_wait(ddp)) != IDIST_OK) return 1;
        for (int p = 0; p < TENSORS && !zero; p++)
            adamw((float *)params[p].data, (float *)idist_ddp_grad(ddp, p), m + (size_t)p * each,
                  v + (size_t)p * each, each, (float)(step + 1));
        for (int k = 0; k < idist_zero_shards(zero); k++) {
            const idist_shard *s = idist_zero_shard(zero, k);
            adamw(s->weights, s->grad, s->states[0], s->states[1], s->count, (float)(step + 1));
        }
        if (zero && idist_zero_gather(zero) != IDIST_OK) return 1;
        ms[step] = now_ms() - begin;
    }
    if (mean_mbytes()) return 1;
    idist_zero_free(&zero);
    idist_ddp_free(&ddp);
    free(m);
    free(v);
    return 0;
}

static int worker(int local_rank, void *arg) {
    size_t nbytes = TENSORS * now.each * sizeof(float);
    float *memory = (float *)idist_alloc(nbytes, NULL);
    idist_tensor params[TENSORS];
    double ms[MAX_STEPS];

    (void)local_rank;
    (void)arg;
    if (!memory) return 1;
    for (size_t i = 0; i < TENSORS * now.each; i++) memory[i] = (float)(i % 100) / 100;
    for (int p = 0; p < TENSORS; p++) {
        params[p].data = memory + (size_t)p * now.each;
        params[p].count = now.each;
        params[p].dtype = IDIST_F32;
    }
    if (train(params, ms)) return fprintf(stderr, "%s\n", idist_last_error()), 1;
    if (idist_get_rank() == 0) {
        result->step_ms = median(ms + 1, now.steps - 1);
        result->checksum = checksum(params);
    }
    idist_free(memory);
    return 0;
}

static int measure(int ranks, int rounds, size_t each) {
    static double ms[2][MAX_ROUNDS];
    double mbytes[2] = {0, 0};
    uint64_t sums[2] = {0, 0};
    idist_desc desc = {0};

    now.each = each;
    now.steps = each < 1000000 ? MAX_STEPS : 9;
    for (int round = 0; round < rounds; round++)
        for (int way = 0; way < 2; way++) {
            now.sharded = way == 1;
            if (idist_spawn(worker, NULL, ranks, &desc) != IDIST_OK)
                return fprintf(stderr, "%s\n", idist_last_error()), 1;
            ms[way][round] = result->step_ms;
            mbytes[way] = result->mbytes;
            sums[way] = result->checksum;
        }
    if (sums[0] != sums[1]) return fprintf(stderr, "the parameters differ\n"), 1;
    double whole = median(ms[0], rounds), sharded = median(ms[1], rounds);
    printf("| %d | %.1f | %.2f | %.2f | %.3f | %.0f | %.0f | %.2f |\n", ranks,
           (double)(TENSORS * each) / 1e6, whole, sharded, sharded / whole, mbytes[0], mbytes[1],
           mbytes[1] / mbytes[0]);
    return 0;
}

int main(int argc, char **argv) {
    int ranks = argc > 1 ? atoi(argv[1]) : 2, rounds = argc > 2 ? atoi(argv[2]) : 7;
    static const size_t sizes[3] = {10000, 100000, 1000000};

    if (ranks < 1 || rounds < 1 || rounds > MAX_ROUNDS) return 2;
    result = (report *)mmap(NULL, sizeof *result, PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (result == MAP_FAILED) return 1;
    printf(
        "a step of AdamW with all states on every rank (ddp), and with idist_zero, in ms; memory "
        "of a rank in MiB\n\n"
        "| ranks | million parameters | ddp | zero | ratio | memory, ddp | memory, zero | ratio "
        "|\n|---|---|---|---|---|---|---|---|\n");
    for (int i = 0; i < 3; i++)
        if (measure(ranks, rounds, sizes[i])) return 1;
    return 0;
}
