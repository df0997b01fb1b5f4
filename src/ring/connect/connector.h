// ring/connect/connector.h: all connections in the making: listeners, attempts, handshakes
//
// Connects two ranks by a local socket or TCP. While ranks join (ring/join/), they make only the
// connections that they are certain to need. In a large world without shared memory, there are few
// such connections. Every other connection is made when the first message needs it (ring/engine/).
//
// WHO CONNECTS
//
// Each rank listens, and each may connect to any other. Each end proves that it knows the job's
// key, and sends its rank. Two ranks may connect to each other at the same time. They keep the
// connection that the higher rank began:
//
//   - a rank refuses the connection of a lower rank if its own connection has already reached
//     that rank;
//   - a rank accepts the connection of a higher rank, and drops its own attempt.
//
// The accepting rank decides after the peer has proven its identity, and before sending its own
// last message of the handshake. An accepted connection becomes a link. A rank that is refused
// tries again a little later; usually the other rank has connected to it in the meantime.
//
// A link over TCP may have several sockets (see ring/msg/). Each socket is connected separately, by
// either rank; the link is connected when all of its sockets are.
//
// Processes that do not belong to the job may connect too. If an incoming handshake fails, its
// connection is closed and forgotten.
//
//     idist__connector_start   starts an attempt to connect to a rank
//     idist__connector_polls   fills a poll set with the descriptors to watch
//     idist__connector_next    advances all handshakes without blocking, up to the next event
//
// An attempt ends with the event that reports its outcome. There is one exception: after an
// IDIST_ERR_NO_FDS event, the attempt continues.
#pragma once

#include "os/clock.h"
#include "os/poll.h"
#include "os/socket.h"
#include "base/fail.h"
#include "base/text.h"
#include "base/mem.h"
#include "base/log.h"
#include "net/address.h"
#include "net/auth.h"
#include "net/secret.h"
#include "net/pending.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/sockets.h"
#include "ring/msg/link.h"
#include "ring/connect/attempt.h"

enum {
    IDIST__CONNECTOR_POLLS = 2 + IDIST__PENDING_SLOTS, // poll entries that are not for attempts
    IDIST__CONNECTOR_LOOK_MS = 50 // interval for checking silent incoming handshakes
};

typedef struct idist__connector {
    idist__ring *ring;
    int rank;             // our rank
    int listeners[2];     // local socket, TCP; -1 if none
    idist__where *where;  // by rank
    int socket_count;     // number of sockets of a link over TCP
    uint64_t job;         // number of the job
    uint8_t key[32];      // authenticates connections of this job
    bool listener_ready;  // a connection may wait at a listener
    bool leaves;          // no new attempts
    bool waits_for_names; // set while ranks join: a host name may become known
    // The rank whose host name could not be resolved in the last attempt to connect to it.
    int unknown_rank;
    // Error text of the last failed lookup of a host name, or "" if none has failed.
    char unknown[256];
    // Time before which nothing is accepted while descriptors are short, or 0 if they are not.
    int64_t no_fds_until_ns;
    idist__attempt *attempts;
    idist__pending incoming;
    int incoming_count; // handshakes in `incoming`
} idist__connector;

static void idist__connector_free(idist__connector *conn) {
    const idist_allocator *mem;

    if (!conn) return;
    mem = &conn->ring->w->cfg.mem;

    while (conn->attempts) {
        idist__attempt *attempt = conn->attempts;
        conn->attempts = attempt->next;
        idist__os_descriptor_close(&attempt->handshake.fd);
        idist__mem_free(mem, attempt);
    }

    idist__pending_close(&conn->incoming);
    idist__os_descriptor_close(&conn->listeners[0]);
    idist__os_descriptor_close(&conn->listeners[1]);
    idist__mem_free(mem, conn->where);
    idist__mem_free(mem, conn);
}

static idist__connector *idist__connector_new(idist__ring *ring) {
    const idist_allocator *mem = &ring->w->cfg.mem;
    size_t n = (size_t)ring->w->group.size;
    idist__connector *conn = (idist__connector *)idist__mem_alloc(mem, sizeof *conn);

    if (!conn) return NULL;
    conn->ring = ring;
    conn->rank = ring->w->group.rank;
    conn->listeners[0] = -1;
    conn->listeners[1] = -1;
    conn->socket_count = 1;
    idist__pending_init(&conn->incoming);
    conn->where = (idist__where *)idist__mem_alloc(mem, sizeof *conn->where * n);
    if (conn->where) return conn;

    idist__connector_free(conn);

    return NULL;
}

