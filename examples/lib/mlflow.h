// mlflow.h - writes a training run into MLflow's file store; include idist_train.h first
//
// STORE is a folder such as mlruns, EXPERIMENT a number, and RUN has 32 hexadecimal digits:
//
//     STORE/EXPERIMENT/meta.yaml             name of the experiment
//     STORE/EXPERIMENT/RUN/meta.yaml         name, status and times of the run
//                          params/NAME       a text
//                          tags/NAME         a text
//                          metrics/NAME      a line per value: milliseconds since 1970, value, step
//                          artifacts/        any files
//
// A name such as train/loss is a path: metrics/train is a folder. MLflow cannot read a run that has
// an empty meta.yaml or a metric without a line. So a new file gets its name when it is complete,
// and MLflow can read the store while the program runs and after the program is killed.
//
// The functions return 0, or print an error and return 1.
#ifndef EXAMPLES_MLFLOW_H
#define EXAMPLES_MLFLOW_H

#include "numbers.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { MLFLOW_PATH = 1024, MLFLOW_URI = 3 * MLFLOW_PATH + 8, MLFLOW_NAME = 250 };

#define MLFLOW_PLAIN "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-/"

typedef enum mlflow_status { // MLflow's numbers
    MLFLOW_RUNNING = 1,
    MLFLOW_FINISHED = 3,
    MLFLOW_FAILED = 4
} mlflow_status;

typedef struct mlflow_run {
    char experiment[24], id[33], name[MLFLOW_NAME + 1];
    char folder[MLFLOW_PATH];         // absolute
    char artifacts[MLFLOW_PATH + 16]; // a folder in `folder`, for the files of the program
    char part[MLFLOW_PATH + 16];      // name of a file that is not complete
    long long start_ms;
} mlflow_run;

// ---- files ----

static inline int mlflow_fail(const char *path) {
    fprintf(stderr, "%s: %s\n", path, strerror(errno));
    return 1;
}

// Checks a name. MLflow also accepts letters outside ASCII, and a dot after a slash.
static inline int mlflow_check_name(const char *name) {
    size_t n = strlen(name);

    if (n >= 1 && n <= MLFLOW_NAME && strspn(name, MLFLOW_PLAIN " :") == n && *name != '.' &&
        *name != '/' && name[n - 1] != '/' && !strstr(name, "//") && !strstr(name, "/."))
        return 0;
    fprintf(stderr,
            "\"%s\": bad name for MLflow: expected 1 to %d letters, digits, spaces and _.-:/, "
            "where no part of the path is empty or begins with a dot\n",
            name, MLFLOW_NAME);
    return 1;
}

// Writes the path of a file of the run to `path`, and creates the folders of the file. `kind` is
// "params", "tags" or "metrics".
static inline int mlflow_path(const mlflow_run *run, const char *kind, const char *name,
                              char path[2 * MLFLOW_PATH]) {
    int n = snprintf(path, 2 * MLFLOW_PATH, "%s/%s/", run->folder, kind);

    if (mlflow_check_name(name)) return 1;
    snprintf(path + n, 2 * MLFLOW_PATH - (size_t)n, "%s", name);
    for (char *at = strchr(path + n, '/'); at; at = strchr(at + 1, '/')) {
        *at = 0;
        if (mkdir(path, 0777) != 0 && errno != EEXIST) return mlflow_fail(path);
        *at = '/';
    }
    return 0;
}

// Creates a file, or replaces it.
static inline int mlflow_put(const mlflow_run *run, const char *path, const char *text) {
    FILE *f = fopen(run->part, "w");
    bool ok = f && fputs(text, f) >= 0;

    if (f && fclose(f) != 0) ok = false;
    return ok && rename(run->part, path) == 0 ? 0 : mlflow_fail(path);
}

