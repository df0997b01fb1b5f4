/* idist_launch.h - v0.2.0 - configuration, environment and launchers - MIT licence

    Part of the implementation of idist; idist.h includes it where IDIST_IMPLEMENTATION is defined.

    Turns the caller's idist_desc and the environment into one idist__config: who we are (rank and
    world size, from whichever launcher started us), where the ranks meet, and every other setting
    with its default filled in. Whoever starts a world (idist_calls.h, idist_spawn.h) calls
    idist__launch_config once and reads the environment nowhere else.

CONTENTS

      [launch:env]     the configuration, and numbers in environment variables
      [launch:slurm]   what Slurm says: host lists, tasks per node, whether srun started us
      [launch:pmi]     PMI-1, the text protocol of MPICH's launchers
      [launch:tf]      TF_CONFIG, TensorFlow's description of a cluster
      [launch:detect]  which launcher started this process, and as which rank
      [launch:where]   where the ranks meet
      [launch:claim]   a process takes its rank, and the others learn if it ends
      [launch:draw]    ranks that are drawn from a file
      [launch:config]  explicit field, then environment, then built-in
*/
#ifndef IDIST_LAUNCH_H
#define IDIST_LAUNCH_H

//------------------------------------------------------------------------------
// [launch:env]  the configuration, and numbers in environment variables
// uses os:env fail parse secret store:table
//------------------------------------------------------------------------------

#define IDIST__SHM_MIB 5 // shared memory per rank, unless the user says otherwise

enum { IDIST__RANK_DRAWN = -1 }; // in place of a rank: see [launch:draw]

// The numbers are those of the names in idist__config_choices.
enum { IDIST__TRANSPORT_AUTO, IDIST__TRANSPORT_SOCKET, IDIST__TRANSPORT_TCP };

// How a collective runs. The setting IDIST_ALGO, the fingerprints of calls and the table in
// idist_algo.h ([algo:choose]) all use these numbers. Only those up to REMOTE can be set.
typedef enum idist__algorithm {
    IDIST__ALGO_AUTO,      // chosen by operation and size; of a call: none of those below
    IDIST__ALGO_LATENCY,   // messages, few steps
    IDIST__ALGO_BANDWIDTH, // messages, few bytes
    IDIST__ALGO_CHUNKED,   // shared memory, one chunk at a time
    IDIST__ALGO_REMOTE,    // a setting only: as AUTO, with cross-memory reads even if they are slow
    IDIST__ALGO_FLAT,      // shared memory, small contributions
    IDIST__ALGO_BY_HOST    // calls inside each host, and between hosts
} idist__algorithm;

typedef enum idist__launcher_kind {
    IDIST__LAUNCHER_NONE,
    IDIST__LAUNCHER_IDIST, // idistrun
    IDIST__LAUNCHER_ENV,   // torchrun, and whoever else sets RANK and WORLD_SIZE
    IDIST__LAUNCHER_INDEXED,
    IDIST__LAUNCHER_HOROVODRUN,
    IDIST__LAUNCHER_OPENMPI,
    IDIST__LAUNCHER_MVAPICH2,
    IDIST__LAUNCHER_JSRUN,
    IDIST__LAUNCHER_PALS,
    IDIST__LAUNCHER_FLUX,
    IDIST__LAUNCHER_HYDRA,
    IDIST__LAUNCHER_SLURM,
    IDIST__LAUNCHER_TF_CONFIG,
    IDIST__LAUNCHER_PMIX
} idist__launcher_kind;

typedef struct idist__config {
    int rank, world_size; // rank may be IDIST__RANK_DRAWN until a backend has claimed the world
    int local_rank, local_size; // -1: the launcher does not say
    idist__launcher_kind launcher_kind;
    const char *launcher;            // "none", "spawn", "explicit", "idist", "torchrun", ...
    const char *rank_var, *size_var; // the variables that rank and size came from, or NULL
    const char *job_var;     // the variable that tells apart the jobs of one launcher, or NULL
    char where[4096];        // where the ranks meet, see [launch:where]; "": not given
    const char *lone_method; // an init method, but nothing says which rank we are; or NULL
    idist_store *store;      // the caller's, instead of `where`
    idist_store *drawn;      // the rank was drawn from this store at `where`, which the world owns
    int listener;            // a socket that rank 0 of a spawn inherits and that listens; else -1
    int timeout_ms, init_timeout_ms; // > 0, or -1 for none
    idist__secret secret;
    int transport;      // IDIST__TRANSPORT_*: inside a host shared memory, local sockets, or TCP
    int algorithm;      // an idist__algorithm, up to CHUNKED
    int sockets;        // of a link over TCP; 0: automatic
    int bind;           // 1: bind each rank to a processor of its own, if there are enough
    bool may_draw;      // the ranks meet in a file, from which they may be drawn
    bool rank_drawn;    // ours was
    bool shm_asked;     // the user gave shm_nbytes
    bool unchecked;     // a backend with collectives of its own need not compare the ranks' calls
    bool high_priority; // of the device's streams
    bool device_backend_in_desc; // asked for by desc, not by the environment
    bool lone_method_in_desc;    // the same
    size_t shm_nbytes;           // shared memory per rank
    const void *mpi_comm;
    char host_id[128];
    char group_name[64];     // of the worlds that meet in one file, or ""
    char device[32];         // the device the user asked for, or ""
    char device_backend[32]; // the device backend that the user asked for, or ""
    const void *nccl_comm, *nccl_config;
    char backends[128]; // the backends the user asked for, or ""
    // Where a rank says that another one was lost, so that what follows may be only a consequence:
    int *lost;            // in memory, a worker to its parent; or NULL
    char lost_file[1024]; // or else a file that the rank makes, for its launcher; or ""
    idist_allocator mem;
    idist_logger logger;
} idist__config;

enum { IDIST__ENV_RANKS_MAX = 1000000 };

// Leaves *value alone when the variable is not set, or has no name.
static idist_status idist__env_int(const char *name, int64_t lowest, int64_t highest, int *value) {
    const char *text = name ? idist__os_env(name) : NULL;
    int64_t number;

    if (!text) return IDIST_OK;
    if (!idist__parse_int(text, lowest, highest, &number))
        return idist__fail(IDIST_ERR_ENV, "%s=%s: expected a whole number from %lld to %lld", name,
                           text, (long long)lowest, (long long)highest);
    *value = (int)number;

    return IDIST_OK;
}

// A number of ranks or nodes, and the index of one.
static idist_status idist__env_count(const char *name, int *value) {
    return idist__env_int(name, 1, IDIST__ENV_RANKS_MAX, value);
}

static idist_status idist__env_index(const char *name, int *value) {
    return idist__env_int(name, 0, IDIST__ENV_RANKS_MAX, value);
}

// The first of two variables if it is set, otherwise the second.
static const char *idist__env_either(const char *first, const char *second) {
    return idist__os_env(first) ? first : second;
}

//------------------------------------------------------------------------------
// [launch:slurm]  what Slurm says: host lists, tasks per node, whether srun started us
// uses os:env fail text parse env
//------------------------------------------------------------------------------

// Called for each host of a list; false ends the walk.
typedef bool (*idist__slurm_host_fn)(void *arg, const char *host);

// One item between the brackets of a host list.
typedef struct idist__slurm_range {
    long first, last;
    int width; // digits of the first number: "03-11" is 03, 04, ..., 11
} idist__slurm_range;

enum { IDIST__SLURM_HOST_NBYTES = 256, IDIST__SLURM_RANGE_MAX = 65535 };

// Parses "7" or "03-11" up to a comma or the closing bracket. Returns where it ends, or NULL.
static const char *idist__slurm_parse_range(const char *text, const char *close,
                                            idist__slurm_range *range) {
    size_t digits = strspn(text, "0123456789");
    char *end;

    if (digits < 1 || digits > 9) return NULL;
    range->width = (int)digits;
    range->first = range->last = strtol(text, &end, 10);

    if (*end == '-') {
        end++;
        digits = strspn(end, "0123456789");
        range->last = strtol(end, NULL, 10);
        end += digits;
        if (digits < 1 || digits > 9 || range->last < range->first ||
            range->last - range->first > IDIST__SLURM_RANGE_MAX)
            return NULL;
    }

    return end <= close && (*end == ',' || end == close) ? end : NULL;
}

// Expands one element of a host list from `at` to `end`; `host` holds the `used` bytes before it.
// It recurses for what follows a bracket.
static bool idist__slurm_expand(const char *at, const char *end, char *host, size_t used,
                                idist__slurm_host_fn fn, void *arg) {
    const char *close;

    while (at < end && *at != '[' && *at != ']' && used < IDIST__SLURM_HOST_NBYTES - 1)
        host[used++] = *at++;
    host[used] = 0;
    if (at == end) return used && fn(arg, host);
    close = *at == '[' ? (const char *)memchr(at, ']', (size_t)(end - at)) : NULL;
    if (!close || used >= IDIST__SLURM_HOST_NBYTES - 16) return false;

    while (at < close) { // at the bracket, or at a comma
        idist__slurm_range range;
        long number;

        at = idist__slurm_parse_range(at + 1, close, &range);
        if (!at) return false;

        for (number = range.first; number <= range.last; number++) {
            int more = snprintf(host + used, 12, "%0*ld", range.width, number);

            if (!idist__slurm_expand(close + 1, end, host, used + (size_t)more, fn, arg))
                return false;
        }
    }

    return true;
}

// Calls fn for each host of Slurm's compressed lists, in their order:
// "a,b[1-3,07],rack[0-1]n[1-2]". False: it is no such list, or fn has ended the walk.
static bool idist__slurm_each_host(const char *list, idist__slurm_host_fn fn, void *arg) {
    char host[IDIST__SLURM_HOST_NBYTES];
    const char *at = list;

    do {
        const char *end;
        int depth = 0;

        at += strspn(at, " ");
        for (end = at; *end && (*end != ',' || depth); end++)
            depth += (*end == '[') - (*end == ']');
        if (!idist__slurm_expand(at, end, host, 0, fn, arg)) return false;
        at = end;
    } while (*at++ == ',');

    return true;
}

