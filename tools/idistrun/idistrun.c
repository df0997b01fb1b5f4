// idistrun: starts the ranks of a program, watches them, and ends them all when one fails
//
//     cc -O2 tools/idistrun/idistrun.c -o idistrun
//     ./idistrun -n 4 --tag ./sim args
//     ./idistrun --hosts alpha:4,beta:2 ./sim args
//     ./idistrun --doctor            what this machine gives, and a self test of 2 seconds
//
// Each rank finds its place in the environment: IDIST_RANK and its siblings, and what torchrun
// would set, so that programs for PyTorch run as well.
//
// With --hosts the idistrun that you call, the head, has ssh start one more on every host: the
// same file, in the same folder. IDIST_RSH is the command, if yours needs options: IDIST_RSH="ssh
// -p 2222 -i key". ssh must not ask for anything. The head tells each of them through ssh's stdin
// what to run, the variables IDIST_* of its environment (IDIST_ADDR and IDIST_HOSTID belong to one
// host and stay), a secret for the job, and later which signals to pass on; where that ends, the
// ranks do. Without ssh run idistrun once on each host, with --nnodes, --node-rank, --master-addr
// and --master-port.
//
// The first rank that fails decides: its code is idistrun's, its name is printed, all others get
// SIGTERM and, after the grace period, SIGKILL. A rank that fails after idist has told it that
// another rank was lost (IDIST_LOST_FILE) decides only if no other failure is known half a second
// later, because that other rank may be on another host. If it wrote an exception to the file
// TORCHELASTIC_ERROR_FILE, as torch's @record does, that is printed as well. SIGINT (Ctrl-C),
// SIGTERM, SIGHUP and SIGQUIT go to all ranks; a second one kills them. Codes of our own: 2 for a
// wrong option, 125 for a host that cannot be reached, 126 and 127 for a program that cannot be
// run.
//
// With --trace each rank writes its events (see idist_trace.h) to a file of its own in a temporary
// folder. When all have ended, however they did, these become one; nodes send theirs to the head.
// Of several tries the last one is in it.
#define _GNU_SOURCE
#include "doctor.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <limits.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const char *const usage =
    "usage: idistrun [options] program [arguments]\n"
    "  -n, --nproc N        ranks on this host (default: one per core); with --hosts, on each that "
    "has no :N\n"
    "      --hosts A:4,B    ranks on these hosts, started over ssh: 4 on A, 1 on B (:1 is the "
    "default)\n"
    "      --nnodes N       hosts (default 1), each with as many ranks; idistrun is started on "
    "every one of them\n"
    "      --node-rank K    this one's number, from 0\n"
    "      --master-addr A  host 0, as the others reach it (default 127.0.0.1, or the first of "
    "--hosts)\n"
    "      --master-port P  a free port there (default: found, where there is no --nnodes)\n"
    "      --rdzv-id ID     the name of the job (default with --nnodes: idistrun)\n"
    "      --secret-file F  what the ranks of several hosts prove to each other; each host has the "
    "file\n"
    "      --max-restarts R start all ranks again when one failed, up to R times\n"
    "      --tag            each line of output begins with [rank]\n"
    "      --log-dir DIR    output of rank R to DIR/R.out and DIR/R.err instead, exceptions to "
    "DIR/R.error.json\n"
    "      --error-file F   the first failure, in torchrun's format (default: "
    "TORCHELASTIC_ERROR_FILE)\n"
    "      --trace F        a timeline of all ranks, for Perfetto or examples/trace.html (with "
    "--nnodes: of those here)\n"
    "      --bind           each rank stays on a core of its own\n"
    "      --grace SECONDS  between the first failure, or a signal, and SIGKILL (default 5)\n"
    "      --doctor         say what this machine gives, and test it for 2 s; 1 if something is "
    "wrong\n"
    "  -v                   say what happens\n"
    "IDIST_RSH is the ssh of --hosts (default: ssh -o BatchMode=yes -o ConnectTimeout=10 -o "
    "ServerAliveInterval=10).\n";

// What a node's idistrun says to the head only, in lines of its stderr: RUNS at the start, FAILED
// CODE tab TEXT tab JSON, and at the end EVENT JSON for each event of the timeline.
#define MARK "\036"
#define RUNS MARK "runs"
#define FAILED MARK "failed "
#define EVENT MARK "event "

enum { OUT, ERR, LINE_BYTES = 65536, ERROR_BYTES = 60000, INSIST_MS = 400, HOLD_MS = 500 };

typedef struct host {
    const char *login, *name; // "me@beta", "beta"
    int n;                    // ranks
} host;

typedef struct stream { // what a rank writes
    int fd;
    size_t n;
    char *line; // what has come of it
} stream;

typedef struct child { // a rank, or the ssh that leads to a node
    pid_t pid;         // 0: has ended
    int to;            // ssh's stdin, or -1
    bool runs;         // the node's idistrun has said so
    bool dead;         // ended, with this status, which is still to be looked at
    int status;
    stream streams[2];
} child;

static struct {
    int nproc, nnodes, node_rank, port, max_restarts, grace_ms;
    int first, world; // rank of the first one here, and how many there are on all hosts
    const char *addr, *id, *secret_file, *log_dir, *error_file, *trace;
    bool tag, bind, verbose;
    char name[256]; // of this host
} opt = {.nnodes = 1, .grace_ms = 5000};

static host *hosts; // of --hosts
static int n_hosts;
static bool head, node; // we are one of these, or neither
static bool hears;      // the node, as long as the head is there

static child *children;
static int n_children, n_alive, signals;

static struct {
    int code;          // of the first failure
    int number;        // the signal that ends the job
    long long kill_at; // nobody has been asked to end while it is -1
} job;

// The first failure of a rank that had lost another one before, while a better one may follow.
static struct {
    int code; // 0: there is none
    char text[512], *left;
    long long until;
} held;

