// vendor.c - programs and libraries around a copy of idist, for tests/compile/vendor.sh.
//
// This file is compiled as a program, as one of two shared libraries, or as the program that uses
// both libraries. Each library contains its own copy of idist.
//
//     -DPROGRAM            two ranks by idist_spawn, linked with idist.o
//     -DLIBRARY=a, =b      a_start, a_step, a_stop, ... and no other visible symbol
//     -DBOTH               main: `both plain`, `addresses`, `threads`, `lost` or `spawn`
//     -DPLUGIN             main: loads and unloads library `a` many times; its path is argv[1]
//     -DFORKED             main: forks while a lock of idist is held, and the child exits
#if !defined BOTH && !defined PLUGIN
#include "idist.h"
#endif

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef BOTH
#include <pthread.h>
#include <signal.h>
#include <unistd.h>
#endif

#ifdef PROGRAM
static int work(int local_rank, void *arg) {
    float sum[2] = {0.5f, (float)(local_rank + 1)};
    uint16_t half = local_rank ? 0x4000 : 0x3c00; // 2 and 1 as F16; the mean is 0x3e00
    int32_t all[2] = {-1, -1}, mine = 7 + local_rank, got = -1;
    int other = 1 - idist_get_rank();

    (void)arg;
    if (idist_all_reduce(sum, sum, 2, IDIST_F32, IDIST_SUM, NULL)) return 1;
    if (sum[0] != 1.0f || sum[1] != 3.0f) return 2;
    if (idist_all_reduce(&half, &half, 1, IDIST_F16, IDIST_AVG, NULL) || half != 0x3e00) return 3;
    if (idist_all_gather(&mine, all, 1, IDIST_I32, NULL) || all[0] != 7 || all[1] != 8) return 4;
    if (idist_sendrecv(&mine, 1, other, 0, &got, 1, other, 0, IDIST_I32, NULL, NULL)) return 5;
    if (got != 7 + other) return 6;

    return idist_barrier(NULL) == IDIST_OK ? 0 : 7;
}

int main(void) {
    idist_desc desc;

    memset(&desc, 0, sizeof desc);
    desc.backend = "ring";
    if (idist_spawn(work, NULL, 2, &desc) == IDIST_OK) return puts("right") < 0;
    fprintf(stderr, "%s\n", idist_last_error());
    return 1;
}
#endif

#ifdef LIBRARY
#define JOIN(a, b) JOIN_(a, b)
#define JOIN_(a, b) a##b
#define TEXT(x) TEXT_(x)
#define TEXT_(x) #x
#define SEEN(name) __attribute__((visibility("default"))) JOIN(LIBRARY, name)

int SEEN(_start)(int rank, int size, const char *address);
int SEEN(_step)(int round, int salt);
int SEEN(_stop)(void);
int SEEN(_spawn)(int (*fn)(int, void *), void *arg);

// Returns a value that depends on the rank and the round. `salt` is different in each library.
static double value_of(int rank, int round, int salt) {
    return (double)(salt * 100000 + round * 10 + rank);
}

static int say(int status) {
    if (status)
        printf("%s: %s: %s\n", TEXT(LIBRARY), idist_status_name((idist_status)status),
               idist_last_error());
    fflush(stdout);
    return status;
}

// Joins the world that the launcher's variables describe or, if `address` is given, the world that
// the arguments describe.
int SEEN(_start)(int rank, int size, const char *address) {
    idist_desc desc;

    memset(&desc, 0, sizeof desc);
    desc.rank = rank;
    desc.world_size = size;
    desc.init_method = address;

    return say(idist_initialize(&desc));
}

// Exchanges a value between all ranks. Returns a status, or 1 if a value is wrong.
int SEEN(_step)(int round, int salt) {
    int rank = idist_get_rank(), n = idist_get_world_size(), r;
    double mine = value_of(rank, round, salt), all[8], want = 0, sum = 0;
    int status = n > 8 ? 1 : say(idist_all_gather(&mine, all, 1, IDIST_F64, NULL));

    if (!status) status = say(idist_all_reduce(&mine, &sum, 1, IDIST_F64, IDIST_SUM, NULL));
    if (status) return status;

    for (r = 0; r < n; r++) {
        if (all[r] != value_of(r, round, salt)) return 1;
        want += all[r];
    }

    return sum == want && n > 1 ? 0 : 1;
}

int SEEN(_stop)(void) { return say(idist_finalize()); }

int SEEN(_spawn)(int (*fn)(int, void *), void *arg) { return say(idist_spawn(fn, arg, 2, NULL)); }
#endif

#ifdef BOTH
int a_start(int rank, int size, const char *address), a_step(int round, int salt), a_stop(void);
int b_start(int rank, int size, const char *address), b_step(int round, int salt), b_stop(void);
int a_spawn(int (*fn)(int, void *), void *arg);

enum { ROUNDS = 200 };

static int rank_of_b, size_of_b; // b's ranks are in reverse order
static const char *address_of_b;

