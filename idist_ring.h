/* idist_ring.h - v0.1.0 - the ring backend of idist: ranks on one host or many - MIT licence

DO THIS

    Nothing: idist.h includes this header at its end. Define IDIST_NO_RING to leave it out.

WHAT IT IS

    Every rank has one stream to every other: a pipe in shared memory inside a host (or a local socket), TCP between
    hosts. Messages up to 64 KiB (8 KiB through shared memory) go out at once (eager) within a window of 1 MiB that the
    receiver has to keep; larger ones are announced and sent when the receiver has named a place for them, or read by it
    in the sender's memory (rendezvous), so nothing is ever buffered without bound. Every message carries the
    fingerprint of the call it belongs to.

    A collective of ranks that share memory goes through places where all can read ([ring:share]). Otherwise it is an
    algorithm over non-blocking sends and receives of the group's ranks ([ring:algo]); it never sees a socket, and it
    is called again whenever one of them is through.

CONTENTS

      [ring:api]        the backend's entry in IDIST_BACKENDS
      [ring:types]      links, verbs, messages: what the sections below share
      [ring:transport]  bytes over stream sockets
      [ring:shm]        memory that the ranks of one host share
      [ring:op]         a collective under way, and the macros that let an algorithm wait
      [ring:link]       frames in and out of one connection
      [ring:match]      which receive gets which message, and whether two calls are the same
      [ring:verb]       the non-blocking verbs: send and receive
      [ring:algo]       the collectives
      [ring:choose]     which algorithm, with which scratch
      [ring:share]      collectives of ranks that share memory
      [ring:host]       groups over several hosts: inside each host first
      [ring:engine]     frames arrive, tasks start and end, waits are announced
      [ring:join]       how the ranks meet, connect to each other, and part

    The algorithms can be read by themselves; begin there to learn how collectives work.

LIMITS

    n ranks need n descriptors each, and rank 0 about 2n + 8 while they meet. A dead machine (as opposed to a dead
    process) is noticed by the time-out only.
    Over several hosts gather, scatter, all_to_all, scan, the v-forms, and reductions of floats of 16 and 8 bits or
    in a fixed order, are made of messages among all.

    Licence: MIT, as idist.h.
*/
#ifndef IDIST_H
#include "idist.h"
#endif
#ifndef IDIST_RING_H
#define IDIST_RING_H

#ifdef __cplusplus
extern "C" {
#endif

//------------------------------------------------------------------------------
// [ring:api]  the backend's entry in IDIST_BACKENDS
//------------------------------------------------------------------------------

// Any number of ranks, on one host or several; CPU memory.
IDIST_API const idist_backend_api *idist_ring_backend(void);

#undef IDIST__ENTRY_RING
#define IDIST__ENTRY_RING idist_ring_backend()

#ifdef __cplusplus
} // extern "C"
#endif

#endif // IDIST_RING_H

// Only here for the API? Stop reading.

#if defined(IDIST_IMPLEMENTATION) && !defined(IDIST_RING_IMPLEMENTATION_DONE)
#define IDIST_RING_IMPLEMENTATION_DONE

// Where all of a program is one file, a header of its system may have made macros of these words,
// as windows.h does.
#pragma push_macro("near")
#undef near
#pragma push_macro("far")
#undef far
#pragma push_macro("small")
#undef small
#pragma push_macro("lock")
#undef lock

// Programs in C++ may be compiled with these warnings; code that is C as well cannot do without
// such casts.
#if defined(__cplusplus) && defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wold-style-cast"
#pragma GCC diagnostic ignored "-Wzero-as-null-pointer-constant"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wuseless-cast"
#endif
#endif

#define IDIST__COUNT_OF(a) (sizeof(a) / sizeof((a)[0]))

