// store/server.h: the server: one thread, one table, many connections
//
// The thread polls its listener, its clients, and the pending connections, whose handshakes are not
// complete yet. The bytes of one client take this path:
//
//     idist__server_main -> read -> serve (parse, request, reply) -> write
//
// A request that waits stays at the front of its client's input. The server tries it again whenever
// the table has changed. Meanwhile the client sends nothing except CANCEL_WAIT.
#pragma once

#include "os/clock.h"
#include "os/random.h"
#include "os/thread.h"
#include "os/poll.h"
#include "os/socket.h"
#include "base/fail.h"
#include "base/mem.h"
#include "net/auth.h"
#include "net/pending.h"
#include "store/table.h"
#include "store/wire.h"
#include "store/multicast.h"

enum { IDIST__SERVER_CLIENTS = 4096 };

// Indices of the server's own poll entries. The clients and the pending connections follow.
enum {
    IDIST__SERVER_POLL_WAKE,
    IDIST__SERVER_POLL_LISTENER,
    IDIST__SERVER_POLL_MULTICAST,
    IDIST__SERVER_POLL_CLIENTS
};

// A connection whose handshake is complete.
typedef struct idist__server_client {
    int fd;
    bool valid;   // the client has sent the magic number
    bool waiting; // the first request in `in` waits for keys
    idist__buffer in;
    idist__buffer out;
    char *will; // the key, then the value; see idist__store_request
    size_t will_key_nbytes;
    size_t will_nbytes;
} idist__server_client;

typedef struct idist__server {
    idist_allocator mem;
    uint8_t key[32];
    // Random, so that clients can tell this server from the next server at its address.
    uint64_t id;
    int listener;
    int wake; // wake-up descriptor, signaled to end the thread
    int port;
    idist__multicast multicast;
    idist__os_thread thread;
    bool running;
    int secrecy; // IDIST__SECRECY_*
    idist__table table;
    idist__blob *keys; // scratch of the parser
    char *value;       // scratch of the replies
    idist__os_poll_entry *polls;
    idist__pending pending;
    idist__server_client *clients[IDIST__SERVER_CLIENTS];
    int client_count;
    bool will_executed;   // a will has changed the table
    int refused_count;    // failed handshakes; rank 0 reports them when it times out
    int other_byte_order; // a machine with another byte order tried to connect
    int out_of_fds;       // a connection was not accepted, because descriptors ran out
    // Error text about the first client with a different secret. Constant once is_unlike is set.
    char unlike[300];
    int is_unlike;
} idist__server;

// Executes the will of a client that has ended without withdrawing it. Does nothing if the key
// already has a value.
static void idist__server_execute_will(idist__server *server, const idist__server_client *client) {
    idist__blob key;

    key.data = client->will;
    key.nbytes = client->will_key_nbytes;
    if (*idist__table_find(&server->table, key)) return;
    server->will_executed =
        idist__table_put(&server->table, key, client->will + client->will_key_nbytes,
                         client->will_nbytes - client->will_key_nbytes) == IDIST_OK;
}

// Drops a client and executes its will, if there is one. The last client takes the index of the
// dropped client.
static void idist__server_drop(idist__server *server, int index) {
    idist__server_client *client = server->clients[index];

    idist__os_descriptor_close(&client->fd);
    if (client->will_key_nbytes) idist__server_execute_will(server, client);
    idist__mem_free(&server->mem, client->will);
    idist__mem_free(&server->mem, client->in.data);
    idist__mem_free(&server->mem, client->out.data);
    idist__mem_free(&server->mem, client);
    server->clients[index] = server->clients[--server->client_count];
}

static bool idist__server_reply(idist__server *server, idist__server_client *client,
                                const void *data, size_t nbytes) {
    return idist__buffer_append(&server->mem, &client->out, data, nbytes);
}

static bool idist__server_reply_value(idist__server *server, idist__server_client *client,
                                      const idist__store_request *request) {
    uint64_t nbytes = request->nbytes;
    return idist__server_reply(server, client, &nbytes, sizeof nbytes) &&
           idist__server_reply(server, client, request->value, request->nbytes);
}

static bool idist__server_reply_number(idist__server *server, idist__server_client *client,
                                       int64_t number) {
    return idist__server_reply(server, client, &number, sizeof number);
}

