/* idist_shm.h - v0.2.0 - memory that ranks of a host share - MIT licence

    Part of the implementation of idist; idist.h includes it where IDIST_IMPLEMENTATION is defined.

WHAT IT IS

    A file in memory that all ranks of a host have mapped, and two things made of it: a doorbell for
    each rank, on which it sleeps until another one wakes it, and a pipe for each pair of ranks, the
    transport of their link. The rest of the file is for collectives (idist_share.h) and for
    idist_alloc. The ranks need no connection to each other, and a rank has as many descriptors on a
    host of 1,000 ranks as on one of two.

HOW IT FITS

    [join:share] creates and maps the file; from then on the links inside the host use
    idist__pipe_transport. [engine:wait] sleeps on the doorbell.

A MESSAGE THROUGH A PIPE

    idist__pipe_write            copy to the ring buffer, publish the new tail
    idist__doorbell_any_asleep   one load in the common case: nobody sleeps
    idist__doorbell_wake         futex, or the beacon of the rank
    idist__pipe_read             load the tail, copy out, publish the new head

CONTENTS

      [shm:transport]  what a link needs of whatever moves its bytes
      [shm:pace]       whether to write past the caches
      [shm:segment]    layout of the shared file, and reading the memory of other processes
      [shm:window]     reaching what other ranks got from idist_alloc
      [shm:doorbell]   sleeping until another rank writes something
      [shm:ended]      noticing that a process has ended
      [shm:pipe]       a transport through shared memory
*/
#ifndef IDIST_SHM_H
#define IDIST_SHM_H

//------------------------------------------------------------------------------
// [shm:transport]  what a link needs of whatever moves its bytes
// uses socket
//------------------------------------------------------------------------------

enum { IDIST__HEADER_BYTES = 64 }; // of a frame

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

    // The descriptor that a rank watches to learn that the next `read` may find something, or
    // (output) that the next `write` may take some; -1: there is none. It may be another one after
    // each read or write.
    int (*descriptor)(void *port, bool output);

    bool polled;      // a read costs a system call, so with many links ring->watch tells when to
    bool lossy_close; // closing with unread bytes may destroy what the peer has not read yet

    // Messages as a whole: a header of IDIST__HEADER_BYTES, and nbytes of payload. peek_header
    // copies the next header and consumes nothing; false: it has not arrived. read_message drops
    // that header and copies the payload behind it; false: not all has arrived, and nothing was
    // consumed. write_message: false: there is no space for all, and nothing was written.
    bool (*peek_header)(void *port, void *header);
    bool (*read_message)(void *port, void *payload, size_t nbytes);
    bool (*write_message)(void *port, const void *header, const void *payload, size_t nbytes);

    // Whether the peer may read messages in the memory of this process. The same on both sides of a
    // link, which decides how large messages go. Then `withdrawn`, if not NULL, gets the count of
    // sends that ended early so far, modulo 256, for `pull` there.
    bool (*exposes_memory)(void *port, uint8_t *withdrawn);

    // Whether such a read is slower than a copy through this transport. The same on both sides.
    bool (*reads_slowly)(void *port);

    // Whether the peer is in a call that waits, so that it sees at once what is written.
    bool (*attends)(void *port);

    // Copies from an address in the peer's process. False: not possible, or the peer has withdrawn
    // sends since it counted `withdrawn`, so the memory may hold something else by now.
    bool (*pull)(void *port, uint64_t address, uint8_t withdrawn, void *buf, size_t nbytes);
} idist__transport;

//------------------------------------------------------------------------------
// [shm:pace]  whether to write past the caches
// uses clock cpu
//
// Before a core writes to a line, all others have to give it up. Cores that share a cache are quick
// about that. Others, on a processor with several of them or on two, take so long that a store to
// memory past the caches, which does not wait for them, is several times as fast, although the
// reader then finds the line in no cache.
//
// Which it is depends on where the two ranks run, and changes when the system moves one of them. So
// some writes are timed, and a few of those are made in the other way. The shortest of the latest
// times count, because a rank may be interrupted. All this under the lock of the world.
//------------------------------------------------------------------------------

enum {
    IDIST__STREAM_BYTES = 4096, // smaller writes are neither timed nor made past the caches
    IDIST__PACE_TIMES = 4,      // kept for each way
    IDIST__PACE_TIMED = 17,     // one write in so many is timed; odd, since calls often write by 16
    IDIST__PACE_OTHER = 119     // one in so many is made in the other way; a multiple of TIMED
};

// There are two ways to write: false is into the caches, true past them.
typedef struct idist__pace {
    bool streams;                         // the way that is faster
    bool way;                             // of the timed write under way
    uint32_t count;                       // writes so far
    uint32_t turn[2];                     // times so far, of each way
    uint32_t times[2][IDIST__PACE_TIMES]; // the latest, ns per MiB; 0: none yet
} idist__pace;

// The shortest of the latest times, or 0 as long as there are too few.
static uint32_t idist__pace_shortest(const idist__pace *p, bool way) {
    uint32_t shortest = p->times[way][0];
    int i;

    for (i = 1; i < IDIST__PACE_TIMES; i++)
        if (p->times[way][i] < shortest) shortest = p->times[way][i];
    return shortest;
}