#ifdef __cplusplus
extern "C" {
#endif

//------------------------------------------------------------------------------
// [ring:types]  links, verbs, messages: what the sections below share
// used by transport link verb engine algo join
//------------------------------------------------------------------------------

// A frame is 64 bytes, in the byte order that the handshake found equal on both sides; nbytes of payload may follow.
//
//   type   what follows                  fields used besides ctx
//   EAGER  a whole message               print, tag, nbytes; past, and in id and aux what the call before was
//   RTS    nothing: a message is ready   print, tag, past, id (the sender's name for it), nbytes (its size), aux (its
//                                        address), flags (low bits of how many sends that rank has withdrawn)
//   CTS    nothing: send it              id (as in RTS), aux (the receiver's name for it)
//   DATA   a piece of it                 id (the receiver's name), nbytes (of the piece)
//   PULLED nothing: I read it myself     id (as in RTS)
//   CREDIT nothing                       nbytes of eager messages were consumed
//   WAITS  nothing: I wait in a call     print, flags; aux (send / recv messages got so far), id (of an RTS)
//   HERE   nothing: I entered it too     print, of that call or of the last one that I entered
//   ABORT  text: the group failed        aux (the status), nbytes
//   LEFT   nothing: I freed the group    -
//   BYE    nothing: I finalized
typedef struct idist__frame {
    uint8_t type, flags;
    uint16_t past; // of EAGER and RTS in a collective: a digest of the calls before it
    uint32_t tag;  // step of a collective, or the user's tag
    uint64_t ctx;  // group
    idist__print print;
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
    IDIST__BYE
};

enum { IDIST__NEEDS_YOU = 1, IDIST__ONLY_CALL = 2 }; // flags of WAITS

#define IDIST__FRAME_BYTES sizeof(idist__frame)
#define IDIST__PIECE_BYTES ((size_t)1 << 20)  // of a DATA frame: what can be interleaved with it waits this long
#define IDIST__WINDOW_BYTES ((size_t)1 << 20) // eager bytes on their way to one rank that has not consumed them
#define IDIST__TEXT_BYTES ((size_t)400)       // of an ABORT
enum { IDIST__CLOSED = 64 };                  // groups whose end a ring remembers
enum { IDIST__UNKNOWN_MOST = 1024 };          // messages that a rank may send for groups that do not exist here yet
#define IDIST__STAGE_BYTES ((size_t)32 * 1024)
#define IDIST__QUICK_YIELDS 16                 // of the quick way, with more ranks than cores
#define IDIST__TURN_NS 64                      // of the quick way, about: a look and a short break
#define IDIST__EAGER_NEAR_BYTES ((size_t)8192) // the limit of an eager message where the receiver can read it by itself

// Thousands of sends and receives may be under way at once, and every frame asks for one of them.
// So those that frames ask for, and messages that came early, can be found by a hash of what
// identifies them; equal ones come oldest first.
typedef struct idist__hook { // the place in a bucket
    struct idist__hook *next, **at;
    struct idist__bucket *bucket;
} idist__hook;

typedef struct idist__bucket {
    idist__hook *first, **end; // end: of one that is not empty
} idist__bucket;

enum { IDIST__BUCKETS = 1024 };

// One send or receive under way: what algorithms are made of. It is in one list at a time (a link's out, waiting, posted
// or receiving, a group's recvs or wild, the ring's idle ones), or in none while it is a link's
// in_verb or the claim on a message.
typedef struct idist__verb {
    struct idist__verb *next;  // in the one list that holds it
    struct idist__verb **at;   // what points to it there
    struct idist__verbs *list; // an idist__verbs that holds it, ...
    idist__hook hook;          // ... and its bucket, or none
    idist__task *task;         // NULL: nobody waits for it (a control frame, or the rest of a cancelled message)
    int slot;                  // of a receive in a collective, -1: none
    bool send, started;        // started: the other side was told about it
    char *data;
    size_t nbytes, moved;
    idist__frame frame;        // what goes out, or what the receive wants
    size_t frame_moved;        // of the frame under way
    size_t piece, piece_moved; // of its payload
    uint64_t id;
    uint64_t stamp; // order of posting
    char *owned;    // payload that is freed with the verb
} idist__verb;

typedef struct idist__verbs {
    idist__verb *first, **end; // oldest first; end: of a list that is not empty
} idist__verbs;

// A message that came before anybody asked for it.
typedef struct idist__message {
    struct idist__message *next, **at; // as of a verb
    idist__hook hook;
    int peer;
    idist__frame frame;
    char *data;             // eager: the payload, behind this struct
    size_t moved;           // how much of it is here
    idist__verb *claim;     // the receive that takes it once it is complete
    idist__verb *self_send; // to ourselves: the payload is still with the sender
    bool unknown;           // its group did not exist here when it came
    uint64_t stamp;
} idist__message;

// A transport moves bytes between two ranks. It never blocks; `port` is its own. read and write: > 0 bytes moved, 0
// nothing can move now, -1 the stream ended (errno 0) or broke (errno).
typedef struct idist__transport {
    const char *name;
    ptrdiff_t (*read)(void *port, void *buf, size_t nbytes);
    ptrdiff_t (*write)(void *port, const struct iovec *parts, int nparts);
    int (*poll_fd)(void *port); // readable / writable as the port is
    void (*close)(void *port);
    void (*polled)(void *port); // poll has seen something at poll_fd. NULL: then bytes move through that descriptor
    bool lossy_close;           // closing with unread bytes may destroy what the other side has not read yet
} idist__transport;

typedef struct idist__link { // the connection to one rank
    const idist__transport *transport;
    int fd;
    void *port; // &fd for sockets, an idist__shm_port
    bool open;
    bool bye;   // the other side finalized: the end of the stream is no loss
    bool ended; // its stream is at the end; see idist__link_ended
    int ended_errno;
    bool write_dead;                    // writing failed; reading will tell why
    idist__verb *out, **out_end;        // going out, in order
    idist__verbs waiting;               // sends that wait for CTS
    idist__verbs posted;                // receives of collectives, not matched yet
    idist__verbs receiving;             // matched, DATA is coming
    idist__message *early, **early_end; // unexpected, in order of arrival
    // window + what is on its way, lies early over there, or is owed to us there = IDIST__WINDOW_BYTES, always.
    size_t window, owed; // eager bytes we may still send; consumed but not yet told
    size_t their_window; // eager bytes the other rank may still send
    int nunknown;        // messages in `early` that came for a group which does not exist here
    char *stage;         // bytes read but not looked at: stage[at .. end)
    size_t at, end;
    idist__frame in;
    size_t in_moved;
    size_t left;                      // payload of `in` still to come,
    char *target;                     // and where it goes; NULL: nowhere
    idist__verb *in_verb;             // what it belongs to
    idist__message *in_message;       //
    char text[IDIST__TEXT_BYTES + 1]; // of an ABORT
    idist__frame peer_waits;          // the last WAITS, while nothing else came after it
    uint64_t p2p_sent, p2p_got;       // messages of send / recv
    int64_t here_ns;                  // when the last HERE came
} idist__link;

typedef struct idist__ring { // the backend's part of a world
    idist__world *w;
    idist__link *links; // by world rank; the own one holds messages to ourselves
    struct pollfd *polls;
    int *poll_ranks;
    int wake;
    struct idist__shm *shm; // shared with the other ranks of this host, or NULL
    int nstreams;           // links whose bytes go through a descriptor
    int64_t polled_ns;      // when we last looked at the sockets that stand beside shared memory
    int64_t drowsy_ns;      // how much longer than IDIST__LOOK_NS we sleep there, as nobody wakes us
    bool judging;           // inside idist__link_ended
    idist__verb *idle;
    uint64_t stamp, next_id;
    uint64_t closed[IDIST__CLOSED]; // ctx of the groups closed last: what still comes for them is dropped
    uint32_t nclosed;
    int64_t looked_ns; // when the last call began that read the links
    // A failure noticed in the middle of something is carried out when that is through.
    idist_group *failed;
    idist_status failed_status;
    char failed_cause[400];
    idist__bucket verbs[IDIST__BUCKETS], messages[IDIST__BUCKETS];
} idist__ring;

#define IDIST__HISTORY 64
#define IDIST__LOOK_NS (10 * IDIST__MS) // a rank that sleeps on shared memory looks at its sockets this often

typedef struct idist__seen { // what is known of a member's progress in a group
    uint32_t seq;            // it entered this call
    idist__print print;      //
} idist__seen;

typedef struct idist__ring_group {
    int *rank_of;                         // rank in the group by world rank; -1
    idist__seen *seen;                    // by rank in the group
    idist__verbs recvs;                   // receives of recv
    idist__verbs wild;                    // those from any source or with any tag
    idist__print history[IDIST__HISTORY]; // of our own calls, by seq
    uint16_t past[IDIST__HISTORY];        // and the digest of those before each
    uint16_t digest;                      // of all of them so far
    struct idist__share *share;           // NULL: its collectives are made of messages
    bool met;                             // all members have heard of all places
    int nhosts;                           // of a group over several hosts, 0: see ring:host
    bool in_order;                        // the members on a host follow each other
    idist_group *near, *leads;            // NULL: no other member on this host; this rank leads no host
    idist_group *whole;                   // this group is near or leads of that one
    idist__task *head, *last;             // calls by host under way; only the first one runs
} idist__ring_group;

static idist__ring *idist__ring_of(const idist__world *w) { return (idist__ring *)w->impl; }

static idist__ring_group *idist__ring_group_of(const idist_group *g) { return (idist__ring_group *)g->impl; }

//------------------------------------------------------------------------------
// [ring:transport]  bytes over stream sockets
// uses types . used by link join
//------------------------------------------------------------------------------

static ptrdiff_t idist__stream_read(void *port, void *buf, size_t nbytes) {
    return idist__sock_read(*(int *)port, buf, nbytes);
}

static ptrdiff_t idist__stream_write(void *port, const struct iovec *parts, int nparts) {
    return idist__sock_write(*(int *)port, parts, nparts);
}

static int idist__stream_fd(void *port) { return *(int *)port; }

static void idist__stream_close(void *port) { idist__os_close((int *)port); }

static const idist__transport idist__transport_tcp = {
    "tcp", idist__stream_read, idist__stream_write, idist__stream_fd, idist__stream_close, NULL, true};
static const idist__transport idist__transport_unix = {
    "unix", idist__stream_read, idist__stream_write, idist__stream_fd, idist__stream_close, NULL, false};

//------------------------------------------------------------------------------
// [ring:shm]  memory that the ranks of one host share
// uses types . used by link share engine join
//
// One file in memory, without a name, mapped by all ranks of the host:
//
//   | head | share of rank 0 | share of rank 1 | ... | window of rank 0 | window of rank 1 | ...
//
//   share    bell | a pipe from each rank | places: what the rank shows the others in collectives ([ring:share])
//   window   holes, until idist_alloc fills a part of one
//
// Shares are reserved when the file is mapped, so that no access can fail later. Ranks are numbered by the order of
// their world ranks here. Whoever writes something that another rank may wait for knocks afterwards; a rank that is
// about to sleep says so in its bell first and looks once more. Between writing and looking there is a fence on both
// sides, or the one who falls asleep puts one into all others (idist__shm_any_asleep): one of the two always sees the other.
//------------------------------------------------------------------------------

#define IDIST__LINE ((size_t)64)
#define IDIST__FAR_PIECE ((size_t)128 * 1024)
#define IDIST__CLAIM_BYTES ((size_t)1024)
#define IDIST__PAGE ((size_t)4096)

typedef struct idist__bell {
    uint32_t asleep; // 0 no, 1 on this word, 2 in poll: a byte through the socket wakes it
    char pad[60];
    int64_t pid; // whose memory this is, and a number there by which that can be proved
    uint64_t proof, proof_at;
    idist__counter withdrawn; // sends that ended before their time: what was read at their addresses is worth nothing
    char pad2[32];
} idist__bell;

typedef struct idist__shm_head {
    uint32_t nasleep; // ranks about to sleep; spares everybody else a look at each bell
    char pad[60];
    uint32_t fenced;  // set once, by the lowest rank, for all: see idist__shm_any_asleep
    uint32_t ncores;  // that all ranks together may use
    idist__cpus cpus; // which
} idist__shm_head;

// Bytes from one rank to another. The counters never go back; each is written by one side only.
typedef struct idist__pipe {
    idist__counter tail; // written so far
    char pad[56];
    idist__counter head; // read so far
    char pad2[56];
} idist__pipe;

typedef struct idist__shm_port { // our end of a link through two pipes
    struct idist__shm *shm;
    idist__pipe *in, *out;
    uint64_t head, tail; // our own counters, which nobody else can change
    uint64_t out_head;   // how far the other side had read when we last had to look
    int peer;            // rank on this host
    int fd;              // the socket between the two: its end is the other's end
    bool look;           // poll has seen something there
} idist__shm_port;

typedef struct idist__shm {
    idist__window *window; // the mapping
    char *base;
    int n, me;
    bool crowded; // more ranks than cores
    bool fenced;
    bool far;       // each can read the memory of all others
    uint64_t proof; // at this address
    pid_t *pids;    // by rank on this host
    char *pieces;   // of what was read there: IDIST__FAR_PIECE for each
    int *local;     // rank on this host, by world rank; -1
    size_t pipe_nbytes, share_nbytes, window_at, window_nbytes;
    size_t chunk_nbytes[2]; // of a buffer in place 0, and in the others
    size_t places_at;       // in a share
    int nplaces;
    bool taken[64];       // our places, ...
    uint32_t members[64]; // ... how many members here the group has that each is for,
    uint64_t groups[64];  // ... and its ctx
    idist__shm_port *ports;
} idist__shm;

static char *idist__shm_share(const idist__shm *m, int rank) {
    return m->base + IDIST__PAGE + (size_t)rank * m->share_nbytes;
}

static idist__bell *idist__shm_bell(const idist__shm *m, int rank) {
    return (idist__bell *)(void *)idist__shm_share(m, rank);
}

static idist__pipe *idist__shm_pipe(const idist__shm *m, int from, int to) {
    size_t one = sizeof(idist__pipe) + m->pipe_nbytes;
    return (idist__pipe *)(void *)(idist__shm_share(m, to) + sizeof(idist__bell) + (size_t)from * one);
}

// Wakes a rank if it sleeps, or is about to. The caller has put a fence behind what it wrote.
static void idist__shm_wake(const idist__shm *m, int rank) {
    idist__bell *b = idist__shm_bell(m, rank);
    uint32_t how = __atomic_load_n(&b->asleep, __ATOMIC_RELAXED);
    if (how) how = __atomic_exchange_n(&b->asleep, 0u, __ATOMIC_ACQ_REL);
    if (how == 1) idist__os_futex_wake(&b->asleep);
    if (how == 2) send(m->ports[rank].fd, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

static idist__shm_head *idist__shm_head_of(const idist__shm *m) { return (idist__shm_head *)(void *)m->base; }

// Whether anybody sleeps, after something was written. A fence would wait until the line that we wrote has come over
// from the other core, as long as a small collective takes; so where the kernel can put one into all other ranks, the
// one who falls asleep asks for that. With more ranks than cores sleep is common, and everybody has its own.
static bool idist__shm_any_asleep(const idist__shm *m) {
    if (m->fenced) __atomic_thread_fence(__ATOMIC_SEQ_CST);
    else __atomic_signal_fence(__ATOMIC_SEQ_CST);
    return __atomic_load_n(&idist__shm_head_of(m)->nasleep, __ATOMIC_RELAXED) != 0;
}

static void idist__shm_falls_asleep(const idist__shm *m, uint32_t how) {
    __atomic_fetch_add(&idist__shm_head_of(m)->nasleep, 1u, __ATOMIC_RELAXED);
    __atomic_store_n(&idist__shm_bell(m, m->me)->asleep, how, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (!m->fenced) idist__os_fence_others(false);
}

// Whether somebody has knocked since idist__shm_falls_asleep.
static bool idist__shm_was_woken(const idist__shm *m) {
    return __atomic_load_n(&idist__shm_bell(m, m->me)->asleep, __ATOMIC_RELAXED) == 0;
}

static void idist__shm_awake(const idist__shm *m) {
    __atomic_store_n(&idist__shm_bell(m, m->me)->asleep, 0u, __ATOMIC_RELAXED);
    __atomic_fetch_sub(&idist__shm_head_of(m)->nasleep, 1u, __ATOMIC_RELAXED);
}

// Copies from the memory of another rank's process. 0, or an errno.
static int idist__shm_pull(const idist__shm *m, int rank, uint64_t at, void *buf, size_t nbytes) {
    return idist__os_read_other(m->pids[rank], at, buf, nbytes);
}

static void idist__pipe_copy(const idist__shm *m, idist__pipe *p, uint64_t at, char *buf, size_t nbytes, bool in) {
    char *data = (char *)(p + 1);
    size_t from = (size_t)at & (m->pipe_nbytes - 1), first = m->pipe_nbytes - from < nbytes ? m->pipe_nbytes - from : nbytes;
    if (in) {
        memcpy(buf, data + from, first);
        memcpy(buf + first, data, nbytes - first);
    } else {
        memcpy(data + from, buf, first);
        memcpy(data, buf + first, nbytes - first);
    }
}

static uint64_t idist__shm_there(const idist__shm_port *p) { // bytes to read
    return __atomic_load_n(&p->in->tail, __ATOMIC_ACQUIRE) - p->head;
}

// The socket carries nothing but knocks; its end is the end of the link, after what lies in the pipe.
static ptrdiff_t idist__shm_lifeline(idist__shm_port *p) {
    char knocks[64];
    ptrdiff_t n;
    p->look = false;
    do n = idist__sock_read(p->fd, knocks, sizeof knocks);
    while (n > 0);
    if (n < 0) p->look = true;
    return n;
}

static ptrdiff_t idist__shm_read(void *port, void *buf, size_t nbytes) {
    idist__shm_port *p = (idist__shm_port *)port;
    uint64_t there = idist__shm_there(p);
    if (!there && p->look && idist__shm_lifeline(p) < 0) {
        int err = errno;
        there = idist__shm_there(p); // its last words
        errno = err;
        if (!there) return -1;
    }
    if (!there) return 0;
    if (there > p->shm->pipe_nbytes) {
        errno = EPROTO;
        return -1;
    }
    idist__os_handover();
    if (nbytes > there) nbytes = (size_t)there;
    idist__pipe_copy(p->shm, p->in, p->head, (char *)buf, nbytes, true);
    p->head += nbytes;
    __atomic_store_n(&p->in->head, p->head, __ATOMIC_RELEASE);
    if (there > p->shm->pipe_nbytes / 2 && idist__shm_any_asleep(p->shm)) idist__shm_wake(p->shm, p->peer);
    return (ptrdiff_t)nbytes;
}

static ptrdiff_t idist__shm_write(void *port, const struct iovec *parts, int nparts) {
    idist__shm_port *p = (idist__shm_port *)port;
    size_t room = p->shm->pipe_nbytes, moved = 0, wanted = 0;
    uint64_t unread;
    int i;
    for (i = 0; i < nparts; i++) wanted += parts[i].iov_len;
    if (wanted > room - (size_t)(p->tail - p->out_head)) p->out_head = __atomic_load_n(&p->out->head, __ATOMIC_ACQUIRE);
    unread = p->tail - p->out_head;
    if (unread > room) {
        errno = EPROTO;
        return -1;
    }
    room -= (size_t)unread;
    for (i = 0; i < nparts && room; i++) {
        size_t k = parts[i].iov_len < room ? parts[i].iov_len : room;
        idist__pipe_copy(p->shm, p->out, p->tail + moved, (char *)parts[i].iov_base, k, false);
        moved += k;
        room -= k;
    }
    if (!moved) return 0;
    p->tail += moved;
    idist__os_handover();
    __atomic_store_n(&p->out->tail, p->tail, __ATOMIC_RELEASE);
    if (idist__shm_any_asleep(p->shm)) idist__shm_wake(p->shm, p->peer);
    return (ptrdiff_t)moved;
}

// Reads without taking. False when fewer bytes are there.
static bool idist__shm_peek(const idist__shm_port *p, void *buf, size_t nbytes) {
    uint64_t there = idist__shm_there(p);
    uint64_t at;
    if (there < nbytes || there > p->shm->pipe_nbytes) return false;
    idist__os_handover();
    for (at = nbytes; at < there && at < 4 * IDIST__LINE; at += IDIST__LINE) // what follows will be wanted next
        __builtin_prefetch((const char *)(p->in + 1) + ((p->head + at) & (p->shm->pipe_nbytes - 1)));
    idist__pipe_copy(p->shm, p->in, p->head, (char *)buf, nbytes, true);
    return true;
}

// Whether a write of so many bytes will go through as a whole.
static bool idist__shm_has_room(idist__shm_port *p, size_t nbytes) {
    size_t room = p->shm->pipe_nbytes;
    if (nbytes > room - (size_t)(p->tail - p->out_head)) p->out_head = __atomic_load_n(&p->out->head, __ATOMIC_ACQUIRE);
    return p->tail - p->out_head <= room && nbytes <= room - (size_t)(p->tail - p->out_head);
}

// Takes the lines that the next write will fill away from the other side, which has read them a lap ago.
static void idist__shm_claim(const idist__shm_port *p, size_t nbytes) {
    size_t at;
    for (at = 0; at < nbytes && at < IDIST__CLAIM_BYTES; at += IDIST__LINE)
        idist__os_claim((const char *)(p->out + 1) + ((p->tail + at) & (p->shm->pipe_nbytes - 1)));
}

// Whether the other process is gone, also where knocks that nobody has read lie before the end of the socket.
static bool idist__shm_gone(const idist__shm_port *p) {
    struct pollfd end;
    end.fd = p->fd;
    end.events = 0;
    return p->fd < 0 || (poll(&end, 1, 0) > 0 && (end.revents & (POLLHUP | POLLERR)));
}

static int idist__shm_fd(void *port) { return ((idist__shm_port *)port)->fd; }

static void idist__shm_polled(void *port) { ((idist__shm_port *)port)->look = true; }

static void idist__shm_close(void *port) { idist__os_close(&((idist__shm_port *)port)->fd); }

static const idist__transport idist__transport_shm = {"shm",         idist__shm_read,  idist__shm_write,
                                                      idist__shm_fd, idist__shm_close, idist__shm_polled,
                                                      false};

//------------------------------------------------------------------------------
// [ring:op]  a collective under way, and the macros that let an algorithm wait
// uses types . used by verb algo engine
//
// An algorithm is a function that is called again whenever one of its sends or receives is through. It either keeps
// its place by itself (streams), or is written as straight code between CO_BEGIN and CO_END, where CO_AWAIT leaves
// the function until its condition holds. Nothing in it may live in local variables across an AWAIT; the state is in
// idist__op.
//------------------------------------------------------------------------------

#define IDIST__SLOTS 8                          // receives of a stream that are posted ahead
#define IDIST__CHUNK_BYTES ((size_t)256 * 1024) // unit of a stream

typedef struct idist__op idist__op;

// A stream: items come in one after the other, are taken (reduced, say), and items go out. See idist__stream_run.
typedef struct idist__item {
    int peer; // rank in the group
    char *data;
    size_t nbytes;
} idist__item;

struct idist__op {
    void (*run)(idist__task *t);
    void (*finish)(idist__task *t); // after the last step, e.g. a copy to where the result belongs
    int algorithm;                  // 1 latency, 2 bandwidth, 3 flat, 4 chunked, 5 by host: part of the fingerprint
    int line;                       // where run goes on
    bool running;
    uint16_t past;      // digest of the calls before
    uint32_t rx;        // bit k: the receive in slot k is not through
    int nsends, nrecvs; // not through
    idist__verb *verb;  // of a send or receive of the program; NULL: there is none, or none any more
    int n, r, root;
    size_t size; // of an element as reduced: F16 is carried as F32
    size_t count;
    size_t nbytes; // count * size
    idist__reduce_fn reduce;
    const idist__user_op *user; // &user_op, or NULL
    idist__user_op user_op;     // a copy: the op may be freed while the call runs
    const char *in;             // own contribution
    char *out;                  // result
    char *work;                 // scratch of the algorithm
    char *slots;                // where a stream's receives land
    char *memory;               // all scratch, in one piece
    // state of an algorithm
    int mask, v, p2, nr;
    size_t i, k;
    // state of a stream
    size_t nrecv, nsend, head, posted, taken, sent, chunk, chunks;
    idist__item (*recv_at)(idist__task *t, size_t k);
    idist__item (*send_at)(idist__task *t, size_t k);
    void (*take)(idist__task *t, size_t k);
    idist__task *step; // of a collective by host: the part under way
    // state of a collective in shared memory
    idist__task *after; // the next one of the group
    uint32_t nth;
    bool entered;
    bool far;   // contributions may be read in the other processes
    bool stays; // ours is read where it is
    bool whole; // the others write into our result
    int who;
    uint64_t use;
    size_t j, most;
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

// A buffer that nobody reads or writes may be NULL. Algorithms add offsets to it, which C allows for no null pointer.
static char *idist__op_buffer(const void *buffer) {
    static const char nothing[1] = {0};
    return (char *)(uintptr_t)(buffer ? buffer : nothing);
}

// acc = lo (op) hi over count elements; acc is one of them or neither. A user op works in place on its second
// operand, so where that must survive it is copied, a piece at a time.
static void idist__op_reduce(const idist__op *o, char *acc, const char *lo, const char *hi, size_t count,
                             idist_dtype dtype) {
    uint64_t piece[512];
    size_t at, k, most = sizeof piece / o->size;
    if (!o->user || !o->user->fn) {
        o->reduce(acc, lo, hi, count);
    } else if (acc == hi) {
        idist__me.callbacks++;
        o->user->fn(lo, acc, count, dtype, o->user->arg);
        idist__me.callbacks--;
    } else {
        idist__me.callbacks++;
        for (at = 0; at < count; at += k) {
            k = count - at < most ? count - at : most;
            memcpy(piece, hi + at * o->size, k * o->size);
            o->user->fn(lo + at * o->size, piece, k, dtype, o->user->arg);
            memcpy(acc + at * o->size, piece, k * o->size);
        }
        idist__me.callbacks--;
    }
}

static void idist__op_done(idist__task *t) {
    idist__op *o = idist__op_of(t);
    if (t->done) return;
    if (o->finish) o->finish(t);
    idist__mem_free(&t->group->w->cfg.mem, o->memory);
    o->memory = NULL;
    idist__complete(t, IDIST_OK, "");
}

static void idist__op_run(idist__task *t) {
    idist__op *o = idist__op_of(t);
    if (o->running || t->done) return;
    o->running = true; // a verb that is through at once must not call the algorithm inside itself
    o->run(t);
    o->running = false;
}

//------------------------------------------------------------------------------
// [ring:link]  frames in and out of one connection
// uses types transport op . used by verb engine join
//------------------------------------------------------------------------------

static idist__verb *idist__verb_new(idist__ring *ring) {
    idist__verb *v = ring->idle;
    if (v) {
        ring->idle = v->next;
        memset(v, 0, sizeof *v);
    } else {
        v = (idist__verb *)idist__mem_alloc(&ring->w->cfg.mem, sizeof *v);
    }
    if (v) {
        v->slot = -1;
        v->stamp = ++ring->stamp;
    }
    return v;
}

// ---- what frames ask for ----

static void idist__hook_on(idist__hook *hook, idist__bucket *table, uint64_t key) {
    idist__bucket *bucket = &table[key % IDIST__BUCKETS];
    hook->next = NULL;
    hook->at = bucket->first ? bucket->end : &bucket->first;
    hook->bucket = bucket;
    *hook->at = hook;
    bucket->end = &hook->next;
}

static void idist__hook_off(idist__hook *hook) {
    *hook->at = hook->next;
    if (hook->next) hook->next->at = hook->at;
    else hook->bucket->end = hook->at;
    hook->bucket = NULL;
}

static idist__verb *idist__hook_verb(idist__hook *hook) {
    return (idist__verb *)(void *)((char *)hook - offsetof(idist__verb, hook));
}

static idist__message *idist__hook_message(idist__hook *hook) {
    return (idist__message *)(void *)((char *)hook - offsetof(idist__message, hook));
}

// Of what a rank sends in a group: which is the tag of a message of its own (p2p), or the number of
// a collective.
static uint64_t idist__ring_key(uint64_t ctx, int peer, bool p2p, uint32_t which) {
    return idist__mix(ctx + ((uint64_t)(uint32_t)peer << 33), ((uint64_t)p2p << 32) | which);
}

static uint64_t idist__frame_key(int peer, const idist__frame *f) {
    bool p2p = f->print.kind == IDIST__SEND;
    return idist__ring_key(f->ctx, peer, p2p, p2p ? f->tag : f->print.seq);
}

static void idist__verb_list(idist__verbs *list, idist__verb *v) {
    v->next = NULL;
    v->at = list->first ? list->end : &list->first;
    v->list = list;
    *v->at = v;
    list->end = &v->next;
}

static void idist__verb_put(idist__ring *ring, idist__verbs *list, idist__verb *v, uint64_t key) {
    idist__verb_list(list, v);
    idist__hook_on(&v->hook, ring->verbs, key);
}

static void idist__verb_take(idist__verb *v) {
    *v->at = v->next;
    if (v->next) v->next->at = v->at;
    else v->list->end = v->at;
    v->list = NULL;
    if (v->hook.bucket) idist__hook_off(&v->hook);
}

// The verb with this name, among those that wait for CTS or DATA.
static idist__verb *idist__verb_named(idist__ring *ring, const idist__verbs *list, uint64_t id) {
    idist__hook *hook = ring->verbs[idist__mix(id, 0) % IDIST__BUCKETS].first;
    while (hook && (idist__hook_verb(hook)->list != list || idist__hook_verb(hook)->id != id)) hook = hook->next;
    return hook ? idist__hook_verb(hook) : NULL;
}

static void idist__verb_free(idist__ring *ring, idist__verb *v) {
    idist__mem_free(&ring->w->cfg.mem, v->owned);
    if (v->task && idist__kind_is_p2p(v->task->call.kind)) idist__op_of(v->task)->verb = NULL;
    v->next = ring->idle;
    ring->idle = v;
}

// Remembers a failure; idist__ring_settle carries it out.
static void idist__ring_fail(idist__ring *ring, idist_group *g, idist_status status, const char *cause) {
    if (ring->failed || g->status != IDIST_OK) return;
    ring->failed = g;
    ring->failed_status = status;
    idist__copy_text(ring->failed_cause, sizeof ring->failed_cause, cause);
}

static void idist__ring_settle(idist__ring *ring) {
    while (ring->failed) {
        idist_group *g = ring->failed;
        ring->failed = NULL;
        idist__group_fail(g, ring->failed_status, ring->failed_cause);
    }
}

// A verb is through: its task learns of it and goes on.
static void idist__verb_done(idist__ring *ring, idist__verb *v) {
    idist__task *t = v->task;
    bool send = v->send;
    int slot = v->slot;
    idist__verb_free(ring, v);
    if (!t || t->done) return;
    ring->w->nmoved++;
    if (t->call.kind == IDIST__SEND) {
        idist__complete(t, IDIST_OK, "");
    } else {
        idist__op *o = idist__op_of(t);
        if (send) o->nsends--;
        else o->nrecvs--;
        if (slot >= 0) o->rx &= ~(1u << slot);
        idist__op_run(t);
    }
}

static void idist__link_push(idist__link *l, idist__verb *v) {
    v->next = NULL;
    v->frame_moved = v->piece_moved = 0;
    *l->out_end = v;
    l->out_end = &v->next;
}

static void idist__link_pop(idist__link *l) {
    l->out = l->out->next;
    if (!l->out) l->out_end = &l->out;
}

// Drops what was to go out: the other side does not read any more.
static void idist__link_write_failed(idist__ring *ring, idist__link *l) {
    l->write_dead = true;
    while (l->out) {
        idist__verb *v = l->out;
        idist__link_pop(l);
        idist__verb_free(ring, v); // the task, if any, ends with its group when reading finds the loss
    }
}

// A frame and its payload are out: what comes of the verb.
static void idist__link_sent(idist__ring *ring, idist__link *l, idist__verb *v) {
    idist__link_pop(l);
    if (v->frame.type == IDIST__RTS) {
        idist__verb_put(ring, &l->waiting, v, idist__mix(v->id, 0));
    } else if (v->frame.type == IDIST__DATA && (v->moved += v->piece) < v->nbytes) {
        v->piece = v->nbytes - v->moved < IDIST__PIECE_BYTES ? v->nbytes - v->moved : IDIST__PIECE_BYTES;
        v->frame.nbytes = v->piece;
        idist__link_push(l, v); // behind the others: a large message does not hold up small ones
    } else {
        idist__verb_done(ring, v);
    }
}

// Writes as much as the socket takes.
static void idist__link_flush(idist__ring *ring, idist__link *l) {
    while (l->out && !l->write_dead) {
        idist__verb *v = l->out;
        struct iovec parts[2];
        int nparts = 0;
        ptrdiff_t n;
        size_t k;
        if (v->frame_moved < IDIST__FRAME_BYTES) {
            parts[nparts].iov_base = (char *)&v->frame + v->frame_moved;
            parts[nparts++].iov_len = IDIST__FRAME_BYTES - v->frame_moved;
        }
        if (v->piece_moved < v->piece) {
            parts[nparts].iov_base = v->data + v->moved + v->piece_moved;
            parts[nparts++].iov_len = v->piece - v->piece_moved;
        }
        n = l->transport->write(l->port, parts, nparts);
        if (n < 0) {
            idist__link_write_failed(ring, l);
            return;
        }
        if (n == 0) return;
        v->started = true;
        k = IDIST__FRAME_BYTES - v->frame_moved < (size_t)n ? IDIST__FRAME_BYTES - v->frame_moved : (size_t)n;
        v->frame_moved += k;
        v->piece_moved += (size_t)n - k;
        if (v->frame_moved == IDIST__FRAME_BYTES && v->piece_moved == v->piece) idist__link_sent(ring, l, v);
    }
}

// Queues a frame that no task waits for; text may follow it.
static void idist__link_control(idist__ring *ring, idist__link *l, const idist__frame *f, const char *text) {
    idist__verb *v = l->open && !l->write_dead ? idist__verb_new(ring) : NULL;
    idist_group *g = v ? NULL : idist__world_find_group(ring->w, f->ctx);
    if (!v) { // if it is for want of memory, the other side waits for what the frame says
        if (l->open && !l->write_dead)
            idist__ring_fail(ring, g ? g : &ring->w->group, IDIST_ERR_NO_MEMORY, "a rank is out of memory");
        return;
    }
    v->send = true;
    v->frame = *f;
    if (text) {
        size_t n = strlen(text);
        v->owned = (char *)idist__mem_alloc(&ring->w->cfg.mem, n + 1);
        if (v->owned) {
            memcpy(v->owned, text, n);
            v->data = v->owned;
            v->nbytes = v->piece = n;
        }
        v->frame.nbytes = v->nbytes;
    }
    idist__link_push(l, v);
    idist__link_flush(ring, l);
}

// Eager bytes were taken out of our memory; the sender learns of it when enough has come together.
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

static void idist__message_free(idist__ring *ring, idist__link *l, idist__message *m) {
    *m->at = m->next;
    if (m->next) m->next->at = m->at;
    else l->early_end = m->at;
    idist__hook_off(&m->hook);
    if (l->in_message == m) {
        l->in_message = NULL;
        l->target = NULL;
    }
    if (m->unknown) l->nunknown--;
    idist__mem_free(&ring->w->cfg.mem, m);
}

// The oldest message that a rank sent for a group which does not exist here. Honest ranks leave a few behind, for groups
// that were freed before all had come; so nobody is refused for it.
static void idist__link_forget_unknown(idist__ring *ring, idist__link *l) {
    idist__message *m = l->early;
    bool whole;
    size_t nbytes;

    while (m && (!m->unknown || m == l->in_message)) m = m->next;
    if (!m) return;
    whole = m->frame.type == IDIST__EAGER && m->moved == m->frame.nbytes;
    nbytes = (size_t)m->frame.nbytes;
    idist__message_free(ring, l, m);
    if (whole) idist__link_consumed(ring, l, nbytes);
}

static bool idist__ring_has_closed(const idist__ring *ring, uint64_t ctx) {
    uint32_t i;
    for (i = 0; i < IDIST__CLOSED && i < ring->nclosed; i++)
        if (ring->closed[i] == ctx) return true;
    return false;
}

static idist__message *idist__message_new(idist__ring *ring, idist__link *l, const idist__frame *f, size_t payload) {
    idist__message *m = (idist__message *)idist__mem_raw(&ring->w->cfg.mem, sizeof *m + payload);
    if (!m) return NULL;
    memset(m, 0, sizeof *m);
    m->frame = *f;
    m->data = (char *)(m + 1);
    m->stamp = ++ring->stamp;
    m->unknown = !idist__world_find_group(ring->w, f->ctx);
    if (m->unknown && ++l->nunknown > IDIST__UNKNOWN_MOST) idist__link_forget_unknown(ring, l);
    m->peer = (int)(l - ring->links);
    m->at = l->early_end;
    *l->early_end = m;
    l->early_end = &m->next;
    idist__hook_on(&m->hook, ring->messages, idist__frame_key(m->peer, f));
    return m;
}

//------------------------------------------------------------------------------
// [ring:match]  which receive gets which message, and whether two calls are the same
// uses link op . used by verb engine
//------------------------------------------------------------------------------

// Two ranks are in different calls: the group fails on all of them.
static void idist__ring_mismatch(idist__ring *ring, idist_group *g, int peer, const idist__print *theirs,
                                 const idist__print *ours, const char *field) {
    char cause[400];
    int me = ring->w->group.rank;
    if (me < peer) idist__mismatch_text(field, me, ours, peer, theirs, cause, sizeof cause);
    else idist__mismatch_text(field, peer, theirs, me, ours, cause, sizeof cause);
    idist__ring_fail(ring, g, IDIST_ERR_MISMATCH, cause);
}

// The digest of the calls before a new one. A part of a call on a larger group also vouches for the calls on that group.
static uint16_t idist__ring_past(const idist__task *t) {
    return (uint16_t)(idist__ring_group_of(t->group)->digest ^ t->whole_past);
}

// A call begins. A rank may be through with a one-way call, and with the next one, before it has read the frame that
// differs. So every frame and every notice says what its sender called before: any rank that gets a later one can tell.
static void idist__ring_note(idist__task *t, idist__op *o, int algorithm) {
    idist__ring_group *rg = idist__ring_group_of(t->group);
    idist__print p = idist__task_print(t, algorithm);
    uint64_t what; // what a print begins with: kind, dtype, op, algorithm and root

    memcpy(&what, &p, sizeof what);
    what = (what ^ rg->digest) * 0x9e3779b97f4a7c15u;

    rg->past[p.seq % IDIST__HISTORY] = o->past = idist__ring_past(t);
    rg->history[p.seq % IDIST__HISTORY] = p;
    rg->digest = (uint16_t)(((what ^ what >> 32) + p.check) * 0xd6e8feb86659fd93u >> 48);
}

// What this rank called before the call of this print, on the group that the user knows; NULL when that is forgotten.
static const idist__print *idist__ring_before(const idist_group *g, const idist__print *print) {
    uint32_t seq = (print->whole ? print->whole : print->seq) - 1;
    const idist__print *before;

    if (print->whole) g = idist__ring_group_of(g)->whole;
    if (!g) return NULL;
    before = &idist__ring_group_of(g)->history[seq % IDIST__HISTORY];
    return before->seq == seq ? before : NULL;
}

// id and aux are free in EAGER: there it says what the very call before was, if that is still known, for the error text.
static void idist__frame_tell_past(const idist__task *t, idist__frame *f) {
    const idist__print *before;

    f->past = idist__op_of(t)->past;
    if (f->type != IDIST__EAGER) return;
    before = idist__ring_before(t->group, &f->print);
    if (!before) return;
    memcpy(&f->id, before, sizeof f->id);
    f->aux = before->check;
}

// Two ranks are in the same call, and called something else before; `theirs` says what, if its kind is not 0.
static void idist__ring_past_differs(idist__ring *ring, idist_group *g, int peer, const idist__print *print,
                                     const idist__print *theirs) {
    const idist__print *before = idist__ring_before(g, print);
    const char *field = before && theirs->kind ? idist__print_difference(theirs, before) : NULL;

    if (field) idist__ring_mismatch(ring, g, peer, theirs, before, field);
    else idist__ring_mismatch(ring, g, peer, print, print, "sequence of calls before it");
}

// The same, from a frame, which says the most when it is EAGER.
static void idist__frame_past_differs(idist__ring *ring, idist_group *g, int peer, const idist__frame *f) {
    const idist__print *before = idist__ring_before(g, &f->print);
    idist__print theirs;

    memset(&theirs, 0, sizeof theirs);
    if (before && f->type == IDIST__EAGER) {
        theirs = *before; // with its number
        memcpy(&theirs, &f->id, sizeof f->id);
        theirs.check = f->aux;
    }
    idist__ring_past_differs(ring, g, peer, &f->print, &theirs);
}

// Compares a frame of a collective with our call of the same number, running or finished. False on a mismatch. A
// frame for a call that we have not begun says nothing yet.
static bool idist__ring_agree(idist__ring *ring, idist_group *g, int peer, const idist__frame *f) {
    idist__ring_group *rg = idist__ring_group_of(g);
    idist__seen *seen = &rg->seen[rg->rank_of[peer]];
    const idist__print *ours = &rg->history[f->print.seq % IDIST__HISTORY];
    const idist__task *t = ring->w->tasks;
    const char *field;
    if ((int32_t)(f->print.seq - seen->seq) >= 0) {
        seen->seq = f->print.seq;
        seen->print = f->print;
    }
    if ((int32_t)(f->print.seq - g->seq) > 0 || ours->seq != f->print.seq) return true;
    field = idist__print_difference(&f->print, ours);
    // What is left over of a finished call that looked the same: the calls were not the same after all.
    while (t && (t->group != g || t->seq != f->print.seq)) t = t->next;
    if (!field && f->type <= IDIST__RTS && !t) field = "sequence";
    if (field) idist__ring_mismatch(ring, g, peer, &f->print, ours, field);
    else if (f->type > IDIST__RTS || f->past == rg->past[ours->seq % IDIST__HISTORY]) return true;
    else idist__frame_past_differs(ring, g, peer, f);
    return false;
}

static void idist__recv_finish(idist__ring *ring, idist__verb *v, int peer, const idist__frame *f) {
    idist__task *t = v->task;
    int source = idist__ring_group_of(t->group)->rank_of[peer];
    idist__verb_free(ring, v);
    idist__recv_done(t, source, (int)f->tag, (size_t)f->print.check);
}

// A receive is through, whichever kind it is.
static void idist__verb_received(idist__ring *ring, idist__verb *v, int peer) {
    if (v->task && v->task->call.kind == IDIST__RECV) idist__recv_finish(ring, v, peer, &v->frame);
    else idist__verb_done(ring, v);
}

// The oldest receive of the group that wants this p2p message, or NULL.
static idist__verb *idist__match_oldest(idist__ring *ring, idist_group *g, int peer, const idist__frame *f) {
    idist__ring_group *rg = idist__ring_group_of(g);
    idist__hook *hook = rg->recvs.first ? ring->verbs[idist__frame_key(peer, f) % IDIST__BUCKETS].first : NULL;
    idist__verb *wild = rg->wild.first, *v = NULL;

    for (; hook && !v; hook = hook->next)
        if (idist__hook_verb(hook)->list == &rg->recvs && idist__recv_wants(idist__hook_verb(hook)->task, peer, (int)f->tag))
            v = idist__hook_verb(hook);

    while (wild && !idist__recv_wants(wild->task, peer, (int)f->tag)) wild = wild->next;
    return !v || (wild && wild->stamp < v->stamp) ? wild : v;
}

// Takes it out. Receives that it does not fit fail, and the message stays.
static idist__verb *idist__match_recv(idist__ring *ring, idist_group *g, int peer, const idist__frame *f) {
    idist__verb *v;
    while ((v = idist__match_oldest(ring, g, peer, f)) != NULL) {
        idist_status s;
        char text[256];
        idist__verb_take(v);
        if (idist__message_fits(&v->task->call, (idist_dtype)f->print.dtype, (size_t)f->print.check,
                                idist__ring_group_of(g)->rank_of[peer], (int)f->tag, &s, text, sizeof text))
            return v;
        idist__complete(v->task, s, text);
        idist__verb_free(ring, v);
    }
    return NULL;
}

static idist__verb *idist__match_posted(idist__ring *ring, const idist__link *l, int peer, const idist__frame *f) {
    idist__hook *hook;
    for (hook = ring->verbs[idist__frame_key(peer, f) % IDIST__BUCKETS].first; hook; hook = hook->next) {
        idist__verb *v = idist__hook_verb(hook);
        if (v->list != &l->posted) continue;
        if (v->frame.ctx != f->ctx || v->frame.print.seq != f->print.seq || v->frame.tag != f->tag) continue;
        idist__verb_take(v);
        return v;
    }
    return NULL;
}

// The receive for a frame that begins a message, or NULL: it came early, or its group has failed.
static idist__verb *idist__match_frame(idist__ring *ring, idist__link *l, int peer, const idist__frame *f) {
    idist_group *g = idist__world_find_group(ring->w, f->ctx);
    idist__verb *v;
    if (!g || g->status != IDIST_OK) return NULL;
    if (f->print.kind == IDIST__SEND) return idist__match_recv(ring, g, peer, f);
    if (!idist__ring_agree(ring, g, peer, f)) return NULL;
    v = idist__match_posted(ring, l, peer, f);
    if (v && v->nbytes != f->nbytes) {
        char cause[400];
        idist__counts_text(peer, f->nbytes, ring->w->group.rank, v->nbytes, "bytes", v->task, cause, sizeof cause);
        idist__verb_put(ring, &l->posted, v, idist__frame_key(peer, f));
        idist__ring_fail(ring, g, IDIST_ERR_MISMATCH, cause);
        return NULL;
    }
    return v;
}

// Reads an announced message in the memory of its sender. False when that cannot be, or the sender may have given up
// meanwhile and used the memory for something else.
static bool idist__link_pull(idist__ring *ring, idist__link *l, int peer, idist__verb *v, const idist__frame *f) {
    const idist__shm *m = ring->shm;
    idist__frame pulled;
    int rank;
    if (!f->aux || !l->transport->polled || !m->far) return false;
    rank = m->local[peer];
    if (idist__shm_pull(m, rank, f->aux, v->data, (size_t)f->nbytes) != 0) return false;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if ((uint8_t)__atomic_load_n(&idist__shm_bell(m, rank)->withdrawn, __ATOMIC_ACQUIRE) != f->flags) return false;
    memset(&pulled, 0, sizeof pulled);
    pulled.type = IDIST__PULLED;
    pulled.ctx = f->ctx;
    pulled.id = f->id;
    v->frame = *f;
    idist__link_control(ring, l, &pulled, NULL);
    idist__verb_received(ring, v, peer);
    return true;
}

// A large message was announced and somebody wants it.
static void idist__link_clear_to_send(idist__ring *ring, idist__link *l, int peer, idist__verb *v, const idist__frame *f) {
    idist__frame cts;
    if (idist__link_pull(ring, l, peer, v, f)) return;
    memset(&cts, 0, sizeof cts);
    v->id = ++ring->next_id;
    v->nbytes = (size_t)f->nbytes;
    v->moved = 0;
    v->frame = *f;
    v->started = true;
    idist__verb_put(ring, &l->receiving, v, idist__mix(v->id, 0));
    cts.type = IDIST__CTS;
    cts.ctx = f->ctx;
    cts.id = f->id;
    cts.aux = v->id;
    idist__link_control(ring, l, &cts, NULL);
}

// Gives an early message to a receive. The payload of an eager one may still be coming in.
static void idist__message_give(idist__ring *ring, idist__link *l, int peer, idist__message *m, idist__verb *v) {
    v->frame = m->frame;
    if (m->self_send) {
        idist__verb *sender = m->self_send;
        idist__copy(v->data, sender->data, sender->nbytes);
        idist__message_free(ring, l, m);
        idist__verb_done(ring, sender);
        idist__verb_received(ring, v, peer);
    } else if (m->frame.type == IDIST__RTS) {
        idist__frame f = m->frame;
        idist__message_free(ring, l, m);
        idist__link_clear_to_send(ring, l, peer, v, &f);
    } else if (m->moved < m->frame.nbytes) {
        m->claim = v;
    } else {
        size_t nbytes = (size_t)m->frame.nbytes;
        idist__copy(v->data, m->data, nbytes);
        idist__message_free(ring, l, m);
        if (peer != ring->w->group.rank) idist__link_consumed(ring, l, nbytes);
        idist__verb_received(ring, v, peer);
    }
}

//------------------------------------------------------------------------------
// [ring:verb]  the non-blocking verbs: send and receive
// uses match . used by algo engine
//------------------------------------------------------------------------------

// The largest message that goes out without being asked for.
static size_t idist__eager_nbytes(const idist__ring *ring, const idist__link *l) {
    return l->transport->polled && ring->shm && ring->shm->far ? IDIST__EAGER_NEAR_BYTES : IDIST__EAGER_BYTES;
}

static void idist__verb_send(idist__task *t, int world_rank, uint32_t tag, const void *data, size_t nbytes,
                             const idist__print *print) {
    idist__ring *ring = idist__ring_of(t->group->w);
    idist__link *l = &ring->links[world_rank];
    idist__verb *v = idist__verb_new(ring);
    if (!v) {
        idist__ring_fail(ring, t->group, IDIST_ERR_NO_MEMORY, "out of memory");
        return;
    }
    v->task = t;
    v->send = true;
    v->data = (char *)(uintptr_t)data;
    v->nbytes = nbytes;
    v->frame.ctx = t->group->ctx;
    v->frame.tag = tag;
    v->frame.print = *print;
    v->frame.nbytes = nbytes;
    if (print->kind == IDIST__SEND) {
        l->p2p_sent++;
        idist__op_of(t)->verb = v;
    }
    if (nbytes <= idist__eager_nbytes(ring, l) && l->window >= nbytes + IDIST__FRAME_BYTES) {
        v->frame.type = IDIST__EAGER;
        v->piece = nbytes;
        l->window -= nbytes + IDIST__FRAME_BYTES;
    } else {
        v->frame.type = IDIST__RTS;
        v->id = v->frame.id = ++ring->next_id;
        if (l->transport->polled && ring->shm && ring->shm->far) {
            v->frame.aux = (uint64_t)(uintptr_t)data;
            v->frame.flags = (uint8_t)idist__shm_bell(ring->shm, ring->shm->me)->withdrawn;
        }
    }
    if (print->kind != IDIST__SEND) idist__frame_tell_past(t, &v->frame);
    if (!l->open || l->write_dead) {
        idist__verb_free(ring, v); // its task ends when the loss of that rank is carried out
        return;
    }
    idist__link_push(l, v);
    idist__link_flush(ring, l);
}

// A step of a collective: nbytes go to a rank of the group.
static void idist__send_step(idist__task *t, int to, uint32_t step, const void *data, size_t nbytes) {
    idist__op *o = idist__op_of(t);
    idist__print p = idist__task_print(t, o->algorithm);
    o->nsends++;
    idist__verb_send(t, idist__world_rank(t->group, to), step, data, nbytes, &p);
}

// And nbytes come from one, into slot 0 .. 31 (or -1: only counted).
static void idist__recv_step(idist__task *t, int slot, int from, uint32_t step, void *data, size_t nbytes) {
    idist__op *o = idist__op_of(t);
    idist__ring *ring = idist__ring_of(t->group->w);
    int peer = idist__world_rank(t->group, from);
    idist__link *l = &ring->links[peer];
    idist__verb *v = idist__verb_new(ring);
    idist__hook *hook;
    uint64_t key;
    o->nrecvs++;
    if (slot >= 0) o->rx |= 1u << slot;
    if (!v) {
        idist__ring_fail(ring, t->group, IDIST_ERR_NO_MEMORY, "out of memory");
        return;
    }
    v->task = t;
    v->slot = slot;
    v->data = (char *)data;
    v->nbytes = nbytes;
    v->frame.ctx = t->group->ctx;
    v->frame.tag = step;
    v->frame.print = idist__task_print(t, o->algorithm);
    key = idist__ring_key(v->frame.ctx, peer, false, t->seq);
    idist__verb_put(ring, &l->posted, v, key);
    for (hook = ring->messages[key % IDIST__BUCKETS].first; hook; hook = hook->next) {
        idist__message *m = idist__hook_message(hook);
        if (m->peer != peer || m->claim || m->frame.ctx != v->frame.ctx || m->frame.print.kind == IDIST__SEND) continue;
        if (m->frame.print.seq != t->seq || m->frame.tag != step || m->frame.type > IDIST__RTS) continue;
        v = idist__match_frame(ring, l, peer, &m->frame);
        if (v) idist__message_give(ring, l, peer, m, v);
        return;
    }
}

// A message to ourselves lies among the early ones of our own link.
static void idist__send_to_self(idist__task *t, const idist__print *print) {
    idist__ring *ring = idist__ring_of(t->group->w);
    int me = ring->w->group.rank;
    idist__link *l = &ring->links[me];
    size_t nbytes = t->call.count * idist_dtype_size(t->call.dtype);
    bool eager = nbytes <= IDIST__EAGER_BYTES;
    idist__verb *sender = eager ? NULL : idist__verb_new(ring), *v;
    idist__message *m;
    idist__frame f;
    memset(&f, 0, sizeof f);
    f.type = IDIST__EAGER;
    f.ctx = t->group->ctx;
    f.tag = (uint32_t)t->call.tag;
    f.print = *print;
    f.nbytes = nbytes;
    m = idist__message_new(ring, l, &f, eager ? nbytes : 0);
    if (!m || (!eager && !sender)) {
        idist__complete(t, IDIST_ERR_NO_MEMORY, "out of memory");
        return;
    }
    m->moved = nbytes;
    if (eager) {
        idist__copy(m->data, t->call.send, nbytes);
        idist__complete(t, IDIST_OK, "");
    } else {
        sender->task = t;
        sender->send = true;
        sender->data = (char *)(uintptr_t)t->call.send;
        sender->nbytes = nbytes;
        m->self_send = sender;
    }
    v = idist__match_frame(ring, l, me, &f);
    if (v) idist__message_give(ring, l, me, m, v);
}

static idist__print idist__send_print(const idist_group *g, const idist__call *c) {
    idist__print p;
    memset(&p, 0, sizeof p);
    p.kind = IDIST__SEND;
    p.dtype = (uint8_t)c->dtype;
    p.check = c->count;
    p.root = g->rank;
    return p;
}

static void idist__send_start(idist__task *t) {
    idist__print p = idist__send_print(t->group, &t->call);
    if (t->call.root == t->group->rank) idist__send_to_self(t, &p);
    else
        idist__verb_send(t, idist__world_rank(t->group, t->call.root), (uint32_t)t->call.tag, t->call.send,
                         t->call.count * idist_dtype_size(t->call.dtype), &p);
}

// Waits a moment for another rank, without looking at anything else. False when that was tried often enough.
static bool idist__quick_waits(const idist__ring *ring, int turns) {
    const idist__world *w = ring->w;
    if (ring->failed || __atomic_load_n(&w->nasking, __ATOMIC_RELAXED)) return false; // the long way gives others the lock
    if (turns >= (w->spin_ns ? (int)(w->patience_ns / IDIST__TURN_NS) : IDIST__QUICK_YIELDS)) return false;
    if (w->spin_ns) idist__os_relax();
    else sched_yield();
    return true;
}

// A blocking send while nothing else is under way: into the pipe at once, without task, verb and clock, if it fits.
static bool idist__send_quick(idist_group *g, const idist__call *c) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__link *l = &ring->links[idist__world_rank(g, c->root)];
    idist__frame f;
    struct iovec parts[2];
    if (!l->open || !l->transport->polled || l->out || l->write_dead || ring->failed) return false;
    if (c->count > IDIST__EAGER_NEAR_BYTES) return false;
    memset(&f, 0, sizeof f);
    f.type = IDIST__EAGER;
    f.ctx = g->ctx;
    f.tag = (uint32_t)c->tag;
    f.print = idist__send_print(g, c);
    f.nbytes = c->count * idist_dtype_size(c->dtype);
    parts[0].iov_base = &f;
    parts[0].iov_len = sizeof f;
    parts[1].iov_base = (char *)(uintptr_t)c->send;
    parts[1].iov_len = (size_t)f.nbytes;
    if (f.nbytes > idist__eager_nbytes(ring, l) || l->window < f.nbytes + sizeof f) return false;
    if (!idist__shm_has_room((idist__shm_port *)l->port, sizeof f + (size_t)f.nbytes)) return false;
    l->window -= (size_t)f.nbytes + sizeof f;
    l->p2p_sent++;
    l->transport->write(l->port, parts, f.nbytes ? 2 : 1); // all of it: there is room
    idist__shm_claim((const idist__shm_port *)l->port, sizeof f + (size_t)f.nbytes);
    return true;
}

// The same for a receive: takes the message that is next in the pipe if it is the one wanted, and small.
static bool idist__recv_quick(idist_group *g, const idist__call *c) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__link *l = c->root >= 0 ? &ring->links[idist__world_rank(g, c->root)] : NULL;
    idist__frame f;
    int turns;
    if (!l || !l->open || !l->transport->polled || l->early || l->in_moved || l->ended) return false;
    for (turns = 0; !idist__shm_peek((idist__shm_port *)l->port, &f, sizeof f); turns++)
        if (!idist__quick_waits(ring, turns)) return false;
    if (f.type != IDIST__EAGER || f.ctx != g->ctx || f.print.kind != IDIST__SEND) return false;
    if (f.print.dtype != c->dtype || f.print.check > c->count || (c->tag != IDIST_ANY_TAG && (uint32_t)c->tag != f.tag))
        return false;
    if (f.nbytes > IDIST__EAGER_BYTES || f.nbytes != f.print.check * idist_dtype_size(c->dtype)) return false;
    if (f.nbytes + sizeof f > l->their_window) return false;
    if (idist__shm_there((idist__shm_port *)l->port) < sizeof f + f.nbytes) return false; // the rest is still to come
    l->transport->read(l->port, &f, sizeof f);                                            // all of it is there
    if (f.nbytes) l->transport->read(l->port, c->recv, (size_t)f.nbytes);
    l->p2p_got++;
    l->peer_waits.type = 0;
    l->their_window -= (size_t)f.nbytes + sizeof f;
    idist__link_consumed(ring, l, (size_t)f.nbytes);
    idist__recv_tell(c, c->root, (int)f.tag, (size_t)f.print.check);
    return true;
}

static bool idist__recv_takes(const idist__task *t, const idist__message *m, int from) {
    if (m->peer != from || m->claim || m->frame.type > IDIST__RTS || m->frame.print.kind != IDIST__SEND) return false;
    return m->frame.ctx == t->group->ctx && idist__recv_wants(t, from, (int)m->frame.tag);
}

// The first message of this rank that a receive wants: messages of one rank keep their order.
static idist__message *idist__recv_first(idist__ring *ring, const idist__task *t, int from) {
    idist__message *m = ring->links[from].early;
    idist__hook *hook;
    uint64_t key = idist__ring_key(t->group->ctx, from, true, (uint32_t)t->call.tag);

    if (!m || t->call.tag == IDIST_ANY_TAG) {
        while (m && !idist__recv_takes(t, m, from)) m = m->next;
        return m;
    }
    hook = ring->messages[key % IDIST__BUCKETS].first;
    while (hook && !idist__recv_takes(t, idist__hook_message(hook), from)) hook = hook->next;
    return hook ? idist__hook_message(hook) : NULL;
}

// The earliest message, over all links it may come from, that this receive wants.
static void idist__recv_start(idist__task *t) {
    idist__ring *ring = idist__ring_of(t->group->w);
    idist__ring_group *rg = idist__ring_group_of(t->group);
    idist__verb *v = idist__verb_new(ring);
    idist__message *m, *best = NULL;
    int i, peer = -1;
    if (!v) {
        idist__complete(t, IDIST_ERR_NO_MEMORY, "out of memory");
        return;
    }
    v->task = t;
    v->data = (char *)t->call.recv;
    v->nbytes = t->call.count * idist_dtype_size(t->call.dtype);
    idist__op_of(t)->verb = v;
    if (t->call.root == IDIST_ANY_SOURCE || t->call.tag == IDIST_ANY_TAG) idist__verb_list(&rg->wild, v);
    else
        idist__verb_put(ring, &rg->recvs, v,
                        idist__ring_key(t->group->ctx, t->group->ranks[t->call.root], true, (uint32_t)t->call.tag));
    for (i = 0; i < t->group->size; i++) {
        int from = t->group->ranks[i];
        if (t->call.root != IDIST_ANY_SOURCE && t->call.root != i) continue;
        m = idist__recv_first(ring, t, from);
        if (m && (!best || m->stamp < best->stamp)) {
            best = m;
            peer = from;
        }
    }
    if (!best) return;
    // Older receives did not want it, so it goes to this one, or this one fails.
    v = idist__match_recv(ring, t->group, peer, &best->frame);
    if (v) idist__message_give(ring, &ring->links[peer], peer, best, v);
}

//------------------------------------------------------------------------------
// [ring:algo]  the collectives, in two kinds: few steps for small messages, few bytes for large ones
// uses verb op . used by engine
//
// n ranks, B bytes per rank, a start-up time per message and a time per byte.
//
//   operation       small ("latency")                     large ("bandwidth")
//   barrier         dissemination, log n steps            -
//   broadcast       binomial tree, log n                  chain, B + (n-2) chunks
//   reduce          binomial tree, log n                  chain
//   all_reduce      recursive doubling, B log n bytes     ring, 2 B (n-1)/n bytes
//   all_gather      Bruck, log n steps                    ring, B (n-1) bytes
//   reduce_scatter  recursive doubling of all n blocks    ring, B (n-1) bytes
//   gather, scatter binomial tree, log n                  direct
//   all_to_all      Bruck, log n steps, B n/2 log n bytes pairwise, B (n-1) bytes
//   scan, exscan    recursive doubling, log n             chain
//   v-forms         -                                     direct or pairwise; all_gatherv as ring
//
// Sources: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005; Bruck
// et al., "Efficient Algorithms for All-to-All Communications", 1997; Patarasuk and Yuan, "Bandwidth optimal
// all-reduce", 2009.
//
// Every block of a result is computed in one place, or by ranks that combine the same operands in the same order; so
// all ranks end with the same bits, and no order depends on who came first.
//------------------------------------------------------------------------------

static int idist__wrap(int rank, int n) { return ((rank % n) + n) % n; }

// Elements of block b when `count` are cut into n nearly equal blocks; the first ones are larger by one.
static size_t idist__block_at(size_t count, int n, int b) {
    size_t q = count / (size_t)n, rest = count % (size_t)n;
    return (size_t)b * q + ((size_t)b < rest ? (size_t)b : rest);
}

static size_t idist__block_count(size_t count, int n, int b) {
    return idist__block_at(count, n, b + 1) - idist__block_at(count, n, b);
}

// ---- streams ----
//
// Item k goes out when k < head, or when item k - head has been taken: so a ring sends its own block first (head =
// its chunks) and then passes on what it took, and a link of a chain passes on at once (head = 0). Some receives are
// posted ahead; they land where recv_at says, or in a slot of scratch when it says NULL. The tag is the number of the
// item.

static char *idist__stream_slot(const idist__op *o, size_t k) { return o->slots + (k % IDIST__SLOTS) * o->chunk * o->size; }

static void idist__stream_run(idist__task *t) {
    idist__op *o = idist__op_of(t);
    for (;;) {
        while (o->posted < o->nrecv && o->posted < o->taken + IDIST__SLOTS) {
            idist__item item = o->recv_at(t, o->posted);
            char *at = item.data || !o->slots ? item.data : idist__stream_slot(o, o->posted);
            size_t k = o->posted++;
            idist__recv_step(t, (int)(k % IDIST__SLOTS), item.peer, (uint32_t)k, at, item.nbytes);
        }
        while (o->sent < o->nsend && (o->sent < o->head || o->sent - o->head < o->taken) && o->nsends < IDIST__SLOTS) {
            idist__item item = o->send_at(t, o->sent);
            idist__send_step(t, item.peer, (uint32_t)o->sent++, item.data, item.nbytes);
        }
        if (o->taken == o->posted || (o->rx & (1u << (o->taken % IDIST__SLOTS)))) break;
        if (o->take) o->take(t, o->taken);
        o->taken++;
    }
    if (o->taken == o->nrecv && o->sent == o->nsend && !o->nsends) idist__op_done(t);
}

// Chunk j of a block of `count` elements, as bytes from the block's start. Chunks beyond its end are empty.
static idist__item idist__chunk_of(const idist__op *o, char *block, size_t count, size_t j, int peer) {
    idist__item item;
    size_t at = j * o->chunk < count ? j * o->chunk : count;
    size_t k = count - at < o->chunk ? count - at : o->chunk;
    item.peer = peer;
    item.data = block ? block + at * o->size : NULL;
    item.nbytes = k * o->size;
    return item;
}

static void idist__stream_begin(idist__op *o, size_t nrecv, size_t nsend, size_t head,
                                idist__item (*recv_at)(idist__task *, size_t), idist__item (*send_at)(idist__task *, size_t),
                                void (*take)(idist__task *, size_t)) {
    o->nrecv = nrecv;
    o->nsend = nsend;
    o->head = head;
    o->recv_at = recv_at;
    o->send_at = send_at;
    o->take = take;
    o->run = idist__stream_run;
}

// Cuts blocks of at most `count` elements into chunks.
static void idist__stream_chunks(idist__op *o, size_t count) {
    o->chunk = IDIST__CHUNK_BYTES / (o->size ? o->size : 1); // an element has 1 to 8 bytes
    o->chunks = count ? (count - 1) / o->chunk + 1 : 1;      // NOLINT(clang-analyzer-core.DivideZero)
    if (o->chunks == 1) o->chunk = count ? count : 1;
}

// ---- ring: all_reduce, reduce_scatter, all_gather ----
//
// The ranks form a ring; everybody sends to the right and receives from the left, all links busy at once. With n = 4,
// rank r starts with block r. In step s it sends block r - s and receives block r - s - 1, to which it adds its own
// part:
//
//        step 0     step 1     step 2                    and then the same walk again, without adding,
//   r=0  sends 0    3          2      -> holds sum of 1   hands the finished sums to everybody: steps
//   r=1  sends 1    0          3      -> holds sum of 2   3 .. 5 send 1, 0, 3 from rank 0.
//   r=2  sends 2    1          0      -> holds sum of 3
//   r=3  sends 3    2          1      -> holds sum of 0   2 (n-1)/n of the bytes per rank in all.
//
// Blocks are cut into chunks so that adding one overlaps with receiving the next. The first sends come straight from
// the send buffer and the sums go straight to the receive buffer: nothing is copied beforehand. A block is
// overwritten in the second walk only by data that depends on our first send of it, so in place is safe.

static int idist__ring_block(const idist__op *o, size_t k, int back) {
    return idist__wrap(o->r - (int)(k / o->chunks) - back, o->n);
}

static bool idist__ring_adds(const idist__op *o, size_t k) { return k < (size_t)(o->n - 1) * o->chunks; }

static idist__item idist__all_reduce_item(const idist__op *o, const char *base, size_t k, int block, int peer) {
    size_t at = idist__block_at(o->count, o->n, block) * o->size;
    return idist__chunk_of(o, base ? (char *)(uintptr_t)base + at : NULL, idist__block_count(o->count, o->n, block),
                           k % o->chunks, peer);
}

static idist__item idist__all_reduce_recv(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    return idist__all_reduce_item(o, idist__ring_adds(o, k) ? NULL : o->out, k, idist__ring_block(o, k, 1),
                                  idist__wrap(o->r - 1, o->n));
}

static idist__item idist__all_reduce_send(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    return idist__all_reduce_item(o, k < o->chunks ? o->in : o->out, k, idist__ring_block(o, k, 0),
                                  idist__wrap(o->r + 1, o->n));
}

static void idist__all_reduce_take(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    int b = idist__ring_block(o, k, 1);
    idist__item own = idist__all_reduce_item(o, o->in, k, b, 0), sum = idist__all_reduce_item(o, o->out, k, b, 0);
    if (idist__ring_adds(o, k))
        idist__op_reduce(o, sum.data, idist__stream_slot(o, k), own.data, own.nbytes / o->size, t->call.dtype);
}

static void idist__all_reduce_ring(idist__op *o) {
    size_t steps = 2 * (size_t)(o->n - 1);
    idist__stream_chunks(o, idist__block_count(o->count, o->n, 0));
    idist__stream_begin(o, steps * o->chunks, steps * o->chunks, o->chunks, idist__all_reduce_recv, idist__all_reduce_send,
                        idist__all_reduce_take);
}

// reduce_scatter: the first walk alone, begun one block earlier so that rank r ends with block r. Sums on their way
// are kept in scratch; the last one goes to the receive buffer.
static idist__item idist__reduce_scatter_recv(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    return idist__chunk_of(o, NULL, o->count, k % o->chunks, idist__wrap(o->r - 1, o->n));
}

static idist__item idist__reduce_scatter_send(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    const char *base = k < o->chunks ? o->in : o->work;
    size_t at = (size_t)idist__ring_block(o, k, 1) * o->nbytes;
    return idist__chunk_of(o, (char *)(uintptr_t)base + at, o->count, k % o->chunks, idist__wrap(o->r + 1, o->n));
}

static void idist__reduce_scatter_take(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    int b = idist__ring_block(o, k, 2);
    bool last = k >= (size_t)(o->n - 2) * o->chunks;
    idist__item own = idist__chunk_of(o, (char *)(uintptr_t)o->in + (size_t)b * o->nbytes, o->count, k % o->chunks, 0);
    idist__item sum = idist__chunk_of(o, last ? o->out : o->work + (size_t)b * o->nbytes, o->count, k % o->chunks, 0);
    idist__op_reduce(o, sum.data, idist__stream_slot(o, k), own.data, own.nbytes / o->size, t->call.dtype);
}

static void idist__reduce_scatter_ring(idist__op *o) {
    size_t items;
    idist__stream_chunks(o, o->count);
    items = (size_t)(o->n - 1) * o->chunks;
    idist__stream_begin(o, items, items, o->chunks, idist__reduce_scatter_recv, idist__reduce_scatter_send,
                        idist__reduce_scatter_take);
}

// all_gather and all_gatherv: the second walk alone.
static idist__item idist__all_gather_item(idist__task *t, size_t k, int block, int peer) {
    idist__op *o = idist__op_of(t);
    const idist__call *c = &t->call;
    size_t count = c->recvcounts ? c->recvcounts[block] : o->count;
    size_t at = c->recvcounts ? idist__displ(c->recvcounts, c->recvdispls, block) : (size_t)block * o->count;
    return idist__chunk_of(o, o->out + at * o->size, count, k % o->chunks, peer);
}

static idist__item idist__all_gather_recv(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    return idist__all_gather_item(t, k, idist__ring_block(o, k, 1), idist__wrap(o->r - 1, o->n));
}

static idist__item idist__all_gather_send(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    return idist__all_gather_item(t, k, idist__ring_block(o, k, 0), idist__wrap(o->r + 1, o->n));
}

static void idist__all_gather_ring(idist__task *t) {
    idist__op *o = idist__op_of(t);
    const idist__call *c = &t->call;
    size_t most = o->count, items, at = (size_t)o->r * o->count;
    int i;
    for (i = 0; c->recvcounts && i < o->n; i++)
        if (c->recvcounts[i] > most) most = c->recvcounts[i];
    if (c->recvcounts) at = idist__displ(c->recvcounts, c->recvdispls, o->r);
    idist__copy(o->out + at * o->size, o->in, o->nbytes);
    idist__stream_chunks(o, most);
    items = (size_t)(o->n - 1) * o->chunks;
    idist__stream_begin(o, items, items, o->chunks, idist__all_gather_recv, idist__all_gather_send, NULL);
}

// ---- chain: broadcast, reduce, scan, exscan ----
//
// Chunks travel along the ranks like a bucket brigade; after n - 2 chunks of delay every link carries data all the
// time. v numbers the ranks from the root; the broadcast runs upwards from v = 0, the reduction down to it, the scan
// along the ranks themselves.

static idist__item idist__broadcast_recv(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    return idist__chunk_of(o, o->out, o->count, k, idist__wrap(o->r - 1, o->n));
}

static idist__item idist__broadcast_send(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    return idist__chunk_of(o, o->out, o->count, k, idist__wrap(o->r + 1, o->n));
}

static void idist__broadcast_chain(idist__op *o) {
    idist__stream_chunks(o, o->count);
    idist__stream_begin(o, o->v ? o->chunks : 0, o->v < o->n - 1 ? o->chunks : 0, o->v ? 0 : o->chunks,
                        idist__broadcast_recv, idist__broadcast_send, NULL);
}

static idist__item idist__reduce_recv(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    return idist__chunk_of(o, NULL, o->count, k, idist__wrap(o->r + 1, o->n));
}

static idist__item idist__reduce_send(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    const char *base = o->v == o->n - 1 ? o->in : o->work;
    return idist__chunk_of(o, (char *)(uintptr_t)base, o->count, k, idist__wrap(o->r - 1, o->n));
}

static void idist__reduce_take(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    idist__item own = idist__chunk_of(o, (char *)(uintptr_t)o->in, o->count, k, 0);
    idist__item sum = idist__chunk_of(o, o->v ? o->work : o->out, o->count, k, 0);
    idist__op_reduce(o, sum.data, own.data, idist__stream_slot(o, k), own.nbytes / o->size, t->call.dtype);
}

static void idist__reduce_chain(idist__op *o) {
    idist__stream_chunks(o, o->count);
    idist__stream_begin(o, o->v < o->n - 1 ? o->chunks : 0, o->v ? o->chunks : 0, o->v < o->n - 1 ? 0 : o->chunks,
                        idist__reduce_recv, idist__reduce_send, idist__reduce_take);
}

// What a rank sends on is the prefix with its own part; what it keeps is that (scan) or what came in (exscan).
static idist__item idist__scan_recv(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    return idist__chunk_of(o, NULL, o->count, k, o->r - 1);
}

static idist__item idist__scan_send(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    const char *base = o->r == 0 ? o->in : t->call.kind == IDIST__SCAN ? o->out : o->work;
    return idist__chunk_of(o, (char *)(uintptr_t)base, o->count, k, o->r + 1);
}

static void idist__scan_take(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    idist__item own = idist__chunk_of(o, (char *)(uintptr_t)o->in, o->count, k, 0);
    idist__item out = idist__chunk_of(o, o->out, o->count, k, 0);
    char *came = idist__stream_slot(o, k);
    if (t->call.kind == IDIST__SCAN) {
        idist__op_reduce(o, out.data, came, own.data, own.nbytes / o->size, t->call.dtype);
    } else {
        idist__item sum = idist__chunk_of(o, o->work, o->count, k, 0);
        if (o->r < o->n - 1) idist__op_reduce(o, sum.data, came, own.data, own.nbytes / o->size, t->call.dtype);
        idist__copy(out.data, came, out.nbytes); // after: in place, `own` lies here too
    }
}

static void idist__scan_chain(idist__task *t) {
    idist__op *o = idist__op_of(t);
    if (o->r == 0 && t->call.kind == IDIST__SCAN) idist__copy(o->out, o->in, o->nbytes);
    idist__stream_chunks(o, o->count);
    idist__stream_begin(o, o->r ? o->chunks : 0, o->r < o->n - 1 ? o->chunks : 0, o->r ? 0 : o->chunks, idist__scan_recv,
                        idist__scan_send, idist__scan_take);
}

// ---- direct: gather, scatter, all_to_all and their v-forms ----
//
// Every pair exchanges its own message. In item k a rank sends to r + 1 + k and receives from r - 1 - k, so that
// nobody is everybody's first target. The tag is the distance, which both ends know. Only some are under way at a
// time.

static idist__item idist__direct_item(idist__task *t, int peer, bool receives) {
    idist__op *o = idist__op_of(t);
    const idist__call *c = &t->call;
    const size_t *counts = receives ? c->recvcounts : c->sendcounts, *displs = receives ? c->recvdispls : c->senddispls;
    const char *base = receives ? o->out : o->in;
    bool many = receives ? c->kind != IDIST__SCATTER && c->kind != IDIST__SCATTERV
                         : c->kind != IDIST__GATHER && c->kind != IDIST__GATHERV;
    size_t count = counts ? counts[peer] : o->count;
    idist__item item;
    item.peer = peer;
    item.nbytes = count * o->size;
    item.data = (char *)(uintptr_t)base;
    if (many) item.data += (counts ? idist__displ(counts, displs, peer) : (size_t)peer * o->count) * o->size;
    return item;
}

static idist__item idist__direct_recv(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    bool rooted = idist__has_root(t->call.kind);
    return idist__direct_item(t, rooted && o->r != o->root ? o->root : idist__wrap(o->r - 1 - (int)k, o->n), true);
}

static idist__item idist__direct_send(idist__task *t, size_t k) {
    idist__op *o = idist__op_of(t);
    bool rooted = idist__has_root(t->call.kind);
    return idist__direct_item(t, rooted && o->r != o->root ? o->root : idist__wrap(o->r + 1 + (int)k, o->n), false);
}

// A stream whose items all go at once; the tag of an item is the distance between its two ends.
static void idist__direct_run(idist__task *t) {
    idist__op *o = idist__op_of(t);
    for (;;) {
        while (o->posted < o->nrecv && o->nrecvs < IDIST__SLOTS) {
            idist__item item = o->recv_at(t, o->posted++);
            idist__recv_step(t, -1, item.peer, (uint32_t)idist__wrap(o->r - item.peer, o->n), item.data, item.nbytes);
        }
        if (o->sent == o->nsend || o->nsends >= IDIST__SLOTS) break;
        {
            idist__item item = o->send_at(t, o->sent++);
            idist__send_step(t, item.peer, (uint32_t)idist__wrap(item.peer - o->r, o->n), item.data, item.nbytes);
        }
    }
    if (o->posted == o->nrecv && !o->nrecvs && o->sent == o->nsend && !o->nsends) idist__op_done(t);
}

static void idist__direct_begin(idist__task *t) {
    idist__op *o = idist__op_of(t);
    const idist__call *c = &t->call;
    bool gathers = c->kind == IDIST__GATHER || c->kind == IDIST__GATHERV,
         scatters = c->kind == IDIST__SCATTER || c->kind == IDIST__SCATTERV;
    bool root = o->r == o->root;
    size_t others = (size_t)(o->n - 1);
    size_t nrecv = gathers ? (root ? others : 0) : scatters ? (root ? 0 : 1) : others;
    size_t nsend = gathers ? (root ? 0 : 1) : scatters ? (root ? others : 0) : others;
    if (!idist__has_root(c->kind) || root) { // the own part
        idist__item from = idist__direct_item(t, o->r, false), to = idist__direct_item(t, o->r, true);
        idist__copy(to.data, from.data, to.nbytes);
    }
    idist__stream_begin(o, nrecv, nsend, 0, idist__direct_recv, idist__direct_send, NULL);
    o->run = idist__direct_run;
}

// ---- straight code: the small-message algorithms ----

// In round k everybody tells the rank k further on; after log n rounds everybody has heard of all (Hensgen, Finkel,
// Manber 1988).
static void idist__barrier_dissemination(idist__task *t) {
    idist__op *o = idist__op_of(t);
    int n = o->n, r = o->r;
    IDIST__CO_BEGIN(o)
    for (o->mask = 1; o->mask < n; o->mask *= 2) {
        idist__recv_step(t, 0, idist__wrap(r - o->mask, n), (uint32_t)o->mask, NULL, 0);
        idist__send_step(t, idist__wrap(r + o->mask, n), (uint32_t)o->mask, NULL, 0);
        IDIST__CO_AWAIT(o, !o->rx);
    }
    IDIST__CO_AWAIT(o, !o->nsends);
    idist__op_done(t);
    IDIST__CO_END(o)
}

// v receives from v without its lowest set bit, then serves the bits below: 0 -> 4, 2, 1; 4 -> 6, 5; 6 -> 7.
static void idist__broadcast_tree(idist__task *t) {
    idist__op *o = idist__op_of(t);
    int n = o->n, v = o->v;
    IDIST__CO_BEGIN(o)
    for (o->mask = 1; o->mask < n && !(v & o->mask); o->mask *= 2) continue;
    if (v) {
        idist__recv_step(t, 0, idist__wrap(v - o->mask + o->root, n), 0, o->out, o->nbytes);
        IDIST__CO_AWAIT(o, !o->rx);
    }
    for (o->mask /= 2; o->mask; o->mask /= 2)
        if (v + o->mask < n) idist__send_step(t, idist__wrap(v + o->mask + o->root, n), 0, o->out, o->nbytes);
    IDIST__CO_AWAIT(o, !o->nsends);
    idist__op_done(t);
    IDIST__CO_END(o)
}

// The same tree upwards. acc covers the ranks v .. v + mask - 1, what comes in the next `mask`. For an op that does
// not commute the tree stands on rank 0 (v = r), and rank 0 passes the result on to the root. work: the sum, then
// room for one message.
static void idist__reduce_tree(idist__task *t) {
    idist__op *o = idist__op_of(t);
    int n = o->n, v = o->v, base = idist__wrap(o->r - v, n);
    char *came = o->work + o->nbytes;
    IDIST__CO_BEGIN(o)
    idist__copy(o->work, o->in, o->nbytes);
    for (o->mask = 1; o->mask < n && !(v & o->mask); o->mask *= 2) {
        if (v + o->mask >= n) continue;
        idist__recv_step(t, 0, idist__wrap(v + o->mask + base, n), 0, came, o->nbytes);
        IDIST__CO_AWAIT(o, !o->rx);
        idist__op_reduce(o, o->work, o->work, came, o->count, t->call.dtype);
    }
    if (v) idist__send_step(t, idist__wrap(v - o->mask + base, n), 0, o->work, o->nbytes);
    else if (o->r != o->root) idist__send_step(t, o->root, 1, o->work, o->nbytes);
    if (o->r == o->root && v) {
        idist__recv_step(t, 0, base, 1, o->out, o->nbytes);
        IDIST__CO_AWAIT(o, !o->rx);
    } else if (o->r == o->root) {
        idist__copy(o->out, o->work, o->nbytes);
    }
    IDIST__CO_AWAIT(o, !o->nsends);
    idist__op_done(t);
    IDIST__CO_END(o)
}

// In round k partners at distance 2^k exchange what they have and add it: log n rounds. When n is no power of two,
// the first 2 (n - p2) ranks pair up first, and the odd one of a pair gets the result at the end. A partner's sum
// covers the ranks just below or just above ours, so the order of the ranks is kept. acc is o->out for all_reduce,
// o->work for reduce_scatter; `came` one message of scratch behind. o->i counts elements.
static void idist__doubling(idist__task *t) {
    idist__op *o = idist__op_of(t);
    int r = o->r, rest = o->n - o->p2, partner, rank;
    bool scatter = t->call.kind == IDIST__REDUCE_SCATTER;
    size_t count = scatter ? o->count * (size_t)o->n : o->count, nbytes = count * o->size;
    char *acc = scatter ? o->work : o->out, *came = scatter ? o->work + nbytes : o->work;
    IDIST__CO_BEGIN(o)
    idist__copy(acc, o->in, nbytes);
    o->nr = r < 2 * rest ? (r % 2 ? -1 : r / 2) : r - rest;
    if (r < 2 * rest && r % 2) {
        idist__send_step(t, r - 1, 0, acc, nbytes);
    } else if (r < 2 * rest) {
        idist__recv_step(t, 0, r + 1, 0, came, nbytes);
        IDIST__CO_AWAIT(o, !o->rx);
        idist__op_reduce(o, acc, acc, came, count, t->call.dtype);
    }
    for (o->mask = 1; o->mask < o->p2 && o->nr >= 0; o->mask *= 2) {
        partner = o->nr ^ o->mask;
        rank = partner < rest ? 2 * partner : partner + rest;
        idist__recv_step(t, 0, rank, (uint32_t)o->mask, came, nbytes);
        idist__send_step(t, rank, (uint32_t)o->mask, acc, nbytes);
        IDIST__CO_AWAIT(o, !o->rx && !o->nsends);
        if ((o->nr ^ o->mask) < o->nr) idist__op_reduce(o, acc, came, acc, count, t->call.dtype);
        else idist__op_reduce(o, acc, acc, came, count, t->call.dtype);
    }
    if (r < 2 * rest && r % 2) {
        IDIST__CO_AWAIT(o, !o->nsends);
        idist__recv_step(t, 0, r - 1, 1u << 30, acc, nbytes);
    } else if (r < 2 * rest) {
        idist__send_step(t, r + 1, 1u << 30, acc, nbytes);
    }
    IDIST__CO_AWAIT(o, !o->rx && !o->nsends);
    if (scatter) idist__copy(o->out, acc + (size_t)r * o->nbytes, o->nbytes);
    idist__op_done(t);
    IDIST__CO_END(o)
}

// After round k we hold the blocks r .. r + 2^(k+1) - 1, in this order, from the start of work; at the end they are
// turned into place.
static void idist__all_gather_bruck(idist__task *t) {
    idist__op *o = idist__op_of(t);
    int n = o->n, r = o->r, part;
    IDIST__CO_BEGIN(o)
    idist__copy(o->work, o->in, o->nbytes);
    for (o->mask = 1; o->mask < n; o->mask *= 2) {
        part = o->mask < n - o->mask ? o->mask : n - o->mask;
        idist__recv_step(t, 0, idist__wrap(r + o->mask, n), (uint32_t)o->mask, o->work + (size_t)o->mask * o->nbytes,
                         (size_t)part * o->nbytes);
        idist__send_step(t, idist__wrap(r - o->mask, n), (uint32_t)o->mask, o->work, (size_t)part * o->nbytes);
        IDIST__CO_AWAIT(o, !o->rx && !o->nsends);
    }
    idist__copy(o->out + (size_t)r * o->nbytes, o->work, (size_t)(n - r) * o->nbytes);
    idist__copy(o->out, o->work + (size_t)(n - r) * o->nbytes, (size_t)r * o->nbytes);
    idist__op_done(t);
    IDIST__CO_END(o)
}

// Ranks below v in the binomial tree: how many blocks v holds once its children have sent.
static int idist__subtree(int v, int n) {
    int mask;
    for (mask = 1; mask < n && !(v & mask); mask *= 2) continue;
    return v + mask < n ? mask : n - v;
}

// work: the blocks of v, v + 1, ... in this order. The root puts them where they belong.
static void idist__gather_tree(idist__task *t) {
    idist__op *o = idist__op_of(t);
    int n = o->n, v = o->v, i;
    IDIST__CO_BEGIN(o)
    idist__copy(o->work, o->in, o->nbytes);
    for (o->mask = 1; o->mask < n && !(v & o->mask); o->mask *= 2)
        if (v + o->mask < n)
            idist__recv_step(t, -1, idist__wrap(v + o->mask + o->root, n), 0, o->work + (size_t)o->mask * o->nbytes,
                             (size_t)idist__subtree(v + o->mask, n) * o->nbytes);
    IDIST__CO_AWAIT(o, !o->nrecvs);
    if (v) idist__send_step(t, idist__wrap(v - o->mask + o->root, n), 0, o->work, (size_t)idist__subtree(v, n) * o->nbytes);
    else
        for (i = 0; i < n; i++)
            idist__copy(o->out + (size_t)idist__wrap(i + o->root, n) * o->nbytes, o->work + (size_t)i * o->nbytes,
                        o->nbytes);
    IDIST__CO_AWAIT(o, !o->nsends);
    idist__op_done(t);
    IDIST__CO_END(o)
}

static void idist__scatter_tree(idist__task *t) {
    idist__op *o = idist__op_of(t);
    int n = o->n, v = o->v, i;
    IDIST__CO_BEGIN(o)
    for (o->mask = 1; o->mask < n && !(v & o->mask); o->mask *= 2) continue;
    if (v) {
        idist__recv_step(t, 0, idist__wrap(v - o->mask + o->root, n), 0, o->work, (size_t)idist__subtree(v, n) * o->nbytes);
        IDIST__CO_AWAIT(o, !o->rx);
    } else {
        for (i = 0; i < n; i++)
            idist__copy(o->work + (size_t)i * o->nbytes, o->in + (size_t)idist__wrap(i + o->root, n) * o->nbytes, o->nbytes);
    }
    for (o->mask /= 2; o->mask; o->mask /= 2)
        if (v + o->mask < n)
            idist__send_step(t, idist__wrap(v + o->mask + o->root, n), 0, o->work + (size_t)o->mask * o->nbytes,
                             (size_t)idist__subtree(v + o->mask, n) * o->nbytes);
    IDIST__CO_AWAIT(o, !o->nsends);
    idist__copy(o->out, o->work, o->nbytes);
    idist__op_done(t);
    IDIST__CO_END(o)
}

// Block i of work is for the rank i further on. In round k all blocks whose number has bit k travel 2^k ranks; a
// block arrives after the rounds of its bits. Then block i came from the rank i before us. work: n blocks, a pack of
// blocks to send, one that comes.
static void idist__all_to_all_bruck(idist__task *t) {
    idist__op *o = idist__op_of(t);
    int n = o->n, r = o->r, i;
    char *pack = o->work + (size_t)n * o->nbytes, *came = pack + (size_t)n * o->nbytes;
    IDIST__CO_BEGIN(o)
    for (i = 0; i < n; i++)
        idist__copy(o->work + (size_t)i * o->nbytes, o->in + (size_t)idist__wrap(r + i, n) * o->nbytes, o->nbytes);
    for (o->mask = 1; o->mask < n; o->mask *= 2) {
        for (i = 0, o->k = 0; i < n; i++)
            if (i & o->mask) idist__copy(pack + o->k++ * o->nbytes, o->work + (size_t)i * o->nbytes, o->nbytes);
        idist__recv_step(t, 0, idist__wrap(r - o->mask, n), (uint32_t)o->mask, came, o->k * o->nbytes);
        idist__send_step(t, idist__wrap(r + o->mask, n), (uint32_t)o->mask, pack, o->k * o->nbytes);
        IDIST__CO_AWAIT(o, !o->rx && !o->nsends);
        for (i = 0, o->k = 0; i < n; i++)
            if (i & o->mask) idist__copy(o->work + (size_t)i * o->nbytes, came + o->k++ * o->nbytes, o->nbytes);
    }
    for (i = 0; i < n; i++)
        idist__copy(o->out + (size_t)idist__wrap(r - i, n) * o->nbytes, o->work + (size_t)i * o->nbytes, o->nbytes);
    idist__op_done(t);
    IDIST__CO_END(o)
}

// Hillis and Steele: after round k acc covers the 2^(k+1) ranks up to ours. exscan hands the finished prefix to the
// next rank. work: acc, then room for one message.
static void idist__scan_doubling(idist__task *t) {
    idist__op *o = idist__op_of(t);
    int n = o->n, r = o->r;
    char *acc = o->work, *came = o->work + o->nbytes;
    IDIST__CO_BEGIN(o)
    idist__copy(acc, o->in, o->nbytes);
    for (o->mask = 1; o->mask < n; o->mask *= 2) {
        if (r >= o->mask) idist__recv_step(t, 0, r - o->mask, (uint32_t)o->mask, came, o->nbytes);
        if (r + o->mask < n) idist__send_step(t, r + o->mask, (uint32_t)o->mask, acc, o->nbytes);
        IDIST__CO_AWAIT(o, !o->rx && !o->nsends);
        if (r >= o->mask) idist__op_reduce(o, acc, came, acc, o->count, t->call.dtype);
    }
    if (t->call.kind == IDIST__SCAN) {
        idist__copy(o->out, acc, o->nbytes);
    } else {
        if (r) idist__recv_step(t, 0, r - 1, 1u << 30, o->out, o->nbytes);
        if (r + 1 < n) idist__send_step(t, r + 1, 1u << 30, acc, o->nbytes);
    }
    IDIST__CO_AWAIT(o, !o->rx && !o->nsends);
    idist__op_done(t);
    IDIST__CO_END(o)
}

//------------------------------------------------------------------------------
// [ring:choose]  which algorithm, with which scratch
// uses algo . used by engine
//------------------------------------------------------------------------------

// The end of a reduction: average, and back to narrow floats. o->out holds `count` elements on the ranks that get a result.
static void idist__reduction_finish(idist__task *t) {
    idist__op *o = idist__op_of(t);
    const idist__call *c = &t->call;
    idist_dtype dtype = c->dtype;
    bool narrow = idist__type_is_narrow(dtype) && !(o->user && o->user->fn);
    if ((c->kind == IDIST__REDUCE && o->r != o->root) || (c->kind == IDIST__EXSCAN && o->r == 0)) return;
    if (!o->user) idist__reduce_finish(o->out, o->count, narrow ? IDIST_F32 : dtype, c->op, o->n);
    if (narrow) idist__type_narrow(c->recv, (const float *)(const void *)o->out, o->count, dtype);
}

// Where the large algorithm begins to win, in bytes of one rank's contribution. Measured with idist_perf over unix
// sockets and loopback TCP at 2 to 8 ranks.
static size_t idist__switch_bytes(idist__kind kind) {
    switch (kind) {
    case IDIST__ALL_REDUCE: return (size_t)64 * 1024;
    case IDIST__BROADCAST:
    case IDIST__REDUCE: return (size_t)256 * 1024;
    case IDIST__SCAN:
    case IDIST__EXSCAN: return (size_t)128 * 1024;
    case IDIST__ALL_GATHER:
    case IDIST__REDUCE_SCATTER: return (size_t)16 * 1024;
    default: return (size_t)2 * 1024; // gather, scatter, all_to_all: trees carry blocks several times
    }
}

static int idist__choose(const idist__task *t) {
    const idist__op *o = idist__op_of(t);
    idist__kind kind = t->call.kind;
    int forced = t->group->w->cfg.algorithm;
    bool commutes = !o->user || o->user->commutative;
    if (kind == IDIST__BARRIER) return 1;
    if (idist__kind_is_v(kind)) return 2;
    if (!o->count) return 1;
    // Chains and rings start at different ranks for different blocks, so they need an op that commutes; a scan keeps
    // the order.
    if (!commutes && kind != IDIST__SCAN && kind != IDIST__EXSCAN) return 1;
    if (forced == 1 || forced == 2) return forced;
    return o->nbytes <= idist__switch_bytes(kind) ? 1 : 2;
}

// Scratch in bytes: what the algorithm itself works in.
static size_t idist__work_nbytes(const idist__task *t) {
    const idist__op *o = idist__op_of(t);
    size_t n = (size_t)o->n, b = o->nbytes;
    bool small = o->algorithm == 1;
    switch (t->call.kind) {
    case IDIST__ALL_REDUCE: return small ? b : 0;
    case IDIST__REDUCE: return small ? 2 * b : o->v ? b : 0;
    case IDIST__SCAN: return small ? 2 * b : 0;
    case IDIST__EXSCAN: return small ? 2 * b : b;
    case IDIST__REDUCE_SCATTER: return small ? 2 * n * b : n * b;
    case IDIST__ALL_GATHER: return small ? n * b : 0;
    case IDIST__GATHER:
    case IDIST__SCATTER: return small ? (size_t)idist__subtree(o->v, o->n) * b : 0;
    case IDIST__ALL_TO_ALL: return small ? 3 * n * b : t->call.send == t->call.recv ? n * b : 0;
    default: return 0;
    }
}

static void idist__op_choose_run(idist__task *t) {
    idist__op *o = idist__op_of(t);
    bool small = o->algorithm == 1;
    switch (t->call.kind) {
    case IDIST__BARRIER: o->run = idist__barrier_dissemination; break;
    case IDIST__BROADCAST:
        o->run = idist__broadcast_tree;
        if (!small) idist__broadcast_chain(o);
        break;
    case IDIST__REDUCE:
        o->run = idist__reduce_tree;
        if (!small) idist__reduce_chain(o);
        break;
    case IDIST__ALL_REDUCE:
        o->run = idist__doubling;
        if (!small) idist__all_reduce_ring(o);
        break;
    case IDIST__REDUCE_SCATTER:
        o->run = idist__doubling;
        if (!small) idist__reduce_scatter_ring(o);
        break;
    case IDIST__SCAN:
    case IDIST__EXSCAN:
        o->run = idist__scan_doubling;
        if (!small) idist__scan_chain(t);
        break;
    case IDIST__ALL_GATHER:
    case IDIST__ALL_GATHERV:
        o->run = idist__all_gather_bruck;
        if (!small) idist__all_gather_ring(t);
        break;
    case IDIST__GATHER:
        o->run = idist__gather_tree;
        if (!small) idist__direct_begin(t);
        break;
    case IDIST__SCATTER:
        o->run = idist__scatter_tree;
        if (!small) idist__direct_begin(t);
        break;
    case IDIST__ALL_TO_ALL:
        o->run = idist__all_to_all_bruck;
        if (small) break;
        if (t->call.send == t->call.recv && o->nbytes) { // in place: the pairs would overwrite each other
            idist__copy(o->work, o->in, (size_t)o->n * o->nbytes);
            o->in = o->work;
        }
        idist__direct_begin(t);
        break;
    default: idist__direct_begin(t); break;
    }
}

static size_t idist__align(size_t nbytes) { return (nbytes + 63) & ~(size_t)63; }

// Sets a collective up: what it works on, in which type, by which algorithm. False when memory is short.
static bool idist__op_begin(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__call *c = &t->call;
    idist__world *w = t->group->w;
    bool reduces = idist__kind_reduces(c->kind), narrow, scaled;
    size_t nin, nwork, nslots, nout;
    o->n = t->group->size;
    o->r = t->group->rank;
    o->root = c->root;
    if ((int)c->op >= IDIST_OP_USER) {
        o->user_op = *idist__call_user_op(t->group, c);
        o->user = &o->user_op;
    }
    narrow = reduces && idist__type_is_narrow(c->dtype) && !(o->user && o->user->fn);
    scaled = reduces && o->user && !o->user->fn;
    o->size = narrow ? sizeof(float) : idist_dtype_size(c->dtype);
    o->count = c->count;
    o->nbytes = o->count * o->size;
    o->in = idist__op_buffer(c->send);
    o->out = idist__op_buffer(c->recv);
    for (o->p2 = 1; o->p2 * 2 <= o->n; o->p2 *= 2) continue;
    o->v = idist__has_root(c->kind) ? idist__wrap(o->r - o->root, o->n) : o->r;
    if (c->kind == IDIST__REDUCE && o->user && !o->user->commutative) o->v = o->r;
    if (reduces && !(o->user && o->user->fn))
        o->reduce = idist__reduce_table[(unsigned)c->dtype][o->user ? (unsigned)IDIST_SUM : (unsigned)c->op];
    o->algorithm = idist__choose(t);
    nin = narrow || scaled ? idist__align((c->kind == IDIST__REDUCE_SCATTER ? (size_t)o->n : 1) * o->nbytes) : 0;
    nout = narrow ? idist__align(o->nbytes) : 0;
    nwork = idist__align(idist__work_nbytes(t));
    nslots = reduces && o->algorithm == 2
                 ? IDIST__SLOTS * (o->nbytes < IDIST__CHUNK_BYTES ? idist__align(o->nbytes) : IDIST__CHUNK_BYTES)
                 : 0;
    if (nin + nout + nwork + nslots) {
        o->memory = (char *)idist__mem_raw(&w->cfg.mem, nin + nout + nwork + nslots);
        if (!o->memory) return false;
    }
    o->work = o->memory ? o->memory + nin + nout : idist__op_buffer(NULL);
    if (nslots) o->slots = o->work + nwork;
    if (nin) {
        size_t count = o->count * (c->kind == IDIST__REDUCE_SCATTER ? (size_t)o->n : 1);
        if (narrow) idist__type_widen((float *)(void *)o->memory, o->in, count, c->dtype);
        else idist__copy(o->memory, o->in, count * o->size);
        o->in = o->memory;
        if (scaled) idist__reduce_scale(o->memory, count, narrow ? IDIST_F32 : c->dtype, o->user->factor);
    }
    if (narrow && o->memory) o->out = o->memory + nin;
    if (reduces) o->finish = idist__reduction_finish;
    return true;
}

//------------------------------------------------------------------------------
// [ring:share]  collectives of ranks that share memory
// uses shm match op . used by engine
//
// Every rank has a place in memory that all can read: it writes there what the others need, says so, reads what it
// needs from theirs. Nothing is ever written into somebody else's place, so nobody waits for a lock.
//
//   place    notice 0 | notice 1 | ... | notice 7 | pace | buffer 0 | buffer 1 | buffer 2
//
// A notice announces a call: its number, its fingerprint, and a small contribution. That is all a small collective
// needs (FLAT): one line written, one line read per rank, and everybody computes the result, in the same order of
// ranks and so with the same bits. Who enters call k has compared all notices up to k - 4 with its own calls, and those
// of the ranks it reads from up to k; so a rank that has entered k is through with k - 4, and the notice of k - 4 may be
// overwritten by that of k + 4, eight being there in turn.
//
// Large contributions (CHUNKED) go through the three buffers, a chunk at a time. The pace counts chunks, over all calls:
//
//   exposed   my part of the chunk lies in my buffer
//   reduced   my buffer holds the finished sums of my block of it (all_reduce and reduce: each rank adds up one block)
//   freed     I have read what I need of it
//
//   rank 0   expose 0   expose 1   take 0   expose 2   take 1   ...      a rank is at most one chunk ahead, so that
//   rank 1   expose 0   expose 1   take 0   expose 2   take 1            nobody waits while there is something to copy
//
// A contribution that lies in a window (idist_alloc) is not copied: its notice says where it is, and the others read it
// there. When all buffers of an all_reduce are in windows (WHOLE), each rank adds up its block of all of them and writes
// the sums into all of them: every byte is read once and written once.
//
// Where the kernel lets us read the memory of the other processes, large contributions are not copied either (FAR): the
// notice has their address. For all_reduce with a core for each rank: every rank adds up its block into its own result,
// and then reads the other blocks in the results of the others. Whoever gives something to be read where it is stays
// until all have read it.
//
// The idea of flat slots is that of Graham and Shipman, "MPI Support for Multi-core Architectures", 2008; for the chunks,
// reduce-scatter and all-gather in one buffer, see Jain et al., "Framework for Scalable Intra-Node Collective
// Operations using Shared Memory", 2018.
//------------------------------------------------------------------------------

#define IDIST__NOTICES 8
#define IDIST__AHEAD 4 // half of them
#define IDIST__CHUNK_MOST ((size_t)384 * 1024)
#define IDIST__CHUNK_CROWDED ((size_t)128 * 1024)
enum { IDIST__BUFFERS = 3 };
#define IDIST__FLAT_BYTES ((size_t)4096)
#define IDIST__LET_GO_MS 100
#define IDIST__INLINE_BYTES ((size_t)32)
#define IDIST__ALONE_BYTES ((size_t)128 * 1024)
#define IDIST__FAR_BYTES ((size_t)8 * 1024) // from how many bytes on, found by measuring: of a block, ...
#define IDIST__FAR_CROWDED ((size_t)64 * 1024)
#define IDIST__FAR_BROADCAST ((size_t)2 << 20) // ... up to here
#define IDIST__FAR_SUMS ((size_t)2 << 20)      // and of all that one gives to be added up
#define IDIST__NOTICE_BYTES \
    (2 * IDIST__LINE + IDIST__FLAT_BYTES) // the last line: the call before, if that one was made of messages

enum { IDIST__FLAT = 3, IDIST__CHUNKED = 4 }; // algorithms, after those made of messages

typedef struct idist__notice { // one line; room for IDIST__FLAT_BYTES follows
    uint32_t nth;              // number of the shared call, written last
    uint16_t past;             // digest of the calls before it
    uint16_t zero;
    idist__print print;
    union {
        char bytes[IDIST__INLINE_BYTES]; // FLAT: a contribution of at most this size
        struct {                         // CHUNKED
            uint64_t send_at, recv_at;   // where the buffers lie in the file; 0: not in a window
            uint64_t far_send, far_recv; // their addresses, to be read through the kernel; 0: not that way
        } where;
        struct {           // the same, v-forms
            uint64_t most; // elements of the largest part. The counts follow the line.
        } parts;
    } u;
} idist__notice;

typedef struct idist__pace { // two lines; only `left` is written by others
    idist__counter exposed, reduced, freed;
    char pad[40];
    uint32_t left; // members that freed the group: then the place can serve another one
    char pad2[60];
} idist__pace;

// Where the contribution and the result of a rank are: at an address here, when they are in a window, or at one there,
// when we may read its memory; else NULL and 0.
typedef struct idist__spot {
    char *send, *recv;
    uint64_t far_send, far_recv;
} idist__spot;

typedef struct idist__share {
    idist__shm *shm;
    char **places;      // by rank in the group
    uint32_t *entered;  // by rank: the last shared call it is known to have entered
    const void **from;  // scratch, one per rank
    idist__spot *spots; // CHUNKED: where the buffers of each rank are

    idist__print prints[IDIST__NOTICES]; // what our own notices say
    uint16_t pasts[IDIST__NOTICES];
    uint32_t nth;     // shared calls entered so far
    uint32_t sure;    // the notices of all ranks up to this call are known and compared
    bool early;       // the quick way has entered the call that comes next
    uint64_t uses;    // chunks so far
    size_t recent[2]; // what the last two calls gave in their notices, in bytes
    size_t chunk_nbytes;
    idist__task *head, *last; // shared calls under way; only the first one runs
    idist__task *quick;       // serves the quick way
} idist__share;

static size_t idist__place_nbytes(size_t chunk_nbytes) {
    size_t n = IDIST__NOTICES * IDIST__NOTICE_BYTES + sizeof(idist__pace) + IDIST__BUFFERS * chunk_nbytes;
    return (n + IDIST__PAGE - 1) & ~(IDIST__PAGE - 1);
}

static idist__notice *idist__share_notice(const idist__share *s, int rank, uint32_t nth) {
    return (idist__notice *)(void *)(s->places[rank] + (nth % IDIST__NOTICES) * IDIST__NOTICE_BYTES);
}

// What that rank called before the call of a notice. It is written only if that was made of messages: see its number.
static idist__print *idist__share_before(const idist__share *s, int rank, uint32_t nth) {
    char *notice = (char *)idist__share_notice(s, rank, nth);
    return (idist__print *)(void *)(notice + IDIST__LINE + IDIST__FLAT_BYTES);
}

static idist__pace *idist__share_pace(const idist__share *s, int rank) {
    return (idist__pace *)(void *)(s->places[rank] + IDIST__NOTICES * IDIST__NOTICE_BYTES);
}

static char *idist__share_buffer(const idist__share *s, int rank, uint64_t use) {
    return s->places[rank] + IDIST__NOTICES * IDIST__NOTICE_BYTES + sizeof(idist__pace) +
           (size_t)(use % IDIST__BUFFERS) * s->chunk_nbytes;
}

// Copies to lines that others have read before: asks for those further on while it writes.
static void idist__share_put(char *to, const char *from, size_t nbytes) {
    size_t at, lines = nbytes & ~(IDIST__LINE - 1);
    for (at = 0; at < lines; at += IDIST__LINE) {
        if (at + IDIST__CLAIM_BYTES < lines) idist__os_claim(to + at + IDIST__CLAIM_BYTES);
        memcpy(to + at, from + at, IDIST__LINE);
    }
    if (nbytes > lines) memcpy(to + lines, from + lines, nbytes - lines);
}

static idist__share *idist__share_of(const idist__task *t) { return idist__ring_group_of(t->group)->share; }

// Wakes the members that sleep, after something was written that they may wait for.
static void idist__share_knock(const idist__share *s, const idist_group *g) {
    int i;
    if (!idist__shm_any_asleep(s->shm)) return;
    for (i = 0; i < g->size; i++)
        if (i != g->rank) idist__shm_wake(s->shm, s->shm->local[g->ranks[i]]);
}

static void idist__share_publish(idist__task *t, idist__counter *counter, uint64_t value) {
    idist__os_handover();
    __atomic_store_n(counter, value, __ATOMIC_RELEASE);
    idist__share_knock(idist__share_of(t), t->group);
    t->group->w->nmoved++;
}

// ---- who gives what to whom ----

// Whether a contribution is one block per rank of the group, or one block for all.
static bool idist__share_many(idist__kind kind) {
    return kind == IDIST__REDUCE_SCATTER || kind == IDIST__SCATTER || kind == IDIST__ALL_TO_ALL || kind == IDIST__SCATTERV ||
           kind == IDIST__ALL_TO_ALLV;
}

static bool idist__share_gives(const idist__op *o, idist__kind kind, int rank) {
    if (kind == IDIST__BROADCAST || kind == IDIST__SCATTER || kind == IDIST__SCATTERV) return rank == o->root;
    return kind != IDIST__BARRIER;
}

// Whether this rank reads, or waits for, what another one gives.
static bool idist__share_reads(const idist__task *t, int rank) {
    const idist__op *o = idist__op_of(t);
    switch (t->call.kind) {
    case IDIST__BROADCAST:
    case IDIST__SCATTER:
    case IDIST__SCATTERV: return rank == o->root;
    case IDIST__GATHER:
    case IDIST__GATHERV: return o->r == o->root;
    case IDIST__REDUCE: return o->r == o->root || o->algorithm == IDIST__CHUNKED;
    case IDIST__SCAN:
    case IDIST__EXSCAN: return rank < o->r;
    default: return true;
    }
}

// Whether each rank adds up one block for all; for little data it is quicker when everybody adds up all of it.
static bool idist__share_adds_blocks(const idist__op *o, idist__kind kind) {
    return kind == IDIST__REDUCE || (kind == IDIST__ALL_REDUCE && (size_t)(o->n * o->n) * o->nbytes > IDIST__ALONE_BYTES);
}

// Block d of our contribution: elements, and where.
static size_t idist__share_give_count(const idist__task *t, int d) {
    return t->call.sendcounts ? t->call.sendcounts[d] : t->call.count;
}

static const char *idist__share_give_at(const idist__task *t, int d) {
    const idist__op *o = idist__op_of(t);
    if (!idist__share_many(t->call.kind)) return o->in;
    if (t->call.sendcounts) return o->in + idist__displ(t->call.sendcounts, t->call.senddispls, d) * o->size;
    return o->in + (size_t)d * o->nbytes;
}

// What comes from a rank, where nothing is added up: elements, and where to.
static size_t idist__share_take_count(const idist__task *t, int rank) {
    return t->call.recvcounts ? t->call.recvcounts[rank] : t->call.count;
}

static char *idist__share_take_at(const idist__task *t, int rank) {
    const idist__op *o = idist__op_of(t);
    const idist__call *c = &t->call;
    if (c->kind == IDIST__BROADCAST || c->kind == IDIST__SCATTER || c->kind == IDIST__SCATTERV) return o->out;
    if (c->recvcounts) return o->out + idist__displ(c->recvcounts, c->recvdispls, rank) * o->size;
    return o->out + (size_t)rank * o->nbytes;
}

static size_t idist__share_least(size_t a, size_t b) { return a < b ? a : b; }

// Elements of a block of `count` in the chunk that begins at element `at`.
static size_t idist__share_part(const idist__op *o, size_t count, size_t at) {
    return at < count ? idist__share_least(count - at, o->chunk) : 0;
}

// ---- notices ----

static bool idist__share_has_entered(idist__share *s, int rank, uint32_t nth) {
    uint32_t seen;
    if ((int32_t)(s->entered[rank] - nth) >= 0) return true;
    seen = __atomic_load_n(&idist__share_notice(s, rank, nth)->nth, __ATOMIC_ACQUIRE);
    if ((int32_t)(seen - nth) < 0) return false;
    idist__os_handover();
    s->entered[rank] = seen;
    return true;
}

// The notices of a rank and of ourselves for call nth differ.
static void idist__share_differs(idist__task *t, int rank, uint32_t nth) {
    idist__share *s = idist__share_of(t);
    idist__ring *ring = idist__ring_of(t->group->w);
    const idist__print *ours = &s->prints[nth % IDIST__NOTICES], *before = idist__ring_before(t->group, ours);
    idist__print theirs = idist__share_notice(s, rank, nth)->print;
    int peer = t->group->ranks[rank];
    const char *field = idist__print_difference(&theirs, ours);

    if (field || memcmp(&theirs, ours, sizeof theirs) != 0) {
        idist__ring_mismatch(ring, t->group, peer, &theirs, ours, field ? field : "sequence");
        return;
    }
    theirs = *idist__share_before(s, rank, nth);
    if (!before || theirs.seq != before->seq) theirs.kind = 0;
    idist__ring_past_differs(ring, t->group, peer, ours, &theirs);
}

// Compares what a rank called since we last did with what we called, up to number nth.
static bool idist__share_compare(idist__task *t, int rank, uint32_t nth) {
    idist__share *s = idist__share_of(t);
    uint32_t k = (int32_t)(nth - IDIST__AHEAD - s->sure) > 0 ? nth - IDIST__AHEAD : s->sure + 1;

    for (; (int32_t)(nth - k) >= 0; k++) {
        const idist__print *ours = &s->prints[k % IDIST__NOTICES]; // the notice's line is on its way to the others
        const idist__notice *e = idist__share_notice(s, rank, k);

        if (memcmp(&e->print, ours, sizeof *ours) == 0 && e->past == s->pasts[k % IDIST__NOTICES]) continue;
        idist__share_differs(t, rank, k);
        return false;
    }
    return true;
}

static bool idist__share_may_enter(idist__task *t) {
    idist__share *s = idist__share_of(t);
    uint32_t nth = s->nth + 1 - IDIST__AHEAD;
    int i;
    if ((int32_t)(s->sure - nth) >= 0) return true;
    for (i = 0; i < t->group->size; i++)
        if (i != t->group->rank && (!idist__share_has_entered(s, i, nth) || !idist__share_compare(t, i, nth))) return false;
    s->sure = nth;
    return true;
}

// Where a buffer lies in the file, when it is in a window.
static uint64_t idist__share_offset(const idist__share *s, const void *p, size_t nbytes) {
    const idist__shm *m = s->shm;
    size_t at = (size_t)((const char *)p - m->base), end = m->window_at + (size_t)m->n * m->window_nbytes;
    if ((const char *)p < m->base + m->window_at || at >= end || nbytes > end - at) return 0;
    return at;
}

// The same from another rank, checked.
static char *idist__share_pointer(const idist__share *s, uint64_t at, size_t nbytes) {
    const idist__shm *m = s->shm;
    uint64_t end = m->window_at + (uint64_t)m->n * m->window_nbytes;
    if (at < m->window_at || at >= end || nbytes > end - at) return NULL;
    return m->base + at;
}

static size_t idist__share_given_nbytes(const idist__task *t) {
    const idist__op *o = idist__op_of(t);
    return (idist__share_many(t->call.kind) ? (size_t)o->n : 1) * o->nbytes;
}

// Whether contributions are read in the other process, instead of being copied into a buffer: the same on all ranks. It
// copies once only; but system calls are dear, the kernel copies slowly, and a chunk that many read stays in the cache.
static bool idist__share_reads_far(const idist__task *t) {
    const idist__op *o = idist__op_of(t);
    const idist__shm *m = idist__share_of(t)->shm;
    idist__kind kind = t->call.kind;
    if (!m->far || t->group->w->cfg.algorithm == 3) return false;
    if (idist__kind_reduces(kind)) return !m->crowded && idist__share_given_nbytes(t) >= IDIST__FAR_SUMS;
    if (kind == IDIST__BROADCAST) return !m->crowded && o->nbytes >= IDIST__FAR_BYTES && o->nbytes < IDIST__FAR_BROADCAST;
    if (kind == IDIST__ALL_GATHER && m->crowded && o->n > 4) return false;
    return o->nbytes >= (m->crowded ? IDIST__FAR_CROWDED : IDIST__FAR_BYTES);
}

// Where the buffers of a rank are, for a call that goes by chunks.
static void idist__share_locate(idist__task *t, int rank, const idist__notice *e) {
    const idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    idist__spot *spot = &s->spots[rank];
    if (o->algorithm == IDIST__FLAT) return;
    spot->send = idist__share_pointer(s, e->u.where.send_at, idist__share_given_nbytes(t));
    spot->recv = idist__share_pointer(s, e->u.where.recv_at, o->nbytes);
    spot->far_send = spot->send ? 0 : e->u.where.far_send;
    spot->far_recv = e->u.where.far_recv;
}

// The contribution of a rank in its notice.
static char *idist__share_payload(const idist__task *t, int rank) {
    const idist__op *o = idist__op_of(t);
    idist__notice *e = idist__share_notice(idist__share_of(t), rank, o->nth);
    return idist__share_given_nbytes(t) <= sizeof e->u.bytes ? e->u.bytes : (char *)(e + 1);
}

static void idist__share_scale(const idist__task *t, char *buf, size_t count) {
    const idist__op *o = idist__op_of(t);
    if (o->user && !o->user->fn) idist__reduce_scale(buf, count, t->call.dtype, o->user->factor);
}

// Says where our buffers are, so that the others read them there; not where they would read what we overwrite. False: the
// group has failed.
static bool idist__share_offer(idist__task *t, idist__notice *e) {
    idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    const idist__call *c = &t->call;
    bool scaled = o->user && !o->user->fn, all = c->kind == IDIST__ALL_REDUCE;
    bool overwrites = c->send == c->recv && (c->kind == IDIST__ALL_TO_ALL || c->kind == IDIST__SCAN ||
                                             c->kind == IDIST__EXSCAN || (all && !idist__share_adds_blocks(o, c->kind)));
    memset(&e->u, 0, sizeof e->u);
    memset(s->spots, 0, sizeof *s->spots * (size_t)o->n);
    o->far = !scaled && idist__share_reads_far(t);
    if (o->far && overwrites && c->kind == IDIST__ALL_TO_ALL) { // all go the same way, so this one gives a copy
        o->memory = (char *)idist__mem_raw(&t->group->w->cfg.mem, idist__share_given_nbytes(t));
        if (!o->memory) {
            idist__ring_fail(idist__ring_of(t->group->w), t->group, IDIST_ERR_NO_MEMORY, "a rank is out of memory");
            return false;
        }
        memcpy(o->memory, o->in, idist__share_given_nbytes(t));
        o->in = o->memory;
        overwrites = false;
    }
    if (!idist__share_gives(o, c->kind, o->r) || scaled || overwrites) return true;
    e->u.where.send_at = idist__share_offset(s, o->in, idist__share_given_nbytes(t));
    if (all) e->u.where.recv_at = idist__share_offset(s, o->out, o->nbytes);
    if (o->far) e->u.where.far_send = (uint64_t)(uintptr_t)o->in;
    if (o->far && all) e->u.where.far_recv = (uint64_t)(uintptr_t)o->out;
    idist__share_locate(t, o->r, e);
    o->stays = e->u.where.send_at || e->u.where.far_send;
    return true;
}

// The counts of a v-form, which the others compare with what they expect.
static void idist__share_offer_parts(idist__task *t, idist__notice *e) {
    idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    const idist__call *c = &t->call;
    uint64_t *counts = (uint64_t *)(void *)(e + 1);
    int i;
    memset(s->spots, 0, sizeof *s->spots * (size_t)o->n);
    o->most = c->count;
    for (i = 0; i < o->n; i++) {
        counts[i] = idist__share_give_count(t, i);
        if (counts[i] > o->most) o->most = (size_t)counts[i];
        if (c->recvcounts && c->recvcounts[i] > o->most) o->most = c->recvcounts[i];
    }
    e->u.parts.most = o->most;
}

// Takes the lines of the next notice away from those who have read it, while there is nothing to do but wait: likely
// it will be as long as one of the last two.
static void idist__share_claim_next(const idist__task *t) {
    const idist__op *o = idist__op_of(t);
    char *next = (char *)idist__share_notice(idist__share_of(t), o->r, o->nth + 1);
    idist__share *s = idist__share_of(t);
    size_t nbytes, at;
    s->recent[o->nth % 2] = o->algorithm == IDIST__FLAT ? idist__share_given_nbytes(t) : 0;
    nbytes = s->recent[0] > s->recent[1] ? s->recent[0] : s->recent[1];
    if (nbytes <= sizeof(idist__notice) - offsetof(idist__notice, u)) nbytes = 0;
    nbytes = idist__share_least(nbytes, IDIST__CLAIM_BYTES) + IDIST__LINE;
    for (at = 0; at < nbytes; at += IDIST__LINE) idist__os_claim(next + at);
}

// The call before, for the error text of those who called something else before.
static void idist__share_tell_before(const idist__task *t, const idist__print *print) {
    const idist__op *o = idist__op_of(t);
    const idist__print *before = idist__ring_before(t->group, print);

    if (before && (before->algorithm & ~IDIST__ON_DEVICE) < IDIST__FLAT)
        *idist__share_before(idist__share_of(t), o->r, o->nth) = *before;
}

// False: it could not, and the group has failed.
static bool idist__share_enter(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    idist__notice *e;
    idist__print print;
    o->nth = ++s->nth;
    e = idist__share_notice(s, o->r, o->nth);
    if (o->algorithm == IDIST__CHUNKED) {
        if (idist__kind_is_v(t->call.kind)) idist__share_offer_parts(t, e);
        else if (!idist__share_offer(t, e)) return false;
    } else if (idist__share_gives(o, t->call.kind, o->r)) {
        char *payload = idist__share_payload(t, o->r);
        size_t nbytes = idist__share_given_nbytes(t);
        idist__share_put(payload, o->in, nbytes);
        idist__share_scale(t, payload, nbytes / (o->size ? o->size : 1)); // NOLINT(clang-analyzer-core.DivideZero)
    }
    print = idist__task_print(t, o->algorithm);
    idist__share_tell_before(t, &print);
    // The first line at the end, in one go: the others poll it, and take it away between two writes.
    s->prints[o->nth % IDIST__NOTICES] = print;
    s->pasts[o->nth % IDIST__NOTICES] = o->past;
    e->print = print;
    e->past = o->past;
    idist__os_handover();
    __atomic_store_n(&e->nth, o->nth, __ATOMIC_RELEASE);
    idist__share_knock(s, t->group);
    idist__share_claim_next(t);
    o->entered = true;
    o->who = 0;
    return true;
}

// Compares the call of another rank with ours, and what it says about counts that only the two of us know.
static bool idist__share_agree(idist__task *t, int rank) {
    idist__op *o = idist__op_of(t);
    idist__ring *ring = idist__ring_of(t->group->w);
    const idist__notice *e = idist__share_notice(idist__share_of(t), rank, o->nth);
    uint64_t given;
    if (!idist__share_compare(t, rank, o->nth)) return false;
    if (!idist__kind_is_v(t->call.kind)) {
        idist__share_locate(t, rank, e);
        return true;
    }
    o->most = e->u.parts.most > o->most ? (size_t)e->u.parts.most : o->most;
    given = ((const uint64_t *)(const void *)(e + 1))[o->r];
    if (!idist__share_gives(o, t->call.kind, rank) || !idist__share_reads(t, rank) ||
        given == idist__share_take_count(t, rank))
        return true;
    {
        char cause[400];
        idist__counts_text(t->group->ranks[rank], given, t->group->ranks[o->r], idist__share_take_count(t, rank), "elements",
                           t, cause, sizeof cause);
        idist__ring_fail(ring, t->group, IDIST_ERR_MISMATCH, cause);
    }
    return false;
}

// Whether those whose data we need, or all, are in this call too.
static bool idist__share_entered(idist__task *t, bool all) {
    idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    bool everybody = true;
    int i;
    for (; o->who < o->n; o->who++) {
        if (o->who == o->r) continue;
        if (!all && !idist__share_reads(t, o->who)) continue;
        if (!idist__share_has_entered(s, o->who, o->nth) || !idist__share_agree(t, o->who)) return false;
    }
    o->who = 0;
    for (i = 0; i < o->n && everybody; i++) everybody = all || i == o->r || idist__share_reads(t, i);
    if (everybody) s->sure = o->nth;
    return true;
}

// ---- taking ----

// Block d of what a rank gives, from element `at` on.
static const char *idist__share_source(const idist__task *t, int rank, int d, size_t at) {
    const idist__op *o = idist__op_of(t);
    const idist__share *s = idist__share_of(t);
    bool many = idist__share_many(t->call.kind);
    if (rank == o->r && !(o->user && !o->user->fn)) return idist__share_give_at(t, d) + at * o->size;
    if (o->algorithm == IDIST__FLAT) return idist__share_payload(t, rank) + (many ? (size_t)d * o->nbytes : 0);
    if (s->spots[rank].send) return s->spots[rank].send + (many ? (size_t)d * o->nbytes : 0) + at * o->size;
    return idist__share_buffer(s, rank, o->use + o->j) +
           ((many ? (size_t)d * o->chunk : 0) + at - o->j * o->chunk) * o->size;
}

// out = from[0] (op) ... (op) from[n - 1]; out may be one of them. User ops work on their second operand: it is folded
// from the right, a piece at a time.
static void idist__share_reduce(const idist__task *t, void *out, const void *const *from, int n, size_t count) {
    const idist__op *o = idist__op_of(t);
    uint64_t piece[512];
    size_t at, k, most;
    int i;
    if (!o->user || !o->user->fn) {
        idist__reduce_many(out, from, n, count, t->call.dtype, o->user ? IDIST_SUM : t->call.op,
                           t->call.op == IDIST_AVG ? o->n : 0);
        return;
    }
    most = sizeof piece / o->size; // NOLINT(clang-analyzer-core.DivideZero)
    idist__me.callbacks++;
    for (at = 0; at < count; at += k) {
        k = idist__share_least(count - at, most);
        memcpy(piece, (const char *)from[n - 1] + at * o->size, k * o->size);
        for (i = n - 2; i >= 0; i--)
            o->user->fn((const char *)from[i] + at * o->size, piece, k, t->call.dtype, o->user->arg);
        memcpy((char *)out + at * o->size, piece, k * o->size);
    }
    idist__me.callbacks--;
}

// Reads nbytes at an address of another process. On failure the group fails.
static bool idist__share_pull(idist__task *t, int rank, uint64_t at, char *buf, size_t nbytes) {
    const idist__op *o = idist__op_of(t);
    const idist__share *s = idist__share_of(t);
    int world_rank = t->group->ranks[rank], err = idist__shm_pull(s->shm, s->shm->local[world_rank], at, buf, nbytes);
    char cause[300];
    if (!err) return true;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (__atomic_load_n(&idist__share_notice(s, rank, o->nth)->nth, __ATOMIC_ACQUIRE) != o->nth) return false; // it left
    snprintf(cause, sizeof cause,
             err == ESRCH ? "rank %d on %s was lost: its process ended" : "the buffer of rank %d on %s cannot be read: %s",
             world_rank, t->group->w->nodes[world_rank].hostname, strerror(err));
    idist__ring_fail(idist__ring_of(t->group->w), t->group, err == ESRCH ? IDIST_ERR_PEER_LOST : IDIST_ERR_SYSTEM, cause);
    return false;
}

// out = the sum, in the wider sense, over ranks 0 .. n - 1, of `count` elements at `at` of block d of what they give.
// What is far is read piece by piece.
static bool idist__share_add(idist__task *t, char *out, int n, int d, size_t at, size_t count) {
    const idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    size_t done, k, most = o->far ? IDIST__FAR_PIECE / o->size : count; // NOLINT(clang-analyzer-core.DivideZero)
    int i;
    for (done = 0; done < count; done += k) {
        k = idist__share_least(count - done, most);
        for (i = 0; i < n; i++) {
            char *piece = s->shm->pieces + (size_t)i * IDIST__FAR_PIECE;
            uint64_t there = o->far && i != o->r ? s->spots[i].far_send : 0;
            if (there) there += (idist__share_many(t->call.kind) ? (size_t)d * o->nbytes : 0) + (at + done) * o->size;
            if (there && !idist__share_pull(t, i, there, piece, k * o->size)) return false;
            s->from[i] = there ? piece : idist__share_source(t, i, d, at + done);
        }
        idist__share_reduce(t, out + done * o->size, s->from, n, k);
    }
    return true;
}

// FLAT: the sum of what lies in the notices.
static void idist__share_add_flat(const idist__task *t, int n) {
    const idist__op *o = idist__op_of(t);
    const idist__share *s = idist__share_of(t);
    size_t given = idist__share_given_nbytes(t),
           at = given <= IDIST__INLINE_BYTES ? offsetof(idist__notice, u) : IDIST__LINE;
    int i;
    if (given > o->nbytes) at += (size_t)o->r * o->nbytes; // our block of theirs
    for (i = 0; i < n; i++) s->from[i] = (const char *)idist__share_notice(s, i, o->nth) + at;
    if (o->r < n && !(o->user && !o->user->fn)) s->from[o->r] = idist__share_give_at(t, o->r);
    idist__share_reduce(t, o->out, s->from, n, o->count);
}

// Everything this rank takes of one chunk, where no blocks are added up by others. FLAT: of the whole call.
static bool idist__share_take(idist__task *t, size_t at) {
    idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    idist__kind kind = t->call.kind;
    int i, n = kind == IDIST__SCAN ? o->r + 1 : kind == IDIST__EXSCAN ? o->r : o->n;
    if (kind == IDIST__BARRIER) return true;
    if (idist__kind_reduces(kind)) {
        size_t k = idist__share_part(o, o->count, at);
        if ((kind == IDIST__REDUCE && o->r != o->root) || !n || !k) return true;
        if (o->algorithm != IDIST__FLAT) return idist__share_add(t, o->out + at * o->size, n, o->r, at, k);
        idist__share_add_flat(t, n);
        return true;
    }
    for (i = 0; i < o->n; i++) {
        int from = idist__wrap(o->r + i, o->n); // not all from the same one at the same time
        size_t k = idist__share_reads(t, from) ? idist__share_part(o, idist__share_take_count(t, from), at) : 0;
        char *to = k ? idist__share_take_at(t, from) + at * o->size : NULL;
        uint64_t there = o->far && from != o->r ? s->spots[from].far_send : 0;
        if (there) there += (idist__share_many(kind) ? (size_t)o->r * o->nbytes : 0) + at * o->size;
        if (k && there && !idist__share_pull(t, from, there, to, k * o->size)) return false;
        if (k && !there) idist__copy(to, idist__share_source(t, from, o->r, at), k * o->size);
    }
    return true;
}

// Whether what we have just read in the buffers of others was theirs to give: who has left the call with an error may have
// used them for something else since, but took its notice back before. If so, the reason is on its way.
static bool idist__share_still_there(idist__task *t) {
    const idist__op *o = idist__op_of(t);
    const idist__share *s = idist__share_of(t);
    int i;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    for (i = 0; i < o->n; i++)
        if (i != o->r && idist__share_reads(t, i) &&
            __atomic_load_n(&idist__share_notice(s, i, o->nth)->nth, __ATOMIC_ACQUIRE) != o->nth)
            return false;
    return true;
}

static void idist__share_done(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    s->head = o->after;
    if (!s->head) s->last = NULL;
    idist__op_done(t);
}

static void idist__share_flat(idist__task *t) {
    idist__op *o = idist__op_of(t);
    IDIST__CO_BEGIN(o)
    if (!o->entered) {
        IDIST__CO_AWAIT(o, idist__share_may_enter(t));
        idist__share_enter(t);
    }
    IDIST__CO_AWAIT(o, idist__share_entered(t, false));
    idist__share_take(t, 0);
    idist__share_done(t);
    IDIST__CO_END(o)
}

// ---- chunks ----

// Whether all members, or those we read from, have come this far.
static bool idist__share_all(idist__task *t, size_t counter, uint64_t value, bool readers) {
    idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    for (; o->who < o->n; o->who++) {
        const idist__counter *at;
        if (o->who == o->r || (readers && !idist__share_reads(t, o->who))) continue;
        at = (const idist__counter *)(const void *)((const char *)idist__share_pace(s, o->who) + counter);
        if (__atomic_load_n(at, __ATOMIC_ACQUIRE) < value) return false;
    }
    idist__os_handover();
    o->who = 0;
    return true;
}

#define IDIST__ALL_HAVE(t, counter, value) idist__share_all(t, offsetof(idist__pace, counter), value, false)
#define IDIST__SOURCES_HAVE(t, counter, value) idist__share_all(t, offsetof(idist__pace, counter), value, true)

// Where rank b's block of a chunk of k elements begins: whole lines, so that no two ranks write to one.
static size_t idist__share_block_at(const idist__op *o, size_t k, int b) {
    size_t line = IDIST__LINE / o->size, nlines = (k + line - 1) / line; // NOLINT(clang-analyzer-core.DivideZero)
    return idist__share_least(idist__block_at(nlines, o->n, b) * line, k);
}

// Copies our part of chunk i into a buffer; of a sum to be built in blocks, all but the block that we add up ourselves.
static void idist__share_expose_chunk(idist__task *t, size_t i) {
    idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    char *buffer = idist__share_buffer(s, o->r, o->use + i);
    bool many = idist__share_many(t->call.kind), scaled = o->user && !o->user->fn;
    size_t at = i * o->chunk;
    int d;
    if (idist__share_adds_blocks(o, t->call.kind) && !scaled) {
        size_t k = idist__share_part(o, o->count, at), from = idist__share_block_at(o, k, o->r),
               to = idist__share_block_at(o, k, o->r + 1);
        idist__share_put(buffer, o->in + at * o->size, from * o->size);
        idist__share_put(buffer + to * o->size, o->in + (at + to) * o->size, (k - to) * o->size);
        return;
    }
    for (d = 0; d < (many ? o->n : 1); d++) {
        size_t k = idist__share_part(o, idist__share_give_count(t, d), at);
        char *to = buffer + (size_t)d * o->chunk * o->size;
        if (many && d == o->r && !scaled) continue;
        idist__share_put(to, idist__share_give_at(t, d) + at * o->size, k * o->size);
        idist__share_scale(t, to, k);
    }
}

// Exposes up to one chunk ahead. Returns whether the present one is exposed.
static bool idist__share_expose(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    idist__pace *pace = idist__share_pace(s, o->r);
    bool copies = idist__share_gives(o, t->call.kind, o->r) && !o->stays;
    while (o->i < o->chunks && o->i < o->j + 2) {
        uint64_t use = o->use + o->i;
        if (copies && use >= IDIST__BUFFERS && !IDIST__ALL_HAVE(t, freed, use - IDIST__BUFFERS + 1)) break;
        if (copies) idist__share_expose_chunk(t, o->i);
        o->i++;
        idist__share_publish(t, &pace->exposed, o->use + o->i);
    }
    return o->i > o->j;
}

static void idist__share_plan(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    size_t blocks = idist__share_many(t->call.kind) ? (size_t)o->n : 1;
    size_t count = idist__kind_is_v(t->call.kind) ? o->most : o->count, nbytes = s->chunk_nbytes;
    size_t line = IDIST__LINE / o->size; // NOLINT(clang-analyzer-core.DivideZero)
    if (s->shm->crowded && nbytes > IDIST__CHUNK_CROWDED) nbytes = IDIST__CHUNK_CROWDED; // all ranks share the caches
    o->chunk = nbytes / blocks / o->size;
    if (o->chunk > line) o->chunk -= o->chunk % line;
    if (o->far && !idist__kind_reduces(t->call.kind)) o->chunk = count; // no buffer is used
    o->chunks = count ? (count - 1) / o->chunk + 1 : 1;
    o->use = s->uses;
    o->who = 0;
}

static void idist__share_chunked(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    idist__pace *pace = idist__share_pace(s, o->r);
    IDIST__CO_BEGIN(o)
    IDIST__CO_AWAIT(o, idist__share_may_enter(t));
    if (!idist__share_enter(t)) return;
    if (idist__kind_is_v(t->call.kind)) {
        IDIST__CO_AWAIT(o, idist__share_entered(t, true));
        idist__share_plan(t);
    } else {
        idist__share_plan(t);
        idist__share_expose(t);
        o->who = 0;
        IDIST__CO_AWAIT(o, idist__share_entered(t, false));
    }
    for (o->j = 0; o->j < o->chunks; o->j++) {
        IDIST__CO_AWAIT(o, idist__share_expose(t));
        o->who = 0;
        IDIST__CO_AWAIT(o, IDIST__SOURCES_HAVE(t, exposed, o->use + o->j + 1));
        if (!idist__share_take(t, o->j * o->chunk) || !idist__share_still_there(t)) return;
        idist__share_publish(t, &pace->freed, o->use + o->j + 1);
    }
    if (o->stays) // the caller may change it when we return
        IDIST__CO_AWAIT(o, IDIST__ALL_HAVE(t, freed, o->use + o->chunks));
    s->uses = o->use + o->chunks;
    idist__share_done(t);
    IDIST__CO_END(o)
}

// ---- all_reduce and reduce: each rank adds up one block of every chunk ----

static bool idist__share_add_block(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    size_t at = o->j * o->chunk, k = idist__share_part(o, o->count, at), from = idist__share_block_at(o, k, o->r);
    size_t count = idist__share_block_at(o, k, o->r + 1) - from;
    char *sum = idist__share_buffer(s, o->r, o->use + o->j) + from * o->size, *out = o->out + (at + from) * o->size;
    if (!count) return true;
    if (t->call.kind == IDIST__REDUCE) // only the root wants it
        return idist__share_add(t, o->r == o->root ? out : sum, o->n, 0, at + from, count);
    if (!idist__share_add(t, out, o->n, 0, at + from, count)) return false;
    idist__share_put(sum, out, count * o->size);
    return true;
}

static void idist__share_take_blocks(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    size_t at = o->j * o->chunk, k = idist__share_part(o, o->count, at);
    int i;
    if (t->call.kind == IDIST__REDUCE && o->r != o->root) return;
    for (i = 0; i < o->n; i++) {
        size_t from = idist__share_block_at(o, k, i), to = idist__share_block_at(o, k, i + 1);
        if (i != o->r)
            idist__copy(o->out + (at + from) * o->size, idist__share_buffer(s, i, o->use + o->j) + from * o->size,
                        (to - from) * o->size);
    }
}

// Whether all buffers are in windows.
static bool idist__share_all_near(const idist__task *t) {
    const idist__op *o = idist__op_of(t);
    const idist__share *s = idist__share_of(t);
    int i;
    for (i = 0; i < o->n; i++)
        if (!s->spots[i].send || !s->spots[i].recv) return false;
    return true;
}

// WHOLE: our block of all contributions, into all results.
static bool idist__share_add_whole(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    size_t at = idist__share_block_at(o, o->count, o->r), end = idist__share_block_at(o, o->count, o->r + 1), k;
    int i;
    for (; at < end; at += k) {
        char *out = o->out + at * o->size;
        k = idist__share_least(end - at, 16384 / o->size); // stays in the nearest cache
        if (!idist__share_add(t, out, o->n, 0, at, k)) return false;
        if (!idist__share_still_there(t)) return false; // whoever has left wants nothing written any more
        for (i = 0; i < o->n; i++)
            if (i != o->r) memcpy(s->spots[i].recv + at * o->size, out, k * o->size);
    }
    return true;
}

// FAR: our block of all contributions, into our own result; then the blocks of the others, out of theirs.
static bool idist__share_add_far(idist__task *t) {
    idist__op *o = idist__op_of(t);
    size_t at = idist__share_block_at(o, o->count, o->r), end = idist__share_block_at(o, o->count, o->r + 1);
    return idist__share_add(t, o->out + at * o->size, o->n, 0, at, end - at);
}

static bool idist__share_take_far(idist__task *t) {
    idist__op *o = idist__op_of(t);
    const idist__share *s = idist__share_of(t);
    int i;
    for (i = 1; i < o->n; i++) {
        int from = idist__wrap(o->r + i, o->n);
        size_t at = idist__share_block_at(o, o->count, from) * o->size;
        size_t end = idist__share_block_at(o, o->count, from + 1) * o->size;
        if (end > at && !idist__share_pull(t, from, s->spots[from].far_recv + at, o->out + at, end - at)) return false;
    }
    return true;
}

static void idist__share_blocks(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    idist__pace *pace = idist__share_pace(s, o->r);
    IDIST__CO_BEGIN(o)
    IDIST__CO_AWAIT(o, idist__share_may_enter(t));
    if (!idist__share_enter(t)) return;
    idist__share_plan(t);
    if (!o->stays) idist__share_expose(t); // whoever the others are, it is our buffer
    o->who = 0;
    IDIST__CO_AWAIT(o, idist__share_entered(t, false));
    if (t->call.kind == IDIST__ALL_REDUCE && (o->far || idist__share_all_near(t))) {
        o->far = o->far && !idist__share_all_near(t);
        o->whole = !o->far;
        if (o->far ? !idist__share_add_far(t) : !idist__share_add_whole(t)) return;
        if (!idist__share_still_there(t)) return;
        o->chunks = 1;
        idist__share_publish(t, &pace->reduced, o->use + 1);
        IDIST__CO_AWAIT(o, IDIST__ALL_HAVE(t, reduced, o->use + 1));
        if (o->far && (!idist__share_take_far(t) || !idist__share_still_there(t))) return;
        idist__share_publish(t, &pace->freed, o->use + 1);
        if (o->far) IDIST__CO_AWAIT(o, IDIST__ALL_HAVE(t, freed, o->use + 1));
    } else {
        for (o->j = 0; o->j < o->chunks; o->j++) {
            IDIST__CO_AWAIT(o, idist__share_expose(t));
            o->who = 0;
            IDIST__CO_AWAIT(o, IDIST__ALL_HAVE(t, exposed, o->use + o->j + 1));
            if (!idist__share_add_block(t) || !idist__share_still_there(t)) return;
            idist__share_publish(t, &pace->reduced, o->use + o->j + 1);
            if (t->call.kind == IDIST__ALL_REDUCE || o->r == o->root)
                IDIST__CO_AWAIT(o, IDIST__ALL_HAVE(t, reduced, o->use + o->j + 1));
            idist__share_take_blocks(t);
            idist__share_publish(t, &pace->freed, o->use + o->j + 1);
        }
        if (o->stays) IDIST__CO_AWAIT(o, IDIST__ALL_HAVE(t, reduced, o->use + o->chunks));
    }
    s->uses = o->use + o->chunks;
    idist__share_done(t);
    IDIST__CO_END(o)
}

// ---- starting and ending ----

// Which way a call goes in this group: FLAT, CHUNKED, or 0 for messages. The same on all members.
static int idist__share_choose(const idist_group *g, const idist__call *c) {
    const idist__share *s = idist__ring_group_of(g)->share;
    int forced = g->w->cfg.algorithm;
    size_t nbytes;
    bool scaled = (int)c->op >= IDIST_OP_USER && idist__kind_reduces(c->kind) && !idist__call_user_op(g, c)->fn;
    if (!s || forced == 1 || forced == 2 || (scaled && idist__type_is_narrow(c->dtype))) return 0;
    if (idist__kind_is_v(c->kind)) return (size_t)g->size * sizeof(uint64_t) <= IDIST__FLAT_BYTES ? IDIST__CHUNKED : 0;
    if (forced == 3 && c->count) return IDIST__CHUNKED;
    if (!c->count) return IDIST__FLAT;
    if (c->count > IDIST__FLAT_BYTES) return IDIST__CHUNKED;
    nbytes = c->count * idist_dtype_size(c->dtype) * (idist__share_many(c->kind) ? (size_t)g->size : 1);
    return nbytes <= IDIST__FLAT_BYTES ? IDIST__FLAT : IDIST__CHUNKED;
}

// What a shared call works on. Unlike message algorithms it takes narrow floats as they are.
static void idist__share_prepare(idist__task *t, int algorithm) {
    idist__op *o = idist__op_of(t);
    const idist__call *c = &t->call;
    o->n = t->group->size;
    o->r = t->group->rank;
    o->root = c->root;
    o->user = NULL;
    if (idist__kind_reduces(c->kind) && (int)c->op >= IDIST_OP_USER) {
        o->user_op = *idist__call_user_op(t->group, c);
        o->user = &o->user_op;
    }
    o->size = idist_dtype_size(c->dtype);
    o->count = o->chunk = c->count;
    o->nbytes = o->count * o->size;
    o->in = idist__op_buffer(c->send);
    o->out = idist__op_buffer(c->recv);
    if (c->kind == IDIST__BROADCAST) o->in = o->out;
    o->algorithm = algorithm;
    if ((c->kind == IDIST__GATHERV || c->kind == IDIST__SCATTERV) && o->r != o->root) { // looked at on the root only
        t->call.sendcounts = t->call.senddispls = NULL;
        t->call.recvcounts = t->call.recvdispls = NULL;
    }
}

static void idist__share_start(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    o->run = o->algorithm == IDIST__FLAT                 ? idist__share_flat
             : idist__share_adds_blocks(o, t->call.kind) ? idist__share_blocks
                                                         : idist__share_chunked;
    if (s->early) { // the quick way wrote the notice
        o->nth = s->nth;
        o->entered = true;
        s->early = false;
    }
    if (s->last) idist__op_of(s->last)->after = t;
    else s->head = t;
    s->last = t;
    if (s->head == t) idist__op_run(t);
}

// A small blocking collective while nothing else is under way: no task, no clock.
static bool idist__share_quick(idist_group *g, const idist__call *c) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__share *s = idist__ring_group_of(g)->share;
    idist__task *t;
    int turns;
    if (!s || s->head || idist__share_choose(g, c) != IDIST__FLAT || ring->failed) return false;
    t = s->quick;
    t->call = *c;
    t->seq = g->seq + 1;
    idist__share_prepare(t, IDIST__FLAT);
    idist__op_of(t)->past = idist__ring_past(t);
    if (!idist__share_may_enter(t)) return false;
    idist__share_enter(t);
    for (turns = 0; !idist__share_entered(t, false); turns++) {
        if (idist__quick_waits(ring, turns)) continue;
        s->early = true;
        return false;
    }
    idist__share_take(t, 0);
    g->seq++;
    idist__ring_note(t, idist__op_of(t), IDIST__FLAT);
    return true;
}

// Moves the first shared call of each group on.
static void idist__share_progress(idist__ring *ring) {
    idist_group *g;
    for (g = &ring->w->group; g; g = g->next) {
        idist__share *s = g->rank >= 0 && g->impl ? idist__ring_group_of(g)->share : NULL;
        while (s && s->head) {
            const idist__task *t = s->head;
            idist__op_run(s->head);
            if (s->head == t || ring->failed) break;
        }
        if (ring->failed) break;
    }
}

// The group failed here. Whoever comes late must not go on with what we have left there: it looks into its links instead,
// and learns of it.
static void idist__share_withdraw(idist_group *g) {
    idist__share *s = idist__ring_group_of(g)->share;
    uint32_t k;
    for (k = 0; s && k < IDIST__NOTICES; k++)
        __atomic_store_n(&idist__share_notice(s, g->rank, k)->nth, s->nth - ((uint32_t)1 << 30), __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST); // before the caller has its buffers back
}

// Whether this member may still write into our result. It looks before every piece that it writes.
static bool idist__share_may_write(const idist_group *g, const idist__op *o, int rank) {
    const idist__ring *ring = idist__ring_of(g->w);
    const idist__share *s = idist__ring_group_of(g)->share;

    return rank != g->rank && ring->links[g->ranks[rank]].open &&
           __atomic_load_n(&idist__share_pace(s, rank)->reduced, __ATOMIC_ACQUIRE) <= o->use &&
           __atomic_load_n(&idist__share_notice(s, rank, o->nth)->nth, __ATOMIC_ACQUIRE) == o->nth;
}

// When a call ends too early in which the others write into our result (WHOLE): until each of them is through with it, has
// left the call too, or is dead, which we may not have noticed yet: the failure may have come from another rank.
static void idist__share_let_go(const idist_group *g) {
    const idist__ring *ring = idist__ring_of(g->w);
    const idist__share *s = idist__ring_group_of(g)->share;
    const idist__op *o = s && s->head ? idist__op_of(s->head) : NULL;
    int64_t until_ns = idist__os_deadline(IDIST__LET_GO_MS); // for those who are stopped
    int i;

    if (!o || !o->whole) return;
    for (i = 0; i < g->size; i++) {
        const idist__shm_port *port = &ring->shm->ports[ring->shm->local[g->ranks[i]]];
        while (idist__share_may_write(g, o, i) && !idist__shm_gone(port) && idist__os_now_ns() < until_ns) sched_yield();
    }
}

static void idist__share_cancel(idist__task *t) {
    idist__share *s = idist__share_of(t);
    idist__task **at, *last = NULL;
    if (!s) return;
    for (at = &s->head; *at && *at != t; at = &idist__op_of(*at)->after) last = *at;
    if (*at) *at = idist__op_of(t)->after;
    if (s->last == t) s->last = last;
}

// Whether t lacks something that only this rank of the group can begin.
static bool idist__share_needs(const idist__task *t, int rank) {
    const idist__op *o = idist__op_of(t);
    idist__share *s = idist__share_of(t);
    if (!s || s->head != t || !o->entered || idist__share_has_entered(s, rank, o->nth)) return false;
    if (idist__share_reads(t, rank)) return true;
    if (o->algorithm != IDIST__CHUNKED || !idist__share_gives(o, t->call.kind, o->r)) return false;
    // It has to read what we give: all of it where that stays in our buffer, else what was in the place of the next chunk.
    return (o->stays ||
            (o->i < o->chunks && o->use + o->i >= IDIST__BUFFERS &&
             __atomic_load_n(&idist__share_pace(s, rank)->freed, __ATOMIC_ACQUIRE) < o->use + o->i - IDIST__BUFFERS + 1));
}

// For error texts: what the notices say about how far the others are.
static void idist__share_look(const idist__task *t) {
    idist__ring_group *rg = idist__ring_group_of(t->group);
    int i, k;
    for (i = 0; rg->share && i < t->group->size; i++) {
        for (k = 0; k < IDIST__NOTICES; k++) {
            idist__notice *e = idist__share_notice(rg->share, i, (uint32_t)k);
            idist__print p = e->print;
            if (!__atomic_load_n(&e->nth, __ATOMIC_ACQUIRE) || (int32_t)(p.seq - rg->seen[i].seq) <= 0) continue;
            rg->seen[i].seq = p.seq;
            rg->seen[i].print = p;
        }
    }
}

// ---- places ----

static char *idist__share_place(const idist__shm *m, int rank, int index) {
    char *first = idist__shm_share(m, rank) + m->places_at;
    size_t big = idist__place_nbytes(m->chunk_nbytes[0]), small = idist__place_nbytes(m->chunk_nbytes[1]);
    return index == 0 ? first : first + big + (size_t)(index - 1) * small;
}

static idist__pace *idist__share_place_pace(const idist__shm *m, int rank, int index) {
    return (idist__pace *)(void *)(idist__share_place(m, rank, index) + IDIST__NOTICES * IDIST__NOTICE_BYTES);
}

// What we offer the other members: the number of a place of ours, from 1 on; 0 for none. A place is free when it never
// served, or when all members of its group are through with it.
static uint64_t idist__share_offer_place(idist_group *g) {
    idist__shm *m = idist__ring_of(g->w)->shm;
    uint32_t nmembers = 0;
    int i;
    for (i = 0; m && i < g->size; i++) nmembers += m->local[g->ranks[i]] >= 0;
    if (nmembers < 2 || g->status != IDIST_OK) return 0; // who heard of a failure before this may have left
    for (i = 0; i < m->nplaces; i++) {
        if (m->taken[i]) {
            if (__atomic_load_n(&idist__share_place_pace(m, m->me, i)->left, __ATOMIC_ACQUIRE) < m->members[i]) continue;
        }
        memset(idist__share_place(m, m->me, i), 0, IDIST__NOTICES * IDIST__NOTICE_BYTES + sizeof(idist__pace));
        m->taken[i] = true;
        m->members[i] = nmembers;
        m->groups[i] = g->ctx;
        return (uint64_t)i + 1;
    }
    return 0;
}

static void idist__share_discard(const idist_allocator *mem, idist__share *s) {
    idist__mem_free(mem, s->quick);
    idist__mem_free(mem, s->places);
    idist__mem_free(mem, s->entered);
    idist__mem_free(mem, s->from);
    idist__mem_free(mem, s->spots);
    idist__mem_free(mem, s);
}

// A member is through with the group for which we offered a place, without having used it.
static void idist__share_left(const idist__ring *ring, uint64_t ctx) {
    idist__shm *m = ring->shm;
    int i;
    for (i = 0; m && i < m->nplaces; i++)
        if (m->taken[i] && m->groups[i] == ctx)
            __atomic_fetch_add(&idist__share_place_pace(m, m->me, i)->left, 1u, __ATOMIC_RELEASE);
}

// The members did not meet: we do not know their places, and say so with a message.
static void idist__share_decline(const idist_group *g) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__frame f;
    int i;
    memset(&f, 0, sizeof f);
    f.type = IDIST__LEFT;
    f.ctx = g->ctx;
    for (i = 0; i < g->size; i++) {
        if (i == g->rank) idist__share_left(ring, g->ctx);
        else if (ring->shm->local[g->ranks[i]] >= 0) idist__link_control(ring, &ring->links[g->ranks[i]], &f, NULL);
    }
}

static void idist__share_free(idist_group *g) {
    idist__ring_group *rg = idist__ring_group_of(g);
    idist__share *s = rg->share;
    const idist_allocator *mem = &g->w->cfg.mem;
    int i;
    if (!rg->met && !g->inner && idist__ring_of(g->w)->shm) idist__share_decline(g);
    if (!s) return;
    for (i = 0; i < g->size; i++)
        if (s->places[i]) __atomic_fetch_add(&idist__share_pace(s, i)->left, 1u, __ATOMIC_RELEASE);
    idist__share_discard(mem, s);
    rg->share = NULL;
}

// Everybody has a place, or the group goes by messages.
static idist_status idist__share_meet(idist_group *g, const uint64_t *offers) {
    idist__shm *m = idist__ring_of(g->w)->shm;
    const idist_allocator *mem = &g->w->cfg.mem;
    idist__share *s;
    int i;
    for (i = 0; i < g->size; i++)
        if (!m || m->local[g->ranks[i]] < 0 || !offers[i] || offers[i] > (uint64_t)m->nplaces) break;
    if (i < g->size || (size_t)g->size * IDIST__LINE > m->chunk_nbytes[1]) {
        if (m && offers[g->rank]) m->members[offers[g->rank] - 1] = 0; // free at once
        return IDIST_OK;
    }
    s = (idist__share *)idist__mem_alloc(mem, sizeof *s);
    if (!s) return IDIST_ERR_NO_MEMORY;
    s->places = (char **)idist__mem_alloc(mem, sizeof *s->places * (size_t)g->size);
    s->entered = (uint32_t *)idist__mem_alloc(mem, sizeof *s->entered * (size_t)g->size);
    s->from = (const void **)idist__mem_alloc(mem, sizeof *s->from * (size_t)g->size);
    s->spots = (idist__spot *)idist__mem_alloc(mem, sizeof *s->spots * (size_t)g->size);
    s->quick = (idist__task *)idist__mem_alloc(mem, sizeof(idist__task) + sizeof(idist__op));
    if (!s->places || !s->entered || !s->from || !s->spots || !s->quick) {
        idist__share_discard(mem, s);
        return IDIST_ERR_NO_MEMORY;
    }
    idist__ring_group_of(g)->share = s;
    s->shm = m;
    s->chunk_nbytes = m->chunk_nbytes[offers[g->rank] > 1];
    s->quick->group = g;
    s->quick->impl = s->quick + 1;
    for (i = 0; i < g->size; i++) s->places[i] = idist__share_place(m, m->local[g->ranks[i]], (int)offers[i] - 1);
    return IDIST_OK;
}

//------------------------------------------------------------------------------
// [ring:host]  a group over several hosts: inside each host first, then between one rank of each
// uses share verb . used by engine
//
// near: the members on this host, who share memory; leads: the first member on each host.
//
//   all_reduce       near: reduce to the lead        leads: all_reduce               near: broadcast from the lead
//   reduce           near: reduce to the lead        leads: reduce to the root's     near: the lead sends it to the root
//   reduce_scatter   near: reduce to the lead        leads: reduce, block by block   near: scatter from the lead
//   all_gather       near: gather on the lead        leads: all_gatherv              near: broadcast from the lead
//   broadcast        near, on the root's host        leads: broadcast                near, on the other hosts
//   barrier          near                            leads                           near
//
// Each step is a call of its own on one of these groups, started by the call that it is a part of; calls take their
// steps one after the other, so that the steps have the same order on all ranks. The network carries the data once per
// host. Narrow floats would be rounded twice that way, an op that does not commute needs the order of the ranks, and
// blocks in the order of the ranks must be in the order of the hosts as well; all else goes by messages among all.
//------------------------------------------------------------------------------

enum { IDIST__BY_HOST = 5 }; // algorithm

typedef struct idist__host_step { // a call on near or leads
    idist_group *g;
    idist__kind kind;
    const void *send;
    void *recv;
    size_t count;
    const size_t *counts, *displs; // of an all_gatherv
    int root;
    bool divide; // what was received, after it, for AVG
} idist__host_step;

static bool idist__host_serves(const idist_group *g, const idist__call *c) {
    const idist__ring_group *rg = idist__ring_group_of(g);
    if (!rg->nhosts || g->w->cfg.algorithm) return false;
    if (c->kind == IDIST__BARRIER || c->kind == IDIST__BROADCAST) return true;
    if (c->kind == IDIST__ALL_GATHER) return rg->in_order;
    if (c->kind != IDIST__ALL_REDUCE && c->kind != IDIST__REDUCE && !(c->kind == IDIST__REDUCE_SCATTER && rg->in_order))
        return false;
    if (idist__type_is_narrow(c->dtype)) return false;
    return (int)c->op < IDIST_OP_USER || idist__call_user_op(g, c)->commutative;
}

static uint64_t idist__host_of(const idist_group *g, int rank) { return g->w->nodes[g->ranks[rank]].host; }

// ---- the plan of a call ----

static idist__host_step *idist__host_add(idist__op *o, idist_group *g, idist__kind kind, const void *send, void *recv,
                                         size_t count, int root) {
    idist__host_step *step = (idist__host_step *)(void *)o->memory + o->k++;
    step->g = g;
    step->kind = kind;
    step->send = send;
    step->recv = recv;
    step->count = count;
    step->root = root;
    return step;
}

// The first step of reductions: what this host contributes, on its lead.
static void idist__host_reduce_near(idist__task *t, char *sum, size_t count) {
    idist__op *o = idist__op_of(t);
    idist_group *near = idist__ring_group_of(t->group)->near;
    if (near) {
        idist__host_add(o, near, IDIST__REDUCE, o->in, sum, count, 0);
    } else {
        idist__copy(sum, o->in, count * o->size);
        if (o->user && !o->user->fn) idist__reduce_scale(sum, count, t->call.dtype, o->user->factor);
    }
}

// lead_root, near_root: the root's host among the leads; the root among this host's members, -1 when it is on another.
static void idist__host_plan_reduce(idist__task *t, char *memory, int lead_root, int near_root) {
    idist__op *o = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    char *sum = o->r == o->root ? o->out : memory;
    idist__host_reduce_near(t, sum, o->count);
    if (rg->leads) idist__host_add(o, rg->leads, IDIST__REDUCE, sum, sum, o->count, lead_root)->divide = near_root == 0;
    if (near_root <= 0) return;
    if (rg->leads) idist__host_add(o, rg->near, IDIST__SEND, sum, NULL, o->count, near_root);
    else if (o->r == o->root) idist__host_add(o, rg->near, IDIST__RECV, NULL, o->out, o->count, 0)->divide = true;
}

// counts, displs: of each host's blocks, in elements.
static void idist__host_plan_reduce_scatter(idist__task *t, char *sum, const size_t *counts, const size_t *displs) {
    idist__op *o = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    size_t own = (size_t)o->r * o->nbytes; // of a lead: where its host's blocks begin
    int h;
    idist__host_reduce_near(t, sum, o->count * (size_t)o->n);
    for (h = 0; rg->leads && h < rg->nhosts; h++) {
        char *block = sum + displs[h] * o->size, *to = h == rg->leads->rank && !rg->near ? o->out : block;
        idist__host_add(o, rg->leads, IDIST__REDUCE, block, to, counts[h], h)->divide = to == o->out;
    }
    if (rg->near) idist__host_add(o, rg->near, IDIST__SCATTER, sum + own, o->out, o->count, 0)->divide = true;
}

static void idist__host_plan_all_gather(idist__task *t, const size_t *counts, const size_t *displs) {
    idist__op *o = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    char *own = o->out + (size_t)o->r * o->nbytes;
    if (rg->near) idist__host_add(o, rg->near, IDIST__GATHER, o->in, own, o->count, 0);
    else if (o->in != own) idist__copy(own, o->in, o->nbytes);
    if (rg->leads) {
        idist__host_step *step = idist__host_add(o, rg->leads, IDIST__ALL_GATHERV, own, o->out, counts[rg->leads->rank], -1);
        step->counts = counts;
        step->displs = displs;
    }
    if (rg->near) idist__host_add(o, rg->near, IDIST__BROADCAST, NULL, o->out, o->count * (size_t)o->n, 0);
}

// Fills o->memory: steps | counts and displs of the hosts | room for what a lead collects. NULL without memory.
static void idist__host_plan(idist__task *t) {
    idist__op *o = idist__op_of(t);
    const idist_group *g = t->group;
    const idist__ring_group *rg = idist__ring_group_of(g);
    idist__kind kind = t->call.kind;
    size_t nhosts = (size_t)rg->nhosts, table = (3 + nhosts) * sizeof(idist__host_step) + 2 * nhosts * sizeof(size_t);
    size_t collected = kind == IDIST__REDUCE ? o->nbytes : kind == IDIST__REDUCE_SCATTER ? o->nbytes * (size_t)o->n : 0;
    int i, h = -1, lead_root = 0, near_root = -1;
    char *room;
    size_t *counts, *displs;
    o->memory = (char *)idist__mem_raw(&g->w->cfg.mem, table + (rg->leads ? collected : 0));
    if (!o->memory) return;
    memset(o->memory, 0, table);
    room = o->memory + table;
    displs = (size_t *)(void *)room - nhosts;
    counts = displs - nhosts;
    for (i = 0; i < o->n && rg->in_order; i++) {
        if (i == 0 || idist__host_of(g, i) != idist__host_of(g, i - 1)) displs[++h] = (size_t)i * o->count;
        counts[h] += o->count;
    }
    for (i = 0; rg->leads && o->root >= 0 && i < rg->nhosts; i++)
        if (idist__host_of(rg->leads, i) == idist__host_of(g, o->root)) lead_root = i;
    if (o->root == o->r) near_root = 0;
    for (i = 0; rg->near && o->root >= 0 && i < rg->near->size; i++)
        if (rg->near->ranks[i] == g->ranks[o->root]) near_root = i;
    switch (kind) {
    case IDIST__ALL_REDUCE:
        idist__host_reduce_near(t, o->out, o->count);
        if (rg->leads) idist__host_add(o, rg->leads, kind, o->out, o->out, o->count, -1)->divide = true;
        if (rg->near) idist__host_add(o, rg->near, IDIST__BROADCAST, NULL, o->out, o->count, 0);
        break;
    case IDIST__REDUCE: idist__host_plan_reduce(t, room, lead_root, near_root); break;
    case IDIST__REDUCE_SCATTER: idist__host_plan_reduce_scatter(t, room, counts, displs); break;
    case IDIST__ALL_GATHER: idist__host_plan_all_gather(t, counts, displs); break;
    case IDIST__BROADCAST:
        if (rg->near && near_root >= 0) idist__host_add(o, rg->near, kind, NULL, o->out, o->count, near_root);
        if (rg->leads) idist__host_add(o, rg->leads, kind, NULL, o->out, o->count, lead_root);
        if (rg->near && near_root < 0) idist__host_add(o, rg->near, kind, NULL, o->out, o->count, 0);
        break;
    default: // barrier
        if (rg->near) idist__host_add(o, rg->near, kind, NULL, NULL, 0, -1);
        if (rg->leads) idist__host_add(o, rg->leads, kind, NULL, NULL, 0, -1);
        if (rg->near) idist__host_add(o, rg->near, kind, NULL, NULL, 0, -1);
    }
}

// ---- carrying it out ----

// Begins a step. The task is ours until idist__host_through has seen it end.
static void idist__host_begin(idist__task *t, const idist__host_step *step) {
    idist__op *o = idist__op_of(t);
    bool leads = step->g == idist__ring_group_of(t->group)->leads, scaled = o->user && !o->user->fn;
    idist__ring *ring = idist__ring_of(t->group->w);
    idist__task *part = step->g->status == IDIST_OK ? idist__task_new(step->g) : NULL;
    if (!part && step->g->status != IDIST_OK) idist__ring_fail(ring, t->group, step->g->status, step->g->cause);
    else if (!part) idist__ring_fail(ring, t->group, IDIST_ERR_NO_MEMORY, "a rank is out of memory");
    if (!part) return;
    part->call = t->call;
    part->call.kind = step->kind;
    part->call.send = step->send;
    part->call.recv = step->recv;
    part->call.count = step->count;
    part->call.recvcounts = step->counts;
    part->call.recvdispls = step->displs;
    part->call.root = step->root;
    if (t->call.op == IDIST_AVG || (scaled && leads)) part->call.op = IDIST_SUM;
    part->call.user = o->user;
    part->whole = idist__task_print(t, IDIST__BY_HOST);
    part->whole_past = o->past;
    part->timeout_ms = -1; // the whole call has a deadline, and says where it waits
    part->announced = part->warned = true;
    o->step = part;
    idist__task_start(part);
}

static bool idist__host_through(idist__task *t) {
    idist__op *o = idist__op_of(t);
    idist__task *part = o->step;
    bool ok;
    if (!part || !part->done) return false;
    ok = part->status == IDIST_OK;
    if (!ok) idist__ring_fail(idist__ring_of(t->group->w), t->group, part->status, part->group->cause);
    idist__task_free(part);
    o->step = NULL;
    return ok;
}

static void idist__host_remove(idist__task *t) {
    idist__ring_group *rg = idist__ring_group_of(t->group);
    idist__task **at, *last = NULL;
    for (at = &rg->head; *at && *at != t; at = &idist__op_of(*at)->after) last = *at;
    if (*at) *at = idist__op_of(t)->after;
    if (rg->last == t) rg->last = last;
}

static void idist__host_run(idist__task *t) {
    idist__op *o = idist__op_of(t);
    const idist__host_step *steps;
    if (!o->memory) idist__host_plan(t);
    if (!o->memory) {
        idist__ring_fail(idist__ring_of(t->group->w), t->group, IDIST_ERR_NO_MEMORY, "a rank is out of memory");
        return;
    }
    steps = (const idist__host_step *)(const void *)o->memory;
    IDIST__CO_BEGIN(o)
    for (o->i = 0; o->i < o->k; o->i++) {
        idist__host_begin(t, &steps[o->i]);
        IDIST__CO_AWAIT(o, idist__host_through(t));
        if (steps[o->i].divide && t->call.op == IDIST_AVG)
            idist__reduce_divide(steps[o->i].recv, steps[o->i].count, t->call.dtype, o->n);
    }
    idist__host_remove(t);
    idist__op_done(t);
    IDIST__CO_END(o)
}

static void idist__host_start(idist__task *t) {
    idist__ring_group *rg = idist__ring_group_of(t->group);
    idist__op_of(t)->run = idist__host_run;
    if (rg->last) idist__op_of(rg->last)->after = t;
    else rg->head = t;
    rg->last = t;
    if (rg->head == t) idist__op_run(t);
}

// Moves the first call of each group on, when its step is through, and then the next.
static void idist__host_progress(idist__ring *ring) {
    const idist_group *g;
    for (g = &ring->w->group; g; g = g->next) {
        idist__ring_group *rg = g->rank >= 0 && g->impl ? idist__ring_group_of(g) : NULL;
        while (rg && rg->head && !ring->failed) {
            const idist__task *t = rg->head, *step = idist__op_of(t)->step;
            if ((step && !step->done) || idist__op_of(t)->running) break;
            idist__op_run(rg->head);
            if (rg->head == t && (!idist__op_of(t)->step || !idist__op_of(t)->step->done)) break;
        }
    }
}

static idist_status idist__ring_group_open(idist_group *g);

static idist_status idist__host_group(idist_group *whole, uint64_t salt, const int *ranks, int n, idist_group **out) {
    idist__world *w = whole->w;
    idist_group *g = idist__group_new(w, n);
    idist_status s;
    if (!g) return IDIST_ERR_NO_MEMORY;
    idist__group_set(g, idist__mix(whole->ctx, salt), ranks, n);
    g->inner = true;
    s = idist__ring_group_open(g);
    if (s != IDIST_OK) {
        g->rank = -1;
        idist__group_free(g);
        return s;
    }
    idist__ring_group_of(g)->whole = whole;
    g->next = w->group.next;
    w->group.next = g;
    *out = g;
    return IDIST_OK;
}

// What a group can use: places in memory that all members share, or near and leads, where there are several hosts and one
// of them has several members. offers: the members' places; NULL: the first of each. So no word is needed for the world:
// everybody knows the table of hosts, and everybody's first place is free.
static idist_status idist__host_open(idist_group *g, const uint64_t *offers) {
    idist__ring_group *rg = idist__ring_group_of(g);
    const idist_allocator *mem = &g->w->cfg.mem;
    size_t n = (size_t)g->size;
    uint64_t *places = (uint64_t *)idist__mem_alloc(mem, n * (sizeof *places + 2 * sizeof(int)));
    int *ranks = (int *)(void *)(places + n), *leads = ranks + n;
    int i, k, nnear = 0, nleads = 0, changes = 1;
    idist_status s = places ? IDIST_OK : IDIST_ERR_NO_MEMORY;
    for (i = 0; places && i < g->size; i++) {
        for (k = 0; k < i && idist__host_of(g, k) != idist__host_of(g, i); k++) continue;
        if (k == i) leads[nleads++] = g->ranks[i];
        if (i && idist__host_of(g, i) != idist__host_of(g, i - 1)) changes++;
        if (idist__host_of(g, i) != idist__host_of(g, g->rank)) continue;
        ranks[nnear] = g->ranks[i];
        places[nnear++] = offers ? offers[i] : 1;
    }
    rg->met = true;
    if (s == IDIST_OK && nleads == 1) s = idist__share_meet(g, places);
    if (s == IDIST_OK && nleads > 1 && nleads < g->size) {
        rg->nhosts = nleads;
        rg->in_order = changes == nleads;
        if (nnear > 1) s = idist__host_group(g, 1, ranks, nnear, &rg->near);
        if (s == IDIST_OK && rg->near) s = idist__share_meet(rg->near, places);
        if (s == IDIST_OK && ranks[0] == g->w->group.rank) s = idist__host_group(g, 2, leads, nleads, &rg->leads);
    }
    idist__mem_free(mem, places);
    return s;
}

//------------------------------------------------------------------------------
// [ring:engine]  frames arrive, tasks start and end, waits are announced
// uses verb algo choose match . used by join
//------------------------------------------------------------------------------

static void idist__link_lost(idist__ring *ring, int peer, const char *how) {
    idist__link *l = &ring->links[peer];
    if (!l->open) return;
    l->open = false;
    l->transport->close(l->port);
    if (!l->transport->polled) ring->nstreams--;
    if (!l->bye) idist__world_lost(ring->w, peer, how);
}

// A frame of another rank failed a group. The group may not exist here yet: then the frame waits for it.
static void idist__ring_aborted(idist__ring *ring, idist__link *l) {
    idist_group *g = idist__world_find_group(ring->w, l->in.ctx);
    int status = (int)(int64_t)l->in.aux;
    l->text[l->in.nbytes] = 0;
    if (status >= 0 || status < IDIST_ERR_DEVICE) status = IDIST_ERR_INTERNAL;
    if (g) {
        idist__group_fail(g, (idist_status)status, l->text);
    } else if (!idist__ring_has_closed(ring, l->in.ctx)) {
        idist__message *m = idist__message_new(ring, l, &l->in, sizeof l->text);
        if (!m) return;
        m->frame.aux = (uint64_t)(int64_t)status;
        memcpy(m->data, l->text, sizeof l->text);
    }
}

static bool idist__verb_in(const idist__verbs *list, const idist__task *t) {
    const idist__verb *v;
    for (v = list->first; v; v = v->next)
        if (v->task == t) return true;
    return false;
}

// Whether a receive has found no message yet.
static bool idist__recv_unmatched(const idist__task *t) {
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    const idist__verb *v = idist__op_of(t)->verb;
    return v && (v->list == &rg->recvs || v->list == &rg->wild);
}

// ---- two ranks that wait for each other, in different calls ----
//
// Calls on different groups, or a receive against a collective, exchange nothing by which they could be compared.
// They are found by WAITS, which a rank sends when it has waited for a while. It is certain that neither will ever go
// on when all of this holds, on both sides:
//   - the rank has one thread and one call under way, which blocks without a time-out of its own: it can do nothing else;
//   - that call lacks something that only the other rank can begin to send;
//   - and the other rank has not begun it: nothing of the kind is on its way.
// Any doubt (another thread, a request, a group we no longer know) means: say nothing, the deadline will.

// Whether t lacks something that the rank of this link has to begin.
static bool idist__ring_needs(const idist__link *l, const idist__task *t, int group_rank) {
    if (t->call.kind == IDIST__RECV) return t->call.root == group_rank && idist__recv_unmatched(t);
    if (t->call.kind != IDIST__SEND && idist__op_of(t)->algorithm == IDIST__BY_HOST) { // then its part does
        const idist__task *part = idist__op_of(t)->step;
        int rank = part && !part->done ? idist__ring_group_of(part->group)->rank_of[t->group->ranks[group_rank]] : -1;
        return rank >= 0 && idist__ring_needs(l, part, rank);
    }
    if (t->call.kind != IDIST__SEND && idist__op_of(t)->algorithm >= IDIST__FLAT) return idist__share_needs(t, group_rank);
    return idist__verb_in(&l->posted, t) || idist__verb_in(&l->waiting, t);
}

// Whether what the other rank waits for may still come from us.
static bool idist__ring_answered(idist__ring *ring, idist__link *l, const idist__frame *waits) {
    idist_group *g = idist__world_find_group(ring->w, waits->ctx);
    idist__message *m;
    if (waits->print.kind == IDIST__RECV) return waits->aux != l->p2p_sent; // aux: how many messages it had got from us
    if (waits->print.kind != IDIST__SEND)
        return !g || (int32_t)(waits->print.seq - g->seq) <= 0; // we are, or were, in that call
    for (m = l->early; m; m = m->next)                          // its message lies here, and nobody wants it
        if (m->frame.type == IDIST__RTS && m->frame.id == waits->id) return false;
    return true;
}

static void idist__ring_find_deadlock(idist__ring *ring, int peer) {
    idist__link *l = &ring->links[peer];
    const idist__frame *waits = &l->peer_waits;
    idist__task *ours;
    idist_group *theirs;
    char cause[400];
    int rank;
    if (waits->type != IDIST__WAITS || waits->flags != (IDIST__NEEDS_YOU | IDIST__ONLY_CALL)) return;
    ours = idist__world_only_call(ring->w);
    if (!ours || !ours->announced) return;
    rank = idist__ring_group_of(ours->group)->rank_of[peer];
    if (rank < 0 || (ours->group->ctx == waits->ctx && ours->seq == waits->print.seq && ours->seq)) return;
    if (!idist__ring_needs(l, ours, rank) || idist__ring_answered(ring, l, waits)) return;
    theirs = idist__world_find_group(ring->w, waits->ctx);
    idist__deadlock_text(ours, peer, &waits->print, ours->group->ctx == waits->ctx, cause, sizeof cause);
    idist__ring_fail(ring, ours->group, IDIST_ERR_MISMATCH, cause);
    idist__ring_settle(ring);
    if (theirs) idist__ring_fail(ring, theirs, IDIST_ERR_MISMATCH, cause);
}

// The other rank waits in a call. It learns that we are there, or else which call of the group was our last, since we may be
// what it waits for; if we are in a different one, both learn that.
static void idist__ring_waits(idist__ring *ring, idist__link *l, int peer) {
    idist_group *g = idist__world_find_group(ring->w, l->in.ctx);
    idist__frame f;
    l->peer_waits = l->in;
    if (l->in.print.kind != IDIST__SEND && l->in.print.kind != IDIST__RECV && g && g->status == IDIST_OK) {
        if (!idist__ring_agree(ring, g, peer, &l->in)) return;
        f = l->in;
        f.type = IDIST__HERE;
        if ((int32_t)(l->in.print.seq - g->seq) > 0) f.print = idist__ring_group_of(g)->history[g->seq % IDIST__HISTORY];
        idist__link_control(ring, l, &f, NULL);
    }
    idist__ring_find_deadlock(ring, peer);
}

// A message begins: all of it (EAGER), or the announcement (RTS), after which nothing follows. Sets where the payload
// goes. False when the frame is malformed.
static bool idist__link_begins(idist__ring *ring, idist__link *l, int peer) {
    idist_group *g = idist__world_find_group(ring->w, l->in.ctx);
    bool p2p = l->in.print.kind == IDIST__SEND, gone = !g && idist__ring_has_closed(ring, l->in.ctx);
    if (p2p && (l->in.print.check > SIZE_MAX / 16 ||
                l->in.nbytes != l->in.print.check * idist_dtype_size((idist_dtype)l->in.print.dtype)))
        return false;
    if (p2p) l->p2p_got++;
    l->peer_waits.type = 0;
    l->in_verb = idist__match_frame(ring, l, peer, &l->in);
    if (l->in.type == IDIST__RTS) {
        idist__verb *v = l->in_verb;
        l->in_verb = NULL;
        if (v) idist__link_clear_to_send(ring, l, peer, v, &l->in);
        else if (!gone && !idist__message_new(ring, l, &l->in, 0))
            idist__ring_fail(ring, g ? g : &ring->w->group, IDIST_ERR_NO_MEMORY, "a rank is out of memory");
        l->left = 0;
        return true;
    }
    if (l->in_verb) {
        l->in_verb->frame = l->in;
        l->target = l->in_verb->data;
    } else if (!gone && (!g || g->status == IDIST_OK)) {
        l->in_message = idist__message_new(ring, l, &l->in, (size_t)l->in.nbytes);
        l->target = l->in_message ? l->in_message->data : NULL;
        if (!l->in_message) idist__ring_fail(ring, g ? g : &ring->w->group, IDIST_ERR_NO_MEMORY, "a rank is out of memory");
    }
    return true;
}

// Takes out the send that the frame answers; NULL: it was cancelled meanwhile.
static idist__verb *idist__link_answered(idist__ring *ring, const idist__link *l) {
    idist__verb *v = idist__verb_named(ring, &l->waiting, l->in.id);
    if (v) idist__verb_take(v);
    return v;
}

static void idist__link_cts(idist__ring *ring, idist__link *l) {
    idist__verb *v = idist__link_answered(ring, l);
    if (!v) return;
    v->frame.type = IDIST__DATA;
    v->frame.id = l->in.aux;
    v->piece = v->nbytes < IDIST__PIECE_BYTES ? v->nbytes : IDIST__PIECE_BYTES;
    v->frame.nbytes = v->piece;
    idist__link_push(l, v);
    idist__link_flush(ring, l);
}

static void idist__link_pulled(idist__ring *ring, const idist__link *l) {
    idist__verb *v = idist__link_answered(ring, l);
    if (v) idist__verb_done(ring, v);
}

static bool idist__link_data(idist__ring *ring, idist__link *l) {
    idist__verb *v = idist__verb_named(ring, &l->receiving, l->in.id);
    if (v && l->in.nbytes > v->nbytes - v->moved) return false;
    l->in_verb = v; // NULL: the receive was cancelled meanwhile
    l->target = v ? v->data + v->moved : NULL;
    return true;
}

// Whether the peer may send the frame that has arrived. It is authenticated but may be faulty. No frame from it can make
// this rank write out of bounds, or read a payload that its type does not carry. What came early is bounded by the eager
// window, and by IDIST__UNKNOWN_MOST messages for groups that do not exist here. Announcements (RTS) for groups that do
// are not bounded: an honest rank may have any number of sends under way.
static bool idist__link_allows(const idist__ring *ring, const idist__link *l, int peer) {
    const idist__frame *f = &l->in;
    const idist_group *g = idist__world_find_group(ring->w, f->ctx);
    bool of_group = f->type <= IDIST__RTS || (f->type >= IDIST__WAITS && f->type <= IDIST__LEFT);

    if (of_group && g && idist__ring_group_of(g)->rank_of[peer] < 0) return false;

    switch (f->type) {
    case IDIST__EAGER:
        if (f->nbytes > IDIST__EAGER_BYTES || f->nbytes + IDIST__FRAME_BYTES > l->their_window) return false;
        return true;
    case IDIST__RTS: return true;
    case IDIST__ABORT: return f->nbytes <= IDIST__TEXT_BYTES;
    case IDIST__DATA: return f->nbytes <= IDIST__PIECE_BYTES;
    case IDIST__CREDIT: return f->nbytes <= IDIST__WINDOW_BYTES - l->window;
    case IDIST__CTS:
    case IDIST__PULLED:
    case IDIST__WAITS:
    case IDIST__HERE:
    case IDIST__LEFT:
    case IDIST__BYE: return f->nbytes == 0;
    default: return false;
    }
}

// A frame's 64 bytes are here. False when they make no sense.
static bool idist__link_frame(idist__ring *ring, idist__link *l, int peer) {
    bool ok = true;
    l->in_verb = NULL;
    l->in_message = NULL;
    l->target = NULL;
    if (!idist__link_allows(ring, l, peer)) return false;

    l->left = (size_t)l->in.nbytes;
    switch (l->in.type) {
    case IDIST__EAGER:
        l->their_window -= (size_t)l->in.nbytes + IDIST__FRAME_BYTES;
        ok = idist__link_begins(ring, l, peer);
        break;
    case IDIST__RTS: ok = idist__link_begins(ring, l, peer); break;
    case IDIST__CTS: idist__link_cts(ring, l); break;
    case IDIST__DATA: ok = idist__link_data(ring, l); break;
    case IDIST__PULLED: idist__link_pulled(ring, l); break;
    case IDIST__CREDIT:
        l->window += (size_t)l->in.nbytes;
        l->left = 0;
        break;
    case IDIST__WAITS: idist__ring_waits(ring, l, peer); break;
    case IDIST__HERE: {
        idist_group *g = idist__world_find_group(ring->w, l->in.ctx);
        l->here_ns = idist__os_now_ns();
        if (g && g->status == IDIST_OK) idist__ring_agree(ring, g, peer, &l->in);
        break;
    }
    case IDIST__ABORT: l->target = l->text; break;
    case IDIST__LEFT: idist__share_left(ring, l->in.ctx); break;
    default: l->bye = true; break; // IDIST__BYE
    }
    return ok;
}

// A frame and its payload are complete.
static void idist__link_payload(idist__ring *ring, idist__link *l, int peer) {
    idist__verb *v = l->in_verb;
    idist__message *m = l->in_message;
    l->in_verb = NULL;
    l->in_message = NULL;
    if (l->in.type == IDIST__EAGER) {
        if (m) {
            m->moved = (size_t)l->in.nbytes;
            if (m->claim) idist__message_give(ring, l, peer, m, m->claim);
            return;
        }
        idist__link_consumed(ring, l, (size_t)l->in.nbytes);
        if (v) idist__verb_received(ring, v, peer);
    } else if (l->in.type == IDIST__DATA && v) {
        v->moved += (size_t)l->in.nbytes;
        if (v->moved < v->nbytes) return;
        idist__verb_take(v);
        idist__verb_received(ring, v, peer);
    } else if (l->in.type == IDIST__ABORT) {
        idist__ring_aborted(ring, l);
    }
}

// Takes what lies in the stage apart. False when it makes no sense.
static bool idist__link_parse(idist__ring *ring, idist__link *l, int peer) {
    while (l->open && l->at < l->end) {
        size_t have = l->end - l->at;
        if (l->in_moved < IDIST__FRAME_BYTES) {
            size_t k = IDIST__FRAME_BYTES - l->in_moved < have ? IDIST__FRAME_BYTES - l->in_moved : have;
            memcpy((char *)&l->in + l->in_moved, l->stage + l->at, k);
            l->in_moved += k;
            l->at += k;
            if (l->in_moved < IDIST__FRAME_BYTES) break;
            if (!idist__link_frame(ring, l, peer)) return false;
            idist__ring_settle(ring); // before a later frame ends the call that went wrong
        } else {
            size_t k = l->left < have ? l->left : have;
            if (l->target) {
                memcpy(l->target, l->stage + l->at, k);
                l->target += k;
            }
            l->left -= k;
            l->at += k;
        }
        if (l->in_moved == IDIST__FRAME_BYTES && !l->left) {
            l->in_moved = 0;
            idist__link_payload(ring, l, peer);
        }
    }
    if (l->at == l->end) l->at = l->end = 0;
    return true;
}

static void idist__link_read(idist__ring *ring, int peer);

// The stream of a rank ended. When one rank dies, others that heard of it may end as well, and their streams with
// them; those have told the reason before. So all others are read first, and then the ends are judged.
static void idist__link_ended(idist__ring *ring, int peer, int err) {
    int i;
    ring->links[peer].ended = true;
    ring->links[peer].ended_errno = err;
    if (ring->judging) return;
    ring->judging = true;
    for (i = 0; i < ring->w->group.size; i++)
        if (ring->links[i].open && !ring->links[i].ended) idist__link_read(ring, i);
    ring->judging = false;
    for (i = 0; i < ring->w->group.size; i++) {
        idist__link *l = &ring->links[i];
        char how[160];
        if (!l->open || !l->ended) continue;
        if (l->ended_errno) snprintf(how, sizeof how, "its connection broke: %s", strerror(l->ended_errno));
        else snprintf(how, sizeof how, "its process ended, or closed the connection without idist_finalize");
        idist__link_lost(ring, i, how);
    }
}

// Reads what is there, up to a bound so that other links get their turn. Large payloads go straight to their place.
static void idist__link_read(idist__ring *ring, int peer) {
    idist__link *l = &ring->links[peer];
    int turns;
    for (turns = 0; turns < 16 && l->open && !l->ended; turns++) {
        bool direct = l->in_moved == IDIST__FRAME_BYTES && l->left >= 4096 && l->target;
        size_t room = direct ? l->left : IDIST__STAGE_BYTES;
        ptrdiff_t n = l->transport->read(l->port, direct ? l->target : l->stage, room);
        if (n == 0) return;
        if (n < 0) {
            idist__link_ended(ring, peer, errno);
            return;
        }
        if (direct) {
            l->target += n;
            l->left -= (size_t)n;
            if (l->left) continue;
            l->in_moved = 0;
            idist__link_payload(ring, l, peer);
        } else {
            l->at = 0;
            l->end = (size_t)n;
            if (!idist__link_parse(ring, l, peer)) {
                idist__link_lost(ring, peer, "it sent a malformed frame");
                return;
            }
            if ((size_t)n < room) return; // that was all, most likely
        }
    }
}

// Looks after all links that poll says something about.
static void idist__ring_poll(idist__ring *ring, int64_t until_ns, bool sleep) {
    idist__world *w = ring->w;
    // One thread may sleep over the first half of the table while another has a quick look with the second.
    struct pollfd *polls = ring->polls + (sleep ? 0 : w->group.size + 1);
    int *ranks = ring->poll_ranks + (sleep ? 0 : w->group.size + 1);
    int i, n = 1;
    uint64_t count;
    polls[0].fd = ring->wake;
    polls[0].events = POLLIN;
    for (i = 0; i < w->group.size; i++) {
        idist__link *l = &ring->links[i];
        if (!l->open || l->transport->poll_fd(l->port) < 0) continue;
        polls[n].fd = l->transport->poll_fd(l->port);
        polls[n].events = (short)(POLLIN | (l->out && !l->write_dead && !l->transport->polled ? POLLOUT : 0));
        ranks[n++] = i;
    }
    if (sleep) pthread_mutex_unlock(&w->lock);
    i = poll(polls, (nfds_t)n, sleep ? idist__os_ms_until(until_ns) : 0);
    if (sleep) pthread_mutex_lock(&w->lock);
    if (i <= 0) return;
    if (sleep && polls[0].revents) // a quick look leaves it for the sleeper
        while (read(ring->wake, &count, sizeof count) < 0 && errno == EINTR) continue;
    for (i = 1; i < n; i++) {
        idist__link *l = &ring->links[ranks[i]];
        if (polls[i].revents & POLLOUT) idist__link_flush(ring, l);
        if (!l->open || !(polls[i].revents & ~POLLOUT)) continue;
        if (l->transport->polled) l->transport->polled(l->port);
        idist__link_read(ring, ranks[i]);
    }
}

static void idist__ring_move(idist__ring *ring) {
    bool few = ring->nstreams <= 4; // then asking each link is cheaper than asking poll which one to ask
    int i;
    for (i = 0; i < ring->w->group.size; i++) {
        idist__link *l = &ring->links[i];
        if (!l->open || !(few || l->transport->polled)) continue;
        if (l->out) idist__link_flush(ring, l);
        idist__link_read(ring, i);
    }
    if (!few) idist__ring_poll(ring, 0, false);
    if (ring->shm) idist__share_progress(ring);
    if (ring->w->nnodes > 1) idist__host_progress(ring);
}

static void idist__ring_progress(idist__world *w) {
    idist__ring_move(idist__ring_of(w));
    idist__ring_settle(idist__ring_of(w));
}

// Where all links go through memory we sleep on our bell, and look at the sockets, whose end is that of the other rank,
// every 10 ms, in a long wait every 30; otherwise in poll. Looks at everything once more after having said that we sleep.
//
// Nobody knocks at a bell that was rung already. A knock that arrives during that last look may be read by the look itself
// (it polls when there are many streams), so we sleep only while the bell is still set. Another thread that reads from the
// links while we sleep may take a knock away as well; it has to call `wake` afterwards.
static void idist__ring_sleep(idist__world *w, int64_t until_ns) {
    idist__ring *ring = idist__ring_of(w);
    idist__shm *m = ring->shm;
    uint32_t ended = w->nended;
    int64_t now = idist__os_now_ns();
    if (!m) {
        idist__ring_poll(ring, until_ns, true);
        idist__ring_settle(ring);
        return;
    }
    if (now - ring->polled_ns > IDIST__LOOK_NS) {
        ring->polled_ns = now;
        idist__ring_poll(ring, 0, false);
    }

    idist__shm_falls_asleep(m, ring->nstreams ? 2 : 1);
    idist__ring_move(ring);
    if (w->nended == ended && !ring->failed && !idist__shm_was_woken(m)) {
        if (ring->nstreams) {
            idist__ring_poll(ring, until_ns, true);
        } else {
            int64_t look_ns = now + IDIST__LOOK_NS + ring->drowsy_ns;
            pthread_mutex_unlock(&w->lock);
            idist__os_futex_wait(&idist__shm_bell(m, m->me)->asleep, 1, look_ns < until_ns ? look_ns : until_ns);
            pthread_mutex_lock(&w->lock);
            if (idist__os_now_ns() < look_ns) ring->drowsy_ns = 0;
            else if (ring->drowsy_ns < 2 * IDIST__LOOK_NS) ring->drowsy_ns += IDIST__MS;
        }
    }
    idist__shm_awake(m);
    idist__ring_settle(ring);
}

// Whether something that others must still get, or say, is under way.
static bool idist__ring_busy(idist__ring *ring, bool clean) {
    int i;
    for (i = 0; i < ring->w->group.size; i++) {
        idist__link *l = &ring->links[i];
        if (!l->open) continue;
        if (l->out && !l->write_dead) return true;
        if (clean && !l->bye && l->transport->lossy_close) return true;
    }
    return false;
}

// Until everything is out, or the moment is there.
static void idist__ring_drain(idist__ring *ring, bool clean, int64_t until_ns) {
    while (idist__ring_busy(ring, clean) && idist__os_ms_until(until_ns) != 0) {
        int64_t soon = idist__os_now_ns() + IDIST__MS; // nobody knocks for room in a pipe here
        idist__ring_poll(ring, soon < until_ns && ring->shm ? soon : until_ns, true);
        idist__ring_move(ring);
    }
}

static void idist__ring_flush(idist__world *w, int64_t until_ns) {
    idist__ring_drain(idist__ring_of(w), false, until_ns);
    idist__ring_settle(idist__ring_of(w));
}

static void idist__ring_wake(idist__world *w) {
    const idist__shm *m = idist__ring_of(w)->shm;
    uint64_t one = 1;
    if (m && __atomic_load_n(&idist__shm_bell(m, m->me)->asleep, __ATOMIC_RELAXED) == 1) {
        idist__shm_wake(m, m->me);
        return;
    }
    while (write(idist__ring_of(w)->wake, &one, sizeof one) < 0 && errno == EINTR) continue;
}

// Compares the new call with what others already said about the call of this number.
static void idist__ring_check_start(idist__ring *ring, idist__task *t) {
    idist_group *g = t->group;
    idist__ring_group *rg = idist__ring_group_of(g);
    const idist__print *ours = &rg->history[t->seq % IDIST__HISTORY];
    int i;
    for (i = 0; i < g->size; i++) {
        uint64_t key = idist__ring_key(g->ctx, g->ranks[i], false, t->seq);
        idist__hook *hook = ring->messages[key % IDIST__BUCKETS].first;
        const char *field = NULL;
        if (i == g->rank) continue;
        if (rg->seen[i].seq == t->seq && rg->seen[i].print.seq == t->seq)
            field = idist__print_difference(&rg->seen[i].print, ours);
        if (field) idist__ring_mismatch(ring, g, g->ranks[i], &rg->seen[i].print, ours, field);
        for (; hook && !ring->failed; hook = hook->next) {
            const idist__message *m = idist__hook_message(hook);
            if (m->peer == g->ranks[i] && m->frame.ctx == g->ctx && m->frame.print.seq == t->seq &&
                m->frame.print.kind != IDIST__SEND && m->frame.type <= IDIST__RTS)
                idist__ring_agree(ring, g, g->ranks[i], &m->frame);
        }
    }
}

static bool idist__ring_quick(idist_group *g, const idist__call *c) {
    return c->kind == IDIST__SEND   ? idist__send_quick(g, c)
           : c->kind == IDIST__RECV ? idist__recv_quick(g, c)
                                    : idist__share_quick(g, c);
}

static void idist__ring_start(idist__task *t) {
    idist__ring *ring = idist__ring_of(t->group->w);
    int shared = 0;
    memset(t->impl, 0, t->call.kind < IDIST__SEND ? sizeof(idist__op) : offsetof(idist__op, n));
    if (t->call.kind < IDIST__SEND) shared = idist__share_choose(t->group, &t->call);
    if (t->call.kind < IDIST__SEND && idist__host_serves(t->group, &t->call)) shared = IDIST__BY_HOST;
    // After a while outside the library, hear first what the others have said: perhaps the group has failed.
    if (t->started_ns - ring->looked_ns > IDIST__MS && !t->group->inner) {
        idist__ring_progress(t->group->w);
        if (t->done) return;
    }
    ring->looked_ns = t->started_ns;
    // The end of a process shows at its socket only, which otherwise is looked at by who sleeps: perhaps nobody does.
    if (ring->shm && t->started_ns - ring->polled_ns > IDIST__LOOK_NS && !t->group->inner) {
        ring->polled_ns = t->started_ns;
        idist__ring_poll(ring, 0, false);
        idist__ring_settle(ring);
        if (t->done) return;
    }
    if (t->call.kind == IDIST__SEND) idist__send_start(t);
    else if (t->call.kind == IDIST__RECV) idist__recv_start(t);
    else if (t->group->size == 1) idist__self_collective(t);
    else if (shared) {
        idist__share_prepare(t, shared);
        idist__ring_note(t, idist__op_of(t), shared);
        idist__ring_check_start(ring, t);
        if (shared == IDIST__BY_HOST) idist__host_start(t);
        else idist__share_start(t);
    } else if (!idist__op_begin(t)) idist__ring_fail(ring, t->group, IDIST_ERR_NO_MEMORY, "a rank is out of memory");
    else {
        idist__ring_note(t, idist__op_of(t), idist__op_of(t)->algorithm);
        idist__ring_check_start(ring, t);
        idist__op_choose_run(t);
        if (!ring->failed) idist__op_run(t);
    }
    idist__ring_settle(ring);
}

// Takes the verbs of a task out of a list. Returns whether there were any.
static bool idist__verbs_purge(idist__ring *ring, const idist__verbs *list, const idist__task *t) {
    idist__verb *v, *next;
    bool any = false;
    for (v = list->first; v; v = next) {
        next = v->next;
        if (v->task != t) continue;
        idist__verb_take(v);
        idist__verb_free(ring, v);
        any = true;
    }
    return any;
}

// A frame that has partly gone out must go out to its end, or the stream is useless; its payload is copied, since the
// buffer belongs to the caller again.
static void idist__verb_orphan(idist__ring *ring, idist__link *l, idist__verb *v) {
    size_t left = v->piece - v->piece_moved;
    v->task = NULL;
    if (v->frame.type == IDIST__RTS && ring->shm)
        __atomic_fetch_add(&idist__shm_bell(ring->shm, ring->shm->me)->withdrawn, 1u, __ATOMIC_SEQ_CST);
    if (!left) {
        if (v->frame.type == IDIST__RTS)
            v->frame.type = IDIST__CREDIT; // already written: only keeps it from waiting for CTS
        v->nbytes = v->piece = v->piece_moved = v->moved = 0;
        return;
    }
    v->owned = (char *)idist__mem_raw(&ring->w->cfg.mem, left);
    if (!v->owned) {
        idist__link_write_failed(ring, l);
        return;
    }
    memcpy(v->owned, v->data + v->moved + v->piece_moved, left);
    v->data = v->owned;
    v->moved = v->piece_moved = 0;
    v->nbytes = v->piece = left;
}

// The same for what waits to go out. Returns whether the other side has heard of any of it.
static bool idist__link_purge_out(idist__ring *ring, idist__link *l, const idist__task *t) {
    idist__verb **at = &l->out;
    bool heard = false;
    if (l->out && l->out->task == t && l->out->frame_moved + l->out->piece_moved > 0) {
        heard = true;
        idist__verb_orphan(ring, l, l->out);
    }
    while (*at) {
        idist__verb *v = *at;
        if (v->task != t) {
            at = &v->next;
            continue;
        }
        heard = heard || v->started;
        if (v->frame.type == IDIST__EAGER) l->window += v->nbytes + IDIST__FRAME_BYTES; // it will not arrive
        *at = v->next;
        idist__verb_free(ring, v);
    }
    l->out_end = at;
    return heard;
}

// Forgets what a task has among the links. Returns whether the other side has heard of any of it.
static bool idist__links_purge(idist__ring *ring, const idist__task *t) {
    bool heard = false;
    int i;
    for (i = 0; i < ring->w->group.size; i++) {
        idist__link *l = &ring->links[i];
        idist__message *m, *next;
        if (l->in_verb && l->in_verb->task == t) {
            idist__verb *v = l->in_verb;
            if (l->in.type == IDIST__EAGER) idist__verb_free(ring, v); // it is in no list
            l->in_verb = NULL;
            l->target = NULL;
            heard = true;
        }
        for (m = l->early; m; m = next) {
            next = m->next;
            if (m->claim && m->claim->task == t) {
                idist__verb_free(ring, m->claim);
                m->claim = NULL;
                heard = true;
            }
            if (m->self_send && m->self_send->task == t) {
                idist__verb_free(ring, m->self_send);
                idist__message_free(ring, l, m);
            }
        }
        heard = idist__link_purge_out(ring, l, t) || heard;
        if (ring->shm && idist__verb_in(&l->waiting, t))
            __atomic_fetch_add(&idist__shm_bell(ring->shm, ring->shm->me)->withdrawn, 1u, __ATOMIC_SEQ_CST);
        heard = idist__verbs_purge(ring, &l->waiting, t) || heard;
        heard = idist__verbs_purge(ring, &l->receiving, t) || heard;
        idist__verbs_purge(ring, &l->posted, t);
    }
    return heard;
}

// The same for a send or receive that waits for the other side: it has one verb, and thousands may
// be cancelled at once. False when it is not like that.
static bool idist__verb_purge(idist__ring *ring, const idist__task *t) {
    idist__verb *v = idist__kind_is_p2p(t->call.kind) ? idist__op_of(t)->verb : NULL;
    if (!v || !v->list || (t->call.kind == IDIST__RECV && !idist__recv_unmatched(t))) return false;
    if (t->call.kind == IDIST__SEND && ring->shm)
        __atomic_fetch_add(&idist__shm_bell(ring->shm, ring->shm->me)->withdrawn, 1u, __ATOMIC_SEQ_CST);
    idist__verb_take(v);
    idist__verb_free(ring, v);
    return true;
}

static bool idist__ring_cancel(idist__task *t) {
    idist__ring *ring = idist__ring_of(t->group->w);
    idist__frame f;
    idist__op *o;
    bool waited = idist__verb_purge(ring, t), unmatched = waited && t->call.kind == IDIST__RECV;
    bool heard = waited || idist__links_purge(ring, t);                     // a send waits when its RTS is out
    if (t->call.kind == IDIST__RECV && t->announced && t->call.root >= 0) { // it does not wait any more
        memset(&f, 0, sizeof f);
        f.type = IDIST__WAITS;
        f.print.kind = IDIST__RECV;
        idist__link_control(ring, &ring->links[idist__world_rank(t->group, t->call.root)], &f, NULL);
    }
    if (t->call.kind == IDIST__RECV) return unmatched;
    if (t->call.kind == IDIST__SEND) return !heard;
    o = idist__op_of(t);
    if (o->step && !o->step->done) return false; // near and leads fail before the group that they are parts of
    if (o->algorithm == IDIST__BY_HOST) idist__host_remove(t);
    else if (o->algorithm >= IDIST__FLAT) idist__share_cancel(t);
    if (o->step) idist__task_free(o->step);
    o->step = NULL;
    idist__mem_free(&ring->w->cfg.mem, o->memory);
    o->memory = NULL;
    return false;
}

static void idist__ring_tell(idist_group *g) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__frame f;
    int i;
    memset(&f, 0, sizeof f);
    f.type = IDIST__ABORT;
    f.ctx = g->ctx;
    f.aux = (uint64_t)(int64_t)g->status;
    idist__share_withdraw(g);
    for (i = 0; i < g->size; i++)
        if (i != g->rank) idist__link_control(ring, &ring->links[g->ranks[i]], &f, g->cause);
    if (idist__ring_group_of(g)->near) idist__group_fail(idist__ring_group_of(g)->near, g->status, g->cause);
    if (idist__ring_group_of(g)->leads) idist__group_fail(idist__ring_group_of(g)->leads, g->status, g->cause);
    idist__share_let_go(g);
}

