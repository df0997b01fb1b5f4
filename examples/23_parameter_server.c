// 23_parameter_server.c - asynchronous training with a parameter server
//
// build:  cc -O2 -DIDIST_IMPLEMENTATION examples/23_parameter_server.c -o 23_parameter_server
// run:    ./23_parameter_server          starts 4 ranks: the server and 3 workers
//         ./23_parameter_server 2 50000  one worker (2 to 16 ranks), 50000 updates, not 2000
//         (export WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=29523    # by hand; any free port
//          for r in 0 1 2; do RANK=$r LOCAL_RANK=$r ./23_parameter_server & done; wait)
//
// expected output; dots depend on the machine, and differ from run to run:
//    server on rank 0, 3 workers: 1257 images to train, 539 to test
//    500 updates: mean loss ...
//    1000 updates: mean loss ...
//    1500 updates: mean loss ...
//    2000 updates: mean loss ...
//    worker 1: ... updates, staleness ... on average and ... at most
//    worker 2: ... updates, staleness ... on average and ... at most
//    worker 3: ... updates, staleness ... on average and ... at most
//    accuracy ... %
//
// The program uses no collective, and the ranks take no common step. The server answers the
// messages of all workers in the order in which they arrive:
//
//     worker                                     server
//     PULL  (empty)                        ->
//                                          <-    WEIGHTS  all weights, number of updates so far
//     computes the gradient of a random batch of images
//     PUSH  gradient, loss, same number    ->    weights -= rate * gradient, one update more
//     ... and so on, until the answer to PULL is STOP
//
// While a worker computes, other workers push. The worker's gradient then belongs to weights that
// are some updates old. This staleness is the price of not waiting for the slowest worker. A step
// along an old gradient overshoots, so the server divides the learning rate by 1 + staleness. With
// one worker no gradient is stale, and every run gives the same result. If a worker dies, every
// rank gets an error that names the worker.
//
// Exits with 0 if the accuracy is 90 % or more, or if fewer than 2000 updates were requested. Exits
// with 2 for a bad argument, otherwise with 1.
#include "../idist_train.h"

#include "lib/arguments.h"
#include "lib/subset.h"

enum { RANKS = 4, MAX_RANKS = 16, BATCH = 16, UPDATES = 2000, MAX_UPDATES = 100000000 };
enum { PULL = 1, WEIGHTS, PUSH, STOP };          // tags
enum { VERSION = DIGITS_PARAMS, LOSS, MESSAGE }; // a message: weights or gradient, version, loss

static int wanted_updates, wanted_ranks; // wanted_ranks is 0 for any number
static bool refused;                     // set for main if the worker runs in this process

typedef struct server {
    double weights[MESSAGE], message[MESSAGE];
    int updates, pushed[MAX_RANKS], oldest[MAX_RANKS];
    double staleness[MAX_RANKS], loss; // sums; `loss` since the last line of output
} server;

static void apply(server *s, int worker) {
    int age = s->updates - (int)s->message[VERSION];

    for (int i = 0; i < DIGITS_PARAMS; i++) s->weights[i] -= 0.1 / (1 + age) * s->message[i];
    s->weights[VERSION] = ++s->updates;
    s->pushed[worker]++;
    s->staleness[worker] += age;
    if (age > s->oldest[worker]) s->oldest[worker] = age;
    s->loss += s->message[LOSS];
    if (s->updates % (wanted_updates / 4) != 0) return;
    printf("%d updates: mean loss %.4f\n", s->updates, s->loss / (wanted_updates / 4));
    fflush(stdout);
    s->loss = 0;
}

