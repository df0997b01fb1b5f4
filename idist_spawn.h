/* idist_spawn.h - v0.1.0 - worker processes - MIT licence

    Part of the implementation of idist; idist.h includes it where IDIST_IMPLEMENTATION is defined.

CONTENTS

      [spawn:spawn]  worker processes, and Ignite's Parallel
*/
#ifndef IDIST_SPAWN_H
#define IDIST_SPAWN_H

//------------------------------------------------------------------------------
// [spawn:spawn]  worker processes, and Ignite's Parallel
// uses os err mem base:log sock auth store config world life
//------------------------------------------------------------------------------

// What a worker leaves for its parent.
typedef struct idist__desk {
    int finished;  // returned from fn, and its result is in `code`
    int secondary; // failed because another rank was lost
    int code;
    int exec_errno; // the program could not be run anew
    int arrived;    // run anew, it has come to its call
    char text[400]; // its last error
} idist__desk;

// The memory that workers and parent share. A worker that runs the program anew knows nothing else
// of its parent.
typedef struct idist__hall {
    char magic[8];
    int first_rank, listener;
    idist__secret secret;
    char where[sizeof((idist__config *)0)->where];
    idist__desk desks[1]; // n of them
} idist__hall;

typedef struct idist__worker {
    pid_t pid;
    int pidfd;        // -1: this kernel has none, or the worker was reaped
    bool ended, lost; // lost: the program reaped it behind our back, so how it ended is not known
    bool late;        // run anew, it did not come to its call in time
    int wait_status;
} idist__worker;

struct idist_workers {
    idist__config cfg; // of worker 0
    idist_backend_list backends;
    idist_worker_fn fn;
    void *arg;
    int n, first_rank;
    int call; // the how manieth of this process
    idist__worker *workers;
    struct pollfd *fds; // for n
    idist__hall *hall;
    size_t hall_nbytes;
    int hall_fd; // -1: workers inherit the mapping itself
    idist__log log;
    int first_failed; // index, -1: none so far
    int running;
    int64_t decide_at,
        next_at;       // when the first failure is decided on; when the next signal goes out
    int64_t arrive_at; // when all that were run anew must have come to their call
    int stage;         // of ending the others: 0 none, 1 grace, 2 SIGTERM or SIGKILL was sent
    int grace_ms;
    bool keep_going;
    idist_report *report; // the caller's, or NULL
};

static bool idist__is_worker; // this process

static void idist__worker_run(idist_workers *sp, int i) {
    idist__desk *desk = &sp->hall->desks[i];
    idist__config *cfg = &sp->cfg;
    idist__world *w = NULL;
    idist_status s;
    int code;

    idist__is_worker = true;
    if (i != 0) idist__os_close(&cfg->listener);
    cfg->rank = sp->first_rank + i;
    cfg->local_rank = i;
    cfg->lost = &desk->secondary;
    s = idist__world_open(cfg, sp->backends, &w);
    if (s == IDIST_OK) {
        __atomic_store_n(&idist__default_world, w, __ATOMIC_RELEASE);
        idist__me.text[0] = 0; // what is said of its failure shall be of its own
        code = sp->fn(i, sp->arg);
        desk->code = code & 255 ? code & 255 : code != 0;
        idist__copy_text(desk->text, sizeof desk->text, code ? idist__me.text : "");
        w = idist__world_default(); // fn may have finalized by itself
        if (w) s = idist__world_close(w, code != 0);
        if (s != IDIST_OK && !code && !desk->secondary) desk->code = 1;
    } else {
        desk->code = 1;
        desk->secondary = s == IDIST_ERR_PEER_LOST || s == IDIST_ERR_TIMEOUT;
    }

    if (desk->code && !desk->text[0])
        idist__copy_text(desk->text, sizeof desk->text, idist__me.text);
    __atomic_store_n(&desk->finished, 1, __ATOMIC_RELEASE);
    if (sp->hall_fd < 0) fflush(NULL);
    fflush(stdout); // all of them would wait for a thread of main that sits in a read
    fflush(stderr);
    _exit(desk->code);
}

// ---- workers that run the program anew ----

