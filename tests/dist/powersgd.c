// powersgd.c - gradients sent as products of thin matrices.
//
// Compares the gradients with the results of torch's PowerSGD hooks (tests/data/powersgd.txt, made
// by the script beside it). Also tests a training run, the number of bytes sent, gradients that are
// zero or not finite, uneven inputs, and wrong descriptions.
#include <sys/types.h>

#include <sys/socket.h>
static ssize_t counted_sendmsg(int fd, const struct msghdr *message, int flags);
#define sendmsg counted_sendmsg
#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "idist_train.h"

#undef sendmsg

#include "grid.h"
#include "ranks.h"

static uint64_t *sent_nbytes; // bytes sent over sockets by all ranks

static ssize_t counted_sendmsg(int fd, const struct msghdr *message, int flags) {
    ssize_t n = sendmsg(fd, message, flags);
    if (n > 0) __atomic_fetch_add(sent_nbytes, (uint64_t)n, __ATOMIC_RELAXED);
    return n;
}

enum { N = 4, ELEMENTS = 300 };

// A model with up to N gradients in one bucket.
typedef struct model {
    idist_tensor params[N], grads[N];
    size_t rows[N];
    float values[ELEMENTS], weights[ELEMENTS];
    idist_powersgd_desc powersgd;
    idist_ddp_desc desc;
} model;

static void model_init(model *m, idist_group *world, const size_t counts[N], const size_t *rows) {
    size_t at = 0;
    memset(m, 0, sizeof *m);
    for (int i = 0; i < N; i++) {
        m->params[i].data = m->weights + at;
        m->params[i].count = counts[i];
        m->params[i].dtype = IDIST_F32;
        m->grads[i] = m->params[i];
        m->grads[i].data = m->values + at;
        at += counts[i];
        if (rows) m->rows[i] = rows[i];
    }
    TAP_REQUIRE(at <= ELEMENTS);
    m->powersgd.rows = rows ? m->rows : NULL;
    m->desc.params = m->params;
    m->desc.grads = m->grads;
    m->desc.n = N;
    m->desc.group = world;
    m->desc.timeout_ms = RANKS_TIMEOUT_MS;
    m->desc.compression = IDIST_COMPRESS_POWERSGD;
    m->desc.powersgd = &m->powersgd;
}

static void check_same_bits(const model *m, idist_group *world, int rank, int n) {
    idist_opts o = opts_of(world);
    uint64_t hash = 0, all[RANKS_MAX];
    for (int i = 0; i < ELEMENTS; i++) hash = hash * 31 + idist__small_float_to_bits(m->values[i]);
    rank_ok(rank, idist_all_gather(&hash, all, 1, IDIST_U64, &o));
    for (int r = 1; r < n; r++)
        rank_check(all[r] == all[0], "rank %d has other bits than rank 0", r);
}

//------------------------------------------------------------------------------
// torch
//------------------------------------------------------------------------------

static const size_t layer_counts[N] = {96, 120, 9, 6}, layer_rows[N] = {8, 5, 9, 3};
static const size_t square_counts[N] = {169, 0, 0, 0};

enum { START = 2, ITERATIONS = 3 };
typedef struct torch_case {
    int ranks, batched, rank, feedback, warm;
    double rate;
    size_t q_cols[ITERATIONS][2]; // columns of the random starts
    float q[ITERATIONS][2][100];
    float grads[ITERATIONS][ELEMENTS];
    int q_count[ITERATIONS], iterations;
} torch_case;

static size_t read_floats(const char *at, float *to, size_t capacity) {
    size_t n = 0;
    int used = 0;
    for (; n < capacity && sscanf(at, "%f%n", &to[n], &used) == 1; n++) at += used;
    return n;
}