static void say(const char *format, ...) {
    char text[8192];
    int n = snprintf(text, sizeof text, "idistrun: ");
    va_list args;
    va_start(args, format);
    n += vsnprintf(text + n, sizeof text - (size_t)n - 1, format, args);
    va_end(args);
    if (n > (int)sizeof text - 2) n = (int)sizeof text - 2;
    text[n++] = '\n';
    if (write(STDERR_FILENO, text, (size_t)n) < 0)
        return; // in one piece, between the lines of the ranks
}

static void die(const char *what) {
    say("%s: %s", what, strerror(errno));
    exit(125);
}

static void *or_die(void *p) {
    if (!p) die("memory");
    return p;
}

static long long now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000LL + t.tv_nsec / 1000000;
}

static bool is_loopback(const char *name) {
    return strcmp(name, "localhost") == 0 || strncmp(name, "127.", 4) == 0 ||
           strcmp(name, "::1") == 0;
}

// A free port, or on a host that we cannot ask one that is likely to be.
static int find_port(void) {
    struct sockaddr_in a;
    socklen_t n = sizeof a;
    unsigned random;
    if (head && !is_loopback(hosts[0].name) && strcmp(hosts[0].name, opt.name) != 0) {
        if (getentropy(&random, sizeof random) != 0) die("getentropy");
        return 15000 + (int)(random % 10000);
    }
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    memset(&a, 0, sizeof a);
    a.sin_family = AF_INET;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (fd < 0 || bind(fd, (struct sockaddr *)&a, n) != 0 ||
        getsockname(fd, (struct sockaddr *)&a, &n) != 0)
        die("no free port");
    close(fd);
    return ntohs(a.sin_port);
}

//------------------------------------------------------------------------------
// temporary folders: $TMPDIR/idistrun-HOST-XXXXXX, with files of the ranks. The idistrun that made
// one holds a lock on it. If it is killed, the folder stays, without a lock, and the next idistrun
// of this user on this host removes it.
//------------------------------------------------------------------------------

// What ranks and idistrun write there: 3.error.json, 3.lost, trace.json, trace.3.json, nodes.
static bool is_ours(const char *name) {
    const char *digits_end = name + strspn(name, "0123456789"), *dot = strrchr(name, '.');
    if (digits_end > name && strcmp(digits_end, ".error.json") == 0) return true;
    if (digits_end > name && strcmp(digits_end, ".lost") == 0) return true;
    if (strncmp(name, "trace.", 6) == 0 && strcmp(dot, ".json") == 0) return true;
    return strcmp(name, "nodes") == 0;
}

// Removes a folder, which is open as `fd`, unless it has anything that is not ours: then a user has
// given it such a name. Closes fd, and with it the lock.
static void remove_folder(int tmp, const char *name, int fd) {
    struct dirent *e;
    DIR *dir = (DIR *)or_die(fdopendir(fd));
    bool ours = true;
    while ((e = readdir(dir)) != NULL)
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0 && !is_ours(e->d_name))
            ours = false;
    rewinddir(dir);
    while (ours && (e = readdir(dir)) != NULL)
        if (is_ours(e->d_name)) unlinkat(fd, e->d_name, 0);
    if (ours) unlinkat(tmp, name, AT_REMOVEDIR);
    closedir(dir);
}