// Everything such a worker is made of, prepared before the fork: after it only simple system calls
// are allowed, since other threads may have held any lock.
typedef struct idist__rerun {
    char path[4096], var[80]; // var: IDIST_SPAWN=, see idist__rerun_find
    char *args;               // of this process, one after the other
    char **argv, **envp;
} idist__rerun;

static void idist__rerun_free(idist__rerun *r, const idist_allocator *mem) {
    idist__mem_free(mem, r->args);
    idist__mem_free(mem, r->argv);
    idist__mem_free(mem, r->envp);
}

static idist_status idist__rerun_make(idist__rerun *r, const idist_allocator *mem) {
    extern char **environ;
    size_t nbytes = 0, cap = 0, argc = 0, envc = 0, i, n;
    ssize_t got = readlink("/proc/self/exe", r->path, sizeof r->path - 1);
    int fd = got > 0 ? open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC) : -1;

    if (fd < 0)
        return idist__fail(
            IDIST_ERR_SYSTEM,
            "spawn: start_method \"exec\" finds the program in /proc (self/exe and self/cmdline), "
            "which "
            "cannot be read: %s. Mount /proc, or take start_method \"fork\" or a launcher",
            strerror(errno));
    r->path[got] = 0;

    for (got = 1; got > 0; nbytes += (size_t)got) {
        if (!idist__buffer_reserve(mem, &r->args, &cap, nbytes, nbytes + 4096)) break;
        do got = read(fd, r->args + nbytes, cap - nbytes - 1);
        while (got < 0 && errno == EINTR);
        if (got < 0) got = 0;
    }

    close(fd);
    for (i = 0; r->args && i < nbytes; i++) argc += !r->args[i];
    while (environ && environ[envc]) envc++;
    r->argv = (char **)idist__mem_alloc(mem, (argc + 1) * sizeof *r->argv);
    r->envp = (char **)idist__mem_alloc(mem, (envc + 2) * sizeof *r->envp);
    if (!r->args || !r->argv || !r->envp) return IDIST_ERR_NO_MEMORY;
    for (i = n = 0; n < argc; i += strlen(r->args + i) + 1) r->argv[n++] = r->args + i;
    r->envp[0] = r->var;
    for (i = 0, n = 1; i < envc; i++)
        if (strncmp(environ[i], "IDIST_SPAWN=", 12) != 0) r->envp[n++] = environ[i];

    return IDIST_OK;
}

static int idist__spawn_calls; // of this process, atomic

// In the child. Its descriptors of the hall and, for worker 0, of the listener go with it. The last
// number of the variable is its own process id.
static void idist__rerun_exec(idist_workers *sp, idist__rerun *r, int i) {
    char *at = r->var + strlen(r->var), digits[16];
    int pid = (int)getpid(), n = 0;

    for (; pid; pid /= 10) digits[n++] = (char)('0' + pid % 10);
    while (n) *at++ = digits[--n];
    fcntl(sp->hall_fd, F_SETFD, 0);
    if (i == 0 && sp->cfg.listener >= 0) fcntl(sp->cfg.listener, F_SETFD, 0);
    execve(r->path, r->argv, r->envp);
    execve("/proc/self/exe", r->argv, r->envp); // it was replaced or removed
    sp->hall->desks[i].exec_errno = errno;
    _exit(127);
}

// Whether this process was made to run one call of idist_spawn, and which:
// "call,worker,descriptor,pid". The variable is in the environment of what the worker starts, too,
// hence the pid.
static bool idist__rerun_find(int *call, int *worker, int *fd) {
    const char *text = idist__os_env("IDIST_SPAWN");
    int pid = 0, end = 0;
    return text && sscanf(text, "%d,%d,%d,%d%n", call, worker, fd, &pid, &end) == 4 && !text[end] &&
           pid == (int)getpid();
}

