/* idist_store.h - v0.2.0 - the key-value store of rendezvous - MIT licence

    Part of the implementation of idist; idist.h includes it where IDIST_IMPLEMENTATION is defined.

    Ranks that do not know each other yet exchange keys and values here: in the memory of one
    process, in a file that all of them can open, or through a server inside rank 0 that speaks the
    protocol of torch's TCPStore. The functions idist_store_* of idist.h end here; the join of the
    ring (idist_join.h) is the main user.

CONTENTS

      [store:buffer]     bytes that grow
      [store:table]      requests, and the table that carries them out
      [store:memory]     a store inside one process
      [store:file]       a store in a file that all ranks open
      [store:wire]       the protocol between client and server: that of torch's TCPStore
      [store:multicast]  how clients find the server when nobody knows its address
      [store:server]     the server: one thread, one table, many connections
      [store:client]     a store behind a socket
      [store:prefix]     a view of another store, with a prefix before each key
      [store:store]      the public functions
*/
#ifndef IDIST_STORE_H
#define IDIST_STORE_H

//------------------------------------------------------------------------------
// [store:buffer]  bytes that grow
// uses mem
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
// [store:table]  requests, and the table that carries them out
// uses fail mem hash parse
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
    size_t nbytes;       // the size of the value, also when it does not fit
    bool flag;           // CHECK: all keys exist; DELETE: the key existed
    bool posted;         // SET, ADD, CLAIM: do not wait for an answer
    int64_t deadline_ns; // of GET and WAIT
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
    int timeout_ms; // of calls that give none
    int port;       // of the server's socket; 0: none
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

//------------------------------------------------------------------------------
// [store:memory]  a store inside one process
// uses clock mutex cond mem table
//
// A table, a mutex and a condition that waiting requests sleep on. Nobody owns it more than the
// others, so there is neither a server nor a client.
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
// [store:file]  a store in a file that all ranks open
// uses clock mutex os:file fail mem table
//
// The file is a log of changes, which every process replays into a table of its own:
//
//     offset  bytes
//     0       8      "IDSTORE1"
//     8       8      u64: bytes of committed records
//     16             records: u32 key_nbytes, u32 value_nbytes (0xffffffff: deleted), key, value
//
// A request locks the records, replays what others have appended, changes its table, appends the
// change, and releases the lock. A process that dies while it writes leaves bytes beyond the
// committed ones, which the next writer overwrites.
//
// Locks on single bytes say who is there. Byte 0 is locked by the server (rank 0) for as long as it
// lives: a file without that lock is the leftover of a dead job. The next server removes it and
// makes a new one, so that a process of the dead job that still has the old file open finds no
// server there. Byte 1 is locked by whoever reads or appends records. Byte 2 is locked by who finds
// byte 1 taken, until it has that: a client that makes one request after the other looks there
// every few milliseconds, and lets the other one go first.
//
// The record of a will has a key of a zero byte and a u64: the offset of a byte that its maker
// keeps locked. Its value is what to set: u32 key_nbytes, key, value. When the lock on that byte is
// gone, any process that waits carries the will out. All records of one request are committed at
// once.
//------------------------------------------------------------------------------

enum {
    IDIST__FILE_SERVER_BYTE = 0,  // locked by the server
    IDIST__FILE_RECORDS_BYTE = 1, // locked during a request
    IDIST__FILE_QUEUE_BYTE = 2,   // locked by a process that waits for the records
    IDIST__FILE_COMMITTED_AT = 8, // offset of the number of committed bytes
    IDIST__FILE_RECORDS_AT = 16,  // offset of the first record
    IDIST__FILE_WILL_KEY_NBYTES = 9
};
// Who a process that opens the file becomes.
typedef enum idist__file_role {
    IDIST__FILE_CLIENT, // waits for a server
    IDIST__FILE_SERVER, // fails where there is one
    IDIST__FILE_EITHER  // the server, unless there is one
} idist__file_role;

enum {
    IDIST__FILE_WILLS_MS = 50,  // between two looks at the locks of the wills' makers
    IDIST__FILE_OPEN_MS = 5,    // between two attempts to find a live server's file
    IDIST__FILE_WAIT_MS = 16,   // the longest pause between two tries of a request that waits
    IDIST__FILE_TURN_MS = 2,    // between two looks at whether another process waits
    IDIST__FILE_YIELD_MS = 100, // the longest pause for that process: it may be stopped
    IDIST__FILE_PASS_MS = 1000  // for how long it is not looked at after such a pause
};
static const uint32_t IDIST__FILE_DELETED = 0xffffffffu;
static const char idist__file_magic[9] = "IDSTORE1";

typedef struct idist__file_store {
    idist__os_mutex lock;
    idist__os_file file;
    bool server;
    char *path;
    idist__table table;    // what the records replayed so far amount to
    idist__table wills;    // the same for the records of wills
    uint64_t replayed;     // bytes of records in both
    uint64_t own_will;     // the byte that we keep locked for our own will; 0: none
    int64_t wills_seen_ns; // when the locks of the wills' makers were last looked at
    int64_t turn_ends_ns;  // when to look again whether another process waits
} idist__file_store;

// Without this, who makes requests in a loop would have the lock nearly always when another process
// tries it.
static void idist__file_store_give_way(idist__file_store *f, int64_t deadline_ns) {
    int64_t now = idist__os_clock_now_ns(), until_ns = now + IDIST__FILE_YIELD_MS * IDIST__MS;
    bool waits;

    if (now < f->turn_ends_ns) return;
    if (deadline_ns < until_ns) until_ns = deadline_ns;

    for (;;) {
        waits = idist__os_file_locked(f->file, IDIST__FILE_QUEUE_BYTE) == IDIST__OS_FILE_LOCKED;
        if (!waits || idist__os_clock_ms_until(until_ns) == 0) break;
        idist__os_clock_pause_ms(1);
    }

    f->turn_ends_ns =
        idist__os_clock_now_ns() + (waits ? IDIST__FILE_PASS_MS : IDIST__FILE_TURN_MS) * IDIST__MS;
}

// Locks the records. Holders keep that lock for microseconds, unless they are stopped.
static idist_status idist__file_store_lock_records(idist__file_store *f, int64_t deadline_ns) {
    bool queued = false, locked, over = false;

    idist__file_store_give_way(f, deadline_ns);

    for (;;) {
        locked = idist__os_file_try_lock(f->file, IDIST__FILE_RECORDS_BYTE);
        if (!locked) over = errno != EAGAIN || idist__os_clock_ms_until(deadline_ns) == 0;
        if (locked || over) break;
        if (!queued) queued = idist__os_file_try_lock(f->file, IDIST__FILE_QUEUE_BYTE);
        idist__os_clock_pause_ms(1);
    }

    if (queued) idist__os_file_unlock(f->file, IDIST__FILE_QUEUE_BYTE);
    if (locked) return IDIST_OK;

    return idist__fail(IDIST_ERR_TIMEOUT,
                       "store: %s stays locked: a process that uses it is stopped, or the file "
                       "system does not support locks",
                       f->path);
}

static void idist__file_store_unlock_records(const idist__file_store *f) {
    idist__os_file_unlock(f->file, IDIST__FILE_RECORDS_BYTE);
}

// What the system does not let us do with the file.
static idist_status idist__file_store_fail_access(const idist__file_store *f, const char *verb,
                                                  int err) {
    char what[sizeof idist__me.text];

    snprintf(what, sizeof what, "store: %s cannot be %s", f->path, verb);
    return idist__fail_errno(what, err);
}

static bool idist__file_store_has_server(const idist__file_store *f) {
    return idist__os_file_locked(f->file, IDIST__FILE_SERVER_BYTE) == IDIST__OS_FILE_LOCKED;
}

static bool idist__file_store_has_magic(const idist__file_store *f) {
    char magic[8];
    return idist__os_file_read_at(f->file, magic, sizeof magic, 0) &&
           memcmp(magic, idist__file_magic, sizeof magic) == 0;
}

// The table to which a record belongs.
static idist__table *idist__file_store_table_of(idist__file_store *f, idist__blob key) {
    bool is_will = key.nbytes == IDIST__FILE_WILL_KEY_NBYTES && !key.data[0];
    return is_will ? &f->wills : &f->table;
}

static void idist__file_store_forget(idist__file_store *f) {
    idist__table_clear(&f->table);
    idist__table_clear(&f->wills);
    f->replayed = 0;
}