// A write took so long. The way past the caches is chosen if it takes less than half the time: the
// reader has to get the line from memory afterwards.
static void idist__pace_add(idist__pace *p, bool way, int64_t ns, size_t nbytes) {
    int64_t most = INT64_MAX >> 20;
    int64_t time = ((ns < most ? ns : most) << 20) / (int64_t)nbytes;

    time = time < 1 ? 1 : time > UINT32_MAX ? UINT32_MAX : time;
    p->times[way][p->turn[way]++ % IDIST__PACE_TIMES] = (uint32_t)time;
    p->streams = idist__pace_shortest(p, true) &&
                 idist__pace_shortest(p, false) / 2 > idist__pace_shortest(p, true);
}

// Before a write: whether to make it past the caches. *begin_ns is for idist__pace_end; 0: the
// write is not timed.
static inline bool idist__pace_begin(idist__pace *p, size_t nbytes, int64_t *begin_ns) {
    uint32_t number;
    bool first;

    *begin_ns = 0;
    if (nbytes < IDIST__STREAM_BYTES) return false;

    number = p->count++;
    first = number < 2 * IDIST__PACE_TIMES;
    p->way = first ? number % 2 == 1 : p->streams != (number % IDIST__PACE_OTHER == 0);
    if (first || number % IDIST__PACE_TIMED == 0) *begin_ns = idist__os_clock_now_ns();

    return p->way;
}

static inline void idist__pace_end(idist__pace *p, int64_t begin_ns, size_t nbytes) {
    if (begin_ns) idist__pace_add(p, p->way, idist__os_clock_now_ns() - begin_ns, nbytes);
}

// Copies in the way that is faster.
static inline void idist__pace_copy(idist__pace *p, char *to, const char *from, size_t nbytes) {
    int64_t begin_ns;

    if (idist__pace_begin(p, nbytes, &begin_ns)) idist__os_cpu_stream(to, from, nbytes);
    else memcpy(to, from, nbytes);
    idist__pace_end(p, begin_ns, nbytes);
}

//------------------------------------------------------------------------------
// [shm:segment]  layout of the shared file, and reading the memory of other processes
// uses cpu os:memory socket process base:window pace
//
// One file in memory, without a name, mapped by all ranks of the host. Ranks are numbered from 0 in
// the order of their world ranks.
//
//   | header | front 0 | front 1 | ... | part 0 | part 1 | ... | window 0 | window 1 | ...
//
//   front    doorbell | head of region 0, for the collectives of the world ([share:region])
//   part     catalog | a pipe from each rank | buffers of region 0 | head and buffers of region 1
//   ... window   a hole, until idist_alloc fills pages of it ([base:window]); not mapped before
//   that
//
// Each rank has one of each. What all ranks of the world look at often is in the fronts, to need
// fewer page tables, which every process has for itself: with parts of 4 MiB and one look at each,
// 512 processes would have 1 GiB of them.
//
// Memory is reserved before anybody uses it, so that no access to it can fail: for doorbells, pipes
// and the world's region when the file is mapped, for another region when it is first lent to a
// group ([share:pool]).
//------------------------------------------------------------------------------

#define IDIST__LINE ((size_t)64)   // of a cache
#define IDIST__PAGE ((size_t)4096) // the layout's unit
// Programs align buffers to pages. Ours are not: copies between addresses that agree in their low
// 12 bits are several times as slow, because the processor takes loads and stores for dependent.
#define IDIST__BUFFERS_SKEW ((size_t)1152)
#define IDIST__REMOTE_PIECE ((size_t)128 * 1024) // of a cross-memory read that is reduced at once
#define IDIST__SAMPLE_BYTES ((size_t)64 * 1024)  // read to find out how fast that is, ...
#define IDIST__SAMPLE_PIECE ((size_t)16 * 1024)  // ... in such pieces
// A write or read of a pipe lets the other side go on after so many bytes: while one copies in, the
// other copies out.
#define IDIST__SLICE_BYTES ((size_t)32 * 1024)
// Two ranks that send to each other both write until the pipes are full, then both read. The larger
// the pipe, the less often they wait for each other in between.
#define IDIST__PIPE_MAX ((size_t)512 * 1024)
#define IDIST__PREFETCH_BYTES ((size_t)1024) // to prefetch for writing, at most

typedef struct idist__doorbell {
    uint32_t asleep;  // an idist__sleep_place
    uint32_t awaited; // 1 + the rank of this host of which the sleeper awaits a step; 0: of any
    uint32_t attends; // 1 while it is in a call that waits
    char pad[52];
    int64_t pid; // of the process whose memory this rank is in, ...
    uint64_t proof,
        proof_address;        // ... a random number in it, and where: who reads that can read all
    idist__counter withdrawn; // sends that ended early: what was read in their buffers is invalid
    uint64_t sample_address;  // and of a block in it, for idist__join_share_reads_fast
    uint32_t ended;           // an idist__ended_how
    char pad2[20];
} idist__doorbell;

