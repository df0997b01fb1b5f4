/* idist_trace.h - v0.1.0 - a timeline of a run, one track per rank, for Perfetto - MIT licence

DO THIS

    Lay it beside idist.h and include it in the file that has IDIST_IMPLEMENTATION and in the one that joins the world.

        idist_initialize(NULL);
        idist_trace_begin("forward");
        forward(batch);
        idist_trace_end();
        idist_all_reduce(...); // is in the timeline by itself

    IDIST_TRACE=out.json ./app         or, for all ranks in one file,         idistrun -n 4 --trace out.json ./app

    Open the file in https://ui.perfetto.dev, in chrome://tracing, or in examples/trace.html, which needs no network.

WHAT IS IN IT

    A process per rank, "rank 3 on node7", with one track for each thread that marks or calls something: the thread that
    joined the world, thread 1, ... What is in flight while a thread goes on has tracks of its own below them, as many as
    it takes for no two to overlap: a request from the call to its end, a bucket of gradients.

        category   what                                                    args
        compute    between idist_trace_begin and idist_trace_end           -
        call       a blocking call; a request or a call between            dtype, count, bytes (of the larger buffer), op,
                   idist_group_begin and _end until it is complete         root or peer and tag, ranks, seq; status
        wait       idist_wait, _wait_any, _wait_stream, _group_end         the call that it waits for; status
        bucket     what idist_train.h reduces during the backward pass     its own

    A call on a stream is in it as long as the host is busy with it. idist_test and calls that fail before there is a world
    are not in it. seq is the number of the call in its group, as in the texts of errors.

THE FILE

    A world of 1 writes IDIST_TRACE itself; of several ranks each writes one of its own: out.json becomes out.3.json for
    rank 3. If another process that lives has that file, the process id is put behind. A process writes one file, from its
    first world on, for all worlds it joins; those of idist_spawn are processes. A process made by fork alone writes none.

    It is an array in the JSON format of Chrome, an event per line. Events are written through a mapping, so that those of
    a rank that was killed, or hangs, are in it; a call that never came back has a begin and no end. At any moment it is
    valid JSON, but for the blink in which an event is being added. Times are microseconds since 1970, from the monotonic
    clock and its distance to the clock of the host at the start: ranks of a host agree, hosts as well as NTP has them.

    A file that cannot be written is a warning, and the program goes on without.

WHAT IT COSTS

    Without IDIST_TRACE a load and a branch per call. With it about a microsecond and 60 to 200 bytes per event; a call is
    two of them, and so is a mark. No allocation but for a new thread or track.

CONTENTS

    declarations
      [trace_api:mark]  what the program adds to the timeline
    implementation
      [trace:file]      a JSON array that is whole at any moment
      [trace:track]     which rank and thread an event belongs to
      [trace:call]      what the library adds to the timeline
      [trace:mark]      what the program adds to it
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
// Any thread, at any time; without a timeline nothing happens. Names are UTF-8, and copied, of a
// long one the first 150 bytes or so, and of a category the first 60 or so, but no part of a
// character.
//------------------------------------------------------------------------------

// Whether this process writes a timeline: IDIST_TRACE is set, and it has joined a world.
IDIST_API bool idist_trace_on(void);

// A stretch of work of this thread, category "compute". They nest; each begin has its end in the
// same thread.
IDIST_API void idist_trace_begin(const char *name);
IDIST_API void idist_trace_end(void);

// What has happened already: from start_ns to end_ns of CLOCK_MONOTONIC. "compute", "call" and
// "wait" stand on the track of this thread, so they lie inside or beside what else is there; any
// other category, "bucket" say, gets tracks of its own on which nothing overlaps. args: NULL, or a
// JSON object, "{\"bytes\": 4096}", which is left out if longer than 1,000 bytes.
IDIST_API void idist_trace_span(const char *name, const char *category, int64_t start_ns,
                                int64_t end_ns, const char *args);

// Returns the list as it is: what joins a world passes through here, and the timeline begins.
IDIST_API idist_backend_list idist_trace_backends(idist_backend_list backends);

#undef IDIST_BACKENDS
#define IDIST_BACKENDS    \
    idist_trace_backends( \
        idist_backend_list_of(IDIST__ENTRY_NCCL, IDIST__ENTRY_MPI, IDIST__ENTRY_RING))

#ifdef __cplusplus
} // extern "C"
#endif

#endif // IDIST_TRACE_H

// Only here for the API? Stop reading.

#if defined(IDIST_IMPLEMENTATION) && !defined(IDIST_TRACE_IMPLEMENTATION_DONE)
#define IDIST_TRACE_IMPLEMENTATION_DONE

#include <sys/file.h>

#include "idist_begin.h"

//------------------------------------------------------------------------------
// [trace:file]  a JSON array that is whole at any moment
// uses os err base:log world
//
//     [                      at: the end of the last event
//     {...},                    |
//     {...}\n]\n                v
//     {...}  ,  \n  {...}  \n ] \n         a new event is written from at + 2 on, with a new end
//     behind it; then the old
//            2 bytes                       end, up to at + 1, becomes the comma and the new line
//
// The window is a part of the file that is mapped, filled with spaces, which JSON ignores.
//------------------------------------------------------------------------------

#define IDIST__TRACE_WINDOW ((size_t)64 * 1024)
#define IDIST__TRACE_EVENT 2048 // bytes, at most
#define IDIST__TRACE_NAME 160
#define IDIST__TRACE_KIND 64
#define IDIST__TRACE_FAR (INT64_MAX / 4) // ns, so that sums and differences of times fit
#define IDIST__TRACE_ARGS 1000

static pthread_mutex_t idist__trace_lock = PTHREAD_MUTEX_INITIALIZER;

static struct idist__trace_state {
    bool on, failed; // on: atomic, the others under the lock
    int fd;
    char *window;     // NULL: none is mapped
    size_t base, at;  // in the file: of the window, and of the end of the last event
    int64_t epoch_ns; // the time of 1970 less that of CLOCK_MONOTONIC
    struct idist__track *tracks;
} idist__trace;

static bool idist__trace_is_on(void) { return __atomic_load_n(&idist__trace.on, __ATOMIC_ACQUIRE); }

static void idist__trace_unmap(void) {
    if (idist__trace.window) munmap(idist__trace.window, IDIST__TRACE_WINDOW);
    idist__trace.window = NULL;
}

// Moves the window to the end of the last event. 0 or an errno.
static int idist__trace_map(void) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    struct rlimit limit;
    void *p;
    int rc;

    idist__trace_unmap();
    idist__trace.base = idist__trace.at / page * page;
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
        limit.rlim_cur < idist__trace.base + IDIST__TRACE_WINDOW)
        return EFBIG; // found out by trying, it would be a signal
    if ((rc = idist__os_reserve(idist__trace.fd, idist__trace.base, IDIST__TRACE_WINDOW)) != 0)
        return rc;
    p = mmap(NULL, IDIST__TRACE_WINDOW, PROT_READ | PROT_WRITE, MAP_SHARED, idist__trace.fd,
             (off_t)idist__trace.base);
    if (p == MAP_FAILED) return errno;
    idist__trace.window = (char *)p;
    memset((char *)p + (idist__trace.at - idist__trace.base), ' ',
           IDIST__TRACE_WINDOW - (idist__trace.at - idist__trace.base));

    return 0;
}

static void idist__trace_give_up(const idist__log *log, const char *path, int err) {
    idist__log_print(log, IDIST_LOG_WARN,
                     "IDIST_TRACE: %s cannot be written (%s); there is no timeline from here on",
                     path, strerror(err));
    idist__trace.failed = true;
    __atomic_store_n(&idist__trace.on, false, __ATOMIC_RELEASE);
}

// Adds an event, an object without a new line. The lock is held.
static void idist__trace_put(const char *event) {
    static const char end[3] = {'\n', ']', '\n'}, first[2] = {' ', '\n'}, comma[2] = {',', '\n'};
    size_t n = strlen(event), nbytes = sizeof comma + n + sizeof end;
    char *p;
    int err = 0;

    if (idist__trace.failed) return;
    if (!idist__trace.window || idist__trace.at + nbytes > idist__trace.base + IDIST__TRACE_WINDOW)
        err = idist__trace_map();

    if (err) {
        idist__log log;
        if (idist__log_init(&log, NULL) == IDIST_OK) idist__trace_give_up(&log, "the file", err);
        return;
    }

    p = idist__trace.window + (idist__trace.at - idist__trace.base);
    idist__copy_text(p + 2, n + 1, event);
    memcpy(p + 2 + n, end, sizeof end);
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    memcpy(p, idist__trace.at == 1 ? first : comma, 2);
    idist__trace.at += 2 + n;
}

// Without the spaces at the end. Whoever adds an event later maps the file anew.
static void idist__trace_trim(void) {
    pthread_mutex_lock(&idist__trace_lock);
    idist__trace_unmap();
    if (idist__trace_is_on() && ftruncate(idist__trace.fd, (off_t)idist__trace.at + 3) != 0)
        idist__trace.failed = true;
    pthread_mutex_unlock(&idist__trace_lock);
}

// out.json becomes out.3.json in a world of several, and out.3.4711.json with a process id.
static void idist__trace_path(char *path, size_t cap, const char *name, int rank, int size,
                              int pid) {
    size_t n = strlen(name), stem = n >= 5 && strcmp(name + n - 5, ".json") == 0 ? n - 5 : n;
    snprintf(path, cap, "%.*s", (int)stem, name);
    if (size > 1) idist__append(path, cap, ".%d", rank);
    if (pid) idist__append(path, cap, ".%d", pid);
    idist__append(path, cap, "%s", name + stem);
}

// A file that is nobody else's. 0 or an errno.
static int idist__trace_create(const char *path) {
    static const char empty[4] = {'[', '\n', ']', '\n'};
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666), err;

    if (fd < 0) return errno;
    if (flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) err = EWOULDBLOCK;
    else err = ftruncate(fd, 0) != 0 ? errno : 0;
    idist__trace.fd = fd;
    idist__trace.at = 0;
    if (!err) err = idist__trace_map();

    if (!err) {
        memcpy(idist__trace.window, empty, sizeof empty);
        idist__trace.at = 1;
        return 0;
    }

    close(fd);

    return err;
}

static void idist__trace_open(const idist__world *w) {
    const char *name = idist__os_env("IDIST_TRACE");
    char path[4096];
    struct timespec now;
    int err;

    if (!name || idist__trace.failed || idist__trace_is_on()) return;
    idist__trace_path(path, sizeof path, name, w->group.rank, w->group.size, 0);

    if ((err = idist__trace_create(path)) == EWOULDBLOCK) {
        idist__trace_path(path, sizeof path, name, w->group.rank, w->group.size, (int)getpid());
        err = idist__trace_create(path);
    }

    if (err) {
        idist__trace_give_up(&w->log, path, err);
        return;
    }

    clock_gettime(CLOCK_REALTIME, &now);
    idist__trace.epoch_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec - idist__os_now_ns();
    __atomic_store_n(&idist__trace.on, true, __ATOMIC_RELEASE);
}

//------------------------------------------------------------------------------
// [trace:track]  which rank and thread an event belongs to
// uses os err mem world file
//
// In the terms of the format a rank is a process (pid) and a track a thread of it (tid): 0 is the
// thread that joined the world, then come other threads; from IDIST__LANES on the lanes for what is
// in flight.
//------------------------------------------------------------------------------

#define IDIST__LANES 1000

// A track for what goes on beside the threads, one thing at a time.
typedef struct idist__lane {
    struct idist__lane *next;
    int pid, tid;
    char kind[IDIST__TRACE_KIND]; // "request", or a category
    int64_t until_ns;             // taken until then
} idist__lane;

typedef struct idist__track { // a rank; there are several where ranks are threads
    struct idist__track *next;
    int pid, nthreads, nlanes;
    idist__lane *lanes;
} idist__track;

static __thread struct idist__trace_thread {
    idist__track *track;
    int tid;
    int depth; // begins without an end
} idist__trace_me;

// Copies text, of one that does not fit whole characters.
static void idist__trace_cut(char *out, size_t cap, const char *text) {
    size_t n = strlen(text);
    if (n >= cap)
        for (n = cap - 1; n && ((unsigned char)text[n] & 0xc0) == 0x80;) n--;
    memcpy(out, text, n);
    out[n] = 0;
}

// Copies text as the inside of a JSON string. What does not fit is left out, whole characters of
// it.
static void idist__trace_quote(char *out, size_t cap, const char *text) {
    size_t n = 0;

    for (; *text && n + 7 < cap; text++) {
        unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\') out[n++] = '\\';
        if (c >= ' ') out[n++] = (char)c;
        else n += (size_t)snprintf(out + n, 7, "\\u%04x", c);
    }

    if ((*text & 0xc0) == 0x80) { // in the middle of a character
        while (n && (out[n - 1] & 0xc0) == 0x80) n--;
        if (n) n--;
    }

    out[n] = 0;
}

// "ph", and who and when. ts_ns: of CLOCK_MONOTONIC.
static void idist__trace_head(char *event, const char *phase, int pid, int tid, int64_t ts_ns) {
    int64_t ns = ts_ns > -idist__trace.epoch_ns ? ts_ns + idist__trace.epoch_ns : 0;
    snprintf(event, IDIST__TRACE_EVENT, "{\"ph\":\"%s\",\"pid\":%d,\"tid\":%d,\"ts\":%lld.%03d",
             phase, pid, tid, (long long)(ns / 1000), (int)(ns % 1000));
}

static void idist__trace_what(char *event, const char *category, const char *name,
                              const char *args) {
    char text[IDIST__TRACE_NAME], kind[IDIST__TRACE_NAME];

    idist__trace_quote(text, sizeof text, name ? name : "");
    idist__trace_quote(kind, sizeof kind, category);
    idist__append(event, IDIST__TRACE_EVENT, ",\"cat\":\"%s\",\"name\":\"%s\"", kind, text);
    if (args && args[0]) idist__append(event, IDIST__TRACE_EVENT, ",\"args\":%s", args);
    idist__append(event, IDIST__TRACE_EVENT, "}");
}

// How viewers call a rank ("process_name") or a track of it ("thread_name").
static void idist__trace_label(int pid, int tid, const char *key, const char *text) {
    char event[IDIST__TRACE_EVENT], name[IDIST__TRACE_NAME];

    idist__trace_quote(name, sizeof name, text);
    snprintf(event, sizeof event,
             "{\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"name\":\"%s\",\"args\":{\"name\":\"%s\"}}", pid,
             tid, key, name);
    idist__trace_put(event);
}

// The track of this thread, of the rank as which it joined a world (w), or else of the first one.
// NULL: no memory.
static idist__track *idist__trace_track(const idist__world *w) {
    struct idist__trace_thread *me = &idist__trace_me;
    idist__track **at = &idist__trace.tracks;
    char text[128];

    if (me->track) return me->track;
    while (w && *at && (*at)->pid != w->group.rank) at = &(*at)->next;

    if (!*at) {
        if (!w || (*at = (idist__track *)calloc(1, sizeof **at)) == NULL) return NULL;
        (*at)->pid = w->group.rank;
        snprintf(text, sizeof text, "rank %d on %s", w->group.rank, w->hostname);
        idist__trace_label((*at)->pid, 0, "process_name", text);
    }

    me->track = *at;
    me->tid = me->track->nthreads++;
    snprintf(text, sizeof text, me->tid ? "thread %d" : "program", me->tid);
    idist__trace_label(me->track->pid, me->tid, "thread_name", text);

    return me->track;
}

// A lane that is free from start_ns on. NULL: no memory for one more.
static idist__lane *idist__trace_lane(idist__track *track, const char *kind, int64_t start_ns) {
    idist__lane **at = &track->lanes;
    int nth = 1;
    char text[80];

    for (; *at; at = &(*at)->next) {
        if (strcmp((*at)->kind, kind) != 0) continue;
        if ((*at)->until_ns <= start_ns) return *at;
        nth++;
    }

    if ((*at = (idist__lane *)calloc(1, sizeof **at)) == NULL) return NULL;
    (*at)->pid = track->pid;
    (*at)->tid = IDIST__LANES + track->nlanes++;
    idist__copy_text((*at)->kind, sizeof(*at)->kind, kind);
    snprintf(text, sizeof text, nth > 1 ? "%s %d" : "%s", (*at)->kind, nth);
    idist__trace_label((*at)->pid, (*at)->tid, "thread_name", text);

    return *at;
}

// A child made by fork has neither file nor tracks; it gets some if it joins a world.
static void idist__trace_forked(void) {
    while (idist__trace.tracks) {
        idist__track *track = idist__trace.tracks;
        idist__trace.tracks = track->next;
        idist__mem_free_list(NULL, track->lanes);
        free(track);
    }

    idist__trace_unmap();
    if (idist__trace.on) close(idist__trace.fd);
    memset(&idist__trace, 0, sizeof idist__trace);
    memset(&idist__trace_me, 0, sizeof idist__trace_me);
    pthread_mutex_init(&idist__trace_lock, NULL); // another thread may have held it during the fork
}

static void idist__trace_enter(const char *category, const char *name, const char *args) {
    char event[IDIST__TRACE_EVENT];
    int64_t now = idist__os_now_ns();
    idist__track *track;

    pthread_mutex_lock(&idist__trace_lock);
    track = idist__trace_track(NULL);
    if (track) {
        idist__trace_head(event, "B", track->pid, idist__trace_me.tid, now);
        idist__trace_what(event, category, name, args);
        idist__trace_put(event);
        idist__trace_me.depth++;
    }

    pthread_mutex_unlock(&idist__trace_lock);
}

// The end of what this thread entered last; of a lane, of what is in it. status: "" of marks, which
// have none.
static void idist__trace_leave(const idist__lane *lane, const char *status) {
    struct idist__trace_thread *me = &idist__trace_me;
    char event[IDIST__TRACE_EVENT];

    idist__trace_head(event, "E", lane ? lane->pid : me->track->pid, lane ? lane->tid : me->tid,
                      idist__os_now_ns());
    if (status[0]) idist__append(event, sizeof event, ",\"args\":{\"status\":\"%s\"}", status);
    idist__append(event, sizeof event, "}");
    if (!lane) me->depth--;
    idist__trace_put(event);
}

//------------------------------------------------------------------------------
// [trace:call]  what the library adds to the timeline
// uses os err base:type world core:call file track
//------------------------------------------------------------------------------

// {"dtype":"F32","count":1024,"bytes":4096,"op":"SUM","ranks":4,"seq":12}. sound: its arguments
// have been checked.
static void idist__trace_args(char *out, const idist_group *g, const idist__call *c, uint32_t seq,
                              bool sound) {
    const size_t cap = IDIST__TRACE_ARGS;
    bool p2p = idist__kind_is_p2p(c->kind);
    idist__extent e;

    idist__append(out, cap, "{");
    if (c->kind != IDIST__BARRIER)
        idist__append(out, cap, "\"dtype\":\"%s\",\"count\":%zu,", idist_dtype_name(c->dtype),
                      c->count);
    if (c->kind != IDIST__BARRIER && sound && idist__extent_of(g, c, &e) == IDIST_OK)
        idist__append(out, cap, "\"bytes\":%zu,",
                      (e.send > e.recv ? e.send : e.recv) * idist_dtype_size(c->dtype));
    if (idist__kind_reduces(c->kind))
        idist__append(out, cap, "\"op\":\"%s\",", idist_op_name(c->op));
    if (p2p) idist__append(out, cap, "\"peer\":%d,\"tag\":%d,", c->root, c->tag);
    else if (c->root >= 0) idist__append(out, cap, "\"root\":%d,", c->root);
    if (seq && !p2p) idist__append(out, cap, "\"seq\":%u,", (unsigned)seq);
    idist__append(out, cap, "\"ranks\":%d}", g->size);
}

static void idist__trace_joined(const idist__world *w) {
    pthread_mutex_lock(&idist__trace_lock);
    idist__trace_open(w);
    if (idist__trace_is_on()) idist__trace_track(w);
    pthread_mutex_unlock(&idist__trace_lock);
}

static void idist__trace_wait(const char *category, const char *name, const idist_group *g,
                              const idist__call *c) {
    char args[IDIST__TRACE_ARGS] = "", rest[IDIST__TRACE_ARGS] = "";

    if (!idist__trace_is_on()) return;
    if (c) idist__trace_args(rest, g, c, 0, true);
    if (c)
        idist__append(args, sizeof args, "{\"call\":\"%s\",%s", idist__kind_names[c->label],
                      rest + 1);
    idist__trace_enter(category, name, args);
}

static void idist__trace_waited(idist_status status) {
    if (!idist__trace_me.depth) return;
    pthread_mutex_lock(&idist__trace_lock);
    idist__trace_leave(NULL, idist_status_name(status));
    pthread_mutex_unlock(&idist__trace_lock);
}

static void idist__trace_done(const idist__task *t) {
    idist__lane *lane = (idist__lane *)t->lane;
    pthread_mutex_lock(&idist__trace_lock);
    idist__trace_leave(lane, idist_status_name(t->status));
    lane->until_ns = idist__os_now_ns();
    pthread_mutex_unlock(&idist__trace_lock);
}

// Puts a task that goes on by itself, or is done already, into a lane.
static void idist__trace_start(idist__task *t) {
    char event[IDIST__TRACE_EVENT], args[IDIST__TRACE_ARGS] = "";
    idist__track *track;
    idist__lane *lane;

    idist__trace_args(args, t->group, &t->call, t->seq, true);
    pthread_mutex_lock(&idist__trace_lock);
    track = idist__trace_track(NULL);
    lane = track ? idist__trace_lane(track, "request", t->started_ns) : NULL;
    if (lane) {
        idist__trace_head(event, "B", lane->pid, lane->tid, t->started_ns);
        idist__trace_what(event, "call", idist__kind_names[t->call.label], args);
        idist__trace_put(event);
        lane->until_ns = IDIST__FOREVER;
    }

    t->lane = lane;
    pthread_mutex_unlock(&idist__trace_lock);
    if (lane && t->done) idist__trace_done(t);
}

// Around every communication call but sendrecv. What is on a stream without a request is nobody's
// to wait for, and has no lane.
static idist_status idist__trace_call(idist_group *g, const idist__call *c, const idist_opts *o) {
    char args[IDIST__TRACE_ARGS] = "";
    idist__task *t;
    idist_status s;

    if (!idist__trace_is_on()) return idist__call_locked(g, c, o);

    if (!o->request && !idist__me.group_depth) {
        idist__trace_args(args, g, c, g->seq + 1, idist__call_check(g, c) == IDIST_OK);
        idist__trace_enter("call", idist__kind_names[c->label], args);
        s = idist__call_locked(g, c, o);
        idist__trace_waited(s);
        return s;
    }

    if (o->request) o->request->impl = NULL;
    s = idist__call_locked(g, c, o);
    if (s != IDIST_OK) return s;
    t = idist__me.group_tasks ? idist__me.group_last : NULL; // began just now
    if (o->request) t = (idist__task *)o->request->impl;
    if (t && !t->lane) idist__trace_start(t);

    return s;
}

idist_backend_list idist_trace_backends(idist_backend_list backends) {
    static const idist__tracer tracer = {idist__trace_joined, idist__trace_trim,
                                         idist__trace_call,   idist__trace_wait,
                                         idist__trace_waited, idist__trace_done};

    if (!idist__os_env("IDIST_TRACE")) return backends;
    pthread_mutex_lock(&idist__trace_lock);
    if (!idist__tracer_now() && pthread_atfork(NULL, NULL, idist__trace_forked) == 0)
        __atomic_store_n(&idist__tracer_set, &tracer, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&idist__trace_lock);

    return backends;
}

//------------------------------------------------------------------------------
// [trace:mark]  what the program adds to it
// uses err file track
//------------------------------------------------------------------------------

bool idist_trace_on(void) { return idist__trace_is_on(); }

void idist_trace_begin(const char *name) {
    if (idist__trace_is_on()) idist__trace_enter("compute", name, NULL);
}

void idist_trace_end(void) {
    if (!idist__trace_is_on() || !idist__trace_me.depth) return;
    pthread_mutex_lock(&idist__trace_lock);
    idist__trace_leave(NULL, "");
    pthread_mutex_unlock(&idist__trace_lock);
}

static int64_t idist__trace_near(int64_t ns) {
    return ns > IDIST__TRACE_FAR    ? IDIST__TRACE_FAR
           : ns < -IDIST__TRACE_FAR ? -IDIST__TRACE_FAR
                                    : ns;
}

void idist_trace_span(const char *name, const char *category, int64_t start_ns, int64_t end_ns,
                      const char *args) {
    char event[IDIST__TRACE_EVENT], line[IDIST__TRACE_ARGS] = "", kind[IDIST__TRACE_KIND];
    idist__track *track;
    idist__lane *lane = NULL;
    int64_t ns;
    size_t i;
    bool own;

    if (!idist__trace_is_on()) return;
    idist__trace_cut(kind, sizeof kind, category ? category : "compute");
    own = strcmp(kind, "compute") == 0 || strcmp(kind, "call") == 0 || strcmp(kind, "wait") == 0;
    start_ns = idist__trace_near(start_ns);
    end_ns = idist__trace_near(end_ns);
    ns = end_ns > start_ns ? end_ns - start_ns : 0;
    if (args && strlen(args) < sizeof line) idist__copy_text(line, sizeof line, args);
    for (i = 0; line[i];
         i++) // an event is a line; in JSON such a character stands between tokens only
        if (line[i] == '\n' || line[i] == '\r') line[i] = ' ';
    pthread_mutex_lock(&idist__trace_lock);
    track = idist__trace_track(NULL);
    if (track && !own) lane = idist__trace_lane(track, kind, start_ns);

    if (track && (own || lane)) {
        idist__trace_head(event, "X", track->pid, lane ? lane->tid : idist__trace_me.tid, start_ns);
        idist__append(event, sizeof event, ",\"dur\":%lld.%03d", (long long)(ns / 1000),
                      (int)(ns % 1000));
        idist__trace_what(event, kind, name, line);
        idist__trace_put(event);
        if (lane) lane->until_ns = start_ns + ns;
    }

    pthread_mutex_unlock(&idist__trace_lock);
}

#include "idist_end.h"

#endif // IDIST_IMPLEMENTATION