// Appends a line to a file, normally with one write. If the disk is full, removes an incomplete
// line.
static inline int mlflow_append(const char *path, const char *line) {
    size_t nbytes = strlen(line), done = 0;
    int file = open(path, O_WRONLY | O_APPEND), error = 0;
    ssize_t n;
    off_t end;

    if (file < 0) return mlflow_fail(path);
    end = lseek(file, 0, SEEK_END);
    while (done < nbytes && (n = write(file, line + done, nbytes - done)) > 0) done += (size_t)n;
    if (done < nbytes) error = errno;
    if (error && ftruncate(file, end) != 0) error = errno;
    if (close(file) != 0 && !error) error = errno;
    errno = error;
    return error ? mlflow_fail(path) : 0;
}

// ---- the two kinds of meta.yaml ----

static inline long long mlflow_now_ms(void) {
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    return (long long)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

// Writes the URI of a folder. The URI needs no quotes in YAML.
static inline void mlflow_uri(const char *path, char uri[MLFLOW_URI]) {
    char *to = uri + sprintf(uri, "file://");

    for (; *path; path++) {
        if (strchr(MLFLOW_PLAIN "~", *path)) *to++ = *path;
        else to += sprintf(to, "%%%02X", (unsigned)(unsigned char)*path);
    }
    *to = 0;
}

// Describes an experiment, unless it exists.
static inline int mlflow_put_experiment(const mlflow_run *run, const char *folder, const char *id,
                                        const char *name) {
    char path[2 * MLFLOW_PATH], uri[MLFLOW_URI], text[MLFLOW_URI + MLFLOW_PATH];
    long long now = mlflow_now_ms();

    if (mkdir(folder, 0777) != 0 && errno != EEXIST) return mlflow_fail(folder);
    snprintf(path, sizeof path, "%s/meta.yaml", folder);
    if (access(path, F_OK) == 0) return 0;
    mlflow_uri(folder, uri);
    snprintf(text, sizeof text,
             "artifact_location: %s\ncreation_time: %lld\nexperiment_id: '%s'\n"
             "last_update_time: %lld\nlifecycle_stage: active\nname: '%s'\n",
             uri, now, id, now, name);
    return mlflow_put(run, path, text);
}

// Describes the run. The program calls this function when the status changes.
static inline int mlflow_set_status(const mlflow_run *run, mlflow_status status) {
    char path[2 * MLFLOW_PATH], uri[MLFLOW_URI], end[32], text[MLFLOW_URI + MLFLOW_PATH];

    snprintf(path, sizeof path, "%s/meta.yaml", run->folder);
    snprintf(end, sizeof end, "%lld", mlflow_now_ms());
    if (status == MLFLOW_RUNNING) strcpy(end, "null");
    mlflow_uri(run->artifacts, uri);
    snprintf(text, sizeof text,
             "artifact_uri: %s\nend_time: %s\nentry_point_name: ''\nexperiment_id: '%s'\n"
             "lifecycle_stage: active\nrun_id: '%s'\nrun_name: '%s'\nsource_name: ''\n"
             "source_type: 4\nsource_version: ''\nstart_time: %lld\nstatus: %d\ntags: []\n"
             "user_id: ''\n",
             uri, end, run->experiment, run->id, run->name, run->start_ms, (int)status);
    return mlflow_put(run, path, text);
}

// ---- a run ----

// Writes 32 random hexadecimal digits.
static inline int mlflow_draw_id(char id[33]) {
    unsigned char bytes[16];
    FILE *f = fopen("/dev/urandom", "r");
    bool ok = f && fread(bytes, 1, sizeof bytes, f) == sizeof bytes;

    if (!ok) mlflow_fail("/dev/urandom");
    if (f) fclose(f);
    for (int i = 0; ok && i < 16; i++) snprintf(id + 2 * i, 3, "%02x", bytes[i]);
    return !ok;
}

// Creates the folders of the run and of its experiment. `root` is the absolute path of the store.
static inline int mlflow_make_folders(mlflow_run *run, const char *root, const char *experiment) {
    static const char *const folders[] = {"", "/params", "/tags", "/metrics", "/artifacts"};
    char path[MLFLOW_PATH + 16], zero[MLFLOW_PATH + 16];
    int n = snprintf(run->folder, sizeof run->folder, "%s/%s/%s", root, run->experiment, run->id);

    errno = ENAMETOOLONG;
    if (n >= (int)sizeof run->folder) return mlflow_fail(root);
    snprintf(run->artifacts, sizeof run->artifacts, "%s/artifacts", run->folder);
    snprintf(run->part, sizeof run->part, "%s/part", run->folder);
    snprintf(zero, sizeof zero, "%s/0", root);
    snprintf(path, sizeof path, "%s/%s", root, run->experiment);
    if (mkdir(path, 0777) != 0 && errno != EEXIST) return mlflow_fail(path);
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
        snprintf(path, sizeof path, "%s%s", run->folder, folders[i]);
        if (mkdir(path, 0777) != 0) return mlflow_fail(path);
    }
    snprintf(path, sizeof path, "%s/%s", root, run->experiment);
    return mlflow_put_experiment(run, zero, "0", "Default") || // as MLflow does
           mlflow_put_experiment(run, path, run->experiment, experiment);
}

