/* idist_msg.h - v0.2.0 - messages between ranks - MIT licence

    Part of the implementation of idist; idist.h includes it where IDIST_IMPLEMENTATION is defined.

WHAT IT IS

    Non-blocking messages between two ranks over one link, on any transport. idist_send and
    idist_recv are such messages; collectives are algorithms made of them (idist_algo.h).

      transfer   one send or receive under way, posted by this rank
      message    one that has arrived before a receive for it was posted (unexpected)
      frame      64 bytes that begin everything that goes through a link
      link       the connection to one rank: what goes out, what is coming in, credits

HOW IT FITS

    The algorithms and calls above post transfers. [engine:progress] reads the links and tells this
    file of the frames that arrive. No section asks which transport a link has: a transport says
    what it can do (idist__transport in idist_shm.h).

A SMALL MESSAGE (eager)

    sender     idist__send_post -> idist__link_push -> idist__link_flush -> transport->write
    receiver   idist__progress_read (engine) -> idist__match_frame -> payload goes to the buffer of
               the receive, or into a message if none is posted -> idist__transfer_received
    sender     gets CREDIT back when half of its window has been consumed

A LARGE MESSAGE (rendezvous)

    sender     RTS                      a message is ready, and where
    receiver   PULLED                   it has read the message in the sender's memory, or
               CTS                      it has a place for it
    sender     DATA, DATA, ...          pieces of 1 MiB, between which other frames may go

    Where the receiver could read it, idist__link_wants_data chooses.

A LARGE MESSAGE OF A COLLECTIVE, WHERE THE RECEIVER CANNOT READ THE SENDER'S MEMORY (granted)

    Both ranks know of the message before it is sent, so the receiver need not be asked.

    receiver   CTS                      when the receive is posted
    sender     DATA, DATA, ...          when the send is posted and the CTS has come

    Each such message takes one CTS. A sender that has to wait for it sends an RTS, whose
    fingerprint tells the receiver which call this rank is in; it needs no answer.

CONTENTS

      [msg:types]      frames, transfers, messages, links, the backend's part of world and group
      [msg:transport]  bytes over stream sockets, and none without a connection
      [msg:op]         a collective under way, and the macros that let an algorithm wait
      [msg:index]      finding transfers and messages by what frames say
      [msg:transfer]   the life of a send or receive
      [msg:failure]    failures that are noticed in the middle of something
      [msg:combine]    reducing operands that have arrived
      [msg:link]       frames out of one link, credits, rendezvous
      [msg:message]    messages that nobody has asked for yet
      [msg:history]    whether two ranks make the same calls
      [msg:match]      which receive gets which message
      [msg:send]       posting sends
      [msg:recv]       posting receives
*/
#ifndef IDIST_MSG_H
#define IDIST_MSG_H

//------------------------------------------------------------------------------
// [msg:types]  frames, transfers, messages, links, the backend's part of world and group
// uses clock config model shm:transport
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
// [shm:ended].
#ifndef IDIST__LOOK_NS // a test sets it so high that nobody ever looks
#define IDIST__LOOK_NS (10 * IDIST__MS)
#endif

enum { IDIST__CLOSED = 256 };       // groups whose end a ring remembers
enum { IDIST__UNKNOWN_MAX = 1024 }; // messages of a rank that are kept for groups not known here
enum { IDIST__BUCKETS = 1024 };

// A node of a hash table, inside of what it finds; see [msg:index].
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

typedef struct idist__sockets {  // of a link; see [msg:transport]
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
    bool ended; // the stream is at its end; [engine:progress] decides what that means
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
    idist__os_poll_entry *polls; // scratch of [engine:progress]: two sets, ...
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
    int64_t asking_ns;                  // when the last round of questions began: [engine:ask]
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

    // A failure that is noticed in the middle of something; see [msg:failure].
    idist_group *failed;
    idist_status failed_status;
    char failed_cause[400];

    idist__index_bucket transfers[IDIST__BUCKETS], messages[IDIST__BUCKETS]; // see [msg:index]
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

    idist__fingerprint history[IDIST__HISTORY]; // of our own calls, by seq; see [msg:history]
    uint16_t past[IDIST__HISTORY];              // digest of the calls before each
    uint16_t digest;                            // of all calls so far

    struct idist__share *share; // of members that share memory; NULL: collectives are messages
    bool met;                   // all members know of all members' regions

    // A group over several hosts; see [algo:host].
    bool spans_hosts;
    int nhosts;                // 0: its collectives do not go by host
    bool in_order;             // the members on each host have successive ranks
    idist_group *near, *leads; // the members on this host; the first members of all hosts (or NULL)
    idist_group *whole;        // the group of which this one is `near` or `leads`
    idist__task *first, *last; // calls by host under way; only the first one runs
} idist__ring_group;

static idist__ring *idist__ring_of(const idist__world *w) { return (idist__ring *)w->impl; }

static idist__ring_group *idist__ring_group_of(const idist_group *g) {
    return (idist__ring_group *)g->impl;
}

//------------------------------------------------------------------------------
// [msg:transport]  bytes over stream sockets, and none without a connection
// uses descriptor socket shm:transport types
//
// A link over TCP has one socket or several, because one cannot always fill a network: the buffers
// that the system allows bound what is under way in it, and some clouds limit the bandwidth of each
// connection. The bytes of the link go through its sockets in stripes, in each direction:
//
//   stripe   | 0 | 1 | 2 | 3 | 4 | ...     IDIST__STRIPE_BYTES each
//   socket     0   1   2   0   1
//
// Sender and receiver both count bytes, so nothing has to say where a stripe begins. A stripe is
// large enough that hardly any small message is cut, and small against what is under way.
//------------------------------------------------------------------------------

#ifndef IDIST__STRIPE_BYTES // a test cuts frames and payloads anywhere
#define IDIST__STRIPE_BYTES ((size_t)256 * 1024)
#endif

static size_t idist__sockets_stripe(const idist__sockets *s) {
    return s->count > 1 ? IDIST__STRIPE_BYTES : SIZE_MAX;
}

static void idist__sockets_init(idist__sockets *s) {
    int i;

    memset(s, 0, sizeof *s);
    for (i = 0; i < IDIST__SOCKETS_MAX; i++) s->fds[i] = -1;
}

// How many sockets the link has, before they are connected.
static void idist__sockets_set_count(idist__sockets *s, int count) {
    s->count = count;
    s->in_left = idist__sockets_stripe(s);
    s->out_left = idist__sockets_stripe(s);
}

static bool idist__sockets_is_complete(const idist__sockets *s) {
    int i;

    for (i = 0; i < s->count; i++)
        if (s->fds[i] < 0) return false;

    return true;
}

// Bytes have moved through the socket number *turn, *left of which belong to its stripe.
static void idist__sockets_moved(const idist__sockets *s, int *turn, size_t *left, size_t nbytes) {
    *left -= nbytes;
    if (*left) return;
    *turn = (*turn + 1) % s->count;
    *left = idist__sockets_stripe(s);
}

static ptrdiff_t idist__sockets_read(void *port, void *buf, size_t nbytes) {
    idist__sockets *s = (idist__sockets *)port;
    size_t most = nbytes < s->in_left ? nbytes : s->in_left;
    ptrdiff_t n = idist__os_socket_read(s->fds[s->in], buf, most);

    if (n > 0) idist__sockets_moved(s, &s->in, &s->in_left, (size_t)n);

    return n;
}

static ptrdiff_t idist__sockets_write(void *port, const idist__os_part *parts, int nparts) {
    idist__sockets *s = (idist__sockets *)port;
    idist__os_part of_stripe[IDIST__PARTS];
    size_t left = s->out_left;
    ptrdiff_t n;
    int i;

    for (i = 0; i < nparts && i < IDIST__PARTS && left; i++) {
        of_stripe[i] = parts[i];
        if (of_stripe[i].nbytes > left) of_stripe[i].nbytes = left;
        left -= of_stripe[i].nbytes;
    }

    n = idist__os_socket_write(s->fds[s->out], of_stripe, i);

    // Reading is to tell why, and may be at another socket, which knows nothing of this.
    for (i = 0; n < 0 && s->count > 1 && i < s->count; i++) idist__os_socket_end(s->fds[i]);

    if (n > 0) idist__sockets_moved(s, &s->out, &s->out_left, (size_t)n);

    return n;
}

static void idist__sockets_close(void *port) {
    idist__sockets *s = (idist__sockets *)port;
    int i;

    for (i = 0; i < IDIST__SOCKETS_MAX; i++) idist__os_descriptor_close(&s->fds[i]);
}

static int idist__sockets_descriptor(void *port, bool output) {
    const idist__sockets *s = (const idist__sockets *)port;
    return s->fds[output ? s->out : s->in];
}

static const idist__transport idist__transport_tcp = {"tcp",
                                                      idist__sockets_read,
                                                      idist__sockets_write,
                                                      idist__sockets_close,
                                                      idist__sockets_descriptor,
                                                      true,
                                                      true,
                                                      NULL,
                                                      NULL,
                                                      NULL,
                                                      NULL,
                                                      NULL,
                                                      NULL,
                                                      NULL};

static const idist__transport idist__transport_unix = {"unix",
                                                       idist__sockets_read,
                                                       idist__sockets_write,
                                                       idist__sockets_close,
                                                       idist__sockets_descriptor,
                                                       true,
                                                       false,
                                                       NULL,
                                                       NULL,
                                                       NULL,
                                                       NULL,
                                                       NULL,
                                                       NULL,
                                                       NULL};

// A link without a connection: what is to go out waits until there is one. It counts as polled, so
// that the rank sleeps in poll, where the connector's sockets can wake it.

