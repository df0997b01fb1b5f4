// kill: SIGKILL of a random rank at a random moment. The victim takes part in a stream of
// all_reduces, waits in a call, or leaves other ranks waiting for its message.
//
// Every survivor must get IDIST_ERR_PEER_LOST within 500 ms of the kill, with a text that names
// only the dead rank. Every survivor must be able to close its world. IDIST_TEST_TRIALS sets the
// number of trials per transport. Without it, the test runs as many trials as fit into a few
// seconds. A rank that does not return is reported as a hang.
#include "idist.h"

#include "ranks.h"

enum { LIMIT_MS = 500, N_MAX_BYTES = 4 << 20 };

typedef struct trial {
    uint64_t seed;
    int mode; // 0: blocking, 1: requests, 2: all other ranks receive from the victim
    int victim;
    bool shared; // buffers come from idist_alloc, and the other ranks write to them
} trial;

static const char *const mode_names[3] = {"", " requests", " receive"};

static size_t stream_count(uint64_t seed, int i) {
    unsigned shift = (unsigned)(tap_mix(seed + (uint64_t)i) % 20); // 8 bytes .. 4 MiB
    return (size_t)2 << shift;
}

static idist_status stream_step(idist_group *world, float *x, const trial *t, int i) {
    idist_request request[3] = {{NULL}, {NULL}, {NULL}};
    idist_opts plain = opts_of(world);
    if (t->mode == 2) return idist_recv(x, 1, IDIST_F32, t->victim, 0, NULL, &plain);
    if (t->mode == 0)
        return idist_all_reduce(x, x, stream_count(t->seed, i), IDIST_F32, IDIST_MAX, &plain);
    size_t third = N_MAX_BYTES / 4 / 3;
    for (int k = 0; k < 3; k++) {
        idist_opts o = opts_async(world, &request[k]);
        size_t count = stream_count(t->seed, 3 * i + k) % third + 1;
        idist_status status = idist_all_reduce(x + (size_t)k * third, x + (size_t)k * third, count,
                                               IDIST_F32, IDIST_MAX, &o);
        if (status == IDIST_OK) continue;
        char text[600]; // waiting for the other requests must not hide this error
        copy_text(text, sizeof text, idist_last_error());
        idist_wait_all(request, 3);
        return status;
    }
    return idist_wait_all(request, 3);
}

static int stream(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    const trial *t = (const trial *)arg;
    idist_opts o = opts_of(world);
    float *x = (float *)(t->shared ? idist_alloc(N_MAX_BYTES, &o) : calloc(N_MAX_BYTES, 1));
    idist_status status = IDIST_OK;
    (void)n;
    if (!x) _exit(91);
    proc_phase(slot, 1);
    while (t->mode == 2 && rank == t->victim) pause();
    for (int i = 0; status == IDIST_OK; i++) {
        status = stream_step(world, x, t, i);
        __atomic_store_n(&slot->iterations, i, __ATOMIC_RELAXED);
    }
    proc_result(slot, status);
    if (t->shared) idist_free(x);
    else free(x);
    idist_status closed = idist_close(&world);
    return closed != IDIST_OK && world == NULL ? 0 : 92;
}

static void judge(const procs *p, int victim, int64_t killed_ns, const char *what) {
    for (int k = 0; k < p->n; k++) {
        const proc_slot *s = &p->slot[k];
        if (k == victim) {
            rank_check(WIFSIGNALED(p->wait_status[k]),
                       "%s: the victim ended by itself, status 0x%x, %s: %s", what,
                       (unsigned)p->wait_status[k], idist_status_name((idist_status)s->status),
                       s->text);
            continue;
        }
        if (!__atomic_load_n(&s->has_result, __ATOMIC_ACQUIRE)) {
            rank_fail("%s: hang: rank %d has no result after %d all_reduces", what, k,
                      s->iterations);
            continue;
        }
        long long ms = (long long)((s->when_ns - killed_ns) / 1000000);
        rank_check(s->status == IDIST_ERR_PEER_LOST,
                   "%s: rank %d: got %s expected IDIST_ERR_PEER_LOST: %s", what, k,
                   idist_status_name((idist_status)s->status), s->text);
        rank_check(text_names_only(s->text, victim, k, p->n),
                   "%s: rank %d names the wrong rank: got \"%s\"", what, k, s->text);
        rank_check(ms <= LIMIT_MS * test_slow_factor(),
                   "%s: rank %d got it after %lld ms, limit %d", what, k, ms, LIMIT_MS);
        rank_check(WIFEXITED(p->wait_status[k]) && WEXITSTATUS(p->wait_status[k]) == 0,
                   "%s: rank %d: idist_close: wait status 0x%x", what, k,
                   (unsigned)p->wait_status[k]);
    }
}

