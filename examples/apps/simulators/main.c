// apps/simulators - simulators on all ranks train one policy from rollouts of different lengths
//
// build:  cc -O2 -DIDIST_IMPLEMENTATION examples/apps/simulators/main.c -o simulators
// run:    ./simulators                        starts 3 ranks
//         ./simulators --ranks 1              alone; the checksum is the same
//         ./simulators --slow 1               rank 1 has a slow simulator: see who waits
//         (export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29524    # by hand; any free port
//          for r in 0 1; do RANK=$r LOCAL_RANK=$r ./simulators & done; wait)
//         torchrun --no_python --nproc_per_node 2 ./simulators
//         mpirun -n 2 ./simulators
//
// expected output; dots depend on machine and compiler, and waiting is the time in collectives:
//    100 simulators on 3 ranks, seed 1
//    generation   1: mean return ... of 500, episodes of ... to ... steps
//    ...
//    solved after ... generations: a mean return of 475 is asked for
//    rank 0: 33 simulators, ... steps, ... steps/s, ... % of the time waiting
//    rank 1: 33 simulators, ... steps, ... steps/s, ... % of the time waiting
//    rank 2: 34 simulators, ... steps, ... steps/s, ... % of the time waiting
//    checksum 0x... on all 3 ranks
//
// A simulator is a cart with a pole. Pushes from the left or the right keep the pole upright
// (Barto, Sutton and Anderson, 1983). A small network gives the probability of a push to the right.
// The network learns by REINFORCE: pushes that went better than in the other simulators become more
// likely. In a generation each simulator plays one episode:
//
//     simulators   0 1 2 ... 32 | 33 ... 65 | 66 ... 99      a rank's simulators step together
//                     rank 0        rank 1       rank 2
//     all_gatherv  lengths: one number per simulator         the counts per rank are known
//     all_gatherv  steps: |=======|==|====|=|==...           the lengths give the counts
//     gradient     32 pieces of all steps, equally long      an equal share for every rank
//     gatherv      32 gradients to rank 0, which adds them in order and moves the weights
//     broadcast    the weights, for the next generation
//
// The training has no barrier. Ranks wait only in the collectives. If a rank dies, the collectives
// fail with an error that names the rank. Each simulator has its own random numbers, and no sum
// depends on where the share of a rank begins. The result is therefore the same for any number of
// ranks.
//
// Exits with 0 if solved, with 2 if the command line cannot be parsed, and otherwise with 1.
#include "../../../idist.h"

#include "../../lib/check.h"
#include "simulators.h"
#include "simulators_options.h"

// Sends to all ranks all lengths, then all steps, in the order of the simulators.
static int gather_steps(simulators *s) {
    size_t counts[MAX_RANKS];

    s->wait_s -= now_s();
    for (int r = 0; r < s->ranks; r++)
        counts[r] = (size_t)(share(s, s->total, r + 1) - share(s, s->total, r));
    CHECK(idist_all_gatherv(s->lengths + s->first, counts[s->rank], s->lengths, counts, NULL,
                            IDIST_I32, NULL));
    simulators_pack(s); // this rank's episodes, one after another
    for (int r = 0; r < s->ranks; r++)
        counts[r] =
            STEP_FLOATS * simulators_steps(s, share(s, s->total, r), share(s, s->total, r + 1));
    CHECK(idist_all_gatherv(s->own, counts[s->rank], s->all, counts, NULL, IDIST_F32, NULL));
    s->n_steps = simulators_steps(s, 0, s->total);
    s->wait_s += now_s();
    return 0;
}

// Computes the gradients of this rank's pieces. Rank 0 collects the gradients of all ranks, updates
// the weights and sends them to all ranks.
static int learn(simulators *s) {
    int begin = share(s, PIECES, s->rank), end = share(s, PIECES, s->rank + 1);
    size_t counts[MAX_RANKS];

    simulators_gradient(s, begin, end);
    s->wait_s -= now_s();
    for (int r = 0; r < s->ranks; r++)
        counts[r] = (size_t)(share(s, PIECES, r + 1) - share(s, PIECES, r)) * WEIGHTS;
    CHECK(idist_gatherv(s->pieces[begin], counts[s->rank], s->pieces, counts, NULL, IDIST_F64, 0,
                        NULL));
    if (s->rank == 0) simulators_learn(s);
    CHECK(idist_broadcast(s->w, WEIGHTS, IDIST_F64, 0, NULL));
    s->wait_s += now_s();
    return 0;
}

static int train(simulators *s) {
    for (int g = 1; g <= (int)s->options.generations && !s->solved; g++) {
        simulators_run(s);
        if (gather_steps(s)) return 1;
        if (s->rank == 0) simulators_print(s, g);
        if (s->n_steps >= (size_t)SOLVED * (size_t)s->total) s->solved = g; // known to all ranks
        else if (learn(s)) return 1;
    }
    return 0;
}

// Sets *same to true if all ranks have this value.
static int compare_ranks(uint64_t value, bool *same) {
    uint64_t least, most;

    CHECK(idist_all_reduce(&value, &least, 1, IDIST_U64, IDIST_MIN, NULL));
    CHECK(idist_all_reduce(&value, &most, 1, IDIST_U64, IDIST_MAX, NULL));
    *same = least == most;
    return 0;
}

static int report(simulators *s, double seconds) {
    double all[MAX_RANKS][4], mine[4] = {s->count, s->steps, s->steps / (s->simulate_s + 1e-9),
                                         100 * s->wait_s / seconds};
    uint64_t checksum = fnv1a(FNV_START, s->w, sizeof s->w);
    bool same;

    CHECK(idist_gather(mine, all, 4, IDIST_F64, 0, NULL));
    if (compare_ranks(checksum, &same)) return 1;
    if (s->rank == 0) simulators_print_result(s, all, checksum, same);
    CHECK(idist_barrier(NULL)); // no rank exits with an error before this is printed
    return same && s->solved ? 0 : 1;
}

// Checks that all ranks have the same options, and that the options fit the world. Returns 0 if
// they do.
static int agree(const simulators *s) {
    const char *wrong = simulators_check(&s->options, s->ranks);
    bool same;

    if (compare_ranks(fnv1a(FNV_START, &s->options, sizeof s->options), &same)) return 1;
    if (!same) wrong = "the ranks were given different options";
    if (wrong && s->rank == 0) fprintf(stderr, "simulators: %s\n", wrong);
    if (wrong) CHECK(idist_barrier(NULL)); // no rank exits before the error is printed
    return wrong != NULL;
}

static int worker(int local_rank, void *arg) {
    static simulators s;
    double start_s;

    (void)local_rank;
    s.options = *(const simulators_options *)arg;
    s.rank = idist_get_rank();
    s.ranks = idist_get_world_size();
    if (agree(&s)) return 1;
    simulators_begin(&s);
    start_s = now_s();
    return train(&s) || report(&s, now_s() - start_s);
}

int main(int argc, char **argv) {
    simulators_options options;
    idist_desc desc = {0};

    if (!simulators_parse(&options, argc, argv)) return 2;
    desc.timeout_ms = desc.init_timeout_ms = 30000;
    if (strcmp(idist_launcher(), "none") == 0)
        desc.nproc_per_node = options.ranks ? (int)options.ranks : 3;
    CHECK(idist_parallel_run(&desc, worker, &options));
    return 0;
}
