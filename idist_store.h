/* idist_store.h - v0.1.0 - the key-value table of rendezvous - MIT licence

    Part of the implementation of idist; idist.h includes it where IDIST_IMPLEMENTATION is defined.

CONTENTS

      [store:store]  rendezvous: a key-value table in memory, in a file, or behind a socket
*/
#ifndef IDIST_STORE_H
#define IDIST_STORE_H

//------------------------------------------------------------------------------
// [store:store]  rendezvous: a key-value table in memory, in a file, or behind a socket
// uses os err mem hash sock auth
//
// Every call of the public API fills one idist__req and gives it to the store's `run`. The table
// itself, and what each request does to it, is written once (idist__table_apply) and serves all
// three kinds.
//------------------------------------------------------------------------------

enum { // the numbers of torch's TCPStore, which is what travels over the wire
    IDIST__REQ_VALIDATE = 0,
    IDIST__REQ_SET = 1,
    IDIST__REQ_COMPARE_SET = 2,
    IDIST__REQ_GET = 3,
    IDIST__REQ_ADD = 4,
    IDIST__REQ_CHECK = 5,
    IDIST__REQ_WAIT = 6,
    IDIST__REQ_NUM_KEYS = 7,
    IDIST__REQ_DELETE = 8,
    IDIST__REQ_CANCEL_WAIT = 12,
    IDIST__REQ_WILL = 100 // not torch's: set this key when my connection ends
};

#define IDIST__KEY_MAX 1024u
#define IDIST__VALUE_MAX (8u << 20)
#define IDIST__KEYS_MAX 65536u
// The length in an answer to a GET whose key is not there (any more), and the answer to an ADD that
// found text; torch's protocol has no word for it.
static const uint64_t IDIST__NO_VALUE = UINT64_MAX;
static const int64_t IDIST__NOT_A_NUMBER = INT64_MIN;

typedef struct idist__blob { // bytes with a length, not owned
    const char *data;
    size_t nbytes;
} idist__blob;

typedef struct idist__req {
    int op;
    idist__blob key;
    idist__blob a, b;        // SET: value; COMPARE_SET: expected, desired
    int64_t number;          // ADD: delta in, new value out; NUM_KEYS: out
    const idist__blob *keys; // CHECK, WAIT
    size_t nkeys;
    void *value; // GET, COMPARE_SET: where the value goes
    size_t capacity;
    size_t nbytes; // its size
    bool flag;     // CHECK: all there; DELETE: was there
    int64_t deadline_ns;
} idist__req;

typedef struct idist__entry {
    struct idist__entry *next;
    char *key, *value;
    size_t nkey, nvalue;
} idist__entry;

typedef struct idist__table {
    idist_allocator mem;
    idist__entry *bucket[256];
    size_t count;
} idist__table;

struct idist_store {
    idist_status (*run)(idist_store *store, idist__req *req);
    void (*close)(idist_store *store);
    idist_allocator mem;
    int timeout_ms;
    int port;
    void *impl;
};

static idist__entry **idist__table_find(idist__table *t, const char *key, size_t nkey) {
    idist__entry **e = &t->bucket[idist__hash(key, nkey) & 255];
    while (*e && ((*e)->nkey != nkey || memcmp((*e)->key, key, nkey) != 0)) e = &(*e)->next;
    return e;
}

static idist_status idist__table_put(idist__table *t, idist__blob key, const void *value,
                                     size_t nbytes) {
    idist__entry **at = idist__table_find(t, key.data, key.nbytes), *e = *at;
    char *copy = (char *)idist__mem_alloc(&t->mem, nbytes);

    if (!copy) return IDIST_ERR_NO_MEMORY;
    if (nbytes) memcpy(copy, value, nbytes);

    if (!e) {
        e = (idist__entry *)idist__mem_alloc(&t->mem, sizeof *e + key.nbytes);
        if (!e) {
            idist__mem_free(&t->mem, copy);
            return IDIST_ERR_NO_MEMORY;
        }

        e->key = (char *)(e + 1);
        e->nkey = key.nbytes;
        memcpy(e->key, key.data, key.nbytes);
        *at = e;
        t->count++;
    }

    idist__mem_free(&t->mem, e->value);
    e->value = copy;
    e->nvalue = nbytes;

    return IDIST_OK;
}

static bool idist__table_remove(idist__table *t, idist__blob key) {
    idist__entry **at = idist__table_find(t, key.data, key.nbytes), *e = *at;

    if (!e) return false;
    *at = e->next;
    t->count--;
    idist__mem_free(&t->mem, e->value);
    idist__mem_free(&t->mem, e);
    return true;
}

static void idist__table_clear(idist__table *t) {
    size_t i;

    for (i = 0; i < IDIST__COUNT_OF(t->bucket); i++)
        while (t->bucket[i]) {
            idist__blob key;
            key.data = t->bucket[i]->key;
            key.nbytes = t->bucket[i]->nkey;
            idist__table_remove(t, key);
        }
}

static bool idist__table_has_all(idist__table *t, const idist__req *r) {
    size_t i;
    for (i = 0; i < r->nkeys; i++)
        if (!*idist__table_find(t, r->keys[i].data, r->keys[i].nbytes)) return false;
    return true;
}

static idist_status idist__table_add(idist__table *t, idist__req *r) {
    idist__entry *e = *idist__table_find(t, r->key.data, r->key.nbytes);
    char text[32];
    int64_t old = 0;

    if (e) {
        bool number = e->nvalue < sizeof text;

        if (number) {
            memcpy(text, e->value, e->nvalue);
            text[e->nvalue] = 0;
            number = idist__parse_int(text, INT64_MIN, INT64_MAX, &old);
        }

        if (!number)
            return idist__fail(IDIST_ERR_ARG, "store: add to a key whose value is no number");
    }

    r->number = (int64_t)((uint64_t)old + (uint64_t)r->number);
    snprintf(text, sizeof text, "%lld", (long long)r->number);

    return idist__table_put(t, r->key, text, strlen(text));
}

// Gives a value to the caller; IDIST_ERR_TRUNCATED when it does not fit.
static idist_status idist__req_give(idist__req *r, const void *value, size_t nbytes) {
    r->nbytes = nbytes;
    if (nbytes > r->capacity)
        return idist__fail(IDIST_ERR_TRUNCATED, "store: the value has %zu bytes, the buffer %zu",
                           nbytes, r->capacity);
    if (nbytes) memcpy(r->value, value, nbytes);
    return IDIST_OK;
}

// Carries a request out. *wait is set when it has to be tried again after the table changed;
// *changed when it did change the table (then r->key holds what idist__table_find finds).
static idist_status idist__table_apply(idist__table *t, idist__req *r, bool *wait, bool *changed) {
    idist__entry *e;
    idist_status s;

    *wait = *changed = false;

    switch (r->op) {
    case IDIST__REQ_SET:
        *changed = true;
        return idist__table_put(t, r->key, r->a.data, r->a.nbytes);
    case IDIST__REQ_COMPARE_SET:
        e = *idist__table_find(t, r->key.data, r->key.nbytes);
        if ((e ? e->nvalue : 0) == r->a.nbytes &&
            (!r->a.nbytes || memcmp(e->value, r->a.data, r->a.nbytes) == 0)) {
            if ((s = idist__table_put(t, r->key, r->b.data, r->b.nbytes)) != IDIST_OK) return s;
            *changed = true;
            return idist__req_give(r, r->b.data, r->b.nbytes);
        }

        return idist__req_give(r, e ? e->value : NULL, e ? e->nvalue : 0);
    case IDIST__REQ_GET:
        e = *idist__table_find(t, r->key.data, r->key.nbytes);
        *wait = !e;
        return e ? idist__req_give(r, e->value, e->nvalue) : IDIST_OK;
    case IDIST__REQ_ADD:
        s = idist__table_add(t, r);
        *changed = s == IDIST_OK;
        return s;
    case IDIST__REQ_CHECK: r->flag = idist__table_has_all(t, r); return IDIST_OK;
    case IDIST__REQ_WAIT: *wait = !idist__table_has_all(t, r); return IDIST_OK;
    case IDIST__REQ_NUM_KEYS: r->number = (int64_t)t->count; return IDIST_OK;
    case IDIST__REQ_DELETE: *changed = r->flag = idist__table_remove(t, r->key); return IDIST_OK;
    default: return idist__fail(IDIST_ERR_ARG, "store: unknown request %d", r->op);
    }
}

// Which keys a waiting request lacks, for the time-out's text.
static idist_status idist__req_late(const idist__req *r, idist__table *t) {
    const idist__blob *missing = r->nkeys ? &r->keys[0] : &r->key;
    size_t i;

    for (i = 0; t && i < r->nkeys; i++)
        if (!*idist__table_find(t, r->keys[i].data, r->keys[i].nbytes)) {
            missing = &r->keys[i];
            break;
        }

    return idist__fail(IDIST_ERR_TIMEOUT, "store: the key \"%.*s\" did not appear in time",
                       (int)missing->nbytes, missing->data);
}

// ---- in this process ----

typedef struct idist__mem_store {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    idist__table table;
} idist__mem_store;

static idist_status idist__mem_store_run(idist_store *store, idist__req *r) {
    idist__mem_store *m = (idist__mem_store *)store->impl;
    bool wait, changed;
    idist_status s;

    pthread_mutex_lock(&m->lock);

    for (;;) {
        s = idist__table_apply(&m->table, r, &wait, &changed);
        if (changed) pthread_cond_broadcast(&m->changed);
        if (!wait) break;

        if (idist__os_ms_until(r->deadline_ns) == 0) {
            s = idist__req_late(r, &m->table);
            break;
        }

        idist__os_cond_wait(&m->changed, &m->lock, r->deadline_ns);
    }

    pthread_mutex_unlock(&m->lock);

    return s;
}

static void idist__mem_store_close(idist_store *store) {
    idist__mem_store *m = (idist__mem_store *)store->impl;
    idist__table_clear(&m->table);
    pthread_cond_destroy(&m->changed);
    pthread_mutex_destroy(&m->lock);
    idist__mem_free(&store->mem, m);
}

static idist_status idist__mem_store_open(idist_store *store) {
    idist__mem_store *m = (idist__mem_store *)idist__mem_alloc(&store->mem, sizeof *m);

    if (!m) return IDIST_ERR_NO_MEMORY;
    m->table.mem = store->mem;
    pthread_mutex_init(&m->lock, NULL);
    idist__os_cond_init(&m->changed);
    store->impl = m;
    store->run = idist__mem_store_run;
    store->close = idist__mem_store_close;

    return IDIST_OK;
}