typedef struct idist__segment_header {
    uint32_t sleeper_count; // ranks that sleep or are about to; spares the others a look at each
                            // doorbell
    char pad[60];
    uint32_t fenced;        // set once by the lowest rank, for all; see idist__doorbell_any_asleep
    uint32_t ncores;        // processors that all ranks together may use, ...
    idist__os_cpu_set cpus; // ... and which
    uint32_t ended_count;   // goes up with each doorbell that says `ended`, and each closed pipe
    uint32_t extent_count;  // of all windows together
} idist__segment_header;

// The window of a rank as the others see it; written by that rank only. Behind the catalog each
// rank has an array with an entry for each rank k: the number of extents of k that it has mapped.
typedef struct idist__catalog {
    uint32_t extent_count; // written last
    uint32_t pad;
    struct {
        uint64_t at, nbytes; // within the window
    } extents[IDIST__EXTENTS];
} idist__catalog;

// A ring buffer from one rank to another; the bytes follow. The counters never go back, and each is
// written by one side only.
typedef struct idist__pipe {
    idist__counter tail; // bytes written so far
    uint32_t closed;     // nothing more will be written
    char pad[52];
    idist__counter head; // bytes read so far
    char pad2[56];
} idist__pipe;

typedef struct idist__pipe_port { // our end of a link through two pipes
    struct idist__segment *shm;
    idist__pipe *in, *out;
    uint64_t head, tail;      // our own counters, kept where the peer cannot change them
    uint64_t out_head;        // how far the peer had read when we last had to look
    idist__pace pace;         // of our writes
    int peer;                 // its rank on this host
    bool look;                // some process or pipe has ended; it may be this one
    idist__os_address beacon; // of the peer
} idist__pipe_port;

typedef struct idist__view { // of the window of a rank: what is mapped here
    uint32_t extent_count;
    struct {
        char *map;
        size_t at, nbytes; // within the window
    } extents[IDIST__EXTENTS];
} idist__view;

typedef struct idist__segment {
    int fd;                       // of the file
    char *base;                   // everything but the windows
    idist__window *window;        // ours; NULL: there are no windows
    idist__view *views;           // of the windows, by rank on this host
    uint32_t extents_seen;        // how much of header->extent_count the views show
    bool maps_no_more;            // an extent of another rank could not be mapped
    int n, me;                    // ranks on this host, and ours
    bool oversubscribed;          // there are more ranks than cores
    bool fenced;                  // see idist__doorbell_any_asleep
    bool reads_remote;            // each rank can read the memory of all others, ...
    bool reads_fast;              // ... and it takes no longer than two copies
    idist__pace pace;             // of our writes to the buffers of collectives, ...
    idist__pace window_pace;      // ... and to the windows of other ranks
    uint64_t proof;               // the others read it to find that out
    idist__os_process *processes; // by rank on this host
    char *remote_pieces; // cross-memory reads to be reduced: IDIST__REMOTE_PIECE for each rank
    int *local;          // rank on this host by world rank; -1: on another one

    size_t pipe_nbytes;              // of the bytes in one
    size_t front_nbytes;             // the fronts come behind the first page
    size_t parts_at, part_nbytes;    // offset of the first part; of each part
    size_t window_at, window_nbytes; // the same for the windows, which are not mapped
    size_t pipes_at;                 // offset in a part: the pipes
    size_t buffers_at;               // offset in a part: the buffers of region 0, then the others
    size_t chunk_nbytes[2];          // of a buffer in region 0, and in the others

    int region_count;            // regions of each rank
    int reserved_count;          // how many of ours have memory: the first ones
    bool taken[64];              // ours: whether a group has it, ...
    uint32_t region_members[64]; // ... how many members of it are on this host, ...
    uint64_t region_groups[64];  // ... and its ctx

    idist__pipe_port *ports; // by rank on this host

    int beacon, observer; // ours, and the descriptor with which we look at those of the others
    int next_look;        // the rank whose beacon we look at next
    uint32_t ended_seen;  // how much of ended_count has reached our ports
    int blind_error;      // the errno with which a look at a beacon failed; 0: none did
} idist__segment;

static char *idist__segment_front(const idist__segment *m, int rank) {
    return m->base + IDIST__PAGE + (size_t)rank * m->front_nbytes;
}

static char *idist__segment_part(const idist__segment *m, int rank) {
    return m->base + m->parts_at + (size_t)rank * m->part_nbytes;
}

static idist__segment_header *idist__segment_header_of(const idist__segment *m) {
    return (idist__segment_header *)(void *)m->base;
}

static idist__doorbell *idist__segment_doorbell(const idist__segment *m, int rank) {
    return (idist__doorbell *)(void *)idist__segment_front(m, rank);
}

static idist__pipe *idist__segment_pipe(const idist__segment *m, int from, int to) {
    size_t pipe_nbytes = sizeof(idist__pipe) + m->pipe_nbytes;
    char *part = idist__segment_part(m, to);

    return (idist__pipe *)(void *)(part + m->pipes_at + (size_t)from * pipe_nbytes);
}

static idist__catalog *idist__segment_catalog(const idist__segment *m, int rank) {
    return (idist__catalog *)(void *)idist__segment_part(m, rank);
}