static ptrdiff_t idist__sockets_read_nothing(void *port, void *buf, size_t nbytes) {
    (void)port;
    (void)buf;
    (void)nbytes;
    return 0;
}

static ptrdiff_t idist__sockets_write_nothing(void *port, const idist__os_part *parts, int nparts) {
    (void)port;
    (void)parts;
    (void)nparts;
    return 0;
}

static void idist__sockets_close_nothing(void *port) { (void)port; }

static int idist__sockets_no_descriptor(void *port, bool output) {
    (void)port;
    (void)output;
    return -1;
}

static const idist__transport idist__transport_none = {"none",
                                                       idist__sockets_read_nothing,
                                                       idist__sockets_write_nothing,
                                                       idist__sockets_close_nothing,
                                                       idist__sockets_no_descriptor,
                                                       true,
                                                       false,
                                                       NULL,
                                                       NULL,
                                                       NULL,
                                                       NULL,
                                                       NULL,
                                                       NULL,
                                                       NULL};

//------------------------------------------------------------------------------
// [msg:op]  a collective under way, and the macros that let an algorithm wait
// uses mem base:type reduce launch:env kind model core:world fingerprint
// uses core:task types
//
// An algorithm is a function that is called again whenever one of its sends or receives completes.
// It keeps its place either by itself (streams, see [algo:stream]), or as a coroutine: straight
// code between CO_BEGIN and CO_END, in which CO_AWAIT leaves the function until its condition
// holds. No local variable keeps its value across an AWAIT; state lives in idist__op.
//------------------------------------------------------------------------------

// Receives of a stream that are posted ahead, at least and at most. The peer may send all of them
// at once, so twice the least are slower on one host: 2 MiB on their way fall out of the caches.
#define IDIST__SLOTS 4
#define IDIST__SLOTS_MOST 32
#define IDIST__CHUNK_BYTES ((size_t)256 * 1024) // unit of a stream

typedef struct idist__op idist__op;

typedef struct idist__item { // of a stream
    int peer;                // rank in the group
    char *data;
    size_t nbytes;
} idist__item;

// ---- state of an algorithm, one struct per family ----

typedef struct idist__stream_op {  // [algo:stream], and so [algo:ring] and [algo:chain]
    size_t recv_total, send_total; // items
    size_t head;                   // items that can be sent before anything has been received
    size_t posted, taken, sent;    // items so far: receives posted, items taken, sends posted
    size_t chunk_count;            // elements of a chunk
    size_t block_chunks;           // chunks of a block
    char *slots;                   // scratch for receives without an address of their own
    idist__item (*recv_at)(idist__task *t, size_t index);
    idist__item (*send_at)(idist__task *t, size_t index);
    void (*take)(idist__task *t, size_t index);
} idist__stream_op;

typedef struct idist__direct_op {  // [algo:direct]
    size_t recv_total, send_total; // messages
    size_t posted, sent;           // so far
} idist__direct_op;

typedef struct idist__dissemination_op { // [algo:dissemination]
    int distance;                        // of the current round, a power of two
} idist__dissemination_op;

typedef struct idist__tree_op { // [algo:tree]
    int distance; // to the child of the current step, and after the last one to the parent
} idist__tree_op;

typedef struct idist__doubling_op { // [algo:doubling]
    int distance;                   // to the partner of the current round, a power of two
    int active_ranks; // ranks that exchange: the largest power of two within the group
} idist__doubling_op;

typedef struct idist__bruck_op { // [algo:bruck]
    int distance;                // of the current round, a power of two
    size_t packed_blocks;        // all_to_all: blocks that travel in this round
} idist__bruck_op;

enum { IDIST__HOST_ROUND = 3 }; // steps of a plan that run at once

typedef struct idist__host_op {     // [algo:host]
    struct idist__host_step *steps; // the plan; NULL: not made yet
    size_t step_count;
    size_t current;                          // the first step of the round under way
    size_t running_count;                    // steps of that round
    idist__task *running[IDIST__HOST_ROUND]; // their tasks, until we have seen them all end
    idist__task *next;                       // the next call in the queue of the group
} idist__host_op;

typedef struct idist__shared_op { // idist_share.h
    uint32_t call_number;         // among the shared calls of the group
    int next_rank;                // where the check of the other members goes on
    int awaited;                  // the member whose next step is awaited
    bool entered;                 // our slot announces the call
    bool remote;                  // contributions may be read across memories, through the kernel
    bool in_place;                // our contribution is read where it is
    bool direct;                  // the others write to our result
    uint64_t first_chunk;         // number of the call's first chunk, over all calls of the group
    size_t nchunks;
    size_t chunk_count;   // elements of a block in each chunk
    size_t chunk;         // the chunk under way
    size_t exposed;       // chunks that we have exposed
    size_t largest_count; // v-forms: elements of the largest part
    idist__task *next;    // the next call in the queue of the group
} idist__shared_op;

// The backend's part of a task. Sends and receives of the program use `transfer` alone; the rest is
// not cleared for them.
struct idist__op {
    idist__transfer *transfer; // of a send or receive of the program; NULL when it has ended

    // Every collective.
    void (*run)(idist__task *t);
    void (*finish)(idist__task *t);   // after the last step, to copy the result to its place, say
    idist__algorithm algorithm;       // part of the fingerprint
    int line;                         // where the coroutine goes on
    bool running;                     // run is on the stack
    uint16_t past;                    // digest of the calls before
    uint32_t slots_pending;           // bit k: the receive in slot k is not complete
    size_t slot_count;                // receives of a stream that are posted ahead
    int sends_pending, recvs_pending; // not complete

    // What it works on.
    int n, rank, root; // size of the group, our rank
    size_t size;       // of an element as it is reduced: over messages, F16 is carried as F32
    size_t count;
    size_t nbytes; // count * size
    idist__reduce_fn reduce;
    const idist__user_op *user; // &user_op, or NULL
    idist__user_op user_op;     // a copy: the op may be freed while the call runs
    const char *in;             // our contribution
    char *out;                  // our result
    char *work;                 // scratch of the algorithm
    char *element;              // scratch for one element that is larger than IDIST__OP_PIECE
    char *memory;               // all scratch, in one allocation

    union { // which one is valid follows from `algorithm` and the kind of the call
        idist__stream_op stream;
        idist__direct_op direct;
        idist__dissemination_op dissemination;
        idist__tree_op tree;
        idist__doubling_op doubling;
        idist__bruck_op bruck;
        idist__host_op host;
        idist__shared_op shared;
    } u;
};

static idist__op *idist__op_of(const idist__task *t) { return (idist__op *)t->impl; }

#define IDIST__CO_BEGIN(o) \
    switch ((o)->line) {   \
    case 0:
#define IDIST__CO_AWAIT(o, condition) \
    do {                              \
        (o)->line = __LINE__;         \
        __attribute__((fallthrough)); \
    case __LINE__:                    \
        if (!(condition)) return;     \
    } while (0)
#define IDIST__CO_END(o) \
    default: break;      \
        }

// A buffer that nobody reads or writes may be NULL. Algorithms add offsets to it, which C does not
// allow for null pointers.
static char *idist__op_buffer(const void *buffer) {
    static const char nothing[1] = {0};
    return (char *)(uintptr_t)(buffer ? buffer : nothing);
}

// Fills in what a collective works on, as its call says.
static void idist__op_prepare(idist__task *t) {
    idist__op *o = idist__op_of(t);
    const idist__call *c = &t->call;

    o->n = t->group->size;
    o->rank = t->group->rank;
    o->root = c->root;
    o->user = NULL;

    if (idist__kind_reduces(c->kind) && (int)c->op >= IDIST_OP_USER) {
        o->user_op = *idist__world_user_op(t->group, c);
        o->user = &o->user_op;
    }

    o->size = idist_dtype_size(c->dtype);
    o->count = c->count;
    o->nbytes = o->count * o->size;
    o->in = idist__op_buffer(c->send);
    o->out = idist__op_buffer(c->recv);
}

// What the messages of a collective carry. In all_to_allv each pair of ranks compares its dtype.
static idist__fingerprint idist__op_fingerprint(const idist__task *t) {
    idist__fingerprint p = idist__fingerprint_of_task(t, idist__op_of(t)->algorithm);

    if (t->call.kind == IDIST__ALL_TO_ALLV) {
        p.dtype = (uint8_t)t->call.dtype;
        p.check = idist__fingerprint_tagged(t->group->w, &t->call, 0);
    }

    return p;
}

static void idist__op_done(idist__task *t) {
    idist__op *o = idist__op_of(t);

    if (t->done || idist__ring_of(t->group->w)->failed == t->group) return;
    if (o->finish) o->finish(t);
    idist__mem_free(&t->group->w->cfg.mem, o->memory);
    o->memory = NULL;
    idist__task_complete(t, IDIST_OK, "");
}

static void idist__op_run(idist__task *t) {
    idist__op *o = idist__op_of(t);

    if (o->running || t->done) return;
    o->running = true; // a transfer that completes at once must not call the algorithm recursively
    o->run(t);
    o->running = false;
}

//------------------------------------------------------------------------------
// [msg:index]  finding transfers and messages by what frames say
// uses hash kind types
//
// Thousands of sends and receives may be under way at once, and every frame asks for one of them.
// So the ring has two hash tables: ring->transfers, and ring->messages for the unexpected messages.
//
//     what a frame asks for                          its key
//     a posted receive                               group, peer, and tag or number of the call
//     an unexpected message                          the same
//     a send that waits for a grant                  the same
//     a send that waits for the answer to its RTS    the id that the frame gives
//     a receive that waits for DATA                  the id that the frame gives
//
// Send / recv has the tag in its key, a collective the sequence number of its call. In a bucket,
// and so among equal keys, the oldest comes first.
//------------------------------------------------------------------------------