static void idist__ring_announce(idist__task *t) {
    idist__ring *ring = idist__ring_of(t->group->w);
    idist__ring_group *rg = idist__ring_group_of(t->group);
    idist__frame f;
    int i;
    bool p2p = t->call.kind == IDIST__SEND || t->call.kind == IDIST__RECV, blocked;
    memset(&f, 0, sizeof f);
    f.type = IDIST__WAITS;
    f.ctx = t->group->ctx;
    f.print = idist__task_print(t, 0);
    if (t->group->size == 1) return;
    blocked = idist__world_only_call(ring->w) == t;
    if (!p2p) f.print = rg->history[t->seq % IDIST__HISTORY];
    for (i = 0; i < t->group->size; i++) {
        idist__link *l = &ring->links[t->group->ranks[i]];
        idist__verb *v;
        if (i == t->group->rank || (p2p && t->call.root != i)) continue;
        // Only a deadlock asks for these, and there is none while this rank can do something else.
        f.flags = (uint8_t)(blocked ? (idist__ring_needs(l, t, i) ? IDIST__NEEDS_YOU : 0) | IDIST__ONLY_CALL : 0);
        f.aux = l->p2p_got;
        for (v = l->waiting.first; v && p2p && blocked; v = v->next)
            if (v->task == t) f.id = v->id;
        idist__link_control(ring, l, &f, NULL);
        idist__ring_find_deadlock(ring, t->group->ranks[i]);
    }
    idist__ring_settle(ring);
}

