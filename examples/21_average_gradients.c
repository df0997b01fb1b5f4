// 21_average_gradients.c - synchronous SGD by hand, after PyTorch's tutorial
//
// build:  cc -O2 -DIDIST_IMPLEMENTATION examples/21_average_gradients.c -o 21_average_gradients
// run:    ./21_average_gradients          starts 2 ranks; 21_average_gradients 4 starts 4, up to 64
//         (export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29521    # by hand; any free port
//          for r in 0 1; do RANK=$r LOCAL_RANK=$r ./21_average_gradients & done; wait)
//
// expected output:
//    1257 images to train, 359 to validate, 179 to test; each of 2 ranks has 628, in batches of 64
//    epoch 0: loss of each rank 2.0866 2.1070, validation 53.48 %
//    epoch 1: loss of each rank 1.1136 1.1247, validation 86.91 %
//    epoch 2: loss of each rank 0.4642 0.4790, validation 88.58 %
//    epoch 3: loss of each rank 0.2675 0.3011, validation 88.58 %
//    epoch 4: loss of each rank 0.1946 0.2027, validation 92.20 %
//    epoch 5: loss of each rank 0.1537 0.1615, validation 93.31 %
//    epoch 6: loss of each rank 0.1304 0.1331, validation 94.43 %
//    epoch 7: loss of each rank 0.1224 0.1234, validation 94.43 %
//    epoch 8: loss of each rank 0.1014 0.1053, validation 94.43 %
//    epoch 9: loss of each rank 0.0949 0.0990, validation 95.26 %
//    test accuracy 94.97 %, with the weights of the best validation
//    the same weights on every rank
//
// Every rank has its own part of the training images. It computes the gradient of a batch of its
// part, average_gradients makes the mean over the ranks, and all ranks make the same step:
//
//     images   | train 0.7 ................ | validation 0.2 | test 0.1 |     idist_partition
//     train    | rank 0: 1/n | rank 1: 1/n | ...                              idist_partition again
//
// Fractions are rounded down, so all ranks have the same number of batches, of 128 / n images, and
// make the same calls. idist_ddp (idist_train.h) hides the averaging behind the backward pass. Exit
// code: 0 if the weights agree and the accuracy is 90 % or more, else 1; 2 for a bad argument.
#include "../idist_train.h"
#include "lib/arguments.h"
#include "lib/subset.h"

enum { RANKS = 2, MAX_RANKS = 64, BATCH = 128, EPOCHS = 10, DEADLINE_MS = 60000 };

typedef struct trainer {
    int rank, size;
    digits data;
    subset train, validation, test, mine, shuffled; // mine: this rank's part of train
    idist_sampler *sampler;                         // shuffles mine
    double w[DIGITS_PARAMS], g[DIGITS_PARAMS], speed[DIGITS_PARAMS];
    double best[DIGITS_PARAMS], best_accuracy; // the weights with the best validation
    double loss;                               // mean over the batches of this rank
} trainer;

static int partition_dataset(trainer *t) {
    static const double split[3] = {0.7, 0.2, 0.1};

    if (subset_part(NULL, split, 3, 0, &t->train)) return 1;
    if (subset_part(NULL, split, 3, 1, &t->validation)) return 1;
    if (subset_part(NULL, split, 3, 2, &t->test)) return 1;
    if (subset_equal_part(&t->train, t->size, t->rank, &t->mine)) return 1;
    if (t->rank == 0)
        printf("%zu images to train, %zu to validate, %zu to test; each of %d ranks has %zu, in "
               "batches of %d\n",
               t->train.count, t->validation.count, t->test.count, t->size, t->mine.count,
               BATCH / t->size);
    return subset_sampler(&t->mine, &t->sampler);
}

static int average_gradients(double *g, size_t count, int size) {
    CHECK(idist_all_reduce(g, g, count, IDIST_F64, IDIST_SUM, NULL));
    for (size_t i = 0; i < count; i++) g[i] /= size;
    return 0;
}