static int read_cases(torch_case *cases, int capacity) {
    static char line[16384];
    int n = 0, used = 0;
    FILE *f = fopen("tests/data/powersgd.txt", "r");
    TAP_REQUIRE(f != NULL);
    while (fgets(line, sizeof line, f)) {
        torch_case *c = n ? &cases[n - 1] : cases;
        int i = c->iterations;
        if (strncmp(line, "case", 4) == 0) {
            c = &cases[n++];
            TAP_REQUIRE(n <= capacity &&
                        sscanf(line, "case %d %d %d %d %d %lf", &c->ranks, &c->batched, &c->rank,
                               &c->feedback, &c->warm, &c->rate) == 6);
        } else if (line[0] == 'q') {
            int k = c->q_count[i]++;
            TAP_REQUIRE(k < 2 && sscanf(line, "q %zu%n", &c->q_cols[i][k], &used) == 1);
            read_floats(line + used, c->q[i][k], 100);
        } else if (line[0] == 'g') {
            TAP_REQUIRE(i < ITERATIONS);
            read_floats(line + 5, c->grads[c->iterations++], ELEMENTS);
        }
    }
    fclose(f);
    return n;
}

// Returns element i of a gradient, computed as in powersgd.py.
static float torch_gradient(int64_t i, int param, int rank, int iteration) {
    i += 7 * param;
    int64_t x = (i * i * (3 + rank) + i * (17 + 5 * iteration) + 29 * rank + 11 * iteration) % 101;
    return (float)(x - 50) / 64;
}

// Replaces idist's random start with torch's. Returns the number of matrices replaced.
static int put_start(idist_ddp *ddp, const torch_case *c, int iteration) {
    idist__powersgd_state *state = (idist__powersgd_state *)ddp->buckets[0].exposed.state;
    int placed = 0;
    for (int i = 0; i < c->q_count[iteration]; i++) {
        for (int k = 0; k < state->matrix_count; k++) {
            const idist__powersgd_matrix *matrix = &state->matrices[k];
            size_t cols = matrix->cols, rank = (size_t)matrix->rank;
            if (cols != c->q_cols[iteration][i]) continue;
            for (size_t at = 0; at < cols * rank; at++)
                matrix->q[at % rank * cols + at / rank] = c->q[iteration][i][at];
            placed++;
        }
    }
    if (placed) state->warm = true;
    return placed;
}

static void against_torch(idist_group *world, int rank, int n, void *arg) {
    const torch_case *c = (const torch_case *)arg;
    const size_t *counts = c->batched ? square_counts : layer_counts;
    model m;
    idist_ddp *ddp = NULL;
    model_init(&m, world, counts, c->batched ? NULL : layer_rows);
    m.powersgd.rank = c->rank;
    m.powersgd.start_iteration = START;
    m.powersgd.min_compression_rate = c->rate;
    m.powersgd.no_error_feedback = !c->feedback;
    m.powersgd.no_warm_start = !c->warm;
    if (!rank_ok(rank, idist_ddp_create(&m.desc, &ddp))) return;
    for (int iteration = 0; iteration < START + ITERATIONS; iteration++) {
        int at = iteration - START, all = 0;
        float largest = 0, worst = 0;
        for (int p = 0; p < N; p++)
            for (size_t i = 0; i < counts[p]; i++, all++)
                m.values[all] = torch_gradient((int64_t)i, p, rank, iteration);
        if (at >= 0)
            rank_check(put_start(ddp, c, at) == c->q_count[at], "rank %d: torch's starts", rank);
        rank_ok(rank, idist_ddp_wait(ddp));
        check_same_bits(&m, world, rank, n);
        for (int i = 0; i < all && at >= 0; i++) {
            float wanted = c->grads[at][i];
            float error = m.values[i] < wanted ? wanted - m.values[i] : m.values[i] - wanted;
            largest = wanted > largest ? wanted : largest;
            worst = error > worst || error != error ? error : worst;
        }
        if (at >= 0)
            rank_check(largest > 0.1f && worst <= 1e-5f * largest,
                       "rank %d: off by %g of %g in iteration %d", rank, (double)worst,
                       (double)largest, at);
    }
    idist_ddp_free(&ddp);
}

