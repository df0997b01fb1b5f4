// store/client.h: a store behind a socket
//
// Every process has one connection, which its threads share. The process that owns the table
// connects to its own server. A call takes this path:
//
//     idist__client_run -> exchange (encode, send, receive the answer)
//
// A thread that waits for keys would block the connection for other threads, so it waits in slices.
// If another thread wants the connection at the end of a slice, the waiting thread cancels its WAIT
// on the server and asks again later.
#pragma once

#include "os/clock.h"
#include "os/thread.h"
#include "os/poll.h"
#include "os/socket.h"
#include "base/fail.h"
#include "base/mem.h"
#include "net/address.h"
#include "net/meet.h"
#include "net/interface.h"
#include "net/connection.h"
#include "net/auth.h"
#include "net/pending.h"
#include "store/table.h"
#include "store/wire.h"
#include "store/multicast.h"
#include "store/server.h"

enum {
    // Limit for the answer to a request that does not wait for keys. A shorter time-out of the
    // store replaces this limit.
    IDIST__CLIENT_ANSWER_MS = 30000,
    IDIST__CLIENT_LEAST_MS = 1000,   // lower bound of that limit
    IDIST__CLIENT_SLICE_MS = 50,     // time for which a waiting thread keeps the connection
    IDIST__CLIENT_PROBE_MS = 5000,   // time after which WAIT is sent again, to probe the server
    IDIST__CLIENT_ATTEMPT_MS = 2000, // limit for one of several addresses of a host
    IDIST__CLIENT_LACKING_MS = 500,  // how long a process without a secret tries to inform rank 0
    IDIST__CLIENT_RETRY_MS = 10000   // how long a client retries after the server disconnected it
};

typedef struct idist__client_store {
    idist__os_mutex lock;
    int threads_waiting; // number of threads that wait for the lock
    int fd;
    idist__server *server; // NULL except in the process that owns the table
    char *out;             // the encoded request
    size_t nout;
    size_t out_capacity;
    idist_status broken; // why the connection is unusable, or IDIST_OK
    bool is_own;         // the server is ours, not torch's
    int secrecy;         // IDIST__SECRECY_*
    int64_t lacking_ns;  // when a process without a secret stops trying an address on another host
    bool greeted;        // the greeting was sent
    uint64_t server_id;  // the server's random number, if the server is ours
    int answer_ms;       // time that the server may take to answer
    bool owes_number;    // the answer to a posted CLAIM precedes the next answer
    int64_t number;      // the sum of the posted CLAIM, once the next answer has arrived
    char server_at[320]; // address of the server, for error texts
} idist__client_store;

static bool idist__client_put(idist_store *store, const void *data, size_t nbytes) {
    idist__client_store *client = (idist__client_store *)store->impl;

    if (!idist__buffer_reserve(&store->mem, &client->out, &client->out_capacity, client->nout,
                               client->nout + nbytes))
        return false;
    if (nbytes) memcpy(client->out + client->nout, data, nbytes);
    client->nout += nbytes;
    return true;
}

static bool idist__client_put_blob(idist_store *store, idist__blob blob, const char *prefix) {
    uint64_t nbytes = blob.nbytes + strlen(prefix);
    return idist__client_put(store, &nbytes, sizeof nbytes) &&
           idist__client_put(store, prefix, strlen(prefix)) &&
           idist__client_put(store, blob.data, blob.nbytes);
}

static bool idist__client_put_keys(idist_store *store, const idist__store_request *request) {
    uint64_t count = request->nkeys;
    bool ok = idist__client_put(store, &count, sizeof count);
    size_t i;

    for (i = 0; i < request->nkeys && ok; i++)
        ok = idist__client_put_blob(store, request->keys[i], "/");
    return ok;
}

// Encodes the greeting, which tells the server which protocol follows.
static bool idist__client_put_greeting(idist_store *store) {
    const uint8_t op = IDIST__STORE_VALIDATE;
    const uint32_t magic = IDIST__STORE_MAGIC;

    return idist__client_put(store, &op, 1) && idist__client_put(store, &magic, sizeof magic);
}

