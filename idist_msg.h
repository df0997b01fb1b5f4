/* idist_msg.h - v0.1.0 - messages between ranks - MIT licence

    Part of the implementation of idist; idist.h includes it where IDIST_IMPLEMENTATION is defined.

CONTENTS

      [msg:types]      links, verbs, messages: what the sections below share
      [msg:transport]  bytes over stream sockets
      [msg:op]         a collective under way, and the macros that let an algorithm wait
      [msg:link]       frames in and out of one connection
      [msg:match]      which receive gets which message, and whether two calls are the same
      [msg:verb]       the non-blocking verbs: send and receive
*/
#ifndef IDIST_MSG_H
#define IDIST_MSG_H

//------------------------------------------------------------------------------
// [msg:types]  links, verbs, messages: what the sections below share
// uses os world shm:transport
// used by transport link verb engine algo join
//------------------------------------------------------------------------------

// A frame is 64 bytes, in the byte order that the handshake found equal on both sides; nbytes of
// payload may follow.
//
//   type   what follows                  fields used besides ctx
//   EAGER  a whole message               print, tag, nbytes; past, and in id and aux what the call
//   before was RTS    nothing: a message is ready   print, tag, past, id (the sender's name for
//   it), nbytes (its size), aux (its
//                                        address), flags (low bits of how many sends that rank has
//                                        withdrawn)
//   CTS    nothing: send it              id (as in RTS), aux (the receiver's name for it)
//   DATA   a piece of it                 id (the receiver's name), nbytes (of the piece)
//   PULLED nothing: I read it myself     id (as in RTS)
//   CREDIT nothing                       nbytes of eager messages were consumed
//   WAITS  nothing: I wait in a call     print, flags; aux (send / recv messages got so far), id
//   (of an RTS) HERE   nothing: I entered it too     print, of that call or of the last one that I
//   entered ABORT  text: the group failed        aux (the status), nbytes LEFT   nothing: I freed
//   the group    - BYE    nothing: I finalized
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
#define IDIST__PIECE_BYTES \
    ((size_t)1 << 20) // of a DATA frame: what can be interleaved with it waits this long
#define IDIST__WINDOW_BYTES \
    ((size_t)1 << 20) // eager bytes on their way to one rank that has not consumed them
#define IDIST__TEXT_BYTES ((size_t)400) // of an ABORT
enum { IDIST__CLOSED = 64 };            // groups whose end a ring remembers
enum {
    IDIST__UNKNOWN_MOST = 1024
}; // messages that a rank may send for groups that do not exist here yet
#define IDIST__STAGE_BYTES ((size_t)32 * 1024)
#define IDIST__QUICK_YIELDS 16 // of the quick way, with more ranks than cores
#define IDIST__TURN_NS 64      // of the quick way, about: a look and a short break
#define IDIST__EAGER_NEAR_BYTES \
    ((size_t)8192) // the limit of an eager message where the receiver can read it by itself

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

// One send or receive under way: what algorithms are made of. It is in one list at a time (a link's
// out, waiting, posted or receiving, a group's recvs or wild, the ring's idle ones), or in none
// while it is a link's in_verb or the claim on a message.
typedef struct idist__verb {
    struct idist__verb *next;  // in the one list that holds it
    struct idist__verb **at;   // what points to it there
    struct idist__verbs *list; // an idist__verbs that holds it, ...
    idist__hook hook;          // ... and its bucket, or none
    idist__task
        *task; // NULL: nobody waits for it (a control frame, or the rest of a cancelled message)
    int slot;  // of a receive in a collective, -1: none
    bool send, started; // started: the other side was told about it
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
    // window + what is on its way, lies early over there, or is owed to us there =
    // IDIST__WINDOW_BYTES, always.
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
    int64_t drowsy_ns; // how much longer than IDIST__LOOK_NS we sleep there, as nobody wakes us
    bool judging;      // inside idist__link_ended
    idist__verb *idle;
    uint64_t stamp, next_id;
    uint64_t closed[IDIST__CLOSED]; // ctx of the groups closed last: what still comes for them is
                                    // dropped
    uint32_t nclosed;
    int64_t looked_ns; // when the last call began that read the links
    // A failure noticed in the middle of something is carried out when that is through.
    idist_group *failed;
    idist_status failed_status;
    char failed_cause[400];
    idist__bucket verbs[IDIST__BUCKETS], messages[IDIST__BUCKETS];
} idist__ring;

