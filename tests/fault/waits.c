// waits: calls that wait beside other calls. Deadlines hold, no legal program is mistaken for a
// deadlock, and ranks that cannot join do not make other ranks wait.
#include "idist.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ranks.h"

static float big[4u << 20];

// Receives with a short time-out while another receive stays pending for a long time. The short
// receive must return in time.
static void deadline_beside(idist_group *world, int rank, int n, void *arg) {
    idist_request pending;
    idist_opts o = opts_of(world), a = opts_async(world, &pending), brief = opts_of(world);
    int32_t x = 0, y = 0;
    int64_t start;
    (void)arg;
    brief.timeout_ms = 150;
    rank_ok(rank, idist_recv(&x, 1, IDIST_I32, (rank + 1) % n, 1, NULL, &a));
    start = tap_now_ms();
    rank_is(rank, idist_recv(&y, 1, IDIST_I32, (rank + 1) % n, 2, NULL, &brief), IDIST_ERR_TIMEOUT);
    rank_check(tap_now_ms() - start < 150 + 400 * test_slow_factor(), "rank %d: after %d ms", rank,
               (int)(tap_now_ms() - start));
    rank_ok(rank, idist_barrier(&o));
    rank_ok(rank, idist_send(&rank, 1, IDIST_I32, (rank + n - 1) % n, 1, &o));
    rank_ok(rank, idist_wait(&pending));
}

// Starts two receives. The older receive has the nearer deadline and must return in time.
static void older_deadline(idist_group *world, int rank, int n, void *arg) {
    idist_request r[2] = {{NULL}, {NULL}};
    idist_opts a = opts_async(world, &r[0]), b = opts_async(world, &r[1]), o = opts_of(world);
    int32_t x, y;
    (void)arg;
    a.timeout_ms = 80;
    rank_ok(rank, idist_recv(&x, 1, IDIST_I32, (rank + 1) % n, 1, NULL, &a)); // never sent
    rank_ok(rank, idist_recv(&y, 1, IDIST_I32, (rank + 1) % n, 2, NULL, &b));
    int64_t start = tap_now_ms();
    rank_is(rank, idist_wait(&r[0]), IDIST_ERR_TIMEOUT);
    rank_check(tap_now_ms() - start < 80 + 400 * test_slow_factor(), "rank %d: after %d ms", rank,
               (int)(tap_now_ms() - start));
    rank_ok(rank, idist_barrier(&o));
    rank_ok(rank, idist_send(&rank, 1, IDIST_I32, (rank + n - 1) % n, 2, &o));
    rank_ok(rank, idist_wait(&r[1]));
}

// Legal programs in which single-threaded ranks wait for each other for a long time in different
// calls.
typedef enum {
    ISEND_THEN_RECV,
    ISEND_THEN_BARRIER,
    ROOT_GOES_ON,
    TWO_GROUPS,
    ANSWERS_LATE,
    IRECV_THEN_COMPUTE,
    N_LEGAL
} legal;
static const char *const legal_names[N_LEGAL] = {
    "a large immediate send, then a receive",
    "a large immediate send, then a barrier",
    "a root that left its group",
    "an immediate call on the world beside a barrier of a part",
    "an answer that takes its time",
    "a request open while the program computes"};

