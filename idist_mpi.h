/* idist_mpi.h - v0.1.0 - the MPI backend of idist: the same program on a cluster - MIT licence

DO THIS

    Include it where idist.h is included, or on the command line, and compile with your MPI's compiler:

        mpicc -DIDIST_IMPLEMENTATION -include idist_mpi.h app.c -o app && mpirun -n 4 ./app

    The source stays as it is. Started by mpirun or mpiexec, idist_initialize picks this backend; started alone, by
    idist_spawn or by torchrun, it picks what it would without this header. IDIST_BACKEND=mpi or =ring decides otherwise.

WHAT IT IS

    Every collective becomes MPI's own, on a communicator of its group; requests become MPI's non-blocking ones. Any MPI
    from 3.0 on. Nothing is assumed about what a handle is, so that a program built for the standard ABI of MPI 5.0
    (mpicc_abi) runs on every library that has it. Floats of 16 and 8 bits are reduced as F32.

    Before MPI sees a collective the ranks show each other what they are about to call ([mpi:slip]). That costs a message
    of some 56 bytes to log2(n) ranks, finds those that call something else and those that do not come, and carries
    contributions of up to 24 bytes (of built-in ops, in groups of up to 64), for which MPI's collective is not needed any
    more. Before they block in MPI they do so twice. IDIST_CHECK=0, the same on all ranks, leaves that out: faster, but
    without mismatches, without deadlines in blocking collectives, also between group_begin and group_end, in which this
    rank's requests do not move, and with MPI's own rule that all ranks block, or none, and are in place, or none.

    Send and receive go as notes ([mpi:note]), since MPI would neither compare dtypes nor keep a message that does not
    fit; large messages go from buffer to buffer once both sides know of each other.

WHO OWNS MPI

    Initialised already: idist duplicates MPI_COMM_WORLD, or *desc.mpi_comm, and leaves MPI alone otherwise. Not yet:
    idist_initialize calls MPI_Init_thread and the end of the last world MPI_Finalize; MPI cannot begin again after that,
    and a later idist_initialize is IDIST_ERR_STATE. If the world failed and not everybody comes to its end within a
    second, or with ULFM at all, MPI is not finalized: it might wait for ever; mpirun ends the job when this process
    exits. Requests move on in a thread of idist: while one is open, a program that calls MPI itself needs
    MPI_THREAD_MULTIPLE, and so do several worlds at once. With a level below SERIALIZED (MPI_Init) there is no such
    thread, and only the thread that initialised MPI may call idist.

WHAT MPI DOES NOT GIVE

    A rank that dies: most MPIs end the job then, and their launchers say so. Open MPI 5 under `mpirun --with-ft ulfm`
    does not: the survivors get IDIST_ERR_PEER_LOST, and idist_shrink gives them a group to go on with.
    Deadlines and idist_abort in a blocking collective, idist_new_group, _split, _shrink and _agree once all ranks are in it.
    One thread of a rank makes groups at a time.
    Buffers of a request that failed: what all ranks have entered cannot be taken back from MPI. It has a tenth of a second
    to end; if it does not, MPI may still use the buffers, and fn and arg of a user op, so keep them.
    Sleep: a rank that waits for others to enter looks every 1 to 4 ms; one whose call is in MPI polls, as MPI does.
    Same bits on all ranks: always in what goes by slips; above, as far as MPI_Allreduce gives it, as the tested MPIs do.
    Memory of idist_alloc is plain memory, which MPI's collectives take as well as any other; with desc.shm_nbytes or
    IDIST_SHM_MIB set, a part of an MPI window that all ranks of the host have mapped, which ends with the world.

CONTENTS

      [mpi:api]     the backend's entry in IDIST_BACKENDS
      [mpi:types]   worlds, groups, tasks
      [mpi:error]   MPI's errors, and who is lost
      [mpi:type]    dtypes and ops
      [mpi:native]  a call as MPI's own
      [mpi:slip]    what every rank shows the others before a collective
      [mpi:coll]    a collective from the first slip to the result
      [mpi:note]    messages between two ranks: send, receive, and what ranks tell each other
      [mpi:wait]    who waits, who is missing, who waits for whom
      [mpi:engine]  progress, sleep, failure
      [mpi:join]    adopt or initialise, open, shrink, close
*/
#ifndef IDIST_H
#include "idist.h"
#endif
#ifndef IDIST_MPI_H
#define IDIST_MPI_H

#ifdef __cplusplus
extern "C" {
#endif

//------------------------------------------------------------------------------
// [mpi:api]  the backend's entry in IDIST_BACKENDS
//------------------------------------------------------------------------------

// The ranks of an MPI communicator; CPU memory.
IDIST_API const idist_backend_api *idist_mpi_backend(void);

#undef IDIST__ENTRY_MPI
#define IDIST__ENTRY_MPI idist_mpi_backend()

#ifdef __cplusplus
} // extern "C"
#endif

#endif // IDIST_MPI_H

// Only here for the API? Stop reading.

#if defined(IDIST_IMPLEMENTATION) && !defined(IDIST_MPI_IMPLEMENTATION_DONE)
#define IDIST_MPI_IMPLEMENTATION_DONE

#include <limits.h>
#include <mpi.h>
#if defined(OPEN_MPI) && OMPI_MAJOR_VERSION >= 5
#include <mpi-ext.h>
#endif
#ifdef OMPI_HAVE_MPI_EXT_FTMPI
#define IDIST__ULFM 1 // user-level failure mitigation
#endif

#include "idist_begin.h"

//------------------------------------------------------------------------------
// [mpi:types]  worlds, groups, tasks
// uses mem world
// used by error type native slip coll note wait engine join
//------------------------------------------------------------------------------

#ifndef IDIST__MPI_COUNT
#define IDIST__MPI_COUNT INT_MAX // elements in one call of MPI; tests lower it
#endif
#define IDIST__SLIP_BYTES \
    24 // of contribution in a slip, which is 56 bytes then: a cache line with what MPI adds
#define IDIST__SLIP_RANKS 64             // groups above this never use it
#define IDIST__NOTE_BYTES ((size_t)3584) // less than the 4 KiB that MPIs send without the receiver
#define IDIST__NAP_NS \
    ((int64_t)20000) // the first sleep of who waits; then twice as long each time, ...
#define IDIST__NAP_MOST_NS ((int64_t)1000000) // up to this, then slowly
#define IDIST__NAP_LONG_NS ((int64_t)4000000) // up to this,
#define IDIST__NAP_MOVING_NS \
    ((int64_t)50000)            // or this while data is on its way: MPI moves it inside calls only
#define IDIST__FAREWELL_MS 1000 // how long a failed world waits for the others before MPI_Finalize
#define IDIST__FIND_MS 2000     // how long MPI may need to say which rank is lost
#define IDIST__QUICK_LOOKS 64   // of a call without a task

// Tags on our communicators, which nobody else uses. MPI guarantees 15 bits.
enum {
    IDIST__TAG_NOTE = 1,
    IDIST__TAG_PAIRS = 2,
    IDIST__TAG_SLIP = 16,
    IDIST__TAG_DATA = 64,
    IDIST__TAG_RANGE = 16384
};

// What a rank shows the others of its group when it enters a collective.
typedef struct idist__slip {
    idist__print print;
    uint32_t flags;
    uint32_t nbytes; // of data
    unsigned char data[IDIST__SLIP_BYTES];
} idist__slip;

// BUSY: this rank has other calls under way, or several threads, so nobody may block in MPI. MANY:
// its counts are too large for MPI. IN_PLACE: its two buffers are one, which MPI wants to hear from
// all ranks or none.
enum { IDIST__SLIP_BUSY = 1, IDIST__SLIP_MANY = 2, IDIST__SLIP_IN_PLACE = 4 };

// The head of a message between two ranks; nbytes of payload follow in the same message.
//
//   type    what follows               fields used besides ctx and print
//   EAGER   the message                tag
//   LARGE   nothing                    tag, id (the sender's name for it)
//   GRANT   nothing: send it           id (as in LARGE), tag (of MPI, to send it with)
//   WAITS   nothing: I wait in a call  flags; id (of a LARGE), sent, got (messages of send / recv
//   so far) HERE    nothing: I entered it too  - ABSENT  nothing: I did not         - FAIL    text:
//   the group failed     tag (the status), sent (the sequence number of the last call committed to)
typedef struct idist__note {
    uint8_t type, flags;
    uint16_t zero;
    int32_t tag;
    uint64_t ctx;
    idist__print print; // check of a message: its count
    uint64_t id;
    uint32_t sent, got;
    uint64_t nbytes;
} idist__note;

enum { IDIST__NOTE_EAGER = 1, IDIST__NOTE_LARGE, IDIST__NOTE_GRANT };
enum { IDIST__NOTE_WAITS = 4, IDIST__NOTE_HERE, IDIST__NOTE_ABSENT, IDIST__NOTE_FAIL };

enum { IDIST__WAITS_FOR_YOU = 1, IDIST__WAITS_ONLY = 2 }; // flags of WAITS

typedef struct idist__outgoing { // a note under way
    struct idist__outgoing *next;
    MPI_Request request;
    idist__note note; // the payload follows
} idist__outgoing;

typedef struct idist__early { // a note that came before somebody could use it
    struct idist__early *next;
    int source;       // world rank
    idist__note note; // the payload follows
} idist__early;

typedef struct idist__peer { // what is known of a rank of the world
    uint32_t sent, got;      // messages of send / recv
    idist__note waits;       // the last WAITS
    uint64_t absent_ctx;     // it said that it has not entered this call
    uint32_t absent_seq;
    bool lost;
} idist__peer;

// What MPI hands on to a function of the user's.
typedef struct idist__mpi_hook {
    idist__user_op user;
    idist_dtype dtype;
} idist__mpi_hook;

// A call handed to MPI: what MPI gets, which may be scratch, and what is to be done with the
// result.
typedef struct idist__native {
    const idist_group *g;
    const idist__call *c;
    MPI_Comm comm;
    bool blocking, many, nothing; // in MPI's blocking functions; with counts too large for MPI on
                                  // some rank; with no data
    int error;                    // the first one, or MPI_SUCCESS
    MPI_Request *requests, few[4];
    int nrequests, room;
    MPI_Datatype type;
    MPI_Op op;
    bool own_type, own_op;
    const char *in;
    char *out;
    bool in_place;
    size_t size;           // of an element of in and out
    char *scratch;         // freed at the end,
    int *counts;           // as are four arrays of v-forms
    idist__mpi_hook *hook; // and what an op of the user's needs
    const char *what;      // the function of MPI that failed
} idist__native;

typedef enum idist__phase { // of a task
    IDIST__QUEUED,          // behind other collectives of its group
    IDIST__ENTERING,        // its slips are under way
    IDIST__COMMITTING,      // and once more
    IDIST__RUNNING,         // in MPI
    IDIST__ASKING,          // a large send waits for its receive; a receive waits for its message
    IDIST__MOVING           // and the data is on its way
} idist__phase;

typedef struct idist__mpi_op { // the backend's part of a task
    idist__task *next;         // in the queue or the receives of its group
    idist__phase phase;
    idist__native native;
    idist__user_op user; // a copy: the op may be freed meanwhile
    uint64_t id;         // of a large send; of a large receive its tag
    int source;          // of a receive that was matched: world rank,
    idist__note note;    // and the head of its message
} idist__mpi_op;

typedef struct idist__mpi_group {
    MPI_Comm comm;
    int *rank_of;             // rank in the group by world rank; -1
    idist__print *seen;       // the latest call in which each member was seen
    idist__task *head, *last; // collectives before RUNNING, in order; only the first one has slips
    idist__task *receives;    // oldest first
    idist__slip *slips;       // [i]: of rank r + i, as far as they are here
    MPI_Request requests[2];  // of the step under way
    int distance;             // slips that are here; g->size: all
    int error;                // MPI did not take one
    uint32_t slip_seq;        // the call they belong to
    uint32_t committed;       // the last call that may block in MPI, as far as we are concerned
    bool known;               // all members know by themselves that it failed
    bool refused;             // a member has failed that was not committed
    idist__print entered;     // the latest call of our own that was compared
} idist__mpi_group;

typedef struct idist__mpi { // the backend's part of a world
    idist__world *w;
    MPI_Comm wire;                         // for notes and data; its ranks are those of the world
    MPI_Comm main;                         // for collectives of the world's own group
    bool fault_tolerant, finding, closing; // finding: inside idist__mpi_trouble
    bool abandoned;                        // MPI may have something of ours for ever
    bool called, threads;                  // by a thread, caller; by several
    pthread_t caller;
    int *told, heard; // notes sent to each rank, notes received: see idist__note_drain
    uint32_t wakes;   // counts, and is slept on
    int64_t nap_ns;
    char note[sizeof(idist__note) + IDIST__NOTE_BYTES]; // the one that comes next
    int64_t looked_ns; // when the quick way last looked at the notes
    idist__peer *peers;
    MPI_Request incoming;
    idist__outgoing *outgoing, *idle, *spare; // spare: for the last word of a rank without memory
    idist__early *early;
    uint64_t next_id;
    int next_tag;
    unsigned char burnt[IDIST__TAG_RANGE /
                        8]; // tags of receives that were cancelled: the data may still come
    MPI_Op ops[4];          // our own SUM, PROD, MIN, MAX
    MPI_Comm shrunk;        // made by shrink, for the group_open that follows, of shrunk_ctx
    uint64_t shrunk_ctx;
    MPI_Win win;
    idist__window *window;
} idist__mpi;

