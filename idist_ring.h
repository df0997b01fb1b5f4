/* idist_ring.h - v0.2.0 - the ring backend of idist: ranks on one host or many - MIT licence

DO THIS

    Nothing: idist.h includes this header at its end. Define IDIST_NO_RING, in the file that defines
    IDIST_IMPLEMENTATION, to leave it out.

WHAT IT IS

    The backend that needs nothing but sockets and, inside a host, shared memory.

    Every rank has one stream to every other: a pipe in shared memory (or a local socket) inside a
    host, TCP between hosts. Messages up to 64 KiB (8 KiB where the receiver reads larger ones fast
    in the sender's memory) are sent at once (eager) within a window of 2 MiB that the receiver
    keeps free. Larger ones are announced, and sent when the receiver has named a place for them, or
    read by it in the sender's memory (rendezvous). In a collective over sockets the receiver names
    the place unasked. So nothing is ever buffered without bound. Every message carries the
    fingerprint of the call it belongs to.

    A collective of ranks that share memory goes through memory that all can read (idist_share.h).
    Otherwise it is an algorithm over non-blocking sends and receives ([algo:ring] and its
    neighbours), over several hosts in two levels ([algo:host]).

CONTENTS

      [ring:api]      the backend's table
      [ring:close]    leaving the other ranks
      [ring:backend]  the table of the backend's functions

    It is made of these headers, each of which uses only those before it:

      idist_shm.h     memory that ranks of a host share, and pipes in it
      idist_msg.h     frames, links, and matching of sends and receives
      idist_share.h   collectives of ranks that share memory
      idist_algo.h    collectives made of messages; begin there to learn how collectives work
      idist_connect.h connections between ranks
      idist_engine.h  progress: what arrives, who waits, what is cancelled
      idist_join.h    how ranks meet

LIMITS

    Ranks that share memory need no descriptors for each other. In a world of up to 64 ranks, a rank
    needs one descriptor (or desc.sockets of them) for each rank with which it shares no memory. In
    a larger world it connects at first to those whose distance is a power of two, 2 log2(n) of
    them, and to others when it exchanges a first message with them, while both are in calls. There
    ranks listen until the world is closed, since either of two may have to connect to the other.
    While they meet, rank 0 needs about n + 8 descriptors more.

    A dead machine, as opposed to a dead process, is noticed by the time-out only.

    Over several hosts, gather, scatter, all_to_all, scan, the v-forms, and reductions of floats of
    16 and 8 bits or in a fixed order are made of messages among all ranks.

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
// [ring:api]  the backend's table
//------------------------------------------------------------------------------

// Any number of ranks, on one host or several; CPU memory.
IDIST_API const idist_backend_api *idist_ring_backend(void);

#ifdef __cplusplus
} // extern "C"
#endif

#endif // IDIST_RING_H

// Only here for the API? Stop reading.

#if defined(IDIST_IMPLEMENTATION) && !defined(IDIST_RING_IMPLEMENTATION_DONE)
#define IDIST_RING_IMPLEMENTATION_DONE

#include "idist_begin.h"
#include "idist_shm.h"
#include "idist_msg.h"
#include "idist_share.h"
#include "idist_algo.h"
#include "idist_connect.h"
#include "idist_engine.h"
#include "idist_join.h"

//------------------------------------------------------------------------------
// [ring:close]  leaving the other ranks
// uses clock mutex poll socket model msg:types link pool connector
// uses engine:progress engine:wait join:open
//
// In order: after the last barrier every rank says BYE, and waits until all of its frames are
// written. Where closing a connection with unread bytes in it could destroy what the peer has not
// read yet (TCP), it waits for the peer's BYE too.
//
// After a failure of the world: every rank says BYE, too, with the reason. Groups that the failure
// does not concern go on with the calls that the leaving rank has completed (idist__progress_left).
// The rank writes the frames that are queued and shuts down its side of each connection. Then it
// discards what still arrives until the peers have closed theirs, or for up to
// IDIST__CLOSE_FAILED_MS. Closing at once could destroy an ABORT that a peer has not read yet.
// Where ranks connect on demand, it accepts connections for all of this time: otherwise a rank that
// comes late would be refused, and blame this one.
//------------------------------------------------------------------------------

enum { IDIST__CLOSE_CLEAN_MS = 5000, IDIST__CLOSE_FAILED_MS = 200 };

// Ends our side of a connection, and discards what has arrived. Returns whether the peer has closed
// its side.
static bool idist__close_discard(int fd) {
    char dropped[4096];

    idist__os_socket_end_stream(fd);
    while (idist__os_socket_read(fd, dropped, sizeof dropped) > 0) continue;

    return idist__os_socket_at_end(fd);
}

// Fills entries of poll with the connections that the peers have not closed yet. Returns how many.
static int idist__close_polls(const idist__ring *ring, idist__os_poll_entry *entries) {
    int i, k, count = 0;

    for (i = 0; i < ring->w->group.size; i++) {
        const idist__link *l = &ring->links[i];

        for (k = 0; k < l->sockets.count && l->open && l->transport->lossy_close; k++)
            if (!idist__close_discard(l->sockets.fds[k]))
                idist__os_poll_watch(&entries[count++], l->sockets.fds[k], IDIST__OS_READABLE);
    }

    return count;
}

static void idist__close_linger(idist__ring *ring, int64_t until_ns) {
    idist__os_poll_entry *entries = ring->polls;
    idist__connector *c = ring->connector;
    int count;

    if (c) idist__connector_leave(c);

    do {
        if (c) idist__progress_connect(ring);
        count = idist__close_polls(ring, entries);
        if (c) count += idist__connector_polls(c, entries + count);
        if (!count) break;
        idist__os_poll(entries, count, idist__os_clock_ms_until(until_ns));
        if (c) idist__connector_polled(c);
    } while (idist__os_clock_ms_until(until_ns) != 0);
}

static void idist__close_world(idist__world *w, bool clean) {
    idist__ring *ring = idist__ring_of(w);
    int64_t until_ns =
        idist__os_clock_deadline(clean ? IDIST__CLOSE_CLEAN_MS : IDIST__CLOSE_FAILED_MS);
    int i;

    idist__os_mutex_lock(&w->lock);
    w->group.rank = -1; // frames that still arrive concern nobody
    ring->said_bye = clean || w->group.status != IDIST_OK;
    ring->bye_status = clean ? IDIST_OK : w->group.status;
    for (i = 0; i < w->group.size && ring->said_bye; i++) idist__link_bye(ring, &ring->links[i]);

    idist__sleep_drain(ring, clean, until_ns);
    if (!clean) idist__close_linger(ring, until_ns);
    idist__pool_leave(&w->group);
    idist__os_mutex_unlock(&w->lock);

    idist__join_free(ring);
}

//------------------------------------------------------------------------------
// [ring:backend]  the table of the backend's functions
// uses launch:env model core:backend msg:types msg:op share:share pool missing
// uses announce engine:progress engine:wait engine:task cancel engine:group
// uses join:open close
//------------------------------------------------------------------------------

static idist_status idist__ring_backend_claim(idist__config *config, const char **why) {
    *why = "a world of 1 needs no backend";
    return config->world_size == 1 && !config->backends[0] ? IDIST_ERR_NO_BACKEND : IDIST_OK;
}

// Functions that this backend does not have stay NULL.
static void idist__ring_backend_fill(idist_backend_api *api) {
    api->name = "ring";
    api->task_nbytes = sizeof(idist__op);
    api->group_nbytes = sizeof(idist__ring_group);

    api->claim = idist__ring_backend_claim;
    api->open = idist__join_open;
    api->close = idist__close_world;

    api->group_open = idist__members_open; // [engine:group]
    api->group_close = idist__members_close;
    api->group_offer = idist__pool_offer_region;
    api->group_meet = idist__members_meet;

    api->quick = idist__start_task_quick; // [engine:task]
    api->takes_parts = idist__share_takes_parts;
    api->start = idist__start_task_start;
    api->announce = idist__announce_wait;

    api->quick_message = idist__start_task_quick_message;
    api->progress = idist__progress_run; // [engine:progress], [engine:wait]
    api->sleep = idist__sleep_begin;
    api->wake = idist__sleep_wake;
    api->attend = idist__sleep_attend;
    api->flush = idist__sleep_flush;

    api->cancel = idist__cancel_task; // [engine:cancel]
    api->retract = idist__cancel_retract;
    api->tell = idist__cancel_tell;
    api->missing = idist__missing_name;
    api->alloc = idist__members_alloc;
}

const idist_backend_api *idist_ring_backend(void) {
    static idist_backend_api api;
    return idist__backend_fill(&api, idist__ring_backend_fill);
}

__attribute__((constructor(IDIST__REGISTER_GENERAL))) static void
idist__ring_backend_register(void) {
    (void)idist_register_backend(idist_ring_backend());
}

#include "idist_end.h"

#endif // IDIST_IMPLEMENTATION