// ---- in a file ----
//
//   0   "IDSTORE1"
//   8   number of committed bytes after the header (u64)
//   16  records: u32 nkey, u32 nvalue (0xffffffff: deleted), key, value
//
// A key that begins with a zero byte is a will: the place of a byte (u64) that its maker keeps
// locked; its value is what is to be set when that lock is gone: u32 nkey, key, value. Any process
// that waits carries it out.
//
// Byte 0 of the file stays locked by the server as long as it lives: a file without that lock was
// left by a dead job. Byte 1 is locked by whoever reads or appends. The locks belong to the open
// file (F_OFD_*), not to the process, so threads may be ranks. A writer that dies halfway leaves
// bytes beyond the committed ones, which the next writer overwrites.

enum {
    IDIST__OFD_GETLK = 36,
    IDIST__OFD_SETLK = 37,
    IDIST__OFD_SETLKW = 38
}; // names that strict modes hide

typedef struct idist__file_store {
    pthread_mutex_t lock;
    int fd;
    bool server;
    char *path;
    idist__table table; // what the records read so far amount to
    idist__table wills; // the same, of wills
    uint64_t applied;   // bytes of records in both
    uint64_t will_at;   // the byte that is locked for our own will; 0: none
    int64_t looked_ns;  // when the makers of the wills were last looked for
} idist__file_store;

enum { IDIST__WILL_KEY_BYTES = 9, IDIST__WILLS_MS = 50 };

static int idist__file_lock(int fd, int cmd, short type, off_t byte, struct flock *fl) {
    memset(fl, 0, sizeof *fl);
    fl->l_type = type;
    fl->l_whence = SEEK_SET;
    fl->l_start = byte;
    fl->l_len = 1;
    return fcntl(fd, cmd, fl);
}

// Takes or gives back the lock of the records. Holders keep it for microseconds, unless they are
// stopped; a dead holder's lock is gone.
static bool idist__file_records(int fd, bool take, int64_t deadline_ns) {
    struct flock fl;

    for (;;) {
        if (idist__file_lock(fd, IDIST__OFD_SETLK, take ? F_WRLCK : F_UNLCK, 1, &fl) == 0)
            return true;
        if (errno == EINTR) continue;
        if ((errno != EAGAIN && errno != EACCES) || idist__os_ms_until(deadline_ns) == 0)
            return false;
        idist__os_pause_ms(1);
    }
}

static idist_status idist__file_late(const idist__file_store *f) {
    return idist__fail(
        IDIST_ERR_TIMEOUT,
        "store: %s stays locked: a process that uses it is stopped, or the file system cannot lock",
        f->path);
}

static bool idist__file_server_lives(int fd) {
    struct flock fl;
    return idist__file_lock(fd, IDIST__OFD_GETLK, F_WRLCK, 0, &fl) == 0 && fl.l_type != F_UNLCK;
}

// Reads into `to`, or else writes what is at `from`.
static bool idist__file_move(int fd, char *to, const char *from, size_t nbytes, uint64_t at) {
    size_t done = 0;

    while (done < nbytes) {
        off_t place = (off_t)(at + done);
        ssize_t n = to ? pread(fd, to + done, nbytes - done, place)
                       : pwrite(fd, from + done, nbytes - done, place);
        if (n <= 0 && !(n < 0 && errno == EINTR)) return false;
        if (n > 0) done += (size_t)n;
    }

    return true;
}

static bool idist__file_pread(int fd, void *buf, size_t nbytes, uint64_t at) {
    return idist__file_move(fd, (char *)buf, NULL, nbytes, at);
}

static bool idist__file_pwrite(int fd, const void *buf, size_t nbytes, uint64_t at) {
    return idist__file_move(fd, NULL, (const char *)buf, nbytes, at);
}

static idist__table *idist__file_table(idist__file_store *f, idist__blob key) {
    bool will = key.nbytes == IDIST__WILL_KEY_BYTES && !key.data[0];
    return will ? &f->wills : &f->table;
}

static void idist__file_forget(idist__file_store *f) {
    idist__table_clear(&f->table);
    idist__table_clear(&f->wills);
    f->applied = 0;
}

// Brings the tables up to date. Called with the records locked.
static idist_status idist__file_replay(idist__file_store *f) {
    char magic[8];
    uint64_t committed;

    if (!idist__file_pread(f->fd, magic, 8, 0) || memcmp(magic, "IDSTORE1", 8) != 0 ||
        !idist__file_pread(f->fd, &committed, 8, 8))
        return idist__fail(IDIST_ERR_ARG, "store: %s is no store file", f->path);

    while (f->applied < committed) {
        uint32_t size[2];
        idist__blob key;
        size_t nvalue;
        char *buf;
        idist_status s = IDIST_OK;
        if (!idist__file_pread(f->fd, size, 8, 16 + f->applied))
            return idist__fail_errno("reading the store file", errno);
        nvalue = size[1] == 0xffffffffu ? 0 : size[1];
        if (size[0] > IDIST__KEY_MAX + 1 || nvalue > IDIST__VALUE_MAX)
            return idist__fail(IDIST_ERR_ARG, "store: %s is damaged", f->path);
        buf = (char *)idist__mem_alloc(&f->table.mem, size[0] + nvalue);
        if (!buf) return IDIST_ERR_NO_MEMORY;
        key.data = buf;
        key.nbytes = size[0];
        if (!idist__file_pread(f->fd, buf, size[0] + nvalue, 24 + f->applied))
            s = idist__fail_errno("reading the store file", errno);
        else if (size[1] == 0xffffffffu) idist__table_remove(idist__file_table(f, key), key);
        else s = idist__table_put(idist__file_table(f, key), key, buf + size[0], nvalue);
        idist__mem_free(&f->table.mem, buf);
        if (s != IDIST_OK) return s;
        f->applied += 8 + size[0] + nvalue;
    }

    return IDIST_OK;
}

// Appends what a request did to its key.
static idist_status idist__file_append(idist__file_store *f, idist__blob key) {
    idist__entry *e = *idist__table_find(idist__file_table(f, key), key.data, key.nbytes);
    uint32_t size[2];
    uint64_t at = 16 + f->applied, committed;

    size[0] = (uint32_t)key.nbytes;
    size[1] = e ? (uint32_t)e->nvalue : 0xffffffffu;
    committed = f->applied + 8 + key.nbytes + (e ? e->nvalue : 0);
    if (!idist__file_pwrite(f->fd, size, 8, at) ||
        !idist__file_pwrite(f->fd, key.data, key.nbytes, at + 8) ||
        (e && !idist__file_pwrite(f->fd, e->value, e->nvalue, at + 8 + key.nbytes)) ||
        !idist__file_pwrite(f->fd, &committed, 8, 8))
        return idist__fail_errno("writing the store file", errno);
    f->applied = committed;

    return IDIST_OK;
}

// The key of the will whose maker locks the byte `at`.
static idist__blob idist__will_key(uint64_t at, char *buf) {
    idist__blob key;

    buf[0] = 0;
    memcpy(buf + 1, &at, sizeof at);
    key.data = buf;
    key.nbytes = IDIST__WILL_KEY_BYTES;
    return key;
}

// Takes our will back, if there is one.
static idist_status idist__file_revoke(idist__file_store *f) {
    char buf[IDIST__WILL_KEY_BYTES];
    idist__blob key = idist__will_key(f->will_at, buf);
    idist_status status = IDIST_OK;
    struct flock fl;

    if (!f->will_at) return IDIST_OK;
    if (idist__table_remove(&f->wills, key)) status = idist__file_append(f, key);
    idist__file_lock(f->fd, IDIST__OFD_SETLK, F_UNLCK, (off_t)f->will_at, &fl);
    f->will_at = 0;

    return status;
}

// The place of its record, which nobody else has, names the byte to be locked. An empty key only
// takes the old will back.
static idist_status idist__file_bequeath(idist__file_store *f, const idist__req *r) {
    char buf[IDIST__WILL_KEY_BYTES];
    uint32_t nkey = (uint32_t)r->key.nbytes;
    size_t nbytes = sizeof nkey + r->key.nbytes + r->a.nbytes;
    idist_status status = idist__file_revoke(f);
    idist__blob key;
    struct flock fl;
    char *value;

    if (status != IDIST_OK || !nkey) return status;
    value = (char *)idist__mem_alloc(&f->table.mem, nbytes);
    if (!value) return IDIST_ERR_NO_MEMORY;
    memcpy(value, &nkey, sizeof nkey);
    memcpy(value + sizeof nkey, r->key.data, nkey);
    memcpy(value + sizeof nkey + nkey, r->a.data, r->a.nbytes);

    f->will_at = 16 + f->applied;
    key = idist__will_key(f->will_at, buf);
    if (idist__file_lock(f->fd, IDIST__OFD_SETLK, F_WRLCK, (off_t)f->will_at, &fl) != 0)
        status = idist__fail_errno("locking the store file", errno);
    else status = idist__table_put(&f->wills, key, value, nbytes);
    if (status == IDIST_OK) status = idist__file_append(f, key);
    idist__mem_free(&f->table.mem, value);

    return status;
}

// Sets what the maker of a will wanted to be set.
static idist_status idist__file_execute(idist__file_store *f, const idist__entry *will) {
    char buf[IDIST__WILL_KEY_BYTES];
    idist__blob key, will_key = {buf, IDIST__WILL_KEY_BYTES};
    uint32_t nkey;
    idist_status status;

    memcpy(buf, will->key, sizeof buf);
    memcpy(&nkey, will->value, sizeof nkey);
    key.data = will->value + sizeof nkey;
    key.nbytes = nkey;
    status = idist__table_put(&f->table, key, key.data + nkey, will->nvalue - sizeof nkey - nkey);
    if (status == IDIST_OK) status = idist__file_append(f, key);
    idist__table_remove(&f->wills, will_key);
    if (status == IDIST_OK) status = idist__file_append(f, will_key);

    return status;
}

// Whether the process that made a will has ended without taking it back.
static bool idist__file_will_is_due(const idist__file_store *f, const idist__entry *will) {
    uint64_t at;
    uint32_t nkey = 0;
    struct flock fl;

    memcpy(&at, will->key + 1, sizeof at);
    if (will->nvalue >= sizeof nkey) memcpy(&nkey, will->value, sizeof nkey);
    if (at == f->will_at || !nkey || nkey > will->nvalue - sizeof nkey) return false;

    return idist__file_lock(f->fd, IDIST__OFD_GETLK, F_WRLCK, (off_t)at, &fl) == 0 &&
           fl.l_type == F_UNLCK;
}

