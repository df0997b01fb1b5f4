/* idist_core.h - v0.1.0 - worlds, groups, tasks and the path of a call - MIT licence

    Part of the implementation of idist; idist.h includes it where IDIST_IMPLEMENTATION is defined.

CONTENTS

      [core:world]  worlds, groups and tasks: what the call path and the backends share
      [core:call]   every communication call passes through idist__call_run: checks, numbering, start, wait
      [core:self]   the backend of a world of 1, and what any backend does in a group of 1
*/
#ifndef IDIST_CORE_H
#define IDIST_CORE_H

//------------------------------------------------------------------------------
// [core:world]  worlds, groups and tasks: what the call path and the backends share
// uses os err mem base:log base:type config
//
// One mutex per world guards everything in it. A caller that waits drives the backend itself; when
// several wait, one drives (w->driving) and the others sleep on w->changed until it completes their
// task or gives the wheel up. Requests that nobody waits for are driven by a progress thread, which
// exists from the first request on and steps back whenever a caller blocks.
//------------------------------------------------------------------------------

typedef enum idist__kind {
    IDIST__NONE,
    IDIST__ALL_REDUCE,
    IDIST__REDUCE,
    IDIST__BROADCAST,
    IDIST__BARRIER,
    IDIST__ALL_GATHER,
    IDIST__GATHER,
    IDIST__SCATTER,
    IDIST__REDUCE_SCATTER,
    IDIST__ALL_TO_ALL,
    IDIST__SCAN,
    IDIST__EXSCAN,
    IDIST__ALL_GATHERV,
    IDIST__GATHERV,
    IDIST__SCATTERV,
    IDIST__ALL_TO_ALLV,
    IDIST__SEND,
    IDIST__RECV,
    // Names of calls that are made of the ones above; they label the fingerprint.
    IDIST__BROADCAST_BYTES,
    IDIST__ALL_GATHER_BYTES,
    IDIST__NEW_GROUP,
    IDIST__SPLIT,
    IDIST__ONE_RANK_FIRST,
    IDIST__ONE_RANK_ONLY,
    IDIST__FINALIZE,
    IDIST__FIRST_DEVICE_CALL,
    IDIST__KIND_COUNT
} idist__kind;

static const char *const idist__kind_names[IDIST__KIND_COUNT] = {"nothing",
                                                                 "all_reduce",
                                                                 "reduce",
                                                                 "broadcast",
                                                                 "barrier",
                                                                 "all_gather",
                                                                 "gather",
                                                                 "scatter",
                                                                 "reduce_scatter",
                                                                 "all_to_all",
                                                                 "scan",
                                                                 "exscan",
                                                                 "all_gatherv",
                                                                 "gatherv",
                                                                 "scatterv",
                                                                 "all_to_allv",
                                                                 "send",
                                                                 "recv",
                                                                 "broadcast_bytes",
                                                                 "all_gather_bytes",
                                                                 "new_group",
                                                                 "split",
                                                                 "one_rank_first",
                                                                 "one_rank_only",
                                                                 "finalize",
                                                                 "first_device_call"};

typedef struct idist__user_op {
    idist_op_fn fn;
    void *arg;
    double factor; // premultiplied sum, when fn is NULL
    bool used, commutative;
} idist__user_op;

// An operation as data.
typedef struct idist__call {
    idist__kind kind;  // what is run
    idist__kind label; // what the user called
    const void *send;
    void *recv;
    size_t count; // as in the API; v-forms: the own contribution
    const size_t *sendcounts, *senddispls, *recvcounts, *recvdispls;
    idist_dtype dtype;
    idist_op op;
    int root; // or the peer of send and recv; -1 where there is none
    int tag;
    idist_recv_info *info;
    uint64_t check; // what must be equal on all ranks besides: count, or a hash of counts
    const idist__user_op
        *user; // the op of a call that is a part of another one: it may be freed meanwhile
} idist__call;

// What two ranks compare about a call, 24 bytes of every message.
typedef struct idist__print {
    uint8_t kind, dtype, op, algorithm; // the last with IDIST__ON_DEVICE
    int32_t root;
    uint64_t check; // see idist__call; of a send: its count
    uint32_t seq;   // number of the call within its group
    uint32_t whole; // of a call that is a part of another one: the number of that; else 0
} idist__print;

enum { IDIST__ON_DEVICE = 0x80 }; // a collective on device memory

typedef enum idist__driver {
    IDIST__DRIVER_NONE,
    IDIST__DRIVER_CALLER,
    IDIST__DRIVER_THREAD
} idist__driver;

struct idist__task {          // one operation under way
    idist__task *next, *prev; // in w->tasks while it runs
    idist__task *chain;       // in the list of an idist_group_begin
    idist__task *older;       // in w->all_tasks
    idist_group *group;
    idist__call call;
    idist_status status;
    bool done, async;
    bool patient; // its deadline is the group's: the caller does not expect to come back without a
                  // result
    bool announced; // the others were told that we wait in this call
    bool warned;    // a log line said that it takes long
    uint32_t seq;
    idist__print whole;  // what it is a part of; kind 0: it is a call of its own
    uint16_t whole_past; // digest of the calls before that one
    int timeout_ms;
    int64_t started_ns, deadline_ns;
    bool on_device; // the device backend sees to it
    bool away;      // the backend has not got it, or is through with it: it waits for the device
    bool followed;  // idist_wait_stream needs not wait for the host any more
    bool detached;  // nobody waits for it: it goes when it is done
    bool pinned;    // a thread works on it without the lock, ...
    bool freed;     // ... and frees it
    void *stream;   // of the device: what it holds comes first
    void *impl;     // the backend's part, behind this struct
    void *lane;     // its place in the timeline, or NULL
    char text[512]; // why it failed; not cleared from here on
    void *device;   // the device backend's part; stays with the task
};

struct idist_group {
    idist__world *w;
    idist_group *next;
    uint64_t ctx; // the same on all members, unique in the world
    int rank;     // -1: not a member
    int size;
    int *ranks;   // world rank of each member
    uint32_t seq; // collectives started
    uint32_t nchildren;
    int ntasks;          // running
    int nrequests;       // not yet waited for
    int ndetached;       // running, and nobody waits for them; or pinned
    idist_status status; // not IDIST_OK: unusable since ...
    char cause[400];     // ... this happened
    bool freed;
    int64_t asked_ns; // when the members were last asked whether they are still there; 0: never
    int64_t asked_until_ns;   // the answers are used then; nobody asks again before
    bool inner;               // of a backend's own making
    bool flushed;             // the others know of the failure, as far as we can tell
    idist_group *node;        // the members on this host, made when one_rank_first asks for it
    const idist_group *maker; // while it is being made: if that one fails, this one never will be
    void *impl;
    void *device; // the device backend's part
};

typedef struct idist__node { // what is known of a rank
    char hostname[64];
    uint64_t host; // equal on one host
    int local_rank, local_size, node_rank;
} idist__node;

// A backend. The core calls all but claim, open, close and alloc with the world's lock held; only
// for the group of the world itself group_open and group_close come when nobody else can use the
// world. None but open, close, sleep, flush, shrink and agree may block, and sleep and flush give
// the lock up meanwhile; quick and tell may take a moment. Over MPI group_open blocks as well, and
// so does a collective that all ranks have entered: MPI has it then.
struct idist_backend_api {
    uint32_t abi;  // IDIST__BACKEND_ABI
    uint32_t size; // of this struct
    const char *name;
    size_t task_nbytes;  // room it wants behind each task, not cleared
    size_t group_nbytes; // and behind each group
    // Whether it serves this configuration. If not: IDIST_ERR_NO_BACKEND, *why says the reason, and
    // the next one is asked; any other failure ends the start. A backend that knows rank and size
    // better than the launcher's variables sets them.
    idist_status (*claim)(idist__config *config, const char **why);
    // Meets the other ranks within cfg.init_timeout_ms, fills w->nodes. On failure everything it
    // made is gone again.
    idist_status (*open)(idist__world *w);
    // Frees all. clean: everybody is through the last barrier; otherwise say good-bye to whoever
    // listens, and go.
    void (*close)(idist__world *w, bool clean);
    idist_status (*group_open)(idist_group *g);
    void (*group_close)(idist_group *g);
    // May be NULL, both. After group_open the members exchange one number each: what a rank offers
    // the others, and what all of them offered, by rank in the group.
    uint64_t (*group_offer)(idist_group *g);
    idist_status (*group_meet)(idist_group *g, const uint64_t *offers);
    // May be NULL. Tries a blocking call without a task, while there are no tasks: true when it
    // went through, and, if it is a collective, was counted in g->seq. If not, `start` follows for
    // the same call.
    bool (*quick)(idist_group *g, const idist__call *c);
    // Begins a task; ends it by idist__complete, now or later.
    void (*start)(idist__task *t);
    // Moves everything that can move.
    void (*progress)(idist__world *w);
    // Sleeps until something has come (and looks after it), `wake` was called, or the moment is
    // there. One thread at a time.
    void (*sleep)(idist__world *w, int64_t until_ns);
    void (*wake)(idist__world *w);
    // Forgets a task: after it no byte of its buffers is touched. False when others were already
    // involved in it, so that its group cannot go on. Collectives are forgotten only when their
    // group has failed, after `tell`.
    bool (*cancel)(idist__task *t);
    // Tells the other members that the group failed, as g->status and g->cause say.
    void (*tell)(idist_group *g);
    // Moves on until all that was to be told is out, or the moment is there. Gives the lock up
    // while it sleeps.
    void (*flush)(idist__world *w, int64_t until_ns);
    // Tells the other members that this rank waits in t, so that they can object, and answer that
    // they are there. Once when t has waited for a while; for the call of a group that is about to
    // be given up once more (g->asked_ns).
    void (*announce)(idist__task *t);
    // Appends who is missing in t ("rank 3 on host b (last seen in barrier #6)"); returns how many.
    int (*missing)(idist__task *t, char *text, size_t cap);
    // May be NULL. Memory that other ranks can reach, for idist_alloc; NULL: there is none, take
    // plain memory.
    void *(*alloc)(idist__world *w, size_t nbytes);
    // May be NULL, both: then a group that lost a rank is of no use any more. shrink lists the
    // members of a group that still live, the same list on each of them (world ranks, in the
    // group's order); *serial becomes the largest of theirs; group_open for just these follows.
    // agree makes *flag the bitwise AND over the members that live. Both work in a group that has
    // failed.
    idist_status (*shrink)(idist_group *g, int *ranks, int *n, uint32_t *serial);
    idist_status (*agree)(idist_group *g, int *flag);
    // Of a device backend, which has only its name, `claim` and this: takes the place of the
    // world's backend, hands on to it what concerns host memory, and sets w->device, w->route and
    // the like. Collective; without a device: w->no_device only.
    idist_status (*wrap)(idist__world *w);
};

