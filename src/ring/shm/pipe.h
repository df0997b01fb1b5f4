// ring/shm/pipe.h: the transport through shared memory
//
// A link has two ring buffers, one for each direction.
#pragma once

#include "os/cpu.h"
#include "os/thread.h"
#include "os/memory.h"
#include "os/socket.h"
#include "ring/shm/transport.h"
#include "ring/shm/pace.h"
#include "ring/shm/segment.h"
#include "ring/shm/doorbell.h"
#include "ring/shm/liveness.h"

// Copies bytes out of the pipe from our peer, starting at the position that belongs to the counter
// value `head`.
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

// Copies bytes into the pipe to our peer, starting at the position that belongs to the counter
// value `tail`.
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

// Lets the peer read the next nbytes, which have already been copied into the pipe. Wakes the peer
// if it sleeps.
static void idist__pipe_publish(idist__pipe_port *p, size_t nbytes) {
    p->tail += nbytes;
    idist__os_thread_handover();
    __atomic_store_n(&p->out->tail, p->tail, __ATOMIC_RELEASE);
    if (idist__doorbell_any_asleep(p->shm)) idist__doorbell_wake(p->shm, p->peer);
}

// Lets the peer reuse the space of nbytes that we have read. `unread` is the number of unread bytes
// before the read. The peer waits for space only when the pipe is full, so we wake it only if more
// than half of the pipe was unread.
static void idist__pipe_consume(idist__pipe_port *p, size_t nbytes, uint64_t unread) {
    p->head += nbytes;
    __atomic_store_n(&p->in->head, p->head, __ATOMIC_RELEASE);
    if (unread > p->shm->pipe_nbytes / 2 && idist__doorbell_any_asleep(p->shm))
        idist__doorbell_wake(p->shm, p->peer);
}

static uint64_t idist__pipe_unread(const idist__pipe_port *p) {
    return __atomic_load_n(&p->in->tail, __ATOMIC_ACQUIRE) - p->head;
}

// Returns true if the peer will write nothing more, so that the pipe already holds the peer's last
// bytes.
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

        unread = idist__pipe_unread(p); // includes the last bytes that the peer wrote
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

    // The reader next needs the cache lines that follow the header.
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

// Returns true if the pipe has space for all of nbytes.
static bool idist__pipe_has_space(idist__pipe_port *p, size_t nbytes) {
    size_t size = p->shm->pipe_nbytes;

    if (nbytes > size - (size_t)(p->tail - p->out_head))
        p->out_head = __atomic_load_n(&p->out->head, __ATOMIC_ACQUIRE);
    return p->tail - p->out_head <= size && nbytes <= size - (size_t)(p->tail - p->out_head);
}

// Prefetches the cache lines that the next write is likely to fill. These lines are in the peer's
// cache, because the peer read them one lap ago.
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

    if (nbytes < IDIST__STREAM_BYTES && message_nbytes <= size - at) { // not timed, not wrapped
        memcpy(data + at, header, IDIST__HEADER_BYTES);
        if (nbytes) memcpy(data + at + IDIST__HEADER_BYTES, payload, nbytes);
    } else {
        idist__pipe_copy_in(p, p->tail, header, IDIST__HEADER_BYTES);
        if (nbytes) idist__pipe_copy_in(p, p->tail + IDIST__HEADER_BYTES, payload, nbytes);
    }

    idist__pipe_publish(p, message_nbytes);
    if (!p->pace.streams || nbytes < IDIST__STREAM_BYTES) // if the next write uses the caches
        idist__pipe_prefetch_space(p, message_nbytes);

    return true;
}

static bool idist__pipe_exposes_memory(void *port, uint8_t *withdrawn) {
    const idist__segment *seg = ((const idist__pipe_port *)port)->shm;

    if (seg->reads_remote && withdrawn)
        *withdrawn = (uint8_t)idist__segment_doorbell(seg, seg->me)->withdrawn;
    return seg->reads_remote;
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

// Returns true if the process of the peer has ended, even if the pipe still holds unread bytes from
// it. Reports the end to all ranks.
static bool idist__pipe_peer_gone(const idist__pipe_port *p) {
    return idist__liveness_look_at(p->shm, p->peer);
}

// Returns -1 because a pipe has no descriptor. A doorbell wakes a rank that waits for a pipe, and
// ring/shm/liveness.h notices if the peer has died.
static int idist__pipe_descriptor(void *port, bool output) {
    (void)port;
    (void)output;
    return -1;
}

static void idist__pipe_close(void *port) {
    const idist__pipe_port *p = (const idist__pipe_port *)port;

    if (idist__liveness_get(p->shm, p->shm->me) != IDIST__ENDED_NOT) return; // all ranks know
    __atomic_store_n(&p->out->closed, 1u, __ATOMIC_RELEASE);
    __atomic_fetch_add(&idist__segment_header_of(p->shm)->ended_count, 1u, __ATOMIC_RELEASE);
    if (idist__doorbell_any_asleep(p->shm)) idist__doorbell_wake(p->shm, p->peer);
}

static idist__transport idist__pipe_transport;

// Fills in idist__pipe_transport. Called before the first world opens.
static void idist__pipe_fill_transport(void) {
    idist__transport *transport = &idist__pipe_transport;

    transport->name = "shm";
    transport->read = idist__pipe_read;
    transport->write = idist__pipe_write;
    transport->close = idist__pipe_close;
    transport->descriptor = idist__pipe_descriptor;

    transport->peek_header = idist__pipe_peek_header;
    transport->read_message = idist__pipe_read_message;
    transport->write_message = idist__pipe_write_message;

    transport->exposes_memory = idist__pipe_exposes_memory;
    transport->reads_slowly = idist__pipe_reads_slowly;
    transport->attends = idist__pipe_attends;
    transport->pull = idist__pipe_pull;
}