static idist__mpi *idist__mpi_of(const idist__world *w) { return (idist__mpi *)w->impl; }
static idist__mpi_group *idist__mpi_group_of(const idist_group *g) {
    return (idist__mpi_group *)g->impl;
}
static idist__mpi_op *idist__mpi_op_of(const idist__task *t) { return (idist__mpi_op *)t->impl; }

//------------------------------------------------------------------------------
// [mpi:error]  MPI's errors, and who is lost
// uses os err world types engine
//------------------------------------------------------------------------------

static idist_status idist__mpi_fail(const char *what, int error) {
    char text[MPI_MAX_ERROR_STRING + 1];
    int kind = MPI_ERR_OTHER, n = 0;

    MPI_Error_class(error, &kind);
    MPI_Error_string(error, text, &n);
    return idist__fail(kind == MPI_ERR_NO_MEM ? IDIST_ERR_NO_MEMORY : IDIST_ERR_SYSTEM, "%s: %.*s",
                       what, n, text);
}

// Whether an error says that a process is gone, be it that another rank said so by revoking the
// communicator.
static bool idist__mpi_is_loss(int error) {
#ifdef IDIST__ULFM
    int kind = MPI_SUCCESS;
    MPI_Error_class(error, &kind);
    return kind == MPIX_ERR_PROC_FAILED || kind == MPIX_ERR_PROC_FAILED_PENDING ||
           kind == MPIX_ERR_REVOKED;
#else
    (void)error;
    return false;
#endif
}

// Asks MPI who is lost; every group with one of them fails.
static void idist__mpi_find_lost(idist__mpi *m) {
#ifdef IDIST__ULFM
    MPI_Group all, failed;
    int i, n = 0;
    if (!m->fault_tolerant || MPIX_Comm_failure_ack(m->wire) != MPI_SUCCESS) return;
    if (MPIX_Comm_failure_get_acked(m->wire, &failed) != MPI_SUCCESS) return;
    MPI_Comm_group(m->wire, &all);
    MPI_Group_size(failed, &n);

    for (i = 0; i < n; i++) {
        int rank = -1;
        MPI_Group_translate_ranks(failed, 1, &i, all, &rank);
        if (rank < 0 || rank >= m->w->group.size || m->peers[rank].lost) continue;
        m->peers[rank].lost = true;
        idist__world_lost(m->w, rank, "its process ended");
    }

    MPI_Group_free(&failed);
    MPI_Group_free(&all);
#else
    (void)m;
#endif
}

static void idist__note_progress(idist__mpi *m);

// Something of MPI failed in this group, which fails with it. After a loss MPI may need a moment to
// know whose.
static void idist__mpi_trouble(idist__mpi *m, idist_group *g, const char *what, int error) {
    char cause[400];
    idist_status s;
    int64_t deadline_ns = idist__os_deadline(IDIST__FIND_MS);

    while (idist__mpi_is_loss(error) && !m->finding && g->status == IDIST_OK &&
           idist__os_now_ns() < deadline_ns) {
        m->finding = true;
        idist__mpi_find_lost(m);
        idist__note_progress(m); // perhaps another rank says what happened
        m->finding = false;
    }

    s = idist__mpi_fail(what, error);
    snprintf(cause, sizeof cause, "on rank %d %.350s", m->w->cfg.rank, idist__me.text);
    idist__group_fail(g, idist__mpi_is_loss(error) ? IDIST_ERR_PEER_LOST : s, cause);
}

// Waits for a request of MPI, with a deadline.
static idist_status idist__mpi_await(MPI_Request *request, int timeout_ms, const char *what) {
    int64_t deadline_ns = timeout_ms < 0 ? IDIST__FOREVER : idist__os_deadline(timeout_ms);
    int done = 0, error;

    for (;;) {
        if ((error = MPI_Test(request, &done, MPI_STATUS_IGNORE)) != MPI_SUCCESS)
            return idist__mpi_fail(what, error);
        if (done) return IDIST_OK;
        if (idist__os_now_ns() > deadline_ns)
            return idist__fail(IDIST_ERR_TIMEOUT,
                               "%s: not all ranks of the communicator came within %d ms", what,
                               timeout_ms);
        sched_yield();
    }
}

//------------------------------------------------------------------------------
// [mpi:type]  dtypes and ops
// uses err base:type reduce types
//------------------------------------------------------------------------------

// Narrow floats only travel as such; they are reduced as F32.
static MPI_Datatype idist__mpi_type(idist_dtype dtype) {
    static const MPI_Datatype types[IDIST_DTYPE_COUNT] = {MPI_INT8_T,   MPI_UINT8_T,  MPI_INT16_T,
                                                          MPI_UINT16_T, MPI_INT32_T,  MPI_UINT32_T,
                                                          MPI_INT64_T,  MPI_UINT64_T, MPI_UINT16_T,
                                                          MPI_UINT16_T, MPI_FLOAT,    MPI_DOUBLE,
                                                          MPI_UINT8_T,  MPI_UINT8_T};

    return types[(unsigned)dtype < IDIST_DTYPE_COUNT ? dtype : IDIST_U8];
}

// Ops of our own, for the first four, where MPI's do something else. It does not say what MIN and
// MAX of a NaN are, and MPICH 4 takes unsigned numbers for signed ones there; Open MPI 4 lets sums
// of 8 and 16 bits end at the largest value.
static MPI_Op idist__mpi_builtin_op(const idist__mpi *m, idist_op op, idist_dtype dtype) {
    bool own = idist_dtype_size(dtype) < 4 || op == IDIST_MIN || op == IDIST_MAX;
    static const MPI_Op ops[IDIST_OP_COUNT] = {MPI_SUM,  MPI_PROD, MPI_MIN,
                                               MPI_MAX,  MPI_SUM, // AVG is divided at the end
                                               MPI_BAND, MPI_BOR,  MPI_BXOR,
                                               MPI_LAND, MPI_LOR};

    return !own || op > IDIST_AVG ? ops[op] : m->ops[op == IDIST_AVG ? IDIST_SUM : op];
}

static void idist__mpi_reduce(void *in, void *inout, int count, MPI_Datatype type, idist_op op) {
    int d = 0;
    while (d < IDIST_F64 && type != idist__mpi_type((idist_dtype)d)) d++;
    idist__reduce_table[d][op](inout, in, inout, (size_t)count);
}

#define IDIST__MPI_OP(name, op)                                                            \
    static void idist__mpi_##name(void *in, void *inout, int *count, MPI_Datatype *type) { \
        idist__mpi_reduce(in, inout, *count, *type, op);                                   \
    }
IDIST__MPI_OP(sum, IDIST_SUM)
IDIST__MPI_OP(prod, IDIST_PROD)
IDIST__MPI_OP(min, IDIST_MIN)
IDIST__MPI_OP(max, IDIST_MAX)

// MPI tells a function of the user's neither dtype nor arg. Both hang on the datatype of the call,
// which MPI hands on.
static int idist__mpi_keyval = MPI_KEYVAL_INVALID;

static void idist__mpi_user(void *in, void *inout, int *count, MPI_Datatype *type) {
    idist__mpi_hook *hook = NULL;
    int found = 0;

    MPI_Type_get_attr(*type, idist__mpi_keyval, &hook, &found);
    if (!found || !hook) return;
    idist__me.callbacks++;
    hook->user.fn(in, inout, (size_t)*count, hook->dtype, hook->user.arg);
    idist__me.callbacks--;
}

//------------------------------------------------------------------------------
// [mpi:native]  a call as MPI's own
// uses os mem base:type reduce world core:call self types type
//------------------------------------------------------------------------------

static MPI_Request *idist__native_request(idist__native *nat) {
    if (nat->nrequests == nat->room) {
        size_t room = (size_t)nat->room * 2;
        MPI_Request *more = (MPI_Request *)idist__mem_raw(&nat->g->w->cfg.mem, sizeof *more * room);
        if (!more) return NULL;
        memcpy(more, nat->requests, sizeof *more * (size_t)nat->nrequests);
        if (nat->requests != nat->few) idist__mem_free(&nat->g->w->cfg.mem, nat->requests);
        nat->requests = more;
        nat->room = (int)room;
    }

    nat->requests[nat->nrequests] = MPI_REQUEST_NULL;

    return &nat->requests[nat->nrequests++];
}

// Calls the blocking function, or the other one with a request, unless an earlier one has failed.
#define IDIST__NATIVE(nat, function, i_function, ...)               \
    do {                                                            \
        if ((nat)->blocking && (nat)->error == MPI_SUCCESS) {       \
            (nat)->what = #function;                                \
            (nat)->error = function(__VA_ARGS__);                   \
        } else IDIST__NATIVE_REQUEST(nat, i_function, __VA_ARGS__); \
    } while (0)
#define IDIST__NATIVE_REQUEST(nat, i_function, ...)                                   \
    do {                                                                              \
        MPI_Request *request_ = idist__native_request(nat);                           \
        if ((nat)->error != MPI_SUCCESS) break;                                       \
        (nat)->what = #i_function;                                                    \
        (nat)->error = request_ ? i_function(__VA_ARGS__, request_) : MPI_ERR_NO_MEM; \
    } while (0)

// Any collective that only moves data, as messages between each two ranks: for counts above MPI's.
static void idist__native_pairs(idist__native *nat) {
    int i, me = nat->g->rank, n = nat->g->size;

    for (i = 0; i < n && nat->error == MPI_SUCCESS; i++) {
        size_t nsend, nrecv, at, k;
        char *send = idist__call_part(nat->c, (char *)nat->in, me, i, true, &nsend),
             *recv = idist__call_part(nat->c, nat->out, i, me, false, &nrecv);

        if (i == me) {
            if (nrecv) idist__copy(recv, send, nrecv * nat->size);
            continue;
        }

        for (at = 0; at < nrecv; at += k) {
            k = nrecv - at < IDIST__MPI_COUNT ? nrecv - at : IDIST__MPI_COUNT;
            IDIST__NATIVE_REQUEST(nat, MPI_Irecv, recv + at * nat->size, (int)k, nat->type, i,
                                  IDIST__TAG_PAIRS, nat->comm);
        }

        for (at = 0; at < nsend; at += k) {
            k = nsend - at < IDIST__MPI_COUNT ? nsend - at : IDIST__MPI_COUNT;
            IDIST__NATIVE_REQUEST(nat, MPI_Isend, send + at * nat->size, (int)k, nat->type, i,
                                  IDIST__TAG_PAIRS, nat->comm);
        }
    }
}

// Reductions and broadcast, in pieces of a length that MPI can count.
static void idist__native_pieces(idist__native *nat) {
    const idist__call *c = nat->c;
    size_t at, k, max = IDIST__MPI_COUNT,
                  count = c->count * (c->kind == IDIST__REDUCE_SCATTER ? (size_t)nat->g->size : 1);
    MPI_Datatype t = nat->type;
    MPI_Comm comm = nat->comm;
    bool root = c->root == nat->g->rank;

    for (at = 0; at < count; at += k) {
        const void *in = nat->in_place ? MPI_IN_PLACE : nat->in + at * nat->size;
        char *out = nat->out + at * nat->size, *at_root = root ? out : NULL;
        int n;
        k = count - at < max ? count - at : max;
        n = (int)k;

        switch (c->kind) {
        case IDIST__ALL_REDUCE:
        case IDIST__REDUCE_SCATTER: // with too many elements for MPI's own
            IDIST__NATIVE(nat, MPI_Allreduce, MPI_Iallreduce, in, out, n, t, nat->op, comm);
            break;
        case IDIST__REDUCE:
            IDIST__NATIVE(nat, MPI_Reduce, MPI_Ireduce, in, at_root, n, t, nat->op, c->root, comm);
            break;
        case IDIST__SCAN:
            IDIST__NATIVE(nat, MPI_Scan, MPI_Iscan, in, out, n, t, nat->op, comm);
            break;
        case IDIST__EXSCAN:
            IDIST__NATIVE(nat, MPI_Exscan, MPI_Iexscan, in, out, n, t, nat->op, comm);
            break;
        default: IDIST__NATIVE(nat, MPI_Bcast, MPI_Ibcast, out, n, t, c->root, comm); break;
        }
    }
}

// Whether MPI, which counts by int, can take the counts of this rank, and what they add up to.
// Without v-forms the same on all ranks.
static bool idist__native_fits(const idist_group *g, const idist__call *c) {
    idist__extent e;
    int i; // Intel MPI 2021: MPI_Iallgatherv never ends when one rank gives much and another one
           // nothing

    for (i = 0; c->kind == IDIST__ALL_GATHERV && i < g->size; i++)
        if (!c->recvcounts[i]) return false;
    if (!idist__kind_is_v(c->kind)) return c->count <= IDIST__MPI_COUNT / (size_t)g->size;

    return idist__extent_of(g, c, &e) == IDIST_OK && e.send <= IDIST__MPI_COUNT &&
           e.recv <= IDIST__MPI_COUNT;
}

static void idist__native_ints(const size_t *counts, const size_t *displs, int n, int *ints) {
    size_t at = 0;
    int i;

    for (i = 0; i < n; i++) {
        if (displs) at = displs[i];
        ints[i] = (int)counts[i];
        ints[n + i] = (int)at;
        at += counts[i];
    }
}

