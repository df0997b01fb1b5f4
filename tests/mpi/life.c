// life: checks who initializes and finalizes MPI, which backend is chosen, and which state a
// program finds afterwards. Each run has one mode:
//
//     mpirun -n 3 ./life MODE
//
//     nothing | single | threads | given | unfit | again | early | early_threads | settings |
//     makers | stopped | ring | wrong | idle | stuck | fails | dies | ulfm | ulfm_groups
//
// Every rank prints its failures to stderr and then exits with 1. Rank 0 prints one TAP line.
#include "idist_mpi.h"

#include <mpi.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int rank, size, n_failed;

#define CHECK(cond, ...)                                                                       \
    do {                                                                                       \
        if (!(cond)) {                                                                         \
            n_failed++;                                                                        \
            fprintf(stderr, "rank %d: %s:%d: expected %s: ", rank, __FILE__, __LINE__, #cond); \
            fprintf(stderr, __VA_ARGS__);                                                      \
            fprintf(stderr, "; last error: %s\n", idist_last_error());                         \
        }                                                                                      \
    } while (0)

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static bool flag_of(int (*fn)(int *)) {
    int flag = 0;
    fn(&flag);
    return flag != 0;
}

// Makes one call of each kind over the default world.
static void work(const char *backend) {
    int32_t x = idist_get_rank() + 1, n = idist_get_world_size(), all[64];
    float many[1000];
    idist_request request;
    idist_opts async;
    idist_group *group = NULL;
    int members[1] = {0};
    memset(&async, 0, sizeof async);
    async.request = &request;
    CHECK(strcmp(idist_backend(), backend) == 0, "got %s expected %s", idist_backend(), backend);
    CHECK(idist_all_reduce(&x, &x, 1, IDIST_I32, IDIST_SUM, NULL) == IDIST_OK &&
              x == n * (n + 1) / 2,
          "got %d", x);
    for (int i = 0; i < 1000; i++) many[i] = (float)i;
    CHECK(idist_all_reduce(many, many, 1000, IDIST_F32, IDIST_SUM, &async) == IDIST_OK, "request");
    CHECK(idist_wait(&request) == IDIST_OK && many[999] == 999.0f * (float)n, "got %g",
          (double)many[999]);
    x = idist_get_rank();
    CHECK(idist_all_gather(&x, all, 1, IDIST_I32, NULL) == IDIST_OK && all[n - 1] == n - 1,
          "got %d", all[n - 1]);
    CHECK(idist_new_group(members, 1, &group) == IDIST_OK && idist_group_size(group) == 1,
          "new_group");
    CHECK(idist_free_group(&group) == IDIST_OK, "free_group");
    CHECK(idist_barrier(NULL) == IDIST_OK, "barrier");
}

static void open_and_close(const idist_desc *desc, const char *backend) {
    idist_status s = idist_initialize(desc);
    CHECK(s == IDIST_OK, "got %s", idist_status_name(s));
    if (s != IDIST_OK) return;
    rank = idist_get_rank();
    size = idist_get_world_size();
    work(backend);
    CHECK(idist_finalize() == IDIST_OK, "finalize");
}

// The program does not call MPI. idist must initialize and finalize MPI once.
static void nothing(void) {
    open_and_close(NULL, "mpi");
    CHECK(flag_of(MPI_Finalized), "MPI is not finalized");
    CHECK(idist_initialize(NULL) == IDIST_ERR_STATE && strstr(idist_last_error(), "finalized"),
          "a second time");
}

// The program has initialized MPI. idist must not finalize MPI, and may be initialized again.
static void adopted(void) {
    for (int i = 0; i < 2; i++) open_and_close(NULL, "mpi");
    CHECK(!flag_of(MPI_Finalized), "MPI is finalized");
    MPI_Barrier(MPI_COMM_WORLD);
}

// Opens several worlds, one after the other. Their ranks reach the end at different times. Messages
// that ranks send while they wait must not reach the communicators that the program makes next.
static void again(void) {
    int own, all;
    MPI_Comm_rank(MPI_COMM_WORLD, &own);
    MPI_Comm_size(MPI_COMM_WORLD, &all);
    for (int i = 0; i < 30 && n_failed == 0; i++) {
        MPI_Comm part;
        int x = 1, y = 1;
        CHECK(idist_initialize(NULL) == IDIST_OK, "initialize");
        CHECK(idist_all_reduce(&x, &x, 1, IDIST_I32, IDIST_SUM, NULL) == IDIST_OK && x == all,
              "got %d", x);
        usleep((useconds_t)((own * 7919 + i * 104729) % 45000));
        CHECK(idist_finalize() == IDIST_OK, "finalize");
        MPI_Comm_split(MPI_COMM_WORLD, own % 2, own, &part);
        MPI_Allreduce(MPI_IN_PLACE, &y, 1, MPI_INT, MPI_SUM, part);
        CHECK(y == (all + (own % 2 == 0)) / 2, "got %d", y);
        MPI_Comm_free(&part);
    }
    rank = own;
}

// The program calls MPI_Finalize while the world is open. One rank has a request in progress and
// another rank is in a call. All ranks must get an error that names the reason, from this call and
// all further calls.
static void early(void) {
    idist_request request;
    idist_opts async;
    float x[100] = {1}, *memory;
    idist_status s;
    memset(&async, 0, sizeof async);
    async.request = &request;
    setenv("IDIST_SHM_MIB", "2", 1);
    CHECK(idist_initialize(NULL) == IDIST_OK, "initialize");
    rank = idist_get_rank();
    memory = (float *)idist_alloc(4096, NULL);
    CHECK(memory && idist_all_reduce(x, x, 100, IDIST_F32, IDIST_SUM, NULL) == IDIST_OK, "begin");
    if (rank == 1) CHECK(idist_recv(x, 1, IDIST_F32, 0, 0, NULL, &async) == IDIST_OK, "recv");
    if (rank == 0) {
        CHECK(idist_barrier(NULL) == IDIST_ERR_STATE, "in a call");
        CHECK(strstr(idist_last_error(), "called MPI_Finalize before idist_finalize"), "the text");
    }
    MPI_Finalize();
    if (rank == 1) CHECK(idist_wait(&request) == IDIST_ERR_STATE, "wait");
    s = idist_barrier(NULL);
    CHECK(s == IDIST_ERR_STATE && strstr(idist_last_error(), "called MPI_Finalize"), "got %s",
          idist_status_name(s));
    s = idist_finalize();
    CHECK(s == IDIST_ERR_STATE && strstr(idist_last_error(), "called MPI_Finalize"), "got %s",
          idist_status_name(s));
    CHECK(!idist_is_initialized(), "the world is gone");
    idist_free(memory);
}

static void given(void) {
    MPI_Comm part;
    idist_desc desc;
    int all, own;
    MPI_Comm_rank(MPI_COMM_WORLD, &own);
    MPI_Comm_size(MPI_COMM_WORLD, &all);
    MPI_Comm_split(MPI_COMM_WORLD, own % 2, -own, &part); // in reverse order
    memset(&desc, 0, sizeof desc);
    desc.mpi_comm = &part;
    CHECK(idist_initialize(&desc) == IDIST_OK, "initialize");
    CHECK(idist_get_world_size() == (all + (own % 2 == 0)) / 2, "got %d", idist_get_world_size());
    CHECK(idist_get_rank() == (all - 1 - own) / 2, "rank %d of all is %d", own, idist_get_rank());
    work("mpi");
    CHECK(idist_finalize() == IDIST_OK, "finalize");
    desc.world_size = all + 1;
    CHECK(idist_initialize(&desc) == IDIST_ERR_ENV, "a size that is not the communicator's");
    MPI_Comm_free(&part);
    MPI_Barrier(MPI_COMM_WORLD);
    rank = own;
}

// Passes communicators that cannot become a world. These are MPI_COMM_NULL, which MPI_Comm_split
// returns for MPI_UNDEFINED, and an intercommunicator.
static void unfit(void) {
    MPI_Comm none = MPI_COMM_NULL, part, both;
    idist_desc desc;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    memset(&desc, 0, sizeof desc);
    desc.mpi_comm = &none;
    CHECK(idist_initialize(&desc) == IDIST_ERR_ARG, "MPI_COMM_NULL");
    CHECK(strstr(idist_last_error(), "MPI_COMM_NULL"), "the text");
    MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &part);
    MPI_Intercomm_create(part, 0, MPI_COMM_WORLD, 1 - rank % 2, 1, &both);
    desc.mpi_comm = &both;
    CHECK(idist_initialize(&desc) == IDIST_ERR_ARG, "an intercommunicator");
    CHECK(strstr(idist_last_error(), "intercommunicator"), "the text");
    MPI_Comm_free(&both);
    MPI_Comm_free(&part);
    open_and_close(NULL, "mpi");
}