//------------------------------------------------------------------------------
// without torch
//------------------------------------------------------------------------------

// Returns element i of a gradient matrix of rank 1. Factors of any rank represent this matrix
// exactly.
static float simple_gradient(int i, int rank) {
    int row = i / 12, col = i % 12;
    return (float)(row % 5 + 1) * (float)(col - 4) * (float)(rank + 1) / 8;
}

static const size_t even_counts[N] = {96, 144, 12, 12}, even_rows[N] = {8, 12, 0, 0};

// Sends gradients that the factors represent exactly. The results must be exact for averages, sums,
// scaled sums and doubles, and when all gradients are zero.
static void exact(idist_group *world, int rank, int n, void *arg) {
    const int how = *(const int *)arg;
    double wide[ELEMENTS] = {0};
    model m;
    idist_ddp *ddp = NULL;
    float ranks = (float)(n * (n + 1) / 2) / (float)n;
    model_init(&m, world, even_counts, even_rows);
    m.powersgd.rank = how % 4 + 1;
    m.powersgd.min_compression_rate = 0.5;
    m.desc.sum = how == 1;
    m.desc.postscale = how == 2 ? 3 : 0;
    for (int p = 0, at = 0; p < N && how == 3; p++) {
        m.grads[p].dtype = IDIST_F64;
        m.grads[p].data = wide + at;
        at += (int)even_counts[p];
    }
    if (how == 1) ranks *= (float)n;
    if (how == 2) ranks *= 3;
    if (!rank_ok(rank, idist_ddp_create(&m.desc, &ddp))) return;
    for (int iteration = 0; iteration < 6; iteration++) {
        bool zero = iteration < 2, right = true;
        for (int i = 0; i < 264; i++) {
            m.values[i] = zero ? 0 : simple_gradient(i, rank);
            wide[i] = (double)m.values[i];
        }
        rank_ok(rank, idist_ddp_wait(ddp));
        for (int i = 0; i < 264; i++) {
            float got = how == 3 ? (float)wide[i] : m.values[i];
            float error = got - (zero ? 0 : simple_gradient(i, 0) * ranks);
            right = right && error < 1e-4f * ranks && error > -1e-4f * ranks;
            if (how == 3) m.values[i] = (float)wide[i];
        }
        rank_check(right, "rank %d: other gradients in iteration %d", rank, iteration);
        check_same_bits(&m, world, rank, n);
    }
    idist_ddp_free(&ddp);
}

// Sends a NaN or an infinity from one rank. All ranks must get NaN in this matrix only, and none in
// the next iteration.
static void not_finite(idist_group *world, int rank, int n, void *arg) {
    model m;
    idist_ddp *ddp = NULL;
    (void)arg;
    model_init(&m, world, even_counts, even_rows);
    m.powersgd.min_compression_rate = 0.5;
    if (!rank_ok(rank, idist_ddp_create(&m.desc, &ddp))) return;
    for (int iteration = 0; iteration < 3; iteration++) {
        int nans = 0;
        for (int i = 0; i < 264; i++) m.values[i] = simple_gradient(i, rank);
        if (iteration == 1 && rank == n - 1)
            m.values[17] = idist__small_float_from_bits(rank % 2 ? 0x7fc00000u : 0x7f800000u);
        rank_ok(rank, idist_ddp_wait(ddp));
        for (int i = 0; i < 264; i++) {
            if (m.values[i] != m.values[i]) nans += i < 96 ? 1 : 1000;
        }
        rank_check(nans == (iteration == 1 ? 96 : 0), "rank %d: %d NaNs in iteration %d", rank,
                   nans, iteration);
    }
    idist_ddp_free(&ddp);
}

