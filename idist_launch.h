/* idist_launch.h - v0.1.0 - configuration, environment and launchers - MIT licence

    Part of the implementation of idist; idist.h includes it where IDIST_IMPLEMENTATION is defined.

CONTENTS

      [launch:config]  the configuration: explicit field, then environment, then built-in
*/
#ifndef IDIST_LAUNCH_H
#define IDIST_LAUNCH_H

//------------------------------------------------------------------------------
// [launch:config]  the configuration: explicit field, then environment, then built-in
// uses os socket err hash sock auth table
//------------------------------------------------------------------------------

#define IDIST__SHM_MIB 4 // shared memory per rank

enum { IDIST__DEVICE_BACKEND_NCCL = 1 };

typedef struct idist__config {
    int rank, world_size;
    int local_rank, local_size;      // what the launcher says; -1: nothing
    const char *launcher;            // "none", "spawn", "explicit", "idist", "torchrun", ...
    const char *rank_var, *size_var; // which variables decided, or NULL
    const char *job_var; // which one tells this job from others of the same launcher, or NULL
    char notice[200];    // a warning for the log of the world
    char where[4096];    // rendezvous: "unix:NAME", "tcp:HOST:PORT", "file:PATH"; "" for none
    idist_store *store;  // or this one
    int listener;        // rank 0 of a spawn inherits a socket that already listens; else -1
    int timeout_ms, init_timeout_ms; // resolved: > 0, or -1 for none
    idist__secret secret;
    int transport;     // 0 shared memory inside a host, 1 local sockets there, 2 TCP everywhere
    int algorithm;     // 0 auto, 1 latency, 2 bandwidth, 3 chunked
    int bind;          // 1: each rank to a processor of its own, if there are enough
    size_t shm_nbytes; // of shared memory per rank
    bool shm_asked;    // that number is the user's
    const void *mpi_comm;
    bool unchecked; // a backend that has collectives of its own may leave out the comparison of
                    // calls
    char host_id[128];
    char device[32];    // asked for, or ""
    int device_backend; // 0 auto, 1 IDIST__DEVICE_BACKEND_NCCL, 2 ipc, 3 staged
    const void *nccl_comm, *nccl_config;
    bool high_priority; // of the streams on the device
    char backends[128]; // names asked for, or ""
    int *lost; // a worker's mark for its parent: another rank was lost, what follows may be only a
               // consequence
    idist_allocator mem;
    idist_logger logger;
} idist__config;

// Launchers that give each process its rank and the size in one pair of variables, inner ones
// first: a torchrun inside srun or mpirun wins over what it inherited, and mpirun over the step of
// Slurm that its daemon is.
typedef struct idist__launcher {
    const char *name, *rank, *size, *local_rank, *local_size, *job;
} idist__launcher;