// A receive whose message has begun to come: from whom.
static int idist__recv_missing(const idist__task *t, char *text, size_t cap) {
    const idist_group *g = t->group;
    const idist__ring *ring = idist__ring_of(g->w);
    int i;

    if (!t->patient) return 0; // it gets more time
    for (i = 0; i < g->size; i++) {
        const idist__link *l = &ring->links[g->ranks[i]];
        bool here = l->in_verb && l->in_verb->task == t;
        if (!here && !idist__verb_in(&l->receiving, t)) continue;
        idist__append(text, cap, "rank %d on %s, whose message has begun to come", g->ranks[i],
                      g->w->nodes[g->ranks[i]].hostname);
        return 1;
    }
    return 0;
}

typedef enum idist__absence { // of a member that the end of a call may wait for
    IDIST__ABSENT = 1,        // it has not entered the call
    IDIST__SILENT = 2,        // it has not answered when it was asked
    IDIST__NEEDED = 4         // this rank waits for something that only that one can send
} idist__absence;

static int idist__ring_absence(const idist__task *t, int rank) {
    const idist_group *g = t->group;
    const idist__seen *seen = &idist__ring_group_of(g)->seen[rank];
    const idist__link *l = &idist__ring_of(g->w)->links[g->ranks[rank]];
    bool entered = (int32_t)(seen->seq - t->seq) >= 0;

    if (t->whole.kind && seen->print.whole == t->whole.seq) entered = true; // or an earlier part of it
    return (entered ? 0 : IDIST__ABSENT) | (g->asked_ns && l->here_ns < g->asked_ns ? IDIST__SILENT : 0) |
           (idist__ring_needs(l, t, rank) ? IDIST__NEEDED : 0);
}

