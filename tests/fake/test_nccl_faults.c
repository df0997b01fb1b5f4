// test_nccl_faults: tests an NCCL that does not return, reports calls as in progress, or fails at
// the end of a group. Each case runs in processes of its own, on the stand-ins for libcudart and
// libnccl.
#include "gpu_ranks.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>
#endif

typedef struct trouble {
    const char *name;
    int (*fn)(int number, void *arg); // runs on each rank
    int n;
    const char *version; // version of NCCL
    int port;
} trouble;

static idist_desc desc_of(int number, int n, int port) {
    idist_desc d = desc_with(NULL, NULL);
    setenv("FAKE_CUDA_DEVICES", "2", 1);
    setenv("IDIST_LOG", "warn", 1);
    d.rank = number;
    d.world_size = n;
    d.master_addr = "127.0.0.1";
    d.master_port = port;
    d.timeout_ms = 10000;
    d.logger.log_fn = keep_said;
    return d;
}

// The ranks are not connected in time. The thread that connects them returns much later. Nothing
// that the thread uses may be freed before it returns.
static int is_given_up(int number, void *arg) {
    idist_desc d = desc_of(number, 2, ((const trouble *)arg)->port);
    int threads = count_threads();
    int64_t start;
    fake_set_env("FAKE_NCCL_RUN_HANGS", "1");
    fake_set_env("FAKE_NCCL_QUERY_US", "600000");
    setenv("FAKE_CUDA_DESTROYED_ENDS", "1", 1);
    d.init_timeout_ms = 1000 + 500 * test_slow_factor();
    rank_is(number, idist_initialize(&d), IDIST_ERR_DEVICE);
    rank_check(strstr(idist_last_error(), "NCCL's first call") != NULL, "rank %d: got \"%s\"",
               number, idist_last_error());
    start = tap_now_ms();
    while (count_threads() > threads && tap_now_ms() - start < 3000) tap_sleep_ms(20);
    rank_check(test_sanitized() || count_threads() <= threads, "rank %d: %d threads are left",
               number, count_threads() - threads);
    return 0;
}

// A thread is inside NCCL and, after a revoke, stays there for longer than an abort waits.
static int comes_out_late(int number, void *arg) {
    idist_desc d = desc_of(number, 2, ((const trouble *)arg)->port);
    idist_opts o = opts_of(NULL), host = opts_of(NULL);
    int32_t *x, none = 0;
    idist_status status;
    if (!rank_ok(number, idist_initialize(&d))) return 0;
    fake_set_env("FAKE_NCCL_STAYS_MS", "5000");
    x = device_of(1, 4);
    o.stream = new_stream();
    o.timeout_ms = host.timeout_ms = 300;
    if (number == 1) {
        host.timeout_ms = 5000;
        status = idist_recv(&none, 1, IDIST_I32, 0, 99, NULL, &host);
        rank_check(status == IDIST_ERR_TIMEOUT, "rank %d: %s", number, idist_status_name(status));
        (void)!idist_finalize();
        return 0;
    }
    status = idist_all_to_all(x, x + 2, 1, IDIST_I32, &o);
    if (status == IDIST_OK) status = idist_barrier(&host);
    rank_check(status == IDIST_ERR_TIMEOUT, "rank %d: %s: %s", number, idist_status_name(status),
               idist_last_error());
    (void)!idist_finalize();
    rank_check(strstr(said, "stays in memory") != NULL, "rank %d: got \"%s\"", number, said);
    return 0;
}

// A revoke never ends. The revoke may delay the end of the world by some seconds. Afterwards no
// thread may query NCCL about the revoke.
static int revokes_in_vain(int number, void *arg) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    idist_desc d = desc_of(number, 2, ((const trouble *)arg)->port);
    int64_t start;
    unsigned asked;
    config.blocking = 0;
    d.nccl_config = &config;
    fake_set_env("FAKE_NCCL_REVOKE_HANGS", "1");
    if (!rank_ok(number, idist_initialize(&d))) return 0;
    start = tap_now_ms();
    if (number == 0) (void)!idist_abort(NULL);
    while (idist_barrier(NULL) == IDIST_OK) continue;
    (void)!idist_finalize();
    rank_check(tap_now_ms() - start < 7000 * test_slow_factor(), "rank %d: %d ms", number,
               (int)(tap_now_ms() - start));
    rank_check(strstr(said, "stays in memory") != NULL, "rank %d: got \"%s\"", number, said);
    start = tap_now_ms();
    do {
        asked = fake_count_asked();
        tap_sleep_ms(100);
    } while (asked != fake_count_asked() && tap_now_ms() - start < 3000);
    rank_check(asked == fake_count_asked(), "rank %d: a thread still asks", number);
    return 0;
}

