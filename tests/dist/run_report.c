// run_report.c - idist_run_report: calls, bytes and examples of each rank, the time that a rank
// waits for a late one, what rank 0 logs, and errors
#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "idist_train.h"

#include "ranks.h"

//------------------------------------------------------------------------------
// calls and bytes
//------------------------------------------------------------------------------

// Makes calls of every kind. Returns the number of calls of this rank, and sets *nbytes to the
// bytes that this rank sends in them.
static uint64_t make_calls(idist_group *world, int rank, int n, uint64_t *nbytes) {
    static __thread float x[400], y[400];
    idist_request request = {0};
    idist_opts o = opts_of(world), async = opts_async(world, &request);
    size_t counts[8], displs[8];
    uint64_t calls = 0;
    int next = (rank + 1) % n, before = (rank + n - 1) % n;

    *nbytes = 0;
    for (int k = 0; k < n; k++) counts[k] = (size_t)k + 1;
    rank_ok(rank, idist_barrier(&o));
    rank_ok(rank, idist_all_reduce(x, x, 100, IDIST_F32, IDIST_SUM, &o));
    *nbytes += 400;
    rank_ok(rank, idist_all_reduce(x, y, 3, IDIST_F64, IDIST_SUM, &async));
    rank_ok(rank, idist_wait(&request));
    *nbytes += 24;
    rank_ok(rank, idist_broadcast(x, 50, IDIST_F32, n - 1, &o));
    *nbytes += rank == n - 1 ? 200 : 0;
    rank_ok(rank, idist_all_gather(x, y, 10, IDIST_U8, &o));
    *nbytes += 10;
    rank_ok(rank, idist_scatter(x, y, 5, IDIST_F32, 0, &o));
    *nbytes += rank == 0 ? (uint64_t)n * 20 : 0;
    rank_ok(rank, idist_reduce_scatter(x, y, 7, IDIST_I32, IDIST_MAX, &o));
    *nbytes += (uint64_t)n * 28;
    rank_ok(rank, idist_all_gatherv(x, counts[rank], y, counts, NULL, IDIST_F32, &o));
    *nbytes += counts[rank] * 4;
    rank_ok(rank, idist_sendrecv(x, 9, next, 1, y, 9, before, 1, IDIST_F32, NULL, &o));
    *nbytes += 36;
    for (int k = 0; k < n; k++) counts[k] = 1, displs[k] = 10 * (size_t)k; // with gaps
    rank_ok(rank, idist_all_to_allv(x, counts, displs, y, counts, displs, IDIST_F32, &o));
    *nbytes += (uint64_t)n * 4;
    rank_ok(rank, idist_scatterv(x, counts, displs, y, 1, IDIST_F32, 0, &o));
    *nbytes += rank == 0 ? (uint64_t)n * 4 : 0;
    calls = 11;
    if (n > 1 && rank == 0) rank_ok(rank, idist_send(x, 11, IDIST_F32, 1, 3, &o));
    if (n > 1 && rank == 1) rank_ok(rank, idist_recv(x, 11, IDIST_F32, 0, 3, NULL, &o));
    if (n > 1 && rank < 2) calls++;
    *nbytes += n > 1 && rank == 0 ? 44 : 0;
    rank_ok(rank, idist_group_begin());
    for (int k = 0; k < 2; k++)
        rank_ok(rank, idist_all_reduce(x + k, x + k, 1, IDIST_F32, IDIST_SUM, &o));
    rank_ok(rank, idist_group_end());
    *nbytes += 8;
    return calls + 2;
}

static void *other_thread(void *arg) {
    float x = 1;
    idist_opts o = opts_of((idist_group *)arg);
    return idist_all_reduce(&x, &x, 1, IDIST_F32, IDIST_SUM, &o) == IDIST_OK ? arg : NULL;
}

