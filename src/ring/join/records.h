// ring/join/records.h: exchanges the job number, and a record of every rank
//
// Rank 0 generates a random job number. The key of all connections is derived from this number and
// the secret. Then each rank publishes a record: its host, and the address of its local socket.
// Rank 0 collects the records in one table, so that n ranks make 2 n requests instead of n * n. The
// table tells whether TCP is needed at all.
#pragma once

#include "os/random.h"
#include "os/process.h"
#include "os/socket.h"
#include "base/fail.h"
#include "base/text.h"
#include "base/mem.h"
#include "base/hash.h"
#include "net/address.h"
#include "net/interface.h"
#include "net/connection.h"
#include "net/secret.h"
#include "store/client.h"
#include "launch/env.h"
#include "launch/config.h"
#include "core/model.h"
#include "ring/msg/ring_model.h"
#include "ring/join/join_state.h"
#include "ring/join/join_store.h"

// Agrees on the job number and the number of ranks. Rank 0 publishes them, and every other rank
// compares the number of ranks with its own.
static idist_status idist__records_agree_on_job(idist__join *j) {
    uint64_t job[2] = {0, 0}; // number of the job, number of ranks
    uint8_t key[32];
    idist_status status;

    if (j->w->group.rank == 0) {
        idist__os_random(job, sizeof job);
        job[1] = (uint64_t)j->w->group.size;
        status = idist__join_state_set(j, "job", -1, job, sizeof job);
    } else {
        status = idist__join_store_get(j, "job", -1, NULL, job, sizeof job);
        status = idist__join_store_claim(j, status);
    }

    if (status != IDIST_OK) return status;
    if (job[1] != (uint64_t)j->w->group.size)
        return idist__fail(
            IDIST_ERR_ENV,
            "initialize: rank 0 was started with a world of %llu ranks, this rank with %d%s",
            (unsigned long long)job[1], j->w->group.size,
            j->owns_store ? ""
                          : "; or desc.store still holds an earlier world: give each world its own "
                            "prefix (idist_store_prefix)");

    j->connector->job = job[0];
    idist__secret_key(&j->w->cfg.secret, key);
    idist__sha_hmac(key, "links", &job[0], sizeof job[0], NULL, 0, j->connector->key);

    return IDIST_OK;
}

static idist_status idist__records_listen_local(idist__join *j, idist__record *me) {
    idist__os_address address;
    uint64_t id[2];
    idist_status status;

    idist__os_random(id, sizeof id);
    snprintf(me->local, sizeof me->local, "unix:idist-%016llx%016llx", (unsigned long long)id[0],
             (unsigned long long)id[1]);
    status = idist__address_parse(&address, me->local);
    if (status != IDIST_OK) return status;

    return idist__connection_listen(&address, me->local, &j->connector->listeners[0]);
}

// Finds the local address of our connection to the store. Returns false if the store belongs to the
// user, or is not reached by TCP.
static bool idist__records_store_address(const idist__join *j, idist__os_address *address) {
    return j->owns_store && j->store->run == idist__client_run &&
           idist__os_socket_own_address(((idist__client_store *)j->store->impl)->fd, address) &&
           !idist__os_socket_is_local(address);
}

// Finds the address to publish: 127.0.0.1 if `by_loopback` is set and IDIST_ADDR is not.
// `by_loopback` is set in two cases. In the first, all ranks are on one host, and the user wants
// TCP. In the second, all ranks have reached the store through loopback, so they can also reach
// each other through loopback.
static idist_status idist__records_own_address(const idist__join *j, bool by_loopback,
                                               idist__own_address *own) {
    idist__os_address hint;

    if (!by_loopback || idist__os_env("IDIST_ADDR"))
        return idist__interface_choose(idist__records_store_address(j, &hint) ? &hint : NULL, own);

    memset(own, 0, sizeof *own);
    idist__text_copy(own->ip, sizeof own->ip, "127.0.0.1");

    return IDIST_OK;
}

// Listens on all addresses if a secret keeps strangers out. Otherwise listens only at the published
// address, or at this host's own address if IDIST_ADDR gives one that cannot be used here. If
// IDIST_ADDR gives a name, every rank resolves the name on its own host, and the results may
// differ.
static idist_status idist__records_listen_at(idist__join *j, const idist__own_address *own,
                                             bool by_loopback) {
    const idist__secret *secret = &j->w->cfg.secret;
    int *listener = &j->connector->listeners[1];
    bool is_loopback = idist__address_host_is_loopback(own->ip);
    idist__os_address address, hint;
    bool has_hint = idist__records_store_address(j, &hint);
    idist_status status;

    if (secret->nbytes && !is_loopback)
        return idist__connection_listen_everywhere(0, own->ip, listener);
    if (secret->insecure && !is_loopback && !by_loopback)
        return idist__connection_listen_beyond(own, has_hint ? &hint : NULL, 0, own->ip, listener);

    status = idist__address_tcp(&address, own->ip, 0);
    if (status != IDIST_OK && (is_loopback || secret->insecure))
        return idist__fail(status, "initialize: IDIST_ADDR: %s", idist__me.text);
    if (status == IDIST_OK && (secret->insecure || idist__os_socket_is_loopback(&address)))
        return idist__connection_listen(&address, own->ip, listener);

    return idist__fail(IDIST_ERR_NO_SECRET,
                       "initialize: listening at %s, beyond this host, needs a shared secret: set "
                       "IDIST_SECRET or IDIST_SECRET_FILE on all ranks, or IDIST_INSECURE=1 to "
                       "trust the network",
                       own->ip);
}

