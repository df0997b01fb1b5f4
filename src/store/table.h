// store/table.h: bytes that grow; requests, and the table that carries them out
#pragma once

#include "base/fail.h"
#include "base/text.h"
#include "base/mem.h"
#include "base/hash.h"

//------------------------------------------------------------------------------
// bytes that grow
//------------------------------------------------------------------------------

typedef struct idist__buffer {
    char *data;
    size_t nbytes;
    size_t capacity;
} idist__buffer;

// Makes room for `wanted` bytes, of which the first `used` are kept; at least doubles, so that
// appending is cheap. False: out of memory, and nothing has changed.
static bool idist__buffer_reserve(const idist_allocator *mem, char **data, size_t *capacity,
                                  size_t used, size_t wanted) {
    size_t larger = *capacity ? *capacity : 512;
    char *copy;

    if (wanted <= *capacity) return true;
    while (larger < wanted) larger *= 2;
    copy = (char *)idist__mem_raw(mem, larger);
    if (!copy) return false;

    if (used) memcpy(copy, *data, used);
    idist__mem_free(mem, *data);
    *data = copy;
    *capacity = larger;

    return true;
}

static bool idist__buffer_append(const idist_allocator *mem, idist__buffer *buffer,
                                 const void *data, size_t nbytes) {
    if (!idist__buffer_reserve(mem, &buffer->data, &buffer->capacity, buffer->nbytes,
                               buffer->nbytes + nbytes))
        return false;
    if (nbytes) memcpy(buffer->data + buffer->nbytes, data, nbytes);
    buffer->nbytes += nbytes;
    return true;
}

// Removes bytes from the front.
static void idist__buffer_consume(idist__buffer *buffer, size_t nbytes) {
    if (nbytes) memmove(buffer->data, buffer->data + nbytes, buffer->nbytes - nbytes);
    buffer->nbytes -= nbytes;
}

//------------------------------------------------------------------------------
// requests, and the table that carries them out
//
// Each public function fills one request and passes it to the store's `run`. What a request does to
// the table is written once, in idist__table_apply, and serves all kinds of stores:
//
//     idist_store_get -> idist__store_fetch -> store->run -> (file, socket) -> idist__table_apply
//
// The table is a hash table of 256 chains; keys and values are bytes with a length. ADD keeps
// numbers as decimal text, as torch does.
//------------------------------------------------------------------------------

// The operations, with the numbers of torch's TCPStore, which travel over the wire.
enum {
    IDIST__STORE_VALIDATE = 0,
    IDIST__STORE_SET = 1,
    IDIST__STORE_COMPARE_SET = 2,
    IDIST__STORE_GET = 3,
    IDIST__STORE_ADD = 4,
    IDIST__STORE_CHECK = 5,
    IDIST__STORE_WAIT = 6,
    IDIST__STORE_NUM_KEYS = 7,
    IDIST__STORE_DELETE = 8,
    IDIST__STORE_CANCEL_WAIT = 12,
    // Ours, not torch's:
    IDIST__STORE_CLAIM = 100,       // ADD, and leave a will: see idist__store_request
    IDIST__STORE_AWAIT_VALUE = 101, // WAIT and GET in one
    IDIST__STORE_DROP_WILL = 102    // take the will back
};

#define IDIST__KEY_MAX 1024u
#define IDIST__VALUE_MAX (8u << 20)
#define IDIST__KEYS_MAX 65536u
#define IDIST__WILL_KEY_MAX (IDIST__KEY_MAX + 32) // with the digits of the sum

// In place of a value's length, the answer to a GET whose key has just been deleted; torch's
// protocol has no word for it.
static const uint64_t IDIST__NO_VALUE = UINT64_MAX;
// The answer to an ADD whose key holds text.
static const int64_t IDIST__NOT_A_NUMBER = INT64_MIN;

// Bytes with a length, owned by somebody else.
typedef struct idist__blob {
    const char *data;
    size_t nbytes;
} idist__blob;

// A will is a key and a value, which the store sets when the process that left the will has ended.
// A process has at most one will in a store; the next one replaces it. CLAIM adds 1 to a number and
// leaves a will in one step, so that no process can die between the two. The last '%' in the will's
// key stands for the sum.
typedef struct idist__store_request {
    int op;                  // see IDIST__STORE_SET
    idist__blob key;         // of operations on one key
    idist__blob a;           // SET: the value; COMPARE_SET: the expected one; CLAIM: the will's key
    idist__blob b;           // COMPARE_SET: the desired value; CLAIM: the will's value
    int64_t number;          // ADD: the delta; ADD, CLAIM: then the sum; NUM_KEYS: the result
    const idist__blob *keys; // CHECK, WAIT
    size_t nkeys;
    void *value; // GET, COMPARE_SET: the caller's buffer
    size_t capacity;
    size_t nbytes;        // the size of the value, also when it does not fit
    bool flag;            // CHECK: all keys exist; DELETE: the key existed
    bool posted;          // SET, ADD, CLAIM: do not wait for an answer
    int64_t deadline_ns;  // of GET and WAIT
    int64_t answer_by_ns; // when the server has to have answered, at the latest; 0: no such limit
} idist__store_request;

