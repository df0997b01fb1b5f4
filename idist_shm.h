/* idist_shm.h - v0.2.0 - memory that ranks of a host share - MIT licence

    Part of the implementation of idist; idist.h includes it where IDIST_IMPLEMENTATION is defined.

WHAT IT IS

    A file in memory that all ranks of a host have mapped, and two things made of it: a doorbell for
    each rank, on which it sleeps until another one wakes it, and a pipe for each pair of ranks, the
    transport of their link. The rest of the file is for collectives (idist_share.h) and for
    idist_alloc.

HOW IT FITS

    [join:share] creates and maps the file; from then on the links inside the host use
    idist__pipe_transport. [engine:wait] sleeps on the doorbell.

A MESSAGE THROUGH A PIPE

    idist__pipe_write            copy to the ring buffer, publish the new tail
    idist__doorbell_any_asleep   one load in the common case: nobody sleeps
    idist__doorbell_wake              futex, or one byte through a socket
    idist__pipe_read              load the tail, copy out, publish the new head

CONTENTS

      [shm:transport]  what a link needs of whatever moves its bytes
      [shm:segment]    layout of the shared file, and reading the memory of other processes
      [shm:doorbell]   sleeping until another rank writes something
      [shm:pipe]       a transport through shared memory
*/
#ifndef IDIST_SHM_H
#define IDIST_SHM_H

//------------------------------------------------------------------------------
// [shm:transport]  what a link needs of whatever moves its bytes
// uses socket
//------------------------------------------------------------------------------

// A transport moves the bytes of one link. No function blocks. `port` is the transport's own end of
// the link and belongs to whoever opened it; `close` closes what is in it.
//
// The functions of the second half are optional: NULL where the transport cannot do it, and then
// messages do without.
typedef struct idist__transport {
    const char *name;

    // > 0: bytes moved, perhaps fewer than asked for. 0: nothing can move now. -1: the stream has
    // ended (errno 0) or is broken (errno).
    ptrdiff_t (*read)(void *port, void *buf, size_t nbytes);
    ptrdiff_t (*write)(void *port, const idist__os_part *parts, int nparts);

    void (*close)(void *port);

    // What a rank watches in poll to learn that `read` may find something, or, while it has bytes
    // to write, that `write` may take some: a descriptor and the events for idist__os_poll_watch.
    // 0: there is nothing to watch.
    int (*poll_events)(void *port, bool has_output, int *fd);

    bool polled;      // a read costs a system call, so poll is to tell when to read many links
    bool lossy_close; // closing with unread bytes may destroy what the peer has not read yet

    // Has to be called before a read when the descriptor was found readable.
    void (*note_readable)(void *port);

    // Copies the next nbytes without consuming them. False: fewer have arrived.
    bool (*peek)(void *port, void *buf, size_t nbytes);

    // All or nothing. False: nothing was consumed (written), because not all has arrived (there is
    // no space for all). read_all fills `header` first, then `payload`.
    bool (*read_all)(void *port, void *header, size_t header_nbytes, void *payload, size_t nbytes);
    bool (*write_all)(void *port, const idist__os_part *parts, int nparts);

    // Whether the peer may read messages in the memory of this process. The same on both sides of a
    // link, which decides how large messages go. Then `withdrawn`, if not NULL, gets the count of
    // sends that ended early so far, modulo 256, for `pull` there.
    bool (*exposes_memory)(void *port, uint8_t *withdrawn);

    // Copies from an address in the peer's process. False: not possible, or the peer has withdrawn
    // sends since it counted `withdrawn`, so the memory may hold something else by now.
    bool (*pull)(void *port, uint64_t address, uint8_t withdrawn, void *buf, size_t nbytes);
} idist__transport;

//------------------------------------------------------------------------------
// [shm:segment]  layout of the shared file, and reading the memory of other processes
// uses cpu os:memory process base:window
//
// One file in memory, without a name, mapped by all ranks of the host. Ranks are numbered from 0 in
// the order of their world ranks.
//
//   | header | part of rank 0 | part of rank 1 | ... | window of rank 0 | window of rank 1 | ...
//
//   part     doorbell | a pipe from each rank | regions, for collectives ([share:region])
//   window   a hole, until idist_alloc fills pages of it ([base:window])
//
// Memory for the parts is reserved when the file is mapped, so that no access to it can fail later.
//------------------------------------------------------------------------------

