// cifar10_trainer.h - the state of a rank of apps/cifar10, the passes through its network, and the
// schedule and the log of its training
#ifndef CIFAR10_TRAINER_H
#define CIFAR10_TRAINER_H
#include "cifar10_checkpoint.h"
#include "cifar10_validation.h"

typedef struct trainer {
    net net;
    source train, seen, test; // seen: training images in order, without augmentation
    idist_ddp *ddp;           // owns the gradients of the net
    idist_opts norms;         // with the group of the batch norms, for --sync-bn
    progress progress;
    epoch_report report;
    idist_run run;         // what the ranks did
    idist_summary *curves; // by epochs, in the folder of the checkpoints
    validation validation; // the last validation
    double rate, loss;     // of the last step
    double start_s;        // of the training
    double backward_s;     // when the last backward pass ended
    uint64_t first;        // progress.at.samples when report began
    bool stopped;          // by --stop-iteration
    int exit_code;         // of a worker that ran in this process
} trainer;

// Reads the images. A callback of idist_one_rank_first.
static int load_images(void *arg) {
    trainer *t = (trainer *)arg;

    t->train.augment = true;
    t->train.seed = t->seen.seed = t->test.seed = (uint64_t)cfg.seed;
    if (!read_images(cfg.images, cfg.side, &t->train.set, &t->test.set)) return 1;
    t->seen.set = t->train.set;
    t->progress.at.job = hash_job(&t->train.set);

    return 0;
}

// Creates the network that the options ask for, with space for the batches of one rank. Returns 0,
// or 1 if memory cannot be allocated.
static int create_network(trainer *t) {
    int side = t->train.set.side, images = idist_auto_batch_size(cfg.batch_size);
    uint64_t seed = (uint64_t)cfg.seed;

    if (!net_create(&t->net, model_blocks(cfg.model), cfg.width, side, images, seed)) {
        fprintf(stderr, "no memory for the network\n");
        return 1;
    }
    progress_begin(&t->progress, &t->net);

    return 0;
}

static void set_gradient(net *n, int i, void *memory) {
    n->grads[i] = n->params[i];
    n->grads[i].data = memory;
}

// Returns the hooks that the options ask for.
static net_hooks wanted_hooks(net_hooks hooks) {
    if (cfg.no_overlap) hooks.gradient = NULL;
    if (!cfg.sync_bn) hooks.statistics = NULL;
    if (!cfg.sync_bn) hooks.sums = NULL;

    return hooks;
}

static size_t n_images(const source *s) { return (size_t)s->set.count; }

// Returns the description of a source's batches, which are divided among the ranks. All training
// batches have --batch_size images.
static idist_loader_desc batches_of(source *s) {
    size_t images = (size_t)cfg.batch_size;
    idist_loader_desc desc = {.batch_size = images,
                              .batch_nbytes = image_batch_nbytes(&s->set) * images,
                              .fetch = fetch_images,
                              .arg = s,
                              .drop_last = s->augment,
                              .num_workers = cfg.num_workers};

    return desc;
}

// Resumes from --resume_from, or starts from the beginning. Returns 0, or 2 after an error.
// Collective.
static int begin_or_resume(trainer *t) {
    int code = progress_resume(&t->progress);

    atomic_store(&t->train.epoch, t->progress.at.epoch);

    return code;
}

// Returns the state at which the sampler of the training images resumes, in the middle of an epoch
// if necessary.
static idist_sampler_state resumed_state(const trainer *t) {
    const position *at = &t->progress.at;
    size_t count = idist_sampler_count(idist_loader_sampler(t->train.loader));
    idist_sampler_state state = {.epoch = at->epoch,
                                 .position = at->samples / (uint64_t)idist_get_world_size()};

    if (state.position > count) state.position = count;

    return state;
}

static void trainer_free(trainer *t) {
    (void)idist_summary_free(&t->curves); // still open if the training failed
    idist_loader_free(&t->train.loader);
    idist_loader_free(&t->seen.loader);
    idist_loader_free(&t->test.loader);
    idist_ddp_free(&t->ddp);
    net_free(&t->net);
    free_images(&t->train.set);
    free_images(&t->test.set);
}

// ---- an epoch ----

static void begin_epoch(trainer *t) {
    const position *at = &t->progress.at;

    t->first = at->samples;
    report_begin(&t->report, (int)at->epoch + 1, idist_loader_count(t->train.loader));
}

// Reports this epoch and moves on to the next. Returns 1 after an error, or if the loss is NaN or
// huge. Collective.
static int next_epoch(trainer *t) {
    position *at = &t->progress.at;
    uint64_t images = at->samples - t->first;
    double loss;

    at->epoch++;
    at->samples = 0;
    atomic_store(&t->train.epoch, at->epoch);
    if (images == 0) return 0; // resumed after a stop at the end of this epoch
    CHECK(report_epoch(&t->report, images, &loss));
    CHECK(idist_summary_add(t->curves, "train/loss", loss, at->epoch));
    CHECK(idist_summary_add(t->curves, "train/rate", t->rate, at->epoch));
    if (loss < 1e6) return 0; // NaN < 1e6 is false

    return refuse("the training diverged"), 1;
}

