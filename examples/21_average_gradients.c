// 21_average_gradients.c - synchronous SGD by hand, after PyTorch's tutorial
//
// build:  cc -O2 -DIDIST_IMPLEMENTATION examples/21_average_gradients.c -o 21_average_gradients
// run:    ./21_average_gradients          starts 2 ranks; 21_average_gradients 4 starts 4, up to 64
//
// expected output:
//    1437 images to train; each of 2 ranks has 718, in batches of 64
//    epoch 0: loss 2.1641
//    epoch 1: loss 1.0061
//    epoch 2: loss 0.4613
//    epoch 3: loss 0.2971
//    epoch 4: loss 0.2141
//    test accuracy 91.64 %
//
// Each rank computes the gradient of a batch of its own images. Then average_gradients computes the
// mean over the ranks, so all ranks make the same step and keep the same weights. The idist_ddp of
// idist_train.h does the same during the backward pass.
#include "../idist_train.h"
#include "lib/arguments.h"
#include "lib/subset.h"

enum { RANKS = 2, MAX_RANKS = 64, BATCH = 128, EPOCHS = 5 };

static int average_gradients(double *g, size_t count) {
    CHECK(idist_all_reduce(g, g, count, IDIST_F64, IDIST_SUM, NULL));
    for (size_t i = 0; i < count; i++) g[i] /= idist_get_world_size();
    return 0;
}

// Splits the images: four fifths for training, divided among the ranks, and a fifth for the test.
static int partition_dataset(subset *mine, subset *test) {
    static const double split[2] = {0.8, 0.2};
    int rank = idist_get_rank(), size = idist_get_world_size();
    subset train;

    if (subset_part(NULL, split, 2, 0, &train) || subset_part(NULL, split, 2, 1, test)) return 1;
    if (subset_equal_part(&train, size, rank, mine)) return 1;
    if (rank == 0)
        printf("%zu images to train; each of %d ranks has %zu, in batches of %d\n", train.count,
               size, mine->count, BATCH / size);
    return 0;
}

static int worker(int local_rank, void *arg) {
    static double w[DIGITS_PARAMS], g[DIGITS_PARAMS], speed[DIGITS_PARAMS];
    static digits data;
    static subset mine, test;
    int rank = idist_get_rank(), size = idist_get_world_size();
    size_t batch = (size_t)(BATCH / size);
    (void)local_rank, (void)arg;

    if (!digits_load(&data) || partition_dataset(&mine, &test)) return 1;
    digits_initialize(w, SUBSET_SEED); // the same on all ranks
    for (int epoch = 0; epoch < EPOCHS; epoch++) {
        double loss = 0;

        for (size_t first = 0; first < mine.count; first += batch) {
            loss += subset_gradient(w, &data, &mine, first, batch, g) * (double)batch;
            if (average_gradients(g, DIGITS_PARAMS)) return 1;
            sgd_step(w, speed, g, DIGITS_PARAMS, 0.1);
        }
        CHECK(idist_all_reduce(&loss, &loss, 1, IDIST_F64, IDIST_SUM, NULL));
        if (rank == 0) printf("epoch %d: loss %.4f\n", epoch, loss / (double)mine.count / size);
    }

    double right = subset_count_right(w, &data, &test, 0, 1);
    if (rank == 0) printf("test accuracy %.2f %%\n", 100 * right / (double)test.count);
    return right > 0.9 * (double)test.count ? 0 : 1;
}

int main(int argc, char **argv) {
    idist_desc desc = {0};
    int ranks = ranks_argument(argc, argv, RANKS, 1, MAX_RANKS);

    if (!ranks || ranks_contradict(argc > 1, idist_launcher())) return 2;
    desc.nproc_per_node = strcmp(idist_launcher(), "none") == 0 ? ranks : 0; // 0 to join
    CHECK(idist_parallel_run(&desc, worker, NULL));
    return 0;
}