// Encodes one request for the wire, with the greeting before the first request. Returns false if
// memory is exhausted.
static bool idist__client_encode(idist_store *store, const idist__store_request *request) {
    idist__client_store *client = (idist__client_store *)store->impl;
    const char *field = idist__wire_fields(request->op);
    const idist__blob *value = &request->a;
    uint8_t op = (uint8_t)request->op;
    bool ok;

    client->nout = 0;
    ok = client->greeted || idist__client_put_greeting(store);
    ok = ok && idist__client_put(store, &op, 1);

    for (; ok && field && *field; field++) {
        switch (*field) {
        case 'k': ok = idist__client_put_blob(store, request->key, "/"); break;
        case 'w':
        case 'v':
        case 'h':
            ok = idist__client_put_blob(store, *value, *field == 'w' ? "/" : "");
            value = &request->b;
            break;
        case 'n': ok = idist__client_put(store, &request->number, sizeof request->number); break;
        case 'l': ok = idist__client_put_keys(store, request); break;
        default: break;
        }
    }

    return ok;
}

// Marks the connection as unusable, because it is unknown how much of an answer has yet to arrive.
// The cause is in errno, which is 0 if the server closed the connection.
static idist_status idist__client_break(idist__client_store *client) {
    int error = errno;

    if (error == ETIMEDOUT)
        client->broken =
            idist__fail(IDIST_ERR_TIMEOUT, "store: the server at %s did not answer in time",
                        client->server_at);
    else
        client->broken =
            idist__fail(IDIST_ERR_PEER_LOST, "store: the connection to the server at %s broke: %s",
                        client->server_at, error ? strerror(error) : "it closed");

    return client->broken;
}

static bool idist__client_receive(idist__client_store *client, void *data, size_t nbytes,
                                  int64_t deadline_ns) {
    return idist__connection_read_all(client->fd, data, nbytes, deadline_ns);
}

// Receives the answer to GET or COMPARE_SET into the caller's buffer. Discards a value that does
// not fit. Sets request->flag if the key was deleted after the WAIT.
static idist_status idist__client_receive_value(idist__client_store *client,
                                                idist__store_request *request,
                                                int64_t deadline_ns) {
    uint64_t nbytes, remaining;

    if (!idist__client_receive(client, &nbytes, sizeof nbytes, deadline_ns))
        return idist__client_break(client);
    request->flag = nbytes == IDIST__NO_VALUE;
    if (request->flag) return IDIST_OK;

    if (nbytes > IDIST__VALUE_MAX) {
        errno = EPROTO;
        return idist__client_break(client);
    }

    request->nbytes = (size_t)nbytes;

    if (nbytes <= request->capacity) {
        if (nbytes && !idist__client_receive(client, request->value, (size_t)nbytes, deadline_ns))
            return idist__client_break(client);
        return IDIST_OK;
    }

    for (remaining = nbytes; remaining;) {
        char discarded[4096];
        size_t piece = remaining < sizeof discarded ? (size_t)remaining : sizeof discarded;

        if (!idist__client_receive(client, discarded, piece, deadline_ns))
            return idist__client_break(client);
        remaining -= piece;
    }

    return idist__table_truncated(request->nbytes, request->capacity);
}

// Returns the time by which the server must answer a request that is sent now. The limit of the
// request may be earlier than the limit of the client, but a server always gets at least
// IDIST__CLIENT_LEAST_MS.
static int64_t idist__client_answer_by(const idist__client_store *client,
                                       const idist__store_request *request) {
    int64_t by_ns = idist__os_clock_deadline(client->answer_ms);
    int64_t least_ns = idist__os_clock_deadline(IDIST__CLIENT_LEAST_MS);
    int64_t limit_ns = request->answer_by_ns;

    if (!limit_ns || limit_ns >= by_ns) return by_ns;
    return limit_ns > least_ns ? limit_ns : least_ns;
}