// This process is worker i of the call it has come to, and ends in here.
static idist_status idist__rerun_worker(idist_workers *sp, int i, int fd) {
    struct stat st;
    idist__hall *hall = NULL;
    char magic[8];
    pid_t parent = getppid();

    prctl(PR_SET_PDEATHSIG, SIGKILL); // a program with capabilities has lost it
    if (getppid() != parent) _exit(1);
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    if (pread(fd, magic, 8, 0) != 8 ||
        memcmp(magic, "IDSPAWN1", 8) != 0) // never on as if it were the parent
        return idist__fail(
            IDIST_ERR_STATE,
            "spawn: the program, run anew, has closed descriptors that it did not open");
    if (fstat(fd, &st) == 0 && (size_t)st.st_size == sp->hall_nbytes)
        hall =
            (idist__hall *)mmap(NULL, sp->hall_nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (!hall || (void *)hall == MAP_FAILED || i < 0 || i >= sp->n)
        return idist__fail(IDIST_ERR_STATE,
                           "spawn: the program, run anew, asks for another number of workers");
    __atomic_store_n(&hall->desks[i].arrived, 1, __ATOMIC_RELEASE);
    sp->hall_fd = fd;
    sp->hall = hall;
    sp->first_rank = hall->first_rank;
    sp->cfg.secret = hall->secret;
    sp->cfg.listener = i == 0 ? hall->listener : -1;
    if (sp->cfg.listener >= 0) fcntl(sp->cfg.listener, F_SETFD, FD_CLOEXEC);
    memcpy(sp->cfg.where, hall->where, sizeof hall->where);
    idist__worker_run(sp, i);

    return IDIST_OK; // not reached
}

// ---- the parent's part ----

// One worker. It dies with the thread that started it: by signal, and by looking whether the parent
// went before it asked for that.
static idist_status idist__spawn_fork(idist_workers *sp, idist__rerun *rerun, int i) {
    pid_t parent = getpid(), pid;

    if (rerun)
        snprintf(rerun->var, sizeof rerun->var, "IDIST_SPAWN=%d,%d,%d,", sp->call, i, sp->hall_fd);
    pid = fork();
    if (pid < 0) return idist__fail_errno("fork", errno);

    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(1);
        if (rerun) idist__rerun_exec(sp, rerun, i);
        pthread_mutex_init(&idist__log_lock,
                           NULL); // another thread may have held them during the fork
        pthread_mutex_init(&idist__life_lock, NULL);
        pthread_mutex_init(&idist__default_lock, NULL);
        memset(&idist__me, 0, sizeof idist__me);
        __atomic_store_n(&idist__default_world, (idist__world *)NULL, __ATOMIC_RELEASE);
        idist__worker_run(sp, i);
    }

    sp->workers[i].pid = pid;
    sp->running++;

    return IDIST_OK;
}

static bool idist__worker_failed(const idist_workers *sp, int i) {
    const idist__worker *k = &sp->workers[i];
    return k->ended && !(WIFEXITED(k->wait_status) && WEXITSTATUS(k->wait_status) == 0 &&
                         __atomic_load_n(&sp->hall->desks[i].finished, __ATOMIC_ACQUIRE));
}

// Collects the workers that ended. Returns whether one did.
static bool idist__spawn_reap(idist_workers *sp) {
    bool any = false;
    int i;

    for (i = 0; i < sp->n; i++) {
        idist__worker *k = &sp->workers[i];
        idist__desk *desk = &sp->hall->desks[i];
        pid_t rc;
        if (k->ended || k->pid <= 0) continue;
        do rc = waitpid(k->pid, &k->wait_status, WNOHANG);
        while (rc < 0 && errno == EINTR);
        if (rc == 0) continue;
        if (rc < 0)
            k->lost = !__atomic_load_n(&desk->finished, __ATOMIC_ACQUIRE); // else its desk tells
        if (rc < 0) k->wait_status = k->lost ? 0x7f00 : desk->code << 8;
        k->ended = any = true;
        sp->running--;
        idist__os_close(&k->pidfd);
    }

    return any;
}

// The first failure is the first that did not follow from another: a rank that ends because its
// peer was killed may well be reaped before that peer. While only such are known the decision waits
// a little.
static void idist__spawn_judge(idist_workers *sp) {
    int i, secondary = -1;

    for (i = 0; i < sp->n && sp->first_failed < 0; i++) {
        if (!idist__worker_failed(sp, i)) continue;
        if (!__atomic_load_n(&sp->hall->desks[i].secondary, __ATOMIC_ACQUIRE)) sp->first_failed = i;
        else if (secondary < 0) secondary = i;
    }

    if (sp->first_failed >= 0 || secondary < 0) return;
    if (sp->decide_at == IDIST__FOREVER) sp->decide_at = idist__os_deadline(500);
    if (!sp->running || idist__os_ms_until(sp->decide_at) == 0) sp->first_failed = secondary;
}

