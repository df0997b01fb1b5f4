// reach: ranks that cannot reach each other, or a program that cannot find itself, hear why
#include "idist.h"

#include "ranks.h"

#include <sys/mount.h>

#ifndef CLONE_NEWNET
#define CLONE_NEWNET 0x40000000
#endif
#ifndef CLONE_NEWNS
#define CLONE_NEWNS 0x00020000
#endif

// Where a rank is, before it joins.
typedef enum place { HERE, ANOTHER_NETWORK, ANOTHER_USER } place;

typedef struct ranks_of {
    place where[2];
    const char *init_method, *transport;
    const char *says[2], *says_too; // what a rank is told; NULL: anything
    const char *never;
    int port;
    idist_status status;
} ranks_of;

static bool enter_place(place where) {
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

// Both in one network namespace of which no interface is up, as their parent has made it.
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

// Not every container lets root make namespaces.
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
    if (may_go()) {
        without_network();
        apart();
        no_proc();
    } else {
        tap_skip("ranks that cannot reach each other", "needs root and namespaces");
    }
    return tap_done();
}
