// 22_pipeline.c - pipeline parallelism: layers on different ranks, a batch in micro-batches
//
// build:  cc -O2 -DIDIST_IMPLEMENTATION examples/22_pipeline.c -o 22_pipeline
// run:    ./22_pipeline           starts 3 ranks itself
//         ./22_pipeline 4         starts 4; any number from 1 to the 4 layers
//         or by hand, with any free MASTER_PORT:
//         (export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29522
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
// A batch of 64 images is cut into 8 micro-batches. F2 is the forward pass of micro-batch 2
// through the layers of one rank, B2 the backward pass. Activations travel to the next rank, their
// gradients to the previous one. If all forward passes came before all backward passes, a rank
// would have to keep the activations of the whole batch. In the schedule called 1F1B it begins the
// backward pass of a micro-batch as soon as it can, and keeps those of n - rank micro-batches at
// most:
//
//     rank 0   F0 F1 F2 .. .. B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 .. B6 .. B7
//     rank 1   .. F0 F1 .. B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 .. B7 ..
//     rank 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 .. ..
//              warm-up        steady: one forward, one backward     cool-down
//
// The dots are idle: 2 (n-1) of 2 (8 + n-1) steps; more micro-batches waste less. Every rank adds
// up the gradients of its layers in the order of the micro-batches, whatever n is: the weights are
// those of training on 1 rank, bit for bit. Rank 0 collects them, does that training as well, and
// compares. Exit code: 0 when they are the same and the accuracy is 90 % or more, else 1; 2 for a
// bad argument.
#include "../idist.h"

#include "lib/arguments.h"
#include "lib/dense.h"

enum {
    LAYERS = 4,
    WIDEST = 64,
    RANKS = 3,
    BATCH = 64,
    MICROS = 8,
    MICRO = BATCH / MICROS,
    EPOCHS = 6
};
enum {
    TRAIN = 22 * BATCH,
    TEST = 6 * BATCH,
    DEADLINE_MS = 60000,
    TEXT = 3 * 2 * MICROS + 1
};                                       // TEXT: " F0 F1 ... B7"
enum { FORWARD = 0, BACKWARD = MICROS }; // tags, of micro-batch 0

static const int width[LAYERS + 1] = {DIGITS_PIXELS, 48, 40, 32, DIGITS_CLASSES};

