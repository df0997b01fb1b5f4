// Ranks that are assigned through a file: processes know the path, the world's size and perhaps the
// name of a group. Each rank is assigned once, in whatever order the processes arrive. Error texts
// identify a process that is one too many, late or dead, or that was given a rank.
#include "idist.h"

#include <sys/wait.h>
#include <unistd.h>

#include "ranks.h"

enum { PATIENT_MS = 15000, SHORT_MS = 700 };

// The outcome of one process.
typedef struct outcome {
    int status, rank;
    char text[600];
} outcome;

// The part of a test that its processes share.
typedef struct meeting {
    char url[200];
    int size, rounds;
    int started;  // processes that are ready to begin; atomic
    uint64_t sum; // sum over the group
    outcome out[16];
} meeting;

static char folder[64];
static meeting *m;

static idist_desc desc_of(int rank, int size, const char *group, int timeout_ms) {
    idist_desc d = desc_with("auto", "auto");
    d.init_method = m->url;
    d.rank = rank;
    d.world_size = size;
    d.group_name = group;
    d.timeout_ms = PATIENT_MS * test_slow_factor();
    d.init_timeout_ms = timeout_ms * test_slow_factor();
    return d;
}

static void note(outcome *out, idist_status status) {
    out->status = (int)status;
    copy_text(out->text, sizeof out->text, status ? idist_last_error() : "");
}

static void wait_for_all(int n, int round) {
    __atomic_add_fetch(&m->started, 1, __ATOMIC_ACQ_REL);
    while (__atomic_load_n(&m->started, __ATOMIC_ACQUIRE) < n * (round + 1)) tap_sleep_ms(0);
}

// Checks that every rank was assigned once. The sum of 1 << rank proves this.
static void check_world(idist_group *world, int size) {
    int rank = idist_group_rank(world);
    int64_t mine[2] = {1, 0}, sum[2] = {0, 0};
    idist_opts o = opts_of(world);
    mine[1] = (int64_t)1 << rank;
    rank_check(idist_group_size(world) == size, "a world of %d", idist_group_size(world));
    rank_is(rank, idist_all_reduce(mine, sum, 2, IDIST_I64, IDIST_SUM, &o), IDIST_OK);
    rank_check(sum[0] == size && sum[1] == (1 << size) - 1, "rank %d: sums %lld and 0x%llx", rank,
               (long long)sum[0], (unsigned long long)sum[1]);
}

// Opens two worlds, one after the other without a call in between, and closes them. Then opens and
// closes one more world.
static int draws(int number, void *arg) {
    idist_group *worlds[3] = {NULL, NULL, NULL};
    (void)arg;
    for (int i = 0; i < m->rounds; i++) {
        idist_desc d = desc_of(-1, m->size, NULL, PATIENT_MS);
        wait_for_all(m->size, i);
        for (int k = 0; k < 2; k++)
            if (!rank_is(number, idist_open(&d, &worlds[k]), IDIST_OK)) return 1;
        for (int k = 0; k < 2; k++) check_world(worlds[k], m->size);
        for (int k = 0; k < 2; k++)
            if (!rank_is(number, idist_close(&worlds[k]), IDIST_OK)) return 1;
        if (!rank_is(number, idist_open(&d, &worlds[2]), IDIST_OK)) return 1;
        check_world(worlds[2], m->size);
        if (!rank_is(number, idist_close(&worlds[2]), IDIST_OK)) return 1;
    }
    return 0;
}

static void begin(const char *name, int size, int rounds) {
    tap_running("%s", name);
    ranks_reset();
    memset(m, 0, sizeof *m);
    snprintf(m->url, sizeof m->url, "file://%s/meet", folder);
    m->size = size;
    m->rounds = rounds;
}

static void nothing_is_left(const char *name) {
    tap_is(count_entries(folder, ""), 0, "%s: no file is left", name);
}

static void each_rank_once(void) {
    for (int n = 1; n <= 4; n++) {
        begin("each rank once", n, test_quick() ? 25 : 200);
        procs_run(n, 90000 * test_slow_factor(), draws, NULL);
        ranks_report("%d processes draw each rank once, %d times three worlds", n, m->rounds);
        nothing_is_left("each rank once");
    }
}

// Joins group a in processes with even numbers, and group b in processes with odd numbers. Both
// groups have m->size processes.
static int draws_in_group(int number, void *arg) {
    (void)arg;
    for (int i = 0; i < m->rounds; i++) {
        idist_desc d = desc_of(-1, m->size, number % 2 ? "b" : "a", PATIENT_MS);
        int64_t mine = number % 2, sum = 0;
        wait_for_all(2 * m->size, i);
        if (!rank_is(number, idist_initialize(&d), IDIST_OK)) return 1;
        check_world(NULL, m->size);
        rank_is(number, idist_all_reduce(&mine, &sum, 1, IDIST_I64, IDIST_SUM, NULL), IDIST_OK);
        rank_check(sum == mine * m->size, "the groups are mixed: sum %lld", (long long)sum);
        if (!rank_is(number, idist_finalize(), IDIST_OK)) return 1;
    }
    return 0;
}

