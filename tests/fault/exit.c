// exit: a rank ends without finalizing the world, by exit(0), _exit(0), SIGTERM, or exec; all other
// ranks must report that rank as lost
#include "idist.h"

#include "ranks.h"

enum { BY_EXIT, BY__EXIT, BY_SIGTERM, BY_EXEC, N_WAYS };
enum { IN_ALL_REDUCE, IN_BARRIER, IN_RECV, IN_SEND, IN_WAIT_ANY, IN_CLOSE, LATER, N_PLACES };

static const char *const ways[N_WAYS] = {"exit(0)", "_exit(0)", "SIGTERM", "exec"};
static const char *const places[N_PLACES] = {"all_reduce", "barrier", "recv",        "send of much",
                                             "wait_any",   "close",   "a later call"};

typedef struct plan {
    int way, place, victim;
} plan;

static void leave(int way) {
    tap_sleep_ms(20); // time for the other ranks to block; the test does not need it
    if (way == BY_EXIT) exit(0);
    if (way == BY__EXIT) _exit(0);
    if (way == BY_SIGTERM) raise(SIGTERM);
    execl("/bin/true", "true", (char *)NULL); // exec closes the connections
    _exit(93);
}

static idist_status block(idist_group *world, int n, const plan *p, float *x) {
    idist_opts o = opts_of(world);
    idist_request request[2] = {{NULL}, {NULL}};
    idist_opts a = opts_async(world, &request[0]), b = opts_async(world, &request[1]);
    size_t index = 0;
    idist_status status = IDIST_OK;
    (void)n;
    switch (p->place) {
    case IN_ALL_REDUCE: return idist_all_reduce(x, x, 50000, IDIST_F32, IDIST_SUM, &o);
    case IN_BARRIER: return idist_barrier(&o);
    case IN_RECV: return idist_recv(x, 1, IDIST_F32, p->victim, 0, NULL, &o);
    case IN_SEND: return idist_send(x, 1000000, IDIST_F32, p->victim, 0, &o);
    case IN_WAIT_ANY:
        status = idist_recv(x, 1, IDIST_F32, IDIST_ANY_SOURCE, 0, NULL, &a);
        if (status == IDIST_OK)
            status = idist_all_reduce(x + 1, x + 1, 1, IDIST_F32, IDIST_SUM, &b);
        for (int i = 0; i < 2 && status == IDIST_OK; i++)
            status = idist_wait_any(request, 2, &index);
        // Waits for both requests, because a world with open requests cannot be closed.
        idist_wait_all(request, 2);
        return status;
    case LATER: tap_sleep_ms(150); return idist_barrier(&o);
    default: return IDIST_OK; // IN_CLOSE
    }
}

static int body(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    const plan *p = (const plan *)arg;
    float *x = (float *)calloc(1000000, sizeof *x);
    idist_opts o = opts_of(world);
    if (!x || idist_barrier(&o) != IDIST_OK) _exit(94);
    proc_phase(slot, 1);
    if (rank == p->victim) leave(p->way);
    idist_status status = block(world, n, p, x);
    if (p->place == IN_CLOSE) status = idist_close(&world);
    proc_result(slot, status);
    if (p->place != IN_CLOSE) idist_close(&world);
    free(x);
    return world == NULL ? 0 : 95;
}

static void one_case(int n, int way, int place, const char *transport, uint64_t *random_state) {
    procs p;
    plan pl;
    idist_desc d = desc_with(transport, "auto");
    pl.way = way;
    pl.place = place;
    pl.victim = (int)(tap_rand(random_state) % (uint64_t)n);
    tap_running("rank %d of %d leaves by %s while the others are in %s, %s", pl.victim, n,
                ways[way], places[place], transport);
    ranks_reset();
    procs_start(&p, n, &d, body, &pl);
    if (!procs_await_phase(&p, 1, 10000)) rank_fail("the ranks did not start");
    int64_t start_ns = tap_now_ns();
    int n_hung = procs_wait(&p, 5000);
    rank_check(n_hung == 0, "%d ranks hang", n_hung);
    for (int k = 0; k < n; k++) {
        const proc_slot *s = &p.slot[k];
        if (k == pl.victim || !s->has_result) continue;
        rank_check(s->status == IDIST_ERR_PEER_LOST,
                   "rank %d: got %s expected IDIST_ERR_PEER_LOST; text \"%s\"", k,
                   idist_status_name((idist_status)s->status), s->text);
        rank_check(text_names_only(s->text, pl.victim, k, n),
                   "rank %d must name rank %d: got \"%s\"", k, pl.victim, s->text);
        rank_check((s->when_ns - start_ns) / 1000000 < 170 + 500 * test_slow_factor(),
                   "rank %d: after %lld ms", k, (long long)((s->when_ns - start_ns) / 1000000));
        rank_check(WIFEXITED(p.wait_status[k]) && WEXITSTATUS(p.wait_status[k]) == 0,
                   "rank %d: wait status 0x%x", k, (unsigned)p.wait_status[k]);
    }
    ranks_report("a rank of %d leaves by %s, others in %s, %s", n, ways[way], places[place],
                 transport);
    procs_free(&p);
}

int main(void) {
    uint64_t random_state = tap_seed();
    tap_deadline(60);
    for (int place = 0; place < N_PLACES; place++) {
        one_case(2, BY_EXIT, place, "auto", &random_state);
        one_case(3, BY__EXIT, place, "tcp", &random_state);
        one_case(4, BY_EXIT, place, "auto", &random_state);
    }
    one_case(3, BY_SIGTERM, IN_BARRIER, "auto", &random_state);
    one_case(3, BY_EXEC, IN_ALL_REDUCE, "auto", &random_state);
    one_case(2, BY_EXEC, IN_RECV, "tcp", &random_state);
    return tap_done();
}