// Keeps the first host, but lets the walk go on, so that the whole list is checked.
static bool idist__slurm_first_host(void *arg, const char *host) {
    char *first = (char *)arg;
    if (!first[0]) idist__text_copy(first, IDIST__SLURM_HOST_NBYTES, host);
    return true;
}

// The tasks of a node: "2(x3),1" says 2, 2, 2, 1. -1: the text does not say.
static int idist__slurm_tasks(const char *text, int node) {
    while (text && *text >= '0' && *text <= '9') {
        char *rest;
        long tasks = strtol(text, &rest, 10), times = 1;

        if (strncmp(rest, "(x", 2) == 0) {
            times = strtol(rest + 2, &rest, 10);
            if (times < 1 || *rest++ != ')') return -1;
        }

        if (node < times) return tasks > 0 && tasks <= IDIST__ENV_RANKS_MAX ? (int)tasks : -1;
        node -= (int)times;
        if (*rest != ',') return -1;
        text = rest + 1;
    }

    return -1;
}

static const char *idist__slurm_step_var(void) {
    return idist__env_either("SLURM_STEP_ID", "SLURM_STEPID");
}

static const char *idist__slurm_nodes_var(void) {
    return idist__env_either("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES");
}

static const char *idist__slurm_size_var(void) {
    return idist__env_either("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS");
}

// Whether srun started this process. The body of a batch script and a shell of salloc have its
// variables too, but a step number above the limit.
static bool idist__slurm_in_step(void) {
    int64_t step;
    return idist__parse_int(idist__os_env(idist__slurm_step_var()), 0, 0xffffffefll, &step) &&
           idist__os_env("SLURM_PROCID");
}

// The number of ranks on our node: Slurm has one number per node.
static void idist__slurm_local_size(idist__config *config) {
    const char *tasks =
        idist__os_env(idist__env_either("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"));
    int node = 0, nodes = 0;

    idist__env_index("SLURM_NODEID", &node);
    config->local_size = idist__slurm_tasks(tasks, node);
    idist__env_count(idist__slurm_nodes_var(), &nodes);
    if (nodes == 1) config->local_size = config->world_size;
}

// RANK and WORLD_SIZE inside a step of Slurm may come from an inner launcher such as torchrun, may
// repeat Slurm's own numbers, or may be left over from elsewhere. *used: they are to be used. Where
// they repeat Slurm's without the rest of torch's variables, Slurm is the launcher: it also knows
// the local rank and where to meet.
static idist_status idist__slurm_check_env(bool *used) {
    int rank = 0, size = 1, slurm_rank = 0, slurm_size = 1, nodes = 1;
    const char *size_var = idist__slurm_size_var();
    bool same, inner;

    *used = true;
    if (idist__os_env("TORCHELASTIC_RUN_ID") || idist__os_env("LOCAL_WORLD_SIZE") ||
        !idist__slurm_in_step())
        return IDIST_OK;
    if (idist__env_index("RANK", &rank) != IDIST_OK ||
        idist__env_count("WORLD_SIZE", &size) != IDIST_OK)
        return IDIST_OK; // idist__detect_numbers reports it
    idist__env_index("SLURM_PROCID", &slurm_rank);
    idist__env_count(size_var, &slurm_size);
    idist__env_count(idist__slurm_nodes_var(), &nodes);

    // On one node an inner launcher can have started more ranks than there are tasks.
    same = rank == slurm_rank && size == slurm_size;
    inner = nodes == 1 && rank >= slurm_rank && size >= slurm_size;

    if (!same && !inner)
        return idist__fail(IDIST_ERR_ENV,
                           "RANK=%d and WORLD_SIZE=%d are inconsistent with SLURM_PROCID=%d and "
                           "%s=%d: unset those that are left over, or set IDIST_LAUNCHER=env or "
                           "=slurm",
                           rank, size, slurm_rank, size_var, slurm_size);
    if (same)
        *used = idist__os_env("LOCAL_RANK") && idist__os_env("MASTER_ADDR") &&
                idist__os_env("MASTER_PORT");

    return IDIST_OK;
}

//------------------------------------------------------------------------------
// [launch:pmi]  PMI-1, the text protocol of MPICH's launchers
// uses clock os:random os:env descriptor mutex poll socket fail text address
// uses interface connection env
//
// Lines of "cmd=NAME key=value ..." over a socket that the launcher (hydra) hands down as PMI_FD,
// or to which we connect (mpiexec -pmi-port: PMI_PORT). We need three things of it: who we are, a
// key-value space in which rank 0 publishes its address, and one barrier:
//
//     idist__pmi_introduce   initack -> set size, set rank             (with PMI_PORT only)
//     idist__pmi_share_address        init, get_my_kvsname, put (rank 0), barrier_in, get, finalize
//
// The launcher accepts one client per process. If an MPI library is linked into the program, that
// is the client, whether or not idist uses MPI, and we leave PMI alone.
//------------------------------------------------------------------------------

#ifdef __cplusplus
extern "C" int MPI_Pcontrol(const int level, ...) __attribute__((weak));
#else
int MPI_Pcontrol(const int level, ...) __attribute__((weak));
#endif

// Whether an MPI library in the program speaks PMI.
static bool idist__pmi_is_taken(void) { return MPI_Pcontrol != NULL; }

typedef struct idist__pmi {
    int fd;
    bool answers; // the launcher is there
    int64_t deadline_ns;
    char line[600]; // the last answer
} idist__pmi;

// What PMI told this process. It is asked once: after `finalize` the launcher no longer listens.
static struct {
    idist__os_mutex lock;
    int fd;          // of PMI_PORT; -1: none
    int size, rank;  // size 0: not asked yet
    char where[320]; // rank 0 listens; "": not asked yet
} idist__pmi_known = {IDIST__OS_MUTEX_INIT, -1, 0, 0, ""};

// Reads one line, byte by byte, since what follows belongs to the next. The launcher's socket is a
// blocking one, so each read waits for a byte first.
static bool idist__pmi_read_line(idist__pmi *p) {
    size_t nbytes = 0;

    while (nbytes + 1 < sizeof p->line &&
           idist__os_poll_wait(p->fd, IDIST__OS_READABLE, p->deadline_ns) &&
           idist__connection_read_all(p->fd, p->line + nbytes, 1, p->deadline_ns) &&
           p->line[nbytes] != '\n')
        nbytes++;
    p->line[nbytes] = 0;
    return nbytes > 0;
}

// Sends a line, and reads until an answer that begins with `answer`. False: the answer reports an
// error, or none came.
static bool idist__pmi_request(idist__pmi *p, const char *line, const char *answer) {
    if (!idist__connection_write_all(p->fd, line, strlen(line), p->deadline_ns)) return false;

    do {
        if (!idist__pmi_read_line(p)) return false;
    } while (strncmp(p->line, answer, strlen(answer)) != 0);

    return !strstr(p->line, "rc=") || strstr(p->line, "rc=0") != NULL;
}

// The rest of the last answer behind "name=".
static const char *idist__pmi_value(const idist__pmi *p, const char *name) {
    const char *at = strstr(p->line, name);
    return at ? at + strlen(name) : "";
}

// Connects to PMI_PORT and learns rank and size. The connection stays open for
// idist__pmi_share_address.
static bool idist__pmi_connect(const char *port, const char *id, int64_t deadline_ns) {
    idist__pmi p;
    char text[320];
    idist__os_address address;
    int value = 0;
    bool ok;

    p.deadline_ns = deadline_ns;
    p.fd = -1;
    snprintf(text, sizeof text, "tcp:%.300s", port);
    if (idist__address_parse(&address, text) == IDIST_OK)
        p.fd = idist__os_socket_connect(&address, deadline_ns);
    snprintf(text, sizeof text, "cmd=initack pmiid=%.100s\n", id);
    ok = p.fd >= 0 && idist__pmi_request(&p, text, "cmd=initack");

    while (ok && !strstr(p.line, "debug=")) { // the last of the lines that follow
        ok = idist__pmi_read_line(&p);
        if (sscanf(p.line, "cmd=set size=%d", &value) == 1) idist__pmi_known.size = value;
        if (sscanf(p.line, "cmd=set rank=%d", &value) == 1) idist__pmi_known.rank = value;
    }

    if (!ok) idist__os_descriptor_close(&p.fd);
    idist__pmi_known.fd = p.fd;

    return ok;
}

// With mpiexec -pmi-port the environment has no rank: PMI tells it.
static idist_status idist__pmi_introduce(idist__config *config, const char *port, const char *id) {
    int timeout_ms = config->init_timeout_ms > 0 ? config->init_timeout_ms : 5000;
    bool ok = true;

    idist__os_mutex_lock(&idist__pmi_known.lock);
    if (!idist__pmi_known.size)
        ok = idist__pmi_connect(port, id, idist__os_clock_deadline(timeout_ms));
    config->launcher_kind = IDIST__LAUNCHER_HYDRA;
    config->launcher = "hydra";
    config->rank_var = "PMI_ID";
    config->size_var = "PMI_PORT";
    config->world_size = idist__pmi_known.size;
    config->rank = idist__pmi_known.rank;
    idist__os_mutex_unlock(&idist__pmi_known.lock);

    idist__env_index("MPI_LOCALRANKID", &config->local_rank);
    idist__env_count("MPI_LOCALNRANKS", &config->local_size);
    if (ok && config->rank >= 0 && config->rank < config->world_size) return IDIST_OK;

    return idist__fail(IDIST_ERR_ENV,
                       "PMI_PORT=%s: no launcher of MPICH answers there; unset it to run alone",
                       port);
}

