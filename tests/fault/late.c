// late: if a rank does not come, all ranks get IDIST_ERR_TIMEOUT in time, with a text that names
// exactly the missing ranks
#include "idist.h"

#include "grid.h"

enum { TIMEOUT_MS = 300 };
enum { ALL_REDUCE, BARRIER, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, N_OPERATIONS };

static const char *const names[N_OPERATIONS] = {"all_reduce", "barrier", "all_gather",
                                                "reduce_scatter", "all_to_all"};

typedef struct experiment {
    int operation;
    size_t count;
    unsigned late_mask;
    bool per_call; // the time-out is set in the opts of the call, not in the world
    bool async;
    int64_t first_ms; // time in ms when the first rank was about to call, 0 before that; atomic
    int n_through;    // number of punctual ranks whose call has returned; atomic
} experiment;

static idist_status make_call(int operation, const float *s, float *r, size_t count,
                              const idist_opts *o) {
    switch (operation) {
    case ALL_REDUCE: return idist_all_reduce(s, r, count, IDIST_F32, IDIST_SUM, o);
    case BARRIER: return idist_barrier(o);
    case ALL_GATHER: return idist_all_gather(s, r, count, IDIST_F32, o);
    case REDUCE_SCATTER: return idist_reduce_scatter(s, r, count, IDIST_F32, IDIST_SUM, o);
    default: return idist_all_to_all(s, r, count, IDIST_F32, o);
    }
}

// Checks that the error text names every late rank. The caller is the only punctual rank that the
// text may name.
static void check_names(const experiment *e, int rank, int n) {
    const char *text = idist_last_error();
    for (int k = 0; k < n; k++) {
        bool is_late = e->late_mask >> k & 1, named = text_names_rank(text, k);
        if (k == rank && !is_late) continue;
        rank_check(named == is_late, "rank %d: rank %d is %s and the text is \"%s\"", rank, k,
                   is_late ? "late" : "there", text);
    }
}

// Checks when a rank got its error. The first rank whose time-out expires fails the group for all
// ranks. Therefore a rank that calls later may get the error before its own time-out, but never
// before the time-out of the first call.
static void check_time(experiment *e, int rank, int64_t start, int64_t end) {
    bool is_late = e->late_mask >> rank & 1;
    int64_t first = __atomic_load_n(&e->first_ms, __ATOMIC_ACQUIRE);
    rank_check(end - start <= TIMEOUT_MS + 500 * test_slow_factor(),
               "rank %d: got the error after %lld ms", rank, (long long)(end - start));
    if (!is_late)
        rank_check(end - first >= TIMEOUT_MS - 10,
                   "rank %d: got the error %lld ms after the first call, too early", rank,
                   (long long)(end - first));
}

// Waits until the call has returned on all punctual ranks.
static void await_others(const experiment *e, int n) {
    int n_in_time = 0;
    for (int k = 0; k < n; k++) n_in_time += !(e->late_mask >> k & 1);
    while (__atomic_load_n(&e->n_through, __ATOMIC_ACQUIRE) < n_in_time) tap_sleep_ms(1);
}

static void experiment_rank(idist_group *world, int rank, int n, void *arg) {
    experiment *e = (experiment *)arg;
    int64_t none = 0;
    bool is_late = e->late_mask >> rank & 1;
    idist_request request = {NULL};
    idist_opts o = e->async ? opts_async(world, &request) : opts_of(world), plain = opts_of(world);
    float *s = (float *)calloc(e->count * (size_t)n + 1, sizeof *s),
          *r = (float *)calloc(e->count * (size_t)n + 1, sizeof *r);
    TAP_REQUIRE(s && r);
    plain.timeout_ms = RANKS_TIMEOUT_MS;
    // All ranks are here; after this, the late ranks stay away.
    rank_ok(rank, idist_barrier(&plain));
    plain.timeout_ms = 0;
    if (e->per_call) o.timeout_ms = TIMEOUT_MS;
    if (is_late) await_others(e, n);
    int64_t start = tap_now_ms();
    __atomic_compare_exchange_n(&e->first_ms, &none, start, false, __ATOMIC_ACQ_REL,
                                __ATOMIC_ACQUIRE);
    idist_status status = make_call(e->operation, s, r, e->count, &o);
    if (status == IDIST_OK && e->async) status = idist_wait(&request);
    check_time(e, rank, start, tap_now_ms());
    if (!is_late) __atomic_add_fetch(&e->n_through, 1, __ATOMIC_ACQ_REL);
    rank_check(status == IDIST_ERR_TIMEOUT,
               "rank %d (%s): got %s expected IDIST_ERR_TIMEOUT; last error: %s", rank,
               is_late ? "late" : "in time", idist_status_name(status), idist_last_error());
    if (status == IDIST_ERR_TIMEOUT && !is_late) check_names(e, rank, n);
    idist_status later = idist_barrier(&plain);
    rank_check(later == IDIST_ERR_TIMEOUT, "rank %d: a later call gives the same: got %s", rank,
               idist_status_name(later));
    free(s);
    free(r);
}

