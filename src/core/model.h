// core/model.h: calls, tasks, groups and worlds as data; the contracts with backends
//
//     idist__world --- nodes[rank]                      who the ranks are and where they run
//        |   |
//        |   +------- group -> next -> next ...         the world is its own first group
//        |              ^
//        +--- tasks ----+-- call                        each running task belongs to one group
//
// A call says what the user asked for. A task is a call in progress. A fingerprint is the part of a
// call that must be equal on all ranks; every message of the call carries the fingerprint. A
// backend moves the data. This file also declares the function tables of backends and device
// backends.
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
    idist_op_fn fn; // NULL for a premultiplied sum
    void *arg;
    double factor; // for a premultiplied sum
    bool used, commutative;
} idist__user_op;

// A dtype that the program created.
typedef struct idist__user_dtype {
    char name[32];
    uint32_t tag; // not 0; see core/fingerprint.h
    bool used;
    idist_dtype dtype;
} idist__user_dtype;

// One part of a buffer that is not contiguous.
typedef struct idist__part {
    char *data;
    size_t end; // number of elements in this part and all earlier parts
} idist__part;

// A call: an operation with its arguments.
typedef struct idist__call {
    idist__kind kind;  // operation that runs
    idist__kind label; // operation that the user called
    const void *send;
    void *recv;
    size_t count; // as in the API; in a v-form, the count of this rank's own part
    const size_t *sendcounts, *senddispls, *recvcounts, *recvdispls;
    idist_dtype dtype;
    idist_op op;
    int root; // or the peer of a send or receive; -1 if there is none
    int tag;
    idist_recv_info *info;
    // The parts of the buffer of an in-place all_reduce, if the buffer is not contiguous. Otherwise
    // NULL and 0.
    const idist__part *parts;
    int part_count;
    bool peeks;         // true for a probe: a receive that describes a message and leaves it
    uint32_t dtype_tag; // tag of a user dtype when the call began; 0 if not looked up yet
    uint32_t plan;      // number of the plan that makes this collective; 0 if there is none
    uint64_t check;     // the count, or a hash of the counts; must be equal on all ranks
    union {
        // Copy of the op of a reduction. The backend makes the copy, because the program may free
        // the op while the call runs. If NULL, idist__world_user_op finds the op in the world.
        const idist__user_op *user;
        idist_message *message; // for a matched probe, and for the receive that takes its message
    } u;
} idist__call;

// A call that the program keeps for idist_plan_start, and its group.
struct idist_plan {
    idist__call call; // kind 0 (IDIST__NONE) if the plan is empty
    idist_opts opts;
    uint64_t world_serial, ctx; // identify the group
    int rank, size;             // rank in the group and its size when the call was checked
};

// The part of a call that two ranks compare: 24 bytes in every message.
typedef struct idist__fingerprint {
    uint8_t kind, dtype, op;
    uint8_t algorithm; // an idist__algorithm, perhaps combined with IDIST__ON_DEVICE
    int32_t root;      // see core/fingerprint.h
    // See idist__call. For a send, the count. For a user dtype, also the tag of the dtype.
    uint64_t check;
    uint32_t seq;   // number of the call within its group
    uint32_t whole; // number of the larger call that this call is a part of; 0 if none
} idist__fingerprint;

enum { IDIST__ON_DEVICE = 0x80 }; // a call on device memory

// A collective that one or more plans of a group keep.
typedef struct idist__planned {
    struct idist__planned *next;
    idist__fingerprint call;
    uint32_t count; // number of plans that were filled with it
} idist__planned;

// The backend that works on a task. A task changes between ON_HOST and ON_DEVICE as often as the
// device backend needs. From both states it can change to DONE, which is final. A call on device
// memory is ON_HOST while the host backend moves a part of the call.
typedef enum idist__task_state {
    IDIST__TASK_ON_HOST,
    IDIST__TASK_ON_DEVICE,
    IDIST__TASK_DONE
} idist__task_state;

// The party that waits for a task. A task may change from CALLER to STREAM, and from REQUEST to
// STREAM or NOBODY.
typedef enum idist__task_waiter {
    IDIST__WAITER_CALLER,  // the caller, inside the call
    IDIST__WAITER_REQUEST, // the holder of the request
    IDIST__WAITER_NOBODY,  // nobody: idist_request_free has freed the request
    IDIST__WAITER_STREAM   // the device's stream: the call has returned
} idist__task_waiter;