enum { IDIST__BACKEND_ABI = 6 };
#define IDIST__SPIN_NS 500000
#define IDIST__YIELDS 1000               // half a millisecond of the waiting rank's own time
#define IDIST__YIELD_NS 5000000          // and no more than this of everybody's
#define IDIST__TIMERS_NS (5 * IDIST__MS) // who polls looks at the timers this often
#ifndef IDIST__ANNOUNCE_NS // a test sets it so high that an announcement never wakes anybody
#define IDIST__ANNOUNCE_NS (20 * IDIST__MS)
#endif
#ifndef IDIST__WARN_NS // a test has less patience
#define IDIST__WARN_NS (60000 * IDIST__MS)
#endif
#define IDIST__ASK_NS (1000 * IDIST__MS)
enum { IDIST__FLUSH_MS = 100 };
#define IDIST__WATCH_NS (10 * IDIST__MS)

struct idist__world {
    idist_group group; // all ranks; first, so that a world is its group
    idist__config cfg;
    idist__log log;
    const idist_backend_api *backend;
    void *impl;                            // the backend's
    idist_status (*wrap)(idist__world *w); // of the device backend that the program has, or NULL
    void *device;                          // its part, once it is there
    char device_name[32], no_device[200];  // "cuda:0"; or why there is none
    const char *device_backend;            // how it moves device memory
    // A task of the device that the backend is through with: false when it is not over yet.
    bool (*landed)(idist__task *t, idist_status status);
    // Whether a call is for the device backend; what is wrong with its buffers or its stream. The
    // first such call of a group waits in here for the other members. *detached: nobody is to wait
    // for it.
    idist_status (*route)(idist_group *g, const idist__call *c, const idist_opts *o,
                          bool *on_device, bool *detached);
    void (*launch)(
        idist__world *w); // hands the device what this thread's idist_group_begin held back
    idist_status (*follow)(
        idist__task *t, void *stream); // makes a stream wait for a `followed` task, and detaches it
    idist__task *detached;             // those, running or done, newest first
    uint32_t ngone;                    // of those, done
    char hostname[64];
    char backends[128]; // names of those built in
    idist__node *nodes; // of every rank
    int nnodes;
    idist_group *freed_groups;
    int *fork_guard;
    idist__user_op ops[IDIST_OP_LAST - IDIST_OP_USER + 1];

    pthread_mutex_t lock;
    pthread_cond_t changed;  // a task ended, or nobody drives any more: for callers
    pthread_cond_t work;     // there is a request and no caller: for the progress thread
    idist__task *tasks;      // running
    idist__task *idle_tasks; // to be used again
    idist__task *all_tasks;  // ever allocated; freed with the world
    int nasync;              // running, with a request
    int nblocked;            // callers inside idist__world_wait
    uint32_t nended;         // tasks that ended so far
    uint32_t nmoved;         // steps forward inside tasks
    idist__driver driver;    // who sleeps in the backend
    int64_t spin_ns; // how long a caller polls before it sleeps; 0: it yields the core instead, a
                     // few times
    int64_t patience_ns; // the same, as it has proved worth it lately
    uint32_t nasking;    // threads that want the lock while another one has it
    int64_t timers_ns;   // when somebody who polls looks at the timers again
    int64_t due_ns;      // before this no task has anything that idist__world_timers would do
    int ncores; // that the ranks of this host may use together; 0: the backend could not tell
    bool thread_runs, thread_stops;
    int nforeign; // threads that never call: those of another library; many, if only one thread may
                  // call at all
    bool threadless; // the backend bears one thread only: requests move on inside calls
    int nmaking;     // groups being made
    bool leaves;     // the end is near, and not a good one: the others are not at theirs
    bool watched; // the device may wait for other ranks while nobody here does: the progress thread
                  // looks after them
    pthread_t thread;
};

static idist__world *idist__default_world; // set by idist_initialize, the one global

// Who follows the calls of this process, for a timeline: idist_trace.h, or nobody (NULL).
typedef struct idist__tracer {
    void (*joined)(const idist__world *w); // this thread has
    void (*left)(void);
    idist_status (*call)(idist_group *g, const idist__call *c,
                         const idist_opts *o); // around idist__call_locked
    // Around what else waits in this thread, for one call, or several: then g and c are NULL.
    void (*begin)(const char *category, const char *name, const idist_group *g,
                  const idist__call *c);
    void (*end)(idist_status status);
    void (*done)(const idist__task
                     *t); // a task that has a lane is; in any thread, with the world's lock held
} idist__tracer;

static const idist__tracer *idist__tracer_set;

static const idist__tracer *idist__tracer_now(void) {
    return __atomic_load_n(&idist__tracer_set, __ATOMIC_ACQUIRE);
}

static void idist__trace_begin(const char *category, const char *name, const idist_group *g,
                               const idist__call *c) {
    if (idist__tracer_now()) idist__tracer_now()->begin(category, name, g, c);
}

static idist_status idist__trace_end(idist_status status) {
    if (idist__tracer_now()) idist__tracer_now()->end(status);
    return status;
}

// A child made by fork has none of its parent's worlds.
static bool idist__world_forked(const idist__world *w) { return w->fork_guard && !*w->fork_guard; }

// Whether this thread may call into a world at all.
static idist_status idist__world_enter(const char *name, const idist__world *w) {
    if (idist__world_forked(w))
        return idist__fail(
            IDIST_ERR_STATE,
            "%s: this process was forked after idist_initialize; the world belongs to its parent",
            name);
    if (idist__me.callbacks)
        return idist__fail(IDIST_ERR_STATE, "%s: a callback must not call idist", name);

    return IDIST_OK;
}

static idist__world *idist__world_default(void) {
    idist__world *w = __atomic_load_n(&idist__default_world, __ATOMIC_ACQUIRE);
    return w && !idist__world_forked(w) ? w : NULL;
}

IDIST__UNUSED static idist_group *idist__world_find_group(idist__world *w, uint64_t ctx) {
    idist_group *g;
    for (g = &w->group; g; g = g->next)
        if (g->ctx == ctx && g->rank >= 0) return g;
    return NULL;
}

IDIST__UNUSED static int idist__world_rank(const idist_group *g, int rank) {
    return g->ranks[rank];
}

// The op of a call that names a user's.
static const idist__user_op *idist__call_user_op(const idist_group *g, const idist__call *c) {
    return c->user ? c->user : &g->w->ops[(int)c->op - IDIST_OP_USER];
}

static idist__print idist__call_print(const idist__call *c, uint32_t seq) {
    idist__print p;

    memset(&p, 0, sizeof p);
    p.kind = (uint8_t)c->label;
    p.dtype = (uint8_t)c->dtype;
    p.op = (uint8_t)c->op;
    p.root = c->root;
    p.check = c->check;
    p.seq = seq;

    return p;
}

static idist__print idist__task_print(const idist__task *t, int algorithm) {
    idist__print p = t->whole;

    if (p.kind) { // of a part the ranks compare what the user called
        p.whole = p.seq;
        p.seq = t->seq;
        p.algorithm = (uint8_t)(algorithm | (p.algorithm & IDIST__ON_DEVICE));
        return p;
    }

    p = idist__call_print(&t->call, t->seq);
    p.algorithm = (uint8_t)algorithm;

    return p;
}

static bool idist__kind_reduces(idist__kind kind) {
    return kind == IDIST__ALL_REDUCE || kind == IDIST__REDUCE || kind == IDIST__REDUCE_SCATTER ||
           kind == IDIST__SCAN || kind == IDIST__EXSCAN;
}

static bool idist__kind_is_p2p(idist__kind kind) {
    return kind == IDIST__SEND || kind == IDIST__RECV;
}

static bool idist__kind_is_v(idist__kind kind) {
    return kind >= IDIST__ALL_GATHERV && kind <= IDIST__ALL_TO_ALLV;
}