// Cancels the WAIT. Exactly one byte arrives: the answer to the WAIT if it is already under way,
// otherwise the answer to CANCEL_WAIT.
static idist_status idist__client_cancel_wait(idist__client_store *client,
                                              const idist__store_request *request,
                                              uint8_t *answer) {
    int64_t deadline_ns = idist__client_answer_by(client, request);
    uint8_t cancel = IDIST__STORE_CANCEL_WAIT;

    if (!idist__connection_write_all(client->fd, &cancel, 1, deadline_ns) ||
        !idist__client_receive(client, answer, 1, deadline_ns))
        return idist__client_break(client);
    return IDIST_OK;
}

// Receives the answer to a posted CLAIM, if one is due. Returns the status of the connection.
static idist_status idist__client_receive_owed(idist__client_store *client, int64_t deadline_ns) {
    if (!client->owes_number) return IDIST_OK;
    client->owes_number = false;
    if (idist__client_receive(client, &client->number, sizeof client->number, deadline_ns))
        return IDIST_OK;
    return idist__client_break(client);
}

// Waits for keys until the deadline. Returns earlier, at the end of a slice, if another thread
// wants the connection or IDIST__CLIENT_PROBE_MS have passed. Sets request->flag if the keys exist.
static idist_status idist__client_wait(idist__client_store *client, idist__store_request *request) {
    int64_t slice_ns = idist__os_clock_deadline(IDIST__CLIENT_SLICE_MS);
    int64_t probe_ns = idist__os_clock_deadline(IDIST__CLIENT_PROBE_MS);
    uint8_t answer = 0;
    bool answered;

    for (;;) {
        if (slice_ns > request->deadline_ns) slice_ns = request->deadline_ns;
        answered = idist__client_receive(client, &answer, 1, slice_ns);
        if (answered || errno != ETIMEDOUT || slice_ns == request->deadline_ns) break;
        slice_ns = idist__os_clock_deadline(IDIST__CLIENT_SLICE_MS);
        if (__atomic_load_n(&client->threads_waiting, __ATOMIC_RELAXED) ||
            idist__os_clock_ms_until(probe_ns) == 0)
            break;
    }

    if (!answered) {
        idist_status status;

        if (errno != ETIMEDOUT) return idist__client_break(client);
        status = idist__client_cancel_wait(client, request, &answer);
        if (status != IDIST_OK) return status;
    }

    request->flag = answer == 0;

    return IDIST_OK;
}

// Sends one request and receives its answer. A WAIT may end before the keys exist; then
// request->flag is false.
static idist_status idist__client_exchange(idist_store *store, idist__store_request *request) {
    idist__client_store *client = (idist__client_store *)store->impl;
    int64_t deadline_ns = idist__client_answer_by(client, request);
    idist_status status;
    uint8_t byte;

    if (client->broken != IDIST_OK)
        return idist__fail(client->broken,
                           "store: the connection to the server at %s broke earlier",
                           client->server_at);
    if (!idist__client_encode(store, request)) return IDIST_ERR_NO_MEMORY;
    if (!idist__connection_write_all(client->fd, client->out, client->nout, deadline_ns))
        return idist__client_break(client);
    client->greeted = true;

    if (request->posted) {
        client->owes_number = client->owes_number || request->op == IDIST__STORE_CLAIM;
        return IDIST_OK;
    }

    status = idist__client_receive_owed(client, deadline_ns);
    if (status != IDIST_OK) return status;

    switch (request->op) {
    case IDIST__STORE_AWAIT_VALUE:
        status = idist__client_wait(client, request);
        if (status != IDIST_OK || !request->flag) return status;
        status = idist__client_receive_value(client, request, deadline_ns);
        request->flag = status == IDIST_OK;
        return status;
    case IDIST__STORE_GET:
    case IDIST__STORE_COMPARE_SET: return idist__client_receive_value(client, request, deadline_ns);
    case IDIST__STORE_ADD:
    case IDIST__STORE_CLAIM:
    case IDIST__STORE_NUM_KEYS:
    case IDIST__STORE_DELETE:
        if (!idist__client_receive(client, &request->number, sizeof request->number, deadline_ns))
            return idist__client_break(client);
        request->flag = request->number > 0;
        if (request->number == IDIST__NOT_A_NUMBER) return idist__table_not_a_number();
        return IDIST_OK;
    case IDIST__STORE_CHECK:
        if (!idist__client_receive(client, &byte, 1, deadline_ns))
            return idist__client_break(client);
        request->flag = byte == 0;
        return IDIST_OK;
    case IDIST__STORE_WAIT: return idist__client_wait(client, request);
    default: return IDIST_OK;
    }
}

