// cancel_thread: pthread_cancel of a thread that is blocked in a call. The call must complete
// before the thread ends. Other threads can then use and close the world.
#include "idist.h"

#include "ranks.h"

#include <pthread.h>

enum { RECV, SEND, WAIT, PROBE, ALL_REDUCE, BARRIER, SPLIT, STORE_WAIT, N_CALLS };
enum { LARGE = 1 << 20, GO = 77, AFTER = 78 };

static const char *const names[N_CALLS] = {"recv",       "send of much", "wait",  "probe",
                                           "all_reduce", "barrier",      "split", "store_wait"};

typedef struct blocked {
    int call, rank;
    idist_group *world;
    idist_store *store;
    float *x;
    idist_status status;
    int begun; // atomic
} blocked;

// Makes the call in which a thread of rank 0 is cancelled. Rank 1 makes the matching call.
static idist_status make(const blocked *b, int other) {
    idist_opts o = opts_of(b->world);
    idist_request request;
    idist_opts async = opts_async(b->world, &request);
    idist_group *group = NULL;
    const char *key = "key";
    idist_recv_info info;
    idist_status status;
    bool first = b->rank == 0;

    switch (b->call) {
    case RECV:
    case WAIT:
    case PROBE:
        if (!first) return idist_send(b->x, 1, IDIST_F32, other, 5, &o);
        if (b->call == PROBE) {
            status = idist_probe(other, 5, &info, &o);
            return status ? status : idist_recv(b->x, 1, IDIST_F32, other, 5, NULL, &o);
        }
        if (b->call == RECV) return idist_recv(b->x, 1, IDIST_F32, other, 5, NULL, &o);
        status = idist_recv(b->x, 1, IDIST_F32, other, 5, NULL, &async);
        return status ? status : idist_wait(&request);
    case SEND:
        return first ? idist_send(b->x, LARGE, IDIST_F32, other, 5, &o)
                     : idist_recv(b->x, LARGE, IDIST_F32, other, 5, NULL, &o);
    case ALL_REDUCE: return idist_all_reduce(b->x, b->x, LARGE, IDIST_F32, IDIST_SUM, &o);
    case BARRIER: return idist_barrier(&o);
    case SPLIT:
        status = idist_split(b->world, 0, b->rank, &group);
        return status ? status : idist_free_group(&group);
    default: return first ? idist_store_wait(b->store, &key, 1, 20000) : IDIST_OK;
    }
}

static void *blocks(void *arg) {
    blocked *b = (blocked *)arg;
    __atomic_store_n(&b->begun, 1, __ATOMIC_RELEASE);
    b->status = make(b, 1);
    for (;;) pthread_testcancel(); // the thread ends here
    return NULL;
}

static int body(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    idist_opts o = opts_of(world);
    blocked b;
    int go = 1;
    (void)n;
    (void)slot;
    memset(&b, 0, sizeof b);
    b.call = *(const int *)arg;
    b.rank = rank;
    b.world = world;
    b.status = (idist_status)1;
    b.x = (float *)calloc(LARGE, sizeof *b.x);
    if (!b.x) return 91;

    if (rank == 0) {
        pthread_t thread;
        void *result = NULL;
        if (b.call == STORE_WAIT && !rank_ok(0, idist_store_open("mem://", NULL, &b.store)))
            return 92;
        TAP_REQUIRE(pthread_create(&thread, NULL, blocks, &b) == 0);
        while (!__atomic_load_n(&b.begun, __ATOMIC_ACQUIRE)) sched_yield();
        tap_sleep_ms(20); // time for the thread to block; the test does not need it
        TAP_REQUIRE(pthread_cancel(thread) == 0);
        tap_sleep_ms(20);
        if (b.call == STORE_WAIT) rank_ok(0, idist_store_set(b.store, "key", "x", 1));
        rank_ok(0, idist_send(&go, 1, IDIST_I32, 1, GO, &o));
        TAP_REQUIRE(pthread_join(thread, &result) == 0);
        rank_check(result == PTHREAD_CANCELED, "the thread was not cancelled");
        rank_check(b.status == IDIST_OK, "%s: got status %d", names[b.call], (int)b.status);
    } else {
        rank_ok(1, idist_recv(&go, 1, IDIST_I32, 0, GO, NULL, &o));
        rank_ok(1, make(&b, 0));
    }

    rank_ok(rank, idist_barrier(&o));
    if (rank == 0) rank_ok(0, idist_send(b.x, 1, IDIST_F32, 1, AFTER, &o));
    else rank_ok(1, idist_recv(b.x, 1, IDIST_F32, 0, AFTER, NULL, &o));
    if (b.store) idist_store_close(&b.store);
    rank_ok(rank, idist_close(&world));
    free(b.x);

    return 0;
}

static void one_case(const char *transport, int call) {
    idist_desc d = desc_with(transport, "auto");
    procs p;
    tap_running("%s, %s", names[call], transport);
    ranks_reset();
    procs_start(&p, 2, &d, body, &call);
    rank_check(procs_wait(&p, 15000) == 0, "hang");
    for (int k = 0; k < 2; k++)
        rank_check(p.wait_status[k] == 0, "rank %d: wait status 0x%x", k,
                   (unsigned)p.wait_status[k]);
    ranks_report("a thread is cancelled in %s, %s", names[call], transport);
    procs_free(&p);
}

int main(void) {
    tap_deadline(120);
    (void)ranks__log();
    for (int t = 0; t < N_TRANSPORTS; t++)
        for (int call = 0; call < N_CALLS; call++)
            if (call != STORE_WAIT || t == 0) one_case(transport_names[t], call);
    return tap_done();
}
