// 20_cifar10.c - a residual network learns CIFAR-10, or the digits in examples/data, on any number
// of ranks: nearly all of idist_train.h in one program
//
// build:  cc -O2 -DIDIST_IMPLEMENTATION examples/20_cifar10.c -o 20_cifar10
// run:    ./20_cifar10 --side 16 --nproc-per-node 2    two ranks; the digits, without a download
//         ./20_cifar10 --data cifar-10-batches-bin     one rank; --help says where to get CIFAR-10
//         ./20_cifar10 --side 16 --nproc-per-node 2 --resume-from latest    continues
//         torchrun --no_python --nproc_per_node 2 ./20_cifar10 --side 16    or mpirun, srun, ...
//         Two hosts, with the same IDIST_SECRET: --nproc-per-node 2 --nnodes 2 --master-addr HOST0
//         --master-port 29520 on both; --node-rank 0 on HOST0, --node-rank 1 on the other
//
// expected output of the first line, on stderr; with a progress bar if that is a terminal:
//    2026-01-30 19:26:12,180 CIFAR10-Training INFO: Train resnet8 on examples/data/digits.csv: ...
//    ...                                          versions, the world, all options
//    ... INFO: Epoch [1/24]: loss 2.3557, .... images/s, ... % of the time in wait for gradients
//    ...
//    ... INFO: Epoch 24 - Evaluation time (seconds): 0.10 - Test metrics:
//    ... INFO:     Accuracy: 0.99....
//    ... INFO:     Loss: 0.0....
//    ... INFO: Most confused: 8 is taken for 1, 2 of 35 times
//    ... INFO: Best accuracy 0.99..; checksum of the weights ................ on all 2 ranks
// It takes about 15 s on two cores. The last digits depend on compiler, machine and ranks.
//
// The training is that of PyTorch-Ignite's CIFAR10 example and has its options; the defaults suit
// processors. examples/lib has the network (resnet.h) and, named cifar10_..., data, options,
// validation, checkpoints and log lines. Exit code: 0 if all ranks end with the same weights; 1: a
// failure; 2: bad options, data or checkpoints. Other builds: -DUSE_BLAS with -lopenblas or -lblas
// at the end of the line; mpicc with -DUSE_MPI for --backend mpi.
#ifdef USE_MPI
#include "../idist_mpi.h"
#endif
#include "../idist_train.h"
#include "lib/cifar10_checkpoint.h"
#include "lib/cifar10_validation.h"

typedef struct trainer {
    net net;
    source train, seen, test; // seen: the training images without augmentation
    idist_loader *train_loader, *seen_loader, *test_loader;
    idist_ddp *ddp;
    idist_group *norm_group; // of all ranks, for --sync-bn
    idist_summary *curves;   // by epochs, in the folder of the checkpoints
    progress progress;
    epoch_report report;
    double rate, backward_s; // backward_s: when the last backward pass ended
    validation validation;   // the last one
    const char *data;
    bool stopped;  // by --stop-iteration
    int exit_code; // of a worker that ran in this process
} trainer;

// ---- hooks of resnet.h, in the middle of a pass ----

static idist_status send_gradient(int i, void *arg) {
    return idist_ddp_ready(((trainer *)arg)->ddp, i);
}

// Through a group of their own: idist_ddp uses that of the world during a backward pass.
static idist_status share_statistics(float *mean, float *var, int channels, uint64_t *count,
                                     void *arg) {
    idist_opts opts = {.group = ((trainer *)arg)->norm_group};
    return idist_sync_batch_norm(mean, var, channels, count, &opts);
}

static idist_status share_sums(float *dy, float *dy_x, int channels, void *arg) {
    idist_opts opts = {.group = ((trainer *)arg)->norm_group};
    return idist_sync_batch_norm_backward(dy, dy_x, channels, &opts);
}

// ---- training ----

// All ranks have the same averages of gradients here, and make the same step.
static int optimizer_step(void *arg) {
    trainer *t = (trainer *)arg;

    t->report.waited_s += seconds_now() - t->backward_s;
    if (cfg.clip > 0)
        CHECK(idist_clip_grad_norm(t->net.grads, t->net.n_params, cfg.clip, true, NULL, NULL));
    sgd_step(&t->net, t->rate, cfg.momentum, cfg.weight_decay);
    return 0;
}

// A step after some passes, whose gradients add up on this rank; the last one sends the sums.
static int train_step(trainer *t, int passes, double *loss) {
    idist_batch batch;

    *loss = 0;
    t->net.training = true;
    t->net.weight = 1.0 / passes;
    for (int pass = 0; pass < passes; pass++) {
        CHECK(idist_loader_next(t->train_loader, &batch));
        CHECK(idist_ddp_no_sync(t->ddp, pass < passes - 1));
        CHECK(idist_ddp_forward(t->ddp));
        const float *in = take_batch(&t->net, &t->train.set, &batch);
        forward(&t->net, in);
        *loss += cross_entropy(&t->net, t->net.labels) / passes;
        t->net.add = pass > 0;
        backward(&t->net, in);
        CHECK(t->net.status);
        t->backward_s = seconds_now();
        CHECK(idist_auto_optim(t->ddp, optimizer_step, t));
    }
    return 0;
}