// Checks the error feedback. Later iterations send what one iteration loses, so the average over
// many iterations must be right. Covers matrices of full rank, and a bucket that does not fill its
// square.
static void feedback(idist_group *world, int rank, int n, void *arg) {
    enum { STEPS = 200, USED = 264 };
    const bool square = *(const int *)arg != 0;
    double sums[USED] = {0}, worst = 0;
    model m;
    idist_ddp *ddp = NULL;
    model_init(&m, world, even_counts, square ? NULL : even_rows);
    m.powersgd.rank = 2;
    m.powersgd.min_compression_rate = 1;
    if (!rank_ok(rank, idist_ddp_create(&m.desc, &ddp))) return;
    for (int step = 0; step < STEPS; step++) {
        for (int i = 0; i < USED; i++) m.values[i] = torch_gradient(i, 0, rank, 0);
        rank_ok(rank, idist_ddp_wait(ddp));
        for (int i = 0; i < USED; i++) sums[i] += (double)m.values[i];
    }
    for (int i = 0; i < USED; i++) {
        double mean = 0, off;
        for (int r = 0; r < n; r++) mean += (double)torch_gradient(i, 0, r, 0) / n;
        off = sums[i] / STEPS - mean;
        if (off < 0) off = -off;
        worst = off > worst ? off : worst;
    }
    rank_check(worst < 0.05, "rank %d: off by %g after %d steps", rank, worst, STEPS);
    idist_ddp_free(&ddp);
}

static int warning_count; // warnings of all ranks

static void count_warnings(idist_log_level level, const char *line, void *user) {
    (void)user;
    if (level == IDIST_LOG_WARN && strstr(line, "PowerSGD: bucket 0: the error feedback"))
        __atomic_fetch_add(&warning_count, 1, __ATOMIC_RELAXED);
}

typedef struct spike {
    float value;
    int columns; // number of columns of P
    bool square, no_warm_start;
} spike;

// Sends one gradient that is far too large from one rank. Later iterations must not be affected, so
// the average over many iterations must be right.
static void spiked(idist_group *world, int rank, int n, void *arg) {
    enum { STEPS = 200, USED = 264, AT = 5 };
    const spike *how = (const spike *)arg;
    double sums[USED] = {0}, worst = 0;
    model m;
    idist_ddp *ddp = NULL;
    model_init(&m, world, even_counts, how->square ? NULL : even_rows);
    m.powersgd.rank = how->columns;
    m.powersgd.no_warm_start = how->no_warm_start;
    m.powersgd.min_compression_rate = 1;
    if (!rank_ok(rank, idist_ddp_create(&m.desc, &ddp))) return;
    // By step 0 the rounding errors of the spike have been sent.
    for (int step = -20; step < STEPS; step++) {
        for (int i = 0; i < USED; i++) m.values[i] = torch_gradient(i, 0, rank, 0);
        if (step == -10 && rank == n - 1) m.values[AT] = how->value;
        rank_ok(rank, idist_ddp_wait(ddp));
        check_same_bits(&m, world, rank, n);
        for (int i = 0; i < USED && step >= 0; i++) sums[i] += (double)m.values[i];
    }
    for (int i = 0; i < USED; i++) {
        double mean = 0, off;
        for (int r = 0; r < n; r++) mean += (double)torch_gradient(i, 0, r, 0) / n;
        off = sums[i] / STEPS - mean;
        if (off < 0) off = -off;
        worst = off > worst ? off : worst;
    }
    rank_check(worst < 0.1, "rank %d: off by %g after %d steps", rank, worst, STEPS);
    idist_ddp_free(&ddp);
}

// Sends gradients that cancel out across ranks. The library must not drop the error feedback
// because of this.
static void opposite(idist_group *world, int rank, int n, void *arg) {
    model m;
    idist_ddp *ddp = NULL;
    (void)n;
    (void)arg;
    model_init(&m, world, even_counts, even_rows);
    m.powersgd.min_compression_rate = 1;
    if (!rank_ok(rank, idist_ddp_create(&m.desc, &ddp))) return;
    for (int step = 0; step < 20; step++) {
        for (int i = 0; i < 264; i++)
            m.values[i] = simple_gradient(i, 0) * (rank ? -1.0f : 1.0f) * (float)(1 + step % 3);
        rank_ok(rank, idist_ddp_wait(ddp));
        for (int i = 0; i < 264; i++)
            rank_check(m.values[i] < 1e-3f && m.values[i] > -1e-3f, "rank %d: %g remains", rank,
                       (double)m.values[i]);
    }
    idist_ddp_free(&ddp);
}

