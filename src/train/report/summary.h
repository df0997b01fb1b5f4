// train/report/summary.h: scalars in CSV and TensorBoard files
//
// Functions: idist__summary_*, idist__csv_*.
#pragma once

#include "os/clock.h"
#include "os/process.h"
#include "os/thread.h"
#include "os/file.h"
#include "os/socket.h"
#include "base/fail.h"
#include "base/text.h"
#include "base/log.h"
#include "core/model.h"
#include "core/world.h"
#include "train/auto.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/flaw.h"
#include "train/report/event.h"

//------------------------------------------------------------------------------
// a scalar as a line of scalars.csv
//------------------------------------------------------------------------------

#define IDIST__CSV_HEADER "wall_time,step,tag,value\n"
#define IDIST__CSV_NBYTES (2 * IDIST__TAG_NBYTES + 100) // longest line; a quote counts twice

// Writes a tag, in quotes if it needs them. Returns the end of the written text.
static char *idist__csv_tag(char *to, const char *tag) {
    bool quoted = tag[strcspn(tag, ",\"\r\n")] != 0;

    if (quoted) *to++ = '"';
    for (; *tag; tag++) {
        if (*tag == '"') *to++ = '"';
        *to++ = *tag;
    }

    if (quoted) *to++ = '"';

    return to;
}

// Writes a line and returns its number of bytes. wall_us is in microseconds since 1970.
static size_t idist__csv_line(char line[IDIST__CSV_NBYTES], int64_t wall_us, uint64_t step,
                              const char *tag, double value) {
    char *at = line, number[IDIST__NUMBER_NBYTES];

    at += snprintf(at, 64, "%lld.%06d,%llu,", (long long)(wall_us / 1000000),
                   (int)(wall_us % 1000000), (unsigned long long)step);
    at = idist__csv_tag(at, tag);
    *at++ = ',';
    at += snprintf(at, sizeof number, "%s\n", idist__number_print_exact(number, value));

    return (size_t)(at - line);
}

// Reads a file of nbytes bytes through a buffer, and sets *end to the end of its last complete
// line. A line feed within quotes does not end a line. Returns 0, an errno, or
// IDIST__CHECKPOINT_ENDS.
static int idist__csv_find_end(idist__os_file file, uint64_t nbytes, char *buffer, size_t capacity,
                               uint64_t *end) {
    uint64_t at, i;
    bool in_quotes = false;

    *end = 0;

    for (at = 0; at < nbytes; at += capacity) {
        uint64_t n = nbytes - at < capacity ? nbytes - at : capacity;
        int error = idist__checkpoint_read(file, at, buffer, (size_t)n);

        if (error) return error;

        for (i = 0; i < n; i++) {
            if (buffer[i] == '"') in_quotes = !in_quotes;
            if (buffer[i] == '\n' && !in_quotes) *end = at + i + 1;
        }
    }

    return 0;
}

//------------------------------------------------------------------------------
// scalars over the steps of a training run, for TensorBoard and as CSV
//
// A value is written immediately, with one pwrite per file. If the write fails, the value stays in
// `pending`, ahead of later values. The file is then cut back to its last whole line or record. The
// summary itself keeps the position in the file, because another attempt must begin at the same
// position.
//------------------------------------------------------------------------------

#define IDIST__SUMMARY_PENDING_NBYTES ((size_t)1 << 16)

static const char idist__summary_csv_name[] = "scalars.csv";

typedef struct idist__summary_file {
    idist__os_file file; // IDIST__OS_NO_FILE if not wanted
    char name[364];
    uint64_t nbytes;      // size of the file, where `pending` will be written
    size_t pending_count; // bytes in `pending`
    char pending[IDIST__SUMMARY_PENDING_NBYTES];
} idist__summary_file;

struct idist_summary {
    idist__os_mutex lock; // protects the fields below
    bool writes;          // this is rank 0
    idist__os_process process;
    uint64_t refused; // values missing from at least one file
    char *folder;
    idist__summary_file csv, events;
    idist__os_mutex track_lock; // held while `track` runs
    int (*track)(const idist_scalar *scalar, void *arg);
    void *arg;
};

