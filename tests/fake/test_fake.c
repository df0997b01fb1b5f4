// test_fake.c - tests the stand-ins for libcudart and libnccl themselves
//
//     cc -std=gnu11 -isystem $CUDA_HOME/include -Itests/lib tests/fake/*.c -o test_fake -pthread &&
//     ./test_fake
//
// Each scenario is a process, or several processes that are ranks, with an environment of its own,
// because the stand-ins read the environment once. Prints one line of TAP per scenario. A failed
// check prints a diagnostic with its line number.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "fake.h"
#include "tap.h"

#include <nccl.h>
#include <stdatomic.h>

#define MAX_RANKS 8
#define OK(call) CHECK_IS(call, 0)
#define CHECK(cond)                                                                    \
    do {                                                                               \
        if (!(cond)) tap_diag("rank %d, line %d: %s", rank, __LINE__, #cond), exit(1); \
    } while (0)
#define CHECK_IS(got, expected) check_is(__LINE__, #got, (long long)(got), (long long)(expected))
#define CHECK_LIKE(text, part)                                                              \
    do {                                                                                    \
        if (!strstr(text, part))                                                            \
            tap_diag("rank %d, line %d: \"%s\" has no \"%s\"", rank, __LINE__, text, part), \
                exit(1);                                                                    \
    } while (0)

// Memory that all processes of a scenario share.
static struct board {
    ncclUniqueId id;
    cudaIpcMemHandle_t memory;
    atomic_int steps[8];
} * board;
static int rank, n_ranks;

static void check_is(int line, const char *what, long long got, long long expected) {
    if (got == expected) return;
    tap_diag("rank %d, line %d: %s is %lld, expected %lld (last error: %s)", rank, line, what, got,
             expected, ncclGetLastError(NULL));
    exit(1);
}

static void reach(int step) { atomic_fetch_add(&board->steps[step], 1); }
static void await(int step, int count) {
    while (atomic_load(&board->steps[step]) < count) tap_sleep_ms(1);
}

typedef void scenario(void);

static pid_t start(scenario *run, int which) {
    pid_t pid = fork();
    TAP_REQUIRE(pid >= 0);
    if (pid == 0) {
        rank = which;
        run();
        exit(0);
    }
    tap_register_child(pid);
    return pid;
}

// Sets the variables of an environment such as "A=1 B=2". %r is replaced with the rank.
static void set_environment(const char *environment, int which) {
    char copy[256], *rest = copy, *word;
    snprintf(copy, sizeof copy, "%s", environment);
    while ((word = strsep(&rest, " "))) {
        char *value = strchr(word, '='), number[16];
        if (!value) continue;
        *value++ = 0;
        snprintf(number, sizeof number, "%d", which);
        setenv(word, strcmp(value, "%r") == 0 ? number : value, 1);
    }
}

static void clear_environment(void) {
    static const char *const names[] = {
        "FAKE_CUDA_DEVICES",     "FAKE_CUDA_DELAY_US",      "FAKE_CUDA_FAIL",
        "FAKE_NCCL_FAIL",        "FAKE_NCCL_VERSION",       "FAKE_NCCL_INIT_HANGS",
        "NCCL_HOSTID",           "NCCL_COMM_BLOCKING",      "NCCL_MULTI_RANK_GPU_ENABLE",
        "CUDA_VISIBLE_DEVICES",  "FAKE_CUDA_CAPABILITY",    "FAKE_NCCL_REMOTE",
        "FAKE_NCCL_TIMEOUT_MS",  "NCCL_RUNTIME_CONNECT",    "FAKE_CUDA_JIT",
        "FAKE_CUDA_ALLOC_WAITS", "FAKE_CUDA_CORRUPT_PEERS", "FAKE_CUDA_JIT_MS",
        "FAKE_CUDA_QUEUE",       "NCCL_P2P_DIRECT_DISABLE"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) unsetenv(names[i]);
}

static void run_ranks(const char *name, int n, const char *environment, scenario *run,
                      int signal_expected) {
    pid_t pids[MAX_RANKS];
    bool good = true;
    tap_running("%s", name);
    tap_deadline(60);
    memset(board, 0, sizeof *board);
    n_ranks = n;
    for (int r = 0; r < n; r++) {
        set_environment(environment, r);
        pids[r] = start(run, r);
    }
    for (int n_left = n; n_left > 0; n_left--) {
        int status = 0, r = 0;
        pid_t pid = waitpid(-1, &status, 0);
        TAP_REQUIRE(pid > 0);
        while (r < n && pids[r] != pid) r++;
        TAP_REQUIRE(r < n);
        tap_forget_child(pid);
        bool killed = signal_expected && r == n - 1; // the last rank is killed
        bool as_expected =
            killed ? WIFSIGNALED(status) && WTERMSIG(status) == signal_expected : status == 0;
        if (as_expected) continue;
        if (good) tap_diag("rank %d ended with status 0x%x", r, (unsigned)status);
        if (good) tap_kill_children(); // they would wait for the dead rank
        good = false;
    }
    clear_environment();
    tap_ok(good, "%s", name);
}

static void run_one(const char *name, const char *environment, scenario *run) {
    run_ranks(name, 1, environment, run, 0);
}

// These functions read and write with a deliberate race, which the thread sanitizer must not
// report.
__attribute__((noinline, no_sanitize("thread"))) static int peek(const void *at) {
    return *(const volatile unsigned char *)at;
}
__attribute__((noinline, no_sanitize("thread"))) static void poke(void *at, int value) {
    *(volatile unsigned char *)at = (unsigned char)value;
}

// Checks that an error is the last error, once.
static int last(cudaError_t error) {
    CHECK_IS(cudaGetLastError(), error);
    CHECK_IS(cudaGetLastError(), 0);
    return (int)error;
}

//------------------------------------------------------------------------------
// cuda
//------------------------------------------------------------------------------

static void missing_sync(void) {
    void *d, *pinned;
    cudaStream_t s;
    OK(cudaMalloc(&d, 64));
    OK(cudaMallocHost(&pinned, 64));
    OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    poke(pinned, 1);
    CHECK_IS(peek(fake_host_view(d)), 0xA5);
    OK(cudaMemsetAsync(d, 7, 64, s));
    OK(cudaMemcpyAsync(pinned, d, 64, cudaMemcpyDeviceToHost, s));
    CHECK_IS(last(cudaStreamQuery(s)), cudaErrorNotReady);
    CHECK_IS(peek(fake_host_view(d)), 0xA5);
    CHECK_IS(peek(pinned), 1);
    OK(cudaStreamSynchronize(s));
    OK(cudaStreamQuery(s));
    CHECK_IS(peek(fake_host_view(d)), 7);
    CHECK_IS(peek(pinned), 7);
    OK(cudaStreamDestroy(s));
    CHECK_IS(last(cudaStreamSynchronize(s)), cudaErrorInvalidResourceHandle);
    OK(cudaFree(d));
    OK(cudaFreeHost(pinned));
}

static void reused_source(void) {
    unsigned char pageable[8] = {1, 2, 3}, registered[8] = {1}, back[8] = {0};
    void *d, *pinned;
    cudaStream_t s;
    OK(cudaMalloc(&d, 8));
    OK(cudaMallocHost(&pinned, 8));
    OK(cudaStreamCreate(&s));
    OK(cudaMemcpyAsync(d, pageable, 8, cudaMemcpyHostToDevice, s));
    // too late, because the copy has already read the source
    pageable[0] = 99;
    // blocks, because the target is pageable
    OK(cudaMemcpyAsync(back, d, 8, cudaMemcpyDeviceToHost, s));
    CHECK_IS(back[0], 1);
    poke(pinned, 1);
    OK(cudaMemcpyAsync(d, pinned, 8, cudaMemcpyDefault, s));
    poke(pinned, 99);
    OK(cudaStreamSynchronize(s));
    CHECK_IS(peek(fake_host_view(d)), 99);
    OK(cudaHostRegister(registered, 8, 0));
    CHECK_IS(last(cudaHostRegister(registered + 1, 1, 0)), cudaErrorHostMemoryAlreadyRegistered);
    OK(cudaMemcpyAsync(d, registered, 8, cudaMemcpyHostToDevice, s));
    poke(registered, 98);
    OK(cudaDeviceSynchronize());
    CHECK_IS(peek(fake_host_view(d)), 98);
    OK(cudaHostUnregister(registered));
    CHECK_IS(last(cudaHostUnregister(registered)), cudaErrorHostMemoryNotRegistered);
    OK(cudaStreamDestroy(s));
    OK(cudaFreeHost(pinned));
    OK(cudaFree(d));
}

static void synchronous_copies(void) {
    unsigned char a[16] = {5}, b[16] = {0};
    void *d, *e;
    OK(cudaMalloc(&d, 16));
    OK(cudaMalloc(&e, 16));
    OK(cudaMemcpy(d, a, 16, cudaMemcpyHostToDevice));
    CHECK_IS(peek(fake_host_view(d)), 0xA5); // staged, but not yet on the device
    OK(cudaMemcpy(e, d, 16, cudaMemcpyDeviceToDevice));
    CHECK_IS(peek(fake_host_view(e)), 0xA5);
    OK(cudaMemcpy(b, e, 16, cudaMemcpyDefault));
    CHECK_IS(b[0], 5);
    OK(cudaMemset(d, 3, 4));
    OK(cudaMemcpy(b, d, 16, cudaMemcpyDeviceToHost));
    CHECK_IS(b[3], 3);
    CHECK_IS(b[4], 0);
    OK(cudaMemcpy(b, a, 16, cudaMemcpyHostToHost));
    CHECK_IS(b[0], 5);
    OK(cudaFree(d));
    OK(cudaFree(e));
}

static void touches_device(void) {
    int *d;
    signal(SIGSEGV, SIG_DFL);
    OK(cudaMalloc((void **)&d, 64));
    OK(cudaDeviceSynchronize());
    *(volatile int *)d = 1;
}

static void pointers(void) {
    struct cudaPointerAttributes a;
    char local[8], *d, *h, *huge;
    OK(cudaMalloc((void **)&d, 64));
    OK(cudaMallocHost((void **)&h, 64));
    OK(cudaPointerGetAttributes(&a, d + 63));
    CHECK(a.type == cudaMemoryTypeDevice && a.devicePointer == d + 63 && !a.hostPointer &&
          a.device == 0);
    OK(cudaPointerGetAttributes(&a, h + 5));
    CHECK(a.type == cudaMemoryTypeHost && a.hostPointer == h + 5);
    OK(cudaPointerGetAttributes(&a, local));
    CHECK(a.type == cudaMemoryTypeUnregistered);
    CHECK(!fake_host_view(h) && !fake_host_view(local) && fake_host_view(d + 1) != d + 1);
    OK(cudaFree(NULL));
    OK(cudaFreeHost(NULL));
    CHECK_IS(last(cudaFree(d + 1)), cudaErrorInvalidValue);
    CHECK_IS(last(cudaFree(h)), cudaErrorInvalidValue);
    CHECK_IS(last(cudaMalloc((void **)&huge, (size_t)1 << 50)), cudaErrorMemoryAllocation);
    CHECK_IS(last(cudaMemcpy(d + 60, local, 5, cudaMemcpyHostToDevice)), cudaErrorInvalidValue);
    CHECK_IS(last(cudaMemcpy(d, local, 5, cudaMemcpyDeviceToHost)), cudaErrorInvalidValue);
    CHECK_IS(last(cudaMemcpy(d, local, 5, (enum cudaMemcpyKind)9)),
             cudaErrorInvalidMemcpyDirection);
    CHECK_IS(last(cudaMemset(d, 0, 65)), cudaErrorInvalidValue);
    CHECK_IS(last(cudaSetDevice(1)), cudaErrorInvalidDevice);
    OK(cudaFree(d));
    OK(cudaFreeHost(h));
    OK(cudaPointerGetAttributes(&a, d));
    CHECK(a.type == cudaMemoryTypeUnregistered);
    CHECK(msync(d, 1, MS_ASYNC) != 0); // no longer mapped
}

static void events(void) {
    void *d, *e, *f;
    cudaStream_t a, b;
    cudaEvent_t end;
    OK(cudaMalloc(&d, 8));
    OK(cudaMalloc(&f, 8));
    OK(cudaMalloc(&e, 8));
    OK(cudaStreamCreateWithPriority(&a, cudaStreamNonBlocking, -1));
    OK(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
    OK(cudaEventCreateWithFlags(&end, cudaEventDefault));
    OK(cudaEventQuery(end)); // an event that was never recorded
    for (int i = 0; i < 4; i++) OK(cudaMemsetAsync(i < 3 ? f : d, i, 8, a));
    OK(cudaEventRecord(end, a));
    CHECK_IS(last(cudaEventQuery(end)), cudaErrorNotReady);
    OK(cudaMemcpyAsync(e, d, 8, cudaMemcpyDeviceToDevice, b)); // too early: does not wait for `a`
    OK(cudaStreamSynchronize(b));
    CHECK_IS(peek(fake_host_view(e)), 0xA5);
    OK(cudaStreamWaitEvent(b, end, 0));
    OK(cudaMemcpyAsync(e, d, 8, cudaMemcpyDeviceToDevice, b));
    OK(cudaStreamSynchronize(b));
    CHECK_IS(peek(fake_host_view(e)), 3);
    OK(cudaEventQuery(end));
    OK(cudaMemsetAsync(d, 9, 8, a));
    OK(cudaEventRecord(end, a));
    OK(cudaStreamWaitEvent(b, end, 0));
    OK(cudaEventDestroy(end)); // while the event is needed
    OK(cudaStreamDestroy(a));
    OK(cudaStreamSynchronize(b));
    CHECK_IS(peek(fake_host_view(d)), 9);
    OK(cudaStreamDestroy(b));
    OK(cudaFree(d));
    OK(cudaFree(e));
}

static void legacy_stream(void) {
    void *d, *e, *f;
    cudaStream_t blocking, other;
    OK(cudaMalloc(&d, 8));
    OK(cudaMalloc(&f, 8));
    OK(cudaMalloc(&e, 8));
    OK(cudaStreamCreate(&blocking));
    OK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    for (int i = 0; i < 4; i++) OK(cudaMemsetAsync(i < 3 ? f : d, 1, 8, NULL));
    OK(cudaMemcpyAsync(e, d, 8, cudaMemcpyDefault, other)); // does not wait
    OK(cudaStreamSynchronize(other));
    CHECK_IS(peek(fake_host_view(e)), 0xA5);
    OK(cudaMemsetAsync(d, 2, 8, NULL));
    OK(cudaMemcpyAsync(e, d, 8, cudaMemcpyDefault, blocking)); // waits for the NULL stream
    OK(cudaStreamSynchronize(blocking));
    CHECK_IS(peek(fake_host_view(e)), 2);
    OK(cudaMemsetAsync(d, 3, 8, blocking));
    OK(cudaMemcpyAsync(e, d, 8, cudaMemcpyDefault, NULL)); // waits for the blocking stream
    OK(cudaStreamSynchronize(NULL));
    CHECK_IS(peek(fake_host_view(e)), 3);
}

static void no_cuda(cudaError_t code) {
    int n = 77, v = 77;
    void *p;
    cudaStream_t s;
    cudaEvent_t e;
    struct cudaPointerAttributes a;
    enum cudaStreamCaptureStatus status;
    ncclUniqueId id;
    ncclComm_t comm = NULL;
    CHECK_IS(cudaGetDeviceCount(&n), code);
    CHECK_IS(n, 77);
    CHECK_IS(cudaSetDevice(0), code);
    CHECK_IS(cudaGetDevice(&n), code);
    CHECK_IS(cudaMalloc(&p, 8), code);
    CHECK_IS(cudaFree(NULL), code);
    CHECK_IS(cudaMallocHost(&p, 8), code);
    CHECK_IS(cudaHostRegister(&n, 4, 0), code);
    CHECK_IS(cudaMemcpy(&n, &v, 0, cudaMemcpyDefault), code);
    CHECK_IS(cudaStreamCreate(&s), code);
    CHECK_IS(cudaStreamQuery(NULL), code);
    CHECK_IS(cudaStreamIsCapturing(NULL, &status), code);
    CHECK_IS(cudaEventCreateWithFlags(&e, cudaEventDisableTiming), code);
    CHECK_IS(cudaPointerGetAttributes(&a, &n), code);
    CHECK_IS(cudaDeviceSynchronize(), code);
    CHECK_IS(cudaDeviceGetStreamPriorityRange(&n, &v), code);
    CHECK_IS(cudaGetLastError(), code);
    OK(cudaRuntimeGetVersion(&v));
    CHECK_IS(v, CUDART_VERSION);
    OK(cudaDriverGetVersion(&v));
    CHECK_IS(v, code == cudaErrorInsufficientDriver ? 0 : CUDART_VERSION);
    OK(ncclGetVersion(&v));
    CHECK_IS(v, NCCL_VERSION_CODE);
    OK(ncclGetUniqueId(&id));
    CHECK_IS(ncclCommInitRank(&comm, 2, id, 0), ncclUnhandledCudaError);
    CHECK(comm == NULL);
    CHECK_LIKE(ncclGetLastError(NULL), "Cuda failure '");
    CHECK_LIKE(ncclGetLastError(NULL), cudaGetErrorString(code));
    OK(ncclCommAbort(NULL));
    OK(ncclCommDestroy(NULL));
    CHECK_IS(ncclAllReduce(NULL, NULL, 1, ncclFloat, ncclSum, NULL, NULL), ncclInvalidArgument);
    CHECK_LIKE(ncclGetLastError(NULL), "AllReduce : comm argument is NULL");
    OK(ncclGroupStart());
    OK(ncclGroupEnd());
    CHECK_IS(ncclGroupEnd(), ncclInvalidUsage);
}
static void no_driver(void) { no_cuda(cudaErrorInsufficientDriver); }
static void outdated_driver(void) {
    int version = 0, n = 7;
    OK(cudaDriverGetVersion(&version));
    CHECK_IS(version, 11040);
    CHECK_IS(cudaGetDeviceCount(&n), cudaErrorInsufficientDriver);
}
static void no_device(void) { no_cuda(cudaErrorNoDevice); }

// Checks that a copy from pageable memory returns at once if it is small, and waits for its turn in
// the stream if it is large. Also checks that a call waits if it enqueues on a full stream.
static void waits_for_its_turn(void) {
    enum { LARGE = 100000 };
    char *pageable = calloc(1, LARGE), *d;
    cudaError_t before;
    cudaEvent_t e;
    cudaStream_t s;
    int64_t start;
    OK(cudaMalloc((void **)&d, LARGE));
    OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    OK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    start = tap_now_ms();
    OK(cudaMemsetAsync(d, 1, 8, s));
    OK(cudaEventRecord(e, s));
    OK(cudaMemcpyAsync(d, pageable, 8, cudaMemcpyHostToDevice, s));
    before = cudaEventQuery(e);
    if (tap_now_ms() - start < 50) CHECK_IS(last(before), cudaErrorNotReady);
    else cudaGetLastError(); // the machine was slower than the device
    OK(cudaMemcpyAsync(d, pageable, LARGE, cudaMemcpyHostToDevice, s));
    OK(cudaEventQuery(e));
    for (int i = 0; i < 6; i++) {
        OK(cudaMemsetAsync(d, 1, 8, s));
        CHECK_IS(fake_count_queued(s) <= 4, true);
    }
    OK(cudaStreamSynchronize(s));
    CHECK_IS(fake_count_queued(s), 0);
    OK(cudaEventDestroy(e));
    OK(cudaStreamDestroy(s));
    OK(cudaFree(d));
    free(pageable);
}

static void injected_from_then_on(void) {
    void *d;
    OK(cudaMalloc(&d, 8));
    for (int i = 0; i < 3; i++) CHECK_IS(last(cudaMalloc(&d, 8)), cudaErrorMemoryAllocation);
}

static void injected(void) {
    void *p;
    OK(cudaMalloc(&p, 8));
    OK(cudaFree(p));
    CHECK_IS(last(cudaMalloc(&p, 8)), cudaErrorMemoryAllocation);
    OK(cudaMalloc(&p, 8));
}

static void visible(void) {
    int n;
    char bus[16];
    OK(cudaGetDeviceCount(&n));
    CHECK_IS(n, 2);
    OK(cudaDeviceGetPCIBusId(bus, sizeof bus, 0));
    CHECK(strcmp(bus, "0000:13:00.0") == 0);
    OK(cudaDeviceGetPCIBusId(bus, sizeof bus, 1));
    CHECK(strcmp(bus, "0000:11:00.0") == 0);
}

extern int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active);
static bool has_context(int device) {
    unsigned flags;
    int active = -1;
    CHECK_IS(cuDevicePrimaryCtxGetState(device, &flags, &active), 0);
    return active;
}

static void *asks_for_an_attribute(void *pointer) {
    struct cudaPointerAttributes attributes;
    OK(cudaPointerGetAttributes(&attributes, pointer));
    return NULL;
}

// Checks that a thread that has chosen no device uses device 0, and creates a context there.
static void contexts(void) {
    pthread_t thread;
    int n = 0;
    OK(cudaGetDeviceCount(&n));
    OK(cudaGetDevice(&n));
    CHECK_IS(n, 0);
    CHECK(!has_context(0));
    OK(cudaSetDevice(1));
    CHECK(!has_context(0) && has_context(1) && !has_context(2));
    CHECK(pthread_create(&thread, NULL, asks_for_an_attribute, &n) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(has_context(0) && !has_context(2));
}

static void child_of_cuda(void) { CHECK_IS(cudaFree(NULL), cudaErrorInitializationError); }
static void forked(void) {
    int status = 1;
    OK(cudaFree(NULL));
    pid_t pid = start(child_of_cuda, 1);
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

static void captures(void) {
    char *d, *e;
    cudaStream_t s, t;
    cudaEvent_t forks, joins;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    enum cudaStreamCaptureStatus status;
    OK(cudaMalloc((void **)&d, 8));
    OK(cudaMalloc((void **)&e, 8));
    OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&t, cudaStreamNonBlocking));
    OK(cudaEventCreateWithFlags(&forks, cudaEventDisableTiming));
    OK(cudaEventCreateWithFlags(&joins, cudaEventDisableTiming));
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    OK(cudaMemsetAsync(d, 1, 8, s));
    OK(cudaEventRecord(forks, s));
    OK(cudaStreamWaitEvent(t, forks, 0));
    OK(cudaStreamIsCapturing(t, &status));
    CHECK_IS(status, cudaStreamCaptureStatusActive);
    OK(cudaMemcpyAsync(e, d, 8, cudaMemcpyDeviceToDevice, t));
    OK(cudaEventRecord(joins, t));
    OK(cudaStreamWaitEvent(s, joins, 0));
    OK(cudaMemsetAsync(d, 2, 8, s));
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaStreamIsCapturing(t, &status));
    CHECK_IS(status, cudaStreamCaptureStatusNone);
    OK(cudaDeviceSynchronize());
    CHECK_IS(peek(fake_host_view(d)), 0xA5); // recorded, but not run
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphDestroy(graph));
    for (int i = 0; i < 3; i++) {
        OK(cudaMemsetAsync(e, 9, 8, s));
        OK(cudaGraphLaunch(exec, s));
        OK(cudaStreamSynchronize(s));
        CHECK_IS(peek(fake_host_view(d)), 2);
        CHECK_IS(peek(fake_host_view(e)), 1);
    }
    OK(cudaGraphExecDestroy(exec));
    CHECK_IS(last(cudaEventQuery(joins)), cudaErrorCapturedEvent);
    OK(cudaEventDestroy(forks));
    OK(cudaEventDestroy(joins));
}