static void idist__worker_signal(const idist__worker *k, int sig) {
    if (k->ended || k->pid <= 0) return;
    if (syscall(424 /* pidfd_send_signal */, k->pidfd, sig, NULL, 0) != 0 && errno != ESRCH)
        kill(k->pid, sig); // no pidfd
}

static void idist__spawn_signal(idist_workers *sp, int sig) {
    int i;
    for (i = 0; i < sp->n; i++) idist__worker_signal(&sp->workers[i], sig);
}

// A program that is run anew and never comes to its call would be waited for without an end.
static void idist__spawn_expect(idist_workers *sp) {
    int i;

    if (sp->arrive_at == IDIST__FOREVER || idist__os_ms_until(sp->arrive_at) != 0) return;
    sp->arrive_at = IDIST__FOREVER;

    for (i = 0; i < sp->n; i++) {
        if (sp->workers[i].ended || __atomic_load_n(&sp->hall->desks[i].arrived, __ATOMIC_ACQUIRE))
            continue;
        sp->workers[i].late = true;
        idist__worker_signal(&sp->workers[i], SIGKILL);
    }
}

static void idist__spawn_sleep(idist_workers *sp, int64_t until_ns) {
    int i, n = 0, ms = idist__os_ms_until(until_ns);
    bool blind = false;

    for (i = 0; i < sp->n; i++) {
        if (sp->workers[i].ended) continue;
        if (sp->workers[i].pidfd < 0) blind = true;
        sp->fds[n].fd = sp->workers[i].pidfd;
        sp->fds[n++].events = POLLIN;
    }

    if (blind && (ms < 0 || ms > 5)) ms = 5; // no pidfd: look often
    poll(sp->fds, (nfds_t)n, ms);
}

// Looks after the workers, once. After a first failure: grace, SIGTERM, 400 ms, SIGKILL.
static void idist__spawn_turn(idist_workers *sp) {
    if (idist__spawn_reap(sp) || sp->decide_at != IDIST__FOREVER) idist__spawn_judge(sp);
    if (!sp->running) return;
    idist__spawn_expect(sp);

    if (sp->stage == 0 && sp->first_failed >= 0 && !sp->keep_going) {
        sp->stage = 1;
        sp->next_at = idist__os_deadline(sp->grace_ms);
    } else if (sp->stage >= 1 && idist__os_ms_until(sp->next_at) == 0) {
        idist__log_print(&sp->log, IDIST_LOG_INFO, "spawn: %d workers still run: %s", sp->running,
                         sp->stage == 1 ? "SIGTERM" : "SIGKILL");
        idist__spawn_signal(sp, sp->stage == 1 ? SIGTERM : SIGKILL);
        if (sp->stage == 1) idist__spawn_signal(sp, SIGCONT); // a stopped one must hear it
        sp->next_at = idist__os_deadline(sp->stage == 1 ? 400 : 1000);
        sp->stage = 2;
    }
}

static idist_status idist__spawn_report(idist_workers *sp) {
    idist_report r;
    const idist__desk *desk;
    int ws;

    memset(&r, 0, sizeof r);
    r.rank = -1;

    if (sp->first_failed >= 0) {
        desk = &sp->hall->desks[sp->first_failed];
        ws = sp->workers[sp->first_failed].wait_status;
        r.rank = sp->first_rank + sp->first_failed;
        r.exit_code = WIFEXITED(ws) && !sp->workers[sp->first_failed].lost ? WEXITSTATUS(ws) : -1;
        r.signal = WIFSIGNALED(ws) ? WTERMSIG(ws) : 0;
        if (desk->exec_errno)
            snprintf(r.text, sizeof r.text, "rank %d: the program could not be run anew: %s",
                     r.rank, strerror(desk->exec_errno));
        else if (sp->workers[sp->first_failed].late)
            snprintf(
                r.text, sizeof r.text,
                "rank %d: the program, run anew, has not come to its call of idist_spawn in %d ms",
                r.rank, sp->cfg.init_timeout_ms);
        else if (sp->workers[sp->first_failed].lost)
            snprintf(r.text, sizeof r.text,
                     "rank %d ended before its function returned; how is not known: the program "
                     "ignores or reaps SIGCHLD",
                     r.rank);
        else if (r.signal)
            snprintf(r.text, sizeof r.text, "rank %d was killed by signal %d (%s)", r.rank,
                     r.signal, strsignal(r.signal));
        else if (r.exit_code == 0)
            snprintf(r.text, sizeof r.text,
                     "rank %d exited with code 0 before its function returned: a worker returns, "
                     "it does not exit",
                     r.rank);
        else snprintf(r.text, sizeof r.text, "rank %d ended with code %d", r.rank, r.exit_code);
        if (desk->text[0] && !r.signal) idist__append(r.text, sizeof r.text, ": %s", desk->text);
    }

    if (sp->report) *sp->report = r;

    return r.rank < 0 ? IDIST_OK : idist__fail(IDIST_ERR_WORKER_FAILED, "%s", r.text);
}