static void counted(idist_group *world, int rank, int n, void *arg) {
    idist_run run = {0};
    idist_run_rank ranks[8];
    idist_opts o = opts_of(world);
    uint64_t nbytes, calls;
    pthread_t thread;
    void *result;
    (void)arg;

    make_calls(world, rank, n, &nbytes); // before the run
    rank_ok(rank, idist_run_begin(&run));
    calls = make_calls(world, rank, n, &nbytes);
    rank_is(rank, idist_all_gatherv(&n, 1, &n, NULL, NULL, IDIST_I32, &o), IDIST_ERR_ARG);
    run.examples = 10 + (uint64_t)rank;
    TAP_REQUIRE(pthread_create(&thread, NULL, other_thread, world) == 0);
    TAP_REQUIRE(pthread_join(thread, &result) == 0 && result);
    rank_ok(rank, idist_run_report(&run, "test", ranks, &o));
    rank_check(ranks[rank].calls == calls + 1 && ranks[rank].sent_nbytes == nbytes,
               "rank %d: %llu calls of %llu bytes, not %llu of %llu", rank,
               (unsigned long long)ranks[rank].calls, (unsigned long long)ranks[rank].sent_nbytes,
               (unsigned long long)calls + 1, (unsigned long long)nbytes);
    for (int r = 0; r < n; r++)
        rank_check(ranks[r].examples == 10 + (uint64_t)r && ranks[r].seconds > 0 &&
                       ranks[r].waited > 0 && ranks[r].waited <= ranks[r].seconds,
                   "rank %d: %g of %g s on rank %d", rank, ranks[r].waited, ranks[r].seconds, r);

    // The run is over, and a second one starts from zero.
    rank_ok(rank, idist_run_begin(&run));
    rank_ok(rank, idist_run_report(&run, NULL, ranks, &o));
    rank_check(!ranks[0].calls && !ranks[n - 1].sent_nbytes && ranks[rank].waited == 0,
               "rank %d: an empty run has %llu calls", rank, (unsigned long long)ranks[0].calls);
}

//------------------------------------------------------------------------------
// waiting
//------------------------------------------------------------------------------

static int arrived; // ranks that are about to call

// All ranks wait in a call for rank 1, which sleeps until they have arrived.
static void late_rank(idist_group *world, int rank, int n, void *arg) {
    idist_run run = {0};
    idist_run_rank ranks[4];
    idist_opts o = opts_of(world);
    idist_request request = {0};
    idist_opts async = opts_async(world, &request);
    float x = 1;
    double y = 1;
    idist_tensor params[2] = {{&x, 1, IDIST_F32}, {&y, 1, IDIST_F64}};
    idist_ddp_desc desc = {0};
    idist_ddp *ddp = NULL;
    int how = *(const int *)arg;

    desc.params = params;
    desc.n = 2;
    desc.group = world;
    rank_ok(rank, idist_ddp_create(&desc, &ddp));
    rank_ok(rank, idist_run_begin(&run));
    if (rank == 1) {
        while (__atomic_load_n(&arrived, __ATOMIC_SEQ_CST) < n - 1) usleep(1000);
        usleep(300 * 1000);
    }
    __atomic_fetch_add(&arrived, 1, __ATOMIC_SEQ_CST);
    if (how == 0) rank_ok(rank, idist_barrier(&o));
    if (how == 1) {
        rank_ok(rank, idist_all_reduce(&x, &x, 1, IDIST_F32, IDIST_SUM, &async));
        rank_ok(rank, idist_wait(&request));
    }
    if (how == 2) {
        rank_ok(rank, idist_group_begin());
        rank_ok(rank, idist_all_reduce(&x, &x, 1, IDIST_F32, IDIST_SUM, &o));
        rank_ok(rank, idist_group_end());
    }
    if (how == 3) rank_ok(rank, idist_ddp_wait(ddp)); // two calls within a wait
    idist_ddp_free(&ddp);
    rank_ok(rank, idist_run_report(&run, "late", ranks, &o));
    for (int r = 0; r < n; r++) {
        if (r == 1) continue;
        rank_check(ranks[r].waited > 0.15 && ranks[r].waited > 2 * ranks[1].waited &&
                       ranks[r].seconds >= ranks[r].waited,
                   "rank %d: rank %d waited %g s, rank 1 %g s", rank, r, ranks[r].waited,
                   ranks[1].waited);
    }
}

