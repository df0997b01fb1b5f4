/* idist_core.h - v0.2.0 - worlds, groups, tasks and the path of a call - MIT licence

    Part of the implementation of idist; idist.h includes it where IDIST_IMPLEMENTATION is defined.

    The core owns everything that is the same whichever backend moves the data: it checks a call's
    arguments, numbers it within its group, hands it to the backend as a task, waits for it, watches
    its deadline, and spreads a failure to all members of the group. It names no backend; what it
    asks of one is the contract of idist_backend_api, what it asks of a device that of
    idist_device_api, both in [core:model].

    The public functions in idist_calls.h fill one idist__call each and come in through
    idist__call_run. Backends come in through idist__task_complete and idist__group_fail.

CONTENTS

      [core:kind]         the operations, and what kinds of them there are
      [core:model]        calls, tasks, groups and worlds as data; the contracts with backends
      [core:backend]      the registered backends, and how a backend fills its table
      [core:world]        the world, its lock, and who may enter it
      [core:tracer]       where a timeline hooks in
      [core:fingerprint]  what two ranks compare about a call
      [core:explain]      sentences about calls that failed
      [core:task]         tasks: allocate, start, complete, free
      [core:ended]        handles that outlive what they stood for
      [core:group]        groups: make, free, fail
      [core:timer]        deadlines, announcements and warnings
      [core:wait]         waiting for a task: poll, drive or follow
      [core:thread]       the progress thread
      [core:block]        ranks modulo n, and blocks of a buffer
      [core:extent]       where the elements of a call lie
      [core:check]        what can be wrong with one rank's arguments
      [core:call]         the path of every communication call
      [core:message]      a message and the receive that takes it
      [core:self]         the backend of a world of 1
*/
#ifndef IDIST_CORE_H
#define IDIST_CORE_H

//------------------------------------------------------------------------------
// [core:kind]  the operations, and what kinds of them there are
// uses -
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
    IDIST__REDUCE_SCATTERV,
    IDIST__SEND,
    IDIST__RECV,
    // Public calls that are built from those above. They only label the fingerprint.
    IDIST__BROADCAST_BYTES,
    IDIST__ALL_GATHER_BYTES,
    IDIST__NEW_GROUP,
    IDIST__SPLIT,
    IDIST__ONE_RANK_FIRST,
    IDIST__ONE_RANK_ONLY,
    IDIST__FINALIZE,
    IDIST__FIRST_DEVICE_CALL,
    IDIST__PROBE,
    IDIST__IPROBE,
    IDIST__MPROBE,
    IDIST__IMPROBE,
    IDIST__MRECV,
    IDIST__BROADCAST_ALLOC,
    IDIST__ALL_GATHER_ALLOC,
    IDIST__NEW_GROUP_BY_MEMBERS,
    IDIST__KIND_COUNT
} idist__kind;

static const char *const idist__kind_names[IDIST__KIND_COUNT] = {
    "nothing",
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
    "reduce_scatterv",
    "send",
    "recv",
    "broadcast_bytes",
    "all_gather_bytes",
    "new_group",
    "split",
    "one_rank_first",
    "one_rank_only",
    "finalize",
    "first_device_call",
    "probe",
    "iprobe",
    "mprobe",
    "improbe",
    "mrecv",
    "broadcast_alloc",
    "all_gather_alloc",
    "new_group_by_members",
};

static bool idist__kind_reduces(idist__kind kind) {
    return kind == IDIST__ALL_REDUCE || kind == IDIST__REDUCE || kind == IDIST__REDUCE_SCATTER ||
           kind == IDIST__REDUCE_SCATTERV || kind == IDIST__SCAN || kind == IDIST__EXSCAN;
}

static bool idist__kind_is_p2p(idist__kind kind) {
    return kind == IDIST__SEND || kind == IDIST__RECV;
}

// The v-forms, in which the blocks of the ranks may have different counts.
static bool idist__kind_is_v(idist__kind kind) {
    return kind >= IDIST__ALL_GATHERV && kind <= IDIST__REDUCE_SCATTERV;
}

// Those in which only the two ranks of a pair know what one sends to the other.
static bool idist__kind_is_by_pair(idist__kind kind) {
    return kind == IDIST__GATHERV || kind == IDIST__SCATTERV || kind == IDIST__ALL_TO_ALLV;
}

// Each rank gets one block of what is reduced.
IDIST__UNUSED static bool idist__kind_scatters_sum(idist__kind kind) {
    return kind == IDIST__REDUCE_SCATTER || kind == IDIST__REDUCE_SCATTERV;
}

static bool idist__kind_has_root(idist__kind kind) {
    return kind == IDIST__REDUCE || kind == IDIST__BROADCAST || kind == IDIST__GATHER ||
           kind == IDIST__SCATTER || kind == IDIST__GATHERV || kind == IDIST__SCATTERV;
}

//------------------------------------------------------------------------------
// [core:model]  calls, tasks, groups and worlds as data; the contracts with backends
// uses os:thread mutex cond base:log base:type launch:env kind
//
//     idist__world --- nodes[rank]                      who the ranks are and where they run
//        |   |
//        |   +------- group -> next -> next ...         the world is its own first group
//        |              ^
//        +--- tasks ----+-- call                        each running task belongs to one group
//
// A call says what the user asked for; a task is a call under way; a fingerprint is the part of a
// call that must be the same on all ranks and that travels with each of its messages. A backend
// moves the data; its table of functions, and that of a device backend, stand below the data.
//------------------------------------------------------------------------------

// An op that the program registered.
typedef struct idist__user_op {
    idist_op_fn fn; // NULL: a premultiplied sum
    void *arg;
    double factor; // of a premultiplied sum
    bool used, commutative;
} idist__user_op;

// A dtype that the program created.
typedef struct idist__user_dtype {
    char name[32];
    uint32_t tag; // not 0; see [core:fingerprint]
    bool used;
    idist_dtype dtype;
} idist__user_dtype;

// A buffer may lie in several places, one part of it in each.
typedef struct idist__part {
    char *data;
    size_t end; // elements of this part and those before it
} idist__part;

// An operation as data.
typedef struct idist__call {
    idist__kind kind;  // what is run
    idist__kind label; // what the user called
    const void *send;
    void *recv;
    size_t count; // as in the API; v-forms: this rank's contribution
    const size_t *sendcounts, *senddispls, *recvcounts, *recvdispls;
    idist_dtype dtype;
    idist_op op;
    int root; // or the peer of a send or receive; -1: there is none
    int tag;
    idist_recv_info *info;
    // Of an all_reduce in place whose buffer is not all in a row; otherwise NULL and 0.
    const idist__part *parts;
    int part_count;
    bool peeks;         // a receive that describes a message and leaves it
    uint32_t dtype_tag; // of a user dtype, when the call began; 0: look it up
    uint32_t plan;      // of a collective: the number of the plan that makes it; 0: none does
    uint64_t check;     // must also be equal on all ranks: the count, or a hash of the counts
    union {
        // The op of a reduction that is part of another call, because the program may free its own
        // copy meanwhile. NULL: look it up in the world.
        const idist__user_op *user;
        idist_message *message; // of a matched probe, and of the receive that follows it
    } u;
} idist__call;

// A call that is kept, and its group.
struct idist_plan {
    idist__call call; // kind 0: none
    idist_opts opts;
    uint64_t world_serial, ctx; // of the group ...
    int rank, size;             // ... when the call was checked
};

// What two ranks compare about a call: 24 bytes of every message.
typedef struct idist__fingerprint {
    uint8_t kind, dtype, op;
    uint8_t algorithm; // an idist__algorithm, combined with IDIST__ON_DEVICE
    int32_t root;      // see [core:fingerprint]
    uint64_t check;    // see idist__call; of a send: its count; of a user dtype: and its tag
    uint32_t seq;      // number of the call within its group
    uint32_t whole;    // of a part: number of the call it is part of; otherwise 0
} idist__fingerprint;

enum { IDIST__ON_DEVICE = 0x80 }; // a collective on device memory

// A collective that plans of a group keep.
typedef struct idist__planned {
    struct idist__planned *next;
    idist__fingerprint call;
    uint32_t count; // of plans that were filled with it
} idist__planned;

// One operation under way. idist__task_new clears the fields before `text` and no others.
struct idist__task {
    idist__task *next, *prev; // in w->tasks while it runs
    idist__task *list_next;   // in the list of an idist_group_begin, or in w->detached
    idist__task *older;       // in w->all_tasks
    idist_group *group;
    idist__call call;
    idist_status status;
    bool done;
    bool async;     // the caller holds a request for it
    bool patient;   // has the group's time-out: the caller expects no return without a result
    bool announced; // the other members were told that this rank waits in it
    bool warned;    // a log line said that it takes long
    bool asked;     // of a message: its peer was asked whom it waits for
    uint32_t seq;   // number within the group; 0: point-to-point, or not numbered yet
    idist__fingerprint whole; // the call it is part of; kind 0: it is a call of its own
    uint16_t parent_past;     // digest of the calls before that one
    int timeout_ms;
    int64_t started_ns, deadline_ns;
    bool on_device; // the device backend takes part
    bool away;      // waits for the device: the backend has not got it yet, or is done with it
    bool followed;  // idist_wait_stream need not wait for the host any more
    bool detached;  // nobody waits for it: it is freed once it is done
    bool let_go;    // by idist_request_free
    bool pinned;    // a thread works on it without the lock, ...
    bool freed;     // ... and frees it when this is set
    void *copy;     // of a send buffer that the call overwrites; or NULL
    // The request goes on when this task is done: whoever waits or tests calls this, with the lock
    // held. It puts another task into the request, or sets `then` to NULL.
    void (*then)(idist__task *t, idist_request *request);
    void *then_arg;
    void *stream;   // of the device: the task comes after what it holds already
    void *impl;     // the backend's part, behind this struct
    void *lane;     // its row in the timeline, or NULL
    char text[512]; // why it failed
    // These stay when the task is used again.
    void *device;    // the device backend's part
    idist__world *w; // that of its groups
};

struct idist_group {
    idist__world *w; // NULL: the world was closed
    idist_group *next;
    uint64_t ctx; // the same on all members, unique in the world
    int rank;     // -1: not a member
    int size;
    int *ranks;              // world rank of each member
    uint32_t seq;            // collectives started
    uint32_t child_count;    // groups made from this one
    idist__planned *planned; // what its plans keep
    int running_count;       // tasks that run, and calls that prepare the group for a device
    int open_request_count;  // not waited for yet
    int detached_count;      // running tasks that nobody waits for, and pinned ones
    idist_status status;     // not IDIST_OK: unusable, because ...
    char cause[400];         // ... this happened
    bool freed;
    int64_t asked_ns;          // when the members were last asked for a sign of life; 0: never
    int64_t asked_before_ns;   // and the time before that
    int64_t asked_until_ns;    // when the answers are used; nobody asks again before
    bool inner;                // made by a backend for its own use
    bool failure_flushed;      // we have waited for the failure to reach the others
    idist_group *host_group;   // members on this host; one_rank_first makes it when it needs it
    const idist_group *parent; // while it is being made: if the parent fails, so does this one
    void *impl;                // the backend's part
    void *device;              // the device backend's part
};

// What is known of a rank.
typedef struct idist__rank_info {
    char hostname[64];
    uint64_t host; // equal for ranks on one host
    int local_rank, local_size, node_rank;
} idist__rank_info;

// ---- the contract between the core and a backend ----
//
// A backend moves host memory between ranks. It is a table of functions, filled by field name (see
// idist__backend_fill, and idist_self_backend as an example) and registered with
// idist_register_backend. Only the fields marked "optional" may be NULL: then the backend does not
// have that feature. A device backend is the exception: it sets name, claim and wrap, and leaves
// everything else 0.
//
//     claim -> open -> group_open (world) -> [ start, progress, sleep ... ] -> group_close -> close
//                                                 |  group_open, offer, meet, group_close
//                                                 +- for each further group
//
// Lock. claim, open, wrap and close are called without the world's lock, alloc with or without it
// (it must not take the lock), all others with it. group_open of the world's own group and, while
// the world closes, group_close are called without it; threads whose calls were ended may still be
// on their way out of the world then. claim and alloc may be called by several threads at once.
//
// Blocking. open, close and wrap may wait for other ranks. sleep and flush wait, and release the
// lock while they do. shrink and agree wait for the other members and keep the lock, so that no
// other call on this world proceeds meanwhile, not even idist_abort. quick may poll for as long as
// it takes to hand over a small message, less than a millisecond; tell may wait until nobody reads
// the buffers of the failed group any more. Everything else, alloc included, returns at once. On a
// library that offers nothing but blocking calls, group_open may block, and so may a collective
// that all ranks have entered, or that is not to be compared (cfg.unchecked). A device backend may
// release the lock in start, while it hands a call to the device's library or adds to a stream.
//
// Ownership. The core allocates and frees idist__task, idist_group and idist__world, and with each
// task and group the bytes the backend asks for (task_nbytes, group_nbytes): those of a group are
// zero, those of a task are not cleared. The caller's buffers, and the arrays of a v-form, belong
// to the backend from start until it calls idist__task_complete, or until cancel returns. What a
// backend allocates besides (idist__mem_alloc with &w->cfg.mem) it frees in group_close or close.
//
// Failure. A function that returns a status and fails has undone everything it did, and its
// counterpart is not called: no close after a failed open, no group_close after a failed
// group_open. It has recorded the reason with idist__fail (claim: in *why). A function without a
// status reports failures by idist__task_complete (this task) or idist__group_fail (this group).
// When idist__group_fail returns, all tasks of the group have ended.
//
// Calls. The core has checked the arguments of a call as far as one rank can (idist__check_call)
// and has numbered it (task->seq). The backend gets all calls of the group, also those
//
//   - of a group of one rank (idist__self_collective does the collectives; messages of a rank to
//     itself obey the same rules as others);
//   - of count 0, for which buffers may be NULL: they synchronize, and are compared, like others;
//   - in place (idist__extent_call_in_place), except all_to_allv, for which the core makes a copy.
//     Otherwise the send buffer is not written;
//   - of any dtype, also of those that the program created.
//
// A kind, dtype or op that it does not have it completes with IDIST_ERR_UNSUPPORTED, on all ranks
// alike. Collectives of a group match by seq; several may be under way at once, as requests or
// between idist_group_begin and idist_group_end.
//
// Reductions. The order of the operands depends on sizes and ranks only, and all ranks that receive
// a result get the same bits. For built-in ops, idist__reduce_many combines any number of
// contributions in the order of ranks and does what follows.
//
//   - AVG is SUM, and one division by the size of the group at the end; the logical ops end in 0 or
//     1 (idist__reduce_finish);
//   - F16, BF16 and the 8-bit floats are added and multiplied as F32 and rounded once, at the end;
//   - an op from IDIST_OP_USER on is that of idist__world_user_op. The backend copies it in start,
//     because the program may free it. fn == NULL: each contribution is multiplied by the rank's
//     own factor (idist__reduce_scale), then added. While fn runs, idist__me.callbacks is above 0.
//     Operands keep the order of ranks, and may be swapped only if `commutative`.
//
// Messages. A receive takes the oldest message that idist__matching_matches, which knows the
// wildcards IDIST_ANY_SOURCE and IDIST_ANY_TAG; a message goes to the oldest receive that matches.
// Those of one rank with the same tag stay in order. If dtype or count do not fit
// (idist__matching_fits) the receive fails alone, and the message waits for another one, with the
// tag that it has then: a matched probe gives it a new one. A send of up to some KiB completes
// without its receive. idist__matching_received ends a receive.
//
// Mismatches. The core sees one rank only, so the backend compares. Every member shows the others
// its idist__fingerprint_of_task. Where idist__fingerprint_difference names a field, or where the
// counts of a v-form differ (idist__extent_pair, idist__extent_balance), all members fail the group
// with IDIST_ERR_MISMATCH and the text of idist__explain_mismatch or _pair. Ranks that wait
// for each other in different groups or messages are to be found through `announce`
// (idist__explain_deadlock); a backend that cannot do so lets them run into the deadline.
//
// Lost ranks. A backend that notices that a rank is gone calls idist__group_lose_rank.
//
// What it may call. A backend is compiled in the file that defines IDIST_IMPLEMENTATION, and may
// use all that stands in this file above [core:call], [core:message], idist__self_collective, and
// the files that this one uses. Of a task it writes only call.u.user and what `impl` points to, of
// a group what `impl` points to; of the world it sets impl, nodes, ncores, sharing_rank,
// sharing_size, latency_nbytes, network_nbytes, advertised, network, foreign_thread_count and
// single_threaded, and counts moved_count up for each step forward.
struct idist_backend_api {
    uint32_t abi;        // IDIST__BACKEND_ABI
    uint32_t size;       // of this struct
    const char *name;    // for desc.backend; without commas
    size_t task_nbytes;  // bytes that task->impl points to, not cleared
    size_t group_nbytes; // bytes that group->impl points to, zeroed before group_open