static void captures_that_fail(void) {
    char *d, local[4];
    cudaStream_t s, t;
    cudaEvent_t forks;
    cudaGraph_t graph;
    enum cudaStreamCaptureStatus status;
    OK(cudaMalloc((void **)&d, 8));
    OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&t, cudaStreamNonBlocking));
    OK(cudaEventCreateWithFlags(&forks, cudaEventDisableTiming));
    CHECK_IS(last(cudaStreamBeginCapture(NULL, cudaStreamCaptureModeGlobal)),
             cudaErrorStreamCaptureUnsupported);
    // A stream forks, and its work is not joined again.
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    OK(cudaEventRecord(forks, s));
    OK(cudaStreamWaitEvent(t, forks, 0));
    CHECK_IS(last(cudaStreamEndCapture(t, &graph)), cudaErrorStreamCaptureUnmatched);
    CHECK_IS(last(cudaStreamEndCapture(s, &graph)), cudaErrorStreamCaptureInvalidated);
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    OK(cudaEventRecord(forks, s));
    OK(cudaStreamWaitEvent(t, forks, 0));
    CHECK_IS(last(cudaStreamEndCapture(s, &graph)), cudaErrorStreamCaptureUnjoined);
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal)); // pageable memory
    CHECK_IS(last(cudaMemcpyAsync(d, local, 4, cudaMemcpyDefault, s)),
             cudaErrorStreamCaptureUnsupported);
    CHECK_IS(last(cudaStreamEndCapture(s, &graph)), cudaErrorStreamCaptureInvalidated);
    OK(cudaStreamDestroy(s));
    OK(cudaStreamCreate(&s)); // the NULL stream must not wait for a capturing stream
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    CHECK_IS(last(cudaStreamIsCapturing(cudaStreamLegacy, &status)),
             cudaErrorStreamCaptureImplicit);
    // Queries and allocations in stream order do not invalidate the capture.
    OK(cudaStreamIsCapturing(s, &status));
    CHECK_IS(status, cudaStreamCaptureStatusActive);
    OK(cudaMallocAsync((void **)&d, 8, s));
    OK(cudaFreeAsync(d, s));
    OK(cudaStreamIsCapturing(s, &status));
    CHECK_IS(status, cudaStreamCaptureStatusActive);
    CHECK_IS(last(cudaMemsetAsync(d, 1, 8, NULL)), cudaErrorStreamCaptureImplicit);
    CHECK_IS(last(cudaStreamEndCapture(s, &graph)), cudaErrorStreamCaptureInvalidated);
    OK(cudaEventDestroy(forks));
}