static int train_epoch(trainer *t, int epoch) {
    size_t batch = (size_t)(BATCH / t->size), batches = 0;

    t->loss = 0;
    if (subset_shuffle(&t->mine, t->sampler, epoch, &t->shuffled)) return 1;
    for (size_t first = 0; first < t->mine.count; first += batch, batches++) {
        size_t count = t->mine.count - first < batch ? t->mine.count - first : batch;

        t->loss += subset_gradient(t->w, &t->data, &t->shuffled, first, count, t->g);
        if (average_gradients(t->g, DIGITS_LAYER1, t->size)) return 1;
        if (average_gradients(t->g + DIGITS_LAYER1, DIGITS_LAYER2, t->size)) return 1;
        sgd_step(t->w, t->speed, t->g, DIGITS_PARAMS, 0.1);
    }
    t->loss /= (double)batches;
    return 0;
}

// *accuracy: in per cent. Each rank classifies every n-th image.
static int evaluate(const trainer *t, const double *w, const subset *images, double *accuracy) {
    int64_t right = subset_count_right(w, &t->data, images, t->rank, t->size);

    CHECK(idist_all_reduce(&right, &right, 1, IDIST_I64, IDIST_SUM, NULL));
    *accuracy = 100.0 * (double)right / (double)images->count;
    return 0;
}

static int train(trainer *t) {
    double losses[MAX_RANKS], accuracy;

    for (int epoch = 0; epoch < EPOCHS; epoch++) {
        if (train_epoch(t, epoch) || evaluate(t, t->w, &t->validation, &accuracy)) return 1;
        CHECK(idist_gather(&t->loss, losses, 1, IDIST_F64, 0, NULL));
        if (accuracy > t->best_accuracy) memcpy(t->best, t->w, sizeof t->best);
        if (accuracy > t->best_accuracy) t->best_accuracy = accuracy;
        if (t->rank != 0) continue;
        printf("epoch %d: loss of each rank", epoch);
        for (int r = 0; r < t->size; r++) printf(" %.4f", losses[r]);
        printf(", validation %.2f %%\n", accuracy);
        fflush(stdout);
    }
    return 0;
}

static int finish(trainer *t) {
    uint64_t hash = fnv1a(FNV_START, t->w, sizeof t->w), lowest, highest;
    double accuracy;

    idist_sampler_free(&t->sampler);
    if (evaluate(t, t->best, &t->test, &accuracy)) return 1;
    CHECK(idist_all_reduce(&hash, &lowest, 1, IDIST_U64, IDIST_MIN, NULL));
    CHECK(idist_all_reduce(&hash, &highest, 1, IDIST_U64, IDIST_MAX, NULL));
    if (t->rank == 0)
        printf("test accuracy %.2f %%, with the weights of the best validation\n"
               "%sthe same weights on every rank\n",
               accuracy, lowest == highest ? "" : "NOT ");
    return lowest == highest && accuracy >= 90 ? 0 : 1;
}

static int worker(int local_rank, void *arg) {
    static trainer t;

    (void)local_rank;
    (void)arg;
    t.rank = idist_get_rank();
    t.size = idist_get_world_size();
    if (t.size > MAX_RANKS) return fprintf(stderr, "at most %d ranks\n", MAX_RANKS), 1;
    if (!digits_load(&t.data) || partition_dataset(&t)) return 1;
    if (t.rank == 0) digits_initialise(t.w, SUBSET_SEED);
    CHECK(idist_broadcast(t.w, DIGITS_PARAMS, IDIST_F64, 0, NULL));
    return train(&t) || finish(&t);
}

int main(int argc, char **argv) {
    int ranks = ranks_argument(argc, argv, RANKS, 1, MAX_RANKS);
    idist_desc desc = {0};

    if (!ranks || ranks_contradict(argc > 1, idist_launcher())) return 2;
    desc.timeout_ms = desc.init_timeout_ms = DEADLINE_MS;
    if (strcmp(idist_launcher(), "none") == 0) desc.nproc_per_node = ranks;
    CHECK(idist_parallel_run(&desc, worker, NULL));
    return 0;
}