// mkdtemp makes folders that only their user may enter.
static void remove_stale_folders(const char *tmp, const char *prefix) {
    size_t n = strlen(prefix);
    struct stat s;
    DIR *dir = opendir(tmp);
    for (struct dirent *e; dir && (e = readdir(dir)) != NULL;) {
        if (strncmp(e->d_name, prefix, n) != 0 || strlen(e->d_name) != n + 6) continue;
        int fd = openat(dirfd(dir), e->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (fd < 0) continue;
        if (fstat(fd, &s) == 0 && s.st_uid == geteuid() && (s.st_mode & 07777) == 0700 &&
            flock(fd, LOCK_EX | LOCK_NB) == 0)
            remove_folder(dirfd(dir), e->d_name, fd);
        else close(fd);
    }
    if (dir) closedir(dir);
}

// A folder of our own; "" if there can be none. The lock ends with this process. Another idistrun
// may remove the folder as a stale one in the moment before it is locked.
static void make_folder(char *path) {
    const char *tmp = getenv("TMPDIR");
    char hostname[65] = "", prefix[80];
    gethostname(hostname, sizeof hostname - 1);
    for (char *c = hostname; *c; c++)
        if (*c == '/') *c = '_';
    snprintf(prefix, sizeof prefix, "idistrun-%s-", hostname);
    if (!tmp) tmp = "/tmp";
    remove_stale_folders(tmp, prefix);
    for (int tries = 0; tries < 10; tries++) {
        snprintf(path, PATH_MAX, "%s/%sXXXXXX", tmp, prefix);
        if (!mkdtemp(path)) break;
        int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        // Another error than EWOULDBLOCK: a file system without locks, so the folder may stay.
        bool taken = fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
        if (!taken && access(path, F_OK) == 0) return;
        if (fd >= 0) close(fd);
    }
    path[0] = 0;
}

//------------------------------------------------------------------------------
// the error files of torchrun: {"message": {"message": "...", "extraInfo": {"py_callstack": "...",
// "timestamp": "..."}}}
//------------------------------------------------------------------------------

static char error_dir[PATH_MAX]; // "": there is none

static const char *error_path(int rank) {
    static char path[PATH_MAX + 32];
    snprintf(path, sizeof path, "%s/%d.error.json", error_dir, rank);
    return path;
}

// The file that a rank makes when it has lost another one.
static const char *lost_path(int rank) {
    static char path[PATH_MAX + 32];
    snprintf(path, sizeof path, "%s/%d.lost", error_dir, rank);
    return path;
}

static void remove_error_dir(void) {
    for (int i = 0; i < n_children; i++) {
        unlink(error_path(opt.first + i));
        unlink(lost_path(opt.first + i));
    }
    rmdir(error_dir);
}

static void make_error_dir(void) {
    if (opt.log_dir) {
        if (!realpath(opt.log_dir, error_dir))
            die(opt.log_dir); // the ranks may change their folder
        return;
    }
    make_folder(error_dir);
    if (error_dir[0]) atexit(remove_error_dir);
}

// One character of a string; returns its bytes.
static size_t json_char(const char **from, char *to) {
    static const char names[] = "bfnrt", meant[] = "\b\f\n\r\t";
    unsigned c, low;
    size_t n = 0;
    if (**from != '\\' || !(*from)[1]) return *to = *(*from)++, 1;
    *from += 2;
    const char *name = strchr(names, (*from)[-1]);
    if ((*from)[-1] != 'u' || strspn(*from, "0123456789abcdefABCDEF") < 4)
        return *to = name ? meant[name - names] : (*from)[-1], 1;
    sscanf(*from, "%4x", &c);
    *from += 4;
    if (c >> 10 == 0xd800 >> 10 && sscanf(*from, "\\u%4x", &low) == 1 &&
        low >> 10 == 0xdc00 >> 10) { // a pair
        c = 0x10000 + ((c & 0x3ff) << 10) + (low & 0x3ff);
        *from += 6;
    }
    if (c < 0x80) return *to = (char)c, 1;
    size_t more = c < 0x800 ? 1 : c < 0x10000 ? 2 : 3; // bytes of UTF-8 behind the first
    to[n++] = (char)((0xff00 >> (more + 1) & 0xff) | c >> 6 * more);
    while (more--) to[n++] = (char)(0x80 | (c >> 6 * more & 0x3f));
    return n;
}

// The inner "message", or the outer one if it is a string.
static bool json_message(const char *json, char *text, size_t cap) {
    size_t n = 0;
    do {
        json = strstr(json, "\"message\"");
        if (!json) return false;
        json += strlen("\"message\"");
        json += strspn(json, " :");
    } while (*json == '{');
    if (*json++ != '"') return false;
    while (*json && *json != '"' && n + 5 < cap) n += json_char(&json, text + n);
    text[n] = 0;
    return true;
}

static const char *json_of(const char *text) {
    static char json[8192];
    char quoted[3600];
    size_t n = 0;
    for (; *text && n + 7 < sizeof quoted; text++) {
        unsigned char c = (unsigned char)*text;
        if (c >= ' ' && c < 0x7f && c != '"' && c != '\\') quoted[n++] = (char)c;
        else n += (size_t)sprintf(quoted + n, "\\u%04x", c);
    }
    quoted[n] =
        0; // twice, because torchrun shows the call stack where there is one, even an empty one
    snprintf(json, sizeof json,
             "{\"message\": {\"message\": \"%s\", \"extraInfo\": {\"py_callstack\": \"%s\", "
             "\"timestamp\": \"%lld\"}}}",
             quoted, quoted, (long long)time(NULL));
    return json;
}

// What the rank has left, in one line; NULL if that is nothing, or not whole because it was killed
// over it.
static const char *error_of(int rank) {
    static char text[ERROR_BYTES];
    char first[8];
    int fd = error_dir[0] ? open(error_path(rank), O_RDONLY | O_CLOEXEC) : -1;
    ssize_t n = fd < 0 ? 0 : read(fd, text, ERROR_BYTES);
    if (fd >= 0) close(fd);
    for (ssize_t i = 0; i < n; i++)
        if (strchr("\t\r\n", text[i])) text[i] = ' '; // they stand between tokens only
    while (n > 0 && text[n - 1] == ' ') n--;
    if (n < 1 || n == ERROR_BYTES || text[n - 1] != '}') return NULL;
    text[n] = 0;
    return json_message(text, first, sizeof first) ? text : NULL;
}

// The first failure, with what the rank has left: for the user, or for the head, which may have
// heard of an earlier one.
static void report(int code, const char *text, const char *left) {
    char message[4096];
    job.code = code;
    if (node) {
        dprintf(STDERR_FILENO, FAILED "%d\t%s\t%s\n", code, text, left ? left : "");
        return;
    }
    if (left && json_message(left, message, sizeof message)) say("%s: %s", text, message);
    else say("%s", text);
    if (!opt.error_file) return;
    int fd = open(opt.error_file, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0 || dprintf(fd, "%s\n", left ? left : json_of(text)) < 0)
        say("%s: %s", opt.error_file, strerror(errno));
    if (fd >= 0) close(fd);
}

//------------------------------------------------------------------------------
// the timeline: files with an event per line, which become {"traceEvents": [...]}
//------------------------------------------------------------------------------

static char trace_dir[PATH_MAX];       // where ranks write
static char trace_path[PATH_MAX + 32]; // of the result, until it is whole
static FILE *trace_heard;              // the head: a file there with what comes from nodes

static const char *trace_file(const char *name) {
    static char path[PATH_MAX + 300];
    snprintf(path, sizeof path, "%s/%s", trace_dir, name);
    return path;
}

static void clear_trace(void) {
    DIR *dir = opendir(trace_dir);
    for (struct dirent *e; dir && (e = readdir(dir)) != NULL;)
        if (e->d_name[0] != '.') unlink(trace_file(e->d_name));
    if (dir) closedir(dir);
}

// Before each try: what an earlier one has left is of no interest.
static void begin_trace(void) {
    clear_trace();
    if (trace_heard) fclose(trace_heard);
    trace_heard = head ? (FILE *)or_die(fopen(trace_file("nodes"), "we")) : NULL;
}

static void remove_trace(void) {
    clear_trace();
    rmdir(trace_dir);
    if (trace_path[0]) unlink(trace_path);
}

static void make_trace(void) {
    make_folder(trace_dir);
    if (!trace_dir[0]) die("--trace: no temporary folder");
    atexit(remove_trace);
    if (node) return;
    snprintf(trace_path, sizeof trace_path, "%s.%d", opt.trace, (int)getpid());
    // That a file cannot be written there is known now, not after hours. A killed one leaves none.
    FILE *f = fopen(trace_path, "wxe");
    if (!f) die(opt.trace);
    fclose(f);
    unlink(trace_path);
}

// Copies the whole events of a file; of a rank that was killed the last one may be none. Returns
// how many.
static long copy_events(const char *path, FILE *to, const char *before, const char *between) {
    FILE *from = fopen(path, "re");
    char *line = NULL;
    size_t cap = 0;
    long n = 0;
    for (ssize_t k; from && (k = getline(&line, &cap, from)) > 0;) {
        while (k > 0 && strchr(", \n", line[k - 1])) line[--k] = 0;
        if (line[0] != '{' || line[k - 1] != '}') continue;
        fprintf(to, "%s%s%s", n++ ? between : before, line, node ? "\n" : "");
    }
    free(line);
    if (from) fclose(from);
    return n;
}

// All have ended: writes the result, or at a node tells the head.
static void merge_trace(void) {
    FILE *to = node ? fdopen(dup(STDERR_FILENO), "we") : fopen(trace_path, "we");
    DIR *dir = opendir(trace_dir);
    long n = 0;
    if (trace_heard) fflush(trace_heard);
    if (to && !node) fputs("{\"traceEvents\": [", to);
    for (struct dirent *e; to && dir && (e = readdir(dir)) != NULL;)
        if (e->d_name[0] != '.')
            n += copy_events(trace_file(e->d_name), to,
                             node ? EVENT
                             : n  ? ",\n"
                                  : "\n",
                             node ? EVENT : ",\n");
    if (dir) closedir(dir);
    if (to && !node) fputs("\n]}\n", to);
    bool bad = !to || ferror(to);
    if (to && fclose(to) != 0) bad = true;
    if (node) return;
    if (bad || rename(trace_path, opt.trace) != 0) say("%s: %s", opt.trace, strerror(errno));
    else trace_path[0] = 0;
    if (!bad && !n) say("%s has no events: does the program include idist_trace.h?", opt.trace);
}

//------------------------------------------------------------------------------
// one rank
//------------------------------------------------------------------------------

static void set(const char *name, long value) {
    char text[32];
    snprintf(text, sizeof text, "%ld", value);
    setenv(name, text, 1);
}

static void set_environment(int local, int restart, int port) {
    static const char *const names[][3] = {{"IDIST_RANK", "RANK", "ROLE_RANK"},
                                           {"IDIST_WORLD_SIZE", "WORLD_SIZE", "ROLE_WORLD_SIZE"},
                                           {"IDIST_LOCAL_RANK", "LOCAL_RANK", "LOCAL_RANK"},
                                           {"IDIST_LOCAL_WORLD_SIZE", "LOCAL_WORLD_SIZE",
                                            "LOCAL_WORLD_SIZE"}};
    const long values[4] = {opt.first + local, opt.world, local, opt.nproc};
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 3; k++) set(names[i][k], values[i]);
    set("GROUP_RANK", opt.node_rank);
    set("NODE_RANK", opt.node_rank);
    set("GROUP_WORLD_SIZE", opt.nnodes);
    set("TORCHELASTIC_RESTART_COUNT", restart);
    set("TORCHELASTIC_MAX_RESTARTS", opt.max_restarts);
    setenv("TORCHELASTIC_RUN_ID", opt.id, 1);
    setenv("TORCHELASTIC_USE_AGENT_STORE", "False", 1);
    if (error_dir[0]) setenv("TORCHELASTIC_ERROR_FILE", error_path(opt.first + local), 1);
    else unsetenv("TORCHELASTIC_ERROR_FILE"); // it is ours
    if (error_dir[0]) setenv("IDIST_LOST_FILE", lost_path(opt.first + local), 1);
    else unsetenv("IDIST_LOST_FILE");
    setenv("MASTER_ADDR", opt.addr, 1);
    set("MASTER_PORT", port);
    if (opt.secret_file) setenv("IDIST_SECRET_FILE", opt.secret_file, 1);
    if (opt.bind) setenv("IDIST_BIND", "core", 1);
    if (opt.trace) setenv("IDIST_TRACE", trace_file("trace.json"), 1);
}

