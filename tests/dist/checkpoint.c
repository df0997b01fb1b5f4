// checkpoint.c - idist_checkpoint_save, _load and _find: all ranks get back what was saved, and the
// best and the latest files are kept. Files are truncated, foreign or damaged, disks are full, and
// a save crashes at every step. A training run that resumes from a checkpoint must give the same
// bits.
//
// Reads and the calls that change the disk pass through the functions below. Tests use these
// functions to record the order of the calls and to make one of them fail.
#define pread step_pread
#define pwrite step_pwrite
#define fsync step_fsync
#define renameat step_renameat
#define unlinkat step_unlinkat
#define openat step_openat
#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "idist_train.h"

#include "ranks.h"

#include <sys/stat.h>

static struct {
    bool armed;
    int at, crash_at, fail_at; // steps count from 1; 0 for none
    int fail_errno;
    // Number of reads so far, and the number of the read that returns a wrong first byte.
    int reads, lie_at;
    char order[64]; // the steps: w (write), f (fsync), r (rename), u (unlink)
} steps;

// Counts a step of a save. Returns true if the step must fail. Ends the process if it must crash at
// this step.
static bool step(char letter) {
    if (!steps.armed) return false;
    size_t n = strlen(steps.order);
    if (n + 1 < sizeof steps.order && (!n || steps.order[n - 1] != letter || letter != 'w'))
        steps.order[n] = letter;
    steps.at++;
    if (steps.at == steps.crash_at) _exit(55);
    errno = steps.fail_errno;
    return steps.at == steps.fail_at;
}

static struct {
    int fail_errno; // error when checkpoint_2 is opened, or for EIO when it is read; 0 for none
    int broken_fd;
} reads = {0, -1};

ssize_t step_pread(int fd, void *data, size_t nbytes, off_t at) {
    if (reads.fail_errno == EIO && fd == reads.broken_fd) {
        errno = EIO;
        return -1;
    }
    ssize_t n = syscall(SYS_pread64, fd, data, nbytes, at);
    if (++steps.reads == steps.lie_at) ++*(char *)data;
    return n;
}

ssize_t step_pwrite(int fd, const void *data, size_t nbytes, off_t at) {
    if (step('w')) return -1;
    if (steps.armed && nbytes > 1000) nbytes = 1000; // so that a crash can happen in the middle
    return syscall(SYS_pwrite64, fd, data, nbytes, at);
}

int step_openat(int folder, const char *name, int flags, ...) {
    bool broken = reads.fail_errno && strncmp(name, "checkpoint_2_", 13) == 0;
    va_list args;
    va_start(args, flags);
    int mode = flags & O_CREAT ? va_arg(args, int) : 0;
    va_end(args);
    errno = reads.fail_errno;
    if (broken && errno != EIO) return -1;
    int fd = (int)syscall(SYS_openat, folder, name, flags, mode);
    if (broken) reads.broken_fd = fd;
    return fd;
}

static struct {
    int of_files, of_folders; // errno with which fsync fails; 0 if it succeeds
    int interrupted;          // number of times that fsync fails with EINTR first
} syncs;

int step_fsync(int fd) {
    struct stat about;
    if (step('f')) return -1;
    TAP_REQUIRE(fstat(fd, &about) == 0);
    errno = syncs.interrupted > 0    ? EINTR
            : S_ISDIR(about.st_mode) ? syncs.of_folders
                                     : syncs.of_files;
    if (syncs.interrupted > 0) syncs.interrupted--;
    return errno ? -1 : (int)syscall(SYS_fsync, fd);
}

int step_renameat(int from, const char *a, int to, const char *b) {
    return step('r') ? -1 : (int)syscall(SYS_renameat, from, a, to, b);
}

int step_unlinkat(int folder, const char *name, int flags) {
    return step('u') ? -1 : (int)syscall(SYS_unlinkat, folder, name, flags);
}

static char said[1000]; // the last log line about checkpoints

static void note_line(idist_log_level level, const char *line, void *user) {
    (void)user;
    (void)level;
    if (strstr(line, "checkpoint")) copy_text(said, sizeof said, line);
}

static char folder[64]; // a new one for each test

static void new_folder(void) {
    snprintf(folder, sizeof folder, "/tmp/idist-checkpoint-XXXXXX");
    TAP_REQUIRE(mkdtemp(folder));
}

static void remove_folder(void) {
    DIR *dir = opendir(folder);
    TAP_REQUIRE(dir);
    for (struct dirent *e = readdir(dir); e; e = readdir(dir))
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0)
            unlinkat(dirfd(dir), e->d_name, 0);
    closedir(dir);
    TAP_REQUIRE(rmdir(folder) == 0);
}