// The pin of a task. A thread works on a pinned task without the lock. A task changes from FREE to
// PINNED and back, or from PINNED to LEFT. If the task is LEFT, the thread that pinned the task
// frees it.
typedef enum idist__task_pin {
    IDIST__PIN_FREE,
    IDIST__PIN_PINNED,
    IDIST__PIN_LEFT // the task was freed while it was pinned
} idist__task_pin;

// A call in progress. idist__task_new clears the fields before `text` and no other fields.
struct idist__task {
    idist__task *next, *prev; // in w->tasks.running while the task runs
    idist__task *list_next;   // in the list of an idist_group_begin, or in w->tasks.detached
    idist__task *older;       // in w->tasks.all
    idist_group *group;
    idist__call call;
    idist_status status;
    idist__task_state state;
    idist__task_waiter waiter;
    idist__task_pin pin;
    struct {            // what core/timer.h has done about a slow task
        bool announced; // has told the other members that this rank waits in the task
        bool asked;     // has asked the peer of a message which rank the peer waits for
        bool warned;    // has logged that the task is slow; may ask once more afterwards
    } late;
    bool patient;             // the deadline is the world's, not one that the caller has set
    uint32_t seq;             // number within the group; 0 if point-to-point, or not numbered yet
    idist__fingerprint whole; // the larger call that the task is a part of; kind 0 if none
    uint16_t parent_past;     // digest of the calls before the larger call
    int timeout_ms;
    int64_t started_ns, deadline_ns;
    bool on_device; // the device backend takes part
    bool followed;  // idist_wait_stream no longer needs to wait for the host
    void *copy;     // copy of a send buffer that the call overwrites, or NULL
    // Continues the request when this task is done; NULL if nothing follows. The thread that waits
    // for or tests the request calls this function, with the lock held. The function puts another
    // task into the request, or sets `then` to NULL.
    void (*then)(idist__task *t, idist_request *request);
    void *then_arg;
    void *stream;   // stream of the device; the task starts after the work already in it
    void *impl;     // the backend's part, stored after this struct
    void *lane;     // row of the task in the timeline, or NULL
    char text[512]; // why the task failed
    // These fields keep their values when the task is used again.
    void *device;    // the device backend's part
    idist__world *w; // the world of the task's groups
};

struct idist_group {
    idist__world *w; // NULL if the world was closed
    idist_group *next;
    uint64_t ctx; // identifies the group: equal on all members, unique in the world
    int rank;     // -1 if this rank is not a member
    int size;
    int *ranks;              // world rank of each member
    uint32_t seq;            // number of collectives started
    uint32_t child_count;    // number of groups made from this group
    idist__planned *planned; // collectives that the group's plans keep
    int running_count;       // running tasks, and calls that prepare the group for a device
    int open_request_count;  // requests that nobody has waited for yet
    int detached_count;      // running tasks that nobody waits for, and pinned tasks
    idist_status status;     // if not IDIST_OK, the group is unusable
    char cause[400];         // what made the group unusable
    bool freed;
    int64_t asked_ns;          // time when `announce` last asked the members; 0 if never
    int64_t asked_before_ns;   // previous value of asked_ns
    int64_t asked_until_ns;    // time when the answers are used; nobody asks again before this time
    bool inner;                // made by a backend for its own use
    bool failure_flushed;      // this rank has waited until the failure was sent
    idist_group *host_group;   // members on this host; idist_one_rank_first makes it when needed
    const idist_group *parent; // set while the group is being made; a failed parent fails the group
    void *impl;                // the backend's part
    void *device;              // the device backend's part
};

// The place where a rank runs.
typedef struct idist__rank_info {
    char hostname[64];
    uint64_t host; // equal for ranks on one host
    int local_rank, local_size, node_rank;
} idist__rank_info;

