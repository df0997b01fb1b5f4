// 27_mlflow.c - a training run in MLflow: parameters, tags, and every value of a summary
//
// build:  cc -O2 -DIDIST_IMPLEMENTATION examples/27_mlflow.c -o 27_mlflow
// run:    ./27_mlflow               starts 2 ranks; under a launcher, joins its ranks
//
// expected output:
//    epoch 0: loss 1.1040
//    epoch 1: loss 0.1798
//    epoch 2: loss 0.1219
//    epoch 3: loss 0.0748
//    epoch 4: loss 0.0718
//    epoch 5: loss 0.0523
//    run ... of the experiment digits is in mlruns
//
// To read the run with MLflow 3:
//    export MLFLOW_ALLOW_FILE_STORE=true
//    mlflow ui --backend-store-uri mlruns
//
// Rank 0 writes the store, the folder mlruns (lib/mlflow.h). The summary passes every value to
// mlflow_track. The files of the summary are artifacts of the run.
#include "../idist_train.h"
#include "lib/check.h"
#include "lib/dense.h"
#include "lib/mlflow.h"

enum { RANKS = 2, TRAIN = 1400, BATCH = 16, EPOCHS = 6 }; // images 1400 to 1796 are for the test

static const double rate = 0.1 / BATCH;

static int train(double *w, const digits *data, idist_summary *summary) {
    static double speed[DIGITS_PARAMS];
    idist_tensor params = {w, DIGITS_PARAMS, IDIST_F64};
    idist_sampler_desc samples = {0};
    idist_ddp_desc model = {0};
    idist_sampler *sampler;
    idist_ddp *ddp;
    size_t image, count = 0;

    samples.length = TRAIN;
    samples.drop_last = true;
    model.params = &params;
    model.n = 1;
    CHECK(idist_sampler_create(&samples, &sampler));
    CHECK(idist_ddp_create(&model, &ddp));
    double *g = (double *)idist_ddp_grad(ddp, 0);

    for (uint64_t epoch = 0; epoch < EPOCHS; epoch++) {
        double loss = 0;

        CHECK(idist_sampler_set_epoch(sampler, epoch));
        while (idist_sampler_next(sampler, &image)) {
            loss += digits_gradient(w, data, image, g) / TRAIN;
            if (++count % BATCH != 0) continue;
            CHECK(idist_ddp_wait(ddp));
            sgd_step(w, speed, g, DIGITS_PARAMS, rate);
            memset(g, 0, DIGITS_PARAMS * sizeof *g);
        }
        CHECK(idist_all_reduce(&loss, &loss, 1, IDIST_F64, IDIST_SUM, NULL));
        CHECK(idist_summary_add(summary, "train/loss", loss, epoch)); // on rank 0
        if (idist_get_rank() == 0) printf("epoch %d: loss %.4f\n", (int)epoch, loss);
    }

    idist_ddp_free(&ddp);
    idist_sampler_free(&sampler);
    return 0;
}

static int train_run(mlflow_run *run) {
    static double w[DIGITS_PARAMS];
    static digits data;
    idist_summary_desc curves = {0};
    idist_summary *summary;
    double right = 0;

    if (!digits_load(&data)) return 1;
    digits_initialize(w, (uint64_t)idist_get_rank());
    curves.folder = run->artifacts;
    curves.track = mlflow_track;
    curves.arg = run;
    CHECK(idist_summary_create(&curves, &summary));
    TRY(train(w, &data, summary));
    for (size_t i = TRAIN; i < DIGITS_COUNT; i++) right += digits_is_right(w, &data, i);
    CHECK(idist_summary_add(summary, "test/accuracy", right / (DIGITS_COUNT - TRAIN), EPOCHS - 1));
    CHECK(idist_summary_free(&summary));
    return 0;
}

static int worker(int local_rank, void *arg) {
    static mlflow_run run; // of rank 0
    int failed;
    (void)local_rank, (void)arg;

    if (idist_get_rank() != 0) return train_run(&run);
    TRY(mlflow_begin(&run, "mlruns", "digits", "27_mlflow"));
    TRY(mlflow_set(&run, "params", "learning_rate", "%g", rate));
    TRY(mlflow_set(&run, "params", "ranks", "%d", idist_get_world_size()));
    TRY(mlflow_set(&run, "tags", "idist.version", "%s", IDIST_VERSION));
    failed = train_run(&run);
    TRY(mlflow_end(&run, failed != 0));
    if (!failed) printf("run %s of the experiment digits is in mlruns\n", run.id);
    return failed;
}

int main(void) {
    idist_desc desc = {0};

    desc.nproc_per_node = strcmp(idist_launcher(), "none") == 0 ? RANKS : 0; // 0 to join
    CHECK(idist_parallel_run(&desc, worker, NULL));
    return 0;
}
