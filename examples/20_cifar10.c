// 20_cifar10.c - a residual network learns CIFAR-10, or the digits in examples/data, on any number
// of ranks: nearly all of idist_train.h in one program
//
// build:  cc -O2 -DIDIST_IMPLEMENTATION examples/20_cifar10.c -o 20_cifar10
// run:    ./20_cifar10 --side 16 --nproc-per-node 2    two ranks; the digits, without a download
//         ./20_cifar10 --data cifar-10-batches-bin     one rank; --help says where to get CIFAR-10
//         ./20_cifar10 --side 16 --nproc-per-node 2 --resume-from latest    continues
//         torchrun --no_python --nproc_per_node 2 ./20_cifar10 --side 16    or mpirun, srun, ...
//
// expected output of the first line, on stderr, in about 15 s on two cores; the last digits and who
// is confused with whom depend on compiler, machine and ranks:
//    2026-01-30 19:26:12,180 CIFAR10-Training INFO: Train resnet8 on examples/data/digits.csv: ...
//    ...
//    ... INFO: Epoch [1/24]: loss 2.3557, .... images/s, ... % of the time in wait for gradients
//    ...
//    ... INFO:     Accuracy: 0.99....
//    ...
//    ... INFO: Most confused: 5 is taken for 9, 1 of 36 times
//    ... INFO: Best accuracy 0.99..; checksum of the weights ................ on all 2 ranks
//
// The training is that of PyTorch-Ignite's CIFAR10 example and has its options; the defaults suit
// processors. examples/lib has the network (resnet.h) and, named cifar10_..., what a rank does by
// itself. Exit code: 0 if all ranks end with the same weights; 1: a failure; 2: bad options, data
// or checkpoints. Also: -DUSE_BLAS with -lopenblas; mpicc -include idist_mpi.h for --backend mpi.
#include "../idist_train.h"
#include "lib/cifar10_trainer.h"

// ---- hooks of the network, which calls them in the middle of a pass ----

static idist_status send_gradient(int i, void *arg) {
    return idist_ddp_ready(((trainer *)arg)->ddp, i);
}

// Through a group of their own: idist_ddp uses that of the world during a backward pass.
static idist_status share_statistics(float *mean, float *var, int channels, uint64_t *count,
                                     void *arg) {
    return idist_sync_batch_norm(mean, var, channels, count, &((trainer *)arg)->norms);
}

static idist_status share_sums(float *dy, float *dy_x, int channels, void *arg) {
    return idist_sync_batch_norm_backward(dy, dy_x, channels, &((trainer *)arg)->norms);
}

// ---- training ----

// All ranks have the same averages of gradients here, and make the same step.
static int optimizer_step(void *arg) {
    trainer *t = (trainer *)arg;
    net *n = &t->net;

    t->report.waited_s += seconds_now() - t->backward_s;
    if (cfg.clip > 0)
        CHECK(idist_clip_grad_norm(n->grads, n->n_params, cfg.clip, true, NULL, NULL));
    sgd_step(n, t->rate, cfg.momentum, cfg.weight_decay);
    return 0;
}

// The gradients of all passes add up on this rank; the last pass sends the sums.
static int train_step(trainer *t, int passes) {
    idist_batch batch;

    for (int pass = 0; pass < passes; pass++) {
        CHECK(idist_loader_next(t->train.loader, &batch));
        CHECK(idist_ddp_no_sync(t->ddp, pass < passes - 1));
        CHECK(idist_ddp_forward(t->ddp));
        CHECK(train_pass(t, &batch, pass, passes));
        CHECK(idist_auto_optim(t->ddp, optimizer_step, t));
    }
    CHECK(end_step(t, passes));
    return 0;
}

// What each rank saw of its share of the images becomes accuracy and loss of all.
static int evaluate(trainer *t, const source *images, const char *tag) {
    validation *v = &t->validation;

    CHECK(classify(v, &t->net, images));
    CHECK(idist_accuracy_compute(&v->hits, &v->accuracy, NULL));
    CHECK(idist_mean_compute(&v->loss, &v->mean_loss, NULL));
    CHECK(idist_confusion_compute(&v->confusion, v->confused, NULL));
    CHECK(report_validation(t, tag));
    return 0;
}