// "all_reduce #42 (F32 x 1024, SUM)"
static void idist__print_text(const idist__print *p, char *buf, size_t cap) {
    idist__kind kind = p->kind < IDIST__KIND_COUNT ? (idist__kind)p->kind : IDIST__NONE;

    snprintf(buf, cap, "%s", idist__kind_names[kind]);
    if (p->seq) idist__append(buf, cap, " #%u", (unsigned)(p->whole ? p->whole : p->seq));
    if (kind == IDIST__BARRIER || kind >= IDIST__SEND) return;
    idist__append(buf, cap, " (%s", idist_dtype_name((idist_dtype)p->dtype));
    if (!idist__kind_is_v(kind)) idist__append(buf, cap, " x %llu", (unsigned long long)p->check);
    if (idist__kind_reduces(kind)) idist__append(buf, cap, ", %s", idist_op_name((idist_op)p->op));
    if (p->root >= 0) idist__append(buf, cap, ", root %d", (int)p->root);
    idist__append(buf, cap, p->algorithm & IDIST__ON_DEVICE ? ", on a device)" : ")");
}

// What two ranks of the world have called, and where it differs.
IDIST__UNUSED static void idist__mismatch_text(const char *field, int a, const idist__print *of_a,
                                               int b, const idist__print *of_b, char *buf,
                                               size_t cap) {
    char first[128], second[128];
    idist__print_text(of_a, first, sizeof first);
    idist__print_text(of_b, second, sizeof second);
    snprintf(buf, cap, "the %s differs: rank %d called %s, rank %d called %s",
             field ? field : "sequence", a, first, b, second);
}

IDIST__UNUSED static void idist__counts_text(int from, uint64_t sent, int to, uint64_t expected,
                                             const char *unit, const idist__task *t, char *buf,
                                             size_t cap) {
    snprintf(buf, cap,
             "the count differs: rank %d sends %llu %s to rank %d, which expects %llu, in %s #%u",
             from, (unsigned long long)sent, unit, to, (unsigned long long)expected,
             idist__kind_names[t->call.label], (unsigned)t->seq);
}

// Whether a receive takes a message of a rank of the world.
IDIST__UNUSED static bool idist__recv_wants(const idist__task *t, int rank, int tag) {
    const idist__call *c = &t->call;
    return (c->root == IDIST_ANY_SOURCE || t->group->ranks[c->root] == rank) &&
           (c->tag == IDIST_ANY_TAG || c->tag == tag);
}

// The field in which two calls differ, or NULL.
IDIST__UNUSED static const char *idist__print_difference(const idist__print *a,
                                                         const idist__print *b) {
    if (a->kind != b->kind) return "operation";
    if (a->dtype != b->dtype) return "dtype";
    if (a->op != b->op) return "op";
    if (a->root != b->root) return "root";
    if (a->check != b->check) return a->kind == IDIST__NEW_GROUP ? "group" : "count";
    if ((a->algorithm ^ b->algorithm) & IDIST__ON_DEVICE) return "memory";
    if (a->algorithm != b->algorithm) return "algorithm";

    return NULL;
}

static void idist__task_text(const idist__task *t, char *buf, size_t cap) {
    const idist__call *c = &t->call;

    if (c->kind == IDIST__SEND || c->kind == IDIST__RECV) {
        snprintf(buf, cap, "%s (%s x %zu, %s ", idist__kind_names[c->label],
                 idist_dtype_name(c->dtype), c->count, c->kind == IDIST__SEND ? "to" : "from");
        if (c->root == IDIST_ANY_SOURCE) idist__append(buf, cap, "any rank");
        else idist__append(buf, cap, "rank %d", c->root);
        if (c->tag == IDIST_ANY_TAG) idist__append(buf, cap, ", any tag)");
        else idist__append(buf, cap, ", tag %d)", c->tag);
    } else {
        idist__print p = idist__task_print(t, 0);
        idist__print_text(&p, buf, cap);
    }
}

// Two ranks wait for each other for ever: `peer` in the call of this print, of the same group or
// another one.
IDIST__UNUSED static void idist__deadlock_text(const idist__task *ours, int peer,
                                               const idist__print *print, bool same_group,
                                               char *text, size_t cap) {
    char a[128], b[128];
    int me = ours->group->w->group.rank;
    bool p2p = idist__kind_is_p2p(ours->call.kind) && idist__kind_is_p2p((idist__kind)print->kind);

    idist__task_text(ours, a, sizeof a);
    idist__print_text(print, b, sizeof b);
    snprintf(text, cap, "rank %d waits for rank %d in %s, rank %d waits for rank %d in %s%s: ", me,
             peer, a, peer, me, b, same_group ? "" : " of another group");
    if (p2p) idist__append(text, cap, "a deadlock; use idist_sendrecv, or requests");
    else idist__append(text, cap, "the %s differs", same_group ? "operation" : "group");
}

// For `missing`: a member that has not come, and where it was seen last; the first eight of them.
IDIST__UNUSED static void idist__missing_rank(const idist_group *g, int rank,
                                              const idist__print *seen, int nth, char *text,
                                              size_t cap) {
    char last[128];

    if (nth >= 8) return;
    idist__append(text, cap, "%srank %d on %s", nth ? ", " : "", g->ranks[rank],
                  g->w->nodes[g->ranks[rank]].hostname);
    if (!seen->seq) return;
    idist__print_text(seen, last, sizeof last);
    idist__append(text, cap, " (last seen in %s)", last);
}

// And the other side of a send or receive.
IDIST__UNUSED static int idist__missing_peer(const idist__task *t, char *text, size_t cap) {
    const idist_group *g = t->group;

    if (t->call.root == IDIST_ANY_SOURCE) idist__append(text, cap, "a message from any rank");
    else
        idist__append(text, cap, "rank %d on %s, which %s", g->ranks[t->call.root],
                      g->w->nodes[g->ranks[t->call.root]].hostname,
                      t->call.kind == IDIST__SEND ? "does not receive it"
                                                  : "sent nothing that fits");

    return 1;
}

// Ends a task. text says why when it failed, without the name of the operation.
static void idist__complete(idist__task *t, idist_status status, const char *text) {
    idist__world *w = t->group->w;

    if (t->done || (t->on_device && !w->landed(t, status))) return;
    t->status = status;

    if (status != IDIST_OK) {
        idist__task_text(t, t->text, sizeof t->text);
        idist__append(t->text, sizeof t->text, ": %s", text);
    }

    if (t->prev) t->prev->next = t->next;
    else w->tasks = t->next;
    if (t->next) t->next->prev = t->prev;
    t->next = t->prev = NULL;
    t->done = true;
    w->nended++;
    t->group->ntasks--;

    if (t->detached) {
        t->group->ndetached--;
        w->ngone++;
    }

    if (t->async) w->nasync--;
    if (t->lane) idist__tracer_now()->done(t);
    if (w->nblocked) pthread_cond_broadcast(&w->changed);
}

// For a thread that has moved the backend or ended tasks while another one drives. It may have
// consumed the event that the driver is sleeping on, so the driver must be woken explicitly.
static void idist__world_rouse(idist__world *w) {
    if (w->driver != IDIST__DRIVER_NONE) w->backend->wake(w);
}

// The group fails, for this reason, once: its tasks end, later calls are refused, and the others
// are told, also when we were told ourselves: whoever sees our connection end after this must have
// heard the reason from us, or takes us for the cause.
static void idist__group_fail(idist_group *g, idist_status status, const char *cause) {
    idist__world *w = g->w;
    idist_group *child;
    idist__task *t, *next;

    if (g->status != IDIST_OK) return;
    g->status = status;
    idist__copy_text(g->cause, sizeof g->cause, cause);
    if (!g->inner)
        idist__log_print(&w->log, IDIST_LOG_WARN, "%s: %s", idist_status_name(status), cause);
    if (w->cfg.lost && (status == IDIST_ERR_PEER_LOST || status == IDIST_ERR_ABORTED))
        __atomic_store_n(w->cfg.lost, 1, __ATOMIC_RELEASE);
    w->backend->tell(g);

    for (t = w->tasks; t; t = next) {
        next = t->next;
        if (t->group != g) continue;
        w->backend->cancel(t);
        idist__complete(t, status, g->cause);
        next = w->tasks; // the backend may have ended others
    }

    for (child = w->group.next; child; child = child->next)
        if (child->maker == g) idist__group_fail(child, status, cause);
    idist__world_rouse(w); // the call that another thread sleeps for may be one of those that ended
}

// A rank is gone: every group with it fails.
IDIST__UNUSED static void idist__world_lost(idist__world *w, int rank, const char *how) {
    idist_group *g;
    char cause[400];
    int i;

    snprintf(cause, sizeof cause, "rank %d on %s was lost: %s", rank, w->nodes[rank].hostname, how);
    for (g = &w->group; g; g = g->next)
        for (i = 0; i < g->size && g->rank >= 0; i++)
            if (g->ranks[i] == rank) idist__group_fail(g, IDIST_ERR_PEER_LOST, cause);
}

// The call this rank is blocked in, if that is all it does. Its parts do not count.
IDIST__UNUSED static idist__task *idist__world_only_call(const idist__world *w) {
    idist__task *t, *only = NULL;

    for (t = w->tasks; t; t = t->next) {
        if (t->group->inner) continue;
        if (only || t->async || !t->patient) return NULL;
        only = t;
    }

    return only && idist__os_nthreads() - w->nforeign <= (w->thread_runs ? 2 : 1) ? only : NULL;
}