// How many extents of other ranks a rank has mapped: one number for each rank.
static uint32_t *idist__segment_mapped(const idist__segment *m, int rank) {
    return (uint32_t *)(void *)(idist__segment_catalog(m, rank) + 1);
}

// Copies from the memory of another rank's process. 0, or an errno.
static int idist__segment_read_remote(const idist__segment *m, int rank, uint64_t address,
                                      void *buf, size_t nbytes) {
    return idist__os_process_read_memory(m->processes[rank], address, buf, nbytes);
}

//------------------------------------------------------------------------------
// [shm:window]  reaching what other ranks got from idist_alloc
// uses mutex os:memory base:window segment
//
// A rank that gets memory in a new extent of its window writes that into its catalog. The others
// map the extent when they next look, and count it. From then on, and not before, the owner offers
// the others its buffers in the extent. So a rank that can map no more, because of a limit, costs a
// copy and fails nothing:
//
//   owner     maps extent 3, catalog.extent_count = 4   ...   reads mapped[owner] == 4 everywhere
//   others    see header.extent_count, map extent 3, mapped[owner] = 4
//
// Whether a buffer is offered depends on timing, and the result does not: ranks reduce in the same
// order either way.
//------------------------------------------------------------------------------

// Tells the others of the extents that our window has by now. Any thread.
static void idist__view_publish(idist__segment *m) {
    idist__catalog *catalog = idist__segment_catalog(m, m->me);
    uint32_t i, count;

    idist__os_mutex_lock(&idist__windows_lock);
    count = m->window->extent_count;

    for (i = catalog->extent_count; i < count; i++) {
        catalog->extents[i].at = m->window->extents[i].at;
        catalog->extents[i].nbytes = m->window->extents[i].nbytes;
        __atomic_store_n(&catalog->extent_count, i + 1, __ATOMIC_RELEASE);
        __atomic_fetch_add(&idist__segment_header_of(m)->extent_count, 1, __ATOMIC_RELEASE);
    }

    idist__os_mutex_unlock(&idist__windows_lock);
}

// Maps one more extent of another rank. False: there are no addresses, or the rank has written
// something impossible.
static bool idist__view_map_next(const idist__segment *m, int rank, idist__view *view) {
    const idist__catalog *catalog = idist__segment_catalog(m, rank);
    uint32_t i = view->extent_count;
    size_t at = (size_t)catalog->extents[i].at, nbytes = (size_t)catalog->extents[i].nbytes;
    size_t expected = i ? view->extents[i - 1].at + view->extents[i - 1].nbytes : 0;
    size_t begin = m->window_at + (size_t)rank * m->window_nbytes;
    char *map;

    if (at != expected || !nbytes || nbytes > m->window_nbytes - at) return false;
    map = (char *)idist__os_memory_map(m->fd, begin + at, nbytes);
    if (!map) return false;

    view->extents[i].map = map;
    view->extents[i].at = at;
    view->extents[i].nbytes = nbytes;
    view->extent_count++;

    return true;
}

// Returns true if an extent has come that the views do not show.
static inline bool idist__view_is_news(const idist__segment *m) {
    uint32_t *count = &idist__segment_header_of(m)->extent_count;
    return __atomic_load_n(count, __ATOMIC_RELAXED) != m->extents_seen;
}

// Adds the extents of our own window to its view.
static void idist__view_map_own(const idist__segment *m) {
    uint32_t count = __atomic_load_n(&m->window->extent_count, __ATOMIC_ACQUIRE);
    idist__view *view = &m->views[m->me];

    for (; view->extent_count < count; view->extent_count++) {
        const idist__window_extent *extent = &m->window->extents[view->extent_count];

        view->extents[view->extent_count].map = extent->map;
        view->extents[view->extent_count].at = extent->at;
        view->extents[view->extent_count].nbytes = extent->nbytes;
    }
}

// Maps the extents that have come since the last look. False: one could not be mapped. Under the
// lock of the world.
static bool idist__view_look(idist__segment *m) {
    uint32_t seen = __atomic_load_n(&idist__segment_header_of(m)->extent_count, __ATOMIC_ACQUIRE);
    uint32_t *mapped = idist__segment_mapped(m, m->me);
    int i;

    m->extents_seen = seen;
    idist__view_map_own(m);
    if (m->maps_no_more) return true;

    for (i = 0; i < m->n; i++) {
        const idist__catalog *catalog = idist__segment_catalog(m, i);
        uint32_t count = __atomic_load_n(&catalog->extent_count, __ATOMIC_ACQUIRE);
        idist__view *view = &m->views[i];

        if (i == m->me) continue;
        while (view->extent_count < count && view->extent_count < IDIST__EXTENTS &&
               !m->maps_no_more)
            m->maps_no_more = !idist__view_map_next(m, i, view);
        __atomic_store_n(&mapped[i], view->extent_count, __ATOMIC_RELEASE);
    }

    return !m->maps_no_more;
}

// Returns how many extents of our window a rank of this host has mapped.
static uint32_t idist__view_mapped_by(const idist__segment *m, int rank) {
    return __atomic_load_n(&idist__segment_mapped(m, rank)[m->me], __ATOMIC_ACQUIRE);
}