// A rank ends with an error while a thread is inside an old NCCL, which cannot be made to return.
static void *waits_inside(void *arg) {
    int32_t *x = device_of(1, 4);
    idist_opts o = opts_of(NULL);
    (void)arg;
    o.stream = new_stream();
    (void)!idist_all_to_all(x, x + 2, 1, IDIST_I32, &o);
    return NULL;
}

static int leaves_a_thread_inside(int local_rank, void *arg) {
    int64_t start = tap_now_ms();
    int32_t none = 0;
    pthread_t thread;
    (void)local_rank;
    (void)arg;
    if (idist_get_rank() == 1) return (void)!idist_recv(&none, 1, IDIST_I32, 0, 99, NULL, NULL), 0;
    rank_check(pthread_create(&thread, NULL, waits_inside, NULL) == 0, "no thread");
    pthread_detach(thread);
    while (!fake_count_inside() && tap_now_ms() - start < 10000) tap_sleep_ms(5);
    rank_check(fake_count_inside() == 1, "nobody is inside");
    return 3;
}

static int ends_beside(int number, void *arg) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    idist_desc d = desc_of(number, 2, ((const trouble *)arg)->port);
    int64_t start = tap_now_ms();
    d.nccl_config = &config;
    (void)!idist_parallel_run(&d, leaves_a_thread_inside, NULL);
    rank_check(tap_now_ms() - start < 8000 * test_slow_factor(), "rank %d: %d ms", number,
               (int)(tap_now_ms() - start));
    if (number == 0) rank_check(strstr(said, "stays in memory") != NULL, "got \"%s\"", said);
    return 0;
}

// Calls held back by idist_group_begin complete even if NCCL reports each of them as in progress.
static int holds_back_in_progress(int number, void *arg) {
    idist_desc d = desc_of(number, 2, ((const trouble *)arg)->port);
    int32_t *x[3], *y;
    idist_opts o = opts_of(NULL);
    if (!rank_ok(number, idist_initialize(&d))) return 0;
    fake_set_env("FAKE_NCCL_IN_PROGRESS", "1");
    o.stream = new_stream();
    for (int k = 0; k < 3; k++) x[k] = device_of(k + 1, 4);
    y = device_of(-1, 2);
    for (int turn = 0; turn < 2; turn++) {
        rank_ok(number, idist_group_begin());
        for (int k = 0; k < 3; k++)
            rank_ok(number, idist_all_reduce(x[k], x[k], 4, IDIST_I32, IDIST_SUM, &o));
        rank_ok(number, idist_all_to_all(x[2], y, 1, IDIST_I32, &o));
        rank_ok(number, idist_group_end());
    }
    rank_ok(number, idist_all_to_all(x[0], y, 1, IDIST_I32, &o));
    CUDA(cudaStreamSynchronize((cudaStream_t)o.stream));
    for (int k = 0; k < 3; k++)
        rank_check(first_of(x[k]) == 4 * (k + 1), "rank %d: call %d: got %d", number, k,
                   first_of(x[k]));
    rank_check(first_of(y) == 4 && first_of(y + 1) == 4, "rank %d: got %d and %d", number,
               first_of(y), first_of(y + 1));
    rank_ok(number, idist_finalize());
    return 0;
}

// ncclGroupEnd fails, even if NCCL reported the calls as in progress.
static int fails_at_the_end(int number, void *arg) {
    idist_desc d = desc_of(number, 2, ((const trouble *)arg)->port);
    int64_t start = tap_now_ms();
    idist_opts o = opts_of(NULL);
    idist_status status;
    int32_t *x;
    if (!rank_ok(number, idist_initialize(&d))) return 0;
    // One rank may leave the barrier first and fail, which aborts the barrier for the other rank.
    (void)!idist_barrier(NULL);
    fake_set_env("FAKE_NCCL_IN_PROGRESS", "1");
    fake_set_env("FAKE_NCCL_GROUP_FAIL", "3");
    o.stream = new_stream();
    x = device_of(1, 4);
    rank_ok(number, idist_group_begin());
    // The status is not checked, because rank 0 may have failed already.
    for (int k = 0; k < 2; k++) (void)!idist_all_reduce(x + k, x + k, 1, IDIST_I32, IDIST_SUM, &o);
    status = idist_group_end();
    while (status == IDIST_OK && tap_now_ms() - start < 3000) status = idist_barrier(NULL);
    rank_check(status == IDIST_ERR_DEVICE, "rank %d: %s: %s", number, idist_status_name(status),
               idist_last_error());
    rank_check(strstr(idist_last_error(), "GROUP_FAIL") != NULL, "rank %d: got \"%s\"", number,
               idist_last_error());
    (void)!idist_finalize();
    return 0;
}