// The address of rank 0 for the others: that of this host's name, if it is one of its interfaces.
static idist_status idist__pmi_choose_address(idist__own_address *own) {
    char name[256];
    idist__os_address address;
    bool known = idist__os_socket_host_name(name, sizeof name) &&
                 idist__address_tcp(&address, name, 0) == IDIST_OK;

    return idist__interface_choose(known ? &address : NULL, own);
}

// Ranks of several hosts, or of one where the user wants TCP, meet at a TCP port of rank 0.
static idist_status idist__pmi_listen_tcp(idist__config *config, char *where, size_t capacity) {
    bool one_host = config->local_size == config->world_size;
    bool by_loopback = one_host && !idist__os_env("IDIST_ADDR");
    idist__os_address address;
    idist__own_address own;
    idist_status status = IDIST_OK;

    if (!by_loopback && !config->secret.nbytes && !config->secret.insecure)
        return idist__fail(
            IDIST_ERR_NO_SECRET,
            "initialize: ranks on several hosts need a shared secret: set IDIST_SECRET or "
            "IDIST_SECRET_FILE on all ranks, or IDIST_INSECURE=1 to trust the network");

    if (by_loopback) idist__text_copy(own.ip, sizeof own.ip, "127.0.0.1");
    else status = idist__pmi_choose_address(&own);
    if (status != IDIST_OK) return status;

    if (!by_loopback && config->secret.nbytes) {
        status = idist__connection_listen_everywhere(0, "a free port", &config->listener);
    } else if (!one_host) {
        status = idist__connection_listen_beyond(&own, NULL, 0, own.ip, &config->listener);
    } else { // where the other ranks of this host connect to
        status = idist__address_tcp(&address, own.ip, 0);
        if (status == IDIST_OK)
            status = idist__connection_listen(&address, own.ip, &config->listener);
    }

    if (status != IDIST_OK) return status;
    if (!idist__os_socket_own_address(config->listener, &address))
        return idist__fail_errno("initialize: asking for the port of a listener", errno);
    snprintf(where, capacity, "tcp:[%s]:%d", own.ip, idist__os_socket_port(&address));

    return IDIST_OK;
}

// Rank 0 listens before it says where, so that nobody else can take the address.
static idist_status idist__pmi_listen(idist__config *config, char *where, size_t capacity) {
    idist__os_address address;
    uint64_t id[2];
    idist_status status;

    if (config->local_size != config->world_size || config->transport == IDIST__TRANSPORT_TCP)
        return idist__pmi_listen_tcp(config, where, capacity);

    idist__os_random(id, sizeof id);
    snprintf(where, capacity, "unix:idist-%016llx%016llx", (unsigned long long)id[0],
             (unsigned long long)id[1]);
    status = idist__address_parse(&address, where);
    if (status != IDIST_OK) return status;

    return idist__connection_listen(&address, where, &config->listener);
}

// Rank 0 puts `where` into the key-value space, and all ranks get it from there; "-" says that rank
// 0 could not listen. False: the launcher does not answer.
static bool idist__pmi_exchange(idist__pmi *p, bool puts, char *where, size_t capacity) {
    char space[256], text[900];
    const char *value;
    bool ok;

    p->answers =
        (p->fd >= 0 || idist__env_int("PMI_FD", 0, INT32_MAX, &p->fd) == IDIST_OK) &&
        idist__pmi_request(p, "cmd=init pmi_version=1 pmi_subversion=1\n", "cmd=response_to_init");
    ok = p->answers && idist__pmi_request(p, "cmd=get_my_kvsname\n", "cmd=my_kvsname");
    value = idist__pmi_value(p, "kvsname=");
    snprintf(space, sizeof space, "%.*s", (int)strcspn(value, " "), value);

    if (puts) {
        snprintf(text, sizeof text, "cmd=put kvsname=%s key=idist value=%s\n", space, where);
        ok = ok && idist__pmi_request(p, text, "cmd=put_result");
    }

    ok = ok && idist__pmi_request(p, "cmd=barrier_in\n", "cmd=barrier_out");
    snprintf(text, sizeof text, "cmd=get kvsname=%s key=idist\n", space);
    ok = ok && idist__pmi_request(p, text, "cmd=get_result");
    idist__text_copy(where, capacity, ok ? idist__pmi_value(p, "value=") : "-");

    return ok;
}

// A program between mpiexec and this one may have closed the descriptor, as subprocess of Python
// does.
static idist_status idist__pmi_no_answer(void) {
    const char *name = idist__os_env("PMI_FD") ? "PMI_FD" : "PMI_PORT";
    const char *value = idist__os_env(name);

    return idist__fail(IDIST_ERR_ENV,
                       "%s=%s: no launcher of MPICH answers there. If a program between mpiexec "
                       "and this one has closed it, set MASTER_ADDR and MASTER_PORT",
                       name, value ? value : "");
}

// Sets config->where: rank 0 listens and tells the others through the launcher. Blocks until all
// ranks have called it, or init_timeout_ms has passed.
IDIST__UNUSED static idist_status idist__pmi_share_address(idist__config *config) {
    char where[320] = "-";
    idist__pmi p;
    idist_status status = IDIST_OK;
    bool ok = true;

    memset(&p, 0, sizeof p);
    p.answers = true;
    p.deadline_ns = idist__os_clock_deadline(config->init_timeout_ms);
    idist__os_mutex_lock(&idist__pmi_known.lock);
    p.fd = idist__pmi_known.fd;

    if (!idist__pmi_known.where[0]) {
        if (config->rank == 0) status = idist__pmi_listen(config, where, sizeof where);
        if (status != IDIST_OK) snprintf(where, sizeof where, "-");
        ok = idist__pmi_exchange(&p, config->rank == 0, where, sizeof where);
        if (ok && idist__pmi_request(&p, "cmd=finalize\n", "cmd=finalize_ack") && where[0] != '-')
            idist__text_copy(idist__pmi_known.where, sizeof idist__pmi_known.where, where);
    }

    idist__text_copy(config->where, sizeof config->where, idist__pmi_known.where);
    idist__os_mutex_unlock(&idist__pmi_known.lock);
    if (!p.answers) return idist__pmi_no_answer();
    if (status != IDIST_OK || config->where[0]) return status;

    if (ok)
        return idist__fail(IDIST_ERR_PEER_LOST,
                           "initialize: rank 0 could not listen; its own message says why");

    return idist__fail(
        IDIST_ERR_TIMEOUT,
        "initialize: not all ranks came to the barrier of the launcher (PMI) within %d ms",
        config->init_timeout_ms);
}

//------------------------------------------------------------------------------
// [launch:tf]  TF_CONFIG, TensorFlow's description of a cluster
// uses fail parse env
//
//     {"cluster": {"chief": ["h0:2222"], "worker": ["h1:2222", "h2:2222"], "ps": [...]},
//      "task": {"type": "worker", "index": 1}}
//
// The chief ("master" in old versions), if there is one, and then the workers are the ranks; they
// meet at the first of them. Valid JSON without a cluster is none of ours. What is in a valid text
// is not parsed: it counts the strings of the lists it knows.
//------------------------------------------------------------------------------

enum { IDIST__TF_DEPTH_MAX = 32 };

static void idist__tf_config_skip_blanks(const char **at) { *at += strspn(*at, " \t\r\n"); }

// These three move *at behind a valid piece of JSON, or return false and leave it where it is
// wrong.
static bool idist__tf_config_skip_string(const char **at) {
    const char *end = *at;

    if (*end++ != '"') return false;
    for (; *end && *end != '"'; end++)
        if (*end == '\\' && !*++end) break;
    if (!*end) return false;
    *at = end + 1;

    return true;
}

static bool idist__tf_config_skip_word(const char **at) {
    static const char *const words[] = {"true", "false", "null"};
    size_t i, nbytes = strspn(*at, "+-.0123456789eE");

    for (i = 0; i < IDIST__COUNT_OF(words); i++)
        if (strncmp(*at, words[i], strlen(words[i])) == 0) nbytes = strlen(words[i]);
    *at += nbytes;

    return nbytes > 0;
}

static bool idist__tf_config_skip_value(const char **at, int depth) {
    bool is_object = **at == '{';
    char end = is_object ? '}' : ']';

    if (**at == '"') return idist__tf_config_skip_string(at);
    if (!is_object && **at != '[') return idist__tf_config_skip_word(at);
    if (depth == IDIST__TF_DEPTH_MAX) return false;

    ++*at;
    idist__tf_config_skip_blanks(at);

    if (**at == end) {
        ++*at;
        return true;
    }

    while (true) {
        if (is_object) {
            if (!idist__tf_config_skip_string(at)) return false;
            idist__tf_config_skip_blanks(at);
            if (**at != ':') return false;
            ++*at;
            idist__tf_config_skip_blanks(at);
        }

        if (!idist__tf_config_skip_value(at, depth + 1)) return false;
        idist__tf_config_skip_blanks(at);
        if (**at != end && **at != ',') return false;
        if (*(*at)++ == end) return true;
        idist__tf_config_skip_blanks(at);
    }
}

// A program whose TF_CONFIG lost a quotation mark on its way must not run alone for that.
static idist_status idist__tf_config_check(const char *text) {
    const char *at = text;
    bool valid;

    idist__tf_config_skip_blanks(&at);
    valid = *at == '{' && idist__tf_config_skip_value(&at, 0);
    idist__tf_config_skip_blanks(&at);
    if (valid && !*at) return IDIST_OK;

    return idist__fail(
        IDIST_ERR_ENV,
        "TF_CONFIG is not a valid JSON object: wrong from character %d on, %s%.40s%s. "
        "Mend it, or unset it if it is not for this program",
        (int)(at - text) + 1, *at ? "\"" : "its end", at, *at ? "\"" : "");
}