// Before a call is given up, or a warning says that it waits, its members are asked once more: a
// rank that has entered it may have been stopped since. They have a second to answer, or half of
// the time-out.
static int64_t idist__task_ask_at(const idist__task *t, int64_t *until_ns) {
    int64_t half = t->timeout_ms < 0 ? IDIST__ASK_NS : t->timeout_ms * IDIST__MS / 2;
    int64_t end = t->warned ? IDIST__FOREVER : t->started_ns + IDIST__WARN_NS;

    if (t->deadline_ns < end) end = t->deadline_ns;
    *until_ns = end;
    if (end == IDIST__FOREVER || idist__kind_is_p2p(t->call.kind)) return IDIST__FOREVER;
    return end - (half < IDIST__ASK_NS ? half : IDIST__ASK_NS);
}

// Deadlines and announcements of the running tasks; returns when to look again. Thousands may be
// running, and this is asked before every sleep: so it looks at them only when something is due,
// and lets announcements wait for each other a little.
static int64_t idist__world_timers(idist__world *w) {
    int64_t now = idist__os_now_ns(), next = IDIST__FOREVER;
    idist__task *t, *following;
    uint32_t ended;

    if (now < w->due_ns) return w->due_ns;
    w->due_ns = IDIST__FOREVER; // a task that begins meanwhile sets it

    for (t = w->tasks; t; t = following) {
        int64_t at = t->started_ns + IDIST__ANNOUNCE_NS, ask_at, until;
        char cause[400];
        following = t->next;
        ended = w->nended;
        if (t->away && at < now + IDIST__MS)
            at = now + IDIST__MS; // the others hear of it when the backend has it
        else if (at > now && at < now + IDIST__TIMERS_NS) at = now + IDIST__TIMERS_NS;

        if (now >= t->deadline_ns) {
            int missing;
            snprintf(cause, sizeof cause, "not done after %lld ms",
                     (long long)((now - t->started_ns) / IDIST__MS));
            idist__append(cause, sizeof cause, "; missing: ");
            missing = w->backend->missing(t, cause, sizeof cause);
            if (t->call.kind == IDIST__RECV && !missing &&
                !t->patient) { // its message is coming in: that goes to its end
                t->patient = true;
                t->deadline_ns =
                    w->cfg.timeout_ms < 0 ? IDIST__FOREVER : now + w->cfg.timeout_ms * IDIST__MS;
                next = now;
                continue;
            }

            if (!missing)
                idist__append(cause, sizeof cause, "nobody, but the data did not come through");
            if (idist__kind_is_p2p(t->call.kind) && w->backend->cancel(t))
                idist__complete(t, IDIST_ERR_TIMEOUT, cause);
            else idist__group_fail(t->group, IDIST_ERR_TIMEOUT, cause);
            if (!t->done || w->nended != ended + 1)
                following = w->tasks; // others may have ended, too
            continue;
        }

        if (!t->announced && now >= at) {
            t->announced = true;
            w->backend->announce(t);
            if (w->nended != ended) following = w->tasks; // any task may have ended
            next = now;
            continue;
        }

        ask_at = idist__task_ask_at(t, &until);
        if (t->announced && now >= ask_at && t->group->asked_ns < ask_at &&
            now >= t->group->asked_until_ns) {
            t->group->asked_ns = now;
            t->group->asked_until_ns = until;
            w->backend->announce(t);
            if (w->nended != ended) following = w->tasks; // any task may have ended
            next = now;
            continue;
        }

        if (t->announced) at = t->started_ns + IDIST__WARN_NS;

        if (t->announced && !t->warned && now >= at) {
            char what[128];
            t->warned = true;
            ask_at = idist__task_ask_at(t, &until); // for the deadline, the next time
            idist__task_text(t, what, sizeof what);
            cause[0] = 0;
            w->backend->missing(t, cause, sizeof cause);
            idist__log_print(&w->log, IDIST_LOG_WARN, "%s has waited for 60 s; missing: %s", what,
                             cause[0] ? cause : "nobody");
        }

        if (t->announced && t->warned) at = IDIST__FOREVER;
        if (t->announced && now < ask_at && ask_at < at) at = ask_at;
        if (t->deadline_ns < at) at = t->deadline_ns;
        if (at < next) next = at;
    }

    if (next < w->due_ns) w->due_ns = next;

    return w->due_ns;
}

// One turn at the wheel: sleep until something happens, then move what moves. Not when the timers
// have just ended a task: it may be what the caller waits for.
static void idist__world_turn(idist__world *w, idist__driver driver) {
    uint32_t ended = w->nended;
    int64_t until = idist__world_timers(w);

    if (!w->tasks || w->nended != ended) return;
    w->driver = driver;
    w->backend->sleep(w, until);
    w->driver = IDIST__DRIVER_NONE;
    w->backend->progress(w);
    if (w->nblocked > (driver == IDIST__DRIVER_CALLER ? 1 : 0)) pthread_cond_broadcast(&w->changed);
}

typedef struct idist__waiter { // how long somebody has polled already, since the last step forward
    uint32_t turns;
    uint32_t all; // and since the beginning
    int64_t begun_ns;
    bool slept;
} idist__waiter;

// A thread that polls has the lock most of the time. It gives it to those who ask.
static void idist__world_lock(idist__world *w) {
    if (pthread_mutex_trylock(&w->lock) == 0) return;
    __atomic_fetch_add(&w->nasking, 1u, __ATOMIC_RELAXED);
    pthread_mutex_lock(&w->lock);
    __atomic_fetch_sub(&w->nasking, 1u, __ATOMIC_RELAXED);
}

static void idist__world_give_way(idist__world *w) {
    uint32_t asking = __atomic_load_n(&w->nasking, __ATOMIC_RELAXED);
    int turns;

    pthread_mutex_unlock(&w->lock);
    sched_yield();

    for (turns = 0; asking && turns < IDIST__YIELDS;
         turns++) { // the other one has to wake up first
        if (__atomic_load_n(&w->nasking, __ATOMIC_RELAXED) < asking) break;
        sched_yield();
    }

    pthread_mutex_lock(&w->lock);
}

// Whether to poll once more, after a short break, or to sleep. With a core for each rank we poll as
// long as that has proved worth it: a wait that ended in sleep halves our patience, one that did
// not restores it. With fewer cores we hand the core to the others, a bounded number of times; to
// be woken up costs as much as dozens of these.
static bool idist__waiter_polls(idist__waiter *p, idist__world *w) {
    int64_t now;

    p->turns++;
    p->all++;
    if (w->spin_ns) idist__os_relax();
    if (w->spin_ns && p->all % 16) return true;
    now = idist__os_now_ns();
    if (!p->begun_ns) p->begun_ns = now;

    if (now >= w->timers_ns) { // also of tasks that do not move while others do
        int64_t next = idist__world_timers(w);
        w->timers_ns = next < now + IDIST__TIMERS_NS ? next : now + IDIST__TIMERS_NS;
    }

    if (w->spin_ns) {
        if (now - p->begun_ns >= w->patience_ns) return false;
        if (__atomic_load_n(&w->nasking, __ATOMIC_RELAXED)) idist__world_give_way(w);
        return true;
    }

    if (p->turns > IDIST__YIELDS || now - p->begun_ns > IDIST__YIELD_NS)
        return false; // others may compute for long
    idist__world_give_way(w);

    return true;
}

static void idist__waiter_learns(const idist__waiter *p, idist__world *w) {
    if (p->turns < 16 || !w->spin_ns) return;
    w->patience_ns = p->slept ? w->patience_ns / 2 : w->patience_ns * 2;
    if (w->patience_ns > w->spin_ns) w->patience_ns = w->spin_ns;
    if (w->patience_ns < w->spin_ns / 32) w->patience_ns = w->spin_ns / 32;
}

// Waits until ready(arg): polls for a short while, then drives or follows. The lock is held, and
// given up while sleeping.
static void idist__world_wait(idist__world *w, bool (*ready)(void *arg), void *arg) {
    idist__waiter p;
    uint32_t moved = w->nmoved;

    if (ready(arg)) return;
    memset(&p, 0, sizeof p);
    w->nblocked++;

    while (!ready(arg)) {
        if (w->nmoved != moved) { // one wait is over, the next one begins
            idist__waiter_learns(&p, w);
            moved = w->nmoved;
            p.turns = 0;
            p.begun_ns = 0;
            p.slept = false;
        }

        if (w->driver == IDIST__DRIVER_NONE) {
            w->backend->progress(w);
            if (ready(arg) || idist__waiter_polls(&p, w) || ready(arg))
                continue; // polling looks at the timers too
            idist__world_turn(w, IDIST__DRIVER_CALLER);
            p.slept = true;
        } else {
            if (w->driver == IDIST__DRIVER_THREAD) w->backend->wake(w); // it steps back for us
            idist__os_cond_wait(&w->changed, &w->lock, IDIST__FOREVER);
        }
    }

    idist__waiter_learns(&p, w);
    w->nblocked--;
    if (w->nblocked) pthread_cond_broadcast(&w->changed);
    else if (w->nasync && w->thread_runs) pthread_cond_signal(&w->work);
}

static bool idist__task_ready(void *arg) { return ((const idist__task *)arg)->done; }

static void idist__task_wait(idist__task *t) {
    idist__world_wait(t->group->w, idist__task_ready, t);
}

