// ring/join/join_share.h: memory shared inside a host
//
// The ranks of a host form a binomial tree, whose root is the lowest one. Each of them connects to
// its parent. The root makes the file (ring/shm/segment.h) and sends its descriptor to its
// children, as every rank does that gets it. Each rank maps the file, reserves its own pipes and
// first region, and votes on whether that worked:
//
//   root           makes the file    sends it    maps it   collects votes   sends the lowest
//   other ranks    receive it        send it     map it    collect votes,   receive the lowest
//                                                          send the lowest  and send it
//
// The file is used only if it worked everywhere; then the connections of the tree are closed. If it
// did not, the connections of the tree stay, all other pairs connect as well, and every rank knows
// from the vote which rank could not map the file, and why.
//
// A second vote decides whether they read each other's memory through the kernel. Each rank tries
// to read a random number at the address that every other rank has left in the file.
#pragma once

#include "os/clock.h"
#include "os/random.h"
#include "os/process.h"
#include "os/cpu.h"
#include "os/memory.h"
#include "os/poll.h"
#include "os/socket.h"
#include "os/beacon.h"
#include "os/segment.h"
#include "base/fail.h"
#include "base/mem.h"
#include "base/window.h"
#include "base/log.h"
#include "net/address.h"
#include "net/connection.h"
#include "ring/shm/segment.h"
#include "ring/shm/view.h"
#include "ring/shm/pipe.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/sockets.h"
#include "ring/msg/link.h"
#include "ring/share/region.h"
#include "ring/share/pool.h"
#include "ring/join/join_state.h"
#include "ring/join/join_failure.h"
#include "ring/join/links.h"

enum { IDIST__JOIN_CHILDREN = 32 }; // of a rank, at most

typedef struct idist__join_share { // memory of this host that is being agreed on
    idist__segment *m;
    const int *ranks; // world ranks of those that take part, by rank on this host
    int parent;       // the world rank of our parent in the tree; -1: we are the root
    int children[IDIST__JOIN_CHILDREN];
    int child_count;
    int error; // why there can be no beacons: an errno, or 0
} idist__join_share;

// Votes; the lowest one decides.
enum {
    IDIST__VOTE_FAILED,
    IDIST__VOTE_FENCED, // mapped, but the kernel has no membarrier: writers need a fence
    IDIST__VOTE_MAPPED
};

enum { // votes as well: how a rank reads the memory of the others
    IDIST__READS_NOT,
    IDIST__READS_SLOWLY,
    IDIST__READS_FAST
};

typedef struct idist__ballot { // travels through the tree; the lowest vote stays
    char vote;
    char why[255]; // IDIST__VOTE_FAILED: which rank could not, and why
} idist__ballot;

typedef struct idist__join_share_hello { // comes with the descriptor
    uint64_t shm_nbytes, window_nbytes;
} idist__join_share_hello;

// ---- where things lie in the file ----

static size_t idist__join_share_nbytes(const idist__segment *m) {
    return m->window_at + (size_t)m->n * m->window_nbytes;
}

static size_t idist__join_share_round_up(size_t nbytes) {
    return (nbytes + IDIST__PAGE - 1) & ~(IDIST__PAGE - 1);
}

