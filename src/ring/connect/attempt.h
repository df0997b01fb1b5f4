// ring/connect/attempt.h: one attempt of a rank to connect to another
//
//     WAITS  ->  CONNECTS  ->  GREETS  ->  the connection becomes a link
//
// From CONNECTS and GREETS, an attempt may return to WAITS for at most 40 ms.
#pragma once

#include "os/clock.h"
#include "os/poll.h"
#include "os/socket.h"
#include "net/address.h"
#include "net/auth.h"

enum {
    // Time after which an unanswered connect is retried. A handshake has no time limit, because the
    // peer may not be in a call.
    IDIST__ATTEMPT_MS = 3000,
    IDIST__ATTEMPT_WAIT_MS = 20,
    IDIST__ATTEMPT_NAME_MS = 100 // wait before a name that is not known yet is looked up again
};

typedef struct idist__where { // the address where a rank listens for another rank
    char text[160];           // "tcp:[ADDRESS]:PORT" or "unix:NAME"
} idist__where;

typedef enum idist__attempt_state {
    IDIST__ATTEMPT_WAITS,    // until due_ns
    IDIST__ATTEMPT_CONNECTS, // until due_ns at most
    IDIST__ATTEMPT_GREETS    // the handshake is under way
} idist__attempt_state;

typedef struct idist__attempt { // one attempt to connect to a rank
    struct idist__attempt *next;
    int rank;
    int socket; // index of the socket in the link
    idist__attempt_state state;
    int64_t due_ns;
    idist__handshake handshake; // its fd is the connection in all states, or -1
} idist__attempt;

// The outcome of an attempt or of an accept. A function with an event parameter returns true if it
// has stored an event there.
typedef struct idist__connect_event {
    int rank;            // the peer, or -1 if this rank cannot accept connections
    idist_status status; // IDIST_OK if the link to the peer is connected
    int error;           // the errno of a failed connect, or 0 if idist__me.text has the reason
} idist__connect_event;

static void idist__attempt_wait(idist__attempt *attempt, int ms) {
    idist__os_descriptor_close(&attempt->handshake.fd);
    attempt->state = IDIST__ATTEMPT_WAITS;
    attempt->due_ns = idist__os_clock_deadline(ms);
}

// Returns true if the peer may have accepted an attempt, because this rank has begun to send its
// proof of identity.
static bool idist__attempt_is_known(const idist__attempt *attempt) {
    return attempt->state == IDIST__ATTEMPT_GREETS && attempt->handshake.stage >= IDIST__AUTH_PROOF;
}

// Handles a failed connect. Returns false if there is no event, because the attempt will simply be
// repeated.
static bool idist__attempt_failed(idist__attempt *attempt, int error, idist__connect_event *event) {
    idist_status status =
        idist__os_socket_out_of_fds(error) ? IDIST_ERR_NO_FDS : IDIST_ERR_PEER_LOST;

    idist__attempt_wait(attempt, IDIST__ATTEMPT_WAIT_MS);
    if (error == EAGAIN || error == ETIMEDOUT || error == EINTR || error == ENOBUFS ||
        error == ENOMEM) // the peer's accept queue may be full, or memory is short
        return false;
    event->rank = attempt->rank;
    event->error = error;
    event->status = status;

    return true;
}

// Begins to connect: WAITS -> CONNECTS. Returns true if there is an event.
static bool idist__attempt_begin(idist__attempt *attempt, const idist__where *where,
                                 idist__connect_event *event) {
    idist__os_address address;
    int fd;

    event->rank = attempt->rank;
    event->status = idist__address_parse(&address, where->text);
    if (event->status != IDIST_OK) return true;
    fd = idist__os_socket_connect_begin(&address);
    if (fd < 0) return idist__attempt_failed(attempt, errno, event);

    memset(&attempt->handshake, 0, sizeof attempt->handshake);
    attempt->handshake.fd = fd;
    attempt->state = IDIST__ATTEMPT_CONNECTS;
    attempt->due_ns = idist__os_clock_deadline(IDIST__ATTEMPT_MS);

    return false;
}
