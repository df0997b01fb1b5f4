// doctor.h - idistrun --doctor: what this machine gives to idist, in one screen
//
// One line for each thing: its name, what was found, and in brackets what to do. [wrong: ...] keeps
// idist from working as this process is set up, [note: ...] does not. At most 24 lines of 100
// columns. Include it first: it holds the implementation of idist, whose functions find most of it
// out.
//
// The last lines are a self test: 2 ranks, and if there are more cores as many as those, up to 4,
// add up numbers, over shared memory and over TCP on the loopback interface. It has SELF_TEST_MS in
// all.
#ifndef IDIST_IMPLEMENTATION
#define IDIST_IMPLEMENTATION
#endif
#include "../../idist.h"

#include <limits.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>

enum { DOCTOR_COLUMNS = 100, DOCTOR_NAME_COLUMNS = 16 };
enum { SELF_TEST_MS = 2000, SELF_TEST_RANKS = 4, SELF_TEST_COUNT = 1 << 20 };

typedef struct self_test { // what a rank 0 says; in memory that the ranks share
    double small_us, large_gb_per_s;
    int wrong_count; // of all ranks; atomic
    char sharing[160];
    // what the parent says
    int ranks;
    const char *transport;
    bool passed, ran;
    char failure[300];
} self_test;

enum { DOCTOR_FINE, DOCTOR_NOTE, DOCTOR_WRONG };

static struct {
    int wrong_count;
    self_test *tests;               // SELF_TESTS of them
    idist__config config, launcher; // the latter: what the launcher says, and nothing else
    idist_status configured, detected;
    char why_not_configured[300], why_not_detected[300];
} doctor;

enum { SELF_TEST_SHM, SELF_TEST_TCP, SELF_TEST_SHM_MANY, SELF_TEST_TCP_MANY, SELF_TESTS };

// The text of the last failure, without the name of the function.
static void doctor_failure(char *text, size_t capacity) {
    const char *from = idist_last_error();

    if (strncmp(from, "initialize: ", 12) == 0) from += 12;
    snprintf(text, capacity, "%s", from);
}