// Stops rank 0 while it waits in a call. The other ranks enter and complete this call. When rank 0
// continues, they have been in the next call for a long time. The pauses only make this case
// likely.
static void stopped(void) {
    int32_t own = (int32_t)getpid(), pids[64];
    CHECK(idist_initialize(NULL) == IDIST_OK, "initialize");
    rank = idist_get_rank();
    CHECK(idist_all_gather(&own, pids, 1, IDIST_I32, NULL) == IDIST_OK, "all_gather");
    for (int i = 0; i < 10 && n_failed == 0; i++) {
        if (rank != 0) usleep(60000);
        if (rank == 1) {
            kill((pid_t)pids[0], SIGSTOP);
            if (fork() == 0) {
                usleep(150000);
                kill((pid_t)pids[0], SIGCONT);
                _exit(0);
            }
        }
        for (int k = 0; k < 2; k++) {
            int32_t x = 1;
            CHECK(idist_all_reduce(&x, &x, 1, IDIST_I32, IDIST_SUM, NULL) == IDIST_OK, "turn %d",
                  i);
        }
        if (rank == 1) wait(NULL);
    }
    CHECK(idist_finalize() == IDIST_OK, "finalize");
}

// Sets a variable on one rank only, although all ranks must set it to the same value. This must be
// an error. Then sets IDIST_SHM_MIB on all ranks.
static void settings(void) {
    static const char *const names[2] = {"IDIST_CHECK", "IDIST_SHM_MIB"}, *const values[2] = {"0",
                                                                                              "2"};
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    for (int i = 0; i < 2; i++) {
        if (rank == 1) setenv(names[i], values[i], 1);
        CHECK(idist_initialize(NULL) == IDIST_ERR_ENV, "%s differs", names[i]);
        CHECK(strstr(idist_last_error(), names[i]) && strstr(idist_last_error(), "differs"), "%s",
              names[i]);
        unsetenv(names[i]);
    }
    open_and_close(NULL, "mpi");
    setenv("IDIST_SHM_MIB", "2", 1);
    CHECK(idist_initialize(NULL) == IDIST_OK, "initialize");
    float *x = (float *)idist_alloc(4096 * sizeof(float), NULL);
    CHECK(x, "idist_alloc");
    for (int i = 0; x && i < 4096; i++) x[i] = (float)rank;
    CHECK(idist_all_reduce(x, x, 4096, IDIST_F32, IDIST_SUM, NULL) == IDIST_OK, "all_reduce");
    CHECK(x[4095] == (float)(size * (size - 1) / 2), "got %g", (double)x[4095]);
    idist_free(x);
    CHECK(idist_finalize() == IDIST_OK, "finalize");
}