static int log_file(int rank, const char *kind) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%d.%s", opt.log_dir, rank, kind);
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (fd < 0) die(path);
    return fd;
}

static void run_rank(int local, int restart, int port, char **command) {
    set_environment(local, restart, port);
    execvp(command[0], command);
    int error = errno;
    fprintf(stderr, "idistrun: cannot run %s: %s\n", command[0], strerror(error));
    _exit(error == ENOENT ? 127 : 126);
}

static void run_ssh(const host *h) {
    const char *rsh = getenv("IDIST_RSH");
    char self[PATH_MAX], script[4096], remote[4 * PATH_MAX + 32] = "exec '";
    ssize_t n = readlink("/proc/self/exe", self, sizeof self);
    size_t at = strlen(remote);
    for (ssize_t i = 0; i < n; i++)
        at += (size_t)sprintf(remote + at, self[i] == '\'' ? "'\\''" : "%c", self[i]);
    strcpy(remote + at, "' --node");
    snprintf(script, sizeof script, "exec %s \"$@\"",
             rsh ? rsh : "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=10");
    execl("/bin/sh", "sh", "-c", script, "sh", h->login, remote, (char *)NULL);
    _exit(127);
}

// Its stdin, stdout and stderr; -1: as ours.
static void begin_child(const int ends[3], pid_t parent) {
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    setpgid(0, 0); // so that Ctrl-C comes to us alone
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(125); // it died before that
    for (int k = 0; k < 3; k++)
        if (ends[k] >= 0) dup2(ends[k], k);
}