static idist_status idist__records_listen_tcp(idist__join *j, bool by_loopback) {
    idist__world *w = j->w;
    idist__tcp_record *me = &j->tcp[w->group.rank];
    idist__os_address address;
    idist__own_address own;
    idist_status status = idist__records_own_address(j, by_loopback, &own);

    if (status == IDIST_OK) status = idist__records_listen_at(j, &own, by_loopback);
    if (status != IDIST_OK) return status;
    if (!idist__os_socket_own_address(j->connector->listeners[1], &address))
        return idist__fail_errno("initialize: asking for the port of a listener", errno);
    snprintf(me->text, sizeof me->text, "tcp:[%s]:%d", own.ip, idist__os_socket_port(&address));
    snprintf(w->about.advertised, sizeof w->about.advertised, own.ifname[0] ? "%s (%s)" : "%s",
             own.ip, own.ifname);

    if (idist__records_store_address(j, &address))
        me->round_trip_us =
            idist__os_socket_round_trip_us(((idist__client_store *)j->store->impl)->fd);
    if (own.ifname[0]) me->mbits = idist__os_socket_interface_mbits(own.ifname);
    me->sockets = (uint32_t)w->cfg.sockets;
    me->window_nbytes = idist__os_socket_window_nbytes();

    return IDIST_OK;
}

// Exchanges the rows of a table. Every rank has filled in its own row. Rank 0 collects the rows,
// under the name `row`, and publishes the whole table as `all`.
static idist_status idist__records_exchange(idist__join *j, const char *row, const char *all,
                                            void *table, size_t row_nbytes) {
    char *rows = (char *)table;
    int i, n = j->w->group.size, me = j->w->group.rank;
    idist_status status =
        idist__join_state_set(j, row, me, rows + (size_t)me * row_nbytes, row_nbytes);

    if (status != IDIST_OK) return status;
    if (me) return idist__join_store_get(j, all, -1, row, table, row_nbytes * (size_t)n);

    for (i = 1; i < n; i++) {
        status = idist__join_store_get(j, row, i, NULL, rows + (size_t)i * row_nbytes, row_nbytes);
        if (status != IDIST_OK) return status;
    }

    return idist__join_state_set(j, all, -1, table, row_nbytes * (size_t)n);
}

// Combines the network properties in all records: the longest round trip, the lowest bandwidth, the
// smallest window and the highest number of sockets. All ranks have the same table, so they get the
// same result.
static idist__tcp_record idist__records_network(const idist__join *j) {
    idist__tcp_record all;
    int i;

    memset(&all, 0, sizeof all);

    for (i = 0; i < j->w->group.size; i++) {
        const idist__tcp_record *record = &j->tcp[i];
        uint64_t window_nbytes = record->window_nbytes;

        if (record->round_trip_us > all.round_trip_us) all.round_trip_us = record->round_trip_us;
        if (record->mbits && (!all.mbits || record->mbits < all.mbits)) all.mbits = record->mbits;
        if (record->sockets > all.sockets && record->sockets <= IDIST__SOCKETS_MAX)
            all.sockets = record->sockets;
        if (window_nbytes && (!all.window_nbytes || window_nbytes < all.window_nbytes))
            all.window_nbytes = window_nbytes;
    }

    return all;
}

// Returns the number of bytes in flight when the network is full: bandwidth times round trip.
// Assumes at least 1000 Mbit/s, because virtual interfaces report a bandwidth that is too low, or
// none. Posting more receives than needed costs little.
static uint64_t idist__records_network_nbytes(const idist__tcp_record *network) {
    enum { LEAST_MBITS = 1000 };
    uint64_t least = LEAST_MBITS, mbits = network->mbits > least ? network->mbits : least;

    return network->round_trip_us * mbits / 8;
}

