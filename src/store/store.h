// store/store.h: the public functions; stores in memory and stores with a prefix
//
// Lets ranks that do not know each other yet exchange keys and values. A store lives in one of
// three places: the memory of one process, a file that all ranks can open, or a server inside rank
// 0. The server speaks the protocol of torch's TCPStore. The functions idist_store_* of idist.h are
// implemented here. Their main user is the code that joins the ring (ring/join/).
#pragma once

#include "os/clock.h"
#include "os/thread.h"
#include "os/poll.h"
#include "base/fail.h"
#include "base/text.h"
#include "base/mem.h"
#include "net/meet.h"
#include "net/secret.h"
#include "store/table.h"
#include "store/file_store.h"
#include "store/client.h"

//------------------------------------------------------------------------------
// a store inside one process
//
// The store consists of a table, a mutex, and a condition variable on which waiting requests sleep.
// All threads are equal, so there is no server and no client.
//------------------------------------------------------------------------------

typedef struct idist__memory_store {
    idist__os_mutex lock;
    idist__os_cond changed;
    idist__table table;
} idist__memory_store;

static idist_status idist__memory_store_run(idist_store *store, idist__store_request *request) {
    idist__memory_store *m = (idist__memory_store *)store->impl;
    bool wait, changed;
    idist_status status;

    idist__os_mutex_lock(&m->lock);

    for (;;) {
        status = idist__table_apply(&m->table, request, &wait, &changed);
        if (changed) idist__os_cond_broadcast(&m->changed);
        if (!wait) break;

        if (idist__os_clock_ms_until(request->deadline_ns) == 0) {
            status = idist__table_timed_out(request, &m->table);
            break;
        }

        idist__os_cond_wait(&m->changed, &m->lock, request->deadline_ns);
    }

    idist__os_mutex_unlock(&m->lock);

    return status;
}

static void idist__memory_store_close(idist_store *store) {
    idist__memory_store *m = (idist__memory_store *)store->impl;
    idist__table_clear(&m->table);
    idist__os_cond_destroy(&m->changed);
    idist__os_mutex_destroy(&m->lock);
    idist__mem_free(&store->mem, m);
}

static idist_status idist__memory_store_open(idist_store *store) {
    idist__memory_store *m = (idist__memory_store *)idist__mem_alloc(&store->mem, sizeof *m);

    if (!m) return IDIST_ERR_NO_MEMORY;
    m->table.mem = store->mem;
    idist__os_mutex_init(&m->lock);
    idist__os_cond_init(&m->changed);
    store->impl = m;
    store->run = idist__memory_store_run;
    store->close = idist__memory_store_close;

    return IDIST_OK;
}

//------------------------------------------------------------------------------
// a view of another store, with a prefix before each key
//------------------------------------------------------------------------------

typedef struct idist__prefix_store {
    idist_store *parent;
    char prefix[IDIST__KEY_MAX + 1];
} idist__prefix_store;

// Builds the keys of a request, with the prefix before each key, in one block that the caller
// frees. The second key of a CLAIM is the key of its will.
static idist_status idist__prefix_store_keys(idist_store *store,
                                             const idist__store_request *request,
                                             idist__blob **result) {
    idist__prefix_store *view = (idist__prefix_store *)store->impl;
    idist__blob pair[2], *keys;
    const idist__blob *from = request->nkeys ? request->keys : pair;
    size_t prefix_nbytes = strlen(view->prefix), count = request->nkeys, total = 0, i;
    char *text;

    pair[0] = request->key;
    pair[1] = request->a;
    if (!count) count = request->op == IDIST__STORE_CLAIM ? 2 : 1;

    for (i = 0; i < count; i++) {
        total += prefix_nbytes + from[i].nbytes;
        if (prefix_nbytes + from[i].nbytes > IDIST__KEY_MAX)
            return idist__fail(IDIST_ERR_ARG,
                               "store: prefix and key together may have at most %u bytes",
                               IDIST__KEY_MAX);
    }

    keys = (idist__blob *)idist__mem_alloc(&store->mem, count * sizeof *keys + total);
    if (!keys) return IDIST_ERR_NO_MEMORY;
    text = (char *)(keys + count);

    for (i = 0; i < count; i++) {
        keys[i].data = text;
        keys[i].nbytes = prefix_nbytes + from[i].nbytes;
        memcpy(text, view->prefix, prefix_nbytes);
        if (from[i].nbytes) memcpy(text + prefix_nbytes, from[i].data, from[i].nbytes);
        text += keys[i].nbytes;
    }

    *result = keys;

    return IDIST_OK;
}

