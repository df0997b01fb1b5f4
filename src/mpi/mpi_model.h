// mpi/mpi_model.h: worlds, groups, tasks, and the messages between ranks
//
// A world has two communicators of its own: one for all traffic between two ranks, one for the
// collectives of its world group. Every other group has one communicator, which is freed when all
// members have freed the group. A group keeps its collectives in a queue; only the first of them
// exchanges headers. A task records its phase and, once MPI has the operation, its MPI requests.
#pragma once

#include "os/thread.h"
#include "base/window.h"
#include "core/model.h"

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