// ---- the contract between the core and a backend ----
//
// A backend moves host memory between ranks. It is a table of functions, filled by field name (see
// idist__backend_fill, and idist_self_backend as an example) and registered with
// idist_register_backend. Only the fields marked "optional" may be NULL; the backend then lacks
// that feature. A device backend is the exception: it sets name, claim and wrap, and leaves all
// other fields 0.
//
//     claim -> open -> group_open (world) -> [ start, progress, sleep ... ] -> group_close -> close
//                                                 |  group_open, offer, meet, group_close
//                                                 +- for each further group
//
// Lock. The core calls claim, open, wrap and close without the world's lock. It calls alloc with or
// without the lock; alloc must not take the lock. It calls all other functions with the lock held.
// There are two exceptions: the core does not hold the lock for group_open of the world's own
// group, or for group_close while the world closes. While the world closes, threads whose calls
// were ended may still be leaving the world. Several threads may call claim and alloc at once.
//
// Blocking. open, close and wrap may wait for other ranks. sleep and flush wait, and release the
// lock while they wait. shrink and agree wait for the other members and keep the lock. No other
// call on this world proceeds meanwhile, not even idist_abort. quick may poll for as long as it
// takes to hand over a small message, which is less than a millisecond. tell may wait until nobody
// reads the buffers of the failed group any more. All other functions, including alloc, return at
// once.
//
// Some libraries offer only blocking calls. On such a library group_open may block. A collective
// may also block, if all ranks have entered the call or if the ranks do not compare it
// (cfg.unchecked). A device backend may release the lock in start while it hands a call to the
// device's library or adds work to a stream.
//
// Ownership. The core allocates and frees idist__task, idist_group and idist__world. With each task
// and group it allocates the bytes that the backend asks for (task_nbytes, group_nbytes). The bytes
// of a group are zeroed; the bytes of a task are not. The caller's buffers, and the arrays of a
// v-form, belong to the backend from start until it calls idist__task_complete, or until cancel
// returns. The backend frees any other memory that it allocates (idist__mem_alloc with &w->cfg.mem)
// in group_close or close.
//
// Failure. If a function that returns a status fails, it has undone everything it did. The core
// then does not call its counterpart: no close after a failed open, no group_close after a failed
// group_open. The function has recorded the reason with idist__fail. For IDIST_ERR_NO_BACKEND,
// claim stores the reason in *why instead. A function without a status reports a failure with
// idist__task_complete (of this task) or idist__group_fail (of this group). When idist__group_fail
// returns, all tasks of the group have ended.
//
// Calls. The core has checked the arguments of a call as far as one rank can (idist__check_call),
// and has numbered the call (task->seq). The backend gets all calls of the group, including:
//
//   - calls on a group of one rank. idist__self_collective performs the collectives. Messages of a
//     rank to itself obey the same rules as all other messages;
//   - calls of count 0, whose buffers may be NULL. They synchronize, and are compared, like all
//     other calls;
//   - calls in place (idist__extent_call_in_place), except all_to_allv, for which the core makes a
//     copy. The backend never writes to the send buffer of a call that is not in place;
//   - calls with any dtype, including the dtypes that the program created.
//
// If the backend lacks a kind, dtype or op, it completes the call with IDIST_ERR_UNSUPPORTED on all
// ranks. Collectives of a group match by seq. Several collectives may be in progress at once, as
// requests or between idist_group_begin and idist_group_end.
//
// Reductions. The order of the operands depends only on sizes and ranks. All ranks that receive a
// result get identical bits. For built-in ops, idist__reduce_many combines any number of
// contributions in the order of ranks. It obeys the rules below.
//
//   - AVG is SUM, with one division by the size of the group at the end. The logical ops return 0
//     or 1 (idist__reduce_finish).
//   - F16, BF16 and the 8-bit floats are added and multiplied as F32 and rounded once, at the end.
//   - Ops from IDIST_OP_USER on belong to the program; idist__world_user_op returns them. The
//     backend copies the op in start, because the program may free the op. If fn is NULL, each
//     contribution is multiplied by the factor of its own rank (idist__reduce_scale) and then
//     added. While fn runs, idist__me.callbacks is above 0. Operands keep the order of ranks. The
//     backend may swap operands only if `commutative` is set.
//
// Messages. A receive takes the oldest message that idist__matching_matches accepts. That function
// handles the wildcards IDIST_ANY_SOURCE and IDIST_ANY_TAG. A message goes to the oldest receive
// that matches it. Messages of one rank with one tag stay in order. If the dtype or the count does
// not fit (idist__matching_fits), only the receive fails. The message waits for another receive,
// with the tag that idist__matching_fits returns: a matched probe gives the message a new tag. A
// send of up to several KiB completes without its receive. idist__matching_received ends a receive.
//
// Mismatches. The core sees one rank only, so the backend compares the calls. Every member shows
// the other members its idist__fingerprint_of_task. All members fail the group with
// IDIST_ERR_MISMATCH if idist__fingerprint_difference names a field, or if the counts of a v-form
// differ (idist__extent_pair, idist__extent_balance). The text comes from idist__explain_mismatch
// or idist__explain_pair. Ranks may also wait for each other in different groups or messages.
// `announce` finds such a deadlock (idist__explain_deadlock). A backend that cannot find deadlocks
// lets the ranks run into the deadline.
//
// Lost ranks. A backend that notices that a rank is gone calls idist__group_lose_rank.
//
// Access. A backend is compiled in the file that defines IDIST_IMPLEMENTATION. It may use all files
// that idist.h includes before core/call.h, and also core/matching.h and idist__self_collective. In
// a task it writes only call.u.user and what `impl` points to. In a group it writes only what
// `impl` points to. In the world it sets impl, nodes, the fields of `machine`, and three texts:
// about.advertised, about.network and about.sharing. It increments wait.moved_count for each step
// forward.
struct idist_backend_api {
    uint32_t abi;        // IDIST__BACKEND_ABI
    uint32_t size;       // of this struct
    const char *name;    // for desc.backend; contains no comma
    size_t task_nbytes;  // number of bytes at task->impl, which are not cleared
    size_t group_nbytes; // number of bytes at group->impl, zeroed before group_open