static idist_status idist__prefix_store_run(idist_store *store, idist__store_request *request) {
    idist__prefix_store *view = (idist__prefix_store *)store->impl;
    idist__store_request inner = *request;
    idist__blob *keys = NULL;
    idist_status status = idist__prefix_store_keys(store, request, &keys);

    if (status != IDIST_OK) return status;
    // NUM_KEYS and DROP_WILL ignore the key.
    inner.key = keys[0]; // NOLINT(clang-analyzer-core.NullDereference)
    inner.keys = request->nkeys ? keys : NULL;
    if (request->op == IDIST__STORE_CLAIM) inner.a = keys[1];
    status = view->parent->run(view->parent, &inner);
    request->number = inner.number;
    request->nbytes = inner.nbytes;
    request->flag = inner.flag;
    idist__mem_free(&store->mem, keys);

    return status;
}

static void idist__prefix_store_close(idist_store *store) {
    idist__mem_free(&store->mem, store->impl);
}

//------------------------------------------------------------------------------
// the public functions
//------------------------------------------------------------------------------

static idist_store *idist__store_new(const idist_allocator *mem, int timeout_ms) {
    idist_store *store = (idist_store *)idist__mem_alloc(mem, sizeof *store);

    if (!store) return NULL;
    if (mem) store->mem = *mem;
    store->timeout_ms = timeout_ms ? timeout_ms : 300000;
    return store;
}

idist_status idist_store_close(idist_store **store) {
    idist_store *closing;

    if (!store) return idist__fail(IDIST_ERR_ARG, "store_close: the pointer is NULL");
    closing = *store;
    *store = NULL;
    if (!closing) return IDIST_OK;
    if (closing->impl) closing->close(closing);
    idist__mem_free(&closing->mem, closing);

    return IDIST_OK;
}

// Opens the store of a torchrun agent. This store needs no handshake.
static idist_status idist__store_open_torch(idist_store *store, const idist__meet *meet,
                                            idist__client_serving *serving, int64_t deadline_ns) {
    idist__meet agent = *meet;

    agent.kind = IDIST__MEET_TCP;
    serving->at = &agent;
    serving->listener = -1;
    serving->key = NULL;

    return idist__client_open(store, serving, false, deadline_ns);
}

static idist_status idist__store_open_kind(idist_store *store, const idist__meet *meet, bool server,
                                           idist__client_serving *serving, int64_t deadline_ns) {
    switch (meet->kind) {
    case IDIST__MEET_FILE:
        return idist__file_store_open(store, meet->name,
                                      server ? IDIST__FILE_SERVER : IDIST__FILE_CLIENT,
                                      deadline_ns);
    case IDIST__MEET_DRAW:
        return idist__file_store_open(store, meet->name, IDIST__FILE_EITHER, deadline_ns);
    case IDIST__MEET_MEMORY: return idist__memory_store_open(store);
    case IDIST__MEET_TORCH: return idist__store_open_torch(store, meet, serving, deadline_ns);
    default: serving->at = meet; return idist__client_open(store, serving, server, deadline_ns);
    }
}