// The number of strings in a list. The first of them goes to `first`, unless that is taken.
static int idist__tf_config_count_hosts(const char *text, const char *list, char first[256]) {
    const char *at = strstr(text, list);
    int count = 0;

    while (at && at[strlen(list) + strspn(at + strlen(list), " \t\n")] != ':')
        at = strstr(at + 1, list); // that one was a value, not a name
    at = at ? strpbrk(at, "[]{}") : NULL;
    if (!at || *at != '[') return 0;

    for (at = strpbrk(at + 1, "\"]"); at && *at == '"'; at = strpbrk(at, "\"]")) {
        size_t nbytes = strcspn(++at, "\"");

        if (!count && !first[0] && nbytes < 256) snprintf(first, nbytes + 1, "%s", at);
        count++;
        at += nbytes + (at[nbytes] == '"');
    }

    return count;
}

static idist_status idist__tf_config_read(idist__config *config, const char *text) {
    char first[256] = "", type[32] = "", host[256];
    int chiefs, workers, index = -1, port = 0;
    const char *task = strstr(text, "\"task\"");
    const char *type_at = task ? strstr(task, "\"type\"") : NULL;
    const char *index_at = task ? strstr(task, "\"index\"") : NULL;
    bool is_worker, is_chief;

    config->launcher_kind = IDIST__LAUNCHER_TF_CONFIG;
    config->launcher = "tf_config";
    config->rank_var = config->size_var = "TF_CONFIG";
    chiefs = idist__tf_config_count_hosts(text, "\"chief\"", first);
    chiefs += idist__tf_config_count_hosts(text, "\"master\"", first);
    workers = idist__tf_config_count_hosts(text, "\"worker\"", first);

    if (type_at) sscanf(type_at + 6, " : \"%31[a-z]\"", type);
    if (index_at) sscanf(index_at + 7, " : %9d", &index);
    is_worker = strcmp(type, "worker") == 0;
    is_chief = strcmp(type, "chief") == 0 || strcmp(type, "master") == 0;
    if (!(is_worker || is_chief) || index < 0 || index >= (is_worker ? workers : chiefs))
        return idist__fail(
            IDIST_ERR_ENV,
            "TF_CONFIG: task %s %d is not one of the %d chiefs and %d workers, which are the ranks",
            type, index, chiefs, workers);

    config->world_size = chiefs + workers;
    config->rank = is_worker ? chiefs + index : index;
    if (!idist__parse_host_port(first, host, sizeof host, &port) || !port)
        return idist__fail(IDIST_ERR_ENV,
                           "TF_CONFIG: the address of rank 0, \"%s\", is not host:port", first);
    snprintf(config->where, sizeof config->where, "tcp:%s", first);

    return IDIST_OK;
}

//------------------------------------------------------------------------------
// [launch:detect]  which launcher started this process, and as which rank
// uses os:env fail text env slurm pmi tf
//
// The table of launchers is in the order of precedence, inner launchers before outer ones: a
// torchrun inside srun or mpirun wins over what it has inherited, and mpirun over the step of Slurm
// that its daemon is. The first row that applies decides; IDIST_LAUNCHER narrows the table to the
// rows of one name. If no row applies, the process runs alone.
//
//     idist__launch_detect -> row.detect -> idist__detect_by_variables -> row.look
//------------------------------------------------------------------------------

typedef struct idist__launcher idist__launcher;

// What the environment has of one row.
typedef struct idist__detect_look {
    const char *size_var; // the row's, or another name of the same thing
    bool has_rank, has_size;
    const char *missing; // the variable to name when one of them is missing
    bool skip;           // the variables belong to another launcher
} idist__detect_look;

struct idist__launcher {
    idist__launcher_kind kind;
    const char *name; // for IDIST_LAUNCHER; NULL: it cannot be asked for
    // Variables, or NULL. Where `detect` reads others, rank and size are those that say so.
    const char *rank, *size, *local_rank, *local_size, *job;
    // Whether this launcher started us (*found), and if so our rank and size. `asked`: the user
    // says that it did, so that its absence is an error.
    idist_status (*detect)(idist__config *config, const idist__launcher *row, bool asked,
                           bool *found);
    // Corrects what was found where other launchers set the same variables; or NULL.
    void (*look)(idist__detect_look *look, bool asked);
};

// Kubernetes sets JOB_COMPLETION_INDEX beside a WORLD_SIZE of the user's: the next row.
static void idist__detect_look_env(idist__detect_look *look, bool asked) {
    (void)asked;
    if (!look->has_rank && idist__os_env("JOB_COMPLETION_INDEX")) look->skip = true;
}

// Pods of an indexed job without a size are no world.
static void idist__detect_look_indexed(idist__detect_look *look, bool asked) {
    (void)asked;
    if (!(look->has_rank && look->has_size)) look->has_rank = look->has_size = false;
}

// PMI_SIZE belongs to other launchers too.
static void idist__detect_look_pals(idist__detect_look *look, bool asked) {
    (void)asked;
    if (!look->has_rank) look->has_size = false;
}

// srun sets PMI_RANK and PMI_SIZE too, but not hydra's local rank. With PMI_PORT there are no
// variables: the next row.
static void idist__detect_look_hydra(idist__detect_look *look, bool asked) {
    if (!asked && !idist__os_env("MPI_LOCALRANKID") && idist__slurm_in_step()) look->skip = true;
    if (asked && !look->has_rank && !look->has_size && idist__os_env("PMI_PORT")) look->skip = true;
}

static void idist__detect_look_slurm(idist__detect_look *look, bool asked) {
    (void)asked;
    look->size_var = idist__slurm_size_var();
    look->has_size = idist__os_env(look->size_var) != NULL;
    look->missing = look->has_rank ? look->size_var : "SLURM_PROCID";

    if (!idist__slurm_in_step()) {
        look->has_rank = look->has_size = false;
        look->missing = idist__slurm_step_var();
    }
}

// Reads rank, size and their local counterparts, and compares them.
static idist_status idist__detect_numbers(idist__config *config, const idist__launcher *row,
                                          const char *size_var) {
    idist_status status = idist__env_count(size_var, &config->world_size);

    if (status == IDIST_OK) status = idist__env_index(row->rank, &config->rank);
    if (status == IDIST_OK) status = idist__env_index(row->local_rank, &config->local_rank);
    if (status == IDIST_OK) status = idist__env_count(row->local_size, &config->local_size);
    if (status != IDIST_OK) return status;
    if (row->kind == IDIST__LAUNCHER_SLURM) idist__slurm_local_size(config);

    if (config->rank >= config->world_size)
        return idist__fail(IDIST_ERR_ENV, "%s=%d is not below %s=%d", row->rank, config->rank,
                           size_var, config->world_size);
    if (config->local_size > 0 && config->local_rank >= config->local_size)
        return idist__fail(IDIST_ERR_ENV, "%s=%d is not below %s=%d", row->local_rank,
                           config->local_rank, row->local_size ? row->local_size : size_var,
                           config->local_size);
    if (config->local_size <= 0 && config->local_rank >= config->world_size)
        return idist__fail(IDIST_ERR_ENV, "%s=%d is not below %s=%d", row->local_rank,
                           config->local_rank, size_var, config->world_size);
    if (config->local_size > config->world_size)
        return idist__fail(IDIST_ERR_ENV, "%s=%d is more than %s=%d",
                           row->local_size ? row->local_size : row->name, config->local_size,
                           size_var, config->world_size);

    return IDIST_OK;
}

// A size without a rank, where ranks can be drawn.
static bool idist__detect_draws(const idist__config *config, const idist__launcher *row,
                                const idist__detect_look *look) {
    bool is_plain = row->kind == IDIST__LAUNCHER_IDIST || row->kind == IDIST__LAUNCHER_ENV;
    return config->may_draw && is_plain && look->has_size && !look->has_rank;
}

// Whether both variables of a row are set. One alone is an error: guessing the other would start N
// worlds of one rank.
static idist_status idist__detect_check(idist__config *config, const idist__launcher *row,
                                        idist__detect_look *look, bool asked, bool *found) {
    look->size_var = row->size;
    look->has_rank = idist__os_env(row->rank) != NULL;
    look->has_size = idist__os_env(row->size) != NULL;
    look->missing = look->has_rank ? row->size : row->rank;
    look->skip = false;
    if (row->look) row->look(look, asked);
    *found = false;
    if (look->skip) return IDIST_OK;

    if (idist__detect_draws(config, row, look)) {
        *found = true;
        return IDIST_OK;
    }

    if (asked && !(look->has_rank && look->has_size))
        return idist__fail(IDIST_ERR_ENV,
                           "IDIST_LAUNCHER=%s, but %s is not set: it did not start this process",
                           idist__os_env("IDIST_LAUNCHER"), look->missing);
    if (look->has_rank != look->has_size)
        return idist__fail(IDIST_ERR_ENV,
                           "%s is set but %s is not: a launcher sets both; unset it to run alone",
                           look->has_rank ? row->rank : look->size_var, look->missing);
    *found = look->has_rank;
    if (*found && !asked && row->kind == IDIST__LAUNCHER_ENV) return idist__slurm_check_env(found);

    return IDIST_OK;
}

static idist_status idist__detect_by_variables(idist__config *config, const idist__launcher *row,
                                               bool asked, bool *found) {
    bool is_torchrun = row->kind == IDIST__LAUNCHER_ENV && idist__os_env("TORCHELASTIC_RUN_ID");
    idist__detect_look look;
    idist_status status = idist__detect_check(config, row, &look, asked, found);

    if (status == IDIST_OK && !*found) return IDIST_OK;
    config->launcher_kind = row->kind;
    config->launcher = is_torchrun ? "torchrun" : row->name;
    config->rank_var = look.has_rank ? row->rank : NULL;
    config->size_var = look.size_var;
    config->job_var = row->job;
    if (idist__detect_draws(config, row, &look)) config->rank = IDIST__RANK_DRAWN;

    return status == IDIST_OK ? idist__detect_numbers(config, row, look.size_var) : status;
}