// A rank, or at the head the way to node i.
static void start(int i, int restart, int port, char **command) {
    child *c = &children[i];
    int ends[3], pipes[2], rank = opt.first + i;
    pid_t parent = getpid();
    c->to = -1;
    if (!head) ends[0] = open("/dev/null", O_RDONLY | O_CLOEXEC);
    else if (pipe2(pipes, O_CLOEXEC) != 0) die("pipe");
    else ends[0] = pipes[0], c->to = pipes[1];
    if (head)
        fcntl(c->to, F_SETPIPE_SZ,
              1 << 20); // long arguments do not have to wait for the connection
    c->runs = false;
    if (!head && error_dir[0]) {
        unlink(error_path(rank));
        unlink(lost_path(rank));
    }
    for (int k = 0; k < 2; k++) {
        ends[k + 1] = c->streams[k].fd = -1;
        c->streams[k].n = 0;
        if (!head && opt.log_dir) {
            ends[k + 1] = log_file(rank, k == OUT ? "out" : "err");
        } else if (opt.tag || head || node) {
            if (pipe2(pipes, O_CLOEXEC) != 0) die("pipe");
            c->streams[k].fd = pipes[0];
            ends[k + 1] = pipes[1];
        }
    }
    fflush(NULL);
    c->pid = fork();
    if (c->pid < 0) die("fork");
    if (c->pid == 0) {
        begin_child(ends, parent);
        if (head) run_ssh(&hosts[i]);
        else run_rank(i, restart, port, command);
    }
    setpgid(c->pid, c->pid); // as the child does: whoever comes first
    for (int k = 0; k < 3; k++)
        if (ends[k] >= 0) close(ends[k]);
    if (opt.verbose && head) say("the ssh to %s is process %d", hosts[i].name, (int)c->pid);
    else if (opt.verbose) say("rank %d is process %d", rank, (int)c->pid);
    n_alive++;
}

//------------------------------------------------------------------------------
// what it says
//------------------------------------------------------------------------------

// RUNS, FAILED or EVENT from node i. A failure that comes after the first one, or after a signal,
// is a consequence.
static void hear_node(int i, char *line) {
    if (strncmp(line, RUNS, strlen(RUNS)) == 0) children[i].runs = true;
    if (strncmp(line, EVENT, strlen(EVENT)) == 0 && trace_heard)
        fputs(line + strlen(EVENT), trace_heard);
    if (strncmp(line, FAILED, strlen(FAILED)) != 0) return;
    line += strlen(FAILED);
    char *text = strchr(line, '\t'), *json = text ? strchr(text + 1, '\t') : NULL;
    if (!json || atoi(line) < 1 || job.code || job.number) return;
    *json++ = 0;
    json[strcspn(json, "\n")] = 0;
    report(atoi(line), text + 1, *json ? json : NULL);
}

static void put_line(int i, int kind, const char *line, size_t n) {
    static const char *const marks[3] = {FAILED, EVENT, RUNS};
    char text[LINE_BYTES + 128], *mark = NULL;
    size_t at = 0, done = 0;
    if (opt.tag && !head) at = (size_t)snprintf(text, 32, "[%d] ", opt.first + i);
    memcpy(text + at, line, n);
    at += n;
    if (opt.tag && !head && (!n || line[n - 1] != '\n')) text[at++] = '\n';
    text[at] = 0;
    for (int m = 0; m < 3 && head && kind == ERR && !mark; m++)
        mark = (char *)memmem(text, at, marks[m], strlen(marks[m]));
    if (mark) at = (size_t)(mark - text); // a rank's last words may have had no end
    while (done < at) {
        ssize_t k = write(kind == OUT ? STDOUT_FILENO : STDERR_FILENO, text + done, at - done);
        if (k < 0 && errno != EINTR) break;
        if (k > 0) done += (size_t)k;
    }
    if (mark) hear_node(i, mark);
}

// Whole lines only; what is left at the end is one as well. Closes a stream that has ended.
static void read_stream(int i, int kind) {
    stream *s = &children[i].streams[kind];
    size_t cap = head ? LINE_BYTES + 64 : LINE_BYTES, from = 0; // a node's line may have a tag
    if (!s->line) s->line = (char *)or_die(malloc(cap));
    ssize_t k = read(s->fd, s->line + s->n, cap - s->n);
    if (k < 0 && (errno == EINTR || errno == EAGAIN)) return;
    if (k > 0) s->n += (size_t)k;
    for (char *end; (end = (char *)memchr(s->line + from, '\n', s->n - from)) != NULL;
         from = (size_t)(end - s->line) + 1)
        put_line(i, kind, s->line + from, (size_t)(end - s->line) + 1 - from);
    if ((k <= 0 && from < s->n) || (from == 0 && s->n == cap)) {
        put_line(i, kind, s->line + from, s->n - from);
        from = s->n;
    }
    memmove(s->line, s->line + from, s->n - from);
    s->n -= from;
    if (k > 0) return;
    close(s->fd);
    s->fd = -1;
}

// What a child has said before it ended; not what somebody that it left behind may go on to say.
static void drain(int i) {
    for (int kind = 0; kind < 2; kind++) {
        stream *s = &children[i].streams[kind];
        for (int k = 0; k < 64 && s->fd >= 0 && poll(&(struct pollfd){s->fd, POLLIN, 0}, 1, 0) == 1;
             k++)
            read_stream(i, kind);
        if (s->fd >= 0 && s->n) put_line(i, kind, s->line, s->n);
        if (s->fd >= 0) close(s->fd);
        s->fd = -1;
    }
}