static const idist__launcher idist__launchers[] = {
    {"idist", "IDIST_RANK", "IDIST_WORLD_SIZE", "IDIST_LOCAL_RANK", "IDIST_LOCAL_WORLD_SIZE", NULL},
    {"env", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
     NULL}, // "torchrun", if it says so
    {"indexed", "JOB_COMPLETION_INDEX", "WORLD_SIZE", NULL, NULL,
     NULL}, // Kubernetes gives the first one
    {"horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE",
     "HOROVOD_GLOO_RENDEZVOUS_PORT"},
    {"openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE"},
    {"mvapich2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
     "MV2_COMM_WORLD_LOCAL_SIZE", "MPIRUN_ID"},
    {"jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK",
     "JSM_NAMESPACE_LOCAL_SIZE", "PMIX_NAMESPACE"},
    {"pals", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "PALS_APID"},
    {"flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", NULL, "FLUX_JOB_ID"},
    {"hydra", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", NULL},
    {"slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", NULL, "SLURM_JOB_ID"}};

static idist_status idist__env_int(const char *name, int64_t lo, int64_t hi, int *value) {
    const char *text = name ? idist__os_env(name) : NULL;
    int64_t v;

    if (!text) return IDIST_OK;
    if (!idist__parse_int(text, lo, hi, &v))
        return idist__fail(IDIST_ERR_ENV, "%s=%s: expected a whole number from %lld to %lld", name,
                           text, (long long)lo, (long long)hi);
    *value = (int)v;

    return IDIST_OK;
}

// ---- Slurm ----

typedef bool (*idist__host_fn)(void *arg, const char *host); // false: enough

// One element of a host list from `at` on; `host` holds what comes before, of n bytes.
static bool idist__hosts_element(const char *at, const char *end, char *host, size_t n,
                                 idist__host_fn fn, void *arg) {
    const char *close;

    while (at < end && *at != '[' && *at != ']' && n < 255) host[n++] = *at++;
    host[n] = 0;
    if (at == end) return n && fn(arg, host);
    close = *at == '[' ? (const char *)memchr(at, ']', (size_t)(end - at)) : NULL;
    if (!close || n >= 240) return false;

    while (at <
           close) { // behind the bracket or a comma: "7" or "03-11", as wide as the first number
        char *rest;
        size_t width = strspn(++at, "0123456789");
        long v = strtol(at, &rest, 10), last = v;
        if (width < 1 || width > 9) return false;

        if (*rest == '-') {
            size_t digits = strspn(++rest, "0123456789");
            last = strtol(rest, NULL, 10);
            rest += digits;
            if (digits < 1 || digits > 9 || last < v || last - v > 65535) return false;
        }

        if (rest > close || (*rest != ',' && rest != close)) return false;

        for (; v <= last; v++) {
            int more = snprintf(host + n, 12, "%0*ld", (int)width, v);
            if (!idist__hosts_element(close + 1, end, host, n + (size_t)more, fn, arg))
                return false;
        }

        at = rest;
    }

    return true;
}

// Slurm's compressed host lists, in the order given: "a,b[1-3,07],rack[0-1]n[1-2]". False: it is
// none, or fn had enough.
static bool idist__hosts_each(const char *list, idist__host_fn fn, void *arg) {
    char host[256];
    const char *at = list;

    do {
        const char *end;
        int depth = 0;
        at += strspn(at, " ");
        for (end = at; *end && (*end != ',' || depth); end++)
            depth += (*end == '[') - (*end == ']');
        if (!idist__hosts_element(at, end, host, 0, fn, arg)) return false;
        at = end;
    } while (*at++ == ',');

    return true;
}

static bool idist__hosts_first(void *arg, const char *host) {
    char *first = (char *)arg;
    if (!first[0]) idist__copy_text(first, 256, host);
    return true;
}

// "2(x3),1" says 2, 2, 2, 1: the entry of a node, or -1.
static int idist__slurm_tasks(const char *text, int node) {
    while (text && *text >= '0' && *text <= '9') {
        char *rest;
        long tasks = strtol(text, &rest, 10), times = 1;

        if (strncmp(rest, "(x", 2) == 0) {
            times = strtol(rest + 2, &rest, 10);
            if (times < 1 || *rest++ != ')') return -1;
        }

        if (node < times) return tasks > 0 && tasks <= 1000000 ? (int)tasks : -1;
        node -= (int)times;
        if (*rest != ',') return -1;
        text = rest + 1;
    }

    return -1;
}

// The first of these variables that is set; if none is, the last.
static const char *idist__env_either(const char *a, const char *b) {
    return idist__os_env(a) ? a : b;
}

// Whether srun started this process. The body of a batch script and a shell of salloc have its
// variables too.
static bool idist__slurm_step(void) {
    int64_t id;
    return idist__parse_int(idist__os_env(idist__env_either("SLURM_STEP_ID", "SLURM_STEPID")), 0,
                            0xffffffefll, &id) &&
           idist__os_env("SLURM_PROCID");
}

// RANK and WORLD_SIZE inside a step of Slurm: of an inner launcher, or the same in other words.
// *use: they count.
static idist_status idist__slurm_compare(idist__config *c, bool *use) {
    int rank = 0, size = 1, procid = 0, tasks = 1, nodes = 1;
    const char *size_var = idist__env_either("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS");

    *use = true;
    if (idist__os_env("TORCHELASTIC_RUN_ID") || idist__os_env("LOCAL_WORLD_SIZE") ||
        !idist__slurm_step())
        return IDIST_OK;
    *use =
        idist__os_env("LOCAL_RANK") && idist__os_env("MASTER_ADDR") && idist__os_env("MASTER_PORT");

    if (!*use) {
        snprintf(c->notice, sizeof c->notice,
                 "RANK and WORLD_SIZE do not count inside a step of Slurm without LOCAL_RANK, "
                 "MASTER_ADDR and MASTER_PORT");
        return IDIST_OK;
    }

    if (idist__env_int("RANK", 0, 1000000, &rank) != IDIST_OK ||
        idist__env_int("WORLD_SIZE", 1, 1000000, &size) != IDIST_OK)
        return IDIST_OK; // which is said later
    idist__env_int("SLURM_PROCID", 0, 1000000, &procid);
    idist__env_int(size_var, 1, 1000000, &tasks);
    idist__env_int(idist__env_either("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES"), 1, 1000000,
                   &nodes);
    if (nodes == 1 ? rank >= procid && size >= tasks : rank == procid && size == tasks)
        return IDIST_OK;

    return idist__fail(IDIST_ERR_ENV,
                       "RANK=%d and WORLD_SIZE=%d are inconsistent with SLURM_PROCID=%d and %s=%d: "
                       "unset the ones that are "
                       "left over, or set IDIST_LAUNCHER=env or =slurm",
                       rank, size, procid, size_var, tasks);
}

// ---- PMI-1, the text protocol of MPICH's launcher ----

// MPI would speak it in our place, if the program has it.
#ifdef __cplusplus
extern "C" int MPI_Pcontrol(const int level, ...) __attribute__((weak));
#else
int MPI_Pcontrol(const int level, ...) __attribute__((weak));
#endif
#define IDIST__HAS_MPI (MPI_Pcontrol != NULL)

typedef struct idist__pmi {
    int fd;
    int64_t deadline_ns;
    char line[600]; // the last answer
} idist__pmi;

// A line, byte by byte: what follows is another one. What the launcher hands down is a blocking
// socket, so we wait first.
static bool idist__pmi_hear(idist__pmi *p) {
    size_t n = 0;

    while (n + 1 < sizeof p->line && idist__sock_wait(p->fd, POLLIN, p->deadline_ns) &&
           idist__sock_read_all(p->fd, p->line + n, 1, p->deadline_ns) && p->line[n] != '\n')
        n++;
    p->line[n] = 0;
    return n > 0;
}

// Says a line and hears the answer that begins so.
static bool idist__pmi_ask(idist__pmi *p, const char *line, const char *answer) {
    if (!idist__sock_write_all(p->fd, line, strlen(line), p->deadline_ns)) return false;

    do {
        if (!idist__pmi_hear(p)) return false;
    } while (strncmp(p->line, answer, strlen(answer)) != 0);

    return !strstr(p->line, "rc=") || strstr(p->line, "rc=0") != NULL;
}

static const char *idist__pmi_value(const idist__pmi *p, const char *name) {
    const char *at = strstr(p->line, name);
    return at ? at + strlen(name) : "";
}

// What PMI told this process, once: afterwards the launcher has taken leave of it.
static struct {
    pthread_mutex_t lock;
    int fd, size, rank; // of PMI_PORT; size 0: not asked yet
    char where[320];    // rank 0 is
} idist__pmi_known = {PTHREAD_MUTEX_INITIALIZER, -1, 0, 0, ""};

// With mpiexec -pmi-port nothing is inherited: connects, and hears who we are. The connection stays
// open for the rest.
static idist_status idist__pmi_introduce(idist__config *c, const char *port, const char *id) {
    idist__pmi p;
    char text[320];
    idist__addr addr;
    int value = 0;
    bool ok = true;

    pthread_mutex_lock(&idist__pmi_known.lock);
    p.deadline_ns = idist__os_deadline(c->init_timeout_ms > 0 ? c->init_timeout_ms : 5000);

    if (!idist__pmi_known.size) {
        snprintf(text, sizeof text, "tcp:%.300s", port);
        p.fd = idist__addr_parse(&addr, text) == IDIST_OK
                   ? idist__sock_connect(&addr, p.deadline_ns)
                   : -1;
        snprintf(text, sizeof text, "cmd=initack pmiid=%.100s\n", id);
        ok = p.fd >= 0 && idist__pmi_ask(&p, text, "cmd=initack");
        while (ok && !strstr(p.line, "debug=")) {
            ok = idist__pmi_hear(&p);
            if (sscanf(p.line, "cmd=set size=%d", &value) == 1) idist__pmi_known.size = value;
            if (sscanf(p.line, "cmd=set rank=%d", &value) == 1) idist__pmi_known.rank = value;
        }

        if (!ok) idist__os_close(&p.fd);
        idist__pmi_known.fd = p.fd;
    }

    c->launcher = "hydra";
    c->rank_var = "PMI_ID";
    c->size_var = "PMI_PORT";
    c->world_size = idist__pmi_known.size;
    c->rank = idist__pmi_known.rank;
    pthread_mutex_unlock(&idist__pmi_known.lock);
    idist__env_int("MPI_LOCALRANKID", 0, 1000000, &c->local_rank);
    idist__env_int("MPI_LOCALNRANKS", 1, 1000000, &c->local_size);
    if (ok && c->rank >= 0 && c->rank < c->world_size) return IDIST_OK;

    return idist__fail(IDIST_ERR_ENV,
                       "PMI_PORT=%s: no launcher of MPICH answers there; unset it to run alone",
                       port);
}

// Rank 0's place: it listens already, so that nobody else can have it.
static idist_status idist__pmi_listen(idist__config *c, char *where, size_t cap) {
    const char *host = idist__os_env("IDIST_ADDR");
    char name[256] = "";
    idist__addr addr;
    uint64_t id[2];
    idist_status s;

    idist__os_random(id, sizeof id);
    snprintf(where, cap, "unix:idist-%016llx%016llx", (unsigned long long)id[0],
             (unsigned long long)id[1]);

    if (c->local_size == c->world_size && c->transport != 2) {
        if ((s = idist__addr_parse(&addr, where)) != IDIST_OK) return s;
        return idist__sock_listen(&addr, where, &c->listener);
    }

    if (!c->secret.nbytes && !c->secret.insecure)
        return idist__fail(
            IDIST_ERR_NO_SECRET,
            "initialize: ranks on several hosts need a shared secret: set IDIST_SECRET or "
            "IDIST_SECRET_FILE on all ranks, or IDIST_INSECURE=1 to trust the network");
    gethostname(name, sizeof name - 1);
    if ((s = idist__addr_tcp(&addr, "0.0.0.0", 0)) != IDIST_OK) return s;
    if ((s = idist__sock_listen(&addr, "0.0.0.0", &c->listener)) != IDIST_OK) return s;
    addr.nbytes = sizeof addr.sa;
    if (getsockname(c->listener, (struct sockaddr *)&addr.sa, &addr.nbytes) != 0)
        return idist__fail_errno("getsockname", errno);
    snprintf(where, cap, "tcp:%s:%d", host ? host : name, idist__addr_port(&addr));

    return IDIST_OK;
}

// Rank 0 tells the others where it is.
IDIST__UNUSED static idist_status idist__pmi_meet(idist__config *c) {
    char kvs[256], text[900], where[320] = "-";
    idist__pmi p;
    idist_status s = IDIST_OK;
    bool ok = true;

    memset(&p, 0, sizeof p);
    p.deadline_ns =
        c->init_timeout_ms < 0 ? IDIST__FOREVER : idist__os_deadline(c->init_timeout_ms);
    pthread_mutex_lock(&idist__pmi_known.lock);
    p.fd = idist__pmi_known.fd;

    if (!idist__pmi_known.where[0]) {
        if (c->rank == 0 && (s = idist__pmi_listen(c, where, sizeof where)) != IDIST_OK)
            snprintf(where, sizeof where, "-");
        ok = (p.fd >= 0 || idist__env_int("PMI_FD", 0, INT32_MAX, &p.fd) == IDIST_OK) &&
             idist__pmi_ask(&p, "cmd=init pmi_version=1 pmi_subversion=1\n",
                            "cmd=response_to_init") &&
             idist__pmi_ask(&p, "cmd=get_my_kvsname\n", "cmd=my_kvsname");
        snprintf(kvs, sizeof kvs, "%.*s", (int)strcspn(idist__pmi_value(&p, "kvsname="), " "),
                 idist__pmi_value(&p, "kvsname="));
        snprintf(text, sizeof text, "cmd=put kvsname=%s key=idist value=%s\n", kvs, where);
        if (c->rank == 0) ok = ok && idist__pmi_ask(&p, text, "cmd=put_result");
        ok = ok && idist__pmi_ask(&p, "cmd=barrier_in\n", "cmd=barrier_out");
        snprintf(text, sizeof text, "cmd=get kvsname=%s key=idist\n", kvs);
        ok = ok && idist__pmi_ask(&p, text, "cmd=get_result");
        idist__copy_text(where, sizeof where, ok ? idist__pmi_value(&p, "value=") : "-");
        if (ok && idist__pmi_ask(&p, "cmd=finalize\n", "cmd=finalize_ack") && where[0] != '-')
            idist__copy_text(idist__pmi_known.where, sizeof idist__pmi_known.where, where);
    }

    idist__copy_text(c->where, sizeof c->where, idist__pmi_known.where);
    pthread_mutex_unlock(&idist__pmi_known.lock);
    if (s != IDIST_OK || c->where[0]) return s;
    if (ok)
        return idist__fail(IDIST_ERR_PEER_LOST,
                           "initialize: rank 0 could not listen; its own message says why");

    return idist__fail(
        IDIST_ERR_TIMEOUT,
        "initialize: not all ranks came to the barrier of the launcher (PMI) within %d ms",
        c->init_timeout_ms);
}

// ---- which launcher ----

// Whether this launcher started us; its variables as they are called here. Half a pair is an error:
// guessing the rest would start N worlds of 1.
static idist_status idist__launch_match(idist__config *c, idist__launcher *l, bool asked,
                                        bool *match) {
    bool env = strcmp(l->name, "env") == 0, slurm = strcmp(l->name, "slurm") == 0, rank, size;
    const char *missing;

    *match = false;
    if (slurm) l->size = idist__env_either(l->size, "SLURM_NTASKS");
    rank = idist__os_env(l->rank) != NULL;
    size = idist__os_env(l->size) != NULL;
    missing = rank ? l->size : l->rank;

    if (slurm && !idist__slurm_step()) {
        rank = size = false;
        missing = idist__env_either("SLURM_STEP_ID", "SLURM_STEPID");
    }

    if (strcmp(l->name, "hydra") == 0 && !idist__os_env(l->local_rank) && idist__slurm_step() &&
        !asked)
        return IDIST_OK;
    if (env && !rank && idist__os_env("JOB_COMPLETION_INDEX")) return IDIST_OK;
    if (strcmp(l->name, "indexed") == 0 && !(rank && size))
        rank = size = false;                                 // pods without a size are no world
    if (strcmp(l->name, "pals") == 0 && !rank) size = false; // PMI_SIZE is of others as well
    if (asked && strcmp(l->name, "hydra") == 0 && !rank && !size && idist__os_env("PMI_PORT"))
        return IDIST_OK;
    if (asked && !(rank && size))
        return idist__fail(IDIST_ERR_ENV,
                           "IDIST_LAUNCHER=%s, but %s is not set: it did not start this process",
                           idist__os_env("IDIST_LAUNCHER"), missing);
    if (rank != size)
        return idist__fail(IDIST_ERR_ENV,
                           "%s is set but %s is not: a launcher sets both; unset it to run alone",
                           rank ? l->rank : l->size, missing);
    *match = rank;

    return env && rank && !asked ? idist__slurm_compare(c, match) : IDIST_OK;
}

static idist_status idist__launch_numbers(idist__config *c, const idist__launcher *l) {
    int node = 0, nodes = 0;
    idist_status s;

    if ((s = idist__env_int(l->size, 1, 1000000, &c->world_size)) != IDIST_OK) return s;
    if ((s = idist__env_int(l->rank, 0, 1000000, &c->rank)) != IDIST_OK) return s;
    if ((s = idist__env_int(l->local_rank, 0, 1000000, &c->local_rank)) != IDIST_OK) return s;
    if ((s = idist__env_int(l->local_size, 1, 1000000, &c->local_size)) != IDIST_OK) return s;

    if (strcmp(l->name, "slurm") == 0) {
        idist__env_int("SLURM_NODEID", 0, 1000000, &node);
        c->local_size =
            idist__slurm_tasks(idist__os_env(idist__env_either("SLURM_STEP_TASKS_PER_NODE",
                                                               "SLURM_TASKS_PER_NODE")),
                               node);
        idist__env_int(idist__env_either("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES"), 1, 1000000,
                       &nodes);
        if (nodes == 1) c->local_size = c->world_size;
    }

    if (c->rank >= c->world_size)
        return idist__fail(IDIST_ERR_ENV, "%s=%d is not below %s=%d", l->rank, c->rank, l->size,
                           c->world_size);
    if (c->local_rank >= (c->local_size > 0 ? c->local_size : c->world_size))
        return idist__fail(IDIST_ERR_ENV, "%s=%d is not below %s=%d", l->local_rank, c->local_rank,
                           c->local_size > 0 && l->local_size ? l->local_size : l->size,
                           c->local_size > 0 ? c->local_size : c->world_size);
    if (c->local_size > c->world_size)
        return idist__fail(IDIST_ERR_ENV, "%s=%d is more than %s=%d",
                           l->local_size ? l->local_size : l->name, c->local_size, l->size,
                           c->world_size);

    return IDIST_OK;
}

// TensorFlow's description of a cluster: the chief, if there is one, then the workers are ranks. No
// JSON parser: it counts the strings of the lists that it knows.
static int idist__tf_hosts(const char *text, const char *list, char *first) {
    const char *at = strstr(text, list);
    int n = 0;

    while (at && at[strlen(list) + strspn(at + strlen(list), " \t\n")] != ':')
        at = strstr(at + 1, list); // a value
    at = at ? strpbrk(at, "[]{}") : NULL;
    if (!at || *at != '[') return 0;

    for (at = strpbrk(at + 1, "\"]"); at && *at == '"'; at = strpbrk(at, "\"]")) {
        size_t nbytes = strcspn(++at, "\"");
        if (!n++ && !first[0] && nbytes < 256) snprintf(first, nbytes + 1, "%s", at);
        at += nbytes + (at[nbytes] == '"');
    }

    return n;
}

static idist_status idist__launch_tf(idist__config *c, const char *text) {
    char first[256] = "", kind[32] = "", host[256];
    int nchiefs =
            idist__tf_hosts(text, "\"chief\"", first) + idist__tf_hosts(text, "\"master\"", first),
        index = -1, port = 0;
    int nworkers = idist__tf_hosts(text, "\"worker\"", first);
    const char *task = strstr(text, "\"task\""), *type = task ? strstr(task, "\"type\"") : NULL;
    const char *number = task ? strstr(task, "\"index\"") : NULL;
    bool worker, chief;

    c->launcher = "tf_config";
    c->rank_var = c->size_var = "TF_CONFIG";
    if (type) sscanf(type + 6, " : \"%31[a-z]\"", kind);
    if (number) sscanf(number + 7, " : %9d", &index);
    worker = strcmp(kind, "worker") == 0;
    chief = strcmp(kind, "chief") == 0 || strcmp(kind, "master") == 0;
    if (!(worker || chief) || index < 0 || index >= (worker ? nworkers : nchiefs))
        return idist__fail(
            IDIST_ERR_ENV,
            "TF_CONFIG: task %s %d is none of its %d chiefs and %d workers, which are the ranks",
            kind, index, nchiefs, nworkers);
    c->world_size = nchiefs + nworkers;
    c->rank = worker ? nchiefs + index : index;
    if (!idist__parse_host_port(first, host, sizeof host, &port) || !port)
        return idist__fail(IDIST_ERR_ENV, "TF_CONFIG: \"%s\", where rank 0 is, is no host:port",
                           first);
    snprintf(c->where, sizeof c->where, "tcp:%s", first);

    return IDIST_OK;
}

// Takes the first launcher that fits, or the one that IDIST_LAUNCHER names.
static idist_status idist__launch_detect(idist__config *c) {
    const char *asked = idist__os_env("IDIST_LAUNCHER"), *tf = idist__os_env("TF_CONFIG");
    const char *port = idist__os_env("PMI_PORT"), *id = idist__os_env("PMI_ID");
    bool match = false, known = !asked || strcmp(asked, "none") == 0;
    size_t i;
    idist_status s;

    for (i = 0; i < IDIST__COUNT_OF(idist__launchers); i++) {
        idist__launcher l = idist__launchers[i];
        bool torchrun = i == 1 && idist__os_env("TORCHELASTIC_RUN_ID");
        if (asked && strcmp(asked, l.name) != 0 && !(i == 1 && strcmp(asked, "torchrun") == 0))
            continue;
        known = true;
        s = idist__launch_match(c, &l, asked != NULL, &match);
        if (!match && s == IDIST_OK) continue;
        c->launcher = torchrun ? "torchrun" : l.name;
        c->rank_var = l.rank;
        c->size_var = l.size;
        c->job_var = l.job;
        return s == IDIST_OK ? idist__launch_numbers(c, &l) : s;
    }

    if (!known && strcmp(asked, "tf_config") != 0)
        return idist__fail(IDIST_ERR_ENV,
                           "IDIST_LAUNCHER=%s: use none, idist, env, torchrun, indexed, "
                           "horovodrun, openmpi, mvapich2, jsrun, "
                           "pals, flux, hydra, slurm or tf_config",
                           asked);
    if (asked && known && strcmp(asked, "hydra") != 0) return IDIST_OK;
    if (asked && !known && !tf)
        return idist__fail(IDIST_ERR_ENV, "IDIST_LAUNCHER=tf_config, but TF_CONFIG is not set");
    if (port && id && (!asked || known) && !IDIST__HAS_MPI)
        return idist__pmi_introduce(c, port, id);
    if (asked && known) return IDIST_OK;
    if (tf && (asked || strstr(tf, "\"cluster\""))) return idist__launch_tf(c, tf);
    if (idist__os_env("PMIX_RANK") && idist__os_env("PMIX_NAMESPACE"))
        return idist__fail(IDIST_ERR_ENV, "PMIX_RANK is set, but nothing in the environment says "
                                          "how many ranks there are: set IDIST_RANK and "
                                          "IDIST_WORLD_SIZE, or IDIST_LAUNCHER=none to run alone");

    return IDIST_OK;
}

static idist_status idist__launch_rank(idist__config *c, const idist_desc *d) {
    c->rank = 0;
    c->world_size = 1;
    c->local_rank = c->local_size = -1;
    c->launcher = "none";
    if (d->world_size == 0 && d->rank == 0) return idist__launch_detect(c);
    if (d->world_size < 1 || d->rank < 0 || d->rank >= d->world_size)
        return idist__fail(IDIST_ERR_ARG,
                           "rank %d of world_size %d: both are needed, and 0 <= rank < world_size",
                           d->rank, d->world_size);
    c->launcher = "explicit";
    c->rank = d->rank;
    c->world_size = d->world_size;

    return IDIST_OK;
}

// Ranks that share a loopback address share a host, and need no TCP: the same address names a local
// socket, together with the run, since a port that nobody listens at may be that of two jobs.
static void idist__launch_where_tcp(idist__config *c, const char *host, int port) {
    const char *restart = idist__os_env("TORCHELASTIC_RESTART_COUNT"),
               *run = idist__os_env("TORCHELASTIC_RUN_ID");

    if (c->transport != 2 && (idist__sock_host_is_loopback(host) || c->local_size == c->world_size))
        snprintf(c->where, sizeof c->where, "unix:idist-%lu-%d-%s-%08x", (unsigned long)geteuid(),
                 port, restart ? restart : "0", run ? (unsigned)idist__hash(run, strlen(run)) : 0u);
    else
        snprintf(c->where, sizeof c->where, strchr(host, ':') ? "tcp:[%s]:%d" : "tcp:%s:%d", host,
                 port);
}

// All ranks are on this host and nobody has said where they meet: at a place that belongs to the
// job.
static void idist__launch_where_job(idist__config *c) {
    const char *job = c->job_var ? idist__os_env(c->job_var) : NULL;
    const char *step = strcmp(c->launcher, "slurm") == 0
                           ? idist__os_env(idist__env_either("SLURM_STEP_ID", "SLURM_STEPID"))
                           : "";
    char text[600];
    uint64_t name;

    if (job) snprintf(text, sizeof text, "%s %.300s %s", c->launcher, job, step);
    else
        snprintf(text, sizeof text, "%s %ld", c->launcher,
                 (long)getppid()); // the launcher's part on this host
    name = idist__hash(text, strlen(text));
    if (c->transport == 2)
        snprintf(c->where, sizeof c->where, "tcp:127.0.0.1:%d", 15000 + (int)(name % 10000));
    else
        snprintf(c->where, sizeof c->where, "unix:idist-%lu-%016llx", (unsigned long)geteuid(),
                 (unsigned long long)name);
}

// The first host of the step, and a port that follows from job and step: where rank 0 is, unless
// ranks were placed in an order of the user's.
static idist_status idist__launch_where_slurm(idist__config *c) {
    const char *var = idist__env_either("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
               *list = idist__os_env(var);
    const char *order = idist__os_env("SLURM_DISTRIBUTION");
    char host[256] = "";
    int job = 0, step = 0;

    if (!list ||
        (order && (strncmp(order, "arbitrary", 9) == 0 || strncmp(order, "plane", 5) == 0)))
        return IDIST_OK;
    if (!idist__hosts_each(list, idist__hosts_first, host) || !host[0])
        return idist__fail(IDIST_ERR_ENV, "%s=%s is no list of hosts", var, list);
    idist__env_int("SLURM_JOB_ID", 0, INT32_MAX, &job);
    idist__env_int(idist__env_either("SLURM_STEP_ID", "SLURM_STEPID"), 0, INT32_MAX, &step);
    idist__launch_where_tcp(c, host, 15000 + (job % 10000 + step % 10000) % 10000);

    return IDIST_OK;
}

static idist_status idist__launch_where_env(idist__config *c, const idist_desc *d) {
    const char *host = d->master_addr ? d->master_addr : idist__os_env("MASTER_ADDR"),
               *text = idist__os_env("MASTER_PORT"), *agent;
    bool local = c->local_size == c->world_size,
         own = c->job_var || strcmp(c->launcher, "hydra") == 0;
    int port = 29500;
    idist_status s = idist__env_int("MASTER_PORT", 1, 65535, &port);

    if (d->master_port) {
        if (d->master_port < 0 || d->master_port > 65535)
            return idist__fail(IDIST_ERR_ARG, "master_port %d is not between 1 and 65535",
                               d->master_port);
        port = d->master_port;
    } else if (s != IDIST_OK) {
        return s;
    }

    if (host && !d->master_port && !text)
        return idist__fail(d->master_addr ? IDIST_ERR_ARG : IDIST_ERR_ENV,
                           "MASTER_ADDR (desc.master_addr) is set but MASTER_PORT "
                           "(desc.master_port) is not: give rank 0's port as well");
    agent = idist__os_env("TORCHELASTIC_USE_AGENT_STORE");
    if (!d->master_addr && !d->master_port && !local && host && agent &&
        strcmp(agent, "True") == 0) {
        snprintf(c->where, sizeof c->where, strchr(host, ':') ? "torch:[%s]:%d" : "torch:%s:%d",
                 host, port);
        return IDIST_OK; // the agent listens there, and nobody else can
    }

    if (!host && !d->master_port && !text && c->rank_var && strcmp(c->launcher, "hydra") == 0 &&
        !IDIST__HAS_MPI && (idist__os_env("PMI_FD") || idist__os_env("PMI_PORT"))) {
        idist__copy_text(c->where, sizeof c->where, "pmi:");
        return IDIST_OK;
    }

    if (!host && own && local && !d->master_port && !text) {
        idist__launch_where_job(c);
        return IDIST_OK;
    }

    if (!host && !local && strcmp(c->launcher, "slurm") == 0) return idist__launch_where_slurm(c);
    if (!host && !local) return IDIST_OK; // a backend that needs it will say so
    idist__launch_where_tcp(c, host ? host : "127.0.0.1", port);

    return IDIST_OK;
}

static idist_status idist__launch_where(idist__config *c, const idist_desc *d) {
    const char *init = d->init_method ? d->init_method : idist__os_env("IDIST_INIT_METHOD");
    char host[256];
    int port;

    c->store = d->store;
    if (c->world_size == 1 || c->store || (c->where[0] && !init)) return IDIST_OK;
    if (!init || strcmp(init, "env://") == 0) return idist__launch_where_env(c, d);

    if (strncmp(init, "file:///", 8) == 0 && strlen(init) < sizeof c->where) {
        snprintf(c->where, sizeof c->where, "file:%s", init + 7);
        return IDIST_OK;
    }

    if (strncmp(init, "tcp://", 6) == 0 &&
        idist__parse_host_port(init + 6, host, sizeof host, &port) && port > 0) {
        int first = atoi(host); // 224 to 239 begin a multicast group

        if (first >= 224 && first < 240 && strspn(host, "0123456789.") == strlen(host)) {
            const char *run = idist__os_env("TORCHELASTIC_RUN_ID"),
                       *restart = idist__os_env("TORCHELASTIC_RESTART_COUNT");
            snprintf(c->where, sizeof c->where, "cast:%s:%d/%d %.200s %.20s", host, port,
                     c->world_size, run ? run : "", restart ? restart : "0");
            return IDIST_OK;
        }

        idist__launch_where_tcp(c, host, port);
        return IDIST_OK;
    }

    return idist__fail(d->init_method ? IDIST_ERR_ARG : IDIST_ERR_ENV,
                       "%s \"%s\" is none of env://, tcp://host:port (a port from 1 to 65535), "
                       "tcp://239.x.y.z:port, file:///path",
                       d->init_method ? "init_method" : "IDIST_INIT_METHOD", init);
}

static idist_status idist__launch_choice(const char *field, const char *var, const char *names,
                                         int *choice) {
    const char *text = field ? field : idist__os_env(var), *at = names;
    size_t n = text ? strlen(text) : 0;

    for (*choice = 0; text && at; ++*choice) {
        if (strncmp(at, text, n) == 0 && (at[n] == ',' || !at[n])) return IDIST_OK;
        if ((at = strchr(at, ',')) != NULL) at += 2;
    }

    *choice = 0;
    if (!text) return IDIST_OK;
    if (field)
        return idist__fail(IDIST_ERR_ARG, "desc: \"%s\" (%s) is none of %s", text, var, names);

    return idist__fail(IDIST_ERR_ENV, "%s=%s: use one of %s", var, text, names);
}

static idist_status idist__launch_timeout(int field, const char *var, int fallback, int *value) {
    idist_status s;

    *value = 0;
    if (field) *value = field;
    else if ((s = idist__env_int(var, -1, INT32_MAX, value)) != IDIST_OK) return s;
    if (!*value) *value = fallback;
    if (*value < 0) *value = -1;
    return IDIST_OK;
}

// The one place where defaults are filled in.
static idist_status idist__launch_config(idist__config *c, const idist_desc *desc) {
    idist_desc d;
    idist_status s;
    const char *text;
    int mib = 0, check = 1, priority = 0;

    memset(c, 0, sizeof *c);
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    c->listener = -1;
    c->mem = d.allocator;
    c->logger = d.logger;
    if (!c->mem.alloc_fn != !c->mem.free_fn)
        return idist__fail(IDIST_ERR_ARG, "allocator: give both alloc_fn and free_fn, or none");
    if ((s = idist__launch_choice(d.transport, "IDIST_TRANSPORT", "auto, socket, tcp",
                                  &c->transport)) ||
        (s = idist__launch_choice(d.algorithm, "IDIST_ALGO", "auto, latency, bandwidth, chunked",
                                  &c->algorithm)) ||
        (s = idist__launch_choice(d.bind, "IDIST_BIND", "none, core", &c->bind)) ||
        (s = idist__launch_choice(d.device_backend, "IDIST_DEVICE_BACKEND",
                                  "auto, nccl, ipc, staged", &c->device_backend)) ||
        (s = idist__launch_timeout(d.timeout_ms, "IDIST_TIMEOUT_MS", 30 * 60 * 1000,
                                   &c->timeout_ms)) ||
        (s = idist__launch_timeout(d.init_timeout_ms, "IDIST_INIT_TIMEOUT_MS", 5 * 60 * 1000,
                                   &c->init_timeout_ms)) ||
        (s = idist__env_int("IDIST_SHM_MIB", 0, 1024, &mib)) ||
        (s = idist__env_int("IDIST_CHECK", 0, 1, &check)) ||
        (s = idist__env_int("IDIST_HIGH_PRIORITY_STREAM", 0, 1, &priority)))
        return s;
    c->unchecked = !check;
    c->mpi_comm = d.mpi_comm;
    c->shm_asked = d.shm_nbytes || mib;
    c->shm_nbytes = d.shm_nbytes ? d.shm_nbytes : (size_t)(mib ? mib : IDIST__SHM_MIB) << 20;
    text = d.host_id ? d.host_id : idist__os_env("IDIST_HOSTID");
    if (text) idist__copy_text(c->host_id, sizeof c->host_id, text);
    c->nccl_comm = d.nccl_comm;
    c->nccl_config = d.nccl_config;
    c->high_priority = d.high_priority_stream || priority;
    text = d.device ? d.device : idist__os_env("IDIST_DEVICE");
    if (text) idist__copy_text(c->device, sizeof c->device, text);
    text = d.backend ? d.backend : idist__os_env("IDIST_BACKEND");
    if (text) idist__copy_text(c->backends, sizeof c->backends, text);
    if ((s = idist__secret_find(&c->secret, d.secret, d.secret_nbytes)) != IDIST_OK) return s;
    if ((s = idist__launch_rank(c, &d)) != IDIST_OK) return s;

    return idist__launch_where(c, &d);
}

// What ranks of one host have in common.
IDIST__UNUSED static uint64_t idist__host_key(const idist__config *cfg) {
    char text[256];
    struct stat st;
    ssize_t n;
    int fd;

    if (cfg->host_id[0]) return idist__hash(cfg->host_id, strlen(cfg->host_id));
    memset(text, 0, sizeof text);
    fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        do n = read(fd, text, 64);
        while (n < 0 && errno == EINTR);
        close(fd);
    }

    if (!text[0] && gethostname(text, 64) != 0) text[0] = '?';
    // Local sockets live in a network namespace and are checked against the user.
    if (stat("/proc/self/ns/net", &st) == 0)
        idist__append(text, sizeof text, "/%llu", (unsigned long long)st.st_ino);
    idist__append(text, sizeof text, "/%lu", (unsigned long)geteuid());

    return idist__hash(text, strlen(text));
}

#endif // IDIST_LAUNCH_H