static void spikes(void) {
    static const spike cases[] = {{1e20f, 1, false, false}, {-1e20f, 2, false, false},
                                  {1e10f, 1, false, true},  {1e30f, 4, true, false},
                                  {3e8f, 2, true, true},    {1e37f, 1, false, false}};
    idist_desc desc;
    memset(&desc, 0, sizeof desc);
    setenv("IDIST_LOG", "warn", 1);
    desc.logger.log_fn = count_warnings;
    for (int n = 1; n <= 3; n++) {
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            spike how = cases[i];
            warning_count = 0;
            ranks_case(n, &desc, spiked, &how, "a gradient of %g, %d ranks", (double)how.value, n);
            tap_ok(n == 1 ? !warning_count : warning_count == 1, "warnings: %d", warning_count);
        }
    }
    warning_count = 0;
    ranks_case(2, &desc, opposite, NULL, "gradients that cancel out");
    tap_is(warning_count, 0, "no warning");
}

// Sends the same gradients many times. The results must converge with a warm start, and must not
// with a new start each time.
static void starts(idist_group *world, int rank, int n, void *arg) {
    const bool warm = *(const int *)arg != 0;
    float before[96] = {0}, change = 0;
    model m;
    idist_ddp *ddp = NULL;
    (void)n;
    model_init(&m, world, even_counts, even_rows);
    m.powersgd.no_error_feedback = true;
    m.powersgd.no_warm_start = !warm;
    if (!rank_ok(rank, idist_ddp_create(&m.desc, &ddp))) return;
    for (int step = 0; step < 200; step++) {
        for (int i = 0; i < 264; i++) m.values[i] = torch_gradient(i, 0, 0, 0);
        rank_ok(rank, idist_ddp_wait(ddp));
        change = 0;
        for (int i = 0; i < 96; i++) {
            float off = m.values[i] - before[i];
            change = off > change ? off : change;
            before[i] = m.values[i];
        }
    }
    rank_check(warm ? change < 1e-4f : change > 1e-2f, "rank %d: the last step changed %g", rank,
               (double)change);
    idist_ddp_free(&ddp);
}

// Trains weights that each rank pulls toward its own target. The weights must reach the mean of the
// targets.
static void learns(idist_group *world, int rank, int n, void *arg) {
    enum { STEPS = 600, USED = 264 };
    double loss = 0;
    model m;
    idist_ddp *ddp = NULL;
    (void)arg;
    model_init(&m, world, even_counts, even_rows);
    m.powersgd.start_iteration = 3;
    if (!rank_ok(rank, idist_ddp_create(&m.desc, &ddp))) return;
    for (int step = 0; step < STEPS; step++) {
        for (int i = 0; i < USED; i++) m.values[i] = m.weights[i] - torch_gradient(i, 0, rank, 0);
        for (int p = N - 1; p >= 0; p--) rank_ok(rank, idist_ddp_ready(ddp, p));
        rank_ok(rank, idist_ddp_wait(ddp));
        for (int i = 0; i < USED; i++) m.weights[i] -= 0.05f * m.values[i];
    }
    for (int i = 0; i < USED; i++) {
        double off = (double)m.weights[i];
        for (int r = 0; r < n; r++) off -= (double)torch_gradient(i, 0, r, 0) / n;
        loss += off * off / USED;
    }
    rank_check(loss < 1e-3, "rank %d: a loss of %g after %d steps", rank, loss, STEPS);
    idist_ddp_free(&ddp);
}