typedef struct idist__entry {
    struct idist__entry *next;
    char *key;
    size_t key_nbytes;
    char *value;
    size_t value_nbytes;
} idist__entry;

typedef struct idist__table {
    idist_allocator mem;
    idist__entry *chains[256]; // by hash of the key
    size_t key_count;
} idist__table;

// What idist_store points to; each kind has its own functions and its own data behind `impl`.
struct idist_store {
    idist_status (*run)(idist_store *store,
                        idist__store_request *req); // blocks until the request's deadline
    void (*close)(idist_store *store);              // frees impl
    idist_allocator mem;
    int timeout_ms;       // of calls that give none
    int port;             // of the server's socket; 0: none
    int64_t answer_by_ns; // of every request; 0: none
    bool is_lost;         // a request has failed because the server was gone
    void *impl;
};

// The link that points to the entry of a key, or to NULL at the end of its chain.
static idist__entry **idist__table_find(idist__table *table, idist__blob key) {
    idist__entry **link = &table->chains[idist__hash(key.data, key.nbytes) & 255];

    while (*link &&
           ((*link)->key_nbytes != key.nbytes || memcmp((*link)->key, key.data, key.nbytes) != 0))
        link = &(*link)->next;
    return link;
}

static idist_status idist__table_put(idist__table *table, idist__blob key, const void *value,
                                     size_t nbytes) {
    idist__entry **link = idist__table_find(table, key);
    idist__entry *entry = *link;
    char *copy = (char *)idist__mem_alloc(&table->mem, nbytes);

    if (!copy) return IDIST_ERR_NO_MEMORY;
    if (nbytes) memcpy(copy, value, nbytes);

    if (!entry) {
        entry = (idist__entry *)idist__mem_alloc(&table->mem, sizeof *entry + key.nbytes);
        if (!entry) {
            idist__mem_free(&table->mem, copy);
            return IDIST_ERR_NO_MEMORY;
        }

        entry->key = (char *)(entry + 1);
        entry->key_nbytes = key.nbytes;
        memcpy(entry->key, key.data, key.nbytes);
        *link = entry;
        table->key_count++;
    }

    idist__mem_free(&table->mem, entry->value);
    entry->value = copy;
    entry->value_nbytes = nbytes;

    return IDIST_OK;
}

static bool idist__table_remove(idist__table *table, idist__blob key) {
    idist__entry **link = idist__table_find(table, key);
    idist__entry *entry = *link;

    if (!entry) return false;
    *link = entry->next;
    table->key_count--;
    idist__mem_free(&table->mem, entry->value);
    idist__mem_free(&table->mem, entry);
    return true;
}

static void idist__table_clear(idist__table *table) {
    size_t i;

    for (i = 0; i < IDIST__COUNT_OF(table->chains); i++) {
        while (table->chains[i]) {
            idist__blob key;

            key.data = table->chains[i]->key;
            key.nbytes = table->chains[i]->key_nbytes;
            idist__table_remove(table, key);
        }
    }
}

// The first key of a CHECK or WAIT that does not exist; NULL: all do.
static const idist__blob *idist__table_missing(idist__table *table,
                                               const idist__store_request *request) {
    size_t i;
    for (i = 0; i < request->nkeys; i++)
        if (!*idist__table_find(table, request->keys[i])) return &request->keys[i];
    return NULL;
}

static idist_status idist__table_not_a_number(void) {
    return idist__fail(IDIST_ERR_ARG, "store: add: the value of the key is not a whole number, or "
                                      "the sum is not between -2^63 + 1 and 2^63 - 1");
}

static idist_status idist__table_add(idist__table *table, idist__store_request *request) {
    idist__entry *entry = *idist__table_find(table, request->key);
    char text[32];
    int64_t old = 0, delta = request->number;
    bool fits;

    if (entry) {
        bool is_number = entry->value_nbytes < sizeof text;

        if (is_number) {
            memcpy(text, entry->value, entry->value_nbytes);
            text[entry->value_nbytes] = 0;
            is_number = strlen(text) == entry->value_nbytes && // no zero byte within
                        idist__parse_int(text, INT64_MIN, INT64_MAX, &old);
        }

        if (!is_number) return idist__table_not_a_number();
    }

    // The sum must not be IDIST__NOT_A_NUMBER either.
    fits = delta > 0 ? old <= INT64_MAX - delta : old > INT64_MIN - delta;
    if (!fits) return idist__table_not_a_number();
    request->number = old + delta;
    snprintf(text, sizeof text, "%lld", (long long)request->number);

    return idist__table_put(table, request->key, text, strlen(text));
}

