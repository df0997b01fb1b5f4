// 24_simulators.c - simulators on all ranks train one policy; ragged rollouts
//
// build:  cc -O2 -DIDIST_IMPLEMENTATION examples/24_simulators.c -o 24_simulators
// run:    ./24_simulators                        starts 3 ranks itself
//         ./24_simulators --ranks 1              alone; the checksum is the same
//         ./24_simulators --slow 1               rank 1 has a slow simulator: see who waits
//         or by hand, with any free MASTER_PORT:
//         (export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29524
//          for r in 0 1; do RANK=$r LOCAL_RANK=$r ./24_simulators & done; wait)
//         torchrun --no_python --nproc_per_node 2 ./24_simulators
//         mpirun -n 2 ./24_simulators
//
// expected output:
//    100 simulators on 3 ranks, seed 1
//    generation   1: mean return ... of 500, episodes of ... to ... steps
//    ...
//    solved after ... generations: a mean return of 475 is asked for
//    rank 0: 33 simulators, ... steps, ... steps/s, ... % of the time waiting
//    rank 1: 33 simulators, ... steps, ... steps/s, ... % of the time waiting
//    rank 2: 34 simulators, ... steps, ... steps/s, ... % of the time waiting
//    checksum 0x... on all 3 ranks
// Dots: speed depends on the machine, and what is learned, in its last digits, on processor and
// compiler. A rank waits when it is in a collective.
//
// A simulator is a cart with a pole to be kept upright by pushes from the left or the right
// (Barto, Sutton and Anderson, 1983). A small network gives the probability of a push to the
// right; it learns by REINFORCE: what went better than it did for the others at that time becomes
// more likely. One generation, in which every simulator plays one episode:
//
//     simulators   0 1 2 ... 32 | 33 ... 65 | 66 ... 99      those of a rank step together
//                     rank 0        rank 1       rank 2
//     all_gatherv  lengths: one number per simulator         the counts per rank are known
//     all_gatherv  steps: |=======|==|====|=|==...           the lengths give the counts
//     gradient     32 pieces of all steps, equally long      an equal share for every rank
//     gatherv      32 gradients to rank 0, which adds them up in order and moves the weights
//     broadcast    the weights, for the next generation
//
// There is no barrier: ranks wait for each other in the collectives, and a dead one ends them with
// an error that names it. The result does not depend on the number of ranks: each simulator has
// random numbers of its own, and no sum is taken in an order that depends on where ranks begin.
//
// Exit code: 0 when it is solved and the weights are the same on all ranks; 1 when not, or when
// something failed; 2 for bad options.
#include "../idist.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CHECK(call)                                                        \
    do {                                                                   \
        if ((call) != IDIST_OK) {                                          \
            fprintf(stderr, "%s failed: %s\n", #call, idist_last_error()); \
            return 1;                                                      \
        }                                                                  \
    } while (0)

enum {
    MAX_SIMULATORS = 1000,
    MAX_RANKS = 256,
    LIMIT = 500,
    SOLVED = 475,
    PIECES = 32,
    DEADLINE_MS = 30000
};
// The weights lie in one array: a hidden layer of 16, then the logit of a push to the right.
enum {
    STATE = 4,
    HIDDEN = 16,
    W1 = 0,
    B1 = W1 + STATE * HIDDEN,
    W2 = B1 + HIDDEN,
    B2 = W2 + HIDDEN,
    WEIGHTS = B2 + 1
};

typedef struct job {
    uint64_t ranks, simulators, generations, seed; // ranks == 0: not given
    uint64_t slow;                                 // rank; MAX_RANKS: none
} job;
static const job DEFAULTS = {0, 100, 200, 1, MAX_RANKS};

typedef struct step {
    float state[STATE]; // position, speed, angle of the pole, its speed
    float push;         // 1: to the right, 0: to the left
} step;

typedef struct trainer {
    const job *j;
    int rank, ranks, simulators, first, count; // count of them, from the first on, are of this rank
    uint64_t random[MAX_SIMULATORS];           // the state of each one's random numbers
    float now[MAX_SIMULATORS][STATE];
    int32_t lengths[MAX_SIMULATORS]; // of the episodes; 0: not over yet
    step own[MAX_SIMULATORS * LIMIT], all[MAX_SIMULATORS * LIMIT];
    float advantage[MAX_SIMULATORS * LIMIT]; // how much better than usual it went from this step on
    size_t total;                            // steps in `all`
    double w[WEIGHTS], momentum[WEIGHTS], pieces[PIECES][WEIGHTS];
    double steps, simulate_s, wait_s;
} trainer;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double random_unit(uint64_t *state) { // 0 <= x < 1, by splitmix64
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

static uint64_t fnv1a(const void *data, size_t nbytes) {
    const unsigned char *p = (const unsigned char *)data;
    uint64_t hash = 0xcbf29ce484222325u;
    while (nbytes--) hash = (hash ^ *p++) * 0x100000001b3u;
    return hash;
}

// ---- the simulator ----

// A step of 1/50 s. False when the pole fell or the cart left its track; also for NaN.
static bool move(float *s, bool right) {
    double a = s[2], a2 = a * a; // at most 0.21, so that a few terms of the series are enough
    double sine = a * (1 - a2 / 6 * (1 - a2 / 20 * (1 - a2 / 42))),
           cosine = 1 - a2 / 2 * (1 - a2 / 12 * (1 - a2 / 30));
    // Newtons, metres, kilograms: a push of 10, half the pole is 0.5, the pole 0.1, pole and cart
    // together 1.1.
    double push = ((right ? 10 : -10) + 0.05 * s[3] * s[3] * sine) / 1.1;
    double turn = (9.8 * sine - cosine * push) / (0.5 * (4.0 / 3 - 0.1 * cosine * cosine / 1.1));
    s[1] += (float)(0.02 *
                    (push - 0.05 * turn * cosine / 1.1)); // the speeds first: semi-implicit Euler
    s[3] += (float)(0.02 * turn);
    s[0] += 0.02f * s[1];
    s[2] += 0.02f * s[3];
    return s[0] > -2.4f && s[0] < 2.4f && s[2] > -0.2095f && s[2] < 0.2095f; // 12 degrees
}

// ---- the policy ----

static double exp_of(double x) { // our own, so that the program links without -lm; |x| <= 30
    double y = x / 64, sum = 1;
    for (int k = 12; k >= 1; k--) sum = 1 + sum * y / k;
    for (int k = 0; k < 6; k++) sum *= sum;
    return sum;
}

// The probability of a push to the right. Hidden units are x / (1 + |x|), which bends like tanh and
// needs no exp.
static double decide(const double *w, const float *state, double *in, double *hidden) {
    static const double scale[STATE] = {0.4, 0.5, 5, 0.5}; // to about -1 .. 1
    double logit = w[B2];
    for (int i = 0; i < STATE; i++) in[i] = scale[i] * state[i];
    for (int u = 0; u < HIDDEN; u++) {
        double x = w[B1 + u];
        for (int i = 0; i < STATE; i++) x += w[W1 + u * STATE + i] * in[i];
        hidden[u] = x / (1 + (x < 0 ? -x : x));
        logit += w[W2 + u] * hidden[u];
    }
    logit = logit > 30 ? 30 : logit < -30 ? -30 : logit;
    return 1 / (1 + exp_of(-logit));
}

// Adds the gradient of advantage * log(probability of what was done).
static void add_gradient(const double *w, const step *s, double advantage, double *sum) {
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

// ---- one generation ----

// Where the share of a rank begins; that of rank `ranks` is the end.
static int border(const trainer *t, int n, int rank) { return (int)((int64_t)n * rank / t->ranks); }

// Own simulators, step by step together. One that is through waits for the others.
static void simulate(trainer *t) {
    static const struct timespec pause = {
        0, 200000}; // for each step of a simulator that also draws pictures, say
    double start_s = now_s(), in[STATE], hidden[HIDDEN];
    bool is_slow = (uint64_t)t->rank == t->j->slow;
    for (int i = t->first; i < t->first + t->count; i++) {
        t->lengths[i] = 0;
        for (int k = 0; k < STATE; k++)
            t->now[i][k] = (float)(0.1 * random_unit(&t->random[i]) - 0.05);
    }
    for (int n = 0, alive = t->count; alive > 0; n++) {
        if (is_slow) nanosleep(&pause, NULL);
        for (int i = t->first; i < t->first + t->count; i++) {
            if (t->lengths[i]) continue;
            step *s = &t->own[(i - t->first) * LIMIT + n];
            bool right = random_unit(&t->random[i]) < decide(t->w, t->now[i], in, hidden);
            memcpy(s->state, t->now[i], sizeof s->state);
            s->push = right;
            if (move(t->now[i], right) && n + 1 < LIMIT) continue;
            t->lengths[i] = n + 1;
            t->steps += n + 1;
            alive--;
        }
    }
    t->simulate_s += now_s() - start_s;
}

// All ranks get the steps of all: first how many, then the steps, in the order of the simulators.
static int gather_steps(trainer *t) {
    size_t counts[MAX_RANKS], mine = 0;
    double start_s = now_s();
    for (int r = 0; r < t->ranks; r++)
        counts[r] = (size_t)(border(t, t->simulators, r + 1) - border(t, t->simulators, r));
    CHECK(idist_all_gatherv(&t->lengths[t->first], counts[t->rank], t->lengths, counts, NULL,
                            IDIST_I32, NULL));
    t->total = 0;
    for (int r = 0; r < t->ranks; r++) {
        counts[r] = 0;
        for (int i = border(t, t->simulators, r); i < border(t, t->simulators, r + 1); i++) {
            counts[r] += (size_t)t->lengths[i] * (sizeof(step) / sizeof(float));
            t->total += (size_t)t->lengths[i];
        }
    }
    for (int i = 0; i < t->count; i++) { // close the gaps between the own episodes
        size_t length = (size_t)t->lengths[t->first + i];
        memmove(t->own + mine, t->own + i * LIMIT, length * sizeof(step));
        mine += length;
    }
    CHECK(idist_all_gatherv(t->own, counts[t->rank], t->all, counts, NULL, IDIST_F32, NULL));
    t->wait_s += now_s() - start_s;
    return 0;
}

// How much a step and what followed brought (each step counts 0.99 of the one before), compared
// with the average of all episodes that got so far; divided by the mean size, so that the rate of
// learning need not change.
static void compare_episodes(trainer *t) {
    double worth[LIMIT + 1] = {0}, mean[LIMIT] = {0}, size = 1e-9;
    int alive[LIMIT] = {0};
    float *to = t->advantage;
    for (int left = 1; left <= LIMIT; left++) worth[left] = 1 + 0.99 * worth[left - 1];
    for (int i = 0; i < t->simulators; i++)
        for (int n = 0; n < t->lengths[i]; n++) mean[n] += worth[t->lengths[i] - n], alive[n]++;
    for (int i = 0; i < t->simulators; i++) {
        for (int n = 0; n < t->lengths[i]; n++) {
            *to = (float)(worth[t->lengths[i] - n] - mean[n] / alive[n]);
            size += *to < 0 ? -*to : *to;
            to++;
        }
    }
    for (size_t k = 0; k < t->total; k++) t->advantage[k] *= (float)((double)t->total / size);
}

// Each rank computes the gradients of some pieces; rank 0 learns, the others hear of it.
static int learn(trainer *t) {
    size_t counts[MAX_RANKS];
    int begin = border(t, PIECES, t->rank), end = border(t, PIECES, t->rank + 1);
    memset(t->pieces, 0, sizeof t->pieces);
    for (size_t p = (size_t)begin; p < (size_t)end; p++)
        for (size_t k = t->total * p / PIECES; k < t->total * (p + 1) / PIECES; k++)
            add_gradient(t->w, &t->all[k], t->advantage[k], t->pieces[p]);
    double start_s = now_s();
    for (int r = 0; r < t->ranks; r++)
        counts[r] = (size_t)(border(t, PIECES, r + 1) - border(t, PIECES, r)) * WEIGHTS;
    CHECK(idist_gatherv(t->pieces + begin, counts[t->rank], t->pieces, counts, NULL, IDIST_F64, 0,
                        NULL));
    for (int i = 0; i < WEIGHTS && t->rank == 0; i++) {
        double sum = 0;
        for (int p = 0; p < PIECES; p++) sum += t->pieces[p][i];
        t->momentum[i] = 0.8 * t->momentum[i] + sum / (double)t->total;
        t->w[i] += t->momentum[i];
    }
    CHECK(idist_broadcast(t->w, WEIGHTS, IDIST_F64, 0, NULL));
    t->wait_s += now_s() - start_s;
    return 0;
}

// ---- the worker ----

// *same: whether all ranks have this value.
static int compare_ranks(uint64_t value, bool *same) {
    uint64_t all[MAX_RANKS];
    *same = true;
    CHECK(idist_all_gather(&value, all, 1, IDIST_U64, NULL));
    for (int r = 0; r < idist_get_world_size(); r++) *same = *same && all[r] == all[0];
    return 0;
}

// *solved: the generation in which it was; 0 when it was not.
static int train(trainer *t, int *solved) {
    uint64_t seed = t->j->seed * 1000003u;
    for (int i = 0; i < t->simulators; i++) t->random[i] = seed + 1 + (uint64_t)i;
    for (int i = 0; i < B1 && t->rank == 0; i++)
        t->w[i] = random_unit(&seed) - 0.5; // the other weights begin at 0
    CHECK(idist_broadcast(t->w, WEIGHTS, IDIST_F64, 0, NULL));
    for (int g = 1; g <= (int)t->j->generations && !*solved; g++) {
        int shortest = LIMIT, longest = 0;
        simulate(t);
        if (gather_steps(t)) return 1;
        for (int i = 0; i < t->simulators; i++) {
            if (t->lengths[i] < shortest) shortest = t->lengths[i];
            if (t->lengths[i] > longest) longest = t->lengths[i];
        }
        if (t->rank == 0) {
            printf("generation %3d: mean return %.1f of %d, episodes of %d to %d steps\n", g,
                   (double)t->total / t->simulators, LIMIT, shortest, longest);
            fflush(stdout);
        }
        if (t->total >= (size_t)SOLVED * (size_t)t->simulators) *solved = g; // all ranks see it
        else {
            compare_episodes(t);
            if (learn(t)) return 1;
        }
    }
    return 0;
}

static int report(trainer *t, int solved, double all_s) {
    static double all[MAX_RANKS][4];
    double mine[4] = {t->count, t->steps, t->steps / (t->simulate_s + 1e-9),
                      100 * t->wait_s / all_s};
    uint64_t checksum = fnv1a(t->w, sizeof t->w);
    bool same;
    CHECK(idist_gather(mine, all, 4, IDIST_F64, 0, NULL));
    if (compare_ranks(checksum, &same)) return 1;
    if (t->rank == 0) {
        if (solved)
            printf("solved after %d generations: a mean return of %d is asked for\n", solved,
                   SOLVED);
        else printf("not solved: a mean return of %d is asked for\n", SOLVED);
        for (int r = 0; r < t->ranks; r++)
            printf(
                "rank %d: %.0f simulators, %.0f steps, %.0f steps/s, %.0f %% of the time waiting\n",
                r, all[r][0], all[r][1], all[r][2], all[r][3]);
        if (same)
            printf("checksum 0x%016llx on all %d ranks\n", (unsigned long long)checksum, t->ranks);
        else fprintf(stderr, "the ranks ended with different weights\n");
        fflush(stdout);
    }
    return same && solved ? 0 : 1;
}

static int worker(int local_rank, void *arg) {
    static trainer t;
    const job *j = (const job *)arg;
    const char *wrong = NULL;
    int solved = 0;
    bool same;
    (void)local_rank;
    t.j = j;
    t.rank = idist_get_rank();
    t.ranks = idist_get_world_size();
    t.simulators = (int)j->simulators;
    t.first = border(&t, t.simulators, t.rank);
    t.count = border(&t, t.simulators, t.rank + 1) - t.first;
    if (t.ranks > MAX_RANKS) wrong = "more ranks than this program has room for";
    else if (compare_ranks(fnv1a(j, sizeof *j), &same)) return 1;
    else if (!same) wrong = "the ranks were given different options";
    else if (j->ranks && (int)j->ranks != t.ranks)
        wrong = "--ranks contradicts the launcher: leave it out";
    else if (j->slow != DEFAULTS.slow && j->slow >= (uint64_t)t.ranks)
        wrong = "--slow names a rank that is not there";
    if (wrong && t.rank == 0) fprintf(stderr, "24_simulators: %s\n", wrong);
    if (wrong) return 1;
    if (t.rank == 0)
        printf("%d simulators on %d ranks, seed %llu\n", t.simulators, t.ranks,
               (unsigned long long)j->seed);
    double start_s = now_s();
    return train(&t, &solved) || report(&t, solved, now_s() - start_s);
}

static bool parse_number(const char *text, uint64_t min, uint64_t max, uint64_t *value) {
    char *end = NULL;
    errno = 0;
    *value = strtoull(text, &end, 10);
    return *text >= '0' && *text <= '9' && !*end && !errno && *value >= min && *value <= max;
}

static bool parse_options(job *j, int argc, char **argv) {
    static const char *const names[] = {"--ranks", "--simulators", "--generations", "--seed",
                                        "--slow"};
    static const uint64_t min[] = {1, 2, 1, 0,
                                   0}; // a single simulator has no other to be compared with
    static const uint64_t max[] = {MAX_RANKS, MAX_SIMULATORS, 1000000, UINT64_MAX, MAX_RANKS - 1};
    uint64_t *values[] = {&j->ranks, &j->simulators, &j->generations, &j->seed, &j->slow};
    for (int i = 1; i < argc; i += 2) {
        int k = 0;
        while (k < 5 && strcmp(argv[i], names[k])) k++;
        if (k == 5)
            fprintf(stderr,
                    "%s is no option; there are --ranks, --simulators, --generations, --seed and "
                    "--slow\n",
                    argv[i]);
        else if (i + 1 == argc || !parse_number(argv[i + 1], min[k], max[k], values[k]))
            fprintf(stderr, "%s %s: expected a number from %llu to %llu\n", names[k],
                    i + 1 < argc ? argv[i + 1] : "(nothing)", (unsigned long long)min[k],
                    (unsigned long long)max[k]);
        else continue;
        return false;
    }
    return true;
}

int main(int argc, char **argv) {
    job j = DEFAULTS;
    idist_desc desc;
    if (!parse_options(&j, argc, argv)) return 2;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = desc.init_timeout_ms = DEADLINE_MS;
    if (strcmp(idist_launcher(), "none") == 0) // nobody has started ranks
        desc.nproc_per_node = j.ranks ? (int)j.ranks : 3;
    CHECK(idist_parallel_run(&desc, worker, &j));
    return 0;
}
