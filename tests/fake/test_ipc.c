// test_ipc: tests ranks that read each other's device memory.
//
// - Calls that may wait for the device are not made with the world's lock held.
// - Kernels that cannot be compiled and peers that cannot be read are detected when a group is set
//   up.
// - A call moves no more bytes than it must.
// - Calls of many chunks give the right result.
//
// Contains the implementation and runs on the stand-ins for libcudart and libnccl.
enum { CHUNK_BYTES = 128 << 10 }; // small, so that small calls have many chunks
#define IDIST__IPC_CHUNK ((size_t)CHUNK_BYTES)
enum { PATIENCE_MS = 2500 }; // how long closing a world waits
#define IDIST__GPU_ABORT_MS PATIENCE_MS
#define IDIST_IMPLEMENTATION
#include "idist_nccl.h"

#include "fake.h"
#include "ranks.h"

#define CUDA(call) rank_check((call) == cudaSuccess, "%s", #call)

static void *device_alloc(size_t nbytes) {
    void *p = NULL;
    CUDA(cudaMalloc(&p, nbytes));
    return p;
}

static float *device_of(float value, size_t count) {
    float *p = (float *)device_alloc(count * sizeof *p),
          *host = (float *)malloc(count * sizeof *host);
    for (size_t i = 0; i < count; i++) host[i] = value;
    CUDA(cudaMemcpy(p, host, count * sizeof *p, cudaMemcpyHostToDevice));
    CUDA(cudaStreamSynchronize(cudaStreamLegacy));
    free(host);
    return p;
}

static float first_of(const float *device) {
    float x = -1;
    CUDA(cudaMemcpy(&x, device, sizeof x, cudaMemcpyDeviceToHost));
    return x;
}

static cudaStream_t new_stream(void) {
    cudaStream_t s = NULL;
    CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    return s;
}

//------------------------------------------------------------------------------
// calls that may wait for the device, beside an NCCL kernel that waits for a dead rank
//------------------------------------------------------------------------------

enum { A_KERNEL, MEMORY, A_GROUP, THE_END, FULL_CALL, FULL_STAGED, FULL_WAIT, N_BESIDE };
enum { QUEUE = 64 };

// Fills the queue of the stream in *o. Then makes a call on this stream, or makes the stream wait
// for a call. The call's group loses no rank.
static idist_status calls_on_full_stream(int what, float *x, idist_opts *o) {
    cudaStream_t full = (cudaStream_t)o->stream;
    idist_request r = {NULL};
    idist_status status;
    while (fake_count_queued(full) && fake_count_queued(full) < QUEUE)
        CUDA(cudaMemsetAsync(x + 4, 0, sizeof *x, full));
    if (what == FULL_CALL) return idist_all_reduce(x, x, 4, IDIST_F32, IDIST_SUM, o);
    if (what == FULL_STAGED) return idist_scan(x, x, 4, IDIST_F32, IDIST_SUM, o);
    o->stream = NULL;
    o->request = &r;
    status = idist_scan(x, x, 4, IDIST_F32, IDIST_SUM, o);
    return status == IDIST_OK ? idist_wait_stream(&r, full) : status;
}

// Kills rank 1 while rank 0 waits for it on a stream. Ranks 0 and 2 share the first GPU, and rank 1
// has the second GPU. The calls of ranks 0 and 2 must succeed meanwhile.
static int beside_a_dead_rank(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    int what = *(const int *)arg;
    idist_group *nccl = NULL, *ipc = NULL;
    cudaStream_t s = new_stream(), other = new_stream();
    idist_opts o = opts_of(world), own = o;
    float *x = device_of(1, 8), *y = device_of(3, 8);
    void *memory = NULL;
    idist_status status = IDIST_OK;
    (void)n;
    rank_ok(rank, idist_split(world, rank == 2, rank, &nccl));
    rank_ok(rank, idist_split(world, rank == 1, rank, &ipc));
    o.group = nccl;
    // The first call creates the communicator.
    if (rank < 2) rank_ok(rank, idist_all_reduce(x, x, 8, IDIST_F32, IDIST_SUM, &o));
    own.group = ipc;
    if (what >= FULL_CALL && rank != 1) { // so that these ranks have nothing to set up later
        rank_ok(rank, idist_all_reduce(y, y, 8, IDIST_F32, IDIST_SUM, &own));
        rank_ok(rank, idist_scan(y, y, 8, IDIST_F32, IDIST_SUM, &own));
    }
    own.group = world;
    o.stream = s;
    own.stream = other;
    proc_phase(slot, 1);
    if (rank == 1) {
        tap_sleep_ms(400);
        raise(SIGKILL);
    }

    if (rank == 0) rank_ok(rank, idist_all_reduce(x, x, 8, IDIST_F32, IDIST_SUM, &o));
    if (rank == 0 && what == A_KERNEL) status = idist__own_scale("test", &own, y, 8, IDIST_F32, 2);
    if (rank == 0 && what == MEMORY) status = idist__own_alloc("test", &own, &memory, 64);
    own.stream = NULL;
    own.group = ipc;
    if (what >= FULL_CALL && rank != 1) {
        own.stream = s;
        status = calls_on_full_stream(what, y, &own);
    }
    if (what == A_GROUP && rank != 1)
        status = idist_all_reduce(y, y, 8, IDIST_F32, IDIST_SUM, &own);
    if (what == A_GROUP && rank != 1)
        rank_check(first_of(y) == 6, "rank %d: got %g", rank, (double)first_of(y));
    rank_ok(rank, status);

    // The stream must complete. Then the next call of group `nccl`, or idist_close, must report
    // rank 1.
    if (what == THE_END) {
        status = idist_close(&world);
        if (rank == 0) proc_result(slot, status);
        CUDA(cudaStreamSynchronize(s));
        return 0;
    }
    CUDA(cudaStreamSynchronize(s));
    if (rank == 0) proc_result(slot, idist_barrier(&o));
    own.stream = NULL;
    own.request = NULL;
    rank_ok(rank, idist_barrier(&own)); // a rank that ends early would count as lost
    return 0;
}

