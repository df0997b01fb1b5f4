// bad_frames: frames that only a broken or hostile rank sends. The sender knows the secret of the
// job, so authentication does not stop the frames.
//
// Rank 2 of three ranks sends the frames to rank 0. Meanwhile, rank 0 is in a barrier of the world.
// Some frames name the group of ranks 0 and 1, to which rank 2 does not belong. Rank 0 must report
// that rank 2 was lost. Rank 0 must not write out of bounds, which `make asan` would detect. Rank 0
// must hold no more than one window of memory for the frames.
#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "ranks.h"

enum {
    FLOOD = 200000,
    MOST_HELD = 8 << 20
}; // FLOOD: frames; MOST_HELD: bytes, the eager window plus the overhead of each message

typedef struct bad {
    const char *name;
    uint8_t type;
    // If true, the frame has the number of a group that does not contain the frame's sender. If
    // false, no rank knows the group.
    bool of_the_pair;
    uint64_t nbytes;
    int repeat;
    int64_t aux;       // for ABORT and BYE: the status
    int kind, root;    // of the call that the frame names; 0 for the default of the type
    bool of_the_world; // overrides of_the_pair if true
    const char *text;  // follows the frame, or NULL
} bad;

#define PLAIN 0, 0, 0, false, NULL // the members that only some of the frames need
static const bad bads[] = {
    {"EAGER of a group that the sender is not in", IDIST__EAGER, true, 0, 1, PLAIN},
    {"RTS of a group that the sender is not in", IDIST__RTS, true, 100000, 1, PLAIN},
    {"CTS of a group that the sender is not in", IDIST__CTS, true, 0, 1, PLAIN},
    {"DATA of a group that the sender is not in", IDIST__DATA, true, 0, 1, PLAIN},
    {"WAITS of a group that the sender is not in", IDIST__WAITS, true, 0, 1, PLAIN},
    {"HERE of a group that the sender is not in", IDIST__HERE, true, 0, 1, PLAIN},
    {"ABORT of a group that the sender is not in", IDIST__ABORT, true, 0, 1, PLAIN},
    {"LEFT of a group that the sender is not in", IDIST__LEFT, true, 0, 1, PLAIN},
    {"more EAGER bytes than the window", IDIST__EAGER, false, 60000, FLOOD, PLAIN},
    {"WAITS with a payload", IDIST__WAITS, false, (uint64_t)1 << 60, 1, PLAIN},
    {"HERE with a payload", IDIST__HERE, false, (uint64_t)1 << 60, 1, PLAIN},
    {"CTS with a payload", IDIST__CTS, false, (uint64_t)1 << 60, 1, PLAIN},
    {"PULLED with a payload", IDIST__PULLED, false, (uint64_t)1 << 60, 1, PLAIN},
    {"LEFT with a payload", IDIST__LEFT, false, (uint64_t)1 << 60, 1, PLAIN},
    {"BYE with a payload", IDIST__BYE, false, (uint64_t)1 << 60, 1, PLAIN},
    {"credit for bytes that were never sent", IDIST__CREDIT, false, 64, 1, PLAIN},
    {"no type at all", 77, false, 0, 1, PLAIN},
    {"type 0", 0, false, 0, 1, PLAIN},
    {"ABORT of the world with status 0", IDIST__ABORT, false, 0, 1, 0, 0, 0, true, NULL},
    {"ABORT of the world with a positive status", IDIST__ABORT, false, 0, 1, 5, 0, 0, true, "text"},
    {"ABORT of the world with a status below all", IDIST__ABORT, false, 0, 1, -1000, 0, 0, true,
     "text"},
    {"ABORT of the world with a status of 41 bits", IDIST__ABORT, false, 0, 1,
     ((int64_t)1 << 40) - 3, 0, 0, true, "text"},
    {"ABORT of an unknown group with status 0", IDIST__ABORT, false, 0, 1, 0, 0, 0, false, "text"},
    {"ABORT with a text that is too long", IDIST__ABORT, false, 401, 1, IDIST_ERR_ABORTED, 0, 0,
     true, NULL},
    {"ABORT with a text without end", IDIST__ABORT, false, (uint64_t)1 << 60, 1, IDIST_ERR_ABORTED,
     0, 0, true, NULL},
    {"ASK with a payload", IDIST__ASK, false, (uint64_t)1 << 60, 1, PLAIN},
    {"ANSWER with a payload", IDIST__ANSWER, false, (uint64_t)1 << 60, 1, PLAIN},
    {"ANSWER that nobody has asked for", IDIST__ANSWER, false, 0, 1, PLAIN},
    {"BYE with a positive status", IDIST__BYE, false, 0, 1, 5, 0, 0, false, "text"},
    {"BYE with a status below all", IDIST__BYE, false, 0, 1, -1000, 0, 0, false, "text"},
    {"BYE with a text that is too long", IDIST__BYE, false, 401, 1, IDIST_ERR_ABORTED, 0, 0, false,
     NULL},
    {"BYE that gives no reason a text", IDIST__BYE, false, 0, 1, 0, 0, 0, false, "text"},
    {"BYE while others need the rank", IDIST__BYE, false, 0, 1, PLAIN},
    {"WAITS in a call that there is not", IDIST__WAITS, false, 0, 1, 0, 200, 0, true, NULL},
    {"WAITS in no call", IDIST__WAITS, false, 0, 1, 0, -1, 0, true, NULL},
    {"WAITS with a root that there is not", IDIST__WAITS, false, 0, 1, 0, IDIST__BROADCAST, 3, true,
     NULL},
    {"WAITS with a negative root", IDIST__WAITS, false, 0, 1, 0, IDIST__BROADCAST, -2, true, NULL},
    {"HERE in a call that there is not", IDIST__HERE, false, 0, 1, 0, 200, 0, true, NULL},
    {"HERE with a root that there is not", IDIST__HERE, false, 0, 1, 0, IDIST__BROADCAST,
     (1 << 30) + 5, true, NULL}, // the upper bits are the number of a plan
    {"CTS of a call that there is not", IDIST__CTS, false, 0, 1, 0, 200, 0, true, NULL},
    {"RTS of a call that there is not", IDIST__RTS, false, 0, 1, 0, 200, 0, true, NULL},
    {"EAGER of a call that there is not", IDIST__EAGER, false, 0, 1, 0, 200, 0, true, NULL},
    {"EAGER of a receive", IDIST__EAGER, false, 0, 1, 0, IDIST__RECV, 0, true, NULL},
    {"EAGER from a rank that there is not", IDIST__EAGER, false, 0, 1, 0, IDIST__SEND, 3, true,
     NULL},
    {"DATA of a call that there is not", IDIST__DATA, false, 0, 1, 0, 200, 0, true, NULL},
};
enum { N_BADS = sizeof bads / sizeof *bads };

