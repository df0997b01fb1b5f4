// apps/cifar10 - a residual network learns CIFAR-10, or the digits in examples/data, on any number
// of ranks: nearly all of idist_train.h in one program
//
// build:  cc -O2 -DIDIST_IMPLEMENTATION examples/apps/cifar10/main.c -o cifar10
// run:    ./cifar10 --side 16 --nproc-per-node 2    two ranks; the digits, without a download
//         ./cifar10 --data cifar-10-batches-bin     one rank; --help says where to get CIFAR-10
//         ./cifar10 --side 16 --nproc-per-node 2 --resume-from latest    continues
//         torchrun --no_python --nproc_per_node 2 ./cifar10 --side 16    or mpirun, srun, ...
//
// expected output of the first line, on stderr in about 15 s, in part; the last digits may differ:
//    2026-01-30 19:26:12,180 CIFAR10-Training INFO: Train resnet8 on examples/data/digits.csv: ...
//    ... INFO: Epoch [1/24]: loss 2.3557, .... images/s, ... % of the time in wait for gradients
//    ... INFO: Run of .... s on 2 ranks: .... examples/s
//    ... INFO: Most confused: 5 is taken for 9, 1 of 36 times
//    ... INFO: Best accuracy 0.99..; checksum of the weights ................ on all 2 ranks
//
// The training and its options follow PyTorch-Ignite's CIFAR10 example, with defaults that suit
// CPUs. Data, options, reports and checkpoints are in cifar10_*.h, where comments mark collective
// functions. Other build options are -DUSE_BLAS with -lopenblas, and mpicc -include idist_mpi.h for
// --backend mpi.
//
// Exits with 0 if all ranks end with equal weights, with 1 after a failure, and with 2 for bad
// options, data or checkpoints.
#include "../../../idist_train.h"
#include "cifar10_trainer.h"

// The network calls send_gradient, sync_norm and sync_norm_backward in the middle of a pass.
static idist_status send_gradient(int i, void *arg) {
    return idist_ddp_ready(((trainer *)arg)->ddp, i);
}

static idist_status sync_norm(float *mean, float *var, int channels, uint64_t *count, void *arg) {
    return idist_sync_batch_norm(mean, var, channels, count, &((trainer *)arg)->norms);
}

static idist_status sync_norm_backward(float *dy, float *dy_x, int channels, void *arg) {
    return idist_sync_batch_norm_backward(dy, dy_x, channels, &((trainer *)arg)->norms);
}

// Gives the network to idist_ddp, which allocates the gradients and averages them over the ranks.
// Batch norms get a group of their own, because idist_ddp uses the group of the world during a
// backward pass.
static int wrap_network(trainer *t) {
    net *n = &t->net;
    idist_ddp_desc desc = {.params = n->params,
                           .n = n->n_params,
                           .buffers = &t->progress.kept[RUNNING],
                           .n_buffers = 1,
                           .bucket_nbytes = 64 << 10, // small, so that most buckets are sent early
                           .compression = cfg.bf16 ? IDIST_COMPRESS_BF16 : IDIST_COMPRESS_NONE};

    CHECK(idist_ddp_create(&desc, &t->ddp));
    for (int i = 0; i < n->n_params; i++) set_gradient(n, i, idist_ddp_grad(t->ddp, i));
    if (cfg.sync_bn) CHECK(idist_split(NULL, 0, idist_get_rank(), &t->norms.group));
    n->hooks = wanted_hooks((net_hooks){send_gradient, sync_norm, sync_norm_backward, t});
    return 0;
}

// Creates a loader that fetches this rank's part of each batch ahead of time.
static int make_loader(source *s) {
    idist_sampler_desc samples = {.length = n_images(s), .seed = s->seed, .in_order = !s->augment};
    idist_loader_desc batches = batches_of(s); // of all ranks together

    CHECK(idist_auto_loader(&batches, &samples, &s->loader));
    return 0;
}