static void idist__native_move_v(idist__native *nat) {
    const idist__call *c = nat->c;
    int k = nat->g->size, *sends = nat->counts, *recvs = sends + 2 * k, n = (int)c->count;
    const void *in = nat->in_place ? MPI_IN_PLACE : nat->in;
    void *out = nat->out, *part = nat->in_place ? MPI_IN_PLACE : out;
    MPI_Datatype t = nat->type;
    MPI_Comm comm = nat->comm;
    bool root = c->root == nat->g->rank;

    if (c->sendcounts && (root || c->kind == IDIST__ALL_TO_ALLV))
        idist__native_ints(c->sendcounts, c->senddispls, k, sends);
    if (c->recvcounts && (root || c->kind != IDIST__GATHERV))
        idist__native_ints(c->recvcounts, c->recvdispls, k, recvs);
    if (c->kind == IDIST__ALL_GATHERV)
        IDIST__NATIVE(nat, MPI_Allgatherv, MPI_Iallgatherv, in, n, t, out, recvs, recvs + k, t,
                      comm);
    else if (c->kind == IDIST__GATHERV)
        IDIST__NATIVE(nat, MPI_Gatherv, MPI_Igatherv, in, n, t, out, recvs, recvs + k, t, c->root,
                      comm);
    else if (c->kind == IDIST__SCATTERV)
        IDIST__NATIVE(nat, MPI_Scatterv, MPI_Iscatterv, nat->in, sends, sends + k, t, part, n, t,
                      c->root, comm);
    else
        IDIST__NATIVE(nat, MPI_Alltoallv, MPI_Ialltoallv, nat->in, sends, sends + k, t, out, recvs,
                      recvs + k, t, comm);
}

static void idist__native_move(idist__native *nat) {
    const idist__call *c = nat->c;
    const void *in = nat->in_place ? MPI_IN_PLACE : nat->in;
    void *out = nat->out, *part = nat->in_place ? MPI_IN_PLACE : out;
    MPI_Datatype t = nat->type;
    MPI_Comm comm = nat->comm;
    int n = (int)c->count;

    switch (c->kind) {
    case IDIST__BARRIER: IDIST__NATIVE(nat, MPI_Barrier, MPI_Ibarrier, comm); break;
    case IDIST__ALL_GATHER:
        IDIST__NATIVE(nat, MPI_Allgather, MPI_Iallgather, in, n, t, out, n, t, comm);
        break;
    case IDIST__GATHER:
        IDIST__NATIVE(nat, MPI_Gather, MPI_Igather, in, n, t, out, n, t, c->root, comm);
        break;
    case IDIST__SCATTER:
        IDIST__NATIVE(nat, MPI_Scatter, MPI_Iscatter, nat->in, n, t, part, n, t, c->root, comm);
        break;
    case IDIST__REDUCE_SCATTER:
        IDIST__NATIVE(nat, MPI_Reduce_scatter_block, MPI_Ireduce_scatter_block, in, out, n, t,
                      nat->op, comm);
        break;
    default: IDIST__NATIVE(nat, MPI_Alltoall, MPI_Ialltoall, in, n, t, out, n, t, comm); break;
    }
}

// The user's op as an op of MPI, and a datatype that leads from it to us.
static void idist__native_user_op(idist__native *nat, const idist__user_op *user) {
    nat->hook = (idist__mpi_hook *)idist__mem_alloc(&nat->g->w->cfg.mem, sizeof *nat->hook);
    nat->error =
        nat->hook ? MPI_Type_contiguous((int)nat->size, MPI_BYTE, &nat->type) : MPI_ERR_NO_MEM;
    nat->own_type = nat->error == MPI_SUCCESS;
    if (nat->hook) nat->hook->user = *user;
    if (nat->hook) nat->hook->dtype = nat->c->dtype;
    if (nat->own_type) nat->error = MPI_Type_commit(&nat->type);
    if (nat->error == MPI_SUCCESS)
        nat->error = MPI_Type_set_attr(nat->type, idist__mpi_keyval, nat->hook);
    if (nat->error == MPI_SUCCESS)
        nat->error = MPI_Op_create(idist__mpi_user, user->commutative, &nat->op);
    nat->own_op = nat->error == MPI_SUCCESS;
    if (nat->error != MPI_SUCCESS) nat->what = "MPI_Op_create";
}

// What a reduction needs beyond its buffers: narrow floats are widened, premultiplied contributions
// scaled, into scratch, which holds the result too. A reduce_scatter of more elements than MPI
// counts is an all_reduce there.
static void idist__native_reduction(idist__native *nat) {
    const idist__call *c = nat->c;
    const idist__user_op *user =
        (int)c->op >= IDIST_OP_USER ? idist__call_user_op(nat->g, c) : NULL;
    bool narrow = idist__type_is_narrow(c->dtype), all = c->kind == IDIST__REDUCE_SCATTER,
         reduce = c->kind == IDIST__REDUCE;
    size_t n = (all ? (size_t)nat->g->size : 1) * c->count, size = nat->size;
    idist_dtype dtype = narrow ? IDIST_F32 : c->dtype;

    if (user && user->fn) {
        idist__native_user_op(nat, user);
        if (nat->error != MPI_SUCCESS) return;
    } else {
        nat->size = idist_dtype_size(dtype);
        nat->type = idist__mpi_type(dtype);
        nat->op = idist__mpi_builtin_op(idist__mpi_of(nat->g->w), user ? IDIST_SUM : c->op, dtype);
    }

    if ((narrow && !nat->hook) || (user && !user->fn) || (all && nat->many) ||
        (reduce && nat->in_place)) {
        nat->scratch =
            (char *)idist__mem_raw(&nat->g->w->cfg.mem, (reduce ? 2 : 1) * n * nat->size);

        if (!nat->scratch) {
            nat->error = MPI_ERR_NO_MEM;
            return;
        }

        if (narrow && !nat->hook)
            idist__type_widen((float *)(void *)nat->scratch, c->send, n, c->dtype);
        else idist__copy(nat->scratch, c->send, n * size);
        if (user && !user->fn) idist__reduce_scale(nat->scratch, n, dtype, user->factor);
        nat->in = nat->scratch;
        nat->out = nat->scratch +
                   (reduce ? n * nat->size : 0); // MPICH 4 does not survive MPI_Reduce in place
        nat->in_place = !reduce;
    } else if (all && nat->in_place) { // ours lies in the middle of what we send; MPI's rule for in
                                       // place is another one
        nat->scratch = (char *)idist__mem_raw(&nat->g->w->cfg.mem, c->count * nat->size);
        if (!nat->scratch) nat->error = MPI_ERR_NO_MEM;
        nat->out = nat->scratch;
        nat->in_place = false;
    }
}

// Some ranks are in place. Then all are; but nobody in all_to_all, where MPI is slower that way.
static void idist__native_same_place(idist__native *nat) {
    const idist__call *c = nat->c;
    bool spread = c->kind == IDIST__ALL_TO_ALL,
         first = c->kind == IDIST__EXSCAN && nat->g->rank == 0;
    size_t own = c->count * nat->size * (spread ? (size_t)nat->g->size : 1), at = 0;

    if (c->root >= 0 || c->kind == IDIST__REDUCE_SCATTER || nat->scratch) return;
    if (c->kind == IDIST__ALL_GATHER) at = own * (size_t)nat->g->rank;
    if (c->kind == IDIST__ALL_GATHERV)
        at = idist__displ(c->recvcounts, c->recvdispls, nat->g->rank) * nat->size;

    if (nat->in_place ? spread : first) { // the first rank of an exscan must not be written to
        nat->scratch = (char *)idist__mem_raw(&nat->g->w->cfg.mem, own);
        if (!nat->scratch) nat->error = MPI_ERR_NO_MEM;
        else memcpy(nat->scratch, c->send, own);
        if (spread) nat->in = nat->scratch;
        else nat->out = nat->scratch;
    } else if (!nat->in_place && !spread) {
        idist__copy(nat->out + at, c->send, own);
    }

    nat->in_place = !spread;
}

// All that can fail before MPI gets the call. flags: those of all slips.
static void idist__native_init(idist__native *nat, const idist_group *g, const idist__call *c,
                               uint32_t flags) {
    memset(nat, 0, sizeof *nat);
    nat->what = "MPI";
    nat->g = g;
    nat->c = c;
    nat->comm = idist__mpi_group_of(g)->comm;
    nat->many = (flags & IDIST__SLIP_MANY) != 0;
    nat->error = MPI_SUCCESS;
    nat->requests = nat->few;
    nat->room = (int)IDIST__COUNT_OF(nat->few);
    nat->type = idist__mpi_type(c->dtype);
    nat->size = idist_dtype_size(c->dtype);
    nat->in = (const char *)c->send;
    nat->out = (char *)c->recv;
    nat->nothing =
        c->kind != IDIST__BARRIER && c->count == 0 && !idist__kind_is_v(c->kind); // on all ranks
    if (nat->nothing) return;
    nat->in_place = idist__call_in_place(g, c);
    if (idist__kind_reduces(c->kind)) idist__native_reduction(nat);

    if (idist__kind_is_v(c->kind)) {
        nat->counts = (int *)idist__mem_alloc(&g->w->cfg.mem, sizeof(int) * 4 * (size_t)g->size);
        if (!nat->counts) nat->error = MPI_ERR_NO_MEM;
    }

    if (nat->error == MPI_SUCCESS && (flags & IDIST__SLIP_IN_PLACE)) idist__native_same_place(nat);
}

// Hands the call to MPI; with blocking, it is through after idist__native_end.
static void idist__native_begin(idist__native *nat, bool blocking) {
    const idist__call *c = nat->c;

    nat->blocking = blocking;
    if (nat->error != MPI_SUCCESS || nat->nothing) return;
    if ((idist__kind_reduces(c->kind) && (nat->many || c->kind != IDIST__REDUCE_SCATTER)) ||
        c->kind == IDIST__BROADCAST)
        idist__native_pieces(nat);
    else if (nat->many) idist__native_pairs(nat);
    else if (idist__kind_is_v(c->kind)) idist__native_move_v(nat);
    else idist__native_move(nat);
    if (c->kind == IDIST__REDUCE_SCATTER && nat->many)
        nat->out += (size_t)nat->g->rank * c->count * nat->size;
}

static bool idist__native_done(idist__native *nat) {
    while (nat->nrequests && nat->error == MPI_SUCCESS) {
        int done = 0,
            error = MPI_Test(&nat->requests[nat->nrequests - 1], &done, MPI_STATUS_IGNORE);
        if (error != MPI_SUCCESS) nat->error = error;
        else if (!done) return false;
        nat->nrequests--;
    }

    return true;
}

static void idist__native_finish(idist__native *nat) {
    const idist__call *c = nat->c;
    const idist_group *g = nat->g;

    if (!idist__kind_reduces(c->kind) || !c->count) return;
    if ((c->kind == IDIST__REDUCE && c->root != g->rank) ||
        (c->kind == IDIST__EXSCAN && g->rank == 0))
        return;

    if (idist__type_is_narrow(c->dtype) && !nat->hook) {
        if (c->op == IDIST_AVG) idist__reduce_divide(nat->out, c->count, IDIST_F32, g->size);
        idist__type_narrow(c->recv, (const float *)(const void *)nat->out, c->count, c->dtype);
        return;
    }

    if (nat->out != c->recv) memcpy(c->recv, nat->out, c->count * nat->size);
    if (!nat->hook) idist__reduce_finish(c->recv, c->count, c->dtype, c->op, g->size);
}

static void idist__native_free(idist__native *nat) {
    const idist_allocator *mem = &nat->g->w->cfg.mem;

    if (nat->own_op) MPI_Op_free(&nat->op);
    if (nat->own_type) MPI_Type_free(&nat->type);
    if (nat->requests != nat->few) idist__mem_free(mem, nat->requests);
    idist__mem_free(mem, nat->scratch);
    idist__mem_free(mem, nat->counts);
    idist__mem_free(mem, nat->hook);
    nat->g = NULL;
}