static void *idist__world_thread(void *arg) {
    idist__world *w = (idist__world *)arg;

    pthread_mutex_lock(&w->lock);

    while (!w->thread_stops) {
        if (w->nasync && !w->nblocked && w->driver == IDIST__DRIVER_NONE) {
            idist__world_turn(w, IDIST__DRIVER_THREAD);
        } else {
            idist__os_cond_wait(&w->work, &w->lock,
                                w->watched ? idist__os_now_ns() + IDIST__WATCH_NS : IDIST__FOREVER);
            if (!w->watched || w->nasync || w->nblocked || w->driver != IDIST__DRIVER_NONE ||
                w->thread_stops)
                continue;
            w->driver = IDIST__DRIVER_THREAD;
            w->backend->sleep(w, idist__os_now_ns()); // not at all; there it looks for who is lost
            w->driver = IDIST__DRIVER_NONE;
            w->backend->progress(w);
            if (w->nblocked) pthread_cond_broadcast(&w->changed); // who came meanwhile follows
            idist__world_timers(w);
        }
    }

    pthread_mutex_unlock(&w->lock);

    return NULL;
}

static idist_status idist__world_need_thread(idist__world *w) {
    if (w->thread_runs || w->threadless) return IDIST_OK;
    if (idist__os_thread(&w->thread, idist__world_thread, w) != 0)
        return idist__fail(IDIST_ERR_SYSTEM, "no thread for the progress of requests");
    w->thread_runs = true;
    return IDIST_OK;
}

static void idist__task_free(idist__task *t) {
    idist__world *w = t->group->w;
    if ((t->freed = t->pinned)) return; // who has pinned it does it
    t->next = w->idle_tasks;
    w->idle_tasks = t;
}

// Frees those that nobody waits for, once they are done.
static void idist__task_sweep(idist__world *w) {
    idist__task **at = &w->detached, *t;

    for (w->ngone = 0; (t = *at) != NULL;) {
        if (!t->done) {
            at = &t->chain;
            continue;
        }

        *at = t->chain;
        idist__task_free(t);
    }
}

static idist__task *idist__task_new(idist_group *g) {
    idist__world *w = g->w;
    size_t nbytes = sizeof(idist__task) + w->backend->task_nbytes;
    idist__task *t;

    if (w->ngone >= 64) idist__task_sweep(w);

    if ((t = w->idle_tasks) != NULL) {
        idist__task *older = t->older;
        w->idle_tasks = t->next;
        memset(t, 0, offsetof(idist__task, text));
        t->older = older;
    } else {
        t = (idist__task *)idist__mem_alloc(&w->cfg.mem, nbytes);
        if (!t) return NULL;
        t->older = w->all_tasks;
        w->all_tasks = t;
    }

    t->impl = t + 1;
    t->group = g;

    return t;
}

// Nobody waits for it any more.
static void idist__task_detach(idist__task *t) {
    idist__world *w = t->group->w;

    t->detached = true;
    t->chain = w->detached;
    w->detached = t;
    t->group->ndetached++;

    if (t->async) {
        w->nasync--;
        t->group->nrequests--;
        t->async = false;
    }
}

// Puts a task among the running ones and hands it to the backend.
static void idist__task_start(idist__task *t) {
    idist_group *g = t->group;
    idist__world *w = g->w;

    t->started_ns = idist__os_now_ns();
    t->deadline_ns = t->timeout_ms < 0 ? IDIST__FOREVER : t->started_ns + t->timeout_ms * IDIST__MS;
    if (t->call.kind != IDIST__SEND && t->call.kind != IDIST__RECV) t->seq = ++g->seq;
    if (t->started_ns + IDIST__ANNOUNCE_NS < w->due_ns)
        w->due_ns = t->started_ns + IDIST__ANNOUNCE_NS;
    if (t->deadline_ns < w->due_ns) w->due_ns = t->deadline_ns;
    t->next = w->tasks;
    if (w->tasks) w->tasks->prev = t;
    w->tasks = t;
    g->ntasks++;

    if (t->async) {
        w->nasync++;
        g->nrequests++;
    }

    w->backend->start(t);
    idist__world_rouse(w); // also when t is done: starting it may have read from the links
    if (w->driver == IDIST__DRIVER_NONE && !t->done && t->async && w->thread_runs && !w->nblocked)
        pthread_cond_signal(&w->work);
}

static void idist__group_set(idist_group *g, uint64_t ctx, const int *ranks, int n) {
    int i;

    g->ctx = ctx;
    g->size = n;
    g->rank = -1;

    for (i = 0; i < n; i++) {
        g->ranks[i] = ranks[i];
        if (ranks[i] == g->w->group.rank) g->rank = i;
    }
}

// A program may keep the handle of a group, or of a world, beyond the end of the world, and call
// with it. That is an IDIST_ERR_STATE like any other, so the struct must still be there and say so.
// It lies in one of these lists, marked, until enough others have followed it and a new one takes
// its place. It is plain memory: the world's allocator may be gone.
typedef struct idist__ended {
    idist_group *first, *last; // the oldest, the newest
    int n;
} idist__ended;

enum { IDIST__ENDED_GROUPS = 256, IDIST__ENDED_WORLDS = 16 };

static pthread_mutex_t idist__ended_lock = PTHREAD_MUTEX_INITIALIZER;
static idist__ended idist__ended_groups, idist__ended_worlds; // a world is its group, and some more

static void idist__ended_keep(idist__ended *list, idist_group *g) {
    g->w = NULL;
    g->rank = -1;
    g->freed = true;
    g->next = NULL;

    pthread_mutex_lock(&idist__ended_lock);
    if (list->last) list->last->next = g;
    else list->first = g;
    list->last = g;
    list->n++;
    pthread_mutex_unlock(&idist__ended_lock);
}

// Zeroed memory for a handle, which the program may hold on to.
static idist_group *idist__ended_reuse(idist__ended *list, int most, size_t nbytes) {
    idist_group *g = NULL;

    pthread_mutex_lock(&idist__ended_lock);

    if (list->n >= most) {
        g = list->first;
        list->first = g->next;
        if (!list->first) list->last = NULL;
        list->n--;
    }

    pthread_mutex_unlock(&idist__ended_lock);

    if (!g) return (idist_group *)idist__mem_alloc(NULL, nbytes);
    memset(g, 0, nbytes);

    return g;
}

// Room for n ranks; in no list yet. Freed groups stay behind, marked, until a new one takes their
// place: a call on a stale pointer gets an error.
static idist_group *idist__group_new(idist__world *w, int n) {
    idist_group *g = w->freed_groups;

    if (g) {
        w->freed_groups = g->next;
        memset(g, 0, sizeof *g);
    } else {
        g = idist__ended_reuse(&idist__ended_groups, IDIST__ENDED_GROUPS, sizeof *g);
    }

    if (!g) return NULL;
    g->w = w;
    g->rank = -1;
    g->ranks = (int *)idist__mem_alloc(&w->cfg.mem, sizeof(int) * (size_t)(n + 1));
    g->impl = idist__mem_alloc(&w->cfg.mem, w->backend->group_nbytes);
    if (g->ranks && g->impl) return g;
    idist__mem_free(&w->cfg.mem, g->ranks);
    idist__mem_free(&w->cfg.mem, g->impl);
    memset(g, 0, sizeof *g);
    idist__ended_keep(&idist__ended_groups, g);

    return NULL;
}

static void idist__group_free(idist_group *g) {
    idist_group **at;
    idist__world *w = g->w;

    for (at = &w->group.next; *at && *at != g; at = &(*at)->next) continue;

    if (*at) {
        *at = g->next;
        if (g->rank >= 0) w->backend->group_close(g);
    }

    idist__mem_free(&w->cfg.mem, g->ranks);
    idist__mem_free(&w->cfg.mem, g->impl);
    memset(g, 0, sizeof *g);
    g->w = w;
    g->rank = -1;
    g->freed = true;
    g->next = w->freed_groups;
    w->freed_groups = g;
}

// ---- ranks in a circle, and blocks of a buffer ----

static int idist__wrap(int rank, int n) { return ((rank % n) + n) % n; }

// Elements of block b when `count` are cut into n nearly equal blocks; the first ones are larger by
// one.
static size_t idist__block_at(size_t count, int n, int b) {
    size_t q = count / (size_t)n, rest = count % (size_t)n;
    return (size_t)b * q + ((size_t)b < rest ? (size_t)b : rest);
}

static size_t idist__block_count(size_t count, int n, int b) {
    return idist__block_at(count, n, b + 1) - idist__block_at(count, n, b);
}

//------------------------------------------------------------------------------
// [core:call]  every communication call passes through idist__call_run: checks, numbering, start, wait
// uses os err base:type reduce hash world
//------------------------------------------------------------------------------

// Where the elements of a call lie: how many at send and at recv, and where in-place has one start
// inside the other.
typedef struct idist__extent {
    size_t send, recv; // elements
    bool may_alias;    // in place is allowed ...
    size_t send_at;    // ... when recv starts at this element of send,
    size_t recv_at;    // or send at this element of recv
} idist__extent;