static void *another_thread(void *arg) {
    void *p;
    *(cudaError_t *)arg = cudaMalloc(&p, 8);
    return NULL;
}

static void captures_forbid(void) {
    void *p;
    cudaStream_t s;
    cudaGraph_t graph;
    cudaEvent_t outside;
    pthread_t thread;
    cudaError_t code;
    enum cudaStreamCaptureStatus status;
    OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    OK(cudaEventCreateWithFlags(&outside, cudaEventDisableTiming));
    OK(cudaEventRecord(outside, NULL));
    for (int i = 0; i < 5; i++) {
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
        cudaError_t got = i == 0   ? cudaMalloc(&p, 8)
                          : i == 1 ? cudaStreamSynchronize(s)
                          : i == 2 ? cudaDeviceSynchronize()
                          : i == 3 ? cudaEventQuery(outside)
                                   : cudaStreamWaitEvent(s, outside, 0);
        CHECK_IS(last(got),
                 i == 4 ? cudaErrorStreamCaptureIsolation : cudaErrorStreamCaptureUnsupported);
        OK(cudaStreamIsCapturing(s, &status));
        CHECK_IS(status, cudaStreamCaptureStatusInvalidated);
        CHECK_IS(last(cudaStreamEndCapture(s, &graph)), cudaErrorStreamCaptureInvalidated);
        CHECK(graph == NULL);
    }
    for (int mode = cudaStreamCaptureModeGlobal; mode <= cudaStreamCaptureModeRelaxed; mode++) {
        bool global = mode == cudaStreamCaptureModeGlobal,
             relaxed = mode == cudaStreamCaptureModeRelaxed;
        OK(cudaStreamBeginCapture(s, (enum cudaStreamCaptureMode)mode));
        CHECK(pthread_create(&thread, NULL, another_thread, &code) == 0 &&
              pthread_join(thread, NULL) == 0);
        CHECK_IS(code, global ? cudaErrorStreamCaptureUnsupported : cudaSuccess);
        CHECK_IS(cudaMalloc(&p, 8), relaxed ? cudaSuccess : cudaErrorStreamCaptureUnsupported);
        CHECK_IS(cudaStreamEndCapture(s, &graph),
                 relaxed ? cudaSuccess : cudaErrorStreamCaptureInvalidated);
        if (relaxed) OK(cudaGraphDestroy(graph));
    }
    OK(cudaEventDestroy(outside));
}

// Arguments as in tests/gpu/reduce.cu.
typedef struct reduce_args {
    const void *in[16];
    void *out, *also;
    unsigned long long count;
    double factor;
    int n, op;
} reduce_args;

static const char ptx[] =
    ".version 6.4 .target sm_60 .visible .entry idist_reduce_f32(.param .b8 a[160]) {} "
    ".visible .entry idist_reduce_bf16(.param .b8 a[160]) {}";

static cudaError_t load(cudaLibrary_t *library, const char *code) {
    return cudaLibraryLoadData(library, code, NULL, NULL, 0, NULL, NULL, 0);
}

static cudaKernel_t get_kernel(const char *name) {
    cudaLibrary_t library;
    cudaKernel_t kernel;
    OK(load(&library, ptx));
    OK(cudaLibraryGetKernel(&kernel, library, name));
    return kernel;
}

static cudaError_t launch_on(cudaKernel_t kernel, unsigned grid, unsigned threads,
                             reduce_args *args, cudaStream_t stream) {
    return cudaLaunchKernel((const void *)kernel, (dim3){grid, 1, 1}, (dim3){threads, 1, 1},
                            (void *[]){args}, 0, stream);
}

static reduce_args sum_of(const void *x, const void *y, void *out, unsigned long long count) {
    return (reduce_args){.in = {x, y}, .out = out, .count = count, .n = 2};
}

static void libraries(void) {
    cudaLibrary_t l, m;
    cudaKernel_t k, same;
    reduce_args args = {.n = 1};
    CHECK_IS(last(load(&l, NULL)), cudaErrorInvalidValue);
    CHECK_IS(last(load(NULL, ptx)), cudaErrorInvalidValue);
    CHECK_IS(last(load(&l, "what is this?")), cudaErrorInvalidKernelImage);
    CHECK_IS(last(cudaLibraryLoadData(&l, ptx, NULL, NULL, 1, NULL, NULL, 0)),
             cudaErrorInvalidValue);
    OK(load(&l, ptx));
    OK(load(&m, ptx));
    CHECK(l != m);
    OK(cudaLibraryGetKernel(&k, l, "idist_reduce_bf16"));
    OK(cudaLibraryGetKernel(&k, l, "idist_reduce_f32"));
    OK(cudaLibraryGetKernel(&same, l, "idist_reduce_f32"));
    CHECK(k == same);
    // The library's text does not contain this name.
    CHECK_IS(last(cudaLibraryGetKernel(&same, l, "idist_reduce_f64")), cudaErrorSymbolNotFound);
    CHECK_IS(last(cudaLibraryGetKernel(&same, l, "idist_reduce_f3")), cudaErrorSymbolNotFound);
    CHECK_IS(last(cudaLibraryGetKernel(&same, l, NULL)), cudaErrorInvalidValue);
    OK(launch_on(k, 1, 512, &args, NULL));
    CHECK_IS(last(launch_on(k, 0, 32, &args, NULL)), cudaErrorInvalidConfiguration);
    CHECK_IS(last(launch_on(k, 1, 0, &args, NULL)), cudaErrorInvalidConfiguration);
    CHECK_IS(last(launch_on(k, 1, 1025, &args, NULL)), cudaErrorInvalidConfiguration);
    CHECK_IS(last(launch_on(k, 1, 513, &args, NULL)), cudaErrorLaunchOutOfResources);
    CHECK_IS(last(launch_on(k, 1, 32, NULL, NULL)), cudaErrorInvalidValue);
    CHECK_IS(last(launch_on(k, 1, 32, &args, (cudaStream_t)(void *)&l)),
             cudaErrorInvalidResourceHandle);
    CHECK_IS(last(launch_on((cudaKernel_t)(void *)&l, 1, 32, &args, NULL)),
             cudaErrorInvalidDeviceFunction);
    OK(cudaDeviceSynchronize());
    OK(cudaLibraryUnload(l));
    CHECK_IS(last(cudaLibraryUnload(l)), cudaErrorInvalidResourceHandle);
    CHECK_IS(last(cudaLibraryGetKernel(&k, l, "idist_reduce_f32")), cudaErrorInvalidResourceHandle);
    CHECK_IS(last(launch_on(same, 1, 32, &args, NULL)), cudaErrorInvalidDeviceFunction);
    OK(cudaLibraryUnload(m));
}

static void floats(float *device, float x, float y, float z) {
    float v[3] = {x, y, z};
    OK(cudaMemcpy(device, v, sizeof v, cudaMemcpyHostToDevice));
    OK(cudaDeviceSynchronize());
}

static void check_floats(const float *device, float x, float y, float z) {
    float v[3];
    OK(cudaMemcpy(v, device, sizeof v, cudaMemcpyDeviceToHost));
    CHECK(v[0] == x && v[1] == y && v[2] == z);
}