//------------------------------------------------------------------------------
// the log of rank 0, where ranks are processes
//------------------------------------------------------------------------------

typedef struct job {
    const char *folder;
    uint64_t examples;
} job;

static int logs(int local_rank, void *arg) {
    const job *j = (const job *)arg;
    idist_run run = {0};
    char path[256];
    double x = 1;

    snprintf(path, sizeof path, "%s/rank.%d", j->folder, local_rank);
    if (!freopen(path, "w", stderr)) return 1;
    if (idist_run_begin(&run) != IDIST_OK) return 2;
    run.examples = j->examples * (uint64_t)(local_rank + 1);
    if (local_rank == idist_get_world_size() - 1) usleep(100 * 1000);
    if (idist_all_reduce(&x, &x, 1, IDIST_F64, IDIST_SUM, NULL) != IDIST_OK) return 3;
    if (idist_run_report(&run, "digits", NULL, NULL) != IDIST_OK) return 4;
    return fflush(stderr) != 0;
}

// Reads a file into `text`. Returns false if there is no such file.
static bool read_file(const char *folder, int rank, char *text, size_t capacity) {
    char path[256];
    snprintf(path, sizeof path, "%s/rank.%d", folder, rank);
    FILE *f = fopen(path, "r");
    if (!f) return false;
    text[fread(text, 1, capacity - 1, f)] = 0;
    fclose(f);
    return true;
}

// Reports over a group with the ranks of the world in reverse order.
static int reversed(int local_rank, void *arg) {
    const job *j = (const job *)arg;
    idist_run run = {0};
    idist_opts o = {0};
    char path[256];

    snprintf(path, sizeof path, "%s/rank.%d", j->folder, local_rank);
    if (!freopen(path, "w", stderr)) return 1;
    if (idist_split(NULL, 0, -local_rank, &o.group) != IDIST_OK) return 2;
    if (idist_run_begin(&run) != IDIST_OK) return 3;
    if (local_rank == 2) usleep(100 * 1000);
    if (idist_barrier(&o) != IDIST_OK) return 4;
    if (idist_run_report(&run, "digits", NULL, &o) != IDIST_OK) return 5;
    if (idist_free_group(&o.group) != IDIST_OK) return 6;
    return fflush(stderr) != 0;
}

static void remove_folder(const char *folder) {
    char command[64];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    tap_is(system(command), 0, "the folder is removed");
}

static void of_processes(void) {
    char folder[] = "/tmp/run_report.XXXXXX", text[4096] = "";
    job j = {folder, 100};

    TAP_REQUIRE(mkdtemp(folder) != NULL);
    tap_is(idist_spawn(logs, &j, 2, NULL), IDIST_OK, "two processes report");
    TAP_REQUIRE(read_file(folder, 0, text, sizeof text));
    tap_like(text, " digits INFO: Run of 0.", "rank 0 logs the run");
    tap_like(text, " % of the time, sent 0.0 MB in 1 calls\n", "and each rank");
    tap_like(text, " INFO:     slowest: rank 1, which computed for 0.", "and the slowest");
    TAP_REQUIRE(read_file(folder, 1, text, sizeof text));
    tap_is(strlen(text), 0, "rank 1 logs nothing");
    tap_is(idist_spawn(reversed, &j, 3, NULL), IDIST_OK, "a group in reverse order reports");
    TAP_REQUIRE(read_file(folder, 0, text, sizeof text));
    tap_like(text, " slowest: rank 2, which", "rank 0 of the world logs, with ranks of the world");
    TAP_REQUIRE(read_file(folder, 2, text, sizeof text));
    tap_is(strlen(text), 0, "rank 0 of the group logs nothing");
    remove_folder(folder);
}