// Elements up to the end of the last part; SIZE_MAX when it overflows.
static size_t idist__extent_v(const size_t *counts, const size_t *displs, int n) {
    size_t total = 0, end;
    int i;

    for (i = 0; i < n; i++) {
        size_t at = displs ? displs[i] : total;
        if (counts[i] > SIZE_MAX / 16 || at > SIZE_MAX / 16) return SIZE_MAX;
        end = at + counts[i];
        if (!displs || (counts[i] && end > total)) total = end;
        if (total > SIZE_MAX / 16) return SIZE_MAX;
    }

    return total;
}

static size_t idist__displ(const size_t *counts, const size_t *displs, int k) {
    size_t at = 0;
    int i;
    if (displs) return displs[k];
    for (i = 0; i < k; i++) at += counts[i];
    return at;
}

static idist_status idist__extent_of(const idist_group *g, const idist__call *c, idist__extent *e) {
    size_t n = (size_t)g->size, r = (size_t)g->rank, count = c->count, all;
    bool root = c->root == g->rank;

    memset(e, 0, sizeof *e);
    if (count > SIZE_MAX / 16 / n) return IDIST_ERR_ARG;
    all = n * count;
    e->may_alias = true;

    switch (c->kind) {
    case IDIST__ALL_REDUCE:
    case IDIST__SCAN:
    case IDIST__EXSCAN: e->send = e->recv = count; break;
    case IDIST__REDUCE:
        e->send = count;
        e->recv = root ? count : 0;
        break;
    case IDIST__BROADCAST: e->recv = count; break;
    case IDIST__ALL_GATHER:
    case IDIST__GATHER:
        e->send = count;
        e->recv = c->kind == IDIST__ALL_GATHER || root ? all : 0;
        e->recv_at = r * count;
        break;
    case IDIST__SCATTER:
    case IDIST__REDUCE_SCATTER:
        e->send = c->kind == IDIST__REDUCE_SCATTER || root ? all : 0;
        e->recv = count;
        e->send_at = r * count;
        break;
    case IDIST__ALL_TO_ALL: e->send = e->recv = all; break;
    case IDIST__ALL_GATHERV:
    case IDIST__GATHERV:
        e->send = count;
        if (c->kind == IDIST__GATHERV && !root) break;
        e->recv = idist__extent_v(c->recvcounts, c->recvdispls, g->size);
        e->recv_at = idist__displ(c->recvcounts, c->recvdispls, g->rank);
        break;
    case IDIST__SCATTERV:
        e->recv = count;
        if (!root) break;
        e->send = idist__extent_v(c->sendcounts, c->senddispls, g->size);
        e->send_at = idist__displ(c->sendcounts, c->senddispls, g->rank);
        break;
    case IDIST__ALL_TO_ALLV:
        e->send = idist__extent_v(c->sendcounts, c->senddispls, g->size);
        e->recv = idist__extent_v(c->recvcounts, c->recvdispls, g->size);
        e->may_alias = false;
        break;
    case IDIST__SEND: e->send = count; break;
    case IDIST__RECV: e->recv = count; break;
    default: break;
    }

    return e->send == SIZE_MAX || e->recv == SIZE_MAX ? IDIST_ERR_ARG : IDIST_OK;
}

// Whether one buffer lies in the other as the in-place rule of the call has it.
static bool idist__extent_in_place(const idist__extent *e, const idist__call *c) {
    const char *send = (const char *)c->send, *recv = (const char *)c->recv;
    size_t size = idist_dtype_size(c->dtype);
    if (!e->may_alias || !e->send || !e->recv) return false;
    return (recv == send + e->send_at * size && !e->recv_at) ||
           (send == recv + e->recv_at * size && !e->send_at);
}

IDIST__UNUSED static bool idist__call_in_place(const idist_group *g, const idist__call *c) {
    idist__extent e;
    return idist__extent_of(g, c, &e) == IDIST_OK && idist__extent_in_place(&e, c);
}

// Where the elements that go from rank `from` to rank `to` lie, in the buffer at base: the sender's
// or the receiver's.
static char *idist__call_part(const idist__call *c, char *base, int from, int to, bool at_sender,
                              size_t *count) {
    const size_t *counts = at_sender ? c->sendcounts : c->recvcounts,
                 *displs = at_sender ? c->senddispls : c->recvdispls;
    size_t size = idist_dtype_size(c->dtype);
    bool gather = c->kind == IDIST__GATHER || c->kind == IDIST__GATHERV,
         spread = counts && c->sendcounts && c->recvcounts;
    bool scatter = c->kind == IDIST__SCATTER || c->kind == IDIST__SCATTERV;
    int k = at_sender ? to : from; // which part of a buffer of many

    *count = 0;
    if ((gather && to != c->root) || (scatter && from != c->root)) return base;
    *count = c->count;
    if (c->kind != IDIST__ALL_TO_ALL && !spread && at_sender != scatter)
        return base; // a buffer of one part
    if (!idist__kind_is_v(c->kind) || !counts) return base + (size_t)k * c->count * size;
    *count = counts[k];

    return base + idist__displ(counts, displs, k) * size;
}

// In three of the v-forms only two ranks know how much goes from one to the other: what this rank
// says about it.
IDIST__UNUSED static size_t idist__call_count(const idist_group *g, const idist__call *c, int peer,
                                              bool sends) {
    int root = c->root, me = g->rank;
    if (c->kind == IDIST__ALL_TO_ALLV) return sends ? c->sendcounts[peer] : c->recvcounts[peer];
    if (c->kind == IDIST__GATHERV)
        return sends ? (peer == root ? c->count : 0) : me == root ? c->recvcounts[peer] : 0;
    return sends ? (me == root ? c->sendcounts[peer] : 0) : peer == root ? c->count : 0;
}

// A number for each count, added for what is sent and subtracted for what is expected: over all
// ranks the sum is 0 when all pairs agree, and else, as good as always, not.
IDIST__UNUSED static uint64_t idist__call_balance(const idist_group *g, const idist__call *c) {
    uint64_t sum = 0, me = (uint64_t)g->rank, n = (uint64_t)g->size;
    int i;

    if (c->kind == IDIST__ALL_GATHERV) return 0; // those are in the print

    for (i = 0; i < g->size; i++) {
        sum += idist__mix(me * n + (uint64_t)i, idist__call_count(g, c, i, true));
        sum -= idist__mix((uint64_t)i * n + me, idist__call_count(g, c, i, false));
    }

    return sum;
}

static idist_status idist__check_buffers(const idist_group *g, const idist__call *c) {
    const char *name = idist__kind_names[c->label], *send = (const char *)c->send,
               *recv = (const char *)c->recv;
    size_t size = idist_dtype_size(c->dtype), nsend, nrecv;
    idist__extent e;

    if (c->kind == IDIST__ALL_REDUCE && send == recv && send && c->count <= SIZE_MAX / 16)
        return IDIST_OK; // most common
    if (idist__extent_of(g, c, &e) != IDIST_OK)
        return idist__fail(IDIST_ERR_ARG, "%s: the counts are too large for memory", name);
    if (e.send && !send)
        return idist__fail(IDIST_ERR_ARG, "%s: the send buffer is NULL and count is not 0", name);
    if (e.recv && !recv)
        return idist__fail(IDIST_ERR_ARG, "%s: the receive buffer is NULL and count is not 0",
                           name);
    nsend = e.send * size;
    nrecv = e.recv * size;
    if (!nsend || !nrecv || send + nsend <= recv || recv + nrecv <= send)
        return IDIST_OK; // disjoint
    if (idist__extent_in_place(&e, c)) return IDIST_OK;

    return idist__fail(
        IDIST_ERR_ARG,
        "%s: send and receive buffers overlap, and not in the way that in-place allows", name);
}

static idist_status idist__check_op(const idist__world *w, const idist__call *c) {
    const char *name = idist__kind_names[c->label];

    if ((unsigned)c->op < IDIST_OP_COUNT) {
        if (!idist__reduce_table[(unsigned)c->dtype][(unsigned)c->op])
            return idist__fail(IDIST_ERR_ARG, "%s: %s takes integers, not %s", name,
                               idist_op_name(c->op), idist_dtype_name(c->dtype));
        if (c->op == IDIST_AVG && (c->kind == IDIST__SCAN || c->kind == IDIST__EXSCAN))
            return idist__fail(
                IDIST_ERR_ARG,
                "%s: AVG is not defined for prefixes; use SUM and divide by rank + 1", name);
        return IDIST_OK;
    }

    if ((int)c->op >= IDIST_OP_USER && (int)c->op <= IDIST_OP_LAST &&
        w->ops[c->op - IDIST_OP_USER].used) {
        if (!w->ops[c->op - IDIST_OP_USER].fn && !idist__type_is_float(c->dtype))
            return idist__fail(IDIST_ERR_ARG,
                               "%s: a premultiplied sum takes floating dtypes, not %s", name,
                               idist_dtype_name(c->dtype));
        return IDIST_OK;
    }

    return idist__fail(IDIST_ERR_ARG, "%s: %d is no op of this world", name, (int)c->op);
}

static idist_status idist__check_peer(const idist_group *g, const idist__call *c) {
    const char *name = idist__kind_names[c->label];
    bool any = c->kind == IDIST__RECV;

    if (!(c->root >= 0 && c->root < g->size) && !(any && c->root == IDIST_ANY_SOURCE))
        return idist__fail(IDIST_ERR_ARG, "%s: rank %d is not in a group of %d", name, c->root,
                           g->size);
    if (c->tag < 0 && !(any && c->tag == IDIST_ANY_TAG))
        return idist__fail(IDIST_ERR_ARG, "%s: tag %d is negative", name, c->tag);

    return IDIST_OK;
}