typedef struct memory {
    int64_t now, most;
} memory;
static memory *held; // shared by all ranks; counted on rank 0 only
static bool counts;

static void count_bytes(int64_t nbytes) {
    if (!counts) return;
    int64_t now = __atomic_add_fetch(&held->now, nbytes, __ATOMIC_RELAXED);
    if (now > held->most) held->most = now; // the world's lock is held
}

static void *counted_alloc(size_t nbytes, void *user) {
    size_t *p = (size_t *)malloc(nbytes + 64);
    (void)user;
    if (!p) return NULL;
    *p = nbytes;
    count_bytes((int64_t)nbytes);
    return (char *)p + 64;
}

static void counted_free(void *ptr, void *user) {
    size_t *p = (size_t *)(void *)((char *)ptr - 64);
    (void)user;
    count_bytes(-(int64_t)*p);
    free(p);
}

// Sends bad frames that the library itself would never send. Ignores the window and does not check
// the members of the group.
static void send_bad(idist_group *world, const bad *what, uint64_t pair) {
    idist__world *w = world->w;
    idist__ring *ring = idist__ring_of(w);
    int64_t end_ns = tap_now_ns() + 10000000000;
    for (int i = 0; i < what->repeat && ring->links[0].open && tap_now_ns() < end_ns; i++) {
        idist__frame f;
        memset(&f, 0, sizeof f);
        f.type = what->type;
        f.ctx = what->of_the_pair ? pair : pair + 1 + (uint64_t)i;
        f.nbytes = what->nbytes;
        f.fingerprint.kind = what->type == IDIST__RTS || what->type == IDIST__EAGER
                                 ? IDIST__BARRIER
                                 : IDIST__ALL_REDUCE;
        f.fingerprint.seq = 5;
        if (what->of_the_world) f.ctx = w->group.ctx;
        if (what->kind) f.fingerprint.kind = (uint8_t)(what->kind < 0 ? 0 : what->kind);
        if (what->root) f.fingerprint.root = what->root;
        f.aux = (uint64_t)what->aux;
        pthread_mutex_lock(&w->lock);
        idist__link_control(ring, &ring->links[0], &f, what->text);
        if (i % 64 == 63) idist__progress_run(w); // so that the frames are sent
        pthread_mutex_unlock(&w->lock);
    }
    while (ring->links[0].open && tap_now_ns() < end_ns) { // stays until rank 0 closes the link
        pthread_mutex_lock(&w->lock);
        idist__progress_turn(ring);
        idist__progress_run(w);
        pthread_mutex_unlock(&w->lock);
        tap_sleep_ms(1);
    }
}