// See ring/shm/segment.h. Region 0 has large buffers, the others a quarter of that; there are as
// many as fit into shm_nbytes for each rank.
static void idist__join_share_layout(idist__segment *m, size_t shm_nbytes, size_t window_nbytes) {
    size_t used, room, first, other, chunk, page = idist__os_memory_page_nbytes();

    m->pipe_nbytes = IDIST__PIPE_MAX;
    while (m->pipe_nbytes > IDIST__PAGE && (size_t)m->n * m->pipe_nbytes > shm_nbytes / 4)
        m->pipe_nbytes /= 2;

    m->pipes_at = sizeof(idist__catalog) + (size_t)m->n * sizeof(uint32_t);
    m->pipes_at = (m->pipes_at + IDIST__LINE - 1) & ~(IDIST__LINE - 1);
    m->buffers_at = m->pipes_at + (size_t)m->n * (sizeof(idist__pipe) + m->pipe_nbytes);
    m->buffers_at = idist__join_share_round_up(m->buffers_at) + IDIST__BUFFERS_SKEW;
    used = sizeof(idist__doorbell) + m->buffers_at;
    room = shm_nbytes > used ? shm_nbytes - used : 0;

    chunk = room / (2 * IDIST__BUFFERS);
    if (chunk > IDIST__CHUNK_MAX) chunk = IDIST__CHUNK_MAX;
    m->chunk_nbytes[0] = chunk & ~(IDIST__LINE - 1);
    m->chunk_nbytes[1] = (chunk / 4) & ~(IDIST__LINE - 1);
    first = IDIST__REGION_HEAD_BYTES + IDIST__BUFFERS * m->chunk_nbytes[0];
    other = IDIST__REGION_HEAD_BYTES + IDIST__BUFFERS * m->chunk_nbytes[1];

    m->region_count = room < first ? 0 : 1 + (int)((room - first) / other);
    if (m->region_count > (int)IDIST__COUNT_OF(m->taken))
        m->region_count = (int)IDIST__COUNT_OF(m->taken);

    m->front_nbytes = sizeof(idist__doorbell);
    m->part_nbytes = m->buffers_at;

    if (m->region_count) {
        m->front_nbytes += IDIST__REGION_HEAD_BYTES;
        m->part_nbytes += IDIST__BUFFERS * m->chunk_nbytes[0];
        m->part_nbytes += (size_t)(m->region_count - 1) * other;
    }

    m->front_nbytes = idist__join_share_round_up(m->front_nbytes);
    m->part_nbytes = idist__join_share_round_up(m->part_nbytes);
    m->parts_at = IDIST__PAGE + (size_t)m->n * m->front_nbytes;
    m->window_at = m->parts_at + (size_t)m->n * m->part_nbytes;
    m->window_at = (m->window_at + page - 1) / page * page; // mapped by itself
    m->window_nbytes = window_nbytes;
    m->reserved_count = 0;
}

// At least the memory of the host, a power of two. A hole in the file costs nothing.
static size_t idist__join_share_window_nbytes(int n) {
    uint64_t ram = idist__os_segment_ram();
    uint64_t nbytes = (uint64_t)1 << 30;

    if (sizeof(void *) < 8) return 0;
    while (nbytes < ram && nbytes * (uint64_t)n < (uint64_t)1 << 42) nbytes *= 2;

    return (size_t)nbytes;
}

// ---- mapping it ----

// Reserves memory for our doorbell, our catalog and the pipes to us. 0, or an errno.
static int idist__join_share_reserve(const idist__segment *m) {
    size_t me = (size_t)m->me;
    int fd = m->fd, error = 0;

    if (idist__os_segment_nbytes(fd) < idist__join_share_nbytes(m)) return EINVAL;
    if (!me) error = idist__os_memory_reserve(fd, 0, IDIST__PAGE);
    if (!error)
        error = idist__os_memory_reserve(fd, IDIST__PAGE + me * m->front_nbytes,
                                         sizeof(idist__doorbell));
    if (!error)
        error = idist__os_memory_reserve(fd, m->parts_at + me * m->part_nbytes, m->buffers_at);

    return error;
}

// Leaves what the next rank reads to find out which way is faster: a block of our memory, and one
// in our part of the file, in the pipe from that rank, which writes to it only afterwards. Both are
// then in our cache, as contributions usually are.
static void idist__join_share_leave_sample(const idist__segment *m) {
    if (m->n == 1 || m->pipe_nbytes < IDIST__SAMPLE_BYTES) return;
    memset(m->remote_pieces, 1, IDIST__SAMPLE_BYTES);
    memset(idist__segment_pipe(m, (m->me + 1) % m->n, m->me) + 1, 1, IDIST__SAMPLE_BYTES);
}