    // ---- the world ----

    // Says whether it serves this configuration. If it does not: IDIST_ERR_NO_BACKEND with the
    // reason in *why, and the next backend is asked. Any other failure ends initialize. May
    // initialize the library that the backend is made of, but allocates nothing for this world. A
    // backend that knows rank and world size better than the launcher's variables sets them.
    //
    // A device backend is asked before the host backends, in every world, and says whether wrap is
    // to be called. It fails if config->device_backend is neither "" nor a name that it knows; its
    // own name is one of those.
    idist_status (*claim)(idist__config *config, const char **why);

    // Blocks until all ranks have met, for up to cfg.init_timeout_ms. Sets w->impl and, for each
    // rank, hostname and host in w->nodes; the core derives the rest of w->nodes from `host`.
    idist_status (*open)(idist__world *w);

    // Frees all. clean: every rank has passed the last barrier. Otherwise it closes its connections
    // so that messages that were sent still arrive, for which it may block for a moment. If the
    // world has failed (w->group.status), the calls that this rank has completed in other groups
    // should still complete on the other members. A call that needs this rank fails there with the
    // status and the cause of this world.
    void (*close)(idist__world *w, bool clean);

    // ---- groups ----

    // Prepares a group of which this rank is a member; g->impl is zero.
    idist_status (*group_open)(idist_group *g);
    // Frees the contents of g->impl, not g->impl itself. No task of the group is running.
    void (*group_close)(idist_group *g);

    // Optional, both or neither. After group_open the members exchange one number each: group_offer
    // returns what this rank offers the others, group_meet gets the offers of all members, by rank
    // in the group. If group_meet fails the group fails. `offers` is the core's. Without them the
    // core lets only one thread at a time make a group, because group_open may block. The world's
    // own group has no offers: open has done it all.
    uint64_t (*group_offer)(idist_group *g);
    idist_status (*group_meet)(idist_group *g, const uint64_t *offers);

    // ---- tasks ----

    // Optional. Tries a blocking call without a task, while there are no tasks. True: it is
    // complete and, if it is a collective, was counted in g->seq. False: start follows for the same
    // call, also if the group has failed in between, and may continue what quick has begun.
    bool (*quick)(idist_group *g, const idist__call *c);

    // Optional. Tries a send or a receive without a task, and without waiting; there may be tasks.
    // True: it is complete. False: start follows, for a call of which nothing has begun.
    bool (*quick_message)(idist_group *g, const idist__call *c);

    // Optional. Whether a call on this group may have its buffer in parts. This rank alone asks;
    // for the others the call is like any other.
    bool (*takes_parts)(const idist_group *g, const idist__call *c);

    // Begins a task. The backend calls idist__task_complete once, here or later. If quick has
    // failed the group: with g->status and g->cause.
    void (*start)(idist__task *t);

    // Moves everything that can move now.
    void (*progress)(idist__world *w);

    // Sleeps until I/O arrives (and handles it), `wake` is called or until_ns passes
    // (idist__os_clock_now_ns; IDIST__FOREVER: no limit; in the past: one look at the connections).
    // Called by one thread at a time. Releases the lock while it sleeps.
    void (*sleep)(idist__world *w, int64_t until_ns);

    // Ends the sleep of another thread, also if that has released the lock but does not sleep yet.
    // Does not block.
    void (*wake)(idist__world *w);

    // A caller begins to wait, so that progress or sleep is called all the time from now on; or the
    // last one no longer waits.
    void (*attend)(idist__world *w, bool waits);

    // Forgets a task: afterwards no byte of its buffers is touched, and the core completes it.
    // Returns false when other ranks were already involved, so that its group cannot go on.
    // Collectives are cancelled only when their group has failed, after `tell`, or when the world
    // closes.
    bool (*cancel)(idist__task *t);

    // Optional, for idist_cancel. Forgets a receive, like cancel, if no message has begun to go to
    // it. False: one has, and nothing has changed.
    bool (*retract)(idist__task *t);

    // ---- failures and waiting ----

    // Tells the other members that the group failed, as g->status and g->cause say; there
    // idist__group_fail gets the same two. Called once for a group. Only queues the messages if
    // they cannot go out at once.
    void (*tell)(idist_group *g);

    // Goes on until all messages of `tell` are out, or until_ns passes. Releases the lock while it
    // sleeps.
    void (*flush)(idist__world *w, int64_t until_ns);

    // Tells the other members that this rank waits in t, so that they can object, and answer that
    // they are alive. Called once when t has waited for a while, and again before its group is
    // given up (g->asked_ns). For a message the second call (t->asked) is to find out whom its peer
    // waits for. May end any task.
    void (*announce)(idist__task *t);

    // Appends who is missing in t ("rank 3 on host b (last seen in barrier #6)", see
    // idist__explain_missing_rank and _peer) and returns how many are. 0: everybody is there.
    int (*missing)(idist__task *t, char *text, size_t cap);

    // ---- more, all optional ----

    // Zeroed memory that other ranks can reach, for idist_alloc: part of an idist__window, which
    // keeps track of it beyond close and takes it back in idist_free. Must not wait for other
    // ranks, which do not call it. NULL: none left, take plain memory.
    void *(*alloc)(idist__world *w, size_t nbytes);

    // Both or neither; without them a group that lost a rank can only be freed. Both work in a
    // group that has failed, and block until the surviving members have answered. shrink lists the
    // survivors, the same list on each of them (world ranks, in the group's order), and raises
    // *serial to the largest of theirs; group_open follows for these ranks. agree sets *flag to the
    // bitwise AND over the survivors. Not called for agree in a group of one rank.
    idist_status (*shrink)(idist_group *g, int *ranks, int *n, uint32_t *serial);
    idist_status (*agree)(idist_group *g, int *flag);

    // Of a device backend: it serves no world alone but puts itself in front of the world's
    // backend. Collective; called after the world's group_open. With a device: replaces w->backend
    // by a table that passes on what concerns host memory, and sets w->device, w->device_api and
    // the names. Without one: fills w->no_device. If it fails, the core closes the world.
    idist_status (*wrap)(idist__world *w);
};

enum { IDIST__BACKEND_ABI = 10 };

// ---- the contract between the core and a device backend ----
//
// A device backend moves device memory. It sits in front of the world's backend (see `wrap` in
// idist_backend_api) and leaves host memory to it. The core asks it at four points of a call and at
// the end of the world:
//
//     idist__call_locked      route      does this call concern the device?
//       idist__task_start     (start of the wrapping backend)
//     idist_group_end         launch     submit what idist_group_begin held back
//     idist__task_complete    landed     the backend is done: is the device, too?
//     idist_wait_stream       follow     make a stream wait instead of this thread
//     idist__life_end        end_calls  nobody is to be inside any more
//
// The first four are called with the world's lock held. The table belongs to the device backend and
// lives as long as w->device_api points to it; w->device, group->device and task->device are its
// own data, which the core stores and passes on, but never frees. None of the five is NULL. If a
// thread that released the lock does not come back before the world ends, the device backend sets
// w->abandoned and leaves its data and this table in place.
typedef struct idist_device_api {
    // Whether a call is for the device (*on_device), by looking at its buffers and its stream.
    // *detached: nobody is to wait for the task, because the stream orders what follows. May block:
    // the first such call of a group waits here for the other members, with the lock released. On
    // failure the call has not begun and has no number.
    idist_status (*route)(idist_group *g, const idist__call *c, const idist_opts *o,
                          bool *on_device, bool *detached);

    // Submits what this thread's idist_group_begin held back. May wait for an earlier submission,
    // and releases the lock while it is in the device's library. Failures go to the groups of the
    // tasks concerned.
    void (*launch)(idist__world *w);

    // The backend is done with t (on_device), which ends with this status. True: t is over. False:
    // the device still works on it, t stays running, and the device backend calls
    // idist__task_complete again. Does not block.
    bool (*landed)(idist__task *t, idist_status status);

    // Makes `stream` wait for a task that is `followed` but not done, and detaches the task, also
    // when it fails. Releases the lock while it adds to the stream, whose queue may be full.
    idist_status (*follow)(idist__task *t, void *stream);

    // The world is being closed: waits for the threads that have released the lock in one of the
    // others, and first ends what they may wait for on the device if w->leaves. Called once,
    // without the lock, before the first group_close.
    void (*end_calls)(idist__world *w);
} idist_device_api;

// ---- the world ----

// Who sleeps in the backend.
typedef enum idist__driver {
    IDIST__DRIVER_NONE,
    IDIST__DRIVER_CALLER,
    IDIST__DRIVER_THREAD
} idist__driver;

struct idist__world {
    idist_group group; // all ranks; first, so that a world is its group
    idist__config cfg;
    idist__log log;
    const idist_backend_api *backend;
    void *impl;                            // the backend's part
    idist_status (*wrap)(idist__world *w); // of the device backend that the program has, or NULL
    const idist_device_api *device_api;    // NULL: this world has no device
    void *device;                          // the device backend's part
    char device_name[32];                  // "cuda:0"
    char no_device[200];                   // why there is none
    const char *device_backend;            // how it moves device memory
    idist__task *detached;                 // running or done, newest first
    uint32_t detached_done_count;          // those in the list that are done
    uint32_t matched_count;                // messages that matched probes have found
    char hostname[64];
    char advertised[160];    // where other hosts reach this rank, and its interface; "": nowhere
    char network[96];        // what is known of the network between the hosts; "": nothing
    char sharing[300];       // how the ranks of this host exchange data; "": it has no other
    char backends[512];      // names of those registered
    idist__rank_info *nodes; // of every rank
    int nnodes;
    idist_group *freed_groups; // to be used again
    uint32_t process;          // the number of the process that made it; 0: unknown
    idist__user_op ops[IDIST_OP_LAST - IDIST_OP_USER + 1];
    idist__user_dtype dtypes[IDIST__USER_DTYPES];

    idist__os_mutex lock;
    idist__os_cond changed;  // a task ended, or nobody drives any more: for callers
    idist__os_cond work;     // there is a request and no caller: for the progress thread
    idist__task *tasks;      // running, newest first
    idist__task *idle_tasks; // to be used again
    idist__task *all_tasks;  // ever allocated; freed with the world
    int async_count;         // running tasks with a request
    int let_go_count;        // of those, the ones that idist_request_free has let go
    int blocked_count;       // callers inside idist__wait_until, or between two such waits
    uint32_t ended_count;    // tasks that have ended
    uint32_t moved_count;    // steps forward inside tasks
    idist__driver driver;
    int64_t spin_ns; // how long a caller polls before it sleeps; 0: it yields a few times instead
    int64_t spin_budget_ns;     // the part of spin_ns that has proved worth it lately
    uint32_t lock_waiter_count; // threads that wait for the lock
    int64_t next_look_ns;       // when a thread that polls looks at the timers again
    int64_t timers_due_ns;      // no task needs idist__timer_run before
    int ncores; // that the ranks of this host may use together; 0: the backend could not tell
    // Among the ranks that have the same processors, perhaps as several hosts, in containers; 0, 0:
    // the backend could not tell.
    int sharing_rank, sharing_size;
    // What the network between hosts moves in the time that an empty message takes; 0: not known.
    uint64_t latency_nbytes;
    // What is under way between two hosts while they use all of the network; 0: not known.
    uint64_t network_nbytes;
    bool thread_running, thread_stops;
    bool thread_naps;         // the progress thread looks again soon, and needs no signal
    uint32_t request_count;   // requests that have begun, not counting those complete at once
    uint32_t drive_count;     // how often a caller has moved the backend while it waited or tested
    int foreign_thread_count; // threads of other libraries, which never call; INT32_MAX / 4 or
                              // more: only one thread may call at all
    bool single_threaded;     // the backend allows one thread only: requests move on inside calls
    int making_count;         // groups being made
    uint64_t serial;          // of this world in the process, from 1 on
    uint64_t member_groups;   // more than the serial of any group that its members made alone
    int deferred_count; // tasks that an open idist_group_begin keeps, and threads for which the
                        // device backend holds calls back
    bool closing;       // a thread closes the world: no call may begin that outlasts its function
    bool is_cause;      // this rank has aborted the world, so no lost rank is the cause of its end
    bool leaves;        // the world ends after a failure: the other ranks have not reached its end
    bool abandoned;     // the world ends while a thread is still inside a call: what the thread may
                        // touch is never freed
    bool watched;       // the device may wait for other ranks while no caller does: the progress
                        // thread looks after the connections
    idist__os_thread thread;
};

//------------------------------------------------------------------------------
// [core:backend]  the registered backends, and how a backend fills its table
// uses mutex fail mem model
//
// A backend registers before main, by a constructor in its header, or whenever the program calls
// idist_register_backend. The list only grows, and at its head, so that it is read without a lock.
//------------------------------------------------------------------------------

// When the headers of idist register their backends. What registers later is asked earlier.
enum {
    IDIST__REGISTER_LAST_RESORT = 1000, // serves a world of 1
    IDIST__REGISTER_GENERAL = 1001,     // serves any world
    IDIST__REGISTER_SPECIAL = 1002,     // serves the worlds of one kind of launcher
    IDIST__REGISTER_DEVICE = 1003
};

typedef struct idist__backend_entry {
    const struct idist__backend_entry *next;
    const idist_backend_api *api;
} idist__backend_entry;

static idist__os_mutex idist__backend_lock = IDIST__OS_MUTEX_INIT;
static const idist__backend_entry *idist__backend_list;
static idist__backend_entry idist__backend_first_entries[8]; // a plugin leaves none allocated
static size_t idist__backend_count;

// The backend registered last; the others follow.
static const idist__backend_entry *idist__backend_first(void) {
    return __atomic_load_n(&idist__backend_list, __ATOMIC_ACQUIRE);
}

// Registers a valid table, with the lock held.
static idist_status idist__backend_add(const idist_backend_api *api) {
    const idist__backend_entry *entry;
    idist__backend_entry *added;

    for (entry = idist__backend_first(); entry; entry = entry->next) {
        if (entry->api == api) return IDIST_OK;
        if (strcmp(entry->api->name, api->name) == 0)
            return idist__fail(IDIST_ERR_ARG,
                               "register_backend: another backend has the name \"%s\"", api->name);
    }

    if (idist__backend_count < IDIST__COUNT_OF(idist__backend_first_entries))
        added = &idist__backend_first_entries[idist__backend_count];
    else added = (idist__backend_entry *)idist__mem_alloc(NULL, sizeof *added);

    if (!added) return IDIST_ERR_NO_MEMORY;
    idist__backend_count++;
    added->api = api;
    added->next = idist__backend_first();
    __atomic_store_n(&idist__backend_list, (const idist__backend_entry *)added, __ATOMIC_RELEASE);

    return IDIST_OK;
}

idist_status idist_register_backend(const idist_backend_api *backend) {
    idist_status status;

    if (!backend) return idist__fail(IDIST_ERR_ARG, "register_backend: backend is NULL");
    if (backend->abi != IDIST__BACKEND_ABI || backend->size != sizeof *backend)
        return idist__fail(IDIST_ERR_NO_BACKEND,
                           "register_backend: the backend was compiled against another version of "
                           "idist.h: rebuild all files");
    if (!backend->name || !backend->name[0])
        return idist__fail(IDIST_ERR_ARG, "register_backend: the backend has no name");

    idist__os_mutex_lock(&idist__backend_lock);
    status = idist__backend_add(backend);
    idist__os_mutex_unlock(&idist__backend_lock);

    return status;
}