// Whom to name. Whoever has not entered the call may wait for somebody else in an earlier one; then it answers when asked.
// A rank that entered the call may since have been stopped, or may have finished it and be computing. In the second case
// this rank needs nothing from it.
static int idist__ring_missing(idist__task *t, char *text, size_t cap) {
    static const int order[4] = {IDIST__ABSENT | IDIST__SILENT, IDIST__SILENT | IDIST__NEEDED, IDIST__ABSENT, IDIST__SILENT};
    idist_group *g = t->group;
    idist__ring_group *rg = idist__ring_group_of(g);
    int i, k, n = 0;

    if (t->call.kind == IDIST__RECV && !idist__recv_unmatched(t)) return idist__recv_missing(t, text, cap);
    if (idist__kind_is_p2p(t->call.kind)) return idist__missing_peer(t, text, cap);
    if (!t->announced && idist__op_of(t)->algorithm == IDIST__BY_HOST && idist__op_of(t)->step) { // nobody was asked yet
        if (!idist__ring_missing(idist__op_of(t)->step, text, cap)) idist__append(text, cap, "ranks of another host");
        return 1;
    }

    idist__share_look(t);
    for (k = 0; k < 4 && !n; k++)
        for (i = 0; i < g->size; i++)
            if (i != g->rank && (idist__ring_absence(t, i) & order[k]) == order[k])
                idist__missing_rank(g, i, &rg->seen[i].print, n++, text, cap);
    if (n > 8) idist__append(text, cap, " and %d more", n - 8);
    if (n && (order[k - 1] & IDIST__SILENT)) idist__append(text, cap, ", which does not answer");
    return n;
}

