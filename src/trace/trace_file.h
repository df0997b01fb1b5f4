// trace/trace_file.h: the file of a timeline, and the events in it
//
// Functions: idist__trace_file_*, idist__trace_event_*.
#pragma once

#include "os/clock.h"
#include "os/process.h"
#include "os/thread.h"
#include "os/file.h"
#include "os/memory.h"
#include "base/text.h"
#include "base/log.h"
#include "core/model.h"

//------------------------------------------------------------------------------
// a JSON array that is closed after every event
//
// A reader that ignores what follows the array finds it valid at any moment, also if the process
// dies. A new event is first written after the closing bracket,
// from end + 2 on, with its own closing bracket. Then two bytes are replaced: the newline and the
// old bracket become a comma and a newline. Now the array has one more event:
//
//     before            [ \n {...}  \n  ]  \n
//                                 ^ end of the last event
//     new event         [ \n {...}  \n  ]  {...}  \n ] \n
//     two bytes later   [ \n {...}  ,  \n  {...}  \n ] \n
//                                               ^ end
//
// The window is the mapped part of the file. Unused bytes of the window are spaces, which JSON
// ignores.
//------------------------------------------------------------------------------

// Sizes in bytes.
#define IDIST__TRACE_WINDOW_NBYTES ((size_t)64 * 1024)
#define IDIST__TRACE_EVENT_NBYTES 2048
#define IDIST__TRACE_NAME_NBYTES 160
#define IDIST__TRACE_KIND_NBYTES 64
#define IDIST__TRACE_ARGS_NBYTES 1000

// Limit of times in ns. Sums and differences of two such times do not overflow.
#define IDIST__TRACE_TIME_LIMIT_NS (INT64_MAX / 4)

static idist__os_mutex idist__trace_lock = IDIST__OS_MUTEX_INIT;

static struct idist__trace_state {
    bool on;     // atomic; the lock protects the other fields
    bool failed; // nothing more is written
    idist__os_file file;
    char *window;        // NULL if no part of the file is mapped
    size_t window_begin; // position in the file
    size_t end;          // end of the last event in the file
    int64_t wall_ns;     // time since 1970 minus CLOCK_MONOTONIC
    struct idist__trace_rank *ranks;
} idist__trace;

static bool idist__trace_file_is_on(void) {
    return __atomic_load_n(&idist__trace.on, __ATOMIC_ACQUIRE);
}

static void idist__trace_file_unmap(void) {
    idist__os_window_unmap(idist__trace.window, IDIST__TRACE_WINDOW_NBYTES);
    idist__trace.window = NULL;
}

// Moves the window to the end of the last event. Returns 0 or an errno.
static int idist__trace_file_map(void) {
    size_t used;
    int error;

    idist__trace_file_unmap();
    idist__trace.window_begin = idist__os_window_begin(idist__trace.end);
    error = idist__os_window_map(idist__trace.file, idist__trace.window_begin,
                                 IDIST__TRACE_WINDOW_NBYTES, &idist__trace.window);
    if (error) return error;

    used = idist__trace.end - idist__trace.window_begin;
    memset(idist__trace.window + used, ' ', IDIST__TRACE_WINDOW_NBYTES - used);

    return 0;
}

static void idist__trace_file_give_up(const idist__log *log, const char *path, int error) {
    idist__log_print(log, IDIST_LOG_WARN,
                     "IDIST_TRACE: %s cannot be written (%s); the timeline ends here", path,
                     strerror(error));
    idist__trace.failed = true;
    __atomic_store_n(&idist__trace.on, false, __ATOMIC_RELEASE);
}

// Makes room for nbytes after the last event. Returns false if the timeline was abandoned.
static bool idist__trace_file_reserve(size_t nbytes) {
    idist__log log;
    size_t window_end = idist__trace.window_begin + IDIST__TRACE_WINDOW_NBYTES;
    int error;

    if (idist__trace.window && idist__trace.end + nbytes <= window_end) return true;
    error = idist__trace_file_map();
    if (!error) return true;
    if (idist__log_init(&log, NULL) == IDIST_OK) idist__trace_file_give_up(&log, "the file", error);

    return false;
}