static void idist__index_insert(idist__index_node *hook, idist__index_bucket *table, uint64_t key) {
    idist__index_bucket *bucket = &table[key % IDIST__BUCKETS];

    hook->next = NULL;
    hook->at = bucket->first ? bucket->end : &bucket->first;
    hook->bucket = bucket;
    *hook->at = hook;
    bucket->end = &hook->next;
}

static void idist__index_remove(idist__index_node *hook) {
    *hook->at = hook->next;
    if (hook->next) hook->next->at = hook->at;
    else hook->bucket->end = hook->at;
    hook->bucket = NULL;
}

static idist__transfer *idist__index_transfer(idist__index_node *hook) {
    return (idist__transfer *)(void *)((char *)hook - offsetof(idist__transfer, hook));
}

static idist__message *idist__index_message(idist__index_node *hook) {
    return (idist__message *)(void *)((char *)hook - offsetof(idist__message, hook));
}

// The key of what a rank sends in a group: a message of send / recv (p2p) with this tag, or a step
// of the collective with this sequence number.
static uint64_t idist__index_key(uint64_t ctx, int peer, bool p2p, uint32_t tag_or_seq) {
    return idist__hash_mix(ctx + ((uint64_t)(uint32_t)peer << 33),
                           ((uint64_t)p2p << 32) | tag_or_seq);
}

static uint64_t idist__index_frame_key(int peer, const idist__frame *f) {
    bool p2p = f->fingerprint.kind == IDIST__SEND;
    return idist__index_key(f->ctx, peer, p2p, p2p ? f->tag : f->fingerprint.seq);
}

static uint64_t idist__index_id_key(uint64_t id) { return idist__hash_mix(id, 0); }

//------------------------------------------------------------------------------
// [msg:transfer]  the life of a send or receive
// uses mem kind model fingerprint core:task core:message types op index
//------------------------------------------------------------------------------

static idist__transfer *idist__transfer_new(idist__ring *ring) {
    idist__transfer *v = ring->idle;

    if (v) {
        ring->idle = v->next;
        idist__mem_clear(v, sizeof *v);
    } else {
        v = (idist__transfer *)idist__mem_alloc(&ring->w->cfg.mem, sizeof *v);
    }

    if (v) {
        v->slot = -1;
        v->stamp = ++ring->stamp;
    }

    return v;
}

static void idist__transfer_append(idist__transfer_list *list, idist__transfer *v) {
    v->next = NULL;
    v->at = list->first ? list->end : &list->first;
    v->list = list;
    *v->at = v;
    list->end = &v->next;
}

// The same for one that frames ask for.
static void idist__transfer_put(idist__ring *ring, idist__transfer_list *list, idist__transfer *v,
                                uint64_t key) {
    idist__transfer_append(list, v);
    idist__index_insert(&v->hook, ring->transfers, key);
}

// Takes it out of its list and of the index.
static void idist__transfer_take(idist__transfer *v) {
    *v->at = v->next;
    if (v->next) v->next->at = v->at;
    else v->list->end = v->at; // NOLINT(clang-analyzer-core.NullDereference): it is in one
    v->list = NULL;
    if (v->hook.bucket) idist__index_remove(&v->hook);
}

// The transfer with this number, among those that wait for CTS, PULLED or DATA.
static idist__transfer *idist__transfer_find(idist__ring *ring, const idist__transfer_list *list,
                                             uint64_t id) {
    idist__index_node *hook = ring->transfers[idist__index_id_key(id) % IDIST__BUCKETS].first;

    for (; hook; hook = hook->next) {
        idist__transfer *v = idist__index_transfer(hook);
        if (v->list == list && v->id == id) return v;
    }

    return NULL;
}

static void idist__transfer_free(idist__ring *ring, idist__transfer *v) {
    idist__mem_free(&ring->w->cfg.mem, v->owned);
    if (v->task && idist__kind_is_p2p(v->task->call.kind)) idist__op_of(v->task)->transfer = NULL;
    v->next = ring->idle;
    ring->idle = v;
}

// A transfer is complete: completes its task, or resumes the algorithm.
static void idist__transfer_done(idist__ring *ring, idist__transfer *v) {
    idist__task *t = v->task;
    bool send = v->send;
    int slot = v->slot;
    idist__op *o;

    idist__transfer_free(ring, v);
    if (!t || t->done) return;
    ring->w->moved_count++;

    if (t->call.kind == IDIST__SEND) {
        idist__task_complete(t, IDIST_OK, "");
        return;
    }

    o = idist__op_of(t);
    if (send) o->sends_pending--;
    else o->recvs_pending--;
    if (slot >= 0) o->slots_pending &= ~(1u << slot);
    idist__op_run(t);
}

// A receive is complete, of recv or of a collective.
static void idist__transfer_received(idist__ring *ring, idist__transfer *v, int peer) {
    idist__task *t = v->task;
    int tag = (int)v->frame.tag;
    size_t count = (size_t)idist__fingerprint_count(&v->frame.fingerprint);

    if (!t || t->call.kind != IDIST__RECV) {
        idist__transfer_done(ring, v);
        return;
    }

    idist__transfer_free(ring, v);
    idist__matching_received(t, idist__ring_group_of(t->group)->rank_of[peer], tag, count);
}

//------------------------------------------------------------------------------
// [msg:failure]  failures that are noticed in the middle of something
// uses text model core:group types
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

    snprintf(cause, sizeof cause, "rank %d on %s is out of memory", w->group.rank, w->hostname);
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

//------------------------------------------------------------------------------
// [msg:combine]  reducing operands that have arrived
// uses fail mode reduce model types op failure
//------------------------------------------------------------------------------

enum { IDIST__OP_PIECE = 4096 };

// Calls the op of a program. False: the op has thrown an exception, and the group has failed.
IDIST__NOINLINE static bool idist__combine_by_user(const idist__task *t, const void *in,
                                                   void *inout, size_t count, idist_dtype dtype) {
    const idist__op *o = idist__op_of(t);
    const idist__world *w = t->group->w;
    uint32_t mode = idist__mode_enter();
    char cause[400];

    IDIST__CALLBACK(o->user->fn(in, inout, count, dtype, o->user->arg));
    idist__mode_leave(mode);
    if (!idist__me.thrown[0]) return true;

    snprintf(cause, sizeof cause, "rank %d on %s: its user op threw an exception: %s",
             w->group.rank, w->hostname, idist__me.thrown);
    idist__me.thrown[0] = 0;
    idist__ring_fail(idist__ring_of(w), t->group, IDIST_ERR_CALLBACK, cause);

    return false;
}

// acc = lo (op) hi over count elements; acc is one of them or neither. A user op works in place on
// its second operand, so where that must survive it is copied, in pieces. If the op throws, the
// group fails, and nothing more is sent for it.
static void idist__combine(const idist__task *t, char *acc, const char *lo, const char *hi,
                           size_t count, idist_dtype dtype) {
    const idist__op *o = idist__op_of(t);
    uint64_t some[IDIST__OP_PIECE / sizeof(uint64_t)];
    char *piece = o->element ? o->element : (char *)some;
    size_t at, k, most = o->element ? 1 : sizeof some / o->size;

    if (!o->user || !o->user->fn) {
        idist__reduce_by(o->reduce, acc, lo, hi, count);
        return;
    }

    if (acc == hi) {
        (void)idist__combine_by_user(t, lo, acc, count, dtype);
        return;
    }

    for (at = 0; at < count; at += k) {
        k = count - at < most ? count - at : most;
        memcpy(piece, hi + at * o->size, k * o->size);
        if (!idist__combine_by_user(t, lo + at * o->size, piece, k, dtype)) return;
        memcpy(acc + at * o->size, piece, k * o->size);
    }
}

//------------------------------------------------------------------------------
// [msg:link]  frames out of one link, credits, rendezvous
// uses os:watch socket fail mem kind model core:world core:message
// uses shm:transport types transport index transfer failure
//------------------------------------------------------------------------------

static int idist__link_rank(const idist__ring *ring, const idist__link *l) {
    return (int)(l - ring->links);
}

// Watches one descriptor for bytes and one for space, instead of those that were watched; -1: none.
// False: errno says why it cannot.
static bool idist__link_watch(const idist__ring *ring, idist__link *l, int in, int out) {
    int rank = idist__link_rank(ring, l), was[2], i;
    bool ok = true;

    if (l->watched_in == in && l->watched_out == out) return true;
    was[0] = l->watched_in;
    was[1] = l->watched_out != l->watched_in ? l->watched_out : -1;
    l->watched_in = in;
    l->watched_out = out;

    for (i = 0; i < 2; i++)
        if (was[i] >= 0 && was[i] != in && was[i] != out)
            idist__os_watch_set(ring->watch, was[i], rank, false, false);

    if (in >= 0) ok = idist__os_watch_set(ring->watch, in, rank, true, in == out);
    if (ok && out >= 0 && out != in) ok = idist__os_watch_set(ring->watch, out, rank, false, true);

    return ok;
}

// Watches what is to be read next and, while output is queued that found no space, what is to be
// written next.
static void idist__link_watch_next(idist__ring *ring, idist__link *l, bool awaits_space) {
    int in = l->transport->descriptor(l->port, false);
    int out = awaits_space ? l->transport->descriptor(l->port, true) : -1;

    if (!idist__link_watch(ring, l, in, out))
        idist__ring_fail(ring, &ring->w->group, IDIST_ERR_NO_MEMORY,
                         "a rank cannot watch its connections");
}