static void idist__ring_group_close(idist_group *g);

static idist_status idist__ring_group_open(idist_group *g) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__ring_group *rg = idist__ring_group_of(g);
    idist_status s;
    int i;
    rg->rank_of = (int *)idist__mem_alloc(&g->w->cfg.mem, sizeof(int) * (size_t)g->w->group.size);
    rg->seen = (idist__seen *)idist__mem_alloc(&g->w->cfg.mem, sizeof *rg->seen * (size_t)g->size);
    if (!rg->rank_of || !rg->seen) {
        idist__mem_free(&g->w->cfg.mem, rg->rank_of);
        idist__mem_free(&g->w->cfg.mem, rg->seen);
        return IDIST_ERR_NO_MEMORY;
    }
    for (i = 0; i < g->w->group.size; i++) rg->rank_of[i] = -1;
    for (i = 0; i < g->size; i++) rg->rank_of[g->ranks[i]] = i;
    for (i = 0; i < g->size; i++) {
        idist__link *l = &ring->links[g->ranks[i]];
        idist__message *m;
        for (m = l->early; m; m = m->next) {
            if (m->frame.ctx != g->ctx || !m->unknown) continue;
            m->unknown = false;
            l->nunknown--;
        }
        for (m = l->early; m; m = m->next)
            if (m->frame.ctx == g->ctx && m->frame.type == IDIST__ABORT)
                idist__group_fail(g, (idist_status)(int)(int64_t)m->frame.aux, m->data);
        if (i != g->rank && !l->open) {
            char cause[200];
            snprintf(cause, sizeof cause, "rank %d on %s was lost", g->ranks[i], g->w->nodes[g->ranks[i]].hostname);
            idist__group_fail(g, IDIST_ERR_PEER_LOST, cause);
        }
    }
    if (g != &g->w->group) return IDIST_OK;
    idist__share_offer_place(g);
    s = idist__host_open(g, NULL);
    if (s != IDIST_OK) idist__ring_group_close(g);
    return s;
}