// Maps the file and reserves our memory in it. 0, or an errno.
static int idist__join_share_map(idist__segment *m) {
    idist__doorbell *bell;
    idist__os_cpu_set cpus;
    int i, error = idist__join_share_reserve(m);

    if (error) return error;
    m->base = (char *)idist__os_memory_map(m->fd, 0, m->window_at);
    if (!m->base) return errno;

    if (m->window_nbytes) {
        size_t at = m->window_at + (size_t)m->me * m->window_nbytes;
        m->window = idist__window_open(m->fd, at, m->window_nbytes);
        if (!m->window) return ENOMEM;
    }

    idist__os_cpu_usable(&cpus);
    for (i = 0; i < IDIST__CPU_WORDS; i++)
        __atomic_fetch_or(&idist__segment_header_of(m)->cpus.bits[i], cpus.bits[i],
                          __ATOMIC_RELAXED);

    idist__os_random(&m->proof, sizeof m->proof);
    bell = idist__segment_doorbell(m, m->me);
    bell->pid = idist__os_process_id();
    bell->proof = m->proof;
    bell->proof_address = (uint64_t)(uintptr_t)&m->proof;
    bell->sample_address = (uint64_t)(uintptr_t)m->remote_pieces;
    idist__join_share_leave_sample(m);

    // The world's: its members take for granted that all of them have it.
    return m->region_count ? idist__pool_reserve(m, 0) : 0;
}

// Whether we can read the memory of all others, and they are the processes we take them for.
static bool idist__join_share_reads_all(idist__segment *m) {
    int i;

    for (i = 0; i < m->n; i++) {
        const idist__doorbell *bell = idist__segment_doorbell(m, i);
        uint64_t proof = 0;
        uint64_t proof_address = bell->proof_address;

        m->processes[i] = (idist__os_process)bell->pid;
        if (m->processes[i] <= 0) return false;
        if (idist__segment_read_remote(m, i, proof_address, &proof, sizeof proof) != 0)
            return false;
        if (proof != bell->proof) return false;
    }

    return true;
}

// Whether the kernel reads the memory of another process at least half as fast as we read memory
// that we share with it. Some processors need five times as long for what is in the other one's
// cache. In small pieces, of which the fastest counts, because the others may have been
// interrupted.
static bool idist__join_share_reads_fast(const idist__segment *m) {
    int from = (m->me + m->n - 1) % m->n;
    const char *shared = (const char *)(idist__segment_pipe(m, m->me, from) + 1);
    uint64_t address = idist__segment_doorbell(m, from)->sample_address;
    char *to = m->remote_pieces + IDIST__SAMPLE_BYTES;
    int64_t remote_ns = IDIST__FOREVER, shared_ns = IDIST__FOREVER;
    size_t at;

    for (at = 0; at < IDIST__SAMPLE_BYTES; at += IDIST__PAGE) to[at] = shared[at]; // maps the pages

    for (at = 0; at < IDIST__SAMPLE_BYTES; at += IDIST__SAMPLE_PIECE) {
        int64_t begin_ns = idist__os_clock_now_ns(), between_ns, end_ns;

        if (idist__segment_read_remote(m, from, address + at, to, IDIST__SAMPLE_PIECE) != 0)
            return false;
        between_ns = idist__os_clock_now_ns();
        memcpy(to, shared + at, IDIST__SAMPLE_PIECE);
        end_ns = idist__os_clock_now_ns();
        if (between_ns - begin_ns < remote_ns) remote_ns = between_ns - begin_ns;
        if (end_ns - between_ns < shared_ns) shared_ns = end_ns - between_ns;
    }

    return remote_ns <= 2 * shared_ns;
}

// How this rank reads the memory of others, as a vote. Ranks that share cores cannot measure it.
// Rank 0 may not have written head->ncores yet.
static char idist__join_share_reads(idist__segment *m) {
    const idist__segment_header *head = idist__segment_header_of(m);

    if (!idist__join_share_reads_all(m)) return IDIST__READS_NOT;
    if (m->n == 1 || m->n > idist__os_cpu_set_count(&head->cpus)) return IDIST__READS_FAST;
    if (m->pipe_nbytes < IDIST__SAMPLE_BYTES) return IDIST__READS_FAST;
    return idist__join_share_reads_fast(m) ? IDIST__READS_FAST : IDIST__READS_SLOWLY;
}

// ---- messages between the ranks of the host ----

// Sends a message with a descriptor, which may be -1.
static bool idist__join_share_send(int sock, const void *buf, size_t nbytes, int fd,
                                   int64_t deadline_ns) {
    ptrdiff_t sent = idist__os_segment_send(sock, buf, nbytes, fd);

    while (sent < 0 && errno == EAGAIN) {
        if (!idist__os_poll_wait(sock, IDIST__OS_WRITABLE, deadline_ns)) return false;
        sent = idist__os_segment_send(sock, buf, nbytes, fd);
    }

    return sent == (ptrdiff_t)nbytes; // a new socket never cuts a short message
}

