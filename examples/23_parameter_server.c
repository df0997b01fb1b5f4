// 23_parameter_server.c - asynchronous training with a parameter server
//
// build:  cc -O2 -DIDIST_IMPLEMENTATION examples/23_parameter_server.c -o 23_parameter_server
// run:    ./23_parameter_server          starts 4 ranks itself: the server and 3 workers
//         ./23_parameter_server 2        one worker; any number of ranks from 2 to 16
//         ./23_parameter_server 4 50000  50000 updates instead of 2000
//         or by hand, with any free MASTER_PORT:
//         (export WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=29523
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
// No collective, no common step: the server takes messages in the order in which they come, from
// whomever.
//
//     worker                                     server
//     PULL  nothing                        ->
//                                          <-    WEIGHTS  all weights, and their number of updates
//     gradient of a batch of its own images
//     PUSH  gradient, loss, that number    ->    weights -= rate * gradient: one update more
//     ... and again, until the answer to PULL is STOP
//
// While a worker computes, others push: its gradient is that of weights which are some updates old
// by then. That is called staleness, and is what asynchronous training pays for never waiting for
// the slowest: steps along old gradients overshoot. So the server makes them shorter, rate / (1 +
// staleness), and more workers need more updates. Every run is another one; only with one worker,
// where nothing is stale, all are the same. A worker that dies is an error of the whole world,
// which names it: nobody waits for it for ever.
//
// Exit code: 0 when the accuracy is 90 % or more, or fewer updates than 2000 were asked for; 1
// when not, or when something failed; 2 for a bad argument.
#include "../idist_train.h"

#include "lib/arguments.h"
#include "lib/dense.h"

enum {
    RANKS = 4,
    MAX_RANKS = 16,
    BATCH = 16,
    UPDATES = 2000,
    MAX_UPDATES = 100000000,
    SEED = 1234,
    DEADLINE_MS = 60000
};
enum { PULL = 1, WEIGHTS, PUSH, STOP }; // tags

// Both messages are arrays: the weights or a gradient, then these.
enum { VERSION = DIGITS_PARAMS, LOSS, MESSAGE };