static idist_status idist__file_store_replay_record(idist__file_store *f) {
    uint64_t at = IDIST__FILE_RECORDS_AT + f->replayed;
    idist_status status = IDIST_OK;
    uint32_t size[2]; // of key and value
    size_t value_nbytes;
    idist__blob key;
    char *record;

    if (!idist__os_file_read_at(f->file, size, sizeof size, at))
        return idist__file_store_fail_access(f, "read", errno);
    value_nbytes = size[1] == IDIST__FILE_DELETED ? 0 : size[1];
    if (size[0] > IDIST__KEY_MAX + 1 || value_nbytes > IDIST__VALUE_MAX)
        return idist__fail(IDIST_ERR_ARG, "store: %s is damaged", f->path);
    record = (char *)idist__mem_alloc(&f->table.mem, size[0] + value_nbytes);
    if (!record) return IDIST_ERR_NO_MEMORY;

    key.data = record;
    key.nbytes = size[0];
    if (!idist__os_file_read_at(f->file, record, size[0] + value_nbytes, at + sizeof size))
        status = idist__file_store_fail_access(f, "read", errno);
    else if (size[1] == IDIST__FILE_DELETED)
        idist__table_remove(idist__file_store_table_of(f, key), key);
    else
        status = idist__table_put(idist__file_store_table_of(f, key), key, record + size[0],
                                  value_nbytes);
    idist__mem_free(&f->table.mem, record);
    if (status == IDIST_OK) f->replayed += sizeof size + size[0] + value_nbytes;

    return status;
}

// Brings the tables up to date. The records are locked.
static idist_status idist__file_store_replay(idist__file_store *f) {
    uint64_t committed;
    idist_status status = IDIST_OK;

    if (!idist__file_store_has_magic(f) ||
        !idist__os_file_read_at(f->file, &committed, sizeof committed, IDIST__FILE_COMMITTED_AT))
        return idist__fail(IDIST_ERR_ARG, "store: %s is not a store file", f->path);

    while (f->replayed < committed && status == IDIST_OK)
        status = idist__file_store_replay_record(f);

    return status;
}

// Appends the entry that a key has in our table now, or that it has none. The records are locked.
// Nobody sees the new record before idist__file_store_commit.
static idist_status idist__file_store_append(idist__file_store *f, idist__blob key) {
    idist__entry *entry = *idist__table_find(idist__file_store_table_of(f, key), key);
    uint64_t at = IDIST__FILE_RECORDS_AT + f->replayed;
    uint32_t size[2];

    size[0] = (uint32_t)key.nbytes;
    size[1] = entry ? (uint32_t)entry->value_nbytes : IDIST__FILE_DELETED;
    if (!idist__os_file_write_at(f->file, size, sizeof size, at) ||
        !idist__os_file_write_at(f->file, key.data, key.nbytes, at + sizeof size) ||
        (entry && !idist__os_file_write_at(f->file, entry->value, entry->value_nbytes,
                                           at + sizeof size + key.nbytes)))
        return idist__file_store_fail_access(f, "written", errno);
    f->replayed += sizeof size + key.nbytes + (entry ? entry->value_nbytes : 0);

    return IDIST_OK;
}

// Makes the records that were appended since `committed` part of the file.
static idist_status idist__file_store_commit(const idist__file_store *f, uint64_t committed) {
    if (f->replayed == committed ||
        idist__os_file_write_at(f->file, &f->replayed, sizeof f->replayed,
                                IDIST__FILE_COMMITTED_AT))
        return IDIST_OK;
    return idist__file_store_fail_access(f, "written", errno);
}

// The key of the will whose maker has locked the byte `at`.
static idist__blob idist__file_store_will_key(uint64_t at, char *buf) {
    idist__blob key;

    buf[0] = 0;
    memcpy(buf + 1, &at, sizeof at);
    key.data = buf;
    key.nbytes = IDIST__FILE_WILL_KEY_NBYTES;
    return key;
}

// Takes our own will back, if there is one.
static idist_status idist__file_store_drop_will(idist__file_store *f) {
    char buf[IDIST__FILE_WILL_KEY_NBYTES];
    idist__blob key = idist__file_store_will_key(f->own_will, buf);
    idist_status status = IDIST_OK;

    if (!f->own_will) return IDIST_OK;
    if (idist__table_remove(&f->wills, key)) status = idist__file_store_append(f, key);
    idist__os_file_unlock(f->file, f->own_will);
    f->own_will = 0;

    return status;
}

// Replaces our will by that of a CLAIM. The offset of its record, which no other will can have,
// names the byte to lock.
static idist_status idist__file_store_set_will(idist__file_store *f,
                                               const idist__store_request *claim) {
    char buf[IDIST__FILE_WILL_KEY_NBYTES], name[IDIST__WILL_KEY_MAX];
    idist__blob key = idist__table_will_key(claim, name);
    uint32_t key_nbytes = (uint32_t)key.nbytes;
    size_t nbytes = sizeof key_nbytes + key.nbytes + claim->b.nbytes;
    idist_status status = idist__file_store_drop_will(f);
    char *value;

    if (status != IDIST_OK) return status;
    value = (char *)idist__mem_alloc(&f->table.mem, nbytes);
    if (!value) return IDIST_ERR_NO_MEMORY;
    memcpy(value, &key_nbytes, sizeof key_nbytes);
    memcpy(value + sizeof key_nbytes, key.data, key_nbytes);
    memcpy(value + sizeof key_nbytes + key_nbytes, claim->b.data, claim->b.nbytes);

    f->own_will = IDIST__FILE_RECORDS_AT + f->replayed;
    key = idist__file_store_will_key(f->own_will, buf);
    if (idist__os_file_try_lock(f->file, f->own_will))
        status = idist__table_put(&f->wills, key, value, nbytes);
    else status = idist__file_store_fail_access(f, "locked", errno);
    if (status == IDIST_OK) status = idist__file_store_append(f, key);
    idist__mem_free(&f->table.mem, value);

    return status;
}

// Sets what the maker of a will asked for, and deletes the will. A value that the key has already
// stays.
static idist_status idist__file_store_execute_will(idist__file_store *f, const idist__entry *will) {
    char buf[IDIST__FILE_WILL_KEY_NBYTES];
    idist__blob key, will_key;
    uint32_t key_nbytes;
    idist_status status = IDIST_OK;

    memcpy(buf, will->key, sizeof buf);
    will_key.data = buf;
    will_key.nbytes = sizeof buf;
    memcpy(&key_nbytes, will->value, sizeof key_nbytes);
    key.data = will->value + sizeof key_nbytes;
    key.nbytes = key_nbytes;

    if (!*idist__table_find(&f->table, key)) {
        status = idist__table_put(&f->table, key, key.data + key_nbytes,
                                  will->value_nbytes - sizeof key_nbytes - key_nbytes);
        if (status == IDIST_OK) status = idist__file_store_append(f, key);
    }

    idist__table_remove(&f->wills, will_key);
    if (status == IDIST_OK) status = idist__file_store_append(f, will_key);

    return status;
}

// Whether the maker of a will has ended without taking it back.
static bool idist__file_store_will_is_due(const idist__file_store *f, const idist__entry *will) {
    uint32_t key_nbytes = 0;
    uint64_t at;

    memcpy(&at, will->key + 1, sizeof at);
    if (will->value_nbytes >= sizeof key_nbytes)
        memcpy(&key_nbytes, will->value, sizeof key_nbytes);
    if (!key_nbytes || key_nbytes > will->value_nbytes - sizeof key_nbytes) return false; // damaged
    return at != f->own_will && idist__os_file_locked(f->file, at) == IDIST__OS_FILE_FREE;
}

// Carries out the wills of processes that have ended. The records are locked.
static idist_status idist__file_store_execute_wills(idist__file_store *f) {
    int64_t now = idist__os_clock_now_ns();
    idist_status status = IDIST_OK;
    size_t i;

    if (!f->wills.key_count || now - f->wills_seen_ns < IDIST__FILE_WILLS_MS * IDIST__MS)
        return IDIST_OK;
    f->wills_seen_ns = now;

    for (i = 0; i < IDIST__COUNT_OF(f->wills.chains); i++) {
        idist__entry *will, *next;

        for (will = f->wills.chains[i]; will && status == IDIST_OK; will = next) {
            next = will->next;
            if (idist__file_store_will_is_due(f, will))
                status = idist__file_store_execute_will(f, will);
        }
    }

    return status;
}

