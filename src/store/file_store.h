// store/file_store.h: a store in a file that all ranks open
//
// The file is a log of changes. Every process replays the log into its own table:
//
//     offset  bytes
//     0       8      "IDSTORE1"
//     8       8      u64: bytes of committed records
//     16             records: u32 key_nbytes, u32 value_nbytes (0xffffffff: deleted), key, value
//
// To carry out a request, a process locks the records and replays those of other processes. The
// process then changes its own table, appends the change, and releases the lock. A process that
// dies while it writes leaves bytes after the committed records. The next writer overwrites these
// bytes.
//
// Locks on single bytes show which processes are active:
//   - The server (rank 0) keeps byte 0 locked as long as it lives. A file without this lock is left
//     over from a dead job. The next server removes the file and creates a new one. A process of
//     the dead job that still has the old file open then finds no server there.
//   - A process locks byte 1 to read or append records.
//   - A process that finds byte 1 locked holds byte 2 until it gets byte 1. A client in a busy loop
//     checks byte 2 every few milliseconds and lets the waiting process go first.
//
// The record of a will (see idist__store_request) has a key of 9 bytes: a zero byte and a u64. The
// u64 is the offset of a byte that the owner of the will keeps locked. The value contains the key
// and the value to set: u32 key_nbytes, key, value. When the lock on that byte is released, the
// next process that makes or repeats a request executes the will. All records of one request are
// committed together.
#pragma once

#include "os/clock.h"
#include "os/thread.h"
#include "os/file.h"
#include "base/fail.h"
#include "base/mem.h"
#include "store/table.h"

enum {
    IDIST__FILE_SERVER_BYTE = 0,  // locked by the server
    IDIST__FILE_RECORDS_BYTE = 1, // locked during a request
    IDIST__FILE_QUEUE_BYTE = 2,   // locked by a process that waits for the records
    IDIST__FILE_COMMITTED_AT = 8, // offset of the number of committed bytes
    IDIST__FILE_RECORDS_AT = 16,  // offset of the first record
    IDIST__FILE_WILL_KEY_NBYTES = 9
};
// Role of a process that opens the file.
typedef enum idist__file_role {
    IDIST__FILE_CLIENT, // waits for a server
    IDIST__FILE_SERVER, // fails if there is a server
    IDIST__FILE_EITHER  // becomes the server unless there is one
} idist__file_role;

enum {
    IDIST__FILE_WILLS_MS = 50,  // between two checks of the wills' locks
    IDIST__FILE_OPEN_MS = 5,    // between two attempts to find the file of a live server
    IDIST__FILE_WAIT_MS = 16,   // longest pause between two attempts of a waiting request
    IDIST__FILE_TURN_MS = 2,    // between two checks for a waiting process
    IDIST__FILE_YIELD_MS = 100, // longest pause for a waiting process, which may be stopped
    IDIST__FILE_PASS_MS = 1000  // time without such checks after the longest pause
};
static const uint32_t IDIST__FILE_DELETED = 0xffffffffu;
static const char idist__file_magic[9] = "IDSTORE1";

typedef struct idist__file_store {
    idist__os_mutex lock;
    idist__os_file file;
    bool server;
    char *path;
    idist__table table;    // keys and values, from the records replayed so far
    idist__table wills;    // wills, from the records replayed so far
    uint64_t replayed;     // bytes of records in both tables
    uint64_t own_will;     // offset of the byte that we lock for our own will, 0 if none
    int64_t wills_seen_ns; // when the locks of wills were last checked
    int64_t turn_ends_ns;  // when to check again for a waiting process
} idist__file_store;

// Lets a waiting process go first. Without this pause, a process that makes requests in a loop
// would almost always hold the lock when another process tries to get it.
static void idist__file_store_give_way(idist__file_store *file, int64_t deadline_ns) {
    int64_t now = idist__os_clock_now_ns(), until_ns = now + IDIST__FILE_YIELD_MS * IDIST__MS;
    bool waits;

    if (now < file->turn_ends_ns) return;
    if (deadline_ns < until_ns) until_ns = deadline_ns;

    for (;;) {
        waits = idist__os_file_locked(file->file, IDIST__FILE_QUEUE_BYTE) == IDIST__OS_FILE_LOCKED;
        if (!waits || idist__os_clock_ms_until(until_ns) == 0) break;
        idist__os_clock_pause_ms(1);
    }

    file->turn_ends_ns =
        idist__os_clock_now_ns() + (waits ? IDIST__FILE_PASS_MS : IDIST__FILE_TURN_MS) * IDIST__MS;
}