#define IDIST__LINE ((size_t)64)                 // of a cache
#define IDIST__PAGE ((size_t)4096)               // the layout's unit
#define IDIST__REMOTE_PIECE ((size_t)128 * 1024) // of a cross-memory read that is reduced at once
#define IDIST__PREFETCH_BYTES ((size_t)1024)     // to prefetch for writing, at most

typedef struct idist__doorbell {
    uint32_t asleep; // an idist__sleep_place
    char pad[60];
    int64_t pid; // of the process whose memory this rank is in, ...
    uint64_t proof,
        proof_address;        // ... a random number in it, and where: who reads that can read all
    idist__counter withdrawn; // sends that ended early: what was read in their buffers is invalid
    char pad2[32];
} idist__doorbell;

typedef struct idist__segment_header {
    uint32_t sleeper_count; // ranks that sleep or are about to; spares the others a look at each
                            // doorbell
    char pad[60];
    uint32_t fenced;        // set once by the lowest rank, for all; see idist__doorbell_any_asleep
    uint32_t ncores;        // processors that all ranks together may use, ...
    idist__os_cpu_set cpus; // ... and which
} idist__segment_header;

// A ring buffer from one rank to another; the bytes follow. The counters never go back, and each is
// written by one side only.
typedef struct idist__pipe {
    idist__counter tail; // bytes written so far
    char pad[56];
    idist__counter head; // bytes read so far
    char pad2[56];
} idist__pipe;

typedef struct idist__pipe_port { // our end of a link through two pipes
    struct idist__segment *shm;
    idist__pipe *in, *out;
    uint64_t head, tail; // our own counters, kept where the peer cannot change them
    uint64_t out_head;   // how far the peer had read when we last had to look
    int peer;            // its rank on this host
    int fd;              // the socket between the two, whose end tells the end of the peer
    bool look;           // poll has found the socket readable
} idist__pipe_port;

typedef struct idist__segment {
    idist__window *window; // holds the mapping
    char *base;
    int n, me;                    // ranks on this host, and ours
    bool oversubscribed;          // there are more ranks than cores
    bool fenced;                  // see idist__doorbell_any_asleep
    bool reads_remote;            // each rank can read the memory of all others
    uint64_t proof;               // the others read it to find that out
    idist__os_process *processes; // by rank on this host
    char *remote_pieces; // cross-memory reads to be reduced: IDIST__REMOTE_PIECE for each rank
    int *local;          // rank on this host by world rank; -1: on another one

    size_t pipe_nbytes, part_nbytes, window_at, window_nbytes;
    size_t chunk_nbytes[2]; // of a buffer in region 0, and in the others
    size_t regions_at;      // offset of the regions in a part

    int region_count;            // regions of each rank
    bool taken[64];              // ours: whether a group has it, ...
    uint32_t region_members[64]; // ... how many members of it are on this host, ...
    uint64_t region_groups[64];  // ... and its ctx

    idist__pipe_port *ports; // by rank on this host
} idist__segment;

static char *idist__segment_part(const idist__segment *m, int rank) {
    return m->base + IDIST__PAGE + (size_t)rank * m->part_nbytes;
}

static idist__segment_header *idist__segment_header_of(const idist__segment *m) {
    return (idist__segment_header *)(void *)m->base;
}

static idist__doorbell *idist__segment_doorbell(const idist__segment *m, int rank) {
    return (idist__doorbell *)(void *)idist__segment_part(m, rank);
}

static idist__pipe *idist__segment_pipe(const idist__segment *m, int from, int to) {
    size_t pipe_nbytes = sizeof(idist__pipe) + m->pipe_nbytes;
    char *first = idist__segment_part(m, to) + sizeof(idist__doorbell);

    return (idist__pipe *)(void *)(first + (size_t)from * pipe_nbytes);
}

// Copies from the memory of another rank's process. 0, or an errno.
static int idist__segment_read_remote(const idist__segment *m, int rank, uint64_t address,
                                      void *buf, size_t nbytes) {
    return idist__os_process_read_memory(m->processes[rank], address, buf, nbytes);
}