// Moves a descriptor out of the way of stdin, stdout and stderr, which may be closed.
static idist_status idist__spawn_above(int *fd) {
    int higher = fcntl(*fd, F_DUPFD_CLOEXEC, 3);
    if (higher < 0) return idist__fail_errno("spawn: fcntl", errno);
    close(*fd);
    *fd = higher;
    return IDIST_OK;
}

// Where the workers meet: a socket without a file, which listens before the first of them runs;
// their secret is in their memory.
static idist_status idist__spawn_meet(idist_workers *sp) {
    idist__addr addr;
    uint64_t id[2];
    idist_status s;

    if (sp->cfg.secret.nbytes == 0) {
        sp->cfg.secret.nbytes = 32;
        idist__os_random(sp->cfg.secret.bytes, 32);
    }

    idist__os_random(id, sizeof id);
    snprintf(sp->cfg.where, sizeof sp->cfg.where, "unix:idist-%016llx%016llx",
             (unsigned long long)id[0], (unsigned long long)id[1]);
    if ((s = idist__addr_parse(&addr, sp->cfg.where)) != IDIST_OK) return s;
    s = idist__sock_listen(&addr, sp->cfg.where, &sp->cfg.listener);

    return s == IDIST_OK ? idist__spawn_above(&sp->cfg.listener) : s;
}

static idist_status idist__spawn_config(idist_workers *sp, const idist_desc *d) {
    idist_desc alone = *d;
    idist_status s;
    int nnodes = d->nnodes > 1 ? d->nnodes : 1;

    alone.world_size = nnodes > 1 ? nnodes * sp->n : 1;
    alone.rank = nnodes > 1 ? d->node_rank * sp->n : 0;
    alone.store = NULL;
    if ((s = idist__launch_config(&sp->cfg, &alone)) != IDIST_OK) return s;
    sp->first_rank = alone.rank;
    sp->cfg.launcher = "spawn";
    sp->cfg.world_size = nnodes * sp->n;
    if (nnodes == 1) sp->cfg.local_size = sp->n;

    return IDIST_OK;
}

static void idist__spawn_free(idist_workers *sp) {
    idist_allocator mem = sp->cfg.mem;

    idist__os_close(&sp->cfg.listener);
    idist__os_close(&sp->hall_fd);
    if (sp->hall) munmap(sp->hall, sp->hall_nbytes);
    idist__mem_free(&mem, sp->workers);
    idist__mem_free(&mem, sp->fds);
    memset(&sp->cfg.secret, 0, sizeof sp->cfg.secret);
    idist__mem_free(&mem, sp);
}