// All ranks have made the call, but NCCL never reports that the call has begun. The call must time
// out.
static int never_begins(int number, void *arg) {
    idist_desc d = desc_of(number, 2, ((const trouble *)arg)->port);
    idist_opts o = opts_of(NULL);
    idist_status status;
    int64_t start;
    int32_t *x;
    if (!rank_ok(number, idist_initialize(&d))) return 0;
    fake_set_env("FAKE_NCCL_LATER_HANGS", "1");
    x = device_of(1, 4);
    start = tap_now_ms();
    o.timeout_ms = 500;
    if (number == 0) o.stream = new_stream();
    status = idist_all_reduce(x, x, 1, IDIST_I32, IDIST_SUM, &o);
    if (status == IDIST_OK) status = idist_barrier(NULL);
    rank_check(status == IDIST_ERR_TIMEOUT, "rank %d: %s: %s", number, idist_status_name(status),
               idist_last_error());
    rank_check(tap_now_ms() - start < 2500 * test_slow_factor(), "rank %d: %d ms", number,
               (int)(tap_now_ms() - start));
    (void)!idist_finalize();
    return 0;
}

// Two threads make the first calls of two groups at the same time, while the device is busy for a
// long time. Neither thread may wait for the device.
typedef struct first_call {
    int number;
    idist_group *group;
    pthread_t thread;
} first_call;

static void *calls_first(void *arg) {
    const first_call *f = (const first_call *)arg;
    idist_opts o = opts_of(f->group);
    int32_t *x = device_of(1, 1);
    o.stream = new_stream();
    CUDA(cudaSetDevice(f->number % 2));
    rank_ok(f->number, idist_all_reduce(x, x, 1, IDIST_I32, IDIST_SUM, &o));
    CUDA(cudaStreamSynchronize((cudaStream_t)o.stream));
    rank_check(first_of(x) == 2, "rank %d: got %d", f->number, first_of(x));
    return NULL;
}

static int released; // atomic
static void keeps_busy(void *arg) {
    int64_t start = tap_now_ms();
    (void)arg;
    while (!__atomic_load_n(&released, __ATOMIC_ACQUIRE) &&
           tap_now_ms() - start < 8000 * test_slow_factor())
        tap_sleep_ms(5);
}

static int makes_two_groups(int number, void *arg) {
    first_call f[2] = {{number, NULL, 0}, {number, NULL, 0}};
    idist_desc d = desc_of(number, 3, ((const trouble *)arg)->port);
    cudaStream_t s;
    int64_t start;
    setenv("FAKE_CUDA_ALLOC_US", "200000", 1);
    if (!rank_ok(number, idist_initialize(&d))) return 0;
    for (int k = 0; k < 2; k++)
        rank_ok(number, idist_split(NULL, number == 2, number, &f[k].group));
    rank_ok(number, idist_barrier(NULL));
    if (number < 2) {
        s = new_stream();
        CUDA(cudaLaunchHostFunc(s, keeps_busy, NULL));
        start = tap_now_ms();
        for (int k = 0; k < 2; k++)
            rank_check(pthread_create(&f[k].thread, NULL, calls_first, &f[k]) == 0, "no thread");
        for (int k = 0; k < 2; k++) pthread_join(f[k].thread, NULL);
        rank_check(tap_now_ms() - start < 4000 * test_slow_factor(), "rank %d: %d ms", number,
                   (int)(tap_now_ms() - start));
        __atomic_store_n(&released, 1, __ATOMIC_RELEASE);
        for (int k = 0; k < 2; k++) { // one after the other: both barriers use gpu->barrier_word
            idist_opts o = on_stream(f[k].group, s);
            rank_ok(number, idist_barrier(&o));
        }
        CUDA(cudaStreamSynchronize(s));
    }
    rank_ok(number, idist_finalize());
    return 0;
}

// A rank dies while the communicator of the world is set up. No rank waits on the host during the
// set-up. The other ranks must notice the death long before the set-up times out.
static void *dies_in_nccl(void *arg) {
    int64_t end_ms = tap_now_ms() + 10000 * test_slow_factor();
    (void)arg;
    // Waits until the ranks have met.
    while (!fake_count_comms() && tap_now_ms() < end_ms) tap_sleep_ms(5);
    tap_sleep_ms(200);
    _exit(0);
}