static int fails_on_rank_1(int local_rank, void *arg) {
    float x[100] = {1};
    idist_status s = IDIST_OK;
    (void)local_rank;
    (void)arg;
    rank = idist_get_rank();
    for (int i = 0; s == IDIST_OK && !(rank == 1 && i == 100); i++)
        s = idist_all_reduce(x, x, i % 2 ? 100 : 1, IDIST_F32, IDIST_SUM, NULL);
    if (rank == 1) return 3;
    CHECK(s == IDIST_ERR_PEER_LOST && strstr(idist_last_error(), "rank 1"), "got %s",
          idist_status_name(s));
    if (n_failed == 0 && rank == 0) printf("ok - fails\n");
    fflush(stdout);
    return 0;
}

// Makes the function of idist_parallel_run fail on one rank. The other ranks must get an error, and
// all ranks must end.
static void fails(void) {
    idist_status s = idist_parallel_run(NULL, fails_on_rank_1, NULL);
    CHECK(s != IDIST_OK, "idist_parallel_run");
    if (rank != 0) sleep(1); // because the first exit may end the job
    _exit(n_failed ? 1 : 0);
}

static void *makes_another(void *arg) {
    idist_group *group = NULL;
    int members[1] = {0};
    (void)arg;
    usleep(100000); // until the other thread is in idist_new_group
    CHECK(idist_new_group(members, 1, &group) == IDIST_ERR_STATE, "a second thread makes a group");
    CHECK(strstr(idist_last_error(), "another thread is creating a group") && !group, "the text");
    return NULL;
}