static void idist__link_leave_transport(idist__ring *ring, idist__link *l) {
    l->transport->close(l->port);
    if (l->polled) ring->polled_link_count--;
}

static void idist__link_close(idist__ring *ring, idist__link *l) {
    if (!l->open) return;
    l->open = false;
    if (l->corked) ring->corked_count--;
    l->corked = false;
    idist__link_watch(ring, l, -1, -1);
    idist__link_leave_transport(ring, l);
}

// Gives a link the transport that moves its bytes from now on. False: errno says why it cannot, and
// the link is as it was.
static bool idist__link_open(idist__ring *ring, idist__link *l, const idist__transport *transport,
                             void *port) {
    if (!idist__link_watch(ring, l, transport->descriptor(port, false), -1)) {
        l->watched_in = -1;
        return false;
    }

    if (l->open) idist__link_leave_transport(ring, l);
    l->transport = transport;
    l->port = port;
    l->open = true;
    l->polled = transport->polled;
    if (l->polled) ring->polled_link_count++;

    return true;
}

static bool idist__link_is_connected(const idist__link *l) {
    return l->open && l->transport != &idist__transport_none;
}

// A message is to go through this link, in either direction: asks for a connection, if there is
// none. The receiver asks too, because otherwise it would not learn that its peer has died.
static void idist__link_want(idist__ring *ring, idist__link *l) {
    if (l->wanted || !l->open || l->transport != &idist__transport_none) return;
    l->wanted = true;
    l->next_wanted = ring->wanted;
    ring->wanted = l;
}

static void idist__link_push(idist__link *l, idist__transfer *v) {
    v->next = NULL;
    v->frame_moved = v->piece_moved = 0;
    *l->out_end = v;
    l->out_end = &v->next;
}

static void idist__link_pop(idist__link *l) {
    l->out = l->out->next;
    if (!l->out) l->out_end = &l->out;
}

// Drops the control frames that were to go out, because the peer reads no more. What tasks wait for
// stays: when reading tells whether the peer was lost or has left, the tasks end with their group.
static void idist__link_write_failed(idist__ring *ring, idist__link *l) {
    idist__transfer **at = &l->out;

    l->write_dead = true;

    while (*at) {
        idist__transfer *v = *at;

        if (v->task) {
            at = &v->next;
            continue;
        }

        *at = v->next;
        idist__transfer_free(ring, v);
    }

    l->out_end = at;
}

// A frame and its payload have gone out.
static void idist__link_sent(idist__ring *ring, idist__link *l, idist__transfer *v) {
    size_t left;

    idist__link_pop(l);

    if (v->frame.type == IDIST__RTS && v->id) { // it asks for an answer
        idist__transfer_put(ring, &l->waiting, v, idist__index_id_key(v->id));
        return;
    }

    if (v->frame.type == IDIST__DATA) v->moved += v->piece;

    if (v->frame.type != IDIST__DATA || v->moved >= v->nbytes) {
        idist__transfer_done(ring, v);
        return;
    }

    left = v->nbytes - v->moved;
    v->piece = left < IDIST__PIECE_BYTES ? left : IDIST__PIECE_BYTES;
    v->frame.nbytes = v->piece;
    idist__link_push(l, v); // behind the others: a large message does not hold up small ones
}

static bool idist__link_is_out(const idist__transfer *v) {
    return v->frame_moved == IDIST__FRAME_BYTES && v->piece_moved == v->piece;
}

// Collects frames and payloads that go out next. Returns how many parts there are.
static int idist__link_gather(const idist__link *l, idist__os_part *parts) {
    idist__transfer *v;
    int n = 0;

    for (v = l->out; v && n + 2 <= IDIST__PARTS; v = v->next) {
        size_t frame_left = IDIST__FRAME_BYTES - v->frame_moved;

        if (frame_left) {
            parts[n].data = (char *)&v->frame + v->frame_moved;
            parts[n++].nbytes = frame_left;
        }

        if (v->piece_moved < v->piece) {
            parts[n].data = v->data + v->moved + v->piece_moved;
            parts[n++].nbytes = v->piece - v->piece_moved;
        }
    }

    return n;
}

// n bytes of what idist__link_gather has collected have gone out.
static void idist__link_account(const idist__link *l, size_t n) {
    idist__transfer *v;

    for (v = l->out; n; v = v->next) {
        size_t left = IDIST__FRAME_BYTES - v->frame_moved, k = n < left ? n : left;

        v->started = true;
        v->frame_moved += k;
        n -= k;
        left = v->piece - v->piece_moved;
        k = n < left ? n : left;
        v->piece_moved += k;
        n -= k;
    }
}

// Writes as much as the transport takes. A transfer that has gone out may end its task, and that
// may send more and come here again; so all that a write has moved is accounted for first.
static void idist__link_flush(idist__ring *ring, idist__link *l) {
    bool full = false;

    if (l->corked) ring->corked_count--;
    l->corked = false;
    l->corked_nbytes = 0;

    while (l->out && !l->write_dead && !full) {
        idist__os_part parts[IDIST__PARTS];
        ptrdiff_t n;

        if (idist__link_is_out(l->out)) {
            idist__link_sent(ring, l, l->out);
            continue;
        }

        n = l->transport->write(l->port, parts, idist__link_gather(l, parts));
        if (n < 0) idist__link_write_failed(ring, l);
        else idist__link_account(l, (size_t)n);
        full = n == 0;
    }

    if (l->polled) idist__link_watch_next(ring, l, full);
}

// Whether a small send that the program does not wait for may wait for the next one, so that one
// system call takes both. Only in a burst: the first send goes out at once. The others go out with
// the next progress, which comes as soon as the program waits, or the progress thread looks.
static bool idist__link_may_cork(const idist__link *l, const idist__task *t, size_t nbytes) {
    bool in_burst = t->started_ns - l->sent_ns < IDIST__CORK_NS;
    bool waits = !t->async && !idist__me.group_depth;

    return l->polled && in_burst && !waits && nbytes <= IDIST__CORK_MESSAGE &&
           l->corked_nbytes + nbytes <= IDIST__CORK_BYTES && idist__link_is_connected(l);
}

static void idist__link_cork(idist__ring *ring, idist__link *l, size_t nbytes) {
    if (!l->corked) ring->corked_count++;
    l->corked = true;
    l->corked_nbytes += nbytes + IDIST__FRAME_BYTES;
}

// The text of an ABORT goes behind its frame. Without memory for it the frame goes alone.
static void idist__link_add_text(idist__ring *ring, idist__transfer *v, const char *text) {
    size_t nbytes = strlen(text);

    v->owned = (char *)idist__mem_alloc(&ring->w->cfg.mem, nbytes + 1);

    if (v->owned) {
        memcpy(v->owned, text, nbytes);
        v->data = v->owned;
        v->nbytes = v->piece = nbytes;
    }

    v->frame.nbytes = v->nbytes;
}

// Queues a control frame, for which no task waits. `text`, if not NULL, follows it. Without a
// connection, RTS and CTS are kept until there is one. All other frames are dropped;
// idist__announce_late tells a new peer what it has missed.
static void idist__link_control(idist__ring *ring, idist__link *l, const idist__frame *f,
                                const char *text) {
    bool waits = f->type == IDIST__RTS || f->type == IDIST__CTS;
    idist__transfer *v;

    if (!l->open || l->write_dead || !(waits || idist__link_is_connected(l))) return;
    v = idist__transfer_new(ring);

    if (!v) { // the peer would wait for what the frame says
        idist_group *g = idist__world_find_group(ring->w, f->ctx);
        idist__ring_fail_memory(ring, g ? g : &ring->w->group);
        return;
    }

    v->send = true;
    v->frame = *f;
    if (text) idist__link_add_text(ring, v, text);

    idist__link_push(l, v);
    idist__link_flush(ring, l);
}

// Tells a rank that this one leaves the world, and how the world failed if it did.
static void idist__link_bye(idist__ring *ring, idist__link *l) {
    bool failed = ring->bye_status != IDIST_OK;
    idist__frame f;

    memset(&f, 0, sizeof f);
    f.type = IDIST__BYE;
    f.aux = (uint64_t)(int64_t)ring->bye_status;
    idist__link_control(ring, l, &f, failed ? ring->w->group.cause : NULL);
}

// Tells a rank that a group has failed.
static void idist__link_abort(idist__ring *ring, idist__link *l, uint64_t ctx, idist_status status,
                              const char *cause) {
    idist__frame f;

    memset(&f, 0, sizeof f);
    f.type = IDIST__ABORT;
    f.ctx = ctx;
    f.aux = (uint64_t)(int64_t)status;
    idist__link_control(ring, l, &f, cause);
}

// Eager bytes have been consumed. The sender gets them back as credit once they amount to half of
// its window.
static void idist__link_consumed(idist__ring *ring, idist__link *l, size_t nbytes) {
    idist__frame f;

    l->owed += nbytes + IDIST__FRAME_BYTES;
    if (l->owed < IDIST__WINDOW_BYTES / 2) return;

    memset(&f, 0, sizeof f);
    f.type = IDIST__CREDIT;
    f.nbytes = l->owed;
    l->their_window += l->owed;
    l->owed = 0;
    idist__link_control(ring, l, &f, NULL);
}

// Whether the peer may read messages in our memory by itself. `withdrawn` (may be NULL) gets the
// count of our withdrawn sends that its RTS has to carry.
static bool idist__link_exposes_memory(const idist__link *l, uint8_t *withdrawn) {
    return l->transport->exposes_memory && l->transport->exposes_memory(l->port, withdrawn);
}