// Receives one; *fd is -1 if it has no descriptor. On failure errno is 0 if the peer has ended.
static bool idist__join_share_receive(int sock, void *buf, size_t nbytes, int *fd,
                                      int64_t deadline_ns) {
    ptrdiff_t received;

    *fd = -1;
    errno = ETIMEDOUT;
    if (!idist__os_poll_wait(sock, IDIST__OS_READABLE, deadline_ns)) return false;
    received = idist__os_segment_receive(sock, buf, nbytes, fd);
    if (received == 0) errno = 0;
    if (received <= 0) return false;

    return idist__connection_read_all(sock, (char *)buf + received, nbytes - (size_t)received,
                                      deadline_ns);
}

static idist_status idist__join_share_broken(idist__join *j, int rank) {
    if (errno == ETIMEDOUT)
        return idist__fail(IDIST_ERR_TIMEOUT,
                           "initialize: rank %d on %s did not answer while the ranks of this host "
                           "set up their shared memory: it is stopped, too slow, or waits for a "
                           "rank that is",
                           rank, j->w->nodes[rank].hostname);

    return idist__join_failure_lost(
        j, rank, "its connection ended while the ranks of this host agreed on shared memory");
}

// Waits until a link has something to read. Now and then it asks whether a rank has given up, which
// may be why nothing arrives.
static idist_status idist__join_share_await(idist__join *j, int rank) {
    idist_status status;

    for (;;) {
        int64_t ask_ns = idist__os_clock_deadline(idist__join_state_ask_ms(j));

        if (idist__os_poll_wait(j->ring->links[rank].sockets.fds[0], IDIST__OS_READABLE,
                                ask_ns < j->deadline_ns ? ask_ns : j->deadline_ns))
            return IDIST_OK;
        status = idist__join_failure_check(j);
        if (status != IDIST_OK) return status;
        errno = ETIMEDOUT;
        if (idist__os_clock_ms_until(j->deadline_ns) == 0) return idist__join_share_broken(j, rank);
    }
}

// Gets the next message of a rank in a vote.
static idist_status idist__join_share_hear(idist__join *j, int rank, idist__ballot *ballot) {
    int sock = j->ring->links[rank].sockets.fds[0];
    idist_status status = idist__join_share_await(j, rank);

    if (status != IDIST_OK) return status;
    if (!idist__connection_read_all(sock, ballot, sizeof *ballot, j->deadline_ns))
        return idist__join_share_broken(j, rank);
    ballot->why[sizeof ballot->why - 1] = 0;

    return IDIST_OK;
}

static idist_status idist__join_share_say(idist__join *j, int rank, const idist__ballot *ballot) {
    int sock = j->ring->links[rank].sockets.fds[0];

    if (idist__connection_write_all(sock, ballot, sizeof *ballot, j->deadline_ns)) return IDIST_OK;
    return idist__join_share_broken(j, rank);
}

// Sets *ballot to that of the lowest vote of the ranks of this host: up the tree, and down again.
static idist_status idist__join_share_vote(idist__join *j, const idist__join_share *share,
                                           idist__ballot *ballot) {
    idist_status status = IDIST_OK;
    int i;

    for (i = 0; i < share->child_count && status == IDIST_OK; i++) {
        idist__ballot other;

        status = idist__join_share_hear(j, share->children[i], &other);
        if (status == IDIST_OK && other.vote < ballot->vote) *ballot = other;
    }

    if (share->parent >= 0 && status == IDIST_OK) {
        status = idist__join_share_say(j, share->parent, ballot);
        if (status == IDIST_OK) status = idist__join_share_hear(j, share->parent, ballot);
    }

    for (i = 0; i < share->child_count && status == IDIST_OK; i++)
        status = idist__join_share_say(j, share->children[i], ballot);
    if (status != IDIST_OK) ballot->vote = IDIST__VOTE_FAILED;

    return status;
}

// ---- making the file ----