// Waits until every other client can see the value of a SET. SET has no answer, so this function
// sends a CHECK after it and waits for the answer to the CHECK.
static idist_status idist__client_confirm(idist_store *store, const idist__store_request *request) {
    idist__store_request check = *request;
    check.op = IDIST__STORE_CHECK;
    check.keys = &request->key;
    check.nkeys = 1;
    return idist__client_exchange(store, &check);
}

// Tries a request once. Called with the connection locked. Sets *wait if the keys do not exist yet;
// the caller must then try again.
static idist_status idist__client_try(idist_store *store, idist__store_request *request,
                                      bool *wait) {
    const idist__client_store *client = (const idist__client_store *)store->impl;
    idist_status status = IDIST_OK;

    *wait = false;
    if (!client->is_own && request->op == IDIST__STORE_DROP_WILL) return IDIST_OK;

    // torch's server has no CLAIM, which adds 1 and sets a key when the connection ends.
    if (!client->is_own && request->op == IDIST__STORE_CLAIM) {
        request->op = IDIST__STORE_ADD;
        request->number = 1;
    }

    if (request->op == IDIST__STORE_GET && client->is_own) {
        request->op = IDIST__STORE_AWAIT_VALUE;
        status = idist__client_exchange(store, request);
        request->op = IDIST__STORE_GET;
        *wait = status == IDIST_OK && !request->flag;
        return status;
    }

    if (request->op == IDIST__STORE_WAIT || request->op == IDIST__STORE_GET) {
        idist__store_request waiting = *request;

        waiting.op = IDIST__STORE_WAIT;
        waiting.keys = request->nkeys ? request->keys : &request->key;
        waiting.nkeys = request->nkeys ? request->nkeys : 1;
        status = idist__client_exchange(store, &waiting);
        *wait = status == IDIST_OK && !waiting.flag;
        if (status != IDIST_OK || *wait || request->op == IDIST__STORE_WAIT) return status;
    }

    status = idist__client_exchange(store, request);
    if (status == IDIST_OK && request->op == IDIST__STORE_SET && !request->posted)
        status = idist__client_confirm(store, request);
    if (status == IDIST_OK && request->op == IDIST__STORE_GET) *wait = request->flag;

    return status;
}

static idist_status idist__client_run(idist_store *store, idist__store_request *request) {
    idist__client_store *client = (idist__client_store *)store->impl;

    for (;;) {
        idist_status status;
        bool wait;

        __atomic_add_fetch(&client->threads_waiting, 1, __ATOMIC_RELAXED);
        idist__os_mutex_lock(&client->lock);
        __atomic_sub_fetch(&client->threads_waiting, 1, __ATOMIC_RELAXED);
        status = idist__client_try(store, request, &wait);
        idist__os_mutex_unlock(&client->lock);
        if (status != IDIST_OK || !wait) return status;

        if (idist__os_clock_ms_until(request->deadline_ns) == 0)
            return idist__table_timed_out(request, NULL);
        if (__atomic_load_n(&client->threads_waiting, __ATOMIC_RELAXED))
            idist__os_clock_pause_ms(1); // a mutex alone is not fair
    }
}