// Returns *api, filled at the first call. `fill` sets the fields by name, which C99 and C++11 have
// no common initializer for; those that it does not set are zero. abi is stored last: it tells
// later callers, in any thread, that the table is complete.
static const idist_backend_api *idist__backend_fill(idist_backend_api *api,
                                                    void (*fill)(idist_backend_api *api)) {
    if (__atomic_load_n(&api->abi, __ATOMIC_ACQUIRE) == IDIST__BACKEND_ABI) return api;

    idist__os_mutex_lock(&idist__backend_lock);

    if (api->abi != IDIST__BACKEND_ABI) {
        api->size = sizeof *api;
        fill(api);
        __atomic_store_n(&api->abi, (uint32_t)IDIST__BACKEND_ABI, __ATOMIC_RELEASE);
    }

    idist__os_mutex_unlock(&idist__backend_lock);

    return api;
}

//------------------------------------------------------------------------------
// [core:world]  the world, its lock, and who may enter it
// uses os:thread mutex os:memory fail base:type model
//
// One mutex per world guards everything in it. A caller that waits drives the backend itself; when
// several wait, one drives (w->driver) and the others sleep on w->changed until it completes their
// task or stops driving. Requests that nobody waits for are driven by the progress thread
// ([core:thread]).
//------------------------------------------------------------------------------

static idist__world *idist__default_world; // set by idist_initialize, the one global

// The number of this process; a child made by fork has none until it makes a world. The word stays
// for good, because threads may look at it whose world is being freed. NULL: there was no world
// yet, or the kernel does not tell.
static uint32_t *idist__world_process_word;