// mpiexec -pmi-port of MPICH.
static idist_status idist__detect_pmi_port(idist__config *config, const idist__launcher *row,
                                           bool asked, bool *found) {
    const char *port = idist__os_env("PMI_PORT"), *id = idist__os_env("PMI_ID");

    (void)row;
    (void)asked;
    *found = port && id && !idist__pmi_is_taken();
    return *found ? idist__pmi_introduce(config, port, id) : IDIST_OK;
}

static idist_status idist__detect_tf(idist__config *config, const idist__launcher *row, bool asked,
                                     bool *found) {
    const char *text = idist__os_env("TF_CONFIG");
    idist_status status = text ? idist__tf_config_check(text) : IDIST_OK;

    (void)row;
    if (status != IDIST_OK) return status;
    *found = text && (asked || strstr(text, "\"cluster\""));
    if (*found) return idist__tf_config_read(config, text);
    if (!asked) return IDIST_OK;

    return idist__fail(IDIST_ERR_ENV, "IDIST_LAUNCHER=tf_config, but TF_CONFIG is not set");
}

// Only a PMIx client can learn the size.
static idist_status idist__detect_pmix(idist__config *config, const idist__launcher *row,
                                       bool asked, bool *found) {
    (void)config;
    (void)row;
    (void)asked;
    *found = idist__os_env("PMIX_RANK") && idist__os_env("PMIX_NAMESPACE");
    if (!*found) return IDIST_OK;

    return idist__fail(IDIST_ERR_ENV,
                       "PMIX_RANK is set, but nothing in the environment says how many ranks there "
                       "are: set IDIST_RANK and IDIST_WORLD_SIZE, or IDIST_LAUNCHER=none to run "
                       "alone");
}

// make lint compares names and variables with the lists in idist.h.
//
// hydra has two rows, because it hands down rank and size in two ways: in variables, or, with
// mpiexec -pmi-port, over a connection to the port in PMI_PORT.
//
// clang-format off
static const idist__launcher idist__launchers[] = {
    {IDIST__LAUNCHER_IDIST, "idist", "IDIST_RANK", "IDIST_WORLD_SIZE", "IDIST_LOCAL_RANK",
     "IDIST_LOCAL_WORLD_SIZE", NULL, idist__detect_by_variables, NULL},
    {IDIST__LAUNCHER_ENV, "env", "RANK", "WORLD_SIZE", "LOCAL_RANK",
     "LOCAL_WORLD_SIZE", NULL, idist__detect_by_variables, idist__detect_look_env},
    {IDIST__LAUNCHER_INDEXED, "indexed", "JOB_COMPLETION_INDEX", "WORLD_SIZE", NULL,
     NULL, NULL, idist__detect_by_variables, idist__detect_look_indexed},
    {IDIST__LAUNCHER_HOROVODRUN, "horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK",
     "HOROVOD_LOCAL_SIZE", "HOROVOD_GLOO_RENDEZVOUS_PORT", idist__detect_by_variables, NULL},
    {IDIST__LAUNCHER_OPENMPI, "openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE",
     idist__detect_by_variables, NULL},
    {IDIST__LAUNCHER_MVAPICH2, "mvapich2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
     "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE", "MPIRUN_ID",
     idist__detect_by_variables, NULL},
    {IDIST__LAUNCHER_JSRUN, "jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE",
     "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE", "PMIX_NAMESPACE",
     idist__detect_by_variables, NULL},
    {IDIST__LAUNCHER_PALS, "pals", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID",
     "PALS_LOCAL_SIZE", "PALS_APID", idist__detect_by_variables, idist__detect_look_pals},
    {IDIST__LAUNCHER_FLUX, "flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID",
     NULL, "FLUX_JOB_ID", idist__detect_by_variables, NULL},
    {IDIST__LAUNCHER_HYDRA, "hydra", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID",
     "MPI_LOCALNRANKS", NULL, idist__detect_by_variables, idist__detect_look_hydra},
    {IDIST__LAUNCHER_HYDRA, "hydra", "PMI_ID", "PMI_PORT", NULL,
     NULL, NULL, idist__detect_pmi_port, NULL},
    {IDIST__LAUNCHER_SLURM, "slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
     NULL, "SLURM_JOB_ID", idist__detect_by_variables, idist__detect_look_slurm},
    {IDIST__LAUNCHER_TF_CONFIG, "tf_config", "TF_CONFIG", "TF_CONFIG", NULL,
     NULL, NULL, idist__detect_tf, NULL},
    {IDIST__LAUNCHER_PMIX, NULL, "PMIX_RANK", "PMIX_NAMESPACE", NULL,
     NULL, NULL, idist__detect_pmix, NULL}};
// clang-format on

// Another name of a launcher, or NULL.
static const char *idist__detect_alias(const idist__launcher *row) {
    return row->kind == IDIST__LAUNCHER_ENV ? "torchrun" : NULL;
}

static bool idist__detect_is_named(const idist__launcher *row, const char *name) {
    const char *alias = idist__detect_alias(row);
    return row->name && (strcmp(name, row->name) == 0 || (alias && strcmp(name, alias) == 0));
}

// "none, idist, env, torchrun, ...": what IDIST_LAUNCHER may be.
static void idist__detect_names(char *names, size_t cap) {
    size_t i;

    snprintf(names, cap, "none");

    for (i = 0; i < IDIST__COUNT_OF(idist__launchers); i++) {
        const idist__launcher *row = &idist__launchers[i];
        const char *alias = idist__detect_alias(row);

        if (!row->name || (i && row->kind == row[-1].kind)) continue;
        idist__text_append(names, cap, ", %s", row->name);
        if (alias) idist__text_append(names, cap, ", %s", alias);
    }
}

// Takes the first launcher that applies, or the one that IDIST_LAUNCHER names.
static idist_status idist__launch_detect(idist__config *config) {
    const char *asked = idist__os_env("IDIST_LAUNCHER");
    bool found = false, is_known = !asked || strcmp(asked, "none") == 0;
    char names[300];
    size_t i;

    for (i = 0; i < IDIST__COUNT_OF(idist__launchers); i++) {
        const idist__launcher *row = &idist__launchers[i];
        idist_status status;

        if (asked && !idist__detect_is_named(row, asked)) continue;
        is_known = true;
        status = row->detect(config, row, asked != NULL, &found);
        if (status != IDIST_OK || found) return status;
    }

    if (is_known) return IDIST_OK;

    idist__detect_names(names, sizeof names);
    return idist__fail(IDIST_ERR_ENV, "IDIST_LAUNCHER=%s: use one of %s", asked, names);
}

//------------------------------------------------------------------------------
// [launch:where]  where the ranks meet
// uses os:env socket process fail text hash parse address env slurm pmi
//
// The result is the text in config->where that idist__store_open takes. Ranks of one host meet at a
// local socket, whose name is derived from what they have in common; others at a TCP port of rank
// 0, in a file, or through a multicast group.
//
//     init_method (or IDIST_INIT_METHOD)   ->  config->where
//     file:///path                             file:/path, or file:/path.GROUP
//     tcp://239.x.y.z:port                     cast:239.x.y.z:port/SIZE RUN RESTART
//     tcp://host:port                          unix:... for a loopback host, else tcp:host:port
//     env:// or none, MASTER_ADDR and _PORT    the same; torch:host:port where the agent serves
//     none of these, one host                  unix:..., from the launcher's job
//     none of these, hydra                     pmi:
//     none of these, Slurm                     tcp:HOST:PORT of the first host of the step
//------------------------------------------------------------------------------

enum { IDIST__WHERE_MASTER_PORT = 29500, IDIST__WHERE_JOB_PORT = 15000 };

// Where the desc or the environment puts rank 0.
typedef struct idist__where_master {
    const char *host; // or NULL
    int port;
    bool has_port; // it was given, and is no default
} idist__where_master;

static void idist__where_text(idist__config *config, const char *scheme, const char *host,
                              int port) {
    bool is_v6 = strchr(host, ':') != NULL;
    snprintf(config->where, sizeof config->where, "%s:%s%s%s:%d", scheme, is_v6 ? "[" : "", host,
             is_v6 ? "]" : "", port);
}

static bool idist__where_is_one_host(const idist__config *config) {
    return config->local_size == config->world_size;
}

// Ranks that share a loopback address share a host and need no TCP: the address becomes the name of
// a local socket, together with the run, since two jobs may have the same port when nobody listens
// at it.
static void idist__where_tcp(idist__config *config, const char *host, int port) {
    const char *restart = idist__os_env("TORCHELASTIC_RESTART_COUNT");
    const char *run = idist__os_env("TORCHELASTIC_RUN_ID");
    bool is_local = idist__address_host_is_loopback(host) || idist__where_is_one_host(config);

    if (config->transport == IDIST__TRANSPORT_TCP || !is_local) {
        idist__where_text(config, "tcp", host, port);
        return;
    }

    snprintf(config->where, sizeof config->where, "unix:idist-%lu-%d-%s-%08x",
             idist__os_socket_user(), port, restart ? restart : "0",
             run ? (unsigned)idist__hash(run, strlen(run)) : 0u);
}

// All ranks are on this host and no address is given: they meet at one derived from the job, or
// from the launcher's process on this host.
static void idist__where_job(idist__config *config) {
    const char *job = config->job_var ? idist__os_env(config->job_var) : NULL;
    const char *step = "";
    char text[600];
    uint64_t name;

    if (config->launcher_kind == IDIST__LAUNCHER_SLURM)
        step = idist__os_env(idist__slurm_step_var());
    if (job) snprintf(text, sizeof text, "%s %.300s %s", config->launcher, job, step);
    else snprintf(text, sizeof text, "%s %ld", config->launcher, (long)idist__os_process_parent());
    name = idist__hash(text, strlen(text));

    if (config->transport == IDIST__TRANSPORT_TCP)
        snprintf(config->where, sizeof config->where, "tcp:127.0.0.1:%d",
                 IDIST__WHERE_JOB_PORT + (int)(name % 10000));
    else
        snprintf(config->where, sizeof config->where, "unix:idist-%lu-%016llx",
                 idist__os_socket_user(), (unsigned long long)name);
}