static void beside_dead_ranks(void) {
    static const char *const names[] = {"the first launch of a kernel",
                                        "cudaMalloc",
                                        "a group that is made",
                                        "idist_close",
                                        "a call on a full stream",
                                        "a staged call on a full stream",
                                        "idist_wait_stream with a full stream"};
    setenv("FAKE_CUDA_DEVICES", "2", 1);
    setenv("FAKE_CUDA_ALLOC_WAITS", "1", 1);
    for (int what = 0; what < N_BESIDE; what++) {
        procs p;
        tap_running("%s beside NCCL that waits for a dead rank", names[what]);
        if (what == FULL_CALL) setenv("FAKE_CUDA_QUEUE", "64", 1);
        if (what == FULL_CALL) setenv("FAKE_CUDA_DELAY_US", "2000", 1);
        ranks_reset();
        procs_start(&p, 3, NULL, beside_a_dead_rank, &what);
        rank_check(procs_wait(&p, 8000) == 0, "hang");
        rank_check(p.slot[0].status == IDIST_ERR_PEER_LOST && text_names_rank(p.slot[0].text, 1),
                   "rank 0: %s", p.slot[0].text);
        ranks_report("%s beside NCCL that waits for a dead rank comes back", names[what]);
        procs_free(&p);
    }
    unsetenv("FAKE_CUDA_QUEUE");
    unsetenv("FAKE_CUDA_DELAY_US");
    unsetenv("FAKE_CUDA_ALLOC_WAITS");
}

//------------------------------------------------------------------------------
// problems that are found when a group is set up
//------------------------------------------------------------------------------

typedef struct trouble {
    const char *name, *value; // a variable of the environment, set on rank 1 or on all ranks
    bool all;
    bool stuck;          // true if work on rank 1's device never ends
    const char *said[4]; // texts in a warning
    int port;
} trouble;

static void keep_log(idist_log_level level, const char *line, void *user) {
    char *text = (char *)user;
    size_t used = strlen(text);
    if (level <= IDIST_LOG_WARN && used + strlen(line) + 2 < 4000)
        snprintf(text + used, 4000 - used, "%s\n", line);
}

// Checks that memory is not used again while an endless copy uses it. Another group must work
// without this memory.
static void leaves_memory_alone(idist_group *world, int rank, float *x) {
    idist_group *half = NULL;
    rank_check(!idist__gpu_of(world->w)->arenas, "rank %d: the memory is there to be used", rank);
    rank_ok(rank, idist_split(world, rank % 2, rank, &half)); // ranks that share a GPU
    idist_opts o = opts_of(half);
    rank_ok(rank, idist_all_reduce(x, x, 1, IDIST_F32, IDIST_SUM, &o));
    rank_check(first_of(x) == 12, "rank %d: got %g", rank, (double)first_of(x));
    rank_ok(rank, idist_free_group(&half));
}

static int has_trouble(int number, void *arg) {
    static char log[4000];
    const trouble *t = (const trouble *)arg;
    enum { COUNT = 100000 };
    bool stuck = t->stuck && number == 1;
    idist_group *world = NULL;
    idist_desc d = desc_with(NULL, NULL);
    if (t->all || number == 1) setenv(t->name, t->value, 1);
    if (stuck) setenv("FAKE_CUDA_ALLOC_WAITS", "1", 1);
    setenv("IDIST_LOG", "warn", 1); // so that warnings reach the logger
    d.rank = number;
    d.world_size = 4;
    d.master_addr = "127.0.0.1";
    d.master_port = t->port;
    d.init_timeout_ms = d.timeout_ms = 10000;
    d.logger.log_fn = keep_log;
    d.logger.user = log;
    CUDA(cudaSetDevice(number % 2));
    float *x = device_of((float)number, COUNT), last = -1;
    if (!rank_ok(number, idist_open(&d, &world))) return 0;
    idist_opts o = opts_of(world);
    rank_ok(number, idist_all_reduce(x, x, COUNT, IDIST_F32, IDIST_SUM, &o));
    CUDA(cudaMemcpy(&last, x + COUNT - 1, sizeof last, cudaMemcpyDeviceToHost));
    rank_check(first_of(x) == 6 && last == 6, "rank %d: got %g and %g", number, (double)first_of(x),
               (double)last);
    const char *backend = world->w->about.device_backend;
    rank_check(strcmp(backend, t->said[0] ? "staged" : "ipc") == 0, "rank %d: by %s", number,
               backend);
    for (int k = 0; k < 4 && t->said[k]; k++)
        rank_check(strstr(log, t->said[k]) != NULL, "rank %d: no \"%s\" in \"%s\"", number,
                   t->said[k], log);
    if (!t->said[0]) rank_check(!log[0], "rank %d: warned: %s", number, log);
    if (t->stuck) leaves_memory_alone(world, number, x);
    if (!stuck) CUDA(cudaFree(x));
    rank_ok(number, idist_close(&world));
    if (stuck)
        rank_check(strstr(log, "until the process ends") != NULL, "rank %d: no word of it: %s",
                   number, log);
    return 0;
}

static void troubles(void) {
    static const trouble all[] = {
        {"FAKE_CUDA_JIT", "0", true, false, {NULL}, 0},
        {"FAKE_CUDA_JIT", "222", false, false, {"rank 1", "PTX", "staged", NULL}, 0},
        {"FAKE_CUDA_CORRUPT_PEERS", "1", true, false, {"IOMMU", "ACS", "iommu=pt", "staged"}, 0},
        {"FAKE_CUDA_CORRUPT_PEERS", "1", false, false, {"rank 1", "IOMMU", "ACS", "iommu=pt"}, 0},
        {"FAKE_CUDA_STUCK_PEERS", "1", false, true, {"rank 1", "IOMMU", "ACS", "iommu=pt"}, 0}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        trouble t = all[i];
        t.port = free_port();
        setenv("FAKE_CUDA_DEVICES", "2", 1);
        tap_running("%s=%s", t.name, t.value);
        ranks_reset();
        procs_run(4, 30000, has_trouble, &t);
        ranks_report("%s=%s on %s: %s", t.name, t.value, t.all ? "all ranks" : "one rank",
                     t.said[0] ? "staged with a warning, and right" : "ipc");
    }
}