static const char *in_folder(const char *name) {
    static __thread char path[400];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static idist_checkpoint_desc desc_of(int keep) {
    idist_checkpoint_desc d;
    memset(&d, 0, sizeof d);
    d.folder = folder;
    d.keep = keep;
    return d;
}

static void put_file(const char *path, const void *data, size_t nbytes) {
    FILE *f = fopen(path, "wb");
    TAP_REQUIRE(f && fwrite(data, 1, nbytes, f) == nbytes && fclose(f) == 0);
}

static size_t get_file(const char *path, void *data, size_t capacity) {
    FILE *f = fopen(path, "rb");
    TAP_REQUIRE(f);
    size_t n = fread(data, 1, capacity, f);
    fclose(f);
    return n;
}

//------------------------------------------------------------------------------
// what is saved comes back
//------------------------------------------------------------------------------

enum { N_TENSORS = 5 };
typedef struct model {
    unsigned char bytes[N_TENSORS][700001];
    idist_tensor tensors[N_TENSORS];
    struct {
        uint64_t epoch;
        double rate;
        char name[5];
    } info;
} model;

static model *model_new(int fill) {
    static const size_t counts[N_TENSORS] = {7, 0, 80001, 350000, 1};
    static const idist_dtype dtypes[N_TENSORS] = {IDIST_F32, IDIST_F64, IDIST_F64, IDIST_BF16,
                                                  IDIST_U8};
    model *m = (model *)malloc(sizeof *m);
    TAP_REQUIRE(m);
    memset(&m->info, fill, sizeof m->info);
    for (int i = 0; i < N_TENSORS; i++) {
        for (size_t j = 0; j < sizeof m->bytes[i]; j++)
            m->bytes[i][j] = (unsigned char)tap_mix(j * 8 + (size_t)(i + fill));
        m->tensors[i].data = m->bytes[i] + (i == 2); // not aligned
        m->tensors[i].count = counts[i];
        m->tensors[i].dtype = dtypes[i];
    }
    return m;
}

static bool model_equal(const model *a, const model *b) {
    return memcmp(a->bytes, b->bytes, sizeof a->bytes) == 0 &&
           memcmp(&a->info, &b->info, sizeof a->info) == 0;
}

static void round_trip(idist_group *world, int rank, int n, void *arg) {
    idist_checkpoint_desc d = desc_of(1);
    idist_opts o = opts_of(world);
    model *want = model_new(3), *got = model_new(rank + 10);
    char path[300];
    (void)n;
    (void)arg;
    // The bytes after the end of a tensor are not part of the tensor.
    for (int i = 0; i < N_TENSORS; i++) {
        size_t nbytes =
            want->tensors[i].count * idist_dtype_size(want->tensors[i].dtype) + (i == 2);
        memcpy(got->bytes[i] + nbytes, want->bytes[i] + nbytes, sizeof got->bytes[i] - nbytes);
        if (i == 2) got->bytes[i][0] = want->bytes[i][0];
    }
    model *saved = rank == 0 ? want : got; // tensors of ranks other than 0 are not read
    rank_ok(rank, idist_checkpoint_save(&d, 12, 0.5, saved->tensors, N_TENSORS,
                                        rank ? NULL : &want->info, sizeof want->info, &o));
    rank_ok(rank, idist_checkpoint_find(&d, false, path, sizeof path, &o));
    rank_check(strcmp(path, in_folder("checkpoint_12_score=0.5.idist")) == 0, "rank %d: found %s",
               rank, path);
    rank_ok(rank, idist_checkpoint_load(rank ? NULL : path, got->tensors, N_TENSORS, &got->info,
                                        sizeof got->info, &o));
    rank_check(model_equal(want, got), "rank %d: other bytes came back", rank);
    free(want);
    free(got);
}

//------------------------------------------------------------------------------
// which files are kept
//------------------------------------------------------------------------------

static float weights[3];
static const idist_tensor small = {weights, 3, IDIST_F32};

static bool is_there(const char *name) { return access(in_folder(name), F_OK) == 0; }

static void keeps_best(idist_group *world, int rank, int n, void *arg) {
    static const double scores[6] = {0.5, 0.7, 0.6, 0.7, 0.1, 0.65};
    idist_checkpoint_desc d = desc_of(2);
    idist_opts o = opts_of(world);
    char path[300];
    (void)n;
    d.low_is_best = arg != NULL;
    for (uint64_t i = 0; i < 6; i++)
        rank_ok(rank, idist_checkpoint_save(&d, i, d.low_is_best ? -scores[i] : scores[i], &small,
                                            1, NULL, 0, &o));
    rank_ok(rank, idist_checkpoint_find(&d, false, path, sizeof path, &o));
    rank_check(strstr(path, "checkpoint_3_"),
               "rank %d: of equal scores the later one is the best, not %s", rank, path);
    if (rank == 0)
        rank_check(count_entries(folder, "") == 2, "%d files", count_entries(folder, ""));
    const char *second =
        d.low_is_best ? "checkpoint_1_score=-0.7.idist" : "checkpoint_1_score=0.7.idist";
    if (rank == 0) rank_check(is_there(second), "%s is not there", second);
    rank_is(rank, idist_checkpoint_find(&d, false, path, rank == n - 1 ? 20 : sizeof path, &o),
            IDIST_ERR_TRUNCATED);
    d.prefix = "check";
    rank_is(rank, idist_checkpoint_find(&d, false, path, sizeof path, &o), IDIST_ERR_NOT_FOUND);
    d.prefix = NULL;
    d.keep = -1;
    for (uint64_t i = 10; i < 13; i++)
        rank_ok(rank, idist_checkpoint_save(&d, i, 0.25, &small, 1, NULL, 0, &o));
    rank_ok(rank, idist_checkpoint_find(&d, true, path, sizeof path, &o));
    rank_check(strstr(path, "checkpoint_12_score=0.25.idist"), "rank %d: the latest is not %s",
               rank, path);
    if (rank == 0)
        rank_check(count_entries(folder, "") == 5, "%d files", count_entries(folder, ""));
}

// A step and its score, which together name a file. A step of 0 ends a list of files.
typedef struct state {
    uint64_t step;
    double score;
} state;

// Returns true if the folder holds the files of these steps and scores, and no other files.
static bool has_only(const state *files) {
    int n = 0;
    for (; files[n].step; n++) {
        char name[100];
        snprintf(name, sizeof name, "checkpoint_%d_score=%g.idist", (int)files[n].step,
                 files[n].score);
        if (is_there(name)) continue;
        tap_diag("%s is not there", name);
        return false;
    }
    if (count_entries(folder, "") != n) tap_diag("%d files", count_entries(folder, ""));
    return count_entries(folder, "") == n;
}

// Keeps the best file and the two latest ones. The cases cover a file that is both the best and one
// of the latest, steps that go down, and a bad score. They also save a step again, with a better or
// a worse score.
static void keeps_latest(idist_group *world, int rank, int n, void *arg) {
    static const struct {
        state save, files[5];
    } cases[] = {
        {{1, 0.75}, {{1, 0.75}}},
        {{2, 0.5}, {{1, 0.75}, {2, 0.5}}},
        {{3, 0.25}, {{1, 0.75}, {2, 0.5}, {3, 0.25}}},
        {{4, 0.125}, {{1, 0.75}, {3, 0.25}, {4, 0.125}}},
        {{5, 0.875}, {{4, 0.125}, {5, 0.875}}},
        {{2, 0.25}, {{4, 0.125}, {5, 0.875}}},
        {{3, 0.9375}, {{3, 0.9375}, {4, 0.125}, {5, 0.875}}},
        {{5, 0.25}, {{3, 0.9375}, {4, 0.125}, {5, 0.25}}},
        {{5, 0.5}, {{3, 0.9375}, {4, 0.125}, {5, 0.5}}},
        {{6, -8}, {{3, 0.9375}, {5, 0.5}, {6, -8}}},
        {{7, 0.9375}, {{6, -8}, {7, 0.9375}}},
        {{7, -9}, {{6, -8}, {7, -9}}},
        {{3, -9}, {{6, -8}, {7, -9}}},
        {{7, 0.9375}, {{6, -8}, {7, 0.9375}}},
    };
    idist_checkpoint_desc d = desc_of(1);
    idist_opts o = opts_of(world);
    char path[300];
    d.low_is_best = arg != NULL;
    d.keep_latest = 2;
    (void)n;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        state files[5];
        double sign = d.low_is_best ? -1 : 1;
        memcpy(files, cases[i].files, sizeof files);
        for (int k = 0; k < 5; k++) files[k].score *= sign;
        rank_ok(rank, idist_checkpoint_save(&d, cases[i].save.step, sign * cases[i].save.score,
                                            &small, 1, NULL, 0, &o));
        if (rank == 0) rank_check(has_only(files), "case %d: other files", (int)i);
    }
    rank_ok(rank, idist_checkpoint_find(&d, false, path, sizeof path, &o));
    rank_check(strstr(path, "checkpoint_7_"), "rank %d: the best is not %s", rank, path);
    d.keep_latest = -1;
    for (uint64_t i = 1; i < 4; i++)
        rank_ok(rank, idist_checkpoint_save(&d, i, 0, &small, 1, NULL, 0, &o));
    if (rank == 0)
        rank_check(count_entries(folder, "") == 5, "%d files", count_entries(folder, ""));
}

