// trace.c - checks timelines: the contents of the file, that the file is JSON whatever happens to
// the process, and which process owns the file.
//
// Each case runs in a separate process. That process leaves files in a folder, and the parent
// checks them.
#define IDIST_IMPLEMENTATION
#include "idist.h"


#include "ranks.h"

#define MANY 3000 // enough events for several windows (mapped parts of the file)

static char folder[] = "/tmp/idist-trace-XXXXXX", path[300];
static char *text; // contents of the file that look_at read last
static size_t text_nbytes;

//------------------------------------------------------------------------------
// reading
//------------------------------------------------------------------------------

static const char *json_end(const char *p);

static const char *json_spaces(const char *p) { return p + strspn(p, " \n\r\t"); }

static const char *json_string(const char *p) {
    if (*p++ != '"') return NULL;
    for (; *p != '"'; p++) {
        if ((unsigned char)*p < ' ') return NULL;
        if (*p == '\\' && !strchr("\"\\/bfnrtu", *++p)) return NULL;
    }
    return p + 1;
}

// Skips a list of values, or a list of pairs if the list ends with a brace. Returns the position
// after the list, or NULL if the list is malformed.
static const char *json_list(const char *p, char end) {
    p = json_spaces(p + 1);
    if (*p == end) return p + 1;
    for (;;) {
        if (end == '}') {
            p = json_string(json_spaces(p));
            if (!p || *(p = json_spaces(p)) != ':') return NULL;
            p++;
        }
        p = json_end(p);
        if (!p) return NULL;
        p = json_spaces(p);
        if (*p == end) return p + 1;
        if (*p++ != ',') return NULL;
    }
}

// Returns the position after the value that begins at p, or NULL if there is no value.
static const char *json_end(const char *p) {
    char *end;
    p = json_spaces(p);
    if (*p == '{' || *p == '[') return json_list(p, *p == '{' ? '}' : ']');
    if (*p == '"') return json_string(p);
    strtod(p, &end);
    return end == p ? NULL : end;
}

static bool is_json(void) {
    const char *p = json_end(text);
    return p && json_spaces(p) == text + text_nbytes;
}

// Reads the file of this name in the folder into `text`, which becomes "" if there is no such file.
static void look_at(const char *name) {
    char whole[600];
    free(text);
    text = (char *)calloc(1, 4 << 20);
    snprintf(whole, sizeof whole, "%s/%s", folder, name);
    FILE *f = fopen(whole, "r");
    text_nbytes = f ? fread(text, 1, (4 << 20) - 1, f) : 0;
    if (f) fclose(f);
}

static int count(const char *part) {
    int n = 0;
    for (const char *p = text; (p = strstr(p, part)) != NULL; p++) n++;
    return n;
}

// Checks that on each track every begin has its end and that times never decrease. Returns the
// number of pairs, or a negative number if the check fails.
static int pairs(void) {
    enum { TRACKS = 32 };
    long long pids[TRACKS], tids[TRACKS], last[TRACKS];
    int depth[TRACKS], n = 0, found = 0;
    for (const char *p = text; (p = strstr(p, "{\"ph\":\"")) != NULL; p++) {
        char phase;
        long long pid, tid, us;
        int ns, i = 0;
        if (sscanf(p, "{\"ph\":\"%c\",\"pid\":%lld,\"tid\":%lld,\"ts\":%lld.%3d", &phase, &pid,
                   &tid, &us, &ns) != 5)
            continue;
        if (phase == 'X') continue;
        while (i < n && (pids[i] != pid || tids[i] != tid)) i++;
        if (i == TRACKS) return -1;
        if (i == n) pids[n] = pid, tids[n] = tid, last[n] = 0, depth[n++] = 0;
        if (us * 1000 + ns < last[i]) return -2;
        last[i] = us * 1000 + ns;
        depth[i] += phase == 'B' ? 1 : -1;
        if (depth[i] < 0) return -3;
        found += phase == 'E';
    }
    for (int i = 0; i < n; i++)
        if (depth[i]) return -4;
    return found;
}

//------------------------------------------------------------------------------
// writing
//------------------------------------------------------------------------------