// Logs made-up numbers of n ranks, and compares the lines.
static void log_is(const idist_run_rank *numbers, int n, const char *want) {
    char folder[] = "/tmp/run_report.XXXXXX", path[256], text[8192], lines[8192] = "";
    bool listed[32] = {false};
    idist__run_report ranks[32];
    pid_t child;

    TAP_REQUIRE(mkdtemp(folder) != NULL && n <= 32);
    memset(ranks, 0, sizeof ranks);
    for (int r = 0; r < n; r++) {
        ranks[r].world_rank = r;
        ranks[r].numbers = numbers[r];
        snprintf(ranks[r].host, sizeof ranks[r].host, "h%d", r / 2);
    }
    TAP_REQUIRE((child = fork()) >= 0);
    if (!child) {
        snprintf(path, sizeof path, "%s/rank.0", folder);
        if (!freopen(path, "w", stderr)) _exit(1);
        idist__run_report_log("made-up", ranks, listed, n);
        _exit(fflush(stderr) != 0);
    }
    TAP_REQUIRE(waitpid(child, NULL, 0) == child && read_file(folder, 0, text, sizeof text));
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        const char *at = strstr(line, " made-up INFO: ");
        TAP_REQUIRE(at != NULL);
        snprintf(lines + strlen(lines), sizeof lines - strlen(lines), "%s\n", at + 15);
    }
    tap_ok(strcmp(lines, want) == 0, "the log of %d ranks", n);
    if (strcmp(lines, want) != 0) tap_diag("%s, not\n%s", lines, want);
    remove_folder(folder);
}

static void made_up(void) {
    static const idist_run_rank two[2] = {{10, 1, 1000, 7, 1500000}, {12.5, 0.25, 500, 0, 0}};
    static const idist_run_rank three[3] = {{4, 1, 0, 1, 1}, {4, 3, 0, 1, 1}, {4, 0.5, 0, 1, 1}};
    static const idist_run_rank none[1] = {{0, 0, 0, 0, 0}};
    idist_run_rank many[18];
    char text[8192] = "Run of 20.0 s on 18 ranks: 0.9 examples/s\n";

    log_is(
        two, 2,
        "Run of 12.5 s on 2 ranks: 120.0 examples/s\n"
        "    rank 0 (h0): 100.0 examples/s, waited 10.0 % of the time, sent 1.5 MB in 7 calls\n"
        "    rank 1 (h0): 40.0 examples/s, waited 2.0 % of the time, sent 0.0 MB in 0 calls\n"
        "    slowest: rank 1, which computed for 12.2 s; the other ranks for 9.0 s on average\n");
    log_is(three, 3,
           "Run of 4.0 s on 3 ranks\n"
           "    rank 0 (h0): waited 25.0 % of the time, sent 0.0 MB in 1 calls\n"
           "    rank 1 (h0): waited 75.0 % of the time, sent 0.0 MB in 1 calls\n"
           "    rank 2 (h1): waited 12.5 % of the time, sent 0.0 MB in 1 calls\n"
           "    slowest: rank 2, which computed for 3.5 s; the other ranks for 2.0 s on average\n");
    log_is(none, 1,
           "Run of 0.0 s on 1 rank\n"
           "    rank 0 (h0): waited 0.0 % of the time, sent 0.0 MB in 0 calls\n");
    for (int r = 0; r < 18; r++) { // ranks 3 and 4 wait longest
        idist_run_rank rank = {20, r == 3 ? 20 : r == 4 ? 19 : 10, 1, 1, 0};
        many[r] = rank;
        if (r != 3 && r != 4)
            snprintf(
                text + strlen(text), sizeof text - strlen(text),
                "    rank %d (h%d): 0.1 examples/s, waited 50.0 %% of the time, sent 0.0 MB in "
                "1 calls\n",
                r, r / 2);
    }
    strcat(text, "    and 2 ranks that computed for a shorter time\n"
                 "    slowest: rank 0, which computed for 10.0 s; the other ranks for 8.9 s on "
                 "average\n");
    log_is(many, 18, text);
}