static int dies_in_set_up(int number, void *arg) {
    idist_desc d = desc_of(number, 3, ((const trouble *)arg)->port);
    int64_t start = tap_now_ms();
    pthread_t thread;
    fake_set_env("FAKE_NCCL_INIT_HANGS", "1");
    setenv("FAKE_CUDA_DEVICES", "3", 1);
    d.init_timeout_ms = 15000 * test_slow_factor();
    if (number == 1)
        rank_check(pthread_create(&thread, NULL, dies_in_nccl, NULL) == 0, "no thread");
    rank_is(number, idist_initialize(&d), IDIST_ERR_PEER_LOST);
    rank_check(text_names_rank(idist_last_error(), 1), "rank %d: got \"%s\"", number,
               idist_last_error());
    rank_check(tap_now_ms() - start < 4000 * test_slow_factor(), "rank %d: %d ms", number,
               (int)(tap_now_ms() - start));
    return 0;
}

// Checks for leaks. All memory of the process must be reachable or freed.
static void check_leaks(int number) {
#if defined(__SANITIZE_ADDRESS__)
    rank_check(!__lsan_do_recoverable_leak_check(), "rank %d: there are leaks", number);
#else
    (void)number;
#endif
}

// Rank 1 cannot connect, so no rank uses its communicator. Aborting the communicator takes a long
// time. The end of the world must wait for the abort.
static int fails_alone(int number, void *arg) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    idist_desc d = desc_of(number, 2, ((const trouble *)arg)->port);
    int64_t start;
    config.blocking = 0;
    d.nccl_config = &config;
    d.init_timeout_ms = 1000 + 250 * test_slow_factor();
    fake_set_env("FAKE_NCCL_QUERY_US", "400000");
    if (number == 1) setenv("FAKE_CUDA_FAIL", "cudaStreamQuery:1:719", 1);
    rank_is(number, idist_initialize(&d), IDIST_ERR_DEVICE);
    if (number == 1)
        rank_check(fake_count_comms() == 0, "%d communicators are left", fake_count_comms());
    start = tap_now_ms();
    // a thread aborts the communicator of rank 0 later
    while (fake_count_comms() && tap_now_ms() - start < 5000) tap_sleep_ms(20);
    rank_check(fake_count_comms() == 0, "rank %d: %d communicators are left", number,
               fake_count_comms());
    check_leaks(number);
    return 0;
}

// The set-up of a group's communicator fails twice, because of rank 1. The group's first call must
// succeed at the third try.
static int tries_again(int number, void *arg) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    idist_desc d = desc_of(number, 2, ((const trouble *)arg)->port);
    idist_group *g = NULL;
    idist_opts o = opts_of(NULL);
    int32_t *x;
    config.blocking = 0;
    d.nccl_config = &config;
    d.init_timeout_ms = 1000 + 250 * test_slow_factor();
    if (!rank_ok(number, idist_initialize(&d))) return 0;
    rank_ok(number, idist_split(NULL, 0, number, &g));
    x = device_of(1, 1);
    o.group = g;
    for (int k = 0; k < 2; k++) {
        if (number == 1) fake_set_env("FAKE_NCCL_FAIL", "2");
        rank_is(number, idist_all_reduce(x, x, 1, IDIST_I32, IDIST_SUM, &o), IDIST_ERR_DEVICE);
        fake_set_env("FAKE_NCCL_FAIL", NULL);
    }
    rank_ok(number, idist_all_reduce(x, x, 1, IDIST_I32, IDIST_SUM, &o));
    rank_check(first_of(x) == 2, "rank %d: got %d", number, first_of(x));
    rank_ok(number, idist_barrier(NULL));
    if (number == 0) rank_ok(number, idist_abort(g));
    while (idist_barrier(&o) == IDIST_OK) continue;
    rank_ok(number, idist_free_group(&g));
    rank_ok(number, idist_finalize());
    rank_check(fake_count_comms() == 0, "rank %d: %d communicators are left", number,
               fake_count_comms());
    check_leaks(number);
    return 0;
}