static idist_group *world_of_two(int number, int port) {
    idist_group *world = NULL;
    idist_desc d = desc_with(NULL, NULL);
    d.rank = number;
    d.world_size = 2;
    d.master_addr = "127.0.0.1";
    d.master_port = port;
    d.init_timeout_ms = d.timeout_ms = 20000;
    rank_ok(number, idist_open(&d, &world));
    return world;
}

// Sets up a group whose set-up fails each time. Repeated attempts must not use more memory.
static int fails_again(int number, void *arg) {
    uint32_t before;
    setenv("IDIST_DEVICE_BACKEND", "ipc", 1);
    if (number == 1) setenv("FAKE_CUDA_FAIL", "cudaIpcGetMemHandle:-2:801", 1);
    idist_group *world = world_of_two(number, *(const int *)arg), *group = NULL;
    if (!world) return 0;
    float *x = device_of(1, 8);
    rank_ok(number, idist_split(world, 0, number, &group));
    idist_opts o = opts_of(group);
    before = idist__gpu_of(world->w)->arena_count;
    for (int turn = 0; turn < 4; turn++)
        rank_is(number, idist_all_reduce(x, x, 8, IDIST_F32, IDIST_SUM, &o), IDIST_ERR_UNSUPPORTED);
    rank_check(idist__gpu_of(world->w)->arena_count == before + 1, "rank %d: %d arenas", number,
               (int)(idist__gpu_of(world->w)->arena_count - before));
    CUDA(cudaFree(x));
    rank_ok(number, idist_close(&world));
    return 0;
}

static void failures(void) {
    int port = free_port();
    setenv("FAKE_CUDA_DEVICES", "1", 1);
    tap_running("a group that cannot be made, again and again");
    ranks_reset();
    procs_run(2, 20000, fails_again, &port);
    ranks_report("a group that cannot be made, again and again, takes its memory once");
}

// Lets rank 1 arrive late. The ranks read each other's memory only when all ranks have arrived, so
// rank 0 must not give up while rank 1 is late.
static int comes_late(int number, void *arg) {
    int limit_ms = test_slow_factor() > 1 ? 6000 : 3000; // one step of ipc_probe.h gets half of it
    idist_group *world = NULL, *group = NULL;
    idist_desc d = desc_with(NULL, NULL);
    setenv("FAKE_CUDA_DELAY_US", "2000", 1);
    d.rank = number;
    d.world_size = 2;
    d.master_addr = "127.0.0.1";
    d.master_port = *(const int *)arg;
    d.init_timeout_ms = limit_ms;
    d.timeout_ms = 20000;
    if (!rank_ok(number, idist_open(&d, &world))) return 0;

    float *x = device_of(1, 8);
    rank_ok(number, idist_split(world, 0, number, &group));
    idist_opts o = opts_of(group);
    if (number == 1) tap_sleep_ms(limit_ms * 3 / 4);
    rank_ok(number, idist_all_reduce(x, x, 8, IDIST_F32, IDIST_SUM, &o));
    rank_check(first_of(x) == 2, "rank %d: got %g", number, (double)first_of(x));
    rank_check(idist__gpu_group_of(group)->path == IDIST__BY_IPC, "rank %d: by another way",
               number);

    CUDA(cudaFree(x));
    rank_ok(number, idist_close(&world));
    return 0;
}

static void late_ranks(void) {
    int port = free_port();
    setenv("FAKE_CUDA_DEVICES", "1", 1);
    tap_running("a rank that comes late to the making of a group");
    ranks_reset();
    procs_run(2, 20000, comes_late, &port);
    ranks_report("a rank that comes late to the making of a group is no reason to do without ipc");
}

//------------------------------------------------------------------------------
// the end of a world
//------------------------------------------------------------------------------

static void CUDART_CB never_ends(void *arg) {
    (void)arg;
    for (;;) pause();
}

static void CUDART_CB sleeps_a_second(void *arg) {
    (void)arg;
    tap_sleep_ms(1000);
}

typedef struct busy_end {
    const char *backend, *devices;
    int port;
} busy_end;

// Closes the world on rank 0 while its device is busy with work of the program. Each pair of
// processes is a world with a case of its own.
static int closes_beside_work(int process, void *arg) {
    const busy_end *end = (const busy_end *)arg + process / 2;
    int number = process % 2;
    setenv("IDIST_DEVICE_BACKEND", end->backend, 1);
    setenv("FAKE_CUDA_DEVICES", end->devices, 1);
    idist_group *world = world_of_two(number, end->port);
    idist_opts o = opts_of(world);
    float *x = device_of(1, 8);
    int64_t start;
    if (!world) return 0;
    rank_ok(number, idist_all_reduce(x, x, 8, IDIST_F32, IDIST_SUM, &o));
    rank_check(first_of(x) == 2, "rank %d: got %g", number, (double)first_of(x));
    if (number == 0) CUDA(cudaLaunchHostFunc(new_stream(), never_ends, NULL));
    start = tap_now_ms();
    rank_ok(number, idist_close(&world));
    rank_check(tap_now_ms() - start < 10000 * test_slow_factor(), "%s, rank %d: took %d ms",
               end->backend, number, (int)(tap_now_ms() - start));
    return 0;
}

typedef struct late_call {
    idist_group *group;
    float *x;
    size_t count;
} late_call;

static void *calls_late(void *arg) {
    const late_call *c = (const late_call *)arg;
    idist_opts o = opts_of(c->group);
    rank_ok(0, idist_all_reduce(c->x, c->x, c->count, IDIST_F32, IDIST_SUM, &o));
    return NULL;
}

static bool is_under_way(idist_group *group) {
    bool under_way;
    idist__world_lock(group->w);
    under_way = group->device && idist__gpu_group_of(group)->queue;
    pthread_mutex_unlock(&group->w->lock);
    return under_way;
}