static void launches(void) {
    cudaKernel_t k = get_kernel("idist_reduce_f32");
    cudaStream_t s;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    float *d, *pinned;
    OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    OK(cudaMalloc((void **)&d, 36));
    OK(cudaMallocHost((void **)&pinned, 12));
    floats(d, 1, 2, 3);
    floats(d + 3, 10, 20, 30);
    floats(d + 6, 5, 5, 5);
    reduce_args args = sum_of(d, d + 3, d + 6, 2);
    int64_t started = tap_now_ms();
    OK(launch_on(k, 2, 32, &args, s));
    args.op = 1; // arguments are read during the call
    CHECK_IS(cudaStreamQuery(s), cudaErrorNotReady);
    CHECK(((float *)fake_host_view(d + 6))[0] == 5);
    OK(cudaStreamSynchronize(s));
    CHECK(tap_now_ms() - started >= 50);
    check_floats(d + 6, 11, 22, 5);
    OK(launch_on(k, 1, 1, &args, NULL)); // one thread does all the work
    check_floats(d + 6, 10, 40, 5);
    args = sum_of(d, pinned, d, 3); // in place; the device can access pinned memory, too
    pinned[0] = pinned[1] = pinned[2] = 0.5f;
    OK(launch_on(k, 1, 32, &args, NULL));
    check_floats(d, 1.5f, 2.5f, 3.5f);
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    OK(launch_on(k, 1, 32, &args, s));
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    check_floats(d, 1.5f, 2.5f, 3.5f);
    for (int i = 0; i < 3; i++) OK(cudaGraphLaunch(exec, s));
    OK(cudaStreamSynchronize(s));
    check_floats(d, 3, 4, 5);
    OK(cudaGraphExecDestroy(exec));
    OK(cudaGraphDestroy(graph));
    OK(cudaFree(d));
    OK(cudaFreeHost(pinned));
}

// Checks that a kernel with wrong arguments reports its error later, and that the error stays.
static void fails_later(reduce_args args, cudaError_t error) {
    cudaKernel_t k = get_kernel("idist_reduce_f32");
    cudaStream_t s;
    void *p;
    OK(cudaStreamCreate(&s));
    OK(launch_on(k, 1, 32, &args, s));
    CHECK_IS(cudaStreamSynchronize(s), error);
    CHECK_IS(cudaGetLastError(), error);
    CHECK_IS(cudaGetLastError(), error);
    CHECK_IS(cudaMalloc(&p, 8), error);
}
static float *three_floats(void) {
    float *d;
    OK(cudaMalloc((void **)&d, 12));
    return d;
}
static void reads_too_far(void) {
    float *d = three_floats();
    fails_later(sum_of(d + 1, d, d, 3), cudaErrorIllegalAddress);
}
static void writes_too_far(void) {
    float *d = three_floats();
    fails_later(sum_of(d, d, d + 1, 3), cudaErrorIllegalAddress);
}
static void reads_the_host(void) {
    float *d = three_floats(), local[3] = {0};
    fails_later(sum_of(d, local, d, 3), cudaErrorIllegalAddress);
}
static void reads_freed_memory(void) {
    float *d = three_floats(), *gone = three_floats();
    OK(cudaFree(gone));
    fails_later(sum_of(d, gone, d, 3), cudaErrorIllegalAddress);
}
static void is_not_aligned(void) {
    float *d = three_floats();
    fails_later(sum_of(d, (char *)d + 2, d, 1), cudaErrorMisalignedAddress);
}
static void has_too_many(void) {
    float *d = three_floats();
    reduce_args args = sum_of(d, d, d, 1);
    args.n = 17;
    fails_later(args, cudaErrorIllegalAddress);
}