// Replies with one byte. The byte is 0 if the flag is true, as in torch's protocol, and 1
// otherwise.
static bool idist__server_reply_flag(idist__server *server, idist__server_client *client,
                                     bool flag) {
    uint8_t byte = flag ? 0 : 1;
    return idist__server_reply(server, client, &byte, sizeof byte);
}

static bool idist__server_reply_to(idist__server *server, idist__server_client *client,
                                   const idist__store_request *request) {
    switch (request->op) {
    case IDIST__STORE_GET:
    case IDIST__STORE_COMPARE_SET: return idist__server_reply_value(server, client, request);
    case IDIST__STORE_ADD:
    case IDIST__STORE_CLAIM:
    case IDIST__STORE_NUM_KEYS: return idist__server_reply_number(server, client, request->number);
    case IDIST__STORE_DELETE:
        return idist__server_reply_number(server, client, request->flag ? 1 : 0);
    case IDIST__STORE_CHECK: return idist__server_reply_flag(server, client, request->flag);
    case IDIST__STORE_WAIT: return idist__server_reply_flag(server, client, true);
    default: return true;
    }
}

static void idist__server_drop_will(idist__server *server, idist__server_client *client) {
    idist__mem_free(&server->mem, client->will);
    client->will = NULL;
    client->will_key_nbytes = client->will_nbytes = 0;
}

// Replaces a client's will with the will of a CLAIM. Returns false if memory is exhausted.
static bool idist__server_set_will(idist__server *server, idist__server_client *client,
                                   const idist__store_request *claim) {
    char name[IDIST__WILL_KEY_MAX];
    idist__blob key = idist__table_will_key(claim, name);

    idist__server_drop_will(server, client);
    client->will = (char *)idist__mem_raw(&server->mem, key.nbytes + claim->b.nbytes);
    if (!client->will) return false;

    memcpy(client->will, key.data, key.nbytes);
    if (claim->b.nbytes) memcpy(client->will + key.nbytes, claim->b.data, claim->b.nbytes);
    client->will_key_nbytes = key.nbytes;
    client->will_nbytes = key.nbytes + claim->b.nbytes;

    return true;
}

// Carries out one request of a client. Sets *wait if the request must be tried again after the
// table has changed. Sets *changed if the request changed the table. Returns false if the client
// must be dropped.
static bool idist__server_request(idist__server *server, idist__server_client *client,
                                  idist__store_request *request, bool *wait, bool *changed) {
    bool changed_here = false, awaits = request->op == IDIST__STORE_AWAIT_VALUE;

    *wait = false;
    if (awaits) request->op = IDIST__STORE_GET;

    if (request->op == IDIST__STORE_VALIDATE) {
        client->valid = request->number == (int64_t)IDIST__STORE_MAGIC;
        return client->valid;
    }

    if (!client->valid) return false;
    if (request->op == IDIST__STORE_CANCEL_WAIT)
        return true; // it crossed our answer, so no request waits anymore
    if (request->op == IDIST__STORE_DROP_WILL) idist__server_drop_will(server, client);

    request->value = server->value;
    request->capacity = IDIST__VALUE_MAX;

    if (idist__table_apply(&server->table, request, wait, &changed_here) != IDIST_OK) {
        if (request->op != IDIST__STORE_ADD && request->op != IDIST__STORE_CLAIM) return false;
        request->number = IDIST__NOT_A_NUMBER;
    } else if (request->op == IDIST__STORE_CLAIM &&
               !idist__server_set_will(server, client, request)) {
        return false;
    }

    if (changed_here) *changed = true;

    // The key was deleted between the client's WAIT and its GET. This answer makes the client wait
    // again.
    if (*wait && request->op == IDIST__STORE_GET && !awaits) {
        *wait = false;
        return idist__server_reply_number(server, client, (int64_t)IDIST__NO_VALUE);
    }

    if (*wait) return true;
    if (awaits && !idist__server_reply_flag(server, client, true)) return false;

    return idist__server_reply_to(server, client, request);
}

