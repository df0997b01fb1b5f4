/* idist_mpi.h - v0.2.0 - the MPI backend of idist: the same program on a cluster - MIT license

DO THIS

    Include this file in the file that defines IDIST_IMPLEMENTATION, after idist.h, or on the
    command line. Compile with the compiler of your MPI:

        mpicc -DIDIST_IMPLEMENTATION -include idist_mpi.h app.c -o app && mpirun -n 4 ./app

    The source does not change. Under mpirun or mpiexec, idist_initialize picks this backend. Alone,
    under idist_spawn or under torchrun, it picks what it would pick without this header.
    IDIST_BACKEND=mpi or IDIST_BACKEND=ring overrides the choice.

WHAT IT IS

    Every collective runs as the corresponding collective of MPI, on a communicator of its group.
    Requests become MPI's non-blocking operations. Any MPI from 3.0 on will do. Nothing is assumed
    about the type of a handle. So a program built for the standard ABI of MPI 5.0 (mpicc_abi) runs
    on every library that implements the ABI. Floats of 16 and 8 bits are reduced as F32.

    Before MPI sees a collective, the ranks exchange headers that describe the call
    (mpi/exchange.h). This costs each rank ceil(log2 n) messages, the first of 56 bytes. The
    exchange detects ranks that make a different call and ranks that do not enter the call. It also
    carries contributions of up to 24 bytes (built-in ops, groups of up to 64 ranks), which then
    need no collective of MPI. Before ranks block inside MPI they exchange headers a second time.

    IDIST_CHECK=0, set on all ranks, skips the exchange. That is faster, but

      - mismatches go undetected
      - blocking collectives have no deadline
      - this rank's requests do not progress during a blocking collective, not even inside
        group_begin and group_end
      - MPI's own rules apply: either all ranks block or none does, and either all are in place or
        none is

    Send and receive use control messages (mpi/control.h), because MPI neither compares dtypes nor
    keeps a message that does not fit. Large messages go straight from buffer to buffer after sender
    and receiver have matched.

WHO OWNS MPI

    If MPI is already initialized, idist duplicates MPI_COMM_WORLD, or *desc.mpi_comm, and otherwise
    leaves MPI alone. The program must call idist_finalize before MPI_Finalize. Otherwise
    idist_finalize and all other calls of the world return IDIST_ERR_STATE, on all ranks.

    If MPI is not initialized, idist_initialize calls MPI_Init_thread, and closing the last world
    calls MPI_Finalize. MPI cannot be initialized twice, so a later idist_initialize returns
    IDIST_ERR_STATE. MPI is not finalized after a failure under ULFM, or if the world failed and
    some rank does not close it within a second. In these cases MPI_Finalize could block forever;
    mpirun ends the job when the process exits.

    idist advances requests in a thread of its own. While a request is open, a program that itself
    calls MPI needs MPI_THREAD_MULTIPLE. A program that has several worlds open at the same time
    also needs MPI_THREAD_MULTIPLE. Below MPI_THREAD_SERIALIZED (MPI_Init) idist starts no such
    thread, and only the thread that initialized MPI may call idist.

WHAT MPI DOES NOT GIVE

    Fault tolerance: most MPIs end the job when a rank dies, and their launchers report it. Open MPI
    5 under `mpirun --with-ft ulfm` does not: the survivors get IDIST_ERR_PEER_LOST, and
    idist_shrink gives them a group to continue with. Groups without the dead rank remain usable.
    From them and from the survivors' group, the ranks can make further groups with idist_split and
    idist_new_group_by_members. There is one exception: if a rank dies inside MPI_Comm_create_group
    after all members have entered it, the others stay blocked there, because the call does not
    return in Open MPI 5.0.

    Deadlines and idist_abort inside blocking collectives, idist_new_group, _split, _shrink and
    _agree, once all ranks have entered.

    Several threads of one rank that make groups at the same time.

    Buffers of a failed request: an operation that all ranks have entered cannot be taken back.
    idist waits a tenth of a second for it to end. After that, MPI may still use the buffers, and
    the fn and arg of a user-defined op, so keep them.

    Sleep: a rank that waits for others to enter polls every 1 to 4 ms. A rank whose call is inside
    MPI polls the way MPI does.

    Bitwise equal results: guaranteed for contributions that travel in headers. For other results,
    this depends on MPI_Allreduce; the tested MPIs guarantee it.

    Registered memory: idist_alloc returns plain memory, which suits MPI's collectives as well as
    any other. With desc.shm_nbytes or IDIST_SHM_MIB set, it returns part of an MPI window that all
    ranks of the host map. The window ends with the world.

HOW IT FITS

    This header fills in an idist_backend_api (src/core/model.h) and calls MPI; nothing else in
    idist uses MPI. It shares with the ring only what the core provides: tasks, groups,
    fingerprints, error texts.

CONTENTS

    [mpi:api] has the declarations. The implementation follows. Its files are in src/mpi/.
    Generated from src/ by tools/drop_ins.py: change the files there.
*/
#ifndef IDIST_H
#include "idist.h"
#endif
#if IDIST_VERSION_MAJOR != 0 || IDIST_VERSION_MINOR != 2 || IDIST_VERSION_PATCH != 0
#error "idist_mpi.h is version 0.2.0, and idist.h another one: copy both from the same release"
#endif
#ifndef IDIST_MPI_H
#define IDIST_MPI_H

#ifdef __cplusplus
extern "C" {
#endif

//------------------------------------------------------------------------------
// [mpi:api]  the backend's table
//------------------------------------------------------------------------------

// Returns the backend for the ranks of an MPI communicator, with buffers in CPU memory.
IDIST_API const idist_backend_api *idist_mpi_backend(void);

#ifdef __cplusplus
} // extern "C"
#endif

#endif // IDIST_MPI_H

// The API ends here; the implementation follows.

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

// ---- base/begin.h --------------------------------------------------------------------------------

// base/begin.h: macros and compiler settings for the implementation
//
// Included where the implementation of each src/idist*.h begins. base/end.h ends the implementation
// and restores the settings. Has no include guard, so that each drop-in gets a copy.

// System headers may define these words as macros, as windows.h does.
#pragma push_macro("small")
#undef small
#pragma push_macro("lock")
#undef lock
#pragma push_macro("min")
#undef min
#pragma push_macro("max")
#undef max

// C++ programs may enable these warnings, but code that must also compile as C needs the casts and
// the NULLs that they report.
#if defined(__cplusplus) && defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wold-style-cast"
#pragma GCC diagnostic ignored "-Wzero-as-null-pointer-constant"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wuseless-cast"
#endif
#endif

// gcc's thread sanitizer does not support fences, and warns about each fence for shared memory.
#if defined(__SANITIZE_THREAD__) && !defined(__clang__) && __GNUC__ >= 11
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wtsan"
#endif

#if defined(__GNUC__) && !defined(__clang__)
#define IDIST__VECTORIZE __attribute__((optimize("O3")))
#define IDIST__NO_ALIAS _Pragma("GCC ivdep")
#elif defined(__clang__)
#define IDIST__VECTORIZE
#define IDIST__NO_ALIAS _Pragma("clang loop vectorize(assume_safety)")
#else
#define IDIST__VECTORIZE
#define IDIST__NO_ALIAS
#endif
#define IDIST__PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#define IDIST__UNUSED __attribute__((unused))
#define IDIST__NOINLINE __attribute__((noinline))
#define IDIST__INLINE static inline __attribute__((always_inline))
#define IDIST__TLS static __thread

// IDIST__TRY(result = fn(arg)) calls a function of the program. In C++ with exceptions, the macro
// catches every exception and records in idist__me.thrown what was thrown. Otherwise an exception
// ends the process as if fn were noexcept: std::terminate prints the exception. A function that
// uses the macro must be IDIST__NOINLINE.
#if defined(__cplusplus) && defined(__EXCEPTIONS)
#include <exception>
#ifdef __GLIBCXX__
#include <cxxabi.h>
// clang-format off
#define IDIST__CATCH_EXIT catch (abi::__forced_unwind &) { throw; } // pthread_exit
// clang-format on
#else
#define IDIST__CATCH_EXIT
#endif
#define IDIST__TRY(statement)                                                     \
    do {                                                                          \
        try {                                                                     \
            statement;                                                            \
        }                                                                         \
        IDIST__CATCH_EXIT                                                         \
        catch (const std::exception &thrown_) {                                   \
            idist__callback_note(thrown_.what());                                 \
        }                                                                         \
        catch (...) {                                                             \
            idist__callback_note("an exception not derived from std::exception"); \
        }                                                                         \
    } while (0)
#else
// Marks the return address as undefined, which tells the unwinder that the stack ends in this
// function. Without unwind tables the stack ends here anyway.
#if defined(__GCC_HAVE_DWARF2_CFI_ASM) && defined(__x86_64__)
#define IDIST__UNWIND_END __asm__ volatile(".cfi_undefined 16" ::: "memory")
#elif defined(__GCC_HAVE_DWARF2_CFI_ASM) && defined(__i386__)
#define IDIST__UNWIND_END __asm__ volatile(".cfi_undefined 8" ::: "memory")
#elif defined(__GCC_HAVE_DWARF2_CFI_ASM) && defined(__aarch64__)
#define IDIST__UNWIND_END __asm__ volatile(".cfi_undefined 30" ::: "memory")
#else
#define IDIST__UNWIND_END (void)0
#endif
#define IDIST__TRY(statement)                                 \
    do {                                                      \
        IDIST__UNWIND_END;                                    \
        statement;                                            \
        __asm__ volatile("" ::: "memory"); /* no tail call */ \
    } while (0)
#endif

// IDIST__CALLBACK(statement) is IDIST__TRY for a callback, which must not call idist and runs with
// cancellation disabled: see base/fail.h.
#define IDIST__CALLBACK(statement)                           \
    do {                                                     \
        int cancel_state_ = idist__os_unwind_block_cancel(); \
                                                             \
        idist__me.callbacks++;                               \
        IDIST__TRY(statement);                               \
        idist__me.callbacks--;                               \
        idist__os_unwind_allow_cancel(cancel_state_);        \
    } while (0)

// ---- os/mutex_init.h -----------------------------------------------------------------------------

// os/mutex_init.h: the initial value of a lock in static memory
//
// Included by base/begin.h. Neither file has an include guard, because every drop-in contains its
// own copy of both.

#define IDIST__OS_MUTEX_INIT PTHREAD_MUTEX_INITIALIZER

#define IDIST__COUNT_OF(a) (sizeof(a) / sizeof((a)[0]))

// A program may be built with -ffast-math or -Ofast, but idist needs standard arithmetic. A NaN
// that one rank contributes must reach all ranks, the conversions in base/small_float.h rely on the
// order of their steps, and gradient norms check that numbers are finite.
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__) || \
    defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__)
#define IDIST__FAST_MATH 1
#if defined(__clang__)
#pragma float_control(precise, on, push)
#elif defined(__GNUC__)
// In C, pop_options alone would leave these macros undefined.
#pragma push_macro("__FAST_MATH__")
#pragma push_macro("__FINITE_MATH_ONLY__")
#pragma push_macro("__ASSOCIATIVE_MATH__")
#pragma push_macro("__RECIPROCAL_MATH__")
#pragma push_macro("__NO_SIGNED_ZEROS__")
#pragma push_macro("__NO_TRAPPING_MATH__")
#pragma push_macro("__NO_MATH_ERRNO__")
#pragma GCC push_options
#pragma GCC optimize("no-fast-math")
#endif
#endif

// ---- mpi/mpi_model.h -----------------------------------------------------------------------------

// mpi/mpi_model.h: worlds, groups, tasks, and the messages between ranks
//
// A world has two communicators of its own: one for all traffic between two ranks, one for the
// collectives of its world group. Every other group has one communicator, which is freed when all
// members have freed the group. A group keeps its collectives in a queue; only the first of them
// exchanges headers. A task records its phase and, once MPI has the operation, its MPI requests.

#ifndef IDIST__MPI_COUNT
#define IDIST__MPI_COUNT INT_MAX // elements in one call of MPI; tests lower it
#endif

enum {
    IDIST__HEADER_DATA_NBYTES = 24,   // makes a header 56 bytes: one cache line with MPI's envelope
    IDIST__HEADER_MAX_RANKS = 64,     // larger groups send no contributions in headers
    IDIST__CONTROL_MAX_NBYTES = 3584, // MPIs send messages below 4 KiB eagerly
    IDIST__PIECE_MAX_NBYTES = 1 << 30,     // of a large message, in one call of MPI
    IDIST__QUICK_POLLS = 64,               // in a call without a task
    IDIST__QUICK_POLLS_OVERSUBSCRIBED = 4, // in a call without a task, with more ranks than cores
    IDIST__QUICK_CONTROL_POLLS = 8, // after a pause: MPI may need several polls for one message
    IDIST__CONTROL_BATCH = 64,      // control messages handled in one step
    IDIST__CLOSE_MS = 1000,         // how long a failed world waits for other ranks to close
    IDIST__FIND_LOST_MS = 2000      // how long MPI may take to find out which rank is lost
};

// The pause between two polls doubles up to RAMP, then grows by 1/64 up to MAX. It is at most
// TRANSFER while data is in flight, because most MPIs move data only inside their own calls.
enum {
    IDIST__POLL_FIRST_NS = 20000,
    IDIST__POLL_TRANSFER_NS = 50000,
    IDIST__POLL_RAMP_NS = 1000000,
    IDIST__POLL_MAX_NS = 4000000
};

// Tags on our communicators, which only idist uses. MPI guarantees tags of 15 bits.
enum {
    IDIST__TAG_CONTROL = 1,
    IDIST__TAG_PAIRS = 2,
    IDIST__TAG_HEADER = 16, // first of one tag per step of the exchange
    IDIST__TAG_DATA = 64,   // first of one tag per large message
    IDIST__TAG_RANGE = 16384
};

// The header that a rank sends to the other members when it enters a collective.
typedef struct idist__mpi_header {
    idist__fingerprint fingerprint;
    uint32_t flags;
    uint32_t nbytes; // of data
    unsigned char data[IDIST__HEADER_DATA_NBYTES];
} idist__mpi_header;

// Flags of a header. Every rank acts on the union of all ranks' flags.
enum {
    IDIST__HEADER_BUSY = 1,    // this rank has other calls or threads: no rank may block in MPI
    IDIST__HEADER_LARGE = 2,   // its counts are too large for MPI
    IDIST__HEADER_IN_PLACE = 4 // its two buffers are one; MPI wants all ranks in place or none
};

// The header of a message between two ranks. A payload of nbytes follows in the same MPI message.
//
//   type            payload             fields used besides ctx and fingerprint
//   EAGER           the message         tag
//   READY_TO_SEND   -                   tag, id (chosen by the sender)
//   CLEAR_TO_SEND   -                   id (of READY_TO_SEND), tag (of MPI, for the data)
//   WAITING         -                   flags, id (of a large send), sent, received
//   ENTERED         -                   - (answers WAITING: we have entered the call too)
//   ABSENT          -                   - (answers WAITING: we have not entered the call)
//   FAILED          text: the cause     tag (the status), sent (the last call committed to)
//   FREED           -                   - (the sender has freed the group)
typedef struct idist__mpi_control {
    uint8_t type, flags;
    uint16_t padding;
    int32_t tag;
    uint64_t ctx;
    idist__fingerprint fingerprint; // of a message: `check` is its count
    uint64_t id;
    uint32_t sent, received; // messages to and from the addressee so far
    uint64_t nbytes;
} idist__mpi_control;

enum {
    IDIST__CONTROL_EAGER = 1,
    IDIST__CONTROL_READY_TO_SEND,
    IDIST__CONTROL_CLEAR_TO_SEND,
    IDIST__CONTROL_WAITING,
    IDIST__CONTROL_ENTERED,
    IDIST__CONTROL_ABSENT,
    IDIST__CONTROL_FAILED,
    IDIST__CONTROL_FREED
};

// Flags of WAITING.
enum {
    IDIST__WAITING_FOR_YOU = 1, // the addressee must begin what the sender waits for
    IDIST__WAITING_ONLY = 2     // this is the sender's only call, and it blocks
};

// A control message that is being sent. The payload follows the struct.
typedef struct idist__mpi_outgoing {
    struct idist__mpi_outgoing *next;
    MPI_Request request;
    idist__mpi_control control;
} idist__mpi_outgoing;

// A control message that arrived before its receive or its group. The payload follows the struct.
typedef struct idist__mpi_unexpected {
    struct idist__mpi_unexpected *next;
    int source; // world rank
    idist__mpi_control control;
} idist__mpi_unexpected;

// The communicator of a group. It outlives the group until all members have freed the group.
typedef struct idist__mpi_comm {
    struct idist__mpi_comm *next;
    uint64_t ctx;
    MPI_Comm comm;
    int user_count; // members that have not freed the group
    bool failed;    // on some member; the communicator and this entry then stay
} idist__mpi_comm;

// State that we keep about another rank of the world.
typedef struct idist__mpi_peer {
    uint32_t sent, received;    // messages of send and recv, to and from this rank
    idist__mpi_control waiting; // its latest WAITING
    uint64_t absent_ctx;        // group in which it has not entered call absent_seq
    uint32_t absent_seq;
    bool lost;
} idist__mpi_peer;

// Data that a user-defined op needs when MPI calls the op. An attribute of the datatype points to
// this struct.
typedef struct idist__mpi_hook {
    idist__user_op user;
    idist_dtype dtype;
} idist__mpi_hook;

// A call in MPI's terms: the arguments, some of which may be scratch memory, the requests, and the
// objects that are freed at the end.
typedef struct idist__native {
    const idist_group *group; // NULL if there is nothing to run or free
    const idist__call *call;
    MPI_Comm comm;
    bool blocking;        // uses MPI's blocking functions
    bool large_counts;    // some rank has counts too large for MPI
    bool no_data;         // all counts are 0
    int error;            // first error, or MPI_SUCCESS
    const char *function; // name of the latest MPI function called
    MPI_Request *requests, first_requests[4];
    int request_count, request_capacity;
    MPI_Datatype type;
    MPI_Op op;
    bool owns_type, owns_op;
    const char *in;
    char *out;
    bool in_place;
    size_t element_size;   // of `in` and `out`
    char *scratch;         // replaces in, out or both
    int *counts;           // of a v-form: counts and displacements to send, then to receive
    idist__mpi_hook *hook; // of a user-defined op
} idist__native;

typedef enum idist__mpi_phase {
    IDIST__PHASE_QUEUED,      // behind other collectives of its group
    IDIST__PHASE_ENTERING,    // first header exchange
    IDIST__PHASE_COMMITTING,  // second header exchange
    IDIST__PHASE_RUNNING,     // MPI runs the collective
    IDIST__PHASE_WAITING,     // a send or receive waits for its peer; MPI has no request
    IDIST__PHASE_TRANSFERRING // the data of a send or receive is in flight
} idist__mpi_phase;