static int legal_body(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    legal what = *(legal *)arg;
    idist_group *g = NULL;
    idist_request r = {NULL};
    idist_opts o = opts_of(world), a = opts_async(world, &r), og;
    size_t count = sizeof big / sizeof big[0];
    idist_status s = idist_split(world, rank < 2 ? 0 : 1, rank, &g);
    int32_t x = 1;
    (void)n;
    og = opts_of(g);
    if (s != IDIST_OK) return 96;
    if (what == ISEND_THEN_RECV || what == ISEND_THEN_BARRIER) {
        if (rank == 0) s = idist_send(big, count, IDIST_F32, 1, 5, &a);
        if (rank == 1) tap_sleep_ms(120); // meanwhile rank 0 announces its wait
        if (rank == 1 && s == IDIST_OK) s = idist_recv(big, count, IDIST_F32, 0, 5, NULL, &o);
        if (what == ISEND_THEN_BARRIER && s == IDIST_OK) s = idist_barrier(&o);
        if (what == ISEND_THEN_RECV && rank == 1 && s == IDIST_OK)
            s = idist_send(&x, 1, IDIST_I32, 0, 6, &o);
        if (what == ISEND_THEN_RECV && rank == 0 && s == IDIST_OK)
            s = idist_recv(&x, 1, IDIST_I32, 1, 6, NULL, &o);
        if (s == IDIST_OK) s = idist_wait(&r);
    } else if (what == ROOT_GOES_ON) {
        // Rank 1 has announced that it waits in g. Rank 0 then leaves and frees g.
        if (rank == 0) tap_sleep_ms(120);
        if (rank < 2) s = idist_broadcast(&x, 1, IDIST_I32, 0, &og);
        if (rank == 0 && s == IDIST_OK) s = idist_free_group(&g);
        if (rank == 1) tap_sleep_ms(200);
        if (s == IDIST_OK) s = idist_barrier(&o);
    } else if (what == ANSWERS_LATE) {
        // Rank 1 has announced that it waits for rank 0. Rank 1 receives the message of rank 0 and
        // answers later.
        if (rank == 0) tap_sleep_ms(120);
        if (rank == 0) s = idist_send(&x, 1, IDIST_I32, 1, 5, &o);
        if (rank == 0 && s == IDIST_OK) s = idist_recv(&x, 1, IDIST_I32, 1, 6, NULL, &o);
        if (rank == 1) s = idist_recv(&x, 1, IDIST_I32, 0, 5, NULL, &o);
        if (rank == 1) tap_sleep_ms(200);
        if (rank == 1 && s == IDIST_OK) s = idist_send(&x, 1, IDIST_I32, 0, 6, &o);
    } else if (what == IRECV_THEN_COMPUTE) {
        // Rank 1 waits for a message that rank 0 sends after a computation.
        if (rank == 0) s = idist_recv(&x, 1, IDIST_I32, 1, 5, NULL, &a);
        if (rank == 0) tap_sleep_ms(200);
        if (rank == 0 && s == IDIST_OK) s = idist_send(&rank, 1, IDIST_I32, 1, 6, &o);
        if (rank == 0 && s == IDIST_OK) s = idist_wait(&r);
        if (rank == 1) s = idist_recv(&x, 1, IDIST_I32, 0, 6, NULL, &o);
        if (rank == 1 && s == IDIST_OK) s = idist_send(&x, 1, IDIST_I32, 0, 5, &o);
    } else { // a request on the world and a barrier of a subgroup, while the last rank is late
        if (rank == 2) tap_sleep_ms(200);
        s = idist_all_reduce(&x, big, 1, IDIST_I32, IDIST_SUM, &a);
        if (rank < 2 && s == IDIST_OK) s = idist_barrier(&og);
        if (s == IDIST_OK) s = idist_wait(&r);
    }
    proc_result(slot, s);
    return s == IDIST_OK && idist_close(&world) == IDIST_OK ? 0 : 1;
}

static void legal_calls(legal what, const char *transport) {
    procs p;
    idist_desc d = desc_with(transport, "auto");
    tap_running("%s, %s", legal_names[what], transport);
    ranks_reset();
    procs_start(&p, 3, &d, legal_body, &what);
    rank_check(procs_wait(&p, 15000) == 0, "ranks hang");
    for (int k = 0; k < 3; k++)
        rank_check(p.slot[k].has_result && p.slot[k].status == IDIST_OK, "rank %d: %s: %s", k,
                   idist_status_name((idist_status)p.slot[k].status), p.slot[k].text);
    ranks_report("legal: %s, %s", legal_names[what], transport);
    procs_free(&p);
}

// Results of several processes that start a world: status, time in ms and error text of each rank.
typedef struct start {
    idist_status status[4];
    int ms[4];
    char text[4][400];
} start;

static void start_rank(start *all, int rank, int world_size, const char *secret, int port) {
    idist_desc d;
    char url[64];
    int64_t begin = tap_now_ms();
    memset(&d, 0, sizeof d);
    snprintf(url, sizeof url, "tcp://127.0.0.1:%d", port);
    d.init_method = url;
    d.rank = rank;
    d.world_size = world_size;
    d.secret = secret;
    d.secret_nbytes = strlen(secret);
    d.init_timeout_ms = 3000;
    all->status[rank] = idist_initialize(&d);
    all->ms[rank] = (int)(tap_now_ms() - begin);
    copy_text(all->text[rank], sizeof all->text[rank], idist_last_error());
}