// The first host of the step, which has rank 0 unless the user has ordered the ranks differently,
// and a port derived from job and step.
static idist_status idist__where_slurm(idist__config *config) {
    const char *var = idist__env_either("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST");
    const char *list = idist__os_env(var), *order = idist__os_env("SLURM_DISTRIBUTION");
    char host[IDIST__SLURM_HOST_NBYTES] = "";
    int job = 0, step = 0;

    if (!list ||
        (order && (strncmp(order, "arbitrary", 9) == 0 || strncmp(order, "plane", 5) == 0)))
        return IDIST_OK;
    if (!idist__slurm_each_host(list, idist__slurm_first_host, host) || !host[0])
        return idist__fail(IDIST_ERR_ENV, "%s=%s is not a list of hosts", var, list);
    idist__env_int("SLURM_JOB_ID", 0, INT32_MAX, &job);
    idist__env_int(idist__slurm_step_var(), 0, INT32_MAX, &step);
    idist__where_tcp(config, host, IDIST__WHERE_JOB_PORT + (job % 10000 + step % 10000) % 10000);

    return IDIST_OK;
}

// fe80::/10 without an interface cannot be connected to.
static bool idist__where_lacks_scope(const char *host) {
    bool is_link_local = (host[0] == 'f' || host[0] == 'F') && (host[1] == 'e' || host[1] == 'E') &&
                         host[2] && strchr("89abAB", host[2]) && host[3] && host[4] == ':';

    return is_link_local && !strchr(host, '%');
}

static idist_status idist__where_no_scope(bool in_desc, const char *host) {
    return idist__fail(in_desc ? IDIST_ERR_ARG : IDIST_ERR_ENV,
                       "the address of rank 0, \"%s\", is link-local, so it needs the interface of "
                       "this host: %s%%eth0, for example; or give one that all hosts reach",
                       host, host);
}

static idist_status idist__where_read_master(const idist_desc *desc, idist__where_master *master) {
    idist_status status;

    master->host = desc->master_addr ? desc->master_addr : idist__os_env("MASTER_ADDR");
    master->has_port = desc->master_port || idist__os_env("MASTER_PORT");
    master->port = IDIST__WHERE_MASTER_PORT;

    if (desc->master_port) {
        if (desc->master_port < 0 || desc->master_port > 65535)
            return idist__fail(IDIST_ERR_ARG, "master_port %d is not between 1 and 65535",
                               desc->master_port);
        master->port = desc->master_port;
    } else {
        status = idist__env_int("MASTER_PORT", 1, 65535, &master->port);
        if (status != IDIST_OK) return status;
    }

    if (master->host && !idist__address_host_is_possible(master->host))
        return idist__fail(desc->master_addr ? IDIST_ERR_ARG : IDIST_ERR_ENV,
                           "MASTER_ADDR (desc.master_addr) is \"%s\": give only the name or the "
                           "address of rank 0's host, without a port, brackets or \"://\"",
                           master->host);
    if (master->host && idist__where_lacks_scope(master->host))
        return idist__where_no_scope(desc->master_addr != NULL, master->host);
    if (master->host && !master->has_port)
        return idist__fail(desc->master_addr ? IDIST_ERR_ARG : IDIST_ERR_ENV,
                           "MASTER_ADDR (desc.master_addr) is set but MASTER_PORT "
                           "(desc.master_port) is not: give rank 0's port as well");

    return IDIST_OK;
}

// Whether torchrun's agent serves a TCPStore at MASTER_ADDR and MASTER_PORT: then nobody else can
// listen there.
static bool idist__where_has_agent(const idist__config *config, const idist_desc *desc) {
    const char *agent = idist__os_env("TORCHELASTIC_USE_AGENT_STORE");

    if (desc->master_addr || desc->master_port || idist__where_is_one_host(config)) return false;
    return agent && strcmp(agent, "True") == 0;
}

// Whether hydra started us and can carry rank 0's address to the others.
static bool idist__where_has_pmi(const idist__config *config) {
    if (config->launcher_kind != IDIST__LAUNCHER_HYDRA || idist__pmi_is_taken()) return false;
    return idist__os_env("PMI_FD") || idist__os_env("PMI_PORT");
}

// No init_method: the environment says where, or the launcher does.
static idist_status idist__where_env(idist__config *config, const idist_desc *desc) {
    bool is_one_host = idist__where_is_one_host(config);
    bool has_job = config->job_var || config->launcher_kind == IDIST__LAUNCHER_HYDRA;
    idist__where_master master;
    idist_status status = idist__where_read_master(desc, &master);

    if (status != IDIST_OK) return status;

    if (master.host) {
        if (idist__where_has_agent(config, desc))
            idist__where_text(config, "torch", master.host, master.port);
        else idist__where_tcp(config, master.host, master.port);
        return IDIST_OK;
    }

    if (!master.has_port && idist__where_has_pmi(config)) {
        idist__text_copy(config->where, sizeof config->where, "pmi:");
        return IDIST_OK;
    }

    if (!is_one_host) // a backend that needs an address reports that there is none
        return config->launcher_kind == IDIST__LAUNCHER_SLURM ? idist__where_slurm(config)
                                                              : IDIST_OK;
    if (!master.has_port && has_job) idist__where_job(config);
    else idist__where_tcp(config, "127.0.0.1", master.port);

    return IDIST_OK;
}

// Ranks of a multicast group belong together if size, run and restart are the same.
static void idist__where_multicast(idist__config *config, const char *host, int port) {
    const char *run = idist__os_env("TORCHELASTIC_RUN_ID");
    const char *restart = idist__os_env("TORCHELASTIC_RESTART_COUNT");

    snprintf(config->where, sizeof config->where, "cast:%s:%d/%d %.200s %.20s", host, port,
             config->world_size, run ? run : "", restart ? restart : "0");
}

static bool idist__where_is_multicast(const char *host) {
    int first = atoi(host); // 224 to 239 begin a multicast group
    return first >= 224 && first < 240 && strspn(host, "0123456789.") == strlen(host);
}

static const char *idist__where_method(const idist_desc *desc) {
    return desc->init_method ? desc->init_method : idist__os_env("IDIST_INIT_METHOD");
}

// Whether the ranks meet in a file, if its path is right.
static bool idist__where_is_file(const idist_desc *desc) {
    const char *method = idist__where_method(desc);
    return !desc->store && method && strncmp(method, "file:", 5) == 0;
}

// Each group of ranks has a file of its own: PATH, or PATH.NAME.
static idist_status idist__where_file(idist__config *config, const idist_desc *desc,
                                      const char *path) {
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                  "0123456789._-";
    const char *name = desc->group_name ? desc->group_name : idist__os_env("IDIST_GROUP_NAME");

    if (!name) name = "";
    if (strlen(name) >= sizeof config->group_name || name[strspn(name, letters)])
        return idist__fail(desc->group_name ? IDIST_ERR_ARG : IDIST_ERR_ENV,
                           "%s \"%.80s\": the name of a group has up to %d letters, digits and ._-",
                           desc->group_name ? "group_name" : "IDIST_GROUP_NAME", name,
                           (int)sizeof config->group_name - 1);

    idist__text_copy(config->group_name, sizeof config->group_name, name);
    snprintf(config->where, sizeof config->where, "file:%s%s%s", path, name[0] ? "." : "", name);

    return IDIST_OK;
}

static idist_status idist__where_unknown(const idist_desc *desc, const char *method) {
    const char *hint = "";

    if (strncmp(method, "file:", 5) == 0)
        hint = ". The path of a file begins with a slash, so the method has three";
    return idist__fail(desc->init_method ? IDIST_ERR_ARG : IDIST_ERR_ENV,
                       "%s \"%s\" is not one of env://, tcp://host:port (a port from 1 to 65535), "
                       "tcp://239.x.y.z:port, file:///path%s",
                       desc->init_method ? "init_method" : "IDIST_INIT_METHOD", method, hint);
}

static idist_status idist__where_read_method(idist__config *config, const idist_desc *desc,
                                             const char *method) {
    char host[256];
    int port;

    if (strncmp(method, "file:///", 8) == 0 &&
        strlen(method) + sizeof config->group_name < sizeof config->where)
        return idist__where_file(config, desc, method + 7);

    if (strncmp(method, "tcp://", 6) == 0 &&
        idist__parse_host_port(method + 6, host, sizeof host, &port) && port > 0) {
        if (idist__where_lacks_scope(host))
            return idist__where_no_scope(desc->init_method != NULL, host);
        if (idist__where_is_multicast(host)) idist__where_multicast(config, host, port);
        else idist__where_tcp(config, host, port);
        return IDIST_OK;
    }

    return idist__where_unknown(desc, method);
}

// A method is checked also where one rank needs none.
static idist_status idist__where_find(idist__config *config, const idist_desc *desc) {
    const char *method = idist__where_method(desc);
    bool is_none = strcmp(config->launcher, "none") == 0 && !idist__os_env("IDIST_LAUNCHER");
    bool is_env = !method || strcmp(method, "env://") == 0;
    idist_status status = IDIST_OK;

    config->store = desc->store;
    if (config->store) return IDIST_OK;
    if (!is_env) status = idist__where_read_method(config, desc, method);

    if (!is_env && config->world_size == 1) {
        config->where[0] = 0;
        config->lone_method = is_none ? method : NULL;
        config->lone_method_in_desc = desc->init_method != NULL;
    }

    if (!is_env || config->world_size == 1) return status;
    if (config->where[0] && !method) return IDIST_OK; // from TF_CONFIG

    return idist__where_env(config, desc);
}

