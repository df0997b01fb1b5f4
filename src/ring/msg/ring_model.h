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

// A frame is 64 bytes, in the byte order that the handshake found equal on both sides. `nbytes` of
// payload may follow.
//
//   type    meaning                       payload    fields besides ctx
//   EAGER   a whole message               message    print, tag, nbytes, past; id and aux: the
//                                                    previous call (idist__history_tell_past)
//   RTS     a message is ready            -          print, tag, past, id (the sender's number for
//                                                    it), nbytes (its size), aux (its address),
//                                                    flags (low bits of the number of sends that
//                                                    the rank has withdrawn)
//   CTS     send it                       -          id (as in RTS), aux (the receiver's number);
//                                                    granted: id is 0; print, tag
//   DATA    a piece of it                 piece      id (the receiver's number), nbytes, aux (size
//                                                    of the message), print, tag, past
//   PULLED  I have read it myself         -          id (as in RTS)
//   CREDIT  eager bytes were consumed     -          nbytes (how many)
//   WAITS   I am waiting in a call        -          print, flags, tag (the last collective of the
//                                                    group that I have entered), aux (send / recv
//                                                    messages received so far), id (of an RTS)
//   HERE    I have entered it too         -          print, of that call or of the last one that
//                                                    I have entered
//   ABORT   the group has failed          text       aux (the status), nbytes
//   LEFT    I have freed the group        -          -
//   ASK     whom do you wait for?         -          flags (PASS_ON)
//   ANSWER  I wait for a rank             -          aux (1 + rank in the world; 0: for none),
//                                                    print (of the call), flags (UNANSWERED)
//   BYE     I leave the world             text       aux (0: in order, after the last barrier;
//                                                    else the status with which the world failed),
//                                                    nbytes (of the text; in order: 0)
typedef struct idist__frame {
    uint8_t type, flags;
    uint16_t past; // of EAGER, RTS and DATA in a collective: digest of the calls before it
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

enum { IDIST__NEEDS_YOU = 1, IDIST__ONLY_CALL = 2 }; // flags of WAITS
enum { IDIST__PASS_ON = 1 };                         // of ASK: ask the rank that you wait for
enum { IDIST__UNANSWERED = 1 };                      // of ANSWER: that rank does not answer me

#define IDIST__FRAME_BYTES sizeof(idist__frame)
typedef char idist__frame_is_a_header[IDIST__FRAME_BYTES == IDIST__HEADER_BYTES ? 1 : -1];
// Payload of a DATA frame. Frames of other messages wait this long behind it.
#define IDIST__PIECE_BYTES ((size_t)1 << 20)
// Eager bytes, frames included, that are under way to one rank or wait there to be consumed. Credit
// comes back only when half has been consumed, so this is twice what MPI programs often have under
// way: 64 messages of 16 KiB.
#define IDIST__WINDOW_BYTES ((size_t)2 << 20)
// The largest eager message where the receiver can read larger ones in our memory, and fast.
#define IDIST__EAGER_EXPOSED_BYTES ((size_t)8192)
// The largest message that goes through a pipe in shared memory where the receiver could also read
// it fast in our memory. Of larger ones the pipe would displace too much from the caches.
#define IDIST__COPIED_BYTES ((size_t)1 << 20)
#define IDIST__TEXT_BYTES ((size_t)400) // of an ABORT
#define IDIST__STAGE_BYTES ((size_t)32 * 1024)
#define IDIST__QUICK_YIELDS 16 // polls of the quick way when cores are oversubscribed
#define IDIST__TURN_NS 64      // a poll of the quick way takes about this long
#define IDIST__HISTORY 64
// A rank that sleeps looks this often whether processes of its host have ended, or less often: see
// ring/shm/liveness.h.
#ifndef IDIST__LOOK_NS // a test sets it so high that nobody ever looks
#define IDIST__LOOK_NS (10 * IDIST__MS)
#endif

enum { IDIST__CLOSED = 256 };       // groups whose end a ring remembers
enum { IDIST__UNKNOWN_MAX = 1024 }; // messages of a rank that are kept for groups not known here
enum { IDIST__BUCKETS = 1024 };

// A node of a hash table, inside of what it finds; see ring/msg/transfer.h.
typedef struct idist__index_node {
    struct idist__index_node *next, **at; // `at` is what points to it
    struct idist__index_bucket *bucket;   // NULL: it is in no table
} idist__index_node;

typedef struct idist__index_bucket {
    idist__index_node *first, **end; // oldest first; `end` is valid unless the bucket is empty
} idist__index_bucket;

// One send or receive under way. It is in at most one list: a link's out, waiting, posted or
// receiving, a group's recvs or wild, or the ring's idle ones. It is in none while it is the
// in_transfer of an EAGER frame, or the claim on a message.
typedef struct idist__transfer {
    struct idist__transfer *next;
    struct idist__transfer **at;       // what points to it
    struct idist__transfer_list *list; // the list that holds it, if that is an idist__transfer_list
    idist__index_node hook;            // in ring->transfers, if frames look it up
    idist__task *task;         // NULL for control frames and for the rest of a cancelled message
    int slot;                  // of a receive in a collective; -1: none
    bool send;                 // false: a receive
    bool started;              // the peer has been told of it
    char *data;                // the user's buffer
    size_t nbytes, moved;      // of the whole message
    idist__frame frame;        // what goes out, or what the receive wants
    size_t frame_moved;        // bytes of the frame that have gone out
    size_t piece, piece_moved; // payload behind the frame
    uint64_t id;               // our number for it in RTS, CTS, DATA and PULLED; 0: none
    bool granted;              // a receive whose message the peer may send at once
    uint64_t stamp;            // order of posting
    char *owned;               // payload that is freed with the transfer
} idist__transfer;

typedef struct idist__transfer_list {
    idist__transfer *first, **end; // oldest first; `end` is valid unless the list is empty
} idist__transfer_list;

// What arrived before this rank could use it: an EAGER or RTS without a receive, a CTS without its
// send, an ABORT for a group that does not exist here yet.
typedef struct idist__message {
    struct idist__message *next, **at; // in its link's list; `at` is what points to it
    idist__index_node hook;            // in ring->messages
    int peer;
    idist__frame frame;
    char *data;             // the payload of an EAGER or the text of an ABORT, behind this struct
    size_t moved;           // bytes of it that have arrived
    idist__transfer *claim; // the receive that gets it once it has arrived completely
    idist__transfer *self_send; // to ourselves: the payload is still in the sender's buffer
    bool unknown;               // its group did not exist here when it arrived
    uint64_t stamp;             // order of arrival
} idist__message;

enum { IDIST__SOCKETS_MAX = IDIST__CONFIG_SOCKETS_MAX }; // of a link

typedef struct idist__sockets {  // of a link; see ring/msg/sockets.h
    int fds[IDIST__SOCKETS_MAX]; // -1: not connected yet
    int count;
    int in, out;              // which socket is read next, and which one is written next
    size_t in_left, out_left; // bytes until another one is
} idist__sockets;

// Sends of up to IDIST__CORK_MESSAGE bytes that follow each other within IDIST__CORK_NS wait for
// each other, up to IDIST__CORK_BYTES of them.
#define IDIST__CORK_MESSAGE ((size_t)4096)
#define IDIST__CORK_BYTES ((size_t)32 * 1024)
#define IDIST__CORK_NS ((int64_t)20000)
enum { IDIST__PARTS = 64 }; // that one write takes: frames and payloads

typedef struct idist__link { // the connection to one rank
    const idist__transport *transport;
    idist__sockets sockets;
    void *port; // the transport's: &sockets, or an idist__pipe_port for shared memory
    bool open;
    bool polled;                 // as its transport says
    int watched_in, watched_out; // descriptors that ring->watch watches for it; -1: none
    bool bye;                    // the peer has left the world: the end of the stream is no loss
    idist_status bye_status;     // IDIST_OK: in order; else how the world failed, as `text` says
    bool ended; // the stream is at its end; ring/engine/progress.h decides what that means
    int ended_errno;
    bool write_dead; // writing has failed; reading will tell why
    bool corked;     // some of what goes out waits for more, see idist__link_may_cork

    idist__transfer *out, **out_end; // going out, in order
    size_t corked_nbytes;            // of those that wait for more
    int64_t sent_ns;                 // when the last send of the program began
    idist__transfer_list waiting;    // sends that wait for CTS or PULLED
    idist__transfer_list posted;     // receives of collectives, not matched yet
    idist__transfer_list receiving;  // matched; DATA is coming

    idist__message *early, **early_end; // unexpected messages, in order of arrival
    int unknown_count;                  // of those, for groups that do not exist here

    // Credits. window + what is on its way, lies unread at the peer, or is owed to us there
    // = IDIST__WINDOW_BYTES, at all times.
    size_t window;       // eager bytes that we may still send
    size_t owed;         // eager bytes that we have consumed and not yet told the peer
    size_t their_window; // eager bytes that the peer may still send

    char *stage; // our part of ring->stages: bytes read ahead, of which [at .. end) are unread
    size_t at, end;
    idist__frame in;                  // the frame that is being read
    size_t in_moved;                  // bytes of it
    size_t left;                      // payload of it still to come, ...
    char *target;                     // ... where it goes (NULL: nowhere), ...
    idist__transfer *in_transfer;     // ... and what it belongs to: a transfer
    idist__message *in_message;       // or a message
    char text[IDIST__TEXT_BYTES + 1]; // of an ABORT or a BYE

    idist__frame peer_waits;         // the last WAITS, while nothing else has come after it
    uint64_t p2p_sent, p2p_received; // messages of send / recv
    int64_t here_ns;                 // when the last HERE came
    int64_t asked_ns;                // when the last ASK went out
    int64_t answered_ns;             // when the last ANSWER came, ...
    idist__frame answer;             // ... which is this one

    struct idist__link *next_wanted; // see ring->wanted
    bool wanted;
    bool asks; // an ASK has not been answered
} idist__link;

typedef struct idist__closed { // a group that has been closed
    uint64_t ctx;
    idist_status status;
} idist__closed;

typedef struct idist__ring { // the backend's part of a world
    idist__world *w;
    idist__link *links;          // by world rank; our own one holds messages to ourselves
    idist__os_poll_entry *polls; // scratch of ring/engine/progress.h: two sets, ...
    size_t poll_capacity;        // ... of so many entries each
    int watch;                   // of the descriptors of links, each tagged with its rank; -1: none
    char *stages;                // of all links, in one allocation; most are never touched
    int wake;                    // descriptor that ends a sleep
    int corked_count;            // links that are corked
    struct idist__segment *shm;  // memory that the ranks of this host share, or NULL
    int polled_link_count;       // open links that are polled
    uint32_t polled_count;       // how often a caller has polled
    idist__link *wanted;         // links without a connection through which a message is to go
    struct idist__connector *connector; // NULL: no rank makes connections any more
    bool said_bye;                      // all that have a connection were told that we leave, ...
    idist_status bye_status;            // ... and why: IDIST_OK: in order
    int left_count;                     // ranks that have said that they leave
    int64_t asking_ns;                  // when the last round of questions began: ring/engine/ask.h
    int64_t ask_again_ns;               // when its ranks are asked once more; 0: never
    char unreachable[200];              // why the last connection that was needed could not be made
    int64_t no_fds_ns;                  // when descriptors were short the last time; 0: never
    bool told_blind;        // the log says that we cannot look for processes that have ended
    int64_t looked_ns;      // when we last looked for processes of this host that have ended
    int64_t extra_sleep_ns; // how much longer than IDIST__LOOK_NS we sleep beside them by now
    int64_t last_start_ns;  // when the last task started; after a pause of 1 ms the next one reads
                            // the links first
    idist__transfer *idle;  // transfers that can be used again
    uint64_t stamp, next_id;
    idist__closed closed[IDIST__CLOSED]; // groups that were closed last: what still arrives for
    uint32_t nclosed;                    // them is dropped

    // A failure that is noticed in the middle of something; see ring/msg/ring_model.h.
    idist_group *failed;
    idist_status failed_status;
    char failed_cause[400];

    idist__index_bucket transfers[IDIST__BUCKETS], messages[IDIST__BUCKETS]; // see transfer.h
} idist__ring;

typedef struct idist__seen {        // what is known of a member's progress in a group
    uint32_t seq;                   // it has entered this call, ...
    idist__fingerprint fingerprint; // ... which is this one
} idist__seen;

typedef struct idist__ring_group { // the backend's part of a group
    int *rank_of;                  // rank in the group by world rank; -1: not a member
    idist__seen *seen;             // by rank in the group
    idist__transfer_list recvs;    // receives of recv, ...
    idist__transfer_list wild;     // ... and those from any source or with any tag

    idist__fingerprint history[IDIST__HISTORY]; // of our own calls, by seq; see ring/msg/history.h
    uint16_t past[IDIST__HISTORY];              // digest of the calls before each
    uint16_t digest;                            // of all calls so far

    struct idist__share *share; // of members that share memory; NULL: collectives are messages
    bool met;                   // all members know of all members' regions

    // A group over several hosts; see ring/algo/host_plan.h.
    bool spans_hosts;
    int nhosts;                // 0: its collectives do not go by host
    bool in_order;             // the members on each host have successive ranks
    idist_group *local;        // the members on this host; NULL: we are the only one
    idist_group *leaders;      // the first member of each host; NULL: we are not one of them
    idist_group *whole;        // the group of which this one is `local` or `leaders`
    idist__task *first, *last; // calls by host under way; only the first one runs
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
// failures that are noticed in the middle of something
//
// Failing a group cancels its tasks and frees their transfers. That must not happen while one of
// them is in use further up the stack, so the failure is only recorded where it is noticed. The
// engine carries it out after each frame and at the end of each step, and the loops that run tasks
// stop at a recorded failure. So there is at most one at a time.
//------------------------------------------------------------------------------

// Records a failure. The first one counts.
static void idist__ring_fail(idist__ring *ring, idist_group *g, idist_status status,
                             const char *cause) {
    if (ring->failed || g->status != IDIST_OK) return;
    ring->failed = g;
    ring->failed_status = status;
    idist__text_copy(ring->failed_cause, sizeof ring->failed_cause, cause);
}

// The same as idist__group_fail_memory.
static void idist__ring_fail_memory(idist__ring *ring, idist_group *g) {
    const idist__world *w = ring->w;
    char cause[400];

    snprintf(cause, sizeof cause, "rank %d on %s is out of memory", w->group.rank,
             w->about.hostname);
    idist__ring_fail(ring, g, IDIST_ERR_NO_MEMORY, cause);
}

// Carries out the failure that was recorded, and those that this one brings about.
static void idist__ring_settle(idist__ring *ring) {
    while (ring->failed) {
        idist_group *g = ring->failed;
        ring->failed = NULL;
        idist__group_fail(g, ring->failed_status, ring->failed_cause);
    }
}