static void two_groups(void) {
    begin("two groups at one path", 3, test_quick() ? 15 : 100);
    procs_run(6, 60000 * test_slow_factor(), draws_in_group, NULL);
    ranks_report("two groups of 3 meet at one path, %d times", m->rounds);
    nothing_is_left("two groups");
}

// Joins from two hosts. Local ranks must number the ranks of a host in rank order.
static int draws_on_host(int number, void *arg) {
    int32_t mine[3], all[15], before = 0, here = 0;
    idist_desc d = desc_of(-1, 5, NULL, PATIENT_MS);
    (void)arg;
    d.host_id = number < 2 ? "a" : "b";
    setenv("IDIST_ADDR", "127.0.0.1", 1);
    if (!rank_is(number, idist_initialize(&d), IDIST_OK)) return 1;
    mine[0] = number < 2;
    mine[1] = idist_get_local_rank();
    mine[2] = idist_get_nproc_per_node();
    rank_is(number, idist_all_gather(mine, all, 3, IDIST_I32, NULL), IDIST_OK);
    for (int i = 0; i < 5; i++) {
        here += all[3 * i] == mine[0];
        before += i < idist_get_rank() && all[3 * i] == mine[0];
    }
    rank_check(mine[1] == before && mine[2] == here, "local rank %d of %d, expected %d of %d",
               mine[1], mine[2], before, here);
    return idist_finalize() != IDIST_OK;
}

// Makes a world, forks, and makes the next world with the child.
static int forks(int number, void *arg) {
    idist_desc d = desc_of(-1, 2, NULL, PATIENT_MS);
    int wait_status = -1;
    (void)arg;
    if (!rank_is(number, idist_initialize(&d), IDIST_OK)) return 1;
    check_world(NULL, 2);
    int rank = idist_get_rank();
    if (!rank_is(number, idist_finalize(), IDIST_OK)) return 1;
    if (rank) return 0;
    pid_t child = fork();
    if (!rank_is(number, idist_initialize(&d), IDIST_OK)) _exit(1);
    check_world(NULL, 2);
    if (!rank_is(number, idist_finalize(), IDIST_OK)) _exit(1);
    if (child == 0) _exit(0);
    return waitpid(child, &wait_status, 0) != child || wait_status != 0;
}

static void hosts_and_forks(void) {
    begin("hosts", 5, 1);
    procs_run(5, 30000 * test_slow_factor(), draws_on_host, NULL);
    ranks_report("local ranks come from the hosts");
    begin("fork", 2, 1);
    procs_run(2, 30000 * test_slow_factor(), forks, NULL);
    ranks_report("a process that drew makes a next world with its child");
    nothing_is_left("fork");
}

// Makes worlds whose ranks are threads.
static void *draws_in_thread(void *arg) {
    idist_desc d = desc_of(-1, 3, NULL, PATIENT_MS);
    for (int i = 0; i < m->rounds; i++) {
        idist_group *world = NULL;
        (void)arg;
        if (!rank_is(i, idist_open(&d, &world), IDIST_OK)) break;
        check_world(world, 3);
        if (!rank_is(i, idist_close(&world), IDIST_OK)) break;
    }
    return NULL;
}

static void threads(void) {
    pthread_t id[3];
    begin("threads", 3, test_quick() ? 5 : 20);
    for (int i = 0; i < 3; i++)
        TAP_REQUIRE(pthread_create(&id[i], NULL, draws_in_thread, NULL) == 0);
    for (int i = 0; i < 3; i++) TAP_REQUIRE(pthread_join(id[i], NULL) == 0);
    ranks_report("three threads draw, %d times", m->rounds);
    nothing_is_left("threads");
}

//------------------------------------------------------------------------------
// one process at a time
//------------------------------------------------------------------------------

// Forks a process that opens a world and records the outcome in m->out[slot]. Returns the pid of
// the process.
static pid_t one(int slot, idist_desc d) {
    fflush(NULL);
    m->out[slot].status = 1; // not a status of idist
    pid_t pid = fork();
    TAP_REQUIRE(pid >= 0);
    tap_register_child(pid);
    if (pid) return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm((unsigned)(60 * test_slow_factor()));
    idist_group *world = NULL;
    note(&m->out[slot], idist_open(&d, &world));
    m->out[slot].rank = world ? idist_group_rank(world) : -1;
    if (world) idist_close(&world);
    _exit(0);
}

static void join(pid_t pid) {
    TAP_REQUIRE(waitpid(pid, NULL, 0) == pid);
    tap_forget_child(pid);
}