// Every rank evaluates with the running statistics of the first. The two best networks are kept.
static int validate(trainer *t) {
    double *best = &t->progress.at.best;

    CHECK(idist_broadcast_parameters(&t->progress.kept[RUNNING], 1, 0, NULL));
    if (evaluate(t, &t->seen, "Train") || evaluate(t, &t->test, "Test")) return 1;
    if (t->validation.accuracy > *best) *best = t->validation.accuracy;
    CHECK(save(&t->progress, "best", 2, t->validation.accuracy));
    return 0;
}

static int train(trainer *t) {
    position *at = &t->progress.at;

    while (at->epoch < (uint64_t)cfg.num_epochs) {
        begin_epoch(t);
        for (int passes = next_passes(t); passes > 0; passes = next_passes(t)) {
            if (train_step(t, passes)) return 1;
            if (checkpoint_is_due(t))
                CHECK(save(&t->progress, "training", 1, (double)at->iteration));
        }
        if (t->stopped) break;
        if (end_epoch(t)) return 1;
        CHECK(idist_loader_set_epoch(t->train.loader, at->epoch));
        if (validation_is_due(t) && validate(t)) return 1;
        if (is_last_epoch(t)) CHECK(save(&t->progress, "training", 1, (double)at->iteration));
    }
    if (compare_ranks(hash_weights(&t->net), "weights")) return 1;
    CHECK(report_end(t));
    return 0;
}

// ---- the parts put together ----

// The memory of the gradients is that of idist_ddp, which averages them over the ranks.
static int wrap_network(trainer *t) {
    net *n = &t->net;
    idist_ddp_desc desc = {.params = n->params,
                           .n = n->n_params,
                           .buffers = &t->progress.kept[RUNNING],
                           .n_buffers = 1,
                           .bucket_nbytes = 64 << 10, // small, so that most leave early
                           .compression = cfg.bf16 ? IDIST_COMPRESS_BF16 : IDIST_COMPRESS_NONE};

    CHECK(idist_ddp_create(&desc, &t->ddp));
    for (int i = 0; i < n->n_params; i++) set_gradient(n, i, idist_ddp_grad(t->ddp, i));
    if (cfg.sync_bn) CHECK(idist_split(NULL, 0, idist_get_rank(), &t->norms.group));
    n->hooks =
        (net_hooks){cfg.no_overlap ? NULL : send_gradient, cfg.sync_bn ? share_statistics : NULL,
                    cfg.sync_bn ? share_sums : NULL, t};
    return 0;
}

// A rank gets its part of each batch, and fetches it ahead.
static idist_status make_loader(source *s) {
    idist_sampler_desc samples = {.length = (size_t)s->set.count,
                                  .seed = (uint64_t)cfg.seed,
                                  .in_order = !s->augment};
    idist_loader_desc desc = {.batch_size = (size_t)cfg.batch_size,
                              .batch_nbytes = image_batch_nbytes(&s->set) * (size_t)cfg.batch_size,
                              .fetch = fetch_images,
                              .arg = s,
                              .drop_last = s->augment,
                              .num_workers = cfg.num_workers};
    return idist_auto_loader(&desc, &samples, &s->loader);
}

static int set_up(trainer *t) {
    idist_status status = idist_one_rank_first(load_images, t, 0, true, NULL); // on each host
    int code;

    if (status == IDIST_ERR_CALLBACK) return 2;
    CHECK(status);
    code = compare_ranks(t->progress.at.job, "data or options");
    if (!code) code = create_network(t);
    if (!code) code = wrap_network(t);
    if (!code) code = begin_or_resume(t);
    if (code) return code;
    CHECK(make_loader(&t->train));
    CHECK(make_loader(&t->seen));
    CHECK(make_loader(&t->test));
    if (idist_loader_count(t->train.loader) == 0)
        return refuse("--batch_size %d is more than the training images", cfg.batch_size);
    CHECK(idist_sampler_set_state(idist_loader_sampler(t->train.loader), resumed_state(t)));
    CHECK(report_start(t));
    return 0;
}

static int worker(int local_rank, void *arg) {
    trainer *t = (trainer *)arg;

    (void)local_rank;
    t->exit_code = set_up(t);
    if (t->exit_code == 0) t->exit_code = train(t);
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
    fprintf(stderr, "20_cifar10: %s\n", idist_last_error());
    return report.exit_code == 2 ? 2 : 1;
}