// Makes the file, without windows if a limit on the size of files does not leave room for them. 0,
// or an errno.
static int idist__join_share_create(idist__segment *m, idist__join_share_hello *hello) {
    hello->window_nbytes = idist__join_share_window_nbytes(m->n);
    idist__join_share_layout(m, (size_t)hello->shm_nbytes, (size_t)hello->window_nbytes);
    m->fd = idist__os_memory_file(idist__join_share_nbytes(m));
    if (m->fd >= 0) return 0;

    hello->window_nbytes = 0;
    idist__join_share_layout(m, (size_t)hello->shm_nbytes, 0);
    m->fd = idist__os_memory_file(idist__join_share_nbytes(m));

    return m->fd < 0 ? errno : 0;
}

// Makes the file or receives it, and sends it to our children. Without a file *error says why; the
// ranks vote all the same.
static idist_status idist__join_share_pass(idist__join *j, const idist__join_share *share,
                                           int *error) {
    const idist__link *links = j->ring->links;
    idist__segment *m = share->m;
    idist__join_share_hello hello;
    idist_status status;
    int i;

    *error = EINVAL;
    hello.shm_nbytes = j->w->cfg.shm_nbytes;

    if (share->parent >= 0) {
        status = idist__join_share_await(j, share->parent);
        if (status != IDIST_OK) return status;
        if (!idist__join_share_receive(links[share->parent].sockets.fds[0], &hello, sizeof hello,
                                       &m->fd, j->deadline_ns))
            return idist__join_share_broken(j, share->parent);
        idist__join_share_layout(m, (size_t)hello.shm_nbytes, (size_t)hello.window_nbytes);
        if (m->fd >= 0) *error = 0;
    } else {
        *error = idist__join_share_create(m, &hello);
    }

    for (i = 0; i < share->child_count; i++)
        if (!idist__join_share_send(links[share->children[i]].sockets.fds[0], &hello, sizeof hello,
                                    m->fd, j->deadline_ns))
            return idist__join_share_broken(j, share->children[i]);

    return IDIST_OK;
}

// Says in the ballot that this rank cannot share memory, and why.
static void idist__join_share_refuse(const idist__join *j, const idist__join_share *share,
                                     int error, idist__ballot *ballot) {
    char limit[160] = "";

    ballot->vote = IDIST__VOTE_FAILED;
    if (!share->error) idist__os_memory_limit(share->m->window_at, limit, sizeof limit);
    snprintf(ballot->why, sizeof ballot->why, "rank %d: %s%s", j->w->group.rank,
             share->error ? "the processes of this host cannot see each other end: " : "",
             *limit ? limit : strerror(error));
}

// *all: every rank of this host has mapped the file, even if this function fails after that.
static idist_status idist__join_share_attempt(idist__join *j, const idist__join_share *share,
                                              bool *all) {
    idist__segment *m = share->m;
    int error;
    idist__ballot ballot;
    idist_status status = idist__join_share_pass(j, share, &error);

    if (status != IDIST_OK) return status;
    memset(&ballot, 0, sizeof ballot);
    ballot.vote = idist__os_cpu_fence_others(true) ? IDIST__VOTE_MAPPED : IDIST__VOTE_FENCED;
    if (share->error) error = share->error;
    if (!error) error = idist__join_share_map(m);
    if (error) idist__join_share_refuse(j, share, error, &ballot);

    status = idist__join_share_vote(j, share, &ballot);
    *all = status == IDIST_OK && ballot.vote > IDIST__VOTE_FAILED;

    if (status == IDIST_OK && !*all) {
        snprintf(j->w->sharing, sizeof j->w->sharing, "no shared memory: %s", ballot.why);
        idist__log_print(&j->w->log, IDIST_LOG_INFO, "%s", j->w->sharing);
    }

    if (!*all) return status;

    if (m->me == 0) {
        idist__segment_header *head = idist__segment_header_of(m);
        head->ncores = (uint32_t)idist__os_cpu_set_count(&head->cpus);
        head->fenced = ballot.vote == IDIST__VOTE_FENCED || m->n > (int)head->ncores;
    }

    ballot.vote = idist__join_share_reads(m); // by now all have left their proofs and samples
    status = idist__join_share_vote(j, share, &ballot);
    m->reads_remote = ballot.vote >= IDIST__READS_SLOWLY;
    m->reads_fast = ballot.vote == IDIST__READS_FAST;

    return status;
}