// Closes the world on rank 0 while another of its threads reads rank 1's memory.
static int closes_beside_a_call(int number, void *arg) {
    enum { CHUNKS = 40 };
    late_call c = {NULL, NULL, CHUNKS * (size_t)CHUNK_BYTES / sizeof(float)};
    setenv("FAKE_CUDA_DELAY_US", "2000", 1);
    idist_group *world = world_of_two(number, *(const int *)arg);
    pthread_t thread;
    if (!world) return 0;
    c.x = device_of(1, c.count);
    rank_ok(number, idist_split(world, 0, number, &c.group));
    calls_late(&c); // sets up what the ranks share
    if (number == 1) {
        calls_late(&c);
        tap_sleep_ms(300); // until rank 0 waits in idist_close and its thread has returned
    } else {
        rank_check(pthread_create(&thread, NULL, calls_late, &c) == 0, "no thread");
        for (int64_t end = tap_now_ms() + 10000; !is_under_way(c.group) && tap_now_ms() < end;)
            tap_sleep_ms(1);
    }
    rank_ok(number, idist_close(&world));
    if (number == 0) pthread_join(thread, NULL);
    rank_check(first_of(c.x) == 4, "rank %d: got %g", number, (double)first_of(c.x));
    return 0;
}

enum { A_LOAD, AN_ENDLESS_LOAD, A_SETUP, NCCLS_KERNEL, A_FULL_STREAM, N_USES };

static void CUDART_CB outlasts_the_world(void *arg) {
    (void)arg;
    tap_sleep_ms(PATIENCE_MS + 1500);
}

typedef struct use {
    int what, port;
    idist_group *world, *group;
    idist_status status;
} use;

static void *uses_the_device(void *arg) {
    use *u = (use *)arg;
    idist_opts o = opts_of(u->group);
    void *memory = NULL;
    if (u->what == NCCLS_KERNEL) {
        u->status = idist__own_alloc("test", &o, &memory, 64);
        return NULL;
    }
    float *x = device_of(3, 8);
    if (u->what == A_FULL_STREAM) {
        o.stream = new_stream();
        CUDA(cudaLaunchHostFunc((cudaStream_t)o.stream, outlasts_the_world, NULL));
        u->status = calls_on_full_stream(FULL_CALL, x, &o);
        return NULL;
    }
    if (u->what == A_SETUP) {
        CUDA(cudaLaunchHostFunc(new_stream(), sleeps_a_second, NULL));
        u->status = idist_all_reduce(x, x, 8, IDIST_F32, IDIST_SUM, &o);
    } else {
        u->status = idist__own_scale("test", &o, x, 8, IDIST_F32, 2);
        if (u->status == IDIST_OK) rank_check(first_of(x) == 6, "got %g", (double)first_of(x));
    }
    return NULL;
}

// Makes rank 0's device wait in a call that rank 1 does not make.
static void starts_nccl(idist_group *world, idist_group *ended_first, int rank) {
    idist_opts o = opts_of(ended_first);
    float *x = device_of(1, 8);
    rank_ok(rank, idist_all_reduce(x, x, 8, IDIST_F32, IDIST_SUM, &o));
    o.group = world;
    rank_ok(rank, idist_all_reduce(x, x, 8, IDIST_F32, IDIST_SUM, &o));
    o.stream = new_stream();
    if (rank == 0) rank_ok(rank, idist_all_reduce(x, x, 8, IDIST_F32, IDIST_SUM, &o));
}

static pthread_t start_use(use *u, int n_users) {
    pthread_t thread;
    idist__world *w = u->world->w;
    int64_t end = tap_now_ms() + 10000;
    TAP_REQUIRE(pthread_create(&thread, NULL, uses_the_device, u) == 0);
    for (int n = 0; n < n_users && tap_now_ms() < end; tap_sleep_ms(1)) {
        idist__world_lock(w);
        n = idist__gpu_of(w)->user_count;
        pthread_mutex_unlock(&w->lock);
    }
    return thread;
}

// Closes the world on rank 0 while another of its threads, in the middle of a call, has released
// the world's lock. If the thread takes too long, the process ends while the thread still runs.
static int closes_beside_use(int number, void *arg) {
    use u = *(use *)arg, other;
    bool endless = u.what == AN_ENDLESS_LOAD;
    int64_t start, took;
    pthread_t thread, waiter;
    setenv("FAKE_CUDA_JIT_MS", u.what == A_SETUP ? "0" : endless ? "100000" : "200", 1);
    setenv("FAKE_CUDA_ALLOC_WAITS", "1", 1);
    if (u.what == NCCLS_KERNEL) setenv("FAKE_CUDA_DEVICES", "2", 1);
    else if (u.what <= AN_ENDLESS_LOAD) setenv("IDIST_DEVICE_BACKEND", "staged", 1);
    if (u.what == A_FULL_STREAM) setenv("FAKE_CUDA_QUEUE", "64", 1);
    if ((u.world = world_of_two(number, u.port)) == NULL) return 0;
    rank_ok(number, idist_split(u.world, 0, number, &u.group));
    if (u.what == NCCLS_KERNEL) starts_nccl(u.world, u.group, number);
    if (u.what == A_FULL_STREAM) {
        idist_opts o = opts_of(u.group);
        float *x = device_of(1, 8);
        rank_ok(number, idist_all_reduce(x, x, 8, IDIST_F32, IDIST_SUM, &o));
    }
    if (number == 1) {
        if (u.what == A_SETUP) uses_the_device(&u);
        if (u.what == NCCLS_KERNEL) tap_sleep_ms(PATIENCE_MS + 500);
        (void)!idist_barrier(&(idist_opts){.group = u.world});
        (void)!idist_close(&u.world); // rank 0 has left
        return 0;
    }

    other = u;
    thread = start_use(&u, 1);
    if (endless) waiter = start_use(&other, 2);
    start = tap_now_ms();
    idist__life_close(u.world->w, true);
    took = tap_now_ms() - start;
    rank_check(took < 10000 * test_slow_factor(), "took %d ms", (int)took);
    if (endless) {
        pthread_join(waiter, NULL); // the waiter waited for the thread that loads
        rank_is(0, other.status, IDIST_ERR_DEVICE);
        return 0;
    }
    if (u.what == NCCLS_KERNEL)
        rank_check(took < PATIENCE_MS, "took %d ms", (int)took); // NCCL was aborted
    else rank_check(took > 200, "did not wait: %d ms", (int)took);
    pthread_join(thread, NULL);
    // The call does not complete before the world is closed.
    if (u.what == A_FULL_STREAM) rank_is(0, u.status, IDIST_ERR_ABORTED);
    else if (u.what != A_SETUP) rank_is(0, u.status, IDIST_OK);
    else rank_is(0, u.status, IDIST_ERR_STATE);
    return 0;
}

