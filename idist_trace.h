/* idist_trace.h - v0.2.0 - a timeline of a run, with a track per rank, for Perfetto - MIT licence

DO THIS

    Put it beside idist.h, and include it in the file with IDIST_IMPLEMENTATION and where you call
    its functions.

        idist_initialize(NULL);
        idist_trace_begin("forward");
        forward(batch);
        idist_trace_end();
        idist_all_reduce(...); // appears in the timeline without further ado

    IDIST_TRACE=out.json ./app                       one file per rank
    idistrun -n 4 --trace out.json ./app             or one file for all ranks

    Open the file in https://ui.perfetto.dev, in chrome://tracing, or in examples/trace.html, which
    needs no network.

WHAT IS IN IT

    A process per rank, "rank 3 on node7", with one track for each thread that marks or calls
    something: first the thread that joined the world, then "thread 1" and so on. Whatever is in
    flight while a thread goes on (a request from the call to its completion, a bucket of gradients)
    is on tracks of its own below these, as many as it takes for no two to overlap.

        category   what                                         args
        compute    from idist_trace_begin to idist_trace_end    -
        call       a blocking call; or, until it is complete,   dtype, count, bytes (of the larger
                   a request or a call between group_begin      buffer), op, root or peer and tag,
                   and group_end                                ranks, seq; status
        wait       idist_wait, idist_wait_any,                  the call that it waits for; status
                   idist_wait_stream, idist_group_end
        bucket     what idist_train.h reduces during the        gradients, bytes
                   backward pass

    A call on a stream lasts for as long as the host is busy with it. idist_test is not recorded,
    nor are calls that fail before there is a world. seq is the number of the call within its group,
    as in the texts of errors.

THE FILE

    A world of 1 writes to the file named by IDIST_TRACE. In a larger world each rank writes a file
    of its own: out.json becomes out.3.json for rank 3. If another live process is writing that
    file, the process id is appended. A process writes one file, from its first world on, for all
    worlds that it joins; the workers of idist_spawn are processes. A child that is merely forked
    writes none.

    The file is an array in Chrome's JSON format with an event per line. Events are written through
    a mapping, so the file contains the last events of a rank that was killed or hangs; a call that
    never returned has a begin and no end. The file is valid JSON at any moment except the instant
    in which an event is added. Times are microseconds since 1970, taken from the monotonic clock
    and its distance to the clock of the host at the start: ranks of a host agree, and hosts agree
    as well as NTP makes them.

    If the file cannot be written, a warning is logged and the program goes on without.

WHAT IT COSTS

    Without IDIST_TRACE a load and a branch per call. With it about a microsecond and 60 to 200
    bytes per event; a call or a mark is two events. Memory is allocated only for a new thread or
    track.

HOW IT FITS

    An optional header on top of idist.h, included by idist_train.h. It installs a table of
    functions, idist__tracer, that [core:call] calls before and after each communication call.

CONTENTS

    declarations
      [trace_api:mark]  what the program adds to the timeline
    implementation
      [trace:file]      a JSON array that is valid at any moment
      [trace:event]     an event as JSON
      [trace:track]     the rank and the thread that an event belongs to
      [trace:call]      what the library adds to the timeline
      [trace:mark]      what the program adds to the timeline
*/
#ifndef IDIST_H
#include "idist.h"
#endif
#ifndef IDIST_TRACE_H
#define IDIST_TRACE_H