static int train_epoch(trainer *t) {
    position *at = &t->progress.at;
    idist_sampler *sampler = idist_loader_sampler(t->train_loader);
    size_t batch = (size_t)idist_auto_batch_size(cfg.batch_size);
    size_t left =
        (idist_sampler_count(sampler) - idist_sampler_get_state(sampler).position) / batch;
    uint64_t first = at->samples, per_batch = (uint64_t)idist_get_world_size() * batch;
    double loss;

    report_begin(&t->report, (int)at->epoch + 1, idist_loader_count(t->train_loader));
    while (left > 0) {
        int passes = left < (size_t)cfg.accumulate ? (int)left : cfg.accumulate;
        t->rate = learning_rate_after((double)at->epoch + (double)at->samples / t->train.set.count);
        if (train_step(t, passes, &loss)) return 1;
        left -= (size_t)passes;
        at->iteration++;
        at->samples += per_batch * (uint64_t)passes;
        CHECK(
            report_step(&t->report, at->iteration, at->samples / per_batch, passes, loss, t->rate));
        t->stopped = at->iteration == (uint64_t)cfg.stop_iteration;
        if (t->stopped || at->iteration % (uint64_t)cfg.checkpoint_every == 0)
            CHECK(save(&t->progress, "training", 1, (double)at->iteration));
        if (t->stopped) return 0;
    }
    CHECK(report_epoch(&t->report, at->samples - first, &loss));
    CHECK(idist_summary_add(t->curves, "train/loss", loss, at->epoch + 1));
    CHECK(idist_summary_add(t->curves, "train/rate", t->rate, at->epoch + 1));
    if (at->samples == first || loss < 1e6) return 0; // a NaN is not below
    return refuse("the training diverged"), 1;
}

// ---- validation ----

// Every rank evaluates with the running statistics of the first. The two best networks are kept.
static int validate(trainer *t) {
    uint64_t epoch = t->progress.at.epoch;
    double seen[2], test[2]; // accuracy and loss

    CHECK(idist_broadcast_parameters(&t->progress.kept[RUNNING], 1, 0, NULL));
    CHECK(evaluate(&t->validation, &t->net, &t->seen.set, t->seen_loader));
    CHECK(report_validation(&t->validation, epoch, "Train", seen));
    CHECK(evaluate(&t->validation, &t->net, &t->test.set, t->test_loader));
    CHECK(report_validation(&t->validation, epoch, "Test", test));
    CHECK(idist_summary_add(t->curves, "train/accuracy", seen[0], epoch));
    CHECK(idist_summary_add(t->curves, "test/accuracy", test[0], epoch));
    CHECK(idist_summary_add(t->curves, "test/loss", test[1], epoch));
    if (test[0] > t->progress.at.best) t->progress.at.best = test[0];
    CHECK(save(&t->progress, "best", 2, test[0]));
    return 0;
}

static int train(trainer *t) {
    position *at = &t->progress.at;

    while (at->epoch < (uint64_t)cfg.num_epochs) {
        if (train_epoch(t)) return 1;
        if (t->stopped) return 0;
        at->epoch++;
        at->samples = 0;
        atomic_store(&t->train.epoch, at->epoch);
        CHECK(idist_loader_set_epoch(t->train_loader, at->epoch));
        bool last = at->epoch == (uint64_t)cfg.num_epochs;
        if ((last || at->epoch % (uint64_t)cfg.validate_every == 0) && validate(t)) return 1;
        if (last) CHECK(save(&t->progress, "training", 1, (double)at->iteration));
    }
    return 0;
}

// ---- the parts put together ----

static int read_data(void *arg) {
    trainer *t = (trainer *)arg;

    t->train.augment = true;
    t->train.seed = (uint64_t)cfg.seed;
    if (!read_images(t->data, cfg.side, &t->train.set, &t->test.set)) return 1;
    t->seen.set = t->train.set;
    return 0;
}