// Makes groups from two threads of rank 0 at the same time. The second thread must be refused.
// Afterwards rank 0 must be able to make another group.
static void makers(void) {
    idist_group *group = NULL;
    int members[3] = {0, 1, 2};
    pthread_t thread;
    CHECK(idist_initialize(NULL) == IDIST_OK, "initialize");
    rank = idist_get_rank();
    if (rank == 0) CHECK(pthread_create(&thread, NULL, makes_another, NULL) == 0, "a thread");
    else usleep(400000);
    for (int i = 0; i < 2; i++) {
        CHECK(idist_new_group(members, 3, &group) == IDIST_OK && idist_group_size(group) == 3,
              "new_group");
        if (rank == 0 && i == 0) pthread_join(thread, NULL);
        CHECK(idist_free_group(&group) == IDIST_OK, "free_group");
    }
    CHECK(idist_finalize() == IDIST_OK, "finalize");
}

// Runs under the mpirun of another MPI. Every process is alone and must report the reason.
static void wrong(void) {
    CHECK(idist_initialize(NULL) == IDIST_ERR_ENV, "initialize");
    CHECK(strstr(idist_last_error(), "linked with") && strstr(idist_last_error(), "of 3"),
          "the text");
    printf("%s\n", idist_last_error());
}

// Checks that a rank sleeps while it waits for a late rank.
static void idle(void) {
    struct rusage before, after;
    CHECK(idist_initialize(NULL) == IDIST_OK, "initialize");
    rank = idist_get_rank();
    idist_barrier(NULL);
    getrusage(RUSAGE_SELF, &before);
    if (rank == 0) sleep(3);
    CHECK(idist_barrier(NULL) == IDIST_OK, "barrier");
    getrusage(RUSAGE_SELF, &after);
    double used = (double)(after.ru_utime.tv_sec - before.ru_utime.tv_sec + after.ru_stime.tv_sec -
                           before.ru_stime.tv_sec) +
                  (double)(after.ru_utime.tv_usec - before.ru_utime.tv_usec +
                           after.ru_stime.tv_usec - before.ru_stime.tv_usec) /
                      1e6;
    CHECK(used < 0.15, "%.3f s of CPU in 3 s", used);
    if (rank == 1) printf("# a rank that waits 3 s uses %.3f s\n", used);
    CHECK(idist_finalize() == IDIST_OK, "finalize");
}

// Lets one rank miss a call. The other ranks must name the missing rank and end without it.
static void stuck(void) {
    idist_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = 500;
    CHECK(idist_initialize(&desc) == IDIST_OK, "initialize");
    rank = idist_get_rank();
    double start = now_ms();
    if (rank == 1) sleep(6);
    else {
        CHECK(idist_barrier(NULL) == IDIST_ERR_TIMEOUT && strstr(idist_last_error(), "rank 1"),
              "barrier");
        CHECK(now_ms() - start < 3000, "after %.0f ms", now_ms() - start);
    }
    start = now_ms();
    if (rank != 1)
        CHECK(idist_finalize() == IDIST_ERR_TIMEOUT && now_ms() - start < 3000, "finalize, %.0f ms",
              now_ms() - start);
    if (n_failed == 0 && rank == 0) printf("ok - stuck\n");
    fflush(stdout);
    if (rank != 0) sleep(1); // because the first exit may end the job
    _exit(n_failed ? 1 : 0); // mpirun then ends the job
}