static bool idist__has_root(idist__kind kind) {
    return kind == IDIST__REDUCE || kind == IDIST__BROADCAST || kind == IDIST__GATHER ||
           kind == IDIST__SCATTER || kind == IDIST__GATHERV || kind == IDIST__SCATTERV;
}

static idist_status idist__check_counts(const idist_group *g, const idist__call *c) {
    const char *name = idist__kind_names[c->label];
    bool root = c->root == g->rank;

    if ((c->kind == IDIST__ALL_GATHERV || (c->kind == IDIST__GATHERV && root) ||
         c->kind == IDIST__ALL_TO_ALLV) &&
        !c->recvcounts)
        return idist__fail(IDIST_ERR_ARG, "%s: recvcounts is NULL", name);
    if (((c->kind == IDIST__SCATTERV && root) || c->kind == IDIST__ALL_TO_ALLV) && !c->sendcounts)
        return idist__fail(IDIST_ERR_ARG, "%s: sendcounts is NULL", name);
    if ((c->kind == IDIST__ALL_GATHERV || (c->kind == IDIST__GATHERV && root)) &&
        c->recvcounts[g->rank] != c->count)
        return idist__fail(IDIST_ERR_ARG, "%s: sendcount is %zu, but recvcounts[%d] is %zu", name,
                           c->count, g->rank, c->recvcounts[g->rank]);
    if (c->kind == IDIST__SCATTERV && root && c->sendcounts[g->rank] != c->count)
        return idist__fail(IDIST_ERR_ARG, "%s: recvcount is %zu, but sendcounts[%d] is %zu", name,
                           c->count, g->rank, c->sendcounts[g->rank]);
    if (c->kind == IDIST__ALL_TO_ALLV && c->sendcounts[g->rank] != c->recvcounts[g->rank])
        return idist__fail(IDIST_ERR_ARG, "%s: sendcounts and recvcounts of the own rank differ",
                           name);

    return IDIST_OK;
}

// All that can be wrong with one rank's arguments. Nothing was sent yet, so nothing breaks.
static idist_status idist__call_check(const idist_group *g, const idist__call *c) {
    const char *name = idist__kind_names[c->label];
    idist_status s;

    if (g->rank < 0)
        return idist__fail(IDIST_ERR_STATE, "%s: this rank is not a member of the group", name);
    if (c->kind == IDIST__BARRIER) return IDIST_OK;
    if (!idist_dtype_size(c->dtype))
        return idist__fail(IDIST_ERR_ARG, "%s: %d is no dtype", name, (int)c->dtype);

    if (c->kind == IDIST__SEND || c->kind == IDIST__RECV) {
        if ((s = idist__check_peer(g, c)) != IDIST_OK) return s;
    } else if (idist__has_root(c->kind) && (c->root < 0 || c->root >= g->size)) {
        return idist__fail(IDIST_ERR_ARG, "%s: root %d is not in a group of %d", name, c->root,
                           g->size);
    }

    if (idist__kind_reduces(c->kind) && (s = idist__check_op(g->w, c)) != IDIST_OK) return s;
    if ((s = idist__check_counts(g, c)) != IDIST_OK) return s;

    return idist__check_buffers(g, c);
}

// Locks the world of a call and finds its group. On failure nothing is locked and *out is NULL.
static idist_status idist__call_enter(const char *name, idist_group *group, idist_group **out) {
    idist__world *w = group ? group->w : idist__world_default();

    *out = NULL;
    if (group && !w)
        return idist__fail(IDIST_ERR_STATE, "%s: the world of this group was closed", name);
    if (!w)
        return idist__fail(IDIST_ERR_STATE,
                           "%s: no world yet, or no more: call idist_initialize first", name);
    if (idist__world_enter(name, w) != IDIST_OK) return IDIST_ERR_STATE;
    if (group && group->freed) return idist__fail(IDIST_ERR_STATE, "%s: the group was freed", name);
    idist__world_lock(w);
    *out = group ? group : &w->group;

    return IDIST_OK;
}

// A caller that hears of a failure may well end its process at once, and with it the connections.
// The others must have heard the reason by then, so it waits a moment for that.
static void idist__group_flush(idist_group *g) {
    idist__world *w = g->w;

    if (g->status == IDIST_OK || g->flushed || w->driver != IDIST__DRIVER_NONE) return;
    g->flushed = true;
    w->driver = IDIST__DRIVER_CALLER;
    w->backend->flush(w, idist__os_deadline(IDIST__FLUSH_MS));
    w->driver = IDIST__DRIVER_NONE;
    if (w->nblocked) pthread_cond_broadcast(&w->changed);
}

static void idist__task_drop(idist__task *t) {
    if (t->async) t->group->nrequests--;
    idist__task_free(t);
}

// The status of a finished task, as the caller gets it. Frees the task.
static idist_status idist__task_result(idist__task *t) {
    idist_status s = t->status;
    if (s != IDIST_OK) idist__group_flush(t->group);
    if (s != IDIST_OK) idist__fail(s, "%s", t->text);
    idist__task_drop(t);
    return s;
}

// A blocking call without a task, if the backend can do that now.
static bool idist__call_quick(idist_group *g, const idist__call *c, const idist_opts *o) {
    return !g->w->tasks && g->w->backend->quick && g->status == IDIST_OK && !o->request &&
           !idist__me.group_depth && g->w->backend->quick(g, c);
}

// Whether the device backend takes part in a call. A stream needs one.
static idist_status idist__call_route(idist_group *g, const idist__call *c, const idist_opts *o,
                                      bool *on_device, bool *detached) {
    const char *name = idist__kind_names[c->label];

    *on_device = *detached = false;
    if (g->w->route) return g->w->route(g, c, o, on_device, detached);
    if (o->stream && !g->w->wrap)
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "%s: a stream is for device memory, which takes idist_nccl.h", name);
    if (o->stream)
        return idist__fail(IDIST_ERR_NO_DEVICE, "%s: a stream is for device memory: %s", name,
                           g->w->no_device);

    return IDIST_OK;
}

static idist_status idist__call_locked(idist_group *g, const idist__call *c, const idist_opts *o) {
    const char *name = idist__kind_names[c->label];
    idist__thread *self = &idist__me;
    idist_status s = idist__call_check(g, c);
    idist__task *t;
    bool on_device = false, detached = false;
    int timeout_ms = o->timeout_ms ? o->timeout_ms : g->w->cfg.timeout_ms;

    if (s != IDIST_OK) return s;
    if ((s = idist__call_route(g, c, o, &on_device, &detached)) != IDIST_OK) return s;
    if (g->status != IDIST_OK)
        return idist__fail(g->status, "%s: the group failed earlier: %s", name, g->cause);
    if (!on_device && idist__call_quick(g, c, o)) return IDIST_OK;
    if (o->request && (s = idist__world_need_thread(g->w)) != IDIST_OK) return s;

    if ((t = idist__task_new(g)) == NULL) {
        idist__group_fail(g, IDIST_ERR_NO_MEMORY,
                          "a rank is out of memory"); // the others may count on it already
        return IDIST_ERR_NO_MEMORY;
    }

    t->call = *c;
    t->async = o->request != NULL;
    t->on_device = on_device;
    t->stream = o->stream;
    t->patient = o->timeout_ms == 0;
    t->timeout_ms = timeout_ms;
    if (detached) idist__task_detach(t);
    idist__task_start(t);
    if (detached)
        return g->status == IDIST_OK ? IDIST_OK : idist__fail(g->status, "%s: %s", name, g->cause);

    if (o->request) {
        o->request->impl = t;
        return IDIST_OK;
    }

    if (self->group_depth) { // idist_group_end waits for it
        if (self->group_tasks) self->group_last->chain = t;
        else self->group_tasks = t;
        self->group_last = t;
        return IDIST_OK;
    }

    idist__task_wait(t);

    return idist__task_result(t);
}

static idist_status idist__call_traced(idist_group *g, const idist__call *c, const idist_opts *o) {
    return idist__tracer_now() ? idist__tracer_now()->call(g, c, o) : idist__call_locked(g, c, o);
}

static idist_status idist__call_run(idist__call *c, const idist_opts *opts) {
    idist_opts o;
    idist_group *g = NULL;
    idist_status s;

    memset(&o, 0, sizeof o);
    if (opts) o = *opts;
    s = idist__call_enter(idist__kind_names[c->label], o.group, &g);

    if (g) {
        s = idist__call_traced(g, c, &o);
        pthread_mutex_unlock(&g->w->lock);
    }

    if (s != IDIST_OK && idist__me.group_depth && idist__me.group_status == IDIST_OK) {
        idist__me.group_status = s;
        memcpy(idist__me.group_text, idist__me.text, sizeof idist__me.group_text);
    }

    return s;
}

static void idist__call_init(idist__call *c, idist__kind kind, const void *send, void *recv,
                             size_t count, idist_dtype dtype) {
    memset(c, 0, sizeof *c);
    c->kind = kind;
    c->send = send;
    c->recv = recv;
    c->count = count;
    c->label = kind;
    c->check = count;
    c->dtype = dtype;
    c->root = -1;
}

//------------------------------------------------------------------------------
// [core:self]  the backend of a world of 1, and what any backend does in a group of 1
// uses os err mem base:type reduce sock config world call
//------------------------------------------------------------------------------

