// 22_pipeline.c - pipeline parallelism: layers on several ranks, batches in micro-batches
//
// build:  cc -O2 -DIDIST_IMPLEMENTATION examples/22_pipeline.c -o 22_pipeline
// run:    ./22_pipeline           starts 3 ranks; 22_pipeline 4 starts 4, one for each layer
//         (export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29522    # by hand; any free port
//          for r in 0 1; do RANK=$r LOCAL_RANK=$r ./22_pipeline & done; wait)
//
// expected output:
//    rank 0, layers 0 to 0: F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7
//    rank 1, layers 1 to 1: F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
//    rank 2, layers 2 to 3: F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
//    epoch 1: loss 1.8135
//    epoch 2: loss 0.6305
//    epoch 3: loss 0.3556
//    epoch 4: loss 0.1731
//    epoch 5: loss 0.0977
//    epoch 6: loss 0.0729
//    weights: the same bits as those of training on 1 rank
//    accuracy: 366 of 384 test images
//
// A batch of 64 images is split into 8 micro-batches. F2 is the forward pass of micro-batch 2
// through the layers of one rank, B2 its backward pass. Each rank sends activations to the next
// rank, and their gradients back to the previous rank. In the 1F1B schedule a rank starts each
// backward pass as soon as it can. It therefore keeps the activations of at most n - rank
// micro-batches, not of the whole batch:
//
//     rank 0   F0 F1 F2 .. .. B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 .. B6 .. B7
//     rank 1   .. F0 F1 .. B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 .. B7 ..
//     rank 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 .. ..
//              warm-up        steady: one forward, one backward     cool-down
//
// Dots are idle steps, which are 2 (n-1) of all 2 (8 + n-1) steps. With more micro-batches, a
// smaller share of the steps is idle. Each rank adds the gradients of its layers in the order of
// the micro-batches, for any n. The weights therefore have the same bits as after training on 1
// rank. Rank 0 gathers the weights, trains alone as well, and compares the results.
//
// Exits with 0 if the weights are the same and the accuracy is 90 % or more. Exits with 2 for a bad
// argument, otherwise with 1.
#include "../idist.h"
#include "lib/arguments.h"
#include "lib/check.h"
#include "lib/stage.h"

enum { RANKS = 3, DEADLINE_MS = 60000, TEXT = 3 * 2 * MICROS + 1 }; // TEXT: size of " F0 F1 ... B7"
enum { FORWARD = 0, BACKWARD = MICROS };                            // tags of micro-batch 0

// State of one rank. Micro-batch m uses slots[m % n_slots]. Sends are immediate, because two
// neighbors that sent to each other with blocking calls would deadlock. A slot is free when its
// sends are complete.
typedef struct pipeline {
    int rank, n, n_slots;
    digits data;
    stage s;
    micro slots[LAYERS];
    idist_request forward[LAYERS], backward[LAYERS]; // of the sends
} pipeline;

static int forward_micro(pipeline *p, int image, int m) {
    micro *at = &p->slots[m % p->n_slots];
    double *in = at->out[p->s.first], *out = at->out[p->s.last];
    idist_opts opts = {.request = &p->forward[m % p->n_slots]};

    CHECK(idist_wait(opts.request));
    if (p->rank == 0) stage_load(at, &p->data, image);
    else CHECK(idist_recv(in, p->s.inputs, IDIST_F64, p->rank - 1, FORWARD + m, NULL, NULL));
    stage_forward(&p->s, at);
    if (p->rank == p->n - 1) return 0;
    CHECK(idist_send(out, p->s.outputs, IDIST_F64, p->rank + 1, FORWARD + m, &opts));
    return 0;
}

