// stop: SIGSTOP of a random rank at a random moment in a stream of collectives, most often inside a
// call.
//
// Every other rank must get IDIST_ERR_TIMEOUT with a text that names only the stopped rank. When
// the stopped rank continues, it must get an error too, and all ranks must be able to close their
// worlds. Further cases are:
//
// * a rank that is late for several calls that progress together
// * chains of ranks that wait for each other up to a stopped rank
// * a path that is cut between two of three ranks
//
// IDIST_TEST_TRIALS sets the number of trials per placement. The warning that a call waits is
// logged after 300 ms instead of 60 s.
#define IDIST__WARN_NS ((int64_t)300 * 1000000)
#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "ranks.h"

enum { TIMEOUT_MS = 500, N_MAX_BYTES = 4 << 20, N_CALLS = 4 };

typedef struct trial {
    uint64_t seed;
    int mode; // 0: one call at a time, 1: requests, 2: between group_begin and group_end
    int victim;
} trial;

static const char *const mode_names[3] = {"", ", requests", ", group"};

static size_t stream_count(uint64_t seed, int i) {
    unsigned shift = (unsigned)(tap_mix(seed + (uint64_t)i) % 20); // 8 bytes .. 4 MiB
    return (size_t)2 << shift;
}

static idist_status one_call(idist_group *world, float *x, const trial *t, int i, size_t count,
                             const idist_opts *o) {
    int n = idist_group_size(world);
    switch (tap_mix(t->seed * 31 + (uint64_t)i) % N_CALLS) {
    case 0: return idist_all_reduce(x, x, count, IDIST_F32, IDIST_MAX, o);
    case 1: return idist_barrier(o);
    case 2: return idist_all_gather(x, x + count / (size_t)n, count / (size_t)n / 2, IDIST_F32, o);
    default: return idist_reduce_scatter(x, x + count, count / (size_t)n, IDIST_F32, IDIST_MAX, o);
    }
}

static idist_status stream_step(idist_group *world, float *x, const trial *t, int i) {
    idist_request request[3] = {{NULL}, {NULL}, {NULL}};
    idist_opts plain = opts_of(world);
    size_t third = N_MAX_BYTES / 4 / 3;
    if (t->mode == 0) return one_call(world, x, t, i, stream_count(t->seed, i), &plain);
    if (t->mode == 2) idist_group_begin();
    for (int k = 0; k < 3; k++) {
        idist_opts o = t->mode == 2 ? plain : opts_async(world, &request[k]);
        size_t count = stream_count(t->seed, 3 * i + k) % third + 1;
        idist_status status = one_call(world, x + 2 * (size_t)k * third, t, 3 * i + k, count, &o);
        if (status == IDIST_OK || t->mode == 2) continue;
        idist_wait_all(request, 3); // all requests report the same status
        return status;
    }
    return t->mode == 2 ? idist_group_end() : idist_wait_all(request, 3);
}

static int stream(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    const trial *t = (const trial *)arg;
    float *x = (float *)calloc(2 * N_MAX_BYTES, 1);
    idist_status status = IDIST_OK;
    (void)rank;
    (void)n;
    if (!x) _exit(91);
    proc_phase(slot, 1);
    for (int i = 0; status == IDIST_OK; i++) {
        status = stream_step(world, x, t, i);
        __atomic_store_n(&slot->iterations, i, __ATOMIC_RELAXED);
    }
    proc_result(slot, status);
    free(x);
    idist_status closed = idist_close(&world);
    return closed != IDIST_OK && world == NULL ? 0 : 92;
}

static void judge(const procs *p, int victim, const char *what) {
    for (int k = 0; k < p->n; k++) {
        const proc_slot *s = &p->slot[k];
        if (!__atomic_load_n(&s->has_result, __ATOMIC_ACQUIRE)) {
            rank_fail("%s: hang: rank %d has no result after %d calls", what, k, s->iterations);
            continue;
        }
        rank_check(WIFEXITED(p->wait_status[k]) && WEXITSTATUS(p->wait_status[k]) == 0,
                   "%s: rank %d: idist_close: wait status 0x%x", what, k,
                   (unsigned)p->wait_status[k]);
        if (k == victim) continue; // the victim's error depends on when the other ranks have left
        rank_check(s->status == IDIST_ERR_TIMEOUT,
                   "%s: rank %d: got %s expected IDIST_ERR_TIMEOUT: %s", what, k,
                   idist_status_name((idist_status)s->status), s->text);
        rank_check(text_names_only(s->text, victim, -1, p->n),
                   "%s: rank %d names the wrong rank: got \"%s\"", what, k, s->text);
    }
}