// Checks that files of other programs are neither counted nor removed.
static void leaves_others_alone(void) {
    static const char *const names[] = {"checkpoint_1_score=9.idist",
                                        "checkpoint_x_score=9.idist",
                                        "checkpoint_1.idist",
                                        ".checkpoint_7_score=1.idist.tmp",
                                        ".other.tmp",
                                        "checkpoint_2_score=9.idist.old"};
    idist_checkpoint_desc d = desc_of(1);
    char path[300];
    for (int i = 0; i < 6; i++) put_file(in_folder(names[i]), "not a checkpoint", i == 0 ? 0 : 16);
    TAP_REQUIRE(mkfifo(in_folder("checkpoint_3_score=9.idist"), 0600) == 0);
    TAP_REQUIRE(mkdir(in_folder("checkpoint_4_score=9.idist"), 0700) == 0);
    tap_is(idist_checkpoint_find(&d, false, path, sizeof path, NULL), IDIST_ERR_CORRUPT,
           "among other files no valid one");
    tap_like(idist_last_error(), "checkpoint_1_score=9.idist is empty", "one is empty");
    tap_like(idist_last_error(), "checkpoint_3_score=9.idist is not a regular file", "or a pipe");
    tap_like(idist_last_error(), "checkpoint_4_score=9.idist is not a regular file", "or a folder");
    tap_ok(!strstr(idist_last_error(), "checkpoint_2") && !strstr(idist_last_error(), "_x_"),
           "others have other names");
    tap_is(idist_checkpoint_save(&d, 5, 1, &small, 1, NULL, 0, NULL), IDIST_OK,
           "a first one among them");
    char file[1000];
    size_t n = get_file(in_folder("checkpoint_5_score=1.idist"), file, sizeof file);
    put_file(in_folder("checkpoint_5.idist"), file, n);
    file[8 * IDIST__HEADER_SCORE + 6] ^= 1;
    // The score in this header does not match the checksum.
    put_file(in_folder("checkpoint_8_score=9.idist"), file, n);
    tap_is(idist_checkpoint_save(&d, 6, 2, &small, 1, NULL, 0, NULL), IDIST_OK, "a better one");
    tap_ok(is_there("checkpoint_6_score=2.idist") && !is_there("checkpoint_5_score=1.idist"),
           "replaces it");
    steps.armed = true;
    idist_status status = idist_checkpoint_save(&d, 7, 1.5, &small, 1, NULL, 0, NULL);
    steps.armed = false;
    tap_is(status, IDIST_OK, "a worse one");
    tap_ok(steps.order[0] == 0, "is not written at all");
    tap_like(said, "info: checkpoint_save: checkpoint_7_score=1.5.idist is not written to ",
             "and says so");
    tap_like(said, folder, "and where");
    tap_like(said, "checkpoint_6_score=2.idist", "and names what is better");
    said[0] = 0;
    tap_is(idist_checkpoint_save(&d, 5, 1.5, &small, 1, NULL, 0, NULL), IDIST_OK,
           "one of a step before that of a better one");
    tap_like(said, "warning: checkpoint_save: checkpoint_5_score=1.5.idist is not written to ",
             "is a warning");
    tap_like(said, "earlier run", "of another run's files");
    tap_is(count_entries(folder, ""), 10,
           "what a crash left is removed, all other files are there");
    tap_is(idist_checkpoint_load(in_folder("checkpoint_3_score=9.idist"), &small, 1, NULL, 0, NULL),
           IDIST_ERR_ARG, "a pipe is not waited for");
    rmdir(in_folder("checkpoint_4_score=9.idist"));
}

// Checks that a file that cannot be opened or read still counts as present. Otherwise training
// would start from scratch.
static void unreadable(void) {
    idist_checkpoint_desc d = desc_of(-1);
    char path[300];
    for (uint64_t i = 1; i <= 2; i++)
        TAP_REQUIRE(idist_checkpoint_save(&d, i, 1, &small, 1, NULL, 0, NULL) == IDIST_OK);
    TAP_REQUIRE(symlink("nowhere", in_folder("checkpoint_3_score=9.idist")) == 0);
    TAP_REQUIRE(symlink("checkpoint_4_score=9.idist", in_folder("checkpoint_4_score=9.idist")) ==
                0);
    tap_is(idist_checkpoint_find(&d, true, path, sizeof path, NULL), IDIST_OK,
           "links to nowhere are no checkpoints");
    static const int kinds[] = {EACCES, EMFILE, EIO};
    for (int i = 0; i < 3; i++) {
        reads.fail_errno = kinds[i];
        idist_status status = idist_checkpoint_find(&d, i % 2, path, sizeof path, NULL);
        reads.fail_errno = 0;
        tap_is(status, i == 1 ? IDIST_ERR_NO_FDS : IDIST_ERR_SYSTEM,
               "checkpoint_2 cannot be read: %s", strerror(kinds[i]));
        tap_like(idist_last_error(), "/checkpoint_2_score=1.idist: ", "it is named");
        tap_like(idist_last_error(), strerror(kinds[i]), "and why");
    }
}

// Checks that saving a step again replaces its file, whatever the scores are. Scores that are equal
// in six digits give the same name.
static void same_step(void) {
    static const double scores[] = {0.91234567, 0.91234561, 0.91234568, 0.5, 0.75, -1};
    idist_checkpoint_desc d = desc_of(1);
    float x[1] = {0}, y[1] = {0};
    char path[300];
    const idist_tensor from = {x, 1, IDIST_F32}, to = {y, 1, IDIST_F32};
    for (int i = 0; i < 12; i++) {
        x[0] = (float)i;
        d.keep = i < 6 ? 1 : -1;
        d.keep_latest = i % 2;
        TAP_REQUIRE(idist_checkpoint_save(&d, 7, scores[i % 6], &from, 1, NULL, 0, NULL) ==
                    IDIST_OK);
        tap_is(count_entries(folder, ""), 1, "step 7 has one file");
        TAP_REQUIRE(idist_checkpoint_find(&d, i % 2, path, sizeof path, NULL) == IDIST_OK &&
                    idist_checkpoint_load(path, &to, 1, NULL, 0, NULL) == IDIST_OK);
        tap_ok(y[0] == x[0], "the one that was saved last");
    }
    TAP_REQUIRE(idist_checkpoint_save(&d, 8, 1, &from, 1, NULL, 0, NULL) == IDIST_OK);
    tap_is(count_entries(folder, ""), 2, "another step has another file");
    // A crash before the old file is removed leaves two files of this step. The newer file is the
    // latest.
    char old[1000];
    size_t n = get_file(in_folder("checkpoint_8_score=1.idist"), old, sizeof old);
    const struct timespec times[2] = {{1000, 0}, {1000, 0}};
    TAP_REQUIRE(idist_checkpoint_save(&d, 8, 0.5, &from, 1, NULL, 0, NULL) == IDIST_OK);
    put_file(in_folder("checkpoint_8_score=1.idist"), old, n);
    TAP_REQUIRE(utimensat(AT_FDCWD, in_folder("checkpoint_8_score=1.idist"), times, 0) == 0);
    TAP_REQUIRE(idist_checkpoint_find(&d, true, path, sizeof path, NULL) == IDIST_OK);
    tap_like(path, "/checkpoint_8_score=0.5.idist", "of two files of a step the newer one");
    TAP_REQUIRE(idist_checkpoint_save(&d, 8, 0.25, &from, 1, NULL, 0, NULL) == IDIST_OK);
    tap_is(count_entries(folder, ""), 2, "and the next save of the step removes both");
    TAP_REQUIRE(mkdir(in_folder(".checkpoint_7_score=1.idist.tmp"), 0700) == 0);
    tap_is(idist_checkpoint_save(&d, 7, 1, &from, 1, NULL, 0, NULL), IDIST_ERR_SYSTEM,
           "a folder in the way");
    tap_like(idist_last_error(), "/.checkpoint_7_score=1.idist.tmp: File exists", "is named");
    rmdir(in_folder(".checkpoint_7_score=1.idist.tmp"));
}