// Carries out a request. The records are locked.
static idist_status idist__file_store_apply(idist__file_store *f, idist__store_request *request,
                                            bool *wait, bool *changed) {
    idist_status status = idist__file_store_replay(f), appended;
    uint64_t committed = f->replayed;

    if (status == IDIST_OK) status = idist__file_store_execute_wills(f);
    if (status != IDIST_OK) return status;
    status = idist__table_apply(&f->table, request, wait, changed);

    appended = *changed ? idist__file_store_append(f, request->key) : IDIST_OK;
    if (request->op == IDIST__STORE_DROP_WILL) appended = idist__file_store_drop_will(f);
    if (request->op == IDIST__STORE_CLAIM && *changed && appended == IDIST_OK)
        appended = idist__file_store_set_will(f, request);
    if (appended == IDIST_OK) appended = idist__file_store_commit(f, committed);

    // A value that was changed may still be too long for the caller.
    return appended == IDIST_OK ? status : appended;
}

// Tries a request once. *wait: try it again later.
static idist_status idist__file_store_try(idist__file_store *f, idist__store_request *request,
                                          bool *wait) {
    bool changed = false, needs_server;
    idist_status status = idist__file_store_lock_records(f, request->deadline_ns);

    if (status != IDIST_OK) return status;
    status = idist__file_store_apply(f, request, wait, &changed);
    if (status != IDIST_OK)
        idist__file_store_forget(
            f); // the tables may be ahead of the file: replay all of it next time
    idist__file_store_unlock_records(f);
    if (status != IDIST_OK) return status;

    // Who does not wait for an answer does not learn here that the server has left: it may be the
    // one that this change allowed to leave.
    needs_server = *wait || (changed && !request->posted) || request->op == IDIST__STORE_CHECK;
    if (needs_server && !f->server && !idist__file_store_has_server(f))
        return idist__fail(IDIST_ERR_PEER_LOST, "store: the process that owns %s has ended",
                           f->path);
    if (*wait && idist__os_clock_ms_until(request->deadline_ns) == 0)
        return idist__table_timed_out(request, &f->table);

    return IDIST_OK;
}

static idist_status idist__file_store_run(idist_store *store, idist__store_request *request) {
    idist__file_store *f = (idist__file_store *)store->impl;
    int pause_ms = 1;

    for (;;) {
        bool wait = false;
        idist_status status;

        idist__os_mutex_lock(&f->lock);
        status = idist__file_store_try(f, request, &wait);
        idist__os_mutex_unlock(&f->lock);
        if (status != IDIST_OK || !wait) return status;

        idist__os_clock_pause_ms(pause_ms);
        if (pause_ms < IDIST__FILE_WAIT_MS) pause_ms *= 2;
    }
}

// The server removes the file. Closing it releases all our locks.
static void idist__file_store_close(idist_store *store) {
    idist__file_store *f = (idist__file_store *)store->impl;

    if (f->server && f->file >= 0 && idist__os_file_is_at(f->file, f->path))
        idist__os_file_remove(f->path);
    idist__os_file_close(&f->file);
    idist__file_store_forget(f);
    idist__os_mutex_destroy(&f->lock);
    idist__mem_free(&store->mem, f->path);
    idist__mem_free(&store->mem, f);
}

// A file that is neither empty nor a store's belongs to somebody else.
static idist_status idist__file_store_check_ours(const idist__file_store *f) {
    int64_t nbytes = idist__os_file_size(f->file);

    if (nbytes == 0 || (nbytes > 0 && idist__file_store_has_magic(f))) return IDIST_OK;
    return idist__fail(IDIST_ERR_ARG,
                       "store: %s exists and is not a store file; it was left unchanged", f->path);
}

static idist_status idist__file_store_fail_open(const idist__file_store *f) {
    return idist__file_store_fail_access(f, "opened", errno);
}

// Opens the file and locks its records. A server that ends removes its file, perhaps between our
// open and our lock, so the path must still lead to the file that we have locked.
static idist_status idist__file_store_create(idist__file_store *f, int64_t deadline_ns) {
    for (;;) {
        idist_status status;

        f->file = idist__os_file_open(f->path, IDIST__OS_FILE_CREATE);
        if (f->file < 0) return idist__file_store_fail_open(f);
        status = idist__file_store_lock_records(f, deadline_ns);
        if (status == IDIST_OK && idist__os_file_is_at(f->file, f->path)) return IDIST_OK;
        idist__os_file_close(&f->file); // also on failure: closing the store must not remove it
        if (status != IDIST_OK) return status;
    }
}

// Tries to become the server of the file, whose records we have locked. *taken: another process is.
// *again: the file was the leftover of a dead server and has been removed; open the path anew. In a
// folder where we may not remove it, it is emptied instead.
static idist_status idist__file_store_claim(idist__file_store *f, bool *taken, bool *again) {
    uint64_t committed = 0;
    idist_status status;

    *again = false;
    *taken = !idist__os_file_try_lock(f->file, IDIST__FILE_SERVER_BYTE);
    if (*taken) return IDIST_OK;
    status = idist__file_store_check_ours(f);
    if (status != IDIST_OK) return status;

    if (idist__os_file_size(f->file) > 0) {
        idist__os_file_remove(f->path);
        *again = !idist__os_file_is_at(f->file, f->path);
        if (*again) return IDIST_OK;
    }

    if (!idist__os_file_resize(f->file, 0) ||
        !idist__os_file_write_at(f->file, idist__file_magic, 8, 0) ||
        !idist__os_file_write_at(f->file, &committed, sizeof committed, IDIST__FILE_COMMITTED_AT)) {
        status = idist__file_store_fail_access(f, "written", errno);
        idist__os_file_remove(f->path); // nobody could use it
    }

    return status;
}

// The server takes the file: it keeps the first byte locked, and the table is empty. Where there is
// a server, `either` makes us a client.
static idist_status idist__file_store_serve(idist__file_store *f, bool either,
                                            int64_t deadline_ns) {
    bool taken = false, again = true;
    idist_status status = IDIST_OK;

    while (again && status == IDIST_OK) {
        status = idist__file_store_create(f, deadline_ns);
        if (status != IDIST_OK) return status;
        status = idist__file_store_claim(f, &taken, &again);
        f->server = !taken;
        if (taken && !either)
            status =
                idist__fail(IDIST_ERR_ADDR_IN_USE, "store: %s belongs to a running job", f->path);
        idist__file_store_unlock_records(f);
        if (again || status != IDIST_OK)
            idist__os_file_close(&f->file); // before anybody takes us for the server
    }

    return status;
}

// No server came. A folder that is missing here may be one that this host has not mounted.
static idist_status idist__file_store_fail_unserved(const idist__file_store *f) {
    bool has_folder = idist__os_file_has_folder(f->path);

    return idist__fail(IDIST_ERR_TIMEOUT, "store: no running process owns %s: %s", f->path,
                       has_folder ? "rank 0 has not started"
                                  : "its folder does not exist here: is it mounted on this host?");
}

// Whether the file that we have open is a store whose server lives.
static idist_status idist__file_store_find_server(idist__file_store *f, int64_t deadline_ns,
                                                  bool *is_served) {
    idist_status status;

    *is_served = false;
    if (idist__file_store_lock_records(f, deadline_ns) != IDIST_OK) return IDIST_OK;
    status = idist__file_store_check_ours(f);
    if (status == IDIST_OK)
        *is_served = idist__file_store_has_server(f) && idist__file_store_has_magic(f);
    idist__file_store_unlock_records(f);

    return status;
}

// Waits until the server has ended, at most until the deadline.
static void idist__file_store_await_end(idist_store *store, int64_t deadline_ns) {
    const idist__file_store *f = (const idist__file_store *)store->impl;

    while (idist__file_store_has_server(f) && idist__os_clock_ms_until(deadline_ns) != 0)
        idist__os_clock_pause_ms(IDIST__FILE_OPEN_MS);
}

// A client waits for a file whose server lives. It opens the path anew each time, because the file
// may have been replaced.
static idist_status idist__file_store_join(idist__file_store *f, int64_t deadline_ns) {
    for (;;) {
        idist_status status = IDIST_OK;
        bool is_served = false;

        f->file = idist__os_file_open(f->path, IDIST__OS_FILE_UPDATE);
        if (f->file < 0 && errno != ENOENT) return idist__file_store_fail_open(f);
        if (f->file >= 0) status = idist__file_store_find_server(f, deadline_ns, &is_served);
        if (is_served || status != IDIST_OK) return status;

        idist__os_file_close(&f->file);
        if (idist__os_clock_ms_until(deadline_ns) == 0) return idist__file_store_fail_unserved(f);
        idist__os_clock_pause_ms(IDIST__FILE_OPEN_MS);
    }
}

