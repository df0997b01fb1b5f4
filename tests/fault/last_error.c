// last_error: a call that succeeds leaves idist_last_error unchanged, even if something failed
// inside the call. Examples are a repeated attempt to connect, a variable that was ignored, and a
// failure of another group.
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

typedef struct meeting {
    int attempts; // number of completed attempts of rank 1 to connect
    int done;     // rank 1 no longer needs the server
    int port;
    const char *way; // format of the init method, or NULL for the default
    bool is_poor;    // no shared memory is available
    char folder[32];
} meeting;

static meeting *met;    // shared by all ranks
static bool is_counted; // true in the process whose attempts count

static int counted_connect(int fd, const struct sockaddr *address, socklen_t nbytes) {
    int result = connect(fd, address, nbytes);
    if (is_counted) __atomic_add_fetch(&met->attempts, 1, __ATOMIC_RELEASE);
    return result;
}

#define connect counted_connect
#define IDIST_IMPLEMENTATION
#include "idist.h"
#undef connect

#include "idist_train.h"

#include "ranks.h"

static const char *const MARK = "store_close: the pointer is NULL";

// Makes a call that fails, so that idist_last_error returns MARK from now on.
static void mark(void) { rank_is(0, idist_store_close(NULL), IDIST_ERR_ARG); }

// Checks idist_last_error after a call. If `fails` is true, something must have failed inside the
// call, because otherwise the case would prove nothing.
static void unchanged(const char *name, idist_status status, bool fails) {
    bool failed = idist__me.has_kept;
    rank_check(status == IDIST_OK, "%s: got %s", name, idist_status_name(status));
    rank_check(strcmp(idist_last_error(), MARK) == 0, "%s: left \"%s\"", name, idist_last_error());
    rank_check(!fails || failed, "%s: nothing has failed inside", name);
}

// Makes rank 0 wait until rank 1 has failed to connect once.
static void come_in_order(int rank) {
    int64_t until_ms = tap_now_ms() + 10000 * test_slow_factor();
    is_counted = rank == 1;
    while (rank == 0 && !__atomic_load_n(&met->attempts, __ATOMIC_ACQUIRE) &&
           tap_now_ms() < until_ms)
        sched_yield();
}

static idist_desc meeting_desc(int rank, char url[64]) {
    idist_desc d;
    memset(&d, 0, sizeof d);
    if (met->way) snprintf(url, 64, met->way, met->port);
    d.init_method = met->way ? url : NULL;
    d.master_addr = met->way ? NULL : "127.0.0.1";
    d.master_port = met->way ? 0 : met->port;
    d.rank = rank;
    d.world_size = 2;
    d.transport = met->way ? "tcp" : "auto";
    return d;
}

static int starts(int rank, void *arg) {
    char url[64];
    idist_desc d = meeting_desc(rank, url);
    int sum = 1;
    (void)arg;
    come_in_order(rank);
    rank_check(idist_last_error()[0] == 0, "nothing has failed yet: got \"%s\"",
               idist_last_error());
    rank_is(rank, idist_initialize(&d), IDIST_OK);
    rank_check(idist_last_error()[0] == 0, "initialize: left \"%s\"", idist_last_error());
    rank_check(rank == 0 || idist__me.has_kept, "rank 1 did not come first");
    mark();
    unchanged("all_reduce", idist_all_reduce(&sum, &sum, 1, IDIST_I32, IDIST_SUM, NULL), false);
    unchanged("finalize", idist_finalize(), false);
    return 0;
}

static int opens_a_store(int rank, void *arg) {
    char url[64];
    idist_store_desc d;
    idist_store *store = NULL;
    int64_t until_ms = tap_now_ms() + 10000 * test_slow_factor();
    (void)arg;
    memset(&d, 0, sizeof d);
    d.server = rank == 0;
    snprintf(url, sizeof url, "tcp://127.0.0.1:%d", met->port);
    come_in_order(rank);
    mark();
    unchanged("store_open", idist_store_open(url, &d, &store), rank == 1);
    unchanged("store_set", idist_store_set(store, rank ? "b" : "a", "1", 1), false);
    const char *keys[2] = {"a", "b"};
    unchanged("store_wait", idist_store_wait(store, keys, 2, 10000), false);
    if (rank == 1) __atomic_store_n(&met->done, 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&met->done, __ATOMIC_ACQUIRE) && tap_now_ms() < until_ms) sched_yield();
    idist_store_close(&store);
    return 0;
}

// Creates groups. One group fails while the world stays usable.
static int uses_groups(int rank, void *arg) {
    char url[64];
    idist_desc d = meeting_desc(rank, url);
    const int both[2] = {0, 1};
    idist_group *group = NULL, *part = NULL;
    idist_opts of_group;
    (void)arg;
    if (met->is_poor) {
        const struct rlimit none = {0, 0};
        signal(SIGXFSZ, SIG_IGN);
        rank_check(setrlimit(RLIMIT_FSIZE, &none) == 0, "setrlimit failed");
    }
    mark();
    unchanged("initialize", idist_initialize(&d), false);
    rank_check(!met->is_poor || !strstr(idist_show_config(), "shared memory, "), "it is not poor");
    unchanged("new_group", idist_new_group(both, 2, &group), false);
    unchanged("split", idist_split(NULL, rank, 0, &part), false);
    if (rank == 1) idist_abort(group);
    if (rank == 1) mark();
    for (int i = 0; i < 100; i++) {
        int64_t sum = i;
        unchanged("all_reduce", idist_all_reduce(&sum, &sum, 1, IDIST_I64, IDIST_SUM, NULL), false);
    }
    memset(&of_group, 0, sizeof of_group);
    of_group.group = group;
    rank_is(rank, idist_barrier(&of_group), IDIST_ERR_ABORTED);
    rank_check(strstr(idist_last_error(), "idist_abort") != NULL, "rank %d: got \"%s\"", rank,
               idist_last_error());
    mark();
    unchanged("free_group", idist_free_group(&part), false);
    unchanged("finalize", idist_finalize(), false);
    return 0;
}

