// 21_average_gradients.c - synchronous SGD by hand, after PyTorch's tutorial
//
// build:  cc -O2 -DIDIST_IMPLEMENTATION examples/21_average_gradients.c -o 21_average_gradients
// run:    ./21_average_gradients          starts 2 ranks itself
//         ./21_average_gradients 4        starts 4; any number from 1 to 64
//         or by hand, with any free MASTER_PORT:
//         (export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29521
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
// Every rank has a part of the training images, and the weights that rank 0 drew. It computes the
// gradient of a batch of its own part; average_gradients makes the mean of these gradients of all
// ranks; and every rank makes the same step:
//
//     images   | train 0.7 ................ | validation 0.2 | test 0.1 |     idist_partition
//     train    | rank 0: 1/n | rank 1: 1/n | ...                              idist_partition again
//
// The parts are equally long, because fractions are rounded down: so every rank has the same
// number of batches, and makes the same number of calls. A batch is 128 / n images per rank, so
// that a step is that of 128 images or a few less.
//
// idist_ddp (idist_train.h) does the same with the averaging hidden behind the backward pass. Exit
// code: 0 when all ranks end with the same weights and the accuracy is 90 % or more, else 1; 2 for
// a bad argument.
#include "../idist_train.h"

#include "lib/arguments.h"
#include "lib/dense.h"

enum { RANKS = 2, MAX_RANKS = 64, BATCH = 128, EPOCHS = 10, SEED = 1234, DEADLINE_MS = 60000 };