// Runs fn in a separate process, with IDIST_TRACE=NAME in the folder, or without IDIST_TRACE if
// name is NULL. Returns the exit status that waitpid reports.
static int in_process(int (*fn)(void), const char *name) {
    int status = -1;
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        snprintf(path, sizeof path, "%s/%s", folder, name ? name : "");
        if (name) setenv("IDIST_TRACE", path, 1);
        alarm(60);
        int code = fn();
        fflush(NULL);
        _exit(code);
    }
    TAP_REQUIRE(pid > 0 && waitpid(pid, &status, 0) == pid);
    return status;
}

static int n_warnings;
static char warning[300];

static void note_warning(idist_log_level level, const char *line, void *user) {
    (void)user;
    if (level == IDIST_LOG_WARN) n_warnings++;
    copy_text(warning, sizeof warning, line);
}

static bool begin_alone(void) {
    idist_desc d;
    memset(&d, 0, sizeof d);
    d.logger.log_fn = note_warning;
    return idist_initialize(&d) == IDIST_OK;
}

static int only_marks(void) {
    if (idist_trace_on()) return 1;
    idist_trace_begin("before there is a world");
    if (!begin_alone()) return 2;
    idist_trace_end(); // ends a span that is not in the file
    idist_trace_begin("outer");
    idist_trace_begin("a \"quoted\" \\ name\n");
    idist_trace_end();
    idist_trace_end();
    idist_trace_end(); // one too many
    return idist_finalize() != IDIST_OK;
}

static int cancelled_receive(void) {
    idist_request r;
    idist_opts o;
    bool cancelled = false;
    float x;
    memset(&o, 0, sizeof o);
    o.request = &r;
    if (!begin_alone() || idist_recv(&x, 1, IDIST_F32, 0, 0, NULL, &o) != IDIST_OK) return 1;
    if (idist_cancel(&r, &cancelled) != IDIST_OK || !cancelled) return 2;
    if (idist_wait(&r) != IDIST_ERR_CANCELLED) return 3;
    return idist_finalize() != IDIST_OK;
}

static int nothing_asked_for(void) { return only_marks() || idist__tracer_now() != NULL; }

static void calls_of_a_rank(idist_group *world, int rank, int n, void *arg) {
    float x[5] = {1, 2, 3, 4, 5}, y[5], z[5];
    idist_request r[2];
    idist_opts o = opts_of(world), a = opts_async(world, &r[0]), b = opts_async(world, &r[1]);
    size_t at;
    (void)arg;
    idist_trace_begin("work");
    rank_is(rank, idist_all_reduce(x, y, 5, IDIST_F32, IDIST_SUM, &o), IDIST_OK);
    idist_trace_end();
    rank_is(rank, idist_broadcast(x, 5, IDIST_F32, n, &o), IDIST_ERR_ARG);
    rank_is(rank, idist_all_reduce(x, y, 5, IDIST_F32, IDIST_MAX, &a), IDIST_OK);
    rank_is(rank, idist_all_reduce(x, z, 4, IDIST_F32, IDIST_MAX, &b), IDIST_OK);
    rank_is(rank, idist_wait(&r[0]), IDIST_OK);
    rank_is(rank, idist_wait_any(r, 2, &at), IDIST_OK);
    rank_is(rank, idist_group_begin(), IDIST_OK);
    rank_is(rank, idist_send(x, 5, IDIST_F32, (rank + 1) % n, 7, &o), IDIST_OK);
    rank_is(rank, idist_recv(y, 5, IDIST_F32, (rank + n - 1) % n, 7, NULL, &o), IDIST_OK);
    rank_is(rank, idist_group_end(), IDIST_OK);
    rank_is(rank,
            idist_sendrecv(x, 2, (rank + 1) % n, 1, y, 2, (rank + n - 1) % n, 1, IDIST_F32, NULL,
                           &o),
            IDIST_OK);
    rank_is(rank, idist_barrier(&o), IDIST_OK);
}

static int calls(void) {
    ranks_threads(3, NULL, calls_of_a_rank, NULL);
    for (int i = 0; i < ranks__log()->n_messages && i < RANKS_MESSAGES; i++)
        tap_diag("%s", ranks__log()->message[i]);
    return ranks__log()->n_failures != 0;
}