// Checks that a kernel is loaded at its first use, which waits for the device.
static void lazy_loading(void) {
    cudaKernel_t k = get_kernel("idist_reduce_f32"), other = get_kernel("idist_reduce_bf16");
    struct cudaFuncAttributes attributes;
    reduce_args args = {.n = 1};
    cudaStream_t busy, s;
    void *d;
    OK(cudaMalloc(&d, 8));
    OK(cudaStreamCreateWithFlags(&busy, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    OK(cudaMemsetAsync(d, 1, 8, busy));
    OK(launch_on(k, 1, 32, &args, s));
    OK(cudaStreamQuery(busy));
    OK(cudaMemsetAsync(d, 1, 8, busy));
    OK(launch_on(k, 1, 32, &args, s));
    CHECK_IS(last(cudaStreamQuery(busy)), cudaErrorNotReady);
    OK(cudaFuncGetAttributes(&attributes, (const void *)other));
    CHECK_IS(attributes.maxThreadsPerBlock, 512);
    OK(cudaStreamQuery(busy));
    CHECK_IS(last(cudaFuncGetAttributes(&attributes, &k)), cudaErrorInvalidDeviceFunction);
    CHECK_IS(last(cudaFuncGetAttributes(NULL, (const void *)k)), cudaErrorInvalidValue);
    OK(cudaMemsetAsync(d, 1, 8, busy));
    OK(cudaMalloc(&d, 8)); // waits, because of FAKE_CUDA_ALLOC_WAITS
    OK(cudaStreamQuery(busy));
}

static void old_driver(void) {
    cudaKernel_t k = get_kernel("idist_reduce_f32");
    struct cudaFuncAttributes attributes;
    reduce_args args = {.n = 1};
    CHECK_IS(last(cudaFuncGetAttributes(&attributes, (const void *)k)),
             cudaErrorUnsupportedPtxVersion);
    CHECK_IS(last(launch_on(k, 1, 32, &args, NULL)), cudaErrorUnsupportedPtxVersion);
    OK(cudaDeviceSynchronize());
}

static void traffic(void) {
    cudaKernel_t k = get_kernel("idist_reduce_f32");
    float host[3] = {1, 2, 3}, *d;
    fake_traffic before = fake_traffic_now(), after;
    OK(cudaMalloc((void **)&d, 100));
    OK(cudaMemcpy(d, host, sizeof host, cudaMemcpyHostToDevice));
    OK(cudaMemcpy(d + 3, d, sizeof host, cudaMemcpyDeviceToDevice));
    OK(cudaMemset(d + 6, 0, 4));
    reduce_args args = sum_of(d, d + 3, d + 6, 3);
    OK(launch_on(k, 1, 32, &args, NULL));
    OK(cudaMemcpy(host, d + 6, 8, cudaMemcpyDeviceToHost));
    after = fake_traffic_now();
    CHECK_IS(after.read - before.read, 12 + 24 + 8);
    CHECK_IS(after.written - before.written, 12 + 12 + 4 + 12);
}

// Reads from another device, which yields bytes of 0xFF, so that every float is a NaN. The host
// reads the right data, because it copies from the device that owns the memory.
static void corrupt_peers(void) {
    cudaKernel_t k = get_kernel("idist_reduce_f32");
    float *here, *there, host[3] = {0, 0, 0};
    OK(cudaSetDevice(1));
    OK(cudaMalloc((void **)&there, 64));
    floats(there, 1, 2, 3);
    OK(cudaSetDevice(0));
    OK(cudaMalloc((void **)&here, 64));
    floats(here, 4, 5, 6);
    check_floats(there, 1, 2, 3);
    reduce_args args = sum_of(here, there, here + 3, 3);
    OK(launch_on(k, 1, 32, &args, NULL));
    OK(cudaMemcpy(host, here + 3, sizeof host, cudaMemcpyDeviceToHost));
    CHECK(host[0] != host[0] && host[2] != host[2]);
    OK(cudaMemcpy(here, there, sizeof host, cudaMemcpyDeviceToDevice));
    OK(cudaMemcpy(host, here, sizeof host, cudaMemcpyDeviceToHost));
    CHECK(host[0] != host[0] && host[2] != host[2]);
}

static void injected_launch(void) {
    cudaKernel_t k = get_kernel("idist_reduce_f32");
    reduce_args args = {.n = 1};
    OK(launch_on(k, 1, 32, &args, NULL));
    CHECK_IS(last(launch_on(k, 1, 32, &args, NULL)), cudaErrorLaunchFailure);
    OK(launch_on(k, 1, 32, &args, NULL));
    OK(cudaDeviceSynchronize());
}
static void injected_load(void) {
    cudaLibrary_t l;
    CHECK_IS(last(load(&l, ptx)), cudaErrorInvalidKernelImage);
}

static void export_memory(void) {
    void *d, *pinned, *opened;
    cudaStream_t s;
    cudaIpcMemHandle_t inside;
    OK(cudaMalloc(&d, 4096 + 7));
    OK(cudaMallocHost(&pinned, 64));
    OK(cudaStreamCreate(&s));
    OK(cudaIpcGetMemHandle(&board->memory, d));
    OK(cudaIpcGetMemHandle(&inside, (char *)d + 100)); // a handle stands for the whole allocation
    CHECK(memcmp(&inside, &board->memory, sizeof inside) == 0);
    CHECK_IS(last(cudaIpcGetMemHandle(&inside, pinned)), cudaErrorInvalidValue);
    CHECK_IS(last(cudaIpcGetMemHandle(&inside, &inside)), cudaErrorInvalidValue);
    CHECK_IS(last(cudaIpcOpenMemHandle(&opened, board->memory, cudaIpcMemLazyEnablePeerAccess)),
             cudaErrorDeviceUninitialized);
    // this process's own memory
    CHECK_IS(last(cudaIpcCloseMemHandle(d)), cudaErrorInvalidValue);
    OK(cudaMemsetAsync(d, 5, 100, s));
    OK(cudaStreamSynchronize(s));
    reach(0);
    await(1, 1);
    CHECK_IS(peek((char *)fake_host_view(d) + 4102), 6);
    check_floats((float *)d + 100, 3, 6, 9);
    OK(cudaFreeHost(pinned));
    OK(cudaFree(d)); // while the importer has it open
    reach(2);
    await(3, 1);
}

static void ipc(void) {
    void *d, *again, *own;
    cudaIpcMemHandle_t handle;
    if (rank == 0) {
        export_memory();
        return;
    }
    cudaKernel_t k = get_kernel("idist_reduce_f32");
    await(0, 1);
    OK(cudaIpcOpenMemHandle(&d, board->memory, cudaIpcMemLazyEnablePeerAccess));
    OK(cudaIpcOpenMemHandle(&again, board->memory, cudaIpcMemLazyEnablePeerAccess));
    CHECK(again == d);
    OK(cudaIpcCloseMemHandle(again));
    CHECK_IS(last(cudaIpcOpenMemHandle(&again, board->memory, 0)), cudaErrorInvalidValue);
    // Imported memory cannot be exported again.
    CHECK_IS(last(cudaIpcGetMemHandle(&handle, d)), cudaErrorInvalidValue);
    CHECK_IS(last(cudaFree(d)), cudaErrorInvalidValue);
    CHECK_IS(last(cudaIpcCloseMemHandle((char *)d + 1)), cudaErrorInvalidValue);
    CHECK_IS(peek(fake_host_view(d)), 5);
    OK(cudaMemset((char *)d + 4102, 6, 1));
    // Copies to imported memory and back, and a kernel that reads and writes imported memory.
    OK(cudaMalloc(&own, 64));
    floats(own, 1, 2, 3);
    OK(cudaMemcpyAsync((float *)d + 100, own, 12, cudaMemcpyDeviceToDevice, NULL));
    OK(cudaMemcpyAsync((float *)own + 3, (float *)d + 100, 12, cudaMemcpyDeviceToDevice, NULL));
    CHECK_IS(last(cudaMemcpyAsync((char *)d + 4100, own, 12, cudaMemcpyDeviceToDevice, NULL)),
             cudaErrorInvalidValue);
    reduce_args args = {.in = {(float *)d + 100, own, (float *)own + 3},
                        .out = (float *)d + 100,
                        .count = 3,
                        .n = 3};
    OK(launch_on(k, 1, 32, &args, NULL));
    OK(cudaDeviceSynchronize());
    reach(1);
    await(2, 1);
    check_floats((float *)d + 100, 3, 6, 9);
    OK(cudaIpcCloseMemHandle(d));
    CHECK_IS(last(cudaIpcCloseMemHandle(d)), cudaErrorInvalidValue);
    CHECK_IS(last(cudaIpcOpenMemHandle(&d, board->memory, cudaIpcMemLazyEnablePeerAccess)),
             cudaErrorInvalidResourceHandle);
    reach(3);
}

//------------------------------------------------------------------------------
// nccl
//------------------------------------------------------------------------------

static void share_id(void) {
    if (rank == 0) {
        OK(ncclGetUniqueId(&board->id));
        reach(7);
    } else await(7, 1);
}

static ncclComm_t join(void) {
    ncclComm_t comm = NULL;
    int device = 0, v = -1;
    share_id();
    OK(cudaGetDeviceCount(&device));
    OK(cudaSetDevice(rank % device));
    OK(ncclCommInitRank(&comm, n_ranks, board->id, rank));
    OK(ncclCommCount(comm, &v));
    CHECK_IS(v, n_ranks);
    OK(ncclCommUserRank(comm, &v));
    CHECK_IS(v, rank);
    OK(ncclCommCuDevice(comm, &v));
    CHECK_IS(v, rank % device);
    return comm;
}

static void *device_memory(size_t nbytes) {
    void *p;
    OK(cudaMalloc(&p, nbytes));
    OK(cudaMemset(p, 0xEE, nbytes));
    OK(cudaDeviceSynchronize());
    return p;
}

static cudaStream_t new_stream(void) {
    cudaStream_t s;
    OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    return s;
}

static uint32_t value(int from, size_t i) { return (uint32_t)tap_mix((uint64_t)from << 40 | i); }

// Stores a small integer. Every type represents such integers exactly, and also their sums and
// products over 4 ranks.
static void set_number(ncclDataType_t type, void *at, size_t i, double v) {
    float f = (float)v;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    switch ((int)type) {
    case ncclInt8: ((int8_t *)at)[i] = (int8_t)v; break;
    case ncclUint8: ((uint8_t *)at)[i] = (uint8_t)v; break;
    case ncclInt32: ((int32_t *)at)[i] = (int32_t)v; break;
    case ncclUint32: ((uint32_t *)at)[i] = (uint32_t)v; break;
    case ncclInt64: ((int64_t *)at)[i] = (int64_t)v; break;
    case ncclUint64: ((uint64_t *)at)[i] = (uint64_t)v; break;
    case ncclFloat32: ((float *)at)[i] = f; break;
    case ncclFloat64: ((double *)at)[i] = v; break;
    case ncclBfloat16: ((uint16_t *)at)[i] = (uint16_t)(bits >> 16); break;
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
        bits = type == ncclFloat8e4m3 ? (bits >> 20) - (120u << 3) : (bits >> 21) - (112u << 2);
        ((uint8_t *)at)[i] = v == 0 ? 0 : (uint8_t)((v < 0 ? 0x80u : 0) | (bits & 0x7f));
        break;
    default: // f16, normal numbers only
        ((uint16_t *)at)[i] =
            v == 0 ? 0
                   : (uint16_t)((bits >> 16 & 0x8000) | (((bits >> 13) - (112u << 10)) & 0x7fff));
    }
}

static size_t width_of(ncclDataType_t type) {
    static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return widths[type];
}

static void all_types(void) {
    ncclComm_t comm = join();
    cudaStream_t s = new_stream();
    char *d = device_memory(8 * 100), *r = device_memory(8 * 100), expected[8 * 100];
    for (int type = 0; type <= ncclFloat8e5m2; type++)
        for (int op = ncclSum; op <= ncclAvg; op++) {
            bool sign = type != ncclUint8 && type != ncclUint32 && type != ncclUint64;
            for (int i = 0; i < 100; i++) {
                double numbers[MAX_RANKS] = {0}, all = 0;
                for (int k = 0; k < n_ranks; k++)
                    numbers[k] = type > ncclBfloat16 ? (i + k) % 3 - 1
                                                     : (i + 3 * k) % 4 - (sign && i % 2 ? 2 : 0);
                for (int k = 0; k < n_ranks; k++) {
                    double v = numbers[k];
                    all = k == 0           ? v
                          : op == ncclProd ? all * v
                          : op == ncclMax  ? (v > all ? v : all)
                          : op == ncclMin  ? (v < all ? v : all)
                                           : all + v;
                }
                if (op == ncclAvg)
                    all = type >= ncclFloat16 ? all / n_ranks : (double)((int)all / n_ranks);
                set_number((ncclDataType_t)type, fake_host_view(d), (size_t)i, numbers[rank]);
                set_number((ncclDataType_t)type, expected, (size_t)i, all == 0 ? 0 : all);
            }
            OK(ncclAllReduce(d, r, 100, (ncclDataType_t)type, (ncclRedOp_t)op, comm, s));
            OK(cudaStreamSynchronize(s));
            char *got = fake_host_view(r);
            // -0.0 counts as 0.
            for (size_t i = 0; i < 100 * width_of((ncclDataType_t)type); i++)
                if (got[i] != expected[i] &&
                    !((got[i] ^ expected[i]) == (char)0x80 && expected[i] == 0))
                    tap_diag("rank %d: type %d op %d byte %zu: %d, not %d", rank, type, op, i,
                             got[i], expected[i]),
                        exit(1);
        }
    OK(ncclCommDestroy(comm));
}

static void check_values(const void *at, size_t count, int from, size_t first) {
    const uint32_t *v = at;
    for (size_t i = 0; i < count; i++)
        if (v[i] != value(from, first + i)) CHECK_IS(v[i], value(from, first + i));
}

static void fill(void *at, size_t count) {
    uint32_t *v = at;
    for (size_t i = 0; i < count; i++) v[i] = value(rank, i);
}

// Runs every collective except ncclAllReduce with n elements per rank. Element i of rank r is
// value(r, i).
static void collectives_of(ncclComm_t comm, cudaStream_t s, size_t n, int root) {
    size_t total = n * (size_t)n_ranks, mine = n * (size_t)rank;
    uint32_t *d = device_memory(4 * total), *r = device_memory(4 * total), *dv = fake_host_view(d),
             *rv = fake_host_view(r);
    fill(dv, total);
    OK(ncclAllGather(d, r, n, ncclUint32, comm, s));
    OK(cudaStreamSynchronize(s));
    for (int k = 0; k < n_ranks; k++) check_values(rv + (size_t)k * n, n, k, 0);
    OK(ncclBroadcast(d, r, n, ncclUint32, root, comm, s));
    OK(cudaStreamSynchronize(s));
    check_values(rv, n, root, 0);
    OK(ncclReduceScatter(d, r, n, ncclUint32, ncclSum, comm, s));
    OK(cudaStreamSynchronize(s));
    for (size_t i = 0; i < n; i++) {
        uint32_t sum = 0;
        for (int k = 0; k < n_ranks; k++) sum += value(k, mine + i);
        CHECK(rv[i] == sum);
    }
    OK(ncclReduce(d, d, n, ncclUint32, ncclMax, root, comm, s)); // in place
    OK(cudaStreamSynchronize(s));
    for (size_t i = 0; i < n && rank == root; i++) {
        uint32_t most = 0;
        for (int k = 0; k < n_ranks; k++) most = value(k, i) > most ? value(k, i) : most;
        CHECK(dv[i] == most);
    }
    fill(rv + mine, n);
    OK(ncclAllGather(r + mine, r, n, ncclUint32, comm, s)); // in place
    OK(cudaStreamSynchronize(s));
    for (int k = 0; k < n_ranks; k++) check_values(rv + (size_t)k * n, n, k, 0);
    OK(cudaFree(d));
    OK(cudaFree(r));
}

static void collectives(void) {
    ncclComm_t comm = join();
    cudaStream_t s = new_stream();
    static const size_t counts[] = {1, 2, 1000, 4095, 4097, 50001};
    for (int i = 0; i < 6; i++) collectives_of(comm, s, counts[i], i % n_ranks);
    OK(ncclCommFinalize(comm));
    OK(ncclCommDestroy(comm));
    OK(cudaStreamDestroy(s));
}

static void scaled_sums(void) {
    ncclComm_t comm = join();
    cudaStream_t s = new_stream();
    void *d = device_memory(16);
    float *v = fake_host_view(d), factor = 0.5f;
    uint16_t *h = fake_host_view(d);
    ncclRedOp_t op;
    OK(ncclRedOpCreatePreMulSum(&op, &factor, ncclFloat, ncclScalarHostImmediate, comm));
    factor = 0;
    v[0] = (float)rank;
    OK(ncclAllReduce(d, d, 1, ncclFloat, op, comm, s));
    CHECK_IS(ncclAllReduce(d, d, 1, ncclDouble, op, comm, s), ncclInvalidArgument);
    OK(ncclRedOpDestroy(op, comm));
    CHECK_IS(ncclAllReduce(d, d, 1, ncclFloat, op, comm, s), ncclInvalidArgument);
    CHECK_LIKE(ncclGetLastError(comm), "unknown to this communicator");
    OK(cudaStreamSynchronize(s));
    CHECK(v[0] == 1.5f); // half of 0 + 1 + 2
    // The average of three sevens is not 7 if 1/3 is rounded to f16 or bf16 first.
    h[0] = 0x4700;
    h[1] = 0x40e0;
    OK(ncclAllReduce(d, d, 1, ncclHalf, ncclAvg, comm, s));
    OK(ncclAllReduce((char *)d + 2, (char *)d + 2, 1, ncclBfloat16, ncclAvg, comm, s));
    OK(cudaStreamSynchronize(s));
    CHECK_IS(h[0], 0x46ff);
    CHECK_IS(h[1], 0x40e1);
    OK(ncclCommDestroy(comm));
}

static void groups(void) {
    ncclComm_t comm = join();
    cudaStream_t s = new_stream(), t = new_stream();
    size_t n = 100000;
    uint32_t *d = device_memory(4 * n), *r = device_memory(4 * n * (size_t)n_ranks),
             *rv = fake_host_view(r);
    fill(fake_host_view(d), n);
    int next = (rank + 1) % n_ranks, before = (rank + n_ranks - 1) % n_ranks;
    OK(ncclGroupStart()); // before it receives, each rank sends more than any buffer holds
    OK(ncclSend(d, n, ncclUint32, next, comm, s));
    OK(ncclRecv(r, n, ncclUint32, before, comm, s));
    CHECK_IS(cudaStreamQuery(s), cudaSuccess); // queued until ncclGroupEnd
    OK(ncclGroupEnd());
    OK(cudaStreamSynchronize(s));
    check_values(rv, n, before, 0);
    memset(rv, 0, 4 * n * (size_t)n_ranks);
    OK(ncclGroupStart());
    // A nested group, messages to this rank itself, receives before sends, and two messages to each
    // rank.
    OK(ncclGroupStart());
    for (int k = 0; k < n_ranks; k++) OK(ncclRecv(r + (size_t)k * n, 1000, ncclUint32, k, comm, s));
    for (int k = 0; k < n_ranks; k++)
        OK(ncclRecv(r + (size_t)k * n + 1000, n - 1000, ncclUint32, k, comm, s));
    OK(ncclGroupEnd());
    for (int k = 0; k < n_ranks; k++) OK(ncclSend(d, 1000, ncclUint32, k, comm, s));
    for (int k = 0; k < n_ranks; k++) OK(ncclSend(d + 1000, n - 1000, ncclUint32, k, comm, s));
    OK(ncclGroupEnd());
    OK(cudaStreamSynchronize(s));
    for (int k = 0; k < n_ranks; k++) check_values(rv + (size_t)k * n, n, k, 0);
    OK(ncclGroupStart());
    OK(ncclSend(d, 1, ncclUint32, rank, comm, s));
    CHECK_IS(ncclGroupEnd(), ncclInvalidUsage);
    OK(ncclGroupStart()); // a group on two streams waits for both of them
    OK(cudaMemsetAsync(d, 1, 4, t));
    OK(ncclAllReduce(d, d, 1, ncclUint32, ncclSum, comm, s));
    OK(ncclAllReduce(d, r, 1, ncclUint32, ncclSum, comm, t));
    OK(ncclGroupEnd());
    OK(cudaStreamSynchronize(t));
    CHECK_IS(rv[0], 0x01010101 * n_ranks * n_ranks);
    OK(ncclGroupStart());
    CHECK_IS(ncclAllReduce(d, r, 1, ncclUint32, (ncclRedOp_t)99, comm, s), ncclInvalidArgument);
    CHECK_IS(ncclGroupEnd(), ncclInvalidArgument);
    OK(ncclCommDestroy(comm));
}

// Uses two devices in one thread.
static void one_process(void) {
    ncclComm_t comms[2];
    uint32_t *d[2];
    cudaStream_t s[2];
    OK(ncclGetUniqueId(&board->id));
    OK(ncclGroupStart());
    for (int i = 0; i < 2; i++) {
        OK(cudaSetDevice(i));
        d[i] = device_memory(4);
        s[i] = new_stream();
        *(uint32_t *)fake_host_view(d[i]) = 5 + (uint32_t)i;
        OK(ncclCommInitRank(&comms[i], 2, board->id, i));
    }
    OK(ncclGroupEnd());
    OK(ncclGroupStart());
    for (int i = 0; i < 2; i++)
        OK(ncclAllReduce(d[i], d[i], 1, ncclUint32, ncclProd, comms[i], s[i]));
    OK(ncclGroupEnd());
    for (int i = 0; i < 2; i++) {
        OK(cudaStreamSynchronize(s[i]));
        CHECK_IS(*(uint32_t *)fake_host_view(d[i]), 30);
    }
    OK(ncclGroupStart());
    for (int i = 0; i < 2; i++) OK(ncclCommFinalize(comms[i]));
    OK(ncclGroupEnd());
    for (int i = 0; i < 2; i++) OK(ncclCommDestroy(comms[i]));
}

// Allocates memory from a pool, or from the default pool if `pool` is NULL.
static uint32_t *memory_of_pool(cudaMemPool_t pool, cudaStream_t s) {
    uint32_t *d;
    OK(cudaSetDevice(0));
    if (pool) OK(cudaMallocFromPoolAsync((void **)&d, 4, pool, s));
    else OK(cudaMallocAsync((void **)&d, 4, s));
    return d;
}

static ncclResult_t begin_sum(uint32_t *of_0, uint32_t *of_1, const ncclComm_t *comms,
                              const cudaStream_t *s) {
    OK(ncclGroupStart());
    OK(ncclAllReduce(of_0, of_0, 1, ncclUint32, ncclSum, comms[0], s[0]));
    OK(ncclAllReduce(of_1, of_1, 1, ncclUint32, ncclSum, comms[1], s[1]));
    return ncclGroupEnd();
}

static void sum_of_pool(cudaMemPool_t pool, uint32_t *of_1, const ncclComm_t *comms,
                        const cudaStream_t *s) {
    uint32_t *of_0 = memory_of_pool(pool, s[0]);
    OK(begin_sum(of_0, of_1, comms, s));
    OK(cudaFreeAsync(of_0, s[0]));
    OK(cudaStreamSynchronize(s[0]));
}

// Checks that ranks of one process access each other's buffers directly, unless
// NCCL_P2P_DIRECT_DISABLE is set. The access fails if the buffer is in a pool that the other device
// cannot access.
static void pools(void) {
    struct cudaMemPoolProps props = {.allocType = cudaMemAllocationTypePinned,
                                     .location = {.type = cudaMemLocationTypeDevice, .id = 0}};
    struct cudaMemAccessDesc other = {.location = {.type = cudaMemLocationTypeDevice, .id = 1},
                                      .flags = cudaMemAccessFlagsProtReadWrite};
    ncclComm_t comms[2];
    cudaStream_t s[2];
    cudaMemPool_t pool;
    uint32_t *of_1;
    OK(ncclGetUniqueId(&board->id));
    OK(ncclGroupStart());
    for (int i = 0; i < 2; i++) {
        OK(cudaSetDevice(i));
        s[i] = new_stream();
        OK(ncclCommInitRank(&comms[i], 2, board->id, i));
    }
    OK(ncclGroupEnd());
    of_1 = device_memory(4);
    OK(cudaMemPoolCreate(&pool, &props));
    OK(cudaMemPoolSetAccess(pool, &other, 1));
    sum_of_pool(pool, of_1, comms, s);
    OK(cudaMemPoolDestroy(pool));
    setenv("NCCL_P2P_DIRECT_DISABLE", "1", 1);
    sum_of_pool(NULL, of_1, comms, s);
    unsetenv("NCCL_P2P_DIRECT_DISABLE");
    // The status is not checked here, because the stream may already have failed.
    begin_sum(memory_of_pool(NULL, s[0]), of_1, comms, s);
    CHECK_IS(cudaStreamSynchronize(s[0]), cudaErrorIllegalAddress);
    for (int i = 0; i < 2; i++) OK(ncclCommAbort(comms[i]));
}

// Checks that calls of one communicator keep their order across streams.
static void two_streams(void) {
    ncclComm_t comm = join();
    cudaStream_t s = new_stream(), t = new_stream();
    uint32_t *d = device_memory(8), *v = fake_host_view(d);
    v[0] = 1;
    v[1] = 100;
    // s is late on rank 0, and t is late on the other ranks
    if (rank == 0) OK(cudaMemsetAsync(device_memory(1), 0, 1, s));
    else OK(cudaMemsetAsync(device_memory(1), 0, 1, t));
    OK(ncclAllReduce(d, d, 1, ncclUint32, ncclSum, comm, s));
    OK(ncclAllReduce(d + 1, d + 1, 1, ncclUint32, ncclSum, comm, t));
    OK(cudaDeviceSynchronize());
    CHECK_IS(v[0], n_ranks);
    CHECK_IS(v[1], 100 * n_ranks);
    OK(ncclCommDestroy(comm));
}

static void duplicate(void) {
    ncclComm_t comm = NULL;
    share_id();
    ncclResult_t rc = ncclCommInitRank(&comm, n_ranks, board->id, rank);
    CHECK_IS(rc, ncclInvalidUsage);
    CHECK(comm == NULL);
    CHECK_LIKE(ncclGetLastError(NULL), "Duplicate GPU detected : rank ");
    CHECK_LIKE(ncclGetLastError(NULL), " both on CUDA device 10000");
}

static void versions(void) {
    ncclComm_t comm;
    share_id();
    OK(cudaSetDevice(rank));
    setenv("FAKE_NCCL_VERSION", rank ? "22105" : "22809", 1);
    CHECK_IS(ncclCommInitRank(&comm, n_ranks, board->id, rank), ncclInvalidUsage);
    CHECK_LIKE(ncclGetLastError(NULL),
               "Mismatched NCCL version detected : rank 1 version 22105 rank 0 version 22809");
}

static void simple_sum(void) {
    ncclComm_t comm = join();
    cudaStream_t s = new_stream();
    float *d = device_memory(4);
    *(float *)fake_host_view(d) = 1;
    OK(ncclAllReduce(d, d, 1, ncclFloat, ncclSum, comm, s));
    OK(cudaStreamSynchronize(s));
    CHECK(*(float *)fake_host_view(d) == (float)n_ranks);
    OK(ncclCommDestroy(comm));
}

static void killed_peer(void) {
    ncclComm_t comm = join();
    cudaStream_t s = new_stream();
    ncclResult_t state;
    float *d = device_memory(4);
    OK(ncclAllReduce(d, d, 1, ncclFloat, ncclSum, comm, s)); // connects the ranks
    OK(cudaStreamSynchronize(s));
    if (rank == n_ranks - 1) {
        await(0, n_ranks - 1);
        raise(SIGKILL);
    }
    OK(ncclAllReduce(d, d, 1, ncclFloat, ncclSum, comm, s));
    OK(cudaMemsetAsync(d, 1, 4, s));
    reach(0);
    for (int i = 0; i < 20; i++) {
        tap_sleep_ms(10);
        CHECK_IS(cudaStreamQuery(s), cudaErrorNotReady);
        OK(ncclCommGetAsyncError(comm, &state));
        CHECK_IS(state, ncclSuccess);
    }
    if (rank == 0) return; // exits while a stream waits
    OK(ncclCommAbort(comm));
    OK(cudaStreamSynchronize(s));
    CHECK_IS(peek(fake_host_view(d)), 1);
    OK(cudaFree(d));
}

static void mismatch(void) {
    ncclComm_t comm = join();
    cudaStream_t s = new_stream();
    float *d = device_memory(64);
    if (rank == 0) OK(ncclAllReduce(d, d, 4, ncclFloat, ncclSum, comm, s));
    else OK(ncclAllReduce(d, d, 8, ncclFloat, ncclSum, comm, s));
    tap_sleep_ms(100);
    CHECK_IS(cudaStreamQuery(s), cudaErrorNotReady);
    OK(ncclCommAbort(comm));
    OK(cudaStreamSynchronize(s));
}

static void non_blocking(void) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm = NULL;
    ncclResult_t state;
    float *d;
    int n, n_polls = 0;
    config.blocking = 0;
    share_id();
    OK(cudaSetDevice(rank));
    d = device_memory(4);
    if (rank == 1) await(0, 1);
    CHECK_IS(ncclCommInitRankConfig(&comm, n_ranks, board->id, rank, &config), ncclInProgress);
    CHECK(comm != NULL);
    if (rank == 0) {
        tap_sleep_ms(20);
        OK(ncclCommGetAsyncError(comm, &state));
        CHECK_IS(state, ncclInProgress);
        CHECK_IS(ncclCommCount(comm, &n), ncclInvalidArgument);
        reach(0);
    }
    do OK(ncclCommGetAsyncError(comm, &state));
    while (state == ncclInProgress);
    OK(state);
    cudaStream_t s = new_stream();
    if (rank == 1) await(1, 1);
    // Connects the ranks in a thread of its own.
    CHECK_IS(ncclAllReduce(d, d, 1, ncclFloat, ncclSum, comm, s), ncclInProgress);
    if (rank == 0) {
        tap_sleep_ms(20);
        OK(ncclCommGetAsyncError(comm, &state));
        CHECK_IS(state, ncclInProgress);
        reach(1);
    }
    do OK(ncclCommGetAsyncError(comm, &state));
    while (state == ncclInProgress);
    OK(state);
    CHECK_IS(ncclAllReduce(d, d, 1, ncclFloat, ncclSum, comm, s), ncclInProgress);
    // Fails because the result of the previous call was not queried.
    CHECK_IS(ncclAllReduce(d, d, 1, ncclFloat, ncclSum, comm, s), ncclInvalidArgument);
    for (state = ncclInProgress; state == ncclInProgress; n_polls++)
        OK(ncclCommGetAsyncError(comm, &state));
    CHECK_IS(n_polls, 2);
    OK(cudaStreamSynchronize(s));
    CHECK_IS(ncclCommFinalize(comm), ncclInProgress);
    do OK(ncclCommGetAsyncError(comm, &state));
    while (state == ncclInProgress);
    OK(ncclCommDestroy(comm));
    config.magic = 0;
    CHECK_IS(ncclCommInitRankConfig(&comm, n_ranks, board->id, rank, &config), ncclInvalidArgument);
}

// Makes a call on both ranks, on rank 1 50 ms later. Returns the time in ms that rank 0 spends in
// the call, or 0 on rank 1.
static int64_t takes_ms(ncclResult_t (*make)(ncclComm_t, char *, cudaStream_t), ncclComm_t comm,
                        char *d, cudaStream_t s) {
    static int step;
    int64_t start = tap_now_ms();
    if (rank == 1) await(step, 1), tap_sleep_ms(50);
    else reach(step);
    OK(make(comm, d, s));
    int64_t took = tap_now_ms() - start;
    OK(cudaStreamSynchronize(s));
    step++;
    return rank == 0 ? took : 0;
}

static ncclResult_t small_sum(ncclComm_t comm, char *d, cudaStream_t s) {
    return ncclAllReduce(d, d, 1, ncclFloat, ncclSum, comm, s);
}
static ncclResult_t large_sum(ncclComm_t comm, char *d, cudaStream_t s) {
    return ncclAllReduce(d, d, 1 << 18, ncclFloat, ncclSum, comm, s);
}
static ncclResult_t large_product(ncclComm_t comm, char *d, cudaStream_t s) {
    return ncclAllReduce(d, d, 1 << 18, ncclFloat, ncclProd, comm, s);
}
static ncclResult_t broadcast(ncclComm_t comm, char *d, cudaStream_t s) {
    return ncclBroadcast(d, d, 4, ncclInt8, 0, comm, s);
}
static ncclResult_t message(ncclComm_t comm, char *d, cudaStream_t s) {
    return rank ? ncclRecv(d, 4, ncclInt8, 0, comm, s) : ncclSend(d, 4, ncclInt8, 1, comm, s);
}
static ncclResult_t reply(ncclComm_t comm, char *d, cudaStream_t s) {
    return rank ? ncclSend(d, 4, ncclInt8, 0, comm, s) : ncclRecv(d, 4, ncclInt8, 1, comm, s);
}

// Checks that the first call of each algorithm and each pair waits on the host for its peers, and
// that later calls do not.
static void connects(void) {
    ncclComm_t comm = join();
    cudaStream_t s = new_stream();
    char *d = device_memory(1 << 20);
    bool lazy = !getenv("NCCL_RUNTIME_CONNECT");
    if (rank == 0) CHECK((takes_ms(small_sum, comm, d, s) >= 50) == lazy);
    else takes_ms(small_sum, comm, d, s);
    ncclResult_t (*const all[])(ncclComm_t, char *, cudaStream_t) = {small_sum, large_sum,
                                                                     large_product, broadcast};
    for (int i = 0; i < 4; i++) { // the broadcast uses the product's ring
        bool waits = lazy && (i == 1 || i == 2);
        CHECK((takes_ms(all[i], comm, d, s) >= 50) == (rank == 0 && waits));
    }
    CHECK((takes_ms(message, comm, d, s) >= 50) == (rank == 0));
    CHECK(takes_ms(message, comm, d, s) < 50);
    CHECK((takes_ms(reply, comm, d, s) >= 50) == (rank == 0)); // the other direction
    OK(ncclCommDestroy(comm));
}

static void *calls_alone(void *comm) {
    char *d = device_memory(4);
    cudaStream_t s = new_stream();
    return (void *)(intptr_t)ncclAllReduce(d, d, 1, ncclFloat, ncclSum, (ncclComm_t)comm, s);
}

// Aborts a communicator while a thread waits in NCCL for a peer that does not come. The stand-in
// must end the process.
static void aborted_beside_a_call(void) {
    ncclComm_t comm = join();
    pthread_t thread;
    if (rank == 0) {
        await(0, 1);
        OK(ncclCommAbort(comm));
        return;
    }
    CHECK(pthread_create(&thread, NULL, calls_alone, comm) == 0);
    tap_sleep_ms(50);
    reach(0);
    ncclCommAbort(comm);
}
static void revoked(void) {
    ncclComm_t comm = join();
    pthread_t thread;
    void *rc = NULL;
    if (rank) {
        OK(ncclCommAbort(comm));
        return;
    }
    CHECK(pthread_create(&thread, NULL, calls_alone, comm) == 0);
    tap_sleep_ms(50);
    OK(ncclCommRevoke(comm, NCCL_REVOKE_DEFAULT));
    CHECK(pthread_join(thread, &rc) == 0);
    CHECK_IS((intptr_t)rc, ncclInternalError);
    CHECK_IS(small_sum(comm, device_memory(4), NULL), ncclInvalidUsage);
    OK(ncclCommAbort(comm));
}

static void *aborts(void *comm) {
    OK(ncclCommAbort((ncclComm_t)comm));
    reach(1 + rank);
    return NULL;
}

// Aborts a communicator while a graph holds a call. The abort must wait until the graph is
// destroyed. After a revoke, the abort does not wait, and it frees memory that the graph needs.
// Destroying the graph must then end the process.
static void aborted_graph(void) {
    ncclComm_t comm = join();
    cudaStream_t s = new_stream();
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    pthread_t thread;
    char *d = device_memory(4);
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    OK(small_sum(comm, d, s));
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphDestroy(graph));
    if (n_ranks == 1) { // the case that must crash
        OK(ncclCommRevoke(comm, NCCL_REVOKE_DEFAULT));
        OK(ncclCommAbort(comm));
        cudaGraphExecDestroy(exec);
        return;
    }
    CHECK(pthread_create(&thread, NULL, aborts, comm) == 0);
    tap_sleep_ms(100);
    CHECK_IS(board->steps[1 + rank], 0);
    OK(cudaGraphExecDestroy(exec));
    CHECK(pthread_join(thread, NULL) == 0);
}