// Serves the requests that have arrived from a client, up to the first request that must wait. Sets
// *changed if the table changed. Returns false if the client must be dropped.
static bool idist__server_serve(idist__server *server, idist__server_client *client,
                                bool *changed) {
    size_t used = 0;

    client->waiting = false;

    while (!client->waiting) {
        const char *next = client->in.data + used;
        size_t remaining = client->in.nbytes - used;
        idist__store_request request;
        bool wait;
        ptrdiff_t nbytes =
            idist__wire_parse(next, remaining, &request, server->keys, IDIST__KEYS_MAX);

        if (nbytes == 0 && remaining < IDIST__STORE_REQUEST_MAX) break;
        if (nbytes <= 0 || !idist__server_request(server, client, &request, &wait, changed))
            return false;

        if (wait && remaining > (size_t)nbytes && next[nbytes] == IDIST__STORE_CANCEL_WAIT) {
            nbytes++;
            if (!idist__server_reply_flag(server, client, false)) return false;
        } else if (wait) {
            client->waiting = true;
            break;
        }

        used += (size_t)nbytes;
    }

    idist__buffer_consume(&client->in, used);

    // Drop a client that keeps sending requests and never reads the answers.
    return client->out.nbytes < 8 * IDIST__STORE_REQUEST_MAX;
}

// Reads the bytes that have arrived. Returns false if the client must be dropped.
static bool idist__server_read(idist__server *server, idist__server_client *client) {
    idist__buffer *in = &client->in;

    for (;;) {
        ptrdiff_t nbytes;

        if (in->nbytes >= IDIST__STORE_REQUEST_MAX)
            return true; // a whole request has arrived, so serve it first
        if (!idist__buffer_reserve(&server->mem, &in->data, &in->capacity, in->nbytes,
                                   in->nbytes + 4096))
            return false;
        nbytes =
            idist__os_socket_read(client->fd, in->data + in->nbytes, in->capacity - in->nbytes);
        if (nbytes <= 0) return nbytes == 0;
        in->nbytes += (size_t)nbytes;
    }
}

// Sends the bytes that the socket accepts now. Returns false if the client must be dropped.
static bool idist__server_write(idist__server_client *client) {
    size_t sent = 0;

    while (sent < client->out.nbytes) {
        idist__os_part part;
        ptrdiff_t nbytes;

        part.data = client->out.data + sent;
        part.nbytes = client->out.nbytes - sent;
        nbytes = idist__os_socket_write(client->fd, &part, 1);
        if (nbytes < 0) return false;
        if (nbytes == 0) break;
        sent += (size_t)nbytes;
    }

    idist__buffer_consume(&client->out, sent);

    return true;
}

// Accepts connections as long as there is a slot for a handshake. The slot is free, or holds a
// connection to evict, which is closed after the new connection has been accepted.
static void idist__server_accept(idist__server *server) {
    idist__handshake *handshake;

    while ((handshake = idist__pending_slot(&server->pending)) != NULL) {
        int fd = idist__os_socket_accept(server->listener);

        if (fd < 0 && idist__os_socket_out_of_fds(errno)) {
            if (!idist__pending_evict(&server->pending))
                __atomic_store_n(&server->out_of_fds, 1, __ATOMIC_RELAXED);
            idist__os_clock_pause_ms(1); // avoids a busy loop while descriptors are scarce
        }

        if (fd < 0) return;
        idist__os_descriptor_close(&handshake->fd);
        idist__auth_begin(handshake, fd, true, server->key, IDIST__ROLE_STORE, 0, 0, 0,
                          idist__os_clock_deadline(IDIST__PENDING_MS));
        idist__auth_set_server_id(handshake, server->id);
        idist__auth_set_secrecy(handshake, server->secrecy);
        handshake->ready = true;
    }
}

// Turns a connection whose handshake is complete into a client. Closes the connection if the server
// is full or out of memory.
static void idist__server_admit(idist__server *server, idist__handshake *handshake) {
    idist__server_client *client = NULL;

    if (server->client_count < IDIST__SERVER_CLIENTS)
        client = (idist__server_client *)idist__mem_alloc(&server->mem, sizeof *client);

    if (!client) {
        idist__os_descriptor_close(&handshake->fd);
        return;
    }

    client->fd = handshake->fd;
    handshake->fd = -1;
    server->clients[server->client_count++] = client;
}