// Writes the pending bytes of a file.
static idist_status idist__summary_write(idist_summary *summary, idist__summary_file *file,
                                         const char *name) {
    int error;

    if (!file->pending_count) return IDIST_OK;

    if (idist__os_file_write_at(file->file, file->pending, file->pending_count, file->nbytes)) {
        file->nbytes += file->pending_count;
        file->pending_count = 0;
        return IDIST_OK;
    }

    error = errno;
    // If this fails as well, the next attempt overwrites the bytes that the failed write has left.
    idist__os_file_resize(file->file, file->nbytes);

    return idist__checkpoint_fail(name, summary->folder, file->name, error);
}

// Adds bytes to `pending`. Returns false if they do not fit.
static bool idist__summary_append(idist__summary_file *file, const void *bytes, size_t nbytes) {
    if (nbytes > IDIST__SUMMARY_PENDING_NBYTES - file->pending_count) return false;
    memcpy(file->pending + file->pending_count, bytes, nbytes);
    file->pending_count += nbytes;

    return true;
}

// Adds a line or record to a file. If `pending` is full, writes `pending` first. Sets *refused to
// true if there is still no space.
static idist_status idist__summary_put(idist_summary *summary, idist__summary_file *file,
                                       const void *bytes, size_t nbytes, bool *refused) {
    idist_status status;

    if (file->file == IDIST__OS_NO_FILE) return IDIST_OK;
    if (idist__summary_append(file, bytes, nbytes))
        return idist__summary_write(summary, file, "summary_add");

    status = idist__summary_write(summary, file, "summary_add");
    if (status == IDIST_OK && idist__summary_append(file, bytes, nbytes))
        return idist__summary_write(summary, file, "summary_add");
    *refused = true;

    return status;
}

// Creates a folder and its parents. Returns 0, or the errno for the folder itself.
static int idist__summary_make_folder(char *path) {
    char *at;

    for (at = path + 1; *at; at++) {
        if (*at != '/') continue;
        *at = 0;
        idist__os_folder_make(path);
        *at = '/';
    }

    return idist__os_folder_make(path);
}

// Checks the contents of scalars.csv. Sets file->nbytes to the end of the last whole line, or to 0
// if the file ends within its header.
static idist_status idist__summary_check_csv(idist_summary *summary, uint64_t nbytes) {
    static const char header[] = IDIST__CSV_HEADER;
    idist__summary_file *file = &summary->csv;
    size_t n = nbytes < sizeof header - 1 ? (size_t)nbytes : sizeof header - 1;
    int error = idist__checkpoint_read(file->file, 0, file->pending, n);

    if (!error && memcmp(file->pending, header, n) != 0)
        return idist__fail(
            IDIST_ERR_ARG,
            "summary_create: %s/%s does not begin with \"%.24s\": idist did not write this file; "
            "use another folder",
            summary->folder, file->name, header);
    if (!error)
        error = idist__csv_find_end(file->file, nbytes, file->pending, sizeof file->pending,
                                    &file->nbytes);
    if (error == IDIST__CHECKPOINT_ENDS) error = EIO; // the file was longer a moment ago
    if (error) return idist__checkpoint_fail("summary_create", summary->folder, file->name, error);

    if (nbytes - file->nbytes > IDIST__CSV_NBYTES)
        return idist__fail(
            IDIST_ERR_ARG,
            "summary_create: %s/%s is damaged: a line or quote that begins at byte %llu has no "
            "end; repair the file or use another folder",
            summary->folder, file->name, (unsigned long long)file->nbytes);

    return IDIST_OK;
}

// Removes an incomplete last line that a crash has left, and writes the header of a new file.
static idist_status idist__summary_mend_csv(idist_summary *summary, uint64_t nbytes) {
    static const char header[] = IDIST__CSV_HEADER;
    idist__summary_file *file = &summary->csv;
    const idist__world *world = idist__world_default();

    if (nbytes > file->nbytes && !idist__os_file_resize(file->file, file->nbytes))
        return idist__checkpoint_fail("summary_create", summary->folder, file->name, errno);
    if (nbytes > file->nbytes && world)
        idist__log_print(
            &world->log, IDIST_LOG_WARN,
            "summary_create: %s/%s: removed an incomplete last line that a crash had left",
            summary->folder, file->name);
    if (file->nbytes) return IDIST_OK;
    idist__summary_append(file, header, sizeof header - 1);

    return idist__summary_write(summary, file, "summary_create");
}