static void idist__copy(void *dst, const void *src, size_t nbytes) {
    if (nbytes && dst != src) memmove(dst, src, nbytes);
}

// Any collective among one rank: its own contribution is the result.
static void idist__self_collective(idist__task *t) {
    const idist__call *c = &t->call;
    const idist__user_op *op =
        (int)c->op >= IDIST_OP_USER ? idist__call_user_op(t->group, c) : NULL;

    if (c->kind != IDIST__BARRIER && c->kind != IDIST__BROADCAST && c->kind != IDIST__EXSCAN) {
        size_t count;
        const char *from = idist__call_part(c, (char *)(uintptr_t)c->send, 0, 0, true, &count);
        idist__copy(idist__call_part(c, (char *)c->recv, 0, 0, false, &count), from,
                    count * idist_dtype_size(c->dtype));
        if (idist__kind_reduces(c->kind) && op && !op->fn)
            idist__reduce_scale(c->recv, count, c->dtype, op->factor);
        if (idist__kind_reduces(c->kind) && !op)
            idist__reduce_finish(c->recv, count, c->dtype, c->op, 1);
    }

    idist__complete(t, IDIST_OK, "");
}

// Checks a message against the receive that takes it; true when it may be taken. The text goes to
// the receive.
static bool idist__message_fits(const idist__call *recv, idist_dtype dtype, size_t count,
                                int source, int tag, idist_status *status, char *text, size_t cap) {
    *status = IDIST_OK;

    if (dtype != recv->dtype) {
        *status = IDIST_ERR_MISMATCH;
        snprintf(text, cap,
                 "rank %d sent %s x %zu with tag %d: the dtype differs. The message is kept for "
                 "another receive",
                 source, idist_dtype_name(dtype), count, tag);
    } else if (count > recv->count) {
        *status = IDIST_ERR_TRUNCATED;
        snprintf(text, cap,
                 "rank %d sent %zu elements with tag %d. The message is kept for a larger receive",
                 source, count, tag);
    }

    return *status == IDIST_OK;
}

static void idist__recv_tell(const idist__call *c, int source, int tag, size_t count) {
    if (!c->info) return;
    c->info->source = source;
    c->info->tag = tag;
    c->info->count = count;
}

static void idist__recv_done(idist__task *t, int source, int tag, size_t count) {
    idist__recv_tell(&t->call, source, tag, count);
    idist__complete(t, IDIST_OK, "");
}

// A message from this rank to itself. Small ones are copied so that a blocking send returns; large
// ones wait.
typedef struct idist__parcel {
    struct idist__parcel *next;
    int tag;
    idist_dtype dtype;
    size_t count;
    const void *data;
    idist__task *sender; // NULL: data is a copy behind this struct
} idist__parcel;

typedef struct idist__self_group {
    idist__parcel *parcels;
} idist__self_group;

// Messages up to this size are on their way before anybody asks for them.
static const size_t IDIST__EAGER_BYTES = (size_t)64 * 1024;

static void idist__self_drop(idist_group *g, idist__parcel **at) {
    idist__parcel *p = *at;
    *at = p->next;
    idist__mem_free(&g->w->cfg.mem, p);
}

// Gives the first parcel that fits to the oldest receive that wants it.
static void idist__self_match(idist_group *g) {
    idist__self_group *sg = (idist__self_group *)g->impl;
    idist__task *t, *oldest;

    do {
        idist__parcel **at = NULL, **p;
        oldest = NULL;

        for (t = g->w->tasks; t; t = t->next) { // the youngest comes first
            if (t->group != g || t->call.kind != IDIST__RECV || t->away) continue;

            for (p = &sg->parcels; *p; p = &(*p)->next)
                if (t->call.tag == IDIST_ANY_TAG || t->call.tag == (*p)->tag) {
                    oldest = t;
                    at = p;
                    break;
                }
        }

        if (oldest) {
            idist_status s;
            char text[256];

            if (!idist__message_fits(&oldest->call, (*at)->dtype, (*at)->count, 0, (*at)->tag, &s,
                                     text, sizeof text)) {
                idist__complete(oldest, s, text);
            } else {
                idist__task *sender = (*at)->sender;
                int tag = (*at)->tag;
                size_t count = (*at)->count;
                idist__copy(oldest->call.recv, (*at)->data, count * idist_dtype_size((*at)->dtype));
                idist__self_drop(g, at);
                if (sender) idist__complete(sender, IDIST_OK, "");
                idist__recv_done(oldest, 0, tag, count);
            }
        }
    } while (oldest);
}

static void idist__self_send(idist__task *t) {
    idist_group *g = t->group;
    idist__self_group *sg = (idist__self_group *)g->impl;
    size_t nbytes = t->call.count * idist_dtype_size(t->call.dtype);
    bool copy = nbytes <= IDIST__EAGER_BYTES;
    idist__parcel **last,
        *p = (idist__parcel *)idist__mem_alloc(&g->w->cfg.mem, sizeof *p + (copy ? nbytes : 0));

    if (!p) {
        idist__complete(t, IDIST_ERR_NO_MEMORY, "out of memory");
        return;
    }

    p->tag = t->call.tag;
    p->dtype = t->call.dtype;
    p->count = t->call.count;
    p->data = t->call.send;
    p->sender = copy ? NULL : t;

    if (copy) {
        p->data = p + 1;
        idist__copy(p + 1, t->call.send, nbytes);
    }

    for (last = &sg->parcels; *last; last = &(*last)->next) continue;
    *last = p;
    if (copy) idist__complete(t, IDIST_OK, "");
    idist__self_match(g);
}

static void idist__self_start(idist__task *t) {
    if (t->call.kind == IDIST__SEND) idist__self_send(t);
    else if (t->call.kind == IDIST__RECV) idist__self_match(t->group);
    else idist__self_collective(t);
}

static bool idist__self_cancel(idist__task *t) {
    idist__self_group *sg = (idist__self_group *)t->group->impl;
    idist__parcel **p;

    for (p = &sg->parcels; *p; p = &(*p)->next)
        if ((*p)->sender == t) {
            idist__self_drop(t->group, p);
            break;
        }

    return true;
}

// Nothing comes from outside a world of 1, so only wake or the deadline end the sleep.
static void idist__self_sleep(idist__world *w, int64_t until_ns) {
    int fd = *(int *)w->impl;
    uint64_t n;
    bool woken;

    pthread_mutex_unlock(&w->lock);
    woken = idist__sock_wait(fd, POLLIN, until_ns);
    pthread_mutex_lock(&w->lock);
    if (woken)
        while (read(fd, &n, sizeof n) < 0 && errno == EINTR) continue;
}

static void idist__self_wake(idist__world *w) {
    uint64_t one = 1;
    while (write(*(int *)w->impl, &one, sizeof one) < 0 && errno == EINTR) continue;
}

static idist_status idist__self_open(idist__world *w) {
    int *fd = (int *)idist__mem_alloc(&w->cfg.mem, sizeof *fd);

    if (!fd) return IDIST_ERR_NO_MEMORY;
    *fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);

    if (*fd < 0) {
        idist__mem_free(&w->cfg.mem, fd);
        return idist__fail_errno("eventfd", errno);
    }

    w->impl = fd;
    idist__copy_text(w->nodes[0].hostname, sizeof w->nodes[0].hostname, w->hostname);

    return IDIST_OK;
}

static void idist__self_close(idist__world *w, bool clean) {
    (void)clean;
    idist__os_close((int *)w->impl);
    idist__mem_free(&w->cfg.mem, w->impl);
}

static idist_status idist__self_group_open(idist_group *g) {
    (void)g;
    return IDIST_OK;
}

static void idist__self_group_close(idist_group *g) {
    idist__self_group *sg = (idist__self_group *)g->impl;
    while (sg->parcels) idist__self_drop(g, &sg->parcels);
}

static void idist__self_progress(idist__world *w) { (void)w; }
static void idist__self_tell(idist_group *g) { (void)g; }

static void idist__self_flush(idist__world *w, int64_t until_ns) {
    (void)w;
    (void)until_ns;
}

static void idist__self_announce(idist__task *t) { (void)t; }

static int idist__self_missing(idist__task *t, char *text, size_t cap) {
    idist__append(text, cap,
                  t->call.kind == IDIST__SEND ? "a receive in this rank" : "a send in this rank");
    return 1;
}

static idist_status idist__self_claim(idist__config *c, const char **why) {
    *why = "it serves a world of 1 only";
    return c->world_size > 1 ? IDIST_ERR_NO_BACKEND : IDIST_OK;
}

const idist_backend_api *idist_self_backend(void) {
    static const idist_backend_api api = {IDIST__BACKEND_ABI,
                                          sizeof(idist_backend_api),
                                          "self",
                                          0,
                                          sizeof(idist__self_group),
                                          idist__self_claim,
                                          idist__self_open,
                                          idist__self_close,
                                          idist__self_group_open,
                                          idist__self_group_close,
                                          NULL,
                                          NULL,
                                          NULL,
                                          idist__self_start,
                                          idist__self_progress,
                                          idist__self_sleep,
                                          idist__self_wake,
                                          idist__self_cancel,
                                          idist__self_tell,
                                          idist__self_flush,
                                          idist__self_announce,
                                          idist__self_missing,
                                          NULL,
                                          NULL,
                                          NULL,
                                          NULL};

    return &api;
}

#endif // IDIST_CORE_H