#ifdef __cplusplus
extern "C" {
#endif

//------------------------------------------------------------------------------
// [trace_api:mark]  what the program adds to the timeline
//
// May be called by any thread at any time; without a timeline nothing happens. Names are UTF-8 and
// are copied: up to about 150 bytes of a name and 60 of a category, whole characters only.
//------------------------------------------------------------------------------

// Whether this process writes a timeline: IDIST_TRACE is set, and it has joined a world.
IDIST_API bool idist_trace_on(void);

// Work of this thread from begin to end, category "compute". Calls nest; each begin needs its end
// in the same thread.
IDIST_API void idist_trace_begin(const char *name);
IDIST_API void idist_trace_end(void);

// Something that has already happened, from start_ns to end_ns of CLOCK_MONOTONIC. The categories
// "compute", "call" and "wait" go to the track of this thread, so such a span must lie inside or
// beside whatever else is there. Any other category, such as "bucket", has tracks of its own on
// which nothing overlaps. args: NULL or a JSON object, "{\"bytes\": 4096}"; it is left out if it is
// longer than 1,000 bytes.
IDIST_API void idist_trace_span(const char *name, const char *category, int64_t start_ns,
                                int64_t end_ns, const char *args);

#ifdef __cplusplus
} // extern "C"
#endif

#endif // IDIST_TRACE_H

// Only here for the API? Stop reading.

#if defined(IDIST_IMPLEMENTATION) && !defined(IDIST_TRACE_IMPLEMENTATION_DONE)
#define IDIST_TRACE_IMPLEMENTATION_DONE

#include "idist_begin.h"

//------------------------------------------------------------------------------
// [trace:file]  a JSON array that is valid at any moment
// uses clock os:env mutex calendar os:file os:window process text base:log
// uses model
//
// The array is closed behind every event. A new event is first written behind that end, from
// end + 2 on, together with an end of its own. Then two bytes are replaced, a newline and a bracket
// by a comma and a newline, and the array is longer by one event:
//
//     before            [ \n {...}  \n  ]  \n
//                                 ^ end: of the last event
//     new event         [ \n {...}  \n  ]  {...}  \n ] \n
//     two bytes later   [ \n {...}  ,  \n  {...}  \n ] \n
//                                               ^ end
//
// The window is the part of the file that is mapped; it is filled with spaces, which JSON ignores.
//------------------------------------------------------------------------------

// In bytes.
#define IDIST__TRACE_WINDOW_NBYTES ((size_t)64 * 1024)
#define IDIST__TRACE_EVENT_NBYTES 2048
#define IDIST__TRACE_NAME_NBYTES 160
#define IDIST__TRACE_KIND_NBYTES 64
#define IDIST__TRACE_ARGS_NBYTES 1000

// Nanoseconds. Sums and differences of such times do not overflow.
#define IDIST__TRACE_TIME_LIMIT_NS (INT64_MAX / 4)

static idist__os_mutex idist__trace_lock = IDIST__OS_MUTEX_INIT;

static struct idist__trace_state {
    bool on;     // atomic; what follows is under the lock
    bool failed; // nothing more is written
    idist__os_file file;
    char *window;        // NULL: none is mapped
    size_t window_begin; // position in the file
    size_t end;          // of the last event, in the file
    int64_t wall_ns;     // the time since 1970 less that of CLOCK_MONOTONIC
    struct idist__trace_rank *ranks;
} idist__trace;

static bool idist__trace_file_is_on(void) {
    return __atomic_load_n(&idist__trace.on, __ATOMIC_ACQUIRE);
}

static void idist__trace_file_unmap(void) {
    idist__os_window_unmap(idist__trace.window, IDIST__TRACE_WINDOW_NBYTES);
    idist__trace.window = NULL;
}

// Moves the window to the end of the last event. 0 or an errno.
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
                     "IDIST_TRACE: %s cannot be written (%s); there is no timeline from here on",
                     path, strerror(error));
    idist__trace.failed = true;
    __atomic_store_n(&idist__trace.on, false, __ATOMIC_RELEASE);
}

// Makes room for nbytes behind the last event. False: the timeline was given up.
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

// Adds an event: a JSON object without a newline. The lock is held.
static void idist__trace_file_put(const char *event) {
    static const char end[3] = {'\n', ']', '\n'}, comma[2] = {',', '\n'}, first[2] = {' ', '\n'};
    size_t nbytes = strlen(event);
    char *at;

    if (idist__trace.failed) return;
    if (!idist__trace_file_reserve(sizeof comma + nbytes + sizeof end)) return;

    at = idist__trace.window + (idist__trace.end - idist__trace.window_begin);
    idist__text_copy(at + 2, nbytes + 1, event);
    memcpy(at + 2 + nbytes, end, sizeof end);
    __atomic_signal_fence(__ATOMIC_SEQ_CST);              // the event before the comma
    memcpy(at, idist__trace.end == 1 ? first : comma, 2); // 1: behind the opening bracket
    idist__trace.end += 2 + nbytes;
}