static void one_trial(const char *placement, int number, uint64_t *random_state) {
    procs p;
    trial t;
    char what[200];
    idist_desc d = desc_with(placement, number % 3 == 1   ? "latency"
                                        : number % 3 == 2 ? "bandwidth"
                                                          : "auto");
    int n = 2 + (int)(tap_rand(random_state) % 3),
        victim = (int)(tap_rand(random_state) % (uint64_t)n), left = n - 1;
    int64_t end_ms;
    t.seed = tap_rand(random_state);
    t.mode = number % 3;
    t.victim = victim;
    d.timeout_ms = TIMEOUT_MS * test_slow_factor();
    snprintf(what, sizeof what, "trial %d: n=%d victim %d, %s %s%s", number, n, victim, placement,
             d.algorithm, mode_names[t.mode]);
    tap_running("%s", what);
    procs_start(&p, n, &d, stream, &t);
    if (!procs_await_phase(&p, 1, 10000)) rank_fail("%s: the ranks did not start", what);
    struct timespec ts = {0, (long)(tap_rand(random_state) % 30000) * 1000L};
    nanosleep(&ts, NULL);
    kill(p.pid[victim], SIGSTOP);
    end_ms = tap_now_ms() + 6000 * test_slow_factor();
    while (left && tap_now_ms() < end_ms) { // waits for the other ranks first
        left = 0;
        for (int k = 0; k < n; k++)
            left += k != victim && !__atomic_load_n(&p.slot[k].has_result, __ATOMIC_ACQUIRE);
        tap_sleep_ms(1);
    }
    kill(p.pid[victim], SIGCONT);
    procs_wait(&p, 8000);
    judge(&p, victim, what);
    procs_free(&p);
}

// A test in which rank 0 comes late, after the warning has named it. Before rank 0 comes, the test
// stops rank 1 inside the call and sets `is_stopped`. With two calls, the second call begins a
// little later. When the first call times out, the ranks have not had time to answer the ASK frame
// of the second call, which asks whether they still respond.
typedef struct late_and_stopped {
    int calls, is_stopped; // is_stopped is atomic
} late_and_stopped;

static int comes_late(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    const late_and_stopped *e = (const late_and_stopped *)arg;
    float *x = (float *)calloc(2, N_MAX_BYTES);
    idist_opts o = opts_of(world);
    idist_request request[2] = {{NULL}, {NULL}};
    idist_status status = IDIST_OK;
    (void)n;
    if (!x) _exit(91);
    rank_ok(rank, idist_barrier(&o));
    for (int i = 0; i < e->calls && status == IDIST_OK; i++) {
        float *y = x + i * (N_MAX_BYTES / (int)sizeof *x);
        if (i == (rank ? e->calls - 1 : 0)) proc_phase(slot, 1);
        while (rank == 0 && !__atomic_load_n(&e->is_stopped, __ATOMIC_ACQUIRE)) tap_sleep_ms(1);
        if (i > 0) tap_sleep_ms(20);
        o.request = &request[i];
        status = idist_all_reduce(y, y, N_MAX_BYTES / sizeof *y, IDIST_F32, IDIST_SUM, &o);
    }
    proc_result(slot, status == IDIST_OK ? idist_wait_all(request, (size_t)e->calls) : status);
    free(x);
    idist_close(&world);
    return 0;
}