// Returns the number of sockets that fill the network when each holds one window of data. Uses only
// the reported bandwidth, because unneeded sockets compete with each other on a slow link.
static int idist__records_fill_sockets(const idist__tcp_record *network) {
    uint64_t nbytes = (uint64_t)network->round_trip_us * network->mbits / 8;
    uint64_t count = network->window_nbytes ? nbytes / network->window_nbytes + 1 : 1;

    return count < IDIST__SOCKETS_MAX ? (int)count : IDIST__SOCKETS_MAX;
}

// Records the properties of the network between the hosts, and the number of sockets of a link.
static void idist__records_measure(idist__join *j, bool by_loopback) {
    enum { OVERHEAD_US = 5 }; // time that the sender and the receiver add
    idist__tcp_record network = idist__records_network(j);
    char *text = j->w->about.network;
    size_t capacity = sizeof j->w->about.network;

    if (!by_loopback) j->w->machine.network_nbytes = idist__records_network_nbytes(&network);
    j->connector->socket_count = by_loopback ? 1 : idist__records_fill_sockets(&network);
    if (network.sockets) j->connector->socket_count = (int)network.sockets;

    if (!by_loopback && network.round_trip_us && network.mbits) {
        uint64_t one_way_us = network.round_trip_us / 2 + OVERHEAD_US;

        j->w->machine.latency_nbytes = one_way_us * network.mbits / 8;
        snprintf(text, capacity, "%u us round trip, %u Mbit/s, ", network.round_trip_us,
                 network.mbits);
    }

    if (text[0] || j->connector->socket_count > 1)
        idist__text_append(text, capacity, "%d socket%s to each rank", j->connector->socket_count,
                           j->connector->socket_count > 1 ? "s" : "");
}

// Exchanges the addresses of the TCP sockets, and derives the number of sockets of a link.
static idist_status idist__records_exchange_tcp(idist__join *j, bool by_loopback) {
    size_t i, n = (size_t)j->w->group.size;
    idist_status status;

    j->tcp = (idist__tcp_record *)idist__mem_alloc(&j->w->cfg.mem, sizeof *j->tcp * n);
    if (!j->tcp) return IDIST_ERR_NO_MEMORY;
    status = idist__records_listen_tcp(j, by_loopback);
    if (status != IDIST_OK) return status;

    status = idist__records_exchange(j, "tcp", "tcps", j->tcp, sizeof *j->tcp);
    for (i = 0; i < n; i++) j->tcp[i].text[sizeof j->tcp->text - 1] = 0;
    if (status == IDIST_OK) idist__records_measure(j, by_loopback);

    return status;
}

// Checks the record of a rank and stores its host.
static idist_status idist__records_enter(idist__join *j, idist__record *record, int rank) {
    idist__world *w = j->w;

    record->hostname[sizeof record->hostname - 1] = 0;
    record->local[sizeof record->local - 1] = 0;
    idist__text_copy(w->nodes[rank].hostname, sizeof w->nodes[rank].hostname, record->hostname);
    w->nodes[rank].host = record->host;

    if (record->algorithm != (uint32_t)w->cfg.algorithm)
        return idist__fail(
            IDIST_ERR_ENV,
            "initialize: IDIST_ALGO (desc.algorithm) differs between rank %d and rank %d", rank,
            w->group.rank);

    return IDIST_OK;
}

static idist_status idist__records_make(idist__join *j, idist__record *records) {
    idist__world *w = j->w;
    idist__record *me = &records[w->group.rank];
    uint64_t host = idist__config_host_key(&w->cfg);
    bool one_host = true, all_local = true, all_loopback = true;
    idist__os_address address;
    idist_status status = IDIST_OK;
    int i;

    idist__text_copy(me->hostname, sizeof me->hostname, w->about.hostname);
    me->host = host;
    me->processors = idist__config_processor_key();
    me->shm = w->cfg.transport == IDIST__TRANSPORT_AUTO;
    me->algorithm = (uint32_t)w->cfg.algorithm;
    if (idist__records_store_address(j, &address) && idist__os_socket_is_loopback(&address))
        me->loopback = idist__config_reach_key();
    if (w->cfg.transport != IDIST__TRANSPORT_TCP) status = idist__records_listen_local(j, me);
    if (status == IDIST_OK)
        status = idist__records_exchange(j, "node", "nodes", records, sizeof *records);

    for (i = 0; i < w->group.size && status == IDIST_OK; i++) {
        status = idist__records_enter(j, &records[i], i);
        if (records[i].host != host) one_host = false;
        if (!records[i].local[0]) all_local = false; // that rank uses TCP only
        if (!me->loopback || records[i].loopback != me->loopback) all_loopback = false;
        if (records[i].processors != me->processors) continue;
        if (i < w->group.rank) w->machine.sharing_rank++;
        w->machine.sharing_size++;
    }

    j->records = records;
    if (status == IDIST_OK && !(one_host && all_local)) // all ranks reach the same decision
        status = idist__records_exchange_tcp(j, one_host || all_loopback);

    return status;
}