    // ---- the world ----

    // Returns IDIST_OK if the backend serves this configuration. If the backend does not, returns
    // IDIST_ERR_NO_BACKEND with the reason in *why, and the core asks the next backend. Any other
    // failure ends idist_initialize. May initialize the library on which the backend is built, but
    // allocates nothing for this world. A backend that knows rank and world size better than the
    // launcher's variables sets both.
    //
    // The core asks device backends in every world, after a host backend has claimed the
    // configuration. A device backend returns IDIST_OK if the core should call wrap. It returns
    // IDIST_ERR_NO_BACKEND if the configuration names a device, or a value of
    // config->device_backend, that belongs to another device backend. It returns another error if
    // it does not know the value at all. It knows at least its own name.
    idist_status (*claim)(idist__config *config, const char **why);

    // Blocks until all ranks have met, for up to cfg.init_timeout_ms. Sets w->impl. For each rank,
    // sets hostname and host in w->nodes; the core derives the rest of w->nodes from `host`.
    idist_status (*open)(idist__world *w);

    // Frees everything. If `clean` is true, every rank has passed the last barrier. Otherwise,
    // closes the connections so that messages already sent still arrive, and may block for a moment
    // to do so. If the world has failed (w->group.status), the calls that this rank has completed
    // in other groups should still complete on the other members. On those members, a call that
    // needs this rank fails with the status and the cause of this world.
    void (*close)(idist__world *w, bool clean);

    // ---- groups ----

    // Prepares a group. This rank is a member, and the bytes at g->impl are zero.
    idist_status (*group_open)(idist_group *g);
    // Frees the contents of g->impl, not g->impl itself. No task of the group is running.
    void (*group_close)(idist_group *g);

    // Optional; set both or neither. After group_open the members exchange one number each.
    // group_offer returns the number that this rank offers to the other members. group_meet gets
    // the offers of all members, by rank in the group. If group_meet fails, the group fails. The
    // core owns `offers`. Without these two functions, the core lets only one thread at a time make
    // a group, because group_open may block. The world's own group makes no offers, because open
    // has done all the work.
    uint64_t (*group_offer)(idist_group *g);
    idist_status (*group_meet)(idist_group *g, const uint64_t *offers);

    // ---- tasks ----

    // Optional. Tries a blocking call without a task, while no task is running. Returns true if the
    // call is complete; if it is a collective, quick has counted it in g->seq. If quick returns
    // false, start follows for this call and may continue what quick has begun. start follows even
    // if the group has failed in between.
    bool (*quick)(idist_group *g, const idist__call *call);

