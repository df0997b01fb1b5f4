// ring/join/links.h: makes the connections that ranks need from the start
//
// Ranks that share memory need connections only while they join. They connect in a tree to agree on
// the memory, and then close the connections. In a world of up to IDIST__LINKS_MANY ranks, all
// other pairs connect. In a larger world, a pair connects if its distance around the ring of all
// ranks is a power of two. These pairs are the partners in the algorithms with few steps, and the
// neighbors in ring algorithms. Reports of a failure spread over their connections. All other pairs
// connect on demand.
//
//   idist__links_want             marks a connection to a rank as wanted
//   idist__links_connect          makes the wanted connections; the higher rank of a pair connects
//   idist__links_connect_others   connects the pairs that share no memory
//
// A failed incoming handshake is ignored. A failed outgoing handshake fails the join. But if the
// connection merely broke, or the host name is not known yet, the rank tries again.
#pragma once

#include "os/clock.h"
#include "os/poll.h"
#include "os/socket.h"
#include "base/fail.h"
#include "base/text.h"
#include "base/mem.h"
#include "net/address.h"
#include "launch/env.h"
#include "ring/msg/ring_model.h"
#include "ring/msg/sockets.h"
#include "ring/msg/link.h"
#include "ring/connect/attempt.h"
#include "ring/connect/connector.h"
#include "ring/join/join_state.h"
#include "ring/join/join_failure.h"

enum {
    IDIST__LINKS_POLL_MS = 20,
    IDIST__LINKS_ASK_MS = 400 // before a rank first asks whether another rank has given up
};

#ifndef IDIST__LINKS_MANY // a test with few ranks sets this to 0
#define IDIST__LINKS_MANY 64
#endif
#ifndef IDIST__LINKS_NEAR // a test sets this to 0: all connections are made on demand
#define IDIST__LINKS_NEAR 1
#endif

// Returns true if two ranks of a large world connect while they join.
static bool idist__links_are_near(int a, int b, int n) {
    int there = a < b ? b - a : a - b, back = n - there;
    return IDIST__LINKS_NEAR && (!(there & (there - 1)) || !(back & (back - 1)));
}

// Finds the address where each rank listens for us: a local socket if possible, otherwise TCP.
static void idist__links_find(idist__join *j) {
    const idist__record *me = &j->records[j->w->group.rank];
    int i;

    for (i = 0; i < j->w->group.size; i++) {
        const idist__record *other = &j->records[i];
        bool local = j->w->cfg.transport != IDIST__TRANSPORT_TCP && other->host == me->host &&
                     other->local[0];
        const char *where = local ? other->local : j->tcp[i].text;

        idist__text_copy(j->connector->where[i].text, sizeof j->connector->where->text, where);
        idist__sockets_set_count(&j->ring->links[i].sockets,
                                 local ? 1 : j->connector->socket_count);
    }
}

static idist_status idist__links_late(const idist__join *j) {
    const idist__connector *conn = j->connector;
    char text[300] = "";
    int i, missing = 0;

    for (i = 0; i < j->w->group.size; i++)
        if (j->wanted[i] && missing++ < 16)
            idist__text_append(text, sizeof text, "%s%d", missing > 1 ? ", " : "", i);

    // The other ranks repeat this text, so the text names this rank.
    if (conn->unknown[0] && j->wanted[conn->unknown_rank])
        return idist__fail(IDIST_ERR_TIMEOUT,
                           "initialize: rank %d on %s was not connected within %d ms to rank %s%s: "
                           "%s (IDIST_ADDR of rank %d)",
                           j->w->group.rank, j->w->about.hostname, j->w->cfg.init_timeout_ms, text,
                           missing > 16 ? ", ..." : "", conn->unknown, conn->unknown_rank);
    return idist__fail(
        IDIST_ERR_TIMEOUT,
        "initialize: rank %d on %s was not connected within %d ms to rank %s%s. Possible causes: "
        "a firewall, a missing route, or a stopped rank",
        j->w->group.rank, j->w->about.hostname, j->w->cfg.init_timeout_ms, text,
        missing > 16 ? ", ..." : "");
}

// Returns true if `where` is an address inside this host, and the user has set the host id, which
// may be wrong. Ranks with the same host id connect by local sockets or through loopback.
static bool idist__links_trust_host_id(const idist__join *j, const char *where) {
    bool is_local = idist__address_is_local(where) || idist__address_is_loopback(where);
    return is_local && j->w->cfg.host_id[0];
}

// Returns true if a rank of another host has published a loopback address. Normally only the
// IDIST_ADDR of that rank causes this.
static bool idist__links_misled(const idist__join *j, int rank, const char *where) {
    bool same_host = j->records[rank].host == j->records[j->w->group.rank].host;
    char host[sizeof j->tcp->text];
    int port;

    return !same_host && idist__address_is_tcp(where) &&
           idist__parse_host_port(where + 4, host, sizeof host, &port) &&
           idist__address_host_is_loopback(host);
}

