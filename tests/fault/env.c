// env: incomplete and nonsensical environment variables cause IDIST_ERR_ENV, and the error text
// names the variable
#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "ranks.h"

typedef struct env_case {
    const char *vars;    // "A=1 B=2"
    idist_status status; // expected result
    const char *name;    // must be part of the error text
    int world_size;      // if the status is IDIST_OK
} env_case;

// Cases that each run in one process. No master is needed, because bad variables are rejected
// before any rank is contacted.
static const env_case cases[] = {
    {"", IDIST_OK, "", 1},
    {"RANK= WORLD_SIZE=", IDIST_OK, "", 1}, // an empty variable counts as unset
    {"RANK=0 WORLD_SIZE=1", IDIST_OK, "", 1},
    {"RANK=0", IDIST_ERR_ENV, "WORLD_SIZE", 0},
    {"WORLD_SIZE=2", IDIST_ERR_ENV, "RANK", 0},
    {"RANK=2 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1", IDIST_ERR_ENV, "RANK", 0},
    {"RANK=-1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1", IDIST_ERR_ENV, "RANK", 0},
    {"RANK=1x WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1", IDIST_ERR_ENV, "RANK", 0},
    {"RANK=0x0 WORLD_SIZE=1", IDIST_ERR_ENV, "RANK", 0},
    {"RANK=0 WORLD_SIZE=0", IDIST_ERR_ENV, "WORLD_SIZE", 0},
    {"RANK=0 WORLD_SIZE=-2", IDIST_ERR_ENV, "WORLD_SIZE", 0},
    {"RANK=0 WORLD_SIZE=two", IDIST_ERR_ENV, "WORLD_SIZE", 0},
    {"RANK=0 WORLD_SIZE=2.0", IDIST_ERR_ENV, "WORLD_SIZE", 0},
    {"RANK=0 WORLD_SIZE=99999999999999999999", IDIST_ERR_ENV, "WORLD_SIZE", 0},
    {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1", IDIST_ERR_ENV, "MASTER_PORT", 0},
    {"RANK=0 WORLD_SIZE=2 MASTER_PORT=29500", IDIST_ERR_ENV, "MASTER_ADDR", 0},
    {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=[fd00::1] MASTER_PORT=1", IDIST_ERR_ENV, "MASTER_ADDR", 0},
    {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1:29500 MASTER_PORT=1", IDIST_ERR_ENV, "MASTER_ADDR",
     0},
    {"RANK=1 WORLD_SIZE=2 MASTER_ADDR=http://h MASTER_PORT=1", IDIST_ERR_ENV, "MASTER_ADDR", 0},
    {"RANK=0 WORLD_SIZE=2 MASTER_PORT=29500 LOCAL_WORLD_SIZE=1", IDIST_ERR_ENV, "MASTER_ADDR", 0},
    {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=70000", IDIST_ERR_ENV, "MASTER_PORT",
     0},
    {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=http", IDIST_ERR_ENV, "MASTER_PORT", 0},
    {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=-5", IDIST_ERR_ENV, "MASTER_PORT", 0},
    {"RANK=0 WORLD_SIZE=2 LOCAL_RANK=first MASTER_ADDR=127.0.0.1 MASTER_PORT=1", IDIST_ERR_ENV,
     "LOCAL_RANK", 0},
    {"RANK=0 WORLD_SIZE=2 LOCAL_RANK=-1 MASTER_ADDR=127.0.0.1 MASTER_PORT=1", IDIST_ERR_ENV,
     "LOCAL_RANK", 0},
    {"RANK=0 WORLD_SIZE=2 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1",
     IDIST_ERR_ENV, "LOCAL_RANK", 0},
    {"IDIST_RANK=0", IDIST_ERR_ENV, "WORLD_SIZE", 0},
    {"IDIST_WORLD_SIZE=2", IDIST_ERR_ENV, "RANK", 0},
    {"IDIST_RANK=x IDIST_WORLD_SIZE=2", IDIST_ERR_ENV, "IDIST_RANK", 0},
    // The library's own variables take precedence.
    {"IDIST_RANK=0 IDIST_WORLD_SIZE=1 RANK=7 WORLD_SIZE=8", IDIST_OK, "", 1},
    {"HOROVOD_RANK=0", IDIST_ERR_ENV, "HOROVOD_SIZE", 0},
    // The descriptor that hydra passed was closed before the rank started.
    {"PMI_RANK=0 PMI_SIZE=2 MPI_LOCALNRANKS=2 PMI_FD=999", IDIST_ERR_ENV, "PMI_FD=999", 0},
    {"PMI_RANK=1 PMI_SIZE=2 MPI_LOCALNRANKS=2 PMI_FD=998", IDIST_ERR_ENV, "PMI_FD=998", 0},
    {"PMI_RANK=0 PMI_SIZE=2 PMI_FD=first", IDIST_ERR_ENV, "PMI_FD=first", 0},
    {"IDIST_TIMEOUT_MS=soon", IDIST_ERR_ENV, "IDIST_TIMEOUT_MS", 0},
    {"IDIST_INIT_TIMEOUT_MS=1x", IDIST_ERR_ENV, "IDIST_INIT_TIMEOUT_MS", 0},
    {"IDIST_TRANSPORT=pigeon", IDIST_ERR_ENV, "IDIST_TRANSPORT", 0},
    {"IDIST_ALGO=magic", IDIST_ERR_ENV, "IDIST_ALGO", 0},
    {"IDIST_SOCKETS=9", IDIST_ERR_ENV, "IDIST_SOCKETS", 0},
    {"IDIST_SOCKETS=-1", IDIST_ERR_ENV, "IDIST_SOCKETS", 0},
    {"IDIST_SOCKETS=two", IDIST_ERR_ENV, "IDIST_SOCKETS", 0},
    {"IDIST_LOG=loud", IDIST_ERR_ENV, "IDIST_LOG", 0},
    {"IDIST_INIT_METHOD=smoke://signals IDIST_RANK=0 IDIST_WORLD_SIZE=2", IDIST_ERR_ENV,
     "IDIST_INIT_METHOD", 0},
    {"IDIST_INIT_METHOD=file://here WORLD_SIZE=2", IDIST_ERR_ENV, "IDIST_INIT_METHOD", 0},
    {"IDIST_INIT_METHOD=file:///tmp/idist-none RANK=0", IDIST_ERR_ENV, "WORLD_SIZE", 0},
    {"IDIST_INIT_METHOD=file:///tmp/idist-none WORLD_SIZE=two", IDIST_ERR_ENV, "WORLD_SIZE", 0},
    {"IDIST_INIT_METHOD=file:///tmp/idist-none WORLD_SIZE=2 IDIST_GROUP_NAME=a/b", IDIST_ERR_ENV,
     "IDIST_GROUP_NAME", 0},
    {"IDIST_INIT_METHOD=file:///tmp/idist-none HOROVOD_SIZE=2", IDIST_ERR_ENV, "HOROVOD_RANK", 0},
    {"IDIST_INIT_METHOD=file:///tmp/idist-none WORLD_SIZE=1", IDIST_OK, "", 1},
    // An init method says only where ranks meet. A process without a rank must not run alone by
    // mistake.
    {"IDIST_INIT_METHOD=tpc://x:1", IDIST_ERR_ENV, "IDIST_INIT_METHOD \"tpc://x:1\"", 0},
    {"IDIST_INIT_METHOD=tpc://x:1 RANK=0 WORLD_SIZE=1", IDIST_ERR_ENV, "\"tpc://x:1\"", 0},
    {"IDIST_INIT_METHOD=tpc://x:1 IDIST_LAUNCHER=none", IDIST_ERR_ENV, "\"tpc://x:1\"", 0},
    {"IDIST_INIT_METHOD=tcp://x:0", IDIST_ERR_ENV, "a port from 1 to 65535", 0},
    {"IDIST_INIT_METHOD=file://x", IDIST_ERR_ENV, "begins with a slash", 0},
    {"IDIST_INIT_METHOD=tcp://x:1", IDIST_ERR_ENV,
     "IDIST_INIT_METHOD tcp://x:1 says where ranks meet, but nothing says which of them this "
     "process is: set RANK and WORLD_SIZE, or",
     0},
    {"IDIST_INIT_METHOD=tcp://239.1.2.3:4567", IDIST_ERR_ENV, "set RANK and WORLD_SIZE, or", 0},
    {"IDIST_INIT_METHOD=file:///tmp/idist-none", IDIST_ERR_ENV,
     "set RANK and WORLD_SIZE (alone: the rank is assigned), or", 0},
    {"IDIST_INIT_METHOD=tcp://x:1 IDIST_BACKEND=ring", IDIST_ERR_ENV, "set RANK and WORLD_SIZE", 0},
    {"IDIST_INIT_METHOD=tcp://x:1 IDIST_LAUNCHER=none", IDIST_OK, "", 1},
    {"IDIST_INIT_METHOD=tcp://x:1 RANK=0 WORLD_SIZE=1", IDIST_OK, "", 1},
    {"IDIST_INIT_METHOD=env://", IDIST_OK, "", 1},
    {"IDIST_SECRET=short", IDIST_ERR_ENV, "IDIST_SECRET", 0},
    {"IDIST_SECRET_FILE=/nonexistent/secret", IDIST_ERR_ENV, "IDIST_SECRET_FILE", 0},
    {"IDIST_BACKEND=self,ring", IDIST_OK, "", 1},
};

// Unsets every variable by which a launcher, or the shell that runs the tests, could influence the
// test.
static void clean_environment(void) {
    static const char *const prefixes[] = {"RANK=",
                                           "WORLD_SIZE=",
                                           "LOCAL_",
                                           "MASTER_",
                                           "GROUP_",
                                           "IDIST_",
                                           "HOROVOD_",
                                           "OMPI_",
                                           "PMI_",
                                           "PMIX_",
                                           "SLURM_",
                                           "MPI_",
                                           "MV2_",
                                           "TORCHELASTIC_",
                                           "NODE_RANK=",
                                           "FLUX_",
                                           "PALS_",
                                           "JSM_",
                                           "JOB_COMPLETION_INDEX=",
                                           "TF_CONFIG="};
    extern char **environ;
    for (char **e = environ; *e;) {
        bool hit = false;
        for (size_t i = 0; i < sizeof prefixes / sizeof prefixes[0]; i++)
            hit = hit || strncmp(*e, prefixes[i], strlen(prefixes[i])) == 0;
        hit = hit && strncmp(*e, "IDIST_TEST_", 11) != 0;
        char name[200];
        snprintf(name, sizeof name, "%.*s", (int)strcspn(*e, "="), *e);
        if (hit) unsetenv(name); // moves the remaining entries down
        else e++;
    }
}

static void set_variables(const char *vars) {
    char copy[400];
    snprintf(copy, sizeof copy, "%s", vars);
    for (char *save = NULL, *word = strtok_r(copy, " ", &save); word;
         word = strtok_r(NULL, " ", &save)) {
        char *value = strchr(word, '=');
        TAP_REQUIRE(value);
        *value++ = 0;
        setenv(word, value, 1);
    }
}

typedef struct env_result {
    proc_slot slot;
    int world_size, rank, local_rank;
} env_result;

static void child(const char *vars, env_result *r) {
    alarm((unsigned)(15 * test_slow_factor()));
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    clean_environment();
    set_variables(vars);
    char before[64];
    snprintf(before, sizeof before, "%s", getenv("RANK") ? getenv("RANK") : "");
    idist_status status = idist_initialize(NULL);
    proc_result(&r->slot, status);
    r->world_size = idist_get_world_size();
    r->rank = idist_get_rank();
    r->local_rank = idist_get_local_rank();
    if (strcmp(before, getenv("RANK") ? getenv("RANK") : "") != 0) _exit(81);
    if (status == IDIST_OK && idist_barrier(NULL) != IDIST_OK) _exit(82);
    if (status == IDIST_OK && idist_finalize() != IDIST_OK) _exit(83);
    _exit(status == IDIST_OK || !idist_is_initialized() ? 0 : 84);
}

static env_result *make_results(size_t n) {
    return (env_result *)shared_alloc(n * sizeof(env_result));
}

static pid_t start(const char *vars, env_result *r) {
    pid_t pid = fork();
    TAP_REQUIRE(pid >= 0);
    if (pid == 0) child(vars, r);
    tap_register_child(pid);
    return pid;
}

static void finish(pid_t pid, const char *vars) {
    int wait_status = 0;
    TAP_REQUIRE(waitpid(pid, &wait_status, 0) == pid);
    tap_forget_child(pid);
    rank_check(WIFEXITED(wait_status) && WEXITSTATUS(wait_status) == 0,
               "\"%s\": wait status 0x%x%s", vars, (unsigned)wait_status,
               WIFSIGNALED(wait_status) && WTERMSIG(wait_status) == SIGALRM ? " (hang)" : "");
}

static void one_case(const env_case *c) {
    env_result *r = make_results(1);
    tap_running("environment \"%s\"", c->vars);
    ranks_reset();
    finish(start(c->vars, r), c->vars);
    rank_check(r->slot.has_result && r->slot.status == c->status, "got %s expected %s; text \"%s\"",
               idist_status_name((idist_status)r->slot.status), idist_status_name(c->status),
               r->slot.text);
    rank_check(strstr(r->slot.text, c->name) != NULL, "the text must name %s: got \"%s\"", c->name,
               r->slot.text);
    if (c->status == IDIST_OK)
        rank_check(r->world_size == c->world_size, "world size: got %d", r->world_size);
    ranks_report("\"%s\": %s %s", c->vars, idist_status_name(c->status), c->name);
    munmap(r, sizeof *r);
}

// Starts a real world from environment variables, with as few variables as launchers set. In the
// format, %R stands for the rank and %P for the port.
static void real_world(const char *format, int n, const char *name) {
    env_result *r = make_results((size_t)n);
    pid_t pid[RANKS_MAX];
    char vars[RANKS_MAX][300];
    int port = free_port();
    tap_running("%s", name);
    ranks_reset();
    for (int k = 0; k < n; k++) {
        char text[300];
        size_t at = 0;
        snprintf(text, sizeof text, "%s", format);
        vars[k][0] = 0;
        for (const char *p = text; *p && at < sizeof vars[k] - 12; p++) { // expands %R and %P
            if (p[0] == '%' && p[1] == 'R')
                at += (size_t)snprintf(vars[k] + at, sizeof vars[k] - at, "%d", k), p++;
            else if (p[0] == '%' && p[1] == 'P')
                at += (size_t)snprintf(vars[k] + at, sizeof vars[k] - at, "%d", port), p++;
            else vars[k][at++] = *p;
        }
        vars[k][at] = 0;
        pid[k] = start(vars[k], &r[k]);
    }
    for (int k = 0; k < n; k++) {
        finish(pid[k], vars[k]);
        rank_check(r[k].slot.status == IDIST_OK && r[k].rank == k && r[k].world_size == n &&
                       r[k].local_rank == k,
                   "rank %d: got %s, rank %d of %d, local rank %d; \"%s\"", k,
                   idist_status_name((idist_status)r[k].slot.status), r[k].rank, r[k].world_size,
                   r[k].local_rank, r[k].slot.text);
    }
    ranks_report("%s", name);
    munmap(r, (size_t)n * sizeof *r);
}

// Launchers, each with the pair of variables by which the library recognizes it. `more` lists other
// variables that the launcher sets.
typedef struct launched {
    const char *rank, *size, *launcher, *more;
} launched;

static const launched pairs[] = {{"IDIST_RANK", "IDIST_WORLD_SIZE", "idist", ""},
                                 {"RANK", "WORLD_SIZE", "env", ""},
                                 {"RANK", "WORLD_SIZE", "torchrun", "TORCHELASTIC_RUN_ID=x"},
                                 {"HOROVOD_RANK", "HOROVOD_SIZE", "horovodrun", ""},
                                 {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "openmpi", ""},
                                 {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "mvapich2", ""},
                                 {"FLUX_TASK_RANK", "FLUX_JOB_SIZE", "flux", ""},
                                 {"PMI_RANK", "PMI_SIZE", "hydra", ""}};

static int launch(int number, void *arg) {
    const launched *l = &pairs[number];
    char line[100];
    (void)arg;
    clean_environment();
    set_variables(l->more);
    setenv(l->rank, "0", 1);
    rank_is(0, idist_initialize(NULL), IDIST_ERR_ENV); // only one variable of the pair is set
    rank_check(strstr(idist_last_error(), l->size), "the text must name %s: got \"%s\"", l->size,
               idist_last_error());
    setenv(l->size, "1", 1);
    if (!rank_ok(0, idist_initialize(NULL))) return 1;
    snprintf(line, sizeof line, "launcher: %s by %s and %s\n", l->launcher, l->rank, l->size);
    rank_check(strcmp(idist_launcher(), l->launcher) == 0, "launcher: got %s expected %s",
               idist_launcher(), l->launcher);
    rank_check(strstr(idist_show_config(), line), "show_config must say \"%s\": got %s", line,
               idist_show_config());
    rank_check(strstr(idist_show_config(), "world size: 1\nrank: 0\nlocal rank: 0\n"),
               "show_config: got %s", idist_show_config());
    return idist_finalize() == IDIST_OK ? 0 : 1;
}

// Checks that the variables set the options they name, and that fields of idist_desc override them.
static int choices(int number, void *arg) {
    idist__config c;
    idist_desc d;
    (void)number;
    (void)arg;
    clean_environment();
    set_variables(
        "IDIST_ALGO=bandwidth IDIST_TRANSPORT=tcp IDIST_TIMEOUT_MS=1234 IDIST_INIT_TIMEOUT_MS=567");
    rank_ok(0, idist__config_fill(&c, NULL));
    rank_check(c.algorithm == 2 && c.transport == 2 && c.timeout_ms == 1234 &&
                   c.init_timeout_ms == 567,
               "got %d %d %d %d expected 2 2 1234 567", c.algorithm, c.transport, c.timeout_ms,
               c.init_timeout_ms);
    d = desc_with("socket", "latency");
    d.timeout_ms = 5;
    d.init_timeout_ms = -1;
    rank_ok(0, idist__config_fill(&c, &d));
    rank_check(c.algorithm == 1 && c.transport == 1 && c.timeout_ms == 5 && c.init_timeout_ms == -1,
               "got %d %d %d %d expected 1 1 5 -1", c.algorithm, c.transport, c.timeout_ms,
               c.init_timeout_ms);
    return 0;
}

// Checks where ranks meet. A restart under torchrun must meet at a different place than the first
// run, and an IPv6 address must get its brackets.
static int meeting_place(int number, void *arg) {
    idist__config c;
    char first[200], place[200];
    (void)number;
    (void)arg;
    clean_environment();
    set_variables("RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500");
    rank_ok(0, idist__config_fill(&c, NULL));
    idist__meet_print(&c.meet, first, sizeof first);
    set_variables("TORCHELASTIC_RESTART_COUNT=1");
    rank_ok(0, idist__config_fill(&c, NULL));
    idist__meet_print(&c.meet, place, sizeof place);
    rank_check(strcmp(first, place) != 0, "a restart meets at the same place: %s", place);
    set_variables("MASTER_ADDR=fd00::1");
    rank_ok(0, idist__config_fill(&c, NULL));
    idist__meet_print(&c.meet, place, sizeof place);
    rank_check(strcmp(place, "tcp:[fd00::1]:29500") == 0, "got %s expected tcp:[fd00::1]:29500",
               place);
    return 0;
}

static void in_children(int n, int (*fn)(int, void *), const char *name) {
    tap_running("%s", name);
    ranks_reset();
    procs_run(n, 10000, fn, NULL);
    ranks_report("%s", name);
}

int main(void) {
    tap_deadline(60);
    (void)ranks__log();
    in_children((int)(sizeof pairs / sizeof pairs[0]), launch,
                "every launcher is named, and half of its pair refused");
    in_children(1, choices, "what the variables choose is chosen");
    in_children(1, meeting_place, "where the ranks meet");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) one_case(&cases[i]);
    real_world("RANK=%R WORLD_SIZE=3 LOCAL_RANK=%R MASTER_ADDR=127.0.0.1 MASTER_PORT=%P", 3,
               "the five variables of torch");
    real_world("RANK=%R WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=%P", 2,
               "without LOCAL_RANK, as PyTorchJob");
    real_world("RANK=%R WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 LOCAL_RANK=%R MASTER_PORT=%P", 2,
               "all local, without MASTER_ADDR");
    real_world("IDIST_RANK=%R IDIST_WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=%P", 2,
               "IDIST_RANK and IDIST_WORLD_SIZE");
    real_world("RANK=%R WORLD_SIZE=2 IDIST_INIT_METHOD=tcp://127.0.0.1:%P", 2,
               "IDIST_INIT_METHOD=tcp://");
    real_world("RANK=%R WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=%P IDIST_TRANSPORT=tcp", 2,
               "IDIST_TRANSPORT=tcp");
    return tap_done();
}