// Kills a rank under an MPI that cannot continue without it. The launcher must end the job.
static void dies(void) {
    CHECK(idist_initialize(NULL) == IDIST_OK, "initialize");
    rank = idist_get_rank();
    if (rank == 0) printf("begun\n");
    fflush(stdout);
    for (int i = 0;; i++) {
        float x[100] = {1};
        if (rank == 1 && i == 100) kill(getpid(), SIGKILL);
        idist_status s = idist_all_reduce(x, x, 100, IDIST_F32, IDIST_SUM, NULL);
        if (s == IDIST_OK) continue;
        printf("got %s: %s\n", idist_status_name(s), idist_last_error());
        fflush(stdout);
        // A launcher that does not end this process within 20 s hangs.
        sleep(20);
    }
}

// Kills a rank under an MPI with ULFM. The survivors must learn which rank died, and continue
// without it.
static void ulfm(void) {
    idist_group *left = NULL;
    idist_opts o;
    idist_status s = IDIST_OK;
    float x[100];
    int n, flag = 3;
    CHECK(idist_initialize(NULL) == IDIST_OK, "initialize");
    rank = idist_get_rank();
    n = idist_get_world_size();
    double killed = 0, lost, shrunk;
    struct timespec t;
    for (int i = 0; s == IDIST_OK; i++) {
        for (int k = 0; k < 100; k++) x[k] = 1;
        clock_gettime(CLOCK_MONOTONIC, &t);
        // In the last turn, about the time at which rank 1 is killed.
        killed = now_ms();
        if (rank == 1 && i == 100) kill(getpid(), SIGKILL);
        s = idist_all_reduce(x, x, i % 2 ? 100 : 1, IDIST_F32, IDIST_SUM, NULL);
        CHECK(s != IDIST_OK || x[0] == (float)n, "got %g", (double)x[0]);
    }
    lost = now_ms();
    CHECK(s == IDIST_ERR_PEER_LOST && strstr(idist_last_error(), "rank 1"), "got %s",
          idist_status_name(s));
    s = idist_shrink(NULL, &left);
    shrunk = now_ms();
    CHECK(s == IDIST_OK, "shrink: got %s", idist_status_name(s));
    if (s == IDIST_OK) {
        memset(&o, 0, sizeof o);
        o.group = left;
        CHECK(idist_group_size(left) == n - 1, "got %d", idist_group_size(left));
        for (int i = 0; i < 1000; i++) {
            for (int k = 0; k < 100; k++) x[k] = (float)(rank + 1);
            s = idist_all_reduce(x, x, i % 2 ? 100 : 1, IDIST_F32, IDIST_SUM, &o);
            CHECK(s == IDIST_OK && x[0] == (float)(n * (n + 1) / 2 - 2), "got %s, %g",
                  idist_status_name(s), (double)x[0]);
            if (s != IDIST_OK) break;
        }
        int peer = (idist_group_rank(left) + 1) % (n - 1),
            from = (idist_group_rank(left) + n - 2) % (n - 1), got = -1;
        CHECK(idist_sendrecv(&rank, 1, peer, 5, &got, 1, from, 5, IDIST_I32, NULL, &o) == IDIST_OK,
              "sendrecv");
        if (rank == 0) flag = 1;
        CHECK(idist_agree(left, &flag) == IDIST_OK && flag == 1, "agree: %d", flag);
        CHECK(idist_free_group(&left) == IDIST_OK, "free_group");
    }
    CHECK(idist_finalize() == IDIST_ERR_PEER_LOST, "finalize");
    if (rank == 0)
        printf("# lost after %.1f ms, shrunk after another %.1f ms\n", lost - killed,
               shrunk - lost);
}