// Opens a store of any kind except NONE and PMI. For DRAW, idist__store_is_file_server tells
// whether this process became the server. `listener` is the server's socket if it already listens,
// or -1. The store takes ownership of the socket.
static idist_status idist__store_open(const idist__meet *meet, const idist_store_desc *desc,
                                      int listener, idist_store **out) {
    idist_store *store = idist__store_new(&desc->allocator, desc->timeout_ms);
    idist__client_serving serving;
    idist__secret secret;
    uint8_t key[32];
    idist_status status = idist__secret_find(&secret, desc->secret, desc->secret_nbytes);

    *out = NULL;
    if (status == IDIST_OK && !store) status = IDIST_ERR_NO_MEMORY;

    if (status != IDIST_OK) {
        idist__os_descriptor_close(&listener);
        idist_store_close(&store);
        return status;
    }

    idist__secret_key(&secret, key);
    memset(&serving, 0, sizeof serving);
    serving.listener = listener;
    serving.key = key;
    serving.secrecy = idist__secret_secrecy(&secret);
    status = idist__store_open_kind(store, meet, desc->server, &serving,
                                    idist__os_clock_deadline(store->timeout_ms));

    if (status != IDIST_OK) idist_store_close(&store);
    else *out = store;

    return status;
}

// Returns true if this process is the server of the store, which must be in a file.
IDIST__UNUSED static bool idist__store_is_file_server(const idist_store *store) {
    return ((const idist__file_store *)store->impl)->server;
}

static idist_status idist__store_read_url(const char *url, idist__meet *meet) {
    char text[sizeof meet->name];

    if (strcmp(url, "mem://") == 0) idist__meet_set_name(meet, IDIST__MEET_MEMORY, "");
    else if (strncmp(url, "file://", 7) == 0 && url[7] == '/')
        idist__meet_set_name(meet, IDIST__MEET_FILE, url + 7);
    else if (strncmp(url, "unix://", 7) == 0)
        idist__meet_set_name(meet, IDIST__MEET_LOCAL, url + 7);
    else if (strncmp(url, "tcp://", 6) == 0) {
        snprintf(text, sizeof text, "tcp:%s", url + 6);
        return idist__meet_read(meet, text);
    } else
        return idist__fail(
            IDIST_ERR_ARG,
            "store_open: \"%s\" is not one of tcp://host:port, unix://name, file:///path, mem://",
            url);

    return IDIST_OK;
}

idist_status idist_store_open(const char *url, const idist_store_desc *desc, idist_store **store) {
    idist_store_desc d;
    idist__meet meet;
    idist_status status;

    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (!store) return idist__fail(IDIST_ERR_ARG, "store_open: store is NULL");
    *store = NULL;
    if (!url) return idist__fail(IDIST_ERR_ARG, "store_open: url is NULL");
    if (strlen(url) >= sizeof meet.name)
        return idist__fail(IDIST_ERR_ARG, "store_open: the url is too long");
    if (!d.allocator.alloc_fn != !d.allocator.free_fn)
        return idist__fail(IDIST_ERR_ARG,
                           "store_open: allocator: give both alloc_fn and free_fn, or neither");

    status = idist__store_read_url(url, &meet);
    if (status != IDIST_OK) return status;

    idist__fail_begin();
    status = idist__store_open(&meet, &d, -1, store);

    return idist__fail_end(status);
}

idist_status idist_store_prefix(idist_store *parent, const char *prefix, idist_store **store) {
    idist__prefix_store *view;

    if (!store) return idist__fail(IDIST_ERR_ARG, "store_prefix: store is NULL");
    *store = NULL;
    if (!parent || !prefix || strlen(prefix) >= IDIST__KEY_MAX)
        return idist__fail(IDIST_ERR_ARG,
                           "store_prefix: needs a parent and a prefix of less than %u bytes",
                           IDIST__KEY_MAX);
    *store = idist__store_new(&parent->mem, parent->timeout_ms);
    if (!*store) return IDIST_ERR_NO_MEMORY;
    view = (idist__prefix_store *)idist__mem_alloc(&parent->mem, sizeof *view);

    if (!view) {
        idist_store_close(store);
        return IDIST_ERR_NO_MEMORY;
    }

    view->parent = parent;
    idist__text_copy(view->prefix, sizeof view->prefix, prefix);
    (*store)->impl = view;
    (*store)->run = idist__prefix_store_run;
    (*store)->close = idist__prefix_store_close;
    (*store)->port = parent->port;

    return IDIST_OK;
}