// The revoke of a failed group's communicator never ends. Freeing the group must not wait for the
// revoke, and other groups must work. The end of the world must warn that the communicator stays in
// memory.
static int frees_what_stays(int number, void *arg) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    idist_desc d = desc_of(number, 2, ((const trouble *)arg)->port);
    idist_group *g = NULL;
    idist_opts o = opts_of(NULL);
    int32_t *x;
    int64_t start;
    fake_set_env("FAKE_NCCL_REVOKE_HANGS", "1"); // set before the threads that read it start
    config.blocking = 0;
    d.nccl_config = &config;
    if (!rank_ok(number, idist_initialize(&d))) return 0;
    rank_ok(number, idist_split(NULL, 0, number, &g));
    x = device_of(1, 1);
    o.group = g;
    rank_ok(number, idist_all_reduce(x, x, 1, IDIST_I32, IDIST_SUM, &o));
    rank_ok(number, idist_barrier(NULL));
    if (number == 0) rank_ok(number, idist_abort(g));
    while (idist_barrier(&o) == IDIST_OK) continue;
    start = tap_now_ms();
    rank_ok(number, idist_free_group(&g));
    rank_check(tap_now_ms() - start < 1000 * test_slow_factor(), "rank %d: %d ms", number,
               (int)(tap_now_ms() - start));
    rank_ok(number, idist_all_reduce(x, x, 1, IDIST_I32, IDIST_SUM, NULL));
    rank_check(first_of(x) == 4, "rank %d: got %d", number, first_of(x));
    start = tap_now_ms();
    rank_ok(number, idist_finalize());
    rank_check(tap_now_ms() - start < 7000 * test_slow_factor(), "rank %d: %d ms", number,
               (int)(tap_now_ms() - start));
    rank_check(strstr(said, "stays in memory") != NULL, "rank %d: got \"%s\"", number, said);
    return 0;
}

// Threads are inside calls of a group when another thread closes the world. Their calls must return
// an error before anything that they use is freed.
typedef struct insider {
    idist_group *group;
    idist_status status;
    pthread_t thread;
} insider;

static void insider_start(insider *in, int n, idist_group *group, void *(*fn)(void *arg)) {
    for (int k = 0; k < n; k++) {
        in[k].group = group;
        rank_check(pthread_create(&in[k].thread, NULL, fn, &in[k]) == 0, "no thread");
    }
}

static void insider_join(int number, const insider *in, int n) {
    for (int k = 0; k < n; k++) {
        pthread_join(in[k].thread, NULL);
        rank_check(in[k].status == IDIST_ERR_STATE || in[k].status == IDIST_ERR_ABORTED,
                   "rank %d: thread %d: %s", number, k, idist_status_name(in[k].status));
    }
}

static void *calls_for_the_first_time(void *arg) {
    insider *in = (insider *)arg;
    idist_opts o = opts_of(in->group);
    int32_t *x = device_of(1, 1);
    in->status = idist_all_reduce(x, x, 1, IDIST_I32, IDIST_SUM, &o);
    return NULL;
}

// One thread sets up NCCL for the group, and the other thread waits for the first one.
static int closes_while_connecting(int number, void *arg) {
    idist_desc d = desc_of(number, 2, ((const trouble *)arg)->port);
    insider in[2] = {{NULL, IDIST_OK, 0}, {NULL, IDIST_OK, 0}};
    idist_group *g = NULL, *same;
    int64_t start;
    d.init_timeout_ms = 15000 * test_slow_factor();
    if (!rank_ok(number, idist_initialize(&d))) return 0;
    rank_ok(number, idist_split(NULL, 0, number, &g));
    fake_set_env("FAKE_NCCL_INIT_HANGS", "1");
    insider_start(in, 2, g, calls_for_the_first_time);
    tap_sleep_ms(200 + 100 * test_slow_factor());
    start = tap_now_ms();
    same = g;
    rank_is(number, idist_free_group(&same), IDIST_ERR_STATE);
    rank_ok(number, idist_finalize());
    insider_join(number, in, 2);
    rank_check(tap_now_ms() - start < 4000 * test_slow_factor(), "rank %d: %d ms", number,
               (int)(tap_now_ms() - start));
    return 0;
}

static void *exchanges_pairs(void *arg) {
    insider *in = (insider *)arg;
    int32_t *x = device_of(1, 4);
    idist_opts o = opts_of(in->group);
    o.stream = new_stream();
    in->status = idist_all_to_all(x, x + 2, 1, IDIST_I32, &o);
    if (in->status == IDIST_OK) in->status = IDIST_ERR_ABORTED; // it was enqueued and then aborted
    return NULL;
}