// The hall, the tables, the place to meet.
static idist_status idist__spawn_prepare(idist_workers *sp, bool anew) {
    idist_status s;
    void *hall;
    int i;

    if (sp->cfg.world_size == sp->n && sp->n > 1 && (s = idist__spawn_meet(sp)) != IDIST_OK)
        return s;
    if (anew && (sp->hall_fd = idist__os_memfd(sp->hall_nbytes)) < 0)
        return idist__fail_errno("memfd_create", errno);
    if (anew && (s = idist__spawn_above(&sp->hall_fd)) != IDIST_OK) return s;
    hall = mmap(NULL, sp->hall_nbytes, PROT_READ | PROT_WRITE,
                MAP_SHARED | (anew ? 0 : MAP_ANONYMOUS), sp->hall_fd, 0);
    sp->hall = hall == MAP_FAILED ? NULL : (idist__hall *)hall;
    sp->workers =
        (idist__worker *)idist__mem_alloc(&sp->cfg.mem, sizeof *sp->workers * (size_t)sp->n);
    sp->fds = (struct pollfd *)idist__mem_alloc(&sp->cfg.mem, sizeof *sp->fds * (size_t)sp->n);
    if (!sp->hall || !sp->workers || !sp->fds)
        return idist__fail(IDIST_ERR_NO_MEMORY, "spawn: no memory for the table of workers");
    for (i = 0; i < sp->n; i++) sp->workers[i].pidfd = -1;
    memcpy(sp->hall->magic, "IDSPAWN1", 8);
    sp->hall->first_rank = sp->first_rank;
    sp->hall->listener = sp->cfg.listener;
    sp->hall->secret = sp->cfg.secret;
    memcpy(sp->hall->where, sp->cfg.where, sizeof sp->hall->where);

    return IDIST_OK;
}

// Starts them all, or none.
static idist_status idist__spawn_begin(idist_workers *sp, bool anew) {
    idist__rerun rerun;
    idist_status s = idist__spawn_prepare(sp, anew);
    int i;

    memset(&rerun, 0, sizeof rerun);
    if (s == IDIST_OK && anew) s = idist__rerun_make(&rerun, &sp->cfg.mem);
    if (!anew) fflush(NULL); // or the workers print again what waits in the buffers
    for (i = 0; i < sp->n && s == IDIST_OK; i++) s = idist__spawn_fork(sp, anew ? &rerun : NULL, i);
    idist__rerun_free(&rerun, &sp->cfg.mem);
    if (anew && sp->cfg.init_timeout_ms > 0)
        sp->arrive_at = idist__os_deadline(sp->cfg.init_timeout_ms);
    idist__os_close(&sp->cfg.listener);
    idist__os_close(&sp->hall_fd);
    for (i = 0; sp->running && i < sp->n; i++)
        if (sp->workers[i].pid > 0)
            sp->workers[i].pidfd = (int)syscall(434 /* pidfd_open */, sp->workers[i].pid, 0);
    if (s == IDIST_OK) return IDIST_OK;
    if (sp->running) idist__spawn_signal(sp, SIGKILL);
    for (; sp->running; idist__os_pause_ms(1)) idist__spawn_reap(sp);

    return s;
}

idist_status idist_spawn_start_with(idist_worker_fn fn, void *arg, int nproc_per_node,
                                    const idist_desc *desc, idist_workers **workers,
                                    idist_backend_list backends) {
    int count = __atomic_add_fetch(&idist__spawn_calls, 1, __ATOMIC_RELAXED), call = 0, worker = 0,
        fd = -1, anew = 0;
    bool rerun = idist__rerun_find(&call, &worker, &fd);
    idist_workers own, *sp;
    idist_desc d;
    idist_status s;

    memset(&own, 0, sizeof own);
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (workers) *workers = NULL;

    if (d.report) {
        memset(d.report, 0, sizeof *d.report);
        d.report->rank = -1;
    }

    if (!fn || !workers)
        return idist__fail(IDIST_ERR_ARG, "spawn: %s is NULL", fn ? "workers" : "fn");
    if (d.nnodes < 0 || d.nnodes > 65536 || d.node_rank < 0 ||
        (d.node_rank && d.node_rank >= d.nnodes))
        return idist__fail(IDIST_ERR_ARG, "spawn: node_rank %d of nnodes %d", d.node_rank,
                           d.nnodes);
    if (nproc_per_node < 0 || nproc_per_node > 4096)
        return idist__fail(IDIST_ERR_ARG,
                           "spawn: nproc_per_node should be positive and at most 4096, but is %d",
                           nproc_per_node);
    if ((s = idist__launch_choice(d.start_method, "IDIST_START_METHOD", "fork, exec", &anew)) !=
        IDIST_OK)
        return s;
    if (rerun && count < call) return IDIST_OK; // the parent has been through this one
    if (anew && idist__is_worker)
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "spawn: a worker can start others with start_method \"fork\" only");
    own.call = count;
    own.n = nproc_per_node ? nproc_per_node : idist__os_ncores();
    own.fn = fn;
    own.arg = arg;
    own.backends = backends;
    own.first_failed = own.hall_fd = -1;
    own.decide_at = own.next_at = own.arrive_at = IDIST__FOREVER;
    own.grace_ms = d.grace_ms > 0 ? d.grace_ms : 2000;
    own.keep_going = d.keep_going;
    own.report = d.report;
    own.hall_nbytes = offsetof(idist__hall, desks) + sizeof(idist__desk) * (size_t)own.n;
    if ((s = idist__log_init(&own.log, &d.logger)) != IDIST_OK) return s;
    if ((s = idist__spawn_config(&own, &d)) != IDIST_OK) return s;
    sp = (idist_workers *)idist__mem_alloc(&own.cfg.mem, sizeof *sp);
    if (!sp) return IDIST_ERR_NO_MEMORY;
    *sp = own;
    s = rerun && count == call ? idist__rerun_worker(sp, worker, fd)
                               : idist__spawn_begin(sp, anew == 1);
    if (s == IDIST_OK) *workers = sp;
    else idist__spawn_free(sp);

    return s;
}