    // Optional; a backend that has quick_message must also have quick. Tries a send or a receive
    // without a task and without waiting, while other tasks may be running. Returns true if the
    // call is complete. If quick_message returns false, start follows, and nothing of the call has
    // begun.
    bool (*quick_message)(idist_group *g, const idist__call *call);

    // Optional. Returns true if a call on this group may have its buffer in parts. The answer
    // concerns only this rank; to the other ranks the call is like any other call.
    bool (*takes_parts)(const idist_group *g, const idist__call *call);

    // Begins a task. The backend calls idist__task_complete once, here or later. If quick has
    // failed the group, start completes the task with g->status and g->cause.
    void (*start)(idist__task *t);

    // Advances all tasks that can advance without waiting.
    void (*progress)(idist__world *w);

    // Sleeps until I/O arrives, `wake` is called, or the time until_ns passes. Handles the I/O.
    // until_ns is a time of idist__os_clock_now_ns, or IDIST__FOREVER for no limit. If the time is
    // in the past, sleep checks the connections once. Called by one thread at a time. Releases the
    // lock while it sleeps.
    void (*sleep)(idist__world *w, int64_t until_ns);

    // Ends the sleep of another thread, even if that thread has released the lock but does not
    // sleep yet. Does not block.
    void (*wake)(idist__world *w);

    // Optional. Tells the backend that the first caller begins to wait (`waits` is true), or that
    // the last caller no longer waits (false). While a caller waits, the core calls progress or
    // sleep all the time.
    void (*attend)(idist__world *w, bool waits);

    // Cancels a task. Afterwards the backend touches no byte of the task's buffers, and the core
    // completes the task. Returns false if other ranks were already involved, so that the group
    // cannot continue. The core cancels collectives only after their group has failed and `tell`
    // was called, or when the world closes.
    bool (*cancel)(idist__task *t);

    // Optional, for idist_cancel. If a receive has matched no message, cancels it as `cancel` does,
    // and returns true. Otherwise changes nothing and returns false.
    bool (*retract)(idist__task *t);

    // ---- failures and waiting ----

    // Tells the other members that the group failed, and sends g->status and g->cause. On each of
    // these members, idist__group_fail gets this status and cause. Called once for a group. Queues
    // the messages that cannot be sent immediately.
    void (*tell)(idist_group *g);

    // Sends the messages of `tell` until all are sent or the time until_ns passes. Releases the
    // lock while it sleeps.
    void (*flush)(idist__world *w, int64_t until_ns);

    // Tells the other members that this rank waits in t, so that they can report a mismatch, or
    // answer that they are alive. Called when t has waited for a while. Called again before
    // core/timer.h logs a warning, and before the deadline of t; for a collective, g->asked_ns is
    // the time of that call. For a message, the second call (late.asked) finds out which rank the
    // peer waits for. May end any task.
    void (*announce)(idist__task *t);

    // Appends the ranks that are missing in t, for example "rank 3 on host b (last seen in barrier
    // #6)". Returns the number of missing ranks, which may be 0. See idist__explain_missing_rank
    // and idist__explain_missing_peer.
    int (*missing)(idist__task *t, char *text, size_t cap);

    // ---- more, all optional ----

    // Allocates zeroed memory that other ranks can reach, for idist_alloc. The memory is part of an
    // idist__window, which keeps track of the memory after close and takes it back in idist_free.
    // Must not wait for other ranks, because they do not make this call. Returns NULL if no such
    // memory is left; the core then allocates plain memory.
    void *(*alloc)(idist__world *w, size_t nbytes);

    // Set both or neither. Without them, a group that lost a rank can only be freed. Both functions
    // work in a group that has failed, and block until the surviving members have answered. shrink
    // lists the survivors as world ranks, in the group's order; all survivors get an equal list.
    // shrink raises *serial to the largest value that a survivor passed. group_open follows for
    // these ranks. agree sets *flag to the bitwise AND over the survivors. The core does not call
    // agree in a group of one rank.
    idist_status (*shrink)(idist_group *g, int *ranks, int *n, uint32_t *serial);
    idist_status (*agree)(idist_group *g, int *flag);