#define IDIST__HISTORY 64
#define IDIST__LOOK_NS \
    (10 * IDIST__MS) // a rank that sleeps on shared memory looks at its sockets this often

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
    idist_group *near, *leads; // NULL: no other member on this host; this rank leads no host
    idist_group *whole;        // this group is near or leads of that one
    idist__task *head, *last;  // calls by host under way; only the first one runs
} idist__ring_group;

static idist__ring *idist__ring_of(const idist__world *w) { return (idist__ring *)w->impl; }

static idist__ring_group *idist__ring_group_of(const idist_group *g) {
    return (idist__ring_group *)g->impl;
}

//------------------------------------------------------------------------------
// [msg:transport]  bytes over stream sockets
// uses os sock shm:transport
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
    "tcp", idist__stream_read, idist__stream_write, idist__stream_fd, idist__stream_close, NULL,
    true};
static const idist__transport idist__transport_unix = {
    "unix", idist__stream_read, idist__stream_write, idist__stream_fd, idist__stream_close, NULL,
    false};

//------------------------------------------------------------------------------
// [msg:op]  a collective under way, and the macros that let an algorithm wait
// uses err mem reduce world types
//
// An algorithm is a function that is called again whenever one of its sends or receives is through.
// It either keeps its place by itself (streams), or is written as straight code between CO_BEGIN
// and CO_END, where CO_AWAIT leaves the function until its condition holds. Nothing in it may live
// in local variables across an AWAIT; the state is in idist__op.
//------------------------------------------------------------------------------

#define IDIST__SLOTS 8                          // receives of a stream that are posted ahead
#define IDIST__CHUNK_BYTES ((size_t)256 * 1024) // unit of a stream

typedef struct idist__op idist__op;

// A stream: items come in one after the other, are taken (reduced, say), and items go out. See
// idist__stream_run.
typedef struct idist__item {
    int peer; // rank in the group
    char *data;
    size_t nbytes;
} idist__item;

struct idist__op {
    void (*run)(idist__task *t);
    void (*finish)(idist__task *t); // after the last step, e.g. a copy to where the result belongs
    int algorithm; // 1 latency, 2 bandwidth, 3 flat, 4 chunked, 5 by host: part of the fingerprint
    int line;      // where run goes on
    bool running;
    uint16_t past;      // digest of the calls before
    uint32_t rx;        // bit k: the receive in slot k is not through
    int nsends, nrecvs; // not through
    idist__verb *verb; // of a send or receive of the program; NULL: there is none, or none any more
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

// A buffer that nobody reads or writes may be NULL. Algorithms add offsets to it, which C allows
// for no null pointer.
static char *idist__op_buffer(const void *buffer) {
    static const char nothing[1] = {0};
    return (char *)(uintptr_t)(buffer ? buffer : nothing);
}

// acc = lo (op) hi over count elements; acc is one of them or neither. A user op works in place on
// its second operand, so where that must survive it is copied, a piece at a time.
static void idist__op_reduce(const idist__op *o, char *acc, const char *lo, const char *hi,
                             size_t count, idist_dtype dtype) {
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
// [msg:link]  frames in and out of one connection
// uses err mem hash world types op
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
    while (hook && (idist__hook_verb(hook)->list != list || idist__hook_verb(hook)->id != id))
        hook = hook->next;
    return hook ? idist__hook_verb(hook) : NULL;
}

static void idist__verb_free(idist__ring *ring, idist__verb *v) {
    idist__mem_free(&ring->w->cfg.mem, v->owned);
    if (v->task && idist__kind_is_p2p(v->task->call.kind)) idist__op_of(v->task)->verb = NULL;
    v->next = ring->idle;
    ring->idle = v;
}

// Remembers a failure; idist__ring_settle carries it out.
static void idist__ring_fail(idist__ring *ring, idist_group *g, idist_status status,
                             const char *cause) {
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
        idist__verb_free(ring,
                         v); // the task, if any, ends with its group when reading finds the loss
    }
}

// A frame and its payload are out: what comes of the verb.
static void idist__link_sent(idist__ring *ring, idist__link *l, idist__verb *v) {
    idist__link_pop(l);

    if (v->frame.type == IDIST__RTS) {
        idist__verb_put(ring, &l->waiting, v, idist__mix(v->id, 0));
    } else if (v->frame.type == IDIST__DATA && (v->moved += v->piece) < v->nbytes) {
        v->piece =
            v->nbytes - v->moved < IDIST__PIECE_BYTES ? v->nbytes - v->moved : IDIST__PIECE_BYTES;
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
        k = IDIST__FRAME_BYTES - v->frame_moved < (size_t)n ? IDIST__FRAME_BYTES - v->frame_moved
                                                            : (size_t)n;
        v->frame_moved += k;
        v->piece_moved += (size_t)n - k;
        if (v->frame_moved == IDIST__FRAME_BYTES && v->piece_moved == v->piece)
            idist__link_sent(ring, l, v);
    }
}