// Finds a buffer of ours in our window: its offset in the file, and the number of its extent. 0: it
// lies in none. Under the lock of the world.
static uint64_t idist__view_offset(const idist__segment *m, const void *p, size_t nbytes,
                                   uint32_t *extent) {
    const idist__view *view = &m->views[m->me];
    uint32_t i;

    for (i = 0; i < view->extent_count; i++) {
        const char *map = view->extents[i].map;
        size_t at = (size_t)((const char *)p - map);

        if ((const char *)p < map || at >= view->extents[i].nbytes) continue;
        if (nbytes > view->extents[i].nbytes - at) return 0;
        *extent = i;
        return m->window->at + view->extents[i].at + at;
    }

    return 0;
}

// Returns the address here of an offset that another rank gave; NULL: it lies in no extent that is
// mapped here.
static char *idist__view_pointer(const idist__segment *m, uint64_t offset, size_t nbytes) {
    const idist__view *view;
    uint64_t rank, at;
    uint32_t i;

    if (offset < m->window_at || !m->window) return NULL;
    rank = (offset - m->window_at) / m->window_nbytes;
    at = (offset - m->window_at) % m->window_nbytes;
    if (rank >= (uint64_t)m->n) return NULL;

    view = &m->views[rank];
    for (i = 0; i < view->extent_count; i++) {
        uint64_t begin = view->extents[i].at, size = view->extents[i].nbytes;
        if (at >= begin && at - begin < size)
            return nbytes > size - (at - begin) ? NULL : view->extents[i].map + (at - begin);
    }

    return NULL;
}

// Unmaps the windows of the other ranks, and closes ours.
static void idist__view_unmap_all(idist__segment *m) {
    uint32_t k;
    int i;

    for (i = 0; i < m->n && m->views; i++)
        for (k = 0; k < m->views[i].extent_count && i != m->me; k++)
            idist__os_memory_unmap(m->views[i].extents[k].map, m->views[i].extents[k].nbytes);
    if (m->window) idist__window_close(m->window);
}

//------------------------------------------------------------------------------
// [shm:doorbell]  sleeping until another rank writes something
// uses cpu wake beacon segment
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
//
// In a collective a rank usually waits for the next step of one certain member, and says that too:
// if each of n members woke all who wait, a barrier would take n * n wake-ups.
//------------------------------------------------------------------------------

typedef enum idist__sleep_place {
    IDIST__AWAKE = 0,
    IDIST__ASLEEP_ON_WORD = 1, // in a futex, on the doorbell
    IDIST__ASLEEP_IN_POLL = 2  // its beacon ends it
} idist__sleep_place;

// Wakes a rank if it sleeps or is about to. The caller has called idist__doorbell_any_asleep since
// it wrote.
static void idist__doorbell_wake(const idist__segment *m, int rank) {
    idist__doorbell *bell = idist__segment_doorbell(m, rank);
    uint32_t place = __atomic_load_n(&bell->asleep, __ATOMIC_RELAXED);

    if (place) place = __atomic_exchange_n(&bell->asleep, IDIST__AWAKE, __ATOMIC_ACQ_REL);
    if (place == IDIST__ASLEEP_ON_WORD) idist__os_wake_word(&bell->asleep);
    if (place == IDIST__ASLEEP_IN_POLL) idist__os_beacon_wake(m->observer, &m->ports[rank].beacon);
}

// The same after a step in a collective, which concerns a rank only if it waits for our steps.
static void idist__doorbell_wake_for_step(const idist__segment *m, int rank) {
    const idist__doorbell *bell = idist__segment_doorbell(m, rank);
    uint32_t awaited = __atomic_load_n(&bell->awaited, __ATOMIC_RELAXED);

    if (!awaited || awaited == 1 + (uint32_t)m->me) idist__doorbell_wake(m, rank);
}

// Whether any rank sleeps, after something was written.
static bool idist__doorbell_any_asleep(const idist__segment *m) {
    if (m->fenced) __atomic_thread_fence(__ATOMIC_SEQ_CST);
    else __atomic_signal_fence(__ATOMIC_SEQ_CST);
    return __atomic_load_n(&idist__segment_header_of(m)->sleeper_count, __ATOMIC_RELAXED) != 0;
}