//------------------------------------------------------------------------------
// the nodes of --hosts: what the head tells them, each item ended by a zero
//------------------------------------------------------------------------------

// Everything goes through ssh's stdin: command lines are for all to see, and shells would take them
// apart.
static void tell_node(int i, int restart, int port, char **argv) {
    char folder[PATH_MAX];
    int to = children[i].to;
    if (!getcwd(folder, sizeof folder)) die("getcwd");
    dprintf(to, "dir %s%c", folder, 0);
    for (char **e = environ; *e; e++)
        if (strncmp(*e, "IDIST_", 6) == 0 && strncmp(*e, "IDIST_ADDR=", 11) != 0 &&
            strncmp(*e, "IDIST_HOSTID=", 13) != 0)
            dprintf(to, "set %s%c", *e, 0);
    while (*++argv) dprintf(to, "arg %s%c", *argv, 0);
    dprintf(to, "go %d %d %d %s %s%c", i, restart, port, opt.addr, opt.id, 0);
}

// The node's side. It has the head's own arguments then, to be read as any other; returns the
// number of the restart.
static int hear_settings(int *argc, char ***argv) {
    char *text = NULL, addr[256];
    size_t cap = 0;
    int restart, at;
    *argc = 1;
    *argv = NULL;
    setvbuf(stdin, NULL, _IONBF, 0); // a signal that follows is for poll to see
    while (getdelim(&text, &cap, 0, stdin) > 4) {
        if (strncmp(text, "dir ", 4) == 0 && chdir(text + 4) != 0) die(text + 4);
        if (strncmp(text, "set ", 4) == 0) putenv((char *)or_die(strdup(text + 4)));
        if (strncmp(text, "arg ", 4) == 0) {
            *argv = (char **)or_die(realloc(*argv, ((size_t)*argc + 2) * sizeof **argv));
            (*argv)[0] = program_invocation_name;
            (*argv)[(*argc)++] = (char *)or_die(strdup(text + 4));
            (*argv)[*argc] = NULL;
        }
        if (sscanf(text, "go %d %d %d %255s %n", &opt.node_rank, &restart, &opt.port, addr, &at) <
            4)
            continue;
        opt.addr = (char *)or_die(strdup(addr));
        opt.id = (char *)or_die(strdup(text + at));
        free(text);
        return restart;
    }
    exit(125);
}

static void make_secret(void) {
    unsigned char bytes[32];
    char text[65];
    if (opt.secret_file || getenv("IDIST_SECRET") || getenv("IDIST_SECRET_FILE")) return;
    if (getentropy(bytes, sizeof bytes) != 0) die("getentropy");
    for (int i = 0; i < 32; i++) sprintf(text + 2 * i, "%02x", bytes[i]);
    setenv("IDIST_SECRET", text, 1);
}

//------------------------------------------------------------------------------
// all of them
//------------------------------------------------------------------------------

static void signal_all(int number) {
    for (int i = 0; i < n_children; i++) {
        child *c = &children[i];
        if (c->to < 0 && c->pid > 0) kill(-c->pid, number);
        if (c->to < 0) continue;
        dprintf(c->to, "signal %d%c", number, 0);
        if (number != SIGKILL) continue;
        close(c->to); // the next one is for ssh itself
        c->to = -1;
    }
}

// Somebody wants the job to end. Who asks twice means it.
static void interrupt(int number) {
    bool again = job.kill_at >= 0,
         told = again && !job.number && number == SIGTERM; // told so when the first one failed
    if (opt.verbose) say("signal %d goes to all ranks", number);
    job.number = number;
    if (told) return;
    signal_all(again ? SIGKILL : number);
    job.kill_at = now_ms() + (again ? INSIST_MS : opt.grace_ms);
}

static const char *cause_of(int status) {
    static char text[100];
    int number = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    if (number) snprintf(text, sizeof text, "killed by signal %d (%s)", number, strsignal(number));
    else snprintf(text, sizeof text, "exited with status %d", WEXITSTATUS(status));
    return text;
}

// The way to a node has ended, and no failure was reported from there.
static void lost_node(int i, int status) {
    const char *name = hosts[i].name;
    char text[512];
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : 0;
    if (!code) snprintf(text, sizeof text, "host %s: its ssh was %s", name, cause_of(status));
    else if (!children[i].runs)
        snprintf(text, sizeof text, "host %s: %s (ssh ended with status %d)", name,
                 code == 255 ? "no connection" : "idistrun did not run there", code);
    else if (code == 255)
        snprintf(text, sizeof text,
                 "host %s: the connection or idistrun there was lost (ssh ended with status 255)",
                 name);
    else
        snprintf(text, sizeof text,
                 "host %s: idistrun ended there without a report (status %d%s%s)", name, code,
                 code > 128 ? ": " : "", code > 128 ? strsignal(code - 128) : "");
    report(125, text, NULL);
}

// A rank has failed. If it had lost another one before, its failure is only kept for now.
static void failed(int rank, int code, int status, bool is_kept) {
    const char *left = error_of(rank);
    char text[512];
    snprintf(text, sizeof text, "rank %d on host %s: %s%s", rank, opt.name, cause_of(status),
             is_kept ? ", after it had lost another rank" : "");
    if (!is_kept) report(code, text, left);
    if (!is_kept || held.code) return;
    held.code = code;
    strcpy(held.text, text);
    held.left = left ? (char *)or_die(strdup(left)) : NULL;
    held.until = now_ms() + HOLD_MS;
}

// Half a second later, or when all ranks of the job have ended, there is no better failure.
static void report_held(void) {
    bool may_wait = (n_alive || node) && !job.code && !job.number;
    if (!held.code || (may_wait && now_ms() < held.until)) return;
    if (!job.code && !job.number) report(held.code, held.text, held.left);
    free(held.left);
    held.code = 0;
    held.left = NULL;
}