static void leaves(void) {
    static const char *const names[] = {"kernels are loaded", "kernels are loaded without an end",
                                        "a group is made", "NCCL's kernel is waited for",
                                        "a call waits for a stream"};
    setenv("FAKE_CUDA_DEVICES", "1", 1);
    for (int what = 0; what < N_USES; what++) {
        use u = {what, free_port(), NULL, NULL, IDIST_OK};
        tap_running("to leave while %s", names[what]);
        ranks_reset();
        procs_run(2, 30000, closes_beside_use, &u);
        ranks_report("to leave the world while %s in another thread is safe, and takes its time",
                     names[what]);
    }
}

static void ends(void) {
    busy_end busy[] = {{"ipc", "1", 0}, {"staged", "1", 0}, {"nccl", "2", 0}};
    int port = free_port();
    setenv("FAKE_CUDA_DEVICES", "1", 1);
    tap_running("a call under way");
    ranks_reset();
    procs_run(2, 30000, closes_beside_a_call, &port);
    ranks_report("idist_close beside a call that reads the memory of others waits for it");

    for (size_t i = 0; i < sizeof busy / sizeof *busy; i++) busy[i].port = free_port();
    tap_running("a device that never ends");
    ranks_reset();
    procs_run(6, 30000, closes_beside_work, busy);
    ranks_report("idist_close beside work of the program's that never ends comes back: ipc, "
                 "staged, nccl");
}

//------------------------------------------------------------------------------
// threads that wait for the device, or for each other
//------------------------------------------------------------------------------

typedef struct endless {
    int stream;        // the stream in which a copy never gets its turn
    const char *fails; // value of FAKE_CUDA_FAIL
    bool stuck;        // true if other work never ends, so that no more memory is pinned
    int port;
} endless;

// Makes a call whose copies never get their turn on the device. The call must time out. Each pair
// of processes is a world with a case of its own.
static int times_out_beside_copies(int number, void *arg) {
    enum { MANY = 100000 };
    const endless *e = (const endless *)arg + number / 2;
    setenv("IDIST_DEVICE_BACKEND", "staged", 1);
    if (e->fails) setenv("FAKE_CUDA_FAIL", e->fails, 1);
    idist_group *world = world_of_two(number % 2, e->port);
    if (!world) return 0;
    idist_opts o = opts_of(world);
    float *x = device_of(1, MANY);
    idist__world_lock(world->w);
    idist__gpu_of(world->w)->stuck = e->stuck;
    pthread_mutex_unlock(&world->w->lock);
    rank_ok(number, idist_all_reduce(x, x, MANY, IDIST_F32, IDIST_SUM, &o));
    if (number % 2 == 0)
        CUDA(cudaLaunchHostFunc(idist__gpu_group_of(world)->stream[e->stream], never_ends, NULL));
    int64_t start = tap_now_ms();
    o.timeout_ms = 500;
    idist_status status = idist_all_reduce(x, x, MANY, IDIST_F32, IDIST_SUM, &o);
    o.timeout_ms = 0;
    // this rank may complete its part, so its next call times out
    if (number % 2 && status == IDIST_OK) status = idist_barrier(&o);
    rank_is(number, status, IDIST_ERR_TIMEOUT);
    rank_check(tap_now_ms() - start < (PATIENCE_MS + 2000) * test_slow_factor(),
               "process %d: took %d ms", number, (int)(tap_now_ms() - start));
    return 0;
}

static void endless_copies(void) {
    static const char not_pinned[] = "cudaHostRegister:0:801";
    endless all[] = {{IDIST__STREAM_OUT, NULL, false, 0},
                     {IDIST__STREAM_IN, NULL, false, 0},
                     {IDIST__STREAM_OUT, not_pinned, false, 0},
                     {IDIST__STREAM_IN, not_pinned, false, 0},
                     {IDIST__STREAM_OUT, NULL, true, 0}};
    int n = (int)(sizeof all / sizeof *all);
    for (int i = 0; i < n; i++) all[i].port = free_port();
    tap_running("copies that never end");
    ranks_reset();
    procs_run(2 * n, 20000, times_out_beside_copies, all);
    ranks_report("a call times out though its copies never end, out of the device and into it, "
                 "also where memory cannot be pinned");
}

// Uses memory that cannot be pinned. Staging must still work.
static int stages_without_pinning(int number, void *arg) {
    enum { MANY = 6 << 20 }; // several chunks
    setenv("IDIST_DEVICE_BACKEND", "staged", 1);
    setenv("FAKE_CUDA_FAIL", "cudaHostRegister:0:801", 1);
    idist_group *world = world_of_two(number, *(const int *)arg);
    if (!world) return 0;
    idist_opts o = opts_of(world);
    float *x = device_of(1, MANY), *host = (float *)malloc(MANY * sizeof *host);
    size_t i = 0;
    rank_ok(number, idist_all_reduce(x, x, MANY, IDIST_F32, IDIST_SUM, &o));
    CUDA(cudaMemcpy(host, x, MANY * sizeof *host, cudaMemcpyDeviceToHost));
    while (i < MANY && host[i] == 2) i++;
    rank_check(i == MANY, "rank %d: element %zu is %g", number, i, (double)host[i]);
    free(host);
    CUDA(cudaFree(x));
    rank_ok(number, idist_close(&world));
    return 0;
}

