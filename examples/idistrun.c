// idistrun: starts the ranks of a program on this host, watches them, and ends them all when one fails
//
//     cc -O2 examples/idistrun.c -o build/idistrun
//     build/idistrun -n 4 --tag ./sim args
//
// Each rank finds its place in the environment: IDIST_RANK and its siblings, and what torchrun would set, so that programs
// for PyTorch run as well. On several hosts run it once on each, with --nnodes, --node-rank, --master-addr, --master-port.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const char *const usage =
    "usage: idistrun [options] program [arguments]\n"
    "  -n, --nproc N        ranks on this host (default: one per core)\n"
    "      --nnodes N       hosts (default 1), each with as many ranks; idistrun is started on every one of them\n"
    "      --node-rank K    this one's number, from 0\n"
    "      --master-addr A  host 0, as the others reach it (default 127.0.0.1)\n"
    "      --master-port P  a free port there (default: found on one host)\n"
    "      --rdzv-id ID     the name of the job (default with --nnodes: idistrun)\n"
    "      --secret-file F  what the ranks of several hosts prove to each other\n"
    "      --max-restarts R start all ranks again when one failed, up to R times\n"
    "      --tag            each line of output begins with [rank]\n"
    "      --log-dir DIR    output of rank R to DIR/R.out and DIR/R.err instead\n"
    "      --bind           each rank stays on a core of its own\n"
    "      --grace SECONDS  between the first failure, or a signal, and SIGKILL (default 5)\n"
    "  -v                   say what happens\n";

enum { OUT, ERR, LINE_MAX_BYTES = 65536 };

typedef struct stream { // from a rank, with --tag
    int fd;
    size_t n;
    char *line; // what has come of it
} stream;

typedef struct child {
    pid_t pid; // 0: has ended
    stream streams[2];
} child;

static struct {
    int nproc, nnodes, node_rank, port, max_restarts, grace_ms;
    const char *addr, *id, *secret_file, *log_dir;
    bool tag, bind, verbose;
    char host[256];
} opt = {0, 1, 0, 0, 0, 5000, NULL, NULL, NULL, NULL, false, false, false, ""};

static child *children;
static int n_alive, signals;

static void say(const char *format, ...) {
    char text[1024];
    int n = snprintf(text, sizeof text, "idistrun: ");
    va_list args;
    va_start(args, format);
    n += vsnprintf(text + n, sizeof text - (size_t)n - 1, format, args);
    va_end(args);
    if (n > (int)sizeof text - 2) n = (int)sizeof text - 2;
    text[n++] = '\n';
    if (write(STDERR_FILENO, text, (size_t)n) < 0) return; // in one piece, between the lines of the ranks
}

static void die(const char *what) {
    say("%s: %s", what, strerror(errno));
    exit(125);
}

static long long now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000LL + t.tv_nsec / 1000000;
}

static int free_port(void) {
    struct sockaddr_in a;
    socklen_t n = sizeof a;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    memset(&a, 0, sizeof a);
    a.sin_family = AF_INET;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (fd < 0 || bind(fd, (struct sockaddr *)&a, n) != 0 || getsockname(fd, (struct sockaddr *)&a, &n) != 0)
        die("no free port");
    close(fd);
    return ntohs(a.sin_port);
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
                                           {"IDIST_LOCAL_WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_WORLD_SIZE"}};
    const long values[4] = {opt.node_rank * opt.nproc + local, opt.nnodes * opt.nproc, local, opt.nproc};
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 3; k++) set(names[i][k], values[i]);
    set("GROUP_RANK", opt.node_rank);
    set("NODE_RANK", opt.node_rank);
    set("GROUP_WORLD_SIZE", opt.nnodes);
    set("TORCHELASTIC_RESTART_COUNT", restart);
    set("TORCHELASTIC_MAX_RESTARTS", opt.max_restarts);
    setenv("TORCHELASTIC_RUN_ID", opt.id, 1);
    setenv("TORCHELASTIC_USE_AGENT_STORE", "False", 1);
    setenv("MASTER_ADDR", opt.addr, 1);
    set("MASTER_PORT", port);
    if (opt.secret_file) setenv("IDIST_SECRET_FILE", opt.secret_file, 1);
    if (opt.bind) setenv("IDIST_BIND", "core", 1);
}