static int body(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    const bad *what = (const bad *)arg;
    idist_opts o = opts_of(world), of_pair;
    idist_group *g = NULL;
    uint64_t ctx;
    (void)n;
    (void)slot;
    if (!rank_ok(rank, idist_split(world, rank < 2 ? 0 : -1, rank, &g))) return 1;
    of_pair = opts_of(g);
    ctx = rank < 2 ? g->ctx : 0;
    if (!rank_ok(rank, idist_broadcast(&ctx, sizeof ctx, IDIST_U8, 0, &o))) return 1;
    counts = rank == 0;
    if (rank == 2) {
        send_bad(world, what, ctx);
    } else {
        char text[600] = "";
        idist_status status = IDIST_OK;
        // Rank 1 learns of the loss from rank 0, or from rank 2, which blames rank 0 for closing
        // the connection. So only the text of rank 0 is checked.
        status = idist_barrier(&o);
        copy_text(text, sizeof text, idist_last_error());
        rank_check(status == IDIST_ERR_PEER_LOST, "rank %d: got %s: %s", rank,
                   idist_status_name(status), text);
        bool is_plain_bye = what->type == IDIST__BYE && !what->aux && !what->nbytes && !what->text;
        rank_check(rank || is_plain_bye || text_has_word(text, "malformed"),
                   "rank 0 says what was wrong: got \"%s\"", text);
        rank_check(rank || text_names_rank(text, 2), "rank %d names rank 2: got \"%s\"", rank,
                   text);
        // The group of ranks 0 and 1 does not depend on rank 2.
        rank_is(rank, idist_barrier(&of_pair), IDIST_OK);
        rank_check(rank || held->most < MOST_HELD, "rank 0 held %lld bytes", (long long)held->most);
    }
    idist_close(&world); // reports that rank 2 was lost
    return 0;
}