//------------------------------------------------------------------------------
// [shm:doorbell]  sleeping until another rank writes something
// uses cpu wake segment
//
// A rank that writes something that another one may wait for looks afterwards whether that one
// sleeps, and wakes it. A rank that is about to sleep says so in its doorbell, and then looks once
// more for what was written. One of the two always sees the other, provided that neither's look can
// overtake its own write:
//
//   writer    write data     fence   load asleep: wake it
//   sleeper   store asleep   fence   load data: do not sleep
//
// The writer's fence would wait until the line that it wrote has come over from the other core,
// which takes as long as a small collective. So where the kernel can make the other processes fence
// (membarrier), the sleeper asks for that and the writers have no fence of their own. When cores
// are oversubscribed, sleep is common and each writer has its own (`fenced`).
//------------------------------------------------------------------------------

typedef enum idist__sleep_place {
    IDIST__AWAKE = 0,
    IDIST__ASLEEP_ON_WORD = 1, // in a futex, on the doorbell
    IDIST__ASLEEP_IN_POLL = 2  // a byte through the socket ends it
} idist__sleep_place;

// Wakes a rank if it sleeps or is about to. The caller has called idist__doorbell_any_asleep since
// it wrote.
static void idist__doorbell_wake(const idist__segment *m, int rank) {
    idist__doorbell *bell = idist__segment_doorbell(m, rank);
    uint32_t place = __atomic_load_n(&bell->asleep, __ATOMIC_RELAXED);

    if (place) place = __atomic_exchange_n(&bell->asleep, IDIST__AWAKE, __ATOMIC_ACQ_REL);
    if (place == IDIST__ASLEEP_ON_WORD) idist__os_wake_word(&bell->asleep);
    if (place == IDIST__ASLEEP_IN_POLL) idist__os_wake_peer(m->ports[rank].fd);
}

// Whether any rank sleeps, after something was written.
static bool idist__doorbell_any_asleep(const idist__segment *m) {
    if (m->fenced) __atomic_thread_fence(__ATOMIC_SEQ_CST);
    else __atomic_signal_fence(__ATOMIC_SEQ_CST);
    return __atomic_load_n(&idist__segment_header_of(m)->sleeper_count, __ATOMIC_RELAXED) != 0;
}