static void stopped_after_the_warning(const char *placement, int calls) {
    procs p;
    idist_desc d = desc_with(placement, "auto");
    late_and_stopped *e = (late_and_stopped *)shared_alloc(sizeof *e);
    tap_running("%d calls, stopped after the warning, %s", calls, placement);
    ranks_reset();
    e->calls = calls;
    d.timeout_ms = 2500 * test_slow_factor();
    procs_start(&p, 3, &d, comes_late, e);
    rank_check(procs_await_phase(&p, 1, 10000), "the ranks did not start");
    tap_sleep_ms(600 * test_slow_factor()); // time to log the warning; the test does not need it
    kill(p.pid[1], SIGSTOP);
    __atomic_store_n(&e->is_stopped, 1, __ATOMIC_RELEASE);
    for (int k = 0; k < 3; k += 2)
        rank_check(proc_await_result(&p.slot[k], 6000), "rank %d does not time out", k);
    kill(p.pid[1], SIGCONT);
    procs_wait(&p, 8000);
    for (int k = 0; k < 3; k += 2)
        rank_check(p.slot[k].status == IDIST_ERR_TIMEOUT &&
                       text_names_only(p.slot[k].text, 1, -1, 3),
                   "rank %d names rank 1: got \"%s\"", k, p.slot[k].text);
    procs_free(&p);
    munmap(e, sizeof *e);
    ranks_report("SIGSTOP of a rank after the warning that named another one, %d calls, %s", calls,
                 placement);
}

// Stops the server of the store while one of two ranks waits for the other rank. The error text
// must blame the server, since no rank can know who is missing. The store's own time-out may be
// longer than the time-out of joining.
static void server_while_joining(int rank, const char *key, int store_ms) {
    char url[64], *text = (char *)shared_alloc(600);
    idist_store *store = NULL;
    idist_store_desc parts[2] = {{false, store_ms, NULL, 0, {NULL, NULL, NULL}},
                                 {true, 0, NULL, 0, {NULL, NULL, NULL}}};
    pid_t pid[2];
    int status = 0;
    tap_running("rank %d waits in a store that stops", rank);
    ranks_reset();
    snprintf(url, sizeof url, "tcp://127.0.0.1:%d", free_port());
    for (int k = 0; k < 2; k++) {
        pid[k] = fork();
        TAP_REQUIRE(pid[k] >= 0);
        if (pid[k] == 0) {
            idist_desc d = desc_with("auto", "auto");
            idist_group *world = NULL;
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (idist_store_open(url, &parts[k], &d.store) != IDIST_OK) _exit(1);
            if (k) pause();
            d.rank = rank;
            d.world_size = 2;
            d.init_timeout_ms = 1000 * test_slow_factor();
            if (idist_open(&d, &world) != IDIST_ERR_TIMEOUT) _exit(2);
            snprintf(text, 600, "%s", idist_last_error());
            _exit(0);
        }
        tap_register_child(pid[k]);
    }
    rank_ok(-1, idist_store_open(url, NULL, &store));
    rank_ok(-1, idist_store_wait(store, &key, 1, 5000 * test_slow_factor()));
    kill(pid[1], SIGSTOP);
    int64_t stopped_ms = tap_now_ms();
    TAP_REQUIRE(waitpid(pid[0], &status, 0) == pid[0]);
    tap_forget_child(pid[0]);
    rank_check(status == 0 && strstr(text, "the store's server no longer answers"),
               "status %x, got \"%s\"", (unsigned)status, text);
    int64_t took_ms = tap_now_ms() - stopped_ms; // the time-out plus a second for the last answer
    rank_check(took_ms < 3500 * test_slow_factor(), "it took %lld ms", (long long)took_ms);
    kill(pid[1], SIGKILL);
    TAP_REQUIRE(waitpid(pid[1], &status, 0) == pid[1]);
    tap_forget_child(pid[1]);
    rank_ok(-1, idist_store_close(&store));
    ranks_report("rank %d waits in a store that stops, time-out %d ms: the text says so", rank,
                 store_ms);
}

// Kinds of chains in which rank k waits for rank k + 1 and the last rank is stopped. All texts must
// name the last rank, and must say that the ranks in between wait.
enum { CHAIN_RECV, CHAIN_SEND, CHAIN_PAIRS, CHAIN_MIXED, CHAIN_REQUESTS, CHAIN_ARRIVING, N_CHAINS };
static const char *const chains[N_CHAINS] = {"receives",
                                             "sends",
                                             "barriers of pairs",
                                             "receives, sends and barriers",
                                             "requests",
                                             "a receive whose message has begun to arrive"};
