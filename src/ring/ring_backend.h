// ring/ring_backend.h: leaves the other ranks when a world closes; the table of the backend
//
// Functions: idist__ring_backend_*, idist__close_*.
#pragma once

#include "os/clock.h"
#include "os/thread.h"
#include "os/poll.h"
#include "os/socket.h"
#include "launch/env.h"
#include "core/model.h"
#include "core/backend.h"
#include "ring/shm/pipe.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/sockets.h"
#include "ring/msg/op.h"
#include "ring/msg/link.h"
#include "ring/share/share.h"
#include "ring/share/pool.h"
#include "ring/connect/connector.h"
#include "ring/engine/missing.h"
#include "ring/engine/announce.h"
#include "ring/engine/progress.h"
#include "ring/engine/sleep.h"
#include "ring/engine/start_task.h"
#include "ring/engine/cancel.h"
#include "ring/engine/members.h"
#include "ring/join/join.h"

//------------------------------------------------------------------------------
// leaving the other ranks
//
// After the last barrier: every rank sends BYE and waits until all of its frames are written. On
// TCP, closing a connection that holds unread input could destroy output that the peer has not read
// yet. So on TCP the rank also waits for the peer's BYE.
//
// After a failure of the world: every rank also sends BYE, with the reason. In groups that the
// failure does not concern, the other ranks can still finish the calls that the leaving rank has
// completed (idist__progress_left). The rank writes the frames that are queued and shuts down its
// side of each connection. Then it discards incoming data until the peers have closed their sides,
// for at most IDIST__CLOSE_FAILED_MS. Closing immediately could destroy an ABORT that a peer has
// not read yet. If ranks connect on demand, the rank keeps accepting connections during this time.
// Otherwise a rank that connects late would be refused, and would report this rank as the cause.
//------------------------------------------------------------------------------

enum { IDIST__CLOSE_CLEAN_MS = 5000, IDIST__CLOSE_FAILED_MS = 200 };

// Ends our side of a connection, and discards the data that has arrived. Returns true if the peer
// has closed its side.
static bool idist__close_discard(int fd) {
    char dropped[4096];

    idist__os_socket_end_stream(fd);
    while (idist__os_socket_read(fd, dropped, sizeof dropped) > 0) continue;

    return idist__os_socket_at_end(fd);
}

// Ends our side of the connections, and discards the data that has arrived. Fills a poll set with
// the connections that the peers have not closed yet. Returns the number of entries.
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
    idist__connector *conn = ring->connector;
    int count;

    if (conn) idist__connector_leave(conn);

    do {
        if (conn) idist__progress_connect(ring);
        count = idist__close_polls(ring, entries);
        if (conn) count += idist__connector_polls(conn, entries + count);
        if (!count) break;
        idist__os_poll(entries, count, idist__os_clock_ms_until(until_ns));
        if (conn) idist__connector_polled(conn);
    } while (idist__os_clock_ms_until(until_ns) != 0);
}

static void idist__close_world(idist__world *w, bool clean) {
    idist__ring *ring = idist__ring_of(w);
    int64_t until_ns =
        idist__os_clock_deadline(clean ? IDIST__CLOSE_CLEAN_MS : IDIST__CLOSE_FAILED_MS);
    int i;

    idist__os_mutex_lock(&w->lock);
    w->group.rank = -1; // frames that still arrive concern no group
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
// the table of the backend's functions
//------------------------------------------------------------------------------

static idist_status idist__ring_backend_claim(idist__config *config, const char **why) {
    *why = "a world of 1 needs no backend";
    return config->world_size == 1 && !config->backends[0] ? IDIST_ERR_NO_BACKEND : IDIST_OK;
}

// Fills the table of the backend. Functions that this backend does not have stay NULL. Also fills
// the transports' tables, because this function runs once, under a lock, before a world can open.
static void idist__ring_backend_fill(idist_backend_api *api) {
    idist__sockets_fill_transports();
    idist__pipe_fill_transport();

    api->name = "ring";
    api->task_nbytes = sizeof(idist__op);
    api->group_nbytes = sizeof(idist__ring_group);

    api->claim = idist__ring_backend_claim;
    api->open = idist__join_open;
    api->close = idist__close_world;

    api->group_open = idist__members_open; // ring/engine/members.h
    api->group_close = idist__members_close;
    api->group_offer = idist__pool_offer_region;
    api->group_meet = idist__members_meet;

    api->quick = idist__start_task_quick; // ring/engine/start_task.h
    api->takes_parts = idist__share_takes_parts;
    api->start = idist__start_task_start;
    api->announce = idist__announce_wait;

    api->quick_message = idist__start_task_quick_message;
    api->progress = idist__progress_run; // ring/engine/progress.h, ring/engine/sleep.h
    api->sleep = idist__sleep_begin;
    api->wake = idist__sleep_wake;
    api->attend = idist__sleep_attend;
    api->flush = idist__sleep_flush;

    api->cancel = idist__cancel_task; // ring/engine/cancel.h
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