static int backward_micro(pipeline *p, int image, int m) {
    micro *at = &p->slots[m % p->n_slots];
    idist_opts opts = {.request = &p->backward[m % p->n_slots]};
    double grad[MICRO * WIDEST];

    CHECK(idist_wait(opts.request));
    if (p->rank == p->n - 1) stage_loss(&p->s, &p->data, image, at, grad);
    else CHECK(idist_recv(grad, p->s.outputs, IDIST_F64, p->rank + 1, BACKWARD + m, NULL, NULL));
    stage_backward(&p->s, at, grad);
    if (p->rank == 0) return 0;
    CHECK(idist_send(at->back, p->s.inputs, IDIST_F64, p->rank - 1, BACKWARD + m, &opts));
    return 0;
}

// Trains one batch by the 1F1B schedule: runs a forward pass if a slot is free, and otherwise a
// backward pass, which frees a slot. Writes the schedule to `text`.
static int train_batch(pipeline *p, int first, char *text) {
    int forwards = 0, backwards = 0;

    while (backwards < MICROS) {
        bool ahead = forwards < MICROS && forwards - backwards < p->n_slots;
        int m = ahead ? forwards++ : backwards++, image = first + m * MICRO;

        if (ahead ? forward_micro(p, image, m) : backward_micro(p, image, m)) return 1;
        text += sprintf(text, " %c%d", ahead ? 'F' : 'B', m);
    }
    CHECK(idist_wait_all(p->forward, LAYERS));
    CHECK(idist_wait_all(p->backward, LAYERS));
    stage_step(&p->s);
    return 0;
}

static int train(pipeline *p) {
    char mine[TEXT], all[LAYERS][TEXT];

    for (int epoch = 1; epoch <= EPOCHS; epoch++) {
        p->s.loss = 0;
        for (int first = 0; first < TRAIN; first += BATCH)
            if (train_batch(p, first, mine)) return 1;
        if (epoch == 1) CHECK(idist_gather(mine, all, TEXT, IDIST_I8, 0, NULL));
        for (int r = 0; epoch == 1 && p->rank == 0 && r < p->n; r++)
            printf("rank %d, layers %d to %d:%s\n", r, stage_begin(r, p->n),
                   stage_begin(r + 1, p->n) - 1, all[r]);
        CHECK(idist_broadcast(&p->s.loss, 1, IDIST_F64, p->n - 1, NULL)); // from the last rank
        if (p->rank == 0) printf("epoch %d: loss %.4f\n", epoch, p->s.loss);
        fflush(stdout);
    }
    return 0;
}

// Gathers the weights of all ranks on rank 0, which compares them with the weights of the same
// training on one rank.
static int compare(const pipeline *p) {
    static double all[LAYERS * (WIDEST + 1) * WIDEST];
    size_t counts[LAYERS];

    for (int r = 0; r < p->n; r++) counts[r] = stage_size(r, p->n);
    CHECK(idist_gatherv(p->s.w, counts[p->rank], all, counts, NULL, IDIST_F64, 0, NULL));
    return p->rank == 0 ? stage_compare(all, &p->data) : 0;
}

static int worker(int local_rank, void *arg) {
    static pipeline p;

    (void)local_rank;
    (void)arg;
    p.rank = idist_get_rank();
    p.n = idist_get_world_size();
    p.n_slots = p.n - p.rank;
    if (p.n > LAYERS)
        return fprintf(stderr, "%d ranks are too many: there are %d layers\n", p.n, LAYERS), 1;
    if (!digits_load(&p.data) || !stage_create(&p.s, p.rank, p.n)) return 1;
    return train(&p) || compare(&p);
}

int main(int argc, char **argv) {
    int ranks = ranks_argument(argc, argv, RANKS, 1, LAYERS);
    idist_desc desc = {0};

    if (!ranks || ranks_contradict(argc > 1, idist_launcher())) return 2;
    desc.timeout_ms = desc.init_timeout_ms = DEADLINE_MS;
    if (strcmp(idist_launcher(), "none") == 0) desc.nproc_per_node = ranks;
    CHECK(idist_parallel_run(&desc, worker, NULL));
    return 0;
}