static int64_t one_trial(const char *transport, int number, bool shared, uint64_t *random_state) {
    procs p;
    trial t;
    char what[200];
    idist_desc d = desc_with(transport, number % 3 == 1   ? "latency"
                                        : number % 3 == 2 ? "bandwidth"
                                                          : "auto");
    int n = 2 + (int)(tap_rand(random_state) % 3),
        victim = (int)(tap_rand(random_state) % (uint64_t)n);
    int delay_us = (int)(tap_rand(random_state) % 40000);
    int64_t worst_ns = 0;
    t.seed = tap_rand(random_state);
    t.mode = number % 4 == 3 ? 1 : number % 4 == 1 ? 2 : 0;
    t.victim = victim;
    t.shared = shared;
    if (shared) t.mode = 0;
    snprintf(what, sizeof what, "trial %d: n=%d victim %d after %d us, %s %s%s", number, n, victim,
             delay_us, transport, d.algorithm, mode_names[t.mode]);
    tap_running("%s", what);
    procs_start(&p, n, &d, stream, &t);
    if (!procs_await_phase(&p, 1, 10000)) rank_fail("%s: the ranks did not start", what);
    struct timespec ts = {0, delay_us * 1000L};
    nanosleep(&ts, NULL);
    int64_t killed_ns = tap_now_ns();
    kill(p.pid[victim], SIGKILL);
    procs_wait(&p, 5000);
    judge(&p, victim, killed_ns, what);
    for (int k = 0; k < n; k++)
        if (k != victim && p.slot[k].has_result && p.slot[k].when_ns - killed_ns > worst_ns)
            worst_ns = p.slot[k].when_ns - killed_ns;
    procs_free(&p);
    return worst_ns;
}

// Waits in a barrier. Rank 1 is killed after it has waited long and announced its wait. The last
// rank enters the barrier only when all other survivors have reported the loss.
static int waits_long(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    idist_opts o = opts_of(world);
    (void)arg;
    proc_phase(slot, 1);
    for (int k = 0; k < n - 1 && rank == n - 1; k++)
        if (k != 1)
            rank_check(proc_await_result(&slot[k - rank], 4000), "rank %d does not report the loss",
                       k);
    proc_result(slot, idist_barrier(&o));
    idist_status closed = idist_close(&world);
    return closed != IDIST_OK && world == NULL ? 0 : 92;
}

static void killed_while_waiting(const char *transport) {
    procs p;
    idist_desc d = desc_with(transport, "auto");
    tap_running("SIGKILL of a rank that waits, %s", transport);
    ranks_reset();
    d.timeout_ms = 3000 * test_slow_factor();
    procs_start(&p, 4, &d, waits_long, NULL);
    rank_check(procs_await_phase(&p, 1, 10000), "the ranks did not start");
    tap_sleep_ms(200);
    int64_t killed_ns = tap_now_ns();
    kill(p.pid[1], SIGKILL);
    procs_wait(&p, 5000);
    judge(&p, 1, killed_ns, transport);
    ranks_report("SIGKILL of a rank that has waited for 200 ms, %s", transport);
    procs_free(&p);
}

// Kills ranks while other ranks write to their memory. A call that ends early waits until no rank
// writes any more, but must not wait for a dead rank. Such a wait would delay the error by 100 ms.
// The test looks for this delay, because no tighter limit holds on a busy machine.
static void kill_with_shared_memory(uint64_t *random_state) {
    enum { N = 24 };
    int n_slow = 0;
    ranks_reset();
    for (int i = 0; i < N; i++) n_slow += one_trial("auto", 3 * i, true, random_state) > 90000000;
    rank_check(n_slow <= N / 6 * test_slow_factor(),
               "in %d of %d trials a survivor reported the loss only after 90 ms", n_slow, N);
    ranks_report("SIGKILL of a random rank, buffers of idist_alloc");
    tap_diag("%d of %d slower than 90 ms", n_slow, N);
}

// Rank 0 waits for the victim and leaves when the victim is dead. All other survivors wait for rank
// 0, in a group without the victim. They must report why rank 0 left.
static int leaves_others(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    idist_opts o = opts_of(world);
    idist_group *rest = NULL;
    char x = 0;
    (void)arg;
    if (!rank_ok(rank, idist_split(world, rank < n - 1 ? 0 : -1, rank, &rest))) return 91;
    proc_phase(slot, 1);
    while (rank == n - 1) pause();
    if (rank) o.group = rest;
    proc_result(slot, rank ? idist_barrier(&o) : idist_recv(&x, 1, IDIST_U8, n - 1, 0, NULL, &o));
    return idist_close(&world) != IDIST_OK && world == NULL ? 0 : 92;
}

static void left_because_of(const char *transport) {
    idist_desc d = desc_with(transport, "auto");
    tap_running("ranks that leave because of a kill, %s", transport);
    ranks_reset();
    for (int i = 0; i < 8; i++) {
        procs p;
        procs_start(&p, 4, &d, leaves_others, NULL);
        rank_check(procs_await_phase(&p, 1, 10000), "the ranks did not start");
        tap_sleep_ms(i);
        int64_t killed_ns = tap_now_ns();
        kill(p.pid[3], SIGKILL);
        procs_wait(&p, 5000);
        judge(&p, 3, killed_ns, transport);
        procs_free(&p);
    }
    ranks_report("ranks in a group without the killed one hear of it when others leave, %s",
                 transport);
}