// Records a failed handshake. Anybody may have caused the failure, so it must not end the job; rank
// 0 reports it.
static void idist__server_refuse(idist__server *server, const idist__handshake *handshake,
                                 idist_status status) {
    bool is_first = !__atomic_load_n(&server->is_unlike, __ATOMIC_RELAXED);
    idist__os_address peer;
    char host[64] = "this host";
    const char *ip = host;

    if (idist__auth_other_order(handshake))
        __atomic_store_n(&server->other_byte_order, 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&server->refused_count, 1, __ATOMIC_RELAXED);
    if (status != IDIST_ERR_AUTH || handshake->stage <= IDIST__AUTH_PROOF || !is_first) return;

    if (idist__os_socket_peer_address(handshake->fd, &peer) && !idist__os_socket_is_local(&peer))
        idist__os_socket_host_text(&peer, host, sizeof host);
    if (strncmp(ip, "::ffff:", 7) == 0) ip += 7; // an IPv4 peer of a dual-stack listener
    snprintf(server->unlike, sizeof server->unlike, "a process on %s was refused: %.200s", ip,
             idist__me.text);
    __atomic_store_n(&server->is_unlike, 1, __ATOMIC_RELEASE);
}

// Continues the handshakes for which data has arrived. Closes connections whose handshake takes too
// long.
static void idist__server_handshakes(idist__server *server) {
    int i;

    for (i = 0; i < IDIST__PENDING_SLOTS; i++) {
        idist__handshake *handshake = &server->pending.place[i];
        bool done = false;
        idist_status status;

        if (handshake->fd >= 0 && idist__os_clock_now_ns() >= handshake->deadline_ns)
            idist__os_descriptor_close(&handshake->fd);
        if (handshake->fd < 0 || !handshake->ready) continue;
        handshake->ready = false;
        status = idist__auth_step(handshake, &done);

        if (status != IDIST_OK) {
            idist__server_refuse(server, handshake, status);
            idist__os_descriptor_close(&handshake->fd);
        }

        if (handshake->fd >= 0 && done) idist__server_admit(server, handshake);
    }
}

// Reads from a client, serves its requests, and writes the answers. Requests that a client sent
// before it disconnected are still served. Returns false if the client must be dropped.
static bool idist__server_client_ready(idist__server *server, idist__server_client *client,
                                       bool *changed) {
    bool alive = idist__server_read(server, client);
    return idist__server_serve(server, client, changed) && alive && idist__server_write(client);
}

// Tries the waiting requests again if the table has changed. Serving them may change the table, so
// this function repeats until nothing changes.
static void idist__server_serve_waiting(idist__server *server, bool changed) {
    int i;

    while (changed || server->will_executed) {
        changed = server->will_executed = false;

        for (i = server->client_count - 1; i >= 0; i--) {
            idist__server_client *client = server->clients[i];

            if (!client->waiting) continue;
            if (!idist__server_serve(server, client, &changed) || !idist__server_write(client))
                idist__server_drop(server, i);
        }
    }
}

// Waits until there is work. Returns false if the thread must end.
static bool idist__server_poll(idist__server *server, bool may_accept) {
    idist__os_poll_entry *polls = server->polls, *clients = polls + IDIST__SERVER_POLL_CLIENTS;
    int i, pending_count, poll_count, timeout_ms = -1;

    idist__os_poll_watch(&polls[IDIST__SERVER_POLL_WAKE], server->wake, IDIST__OS_READABLE);
    idist__os_poll_watch(&polls[IDIST__SERVER_POLL_LISTENER], may_accept ? server->listener : -1,
                         IDIST__OS_READABLE);
    idist__os_poll_watch(&polls[IDIST__SERVER_POLL_MULTICAST], server->multicast.fd,
                         IDIST__OS_READABLE);

    for (i = 0; i < server->client_count; i++) {
        bool writes = server->clients[i]->out.nbytes != 0;
        idist__os_poll_watch(&clients[i], server->clients[i]->fd,
                             IDIST__OS_READABLE | (writes ? IDIST__OS_WRITABLE : 0));
    }

    pending_count = idist__pending_fill_polls(&server->pending, clients + server->client_count);
    if (pending_count) timeout_ms = may_accept ? 100 : 10; // handshakes have deadlines
    poll_count = (int)IDIST__SERVER_POLL_CLIENTS + server->client_count + pending_count;
    if (idist__os_poll(polls, poll_count, timeout_ms) < 0 && errno != EINTR) return false;
    if (idist__os_poll_ready(&polls[IDIST__SERVER_POLL_WAKE])) return false;
    idist__pending_take_polls(&server->pending, clients + server->client_count);

    return true;
}