// Whether such a read is slower than a copy through the link.
static bool idist__link_reads_slowly(const idist__link *l) {
    return l->transport->reads_slowly && l->transport->reads_slowly(l->port);
}

// Whether a message of this size goes out at once, given the credits for it.
static bool idist__link_is_eager(const idist__link *l, size_t nbytes) {
    if (nbytes <= IDIST__EAGER_EXPOSED_BYTES) return true;
    if (nbytes > IDIST__EAGER_BYTES) return false;
    return !idist__link_exposes_memory(l, NULL) || idist__link_reads_slowly(l);
}

// Whether a message of a collective is sent by grant. The same on both sides.
static bool idist__link_grants(const idist__link *l, size_t nbytes) {
    return nbytes > IDIST__EAGER_BYTES && !idist__link_exposes_memory(l, NULL);
}

// A receive has been posted whose message the peer may send at once.
static void idist__link_grant(idist__ring *ring, idist__link *l, idist__transfer *v) {
    idist__frame cts = v->frame;

    v->granted = true;
    v->id = ++ring->next_id;
    cts.type = IDIST__CTS;
    cts.aux = v->id;
    idist__link_control(ring, l, &cts, NULL);
}

// The peer has a place for a message, under this number.
static void idist__link_send_data(idist__ring *ring, idist__link *l, idist__transfer *v,
                                  uint64_t id) {
    v->frame.type = IDIST__DATA;
    v->frame.id = id;
    v->frame.aux = v->nbytes;
    v->piece = v->nbytes < IDIST__PIECE_BYTES ? v->nbytes : IDIST__PIECE_BYTES;
    v->frame.nbytes = v->piece;
    idist__link_push(l, v);
    idist__link_flush(ring, l);
}

// Whether a send of this rank has been announced and not been answered.
static bool idist__link_any_waits(const idist__ring *ring) {
    int i;

    for (i = 0; i < ring->w->group.size; i++)
        if (ring->links[i].waiting.first) return true;
    return false;
}

// Whether an announced message should come as DATA, rather than be read in the memory of its
// sender. Then two processors copy, one into the pipe and one out of it, in as little as half the
// time. The sender must be waiting in a call; this rank need not, since its thread reads the pipe
// as well. Where reads are fast, the message must be small enough for the caches, and this rank
// must have no announced send of its own. A receive with a time-out of its own is excluded: DATA
// arrives only while the sender, or its thread, keeps running.
static bool idist__link_wants_data(const idist__ring *ring, const idist__link *l,
                                   const idist__transfer *receive, const idist__frame *f) {
    if (f->fingerprint.kind != IDIST__SEND || !receive->task->patient) return false;
    if (!l->transport->attends || !l->transport->attends(l->port)) return false;
    if (idist__link_reads_slowly(l)) return true;
    return f->nbytes <= IDIST__COPIED_BYTES && !idist__link_any_waits(ring);
}

// Reads an announced message in the memory of its sender. False: that is not possible, or the
// sender may have given up meanwhile and reused the memory.
static bool idist__link_pull(idist__ring *ring, idist__link *l, int peer, idist__transfer *v,
                             const idist__frame *f) {
    idist__frame pulled;

    if (!f->aux || !l->transport->pull) return false;
    if (!l->transport->pull(l->port, f->aux, f->flags, v->data, (size_t)f->nbytes)) return false;

    memset(&pulled, 0, sizeof pulled);
    pulled.type = IDIST__PULLED;
    pulled.ctx = f->ctx;
    pulled.id = f->id;
    v->frame = *f;
    idist__link_control(ring, l, &pulled, NULL);
    idist__transfer_received(ring, v, peer);

    return true;
}

// Answers an RTS that has found its receive, which is in no list: reads the message from the
// sender's memory, or sends CTS. A granted receive has sent its CTS already and goes back to
// `posted`.
static void idist__link_answer_rts(idist__ring *ring, idist__link *l, int peer, idist__transfer *v,
                                   const idist__frame *f) {
    idist__frame cts;

    if (v->granted) {
        idist__transfer_put(ring, &l->posted, v, idist__index_frame_key(peer, f));
        return;
    }

    if (!idist__link_wants_data(ring, l, v, f) && idist__link_pull(ring, l, peer, v, f)) return;

    v->id = ++ring->next_id;
    v->nbytes = (size_t)f->nbytes;
    v->moved = 0;
    v->frame = *f;
    v->started = true;
    idist__transfer_put(ring, &l->receiving, v, idist__index_id_key(v->id));

    memset(&cts, 0, sizeof cts);
    cts.type = IDIST__CTS;
    cts.ctx = f->ctx;
    cts.id = f->id;
    cts.aux = v->id;
    idist__link_control(ring, l, &cts, NULL);
}

//------------------------------------------------------------------------------
// [msg:message]  messages that nobody has asked for yet
// uses mem core:world block types index transfer link
//------------------------------------------------------------------------------

static void idist__message_free(idist__ring *ring, idist__link *l, idist__message *m) {
    *m->at = m->next;
    if (m->next) m->next->at = m->at;
    else l->early_end = m->at;
    idist__index_remove(&m->hook);

    if (l->in_message == m) {
        l->in_message = NULL;
        l->target = NULL;
    }

    if (m->unknown) l->unknown_count--;
    idist__mem_free(&ring->w->cfg.mem, m);
}

// Drops the oldest message of a rank for groups that do not exist here. Correct programs leave some
// behind, for groups that were freed before all had arrived; so too many of them are no error.
static void idist__message_drop_unknown(idist__ring *ring, idist__link *l) {
    idist__message *m = l->early;
    bool complete;
    size_t nbytes;

    while (m && (!m->unknown || m == l->in_message)) m = m->next;
    if (!m) return;

    complete = m->frame.type == IDIST__EAGER && m->moved == m->frame.nbytes;
    nbytes = (size_t)m->frame.nbytes;
    idist__message_free(ring, l, m);
    if (complete) idist__link_consumed(ring, l, nbytes);
}

// The group, if it is one of those that were closed last; else NULL.
static const idist__closed *idist__message_find_closed(const idist__ring *ring, uint64_t ctx) {
    uint32_t i;

    for (i = 0; i < IDIST__CLOSED && i < ring->nclosed; i++)
        if (ring->closed[i].ctx == ctx) return &ring->closed[i];

    return NULL;
}

// Allocates a message that begins with this frame, with a buffer of `payload` bytes. NULL: out of
// memory.
static idist__message *idist__message_new(idist__ring *ring, idist__link *l, const idist__frame *f,
                                          size_t payload) {
    idist__message *m = (idist__message *)idist__mem_raw(&ring->w->cfg.mem, sizeof *m + payload);

    if (!m) return NULL;
    idist__mem_clear(m, sizeof *m);
    m->frame = *f;
    m->data = (char *)(m + 1);
    m->stamp = ++ring->stamp;
    m->peer = idist__link_rank(ring, l);

    m->unknown = !idist__world_find_group(ring->w, f->ctx);
    if (m->unknown && ++l->unknown_count > IDIST__UNKNOWN_MAX) idist__message_drop_unknown(ring, l);

    m->at = l->early_end;
    *l->early_end = m;
    l->early_end = &m->next;
    idist__index_insert(&m->hook, ring->messages, idist__index_frame_key(m->peer, f));

    return m;
}

// No receive has taken a message. If a matched probe has found it, its tag is new, and so is its
// key.
static void idist__message_rekey(idist__ring *ring, idist__message *m, uint32_t old_tag) {
    if (m->frame.tag == old_tag) return;
    idist__index_remove(&m->hook);
    idist__index_insert(&m->hook, ring->messages, idist__index_frame_key(m->peer, &m->frame));
}

// Gives a message to a receive. The payload of an eager one may still be arriving.
static void idist__message_give(idist__ring *ring, idist__link *l, int peer, idist__message *m,
                                idist__transfer *v) {
    v->frame = m->frame;

    if (m->self_send) {
        idist__transfer *sender = m->self_send;
        idist__block_copy(v->data, sender->data, sender->nbytes);
        idist__message_free(ring, l, m);
        idist__transfer_done(ring, sender);
        idist__transfer_received(ring, v, peer);
    } else if (m->frame.type == IDIST__RTS) {
        idist__frame f = m->frame;
        idist__message_free(ring, l, m);
        idist__link_answer_rts(ring, l, peer, v, &f);
    } else if (m->moved < m->frame.nbytes) {
        m->claim = v;
    } else {
        size_t nbytes = (size_t)m->frame.nbytes;
        idist__block_copy(v->data, m->data, nbytes);
        idist__message_free(ring, l, m);
        if (peer != ring->w->group.rank) idist__link_consumed(ring, l, nbytes);
        idist__transfer_received(ring, v, peer);
    }
}

//------------------------------------------------------------------------------
// [msg:history]  whether two ranks make the same calls
// uses launch:env model fingerprint explain types op failure
//
// Every frame and every slot of a collective carries the fingerprint of its call, which is compared
// with ours. That alone is not enough: a rank may complete a call in which it only sends, and the
// next one too, before it has read the frame that differs. So frames and slots also carry a digest
// of all calls before (`past`): any rank that gets a later one can tell.
//------------------------------------------------------------------------------

// Two ranks are in different calls: the group fails on all of them.
static void idist__history_mismatch(idist__ring *ring, idist_group *g, int peer,
                                    const idist__fingerprint *theirs,
                                    const idist__fingerprint *ours, const char *field) {
    char cause[400];
    int me = ring->w->group.rank;

    if (me < peer)
        idist__explain_mismatch(ring->w, field, me, ours, peer, theirs, cause, sizeof cause);
    else idist__explain_mismatch(ring->w, field, peer, theirs, me, ours, cause, sizeof cause);
    idist__ring_fail(ring, g, IDIST_ERR_MISMATCH, cause);
}

