// ring/msg/ring_model.h: frames, links, messages and transfers as data; the failure of a group
#pragma once

#include "os/clock.h"
#include "os/poll.h"
#include "base/text.h"
#include "launch/config.h"
#include "core/model.h"
#include "core/group.h"
#include "ring/shm/transport.h"

//------------------------------------------------------------------------------
// frames, transfers, messages, links, the backend's part of world and group
//------------------------------------------------------------------------------

// A frame has 64 bytes. The handshake checks that both ends have the same byte order. `nbytes` of
// payload may follow.
//
//   type    meaning                       payload    fields besides ctx
//   EAGER   a whole message               message    fingerprint, tag, nbytes, past; id and aux:
//                                                    the previous call (idist__history_tell_past)
//   RTS     a message is ready            -          fingerprint, tag, past, id (the sender's
//                                                    number for the message), nbytes (its size),
//                                                    aux (its address), flags (low bits of the
//                                                    number of sends that the rank has withdrawn)
//   CTS     clear to send                 -          id (as in RTS), aux (the receiver's number);
//                                                    granted: id is 0; fingerprint, tag
//   DATA    a piece of the message        piece      id (the receiver's number), nbytes, aux (size
//                                                    of the message), fingerprint, tag, past
//   PULLED  I have read the message       -          id (as in RTS)
//   CREDIT  eager bytes were consumed     -          nbytes (how many)
//   WAITS   I am waiting in a call        -          fingerprint, flags, tag (the last collective
//                                                    of the group that I have entered), aux (number
//                                                    of your send / recv messages received so far),
//                                                    id (of the RTS, if I wait in a send)
//   HERE    I am here (to WAITS)          -          fingerprint: of the call in WAITS if I have
//                                                    entered it, or of my last call of the group
//   ABORT   the group has failed          text       aux (the status), nbytes
//   LEFT    I have freed the group        -          -
//   ASK     whom do you wait for?         -          flags (PASS_ON)
//   ANSWER  I wait for a rank             -          aux (1 + rank in the world; 0 for no rank),
//                                                    fingerprint (of the call), flags (UNANSWERED)
//   BYE     I leave the world             text       aux (0 after the last barrier, or the status
//                                                    with which the world failed), nbytes (of the
//                                                    text; 0 if there is none)
typedef struct idist__frame {
    uint8_t type, flags;
    uint16_t past; // in EAGER, RTS, DATA of a collective: digest of the earlier calls
    uint32_t tag;  // step of a collective, or the user's tag
    uint64_t ctx;  // group
    idist__fingerprint fingerprint;
    uint64_t nbytes;
    uint64_t id;
    uint64_t aux;
} idist__frame;

enum {
    IDIST__EAGER = 1,
    IDIST__RTS,
    IDIST__CTS,
    IDIST__DATA,
    IDIST__PULLED,
    IDIST__CREDIT,
    IDIST__WAITS,
    IDIST__HERE,
    IDIST__ABORT,
    IDIST__LEFT,
    IDIST__BYE,
    IDIST__ASK,
    IDIST__ANSWER
};

enum { IDIST__NEEDS_YOU = 1, IDIST__ONLY_CALL = 2 }; // flags of WAITS: see deadlock.h
enum { IDIST__PASS_ON = 1 };                         // flag of ASK: also ask the rank you wait for
enum { IDIST__UNANSWERED = 1 };                      // flag of ANSWER: that rank does not answer me

#define IDIST__FRAME_BYTES sizeof(idist__frame)
typedef char idist__frame_is_a_header[IDIST__FRAME_BYTES == IDIST__HEADER_BYTES ? 1 : -1];
// Largest payload of a DATA frame. A frame of another message may have to wait until one such frame
// is written.
#define IDIST__PIECE_BYTES ((size_t)1 << 20)
// Limit on the eager bytes, frames included, that are in transit to one rank or have not been
// consumed there. The receiver returns credit only when it has consumed half of the limit. So the
// limit is twice what MPI programs often have in flight, which is 64 messages of 16 KiB.
#define IDIST__WINDOW_BYTES ((size_t)2 << 20)
// Largest eager message if the receiver can read larger messages in our memory, and such reads are
// fast.
#define IDIST__EAGER_EXPOSED_BYTES ((size_t)8192)
// Largest message that is sent through a pipe in shared memory if the receiver could also read it
// quickly in our memory. Copying a larger message through the pipe would evict too much other data
// from the caches.
#define IDIST__COPIED_BYTES ((size_t)1 << 20)
#define IDIST__TEXT_BYTES ((size_t)400) // longest text of an ABORT or BYE
#define IDIST__STAGE_BYTES ((size_t)32 * 1024)
#define IDIST__QUICK_YIELDS 16 // maximum turns of idist__send_quick_wait if it yields
#define IDIST__TURN_NS 64      // approximate time of a turn of idist__send_quick_wait if it spins
#define IDIST__HISTORY 64
// Interval at which a sleeping rank checks whether processes of its host have ended. The interval
// may be longer: see ring/shm/liveness.h.
#ifndef IDIST__LOOK_NS // a test sets it so high that no rank ever checks
#define IDIST__LOOK_NS (10 * IDIST__MS)
#endif