static void idist__client_close(idist_store *store) {
    idist__client_store *client = (idist__client_store *)store->impl;

    idist__os_descriptor_close(&client->fd);
    if (client->server) idist__server_stop(client->server);
    idist__mem_free(&store->mem, client->out);
    idist__os_mutex_destroy(&client->lock);
    idist__mem_free(&store->mem, client);
}

// Sets the error text for an address where nobody answers. The client keeps trying until its
// deadline and then reports this text.
static idist_status idist__client_unreached(const char *address_text,
                                            const idist__os_address *address, int error) {
    char host[64];

    if (idist__os_socket_is_unreachable(error))
        return idist__fail(IDIST_ERR_TIMEOUT,
                           "%s cannot be reached from here (%s): the network interface is down, "
                           "there is no route, or this host has no %s address",
                           address_text, strerror(error),
                           idist__os_socket_is_ipv4(address) ? "IPv4" : "IPv6");
    if (idist__os_socket_is_local(address))
        return idist__fail(
            IDIST_ERR_TIMEOUT,
            "nobody listens at %s (%s): rank 0 has not started, its MASTER_PORT differs, or it "
            "belongs to another user, network namespace (container) or host. Ranks of one host "
            "meet at a local socket of their user and network namespace",
            address_text, strerror(error));

    idist__os_socket_host_text(address, host, sizeof host);
    // Many systems map their own name to a loopback address in /etc/hosts.
    if (idist__os_socket_is_loopback(address))
        return idist__fail(IDIST_ERR_TIMEOUT,
                           "nobody listens at %s (%s): rank 0 has not started, or is on another "
                           "host: here that address is %s, this host itself",
                           address_text, strerror(error), host);
    if (error == EINVAL && idist__os_socket_is_link_local(address))
        return idist__fail(IDIST_ERR_TIMEOUT,
                           "%s is valid on one link only, so it needs the interface of this host: "
                           "%s%%eth0, for example",
                           address_text, host);
    if (error == ETIMEDOUT)
        return idist__fail(
            IDIST_ERR_TIMEOUT,
            "nobody answers at %s (%s): its host is down, MASTER_ADDR names another host, or a "
            "firewall drops the packets",
            address_text, strerror(error));

    return idist__fail(
        IDIST_ERR_TIMEOUT,
        "nobody listens at %s (%s): rank 0 has not started, or has failed (see its own message), "
        "or MASTER_ADDR / MASTER_PORT differ",
        address_text, strerror(error));
}

// Returns true if the address is beyond this host and this process may connect only within its
// host.
static bool idist__client_lacks_secret(const idist__client_store *client,
                                       const idist__os_address *address) {
    return client->is_own && client->secrecy == IDIST__SECRECY_NONE &&
           !idist__os_socket_is_local(address) && !idist__os_socket_is_loopback(address);
}

static idist_status idist__client_no_secret(const char *address_text) {
    return idist__fail(IDIST_ERR_NO_SECRET,
                       "store: meeting at %s, beyond this host, needs a shared secret, and this "
                       "process has none: set IDIST_SECRET or IDIST_SECRET_FILE on all ranks, or "
                       "IDIST_INSECURE=1 to trust the network",
                       address_text);
}

// Performs the handshake of a new connection. Sets *retry if the server closed the connection,
// because the server may have been full or may have just ended. *give_up_ns is the time when such
// retries end, or 0 as long as no server has closed a connection.
static idist_status idist__client_handshake(idist__client_store *client, const uint8_t key[32],
                                            int64_t deadline_ns, int64_t *give_up_ns, bool *retry) {
    int64_t own_deadline_ns = idist__os_clock_deadline(IDIST__PENDING_MS);
    idist__handshake handshake;
    idist_status status;

    // A server in this process answers immediately or never.
    if (client->server && own_deadline_ns < deadline_ns) deadline_ns = own_deadline_ns;
    idist__auth_begin(&handshake, client->fd, false, key, IDIST__ROLE_STORE, 0, 0, 0, deadline_ns);
    idist__auth_set_secrecy(&handshake, client->secrecy);
    status = idist__auth_run(&handshake);
    if (status != IDIST_OK && client->server &&
        __atomic_load_n(&client->server->out_of_fds, __ATOMIC_RELAXED))
        return idist__fail(IDIST_ERR_NO_FDS, "store: out of file descriptors: raise ulimit -n");
    client->server_id = handshake.theirs.server_id;
    if (!handshake.broke) return status;

    idist__os_descriptor_close(&client->fd);
    if (!*give_up_ns) *give_up_ns = idist__os_clock_deadline(IDIST__CLIENT_RETRY_MS);
    *retry = idist__os_clock_ms_until(*give_up_ns) != 0;

    return status;
}

