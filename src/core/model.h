// core/model.h: calls, tasks, groups and worlds as data; the contracts with backends
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
#pragma once

#include "os/thread.h"
#include "base/log.h"
#include "base/dtype.h"
#include "launch/env.h"
#include "core/kind.h"

typedef struct idist__task idist__task;
typedef struct idist__world idist__world;

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
    uint32_t tag; // not 0; see core/fingerprint.h
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
    int32_t root;      // see core/fingerprint.h
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

// Says which backend works on a task. A task changes between ON_HOST and ON_DEVICE as often as the
// device backend needs, and from either to DONE, which is final. A call on device memory is ON_HOST
// while the host backend moves a part of the call.
typedef enum idist__task_state {
    IDIST__TASK_ON_HOST,
    IDIST__TASK_ON_DEVICE,
    IDIST__TASK_DONE
} idist__task_state;

// Who waits for a task. From CALLER a task may go to STREAM; from REQUEST to STREAM or NOBODY.
typedef enum idist__task_waiter {
    IDIST__WAITER_CALLER,  // inside the call
    IDIST__WAITER_REQUEST, // who holds the request
    IDIST__WAITER_NOBODY,  // idist_request_free has let the request go
    IDIST__WAITER_STREAM   // the device's stream: the call has returned
} idist__task_waiter;

// Whether a thread works on a task without the lock. A task goes from FREE to PINNED and back, or
// from PINNED to LEFT, and then that thread frees it.
typedef enum idist__task_pin {
    IDIST__PIN_FREE,
    IDIST__PIN_PINNED,
    IDIST__PIN_LEFT // the task was freed while it was pinned
} idist__task_pin;

// One operation under way. idist__task_new clears the fields before `text` and no others.
struct idist__task {
    idist__task *next, *prev; // in w->tasks.running while it runs
    idist__task *list_next;   // in the list of an idist_group_begin, or in w->tasks.detached
    idist__task *older;       // in w->tasks.all
    idist_group *group;
    idist__call call;
    idist_status status;
    idist__task_state state;
    idist__task_waiter waiter;
    idist__task_pin pin;
    struct {            // what core/timer.h has done about a task that takes long
        bool announced; // told the other members that this rank waits in it
        bool asked;     // of a message: asked its peer whom that rank waits for
        bool warned;    // logged that it takes long; may ask once more after that
    } late;
    bool patient; // has the group's time-out: the caller expects no return without a result
    uint32_t seq; // number within the group; 0: point-to-point, or not numbered yet
    idist__fingerprint whole; // the call it is part of; kind 0: it is a call of its own
    uint16_t parent_past;     // digest of the calls before that one
    int timeout_ms;
    int64_t started_ns, deadline_ns;
    bool on_device; // the device backend takes part
    bool followed;  // idist_wait_stream need not wait for the host any more
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
// use all that stands in this file above core/call.h, core/matching.h, idist__self_collective, and
// the files that this one uses. Of a task it writes only call.u.user and what `impl` points to, of
// a group what `impl` points to; of the world it sets impl, nodes, what is in `machine`,
// about.advertised and about.network, and counts wait.moved_count up for each step forward.
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
    bool (*quick)(idist_group *g, const idist__call *call);

    // Optional. Tries a send or a receive without a task, and without waiting; there may be tasks.
    // True: it is complete. False: start follows, for a call of which nothing has begun.
    bool (*quick_message)(idist_group *g, const idist__call *call);