// A thread waits inside NCCL for another rank, which does not come. A second thread waits for the
// first thread. `late_ms` is the time that the first thread stays inside after a revoke. It is NULL
// for an old NCCL, in which the thread stays forever.
static int closes_beside(int number, const trouble *t, const char *late_ms) {
    static insider in[2]; // may be used after the return
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    idist_desc d = desc_of(number, 2, t->port);
    idist_group *g = NULL;
    idist_opts o = opts_of(NULL);
    int64_t start = tap_now_ms();
    int32_t *x;
    d.nccl_config = &config;
    if (!rank_ok(number, idist_initialize(&d))) return 0;
    rank_ok(number, idist_split(NULL, 0, number, &g));
    x = device_of(1, 1);
    o.group = g;
    rank_ok(number, idist_all_reduce(x, x, 1, IDIST_I32, IDIST_SUM, &o));
    if (late_ms) fake_set_env("FAKE_NCCL_STAYS_MS", late_ms);
    if (number == 0) insider_start(in, 2, g, exchanges_pairs);
    while (number == 0 && !fake_count_inside() && tap_now_ms() - start < 10000) tap_sleep_ms(5);
    start = tap_now_ms();
    rank_ok(number, idist_finalize());
    rank_check(tap_now_ms() - start < 8000 * test_slow_factor(), "rank %d: %d ms", number,
               (int)(tap_now_ms() - start));
    if (number == 0 && late_ms) insider_join(number, in, 2);
    for (int k = 0; k < 2 && number == 0 && !late_ms; k++) pthread_detach(in[k].thread);
    return 0;
}

// A call waits for a thread that is inside NCCL, while the world is open. The call must time out.
static int waits_behind(int number, void *arg) {
    static insider in; // may be used after the return
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    idist_desc d = desc_of(number, 2, ((const trouble *)arg)->port);
    idist_opts o = opts_of(NULL);
    int64_t start = tap_now_ms();
    int32_t none = 0, *x;
    d.nccl_config = &config;
    if (!rank_ok(number, idist_initialize(&d))) return 0;
    if (number == 1) {
        rank_check(idist_recv(&none, 1, IDIST_I32, 0, 99, NULL, NULL) != IDIST_OK,
                   "the receive ended");
        idist_finalize(); // joins the threads that it started
        return 0;
    }

    insider_start(&in, 1, NULL, exchanges_pairs);
    pthread_detach(in.thread);
    while (!fake_count_inside() && tap_now_ms() - start < 10000) tap_sleep_ms(5);
    x = device_of(1, 4);
    o.timeout_ms = 500;
    start = tap_now_ms();
    rank_is(number, idist_all_to_all(x, x + 2, 1, IDIST_I32, &o), IDIST_ERR_TIMEOUT);
    rank_check(tap_now_ms() - start < 2500 * test_slow_factor(), "rank %d: %d ms", number,
               (int)(tap_now_ms() - start));
    return 0;
}

// With an old NCCL, which cannot be made to return, the thread stays inside.
static int closes_beside_old(int number, void *arg) {
    closes_beside(number, (const trouble *)arg, NULL);
    if (number == 0) rank_check(strstr(said, "stays in memory") != NULL, "got \"%s\"", said);
    return 0;
}

static int closes_beside_new(int number, void *arg) {
    closes_beside(number, (const trouble *)arg, "500");
    // Only rank 0 is checked, because rank 1 waits until rank 0 has finalized its communicator.
    if (number == 0)
        rank_check(fake_count_comms() == 0, "%d communicators are left", fake_count_comms());
    return 0;
}

// The thread stays inside for longer than the end of the world waits. The memory that the thread
// uses must not be freed.
static int closes_beside_late(int number, void *arg) {
    closes_beside(number, (const trouble *)arg, "7000");
    if (number == 0) rank_check(strstr(said, "stays in memory") != NULL, "got \"%s\"", said);
    return 0;
}

// A thread waits without the lock for space in a full stream when another thread closes the world.
// The second half of the first thread's sendrecv begins after the close. It must return an error
// instead of staying behind.
static cudaStream_t full_stream;

static void pauses(void *ms) { tap_sleep_ms((int)(intptr_t)ms); }

static void *exchanges_messages(void *arg) {
    insider *in = (insider *)arg;
    int32_t *x = device_of(1, 2);
    idist_opts o = on_stream(in->group, full_stream);
    in->status = idist_sendrecv(x, 1, 1, 5, x + 1, 1, 1, 5, IDIST_I32, NULL, &o);
    return NULL;
}