static int is_quiet(int local_rank, void *arg) {
    (void)local_rank;
    rank_check(arg || idist_last_error()[0] == 0, "a worker begins with \"%s\"",
               idist_last_error());
    return 0;
}

// Tests a single process: variables that idist ignores, traces that cannot be written, workers, and
// getters.
static int is_alone(int rank, void *arg) {
    idist_desc d;
    (void)rank;
    (void)arg;
    mark();
    setenv("IDIST_RANK", "many", 1);
    setenv("IDIST_WORLD_SIZE", "2", 1);
    rank_check(strcmp(idist_launcher(), "none") != 0, "launcher: got %s", idist_launcher());
    unchanged("launcher", IDIST_OK, true);
    unsetenv("IDIST_RANK");
    unsetenv("IDIST_WORLD_SIZE");
    setenv("SLURM_STEP_ID", "0", 1);
    setenv("SLURM_PROCID", "0", 1);
    setenv("SLURM_NTASKS", "1", 1);
    setenv("SLURM_NODEID", "first", 1);
    setenv("IDIST_TRACE", "/no/such/folder/trace.json", 1);
    unchanged("initialize by slurm", idist_initialize(NULL), true);
    (void)idist_available_backends();
    (void)idist_show_config();
    (void)idist_hostname();
    unchanged("getters", IDIST_OK, false);
    void *memory = idist_alloc(100, NULL);
    unchanged("alloc", memory ? IDIST_OK : IDIST_ERR_NO_MEMORY, false);
    idist_free(memory);
    unchanged("finalize", idist_finalize(), false);

    memset(&d, 0, sizeof d);
    unchanged("parallel_run", idist_parallel_run(&d, is_quiet, &d), false);
    unchanged("spawn", idist_spawn(is_quiet, NULL, 2, &d), false);
    return 0;
}

// Tests checkpoints in a folder with a damaged file whose name makes it the latest checkpoint.
static int has_checkpoints(int rank, void *arg) {
    float weights[4] = {1, 2, 3, 4};
    idist_tensor tensor;
    idist_checkpoint_desc d;
    char path[128];
    (void)rank;
    (void)arg;
    memset(&tensor, 0, sizeof tensor);
    tensor.data = weights;
    tensor.count = 4;
    tensor.dtype = IDIST_F32;
    memset(&d, 0, sizeof d);
    d.folder = met->folder;
    snprintf(path, sizeof path, "%s/checkpoint_9_score=9.idist", met->folder);
    FILE *file = fopen(path, "w");
    TAP_REQUIRE(file && fputs("not a checkpoint", file) >= 0 && fclose(file) == 0);
    mark();
    unchanged("initialize", idist_initialize(NULL), false);
    unchanged("checkpoint_save", idist_checkpoint_save(&d, 1, 0.5, &tensor, 1, NULL, 0, NULL),
              false);
    unchanged("checkpoint_find", idist_checkpoint_find(&d, true, path, sizeof path, NULL), false);
    unchanged("checkpoint_load", idist_checkpoint_load(path, &tensor, 1, NULL, 0, NULL), false);
    unchanged("finalize", idist_finalize(), false);
    return 0;
}

static void together(int n, int (*fn)(int rank, void *arg), const char *way, bool is_poor,
                     const char *name) {
    tap_running("%s", name);
    ranks_reset();
    memset(met, 0, sizeof *met);
    met->port = free_port();
    met->way = way;
    met->is_poor = is_poor;
    snprintf(met->folder, sizeof met->folder, "/tmp/idist_last_error_XXXXXX");
    TAP_REQUIRE(mkdtemp(met->folder));
    procs_run(n, 30000, fn, NULL);
    ranks_report("%s", name);
    char command[64];
    snprintf(command, sizeof command, "rm -r %s", met->folder);
    TAP_REQUIRE(system(command) == 0);
}

int main(void) {
    tap_deadline(200 * test_slow_factor());
    met = (meeting *)shared_alloc(sizeof *met);
    (void)ranks__log();
    setenv("IDIST_LOG", "error", 1);
    together(2, starts, NULL, false, "rank 1 starts first, local socket");
    together(2, starts, "tcp://127.0.0.1:%d", false, "rank 1 starts first, TCP");
    together(2, opens_a_store, NULL, false, "a client opens a store before the server");
    together(2, uses_groups, NULL, false, "groups, one of which fails");
    together(2, uses_groups, NULL, true, "no shared memory");
    together(1, is_alone, NULL, false, "variables, getters, workers");
    together(1, has_checkpoints, NULL, false, "checkpoints, one of them damaged");
    return tap_done();
}