enum { IDIST__CLOSED = 256 };       // closed groups that a ring remembers
enum { IDIST__UNKNOWN_MAX = 1024 }; // messages kept from a rank for groups that do not exist here
enum { IDIST__BUCKETS = 1024 };

// A node of a hash table, embedded in the struct that is looked up; see ring/msg/transfer.h.
typedef struct idist__index_node {
    struct idist__index_node *next, **at; // `at` is the pointer that points here
    struct idist__index_bucket *bucket;   // NULL if in no table
} idist__index_node;

typedef struct idist__index_bucket {
    idist__index_node *first, **end; // oldest first; `end` is valid unless the bucket is empty
} idist__index_bucket;

// A send or receive in progress. A transfer is in at most one list. The lists are `out`, `waiting`,
// `posted` and `receiving` of a link, `recvs` and `wild` of a group, and `idle` of the ring. A
// transfer is in no list while it is `in_transfer` of a link that reads an EAGER frame, or `claim`
// or `self_send` of a message.
typedef struct idist__transfer {
    struct idist__transfer *next;
    struct idist__transfer **at;       // the pointer that points here
    struct idist__transfer_list *list; // the list that holds it, if that is an idist__transfer_list
    idist__index_node hook;            // in ring->transfers, if frames look the transfer up
    idist__task *task;         // NULL for control frames and the rest of a cancelled message
    int slot;                  // slot of a receive in a collective; -1 if none
    bool send;                 // false for a receive
    bool started;              // the peer may have seen a frame of this transfer
    char *data;                // the user's buffer
    size_t nbytes, moved;      // size of the whole message, and bytes moved so far
    idist__frame frame;        // the frame to write, or what a receive expects
    size_t frame_moved;        // bytes of the frame that were written
    size_t piece, piece_moved; // payload that follows the frame: size, and bytes written
    uint64_t id;               // our number in RTS, CTS, DATA and PULLED; 0 if none
    bool granted;              // true if a receive has sent CTS before any RTS
    uint64_t stamp;            // order of posting
    char *owned;               // payload to free with the transfer, or NULL
} idist__transfer;

typedef struct idist__transfer_list {
    idist__transfer *first, **end; // oldest first; `end` is valid unless the list is empty
} idist__transfer_list;

// A frame that arrived too early. An EAGER or RTS waits for its receive, a CTS waits for its send,
// and an ABORT waits for its group.
typedef struct idist__message {
    struct idist__message *next, **at; // in its link's list; `at` is the pointer that points here
    idist__index_node hook;            // in ring->messages
    int peer;
    idist__frame frame;
    char *data;             // payload of an EAGER or text of an ABORT; follows this struct
    size_t moved;           // payload bytes that have arrived
    idist__transfer *claim; // the receive that gets the message once it is complete
    // For a large message to ourselves, the send whose buffer still holds the payload; otherwise
    // NULL.
    idist__transfer *self_send;
    bool unknown;   // the group did not exist here on arrival
    uint64_t stamp; // order of arrival
} idist__message;

enum { IDIST__SOCKETS_MAX = IDIST__CONFIG_SOCKETS_MAX }; // maximum per link

typedef struct idist__sockets {  // the sockets of a link; see ring/msg/sockets.h
    int fds[IDIST__SOCKETS_MAX]; // descriptors; -1 if not connected yet
    int count;
    int in, out;              // indexes of the sockets to read and to write next
    size_t in_left, out_left; // bytes until the link switches to the next socket
} idist__sockets;