// Carries out the wills of processes that ended. Called with the records locked.
static idist_status idist__file_wills(idist__file_store *f) {
    int64_t now = idist__os_now_ns();
    idist_status status = IDIST_OK;
    size_t i;

    if (!f->wills.count || now - f->looked_ns < IDIST__WILLS_MS * IDIST__MS) return IDIST_OK;
    f->looked_ns = now;

    for (i = 0; i < IDIST__COUNT_OF(f->wills.bucket); i++) {
        idist__entry *e, *next;

        for (e = f->wills.bucket[i]; e && status == IDIST_OK; e = next) {
            next = e->next;
            if (idist__file_will_is_due(f, e)) status = idist__file_execute(f, e);
        }
    }

    return status;
}

// Carries out a request. Called with the records locked.
static idist_status idist__file_apply(idist__file_store *f, idist__req *r, bool *wait,
                                      bool *changed) {
    idist_status status = idist__file_replay(f);

    if (status == IDIST_OK) status = idist__file_wills(f);
    if (status != IDIST_OK) return status;
    if (r->op == IDIST__REQ_WILL) return idist__file_bequeath(f, r);
    status = idist__table_apply(&f->table, r, wait, changed);
    return *changed ? idist__file_append(f, r->key) : status;
}

static idist_status idist__file_request(idist__file_store *f, idist__req *r, bool *wait) {
    bool changed = false;
    idist_status s;

    if (!idist__file_records(f->fd, true, r->deadline_ns)) return idist__file_late(f);
    s = idist__file_apply(f, r, wait, &changed);
    if (s != IDIST_OK) idist__file_forget(f); // the tables may be ahead of the file: read it anew
    idist__file_records(f->fd, false, r->deadline_ns);

    if (s == IDIST_OK && (*wait || changed || r->op == IDIST__REQ_CHECK) && !f->server &&
        !idist__file_server_lives(f->fd))
        s = idist__fail(IDIST_ERR_PEER_LOST, "store: the process that owns %s ended", f->path);
    if (s == IDIST_OK && *wait && idist__os_ms_until(r->deadline_ns) == 0)
        s = idist__req_late(r, &f->table);

    return s;
}

static idist_status idist__file_store_run(idist_store *store, idist__req *r) {
    idist__file_store *f = (idist__file_store *)store->impl;
    int pause_ms = 1;

    for (;;) {
        bool wait = false;
        idist_status s;
        pthread_mutex_lock(&f->lock);
        s = idist__file_request(f, r, &wait);
        pthread_mutex_unlock(&f->lock);
        if (s != IDIST_OK || !wait) return s;
        idist__os_pause_ms(pause_ms);
        if (pause_ms < 16) pause_ms *= 2;
    }
}

static bool idist__file_is_at(int fd, const char *path);

static void idist__file_store_close(idist_store *store) {
    idist__file_store *f = (idist__file_store *)store->impl;

    if (f->server && f->fd >= 0 && idist__file_is_at(f->fd, f->path)) unlink(f->path);
    idist__os_close(&f->fd);
    idist__file_forget(f);
    pthread_mutex_destroy(&f->lock);
    idist__mem_free(&store->mem, f->path);
    idist__mem_free(&store->mem, f);
}

// Whether a file may be emptied: it is empty, or a store's.
static bool idist__file_is_store(int fd) {
    struct stat st;
    char magic[8];
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) return false;
    return st.st_size == 0 ||
           (idist__file_pread(fd, magic, 8, 0) && memcmp(magic, "IDSTORE1", 8) == 0);
}

// Whether the path still leads to the open file: a server that ends removes its file, perhaps
// between our open and our lock.
static bool idist__file_is_at(int fd, const char *path) {
    struct stat a, b;
    return fstat(fd, &a) == 0 && stat(path, &b) == 0 && a.st_dev == b.st_dev &&
           a.st_ino == b.st_ino;
}

