// 05_train.c - data-parallel training with idist_train.h: a sampler, and averaged gradients
//
// build:  cc -O2 -DIDIST_IMPLEMENTATION examples/05_train.c -o 05_train
// run:    ./05_train                starts 2 ranks; under a launcher, joins its ranks
//
// expected output:
//    epoch 0: loss 1.1040
//    epoch 1: loss 0.1798
//    epoch 2: loss 0.1219
//    epoch 3: loss 0.0748
//    epoch 4: loss 0.0718
//    epoch 5: loss 0.0523
//    360 of 397 test images right
//
// The network is an array of parameters and a function that adds to their gradients (lib/dense.h).
#include "../idist_train.h"
#include "lib/check.h"
#include "lib/dense.h"

enum { RANKS = 2, TRAIN = 1400, BATCH = 16, EPOCHS = 6 }; // images 1400 to 1796 are for the test

static int train(double *w, const digits *data) {
    static double speed[DIGITS_PARAMS];
    idist_tensor params = {w, DIGITS_PARAMS, IDIST_F64};
    idist_sampler_desc samples = {0};
    idist_ddp_desc model = {0};
    idist_sampler *sampler;
    idist_ddp *ddp;
    size_t image, count = 0;

    samples.length = TRAIN;
    samples.drop_last = true;
    model.params = &params; // all ranks start with the parameters of rank 0
    model.n = 1;
    CHECK(idist_sampler_create(&samples, &sampler));
    CHECK(idist_ddp_create(&model, &ddp));
    double *g = (double *)idist_ddp_grad(ddp, 0);

    for (uint64_t epoch = 0; epoch < EPOCHS; epoch++) {
        double loss = 0;

        CHECK(idist_sampler_set_epoch(sampler, epoch)); // shuffles
        while (idist_sampler_next(sampler, &image)) {   // an image of this rank
            loss += digits_gradient(w, data, image, g); // adds to g
            if (++count % BATCH != 0) continue;
            CHECK(idist_ddp_wait(ddp)); // averages g over all ranks
            sgd_step(w, speed, g, DIGITS_PARAMS, 0.1 / BATCH);
            memset(g, 0, DIGITS_PARAMS * sizeof *g);
        }
        CHECK(idist_all_reduce(&loss, &loss, 1, IDIST_F64, IDIST_SUM, NULL));
        if (idist_get_rank() == 0) printf("epoch %d: loss %.4f\n", (int)epoch, loss / TRAIN);
    }

    idist_ddp_free(&ddp);
    idist_sampler_free(&sampler);
    return 0;
}

static int worker(int local_rank, void *arg) {
    static double w[DIGITS_PARAMS];
    static digits data;
    int right = 0;
    (void)local_rank, (void)arg;

    if (!digits_load(&data)) return 1;
    digits_initialize(w, (uint64_t)idist_get_rank());
    if (train(w, &data)) return 1;
    for (size_t i = TRAIN; i < DIGITS_COUNT; i++) right += digits_is_right(w, &data, i);
    if (idist_get_rank() == 0) printf("%d of %d test images right\n", right, DIGITS_COUNT - TRAIN);
    return 0;
}

int main(void) {
    idist_desc desc = {0};

    desc.nproc_per_node = strcmp(idist_launcher(), "none") == 0 ? RANKS : 0; // 0 to join
    CHECK(idist_parallel_run(&desc, worker, NULL));
    return 0;
}