// Lets the ranks run out of data one by one, with gradients that accumulate before they are sent.
static void uneven(idist_group *world, int rank, int n, void *arg) {
    model m;
    idist_ddp *ddp = NULL;
    (void)arg;
    model_init(&m, world, even_counts, even_rows);
    m.desc.uneven = true;
    m.desc.divide_by_active = true;
    if (!rank_ok(rank, idist_ddp_create(&m.desc, &ddp))) return;
    for (int step = 0; step <= rank; step++) {
        float ranks = 0;
        bool right = true;
        for (int r = step; r < n; r++) ranks += (float)(r + 1) / (float)(n - step);
        for (int i = 0; i < 264; i++) m.values[i] = simple_gradient(i, rank) / 2;
        rank_ok(rank, idist_ddp_no_sync(ddp, true));
        rank_ok(rank, idist_ddp_wait(ddp));
        rank_ok(rank, idist_ddp_no_sync(ddp, false));
        for (int i = 0; i < 264; i++) m.values[i] += simple_gradient(i, rank) / 2;
        rank_ok(rank, idist_ddp_forward(ddp));
        rank_ok(rank, idist_ddp_wait(ddp));
        for (int i = 0; i < 264; i++) {
            float error = m.values[i] - simple_gradient(i, 0) * ranks;
            right = right && error < 1e-3f && error > -1e-3f;
        }
        rank_check(right, "rank %d: other gradients in step %d", rank, step);
    }
    rank_ok(rank, idist_ddp_join(ddp, NULL));
    idist_ddp_free(&ddp);
}

// Counts the bytes sent for matrices of 8 x 1,000 and 300 x 40. With PowerSGD this takes 1,348
// floats per iteration instead of 20,000.
static void fewer_bytes(idist_group *world, int rank, int n, void *arg) {
    static const size_t counts[2] = {8000, 12000}, rows[2] = {8, 300};
    uint64_t *used = (uint64_t *)arg;
    idist_opts o = opts_of(world);
    (void)n;
    for (int how = 0; how < 2; how++) {
        idist_powersgd_desc powersgd;
        idist_ddp_desc desc;
        idist_ddp *ddp = NULL;
        idist_tensor params[2];
        uint64_t before;
        float *weights = (float *)calloc(20000, sizeof *weights);
        memset(&powersgd, 0, sizeof powersgd);
        memset(&desc, 0, sizeof desc);
        for (int i = 0; i < 2; i++) {
            params[i].data = weights + (i ? 8000 : 0);
            params[i].count = counts[i];
            params[i].dtype = IDIST_F32;
        }
        powersgd.rows = rows;
        desc.params = params;
        desc.n = 2;
        desc.group = world;
        if (how) desc.compression = IDIST_COMPRESS_POWERSGD;
        if (how) desc.powersgd = &powersgd;
        if (!rank_ok(rank, idist_ddp_create(&desc, &ddp))) return;
        rank_ok(rank, idist_barrier(&o));
        before = __atomic_load_n(sent_nbytes, __ATOMIC_RELAXED);
        rank_ok(rank, idist_barrier(&o));
        for (int i = 0; i < 10; i++) rank_ok(rank, idist_ddp_wait(ddp));
        rank_ok(rank, idist_barrier(&o));
        if (rank == 0) used[how] = __atomic_load_n(sent_nbytes, __ATOMIC_RELAXED) - before;
        rank_ok(rank, idist_barrier(&o));
        idist_ddp_free(&ddp);
        free(weights);
    }
}

//------------------------------------------------------------------------------
// wrong descriptions
//------------------------------------------------------------------------------

static void refused(int rank, const model *m, idist_status wanted, const char *reason) {
    idist_ddp *ddp = NULL;
    rank_is(rank, idist_ddp_create(&m->desc, &ddp), wanted);
    rank_check(!ddp && strstr(idist_last_error(), reason), "rank %d: \"%s\", not \"%s\"", rank,
               idist_last_error(), reason);
}