// A child has ended. The first that failed by itself is named, and its status is the job's, as a
// shell would say it.
static void ended(int i, int status) {
    int rank = opt.first + i;
    int code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    bool had_lost = !head && error_dir[0] && unlink(lost_path(rank)) == 0;
    child *c = &children[i];
    kill(-c->pid, SIGKILL); // what it has left behind
    c->pid = 0;
    n_alive--;
    if (c->to >= 0) close(c->to);
    c->to = -1;
    drain(i);
    if (opt.verbose && !head) say("rank %d has ended, status %d", rank, code);
    if (!code || job.code) return;
    if (job.number) {
        job.code = job.number == SIGINT ? 128 + SIGINT
                                        : code; // to some programs Ctrl-C is one exception more
    } else if (head) {                          // of a rank's failure it would have told us
        lost_node(i, status);
    } else {
        failed(rank, code, status, had_lost);
    }
}

// Of children found dead at one time, the one that a signal killed comes first: the others may have
// failed because of it.
static void reap(void) {
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;)
        for (int i = 0; i < n_children; i++)
            if (children[i].pid == pid) children[i].dead = true, children[i].status = status;
    for (int killed = 1; killed >= 0; killed--)
        for (int i = 0; i < n_children; i++)
            if (children[i].dead && WIFSIGNALED(children[i].status) == killed) {
                children[i].dead = false;
                ended(i, children[i].status);
            }
}

// From the head. Without it there is no job.
static void hear_head(void) {
    static char *text;
    static size_t cap;
    int number;
    if (getdelim(&text, &cap, 0, stdin) > 0) {
        if (sscanf(text, "signal %d", &number) == 1) interrupt(number);
    } else {
        hears = false;
        if (job.kill_at < 0) interrupt(SIGTERM);
    }
}

static void wait_for_something(struct pollfd *fds) {
    struct signalfd_siginfo info;
    int n = 2;
    long long next = job.kill_at, left;
    if (held.code && (next < 0 || held.until < next)) next = held.until;
    left = next < 0 ? -1 : next - now_ms();
    fds[0] = (struct pollfd){signals, POLLIN, 0};
    fds[1] = (struct pollfd){hears ? STDIN_FILENO : -1, POLLIN, 0};
    for (int i = 0; i < 2 * n_children; i++)
        fds[n++] = (struct pollfd){children[i / 2].streams[i % 2].fd, POLLIN, 0};
    if (poll(fds, (nfds_t)n, next < 0 ? -1 : left < 0 ? 0 : (int)left) < 0 && errno != EINTR)
        die("poll");
    for (int i = 0; i < 2 * n_children; i++)
        if (fds[i + 2].revents) read_stream(i / 2, i % 2);
    if (fds[0].revents && read(signals, &info, sizeof info) == sizeof info &&
        info.ssi_signo != SIGCHLD)
        interrupt((int)info.ssi_signo);
    if (fds[1].revents) hear_head();
}

// Starts all children and waits for their end.
static void run(int restart, char **argv, char **command) {
    struct pollfd *fds = (struct pollfd *)or_die(calloc((size_t)n_children * 2 + 2, sizeof *fds));
    int port = opt.port ? opt.port : find_port();
    struct stat st;
    job.code = 0;
    job.kill_at = -1;
    if (opt.trace) begin_trace();
    if (opt.error_file && lstat(opt.error_file, &st) == 0 && S_ISREG(st.st_mode))
        unlink(opt.error_file); // of another try
    for (int i = 0; i < n_children; i++) {
        start(i, restart, port, command);
        if (head) tell_node(i, restart, port, argv);
    }
    while (n_alive || held.code) {
        wait_for_something(fds);
        reap();
        report_held();
        if (job.code && job.kill_at < 0) {
            signal_all(SIGTERM);
            job.kill_at = now_ms() + opt.grace_ms;
        } else if (job.kill_at >= 0 && now_ms() >= job.kill_at) {
            signal_all(SIGKILL);
            job.kill_at = now_ms() + INSIST_MS;
        }
    }
    free(fds);
}

//------------------------------------------------------------------------------
// options
//------------------------------------------------------------------------------

static int number_of(const char *text, const char *name, int lo) {
    char *end;
    long value = strtol(text, &end, 10);
    if (end == text || *end || value < lo || value > 1000000) {
        say("%s %s: expected a whole number of at least %d", name, text, lo);
        exit(2);
    }
    return (int)value;
}

// "alpha:4,me@beta,[fe80::1]:2"
static void parse_hosts(const char *list) {
    for (char *at = strtok((char *)or_die(strdup(list)), ","); at; at = strtok(NULL, ",")) {
        char *colon = strrchr(at, ':'), *close = strchr(at, ']'), *user;
        hosts = (host *)or_die(realloc(hosts, ((size_t)n_hosts + 1) * sizeof *hosts));
        host *h = &hosts[n_hosts++];
        h->n = opt.nproc ? opt.nproc : 1;
        if (*at == '[' && close) at++, colon = *(close + 1) == ':' ? close + 1 : NULL, *close = 0;
        else if (colon != strchr(at, ':')) colon = NULL; // an IPv6 address
        if (colon) h->n = number_of(colon + 1, "--hosts", 1), *colon = 0;
        user = strchr(at, '@');
        h->login = at;
        h->name = user ? user + 1 : at;
        if (!*h->name || *at == '-') say("--hosts %s: a host has no name", list), exit(2);
    }
    if (!hosts) say("--hosts: expected a list like alpha:4,beta:2"), exit(2);
}