// Rank 0 has granted the message of a broadcast by a CTS. Rank 1 sends the message under a number
// that is too high by *arg. Rank 0 must report the frame as malformed.
static int other_number(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    enum { NBYTES = 100000 };
    static char x[NBYTES];
    idist_opts o = opts_of(world);
    idist__ring *ring = idist__ring_of(world->w);
    idist__link *l = &ring->links[0];
    int64_t end_ns = tap_now_ns() + 10000000000;
    bool sent = false;
    (void)n;
    (void)slot;
    if (rank == 0) {
        rank_is(rank, idist_broadcast(x, NBYTES, IDIST_U8, 1, &o), IDIST_ERR_PEER_LOST);
        rank_check(text_has_word(idist_last_error(), "malformed"), "got \"%s\"",
                   idist_last_error());
    }
    while (rank == 1 && l->open && tap_now_ns() < end_ns) {
        pthread_mutex_lock(&world->w->lock);
        idist__progress_turn(ring);
        idist__progress_run(world->w);
        if (!sent && l->early && l->early->frame.type == IDIST__CTS) {
            idist__frame f = l->early->frame;
            f.type = IDIST__DATA;
            f.id = f.aux + *(const uint64_t *)arg;
            f.aux = NBYTES;
            idist__link_control(ring, l, &f, NULL);
            sent = true;
        }
        pthread_mutex_unlock(&world->w->lock);
        tap_sleep_ms(1);
    }
    rank_check(rank == 0 || sent, "rank 1 got no grant");
    idist_close(&world);
    return 0;
}

// Floods rank 0 with messages for groups that no rank knows. An honest rank may also send messages
// for a group that rank 0 does not know yet. So rank 0 must not report an error, but it must limit
// the memory that it keeps for them.
static int unknown_groups(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    static const uint8_t types[4] = {IDIST__RTS, IDIST__ABORT, IDIST__EAGER, IDIST__CTS};
    idist__world *w = world->w;
    idist_opts o = opts_of(world);
    (void)n;
    (void)slot;
    (void)arg;
    if (!rank_ok(rank, idist_barrier(&o))) return 1;
    counts = rank == 0;
    for (int i = 0; i < 4 * (test_quick() ? FLOOD / 8 : FLOOD / 2) && rank == 1; i++) {
        idist__frame f;
        memset(&f, 0, sizeof f);
        f.type = types[i % 4];
        f.ctx = w->group.ctx + 1 + (uint64_t)i;
        f.fingerprint.kind = IDIST__BARRIER;
        f.aux = (uint64_t)(int64_t)IDIST_ERR_ABORTED;
        pthread_mutex_lock(&w->lock);
        if (f.type == IDIST__EAGER && idist__ring_of(w)->links[0].window < 64) f.type = IDIST__RTS;
        if (f.type == IDIST__EAGER) idist__ring_of(w)->links[0].window -= 64;
        idist__link_control(idist__ring_of(w), &idist__ring_of(w)->links[0], &f, NULL);
        if (i % 64 == 63) idist__progress_run(w); // so that the frames are sent
        pthread_mutex_unlock(&w->lock);
    }
    rank_ok(rank, idist_barrier(&o));
    rank_check(rank || held->most < MOST_HELD, "rank 0 held %lld bytes", (long long)held->most);
    return rank_ok(rank, idist_close(&world)) ? 0 : 1;
}

// Frees groups while messages for them are still in flight. Every member reports a failure to every
// other member. If a member frees the group immediately, most of these reports arrive later. A
// message that no rank receives arrives later, too.
static void freed_at_once(idist_group *world, int rank, int n, void *arg) {
    idist_opts all = opts_of(world);
    int rounds = *(int *)arg;
    char x[64] = {0};
    for (int i = 0; i < rounds; i++) {
        idist_group *g = NULL;
        if (!rank_ok(rank, idist_split(world, 0, rank, &g))) return;
        idist_opts o = opts_of(g);
        if (i % 2 == 0 && rank == 1) idist_send(x, sizeof x, IDIST_U8, (rank + 1) % n, 0, &o);
        if (i % 2 && rank == i % n) idist_abort(g);
        else if (i % 2) idist_barrier(&o);
        if (!rank_ok(rank, idist_free_group(&g))) return;
    }
    rank_ok(rank, idist_barrier(&all));
}