// Lets a call time out. The call must wait for its copies, even if other work on the device never
// ends.
static int leaves_its_buffers(int number, void *arg) {
    setenv("IDIST_DEVICE_BACKEND", "staged", 1);
    idist_group *world = world_of_two(number, *(const int *)arg);
    if (!world) return 0;
    idist_opts o = opts_of(world);
    float *x = device_of(1, 8);
    cudaStream_t out;
    rank_ok(number, idist_all_reduce(x, x, 8, IDIST_F32, IDIST_SUM, &o));
    out = idist__gpu_group_of(world)->stream[IDIST__STREAM_OUT];
    idist__world_lock(world->w);
    idist__gpu_of(world->w)->stuck = true;
    pthread_mutex_unlock(&world->w->lock);
    if (number == 0) CUDA(cudaLaunchHostFunc(out, sleeps_a_second, NULL));
    o.timeout_ms = 300;
    rank_is(number, idist_all_reduce(x, x, 8, IDIST_F32, IDIST_SUM, &o), IDIST_ERR_TIMEOUT);
    rank_check(cudaStreamQuery(out) == cudaSuccess, "rank %d: a copy is still to come", number);
    (void)!idist_close(&world);
    return 0;
}

typedef struct pair_call {
    idist_group *group;
    idist_status status;
} pair_call;

static void *calls_pair(void *arg) {
    pair_call *c = (pair_call *)arg;
    idist_opts o = opts_of(c->group);
    float *x = device_of(1, 4);
    o.stream = new_stream();
    c->status = idist_all_to_all(x, x + 2, 1, IDIST_F32, &o);
    CUDA(cudaStreamSynchronize((cudaStream_t)o.stream));
    return NULL;
}

static int count_users(idist__world *w) {
    idist__world_lock(w);
    int n = idist__gpu_of(w)->user_count;
    pthread_mutex_unlock(&w->lock);
    return n;
}

// Calls NCCL in a thread, without the lock. The thread must count as a user of the device, so that
// closing the world waits for it.
static int is_inside_nccl(int number, void *arg) {
    setenv("FAKE_CUDA_DEVICES", "2", 1);
    idist_group *world = world_of_two(number, *(const int *)arg);
    if (!world) return 0;
    pair_call c = {NULL, IDIST_OK};
    idist_opts host = opts_of(world);
    pthread_t thread;
    int n = 0;
    rank_ok(number, idist_split(world, 0, number, &c.group));
    float *x = device_of(1, 1);
    idist_opts o = opts_of(c.group);
    rank_ok(number, idist_all_reduce(x, x, 1, IDIST_F32, IDIST_SUM, &o));
    if (number == 0) {
        TAP_REQUIRE(pthread_create(&thread, NULL, calls_pair, &c) == 0);
        for (int64_t end = tap_now_ms() + 3000; !n && tap_now_ms() < end; tap_sleep_ms(1))
            n = count_users(world->w);
        rank_check(n == 1, "rank 0: %d users", n);
    }
    rank_ok(number, idist_barrier(&host));
    if (number == 0) pthread_join(thread, NULL);
    else calls_pair(&c);
    rank_ok(number, c.status);
    rank_check(count_users(world->w) == 0, "rank %d: users are left", number);
    rank_ok(number, idist_close(&world));
    return 0;
}

// Waits for another thread that prepares the group and never returns. The wait must end at a
// deadline.
static int waits_for_a_thread(int number, void *arg) {
    idist_group *world = NULL, *group = NULL;
    idist_desc d = desc_with(NULL, NULL);
    (void)arg;
    d.world_size = 1;
    d.timeout_ms = 300;
    d.init_timeout_ms = 500;
    if (!rank_ok(number, idist_open(&d, &world))) return 0;
    rank_ok(number, idist_split(world, 0, 0, &group));
    float *x = device_of(1, 1);
    idist_opts o = opts_of(group);
    idist__world_lock(world->w);
    rank_ok(number, idist__gpu_setup_group_make(group));
    idist__gpu_group_of(group)->preparing = true;
    pthread_mutex_unlock(&world->w->lock);
    int64_t start = tap_now_ms();
    rank_is(number, idist_all_reduce(x, x, 1, IDIST_F32, IDIST_SUM, &o), IDIST_ERR_TIMEOUT);
    rank_check(tap_now_ms() - start < 3000 * test_slow_factor(), "took %d ms",
               (int)(tap_now_ms() - start));
    idist__gpu_group_of(group)->preparing = false;
    rank_ok(number, idist_all_reduce(x, x, 1, IDIST_F32, IDIST_SUM, &o));
    rank_ok(number, idist_close(&world));
    return 0;
}

static void waits(void) {
    int port;
    setenv("FAKE_CUDA_DEVICES", "1", 1);
    endless_copies();

    port = free_port();
    tap_running("memory that is not pinned");
    ranks_reset();
    procs_run(2, 30000, stages_without_pinning, &port);
    ranks_report("a call is right where memory cannot be pinned");

    port = free_port();
    tap_running("copies beside work that never ends");
    ranks_reset();
    procs_run(2, 30000, leaves_its_buffers, &port);
    ranks_report("a call that times out waits for its copies beside work that never ends");

    port = free_port();
    tap_running("a thread inside NCCL");
    ranks_reset();
    procs_run(2, 30000, is_inside_nccl, &port);
    ranks_report("a thread inside NCCL counts as a user of the device");

    tap_running("a thread that prepares a group");
    ranks_reset();
    procs_run(1, 20000, waits_for_a_thread, NULL);
    ranks_report("a thread waits for one that prepares its group until a deadline");
}

//------------------------------------------------------------------------------
// calls of many chunks, while each rank's device has its own speed
//------------------------------------------------------------------------------

enum { COUNT = 150001 };

static void fill(void *p, size_t count, idist_dtype dtype, int rank) {
    for (size_t i = 0; i < count; i++) {
        double x = (double)(int64_t)(tap_mix((uint64_t)rank * 7919 + i) >> 40) / 1024 - 4000;
        if (dtype == IDIST_F64) ((double *)p)[i] = x;
        else ((float *)p)[i] = (float)x;
    }
}

static idist_status call(int kind, const void *send, void *recv, size_t count, idist_dtype dtype,
                         idist_op op, const idist_opts *o) {
    switch (kind) {
    case 0: return idist_all_reduce(send, recv, count, dtype, op, o);
    case 1: return idist_reduce(send, recv, count, dtype, op, 1, o);
    case 2: return idist_reduce_scatter(send, recv, count, dtype, op, o);
    case 3: return idist_broadcast(recv, count, dtype, 1, o);
    case 4: return idist_all_gather(send, recv, count, dtype, o);
    case 5: return idist_gather(send, recv, count, dtype, 1, o);
    case 6: return idist_scatter(send, recv, count, dtype, 1, o);
    default: return idist_all_to_all(send, recv, count, dtype, o);
    }
}