static idist_status idist__table_truncated(size_t nbytes, size_t capacity) {
    return idist__fail(IDIST_ERR_TRUNCATED,
                       "store: the value has %zu bytes, but the buffer has room for %zu", nbytes,
                       capacity);
}

// Copies a value into the caller's buffer.
static idist_status idist__table_copy_out(idist__store_request *request, const void *value,
                                          size_t nbytes) {
    request->nbytes = nbytes;
    if (nbytes > request->capacity) return idist__table_truncated(nbytes, request->capacity);
    if (nbytes) memcpy(request->value, value, nbytes);
    return IDIST_OK;
}

// A missing key counts as an empty value. The caller gets the value that the key has afterwards.
static idist_status idist__table_compare_set(idist__table *table, idist__store_request *request,
                                             bool *changed) {
    idist__entry *entry = *idist__table_find(table, request->key);
    const char *value = entry ? entry->value : NULL;
    size_t nbytes = entry ? entry->value_nbytes : 0;
    idist_status status;

    if (nbytes != request->a.nbytes || (nbytes && memcmp(value, request->a.data, nbytes) != 0))
        return idist__table_copy_out(request, value, nbytes);

    status = idist__table_put(table, request->key, request->b.data, request->b.nbytes);
    if (status != IDIST_OK) return status;
    *changed = true;

    return idist__table_copy_out(request, request->b.data, request->b.nbytes);
}

// The key of the will that a CLAIM leaves, whose sum is known. `name` has room for
// IDIST__WILL_KEY_MAX bytes.
static idist__blob idist__table_will_key(const idist__store_request *claim, char *name) {
    const char *pattern = claim->a.data;
    size_t before = claim->a.nbytes, after;
    int digits = 0;
    idist__blob key;

    while (before && pattern[before - 1] != '%') before--;
    after = claim->a.nbytes - before;
    if (before) memcpy(name, pattern, before - 1);
    if (before) digits = snprintf(name + before - 1, 24, "%lld", (long long)claim->number);
    key.data = name;
    key.nbytes = (before ? before - 1 : 0) + (size_t)digits;
    memcpy(name + key.nbytes, pattern + before, after);
    key.nbytes += after;

    return key;
}

// Carries out a request, except for the will of a CLAIM. *wait: it must be tried again after the
// table has changed. *changed: the entry of request->key is now another one, or gone.
static idist_status idist__table_apply(idist__table *table, idist__store_request *request,
                                       bool *wait, bool *changed) {
    idist__entry *entry;
    idist_status status;

    *wait = *changed = false;

    switch (request->op) {
    case IDIST__STORE_SET:
        status = idist__table_put(table, request->key, request->a.data, request->a.nbytes);
        *changed = status == IDIST_OK;
        return status;
    case IDIST__STORE_COMPARE_SET: return idist__table_compare_set(table, request, changed);
    case IDIST__STORE_GET:
        entry = *idist__table_find(table, request->key);
        *wait = !entry;
        return entry ? idist__table_copy_out(request, entry->value, entry->value_nbytes) : IDIST_OK;
    case IDIST__STORE_CLAIM:
        request->number = 1;
        status = idist__table_add(table, request);
        *changed = status == IDIST_OK;
        return status;
    case IDIST__STORE_DROP_WILL: return IDIST_OK;
    case IDIST__STORE_ADD:
        status = idist__table_add(table, request);
        *changed = status == IDIST_OK;
        return status;
    case IDIST__STORE_CHECK: request->flag = !idist__table_missing(table, request); return IDIST_OK;
    case IDIST__STORE_WAIT: *wait = idist__table_missing(table, request) != NULL; return IDIST_OK;
    case IDIST__STORE_NUM_KEYS: request->number = (int64_t)table->key_count; return IDIST_OK;
    case IDIST__STORE_DELETE:
        *changed = request->flag = idist__table_remove(table, request->key);
        return IDIST_OK;
    default: return idist__fail(IDIST_ERR_ARG, "store: unknown request %d", request->op);
    }
}

// The deadline of a GET or WAIT has passed. The text names the first missing key; without a table
// (it is the server's) the first key: see idist__store_name_missing.
static idist_status idist__table_timed_out(const idist__store_request *request,
                                           idist__table *table) {
    const idist__blob *missing = table ? idist__table_missing(table, request) : NULL;

    if (!missing) missing = request->nkeys ? &request->keys[0] : &request->key;
    return idist__fail(IDIST_ERR_TIMEOUT, "store: the key \"%.*s\" did not appear in time",
                       (int)missing->nbytes, missing->data);
}