// The backend's part of a task.
typedef struct idist__mpi_op {
    idist__task *next; // in the queue or the receives of its group
    idist__mpi_phase phase;
    idist__native native;
    idist__user_op user;        // a copy, because the user may free the op meanwhile
    uint64_t send_id;           // of a send
    int data_tag;               // of a large receive, counted from IDIST__TAG_DATA
    int source;                 // of a matched large receive: world rank of the sender
    idist__mpi_control control; // of a matched large receive: its READY_TO_SEND
} idist__mpi_op;

typedef struct idist__mpi_group {
    MPI_Comm comm;
    int *rank_of;                         // by world rank: rank in the group, or -1
    idist__fingerprint *last_seen;        // by rank: latest call it is known to have entered
    idist__task *queue_head, *queue_tail; // collectives that MPI does not have yet, in order
    idist__task *receives;                // unmatched, oldest first

    idist__mpi_header *headers; // headers[i] is from rank (own + i) % size
    int header_count;           // received so far, our own included
    MPI_Request requests[2];    // receive and send of the current step
    int exchange_error;         // from posting the current step
    uint32_t exchange_seq;      // number of the call that the headers belong to
    idist__fingerprint entered; // our latest call whose fingerprint was sent

    uint32_t committed_seq; // last call in which we allowed other ranks to block inside MPI
    bool failure_known;     // all members find out about the failure by themselves
    bool commit_refused;    // a member failed before it committed to our last call
} idist__mpi_group;

// The backend's part of a world.
typedef struct idist__mpi {
    idist__world *w;
    MPI_Comm p2p_comm;   // control messages and data; same ranks as the world
    MPI_Comm world_comm; // collectives of the world group
    bool fault_tolerant; // ULFM is on
    bool finding_lost;   // idist__mpi_error_fail_group is asking which rank is lost
    bool closing;        // nothing more is sent
    bool abandoned;      // MPI may use some of our memory forever
    bool finalized;      // the program has called MPI_Finalize: no function of MPI may be called
    int self_keyval;     // of an attribute of MPI_COMM_SELF, which MPI_Finalize deletes
    bool called;         // a thread has called; the latest one is last_caller
    bool multithreaded;  // several threads have called
    idist__os_thread last_caller;
    uint32_t wake_count; // a futex; sleepers wait until it changes
    int64_t poll_ns;     // latest pause between polls, or 0 to start over

    // idist__control_progress and idist__mpi_engine_deliver. These are pointers because mpi_error.h
    // calls `receive`, control.h calls `deliver`, and both functions are defined in later files.
    void (*receive)(struct idist__mpi *m);
    void (*deliver)(struct idist__mpi *m, int source, idist__mpi_control *control,
                    const void *payload);
    MPI_Request incoming; // the receive from any rank that is always posted, into this buffer
    char incoming_buffer[sizeof(idist__mpi_control) + IDIST__CONTROL_MAX_NBYTES];
    idist__mpi_outgoing *outgoing, *free_outgoing;
    idist__mpi_outgoing *reserve; // one per rank, to announce a failure when memory is exhausted
    idist__mpi_unexpected *unexpected; // oldest first
    idist__mpi_comm *comms;            // of all groups
    uint32_t *sent_counts;             // by rank: control messages sent, modulo 2^32
    uint32_t received_count;           // control messages received, modulo 2^32
    int64_t polled_ns;                 // when a quick call last looked for control messages

    idist__mpi_peer *peers;
    uint64_t next_send_id;
    int next_tag;
    unsigned char retired_tags[IDIST__TAG_RANGE / 8]; // of canceled receives: data may still arrive

    MPI_Op ops[4];        // our own SUM, PROD, MIN, MAX
    MPI_Comm shrunk_comm; // made by shrink for group shrunk_ctx, which is opened next
    uint64_t shrunk_ctx;
    MPI_Win win; // memory of idist_alloc
    idist__window *window;
} idist__mpi;

static idist__mpi *idist__mpi_of(const idist__world *w) { return (idist__mpi *)w->impl; }
static idist__mpi_group *idist__mpi_model_group(const idist_group *g) {
    return (idist__mpi_group *)g->impl;
}
static idist__mpi_op *idist__mpi_op_of(const idist__task *t) { return (idist__mpi_op *)t->impl; }

// ---- mpi/mpi_error.h -----------------------------------------------------------------------------

// mpi/mpi_error.h: MPI's errors, lost ranks, and waiting with a deadline

static idist_status idist__mpi_error_fail(const char *what, int error) {
    char text[MPI_MAX_ERROR_STRING + 1];
    int error_class = MPI_ERR_OTHER, length = 0;

    MPI_Error_class(error, &error_class);
    MPI_Error_string(error, text, &length);
    return idist__fail(error_class == MPI_ERR_NO_MEM ? IDIST_ERR_NO_MEMORY : IDIST_ERR_SYSTEM,
                       "%s: %.*s", what, length, text);
}

// Returns true if an error means that a process is lost. A revoked communicator counts: another
// rank revokes it to report a loss.
static bool idist__mpi_error_is_loss(int error) {
#ifdef IDIST__ULFM
    int error_class = MPI_SUCCESS;
    MPI_Error_class(error, &error_class);
    return error_class == MPIX_ERR_PROC_FAILED || error_class == MPIX_ERR_PROC_FAILED_PENDING ||
           error_class == MPIX_ERR_REVOKED;
#else
    (void)error;
    return false;
#endif
}

// Asks MPI which ranks are lost, and fails every group that contains a lost rank.
static void idist__mpi_error_find_lost(idist__mpi *mpi) {
#ifdef IDIST__ULFM
    MPI_Group all, failed;
    int i, failed_count = 0;

    if (!mpi->fault_tolerant || MPIX_Comm_failure_ack(mpi->p2p_comm) != MPI_SUCCESS) return;
    if (MPIX_Comm_failure_get_acked(mpi->p2p_comm, &failed) != MPI_SUCCESS) return;
    MPI_Comm_group(mpi->p2p_comm, &all);
    MPI_Group_size(failed, &failed_count);

    for (i = 0; i < failed_count; i++) {
        int rank = -1;
        MPI_Group_translate_ranks(failed, 1, &i, all, &rank);
        if (rank < 0 || rank >= mpi->w->group.size || mpi->peers[rank].lost) continue;
        mpi->peers[rank].lost = true;
        idist__group_lose_rank(mpi->w, rank, "its process ended");
    }

    MPI_Group_free(&failed);
    MPI_Group_free(&all);
#else
    (void)mpi;
#endif
}

// Fails a group in which a call of MPI failed. After a loss MPI may take a moment to find out which
// rank is lost, so this function keeps asking for up to IDIST__FIND_LOST_MS. Receiving may itself
// fail and call this function again; finding_lost ends the recursion.
static void idist__mpi_error_fail_group(idist__mpi *mpi, idist_group *g, const char *what,
                                        int error) {
    char cause[400];
    idist_status status;
    int64_t deadline_ns = idist__os_clock_deadline(IDIST__FIND_LOST_MS);

    while (idist__mpi_error_is_loss(error) && !mpi->finding_lost && g->status == IDIST_OK &&
           idist__os_clock_now_ns() < deadline_ns) {
        mpi->finding_lost = true;
        idist__mpi_error_find_lost(mpi);
        mpi->receive(mpi); // another rank may tell us what happened
        mpi->finding_lost = false;
    }

    status = idist__mpi_error_fail(what, error);
    snprintf(cause, sizeof cause, "on rank %d %.350s", mpi->w->cfg.rank, idist__me.text);
    idist__group_fail(g, idist__mpi_error_is_loss(error) ? IDIST_ERR_PEER_LOST : status, cause);
}

// Waits for a request of MPI, forever if timeout_ms < 0. After IDIST_ERR_TIMEOUT MPI still owns the
// request.
static idist_status idist__mpi_error_await(MPI_Request *request, int timeout_ms, const char *what) {
    int64_t deadline_ns = timeout_ms < 0 ? IDIST__FOREVER : idist__os_clock_deadline(timeout_ms);
    int done = 0, error;

    for (;;) {
        error = MPI_Test(request, &done, MPI_STATUS_IGNORE);
        if (error != MPI_SUCCESS) return idist__mpi_error_fail(what, error);
        if (done) return IDIST_OK;
        if (idist__os_clock_now_ns() > deadline_ns)
            return idist__fail(IDIST_ERR_TIMEOUT,
                               "%s: not all ranks of the communicator arrived within %d ms", what,
                               timeout_ms);
        idist__os_thread_yield();
    }
}

// ---- mpi/mpi_type.h ------------------------------------------------------------------------------

// mpi/mpi_type.h: dtypes and ops

// Returns true if MPI has a datatype for dtype. Pairs, and dtypes that the program creates, have
// none.
static bool idist__mpi_type_exists(idist_dtype dtype) {
    return idist__dtype_is_builtin(dtype) && !idist__dtype_is_pair(dtype);
}

// Returns the MPI datatype of dtype. Floats of 16 and 8 bits are sent as unsigned integers;
// reductions convert them to F32 first.
static MPI_Datatype idist__mpi_type_of(idist_dtype dtype) {
    switch ((int)dtype) {
    case IDIST_I8: return MPI_INT8_T;
    case IDIST_I16: return MPI_INT16_T;
    case IDIST_U16: return MPI_UINT16_T;
    case IDIST_I32: return MPI_INT32_T;
    case IDIST_U32: return MPI_UINT32_T;
    case IDIST_I64: return MPI_INT64_T;
    case IDIST_U64: return MPI_UINT64_T;
    case IDIST_F16: return MPI_UINT16_T;
    case IDIST_BF16: return MPI_UINT16_T;
    case IDIST_F32: return MPI_FLOAT;
    case IDIST_F64: return MPI_DOUBLE;
    default: return MPI_UINT8_T; // U8, the floats of 8 bits, and bytes
    }
}

// Returns the MPI op of a built-in op. Our own SUM, PROD, MIN and MAX replace MPI's where the
// results may differ: MPI does not define MIN and MAX of a NaN, MPICH 4 compares unsigned numbers
// as signed ones, and Open MPI 4 saturates sums of 8 and 16 bits.
static MPI_Op idist__mpi_type_builtin_op(const idist__mpi *mpi, idist_op op, idist_dtype dtype) {
    bool own = idist_dtype_size(dtype) < 4;

    switch ((int)op) {
    case IDIST_PROD: return own ? mpi->ops[IDIST_PROD] : MPI_PROD;
    case IDIST_MIN: return mpi->ops[IDIST_MIN];
    case IDIST_MAX: return mpi->ops[IDIST_MAX];
    case IDIST_BAND: return MPI_BAND;
    case IDIST_BOR: return MPI_BOR;
    case IDIST_BXOR: return MPI_BXOR;
    case IDIST_LAND: return MPI_LAND;
    case IDIST_LOR: return MPI_LOR;
    case IDIST_LXOR: return MPI_LXOR;
    default: return own ? mpi->ops[IDIST_SUM] : MPI_SUM; // AVG is divided at the end
    }
}

static void idist__mpi_type_reduce(void *in, void *inout, int count, MPI_Datatype type,
                                   idist_op op) {
    int dtype = 0;
    while (dtype < IDIST_F64 && type != idist__mpi_type_of((idist_dtype)dtype)) dtype++;
    idist__reduce_table[dtype][op](inout, in, inout, (size_t)count);
}

#define IDIST__MPI_OP(name, op)                                                                 \
    static void idist__mpi_type_##name(void *in, void *inout, int *count, MPI_Datatype *type) { \
        idist__mpi_type_reduce(in, inout, *count, *type, op);                                   \
    }
IDIST__MPI_OP(sum, IDIST_SUM)
IDIST__MPI_OP(prod, IDIST_PROD)
IDIST__MPI_OP(min, IDIST_MIN)
IDIST__MPI_OP(max, IDIST_MAX)

// MINLOC and MAXLOC in the form of user-defined ops, because MPI's pairs have an index of type int.
static void idist__mpi_type_minloc(const void *in, void *inout, size_t count, idist_dtype dtype,
                                   void *arg) {
    (void)arg;
    idist__reduce_table[(unsigned)dtype][IDIST_MINLOC](inout, in, inout, count);
}

static void idist__mpi_type_maxloc(const void *in, void *inout, size_t count, idist_dtype dtype,
                                   void *arg) {
    (void)arg;
    idist__reduce_table[(unsigned)dtype][IDIST_MAXLOC](inout, in, inout, count);
}

static idist__user_op idist__mpi_type_pair_op(idist_op op) {
    idist__user_op user;

    memset(&user, 0, sizeof user);
    user.fn = op == IDIST_MINLOC ? idist__mpi_type_minloc : idist__mpi_type_maxloc;
    user.commutative = true;

    return user;
}

// Key of the attribute that attaches an idist__mpi_hook to the datatype of a call. MPI does not
// pass our dtype and the user's arg to a user-defined op, but it passes the datatype.
static int idist__mpi_keyval = MPI_KEYVAL_INVALID;

// Calls a user-defined op. An exception ends the process here, because MPI cannot be told of it and
// would continue with a wrong operand.
IDIST__NOINLINE static void idist__mpi_type_call_user(const idist__mpi_hook *hook, void *in,
                                                      void *inout, size_t count) {
    IDIST__CALLBACK(hook->user.fn(in, inout, count, hook->dtype, hook->user.arg));
    if (!idist__me.thrown[0]) return;
    fprintf(stderr, "idist: a user op threw an exception inside MPI: %s\n", idist__me.thrown);
    idist__os_unwind_terminate();
}

static void idist__mpi_type_user(void *in, void *inout, int *count, MPI_Datatype *type) {
    idist__mpi_hook *hook = NULL;
    int found = 0;

    MPI_Type_get_attr(*type, idist__mpi_keyval, &hook, &found);
    if (found && hook) idist__mpi_type_call_user(hook, in, inout, (size_t)*count);
}

// ---- mpi/native.h --------------------------------------------------------------------------------

// mpi/native.h: runs one call as calls of MPI
//
// This file translates an idist__call into MPI's arguments and calls MPI, with blocking functions
// or with requests. Most calls become one call of MPI. There are these exceptions:
//
//     counts above INT_MAX       reductions and broadcasts run in pieces, all other calls as
//                                messages between each pair of ranks
//     floats of 16 and 8 bits    reduced as F32, in scratch memory
//     premultiplied sums         scaled in scratch memory, then summed
//     user-defined ops           an op and a datatype of MPI for this one call
//     in place on some ranks     made in place on all ranks, by copies
//
// The path of a call:
//
//     idist__native_init    allocates and prepares everything that can fail
//     idist__native_begin   calls MPI
//     idist__native_done    tests the requests
//     idist__native_end     waits for the remaining requests, writes the result, frees
//                           everything; after an error it abandons the requests

// Adds a request to the call. Returns its address, or NULL if memory is exhausted.
static MPI_Request *idist__native_request(idist__native *nat) {
    const idist_allocator *mem = &nat->group->w->cfg.mem;

    if (nat->request_count == nat->request_capacity) {
        size_t capacity = (size_t)nat->request_capacity * 2;
        MPI_Request *more = (MPI_Request *)idist__mem_raw(mem, sizeof *more * capacity);
        if (!more) return NULL;
        memcpy(more, nat->requests, sizeof *more * (size_t)nat->request_count);
        if (nat->requests != nat->first_requests) idist__mem_free(mem, nat->requests);
        nat->requests = more;
        nat->request_capacity = (int)capacity;
    }

    nat->requests[nat->request_count] = MPI_REQUEST_NULL;

    return &nat->requests[nat->request_count++];
}

// Calls function_ of MPI or, if the call does not block, i_function with a new request. Does
// nothing after an error.
#define IDIST__NATIVE(nat, function_, i_function, ...)              \
    do {                                                            \
        if ((nat)->blocking && (nat)->error == MPI_SUCCESS) {       \
            (nat)->function = #function_;                           \
            (nat)->error = function_(__VA_ARGS__);                  \
        } else IDIST__NATIVE_REQUEST(nat, i_function, __VA_ARGS__); \
    } while (0)
#define IDIST__NATIVE_REQUEST(nat, i_function, ...)                                   \
    do {                                                                              \
        MPI_Request *request_ = idist__native_request(nat);                           \
        if ((nat)->error != MPI_SUCCESS) break;                                       \
        (nat)->function = #i_function;                                                \
        (nat)->error = request_ ? i_function(__VA_ARGS__, request_) : MPI_ERR_NO_MEM; \
    } while (0)

// Runs a collective that only moves data as messages between each pair of ranks, because its counts
// are too large for MPI.
static void idist__native_pairs(idist__native *nat) {
    int i, own = nat->group->rank, size = nat->group->size;

    for (i = 0; i < size && nat->error == MPI_SUCCESS; i++) {
        size_t send_count, recv_count, at, n;
        char *send = idist__extent_part(nat->call, (char *)nat->in, own, i, true, &send_count),
             *recv = idist__extent_part(nat->call, nat->out, i, own, false, &recv_count);

        if (i == own) {
            if (recv_count) idist__block_copy(recv, send, recv_count * nat->element_size);
            continue;
        }

        for (at = 0; at < recv_count; at += n) {
            n = recv_count - at < IDIST__MPI_COUNT ? recv_count - at : IDIST__MPI_COUNT;
            IDIST__NATIVE_REQUEST(nat, MPI_Irecv, recv + at * nat->element_size, (int)n, nat->type,
                                  i, IDIST__TAG_PAIRS, nat->comm);
        }

        for (at = 0; at < send_count; at += n) {
            n = send_count - at < IDIST__MPI_COUNT ? send_count - at : IDIST__MPI_COUNT;
            IDIST__NATIVE_REQUEST(nat, MPI_Isend, send + at * nat->element_size, (int)n, nat->type,
                                  i, IDIST__TAG_PAIRS, nat->comm);
        }
    }
}

// Returns the number of elements that this rank contributes to a reduction.
static size_t idist__native_input_count(const idist__native *nat) {
    const idist__call *call = nat->call;
    return idist__kind_scatters_sum(call->kind) ? idist__extent_block_at(call, nat->group->size)
                                                : call->count;
}

// Runs a reduction or a broadcast in pieces whose counts fit into MPI's int. Most calls are one
// piece.
static void idist__native_pieces(idist__native *nat) {
    const idist__call *call = nat->call;
    size_t at, n, max = IDIST__MPI_COUNT, count;
    MPI_Datatype type = nat->type;
    MPI_Comm comm = nat->comm;
    bool is_root = call->root == nat->group->rank;

    count = idist__native_input_count(nat);

    for (at = 0; at < count; at += n) {
        const void *in = nat->in_place ? MPI_IN_PLACE : nat->in + at * nat->element_size;
        char *out = nat->out + at * nat->element_size, *root_out = is_root ? out : NULL;
        int k;
        n = count - at < max ? count - at : max;
        k = (int)n;

        switch (call->kind) {
        case IDIST__ALL_REDUCE:
        case IDIST__REDUCE_SCATTER: // only if its counts are too large for MPI's function
        case IDIST__REDUCE_SCATTERV:
            IDIST__NATIVE(nat, MPI_Allreduce, MPI_Iallreduce, in, out, k, type, nat->op, comm);
            break;
        case IDIST__REDUCE:
            IDIST__NATIVE(nat, MPI_Reduce, MPI_Ireduce, in, root_out, k, type, nat->op, call->root,
                          comm);
            break;
        case IDIST__SCAN:
            IDIST__NATIVE(nat, MPI_Scan, MPI_Iscan, in, out, k, type, nat->op, comm);
            break;
        case IDIST__EXSCAN:
            IDIST__NATIVE(nat, MPI_Exscan, MPI_Iexscan, in, out, k, type, nat->op, comm);
            break;
        default: IDIST__NATIVE(nat, MPI_Bcast, MPI_Ibcast, out, k, type, call->root, comm); break;
        }
    }
}