// Adds the address of the server to the error text of a failed handshake.
static idist_status idist__client_name_server(idist_status status, const char *address_text) {
    if (status == IDIST_OK || status == IDIST_ERR_NO_FDS) return status;
    if (status == IDIST_ERR_TIMEOUT)
        return idist__fail(status,
                           "the server at %s (rank 0) did not answer in time: it is stopped, or "
                           "another program listens there",
                           address_text);
    return idist__fail(status, "the server at %s (rank 0): %s", address_text, idist__me.text);
}

// Makes one attempt to connect. A host may have several addresses, some of which lead nowhere, so
// the number of the attempt selects an address. Sets *retry if the failure may be temporary. A
// process that lacks a secret tries only for a moment. If rank 0 has IDIST_INSECURE=1, it accepts
// the connection within this time. Then every rank can report that this process has no secret.
static idist_status idist__client_attempt(idist__client_store *client, const idist__meet *server,
                                          int number, const uint8_t key[32], int64_t by_ns,
                                          int64_t *give_up_ns, bool *retry) {
    const char *address_text = client->server_at;
    int64_t deadline_ns = by_ns;
    idist__os_address address;
    int count, error;
    idist_status status = idist__meet_resolve(server, number, &count, &address);
    bool local = status == IDIST_OK && idist__os_socket_is_local(&address);
    bool lacks = status == IDIST_OK && idist__client_lacks_secret(client, &address);
    int64_t soon_ns = idist__os_clock_deadline(IDIST__CLIENT_ATTEMPT_MS);

    *retry = false;
    if (status == IDIST_OK && !local && idist__os_socket_port(&address) == 0)
        status = idist__fail(IDIST_ERR_ARG, "store: a client needs the port of the server, not 0");

    if (status != IDIST_OK) {
        *retry = status != IDIST_ERR_ARG; // the name may resolve later
        return status;
    }

    if (lacks && deadline_ns > client->lacking_ns) deadline_ns = client->lacking_ns;
    if (count > 1 && soon_ns < deadline_ns) deadline_ns = soon_ns;
    client->fd = idist__os_socket_connect(&address, deadline_ns);
    error = errno;

    if (client->fd >= 0) {
        if (key) status = idist__client_handshake(client, key, by_ns, give_up_ns, retry);
        return idist__client_name_server(status, address_text);
    }

    if (idist__os_socket_out_of_fds(error)) return idist__fail_errno("socket", error);
    if (local && idist__connection_lacks_local()) return IDIST_ERR_SYSTEM;
    if (lacks && idist__os_clock_ms_until(client->lacking_ns) == 0)
        return idist__client_no_secret(address_text);
    if (error == EPERM)
        return idist__fail(IDIST_ERR_AUTH, "another user of this machine listens at %s",
                           address_text);
    if (*give_up_ns && error == ECONNREFUSED)
        return idist__fail(IDIST_ERR_PEER_LOST,
                           "store: the server at %s (rank 0) was lost during the handshake",
                           address_text);
    *retry = true;

    return idist__client_unreached(address_text, &address, error);
}