// Returns true if this rank reaches the given rank through a local socket.
static bool idist__connector_is_local(const idist__connector *conn, int rank) {
    return idist__address_is_local(conn->where[rank].text);
}

// Returns the list pointer that points to an attempt, or the list's final NULL pointer if there is
// no such attempt.
static idist__attempt **idist__connector_find(idist__connector *conn, int rank, int socket) {
    idist__attempt **at = &conn->attempts;
    while (*at && ((*at)->rank != rank || (*at)->socket != socket)) at = &(*at)->next;
    return at;
}

// Removes an attempt from the list and frees it, whether or not it is done. Does nothing if `at` is
// the end of the list.
static void idist__connector_drop(idist__connector *conn, idist__attempt **at) {
    idist__attempt *attempt = *at;

    if (!attempt) return;
    *at = attempt->next;
    idist__os_descriptor_close(&attempt->handshake.fd);
    idist__mem_free(&conn->ring->w->cfg.mem, attempt);
}

// Drops all attempts to connect to a rank.
static void idist__connector_give_up(idist__connector *conn, int rank) {
    int i;

    for (i = 0; i < IDIST__SOCKETS_MAX; i++)
        idist__connector_drop(conn, idist__connector_find(conn, rank, i));
}

// Returns true if the link to a rank has never been connected and this socket of it is missing.
static bool idist__connector_lacks(const idist__connector *conn, int rank, int socket) {
    const idist__link *l = &conn->ring->links[rank];
    bool is_new = !l->transport || (l->open && !idist__link_is_connected(l));

    return is_new && socket < l->sockets.count && l->sockets.fds[socket] < 0;
}

// Starts to connect to a rank, unless attempts are already under way. Returns false if out of
// memory.
static bool idist__connector_start(idist__connector *conn, int rank) {
    int socket;

    for (socket = 0; socket < IDIST__SOCKETS_MAX && !conn->leaves; socket++) {
        idist__attempt **end = idist__connector_find(conn, rank, socket), *a;

        if (*end || !idist__connector_lacks(conn, rank, socket)) continue;
        a = (idist__attempt *)idist__mem_alloc(&conn->ring->w->cfg.mem, sizeof *a);
        if (!a) return false;
        a->rank = rank;
        a->socket = socket;
        a->handshake.fd = -1;
        *end = a;
    }

    return true;
}

// Makes the connection of a finished handshake a socket of a link. Returns true if there is an
// event: either the link is connected, or it cannot be watched.
static bool idist__connector_add(idist__connector *conn, idist__handshake *shake, int socket,
                                 idist__connect_event *event) {
    int rank = (int)shake->theirs.rank;
    bool local = idist__connector_is_local(conn, rank);
    idist__link *l = &conn->ring->links[rank];

    if (!local) idist__os_socket_measured(shake->fd);
    l->sockets.fds[socket] = shake->fd;
    shake->fd = -1;
    idist__connector_drop(conn, idist__connector_find(conn, rank, socket));
    if (!idist__sockets_is_complete(&l->sockets)) return false;

    event->rank = rank;
    event->status = IDIST_OK;

    if (!idist__link_open(conn->ring, l, local ? &idist__transport_unix : &idist__transport_tcp,
                          &l->sockets)) {
        event->error = errno;
        event->status = idist__fail_errno("watching a connection", errno);
        idist__sockets_close(&l->sockets);
    }

    return true;
}

// ---- accepting ----

// Closes our own attempts to connect to higher ranks, because descriptors are short. These ranks
// may be connecting to us, and their connections need descriptors. Otherwise two ranks with one
// descriptor each would wait for each other. Returns true if it closed any.
static bool idist__connector_give_way(idist__connector *conn) {
    idist__attempt *attempt;
    bool any = false;

    for (attempt = conn->attempts; attempt; attempt = attempt->next) {
        if (attempt->rank < conn->rank || attempt->state == IDIST__ATTEMPT_WAITS) continue;
        if (idist__attempt_is_known(attempt)) continue; // the answer is on its way
        idist__attempt_wait(attempt, 2 * IDIST__ATTEMPT_WAIT_MS);
        any = true;
    }

    return any;
}