// Sums the world ranks of all members of `group` and returns true if the sum is right. `members`
// has one bit per member.
static bool adds_up(idist_group *group, unsigned members) {
    idist_opts o;
    int32_t x[100], sum = 0, n = 0;
    memset(&o, 0, sizeof o);
    o.group = group;
    for (int i = 0; i < 32; i++)
        if (members >> i & 1) sum += i, n++;
    for (int i = 0; i < 20; i++) {
        for (int k = 0; k < 100; k++) x[k] = rank;
        if (idist_all_reduce(x, x, i % 2 ? 100 : 1, IDIST_I32, IDIST_SUM, &o) != IDIST_OK ||
            x[0] != sum)
            return false;
    }
    return idist_group_size(group) == n && idist_barrier(&o) == IDIST_OK;
}

// Makes groups from `parent` in every way and checks that each works. `members` has one bit per
// rank of `parent`.
static void makes_groups(idist_group *parent, unsigned members, const char *when) {
    idist_group *part = NULL, *again = NULL, *listed = NULL;
    int n = idist_group_size(parent), own = idist_group_rank(parent), list[32];
    unsigned mine = 0;
    for (int i = 0, k = 0; i < 32; i++)
        if (members >> i & 1) mine |= (unsigned)(k++ % 2 == own % 2) << i;
    idist_status s = idist_split(parent, own % 2, 0, &part);
    CHECK(s == IDIST_OK && adds_up(part, mine), "%s: split: %s", when, idist_status_name(s));
    s = part ? idist_split(part, 0, 0, &again) : IDIST_ERR_STATE;
    CHECK(s == IDIST_OK && adds_up(again, mine), "%s: split of the split: %s", when,
          idist_status_name(s));
    for (int i = 0; i < n; i++) list[i] = n - 1 - i;
    s = idist_new_group_by_members(parent, list, n, 3, &listed);
    CHECK(s == IDIST_OK && adds_up(listed, members), "%s: by members: %s", when,
          idist_status_name(s));
    CHECK(adds_up(parent, members), "%s: the parent", when);
    CHECK(!again || idist_free_group(&again) == IDIST_OK, "free_group");
    CHECK(!part || idist_free_group(&part) == IDIST_OK, "free_group");
    CHECK(!listed || idist_free_group(&listed) == IDIST_OK, "free_group");
}

// Returns the index that MPI gives to the next communicator of this process.
static int next_comm(void) {
    MPI_Comm comm;
    int index;
    MPI_Comm_dup(MPI_COMM_SELF, &comm);
    index = (int)MPI_Comm_c2f(comm);
    MPI_Comm_free(&comm);
    return index;
}

// The call in which the other ranks learn of a loss.
enum { BY_ALL_REDUCE, BY_SPLIT, BY_MEMBERS };

// Kills rank `dies`. The other ranks must learn of the loss in `group` and continue in *survivors.
static void loses(idist_group *group, int dies, int how, idist_group **survivors) {
    char name[16];
    idist_group *part = NULL;
    idist_opts o;
    idist_status s;
    int32_t x = 1;
    int list[32];
    memset(&o, 0, sizeof o);
    o.group = group;
    for (int i = 0; i < idist_group_size(group); i++) list[i] = i;
    snprintf(name, sizeof name, "rank %d", dies);
    if (rank == dies) kill(getpid(), SIGKILL);
    do {
        if (how == BY_ALL_REDUCE) s = idist_all_reduce(&x, &x, 1, IDIST_I32, IDIST_SUM, &o);
        else if (how == BY_SPLIT) s = idist_split(group, 0, 0, &part);
        else s = idist_new_group_by_members(group, list, idist_group_size(group), 0, &part);
    } while (s == IDIST_OK);
    CHECK(s == IDIST_ERR_PEER_LOST && strstr(idist_last_error(), name), "%s: got %s", name,
          idist_status_name(s));
    s = idist_shrink(group, survivors);
    CHECK(s == IDIST_OK, "%s: shrink: got %s", name, idist_status_name(s));
}