// For a backend that has claimed the configuration, and has perhaps found out the rank by itself:
// a process that is to meet others must not run alone because its rank was forgotten.
static idist_status idist__where_check_lone(const idist__config *config) {
    const char *method = config->lone_method;
    bool in_desc = config->lone_method_in_desc;

    if (!method || strcmp(config->launcher, "none") != 0) return IDIST_OK;

    return idist__fail(in_desc ? IDIST_ERR_ARG : IDIST_ERR_ENV,
                       "initialize: %s %s says where ranks meet, but nothing says which of them "
                       "this process is: %s%s, or start it by a launcher; IDIST_LAUNCHER=none runs "
                       "it alone",
                       in_desc ? "init_method" : "IDIST_INIT_METHOD", method,
                       in_desc ? "give desc.rank and desc.world_size, or set RANK and WORLD_SIZE"
                               : "set RANK and WORLD_SIZE",
                       strncmp(method, "file:", 5) == 0 ? " (alone: the rank is drawn)" : "");
}

//------------------------------------------------------------------------------
// [launch:claim]  a process takes its rank, and the others learn if it ends
// uses socket text store:table store:store
//
// A process that tells the store which rank it is leaves a will in the same request: if it ends
// before it has joined, the store sets the key where the other ranks look for failures. Before that
// request nobody can know of the process, and the others wait until their time-out. That leaves:
//
//     a process that ends before the handshake with the store is over, or never comes
//     rank 0, whose process has the store, for ranks that had not reached the store by then
//     a store of torch, which knows no wills; there the agent of torchrun ends the other workers
//------------------------------------------------------------------------------

typedef struct idist__failure { // why a rank gave up: the value of "failed", see [join:failure]
    int32_t status;
    int32_t rank;    // -1: a process that was drawing its rank
    int32_t by_will; // the process ended; the store says so for it
    char text[400];
} idist__failure;

// Adds 1 to the number of `key`. If this process ends before it has dropped its will, the store
// sets `failed`, in which % is the sum. sum NULL: see idist__store_claim.
IDIST__UNUSED static idist_status idist__claim_run(idist_store *store, const char *key,
                                                   const char *failed, int rank, int64_t *sum) {
    idist__failure will;
    char host[64];

    memset(&will, 0, sizeof will);
    will.status = (int32_t)IDIST_ERR_PEER_LOST;
    will.rank = rank;
    will.by_will = 1;
    if (!idist__os_socket_host_name(host, sizeof host))
        idist__text_copy(host, sizeof host, "localhost");
    snprintf(will.text, sizeof will.text, "its process on %s ended during idist_initialize", host);

    return idist__store_claim(store, key, failed, &will, sizeof will, sum);
}

//------------------------------------------------------------------------------
// [launch:draw]  ranks that are drawn from a file
// uses clock os:random fail store:table store:store env claim
//
// Processes that know the file, the size of their world and perhaps a group's name, but no rank:
//
//     the first one that opens the file is the server of its store, and rank 0
//     it sets  idist/ranks   {drawn, a random number of this world}
//     another  reads that, claims idist/drawn, and has the sum as its rank
//
// From then on everything is as with given ranks. The lock of the server, which ends with its
// process, tells a world that is being made from the leftover of a dead one. Where ranks are given,
// rank 0 sets idist/ranks as well, so that a process of the other kind is told by name.
//
// A rank may give a world up while rank 0 still holds its file. Coming back it finds the number of
// the world that it met there last, whether it drew its rank or was given it, and waits until the
// file is gone. Each thread has a number of its own, since threads can be ranks.
//------------------------------------------------------------------------------

typedef struct idist__draw_mark { // the value of idist/ranks
    uint64_t drawn;               // 0: the ranks are given
    uint64_t world;               // random
} idist__draw_mark;

enum { IDIST__DRAW_AGAIN_MS = 3 };

static const char *idist__draw_file(const idist__config *config) { return config->where + 5; }

static idist_status idist__draw_set_mark(idist_store *store, bool drawn) {
    idist__draw_mark mark;

    mark.drawn = drawn;
    idist__os_random(&mark.world, sizeof mark.world);
    idist__me.file_world = mark.world;
    return idist_store_set(store, "idist/ranks", &mark, sizeof mark);
}

static idist_status idist__draw_get_mark(const idist__config *config, idist_store *store,
                                         idist__draw_mark *mark) {
    size_t nbytes = 0;
    idist_status status;

    memset(mark, 0, sizeof *mark);
    status = idist_store_get(store, "idist/ranks", mark, sizeof *mark, &nbytes, 0);

    if (status == IDIST_ERR_TRUNCATED || (status == IDIST_OK && nbytes != sizeof *mark))
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "initialize: rank 0 at %s was built from another version of idist.h",
                           idist__draw_file(config));
    return status;
}

static idist_status idist__draw_still_held(const idist__config *config) {
    return idist__fail(IDIST_ERR_TIMEOUT,
                       "initialize: an earlier world of this rank still holds %s",
                       idist__draw_file(config));
}

// The ranks are given, and the store in the file is open: whether they are to all. *again: it is
// that of the last world, or was; the next one comes after it.
IDIST__UNUSED static idist_status idist__draw_check_given(const idist__config *config,
                                                          idist_store *store, bool *again) {
    uint64_t last = idist__me.file_world;
    idist__draw_mark mark;
    idist_status status;

    *again = false;
    if (config->rank == 0) return idist__draw_set_mark(store, false);
    status = idist__draw_get_mark(config, store, &mark);

    if (status == IDIST_ERR_PEER_LOST && last) {
        *again = true;
        idist__me.file_world = 0; // a second loss is that of the new rank 0
        return IDIST_OK;
    }

    if (status != IDIST_OK) return status;
    *again = mark.world == last;
    if (!mark.drawn) idist__me.file_world = mark.world;
    if (*again || !mark.drawn) return IDIST_OK;

    return idist__fail(
        IDIST_ERR_ENV,
        "initialize: this process was given rank %d (%s), but rank 0 at %s was given "
        "none: give a rank to all processes, or to none",
        config->rank, config->rank_var ? config->rank_var : "desc.rank", idist__draw_file(config));
}

// Tries to draw from the store. *again: this world is none for us, but the next one may be.
static idist_status idist__draw_try(idist__config *config, bool *again) {
    idist_store *store = config->drawn;
    idist__draw_mark mark;
    int64_t rank = 0;
    idist_status status;

    *again = false;
    config->rank = 0;
    if (idist__store_is_file_server(store)) return idist__draw_set_mark(store, true);

    status = idist__draw_get_mark(config, store, &mark);

    if (status == IDIST_OK && !mark.drawn)
        return idist__fail(IDIST_ERR_ENV,
                           "initialize: this process was given no rank, but rank 0 at %s was: give "
                           "a rank to all processes (RANK or desc.rank), or to none",
                           idist__draw_file(config));
    if (status == IDIST_OK) *again = mark.world == idist__me.file_world;
    if (status == IDIST_OK && !*again)
        status = idist__claim_run(store, "idist/drawn", "idist/1/failed", -1, &rank);

    if (status == IDIST_ERR_PEER_LOST) { // the server left before we had a rank
        *again = true;
        return IDIST_OK;
    }

    if (status != IDIST_OK || *again) return status;

    if (rank >= config->world_size) {
        idist__store_drop_will(store);
        return idist__fail(
            IDIST_ERR_RANK_TAKEN,
            "initialize: all %d ranks of the world at %s (group \"%s\") are taken: start %d "
            "processes, or give each job a file or a group name (IDIST_GROUP_NAME) of its own",
            config->world_size, idist__draw_file(config), config->group_name, config->world_size);
    }

    config->rank = (int)rank;
    idist__me.file_world = mark.world;

    return IDIST_OK;
}

static idist_status idist__draw_open(idist__config *config, int64_t deadline_ns) {
    char where[sizeof config->where];
    int64_t left_ms = idist__os_clock_ms_until(deadline_ns);
    idist_store_desc desc;

    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = left_ms == 0 ? 1 : (int)left_ms;
    desc.secret = config->secret.nbytes ? config->secret.bytes : NULL;
    desc.secret_nbytes = config->secret.nbytes;
    desc.allocator = config->mem;
    snprintf(where, sizeof where, "draw:%s", idist__draw_file(config));

    return idist__store_open(where, &desc, -1, &config->drawn);
}

// Closes the store, if the ranks were drawn from one and nobody has taken it over.
static void idist__draw_close(idist__config *config) {
    char text[sizeof idist__me.text];

    memcpy(text, idist__me.text, sizeof text); // closing may overwrite it
    idist_store_close(&config->drawn);
    memcpy(idist__me.text, text, sizeof text);
}

// Draws the rank of a configuration that has none. Leaves the store in config->drawn.
static idist_status idist__draw_rank(idist__config *config) {
    int64_t deadline_ns = idist__os_clock_deadline(config->init_timeout_ms);
    idist_status status = IDIST_OK;
    bool again = true;

    while (again && status == IDIST_OK) {
        status = idist__draw_open(config, deadline_ns);
        if (status != IDIST_OK) return idist__fail(status, "initialize: %s", idist__me.text);
        status = idist__draw_try(config, &again);
        config->rank_drawn = status == IDIST_OK && !again;
        if (config->rank_drawn) return IDIST_OK;

        idist__draw_close(config);
        if (status == IDIST_OK && idist__os_clock_ms_until(deadline_ns) == 0)
            status = idist__draw_still_held(config);
        if (status == IDIST_OK) idist__os_clock_pause_ms(IDIST__DRAW_AGAIN_MS);
    }

    return status;
}

//------------------------------------------------------------------------------
// [launch:config]  explicit field, then environment, then built-in
// uses os:env cpu socket os:file fail text hash secret env detect where
//
// idist__launch_config is the only place where defaults are filled in.
//------------------------------------------------------------------------------