// The server makes the file its own: an empty table under the lock of the living.
static idist_status idist__file_claim(idist__file_store *f, int64_t deadline_ns) {
    struct flock fl;
    uint64_t zero = 0;
    idist_status s = IDIST_OK;

    for (;;) {
        f->fd = open(f->path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (f->fd < 0)
            return idist__fail(IDIST_ERR_SYSTEM, "store: %s cannot be opened: %s", f->path,
                               strerror(errno));
        if (!idist__file_records(f->fd, true, deadline_ns)) return idist__file_late(f);
        if (idist__file_is_at(f->fd, f->path)) break;
        idist__os_close(&f->fd);
    }

    if (idist__file_lock(f->fd, IDIST__OFD_SETLK, F_WRLCK, 0, &fl) != 0)
        s = idist__fail(IDIST_ERR_ADDR_IN_USE, "store: %s belongs to a job that is running",
                        f->path);
    else if (!idist__file_is_store(f->fd))
        s = idist__fail(IDIST_ERR_ARG, "store: %s exists and is no store file; it is left alone",
                        f->path);
    else if (ftruncate(f->fd, 0) != 0 || !idist__file_pwrite(f->fd, "IDSTORE1", 8, 0) ||
             !idist__file_pwrite(f->fd, &zero, 8, 8))
        s = idist__fail_errno("writing the store file", errno);
    idist__file_records(f->fd, false, deadline_ns);
    if (s != IDIST_OK) idist__os_close(&f->fd); // before anybody takes us for the owner

    return s;
}

// The others wait for a file whose server lives, and look it up by name again each time: it may
// have been replaced.
static idist_status idist__file_join(idist__file_store *f, int64_t deadline_ns) {
    for (;;) {
        bool alive = false;
        char magic[8];
        f->fd = open(f->path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);

        if (f->fd >= 0 && idist__file_records(f->fd, true, deadline_ns)) {
            alive = idist__file_server_lives(f->fd) && idist__file_pread(f->fd, magic, 8, 0) &&
                    memcmp(magic, "IDSTORE1", 8) == 0;
            idist__file_records(f->fd, false, deadline_ns);
        }

        if (alive) return IDIST_OK;
        if (f->fd < 0 && errno != ENOENT)
            return idist__fail(IDIST_ERR_SYSTEM, "store: %s cannot be opened: %s", f->path,
                               strerror(errno));
        idist__os_close(&f->fd);
        if (idist__os_ms_until(deadline_ns) == 0)
            return idist__fail(IDIST_ERR_TIMEOUT,
                               "store: no living process owns %s: rank 0 has not started", f->path);
        idist__os_pause_ms(5);
    }
}

static idist_status idist__file_store_open(idist_store *store, const char *path, bool server,
                                           int64_t deadline_ns) {
    idist__file_store *f = (idist__file_store *)idist__mem_alloc(&store->mem, sizeof *f);

    if (!f) return IDIST_ERR_NO_MEMORY;
    f->fd = -1;
    f->table.mem = f->wills.mem = store->mem;
    f->server = server;
    pthread_mutex_init(&f->lock, NULL);
    store->impl = f;
    store->run = idist__file_store_run;
    store->close = idist__file_store_close;
    f->path = (char *)idist__mem_alloc(&store->mem, strlen(path) + 1);
    if (!f->path) return IDIST_ERR_NO_MEMORY;
    memcpy(f->path, path, strlen(path) + 1);

    return server ? idist__file_claim(f, deadline_ns) : idist__file_join(f, deadline_ns);
}

// ---- behind a socket: the wire ----
//
// torch's TCPStore: one byte of request, strings as u64 length and bytes, every key with a '/'
// before it. The first request is VALIDATE with a magic number. A client sends WAIT before GET. See
// IDIST__REQ_* for the numbers.

#define IDIST__STORE_MAGIC 0x3C85F7CEu
#define IDIST__STORE_REQUEST_MAX ((size_t)IDIST__VALUE_MAX + 64 * 1024)

typedef struct idist__reader {
    const char *p;
    size_t left;
    bool more; // ran out of bytes
    bool bad;  // a length is beyond what is allowed
} idist__reader;

static uint64_t idist__read_u64(idist__reader *r) {
    uint64_t v = 0;

    if (r->more || r->left < 8) r->more = true;
    else {
        memcpy(&v, r->p, 8);
        r->p += 8;
        r->left -= 8;
    }

    return v;
}

static idist__blob idist__read_blob(idist__reader *r, uint64_t max) {
    idist__blob b;
    uint64_t n = idist__read_u64(r);

    b.data = r->p;
    b.nbytes = 0;
    if (r->more) return b;

    if (n > max) r->bad = true;
    else if (n > r->left) r->more = true;
    else {
        b.nbytes = (size_t)n;
        r->p += n;
        r->left -= (size_t)n;
    }

    return b;
}

// Reads one request from the front of a buffer. > 0: its size, 0: more bytes are needed, -1:
// nonsense. The request points into the buffer; keys has room for `maxkeys`.
static ptrdiff_t idist__store_parse(const char *buf, size_t nbytes, idist__req *req,
                                    idist__blob *keys, size_t maxkeys) {
    idist__reader r;
    uint32_t magic;
    uint64_t i, n;

    memset(req, 0, sizeof *req);
    memset(&r, 0, sizeof r);
    if (!nbytes) return 0;
    r.p = buf + 1;
    r.left = nbytes - 1;
    req->op = (unsigned char)buf[0];

    switch (req->op) {
    case IDIST__REQ_VALIDATE:
        if (r.left < 4) return 0;
        memcpy(&magic, r.p, sizeof magic); // in the client's byte order, as all numbers here and in
                                           // torch's protocol
        req->number = (int64_t)magic;
        r.p += sizeof magic;
        break;
    case IDIST__REQ_SET:
    case IDIST__REQ_WILL:
        req->key = idist__read_blob(&r, IDIST__KEY_MAX + 1);
        if (!r.more && !r.bad) req->a = idist__read_blob(&r, IDIST__VALUE_MAX);
        break;
    case IDIST__REQ_COMPARE_SET:
        req->key = idist__read_blob(&r, IDIST__KEY_MAX + 1);
        if (!r.more && !r.bad) req->a = idist__read_blob(&r, IDIST__VALUE_MAX / 2);
        if (!r.more && !r.bad) req->b = idist__read_blob(&r, IDIST__VALUE_MAX / 2);
        break;
    case IDIST__REQ_GET:
    case IDIST__REQ_DELETE: req->key = idist__read_blob(&r, IDIST__KEY_MAX + 1); break;
    case IDIST__REQ_ADD:
        req->key = idist__read_blob(&r, IDIST__KEY_MAX + 1);
        if (!r.more && !r.bad) req->number = (int64_t)idist__read_u64(&r);
        break;
    case IDIST__REQ_CHECK:
    case IDIST__REQ_WAIT:
        n = idist__read_u64(&r);
        if (!r.more && n > maxkeys) r.bad = true;
        for (i = 0; i < n && !r.more && !r.bad; i++)
            keys[i] = idist__read_blob(&r, IDIST__KEY_MAX + 1);
        req->keys = keys;
        req->nkeys = (size_t)n;
        break;
    case IDIST__REQ_NUM_KEYS:
    case IDIST__REQ_CANCEL_WAIT: break;
    default: return -1;
    }

    if (r.bad) return -1;

    return r.more ? 0 : r.p - buf;
}

// ---- behind a socket: found by multicast ----
//
// "cast:GROUP:PORT/JOB". Who looks for the server asks the group, and the server answers the asker
// alone:
//
//     question | tag 16 | 0 2 |        answer | tag 16 | port 2 |        tag: HMAC(key, JOB), port:
//     big endian
//
// What is found this way is believed only after the handshake.

typedef struct idist__cast {
    int fd;
    idist__addr group;
    uint8_t tag[32];
    char ip[64]; // ours, where packets for the group leave
} idist__cast;

static idist_status idist__cast_open(idist__cast *c, const char *text, bool server,
                                     const uint8_t key[32]) {
    const char *job = strchr(text, '/'), *own = idist__os_env("IDIST_ADDR");
    char group[300];
    struct ip_mreq member;
    idist__addr a;
    idist_status s;
    int yes = 1;

    memset(&member, 0, sizeof member);
    snprintf(group, sizeof group, "tcp:%.*s", (int)(job - text), text);
    idist__hmac(key, "multicast", job, strlen(job), NULL, 0, c->tag);
    if ((s = idist__addr_parse(&c->group, group)) != IDIST_OK) return s;
    c->fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (c->fd < 0) return idist__fail_errno("socket", errno);
    if (own) s = idist__addr_tcp(&a, own, 0);
    if (s == IDIST_OK && own && a.sa.ss_family != AF_INET)
        s = idist__fail(IDIST_ERR_ENV, "store: IDIST_ADDR=%s: multicast takes an IPv4 address",
                        own);
    if (s != IDIST_OK) return s;
    a.nbytes = sizeof a.sa;
    if (!own && (connect(c->fd, (struct sockaddr *)&c->group.sa, c->group.nbytes) != 0 ||
                 getsockname(c->fd, (struct sockaddr *)&a.sa, &a.nbytes) != 0))
        return idist__fail(IDIST_ERR_SYSTEM,
                           "store: no way to %s (%s): set IDIST_ADDR to this host's address",
                           group + 4, strerror(errno));
    idist__addr_host_text(&a, c->ip, sizeof c->ip);
    idist__os_close(&c->fd); // a socket that was connected hears its peer only
    c->fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    member.imr_multiaddr = ((struct sockaddr_in *)&c->group.sa)->sin_addr;
    member.imr_interface = ((struct sockaddr_in *)&a.sa)->sin_addr;
    if (c->fd < 0 ||
        setsockopt(c->fd, IPPROTO_IP, IP_MULTICAST_IF, &member.imr_interface,
                   sizeof member.imr_interface) != 0 ||
        (server && (setsockopt(c->fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) != 0 ||
                    bind(c->fd, (struct sockaddr *)&c->group.sa, c->group.nbytes) != 0 ||
                    setsockopt(c->fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &member, sizeof member) != 0)))
        return idist__fail(IDIST_ERR_SYSTEM, "store: multicast to %s by the interface of %s%s: %s",
                           group + 4, c->ip, own ? " (IDIST_ADDR)" : "", strerror(errno));

    return IDIST_OK;
}

// The server's part: answers all questions that are there.
static void idist__cast_answer(const idist__cast *c, int port) {
    uint8_t msg[18];
    idist__addr a;

    a.nbytes = sizeof a.sa;

    while (recvfrom(c->fd, msg, sizeof msg, MSG_TRUNC, (struct sockaddr *)&a.sa, &a.nbytes) >= 0) {
        if (memcmp(msg, c->tag, 16) == 0 && !msg[16] && !msg[17]) {
            msg[16] = (uint8_t)(port >> 8);
            msg[17] = (uint8_t)port;
            sendto(c->fd, msg, sizeof msg, MSG_NOSIGNAL, (struct sockaddr *)&a.sa,
                   a.nbytes); // lost: it asks again
        }

        a.nbytes = sizeof a.sa;
    }
}

// The others': asks until somebody says where the server is.
static idist_status idist__cast_ask(const idist__cast *c, char *addr_text, size_t cap,
                                    int64_t deadline_ns) {
    uint8_t msg[18];
    char ip[64];
    idist__addr a;

    for (;;) {
        memset(msg, 0, sizeof msg);
        memcpy(msg, c->tag, 16);
        sendto(c->fd, msg, sizeof msg, MSG_NOSIGNAL, (const struct sockaddr *)&c->group.sa,
               c->group.nbytes);
        idist__sock_wait(c->fd, POLLIN, idist__os_deadline(100));

        for (;;) {
            a.nbytes = sizeof a.sa;
            if (recvfrom(c->fd, msg, sizeof msg, MSG_TRUNC, (struct sockaddr *)&a.sa, &a.nbytes) !=
                sizeof msg)
                break;
            if (memcmp(msg, c->tag, 16) != 0 || (!msg[16] && !msg[17])) continue;
            idist__addr_host_text(&a, ip, sizeof ip);
            snprintf(addr_text, cap, "tcp:%s:%d", ip, msg[16] << 8 | msg[17]);
            return IDIST_OK;
        }

        if (idist__os_ms_until(deadline_ns) == 0)
            return idist__fail(
                IDIST_ERR_TIMEOUT,
                "store: nobody in the multicast group has answered: rank 0 has not started, its "
                "secret or the "
                "size of its world is another one, or no multicast gets from there to %s",
                c->ip);
    }
}

// ---- behind a socket: the server ----

typedef struct idist__client { // one connection of the server
    int fd;
    bool valid;   // said the magic number
    bool waiting; // its first request waits for keys
    char *in;
    size_t nin, capin;
    char *out;
    size_t nout, capout;
    char *will; // key and value, behind each other: put into the table when the client is gone and
                // has not taken it back
    size_t will_nkey, will_nbytes;
} idist__client;

typedef struct idist__server {
    idist_allocator mem;
    uint8_t key[32];
    int listener, wake, port;
    idist__cast cast; // its fd is -1: nobody asks where we are
    pthread_t thread;
    bool running;
    idist__table table;
    idist__blob *keys; // scratch for the parser
    char *value;       // scratch for replies
    struct pollfd *polls;
    idist__porch porch;
    idist__client *clients[4096];
    int nclients;
    bool executed;   // a will: the table has changed
    int nrefused;    // handshakes that failed, for the text of a time-out
    int other_order; // one of them came from a machine of another byte order
    int no_fds;      // a connection could not be accepted for want of a descriptor
} idist__server;

// The client has gone without taking its will back. A value that stands there already stays.
static void idist__client_execute(idist__server *sv, const idist__client *c) {
    idist__blob key;

    key.data = c->will;
    key.nbytes = c->will_nkey;
    if (*idist__table_find(&sv->table, key.data, key.nbytes)) return;
    sv->executed = idist__table_put(&sv->table, key, c->will + c->will_nkey,
                                    c->will_nbytes - c->will_nkey) == IDIST_OK;
}

static void idist__server_drop(idist__server *sv, int i) {
    idist__client *c = sv->clients[i];

    idist__os_close(&c->fd);
    if (c->will_nkey) idist__client_execute(sv, c);
    idist__mem_free(&sv->mem, c->will);
    idist__mem_free(&sv->mem, c->in);
    idist__mem_free(&sv->mem, c->out);
    idist__mem_free(&sv->mem, c);
    sv->clients[i] = sv->clients[--sv->nclients];
}

static bool idist__buffer_reserve(const idist_allocator *mem, char **buf, size_t *cap, size_t used,
                                  size_t want) {
    size_t n = *cap ? *cap : 512;
    char *p;

    if (want <= *cap) return true;
    while (n < want) n *= 2;
    p = (char *)idist__mem_raw(mem, n);
    if (!p) return false;
    if (used) memcpy(p, *buf, used);
    idist__mem_free(mem, *buf);
    *buf = p;
    *cap = n;

    return true;
}

static bool idist__client_reply(idist__server *sv, idist__client *c, const void *data,
                                size_t nbytes) {
    if (!idist__buffer_reserve(&sv->mem, &c->out, &c->capout, c->nout, c->nout + nbytes))
        return false;
    if (nbytes) memcpy(c->out + c->nout, data, nbytes);
    c->nout += nbytes;
    return true;
}

static bool idist__client_answer(idist__server *sv, idist__client *c, const idist__req *r) {
    uint8_t byte = 0;
    uint64_t n = r->nbytes;
    int64_t number = r->number;

    switch (r->op) {
    case IDIST__REQ_GET:
    case IDIST__REQ_COMPARE_SET:
        return idist__client_reply(sv, c, &n, 8) && idist__client_reply(sv, c, r->value, r->nbytes);
    case IDIST__REQ_ADD:
    case IDIST__REQ_NUM_KEYS: return idist__client_reply(sv, c, &number, 8);
    case IDIST__REQ_DELETE: number = r->flag ? 1 : 0; return idist__client_reply(sv, c, &number, 8);
    case IDIST__REQ_CHECK: byte = r->flag ? 0 : 1; return idist__client_reply(sv, c, &byte, 1);
    case IDIST__REQ_WAIT: return idist__client_reply(sv, c, &byte, 1);
    default: return true;
    }
}

// An empty key takes the will back.
static bool idist__client_bequeath(idist__server *sv, idist__client *c, const idist__req *r) {
    idist__mem_free(&sv->mem, c->will);
    c->will_nkey = c->will_nbytes = 0;
    c->will = r->key.nbytes ? (char *)idist__mem_raw(&sv->mem, r->key.nbytes + r->a.nbytes) : NULL;
    if (!c->will) return !r->key.nbytes;
    memcpy(c->will, r->key.data, r->key.nbytes);
    if (r->a.nbytes) memcpy(c->will + r->key.nbytes, r->a.data, r->a.nbytes);
    c->will_nkey = r->key.nbytes;
    c->will_nbytes = r->key.nbytes + r->a.nbytes;

    return true;
}

// Carries out one request of a client. *wait: it has to be tried again when the table has changed.
// False: drop the client.
static bool idist__client_request(idist__server *sv, idist__client *c, idist__req *r, bool *wait,
                                  bool *changed) {
    static const uint64_t gone = IDIST__NO_VALUE;
    bool touched = false;

    *wait = false;
    if (r->op == IDIST__REQ_VALIDATE) return c->valid = r->number == (int64_t)IDIST__STORE_MAGIC;
    if (!c->valid) return false;
    if (r->op == IDIST__REQ_CANCEL_WAIT)
        return true; // nothing waits any more: it crossed our answer
    if (r->op == IDIST__REQ_WILL) return idist__client_bequeath(sv, c, r);
    r->value = sv->value;
    r->capacity = IDIST__VALUE_MAX;

    if (idist__table_apply(&sv->table, r, wait, &touched) != IDIST_OK) {
        if (r->op != IDIST__REQ_ADD) return false;
        r->number = IDIST__NOT_A_NUMBER;
    }

    if (touched) *changed = true;

    if (*wait &&
        r->op ==
            IDIST__REQ_GET) { // the key went between the client's WAIT and its GET: it waits again
        *wait = false;
        return idist__client_reply(sv, c, &gone, 8);
    }

    return *wait || idist__client_answer(sv, c, r);
}

// Serves what lies in a client's buffer, up to a request that has to wait; while it does, the
// client is silent, or cancels. *changed is set when the table changed. False: drop the client.
static bool idist__client_serve(idist__server *sv, idist__client *c, bool *changed) {
    static const uint8_t canceled = 1;
    size_t used = 0;

    c->waiting = false;

    while (!c->waiting) {
        idist__req r;
        bool wait;
        ptrdiff_t n =
            idist__store_parse(c->in + used, c->nin - used, &r, sv->keys, IDIST__KEYS_MAX);
        if (n == 0 && c->nin - used < IDIST__STORE_REQUEST_MAX) break;
        if (n <= 0 || !idist__client_request(sv, c, &r, &wait, changed)) return false;

        if (wait && c->nin - used > (size_t)n &&
            c->in[used + (size_t)n] == IDIST__REQ_CANCEL_WAIT) {
            n++;
            if (!idist__client_reply(sv, c, &canceled, 1)) return false;
        } else if (wait) {
            c->waiting = true;
            break;
        }

        used += (size_t)n;
    }

    if (used) memmove(c->in, c->in + used, c->nin - used);
    c->nin -= used;

    return c->nout < 8 * IDIST__STORE_REQUEST_MAX; // it asks and asks, and never reads
}

// Reads what has come. False: drop the client.
static bool idist__client_read(idist__server *sv, idist__client *c) {
    for (;;) {
        ptrdiff_t n;
        if (c->nin >= IDIST__STORE_REQUEST_MAX)
            return true; // a whole request is there: serve it first
        if (!idist__buffer_reserve(&sv->mem, &c->in, &c->capin, c->nin, c->nin + 4096))
            return false;
        n = idist__sock_read(c->fd, c->in + c->nin, c->capin - c->nin);
        if (n <= 0) return n == 0;
        c->nin += (size_t)n;
    }
}

static bool idist__client_write(idist__client *c) {
    size_t sent = 0;

    while (sent < c->nout) {
        struct iovec part;
        ptrdiff_t n;
        part.iov_base = c->out + sent;
        part.iov_len = c->nout - sent;
        n = idist__sock_write(c->fd, &part, 1);
        if (n < 0) return false;
        if (n == 0) break;
        sent += (size_t)n;
    }

    if (sent) memmove(c->out, c->out + sent, c->nout - sent);
    c->nout -= sent;

    return true;
}

// Takes newcomers onto the porch while it has room.
static void idist__server_accept(idist__server *sv) {
    idist__handshake *h;

    while ((h = idist__porch_place(&sv->porch)) != NULL) {
        int fd = idist__sock_accept(sv->listener);

        if (fd < 0 && (errno == EMFILE || errno == ENFILE)) {
            if (!idist__porch_make_way(&sv->porch))
                __atomic_store_n(&sv->no_fds, 1, __ATOMIC_RELAXED);
            idist__os_pause_ms(1); // no spin while descriptors are short
        }

        if (fd < 0) return;
        idist__os_close(&h->fd);
        idist__auth_begin(h, fd, true, sv->key, IDIST__ROLE_STORE, 0, 0, 0,
                          idist__os_deadline(IDIST__PORCH_MS));
        h->ready = true;
    }
}

// Handshakes go on; whoever is through becomes a client.
static void idist__server_porch(idist__server *sv) {
    int i;

    for (i = 0; i < IDIST__PORCH; i++) {
        idist__handshake *h = &sv->porch.place[i];
        bool done = false;
        idist__client *c;
        if (h->fd >= 0 && idist__os_now_ns() >= h->deadline_ns) idist__os_close(&h->fd);
        if (h->fd < 0 || !h->ready) continue;
        h->ready = false;

        if (idist__auth_step(h, &done) != IDIST_OK) {
            if (idist__auth_other_order(h)) __atomic_store_n(&sv->other_order, 1, __ATOMIC_RELAXED);
            idist__os_close(&h->fd);
            __atomic_add_fetch(&sv->nrefused, 1, __ATOMIC_RELAXED);
        }

        if (h->fd < 0 || !done) continue;
        c = sv->nclients < (int)IDIST__COUNT_OF(sv->clients)
                ? (idist__client *)idist__mem_alloc(&sv->mem, sizeof *c)
                : NULL;
        if (c) {
            c->fd = h->fd;
            sv->clients[sv->nclients++] = c;
            h->fd = -1;
        } else {
            idist__os_close(&h->fd);
        }
    }
}

static bool idist__server_client(idist__server *sv, idist__client *c, bool *changed) {
    bool alive = idist__client_read(sv, c); // what it said before it left still counts
    return idist__client_serve(sv, c, changed) && alive && idist__client_write(c);
}

static void *idist__server_main(void *arg) {
    idist__server *sv = (idist__server *)arg;
    struct pollfd *fds = sv->polls;

    for (;;) {
        int i, n = sv->nclients, strangers;
        bool changed = false, room = idist__porch_place(&sv->porch) != NULL;
        fds[0].fd = sv->wake;
        fds[1].fd = room ? sv->listener : -1;
        fds[2].fd = sv->cast.fd;
        fds[0].events = fds[1].events = fds[2].events = POLLIN;

        for (i = 0; i < n; i++) {
            fds[i + 3].fd = sv->clients[i]->fd;
            fds[i + 3].events = (short)(POLLIN | (sv->clients[i]->nout ? POLLOUT : 0));
        }

        strangers = idist__porch_poll(&sv->porch, fds + n + 3);
        i = !strangers ? -1 : room ? 100 : 10;
        if (poll(fds, (nfds_t)n + 3 + (nfds_t)strangers, i) < 0 && errno != EINTR) return NULL;
        if (fds[0].revents) return NULL;
        idist__porch_polled(&sv->porch, fds + n + 3);
        for (i = n - 1; i >= 0; i--) // downwards: a dropped client is replaced by the last one
            if (fds[i + 3].revents && !idist__server_client(sv, sv->clients[i], &changed))
                idist__server_drop(sv, i);

        while (changed || sv->executed) {
            changed = sv->executed = false;

            for (i = sv->nclients - 1; i >= 0; i--) {
                idist__client *c = sv->clients[i];
                if (c->waiting && !(idist__client_serve(sv, c, &changed) && idist__client_write(c)))
                    idist__server_drop(sv, i);
            }
        }

        if (fds[2].revents) idist__cast_answer(&sv->cast, sv->port);
        if (room && fds[1].revents) idist__server_accept(sv);
        idist__server_porch(sv);
    }
}

static void idist__server_stop(idist__server *sv) {
    uint64_t one = 1;

    if (sv->running) {
        while (write(sv->wake, &one, sizeof one) < 0 && errno == EINTR) continue;
        pthread_join(sv->thread, NULL);
    }

    while (sv->nclients) idist__server_drop(sv, 0);
    idist__porch_close(&sv->porch);
    idist__os_close(&sv->wake);
    idist__os_close(&sv->listener);
    idist__os_close(&sv->cast.fd);
    idist__table_clear(&sv->table);
    idist__mem_free(&sv->mem, sv->keys);
    idist__mem_free(&sv->mem, sv->value);
    idist__mem_free(&sv->mem, sv->polls);
    idist__mem_free(&sv->mem, sv);
}

// Serves on a listening socket, which it owns from now on (as that of `cast`), in a thread of its
// own.
static idist_status idist__server_start(const idist_allocator *mem, int listener, int port,
                                        idist__cast *cast, const uint8_t key[32],
                                        idist__server **out) {
    idist__server *sv = (idist__server *)idist__mem_alloc(mem, sizeof *sv);

    *out = NULL;

    if (!sv) {
        idist__os_close(&listener);
        idist__os_close(&cast->fd);
        return IDIST_ERR_NO_MEMORY;
    }

    if (mem) sv->mem = *mem;
    sv->table.mem = sv->mem;
    memcpy(sv->key, key, 32);
    sv->listener = listener;
    sv->port = port;
    sv->cast = *cast;
    idist__porch_init(&sv->porch);
    sv->polls =
        (struct pollfd *)idist__mem_raw(mem, sizeof *sv->polls *
                                                 (IDIST__COUNT_OF(sv->clients) + IDIST__PORCH + 3));
    sv->keys = (idist__blob *)idist__mem_raw(mem, sizeof *sv->keys * IDIST__KEYS_MAX);
    sv->value = (char *)idist__mem_raw(mem, IDIST__VALUE_MAX);
    sv->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);

    if (!sv->polls || !sv->keys || !sv->value || sv->wake < 0) {
        idist_status s = sv->wake < 0 ? idist__fail_errno("eventfd", errno) : IDIST_ERR_NO_MEMORY;
        idist__server_stop(sv);
        return s;
    }

    if (idist__os_thread(&sv->thread, idist__server_main, sv) != 0) {
        idist__server_stop(sv);
        return idist__fail(IDIST_ERR_SYSTEM, "store: no thread for the server");
    }

    sv->running = true;
    *out = sv;

    return IDIST_OK;
}