// Locks the records. Processes hold this lock for microseconds, unless they are stopped.
static idist_status idist__file_store_lock_records(idist__file_store *file, int64_t deadline_ns) {
    bool queued = false, locked, over = false;

    idist__file_store_give_way(file, deadline_ns);

    for (;;) {
        locked = idist__os_file_try_lock(file->file, IDIST__FILE_RECORDS_BYTE);
        if (!locked) over = errno != EAGAIN || idist__os_clock_ms_until(deadline_ns) == 0;
        if (locked || over) break;
        if (!queued) queued = idist__os_file_try_lock(file->file, IDIST__FILE_QUEUE_BYTE);
        idist__os_clock_pause_ms(1);
    }

    if (queued) idist__os_file_unlock(file->file, IDIST__FILE_QUEUE_BYTE);
    if (locked) return IDIST_OK;

    return idist__fail(IDIST_ERR_TIMEOUT,
                       "store: %s stays locked: a process that uses it is stopped, or the file "
                       "system does not support locks",
                       file->path);
}

static void idist__file_store_unlock_records(const idist__file_store *file) {
    idist__os_file_unlock(file->file, IDIST__FILE_RECORDS_BYTE);
}

// Reports that the system does not allow an operation on the file. `verb` names the operation.
static idist_status idist__file_store_fail_access(const idist__file_store *file, const char *verb,
                                                  int err) {
    char what[sizeof idist__me.text];

    snprintf(what, sizeof what, "store: %s cannot be %s", file->path, verb);
    return idist__fail_errno(what, err);
}

static bool idist__file_store_has_server(const idist__file_store *file) {
    return idist__os_file_locked(file->file, IDIST__FILE_SERVER_BYTE) == IDIST__OS_FILE_LOCKED;
}

static bool idist__file_store_has_magic(const idist__file_store *file) {
    char magic[8];
    return idist__os_file_read_at(file->file, magic, sizeof magic, 0) &&
           memcmp(magic, idist__file_magic, sizeof magic) == 0;
}

// Returns the table to which a record belongs.
static idist__table *idist__file_store_table_of(idist__file_store *file, idist__blob key) {
    bool is_will = key.nbytes == IDIST__FILE_WILL_KEY_NBYTES && !key.data[0];
    return is_will ? &file->wills : &file->table;
}

static void idist__file_store_forget(idist__file_store *file) {
    idist__table_clear(&file->table);
    idist__table_clear(&file->wills);
    file->replayed = 0;
}

static idist_status idist__file_store_replay_record(idist__file_store *file) {
    uint64_t at = IDIST__FILE_RECORDS_AT + file->replayed;
    idist_status status = IDIST_OK;
    uint32_t size[2]; // of key and value
    size_t value_nbytes;
    idist__blob key;
    char *record;

    if (!idist__os_file_read_at(file->file, size, sizeof size, at))
        return idist__file_store_fail_access(file, "read", errno);
    value_nbytes = size[1] == IDIST__FILE_DELETED ? 0 : size[1];
    if (size[0] > IDIST__KEY_MAX + 1 || value_nbytes > IDIST__VALUE_MAX)
        return idist__fail(IDIST_ERR_ARG, "store: %s is damaged", file->path);
    record = (char *)idist__mem_alloc(&file->table.mem, size[0] + value_nbytes);
    if (!record) return IDIST_ERR_NO_MEMORY;

    key.data = record;
    key.nbytes = size[0];
    if (!idist__os_file_read_at(file->file, record, size[0] + value_nbytes, at + sizeof size))
        status = idist__file_store_fail_access(file, "read", errno);
    else if (size[1] == IDIST__FILE_DELETED)
        idist__table_remove(idist__file_store_table_of(file, key), key);
    else
        status = idist__table_put(idist__file_store_table_of(file, key), key, record + size[0],
                                  value_nbytes);
    idist__mem_free(&file->table.mem, record);
    if (status == IDIST_OK) file->replayed += sizeof size + size[0] + value_nbytes;

    return status;
}