static int closes_beside_messages(int number, void *arg) {
    idist_desc d = desc_of(number, 2, ((const trouble *)arg)->port);
    intptr_t ms = 600 + 100 * test_slow_factor();
    insider in = {NULL, IDIST_OK, 0};
    int32_t *x;
    setenv("IDIST_DEVICE_BACKEND", "staged", 1);
    setenv("FAKE_CUDA_QUEUE", "3", 1);
    if (!rank_ok(number, idist_initialize(&d))) return 0;
    x = device_of(1, 1);
    rank_ok(number, idist_all_reduce(x, x, 1, IDIST_I32, IDIST_SUM, NULL));
    full_stream = new_stream();
    rank_ok(number, idist_barrier(NULL));
    if (number == 0) {
        for (int k = 0; k < 3; k++) CUDA(cudaLaunchHostFunc(full_stream, pauses, (void *)ms));
        insider_start(&in, 1, NULL, exchanges_messages);
        tap_sleep_ms(150 + 50 * test_slow_factor());
    }
    rank_ok(number, idist_finalize());
    if (number == 0) insider_join(number, &in, 1);
    rank_check(first_of(x) == 2, "rank %d: got %d", number, first_of(x));
    return 0;
}

// A rank ends with an error while one of its threads waits for space in a stream. An earlier kernel
// in the stream waits for the other rank. A group has a communicator, too. Both communicators must
// be aborted before the end of the world waits for the thread.
static void *scans(void *arg) {
    insider *in = (insider *)arg;
    int32_t *x = device_of(1, 1);
    idist_opts o = on_stream(in->group, full_stream);
    in->status = idist_scan(x, x, 1, IDIST_I32, IDIST_SUM, &o);
    return NULL;
}

static insider scanner; // used on rank 0; the thread returns after the worker has ended

static int fails_beside_a_scan(int local_rank, void *arg) {
    int number = idist_get_rank();
    idist_opts o = opts_of(NULL);
    int32_t none = 0, *x = device_of(1, 1);
    (void)local_rank;
    (void)arg;
    rank_ok(number, idist_split(NULL, 0, number, &o.group));
    rank_ok(number, idist_all_reduce(x, x, 1, IDIST_I32, IDIST_SUM, &o));
    rank_check(first_of(x) == 2, "rank %d: got %d", number, first_of(x));
    full_stream = new_stream();
    o = on_stream(NULL, full_stream);
    if (number == 1) CUDA(cudaLaunchHostFunc(full_stream, keeps_busy, NULL));
    rank_ok(number, idist_all_reduce(x, x, 1, IDIST_I32, IDIST_SUM, &o));
    // the ranks have met on the host; the kernel of rank 0 waits
    rank_ok(number, idist_barrier(NULL));
    tap_sleep_ms(100);
    if (number == 1) {
        rank_is(number, idist_recv(&none, 1, IDIST_I32, 0, 99, NULL, NULL), IDIST_ERR_PEER_LOST);
        __atomic_store_n(&released, 1, __ATOMIC_RELEASE);
        return 0;
    }
    while (fake_count_queued(full_stream) < 6) CUDA(cudaMemsetAsync(x, 0, sizeof *x, full_stream));
    insider_start(&scanner, 1, NULL, scans);
    tap_sleep_ms(150 + 50 * test_slow_factor());
    return 3;
}

static int ends_beside_a_scan(int number, void *arg) {
    idist_desc d = desc_of(number, 2, ((const trouble *)arg)->port);
    int64_t start = tap_now_ms();
    setenv("FAKE_CUDA_QUEUE", "6", 1);
    (void)!idist_parallel_run(&d, fails_beside_a_scan, NULL);
    rank_check(tap_now_ms() - start < 3000 * test_slow_factor(), "rank %d: %d ms", number,
               (int)(tap_now_ms() - start));
    if (number == 1) return 0;
    rank_check(said[0] == 0, "got \"%s\"", said);
    insider_join(number, &scanner, 1);
    return 0;
}

// Calls of several threads wait for a thread that is inside NCCL. The calls must reach NCCL in the
// order in which they were made, whichever thread runs first.
typedef struct turn_call {
    int32_t *x;
    cudaStream_t stream;
    pthread_t thread;
} turn_call;

enum { TURNS = 3 };
static turn_call turns[TURNS];

static void *calls_in_turn(void *arg) {
    turn_call *c = (turn_call *)arg;
    idist_opts o = on_stream(NULL, c->stream);
    rank_ok(0, idist_all_reduce(c->x, c->x, 1, IDIST_I32, IDIST_SUM, &o));
    return NULL;
}