//------------------------------------------------------------------------------
// what may be wrong with a file
//------------------------------------------------------------------------------

static void damaged(void) {
    static char file[1000], bad[1100];
    idist_checkpoint_desc d = desc_of(1);
    char info[5] = "info";
    int n_taken = 0;
    idist_tensor two[2] = {small, small};
    float other[3] = {4, 5, 6};
    two[1].data = other;
    tap_is(idist_checkpoint_save(&d, 1, 1, two, 2, info, 5, NULL), IDIST_OK, "a small file");
    char inner[100];
    snprintf(inner, sizeof inner, "%s/inner", folder);
    d.folder = inner;
    tap_is(idist_checkpoint_save(&d, 1, 1, two, 2, info, 5, NULL), IDIST_OK,
           "another one in a folder that is not there");
    TAP_REQUIRE(unlink(in_folder("inner/checkpoint_1_score=1.idist")) == 0 && rmdir(inner) == 0);
    size_t n = get_file(in_folder("checkpoint_1_score=1.idist"), file, sizeof file);
    tap_is(n, 64 + 32 + 32 + 32 + 32 + 8, "has the bytes of the drawing");
    weights[0] = weights[1] = weights[2] = 77;
    for (size_t i = 0; i < 8 * n; i++) {
        memcpy(bad, file, n);
        bad[i / 8] = (char)(bad[i / 8] ^ 1 << i % 8);
        put_file(in_folder("bad"), bad, n);
        n_taken +=
            idist_checkpoint_load(in_folder("bad"), two, 2, info, 5, NULL) != IDIST_ERR_CORRUPT;
    }
    tap_is(n_taken, 0, "any one bit changed: refused");
    for (size_t i = 0; i < n + 100; i++) {
        if (i == n) continue;
        memset(bad, 0, sizeof bad);
        memcpy(bad, file, n);
        put_file(in_folder("bad"), bad, i);
        n_taken +=
            idist_checkpoint_load(in_folder("bad"), two, 2, info, 5, NULL) != IDIST_ERR_CORRUPT;
    }
    tap_is(n_taken, 0, "any other length: refused");
    tap_ok(weights[0] == 77 && weights[2] == 77, "and nothing was written to the tensors");
    put_file(in_folder("bad"), file, n);
    tap_is(idist_checkpoint_load(in_folder("bad"), two, 2, info, 5, NULL), IDIST_OK,
           "unchanged: taken");
    tap_ok(weights[0] == 0, "into the tensors");
    // Falsifies the read of the second tensor. The reads are the header, the whole file, its
    // checksum, two table entries, three paddings, info and two tensors.
    steps.lie_at = steps.reads + 11;
    tap_is(idist_checkpoint_load(in_folder("bad"), two, 2, info, 5, NULL), IDIST_ERR_SYSTEM,
           "other bytes when read again");
    tap_like(idist_last_error(), "the data received differ from the data in the file",
             "are noticed");
}

// Writes false values to the header and the table, with checksums that match the false values.
static void lies(void) {
    static const uint64_t values[] = {0,         1, 3, 7, 1u << 31, UINT64_MAX / 16, UINT64_MAX - 3,
                                      UINT64_MAX};
    static uint64_t file[100];
    idist_checkpoint_desc d = desc_of(1);
    char info[5] = "info";
    int n_taken = 0;
    tap_is(idist_checkpoint_save(&d, 1, 1, &small, 1, info, 5, NULL), IDIST_OK, "a small file");
    size_t n = get_file(in_folder("checkpoint_1_score=1.idist"), file, sizeof file);
    for (int word = 0; word < 10; word++) {
        for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
            uint64_t bad[100];
            if (word == IDIST__HEADER_STEP || word == IDIST__HEADER_SCORE ||
                word == IDIST__HEADER_CHECKSUM)
                continue;
            memcpy(bad, file, n);
            if (bad[word] == values[i]) continue;
            bad[word] = values[i];
            bad[IDIST__HEADER_CHECKSUM] = idist__checkpoint_header_checksum(bad);
            idist__checksum sum = idist__checksum_begin();
            idist__checksum_add(&sum, bad, n - 8);
            bad[n / 8 - 1] = idist__checksum_end(&sum);
            put_file(in_folder("bad"), bad, n);
            idist_status status = idist_checkpoint_load(in_folder("bad"), &small, 1, info, 5, NULL);
            idist_status expected = IDIST_ERR_ARG; // a valid file with other tensors
            if (word == IDIST__HEADER_MAGIC || word == IDIST__HEADER_FILE)
                expected = IDIST_ERR_CORRUPT;
            if (word == IDIST__HEADER_VERSION)
                expected = values[i] ? IDIST_ERR_UNSUPPORTED : IDIST_ERR_CORRUPT;
            n_taken += status != expected;
            if (status != expected) tap_diag("word %d, value %d: %d", word, (int)i, status);
        }
    }
    tap_is(n_taken, 0, "other numbers in the head or the table: refused");
    weights[0] = 7;
    file[n / 8 - 2] = 1;
    idist__checksum sum = idist__checksum_begin();
    idist__checksum_add(&sum, file, n - 8);
    file[n / 8 - 1] = idist__checksum_end(&sum);
    put_file(in_folder("bad"), file, n);
    tap_is(idist_checkpoint_load(in_folder("bad"), &small, 1, info, 5, NULL), IDIST_ERR_CORRUPT,
           "something between the parts");
    tap_ok(weights[0] == 7, "is noticed before anything is written to");
}

