// simulators.h - the simulators of one rank: runs episodes and learns from them
#ifndef EXAMPLES_SIMULATORS_H
#define EXAMPLES_SIMULATORS_H

#include "cartpole.h"

#include <stdio.h>

enum {
    MAX_RANKS = 256,
    MAX_SIMULATORS = 1000,
    LIMIT = 500,  // most steps of an episode
    SOLVED = 475, // mean return at which the task is solved
    PIECES = 32,
    STEP_FLOATS = STATE + 1
};

typedef struct simulators_options {
    uint64_t ranks, simulators, generations, seed; // ranks is 0 if not given
    uint64_t slow;                                 // slow rank, or MAX_RANKS for none
} simulators_options;

// The simulators of all ranks, and their results. This rank runs `count` simulators from `first`
// on.
typedef struct simulators {
    simulators_options options;
    int rank, ranks, total, first, count;
    int solved; // generation that solved the task, or 0

    uint64_t random[MAX_SIMULATORS]; // state of each simulator's generator
    float now[MAX_SIMULATORS][STATE];
    int32_t lengths[MAX_SIMULATORS]; // of the episodes; 0 until the end
    step own[MAX_SIMULATORS * LIMIT], all[MAX_SIMULATORS * LIMIT];
    float advantage[MAX_SIMULATORS * LIMIT]; // of each step
    size_t n_steps;                          // in `all`

    double w[WEIGHTS], momentum[WEIGHTS], pieces[PIECES][WEIGHTS];
    double steps, simulate_s, wait_s; // of this rank
} simulators;

// ---- shares ----

// Returns the index at which a rank's share of n items begins. Returns n for rank `ranks`.
static inline int share(const simulators *s, int n, int rank) {
    return (int)((int64_t)n * rank / s->ranks);
}

// Divides the simulators among the ranks and draws the weights, which are the same on all ranks.
static inline void simulators_begin(simulators *s) {
    uint64_t seed = s->options.seed * 1000003u;

    s->total = (int)s->options.simulators;
    s->first = share(s, s->total, s->rank);
    s->count = share(s, s->total, s->rank + 1) - s->first;
    for (int i = 0; i < s->total; i++) s->random[i] = seed + 1 + (uint64_t)i;
    for (int i = 0; i < B1; i++) s->w[i] = random_unit(&seed) - 0.5; // the other weights are 0
    if (s->rank == 0)
        printf("%d simulators on %d ranks, seed %llu\n", s->total, s->ranks,
               (unsigned long long)s->options.seed);
}

// ---- one episode of each simulator ----

static inline void simulators_reset(simulators *s) {
    for (int i = s->first; i < s->first + s->count; i++) {
        s->lengths[i] = 0;
        for (int k = 0; k < STATE; k++)
            s->now[i][k] = (float)(0.1 * random_unit(&s->random[i]) - 0.05);
    }
}

// Runs step n of simulator i. Returns true if the episode ends with this step.
static inline bool simulators_step(simulators *s, int i, int n) {
    step *to = &s->own[(i - s->first) * LIMIT + n];
    double in[STATE], hidden[HIDDEN];
    bool right = random_unit(&s->random[i]) < decide(s->w, s->now[i], in, hidden);

    memcpy(to->state, s->now[i], sizeof to->state);
    to->push = right;
    return !move(s->now[i], right) || n + 1 == LIMIT;
}

// Runs an episode of each simulator of this rank. The simulators step together; a simulator that
// has ended its episode waits for the others.
static inline void simulators_run(simulators *s) {
    static const struct timespec pause = {0, 200000}; // as if a simulator drew pictures
    double start_s = now_s();
    bool is_slow = (uint64_t)s->rank == s->options.slow;

    simulators_reset(s);
    for (int n = 0, alive = s->count; alive > 0; n++) {
        if (is_slow) nanosleep(&pause, NULL);
        for (int i = s->first; i < s->first + s->count; i++) {
            if (s->lengths[i] || !simulators_step(s, i, n)) continue;
            s->lengths[i] = n + 1;
            s->steps += n + 1;
            alive--;
        }
    }
    s->simulate_s += now_s() - start_s;
}