// ---- behind a socket: the client ----

// How long a request that does not wait for keys may take, and how long a thread that waits keeps
// the connection to itself.
enum { IDIST__ANSWER_MS = 30000, IDIST__SLICE_MS = 50, IDIST__PROBE_MS = 5000 };

// How long a client that was turned away tries again.
enum { IDIST__RETRY_MS = 10000 };

typedef struct idist__tcp_store {
    pthread_mutex_t lock;
    int nwant; // threads that want the lock
    int fd;
    idist__server *server; // in the process that owns the table
    char *out;
    size_t nout, capout;
    idist_status broken; // the connection is unusable since this
} idist__tcp_store;

static void idist__put(idist_store *store, const void *data, size_t nbytes, bool *ok) {
    idist__tcp_store *t = (idist__tcp_store *)store->impl;
    *ok = *ok && idist__buffer_reserve(&store->mem, &t->out, &t->capout, t->nout, t->nout + nbytes);
    if (!*ok) return;
    if (nbytes) memcpy(t->out + t->nout, data, nbytes);
    t->nout += nbytes;
}

static void idist__put_blob(idist_store *store, idist__blob b, const char *prefix, bool *ok) {
    uint64_t n = b.nbytes + strlen(prefix);
    idist__put(store, &n, 8, ok);
    idist__put(store, prefix, strlen(prefix), ok);
    idist__put(store, b.data, b.nbytes, ok);
}