// Size in bytes of the file that damage() changes. The header has 64 bytes, the table 32, info 32,
// the tensor 32, and the checksum 8.
enum { DAMAGED_NBYTES = 168 };
typedef enum damage_kind { CUT, FLIP, PUT, FOLDER, PIPE } damage_kind;
static const struct damage {
    const char *what;
    damage_kind kind;
    int at; // CUT: the new length; FLIP: the byte; PUT: the version, 0 for 1 with bytes swapped
    idist_status status;
    const char *text;
} damages[] = {
    {"empty", CUT, 0, IDIST_ERR_CORRUPT, "is empty"},
    {"cut within its magic", CUT, 3, IDIST_ERR_CORRUPT, "is truncated"},
    {"cut within its header", CUT, 63, IDIST_ERR_CORRUPT, "is truncated"},
    {"cut behind its header", CUT, 64, IDIST_ERR_CORRUPT, "is truncated"},
    {"cut within its info", CUT, 100, IDIST_ERR_CORRUPT, "is truncated"},
    {"cut within its tensors", CUT, 130, IDIST_ERR_CORRUPT, "is truncated"},
    {"cut within its checksum", CUT, 167, IDIST_ERR_CORRUPT, "is truncated"},
    {"appended to", CUT, 169, IDIST_ERR_CORRUPT, "is damaged: it is longer"},
    {"of another magic", FLIP, 2, IDIST_ERR_CORRUPT, "is not a checkpoint, or"},
    {"flipped in its header", FLIP, 24, IDIST_ERR_CORRUPT,
     "is damaged: the checksum of its header"},
    {"flipped in its table", FLIP, 70, IDIST_ERR_CORRUPT, "is damaged: its checksum is wrong"},
    {"flipped in its info", FLIP, 97, IDIST_ERR_CORRUPT, "is damaged: its checksum is wrong"},
    {"flipped in its tensors", FLIP, 129, IDIST_ERR_CORRUPT, "is damaged: its checksum is wrong"},
    {"flipped in its checksum", FLIP, 165, IDIST_ERR_CORRUPT, "is damaged: its checksum is wrong"},
    {"of a newer version", PUT, 2, IDIST_ERR_UNSUPPORTED, "was written by a newer version"},
    {"of another byte order", PUT, 0, IDIST_ERR_UNSUPPORTED,
     "was written by a machine with another byte order"},
    {"a folder", FOLDER, 0, IDIST_ERR_ARG, "is not a regular file"},
    {"a pipe", PIPE, 0, IDIST_ERR_ARG, "is not a regular file"},
};

static const char damaged_info[5] = "info";

// Saves a checkpoint and damages its file. `i` is an index into `damages`.
static void damage(uint64_t at_step, double score, size_t i) {
    static uint64_t file[32];
    char *bytes = (char *)file, name[100];
    size_t n;
    const struct damage *how = &damages[i];
    idist_checkpoint_desc d = desc_of(-1);
    TAP_REQUIRE(idist_checkpoint_save(&d, at_step, score, &small, 1, damaged_info, 5, NULL) ==
                IDIST_OK);
    snprintf(name, sizeof name, "checkpoint_%d_score=%g.idist", (int)at_step, score);
    memset(file, 0, sizeof file);
    n = get_file(in_folder(name), file, sizeof file);
    TAP_REQUIRE(n == DAMAGED_NBYTES && unlink(in_folder(name)) == 0);
    if (how->kind == CUT) n = (size_t)how->at;
    if (how->kind == FLIP) bytes[how->at] = (char)(bytes[how->at] ^ 8);
    if (how->kind == PUT)
        file[IDIST__HEADER_VERSION] = how->at ? (uint64_t)how->at : (uint64_t)1 << 56;
    if (how->kind == PUT) file[IDIST__HEADER_CHECKSUM] = idist__checkpoint_header_checksum(file);
    if (how->kind == FOLDER) TAP_REQUIRE(mkdir(in_folder(name), 0700) == 0);
    else if (how->kind == PIPE) TAP_REQUIRE(mkfifo(in_folder(name), 0600) == 0);
    else put_file(in_folder(name), file, n);
    // Gives each damaged file a new time stamp, because the file system's clock may be too coarse
    // to show the change.
    static time_t clock_s = 1000;
    const struct timespec times[2] = {{++clock_s, 0}, {clock_s, 0}};
    TAP_REQUIRE(utimensat(AT_FDCWD, in_folder(name), times, 0) == 0);
}

static void empty_folder(void) {
    rmdir(in_folder("checkpoint_20_score=9.idist"));
    remove_folder();
    new_folder();
}

// Damages a file that is the only one, or the latest and best of several. The file must be
// reported, and no other file may be affected.
static void damaged_files(void) {
    for (size_t i = 0; i < sizeof damages / sizeof *damages; i++) {
        const struct damage *how = &damages[i];
        const char *name = "checkpoint_20_score=9.idist";
        idist_checkpoint_desc d = desc_of(1);
        char path[300], info[5], part[200];
        snprintf(part, sizeof part, "%s %s", name, how->text);
        damage(20, 9, i);
        said[0] = 0;
        tap_is(idist_checkpoint_find(&d, true, path, sizeof path, NULL), IDIST_ERR_CORRUPT,
               "the only file is %s", how->what);
        tap_like(idist_last_error(), how->text, "the text says what is wrong");
        tap_like(idist_last_error(), name, "with which file");
        tap_like(said, "warning: checkpoint_find: ", "and so does a warning");
        tap_like(said, how->text, "about it");
        tap_is(idist_checkpoint_load(in_folder(name), &small, 1, info, 5, NULL), how->status,
               "nor is it loaded");
        tap_like(idist_last_error(), part, "for the same reason");
        // The damaged file does not count as the best. Each save of a file with a worse score
        // succeeds and keeps the new file.
        for (uint64_t at = 10; at < 13; at++) {
            TAP_REQUIRE(idist_checkpoint_save(&d, at, (double)at / 16, &small, 1, damaged_info, 5,
                                              NULL) == IDIST_OK);
            tap_is(count_entries(folder, ""), 2, "a save keeps it beside the new file");
        }
        tap_ok(is_there("checkpoint_12_score=0.75.idist"), "which is the best");
        said[0] = 0;
        for (int latest = 0; latest < 2; latest++) {
            tap_is(idist_checkpoint_find(&d, latest, path, sizeof path, NULL), IDIST_OK, "found");
            tap_like(path, "/checkpoint_12_score=0.75.idist", "and it is the one found");
            tap_like(said, part, "with a warning");
        }
        tap_is(idist_checkpoint_load(path, &small, 1, info, 5, NULL), IDIST_OK, "and loaded");
        empty_folder();
    }
    // idist_checkpoint_save warns of a damaged file once, and idist_checkpoint_find every time.
    idist_checkpoint_desc d = desc_of(2);
    damage(20, 9, 12);
    for (int i = 0; i < 3; i++) {
        said[0] = 0;
        TAP_REQUIRE(idist_checkpoint_save(&d, (uint64_t)i, i, &small, 1, NULL, 0, NULL) ==
                    IDIST_OK);
        tap_ok(!said[0] == (i > 0), "save warns once: %s", said);
    }
    tap_is(count_entries(folder, ""), 3, "two valid files are kept, and the damaged one");
    // Saves the step of the damaged file again.
    TAP_REQUIRE(idist_checkpoint_save(&d, 20, 8, &small, 1, NULL, 0, NULL) == IDIST_OK);
    tap_ok(is_there("checkpoint_20_score=9.idist") && is_there("checkpoint_20_score=8.idist"),
           "a step that is saved again does not remove a damaged file");
    TAP_REQUIRE(idist_checkpoint_save(&d, 20, 9, &small, 1, NULL, 0, NULL) == IDIST_OK);
    tap_is(count_entries(folder, ""), 2, "unless it has the same name");
}