static bool idist__connector_accept(idist__connector *conn, int listener,
                                    idist__connect_event *event) {
    idist__handshake *shake = idist__pending_slot(&conn->incoming);

    while (shake) {
        int fd = idist__os_socket_accept(listener);

        if (fd < 0 && idist__os_socket_out_of_fds(errno)) {
            conn->no_fds_until_ns = idist__os_clock_deadline(IDIST__ATTEMPT_WAIT_MS);
            if (idist__pending_evict(&conn->incoming)) return false; // strangers hold the fds
            if (idist__connector_give_way(conn)) return false;
            event->rank = -1;
            event->status = IDIST_ERR_NO_FDS;
            return true;
        }

        if (fd < 0) return false;
        idist__os_descriptor_close(&shake->fd);
        idist__auth_begin(shake, fd, true, conn->key, IDIST__ROLE_LINK, conn->job, conn->rank,
                          conn->ring->w->group.size, idist__os_clock_deadline(IDIST__PENDING_MS));
        idist__auth_set_secrecy(shake, idist__secret_secrecy(&conn->ring->w->cfg.secret));
        shake->asks = true;
        shake->ready = true;
        shake = idist__pending_slot(&conn->incoming);
    }

    return false;
}

// Returns true if we accept the peer of a handshake, which has proven its rank. A lower rank is
// refused only if our own attempt has reached it.
static bool idist__connector_welcomes(idist__connector *conn, const idist__handshake *shake) {
    int rank = (int)shake->theirs.rank;
    int socket = (int)shake->theirs.socket;
    const idist__attempt *ours;

    if (rank < 0 || rank >= conn->ring->w->group.size || rank == conn->rank) return false;
    if (socket < 0 || !idist__connector_lacks(conn, rank, socket)) return false;

    ours = *idist__connector_find(conn, rank, socket);

    return rank > conn->rank || !ours || ours->state != IDIST__ATTEMPT_GREETS;
}

// Advances an incoming handshake. Returns true if there is an event.
static bool idist__connector_answer(idist__connector *conn, idist__handshake *shake,
                                    idist__connect_event *event) {
    bool done = false;
    int socket;
    idist_status status;

    shake->ready = false;
    status = idist__auth_step(shake, &done);
    socket = (int)shake->theirs.socket;

    if (status == IDIST_OK && shake->proven) {
        if (!idist__connector_welcomes(conn, shake)) {
            idist__os_descriptor_close(&shake->fd);
            return false;
        }

        shake->asks = false;
        status = idist__auth_step(shake, &done);
    }

    if (status == IDIST_OK && !done) return false;

    if (status == IDIST_OK && idist__connector_lacks(conn, (int)shake->theirs.rank, socket))
        return idist__connector_add(conn, shake, socket, event);

    idist__os_descriptor_close(&shake->fd);
    if (status != IDIST_OK)
        idist__log_print(&conn->ring->w->log, IDIST_LOG_DEBUG, "a connection was refused: %s",
                         idist__me.text);

    return false;
}

// Accepts connections, and advances all incoming handshakes. Returns true at the first event.
static bool idist__connector_receive(idist__connector *conn, idist__connect_event *event) {
    int64_t now_ns = idist__os_clock_now_ns();
    bool is_full = conn->incoming_count == IDIST__PENDING_SLOTS;
    bool waited = conn->no_fds_until_ns && now_ns >= conn->no_fds_until_ns;
    bool happened = false;
    int i;

    if (waited) conn->no_fds_until_ns = 0;

    for (i = 0; i < 2 && !conn->no_fds_until_ns && (conn->listener_ready || is_full || waited); i++)
        if (conn->listeners[i] >= 0 && !happened)
            happened = idist__connector_accept(conn, conn->listeners[i], event);

    conn->listener_ready = false;

    for (i = 0; i < IDIST__PENDING_SLOTS && !happened; i++) {
        idist__handshake *shake = &conn->incoming.place[i];

        if (shake->fd >= 0 && shake->ready) happened = idist__connector_answer(conn, shake, event);
        if (shake->fd >= 0 && now_ns >= shake->deadline_ns) idist__os_descriptor_close(&shake->fd);
    }

    conn->incoming_count = idist__pending_count(&conn->incoming);

    return happened;
}