// Fails because a connection could not be made.
static idist_status idist__links_failed(idist__join *j, const idist__connect_event *event) {
    const char *where = event->rank < 0 ? "" : j->connector->where[event->rank].text;
    char how[sizeof idist__me.text];

    if (event->status == IDIST_ERR_NO_FDS) return idist__join_failure_no_fds(j);

    if (idist__os_socket_is_unreachable(event->error))
        return idist__fail(IDIST_ERR_SYSTEM,
                           "initialize: rank %d on %s cannot be reached at %s (%s): the network "
                           "interface is down, no route leads there, or rank %d on %s has no "
                           "address of that kind",
                           event->rank, j->w->nodes[event->rank].hostname, where,
                           strerror(event->error), j->w->group.rank, j->w->about.hostname);

    idist__text_copy(how, sizeof how, idist__me.text);
    if (!event->error)
        return idist__fail(event->status, "initialize: connecting to rank %d on %s: %s",
                           event->rank, j->w->nodes[event->rank].hostname, how);

    snprintf(how, sizeof how, "no connection to %s: %s", where, strerror(event->error));
    if (idist__links_trust_host_id(j, where))
        idist__text_append(
            how, sizeof how,
            ". It has the IDIST_HOSTID (desc.host_id) of this rank, \"%s\", which only ranks of "
            "one host may share",
            j->w->cfg.host_id);
    else if (idist__links_misled(j, event->rank, where))
        idist__text_append(how, sizeof how,
                           ". That is a loopback address, which the IDIST_ADDR of rank %d gives: "
                           "other hosts cannot reach it",
                           event->rank);

    return idist__join_failure_lost(j, event->rank, how);
}

// Advances all connections as far as possible without blocking.
static idist_status idist__links_progress(idist__join *j) {
    idist__connect_event event;

    while (idist__connector_next(j->connector, &event)) {
        if (event.status != IDIST_OK) return idist__links_failed(j, &event);
        if (j->wanted[event.rank]) j->wanted_count--;
        j->wanted[event.rank] = false;
    }

    return IDIST_OK;
}

// Sleeps until something is ready, then advances the connections.
static idist_status idist__links_turn(idist__join *j, idist__os_poll_entry *entries) {
    int count = idist__connector_polls(j->connector, entries);
    int ms = idist__os_clock_ms_until(j->deadline_ns), ready;

    if (ms == 0) return idist__links_late(j);
    if (ms < 0 || ms > IDIST__LINKS_POLL_MS) ms = IDIST__LINKS_POLL_MS;
    ready = idist__os_poll(entries, count, ms);
    if (ready < 0 && errno != EINTR) return idist__fail_errno("poll", errno);
    if (ready > 0) idist__connector_polled(j->connector);

    return idist__links_progress(j);
}

// Marks a connection to a rank as wanted, unless it exists already.
static void idist__links_want(idist__join *j, int rank) {
    if (j->wanted[rank] || j->ring->links[rank].open) return;
    j->wanted[rank] = true;
    j->wanted_count++;
}

// Makes the wanted connections.
static idist_status idist__links_connect(idist__join *j) {
    size_t capacity = idist__connector_capacity(j->connector);
    idist__os_poll_entry *entries =
        (idist__os_poll_entry *)idist__mem_alloc(&j->w->cfg.mem, sizeof *entries * capacity);
    int64_t asked_ns = idist__os_clock_now_ns();
    int64_t ask_ns = IDIST__LINKS_ASK_MS * IDIST__MS;
    idist_status status = entries ? IDIST_OK : IDIST_ERR_NO_MEMORY;
    int i;

    j->connector->waits_for_names = true;
    for (i = 0; i < j->w->group.rank && status == IDIST_OK; i++)
        if (j->wanted[i] && !idist__connector_start(j->connector, i)) status = IDIST_ERR_NO_MEMORY;
    if (status == IDIST_OK) status = idist__links_progress(j);

    while (status == IDIST_OK && j->wanted_count) {
        status = idist__links_turn(j, entries);

        if (status == IDIST_OK && idist__os_clock_now_ns() - asked_ns > ask_ns) {
            int64_t begun_ns = idist__os_clock_now_ns();

            status = idist__join_failure_check(j); // handshakes make no progress while we ask
            asked_ns = idist__os_clock_now_ns();
            ask_ns = idist__join_state_ask_ms(j) * IDIST__MS + 4 * (asked_ns - begun_ns);
        }
    }

    j->connector->waits_for_names = false;
    idist__mem_free(&j->w->cfg.mem, entries);

    return status;
}

// Connects to the ranks with which we do not share memory: to all of them, or in a large world only
// to some.
static idist_status idist__links_connect_others(idist__join *j) {
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

    if (lacks_some) { // the ring makes the remaining connections
        j->ring->connector = j->connector;
        j->connector = NULL;
    }

    return IDIST_OK;
}