static int spans(void) {
    char long_args[1200];
    if (!begin_alone() || !idist_trace_on()) return 1;
    int64_t t = idist__os_clock_now_ns();
    idist_trace_span("first", "bucket", t, t + 3000, "{\"bytes\":\n12}");
    idist_trace_span("beside it", "bucket", t + 1000, t + 2500, NULL);
    idist_trace_span("after it", "bucket", t + 3000, t + 4000, NULL);
    idist_trace_span("of another kind", "copy", t, t + 3000, NULL);
    idist_trace_span("on the track", "wait", t, t + 3001, NULL);
    idist_trace_span("backwards", "compute", t, t - 1, NULL);
    memset(long_args, ' ', sizeof long_args);
    memcpy(long_args, "{\"a\":1", 6);
    memcpy(long_args + sizeof long_args - 2, "}", 2);
    idist_trace_span("too much", "compute", t, t, long_args);
    idist_trace_span("all of time", "long", INT64_MIN, INT64_MAX, NULL);
    idist_trace_span("its end", "compute", INT64_MAX - 5, INT64_MAX, NULL);
    for (int i = 0; i < 2; i++) { // with the last character complete, and cut
        char category[90];
        memset(category, 'c', sizeof category);
        for (int k = 40 + i; k < 88; k += 2) memcpy(category + k, "\xc3\xa9", 2);
        category[88 + i] = 0;
        idist_trace_span("of a long category", category, t, t, NULL);
        idist_trace_span("beside that", category, t - 5, t + 5, NULL);
    }
    return idist_finalize() != IDIST_OK;
}

static void *marks_of_a_thread(void *arg) {
    for (int i = 0; i < MANY / 3; i++) {
        idist_trace_begin("mark");
        if (arg && !idist_trace_on()) break;
        idist_trace_end();
    }
    return NULL;
}

static int many(void) {
    pthread_t threads[2];
    if (!begin_alone()) return 1;
    for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, marks_of_a_thread, threads);
    marks_of_a_thread(NULL);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    return idist_finalize() != IDIST_OK;
}

static int killed(void) {
    if (!begin_alone()) return 1;
    idist_trace_begin("the last thing it did");
    return raise(SIGKILL);
}

static int twice(void) {
    if (!begin_alone() || idist_finalize() != IDIST_OK) return 1;
    idist_trace_begin("between");
    idist_trace_end();
    if (!begin_alone() || idist_barrier(NULL) != IDIST_OK) return 2;
    return idist_finalize() != IDIST_OK;
}

// Forks children of a traced process. A child without a world must leave the file alone. A child
// that joins a world gets its own file, because the parent uses the first file.
static int forks(void) {
    int status = -1;
    if (!begin_alone()) return 1;
    idist_trace_begin("parent");
    for (int k = 0; k < 2; k++) {
        pid_t pid = fork();
        if (pid == 0) {
            idist_trace_begin("child");
            if (k && !begin_alone()) _exit(2);
            idist_trace_begin("of its own");
            idist_trace_end();
            _exit(k && idist_finalize() != IDIST_OK);
        }
        if (waitpid(pid, &status, 0) != pid || status) return 3;
        if (!k) continue;
        char from[400], to[400];
        snprintf(from, sizeof from, "%s/forks.%d.json", folder, (int)pid);
        snprintf(to, sizeof to, "%s/forked.json", folder);
        if (rename(from, to) != 0) return 4;
    }
    idist_trace_end();
    return idist_finalize() != IDIST_OK;
}

static int unwritable(void) {
    if (!begin_alone() || idist_trace_on()) return 1;
    idist_trace_begin("nowhere");
    if (idist_finalize() != IDIST_OK || !begin_alone()) return 2;
    if (idist_barrier(NULL) != IDIST_OK || n_warnings != 1 || !strstr(warning, path)) return 3;
    return idist_finalize() != IDIST_OK;
}

// Limits the file to the size of its first window. Tracing must stop there, and the program must
// continue.
static int no_room(void) {
    struct rlimit limit = {65536, 65536};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0 || !begin_alone() || !idist_trace_on()) return 1;
    freopen("/dev/null", "w", stderr);
    marks_of_a_thread(&limit);
    if (idist_trace_on()) return 2;
    marks_of_a_thread(NULL);
    return idist_finalize() != IDIST_OK;
}