// One request on the wire. GET needs a WAIT before it, which is a request of its own.
static bool idist__tcp_encode(idist_store *store, const idist__req *r) {
    idist__tcp_store *t = (idist__tcp_store *)store->impl;
    uint8_t op = (uint8_t)r->op;
    uint64_t n = r->nkeys;
    size_t i;
    bool ok = true;

    t->nout = 0;
    idist__put(store, &op, 1, &ok);

    switch (r->op) {
    case IDIST__REQ_CHECK:
    case IDIST__REQ_WAIT:
        idist__put(store, &n, 8, &ok);
        for (i = 0; i < r->nkeys; i++) idist__put_blob(store, r->keys[i], "/", &ok);
        break;
    case IDIST__REQ_SET:
    case IDIST__REQ_WILL:
        idist__put_blob(store, r->key, r->key.nbytes || r->op == IDIST__REQ_SET ? "/" : "", &ok);
        idist__put_blob(store, r->a, "", &ok);
        break;
    case IDIST__REQ_COMPARE_SET:
        idist__put_blob(store, r->key, "/", &ok);
        idist__put_blob(store, r->a, "", &ok);
        idist__put_blob(store, r->b, "", &ok);
        break;
    case IDIST__REQ_ADD:
        idist__put_blob(store, r->key, "/", &ok);
        idist__put(store, &r->number, 8, &ok);
        break;
    case IDIST__REQ_GET:
    case IDIST__REQ_DELETE: idist__put_blob(store, r->key, "/", &ok); break;
    default: break;
    }

    return ok;
}

static idist_status idist__tcp_broken(idist__tcp_store *t) {
    int err = errno;

    if (err == ETIMEDOUT)
        t->broken = idist__fail(IDIST_ERR_TIMEOUT, "store: the server did not answer in time");
    else
        t->broken =
            idist__fail(IDIST_ERR_PEER_LOST, "store: the connection to the server broke: %s",
                        err ? strerror(err) : "it closed");

    return t->broken;
}

// The reply to GET and COMPARE_SET: into the caller's buffer, or thrown away when it does not fit.
static idist_status idist__tcp_value(idist__tcp_store *t, idist__req *r, int64_t deadline_ns) {
    uint64_t n, left;

    if (!idist__sock_read_all(t->fd, &n, 8, deadline_ns)) return idist__tcp_broken(t);
    r->flag = n == IDIST__NO_VALUE;
    if (r->flag) return IDIST_OK;

    if (n > IDIST__VALUE_MAX) {
        errno = EPROTO;
        return idist__tcp_broken(t);
    }

    r->nbytes = (size_t)n;

    if (n <= r->capacity) {
        if (n && !idist__sock_read_all(t->fd, r->value, (size_t)n, deadline_ns))
            return idist__tcp_broken(t);
        return IDIST_OK;
    }

    for (left = n; left;) {
        char waste[4096];
        size_t k = left < sizeof waste ? (size_t)left : sizeof waste;
        if (!idist__sock_read_all(t->fd, waste, k, deadline_ns)) return idist__tcp_broken(t);
        left -= k;
    }

    return idist__fail(IDIST_ERR_TRUNCATED, "store: the value has %zu bytes, the buffer %zu",
                       (size_t)n, r->capacity);
}

// Waits for keys, at most for a slice of time, after which other threads get their turn on the
// connection. r->flag: they are there.
static idist_status idist__tcp_wait_slice(idist_store *store, idist__req *r) {
    idist__tcp_store *t = (idist__tcp_store *)store->impl;
    int64_t slice = idist__os_deadline(IDIST__SLICE_MS),
            probe = idist__os_deadline(IDIST__PROBE_MS), soon;
    uint8_t answer = 0, cancel = IDIST__REQ_CANCEL_WAIT;
    bool there;

    do {
        if (slice > r->deadline_ns) slice = r->deadline_ns;
        there = idist__sock_read_all(t->fd, &answer, 1, slice);
        if (there || errno != ETIMEDOUT || slice == r->deadline_ns) break;
        slice = idist__os_deadline(IDIST__SLICE_MS);
        // Nobody else wants the connection: no need to ask anew, but for finding out whether the
        // server still answers.
    } while (!__atomic_load_n(&t->nwant, __ATOMIC_RELAXED) && idist__os_ms_until(probe) != 0);

    if (!there) {
        if (errno != ETIMEDOUT) return idist__tcp_broken(t);
        soon = idist__os_deadline(IDIST__ANSWER_MS);
        if (!idist__sock_write_all(t->fd, &cancel, 1, soon) ||
            !idist__sock_read_all(t->fd, &answer, 1, soon))
            return idist__tcp_broken(t);
    }

    r->flag = answer == 0;

    return IDIST_OK;
}

// One request and its answer, except that a WAIT may end without one (r->flag false).
static idist_status idist__tcp_exchange(idist_store *store, idist__req *r) {
    idist__tcp_store *t = (idist__tcp_store *)store->impl;
    int64_t soon = idist__os_deadline(IDIST__ANSWER_MS);
    uint8_t byte;

    if (t->broken != IDIST_OK)
        return idist__fail(t->broken, "store: the connection to the server broke earlier");
    if (!idist__tcp_encode(store, r)) return IDIST_ERR_NO_MEMORY;
    if (!idist__sock_write_all(t->fd, t->out, t->nout, soon)) return idist__tcp_broken(t);

    switch (r->op) {
    case IDIST__REQ_GET:
    case IDIST__REQ_COMPARE_SET: return idist__tcp_value(t, r, soon);
    case IDIST__REQ_ADD:
    case IDIST__REQ_NUM_KEYS:
    case IDIST__REQ_DELETE:
        if (!idist__sock_read_all(t->fd, &r->number, 8, soon)) return idist__tcp_broken(t);
        r->flag = r->number > 0;
        if (r->op == IDIST__REQ_ADD && r->number == IDIST__NOT_A_NUMBER)
            return idist__fail(IDIST_ERR_ARG, "store: add to a key whose value is no number");
        return IDIST_OK;
    case IDIST__REQ_CHECK:
        if (!idist__sock_read_all(t->fd, &byte, 1, soon)) return idist__tcp_broken(t);
        r->flag = byte == 0;
        return IDIST_OK;
    case IDIST__REQ_WAIT: return idist__tcp_wait_slice(store, r);
    default: return IDIST_OK;
    }
}

// SET has no answer of its own. A question behind it has: once that is answered, every other client
// sees the value.
static idist_status idist__tcp_confirm(idist_store *store, const idist__req *r) {
    idist__req check = *r;
    check.op = IDIST__REQ_CHECK;
    check.keys = &r->key;
    check.nkeys = 1;
    return idist__tcp_exchange(store, &check);
}

static idist_status idist__tcp_store_run(idist_store *store, idist__req *r) {
    idist__tcp_store *t = (idist__tcp_store *)store->impl;
    bool waits = r->op == IDIST__REQ_WAIT || r->op == IDIST__REQ_GET;

    for (;;) {
        idist__req w = *r;
        idist_status s = IDIST_OK;
        bool there = true;
        __atomic_add_fetch(&t->nwant, 1, __ATOMIC_RELAXED);
        pthread_mutex_lock(&t->lock);
        __atomic_sub_fetch(&t->nwant, 1, __ATOMIC_RELAXED);

        if (waits) { // a GET is preceded by a WAIT, as in torch's protocol
            w.op = IDIST__REQ_WAIT;
            w.keys = r->nkeys ? r->keys : &r->key;
            w.nkeys = r->nkeys ? r->nkeys : 1;
            s = idist__tcp_exchange(store, &w);
            there = w.flag;
        }

        if (s == IDIST_OK && there && r->op != IDIST__REQ_WAIT) s = idist__tcp_exchange(store, r);
        if (s == IDIST_OK && r->op == IDIST__REQ_SET) s = idist__tcp_confirm(store, r);
        if (s == IDIST_OK && r->op == IDIST__REQ_GET && r->flag) there = false;
        pthread_mutex_unlock(&t->lock);
        if (s != IDIST_OK || there) return s;
        if (idist__os_ms_until(r->deadline_ns) == 0) return idist__req_late(r, NULL);
        if (__atomic_load_n(&t->nwant, __ATOMIC_RELAXED))
            idist__os_pause_ms(1); // a mutex alone is not fair
    }
}

static void idist__tcp_store_close(idist_store *store) {
    idist__tcp_store *t = (idist__tcp_store *)store->impl;

    idist__os_close(&t->fd);
    if (t->server) idist__server_stop(t->server);
    idist__mem_free(&store->mem, t->out);
    pthread_mutex_destroy(&t->lock);
    idist__mem_free(&store->mem, t);
}

// Nobody answers at an address: why that may be. It is tried again until the deadline passes.
static void idist__tcp_unreached(const char *addr_text, bool local, int err) {
    if (idist__sock_cut_off(err))
        idist__fail(
            IDIST_ERR_TIMEOUT,
            "%s cannot be reached from here (%s): the network interface is down, or no route "
            "leads there",
            addr_text, strerror(err));
    else if (local)
        idist__fail(IDIST_ERR_TIMEOUT,
                    "nobody listens at %s (%s): rank 0 has not started, its MASTER_PORT differs, "
                    "or it is of another "
                    "user, network namespace (container) or host. Ranks of one host meet at a "
                    "local socket of their "
                    "user and network namespace",
                    addr_text, strerror(err));
    else
        idist__fail(IDIST_ERR_TIMEOUT,
                    "nobody listens at %s (%s): rank 0 has not started, or MASTER_ADDR / "
                    "MASTER_PORT differ",
                    addr_text, strerror(err));
}

