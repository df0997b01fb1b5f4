// test_nccl_faults: an NCCL that does not return, reports calls as in progress, or fails at the end
// of a group. Each case runs in processes of its own, on the stand-ins for libcudart and libnccl.
#include "gpu_ranks.h"

typedef struct trouble {
    const char *name;
    int (*fn)(int number, void *arg); // of each rank
    int n;
    const char *version; // of NCCL
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

// The ranks are not connected in time. The thread that connects them comes out much later: nothing
// that it uses is freed before.
static int is_given_up(int number, void *arg) {
    idist_desc d = desc_of(number, 2, ((const trouble *)arg)->port);
    int threads = count_threads();
    int64_t start;
    setenv("FAKE_NCCL_RUN_HANGS", "1", 1);
    setenv("FAKE_NCCL_QUERY_US", "600000", 1);
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
    setenv("FAKE_NCCL_STAYS_MS", "5000", 1);
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

// A revoke never ends. That delays the end of the world by some seconds, and no thread asks NCCL
// about it afterwards.
static int revokes_in_vain(int number, void *arg) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    idist_desc d = desc_of(number, 2, ((const trouble *)arg)->port);
    int64_t start;
    unsigned asked;
    config.blocking = 0;
    d.nccl_config = &config;
    setenv("FAKE_NCCL_REVOKE_HANGS", "1", 1);
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

// A thread is inside an old NCCL, which cannot be made to return, when its rank ends with an error.
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
    setenv("FAKE_NCCL_IN_PROGRESS", "1", 1);
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
    (void)!idist_barrier(
        NULL); // that of one rank may end, and the other one fail, before this one's has
    setenv("FAKE_NCCL_IN_PROGRESS", "1", 1);
    setenv("FAKE_NCCL_GROUP_FAIL", "3", 1);
    o.stream = new_stream();
    x = device_of(1, 4);
    rank_ok(number, idist_group_begin());
    for (int k = 0; k < 2; k++)
        (void)!idist_all_reduce(x + k, x + k, 1, IDIST_I32, IDIST_SUM,
                                &o); // rank 0 may have failed
    status = idist_group_end();
    while (status == IDIST_OK && tap_now_ms() - start < 3000) status = idist_barrier(NULL);
    rank_check(status == IDIST_ERR_DEVICE, "rank %d: %s: %s", number, idist_status_name(status),
               idist_last_error());
    rank_check(strstr(idist_last_error(), "GROUP_FAIL") != NULL, "rank %d: got \"%s\"", number,
               idist_last_error());
    (void)!idist_finalize();
    return 0;
}

// All ranks have made the call, but NCCL never reports that it has begun: the call times out.
static int never_begins(int number, void *arg) {
    idist_desc d = desc_of(number, 2, ((const trouble *)arg)->port);
    idist_opts o = opts_of(NULL);
    idist_status status;
    int64_t start;
    int32_t *x;
    if (!rank_ok(number, idist_initialize(&d))) return 0;
    setenv("FAKE_NCCL_LATER_HANGS", "1", 1);
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

// Two threads make the first calls of two groups at the same time, while the device is busy for
// long: neither waits for it.
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
        for (int k = 0; k < 2; k++) { // in turn: they work on the same word
            idist_opts o = on_stream(f[k].group, s);
            rank_ok(number, idist_barrier(&o));
        }
        CUDA(cudaStreamSynchronize(s));
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
    };

    tap_deadline(100);
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        trouble t = all[i];
        tap_running("%s, NCCL %s", t.name, t.version);
        ranks_reset();
        t.port = free_port();
        setenv("FAKE_NCCL_VERSION", t.version, 1);
        procs_run(t.n, 20000 * test_slow_factor(), t.fn, &t);
        ranks_report("%s, NCCL %s", t.name, t.version);
    }
    return tap_done();
}
