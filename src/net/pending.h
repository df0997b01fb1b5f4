// net/pending.h: connections whose handshake is under way
//
// The number of slots is fixed, so that strangers cannot make us allocate memory. When all slots
// are taken, new connections stay in the listener's queue until a pending connection may be
// evicted:
//
//     first   a connection whose deadline has passed
//     then    the oldest connection that has sent nothing for 50 ms
//     then    the oldest connection that began more than a second ago
//
// An honest client that is evicted because it got no processor time tries again.
#pragma once

#include "os/clock.h"
#include "os/poll.h"
#include "net/auth.h"

enum {
    IDIST__PENDING_SLOTS = 256, // connections in the handshake at a time
    IDIST__PENDING_MS = 5000,   // time limit of a handshake
    IDIST__PENDING_SILENT_MS = 50,
    IDIST__PENDING_SLOW_MS = 1000
};

typedef struct idist__pending {
    idist__handshake place[IDIST__PENDING_SLOTS]; // fd is -1 in a free slot
} idist__pending;

static void idist__pending_init(idist__pending *pending) {
    int i;
    memset(pending, 0, sizeof *pending);
    for (i = 0; i < IDIST__PENDING_SLOTS; i++) pending->place[i].fd = -1;
}

static void idist__pending_close(idist__pending *pending) {
    int i;
    for (i = 0; i < IDIST__PENDING_SLOTS; i++) idist__os_descriptor_close(&pending->place[i].fd);
}

// Returns the time in ns when a handshake began.
static int64_t idist__pending_since_ns(const idist__handshake *shake) {
    return shake->deadline_ns - IDIST__PENDING_MS * IDIST__MS;
}

// Returns the connection to evict first, or NULL if none may be evicted now.
static idist__handshake *idist__pending_find_evictable(idist__pending *pending) {
    int64_t now = idist__os_clock_now_ns();
    idist__handshake *silent = NULL, *slow = NULL;
    int i;

    for (i = 0; i < IDIST__PENDING_SLOTS; i++) {
        idist__handshake *shake = &pending->place[i];
        idist__handshake **oldest = shake->stage || shake->done ? &slow : &silent;

        if (shake->fd < 0) continue;
        if (now >= shake->deadline_ns) return shake;
        if (!*oldest || shake->deadline_ns < (*oldest)->deadline_ns) *oldest = shake;
    }

    if (silent && now - idist__pending_since_ns(silent) >= IDIST__PENDING_SILENT_MS * IDIST__MS)
        return silent;
    if (slow && now - idist__pending_since_ns(slow) >= IDIST__PENDING_SLOW_MS * IDIST__MS)
        return slow;

    return NULL;
}

// Returns a slot for a new connection, or NULL if there is none now. The slot is free or holds the
// connection to evict, which the caller closes after it has accepted the new connection.
static idist__handshake *idist__pending_slot(idist__pending *pending) {
    int i;
    for (i = 0; i < IDIST__PENDING_SLOTS; i++)
        if (pending->place[i].fd < 0) return &pending->place[i];
    return idist__pending_find_evictable(pending);
}

static int idist__pending_count(const idist__pending *pending) {
    int i, count = 0;

    for (i = 0; i < IDIST__PENDING_SLOTS; i++)
        if (pending->place[i].fd >= 0) count++;

    return count;
}

// Evicts a connection, if one may be evicted, to free its descriptor. Returns false if no
// connection is pending; then strangers are not the cause of the shortage.
static bool idist__pending_evict(idist__pending *pending) {
    idist__handshake *evicted = idist__pending_find_evictable(pending);

    if (evicted) {
        idist__os_descriptor_close(&evicted->fd);
        return true;
    }

    return idist__pending_count(pending) > 0;
}

// Fills the poll entries for all pending connections, and returns their number.
static int idist__pending_fill_polls(const idist__pending *pending, idist__os_poll_entry *polls) {
    int i, count = 0;

    for (i = 0; i < IDIST__PENDING_SLOTS; i++) {
        const idist__handshake *shake = &pending->place[i];
        if (shake->fd >= 0)
            idist__os_poll_watch(&polls[count++], shake->fd, idist__auth_awaits(shake));
    }

    return count;
}

// Marks the connections that poll has reported. No connection may have been opened or closed since
// idist__pending_fill_polls.
static void idist__pending_take_polls(idist__pending *pending, const idist__os_poll_entry *polls) {
    int i, count = 0;

    for (i = 0; i < IDIST__PENDING_SLOTS; i++) {
        if (pending->place[i].fd < 0) continue;
        pending->place[i].ready = idist__os_poll_ready(&polls[count]);
        count++;
    }
}