static void *starts_calls(void *arg) {
    int64_t start = tap_now_ms();
    (void)arg;
    while (!fake_count_inside() && tap_now_ms() - start < 10000) tap_sleep_ms(1);
    for (int k = 0; k < TURNS; k++) {
        rank_check(pthread_create(&turns[k].thread, NULL, calls_in_turn, &turns[k]) == 0,
                   "no thread");
        tap_sleep_ms(100 * test_slow_factor()); // until the call has a number
    }
    for (int k = 0; k < TURNS; k++) pthread_join(turns[k].thread, NULL);
    return NULL;
}

static int takes_turns(int number, void *arg) {
    static const int32_t values[TURNS] = {1, 100, 10000};
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    idist_desc d = desc_of(number, 2, ((const trouble *)arg)->port);
    idist_opts o = opts_of(NULL);
    pthread_t starter = 0;
    int32_t *x;
    d.nccl_config = &config;
    if (!rank_ok(number, idist_initialize(&d))) return 0;
    x = device_of(1, 4);
    o.stream = new_stream();
    for (int k = 0; k < TURNS; k++) {
        turns[k].x = device_of(values[k], 1);
        turns[k].stream = new_stream();
    }
    rank_ok(number, idist_barrier(NULL));
    if (number == 0)
        rank_check(pthread_create(&starter, NULL, starts_calls, NULL) == 0, "no thread");
    // the other rank is inside NCCL for that long
    else tap_sleep_ms(300 + 400 * test_slow_factor());
    rank_ok(number, idist_all_to_all(x, x + 2, 1, IDIST_I32, &o));
    if (number == 0) pthread_join(starter, NULL);
    for (int k = 0; k < TURNS; k++) {
        o.stream = turns[k].stream;
        if (number == 1)
            rank_ok(number, idist_all_reduce(turns[k].x, turns[k].x, 1, IDIST_I32, IDIST_SUM, &o));
    }
    for (int k = 0; k < TURNS; k++) {
        CUDA(cudaStreamSynchronize(turns[k].stream));
        rank_check(first_of(turns[k].x) == 2 * values[k], "rank %d: call %d: got %d", number, k,
                   first_of(turns[k].x));
    }
    rank_ok(number, idist_finalize());
    return 0;
}

int main(void) {
    static const trouble all[] = {
        {"the ranks are not connected in time", is_given_up, 2, "21403", 0},
        {"the ranks are not connected in time", is_given_up, 2, "22809", 0},
        {"a thread comes out of NCCL too late for the abort", comes_out_late, 2, "22809", 0},
        {"a revoke never ends", revokes_in_vain, 2, "22809", 0},
        {"a world ends while a thread is inside NCCL", ends_beside, 2, "21403", 0},
        {"first calls of two groups beside each other, on a busy device", makes_two_groups, 3,
         "22809", 0},
        {"each call of a group is in progress", holds_back_in_progress, 2, "21403", 0},
        {"the end of a group fails", fails_at_the_end, 2, "21403", 0},
        {"the end of a group fails", fails_at_the_end, 2, "22809", 0},
        {"a call stays in progress", never_begins, 2, "21403", 0},
        {"a rank dies while the ranks are connected", dies_in_set_up, 3, "21403", 0},
        {"a rank dies while the ranks are connected", dies_in_set_up, 3, "22809", 0},
        {"one rank cannot connect", fails_alone, 2, "22809", 0},
        {"a group is connected at the third try", tries_again, 2, "21403", 0},
        {"a group is freed whose communicator stays", frees_what_stays, 2, "22809", 0},
        {"a world ends while threads connect a group", closes_while_connecting, 2, "21403", 0},
        {"a world ends while threads connect a group", closes_while_connecting, 2, "22809", 0},
        {"a call waits for one that NCCL does not return from", waits_behind, 2, "21403", 0},
        {"a world ends while threads call NCCL", closes_beside_old, 2, "21403", 0},
        {"a world ends while threads call NCCL", closes_beside_new, 2, "22809", 0},
        {"a thread comes back when its world is gone", closes_beside_late, 2, "22809", 0},
        {"a world ends before the second half of a call", closes_beside_messages, 2, "22809", 0},
        {"a rank fails beside a thread that waits for its stream", ends_beside_a_scan, 2, "22809",
         0},
        {"calls of several threads keep their order", takes_turns, 2, "22809", 0},
    };

    tap_deadline(100);
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        trouble t = all[i];

        tap_running("%s, NCCL %s", t.name, t.version);
        ranks_reset();
        t.port = free_port();
        fake_set_env("FAKE_NCCL_VERSION", t.version);
        procs_run(t.n, 20000 * test_slow_factor(), t.fn, &t);
        ranks_report("%s, NCCL %s", t.name, t.version);
    }
    return tap_done();
}