static idist_status idist__summary_open_csv(idist_summary *summary) {
    idist__summary_file *file = &summary->csv;
    char path[4096];
    int64_t nbytes;
    idist_status status;

    idist__text_copy(file->name, sizeof file->name, idist__summary_csv_name);
    if ((size_t)snprintf(path, sizeof path, "%s/%s", summary->folder, file->name) >= sizeof path)
        return idist__fail(IDIST_ERR_ARG, "summary_create: the path of the folder is too long");
    file->file = idist__os_file_open(path, IDIST__OS_FILE_OUTPUT);
    if (file->file == IDIST__OS_NO_FILE)
        return idist__checkpoint_fail("summary_create", summary->folder, file->name, errno);

    // Continue if the file system has no locks.
    if (!idist__os_file_try_lock(file->file, 0) && errno == EAGAIN)
        return idist__fail(IDIST_ERR_STATE,
                           "summary_create: another process or handle is writing %s; use a folder "
                           "per training run",
                           path);
    // Get the size only now, because the last holder of the lock may just have added to the file.
    nbytes = idist__os_file_size(file->file);
    if (nbytes < 0 && errno)
        return idist__checkpoint_fail("summary_create", summary->folder, file->name, errno);
    if (nbytes < 0)
        return idist__fail(IDIST_ERR_ARG, "summary_create: %s is not a regular file", path);

    status = idist__summary_check_csv(summary, (uint64_t)nbytes);
    if (status != IDIST_OK) return status;

    return idist__summary_mend_csv(summary, (uint64_t)nbytes);
}

// Creates an events file. The number at the end of its name distinguishes files that a process
// creates in the same second. It is found by trying names, so the folder need not be readable.
static idist_status idist__summary_open_events(idist_summary *summary) {
    idist__summary_file *file = &summary->events;
    int64_t now_us = idist__os_calendar_ns() / 1000;
    char host[256], path[4096];
    idist__event record;
    int number = 0, error;
    idist_status status;

    if (!idist__os_socket_host_name(host, sizeof host)) idist__text_copy(host, sizeof host, "host");

    do {
        snprintf(file->name, sizeof file->name, "events.out.tfevents.%lld.%s.%lld.%d",
                 (long long)(now_us / 1000000), host, (long long)summary->process, number++);
        if ((size_t)snprintf(path, sizeof path, "%s/%s", summary->folder, file->name) >=
            sizeof path)
            return idist__fail(IDIST_ERR_ARG, "summary_create: the path of the folder is too long");
        error = idist__os_folder_new_file(IDIST__OS_HERE, path, &file->file);
    } while (error == EEXIST);

    if (error) return idist__checkpoint_fail("summary_create", summary->folder, file->name, error);

    idist__event_version(&record, (double)now_us / 1e6);
    idist__summary_append(file, record.bytes, record.nbytes);
    status = idist__summary_write(summary, file, "summary_create");
    if (status != IDIST_OK) idist__os_folder_remove(IDIST__OS_HERE, path);

    return status;
}

static idist_status idist__summary_open(idist_summary *summary, const idist_summary_desc *desc) {
    idist_status status = IDIST_OK;
    size_t nbytes;
    int error;

    if (desc->no_csv && desc->no_tensorboard) return IDIST_OK;
    if (!desc->folder || !desc->folder[0])
        return idist__fail(IDIST_ERR_ARG, "summary_create: the folder is NULL or empty");
    nbytes = strlen(desc->folder) + 1;
    summary->folder = (char *)malloc(nbytes);
    if (!summary->folder)
        return idist__fail(IDIST_ERR_NO_MEMORY, "summary_create: no memory for a path");

    memcpy(summary->folder, desc->folder, nbytes);
    error = idist__summary_make_folder(summary->folder);
    if (error) return idist__checkpoint_fail("summary_create", summary->folder, "", error);
    if (!desc->no_csv) status = idist__summary_open_csv(summary);
    if (status == IDIST_OK && !desc->no_tensorboard) status = idist__summary_open_events(summary);

    return status;
}