static void idist__ring_group_close(idist_group *g) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__ring_group *rg = idist__ring_group_of(g);
    idist_group *other;
    int i;
    for (i = 0; i < g->w->group.size; i++) {
        idist__message *m, *next;
        for (m = ring->links[i].early; m; m = next) {
            bool whole = m->frame.type == IDIST__EAGER && m->moved == m->frame.nbytes;
            size_t nbytes = (size_t)m->frame.nbytes;
            next = m->next;
            if (m->frame.ctx != g->ctx) continue;
            idist__message_free(ring, &ring->links[i], m);
            if (whole && i != g->w->group.rank) idist__link_consumed(ring, &ring->links[i], nbytes);
        }
    }
    ring->closed[ring->nclosed++ % IDIST__CLOSED] = g->ctx;
    if (rg->near) idist__group_free(rg->near);
    if (rg->leads) idist__group_free(rg->leads);
    for (other = &g->w->group; g->inner && other; other = other->next) {
        idist__ring_group *of = other->rank >= 0 && other->impl ? idist__ring_group_of(other) : NULL;
        if (of && of->near == g) of->near = NULL;
        if (of && of->leads == g) of->leads = NULL;
    }
    idist__share_free(g);
    idist__mem_free(&g->w->cfg.mem, rg->rank_of);
    idist__mem_free(&g->w->cfg.mem, rg->seen);
}

static void *idist__ring_alloc(idist__world *w, size_t nbytes) {
    const idist__shm *m = idist__ring_of(w)->shm;
    return m && m->window_nbytes ? idist__window_alloc(m->window, nbytes) : NULL;
}

//------------------------------------------------------------------------------
// [ring:join]  how the ranks meet, connect to each other, and part
// uses engine . used by -
//
// Through the store everybody learns the job's number, each rank's host, and where each rank listens: a local socket
// for ranks of one host, TCP for the others. Then every rank connects to the lower ones and accepts the higher ones;
// each connection is authenticated. Once all are there nobody needs the store or listens any more.
//------------------------------------------------------------------------------

typedef struct idist__record { // what a rank says about itself
    char hostname[64];
    uint64_t host;
    char local[64];     // address of its local socket, or ""
    uint32_t shm;       // whether it takes part in shared memory
    uint32_t algorithm; // what it was told to use
} idist__record;

typedef struct idist__join {
    idist__world *w;
    idist__ring *ring;
    idist_store *store; // opened by us, or the user's
    bool own_store;
    bool told; // the others know that a rank gave up
    bool told_by_will;
    char prefix[64];
    uint64_t job;
    uint8_t key[32];
    int listeners[2]; // local, tcp; -1
    char tcp[128];    // where our TCP socket listens
    bool need_tcp;
    const idist__record *records; // by rank
    idist__handshake *shakes;     // outgoing, by rank; only to lower ranks
    int64_t *again_ns;            // when to connect to a lower rank once more; 0: it is connecting, or connected
    idist__porch *porch;          // incoming
    int nlinks;                   // connected
    int64_t deadline_ns;
} idist__join;

static void idist__join_key(const idist__join *j, char *key, size_t cap, const char *what, int rank) {
    if (rank < 0) snprintf(key, cap, "%s%s", j->prefix, what);
    else snprintf(key, cap, "%s%s/%d", j->prefix, what, rank);
}

static int idist__join_ms_left(const idist__join *j) {
    int64_t left = j->deadline_ns == IDIST__FOREVER ? -1 : (j->deadline_ns - idist__os_now_ns()) / IDIST__MS;
    return j->deadline_ns == IDIST__FOREVER ? -1 : left < 1 ? 1 : left > INT32_MAX ? INT32_MAX : (int)left;
}

typedef struct idist__join_failure { // why a rank could not join: the others need not wait for it
    int32_t status, rank;
    int32_t by_will; // it ended without a word; the store says so for it
    char text[400];
} idist__join_failure;

enum { IDIST__JOIN_STAY_MS = 500 };

static idist_status idist__join_no_fds(const idist__join *j) {
    return idist__fail(IDIST_ERR_NO_FDS,
                       "initialize: out of file descriptors; a world of %d needs about %d: raise ulimit -n",
                       j->w->group.size, 2 * j->w->group.size + 8);
}

// The server of our own store, in the process that has it.
static const idist__server *idist__join_server(const idist__join *j) {
    return j->own_store && j->store->run == idist__tcp_store_run ? ((idist__tcp_store *)j->store->impl)->server : NULL;
}

// What rank 0 knows beyond the names of those who are late.
static idist_status idist__join_hint(const idist__join *j) {
    const idist__server *sv = idist__join_server(j);
    int refused = sv ? __atomic_load_n(&sv->nrefused, __ATOMIC_RELAXED) : 0;
    if (sv && __atomic_load_n(&sv->other_order, __ATOMIC_RELAXED))
        idist__append(idist__me.text, sizeof idist__me.text,
                      ". Some rank runs on a machine of another byte order; mixed worlds are not supported");
    else if (refused)
        idist__append(
            idist__me.text, sizeof idist__me.text,
            ". %d connections were refused or broke off: another secret, another build, strangers, or a rank that died",
            refused);
    return IDIST_ERR_TIMEOUT;
}

// When the store's server ended, says who that was.
static void idist__join_store_lost(const idist__join *j, idist_status status) {
    bool by_rank_0 = j->w->cfg.store == NULL && strncmp(j->w->cfg.where, "torch:", 6) != 0;
    char text[sizeof idist__me.text];
    const char *cause = text;

    memcpy(text, idist__me.text, sizeof text);
    if (strncmp(cause, "initialize: ", 12) == 0) cause += 12;
    if (status != IDIST_ERR_PEER_LOST || strncmp(cause, "store: ", 7) != 0) return;
    idist__fail(status, "initialize: %s: %s", by_rank_0 ? "rank 0 was lost, or gave up" : "the store's server was lost",
                cause + 7);
}

// Whether a rank has given up; then so do we, with its reason.
static idist_status idist__join_failed(idist__join *j) {
    const idist__server *sv = idist__join_server(j);
    idist__join_failure f;
    char key[128];
    const char *keys[1];
    bool there = false;
    size_t n = 0;
    idist_status s;
    keys[0] = key;
    if (sv && __atomic_load_n(&sv->no_fds, __ATOMIC_RELAXED)) return idist__join_no_fds(j);
    idist__join_key(j, key, sizeof key, "failed", -1);
    s = idist_store_check(j->store, keys, 1, &there);
    if (s == IDIST_ERR_PEER_LOST) return s;
    if (s != IDIST_OK || !there) return IDIST_OK;
    if (idist_store_get(j->store, key, &f, sizeof f, &n, 1000) != IDIST_OK || n != sizeof f) return IDIST_OK;
    f.text[sizeof f.text - 1] = 0;
    j->told = true;
    j->told_by_will = f.by_will != 0;
    if (f.status == IDIST_ERR_TIMEOUT) { // it names who is late
        idist__fail(IDIST_ERR_TIMEOUT, "initialize: %s", f.text);
        return idist__join_hint(j);
    }
    return idist__fail((idist_status)f.status, "initialize: rank %d could not join: %s", (int)f.rank, f.text);
}

// How often a rank that waits asks whether another one has given up. Hundreds of them ask one server.
static int idist__join_slice_ms(const idist__join *j) { return j->w->group.size < 800 ? 100 + j->w->group.size / 2 : 500; }

// What the store's server is to tell the others when our process ends before all have met. NULL takes that back.
static void idist__join_will(idist__join *j, const idist__join_failure *failure) {
    idist__req r;
    char key[128] = "";

    if (j->store->run != idist__tcp_store_run && j->store->run != idist__file_store_run) return;
    if (strncmp(j->w->cfg.where, "torch:", 6) == 0) return; // a server that does not know of wills
    memset(&r, 0, sizeof r);
    if (failure) idist__join_key(j, key, sizeof key, "failed", -1);
    r.op = IDIST__REQ_WILL;
    r.key.data = key;
    r.key.nbytes = strlen(key);
    r.a.data = (const char *)failure;
    r.a.nbytes = failure ? sizeof *failure : 0;
    r.deadline_ns = j->deadline_ns;
    j->store->run(j->store, &r); // if the connection is gone, the next request says so
}

// The owner of the store stays until all others have read why, or for a moment.
static void idist__join_stay(idist__join *j) {
    int64_t until_ns = idist__os_deadline(IDIST__JOIN_STAY_MS), there = 0;
    int others = j->w->group.size - 1 - (j->told_by_will ? 1 : 0);
    char key[128];

    idist__join_key(j, key, sizeof key, "heard", -1);
    while (idist_store_add(j->store, key, 0, &there) == IDIST_OK && there < others) {
        if (idist__os_now_ns() >= until_ns) break;
        idist__os_pause_ms(5);
    }
}

// Tells the others why we give up, unless we have it from them.
static void idist__join_tell(idist__join *j, idist_status status) {
    idist__join_failure f;
    char key[128], text[sizeof idist__me.text];
    int64_t there;

    if (!j->store || !j->prefix[0]) return;
    memset(&f, 0, sizeof f);
    memcpy(text, idist__me.text, sizeof text);
    f.status = (int32_t)status;
    f.rank = j->w->group.rank;
    idist__copy_text(f.text, sizeof f.text, strncmp(text, "initialize: ", 12) == 0 ? text + 12 : text);

    idist__join_key(j, key, sizeof key, "failed", -1);
    if (!j->told) idist_store_set(j->store, key, &f, sizeof f); // if that fails they learn it from the store's end
    idist__join_will(j, NULL);
    idist__join_key(j, key, sizeof key, "heard", -1);
    if (f.rank > 0) idist_store_add(j->store, key, 1, &there);
    else if (j->own_store) idist__join_stay(j);
    memcpy(idist__me.text, text, sizeof text);
}

// Which ranks, from `rank` on, have not put this value there.
static idist_status idist__join_missing(idist__join *j, const char *what, int rank) {
    char key[128], text[300] = "";
    int i, missing = 0;
    for (i = rank; i < j->w->group.size; i++) {
        const char *keys[1];
        bool there = true;
        keys[0] = key;
        idist__join_key(j, key, sizeof key, what, i);
        if (idist_store_check(j->store, keys, 1, &there) != IDIST_OK || there) continue;
        if (missing++ < 16) idist__append(text, sizeof text, "%s%d", missing > 1 ? ", " : "", i);
    }
    if (!missing)
        return idist__fail(IDIST_ERR_TIMEOUT, "initialize: rank %d showed up too late, after %d ms", rank,
                           j->w->cfg.init_timeout_ms);
    idist__fail(IDIST_ERR_TIMEOUT, "initialize: %d of %d ranks did not show up within %d ms: rank %s%s", missing,
                j->w->group.size, j->w->cfg.init_timeout_ms, text, missing > 16 ? ", ..." : "");
    if (!j->w->cfg.store && strncmp(j->w->cfg.where, "unix:", 5) == 0)
        idist__append(idist__me.text, sizeof idist__me.text,
                      ". The ranks meet at a local socket, which those of another user, network namespace (container) or "
                      "host cannot reach");
    return idist__join_hint(j);
}

// Gets a value that a rank puts there when it starts; the time-out names the ranks that did not, or those without `cause`
// if it is made of what these put there.
static idist_status idist__join_get(idist__join *j, const char *what, int rank, const char *cause, void *value,
                                    size_t nbytes) {
    char key[128];
    size_t n = 0;
    idist_status s;
    int slice_ms = idist__join_slice_ms(j);
    idist__join_key(j, key, sizeof key, what, rank);
    do {
        int ms = idist__join_ms_left(j);
        s = idist_store_get(j->store, key, value, nbytes, &n, ms < 0 || ms > slice_ms ? slice_ms : ms);
        if (s == IDIST_OK && n != nbytes)
            return idist__fail(IDIST_ERR_UNSUPPORTED, "rank %d was built from another version of idist.h", rank);
        if (s != IDIST_ERR_TIMEOUT) return s;
        if ((s = idist__join_failed(j)) != IDIST_OK) return s;
    } while (idist__os_ms_until(j->deadline_ns) != 0);
    return idist__join_missing(j, cause ? cause : what, rank < 0 ? 0 : rank);
}

static idist_status idist__join_set(idist__join *j, const char *what, int rank, const void *value, size_t nbytes) {
    char key[128];
    idist__join_key(j, key, sizeof key, what, rank);
    return idist_store_set(j->store, key, value, nbytes);
}

// Opens the store. Worlds made one after the other through one store must not see each other's keys: each rank counts
// its worlds there. In a store of our own the count can only be 1; more means that two processes have the same rank.
static idist_status idist__join_store(idist__join *j) {
    idist__config *cfg = &j->w->cfg;
    idist_store_desc d;
    bool torch = strncmp(cfg->where, "torch:", 6) == 0, pmi = strcmp(cfg->where, "pmi:") == 0;
    const char *restart = idist__os_env("TORCHELASTIC_RESTART_COUNT");
    char base[40] = "idist", key[64];
    int64_t nth = 0;
    idist__join_failure will;
    idist_status s;
    j->store = cfg->store;
    if (!j->store) {
        if (!cfg->where[0])
            return idist__fail(IDIST_ERR_ENV,
                               "rank %d of %d (%s): MASTER_ADDR is not set, so the ranks cannot find each other. Set "
                               "MASTER_ADDR and MASTER_PORT to rank 0's host and a free port there (127.0.0.1 when all "
                               "ranks are on this host)",
                               cfg->rank, cfg->world_size, cfg->rank_var ? cfg->rank_var : cfg->launcher);
        if (pmi && (s = idist__pmi_meet(cfg)) != IDIST_OK) return s;
        memset(&d, 0, sizeof d);
        d.server = cfg->rank == 0;
        d.timeout_ms = cfg->init_timeout_ms;
        d.secret = cfg->secret.nbytes ? cfg->secret.bytes : NULL;
        d.secret_nbytes = cfg->secret.nbytes;
        d.allocator = cfg->mem;
        s = idist__store_open(cfg->where, &d, cfg->listener, &j->store);
        cfg->listener = -1; // the store owns it now
        if (s != IDIST_OK) return idist__fail(s, "initialize: %s", idist__me.text);
        j->own_store = true;
    }
    if (torch) snprintf(base, sizeof base, "idist-%.20s", restart ? restart : "0"); // the agent keeps it over restarts
    snprintf(key, sizeof key, "%s/%d", base, cfg->rank);
    if ((s = idist_store_add(j->store, key, 1, &nth)) != IDIST_OK) return s;
    if (j->own_store && nth != 1 && !torch)
        return idist__fail(IDIST_ERR_RANK_TAKEN, "initialize: another process already is rank %d of this job (%s)",
                           cfg->rank, cfg->rank_var ? cfg->rank_var : "desc.rank");
    snprintf(j->prefix, sizeof j->prefix, "%s/%lld/", base, (long long)nth);
    memset(&will, 0, sizeof will);
    will.status = (int32_t)IDIST_ERR_PEER_LOST;
    will.rank = cfg->rank;
    will.by_will = 1;
    snprintf(will.text, sizeof will.text, "its process on %s ended during idist_initialize", j->w->hostname);
    if (cfg->rank > 0) idist__join_will(j, &will); // that of rank 0 takes the store with it
    return IDIST_OK;
}

// Rank 0 names the job; everybody else compares the size of the world with what rank 0 thinks.
static idist_status idist__join_job(idist__join *j) {
    uint64_t job[2] = {0, 0}; // its number, and the number of ranks
    idist_status s;
    uint8_t key[32];
    if (j->w->group.rank == 0) {
        idist__os_random(job, sizeof job);
        job[1] = (uint64_t)j->w->group.size;
        s = idist__join_set(j, "job", -1, job, sizeof job);
    } else {
        s = idist__join_get(j, "job", -1, NULL, job, sizeof job);
    }
    if (s != IDIST_OK) return s;
    if (job[1] != (uint64_t)j->w->group.size)
        return idist__fail(IDIST_ERR_ENV, "initialize: rank 0 says the world has %llu ranks, this rank says %d",
                           (unsigned long long)job[1], j->w->group.size);
    j->job = job[0];
    idist__auth_key(&j->w->cfg.secret, key);
    idist__hmac(key, "links", &j->job, sizeof j->job, NULL, 0, j->key);
    return IDIST_OK;
}

static idist_status idist__join_listen_local(idist__join *j, idist__record *me) {
    idist__addr addr;
    uint64_t id[2];
    idist_status s;
    idist__os_random(id, sizeof id);
    snprintf(me->local, sizeof me->local, "unix:idist-%016llx%016llx", (unsigned long long)id[0], (unsigned long long)id[1]);
    if ((s = idist__addr_parse(&addr, me->local)) != IDIST_OK) return s;
    return idist__sock_listen(&addr, me->local, &j->listeners[0]);
}

// The address under which other hosts reach this one: what the user says, or that of the connection to the store.
static idist_status idist__join_own_ip(idist__join *j, bool one_host, char *ip, size_t cap) {
    const char *env = idist__os_env("IDIST_ADDR");
    idist__addr a;
    memset(&a, 0, sizeof a);
    a.nbytes = sizeof a.sa;
    if (env) idist__copy_text(ip, cap, env);
    else if (one_host) idist__copy_text(ip, cap, "127.0.0.1");
    else if (j->own_store && strncmp(j->w->cfg.where, "file:", 5) != 0 &&
             getsockname(((idist__tcp_store *)j->store->impl)->fd, (struct sockaddr *)&a.sa, &a.nbytes) == 0 &&
             a.sa.ss_family != AF_UNIX)
        idist__addr_host_text(&a, ip, cap);
    else
        return idist__fail(IDIST_ERR_ENV,
                           "initialize: which address do other hosts reach this one at? Set IDIST_ADDR, or use tcp://");
    return IDIST_OK;
}

static idist_status idist__join_listen_tcp(idist__join *j, bool one_host) {
    idist__addr addr;
    char ip[64];
    idist_status s = idist__join_own_ip(j, one_host, ip, sizeof ip);
    if (s != IDIST_OK || (s = idist__addr_tcp(&addr, ip, 0)) != IDIST_OK) return s;
    if (!idist__addr_is_loopback(&addr) && !j->w->cfg.secret.nbytes && !j->w->cfg.secret.insecure)
        return idist__fail(IDIST_ERR_NO_SECRET,
                           "initialize: listening at %s, beyond this host, needs a shared secret: set IDIST_SECRET or "
                           "IDIST_SECRET_FILE on all ranks, or IDIST_INSECURE=1 to trust the network",
                           ip);
    if ((s = idist__sock_listen(&addr, ip, &j->listeners[1])) != IDIST_OK) return s;
    addr.nbytes = sizeof addr.sa;
    if (getsockname(j->listeners[1], (struct sockaddr *)&addr.sa, &addr.nbytes) != 0)
        return idist__fail_errno("getsockname", errno);
    snprintf(j->tcp, sizeof j->tcp, "tcp:[%s]:%d", ip, idist__addr_port(&addr));
    return idist__join_set(j, "tcp", j->w->group.rank, j->tcp, sizeof j->tcp);
}

// What every rank says about itself, on all of them. Rank 0 collects it: n requests and as many answers.
static idist_status idist__join_records(idist__join *j, idist__record *records) {
    int i, n = j->w->group.size, me = j->w->group.rank;
    idist_status s = idist__join_set(j, "node", me, &records[me], sizeof *records);

    if (s != IDIST_OK) return s;
    if (me) return idist__join_get(j, "nodes", -1, "node", records, sizeof *records * (size_t)n);
    for (i = 1; i < n && s == IDIST_OK; i++) s = idist__join_get(j, "node", i, NULL, &records[i], sizeof *records);
    return s == IDIST_OK ? idist__join_set(j, "nodes", -1, records, sizeof *records * (size_t)n) : s;
}

// Everybody's host; afterwards it is known whether TCP is needed at all.
static idist_status idist__join_table(idist__join *j, idist__record *records) {
    idist__world *w = j->w;
    idist__record *me = &records[w->group.rank];
    uint64_t host = idist__host_key(&w->cfg);
    uint32_t algorithm = (uint32_t)w->cfg.algorithm;
    bool one_host = true;
    idist_status s = IDIST_OK;
    int i;

    idist__copy_text(me->hostname, sizeof me->hostname, w->hostname);
    me->host = host;
    me->shm = w->cfg.transport == 0;
    me->algorithm = algorithm;
    if (w->cfg.transport != 2) s = idist__join_listen_local(j, me);
    if (s == IDIST_OK) s = idist__join_records(j, records);

    for (i = 0; i < w->group.size && s == IDIST_OK; i++) {
        records[i].hostname[sizeof records[i].hostname - 1] = 0;
        records[i].local[sizeof records[i].local - 1] = 0;
        idist__copy_text(w->nodes[i].hostname, sizeof w->nodes[i].hostname, records[i].hostname);
        w->nodes[i].host = records[i].host;
        if (records[i].host != host) one_host = false;
        if (records[i].algorithm != algorithm)
            s = idist__fail(IDIST_ERR_ENV, "initialize: IDIST_ALGO (desc.algorithm) differs between rank %d and rank %d", i,
                            w->group.rank);
    }
    j->records = records;
    if (s == IDIST_OK && (w->cfg.transport == 2 || !one_host)) s = idist__join_listen_tcp(j, one_host);
    return s;
}

static void idist__join_linked(idist__join *j, int rank, int fd, bool local) {
    idist__link *l = &j->ring->links[rank];
    l->transport = local ? &idist__transport_unix : &idist__transport_tcp;
    l->fd = fd;
    l->port = &l->fd;
    l->open = true;
    j->ring->nstreams++;
    j->nlinks++;
}

// A rank is gone. It may have given up and said why, or the store's server is about to say that it died.
static idist_status idist__join_lost(idist__join *j, int rank, const char *how) {
    int64_t soon = idist__os_deadline(300);
    char text[300];

    idist__copy_text(text, sizeof text, how); // may lie where a failure writes its text
    do {
        idist_status s = idist__join_failed(j);
        if (s != IDIST_OK) return s;
        idist__os_pause_ms(10);
    } while (idist__os_ms_until(soon) != 0);
    return idist__fail(IDIST_ERR_PEER_LOST, "initialize: rank %d on %s was lost: %s", rank, j->w->nodes[rank].hostname,
                       text);
}

static bool idist__join_is_local(const idist__join *j, int rank) {
    const idist__record *me = &j->records[j->w->group.rank], *other = &j->records[rank];
    return j->w->cfg.transport != 2 && other->host == me->host && other->local[0];
}

