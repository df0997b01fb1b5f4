// digits_print.h - the output of the program
#ifndef EXAMPLES_DIGITS_PRINT_H
#define EXAMPLES_DIGITS_PRINT_H

#include "digits_train.h"

static inline void job_print(const job *j, const char *backend, const char *launcher) {
    int low = j->batch / j->ranks, high = (j->batch + j->ranks - 1) / j->ranks;

    printf("data      %s: %d images, %d to train and %d to test\n", j->path,
           j->train.count + j->test.count, j->train.count, j->test.count);
    printf("model     conv 3x3x%d, conv 3x3x%d, max pool 2x2, dense %d: %d parameters\n", CH, CH,
           CLASSES, PARAMS);
    printf("ranks     %d (backend %s, launcher %s)\n", j->ranks, backend, launcher);
    printf("training  %d epochs, batch %d in all (%d", j->epochs, j->batch, low);
    if (high != low) printf(" or %d", high);
    printf(" per rank), seed %llu\n", (unsigned long long)j->seed);
    fflush(stdout);
}

// Draws a progress bar after `done` images of the epoch, only on a terminal and at most 20 times a
// second.
static inline void job_print_bar(const job *j, int epoch, int done) {
    static double drawn_s;
    int filled = (int)(30LL * done / j->train.count);
    double now = now_s();

    if (!isatty(STDOUT_FILENO) || now - drawn_s < 0.05) return;
    drawn_s = now;
    printf("\r\033[Kepoch %3d/%d [%.*s%.*s] loss %.4f %8.0f samples/s", epoch, j->epochs, filled,
           "##############################", 30 - filled, "..............................",
           j->loss / done, done / (now - j->epoch_start_s));
    fflush(stdout);
}

static inline void job_print_epoch(const job *j, int epoch) {
    int count = j->train.count;

    printf("%sepoch %3d/%d  loss %.6f  train %6.2f %%  %7.0f samples/s\n",
           isatty(STDOUT_FILENO) ? "\r\033[K" : "", epoch, j->epochs, j->loss / count,
           100 * j->hits / count, count / (now_s() - j->epoch_start_s));
    fflush(stdout);
}

// Prints the result. `sums` holds, over all ranks, the sums of hits, of seconds in all_reduce, and
// of seconds in all.
static inline void job_print_result(const job *j, const double *sums, uint64_t hash, bool same) {
    printf("accuracy  %.2f %% (%d of %d test images)\n", 100.0 * sums[0] / j->test.count,
           (int)sums[0], j->test.count);
    printf("time      %.1f s, %.1f %% of it communicating\n", sums[2] / j->ranks,
           100 * sums[1] / sums[2]);
    if (same) printf("checksum 0x%016llx on all %d ranks\n", (unsigned long long)hash, j->ranks);
    if (!job_is_accurate(j, (int)sums[0])) fprintf(stderr, "accuracy is below 97 %%\n");
    fflush(stdout);
}

#endif // EXAMPLES_DIGITS_PRINT_H