static void late_case(int n, int operation, size_t count, unsigned late_mask, const char *algorithm,
                      const char *transport, bool async) {
    experiment *e = (experiment *)shared_alloc(sizeof *e);
    idist_desc d = desc_with(transport, algorithm);
    e->operation = operation;
    e->count = count;
    e->late_mask = late_mask;
    e->async = async;
    e->per_call = (operation + n) % 2 == 0;
    d.timeout_ms = e->per_call ? RANKS_TIMEOUT_MS : TIMEOUT_MS;
    d.init_timeout_ms = RANKS_TIMEOUT_MS;
    ranks_case_fault(n, &d, experiment_rank, e, "%s x %zu n=%d late ranks 0x%x %s %s%s",
                     names[operation], count, n, late_mask, algorithm, transport,
                     async ? " async" : "");
    munmap(e, sizeof *e);
}

// Checks that a rank that has already left the call is not reported as missing. Rank 2 is late, and
// rank 3 of 4 waits for the broadcast from rank 2. Rank 3 must name only rank 2.
static void left_is_not_missing(idist_group *world, int rank, int n, void *arg) {
    int *is_over = (int *)arg; // atomic
    idist_opts o = opts_of(world), brief = opts_of(world);
    int32_t x = 1;
    brief.timeout_ms = TIMEOUT_MS;
    rank_ok(rank, idist_barrier(&o));
    if (rank == 2) {
        int64_t end_ms = tap_now_ms() + 5000 * test_slow_factor();
        while (!__atomic_load_n(is_over, __ATOMIC_ACQUIRE) && tap_now_ms() < end_ms)
            tap_sleep_ms(1);
        return;
    }
    idist_status status = idist_broadcast(&x, 1, IDIST_I32, 0, rank == 3 ? &brief : &o);
    if (rank == 3) {
        rank_is(rank, status, IDIST_ERR_TIMEOUT);
        rank_check(text_names_only(idist_last_error(), 2, rank, n), "rank 3: got \"%s\"",
                   idist_last_error());
        __atomic_store_n(is_over, 1, __ATOMIC_RELEASE);
    } else {
        rank_is(rank, status, IDIST_OK);
        rank_is(rank, idist_recv(&x, 1, IDIST_I32, 2, 1, NULL, &o),
                IDIST_ERR_TIMEOUT); // the group fails while the receive waits
    }
}

// The rank whose barrier times out first. In an all_reduce of three ranks, rank 1 receives only
// from rank 0, so rank 1 may never have received a message from rank 2, the missing rank. The error
// text must still name the last call that the missing rank must have reached.
typedef struct speaker {
    int rank;    // the rank whose time-out comes first
    int is_over; // atomic
} speaker;

static void seen_by_others(idist_group *world, int rank, int n, void *arg) {
    enum { COUNT = 100 };
    speaker *e = (speaker *)arg;
    idist_opts o = opts_of(world);
    float *x = (float *)calloc(COUNT, sizeof *x);
    (void)n;
    for (int i = 0; i < 7; i++)
        rank_ok(rank, idist_all_reduce(x, x, COUNT, IDIST_F32, IDIST_SUM, &o));
    free(x);
    if (rank == 2) {
        int64_t end_ms = tap_now_ms() + 5000 * test_slow_factor();
        while (!__atomic_load_n(&e->is_over, __ATOMIC_ACQUIRE) && tap_now_ms() < end_ms)
            tap_sleep_ms(1);
        return;
    }
    if (rank == e->rank) o.timeout_ms = TIMEOUT_MS;
    rank_is(rank, idist_barrier(&o), IDIST_ERR_TIMEOUT);
    rank_check(strstr(idist_last_error(), "last seen in all_reduce #7 ") != NULL,
               "rank %d: got \"%s\"", rank, idist_last_error());
    if (rank == e->rank) __atomic_store_n(&e->is_over, 1, __ATOMIC_RELEASE);
}