// Limits the size of the file to less than its first window. Tracing must not start, and the
// process logs one warning.
static int no_room_at_all(void) {
    struct rlimit limit = {1000, 1000};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0 || !begin_alone() || idist_trace_on()) return 1;
    if (n_warnings != 1 || !strstr(warning, path)) return 2;
    return idist_finalize() != IDIST_OK;
}

// Returns true if every byte above 0x7f belongs to a complete 0xc3 0xa9, the only such character in
// these tests.
static bool is_utf8(void) {
    const unsigned char *p = (const unsigned char *)text;
    for (; *p; p++)
        if (*p > 0x7f && (*p++ != 0xc3 || *p != 0xa9)) return false;
    return true;
}

//------------------------------------------------------------------------------
// expected contents
//------------------------------------------------------------------------------

static void test_calls(void) {
    tap_is(in_process(calls, "calls.json"), 0, "three ranks that are threads");
    char name[40];
    // The three threads share one file. The rank that joined first names the file.
    for (int r = 0; r < 3; r++) {
        snprintf(name, sizeof name, "calls.%d.json", r);
        look_at(name);
        if (*text) break;
    }
    tap_ok(is_json(), "calls: the file is JSON");
    tap_is(count("\"process_name\""), 3, "calls: a process per rank");
    // The 13 spans of each rank: work, all_reduce, broadcast, 2 requests, wait, wait_any, send,
    // recv, group_end, sendrecv, barrier, finalize.
    tap_is(pairs(), 3 * 13, "calls: all that was begun has ended, in order");
    tap_is(count("\"cat\":\"call\",\"name\":\"all_reduce\",\"args\":{\"dtype\":\"F32\",\"count\":5,"
                 "\"bytes\":20,\"op\":\"SUM\","
                 "\"seq\":1,\"ranks\":3}}"),
           3, "calls: a blocking one, with its arguments");
    tap_is(count("\"name\":\"broadcast\",\"args\":{\"dtype\":\"F32\",\"count\":5,\"root\":3,"
                 "\"seq\":2,\"ranks\":3}}"),
           3, "calls: one with a wrong argument has no bytes");
    tap_is(count("{\"status\":\"IDIST_ERR_ARG\"}"), 3, "calls: and its status");
    tap_is(count("\"cat\":\"wait\",\"name\":\"wait\",\"args\":{\"call\":\"all_reduce\",\"dtype\":"
                 "\"F32\",\"count\":5,"),
           3, "calls: what was waited for");
    tap_is(count("\"name\":\"wait_any\""), 3, "calls: wait_any");
    tap_is(count("\"name\":\"group_end\""), 3, "calls: group_end");
    tap_is(count("\"name\":\"sendrecv\",\"args\":{\"call\":\"send\",\"dtype\":\"F32\",\"count\":2,"
                 "\"bytes\":8,"),
           3, "calls: sendrecv is one, without its parts");
    tap_is(count(
               "\"name\":\"recv\",\"args\":{\"dtype\":\"F32\",\"count\":5,\"bytes\":20,\"peer\":"),
           3, "calls: recv");
    tap_is(count("\"args\":{\"name\":\"request\"}"), 3, "calls: requests have a lane");
    tap_ok(count("\"tid\":0,") > 0 && count("\"tid\":1,") == 0,
           "calls: each thread is the first one of its rank");
}