// What is with MPI cannot be taken back. It ends soon, now that all are in it or somebody is lost;
// if not, MPI keeps what is ours, and the caller's buffers.
static void idist__native_abandon(idist__native *nat) {
    int64_t deadline_ns = idist__os_deadline(IDIST__FLUSH_MS);
    int i;

    for (i = 0; i < nat->nrequests; i++) {
        int done = 0;

        while (MPI_Test(&nat->requests[i], &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && !done) {
            if (idist__os_now_ns() < deadline_ns) continue;
            idist__mpi_of(nat->g->w)->abandoned = true;
            nat->g = NULL;
            return;
        }
    }

    idist__native_free(nat);
}

// What was begun as blocking may have requests still.
static int idist__native_end(idist__native *nat) {
    while (!idist__native_done(nat)) continue;

    if (nat->error != MPI_SUCCESS) {
        idist__native_abandon(nat);
        return nat->error;
    }

    idist__native_finish(nat);
    idist__native_free(nat);

    return MPI_SUCCESS;
}

//------------------------------------------------------------------------------
// [mpi:slip]  what every rank shows the others before a collective
// uses base:type reduce world types
//
// Each rank has a slip of 56 bytes and needs those of all others: an all_gather by dissemination
// (Bruck et al., 1997). In step k a rank sends all slips it has, its own and those of the 2^k - 1
// ranks after it, to the rank 2^k before it:
//
//     5 ranks, what rank r has        r        | r+1      | r+2 r+3  | r+4
//                             before  step 0     step 1     step 2
//
// ceil(log2 n) steps of one message each, n slips sent in all. It is made of sends and receives,
// not of MPI_Allgather, because that could be neither given up at a deadline nor asked who is
// missing. Slips of consecutive calls cannot be mixed up: a step is received from one rank, on the
// group's communicator, and MPI keeps the order.
//------------------------------------------------------------------------------

static int idist__slip_post(idist_group *g) {
    idist__mpi_group *mg = idist__mpi_group_of(g);
    int n = g->size, have = mg->distance, count = n - have < have ? n - have : have, step = 0;
    size_t nbytes = sizeof(idist__slip) * (size_t)count;

    while ((1 << step) < have) step++;
    mg->error = MPI_Isend(mg->slips, (int)nbytes, MPI_BYTE, (g->rank - have + n) % n,
                          IDIST__TAG_SLIP + step, mg->comm,
                          &mg->requests[1]); // first, since the other one waits for it
    if (mg->error == MPI_SUCCESS)
        mg->error = MPI_Irecv(mg->slips + have, (int)nbytes, MPI_BYTE, (g->rank + have) % n,
                              IDIST__TAG_SLIP + step, mg->comm, &mg->requests[0]);

    return mg->error;
}

// Shows our slip for call number seq; its print is what the call says, its data what it
// contributes.
static void idist__slip_begin(idist_group *g, const idist__print *print, uint32_t flags,
                              const void *data, size_t nbytes) {
    idist__mpi_group *mg = idist__mpi_group_of(g);
    idist__slip *own = &mg->slips[0];

    own->print = *print;
    own->flags = flags;
    own->nbytes = (uint32_t)nbytes;
    if (nbytes) memcpy(own->data, data, nbytes);
    mg->entered = *print;
    mg->slip_seq = print->seq;
    mg->distance = 1;
    if (g->size > 1) idist__slip_post(g);
}

// 1: all slips are here. 0: not yet. -1: MPI failed, *error says how.
static int idist__slip_step(idist_group *g, int *error) {
    idist__mpi_group *mg = idist__mpi_group_of(g);

    while (mg->distance < g->size) {
        int done = 0, i;
        if ((*error = mg->error) != MPI_SUCCESS) return -1;

        for (i = 0; i < 2; i++) {
            if ((*error = MPI_Test(&mg->requests[i], &done, MPI_STATUS_IGNORE)) != MPI_SUCCESS)
                return -1;
            if (!done) return 0;
        }

        g->w->nmoved++;
        mg->distance = 2 * mg->distance < g->size ? 2 * mg->distance : g->size;
        if (mg->distance < g->size) idist__slip_post(g);
    }

    return 1;
}

// Shows the slips of the call once more, which says that this rank has those of all and comes.
static void idist__slip_commit(idist_group *g) {
    idist__mpi_group *mg = idist__mpi_group_of(g);
    if (idist__mpi_of(g->w)->threads) mg->slips[0].flags |= IDIST__SLIP_BUSY;
    mg->committed = mg->slip_seq;
    mg->distance = 1;
    idist__slip_post(g);
}

static void idist__slip_cancel(idist_group *g) {
    idist__mpi_group *mg = idist__mpi_group_of(g);
    int sent = 1;

    if (mg->requests[0] != MPI_REQUEST_NULL) MPI_Cancel(&mg->requests[0]);
    MPI_Wait(&mg->requests[0], MPI_STATUS_IGNORE);
    MPI_Test(&mg->requests[1], &sent, MPI_STATUS_IGNORE);
    if (!sent) mg->slips = NULL; // MPI keeps them
    if (!sent) MPI_Request_free(&mg->requests[1]);
}

static const idist__slip *idist__slip_of(const idist_group *g, int rank) {
    return &idist__mpi_group_of(g)->slips[(rank - g->rank + g->size) % g->size];
}

// Whether all slips are of the same call; if not, the same text on every rank.
static bool idist__slips_agree(const idist_group *g, char *text, size_t cap) {
    const idist__mpi_group *mg = idist__mpi_group_of(g);
    const idist__print *first = &idist__slip_of(g, 0)->print;
    int i;

    for (i = 1; i < g->size && memcmp(&mg->slips[i].print, &mg->slips[0].print, sizeof *first) == 0;
         i++)
        continue;
    if (i >= g->size) return true;
    for (i = 1; memcmp(&idist__slip_of(g, i)->print, first, sizeof *first) == 0; i++) continue;
    idist__mismatch_text(idist__print_difference(first, &idist__slip_of(g, i)->print), g->ranks[0],
                         first, g->ranks[i], &idist__slip_of(g, i)->print, text, cap);

    return false;
}

static uint32_t idist__slip_flags(const idist_group *g) {
    uint32_t flags = 0;
    int i;
    for (i = 0; i < g->size; i++) flags |= idist__mpi_group_of(g)->slips[i].flags;
    return flags;
}

// The bytes of this rank's contribution, if the result of the call follows from what fits into
// slips; on all ranks or none. Negative: it does not.
static int idist__slip_contribution(const idist_group *g, const idist__call *c) {
    size_t size = idist_dtype_size(c->dtype);
    bool all = c->kind == IDIST__REDUCE_SCATTER || c->kind == IDIST__ALL_TO_ALL ||
               c->kind == IDIST__SCATTER,
         root;

    if (g->size > IDIST__SLIP_RANKS || idist__kind_is_v(c->kind) || c->count > IDIST__SLIP_BYTES)
        return -1;
    if (idist__kind_reduces(c->kind) && (int)c->op >= IDIST_OP_USER) return -1;
    size *= c->count * (all ? (size_t)g->size : 1);
    if (size > IDIST__SLIP_BYTES) return -1;
    root = (c->kind != IDIST__BROADCAST && c->kind != IDIST__SCATTER) || c->root == g->rank;

    return root ? (int)size : 0;
}

// The result of a call whose contributions are all in the slips. Reductions go from rank to rank,
// in order.
static void idist__slip_result(const idist_group *g, const idist__call *c) {
    size_t part = c->count * idist_dtype_size(c->dtype), at = 0;
    const void *in[IDIST__SLIP_RANKS];
    char *recv = (char *)c->recv;
    int i, n = g->size;

    if (c->kind == IDIST__SCAN) n = g->rank + 1;
    if (c->kind == IDIST__EXSCAN) n = g->rank;
    if (!part || !n ||
        ((c->kind == IDIST__GATHER || c->kind == IDIST__REDUCE) && c->root != g->rank))
        return;
    if (c->kind == IDIST__SCATTER || c->kind == IDIST__REDUCE_SCATTER ||
        c->kind == IDIST__ALL_TO_ALL)
        at = part * (size_t)g->rank;

    if (c->kind == IDIST__BROADCAST || c->kind == IDIST__SCATTER) {
        if (c->kind == IDIST__SCATTER || c->root != g->rank)
            memcpy(recv, idist__slip_of(g, c->root)->data + at, part);
        return;
    }

    for (i = 0; i < n; i++) in[i] = idist__slip_of(g, i)->data + at;
    if (idist__kind_reduces(c->kind))
        idist__reduce_many(recv, in, n, c->count, c->dtype, c->op, c->op == IDIST_AVG ? n : 0);
    else
        for (i = 0; i < n; i++) memcpy(recv + part * (size_t)i, in[i], part);
}

//------------------------------------------------------------------------------
// [mpi:coll]  a collective from the first slip to the result
// uses os err mem base:type world core:call types error type native slip engine
//
//     QUEUED -> ENTERING -> COMMITTING -> RUNNING, blocking ----> done
//                  \--- somebody is BUSY -> RUNNING, in requests -/
//                  \--- all was in the slips --------------------/   (those that bind the ranks
//                  commit as well)
//
// In MPI a blocking collective does not match a non-blocking one, so all ranks need the same kind.
// They block, which some MPIs do twice as fast, when no rank has said that it is BUSY with other
// calls: collectives then never wait for each other in a circle. But who blocks hears of no
// failure. So nobody does before all have committed to the call, and who has does not go away any
// more, not even at a deadline or by idist_abort, unless one fails that has not. A rank that is
// called by several threads says BUSY with its commitment: another one of them may make a group,
// and block in that, before this call.
//------------------------------------------------------------------------------

static bool idist__coll_balanced(const idist_group *g) {
    uint64_t sum = 0, one;
    int i;

    for (i = 0; i < g->size; i++) {
        memcpy(&one, idist__mpi_group_of(g)->slips[i].data, sizeof one);
        sum += one;
    }

    return sum == 0;
}

// All ranks know that two of them do not agree. Which ones, and about what, they find by showing
// all counts.
static void idist__coll_unbalanced(const idist_group *g, const idist__task *t, char *text,
                                   size_t cap) {
    const idist_allocator *mem = &g->w->cfg.mem;
    size_t n = (size_t)g->size, i;
    uint64_t *all = (uint64_t *)idist__mem_alloc(mem, sizeof *all * 2 * n * (n + 1)),
             *own = all ? all + 2 * n * n : NULL;
    MPI_Request request;

    snprintf(text, cap, "the counts of two ranks differ in %s #%u",
             idist__kind_names[t->call.label], (unsigned)t->seq);
    if (!all) return;
    for (i = 0; i < n; i++) own[i] = idist__call_count(g, &t->call, (int)i, true);
    for (i = 0; i < n; i++) own[n + i] = idist__call_count(g, &t->call, (int)i, false);

    if (MPI_Iallgather(own, 2 * g->size, MPI_UINT64_T, all, 2 * g->size, MPI_UINT64_T,
                       idist__mpi_group_of(g)->comm, &request) != MPI_SUCCESS ||
        idist__mpi_await(&request, IDIST__FAREWELL_MS, "MPI_Iallgather") != IDIST_OK) {
        idist__mpi_of(g->w)->abandoned = true; // MPI may have the memory still
        return;
    }

    for (i = 0; i < n * n; i++) {
        uint64_t sent = all[i / n * 2 * n + i % n], expected = all[i % n * 2 * n + n + i / n];
        if (sent == expected) continue;
        idist__counts_text(g->ranks[i / n], sent, g->ranks[i % n], expected, "elements", t, text,
                           cap);
        break;
    }

    idist__mem_free(mem, all);
}

// Calls after which all ranks go on to a call of MPI that none may be missing from.
static bool idist__coll_binds(const idist__call *c) {
    return c->label == IDIST__NEW_GROUP || c->label == IDIST__SPLIT || c->label == IDIST__FINALIZE;
}

static void idist__coll_enter(idist_group *g, const idist__call *c, const idist__print *print,
                              bool busy) {
    int nbytes = idist__slip_contribution(g, c);
    uint32_t flags = busy ? IDIST__SLIP_BUSY : 0;
    uint64_t balance = idist__kind_is_v(c->kind) ? idist__call_balance(g, c) : 0;

    if (!idist__native_fits(g, c)) flags |= IDIST__SLIP_MANY;
    if (idist__call_in_place(g, c)) flags |= IDIST__SLIP_IN_PLACE;
    if (idist__kind_is_v(c->kind)) idist__slip_begin(g, print, flags, &balance, sizeof balance);
    else
        idist__slip_begin(g, print, flags, c->kind == IDIST__BROADCAST ? c->recv : c->send,
                          nbytes > 0 ? (size_t)nbytes : 0);
}

// MPI is through with the call of a task: how that went.
static int idist__op_end(idist__mpi *m, idist__task *t) {
    idist__mpi_op_of(t)->phase = IDIST__ASKING; // nothing of it is with MPI
    m->nap_ns = 0;
    m->w->nmoved++;
    return idist__native_end(&idist__mpi_op_of(t)->native);
}

static void idist__coll_done(idist__mpi *m, idist__task *t) {
    const char *what = idist__mpi_op_of(t)->native.what;
    int error = idist__op_end(m, t);
    if (error == MPI_SUCCESS) idist__complete(t, IDIST_OK, "");
    else idist__mpi_trouble(m, t->group, what, error);
}

static void idist__coll_pop(idist__task *t) {
    idist__mpi_group *mg = idist__mpi_group_of(t->group);
    mg->head = idist__mpi_op_of(t)->next;
    idist__mpi_op_of(t)->next = NULL;
}

// Takes the first collective out of the queue, to MPI unless all of it was in the slips.
static void idist__coll_run(idist__mpi *m, idist__task *t, bool blocking) {
    idist__mpi_op *op = idist__mpi_op_of(t);

    idist__coll_pop(t);

    if (!op->native.g) {
        idist__slip_result(t->group, &t->call);
        idist__complete(t, IDIST_OK, "");
        return;
    }

    op->phase = IDIST__RUNNING;
    idist__native_begin(&op->native, blocking);
    if (blocking || op->native.error != MPI_SUCCESS) idist__coll_done(m, t);
}

// All slips of the first collective are here.
static void idist__coll_entered(idist__mpi *m, idist__task *t) {
    idist_group *g = t->group;
    idist__native *nat = &idist__mpi_op_of(t)->native;
    uint32_t flags = idist__slip_flags(g);
    char text[400];
    bool small = idist__slip_contribution(g, &t->call) >= 0,
         agree = idist__slips_agree(g, text, sizeof text);

    if (agree && idist__kind_is_v(t->call.kind) && !idist__coll_balanced(g)) {
        idist__coll_unbalanced(g, t, text, sizeof text);
        agree = false;
    }

    if (!agree) {
        idist__mpi_group_of(g)->known = true;
        idist__group_fail(g, IDIST_ERR_MISMATCH, text);
        return;
    }

    if (!small) idist__native_init(nat, g, &t->call, flags);

    if (nat->error != MPI_SUCCESS) {
        idist__mpi_trouble(m, g, nat->what, nat->error);
    } else if (small ? idist__coll_binds(&t->call)
                     : !(flags & (IDIST__SLIP_BUSY | IDIST__SLIP_MANY))) {
        idist__mpi_op_of(t)->phase = IDIST__COMMITTING;
        idist__slip_commit(g);
    } else {
        idist__coll_run(m, t, false);
    }
}

// What the flags of all would be. In v-forms one rank does not know whether the counts of the
// others fit.
static uint32_t idist__coll_guess(const idist_group *g, const idist__call *c) {
    uint32_t flags = idist__call_in_place(g, c) ? IDIST__SLIP_IN_PLACE : 0;
    return idist__kind_is_v(c->kind) || !idist__native_fits(g, c) ? flags | IDIST__SLIP_MANY
                                                                  : flags;
}

// One step of the group's first collective. False when it has to wait.
static bool idist__coll_step(idist__mpi *m, idist__task *t) {
    idist_group *g = t->group;
    idist__mpi_op *op = idist__mpi_op_of(t);
    const idist__task *other;
    idist__print print;
    int error = MPI_SUCCESS, there;

    if (op->phase == IDIST__QUEUED && m->w->cfg.unchecked) {
        idist__native_init(&op->native, g, &t->call, idist__coll_guess(g, &t->call));
        idist__coll_run(m, t, !t->async);
        return true;
    }

    for (other = m->w->tasks; other && op->phase == IDIST__QUEUED && idist__coll_binds(&t->call);
         other = other->next)
        if (idist__mpi_op_of(other)->phase == IDIST__COMMITTING)
            return false; // others may block in that one first

    if (op->phase == IDIST__QUEUED) {
        print = idist__task_print(t, 0);
        op->phase = IDIST__ENTERING;
        // The quick way may have begun it already.
        if (idist__mpi_group_of(g)->slip_seq != t->seq)
            idist__coll_enter(g, &t->call, &print,
                              t->async || t->next || t->prev || idist__me.group_depth);
    }

    there = idist__slip_step(g, &error);
    if (there < 0) idist__mpi_trouble(m, g, "the exchange of slips", error);
    if (there <= 0) return there != 0;
    if (op->phase == IDIST__ENTERING) idist__coll_entered(m, t);
    else idist__coll_run(m, t, !(idist__slip_flags(g) & IDIST__SLIP_BUSY));

    return true;
}

// The group has failed, but others may be in MPI already and wait for us there. If so, this call
// ends well, as theirs.
static void idist__coll_see_through(idist__mpi *m, idist__task *t) {
    idist__mpi_group *mg = idist__mpi_group_of(t->group);
    int64_t deadline_ns = idist__os_deadline(IDIST__FIND_MS);
    bool late = false;
    int error, there = 0;

    while (!mg->refused && !there && !late) {
        there = idist__slip_step(t->group, &error);
        idist__note_progress(m);
        late = idist__os_now_ns() > deadline_ns;
    }

    if (late && !there) mg->committed--; // whoever hears of our failure does not wait for us
    m->abandoned = m->abandoned || (late && !there);
    if (there > 0 && !mg->refused)
        idist__coll_run(m, t, !(idist__slip_flags(t->group) & IDIST__SLIP_BUSY));
}

static void idist__coll_progress(idist__mpi *m, idist_group *g) {
    idist__mpi_group *mg = idist__mpi_group_of(g);
    while (mg->head && g->status == IDIST_OK && idist__coll_step(m, mg->head)) continue;
}

// A blocking call that MPI gets unchecked: the most common one without the detour over
// idist__native.
static bool idist__coll_direct(idist__mpi *m, idist_group *g, const idist__call *c) {
    const void *in = c->send == c->recv ? MPI_IN_PLACE : c->send;
    idist__native nat;
    int error;

    if (c->kind == IDIST__ALL_REDUCE && c->count && c->count <= IDIST__MPI_COUNT &&
        (int)c->op < IDIST_OP_USER && c->op != IDIST_AVG && !idist__type_is_narrow(c->dtype)) {
        error =
            MPI_Allreduce(in, c->recv, (int)c->count, idist__mpi_type(c->dtype),
                          idist__mpi_builtin_op(m, c->op, c->dtype), idist__mpi_group_of(g)->comm);
    } else {
        idist__native_init(&nat, g, c, idist__coll_guess(g, c));
        idist__native_begin(&nat, true);
        error = idist__native_end(&nat);
    }

    if (error == MPI_SUCCESS) g->seq++;
    else idist__mpi_trouble(m, g, "a collective of MPI", error);

    return error == MPI_SUCCESS;
}

// A blocking call while there is nothing else: without a task, if slips are enough and the others
// come soon. If not, or if anything is wrong, the task that follows goes on from here.
static bool idist__mpi_quick(idist_group *g, const idist__call *c) {
    idist__mpi *m = idist__mpi_of(g->w);
    idist__print print;
    char text[400];
    int i, there = 0, error;
    int64_t now;

    if (c->kind >= IDIST__SEND || g->size == 1) return false;
    if (m->w->cfg.unchecked) return idist__coll_direct(m, g, c);
    now = idist__os_now_ns();
    // After a while elsewhere, hear first what was said: MPI may need some looks for that.
    for (i = 0; i < 8 && now - m->looked_ns > IDIST__MS; i++) idist__note_progress(m);
    if (now - m->looked_ns > IDIST__MS) m->looked_ns = now;
    if (g->status != IDIST_OK) return false;
    print = idist__call_print(c, g->seq + 1);
    idist__coll_enter(g, c, &print, false);
    if (idist__slip_contribution(g, c) < 0 || idist__coll_binds(c)) return false;
    for (i = 0; i < (m->w->spin_ns ? IDIST__QUICK_LOOKS : 4) && !there; i++)
        there = idist__slip_step(g, &error);
    if (there < 0) idist__mpi_trouble(m, g, "the exchange of slips", error);
    if (there <= 0 || !idist__slips_agree(g, text, sizeof text)) return false;
    idist__slip_result(g, c);
    g->seq++;

    return true;
}

//------------------------------------------------------------------------------
// [mpi:note]  messages between two ranks: send, receive, and what ranks tell each other
// uses mem base:type world self types error native coll engine
//
// One receive for any note from anybody is posted at all times. Notes go to the group and the
// receive that they are meant for, or wait in the list of early ones. A message of up to 3.5 KiB
// comes with its note. A larger one:
//
//     sender                          receiver
//       LARGE  (what it is, its id) ->  waits for a receive that wants it, which posts MPI_Irecv
//              <- GRANT (id, tag)
//       MPI_Isend with that tag ----->  from buffer to buffer
//------------------------------------------------------------------------------

static void idist__note_take(idist__mpi *m, int source, const idist__note *note,
                             const void *payload);

// Sends a note; the payload is copied. A rank that is out of memory or whose MPI refuses fails the
// group of the note.
static void idist__note_send(idist__mpi *m, int rank, const idist__note *note, const void *payload,
                             size_t nbytes) {
    idist__outgoing *o;
    idist_group *g;
    int error = MPI_SUCCESS;

    if (m->peers[rank].lost || m->closing) return;

    if (rank == m->w->cfg.rank) {
        idist__note own = *note;
        own.nbytes = nbytes;
        idist__note_take(m, rank, &own, payload);
        return;
    }

    o = m->idle;
    if (o) m->idle = o->next;
    else o = (idist__outgoing *)idist__mem_raw(&m->w->cfg.mem, sizeof *o + IDIST__NOTE_BYTES);
    if (!o && note->type == IDIST__NOTE_FAIL && (o = m->spare) != NULL) m->spare = o->next;

    if (o) {
        o->note = *note;
        o->note.nbytes = nbytes;
        if (nbytes) memcpy(o + 1, payload, nbytes);
        error = MPI_Isend(&o->note, (int)(sizeof o->note + nbytes), MPI_BYTE, rank, IDIST__TAG_NOTE,
                          m->wire, &o->request);
        if (error == MPI_SUCCESS) {
            o->next = m->outgoing;
            m->outgoing = o;
            m->told[rank]++;
            return;
        }

        o->next = m->idle;
        m->idle = o;
    }

    g = idist__world_find_group(m->w, note->ctx);
    if (!o && g) idist__group_fail(g, IDIST_ERR_NO_MEMORY, "a rank is out of memory");
    else if (g) idist__mpi_trouble(m, g, "MPI_Isend", error);
}

static void idist__note_sweep(idist__mpi *m) {
    idist__outgoing **at = &m->outgoing;

    while (*at) {
        idist__outgoing *o = *at;
        int done = 0;

        if (MPI_Test(&o->request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && !done) {
            at = &o->next;
            continue;
        }

        *at = o->next; // gone out, or its receiver is gone
        o->next = m->idle;
        m->idle = o;
    }
}

// Data from or to the other rank's buffer, in pieces that MPI can count.
static void idist__data_move(idist__task *t, int rank, int tag, size_t nbytes) {
    idist__mpi *m = idist__mpi_of(t->group->w);
    idist__native *nat = &idist__mpi_op_of(t)->native;
    bool send = t->call.kind == IDIST__SEND;
    size_t at, k, most = IDIST__MPI_COUNT < ((size_t)1 << 30) ? IDIST__MPI_COUNT : (size_t)1 << 30;

    idist__native_init(nat, t->group, &t->call, 0);
    idist__mpi_op_of(t)->phase = IDIST__MOVING;

    for (at = 0; at < nbytes; at += k) {
        k = nbytes - at < most ? nbytes - at : most;
        if (send)
            IDIST__NATIVE_REQUEST(nat, MPI_Isend, (const char *)t->call.send + at, (int)k, MPI_BYTE,
                                  rank, tag, m->wire);
        else
            IDIST__NATIVE_REQUEST(nat, MPI_Irecv, (char *)t->call.recv + at, (int)k, MPI_BYTE, rank,
                                  tag, m->wire);
    }
}

// A receive takes a large message.
static void idist__receive_grant(idist__mpi *m, idist__task *t, int source,
                                 const idist__note *note) {
    idist__mpi_op *op = idist__mpi_op_of(t);
    idist__note grant;
    int turns = 0;

    memset(&grant, 0, sizeof grant);
    grant.type = IDIST__NOTE_GRANT;
    grant.ctx = note->ctx;
    grant.id = note->id;
    do m->next_tag = (m->next_tag + 1) % IDIST__TAG_RANGE;
    while (m->burnt[m->next_tag / 8] >> m->next_tag % 8 & 1 && ++turns < IDIST__TAG_RANGE);
    grant.tag = IDIST__TAG_DATA + m->next_tag;
    op->id = (uint64_t)m->next_tag;
    op->source = source;
    op->note = *note;
    idist__data_move(t, source, grant.tag,
                     (size_t)note->print.check * idist_dtype_size(t->call.dtype));
    idist__note_send(m, source, &grant, NULL, 0);
}

// Gives a message to the oldest receive that wants it. False: there is none. Receives that it does
// not fit fail.
static bool idist__receive_match(idist__mpi *m, idist_group *g, int source, const idist__note *note,
                                 const void *payload) {
    idist__task **at = &idist__mpi_group_of(g)->receives;
    int from = idist__mpi_group_of(g)->rank_of[source];

    while (*at) {
        idist__task *t = *at;
        idist_status s;
        char text[256];

        if (!idist__recv_wants(t, source, note->tag)) {
            at = &idist__mpi_op_of(t)->next;
            continue;
        }

        *at = idist__mpi_op_of(t)->next;

        if (!idist__message_fits(&t->call, (idist_dtype)note->print.dtype,
                                 (size_t)note->print.check, from, note->tag, &s, text,
                                 sizeof text)) {
            idist__complete(t, s, text);
            continue;
        }

        if (note->type == IDIST__NOTE_LARGE) {
            idist__receive_grant(m, t, source, note);
        } else {
            idist__copy(t->call.recv, payload, (size_t)note->nbytes);
            idist__recv_done(t, from, note->tag, (size_t)note->print.check);
        }

        return true;
    }

    return false;
}

static void idist__note_keep(idist__mpi *m, int source, const idist__note *note,
                             const void *payload) {
    idist__early **last,
        *e = (idist__early *)idist__mem_raw(&m->w->cfg.mem, sizeof *e + (size_t)note->nbytes);

    if (!e) {
        idist__group_fail(&m->w->group, IDIST_ERR_NO_MEMORY, "a rank is out of memory");
        return;
    }

    e->next = NULL;
    e->source = source;
    e->note = *note;
    if (note->nbytes) memcpy(e + 1, payload, (size_t)note->nbytes);
    for (last = &m->early; *last; last = &(*last)->next) continue;
    *last = e;
}

static void idist__send_begin(idist__mpi *m, idist__task *t) {
    idist_group *g = t->group;
    const idist__call *c = &t->call;
    size_t nbytes = c->count * idist_dtype_size(c->dtype);
    int rank = g->ranks[c->root];
    bool eager = nbytes <= IDIST__NOTE_BYTES || rank == m->w->cfg.rank;
    idist__note note;

    memset(&note, 0, sizeof note);
    note.type = eager ? IDIST__NOTE_EAGER : IDIST__NOTE_LARGE;
    note.ctx = g->ctx;
    note.tag = c->tag;
    note.print = idist__task_print(t, 0);
    note.id = idist__mpi_op_of(t)->id = ++m->next_id;
    m->peers[rank].sent++;
    idist__note_send(m, rank, &note, c->send, eager ? nbytes : 0);
    if (eager) idist__complete(t, IDIST_OK, "");
}

static void idist__receive_begin(idist__mpi *m, idist__task *t) {
    idist_group *g = t->group;
    idist__task **last;
    idist__early **at;

    idist__mpi_op_of(t)->next = NULL;
    for (last = &idist__mpi_group_of(g)->receives; *last; last = &idist__mpi_op_of(*last)->next)
        continue;
    *last = t;

    for (at = &m->early; *at; at = &(*at)->next) {
        idist__early *e = *at;
        if (e->note.ctx != g->ctx || e->note.type > IDIST__NOTE_LARGE ||
            !idist__recv_wants(t, e->source, e->note.tag))
            continue;

        if (idist__receive_match(m, g, e->source, &e->note, e + 1)) {
            *at = e->next;
            idist__mem_free(&m->w->cfg.mem, e);
        }

        return; // taken, or it did not fit
    }
}

// A GRANT: the task that it is for sends.
static void idist__note_granted(idist__mpi *m, int source, const idist__note *note) {
    idist__task *t;

    for (t = m->w->tasks; t; t = t->next) {
        idist__mpi_op *op = idist__mpi_op_of(t);
        if (t->call.kind != IDIST__SEND || op->phase != IDIST__ASKING || op->id != note->id)
            continue;
        idist__data_move(t, source, note->tag, t->call.count * idist_dtype_size(t->call.dtype));
        return;
    }
}

// The data of a large message has gone out, or is here.
static void idist__data_done(idist__mpi *m, idist__task *t) {
    const idist__mpi_op *op = idist__mpi_op_of(t);
    int error = idist__op_end(m, t);

    if (error != MPI_SUCCESS)
        idist__mpi_trouble(m, t->group, t->call.kind == IDIST__SEND ? "MPI_Isend" : "MPI_Irecv",
                           error);
    else if (t->call.kind == IDIST__SEND) idist__complete(t, IDIST_OK, "");
    else
        idist__recv_done(t, idist__mpi_group_of(t->group)->rank_of[op->source], op->note.tag,
                         (size_t)op->note.print.check);
}

//------------------------------------------------------------------------------
// [mpi:wait]  who waits, who is missing, who waits for whom
// uses err world types note
//
// A rank that has waited for a while tells the other members (WAITS). Who has entered the same call
// answers HERE, who has not ABSENT; at the deadline the others are missing. Ranks in calls of
// different groups, or in a receive and a collective, show each other nothing: they are found by
// what they wait for. Neither will ever go on when, on both sides,
//   - the rank has one thread and one call under way, which blocks without a time-out of its own,
//   - that call lacks something that only the other rank can begin to send,
//   - and the other rank has not begun it.
//------------------------------------------------------------------------------

// Whether t lacks something that this rank of its group has to begin.
static bool idist__wait_needs(const idist__task *t, int rank) {
    const idist__mpi_group *mg = idist__mpi_group_of(t->group);
    const idist__mpi_op *op = idist__mpi_op_of(t);

    if (idist__kind_is_p2p(t->call.kind)) return op->phase == IDIST__ASKING && t->call.root == rank;
    if (op->phase == IDIST__QUEUED) return true;
    return op->phase == IDIST__ENTERING &&
           (rank - t->group->rank + t->group->size) % t->group->size >= mg->distance;
}

// Whether what the other rank waits for may still come from us.
static bool idist__wait_answered(const idist__mpi *m, int peer) {
    const idist__note *waits = &m->peers[peer].waits;
    const idist_group *g = idist__world_find_group(m->w, waits->ctx);
    const idist__early *e;

    if (waits->print.kind == IDIST__RECV) return waits->got != m->peers[peer].sent;
    if (waits->print.kind != IDIST__SEND)
        return !g || g->status != IDIST_OK || (int32_t)(waits->print.seq - g->seq) <= 0;
    for (e = m->early; e; e = e->next) // its message lies here, and nobody wants it
        if (e->source == peer && e->note.type == IDIST__NOTE_LARGE && e->note.id == waits->id)
            return false;

    return true;
}

// Whether the other rank has not begun what we wait for.
static bool idist__wait_unbegun(const idist__mpi *m, const idist__task *ours, int peer) {
    const idist__peer *p = &m->peers[peer];
    if (ours->call.kind == IDIST__RECV) return p->waits.sent == p->got;
    return ours->call.kind == IDIST__SEND ||
           (p->absent_ctx == ours->group->ctx && p->absent_seq == ours->seq);
}

static void idist__wait_find_deadlock(idist__mpi *m, int peer) {
    const idist__note *waits = &m->peers[peer].waits;
    idist__task *ours = idist__world_only_call(m->w);
    idist_group *theirs = idist__world_find_group(m->w, waits->ctx);
    char cause[400];
    bool same;
    int rank;

    if (!ours || !ours->announced || waits->flags != (IDIST__WAITS_FOR_YOU | IDIST__WAITS_ONLY))
        return;
    rank = idist__mpi_group_of(ours->group)->rank_of[peer];
    same = ours->group->ctx == waits->ctx;
    if (rank < 0 || (same && ours->seq == waits->print.seq && ours->seq)) return;
    if (!idist__wait_needs(ours, rank) || !idist__wait_unbegun(m, ours, peer) ||
        idist__wait_answered(m, peer))
        return;
    idist__deadlock_text(ours, peer, &waits->print, same, cause, sizeof cause);
    idist__group_fail(ours->group, IDIST_ERR_MISMATCH, cause);
    if (theirs) idist__group_fail(theirs, IDIST_ERR_MISMATCH, cause);
}

static void idist__wait_seen(idist_group *g, int source, const idist__print *print) {
    idist__print *seen = &idist__mpi_group_of(g)->seen[idist__mpi_group_of(g)->rank_of[source]];
    if ((int32_t)(print->seq - seen->seq) >= 0) *seen = *print;
}

// The other rank waits in a call: it learns whether we have entered it.
static void idist__wait_heard(idist__mpi *m, int source, const idist__note *note) {
    idist_group *g = idist__world_find_group(m->w, note->ctx);
    idist__note answer = *note;

    m->peers[source].waits = *note;

    if (!idist__kind_is_p2p((idist__kind)note->print.kind)) {
        answer.type = IDIST__NOTE_ABSENT;
        if (g) idist__wait_seen(g, source, &note->print);

        if (g && (int32_t)(note->print.seq - g->seq) <= 0) {
            answer.type = IDIST__NOTE_HERE;
            answer.print = idist__mpi_group_of(g)->entered;
        }

        idist__note_send(m, source, &answer, NULL, 0);
    }

    idist__wait_find_deadlock(m, source);
}

static void idist__wait_tell(const idist__task *t, int rank, int flags) {
    idist__mpi *m = idist__mpi_of(t->group->w);
    int peer = t->group->ranks[rank];
    idist__note note;

    memset(&note, 0, sizeof note);
    note.type = IDIST__NOTE_WAITS;
    note.flags = (uint8_t)flags;
    note.ctx = t->group->ctx;
    note.print = idist__task_print(t, 0);
    note.id = idist__mpi_op_of(t)->id;
    note.sent = m->peers[peer].sent;
    note.got = m->peers[peer].got;
    idist__note_send(m, peer, &note, NULL, 0);
}

static void idist__mpi_announce(idist__task *t) {
    idist_group *g = t->group;
    bool p2p = idist__kind_is_p2p(t->call.kind), only = idist__world_only_call(g->w) == t;

    for (int i = 0; i < g->size && !t->done && (p2p || !g->w->cfg.unchecked); i++) {
        if (i == g->rank || (p2p && t->call.root != i)) continue;
        idist__wait_tell(t, i,
                         (idist__wait_needs(t, i) ? IDIST__WAITS_FOR_YOU : 0) |
                             (only ? IDIST__WAITS_ONLY : 0));
        if (!t->done) idist__wait_find_deadlock(idist__mpi_of(g->w), g->ranks[i]);
    }
}

static int idist__mpi_missing(idist__task *t, char *text, size_t cap) {
    const idist_group *g = t->group;
    const idist__print *seen = idist__mpi_group_of(g)->seen;
    int i, n = 0;

    if (t->call.kind == IDIST__RECV && idist__mpi_op_of(t)->phase == IDIST__MOVING) return 0;
    if (idist__kind_is_p2p(t->call.kind)) return idist__missing_peer(t, text, cap);
    for (i = 0; i < g->size; i++)
        if (i != g->rank && idist__wait_needs(t, i) && (int32_t)(seen[i].seq - t->seq) < 0)
            idist__missing_rank(g, i, &seen[i], n++, text, cap);
    if (n > 8) idist__append(text, cap, " and %d more", n - 8);

    return n;
}

//------------------------------------------------------------------------------
// [mpi:engine]  progress, sleep, failure
// uses os world self types error native slip coll note wait
//------------------------------------------------------------------------------

static void idist__note_take(idist__mpi *m, int source, const idist__note *note,
                             const void *payload) {
    idist_group *g = idist__world_find_group(m->w, note->ctx);

    m->nap_ns = 0;

    switch (note->type) {
    case IDIST__NOTE_EAGER:
    case IDIST__NOTE_LARGE:
        m->peers[source].got++;
        m->w->nmoved++;
        if (g && g->status != IDIST_OK) break;
        if (!g || !idist__receive_match(m, g, source, note, payload))
            idist__note_keep(m, source, note, payload);
        break;
    case IDIST__NOTE_GRANT: idist__note_granted(m, source, note); break;
    case IDIST__NOTE_WAITS: idist__wait_heard(m, source, note); break;
    case IDIST__NOTE_HERE:
        if (g) idist__wait_seen(g, source, &note->print);
        break;
    case IDIST__NOTE_ABSENT:
        m->peers[source].absent_ctx = note->ctx;
        m->peers[source].absent_seq = note->print.seq;
        idist__wait_find_deadlock(m, source);
        break;
    case IDIST__NOTE_FAIL: // of a group that may not exist here yet
        if (g && (int32_t)(note->sent - idist__mpi_group_of(g)->committed) < 0)
            idist__mpi_group_of(g)->refused = true;
        if (g) idist__group_fail(g, (idist_status)note->tag, (const char *)payload);
        else idist__note_keep(m, source, note, payload);
        break;
    default: break;
    }
}

static void idist__note_listen(idist__mpi *m) {
    int error = MPI_Irecv(m->note, (int)sizeof m->note, MPI_BYTE, MPI_ANY_SOURCE, IDIST__TAG_NOTE,
                          m->wire, &m->incoming);
    if (error != MPI_SUCCESS) idist__mpi_trouble(m, &m->w->group, "MPI_Irecv", error);
}

// With ULFM the receive from anybody is refused while somebody is lost, unless it was posted after
// we had heard of that.
static bool idist__note_arrived(idist__mpi *m, MPI_Status *status) {
    int there = 0, cancelled = 0, error = MPI_Test(&m->incoming, &there, status);

    if (error == MPI_SUCCESS) return there;
    idist__mpi_trouble(m, &m->w->group, "MPI_Test", error);
    if (!idist__mpi_is_loss(error)) return false;
    idist__mpi_find_lost(m);

    if (m->incoming != MPI_REQUEST_NULL) {
        MPI_Cancel(&m->incoming);
        there = MPI_Wait(&m->incoming, status) == MPI_SUCCESS;
        if (there) MPI_Test_cancelled(status, &cancelled);
    }

    if (!there || cancelled) idist__note_listen(m);

    return there && !cancelled;
}

static void idist__note_progress(idist__mpi *m) {
    MPI_Status status;
    idist__note note;
    char cause[sizeof m->w->group.cause];
    int turns;

    for (turns = 0;
         turns < 64 && m->incoming != MPI_REQUEST_NULL && idist__note_arrived(m, &status);
         turns++) {
        m->heard++;
        memcpy(&note, m->note, sizeof note);

        if (note.type == IDIST__NOTE_FAIL) { // while we deal with it we listen
            memcpy(cause, m->note + sizeof note,
                   note.nbytes < sizeof cause ? (size_t)note.nbytes : sizeof cause);
            idist__note_listen(m);
            idist__note_take(m, status.MPI_SOURCE, &note, cause);
        } else {
            idist__note_take(m, status.MPI_SOURCE, &note, m->note + sizeof note);
            idist__note_listen(m);
        }
    }
}

static void idist__mpi_progress(idist__world *w) {
    idist__mpi *m = idist__mpi_of(w);
    idist_group *g;
    idist__task *t;
    uint32_t ended;

    idist__note_progress(m);
    if (m->outgoing) idist__note_sweep(m);
    for (g = &w->group; g; g = g->next)
        if (g->rank >= 0) idist__coll_progress(m, g);

    do {
        ended = w->nended;

        for (t = w->tasks; t && ended == w->nended; t = t->next) {
            idist__mpi_op *op = idist__mpi_op_of(t);
            if ((op->phase != IDIST__RUNNING && op->phase != IDIST__MOVING)) continue;
            if (!idist__native_done(&op->native)) continue;
            if (op->phase == IDIST__RUNNING) idist__coll_done(m, t);
            else idist__data_done(m, t);
        }
    } while (ended != w->nended); // the list has changed
}

static void idist__mpi_start(idist__task *t) {
    idist_group *g = t->group;
    idist__mpi *m = idist__mpi_of(g->w);
    idist__mpi_group *mg = idist__mpi_group_of(g);
    idist__mpi_op *op = idist__mpi_op_of(t);

    m->threads = m->threads || (m->called && !pthread_equal(m->caller, pthread_self()));
    m->caller = pthread_self();
    m->called = true;
    memset(op, 0, sizeof *op);
    op->phase = IDIST__ASKING;

    if (idist__kind_reduces(t->call.kind) && (int)t->call.op >= IDIST_OP_USER) {
        op->user = *idist__call_user_op(g, &t->call);
        t->call.user = &op->user;
    }

    if (g->status != IDIST_OK) idist__complete(t, g->status, g->cause); // the quick way found out
    else if (t->call.kind == IDIST__SEND) idist__send_begin(m, t);
    else if (t->call.kind == IDIST__RECV) idist__receive_begin(m, t);
    else if (g->size == 1) idist__self_collective(t);
    else {
        op->phase = IDIST__QUEUED;
        if (mg->head) idist__mpi_op_of(mg->last)->next = t;
        else mg->head = t;
        mg->last = t;
        idist__coll_progress(m, g);
    }
}

// MPI cannot be slept in. We sleep beside it, for longer and longer, and look.
static void idist__mpi_sleep(idist__world *w, int64_t until_ns) {
    idist__mpi *m = idist__mpi_of(w);
    int64_t most = m->outgoing ? IDIST__NAP_MOVING_NS : IDIST__NAP_LONG_NS, wake_ns;
    uint32_t wakes = m->wakes;
    const idist__task *t;
    bool moving = false;

    for (t = w->tasks; t && !moving; t = t->next)
        moving = idist__mpi_op_of(t)->phase == IDIST__RUNNING ||
                 idist__mpi_op_of(t)->phase == IDIST__MOVING;

    if (moving &&
        w->driver ==
            IDIST__DRIVER_CALLER) { // as a blocking call of MPI would: it is moved by our looks
        pthread_mutex_unlock(&w->lock);
        sched_yield();
        pthread_mutex_lock(&w->lock);
        return;
    }

    if (moving) most = IDIST__NAP_MOVING_NS;
    m->nap_ns += !m->nap_ns                       ? IDIST__NAP_NS
                 : m->nap_ns < IDIST__NAP_MOST_NS ? m->nap_ns
                                                  : m->nap_ns / 64;
    if (m->nap_ns > most) m->nap_ns = most;
    wake_ns = idist__os_now_ns() + m->nap_ns;
    pthread_mutex_unlock(&w->lock);
    idist__os_futex_wait(&m->wakes, wakes, wake_ns < until_ns ? wake_ns : until_ns);
    pthread_mutex_lock(&w->lock);
}

static void idist__mpi_wake(idist__world *w) {
    __atomic_fetch_add(&idist__mpi_of(w)->wakes, 1u, __ATOMIC_SEQ_CST);
    idist__os_futex_wake(&idist__mpi_of(w)->wakes);
}

static bool idist__p2p_cancel(idist__task *t) {
    idist__mpi_op *op = idist__mpi_op_of(t);
    idist__task **at = &idist__mpi_group_of(t->group)->receives;
    bool receive = t->call.kind == IDIST__RECV;
    int i;

    while (*at && *at != t) at = &idist__mpi_op_of(*at)->next;
    if (*at) *at = op->next;
    if (receive && t->announced && t->call.root >= 0)
        idist__wait_tell(t, t->call.root, 0);       // it does not wait any more
    if (op->phase == IDIST__ASKING) return receive; // the other side has heard of a send
    for (i = 0; i < op->native.nrequests && receive; i++)
        if (op->native.requests[i] != MPI_REQUEST_NULL) MPI_Cancel(&op->native.requests[i]);
    if (receive) idist__mpi_of(t->group->w)->burnt[op->id / 8] |= (unsigned char)(1u << op->id % 8);
    idist__native_abandon(&op->native);
    op->phase = IDIST__ASKING;

    return false;
}

static bool idist__mpi_cancel(idist__task *t) {
    idist_group *g = t->group;
    idist__mpi_group *mg = idist__mpi_group_of(g);
    idist__mpi_op *op = idist__mpi_op_of(t);
    idist__task **at = &mg->head, *before = NULL;

    if (idist__kind_is_p2p(t->call.kind)) return idist__p2p_cancel(t);
    if (op->native.g) idist__native_abandon(&op->native);

    while (*at && *at != t) {
        before = *at;
        at = &idist__mpi_op_of(before)->next;
    }

    if (*at) *at = op->next;
    if (mg->last == t) mg->last = before;
    op->phase = IDIST__ASKING;

    return false;
}

static void idist__mpi_tell(idist_group *g) {
    idist__mpi *m = idist__mpi_of(g->w);
    idist__mpi_group *mg = idist__mpi_group_of(g);
    idist__note note;
    int i;

    if (mg->head && idist__mpi_op_of(mg->head)->phase == IDIST__COMMITTING)
        idist__coll_see_through(m, mg->head);
    idist__slip_cancel(g);
    if (mg->known) return;
    mg->known = true;
    memset(&note, 0, sizeof note);
    note.type = IDIST__NOTE_FAIL;
    note.ctx = g->ctx;
    note.tag = (int32_t)g->status;
    note.sent = mg->committed;
    for (i = 0; i < g->size; i++)
        if (i != g->rank) idist__note_send(m, g->ranks[i], &note, g->cause, strlen(g->cause) + 1);
#ifdef IDIST__ULFM
    if (m->fault_tolerant)
        MPIX_Comm_revoke(mg->comm); // who is in MPI comes out, after the notes have gone out
#endif
}

static void idist__mpi_flush(idist__world *w, int64_t until_ns) {
    while (idist__mpi_of(w)->outgoing && idist__os_now_ns() < until_ns) {
        idist__mpi_progress(w);
        pthread_mutex_unlock(&w->lock);
        sched_yield();
        pthread_mutex_lock(&w->lock);
    }
}

//------------------------------------------------------------------------------
// [mpi:join]  adopt or initialise, open, shrink, close
// uses os err mem base:log config world group types error type slip coll wait
// uses engine
//------------------------------------------------------------------------------

// MPI begins and ends once per process.
static pthread_mutex_t idist__mpi_life = PTHREAD_MUTEX_INITIALIZER;
static int idist__mpi_worlds;  // open
static bool idist__mpi_ours;   // initialised by us
static int idist__mpi_threads; // that MPI has made then
static bool idist__mpi_kept;   // not all came to the end of a failed world: MPI_Finalize would hang

static MPI_Comm idist__mpi_base(const idist__config *c) {
    return c->mpi_comm ? *(const MPI_Comm *)c->mpi_comm : MPI_COMM_WORLD;
}

// A launcher of MPI started us, or the program uses MPI. A rank and size from the user or torchrun
// are of another world.
static bool idist__mpi_is_meant(const idist__config *c, bool initialised) {
    bool pmi = idist__os_env("PMI_RANK") || idist__os_env("PMIX_RANK") || idist__os_env("PMI_PORT");
    return c->backends[0] || c->mpi_comm ||
           strstr("openmpi mvapich2 hydra jsrun pals", c->launcher) ||
           (pmi && strstr("slurm flux none", c->launcher)) ||
           (initialised && strcmp(c->launcher, "none") == 0);
}

static idist_status idist__mpi_sizes_differ(const idist__config *c, int rank, int size) {
    char library[MPI_MAX_LIBRARY_VERSION_STRING + 1] = "";
    int n = 0;

    MPI_Get_library_version(library, &n);
    library[strcspn(library, "\n,")] = 0;

    return idist__fail(IDIST_ERR_ENV,
                       "initialize: the launcher (%s%s%s) says rank %d of %d, the MPI that this "
                       "program was linked with (%s) "
                       "says rank %d of %d: start it with the mpirun or mpiexec of that MPI, or "
                       "set IDIST_BACKEND=ring",
                       c->launcher, c->rank_var ? " by " : "", c->rank_var ? c->rank_var : "",
                       c->rank, c->world_size, library, rank, size);
}

static idist_status idist__mpi_claim(idist__config *c, const char **why) {
    int initialised = 0, finalized = 0, level, rank, size, error = MPI_SUCCESS;
    bool given = strcmp(c->launcher, "explicit") == 0;

    MPI_Initialized(&initialised);
    MPI_Finalized(&finalized);
    *why = "no launcher of MPI started this process";
    if (!idist__mpi_is_meant(c, initialised && !finalized)) return IDIST_ERR_NO_BACKEND;
    if (finalized)
        return idist__fail(IDIST_ERR_STATE, "initialize: MPI was finalized in this process and "
                                            "cannot begin again; to open worlds one after "
                                            "the other, initialise MPI yourself");

    if (!initialised) {
        idist__mpi_threads = -idist__os_nthreads();
        error = MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level);
        if (error != MPI_SUCCESS) return idist__mpi_fail("initialize: MPI_Init_thread", error);
        idist__mpi_threads += idist__os_nthreads();
        idist__mpi_ours = true;
    }

    MPI_Comm_rank(idist__mpi_base(c), &rank);
    MPI_Comm_size(idist__mpi_base(c), &size);
    if (strcmp(c->launcher, "none") == 0) c->launcher = "mpi";
    else if ((given || !c->mpi_comm) && (size != c->world_size || (given && rank != c->rank)))
        return idist__mpi_sizes_differ(c, rank, size);
    c->rank = rank;
    c->world_size = size;

    return IDIST_OK;
}

// Who is where. Contributions lie in the table already.
static idist_status idist__mpi_table(idist__mpi *m) {
    const idist__config *cfg = &m->w->cfg;
    idist__node *nodes = m->w->nodes, *own = &nodes[cfg->rank];
    int64_t nbytes = cfg->shm_asked ? (int64_t)cfg->shm_nbytes : 0, check = !cfg->unchecked;
    int64_t set[4] = {nbytes, -nbytes, check, -check}, most[4];
    int error;

    idist__copy_text(own->hostname, sizeof own->hostname, m->w->hostname);
    own->host = idist__host_key(cfg);
    error = MPI_Allgather(MPI_IN_PLACE, 0, MPI_BYTE, nodes, sizeof *nodes, MPI_BYTE, m->wire);
    if (error == MPI_SUCCESS) error = MPI_Allreduce(set, most, 4, MPI_INT64_T, MPI_MAX, m->wire);
    if (error != MPI_SUCCESS) return idist__mpi_fail("MPI_Allgather", error);
    if (most[0] == -most[1] && most[2] == -most[3]) return IDIST_OK;

    return idist__fail(IDIST_ERR_ENV, "initialize: %s differs between ranks",
                       most[0] == -most[1] ? "IDIST_CHECK" : "IDIST_SHM_MIB (desc.shm_nbytes)");
}

// The ranks of this host: the cores they may use together, and the window for idist_alloc.
static idist_status idist__mpi_share(idist__mpi *m) {
    idist__world *w = m->w;
    idist__cpus own, together;
    MPI_Comm host;
    void *base = NULL;
    int error = MPI_Comm_split_type(m->wire, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host), n = 1;

    if (error != MPI_SUCCESS) return idist__mpi_fail("MPI_Comm_split_type", error);
    MPI_Comm_set_errhandler(host, MPI_ERRORS_RETURN);
    MPI_Comm_size(host, &n);
    idist__os_cpus(&own);
    error = MPI_Allreduce(&own, &together, (int)sizeof own, MPI_UINT8_T, MPI_BOR, host);
    if (error == MPI_SUCCESS) w->ncores = idist__cpus_count(&together);

    if (error == MPI_SUCCESS && n > 1 && w->cfg.shm_asked) {
        if (MPI_Win_allocate_shared((MPI_Aint)w->cfg.shm_nbytes, 1, MPI_INFO_NULL, host, &base,
                                    &m->win) != MPI_SUCCESS)
            m->win = MPI_WIN_NULL;
        if (m->win != MPI_WIN_NULL)
            m->window = idist__window_adopt((char *)base, w->cfg.shm_nbytes);
    }

    MPI_Comm_free(&host);

    return error == MPI_SUCCESS ? IDIST_OK : idist__mpi_fail("MPI_Allreduce", error);
}

static idist_status idist__mpi_make(idist__mpi *m) {
    static MPI_User_function *const own[4] = {idist__mpi_sum, idist__mpi_prod, idist__mpi_min,
                                              idist__mpi_max};
    idist__world *w = m->w;
    MPI_Request request;
    int level = MPI_THREAD_SINGLE, error, i;
    idist_status s;

    m->peers =
        (idist__peer *)idist__mem_alloc(&w->cfg.mem, sizeof *m->peers * (size_t)w->group.size);
    m->told = (int *)idist__mem_alloc(&w->cfg.mem, sizeof(int) * (size_t)w->group.size);
    if (!m->peers || !m->told) return IDIST_ERR_NO_MEMORY;

    for (i = 1; i < w->group.size; i++) {
        idist__outgoing *o =
            (idist__outgoing *)idist__mem_alloc(&w->cfg.mem, sizeof *o + IDIST__NOTE_BYTES);
        if (!o) return IDIST_ERR_NO_MEMORY;
        o->next = m->spare;
        m->spare = o;
    }

    MPI_Query_thread(&level);
    w->nforeign = level < MPI_THREAD_SERIALIZED ? INT_MAX / 2 : idist__mpi_threads;
    w->threadless =
        level < MPI_THREAD_SERIALIZED || (idist__mpi_worlds && level < MPI_THREAD_MULTIPLE);
    error = MPI_Comm_idup(idist__mpi_base(&w->cfg), &m->wire, &request);
    if (error != MPI_SUCCESS) return idist__mpi_fail("initialize: MPI_Comm_idup", error);
    if ((s = idist__mpi_await(&request, w->cfg.init_timeout_ms, "initialize")) != IDIST_OK)
        return s;
    MPI_Comm_set_errhandler(m->wire, MPI_ERRORS_RETURN);
    // From here on nothing keeps this rank from going on with the others.
    error = MPI_Comm_dup(m->wire, &m->main);
    if (error != MPI_SUCCESS) return idist__mpi_fail("initialize: MPI_Comm_dup", error);
#ifdef IDIST__ULFM
    m->fault_tolerant = idist__os_env("OMPI_MCA_mpi_ft_enable") != NULL; // by mpirun --with-ft ulfm
#endif
    if ((s = idist__mpi_table(m)) != IDIST_OK || (s = idist__mpi_share(m)) != IDIST_OK) return s;
    if (idist__mpi_keyval == MPI_KEYVAL_INVALID)
        MPI_Type_create_keyval(MPI_TYPE_NULL_COPY_FN, MPI_TYPE_NULL_DELETE_FN, &idist__mpi_keyval,
                               NULL);
    for (i = 0; i < 4; i++)
        if ((error = MPI_Op_create(own[i], 1, &m->ops[i])) != MPI_SUCCESS)
            return idist__mpi_fail("MPI_Op_create", error);
    idist__note_listen(m);

    return IDIST_OK;
}

static void idist__mpi_free(idist__mpi *m) {
    const idist_allocator *mem = &m->w->cfg.mem;

    idist__mem_free_list(mem, m->early);
    idist__mem_free_list(mem, m->idle);
    idist__mem_free_list(mem, m->spare);
    idist__mem_free(mem, m->peers);
    idist__mem_free(mem, m->told);
    idist__mem_free(mem, m);
}

static idist_status idist__mpi_open(idist__world *w) {
    idist__mpi *m = (idist__mpi *)idist__mem_alloc(&w->cfg.mem, sizeof *m);
    idist_status s;

    if ((w->impl = m) == NULL) return IDIST_ERR_NO_MEMORY;
    m->w = w;
    m->shrunk = MPI_COMM_NULL;
    m->win = MPI_WIN_NULL;
    m->incoming = MPI_REQUEST_NULL;

    if ((s = idist__mpi_make(m)) != IDIST_OK) {
        if (s == IDIST_ERR_ENV) MPI_Comm_free(&m->main); // settings differ: all ranks are here
        if (s == IDIST_ERR_ENV) MPI_Comm_free(&m->wire);
        if (s != IDIST_ERR_TIMEOUT) idist__mpi_free(m); // else MPI has the address of m->wire
        return s;
    }

    pthread_mutex_lock(&idist__mpi_life);
    idist__mpi_worlds++;
    pthread_mutex_unlock(&idist__mpi_life);

    return IDIST_OK;
}

// The communicator of a group: of the world, a second one beside the wire; else made by its members
// alone.
static int idist__mpi_communicator(idist__mpi *m, const idist_group *g, MPI_Comm *comm) {
    bool shrunk = m->shrunk != MPI_COMM_NULL && m->shrunk_ctx == g->ctx;
    MPI_Group all, members;
    int error;

    if (g == &m->w->group || shrunk) {
        *comm = shrunk ? m->shrunk : m->main;
        if (shrunk) m->shrunk = MPI_COMM_NULL;
        return MPI_SUCCESS;
    }

    MPI_Comm_group(m->wire, &all);
    MPI_Group_incl(all, g->size, g->ranks, &members);
    error = MPI_Comm_create_group(m->wire, members, (int)(g->ctx % IDIST__TAG_RANGE), comm);
    MPI_Group_free(&members);
    MPI_Group_free(&all);

    return error;
}

static void idist__mpi_group_free(idist_group *g) {
    idist__mpi_group *mg = idist__mpi_group_of(g);
    idist__mem_free(&g->w->cfg.mem, mg->rank_of);
    idist__mem_free(&g->w->cfg.mem, mg->seen);
    idist__mem_free(&g->w->cfg.mem, mg->slips);
}

static idist_status idist__mpi_group_open(idist_group *g) {
    idist__mpi *m = idist__mpi_of(g->w);
    idist__mpi_group *mg = idist__mpi_group_of(g);
    const idist_allocator *mem = &g->w->cfg.mem;
    const idist__early *e;
    int i, error;

    mg->comm = MPI_COMM_NULL;
    mg->requests[0] = mg->requests[1] = MPI_REQUEST_NULL;
    // Whatever happens here, the other members are in this.
    error = idist__mpi_communicator(m, g, &mg->comm);
    if (error != MPI_SUCCESS) return idist__mpi_fail("MPI_Comm_create_group", error);
    mg->rank_of = (int *)idist__mem_alloc(mem, sizeof(int) * (size_t)g->w->group.size);
    mg->seen = (idist__print *)idist__mem_alloc(mem, sizeof *mg->seen * (size_t)g->size);
    mg->slips = (idist__slip *)idist__mem_alloc(mem, sizeof *mg->slips * (size_t)g->size);

    if (!mg->rank_of || !mg->seen || !mg->slips) {
        idist__group_fail(g, IDIST_ERR_NO_MEMORY,
                          "a rank could not make its part of the group"); // the others have it
        idist__mpi_group_free(g);
        return IDIST_ERR_NO_MEMORY;
    }

    MPI_Comm_set_errhandler(mg->comm, MPI_ERRORS_RETURN);
    memset(mg->rank_of, -1, sizeof(int) * (size_t)g->w->group.size);
    for (i = 0; i < g->size; i++) mg->rank_of[g->ranks[i]] = i;
    for (e = m->early; e; e = e->next)
        if (e->note.ctx == g->ctx && e->note.type == IDIST__NOTE_FAIL)
            idist__group_fail(g, (idist_status)e->note.tag, (const char *)(e + 1));
    for (i = 0; i < g->size; i++)
        if (m->peers[g->ranks[i]].lost) idist__world_lost(m->w, g->ranks[i], "its process ended");

    return IDIST_OK;
}

static void idist__mpi_group_close(idist_group *g) {
    idist__mpi *m = idist__mpi_of(g->w);
    idist__mpi_group *mg = idist__mpi_group_of(g);
    idist__early **at = &m->early;
    char cause[200];

    snprintf(cause, sizeof cause, "rank %d on %s left without idist_finalize", g->w->cfg.rank,
             g->w->hostname);
    if (g->w->leaves) idist__group_fail(g, IDIST_ERR_PEER_LOST, cause);
    idist__slip_cancel(g);

    while (*at) {
        idist__early *e = *at;

        if (e->note.ctx != g->ctx) {
            at = &e->next;
            continue;
        }

        *at = e->next;
        idist__mem_free(&g->w->cfg.mem, e);
    }

    // After a failure the others may never come to this, and MPICH 5 frees none with a message that
    // nobody has taken.
    if (g->status == IDIST_OK && m->w->group.status == IDIST_OK && g != &m->w->group)
        MPI_Comm_free(&mg->comm);
    idist__mpi_group_free(g);
}

// After a failure: waits a moment for the other ranks to come here too. Without them MPI_Finalize
// would wait for ever, and after a loss that of Open MPI 5 may even with them.
static bool idist__mpi_farewell(idist__mpi *m) {
    MPI_Request request;
    return !m->fault_tolerant && !m->abandoned && MPI_Ibarrier(m->wire, &request) == MPI_SUCCESS &&
           idist__mpi_await(&request, IDIST__FAREWELL_MS, "finalize") == IDIST_OK;
}

// What others have said in the last barrier is still to come. A communicator is freed when nothing
// is under way in it.
static void idist__note_drain(idist__mpi *m) {
    int64_t deadline_ns = idist__os_deadline(IDIST__FAREWELL_MS);
    int expected = 0;
    m->closing = true;
    MPI_Reduce_scatter_block(m->told, &expected, 1, MPI_INT, MPI_SUM, m->wire);
    while (m->heard < expected && idist__os_now_ns() < deadline_ns) idist__note_progress(m);
}

static void idist__mpi_close(idist__world *w, bool clean) {
    idist__mpi *m = idist__mpi_of(w);
    char text[sizeof idist__me.text];
    bool together;
    int i;

    memcpy(text, idist__me.text, sizeof text);
    pthread_mutex_lock(&w->lock);
    w->group.rank = -1; // notes that still come concern nobody
    idist__mpi_flush(w, idist__os_deadline(IDIST__FLUSH_MS));
    if (clean) idist__note_drain(m);
    together = (clean && !m->abandoned) || idist__mpi_farewell(m);

    if (m->incoming != MPI_REQUEST_NULL) {
        MPI_Cancel(&m->incoming);
        MPI_Wait(&m->incoming, MPI_STATUS_IGNORE);
    }

    if (m->window) idist__window_close(m->window);
    if (clean && m->win != MPI_WIN_NULL) MPI_Win_free(&m->win);
    if (clean) MPI_Comm_free(&m->main);
    if (clean) MPI_Comm_free(&m->wire);
    for (i = 0; i < 4; i++) MPI_Op_free(&m->ops[i]);
    pthread_mutex_unlock(&w->lock);
    pthread_mutex_lock(&idist__mpi_life);

    if (!together && idist__mpi_ours && !idist__mpi_kept) {
        idist__mpi_kept = true;
        idist__log_print(&w->log, IDIST_LOG_WARN,
                         "not all ranks came to the end: MPI is not finalized");
    }

    if (--idist__mpi_worlds == 0 && idist__mpi_ours && !idist__mpi_kept) MPI_Finalize();
    pthread_mutex_unlock(&idist__mpi_life);
    idist__mpi_free(m);
    memcpy(idist__me.text, text, sizeof text);
}

static void *idist__mpi_alloc(idist__world *w, size_t nbytes) {
    idist__window *window = idist__mpi_of(w)->window;
    return window ? idist__window_alloc(window, nbytes) : NULL;
}

#ifdef IDIST__ULFM
// Leaves the communicator for the group_open that follows.
static idist_status idist__mpi_shrink(idist_group *g, int *ranks, int *n, uint32_t *serial) {
    idist__mpi *m = idist__mpi_of(g->w);
    MPI_Comm from = idist__mpi_group_of(g)->comm, to = MPI_COMM_NULL;
    MPI_Group all, members;
    int error, turns, i;

    if (!m->fault_tolerant) return idist__needs_ulfm("shrink");
    MPIX_Comm_revoke(from);
    error = MPIX_Comm_shrink(from, &to);

    for (turns = 0; turns < g->size && error == MPI_SUCCESS; turns++) {
        uint32_t own = *serial;
        MPI_Comm again = MPI_COMM_NULL;
        int flag;
        MPI_Comm_set_errhandler(to, MPI_ERRORS_RETURN);
        flag = MPI_Allreduce(&own, serial, 1, MPI_UINT32_T, MPI_MAX, to) == MPI_SUCCESS;
        MPIX_Comm_agree(to, &flag);
        if (flag) break;
        *serial = own; // one more was lost meanwhile
        error = MPIX_Comm_shrink(to, &again);
        MPI_Comm_free(&to);
        to = again;
    }

    if (error != MPI_SUCCESS) return idist__mpi_fail("shrink: MPIX_Comm_shrink", error);
    MPI_Comm_group(m->wire, &all);
    MPI_Comm_group(to, &members);
    MPI_Group_size(members, n);
    for (i = 0; i < *n; i++) MPI_Group_translate_ranks(members, 1, &i, all, &ranks[i]);
    MPI_Group_free(&members);
    MPI_Group_free(&all);
    m->shrunk = to;
    m->shrunk_ctx = idist__group_ctx(g, *serial, 0);

    return IDIST_OK;
}

static idist_status idist__mpi_agree(idist_group *g, int *flag) {
    MPI_Comm comm = idist__mpi_group_of(g)->comm;
    int error;

    if (!idist__mpi_of(g->w)->fault_tolerant) return idist__needs_ulfm("agree");
    MPIX_Comm_failure_ack(comm);
    error = MPIX_Comm_agree(comm, flag);

    return error == MPI_SUCCESS || idist__mpi_is_loss(error)
               ? IDIST_OK
               : idist__mpi_fail("agree: MPIX_Comm_agree", error);
}
#define IDIST__ULFM_CALLS idist__mpi_shrink, idist__mpi_agree
#else
#define IDIST__ULFM_CALLS NULL, NULL
#endif

const idist_backend_api *idist_mpi_backend(void) {
    // clang-format off
    static const idist_backend_api api = {
        IDIST__BACKEND_ABI, sizeof(idist_backend_api), "mpi", sizeof(idist__mpi_op), sizeof(idist__mpi_group),
        idist__mpi_claim, idist__mpi_open, idist__mpi_close,
        idist__mpi_group_open, idist__mpi_group_close, NULL, NULL,
        idist__mpi_quick, idist__mpi_start, idist__mpi_progress, idist__mpi_sleep, idist__mpi_wake,
        idist__mpi_cancel, idist__mpi_tell, idist__mpi_flush, idist__mpi_announce, idist__mpi_missing,
        idist__mpi_alloc, IDIST__ULFM_CALLS, NULL};

    // clang-format on
    return &api;
}

// Tests set these from outside.
#undef IDIST__MPI_COUNT

#include "idist_end.h"

#endif // IDIST_IMPLEMENTATION