#ifndef RANKS_MPI
// A rank that joins while some ranks stay away. Only the even ranks join, or only the odd ranks.
// Initialization must time out and name the missing ranks. Without rank 0 there is no job, so no
// rank can tell who else is missing.
typedef struct lonely_rank {
    idist_store *store;
    int rank, n;
} lonely_rank;

static void *lonely(void *arg) {
    const lonely_rank *l = (const lonely_rank *)arg;
    idist_desc d = desc_with("auto", "auto");
    idist_group *world = NULL;
    int rank = l->rank;
    char list[40];
    d.store = l->store;
    d.rank = rank;
    d.world_size = l->n;
    d.init_timeout_ms = 400;
    int64_t start = tap_now_ms();
    idist_status status = idist_open(&d, &world);
    int64_t took = tap_now_ms() - start;
    rank_check(status == IDIST_ERR_TIMEOUT && world == NULL, "rank %d: got %s", rank,
               idist_status_name(status));
    snprintf(list, sizeof list, "%d of %d ranks ", l->n / 2, l->n);
    if (rank % 2)
        rank_check(strstr(idist_last_error(), ": rank 0 did not show up") != NULL,
                   "rank %d: the text names rank 0: got \"%s\"", rank, idist_last_error());
    else
        rank_check(strstr(idist_last_error(), list) &&
                       strstr(idist_last_error(), l->n == 3 ? ": rank 1" : ": rank 1, 3") &&
                       !strstr(idist_last_error(), l->n == 3 ? "1," : "3,"),
                   "rank %d: the text names the odd ranks: got \"%s\"", rank, idist_last_error());
    rank_check(took >= 390 && took < 400 + 700 * test_slow_factor(), "rank %d: took %lld ms", rank,
               (long long)took);
    return NULL;
}

static void missing_at_init(int first, int n) {
    lonely_rank ranks[RANKS_MAX];
    idist_store *store = NULL;
    pthread_t threads[RANKS_MAX];
    tap_running("of %d ranks every other one from %d on comes", n, first);
    ranks_reset();
    rank_ok(-1, idist_store_open("mem://", NULL, &store));
    for (int k = first; k < n; k += 2) {
        ranks[k].store = store;
        ranks[k].rank = k;
        ranks[k].n = n;
        TAP_REQUIRE(pthread_create(&threads[k], NULL, lonely, &ranks[k]) == 0);
    }
    for (int k = first; k < n; k += 2) TAP_REQUIRE(pthread_join(threads[k], NULL) == 0);
    rank_ok(-1, idist_store_close(&store));
    ranks_report(
        "of %d ranks every other one from %d on comes to idist_open: those that do not are "
        "named, and nobody else",
        n, first);
}
#endif

// State of a test in which messages keep arriving. Rank 1 keeps sending messages for which no rank
// waits. Rank 0 waits for another message, with a time-out, while another thread of rank 0 tests a
// request. Neither thread may have to wait for a pause in the messages.
typedef struct glance {
    idist_request request;
    int64_t longest_ms;
    int stop;
} glance;

static void *glances(void *arg) {
    glance *g = (glance *)arg;
    bool done = false;
    while (!__atomic_load_n(&g->stop, __ATOMIC_ACQUIRE) && !done) {
        int64_t start = tap_now_ms();
        if (!rank_ok(0, idist_test(&g->request, &done))) break;
        if (tap_now_ms() - start > g->longest_ms) g->longest_ms = tap_now_ms() - start;
        tap_sleep_ms(2);
    }
    return NULL;
}