// Brings the tables up to date. Called with the records locked.
static idist_status idist__file_store_replay(idist__file_store *file) {
    uint64_t committed;
    idist_status status = IDIST_OK;

    if (!idist__file_store_has_magic(file) ||
        !idist__os_file_read_at(file->file, &committed, sizeof committed, IDIST__FILE_COMMITTED_AT))
        return idist__fail(IDIST_ERR_ARG, "store: %s is not a store file", file->path);

    while (file->replayed < committed && status == IDIST_OK)
        status = idist__file_store_replay_record(file);

    return status;
}

// Appends the current entry of a key in our table, or a deletion if the key has none. Called with
// the records locked. Other processes do not see the new record until idist__file_store_commit has
// been called.
static idist_status idist__file_store_append(idist__file_store *file, idist__blob key) {
    idist__entry *entry = *idist__table_find(idist__file_store_table_of(file, key), key);
    uint64_t at = IDIST__FILE_RECORDS_AT + file->replayed;
    uint32_t size[2];

    size[0] = (uint32_t)key.nbytes;
    size[1] = entry ? (uint32_t)entry->value_nbytes : IDIST__FILE_DELETED;
    if (!idist__os_file_write_at(file->file, size, sizeof size, at) ||
        !idist__os_file_write_at(file->file, key.data, key.nbytes, at + sizeof size) ||
        (entry && !idist__os_file_write_at(file->file, entry->value, entry->value_nbytes,
                                           at + sizeof size + key.nbytes)))
        return idist__file_store_fail_access(file, "written", errno);
    file->replayed += sizeof size + key.nbytes + (entry ? entry->value_nbytes : 0);

    return IDIST_OK;
}

// Commits the records that were appended after the first `committed` bytes.
static idist_status idist__file_store_commit(const idist__file_store *file, uint64_t committed) {
    if (file->replayed == committed ||
        idist__os_file_write_at(file->file, &file->replayed, sizeof file->replayed,
                                IDIST__FILE_COMMITTED_AT))
        return IDIST_OK;
    return idist__file_store_fail_access(file, "written", errno);
}

// Returns the key of the will whose owner has locked the byte `at`. The key is stored in `buf`.
static idist__blob idist__file_store_will_key(uint64_t at, char *buf) {
    idist__blob key;

    buf[0] = 0;
    memcpy(buf + 1, &at, sizeof at);
    key.data = buf;
    key.nbytes = IDIST__FILE_WILL_KEY_NBYTES;
    return key;
}

// Withdraws our own will, if there is one.
static idist_status idist__file_store_drop_will(idist__file_store *file) {
    char buf[IDIST__FILE_WILL_KEY_NBYTES];
    idist__blob key = idist__file_store_will_key(file->own_will, buf);
    idist_status status = IDIST_OK;

    if (!file->own_will) return IDIST_OK;
    if (idist__table_remove(&file->wills, key)) status = idist__file_store_append(file, key);
    idist__os_file_unlock(file->file, file->own_will);
    file->own_will = 0;

    return status;
}

// Replaces our will with the will of a CLAIM. The offset of the will's record is unique, so it is
// also the offset of the byte to lock.
static idist_status idist__file_store_set_will(idist__file_store *file,
                                               const idist__store_request *claim) {
    char buf[IDIST__FILE_WILL_KEY_NBYTES], name[IDIST__WILL_KEY_MAX];
    idist__blob key = idist__table_will_key(claim, name);
    uint32_t key_nbytes = (uint32_t)key.nbytes;
    size_t nbytes = sizeof key_nbytes + key.nbytes + claim->b.nbytes;
    idist_status status = idist__file_store_drop_will(file);
    char *value;

    if (status != IDIST_OK) return status;
    value = (char *)idist__mem_alloc(&file->table.mem, nbytes);
    if (!value) return IDIST_ERR_NO_MEMORY;
    memcpy(value, &key_nbytes, sizeof key_nbytes);
    memcpy(value + sizeof key_nbytes, key.data, key_nbytes);
    memcpy(value + sizeof key_nbytes + key_nbytes, claim->b.data, claim->b.nbytes);

    file->own_will = IDIST__FILE_RECORDS_AT + file->replayed;
    key = idist__file_store_will_key(file->own_will, buf);
    if (idist__os_file_try_lock(file->file, file->own_will))
        status = idist__table_put(&file->wills, key, value, nbytes);
    else status = idist__file_store_fail_access(file, "locked", errno);
    if (status == IDIST_OK) status = idist__file_store_append(file, key);
    idist__mem_free(&file->table.mem, value);

    return status;
}