#define CHECK(call)                                                        \
    do {                                                                   \
        if ((call) != IDIST_OK) {                                          \
            fprintf(stderr, "%s failed: %s\n", #call, idist_last_error()); \
            return 1;                                                      \
        }                                                                  \
    } while (0)

// What a micro-batch leaves on a rank between its forward and its backward pass.
typedef struct slot {
    double out[LAYERS + 1][MICRO * WIDEST]; // out[k]: what layer k - 1 made, the input of layer k
    double back[MICRO *
                WIDEST]; // the gradient of the rank's own input, on its way to the previous rank
    idist_request forward, backward; // the sends of the two
} slot;

typedef struct stage {
    int first, last;       // layers first .. last - 1
    double *w, *g, *speed; // of these layers only
    slot *slots;           // micro-batch m is in slots[m % n_slots]
    int n_slots;           //
    double loss;           // of the epoch so far, on the rank of the last layer
} stage;

// Rank r of n has the layers begin(r, n) .. begin(r + 1, n) - 1.
static int begin(int r, int n) { return LAYERS * r / n; }

// Where the parameters of a layer begin, counted from those of layer `from`.
static int offset(int from, int layer) {
    int n = 0;
    for (; from < layer; from++) n += dense_params(width[from], width[from + 1]);
    return n;
}

static bool create(stage *s, int first, int last, int n_slots) {
    static double all[LAYERS * (WIDEST + 1) *
                      WIDEST]; // drawn by every rank, so that none depends on the cuts
    size_t count = (size_t)offset(first, last);
    uint64_t seed = 1;
    for (int k = 0; k < LAYERS; k++)
        dense_initialise(all + offset(0, k), width[k], width[k + 1], &seed);
    *s = (stage){.first = first, .last = last, .n_slots = n_slots};
    s->w = (double *)calloc(3 * count, sizeof *s->w);
    s->slots = (slot *)calloc((size_t)n_slots, sizeof *s->slots);
    if (!s->w || !s->slots) return fprintf(stderr, "out of memory\n"), false;
    memcpy(s->w, all + offset(0, first), count * sizeof *s->w);
    s->g = s->w + count;
    s->speed = s->g + count;
    return true;
}

static void destroy(stage *s) {
    free(s->w);
    free(s->slots);
}

// ---- the computation: knows nothing of other ranks ----

// The n-th image in an order that has nothing to do with that of the file: 1001 and the number of
// images have no divisor in common. The first TRAIN of them are for training.
static int nth(int n) { return n * 1001 % DIGITS_COUNT; }

static void load(slot *at, const digits *d, int first) {
    for (int i = 0; i < MICRO; i++)
        memcpy(at->out[0] + i * width[0], d->pixels[nth(first + i)], sizeof d->pixels[0]);
}

static void forward(const stage *s, slot *at) {
    for (int k = s->first; k < s->last; k++)
        for (int i = 0; i < MICRO; i++)
            dense_forward(s->w + offset(s->first, k), at->out[k] + i * width[k], width[k],
                          at->out[k + 1] + i * width[k + 1], width[k + 1], k + 1 < LAYERS);
}

// grad: of what the last layer here made; overwritten.
static void backward(const stage *s, slot *at, double *grad) {
    for (int k = s->last; k-- > s->first;) {
        int at_w = offset(s->first, k);
        for (int i = 0; i < MICRO; i++)
            dense_backward(s->w + at_w, s->g + at_w, at->out[k] + i * width[k], width[k],
                           at->back + i * width[k], at->out[k + 1] + i * width[k + 1],
                           grad + i * width[k + 1], width[k + 1], k + 1 < LAYERS);
        if (k > s->first) memcpy(grad, at->back, sizeof at->back);
    }
}

// For the rank of the last layer: adds up the loss, and makes its gradient.
static void loss_gradient(stage *s, const digits *d, int first, const slot *at, double *grad) {
    for (int i = 0; i < MICRO; i++) {
        const double *logit = at->out[LAYERS] + i * DIGITS_CLASSES;
        s->loss += digits_loss(logit, d->label[nth(first + i)], grad + i * DIGITS_CLASSES) / TRAIN;
    }
}

static void update(stage *s) {
    for (int i = 0, n = offset(s->first, s->last); i < n; i++) {
        s->speed[i] = 0.9 * s->speed[i] + s->g[i] / BATCH;
        s->w[i] -= 0.05 * s->speed[i];
        s->g[i] = 0;
    }
}

// ---- the pipeline ----

// The sends are immediate: neighbours send to each other at the same time, and if each waited for
// the other to receive, both would wait for ever. Before a slot is used again, what went out of it
// has left.
static int forward_micro(stage *s, const digits *d, int image, int m) {
    slot *at = &s->slots[m % s->n_slots];
    idist_opts opts = {.request = &at->forward};
    CHECK(idist_wait(&at->forward));
    if (s->first == 0) load(at, d, image);
    else
        CHECK(idist_recv(at->out[s->first], (size_t)(MICRO * width[s->first]), IDIST_F64,
                         idist_get_rank() - 1, FORWARD + m, NULL, NULL));
    forward(s, at);
    if (s->last < LAYERS)
        CHECK(idist_send(at->out[s->last], (size_t)(MICRO * width[s->last]), IDIST_F64,
                         idist_get_rank() + 1, FORWARD + m, &opts));
    return 0;
}

static int backward_micro(stage *s, const digits *d, int image, int m) {
    slot *at = &s->slots[m % s->n_slots];
    double grad[MICRO * WIDEST];
    idist_opts opts = {.request = &at->backward};
    CHECK(idist_wait(&at->backward));
    if (s->last == LAYERS) loss_gradient(s, d, image, at, grad);
    else
        CHECK(idist_recv(grad, (size_t)(MICRO * width[s->last]), IDIST_F64, idist_get_rank() + 1,
                         BACKWARD + m, NULL, NULL));
    backward(s, at, grad);
    if (s->first > 0)
        CHECK(idist_send(at->back, (size_t)(MICRO * width[s->first]), IDIST_F64,
                         idist_get_rank() - 1, BACKWARD + m, &opts));
    return 0;
}

// One batch, from image `first` on. 1F1B is this: forward as long as a slot is free, and there are
// n - rank of them; else backward, which frees one. `text` tells what was done in which order.
static int train_batch(stage *s, const digits *d, int first, char *text) {
    int forwards = 0, backwards = 0, at = 0;
    while (backwards < MICROS) {
        bool ahead = forwards < MICROS && forwards - backwards < s->n_slots;
        int m = ahead ? forwards++ : backwards++;
        if (ahead ? forward_micro(s, d, first + m * MICRO, m)
                  : backward_micro(s, d, first + m * MICRO, m))
            return 1;
        at += snprintf(text + at, (size_t)(TEXT - at), " %c%d", ahead ? 'F' : 'B', m);
    }
    for (int i = 0; i < s->n_slots; i++) {
        CHECK(idist_wait(&s->slots[i].forward));
        CHECK(idist_wait(&s->slots[i].backward));
    }
    update(s);
    return 0;
}

static int train(stage *s, const digits *d, int rank, int n) {
    char mine[TEXT], all[LAYERS][TEXT];
    for (int epoch = 1; epoch <= EPOCHS; epoch++) {
        s->loss = 0;
        for (int first = 0; first < TRAIN; first += BATCH)
            if (train_batch(s, d, first, mine)) return 1;
        if (epoch == 1) {
            CHECK(idist_gather(mine, all, TEXT, IDIST_I8, 0, NULL));
            for (int r = 0; rank == 0 && r < n; r++)
                printf("rank %d, layers %d to %d:%s\n", r, begin(r, n), begin(r + 1, n) - 1,
                       all[r]);
        }
        CHECK(idist_broadcast(&s->loss, 1, IDIST_F64, n - 1, NULL)); // the last rank has it
        if (rank == 0) printf("epoch %d: loss %.4f\n", epoch, s->loss);
        fflush(stdout);
    }
    return 0;
}

// ---- the check ----

// The same training on one rank, without a word to the others; then the number of test images that
// are right.
static int train_alone(stage *s, const digits *d) {
    double grad[MICRO * WIDEST];
    slot *at = s->slots;
    int right = 0;
    for (int n = 0; n < EPOCHS * TRAIN; n += MICRO) {
        load(at, d, n % TRAIN);
        forward(s, at);
        loss_gradient(s, d, n % TRAIN, at, grad);
        backward(s, at, grad);
        if ((n + MICRO) % BATCH == 0) update(s);
    }
    for (int n = TRAIN; n < TRAIN + TEST; n += MICRO) {
        load(at, d, n);
        forward(s, at);
        for (int i = 0; i < MICRO; i++)
            right += digits_best(at->out[LAYERS] + i * DIGITS_CLASSES) == d->label[nth(n + i)];
    }
    return right;
}

// All weights come to rank 0.
static int compare(const stage *s, const digits *d, int rank, int n) {
    static double all[LAYERS * (WIDEST + 1) * WIDEST];
    size_t counts[LAYERS];
    stage alone;
    for (int r = 0; r < n; r++) counts[r] = (size_t)offset(begin(r, n), begin(r + 1, n));
    CHECK(idist_gatherv(s->w, counts[rank], all, counts, NULL, IDIST_F64, 0, NULL));
    if (rank != 0) return 0;
    int right = create(&alone, 0, LAYERS, 1) ? train_alone(&alone, d) : 0;
    bool same = right && memcmp(all, alone.w, (size_t)offset(0, LAYERS) * sizeof *all) == 0;
    printf("weights: %s bits as those of training on 1 rank\n", same ? "the same" : "NOT the same");
    printf("accuracy: %d of %d test images\n", right, TEST);
    destroy(&alone);
    return same && 100 * right >= 90 * TEST ? 0 : 1;
}

static int worker(int local_rank, void *arg) {
    static digits d;
    stage s;
    int rank = idist_get_rank(), n = idist_get_world_size(), failed;
    (void)local_rank;
    (void)arg;
    if (n > LAYERS)
        return fprintf(stderr, "%d ranks are too many: there are %d layers\n", n, LAYERS), 1;
    if (!digits_load(&d)) return 1;
    failed = !create(&s, begin(rank, n), begin(rank + 1, n), n - rank) || train(&s, &d, rank, n) ||
             compare(&s, &d, rank, n);
    destroy(&s);
    return failed;
}

int main(int argc, char **argv) {
    idist_desc desc;
    int ranks = ranks_argument(argc, argv, RANKS, 1, LAYERS);
    if (!ranks) return 2;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = desc.init_timeout_ms = DEADLINE_MS;
    if (argc > 1 || strcmp(idist_launcher(), "none") == 0) desc.nproc_per_node = ranks;
    CHECK(idist_parallel_run(&desc, worker, NULL));
    return 0;
}