// Checks errors that NCCL detects. Over a network the death of a peer is an error, and from 2.30.3
// on, so is a wait that takes too long.
static void remote_error(void) {
    ncclComm_t comm = join();
    cudaStream_t s = new_stream();
    ncclResult_t state = ncclSuccess;
    bool times_out = getenv("FAKE_NCCL_TIMEOUT_MS") != NULL;
    char *d = device_memory(4);
    OK(small_sum(comm, d, s));
    OK(cudaStreamSynchronize(s));
    if (rank == n_ranks - 1 && times_out) await(0, n_ranks - 1);
    if (rank == n_ranks - 1) raise(SIGKILL);
    OK(small_sum(comm, d, s));
    while (state == ncclSuccess) OK(ncclCommGetAsyncError(comm, &state));
    CHECK_IS(state, times_out ? 8 : ncclRemoteError);
    CHECK_IS(small_sum(comm, d, s), state);
    CHECK_IS(cudaStreamQuery(s), cudaErrorNotReady);
    reach(0);
    OK(ncclCommAbort(comm));
    OK(cudaStreamSynchronize(s));
}

static void init_hangs(void) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm;
    ncclResult_t state;
    config.blocking = 0;
    OK(ncclGetUniqueId(&board->id));
    CHECK_IS(ncclCommInitRankConfig(&comm, 1, board->id, 0, &config), ncclInProgress);
    tap_sleep_ms(50);
    OK(ncclCommGetAsyncError(comm, &state));
    CHECK_IS(state, ncclInProgress);
    OK(ncclCommAbort(comm));
}