//------------------------------------------------------------------------------
// errors
//------------------------------------------------------------------------------

static void *report_elsewhere(void *arg) {
    const idist_run *run = *(const idist_run *const *)arg;
    idist_opts o = opts_of(((idist_group **)arg)[1]);
    idist_status status = idist_run_report(run, "other", NULL, &o);
    return (void *)(intptr_t)(status == IDIST_ERR_STATE &&
                              strstr(idist_last_error(), "has not called run_begin"));
}

static void errors(idist_group *world, int rank, int n, void *arg) {
    idist_run run = {0}, other = {0};
    idist_run_rank ranks[4];
    idist_opts o = opts_of(world);
    const void *both[2] = {&run, world};
    pthread_t thread;
    void *result;
    (void)arg;

    rank_is(rank, idist_run_begin(NULL), IDIST_ERR_ARG);
    rank_is(rank, idist_run_report(&run, "none", ranks, &o), IDIST_ERR_STATE);
    rank_ok(rank, idist_run_begin(&run));
    rank_is(rank, idist_run_report(rank == n - 1 ? NULL : &run, "x", ranks, &o), IDIST_ERR_ARG);
    rank_ok(rank, idist_run_begin(&run));
    rank_ok(rank, idist_run_begin(&other)); // ends the first run
    rank_is(rank, idist_run_report(&run, "first", ranks, &o), IDIST_ERR_STATE);
    rank_ok(rank, idist_run_report(&other, "second", ranks, &o));
    rank_is(rank, idist_run_report(&other, "again", ranks, &o), IDIST_ERR_STATE);
    rank_ok(rank, idist_run_begin(&run));
    TAP_REQUIRE(pthread_create(&thread, NULL, report_elsewhere, both) == 0);
    TAP_REQUIRE(pthread_join(thread, &result) == 0);
    rank_check(result != NULL, "rank %d: another thread reports", rank);
    rank_ok(rank, idist_run_report(&run, "x", ranks, &o));
}

static void without_world(void) {
    idist_run run = {0};

    tap_is(idist_run_begin(&run), IDIST_OK, "begin before there is a world");
    TAP_REQUIRE(idist_initialize(NULL) == IDIST_OK);
    tap_is(idist_run_report(&run, "early", NULL, NULL), IDIST_OK, "report in a world");
    TAP_REQUIRE(idist_finalize() == IDIST_OK);
    tap_is(idist_run_begin(&run), IDIST_OK, "begin");
    tap_is(idist_run_report(&run, "late", NULL, NULL), IDIST_ERR_STATE, "report without a world");
}

int main(void) {
    static const int sizes[5] = {1, 2, 3, 4, 7};
    static const char *const names[4] = {"barrier", "request", "group of calls", "ddp"};
    tap_deadline(60);
    setenv("IDIST_LOG", "error", 1);
    TAP_REQUIRE(freopen("/dev/null", "w", stderr) != NULL); // rank 0 of each world logs there
    for (int how = 0; how < 4; how++) {
        arrived = 0;
        ranks_case(3, NULL, late_rank, &how, "a late rank, %s", names[how]);
    }
    for (int i = 0; i < 5; i++)
        ranks_case(sizes[i], NULL, counted, NULL, "counted, %d ranks", sizes[i]);
    for (int i = 0; i < 4; i++)
        ranks_case(sizes[i], NULL, errors, NULL, "errors, %d ranks", sizes[i]);
    of_processes();
    made_up();
    without_world();
    return tap_done();
}
