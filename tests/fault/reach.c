// reach: ranks that cannot reach each other, or a program that cannot find its own file, report the
// reason
#include "idist.h"

#include "ranks.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/mount.h>

#ifndef CLONE_NEWNET
#define CLONE_NEWNET 0x40000000
#endif
#ifndef CLONE_NEWNS
#define CLONE_NEWNS 0x00020000
#endif

// The place where a rank runs before it joins.
typedef enum place { HERE, ANOTHER_NETWORK, ANOTHER_USER, NO_LOCAL, NO_LOCAL_PERM } place;

typedef struct ranks_of {
    place where[2];
    const char *init_method, *transport;
    const char *says[2], *says_too; // parts of the rank's error text, or NULL for any text
    const char *never;              // must not occur in the error text
    int port;
    idist_status status;
} ranks_of;

// Installs a system call filter that makes socket(AF_UNIX) fail with `error` from now on.
static bool refuse_local_sockets(int error) {
    struct sock_filter code[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS,
                                          offsetof(struct seccomp_data, nr)),
                                 BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_socket, 0, 3),
                                 BPF_STMT(BPF_LD | BPF_W | BPF_ABS,
                                          offsetof(struct seccomp_data, args[0])),
                                 BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AF_UNIX, 0, 1),
                                 BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)error),
                                 BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    struct sock_fprog program = {sizeof code / sizeof code[0], code};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

static bool enter_place(place where) {
    if (where == NO_LOCAL) return refuse_local_sockets(EAFNOSUPPORT);
    if (where == NO_LOCAL_PERM) return refuse_local_sockets(EPERM);
    if (where == ANOTHER_NETWORK) return syscall(SYS_unshare, CLONE_NEWNET) == 0;
    return where != ANOTHER_USER || setuid(65534) == 0;
}

static int joins(int number, void *arg) {
    const ranks_of *r = (const ranks_of *)arg;
    idist_desc d;
    memset(&d, 0, sizeof d);
    if (!enter_place(r->where[number])) rank_fail("rank %d cannot go there", number);
    d.rank = number;
    d.world_size = 2;
    d.init_method = r->init_method;
    d.master_addr = r->init_method ? NULL : "127.0.0.1";
    d.master_port = r->init_method ? 0 : r->port;
    d.transport = r->transport;
    d.init_timeout_ms = 1500 * test_slow_factor();
    idist_status status = idist_initialize(&d);
    const char *text = idist_last_error();
    rank_check(status == r->status, "rank %d: got %s expected %s: %s", number,
               idist_status_name(status), idist_status_name(r->status), text);
    if (r->says[number])
        rank_check(strstr(text, r->says[number]) && (!r->says_too || strstr(text, r->says_too)),
                   "rank %d: got \"%s\"", number, text);
    rank_check(!strstr(text, r->never), "rank %d: got \"%s\"", number, text);
    return 0;
}

static void together(ranks_of *r, const char *name) {
    tap_running("%s", name);
    ranks_reset();
    r->port = free_port();
    procs_run(2, 20000, joins, r);
    ranks_report("%s", name);
}

// Runs both ranks in one network namespace that the parent created. No interface of the namespace
// is up.
static int without_a_network(int number, void *arg) {
    (void)number;
    if (syscall(SYS_unshare, CLONE_NEWNET) != 0) return 1;
    procs_run(2, 20000, joins, arg);
    return 0;
}

static void without_network(void) {
    char folder[] = "/tmp/idist_reach_XXXXXX", url[64];
    ranks_of by_tcp = {{HERE, HERE},
                       NULL,
                       "tcp",
                       {"cannot be reached", "cannot be reached"},
                       "interface is down",
                       "has not started",
                       0,
                       IDIST_ERR_TIMEOUT};
    ranks_of by_file = {
        {HERE, HERE},        url,        "tcp", {"cannot be reached", "cannot be reached"},
        "interface is down", "was lost", 0,     IDIST_ERR_SYSTEM};
    TAP_REQUIRE(mkdtemp(folder));
    snprintf(url, sizeof url, "file://%s/meet", folder);
    tap_running("no network");
    ranks_reset();
    by_tcp.port = free_port();
    procs_run(1, 25000, without_a_network, &by_tcp);
    ranks_report("the interface is down where the ranks meet");
    ranks_reset();
    procs_run(1, 25000, without_a_network, &by_file);
    ranks_report("the interface is down between ranks that have met");
    rmdir(folder);
}

