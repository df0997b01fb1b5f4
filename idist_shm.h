/* idist_shm.h - v0.1.0 - memory that ranks of a host share - MIT licence

    Part of the implementation of idist; idist.h includes it where IDIST_IMPLEMENTATION is defined.

CONTENTS

      [shm:transport]  what moves bytes between two ranks
      [shm:segment]    memory that the ranks of one host share
*/
#ifndef IDIST_SHM_H
#define IDIST_SHM_H

//------------------------------------------------------------------------------
// [shm:transport]  what moves bytes between two ranks
// uses -
//------------------------------------------------------------------------------

// A transport moves bytes between two ranks. It never blocks; `port` is its own. read and write: >
// 0 bytes moved, 0 nothing can move now, -1 the stream ended (errno 0) or broke (errno).
typedef struct idist__transport {
    const char *name;
    ptrdiff_t (*read)(void *port, void *buf, size_t nbytes);
    ptrdiff_t (*write)(void *port, const struct iovec *parts, int nparts);
    int (*poll_fd)(void *port); // readable / writable as the port is
    void (*close)(void *port);
    void (*polled)(void *port); // poll has seen something at poll_fd. NULL: then bytes move through
                                // that descriptor
    bool lossy_close; // closing with unread bytes may destroy what the other side has not read yet
} idist__transport;

//------------------------------------------------------------------------------
// [shm:segment]  memory that the ranks of one host share
// uses os mem sock transport
//
// One file in memory, without a name, mapped by all ranks of the host:
//
//   | head | share of rank 0 | share of rank 1 | ... | window of rank 0 | window of rank 1 | ...
//
//   share    bell | a pipe from each rank | places: what the rank shows the others in collectives
//   ([ring:share]) window   holes, until idist_alloc fills a part of one
//
// Shares are reserved when the file is mapped, so that no access can fail later. Ranks are numbered
// by the order of their world ranks here. Whoever writes something that another rank may wait for
// knocks afterwards; a rank that is about to sleep says so in its bell first and looks once more.
// Between writing and looking there is a fence on both sides, or the one who falls asleep puts one
// into all others (idist__shm_any_asleep): one of the two always sees the other.
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
    idist__counter withdrawn; // sends that ended before their time: what was read at their
                              // addresses is worth nothing
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
    return (idist__pipe *)(void *)(idist__shm_share(m, to) + sizeof(idist__bell) +
                                   (size_t)from * one);
}

// Wakes a rank if it sleeps, or is about to. The caller has put a fence behind what it wrote.
static void idist__shm_wake(const idist__shm *m, int rank) {
    idist__bell *b = idist__shm_bell(m, rank);
    uint32_t how = __atomic_load_n(&b->asleep, __ATOMIC_RELAXED);
    if (how) how = __atomic_exchange_n(&b->asleep, 0u, __ATOMIC_ACQ_REL);
    if (how == 1) idist__os_futex_wake(&b->asleep);
    if (how == 2) send(m->ports[rank].fd, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

static idist__shm_head *idist__shm_head_of(const idist__shm *m) {
    return (idist__shm_head *)(void *)m->base;
}

// Whether anybody sleeps, after something was written. A fence would wait until the line that we
// wrote has come over from the other core, as long as a small collective takes; so where the kernel
// can put one into all other ranks, the one who falls asleep asks for that. With more ranks than
// cores sleep is common, and everybody has its own.
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

static void idist__pipe_copy(const idist__shm *m, idist__pipe *p, uint64_t at, char *buf,
                             size_t nbytes, bool in) {
    char *data = (char *)(p + 1);
    size_t from = (size_t)at & (m->pipe_nbytes - 1),
           first = m->pipe_nbytes - from < nbytes ? m->pipe_nbytes - from : nbytes;

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

// The socket carries nothing but knocks; its end is the end of the link, after what lies in the
// pipe.
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
    if (there > p->shm->pipe_nbytes / 2 && idist__shm_any_asleep(p->shm))
        idist__shm_wake(p->shm, p->peer);

    return (ptrdiff_t)nbytes;
}

static ptrdiff_t idist__shm_write(void *port, const struct iovec *parts, int nparts) {
    idist__shm_port *p = (idist__shm_port *)port;
    size_t room = p->shm->pipe_nbytes, moved = 0, wanted = 0;
    uint64_t unread;
    int i;

    for (i = 0; i < nparts; i++) wanted += parts[i].iov_len;
    if (wanted > room - (size_t)(p->tail - p->out_head))
        p->out_head = __atomic_load_n(&p->out->head, __ATOMIC_ACQUIRE);
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
    for (at = nbytes; at < there && at < 4 * IDIST__LINE;
         at += IDIST__LINE) // what follows will be wanted next
        __builtin_prefetch((const char *)(p->in + 1) +
                           ((p->head + at) & (p->shm->pipe_nbytes - 1)));
    idist__pipe_copy(p->shm, p->in, p->head, (char *)buf, nbytes, true);

    return true;
}

// Whether a write of so many bytes will go through as a whole.
static bool idist__shm_has_room(idist__shm_port *p, size_t nbytes) {
    size_t room = p->shm->pipe_nbytes;
    if (nbytes > room - (size_t)(p->tail - p->out_head))
        p->out_head = __atomic_load_n(&p->out->head, __ATOMIC_ACQUIRE);
    return p->tail - p->out_head <= room && nbytes <= room - (size_t)(p->tail - p->out_head);
}

// Takes the lines that the next write will fill away from the other side, which has read them a lap
// ago.
static void idist__shm_claim(const idist__shm_port *p, size_t nbytes) {
    size_t at;
    for (at = 0; at < nbytes && at < IDIST__CLAIM_BYTES; at += IDIST__LINE)
        idist__os_claim((const char *)(p->out + 1) + ((p->tail + at) & (p->shm->pipe_nbytes - 1)));
}

// Whether the other process is gone, also where knocks that nobody has read lie before the end of
// the socket.
static bool idist__shm_gone(const idist__shm_port *p) {
    struct pollfd end;
    end.fd = p->fd;
    end.events = 0;
    return p->fd < 0 || (poll(&end, 1, 0) > 0 && (end.revents & (POLLHUP | POLLERR)));
}

static int idist__shm_fd(void *port) { return ((idist__shm_port *)port)->fd; }

static void idist__shm_polled(void *port) { ((idist__shm_port *)port)->look = true; }

static void idist__shm_close(void *port) { idist__os_close(&((idist__shm_port *)port)->fd); }

static const idist__transport idist__transport_shm = {
    "shm", idist__shm_read, idist__shm_write, idist__shm_fd, idist__shm_close, idist__shm_polled,
    false};

#endif // IDIST_SHM_H