// ---- connecting ----

// Begins the handshake of an attempt once its socket is connected: CONNECTS -> GREETS. Returns true
// if there is an event.
static bool idist__connector_connected(idist__connector *conn, idist__attempt *attempt,
                                       idist__connect_event *event) {
    bool local = idist__connector_is_local(conn, attempt->rank);
    int error, fd = attempt->handshake.fd;

    if (!idist__os_poll_wait(fd, IDIST__OS_WRITABLE, 0)) {
        if (idist__os_clock_now_ns() < attempt->due_ns) return false;
        return idist__attempt_failed(attempt, ETIMEDOUT, event);
    }

    error = idist__os_socket_connect_end(&fd, local);
    attempt->handshake.fd = fd;
    if (error) return idist__attempt_failed(attempt, error, event);

    idist__auth_begin(&attempt->handshake, fd, false, conn->key, IDIST__ROLE_LINK, conn->job,
                      conn->rank, conn->ring->w->group.size, IDIST__FOREVER);
    idist__auth_set_socket(&attempt->handshake, attempt->socket);
    idist__auth_set_secrecy(&attempt->handshake, idist__secret_secrecy(&conn->ring->w->cfg.secret));
    attempt->handshake.ready = true;
    attempt->state = IDIST__ATTEMPT_GREETS;

    return false;
}

// Advances the handshake of an attempt. Returns true if there is an event.
static bool idist__connector_greet(idist__connector *conn, idist__attempt *attempt,
                                   idist__connect_event *event) {
    idist__handshake *shake = &attempt->handshake;
    bool done = false;
    idist_status status;

    shake->ready = false;
    status = idist__auth_step(shake, &done);
    if (status == IDIST_OK && !done) return false;

    if (status != IDIST_OK && shake->broke) {              // refused, or the peer had no free slot
        idist__attempt_wait(attempt, 5 + conn->rank % 16); // ranks retry at different times
        return false;
    }

    if (status == IDIST_OK && (int)shake->theirs.rank == attempt->rank)
        return idist__connector_add(conn, shake, attempt->socket, event); // frees the attempt

    if (status == IDIST_OK)
        status = idist__fail(IDIST_ERR_AUTH, "another rank listens at its address");
    event->rank = attempt->rank;
    event->status = status;

    return true;
}

// Handles a failure to resolve the host name of a rank. Returns false if the lookup will be
// repeated.
static bool idist__connector_unknown(idist__connector *conn, idist__attempt *attempt,
                                     const idist__connect_event *event) {
    if (!conn->waits_for_names || event->error || event->status != IDIST_ERR_SYSTEM) return true;

    if (!conn->unknown[0])
        idist__log_print(
            &conn->ring->w->log, IDIST_LOG_WARN,
            "%s (IDIST_ADDR of rank %d); retrying until the name resolves or the time to join is "
            "up",
            idist__me.text, attempt->rank);
    conn->unknown_rank = attempt->rank;
    idist__text_copy(conn->unknown, sizeof conn->unknown, idist__me.text);
    idist__attempt_wait(attempt, IDIST__ATTEMPT_NAME_MS);

    return false;
}

// Advances an attempt, and may free it. Returns true if there is an event. In that case all
// attempts to connect to the rank have been freed, unless descriptors are short.
static bool idist__connector_try(idist__connector *conn, idist__attempt *attempt,
                                 idist__connect_event *event) {
    int rank = attempt->rank;
    bool happened = false;

    if (attempt->state == IDIST__ATTEMPT_WAITS && idist__os_clock_now_ns() >= attempt->due_ns) {
        happened = idist__attempt_begin(attempt, &conn->where[rank], event);
        if (happened) happened = idist__connector_unknown(conn, attempt, event);
        else if (rank == conn->unknown_rank) conn->unknown[0] = 0;
    }

    if (!happened && attempt->state == IDIST__ATTEMPT_CONNECTS)
        happened = idist__connector_connected(conn, attempt, event);
    if (!happened && attempt->state == IDIST__ATTEMPT_GREETS && attempt->handshake.ready)
        happened = idist__connector_greet(conn, attempt, event);
    if (happened && event->status != IDIST_ERR_NO_FDS) idist__connector_give_up(conn, rank);

    return happened;
}