// Updates the weights. All ranks have the same averaged gradients here, and make the same step.
static int optimizer_step(void *arg) {
    trainer *t = (trainer *)arg;

    end_wait(t);
    if (cfg.clip > 0)
        CHECK(idist_clip_grad_norm(t->net.grads, t->net.n_params, cfg.clip, true, NULL, NULL));
    sgd_step(&t->net, t->rate, cfg.momentum, cfg.weight_decay);
    return 0;
}

// Makes one step of several passes. The gradients of the passes add up on this rank, and the last
// pass sends the sums.
static int train_step(trainer *t, int passes) {
    idist_batch batch;

    begin_step(t);
    for (int pass = 0; pass < passes; pass++) {
        CHECK(idist_loader_next(t->train.loader, &batch));
        CHECK(idist_ddp_no_sync(t->ddp, pass < passes - 1));
        CHECK(idist_ddp_forward(t->ddp));
        CHECK(train_pass(t, &batch, pass, passes));
        CHECK(idist_auto_optim(t->ddp, optimizer_step, t));
    }
    return end_step(t, passes);
}

// Classifies this rank's share of the images. Combines accuracy and loss over all ranks.
static int evaluate(trainer *t, const source *images, const char *tag) {
    validation *v = &t->validation;

    CHECK(classify(v, &t->net, images));
    CHECK(idist_accuracy_compute(&v->hits, &v->accuracy, NULL));
    CHECK(idist_mean_compute(&v->loss, &v->mean_loss, NULL));
    CHECK(idist_confusion_compute(&v->confusion, v->confused, NULL));
    return report_validation(t, tag);
}

// Ends an epoch, and validates if a validation is due. Every rank evaluates with the running
// statistics of rank 0.
static int end_epoch(trainer *t) {
    TRY(next_epoch(t));
    CHECK(idist_loader_set_epoch(t->train.loader, t->progress.at.epoch)); // for another order
    if (!validation_is_due(t)) return 0;
    CHECK(idist_broadcast_parameters(&t->progress.kept[RUNNING], 1, 0, NULL));
    if (evaluate(t, &t->seen, "Train") || evaluate(t, &t->test, "Test")) return 1;
    return save_best(&t->progress, t->validation.accuracy);
}

// Runs the training on one rank. Returns the exit code.
static int run(trainer *t) {
    TRY(exit_code(idist_one_rank_first(load_images, t, 0, true, NULL))); // on each host
    TRY(compare_ranks(t->progress.at.job, "data or options"));
    TRY(create_network(t));
    TRY(wrap_network(t));
    TRY(begin_or_resume(t)); // rank 0 reads the checkpoint for all
    if (make_loader(&t->train) || make_loader(&t->seen) || make_loader(&t->test)) return 1;
    CHECK(idist_sampler_set_state(idist_loader_sampler(t->train.loader), resumed_state(t)));
    TRY(report_start(t));

    while (is_training(t)) {
        int passes = next_passes(t); // of the next step; 0 at the end of an epoch

        TRY(passes > 0 ? train_step(t, passes) : end_epoch(t));
        if (checkpoint_is_due(t)) TRY(save_latest(&t->progress)); // rank 0 writes it
    }
    if (compare_ranks(hash_weights(&t->net), "weights")) return 1;
    return report_end(t);
}

static int worker(int local_rank, void *arg) {
    trainer *t = (trainer *)arg;

    (void)local_rank;
    t->exit_code = run(t);
    trainer_free(t);
    return t->exit_code;
}

int main(int argc, char **argv) {
    static trainer t;
    idist_report report = {0};
    int code = parse_options(argc, argv);

    if (code != OPTIONS_GOOD) return code == OPTIONS_HELP ? 0 : 2;
    cfg.world.report = &report;
    if (idist_parallel_run(&cfg.world, worker, &t) == IDIST_OK || t.exit_code) return t.exit_code;
    fprintf(stderr, "cifar10: %s\n", idist_last_error());
    return report.exit_code == 2 ? 2 : 1;
}
