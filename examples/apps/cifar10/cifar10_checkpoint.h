// cifar10_checkpoint.h - the checkpoints from which apps/cifar10 resumes, written by
// idist_checkpoint_save
#ifndef CIFAR10_CHECKPOINT_H
#define CIFAR10_CHECKPOINT_H
#include "cifar10_report.h"

typedef struct position { // how far the training has come
    uint64_t job;         // from hash_job
    uint64_t iteration, epoch;
    uint64_t samples; // of all ranks, in the current epoch
    double best;      // best accuracy; below 0 before the first validation
} position;

enum { RUNNING = 2, KEPT = 3 };

typedef struct progress {
    idist_tensor kept[KEPT]; // weights, velocity and, in kept[RUNNING], running statistics
    position at;
} progress;

static void progress_begin(progress *p, const net *n) {
    idist_tensor weights = {n->values, n->n_values, IDIST_F32};
    idist_tensor velocity = {n->velocity, n->n_values, IDIST_F32};
    idist_tensor running = {n->running, n->n_running, IDIST_F32};

    p->kept[0] = weights;
    p->kept[1] = velocity;
    p->kept[RUNNING] = running;
    p->at.best = -1;
}

// Saves a checkpoint: a file that is either complete or absent. Keeps the `keep` best checkpoints
// of this prefix. Collective.
static int save(const progress *p, const char *prefix, int keep, double score) {
    idist_checkpoint_desc desc = {.folder = cfg.output_path, .prefix = prefix, .keep = keep};

    CHECK(idist_checkpoint_save(&desc, p->at.iteration, score, p->kept, KEPT, &p->at, sizeof p->at,
                                NULL));

    return 0;
}

// Saves the checkpoint from which a training run resumes. Collective.
static int save_latest(const progress *p) {
    return save(p, "training", 1, (double)p->at.iteration);
}

// Saves the network. The checkpoint is kept as long as its accuracy is among the two best.
// Collective.
static int save_best(progress *p, double accuracy) {
    if (accuracy > p->at.best) p->at.best = accuracy;

    return save(p, "best", 2, accuracy);
}

// Loads a checkpoint. Returns 0, or 2 after an error. Collective.
static int load(progress *p, const char *path) {
    uint64_t job = p->at.job;

    if (idist_checkpoint_load(path, p->kept, KEPT, &p->at, sizeof p->at, NULL) != IDIST_OK)
        return refuse("%s", idist_last_error());
    if (p->at.job != job)
        return refuse("%s is of other data, seed, side, model or batch_size times accumulate",
                      path);
    idist_train_log(NAME, "Resumed from %s: %" PRIu64 " iterations, %" PRIu64 " epochs", path,
                    p->at.iteration, p->at.epoch);

    return 0;
}

// Resumes from --resume_from, or starts from the beginning. A new run needs a folder
// without the checkpoints of another run. If those had better scores, they would be kept instead of
// the new checkpoints. Returns 0, or 2 after an error. Collective.
static int progress_resume(progress *p) {
    idist_checkpoint_desc desc = {.folder = cfg.output_path, .prefix = "training"};
    bool latest = cfg.resume_from && !strcmp(cfg.resume_from, "latest");
    char found[1024];
    idist_status status;

    if (cfg.resume_from && !latest) return load(p, cfg.resume_from);

    status = idist_checkpoint_find(&desc, true, found, sizeof found, NULL);
    if (!latest && status == IDIST_ERR_NOT_FOUND) return 0;
    if (status != IDIST_OK) return refuse("%s", idist_last_error());
    if (latest) return load(p, found);

    return refuse(
        "%s already holds a checkpoint, %s: continue with --resume_from latest, or give another "
        "--output_path",
        cfg.output_path, found);
}

#endif // CIFAR10_CHECKPOINT_H