static int make_network(trainer *t) {
    net *n = &t->net;
    idist_ddp_desc desc = {.params = n->params,
                           .buffers = &t->progress.kept[RUNNING],
                           .n_buffers = 1,
                           .bucket_nbytes = 64 << 10, // small, so that most leave early
                           .compression = cfg.bf16 ? IDIST_COMPRESS_BF16 : IDIST_COMPRESS_NONE};

    if (!create_network(n, t->train.set.side)) return 1;
    progress_begin(&t->progress, n);
    desc.n = n->n_params;
    CHECK(idist_ddp_create(&desc, &t->ddp));
    for (int i = 0; i < n->n_params; i++) {
        n->grads[i] = n->params[i];
        n->grads[i].data = idist_ddp_grad(t->ddp, i);
    }
    if (cfg.sync_bn) CHECK(idist_split(NULL, 0, idist_get_rank(), &t->norm_group));
    n->hooks =
        (net_hooks){cfg.no_overlap ? NULL : send_gradient, cfg.sync_bn ? share_statistics : NULL,
                    cfg.sync_bn ? share_sums : NULL, t};
    return 0;
}

static idist_status make_loader(source *s, bool in_order, idist_loader **loader) {
    idist_sampler_desc samples = {.length = (size_t)s->set.count,
                                  .seed = (uint64_t)cfg.seed,
                                  .in_order = in_order};
    idist_loader_desc desc = {.batch_size = (size_t)cfg.batch_size,
                              .batch_nbytes = image_batch_nbytes(&s->set) * (size_t)cfg.batch_size,
                              .fetch = fetch_images,
                              .arg = s,
                              .drop_last = !in_order,
                              .num_workers = cfg.num_workers};
    return idist_auto_loader(&desc, &samples, loader);
}

// A training that goes on does so in the middle of its epoch.
static int make_loaders(trainer *t) {
    const position *at = &t->progress.at;
    idist_sampler_state state = {.epoch = at->epoch,
                                 .position = at->samples / (uint64_t)idist_get_world_size()};

    atomic_store(&t->train.epoch, at->epoch);
    CHECK(make_loader(&t->train, false, &t->train_loader));
    CHECK(make_loader(&t->seen, true, &t->seen_loader));
    CHECK(make_loader(&t->test, true, &t->test_loader));
    if (idist_loader_count(t->train_loader) == 0)
        return refuse("--batch_size %d is more than the training images", cfg.batch_size);
    idist_sampler *sampler = idist_loader_sampler(t->train_loader);
    if (state.position > idist_sampler_count(sampler))
        state.position = idist_sampler_count(sampler);
    CHECK(idist_sampler_set_state(sampler, state));
    return 0;
}

static int run_training(trainer *t) {
    idist_summary_desc curves = {.folder = cfg.output_path};
    position *at = &t->progress.at;
    double start_s;
    int code;
    idist_status status = idist_one_rank_first(read_data, t, 0, true, NULL); // on each host

    if (status == IDIST_ERR_CALLBACK) return 2;
    CHECK(status);
    at->job = hash_job(&t->train.set);
    code = compare_ranks(at->job, "data or options");
    if (!code) code = make_network(t);
    if (!code) code = begin_or_resume(&t->progress);
    if (!code) code = make_loaders(t);
    if (code) return code;
    CHECK(idist_summary_create(&curves, &t->curves));
    report_configuration(t->data, &t->train.set, &t->test.set, &t->net, idist_ddp_buckets(t->ddp));
    start_s = seconds_now();
    if (train(t) || compare_ranks(hash_weights(&t->net), "weights")) return 1;
    report_confusion(&t->validation, t->test.set.names);
    CHECK(idist_summary_free(&t->curves));
    report_end(t->stopped, at->iteration, seconds_now() - start_s, at->best, &t->net);
    return 0;
}

static int training(int local_rank, void *arg) {
    trainer *t = (trainer *)arg;

    (void)local_rank;
    t->exit_code = run_training(t);
    (void)idist_summary_free(&t->curves); // if it failed
    idist_loader_free(&t->train_loader);
    idist_loader_free(&t->seen_loader);
    idist_loader_free(&t->test_loader);
    idist_ddp_free(&t->ddp);
    net_free(&t->net);
    free_images(&t->train.set);
    free_images(&t->test.set);
    return t->exit_code;
}

int main(int argc, char **argv) {
    static trainer t;
    static idist_report report;
    int code = parse_options(argc, argv);
    idist_desc desc = {.backend = cfg.backend,
                       .nproc_per_node = cfg.nproc_per_node,
                       .nnodes = cfg.nnodes,
                       .node_rank = cfg.node_rank,
                       .master_addr = cfg.master_addr,
                       .master_port = cfg.master_port,
                       .report = &report};

    if (code != OPTIONS_GOOD) return code == OPTIONS_HELP ? 0 : 2;
    report.rank = -1;
    t.data = cfg.data ? cfg.data : digits_find(argc > 0 ? argv[0] : "");
    idist_status status = idist_parallel_run(&desc, training, &t);
    if (t.exit_code) return t.exit_code; // it ran in this process and said why
    if (status == IDIST_OK) return 0;
    fprintf(stderr, "20_cifar10: %s\n", idist_last_error());
    return report.rank >= 0 && report.exit_code == 2 ? 2 : 1;
}