static void init_fails(void) {
    ncclComm_t comm;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclResult_t state;
    int n;
    OK(ncclGetUniqueId(&board->id));
    CHECK_IS(ncclCommInitRank(&comm, 1, board->id, 0), ncclSystemError);
    CHECK(comm == NULL);
    config.blocking = 0;
    CHECK_IS(ncclCommInitRankConfig(&comm, 1, board->id, 0, &config), ncclInProgress);
    do OK(ncclCommGetAsyncError(comm, &state));
    while (state == ncclInProgress);
    CHECK_IS(state, ncclSystemError);
    CHECK_IS(ncclCommCount(comm, &n), ncclSystemError);
    OK(ncclCommAbort(comm));
    memset(&board->id, 1, sizeof board->id);
    unsetenv("FAKE_NCCL_FAIL");
    CHECK_IS(ncclCommInitRank(&comm, 1, board->id, 0), ncclSystemError);
    CHECK_IS(ncclCommInitRank(&comm, 1, board->id, 1), ncclInvalidArgument);
}

static void captured_sum(void) {
    ncclComm_t comm = join();
    cudaStream_t s = new_stream();
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    uint32_t *d = device_memory(4), *v = fake_host_view(d), expected = 1;
    *v = 1;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    OK(ncclAllReduce(d, d, 1, ncclUint32, ncclSum, comm, s));
    OK(ncclAllReduce(d, d, 1, ncclUint32, ncclSum, comm, s));
    OK(cudaStreamEndCapture(s, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphDestroy(graph));
    for (int i = 0; i < 3; i++) {
        OK(cudaGraphLaunch(exec, s));
        // not captured, between two launches
        OK(ncclAllReduce(d, d, 1, ncclUint32, ncclSum, comm, s));
        expected *= (uint32_t)(n_ranks * n_ranks * n_ranks);
    }
    OK(cudaStreamSynchronize(s));
    CHECK_IS(*v, expected);
    OK(cudaGraphExecDestroy(exec));
    OK(ncclCommDestroy(comm));
}

static void bad_arguments(void) {
    ncclComm_t comm = join();
    cudaStream_t s = new_stream();
    char local[64], *d = device_memory(64), *pinned;
    // needs no other rank and does nothing
    OK(ncclAllReduce(NULL, NULL, 0, ncclFloat, ncclSum, comm, s));
    OK(cudaStreamQuery(s));
    CHECK_IS(ncclAllReduce(local, d, 4, ncclFloat, ncclSum, comm, s), ncclInvalidArgument);
    CHECK_LIKE(ncclGetLastError(comm), "AllReduce : sendbuff");
    // The buffer is too small.
    CHECK_IS(ncclAllReduce(d, d + 60, 4, ncclFloat, ncclSum, comm, s), ncclInvalidArgument);
    CHECK_IS(ncclBroadcast(d, d, 4, ncclFloat, n_ranks, comm, s), ncclInvalidArgument);
    CHECK_LIKE(ncclGetLastError(comm),
               "Broadcast : invalid root 2 (root should be in the 0..2 range)");
    CHECK_IS(ncclSend(d, 4, ncclFloat, -1, comm, s), ncclInvalidArgument);
    CHECK_IS(ncclAllReduce(d, d, 4, (ncclDataType_t)12, ncclSum, comm, s), ncclInvalidArgument);
    CHECK_IS(ncclAllReduce(d, d, 4, ncclFloat, (ncclRedOp_t)5, comm, s), ncclInvalidArgument);
    OK(cudaMallocHost((void **)&pinned, 64)); // pinned memory is accepted
    OK(ncclAllGather(d, pinned, 4, ncclFloat8e5m2, comm, s));
    OK(cudaStreamSynchronize(s));
    CHECK_IS((unsigned char)pinned[4], 0xEE);
    OK(ncclCommDestroy(comm));
}

// Checks that one old device makes all ranks refuse reductions of 8-bit floats, and nothing else.
static void old_devices(void) {
    ncclComm_t comm = join();
    cudaStream_t s = new_stream();
    char *d = device_memory(64);
    CHECK_IS(ncclAllReduce(d, d, 4, ncclFloat8e4m3, ncclSum, comm, s), ncclInvalidArgument);
    CHECK_LIKE(ncclGetLastError(comm), "FP8 reduction support begins with sm90");
    OK(ncclAllReduce(d, d, 4, ncclHalf, ncclSum, comm, s));
    OK(ncclAllGather(d, d + 32, 4, ncclFloat8e5m2, comm, s));
    OK(cudaStreamSynchronize(s));
    OK(ncclCommDestroy(comm));
}

static void old_version(void) {
    ncclComm_t comm = join();
    cudaStream_t s = new_stream();
    char *d = device_memory(64);
    CHECK_IS(ncclAllGather(d, d + 32, 4, ncclFloat8e5m2, comm, s), ncclInvalidArgument);
    CHECK_LIKE(ncclGetLastError(comm), "invalid type 11");
    OK(ncclCommDestroy(comm));
}

static void *thread_rank(void *arg) {
    int which = (int)(intptr_t)arg;
    ncclComm_t comm;
    OK(cudaSetDevice(which));
    uint32_t *d = device_memory(4);
    *(uint32_t *)fake_host_view(d) = 1;
    OK(ncclCommInitRank(&comm, 3, board->id, which));
    for (int i = 0; i < 20; i++) OK(ncclAllReduce(d, d, 1, ncclUint32, ncclSum, comm, NULL));
    OK(cudaStreamSynchronize(NULL));
    CHECK_IS(*(uint32_t *)fake_host_view(d), 3486784401);
    OK(ncclCommDestroy(comm));
    return NULL;
}

static void threads(void) {
    pthread_t ids[3];
    OK(ncclGetUniqueId(&board->id));
    for (intptr_t i = 0; i < 3; i++)
        CHECK(pthread_create(&ids[i], NULL, thread_rank, (void *)i) == 0);
    for (int i = 0; i < 3; i++) CHECK(pthread_join(ids[i], NULL) == 0);
}

static void cuda_cases(void) {
    run_one("cuda: a missing synchronisation is seen", "FAKE_CUDA_DELAY_US=50000", missing_sync);
    run_one("cuda: a pinned source that is reused is seen, a pageable one is captured",
            "FAKE_CUDA_DELAY_US=20000", reused_source);
    run_one("cuda: what cudaMemcpy waits for", "FAKE_CUDA_DELAY_US=20000", synchronous_copies);
    run_ranks("cuda: a host that touches device memory dies", 1, "", touches_device, SIGSEGV);
    run_one("cuda: attributes of pointers, wrong pointers", "", pointers);
    run_one("cuda: events", "FAKE_CUDA_DELAY_US=10000", events);
    run_one("cuda: the NULL stream", "FAKE_CUDA_DELAY_US=20000", legacy_stream);
    run_one("without a driver", "FAKE_CUDA_DEVICES=-1", no_driver);
    run_one("with a driver that is too old", "FAKE_CUDA_DEVICES=-2", outdated_driver);
    run_one("without a device", "FAKE_CUDA_DEVICES=0", no_device);
    run_one("no visible device", "FAKE_CUDA_DEVICES=3 CUDA_VISIBLE_DEVICES=", no_device);
    run_one("cuda: the second cudaMalloc fails", "FAKE_CUDA_FAIL=cudaMalloc:2:2", injected);
    run_one("cuda: cudaMalloc fails from the second call on", "FAKE_CUDA_FAIL=cudaMalloc:-2:2",
            injected_from_then_on);
    run_one("cuda: what waits for its turn in a stream",
            "FAKE_CUDA_DELAY_US=50000 FAKE_CUDA_QUEUE=4", waits_for_its_turn);
    run_one("cuda: visible devices", "FAKE_CUDA_DEVICES=4 CUDA_VISIBLE_DEVICES=3,1", visible);
    run_one("cuda: where contexts are made", "FAKE_CUDA_DEVICES=3", contexts);
    run_one("cuda: a forked child", "", forked);
    run_one("cuda: capture and replay", "", captures);
    run_one("cuda: captures that fail", "", captures_that_fail);
    run_one("cuda: what capture forbids", "", captures_forbid);
    run_one("cuda: kernels are loaded by name", "", libraries);
    run_one("cuda: kernels run later, on their stream", "FAKE_CUDA_DELAY_US=50000", launches);
    run_one("cuda: a kernel reads beyond the end", "", reads_too_far);
    run_one("cuda: a kernel writes beyond the end", "FAKE_CUDA_DELAY_US=20000", writes_too_far);
    run_one("cuda: a kernel reads what only the host has", "", reads_the_host);
    run_one("cuda: a kernel reads freed memory", "", reads_freed_memory);
    run_one("cuda: a kernel gets a pointer that is not aligned", "", is_not_aligned);
    run_one("cuda: a kernel gets too many operands", "", has_too_many);
    run_one("cuda: the second launch fails", "FAKE_CUDA_FAIL=cudaLaunchKernel:2:719",
            injected_launch);
    run_one("cuda: loading fails", "FAKE_CUDA_FAIL=cudaLibraryLoadData:1:200", injected_load);
    run_one("cuda: kernels are loaded when they are needed",
            "FAKE_CUDA_DELAY_US=50000 FAKE_CUDA_ALLOC_WAITS=1", lazy_loading);
    run_one("cuda: kernels that the driver cannot compile", "FAKE_CUDA_JIT=222", old_driver);
    run_one("cuda: bytes that move", "", traffic);
    run_one("cuda: what comes from another device is corrupted",
            "FAKE_CUDA_DEVICES=2 FAKE_CUDA_CORRUPT_PEERS=1", corrupt_peers);
    run_ranks("cuda: memory of another process", 2, "FAKE_CUDA_DELAY_US=50000", ipc, 0);
}

static void nccl_cases(void) {
    run_ranks("nccl: all_reduce, 4 ranks, every type and operation", 4, "FAKE_CUDA_DEVICES=4",
              all_types, 0);
    run_ranks("nccl: every collective, 4 ranks", 4, "FAKE_CUDA_DEVICES=4", collectives, 0);
    run_ranks("nccl: every collective, 3 ranks", 3, "FAKE_CUDA_DEVICES=3", collectives, 0);
    run_ranks("nccl: every collective, 1 rank", 1, "", collectives, 0);
    run_ranks("nccl: scaled sums", 3, "FAKE_CUDA_DEVICES=3", scaled_sums, 0);
    run_ranks("nccl: groups", 4, "FAKE_CUDA_DEVICES=4", groups, 0);
    run_one("nccl: two communicators of one thread", "FAKE_CUDA_DEVICES=2", one_process);
    run_one("nccl: buffers that another device of the process does not reach",
            "FAKE_CUDA_DEVICES=2", pools);
    run_ranks("nccl: two streams", 2, "FAKE_CUDA_DEVICES=2 FAKE_CUDA_DELAY_US=10000", two_streams,
              0);
    run_ranks("nccl: two ranks on one GPU", 2, "", duplicate, 0);
    run_ranks("nccl: two ranks on one GPU, 2.28, NCCL_MULTI_RANK_GPU_ENABLE", 2,
              "NCCL_MULTI_RANK_GPU_ENABLE=1", duplicate, 0);
    run_ranks("nccl: two ranks on one GPU, 2.30, NCCL_MULTI_RANK_GPU_ENABLE", 2,
              "NCCL_MULTI_RANK_GPU_ENABLE=1 FAKE_NCCL_VERSION=23003", simple_sum, 0);
    run_ranks("nccl: two ranks on one GPU, NCCL_HOSTID", 2, "NCCL_HOSTID=%r", simple_sum, 0);
    run_ranks("nccl: two versions", 2, "FAKE_CUDA_DEVICES=2", versions, 0);
    run_ranks("nccl: who waits for a killed rank waits until the abort", 3, "FAKE_CUDA_DEVICES=3",
              killed_peer, SIGKILL);
    run_ranks("nccl: calls that do not match wait until the abort", 2, "FAKE_CUDA_DEVICES=2",
              mismatch, 0);
    run_ranks("nccl: blocking=0", 2, "FAKE_CUDA_DEVICES=2", non_blocking, 0);
    run_ranks("nccl: the first call of a kind connects", 2, "FAKE_CUDA_DEVICES=2", connects, 0);
    run_ranks("nccl: NCCL_RUNTIME_CONNECT=0", 2, "FAKE_CUDA_DEVICES=2 NCCL_RUNTIME_CONNECT=0",
              connects, 0);
    run_ranks("nccl: an abort beside a call", 2, "FAKE_CUDA_DEVICES=2", aborted_beside_a_call,
              SIGABRT);
    run_ranks("nccl: a revoke beside a call", 2, "FAKE_CUDA_DEVICES=2", revoked, 0);
    run_ranks("nccl: an abort with a live graph", 2, "FAKE_CUDA_DEVICES=2", aborted_graph, 0);
    run_ranks("nccl: a graph that outlives its communicator", 1, "", aborted_graph, SIGABRT);
    run_ranks("nccl: a peer dies, over a network", 3, "FAKE_CUDA_DEVICES=3 FAKE_NCCL_REMOTE=1",
              remote_error, SIGKILL);
    run_ranks("nccl: a peer is late, 2.30", 2, "FAKE_CUDA_DEVICES=2 FAKE_NCCL_TIMEOUT_MS=50",
              remote_error, SIGKILL);
    run_one("nccl: an init that hangs", "FAKE_NCCL_INIT_HANGS=1", init_hangs);
    run_one("nccl: an init that fails", "FAKE_NCCL_FAIL=2", init_fails);
    run_ranks("nccl: capture and replay", 2, "FAKE_CUDA_DEVICES=2", captured_sum, 0);
    run_ranks("nccl: bad arguments", 2, "FAKE_CUDA_DEVICES=2", bad_arguments, 0);
    run_ranks("nccl: 8-bit floats where a device is of capability 8", 3,
              "FAKE_CUDA_DEVICES=3 FAKE_CUDA_CAPABILITY=9,8,10", old_devices, 0);
    run_ranks("nccl: 8-bit floats in 2.23", 2, "FAKE_CUDA_DEVICES=2 FAKE_NCCL_VERSION=22304",
              old_version, 0);
    run_one("nccl: threads as ranks", "FAKE_CUDA_DEVICES=3", threads);
}

int main(void) {
    tap_deadline(60);
    clear_environment();
    board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    TAP_REQUIRE(board != MAP_FAILED);
    cuda_cases();
    nccl_cases();
    return tap_done();
}
