// ring/connect/attempt.h: one rank connects to another
//
//     WAITS  ->  CONNECTS  ->  GREETS  ->  the connection becomes a link
//
// From CONNECTS and GREETS an attempt may go back to WAITS, for a few milliseconds.
#pragma once

#include "os/clock.h"
#include "os/poll.h"
#include "os/socket.h"
#include "net/address.h"
#include "net/auth.h"

enum {
    // A connect that is not answered is tried again after this time. A handshake has no limit,
    // because the peer may not be in a call.
    IDIST__ATTEMPT_MS = 3000,
    IDIST__ATTEMPT_WAIT_MS = 20,
    IDIST__ATTEMPT_NAME_MS = 100 // before a name that is not known yet is looked up again
};

typedef struct idist__where { // where a rank listens for another one
    char text[160];           // "tcp:[ADDRESS]:PORT" or "unix:NAME"
} idist__where;

typedef enum idist__attempt_state {
    IDIST__ATTEMPT_WAITS,    // until due_ns
    IDIST__ATTEMPT_CONNECTS, // until due_ns at most
    IDIST__ATTEMPT_GREETS    // the handshake is under way
} idist__attempt_state;

typedef struct idist__attempt { // to connect to a rank
    struct idist__attempt *next;
    int rank;
    int socket; // of the link
    idist__attempt_state state;
    int64_t due_ns;
    idist__handshake handshake; // its fd is that of the connection in all states; -1: none
} idist__attempt;

// What has become of a connection. Functions below return true when there is an event.
typedef struct idist__connect_event {
    int rank;            // -1: no rank, this one cannot accept
    idist_status status; // IDIST_OK: the link of that rank is connected
    int error;           // the errno with which connecting failed; 0: idist__me.text tells
} idist__connect_event;

static void idist__attempt_wait(idist__attempt *attempt, int ms) {
    idist__os_descriptor_close(&attempt->handshake.fd);
    attempt->state = IDIST__ATTEMPT_WAITS;
    attempt->due_ns = idist__os_clock_deadline(ms);
}

// Whether the peer may know of it, and may have accepted it, because we have proven who we are.
static bool idist__attempt_is_known(const idist__attempt *attempt) {
    return attempt->state == IDIST__ATTEMPT_GREETS && attempt->handshake.stage >= IDIST__AUTH_PROOF;
}

// Connecting failed. Returns false if it will be tried again without an event.
static bool idist__attempt_failed(idist__attempt *attempt, int error, idist__connect_event *event) {
    idist_status status =
        idist__os_socket_out_of_fds(error) ? IDIST_ERR_NO_FDS : IDIST_ERR_PEER_LOST;

    idist__attempt_wait(attempt, IDIST__ATTEMPT_WAIT_MS);
    if (error == EAGAIN || error == ETIMEDOUT || error == EINTR || error == ENOBUFS ||
        error == ENOMEM) // its accept queue may be full, or memory is short
        return false;
    event->rank = attempt->rank;
    event->error = error;
    event->status = status;

    return true;
}

// WAITS -> CONNECTS.
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