idist_status idist_spawn_poll(idist_workers *workers, bool *done) {
    if (!done) return idist__fail(IDIST_ERR_ARG, "spawn_poll: done is NULL");
    *done = true;
    if (!workers) return IDIST_OK;
    idist__spawn_turn(workers);
    *done = !workers->running;
    return IDIST_OK;
}

idist_status idist_spawn_wait(idist_workers *workers, int timeout_ms) {
    int64_t deadline_ns = timeout_ms < 0 ? IDIST__FOREVER : idist__os_deadline(timeout_ms);
    idist_status s;

    if (!workers) return IDIST_OK;

    for (;;) {
        int64_t until_ns;
        idist__spawn_turn(workers);
        if (!workers->running) break;
        if (idist__os_ms_until(deadline_ns) == 0)
            return idist__fail(IDIST_ERR_TIMEOUT, "spawn_wait: %d workers still run",
                               workers->running);
        until_ns = workers->next_at < deadline_ns ? workers->next_at : deadline_ns;
        if (workers->first_failed < 0 && workers->decide_at < until_ns)
            until_ns = workers->decide_at;
        if (workers->arrive_at < until_ns) until_ns = workers->arrive_at;
        idist__spawn_sleep(workers, until_ns);
    }

    s = idist__spawn_report(workers);
    idist__spawn_free(workers);

    return s;
}

idist_status idist_spawn_kill(idist_workers *workers, int signal_number) {
    if (signal_number < 0 || signal_number > 64)
        return idist__fail(IDIST_ERR_ARG, "spawn_kill: there is no signal %d", signal_number);
    if (workers) idist__spawn_signal(workers, signal_number);
    return IDIST_OK;
}

idist_status idist_spawn_with(idist_worker_fn fn, void *arg, int nproc_per_node,
                              const idist_desc *desc, idist_backend_list backends) {
    idist_workers *workers;
    idist_status s = idist_spawn_start_with(fn, arg, nproc_per_node, desc, &workers, backends);
    return s == IDIST_OK ? idist_spawn_wait(workers, -1) : s;
}