// ---- the shared memory of a ring ----

static void idist__join_share_free(const idist_allocator *mem, idist__segment *m) {
    if (!m) return;
    idist__view_unmap_all(m);
    if (m->base) idist__os_memory_unmap(m->base, m->window_at);
    idist__os_descriptor_close(&m->fd);
    idist__os_descriptor_close(&m->beacon);
    idist__os_descriptor_close(&m->observer);
    idist__mem_free(mem, m->views);
    idist__mem_free(mem, m->local);
    idist__mem_free(mem, m->processes);
    idist__mem_free(mem, m->remote_pieces);
    idist__mem_free(mem, m->ports);
    idist__mem_free(mem, m);
}

// NULL when memory is short.
static idist__segment *idist__join_share_new(const idist_allocator *mem, size_t world_size) {
    idist__segment *m = (idist__segment *)idist__mem_alloc(mem, sizeof *m);

    if (!m) return NULL;
    m->fd = -1;
    m->beacon = -1;
    m->observer = -1;
    m->local = (int *)idist__mem_alloc(mem, sizeof *m->local * 2 * world_size);
    m->ports = (idist__pipe_port *)idist__mem_alloc(mem, sizeof *m->ports * world_size);
    m->processes = (idist__os_process *)idist__mem_alloc(mem, sizeof *m->processes * world_size);
    m->remote_pieces = (char *)idist__mem_raw(mem, IDIST__REMOTE_PIECE * world_size);
    m->views = (idist__view *)idist__mem_alloc(mem, sizeof *m->views * world_size);
    if (m->local && m->ports && m->processes && m->remote_pieces && m->views) return m;

    idist__join_share_free(mem, m);

    return NULL;
}

// The beacon of a rank: its local socket has the same name without the last word.
static bool idist__join_share_beacon(const idist__join *j, int rank, idist__os_address *address) {
    char where[sizeof j->records->local + 8];

    snprintf(where, sizeof where, "%s-beacon", j->records[rank].local);

    return idist__address_parse(address, where) == IDIST_OK;
}

// Lights our beacon, before anybody may look for it. 0, or an errno.
static int idist__join_share_light(const idist__join *j, const idist__join_share *share) {
    idist__segment *m = share->m;
    int i;

    for (i = 0; i < m->n; i++)
        if (!idist__join_share_beacon(j, share->ranks[i], &m->ports[i].beacon)) return EINVAL;

    m->beacon = idist__os_beacon_light(&m->ports[m->me].beacon);
    if (m->beacon < 0) return errno;
    m->observer = idist__os_beacon_observer();
    if (m->observer < 0) return errno;
    m->next_look = m->me;

    return 0;
}

// Whether the system lets us see beacons: our own and those of our parent and children, which are
// lit because we are connected. 0, or an errno.
static int idist__join_share_see(const idist__segment *m) {
    int bit, error = idist__os_beacon_look(m->observer, &m->ports[m->me].beacon);

    if (!error && m->me)
        error = idist__os_beacon_look(m->observer, &m->ports[m->me & (m->me - 1)].beacon);
    for (bit = 1; !error && m->me + bit < m->n && !(m->me & bit); bit *= 2)
        error = idist__os_beacon_look(m->observer, &m->ports[m->me + bit].beacon);

    return error;
}

// From here on the links inside this host are pipes in the file. A rank that gives up takes over
// only those to ranks that are not its parent or children in the tree: the others may have joined,
// and can be told. Between parent and child votes may still be under way, which a frame would
// disturb; a child that has joined sees by its parent's beacon that it is gone.
static void idist__join_share_take_over(idist__join *j, const idist__join_share *share,
                                        idist_status status) {
    idist__segment *m = share->m;
    const idist__segment_header *head = idist__segment_header_of(m);
    int i;

    m->fenced = head->fenced != 0;
    m->oversubscribed = m->n > (int)head->ncores;
    j->w->ncores = (int)head->ncores;

    for (i = 0; i < m->n; i++) {
        idist__link *l = &j->ring->links[share->ranks[i]];
        idist__pipe_port *port = &m->ports[i];

        m->local[share->ranks[i]] = i;
        if (i == m->me || (status != IDIST_OK && idist__link_is_connected(l))) continue;
        port->shm = m;
        port->peer = i;
        port->in = idist__segment_pipe(m, i, m->me);
        port->out = idist__segment_pipe(m, m->me, i);
        idist__link_open(j->ring, l, &idist__pipe_transport, port); // closes the connection
    }

    j->ring->shm = m;
    snprintf(j->w->sharing, sizeof j->w->sharing, "shared memory, %zu KiB per rank%s; %s",
             j->w->cfg.shm_nbytes >> 10,
             m->region_count ? "" : ", too little for collectives, which are messages",
             m->reads_fast     ? "large buffers are read from the other process"
             : m->reads_remote ? "large buffers are copied, the kernel reads other processes slowly"
                               : "large buffers are copied");
    if (!m->region_count && m->me == 0)
        idist__log_print(&j->w->log, IDIST_LOG_WARN, "on this host: %s", j->w->sharing);
}