// Closes a file. A child made by fork does not unlock it, because the lock belongs to the parent.
static idist_status idist__summary_close(idist_summary *summary, idist__summary_file *file,
                                         bool is_owner) {
    if (file->file == IDIST__OS_NO_FILE) return IDIST_OK;
    if (is_owner) idist__os_file_unlock(file->file, 0);
    if (idist__os_file_close(&file->file) || !is_owner) return IDIST_OK;

    return idist__checkpoint_fail("summary_free", summary->folder, file->name, errno);
}

static void idist__summary_delete(idist_summary *summary) {
    idist__os_mutex_destroy(&summary->lock);
    idist__os_mutex_destroy(&summary->track_lock);
    free(summary->folder);
    free(summary);
}

idist_status idist_summary_create(const idist_summary_desc *desc, idist_summary **summary) {
    idist_summary *created;
    idist_status status = IDIST_OK;

    if (!summary) return idist__fail(IDIST_ERR_ARG, "summary_create: summary is NULL");
    *summary = NULL;
    if (!desc) return idist__fail(IDIST_ERR_ARG, "summary_create: desc is NULL");
    if (desc->no_csv && desc->no_tensorboard && !desc->track)
        return idist__fail(IDIST_ERR_ARG,
                           "summary_create: neither CSV nor TensorBoard nor a tracker is wanted");
    created = (idist_summary *)calloc(1, sizeof *created);
    if (!created)
        return idist__fail(IDIST_ERR_NO_MEMORY, "summary_create: no memory for a summary");

    idist__os_mutex_init(&created->lock);
    idist__os_mutex_init(&created->track_lock);
    created->track = desc->track;
    created->arg = desc->arg;
    created->writes = idist_group_rank(desc->group) == 0;
    created->process = idist__os_process_id();
    created->csv.file = created->events.file = IDIST__OS_NO_FILE;
    if (created->writes) status = idist__summary_open(created, desc);

    if (status != IDIST_OK) {
        idist__summary_close(created, &created->csv, true);
        idist__summary_close(created, &created->events, true);
        idist__summary_delete(created);
        return status;
    }

    *summary = created;

    return IDIST_OK;
}

// Checks that a call can be made. Takes no lock, because another thread may have held the lock
// during a fork.
static idist_status idist__summary_enter(const char *name, const idist_summary *summary) {
    if (!summary) return idist__fail(IDIST_ERR_ARG, "%s: summary is NULL", name);
    if (!summary->writes) return IDIST_OK;
    if (summary->process != idist__os_process_id())
        return idist__fail(IDIST_ERR_STATE,
                           "%s: a child made by fork cannot write to a summary of its parent",
                           name);
    return IDIST_OK;
}

// Returns true if a text is UTF-8. TensorBoard stops reading a file at a text that is not UTF-8.
static bool idist__summary_is_utf8(const char *text) {
    uint32_t code;
    int nbytes;

    for (nbytes = idist__text_decode(text, &code); nbytes > 0;) {
        text += nbytes;
        nbytes = idist__text_decode(text, &code);
    }

    return nbytes == 0;
}

// Passes a value to the program's tracker.
IDIST__NOINLINE static idist_status idist__summary_track(idist_summary *summary, const char *tag,
                                                         double value, uint64_t step,
                                                         int64_t wall_us) {
    idist_scalar scalar;
    int result = 1;
    bool threw;

    scalar.tag = tag;
    scalar.value = value;
    scalar.wall_time = (double)wall_us / 1e6;
    scalar.step = step;

    idist__os_mutex_lock(&summary->track_lock);
    IDIST__CALLBACK(result = summary->track(&scalar, summary->arg));
    threw = idist__callback_threw("summary_add", "the tracker");
    idist__os_mutex_unlock(&summary->track_lock);

    if (threw) return IDIST_ERR_CALLBACK;
    if (!result) return IDIST_OK;

    return idist__fail(IDIST_ERR_CALLBACK, "summary_add: the tracker failed with %d for \"%.60s\"",
                       result, tag);
}