#define CHECK(call)                                                        \
    do {                                                                   \
        if ((call) != IDIST_OK) {                                          \
            fprintf(stderr, "%s failed: %s\n", #call, idist_last_error()); \
            return 1;                                                      \
        }                                                                  \
    } while (0)

typedef struct subset {
    size_t count, image[DIGITS_COUNT];
} subset;

static int take_part(const double *fractions, int n, int which, const subset *whole, subset *part) {
    CHECK(idist_partition(whole ? whole->count : DIGITS_COUNT, fractions, n, which, SEED,
                          part->image, &part->count));
    for (size_t i = 0; whole && i < part->count; i++) part->image[i] = whole->image[part->image[i]];
    return 0;
}

// ---- the server ----

typedef struct tally { // of one worker
    int updates, oldest;
    double staleness; // sum
} tally;

typedef struct server {
    double weights[MESSAGE], message[MESSAGE];
    tally workers[MAX_RANKS];
    int updates, wanted, running; // running: workers that have not been told to stop
    double loss;                  // sum of the last quarter
} server;

static void apply(server *s, tally *of) {
    int staleness = s->updates - (int)s->message[VERSION];
    double rate = 0.1 / (1 + staleness);
    for (int i = 0; i < DIGITS_PARAMS; i++) s->weights[i] -= rate * s->message[i];
    s->weights[VERSION] = ++s->updates;
    of->updates++;
    of->staleness += staleness;
    if (staleness > of->oldest) of->oldest = staleness;
    s->loss += s->message[LOSS];
    if (s->updates % (s->wanted / 4) != 0) return;
    printf("%d updates: mean loss %.4f\n", s->updates, s->loss / (s->wanted / 4));
    fflush(stdout);
    s->loss = 0;
}

// A gradient that comes when there are updates enough is not used.
static int serve(server *s, int size) {
    idist_recv_info info;
    digits_initialise(s->weights, SEED);
    for (s->running = size - 1; s->running > 0;) {
        CHECK(idist_recv(s->message, MESSAGE, IDIST_F64, IDIST_ANY_SOURCE, IDIST_ANY_TAG, &info,
                         NULL));
        if (info.tag == PUSH) {
            if (s->updates < s->wanted) apply(s, &s->workers[info.source]);
        } else if (s->updates < s->wanted) {
            CHECK(idist_send(s->weights, MESSAGE, IDIST_F64, info.source, WEIGHTS, NULL));
        } else {
            CHECK(idist_send(NULL, 0, IDIST_F64, info.source, STOP, NULL));
            s->running--;
        }
    }
    return 0;
}

static int run_server(const digits *d, const subset *train, const subset *test, int size,
                      int updates) {
    static server s;
    s.wanted = updates;
    int right = 0;
    printf("server on rank 0, %d worker%s: %zu images to train, %zu to test\n", size - 1,
           size > 2 ? "s" : "", train->count, test->count);
    fflush(stdout);
    if (serve(&s, size)) return 1;
    for (int r = 1; r < size; r++) {
        const tally *t = &s.workers[r];
        printf("worker %d: %d updates, staleness %.2f on average and %d at most\n", r, t->updates,
               t->updates ? t->staleness / t->updates : 0, t->oldest);
    }
    for (size_t i = 0; i < test->count; i++) right += digits_is_right(s.weights, d, test->image[i]);
    double accuracy = 100.0 * right / (double)test->count;
    printf("accuracy %.2f %%\n", accuracy);
    return accuracy >= 90 || updates < UPDATES ? 0 : 1;
}

// ---- a worker ----

static int run_worker(const digits *d, const subset *mine) {
    static double weights[MESSAGE], push[MESSAGE];
    idist_recv_info info;
    size_t next = 0;
    for (;;) {
        CHECK(idist_send(NULL, 0, IDIST_F64, 0, PULL, NULL));
        CHECK(idist_recv(weights, MESSAGE, IDIST_F64, 0, IDIST_ANY_TAG, &info, NULL));
        if (info.tag == STOP) return 0;
        memset(push, 0, sizeof push);
        for (int i = 0; i < BATCH; i++, next = (next + 1) % mine->count)
            push[LOSS] += digits_gradient(weights, d, mine->image[next], push);
        for (int i = 0; i < DIGITS_PARAMS; i++) push[i] /= BATCH;
        push[LOSS] /= BATCH;
        push[VERSION] = weights[VERSION];
        CHECK(idist_send(push, MESSAGE, IDIST_F64, 0, PUSH, NULL));
    }
}

static int worker(int local_rank, void *arg) {
    static const double split[2] = {0.7, 0.3};
    static digits d;
    static subset train, test, mine;
    double equal[MAX_RANKS];
    int rank = idist_get_rank(), size = idist_get_world_size(), updates = *(const int *)arg;
    (void)local_rank;
    if (size < 2 || size > MAX_RANKS)
        return fprintf(stderr, "%d ranks: it takes 2 to %d\n", size, MAX_RANKS), 1;
    if (!digits_load(&d) || take_part(split, 2, 0, NULL, &train) ||
        take_part(split, 2, 1, NULL, &test))
        return 1;
    if (rank == 0) return run_server(&d, &train, &test, size, updates);
    for (int r = 1; r < size; r++) equal[r - 1] = 1.0 / (size - 1);
    return take_part(equal, size - 1, rank - 1, &train, &mine) || run_worker(&d, &mine);
}

// Argument i, or `none_given`; 0 when it is no number from min to max.
static int number(int argc, char **argv, int i, int none_given, int min, int max) {
    if (i >= argc) return none_given;
    size_t n = strspn(argv[i], "0123456789");
    int value = n >= 1 && n <= 9 && !argv[i][n] ? atoi(argv[i]) : 0;
    return value >= min && value <= max ? value : 0;
}

int main(int argc, char **argv) {
    idist_desc desc;
    int ranks = number(argc, argv, 1, RANKS, 2, MAX_RANKS),
        updates = number(argc, argv, 2, UPDATES, 4, MAX_UPDATES);
    if (!ranks || !updates || argc > 3)
        return fprintf(stderr, "usage: %s [number of ranks, 2 to %d [updates, 4 to %d]]\n", argv[0],
                       MAX_RANKS, MAX_UPDATES),
               2;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = desc.init_timeout_ms = DEADLINE_MS;
    if (strcmp(idist_launcher(), "none") == 0)
        desc.nproc_per_node = ranks; // otherwise the launcher says how many
    CHECK(idist_parallel_run(&desc, worker, &updates));
    return 0;
}