// When this fails, the caller closes the store.
static idist_status idist__file_store_open(idist_store *store, const char *path,
                                           idist__file_role role, int64_t deadline_ns) {
    idist__file_store *f = (idist__file_store *)idist__mem_alloc(&store->mem, sizeof *f);

    if (!f) return IDIST_ERR_NO_MEMORY;
    f->file = -1;
    f->table.mem = f->wills.mem = store->mem;
    idist__os_mutex_init(&f->lock);
    store->impl = f;
    store->run = idist__file_store_run;
    store->close = idist__file_store_close;

    f->path = (char *)idist__mem_alloc(&store->mem, strlen(path) + 1);
    if (!f->path) return IDIST_ERR_NO_MEMORY;
    memcpy(f->path, path, strlen(path) + 1);

    if (role == IDIST__FILE_CLIENT) return idist__file_store_join(f, deadline_ns);
    return idist__file_store_serve(f, role == IDIST__FILE_EITHER, deadline_ns);
}

//------------------------------------------------------------------------------
// [store:wire]  the protocol between client and server: that of torch's TCPStore
// uses table
//
// A request is one byte, the operation (see IDIST__STORE_SET), and its fields. Numbers are
// in the client's byte order, strings are a u64 length and their bytes, and every key begins with
// '/'. A connection begins with VALIDATE and a magic number. A client sends WAIT before each GET.
//
//     operation            fields                     answer
//     VALIDATE             u32 magic                  -
//     SET                  key, value                 -
//     COMPARE_SET          key, expected, desired     value
//     GET                  key                        value
//     ADD                  key, i64 delta             i64 sum
//     CHECK                u64 count, keys            u8: 0 all exist, 1 not
//     WAIT                 u64 count, keys            u8: 0 all exist, 1 canceled
//     NUM_KEYS             -                          i64
//     DELETE               key                        i64: 1 deleted, 0 there was none
//     CANCEL_WAIT          -                          that of the WAIT, or none if it crosses it
//
// A client of our own server also knows these:
//
//     CLAIM                key, key, value            i64 sum
//     AWAIT_VALUE          key                        u8 of WAIT, then value if that is 0
//     DROP_WILL            -                          -
//------------------------------------------------------------------------------

#define IDIST__STORE_MAGIC 0x3C85F7CEu
#define IDIST__STORE_REQUEST_MAX ((size_t)IDIST__VALUE_MAX + 64 * 1024)

// What is left of the bytes of a request.
typedef struct idist__wire_reader {
    const char *next;
    size_t remaining;
    bool truncated; // it needs more bytes than there are
    bool invalid;   // a length exceeds its limit
} idist__wire_reader;

static void idist__wire_read(idist__wire_reader *reader, void *value, size_t nbytes) {
    memset(value, 0, nbytes);
    if (reader->truncated || reader->invalid) return;

    if (reader->remaining < nbytes) {
        reader->truncated = true;
        return;
    }

    memcpy(value, reader->next, nbytes);
    reader->next += nbytes;
    reader->remaining -= nbytes;
}

static idist__blob idist__wire_read_blob(idist__wire_reader *reader, uint64_t limit) {
    idist__blob blob;
    uint64_t nbytes;

    idist__wire_read(reader, &nbytes, sizeof nbytes);
    blob.data = reader->next;
    blob.nbytes = 0;
    if (reader->truncated || reader->invalid) return blob;

    if (nbytes > limit) reader->invalid = true;
    else if (nbytes > reader->remaining) reader->truncated = true;
    else {
        blob.nbytes = (size_t)nbytes;
        reader->next += nbytes;
        reader->remaining -= (size_t)nbytes;
    }

    return blob;
}

// The fields of an operation, in order: m magic, k key, w key of a will, v value, h value of half
// the limit, n number, l list of keys. NULL: there is no such operation.
static const char *idist__wire_fields(int op) {
    switch (op) {
    case IDIST__STORE_VALIDATE: return "m";
    case IDIST__STORE_SET: return "kv";
    case IDIST__STORE_CLAIM: return "kwv";
    case IDIST__STORE_COMPARE_SET: return "khh";
    case IDIST__STORE_GET:
    case IDIST__STORE_AWAIT_VALUE:
    case IDIST__STORE_DELETE: return "k";
    case IDIST__STORE_ADD: return "kn";
    case IDIST__STORE_CHECK:
    case IDIST__STORE_WAIT: return "l";
    case IDIST__STORE_NUM_KEYS:
    case IDIST__STORE_DROP_WILL:
    case IDIST__STORE_CANCEL_WAIT: return "";
    default: return NULL;
    }
}

static void idist__wire_read_keys(idist__wire_reader *reader, idist__store_request *request,
                                  idist__blob *keys, size_t keys_capacity) {
    uint64_t i, count;

    idist__wire_read(reader, &count, sizeof count);
    if (count > keys_capacity) reader->invalid = true;
    for (i = 0; i < count && !reader->truncated && !reader->invalid; i++)
        keys[i] = idist__wire_read_blob(reader, IDIST__KEY_MAX + 1);
    request->keys = keys;
    request->nkeys = (size_t)count;
}

// Reads one request from the front of a buffer. > 0: its size; 0: more bytes are needed; -1: it is
// invalid. The request points into the buffer and into `keys`.
static ptrdiff_t idist__wire_parse(const char *buf, size_t nbytes, idist__store_request *request,
                                   idist__blob *keys, size_t keys_capacity) {
    const char *field;
    idist__wire_reader reader;
    idist__blob *value = &request->a; // what follows goes into request->b
    uint32_t magic;
    uint64_t limit;

    memset(request, 0, sizeof *request);
    memset(&reader, 0, sizeof reader);
    if (!nbytes) return 0;
    reader.next = buf + 1;
    reader.remaining = nbytes - 1;
    request->op = (unsigned char)buf[0];
    field = idist__wire_fields(request->op);
    if (!field) return -1;

    for (; *field; field++) {
        switch (*field) {
        case 'm':
            idist__wire_read(&reader, &magic, sizeof magic);
            request->number = (int64_t)magic;
            break;
        case 'k': request->key = idist__wire_read_blob(&reader, IDIST__KEY_MAX + 1); break;
        case 'w':
        case 'v':
        case 'h':
            limit = *field == 'v' ? IDIST__VALUE_MAX : IDIST__VALUE_MAX / 2;
            if (*field == 'w') limit = IDIST__KEY_MAX + 1;
            *value = idist__wire_read_blob(&reader, limit);
            value = &request->b;
            break;
        case 'n': idist__wire_read(&reader, &request->number, sizeof request->number); break;
        case 'l': idist__wire_read_keys(&reader, request, keys, keys_capacity); break;
        default: return -1;
        }
    }

    if (reader.invalid) return -1;

    return reader.truncated ? 0 : reader.next - buf;
}

//------------------------------------------------------------------------------
// [store:multicast]  how clients find the server when nobody knows its address
// uses clock os:env poll socket fail sha address
//
// "cast:GROUP:PORT/JOB": a client asks an IPv4 multicast group where the server of its job is, and
// the server answers that client alone. Both are datagrams of 18 bytes:
//
//     question   | tag 16 | 0 2    |        tag: the first half of HMAC(key, "multicast", JOB)
//     answer     | tag 16 | port 2 |        port: big endian
//
// Anybody can answer; the handshake of the connection decides whether the answer was right.
//------------------------------------------------------------------------------

enum { IDIST__MULTICAST_TAG_NBYTES = 16, IDIST__MULTICAST_NBYTES = 18, IDIST__MULTICAST_MS = 100 };

typedef struct idist__multicast {
    int fd; // -1: the store does not use multicast
    idist__os_address group;
    uint8_t tag[32];
    char ip[64]; // ours, on the interface through which packets to the group leave
} idist__multicast;

// The address of our interface: IDIST_ADDR, or else what the routing table says.
static idist_status idist__multicast_own_address(const idist__multicast *m, const char *group,
                                                 idist__os_address *own) {
    const char *host = idist__os_env("IDIST_ADDR");
    idist_status status = IDIST_OK;

    if (!host) {
        if (idist__os_socket_route(&m->group, own)) return IDIST_OK;
        if (idist__os_socket_out_of_fds(errno)) return idist__fail_errno("socket", errno);
        return idist__fail(IDIST_ERR_SYSTEM,
                           "store: no route to %s (%s): set IDIST_ADDR to this host's address",
                           group, strerror(errno));
    }

    status = idist__address_tcp(own, host, 0);
    if (status == IDIST_OK && !idist__os_socket_is_ipv4(own))
        return idist__fail(IDIST_ERR_ENV, "store: IDIST_ADDR=%s: multicast needs an IPv4 address",
                           host);

    return status;
}