enum { CHAIN_COUNT = 400000 };

static idist_status chain_link(int kind, int rank, int n, idist_group *pair, idist_group *world) {
    static int32_t x[CHAIN_COUNT];
    idist_request request = {NULL};
    idist_opts o = opts_of(world), of_pair = opts_of(pair);
    idist_status status = IDIST_OK;
    if (kind == CHAIN_MIXED) kind = rank % 3;
    switch (kind) {
    case CHAIN_SEND: return idist_send(x, CHAIN_COUNT, IDIST_I32, rank + 1, 9, &o);
    case CHAIN_PAIRS: return idist_barrier(&of_pair);
    case CHAIN_REQUESTS:
        o = opts_async(world, &request);
        status = idist_recv(x, CHAIN_COUNT, IDIST_I32, rank + 1, 9, NULL, &o);
        return status == IDIST_OK ? idist_wait(&request) : status;
    case CHAIN_ARRIVING:
        if (rank < n - 2) return idist_send(x, CHAIN_COUNT, IDIST_I32, rank + 1, 9, &o);
        return idist_recv(x, CHAIN_COUNT, IDIST_I32, IDIST_ANY_SOURCE, 8, NULL, &o);
    default: return idist_recv(x, CHAIN_COUNT, IDIST_I32, rank + 1, 9, NULL, &o);
    }
}

static int chain(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    const int *kind = (const int *)arg;
    static int32_t x[CHAIN_COUNT];
    idist_request request = {NULL};
    idist_opts o = opts_of(world), async = opts_async(world, &request);
    idist_group *pairs[8] = {NULL};
    for (int k = 0; k + 1 < n; k++)
        if (!rank_ok(rank,
                     idist_split(world, rank == k || rank == k + 1 ? 0 : -1, rank, &pairs[k])))
            return 1;
    if (rank == n - 1 && *kind == CHAIN_ARRIVING)
        rank_ok(rank, idist_send(x, CHAIN_COUNT, IDIST_I32, n - 2, 8, &async));
    if (!rank_ok(rank, idist_barrier(&o))) return 1;
    proc_phase(slot, 1);
    if (rank == n - 1) raise(SIGSTOP);
    if (rank == n - 1) return 0;
    proc_await_phase(slot, 2); // waits until the last rank is stopped
    proc_result(slot, chain_link(*kind, rank, n, pairs[rank], world));
    proc_await_phase(slot, 3); // no rank leaves the world while another rank still waits
    idist_close(&world);
    return 0;
}

static void chain_case(int n, int kind, const char *transport) {
    procs p;
    idist_desc d = desc_with(transport, "auto");
    int *shared_kind = (int *)shared_alloc(sizeof *shared_kind), status;
    tap_running("a chain of %d ranks, %s, %s", n, chains[kind], transport);
    ranks_reset();
    *shared_kind = kind;
    d.timeout_ms = 2 * TIMEOUT_MS * test_slow_factor();
    procs_start(&p, n, &d, chain, shared_kind);
    rank_check(procs_await_phase(&p, 1, 10000), "the ranks did not start");
    TAP_REQUIRE(waitpid(p.pid[n - 1], &status, WUNTRACED) == p.pid[n - 1] && WIFSTOPPED(status));
    for (int k = 0; k < n - 1; k++) proc_phase(&p.slot[k], 2);
    for (int k = 0; k < n - 1; k++) {
        rank_check(proc_await_result(&p.slot[k], 6000), "rank %d does not time out", k);
        const char *text = p.slot[k].text, *last = strrchr(text, ';');
        rank_check(p.slot[k].status == IDIST_ERR_TIMEOUT, "rank %d: got %s: %s", k,
                   idist_status_name((idist_status)p.slot[k].status), text);
        rank_check(text_names_rank(text, n - 1) && strstr(text, "does not answer rank "),
                   "rank %d: must name rank %d: got \"%s\"", k, n - 1, text);
        rank_check(!last || text_names_rank(last, n - 1), "rank %d: rank %d comes last: got \"%s\"",
                   k, n - 1, text);
    }

    for (int k = 0; k < n - 1; k++) proc_phase(&p.slot[k], 3);
    kill(p.pid[n - 1], SIGKILL);
    procs_wait(&p, 8000);
    procs_free(&p);
    munmap(shared_kind, sizeof *shared_kind);
    ranks_report("a chain of %d ranks, %s, the last one is stopped, %s", n, chains[kind],
                 transport);
}