static bool is_last_epoch(const trainer *t) {
    return t->progress.at.epoch == (uint64_t)cfg.num_epochs;
}

static bool validation_is_due(const trainer *t) {
    return is_last_epoch(t) || t->progress.at.epoch % (uint64_t)cfg.validate_every == 0;
}

// ---- a step ----

// Returns the number of backward passes of the next step: --accumulate, or as many as are left in
// the epoch. Returns 0 at the end of the epoch.
static int next_passes(const trainer *t) {
    const idist_sampler *sampler = idist_loader_sampler(t->train.loader);
    size_t images = idist_sampler_count(sampler) - idist_sampler_get_state(sampler).position;
    size_t left = images / (size_t)idist_auto_batch_size(cfg.batch_size);

    return left < (size_t)cfg.accumulate ? (int)left : cfg.accumulate;
}

static void begin_step(trainer *t) {
    const position *at = &t->progress.at;

    if (at->samples == 0) begin_epoch(t);
    t->loss = 0;
    t->rate = learning_rate_after((double)at->epoch + (double)at->samples / t->train.set.count);
}

// Makes pass number `pass` of a step, forward and backward. Adds its part of the loss and the
// gradients.
static idist_status train_pass(trainer *t, const idist_batch *batch, int pass, int passes) {
    net *n = &t->net;
    const float *in = take_batch(n, &t->train.set, batch);

    n->training = true;
    n->weight = 1.0 / passes;
    n->add = pass > 0;
    forward(n, in);
    t->loss += cross_entropy(n, n->labels) / passes;
    backward(n, in);
    t->backward_s = seconds_now();

    return n->status;
}

// Counts the time of the wait for the gradients, which have now arrived.
static void end_wait(trainer *t) { t->report.waited_s += seconds_now() - t->backward_s; }

// Counts and reports a step. Collective.
static int end_step(trainer *t, int passes) {
    position *at = &t->progress.at;
    int own_images = idist_auto_batch_size(cfg.batch_size); // of a batch
    int images = idist_get_world_size() * own_images;

    t->run.examples += (uint64_t)own_images * (uint64_t)passes;
    at->iteration++;
    at->samples += (uint64_t)images * (uint64_t)passes;
    t->stopped = at->iteration == (uint64_t)cfg.stop_iteration;

    CHECK(report_step(&t->report, at->iteration, at->samples / (uint64_t)images, passes, t->loss,
                      t->rate));

    return 0;
}

// ---- the training ----

static bool is_training(const trainer *t) {
    return !t->stopped && t->progress.at.epoch < (uint64_t)cfg.num_epochs;
}

// Returns true if a checkpoint is due: every --checkpoint_every steps, after the step that stops
// the training, and after the last epoch.
static bool checkpoint_is_due(const trainer *t) {
    const position *at = &t->progress.at;

    if (at->samples == 0) return is_last_epoch(t);

    return t->stopped || at->iteration % (uint64_t)cfg.checkpoint_every == 0;
}

// Reports the last validation. `tag` is "Train" or "Test".
static int report_validation(trainer *t, const char *tag) {
    static const char *const names[] = {"Accuracy", "Loss"};
    const validation *v = &t->validation;
    double values[] = {v->accuracy, v->mean_loss};
    uint64_t epoch = t->progress.at.epoch;
    bool train = !strcmp(tag, "Train");

    idist_train_log_metrics(NAME, (int)epoch, seconds_now() - v->start_s, tag, names, values, 2);
    CHECK(idist_summary_add(t->curves, train ? "train/accuracy" : "test/accuracy", v->accuracy,
                            epoch));
    if (!train) CHECK(idist_summary_add(t->curves, "test/loss", v->mean_loss, epoch));

    return 0;
}

// Opens the curves and reports the configuration. Returns 0 on success, 1 after an error, or 2 if a
// batch needs more images than there are. Collective.
static int report_start(trainer *t) {
    idist_summary_desc curves = {.folder = cfg.output_path};

    if (idist_loader_count(t->train.loader) == 0)
        return refuse("--batch_size %d is more than the training images", cfg.batch_size);
    CHECK(idist_summary_create(&curves, &t->curves));
    report_configuration(&t->train.set, &t->test.set, &t->net, idist_ddp_buckets(t->ddp));
    CHECK(idist_run_begin(&t->run));
    t->start_s = seconds_now();
    begin_epoch(t);

    return 0;
}

// Reports the training. Collective.
static int report_end(trainer *t) {
    const position *at = &t->progress.at;

    CHECK(idist_run_report(&t->run, NAME, NULL, NULL));
    report_confusion(&t->validation, t->test.set.names);
    report_result(t->stopped, at->iteration, seconds_now() - t->start_s, at->best, &t->net);

    CHECK(idist_summary_free(&t->curves));

    return 0;
}

#endif // CIFAR10_TRAINER_H