    // Puts a device backend in front of the world's backend. Only a device backend, which serves no
    // world alone, sets this field. Collective; called after the world's group_open. If there is a
    // device, wrap replaces w->backend by a table that passes on the calls for host memory. It also
    // sets w->device, w->device_api and the names. Without a device, wrap fills w->about.no_device.
    // If wrap fails, the core closes the world.
    idist_status (*wrap)(idist__world *w);
};

enum { IDIST__BACKEND_ABI = 10, IDIST__DEVICE_BACKENDS = 4 };

// ---- the contract between the core and a device backend ----
//
// A device backend moves device memory. It sits in front of the world's backend (see `wrap` in
// idist_backend_api) and leaves host memory to that backend. The core calls it at four points of a
// call and at the end of the world:
//
//     idist__call_checked     route      does this call concern the device?
//       idist__task_start     (start of the wrapping backend)
//     idist_group_end         launch     submit what idist_group_begin held back
//     idist__task_complete    landed     the host backend is done: is the device done, too?
//     idist_wait_stream       follow     make a stream wait instead of this thread
//     idist__life_end         end_calls  wait until all threads have left their calls
//
// The core calls the first four functions with the world's lock held. None of the five functions is
// NULL. The table belongs to the device backend and lives as long as w->device_api points to it.
// The device backend owns w->device, group->device and task->device. The core stores them and
// passes them on, but never frees them. If a thread that released the lock does not come back
// before the world ends, the device backend sets w->life.abandoned. It then leaves its data and
// this table in place.
typedef struct idist_device_api {
    // Checks the buffers and the stream of a call, and sets *on_device if the call is for the
    // device. Sets *detached if nobody will wait for the task, because the stream orders the work
    // that follows. May block: the first device call of a group waits here for the other members,
    // with the lock released. On failure the call has not begun and has no number.
    idist_status (*route)(idist_group *g, const idist__call *call, const idist_opts *opts,
                          bool *on_device, bool *detached);

    // Submits the calls that this thread's idist_group_begin held back. May wait for an earlier
    // submission. Releases the lock while it is in the device's library. A failure fails the groups
    // of the tasks concerned.
    void (*launch)(idist__world *w);

    // Called by idist__task_complete for a task that has `on_device` set. `status` is the result of
    // the host's part. Returns true if the task is done. Returns false if the device still works on
    // the task. The task then stays running, and the device backend calls idist__task_complete
    // again. Does not block.
    bool (*landed)(idist__task *t, idist_status status);

    // Makes `stream` wait for a task that is `followed` but not done. Detaches the task, even if
    // follow fails. Releases the lock while it adds to the stream, because that blocks if the
    // stream's queue is full.
    idist_status (*follow)(idist__task *t, void *stream);

    // Waits, while the world is being closed, for the threads that have released the lock in
    // another function of this table. If w->life.leaves is set, first ends the device work that
    // these threads may wait for. Called once, without the lock, before the first group_close.
    void (*end_calls)(idist__world *w);
} idist_device_api;

// ---- the world ----

// The thread that sleeps in the backend.
typedef enum idist__driver {
    IDIST__DRIVER_NONE,
    IDIST__DRIVER_CALLER,
    IDIST__DRIVER_THREAD
} idist__driver;

// Texts about a world, for idist_show_config and error messages.
typedef struct idist__world_about {
    char hostname[64];
    char advertised[160]; // address where other hosts reach this rank, and its interface; or empty
    char network[96];     // known facts about the network between the hosts, or empty
    char sharing[300];    // how the ranks of this host exchange data; empty if there is only one
    char backends[512];   // names of the registered backends
    char device_name[32]; // for example "cuda:0"
    char no_device[200];  // why the world has no device
    const char *device_backend; // how device memory is moved
} idist__world_about;

// Facts about the machine that the backend finds out when the ranks meet.
typedef struct idist__world_machine {
    // Processors that the ranks of this host may use together; 0 if the backend could not tell.
    int ncores;
    // Rank and size among the ranks that use the same processors. In containers, these ranks may
    // look like several hosts. Both are 0 if the backend could not tell.
    int sharing_rank, sharing_size;
    // Bytes that the network between hosts moves in the time that an empty message takes; 0 if
    // unknown.
    uint64_t latency_nbytes;
    // Bytes in flight between two hosts while they use all of the network; 0 if unknown.
    uint64_t network_nbytes;
    int foreign_thread_count; // threads of other libraries, which never call idist
    bool one_thread_calls;    // only one thread of the program may call idist
    bool single_threaded;     // no progress thread is allowed: requests progress only inside calls
} idist__world_machine;