// Says that we are about to sleep, and of which rank of this host we await a step (-1: of any). The
// caller looks for what was written, sleeps if there is nothing, and calls idist__doorbell_disarm.
static void idist__doorbell_arm(const idist__segment *m, uint32_t place, int awaited) {
    idist__doorbell *bell = idist__segment_doorbell(m, m->me);

    __atomic_fetch_add(&idist__segment_header_of(m)->sleeper_count, 1u, __ATOMIC_RELAXED);
    __atomic_store_n(&bell->awaited, (uint32_t)(awaited + 1), __ATOMIC_RELAXED);
    __atomic_store_n(&bell->asleep, place, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (!m->fenced) idist__os_cpu_fence_others(false);
}

// Another thread of this process is about to begin a call: the one that sleeps must be woken by any
// rank's step from now on.
static void idist__doorbell_widen(const idist__segment *m) {
    idist__doorbell *bell = idist__segment_doorbell(m, m->me);

    if (!__atomic_load_n(&bell->asleep, __ATOMIC_RELAXED)) return;
    __atomic_store_n(&bell->awaited, 0u, __ATOMIC_RELAXED);
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

// This rank begins or ends to wait in calls.
static void idist__doorbell_attend(const idist__segment *m, bool waits) {
    __atomic_store_n(&idist__segment_doorbell(m, m->me)->attends, waits ? 1u : 0u,
                     __ATOMIC_RELAXED);
}

// Whether a rank waits in a call, and does not sleep.
static bool idist__doorbell_attends(const idist__segment *m, int rank) {
    const idist__doorbell *bell = idist__segment_doorbell(m, rank);

    return __atomic_load_n(&bell->attends, __ATOMIC_RELAXED) &&
           !__atomic_load_n(&bell->asleep, __ATOMIC_RELAXED);
}

//------------------------------------------------------------------------------
// [shm:ended]  noticing that a process has ended
// uses beacon segment doorbell
//
// Memory does not tell when the process that writes to it ends; its beacon does. Each rank that
// sleeps looks now and then at the beacons of some others, at all of them in turn. Whoever finds
// that one has gone out writes that down for all, and wakes them:
//
//   doorbell.ended   the process of this rank has died, or has left the world
//   pipe.closed      the rank writes nothing more to this pipe
//   ended_count      incremented whenever one of the two is set
//
// A rank that sees the count go up looks at all of its pipes.
//------------------------------------------------------------------------------

typedef enum idist__ended_how {
    IDIST__ENDED_NOT = 0,
    IDIST__ENDED_LEFT = 1, // it says so itself
    IDIST__ENDED_DIED = 2  // somebody has found that its beacon had gone out
} idist__ended_how;

// Up to this many sleepers share the work; if there are more, each sleeps longer.
enum { IDIST__ENDED_SHARERS = 32, IDIST__ENDED_LOOKS_LEAST = 8 };

// Makes all others look at their pipes.
static void idist__liveness_wake_all(const idist__segment *m) {
    int i;

    __atomic_fetch_add(&idist__segment_header_of(m)->ended_count, 1u, __ATOMIC_RELEASE);
    if (!idist__doorbell_any_asleep(m)) return;
    for (i = 0; i < m->n; i++)
        if (i != m->me) idist__doorbell_wake(m, i);
}

// The process of a rank has ended in this way. The first report wins.
static void idist__liveness_tell(const idist__segment *m, int rank, idist__ended_how how) {
    uint32_t *ended = &idist__segment_doorbell(m, rank)->ended, not_yet = IDIST__ENDED_NOT;

    if (__atomic_compare_exchange_n(ended, &not_yet, (uint32_t)how, false, __ATOMIC_ACQ_REL,
                                    __ATOMIC_ACQUIRE))
        idist__liveness_wake_all(m);
}

static idist__ended_how idist__liveness_get(const idist__segment *m, int rank) {
    return (idist__ended_how)__atomic_load_n(&idist__segment_doorbell(m, rank)->ended,
                                             __ATOMIC_ACQUIRE);
}

// Looks at the beacon of a rank, and tells all if it has gone out. Returns whether the process has
// ended.
static bool idist__liveness_look_at(idist__segment *m, int rank) {
    int error;

    if (rank == m->me) return false;
    if (idist__liveness_get(m, rank) != IDIST__ENDED_NOT) return true;
    error = idist__os_beacon_look(m->observer, &m->ports[rank].beacon);
    if (error && error != ECONNREFUSED) m->blind_error = error;
    if (error != ECONNREFUSED) return false;

    idist__liveness_tell(m, rank, IDIST__ENDED_DIED);

    return true;
}

// Ranks of this host that sleep, ourselves included.
static int idist__liveness_sleepers(const idist__segment *m) {
    uint32_t count = __atomic_load_n(&idist__segment_header_of(m)->sleeper_count, __ATOMIC_RELAXED);
    if (count > (uint32_t)m->n) count = (uint32_t)m->n;
    return count ? (int)count : 1;
}

// How many times longer than alone a rank sleeps between two looks.
static int idist__liveness_patience(const idist__segment *m) {
    int sleepers = idist__liveness_sleepers(m);
    return sleepers > IDIST__ENDED_SHARERS ? sleepers / IDIST__ENDED_SHARERS : 1;
}

// At how many beacons a rank that sleeps looks at a time. Alone it looks at all; with others that
// sleep, all of them together do, in about the same time.
static int idist__liveness_share(const idist__segment *m) {
    int sleepers = idist__liveness_sleepers(m), share;

    if (sleepers > IDIST__ENDED_SHARERS) sleepers = IDIST__ENDED_SHARERS;
    share = m->n / sleepers;

    return share > IDIST__ENDED_LOOKS_LEAST ? share : IDIST__ENDED_LOOKS_LEAST;
}

// Looks at the next beacons, about 1 us each. The rank that noticed an end may itself have been
// killed before it told the others, so we read the pipe of a rank that has ended in any case.
static void idist__liveness_look(idist__segment *m, int looks) {
    int i;

    for (i = 0; i < looks && i < m->n; i++) {
        if (idist__liveness_look_at(m, m->next_look)) m->ports[m->next_look].look = true;
        m->next_look = (m->next_look + 1) % m->n;
    }
}

// Whether any process or pipe has ended since the last call; then reading will find out which one.
static bool idist__liveness_any(idist__segment *m) {
    uint32_t count = __atomic_load_n(&idist__segment_header_of(m)->ended_count, __ATOMIC_ACQUIRE);
    int i;

    if (count == m->ended_seen) return false;
    m->ended_seen = count;
    for (i = 0; i < m->n; i++) m->ports[i].look = true;

    return true;
}

//------------------------------------------------------------------------------
// [shm:pipe]  a transport through shared memory
// uses cpu os:thread os:memory socket transport pace segment doorbell ended
//
// Two ring buffers, one for each direction.
//------------------------------------------------------------------------------

// Copies to or from the bytes of a pipe that begin at a value of its counters.
static inline void idist__pipe_copy_out(const idist__pipe_port *p, uint64_t head, void *buf,
                                        size_t nbytes) {
    const char *data = (const char *)(p->in + 1);
    size_t size = p->shm->pipe_nbytes, at = (size_t)head & (size - 1), first = size - at;

    if (nbytes <= first) {
        memcpy(buf, data + at, nbytes);
    } else {
        memcpy(buf, data + at, first);
        memcpy((char *)buf + first, data, nbytes - first);
    }
}

static inline void idist__pipe_copy_in(idist__pipe_port *p, uint64_t tail, const void *buf,
                                       size_t nbytes) {
    char *data = (char *)(p->out + 1);
    const char *from = (const char *)buf;
    size_t size = p->shm->pipe_nbytes, at = (size_t)tail & (size - 1), first = size - at;
    int64_t begin_ns;

    if (nbytes < first) first = nbytes;

    if (idist__pace_begin(&p->pace, nbytes, &begin_ns)) {
        idist__os_cpu_stream(data + at, from, first);
        idist__os_cpu_stream(data, from + first, nbytes - first);
    } else {
        memcpy(data + at, from, first);
        if (nbytes > first) memcpy(data, from + first, nbytes - first);
    }

    idist__pace_end(&p->pace, begin_ns, nbytes);
}

// The peer may read what was written.
static void idist__pipe_publish(idist__pipe_port *p, size_t nbytes) {
    p->tail += nbytes;
    idist__os_thread_handover();
    __atomic_store_n(&p->out->tail, p->tail, __ATOMIC_RELEASE);
    if (idist__doorbell_any_asleep(p->shm)) idist__doorbell_wake(p->shm, p->peer);
}

// The peer may use the space of what was read; it waits for that only when the pipe is full.
// unread: bytes before.
static void idist__pipe_consume(idist__pipe_port *p, size_t nbytes, uint64_t unread) {
    p->head += nbytes;
    __atomic_store_n(&p->in->head, p->head, __ATOMIC_RELEASE);
    if (unread > p->shm->pipe_nbytes / 2 && idist__doorbell_any_asleep(p->shm))
        idist__doorbell_wake(p->shm, p->peer);
}

static uint64_t idist__pipe_unread(const idist__pipe_port *p) {
    return __atomic_load_n(&p->in->tail, __ATOMIC_ACQUIRE) - p->head;
}

// Whether the peer writes nothing more: what is in the pipe now is the last.
static bool idist__pipe_has_ended(const idist__pipe_port *p) {
    return __atomic_load_n(&p->in->closed, __ATOMIC_ACQUIRE) ||
           idist__liveness_get(p->shm, p->peer) != IDIST__ENDED_NOT;
}

static ptrdiff_t idist__pipe_read(void *port, void *buf, size_t nbytes) {
    idist__pipe_port *p = (idist__pipe_port *)port;
    uint64_t unread = idist__pipe_unread(p);
    size_t at, slice;

    if (!unread && p->look) {
        bool ended = idist__pipe_has_ended(p);

        unread = idist__pipe_unread(p); // the last that it wrote
        if (ended && !unread) {
            errno = 0;
            return -1;
        }

        p->look = ended;
    }

    if (!unread) return 0;

    if (unread > p->shm->pipe_nbytes) {
        errno = EPROTO;
        return -1;
    }

    idist__os_thread_handover();
    if (nbytes > unread) nbytes = (size_t)unread;

    for (at = 0; at < nbytes; at += slice) {
        slice = nbytes - at < IDIST__SLICE_BYTES ? nbytes - at : IDIST__SLICE_BYTES;
        idist__pipe_copy_out(p, p->head, (char *)buf + at, slice);
        idist__pipe_consume(p, slice, unread);
    }

    return (ptrdiff_t)nbytes;
}

static ptrdiff_t idist__pipe_write(void *port, const idist__os_part *parts, int nparts) {
    idist__pipe_port *p = (idist__pipe_port *)port;
    size_t space = p->shm->pipe_nbytes, moved = 0, unpublished = 0, wanted = 0;
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
        const char *data = (const char *)parts[i].data;
        size_t k = parts[i].nbytes < space ? parts[i].nbytes : space, at, slice;

        for (at = 0; at < k; at += slice) {
            slice = k - at < IDIST__SLICE_BYTES ? k - at : IDIST__SLICE_BYTES;
            idist__pipe_copy_in(p, p->tail + unpublished, data + at, slice);
            unpublished += slice;
            if (unpublished < IDIST__SLICE_BYTES) continue;
            idist__pipe_publish(p, unpublished);
            unpublished = 0;
        }

        moved += k;
        space -= k;
    }

    if (unpublished) idist__pipe_publish(p, unpublished);

    return (ptrdiff_t)moved;
}

static bool idist__pipe_peek_header(void *port, void *header) {
    const idist__pipe_port *p = (const idist__pipe_port *)port;
    size_t size = p->shm->pipe_nbytes;
    uint64_t unread = idist__pipe_unread(p), at;

    if (unread < IDIST__HEADER_BYTES || unread > size) return false;
    idist__os_thread_handover();

    // What follows will be wanted next.
    for (at = IDIST__HEADER_BYTES; at < unread && at < 4 * IDIST__LINE; at += IDIST__LINE)
        __builtin_prefetch((const char *)(p->in + 1) + ((p->head + at) & (size - 1)));
    idist__pipe_copy_out(p, p->head, header, IDIST__HEADER_BYTES);

    return true;
}

static bool idist__pipe_read_message(void *port, void *payload, size_t nbytes) {
    idist__pipe_port *p = (idist__pipe_port *)port;
    size_t message_nbytes = IDIST__HEADER_BYTES + nbytes;
    uint64_t unread = idist__pipe_unread(p);

    if (unread < message_nbytes || unread > p->shm->pipe_nbytes) return false;
    idist__os_thread_handover();
    if (nbytes) idist__pipe_copy_out(p, p->head + IDIST__HEADER_BYTES, payload, nbytes);
    idist__pipe_consume(p, message_nbytes, unread);

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

static bool idist__pipe_write_message(void *port, const void *header, const void *payload,
                                      size_t nbytes) {
    idist__pipe_port *p = (idist__pipe_port *)port;
    size_t message_nbytes = IDIST__HEADER_BYTES + nbytes;
    size_t size = p->shm->pipe_nbytes, at = (size_t)p->tail & (size - 1);
    char *data = (char *)(p->out + 1);

    if (!idist__pipe_has_space(p, message_nbytes)) return false;

    if (nbytes < IDIST__STREAM_BYTES && message_nbytes <= size - at) { // not timed, not split
        memcpy(data + at, header, IDIST__HEADER_BYTES);
        if (nbytes) memcpy(data + at + IDIST__HEADER_BYTES, payload, nbytes);
    } else {
        idist__pipe_copy_in(p, p->tail, header, IDIST__HEADER_BYTES);
        if (nbytes) idist__pipe_copy_in(p, p->tail + IDIST__HEADER_BYTES, payload, nbytes);
    }

    idist__pipe_publish(p, message_nbytes);
    if (!p->pace.streams || nbytes < IDIST__STREAM_BYTES) // else the next one needs no lines
        idist__pipe_prefetch_space(p, message_nbytes);

    return true;
}

static bool idist__pipe_exposes_memory(void *port, uint8_t *withdrawn) {
    const idist__segment *m = ((const idist__pipe_port *)port)->shm;

    if (m->reads_remote && withdrawn)
        *withdrawn = (uint8_t)idist__segment_doorbell(m, m->me)->withdrawn;
    return m->reads_remote;
}

static bool idist__pipe_reads_slowly(void *port) {
    return !((const idist__pipe_port *)port)->shm->reads_fast;
}

static bool idist__pipe_attends(void *port) {
    const idist__pipe_port *p = (const idist__pipe_port *)port;
    return !p->shm->oversubscribed && idist__doorbell_attends(p->shm, p->peer);
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

// Whether the peer's process has ended, also while there are unread bytes of it. Tells all if so.
static bool idist__pipe_peer_gone(const idist__pipe_port *p) {
    return idist__liveness_look_at(p->shm, p->peer);
}

// There is no descriptor: see [shm:ended].
static int idist__pipe_descriptor(void *port, bool output) {
    (void)port;
    (void)output;
    return -1;
}

static void idist__pipe_close(void *port) {
    const idist__pipe_port *p = (const idist__pipe_port *)port;

    if (idist__liveness_get(p->shm, p->shm->me) != IDIST__ENDED_NOT) return; // all know
    __atomic_store_n(&p->out->closed, 1u, __ATOMIC_RELEASE);
    __atomic_fetch_add(&idist__segment_header_of(p->shm)->ended_count, 1u, __ATOMIC_RELEASE);
    if (idist__doorbell_any_asleep(p->shm)) idist__doorbell_wake(p->shm, p->peer);
}

static const idist__transport idist__pipe_transport = {"shm",
                                                       idist__pipe_read,
                                                       idist__pipe_write,
                                                       idist__pipe_close,
                                                       idist__pipe_descriptor,
                                                       false,
                                                       false,
                                                       idist__pipe_peek_header,
                                                       idist__pipe_read_message,
                                                       idist__pipe_write_message,
                                                       idist__pipe_exposes_memory,
                                                       idist__pipe_reads_slowly,
                                                       idist__pipe_attends,
                                                       idist__pipe_pull};

#endif // IDIST_SHM_H