// Returns true if the counts of this rank, and their sum, fit into MPI's int. All ranks get the
// same answer, except in v-forms.
static bool idist__native_fits(const idist_group *g, const idist__call *call) {
    idist__extent e;
    int i;

    // MPI_Iallgatherv of Intel MPI 2021 hangs when one rank sends much and another sends nothing.
    for (i = 0; call->kind == IDIST__ALL_GATHERV && i < g->size; i++)
        if (!call->recvcounts[i]) return false;
    if (!idist__kind_is_v(call->kind)) return call->count <= IDIST__MPI_COUNT / (size_t)g->size;

    return idist__extent_of(g, call, &e) == IDIST_OK && e.send <= IDIST__MPI_COUNT &&
           e.recv <= IDIST__MPI_COUNT;
}

// Writes n counts, followed by n displacements, to `ints`.
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
    const idist__call *call = nat->call;
    int size = nat->group->size, n = (int)call->count, *sends = nat->counts,
        *recvs = sends + 2 * size;
    const void *in = nat->in_place ? MPI_IN_PLACE : nat->in;
    void *out = nat->out, *part = nat->in_place ? MPI_IN_PLACE : out;
    MPI_Datatype type = nat->type;
    MPI_Comm comm = nat->comm;
    bool is_root = call->root == nat->group->rank;

    if (call->sendcounts && (is_root || call->kind != IDIST__SCATTERV))
        idist__native_ints(call->sendcounts, call->senddispls, size, sends);
    if (call->recvcounts && (is_root || call->kind != IDIST__GATHERV))
        idist__native_ints(call->recvcounts, call->recvdispls, size, recvs);

    switch (call->kind) {
    case IDIST__ALL_GATHERV:
        IDIST__NATIVE(nat, MPI_Allgatherv, MPI_Iallgatherv, in, n, type, out, recvs, recvs + size,
                      type, comm);
        break;
    case IDIST__GATHERV:
        IDIST__NATIVE(nat, MPI_Gatherv, MPI_Igatherv, in, n, type, out, recvs, recvs + size, type,
                      call->root, comm);
        break;
    case IDIST__SCATTERV:
        IDIST__NATIVE(nat, MPI_Scatterv, MPI_Iscatterv, nat->in, sends, sends + size, type, part, n,
                      type, call->root, comm);
        break;
    case IDIST__REDUCE_SCATTERV:
        IDIST__NATIVE(nat, MPI_Reduce_scatter, MPI_Ireduce_scatter, in, out, sends, type, nat->op,
                      comm);
        break;
    default:
        IDIST__NATIVE(nat, MPI_Alltoallv, MPI_Ialltoallv, nat->in, sends, sends + size, type, out,
                      recvs, recvs + size, type, comm);
        break;
    }
}

static void idist__native_move(idist__native *nat) {
    const idist__call *call = nat->call;
    const void *in = nat->in_place ? MPI_IN_PLACE : nat->in;
    void *out = nat->out, *part = nat->in_place ? MPI_IN_PLACE : out;
    MPI_Datatype type = nat->type;
    MPI_Comm comm = nat->comm;
    int n = (int)call->count;

    switch (call->kind) {
    case IDIST__BARRIER: IDIST__NATIVE(nat, MPI_Barrier, MPI_Ibarrier, comm); break;
    case IDIST__ALL_GATHER:
        IDIST__NATIVE(nat, MPI_Allgather, MPI_Iallgather, in, n, type, out, n, type, comm);
        break;
    case IDIST__GATHER:
        IDIST__NATIVE(nat, MPI_Gather, MPI_Igather, in, n, type, out, n, type, call->root, comm);
        break;
    case IDIST__SCATTER:
        IDIST__NATIVE(nat, MPI_Scatter, MPI_Iscatter, nat->in, n, type, part, n, type, call->root,
                      comm);
        break;
    case IDIST__REDUCE_SCATTER:
        IDIST__NATIVE(nat, MPI_Reduce_scatter_block, MPI_Ireduce_scatter_block, in, out, n, type,
                      nat->op, comm);
        break;
    default:
        IDIST__NATIVE(nat, MPI_Alltoall, MPI_Ialltoall, in, n, type, out, n, type, comm);
        break;
    }
}

// Makes a datatype for the elements of this call.
static void idist__native_own_type(idist__native *nat) {
    nat->error = MPI_Type_contiguous((int)nat->element_size, MPI_BYTE, &nat->type);
    nat->owns_type = nat->error == MPI_SUCCESS;
    if (nat->error == MPI_SUCCESS) nat->error = MPI_Type_commit(&nat->type);
    if (nat->error != MPI_SUCCESS) nat->function = "MPI_Type_contiguous";
}

// Creates an MPI op for the user's op. The datatype of the call leads MPI's callback to the hook.
static void idist__native_user_op(idist__native *nat, const idist__user_op *user) {
    nat->hook = (idist__mpi_hook *)idist__mem_alloc(&nat->group->w->cfg.mem, sizeof *nat->hook);

    if (nat->hook) {
        nat->hook->user = *user;
        nat->hook->dtype = nat->call->dtype;
        if (!nat->owns_type) idist__native_own_type(nat);
    } else {
        nat->error = MPI_ERR_NO_MEM;
    }

    if (nat->error == MPI_SUCCESS)
        nat->error = MPI_Type_set_attr(nat->type, idist__mpi_keyval, nat->hook);
    if (nat->error == MPI_SUCCESS)
        nat->error = MPI_Op_create(idist__mpi_type_user, user->commutative, &nat->op);
    nat->owns_op = nat->error == MPI_SUCCESS;
    if (nat->error != MPI_SUCCESS) nat->function = "MPI_Op_create";
}

static void idist__native_allocate_scratch(idist__native *nat, size_t nbytes) {
    nat->scratch = (char *)idist__mem_raw(&nat->group->w->cfg.mem, nbytes);
    if (!nat->scratch) nat->error = MPI_ERR_NO_MEM;
}

// Copies `count` elements of the contribution to scratch memory, widens and scales them as the call
// requires, and lets MPI work there.
static void idist__native_stage(idist__native *nat, size_t count, idist_dtype dtype,
                                const idist__user_op *user) {
    const idist__call *call = nat->call;
    bool widen = dtype != call->dtype;
    bool scatters = idist__kind_scatters_sum(call->kind) && !nat->large_counts;
    bool in_place = call->kind != IDIST__REDUCE && !scatters;
    size_t nbytes = count * nat->element_size;
    size_t result_nbytes = call->count * nat->element_size;

    // MPICH 4 crashes in an in-place MPI_Reduce and MPI_Reduce_scatter, so these calls get a second
    // buffer.
    idist__native_allocate_scratch(nat, in_place ? nbytes : nbytes + result_nbytes + 1);
    if (!nat->scratch) return;

    if (widen)
        idist__small_float_widen((float *)(void *)nat->scratch, call->send, count, call->dtype);
    else idist__block_copy(nat->scratch, call->send, nbytes);
    if (user && !user->fn) idist__reduce_scale(nat->scratch, count, dtype, user->factor);

    nat->in = nat->scratch;
    nat->out = nat->scratch + (in_place ? 0 : nbytes);
    nat->in_place = in_place;
}

// Sets the op and the datatype of a reduction. Stages the contribution if MPI cannot use the user's
// buffers.
static void idist__native_reduction(idist__native *nat) {
    const idist__call *call = nat->call;
    const idist__user_op *user = NULL;
    bool narrow = idist__dtype_is_narrow(call->dtype), custom, scaled,
         scatters = idist__kind_scatters_sum(call->kind);
    idist__user_op pair = idist__mpi_type_pair_op(call->op);
    idist_dtype dtype = call->dtype;

    if (idist__reduce_op_is_user(call->op)) user = idist__world_user_op(nat->group, call);
    else if (idist__dtype_is_pair(dtype)) user = &pair;
    custom = user && user->fn;  // uses the dtype unconverted
    scaled = user && !user->fn; // a premultiplied sum

    if (custom) {
        idist__native_user_op(nat, user);
        if (nat->error != MPI_SUCCESS) return;
    } else {
        if (narrow) dtype = IDIST_F32;
        nat->element_size = idist_dtype_size(dtype);
        nat->type = idist__mpi_type_of(dtype);
        nat->op = idist__mpi_type_builtin_op(idist__mpi_of(nat->group->w),
                                             user ? IDIST_SUM : call->op, dtype);
    }

    if ((narrow && !custom) || scaled || (scatters && nat->large_counts) ||
        (call->kind == IDIST__REDUCE && nat->in_place)) {
        idist__native_stage(nat, idist__native_input_count(nat), dtype, user);
    } else if (scatters && (nat->in_place || nat->in == nat->out)) {
        // Our result lies in the middle of the data that we send; MPI's in-place result lies at the
        // start. An empty result may have the same address without being in place.
        idist__native_allocate_scratch(nat, call->count * nat->element_size + 1);
        nat->out = nat->scratch;
        nat->in_place = false;
    }
}

// Makes the call in place on all ranks. Called if some rank is in place, because MPI requires that
// all ranks are or none is. Makes all_to_all in place on no rank, because MPI is slower in place.
static void idist__native_same_place(idist__native *nat) {
    const idist__call *call = nat->call;
    bool is_all_to_all = call->kind == IDIST__ALL_TO_ALL,
         first_of_exscan = call->kind == IDIST__EXSCAN && nat->group->rank == 0;
    size_t nbytes = call->count * nat->element_size, at = 0;

    if (call->root >= 0 || idist__kind_scatters_sum(call->kind) || nat->scratch) return;
    if (is_all_to_all) nbytes *= (size_t)nat->group->size;
    if (call->kind == IDIST__ALL_GATHER) at = nbytes * (size_t)nat->group->rank;
    if (call->kind == IDIST__ALL_GATHERV)
        at = idist__extent_displ(call->recvcounts, call->recvdispls, nat->group->rank) *
             nat->element_size;

    // exscan must not write to the receive buffer of its first rank.
    if (nat->in_place ? is_all_to_all : first_of_exscan) {
        idist__native_allocate_scratch(nat, nbytes);
        if (nat->scratch) memcpy(nat->scratch, call->send, nbytes);
        if (is_all_to_all) nat->in = nat->scratch;
        else nat->out = nat->scratch;
    } else if (!nat->in_place && !is_all_to_all) {
        idist__block_copy(nat->out + at, call->send, nbytes);
    }

    nat->in_place = !is_all_to_all;
}

// Does everything that can fail before MPI gets the call. `flags` is the union of the flags of all
// headers.
static void idist__native_init(idist__native *nat, const idist_group *g, const idist__call *call,
                               uint32_t flags) {
    memset(nat, 0, sizeof *nat);
    nat->function = "MPI";
    nat->group = g;
    nat->call = call;
    nat->comm = idist__mpi_model_group(g)->comm;
    nat->large_counts = (flags & IDIST__HEADER_LARGE) != 0;
    nat->error = MPI_SUCCESS;
    nat->requests = nat->first_requests;
    nat->request_capacity = (int)IDIST__COUNT_OF(nat->first_requests);
    nat->type = idist__mpi_type_of(call->dtype);
    nat->element_size = idist_dtype_size(call->dtype);
    nat->in = (const char *)call->send;
    nat->out = (char *)call->recv;
    nat->no_data =
        call->kind != IDIST__BARRIER && call->count == 0 && !idist__kind_is_v(call->kind);
    if (nat->no_data) return;

    if (!idist__mpi_type_exists(call->dtype)) idist__native_own_type(nat);
    if (nat->error != MPI_SUCCESS) return;
    nat->in_place = idist__extent_call_in_place(g, call);
    if (idist__kind_reduces(call->kind)) idist__native_reduction(nat);

    if (idist__kind_is_v(call->kind)) {
        nat->counts = (int *)idist__mem_alloc(&g->w->cfg.mem, sizeof(int) * 4 * (size_t)g->size);
        if (!nat->counts) nat->error = MPI_ERR_NO_MEM;
    }

    if (nat->error == MPI_SUCCESS && (flags & IDIST__HEADER_IN_PLACE))
        idist__native_same_place(nat);
}

// Hands the call to MPI. If `blocking` is true, returns when MPI is done. The caller then calls
// idist__native_end.
static void idist__native_begin(idist__native *nat, bool blocking) {
    const idist__call *call = nat->call;
    bool reduces = idist__kind_reduces(call->kind), scatters = idist__kind_scatters_sum(call->kind);

    nat->blocking = blocking;
    if (nat->error != MPI_SUCCESS || nat->no_data) return;

    if ((reduces && (nat->large_counts || !scatters)) || call->kind == IDIST__BROADCAST)
        idist__native_pieces(nat);
    else if (nat->large_counts) idist__native_pairs(nat);
    else if (idist__kind_is_v(call->kind)) idist__native_move_v(nat);
    else idist__native_move(nat);

    if (scatters && nat->large_counts)
        nat->out += idist__extent_block_at(call, nat->group->rank) * nat->element_size;
}

static bool idist__native_done(idist__native *nat) {
    while (nat->request_count && nat->error == MPI_SUCCESS) {
        int done = 0,
            error = MPI_Test(&nat->requests[nat->request_count - 1], &done, MPI_STATUS_IGNORE);
        if (error != MPI_SUCCESS) nat->error = error;
        else if (!done) return false;
        nat->request_count--;
    }

    return true;
}

// Finishes the result of a reduction and writes it to the user's buffer.
static void idist__native_finish(idist__native *nat) {
    const idist__call *call = nat->call;
    const idist_group *g = nat->group;

    if (!idist__kind_reduces(call->kind) || !call->count) return;
    if (call->kind == IDIST__REDUCE && call->root != g->rank) return;
    if (call->kind == IDIST__EXSCAN && g->rank == 0) return;

    if (idist__dtype_is_narrow(call->dtype) && !nat->hook) {
        if (call->op == IDIST_AVG) idist__reduce_divide(nat->out, call->count, IDIST_F32, g->size);
        idist__small_float_narrow(call->recv, (const float *)(const void *)nat->out, call->count,
                                  call->dtype);
        return;
    }

    if (nat->out != call->recv) memcpy(call->recv, nat->out, call->count * nat->element_size);
    if (!nat->hook) idist__reduce_finish(call->recv, call->count, call->dtype, call->op, g->size);
}

static void idist__native_free(idist__native *nat) {
    const idist_allocator *mem = &nat->group->w->cfg.mem;

    if (nat->owns_op) MPI_Op_free(&nat->op);
    if (nat->owns_type) MPI_Type_free(&nat->type);
    if (nat->requests != nat->first_requests) idist__mem_free(mem, nat->requests);
    idist__mem_free(mem, nat->scratch);
    idist__mem_free(mem, nat->counts);
    idist__mem_free(mem, nat->hook);
    nat->group = NULL;
}

