// digits_job.h - the job of a rank: its options, images and state
#ifndef EXAMPLES_DIGITS_JOB_H
#define EXAMPLES_DIGITS_JOB_H

#include "../../lib/arguments.h"
#include "convnet.h"

enum { DEFAULT_EPOCHS = 30, DEFAULT_BATCH = 64 };

// State from which a training run resumes. The shuffles depend only on seed and epoch, so the state
// does not include them.
typedef struct job_state {
    int64_t done; // epochs completed
    double w[PARAMS], speed[PARAMS];
} job_state;

// The job of one rank.
typedef struct job {
    int wanted_ranks, epochs, batch; // wanted_ranks is 0 if not given
    uint64_t seed;
    const char *path;       // of the images, or NULL to look for them
    const char *checkpoint; // file, or NULL
    const char *curves;     // folder for losses and accuracies, or NULL

    digit_list train, test;
    int *order;     // the training images of an epoch, shuffled
    bool bad_input; // true if the images could not be read

    int rank, ranks;
    job_state state;
    double sums[SUMS]; // gradient, loss and hits of a batch
    double loss, hits; // sums over the epoch so far
    double epoch_start_s, start_s, comm_s;
    struct idist_summary *summary;
    int exit_code; // of the worker
} job;

static inline void job_usage(FILE *out) {
    fprintf(out,
            "usage: digits [options]\n"
            "  --ranks N    processes to start; default: one per core, at least 2. Under a "
            "launcher: leave it out\n"
            "  --epochs N   times to go through the training images; default %d\n"
            "  --batch N    images per step, over all ranks together; default %d\n"
            "  --seed N     of the first weights and of the shuffles; default 1\n"
            "  --data PATH  the images; default: examples/data/digits.csv\n"
            "  --checkpoint FILE  written after each epoch; when it is there at the start, "
            "training goes on from it\n"
            "  --summary FOLDER   writes loss and accuracy of each epoch there: scalars.csv, and "
            "for TensorBoard\n"
            "  --help       this text\n",
            DEFAULT_EPOCHS, DEFAULT_BATCH);
}

// Reads the options. Returns -1 if the program continues. After --help, or for a bad option,
// returns the program's exit code.
static inline int job_options(job *j, int argc, char **argv) {
    static const char *const names[] = {"--ranks", "--epochs",     "--batch",  "--seed",
                                        "--data",  "--checkpoint", "--summary"};
    static const uint64_t min[] = {1, 1, 1, 0};
    static const uint64_t max[] = {1024, 100000, DIGITS_MAX, UINT64_MAX};
    uint64_t numbers[] = {0, DEFAULT_EPOCHS, DEFAULT_BATCH, 1};

    for (int i = 1; i < argc; i += 2) {
        int k = 0;

        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) return job_usage(stdout), 0;
        while (k < 7 && strcmp(argv[i], names[k])) k++;
        if (k == 7) fprintf(stderr, "unknown option %s\n", argv[i]);
        if (k == 7) return job_usage(stderr), 2;
        if (i + 1 == argc) return fprintf(stderr, "%s needs a value\n", argv[i]), 2;
        if (k < 4 && !option_number(names[k], argv[i + 1], min[k], max[k], &numbers[k])) return 2;
        if (k == 4) j->path = argv[i + 1];
        if (k == 5) j->checkpoint = argv[i + 1];
        if (k == 6) j->curves = argv[i + 1];
    }
    j->wanted_ranks = (int)numbers[0];
    j->epochs = (int)numbers[1];
    j->batch = (int)numbers[2];
    j->seed = numbers[3];
    return -1;
}

// Reads the images. Prints an error and returns false on failure.
static inline bool job_input(job *j, const char *program) {
    if (!j->path) j->path = digits_find(program);
    if (!j->path) {
        fprintf(stderr, "examples/data/digits.csv not found here, beside the source or beside the "
                        "program; give it with --data PATH\n");
        return false;
    }
    if (!digits_read(j->path, &j->train, &j->test)) return false;
    j->order = (int *)malloc((size_t)j->train.count * sizeof *j->order);
    if (j->order && j->batch <= j->train.count) return true;
    if (!j->order) fprintf(stderr, "out of memory\n");
    else
        fprintf(stderr, "--batch %d is more than the %d training images\n", j->batch,
                j->train.count);
    return false;
}

// Returns a hash of everything that makes two training runs the same: seed, epochs, batch and
// training images.
static inline uint64_t job_fingerprint(const job *j) {
    uint64_t numbers[3];

    numbers[0] = j->seed;
    numbers[1] = (uint64_t)j->epochs;
    numbers[2] = (uint64_t)j->batch;
    return fnv1a(fnv1a(FNV_START, numbers, sizeof numbers), j->train.at,
                 (size_t)j->train.count * sizeof *j->train.at); // bytes only, so no padding
}

// Returns a hash of everything that the ranks must have in common, or 0 on a rank without images.
static inline uint64_t job_identity(const job *j) {
    int options[2] = {j->wanted_ranks, j->curves != NULL};

    return j->bad_input ? 0 : fnv1a(job_fingerprint(j), options, sizeof options);
}

// Returns true if the launcher's world does not have the number of ranks that --ranks asks for.
// Each rank prints the error, because a launcher may end the other ranks as soon as one fails.
static inline bool job_is_contradicted(const job *j) {
    if (!j->wanted_ranks || j->wanted_ranks == j->ranks) return false;
    fprintf(stderr, "--ranks %d, but the launcher made a world of %d: leave --ranks out\n",
            j->wanted_ranks, j->ranks);
    return true;
}

// Returns the number of ranks to start. Without --ranks it is one per core, at most one per image
// of a batch, but at least 2. A rank without an image in a batch would be idle.
static inline int job_ranks(const job *j) {
    long cores = sysconf(_SC_NPROCESSORS_ONLN);

    if (j->wanted_ranks) return j->wanted_ranks;
    if (cores > j->batch) cores = j->batch;
    return cores > 2 ? (int)cores : 2;
}

#endif // EXAMPLES_DIGITS_JOB_H