// Adds an event, which is a JSON object without a newline. Called with the lock held.
static void idist__trace_file_put(const char *event) {
    static const char end[3] = {'\n', ']', '\n'}, comma[2] = {',', '\n'}, first[2] = {' ', '\n'};
    size_t nbytes = strlen(event);
    char *at;

    if (idist__trace.failed) return;
    if (!idist__trace_file_reserve(sizeof comma + nbytes + sizeof end)) return;

    at = idist__trace.window + (idist__trace.end - idist__trace.window_begin);
    idist__text_copy(at + 2, nbytes + 1, event);
    memcpy(at + 2 + nbytes, end, sizeof end);
    __atomic_signal_fence(__ATOMIC_SEQ_CST);              // write the event before the comma
    memcpy(at, idist__trace.end == 1 ? first : comma, 2); // end is 1 before the first event
    idist__trace.end += 2 + nbytes;
}

// Removes the spaces at the end of the file. The next event, if any, maps the file again.
static void idist__trace_file_trim(void) {
    idist__os_mutex_lock(&idist__trace_lock);
    idist__trace_file_unmap();
    if (idist__trace_file_is_on() &&
        !idist__os_file_resize(idist__trace.file, (uint64_t)idist__trace.end + 3))
        idist__trace.failed = true;
    idist__os_mutex_unlock(&idist__trace_lock);
}

// Builds the path of the file. out.json becomes out.3.json in a world of several ranks, and
// out.3.4711.json with a process id.
static void idist__trace_file_path(char *path, size_t capacity, const char *name, int rank,
                                   int world_size, int process) {
    size_t length = strlen(name);
    bool has_suffix = length >= 5 && strcmp(name + length - 5, ".json") == 0;
    size_t stem = has_suffix ? length - 5 : length;

    snprintf(path, capacity, "%.*s", (int)stem, name);
    if (world_size > 1) idist__text_append(path, capacity, ".%d", rank);
    if (process) idist__text_append(path, capacity, ".%d", process);
    idist__text_append(path, capacity, "%s", name + stem);
}

// Creates the file or empties it. Returns 0 or an errno. EAGAIN means that another process is
// writing the file.
static int idist__trace_file_create(const char *path) {
    static const char empty[4] = {'[', '\n', ']', '\n'};
    int error;

    idist__trace.file = idist__os_file_open(path, IDIST__OS_FILE_OUTPUT);
    if (idist__trace.file < 0) return errno;

    error = idist__os_file_try_lock(idist__trace.file, 0) ? 0 : errno;
    if (error != EAGAIN) // the file system may not support locks
        error = idist__os_file_resize(idist__trace.file, 0) ? 0 : errno;
    idist__trace.end = 0;
    if (!error) error = idist__trace_file_map();

    if (error) {
        idist__os_file_close(&idist__trace.file);
        return error;
    }

    memcpy(idist__trace.window, empty, sizeof empty);
    idist__trace.end = 1;

    return 0;
}

// Starts the timeline, unless it has started already. Called with the lock held.
static void idist__trace_file_open(const idist__world *w) {
    const char *name = idist__os_env("IDIST_TRACE");
    int rank = w->group.rank, world_size = w->group.size;
    char path[4096];
    int error;

    if (!name || idist__trace.failed || idist__trace_file_is_on()) return;
    idist__trace_file_path(path, sizeof path, name, rank, world_size, 0);
    error = idist__trace_file_create(path);

    if (error == EAGAIN) {
        idist__trace_file_path(path, sizeof path, name, rank, world_size,
                               (int)idist__os_process_id());
        error = idist__trace_file_create(path);
    }

    if (error) {
        idist__trace_file_give_up(&w->log, path, error);
        return;
    }

    idist__trace.wall_ns = idist__os_calendar_ns() - idist__os_clock_now_ns();
    __atomic_store_n(&idist__trace.on, true, __ATOMIC_RELEASE);
}