static int log_file(int rank, const char *kind) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%d.%s", opt.log_dir, rank, kind);
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (fd < 0) die(path);
    return fd;
}

static void run_rank(int local, int restart, int port, char **command, const int ends[2], pid_t parent) {
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(125); // it died before that
    int null = open("/dev/null", O_RDONLY);
    if (null >= 0) dup2(null, STDIN_FILENO);
    if (null > 2) close(null);
    if (ends[OUT] >= 0) dup2(ends[OUT], STDOUT_FILENO);
    if (ends[ERR] >= 0) dup2(ends[ERR], STDERR_FILENO);
    set_environment(local, restart, port);
    execvp(command[0], command);
    int error = errno;
    fprintf(stderr, "idistrun: cannot run %s: %s\n", command[0], strerror(error));
    _exit(error == ENOENT ? 127 : 126);
}

static void start_rank(int local, int restart, int port, char **command) {
    child *c = &children[local];
    int ends[2] = {-1, -1}, rank = opt.node_rank * opt.nproc + local;
    pid_t parent = getpid();
    for (int i = 0; i < 2; i++) {
        int pipes[2];
        c->streams[i].fd = -1;
        c->streams[i].n = 0;
        if (opt.log_dir) {
            ends[i] = log_file(rank, i == OUT ? "out" : "err");
        } else if (opt.tag) {
            if (pipe2(pipes, O_CLOEXEC) != 0) die("pipe");
            c->streams[i].fd = pipes[0];
            ends[i] = pipes[1];
        }
    }
    fflush(NULL);
    c->pid = fork();
    if (c->pid < 0) die("fork");
    if (c->pid == 0) run_rank(local, restart, port, command, ends, parent);
    setpgid(c->pid, c->pid); // as the child does: whoever comes first
    for (int i = 0; i < 2; i++)
        if (ends[i] >= 0) close(ends[i]);
    if (opt.verbose) say("rank %d is process %d", rank, (int)c->pid);
    n_alive++;
}

//------------------------------------------------------------------------------
// what it says
//------------------------------------------------------------------------------

static void put_line(int rank, int kind, const char *line, size_t n) {
    char text[LINE_MAX_BYTES + 32];
    size_t at = (size_t)snprintf(text, 32, "[%d] ", rank), done = 0;
    memcpy(text + at, line, n);
    at += n;
    if (!n || line[n - 1] != '\n') text[at++] = '\n';
    while (done < at) {
        ssize_t k = write(kind == OUT ? STDOUT_FILENO : STDERR_FILENO, text + done, at - done);
        if (k < 0 && errno != EINTR) return;
        if (k > 0) done += (size_t)k;
    }
}

// Whole lines only; what is left at the end is one as well. False: the rank has closed it.
static bool read_stream(int rank, int kind, stream *s) {
    if (!s->line && !(s->line = (char *)malloc(LINE_MAX_BYTES))) die("memory");
    ssize_t k = read(s->fd, s->line + s->n, LINE_MAX_BYTES - s->n);
    if (k < 0) return errno == EINTR || errno == EAGAIN;
    s->n += (size_t)k;
    size_t from = 0;
    for (char *end; (end = (char *)memchr(s->line + from, '\n', s->n - from)) != NULL; from = (size_t)(end - s->line) + 1)
        put_line(rank, kind, s->line + from, (size_t)(end - s->line) + 1 - from);
    if ((k == 0 && from < s->n) || (from == 0 && s->n == LINE_MAX_BYTES)) {
        put_line(rank, kind, s->line + from, s->n - from);
        from = s->n;
    }
    memmove(s->line, s->line + from, s->n - from);
    s->n -= from;
    return k > 0;
}