// Executes a will and deletes it. Does not change a key that already has a value.
static idist_status idist__file_store_execute_will(idist__file_store *file,
                                                   const idist__entry *will) {
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

    if (!*idist__table_find(&file->table, key)) {
        status = idist__table_put(&file->table, key, key.data + key_nbytes,
                                  will->value_nbytes - sizeof key_nbytes - key_nbytes);
        if (status == IDIST_OK) status = idist__file_store_append(file, key);
    }

    idist__table_remove(&file->wills, will_key);
    if (status == IDIST_OK) status = idist__file_store_append(file, will_key);

    return status;
}

// Returns true if the owner of a will has ended without withdrawing it.
static bool idist__file_store_will_is_due(const idist__file_store *file, const idist__entry *will) {
    uint32_t key_nbytes = 0;
    uint64_t at;

    memcpy(&at, will->key + 1, sizeof at);
    if (will->value_nbytes >= sizeof key_nbytes)
        memcpy(&key_nbytes, will->value, sizeof key_nbytes);
    if (!key_nbytes || key_nbytes > will->value_nbytes - sizeof key_nbytes) return false; // damaged
    return at != file->own_will && idist__os_file_locked(file->file, at) == IDIST__OS_FILE_FREE;
}

// Executes the wills of processes that have ended, at most every IDIST__FILE_WILLS_MS. Called with
// the records locked.
static idist_status idist__file_store_execute_wills(idist__file_store *file) {
    int64_t now = idist__os_clock_now_ns();
    idist_status status = IDIST_OK;
    size_t i;

    if (!file->wills.key_count || now - file->wills_seen_ns < IDIST__FILE_WILLS_MS * IDIST__MS)
        return IDIST_OK;
    file->wills_seen_ns = now;

    for (i = 0; i < IDIST__COUNT_OF(file->wills.chains); i++) {
        idist__entry *will, *next;

        for (will = file->wills.chains[i]; will && status == IDIST_OK; will = next) {
            next = will->next;
            if (idist__file_store_will_is_due(file, will))
                status = idist__file_store_execute_will(file, will);
        }
    }

    return status;
}

// Carries out a request. Called with the records locked.
static idist_status idist__file_store_apply(idist__file_store *file, idist__store_request *request,
                                            bool *wait, bool *changed) {
    idist_status status = idist__file_store_replay(file), appended;
    uint64_t committed = file->replayed;

    if (status == IDIST_OK) status = idist__file_store_execute_wills(file);
    if (status != IDIST_OK) return status;
    status = idist__table_apply(&file->table, request, wait, changed);

    appended = *changed ? idist__file_store_append(file, request->key) : IDIST_OK;
    if (request->op == IDIST__STORE_DROP_WILL) appended = idist__file_store_drop_will(file);
    if (request->op == IDIST__STORE_CLAIM && *changed && appended == IDIST_OK)
        appended = idist__file_store_set_will(file, request);
    if (appended == IDIST_OK) appended = idist__file_store_commit(file, committed);

    // The change may have succeeded even if the new value does not fit into the caller's buffer.
    return appended == IDIST_OK ? status : appended;
}

// Tries a request once. Sets *wait if the caller must try again later.
static idist_status idist__file_store_try(idist__file_store *file, idist__store_request *request,
                                          bool *wait) {
    bool changed = false, needs_server;
    idist_status status = idist__file_store_lock_records(file, request->deadline_ns);

    if (status != IDIST_OK) return status;
    status = idist__file_store_apply(file, request, wait, &changed);
    if (status != IDIST_OK)
        idist__file_store_forget(
            // The tables may be ahead of the file, so replay the whole file next time.
            file);
    idist__file_store_unlock_records(file);
    if (status != IDIST_OK) return status;

    // Do not check for the server after a posted change: the change itself may have allowed the
    // server to end.
    needs_server = *wait || (changed && !request->posted) || request->op == IDIST__STORE_CHECK;
    if (needs_server && !file->server && !idist__file_store_has_server(file))
        return idist__fail(IDIST_ERR_PEER_LOST, "store: the process that owns %s has ended",
                           file->path);
    if (*wait && idist__os_clock_ms_until(request->deadline_ns) == 0)
        return idist__table_timed_out(request, &file->table);

    return IDIST_OK;
}