#define CHECK(call)                                                        \
    do {                                                                   \
        if ((call) != IDIST_OK) {                                          \
            fprintf(stderr, "%s failed: %s\n", #call, idist_last_error()); \
            return 1;                                                      \
        }                                                                  \
    } while (0)

typedef struct subset { // numbers of images
    size_t count, image[DIGITS_COUNT];
} subset;

typedef struct trainer {
    digits data;
    subset train, validation, test, mine; // mine: this rank's part of train
    idist_sampler *sampler;               // shuffles mine
    double w[DIGITS_PARAMS], g[DIGITS_PARAMS], speed[DIGITS_PARAMS];
    double best[DIGITS_PARAMS], best_accuracy; // the weights that did best in the validation
} trainer;

// The tutorial's DataPartitioner: part `which` of the images in `whole`.
static int partition(const subset *whole, const double *fractions, int n, int which, subset *part) {
    CHECK(idist_partition(whole->count, fractions, n, which, SEED, part->image, &part->count));
    for (size_t i = 0; i < part->count; i++) part->image[i] = whole->image[part->image[i]];
    return 0;
}

static int partition_dataset(trainer *t, int rank, int size) {
    static const double split[3] = {0.7, 0.2, 0.1};
    static subset all;
    double equal[MAX_RANKS];
    idist_sampler_desc desc;
    all.count = DIGITS_COUNT;
    for (size_t i = 0; i < all.count; i++) all.image[i] = i;
    for (int r = 0; r < size; r++) equal[r] = 1.0 / size;
    if (partition(&all, split, 3, 0, &t->train) || partition(&all, split, 3, 1, &t->validation))
        return 1;
    if (partition(&all, split, 3, 2, &t->test) || partition(&t->train, equal, size, rank, &t->mine))
        return 1;
    memset(&desc, 0, sizeof desc);
    desc.length = t->mine.count;
    desc.num_replicas = 1; // all of them are this rank's
    desc.seed = SEED;
    CHECK(idist_sampler_create(&desc, &t->sampler));
    if (rank == 0)
        printf("%zu images to train, %zu to validate, %zu to test; each of %d ranks has %zu, in "
               "batches of %d\n",
               t->train.count, t->validation.count, t->test.count, size, t->mine.count,
               BATCH / size);
    return 0;
}

// One call per layer, as the tutorial has one per parameter.
static int average_gradients(double *g, int size) {
    static const struct {
        int at, count;
    } layers[] = {{0, DIGITS_LAYER1}, {DIGITS_LAYER1, DIGITS_LAYER2}};
    for (int k = 0; k < 2; k++) {
        double *grad = g + layers[k].at;
        CHECK(idist_all_reduce(grad, grad, (size_t)layers[k].count, IDIST_F64, IDIST_SUM, NULL));
        for (int i = 0; i < layers[k].count; i++) grad[i] /= size;
    }
    return 0;
}

// *mean_loss is that of the batches of this rank.
static int train_epoch(trainer *t, int epoch, int size, double *mean_loss) {
    size_t batch = (size_t)(BATCH / size), batches = 0;
    *mean_loss = 0;
    CHECK(idist_sampler_set_epoch(t->sampler, (uint64_t)epoch));
    for (size_t first = 0; first < t->mine.count; first += batch, batches++) {
        size_t count = t->mine.count - first < batch ? t->mine.count - first : batch, position = 0;
        double loss = 0;
        memset(t->g, 0, sizeof t->g);
        for (size_t i = 0; i < count && idist_sampler_next(t->sampler, &position); i++)
            loss += digits_gradient(t->w, &t->data, t->mine.image[position], t->g);
        for (int i = 0; i < DIGITS_PARAMS; i++) t->g[i] /= (double)count;
        *mean_loss += loss / (double)count;
        if (average_gradients(t->g, size)) return 1;
        for (int i = 0; i < DIGITS_PARAMS; i++) {
            t->speed[i] = 0.9 * t->speed[i] + t->g[i];
            t->w[i] -= 0.1 * t->speed[i];
        }
    }
    *mean_loss /= (double)batches;
    return 0;
}

// Each rank looks at every size-th image. *accuracy: per cent, over all of them.
static int evaluate(const trainer *t, const double *w, const subset *images, int rank, int size,
                    double *accuracy) {
    int64_t right = 0;
    for (size_t i = (size_t)rank; i < images->count; i += (size_t)size)
        right += digits_is_right(w, &t->data, images->image[i]);
    CHECK(idist_all_reduce(&right, &right, 1, IDIST_I64, IDIST_SUM, NULL));
    *accuracy = 100.0 * (double)right / (double)images->count;
    return 0;
}

static int train(trainer *t, int rank, int size) {
    for (int epoch = 0; epoch < EPOCHS; epoch++) {
        double loss, losses[MAX_RANKS], accuracy;
        if (train_epoch(t, epoch, size, &loss) ||
            evaluate(t, t->w, &t->validation, rank, size, &accuracy))
            return 1;
        CHECK(idist_gather(&loss, losses, 1, IDIST_F64, 0, NULL));
        if (accuracy > t->best_accuracy) {
            t->best_accuracy = accuracy;
            memcpy(t->best, t->w, sizeof t->best);
        }
        if (rank != 0) continue;
        printf("epoch %d: loss of each rank", epoch);
        for (int r = 0; r < size; r++) printf(" %.4f", losses[r]);
        printf(", validation %.2f %%\n", accuracy);
        fflush(stdout);
    }
    return 0;
}

static int worker(int local_rank, void *arg) {
    static trainer t;
    static double weights[DIGITS_PARAMS];
    int rank = idist_get_rank(), size = idist_get_world_size();
    int32_t same;
    double accuracy;
    (void)local_rank;
    (void)arg;
    if (size > MAX_RANKS) return fprintf(stderr, "%d ranks are more than %d\n", size, MAX_RANKS), 1;
    if (!digits_load(&t.data) || partition_dataset(&t, rank, size)) return 1;
    if (rank == 0) digits_initialise(t.w, SEED);
    CHECK(idist_broadcast(t.w, DIGITS_PARAMS, IDIST_F64, 0, NULL));
    int failed = train(&t, rank, size) || evaluate(&t, t.best, &t.test, rank, size, &accuracy);
    idist_sampler_free(&t.sampler);
    if (failed) return 1;
    memcpy(weights, t.w, sizeof weights);
    CHECK(idist_broadcast(weights, DIGITS_PARAMS, IDIST_F64, 0, NULL));
    same = memcmp(weights, t.w, sizeof weights) == 0;
    CHECK(idist_all_reduce(&same, &same, 1, IDIST_I32, IDIST_MIN, NULL));
    if (rank == 0) {
        printf("test accuracy %.2f %%, with the weights of the best validation\n", accuracy);
        printf("%s on every rank\n", same ? "the same weights" : "NOT the same weights");
    }
    return same && accuracy >= 90 ? 0 : 1;
}

int main(int argc, char **argv) {
    idist_desc desc;
    int ranks = ranks_argument(argc, argv, RANKS, 1, MAX_RANKS);
    if (!ranks) return 2;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = desc.init_timeout_ms = DEADLINE_MS;
    if (argc > 1 || strcmp(idist_launcher(), "none") == 0) desc.nproc_per_node = ranks;
    CHECK(idist_parallel_run(&desc, worker, NULL));
    return 0;
}