// Limits for writing several small sends in one system call. Sends of up to IDIST__CORK_MESSAGE
// bytes that follow each other within IDIST__CORK_NS are held back, up to IDIST__CORK_BYTES in all.
#define IDIST__CORK_MESSAGE ((size_t)4096)
#define IDIST__CORK_BYTES ((size_t)32 * 1024)
#define IDIST__CORK_NS ((int64_t)20000)
enum { IDIST__PARTS = 64 }; // maximum frames and payloads in one write

typedef struct idist__link { // the connection to one rank
    const idist__transport *transport;
    idist__sockets sockets;
    void *port; // the transport's port: &sockets, or an idist__pipe_port for shared memory
    bool open;
    bool polled;                 // the transport's `polled`
    int watched_in, watched_out; // descriptors of this link that ring->watch watches, or -1
    bool bye;                    // the peer has left; the end of the stream is then no failure
    idist_status bye_status;     // IDIST_OK, or the status of the world's failure; see `text`
    bool ended; // the stream has ended; ring/engine/progress.h decides what that means
    int ended_errno;
    bool write_dead; // writing has failed; the read path finds out why
    bool corked;     // some output is held back until more follows, see idist__link_may_cork

    idist__transfer *out, **out_end; // the output queue, in order
    size_t corked_nbytes;            // bytes that are held back
    int64_t sent_ns;                 // when the last send of the program began
    idist__transfer_list waiting;    // sends that wait for CTS or PULLED
    idist__transfer_list posted;     // receives of collectives, not matched yet
    idist__transfer_list receiving;  // matched receives whose DATA is arriving

    idist__message *early, **early_end; // unexpected messages, in order of arrival
    int unknown_count;                  // unexpected messages for groups that do not exist here

    // Credits. IDIST__WINDOW_BYTES is always `window` plus the eager bytes that the peer has not
    // returned as credit. These bytes are in transit, unread at the peer, or still owed to us.
    size_t window;       // eager bytes that we may still send
    size_t owed;         // eager bytes that we have consumed but not yet returned as credit
    size_t their_window; // eager bytes that the peer may still send

    char *stage; // this link's part of ring->stages: bytes read ahead; [at .. end) are unread
    size_t at, end;
    idist__frame in;                  // the frame that is being read
    size_t in_moved;                  // bytes of `in` that have arrived
    size_t left;                      // payload bytes of `in` that have not arrived yet
    char *target;                     // destination of the payload; NULL to drop it
    idist__transfer *in_transfer;     // the transfer that the payload belongs to, or NULL
    idist__message *in_message;       // the message that the payload belongs to, or NULL
    char text[IDIST__TEXT_BYTES + 1]; // text of an ABORT or a BYE

    idist__frame peer_waits;         // the last WAITS; its type is 0 once a message has arrived
    uint64_t p2p_sent, p2p_received; // messages of send / recv so far
    int64_t here_ns;                 // when the last HERE arrived
    int64_t asked_ns;                // when the last ASK was sent
    int64_t answered_ns;             // when the last ANSWER arrived
    idist__frame answer;             // the last ANSWER

    struct idist__link *next_wanted; // see ring->wanted
    bool wanted;
    bool asks; // our last ASK has not been answered yet
} idist__link;

typedef struct idist__closed { // a group that has been closed
    uint64_t ctx;
    idist_status status;
} idist__closed;

typedef struct idist__ring { // the backend's part of a world
    idist__world *w;
    idist__link *links;          // by world rank; our own link holds messages to ourselves
    idist__os_poll_entry *polls; // scratch of ring/engine/progress.h: two poll sets
    size_t poll_capacity;        // number of entries in each poll set
    int watch;                   // the watch on the descriptors of links, tagged by rank; or -1
    char *stages;                // stages of all links, in one allocation; most are never touched
    int wake;                    // descriptor that wakes a thread from poll
    int corked_count;            // links that are corked
    struct idist__segment *shm;  // memory that the ranks of this host share, or NULL
    int polled_link_count;       // number of open links that are polled
    uint32_t polled_count;       // number of times that a caller has polled
    idist__link *wanted;         // links without a connection that must send or receive a message
    struct idist__connector *connector; // NULL if no link lacks a connection
    bool said_bye;                      // all connected peers were told that we leave
    idist_status bye_status;            // the status in our BYE; IDIST_OK if we leave cleanly
    int left_count;                     // number of ranks that have sent BYE
    int64_t asking_ns;     // when the last round of ASK frames began; see ring/engine/ask.h
    int64_t ask_again_ns;  // when the ranks of that round are asked again; 0 if never
    char unreachable[200]; // why the last needed connection could not be made
    int64_t no_fds_ns;     // when we last ran out of descriptors; 0 if never
    bool told_blind;       // we have logged that we cannot detect the end of processes
    int64_t looked_ns;     // when we last checked if processes of this host have ended
    // Time by which the next sleep exceeds the interval between two checks for ended processes.
    int64_t extra_sleep_ns;
    // Time when the last task started. After a pause of more than 1 ms, the next task first reads
    // the links.
    int64_t last_start_ns;
    idist__transfer *idle; // transfers for reuse
    uint64_t stamp, next_id;
    // The most recently closed groups, in a ring buffer. Frames that still arrive for these groups
    // are dropped.
    idist__closed closed[IDIST__CLOSED];
    uint32_t nclosed;

    // A failure that was recorded but not yet carried out; see the last section of this file.
    idist_group *failed;
    idist_status failed_status;
    char failed_cause[400];

    idist__index_bucket transfers[IDIST__BUCKETS], messages[IDIST__BUCKETS]; // see transfer.h
} idist__ring;