// Reads from a path that is cut, on which nothing arrives any more.
static ptrdiff_t cut_read(void *port, void *buf, size_t nbytes) {
    (void)port;
    (void)buf;
    (void)nbytes;
    return 0;
}

static ptrdiff_t cut_write(void *port, const idist__os_part *parts, int nparts) {
    ptrdiff_t n = 0;
    (void)port;
    for (int i = 0; i < nparts; i++) n += (ptrdiff_t)parts[i].nbytes;
    return n;
}

static int cut_descriptor(void *port, bool output) {
    (void)port;
    (void)output;
    return -1;
}

static void cut_path(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    idist__link *l = &idist__ring_of(world->w)->links[!rank];
    idist__transport cut = idist__transport_tcp;
    const idist__transport *whole = l->transport;
    float *x = (float *)calloc(N_MAX_BYTES, 1);
    (void)n;
    (void)arg;
    TAP_REQUIRE(x);
    rank_ok(rank, idist_barrier(&o));
    rank_ok(rank, idist_barrier(&o)); // no message of the first barrier is still on the way
    cut.read = cut_read;
    cut.write = cut_write;
    cut.descriptor = cut_descriptor;
    pthread_mutex_lock(&world->w->lock);
    if (rank < 2) l->transport = &cut;
    pthread_mutex_unlock(&world->w->lock);
    rank_is(rank, idist_all_reduce(x, x, 100000, IDIST_F32, IDIST_SUM, &o), IDIST_ERR_TIMEOUT);
    const char *text = idist_last_error();
    rank_check((text_names_rank(text, 0) && strstr(text, "answer rank 1")) ||
                   (text_names_rank(text, 1) && strstr(text, "answer rank 0")),
               "rank %d: got \"%s\"", rank, text);
    pthread_mutex_lock(&world->w->lock);
    if (rank < 2) l->transport = whole;
    pthread_mutex_unlock(&world->w->lock);
    free(x);
}

int main(void) {
    const char *text = getenv("IDIST_TEST_TRIALS");
    int wanted = text ? atoi(text) : test_quick() ? 3 : 6;
    uint64_t random_state = tap_seed();
    tap_deadline((60 + 10 * wanted) * test_slow_factor());
    for (int t = 0; t < N_PLACEMENTS; t++) {
        ranks_reset();
        for (int i = 0; i < wanted; i++) one_trial(transport_names[t], i, &random_state);
        ranks_report("SIGSTOP of a random rank, %s: all others name it", transport_names[t]);
    }
    for (int calls = 1; calls <= 2; calls++) {
        stopped_after_the_warning("auto", calls);
        stopped_after_the_warning("tcp", calls);
    }
    for (int kind = 0; kind < N_CHAINS; kind++) {
        static const char *const transports[3] = {"auto", "tcp", "socket"};
        int first = test_quick() ? kind % 2 : 0, end = test_quick() ? first + 1 : 3;
        for (int t = first; t < end; t++) // over shared memory a message arrives immediately
            if (kind != CHAIN_ARRIVING || t) chain_case(kind % 2 ? 4 : 3, kind, transports[t]);
    }
    for (int i = 0; i < 2; i++) {
        idist_desc d = desc_with("tcp", i ? "latency" : "bandwidth");
        d.timeout_ms = 2 * TIMEOUT_MS * test_slow_factor();
        ranks_case_fault(3, &d, cut_path, NULL, "a path is cut: the text says whose, %s",
                         d.algorithm);
    }
    for (int store_ms = 0; store_ms <= 1000; store_ms += 1000) { // 0 selects the default, 30 s
        server_while_joining(0, "idist/1/node/0", store_ms);
        server_while_joining(1, "idist/1", store_ms);
    }
    return tap_done();
}