// text: "GROUP:PORT/JOB". When this fails, the caller closes m->fd.
static idist_status idist__multicast_open(idist__multicast *m, const char *text, bool server,
                                          const uint8_t key[32]) {
    const char *job = strchr(text, '/');
    char group[300];
    idist__os_address own;
    idist_status status;

    snprintf(group, sizeof group, "tcp:%.*s", (int)(job - text), text);
    idist__sha_hmac(key, "multicast", job, strlen(job), NULL, 0, m->tag);
    status = idist__address_parse(&m->group, group);
    if (status != IDIST_OK) return status;
    status = idist__multicast_own_address(m, group + 4, &own);
    if (status != IDIST_OK) return status;

    idist__os_socket_host_text(&own, m->ip, sizeof m->ip);
    m->fd = idist__os_socket_multicast(&m->group, &own, server);
    if (m->fd < 0)
        return idist__fail(IDIST_ERR_SYSTEM,
                           "store: no multicast to %s through the interface of %s%s: %s", group + 4,
                           m->ip, idist__os_env("IDIST_ADDR") ? " (IDIST_ADDR)" : "",
                           strerror(errno));

    return IDIST_OK;
}

// The server answers all pending questions.
static void idist__multicast_answer(const idist__multicast *m, int port) {
    uint8_t message[IDIST__MULTICAST_NBYTES];
    idist__os_address from;
    ptrdiff_t nbytes;

    for (;;) {
        nbytes = idist__os_socket_receive_datagram(m->fd, message, sizeof message, &from);
        if (nbytes < 0) return;
        if (nbytes != IDIST__MULTICAST_NBYTES ||
            memcmp(message, m->tag, IDIST__MULTICAST_TAG_NBYTES) != 0 || message[16] || message[17])
            continue;

        message[16] = (uint8_t)(port >> 8);
        message[17] = (uint8_t)port;
        idist__os_socket_send_datagram(m->fd, message, sizeof message, &from); // lost: asked again
    }
}

// Asks until somebody answers; writes "tcp:HOST:PORT".
static idist_status idist__multicast_ask(const idist__multicast *m, char *address_text,
                                         size_t capacity, int64_t deadline_ns) {
    uint8_t message[IDIST__MULTICAST_NBYTES];
    char ip[64];
    idist__os_address from;

    for (;;) {
        memset(message, 0, sizeof message);
        memcpy(message, m->tag, IDIST__MULTICAST_TAG_NBYTES);
        idist__os_socket_send_datagram(m->fd, message, sizeof message, &m->group);
        idist__os_poll_wait(m->fd, IDIST__OS_READABLE,
                            idist__os_clock_deadline(IDIST__MULTICAST_MS));

        while (idist__os_socket_receive_datagram(m->fd, message, sizeof message, &from) ==
               IDIST__MULTICAST_NBYTES) {
            if (memcmp(message, m->tag, IDIST__MULTICAST_TAG_NBYTES) != 0 ||
                (!message[16] && !message[17]))
                continue;
            idist__os_socket_host_text(&from, ip, sizeof ip);
            snprintf(address_text, capacity, "tcp:%s:%d", ip, message[16] << 8 | message[17]);
            return IDIST_OK;
        }

        if (idist__os_clock_ms_until(deadline_ns) == 0)
            return idist__fail(
                IDIST_ERR_TIMEOUT,
                "store: nobody in the multicast group has answered: rank 0 has not started, its "
                "secret or world size differs, or multicast from there does not reach %s",
                m->ip);
    }
}

//------------------------------------------------------------------------------
// [store:server]  the server: one thread, one table, many connections
// uses clock os:random descriptor os:thread poll socket fail mem auth pending
// uses buffer table wire multicast
//
// The thread polls its listener, the pending connections, whose handshakes are under way, and its
// clients. The bytes of one client pass through here:
//
//     idist__server_main -> read -> serve (parse, request, reply) -> write
//
// A request that waits stays at the front of its client's input and is tried again whenever the
// table has changed; meanwhile the client is silent, or sends CANCEL_WAIT.
//------------------------------------------------------------------------------

enum { IDIST__SERVER_CLIENTS = 4096 };

// What the server polls, before its clients and the pending connections.
enum {
    IDIST__SERVER_POLL_WAKE,
    IDIST__SERVER_POLL_LISTENER,
    IDIST__SERVER_POLL_MULTICAST,
    IDIST__SERVER_POLL_CLIENTS
};

// One connection whose handshake is done.
typedef struct idist__server_client {
    int fd;
    bool valid;   // it has sent the magic number
    bool waiting; // the first request in `in` waits for keys
    idist__buffer in;
    idist__buffer out;
    char *will; // key and value, one after the other; see idist__store_request
    size_t will_key_nbytes;
    size_t will_nbytes;
} idist__server_client;

typedef struct idist__server {
    idist_allocator mem;
    uint8_t key[32];
    uint64_t id; // random, so that clients can tell it from the next one at its address
    int listener;
    int wake; // a wake-up; signalled to end the thread
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
    bool will_executed;   // and so the table has changed
    int refused_count;    // failed handshakes; rank 0 reports them when it times out
    int other_byte_order; // a machine of another byte order has tried to connect
    int out_of_fds;       // a connection was not accepted for lack of descriptors
    char unlike[300];     // the first client that has another secret; fixed once is_unlike is set
    int is_unlike;
} idist__server;

// A client has gone without taking its will back. A value that the key has already stays.
static void idist__server_execute_will(idist__server *server, const idist__server_client *client) {
    idist__blob key;

    key.data = client->will;
    key.nbytes = client->will_key_nbytes;
    if (*idist__table_find(&server->table, key)) return;
    server->will_executed =
        idist__table_put(&server->table, key, client->will + client->will_key_nbytes,
                         client->will_nbytes - client->will_key_nbytes) == IDIST_OK;
}

// The last client takes the index of the dropped one.
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

// True means 0 on the wire, as in torch's protocol.
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

// Replaces a client's will by that of a CLAIM. False: out of memory.
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

// Carries out one request of a client. *wait: it must be tried again after the table has changed.
// False: drop the client.
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
        return true; // it crossed our answer, and nothing waits any more
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

    // The key was deleted between the client's WAIT and its GET: the answer makes it wait again.
    if (*wait && request->op == IDIST__STORE_GET && !awaits) {
        *wait = false;
        return idist__server_reply_number(server, client, (int64_t)IDIST__NO_VALUE);
    }

    if (*wait) return true;
    if (awaits && !idist__server_reply_flag(server, client, true)) return false;

    return idist__server_reply_to(server, client, request);
}

// Serves what has arrived from a client, up to a request that has to wait. *changed is set when the
// table changed. False: drop the client.
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

    // A client that keeps asking and never reads is dropped.
    return client->out.nbytes < 8 * IDIST__STORE_REQUEST_MAX;
}

// Reads what has arrived. False: drop the client.
static bool idist__server_read(idist__server *server, idist__server_client *client) {
    idist__buffer *in = &client->in;

    for (;;) {
        ptrdiff_t nbytes;

        if (in->nbytes >= IDIST__STORE_REQUEST_MAX)
            return true; // a whole request is there: serve it first
        if (!idist__buffer_reserve(&server->mem, &in->data, &in->capacity, in->nbytes,
                                   in->nbytes + 4096))
            return false;
        nbytes =
            idist__os_socket_read(client->fd, in->data + in->nbytes, in->capacity - in->nbytes);
        if (nbytes <= 0) return nbytes == 0;
        in->nbytes += (size_t)nbytes;
    }
}

// Sends what the socket takes now. False: drop the client.
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