// Tries until the server is there. The first refusals are normal: it may start later than we do.
static idist_status idist__tcp_store_connect(idist__tcp_store *t, const char *addr_text,
                                             const uint8_t key[32], int64_t deadline_ns) {
    int pause_ms = 1;
    int64_t give_up_ns =
        0; // the server has closed a connection, and is not to be asked again after this

    for (;;) {
        idist__addr addr;
        idist_status s = idist__addr_parse(&addr, addr_text);
        if (s == IDIST_OK && addr.sa.ss_family != AF_UNIX && idist__addr_port(&addr) == 0)
            s = idist__fail(IDIST_ERR_ARG, "store: a client needs the port of the server, not 0");
        if (s == IDIST_ERR_ARG) return s;

        if (s == IDIST_OK) {
            t->fd = idist__sock_connect(&addr, deadline_ns);
            if (t->fd < 0 && (errno == EMFILE || errno == ENFILE))
                return idist__fail_errno("socket", errno);
            if (t->fd < 0 && errno == EPERM)
                return idist__fail(IDIST_ERR_AUTH, "another user of this machine listens at %s",
                                   addr_text);
            if (t->fd >= 0 && !key) return IDIST_OK;

            if (t->fd >= 0) {
                idist__handshake h;
                int64_t own = idist__os_deadline(
                    IDIST__PORCH_MS); // our own server answers at once, if it can at all
                idist__auth_begin(&h, t->fd, false, key, IDIST__ROLE_STORE, 0, 0, 0,
                                  t->server && own < deadline_ns ? own : deadline_ns);
                s = idist__auth_run(&h);
                if (s != IDIST_OK && t->server &&
                    __atomic_load_n(&t->server->no_fds, __ATOMIC_RELAXED))
                    return idist__fail(IDIST_ERR_NO_FDS,
                                       "store: out of file descriptors: raise ulimit -n");
                if (!h.broke) return s;
                idist__os_close(&t->fd);
                if (!give_up_ns) give_up_ns = idist__os_deadline(IDIST__RETRY_MS);
                if (idist__os_ms_until(give_up_ns) == 0) return s;
            } else if (give_up_ns && errno == ECONNREFUSED) {
                return idist__fail(IDIST_ERR_PEER_LOST,
                                   "store: the server at %s (rank 0) was lost during the handshake",
                                   addr_text);
            } else {
                idist__tcp_unreached(addr_text, addr.sa.ss_family == AF_UNIX, errno);
            }
        }

        if (idist__os_ms_until(deadline_ns) == 0)
            return idist__fail(IDIST_ERR_TIMEOUT, "store: %s", idist__me.text);
        idist__os_pause_ms(pause_ms);
        if (pause_ms < 50) pause_ms *= 2;
    }
}

// Asks the group, and again when the answer was none: anybody may answer, and a server may be gone
// by then.
static idist_status idist__cast_connect(idist__tcp_store *t, const idist__cast *cast,
                                        const uint8_t key[32], int64_t deadline_ns) {
    char at[320];
    idist_status s;

    do {
        int64_t soon = idist__os_deadline(1000);
        if ((s = idist__cast_ask(cast, at, sizeof at, deadline_ns)) != IDIST_OK) return s;
        s = idist__tcp_store_connect(t, at, key, soon < deadline_ns ? soon : deadline_ns);
        if (s != IDIST_OK) idist__os_close(&t->fd);
    } while (s != IDIST_OK && s != IDIST_ERR_NO_FDS && idist__os_ms_until(deadline_ns) != 0);

    return s;
}

// The server: listens, unless it brings a socket that does, and says in `own` where. Takes that
// socket and that of `cast`.
static idist_status idist__tcp_store_serve(idist_store *store, const char *addr_text, int listener,
                                           idist__cast *cast, const uint8_t key[32],
                                           bool may_be_public, char *own, size_t cap) {
    idist__tcp_store *t = (idist__tcp_store *)store->impl;
    idist__addr addr;
    idist_status s = IDIST_OK;
    char ip[64];

    if (listener < 0) s = idist__addr_parse(&addr, addr_text);
    if (listener < 0 && s == IDIST_OK && !may_be_public && !idist__addr_is_loopback(&addr))
        s = idist__fail(
            IDIST_ERR_NO_SECRET,
            "listening at %s, beyond this host, needs a shared secret: set IDIST_SECRET or "
            "IDIST_SECRET_FILE on all ranks, or IDIST_INSECURE=1 to trust the network",
            addr_text);
    if (listener < 0 && s == IDIST_OK) s = idist__sock_listen(&addr, addr_text, &listener);

    if (s != IDIST_OK) {
        idist__os_close(&cast->fd);
        return s;
    }

    idist__copy_text(own, cap, addr_text);
    memset(&addr, 0, sizeof addr);
    addr.nbytes = sizeof addr.sa;

    if (getsockname(listener, (struct sockaddr *)&addr.sa, &addr.nbytes) == 0 &&
        addr.sa.ss_family != AF_UNIX) {
        store->port = idist__addr_port(&addr);
        idist__addr_host_text(&addr, ip, sizeof ip);
        snprintf(own, cap, "tcp:[%s]:%d", ip, store->port);
    }

    return idist__server_start(&store->mem, listener, store->port, cast, key, &t->server);
}

// addr: "unix:NAME", "tcp:HOST:PORT" or "cast:GROUP:PORT/JOB". A server may bring a listening
// socket (else -1), which is ours from here on. Without a key no handshake: with a server of torch.
static idist_status idist__tcp_store_open(idist_store *store, const char *addr_text, bool server,
                                          int listener, const uint8_t key[32], bool may_be_public,
                                          int64_t deadline_ns) {
    idist__tcp_store *t = (idist__tcp_store *)idist__mem_alloc(&store->mem, sizeof *t);
    uint32_t magic = IDIST__STORE_MAGIC;
    char hello[5], at[320], own[320];
    bool asks = strncmp(addr_text, "cast:", 5) == 0;
    idist__cast cast;
    idist_status s = IDIST_OK;

    if (!t) {
        idist__os_close(&listener);
        return IDIST_ERR_NO_MEMORY;
    }

    memset(&cast, 0, sizeof cast);
    t->fd = cast.fd = -1;
    pthread_mutex_init(&t->lock, NULL);
    store->impl = t;
    store->run = idist__tcp_store_run;
    store->close = idist__tcp_store_close;
    idist__copy_text(at, sizeof at, addr_text);
    if (asks) s = idist__cast_open(&cast, addr_text + 5, server, key);
    if (asks && server) snprintf(at, sizeof at, "tcp:%s:0", cast.ip);
    idist__copy_text(own, sizeof own, at);
    if (s == IDIST_OK && server)
        s = idist__tcp_store_serve(store, at, listener, &cast, key, may_be_public, own, sizeof own);
    else if (s == IDIST_OK && asks) s = idist__cast_connect(t, &cast, key, deadline_ns);
    if (!server || (s != IDIST_OK && !t->server)) idist__os_close(&cast.fd);
    if (s == IDIST_OK && (server || !asks)) s = idist__tcp_store_connect(t, own, key, deadline_ns);
    if (s != IDIST_OK) return s;
    hello[0] = IDIST__REQ_VALIDATE;
    memcpy(hello + 1, &magic, 4);
    if (!idist__sock_write_all(t->fd, hello, 5, deadline_ns)) return idist__tcp_broken(t);

    return IDIST_OK;
}

// ---- a view with a prefix ----

typedef struct idist__prefix_store {
    idist_store *parent;
    char prefix[IDIST__KEY_MAX + 1];
} idist__prefix_store;

static idist_status idist__prefix_run(idist_store *store, idist__req *r) {
    idist__prefix_store *p = (idist__prefix_store *)store->impl;
    size_t i, np = strlen(p->prefix), nkeys = r->nkeys ? r->nkeys : 1,
              total = 0; // NUM_KEYS has an empty key: harmless
    const idist__blob *from = r->nkeys ? r->keys : &r->key;
    idist__req inner = *r;
    idist__blob *keys;
    char *text;
    idist_status s;

    for (i = 0; i < nkeys; i++) {
        total += np + from[i].nbytes;
        if (np + from[i].nbytes > IDIST__KEY_MAX)
            return idist__fail(IDIST_ERR_ARG,
                               "store: prefix and key together have at most %u bytes",
                               IDIST__KEY_MAX);
    }

    keys = (idist__blob *)idist__mem_alloc(&store->mem, nkeys * sizeof *keys + total);
    if (!keys) return IDIST_ERR_NO_MEMORY;
    text = (char *)(keys + nkeys);

    for (i = 0; i < nkeys; i++) {
        keys[i].data = text;
        keys[i].nbytes = np + from[i].nbytes;
        memcpy(text, p->prefix, np);
        if (from[i].nbytes) memcpy(text + np, from[i].data, from[i].nbytes);
        text += keys[i].nbytes;
    }

    inner.key = keys[0];
    inner.keys = r->nkeys ? keys : NULL;
    s = p->parent->run(p->parent, &inner);
    r->number = inner.number;
    r->nbytes = inner.nbytes;
    r->flag = inner.flag;
    idist__mem_free(&store->mem, keys);

    return s;
}

static void idist__prefix_close(idist_store *store) { idist__mem_free(&store->mem, store->impl); }

// ---- public ----

static idist_store *idist__store_new(const idist_allocator *mem, int timeout_ms) {
    idist_store *store = (idist_store *)idist__mem_alloc(mem, sizeof *store);
    if (!store) return NULL;
    if (mem) store->mem = *mem;
    store->timeout_ms = timeout_ms ? timeout_ms : 300000;
    return store;
}

idist_status idist_store_close(idist_store **store) {
    idist_store *s;

    if (!store) return idist__fail(IDIST_ERR_ARG, "store_close: the pointer is NULL");
    s = *store;
    *store = NULL;
    if (!s) return IDIST_OK;
    if (s->impl) s->close(s);
    idist__mem_free(&s->mem, s);

    return IDIST_OK;
}