typedef struct idist__world_tasks {
    idist__task *running;         // newest first
    idist__task *idle;            // freed tasks, to be used again
    idist__task *all;             // all tasks ever allocated; freed with the world
    idist__task *detached;        // tasks that nobody waits for, running or done; newest first
    uint32_t detached_done_count; // number of detached tasks that are done
    int async_count;              // running tasks with a request
    int freed_request_count;      // running tasks whose request idist_request_free has freed
    uint32_t request_count;       // requests begun so far, except those that were complete at once
    uint32_t matched_count;       // messages that matched probes have found so far
    // Tasks that an open idist_group_begin keeps, plus threads for which the device backend holds
    // calls back.
    int deferred_count;
} idist__world_tasks;

// State of the waits for tasks, and of the thread that drives the backend meanwhile.
typedef struct idist__world_wait {
    idist__driver driver;
    int blocked_count;    // callers inside idist__wait_until, or between two calls of it
    uint32_t ended_count; // tasks that have ended so far
    uint32_t moved_count; // steps forward inside tasks so far
    uint32_t drive_count; // times that a caller drove the backend in a wait or test
    // Time that a caller polls before it sleeps. If 0, the caller yields a few times instead.
    int64_t spin_ns;
    int64_t spin_budget_ns;     // part of spin_ns that has proved useful lately
    uint32_t lock_waiter_count; // threads that wait for the lock
    int64_t next_look_ns;       // time when a polling thread checks the timers again
    int64_t timers_due_ns;      // time before which no task needs idist__timer_run
} idist__world_wait;

// The progress thread.
typedef struct idist__world_progress {
    idist__os_thread thread;
    bool running, stops;
    bool naps; // the thread checks for work again soon, and needs no signal
    // The device may wait for other ranks while no caller does, so the thread watches the
    // connections.
    bool watched;
} idist__world_progress;

typedef struct idist__world_groups {
    idist_group *freed;     // freed groups, to be used again
    int making_count;       // number of groups being made
    uint64_t serial;        // number of this world in the process, from 1 on
    uint64_t member_groups; // greater than the serials of all groups that members made alone
} idist__world_groups;

// The ops and dtypes that the program has registered.
typedef struct idist__world_registered {
    idist__user_op ops[IDIST_OP_LAST - IDIST_OP_USER + 1];
    idist__user_dtype dtypes[IDIST__USER_DTYPES];
} idist__world_registered;

// Flags for the end of a world.
typedef struct idist__world_life {
    bool closing;  // a thread closes the world: no request or deferred call may begin
    bool is_cause; // this rank has aborted the world, so no lost rank is the cause of its end
    bool leaves;   // the world ends after a failure: not all ranks have passed the last barrier
    // The world ends while a thread is still inside a call. Memory that the thread may touch is
    // never freed.
    bool abandoned;
} idist__world_life;

struct idist__world {
    idist_group group; // all ranks; the first field, so that a world can be used as its group
    idist__config cfg;
    idist__log log;
    uint32_t process;        // number of the process that made the world; 0 if unknown
    idist__rank_info *nodes; // one for every rank
    int nnodes;

    const idist_backend_api *backend;
    void *impl;                                                       // the backend's part
    const idist_backend_api *device_backends[IDIST__DEVICE_BACKENDS]; // to be tried in this order
    int device_backend_count;
    const idist_device_api *device_api; // NULL if this world has no device
    void *device;                       // the device backend's part

    idist__os_mutex lock;   // guards everything that changes while the world is open
    idist__os_cond changed; // for callers: a task ended, or no thread drives any more
    idist__os_cond work;    // for the progress thread: there is a request and no caller

    idist__world_about about;
    idist__world_machine machine;
    idist__world_tasks tasks;
    idist__world_wait wait;
    idist__world_progress progress;
    idist__world_groups groups;
    idist__world_registered user;
    idist__world_life life;
};