idist_status idist_summary_add(idist_summary *summary, const char *tag, double value,
                               uint64_t step) {
    char line[IDIST__CSV_NBYTES];
    idist__event record;
    int64_t now_us;
    size_t nbytes;
    bool refused = false;
    idist_status csv, events, status = idist__summary_enter("summary_add", summary);

    if (status != IDIST_OK || !summary->writes) return status;
    if (!tag || !tag[0] || strlen(tag) > IDIST__TAG_NBYTES || !idist__summary_is_utf8(tag))
        return idist__fail(IDIST_ERR_ARG,
                           "summary_add: the tag \"%.60s\" is not 1 to %d bytes of UTF-8",
                           tag ? tag : "", IDIST__TAG_NBYTES);
    if (step > INT64_MAX)
        return idist__fail(IDIST_ERR_ARG, "summary_add: step %llu is above INT64_MAX",
                           (unsigned long long)step);

    idist__os_mutex_lock(&summary->lock);
    now_us = idist__os_calendar_ns() / 1000;
    nbytes = idist__csv_line(line, now_us, step, tag, value);
    idist__event_scalar(&record, (double)now_us / 1e6, step, tag, value);
    csv = idist__summary_put(summary, &summary->csv, line, nbytes, &refused);
    events = idist__summary_put(summary, &summary->events, record.bytes, record.nbytes, &refused);
    summary->refused += refused;
    idist__os_mutex_unlock(&summary->lock);

    if (summary->track) status = idist__summary_track(summary, tag, value, step, now_us);
    if (csv != IDIST_OK) status = csv;

    return events != IDIST_OK ? events : status;
}

// Writes the pending bytes, and waits until the whole file is on the disk. If the file system
// refuses to sync, this is not a failure, and *refusal is set to the errno.
static idist_status idist__summary_sync(idist_summary *summary, idist__summary_file *file,
                                        const char *name, int *refusal) {
    idist_status status;
    int error;

    if (file->file == IDIST__OS_NO_FILE) return IDIST_OK;
    status = idist__summary_write(summary, file, name);
    if (status != IDIST_OK || idist__os_file_sync(file->file)) return status;

    error = errno;
    if (!idist__os_file_refuses_sync(error))
        return idist__checkpoint_fail(name, summary->folder, file->name, error);
    *refusal = error;

    return IDIST_OK;
}

static idist_status idist__summary_sync_both(idist_summary *summary, const char *name) {
    int refusal = 0;
    idist__log without_world;
    idist_status csv, events;

    idist__os_mutex_lock(&summary->lock);
    csv = idist__summary_sync(summary, &summary->csv, name, &refusal);
    events = idist__summary_sync(summary, &summary->events, name, &refusal);
    idist__os_mutex_unlock(&summary->lock);

    if (refusal)
        idist__sync_judge(refusal, name, summary->folder, idist__auto_log_of(NULL, &without_world));

    return events != IDIST_OK ? events : csv;
}

idist_status idist_summary_flush(idist_summary *summary) {
    idist_status status = idist__summary_enter("summary_flush", summary);

    if (status != IDIST_OK || !summary->writes) return status;

    return idist__summary_sync_both(summary, "summary_flush");
}

idist_status idist_summary_free(idist_summary **summary) {
    idist_summary *s = summary ? *summary : NULL;
    idist_status csv, events, status = IDIST_OK;
    bool is_owner;

    if (!s) return IDIST_OK;
    *summary = NULL;
    is_owner = s->process == idist__os_process_id();
    if (s->writes && is_owner) status = idist__summary_sync_both(s, "summary_free");
    csv = idist__summary_close(s, &s->csv, is_owner);
    events = idist__summary_close(s, &s->events, is_owner);

    if (status == IDIST_OK) status = events != IDIST_OK ? events : csv;
    if (status == IDIST_OK && is_owner && s->refused)
        status = idist__fail(
            IDIST_ERR_NO_SPACE,
            "summary_free: %llu values were not written to %s: earlier calls failed, and the "
            "buffer for pending values was full",
            (unsigned long long)s->refused, s->folder);
    idist__summary_delete(s);

    return status;
}