    // Optional. Whether a call on this group may have its buffer in parts. This rank alone asks;
    // for the others the call is like any other.
    bool (*takes_parts)(const idist_group *g, const idist__call *call);

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
    // given up (g->asked_ns). For a message the second call (late.asked) finds out whom the peer
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
    // the names. Without one: fills w->about.no_device. If it fails, the core closes the world.
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
// w->life.abandoned and leaves its data and this table in place.
typedef struct idist_device_api {
    // Whether a call is for the device (*on_device), by looking at its buffers and its stream.
    // *detached: nobody is to wait for the task, because the stream orders what follows. May block:
    // the first such call of a group waits here for the other members, with the lock released. On
    // failure the call has not begun and has no number.
    idist_status (*route)(idist_group *g, const idist__call *call, const idist_opts *opts,
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
    // others, and first ends what they may wait for on the device if w->life.leaves. Called once,
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

// What idist_show_config and error texts say of a world.
typedef struct idist__world_about {
    char hostname[64];
    char advertised[160];       // where other hosts reach this rank, and its interface; "": nowhere
    char network[96];           // what is known of the network between the hosts; "": nothing
    char sharing[300];          // how the ranks of this host exchange data; "": it has no other
    char backends[512];         // names of those registered
    char device_name[32];       // "cuda:0"
    char no_device[200];        // why there is none
    const char *device_backend; // how it moves device memory
} idist__world_about;

// What the backend has found out when the ranks met.
typedef struct idist__world_machine {
    int ncores; // that the ranks of this host may use together; 0: the backend could not tell
    // Among the ranks that have the same processors, perhaps as several hosts, in containers; 0, 0:
    // the backend could not tell.
    int sharing_rank, sharing_size;
    // What the network between hosts moves in the time that an empty message takes; 0: not known.
    uint64_t latency_nbytes;
    // What is under way between two hosts while they use all of the network; 0: not known.
    uint64_t network_nbytes;
    int foreign_thread_count; // threads of other libraries, which never call
    bool one_thread_calls;    // the program must not call from two threads at a time
    bool single_threaded;     // the backend allows one thread only: requests move on inside calls
} idist__world_machine;

typedef struct idist__world_tasks {
    idist__task *running;         // newest first
    idist__task *idle;            // to be used again
    idist__task *all;             // ever allocated; freed with the world
    idist__task *detached;        // running or done, newest first
    uint32_t detached_done_count; // those in the list that are done
    int async_count;              // running tasks with a request
    int let_go_count;             // of those, the ones that idist_request_free has let go
    uint32_t request_count;       // requests that have begun, not counting those complete at once
    uint32_t matched_count;       // messages that matched probes have found
    int deferred_count; // tasks that an open idist_group_begin keeps, and threads for which the
                        // device backend holds calls back
} idist__world_tasks;

// Waiting for tasks, and who moves them meanwhile.
typedef struct idist__world_wait {
    idist__driver driver;
    int blocked_count;    // callers inside idist__wait_until, or between two such waits
    uint32_t ended_count; // tasks that have ended
    uint32_t moved_count; // steps forward inside tasks
    uint32_t drive_count; // how often a caller has moved the backend while it waited or tested
    int64_t spin_ns; // how long a caller polls before it sleeps; 0: it yields a few times instead
    int64_t spin_budget_ns;     // the part of spin_ns that has proved worth it lately
    uint32_t lock_waiter_count; // threads that wait for the lock
    int64_t next_look_ns;       // when a thread that polls looks at the timers again
    int64_t timers_due_ns;      // no task needs idist__timer_run before
} idist__world_wait;

// The progress thread.
typedef struct idist__world_progress {
    idist__os_thread thread;
    bool running, stops;
    bool naps;    // it looks again soon, and needs no signal
    bool watched; // the device may wait for other ranks while no caller does: the thread looks
                  // after the connections
} idist__world_progress;

typedef struct idist__world_groups {
    idist_group *freed;     // to be used again
    int making_count;       // groups being made
    uint64_t serial;        // of this world in the process, from 1 on
    uint64_t member_groups; // more than the serial of any group that its members made alone
} idist__world_groups;

// What the program has registered.
typedef struct idist__world_registered {
    idist__user_op ops[IDIST_OP_LAST - IDIST_OP_USER + 1];
    idist__user_dtype dtypes[IDIST__USER_DTYPES];
} idist__world_registered;

// The end of a world.
typedef struct idist__world_life {
    bool closing;   // a thread closes the world: no call may begin that outlasts its function
    bool is_cause;  // this rank has aborted the world, so no lost rank is the cause of its end
    bool leaves;    // the world ends after a failure: the other ranks have not reached its end
    bool abandoned; // the world ends while a thread is still inside a call: what the thread may
                    // touch is never freed
} idist__world_life;

struct idist__world {
    idist_group group; // all ranks; first, so that a world is its group
    idist__config cfg;
    idist__log log;
    uint32_t process;        // the number of the process that made it; 0: unknown
    idist__rank_info *nodes; // of every rank
    int nnodes;

    const idist_backend_api *backend;
    void *impl;                            // the backend's part
    idist_status (*wrap)(idist__world *w); // of the device backend that the program has, or NULL
    const idist_device_api *device_api;    // NULL: this world has no device
    void *device;                          // the device backend's part

    idist__os_mutex lock;   // over all that changes while the world is open
    idist__os_cond changed; // a task ended, or nobody drives any more: for callers
    idist__os_cond work;    // there is a request and no caller: for the progress thread

    idist__world_about about;
    idist__world_machine machine;
    idist__world_tasks tasks;
    idist__world_wait wait;
    idist__world_progress progress;
    idist__world_groups groups;
    idist__world_registered user;
    idist__world_life life;
};