// Kills ranks 1, 3 and 2 of 5, one after the other. Before, between and after the losses, makes
// groups from groups without a dead rank. The members of such groups must be able to continue.
static void ulfm_groups(void) {
    static const int without_1[4] = {0, 2, 3, 4};
    idist_group *before = NULL, *parity = NULL, *left = NULL, *even = NULL, *last = NULL, *none;
    CHECK(idist_initialize(NULL) == IDIST_OK, "initialize");
    rank = idist_get_rank();
    CHECK(idist_new_group(without_1, 4, &before) == IDIST_OK, "new_group");
    CHECK(idist_split(NULL, rank % 2, 0, &parity) == IDIST_OK, "split");

    loses(NULL, 1, BY_ALL_REDUCE, &left);
    CHECK(idist_new_group(without_1, 4, &none) == IDIST_ERR_PEER_LOST, "new_group of the world");
    makes_groups(before, 0x1d, "a group from before");
    if (rank % 2 == 0) makes_groups(parity, 0x15, "a part from before");
    else CHECK(idist_split(parity, 0, 0, &none) == IDIST_ERR_PEER_LOST, "a part with a dead rank");
    makes_groups(left, 0x1d, "after one loss");

    int index = next_comm();
    for (int i = 0; i < 60 && n_failed == 0; i++) {
        CHECK(idist_split(left, 0, 0, &even) == IDIST_OK && idist_free_group(&even) == IDIST_OK,
              "turn %d", i);
        CHECK(adds_up(left, 0x1d), "turn %d", i);
    }
    CHECK(next_comm() < index + 20, "60 freed groups leave %d communicators", next_comm() - index);
    CHECK(idist_split(left, rank % 2, 0, &even) == IDIST_OK, "split");

    loses(left, 3, BY_SPLIT, &last);
    makes_groups(even, 0x15, "a part of the first survivors");
    makes_groups(parity, 0x15, "a part from before, again");
    CHECK(idist_split(before, 0, 0, &none) == IDIST_ERR_PEER_LOST, "a group from before");
    makes_groups(last, 0x15, "after two losses");
    loses(last, 2, BY_MEMBERS, &left);
    makes_groups(left, 0x11, "after three losses");
    CHECK(idist_finalize() == IDIST_ERR_PEER_LOST, "finalize");
}

int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "";
    int level;
    alarm(60);
    if (strcmp(mode, "single") == 0 || strcmp(mode, "given") == 0 || strcmp(mode, "again") == 0 ||
        strcmp(mode, "settings") == 0 || strcmp(mode, "unfit") == 0 || strcmp(mode, "early") == 0)
        MPI_Init(&argc, &argv);
    if (strcmp(mode, "threads") == 0 || strcmp(mode, "early_threads") == 0)
        MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    if (strcmp(mode, "nothing") == 0) nothing();
    else if (strcmp(mode, "single") == 0 || strcmp(mode, "threads") == 0) adopted();
    else if (strcmp(mode, "given") == 0) given();
    else if (strcmp(mode, "unfit") == 0) unfit();
    else if (strcmp(mode, "again") == 0) again();
    else if (strncmp(mode, "early", 5) == 0) early();
    else if (strcmp(mode, "ring") == 0) open_and_close(NULL, "ring");
    else if (strcmp(mode, "wrong") == 0) wrong();
    else if (strcmp(mode, "settings") == 0) settings();
    else if (strcmp(mode, "makers") == 0) makers();
    else if (strcmp(mode, "stopped") == 0) stopped();
    else if (strcmp(mode, "idle") == 0) idle();
    else if (strcmp(mode, "fails") == 0) fails();
    else if (strcmp(mode, "stuck") == 0) stuck();
    else if (strcmp(mode, "dies") == 0) dies();
    else if (strcmp(mode, "ulfm") == 0) ulfm();
    else if (strcmp(mode, "ulfm_groups") == 0) ulfm_groups();
    else return 2;
    if (flag_of(MPI_Initialized) && !flag_of(MPI_Finalized) && strncmp(mode, "ulfm", 4) != 0 &&
        strcmp(mode, "ring") != 0)
        MPI_Finalize();
    if (n_failed == 0 && rank == 0) printf("ok - %s\n", mode);
    return n_failed ? 1 : 0;
}