// Gives this process a number that none of its ancestors has. 0: the kernel does not tell.
static uint32_t idist__world_process(void) {
    static uint32_t count; // a child begins with that of its parent
    uint32_t *word = __atomic_load_n(&idist__world_process_word, __ATOMIC_ACQUIRE), *made;
    uint32_t number = 0, next;

    if (!word) {
        made = idist__os_memory_fork_word();
        if (__atomic_compare_exchange_n(&idist__world_process_word, &word, made, false,
                                        __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            word = made;
        else idist__os_memory_fork_word_free(made); // another thread was first
        if (!word) return 0;
    }

    next = __atomic_add_fetch(&count, 1u, __ATOMIC_RELAXED);
    if (__atomic_compare_exchange_n(word, &number, next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        return next;

    return number;
}

// A child made by fork has none of its parent's worlds. A world that was freed has process 0.
static bool idist__world_forked(const idist__world *w) {
    const uint32_t *word = __atomic_load_n(&idist__world_process_word, __ATOMIC_RELAXED);
    return word && w->process && __atomic_load_n(word, __ATOMIC_RELAXED) != w->process;
}

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

// A thread that polls holds the lock most of the time. Counting those who wait for it tells that
// thread when to let go.
static void idist__world_lock(idist__world *w) {
    if (idist__os_mutex_try_lock(&w->lock)) return;
    __atomic_fetch_add(&w->lock_waiter_count, 1u, __ATOMIC_RELAXED);
    idist__os_mutex_lock(&w->lock);
    __atomic_fetch_sub(&w->lock_waiter_count, 1u, __ATOMIC_RELAXED);
}

#define IDIST__YIELDS 1000 // about half a millisecond of the waiting rank's own time

// Releases the lock and the core for a moment. A thread that waits for the lock has to wake up
// first, so with one waiting we yield until it has the lock.
static void idist__world_give_way(idist__world *w) {
    uint32_t asking = __atomic_load_n(&w->lock_waiter_count, __ATOMIC_RELAXED);
    int turns;

    idist__os_mutex_unlock(&w->lock);
    idist__os_thread_yield();

    for (turns = 0; asking && turns < IDIST__YIELDS; turns++) {
        if (__atomic_load_n(&w->lock_waiter_count, __ATOMIC_RELAXED) < asking) break;
        idist__os_thread_yield();
    }

    idist__os_mutex_lock(&w->lock);
}

// For a thread that has moved the backend or ended tasks while another one drives. It may have
// consumed the event that the driver sleeps on, so the driver must be woken explicitly.
static void idist__world_wake_driver(idist__world *w) {
    if (w->driver != IDIST__DRIVER_NONE) w->backend->wake(w);
}

IDIST__UNUSED static idist_group *idist__world_find_group(idist__world *w, uint64_t ctx) {
    idist_group *g;
    for (g = &w->group; g; g = g->next)
        if (g->ctx == ctx && g->rank >= 0) return g;
    return NULL;
}

// The op of a call that names a registered one.
static const idist__user_op *idist__world_user_op(const idist_group *g, const idist__call *c) {
    return c->u.user ? c->u.user : &g->w->ops[(int)c->op - IDIST_OP_USER];
}

// The dtype with the number that a fingerprint carries; IDIST_DTYPE_COUNT if there is none.
static idist_dtype idist__world_dtype(const idist__world *w, uint8_t number) {
    int user = (int)number - IDIST_DTYPE_USER;

    if (number < IDIST_DTYPE_COUNT) return (idist_dtype)number;
    if (user < 0 || user >= IDIST__USER_DTYPES || !w->dtypes[user].used) return IDIST_DTYPE_COUNT;
    return w->dtypes[user].dtype;
}

// What the program calls a dtype.
static const char *idist__world_dtype_name(const idist__world *w, idist_dtype dtype) {
    int user = idist__dtype_user_number(dtype);

    if (user < 0 || !w->dtypes[user].used) return idist_dtype_name(dtype);
    return w->dtypes[user].name;
}

// The call this rank is blocked in, if blocking is all it does; parts of calls do not count. NULL
// when another thread could still make the call that the others wait for, or when the call waits
// for the device, after which it goes on by itself.
IDIST__UNUSED static idist__task *idist__world_only_call(const idist__world *w) {
    idist__task *t, *only = NULL;
    int own_threads = w->thread_running ? 2 : 1;

    for (t = w->tasks; t; t = t->next) {
        if (t->group->inner) continue;
        if (only || t->async || !t->patient || t->away) return NULL;
        only = t;
    }

    return only && idist__os_thread_count() - w->foreign_thread_count <= own_threads ? only : NULL;
}

//------------------------------------------------------------------------------
// [core:tracer]  where a timeline hooks in
// uses model
//
// idist_trace.h sets the table while it records; otherwise there is none, and each hook costs one
// load.
//------------------------------------------------------------------------------

typedef struct idist__tracer {
    void (*joined)(const idist__world *w); // this thread has joined a world
    void (*left)(void);
    // Runs idist__call_locked and records it.
    idist_status (*call)(idist_group *g, const idist__call *c, const idist_opts *o);
    // Around other waits of this thread, for one call, or for several: then g and c are NULL.
    void (*begin)(const char *category, const char *name, const idist_group *g,
                  const idist__call *c);
    void (*end)(idist_status status);
    // A task that has a lane is done. In any thread, with the world's lock held.
    void (*done)(const idist__task *t);
} idist__tracer;

static const idist__tracer *idist__tracer_set;

// Sets the table above if the environment asks for a timeline; called before a world is joined.
// NULL: the program does not include idist_trace.h.
static void (*idist__tracer_prepare)(void);

static const idist__tracer *idist__tracer_now(void) {
    return __atomic_load_n(&idist__tracer_set, __ATOMIC_ACQUIRE);
}

static void idist__tracer_begin(const char *category, const char *name, const idist_group *g,
                                const idist__call *c) {
    if (idist__tracer_now()) idist__tracer_now()->begin(category, name, g, c);
}

static idist_status idist__tracer_end(idist_status status) {
    if (idist__tracer_now()) idist__tracer_now()->end(status);
    return status;
}

//------------------------------------------------------------------------------
// [core:fingerprint]  what two ranks compare about a call
// uses text base:type launch:env kind model world
//
// Ranks may have created different dtypes under the same number. So the check of a call with one
// carries a tag, a hash of its size and name:
//
//     bits 63 .. 40   the tag
//     bits 39 .. 0    the count, or the low bits of a hash of counts
//
// In all_to_allv each pair of ranks may have a dtype of its own, which goes with the count of the
// pair (idist__extent_pair) or with its message.
//
// The root of a collective that a plan makes carries the number of the plan:
//
//     bits 30 .. 20   the number, not 0
//     bits 19 .. 0    the root; all ones: there is none
//
// A plan's collective also meets one that is made without a plan, and their roots then differ only
// by the number.
//------------------------------------------------------------------------------

enum { IDIST__TAG_BITS = 24, IDIST__DTYPE_BY_PAIR = 255 };
#define IDIST__TAGGED_COUNT ((uint64_t)1 << (64 - IDIST__TAG_BITS))

// 0: not a dtype of the program. The program may free it while a call runs, and create another one.
static uint32_t idist__fingerprint_tag(const idist__world *w, const idist__call *c) {
    int user = idist__dtype_user_number(c->dtype);

    if (user < 0) return 0;
    return c->dtype_tag ? c->dtype_tag : w->dtypes[user].tag;
}

static uint64_t idist__fingerprint_tagged(const idist__world *w, const idist__call *c,
                                          uint64_t check) {
    uint64_t tag = idist__fingerprint_tag(w, c);
    return tag ? tag << (64 - IDIST__TAG_BITS) | check % IDIST__TAGGED_COUNT : check;
}

enum {
    IDIST__PLAN_SHIFT = 20,
    IDIST__PLAN_MAX = 2047,
    IDIST__ROOT_MASK = (1 << IDIST__PLAN_SHIFT) - 1
};

static int32_t idist__fingerprint_planned_root(const idist__call *c) {
    uint32_t root = (uint32_t)c->root;
    return c->plan ? (int32_t)(c->plan << IDIST__PLAN_SHIFT | (root & IDIST__ROOT_MASK)) : c->root;
}

static uint32_t idist__fingerprint_plan(const idist__fingerprint *p) {
    return p->root < 0 ? 0 : (uint32_t)p->root >> IDIST__PLAN_SHIFT;
}

// The root without the number of a plan; -1: there is none.
static int32_t idist__fingerprint_root(const idist__fingerprint *p) {
    uint32_t root = (uint32_t)p->root & IDIST__ROOT_MASK;
    return root == IDIST__ROOT_MASK ? -1 : (int32_t)root;
}

// Whether two ranks make the same call. Plans are compared if both ranks use one.
static bool idist__fingerprint_equal(const idist__fingerprint *a, const idist__fingerprint *b) {
    idist__fingerprint first, second;

    if (memcmp(a, b, sizeof *a) == 0) return true;
    if (idist__fingerprint_plan(a) && idist__fingerprint_plan(b)) return false;
    first = *a;
    second = *b;
    first.root = idist__fingerprint_root(a);
    second.root = idist__fingerprint_root(b);

    return memcmp(&first, &second, sizeof first) == 0;
}

// The count that a fingerprint carries.
static uint64_t idist__fingerprint_count(const idist__fingerprint *p) {
    return p->dtype >= IDIST_DTYPE_USER ? p->check % IDIST__TAGGED_COUNT : p->check;
}

// Whether a message of this fingerprint can have so many bytes.
IDIST__UNUSED static bool idist__fingerprint_has_nbytes(const idist__fingerprint *p,
                                                        uint64_t nbytes) {
    uint64_t count = idist__fingerprint_count(p);

    if (count > SIZE_MAX / 16) return false;
    if (p->dtype < IDIST_DTYPE_USER)
        return nbytes == count * idist_dtype_size((idist_dtype)p->dtype);
    if (!count) return !nbytes;
    return nbytes % count == 0 && nbytes / count <= IDIST__DTYPE_MAX_NBYTES;
}

static idist__fingerprint idist__fingerprint_of_call(const idist__world *w, const idist__call *c,
                                                     uint32_t seq) {
    idist__fingerprint p;

    memset(&p, 0, sizeof p);
    // Messages are compared by what they are, whatever they serve: a probe is a receive.
    p.kind = (uint8_t)(idist__kind_is_p2p(c->kind) ? c->kind : c->label);
    p.dtype = (uint8_t)(c->kind == IDIST__ALL_TO_ALLV ? IDIST__DTYPE_BY_PAIR : (int)c->dtype);
    p.op = (uint8_t)c->op;
    p.root = idist__fingerprint_planned_root(c);
    p.check = c->kind == IDIST__ALL_TO_ALLV ? 0 : idist__fingerprint_tagged(w, c, c->check);
    p.seq = seq;

    return p;
}

// Of a part the ranks compare the call that the user made.
static idist__fingerprint idist__fingerprint_of_task(const idist__task *t,
                                                     idist__algorithm algorithm) {
    idist__fingerprint p = t->whole;

    if (p.kind) {
        p.whole = p.seq;
        p.seq = t->seq;
        p.algorithm = (uint8_t)(algorithm | (p.algorithm & IDIST__ON_DEVICE));
        return p;
    }

    p = idist__fingerprint_of_call(t->group->w, &t->call, t->seq);
    p.algorithm = (uint8_t)algorithm;

    return p;
}

// What two ranks of a v-form must agree on about what one sends to the other; 0: nothing.
//
//     bits 63 .. 56   the dtype's number, which only all_to_allv does not have in its fingerprint
//     bits 55 .. 40   of a user dtype: the low bits of its tag
//     below           the count
static uint64_t idist__fingerprint_pair(const idist__world *w, const idist__call *c,
                                        uint64_t count) {
    uint64_t tag = idist__fingerprint_tag(w, c) & 0xffff;
    return count ? (uint64_t)(uint8_t)c->dtype << 56 | tag << 40 | count : 0;
}

static uint64_t idist__fingerprint_pair_count(uint64_t pair) {
    bool user = (pair >> 56) >= IDIST_DTYPE_USER;
    return pair & (((uint64_t)1 << (user ? 40 : 56)) - 1);
}

// The field in which two ranks of a pair differ.
static const char *idist__fingerprint_pair_difference(uint64_t sent, uint64_t expected) {
    uint64_t differs = sent ^ expected;
    bool user = (sent >> 56) >= IDIST_DTYPE_USER;

    if (!sent || !expected) return "count";
    if (differs >> 56) return "dtype";
    return user && differs >> 40 ? "definition of the dtype" : "count";
}

// The field in which two calls differ, or NULL.
IDIST__UNUSED static const char *idist__fingerprint_difference(const idist__fingerprint *a,
                                                               const idist__fingerprint *b) {
    bool by_pair = a->kind == IDIST__ALL_TO_ALLV;

    if (a->kind != b->kind) return "operation";
    if (a->dtype != b->dtype && !by_pair) return "dtype";
    if (a->op != b->op) return "op";
    if (idist__fingerprint_root(a) != idist__fingerprint_root(b)) return "root";
    if (a->dtype >= IDIST_DTYPE_USER && !by_pair && (a->check ^ b->check) >= IDIST__TAGGED_COUNT)
        return "definition of the dtype";
    if (a->check != b->check && !by_pair) return a->kind == IDIST__NEW_GROUP ? "group" : "count";
    if ((a->algorithm ^ b->algorithm) & IDIST__ON_DEVICE) return "memory";
    if (a->algorithm != b->algorithm) return "algorithm";
    if (!idist__fingerprint_plan(a) || !idist__fingerprint_plan(b)) return NULL;

    return idist__fingerprint_plan(a) != idist__fingerprint_plan(b) ? "plan" : NULL;
}

// Appends the arguments of a call: " (F32 x 1024, SUM)".
static void idist__fingerprint_add_arguments(const idist__world *w, const idist__fingerprint *p,
                                             idist__kind kind, char *buf, size_t cap) {
    int root = idist__fingerprint_root(p);

    if (kind == IDIST__BARRIER || kind == IDIST__ALL_TO_ALLV || kind >= IDIST__SEND) {
        if (p->algorithm & IDIST__ON_DEVICE) idist__text_append(buf, cap, " (on a device)");
        return;
    }

    idist__text_append(buf, cap, " (%s",
                       idist__world_dtype_name(w, idist__world_dtype(w, p->dtype)));
    if (!idist__kind_is_v(kind))
        idist__text_append(buf, cap, " x %llu", (unsigned long long)idist__fingerprint_count(p));
    if (idist__kind_reduces(kind))
        idist__text_append(buf, cap, ", %s", idist_op_name((idist_op)p->op));
    if (root >= 0) idist__text_append(buf, cap, ", root %d", root);
    idist__text_append(buf, cap, p->algorithm & IDIST__ON_DEVICE ? ", on a device)" : ")");
}

// "all_reduce #42 (F32 x 1024, SUM) by plan 2"
static void idist__fingerprint_text(const idist__world *w, const idist__fingerprint *p, char *buf,
                                    size_t cap) {
    idist__kind kind = p->kind < IDIST__KIND_COUNT ? (idist__kind)p->kind : IDIST__NONE;

    snprintf(buf, cap, "%s", idist__kind_names[kind]);
    if (p->seq) idist__text_append(buf, cap, " #%u", (unsigned)(p->whole ? p->whole : p->seq));
    idist__fingerprint_add_arguments(w, p, kind, buf, cap);
    if (idist__fingerprint_plan(p))
        idist__text_append(buf, cap, " by plan %u", (unsigned)idist__fingerprint_plan(p));
}

//------------------------------------------------------------------------------
// [core:explain]  sentences about calls that failed
// uses text launch:env kind model world fingerprint
//
// The same words whichever backend noticed. Ranks are ranks of the world here, since a reader of
// the log knows no others.
//------------------------------------------------------------------------------

static void idist__explain_task(const idist__task *t, char *buf, size_t cap) {
    const idist__call *c = &t->call;

    if (!idist__kind_is_p2p(c->kind)) {
        idist__fingerprint p = idist__fingerprint_of_task(t, IDIST__ALGO_AUTO);
        idist__fingerprint_text(t->group->w, &p, buf, cap);
        return;
    }

    snprintf(buf, cap, "%s (", idist__kind_names[c->label]);
    if (!(c->label >= IDIST__PROBE && c->label <= IDIST__IMPROBE) &&
        c->label != IDIST__NEW_GROUP_BY_MEMBERS)
        idist__text_append(buf, cap, "%s x %zu, ", idist__world_dtype_name(t->group->w, c->dtype),
                           c->count);
    idist__text_append(buf, cap, c->kind == IDIST__SEND ? "to " : "from ");
    if (c->root == IDIST_ANY_SOURCE) idist__text_append(buf, cap, "any rank");
    else idist__text_append(buf, cap, "rank %d", c->root);
    if (c->tag == IDIST_ANY_TAG) idist__text_append(buf, cap, ", any tag)");
    else if (c->tag < 0) idist__text_append(buf, cap, ")"); // of idist itself
    else idist__text_append(buf, cap, ", tag %d)", c->tag);
}

// What two ranks of the world have called, and where it differs. field NULL: in their order.
IDIST__UNUSED static void idist__explain_mismatch(const idist__world *w, const char *field, int a,
                                                  const idist__fingerprint *of_a, int b,
                                                  const idist__fingerprint *of_b, char *buf,
                                                  size_t cap) {
    char first[128], second[128];

    idist__fingerprint_text(w, of_a, first, sizeof first);
    idist__fingerprint_text(w, of_b, second, sizeof second);
    if (!field) field = "sequence";

    // Counts of each rank, members and definitions are compared by a hash, which says nothing.
    if (!strcmp(first, second))
        snprintf(buf, cap, "the %s differs between rank %d and rank %d in %s", field, a, b, first);
    else
        snprintf(buf, cap, "the %s differs: rank %d called %s, rank %d called %s", field, a, first,
                 b, second);
}

// Of a message that is part of a collective, in bytes.
IDIST__UNUSED static void idist__explain_sizes(const char *field, int from, uint64_t sent, int to,
                                               uint64_t expected, const idist__task *t, char *buf,
                                               size_t cap) {
    snprintf(buf, cap,
             "the %s differs: rank %d sends %llu bytes to rank %d, which expects %llu, in %s #%u",
             field, from, (unsigned long long)sent, to, (unsigned long long)expected,
             idist__kind_names[t->call.label], (unsigned)t->seq);
}

// "5 F32", of what idist__fingerprint_pair says.
static void idist__explain_pair_text(const idist__world *w, uint64_t pair, char *buf, size_t cap) {
    idist_dtype dtype = idist__world_dtype(w, (uint8_t)(pair >> 56));

    snprintf(buf, cap, "%llu %s", (unsigned long long)idist__fingerprint_pair_count(pair),
             pair ? idist__world_dtype_name(w, dtype) : "elements");
}

// What a rank sends to another one and what that expects, as idist__fingerprint_pair says.
IDIST__UNUSED static void idist__explain_pair(int from, uint64_t sent, int to, uint64_t expected,
                                              const idist__task *t, char *buf, size_t cap) {
    const idist__world *w = t->group->w;
    char given[64], wanted[64];

    idist__explain_pair_text(w, sent, given, sizeof given);
    idist__explain_pair_text(w, expected, wanted, sizeof wanted);
    snprintf(buf, cap, "the %s differs: rank %d sends %s to rank %d, which expects %s, in %s #%u",
             idist__fingerprint_pair_difference(sent, expected), from, given, to, wanted,
             idist__kind_names[t->call.label], (unsigned)t->seq);
}

// Two ranks wait for each other and would do so for ever: this one in `ours`, `peer` in the call of
// this fingerprint, which belongs to the same group or to another one.
IDIST__UNUSED static void idist__explain_deadlock(const idist__task *ours, int peer,
                                                  const idist__fingerprint *print, bool same_group,
                                                  char *text, size_t cap) {
    char a[128], b[128];
    int me = ours->group->w->group.rank;
    bool p2p = idist__kind_is_p2p(ours->call.kind) && idist__kind_is_p2p((idist__kind)print->kind);

    idist__explain_task(ours, a, sizeof a);
    idist__fingerprint_text(ours->group->w, print, b, sizeof b);
    snprintf(text, cap, "rank %d waits for rank %d in %s, rank %d waits for rank %d in %s%s: ", me,
             peer, a, peer, me, b, same_group ? "" : " of another group");
    if (p2p) idist__text_append(text, cap, "a deadlock; use idist_sendrecv, or requests");
    else idist__text_append(text, cap, "the %s differs", same_group ? "operation" : "group");
}

// For `missing` of a backend: a member that has not come, and where it was last seen. Only the
// first eight are named; `already` says how many are.
IDIST__UNUSED static void idist__explain_missing_rank(const idist_group *g, int rank,
                                                      const idist__fingerprint *seen, int already,
                                                      char *text, size_t cap) {
    char last[128];

    if (already >= 8) return;
    idist__text_append(text, cap, "%srank %d on %s", already ? ", " : "", g->ranks[rank],
                       g->w->nodes[g->ranks[rank]].hostname);
    if (!seen->seq) return;
    idist__fingerprint_text(g->w, seen, last, sizeof last);
    idist__text_append(text, cap, " (last seen in %s)", last);
}

// The same for the other side of a send or receive.
IDIST__UNUSED static int idist__explain_missing_peer(const idist__task *t, char *text, size_t cap) {
    const idist_group *g = t->group;
    int peer = t->call.root < 0 ? -1 : g->ranks[t->call.root];

    if (peer < 0) {
        idist__text_append(text, cap, "a message from any rank");
        return 1;
    }

    idist__text_append(text, cap, "rank %d on %s, which ", peer, g->w->nodes[peer].hostname);
    if (t->call.kind == IDIST__SEND) // also read by others, if the group fails
        idist__text_append(text, cap, "does not receive the message of rank %d", g->w->group.rank);
    else idist__text_append(text, cap, "sent nothing that fits");

    return 1;
}

//------------------------------------------------------------------------------
// [core:task]  tasks: allocate, start, complete, free
// uses clock cond fail text mem base:log kind model world tracer explain
//
// A task is in w->tasks from idist__task_start until idist__task_complete. Its memory is used again
// (w->idle_tasks) and goes with the world.
//------------------------------------------------------------------------------

// A task that was let go has ended. If its group goes on, only the log tells of a failure.
static void idist__task_report(const idist__task *t) {
    idist__world *w = t->group->w;

    w->let_go_count--;
    if (t->status != IDIST_OK && t->group->status == IDIST_OK)
        idist__log_print(&w->log, IDIST_LOG_WARN,
                         "a request freed by idist_request_free failed: %s", t->text);
}

// Ends a task. text says why it failed, without the name of the operation.
static void idist__task_complete(idist__task *t, idist_status status, const char *text) {
    idist__world *w = t->group->w;

    if (t->done) return;
    if (t->on_device && !w->device_api->landed(t, status)) return;
    t->status = status;

    if (status != IDIST_OK) {
        idist__explain_task(t, t->text, sizeof t->text);
        idist__text_append(t->text, sizeof t->text, ": %s", text);
    }

    if (t->prev) t->prev->next = t->next;
    else w->tasks = t->next;
    if (t->next) t->next->prev = t->prev;
    t->next = t->prev = NULL;
    idist__mem_free(&w->cfg.mem, t->copy);
    t->copy = NULL;
    t->done = true;
    w->ended_count++;
    t->group->running_count--;

    if (t->detached) {
        t->group->detached_count--;
        w->detached_done_count++;
    }

    if (t->let_go) idist__task_report(t);
    if (t->async) w->async_count--;
    if (t->lane) idist__tracer_now()->done(t);
    if (w->blocked_count) idist__os_cond_broadcast(&w->changed);
}

// A pinned task is freed by the thread that pinned it.
static void idist__task_free(idist__task *t) {
    idist__world *w = t->group->w;

    t->freed = t->pinned;
    if (t->pinned) return;
    t->next = w->idle_tasks;
    w->idle_tasks = t;
}

// Frees the detached tasks that are done.
static void idist__task_sweep(idist__world *w) {
    idist__task **at = &w->detached;

    w->detached_done_count = 0;

    while (*at) {
        idist__task *t = *at;

        if (!t->done) {
            at = &t->list_next;
            continue;
        }

        *at = t->list_next;
        idist__task_free(t);
    }
}

static idist__task *idist__task_new(idist_group *g) {
    idist__world *w = g->w;
    size_t nbytes = sizeof(idist__task) + w->backend->task_nbytes;
    idist__task *t;

    if (w->detached_done_count >= 64) idist__task_sweep(w);
    t = w->idle_tasks;

    if (t) {
        idist__task *older = t->older;
        w->idle_tasks = t->next;
        idist__mem_clear(t, offsetof(idist__task, text));
        t->older = older;
    } else {
        t = (idist__task *)idist__mem_alloc(&w->cfg.mem, nbytes);
        if (!t) return NULL;
        t->older = w->all_tasks;
        w->all_tasks = t;
        t->w = w;
    }

    t->impl = t + 1;
    t->group = g;

    return t;
}

// Nobody waits for it any more.
static void idist__task_detach(idist__task *t) {
    idist__world *w = t->group->w;

    t->detached = true;
    t->list_next = w->detached;
    w->detached = t;
    t->group->detached_count++;

    if (t->async) {
        w->async_count--;
        t->group->open_request_count--;
        t->async = false;
    }
}

// Whether nobody waits for it because it runs on a stream of the program.
IDIST__UNUSED static bool idist__task_on_stream(const idist__task *t) {
    return t->detached && !t->let_go;
}

// Nobody waits for it any more, and the progress thread goes on with it.
static void idist__task_let_go(idist__task *t) {
    idist__world *w = t->group->w;

    t->detached = true;
    t->list_next = w->detached;
    w->detached = t;
    t->group->detached_count++;
    t->group->open_request_count--;
    t->let_go = true;
    w->let_go_count++;
}

#ifndef IDIST__ANNOUNCE_NS // a test sets it so high that an announcement never wakes anybody
#define IDIST__ANNOUNCE_NS (20 * IDIST__MS)
#endif

// Numbers a task, puts it among the running ones and hands it to the backend.
static void idist__task_start(idist__task *t) {
    idist_group *g = t->group;
    idist__world *w = g->w;

    t->started_ns = idist__os_clock_now_ns();
    t->deadline_ns = t->timeout_ms < 0 ? IDIST__FOREVER : t->started_ns + t->timeout_ms * IDIST__MS;
    if (!idist__kind_is_p2p(t->call.kind)) t->seq = ++g->seq;
    if (t->started_ns + IDIST__ANNOUNCE_NS < w->timers_due_ns)
        w->timers_due_ns = t->started_ns + IDIST__ANNOUNCE_NS;
    if (t->deadline_ns < w->timers_due_ns) w->timers_due_ns = t->deadline_ns;

    t->next = w->tasks;
    if (w->tasks) w->tasks->prev = t;
    w->tasks = t;
    g->running_count++;

    if (t->async) {
        w->request_count++;
        w->async_count++;
        g->open_request_count++;
    }

    idist__fail_begin();
    w->backend->start(t);
    idist__fail_end(IDIST_OK);   // what failed is in the tasks
    idist__world_wake_driver(w); // also when t is done: start may have read from the connections
    if (w->driver == IDIST__DRIVER_NONE && !t->done && t->async && w->thread_running &&
        !w->thread_naps && !w->blocked_count)
        idist__os_cond_signal(&w->work);
}

//------------------------------------------------------------------------------
// [core:ended]  handles that outlive what they stood for
// uses mutex mem model
//
// A program may keep the handle of a group, or of a world, beyond the end of the world, and call
// with it. That is an IDIST_ERR_STATE like any other, so the struct must still be there to say so.
// It stays in one of these lists, marked as freed, until enough others have followed it and a new
// handle takes its place. It is plain memory, because the world's allocator may be gone.
//------------------------------------------------------------------------------

typedef struct idist__ended {
    idist_group *first, *last; // the oldest, the newest
    int n;
} idist__ended;

enum { IDIST__ENDED_GROUPS = 256, IDIST__ENDED_WORLDS = 16 };

static idist__os_mutex idist__ended_lock = IDIST__OS_MUTEX_INIT;
static idist__ended idist__ended_groups, idist__ended_worlds; // a world begins with its group

static void idist__ended_keep(idist__ended *list, idist_group *g) {
    g->w = NULL;
    g->rank = -1;
    g->freed = true;
    g->next = NULL;

    idist__os_mutex_lock(&idist__ended_lock);
    if (list->last) list->last->next = g;
    else list->first = g;
    list->last = g;
    list->n++;
    idist__os_mutex_unlock(&idist__ended_lock);
}

// Zeroed memory for a handle: the oldest of the list once it holds `limit` of them, else new.
static idist_group *idist__ended_reuse(idist__ended *list, int limit, size_t nbytes) {
    idist_group *g = NULL;

    idist__os_mutex_lock(&idist__ended_lock);

    if (list->n >= limit) {
        g = list->first;
        list->first = g->next;
        if (!list->first) list->last = NULL;
        list->n--;
    }

    idist__os_mutex_unlock(&idist__ended_lock);

    if (!g) return (idist_group *)idist__mem_alloc(NULL, nbytes);
    memset(g, 0, nbytes);

    return g;
}

#if defined(__PIC__) && !defined(__PIE__)
// Code for a shared library, which the program may unload, and then nobody has a handle. After all
// other destructors, as these may still close worlds. In a child of fork, a thread that does not
// exist there may hold the lock for ever.
static void idist__ended_free(idist__ended *list) {
    while (list->first) {
        idist_group *g = list->first;
        list->first = g->next;
        idist__mem_free(NULL, g);
    }

    list->last = NULL;
    list->n = 0;
}

__attribute__((destructor(101))) static void idist__ended_unload(void) {
    if (!idist__os_mutex_try_lock(&idist__ended_lock)) return;
    idist__ended_free(&idist__ended_groups);
    idist__ended_free(&idist__ended_worlds);
    idist__os_mutex_unlock(&idist__ended_lock);
}
#endif

//------------------------------------------------------------------------------
// [core:group]  groups: make, free, fail
// uses clock cond fail text mem base:log config model world task ended
//------------------------------------------------------------------------------

IDIST__UNUSED static int idist__group_world_rank(const idist_group *g, int rank) {
    return g->ranks[rank];
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

// A group with room for n ranks, in no list yet. Freed groups stay behind, marked, until a new one
// takes their place, so that a call with a stale handle gets an error.
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

// Ends a group while a thread is still inside a call. The call finds its struct when it comes back,
// and a failure that nobody is left to be told of.
static void idist__group_abandon(idist_group *g) {
    if (g->status == IDIST_OK) {
        g->status = IDIST_ERR_STATE;
        idist__text_copy(g->cause, sizeof g->cause, "the world was closed");
    }

    g->failure_flushed = true;
    g->freed = true;
}

static void idist__group_free(idist_group *g) {
    idist_group **at;
    idist__world *w = g->w;

    for (at = &w->group.next; *at && *at != g; at = &(*at)->next) continue;

    if (*at) {
        *at = g->next;
        if (g->rank >= 0) w->backend->group_close(g);
    }

    idist__mem_free_list(&w->cfg.mem, g->planned);
    g->planned = NULL;

    if (w->abandoned) {
        idist__group_abandon(g);
        return;
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

// Fails a group, once: its tasks end, later calls are refused, and the other members are told. They
// are told even if we learned of the failure from one of them: a rank that sees our connection end
// before it has the reason from us would report us as the cause.
static void idist__group_fail(idist_group *g, idist_status status, const char *cause) {
    idist__world *w = g->w;
    idist_group *child;
    idist__task *t, *next;

    if (g->status != IDIST_OK) return;
    g->status = status;
    idist__text_copy(g->cause, sizeof g->cause, cause);
    if (!g->inner)
        idist__log_print(&w->log, IDIST_LOG_INFO, "%s: %s", idist_status_name(status), cause);
    // An aborted group says nothing about the world: the rank may go on, and fail by itself later.
    if (!w->is_cause &&
        (status == IDIST_ERR_PEER_LOST || (status == IDIST_ERR_ABORTED && g == &w->group)))
        idist__config_tell_lost(&w->cfg);
    w->backend->tell(g);

    for (t = w->tasks; t; t = next) {
        next = t->next;
        if (t->group != g) continue;
        w->backend->cancel(t);
        idist__task_complete(t, status, g->cause);
        next = w->tasks; // the backend may have ended others
    }

    for (child = w->group.next; child; child = child->next)
        if (child->parent == g) idist__group_fail(child, status, cause);
    idist__world_wake_driver(w); // another thread may sleep for one of the tasks that ended
}

// Fails a group because of what this rank lacks or could not do; the text tells the others which
// rank that is.
static void idist__group_fail_self(idist_group *g, idist_status status, const char *what) {
    char cause[400];

    snprintf(cause, sizeof cause, "rank %d on %s %s", g->w->group.rank, g->w->hostname, what);
    idist__group_fail(g, status, cause);
}

static void idist__group_fail_memory(idist_group *g) {
    idist__group_fail_self(g, IDIST_ERR_NO_MEMORY, "is out of memory");
}

// Fails every group of a rank that is gone. If the world had failed before, the rank may have ended
// because of that, so the status and the first part of the text are those of that failure.
IDIST__UNUSED static void idist__group_lose_rank(idist__world *w, int rank, const char *how) {
    idist_status first = w->group.status, status = first != IDIST_OK ? first : IDIST_ERR_PEER_LOST;
    idist_group *g;
    char cause[400];
    int i;

    cause[0] = 0;
    if (first != IDIST_OK)
        idist__text_append(cause, sizeof cause, "%.*s; after that ", (int)(sizeof cause / 2),
                           w->group.cause);
    idist__text_append(cause, sizeof cause, "rank %d on %s was lost: %s", rank,
                       w->nodes[rank].hostname, how);

    for (g = &w->group; g; g = g->next)
        for (i = 0; i < g->size && g->rank >= 0; i++)
            if (g->ranks[i] == rank) idist__group_fail(g, status, cause);
}

enum { IDIST__FLUSH_MS = 100 };

// A caller that gets an error may exit at once, which ends its connections. The other members must
// have received the reason by then, so it waits a moment for that.
static void idist__group_flush(idist_group *g) {
    idist__world *w = g->w;

    if (g->status == IDIST_OK || g->failure_flushed || w->driver != IDIST__DRIVER_NONE) return;
    if (w->thread_stops) return; // whoever closes the world does it, and does not wait for us here
    g->failure_flushed = true;
    w->driver = IDIST__DRIVER_CALLER;
    w->backend->flush(w, idist__os_clock_deadline(IDIST__FLUSH_MS));
    w->driver = IDIST__DRIVER_NONE;
    if (w->blocked_count) idist__os_cond_broadcast(&w->changed);
}

//------------------------------------------------------------------------------
// [core:timer]  deadlines, announcements and warnings
// uses clock text base:log kind model explain task group
//
// What happens to a task that waits, from its start on:
//
//     20 ms            announce: the other members learn that this rank waits, and may object
//     up to 1 s        ask again whether they are alive, before ...
//     60 s             ... a warning in the log names those who are missing, and before ...
//     the deadline     ... the call fails with IDIST_ERR_TIMEOUT, which names them too
//
// Thousands of tasks may be running, and idist__timer_run is called before every sleep. So it looks
// at the tasks only when something is due (w->timers_due_ns), and delays announcements slightly to
// make several at once.
//------------------------------------------------------------------------------

#ifndef IDIST__WARN_NS // a test has less patience
#define IDIST__WARN_NS (60000 * IDIST__MS)
#endif
#define IDIST__TIMERS_NS (5 * IDIST__MS) // a thread that polls looks at the timers this often
#define IDIST__ASK_NS (1000 * IDIST__MS)

// When a task is announced. One that waits for the device is announced when the backend has it.
static int64_t idist__timer_announce_at(const idist__task *t, int64_t now) {
    int64_t at = t->started_ns + IDIST__ANNOUNCE_NS;

    if (t->away && at < now + IDIST__MS) return now + IDIST__MS;
    if (at > now && at < now + IDIST__TIMERS_NS) return now + IDIST__TIMERS_NS;
    return at;
}

// How long the members have to answer: a second, or half of the time-out.
static int64_t idist__timer_patience(const idist__task *t) {
    int64_t half = t->timeout_ms < 0 ? IDIST__ASK_NS : t->timeout_ms * IDIST__MS / 2;
    return half < IDIST__ASK_NS ? half : IDIST__ASK_NS;
}

// When to ask the members once more: a rank that has entered the call may have been stopped since.
// *until_ns is when the answers are used.
static int64_t idist__timer_ask_at(const idist__task *t, int64_t *until_ns) {
    int64_t end = t->warned ? IDIST__FOREVER : t->started_ns + IDIST__WARN_NS;

    if (t->deadline_ns < end) end = t->deadline_ns;
    *until_ns = end;
    return end == IDIST__FOREVER ? IDIST__FOREVER : end - idist__timer_patience(t);
}

// Since when the members should have answered; 0: they were not asked. A question that has just
// been asked for another task of the group does not count yet; the one before it does.
IDIST__UNUSED static int64_t idist__timer_asked_ns(const idist__task *t) {
    const idist_group *g = t->group;
    int64_t age = idist__os_clock_now_ns() - g->asked_ns;

    return age < idist__timer_patience(t) / 2 ? g->asked_before_ns : g->asked_ns;
}

// Ends a task whose deadline has passed. Returns false if it got more time instead: a receive whose
// message is arriving waits for the end of it.
static bool idist__timer_expire(idist__world *w, idist__task *t, int64_t now) {
    char cause[400];
    int missing;

    snprintf(cause, sizeof cause, "not done after %lld ms",
             (long long)((now - t->started_ns) / IDIST__MS));
    idist__text_append(cause, sizeof cause, "; missing: ");
    missing = w->backend->missing(t, cause, sizeof cause);

    if (t->call.kind == IDIST__RECV && !missing && !t->patient) {
        t->patient = true;
        t->deadline_ns =
            w->cfg.timeout_ms < 0 ? IDIST__FOREVER : now + w->cfg.timeout_ms * IDIST__MS;
        return false;
    }

    if (!missing)
        idist__text_append(cause, sizeof cause,
                           "nobody, but the data did not come through to rank %d", w->group.rank);
    if (idist__kind_is_p2p(t->call.kind) && w->backend->cancel(t))
        idist__task_complete(t, IDIST_ERR_TIMEOUT, cause);
    else idist__group_fail(t->group, IDIST_ERR_TIMEOUT, cause);

    return true;
}

// Asks the members once more, or the peer of a message whom it waits for. Returns whether that was
// due.
static bool idist__timer_ask(idist__world *w, idist__task *t, int64_t now) {
    int64_t until_ns, ask_at = idist__timer_ask_at(t, &until_ns);
    bool p2p = idist__kind_is_p2p(t->call.kind);

    if (now < ask_at || (p2p && t->asked)) return false;
    if (!p2p && (t->group->asked_ns >= ask_at || now < t->group->asked_until_ns)) return false;

    if (p2p) {
        t->asked = true;
    } else {
        t->group->asked_before_ns = t->group->asked_ns;
        t->group->asked_ns = now;
        t->group->asked_until_ns = until_ns;
    }

    w->backend->announce(t);

    return true;
}

// Announces a task, or asks its members. Returns whether either was due.
static bool idist__timer_announce(idist__world *w, idist__task *t, int64_t now) {
    if (t->announced) return idist__timer_ask(w, t, now);
    if (now < idist__timer_announce_at(t, now)) return false;
    t->announced = true;
    // A member that waits for others to make a group may be right to wait, whatever they do.
    if (t->call.label != IDIST__NEW_GROUP_BY_MEMBERS) w->backend->announce(t);

    return true;
}

static void idist__timer_warn(idist__world *w, idist__task *t, int64_t now) {
    char what[128], missing[400];

    if (!t->announced || t->warned || now < t->started_ns + IDIST__WARN_NS) return;
    t->warned = true;
    t->asked = false; // it is asked again before the deadline
    idist__explain_task(t, what, sizeof what);
    missing[0] = 0;
    w->backend->missing(t, missing, sizeof missing);
    idist__log_print(&w->log, IDIST_LOG_WARN, "%s has waited for 60 s; missing: %s", what,
                     missing[0] ? missing : "nobody");
}

// When a task needs the next look.
static int64_t idist__timer_next(const idist__task *t, int64_t now) {
    int64_t at, ask_at, until_ns;

    if (t->announced) {
        at = t->warned ? IDIST__FOREVER : t->started_ns + IDIST__WARN_NS;
        ask_at = idist__timer_ask_at(t, &until_ns);
        if (now < ask_at && ask_at < at) at = ask_at;
    } else {
        at = idist__timer_announce_at(t, now);
    }

    return t->deadline_ns < at ? t->deadline_ns : at;
}

// Does what is due; returns when to look again.
static int64_t idist__timer_run(idist__world *w) {
    int64_t now = idist__os_clock_now_ns(), next = IDIST__FOREVER;
    idist__task *t, *following;

    if (now < w->timers_due_ns) return w->timers_due_ns;
    w->timers_due_ns = IDIST__FOREVER; // a task that begins meanwhile sets it

    for (t = w->tasks; t; t = following) {
        uint32_t ended = w->ended_count;
        int64_t at;
        following = t->next;

        if (now >= t->deadline_ns) {
            if (!idist__timer_expire(w, t, now)) next = now;
            else if (!t->done || w->ended_count != ended + 1)
                following = w->tasks; // others may have ended, too
            continue;
        }

        if (idist__timer_announce(w, t, now)) {
            if (w->ended_count != ended) following = w->tasks; // any task may have ended
            next = now;
            continue;
        }

        idist__timer_warn(w, t, now);
        at = idist__timer_next(t, now);
        if (at < next) next = at;
    }

    if (next < w->timers_due_ns) w->timers_due_ns = next;

    return w->timers_due_ns;
}

//------------------------------------------------------------------------------
// [core:wait]  waiting for a task: poll, drive or follow
// uses clock cpu cond fail model world task group timer
//
// A caller first polls the backend for a short time. Then, if no thread drives the backend, it
// does: it runs the timers and sleeps in the backend. Otherwise it follows: it sleeps on w->changed
// until the driver has completed its task or stops driving. The lock is held throughout, except
// while the thread sleeps or yields.
//
//     idist__wait_task -> idist__wait_until -> idist__wait_polls ... idist__wait_turn
//                                                                       -> idist__timer_run
//                                                                       -> sleep of the backend
//------------------------------------------------------------------------------

#define IDIST__SPIN_NS 500000
#define IDIST__YIELD_NS 5000000 // at most this long it yields instead of sleeping

// How long a caller has polled already.
typedef struct idist__waiter {
    uint32_t turns;     // since the last step forward
    uint32_t all_turns; // since the wait began
    int64_t begun_ns;   // when the turns began; 0: not known yet
    bool slept;         // since the last step forward
} idist__waiter;

// Sleeps until something happens, then moves what can move. Does not sleep when the timers have
// just ended a task, because it may be the one that the caller waits for.
static void idist__wait_turn(idist__world *w, idist__driver driver) {
    uint32_t ended = w->ended_count;
    int64_t until = idist__timer_run(w);
    int own = driver == IDIST__DRIVER_CALLER ? 1 : 0;

    if (w->ended_count != ended) return;

    if (!w->tasks) { // what we wait for is done by a thread that may need the lock
        idist__world_give_way(w);
        return;
    }

    w->driver = driver;
    w->backend->sleep(w, until);
    w->driver = IDIST__DRIVER_NONE;
    w->backend->progress(w);
    if (w->blocked_count > own) idist__os_cond_broadcast(&w->changed);
}

// Whether to poll once more, after a short break, or to sleep.
//
// With a core for each rank we poll as long as that has proved worth it: a wait that ended in sleep
// halves our patience, one that did not restores it. With fewer cores we hand the core to the
// others, a bounded number of times; being woken up costs as much as dozens of these.
static bool idist__wait_polls(idist__waiter *waiter, idist__world *w) {
    int64_t now;

    waiter->turns++;
    waiter->all_turns++;
    if (w->spin_ns) idist__os_cpu_relax();
    if (w->spin_ns && waiter->all_turns % 16) return true;
    now = idist__os_clock_now_ns();
    if (!waiter->begun_ns) waiter->begun_ns = now;

    if (now >= w->next_look_ns) { // also for tasks that do not move while others do
        int64_t next = idist__timer_run(w);
        w->next_look_ns = next < now + IDIST__TIMERS_NS ? next : now + IDIST__TIMERS_NS;
    }

    if (w->spin_ns) {
        if (now - waiter->begun_ns >= w->spin_budget_ns) return false;
        if (__atomic_load_n(&w->lock_waiter_count, __ATOMIC_RELAXED)) idist__world_give_way(w);
        return true;
    }

    // The other ranks may compute for a long time.
    if (waiter->turns > IDIST__YIELDS || now - waiter->begun_ns > IDIST__YIELD_NS) return false;
    idist__world_give_way(w);

    return true;
}

static void idist__wait_learn(const idist__waiter *waiter, idist__world *w) {
    if (waiter->turns < 16 || !w->spin_ns) return;
    w->spin_budget_ns = waiter->slept ? w->spin_budget_ns / 2 : w->spin_budget_ns * 2;
    if (w->spin_budget_ns > w->spin_ns) w->spin_budget_ns = w->spin_ns;
    if (w->spin_budget_ns < w->spin_ns / 32) w->spin_budget_ns = w->spin_ns / 32;
}

static void idist__wait_enter(idist__world *w) {
    w->blocked_count++;
    if (w->blocked_count == 1 && w->backend->attend) w->backend->attend(w, true);
}

// A caller is not blocked any more: another one, or the progress thread, goes on. A thread that
// naps looks again soon.
static void idist__wait_leave(idist__world *w) {
    w->blocked_count--;
    if (!w->blocked_count && w->backend->attend) w->backend->attend(w, false);
    if (w->blocked_count) idist__os_cond_broadcast(&w->changed);
    else if (w->async_count && w->thread_running && !w->thread_naps)
        idist__os_cond_signal(&w->work);
}

// Waits until ready(arg).
static void idist__wait_until(idist__world *w, bool (*ready)(void *arg), void *arg) {
    idist__waiter waiter;
    uint32_t moved = w->moved_count;

    if (ready(arg)) return;
    w->drive_count++;
    memset(&waiter, 0, sizeof waiter);
    idist__fail_begin();
    idist__wait_enter(w);

    while (!ready(arg)) {
        if (w->moved_count != moved) { // one wait is over, the next one begins
            idist__wait_learn(&waiter, w);
            moved = w->moved_count;
            waiter.turns = 0;
            waiter.begun_ns = 0;
            waiter.slept = false;
        }

        if (w->driver == IDIST__DRIVER_NONE) {
            w->backend->progress(w);
            if (ready(arg) || idist__wait_polls(&waiter, w) || ready(arg))
                continue; // polling looks at the timers too
            idist__wait_turn(w, IDIST__DRIVER_CALLER);
            waiter.slept = true;
        } else {
            if (w->driver == IDIST__DRIVER_THREAD) w->backend->wake(w); // it stops driving for us
            idist__os_cond_wait(&w->changed, &w->lock, IDIST__FOREVER);
        }
    }

    idist__wait_learn(&waiter, w);
    idist__wait_leave(w);
    idist__fail_end(IDIST_OK); // what failed is in the tasks
}

static bool idist__wait_task_ready(void *arg) { return ((const idist__task *)arg)->done; }

static void idist__wait_task(idist__task *t) {
    idist__wait_until(t->group->w, idist__wait_task_ready, t);
}

// Frees a finished task without looking at its status.
static void idist__wait_drop(idist__task *t) {
    if (t->async) t->group->open_request_count--;
    idist__task_free(t);
}

// The status of a finished task, as the caller gets it. Frees the task.
static idist_status idist__wait_result(idist__task *t) {
    idist_status status = t->status;

    if (status != IDIST_OK) {
        idist__group_flush(t->group);
        idist__fail(status, "%s", t->text);
    }

    idist__wait_drop(t);

    return status;
}

//------------------------------------------------------------------------------
// [core:thread]  the progress thread
// uses clock os:thread mutex cond fail model timer wait
//
// Drives the backend while there are requests and no caller is blocked; as soon as one blocks, it
// stops driving. It exists from the first request on.
//
// A program that begins requests mostly waits for them soon, and then drives by itself. Waking this
// thread and taking over from it again costs more than many messages. So when requests have begun
// the thread naps. When it wakes up, it naps again, longer, only if meanwhile more requests have
// begun and the program has driven; and at the latest after IDIST__NAP_MOST_NS it drives in any
// case.
//------------------------------------------------------------------------------

#define IDIST__WATCH_NS (10 * IDIST__MS)
#define IDIST__NAP_NS 200000
#define IDIST__NAP_MOST_NS (1400 * (int64_t)1000) // three naps

// What the progress thread has seen of the program when it last looked.
typedef struct idist__thread_nap {
    uint32_t request_count, drive_count;
    int64_t next_ns, napped_ns; // 0: it has not napped since it last drove
} idist__thread_nap;

// Naps, if the program is likely to drive by itself.
static bool idist__progress_thread_may_nap(idist__world *w, idist__thread_nap *nap) {
    bool begins = w->request_count != nap->request_count;
    bool drives = w->drive_count != nap->drive_count;

    nap->request_count = w->request_count;
    nap->drive_count = w->drive_count;

    if (!begins || (nap->napped_ns && !drives) || nap->napped_ns >= IDIST__NAP_MOST_NS) {
        nap->napped_ns = 0;
        return false;
    }

    nap->next_ns = nap->napped_ns ? 2 * nap->next_ns : IDIST__NAP_NS;
    nap->napped_ns += nap->next_ns;
    w->thread_naps = true;
    idist__os_cond_wait(&w->work, &w->lock, idist__os_clock_now_ns() + nap->next_ns);
    w->thread_naps = false;

    return true;
}

// While the device waits for other ranks and no thread does: handles what has arrived on the
// connections, without sleeping, so that the loss of a rank is noticed.
static void idist__progress_thread_look(idist__world *w) {
    w->driver = IDIST__DRIVER_THREAD;
    w->backend->sleep(w, idist__os_clock_now_ns());
    w->driver = IDIST__DRIVER_NONE;
    w->backend->progress(w);
    if (w->blocked_count) idist__os_cond_broadcast(&w->changed); // callers that came meanwhile
    idist__timer_run(w);
}

static void *idist__progress_thread_main(void *arg) {
    idist__world *w = (idist__world *)arg;
    idist__thread_nap nap;

    memset(&nap, 0, sizeof nap);
    idist__os_mutex_lock(&w->lock);
    nap.request_count = w->request_count;

    while (!w->thread_stops) {
        bool idle;

        if (idist__progress_thread_may_nap(w, &nap)) continue;
        idle = !w->blocked_count && w->driver == IDIST__DRIVER_NONE;

        if (w->async_count && idle) {
            idist__wait_turn(w, IDIST__DRIVER_THREAD);
            continue;
        }

        idist__os_cond_wait(&w->work, &w->lock,
                            w->watched ? idist__os_clock_now_ns() + IDIST__WATCH_NS
                                       : IDIST__FOREVER);
        idle = !w->blocked_count && w->driver == IDIST__DRIVER_NONE;
        if (w->watched && !w->async_count && idle && !w->thread_stops)
            idist__progress_thread_look(w);
    }

    idist__os_mutex_unlock(&w->lock);

    return NULL;
}

static idist_status idist__progress_thread_need(idist__world *w) {
    if (w->thread_running || w->single_threaded) return IDIST_OK;
    if (w->thread_stops) return idist__fail(IDIST_ERR_STATE, "another thread closes the world");
    if (idist__os_thread_start(&w->thread, idist__progress_thread_main, w) != 0)
        return idist__fail(IDIST_ERR_SYSTEM,
                           "could not start the thread that advances requests; is a limit on "
                           "processes (ulimit -u) or memory reached?");
    w->thread_running = true;

    return IDIST_OK;
}

//------------------------------------------------------------------------------
// [core:block]  ranks modulo n, and blocks of a buffer
// uses -
//------------------------------------------------------------------------------

IDIST__UNUSED static int idist__block_wrap(int rank, int n) { return ((rank % n) + n) % n; }

// The first element of block b, when `count` elements are cut into n nearly equal blocks. The first
// blocks are larger by one.
static size_t idist__block_at(size_t count, int n, int b) {
    size_t quotient = count / (size_t)n, rest = count % (size_t)n;
    return (size_t)b * quotient + ((size_t)b < rest ? (size_t)b : rest);
}

IDIST__UNUSED static size_t idist__block_count(size_t count, int n, int b) {
    return idist__block_at(count, n, b + 1) - idist__block_at(count, n, b);
}

static void idist__block_copy(void *dst, const void *src, size_t nbytes) {
    if (nbytes && dst != src) memmove(dst, src, nbytes);
}

//------------------------------------------------------------------------------
// [core:extent]  where the elements of a call lie
// uses base:type hash kind model fingerprint
//------------------------------------------------------------------------------

// How many elements lie at send and at recv, and where in-place has one start inside the other.
typedef struct idist__extent {
    size_t send, recv; // elements
    size_t send_at;    // in place, recv starts at this element of send,
    size_t recv_at;    // or send at this element of recv
} idist__extent;

static size_t idist__extent_displ(const size_t *counts, const size_t *displs, int k) {
    size_t at = 0;
    int i;

    if (displs) return displs[k];
    for (i = 0; i < k; i++) at += counts[i];
    return at;
}

// Elements up to the end of the last part; SIZE_MAX when it overflows.
static size_t idist__extent_end(const size_t *counts, const size_t *displs, int n) {
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

static void idist__extent_of_v(const idist_group *g, const idist__call *c, idist__extent *e) {
    bool root = c->root == g->rank;

    switch (c->kind) {
    case IDIST__ALL_GATHERV:
    case IDIST__GATHERV:
        e->send = c->count;
        if (c->kind == IDIST__GATHERV && !root) break;
        e->recv = idist__extent_end(c->recvcounts, c->recvdispls, g->size);
        e->recv_at = idist__extent_displ(c->recvcounts, c->recvdispls, g->rank);
        break;
    case IDIST__SCATTERV:
        e->recv = c->count;
        if (!root) break;
        e->send = idist__extent_end(c->sendcounts, c->senddispls, g->size);
        e->send_at = idist__extent_displ(c->sendcounts, c->senddispls, g->rank);
        break;
    case IDIST__ALL_TO_ALLV:
        e->send = idist__extent_end(c->sendcounts, c->senddispls, g->size);
        e->recv = idist__extent_end(c->recvcounts, c->recvdispls, g->size);
        break;
    case IDIST__REDUCE_SCATTERV:
        e->send = idist__extent_end(c->sendcounts, NULL, g->size);
        e->recv = c->count;
        e->send_at = idist__extent_displ(c->sendcounts, NULL, g->rank);
        break;
    default: break;
    }
}

static idist_status idist__extent_of(const idist_group *g, const idist__call *c, idist__extent *e) {
    size_t n = (size_t)g->size, r = (size_t)g->rank, count = c->count, all;
    bool root = c->root == g->rank;

    memset(e, 0, sizeof *e);
    if (count > SIZE_MAX / 16 / n) return IDIST_ERR_ARG;
    all = n * count;

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
    case IDIST__SEND: e->send = count; break;
    case IDIST__RECV: e->recv = count; break;
    default: idist__extent_of_v(g, c, e); break;
    }

    return e->send == SIZE_MAX || e->recv == SIZE_MAX ? IDIST_ERR_ARG : IDIST_OK;
}

// Whether one buffer lies in the other as the in-place rule of the call has it.
static bool idist__extent_in_place(const idist__extent *e, const idist__call *c) {
    const char *send = (const char *)c->send, *recv = (const char *)c->recv;
    size_t size = idist_dtype_size(c->dtype);

    if (!e->send || !e->recv) return false;
    return (recv == send + e->send_at * size && !e->recv_at) ||
           (send == recv + e->recv_at * size && !e->send_at);
}

IDIST__UNUSED static bool idist__extent_call_in_place(const idist_group *g, const idist__call *c) {
    idist__extent e;
    return idist__extent_of(g, c, &e) == IDIST_OK && idist__extent_in_place(&e, c);
}

// Where the elements that go from rank `from` to rank `to` lie, in the buffer at base: the sender's
// or the receiver's.
static char *idist__extent_part(const idist__call *c, char *base, int from, int to, bool at_sender,
                                size_t *count) {
    const size_t *counts = at_sender ? c->sendcounts : c->recvcounts;
    const size_t *displs = at_sender ? c->senddispls : c->recvdispls;
    size_t size = idist_dtype_size(c->dtype);
    bool gather = c->kind == IDIST__GATHER || c->kind == IDIST__GATHERV;
    bool scatter = c->kind == IDIST__SCATTER || c->kind == IDIST__SCATTERV;
    bool all_to_allv = counts && c->sendcounts && c->recvcounts;
    int k = at_sender ? to : from; // which part of a buffer of many

    *count = 0;
    if ((gather && to != c->root) || (scatter && from != c->root)) return base;
    *count = c->count;
    if (c->kind != IDIST__ALL_TO_ALL && !all_to_allv && at_sender != scatter)
        return base; // a buffer of one part
    if (!idist__kind_is_v(c->kind) || !counts) return base + (size_t)k * c->count * size;
    *count = counts[k];

    return base + idist__extent_displ(counts, displs, k) * size;
}

// The first element of block b of a reduce_scatter or reduce_scatterv.
IDIST__UNUSED static size_t idist__extent_block_at(const idist__call *c, int b) {
    return c->sendcounts ? idist__extent_displ(c->sendcounts, NULL, b) : (size_t)b * c->count;
}

IDIST__UNUSED static size_t idist__extent_block_count(const idist__call *c, int b) {
    return c->sendcounts ? c->sendcounts[b] : c->count;
}

// The count of the message between this rank and a peer, as this rank understands it. In three of
// the v-forms only these two know it.
static size_t idist__extent_pair_count(const idist_group *g, const idist__call *c, int peer,
                                       bool sends) {
    int root = c->root, me = g->rank;

    if (c->kind == IDIST__ALL_TO_ALLV) return sends ? c->sendcounts[peer] : c->recvcounts[peer];

    if (c->kind == IDIST__GATHERV) {
        if (sends) return peer == root ? c->count : 0;
        return me == root ? c->recvcounts[peer] : 0;
    }

    if (sends) return me == root ? c->sendcounts[peer] : 0;
    return peer == root ? c->count : 0;
}

// See idist__fingerprint_pair.
IDIST__UNUSED static uint64_t idist__extent_pair(const idist_group *g, const idist__call *c,
                                                 int peer, bool sends) {
    return idist__fingerprint_pair(g->w, c, idist__extent_pair_count(g, c, peer, sends));
}

// A number for each pair, added for what is sent and subtracted for what is expected. Over all
// ranks the sum is 0 when all pairs agree; otherwise it is non-zero with overwhelming probability.
IDIST__UNUSED static uint64_t idist__extent_balance(const idist_group *g, const idist__call *c) {
    uint64_t sum = 0, me = (uint64_t)g->rank, n = (uint64_t)g->size;
    int i;

    if (!idist__kind_is_by_pair(c->kind)) return 0; // the fingerprint has the counts

    for (i = 0; i < g->size; i++) {
        sum += idist__hash_mix(me * n + (uint64_t)i, idist__extent_pair(g, c, i, true));
        sum -= idist__hash_mix((uint64_t)i * n + me, idist__extent_pair(g, c, i, false));
    }

    return sum;
}

//------------------------------------------------------------------------------
// [core:check]  what can be wrong with one rank's arguments
// uses fail base:type reduce kind model fingerprint extent
//
// Nothing was sent yet when these fail, so the group stays usable.
//------------------------------------------------------------------------------

// For calls that only exist in a blocking form.
static idist_status idist__check_blocking(const char *name, const idist_opts *opts) {
    if (opts && (opts->request || opts->plan))
        return idist__fail(IDIST_ERR_ARG, "%s: blocking only; opts.%s must be NULL", name,
                           opts->request ? "request" : "plan");
    if (idist__me.group_depth)
        return idist__fail(IDIST_ERR_STATE, "%s: not between idist_group_begin and idist_group_end",
                           name);

    return IDIST_OK;
}

static idist_status idist__check_buffers(const idist_group *g, const idist__call *c) {
    const char *name = idist__kind_names[c->label];
    const char *send = (const char *)c->send, *recv = (const char *)c->recv;
    size_t size, send_nbytes, recv_nbytes;
    idist__extent e;
    bool is_simple = (c->kind == IDIST__ALL_REDUCE && send == recv && send) ||
                     (c->kind == IDIST__SEND && send) || (c->kind == IDIST__RECV && recv);

    if (is_simple && c->count <= SIZE_MAX / 16) return IDIST_OK;

    if (idist__extent_of(g, c, &e) != IDIST_OK)
        return idist__fail(IDIST_ERR_ARG, "%s: the counts are too large for memory", name);
    if (e.send && !send)
        return idist__fail(IDIST_ERR_ARG, "%s: the send buffer is NULL and count is not 0", name);
    if (e.recv && !recv)
        return idist__fail(IDIST_ERR_ARG, "%s: the receive buffer is NULL and count is not 0",
                           name);

    size = idist_dtype_size(c->dtype);
    send_nbytes = e.send * size;
    recv_nbytes = e.recv * size;
    if (!send_nbytes || !recv_nbytes) return IDIST_OK;
    if (send + send_nbytes <= recv || recv + recv_nbytes <= send) return IDIST_OK; // disjoint
    if (idist__extent_in_place(&e, c)) return IDIST_OK;

    return idist__fail(IDIST_ERR_ARG,
                       "%s: send and receive buffers overlap in a way that in-place does not allow",
                       name);
}

static idist_status idist__check_builtin_op(const idist__call *c) {
    const char *name = idist__kind_names[c->label];

    if ((unsigned)c->dtype >= IDIST_DTYPE_COUNT)
        return idist__fail(IDIST_ERR_ARG,
                           "%s: %s takes no dtype of the program; see idist_op_create", name,
                           idist_op_name(c->op));
    if (!idist__reduce_table[(unsigned)c->dtype][(unsigned)c->op])
        return idist__fail(IDIST_ERR_ARG, "%s: %s takes %s, not %s", name, idist_op_name(c->op),
                           c->op >= IDIST_MINLOC            ? "pairs of value and index"
                           : idist__dtype_is_pair(c->dtype) ? "numbers"
                                                            : "integers",
                           idist_dtype_name(c->dtype));
    if (c->op == IDIST_AVG && (c->kind == IDIST__SCAN || c->kind == IDIST__EXSCAN))
        return idist__fail(IDIST_ERR_ARG,
                           "%s: AVG is not defined for prefixes; use SUM and divide by rank + 1",
                           name);

    return IDIST_OK;
}

static idist_status idist__check_op(const idist__world *w, const idist__call *c) {
    const char *name = idist__kind_names[c->label];
    const idist__user_op *user;

    if ((unsigned)c->op < IDIST_OP_COUNT) return idist__check_builtin_op(c);
    user = (int)c->op >= IDIST_OP_USER && (int)c->op <= IDIST_OP_LAST
               ? &w->ops[c->op - IDIST_OP_USER]
               : NULL;
    if (!user || !user->used)
        return idist__fail(IDIST_ERR_ARG, "%s: invalid op %d in this world", name, (int)c->op);
    if (!user->fn && !idist__dtype_is_float(c->dtype))
        return idist__fail(IDIST_ERR_ARG, "%s: a premultiplied sum takes floating dtypes, not %s",
                           name, idist_dtype_name(c->dtype));

    return IDIST_OK;
}

// A dtype must be one that this world has, and not a value made up.
static idist_status idist__check_dtype(const idist__world *w, const idist__call *c) {
    const char *name = idist__kind_names[c->label];
    int user = idist__dtype_user_number(c->dtype);
    uint64_t count = c->count;

    if (user < 0 && idist_dtype_size(c->dtype)) return IDIST_OK;
    if (user < 0 || !w->dtypes[user].used || w->dtypes[user].dtype != c->dtype)
        return idist__fail(IDIST_ERR_ARG, "%s: invalid dtype %d in this world", name,
                           (int)c->dtype);
    if (count >= IDIST__TAGGED_COUNT)
        return idist__fail(IDIST_ERR_ARG, "%s: the count is too large", name);

    return IDIST_OK;
}

static idist_status idist__check_peer(const idist_group *g, const idist__call *c) {
    const char *name = idist__kind_names[c->label];
    bool receives = c->kind == IDIST__RECV;

    if (!(c->root >= 0 && c->root < g->size) && !(receives && c->root == IDIST_ANY_SOURCE))
        return idist__fail(IDIST_ERR_ARG, "%s: rank %d is not in a group of %d", name, c->root,
                           g->size);
    if (c->tag < 0 && !(receives && c->tag == IDIST_ANY_TAG) &&
        c->label != IDIST__NEW_GROUP_BY_MEMBERS && c->label != IDIST__MRECV)
        return idist__fail(IDIST_ERR_ARG, "%s: tag %d is negative", name, c->tag);
    if (c->label == IDIST__MRECV && // another group may be at its address
        (c->u.message->world != g->w->serial || c->u.message->ctx != g->ctx))
        return idist__fail(IDIST_ERR_STATE, "mrecv: the group of the message was freed");

    return IDIST_OK;
}

static idist_status idist__check_counts(const idist_group *g, const idist__call *c) {
    const char *name = idist__kind_names[c->label];
    bool root = c->root == g->rank, to_all = c->kind == IDIST__ALL_TO_ALLV;
    bool gathers = c->kind == IDIST__ALL_GATHERV || (c->kind == IDIST__GATHERV && root);
    bool scatters = c->kind == IDIST__SCATTERV && root;

    if (((gathers || to_all) && !c->recvcounts) ||
        (c->kind == IDIST__REDUCE_SCATTERV && !c->sendcounts))
        return idist__fail(IDIST_ERR_ARG, "%s: recvcounts is NULL", name);
    if ((scatters || to_all) && !c->sendcounts)
        return idist__fail(IDIST_ERR_ARG, "%s: sendcounts is NULL", name);
    if (gathers && c->recvcounts[g->rank] != c->count)
        return idist__fail(IDIST_ERR_ARG, "%s: sendcount is %zu, but recvcounts[%d] is %zu", name,
                           c->count, g->rank, c->recvcounts[g->rank]);
    if (scatters && c->sendcounts[g->rank] != c->count)
        return idist__fail(IDIST_ERR_ARG, "%s: recvcount is %zu, but sendcounts[%d] is %zu", name,
                           c->count, g->rank, c->sendcounts[g->rank]);
    if (to_all && c->sendcounts[g->rank] != c->recvcounts[g->rank])
        return idist__fail(IDIST_ERR_ARG, "%s: sendcounts[%d] and recvcounts[%d] differ", name,
                           g->rank, g->rank);

    return IDIST_OK;
}

static idist_status idist__check_collective(const idist_group *g, const idist__call *c) {
    idist_status status = IDIST_OK;

    if (idist__kind_has_root(c->kind) && (c->root < 0 || c->root >= g->size))
        return idist__fail(IDIST_ERR_ARG, "%s: root %d is not in a group of %d",
                           idist__kind_names[c->label], c->root, g->size);

    if (idist__kind_reduces(c->kind)) status = idist__check_op(g->w, c);
    if (status == IDIST_OK && idist__kind_is_v(c->kind)) status = idist__check_counts(g, c);

    return status;
}

static idist_status idist__check_call(const idist_group *g, const idist__call *c) {
    idist_status status = IDIST_OK;

    if (g->rank < 0)
        return idist__fail(IDIST_ERR_STATE, "%s: this rank is not a member of the group",
                           idist__kind_names[c->label]);
    if (c->kind == IDIST__BARRIER) return IDIST_OK;
    if ((unsigned)c->dtype >= IDIST_DTYPE_COUNT) status = idist__check_dtype(g->w, c);
    if (status != IDIST_OK) return status;

    status = idist__kind_is_p2p(c->kind) ? idist__check_peer(g, c) : idist__check_collective(g, c);

    return status == IDIST_OK ? idist__check_buffers(g, c) : status;
}

//------------------------------------------------------------------------------
// [core:call]  the path of every communication call
// uses mutex fail mem base:type kind model world tracer fingerprint task group
// uses wait thread extent check
//
//     public function         fills an idist__call
//     idist__call_message     a message in the ordinary case: tries the backend's `quick`, then
//                             goes on at idist__call_begin
//     idist__call_run         finds the group, locks its world, records the first error of a
//                             group_begin
//     idist__call_traced      through the timeline, if there is one
//     idist__call_locked      checks the arguments, which a plan has done before
//     idist__call_checked     asks the device whether the call is its own; tries the backend's
//                             `quick`
//     idist__call_begin       makes a task
//     idist__task_start       numbers it and hands it to the backend
//     idist__wait_task        waits, unless there is a request or an open group_begin
//     idist__wait_result      status and text for the caller
//------------------------------------------------------------------------------

static void idist__call_init(idist__call *c, idist__kind kind, const void *send, void *recv,
                             size_t count, idist_dtype dtype) {
    idist__mem_clear(c, sizeof *c);
    c->kind = kind;
    c->send = send;
    c->recv = recv;
    c->count = count;
    c->label = kind;
    c->check = count;
    c->dtype = dtype;
    c->root = -1;
}

// Locks the world of a call and finds its group. On failure nothing is locked and *out is NULL.
static idist_status idist__call_enter(const char *name, idist_group *group, idist_group **out) {
    idist__world *w = group ? group->w : idist__world_default();

    *out = NULL;
    if (group && !w)
        return idist__fail(IDIST_ERR_STATE, "%s: the world of this group was closed", name);
    if (!w)
        return idist__fail(IDIST_ERR_STATE,
                           "%s: there is no world: call idist_initialize first, and not after "
                           "idist_finalize",
                           name);
    if (idist__world_enter(name, w) != IDIST_OK) return IDIST_ERR_STATE;
    if (group && group->freed) return idist__fail(IDIST_ERR_STATE, "%s: the group was freed", name);
    idist__world_lock(w);
    if (!group) group = &w->group;

    if (!group->w || group->freed) { // before we had the lock; the struct stays for a while
        idist__os_mutex_unlock(&w->lock);
        return idist__fail(IDIST_ERR_STATE, "%s: the group was freed, or its world was closed",
                           name);
    }

    *out = group;

    return IDIST_OK;
}

// An all_to_allv in place overwrites what it sends. So the backends get a copy to send.
static bool idist__call_needs_copy(const idist__call *c) {
    return c->kind == IDIST__ALL_TO_ALLV && c->send == c->recv;
}

// False: no memory for it.
static bool idist__call_copy_send(idist__task *t) {
    const idist_group *g = t->group;
    idist__call *c = &t->call;
    size_t nbytes = idist__extent_end(c->sendcounts, c->senddispls, g->size);

    nbytes *= idist_dtype_size(c->dtype);
    t->copy = idist__mem_raw(&g->w->cfg.mem, nbytes ? nbytes : 1);
    if (!t->copy) return false;
    if (nbytes) memcpy(t->copy, c->send, nbytes);
    c->send = t->copy; // also of nothing: Open MPI 4 takes equal addresses for in place

    return true;
}

// A call without a task, if the backend can do that now. With a request, inside idist_group_begin
// or beside other calls, only a message can.
static bool idist__call_quick(idist_group *g, const idist__call *c, const idist_opts *o) {
    const idist_backend_api *backend = g->w->backend;
    bool blocks = !o->request && !idist__me.group_depth;

    if (g->status != IDIST_OK || c->peeks || idist__call_needs_copy(c)) return false;
    if (blocks && !g->w->tasks) return backend->quick && backend->quick(g, c);
    if (!backend->quick_message || !idist__kind_is_p2p(c->kind) || idist__tracer_now())
        return false;

    return backend->quick_message(g, c);
}

// The value of request->impl for a call that completed before it returned: it has no task.
static char idist__call_complete;

static bool idist__call_was_complete(const idist_request *request) {
    return request->impl == &idist__call_complete;
}

// Whether the device backend takes part in a call. A stream needs one.
static idist_status idist__call_route(idist_group *g, const idist__call *c, const idist_opts *o,
                                      bool *on_device, bool *detached) {
    idist__world *w = g->w;

    *on_device = *detached = false;
    if (w->device_api) return w->device_api->route(g, c, o, on_device, detached);
    if (!o->stream) return IDIST_OK;

    return idist__fail(w->wrap ? IDIST_ERR_NO_DEVICE : IDIST_ERR_UNSUPPORTED,
                       "%s: a stream is for device memory: %s", idist__kind_names[c->label],
                       w->no_device);
}

static void idist__call_task_init(idist__task *t, const idist__call *c, const idist_opts *o,
                                  bool on_device) {
    t->call = *c;
    t->call.dtype_tag = idist__fingerprint_tag(t->group->w, c);
    t->async = o->request != NULL;
    t->on_device = on_device;
    t->stream = o->stream;
    t->patient = o->timeout_ms == 0;
    t->timeout_ms = o->timeout_ms ? o->timeout_ms : t->group->w->cfg.timeout_ms;
}

// Before a task that outlasts the function that begins it. While a thread closes the world, it
// would be freed before anybody waits for it.
static idist_status idist__call_check_open(const idist__world *w, const char *name) {
    if (!w->closing) return IDIST_OK;
    return idist__fail(IDIST_ERR_STATE, "%s: another thread closes the world", name);
}

// Keeps a task for idist_group_end, which waits for it. Until then the world cannot be closed.
static void idist__call_defer(idist__task *t) {
    idist__thread *self = &idist__me;

    t->group->w->deferred_count++;
    if (self->group_tasks) self->group_last->list_next = t;
    else self->group_tasks = t;
    self->group_last = t;
}

// From here on this thread stays in the world until it has waited for the kept tasks at the front
// of its list, those up to the first one of another world.
static void idist__call_undefer(idist__world *w) {
    const idist__task *t;
    for (t = idist__me.group_tasks; t && t->group->w == w; t = t->list_next) w->deferred_count--;
}

// Ends this thread's idist_group_begin without waiting, before it closes a world. Called without a
// lock.
static void idist__call_forget(idist__world *closed) {
    idist__thread *self = &idist__me;

    if (self->held_world == closed) {
        idist__world_lock(closed);
        closed->deferred_count--;
        idist__os_mutex_unlock(&closed->lock);
        self->held_world = NULL;
    }

    self->group_depth = 0;

    while (self->group_tasks) {
        idist__task *t = self->group_tasks;
        idist__world *w = t->group->w;

        idist__world_lock(w);
        self->group_tasks = t->list_next;
        w->deferred_count--;
        if (t->done) idist__task_free(t);
        else idist__task_detach(t);
        idist__os_mutex_unlock(&w->lock);
    }
}

// A call that the backend could not complete at once.
static idist_status idist__call_begin(idist_group *g, const idist__call *c, const idist_opts *o,
                                      bool on_device, bool detached) {
    const char *name = idist__kind_names[c->label];
    idist_status status = IDIST_OK;
    idist__task *t;

    if (g->status != IDIST_OK && idist__kind_is_p2p(c->kind)) // what has just arrived says so
        return idist__fail(g->status, "%s: %s", name, g->cause);

    if (o->request || idist__me.group_depth) status = idist__call_check_open(g->w, name);
    if (o->request && status == IDIST_OK) status = idist__progress_thread_need(g->w);
    if (status != IDIST_OK) return status;

    t = idist__task_new(g);
    if (t) idist__call_task_init(t, c, o, on_device);

    if (!t || (!on_device && idist__call_needs_copy(c) && !idist__call_copy_send(t))) {
        if (t) idist__task_free(t);
        idist__group_fail_memory(g); // others count on it
        return IDIST_ERR_NO_MEMORY;
    }

    if (detached) idist__task_detach(t);
    idist__task_start(t);
    if (detached)
        return g->status == IDIST_OK ? IDIST_OK : idist__fail(g->status, "%s: %s", name, g->cause);

    if (o->request) {
        o->request->impl = t;
        return IDIST_OK;
    }

    if (idist__me.group_depth) {
        idist__call_defer(t);
        return IDIST_OK;
    }

    idist__wait_task(t);

    return idist__wait_result(t);
}

// A call whose arguments have passed the check.
static idist_status idist__call_checked(idist_group *g, const idist__call *c, const idist_opts *o) {
    const char *name = idist__kind_names[c->label];
    bool on_device = false, detached = false;
    idist_status status = idist__call_route(g, c, o, &on_device, &detached);

    if (status != IDIST_OK) return status;
    if (g->status != IDIST_OK)
        return idist__fail(g->status, "%s: the group failed earlier: %s", name, g->cause);
    if (g->w->thread_stops) // another thread has ended the calls, and would not see this one
        return idist__fail(IDIST_ERR_ABORTED, "%s: another thread closes the world", name);

    if (!on_device && idist__call_quick(g, c, o)) {
        if (o->request) o->request->impl = &idist__call_complete;
        return IDIST_OK;
    }

    return idist__call_begin(g, c, o, on_device, detached);
}

static idist_status idist__call_locked(idist_group *g, const idist__call *c, const idist_opts *o) {
    idist_status status = idist__check_call(g, c);
    return status == IDIST_OK ? idist__call_checked(g, c, o) : status;
}

static idist_status idist__call_traced(idist_group *g, const idist__call *c, const idist_opts *o) {
    return idist__tracer_now() ? idist__tracer_now()->call(g, c, o) : idist__call_locked(g, c, o);
}

// Whether a plan keeps this call of this group already.
static bool idist__call_is_kept(const idist_group *g, const idist_plan *plan,
                                const idist__fingerprint *call) {
    idist__fingerprint kept;

    if (!plan->call.kind || plan->world_serial != g->w->serial || plan->ctx != g->ctx) return false;
    kept = idist__fingerprint_of_call(g->w, &plan->call, 0);

    return idist__fingerprint_equal(&kept, call);
}

// The number of a plan that is filled with this call; 0: of a message, which needs none. A plan
// that kept the same call keeps its number.
static idist_status idist__call_number_plan(idist_group *g, const idist_plan *plan,
                                            const idist__call *c, uint32_t *number) {
    idist__fingerprint call = idist__fingerprint_of_call(g->w, c, 0);
    idist__planned *p = g->planned;

    *number = idist__kind_is_p2p(c->kind) ? 0 : plan->call.plan;
    if (idist__kind_is_p2p(c->kind) || idist__call_is_kept(g, plan, &call)) return IDIST_OK;
    while (p && memcmp(&p->call, &call, sizeof call) != 0) p = p->next;

    if (!p) {
        p = (idist__planned *)idist__mem_alloc(&g->w->cfg.mem, sizeof *p);
        if (!p) return IDIST_ERR_NO_MEMORY;
        p->call = call;
        p->next = g->planned;
        g->planned = p;
    }

    *number = p->count++ % IDIST__PLAN_MAX + 1;

    return IDIST_OK;
}

// Keeps a call for idist_plan_start.
static idist_status idist__call_plan(idist_group *g, const idist__call *c, const idist_opts *o) {
    idist_plan *plan = o->plan;
    uint32_t number;
    idist_status status = idist__check_call(g, c);

    if (status != IDIST_OK) return status;
    if (o->request)
        return idist__fail(
            IDIST_ERR_ARG,
            "%s: with opts.plan, opts.request must be NULL; idist_plan_start takes it",
            idist__kind_names[c->label]);
    status = idist__call_number_plan(g, plan, c, &number);
    if (status != IDIST_OK) return status;

    plan->call = *c;
    plan->call.plan = number;
    plan->opts = *o;
    plan->opts.plan = NULL;
    plan->opts.group = g;
    plan->world_serial = g->w->serial;
    plan->ctx = g->ctx;
    plan->rank = g->rank;
    plan->size = g->size;

    return IDIST_OK;
}

// A call that has failed leaves an empty request, which the program may wait for like the others.
// idist_group_end returns the first failure of a call in between.
static idist_status idist__call_ended(idist_status status, idist_request *request) {
    if (status == IDIST_OK) return IDIST_OK;
    if (request) request->impl = NULL;

    if (idist__me.group_depth && idist__me.group_status == IDIST_OK) {
        idist__me.group_status = status;
        memcpy(idist__me.group_text, idist__me.text, sizeof idist__me.group_text);
    }

    return status;
}

// Whether a send or receive is the ordinary one: host memory, a buffer, a dtype of idist and a tag.
static bool idist__call_is_plain(const idist__world *w, const idist__call *c, const idist_opts *o) {
    if (w->device_api || idist__tracer_now() || o->stream || o->plan) return false;
    if ((unsigned)c->dtype >= IDIST_DTYPE_COUNT || c->count > SIZE_MAX / 16) return false;
    return c->tag >= 0 && (c->send || c->recv);
}

// Whether a group, whose world is locked, can take a message to or from this rank by the short way.
// Another thread may have closed the world: then the rest of the struct is zero.
static bool idist__call_is_ready(const idist_group *g, const idist__call *c) {
    if (!g->w || g->status != IDIST_OK || g->w->thread_stops || g->rank < 0) return false;
    return g->w->backend->quick_message && c->root >= 0 && c->root < g->size;
}

static idist_opts idist__call_defaults; // all zero; never written

static idist_status idist__call_run(const idist__call *c, const idist_opts *opts) {
    const idist_opts *o = opts ? opts : &idist__call_defaults;
    idist_group *g = NULL;
    idist_status status = idist__call_enter(idist__kind_names[c->label], o->group, &g);

    if (g) {
        status = o->plan ? idist__call_plan(g, c, o) : idist__call_traced(g, c, o);
        idist__os_mutex_unlock(&g->w->lock);
    }

    return idist__call_ended(status, o->request);
}

// A send or receive. In the ordinary case nothing can be wrong with the call, and it gets by with
// fewer checks; otherwise, and while another thread has the lock, it goes by idist__call_run.
static idist_status idist__call_message(const idist__call *c, const idist_opts *opts) {
    const idist_opts *o = opts ? opts : &idist__call_defaults;
    idist_group *g = o->group;
    idist__world *w = g ? g->w : __atomic_load_n(&idist__default_world, __ATOMIC_ACQUIRE);
    bool blocks = !o->request && !idist__me.group_depth, done;
    idist_status status = IDIST_OK;

    if (!w || idist__world_forked(w) || idist__me.callbacks || (g && g->freed) ||
        !idist__os_mutex_try_lock(&w->lock))
        return idist__call_run(c, opts);

    if (!g) g = &w->group;

    if (!idist__call_is_ready(g, c) || !idist__call_is_plain(w, c, o)) {
        idist__os_mutex_unlock(&w->lock);
        return idist__call_run(c, opts);
    }

    done = blocks && !w->tasks ? w->backend->quick(g, c) : w->backend->quick_message(g, c);
    if (!done) status = idist__call_begin(g, c, o, false, false);
    else if (o->request) o->request->impl = &idist__call_complete;
    idist__os_mutex_unlock(&w->lock);

    return done ? IDIST_OK : idist__call_ended(status, o->request);
}

//------------------------------------------------------------------------------
// [core:message]  a message and the receive that takes it
// uses base:type kind model world fingerprint task
//------------------------------------------------------------------------------

// Messages up to this size are sent before anybody asks for them.
static const size_t IDIST__EAGER_BYTES = (size_t)64 * 1024;

// Messages of idist itself have negative tags, which the program does not see.
static bool idist__matching_has_tag(const idist__call *recv, int tag) {
    return recv->tag == tag || (recv->tag == IDIST_ANY_TAG && tag >= 0);
}

// Whether a receive takes a message from a rank of the world.
IDIST__UNUSED static bool idist__matching_matches(const idist__task *t, int rank, int tag) {
    const idist__call *c = &t->call;
    return (c->root == IDIST_ANY_SOURCE || t->group->ranks[c->root] == rank) &&
           idist__matching_has_tag(c, tag);
}

static void idist__matching_describe(const idist__call *c, int source, int tag, idist_dtype dtype,
                                     size_t count) {
    if (!c->info) return;
    c->info->source = source;
    c->info->tag = tag;
    c->info->count = count;
    c->info->dtype = dtype;
}

// The dtype of a message; IDIST_DTYPE_COUNT: this rank has not created it.
static idist_dtype idist__matching_dtype(const idist__world *w, const idist__fingerprint *sent) {
    idist_dtype dtype = idist__world_dtype(w, sent->dtype);
    int user = idist__dtype_user_number(dtype);

    if (user < 0 || w->dtypes[user].tag == sent->check >> (64 - IDIST__TAG_BITS)) return dtype;
    return IDIST_DTYPE_COUNT;
}

// Tags of matched messages: 2^30 - 1 numbers below the tags of idist_new_group_by_members.
enum { IDIST__MATCHED_FIRST = INT32_MIN, IDIST__MATCHED_COUNT = 0x3fffffff };

// A matched probe has found a message: gives it a tag of its own, which only idist_mrecv asks for.
static void idist__matching_match(const idist__task *t, int *tag) {
    idist_message *message = t->call.u.message;

    *tag =
        IDIST__MATCHED_FIRST + (int)(t->group->w->matched_count++ % (uint32_t)IDIST__MATCHED_COUNT);
    message->group = t->group;
    message->world = t->group->w->serial;
    message->ctx = t->group->ctx;
    message->number = *tag;
}

// Checks a message against the receive that takes it; true when it may be taken. Otherwise *status
// and the text are for the receive, which ends, and the message stays for another one, with *tag,
// which may be new. source: rank in the group.
static bool idist__matching_fits(const idist__task *t, const idist__fingerprint *sent, int source,
                                 int *tag, idist_status *status, char *text, size_t cap) {
    const idist__call *recv = &t->call;
    const idist__world *w = t->group->w;
    size_t count = (size_t)idist__fingerprint_count(sent);
    bool same = sent->dtype == (uint8_t)recv->dtype &&
                sent->check == idist__fingerprint_tagged(w, recv, count);
    idist_dtype dtype = same ? recv->dtype : idist__matching_dtype(w, sent);
    int sent_tag = recv->label == IDIST__MRECV ? recv->u.message->info.tag : *tag;

    *status = IDIST_OK;
    text[0] = 0;
    idist__matching_describe(recv, source, sent_tag, dtype, count);

    if (recv->peeks) {
        if (recv->u.message) idist__matching_match(t, tag);
        return false;
    }

    if (!same) {
        *status = IDIST_ERR_MISMATCH;
        snprintf(text, cap,
                 "rank %d sent %s x %zu with tag %d: the dtype differs. The message is kept for "
                 "another receive",
                 source,
                 dtype == IDIST_DTYPE_COUNT ? "a dtype that this rank has not created"
                                            : idist__world_dtype_name(w, dtype),
                 count, sent_tag);
    } else if (count > recv->count) {
        *status = IDIST_ERR_TRUNCATED;
        snprintf(text, cap,
                 "rank %d sent %zu elements with tag %d. The message is kept for a larger receive",
                 source, count, sent_tag);
    } else if (recv->u.message) {
        recv->u.message->group = NULL;
    }

    return *status == IDIST_OK;
}

static void idist__matching_received(idist__task *t, int source, int tag, size_t count) {
    idist__matching_describe(&t->call, source, tag, t->call.dtype, count);
    idist__task_complete(t, IDIST_OK, "");
}

//------------------------------------------------------------------------------
// [core:self]  the backend of a world of 1
// uses descriptor mutex poll fail text mem base:type reduce launch:env kind
// uses model backend world fingerprint task block extent message
//
// Other backends use idist__self_collective for their groups of 1, too.
//------------------------------------------------------------------------------

// A message from this rank to itself. Small ones are copied so that a blocking send returns; large
// ones wait for their receive.
typedef struct idist__parcel {
    struct idist__parcel *next;
    int tag;
    idist__fingerprint sent;
    size_t nbytes;
    const void *data;
    idist__task *sender; // NULL: data is a copy behind this struct
} idist__parcel;

typedef struct idist__self_group {
    idist__parcel *parcels; // in the order in which they were sent
} idist__self_group;

// Any collective among one rank: its own contribution is the result.
static void idist__self_collective(idist__task *t) {
    const idist__call *c = &t->call;
    const idist__user_op *op =
        (int)c->op >= IDIST_OP_USER ? idist__world_user_op(t->group, c) : NULL;

    if (c->kind != IDIST__BARRIER && c->kind != IDIST__BROADCAST && c->kind != IDIST__EXSCAN) {
        size_t count;
        const char *from = idist__extent_part(c, (char *)(uintptr_t)c->send, 0, 0, true, &count);

        idist__block_copy(idist__extent_part(c, (char *)c->recv, 0, 0, false, &count), from,
                          count * idist_dtype_size(c->dtype));
        if (idist__kind_reduces(c->kind) && op && !op->fn)
            idist__reduce_scale(c->recv, count, c->dtype, op->factor);
        if (idist__kind_reduces(c->kind) && !op)
            idist__reduce_finish(c->recv, count, c->dtype, c->op, 1);
    }

    idist__task_complete(t, IDIST_OK, "");
}

static void idist__self_drop(idist_group *g, idist__parcel **at) {
    idist__parcel *p = *at;
    *at = p->next;
    idist__mem_free(&g->w->cfg.mem, p);
}

// Gives a parcel to the receive that wants it; it stays when it does not fit.
static void idist__self_deliver(idist__task *t, idist__parcel **at) {
    idist__parcel *p = *at;
    idist__task *sender = p->sender;
    size_t count = (size_t)idist__fingerprint_count(&p->sent);
    int tag = p->tag;
    char text[256];
    idist_status status;

    if (!idist__matching_fits(t, &p->sent, 0, &p->tag, &status, text, sizeof text)) {
        idist__task_complete(t, status, text);
        return;
    }

    idist__block_copy(t->call.recv, p->data, p->nbytes);
    idist__self_drop(t->group, at);
    if (sender) idist__task_complete(sender, IDIST_OK, "");
    idist__matching_received(t, 0, tag, count);
}

// The parcel that a receive of this group takes, or NULL.
static idist__parcel **idist__self_find(const idist__task *t) {
    idist__parcel **at = &((idist__self_group *)t->group->impl)->parcels;

    for (; *at; at = &(*at)->next)
        if (idist__matching_has_tag(&t->call, (*at)->tag)) return at;
    return NULL;
}

// Gives parcels to receives, oldest first, as long as any match.
static void idist__self_match(idist_group *g) {
    idist__task *t, *oldest;

    do {
        idist__parcel **found = NULL;
        oldest = NULL;

        for (t = g->w->tasks; t; t = t->next) { // newest first
            idist__parcel **at;

            if (t->group != g || t->call.kind != IDIST__RECV || t->away) continue;
            at = idist__self_find(t);
            if (!at) continue;
            oldest = t;
            found = at;
        }

        if (oldest) idist__self_deliver(oldest, found);
    } while (oldest);
}

static void idist__self_send(idist__task *t) {
    idist_group *g = t->group;
    idist__self_group *sg = (idist__self_group *)g->impl;
    size_t nbytes = t->call.count * idist_dtype_size(t->call.dtype);
    bool copy = nbytes <= IDIST__EAGER_BYTES;
    size_t parcel_nbytes = sizeof(idist__parcel) + (copy ? nbytes : 0);
    idist__parcel *p = (idist__parcel *)idist__mem_alloc(&g->w->cfg.mem, parcel_nbytes), **last;

    if (!p) {
        idist__task_complete(t, IDIST_ERR_NO_MEMORY, "out of memory");
        return;
    }

    p->tag = t->call.tag;
    p->sent = idist__fingerprint_of_task(t, IDIST__ALGO_AUTO);
    p->nbytes = nbytes;
    p->data = t->call.send;
    p->sender = copy ? NULL : t;

    if (copy) {
        p->data = p + 1;
        idist__block_copy(p + 1, t->call.send, nbytes);
    }

    for (last = &sg->parcels; *last; last = &(*last)->next) continue;
    *last = p;
    if (copy) idist__task_complete(t, IDIST_OK, "");
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

// A receive that runs has found no message: those that are there go to it at once.
static bool idist__self_retract(idist__task *t) {
    (void)t;
    return true;
}

// Nothing comes from outside a world of 1, so only wake or the deadline end the sleep.
static void idist__self_sleep(idist__world *w, int64_t until_ns) {
    int wake = *(int *)w->impl;
    bool woken;

    idist__os_mutex_unlock(&w->lock);
    woken = idist__os_poll_wait(wake, IDIST__OS_READABLE, until_ns);
    idist__os_mutex_lock(&w->lock);
    if (woken) idist__os_poll_wakeup_clear(wake);
}

static void idist__self_wake(idist__world *w) { idist__os_poll_wakeup_signal(*(int *)w->impl); }

static idist_status idist__self_open(idist__world *w) {
    int *wake = (int *)idist__mem_alloc(&w->cfg.mem, sizeof *wake);

    if (!wake) return IDIST_ERR_NO_MEMORY;
    *wake = idist__os_poll_wakeup_new();

    if (*wake < 0) {
        idist__mem_free(&w->cfg.mem, wake);
        return idist__fail_errno("initialize: opening a wake-up descriptor", errno);
    }

    w->impl = wake;
    idist__text_copy(w->nodes[0].hostname, sizeof w->nodes[0].hostname, w->hostname);

    return IDIST_OK;
}

static void idist__self_close(idist__world *w, bool clean) {
    (void)clean;
    idist__os_descriptor_close((int *)w->impl);
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
    idist__text_append(text, cap,
                       t->call.kind == IDIST__SEND ? "a receive in this rank"
                                                   : "a send in this rank");
    return 1;
}

static idist_status idist__self_claim(idist__config *c, const char **why) {
    *why = "it serves a world of 1 only";
    return c->world_size > 1 ? IDIST_ERR_NO_BACKEND : IDIST_OK;
}

static void idist__self_fill(idist_backend_api *api) {
    api->name = "self";
    api->group_nbytes = sizeof(idist__self_group);
    api->claim = idist__self_claim;
    api->open = idist__self_open;
    api->close = idist__self_close;
    api->group_open = idist__self_group_open;
    api->group_close = idist__self_group_close;
    api->start = idist__self_start;
    api->progress = idist__self_progress;
    api->sleep = idist__self_sleep;
    api->wake = idist__self_wake;
    api->cancel = idist__self_cancel;
    api->retract = idist__self_retract;
    api->tell = idist__self_tell;
    api->flush = idist__self_flush;
    api->announce = idist__self_announce;
    api->missing = idist__self_missing;
}

const idist_backend_api *idist_self_backend(void) {
    static idist_backend_api api;
    return idist__backend_fill(&api, idist__self_fill);
}

__attribute__((constructor(IDIST__REGISTER_LAST_RESORT))) static void idist__self_register(void) {
    (void)idist_register_backend(idist_self_backend());
}

#endif // IDIST_CORE_H