// Prints a line. A value that is too long is cut before the advice. Without advice (NULL), what is
// wrong says itself what to do, and may take a second line.
static void doctor_say(const char *name, int verdict, const char *advice, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
static void doctor_say(const char *name, int verdict, const char *advice, const char *format, ...) {
    static const char *const words[] = {"", " [note", " [wrong"};
    char value[1000], end[100] = "";
    const char *at = value;
    int room, nbytes;
    va_list args;

    va_start(args, format);
    vsnprintf(value, sizeof value, format, args);
    va_end(args);
    if (verdict != DOCTOR_FINE)
        snprintf(end, sizeof end, "%s%s%s]", words[verdict], advice ? ": " : "",
                 advice ? advice : "");
    if (verdict == DOCTOR_WRONG) doctor.wrong_count++;

    room = DOCTOR_COLUMNS - DOCTOR_NAME_COLUMNS - (int)strlen(end);

    if (verdict == DOCTOR_WRONG && !advice && (int)strlen(value) > room) { // up to a blank
        for (nbytes = room; nbytes > room / 2 && value[nbytes] != ' ';) nbytes--;
        printf("%-*s%.*s\n", DOCTOR_NAME_COLUMNS, name, nbytes, value);
        at = value + nbytes + (value[nbytes] == ' ');
        name = "";
    }

    if ((int)strlen(at) > room)
        printf("%-*s%.*s...%s\n", DOCTOR_NAME_COLUMNS, name, room - 3, at, end);
    else printf("%-*s%s%s\n", DOCTOR_NAME_COLUMNS, name, at, end);
}

//------------------------------------------------------------------------------
// the self test
//------------------------------------------------------------------------------

static void self_test_no_log(idist_log_level level, const char *line, void *user) {
    (void)level;
    (void)line;
    (void)user;
}

// Fills what rank adds, or if rank is -1 checks the sum over n ranks; returns how many are wrong.
static int self_test_numbers(float *x, int rank, int n) {
    int i, wrong_count = 0;

    for (i = 0; i < SELF_TEST_COUNT; i++) {
        float sum = (float)(n * (i % 7) + n * (n - 1) / 2);
        if (rank >= 0) x[i] = (float)(rank + i % 7);
        else wrong_count += x[i] < sum || x[i] > sum;
    }

    return wrong_count;
}

// Seconds of an all_reduce; negative: it failed.
static double self_test_time(const float *x, float *y, int count, int times) {
    int64_t begun_ns = 0;
    int i;

    for (i = -times / 4 - 1; i < times; i++) {
        if (i == 0) begun_ns = idist__os_clock_now_ns();
        if (idist_all_reduce(x, y, (size_t)count, IDIST_F32, IDIST_SUM, NULL) != IDIST_OK)
            return -1;
    }

    return (double)(idist__os_clock_now_ns() - begun_ns) * 1e-9 / times;
}

static int self_test_rank(int rank, void *arg) {
    self_test *test = (self_test *)arg;
    int n = idist_get_world_size();
    float *x = (float *)malloc(2 * sizeof *x * SELF_TEST_COUNT), *y = x + SELF_TEST_COUNT;
    const char *sharing = strstr(idist_show_config(), "on this host: ");
    double small_s, large_s;

    if (!x) return 1;
    self_test_numbers(x, rank, n);
    small_s = self_test_time(x, y, 1, 100);
    large_s = small_s < 0 ? -1 : self_test_time(x, y, SELF_TEST_COUNT, 3);
    if (large_s < 0) return 1;
    __atomic_add_fetch(&test->wrong_count, self_test_numbers(y, -1, n), __ATOMIC_RELAXED);
    free(x);
    if (rank != 0) return 0;

    test->small_us = small_s * 1e6;
    test->large_gb_per_s = SELF_TEST_COUNT * sizeof *x / large_s * 1e-9;
    if (sharing) sscanf(sharing, "on this host: %159[^\n]", test->sharing);

    return 0;
}

static void self_test_run(self_test *test, int64_t deadline_ns) {
    int left_ms = idist__os_clock_ms_until(deadline_ns);
    idist_workers *workers = NULL;
    idist_report report;
    idist_desc d;
    idist_status status;

    memset(&d, 0, sizeof d);
    memset(&report, 0, sizeof report);
    d.backend = "ring";
    d.transport = test->transport;
    d.timeout_ms = d.init_timeout_ms = left_ms > 0 ? left_ms : 1;
    d.grace_ms = 50;
    d.report = &report;
    d.logger.log_fn = self_test_no_log;
    snprintf(test->failure, sizeof test->failure, "not run: the time was up");
    if (left_ms <= 0) return;

    test->ran = true;
    status = idist_spawn_start(self_test_rank, test, test->ranks, &d, &workers);
    if (status == IDIST_OK) status = idist_spawn_wait(workers, left_ms);
    doctor_failure(test->failure, sizeof test->failure);
    if (report.text[0]) snprintf(test->failure, sizeof test->failure, "%.299s", report.text);

    if (status == IDIST_ERR_TIMEOUT) {
        snprintf(test->failure, sizeof test->failure, "not done in %d ms", left_ms);
        idist_spawn_kill(workers, SIGKILL);
        idist_spawn_wait(workers, -1);
    }

    if (status == IDIST_OK && test->wrong_count)
        snprintf(test->failure, sizeof test->failure, "%d sums are wrong", test->wrong_count);
    test->passed = status == IDIST_OK && !test->wrong_count;
}

static void self_test_all(void) {
    int64_t deadline_ns = idist__os_clock_deadline(SELF_TEST_MS);
    int i, many = idist__os_cpu_count();
    void *memory = mmap(NULL, sizeof *doctor.tests * SELF_TESTS, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    if (memory == MAP_FAILED) {
        perror("idistrun --doctor: memory");
        exit(1);
    }

    doctor.tests = (self_test *)memory;
    if (many > SELF_TEST_RANKS) many = SELF_TEST_RANKS;

    for (i = 0; i < SELF_TESTS; i++) {
        self_test *test = &doctor.tests[i];

        test->ranks = i < SELF_TEST_SHM_MANY ? 2 : many;
        test->transport = i == SELF_TEST_SHM || i == SELF_TEST_SHM_MANY ? "auto" : "tcp";
        if (test->ranks > 2 || i < SELF_TEST_SHM_MANY) self_test_run(test, deadline_ns);
    }
}

// TCP is not needed within a host, unless the user wants it; but it must not be wrong.
static void self_test_say(const self_test *test) {
    bool is_tcp = strcmp(test->transport, "tcp") == 0;
    bool is_needed =
        !is_tcp || doctor.config.transport == IDIST__TRANSPORT_TCP || test->wrong_count;
    char name[32];

    if (test->ranks < 2 || (test->ranks == 2 && test >= doctor.tests + SELF_TEST_SHM_MANY)) return;
    snprintf(name, sizeof name, "%d ranks, %s", test->ranks, is_tcp ? "tcp" : "host");
    if (test->passed)
        doctor_say(name, DOCTOR_FINE, NULL, "all_reduce right; 4 B in %.1f us, 4 MiB at %.2f GB/s",
                   test->small_us, test->large_gb_per_s);
    else
        doctor_say(name, is_needed && test->ran ? DOCTOR_WRONG : DOCTOR_NOTE, "see the lines above",
                   "%s", test->failure);
}

//------------------------------------------------------------------------------
// the lines
//------------------------------------------------------------------------------

static void doctor_machine(void) {
    struct utsname system;
    int usable = idist__os_cpu_count();
    long all = sysconf(_SC_NPROCESSORS_ONLN);

    if (uname(&system) != 0) memset(&system, 0, sizeof system);
    doctor_say("idist", DOCTOR_FINE, NULL, "%s on %s, %s %s %s", IDIST_VERSION, idist_hostname(),
               system.sysname, system.release, system.machine);
    doctor_say("cores", usable < all ? DOCTOR_NOTE : DOCTOR_FINE,
               "this process may not use the others (taskset, cgroup)",
               "%d of %ld, memory %.1f GiB", usable, all,
               (double)idist__os_segment_ram() / (1 << 30));
}

static void doctor_shared_memory(void) {
    const self_test *test = &doctor.tests[SELF_TEST_SHM];
    bool shares = strncmp(test->sharing, "shared memory", 13) == 0;
    bool tells_why = strncmp(test->sharing, "no shared memory: ", 18) == 0; // ... rank 0: why
    const char *why = tells_why ? strstr(test->sharing + 18, ": ") : NULL;
    bool reads = strstr(test->sharing, "are read from") != NULL;
    bool reads_slowly = strstr(test->sharing, "reads other processes slowly") != NULL;
    char text[200] = "/dev/shm is missing", scope[16] = "";
    FILE *file = fopen("/proc/sys/kernel/yama/ptrace_scope", "re");
    struct statvfs room;

    if (file && !fgets(scope, sizeof scope, file)) scope[0] = 0;
    if (file) fclose(file);
    scope[strcspn(scope, "\n")] = 0;
    if (statvfs("/dev/shm", &room) == 0)
        snprintf(text, sizeof text, "/dev/shm %.1f of %.1f GiB free",
                 (double)room.f_bavail * (double)room.f_frsize / (1 << 30),
                 (double)room.f_blocks * (double)room.f_frsize / (1 << 30));

    if (!test->passed) doctor_say("shared memory", DOCTOR_NOTE, "the self test failed", "%s", text);
    else if (!shares)
        doctor_say("shared memory", DOCTOR_NOTE, "slower; allow memfd, raise ulimit -v, -f, -l",
                   "none%s%s", why ? ": " : "", why ? why + 2 : "");
    else
        doctor_say("shared memory",
                   doctor.config.transport == IDIST__TRANSPORT_AUTO ? DOCTOR_FINE : DOCTOR_NOTE,
                   "off by IDIST_TRANSPORT", "works (memfd); %s", text);

    if (reads)
        doctor_say("reading others", DOCTOR_FINE, NULL, "works: large buffers take one copy");
    else if (reads_slowly)
        doctor_say("reading others", DOCTOR_FINE, NULL,
                   "works, but slowly: large buffers take two copies");
    else if (!shares) doctor_say("reading others", DOCTOR_NOTE, "needs shared memory", "not known");
    else
        doctor_say("reading others", DOCTOR_NOTE,
                   "large buffers take two copies; allow process_vm_readv", "not permitted%s%s",
                   scope[0] ? ", ptrace_scope " : "", scope);
}

// Whether a TCP connection over the loopback interface can be made.
static bool doctor_has_loopback(void) {
    int64_t deadline_ns = idist__os_clock_deadline(500);
    idist__os_address address;
    int listener = -1, fd = -1;

    if (idist__address_tcp(&address, "127.0.0.1", 0) != IDIST_OK) return false;
    listener = idist__os_socket_listen(&address);
    if (listener >= 0 && idist__os_socket_own_address(listener, &address))
        fd = idist__os_socket_connect(&address, deadline_ns);
    idist__os_descriptor_close(&listener);
    if (fd < 0) return false;
    idist__os_descriptor_close(&fd);

    return true;
}

static void doctor_network(void) {
    idist__own_address own;
    bool asked = getenv("IDIST_ADDR") || getenv("IDIST_SOCKET_IFNAME");
    bool wants_tcp = doctor.config.transport == IDIST__TRANSPORT_TCP;
    char text[400] = "", why[300];
    int count = idist__interface_list(text, sizeof text);

    doctor_say("interfaces", count > 0 ? DOCTOR_FINE : DOCTOR_NOTE, "none is up: ip link set lo up",
               "%s", count > 0 ? text : "none");

    if (doctor_has_loopback()) doctor_say("loopback", DOCTOR_FINE, NULL, "works: TCP on 127.0.0.1");
    else
        doctor_say("loopback", wants_tcp ? DOCTOR_WRONG : DOCTOR_NOTE, "ip link set lo up",
                   "no TCP on 127.0.0.1, for IDIST_TRANSPORT=tcp");

    if (idist__interface_choose(NULL, &own) == IDIST_OK) {
        doctor_say("address", DOCTOR_FINE, NULL, "%s (%s), told to ranks on other hosts", own.ip,
                   own.ifname[0] ? own.ifname : "IDIST_ADDR");
    } else {
        doctor_failure(why, sizeof why);
        doctor_say("address", asked ? DOCTOR_WRONG : DOCTOR_NOTE,
                   asked ? NULL : "one host only; for more set IDIST_ADDR", "%s",
                   asked ? why : "none that other hosts reach");
    }
}

// What the environment says about ranks.
static void doctor_launcher(void) {
    const idist__config *c = &doctor.launcher;
    bool in_job = c->launcher_kind == IDIST__LAUNCHER_NONE && getenv("SLURM_JOB_ID");
    char rank[32] = "a drawn rank", place[IDIST__MEET_NBYTES];

    if (c->rank != IDIST__RANK_DRAWN) snprintf(rank, sizeof rank, "rank %d", c->rank);

    if (doctor.detected != IDIST_OK)
        doctor_say("launcher", DOCTOR_WRONG, NULL, "%s", doctor.why_not_detected);
    else if (c->launcher_kind == IDIST__LAUNCHER_NONE)
        doctor_say("launcher", in_job ? DOCTOR_NOTE : DOCTOR_FINE,
                   "in a job of Slurm, srun starts ranks", "none: a world of 1");
    else
        doctor_say("launcher", DOCTOR_FINE, NULL, "%s by %s%s%s: %s of %d", c->launcher,
                   c->rank_var ? c->rank_var : "", c->rank_var && c->size_var ? " and " : "",
                   c->size_var ? c->size_var : "", rank, c->world_size);

    if (doctor.detected != IDIST_OK || doctor.configured != IDIST_OK) return;

    if (c->world_size == 1)
        doctor_say("meeting", DOCTOR_FINE, NULL, "no place: one rank meets nobody");
    else if (doctor.config.meet.kind == IDIST__MEET_NONE)
        doctor_say("meeting", DOCTOR_WRONG, "set MASTER_ADDR and MASTER_PORT",
                   "nothing says where the ranks meet");
    else
        doctor_say("meeting", DOCTOR_FINE, NULL, "%s",
                   idist__meet_print(&doctor.config.meet, place, sizeof place));
}

// Whether ranks can meet in a file there: 0 if a server and a client do.
static idist_status doctor_meet_in_file(const char *url) {
    idist_store_desc desc;
    idist_store *server = NULL, *client = NULL;
    char value[4];
    idist_status status;

    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = 300;
    desc.server = true;
    status = idist_store_open(url, &desc, &server);
    desc.server = false;
    if (status == IDIST_OK) status = idist_store_open(url, &desc, &client);
    if (status == IDIST_OK) status = idist_store_set(client, "key", "met", sizeof value);
    if (status == IDIST_OK) status = idist_store_get(server, "key", value, sizeof value, NULL, 300);
    if (client) idist_store_close(&client);
    if (server) idist_store_close(&server);

    return status;
}

// A file:// of the environment is tried in its folder, under another name.
static void doctor_file(void) {
    const char *method = getenv("IDIST_INIT_METHOD");
    bool is_needed = method && strncmp(method, "file:///", 8) == 0;
    const char *path = is_needed ? method + 7 : "/tmp/meet";
    int nbytes = (int)(strrchr(path, '/') - path);
    char url[PATH_MAX + 64], why[300];

    snprintf(url, sizeof url, "file://%.*s/idist-doctor-%ld", nbytes, path, (long)getpid());

    if (doctor_meet_in_file(url) == IDIST_OK) {
        doctor_say("file store", DOCTOR_FINE, NULL, "works: ranks can meet at file://%.*s/...",
                   nbytes, path);
    } else {
        bool is_setting;

        doctor_failure(why, sizeof why);
        is_setting = strncmp(why, "IDIST_SECRET", 12) == 0;
        doctor_say("file store", is_needed ? DOCTOR_WRONG : DOCTOR_NOTE,
                   is_needed || is_setting ? NULL
                                           : "for IDIST_INIT_METHOD=file:// take another folder",
                   "%s", why);
    }
}

static bool doctor_is_set(const char *name) {
    const char *value = getenv(name);

    return value && value[0];
}

// With a fault in the settings the configuration ends there, and may lack the secret.
static const char *doctor_secret(void) {
    if (doctor.config.secret.nbytes) return "given";
    if (doctor_is_set("IDIST_SECRET") || doctor_is_set("IDIST_SECRET_FILE"))
        return "given; see settings";
    if (doctor.config.secret.insecure) return "none, and IDIST_INSECURE=1 trusts the network";
    return "none; ranks on several hosts need IDIST_SECRET";
}

// Variables of idist; never the value of a secret.
static void doctor_settings(void) {
    char text[600] = "";
    char **at;

    for (at = idist__os_process_variables(); *at; at++) {
        int nbytes = (int)strcspn(*at, "=");
        bool is_secret = strncmp(*at, "IDIST_SECRET=", 13) == 0;

        if (strncmp(*at, "IDIST_", 6) != 0) continue;
        idist__text_append(text, sizeof text, "%s%.*s", text[0] ? " " : "",
                           is_secret ? nbytes : (int)strlen(*at), *at);
    }

    if (doctor.configured != IDIST_OK &&
        strcmp(doctor.why_not_configured, doctor.why_not_detected) != 0)
        doctor_say("settings", DOCTOR_WRONG, NULL, "%s", doctor.why_not_configured);
    else doctor_say("settings", DOCTOR_FINE, NULL, "%s", text[0] ? text : "none of IDIST_*");
    doctor_say("secret", DOCTOR_FINE, NULL, "%s", doctor_secret());
}

// The file that a shell would run; "" if there is none.
static void doctor_find(const char *name, char *path, size_t capacity) {
    const char *at = getenv("PATH");

    path[0] = 0;

    while (at && *at) {
        int nbytes = (int)strcspn(at, ":");

        snprintf(path, capacity, "%.*s/%s", nbytes, at, name);
        if (access(path, X_OK) == 0) return;
        path[0] = 0;
        at += nbytes;
        if (*at) at++;
    }
}

static void doctor_libraries(void) {
    char path[PATH_MAX], real[PATH_MAX], devices[64];
    void *nccl = idist__os_library_open("libnccl.so.2"), *driver, *address;
    int (*get_version)(int *) = NULL;
    int i, version = 0, device_count = 0;

    doctor_find("mpirun", path, sizeof path);
    if (!path[0]) doctor_find("mpiexec", path, sizeof path);
    if (path[0] && !realpath(path, real)) real[0] = 0;
    if (path[0]) doctor_say("MPI", DOCTOR_FINE, NULL, "%s, which is %s", path, real);
    else doctor_say("MPI", DOCTOR_FINE, NULL, "no mpirun or mpiexec in PATH (needed for mpi only)");

    address = nccl ? idist__os_library_find(nccl, "ncclGetVersion") : NULL;
    memcpy(&get_version, &address, sizeof address);
    if (get_version && get_version(&version) == 0)
        doctor_say("NCCL", version < 21400 ? DOCTOR_NOTE : DOCTOR_FINE, "use 2.14 or later",
                   "%d.%d.%d in libnccl.so.2", version / 10000, version / 100 % 100, version % 100);
    else doctor_say("NCCL", DOCTOR_FINE, NULL, "no libnccl.so.2 (needed for nccl only)");

    driver = idist__os_library_open("libcuda.so.1");

    for (i = 0; i < 64; i++) {
        snprintf(devices, sizeof devices, "/dev/nvidia%d", i);
        device_count += access(devices, R_OK | W_OK) == 0;
    }

    if (!device_count && !driver)
        doctor_say("GPU", DOCTOR_FINE, NULL, "none: no /dev/nvidia0, no libcuda.so.1");
    else
        doctor_say("GPU", device_count && driver ? DOCTOR_FINE : DOCTOR_NOTE,
                   driver ? "no device may be used" : "install the CUDA driver",
                   "%d devices /dev/nvidia*, libcuda.so.1 %s", device_count,
                   driver ? "found" : "not found");
}

// The soft and the hard limit as text; returns the soft one, or -1 for none.
static long long doctor_limit(const struct rlimit *limit, long long unit, char *text,
                              size_t capacity) {
    long long value[2];
    int i;

    text[0] = 0;
    value[0] = limit->rlim_cur == RLIM_INFINITY ? -1 : (long long)limit->rlim_cur / unit;
    value[1] = limit->rlim_max == RLIM_INFINITY ? -1 : (long long)limit->rlim_max / unit;

    for (i = 0; i < 2; i++) {
        if (i) idist__text_append(text, capacity, " (may be raised to ");
        if (value[i] < 0) idist__text_append(text, capacity, "unlimited");
        else idist__text_append(text, capacity, "%lld", value[i]);
        if (i) idist__text_append(text, capacity, ")");
        if (value[0] == value[1]) break;
    }

    return value[0];
}

static void doctor_limits(void) {
    long long needed = 2LL * idist__os_cpu_count() + 8, limit;
    char text[100], advice[100];
    struct rlimit rlimit;

    memset(&rlimit, 0, sizeof rlimit);
    getrlimit(RLIMIT_NOFILE, &rlimit);
    limit = doctor_limit(&rlimit, 1, text, sizeof text);
    snprintf(advice, sizeof advice, "enough for %lld ranks; ulimit -n 4096",
             limit < 8 ? 0 : (limit - 8) / 2);
    doctor_say("descriptors",
               limit >= 0 && limit < needed ? DOCTOR_WRONG
               : limit >= 0 && limit < 1024 ? DOCTOR_NOTE
                                            : DOCTOR_FINE,
               advice, "%s", text);

    getrlimit(RLIMIT_NPROC, &rlimit);
    limit = doctor_limit(&rlimit, 1, text, sizeof text);
    doctor_say("processes",
               limit >= 0 && limit < 64 && idist__os_socket_user() ? DOCTOR_NOTE : DOCTOR_FINE,
               "of all programs of this user; raise ulimit -u", "%s", text);

    getrlimit(RLIMIT_MEMLOCK, &rlimit);
    limit = doctor_limit(&rlimit, 1024, text, sizeof text);
    doctor_say("locked memory",
               limit >= 0 && access("/dev/infiniband", F_OK) == 0 ? DOCTOR_NOTE : DOCTOR_FINE,
               "MPI and NCCL over InfiniBand want ulimit -l unlimited", "%s%s", text,
               limit >= 0 ? " KiB" : "");
}

static void doctor_configure(void) {
    idist__config *c = &doctor.launcher;
    idist_desc none;

    doctor.configured = idist__config_fill(&doctor.config, NULL);
    if (doctor.configured == IDIST_OK) doctor.configured = idist__where_check_lone(&doctor.config);
    if (doctor.configured != IDIST_OK)
        doctor_failure(doctor.why_not_configured, sizeof doctor.why_not_configured);

    memset(&none, 0, sizeof none);
    c->world_size = 1;
    c->local_rank = c->local_size = -1;
    c->may_draw = idist__where_is_file(&none);
    doctor.detected = idist__detect_launcher(c);
    if (doctor.detected != IDIST_OK)
        doctor_failure(doctor.why_not_detected, sizeof doctor.why_not_detected);
}

// All lines. 0: nothing is wrong.
static int doctor_run(void) {
    int i;

    doctor_configure();
    self_test_all();
    doctor_machine();
    doctor_shared_memory();
    doctor_network();
    doctor_launcher();
    doctor_file();
    doctor_settings();
    doctor_libraries();
    doctor_limits();
    for (i = 0; i < SELF_TESTS; i++) self_test_say(&doctor.tests[i]);
    if (doctor.wrong_count)
        printf("%-*s%d of the lines above [wrong]\n", DOCTOR_NAME_COLUMNS, "verdict",
               doctor.wrong_count);
    else printf("%-*snothing is wrong\n", DOCTOR_NAME_COLUMNS, "verdict");

    return doctor.wrong_count ? 1 : 0;
}