//------------------------------------------------------------------------------
// an event as JSON
//
//     {"ph":"B","pid":3,"tid":0,"ts":1769801172180123.456,"cat":"call","name":"barrier"}
//
// The phase `ph` is B for a begin, E for an end, X for both (with a duration), or M for metadata.
// In the terms of the format, a rank is a process (pid) and a track is a thread (tid) of the
// process. An event is composed in a buffer of IDIST__TRACE_EVENT_NBYTES bytes and then put into
// the file.
//------------------------------------------------------------------------------

// Copies a text. Cuts a text that is too long, but never inside a character.
static void idist__trace_event_cut(char *out, size_t capacity, const char *text) {
    size_t nbytes = strlen(text);

    if (nbytes >= capacity) {
        nbytes = capacity - 1;
        while (nbytes && ((unsigned char)text[nbytes] & 0xc0) == 0x80) nbytes--;
    }

    memcpy(out, text, nbytes);
    out[nbytes] = 0;
}

// Copies a string, escaped for use in a JSON string. Cuts a text that is too long, but never inside
// a character.
static void idist__trace_event_quote(char *out, size_t capacity, const char *text) {
    size_t n = 0;

    for (; *text && n + 7 < capacity; text++) {
        unsigned char c = (unsigned char)*text;

        if (c == '"' || c == '\\') out[n++] = '\\';
        if (c >= ' ') out[n++] = (char)c;
        else n += (size_t)snprintf(out + n, 7, "\\u%04x", c);
    }

    if ((*text & 0xc0) == 0x80) { // inside a character
        while (n && (out[n - 1] & 0xc0) == 0x80) n--;
        if (n) n--;
    }

    out[n] = 0;
}

// Begins an event. `time_ns` is a time of CLOCK_MONOTONIC.
static void idist__trace_event_head(char *event, const char *phase, int pid, int tid,
                                    int64_t time_ns) {
    int64_t ns = time_ns > -idist__trace.wall_ns ? time_ns + idist__trace.wall_ns : 0;

    snprintf(event, IDIST__TRACE_EVENT_NBYTES,
             "{\"ph\":\"%s\",\"pid\":%d,\"tid\":%d,\"ts\":%lld.%03d", phase, pid, tid,
             (long long)(ns / 1000), (int)(ns % 1000));
}

// Completes an event. `args` is NULL, "" or a JSON object.
static void idist__trace_event_tail(char *event, const char *category, const char *name,
                                    const char *args) {
    char quoted_name[IDIST__TRACE_NAME_NBYTES], quoted_category[IDIST__TRACE_NAME_NBYTES];

    idist__trace_event_quote(quoted_name, sizeof quoted_name, name ? name : "");
    idist__trace_event_quote(quoted_category, sizeof quoted_category, category);
    idist__text_append(event, IDIST__TRACE_EVENT_NBYTES, ",\"cat\":\"%s\",\"name\":\"%s\"",
                       quoted_category, quoted_name);
    if (args && args[0]) idist__text_append(event, IDIST__TRACE_EVENT_NBYTES, ",\"args\":%s", args);
    idist__text_append(event, IDIST__TRACE_EVENT_NBYTES, "}");
}

// Records the name that viewers show for a rank ("process_name") or a track ("thread_name").
static void idist__trace_event_label(int pid, int tid, const char *key, const char *text) {
    char event[IDIST__TRACE_EVENT_NBYTES], name[IDIST__TRACE_NAME_NBYTES];

    idist__trace_event_quote(name, sizeof name, text);
    snprintf(event, sizeof event,
             "{\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"name\":\"%s\",\"args\":{\"name\":\"%s\"}}", pid,
             tid, key, name);
    idist__trace_file_put(event);
}