// Accepts connections while they may begin a handshake.
static void idist__server_accept(idist__server *server) {
    idist__handshake *handshake;

    while ((handshake = idist__pending_slot(&server->pending)) != NULL) {
        int fd = idist__os_socket_accept(server->listener);

        if (fd < 0 && idist__os_socket_out_of_fds(errno)) {
            if (!idist__pending_evict(&server->pending))
                __atomic_store_n(&server->out_of_fds, 1, __ATOMIC_RELAXED);
            idist__os_clock_pause_ms(1); // no busy loop while descriptors are short
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

// Turns a connection whose handshake is done into a client.
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

// A handshake failed. Anybody may have sent it, so it must not end the job; rank 0 reports it.
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
    if (strncmp(ip, "::ffff:", 7) == 0) ip += 7; // IPv4, at a listener for both
    snprintf(server->unlike, sizeof server->unlike, "a process on %s was refused: %.200s", ip,
             idist__me.text);
    __atomic_store_n(&server->is_unlike, 1, __ATOMIC_RELEASE);
}

// Continues the handshakes for which something has arrived.
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

// Reads, serves and writes. What a client sent before it left still counts.
static bool idist__server_client_ready(idist__server *server, idist__server_client *client,
                                       bool *changed) {
    bool alive = idist__server_read(server, client);
    return idist__server_serve(server, client, changed) && alive && idist__server_write(client);
}

// After a change of the table, tries the requests that wait, whose answers may change it again.
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

// Waits until something is to be done. Returns false when the thread has to end.
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

        // Downwards: a dropped client is replaced by the last one, which has been served.
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

// Ends the thread and frees everything. Clients that are connected see the end of their stream, and
// from then on nobody gets a connection to this server.
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

// The memory that the thread uses, so that no client can make it run out of that.
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

// Starts a server with a thread of its own. It owns the listener and the socket of `multicast` from
// here on, also when this fails.
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

//------------------------------------------------------------------------------
// [store:client]  a store behind a socket
// uses clock descriptor mutex socket fail text mem parse address interface
// uses connection auth pending buffer table wire multicast server
//
// Every process has one connection, which its threads share; the process that owns the table
// connects to its own server. A call goes through
//
//     idist__client_run -> exchange (encode, send, receive the answer)
//
// A thread that waits for keys would keep the connection from the others, so it waits in slices:
// when others want the connection, it cancels its WAIT on the server and asks again later.
//------------------------------------------------------------------------------

enum {
    IDIST__CLIENT_ANSWER_MS = 30000, // for the answer to a request that does not wait for keys, or
    IDIST__CLIENT_LEAST_MS = 1000,   // the store's time-out if that is shorter, but at least this
    IDIST__CLIENT_SLICE_MS = 50,     // for which a waiting thread keeps the connection
    IDIST__CLIENT_PROBE_MS = 5000,   // after which it asks anew: does the server still answer?
    IDIST__CLIENT_ATTEMPT_MS = 2000, // for one address of a host that has several
    IDIST__CLIENT_LACKING_MS = 500,  // for which a process that lacks a secret tries to tell rank 0
    IDIST__CLIENT_RETRY_MS = 10000   // for which it tries again after the server closed on it
};

typedef struct idist__client_store {
    idist__os_mutex lock;
    int threads_waiting; // for the lock
    int fd;
    idist__server *server; // in the process that owns the table
    char *out;             // the encoded request
    size_t nout;
    size_t out_capacity;
    idist_status broken; // why the connection is unusable; IDIST_OK: it is not
    bool is_own;         // the server is one of ours, not torch's
    int secrecy;         // IDIST__SECRECY_*
    int64_t lacking_ns;  // when a process without a secret gives up an address beyond its host
    bool greeted;        // it has been told which protocol follows
    uint64_t server_id;  // of one of ours
    int answer_ms;       // how long it may take to answer
    bool owes_number;    // the answer to a posted CLAIM comes before the next one
    int64_t number;      // that answer, once the next one has come
    char server_at[128]; // its address, for error texts
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

// Tells the server which protocol follows.
static bool idist__client_put_greeting(idist_store *store) {
    const uint8_t op = IDIST__STORE_VALIDATE;
    const uint32_t magic = IDIST__STORE_MAGIC;

    return idist__client_put(store, &op, 1) && idist__client_put(store, &magic, sizeof magic);
}

// Encodes one request for the wire, behind the greeting if it is the first. False: out of memory.
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

// Marks the connection as unusable: nobody can tell how much of an answer is still to come.
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

// The answer to GET and COMPARE_SET goes into the caller's buffer, or is discarded when it does not
// fit. request->flag: the key has been deleted since the WAIT.
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

// By when the server has to answer a request that is made now. A thread that is joining a world
// does not wait much longer than its time-out for that.
static int64_t idist__client_answer_by(const idist__client_store *client) {
    int64_t by_ns = idist__os_clock_deadline(client->answer_ms);
    int64_t least_ns = idist__os_clock_deadline(IDIST__CLIENT_LEAST_MS);
    int64_t join_ns = idist__me.join_until_ns;

    if (!join_ns || join_ns >= by_ns) return by_ns;
    return join_ns > least_ns ? join_ns : least_ns;
}

// Takes the WAIT back. Its answer may be under way, so exactly one byte comes in any case.
static idist_status idist__client_cancel_wait(idist__client_store *client, uint8_t *answer) {
    int64_t deadline_ns = idist__client_answer_by(client);
    uint8_t cancel = IDIST__STORE_CANCEL_WAIT;

    if (!idist__connection_write_all(client->fd, &cancel, 1, deadline_ns) ||
        !idist__client_receive(client, answer, 1, deadline_ns))
        return idist__client_break(client);
    return IDIST_OK;
}

// Takes the answer to a posted CLAIM. Returns the status of the connection.
static idist_status idist__client_receive_owed(idist__client_store *client, int64_t deadline_ns) {
    if (!client->owes_number) return IDIST_OK;
    client->owes_number = false;
    if (idist__client_receive(client, &client->number, sizeof client->number, deadline_ns))
        return IDIST_OK;
    return idist__client_break(client);
}

// Waits for keys until the deadline, or at the end of a slice until another thread wants the
// connection. request->flag: the keys exist.
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
        status = idist__client_cancel_wait(client, &answer);
        if (status != IDIST_OK) return status;
    }

    request->flag = answer == 0;

    return IDIST_OK;
}

// One request and its answer. A WAIT may end without the keys (request->flag false).
static idist_status idist__client_exchange(idist_store *store, idist__store_request *request) {
    idist__client_store *client = (idist__client_store *)store->impl;
    int64_t deadline_ns = idist__client_answer_by(client);
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

// SET has no answer. A CHECK behind it has one: after that, every other client sees the value.
static idist_status idist__client_confirm(idist_store *store, const idist__store_request *request) {
    idist__store_request check = *request;
    check.op = IDIST__STORE_CHECK;
    check.keys = &request->key;
    check.nkeys = 1;
    return idist__client_exchange(store, &check);
}

// Tries a request once, with the connection locked. *wait: try it again, its keys do not exist yet.
static idist_status idist__client_try(idist_store *store, idist__store_request *request,
                                      bool *wait) {
    const idist__client_store *client = (const idist__client_store *)store->impl;
    idist_status status = IDIST_OK;

    *wait = false;
    if (!client->is_own && request->op == IDIST__STORE_DROP_WILL) return IDIST_OK;

    if (!client->is_own && request->op == IDIST__STORE_CLAIM) { // torch's server has no wills
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

// Nobody answers at an address. The client tries again until its deadline; then it says this.
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
    if (idist__os_socket_is_loopback(address)) // many systems have their own name so in /etc/hosts
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
        return idist__fail(IDIST_ERR_TIMEOUT,
                           "nobody answers at %s (%s): its host is down, MASTER_ADDR is another "
                           "host's, or a firewall drops what is sent there",
                           address_text, strerror(error));

    return idist__fail(IDIST_ERR_TIMEOUT,
                       "nobody listens at %s (%s): rank 0 has not started, or has failed and says "
                       "why, or MASTER_ADDR / MASTER_PORT differ",
                       address_text, strerror(error));
}

// Whether this process may connect only within its host, and the address is beyond it.
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

// The handshake of a new connection. *retry: the server closed it, because it had no room or has
// just ended. *give_up_ns: when to stop trying after that; 0: not closed yet.
static idist_status idist__client_handshake(idist__client_store *client, const uint8_t key[32],
                                            int64_t deadline_ns, int64_t *give_up_ns, bool *retry) {
    int64_t own_deadline_ns = idist__os_clock_deadline(IDIST__PENDING_MS);
    idist__handshake handshake;
    idist_status status;

    // Our own server answers at once, if it can at all.
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

// The handshake failed: adds with whom.
static idist_status idist__client_name_server(idist_status status, const char *address_text) {
    if (status == IDIST_OK || status == IDIST_ERR_NO_FDS) return status;
    if (status == IDIST_ERR_TIMEOUT)
        return idist__fail(status,
                           "the server at %s (rank 0) did not answer in time: it is stopped, or "
                           "another program listens there",
                           address_text);
    return idist__fail(status, "the server at %s (rank 0): %s", address_text, idist__me.text);
}

// One attempt to connect. A host may have several addresses, of which some lead nowhere: the number
// of the attempt chooses. *retry: the failure is one that may pass. A process that lacks a secret
// tries for a moment: if rank 0 trusts the network, the ranks meet and all learn what is missing.
static idist_status idist__client_attempt(idist__client_store *client, const char *address_text,
                                          int number, const uint8_t key[32], int64_t by_ns,
                                          int64_t *give_up_ns, bool *retry) {
    int64_t deadline_ns = by_ns;
    idist__os_address address;
    int count, error;
    idist_status status = idist__address_parse_one_of(&address, address_text, number, &count);
    bool local = status == IDIST_OK && idist__os_socket_is_local(&address);
    bool lacks = status == IDIST_OK && idist__client_lacks_secret(client, &address);
    int64_t soon_ns = idist__os_clock_deadline(IDIST__CLIENT_ATTEMPT_MS);

    *retry = false;
    if (status == IDIST_OK && !local && idist__os_socket_port(&address) == 0)
        status = idist__fail(IDIST_ERR_ARG, "store: a client needs the port of the server, not 0");

    if (status != IDIST_OK) {
        *retry = status != IDIST_ERR_ARG; // a name may become known
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

// Tries until the server is there. The first refusals are normal: it may start later than we do.
static idist_status idist__client_connect(idist__client_store *client, const char *address_text,
                                          const uint8_t key[32], int64_t deadline_ns) {
    int64_t give_up_ns = 0;
    int number = 0, pause_ms = 1;

    idist__text_copy(client->server_at, sizeof client->server_at, address_text);

    for (;;) {
        bool retry;
        idist_status status = idist__client_attempt(client, address_text, number, key, deadline_ns,
                                                    &give_up_ns, &retry);

        if (!retry) return status;
        if (idist__os_clock_ms_until(deadline_ns) == 0)
            return idist__fail(IDIST_ERR_TIMEOUT, "store: %s", idist__me.text);
        idist__os_clock_pause_ms(pause_ms);
        if (pause_ms < 50) pause_ms *= 2;
        if (!give_up_ns) number++; // else the server is there, and had no room
    }
}

// Asks the multicast group for the server, and asks again when the answer was of no use: anybody
// may answer, and a server may have ended since.
static idist_status idist__client_find(idist__client_store *client,
                                       const idist__multicast *multicast, const uint8_t key[32],
                                       int64_t deadline_ns) {
    char address_text[320];
    idist_status status;

    do {
        int64_t soon_ns = idist__os_clock_deadline(1000);

        status = idist__multicast_ask(multicast, address_text, sizeof address_text, deadline_ns);
        if (status != IDIST_OK) return status;
        status = idist__client_connect(client, address_text, key,
                                       soon_ns < deadline_ns ? soon_ns : deadline_ns);
        if (status != IDIST_OK) idist__os_descriptor_close(&client->fd);
    } while (status != IDIST_OK && status != IDIST_ERR_NO_FDS &&
             idist__os_clock_ms_until(deadline_ns) != 0);

    return status;
}

// Where the server is to listen, and whom it lets in.
typedef struct idist__client_serving {
    const char *address_text;
    int listener; // a socket that listens already, as spawn hands down; -1: none
    const uint8_t *key;
    int secrecy; // IDIST__SECRECY_*
} idist__client_serving;

// Whether an address is a port of this host's loopback interface in the user's own words. The name
// of a host may be a loopback address, too: many systems have it in /etc/hosts.
static bool idist__client_wants_loopback(const char *address_text) {
    char host[256];
    int port;

    return strncmp(address_text, "tcp:", 4) == 0 &&
           idist__parse_host_port(address_text + 4, host, sizeof host, &port) &&
           idist__address_host_is_loopback(host);
}

// Listens at the address. Beyond this host, where a secret keeps strangers out, at its port of all
// addresses of this host; without a secret, if other hosts cannot use the address or it is not
// known yet, at the one that this host advertises.
static idist_status idist__client_listen(const idist__client_serving *serving, int *listener) {
    const char *text = serving->address_text;
    idist__os_address address;
    idist_status status;
    idist__own_address own;
    bool is_public;
    int port;
    char host[256];

    *listener = serving->listener;
    if (*listener >= 0) return IDIST_OK;
    status = idist__address_parse(&address, text);
    is_public = serving->secrecy != IDIST__SECRECY_NONE && strncmp(text, "tcp:", 4) == 0 &&
                status != IDIST_ERR_ARG && !idist__client_wants_loopback(text);

    if (is_public) idist__parse_host_port(text + 4, host, sizeof host, &port);
    if (is_public && serving->secrecy == IDIST__SECRECY_SECRET)
        return idist__connection_listen_everywhere(port, text, listener);
    if (is_public && (status != IDIST_OK || idist__os_socket_is_loopback(&address)) &&
        idist__interface_choose(NULL, &own) == IDIST_OK)
        return idist__connection_listen_beyond(&own, NULL, port, text, listener);

    if (status != IDIST_OK) return status;
    if (serving->secrecy == IDIST__SECRECY_NONE && !idist__os_socket_is_loopback(&address))
        return idist__fail(
            IDIST_ERR_NO_SECRET,
            "listening at %s, beyond this host, needs a shared secret: set IDIST_SECRET or "
            "IDIST_SECRET_FILE on all ranks, or IDIST_INSECURE=1 to trust the network",
            serving->address_text);

    return idist__connection_listen(&address, serving->address_text, listener);
}

// Starts the server, and writes the address of its socket into own_text. The server owns the
// listener and the socket of `multicast` from here on.
static idist_status idist__client_serve(idist_store *store, const idist__client_serving *serving,
                                        idist__multicast *multicast, char *own_text,
                                        size_t capacity) {
    idist__client_store *client = (idist__client_store *)store->impl;
    idist__os_address address;
    char ip[64];
    int listener;
    idist_status status = idist__client_listen(serving, &listener);

    if (status != IDIST_OK) return status;
    idist__text_copy(own_text, capacity, serving->address_text);

    if (idist__os_socket_own_address(listener, &address) && !idist__os_socket_is_local(&address)) {
        store->port = idist__os_socket_port(&address);
        idist__os_socket_host_text(&address, ip, sizeof ip);
        if (strcmp(ip, "::") == 0 || strcmp(ip, "0.0.0.0") == 0) // all addresses
            idist__interface_reach_self(serving->address_text, ip, sizeof ip);
        snprintf(own_text, capacity, "tcp:[%s]:%d", ip, store->port);
    }

    return idist__server_start(&store->mem, listener, store->port, multicast, serving->key,
                               serving->secrecy, &client->server);
}

// Starts the server where this process has it, and connects to it.
static idist_status idist__client_begin(idist_store *store, idist__client_serving *serving,
                                        bool server, int64_t deadline_ns) {
    idist__client_store *client = (idist__client_store *)store->impl;
    bool by_multicast = strncmp(serving->address_text, "cast:", 5) == 0;
    char at[320], own_text[320];
    idist__multicast multicast;
    idist_status status = IDIST_OK;

    memset(&multicast, 0, sizeof multicast);
    multicast.fd = -1;
    idist__text_copy(at, sizeof at, serving->address_text);

    if (by_multicast) {
        status = idist__multicast_open(&multicast, serving->address_text + 5, server, serving->key);
        if (server) snprintf(at, sizeof at, "tcp:%s:0", multicast.ip);
    }

    client->is_own = serving->key != NULL;
    client->secrecy = serving->secrecy;
    if (status == IDIST_OK && by_multicast && !server && serving->secrecy == IDIST__SECRECY_NONE &&
        !idist__address_host_is_loopback(multicast.ip))
        status = idist__client_no_secret(serving->address_text + 5);

    serving->address_text = at;
    idist__text_copy(own_text, sizeof own_text, at);
    if (status == IDIST_OK && server)
        status = idist__client_serve(store, serving, &multicast, own_text, sizeof own_text);

    if (status == IDIST_OK && by_multicast && !server)
        status = idist__client_find(client, &multicast, serving->key, deadline_ns);
    else if (status == IDIST_OK)
        status = idist__client_connect(client, own_text, serving->key, deadline_ns);
    idist__os_descriptor_close(&multicast.fd); // -1 where the server has taken it
    serving->address_text = NULL;

    return status;
}

// Opens a store at "unix:NAME", "tcp:HOST:PORT" or "cast:GROUP:PORT/JOB". Owns serving->listener
// from here on. Without a key there is no handshake: the server is one of torch. When this fails,
// the caller closes the store.
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

//------------------------------------------------------------------------------
// [store:prefix]  a view of another store, with a prefix before each key
// uses fail mem table
//------------------------------------------------------------------------------

typedef struct idist__prefix_store {
    idist_store *parent;
    char prefix[IDIST__KEY_MAX + 1];
} idist__prefix_store;

// The keys of a request, with the prefix before each, in one block that the caller frees. The
// second one of a CLAIM is that of its will.
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
// [store:store]  the public functions
// uses clock descriptor fail text mem secret table memory file client prefix
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

// Opens the kind of store that `where` begins with.
static idist_status idist__store_open_kind(idist_store *store, const char *where, bool server,
                                           idist__client_serving *serving, int64_t deadline_ns) {
    idist_status status;
    char address_text[4096];

    if (strncmp(where, "file:", 5) == 0)
        return idist__file_store_open(store, where + 5,
                                      server ? IDIST__FILE_SERVER : IDIST__FILE_CLIENT,
                                      deadline_ns);
    if (strncmp(where, "draw:", 5) == 0)
        return idist__file_store_open(store, where + 5, IDIST__FILE_EITHER, deadline_ns);
    if (strcmp(where, "mem:") == 0) return idist__memory_store_open(store);

    serving->address_text = where;
    if (strncmp(where, "torch:", 6) != 0)
        return idist__client_open(store, serving, server, deadline_ns);

    snprintf(address_text, sizeof address_text, "tcp:%s", where + 6);
    serving->address_text = address_text;
    serving->listener = -1;
    serving->key = NULL;
    status = idist__client_open(store, serving, false, deadline_ns);
    serving->address_text = NULL;

    return status;
}

// Opens a store of any kind: "mem:", "file:PATH", "unix:NAME", "tcp:HOST:PORT",
// "cast:GROUP:PORT/JOB", or "torch:HOST:PORT" for the server of a torchrun agent. "draw:PATH" is a
// file whose server is the first process that opens it, see idist__store_is_file_server. A server
// may bring a socket that listens already (else -1), which the store owns from here on.
static idist_status idist__store_open(const char *where, const idist_store_desc *desc, int listener,
                                      idist_store **out) {
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
    status = idist__store_open_kind(store, where, desc->server, &serving,
                                    idist__os_clock_deadline(store->timeout_ms));

    if (status != IDIST_OK) idist_store_close(&store);
    else *out = store;

    return status;
}

// Whether this process is the server of a store in a file.
IDIST__UNUSED static bool idist__store_is_file_server(const idist_store *store) {
    return ((const idist__file_store *)store->impl)->server;
}

idist_status idist_store_open(const char *url, const idist_store_desc *desc, idist_store **store) {
    idist_store_desc d;
    char where[4096];
    idist_status status;

    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (!store) return idist__fail(IDIST_ERR_ARG, "store_open: store is NULL");
    *store = NULL;
    if (!url) return idist__fail(IDIST_ERR_ARG, "store_open: url is NULL");
    if (strlen(url) >= sizeof where)
        return idist__fail(IDIST_ERR_ARG, "store_open: the url is too long");
    if (!d.allocator.alloc_fn != !d.allocator.free_fn)
        return idist__fail(IDIST_ERR_ARG,
                           "store_open: allocator: give both alloc_fn and free_fn, or neither");

    if (strcmp(url, "mem://") == 0) idist__text_copy(where, sizeof where, "mem:");
    else if (strncmp(url, "file://", 7) == 0 && url[7] == '/')
        snprintf(where, sizeof where, "file:%s", url + 7);
    else if (strncmp(url, "tcp://", 6) == 0) snprintf(where, sizeof where, "tcp:%s", url + 6);
    else if (strncmp(url, "unix://", 7) == 0) snprintf(where, sizeof where, "unix:%s", url + 7);
    else
        return idist__fail(
            IDIST_ERR_ARG,
            "store_open: \"%s\" is not one of tcp://host:port, unix://name, file:///path, mem://",
            url);

    idist__fail_begin();
    status = idist__store_open(where, &d, -1, store);

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

// Fills a request of an operation without a key.
static idist_status idist__store_begin(idist_store *store, idist__store_request *request, int op,
                                       int timeout_ms) {
    memset(request, 0, sizeof *request);
    if (!store) return idist__fail(IDIST_ERR_ARG, "store: the store is NULL");
    request->op = op;
    request->deadline_ns = idist__os_clock_deadline(timeout_ms ? timeout_ms : store->timeout_ms);
    return IDIST_OK;
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
    return status == IDIST_OK ? store->run(store, &request) : status;
}

// Sets a value without waiting until other clients can see it: they do before this one has the
// answer to its next request.
IDIST__UNUSED static idist_status idist__store_post(idist_store *store, const char *key,
                                                    const void *value, size_t nbytes) {
    idist__store_request request;
    idist_status status = idist__store_begin_key(store, &request, IDIST__STORE_SET, key, 0);

    if (status == IDIST_OK)
        status = idist__store_value(&request.a, value, nbytes, IDIST__VALUE_MAX);
    request.posted = true;
    return status == IDIST_OK ? store->run(store, &request) : status;
}

// Adds 1 to the number of a key and leaves a will, see idist__store_request. sum NULL: does not
// wait for the sum, which idist__store_posted_sum knows when the answer to the next request has
// come; for stores with a server of ours.
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
    status = store->run(store, &request);
    if (status == IDIST_OK && sum) *sum = request.number;

    return status;
}

// Takes our will back. If the connection is gone, the next request says so.
IDIST__UNUSED static void idist__store_drop_will(idist_store *store) {
    idist__store_request request;

    if (idist__store_begin(store, &request, IDIST__STORE_DROP_WILL, 0) == IDIST_OK)
        store->run(store, &request);
}

// Waits until the server of a store in a file has ended, at most until the deadline. Then the next
// store that is opened there is another one.
IDIST__UNUSED static void idist__store_await_end(idist_store *store, int64_t deadline_ns) {
    if (store->run == idist__file_store_run) idist__file_store_await_end(store, deadline_ns);
}

// Tells the servers of stores behind sockets apart; 0: it is not one of ours.
IDIST__UNUSED static uint64_t idist__store_server_id(const idist_store *store) {
    if (store->run != idist__client_run) return 0;
    return ((const idist__client_store *)store->impl)->server_id;
}

IDIST__UNUSED static int64_t idist__store_posted_sum(const idist_store *store) {
    return ((const idist__client_store *)store->impl)->number;
}

// Runs a request that returns a value. `name` is the public function.
static idist_status idist__store_fetch(const char *name, idist_store *store,
                                       idist__store_request *request, void *value, size_t capacity,
                                       size_t *nbytes) {
    idist_status status;

    if (capacity && !value) return idist__fail(IDIST_ERR_ARG, "%s: value is NULL", name);
    request->value = value;
    request->capacity = capacity;
    status = store->run(store, request);
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
    status = store->run(store, &request); // NOLINT(clang-analyzer-core.NullDereference)
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
        total += strlen(keys[i]) + 9; // with its length and '/', on the wire
        if (total > IDIST__VALUE_MAX)
            return idist__fail(IDIST_ERR_ARG, "store: the keys of one call exceed %u bytes",
                               IDIST__VALUE_MAX);
    }

    return IDIST_OK;
}

// WAIT and CHECK. *flag, unless it is NULL: all keys exist.
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
    status = store->run(store, &request);
    if (flag) *flag = request.flag;
    idist__mem_free(&store->mem, blobs);

    return status;
}

// Like idist_store_wait, but the text of a time-out may name a key that exists.
static idist_status idist__store_await_keys(idist_store *store, const char *const *keys, size_t n,
                                            int timeout_ms) {
    return idist__store_run_keys(store, IDIST__STORE_WAIT, keys, n, timeout_ms, NULL);
}

// Some of these keys did not appear in time. Only the server knows which: each question halves
// their number.
static idist_status idist__store_name_missing(idist_store *store, const char *const *keys,
                                              size_t n) {
    char text[sizeof idist__me.text];

    memcpy(text, idist__me.text, sizeof text); // a question that fails overwrites it

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

    if (status == IDIST_OK) status = store->run(store, &request);
    if (status == IDIST_OK && deleted) *deleted = request.flag;
    return status;
}

idist_status idist_store_num_keys(idist_store *store, size_t *n) {
    idist__store_request request;
    idist_status status = idist__store_begin(store, &request, IDIST__STORE_NUM_KEYS, 0);

    if (status != IDIST_OK) return status;
    if (!n) return idist__fail(IDIST_ERR_ARG, "store_num_keys: n is NULL");
    status = store->run(store, &request);
    *n = status == IDIST_OK ? (size_t)request.number : 0;
    return status;
}

#endif // IDIST_STORE_H