// Tries to connect until the server accepts. Initial refusals are normal, because the server may
// start later than this process.
static idist_status idist__client_connect(idist__client_store *client, const idist__meet *server,
                                          const uint8_t key[32], int64_t deadline_ns) {
    int64_t give_up_ns = 0;
    int number = 0, pause_ms = 1;

    idist__meet_print(server, client->server_at, sizeof client->server_at);

    for (;;) {
        bool retry;
        idist_status status =
            idist__client_attempt(client, server, number, key, deadline_ns, &give_up_ns, &retry);

        if (!retry) return status;
        if (idist__os_clock_ms_until(deadline_ns) == 0)
            return idist__fail(IDIST_ERR_TIMEOUT, "store: %s", idist__me.text);
        idist__os_clock_pause_ms(pause_ms);
        if (pause_ms < 50) pause_ms *= 2;
        if (!give_up_ns) number++; // otherwise the server is there, but was full
    }
}

// Asks the multicast group where the server is, and connects. Asks again if the connection fails,
// because anybody may answer, and a server may have ended since its answer.
static idist_status idist__client_find(idist__client_store *client,
                                       const idist__multicast *multicast, const uint8_t key[32],
                                       int64_t deadline_ns) {
    idist__meet server;
    idist_status status;

    memset(&server, 0, sizeof server);

    do {
        int64_t soon_ns = idist__os_clock_deadline(1000);

        status = idist__multicast_ask(multicast, &server, deadline_ns);
        if (status != IDIST_OK) return status;
        status = idist__client_connect(client, &server, key,
                                       soon_ns < deadline_ns ? soon_ns : deadline_ns);
        if (status != IDIST_OK) idist__os_descriptor_close(&client->fd);
    } while (status != IDIST_OK && status != IDIST_ERR_NO_FDS &&
             idist__os_clock_ms_until(deadline_ns) != 0);

    return status;
}

// Where the server listens, and which clients it admits.
typedef struct idist__client_serving {
    const idist__meet *at;
    int listener; // socket that already listens (from idist_spawn or PMI), or -1
    const uint8_t *key;
    int secrecy; // IDIST__SECRECY_*
} idist__client_serving;

// Opens the server's listener, or uses the listener in `serving`. The server listens at:
//   - the port of `at` on all addresses of this host, if `at` is beyond this host and there is a
//     secret, which keeps strangers out
//   - the address that this host advertises, if IDIST_INSECURE is set and the host name of `at`
//     means a loopback address here or cannot be resolved yet
//   - the address itself in all other cases
static idist_status idist__client_listen(const idist__client_serving *serving, int *listener) {
    const idist__meet *at = serving->at;
    char text[320];
    idist__os_address address;
    idist_status status;
    idist__own_address own;
    bool is_public;
    int count;

    *listener = serving->listener;
    if (*listener >= 0) return IDIST_OK;
    idist__meet_print(at, text, sizeof text);
    status = idist__meet_resolve(at, 0, &count, &address);
    is_public = serving->secrecy != IDIST__SECRECY_NONE && at->kind == IDIST__MEET_TCP &&
                status != IDIST_ERR_ARG && !idist__meet_is_loopback(at);

    if (is_public && serving->secrecy == IDIST__SECRECY_SECRET)
        return idist__connection_listen_everywhere(at->port, text, listener);
    if (is_public && (status != IDIST_OK || idist__os_socket_is_loopback(&address)) &&
        idist__interface_choose(NULL, &own) == IDIST_OK)
        return idist__connection_listen_beyond(&own, NULL, at->port, text, listener);

    if (status != IDIST_OK) return status;
    if (serving->secrecy == IDIST__SECRECY_NONE && !idist__os_socket_is_loopback(&address))
        return idist__fail(
            IDIST_ERR_NO_SECRET,
            "listening at %s, beyond this host, needs a shared secret: set IDIST_SECRET or "
            "IDIST_SECRET_FILE on all ranks, or IDIST_INSECURE=1 to trust the network",
            text);

    return idist__connection_listen(&address, text, listener);
}