int idist_store_port(const idist_store *store) { return store ? store->port : 0; }

static idist_status idist__store_check_key(const char *key) {
    if (key && key[0] && strlen(key) <= IDIST__KEY_MAX) return IDIST_OK;
    return idist__fail(IDIST_ERR_ARG, "store: a key must have 1 to %u bytes", IDIST__KEY_MAX);
}

// Fills in a request for an operation without a key.
static idist_status idist__store_begin(idist_store *store, idist__store_request *request, int op,
                                       int timeout_ms) {
    memset(request, 0, sizeof *request);
    if (!store) return idist__fail(IDIST_ERR_ARG, "store: the store is NULL");
    request->op = op;
    request->deadline_ns = idist__os_clock_deadline(timeout_ms ? timeout_ms : store->timeout_ms);
    request->answer_by_ns = store->answer_by_ns;
    return IDIST_OK;
}

static idist_status idist__store_run(idist_store *store, idist__store_request *request) {
    idist_status status = store->run(store, request);

    if (status == IDIST_ERR_PEER_LOST) __atomic_store_n(&store->is_lost, true, __ATOMIC_RELAXED);

    return status;
}

static idist_status idist__store_begin_key(idist_store *store, idist__store_request *request,
                                           int op, const char *key, int timeout_ms) {
    idist_status status = idist__store_begin(store, request, op, timeout_ms);

    if (status == IDIST_OK) status = idist__store_check_key(key);
    if (status != IDIST_OK) return status;
    request->key.data = key;
    request->key.nbytes = strlen(key);
    return IDIST_OK;
}

static idist_status idist__store_value(idist__blob *blob, const void *value, size_t nbytes,
                                       size_t limit) {
    if ((nbytes && !value) || nbytes > limit)
        return idist__fail(IDIST_ERR_ARG, "store: a value is NULL or longer than %zu bytes", limit);
    blob->data = (const char *)value;
    blob->nbytes = nbytes;
    return IDIST_OK;
}

idist_status idist_store_set(idist_store *store, const char *key, const void *value,
                             size_t nbytes) {
    idist__store_request request;
    idist_status status = idist__store_begin_key(store, &request, IDIST__STORE_SET, key, 0);

    if (status == IDIST_OK)
        status = idist__store_value(&request.a, value, nbytes, IDIST__VALUE_MAX);
    return status == IDIST_OK ? idist__store_run(store, &request) : status;
}

// Sets a value without waiting until other clients can see it. Other clients can see the value by
// the time this client gets the answer to its next request.
IDIST__UNUSED static idist_status idist__store_post(idist_store *store, const char *key,
                                                    const void *value, size_t nbytes) {
    idist__store_request request;
    idist_status status = idist__store_begin_key(store, &request, IDIST__STORE_SET, key, 0);

    if (status == IDIST_OK)
        status = idist__store_value(&request.a, value, nbytes, IDIST__VALUE_MAX);
    request.posted = true;
    return status == IDIST_OK ? idist__store_run(store, &request) : status;
}

// Adds 1 to the number of a key and leaves a will, see idist__store_request. If `sum` is NULL, does
// not wait for the sum. In that case the store must be a client of idist's own server, not of
// torch's. idist__store_posted_sum then returns the sum after the next request has been answered.
IDIST__UNUSED static idist_status idist__store_claim(idist_store *store, const char *key,
                                                     const char *will_key, const void *will,
                                                     size_t nbytes, int64_t *sum) {
    idist__store_request request;
    idist_status status = idist__store_begin_key(store, &request, IDIST__STORE_CLAIM, key, 0);

    if (status == IDIST_OK) status = idist__store_check_key(will_key);
    if (status != IDIST_OK) return status;
    request.a.data = will_key;
    request.a.nbytes = strlen(will_key);
    request.b.data = (const char *)will;
    request.b.nbytes = nbytes;
    request.posted = sum == NULL;
    status = idist__store_run(store, &request);
    if (status == IDIST_OK && sum) *sum = request.number;

    return status;
}