// Makes a call on the host and on the device with the same numbers. The results must have the same
// bits. `shift` is the misalignment of the buffers in bytes.
static void compare(idist_group *world, int rank, int n, int kind, idist_dtype dtype, idist_op op,
                    bool in_place, size_t shift) {
    size_t size = idist_dtype_size(dtype),
           count = kind < 2 || kind == 3 ? COUNT : COUNT / (size_t)n;
    size_t room = (COUNT + 64) * size;
    char *host[2], *back = (char *)malloc(room), *device[2];
    idist_opts o = opts_of(world);
    for (int k = 0; k < 2; k++) {
        host[k] = (char *)malloc(room);
        memset(host[k], 0, room);
        fill(host[k], COUNT, dtype, rank + 100 * k);
        device[k] = (char *)device_alloc(room) + shift;
        CUDA(cudaMemcpy(device[k], host[k], room - shift, cudaMemcpyHostToDevice));
    }
    CUDA(cudaStreamSynchronize(cudaStreamLegacy));
    int to = in_place ? 0 : 1;
    rank_ok(rank, call(kind, host[0], host[to], count, dtype, op, &o));
    rank_ok(rank, call(kind, device[0], device[to], count, dtype, op, &o));
    for (int k = 0; k < 2; k++) {
        size_t i = 0;
        CUDA(cudaMemcpy(back, device[k], COUNT * size, cudaMemcpyDeviceToHost));
        if (memcmp(back, host[k], COUNT * size) == 0) i = COUNT * size;
        while (i < COUNT * size && back[i] == host[k][i]) i++;
        rank_check(i == COUNT * size,
                   "rank %d: kind %d, %s, op %d, shift %zu, %s: buffer %d, element %zu of %zu",
                   rank, kind, idist_dtype_name(dtype), (int)op, shift,
                   in_place ? "in place" : "not in place", k, i / size, count);
        CUDA(cudaFree(device[k] - shift));
        free(host[k]);
    }
    free(back);
}

static void many_chunks(idist_group *world, int rank, int n, void *arg) {
    idist_op premul = IDIST_SUM;
    (void)arg;
    rank_check(strcmp(world->w->about.device_backend, "ipc") == 0, "by %s",
               world->w->about.device_backend);
    rank_ok(rank, idist_op_create_premul_sum(rank % 2 ? 0.3 : 3, world, &premul));
    for (int kind = 0; kind < 8; kind++) {
        compare(world, rank, n, kind, IDIST_F32, IDIST_SUM, kind == 0 || kind == 3, 0);
        if (kind == 7) compare(world, rank, n, kind, IDIST_F64, IDIST_SUM, true, 8);
    }
    compare(world, rank, n, 0, IDIST_F32, IDIST_AVG, false, 0);
    compare(world, rank, n, 0, IDIST_F32, IDIST_MAX, false, 4);
    // alignment differs between ranks
    compare(world, rank, n, 0, IDIST_F32, IDIST_SUM, true, rank == 1 ? 4 : 0);
    compare(world, rank, n, 0, IDIST_F64, premul, false, 0);
    compare(world, rank, n, 0, IDIST_F64, premul, true, 8);
    rank_ok(rank, idist_op_free(premul, world));
}

static int at_a_pace(int number, void *arg) {
    static const char *const delays[] = {"0", "400", "100", "900"};
    const int *setting = (const int *)arg; // number of ranks, port
    idist_group *world = NULL;
    idist_desc d = desc_with(NULL, NULL);
    setenv("FAKE_CUDA_DELAY_US", delays[(number + setting[0]) % 4], 1);
    d.rank = number;
    d.world_size = setting[0];
    d.master_addr = "127.0.0.1";
    d.master_port = setting[1];
    d.init_timeout_ms = d.timeout_ms = 20000;
    if (!rank_ok(number, idist_open(&d, &world))) return 0;
    many_chunks(world, number, setting[0], NULL);
    rank_ok(number, idist_close(&world));
    return 0;
}

static void paces(void) {
    setenv("FAKE_CUDA_DEVICES", "1", 1);
    for (int n = 2; n <= 4; n++) {
        int setting[2] = {n, free_port()};
        tap_running("many chunks, %d ranks", n);
        ranks_reset();
        procs_run(n, 60000, at_a_pace, setting);
        ranks_report("calls of many chunks, %d ranks of different pace: the host's bits", n);
    }
}

//------------------------------------------------------------------------------
// how many bytes move, and when
//------------------------------------------------------------------------------

// Measures the bytes of device memory that a call reads and writes, relative to the bytes of the
// messages.
static void traffic(idist_group *world, int rank, int n, void *arg) {
    enum { MESSAGE = 4 << 20 };
    static fake_traffic before;
    float *send = device_of(1, MESSAGE / 4), *recv = device_of(2, MESSAGE / 4);
    idist_opts o = opts_of(world);
    rank_ok(rank, idist_barrier(&o));
    if (rank == 0) before = fake_traffic_now();
    rank_ok(rank, idist_barrier(&o));
    rank_ok(rank, idist_all_reduce(send, recv, MESSAGE / 4, IDIST_F32, IDIST_SUM, &o));
    rank_ok(rank, idist_barrier(&o));
    if (rank == 0) {
        fake_traffic after = fake_traffic_now();
        uint64_t moved = after.read - before.read + after.written - before.written;
        *(double *)arg = (double)moved / MESSAGE / n;
    }
    rank_ok(rank, idist_barrier(&o));
    rank_check(first_of(recv) == (float)n, "rank %d: got %g", rank, (double)first_of(recv));
    CUDA(cudaFree(send));
    CUDA(cudaFree(recv));
}

// Counts the calls of a world's backend on rank 0. The counting functions wrap the functions of the
// real backend.
static struct {
    idist_backend_api api;
    const idist_backend_api *real;
    int n_meets, n_busy, n_sleeps;
    int64_t first_sleep_ns;
} watch;