static void end(pid_t pid) {
    kill(pid, SIGKILL);
    join(pid);
}

// Waits until the store of the world that is being made has a key. Returns a client of the store,
// which the caller closes.
static idist_store *store_with(const char *url, const char *key) {
    idist_store_desc d;
    idist_store *store = NULL;
    memset(&d, 0, sizeof d);
    d.timeout_ms = PATIENT_MS * test_slow_factor();
    TAP_REQUIRE(idist_store_open(url, &d, &store) == IDIST_OK);
    TAP_REQUIRE(idist_store_wait(store, &key, 1, 0) == IDIST_OK);
    return store;
}

static void is(int slot, idist_status status, const char *part, const char *name) {
    tap_is(m->out[slot].status, status, "%s", name);
    tap_like(m->out[slot].text, part, "%s: the text", name);
}

// Takes rank 1 of 2 without joining. A third process is one too many and must be refused. The
// waiting process must not be affected.
static void too_many(void) {
    int64_t drawn = 0;
    char part[300], url[300];
    begin("one process too many", 2, 1);
    pid_t first = one(0, desc_of(-1, 2, "b", 2 * SHORT_MS));
    snprintf(url, sizeof url, "%s.b", m->url);
    idist_store *store = store_with(url, "idist/ranks");
    tap_is(idist_store_add(store, "idist/drawn", 1, &drawn), IDIST_OK, "rank 1 is drawn");
    idist_store_close(&store);
    join(one(1, desc_of(-1, 2, "b", PATIENT_MS)));
    is(1, IDIST_ERR_RANK_TAKEN, "all 2 ranks", "one process too many");
    snprintf(part, sizeof part, "%s/meet.b (group \"b\")", folder);
    tap_like(m->out[1].text, part, "it names path and group");
    join(first);
    is(0, IDIST_ERR_TIMEOUT, "did not show up within", "the others go on to wait");
    tap_like(m->out[0].text, "rank 1.", "for the rank that was drawn");
    nothing_is_left("too many");
}

// Opens a world of 3 in each of five processes that start at the same time. Three of them must
// join, and the remaining two are refused or time out.
static int races(int number, void *arg) {
    idist_desc d = desc_of(-1, 3, NULL, SHORT_MS);
    idist_group *world = NULL;
    (void)arg;
    wait_for_all(5, 0);
    note(&m->out[number], idist_open(&d, &world));
    if (world) check_world(world, 3);
    return world && idist_close(&world) != IDIST_OK;
}

static void three_of_five(void) {
    for (int i = 0; i < (test_quick() ? 3 : 10); i++) {
        int joined = 0;
        begin("three of five", 3, 1);
        procs_run(5, 30000 * test_slow_factor(), races, NULL);
        for (int k = 0; k < 5; k++) {
            joined += m->out[k].status == IDIST_OK;
            rank_check(m->out[k].status == IDIST_OK || m->out[k].status == IDIST_ERR_RANK_TAKEN ||
                           m->out[k].status == IDIST_ERR_TIMEOUT,
                       "process %d: %s", k, m->out[k].text);
        }
        rank_check(joined == 3, "%d joined", joined);
        ranks_report("three of five processes join");
        nothing_is_left("three of five");
    }
}

// Kills rank 0 while another rank waits. The waiting rank must report the loss. The file stays, and
// the next world must be complete.
static void leftover(void) {
    idist_store *store;
    begin("leftover", 3, test_quick() ? 2 : 5);
    pid_t first = one(0, desc_of(-1, 3, NULL, PATIENT_MS));
    store = store_with(m->url, "idist/ranks");
    pid_t second = one(1, desc_of(-1, 3, NULL, PATIENT_MS));
    idist_store_close(&store);
    store = store_with(m->url, "idist/1");
    idist_store_close(&store);
    end(first);
    tap_is(count_entries(folder, "meet"), 1, "a dead rank 0 leaves its file");
    procs_run(3, 60000 * test_slow_factor(), draws, NULL);
    ranks_report("the next worlds are whole, and have ranks 0 to 2");
    join(second);
    is(1, IDIST_ERR_PEER_LOST, "rank 0 was lost", "a rank of the dead world is told");
    nothing_is_left("leftover");
}

// Kills a process after its rank is assigned. The waiting process must report the loss.
static void dies(void) {
    begin("a process dies after it drew", 3, 1);
    pid_t first = one(0, desc_of(-1, 3, NULL, PATIENT_MS));
    idist_store *store = store_with(m->url, "idist/ranks");
    pid_t second = one(1, desc_of(-1, 3, NULL, PATIENT_MS));
    idist_store_close(&store);
    store = store_with(m->url, "idist/1/node/1");
    idist_store_close(&store);
    end(second);
    join(first);
    is(0, IDIST_ERR_PEER_LOST, "rank 1", "a process that dies after it drew is lost");
    nothing_is_left("dies");
}