static void *idist__server_main(void *arg) {
    idist__server *server = (idist__server *)arg;
    const idist__os_poll_entry *polls = server->polls;

    for (;;) {
        bool changed = false, may_accept = idist__pending_slot(&server->pending) != NULL;
        int i;

        if (!idist__server_poll(server, may_accept)) return NULL;

        // Count down: the last client takes the index of a dropped client, and has already been
        // served.
        for (i = server->client_count - 1; i >= 0; i--)
            if (idist__os_poll_ready(&polls[IDIST__SERVER_POLL_CLIENTS + i]) &&
                !idist__server_client_ready(server, server->clients[i], &changed))
                idist__server_drop(server, i);
        idist__server_serve_waiting(server, changed);

        if (idist__os_poll_ready(&polls[IDIST__SERVER_POLL_MULTICAST]))
            idist__multicast_answer(&server->multicast, server->port);
        if (may_accept && idist__os_poll_ready(&polls[IDIST__SERVER_POLL_LISTENER]))
            idist__server_accept(server);
        idist__server_handshakes(server);
    }
}

// Ends the thread and frees everything. Connected clients see the end of their stream. The listener
// is closed first, so a client that sees the end cannot connect again.
static void idist__server_stop(idist__server *server) {
    if (server->running) {
        idist__os_poll_wakeup_signal(server->wake);
        idist__os_thread_join(server->thread);
    }

    idist__os_descriptor_close(&server->listener);
    idist__os_descriptor_close(&server->multicast.fd);
    idist__pending_close(&server->pending);
    while (server->client_count) idist__server_drop(server, 0);
    idist__os_descriptor_close(&server->wake);
    idist__table_clear(&server->table);
    idist__mem_free(&server->mem, server->keys);
    idist__mem_free(&server->mem, server->value);
    idist__mem_free(&server->mem, server->polls);
    idist__mem_free(&server->mem, server);
}

// Allocates the thread's poll entries and scratch memory in advance, so that no client can make the
// thread run out of them.
static idist_status idist__server_prepare(idist__server *server) {
    size_t poll_count = (size_t)IDIST__SERVER_POLL_CLIENTS + (size_t)IDIST__SERVER_CLIENTS +
                        (size_t)IDIST__PENDING_SLOTS;

    server->polls =
        (idist__os_poll_entry *)idist__mem_raw(&server->mem, sizeof *server->polls * poll_count);
    server->keys =
        (idist__blob *)idist__mem_raw(&server->mem, sizeof *server->keys * IDIST__KEYS_MAX);
    server->value = (char *)idist__mem_raw(&server->mem, IDIST__VALUE_MAX);
    if (!server->polls || !server->keys || !server->value) return IDIST_ERR_NO_MEMORY;

    server->wake = idist__os_poll_wakeup_new();
    return server->wake < 0 ? idist__fail_errno("store: opening a wake-up descriptor", errno)
                            : IDIST_OK;
}

// Starts a server with its own thread. The server owns the listener and the socket of `multicast`
// from here on, even if this function fails.
static idist_status idist__server_start(const idist_allocator *mem, int listener, int port,
                                        idist__multicast *multicast, const uint8_t key[32],
                                        int secrecy, idist__server **out) {
    idist__server *server = (idist__server *)idist__mem_alloc(mem, sizeof *server);
    idist_status status;

    *out = NULL;

    if (!server) {
        idist__os_descriptor_close(&listener);
        idist__os_descriptor_close(&multicast->fd);
        return IDIST_ERR_NO_MEMORY;
    }

    if (mem) server->mem = *mem;
    server->table.mem = server->mem;
    memcpy(server->key, key, 32);
    server->secrecy = secrecy;
    idist__os_random(&server->id, sizeof server->id);
    server->listener = listener;
    server->port = port;
    server->multicast = *multicast;
    multicast->fd = -1;
    server->wake = -1;
    idist__pending_init(&server->pending);

    status = idist__server_prepare(server);
    if (status == IDIST_OK &&
        idist__os_thread_start(&server->thread, idist__server_main, server) != 0)
        status = idist__fail(IDIST_ERR_SYSTEM,
                             "store: could not start the thread of the server; is a limit on "
                             "processes (ulimit -u) or memory reached?");

    if (status != IDIST_OK) {
        idist__server_stop(server);
        return status;
    }

    server->running = true;
    *out = server;

    return IDIST_OK;
}
