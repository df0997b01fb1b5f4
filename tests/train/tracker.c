// tracker.c - writes runs into MLflow's file store with examples/lib/mlflow.h, for tracker.sh
//
//     tracker values      all kinds of values
//     tracker comma       the same in a locale whose decimal point is a comma, if it can be created
//     tracker killed      the process kills itself in the middle of a run
//     tracker full        the disk is full for a while
//     tracker names       names that MLflow does not accept
//
// The store is mlruns in the current folder. Ends with status 0, or prints an error.
#include "idist_train.h"
#include "mlflow.h"

#include "check.h"
#include "comma.h"

#include <float.h>
#include <math.h>
#include <signal.h>
#include <sys/resource.h>

// Expects a status of a call.
#define WANT(status, call)                                                           \
    do {                                                                             \
        if ((call) != (status)) {                                                    \
            fprintf(stderr, "%s: not %s: %s\n", #call, #status, idist_last_error()); \
            return 1;                                                                \
        }                                                                            \
    } while (0)

static int add_values(idist_summary *summary) {
    const double values[] = {0,
                             -0.0,
                             0.1,
                             1.0 / 3,
                             1e300,
                             -5e-324,
                             DBL_MAX,
                             DBL_MIN,
                             16777217,
                             0.30000000000000004,
                             (double)NAN,
                             (double)INFINITY,
                             -(double)INFINITY,
                             -(double)NAN,
                             1};

    for (uint64_t i = 0; i < sizeof values / sizeof *values; i++) {
        CHECK(idist_summary_add(summary, "train/loss", values[i], i));
        CHECK(idist_summary_add(summary, "a b/c:d_e-f.g", values[i], INT64_MAX - i));
    }
    return 0;
}

// Lets files grow to `nbytes` bytes. 0 removes the limit.
static void limit_files(rlim_t nbytes) {
    struct rlimit limit;

    getrlimit(RLIMIT_FSIZE, &limit);
    limit.rlim_cur = nbytes ? nbytes : limit.rlim_max;
    setrlimit(RLIMIT_FSIZE, &limit);
}

// The third value and a new metric do not fit. The fourth value does, since there is space again.
static int fill_disk(idist_summary *summary) {
    signal(SIGXFSZ, SIG_IGN); // a write fails with EFBIG instead
    CHECK(idist_summary_add(summary, "train/loss", 0.5, 0));
    CHECK(idist_summary_add(summary, "train/loss", 0.25, 1)); // 20 bytes or more per line
    limit_files(45);
    WANT(IDIST_ERR_CALLBACK, idist_summary_add(summary, "train/loss", 0.30000000000000004, 2));
    limit_files(5);
    WANT(IDIST_ERR_CALLBACK, idist_summary_add(summary, "new", 1, 2));
    limit_files(0);
    CHECK(idist_summary_add(summary, "train/loss", 0.125, 3));
    return 0;
}

static int add_names(idist_summary *summary) {
    static const char *const names[] = {
        "../outside", "a/../../outside", "/outside", "a//b", "a/./b", "..", "a/", "a\nb", "a\"b",
        "a,b",        "\xc3\xa9",        "loss\\b"};
    char longest[252];

    memset(longest, 'x', sizeof longest);
    longest[251] = 0;
    WANT(IDIST_ERR_CALLBACK, idist_summary_add(summary, longest, 1, 0));
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        WANT(IDIST_ERR_CALLBACK, idist_summary_add(summary, names[i], 1, 0));
    CHECK(idist_summary_add(summary, longest + 1, 1, 0));
    CHECK(idist_summary_add(summary, "a/b", 1, 0));
    WANT(IDIST_ERR_CALLBACK, idist_summary_add(summary, "a", 1, 0)); // a folder
    WANT(IDIST_ERR_CALLBACK, idist_summary_add(summary, "a/b/c", 1, 0));
    return 0;
}

static int kill_run(idist_summary *summary, const mlflow_run *run) {
    FILE *f;

    CHECK(idist_summary_add(summary, "train/loss", 0.5, 0));
    f = fopen(run->part, "w"); // a file that was not renamed yet
    if (!f || fputs("1769801", f) < 0 || fclose(f) != 0) return 1;
    raise(SIGKILL);
    return 1;
}

int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "";
    idist_summary_desc desc = {0};
    idist_summary *summary;
    mlflow_run run;
    bool all = strcmp(mode, "values") == 0 || strcmp(mode, "comma") == 0;
    bool comma = strcmp(mode, "comma") == 0 && locale_begin("<U002C>", "1,5");
    int failed;

    TRY(mlflow_begin(&run, "mlruns", "an experiment", mode));
    desc.folder = run.artifacts;
    desc.track = mlflow_track;
    desc.arg = &run;
    desc.no_csv = desc.no_tensorboard = !all;
    CHECK(idist_summary_create(&desc, &summary));
    if (all) failed = add_values(summary);
    else if (strcmp(mode, "killed") == 0) failed = kill_run(summary, &run);
    else if (strcmp(mode, "full") == 0) failed = fill_disk(summary);
    else failed = add_names(summary);
    CHECK(idist_summary_free(&summary));
    TRY(mlflow_end(&run, failed != 0));
    if (comma) locale_end();
    return failed;
}