// Abandons a call. An operation cannot be taken back from MPI, but usually ends soon, because all
// ranks have entered or one is lost. If the operation does not end, MPI keeps our memory and the
// user's buffers.
static void idist__native_abandon(idist__native *nat) {
    int64_t deadline_ns = idist__os_clock_deadline(IDIST__FLUSH_MS);
    int i;

    for (i = 0; i < nat->request_count; i++) {
        int done = 0;

        while (MPI_Test(&nat->requests[i], &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && !done) {
            if (idist__os_clock_now_ns() < deadline_ns) continue;
            idist__mpi_of(nat->group->w)->abandoned = true;
            nat->group = NULL;
            return;
        }
    }

    idist__native_free(nat);
}

// Waits for the remaining requests and ends the call. A blocking call also has requests if it runs
// as messages between pairs of ranks.
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

// ---- mpi/exchange.h ------------------------------------------------------------------------------

// mpi/exchange.h: the header exchange before a collective
//
// Every rank has a header of 56 bytes and needs the headers of all other ranks. The exchange is an
// all_gather by dissemination (Bruck et al., 1997). In step k a rank sends all headers it has to
// the rank 2^k before it: its own, and the headers of the 2^k - 1 ranks after it. Rank r of 5 has:
//
//         own      | r+1      | r+2 r+3  | r+4
//         header   | step 0   | step 1   | step 2
//
// The exchange takes ceil(log2 n) steps of one message each, and every rank sends n - 1 headers. It
// uses sends and receives, because MPI_Allgather cannot be abandoned at a deadline and cannot tell
// us which ranks are missing. Headers of consecutive calls cannot be confused: every step receives
// from one rank, on the group's communicator, and MPI keeps messages in order.
//
// A second exchange of the same headers commits: it tells every rank that this rank has all headers
// and will enter MPI (mpi/mpi_coll.h).

// Posts the send and the receive of the current step.
static void idist__exchange_post(idist_group *g) {
    idist__mpi_group *mg = idist__mpi_model_group(g);
    int size = g->size, have = mg->header_count, count = size - have < have ? size - have : have,
        step = 0;
    size_t nbytes = sizeof(idist__mpi_header) * (size_t)count;

    while ((1 << step) < have) step++;

    // The send goes first, because another rank waits for it.
    mg->exchange_error =
        MPI_Isend(mg->headers, (int)nbytes, MPI_BYTE, (g->rank - have + size) % size,
                  IDIST__TAG_HEADER + step, mg->comm, &mg->requests[1]);
    if (mg->exchange_error == MPI_SUCCESS)
        mg->exchange_error =
            MPI_Irecv(mg->headers + have, (int)nbytes, MPI_BYTE, (g->rank + have) % size,
                      IDIST__TAG_HEADER + step, mg->comm, &mg->requests[0]);
}

// Starts the exchange for the call that the fingerprint describes. `data` is our contribution.
static void idist__exchange_begin(idist_group *g, const idist__fingerprint *fingerprint,
                                  uint32_t flags, const void *data, size_t nbytes) {
    idist__mpi_group *mg = idist__mpi_model_group(g);
    idist__mpi_header *own = &mg->headers[0];

    own->fingerprint = *fingerprint;
    own->flags = flags;
    own->nbytes = (uint32_t)nbytes;
    if (nbytes) memcpy(own->data, data, nbytes);
    mg->entered = *fingerprint;
    mg->exchange_seq = fingerprint->seq;
    mg->header_count = 1;
    if (g->size > 1) idist__exchange_post(g);
}

typedef enum idist__exchange_state {
    IDIST__EXCHANGE_FAILED = -1,
    IDIST__EXCHANGE_PENDING = 0,
    IDIST__EXCHANGE_DONE = 1
} idist__exchange_state;

// Advances the exchange without blocking. On FAILED, *error is the error code of MPI.
static idist__exchange_state idist__exchange_step(idist_group *g, int *error) {
    idist__mpi_group *mg = idist__mpi_model_group(g);

    while (mg->header_count < g->size) {
        int done = 0, i;
        *error = mg->exchange_error;
        if (*error != MPI_SUCCESS) return IDIST__EXCHANGE_FAILED;

        for (i = 0; i < 2; i++) {
            *error = MPI_Test(&mg->requests[i], &done, MPI_STATUS_IGNORE);
            if (*error != MPI_SUCCESS) return IDIST__EXCHANGE_FAILED;
            if (!done) return IDIST__EXCHANGE_PENDING;
        }

        g->w->wait.moved_count++;
        mg->header_count = 2 * mg->header_count < g->size ? 2 * mg->header_count : g->size;
        if (mg->header_count < g->size) idist__exchange_post(g);
    }

    return IDIST__EXCHANGE_DONE;
}

// Starts the second exchange of the headers, which commits this rank to the call.
static void idist__exchange_commit(idist_group *g) {
    idist__mpi_group *mg = idist__mpi_model_group(g);

    if (idist__mpi_of(g->w)->multithreaded) mg->headers[0].flags |= IDIST__HEADER_BUSY;
    mg->committed_seq = mg->exchange_seq;
    mg->header_count = 1;
    idist__exchange_post(g);
}

static void idist__exchange_cancel(idist_group *g) {
    idist__mpi_group *mg = idist__mpi_model_group(g);
    int sent = 1;

    if (mg->requests[0] != MPI_REQUEST_NULL) MPI_Cancel(&mg->requests[0]);
    MPI_Wait(&mg->requests[0], MPI_STATUS_IGNORE);
    MPI_Test(&mg->requests[1], &sent, MPI_STATUS_IGNORE);

    if (!sent) {
        mg->headers = NULL; // MPI still reads them, so they are never freed
        MPI_Request_free(&mg->requests[1]);
    }
}

static const idist__mpi_header *idist__exchange_header(const idist_group *g, int rank) {
    return &idist__mpi_model_group(g)->headers[(rank - g->rank + g->size) % g->size];
}

static bool idist__exchange_same_call(const idist__mpi_header *a, const idist__mpi_header *b) {
    return memcmp(&a->fingerprint, &b->fingerprint, sizeof a->fingerprint) == 0;
}

// Explains how the calls of two ranks differ. Returns false if the calls are equal.
static bool idist__exchange_explain(const idist_group *g, int a, int b, char *text,
                                    size_t capacity) {
    const idist__fingerprint *of_a = &idist__exchange_header(g, a)->fingerprint,
                             *of_b = &idist__exchange_header(g, b)->fingerprint;

    if (idist__fingerprint_equal(of_a, of_b)) return false;
    idist__explain_mismatch(g->w, idist__fingerprint_difference(of_a, of_b), g->ranks[a], of_a,
                            g->ranks[b], of_b, text, capacity);

    return true;
}

// Returns true if all headers describe the same call. If not, every rank gets the same text. A rank
// without a plan agrees with every plan, so all other plans are compared with the first plan.
static bool idist__exchange_agree(const idist_group *g, char *text, size_t capacity) {
    const idist__mpi_header *headers = idist__mpi_model_group(g)->headers;
    int i, planned = 0;

    for (i = 1; i < g->size && idist__exchange_same_call(&headers[i], &headers[0]); i++) continue;
    if (i >= g->size) return true;

    for (i = 1; i < g->size; i++) {
        if (!idist__fingerprint_plan(&idist__exchange_header(g, planned)->fingerprint)) planned = i;
        if (idist__exchange_explain(g, 0, i, text, capacity) ||
            idist__exchange_explain(g, planned, i, text, capacity))
            return false;
    }

    return true;
}

static uint32_t idist__exchange_flags(const idist_group *g) {
    uint32_t flags = 0;
    int i;

    for (i = 0; i < g->size; i++) flags |= idist__mpi_model_group(g)->headers[i].flags;
    return flags;
}

// Returns the number of bytes that this rank contributes if the call fits into headers, or -1 if it
// does not. All ranks agree on whether the call fits.
static int idist__exchange_contribution(const idist_group *g, const idist__call *call) {
    size_t nbytes = idist_dtype_size(call->dtype);
    bool contributes;

    if (g->size > IDIST__HEADER_MAX_RANKS || idist__kind_is_v(call->kind)) return -1;
    if (call->count > IDIST__HEADER_DATA_NBYTES) return -1;
    if (idist__kind_reduces(call->kind) && idist__reduce_op_is_user(call->op)) return -1;
    nbytes *= call->count * (idist__kind_gives_blocks(call->kind) ? (size_t)g->size : 1);
    if (nbytes > IDIST__HEADER_DATA_NBYTES) return -1;
    contributes =
        (call->kind != IDIST__BROADCAST && call->kind != IDIST__SCATTER) || call->root == g->rank;

    return contributes ? (int)nbytes : 0;
}

// Computes the result of a call whose contributions are all in the headers. Reductions combine the
// operands in rank order, so the result is the same on all ranks.
static void idist__exchange_result(const idist_group *g, const idist__call *call) {
    size_t part = call->count * idist_dtype_size(call->dtype), at = 0;
    const void *in[IDIST__HEADER_MAX_RANKS];
    char *recv = (char *)call->recv;
    int i, n = g->size;

    if (call->kind == IDIST__SCAN) n = g->rank + 1;
    if (call->kind == IDIST__EXSCAN) n = g->rank;
    if (!part || !n) return;
    if ((call->kind == IDIST__GATHER || call->kind == IDIST__REDUCE) && call->root != g->rank)
        return;
    if (idist__kind_gives_blocks(call->kind)) at = part * (size_t)g->rank;

    if (call->kind == IDIST__BROADCAST || call->kind == IDIST__SCATTER) {
        if (call->kind == IDIST__SCATTER || call->root != g->rank)
            memcpy(recv, idist__exchange_header(g, call->root)->data + at, part);
        return;
    }

    for (i = 0; i < n; i++) in[i] = idist__exchange_header(g, i)->data + at;

    if (idist__kind_reduces(call->kind))
        idist__reduce_many(recv, in, n, call->count, call->dtype, call->op,
                           call->op == IDIST_AVG ? n : 0);
    else if (idist__kind_takes_blocks(call->kind))
        for (i = 0; i < n; i++) memcpy(recv + part * (size_t)i, in[i], part);
}

// ---- mpi/control.h -------------------------------------------------------------------------------

// mpi/control.h: control messages between two ranks
//
// Control messages carry everything between two ranks except bulk data: user messages of up to 3.5
// KiB, the handshake of larger messages, and notices about waiting and failure. One receive from
// any rank is always posted.
//
// The path of a control message:
//
//     idist__control_send        copies the message and posts MPI_Isend
//     idist__control_sweep       reclaims the buffer when the message is sent
//     idist__control_progress    receives the message on the other rank
//     mpi->deliver               idist__mpi_engine_deliver of mpi/mpi_engine.h, which hands
//                                the message to mpi/mpi_p2p.h or mpi/mpi_wait.h
//     idist__control_keep        keeps the message if nobody can use it yet

static void idist__control_post_receive(idist__mpi *mpi) {
    int error = MPI_Irecv(mpi->incoming_buffer, (int)sizeof mpi->incoming_buffer, MPI_BYTE,
                          MPI_ANY_SOURCE, IDIST__TAG_CONTROL, mpi->p2p_comm, &mpi->incoming);
    if (error != MPI_SUCCESS) idist__mpi_error_fail_group(mpi, &mpi->w->group, "MPI_Irecv", error);
}

// Returns true if a control message is in the buffer. While a rank is lost, ULFM fails a receive
// from any rank unless it was posted after we acknowledged the loss. So this function posts the
// receive again after a loss.
static bool idist__control_arrived(idist__mpi *mpi, MPI_Status *status) {
    int arrived = 0, cancelled = 0, error = MPI_Test(&mpi->incoming, &arrived, status);

    if (error == MPI_SUCCESS) return arrived;
    idist__mpi_error_fail_group(mpi, &mpi->w->group, "MPI_Test", error);
    if (!idist__mpi_error_is_loss(error)) return false;
    idist__mpi_error_find_lost(mpi);

    if (mpi->incoming != MPI_REQUEST_NULL) {
        MPI_Cancel(&mpi->incoming);
        arrived = MPI_Wait(&mpi->incoming, status) == MPI_SUCCESS;
        if (arrived) MPI_Test_cancelled(status, &cancelled);
    }

    if (!arrived || cancelled) idist__control_post_receive(mpi);

    return arrived && !cancelled;
}

static void idist__control_progress(idist__mpi *mpi) {
    const char *payload = mpi->incoming_buffer + sizeof(idist__mpi_control);
    idist__mpi_control control;
    char cause[sizeof mpi->w->group.cause];
    MPI_Status status;
    int i;

    for (i = 0; i < IDIST__CONTROL_BATCH; i++) {
        if (mpi->incoming == MPI_REQUEST_NULL || !idist__control_arrived(mpi, &status)) break;
        mpi->received_count++;
        memcpy(&control, mpi->incoming_buffer, sizeof control);

        // Handling FAILED receives other messages into the buffer, so copy the text out first.
        if (control.type == IDIST__CONTROL_FAILED) {
            memcpy(cause, payload,
                   control.nbytes < sizeof cause ? (size_t)control.nbytes : sizeof cause);
            idist__control_post_receive(mpi);
            mpi->deliver(mpi, status.MPI_SOURCE, &control, cause);
        } else {
            mpi->deliver(mpi, status.MPI_SOURCE, &control, payload);
            idist__control_post_receive(mpi);
        }
    }
}

// Returns a buffer for a control message, or NULL if memory is exhausted. Only a message that
// announces a failure may use the reserve.
static idist__mpi_outgoing *idist__control_buffer(idist__mpi *mpi, bool announces_failure) {
    idist__mpi_outgoing *o = mpi->free_outgoing;

    if (o) {
        mpi->free_outgoing = o->next;
        return o;
    }

    o = (idist__mpi_outgoing *)idist__mem_raw(&mpi->w->cfg.mem,
                                              sizeof *o + IDIST__CONTROL_MAX_NBYTES);

    if (!o && announces_failure && mpi->reserve) {
        o = mpi->reserve;
        mpi->reserve = o->next;
    }

    return o;
}

// Sends a control message to a rank of the world. Copies the payload. If memory runs out or MPI
// refuses, the group fails.
static void idist__control_send(idist__mpi *mpi, int rank, const idist__mpi_control *control,
                                const void *payload, size_t nbytes) {
    idist__mpi_outgoing *o;
    idist_group *g;
    int error = MPI_SUCCESS;

    if (mpi->peers[rank].lost || mpi->closing) return;

    if (rank == mpi->w->cfg.rank) {
        idist__mpi_control own = *control;
        own.nbytes = nbytes;
        mpi->deliver(mpi, rank, &own, payload);
        return;
    }

    o = idist__control_buffer(mpi, control->type == IDIST__CONTROL_FAILED);

    if (o) {
        o->control = *control;
        o->control.nbytes = nbytes;
        if (nbytes) memcpy(o + 1, payload, nbytes);
        error = MPI_Isend(&o->control, (int)(sizeof o->control + nbytes), MPI_BYTE, rank,
                          IDIST__TAG_CONTROL, mpi->p2p_comm, &o->request);

        if (error == MPI_SUCCESS) {
            o->next = mpi->outgoing;
            mpi->outgoing = o;
            mpi->sent_counts[rank]++;
            return;
        }

        o->next = mpi->free_outgoing;
        mpi->free_outgoing = o;
    }

    g = idist__world_find_group(mpi->w, control->ctx);
    if (!g) return;
    if (o) idist__mpi_error_fail_group(mpi, g, "MPI_Isend", error);
    else idist__group_fail_memory(g);
}

// Reclaims the buffers of messages that were sent or whose receiver is lost.
static void idist__control_sweep(idist__mpi *mpi) {
    idist__mpi_outgoing **at = &mpi->outgoing;

    while (*at) {
        idist__mpi_outgoing *o = *at;
        int done = 0;

        if (MPI_Test(&o->request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && !done) {
            at = &o->next;
            continue;
        }

        *at = o->next;
        o->next = mpi->free_outgoing;
        mpi->free_outgoing = o;
    }
}

// Keeps a message whose receive or group does not exist yet.
static void idist__control_keep(idist__mpi *mpi, int source, const idist__mpi_control *control,
                                const void *payload) {
    size_t nbytes = (size_t)control->nbytes;
    idist__mpi_unexpected **last,
        *u = (idist__mpi_unexpected *)idist__mem_raw(&mpi->w->cfg.mem, sizeof *u + nbytes);

    if (!u) {
        idist__group_fail_memory(&mpi->w->group);
        return;
    }

    u->next = NULL;
    u->source = source;
    u->control = *control;
    if (nbytes) memcpy(u + 1, payload, nbytes);
    for (last = &mpi->unexpected; *last; last = &(*last)->next) continue;
    *last = u;
}

// Receives the messages that other ranks sent before the last barrier, because MPI frees a
// communicator only when nothing is in flight on it.
static void idist__control_drain(idist__mpi *mpi) {
    int64_t deadline_ns = idist__os_clock_deadline(IDIST__CLOSE_MS);
    uint32_t expected = 0;

    mpi->closing = true;
    MPI_Reduce_scatter_block(mpi->sent_counts, &expected, 1, MPI_UINT32_T, MPI_SUM, mpi->p2p_comm);
    while ((int32_t)(expected - mpi->received_count) > 0 && idist__os_clock_now_ns() < deadline_ns)
        idist__control_progress(mpi);
}

// ---- mpi/comms.h ---------------------------------------------------------------------------------

// mpi/comms.h: the communicators of groups, until all members have freed them
//
// MPI_Comm_free is collective, and MPICH 5 ends the program if the communicator still holds a
// message that no rank has received. idist_free_group waits for nobody, and a member may fail the
// group at the same time. So a member that frees a group that has not failed sends FREED to the
// others. The member frees the communicator when it has received FREED from all of them.
//
// If a group failed on any member, its communicator stays until the program ends. The
// communicator's entry in mpi->comms stays until the world closes, because other members may still
// send messages about the group.

static idist__mpi_comm **idist__comms_find(idist__mpi *mpi, uint64_t ctx) {
    idist__mpi_comm **at = &mpi->comms;

    while (*at && (*at)->ctx != ctx) at = &(*at)->next;
    return at;
}

// Counts a member that has freed the group. After the last one, frees the communicator. Returns
// false if the group does not exist here yet.
static bool idist__comms_leave(idist__mpi *mpi, uint64_t ctx) {
    idist__mpi_comm **at = idist__comms_find(mpi, ctx), *c = *at;

    if (!c) return false;

    if (!c->failed && --c->user_count == 0) {
        MPI_Comm_free(&c->comm);
        *at = c->next;
        idist__mem_free(&mpi->w->cfg.mem, c);
    }

    return true;
}

static void idist__comms_tell_freed(idist__mpi *mpi, const idist_group *g) {
    idist__mpi_control freed;
    int i;

    memset(&freed, 0, sizeof freed);
    freed.type = IDIST__CONTROL_FREED;
    freed.ctx = g->ctx;
    for (i = 0; i < g->size; i++)
        if (i != g->rank) idist__control_send(mpi, g->ranks[i], &freed, NULL, 0);
}

// Keeps the communicator of a group that has failed on a member. Returns false if the group does
// not exist here yet.
static bool idist__comms_keep(idist__mpi *mpi, uint64_t ctx) {
    idist__mpi_comm *c = *idist__comms_find(mpi, ctx);

    if (c) c->failed = true;
    return c != NULL;
}

// ---- mpi/mpi_coll.h ------------------------------------------------------------------------------

// mpi/mpi_coll.h: a collective, from its header exchange to its result
//
//     QUEUED -> ENTERING -> COMMITTING -> RUNNING, blocking ------> done
//                  |                                                 ^
//                  |--- some rank is BUSY -> RUNNING, requests ------|
//                  |--- all data was in the headers -----------------|
//
// MPI does not match a blocking collective with a non-blocking one, so all ranks must use the same
// kind. Blocking collectives are twice as fast in some MPIs. The ranks block if no header is BUSY
// or LARGE. If none is BUSY with other calls, collectives never wait for each other in a circle.
//
// A rank blocked inside MPI cannot be told of a failure. So no rank blocks before all have
// committed to the call. A rank that has committed does not leave the call, not even at a deadline
// or because of idist_abort. There are two exceptions: another rank fails before committing, or the
// second exchange is still pending IDIST__FIND_LOST_MS after the group failed. If several threads
// of a rank make calls, the rank sets BUSY when it commits, because another thread may make a
// group, and block in MPI, before this call runs.
//
// Calls after which all ranks enter MPI together (idist__mpi_coll_binds) commit even if their data
// was in the headers.
//
// The state of an exchange belongs to the group and not to a task, so a quick call
// (idist__mpi_coll_quick) that returns early loses nothing. The task that follows for the same call
// finds the exchange in progress and continues it. The path of a collective:
//
//     idist__call_locked
//       |
//       | blocking, and no other task
//       +--> idist__mpi_coll_quick
//       |      idist__mpi_coll_exchange     begins; polls a few times
//       |        done, data in the headers -------------------------> result, no task
//       |        otherwise: no result, and ...
//       v
//     idist__mpi_engine_start               queues a task for the call
//       v
//     idist__mpi_coll_step                  first in the queue, at every poll
//       |  QUEUED, ENTERING, COMMITTING:
//       |    idist__mpi_coll_exchange       begins, unless the quick call has; polls once
//       |
//       |  ENTERING is done
//       +--> idist__mpi_coll_entered        compares the headers; then either
//       |      idist__exchange_commit         COMMITTING: the same exchange once more, or
//       |      idist__mpi_coll_run            RUNNING by requests
//       |  COMMITTING is done
//       +--> idist__mpi_coll_run            hands the call to MPI, or takes the result from
//              v                            the headers
//            idist__mpi_coll_done           RUNNING is done: completes the task

// Returns true if the counts of a v-form agree for all pairs of ranks. Each header carries a hash
// of what its rank sends minus a hash of what its rank expects. The sum is 0 if all pairs agree.
static bool idist__mpi_coll_balanced(const idist_group *g) {
    uint64_t sum = 0, balance;
    int i;

    for (i = 0; i < g->size; i++) {
        memcpy(&balance, idist__mpi_model_group(g)->headers[i].data, sizeof balance);
        sum += balance;
    }

    return sum == 0;
}

// Names the pair of ranks whose counts differ. All ranks know that there is such a pair, so they
// exchange all counts to find it.
static void idist__mpi_coll_find_unbalanced(const idist_group *g, const idist__task *t, char *text,
                                            size_t capacity) {
    const idist_allocator *mem = &g->w->cfg.mem;
    size_t n = (size_t)g->size, i;
    uint64_t *all = (uint64_t *)idist__mem_alloc(mem, sizeof *all * 2 * n * (n + 1)),
             *own = all ? all + 2 * n * n : NULL;
    MPI_Request request;
    int error;

    snprintf(text, capacity, "the counts of two ranks differ in %s #%u",
             idist__kind_names[t->call.label], (unsigned)t->seq);
    if (!all) return;
    for (i = 0; i < n; i++) own[i] = idist__extent_pair(g, &t->call, (int)i, true);
    for (i = 0; i < n; i++) own[n + i] = idist__extent_pair(g, &t->call, (int)i, false);

    error = MPI_Iallgather(own, 2 * g->size, MPI_UINT64_T, all, 2 * g->size, MPI_UINT64_T,
                           idist__mpi_model_group(g)->comm, &request);

    if (error != MPI_SUCCESS ||
        idist__mpi_error_await(&request, IDIST__CLOSE_MS, "MPI_Iallgather") != IDIST_OK) {
        idist__mpi_of(g->w)->abandoned = true; // MPI may still use the memory
        return;
    }

    for (i = 0; i < n * n; i++) {
        size_t from = i / n, to = i % n;
        uint64_t sent = all[from * 2 * n + to], expected = all[to * 2 * n + n + from];

        if (sent == expected) continue;
        idist__explain_pair(g->ranks[from], sent, g->ranks[to], expected, t, text, capacity);
        break;
    }

    idist__mem_free(mem, all);
}

// Returns true if all ranks enter MPI together right after this call, so that no rank may be
// missing.
static bool idist__mpi_coll_binds(const idist__call *call) {
    return call->label == IDIST__NEW_GROUP || call->label == IDIST__SPLIT ||
           call->label == IDIST__FINALIZE;
}

// Begins the header exchange.
static void idist__mpi_coll_enter(idist_group *g, const idist__call *call,
                                  const idist__fingerprint *fingerprint, bool busy) {
    int contribution = idist__exchange_contribution(g, call);
    const void *data = call->kind == IDIST__BROADCAST ? call->recv : call->send;
    size_t nbytes = contribution > 0 ? (size_t)contribution : 0;
    uint32_t flags = busy ? IDIST__HEADER_BUSY : 0;
    uint64_t balance;

    if (!idist__native_fits(g, call)) flags |= IDIST__HEADER_LARGE;
    if (idist__extent_call_in_place(g, call)) flags |= IDIST__HEADER_IN_PLACE;

    if (idist__kind_is_v(call->kind)) {
        balance = idist__extent_balance(g, call);
        data = &balance;
        nbytes = sizeof balance;
    }

    idist__exchange_begin(g, fingerprint, flags, data, nbytes);
}

// Begins the header exchange of this call unless it is in progress already, then polls it up to
// `polls` times. On FAILED, *error is the error code of MPI.
static idist__exchange_state idist__mpi_coll_exchange(idist_group *g, const idist__call *call,
                                                      const idist__fingerprint *fingerprint,
                                                      bool busy, int polls, int *error) {
    idist__exchange_state state = IDIST__EXCHANGE_PENDING;
    int i;

    if (idist__mpi_model_group(g)->exchange_seq != fingerprint->seq)
        idist__mpi_coll_enter(g, call, fingerprint, busy);
    for (i = 0; i < polls && state == IDIST__EXCHANGE_PENDING; i++)
        state = idist__exchange_step(g, error);

    return state;
}

static void idist__mpi_coll_done(idist__mpi *mpi, idist__task *t) {
    idist__mpi_op *op = idist__mpi_op_of(t);
    const char *function = op->native.function;
    int error;

    op->phase = IDIST__PHASE_WAITING;
    mpi->poll_ns = 0;
    mpi->w->wait.moved_count++;
    error = idist__native_end(&op->native);

    if (error == MPI_SUCCESS) idist__task_complete(t, IDIST_OK, "");
    else idist__mpi_error_fail_group(mpi, t->group, function, error);
}

// Takes the first collective from its queue. Hands it to MPI, or completes it if all data was in
// the headers.
static void idist__mpi_coll_run(idist__mpi *mpi, idist__task *t, bool blocking) {
    idist__mpi_op *op = idist__mpi_op_of(t);

    idist__mpi_model_group(t->group)->queue_head = op->next;
    op->next = NULL;

    if (!op->native.group) {
        idist__exchange_result(t->group, &t->call);
        idist__task_complete(t, IDIST_OK, "");
        return;
    }

    op->phase = IDIST__PHASE_RUNNING;
    idist__native_begin(&op->native, blocking);
    if (blocking || op->native.error != MPI_SUCCESS) idist__mpi_coll_done(mpi, t);
}

// Compares the headers after the first exchange, then commits to the call or runs it.
static void idist__mpi_coll_entered(idist__mpi *mpi, idist__task *t) {
    idist_group *g = t->group;
    idist__native *nat = &idist__mpi_op_of(t)->native;
    uint32_t flags = idist__exchange_flags(g);
    char text[400];
    bool small = idist__exchange_contribution(g, &t->call) >= 0,
         agree = idist__exchange_agree(g, text, sizeof text), commits;

    if (agree && idist__kind_is_v(t->call.kind) && !idist__mpi_coll_balanced(g)) {
        idist__mpi_coll_find_unbalanced(g, t, text, sizeof text);
        agree = false;
    }

    if (!agree) {
        idist__mpi_model_group(g)->failure_known = true;
        idist__group_fail(g, IDIST_ERR_MISMATCH, text);
        return;
    }

    if (!small) idist__native_init(nat, g, &t->call, flags);

    if (nat->error != MPI_SUCCESS) {
        idist__mpi_error_fail_group(mpi, g, nat->function, nat->error);
        return;
    }

    if (small) commits = idist__mpi_coll_binds(&t->call);
    else commits = !(flags & (IDIST__HEADER_BUSY | IDIST__HEADER_LARGE));

    if (commits) {
        idist__mpi_op_of(t)->phase = IDIST__PHASE_COMMITTING;
        idist__exchange_commit(g);
    } else {
        idist__mpi_coll_run(mpi, t, false);
    }
}

// Returns the union of all ranks' flags as far as one rank can tell without an exchange. In v-forms
// this rank does not know whether the counts of the other ranks fit, so it sets LARGE.
static uint32_t idist__mpi_coll_unchecked_flags(const idist_group *g, const idist__call *call) {
    uint32_t flags = idist__extent_call_in_place(g, call) ? IDIST__HEADER_IN_PLACE : 0;

    if (idist__kind_is_v(call->kind) || !idist__native_fits(g, call)) flags |= IDIST__HEADER_LARGE;
    return flags;
}

// Returns true if t binds (idist__mpi_coll_binds) and another collective of this rank has
// committed. Other ranks may block in that collective before they enter t.
static bool idist__mpi_coll_must_wait(const idist__mpi *mpi, const idist__task *t) {
    const idist__task *other;

    if (!idist__mpi_coll_binds(&t->call)) return false;

    for (other = mpi->w->tasks.running; other; other = other->next)
        if (idist__mpi_op_of(other)->phase == IDIST__PHASE_COMMITTING) return true;

    return false;
}

// Runs one step of the first collective of a group. Returns false if it has to wait.
static bool idist__mpi_coll_step(idist__mpi *mpi, idist__task *t) {
    idist_group *g = t->group;
    idist__mpi_op *op = idist__mpi_op_of(t);
    idist__fingerprint fingerprint;
    idist__exchange_state state;
    bool busy = idist__task_is_async(t) || t->next || t->prev || idist__together_now.depth;
    int error = MPI_SUCCESS;

    if (op->phase == IDIST__PHASE_QUEUED && mpi->w->cfg.unchecked) {
        idist__native_init(&op->native, g, &t->call, idist__mpi_coll_unchecked_flags(g, &t->call));
        idist__mpi_coll_run(mpi, t, !idist__task_is_async(t));
        return true;
    }

    if (op->phase == IDIST__PHASE_QUEUED) {
        if (idist__mpi_coll_must_wait(mpi, t)) return false;
        op->phase = IDIST__PHASE_ENTERING;
    }

    fingerprint = idist__fingerprint_of_task(t, IDIST__ALGO_AUTO);
    state = idist__mpi_coll_exchange(g, &t->call, &fingerprint, busy, 1, &error);
    if (state == IDIST__EXCHANGE_PENDING) return false;

    if (state == IDIST__EXCHANGE_FAILED)
        idist__mpi_error_fail_group(mpi, g, "the header exchange", error);
    else if (op->phase == IDIST__PHASE_ENTERING) idist__mpi_coll_entered(mpi, t);
    else idist__mpi_coll_run(mpi, t, !(idist__exchange_flags(g) & IDIST__HEADER_BUSY));

    return true;
}

static void idist__mpi_coll_progress(idist__mpi *mpi, idist_group *g) {
    idist__mpi_group *mg = idist__mpi_model_group(g);
    while (mg->queue_head && g->status == IDIST_OK && idist__mpi_coll_step(mpi, mg->queue_head))
        continue;
}

// Ends a call to which this rank committed before the group failed. Other ranks may wait for us
// inside MPI; if so, the call succeeds here as it does there.
static void idist__mpi_coll_keep_commitment(idist__mpi *mpi, idist__task *t) {
    idist__mpi_group *mg = idist__mpi_model_group(t->group);
    idist__exchange_state state = IDIST__EXCHANGE_PENDING;
    int64_t deadline_ns = idist__os_clock_deadline(IDIST__FIND_LOST_MS);
    bool late = false;
    int error;

    while (!mg->commit_refused && state == IDIST__EXCHANGE_PENDING && !late) {
        state = idist__exchange_step(t->group, &error);
        idist__control_progress(mpi);
        late = idist__os_clock_now_ns() > deadline_ns;
    }

    if (late && state == IDIST__EXCHANGE_PENDING) {
        mg->committed_seq--; // ranks that learn of our failure will not wait for us
        mpi->abandoned = true;
    }

    if (state == IDIST__EXCHANGE_DONE && !mg->commit_refused)
        idist__mpi_coll_run(mpi, t, !(idist__exchange_flags(t->group) & IDIST__HEADER_BUSY));
}

// Runs a blocking call without an exchange (IDIST_CHECK=0). The most common calls, plain
// all_reduces, go to MPI directly.
static bool idist__mpi_coll_direct(idist__mpi *mpi, idist_group *g, const idist__call *call) {
    const void *in = call->send == call->recv ? MPI_IN_PLACE : call->send;
    idist__native nat;
    int error;

    if (call->kind == IDIST__ALL_REDUCE && call->count && call->count <= IDIST__MPI_COUNT &&
        !idist__reduce_op_is_user(call->op) && call->op != IDIST_AVG &&
        !idist__dtype_is_narrow(call->dtype) && idist__mpi_type_exists(call->dtype)) {
        error = MPI_Allreduce(in, call->recv, (int)call->count, idist__mpi_type_of(call->dtype),
                              idist__mpi_type_builtin_op(mpi, call->op, call->dtype),
                              idist__mpi_model_group(g)->comm);
    } else {
        idist__native_init(&nat, g, call, idist__mpi_coll_unchecked_flags(g, call));
        idist__native_begin(&nat, true);
        error = idist__native_end(&nat);
    }

    if (error == MPI_SUCCESS) g->seq++;
    else idist__mpi_error_fail_group(mpi, g, "a collective of MPI", error);

    return error == MPI_SUCCESS;
}

// Polls for control messages if no quick call has done so for a millisecond, because the group may
// have failed meanwhile.
static void idist__mpi_coll_poll_control(idist__mpi *mpi) {
    int64_t now_ns = idist__os_clock_now_ns();
    int i;

    if (now_ns - mpi->polled_ns <= IDIST__MS) return;
    for (i = 0; i < IDIST__QUICK_CONTROL_POLLS; i++) idist__control_progress(mpi);
    mpi->polled_ns = now_ns;
}

// Runs a blocking collective without a task if all data fits into headers and the other ranks enter
// it soon. Otherwise, and after any error, returns false; the task that follows continues the
// exchange. With IDIST_CHECK=0, hands the call to MPI.
static bool idist__mpi_coll_quick(idist_group *g, const idist__call *call) {
    idist__mpi *mpi = idist__mpi_of(g->w);
    idist__exchange_state state;
    idist__fingerprint fingerprint;
    char text[400];
    int error,
        polls = mpi->w->wait.spin_ns ? IDIST__QUICK_POLLS : IDIST__QUICK_POLLS_OVERSUBSCRIBED;

    if (!idist__kind_is_collective(call->kind) || g->size == 1) return false;
    if (mpi->w->cfg.unchecked) return idist__mpi_coll_direct(mpi, g, call);
    idist__mpi_coll_poll_control(mpi);
    if (g->status != IDIST_OK) return false;

    // A call that binds, or that needs MPI, only begins here, so that its headers are sent early.
    if (idist__exchange_contribution(g, call) < 0 || idist__mpi_coll_binds(call)) polls = 0;
    fingerprint = idist__fingerprint_of_call(g->w, call, g->seq + 1);
    state = idist__mpi_coll_exchange(g, call, &fingerprint, false, polls, &error);
    if (state == IDIST__EXCHANGE_FAILED)
        idist__mpi_error_fail_group(mpi, g, "the header exchange", error);
    if (state != IDIST__EXCHANGE_DONE || !idist__exchange_agree(g, text, sizeof text)) return false;

    idist__exchange_result(g, call);
    g->seq++;

    return true;
}

// ---- mpi/mpi_p2p.h -------------------------------------------------------------------------------

// mpi/mpi_p2p.h: sends and receives
//
// A message of up to 3.5 KiB is the payload of an EAGER control message. A larger message goes from
// buffer to buffer (rendezvous protocol):
//
//     sender                                receiver
//     READY_TO_SEND (fingerprint, id) --->  matches a receive, posts MPI_Irecv
//                                     <---  CLEAR_TO_SEND (id, tag)
//     MPI_Isend with this tag         --->  data
//
// The path of a send:
//
//     idist__mpi_p2p_send         sends EAGER, which completes the send, or READY_TO_SEND
//     idist__mpi_p2p_cleared      WAITING is done: posts the data
//     idist__mpi_p2p_done         TRANSFERRING is done: completes the send
//
// The path of a receive:
//
//     idist__mpi_p2p_receive      looks for an unexpected message, or waits for a message
//     idist__mpi_p2p_match        EAGER: copies the payload, which completes the receive
//     idist__mpi_p2p_clear        READY_TO_SEND: posts MPI_Irecv, sends CLEAR_TO_SEND
//     idist__mpi_p2p_done         TRANSFERRING is done: completes the receive

// Posts the data of a large message, in pieces whose sizes fit into MPI's int.
static void idist__mpi_p2p_transfer(idist__task *t, int rank, int tag, size_t nbytes) {
    idist__mpi *mpi = idist__mpi_of(t->group->w);
    idist__native *nat = &idist__mpi_op_of(t)->native;
    bool sends = t->call.kind == IDIST__SEND;
    size_t at, n, max = IDIST__PIECE_MAX_NBYTES;

    if (IDIST__MPI_COUNT < max) max = IDIST__MPI_COUNT;
    idist__native_init(nat, t->group, &t->call, 0);
    idist__mpi_op_of(t)->phase = IDIST__PHASE_TRANSFERRING;

    for (at = 0; at < nbytes; at += n) {
        n = nbytes - at < max ? nbytes - at : max;
        if (sends)
            IDIST__NATIVE_REQUEST(nat, MPI_Isend, (const char *)t->call.send + at, (int)n, MPI_BYTE,
                                  rank, tag, mpi->p2p_comm);
        else
            IDIST__NATIVE_REQUEST(nat, MPI_Irecv, (char *)t->call.recv + at, (int)n, MPI_BYTE, rank,
                                  tag, mpi->p2p_comm);
    }
}

// Returns the next MPI tag for data. Skips the tags of canceled receives, whose data may still
// arrive.
static int idist__mpi_p2p_next_tag(idist__mpi *mpi) {
    int i;

    for (i = 0; i < IDIST__TAG_RANGE; i++) {
        mpi->next_tag = (mpi->next_tag + 1) % IDIST__TAG_RANGE;
        if (!(mpi->retired_tags[mpi->next_tag / 8] >> mpi->next_tag % 8 & 1)) break;
    }

    return mpi->next_tag;
}

// Receives the large message that READY_TO_SEND announces.
static void idist__mpi_p2p_clear(idist__mpi *mpi, idist__task *t, int source,
                                 const idist__mpi_control *ready) {
    idist__mpi_op *op = idist__mpi_op_of(t);
    idist__mpi_control clear;

    op->data_tag = idist__mpi_p2p_next_tag(mpi);
    op->source = source;
    op->control = *ready;

    memset(&clear, 0, sizeof clear);
    clear.type = IDIST__CONTROL_CLEAR_TO_SEND;
    clear.ctx = ready->ctx;
    clear.id = ready->id;
    clear.tag = IDIST__TAG_DATA + op->data_tag;
    idist__mpi_p2p_transfer(t, source, clear.tag,
                            (size_t)idist__fingerprint_count(&ready->fingerprint) *
                                idist_dtype_size(t->call.dtype));
    idist__control_send(mpi, source, &clear, NULL, 0);
}

// Gives a message to the oldest receive that matches it. Returns false if there is none. A receive
// that matches fails if the message does not fit.
static bool idist__mpi_p2p_match(idist__mpi *mpi, idist_group *g, int source,
                                 idist__mpi_control *control, const void *payload) {
    idist__task **at = &idist__mpi_model_group(g)->receives;
    int from = idist__mpi_model_group(g)->rank_of[source];
    size_t count = (size_t)idist__fingerprint_count(&control->fingerprint);

    while (*at) {
        idist__task *t = *at;
        idist_status status;
        char text[256];

        if (!idist__matching_matches(t, source, control->tag)) {
            at = &idist__mpi_op_of(t)->next;
            continue;
        }

        *at = idist__mpi_op_of(t)->next;

        if (!idist__matching_fits(t, &control->fingerprint, from, &control->tag, &status, text,
                                  sizeof text)) {
            idist__task_complete(t, status, text);
            continue;
        }

        if (control->type == IDIST__CONTROL_READY_TO_SEND) {
            idist__mpi_p2p_clear(mpi, t, source, control);
        } else {
            idist__block_copy(t->call.recv, payload, (size_t)control->nbytes);
            idist__matching_received(t, from, control->tag, count);
        }

        return true;
    }

    return false;
}

static void idist__mpi_p2p_send(idist__mpi *mpi, idist__task *t) {
    idist_group *g = t->group;
    const idist__call *call = &t->call;
    size_t nbytes = call->count * idist_dtype_size(call->dtype);
    int rank = g->ranks[call->root];
    bool eager = nbytes <= IDIST__CONTROL_MAX_NBYTES || rank == mpi->w->cfg.rank;
    idist__mpi_control control;

    idist__mpi_op_of(t)->send_id = ++mpi->next_send_id;
    mpi->peers[rank].sent++;

    memset(&control, 0, sizeof control);
    control.type = eager ? IDIST__CONTROL_EAGER : IDIST__CONTROL_READY_TO_SEND;
    control.ctx = g->ctx;
    control.tag = call->tag;
    control.fingerprint = idist__fingerprint_of_task(t, IDIST__ALGO_AUTO);
    control.id = idist__mpi_op_of(t)->send_id;
    idist__control_send(mpi, rank, &control, call->send, eager ? nbytes : 0);
    if (eager) idist__task_complete(t, IDIST_OK, "");
}

static void idist__mpi_p2p_receive(idist__mpi *mpi, idist__task *t) {
    idist_group *g = t->group;
    idist__task **last;
    idist__mpi_unexpected **at;

    idist__mpi_op_of(t)->next = NULL;
    for (last = &idist__mpi_model_group(g)->receives; *last; last = &idist__mpi_op_of(*last)->next)
        continue;
    *last = t;

    for (at = &mpi->unexpected; *at; at = &(*at)->next) {
        idist__mpi_unexpected *u = *at;
        if (u->control.ctx != g->ctx || u->control.type > IDIST__CONTROL_READY_TO_SEND ||
            !idist__matching_matches(t, u->source, u->control.tag))
            continue;

        // If the message does not fit, the receive fails and the message stays.
        if (idist__mpi_p2p_match(mpi, g, u->source, &u->control, u + 1)) {
            *at = u->next;
            idist__mem_free(&mpi->w->cfg.mem, u);
        }

        return;
    }
}

// Handles CLEAR_TO_SEND: sends the data of the send that the message names.
static void idist__mpi_p2p_cleared(idist__mpi *mpi, int source, const idist__mpi_control *clear) {
    idist__task *t;

    for (t = mpi->w->tasks.running; t; t = t->next) {
        const idist__mpi_op *op = idist__mpi_op_of(t);

        if (t->call.kind != IDIST__SEND || op->phase != IDIST__PHASE_WAITING) continue;
        if (op->send_id != clear->id) continue;
        idist__mpi_p2p_transfer(t, source, clear->tag,
                                t->call.count * idist_dtype_size(t->call.dtype));
        return;
    }
}

// Completes a send or receive after MPI has moved all data of a large message.
static void idist__mpi_p2p_done(idist__mpi *mpi, idist__task *t) {
    idist__mpi_op *op = idist__mpi_op_of(t);
    bool sends = t->call.kind == IDIST__SEND;
    int error;

    op->phase = IDIST__PHASE_WAITING;
    mpi->poll_ns = 0;
    mpi->w->wait.moved_count++;
    error = idist__native_end(&op->native);

    if (error != MPI_SUCCESS)
        idist__mpi_error_fail_group(mpi, t->group, sends ? "MPI_Isend" : "MPI_Irecv", error);
    else if (sends) idist__task_complete(t, IDIST_OK, "");
    else
        idist__matching_received(t, idist__mpi_model_group(t->group)->rank_of[op->source],
                                 op->control.tag,
                                 (size_t)idist__fingerprint_count(&op->control.fingerprint));
}

// ---- mpi/mpi_wait.h ------------------------------------------------------------------------------

// mpi/mpi_wait.h: waiting ranks, missing ranks, and deadlocks of two ranks
//
// A rank that has waited for a while sends WAITING to the other members of the group. A member
// answers ENTERED if it has entered the same call, and ABSENT otherwise. At the deadline, the
// members that never entered are missing.
//
// Two ranks in calls of different groups compare no fingerprints. Neither do a rank in a receive
// and a rank in a collective. A deadlock of such ranks is detected from what they wait for. Two
// ranks are deadlocked when, on both of them,
//   - the rank has one thread and one call, which blocks without a time-out of its own,
//   - the call needs something that only the other rank can begin to send,
//   - the other rank has not begun to send it.
//
// The path of a wait:
//
//     idist__mpi_wait_announce           sends WAITING
//     idist__mpi_wait_received           answers WAITING on the other rank
//     idist__mpi_wait_find_deadlock      runs on both ranks after WAITING and after ABSENT
//     idist__mpi_wait_missing            names the missing ranks at the deadline

// Returns true if t needs something that `rank`, a rank of its group, must begin.
static bool idist__mpi_wait_needs(const idist__task *t, int rank) {
    const idist__mpi_group *mg = idist__mpi_model_group(t->group);
    const idist__mpi_op *op = idist__mpi_op_of(t);
    int size = t->group->size;

    if (idist__kind_is_p2p(t->call.kind))
        return op->phase == IDIST__PHASE_WAITING && t->call.root == rank;
    if (op->phase == IDIST__PHASE_QUEUED) return true;

    return op->phase == IDIST__PHASE_ENTERING &&
           (rank - t->group->rank + size) % size >= mg->header_count;
}

// Returns true if the peer may still get from us what it waits for.
static bool idist__mpi_wait_is_served(const idist__mpi *mpi, int peer) {
    const idist__mpi_control *waiting = &mpi->peers[peer].waiting;
    const idist_group *g = idist__world_find_group(mpi->w, waiting->ctx);
    const idist__mpi_unexpected *u;

    if (waiting->fingerprint.kind == IDIST__RECV) return waiting->received != mpi->peers[peer].sent;
    if (waiting->fingerprint.kind != IDIST__SEND)
        return !g || g->status != IDIST_OK || (int32_t)(waiting->fingerprint.seq - g->seq) <= 0;

    // A send is not served while its READY_TO_SEND is unmatched here.
    for (u = mpi->unexpected; u; u = u->next)
        if (u->source == peer && u->control.type == IDIST__CONTROL_READY_TO_SEND &&
            u->control.id == waiting->id)
            return false;

    return true;
}

// Returns true if the peer has not begun what our call waits for.
static bool idist__mpi_wait_is_unbegun(const idist__mpi *mpi, const idist__task *own, int peer) {
    const idist__mpi_peer *p = &mpi->peers[peer];

    if (own->call.kind == IDIST__RECV) return p->waiting.sent == p->received;
    if (own->call.kind == IDIST__SEND) return true;
    return p->absent_ctx == own->group->ctx && p->absent_seq == own->seq;
}

// Fails both groups if this rank and the peer wait for each other.
static void idist__mpi_wait_find_deadlock(idist__mpi *mpi, int peer) {
    const idist__mpi_control *waiting = &mpi->peers[peer].waiting;
    idist__task *own = idist__task_only_call(mpi->w);
    idist_group *peer_group = idist__world_find_group(mpi->w, waiting->ctx);
    char cause[400];
    bool same_group;
    int rank;

    if (!own || !own->late.announced) return;
    if (waiting->flags != (IDIST__WAITING_FOR_YOU | IDIST__WAITING_ONLY)) return;
    rank = idist__mpi_model_group(own->group)->rank_of[peer];
    if (rank < 0) return;
    same_group = own->group->ctx == waiting->ctx;
    if (same_group && own->seq == waiting->fingerprint.seq && own->seq) return;
    if (!idist__mpi_wait_needs(own, rank) || !idist__mpi_wait_is_unbegun(mpi, own, peer)) return;
    if (idist__mpi_wait_is_served(mpi, peer)) return;

    idist__explain_deadlock(own, peer, &waiting->fingerprint, same_group, cause, sizeof cause);
    idist__group_fail(own->group, IDIST_ERR_MISMATCH, cause);
    if (peer_group) idist__group_fail(peer_group, IDIST_ERR_MISMATCH, cause);
}

// Records the latest call that a rank is known to have entered.
static void idist__mpi_wait_seen(idist_group *g, int source,
                                 const idist__fingerprint *fingerprint) {
    idist__mpi_group *mg = idist__mpi_model_group(g);
    idist__fingerprint *last_seen = &mg->last_seen[mg->rank_of[source]];

    if ((int32_t)(fingerprint->seq - last_seen->seq) >= 0) *last_seen = *fingerprint;
}

// Handles WAITING. If the peer waits in a collective, answers whether we have entered the call too.
static void idist__mpi_wait_received(idist__mpi *mpi, int source,
                                     const idist__mpi_control *waiting) {
    idist_group *g = idist__world_find_group(mpi->w, waiting->ctx);
    idist__mpi_control answer = *waiting;

    mpi->peers[source].waiting = *waiting;
    mpi->peers[source].absent_ctx = UINT64_MAX; // an earlier ABSENT may be out of date

    if (!idist__kind_is_p2p((idist__kind)waiting->fingerprint.kind)) {
        answer.type = IDIST__CONTROL_ABSENT;
        if (g) idist__mpi_wait_seen(g, source, &waiting->fingerprint);

        if (g && (int32_t)(waiting->fingerprint.seq - g->seq) <= 0) {
            answer.type = IDIST__CONTROL_ENTERED;
            answer.fingerprint = idist__mpi_model_group(g)->entered;
        }

        idist__control_send(mpi, source, &answer, NULL, 0);
    }

    idist__mpi_wait_find_deadlock(mpi, source);
}

// Sends WAITING for t to one rank of its group.
static void idist__mpi_wait_send(const idist__task *t, int rank, int flags) {
    idist__mpi *mpi = idist__mpi_of(t->group->w);
    int peer = t->group->ranks[rank];
    idist__mpi_control waiting;

    memset(&waiting, 0, sizeof waiting);
    waiting.type = IDIST__CONTROL_WAITING;
    waiting.flags = (uint8_t)flags;
    waiting.ctx = t->group->ctx;
    waiting.fingerprint = idist__fingerprint_of_task(t, IDIST__ALGO_AUTO);
    waiting.id = idist__mpi_op_of(t)->send_id;
    waiting.sent = mpi->peers[peer].sent;
    waiting.received = mpi->peers[peer].received;
    idist__control_send(mpi, peer, &waiting, NULL, 0);
}

static void idist__mpi_wait_announce(idist__task *t) {
    idist_group *g = t->group;
    bool p2p = idist__kind_is_p2p(t->call.kind), only = idist__task_only_call(g->w) == t;
    int i, flags;

    if (t->late.asked || (!p2p && g->w->cfg.unchecked)) return;

    for (i = 0; i < g->size && t->state != IDIST__TASK_DONE; i++) {
        if (i == g->rank || (p2p && t->call.root != i)) continue;
        flags = only ? IDIST__WAITING_ONLY : 0;
        if (idist__mpi_wait_needs(t, i)) flags |= IDIST__WAITING_FOR_YOU;
        idist__mpi_wait_send(t, i, flags);
        if (t->state != IDIST__TASK_DONE)
            idist__mpi_wait_find_deadlock(idist__mpi_of(g->w), g->ranks[i]);
    }
}

static int idist__mpi_wait_missing(idist__task *t, char *text, size_t capacity) {
    const idist_group *g = t->group;
    const idist__fingerprint *last_seen = idist__mpi_model_group(g)->last_seen;
    int i, missing_count = 0;

    if (t->call.kind == IDIST__RECV && idist__mpi_op_of(t)->phase == IDIST__PHASE_TRANSFERRING)
        return 0;
    if (idist__kind_is_p2p(t->call.kind)) return idist__explain_missing_peer(t, text, capacity);

    for (i = 0; i < g->size; i++) {
        if (i == g->rank || !idist__mpi_wait_needs(t, i)) continue;
        if ((int32_t)(last_seen[i].seq - t->seq) >= 0) continue;
        idist__explain_missing_rank(g, i, &last_seen[i], missing_count, text, capacity);
        missing_count++;
    }

    if (missing_count > 8) idist__text_append(text, capacity, " and %d more", missing_count - 8);

    return missing_count;
}

// ---- mpi/mpi_engine.h ----------------------------------------------------------------------------

// mpi/mpi_engine.h: progress, sleep, cancellation, failure
//
// These are the functions that the core calls while a world is open. MPI offers no way to sleep
// until something happens. So a rank that has nothing to do polls. Between two polls the rank
// sleeps outside MPI, longer each time. A call by another thread wakes the rank through a futex.
//
// When a group fails on one rank, that rank sends FAILED to all other members. Under ULFM the rank
// also revokes the communicator, which releases ranks that are blocked in MPI.

// Handles one control message.
static void idist__mpi_engine_deliver(idist__mpi *mpi, int source, idist__mpi_control *control,
                                      const void *payload) {
    idist_group *g = idist__world_find_group(mpi->w, control->ctx);

    mpi->poll_ns = 0;

    switch (control->type) {
    case IDIST__CONTROL_EAGER:
    case IDIST__CONTROL_READY_TO_SEND:
        mpi->peers[source].received++;
        mpi->w->wait.moved_count++;
        if (g && g->status != IDIST_OK) break;
        if (!g || !idist__mpi_p2p_match(mpi, g, source, control, payload))
            idist__control_keep(mpi, source, control, payload);
        break;
    case IDIST__CONTROL_CLEAR_TO_SEND: idist__mpi_p2p_cleared(mpi, source, control); break;
    case IDIST__CONTROL_WAITING: idist__mpi_wait_received(mpi, source, control); break;
    case IDIST__CONTROL_ENTERED:
        if (g) idist__mpi_wait_seen(g, source, &control->fingerprint);
        break;
    case IDIST__CONTROL_ABSENT:
        mpi->peers[source].absent_ctx = control->ctx;
        mpi->peers[source].absent_seq = control->fingerprint.seq;
        idist__mpi_wait_find_deadlock(mpi, source);
        break;
    case IDIST__CONTROL_FREED:
        // the group may not exist here yet
        if (!idist__comms_leave(mpi, control->ctx))
            idist__control_keep(mpi, source, control, payload);
        break;
    case IDIST__CONTROL_FAILED:
        if (!g) { // the group does not exist yet, or no longer exists
            if (!idist__comms_keep(mpi, control->ctx))
                idist__control_keep(mpi, source, control, payload);
            break;
        }

        if ((int32_t)(control->sent - idist__mpi_model_group(g)->committed_seq) < 0)
            idist__mpi_model_group(g)->commit_refused = true;
        idist__group_fail(g, (idist_status)control->tag, (const char *)payload);
        break;
    default: break;
    }
}

static void idist__mpi_engine_progress(idist__world *w) {
    idist__mpi *mpi = idist__mpi_of(w);
    idist_group *g;
    idist__task *t;
    uint32_t ended;

    if (mpi->finalized) return;
    idist__control_progress(mpi);
    if (mpi->outgoing) idist__control_sweep(mpi);
    for (g = &w->group; g; g = g->next)
        if (g->rank >= 0) idist__mpi_coll_progress(mpi, g);

    // The list changes whenever a task ends; then start over.
    do {
        ended = w->wait.ended_count;

        for (t = w->tasks.running; t && ended == w->wait.ended_count; t = t->next) {
            idist__mpi_op *op = idist__mpi_op_of(t);
            bool running = op->phase == IDIST__PHASE_RUNNING;

            if (!running && op->phase != IDIST__PHASE_TRANSFERRING) continue;
            if (!idist__native_done(&op->native)) continue;
            if (running) idist__mpi_coll_done(mpi, t);
            else idist__mpi_p2p_done(mpi, t);
        }
    } while (ended != w->wait.ended_count);
}

// Records the calling thread, and whether several threads have called.
static void idist__mpi_engine_count_threads(idist__mpi *mpi) {
    idist__os_thread self = idist__os_thread_self();

    if (mpi->called && !idist__os_thread_equal(mpi->last_caller, self)) mpi->multithreaded = true;
    mpi->last_caller = self;
    mpi->called = true;
}

static void idist__mpi_engine_start(idist__task *t) {
    idist_group *g = t->group;
    idist__mpi *mpi = idist__mpi_of(g->w);
    idist__mpi_group *mg = idist__mpi_model_group(g);
    idist__mpi_op *op = idist__mpi_op_of(t);

    idist__mpi_engine_count_threads(mpi);
    memset(op, 0, sizeof *op);
    op->phase = IDIST__PHASE_WAITING;

    if (idist__kind_reduces(t->call.kind) && idist__reduce_op_is_user(t->call.op)) {
        op->user = *idist__world_user_op(g, &t->call);
        t->call.u.user = &op->user;
    }

    if (g->status != IDIST_OK)
        idist__task_complete(t, g->status, g->cause); // idist__mpi_coll_quick has failed the group
    else if (t->call.kind == IDIST__SEND) idist__mpi_p2p_send(mpi, t);
    else if (t->call.kind == IDIST__RECV) idist__mpi_p2p_receive(mpi, t);
    else if (g->size == 1) idist__self_collective(t);
    else {
        op->phase = IDIST__PHASE_QUEUED;
        if (mg->queue_head) idist__mpi_op_of(mg->queue_tail)->next = t;
        else mg->queue_head = t;
        mg->queue_tail = t;
        idist__mpi_coll_progress(mpi, g);
    }
}

// Returns true if MPI is moving the data of some task.
static bool idist__mpi_engine_has_data_in_flight(const idist__world *w) {
    const idist__task *t;

    for (t = w->tasks.running; t; t = t->next) {
        idist__mpi_phase phase = idist__mpi_op_of(t)->phase;
        if (phase == IDIST__PHASE_RUNNING || phase == IDIST__PHASE_TRANSFERRING) return true;
    }

    return false;
}

// Returns the next pause between polls, at most max_ns.
static int64_t idist__mpi_engine_next_pause(int64_t pause_ns, int64_t max_ns) {
    if (!pause_ns) pause_ns = IDIST__POLL_FIRST_NS;
    else if (pause_ns < IDIST__POLL_RAMP_NS) pause_ns *= 2;
    else pause_ns += pause_ns / 64;

    return pause_ns < max_ns ? pause_ns : max_ns;
}

static void idist__mpi_engine_sleep(idist__world *w, int64_t until_ns) {
    idist__mpi *mpi = idist__mpi_of(w);
    bool in_flight = idist__mpi_engine_has_data_in_flight(w);
    uint32_t wake_count = mpi->wake_count;
    int64_t wake_ns;

    // Keep polling, as a blocking call of MPI would: only our polling moves the data.
    if (in_flight && w->wait.driver == IDIST__DRIVER_CALLER) {
        idist__os_mutex_unlock(&w->lock);
        idist__os_thread_yield();
        idist__os_mutex_lock(&w->lock);
        return;
    }

    mpi->poll_ns = idist__mpi_engine_next_pause(mpi->poll_ns, in_flight || mpi->outgoing
                                                                  ? IDIST__POLL_TRANSFER_NS
                                                                  : IDIST__POLL_MAX_NS);
    wake_ns = idist__os_clock_now_ns() + mpi->poll_ns;
    idist__os_mutex_unlock(&w->lock);
    idist__os_wake_await_word(&mpi->wake_count, wake_count,
                              wake_ns < until_ns ? wake_ns : until_ns);
    idist__os_mutex_lock(&w->lock);
}

static void idist__mpi_engine_wake(idist__world *w) {
    __atomic_fetch_add(&idist__mpi_of(w)->wake_count, 1u, __ATOMIC_SEQ_CST);
    idist__os_wake_word(&idist__mpi_of(w)->wake_count);
}

// Cancels a send or receive. Returns true only for a receive that has matched no message; in all
// other cases the peer is involved.
static bool idist__mpi_engine_cancel_p2p(idist__task *t) {
    idist__mpi *mpi = idist__mpi_of(t->group->w);
    idist__mpi_op *op = idist__mpi_op_of(t);
    idist__task **at = &idist__mpi_model_group(t->group)->receives;
    bool receives = t->call.kind == IDIST__RECV;
    int i;

    while (*at && *at != t) at = &idist__mpi_op_of(*at)->next;
    if (*at) *at = op->next;

    // Replace the announced WAITING with a WAITING that has no flags.
    if (receives && t->late.announced && t->call.root >= 0)
        idist__mpi_wait_send(t, t->call.root, 0);
    if (op->phase == IDIST__PHASE_WAITING) return receives;

    if (receives) {
        for (i = 0; i < op->native.request_count; i++)
            if (op->native.requests[i] != MPI_REQUEST_NULL) MPI_Cancel(&op->native.requests[i]);
        mpi->retired_tags[op->data_tag / 8] |= (unsigned char)(1u << op->data_tag % 8);
    }

    idist__native_abandon(&op->native);
    op->phase = IDIST__PHASE_WAITING;

    return false;
}

// Cancels a receive that has matched no message. After a match the receive cannot be cancelled,
// because MPI may be writing to the buffer. Returns true if the receive was cancelled.
static bool idist__mpi_engine_retract(idist__task *t) {
    return idist__mpi_op_of(t)->phase == IDIST__PHASE_WAITING && idist__mpi_engine_cancel_p2p(t);
}

static bool idist__mpi_engine_cancel(idist__task *t) {
    idist_group *g = t->group;
    idist__mpi_group *mg = idist__mpi_model_group(g);
    idist__mpi_op *op = idist__mpi_op_of(t);
    idist__task **at = &mg->queue_head, *before = NULL;

    if (idist__kind_is_p2p(t->call.kind)) return idist__mpi_engine_cancel_p2p(t);
    if (op->native.group) idist__native_abandon(&op->native);

    while (*at && *at != t) {
        before = *at;
        at = &idist__mpi_op_of(before)->next;
    }

    if (*at) *at = op->next;
    if (mg->queue_tail == t) mg->queue_tail = before;
    op->phase = IDIST__PHASE_WAITING;

    return false;
}

static void idist__mpi_engine_tell(idist_group *g) {
    idist__mpi *mpi = idist__mpi_of(g->w);
    idist__mpi_group *mg = idist__mpi_model_group(g);
    idist__task *first = mg->queue_head;
    idist__mpi_control failed;
    int i;

    if (first && idist__mpi_op_of(first)->phase == IDIST__PHASE_COMMITTING)
        idist__mpi_coll_keep_commitment(mpi, first);
    idist__exchange_cancel(g);
    if (mg->failure_known) return;
    mg->failure_known = true;

    memset(&failed, 0, sizeof failed);
    failed.type = IDIST__CONTROL_FAILED;
    failed.ctx = g->ctx;
    failed.tag = (int32_t)g->status;
    failed.sent = mg->committed_seq;
    for (i = 0; i < g->size; i++)
        if (i != g->rank)
            idist__control_send(mpi, g->ranks[i], &failed, g->cause, strlen(g->cause) + 1);

#ifdef IDIST__ULFM
    // Revoke after the messages were queued. This releases ranks that are blocked in MPI.
    if (mpi->fault_tolerant && mg->comm != MPI_COMM_NULL) MPIX_Comm_revoke(mg->comm);
#endif
}

static void idist__mpi_engine_flush(idist__world *w, int64_t until_ns) {
    const idist__mpi *mpi = idist__mpi_of(w);

    while (mpi->outgoing && !mpi->finalized && idist__os_clock_now_ns() < until_ns) {
        idist__mpi_engine_progress(w);
        idist__os_mutex_unlock(&w->lock);
        idist__os_thread_yield();
        idist__os_mutex_lock(&w->lock);
    }
}

// ---- mpi/mpi_life.h ------------------------------------------------------------------------------

// mpi/mpi_life.h: finds out whether MPI started us, and initializes MPI
//
// MPI is initialized and finalized at most once in a process, so this state belongs to the process
// and not to a world.

static idist__os_mutex idist__mpi_lock = IDIST__OS_MUTEX_INIT;
static int idist__mpi_world_count;     // open worlds
static bool idist__mpi_initialized;    // by us
static int idist__mpi_thread_count;    // threads that MPI_Init_thread started
static bool idist__mpi_never_finalize; // MPI_Finalize would block, or was called

static MPI_Comm idist__mpi_life_base_comm(const idist__config *cfg) {
    return cfg->mpi_comm ? *(const MPI_Comm *)cfg->mpi_comm : MPI_COMM_WORLD;
}

static bool idist__mpi_life_is_one_of(const char *name, const char *const *names, size_t count) {
    size_t i;

    for (i = 0; i < count; i++)
        if (strcmp(name, names[i]) == 0) return true;
    return false;
}

// Returns true if the user asked for this backend by name.
static bool idist__mpi_life_is_asked(const idist__config *cfg) {
    const char *at = cfg->backends;

    for (; *at; at += strcspn(at, ","), at += *at == ',')
        if (idist__choose_backend_is(at, strcspn(at, ","), "mpi")) return true;
    return false;
}

// Returns true if the user asked for MPI, a launcher of MPI started us, or the program uses MPI
// itself. The last does not count if the rank and size come from elsewhere, for example from the
// user or torchrun: then they belong to another world.
static bool idist__mpi_life_is_meant(const idist__config *cfg, bool initialized) {
    static const char *const mpi_launchers[] = {"openmpi", "mvapich2", "hydra", "jsrun", "pals"};
    // These have started MPI programs only if there are PMI variables.
    static const char *const pmi_launchers[] = {"slurm", "flux", "none"};
    bool pmi = idist__os_env("PMI_RANK") || idist__os_env("PMIX_RANK") || idist__os_env("PMI_PORT");

    if (idist__mpi_life_is_asked(cfg) || cfg->mpi_comm) return true;
    if (idist__mpi_life_is_one_of(cfg->launcher, mpi_launchers, IDIST__COUNT_OF(mpi_launchers)))
        return true;
    if (pmi &&
        idist__mpi_life_is_one_of(cfg->launcher, pmi_launchers, IDIST__COUNT_OF(pmi_launchers)))
        return true;

    return initialized && strcmp(cfg->launcher, "none") == 0;
}

static idist_status idist__mpi_life_sizes_differ(const idist__config *cfg, int rank, int size) {
    char library[MPI_MAX_LIBRARY_VERSION_STRING + 1] = "";
    int length = 0;

    MPI_Get_library_version(library, &length);
    library[strcspn(library, "\n,")] = 0;

    return idist__fail(
        IDIST_ERR_ENV,
        "initialize: the launcher (%s%s%s) says rank %d of %d, but the MPI that this "
        "program is linked with (%s) says rank %d of %d; start it with the mpirun "
        "or mpiexec of that MPI, or set IDIST_BACKEND=ring",
        cfg->launcher, cfg->rank_var ? " by " : "", cfg->rank_var ? cfg->rank_var : "", cfg->rank,
        cfg->world_size, library, rank, size);
}

static idist_status idist__mpi_life_initialize(void) {
    int level, error;

    idist__mpi_thread_count = -idist__os_thread_count();
    error = MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level);
    if (error != MPI_SUCCESS) return idist__mpi_error_fail("initialize: MPI_Init_thread", error);
    idist__mpi_thread_count += idist__os_thread_count();
    idist__mpi_initialized = true;

    return IDIST_OK;
}

// Rejects MPI_COMM_NULL and intercommunicators, for which MPI itself would end the job, or fail
// later without a reason.
static idist_status idist__mpi_life_check_comm(MPI_Comm comm) {
    int inter = 0;

    if (comm == MPI_COMM_NULL)
        return idist__fail(IDIST_ERR_ARG,
                           "initialize: *desc.mpi_comm is MPI_COMM_NULL: this process is not in "
                           "the communicator, so it must not join the world");

    MPI_Comm_test_inter(comm, &inter);
    if (!inter) return IDIST_OK;
    return idist__fail(
        IDIST_ERR_ARG,
        "initialize: *desc.mpi_comm is an intercommunicator; merge its two groups with "
        "MPI_Intercomm_merge");
}

static idist_status idist__mpi_life_claim(idist__config *cfg, const char **why) {
    int initialized = 0, finalized = 0, rank, size;
    bool explicit_rank = strcmp(cfg->launcher, "explicit") == 0, size_known;
    idist_status status;

    MPI_Initialized(&initialized);
    MPI_Finalized(&finalized);
    *why = "no launcher of MPI started this process";
    if (!idist__mpi_life_is_meant(cfg, initialized && !finalized)) return IDIST_ERR_NO_BACKEND;
    if (finalized)
        return idist__fail(IDIST_ERR_STATE,
                           "initialize: MPI was finalized in this process and cannot be "
                           "initialized again; to open several worlds one after the other, "
                           "initialize MPI yourself");

    if (!initialized) {
        status = idist__mpi_life_initialize();
        if (status != IDIST_OK) return status;
    }

    status = idist__mpi_life_check_comm(idist__mpi_life_base_comm(cfg));
    if (status != IDIST_OK) return status;
    MPI_Comm_rank(idist__mpi_life_base_comm(cfg), &rank);
    MPI_Comm_size(idist__mpi_life_base_comm(cfg), &size);

    if (strcmp(cfg->launcher, "none") == 0) {
        cfg->launcher = "mpi";
    } else {
        size_known = explicit_rank || !cfg->mpi_comm;
        if (size_known && (size != cfg->world_size || (explicit_rank && rank != cfg->rank)))
            return idist__mpi_life_sizes_differ(cfg, rank, size);
    }

    cfg->rank = rank;
    cfg->world_size = size;

    return IDIST_OK;
}

// ---- mpi/mpi_world.h -----------------------------------------------------------------------------

// mpi/mpi_world.h: opening and closing a world
//
// Opening duplicates the communicator twice, exchanges hosts and settings, and finds out which
// ranks share a host. Only the first step has a deadline: after it, all ranks are known to be here.
//
// Closing waits for control messages in flight and frees what MPI still lets us free. After the
// last world it finalizes MPI if idist initialized MPI.

// Exchanges the table of ranks, and checks that settings are equal where they must be.
static idist_status idist__mpi_world_exchange_ranks(idist__mpi *mpi) {
    const idist__config *cfg = &mpi->w->cfg;
    idist__rank_info *nodes = mpi->w->nodes, *own = &nodes[cfg->rank];
    int64_t nbytes = cfg->shm_asked ? (int64_t)cfg->shm_nbytes : 0, check = !cfg->unchecked;
    int64_t settings[4] = {nbytes, -nbytes, check, -check}, max[4]; // max(-x) is -min(x)
    bool same_nbytes, same_check;
    int error;

    idist__text_copy(own->hostname, sizeof own->hostname, mpi->w->about.hostname);
    own->host = idist__config_host_key(cfg);
    error = MPI_Allgather(MPI_IN_PLACE, 0, MPI_BYTE, nodes, sizeof *nodes, MPI_BYTE, mpi->p2p_comm);
    if (error == MPI_SUCCESS)
        error = MPI_Allreduce(settings, max, 4, MPI_INT64_T, MPI_MAX, mpi->p2p_comm);
    if (error != MPI_SUCCESS) return idist__mpi_error_fail("MPI_Allgather", error);

    same_nbytes = max[0] == -max[1];
    same_check = max[2] == -max[3];
    if (same_nbytes && same_check) return IDIST_OK;

    return idist__fail(IDIST_ERR_ENV,
                       "initialize: %s differs between ranks; set the same value on all ranks",
                       same_nbytes ? "IDIST_CHECK" : "IDIST_SHM_MIB (desc.shm_nbytes)");
}

// Counts the cores that the ranks of this host may use together, and makes the window for
// idist_alloc.
static idist_status idist__mpi_world_share_host(idist__mpi *mpi) {
    idist__world *w = mpi->w;
    idist__os_cpu_set own, together;
    MPI_Comm host;
    void *base = NULL;
    int error, size = 1;

    error = MPI_Comm_split_type(mpi->p2p_comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
    if (error != MPI_SUCCESS) return idist__mpi_error_fail("MPI_Comm_split_type", error);
    MPI_Comm_set_errhandler(host, MPI_ERRORS_RETURN);
    MPI_Comm_size(host, &size);
    idist__os_cpu_usable(&own);
    error = MPI_Allreduce(&own, &together, (int)sizeof own, MPI_UINT8_T, MPI_BOR, host);
    if (error == MPI_SUCCESS) w->machine.ncores = idist__os_cpu_set_count(&together);

    if (error == MPI_SUCCESS && size > 1 && w->cfg.shm_asked) {
        if (MPI_Win_allocate_shared((MPI_Aint)w->cfg.shm_nbytes, 1, MPI_INFO_NULL, host, &base,
                                    &mpi->win) != MPI_SUCCESS)
            mpi->win = MPI_WIN_NULL;
        if (mpi->win != MPI_WIN_NULL)
            mpi->window = idist__window_adopt((char *)base, w->cfg.shm_nbytes);
    }

    MPI_Comm_free(&host);

    return error == MPI_SUCCESS ? IDIST_OK : idist__mpi_error_fail("MPI_Allreduce", error);
}

static idist_status idist__mpi_world_allocate(idist__mpi *mpi) {
    const idist_allocator *mem = &mpi->w->cfg.mem;
    size_t size = (size_t)mpi->w->group.size, i;

    mpi->peers = (idist__mpi_peer *)idist__mem_alloc(mem, sizeof *mpi->peers * size);
    mpi->sent_counts = (uint32_t *)idist__mem_alloc(mem, sizeof(uint32_t) * size);
    if (!mpi->peers || !mpi->sent_counts) return IDIST_ERR_NO_MEMORY;

    for (i = 1; i < size; i++) {
        idist__mpi_outgoing *o =
            (idist__mpi_outgoing *)idist__mem_alloc(mem, sizeof *o + IDIST__CONTROL_MAX_NBYTES);
        if (!o) return IDIST_ERR_NO_MEMORY;
        o->next = mpi->reserve;
        mpi->reserve = o;
    }

    return IDIST_OK;
}

// Makes both communicators. Once the first one exists, all ranks are here, so the second one needs
// no deadline.
static idist_status idist__mpi_world_duplicate(idist__mpi *mpi) {
    const idist__config *cfg = &mpi->w->cfg;
    MPI_Request request;
    idist_status status;
    int error = MPI_Comm_idup(idist__mpi_life_base_comm(cfg), &mpi->p2p_comm, &request);

    if (error != MPI_SUCCESS) return idist__mpi_error_fail("initialize: MPI_Comm_idup", error);
    status = idist__mpi_error_await(&request, cfg->init_timeout_ms, "initialize");
    if (status != IDIST_OK) return status;

    MPI_Comm_set_errhandler(mpi->p2p_comm, MPI_ERRORS_RETURN);
    error = MPI_Comm_dup(mpi->p2p_comm, &mpi->world_comm);
    if (error != MPI_SUCCESS) return idist__mpi_error_fail("initialize: MPI_Comm_dup", error);

#ifdef IDIST__ULFM
    mpi->fault_tolerant =
        idist__os_env("OMPI_MCA_mpi_ft_enable") != NULL; // mpirun --with-ft ulfm sets it
#endif

    return IDIST_OK;
}

static idist_status idist__mpi_world_make_ops(idist__mpi *mpi) {
    static MPI_User_function *const functions[4] = {idist__mpi_type_sum, idist__mpi_type_prod,
                                                    idist__mpi_type_min, idist__mpi_type_max};
    int error, i;

    if (idist__mpi_keyval == MPI_KEYVAL_INVALID)
        MPI_Type_create_keyval(MPI_TYPE_NULL_COPY_FN, MPI_TYPE_NULL_DELETE_FN, &idist__mpi_keyval,
                               NULL);

    for (i = 0; i < 4; i++) {
        error = MPI_Op_create(functions[i], 1, &mpi->ops[i]);
        if (error != MPI_SUCCESS) return idist__mpi_error_fail("MPI_Op_create", error);
    }

    return IDIST_OK;
}

static idist_status idist__mpi_world_make(idist__mpi *mpi) {
    idist__world *w = mpi->w;
    int level = MPI_THREAD_SINGLE;
    bool one_thread;
    idist_status status = idist__mpi_world_allocate(mpi);

    if (status != IDIST_OK) return status;
    MPI_Query_thread(&level);
    one_thread = level < MPI_THREAD_SERIALIZED;
    w->machine.one_thread_calls = one_thread;
    w->machine.foreign_thread_count = idist__mpi_thread_count;
    w->machine.single_threaded =
        one_thread || (idist__mpi_world_count && level < MPI_THREAD_MULTIPLE);

    status = idist__mpi_world_duplicate(mpi);
    if (status == IDIST_OK) status = idist__mpi_world_exchange_ranks(mpi);
    if (status == IDIST_OK) status = idist__mpi_world_share_host(mpi);
    if (status == IDIST_OK) status = idist__mpi_world_make_ops(mpi);
    if (status == IDIST_OK) idist__control_post_receive(mpi);

    return status;
}

static void idist__mpi_world_free(idist__mpi *mpi) {
    const idist_allocator *mem = &mpi->w->cfg.mem;

    idist__mem_free_list(mem, mpi->unexpected);
    idist__mem_free_list(mem, mpi->comms);
    idist__mem_free_list(mem, mpi->free_outgoing);
    idist__mem_free_list(mem, mpi->reserve);
    idist__mem_free(mem, mpi->peers);
    idist__mem_free(mem, mpi->sent_counts);
    idist__mem_free(mem, mpi);
}

static void idist__mpi_world_stop_receiving(idist__mpi *mpi) {
    if (mpi->incoming == MPI_REQUEST_NULL) return;
    MPI_Cancel(&mpi->incoming);
    MPI_Wait(&mpi->incoming, MPI_STATUS_IGNORE);
}

static void idist__mpi_world_close_window(idist__mpi *mpi) {
    if (mpi->window) idist__window_close(mpi->window);
    mpi->window = NULL;
}

// Fails the world because the program calls MPI_Finalize while the world is open. MPI_Finalize
// first deletes our attribute of MPI_COMM_SELF, and the deletion calls this function. The world
// fails here and on the other ranks, and never uses MPI again. Closing the world also calls this
// function, which then does nothing.
static int idist__mpi_world_finalizes(MPI_Comm comm, int keyval, void *value, void *unused) {
    idist__mpi *mpi = (idist__mpi *)value;
    idist__world *w = mpi->w;
    idist_group *g;

    (void)comm;
    (void)keyval;
    (void)unused;
    if (w->group.rank < 0) return MPI_SUCCESS; // the world is closing: see idist__mpi_world_close

    idist__os_mutex_lock(&w->lock);
    idist__group_fail_self(&w->group, IDIST_ERR_STATE,
                           "called MPI_Finalize before idist_finalize (or idist_close)");
    for (g = w->group.next; g; g = g->next)
        if (g->rank >= 0) idist__group_fail(g, w->group.status, w->group.cause);
    idist__mpi_engine_flush(w, idist__os_clock_deadline(IDIST__FLUSH_MS));
    idist__mpi_world_stop_receiving(mpi);
    idist__mpi_world_close_window(mpi);
    mpi->fault_tolerant = false;
    mpi->finalized = true;
    idist__os_mutex_unlock(&w->lock);

    return MPI_SUCCESS;
}

// Adds the attribute that detects MPI_Finalize. If MPI cannot create the attribute, the call goes
// undetected.
static void idist__mpi_world_watch_finalize(idist__mpi *mpi) {
    int keyval;

    mpi->self_keyval = MPI_KEYVAL_INVALID;
    if (MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, idist__mpi_world_finalizes, &keyval, NULL) !=
        MPI_SUCCESS)
        return;
    if (MPI_Comm_set_attr(MPI_COMM_SELF, keyval, mpi) == MPI_SUCCESS) mpi->self_keyval = keyval;
    else MPI_Comm_free_keyval(&keyval);
}

static idist_status idist__mpi_world_open(idist__world *w) {
    idist__mpi *mpi = (idist__mpi *)idist__mem_alloc(&w->cfg.mem, sizeof *mpi);
    idist_status status;

    w->impl = mpi;
    if (!mpi) return IDIST_ERR_NO_MEMORY;
    mpi->w = w;
    mpi->receive = idist__control_progress;
    mpi->deliver = idist__mpi_engine_deliver;
    mpi->shrunk_comm = MPI_COMM_NULL;
    mpi->win = MPI_WIN_NULL;
    mpi->incoming = MPI_REQUEST_NULL;
    status = idist__mpi_world_make(mpi);

    // IDIST_ERR_ENV means that settings differ: all ranks are here, so the communicators can be
    // freed. After IDIST_ERR_TIMEOUT MPI still has the address of mpi->p2p_comm, so mpi stays.
    if (status != IDIST_OK) {
        if (status == IDIST_ERR_ENV) MPI_Comm_free(&mpi->world_comm);
        if (status == IDIST_ERR_ENV) MPI_Comm_free(&mpi->p2p_comm);
        if (status != IDIST_ERR_TIMEOUT) idist__mpi_world_free(mpi);
        return status;
    }

    idist__mpi_world_watch_finalize(mpi);
    idist__os_mutex_lock(&idist__mpi_lock);
    idist__mpi_world_count++;
    idist__os_mutex_unlock(&idist__mpi_lock);

    return IDIST_OK;
}

// Returns true if, after a failure, all other ranks also close the world within a second. Otherwise
// MPI_Finalize would block forever. Returns false under ULFM, because MPI_Finalize of Open MPI 5
// may block after a loss in any case.
static bool idist__mpi_world_all_close(idist__mpi *mpi) {
    MPI_Request request;

    if (mpi->fault_tolerant || mpi->abandoned || mpi->finalized) return false;
    if (MPI_Ibarrier(mpi->p2p_comm, &request) != MPI_SUCCESS) return false;
    return idist__mpi_error_await(&request, IDIST__CLOSE_MS, "finalize") == IDIST_OK;
}

// Counts a world as closed. After the last one, finalizes MPI if idist initialized MPI and can
// finalize it.
static void idist__mpi_world_release(idist__world *w, bool all_closed) {
    idist__os_mutex_lock(&idist__mpi_lock);

    if (!all_closed && idist__mpi_initialized && !idist__mpi_of(w)->finalized &&
        !idist__mpi_never_finalize) {
        idist__mpi_never_finalize = true;
        idist__log_print(&w->log, IDIST_LOG_WARN,
                         "finalize: not all ranks closed the world, so MPI is not finalized; the "
                         "launcher ends the job when this process exits");
    }

    if (idist__mpi_of(w)->finalized) idist__mpi_never_finalize = true; // the program has done it
    idist__mpi_world_count--;
    if (idist__mpi_world_count == 0 && idist__mpi_initialized && !idist__mpi_never_finalize)
        MPI_Finalize();
    idist__os_mutex_unlock(&idist__mpi_lock);
}

// Frees the MPI objects that MPI still lets us free.
static void idist__mpi_world_free_handles(idist__mpi *mpi, bool clean) {
    int i;

    idist__mpi_world_stop_receiving(mpi);

    if (clean) {
        if (mpi->win != MPI_WIN_NULL) MPI_Win_free(&mpi->win);
        MPI_Comm_free(&mpi->world_comm);
        MPI_Comm_free(&mpi->p2p_comm);
    }

    for (i = 0; i < 4; i++) MPI_Op_free(&mpi->ops[i]);
    if (mpi->self_keyval == MPI_KEYVAL_INVALID) return;
    MPI_Comm_delete_attr(MPI_COMM_SELF, mpi->self_keyval);
    MPI_Comm_free_keyval(&mpi->self_keyval);
}

static void idist__mpi_world_close(idist__world *w, bool clean) {
    idist__mpi *mpi = idist__mpi_of(w);
    char text[sizeof idist__me.text];
    bool all_closed;

    memcpy(text, idist__me.text, sizeof text); // closing must not change the last error
    idist__os_mutex_lock(&w->lock);
    w->group.rank = -1; // messages that still arrive find no group
    idist__mpi_engine_flush(w, idist__os_clock_deadline(IDIST__FLUSH_MS));
    if (clean) idist__control_drain(mpi);
    all_closed = (clean && !mpi->abandoned) || idist__mpi_world_all_close(mpi);

    idist__mpi_world_close_window(mpi);
    if (!mpi->finalized) idist__mpi_world_free_handles(mpi, clean);
    idist__os_mutex_unlock(&w->lock);
    idist__mpi_world_release(w, all_closed);
    idist__mpi_world_free(mpi);
    memcpy(idist__me.text, text, sizeof text);
}

static void *idist__mpi_world_alloc(idist__world *w, size_t nbytes) {
    idist__window *window = idist__mpi_of(w)->window;
    return window ? idist__window_alloc(window, nbytes) : NULL;
}

// ---- mpi/mpi_group.h -----------------------------------------------------------------------------

// mpi/mpi_group.h: opens and closes groups; shrink and agree

// Finds or makes the communicator of a group. The communicators of the world and of a shrunk group
// exist already; any other is made by its members alone. ULFM cannot make a communicator from one
// that contains a lost rank. So under ULFM the new communicator is made from the parent's, which
// has no lost rank unless the parent has failed. Without ULFM it is made from a communicator of all
// ranks, because MPICH 4.0 may crash in MPI_Comm_create_group on any other.
static int idist__mpi_group_comm(idist__mpi *mpi, const idist_group *g, MPI_Comm *comm) {
    MPI_Comm from;
    MPI_Group all, members;
    int error;

    if (mpi->shrunk_comm != MPI_COMM_NULL && mpi->shrunk_ctx == g->ctx) {
        *comm = mpi->shrunk_comm;
        mpi->shrunk_comm = MPI_COMM_NULL;
        return MPI_SUCCESS;
    }

    if (g == &mpi->w->group) {
        *comm = mpi->world_comm;
        return MPI_SUCCESS;
    }

    MPI_Comm_group(mpi->p2p_comm, &all);
    MPI_Group_incl(all, g->size, g->ranks, &members);
    from = mpi->fault_tolerant ? idist__mpi_model_group(g->parent)->comm : mpi->p2p_comm;
    error = MPI_Comm_create_group(from, members, (int)(g->ctx % IDIST__TAG_RANGE), comm);
    MPI_Group_free(&members);
    MPI_Group_free(&all);

    return error;
}

static void idist__mpi_group_free(idist_group *g) {
    idist__mpi_group *mg = idist__mpi_model_group(g);

    idist__mem_free(&g->w->cfg.mem, mg->rank_of);
    idist__mem_free(&g->w->cfg.mem, mg->last_seen);
    idist__mem_free(&g->w->cfg.mem, mg->headers);
}

// Reports that MPI could not make the communicator of a group. If a rank was lost, first fails the
// parent with a cause that names the rank.
static idist_status idist__mpi_group_comm_fail(idist__mpi *mpi, const idist_group *g, int error) {
    idist_group *parent = idist__world_find_group(mpi->w, g->parent->ctx);

    if (!parent || !idist__mpi_error_is_loss(error))
        return idist__mpi_error_fail("MPI_Comm_create_group", error);
    idist__mpi_error_fail_group(mpi, parent, "MPI_Comm_create_group", error);

    return idist__fail(parent->status, "%s", parent->cause);
}

static idist_status idist__mpi_group_open(idist_group *g) {
    idist__mpi *mpi = idist__mpi_of(g->w);
    idist__mpi_group *mg = idist__mpi_model_group(g);
    const idist_allocator *mem = &g->w->cfg.mem;
    size_t world_size = (size_t)g->w->group.size, size = (size_t)g->size;
    const idist__mpi_unexpected *u;
    idist__mpi_comm *c;
    int i, error;

    mg->comm = MPI_COMM_NULL;
    mg->requests[0] = mg->requests[1] = MPI_REQUEST_NULL;
    if (mpi->comms)
        idist__control_progress(mpi); // FREED may free communicators; MPI has few of them

    // Do this first: the other members are in this collective call whatever happens here.
    error = idist__mpi_group_comm(mpi, g, &mg->comm);
    if (error != MPI_SUCCESS) return idist__mpi_group_comm_fail(mpi, g, error);
    mg->rank_of = (int *)idist__mem_alloc(mem, sizeof(int) * world_size);
    mg->last_seen = (idist__fingerprint *)idist__mem_alloc(mem, sizeof *mg->last_seen * size);
    mg->headers = (idist__mpi_header *)idist__mem_alloc(mem, sizeof *mg->headers * size);
    c = (idist__mpi_comm *)idist__mem_alloc(mem, sizeof *c);

    if (!mg->rank_of || !mg->last_seen || !mg->headers || !c) {
        idist__group_fail_memory(g);
        idist__mpi_group_free(g);
        idist__mem_free(mem, c);
        return IDIST_ERR_NO_MEMORY;
    }

    c->comm = mg->comm;
    c->ctx = g->ctx;
    c->user_count = g->size;
    c->failed = false;
    c->next = mpi->comms;
    mpi->comms = c;

    MPI_Comm_set_errhandler(mg->comm, MPI_ERRORS_RETURN);
    memset(mg->rank_of, -1, sizeof(int) * world_size);
    for (i = 0; i < g->size; i++) mg->rank_of[g->ranks[i]] = i;

    // Handle the messages that arrived before the group existed here.
    for (u = mpi->unexpected; u; u = u->next) {
        if (u->control.ctx != g->ctx) continue;
        if (u->control.type == IDIST__CONTROL_FREED) idist__comms_leave(mpi, g->ctx);
        if (u->control.type == IDIST__CONTROL_FAILED)
            idist__group_fail(g, (idist_status)u->control.tag, (const char *)(u + 1));
    }

    for (i = 0; i < g->size; i++)
        if (mpi->peers[g->ranks[i]].lost)
            idist__group_lose_rank(mpi->w, g->ranks[i], "its process ended");

    return IDIST_OK;
}

static void idist__mpi_group_close(idist_group *g) {
    idist__mpi *mpi = idist__mpi_of(g->w);
    idist__mpi_unexpected **at = &mpi->unexpected;
    char cause[200];

    snprintf(cause, sizeof cause, "rank %d on %s left without idist_finalize", g->w->cfg.rank,
             g->w->about.hostname);
    if (g->w->life.leaves && g->w->group.status != IDIST_OK)
        idist__group_fail(g, g->w->group.status, g->w->group.cause);
    if (g->w->life.leaves) idist__group_fail(g, IDIST_ERR_PEER_LOST, cause);
    if (!mpi->finalized) idist__exchange_cancel(g);

    while (*at) {
        idist__mpi_unexpected *u = *at;

        if (u->control.ctx != g->ctx) {
            at = &u->next;
            continue;
        }

        *at = u->next;
        idist__mem_free(&g->w->cfg.mem, u);
    }

    // No FREED is needed in a failed world without fault tolerance: it ends soon, and its
    // communicators with it.
    if (g->status == IDIST_OK && g != &mpi->w->group &&
        (mpi->w->group.status == IDIST_OK || mpi->fault_tolerant)) {
        idist__comms_tell_freed(mpi, g);
        idist__comms_leave(mpi, g->ctx);
    } else {
        idist__comms_keep(mpi, g->ctx);
    }

    idist__mpi_group_free(g);
}

#ifdef IDIST__ULFM
// Makes the communicator of the survivors, agrees with them on *serial, and keeps the communicator
// for the group_open that follows.
static idist_status idist__mpi_group_shrink(idist_group *g, int *ranks, int *count,
                                            uint32_t *serial) {
    idist__mpi *mpi = idist__mpi_of(g->w);
    MPI_Comm from = idist__mpi_model_group(g)->comm, to = MPI_COMM_NULL;
    MPI_Group all, members;
    int error, attempt, i;

    if (!mpi->fault_tolerant) return idist__new_group_needs_ulfm("shrink");
    MPIX_Comm_revoke(from);
    error = MPIX_Comm_shrink(from, &to);

    for (attempt = 0; attempt < g->size && error == MPI_SUCCESS; attempt++) {
        uint32_t own = *serial;
        MPI_Comm again = MPI_COMM_NULL;
        int agreed;

        MPI_Comm_set_errhandler(to, MPI_ERRORS_RETURN);
        agreed = MPI_Allreduce(&own, serial, 1, MPI_UINT32_T, MPI_MAX, to) == MPI_SUCCESS;
        MPIX_Comm_agree(to, &agreed);
        if (agreed) break;

        // Another rank was lost meanwhile.
        *serial = own;
        error = MPIX_Comm_shrink(to, &again);
        MPI_Comm_free(&to);
        to = again;
    }

    if (error != MPI_SUCCESS) return idist__mpi_error_fail("shrink: MPIX_Comm_shrink", error);
    MPI_Comm_group(mpi->p2p_comm, &all);
    MPI_Comm_group(to, &members);
    MPI_Group_size(members, count);
    for (i = 0; i < *count; i++) MPI_Group_translate_ranks(members, 1, &i, all, &ranks[i]);
    MPI_Group_free(&members);
    MPI_Group_free(&all);
    mpi->shrunk_comm = to;
    mpi->shrunk_ctx = idist__new_group_ctx(g, *serial, 0);

    return IDIST_OK;
}

static idist_status idist__mpi_group_agree(idist_group *g, int *flag) {
    MPI_Comm comm = idist__mpi_model_group(g)->comm;
    int error;

    if (!idist__mpi_of(g->w)->fault_tolerant) return idist__new_group_needs_ulfm("agree");
    MPIX_Comm_failure_ack(comm);
    error = MPIX_Comm_agree(comm, flag);
    if (error == MPI_SUCCESS || idist__mpi_error_is_loss(error)) return IDIST_OK;

    return idist__mpi_error_fail("agree: MPIX_Comm_agree", error);
}
#endif

// ---- mpi/mpi_backend.h ---------------------------------------------------------------------------

// mpi/mpi_backend.h: the table of functions that the core calls

// Runs idist__mpi_coll_quick in the default floating-point mode, because MPI reduces in the mode of
// the calling thread.
static bool idist__mpi_backend_quick_in_mode(idist_group *g, const idist__call *call) {
    uint32_t mode = idist__mode_enter();
    bool done = idist__mpi_coll_quick(g, call);

    idist__mode_leave(mode);
    return done;
}

static void idist__mpi_backend_start_in_mode(idist__task *t) {
    uint32_t mode = idist__mode_enter();

    idist__mpi_engine_start(t);
    idist__mode_leave(mode);
}

static void idist__mpi_backend_progress_in_mode(idist__world *w) {
    uint32_t mode = idist__mode_enter();

    idist__mpi_engine_progress(w);
    idist__mode_leave(mode);
}

static void idist__mpi_backend_fill(idist_backend_api *api) {
    api->name = "mpi";
    api->task_nbytes = sizeof(idist__mpi_op);
    api->group_nbytes = sizeof(idist__mpi_group);

    api->claim = idist__mpi_life_claim;
    api->open = idist__mpi_world_open;
    api->close = idist__mpi_world_close;

    api->group_open = idist__mpi_group_open;
    api->group_close = idist__mpi_group_close;

    api->quick = idist__mpi_backend_quick_in_mode;
    api->start = idist__mpi_backend_start_in_mode;
    api->progress = idist__mpi_backend_progress_in_mode;
    api->sleep = idist__mpi_engine_sleep;
    api->wake = idist__mpi_engine_wake;
    api->cancel = idist__mpi_engine_cancel;
    api->retract = idist__mpi_engine_retract;

    api->tell = idist__mpi_engine_tell;
    api->flush = idist__mpi_engine_flush;
    api->announce = idist__mpi_wait_announce;
    api->missing = idist__mpi_wait_missing;

    api->alloc = idist__mpi_world_alloc;
#ifdef IDIST__ULFM
    api->shrink = idist__mpi_group_shrink;
    api->agree = idist__mpi_group_agree;
#endif
}

const idist_backend_api *idist_mpi_backend(void) {
    static idist_backend_api api;
    return idist__backend_fill(&api, idist__mpi_backend_fill);
}

__attribute__((constructor(IDIST__REGISTER_SPECIAL))) static void
idist__mpi_backend_register(void) {
    (void)idist_register_backend(idist_mpi_backend());
}

// ---- base/end.h ----------------------------------------------------------------------------------

// base/end.h: undoes the settings of base/begin.h
//
// In a drop-in, tools/drop_ins.py adds an #undef for each macro of the implementation here, so that
// no macro reaches the program. Has no include guard, because each drop-in includes this file.

#ifdef IDIST__FAST_MATH
#if defined(__clang__)
#pragma float_control(pop)
#elif defined(__GNUC__)
#pragma GCC pop_options
#pragma pop_macro("__NO_MATH_ERRNO__")
#pragma pop_macro("__NO_TRAPPING_MATH__")
#pragma pop_macro("__NO_SIGNED_ZEROS__")
#pragma pop_macro("__RECIPROCAL_MATH__")
#pragma pop_macro("__ASSOCIATIVE_MATH__")
#pragma pop_macro("__FINITE_MATH_ONLY__")
#pragma pop_macro("__FAST_MATH__")
#endif
#undef IDIST__FAST_MATH
#endif

#pragma pop_macro("max")
#pragma pop_macro("min")
#pragma pop_macro("lock")
#pragma pop_macro("small")
#if defined(__SANITIZE_THREAD__) && !defined(__clang__) && __GNUC__ >= 11
#pragma GCC diagnostic pop
#endif
#if defined(__cplusplus) && defined(__GNUC__)
#pragma GCC diagnostic pop
#endif

#undef IDIST__CALLBACK
#undef IDIST__CATCH_EXIT
#undef IDIST__COUNT_OF
#undef IDIST__INLINE
#undef IDIST__MPI_COUNT
#undef IDIST__MPI_OP
#undef IDIST__NATIVE
#undef IDIST__NATIVE_REQUEST
#undef IDIST__NOINLINE
#undef IDIST__NO_ALIAS
#undef IDIST__OS_MUTEX_INIT
#undef IDIST__PRINTF
#undef IDIST__TLS
#undef IDIST__TRY
#undef IDIST__ULFM
#undef IDIST__UNUSED
#undef IDIST__UNWIND_END
#undef IDIST__VECTORIZE

#endif // IDIST_IMPLEMENTATION