typedef struct idist__seen {        // a member's progress in a group, as known here
    uint32_t seq;                   // number of the last call that the member has entered
    idist__fingerprint fingerprint; // fingerprint of that call
} idist__seen;

typedef struct idist__ring_group { // the backend's part of a group
    int *rank_of;                  // rank in the group by world rank; -1 if not a member
    idist__seen *seen;             // by rank in the group
    idist__transfer_list recvs;    // receives of idist_recv with a source and a tag
    idist__transfer_list wild;     // receives of idist_recv from any source or with any tag

    idist__fingerprint history[IDIST__HISTORY]; // our own calls, by seq; see ring/msg/history.h
    uint16_t past[IDIST__HISTORY];              // digest of the calls before each call
    uint16_t digest;                            // digest of all calls so far

    struct idist__share *share; // shared memory of the members; NULL if collectives use messages
    bool met;                   // this rank knows the regions of all members

    // A group over several hosts; see ring/algo/host_plan.h.
    bool spans_hosts;
    int nhosts;                // number of hosts; 0 if calls cannot run BY_HOST
    bool in_order;             // the members on each host have consecutive ranks
    idist_group *local;        // the members on this host; NULL if there is only this rank
    idist_group *leaders;      // the first member of each host; NULL if we are not one
    idist_group *whole;        // the group for which this group is `local` or `leaders`
    idist__task *first, *last; // queue of BY_HOST calls; only the first one runs
} idist__ring_group;

static idist__ring *idist__ring_of(const idist__world *w) { return (idist__ring *)w->impl; }

static idist__ring_group *idist__ring_group_of(const idist_group *g) {
    return (idist__ring_group *)g->impl;
}

// Returns the host of a member.
static uint64_t idist__ring_group_host(const idist_group *g, int rank) {
    return g->w->nodes[g->ranks[rank]].host;
}

//------------------------------------------------------------------------------
// failures that are noticed while transfers are in use
//
// Failing a group cancels its tasks and frees their transfers. That must not happen while a
// transfer is in use further up the stack, so the code that notices a failure only records it. The
// engine carries out a recorded failure after each frame, and before most of its entry points
// return. The loops that run tasks stop at a recorded failure. So at most one failure is recorded
// at a time.
//------------------------------------------------------------------------------

// Records a failure of a group, unless a failure is already recorded or the group has already
// failed.
static void idist__ring_fail(idist__ring *ring, idist_group *g, idist_status status,
                             const char *cause) {
    if (ring->failed || g->status != IDIST_OK) return;
    ring->failed = g;
    ring->failed_status = status;
    idist__text_copy(ring->failed_cause, sizeof ring->failed_cause, cause);
}

// Records that a group has failed because this rank is out of memory.
static void idist__ring_fail_memory(idist__ring *ring, idist_group *g) {
    const idist__world *w = ring->w;
    char cause[400];

    snprintf(cause, sizeof cause, "rank %d on %s is out of memory", w->group.rank,
             w->about.hostname);
    idist__ring_fail(ring, g, IDIST_ERR_NO_MEMORY, cause);
}

// Carries out the recorded failure, and further failures that it causes.
static void idist__ring_settle(idist__ring *ring) {
    while (ring->failed) {
        idist_group *g = ring->failed;
        ring->failed = NULL;
        idist__group_fail(g, ring->failed_status, ring->failed_cause);
    }
}