// ---- all of them ----

// Stops connecting, because this rank is leaving the world. Drops the attempts that no peer can
// have accepted. An attempt in which this rank has begun to send its proof of identity continues,
// because the peer may have accepted it; BYE is then sent on its link. Returns true if any attempt
// is left.
static bool idist__connector_leave(idist__connector *conn) {
    const idist__attempt *attempt = conn->attempts;

    conn->leaves = true;

    while (attempt) {
        const idist__attempt *next = attempt->next;

        if (!idist__attempt_is_known(attempt))
            idist__connector_drop(conn,
                                  idist__connector_find(conn, attempt->rank, attempt->socket));
        attempt = next;
    }

    return conn->attempts != NULL;
}

// Returns the time at which the connector has work even if poll reports nothing.
static int64_t idist__connector_due_ns(const idist__connector *conn) {
    const idist__attempt *attempt;
    int64_t due_ns = IDIST__FOREVER;

    if (conn->incoming_count) due_ns = idist__os_clock_deadline(IDIST__CONNECTOR_LOOK_MS);
    if (conn->no_fds_until_ns && conn->no_fds_until_ns < due_ns) due_ns = conn->no_fds_until_ns;
    for (attempt = conn->attempts; attempt; attempt = attempt->next)
        if (attempt->state != IDIST__ATTEMPT_GREETS && attempt->due_ns < due_ns)
            due_ns = attempt->due_ns;

    return due_ns;
}

// Returns the largest number of poll entries that idist__connector_polls fills.
static size_t idist__connector_capacity(const idist__connector *conn) {
    return IDIST__CONNECTOR_POLLS + (size_t)conn->ring->w->group.size * (size_t)conn->socket_count;
}

// Fills a poll set. Returns the number of entries.
static int idist__connector_polls(const idist__connector *conn, idist__os_poll_entry *entries) {
    bool accepts = conn->incoming_count < IDIST__PENDING_SLOTS && !conn->no_fds_until_ns;
    const idist__attempt *attempt;
    int i, count = 0;

    for (i = 0; i < 2; i++)
        if (conn->listeners[i] >= 0 && accepts)
            idist__os_poll_watch(&entries[count++], conn->listeners[i], IDIST__OS_READABLE);

    for (attempt = conn->attempts; attempt; attempt = attempt->next)
        if (attempt->state != IDIST__ATTEMPT_WAITS)
            idist__os_poll_watch(&entries[count++], attempt->handshake.fd,
                                 attempt->state == IDIST__ATTEMPT_CONNECTS
                                     ? IDIST__OS_WRITABLE
                                     : idist__auth_awaits(&attempt->handshake));

    if (conn->incoming_count) count += idist__pending_fill_polls(&conn->incoming, entries + count);

    return count;
}

// Notes that poll has reported at least one of the entries. Does not check which one, because
// another thread may have closed some of them in the meantime. Instead, every listener and every
// handshake is tried.
static void idist__connector_polled(idist__connector *conn) {
    idist__attempt *attempt;
    int i;

    conn->listener_ready = true;
    for (attempt = conn->attempts; attempt; attempt = attempt->next)
        attempt->handshake.ready = true;
    for (i = 0; i < IDIST__PENDING_SLOTS && conn->incoming_count; i++)
        conn->incoming.place[i].ready = true;
}

// Advances everything until there is an event. Returns false if no further progress is possible
// now.
static bool idist__connector_next(idist__connector *conn, idist__connect_event *event) {
    idist__attempt *attempt, *next;

    memset(event, 0, sizeof *event);

    for (attempt = conn->attempts; attempt; attempt = next) {
        next = attempt->next;
        if (idist__connector_try(conn, attempt, event)) return true;
    }

    if (!conn->listener_ready && !conn->incoming_count && !conn->no_fds_until_ns) return false;

    return idist__connector_receive(conn, event);
}