// Withdraws our will. If the connection is lost, the next request reports the loss.
IDIST__UNUSED static void idist__store_drop_will(idist_store *store) {
    idist__store_request request;

    if (idist__store_begin(store, &request, IDIST__STORE_DROP_WILL, 0) == IDIST_OK)
        idist__store_run(store, &request);
}

// Waits until the server of a store in a file has ended, but not past the deadline. After that,
// opening the path gives a new store. Returns immediately for other kinds of stores.
IDIST__UNUSED static void idist__store_await_end(idist_store *store, int64_t deadline_ns) {
    if (store->run == idist__file_store_run) idist__file_store_await_end(store, deadline_ns);
}

// Returns the random id of the server if the server is ours and behind a socket, or 0 otherwise.
// The id distinguishes the server from later servers at the same address.
IDIST__UNUSED static uint64_t idist__store_server_id(const idist_store *store) {
    if (store->run != idist__client_run) return 0;
    return ((const idist__client_store *)store->impl)->server_id;
}

IDIST__UNUSED static int64_t idist__store_posted_sum(const idist_store *store) {
    return ((const idist__client_store *)store->impl)->number;
}

// Runs a request that returns a value. `name` is the public function to name in error texts.
static idist_status idist__store_fetch(const char *name, idist_store *store,
                                       idist__store_request *request, void *value, size_t capacity,
                                       size_t *nbytes) {
    idist_status status;

    if (capacity && !value) return idist__fail(IDIST_ERR_ARG, "%s: value is NULL", name);
    request->value = value;
    request->capacity = capacity;
    status = idist__store_run(store, request);
    if (nbytes && (status == IDIST_OK || status == IDIST_ERR_TRUNCATED)) *nbytes = request->nbytes;
    return status;
}

idist_status idist_store_get(idist_store *store, const char *key, void *value, size_t capacity,
                             size_t *nbytes, int timeout_ms) {
    idist__store_request request;
    idist_status status =
        idist__store_begin_key(store, &request, IDIST__STORE_GET, key, timeout_ms);

    if (status != IDIST_OK) return status;
    return idist__store_fetch("store_get", store, &request, value, capacity, nbytes);
}

idist_status idist_store_add(idist_store *store, const char *key, int64_t delta, int64_t *result) {
    idist__store_request request;
    idist_status status = idist__store_begin_key(store, &request, IDIST__STORE_ADD, key, 0);

    if (status != IDIST_OK) return status;
    request.number = delta;
    status = idist__store_run(store, &request); // NOLINT(clang-analyzer-core.NullDereference)
    if (status == IDIST_OK && result) *result = request.number;
    return status;
}

idist_status idist_store_compare_set(idist_store *store, const char *key, const void *expected,
                                     size_t nexpected, const void *desired, size_t ndesired,
                                     void *value, size_t capacity, size_t *nbytes) {
    idist__store_request request;
    idist_status status = idist__store_begin_key(store, &request, IDIST__STORE_COMPARE_SET, key, 0);

    if (status == IDIST_OK)
        status = idist__store_value(&request.a, expected, nexpected, IDIST__VALUE_MAX / 2);
    if (status == IDIST_OK)
        status = idist__store_value(&request.b, desired, ndesired, IDIST__VALUE_MAX / 2);
    if (status != IDIST_OK) return status;

    return idist__store_fetch("store_compare_set", store, &request, value, capacity, nbytes);
}

static idist_status idist__store_check_keys(const char *const *keys, size_t count) {
    size_t i, total = 0;

    if ((count && !keys) || count > IDIST__KEYS_MAX)
        return idist__fail(IDIST_ERR_ARG, "store: keys is NULL or more than %u", IDIST__KEYS_MAX);

    for (i = 0; i < count; i++) {
        idist_status status = idist__store_check_key(keys[i]);

        if (status != IDIST_OK) return status;
        total += strlen(keys[i]) + 9; // on the wire: u64 length, '/', key
        if (total > IDIST__VALUE_MAX)
            return idist__fail(IDIST_ERR_ARG, "store: the keys of one call exceed %u bytes",
                               IDIST__VALUE_MAX);
    }

    return IDIST_OK;
}

