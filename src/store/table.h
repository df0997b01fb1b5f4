// store/table.h: growing buffers; requests, and the table that carries them out
#pragma once

#include "base/fail.h"
#include "base/text.h"
#include "base/mem.h"
#include "base/hash.h"

//------------------------------------------------------------------------------
// growing buffers
//------------------------------------------------------------------------------

typedef struct idist__buffer {
    char *data;
    size_t nbytes;
    size_t capacity;
} idist__buffer;

// Grows a buffer to at least `wanted` bytes and keeps its first `used` bytes. Growth at least
// doubles the capacity, so that appending is cheap. Returns false, and changes nothing, if memory
// is exhausted.
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

// Removes bytes from the front of a buffer.
static void idist__buffer_consume(idist__buffer *buffer, size_t nbytes) {
    if (nbytes) memmove(buffer->data, buffer->data + nbytes, buffer->nbytes - nbytes);
    buffer->nbytes -= nbytes;
}

//------------------------------------------------------------------------------
// requests, and the table that carries them out
//
// Each public function fills in one request and passes it to the store's `run`. All kinds of stores
// carry out a request on a table with idist__table_apply:
//
//     idist_store_get -> idist__store_fetch -> store->run -> (file, socket) -> idist__table_apply
//
// The table is a hash table of 256 chains. Keys and values are byte strings with a length. ADD
// stores numbers as decimal text, as torch does.
//------------------------------------------------------------------------------

// Operations, with the numbers of torch's TCPStore. The numbers are sent over the wire.
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
    // Our own operations, which torch does not have:
    IDIST__STORE_CLAIM = 100,       // ADD 1 and leave a will, see idist__store_request
    IDIST__STORE_AWAIT_VALUE = 101, // WAIT and GET in one request
    IDIST__STORE_DROP_WILL = 102    // withdraw the will
};

#define IDIST__KEY_MAX 1024u
#define IDIST__VALUE_MAX (8u << 20)
#define IDIST__KEYS_MAX 65536u
#define IDIST__WILL_KEY_MAX (IDIST__KEY_MAX + 32) // includes the digits of the sum

// Replaces the length of the value in the answer to a GET whose key has just been deleted. Torch's
// protocol does not provide for this case.
static const uint64_t IDIST__NO_VALUE = UINT64_MAX;
// Answer to an ADD or CLAIM that fails, for example because the key holds text.
static const int64_t IDIST__NOT_A_NUMBER = INT64_MIN;

// A byte string that somebody else owns.
typedef struct idist__blob {
    const char *data;
    size_t nbytes;
} idist__blob;

// A request to a store.
//
// A will is a key and a value that the store sets when the process that left the will ends. A
// process has at most one will in a store; a new will replaces it. CLAIM adds 1 to a number and
// leaves a will in one step, so that no process can die between the two. The last '%' in the will's
// key stands for the sum.
typedef struct idist__store_request {
    int op;          // IDIST__STORE_*
    idist__blob key; // for operations on one key
    idist__blob a;   // SET: the value; COMPARE_SET: the expected value; CLAIM: the will's key
    idist__blob b;   // COMPARE_SET: the desired value; CLAIM: the will's value
    int64_t number;  // ADD: the delta, then the sum; CLAIM: the sum; NUM_KEYS: the result
    const idist__blob *keys; // for CHECK and WAIT
    size_t nkeys;
    void *value; // GET, COMPARE_SET: the caller's buffer
    size_t capacity;
    size_t nbytes;        // size of the value, even if it does not fit
    bool flag;            // CHECK: all keys exist; DELETE: the key existed
    bool posted;          // SET, CLAIM: do not wait for an answer
    int64_t deadline_ns;  // for GET and WAIT
    int64_t answer_by_ns; // latest time for the server's answer, 0 if unlimited
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
    idist__entry *chains[256]; // indexed by the hash of the key
    size_t key_count;
} idist__table;

// A store. Each kind of store has its own functions, and its own data behind `impl`.
struct idist_store {
    idist_status (*run)(idist_store *store,
                        idist__store_request *req); // may block until the request's deadline
    void (*close)(idist_store *store);              // frees impl
    idist_allocator mem;
    int timeout_ms;       // default for calls without a time-out
    int port;             // port of the server's socket, 0 if none
    int64_t answer_by_ns; // answer_by_ns of every request, 0 if none
    bool is_lost;         // a request failed because the server was lost
    void *impl;
};

// Returns the link that points to the entry of a key. If there is no such entry, returns the NULL
// link at the end of the chain.
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

// Returns the first key of a CHECK or WAIT that does not exist, or NULL if all of them exist.
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
            is_number = strlen(text) == entry->value_nbytes && // no zero byte inside
                        idist__parse_int(text, INT64_MIN, INT64_MAX, &old);
        }

        if (!is_number) return idist__table_not_a_number();
    }

    // The sum must also differ from IDIST__NOT_A_NUMBER.
    fits = delta > 0 ? old <= INT64_MAX - delta : old > INT64_MIN - delta;
    if (!fits) return idist__table_not_a_number();
    request->number = old + delta;
    snprintf(text, sizeof text, "%lld", (long long)request->number);

    return idist__table_put(table, request->key, text, strlen(text));
}

static idist_status idist__table_truncated(size_t nbytes, size_t capacity) {
    return idist__fail(IDIST_ERR_TRUNCATED,
                       "store: the value has %zu bytes, but the buffer holds only %zu", nbytes,
                       capacity);
}

// Copies a value into the caller's buffer. Fails if the buffer is too small.
static idist_status idist__table_copy_out(idist__store_request *request, const void *value,
                                          size_t nbytes) {
    request->nbytes = nbytes;
    if (nbytes > request->capacity) return idist__table_truncated(nbytes, request->capacity);
    if (nbytes) memcpy(request->value, value, nbytes);
    return IDIST_OK;
}

// Sets a value if the current value is the expected one. A missing key counts as an empty value.
// The caller gets the value that the key has afterwards.
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

// Returns the key of the will that a CLAIM leaves. The sum of the CLAIM must be known. The key is
// stored in `name`, which has room for IDIST__WILL_KEY_MAX bytes.
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

// Carries out a request, except for the will of a CLAIM. Sets *wait if the caller must try again
// after the table has changed. Sets *changed if the entry of request->key was set or removed.
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

// Reports that the deadline of a GET or WAIT has passed. The text names the first missing key. A
// client of a server has no table; then the text names the first key of the request, see
// idist__store_name_missing.
static idist_status idist__table_timed_out(const idist__store_request *request,
                                           idist__table *table) {
    const idist__blob *missing = table ? idist__table_missing(table, request) : NULL;

    if (!missing) missing = request->nkeys ? &request->keys[0] : &request->key;
    return idist__fail(IDIST_ERR_TIMEOUT, "store: the key \"%.*s\" did not appear in time",
                       (int)missing->nbytes, missing->data);
}