// Sets a parameter or a tag to a text of up to 999 bytes. `kind` is "params" or "tags".
static inline int mlflow_set(const mlflow_run *run, const char *kind, const char *name,
                             const char *format, ...) {
    char path[2 * MLFLOW_PATH], text[1000];
    va_list args;
    int n;

    va_start(args, format);
    n = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    errno = EOVERFLOW;
    if (n < 0 || n >= (int)sizeof text) return mlflow_fail(name);
    return mlflow_path(run, kind, name, path) || mlflow_put(run, path, text);
}

// Begins a run in an experiment. Creates the store and the experiment if they do not exist. The
// number of the experiment is a hash of its name. MLflow itself draws the number at random, so the
// name must not be that of an experiment that MLflow has created.
static inline int mlflow_begin(mlflow_run *run, const char *store, const char *experiment,
                               const char *name) {
    uint64_t hash = fnv1a(FNV_START, experiment, strlen(experiment));
    char *root;
    int failed;

    memset(run, 0, sizeof *run);
    if (mlflow_check_name(experiment) || mlflow_check_name(name)) return 1;
    snprintf(run->name, sizeof run->name, "%s", name);
    snprintf(run->experiment, sizeof run->experiment, "%llu",
             (unsigned long long)hash % 1000000000000000000u);
    run->start_ms = mlflow_now_ms();
    if (mkdir(store, 0777) != 0 && errno != EEXIST) return mlflow_fail(store);
    root = realpath(store, NULL);
    if (!root) return mlflow_fail(store);
    failed = mlflow_draw_id(run->id) || mlflow_make_folders(run, root, experiment) ||
             mlflow_set(run, "tags", "mlflow.runName", "%s", name) ||
             mlflow_set(run, "tags", "mlflow.source.type", "LOCAL") ||
             mlflow_set_status(run, MLFLOW_RUNNING);
    free(root);
    return failed;
}

// Adds a value to a metric. This is a function for idist_summary_desc.track; arg is the mlflow_run.
static inline int mlflow_track(const idist_scalar *scalar, void *arg) {
    const mlflow_run *run = (const mlflow_run *)arg;
    char path[2 * MLFLOW_PATH], line[100], *comma;

    snprintf(line, sizeof line, "%lld %.17g %llu\n", (long long)(scalar->wall_time * 1000 + 0.5),
             scalar->value, (unsigned long long)scalar->step); // reads as the same double
    comma = strchr(line, ',');                                 // the decimal point of some locales
    if (comma) *comma = '.';
    if (mlflow_path(run, "metrics", scalar->tag, path)) return 1;
    return access(path, F_OK) == 0 ? mlflow_append(path, line) : mlflow_put(run, path, line);
}

// Ends a run. MLflow shows a run that the program did not end as running.
static inline int mlflow_end(const mlflow_run *run, bool failed) {
    return mlflow_set_status(run, failed ? MLFLOW_FAILED : MLFLOW_FINISHED);
}

#endif // EXAMPLES_MLFLOW_H