// Sends a failure before its group exists. The receiver must keep the failure. The second failure
// has no text, as if memory for the text could not be allocated. In this case the error text must
// name the rank that reported the failure.
static void early_failure(idist_group *world, int rank, int n, void *arg) {
    static const char *const texts[2] = {"made up", NULL};
    idist__world *w = world->w;
    (void)n;
    (void)arg;
    for (int i = 0; i < 2; i++) {
        idist_group *g = NULL;
        idist_opts o = opts_of(world);
        if (rank == 1) {
            idist__frame f;
            memset(&f, 0, sizeof f);
            f.type = IDIST__ABORT;
            f.ctx = idist__new_group_ctx(world, world->child_count + 1, 1);
            f.aux = (uint64_t)(int64_t)IDIST_ERR_DEVICE;
            pthread_mutex_lock(&w->lock);
            idist__link_control(idist__ring_of(w), &idist__ring_of(w)->links[0], &f, texts[i]);
            pthread_mutex_unlock(&w->lock);
        }
        rank_ok(rank, idist_barrier(&o));
        rank_ok(rank, idist_split(world, 0, rank, &g));
        if (!g) return;
        o = opts_of(g);
        rank_is(rank, idist_barrier(&o), IDIST_ERR_DEVICE);
        if (texts[i])
            rank_check(strstr(idist_last_error(), texts[i]), "got %s", idist_last_error());
        else rank_check(text_names_rank(idist_last_error(), 1), "got %s", idist_last_error());
        rank_ok(rank, idist_free_group(&g));
    }
}

int main(void) {
    static const char *const transports[2] = {"auto", "tcp"};
    tap_deadline(200 * test_slow_factor());
    held = (memory *)shared_alloc(sizeof *held);
    for (int t = 0; t < 2; t++) {
        idist_desc d = desc_with(transports[t], "bandwidth");
        d.allocator.alloc_fn = counted_alloc;
        d.allocator.free_fn = counted_free;
        for (int i = 0; i < N_BADS; i++) {
            bad what = bads[i];
            memset(held, 0, sizeof *held);
            if (test_quick() && what.repeat > 1) what.repeat = FLOOD / 4;
            tap_running("%s, %s", what.name, transports[t]);
            ranks_reset();
            procs p;
            procs_start(&p, 3, &d, body, &what);
            rank_check(procs_wait(&p, RANKS_TIMEOUT_MS) == 0, "a rank hangs");
            rank_check(p.wait_status[0] == 0, "rank 0: wait status 0x%x",
                       (unsigned)p.wait_status[0]);
            procs_free(&p);
            ranks_report("%s, %s", what.name, transports[t]);
        }
        memset(held, 0, sizeof *held);
        tap_running("unknown groups, %s", transports[t]);
        ranks_reset();
        procs p;
        procs_start(&p, 2, &d, unknown_groups, NULL);
        rank_check(procs_wait(&p, RANKS_TIMEOUT_MS) == 0, "a rank hangs");
        procs_free(&p);
        ranks_report("what comes for groups that nobody knows is bounded, %s", transports[t]);
        int rounds = test_quick() ? 1500 : 4000;
        ranks_case(3, &d, freed_at_once, &rounds, "groups freed before all was told, %d times, %s",
                   rounds, transports[t]);
        ranks_case(2, &d, early_failure, NULL, "an early ABORT, %s", transports[t]);
    }
    idist_desc d = desc_with("tcp", "latency"); // with these settings, rank 0 sends CTS frames
    for (uint64_t i = 0; i < 2; i++) {
        uint64_t more = i ? 1000 : 1;
        tap_running("a number that was not granted");
        ranks_reset();
        procs p;
        procs_start(&p, 2, &d, other_number, &more);
        rank_check(procs_wait(&p, RANKS_TIMEOUT_MS) == 0, "a rank hangs");
        procs_free(&p);
        ranks_report("DATA of a number that was not granted, %d more", (int)more);
    }
    return tap_done();
}