// Runs a WAIT or a CHECK. Sets *flag to true if all keys exist, unless `flag` is NULL.
static idist_status idist__store_run_keys(idist_store *store, int op, const char *const *keys,
                                          size_t count, int timeout_ms, bool *flag) {
    idist__store_request request;
    idist_status status = idist__store_begin(store, &request, op, timeout_ms);
    idist__blob *blobs;
    size_t i;

    if (status == IDIST_OK) status = idist__store_check_keys(keys, count);
    if (status != IDIST_OK) return status;
    if (flag) *flag = true;
    if (!count) return IDIST_OK;
    blobs = (idist__blob *)idist__mem_alloc(&store->mem, count * sizeof *blobs);
    if (!blobs) return IDIST_ERR_NO_MEMORY;

    for (i = 0; i < count; i++) {
        blobs[i].data = keys[i];
        blobs[i].nbytes = strlen(keys[i]);
    }

    request.keys = blobs;
    request.nkeys = count;
    status = idist__store_run(store, &request);
    if (flag) *flag = request.flag;
    idist__mem_free(&store->mem, blobs);

    return status;
}

// Waits until all keys exist. After a time-out, the error text may name a key that exists.
// idist_store_wait corrects the text.
static idist_status idist__store_await_keys(idist_store *store, const char *const *keys, size_t n,
                                            int timeout_ms) {
    return idist__store_run_keys(store, IDIST__STORE_WAIT, keys, n, timeout_ms, NULL);
}

// Finds a key that did not appear in time and names it in the error text. Only the server knows
// which keys are missing, so each CHECK halves the list of candidates.
static idist_status idist__store_name_missing(idist_store *store, const char *const *keys,
                                              size_t n) {
    char text[sizeof idist__me.text];

    memcpy(text, idist__me.text, sizeof text); // a CHECK that fails overwrites the text

    while (n > 1) {
        size_t half = n / 2;
        bool ready;

        if (idist__store_run_keys(store, IDIST__STORE_CHECK, keys, half, 0, &ready) != IDIST_OK) {
            memcpy(idist__me.text, text, sizeof text);
            return IDIST_ERR_TIMEOUT;
        }

        if (ready) keys += half;
        n = ready ? n - half : half;
    }

    return idist__fail(IDIST_ERR_TIMEOUT, "store: the key \"%s\" did not appear in time", keys[0]);
}

idist_status idist_store_wait(idist_store *store, const char *const *keys, size_t n,
                              int timeout_ms) {
    idist_status status = idist__store_await_keys(store, keys, n, timeout_ms);

    if (status != IDIST_ERR_TIMEOUT || n < 2) return status;

    return idist__store_name_missing(store, keys, n);
}

idist_status idist_store_check(idist_store *store, const char *const *keys, size_t n, bool *ready) {
    if (!ready) return idist__fail(IDIST_ERR_ARG, "store_check: ready is NULL");
    return idist__store_run_keys(store, IDIST__STORE_CHECK, keys, n, 0, ready);
}

idist_status idist_store_delete(idist_store *store, const char *key, bool *deleted) {
    idist__store_request request;
    idist_status status = idist__store_begin_key(store, &request, IDIST__STORE_DELETE, key, 0);

    if (status == IDIST_OK) status = idist__store_run(store, &request);
    if (status == IDIST_OK && deleted) *deleted = request.flag;
    return status;
}

idist_status idist_store_num_keys(idist_store *store, size_t *n) {
    idist__store_request request;
    idist_status status = idist__store_begin(store, &request, IDIST__STORE_NUM_KEYS, 0);

    if (status != IDIST_OK) return status;
    if (!n) return idist__fail(IDIST_ERR_ARG, "store_num_keys: n is NULL");
    status = idist__store_run(store, &request);
    *n = status == IDIST_OK ? (size_t)request.number : 0;
    return status;
}