// All kinds: "mem:", "file:PATH", "unix:NAME", "tcp:HOST:PORT", "torch:HOST:PORT" (of an agent of
// torchrun).
static idist_status idist__store_open(const char *where, const idist_store_desc *d, int listener,
                                      idist_store **out) {
    idist_store *store = idist__store_new(&d->allocator, d->timeout_ms);
    int64_t deadline_ns;
    idist__secret secret;
    uint8_t key[32];
    idist_status s = idist__secret_find(&secret, d->secret, d->secret_nbytes);

    *out = NULL;
    if (s == IDIST_OK && !store) s = IDIST_ERR_NO_MEMORY;

    if (s != IDIST_OK) {
        idist__os_close(&listener);
        idist_store_close(&store);
        return s;
    }

    deadline_ns = idist__os_deadline(store->timeout_ms);
    idist__auth_key(&secret, key);

    if (strncmp(where, "file:", 5) == 0)
        s = idist__file_store_open(store, where + 5, d->server, deadline_ns);
    else if (strcmp(where, "mem:") == 0) s = idist__mem_store_open(store);
    else if (strncmp(where, "torch:", 6) == 0) {
        char addr[4096];
        snprintf(addr, sizeof addr, "tcp:%s", where + 6);
        s = idist__tcp_store_open(store, addr, false, -1, NULL, false, deadline_ns);
    } else
        s = idist__tcp_store_open(store, where, d->server, listener, key,
                                  secret.nbytes || secret.insecure, deadline_ns);

    if (s != IDIST_OK) idist_store_close(&store);
    else *out = store;

    return s;
}

idist_status idist_store_open(const char *url, const idist_store_desc *desc, idist_store **store) {
    idist_store_desc d;
    char where[4096];

    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (!store) return idist__fail(IDIST_ERR_ARG, "store_open: store is NULL");
    *store = NULL;
    if (!url) return idist__fail(IDIST_ERR_ARG, "store_open: url is NULL");
    if (strlen(url) >= sizeof where)
        return idist__fail(IDIST_ERR_ARG, "store_open: the url is too long");
    if (strcmp(url, "mem://") == 0) idist__copy_text(where, sizeof where, "mem:");
    else if (strncmp(url, "file://", 7) == 0 && url[7] == '/')
        snprintf(where, sizeof where, "file:%s", url + 7);
    else if (strncmp(url, "tcp://", 6) == 0) snprintf(where, sizeof where, "tcp:%s", url + 6);
    else if (strncmp(url, "unix://", 7) == 0) snprintf(where, sizeof where, "unix:%s", url + 7);
    else
        return idist__fail(
            IDIST_ERR_ARG,
            "store_open: \"%s\" is none of tcp://host:port, unix://name, file:///path, mem://",
            url);

    return idist__store_open(where, &d, -1, store);
}

idist_status idist_store_prefix(idist_store *parent, const char *prefix, idist_store **store) {
    idist__prefix_store *p;

    if (!store) return idist__fail(IDIST_ERR_ARG, "store_prefix: store is NULL");
    *store = NULL;
    if (!parent || !prefix || strlen(prefix) >= IDIST__KEY_MAX)
        return idist__fail(IDIST_ERR_ARG,
                           "store_prefix: needs a parent and a prefix of less than %u bytes",
                           IDIST__KEY_MAX);
    *store = idist__store_new(&parent->mem, parent->timeout_ms);
    if (!*store) return IDIST_ERR_NO_MEMORY;
    p = (idist__prefix_store *)idist__mem_alloc(&parent->mem, sizeof *p);
    if (!p) {
        idist_store_close(store);
        return IDIST_ERR_NO_MEMORY;
    }

    p->parent = parent;
    idist__copy_text(p->prefix, sizeof p->prefix, prefix);
    (*store)->impl = p;
    (*store)->run = idist__prefix_run;
    (*store)->close = idist__prefix_close;
    (*store)->port = parent->port;

    return IDIST_OK;
}

int idist_store_port(const idist_store *store) { return store ? store->port : 0; }

// Fills what all requests have, and looks at the keys.
static idist_status idist__store_begin(idist_store *store, idist__req *r, int op, const char *key,
                                       int timeout_ms) {
    memset(r, 0, sizeof *r);
    if (!store) return idist__fail(IDIST_ERR_ARG, "store: the store is NULL");
    r->op = op;
    r->deadline_ns = idist__os_deadline(timeout_ms ? timeout_ms : store->timeout_ms);
    if (op == IDIST__REQ_NUM_KEYS || op == IDIST__REQ_CHECK || op == IDIST__REQ_WAIT)
        return IDIST_OK;
    if (!key || !key[0] || strlen(key) > IDIST__KEY_MAX)
        return idist__fail(IDIST_ERR_ARG, "store: a key has 1 to %u bytes", IDIST__KEY_MAX);
    r->key.data = key;
    r->key.nbytes = strlen(key);

    return IDIST_OK;
}

static idist_status idist__store_value(idist__blob *blob, const void *value, size_t nbytes,
                                       size_t max) {
    if ((nbytes && !value) || nbytes > max)
        return idist__fail(IDIST_ERR_ARG, "store: a value is NULL or longer than %zu bytes", max);
    blob->data = (const char *)value;
    blob->nbytes = nbytes;
    return IDIST_OK;
}

idist_status idist_store_set(idist_store *store, const char *key, const void *value,
                             size_t nbytes) {
    idist__req r;
    idist_status s = idist__store_begin(store, &r, IDIST__REQ_SET, key, 0);
    if (s == IDIST_OK) s = idist__store_value(&r.a, value, nbytes, IDIST__VALUE_MAX);
    return s == IDIST_OK ? store->run(store, &r) : s;
}

// Runs a request that brings a value.
static idist_status idist__store_fetch(const char *name, idist_store *store, idist__req *r,
                                       void *value, size_t capacity, size_t *nbytes) {
    idist_status s;

    if (capacity && !value) return idist__fail(IDIST_ERR_ARG, "%s: value is NULL", name);
    r->value = value;
    r->capacity = capacity;
    s = store->run(store, r);
    if (nbytes && (s == IDIST_OK || s == IDIST_ERR_TRUNCATED)) *nbytes = r->nbytes;
    return s;
}

idist_status idist_store_get(idist_store *store, const char *key, void *value, size_t capacity,
                             size_t *nbytes, int timeout_ms) {
    idist__req r;
    idist_status s = idist__store_begin(store, &r, IDIST__REQ_GET, key, timeout_ms);
    return s == IDIST_OK ? idist__store_fetch("store_get", store, &r, value, capacity, nbytes) : s;
}

idist_status idist_store_add(idist_store *store, const char *key, int64_t delta, int64_t *result) {
    idist__req r;
    idist_status s = idist__store_begin(store, &r, IDIST__REQ_ADD, key, 0);

    if (s != IDIST_OK) return s;
    r.number = delta;
    s = store->run(store, &r);
    if (s == IDIST_OK && result) *result = r.number;
    return s;
}

idist_status idist_store_compare_set(idist_store *store, const char *key, const void *expected,
                                     size_t nexpected, const void *desired, size_t ndesired,
                                     void *value, size_t capacity, size_t *nbytes) {
    idist__req r;
    idist_status s = idist__store_begin(store, &r, IDIST__REQ_COMPARE_SET, key, 0);

    if (s == IDIST_OK) s = idist__store_value(&r.a, expected, nexpected, IDIST__VALUE_MAX / 2);
    if (s == IDIST_OK) s = idist__store_value(&r.b, desired, ndesired, IDIST__VALUE_MAX / 2);
    return s == IDIST_OK
               ? idist__store_fetch("store_compare_set", store, &r, value, capacity, nbytes)
               : s;
}

static idist_status idist__store_keys(idist_store *store, int op, const char *const *keys, size_t n,
                                      int timeout_ms, bool *flag) {
    idist__req r;
    idist_status s = idist__store_begin(store, &r, op, NULL, timeout_ms);
    idist__blob *blobs;
    size_t i, total = 0;

    if (s != IDIST_OK) return s;
    if ((n && !keys) || n > IDIST__KEYS_MAX)
        return idist__fail(IDIST_ERR_ARG, "store: keys is NULL or more than %u", IDIST__KEYS_MAX);

    for (i = 0; i < n; i++) {
        if (!keys[i] || !keys[i][0] || strlen(keys[i]) > IDIST__KEY_MAX)
            return idist__fail(IDIST_ERR_ARG, "store: a key has 1 to %u bytes", IDIST__KEY_MAX);
        if ((total += strlen(keys[i]) + 9) > IDIST__VALUE_MAX)
            return idist__fail(IDIST_ERR_ARG, "store: the keys of one call have more than %u bytes",
                               IDIST__VALUE_MAX);
    }

    if (flag) *flag = true;
    if (!n) return IDIST_OK;
    blobs = (idist__blob *)idist__mem_alloc(&store->mem, n * sizeof *blobs);
    if (!blobs) return IDIST_ERR_NO_MEMORY;

    for (i = 0; i < n; i++) {
        blobs[i].data = keys[i];
        blobs[i].nbytes = strlen(keys[i]);
    }

    r.keys = blobs;
    r.nkeys = n;
    s = store->run(store, &r);
    if (flag) *flag = r.flag;
    idist__mem_free(&store->mem, blobs);

    return s;
}

idist_status idist_store_wait(idist_store *store, const char *const *keys, size_t n,
                              int timeout_ms) {
    return idist__store_keys(store, IDIST__REQ_WAIT, keys, n, timeout_ms, NULL);
}

idist_status idist_store_check(idist_store *store, const char *const *keys, size_t n, bool *ready) {
    if (!ready) return idist__fail(IDIST_ERR_ARG, "store_check: ready is NULL");
    return idist__store_keys(store, IDIST__REQ_CHECK, keys, n, 0, ready);
}

idist_status idist_store_delete(idist_store *store, const char *key, bool *deleted) {
    idist__req r;
    idist_status s = idist__store_begin(store, &r, IDIST__REQ_DELETE, key, 0);
    if (s == IDIST_OK) s = store->run(store, &r);
    if (s == IDIST_OK && deleted) *deleted = r.flag;
    return s;
}

idist_status idist_store_num_keys(idist_store *store, size_t *n) {
    idist__req r;
    idist_status s = idist__store_begin(store, &r, IDIST__REQ_NUM_KEYS, NULL, 0);

    if (s != IDIST_OK) return s;
    if (!n) return idist__fail(IDIST_ERR_ARG, "store_num_keys: n is NULL");
    s = store->run(store, &r);
    *n = s == IDIST_OK ? (size_t)r.number : 0;
    return s;
}

#endif // IDIST_STORE_H