static int while_others_come(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    enum { WANTED = 3, LAST = 4 };
    idist_opts o = opts_of(world);
    unsigned char c = 0, last = 0;
    glance g = {{NULL}, 0, 0};
    (void)n;
    (void)arg;
    rank_ok(rank, idist_barrier(&o));
    if (rank == 1) {
        int64_t until = tap_now_ms() + 500;
        // Sends fewer bytes than the eager window, so that no send waits for a receive.
        for (long k = 0; tap_now_ms() < until && k < 10000; k++) {
            int64_t next = tap_now_ns() + 50000;
            rank_ok(rank, idist_send(&c, 1, IDIST_U8, 0, 1, &o));
            while (tap_now_ns() < next) sched_yield();
        }
        rank_ok(rank, idist_send(&c, 1, IDIST_U8, 0, LAST, &o));
    } else {
        idist_opts async = opts_async(world, &g.request), hurry = o;
        pthread_t thread;
        rank_ok(rank, idist_recv(&last, 1, IDIST_U8, 1, LAST, NULL, &async));
        TAP_REQUIRE(pthread_create(&thread, NULL, glances, &g) == 0);
        hurry.timeout_ms = 200;
        int64_t start = tap_now_ms();
        rank_is(rank, idist_recv(&c, 1, IDIST_U8, 1, WANTED, NULL, &hurry), IDIST_ERR_TIMEOUT);
        int64_t took = tap_now_ms() - start;
        __atomic_store_n(&g.stop, 1, __ATOMIC_RELEASE);
        TAP_REQUIRE(pthread_join(thread, NULL) == 0);
        rank_check(took >= 190 && took < 200 + 100 * test_slow_factor(),
                   "the time-out of 200 ms came after %lld ms", (long long)took);
        rank_check(g.longest_ms < 100 * test_slow_factor(), "idist_test took %lld ms",
                   (long long)g.longest_ms);
        rank_ok(rank, idist_wait(&g.request));
    }
    proc_result(slot, idist_barrier(&o));
    return 0;
}

static void come_what_may(const char *transport) {
    procs p;
    idist_desc d = desc_with(transport, "auto");
    tap_running("a time-out while other messages keep coming, %s", transport);
    ranks_reset();
    procs_start(&p, 2, &d, while_others_come, NULL);
    rank_check(procs_wait(&p, 10000) == 0, "hang");
    for (int k = 0; k < 2; k++)
        rank_check(p.slot[k].status == IDIST_OK && p.wait_status[k] == 0,
                   "rank %d: %s, status 0x%x", k, p.slot[k].text, (unsigned)p.wait_status[k]);
    ranks_report("a time-out while other messages keep coming, %s", transport);
    procs_free(&p);
}

int main(void) {
    uint64_t random_state = tap_seed();
    tap_deadline(60);
    late_case(2, ALL_REDUCE, 1, 1, "auto", "auto", false);
    late_case(2, BARRIER, 0, 2, "auto", "tcp", false);
    late_case(5, ALL_REDUCE, 7, 1u << (tap_rand(&random_state) % 5), "latency", "auto", false);
    late_case(5, ALL_REDUCE, 200000, 1u << (tap_rand(&random_state) % 5), "bandwidth", "auto",
              false);
    late_case(4, REDUCE_SCATTER, 1000, 1u << (tap_rand(&random_state) % 4), "bandwidth", "auto",
              true);
    late_case(4, ALL_REDUCE, 100, 0x5, "auto", "auto", false); // two ranks are late
    if (!test_quick()) {
        late_case(3, ALL_REDUCE, 1, 4, "latency", "auto", false);
        late_case(5, BARRIER, 0, 1u << (tap_rand(&random_state) % 5), "auto", "auto", true);
        late_case(4, ALL_GATHER, 1000, 1u << (tap_rand(&random_state) % 4), "auto", "tcp", false);
        late_case(4, ALL_TO_ALL, 30000, 1u << (tap_rand(&random_state) % 4), "auto", "auto", false);
        late_case(5, BARRIER, 0, 0xE, "auto", "auto", false); // three ranks are late
    }
    for (int t = 0; t < N_PLACEMENTS; t++) {
        idist_desc d = desc_with(transport_names[t], "latency");
        ranks_case_fault(4, &d, left_is_not_missing, shared_alloc(sizeof(int)),
                         "who has left a call is not missing, %s", d.transport);
    }
#ifndef RANKS_MPI
    for (int r = 0; r < 2; r++) {
        idist_desc d = desc_with("tcp", "latency");
        speaker *e = (speaker *)shared_alloc(sizeof *e);
        e->rank = r;
        ranks_case_fault(3, &d, seen_by_others, e, "where a rank was last seen, by rank %d", r);
        munmap(e, sizeof *e);
    }
#endif
    for (int t = 0; t < N_TRANSPORTS; t++) come_what_may(transport_names[t]);
#ifndef RANKS_MPI
    missing_at_init(0, 3);
    missing_at_init(0, 5);
    missing_at_init(1, 5);
#endif
    return tap_done();
}