// The digest of the calls before a new one. That of a part also covers the calls before its parent.
static uint16_t idist__history_past(const idist__task *t) {
    return (uint16_t)(idist__ring_group_of(t->group)->digest ^ t->parent_past);
}

// Adds a call to the history; `past` is the digest of those before it.
static void idist__history_append(idist__ring_group *rg, const idist__fingerprint *fingerprint,
                                  uint16_t past) {
    uint32_t index = fingerprint->seq % IDIST__HISTORY;
    uint32_t words[2]; // kind, dtype, op and algorithm; root: with these a fingerprint begins
    uint64_t what;

    memcpy(words, fingerprint, sizeof words);
    words[1] &= IDIST__ROOT_MASK; // whether a rank uses a plan is no difference
    memcpy(&what, words, sizeof what);
    what = (what ^ rg->digest) * 0x9e3779b97f4a7c15u;

    rg->past[index] = past;
    rg->history[index] = *fingerprint;
    rg->digest = (uint16_t)(((what ^ what >> 32) + fingerprint->check) * 0xd6e8feb86659fd93u >> 48);
}

// A call begins: adds it to the history.
static void idist__history_add(idist__task *t, idist__op *o, idist__algorithm algorithm) {
    idist__fingerprint fingerprint = idist__fingerprint_of_task(t, algorithm);

    o->past = idist__history_past(t);
    idist__history_append(idist__ring_group_of(t->group), &fingerprint, o->past);
}

// What this rank called before the call with this fingerprint, on the group that the user knows.
// NULL: that is forgotten.
static const idist__fingerprint *idist__history_before(const idist_group *g,
                                                       const idist__fingerprint *fingerprint) {
    uint32_t seq = (fingerprint->whole ? fingerprint->whole : fingerprint->seq) - 1;
    const idist__fingerprint *before;

    if (fingerprint->whole) g = idist__ring_group_of(g)->whole;
    if (!g) return NULL;
    before = &idist__ring_group_of(g)->history[seq % IDIST__HISTORY];
    return before->seq == seq ? before : NULL;
}

// Writes the digest to a frame. id and aux are free in EAGER: there they tell the previous call, if
// it is still known, for the error text of the receiver.
static void idist__history_tell_past(const idist__task *t, idist__frame *f) {
    const idist__fingerprint *before;

    f->past = idist__op_of(t)->past;
    if (f->type != IDIST__EAGER) return;
    before = idist__history_before(t->group, &f->fingerprint);
    if (!before) return;

    memcpy(&f->id, before, sizeof f->id);
    f->aux = before->check;
}

// Two ranks are in the same call, and made different calls before. `theirs` is the peer's previous
// call, if its kind is not 0.
static void idist__history_differs_before(idist__ring *ring, idist_group *g, int peer,
                                          const idist__fingerprint *fingerprint,
                                          const idist__fingerprint *theirs) {
    const idist__fingerprint *before = idist__history_before(g, fingerprint);
    const char *field =
        before && theirs->kind ? idist__fingerprint_difference(theirs, before) : NULL;

    if (field) {
        idist__history_mismatch(ring, g, peer, theirs, before, field);
        return;
    }

    idist__history_mismatch(ring, g, peer, fingerprint, fingerprint, "sequence of calls before it");
}

// The same, found out from a frame. See idist__history_tell_past.
static void idist__history_past_differs(idist__ring *ring, idist_group *g, int peer,
                                        const idist__frame *f) {
    const idist__fingerprint *before = idist__history_before(g, &f->fingerprint);
    idist__fingerprint theirs;

    memset(&theirs, 0, sizeof theirs);

    if (before && f->type == IDIST__EAGER) {
        theirs = *before; // for its sequence number
        memcpy(&theirs, &f->id, sizeof f->id);
        theirs.check = f->aux;
    }

    idist__history_differs_before(ring, g, peer, &f->fingerprint, &theirs);
}

// Compares a frame of a collective with our call of the same number, running or finished. False: a
// mismatch. A frame for a call that we have not entered tells nothing yet.
static bool idist__history_agrees(idist__ring *ring, idist_group *g, int peer,
                                  const idist__frame *f) {
    idist__ring_group *rg = idist__ring_group_of(g);
    idist__seen *seen = &rg->seen[rg->rank_of[peer]];
    const idist__fingerprint *ours = &rg->history[f->fingerprint.seq % IDIST__HISTORY];
    const idist__task *t = ring->w->tasks;
    bool is_message = f->type <= IDIST__RTS || f->type == IDIST__DATA;
    const char *field;

    if ((int32_t)(f->fingerprint.seq - seen->seq) >= 0) {
        seen->seq = f->fingerprint.seq;
        seen->fingerprint = f->fingerprint;
    }

    if ((int32_t)(f->fingerprint.seq - g->seq) > 0 || ours->seq != f->fingerprint.seq) return true;

    // A message is left over from a finished call that looked the same: the calls were not the same
    // after all.
    field = idist__fingerprint_difference(&f->fingerprint, ours);
    while (t && (t->group != g || t->seq != f->fingerprint.seq)) t = t->next;
    if (!field && is_message && !t) field = "sequence";

    if (field) {
        idist__history_mismatch(ring, g, peer, &f->fingerprint, ours, field);
        return false;
    }

    if (is_message && f->past != rg->past[ours->seq % IDIST__HISTORY]) {
        idist__history_past_differs(ring, g, peer, f);
        return false;
    }

    return true;
}

//------------------------------------------------------------------------------
// [msg:match]  which receive gets which message
// uses base:type kind model core:world fingerprint explain core:task extent
// uses core:message types index transfer failure history
//
// Messages of send / recv match the oldest receive of the group that wants this source and tag.
// Steps of a collective match the receive of the same call and step.
//------------------------------------------------------------------------------

// The oldest receive of recv that wants this message, or NULL.
static idist__transfer *idist__match_oldest(idist__ring *ring, const idist_group *g, int peer,
                                            const idist__frame *f) {
    idist__ring_group *rg = idist__ring_group_of(g);
    idist__transfer *wild = rg->wild.first, *exact = NULL;
    idist__index_node *hook = NULL;

    if (rg->recvs.first)
        hook = ring->transfers[idist__index_frame_key(peer, f) % IDIST__BUCKETS].first;

    for (; hook && !exact; hook = hook->next) {
        idist__transfer *v = idist__index_transfer(hook);
        if (v->list == &rg->recvs && idist__matching_matches(v->task, peer, (int)f->tag)) exact = v;
    }

    while (wild && !idist__matching_matches(wild->task, peer, (int)f->tag)) wild = wild->next;

    return !exact || (wild && wild->stamp < exact->stamp) ? wild : exact;
}

// Takes the receive that gets this message out of its list. Receives for which the message is too
// large, or of another dtype, fail; the message stays, perhaps with a new tag.
static idist__transfer *idist__match_recv(idist__ring *ring, idist_group *g, int peer,
                                          idist__frame *f) {
    idist__transfer *v;

    while ((v = idist__match_oldest(ring, g, peer, f)) != NULL) {
        int from = idist__ring_group_of(g)->rank_of[peer], tag = (int)f->tag;
        idist_status status;
        char text[256];

        idist__transfer_take(v);

        if (idist__matching_fits(v->task, &f->fingerprint, from, &tag, &status, text,
                                 sizeof text)) {
            if (f->nbytes <= v->nbytes) return v;
            status = IDIST_ERR_MISMATCH; // two dtypes of the program whose tags happen to be equal
            if (v->task->call.u.message) v->task->call.u.message->group = g; // it keeps the message
            snprintf(text, sizeof text, "rank %d has defined the dtype differently", from);
        }

        f->tag = (uint32_t)tag;
        idist__task_complete(v->task, status, text);
        idist__transfer_free(ring, v);
    }

    return NULL;
}

// Takes the send or receive of a collective that this frame is for out of a list of its link.
static idist__transfer *idist__match_step(idist__ring *ring, const idist__transfer_list *list,
                                          int peer, const idist__frame *f) {
    idist__index_node *hook =
        ring->transfers[idist__index_frame_key(peer, f) % IDIST__BUCKETS].first;

    for (; hook; hook = hook->next) {
        idist__transfer *v = idist__index_transfer(hook);
        if (v->list != list || v->frame.ctx != f->ctx) continue;
        if (v->frame.fingerprint.seq != f->fingerprint.seq || v->frame.tag != f->tag) continue;
        idist__transfer_take(v);
        return v;
    }

    return NULL;
}

// Whether a receive of a collective expects what a frame brings. In all_to_allv every pair of ranks
// may have a dtype of its own.
static bool idist__match_agrees(const idist__transfer *v, const idist__frame *f) {
    bool same_dtype = v->frame.fingerprint.dtype == f->fingerprint.dtype &&
                      v->frame.fingerprint.check == f->fingerprint.check;
    return v->nbytes == f->nbytes && (same_dtype || !v->nbytes);
}