// Queues a frame that no task waits for; text may follow it.
static void idist__link_control(idist__ring *ring, idist__link *l, const idist__frame *f,
                                const char *text) {
    idist__verb *v = l->open && !l->write_dead ? idist__verb_new(ring) : NULL;
    idist_group *g = v ? NULL : idist__world_find_group(ring->w, f->ctx);

    if (!v) { // if it is for want of memory, the other side waits for what the frame says
        if (l->open && !l->write_dead)
            idist__ring_fail(ring, g ? g : &ring->w->group, IDIST_ERR_NO_MEMORY,
                             "a rank is out of memory");
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

// The oldest message that a rank sent for a group which does not exist here. Honest ranks leave a
// few behind, for groups that were freed before all had come; so nobody is refused for it.
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

static idist__message *idist__message_new(idist__ring *ring, idist__link *l, const idist__frame *f,
                                          size_t payload) {
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
// [msg:match]  which receive gets which message, and whether two calls are the same
// uses hash world self segment types op link
//------------------------------------------------------------------------------

// Two ranks are in different calls: the group fails on all of them.
static void idist__ring_mismatch(idist__ring *ring, idist_group *g, int peer,
                                 const idist__print *theirs, const idist__print *ours,
                                 const char *field) {
    char cause[400];
    int me = ring->w->group.rank;
    if (me < peer) idist__mismatch_text(field, me, ours, peer, theirs, cause, sizeof cause);
    else idist__mismatch_text(field, peer, theirs, me, ours, cause, sizeof cause);
    idist__ring_fail(ring, g, IDIST_ERR_MISMATCH, cause);
}

// The digest of the calls before a new one. A part of a call on a larger group also vouches for the
// calls on that group.
static uint16_t idist__ring_past(const idist__task *t) {
    return (uint16_t)(idist__ring_group_of(t->group)->digest ^ t->whole_past);
}

// A call begins. A rank may be through with a one-way call, and with the next one, before it has
// read the frame that differs. So every frame and every notice says what its sender called before:
// any rank that gets a later one can tell.
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

// What this rank called before the call of this print, on the group that the user knows; NULL when
// that is forgotten.
static const idist__print *idist__ring_before(const idist_group *g, const idist__print *print) {
    uint32_t seq = (print->whole ? print->whole : print->seq) - 1;
    const idist__print *before;

    if (print->whole) g = idist__ring_group_of(g)->whole;
    if (!g) return NULL;
    before = &idist__ring_group_of(g)->history[seq % IDIST__HISTORY];
    return before->seq == seq ? before : NULL;
}

// id and aux are free in EAGER: there it says what the very call before was, if that is still
// known, for the error text.
static void idist__frame_tell_past(const idist__task *t, idist__frame *f) {
    const idist__print *before;

    f->past = idist__op_of(t)->past;
    if (f->type != IDIST__EAGER) return;
    before = idist__ring_before(t->group, &f->print);
    if (!before) return;
    memcpy(&f->id, before, sizeof f->id);
    f->aux = before->check;
}

// Two ranks are in the same call, and called something else before; `theirs` says what, if its kind
// is not 0.
static void idist__ring_past_differs(idist__ring *ring, idist_group *g, int peer,
                                     const idist__print *print, const idist__print *theirs) {
    const idist__print *before = idist__ring_before(g, print);
    const char *field = before && theirs->kind ? idist__print_difference(theirs, before) : NULL;

    if (field) idist__ring_mismatch(ring, g, peer, theirs, before, field);
    else idist__ring_mismatch(ring, g, peer, print, print, "sequence of calls before it");
}

// The same, from a frame, which says the most when it is EAGER.
static void idist__frame_past_differs(idist__ring *ring, idist_group *g, int peer,
                                      const idist__frame *f) {
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

// Compares a frame of a collective with our call of the same number, running or finished. False on
// a mismatch. A frame for a call that we have not begun says nothing yet.
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
    // What is left over of a finished call that looked the same: the calls were not the same after
    // all.
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
static idist__verb *idist__match_oldest(idist__ring *ring, idist_group *g, int peer,
                                        const idist__frame *f) {
    idist__ring_group *rg = idist__ring_group_of(g);
    idist__hook *hook =
        rg->recvs.first ? ring->verbs[idist__frame_key(peer, f) % IDIST__BUCKETS].first : NULL;
    idist__verb *wild = rg->wild.first, *v = NULL;

    for (; hook && !v; hook = hook->next)
        if (idist__hook_verb(hook)->list == &rg->recvs &&
            idist__recv_wants(idist__hook_verb(hook)->task, peer, (int)f->tag))
            v = idist__hook_verb(hook);

    while (wild && !idist__recv_wants(wild->task, peer, (int)f->tag)) wild = wild->next;

    return !v || (wild && wild->stamp < v->stamp) ? wild : v;
}

// Takes it out. Receives that it does not fit fail, and the message stays.
static idist__verb *idist__match_recv(idist__ring *ring, idist_group *g, int peer,
                                      const idist__frame *f) {
    idist__verb *v;

    while ((v = idist__match_oldest(ring, g, peer, f)) != NULL) {
        idist_status s;
        char text[256];
        idist__verb_take(v);
        if (idist__message_fits(&v->task->call, (idist_dtype)f->print.dtype, (size_t)f->print.check,
                                idist__ring_group_of(g)->rank_of[peer], (int)f->tag, &s, text,
                                sizeof text))
            return v;
        idist__complete(v->task, s, text);
        idist__verb_free(ring, v);
    }

    return NULL;
}

static idist__verb *idist__match_posted(idist__ring *ring, const idist__link *l, int peer,
                                        const idist__frame *f) {
    idist__hook *hook;

    for (hook = ring->verbs[idist__frame_key(peer, f) % IDIST__BUCKETS].first; hook;
         hook = hook->next) {
        idist__verb *v = idist__hook_verb(hook);
        if (v->list != &l->posted) continue;
        if (v->frame.ctx != f->ctx || v->frame.print.seq != f->print.seq || v->frame.tag != f->tag)
            continue;
        idist__verb_take(v);
        return v;
    }

    return NULL;
}

// The receive for a frame that begins a message, or NULL: it came early, or its group has failed.
static idist__verb *idist__match_frame(idist__ring *ring, idist__link *l, int peer,
                                       const idist__frame *f) {
    idist_group *g = idist__world_find_group(ring->w, f->ctx);
    idist__verb *v;

    if (!g || g->status != IDIST_OK) return NULL;
    if (f->print.kind == IDIST__SEND) return idist__match_recv(ring, g, peer, f);
    if (!idist__ring_agree(ring, g, peer, f)) return NULL;
    v = idist__match_posted(ring, l, peer, f);
    if (v && v->nbytes != f->nbytes) {
        char cause[400];
        idist__counts_text(peer, f->nbytes, ring->w->group.rank, v->nbytes, "bytes", v->task, cause,
                           sizeof cause);
        idist__verb_put(ring, &l->posted, v, idist__frame_key(peer, f));
        idist__ring_fail(ring, g, IDIST_ERR_MISMATCH, cause);
        return NULL;
    }

    return v;
}

// Reads an announced message in the memory of its sender. False when that cannot be, or the sender
// may have given up meanwhile and used the memory for something else.
static bool idist__link_pull(idist__ring *ring, idist__link *l, int peer, idist__verb *v,
                             const idist__frame *f) {
    const idist__shm *m = ring->shm;
    idist__frame pulled;
    int rank;

    if (!f->aux || !l->transport->polled || !m->far) return false;
    rank = m->local[peer];
    if (idist__shm_pull(m, rank, f->aux, v->data, (size_t)f->nbytes) != 0) return false;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if ((uint8_t)__atomic_load_n(&idist__shm_bell(m, rank)->withdrawn, __ATOMIC_ACQUIRE) !=
        f->flags)
        return false;
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
static void idist__link_clear_to_send(idist__ring *ring, idist__link *l, int peer, idist__verb *v,
                                      const idist__frame *f) {
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
static void idist__message_give(idist__ring *ring, idist__link *l, int peer, idist__message *m,
                                idist__verb *v) {
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
// [msg:verb]  the non-blocking verbs: send and receive
// uses os base:type world self segment types op link match
//------------------------------------------------------------------------------

// The largest message that goes out without being asked for.
static size_t idist__eager_nbytes(const idist__ring *ring, const idist__link *l) {
    return l->transport->polled && ring->shm && ring->shm->far ? IDIST__EAGER_NEAR_BYTES
                                                               : IDIST__EAGER_BYTES;
}

static void idist__verb_send(idist__task *t, int world_rank, uint32_t tag, const void *data,
                             size_t nbytes, const idist__print *print) {
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
static void idist__send_step(idist__task *t, int to, uint32_t step, const void *data,
                             size_t nbytes) {
    idist__op *o = idist__op_of(t);
    idist__print p = idist__task_print(t, o->algorithm);
    o->nsends++;
    idist__verb_send(t, idist__world_rank(t->group, to), step, data, nbytes, &p);
}

// And nbytes come from one, into slot 0 .. 31 (or -1: only counted).
static void idist__recv_step(idist__task *t, int slot, int from, uint32_t step, void *data,
                             size_t nbytes) {
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
        if (m->peer != peer || m->claim || m->frame.ctx != v->frame.ctx ||
            m->frame.print.kind == IDIST__SEND)
            continue;
        if (m->frame.print.seq != t->seq || m->frame.tag != step || m->frame.type > IDIST__RTS)
            continue;
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
        idist__verb_send(t, idist__world_rank(t->group, t->call.root), (uint32_t)t->call.tag,
                         t->call.send, t->call.count * idist_dtype_size(t->call.dtype), &p);
}

// Waits a moment for another rank, without looking at anything else. False when that was tried
// often enough.
static bool idist__quick_waits(const idist__ring *ring, int turns) {
    const idist__world *w = ring->w;

    if (ring->failed || __atomic_load_n(&w->nasking, __ATOMIC_RELAXED))
        return false; // the long way gives others the lock
    if (turns >= (w->spin_ns ? (int)(w->patience_ns / IDIST__TURN_NS) : IDIST__QUICK_YIELDS))
        return false;
    if (w->spin_ns) idist__os_relax();
    else sched_yield();

    return true;
}

// A blocking send while nothing else is under way: into the pipe at once, without task, verb and
// clock, if it fits.
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

// The same for a receive: takes the message that is next in the pipe if it is the one wanted, and
// small.
static bool idist__recv_quick(idist_group *g, const idist__call *c) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__link *l = c->root >= 0 ? &ring->links[idist__world_rank(g, c->root)] : NULL;
    idist__frame f;
    int turns;

    if (!l || !l->open || !l->transport->polled || l->early || l->in_moved || l->ended)
        return false;
    for (turns = 0; !idist__shm_peek((idist__shm_port *)l->port, &f, sizeof f); turns++)
        if (!idist__quick_waits(ring, turns)) return false;
    if (f.type != IDIST__EAGER || f.ctx != g->ctx || f.print.kind != IDIST__SEND) return false;
    if (f.print.dtype != c->dtype || f.print.check > c->count ||
        (c->tag != IDIST_ANY_TAG && (uint32_t)c->tag != f.tag))
        return false;
    if (f.nbytes > IDIST__EAGER_BYTES || f.nbytes != f.print.check * idist_dtype_size(c->dtype))
        return false;
    if (f.nbytes + sizeof f > l->their_window) return false;
    if (idist__shm_there((idist__shm_port *)l->port) < sizeof f + f.nbytes)
        return false;                          // the rest is still to come
    l->transport->read(l->port, &f, sizeof f); // all of it is there
    if (f.nbytes) l->transport->read(l->port, c->recv, (size_t)f.nbytes);
    l->p2p_got++;
    l->peer_waits.type = 0;
    l->their_window -= (size_t)f.nbytes + sizeof f;
    idist__link_consumed(ring, l, (size_t)f.nbytes);
    idist__recv_tell(c, c->root, (int)f.tag, (size_t)f.print.check);

    return true;
}

static bool idist__recv_takes(const idist__task *t, const idist__message *m, int from) {
    if (m->peer != from || m->claim || m->frame.type > IDIST__RTS ||
        m->frame.print.kind != IDIST__SEND)
        return false;
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
    if (t->call.root == IDIST_ANY_SOURCE || t->call.tag == IDIST_ANY_TAG)
        idist__verb_list(&rg->wild, v);
    else
        idist__verb_put(ring, &rg->recvs, v,
                        idist__ring_key(t->group->ctx, t->group->ranks[t->call.root], true,
                                        (uint32_t)t->call.tag));

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

#endif // IDIST_MSG_H