// Starts the server and sets *own to the address of its socket. From here on the server owns the
// listener and the socket of `multicast`.
static idist_status idist__client_serve(idist_store *store, const idist__client_serving *serving,
                                        idist__multicast *multicast, idist__meet *own) {
    idist__client_store *client = (idist__client_store *)store->impl;
    idist__os_address address;
    char ip[64];
    int listener;
    idist_status status = idist__client_listen(serving, &listener);

    if (status != IDIST_OK) return status;

    if (idist__os_socket_own_address(listener, &address) && !idist__os_socket_is_local(&address)) {
        store->port = idist__os_socket_port(&address);
        idist__os_socket_host_text(&address, ip, sizeof ip);
        if (strcmp(ip, "::") == 0 || strcmp(ip, "0.0.0.0") == 0) // all addresses
            idist__interface_reach_self(serving->at, ip, sizeof ip);
        idist__meet_set_host(own, IDIST__MEET_TCP, ip, store->port);
    }

    return idist__server_start(&store->mem, listener, store->port, multicast, serving->key,
                               serving->secrecy, &client->server);
}

// Starts the server if `server` is true. Then connects to the server.
static idist_status idist__client_begin(idist_store *store, idist__client_serving *serving,
                                        bool server, int64_t deadline_ns) {
    idist__client_store *client = (idist__client_store *)store->impl;
    bool by_multicast = serving->at->kind == IDIST__MEET_MULTICAST;
    idist__meet at = *serving->at, own;
    char text[320];
    idist__multicast multicast;
    idist_status status = IDIST_OK;

    memset(&multicast, 0, sizeof multicast);
    multicast.fd = -1;

    if (by_multicast) {
        status = idist__multicast_open(&multicast, serving->at, server, serving->key);
        if (server) idist__meet_set_host(&at, IDIST__MEET_TCP, multicast.ip, 0);
    }

    client->is_own = serving->key != NULL;
    client->secrecy = serving->secrecy;
    if (status == IDIST_OK && by_multicast && !server && serving->secrecy == IDIST__SECRECY_NONE &&
        !idist__address_host_is_loopback(multicast.ip))
        status = idist__client_no_secret(idist__meet_print(serving->at, text, sizeof text) + 5);

    serving->at = &at;
    own = at;
    if (status == IDIST_OK && server)
        status = idist__client_serve(store, serving, &multicast, &own);

    if (status == IDIST_OK && by_multicast && !server)
        status = idist__client_find(client, &multicast, serving->key, deadline_ns);
    else if (status == IDIST_OK)
        status = idist__client_connect(client, &own, serving->key, deadline_ns);
    idist__os_descriptor_close(&multicast.fd); // -1 if the server owns the socket now
    serving->at = NULL;

    return status;
}

// Opens a store at a meeting place of kind LOCAL, TCP or MULTICAST. Takes ownership of
// serving->listener. If serving->key is NULL, the server is torch's and there is no handshake. When
// this function fails, the caller closes the store.
static idist_status idist__client_open(idist_store *store, idist__client_serving *serving,
                                       bool server, int64_t deadline_ns) {
    idist__client_store *client =
        (idist__client_store *)idist__mem_alloc(&store->mem, sizeof *client);

    if (!client) {
        idist__os_descriptor_close(&serving->listener);
        return IDIST_ERR_NO_MEMORY;
    }

    client->fd = -1;
    client->lacking_ns = idist__os_clock_deadline(IDIST__CLIENT_LACKING_MS);
    client->answer_ms = IDIST__CLIENT_ANSWER_MS;
    if (store->timeout_ms > 0 && store->timeout_ms < client->answer_ms)
        client->answer_ms = store->timeout_ms;
    if (client->answer_ms < IDIST__CLIENT_LEAST_MS) client->answer_ms = IDIST__CLIENT_LEAST_MS;
    idist__os_mutex_init(&client->lock);
    store->impl = client;
    store->run = idist__client_run;
    store->close = idist__client_close;

    return idist__client_begin(store, serving, server, deadline_ns);
}