// The checks of Ignite's Parallel, in its order and close to its words.
static idist_status idist__parallel_check(const idist_desc *d, const idist_backend_list *backends) {
    const char *at = d->backend,
               *init = d->init_method ? d->init_method : idist__os_env("IDIST_INIT_METHOD");
    const char *addr = d->master_addr ? d->master_addr : idist__os_env("MASTER_ADDR"),
               *text = idist__os_env("MASTER_PORT");
    int port = d->master_port ? d->master_port : text ? atoi(text) : 0;

    while (at && *at) {
        size_t n = strcspn(at, ",");
        if (!(n == 4 && strncmp(at, "self", 4) == 0) && !idist__backend_asked(backends, at, n))
            return idist__fail(IDIST_ERR_NO_BACKEND,
                               "Unknown backend '%.*s'. Available backends: %s", (int)n, at,
                               idist_available_backends_of(*backends));
        at += n + (at[n] == ',');
    }

    if (d->nproc_per_node < 0)
        return idist__fail(IDIST_ERR_ARG, "Argument nproc_per_node should positive, but given %d",
                           d->nproc_per_node);
    if (d->nnodes < 0)
        return idist__fail(IDIST_ERR_ARG, "Argument nnodes should positive, but given %d",
                           d->nnodes);
    if (!d->nproc_per_node) return IDIST_OK;
    if (d->node_rank < 0 || (d->node_rank > 0 && d->node_rank >= (d->nnodes ? d->nnodes : 1)))
        return idist__fail(IDIST_ERR_ARG,
                           "Argument node_rank should be between 0 and %d, but given %d",
                           (d->nnodes ? d->nnodes : 1) - 1, d->node_rank);
    if (d->nnodes > 1 && !init && (!addr || !port))
        return idist__fail(
            IDIST_ERR_ARG,
            "If number of nodes larger than one, arguments master_addr and master_port or "
            "init_method should "
            "be specified, but given master_addr=%s, master_port=%d and init_method=NULL",
            addr ? addr : "NULL", port);

    return IDIST_OK;
}

// Joins the world that a launcher made, and runs fn in this process.
static idist_status idist__parallel_join(const idist_desc *d, idist_worker_fn fn, void *arg,
                                         const char *name, const idist__log *log,
                                         idist_backend_list backends) {
    idist_status s;
    char backend[32];
    bool speaks;
    int code;

    if (d->nnodes || d->node_rank)
        idist__log_print(log, IDIST_LOG_WARN,
                         "parallel_run: nnodes and node_rank are ignored without nproc_per_node: "
                         "the launcher decides");
    if ((s = idist_initialize_with(d, backends)) != IDIST_OK) return s;
    speaks = idist_get_rank() == 0;
    idist__copy_text(backend, sizeof backend, idist_backend());
    if (speaks)
        idist__log_print(log, IDIST_LOG_INFO, "Initialized processing group with backend: '%s'",
                         backend);
    if (speaks)
        idist__log_print(log, IDIST_LOG_INFO, "- Run '%s' in %d processes", name,
                         idist_get_world_size());
    idist__me.text[0] = 0; // what is said of its failure shall be of its own
    code = fn(idist_get_local_rank(), arg);
    if (speaks) idist__log_print(log, IDIST_LOG_INFO, "End of run");
    if (code && idist__world_default()) idist__world_close(idist__world_default(), true);
    else if (idist_is_initialized()) s = idist_finalize();
    if (speaks)
        idist__log_print(log, IDIST_LOG_INFO, "Finalized processing group with backend: '%s'",
                         backend);
    if (code)
        return idist__fail(IDIST_ERR_WORKER_FAILED, "the function returned %d%s%.800s", code,
                           idist__me.text[0] ? ": " : "", idist__me.text);

    return s;
}

idist_status idist_parallel_run_with(const idist_desc *desc, idist_worker_fn fn, void *arg,
                                     const char *name, idist_backend_list backends) {
    idist__log log;
    idist_desc d;
    idist_status s;

    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (!fn) return idist__fail(IDIST_ERR_ARG, "parallel_run: fn is NULL");
    if ((s = idist__log_init(&log, &d.logger)) != IDIST_OK) return s;
    if ((s = idist__parallel_check(&d, &backends)) != IDIST_OK) return s;
    if (!d.nproc_per_node) return idist__parallel_join(&d, fn, arg, name, &log, backends);
    idist__log_print(&log, IDIST_LOG_INFO, "Initialized distributed launcher with backend: '%s'",
                     d.backend ? d.backend : "auto");
    idist__log_print(
        &log, IDIST_LOG_INFO,
        "- Parameters to spawn processes: nproc_per_node: %d, nnodes: %d, node_rank: %d",
        d.nproc_per_node, d.nnodes ? d.nnodes : 1, d.node_rank);
    idist__log_print(&log, IDIST_LOG_INFO, "Spawn function '%s' in %d processes", name,
                     d.nproc_per_node);
    s = idist_spawn_with(fn, arg, d.nproc_per_node, &d, backends);
    idist__log_print(&log, IDIST_LOG_INFO, "End of run");

    return s;
}

#endif // IDIST_SPAWN_H