static void close_streams(void) {
    for (int i = 0; i < 2 * opt.nproc; i++) {
        stream *s = &children[i / 2].streams[i % 2];
        while (s->fd >= 0 && poll(&(struct pollfd){s->fd, POLLIN, 0}, 1, 0) == 1 &&
               read_stream(opt.node_rank * opt.nproc + i / 2, i % 2, s))
            continue;
        if (s->fd >= 0) close(s->fd);
        s->fd = -1;
    }
}

//------------------------------------------------------------------------------
// all of them
//------------------------------------------------------------------------------

static void signal_all(int number) {
    for (int i = 0; i < opt.nproc; i++)
        if (children[i].pid > 0) kill(-children[i].pid, number);
}

// A rank has ended. Its status as a shell would say it; the first bad one is named.
static int ended(int local, int status, bool first) {
    int rank = opt.node_rank * opt.nproc + local, number = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    if (status && first && number)
        say("rank %d on host %s: killed by signal %d (%s)", rank, opt.host, number, strsignal(number));
    else if (status && first) say("rank %d on host %s: exited with status %d", rank, opt.host, WEXITSTATUS(status));
    else if (opt.verbose) say("rank %d has ended, status %d", rank, number ? 128 + number : WEXITSTATUS(status));
    kill(-children[local].pid, SIGKILL); // what it has left behind
    children[local].pid = 0;
    n_alive--;
    return number ? 128 + number : WEXITSTATUS(status);
}

static int reap(int code) {
    int status, i;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        for (i = 0; i < opt.nproc && children[i].pid != pid; i++) continue;
        if (i == opt.nproc) continue;
        int own = ended(i, status, code == 0);
        if (!code) code = own;
    }
    return code;
}

// Starts all ranks and waits for their end. *number: the signal that ended the job, or 0.
static int run(int restart, char **command, int *number) {
    struct pollfd *fds = (struct pollfd *)calloc((size_t)opt.nproc * 2 + 1, sizeof *fds);
    int port = opt.port ? opt.port : free_port(), code = 0;
    long long kill_at = -1;
    if (!fds) die("memory");
    for (int i = 0; i < opt.nproc; i++) start_rank(i, restart, port, command);
    while (n_alive) {
        struct signalfd_siginfo info;
        fds[0].fd = signals;
        fds[0].events = POLLIN;
        for (int i = 0; i < 2 * opt.nproc; i++) {
            fds[i + 1].fd = children[i / 2].streams[i % 2].fd;
            fds[i + 1].events = POLLIN;
        }
        long long left = kill_at < 0 ? -1 : kill_at - now_ms();
        if (poll(fds, (nfds_t)opt.nproc * 2 + 1, kill_at < 0 ? -1 : left < 0 ? 0 : (int)left) < 0 && errno != EINTR)
            die("poll");
        for (int i = 0; i < 2 * opt.nproc; i++) {
            stream *s = &children[i / 2].streams[i % 2];
            if (!fds[i + 1].revents || read_stream(opt.node_rank * opt.nproc + i / 2, i % 2, s)) continue;
            close(s->fd);
            s->fd = -1;
        }
        if (fds[0].revents && read(signals, &info, sizeof info) == sizeof info && info.ssi_signo != SIGCHLD) {
            if (opt.verbose) say("signal %d goes to all ranks", (int)info.ssi_signo);
            signal_all(*number ? SIGKILL : (int)info.ssi_signo); // who asks twice means it
            *number = (int)info.ssi_signo;
            if (kill_at < 0) kill_at = now_ms() + opt.grace_ms;
        }
        int before = code;
        code = reap(code);
        if (code && !before && kill_at < 0) {
            signal_all(SIGTERM);
            kill_at = now_ms() + opt.grace_ms;
        }
        if (kill_at >= 0 && now_ms() >= kill_at) {
            signal_all(SIGKILL);
            kill_at = now_ms() + 1000;
        }
    }
    close_streams();
    free(fds);
    return code;
}

static int number_of(const char *text, const char *name, int lo) {
    char *end;
    long value = strtol(text, &end, 10);
    if (end == text || *end || value < lo || value > 1000000) {
        say("%s %s: expected a whole number of at least %d", name, text, lo);
        exit(2);
    }
    return (int)value;
}