static idist_status idist__file_store_run(idist_store *store, idist__store_request *request) {
    idist__file_store *file = (idist__file_store *)store->impl;
    int pause_ms = 1;

    for (;;) {
        bool wait = false;
        idist_status status;

        idist__os_mutex_lock(&file->lock);
        status = idist__file_store_try(file, request, &wait);
        idist__os_mutex_unlock(&file->lock);
        if (status != IDIST_OK || !wait) return status;

        idist__os_clock_pause_ms(pause_ms);
        if (pause_ms < IDIST__FILE_WAIT_MS) pause_ms *= 2;
    }
}

// Closes the store. The server also removes the file. Closing the file releases all our locks.
static void idist__file_store_close(idist_store *store) {
    idist__file_store *file = (idist__file_store *)store->impl;

    if (file->server && file->file >= 0 && idist__os_file_is_at(file->file, file->path))
        idist__os_file_remove(file->path);
    idist__os_file_close(&file->file);
    idist__file_store_forget(file);
    idist__os_mutex_destroy(&file->lock);
    idist__mem_free(&store->mem, file->path);
    idist__mem_free(&store->mem, file);
}

// Fails if the file is neither empty nor a store file, because then it belongs to somebody else.
static idist_status idist__file_store_check_ours(const idist__file_store *file) {
    int64_t nbytes = idist__os_file_size(file->file);

    if (nbytes == 0 || (nbytes > 0 && idist__file_store_has_magic(file))) return IDIST_OK;
    return idist__fail(IDIST_ERR_ARG,
                       "store: %s exists and is not a store file; it was left unchanged",
                       file->path);
}

static idist_status idist__file_store_fail_open(const idist__file_store *file) {
    return idist__file_store_fail_access(file, "opened", errno);
}

// Opens the file and locks its records. A server that ends removes its file, perhaps between our
// open and our lock. So this function tries again until the path leads to the file that we have
// locked.
static idist_status idist__file_store_create(idist__file_store *file, int64_t deadline_ns) {
    for (;;) {
        idist_status status;

        file->file = idist__os_file_open(file->path, IDIST__OS_FILE_CREATE);
        if (file->file < 0) return idist__file_store_fail_open(file);
        status = idist__file_store_lock_records(file, deadline_ns);
        if (status == IDIST_OK && idist__os_file_is_at(file->file, file->path)) return IDIST_OK;
        // Close the file on failure, too, so that closing the store does not remove it.
        idist__os_file_close(&file->file);
        if (status != IDIST_OK) return status;
    }
}

// Tries to become the server of the file. Called with the records locked. Sets *taken if another
// process is the server. Sets *again if the file was left over from a dead server and has been
// removed; then the caller opens the path again. If the folder's permissions do not allow removing
// the file, empties it instead.
static idist_status idist__file_store_claim(idist__file_store *file, bool *taken, bool *again) {
    uint64_t committed = 0;
    idist_status status;

    *again = false;
    *taken = !idist__os_file_try_lock(file->file, IDIST__FILE_SERVER_BYTE);
    if (*taken) return IDIST_OK;
    status = idist__file_store_check_ours(file);
    if (status != IDIST_OK) return status;

    if (idist__os_file_size(file->file) > 0) {
        idist__os_file_remove(file->path);
        *again = !idist__os_file_is_at(file->file, file->path);
        if (*again) return IDIST_OK;
    }

    if (!idist__os_file_resize(file->file, 0) ||
        !idist__os_file_write_at(file->file, idist__file_magic, 8, 0) ||
        !idist__os_file_write_at(file->file, &committed, sizeof committed,
                                 IDIST__FILE_COMMITTED_AT)) {
        status = idist__file_store_fail_access(file, "written", errno);
        idist__os_file_remove(file->path); // nobody could use the file
    }

    return status;
}