// Closes the gaps between the episodes of this rank.
static inline void simulators_pack(simulators *s) {
    size_t to = 0;

    for (int i = 0; i < s->count; i++) {
        size_t length = (size_t)s->lengths[s->first + i];

        memmove(s->own + to, s->own + i * LIMIT, length * sizeof(step));
        to += length;
    }
}

// Returns the number of steps of the simulators from .. to - 1.
static inline size_t simulators_steps(const simulators *s, int from, int to) {
    size_t n = 0;

    for (; from < to; from++) n += (size_t)s->lengths[from];
    return n;
}

// ---- learning ----

// Computes the advantage of each step. The function first takes the return from this step on, in
// which each step counts 0.99 of the step before. The function then subtracts the mean over all
// episodes that reached this step. Finally it divides by the mean absolute value, so that one
// learning rate always fits.
static inline void simulators_compare(simulators *s) {
    double worth[LIMIT + 1] = {0}, mean[LIMIT] = {0}, size = 1e-9;
    int alive[LIMIT] = {0};
    float *to = s->advantage;

    for (int left = 1; left <= LIMIT; left++) worth[left] = 1 + 0.99 * worth[left - 1];
    for (int i = 0; i < s->total; i++) {
        for (int n = 0; n < s->lengths[i]; n++) {
            mean[n] += worth[s->lengths[i] - n];
            alive[n]++;
        }
    }
    for (int i = 0; i < s->total; i++) {
        for (int n = 0; n < s->lengths[i]; n++, to++) {
            *to = (float)(worth[s->lengths[i] - n] - mean[n] / alive[n]);
            size += *to < 0 ? -*to : *to;
        }
    }
    for (size_t k = 0; k < s->n_steps; k++) s->advantage[k] *= (float)((double)s->n_steps / size);
}

// Computes the gradients of the pieces from .. to - 1 of all steps.
static inline void simulators_gradient(simulators *s, int from, int to) {
    simulators_compare(s);
    memset(s->pieces, 0, sizeof s->pieces);
    for (size_t p = (size_t)from; p < (size_t)to; p++)
        for (size_t k = s->n_steps * p / PIECES; k < s->n_steps * (p + 1) / PIECES; k++)
            add_gradient(s->w, &s->all[k], s->advantage[k], s->pieces[p]);
}

// Adds the gradients of the pieces in order, and updates the weights.
static inline void simulators_learn(simulators *s) {
    for (int i = 0; i < WEIGHTS; i++) {
        double sum = 0;

        for (int p = 0; p < PIECES; p++) sum += s->pieces[p][i];
        s->momentum[i] = 0.8 * s->momentum[i] + sum / (double)s->n_steps;
        s->w[i] += s->momentum[i];
    }
}

// ---- printing ----

static inline void simulators_print(const simulators *s, int generation) {
    int shortest = LIMIT, longest = 0;

    for (int i = 0; i < s->total; i++) {
        if (s->lengths[i] < shortest) shortest = s->lengths[i];
        if (s->lengths[i] > longest) longest = s->lengths[i];
    }
    printf("generation %3d: mean return %.1f of %d, episodes of %d to %d steps\n", generation,
           (double)s->n_steps / s->total, LIMIT, shortest, longest);
    fflush(stdout);
}

// Prints the result. `all` holds, for each rank, its simulators, steps, steps per second and
// percentage of time spent waiting.
static inline void simulators_print_result(const simulators *s, double all[][4], uint64_t checksum,
                                           bool same) {
    if (s->solved)
        printf("solved after %d generations: a mean return of %d is asked for\n", s->solved,
               SOLVED);
    else printf("not solved: a mean return of %d is asked for\n", SOLVED);
    for (int r = 0; r < s->ranks; r++)
        printf("rank %d: %.0f simulators, %.0f steps, %.0f steps/s, %.0f %% of the time waiting\n",
               r, all[r][0], all[r][1], all[r][2], all[r][3]);
    if (same)
        printf("checksum 0x%016llx on all %d ranks\n", (unsigned long long)checksum, s->ranks);
    else fprintf(stderr, "the ranks ended with different weights\n");
    fflush(stdout);
}

#endif // EXAMPLES_SIMULATORS_H