// Sets *choice to the index of the field, or else of the variable, among `names` ("a, b, c"); 0 is
// the default.
static idist_status idist__config_choice(const char *field, const char *var, const char *names,
                                         int *choice) {
    const char *text = field ? field : idist__os_env(var), *at = names;
    size_t nbytes = text ? strlen(text) : 0;

    *choice = 0;
    if (!text) return IDIST_OK;

    for (; at; ++*choice) {
        if (strncmp(at, text, nbytes) == 0 && (at[nbytes] == ',' || !at[nbytes])) return IDIST_OK;
        at = strchr(at, ',');
        if (at) at += 2;
    }

    *choice = 0;
    if (field)
        return idist__fail(IDIST_ERR_ARG, "desc: \"%s\" (%s) is not one of %s", text, var, names);

    return idist__fail(IDIST_ERR_ENV, "%s=%s: use one of %s", var, text, names);
}

// 0 in desc or environment means the default, a negative number means no time-out: -1 here.
static idist_status idist__config_timeout(int field, const char *var, int fallback, int *value) {
    idist_status status = IDIST_OK;

    *value = field;
    if (!field) status = idist__env_int(var, -1, INT32_MAX, value);
    if (status != IDIST_OK) return status;
    if (!*value) *value = fallback;
    if (*value < 0) *value = -1;
    return IDIST_OK;
}

static idist_status idist__config_choices(idist__config *config, const idist_desc *desc) {
    struct {
        const char *field, *var, *names;
        int *choice;
    } choices[3] = {{desc->transport, "IDIST_TRANSPORT", "auto, socket, tcp", &config->transport},
                    {desc->algorithm, "IDIST_ALGO", "auto, latency, bandwidth, chunked, remote",
                     &config->algorithm},
                    {desc->bind, "IDIST_BIND", "none, core", &config->bind}};
    idist_status status = IDIST_OK;
    size_t i;

    for (i = 0; i < IDIST__COUNT_OF(choices) && status == IDIST_OK; i++)
        status = idist__config_choice(choices[i].field, choices[i].var, choices[i].names,
                                      choices[i].choice);
    return status;
}

enum { IDIST__CONFIG_SOCKETS_MAX = 8 };

static idist_status idist__config_sockets(int field, int *sockets) {
    *sockets = field;
    if (!field) return idist__env_int("IDIST_SOCKETS", 0, IDIST__CONFIG_SOCKETS_MAX, sockets);
    if (field > 0 && field <= IDIST__CONFIG_SOCKETS_MAX) return IDIST_OK;

    return idist__fail(IDIST_ERR_ARG, "desc.sockets is %d, and must be from 0 to %d", field,
                       (int)IDIST__CONFIG_SOCKETS_MAX);
}

static idist_status idist__config_numbers(idist__config *config, const idist_desc *desc) {
    int shm_mib = 0, check = 1, high_priority = 0;
    idist_status status = idist__config_timeout(desc->timeout_ms, "IDIST_TIMEOUT_MS",
                                                30 * 60 * 1000, &config->timeout_ms);

    if (status == IDIST_OK)
        status = idist__config_timeout(desc->init_timeout_ms, "IDIST_INIT_TIMEOUT_MS",
                                       5 * 60 * 1000, &config->init_timeout_ms);
    if (status == IDIST_OK) status = idist__env_int("IDIST_SHM_MIB", 0, 1024, &shm_mib);
    if (status == IDIST_OK) status = idist__config_sockets(desc->sockets, &config->sockets);
    if (status == IDIST_OK) status = idist__env_int("IDIST_CHECK", 0, 1, &check);
    if (status == IDIST_OK)
        status = idist__env_int("IDIST_HIGH_PRIORITY_STREAM", 0, 1, &high_priority);
    if (status != IDIST_OK) return status;

    config->unchecked = !check;
    config->high_priority = desc->high_priority_stream || high_priority;
    config->shm_asked = desc->shm_nbytes || shm_mib;
    config->shm_nbytes = desc->shm_nbytes;
    if (!config->shm_nbytes)
        config->shm_nbytes = (size_t)(shm_mib ? shm_mib : IDIST__SHM_MIB) << 20;

    return IDIST_OK;
}

static void idist__config_text(const char *field, const char *var, char *text, size_t capacity) {
    const char *value = field ? field : idist__os_env(var);
    if (value) idist__text_copy(text, capacity, value);
}

// An id that is too long ends with a hash of all of it, so that no other one becomes equal.
static void idist__config_host_id(idist__config *config, const char *field) {
    const char *value = field ? field : idist__os_env("IDIST_HOSTID");
    size_t nbytes = value ? strlen(value) : 0, end = sizeof config->host_id - 17;

    idist__config_text(field, "IDIST_HOSTID", config->host_id, sizeof config->host_id);
    if (nbytes >= sizeof config->host_id)
        snprintf(config->host_id + end, 17, "%016llx",
                 (unsigned long long)idist__hash(value, nbytes));
}

// desc.rank is IDIST__RANK_DRAWN: no launcher is asked.
static idist_status idist__config_draws(idist__config *config, const idist_desc *desc) {
    const char *var = idist__env_either("IDIST_WORLD_SIZE", "WORLD_SIZE");

    if (desc->world_size < 0 || (!desc->world_size && !idist__os_env(var)))
        return idist__fail(IDIST_ERR_ARG,
                           "rank %d is drawn, for which the world's size is needed: set "
                           "desc.world_size, IDIST_WORLD_SIZE or WORLD_SIZE",
                           desc->rank);
    if (!config->may_draw)
        return idist__fail(IDIST_ERR_ARG,
                           "rank %d is drawn, for which the ranks must meet in a file: set "
                           "desc.init_method or IDIST_INIT_METHOD to file:///path",
                           desc->rank);

    config->launcher = "explicit";
    config->rank = IDIST__RANK_DRAWN;
    config->world_size = desc->world_size;

    return desc->world_size ? IDIST_OK : idist__env_count(var, &config->world_size);
}

// Rank and world size: those of the desc, or else the launcher's.
static idist_status idist__config_rank(idist__config *config, const idist_desc *desc) {
    config->rank = 0;
    config->world_size = 1;
    config->local_rank = config->local_size = -1;
    config->launcher = "none";
    config->may_draw = idist__where_is_file(desc);
    if (desc->world_size == 0 && desc->rank == 0) return idist__launch_detect(config);
    if (desc->rank == IDIST__RANK_DRAWN) return idist__config_draws(config, desc);

    if (desc->world_size < 1 || desc->rank < 0 || desc->rank >= desc->world_size)
        return idist__fail(IDIST_ERR_ARG,
                           "rank %d of world_size %d: both are needed, and 0 <= rank < world_size",
                           desc->rank, desc->world_size);
    config->launcher = "explicit";
    config->rank = desc->rank;
    config->world_size = desc->world_size;

    return IDIST_OK;
}

// A path that is too long is ignored: part of it would be that of another file.
static void idist__config_lost_file(idist__config *config) {
    const char *path = idist__os_env("IDIST_LOST_FILE");

    if (path && strlen(path) < sizeof config->lost_file)
        idist__text_copy(config->lost_file, sizeof config->lost_file, path);
}

// This rank has lost another one. Tells the process that started it.
static void idist__config_tell_lost(const idist__config *config) {
    idist__os_file file;

    if (config->lost) {
        __atomic_store_n(config->lost, 1, __ATOMIC_RELEASE);
    } else if (config->lost_file[0]) {
        file = idist__os_file_open(config->lost_file, IDIST__OS_FILE_CREATE);
        idist__os_file_close(&file);
    }
}

// Fills all of *config. desc may be NULL.
static idist_status idist__launch_config(idist__config *config, const idist_desc *desc) {
    idist_desc d;
    idist_status status;

    memset(config, 0, sizeof *config);
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    config->listener = -1;
    config->mem = d.allocator;
    config->logger = d.logger;
    if (!config->mem.alloc_fn != !config->mem.free_fn)
        return idist__fail(IDIST_ERR_ARG, "allocator: give both alloc_fn and free_fn, or neither");

    status = idist__config_choices(config, &d);
    if (status == IDIST_OK) status = idist__config_numbers(config, &d);
    if (status != IDIST_OK) return status;

    config->mpi_comm = d.mpi_comm;
    config->nccl_comm = d.nccl_comm;
    config->nccl_config = d.nccl_config;
    idist__config_host_id(config, d.host_id);
    idist__config_text(d.device, "IDIST_DEVICE", config->device, sizeof config->device);
    idist__config_text(d.backend, "IDIST_BACKEND", config->backends, sizeof config->backends);
    idist__config_text(d.device_backend, "IDIST_DEVICE_BACKEND", config->device_backend,
                       sizeof config->device_backend);
    if (strcmp(config->device_backend, "auto") == 0) config->device_backend[0] = 0;
    config->device_backend_in_desc = d.device_backend != NULL;
    idist__config_lost_file(config);

    status = idist__secret_find(&config->secret, d.secret, d.secret_nbytes);
    if (status == IDIST_OK) status = idist__config_rank(config, &d);
    if (status == IDIST_OK) status = idist__where_find(config, &d);
    if (config->world_size == 1 && config->rank == IDIST__RANK_DRAWN) config->rank = 0;

    return status;
}

// The same number on all processes that can reach each other by local sockets, and so by loopback.
IDIST__UNUSED static uint64_t idist__config_reach_key(void) {
    char text[256];

    idist__os_socket_reach(text, sizeof text);
    return idist__hash(text, strlen(text));
}

// The same number on all ranks that can share memory and local sockets, and on no others: host_id,
// or else what the operating system says.
IDIST__UNUSED static uint64_t idist__config_host_key(const idist__config *config) {
    if (config->host_id[0]) return idist__hash(config->host_id, strlen(config->host_id));
    return idist__config_reach_key();
}

// The same number on all ranks that have the same processors of one machine, although it may be
// several hosts to them.
IDIST__UNUSED static uint64_t idist__config_processor_key(void) {
    char machine[65];
    idist__os_cpu_set cpus;

    idist__os_socket_machine(machine, sizeof machine);
    idist__os_cpu_usable(&cpus);

    return idist__hash_mix(idist__hash(machine, strlen(machine)), idist__hash(&cpus, sizeof cpus));
}

#endif // IDIST_LAUNCH_H