// Checks that files that this process has saved or verified are not read again.
static void reads_once(void) {
    idist_checkpoint_desc d = desc_of(2);
    char path[300];
    for (uint64_t i = 1; i < 4; i++)
        TAP_REQUIRE(idist_checkpoint_save(&d, i, (double)i, &small, 1, NULL, 0, NULL) == IDIST_OK);
    idist__seen_count = 0;
    int before = steps.reads;
    TAP_REQUIRE(idist_checkpoint_save(&d, 4, 4, &small, 1, NULL, 0, NULL) == IDIST_OK);
    int first = steps.reads - before;
    TAP_REQUIRE(idist_checkpoint_save(&d, 5, 5, &small, 1, NULL, 0, NULL) == IDIST_OK);
    int second = steps.reads - before - first;
    before = steps.reads;
    TAP_REQUIRE(idist_checkpoint_find(&d, true, path, sizeof path, NULL) == IDIST_OK);
    tap_is(first, 2 + 2 * 3 + 3, "two files of others: three reads each; then three headers");
    tap_is(second, 2 + 3, "two headers, then three");
    tap_is(steps.reads - before, 2, "nor are they read by find: two headers");
}

static void other_tensors(idist_group *world, int rank, int n, void *arg) {
    idist_checkpoint_desc d = desc_of(1);
    idist_opts o = opts_of(world);
    float x[9] = {0};
    idist_tensor t[2] = {{x, 3, IDIST_F32}, {x + 3, 6, IDIST_F32}},
                 wrong[2] = {{x, 3, IDIST_F32}, {x + 3, 5, IDIST_F32}};
    char path[300];
    int32_t one = 1, sum = 0;
    (void)arg;
    copy_text(path, sizeof path, in_folder("checkpoint_1_score=1.idist"));
    rank_ok(rank, idist_checkpoint_save(&d, 1, 1, t, 2, NULL, 0, &o));
    rank_is(rank, idist_checkpoint_load(path, wrong, 2, NULL, 0, &o), IDIST_ERR_ARG);
    rank_check(strstr(idist_last_error(), "tensor 1 is F32 x 6 in the file, but F32 x 5"),
               "rank %d: %s", rank, idist_last_error());
    rank_check(!rank == !strstr(idist_last_error(), "(on rank 0)"), "rank %d: %s", rank,
               idist_last_error());
    rank_is(rank, idist_checkpoint_load(path, t, 1, NULL, 0, &o), IDIST_ERR_ARG);
    rank_check(strstr(idist_last_error(), "has 2 tensors"), "rank %d: %s", rank,
               idist_last_error());
    rank_is(rank, idist_checkpoint_load(path, t, 2, x, 4, &o), IDIST_ERR_ARG);
    rank_check(strstr(idist_last_error(), "bytes of info"), "rank %d: %s", rank,
               idist_last_error());
    rank_is(rank, idist_checkpoint_load(in_folder("none"), t, 2, NULL, 0, &o), IDIST_ERR_NOT_FOUND);
    // One rank passes tensors that differ from the tensors of all other ranks.
    if (n > 1) {
        rank_is(rank, idist_checkpoint_load(path, rank == n - 1 ? wrong : t, 2, NULL, 0, &o),
                IDIST_ERR_ARG);
        rank_check(strstr(idist_last_error(), "differ from those on rank 0"), "rank %d: %s", rank,
                   idist_last_error());
        rank_is(rank, idist_checkpoint_load(path, t, rank == n - 1 ? -1 : 2, NULL, 0, &o),
                IDIST_ERR_ARG);
    }
    d.folder = rank ? "/none" : "";
    rank_is(rank, idist_checkpoint_save(&d, 1, 1, t, 2, NULL, 0, &o), IDIST_ERR_ARG);
    d.folder = "/proc/none/none";
    rank_is(rank, idist_checkpoint_save(&d, 1, 1, t, 2, NULL, 0, &o), IDIST_ERR_SYSTEM);
    rank_check(strstr(idist_last_error(), "/proc/none/none: No such file"), "rank %d: %s", rank,
               idist_last_error());
    rank_is(rank, idist_checkpoint_find(&d, false, NULL, 0, &o), IDIST_ERR_NOT_FOUND);
    d.folder = folder;
    d.prefix = "a/b";
    rank_is(rank, idist_checkpoint_save(&d, 1, 1, t, 2, NULL, 0, &o), IDIST_ERR_ARG);
    d.prefix = NULL;
    rank_is(rank,
            idist_checkpoint_save(&d, 1, (double)idist__small_float_from_bits(0x7fc00000u), t, 2,
                                  NULL, 0, &o),
            IDIST_ERR_ARG);
    rank_ok(rank, idist_all_reduce(&one, &sum, 1, IDIST_I32, IDIST_SUM, &o));
    rank_check(sum == n, "rank %d: after all this, got %d expected %d", rank, sum, n);
}

//------------------------------------------------------------------------------
// crashes and full disks
//------------------------------------------------------------------------------