static void idist__match_explain(const idist__transfer *v, int peer, const idist__frame *f,
                                 char *cause, size_t cap) {
    const idist__task *t = v->task;
    const idist__world *w = t->group->w;
    bool same_number = v->frame.fingerprint.dtype == f->fingerprint.dtype;
    bool same_definition = v->frame.fingerprint.check == f->fingerprint.check;
    idist__call theirs = t->call;
    int me = w->group.rank, from = idist__ring_group_of(t->group)->rank_of[peer];
    size_t size;

    theirs.dtype = idist__world_dtype(w, f->fingerprint.dtype);
    size = idist_dtype_size(theirs.dtype);

    if (t->call.kind == IDIST__ALL_TO_ALLV && size && (same_definition || !same_number))
        idist__explain_pair(peer, idist__fingerprint_pair(w, &theirs, f->nbytes / size), me,
                            idist__extent_pair(t->group, &t->call, from, false), t, cause, cap);
    else
        idist__explain_sizes(same_definition ? "count" : "definition of the dtype", peer, f->nbytes,
                             me, v->nbytes, t, cause, cap);
}

// The receive for a frame that begins a message. NULL: none is posted yet, or the group has failed.
static idist__transfer *idist__match_frame(idist__ring *ring, idist__link *l, int peer,
                                           idist__frame *f) {
    idist_group *g = idist__world_find_group(ring->w, f->ctx);
    idist__transfer *v;
    char cause[400];

    if (!g || g->status != IDIST_OK) return NULL;
    if (f->fingerprint.kind == IDIST__SEND) return idist__match_recv(ring, g, peer, f);
    if (!idist__history_agrees(ring, g, peer, f)) return NULL;

    v = idist__match_step(ring, &l->posted, peer, f);
    if (!v || idist__match_agrees(v, f)) return v;

    idist__match_explain(v, peer, f, cause, sizeof cause);
    idist__transfer_put(ring, &l->posted, v, idist__index_frame_key(peer, f));
    idist__ring_fail(ring, g, IDIST_ERR_MISMATCH, cause);

    return NULL;
}

// The receive for the first DATA of a message; the caller checks that it granted this number. NULL:
// none, or the group has failed.
static idist__transfer *idist__match_granted(idist__ring *ring, idist__link *l, int peer,
                                             const idist__frame *f) {
    idist__frame whole = *f;
    idist__transfer *v;

    if (f->fingerprint.kind == IDIST__SEND) return NULL; // its receive was cancelled
    whole.nbytes = f->aux;
    v = idist__match_frame(ring, l, peer, &whole);
    if (v) idist__transfer_put(ring, &l->receiving, v, idist__index_id_key(v->id));

    return v;
}

//------------------------------------------------------------------------------
// [msg:send]  posting sends
// uses cpu os:thread base:type kind model fingerprint core:task core:group
// uses block core:message types op index transfer failure link message history
// uses match
//------------------------------------------------------------------------------

// The CTS for a message of a collective that came before its send was posted, or NULL.
static idist__message *idist__send_find_grant(idist__ring *ring, int peer, const idist__frame *f) {
    idist__index_node *hook =
        ring->messages[idist__index_frame_key(peer, f) % IDIST__BUCKETS].first;

    for (; hook; hook = hook->next) {
        idist__message *m = idist__index_message(hook);

        if (m->frame.type != IDIST__CTS || m->peer != peer || m->frame.ctx != f->ctx) continue;
        if (m->frame.fingerprint.seq == f->fingerprint.seq && m->frame.tag == f->tag) return m;
    }

    return NULL;
}

// Sends a large message of a collective once the receiver has granted it.
static void idist__send_by_grant(idist__task *t, int peer, idist__transfer *v) {
    idist__ring *ring = idist__ring_of(t->group->w);
    idist__link *l = &ring->links[peer];
    idist__message *grant = idist__send_find_grant(ring, peer, &v->frame);
    const idist__transfer *oldest = l->waiting.first;
    idist__frame rts = v->frame;

    if (grant) {
        uint64_t id = grant->frame.aux;
        idist__message_free(ring, l, grant);
        idist__link_send_data(ring, l, v, id);
        return;
    }

    idist__transfer_put(ring, &l->waiting, v, idist__index_frame_key(peer, &v->frame));
    if (oldest && oldest->task == t) return; // whose RTS has told the peer of this call
    rts.type = IDIST__RTS;
    idist__link_control(ring, l, &rts, NULL);
}

// How a message goes: at once, once it is granted, or once it is asked for.
static void idist__send_choose(idist__ring *ring, idist__link *l, idist__transfer *v) {
    size_t nbytes = v->nbytes;

    if (v->frame.fingerprint.kind != IDIST__SEND && idist__link_grants(l, nbytes)) {
        v->frame.type = IDIST__DATA;
    } else if (idist__link_is_eager(l, nbytes) && l->window >= nbytes + IDIST__FRAME_BYTES) {
        v->frame.type = IDIST__EAGER;
        v->piece = nbytes;
        l->window -= nbytes + IDIST__FRAME_BYTES;
    } else {
        v->frame.type = IDIST__RTS;
        v->id = v->frame.id = ++ring->next_id;
        if (idist__link_exposes_memory(l, &v->frame.flags))
            v->frame.aux = (uint64_t)(uintptr_t)v->data;
    }
}

static void idist__send_post(idist__task *t, int world_rank, uint32_t tag, const void *data,
                             size_t nbytes, const idist__fingerprint *fingerprint) {
    idist__ring *ring = idist__ring_of(t->group->w);
    idist__link *l = &ring->links[world_rank];
    idist__transfer *v;

    if (ring->failed == t->group) return; // what there is to send may be wrong

    v = idist__transfer_new(ring);

    if (!v) {
        idist__ring_fail_memory(ring, t->group);
        return;
    }

    v->task = t;
    v->send = true;
    v->data = (char *)(uintptr_t)data;
    v->nbytes = nbytes;
    v->frame.ctx = t->group->ctx;
    v->frame.tag = tag;
    v->frame.fingerprint = *fingerprint;
    v->frame.nbytes = nbytes;

    if (fingerprint->kind == IDIST__SEND) {
        l->p2p_sent++;
        idist__op_of(t)->transfer = v;
    }

    idist__send_choose(ring, l, v);
    if (fingerprint->kind != IDIST__SEND) idist__history_tell_past(t, &v->frame);

    if (!l->open || l->write_dead) {
        idist__link_push(l, v); // its task ends with its group: that rank was lost, or has left
        return;
    }

    idist__link_want(ring, l);

    if (v->frame.type == IDIST__DATA) {
        idist__send_by_grant(t, world_rank, v);
        return;
    }

    idist__link_push(l, v);

    if (fingerprint->kind == IDIST__SEND) {
        bool may_wait = v->frame.type == IDIST__EAGER && idist__link_may_cork(l, t, nbytes);

        l->sent_ns = t->started_ns;

        if (may_wait) {
            idist__link_cork(ring, l, nbytes);
            return;
        }
    }

    idist__link_flush(ring, l);
}

// A step of a collective: nbytes go to a rank of the group.
static void idist__send_step(idist__task *t, int to, uint32_t step, const void *data,
                             size_t nbytes) {
    idist__op *o = idist__op_of(t);
    idist__fingerprint fingerprint = idist__op_fingerprint(t);

    o->sends_pending++;
    idist__send_post(t, idist__group_world_rank(t->group, to), step, data, nbytes, &fingerprint);
}

// A message to ourselves waits among the unexpected ones of our own link. A small one is copied; of
// a large one the receive copies from the sender's buffer.
static void idist__send_to_self(idist__task *t, const idist__fingerprint *fingerprint) {
    idist__ring *ring = idist__ring_of(t->group->w);
    int me = ring->w->group.rank;
    idist__link *l = &ring->links[me];
    size_t nbytes = t->call.count * idist_dtype_size(t->call.dtype);
    bool eager = nbytes <= IDIST__EAGER_BYTES;
    idist__transfer *sender = eager ? NULL : idist__transfer_new(ring), *v;
    idist__message *m;
    idist__frame f;

    memset(&f, 0, sizeof f);
    f.type = IDIST__EAGER;
    f.ctx = t->group->ctx;
    f.tag = (uint32_t)t->call.tag;
    f.fingerprint = *fingerprint;
    f.nbytes = nbytes;
    m = idist__message_new(ring, l, &f, eager ? nbytes : 0);

    if (!m || (!eager && !sender)) {
        if (m) idist__message_free(ring, l, m);
        if (sender) idist__transfer_free(ring, sender);
        idist__task_complete(t, IDIST_ERR_NO_MEMORY, "out of memory");
        return;
    }

    m->moved = nbytes;

    if (eager) {
        idist__block_copy(m->data, t->call.send, nbytes);
        idist__task_complete(t, IDIST_OK, "");
    } else {
        sender->task = t;
        sender->send = true;
        sender->data = (char *)(uintptr_t)t->call.send;
        sender->nbytes = nbytes;
        m->self_send = sender;
    }

    v = idist__match_recv(ring, t->group, me, &m->frame);
    if (v) idist__message_give(ring, l, me, m, v);
    else idist__message_rekey(ring, m, f.tag);
}

static idist__fingerprint idist__send_fingerprint(const idist_group *g, const idist__call *c) {
    idist__fingerprint fingerprint;

    memset(&fingerprint, 0, sizeof fingerprint);
    fingerprint.kind = IDIST__SEND;
    fingerprint.dtype = (uint8_t)c->dtype;
    fingerprint.check = idist__fingerprint_tagged(g->w, c, c->count);
    fingerprint.root = g->rank;

    return fingerprint;
}

static void idist__send_start(idist__task *t) {
    const idist__call *c = &t->call;
    idist__fingerprint fingerprint = idist__send_fingerprint(t->group, c);

    if (c->root == t->group->rank) {
        idist__send_to_self(t, &fingerprint);
        return;
    }

    idist__send_post(t, idist__group_world_rank(t->group, c->root), (uint32_t)c->tag, c->send,
                     c->count * idist_dtype_size(c->dtype), &fingerprint);
}

