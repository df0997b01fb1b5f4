// cifar10_report.h - the output of apps/cifar10: errors, the progress of an epoch, checksums, the
// configuration. All ranks must call the functions that are marked "collective".
#ifndef CIFAR10_REPORT_H
#define CIFAR10_REPORT_H
#include "cifar10_options.h"
#include "../../lib/check.h"

#include <inttypes.h>
#include <stdarg.h>
#include <time.h>

#define NAME "CIFAR10-Training"

static double seconds_now(void) {
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);

    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Prints an error on rank 0. Returns 2, the exit code for bad options, data and checkpoints.
// Collective.
#ifdef __GNUC__
__attribute__((format(printf, 1, 2)))
#endif
static int
refuse(const char *format, ...) {
    va_list args;

    if (idist_get_rank() != 0) return 2;

    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);

    return 2;
}

// Returns the exit code for a status of idist_one_rank_first. If the callback failed, it has
// already printed an error.
static int exit_code(idist_status status) {
    if (status == IDIST_ERR_CALLBACK) return 2;
    CHECK(status);

    return 0;
}

// ---- the progress of an epoch ----

typedef struct epoch_report {
    char title[64], text[64];
    idist_progress bar;
    idist_mean loss;              // over the epoch
    idist_running_average recent; // of the loss
    double start_s, waited_s;     // waited_s: for gradients, after the backward passes
} epoch_report;

// Starts the report of an epoch of `total` batches.
static void report_begin(epoch_report *r, int epoch, uint64_t total) {
    memset(r, 0, sizeof *r);
    snprintf(r->title, sizeof r->title, "Epoch [%d/%d]", epoch, cfg.num_epochs);
    r->bar.title = r->title;
    r->bar.total = total;
    r->start_s = seconds_now();
}

// Moves the bar after a step of `passes` batches, when `done` batches of the epoch are complete.
// Every --log_every_iters steps, updates the loss beside the bar, and logs a line if stderr is not
// a terminal. Collective.
static idist_status report_step(epoch_report *r, uint64_t iteration, uint64_t done, int passes,
                                double loss, double rate) {
    double recent;
    idist_status status;

    idist_mean_update(&r->loss, loss, passes);
    idist_running_average_update(&r->recent, loss);
    if (iteration % (uint64_t)cfg.log_every_iters == 0) {
        status = idist_running_average_compute(&r->recent, &recent, NULL);
        if (status != IDIST_OK) return status;
        snprintf(r->text, sizeof r->text, "loss=%.4f rate=%.4f", recent, rate);
        if (!isatty(STDERR_FILENO))
            idist_train_log(NAME, "%s: [%d/%d] %s", r->title, (int)done, (int)r->bar.total,
                            r->text);
    }
    idist_progress_update(&r->bar, done, r->text);

    return IDIST_OK;
}

// Logs the epoch. Sets *loss to the mean over the epoch and over all ranks. Collective.
static idist_status report_epoch(const epoch_report *r, uint64_t images, double *loss) {
    double seconds = seconds_now() - r->start_s;
    idist_status status = idist_mean_compute(&r->loss, loss, NULL);

    if (status != IDIST_OK) return status;
    idist_train_log(NAME, "%s: loss %.4f, %.0f images/s, %.1f %% of the time in wait for gradients",
                    r->title, *loss, (double)images / seconds, 100 * r->waited_s / seconds);

    return IDIST_OK;
}

// ---- checksums ----

// Continues the FNV-1a hash `hash` over more data.
static uint64_t hash_bytes(uint64_t hash, const void *data, size_t nbytes) {
    const unsigned char *p = (const unsigned char *)data;

    while (nbytes--) hash = (hash ^ *p++) * 0x100000001b3u;

    return hash;
}

static uint64_t hash_weights(const net *n) {
    return hash_bytes(0xcbf29ce484222325u, n->values, n->n_values * sizeof(float));
}

// Returns a hash of everything that must be the same on all ranks, and in a training and its
// checkpoint.
static uint64_t hash_job(const image_set *train) {
    int numbers[] = {cfg.seed, cfg.batch_size * cfg.accumulate, cfg.width, train->side};
    uint64_t hash = hash_bytes(0xcbf29ce484222325u, train->labels, (size_t)train->count);

    hash = hash_bytes(hash, numbers, sizeof numbers);

    return hash_bytes(hash, cfg.model, strlen(cfg.model));
}

// Checks that all ranks have the same value. If not, rank 0 prints which rank has a different
// `what`, and all ranks return 2. Collective.
static int compare_ranks(uint64_t value, const char *what) {
    int n = idist_get_world_size(), other = -1;
    uint64_t *all = (uint64_t *)malloc((size_t)n * sizeof *all);
    idist_status status =
        all ? idist_all_gather(&value, all, 1, IDIST_U64, NULL) : IDIST_ERR_NO_MEMORY;

    for (int r = n - 1; r > 0 && status == IDIST_OK; r--)
        if (all[r] != all[0]) other = r;
    free(all);
    CHECK(status);

    if (other < 0) return 0;
    refuse("rank %d has other %s than rank 0", other, what);
    CHECK(idist_barrier(NULL)); // no rank exits before the error is printed
    return 2;
}

// ---- the beginning and the end ----

static void report_configuration(const image_set *train, const image_set *test, const net *n,
                                 int buckets) {
    char text[256];

    idist_train_log(NAME, "Train %s on %s: %d images to train, %d to test", cfg.model, cfg.images,
                    train->count, test->count);
    idist_train_log_config(NAME);
    idist_train_log(NAME, "Configuration:");
    for (const option_row *row = OPTIONS; row < OPTIONS + OPTION_COUNT; row++)
        idist_train_log(NAME, "\t%s: %s", row->name, option_text(row, text, sizeof text));
    idist_train_log(NAME, "%zu parameters in %d buckets; batch %d per rank", n->n_values, buckets,
                    idist_auto_batch_size(cfg.batch_size));
}

// Reports the end of the training. `best` is below 0 if there was no validation.
static void report_result(bool stopped, uint64_t iterations, double seconds, double best,
                          const net *n) {
    char text[40] = "Not validated yet";

    if (best >= 0) snprintf(text, sizeof text, "Best accuracy %.4f", best);
    idist_train_log(NAME, "%s after %" PRIu64 " iterations, %.1f s",
                    stopped ? "Stopped" : "Trained", iterations, seconds);
    idist_train_log(NAME, "%s; checksum of the weights %016" PRIx64 " on all %d ranks", text,
                    hash_weights(n), idist_get_world_size());
}

#endif // CIFAR10_REPORT_H