// Mixes processes that were given a rank with processes that were not.
static void mixed(void) {
    begin("given and drawn ranks", 2, 1);
    pid_t first = one(0, desc_of(-1, 2, NULL, PATIENT_MS));
    idist_store *store = store_with(m->url, "idist/ranks");
    idist_store_close(&store);
    join(one(1, desc_of(1, 2, NULL, PATIENT_MS)));
    is(1, IDIST_ERR_ENV, "was given rank 1 (desc.rank)", "a given rank among drawn ones");
    join(one(1, desc_of(0, 2, NULL, PATIENT_MS)));
    is(1, IDIST_ERR_ADDR_IN_USE, "desc.rank -1", "a given rank 0 among drawn ones");
    join(one(1, desc_of(-1, 2, NULL, PATIENT_MS)));
    join(first);
    tap_ok(m->out[0].status == 0 && m->out[1].status == 0, "the drawn ones join all the same");

    first = one(0, desc_of(0, 2, NULL, PATIENT_MS));
    store = store_with(m->url, "idist/ranks");
    idist_store_close(&store);
    join(one(1, desc_of(-1, 2, NULL, PATIENT_MS)));
    is(1, IDIST_ERR_ENV, "was given no rank", "no rank among given ones");
    join(one(1, desc_of(1, 2, NULL, PATIENT_MS)));
    join(first);
    tap_ok(m->out[0].status == 0 && m->out[1].status == 0, "the given ones join all the same");
    nothing_is_left("mixed");
}

// Takes the init method, the world size and the group name from the environment.
static int by_environment(int number, void *arg) {
    (void)arg;
    setenv("IDIST_INIT_METHOD", m->url, 1);
    setenv(number ? "WORLD_SIZE" : "IDIST_WORLD_SIZE", "2", 1);
    setenv("IDIST_GROUP_NAME", "job-7", 1);
    setenv("IDIST_INIT_TIMEOUT_MS", "15000", 1);
    if (!rank_is(number, idist_initialize(NULL), IDIST_OK)) return 1;
    check_world(NULL, 2);
    rank_check(strstr(idist_show_config(), "meet.job-7\n") &&
                   strstr(idist_show_config(), "rank assigned"),
               "show_config: %s", idist_show_config());
    return idist_finalize() != IDIST_OK;
}

static void refused(void) {
    static const struct {
        const char *method, *group, *part;
        int rank, size;
    } bad[] = {{"file:///tmp/idist-x", NULL, "WORLD_SIZE", -1, 0},
               {NULL, NULL, "file:///path", -1, 2},
               {"tcp://127.0.0.1:29500", NULL, "file:///path", -1, 2},
               {"file://there", NULL, "begins with a slash", -1, 2},
               {"file://there", NULL, "begins with a slash", 0, 2},
               {"file:///tmp/idist-x", NULL, "0 <= rank", -2, 2},
               {"file:///tmp/idist-x", NULL, "0 <= rank", 2, 2},
               {"file:///tmp/idist-x", "a/b", "group_name \"a/b\"", -1, 2},
               {"file:///tmp/idist-x", "..\n", "group_name", -1, 2}};
    idist_group *world = NULL;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        idist_desc d = desc_of(bad[i].rank, bad[i].size, bad[i].group, SHORT_MS);
        d.init_method = bad[i].method;
        idist_status status = idist_open(&d, &world);
        tap_ok(status == IDIST_ERR_ARG || status == IDIST_ERR_ENV, "refused: %s, rank %d of %d",
               bad[i].method ? bad[i].method : "no method", bad[i].rank, bad[i].size);
        tap_like(idist_last_error(), bad[i].part, "the text says why");
    }
    idist_desc d = desc_of(-1, 2, NULL, SHORT_MS);
    d.init_method = "file:///nonexistent/meet";
    tap_is(idist_open(&d, &world), IDIST_ERR_SYSTEM, "a folder that is not there");
    tap_like(idist_last_error(), "/nonexistent/meet cannot be opened", "is named");
}

int main(void) {
    tap_deadline(200 * test_slow_factor());
    snprintf(folder, sizeof folder, "/tmp/idist-draw-XXXXXX");
    TAP_REQUIRE(mkdtemp(folder));
    m = (meeting *)shared_alloc(sizeof *m);
    each_rank_once();
    two_groups();
    hosts_and_forks();
    too_many();
    three_of_five();
    leftover();
    dies();
    mixed();
    begin("environment", 2, 1);
    procs_run(2, 30000 * test_slow_factor(), by_environment, NULL);
    ranks_report("size, group and method from the environment");
    refused();
    threads(); // last, because the tests above fork
    rmdir(folder);
    munmap(m, sizeof *m);
    return tap_done();
}