static void watched_start(idist__task *t) {
    if (t->on_device && t->call.kind == IDIST__BARRIER) {
        watch.n_meets++;
        if (cudaStreamQuery(idist__gpu_group_of(t->group)->stream[0]) == cudaErrorNotReady)
            watch.n_busy++;
        cudaGetLastError();
    }
    watch.real->start(t);
}

static void watched_sleep(idist__world *w, int64_t until_ns) {
    (void)w, (void)until_ns;
    if (!watch.n_sleeps++) watch.first_sleep_ns = tap_now_ns();
}

static void watch_backend(idist_group *world) {
    idist__gpu *gpu = idist__gpu_of(world->w);
    watch.real = gpu->host_backend;
    watch.api = *gpu->host_backend;
    watch.api.start = watched_start;
    watch.n_meets = watch.n_busy = watch.n_sleeps = 0;
    gpu->host_backend = &watch.api;
}

// Checks that the device works on one chunk while the ranks meet for another chunk. Each operation
// on the device takes so long that the host notices its end while the next operation runs, even on
// a busy machine.
static int keeps_the_device_busy(int number, void *arg) {
    enum { CHUNKS = 16 };
    size_t count = CHUNKS * (size_t)CHUNK_BYTES / sizeof(float);
    setenv("FAKE_CUDA_DELAY_US", "10000", 1);
    idist_group *world = world_of_two(number, *(const int *)arg);
    if (!world) return 0;
    float *x = device_of(1, count);
    idist_opts o = opts_of(world);
    rank_check(strcmp(world->w->about.device_backend, "ipc") == 0, "by %s",
               world->w->about.device_backend);
    if (number == 0) watch_backend(world);
    rank_ok(number, idist_all_reduce(x, x, count, IDIST_F32, IDIST_SUM, &o));
    if (number == 0) {
        rank_check(watch.n_meets >= CHUNKS && watch.n_busy * 4 >= watch.n_meets * 3,
                   "%d of %d times that they met, the device was busy", watch.n_busy,
                   watch.n_meets);
        idist__gpu_of(world->w)->host_backend = watch.real;
    }
    CUDA(cudaFree(x));
    rank_ok(number, idist_close(&world));
    return 0;
}

static void meets(void) {
    int port = free_port();
    setenv("FAKE_CUDA_DEVICES", "1", 1);
    tap_running("the ranks meet while the device works");
    ranks_reset();
    procs_run(2, 30000, keeps_the_device_busy, &port);
    ranks_report("the ranks meet while the device works, 2 ranks");
}

// Checks that a thread that waits for the device polls it for a while before it sleeps. Sleeping
// takes longer than a small call.
static void looks_before_it_sleeps(idist_group *world, int rank, int n, void *arg) {
    static idist__gpu_op op;
    idist__world *w = world->w;
    idist__task t;
    int64_t start;
    (void)rank, (void)n, (void)arg;
    memset(&t, 0, sizeof t);
    t.group = world;
    t.device = &op;
    idist__world_lock(w);
    watch_backend(world);
    watch.api.sleep = watched_sleep;
    w->wait.spin_ns = 500000; // as with a core for each rank
    idist__gpu_task_set_waiting(&t, true);
    start = tap_now_ns();
    while (!watch.n_sleeps && tap_now_ns() - start < 1000000000)
        idist__gpu_engine_sleep(w, start + 1000000000);
    rank_check(watch.n_sleeps > 0, "it never slept");
    rank_check(watch.first_sleep_ns - start >= 28000, "it slept after %d ns",
               (int)(watch.first_sleep_ns - start));
    idist__gpu_task_set_waiting(&t, false);
    idist__gpu_of(w)->host_backend = watch.real;
    pthread_mutex_unlock(&w->lock);
}

//------------------------------------------------------------------------------
// memory allocated by idist
//------------------------------------------------------------------------------

static void *frees(void *arg) {
    idist__own_free(arg);
    return NULL;
}

extern int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active);

// Frees memory in a thread that has not chosen a device.
static int frees_as_stranger(int number, void *arg) {
    idist_group *world = NULL;
    idist_desc d = desc_with(NULL, NULL);
    pthread_t thread;
    unsigned flags;
    int active = -1;
    void *p = NULL;
    (void)arg;
    setenv("FAKE_CUDA_DEVICES", "2", 1);
    d.device = "cuda:1";
    d.world_size = 1;
    if (!rank_ok(number, idist_open(&d, &world))) return 0;
    CUDA(cudaMalloc(&p, 8));
    rank_check(pthread_create(&thread, NULL, frees, p) == 0, "no thread");
    pthread_join(thread, NULL);
    rank_check(cuDevicePrimaryCtxGetState(0, &flags, &active) == 0 && !active, "there is one");
    rank_ok(number, idist_close(&world));
    return 0;
}

static void strangers(void) {
    tap_running("memory that a thread without a device frees");
    ranks_reset();
    procs_run(1, 20000, frees_as_stranger, NULL);
    ranks_report("to free memory makes no context on device 0");
}

int main(void) {
    tap_deadline(140);
    // Tests that fork come first, because a process that has used CUDA must not fork.
    beside_dead_ranks();
    strangers();
    waits();
    troubles();
    failures();
    late_ranks();
    ends();
    leaves();
    paces();
    meets();
    setenv("IDIST_DEVICE_BACKEND", "ipc", 1);
    setenv("FAKE_CUDA_DELAY_US", "300", 1);
    ranks_case(1, NULL, looks_before_it_sleeps, NULL,
               "a thread that waits for the device polls for 30 us before it sleeps");
    for (int n = 2; n <= 8; n *= 2) {
        double factor = 0, bound = 5 - 2.0 / n;
        ranks_case(n, NULL, traffic, &factor, "a large all_reduce, %d ranks, is right", n);
        tap_diag("%d ranks: %.3f bytes move per byte", n, factor);
        tap_ok(factor <= bound * 1.001,
               "%d ranks: no more than %.2f bytes move per byte of the message", n, bound);
    }
    return tap_done();
}