// Where our ranks are among all.
static void place(const char *list) {
    static char own[64]; // a job that we start as a whole needs no name of the user's
    bool loopback = true, both = list && (opt.nnodes > 1 || (opt.node_rank && !node));
    cpu_set_t cpus;
    if (both) say("--hosts and --nnodes are two ways: take one"), exit(2);
    if (opt.nnodes > 1 && (!opt.addr || !opt.port))
        say("--nnodes needs --master-addr and --master-port"), exit(2);
    if (!opt.nproc && !list)
        opt.nproc = sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? CPU_COUNT(&cpus) : 1;
    if (list) parse_hosts(list), opt.nnodes = n_hosts;
    if (opt.node_rank >= opt.nnodes)
        say("--node-rank %d is not below --nnodes %d", opt.node_rank, opt.nnodes), exit(2);
    for (int i = 0; i < opt.nnodes; i++) {
        int n = list ? hosts[i].n : opt.nproc;
        if (i < opt.node_rank) opt.first += n;
        opt.world += n;
        loopback = loopback && list && is_loopback(hosts[i].name);
    }
    if (list) {
        head = !node;
        opt.nproc = hosts[opt.node_rank].n;
        if (node) snprintf(opt.name, sizeof opt.name, "%s", hosts[opt.node_rank].name);
        // Others would look for "localhost" at home.
        if (!opt.addr)
            opt.addr = is_loopback(hosts[0].name) && !loopback ? opt.name : hosts[0].name;
        if (head) make_secret();
    }
    if (!opt.addr) opt.addr = "127.0.0.1";
    snprintf(own, sizeof own, "idistrun-%d-%lld", (int)getpid(), now_ms());
    if (!opt.id) opt.id = opt.nnodes > 1 && !list ? "idistrun" : own;
    n_children = head ? n_hosts : opt.nproc;
}

static void parse(int argc, char **argv) {
    static const struct option names[] = {
        {"nproc", 1, NULL, 'n'},        {"nproc-per-node", 1, NULL, 'n'},
        {"hosts", 1, NULL, 'H'},        {"nnodes", 1, NULL, 'N'},
        {"node-rank", 1, NULL, 'k'},    {"master-addr", 1, NULL, 'a'},
        {"master-port", 1, NULL, 'p'},  {"rdzv-id", 1, NULL, 'i'},
        {"secret-file", 1, NULL, 's'},  {"error-file", 1, NULL, 'e'},
        {"max-restarts", 1, NULL, 'r'}, {"tag", 0, NULL, 't'},
        {"trace", 1, NULL, 'T'},        {"log-dir", 1, NULL, 'l'},
        {"bind", 0, NULL, 'b'},         {"grace", 1, NULL, 'g'},
        {"standalone", 0, NULL, 'S'},   {"doctor", 0, NULL, 'd'},
        {"help", 0, NULL, 'h'},         {NULL, 0, NULL, 0}};
    const char *list = NULL;
    int o;
    while ((o = getopt_long(argc, argv, "+n:vh", names, NULL)) != -1) switch (o) {
        case 'n': opt.nproc = number_of(optarg, "-n", 1); break;
        case 'H': list = optarg; break;
        case 'N': opt.nnodes = number_of(optarg, "--nnodes", 1); break;
        case 'k': opt.node_rank = number_of(optarg, "--node-rank", 0); break;
        case 'p': opt.port = number_of(optarg, "--master-port", 1); break;
        case 'r': opt.max_restarts = number_of(optarg, "--max-restarts", 0); break;
        case 'g': opt.grace_ms = 1000 * number_of(optarg, "--grace", 0); break;
        case 'a': opt.addr = optarg; break;
        case 'i': opt.id = optarg; break;
        case 's': opt.secret_file = optarg; break;
        case 'e': opt.error_file = optarg; break;
        case 'l': opt.log_dir = optarg; break;
        case 'T': opt.trace = optarg; break;
        case 't': opt.tag = true; break;
        case 'b': opt.bind = true; break;
        case 'v': opt.verbose = true; break;
        case 'S': break; // one host is what we do without being told
        case 'd': exit(doctor_run());
        case 'h': fputs(usage, stdout); exit(0);
        default: fputs(usage, stderr); exit(2);
        }
    if (optind >= argc) fputs(usage, stderr), exit(2);
    place(list);
}

static void prepare(void) {
    static const int numbers[] = {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT};
    sigset_t mask;
    children = (child *)or_die(calloc((size_t)n_children, sizeof *children));
    if (!head && opt.log_dir && mkdir(opt.log_dir, 0777) != 0 && errno != EEXIST) die(opt.log_dir);
    if (!head) make_error_dir();
    if (opt.trace) make_trace();
    if (!opt.error_file) opt.error_file = getenv("TORCHELASTIC_ERROR_FILE");
    if (node) opt.error_file = NULL; // the head writes it
    sigemptyset(&mask);
    for (int i = 0; i < 5; i++) sigaddset(&mask, numbers[i]);
    sigprocmask(SIG_BLOCK, &mask, NULL);
    signal(SIGPIPE, SIG_IGN);
    signals = signalfd(-1, &mask, SFD_CLOEXEC);
    if (signals < 0) die("signalfd");
}

int main(int argc, char **argv) {
    int restart = 0;
    gethostname(opt.name, sizeof opt.name - 1);
    node = hears = argc == 2 && strcmp(argv[1], "--node") == 0;
    if (node) {
        restart = hear_settings(&argc, &argv);
        dprintf(STDERR_FILENO, RUNS "\n");
    }
    parse(argc, argv);
    prepare();
    run(restart, argv, argv + optind);
    while (job.code && !job.number && !node && restart < opt.max_restarts) {
        say("starting again, %d of %d", ++restart, opt.max_restarts);
        run(restart, argv, argv + optind);
    }
    if (opt.trace) merge_trace();
    return job.code ? job.code : job.number ? 128 + job.number : 0;
}