// Begins the connection to a lower rank, or says when to try again: its queue of newcomers may be full.
static idist_status idist__join_connect(idist__join *j, int rank) {
    idist__addr addr;
    char where[128], how[200];
    int64_t soon = idist__os_deadline(3000);
    idist_status s;
    int fd;

    j->again_ns[rank] = 0;
    idist__copy_text(where, sizeof where, j->records[rank].local);
    if (!idist__join_is_local(j, rank) && (s = idist__join_get(j, "tcp", rank, NULL, where, sizeof where)) != IDIST_OK)
        return s;
    where[sizeof where - 1] = 0;
    if ((s = idist__addr_parse(&addr, where)) != IDIST_OK) return s;

    fd = idist__sock_connect(&addr, soon < j->deadline_ns ? soon : j->deadline_ns);
    if (fd < 0 && (errno == EMFILE || errno == ENFILE)) return idist__join_no_fds(j);
    if (fd < 0 && (errno == EAGAIN || errno == ETIMEDOUT || errno == EINTR)) {
        j->again_ns[rank] = idist__os_deadline(20);
        return idist__join_failed(j);
    }
    if (fd < 0 && idist__sock_cut_off(errno))
        return idist__fail(IDIST_ERR_SYSTEM,
                           "initialize: rank %d on %s cannot be reached at %s (%s): the network interface is down, or no "
                           "route leads there",
                           rank, j->w->nodes[rank].hostname, where, strerror(errno));
    if (fd < 0) {
        snprintf(how, sizeof how, "no connection to %s: %s", where, strerror(errno));
        return idist__join_lost(j, rank, how);
    }
    idist__auth_begin(&j->shakes[rank], fd, false, j->key, IDIST__ROLE_LINK, j->job, j->w->group.rank, j->w->group.size,
                      j->deadline_ns);
    j->shakes[rank].ready = true;
    return IDIST_OK;
}

static idist_status idist__join_accept(idist__join *j, int listener) {
    idist__handshake *h;
    while ((h = idist__porch_place(j->porch)) != NULL) {
        int fd = idist__sock_accept(listener);
        if (fd < 0 && (errno == EMFILE || errno == ENFILE)) {
            if (!idist__porch_make_way(j->porch)) return idist__join_no_fds(j);
            idist__os_pause_ms(1); // no spin while descriptors are short
            return IDIST_OK;
        }
        if (fd < 0) return IDIST_OK;
        idist__os_close(&h->fd);
        idist__auth_begin(h, fd, true, j->key, IDIST__ROLE_LINK, j->job, j->w->group.rank, j->w->group.size,
                          idist__os_deadline(IDIST__PORCH_MS));
        h->ready = true;
    }
    return IDIST_OK;
}

// Moves a handshake on; a finished one becomes a link. An incoming one that fails is somebody else's problem; an outgoing
// one that broke off is tried again, and any other failure of it is fatal.
static idist_status idist__join_step(idist__join *j, idist__handshake *h, int to) {
    bool done = false, incoming = to < 0, local;
    idist_status s;
    struct sockaddr_storage sa;
    socklen_t n = sizeof sa;
    int rank;

    h->ready = false;
    s = idist__auth_step(h, &done);
    if (s == IDIST_OK && !done) return IDIST_OK;
    rank = s == IDIST_OK ? (int)h->theirs.rank : -1;
    if (s == IDIST_OK && (incoming ? rank <= j->w->group.rank || rank >= j->w->group.size : rank != to)) s = IDIST_ERR_AUTH;
    if (s == IDIST_OK && j->ring->links[rank].open) s = IDIST_ERR_RANK_TAKEN;
    if (s != IDIST_OK) {
        if (incoming) idist__log_print(&j->w->log, IDIST_LOG_DEBUG, "a connection was refused: %s", idist__me.text);
        idist__os_close(&h->fd);
        if (incoming) return IDIST_OK;
        if (h->broke) {
            j->again_ns[to] = idist__os_deadline(5 + to % 16); // not all at the same moment
            return IDIST_OK;
        }
        return idist__fail(s, "initialize: connecting to rank %d on %s: %s", to, j->w->nodes[to].hostname, idist__me.text);
    }
    local = getsockname(h->fd, (struct sockaddr *)&sa, &n) == 0 && sa.ss_family == AF_UNIX;
    idist__join_linked(j, rank, h->fd, local);
    h->fd = -1;
    return IDIST_OK;
}

static idist_status idist__join_late(const idist__join *j) {
    char text[300] = "";
    int i, missing = 0;
    for (i = 0; i < j->w->group.size; i++)
        if (i != j->w->group.rank && !j->ring->links[i].open && missing++ < 16)
            idist__append(text, sizeof text, "%s%d", missing > 1 ? ", " : "", i);
    return idist__fail(IDIST_ERR_TIMEOUT, "initialize: not connected within %d ms to rank %s%s", j->w->cfg.init_timeout_ms,
                       text, missing > 16 ? ", ..." : "");
}

// What poll should look at: the listeners while there is room for newcomers, then the outgoing handshakes in the order
// of ranks, then the incoming ones. Returns how many.
static int idist__join_poll_set(const idist__join *j, bool room, struct pollfd *fds) {
    int i, n = 0;

    for (i = 0; i < 2; i++) {
        if (j->listeners[i] < 0 || !room) continue;
        fds[n].fd = j->listeners[i];
        fds[n++].events = POLLIN;
    }
    for (i = 0; i < j->w->group.rank; i++) {
        if (j->shakes[i].fd < 0) continue;
        fds[n].fd = j->shakes[i].fd;
        fds[n++].events = idist__auth_writes(&j->shakes[i]) ? POLLOUT : POLLIN;
    }
    return n + idist__porch_poll(j->porch, fds + n);
}

// Goes on with what poll has seen.
static idist_status idist__join_polled(idist__join *j, bool room, const struct pollfd *fds) {
    int i, n = 0, me = j->w->group.rank;
    idist_status s = IDIST_OK;

    for (i = 0; i < 2; i++) n += room && j->listeners[i] >= 0;
    for (i = 0; i < me; i++)
        if (j->shakes[i].fd >= 0) j->shakes[i].ready = fds[n++].revents != 0;
    idist__porch_polled(j->porch, fds + n);

    for (i = 0; i < 2 && s == IDIST_OK; i++)
        if (j->listeners[i] >= 0) s = idist__join_accept(j, j->listeners[i]);
    for (i = 0; i < me && s == IDIST_OK; i++) {
        if (j->shakes[i].fd >= 0 && j->shakes[i].ready) s = idist__join_step(j, &j->shakes[i], i);
        else if (j->again_ns[i] && idist__os_now_ns() >= j->again_ns[i]) s = idist__join_connect(j, i);
    }
    for (i = 0; i < IDIST__PORCH && s == IDIST_OK; i++)
        if (j->porch->place[i].fd >= 0 && j->porch->place[i].ready) s = idist__join_step(j, &j->porch->place[i], -1);
    return s;
}

// All handshakes at once, so that no order of ranks can block another.
static idist_status idist__join_links(idist__join *j) {
    int i, n, size = j->w->group.size;
    size_t room_for = (size_t)size + IDIST__PORCH + 2;
    struct pollfd *fds = (struct pollfd *)idist__mem_alloc(&j->w->cfg.mem, sizeof *fds * room_for);
    int64_t asked_ns = idist__os_now_ns();
    idist_status s = fds ? IDIST_OK : IDIST_ERR_NO_MEMORY;

    for (i = 0; i < j->w->group.rank && s == IDIST_OK; i++) s = idist__join_connect(j, i);
    while (s == IDIST_OK && j->nlinks < size - 1) {
        bool room = idist__porch_place(j->porch) != NULL;
        n = idist__join_poll_set(j, room, fds);
        i = idist__os_ms_until(j->deadline_ns);
        if (i == 0) {
            s = idist__join_late(j);
            break;
        }
        i = poll(fds, (nfds_t)n, i < 0 || i > 20 ? 20 : i);
        if (i < 0 && errno != EINTR) s = idist__fail_errno("poll", errno);
        if (s == IDIST_OK) s = idist__join_polled(j, room, fds);
        if (s == IDIST_OK && idist__os_now_ns() - asked_ns > idist__join_slice_ms(j) * IDIST__MS) {
            s = idist__join_failed(j);
            asked_ns = idist__os_now_ns();
        }
    }
    idist__mem_free(&j->w->cfg.mem, fds);
    return s;
}

// ---- shared memory ----
//
// Once the links of a host are there, its lowest rank makes the file and passes it to the others through them; each maps
// it, reserves its own share, and says whether that went well. Only when it did for all is it used; if not, once
// more without windows (a limit on address space, say), and then the links stay what they are.

enum { IDIST__SHM_NO, IDIST__SHM_OK_FENCED, IDIST__SHM_OK }; // votes of a rank; fenced: its kernel has no membarrier

typedef struct idist__shm_hello {
    uint64_t shm_nbytes, window_nbytes;
} idist__shm_hello;

static size_t idist__shm_nbytes(const idist__shm *m) { return m->window_at + (size_t)m->n * m->window_nbytes; }

static void idist__shm_layout(idist__shm *m, size_t shm_nbytes, size_t window_nbytes) {
    size_t room, big;
    m->pipe_nbytes = 128 * 1024;
    while (m->pipe_nbytes > IDIST__PAGE && (size_t)m->n * m->pipe_nbytes > shm_nbytes / 4) m->pipe_nbytes /= 2;
    m->places_at = sizeof(idist__bell) + (size_t)m->n * (sizeof(idist__pipe) + m->pipe_nbytes);
    m->places_at = (m->places_at + IDIST__PAGE - 1) & ~(IDIST__PAGE - 1);
    room = shm_nbytes > m->places_at ? shm_nbytes - m->places_at : 0;
    m->chunk_nbytes[0] = room / (2 * IDIST__BUFFERS) < IDIST__CHUNK_MOST ? room / (2 * IDIST__BUFFERS) : IDIST__CHUNK_MOST;
    m->chunk_nbytes[1] = m->chunk_nbytes[0] / 4;
    m->chunk_nbytes[0] &= ~(IDIST__LINE - 1);
    m->chunk_nbytes[1] &= ~(IDIST__LINE - 1);
    big = idist__place_nbytes(m->chunk_nbytes[0]);
    m->nplaces = room < big ? 0 : 1 + (int)((room - big) / idist__place_nbytes(m->chunk_nbytes[1]));
    if (m->nplaces > (int)IDIST__COUNT_OF(m->taken)) m->nplaces = (int)IDIST__COUNT_OF(m->taken);
    m->share_nbytes = m->places_at;
    if (m->nplaces) m->share_nbytes += big + (size_t)(m->nplaces - 1) * idist__place_nbytes(m->chunk_nbytes[1]);
    m->window_at = IDIST__PAGE + (size_t)m->n * m->share_nbytes;
    m->window_nbytes = window_nbytes;
}

// As much as the host has memory, a power of two: only addresses are taken.
static size_t idist__shm_window_nbytes(int n) {
    uint64_t ram = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE), nbytes = (uint64_t)1 << 30;
    if (sizeof(void *) < 8) return 0;
    while (nbytes < ram && nbytes * (uint64_t)n < (uint64_t)1 << 42) nbytes *= 2;
    return (size_t)nbytes;
}

// Maps the file and reserves our share. Takes fd. 0, or an errno.
static int idist__shm_map(idist__shm *m, int fd) {
    struct stat st;
    idist__cpus cpus;
    int i, err = 0;
    if (fstat(fd, &st) != 0 || (uint64_t)st.st_size < idist__shm_nbytes(m)) err = EINVAL;
    if (!err) err = idist__os_reserve(fd, IDIST__PAGE + (size_t)m->me * m->share_nbytes, m->share_nbytes);
    if (!err && m->me == 0) err = idist__os_reserve(fd, 0, IDIST__PAGE);
    if (err) {
        close(fd);
        return err;
    }
    m->window =
        idist__window_open(fd, idist__shm_nbytes(m), m->window_at + (size_t)m->me * m->window_nbytes, m->window_nbytes);
    if (!m->window) return ENOMEM;
    m->base = m->window->map;
    idist__os_cpus(&cpus);
    for (i = 0; i < IDIST__CPU_WORDS; i++)
        __atomic_fetch_or(&idist__shm_head_of(m)->cpus.bits[i], cpus.bits[i], __ATOMIC_RELAXED);
    idist__os_random(&m->proof, sizeof m->proof);
    idist__shm_bell(m, m->me)->pid = getpid();
    idist__shm_bell(m, m->me)->proof = m->proof;
    idist__shm_bell(m, m->me)->proof_at = (uint64_t)(uintptr_t)&m->proof;
    return 0;
}

// Whether we can read the memory of all others, and they are who we think.
static bool idist__shm_sees_all(idist__shm *m) {
    int i;
    for (i = 0; i < m->n; i++) {
        const idist__bell *b = idist__shm_bell(m, i);
        uint64_t proof = 0, at = b->proof_at;
        m->pids[i] = (pid_t)b->pid;
        if (m->pids[i] <= 0 || idist__shm_pull(m, i, at, &proof, sizeof proof) != 0 || proof != b->proof) return false;
    }
    return true;
}

// Sends a message with a descriptor, which may be -1.
static bool idist__shm_send_fd(int sock, const void *buf, size_t nbytes, int fd, int64_t deadline_ns) {
    struct msghdr msg;
    struct iovec part;
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    memset(&msg, 0, sizeof msg);
    memset(&control, 0, sizeof control);
    part.iov_base = (void *)(uintptr_t)buf;
    part.iov_len = nbytes;
    msg.msg_iov = &part;
    msg.msg_iovlen = 1;
    if (fd >= 0) {
        msg.msg_control = control.bytes;
        msg.msg_controllen = sizeof control.bytes;
        control.head.cmsg_level = SOL_SOCKET;
        control.head.cmsg_type = SCM_RIGHTS;
        control.head.cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(&control.head), &fd, sizeof fd);
    }
    for (;;) {
        ssize_t n = sendmsg(sock, &msg, MSG_NOSIGNAL);
        if (n == (ssize_t)nbytes) return true;
        if (n >= 0 || (errno != EINTR && errno != EAGAIN)) return false; // a short message of a new socket is never cut
        if (errno == EAGAIN && !idist__sock_wait(sock, POLLOUT, deadline_ns)) return false;
    }
}

static bool idist__shm_recv_fd(int sock, void *buf, size_t nbytes, int *fd, int64_t deadline_ns) {
    struct msghdr msg;
    struct iovec part;
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    ssize_t n;
    *fd = -1;
    memset(&msg, 0, sizeof msg);
    part.iov_base = buf;
    part.iov_len = nbytes;
    msg.msg_iov = &part;
    msg.msg_iovlen = 1;
    msg.msg_control = control.bytes;
    msg.msg_controllen = sizeof control.bytes;
    errno = ETIMEDOUT;
    if (!idist__sock_wait(sock, POLLIN, deadline_ns)) return false;
    do n = recvmsg(sock, &msg, MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    if (n > 0 && msg.msg_controllen >= CMSG_LEN(sizeof(int)) && control.head.cmsg_level == SOL_SOCKET &&
        control.head.cmsg_type == SCM_RIGHTS)
        memcpy(fd, CMSG_DATA(&control.head), sizeof *fd);
    if (n == 0) errno = 0;
    return n > 0 && idist__sock_read_all(sock, (char *)buf + n, nbytes - (size_t)n, deadline_ns);
}

static idist_status idist__join_broken(idist__join *j, int rank) {
    if (errno == ETIMEDOUT)
        return idist__fail(IDIST_ERR_TIMEOUT,
                           "initialize: rank %d on %s did not come to the vote of this host on shared memory", rank,
                           j->w->nodes[rank].hostname);
    return idist__join_lost(j, rank, "its connection ended while the ranks of this host agreed on shared memory");
}

// Waits until a link has something to read. Asks now and then whether somebody else has given up: this rank may be waiting
// just because of that.
static idist_status idist__join_await(idist__join *j, int rank) {
    idist_status s;
    for (;;) {
        int64_t slice = idist__os_deadline(idist__join_slice_ms(j));
        if (idist__sock_wait(j->ring->links[rank].fd, POLLIN, slice < j->deadline_ns ? slice : j->deadline_ns))
            return IDIST_OK;
        s = idist__join_failed(j);
        if (s != IDIST_OK) return s;
        errno = ETIMEDOUT;
        if (idist__os_ms_until(j->deadline_ns) == 0) return idist__join_broken(j, rank);
    }
}

// The least of what the ranks of this host say, on all of them. The lowest one collects.
static idist_status idist__shm_vote(idist__join *j, const idist__shm *m, const int *ranks, char *vote) {
    const idist__link *links = j->ring->links;
    int i, n = m->me == 0 ? m->n : 1, lead = ranks[0];
    idist_status s;

    for (i = 1; i < n; i++) {
        char other = 0;
        s = idist__join_await(j, ranks[i]);
        if (s != IDIST_OK) return s;
        if (!idist__sock_read_all(links[ranks[i]].fd, &other, 1, j->deadline_ns)) return idist__join_broken(j, ranks[i]);
        if (other < *vote) *vote = other;
    }
    for (i = 1; i < n; i++)
        if (!idist__sock_write_all(links[ranks[i]].fd, vote, 1, j->deadline_ns)) return idist__join_broken(j, ranks[i]);
    if (!m->me) return IDIST_OK;

    if (!idist__sock_write_all(links[lead].fd, vote, 1, j->deadline_ns)) return idist__join_broken(j, lead);
    s = idist__join_await(j, lead);
    if (s != IDIST_OK) return s;
    return idist__sock_read_all(links[lead].fd, vote, 1, j->deadline_ns) ? IDIST_OK : idist__join_broken(j, lead);
}

// Makes the file and passes it on, or receives it. all: everybody has mapped it.
static idist_status idist__shm_open(idist__join *j, idist__shm *m, const int *ranks, bool *all) {
    idist__shm_hello hello;
    int i, fd = -1, err = EINVAL;
    char vote;
    idist_status s = IDIST_OK;
    hello.shm_nbytes = j->w->cfg.shm_nbytes;
    hello.window_nbytes = m->window_nbytes;
    if (m->me) s = idist__join_await(j, ranks[0]);
    if (s != IDIST_OK) return s;
    if (m->me && !idist__shm_recv_fd(j->ring->links[ranks[0]].fd, &hello, sizeof hello, &fd, j->deadline_ns))
        return idist__join_broken(j, ranks[0]);
    idist__shm_layout(m, (size_t)hello.shm_nbytes, (size_t)hello.window_nbytes);
    if (m->me == 0 && (fd = idist__os_memfd(idist__shm_nbytes(m))) < 0) err = errno;
    for (i = 1; i < m->n && m->me == 0; i++)
        if (!idist__shm_send_fd(j->ring->links[ranks[i]].fd, &hello, sizeof hello, fd, j->deadline_ns)) {
            idist__os_close(&fd);
            return idist__join_broken(j, ranks[i]);
        }
    if (fd >= 0) err = idist__shm_map(m, fd);
    if (err) idist__log_print(&j->w->log, IDIST_LOG_INFO, "no shared memory: %s", strerror(err));
    vote = err ? IDIST__SHM_NO : idist__os_fence_others(true) ? IDIST__SHM_OK : IDIST__SHM_OK_FENCED;
    s = idist__shm_vote(j, m, ranks, &vote);
    *all = s == IDIST_OK && vote != IDIST__SHM_NO;
    if (!*all) return s;
    if (m->me == 0) {
        idist__shm_head *head = idist__shm_head_of(m);
        head->ncores = (uint32_t)idist__cpus_count(&head->cpus);
        head->fenced = vote == IDIST__SHM_OK_FENCED || m->n > (int)head->ncores;
    }
    vote = idist__shm_sees_all(m); // everybody has mapped it by now, and left its proof
    s = idist__shm_vote(j, m, ranks, &vote);
    m->far = vote != 0;
    return s;
}

static void idist__shm_free(const idist_allocator *mem, idist__shm *m) {
    if (!m) return;
    if (m->window) idist__window_close(m->window);
    idist__mem_free(mem, m->local);
    idist__mem_free(mem, m->pids);
    idist__mem_free(mem, m->pieces);
    idist__mem_free(mem, m->ports);
    idist__mem_free(mem, m);
}

// From here on the links inside this host go through pipes.
static void idist__shm_take_over(idist__join *j, idist__shm *m, const int *ranks) {
    const idist__shm_head *head = idist__shm_head_of(m);
    int i;
    m->fenced = head->fenced != 0;
    m->crowded = m->n > (int)head->ncores;
    j->w->ncores = (int)head->ncores;
    for (i = 0; i < m->n; i++) {
        idist__link *l = &j->ring->links[ranks[i]];
        idist__shm_port *p = &m->ports[i];
        m->local[ranks[i]] = i;
        p->fd = -1;
        if (i == m->me) continue;
        p->shm = m;
        p->peer = i;
        p->in = idist__shm_pipe(m, i, m->me);
        p->out = idist__shm_pipe(m, m->me, i);
        p->fd = l->fd;
        l->fd = -1;
        l->port = p;
        l->transport = &idist__transport_shm;
        j->ring->nstreams--;
    }
    j->ring->shm = m;
}

static idist_status idist__join_share(idist__join *j, const idist__record *records) {
    const idist_allocator *mem = &j->w->cfg.mem;
    int i, me = j->w->group.rank, n = 0, attempt, *ranks;
    idist__shm *m;
    bool all = false;
    idist_status s = IDIST_OK;
    if (!records[me].shm) return IDIST_OK;
    m = (idist__shm *)idist__mem_alloc(mem, sizeof *m);
    if (!m) return IDIST_ERR_NO_MEMORY;
    m->local = ranks = (int *)idist__mem_alloc(mem, sizeof(int) * 2 * (size_t)j->w->group.size);
    m->ports = (idist__shm_port *)idist__mem_alloc(mem, sizeof *m->ports * (size_t)j->w->group.size);
    m->pids = (pid_t *)idist__mem_alloc(mem, sizeof *m->pids * (size_t)j->w->group.size);
    m->pieces = (char *)idist__mem_raw(mem, IDIST__FAR_PIECE * (size_t)j->w->group.size);
    if (!m->local || !m->ports || !m->pids || !m->pieces) {
        idist__shm_free(mem, m);
        return IDIST_ERR_NO_MEMORY;
    }
    ranks += j->w->group.size;
    for (i = 0; i < j->w->group.size; i++) {
        m->local[i] = -1;
        if (!records[i].shm || records[i].host != records[me].host || !records[i].local[0]) continue;
        if (i == me) m->me = n;
        ranks[n++] = i;
    }
    m->n = n;
    m->window_nbytes = idist__shm_window_nbytes(n);
    for (attempt = 0; attempt < 2 && n > 1 && s == IDIST_OK && !all; attempt++) {
        if (attempt) m->window_nbytes = 0;
        s = idist__shm_open(j, m, ranks, &all);
        if (m->window && !all) idist__window_close(m->window);
        if (!all) m->window = NULL;
    }
    if (s == IDIST_OK && all) idist__shm_take_over(j, m, ranks);
    else idist__shm_free(mem, m);
    return s;
}

// Everything is there. Rank 0 closes the store when that is so on all ranks: until then a death is told through it. Rank 0
// may do so before it has answered whoever told it.
static idist_status idist__join_leave(idist__join *j) {
    int64_t there = 0;
    char key[128], one = 1;
    idist_status s;

    idist__join_key(j, key, sizeof key, "njoined", -1);
    s = idist__join_set(j, "joined", j->w->group.rank, &one, sizeof one);
    if (s == IDIST_OK) s = idist_store_add(j->store, key, 1, &there);
    if (s != IDIST_OK) return s;
    if (there == j->w->group.size) idist__join_set(j, "all", -1, &one, sizeof one);
    idist__join_will(j, NULL);
    return j->own_store && j->w->group.rank == 0 ? idist__join_get(j, "all", -1, "joined", &one, sizeof one) : IDIST_OK;
}

static idist_status idist__join_run(idist__join *j) {
    idist__world *w = j->w;
    int i, n = w->group.size;
    idist__record *records = (idist__record *)idist__mem_alloc(&w->cfg.mem, sizeof *records * (size_t)n);
    idist_status s = IDIST_OK;
    j->shakes = (idist__handshake *)idist__mem_alloc(&w->cfg.mem, sizeof *j->shakes * (size_t)n);
    j->again_ns = (int64_t *)idist__mem_alloc(&w->cfg.mem, sizeof *j->again_ns * (size_t)n);
    j->porch = (idist__porch *)idist__mem_raw(&w->cfg.mem, sizeof *j->porch);
    if (j->porch) idist__porch_init(j->porch);
    if (!records || !j->shakes || !j->again_ns || !j->porch) {
        idist__mem_free(&w->cfg.mem, records);
        idist__mem_free(&w->cfg.mem, j->shakes);
        j->shakes = NULL;
        return IDIST_ERR_NO_MEMORY;
    }
    for (i = 0; i < n; i++) j->shakes[i].fd = -1;
    if (s == IDIST_OK) s = idist__join_job(j);
    if (s == IDIST_OK) s = idist__join_table(j, records);
    if (s == IDIST_OK) s = idist__join_links(j);
    if (s == IDIST_OK) s = idist__join_share(j, records);
    if (s == IDIST_OK) s = idist__join_leave(j);
    j->records = NULL;
    idist__mem_free(&w->cfg.mem, records);
    return s;
}

static void idist__ring_free(idist__ring *ring) {
    idist_allocator *mem = &ring->w->cfg.mem;
    int i;
    for (i = 0; ring->links && i < ring->w->group.size; i++) {
        idist__link *l = &ring->links[i];
        idist__message *m, *next;

        if (l->open) l->transport->close(l->port);
        idist__link_write_failed(ring, l); // frees what did not go out
        for (m = l->early; m; m = next) {
            next = m->next;
            idist__message_free(ring, l, m);
        }
        idist__mem_free(mem, l->stage);
    }
    while (ring->idle) {
        idist__verb *v = ring->idle;
        ring->idle = v->next;
        idist__mem_free(mem, v);
    }
    idist__os_close(&ring->wake);
    idist__shm_free(mem, ring->shm);
    idist__mem_free(mem, ring->links);
    idist__mem_free(mem, ring->polls);
    idist__mem_free(mem, ring->poll_ranks);
    idist__mem_free(mem, ring);
}

static idist_status idist__ring_new(idist__world *w, idist__ring **out) {
    idist__ring *ring = (idist__ring *)idist__mem_alloc(&w->cfg.mem, sizeof *ring);
    size_t n = (size_t)w->group.size, i;
    *out = ring;
    if (!ring) return IDIST_ERR_NO_MEMORY;
    ring->w = w;
    ring->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    ring->links = (idist__link *)idist__mem_alloc(&w->cfg.mem, sizeof *ring->links * n);
    ring->polls = (struct pollfd *)idist__mem_alloc(&w->cfg.mem, sizeof *ring->polls * 2 * (n + 1));
    ring->poll_ranks = (int *)idist__mem_alloc(&w->cfg.mem, sizeof(int) * 2 * (n + 1));
    if (!ring->links || !ring->polls || !ring->poll_ranks) return IDIST_ERR_NO_MEMORY;
    for (i = 0; i < n; i++) {
        idist__link *l = &ring->links[i];
        l->out_end = &l->out;
        l->early_end = &l->early;
        l->window = l->their_window = IDIST__WINDOW_BYTES;
        l->fd = -1;
        if ((l->stage = (char *)idist__mem_raw(&w->cfg.mem, IDIST__STAGE_BYTES)) == NULL) return IDIST_ERR_NO_MEMORY;
    }
    return ring->wake < 0 ? idist__fail_errno("eventfd", errno) : IDIST_OK;
}

static idist_status idist__ring_open(idist__world *w) {
    idist__join j;
    idist_status s = IDIST_OK;
    int i;
    memset(&j, 0, sizeof j);
    j.w = w;
    j.listeners[0] = j.listeners[1] = -1;
    j.deadline_ns = idist__os_deadline(w->cfg.init_timeout_ms);
    // Now, and not when it is needed: with a second thread, such as the server of the store, the kernel takes 15 ms for it.
    if (w->cfg.transport == 0 && w->group.size > 1) idist__os_fence_others(true);
    if (w->group.size == 1) idist__copy_text(w->nodes[0].hostname, sizeof w->nodes[0].hostname, w->hostname);
    else s = idist__join_store(&j); // first, so that the others hear of everything that goes wrong here
    if (s == IDIST_OK) s = idist__ring_new(w, &j.ring);
    if (s == IDIST_OK && w->group.size > 1) s = idist__join_run(&j);
    idist__join_store_lost(&j, s);
    if (s != IDIST_OK) idist__join_tell(&j, s);
    idist__os_close(&w->cfg.listener);
    idist__os_close(&j.listeners[0]);
    idist__os_close(&j.listeners[1]);
    for (i = 0; j.shakes && i < w->group.size; i++) idist__os_close(&j.shakes[i].fd);
    if (j.porch) idist__porch_close(j.porch);
    idist__mem_free(&w->cfg.mem, j.porch);
    idist__mem_free(&w->cfg.mem, j.again_ns);
    idist__mem_free(&w->cfg.mem, j.shakes);
    if (j.own_store) {
        char text[sizeof idist__me.text];
        memcpy(text, idist__me.text, sizeof text);
        idist_store_close(&j.store);
        memcpy(idist__me.text, text, sizeof text);
    }
    w->impl = j.ring;
    if (s != IDIST_OK && j.ring) idist__ring_free(j.ring);
    return s;
}

// A connection that is closed with bytes in it that we have not read takes with it what the other side has not read. So
// we say that nothing more comes, and throw away what still does until the other side ends too, or for a moment.
static void idist__ring_linger(idist__ring *ring, int64_t until_ns) {
    char waste[4096];
    int i, left;
    do {
        struct pollfd *p = ring->polls;
        for (i = left = 0; i < ring->w->group.size; i++) {
            idist__link *l = &ring->links[i];
            if (!l->open || !l->transport->lossy_close) continue;
            shutdown(l->fd, SHUT_WR);
            while (l->transport->read(l->port, waste, sizeof waste) > 0) continue;
            p[left].fd = l->fd;
            p[left].events = POLLIN;
            if (idist__sock_at_end(l->fd)) continue;
            left++;
        }
        if (left) poll(p, (nfds_t)left, idist__os_ms_until(until_ns));
    } while (left && idist__os_ms_until(until_ns) != 0);
}

// After the last barrier everybody says BYE. Where closing a connection with unread bytes in it could destroy the other
// side's, we wait for its BYE. A rank that leaves otherwise only lets its last words (ABORT) go out.
static void idist__ring_close(idist__world *w, bool clean) {
    idist__ring *ring = idist__ring_of(w);
    int64_t deadline_ns = idist__os_deadline(clean ? 5000 : 200);
    idist__frame f;
    int i;
    memset(&f, 0, sizeof f);
    f.type = IDIST__BYE;
    pthread_mutex_lock(&w->lock);
    w->group.rank = -1; // frames that still come concern nobody
    for (i = 0; i < w->group.size && clean; i++) idist__link_control(ring, &ring->links[i], &f, NULL);
    idist__ring_drain(ring, clean, deadline_ns);
    if (!clean) idist__ring_linger(ring, deadline_ns);
    idist__share_free(&w->group);
    pthread_mutex_unlock(&w->lock);
    idist__ring_free(ring);
}

static idist_status idist__ring_claim(idist__config *config, const char **why) {
    *why = "a world of 1 needs no backend";
    return config->world_size == 1 && !config->backends[0] ? IDIST_ERR_NO_BACKEND : IDIST_OK;
}

const idist_backend_api *idist_ring_backend(void) {
    // clang-format off
    static const idist_backend_api api = {
        IDIST__BACKEND_ABI, sizeof(idist_backend_api), "ring", sizeof(idist__op), sizeof(idist__ring_group),
        idist__ring_claim, idist__ring_open, idist__ring_close,
        idist__ring_group_open, idist__ring_group_close, idist__share_offer_place, idist__host_open,
        idist__ring_quick, idist__ring_start, idist__ring_progress, idist__ring_sleep, idist__ring_wake,
        idist__ring_cancel, idist__ring_tell, idist__ring_flush, idist__ring_announce, idist__ring_missing,
        idist__ring_alloc, NULL, NULL, NULL};
    // clang-format on
    return &api;
}

#ifdef __cplusplus
} // extern "C"
#endif

// Nor shall such a program find any of these.
#undef IDIST__COUNT_OF
#undef IDIST__FRAME_BYTES
#undef IDIST__PIECE_BYTES
#undef IDIST__WINDOW_BYTES
#undef IDIST__TEXT_BYTES
#undef IDIST__STAGE_BYTES
#undef IDIST__QUICK_YIELDS
#undef IDIST__TURN_NS
#undef IDIST__EAGER_NEAR_BYTES
#undef IDIST__HISTORY
#undef IDIST__LOOK_NS
#undef IDIST__LINE
#undef IDIST__FAR_PIECE
#undef IDIST__CLAIM_BYTES
#undef IDIST__PAGE
#undef IDIST__SLOTS
#undef IDIST__CHUNK_BYTES
#undef IDIST__CO_BEGIN
#undef IDIST__CO_AWAIT
#undef IDIST__CO_END
#undef IDIST__NOTICES
#undef IDIST__AHEAD
#undef IDIST__CHUNK_MOST
#undef IDIST__CHUNK_CROWDED
#undef IDIST__FLAT_BYTES
#undef IDIST__LET_GO_MS
#undef IDIST__INLINE_BYTES
#undef IDIST__ALONE_BYTES
#undef IDIST__FAR_BYTES
#undef IDIST__FAR_CROWDED
#undef IDIST__FAR_BROADCAST
#undef IDIST__FAR_SUMS
#undef IDIST__NOTICE_BYTES
#undef IDIST__ALL_HAVE
#undef IDIST__SOURCES_HAVE

#pragma pop_macro("lock")
#pragma pop_macro("small")
#pragma pop_macro("far")
#pragma pop_macro("near")
#if defined(__cplusplus) && defined(__GNUC__)
#pragma GCC diagnostic pop
#endif

#endif // IDIST_IMPLEMENTATION