static void apart(void) {
    ranks_of another_namespace = {{HERE, ANOTHER_NETWORK},
                                  NULL,
                                  NULL,
                                  {"network namespace", "network namespace"},
                                  NULL,
                                  "MASTER_ADDR",
                                  0,
                                  IDIST_ERR_TIMEOUT};
    ranks_of another_user = {
        {HERE, ANOTHER_USER}, NULL, NULL, {"another user", "another user"}, NULL, "MASTER_ADDR", 0,
        IDIST_ERR_TIMEOUT};
    together(&another_namespace, "a rank in another network namespace");
    together(&another_user, "a rank of another user");
}

static int adds_up(int local_rank, void *arg) {
    int sum = 1;
    (void)local_rank;
    (void)arg;
    idist_status status = idist_all_reduce(&sum, &sum, 1, IDIST_I32, IDIST_SUM, NULL);
    return status == IDIST_OK && sum == 2 ? 0 : 9;
}

// Spawns workers that cannot create local sockets. The ranks of a host must be able to use TCP
// instead.
static int spawns_without_local(int number, void *arg) {
    idist_desc d;
    (void)number;
    (void)arg;
    memset(&d, 0, sizeof d);
    if (!refuse_local_sockets(EAFNOSUPPORT)) return 1;
    rank_is(0, idist_spawn(adds_up, NULL, 2, &d), IDIST_ERR_SYSTEM);
    rank_check(strstr(idist_last_error(), "socket(AF_UNIX): Address family not supported") &&
                   strstr(idist_last_error(), "IDIST_TRANSPORT=tcp"),
               "got \"%s\"", idist_last_error());
    d.transport = "tcp";
    rank_is(0, idist_spawn(adds_up, NULL, 2, &d), IDIST_OK);
    return 0;
}

static void no_local(void) {
    char folder[] = "/tmp/idist_reach_XXXXXX", url[64];
    TAP_REQUIRE(mkdtemp(folder));
    for (int i = 0; i < 6; i++) {
        place where = i < 3 ? NO_LOCAL : NO_LOCAL_PERM;
        ranks_of r = {{where, where},
                      NULL,
                      i % 3 == 2 ? "socket" : "auto",
                      {"socket(AF_UNIX): ", "socket(AF_UNIX): "},
                      "IDIST_TRANSPORT=tcp",
                      "interface",
                      0,
                      IDIST_ERR_SYSTEM};
        if (i % 3 == 1) snprintf(url, sizeof url, "tcp://127.0.0.1:%d", free_port());
        if (i % 3 == 2) snprintf(url, sizeof url, "file://%s/meet", folder);
        if (i % 3) r.init_method = url;
        together(&r, i < 3 ? "no local sockets" : "no local sockets, EPERM");
    }
    rmdir(folder);
    tap_running("spawn without local sockets");
    ranks_reset();
    procs_run(1, 20000, spawns_without_local, NULL);
    ranks_report("spawn without local sockets: by TCP");
}

static int never(int local_rank, void *arg) {
    (void)local_rank;
    (void)arg;
    return 1;
}

static int without_proc(int number, void *arg) {
    idist_desc d;
    (void)number;
    (void)arg;
    memset(&d, 0, sizeof d);
    d.start_method = "exec";
    if (syscall(SYS_unshare, CLONE_NEWNS) != 0 ||
        mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        mount("none", "/proc", "tmpfs", 0, NULL) != 0)
        return 1;
    rank_is(0, idist_spawn(never, NULL, 2, &d), IDIST_ERR_SYSTEM);
    rank_check(strstr(idist_last_error(), "/proc") && strstr(idist_last_error(), "exec"),
               "got \"%s\"", idist_last_error());
    return 0;
}

static void no_proc(void) {
    tap_running("no /proc");
    ranks_reset();
    procs_run(1, 10000, without_proc, NULL);
    ranks_report("start_method exec without /proc");
}

static bool may_filter(void) {
    pid_t pid = fork();
    int status = 1;
    TAP_REQUIRE(pid >= 0);
    if (pid == 0) _exit(refuse_local_sockets(EPERM) ? 0 : 1);
    return waitpid(pid, &status, 0) == pid && status == 0;
}

// Returns true if this process may create namespaces and become another user, which not every
// container allows.
static bool may_go(void) {
    pid_t pid = fork();
    int status = 1;
    TAP_REQUIRE(pid >= 0);
    if (pid == 0)
        _exit(syscall(SYS_unshare, CLONE_NEWNET | CLONE_NEWNS) == 0 && setuid(65534) == 0 ? 0 : 1);
    return waitpid(pid, &status, 0) == pid && status == 0;
}

int main(void) {
    tap_deadline(200);
    (void)ranks__log();
    if (may_filter()) no_local();
    else tap_skip("ranks without local sockets", "needs seccomp filters");
    if (may_go()) {
        without_network();
        apart();
        no_proc();
    } else {
        tap_skip("ranks that cannot reach each other", "needs root and namespaces");
    }
    return tap_done();
}