// Cuts off the spaces at the end of the file. The next event, if any, maps the file again.
static void idist__trace_file_trim(void) {
    idist__os_mutex_lock(&idist__trace_lock);
    idist__trace_file_unmap();
    if (idist__trace_file_is_on() &&
        !idist__os_file_resize(idist__trace.file, (uint64_t)idist__trace.end + 3))
        idist__trace.failed = true;
    idist__os_mutex_unlock(&idist__trace_lock);
}

// out.json becomes out.3.json in a world of several ranks, and out.3.4711.json with a process id.
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

// Creates the file, or empties it. 0 or an errno; EAGAIN: another process is writing it.
static int idist__trace_file_create(const char *path) {
    static const char empty[4] = {'[', '\n', ']', '\n'};
    int error;

    idist__trace.file = idist__os_file_open(path, IDIST__OS_FILE_OUTPUT);
    if (idist__trace.file < 0) return errno;

    error = idist__os_file_try_lock(idist__trace.file, 0) ? 0 : errno;
    if (error != EAGAIN) // the file system may have no locks
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

// Starts the timeline, unless there is one. The lock is held.
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
// [trace:event]  an event as JSON
// uses text file
//
//     {"ph":"B","pid":3,"tid":0,"ts":1769801172180123.456,"cat":"call","name":"barrier"}
//
// ph is the phase: B begins, E ends, X is both (with a duration), M is metadata. In the terms of
// the format a rank is a process (pid), and a track a thread of it (tid). An event is composed in a
// buffer of IDIST__TRACE_EVENT_NBYTES bytes and then put into the file.
//------------------------------------------------------------------------------

// Copies text; if it does not fit, as many whole characters as do.
static void idist__trace_event_cut(char *out, size_t capacity, const char *text) {
    size_t nbytes = strlen(text);

    if (nbytes >= capacity) {
        nbytes = capacity - 1;
        while (nbytes && ((unsigned char)text[nbytes] & 0xc0) == 0x80) nbytes--;
    }

    memcpy(out, text, nbytes);
    out[nbytes] = 0;
}

// Copies text as the inside of a JSON string; if it does not fit, as many whole characters as do.
static void idist__trace_event_quote(char *out, size_t capacity, const char *text) {
    size_t n = 0;

    for (; *text && n + 7 < capacity; text++) {
        unsigned char c = (unsigned char)*text;

        if (c == '"' || c == '\\') out[n++] = '\\';
        if (c >= ' ') out[n++] = (char)c;
        else n += (size_t)snprintf(out + n, 7, "\\u%04x", c);
    }

    if ((*text & 0xc0) == 0x80) { // within a character
        while (n && (out[n - 1] & 0xc0) == 0x80) n--;
        if (n) n--;
    }

    out[n] = 0;
}

// Begins an event. time_ns: of CLOCK_MONOTONIC.
static void idist__trace_event_head(char *event, const char *phase, int pid, int tid,
                                    int64_t time_ns) {
    int64_t ns = time_ns > -idist__trace.wall_ns ? time_ns + idist__trace.wall_ns : 0;

    snprintf(event, IDIST__TRACE_EVENT_NBYTES,
             "{\"ph\":\"%s\",\"pid\":%d,\"tid\":%d,\"ts\":%lld.%03d", phase, pid, tid,
             (long long)(ns / 1000), (int)(ns % 1000));
}

// Completes an event. args: NULL, "" or a JSON object.
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

//------------------------------------------------------------------------------
// [trace:track]  the rank and the thread that an event belongs to
// uses clock mutex os:file text mem model file event
//
// Track 0 of a rank is the thread that joined the world; other threads get the next ones as they
// come. From IDIST__TRACE_FIRST_LANE on there are the lanes, tracks for what is in flight.
// Everything here is called with the lock held, unless a comment says otherwise.
//------------------------------------------------------------------------------

#define IDIST__TRACE_FIRST_LANE 1000

// A track for what goes on beside the threads, one thing at a time.
typedef struct idist__lane {
    struct idist__lane *next;
    int pid, tid;
    char kind[IDIST__TRACE_KIND_NBYTES]; // "request", or a category
    int64_t until_ns;                    // occupied until then
} idist__lane;

// A process whose threads are ranks has several of these.
typedef struct idist__trace_rank {
    struct idist__trace_rank *next;
    int pid, thread_count, lane_count;
    idist__lane *lanes;
} idist__trace_rank;

static __thread struct idist__trace_thread {
    idist__trace_rank *rank;
    int tid;
    int depth; // begins without an end
} idist__trace_me;

// The rank as which a thread joined the world w; w NULL: the first one. NULL: no memory, or no
// rank.
static idist__trace_rank *idist__trace_track_find_rank(const idist__world *w) {
    idist__trace_rank **at = &idist__trace.ranks, *created;
    char text[128];

    while (w && *at && (*at)->pid != w->group.rank) at = &(*at)->next;
    if (*at || !w) return *at;

    created = (idist__trace_rank *)calloc(1, sizeof *created);
    if (!created) return NULL;
    created->pid = w->group.rank;
    *at = created;
    snprintf(text, sizeof text, "rank %d on %s", w->group.rank, w->hostname);
    idist__trace_event_label(created->pid, 0, "process_name", text);

    return created;
}

// The rank that this thread belongs to: as which it joined the world w, or else the first one.
// Gives the thread a track of it. NULL: no memory, or no rank.
static idist__trace_rank *idist__trace_track_this_rank(const idist__world *w) {
    struct idist__trace_thread *me = &idist__trace_me;
    char text[128];

    if (me->rank) return me->rank;
    me->rank = idist__trace_track_find_rank(w);
    if (!me->rank) return NULL;

    me->tid = me->rank->thread_count++;
    snprintf(text, sizeof text, me->tid ? "thread %d" : "program", me->tid);
    idist__trace_event_label(me->rank->pid, me->tid, "thread_name", text);

    return me->rank;
}

// A lane of this kind that is free from start_ns on. NULL: no memory for a new one.
static idist__lane *idist__trace_track_lane(idist__trace_rank *rank, const char *kind,
                                            int64_t start_ns) {
    idist__lane **at = &rank->lanes, *created;
    int number = 1; // among those of this kind
    char text[80];

    for (; *at; at = &(*at)->next) {
        if (strcmp((*at)->kind, kind) != 0) continue;
        if ((*at)->until_ns <= start_ns) return *at;
        number++;
    }

    created = (idist__lane *)calloc(1, sizeof *created);
    if (!created) return NULL;
    created->pid = rank->pid;
    created->tid = IDIST__TRACE_FIRST_LANE + rank->lane_count++;
    idist__text_copy(created->kind, sizeof created->kind, kind);
    *at = created;
    snprintf(text, sizeof text, number > 1 ? "%s %d" : "%s", created->kind, number);
    idist__trace_event_label(created->pid, created->tid, "thread_name", text);

    return created;
}

// In a child made by fork: it has neither file nor tracks until it joins a world itself. Takes no
// lock, since another thread may have held it during the fork.
static void idist__trace_track_forked(void) {
    while (idist__trace.ranks) {
        idist__trace_rank *rank = idist__trace.ranks;

        idist__trace.ranks = rank->next;
        idist__mem_free_list(NULL, rank->lanes);
        free(rank);
    }

    idist__trace_file_unmap();
    if (idist__trace.on) idist__os_file_close(&idist__trace.file);
    memset(&idist__trace, 0, sizeof idist__trace);
    memset(&idist__trace_me, 0, sizeof idist__trace_me);
    idist__os_mutex_init(&idist__trace_lock);
}

// Records that something begins on the track of this thread. Takes the lock.
static void idist__trace_track_enter(const char *category, const char *name, const char *args) {
    char event[IDIST__TRACE_EVENT_NBYTES];
    int64_t now_ns = idist__os_clock_now_ns();
    const idist__trace_rank *rank;

    idist__os_mutex_lock(&idist__trace_lock);
    rank = idist__trace_track_this_rank(NULL);

    if (rank) {
        idist__trace_event_head(event, "B", rank->pid, idist__trace_me.tid, now_ns);
        idist__trace_event_tail(event, category, name, args);
        idist__trace_file_put(event);
        idist__trace_me.depth++;
    }

    idist__os_mutex_unlock(&idist__trace_lock);
}

// Records the end of what this thread entered last or, if lane is not NULL, of what occupies the
// lane. status: "" for marks, which have none.
static void idist__trace_track_leave(const idist__lane *lane, const char *status) {
    struct idist__trace_thread *me = &idist__trace_me;
    int pid = lane ? lane->pid : me->rank->pid, tid = lane ? lane->tid : me->tid;
    char event[IDIST__TRACE_EVENT_NBYTES];

    idist__trace_event_head(event, "E", pid, tid, idist__os_clock_now_ns());
    if (status[0]) idist__text_append(event, sizeof event, ",\"args\":{\"status\":\"%s\"}", status);
    idist__text_append(event, sizeof event, "}");
    if (!lane) me->depth--;
    idist__trace_file_put(event);
}

//------------------------------------------------------------------------------
// [trace:call]  what the library adds to the timeline
// uses clock os:env mutex process fail text base:type kind model tracer extent
// uses check core:call file event track
//
// The functions of idist__tracer, which [core:call] calls. A blocking call is a begin and an end on
// the track of its thread. A request goes to a lane: idist__trace_call_record starts it, and
// idist__trace_call_done ends it, in whichever thread completes it.
//------------------------------------------------------------------------------

// {"dtype":"F32","count":1024,"bytes":4096,"op":"SUM","ranks":4,"seq":12}. valid: the arguments
// have been checked.
static void idist__trace_call_args(char *out, const idist_group *g, const idist__call *c,
                                   uint32_t seq, bool valid) {
    const size_t capacity = IDIST__TRACE_ARGS_NBYTES;
    bool has_data = c->kind != IDIST__BARRIER, p2p = idist__kind_is_p2p(c->kind);
    idist__extent extent;

    idist__text_append(out, capacity, "{");
    if (has_data)
        idist__text_append(out, capacity, "\"dtype\":\"%s\",\"count\":%zu,",
                           idist_dtype_name(c->dtype), c->count);

    if (has_data && valid && idist__extent_of(g, c, &extent) == IDIST_OK) {
        size_t larger = extent.send > extent.recv ? extent.send : extent.recv;
        idist__text_append(out, capacity, "\"bytes\":%zu,", larger * idist_dtype_size(c->dtype));
    }

    if (idist__kind_reduces(c->kind))
        idist__text_append(out, capacity, "\"op\":\"%s\",", idist_op_name(c->op));
    if (p2p) {
        idist__text_append(out, capacity, "\"peer\":%d,", c->root);
        if (c->label != IDIST__MRECV) // whose tag is one of ours
            idist__text_append(out, capacity, "\"tag\":%d,", c->tag);
    } else if (c->root >= 0) idist__text_append(out, capacity, "\"root\":%d,", c->root);
    if (seq && !p2p) idist__text_append(out, capacity, "\"seq\":%u,", (unsigned)seq);
    idist__text_append(out, capacity, "\"ranks\":%d}", g->size);
}

static void idist__trace_call_joined(const idist__world *w) {
    idist__os_mutex_lock(&idist__trace_lock);
    idist__trace_file_open(w);
    if (idist__trace_file_is_on()) idist__trace_track_this_rank(w);
    idist__os_mutex_unlock(&idist__trace_lock);
}

// A wait begins, for one call or for several; in the latter case g and c are NULL.
static void idist__trace_call_wait(const char *category, const char *name, const idist_group *g,
                                   const idist__call *c) {
    char args[IDIST__TRACE_ARGS_NBYTES] = "", of_call[IDIST__TRACE_ARGS_NBYTES] = "";

    if (!idist__trace_file_is_on()) return;

    if (c) {
        idist__trace_call_args(of_call, g, c, 0, true);
        idist__text_append(args, sizeof args, "{\"call\":\"%s\",%s", idist__kind_names[c->label],
                           of_call + 1);
    }

    idist__trace_track_enter(category, name, args);
}

static void idist__trace_call_waited(idist_status status) {
    if (!idist__trace_me.depth) return;
    idist__os_mutex_lock(&idist__trace_lock);
    idist__trace_track_leave(NULL, idist_status_name(status));
    idist__os_mutex_unlock(&idist__trace_lock);
}

// A task that is in a lane is complete.
static void idist__trace_call_done(const idist__task *t) {
    idist__lane *lane = (idist__lane *)t->lane;

    idist__os_mutex_lock(&idist__trace_lock);
    idist__trace_track_leave(lane, idist_status_name(t->status));
    lane->until_ns = idist__os_clock_now_ns();
    idist__os_mutex_unlock(&idist__trace_lock);
}

// Puts a task that is in flight, or already complete, into a lane.
static void idist__trace_call_start(idist__task *t) {
    char event[IDIST__TRACE_EVENT_NBYTES], args[IDIST__TRACE_ARGS_NBYTES] = "";
    idist__trace_rank *rank;
    idist__lane *lane = NULL;

    idist__trace_call_args(args, t->group, &t->call, t->seq, true);
    idist__os_mutex_lock(&idist__trace_lock);
    rank = idist__trace_track_this_rank(NULL);
    if (rank) lane = idist__trace_track_lane(rank, "request", t->started_ns);

    if (lane) {
        idist__trace_event_head(event, "B", lane->pid, lane->tid, t->started_ns);
        idist__trace_event_tail(event, "call", idist__kind_names[t->call.label], args);
        idist__trace_file_put(event);
        lane->until_ns = IDIST__FOREVER;
    }

    t->lane = lane;
    idist__os_mutex_unlock(&idist__trace_lock);
    if (lane && t->done) idist__trace_call_done(t);
}

static idist_status idist__trace_call_blocking_call(idist_group *g, const idist__call *c,
                                                    const idist_opts *o) {
    char args[IDIST__TRACE_ARGS_NBYTES] = "";
    bool valid = idist__check_call(g, c) == IDIST_OK;
    idist_status status;

    idist__trace_call_args(args, g, c, g->seq + 1, valid);
    idist__trace_track_enter("call", idist__kind_names[c->label], args);
    status = idist__call_locked(g, c, o);
    idist__trace_call_waited(status);

    return status;
}

// Around every communication call except sendrecv. A call on a stream without a request is never
// waited for, and has no lane.
static idist_status idist__trace_call_record(idist_group *g, const idist__call *c,
                                             const idist_opts *o) {
    idist__task *t;
    idist_status status;

    if (!idist__trace_file_is_on()) return idist__call_locked(g, c, o);
    if (!o->request && !idist__me.group_depth) return idist__trace_call_blocking_call(g, c, o);

    if (o->request) o->request->impl = NULL;
    status = idist__call_locked(g, c, o);
    if (status != IDIST_OK) return status;

    t = idist__me.group_tasks ? idist__me.group_last : NULL; // the task that was just begun
    if (o->request) t = (idist__task *)o->request->impl;
    if (t && !t->lane) idist__trace_call_start(t);

    return status;
}

// Before a world is joined: starts the timeline if the environment asks for one.
static void idist__trace_call_prepare(void) {
    static const idist__tracer tracer = {idist__trace_call_joined, idist__trace_file_trim,
                                         idist__trace_call_record, idist__trace_call_wait,
                                         idist__trace_call_waited, idist__trace_call_done};

    if (!idist__os_env("IDIST_TRACE")) return;
    idist__os_mutex_lock(&idist__trace_lock);
    if (!idist__tracer_now() && idist__os_process_on_fork(idist__trace_track_forked))
        __atomic_store_n(&idist__tracer_set, &tracer, __ATOMIC_RELEASE);
    idist__os_mutex_unlock(&idist__trace_lock);
}

__attribute__((constructor)) static void idist__trace_call_register(void) {
    idist__tracer_prepare = idist__trace_call_prepare;
}

//------------------------------------------------------------------------------
// [trace:mark]  what the program adds to the timeline
// uses mutex text file event track
//------------------------------------------------------------------------------

bool idist_trace_on(void) { return idist__trace_file_is_on(); }

void idist_trace_begin(const char *name) {
    if (idist__trace_file_is_on()) idist__trace_track_enter("compute", name, NULL);
}

void idist_trace_end(void) {
    if (!idist__trace_file_is_on() || !idist__trace_me.depth) return;
    idist__os_mutex_lock(&idist__trace_lock);
    idist__trace_track_leave(NULL, "");
    idist__os_mutex_unlock(&idist__trace_lock);
}

static int64_t idist__trace_mark_clamp(int64_t ns) {
    if (ns > IDIST__TRACE_TIME_LIMIT_NS) return IDIST__TRACE_TIME_LIMIT_NS;
    if (ns < -IDIST__TRACE_TIME_LIMIT_NS) return -IDIST__TRACE_TIME_LIMIT_NS;
    return ns;
}

// Copies the args of a span without line breaks, since an event must be a line; in JSON line breaks
// occur between tokens only. Gives "" if args do not fit.
static void idist__trace_mark_one_line(char *out, size_t capacity, const char *args) {
    size_t i;

    out[0] = 0;
    if (!args || strlen(args) >= capacity) return;
    idist__text_copy(out, capacity, args);
    for (i = 0; out[i]; i++)
        if (out[i] == '\n' || out[i] == '\r') out[i] = ' ';
}

// Whether a category goes to the track of the thread, not to a lane.
static bool idist__trace_mark_is_of_thread(const char *category) {
    return strcmp(category, "compute") == 0 || strcmp(category, "call") == 0 ||
           strcmp(category, "wait") == 0;
}

void idist_trace_span(const char *name, const char *category, int64_t start_ns, int64_t end_ns,
                      const char *args) {
    char event[IDIST__TRACE_EVENT_NBYTES], line[IDIST__TRACE_ARGS_NBYTES],
        kind[IDIST__TRACE_KIND_NBYTES];
    idist__trace_rank *rank;
    idist__lane *lane = NULL;
    int64_t duration_ns;
    bool of_thread;

    if (!idist__trace_file_is_on()) return;
    idist__trace_event_cut(kind, sizeof kind, category ? category : "compute");
    idist__trace_mark_one_line(line, sizeof line, args);
    of_thread = idist__trace_mark_is_of_thread(kind);
    start_ns = idist__trace_mark_clamp(start_ns);
    end_ns = idist__trace_mark_clamp(end_ns);
    duration_ns = end_ns > start_ns ? end_ns - start_ns : 0;

    idist__os_mutex_lock(&idist__trace_lock);
    rank = idist__trace_track_this_rank(NULL);
    if (rank && !of_thread) lane = idist__trace_track_lane(rank, kind, start_ns);

    if (rank && (of_thread || lane)) {
        idist__trace_event_head(event, "X", rank->pid, lane ? lane->tid : idist__trace_me.tid,
                                start_ns);
        idist__text_append(event, sizeof event, ",\"dur\":%lld.%03d",
                           (long long)(duration_ns / 1000), (int)(duration_ns % 1000));
        idist__trace_event_tail(event, kind, name, line);
        idist__trace_file_put(event);
        if (lane) lane->until_ns = start_ns + duration_ns;
    }

    idist__os_mutex_unlock(&idist__trace_lock);
}

#include "idist_end.h"

#endif // IDIST_IMPLEMENTATION