// Says that we are about to sleep. The caller looks for what was written, sleeps if there is
// nothing, and calls idist__doorbell_disarm.
static void idist__doorbell_arm(const idist__segment *m, uint32_t place) {
    __atomic_fetch_add(&idist__segment_header_of(m)->sleeper_count, 1u, __ATOMIC_RELAXED);
    __atomic_store_n(&idist__segment_doorbell(m, m->me)->asleep, place, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (!m->fenced) idist__os_cpu_fence_others(false);
}

// Whether another rank has woken us since idist__doorbell_arm.
static bool idist__doorbell_was_rung(const idist__segment *m) {
    return __atomic_load_n(&idist__segment_doorbell(m, m->me)->asleep, __ATOMIC_RELAXED) ==
           IDIST__AWAKE;
}

static void idist__doorbell_disarm(const idist__segment *m) {
    __atomic_store_n(&idist__segment_doorbell(m, m->me)->asleep, IDIST__AWAKE, __ATOMIC_RELAXED);
    __atomic_fetch_sub(&idist__segment_header_of(m)->sleeper_count, 1u, __ATOMIC_RELAXED);
}

//------------------------------------------------------------------------------
// [shm:pipe]  a transport through shared memory
// uses descriptor cpu os:thread os:memory poll socket transport segment
// uses doorbell
//
// Two ring buffers, one for each direction. The socket that the two ranks had before stays open: it
// carries the bytes that end a sleep in poll, and its end tells the end of the peer.
//------------------------------------------------------------------------------

static void idist__pipe_copy_out(const idist__pipe_port *p, char *buf, size_t nbytes) {
    const char *data = (const char *)(p->in + 1);
    size_t size = p->shm->pipe_nbytes, at = (size_t)p->head & (size - 1);
    size_t first = size - at < nbytes ? size - at : nbytes;

    memcpy(buf, data + at, first);
    memcpy(buf + first, data, nbytes - first);
}

static void idist__pipe_copy_in(const idist__pipe_port *p, uint64_t tail, const char *buf,
                                size_t nbytes) {
    char *data = (char *)(p->out + 1);
    size_t size = p->shm->pipe_nbytes, at = (size_t)tail & (size - 1);
    size_t first = size - at < nbytes ? size - at : nbytes;

    memcpy(data + at, buf, first);
    memcpy(data, buf + first, nbytes - first);
}

static uint64_t idist__pipe_unread(const idist__pipe_port *p) {
    return __atomic_load_n(&p->in->tail, __ATOMIC_ACQUIRE) - p->head;
}

// Discards the wake-up bytes in the socket. -1 at its end, which is that of the link after what is
// left in the pipe.
static ptrdiff_t idist__pipe_check_peer(idist__pipe_port *p) {
    char bytes[64];
    ptrdiff_t n;

    p->look = false;
    do n = idist__os_socket_read(p->fd, bytes, sizeof bytes);
    while (n > 0);
    if (n < 0) p->look = true;

    return n;
}

static ptrdiff_t idist__pipe_read(void *port, void *buf, size_t nbytes) {
    idist__pipe_port *p = (idist__pipe_port *)port;
    uint64_t unread = idist__pipe_unread(p);

    if (!unread && p->look && idist__pipe_check_peer(p) < 0) {
        int err = errno;
        unread = idist__pipe_unread(p); // the last that it wrote
        errno = err;
        if (!unread) return -1;
    }

    if (!unread) return 0;

    if (unread > p->shm->pipe_nbytes) {
        errno = EPROTO;
        return -1;
    }

    idist__os_thread_handover();
    if (nbytes > unread) nbytes = (size_t)unread;
    idist__pipe_copy_out(p, (char *)buf, nbytes);
    p->head += nbytes;
    __atomic_store_n(&p->in->head, p->head, __ATOMIC_RELEASE);

    // The peer waits for space only when the pipe is full.
    if (unread > p->shm->pipe_nbytes / 2 && idist__doorbell_any_asleep(p->shm))
        idist__doorbell_wake(p->shm, p->peer);

    return (ptrdiff_t)nbytes;
}

static ptrdiff_t idist__pipe_write(void *port, const idist__os_part *parts, int nparts) {
    idist__pipe_port *p = (idist__pipe_port *)port;
    size_t space = p->shm->pipe_nbytes, moved = 0, wanted = 0;
    uint64_t unread;
    int i;

    for (i = 0; i < nparts; i++) wanted += parts[i].nbytes;
    if (wanted > space - (size_t)(p->tail - p->out_head))
        p->out_head = __atomic_load_n(&p->out->head, __ATOMIC_ACQUIRE);

    unread = p->tail - p->out_head;
    if (unread > space) {
        errno = EPROTO;
        return -1;
    }

    space -= (size_t)unread;

    for (i = 0; i < nparts && space; i++) {
        size_t k = parts[i].nbytes < space ? parts[i].nbytes : space;
        idist__pipe_copy_in(p, p->tail + moved, (const char *)parts[i].data, k);
        moved += k;
        space -= k;
    }

    if (!moved) return 0;
    p->tail += moved;
    idist__os_thread_handover();
    __atomic_store_n(&p->out->tail, p->tail, __ATOMIC_RELEASE);
    if (idist__doorbell_any_asleep(p->shm)) idist__doorbell_wake(p->shm, p->peer);

    return (ptrdiff_t)moved;
}

static bool idist__pipe_peek(void *port, void *buf, size_t nbytes) {
    const idist__pipe_port *p = (const idist__pipe_port *)port;
    size_t size = p->shm->pipe_nbytes;
    uint64_t unread = idist__pipe_unread(p), at;

    if (unread < nbytes || unread > size) return false;
    idist__os_thread_handover();

    // What follows will be wanted next.
    for (at = nbytes; at < unread && at < 4 * IDIST__LINE; at += IDIST__LINE)
        __builtin_prefetch((const char *)(p->in + 1) + ((p->head + at) & (size - 1)));
    idist__pipe_copy_out(p, (char *)buf, nbytes);

    return true;
}

static bool idist__pipe_read_all(void *port, void *header, size_t header_nbytes, void *payload,
                                 size_t nbytes) {
    if (idist__pipe_unread((const idist__pipe_port *)port) < header_nbytes + nbytes) return false;
    idist__pipe_read(port, header, header_nbytes);
    if (nbytes) idist__pipe_read(port, payload, nbytes);
    return true;
}

// Whether a write of so many bytes would go through as a whole.
static bool idist__pipe_has_space(idist__pipe_port *p, size_t nbytes) {
    size_t size = p->shm->pipe_nbytes;

    if (nbytes > size - (size_t)(p->tail - p->out_head))
        p->out_head = __atomic_load_n(&p->out->head, __ATOMIC_ACQUIRE);
    return p->tail - p->out_head <= size && nbytes <= size - (size_t)(p->tail - p->out_head);
}

// Prefetches the lines that the next write is likely to fill: the peer has them in its cache since
// it read them a lap ago.
static void idist__pipe_prefetch_space(const idist__pipe_port *p, size_t nbytes) {
    const char *data = (const char *)(p->out + 1);
    size_t at;

    for (at = 0; at < nbytes && at < IDIST__PREFETCH_BYTES; at += IDIST__LINE)
        idist__os_cpu_prefetch_for_write(data + ((p->tail + at) & (p->shm->pipe_nbytes - 1)));
}

static bool idist__pipe_write_all(void *port, const idist__os_part *parts, int nparts) {
    size_t nbytes = 0;
    int i;

    for (i = 0; i < nparts; i++) nbytes += parts[i].nbytes;
    if (!idist__pipe_has_space((idist__pipe_port *)port, nbytes)) return false;
    idist__pipe_write(port, parts, nparts);
    idist__pipe_prefetch_space((const idist__pipe_port *)port, nbytes);

    return true;
}

static bool idist__pipe_exposes_memory(void *port, uint8_t *withdrawn) {
    const idist__segment *m = ((const idist__pipe_port *)port)->shm;

    if (m->reads_remote && withdrawn)
        *withdrawn = (uint8_t)idist__segment_doorbell(m, m->me)->withdrawn;
    return m->reads_remote;
}

static bool idist__pipe_pull(void *port, uint64_t address, uint8_t withdrawn, void *buf,
                             size_t nbytes) {
    const idist__pipe_port *p = (const idist__pipe_port *)port;
    const idist__counter *now = &idist__segment_doorbell(p->shm, p->peer)->withdrawn;

    if (!p->shm->reads_remote ||
        idist__segment_read_remote(p->shm, p->peer, address, buf, nbytes) != 0)
        return false;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return (uint8_t)__atomic_load_n(now, __ATOMIC_ACQUIRE) == withdrawn;
}

// Whether the peer's process has ended, also while wake-up bytes that nobody has read precede the
// end of the socket.
static bool idist__pipe_peer_gone(const idist__pipe_port *p) {
    return p->fd < 0 || idist__os_poll_hung_up(p->fd);
}

// Bytes move through memory; the socket only gets readable by wake-up bytes and at its end.
static int idist__pipe_poll_events(void *port, bool has_output, int *fd) {
    (void)has_output;
    *fd = ((idist__pipe_port *)port)->fd;
    return *fd < 0 ? 0 : IDIST__OS_READABLE;
}

static void idist__pipe_note_readable(void *port) { ((idist__pipe_port *)port)->look = true; }

static void idist__pipe_close(void *port) {
    idist__os_descriptor_close(&((idist__pipe_port *)port)->fd);
}

static const idist__transport idist__pipe_transport = {"shm",
                                                       idist__pipe_read,
                                                       idist__pipe_write,
                                                       idist__pipe_close,
                                                       idist__pipe_poll_events,
                                                       false,
                                                       false,
                                                       idist__pipe_note_readable,
                                                       idist__pipe_peek,
                                                       idist__pipe_read_all,
                                                       idist__pipe_write_all,
                                                       idist__pipe_exposes_memory,
                                                       idist__pipe_pull};

#endif // IDIST_SHM_H