static void test_marks(void) {
    tap_is(in_process(only_marks, "marks.json"), 0, "marks of a world of 1");
    look_at("marks.json");
    tap_ok(is_json(), "marks: the file is JSON");
    tap_is(pairs(), 3, "marks: two, and finalize");
    tap_is(count("before there is a world"), 0, "marks: none from before there is a world");
    tap_is(count("\"cat\":\"compute\",\"name\":\"a \\\"quoted\\\" \\\\ name\\u000a\"}"), 1,
           "marks: names are quoted");
    tap_is(in_process(cancelled_receive, "cancelled.json"), 0, "a cancelled receive");
    look_at("cancelled.json");
    tap_is(pairs(), 3, "a cancelled receive has ended; its wait, and finalize");
    tap_is(count("{\"status\":\"IDIST_ERR_CANCELLED\"}"), 2, "and has its status, as its wait has");
    tap_is(in_process(spans, "spans.json"), 0, "spans");
    look_at("spans.json");
    tap_ok(is_json(), "spans: the file is JSON");
    tap_is(count("\"ph\":\"X\""), 13, "spans: all");
    tap_ok(is_utf8() && count("\xc3\xa9") > 20, "spans: a long category is cut between characters");
    tap_is(count("ccc 2\""), 0, "spans: and keeps its number");
    tap_is(count("\xa9 2\"}"), 2, "spans: behind it");
    tap_ok(count("\"dur\":-") == 0 && count("\"ts\":-") == 0, "spans: all of time fits");
    tap_is(count("\"tid\":1000,\"ts\""), 2, "spans: one after the other in one lane");
    tap_is(count("\"tid\":1001,\"ts\""), 1, "spans: those that overlap in two");
    tap_is(count("\"tid\":1002,\"ts\""), 1, "spans: another category has lanes of its own");
    tap_is(count("\"dur\":3.001,\"cat\":\"wait\",\"name\":\"on the track\"}"), 1,
           "spans: a wait on the track of the thread");
    tap_is(count("\"dur\":0.000,\"cat\":\"compute\",\"name\":\"backwards\""), 1,
           "spans: no negative time");
    tap_is(count("\"args\":{\"bytes\": 12}"), 1, "spans: arguments in one line");
    tap_is(count("\"name\":\"too much\"}"), 1, "spans: arguments that are too long are left out");
    tap_is(in_process(many, "many.json"), 0, "marks of three threads");
    look_at("many.json");
    tap_ok(is_json(), "threads: the file is JSON");
    tap_is(pairs(), MANY + 1, "threads: all marks");
    tap_is(count("\"name\":\"thread 2\""), 1, "threads: a track each");
}

static void test_files(void) {
    char name[12];
    tap_is(in_process(nothing_asked_for, NULL), 0, "without IDIST_TRACE nobody follows the calls");
    int status = in_process(killed, "killed.json");
    tap_ok(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "a rank is killed");
    look_at("killed.json");
    tap_ok(is_json(), "killed: the file is JSON");
    tap_is(count("the last thing it did"), 1, "killed: what it did last is there");
    tap_is(in_process(twice, "twice.json"), 0, "two worlds, one after the other");
    look_at("twice.json");
    tap_ok(is_json() && text[strlen(text) - 2] == ']',
           "twice: the file is JSON, without spaces at its end");
    tap_is(pairs(), 4, "twice: both are in it, and what was between");
    tap_is(in_process(forks, "forks.json"), 0, "a process forks");
    look_at("forks.json");
    tap_ok(is_json() && pairs() == 2 && count("child") == 0, "forks: the parent's file");
    look_at("forked.json");
    tap_ok(is_json() && pairs() == 2 && count("child") == 0 && count("parent") == 0,
           "forks: the child's file");
    tap_is(in_process(unwritable, "no such folder/x.json"), 0,
           "a path that cannot be written: one warning");
    tap_is(in_process(unwritable, "."), 0, "a folder: one warning");
    tap_is(in_process(no_room, "full.json"), 0, "no room for more: it goes on without");
    look_at("full.json");
    tap_ok(is_json() && count("\"mark\"") > 100, "no room: what was written is JSON");
    tap_is(in_process(no_room_at_all, "none.json"), 0, "no room at all: one warning");
    idist__trace_event_quote(name, sizeof name, "ab\xc3\xa9\xc3\xa9");
    tap_like(name, "ab", "a name that is cut");
    tap_is(strlen(name), 4, "not inside a character");
    idist__trace_event_quote(name, sizeof name, "abc\xc3\xa9\xc3\xa9");
    tap_is(strlen(name), 5, "but between two");
}

int main(void) {
    tap_deadline(120);
    unsetenv("IDIST_TRACE");
    setenv("IDIST_LOG", "warn", 1);
    TAP_REQUIRE(mkdtemp(folder));
    test_marks();
    test_calls();
    test_files();
    DIR *dir = opendir(folder);
    for (struct dirent *e; dir && (e = readdir(dir)) != NULL;) {
        char whole[600];
        snprintf(whole, sizeof whole, "%s/%s", folder, e->d_name);
        if (e->d_name[0] != '.') unlink(whole);
    }
    if (dir) closedir(dir);
    rmdir(folder);
    free(text);
    return tap_done();
}