static int run_both(void) {
    int i, wrong = 0;

    for (i = 0; i < ROUNDS && !wrong; i++) wrong = a_step(i, 1) || b_step(i, 2);

    return wrong;
}

static int run_a(void) {
    int i, wrong = a_start(0, 0, NULL);

    for (i = 0; i < ROUNDS && !wrong; i++) wrong = a_step(i, 1);

    return wrong || a_stop();
}

static void *run_b(void *wrong) {
    int i, is_wrong = b_start(rank_of_b, size_of_b, address_of_b);

    for (i = 0; i < ROUNDS && !is_wrong; i++) is_wrong = b_step(i, 2);
    *(int *)wrong = is_wrong || b_stop();

    return NULL;
}

// Runs each library in its own thread from the beginning.
static int threads(void) {
    pthread_t thread;
    int a, b = 1;

    if (pthread_create(&thread, NULL, run_b, &b)) return 1;
    a = run_a();

    return pthread_join(thread, NULL) || a || b;
}

// Kills rank 1. Rank 0 must get an error from each library, and the same error from the next call.
static int lost(void) {
    if (run_both()) return 1;
    if (rank_of_b == 0) kill(getpid(), SIGKILL);

    return !(a_step(0, 1) < 0 && b_step(0, 2) < 0 && a_step(0, 1) < 0 && b_step(0, 2) < 0);
}

// The function of a worker that library a has forked. Library b learns its rank only through the
// call of b_start.
static int worker(int local_rank, void *arg) {
    int wrong = b_start(1 - local_rank, 2, (const char *)arg) || run_both();

    return b_stop() || wrong;
}

int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "";
    int wrong;

    address_of_b = argc > 2 ? argv[2] : NULL;
    if (strcmp(mode, "spawn") == 0) return a_spawn(worker, argv[2]) ? 1 : puts("right") < 0;

    size_of_b = address_of_b ? atoi(getenv("WORLD_SIZE")) : 0;
    rank_of_b = address_of_b ? size_of_b - 1 - atoi(getenv("RANK")) : 0;
    if (strcmp(mode, "threads") == 0) return threads() ? 1 : puts("right") < 0;

    // Runs the first collective of a. A rank that has completed this collective no longer needs the
    // address at which a's ranks met.
    wrong = a_start(0, 0, NULL) || a_step(0, 1) || b_start(rank_of_b, size_of_b, address_of_b);
    if (!wrong && strcmp(mode, "lost") == 0) return lost() ? 1 : puts("right") < 0;
    if (!wrong) wrong = run_both();
    if (!wrong) wrong = a_stop() || b_step(0, 2) || b_stop(); // b continues without a

    return wrong ? 1 : puts("right") < 0;
}
#endif

#ifdef PLUGIN
#include <dirent.h>
#include <dlfcn.h>
#include <malloc.h>

enum { WARM = 3, CYCLES = 23, MOST_NBYTES = 1000 }; // glibc leaks some bytes in each dlopen

static int count_threads(void) {
    DIR *folder = opendir("/proc/self/task");
    int n = -2; // . and ..

    while (folder && readdir(folder)) n++;
    if (folder) closedir(folder);

    return n;
}

// Runs the library once: opens a world, calls a collective, and closes the world.
static int live(void *library) {
    int (*start)(int, int, const char *) = NULL, (*step)(int, int) = NULL, (*stop)(void) = NULL;

    *(void **)&start = dlsym(library, "a_start");
    *(void **)&step = dlsym(library, "a_step");
    *(void **)&stop = dlsym(library, "a_stop");
    if (!start || !step || !stop) return 1;

    return start(0, 0, NULL) || step(0, 1) || stop() || count_threads() != 1;
}

int main(int argc, char **argv) {
    size_t before = 0, used;
    int i;

    for (i = 0; i < CYCLES && argc > 1; i++) {
        void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);

        if (i == WARM) before = mallinfo2().uordblks;
        if (!library || live(library)) return printf("cycle %d failed\n", i) > 0;
        dlclose(library);
        if (dlopen(argv[1], RTLD_NOW | RTLD_NOLOAD)) return puts("it is still there") > 0;
    }

    used = mallinfo2().uordblks;
    used = used > before ? (used - before) / (CYCLES - WARM) : 0;
    printf("# %zu bytes for each cycle\n", used);

    return used > MOST_NBYTES ? 1 : puts("right") < 0;
}
#endif

#ifdef FORKED
#include <sys/wait.h>
#include <unistd.h>

// Forks while it holds a lock, as another thread could. No thread of the child ever releases such a
// lock, so the child must not wait for it in exit.
int main(void) {
    int status = 0;
    pid_t child;

    idist__os_mutex_lock(&idist__ended_lock);
    child = fork();

    if (child == 0) {
        alarm(20);
        exit(0);
    }

    idist__os_mutex_unlock(&idist__ended_lock);
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0)
        return puts("the child hangs in exit") > 0;

    return puts("right") < 0;
}
#endif