// The victim sends a small or large message to every other rank. The other ranks match the message
// without receiving it and wait for the victim's next message. When the victim is killed, the
// matched message is lost, too.
static int keeps_matched(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    enum { LARGE = 1 << 20 };
    idist_opts o = opts_of(world);
    idist_request requests[4];
    idist_message message, next = {{0, 0, 0, IDIST_I8}, world, 1, 0, 0};
    char *x = (char *)calloc(LARGE, 1);
    (void)arg;
    if (!x) _exit(91);
    for (int k = 0; k < n - 1 && rank == n - 1; k++) {
        idist_opts a = opts_async(world, &requests[k]);
        rank_ok(rank, idist_send(x, k % 2 ? LARGE : 1, IDIST_U8, k, 0, &a));
    }
    if (rank < n - 1) rank_ok(rank, idist_mprobe(n - 1, 0, &message, &o));
    proc_phase(slot, 1);
    while (rank == n - 1) pause();
    proc_result(slot, idist_mprobe(n - 1, 0, &next, &o));
    rank_check(!next.group, "rank %d has matched a message that was never sent", rank);
    rank_is(rank, idist_mrecv(x, LARGE, IDIST_U8, &message, &o), IDIST_ERR_PEER_LOST);
    free(x);
    return idist_close(&world) != IDIST_OK && world == NULL ? 0 : 92;
}

static void lost_with_matched(const char *transport) {
    procs p;
    idist_desc d = desc_with(transport, "auto");
    tap_running("SIGKILL of a rank whose messages are matched, %s", transport);
    ranks_reset();
    procs_start(&p, 4, &d, keeps_matched, NULL);
    rank_check(procs_await_phase(&p, 1, 10000), "the ranks did not start");
    int64_t killed_ns = tap_now_ns();
    kill(p.pid[3], SIGKILL);
    procs_wait(&p, 5000);
    judge(&p, 3, killed_ns, transport);
    procs_free(&p);
    ranks_report("SIGKILL of a rank whose messages are matched and not received, %s", transport);
}

// Kills one of many ranks on a host, where each rank watches only some of the other ranks at a
// time. Here only rank 0 waits while all other ranks compute, so rank 0 must detect the loss by
// itself.
static int waits_alone(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    idist_opts o = opts_of(world);
    char x = 0;
    (void)arg;
    proc_phase(slot, 1);
    while (rank == n - 1) pause();
    if (rank) tap_sleep_ms(300);
    proc_result(slot, rank ? idist_barrier(&o) : idist_recv(&x, 1, IDIST_U8, n - 1, 0, NULL, &o));
    return idist_close(&world) != IDIST_OK && world == NULL ? 0 : 92;
}

static void killed_among_many(void) {
    enum { N = 40 };
    procs p;
    idist_desc d = desc_with("auto", "auto");
    tap_running("SIGKILL of one of %d ranks", N);
    ranks_reset();
    procs_start(&p, N, &d, waits_alone, NULL);
    rank_check(procs_await_phase(&p, 1, 10000), "the ranks did not start");
    int64_t killed_ns = tap_now_ns();
    kill(p.pid[N - 1], SIGKILL);
    procs_wait(&p, 5000);
    judge(&p, N - 1, killed_ns, "many ranks");
    long long ms = (long long)((p.slot[0].when_ns - killed_ns) / 1000000);
    rank_check(ms < 250 * test_slow_factor(), "the only rank that waits heard of it after %lld ms",
               ms);
    ranks_report("SIGKILL of one of %d ranks of a host, while one waits and the others compute", N);
    tap_diag("the rank that waits heard of it after %lld ms", ms);
    procs_free(&p);
}

int main(void) {
    const char *text = getenv("IDIST_TEST_TRIALS");
    int wanted = text ? atoi(text) : 0, most = test_quick() ? 10 : 40;
    uint64_t random_state = tap_seed();
    tap_deadline(wanted > 100 ? wanted * 2 : 90);
    for (int t = 0; t < N_PLACEMENTS; t++) {
        const char *name = transport_names[t];
        int64_t end_ms = tap_now_ms() + 4000, worst_ns = 0;
        int trials = 0;
        ranks_reset();
        while (wanted > 0 ? trials < wanted
                          : trials < most && (tap_now_ms() < end_ms || trials < 6)) {
            int64_t ns = one_trial(name, trials++, false, &random_state);
            if (ns > worst_ns) worst_ns = ns;
        }
        ranks_report("SIGKILL of a random rank, %s: all survivors name it within %d ms", name,
                     LIMIT_MS);
        tap_diag("%s: %d trials, slowest survivor after %.1f ms, seed %llu", name, trials,
                 (double)worst_ns / 1e6, (unsigned long long)tap_seed());
        killed_while_waiting(name);
        left_because_of(name);
        lost_with_matched(name);
    }
    kill_with_shared_memory(&random_state);
    killed_among_many();
    return tap_done();
}