static void cannot_join(int odd_size, const char *odd_secret, const char *name) {
    start *all = (start *)shared_alloc(sizeof *all);
    int port = 20000 + (int)(getpid() % 20000);
    pid_t pid[3];
    tap_running("%s", name);
    ranks_reset();
    for (int r = 0; r < 3; r++) {
        pid[r] = fork();
        if (pid[r] == 0) {
            start_rank(all, r, r == 2 ? odd_size : 3, r == 2 ? odd_secret : "the secret of the job",
                       port);
            _exit(0);
        }
    }
    for (int r = 0; r < 3; r++) waitpid(pid[r], NULL, 0);
    for (int r = 0; r < 3; r++) {
        rank_check(all->status[r] != IDIST_OK && all->text[r][0], "rank %d: %s", r,
                   idist_status_name(all->status[r]));
        rank_check(all->ms[r] < 3000 + 1500 * test_slow_factor(), "rank %d: after %d ms", r,
                   all->ms[r]);
        if (odd_size != 3) // all ranks can compare sizes, so no rank waits for its deadline
            rank_check(all->status[r] == IDIST_ERR_ENV && all->ms[r] < 1500 * test_slow_factor(),
                       "rank %d: %s after %d ms: %s", r, idist_status_name(all->status[r]),
                       all->ms[r], all->text[r]);
    }
    if (odd_size == 3) {
        rank_check(all->status[2] == IDIST_ERR_AUTH, "rank 2: %s",
                   idist_status_name(all->status[2]));
        rank_check(all->status[0] == IDIST_ERR_TIMEOUT && strstr(all->text[0], "refused"),
                   "rank 0: %s", all->text[0]);
    }
    ranks_report("cannot join: %s", name);
    munmap(all, sizeof *all);
}

// Kills a worker. The survivors may end in any way before the killed worker is reaped, but the
// report must name the killed worker.
static int dies(int local_rank, void *arg) {
    int way = *(int *)arg;
    if (idist_barrier(NULL) != IDIST_OK) return 9;
    if (local_rank == 2) raise(SIGKILL);
    if (idist_barrier(NULL) == IDIST_OK) return 9;
    if (way == 1) idist_finalize();
    if (way == 2) _exit(1);
    return 1;
}

static void first_failure(int way) {
    int wrong = 0;
    tap_running("first failure, way %d", way);
    for (int i = 0; i < 20; i++) {
        idist_report report;
        idist_desc d;
        memset(&d, 0, sizeof d);
        d.report = &report;
        if (idist_spawn(dies, &way, 4, &d) != IDIST_ERR_WORKER_FAILED || report.rank != 2 ||
            report.signal != SIGKILL)
            wrong++;
    }
    tap_is(wrong, 0, "the first failure is the killed worker, way %d", way);
}

// Starts worlds with few descriptors. All ranks must either form the world or get an error soon. A
// small number of descriptors must be enough.
static int barrier_worker(int local_rank, void *arg) {
    (void)local_rank;
    (void)arg;
    return idist_barrier(NULL) == IDIST_OK ? 0 : 1;
}

static void few_descriptors(void) {
    int first_good = 0, late = 0;
    for (int limit = 4; limit <= 32; limit += test_quick() ? 4 : 2) {
        int wait_status = 0;
        int64_t begin = tap_now_ms();
        fflush(NULL);
        pid_t pid = fork();
        tap_running("a limit of %d descriptors", limit);
        if (pid == 0) {
            struct rlimit few = {(rlim_t)limit, (rlim_t)limit};
            idist_desc d;
            memset(&d, 0, sizeof d);
            d.init_timeout_ms = 20000;
            for (int fd = 3; fd < 64; fd++) close(fd);
            _exit(setrlimit(RLIMIT_NOFILE, &few) == 0 &&
                          idist_spawn(barrier_worker, NULL, 3, &d) == IDIST_OK
                      ? 0
                      : 1);
        }
        waitpid(pid, &wait_status, 0);
        if (wait_status == 0 && !first_good) first_good = limit;
        if (tap_now_ms() - begin > 9000) late++;
    }
    tap_is(late, 0, "no limit on descriptors makes the start wait");
    tap_ok(first_good > 0 && first_good <= 24, "three ranks start with %d descriptors each",
           first_good);
}

int main(void) {
    tap_deadline(100);
    few_descriptors();
    for (int n = 1; n <= 3; n++) {
        ranks_case(n, NULL, deadline_beside, NULL, "a deadline beside a pending call, %d ranks", n);
        ranks_case(n, NULL, older_deadline, NULL, "a deadline of an older call, %d ranks", n);
    }
    for (int t = 0; t < N_PLACEMENTS; t++)
        for (int what = 0; what < N_LEGAL; what++) legal_calls((legal)what, transport_names[t]);
    cannot_join(4, "the secret of the job", "a rank that expects another number of ranks");
    cannot_join(3, "another secret of the job", "a rank with another secret");
    for (int way = 0; way < 3; way++) first_failure(way);
    return tap_done();
}