static void wrong_descs(idist_group *world, int rank, int n, void *arg) {
    model good, m;
    (void)arg;
    model_init(&good, world, layer_counts, layer_rows);
    for (int how = 0; how < 9; how++) {
        model_init(&m, world, layer_counts, layer_rows);
        switch (how) {
        case 0: m.desc.compression = IDIST_COMPRESS_F16; break;
        case 1: m.powersgd.rank = 5; break;
        case 2: m.powersgd.rank = -1; break;
        case 3: m.powersgd.min_compression_rate = -1; break;
        case 4: m.powersgd.epsilon = 1e308 * 10; break;
        case 5: m.rows[1] = 7; break;
        case 6: m.desc.find_unused = true; break;
        case 7: m.desc.on_device = true; break;
        default: m.grads[2].dtype = IDIST_BF16; break;
        }
        static const char *const reasons[9] = {"powersgd is set",   "rank must be",
                                               "rank must be",      "min_compression_rate",
                                               "epsilon",           "120 elements of gradient 1",
                                               "find_unused",       "on_device",
                                               "gradient 2 is BF16"};
        refused(rank, &m, how < 6 ? IDIST_ERR_ARG : IDIST_ERR_UNSUPPORTED, reasons[how]);
    }
    for (int how = 0; how < 8 && n > 1; how++) {
        model_init(&m, world, layer_counts, layer_rows);
        bool other = rank == n - 1;
        if (how == 0) m.powersgd.rank = other ? 2 : 1;
        if (how == 1) m.powersgd.start_iteration = other;
        if (how == 2) m.powersgd.seed = other;
        if (how == 3) m.powersgd.min_compression_rate = other ? 1 : 2;
        if (how == 4) m.powersgd.epsilon = other;
        if (how == 5) m.powersgd.no_error_feedback = other;
        if (how == 6) m.powersgd.no_warm_start = other;
        if (how == 7) m.rows[0] = other ? 12 : 8;
        refused(rank, &m, IDIST_ERR_MISMATCH, "powersgd");
    }
}

int main(void) {
    static torch_case cases[20];
    uint64_t used[2] = {0, 0};
    int case_count = read_cases(cases, 20);
    tap_deadline(120);
    sent_nbytes = (uint64_t *)shared_alloc(sizeof *sent_nbytes);
    tap_is(case_count, 12, "cases of torch");
    for (int i = 0; i < case_count; i++) {
        torch_case *c = &cases[i];
        TAP_REQUIRE(c->iterations == ITERATIONS);
        ranks_case(c->ranks, NULL, against_torch, c,
                   "torch's gradients: %d ranks, %s, rank %d, %s feedback, %s start", c->ranks,
                   c->batched ? "one square" : "by rows", c->rank, c->feedback ? "with" : "no",
                   c->warm ? "warm" : "new");
    }
    for (int n = 1; n <= 3; n++) {
        for (int how = 0; how < 4; how++)
            ranks_case(n, NULL, exact, &how, "gradients of low rank, %d ranks, %d", n, how);
        ranks_case(n, NULL, not_finite, NULL, "gradients that are not finite, %d ranks", n);
        for (int square = 0; square < 2; square++)
            ranks_case(n, NULL, feedback, &square, "error feedback %s, %d ranks",
                       square ? "in a square" : "by rows", n);
        for (int warm = 0; warm < 2; warm++)
            ranks_case(n, NULL, starts, &warm, "%s starts, %d ranks", warm ? "warm" : "new", n);
        ranks_case(n, NULL, learns, NULL, "a training with %d ranks", n);
        ranks_case(n, NULL, uneven, NULL, "uneven inputs and no_sync, %d ranks", n);
        ranks_case(n, NULL, wrong_descs, NULL, "wrong descriptions, %d ranks", n);
    }
    spikes();
    idist_desc sockets = desc_with("socket", "auto");
    ranks_case(2, &sockets, fewer_bytes, used, "ten iterations over sockets");
    tap_ok(used[0] > 10 * 2 * 80000 && used[1] > 0 && used[1] * 10 < used[0],
           "they send %llu bytes instead of %llu", (unsigned long long)used[1],
           (unsigned long long)used[0]);
    return tap_done();
}