// The ranks of this host, and our place in their tree: the parent of a rank on this host is the
// rank without its lowest set bit.
static void idist__join_share_find(const idist__join *j, idist__join_share *share, int *ranks) {
    const idist__record *own = &j->records[j->w->group.rank];
    idist__segment *m = share->m;
    int i, bit;

    for (i = 0; i < j->w->group.size; i++) {
        const idist__record *record = &j->records[i];

        m->local[i] = -1;
        if (!record->shm || record->host != own->host || !record->local[0]) continue;
        if (i == j->w->group.rank) m->me = m->n;
        ranks[m->n++] = i;
    }

    share->ranks = ranks;
    share->parent = m->me ? ranks[m->me & (m->me - 1)] : -1;
    for (bit = 1; m->me + bit < m->n && !(m->me & bit); bit *= 2)
        share->children[share->child_count++] = ranks[m->me + bit];
}

// Agrees on memory with the other ranks of this host, if there are any. *all: all have mapped it,
// even if this rank fails after that.
static idist_status idist__join_share_agree(idist__join *j, idist__join_share *share, bool *all) {
    idist__segment *m = share->m;
    idist_status status;
    int i;

    if (m->n < 2) return IDIST_OK;
    share->error = idist__join_share_light(j, share);
    if (share->parent >= 0) idist__links_want(j, share->parent);
    for (i = 0; i < share->child_count; i++) idist__links_want(j, share->children[i]);
    status = idist__links_connect(j);
    if (!share->error) share->error = idist__join_share_see(m);
    if (status != IDIST_OK) return status;

    return idist__join_share_attempt(j, share, all);
}

static idist_status idist__join_share_share(idist__join *j) {
    const idist_allocator *mem = &j->w->cfg.mem;
    int size = j->w->group.size;
    idist__join_share share;
    bool all = false;
    idist_status status;

    if (!j->records[j->w->group.rank].shm) return IDIST_OK;
    memset(&share, 0, sizeof share);
    share.m = idist__join_share_new(mem, (size_t)size);
    if (!share.m) return IDIST_ERR_NO_MEMORY;

    // Room for the ranks was allocated with the other table.
    idist__join_share_find(j, &share, share.m->local + size);
    status = idist__join_share_agree(j, &share, &all);

    if (all) idist__join_share_take_over(j, &share, status);
    else idist__join_share_free(mem, share.m);
    j->voting = status != IDIST_OK;

    return status;
}

// Connects to the ranks with which we do not share memory, or only to some of them.
static idist_status idist__join_share_connect_others(idist__join *j) {
    int i, me = j->w->group.rank, n = j->w->group.size;
    bool many = n > IDIST__LINKS_MANY, lacks_some = false;
    idist_status status;

    for (i = 0; i < n; i++)
        if (i != me && (!many || idist__links_are_near(i, me, n))) idist__links_want(j, i);

    status = idist__links_connect(j);
    if (status != IDIST_OK || !many) return status;

    for (i = 0; i < n; i++) {
        idist__link *l = &j->ring->links[i];

        if (i == me || l->open) continue;
        idist__link_open(j->ring, l, &idist__transport_none, NULL);
        lacks_some = true;
    }

    if (lacks_some) { // the ring makes the rest
        j->ring->connector = j->connector;
        j->connector = NULL;
    }

    return IDIST_OK;
}