static void parse(int argc, char **argv) {
    static char own[64]; // a job on one host needs no name of the user's
    static const struct option names[] = {{"nproc", 1, NULL, 'n'},        {"nproc-per-node", 1, NULL, 'n'},
                                          {"nnodes", 1, NULL, 'N'},       {"node-rank", 1, NULL, 'k'},
                                          {"master-addr", 1, NULL, 'a'},  {"master-port", 1, NULL, 'p'},
                                          {"rdzv-id", 1, NULL, 'i'},      {"secret-file", 1, NULL, 's'},
                                          {"max-restarts", 1, NULL, 'r'}, {"tag", 0, NULL, 't'},
                                          {"log-dir", 1, NULL, 'l'},      {"bind", 0, NULL, 'b'},
                                          {"grace", 1, NULL, 'g'},        {"standalone", 0, NULL, 'S'},
                                          {"help", 0, NULL, 'h'},         {NULL, 0, NULL, 0}};
    int o;
    while ((o = getopt_long(argc, argv, "+n:vh", names, NULL)) != -1) switch (o) {
        case 'n': opt.nproc = number_of(optarg, "-n", 1); break;
        case 'N': opt.nnodes = number_of(optarg, "--nnodes", 1); break;
        case 'k': opt.node_rank = number_of(optarg, "--node-rank", 0); break;
        case 'p': opt.port = number_of(optarg, "--master-port", 1); break;
        case 'r': opt.max_restarts = number_of(optarg, "--max-restarts", 0); break;
        case 'g': opt.grace_ms = 1000 * number_of(optarg, "--grace", 0); break;
        case 'a': opt.addr = optarg; break;
        case 'i': opt.id = optarg; break;
        case 's': opt.secret_file = optarg; break;
        case 'l': opt.log_dir = optarg; break;
        case 't': opt.tag = true; break;
        case 'b': opt.bind = true; break;
        case 'v': opt.verbose = true; break;
        case 'S': break; // one host is what we do without being told
        case 'h': fputs(usage, stdout); exit(0);
        default: fputs(usage, stderr); exit(2);
        }
    if (optind >= argc) fputs(usage, stderr), exit(2);
    if (opt.node_rank >= opt.nnodes) say("--node-rank %d is not below --nnodes %d", opt.node_rank, opt.nnodes), exit(2);
    if (opt.nnodes > 1 && (!opt.addr || !opt.port)) say("--nnodes needs --master-addr and --master-port"), exit(2);
    if (!opt.addr) opt.addr = "127.0.0.1";
    snprintf(own, sizeof own, "idistrun-%d-%lld", (int)getpid(), now_ms());
    if (!opt.id) opt.id = opt.nnodes > 1 ? "idistrun" : own;
}

int main(int argc, char **argv) {
    sigset_t mask;
    cpu_set_t cpus;
    int code = 0, number = 0;
    parse(argc, argv);
    if (!opt.nproc) opt.nproc = sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? CPU_COUNT(&cpus) : 1;
    gethostname(opt.host, sizeof opt.host - 1);
    if (opt.log_dir && mkdir(opt.log_dir, 0777) != 0 && errno != EEXIST) die(opt.log_dir);
    children = (child *)calloc((size_t)opt.nproc, sizeof *children);
    if (!children) die("memory");
    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    sigaddset(&mask, SIGINT);
    sigaddset(&mask, SIGTERM);
    sigaddset(&mask, SIGHUP);
    sigaddset(&mask, SIGQUIT);
    sigprocmask(SIG_BLOCK, &mask, NULL);
    signal(SIGPIPE, SIG_IGN);
    signals = signalfd(-1, &mask, SFD_CLOEXEC);
    if (signals < 0) die("signalfd");
    for (int restart = 0; restart <= opt.max_restarts; restart++) {
        if (restart) say("starting again, %d of %d", restart, opt.max_restarts);
        code = run(restart, argv + optind, &number);
        if (code == 0 || number) break;
    }
    for (int i = 0; i < 2 * opt.nproc; i++) free(children[i / 2].streams[i % 2].line);
    free(children);
    return code ? code : number ? 128 + number : 0;
}