// Saves once more in a child process. The save crashes at step crash_at, or fails with `err` at
// step fail_at, unless these are 0. Returns the exit code, which is 55 after a crash and 56 -
// status otherwise.
static int save_with(int crash_at, int fail_at, int err) {
    static unsigned char big[5000];
    const idist_tensor t = {big, sizeof big, IDIST_U8};
    idist_checkpoint_desc d = desc_of(1);
    int status;
    // A save writes and syncs the file, renames it and syncs the folder. Only then does it remove
    // the old file, if that still exists.
    const char *order =
        access(in_folder("checkpoint_1_score=1.idist"), F_OK) == 0 ? "wfrfu" : "wfrf";
    pid_t pid = fork();
    TAP_REQUIRE(pid >= 0);
    if (pid == 0) {
        if (idist_initialize(NULL) != IDIST_OK) _exit(1);
        memset(big, 2, sizeof big);
        steps.armed = true;
        steps.crash_at = crash_at;
        steps.fail_at = fail_at;
        steps.fail_errno = err;
        status = 56 - (int)idist_checkpoint_save(&d, 2, 2, &t, 1, NULL, 0, NULL);
        if (status == 56 && steps.order[0] != 'u' && strcmp(steps.order, order) != 0) status = 2;
        _exit(status);
    }
    TAP_REQUIRE(waitpid(pid, &status, 0) == pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// Returns the number of the state, 1 or 2, in the best file. Returns 0 if no file is found, and a
// negative number if the file is damaged.
static int best_there(void) {
    static unsigned char big[5000];
    const idist_tensor t = {big, sizeof big, IDIST_U8};
    idist_checkpoint_desc d = desc_of(1);
    char path[300];
    if (idist_checkpoint_find(&d, false, path, sizeof path, NULL) != IDIST_OK) return 0;
    if (idist_checkpoint_load(path, &t, 1, NULL, 0, NULL) != IDIST_OK) return -1;
    for (size_t i = 1; i < sizeof big; i++)
        if (big[i] != big[0]) return -2;
    return big[0];
}

static void save_first(void) {
    static unsigned char big[5000];
    const idist_tensor t = {big, sizeof big, IDIST_U8};
    idist_checkpoint_desc d = desc_of(1);
    memset(big, 1, sizeof big);
    TAP_REQUIRE(idist_checkpoint_save(&d, 1, 1, &t, 1, NULL, 0, NULL) == IDIST_OK);
}

static void crashes(void) {
    int code = 55, i, n_wrong = 0, n_new = 0;
    for (i = 1; code == 55; i++) {
        new_folder();
        save_first();
        code = save_with(i, 0, 0);
        int best = best_there();
        n_wrong += best != 1 && best != 2;
        n_new += best == 2;
        if (best != 1 && best != 2) tap_diag("crash at step %d: found %d", i, best);
        n_wrong += save_with(0, 0, 0) != 56 || best_there() != 2 || count_entries(folder, "") != 1;
        remove_folder();
    }
    tap_is(code, 56,
           "without a crash the save succeeds: write, fsync, rename, fsync of the folder, removal");
    tap_ok(i > 10 && n_wrong == 0,
           "a crash at each of %d steps leaves a whole file, and the next save tidies up", i - 2);
    tap_ok(n_new >= 2 && n_new < i - 2, "the new one from the renaming on");
    for (i = 1, n_wrong = 0; i < 11; i++) {
        new_folder();
        save_first();
        code = save_with(0, i, ENOSPC);
        if (code == 56) break;
        n_wrong += code != 56 - (int)IDIST_ERR_NO_SPACE || best_there() < 1 ||
                   count_entries(folder, ".tmp") != 0;
        remove_folder();
    }
    tap_ok(
        i == 11 && n_wrong == 0,
        "a full disk at each step: IDIST_ERR_NO_SPACE, what was there is there, and nothing else");
    new_folder();
    save_first();
    tap_is(save_with(0, 4, EIO), 56 - (int)IDIST_ERR_SYSTEM, "an error of the disk");
    tap_is(best_there(), 1, "costs nothing that was there");
    remove_folder();
}

// Simulates file systems that cannot sync files or folders. The file must be complete nevertheless.
static void refused_syncs(void) {
    static const int refusals[] = {EINVAL, ENOTSUP, EOPNOTSUPP, ENOSYS, EBADF,
                                   EISDIR, EPERM,   EACCES,     EROFS};
    static const int failures[] = {EIO, ENOSPC, EDQUOT};
    idist_checkpoint_desc d = desc_of(1);
    char path[300];
    uint64_t at = 1;
    for (int folders = 0; folders < 2; folders++) {
        int *which = folders ? &syncs.of_folders : &syncs.of_files;
        idist__sync_has_warned = false;
        for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++, at++) {
            said[0] = 0;
            *which = refusals[i];
            syncs.interrupted = 2;
            idist_status status =
                idist_checkpoint_save(&d, at, (double)at, &small, 1, NULL, 0, NULL);
            *which = 0;
            tap_is(status, IDIST_OK, "a %s that is not synced: %s", folders ? "folder" : "file",
                   strerror(refusals[i]));
            tap_is(idist_checkpoint_find(&d, true, path, sizeof path, NULL), IDIST_OK, "found");
            tap_is(count_entries(folder, ""), 1, "it has replaced the one before");
            if (i == 0) tap_like(said, "warning: checkpoint_save: /tmp/", "a warning");
            if (i == 0) tap_like(said, strerror(refusals[i]), "with the reason");
            else tap_ok(!said[0], "no second warning: %s", said);
        }
        for (size_t i = 0; i < sizeof failures / sizeof *failures; i++, at++) {
            *which = failures[i];
            idist_status status =
                idist_checkpoint_save(&d, at, (double)at, &small, 1, NULL, 0, NULL);
            *which = 0;
            tap_is(status, i ? IDIST_ERR_NO_SPACE : IDIST_ERR_SYSTEM, "a %s that is lost: %s",
                   folders ? "folder" : "file", strerror(failures[i]));
            tap_ok(count_entries(folder, ".tmp") == 0 && count_entries(folder, "") >= 1,
                   "the one before is there");
        }
    }
}

// Saves state `at` in a child process that crashes during the save if crash_at is not 0. The score
// is 1 / at, so that a later state has a worse score.
static int save_latest(uint64_t at, int crash_at) {
    static unsigned char big[5000];
    const idist_tensor t = {big, sizeof big, IDIST_U8};
    idist_checkpoint_desc d = desc_of(1);
    int status;
    pid_t pid = fork();
    TAP_REQUIRE(pid >= 0);
    d.keep_latest = 1;
    if (pid == 0) {
        if (idist_initialize(NULL) != IDIST_OK) _exit(1);
        memset(big, (int)at, sizeof big);
        steps.armed = true;
        steps.crash_at = crash_at;
        _exit(56 - (int)idist_checkpoint_save(&d, at, 1 / (double)at, &t, 1, NULL, 0, NULL));
    }
    TAP_REQUIRE(waitpid(pid, &status, 0) == pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int latest_there(void) {
    static unsigned char big[5000];
    const idist_tensor t = {big, sizeof big, IDIST_U8};
    idist_checkpoint_desc d = desc_of(1);
    char path[300];
    if (idist_checkpoint_find(&d, true, path, sizeof path, NULL) != IDIST_OK) return 0;
    if (idist_checkpoint_load(path, &t, 1, NULL, 0, NULL) != IDIST_OK) return -1;
    return big[0] == big[sizeof big - 1] ? big[0] : -2;
}

static void crashes_beside_best(void) {
    static const state all[3] = {{1, 1}, {4, 0.25}};
    int code = 55, i, n_wrong = 0;
    for (i = 1; code == 55; i++) {
        new_folder();
        n_wrong += save_latest(1, 0) != 56 || save_latest(2, 0) != 56;
        code = save_latest(4, i);
        int latest = latest_there();
        n_wrong += best_there() != 1 || (latest != 2 && latest != 4);
        // The restarted training continues from the latest state and reaches this step again.
        n_wrong += save_latest(4, 0) != 56 || best_there() != 1 || latest_there() != 4;
        n_wrong += !has_only(all);
        remove_folder();
    }
    tap_is(code, 56, "without a crash the latest state is saved beside the best");
    tap_ok(i > 10 && n_wrong == 0,
           "a crash at each of %d steps leaves the best and a latest file whole", i - 2);
}

// Fills a real file system of 64 KiB, so that the error comes from the kernel.
static void full_disk(void) {
    static unsigned char big[200000];
    const idist_tensor t = {big, sizeof big, IDIST_U8};
    idist_checkpoint_desc d = desc_of(1);
    int status;
    pid_t pid = fork();
    TAP_REQUIRE(pid >= 0);
    if (pid == 0) {
        const long new_mounts = 0x00020000; // CLONE_NEWNS
        if (syscall(SYS_unshare, new_mounts) != 0 ||
            mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0)
            _exit(77);
        if (mount("none", folder, "tmpfs", 0, "size=65536") != 0) _exit(77);
        if (idist_initialize(NULL) != IDIST_OK) _exit(3);
        save_first();
        if (idist_checkpoint_save(&d, 2, 2, &t, 1, NULL, 0, NULL) != IDIST_ERR_NO_SPACE) _exit(1);
        _exit(best_there() == 1 && count_entries(folder, "") == 1 ? 0 : 2);
    }
    TAP_REQUIRE(waitpid(pid, &status, 0) == pid);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
        tap_skip("a full file system", "mounts are not allowed here");
    else tap_ok(status == 0, "a full file system (wait status 0x%x)", (unsigned)status);
}

//------------------------------------------------------------------------------
// training that resumes
//------------------------------------------------------------------------------

enum { SAMPLES = 103, EPOCHS = 4, STOP_EPOCH = 1, STOP_AT = 9 };
typedef struct training {
    double w[4], momentum[4];
    idist_sampler_state at;
} training;

// Trains until the end. If `stop` is true, saves and returns at the stop position.
static void train(training *t, bool stop, idist_group *world, int rank) {
    idist_opts o = opts_of(world);
    idist_checkpoint_desc d = desc_of(1);
    idist_tensor tensors[2] = {{t->w, 4, IDIST_F64}, {t->momentum, 4, IDIST_F64}};
    idist_sampler_desc sd;
    idist_sampler *s = NULL;
    size_t index;
    memset(&sd, 0, sizeof sd);
    sd.length = SAMPLES;
    sd.group = world;
    if (!rank_ok(rank, idist_sampler_create(&sd, &s)) ||
        !rank_ok(rank, idist_sampler_set_state(s, t->at)))
        return;
    for (uint64_t epoch = t->at.epoch; epoch < EPOCHS; epoch++) {
        if (epoch != t->at.epoch && !rank_ok(rank, idist_sampler_set_epoch(s, epoch))) break;
        while (idist_sampler_next(s, &index)) {
            double g[4];
            for (int i = 0; i < 4; i++)
                g[i] = t->w[(i + 1) % 4] * 0.1 - (double)(index + (size_t)i) / 7.0;
            if (!rank_ok(rank, idist_all_reduce(g, g, 4, IDIST_F64, IDIST_AVG, &o))) return;
            for (int i = 0; i < 4; i++)
                t->w[i] -= 0.01 * (t->momentum[i] = 0.9 * t->momentum[i] + g[i]);
            t->at = idist_sampler_get_state(s);
            if (!stop || epoch != STOP_EPOCH || t->at.position != STOP_AT) continue;
            rank_ok(rank,
                    idist_checkpoint_save(&d, epoch, 0, tensors, 2, &t->at, sizeof t->at, &o));
            idist_sampler_free(&s);
            return;
        }
    }
    idist_sampler_free(&s);
}

static void goes_on(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    training whole, first, second;
    idist_tensor tensors[2] = {{second.w, 4, IDIST_F64}, {second.momentum, 4, IDIST_F64}};
    (void)n;
    (void)arg;
    memset(&whole, 0, sizeof whole);
    memset(&first, 0, sizeof first);
    memset(&second, 0xFF, sizeof second);
    train(&whole, false, world, rank);
    train(&first, true, world, rank);
    if (!rank_ok(rank, idist_checkpoint_load(in_folder("checkpoint_1_score=0.idist"), tensors, 2,
                                             &second.at, sizeof second.at, &o)))
        return;
    rank_check(memcmp(&first, &second, sizeof first) == 0, "rank %d: it is not where it was", rank);
    train(&second, false, world, rank);
    rank_check(memcmp(&whole, &second, sizeof whole) == 0, "rank %d: other bits at the end", rank);
}

int main(void) {
    static const int sizes[4] = {1, 2, 3, 5};
    tap_deadline(60);
    for (int i = 0; i < 4; i++) {
        new_folder();
        ranks_case(sizes[i], NULL, round_trip, NULL, "saved and loaded, %d ranks", sizes[i]);
        remove_folder();
    }
    for (int low = 0; low < 2; low++) {
        new_folder();
        ranks_case(2, NULL, keeps_best, low ? folder : NULL, "the two with the %s scores",
                   low ? "lowest" : "highest");
        remove_folder();
        new_folder();
        ranks_case(2, NULL, keeps_latest, low ? folder : NULL,
                   "the one with the %s score and the two latest", low ? "lowest" : "highest");
        remove_folder();
    }
    for (int i = 0; i < 3; i++) {
        new_folder();
        ranks_case(sizes[i], NULL, other_tensors, NULL, "wrong calls, %d ranks", sizes[i]);
        remove_folder();
        new_folder();
        ranks_case(sizes[i], NULL, goes_on, NULL, "a training goes on bit for bit, %d ranks",
                   sizes[i]);
        remove_folder();
    }
    tap_is(idist_checkpoint_load("x", &small, 1, NULL, 0, NULL), IDIST_ERR_STATE, "no world");
    idist_desc noted;
    memset(&noted, 0, sizeof noted);
    noted.logger.log_fn = note_line;
    setenv("IDIST_LOG", "info", 1);
    TAP_REQUIRE(idist_initialize(&noted) == IDIST_OK);
    setenv("IDIST_LOG", "error", 1);
    void (*const one[])(void) = {leaves_others_alone, same_step,  damaged,
                                 damaged_files,       reads_once, lies,
                                 refused_syncs,       full_disk,  unreadable};
    for (size_t i = 0; i < sizeof one / sizeof *one; i++) {
        new_folder();
        one[i]();
        remove_folder();
    }
    crashes();
    crashes_beside_best();
    tap_is(idist_finalize(), IDIST_OK, "finalize");
    return tap_done();
}