// Answers the workers until every worker has received STOP. Ignores gradients that arrive after the
// last update.
static int serve(server *s, int workers) {
    idist_recv_info info;

    while (workers > 0) {
        CHECK(idist_recv(s->message, MESSAGE, IDIST_F64, IDIST_ANY_SOURCE, IDIST_ANY_TAG, &info,
                         NULL));
        bool done = s->updates >= wanted_updates;
        if (info.tag == PUSH && !done) apply(s, info.source);
        if (info.tag == PULL && !done)
            CHECK(idist_send(s->weights, MESSAGE, IDIST_F64, info.source, WEIGHTS, NULL));
        if (info.tag == PULL && done) {
            CHECK(idist_send(NULL, 0, IDIST_F64, info.source, STOP, NULL));
            workers--;
        }
    }
    return 0;
}

static int run_server(const digits *d, const subset *train, const subset *test, int size) {
    static server s;

    digits_initialize(s.weights, SUBSET_SEED);
    printf("server on rank 0, %d worker%s: %zu images to train, %zu to test\n", size - 1,
           size > 2 ? "s" : "", train->count, test->count);
    fflush(stdout);
    if (serve(&s, size - 1)) return 1;
    for (int r = 1; r < size; r++)
        printf("worker %d: %d updates, staleness %.2f on average and %d at most\n", r, s.pushed[r],
               s.pushed[r] ? s.staleness[r] / s.pushed[r] : 0, s.oldest[r]);
    double accuracy = 100.0 * subset_count_right(s.weights, d, test, 0, 1) / (double)test->count;
    printf("accuracy %.2f %%\n", accuracy);
    return accuracy >= 90 || wanted_updates < UPDATES ? 0 : 1;
}

static int run_worker(const digits *d, const subset *train) {
    static double pull[MESSAGE], push[MESSAGE];
    uint64_t seed = idist_auto_seed(SUBSET_SEED); // so that workers draw different batches
    idist_recv_info info;

    for (;;) {
        CHECK(idist_send(NULL, 0, IDIST_F64, 0, PULL, NULL));
        CHECK(idist_recv(pull, MESSAGE, IDIST_F64, 0, IDIST_ANY_TAG, &info, NULL));
        if (info.tag == STOP) return 0;
        push[LOSS] = subset_gradient(pull, d, train, random_u64(&seed) % train->count, BATCH, push);
        push[VERSION] = pull[VERSION];
        CHECK(idist_send(push, MESSAGE, IDIST_F64, 0, PUSH, NULL));
    }
}

static int worker(int local_rank, void *arg) {
    static const double split[2] = {0.7, 0.3};
    static digits d;
    static subset train, test;
    int rank = idist_get_rank(), size = idist_get_world_size();

    (void)local_rank;
    (void)arg;
    refused = world_contradicts(wanted_ranks, size);
    if (refused) return 2;
    if (size < 2 || size > MAX_RANKS)
        return fprintf(stderr, "%d ranks: it takes 2 to %d\n", size, MAX_RANKS), 1;
    if (!digits_load(&d) || subset_part(NULL, split, 2, 0, &train)) return 1;
    if (subset_part(NULL, split, 2, 1, &test)) return 1;
    return rank == 0 ? run_server(&d, &train, &test, size) : run_worker(&d, &train);
}

int main(int argc, char **argv) {
    int ranks = argument(argc, argv, 1, RANKS, 2, MAX_RANKS);
    idist_desc desc = {.timeout_ms = 60000, .init_timeout_ms = 60000};

    wanted_updates = argument(argc, argv, 2, UPDATES, 4, MAX_UPDATES);
    if (!ranks || !wanted_updates || argc > 3)
        return fprintf(stderr, "usage: %s [number of ranks, 2 to %d [updates, 4 to %d]]\n", argv[0],
                       MAX_RANKS, MAX_UPDATES),
               2;
    if (argc > 1) wanted_ranks = ranks;
    if (strcmp(idist_launcher(), "none") == 0) desc.nproc_per_node = ranks;
    if (idist_parallel_run(&desc, worker, NULL) == IDIST_OK || refused) return refused ? 2 : 0;
    return fprintf(stderr, "%s: %s\n", argv[0], idist_last_error()), 1;
}