// Waits a moment for another rank, in a call that needs nothing but that rank. False: it has waited
// long enough, or others need the lock; the call has to go on as a task.
static bool idist__send_quick_wait(const idist__ring *ring, int turns) {
    const idist__world *w = ring->w;
    int most = w->spin_ns ? (int)(w->spin_budget_ns / IDIST__TURN_NS) : IDIST__QUICK_YIELDS;

    if (ring->failed || __atomic_load_n(&w->lock_waiter_count, __ATOMIC_RELAXED)) return false;
    if (turns >= most) return false;
    if (w->spin_ns) idist__os_cpu_relax();
    else idist__os_thread_yield();

    return true;
}

// A send goes out at once if the transport takes all of it, and no earlier one waits for space.
// Needs no task, transfer or clock.
static bool idist__send_quick(idist_group *g, const idist__call *c) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__link *l = &ring->links[idist__group_world_rank(g, c->root)];
    idist__frame f;

    if (!l->open || !l->transport->write_message || l->out || l->write_dead) return false;
    if (ring->failed || c->count > IDIST__EAGER_BYTES) return false;

    memset(&f, 0, sizeof f);
    f.type = IDIST__EAGER;
    f.ctx = g->ctx;
    f.tag = (uint32_t)c->tag;
    f.fingerprint = idist__send_fingerprint(g, c);
    f.nbytes = c->count * idist_dtype_size(c->dtype);

    if (!idist__link_is_eager(l, (size_t)f.nbytes)) return false;
    if (l->window < f.nbytes + sizeof f) return false;

    if (!l->transport->write_message(l->port, &f, c->send, (size_t)f.nbytes)) return false;

    l->window -= (size_t)f.nbytes + sizeof f;
    l->p2p_sent++;

    return true;
}

//------------------------------------------------------------------------------
// [msg:recv]  posting receives
// uses base:type kind model core:task core:group core:message types op index
// uses transfer failure link message match send
//------------------------------------------------------------------------------

// A step of a collective: nbytes come from a rank of the group, into slot 0 .. 31 (-1: only
// counted).
static void idist__recv_step(idist__task *t, int slot, int from, uint32_t step, void *data,
                             size_t nbytes) {
    idist__op *o = idist__op_of(t);
    idist__ring *ring = idist__ring_of(t->group->w);
    int peer = idist__group_world_rank(t->group, from);
    idist__link *l = &ring->links[peer];
    idist__transfer *v = idist__transfer_new(ring);
    idist__index_node *hook;
    uint64_t key;

    o->recvs_pending++;
    if (slot >= 0) o->slots_pending |= 1u << slot;

    if (!v) {
        idist__ring_fail_memory(ring, t->group);
        return;
    }

    v->task = t;
    v->slot = slot;
    v->data = (char *)data;
    v->nbytes = nbytes;
    v->frame.ctx = t->group->ctx;
    v->frame.tag = step;
    v->frame.fingerprint = idist__op_fingerprint(t);
    key = idist__index_key(v->frame.ctx, peer, false, t->seq);
    idist__transfer_put(ring, &l->posted, v, key);
    idist__link_want(ring, l);
    if (idist__link_grants(l, nbytes)) idist__link_grant(ring, l, v);

    for (hook = ring->messages[key % IDIST__BUCKETS].first; hook; hook = hook->next) {
        idist__message *m = idist__index_message(hook);

        if (m->peer != peer || m->claim || m->frame.ctx != v->frame.ctx) continue;
        if (m->frame.fingerprint.kind == IDIST__SEND || m->frame.type > IDIST__RTS) continue;
        if (m->frame.fingerprint.seq != t->seq || m->frame.tag != step) continue;
        v = idist__match_frame(ring, l, peer, &m->frame);
        if (v) idist__message_give(ring, l, peer, m, v);
        return;
    }
}

// The link from which a receive may take the next message itself. NULL: there is none.
static idist__link *idist__recv_link(const idist_group *g, const idist__call *c) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__link *l = c->root >= 0 ? &ring->links[idist__group_world_rank(g, c->root)] : NULL;

    if (!l || !l->open || !l->transport->peek_header) return NULL;

    return l->early || l->in_moved || l->ended || ring->failed ? NULL : l;
}

// Whether a receive takes the message that begins with this frame, as it is. Otherwise it has to go
// on as a task.
static bool idist__recv_wants(const idist_group *g, const idist__call *c, const idist__link *l,
                              const idist__frame *f) {
    if (f->type != IDIST__EAGER || f->ctx != g->ctx || f->fingerprint.kind != IDIST__SEND)
        return false;
    if (f->fingerprint.dtype != (int)c->dtype || f->fingerprint.check > c->count) return false;
    if (!idist__matching_has_tag(c, (int)f->tag)) return false;
    if (f->nbytes > IDIST__EAGER_BYTES || f->nbytes + sizeof *f > l->their_window) return false;

    return f->nbytes == f->fingerprint.check * idist_dtype_size(c->dtype);
}

// Accounts for a message that a receive has taken.
static void idist__recv_taken(idist__ring *ring, const idist__call *c, idist__link *l,
                              const idist__frame *f) {
    l->p2p_received++;
    l->peer_waits.type = 0;
    l->their_window -= (size_t)f->nbytes + sizeof *f;
    idist__link_consumed(ring, l, (size_t)f->nbytes);
    idist__matching_describe(c, c->root, (int)f->tag, c->dtype, (size_t)f->fingerprint.check);
}

// Takes the message with this header out of the link, if the receive wants it and it is there
// completely.
static bool idist__recv_take(const idist_group *g, const idist__call *c, idist__link *l,
                             const idist__frame *f) {
    if (!idist__recv_wants(g, c, l, f)) return false;
    if (!l->transport->read_message(l->port, c->recv, (size_t)f->nbytes)) return false;
    idist__recv_taken(idist__ring_of(g->w), c, l, f);

    return true;
}

// A blocking receive while nothing else is under way: waits a moment for its message, and takes it
// if it is the next one and there completely.
static bool idist__recv_quick(const idist_group *g, const idist__call *c) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__link *l = idist__recv_link(g, c);
    idist__frame f;
    int turns;

    if (!l) return false;
    for (turns = 0; !l->transport->peek_header(l->port, &f); turns++)
        if (!idist__send_quick_wait(ring, turns)) return false;

    return idist__recv_take(g, c, l, &f);
}

// Whether a receive of recv wants this message, as one from world rank `from`.
static bool idist__recv_takes(const idist__task *t, const idist__message *m, int from) {
    if (m->peer != from || m->claim || m->frame.type > IDIST__RTS) return false;
    if (m->frame.fingerprint.kind != IDIST__SEND || m->frame.ctx != t->group->ctx) return false;
    return idist__matching_matches(t, from, (int)m->frame.tag);
}

// The first message of a rank that a receive wants: messages of one rank keep their order.
static idist__message *idist__recv_first(idist__ring *ring, const idist__task *t, int from) {
    idist__message *m = ring->links[from].early;
    idist__index_node *hook;
    uint64_t key = idist__index_key(t->group->ctx, from, true, (uint32_t)t->call.tag);

    if (!m || t->call.tag == IDIST_ANY_TAG) {
        while (m && !idist__recv_takes(t, m, from)) m = m->next;
        return m;
    }

    hook = ring->messages[key % IDIST__BUCKETS].first;
    while (hook && !idist__recv_takes(t, idist__index_message(hook), from)) hook = hook->next;

    return hook ? idist__index_message(hook) : NULL;
}

// Puts a receive of recv into the list for its kind.
static void idist__recv_post(idist__ring *ring, idist__task *t, idist__transfer *v) {
    idist__ring_group *rg = idist__ring_group_of(t->group);
    int root = t->call.root;
    uint64_t key;

    if (root >= 0) idist__link_want(ring, &ring->links[t->group->ranks[root]]);

    if (root == IDIST_ANY_SOURCE || t->call.tag == IDIST_ANY_TAG) {
        idist__transfer_append(&rg->wild, v);
        return;
    }

    key = idist__index_key(t->group->ctx, t->group->ranks[root], true, (uint32_t)t->call.tag);
    idist__transfer_put(ring, &rg->recvs, v, key);
}

// Posts a receive of recv, and gives it the earliest message that it wants, over all links that one
// may come from.
static void idist__recv_start(idist__task *t) {
    idist__ring *ring = idist__ring_of(t->group->w);
    idist__transfer *v = idist__transfer_new(ring);
    idist__message *m, *earliest = NULL;
    int from = t->call.root, end = from + 1;
    uint32_t tag;

    if (!v) {
        idist__task_complete(t, IDIST_ERR_NO_MEMORY, "out of memory");
        return;
    }

    v->task = t;
    v->data = (char *)t->call.recv;
    v->nbytes = t->call.count * idist_dtype_size(t->call.dtype);
    idist__op_of(t)->transfer = v;
    idist__recv_post(ring, t, v);

    if (from == IDIST_ANY_SOURCE) {
        from = 0;
        end = t->group->size;
    }

    for (; from < end; from++) {
        m = idist__recv_first(ring, t, t->group->ranks[from]);
        if (m && (!earliest || m->stamp < earliest->stamp)) earliest = m;
    }

    if (!earliest) return;
    // Older receives did not want it, so it goes to this one, or this one fails.
    tag = earliest->frame.tag;
    v = idist__match_recv(ring, t->group, earliest->peer, &earliest->frame);
    if (v) idist__message_give(ring, &ring->links[earliest->peer], earliest->peer, earliest, v);
    else idist__message_rekey(ring, earliest, tag);
}

#endif // IDIST_MSG_H