// Makes this process the server of the file: keeps byte 0 locked and starts with an empty table. If
// the file already has a server, makes this process a client if `either` is true and fails
// otherwise.
static idist_status idist__file_store_serve(idist__file_store *file, bool either,
                                            int64_t deadline_ns) {
    bool taken = false, again = true;
    idist_status status = IDIST_OK;

    while (again && status == IDIST_OK) {
        status = idist__file_store_create(file, deadline_ns);
        if (status != IDIST_OK) return status;
        status = idist__file_store_claim(file, &taken, &again);
        file->server = !taken;
        if (taken && !either)
            status = idist__fail(IDIST_ERR_ADDR_IN_USE, "store: %s belongs to a running job",
                                 file->path);
        idist__file_store_unlock_records(file);
        if (again || status != IDIST_OK)
            idist__os_file_close(&file->file); // otherwise this process would look like the server
    }

    return status;
}

// Reports that no server has appeared. If the folder is missing here, this host may not have
// mounted it.
static idist_status idist__file_store_fail_unserved(const idist__file_store *file) {
    bool has_folder = idist__os_file_has_folder(file->path);

    return idist__fail(IDIST_ERR_TIMEOUT, "store: no running process owns %s: %s", file->path,
                       has_folder ? "rank 0 has not started"
                                  : "its folder does not exist here: is it mounted on this host?");
}

// Sets *is_served if the open file is a store whose server is running.
static idist_status idist__file_store_find_server(idist__file_store *file, int64_t deadline_ns,
                                                  bool *is_served) {
    idist_status status;

    *is_served = false;
    if (idist__file_store_lock_records(file, deadline_ns) != IDIST_OK) return IDIST_OK;
    status = idist__file_store_check_ours(file);
    if (status == IDIST_OK)
        *is_served = idist__file_store_has_server(file) && idist__file_store_has_magic(file);
    idist__file_store_unlock_records(file);

    return status;
}

// Waits until the server has ended, but not past the deadline.
static void idist__file_store_await_end(idist_store *store, int64_t deadline_ns) {
    const idist__file_store *file = (const idist__file_store *)store->impl;

    while (idist__file_store_has_server(file) && idist__os_clock_ms_until(deadline_ns) != 0)
        idist__os_clock_pause_ms(IDIST__FILE_OPEN_MS);
}

// Waits, as a client, for a file whose server is running. Opens the path again each time, because
// the file may have been replaced.
static idist_status idist__file_store_join(idist__file_store *file, int64_t deadline_ns) {
    for (;;) {
        idist_status status = IDIST_OK;
        bool is_served = false;

        file->file = idist__os_file_open(file->path, IDIST__OS_FILE_UPDATE);
        if (file->file < 0 && errno != ENOENT) return idist__file_store_fail_open(file);
        if (file->file >= 0) status = idist__file_store_find_server(file, deadline_ns, &is_served);
        if (is_served || status != IDIST_OK) return status;

        idist__os_file_close(&file->file);
        if (idist__os_clock_ms_until(deadline_ns) == 0)
            return idist__file_store_fail_unserved(file);
        idist__os_clock_pause_ms(IDIST__FILE_OPEN_MS);
    }
}

// Opens a store in a file. When this function fails, the caller closes the store.
static idist_status idist__file_store_open(idist_store *store, const char *path,
                                           idist__file_role role, int64_t deadline_ns) {
    idist__file_store *file = (idist__file_store *)idist__mem_alloc(&store->mem, sizeof *file);

    if (!file) return IDIST_ERR_NO_MEMORY;
    file->file = -1;
    file->table.mem = file->wills.mem = store->mem;
    idist__os_mutex_init(&file->lock);
    store->impl = file;
    store->run = idist__file_store_run;
    store->close = idist__file_store_close;

    file->path = (char *)idist__mem_alloc(&store->mem, strlen(path) + 1);
    if (!file->path) return IDIST_ERR_NO_MEMORY;
    memcpy(file->path, path, strlen(path) + 1);

    if (role == IDIST__FILE_CLIENT) return idist__file_store_join(file, deadline_ns);
    return idist__file_store_serve(file, role == IDIST__FILE_EITHER, deadline_ns);
}
