// cuda.c - a stand-in for libcudart, for tests on machines without a GPU.
//
// The stand-in is not CUDA: it knows only five kernels, by name. The stand-in is linked only into
// tests, instead of the real library, and is compiled against the real headers (CUDA 12.8 or
// newer).
//
// Like the real library
//   - A stream is a thread with a queue. Calls return before their work is done; a caller that does
//     not synchronize sees old data.
//   - The host cannot dereference a device pointer: it points into a PROT_NONE mapping of a memfd,
//     and operations use a second mapping of the memory. Fresh memory is not zero, and a copy
//     beyond the end of an allocation is an error.
//   - cudaMemcpyAsync of pageable memory: a copy of up to 64 KiB to the device reads the source
//     during the call. A larger copy reads the source when the stream reaches the copy. A copy from
//     the device blocks. Pinned memory (cudaMallocHost, cudaHostRegister) is read and written
//     later, by the stream.
//   - cudaMemcpy returns before the data is on the device if the source is pageable or on the
//     device (as documented).
//   - The NULL stream waits for the streams created without cudaStreamNonBlocking, and these
//     streams wait for the NULL stream.
//   - cudaFree and cudaFreeHost wait for the device; a stream that never ends makes them wait
//     forever.
//   - Capture: calls are recorded in call order and replayed, also across streams that an event
//     forked and joined. Calls that are not allowed during a capture fail with 900 and invalidate
//     the capture; the modes are global, thread-local and relaxed.
//   - IPC: other processes map the same memory, but the exporting process cannot. A handle stands
//     for a whole allocation, whichever pointer into the allocation was passed.
//   - Other devices can access memory of a pool (cudaMallocAsync, cudaMallocFromPoolAsync) only
//     where cudaMemPoolSetAccess allows it. Only calls of NCCL are checked for this.
//   - A kernel that gets a wrong pointer fails when it runs. From then on every call fails with its
//     error. Calls also fail in this way if memory of another process is closed while unfinished
//     work reads it.
//   - Loading is lazy: cudaLibraryLoadData compiles nothing. A kernel is compiled by its first
//     launch or by cudaFuncGetAttributes. Either call waits for all work on the device, and fails
//     if the driver cannot compile the PTX.
//   - cudaSetDevice creates a context on the device, as in CUDA 12. Most other calls create a
//     context on the thread's current device, which is 0 by default. cuDevicePrimaryCtxGetState
//     reports where a context exists.
//   - Errors set the last error, including cudaErrorNotReady. After fork() the child gets
//     cudaErrorInitializationError.
//   - CUDA_VISIBLE_DEVICES (a list of numbers) chooses and orders the devices.
// Unlike the real library
//   - The only kernels are those of tests/gpu/pack.cu, compiled for the host. A kernel is found
//     only if the loaded library names it. Every device has the kernels, and their grids have one
//     dimension.
//   - There are no managed memory, 2D copies, peer copies, per-thread default stream, child graphs
//     or hand-made graph nodes. For memory pools, there are only the functions that create and
//     destroy a pool, allocate from it, and set the access to its memory. A program that uses
//     anything else does not link.
//   - A graph runs its operations one after the other. Unjoined streams are detected only if no
//     other stream waited.
//   - Errors are never sticky, except errors of kernels. Priorities are stored but ignored. All
//     devices share the memory of one machine.
//
// Environment, read once at the first call
//   FAKE_CUDA_DEVICES=n
//       number of devices of the machine (default 1). 0 gives cudaErrorNoDevice. -1 acts as if
//       there were no driver (35). -2 acts as if the driver were too old, with the same error but
//       another result of cudaDriverGetVersion.
//   FAKE_CUDA_CAPABILITY=list
//       the major number of each device's compute capability (default 9); the last number applies
//       to the remaining devices
//   FAKE_CUDA_DELAY_US=n
//       every copy, memset, host function and collective waits that long before it starts
//   FAKE_CUDA_FAIL=function:nth:code
//       the nth call of that function fails with that code (nth counts from 1; 0 is every call; -n
//       is the nth and all later calls)
//   FAKE_CUDA_JIT=code
//       kernels cannot be compiled for the device: every call that has to load a kernel fails with
//       that code
//   FAKE_CUDA_JIT_MS=n
//       compiling a kernel takes that long
//   FAKE_CUDA_CORRUPT_PEERS=1
//       data that a copy or a kernel reads from another device arrives as ones, without an error,
//       as with the IOMMU or PCIe ACS of some machines. Copies to the host are made by the device
//       that owns the memory.
//   FAKE_CUDA_STUCK_PEERS=1
//       a copy between devices never ends
//   FAKE_CUDA_ALLOC_WAITS=1
//       cudaMalloc and cudaHostRegister wait for the pending work on the device, as the real
//       functions may
//   FAKE_CUDA_ALLOC_US=n
//       cudaMalloc takes that long
//   FAKE_CUDA_QUEUE=n
//       a stream holds n operations: a call that adds one to a full stream waits, as with the real
//       library after about a thousand operations
//   FAKE_CUDA_DESTROYED_ENDS=1
//       using a destroyed stream ends the program, as it may with the real library
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "fake.h"

#include "../gpu/pack.cu"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAX_DEVICES 64
#define MARKS 64                      // largest number of pending records of one event
#define FILL_LIMIT ((size_t)16 << 20) // larger fresh memory is filled at both ends only
#define FILL_END ((size_t)1 << 20)
#define CAPTURED_AT_ONCE ((size_t)64 << 10) // largest pageable source that the call reads

typedef struct work {
    fake_work w;
    int refs;
} work;

// An entry in a stream's queue. The entry stays at the head while it runs.
typedef struct node {
    struct node *next;
    work *work;
    uint64_t seq, ticket;
} node;

typedef struct works {
    work **item;
    size_t n, capacity;
} works;

typedef struct capture {
    uint64_t id;
    cudaStream_t origin;
    pthread_t thread;
    enum cudaStreamCaptureMode mode;
    bool invalid;
    uint64_t n_steps;
    works works;
} capture;

struct CUstream_st {
    struct CUstream_st *next;
    int device, priority;
    unsigned flags;
    bool is_null, started, destroyed;
    node *head, **tail;
    capture *capture;
    // In the capture: the last step of this stream, and the last step that another stream has
    // waited for.
    uint64_t last_step, joined_step;
};

struct CUevent_st {
    int refs, device;
    uint64_t capture_id, capture_step; // position of the last record in a capture
    cudaStream_t capture_stream;
    uint64_t recorded, done[MARKS]; // done[n % MARKS] == n: the nth record has happened
};

struct CUgraph_st {
    works works;
};
struct CUgraphExec_st {
    works works;
};

typedef enum block_kind { BLOCK_DEVICE, BLOCK_IMPORTED, BLOCK_PINNED, BLOCK_REGISTERED } block_kind;

// Memory that the stand-in knows.
typedef struct block {
    struct block *next;
    block_kind kind;
    char *base, *view; // the caller's mapping, and the mapping that operations use
    size_t size;
    int device, fd, n_opened;
    uint64_t inode;
    int bus;            // bus number of the device that owns the memory
    cudaMemPool_t pool; // pool of the memory, or NULL
} block;

struct CUmemPoolHandle_st {
    int refs; // references: its handle, and its memory
    int device;
    bool reached[MAX_DEVICES]; // true if another device may access the memory
};

typedef struct ipc_handle {
    uint64_t magic, inode, size;
    int pid, fd, bus;
} ipc_handle;
#define IPC_MAGIC 0x66616b6563756461u

// One lock and one condition for everything. After every change all waiting threads check again.
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct CUstream_st null_streams[MAX_DEVICES];
static struct CUmemPoolHandle_st default_pools[MAX_DEVICES];
static cudaStream_t streams;
static block *blocks;
static uint64_t sequence, n_captures;
static atomic_int broken;                  // error of a kernel
static _Atomic uint64_t n_read, n_written; // bytes of device memory

static struct {
    int n_devices, bus[MAX_DEVICES], major[MAX_DEVICES];
    unsigned delay_us;
    char fail_function[64];
    int fail_nth, fail_code, jit_code;
    bool corrupt_peers, stuck_peers, alloc_waits, destroyed_ends;
    unsigned alloc_us;
    unsigned jit_ms;
    int queue_limit; // 0 for no limit
    bool forked;     // true after a fork
} config;

static _Thread_local cudaError_t last_error;
static _Thread_local int current_device;
static _Thread_local enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

//------------------------------------------------------------------------------
// environment, errors
//------------------------------------------------------------------------------

static void read_devices(void) {
    const char *count = getenv("FAKE_CUDA_DEVICES"), *visible = getenv("CUDA_VISIBLE_DEVICES");
    const char *capability = getenv("FAKE_CUDA_CAPABILITY");
    int n = count && *count ? atoi(count) : 1, major[MAX_DEVICES];
    for (int i = 0; i < MAX_DEVICES; i++) {
        major[i] = capability && *capability ? atoi(capability) : i ? major[i - 1] : 9;
        if (capability && (capability = strchr(capability, ',')) != NULL) capability++;
    }
    config.n_devices = n > MAX_DEVICES ? MAX_DEVICES : n;
    for (int i = 0; i < config.n_devices; i++) config.bus[i] = 0x10 + i, config.major[i] = major[i];
    if (!visible || n <= 0) return;
    config.n_devices = 0;
    while (*visible && config.n_devices < MAX_DEVICES) {
        char *end;
        long index = strtol(visible, &end, 10);
        if (end == visible || index < 0 || index >= n) return;
        config.major[config.n_devices] = major[index];
        config.bus[config.n_devices++] = 0x10 + (int)index;
        visible = *end == ',' ? end + 1 : end;
    }
}

static void is_forked(void) { config.forked = true; }

static bool is_set(const char *name) {
    const char *text = getenv(name);
    return text && *text && strcmp(text, "0") != 0;
}

static void read_environment(void) {
    const char *delay = getenv("FAKE_CUDA_DELAY_US"), *failing = getenv("FAKE_CUDA_FAIL"),
               *jit = getenv("FAKE_CUDA_JIT");
    read_devices();
    config.jit_code = jit ? atoi(jit) : 0;
    config.jit_ms = (unsigned)(getenv("FAKE_CUDA_JIT_MS") ? atoi(getenv("FAKE_CUDA_JIT_MS")) : 0);
    config.corrupt_peers = is_set("FAKE_CUDA_CORRUPT_PEERS");
    config.stuck_peers = is_set("FAKE_CUDA_STUCK_PEERS");
    config.alloc_waits = is_set("FAKE_CUDA_ALLOC_WAITS");
    config.destroyed_ends = is_set("FAKE_CUDA_DESTROYED_ENDS");
    config.alloc_us =
        is_set("FAKE_CUDA_ALLOC_US") ? (unsigned)atoi(getenv("FAKE_CUDA_ALLOC_US")) : 0;
    config.queue_limit = is_set("FAKE_CUDA_QUEUE") ? atoi(getenv("FAKE_CUDA_QUEUE")) : 0;
    pthread_atfork(NULL, NULL, is_forked);
    config.delay_us = delay ? (unsigned)atoi(delay) : 0;
    if (failing && sscanf(failing, "%63[^:]:%d:%d", config.fail_function, &config.fail_nth,
                          &config.fail_code) != 3) {
        fprintf(stderr, "FAKE_CUDA_FAIL is function:nth:code, not \"%s\"\n", failing);
        abort();
    }
}

cudaError_t fake_enter(const char *function) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    static atomic_int n_calls;
    pthread_once(&once, read_environment);
    if (config.n_devices < 0) return cudaErrorInsufficientDriver;
    if (config.n_devices == 0) return cudaErrorNoDevice;
    if (config.forked) return cudaErrorInitializationError;
    if (atomic_load(&broken)) return (cudaError_t)atomic_load(&broken);
    if (config.fail_code && strcmp(function, config.fail_function) == 0) {
        int call = atomic_fetch_add(&n_calls, 1) + 1;
        if (config.fail_nth <= 0 ? call >= -config.fail_nth : call == config.fail_nth)
            return (cudaError_t)config.fail_code;
    }
    return cudaSuccess;
}

static cudaError_t result(cudaError_t error) {
    if (error) last_error = error;
    return error;
}

static cudaError_t unlock(cudaError_t error) {
    // A kernel may have failed meanwhile. A kernel that this call has queued cannot have failed
    // yet, because it needs the lock to begin.
    if (!error) error = (cudaError_t)atomic_load(&broken);
    pthread_mutex_unlock(&lock);
    return result(error);
}

static atomic_bool contexts[MAX_DEVICES];

// Creates a context, unless the function needs none.
static void make_context(const char *function) {
    static const char *const without[] = {
        "cudaGetDeviceCount",    "cudaSetDevice",           "cudaGetDevice",
        "cudaDeviceGetPCIBusId", "cudaDeviceGetAttribute",  "cudaGetDeviceProperties",
        "cudaRuntimeGetVersion", "cudaDeviceCanAccessPeer", "cudaThreadExchangeStreamCaptureMode"};
    for (size_t i = 0; i < sizeof without / sizeof *without; i++)
        if (strcmp(function, without[i]) == 0) return;
    atomic_store(&contexts[current_device], true);
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active);
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = device >= 0 && device < MAX_DEVICES && atomic_load(&contexts[device]);
    return 0;
}

#define ENTER()                                    \
    do {                                           \
        cudaError_t error_ = fake_enter(__func__); \
        if (error_) return result(error_);         \
        make_context(__func__);                    \
    } while (0)
#define REQUIRE(cond, error)               \
    do {                                   \
        if (!(cond)) return result(error); \
    } while (0)

cudaError_t cudaGetLastError(void) {
    cudaError_t error = fake_enter(__func__);
    if (!error) error = last_error;
    last_error = cudaSuccess;
    return error;
}

#define ERRORS(X)                                                                                  \
    X(cudaSuccess, "no error")                                                                     \
    X(cudaErrorInvalidValue, "invalid argument")                                                   \
    X(cudaErrorMemoryAllocation, "out of memory")                                                  \
    X(cudaErrorInitializationError, "initialization error")                                        \
    X(cudaErrorInvalidConfiguration, "invalid configuration argument")                             \
    X(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy")                        \
    X(cudaErrorStubLibrary, "CUDA driver is a stub library")                                       \
    X(cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version") \
    X(cudaErrorInvalidDeviceFunction, "invalid device function")                                   \
    X(cudaErrorDevicesUnavailable, "CUDA-capable device(s) is/are busy or unavailable")            \
    X(cudaErrorNoDevice, "no CUDA-capable device is detected")                                     \
    X(cudaErrorInvalidDevice, "invalid device ordinal")                                            \
    X(cudaErrorInvalidKernelImage, "device kernel image is invalid")                               \
    X(cudaErrorDeviceUninitialized, "invalid device context")                                      \
    X(cudaErrorUnsupportedPtxVersion,                                                              \
      "the provided PTX was compiled with an unsupported toolchain.")                              \
    X(cudaErrorInvalidResourceHandle, "invalid resource handle")                                   \
    X(cudaErrorSymbolNotFound, "named symbol not found")                                           \
    X(cudaErrorNotReady, "device not ready")                                                       \
    X(cudaErrorIllegalAddress, "an illegal memory access was encountered")                         \
    X(cudaErrorLaunchOutOfResources, "too many resources requested for launch")                    \
    X(cudaErrorMisalignedAddress, "misaligned address")                                            \
    X(cudaErrorHostMemoryAlreadyRegistered,                                                        \
      "part or all of the requested memory range is already mapped")                               \
    X(cudaErrorHostMemoryNotRegistered,                                                            \
      "pointer does not correspond to a registered memory region")                                 \
    X(cudaErrorLaunchFailure, "unspecified launch failure")                                        \
    X(cudaErrorNotPermitted, "operation not permitted")                                            \
    X(cudaErrorNotSupported, "operation not supported")                                            \
    X(cudaErrorSystemDriverMismatch,                                                               \
      "system has unsupported display driver / cuda driver combination")                           \
    X(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing")       \
    X(cudaErrorStreamCaptureInvalidated,                                                           \
      "operation failed due to a previous error during capture")                                   \
    X(cudaErrorStreamCaptureMerge,                                                                 \
      "operation would result in a merge of separate capture sequences")                           \
    X(cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began")     \
    X(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work")                        \
    X(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream")  \
    X(cudaErrorStreamCaptureImplicit,                                                              \
      "operation would make the legacy stream depend on a capturing blocking stream")              \
    X(cudaErrorCapturedEvent,                                                                      \
      "operation not permitted on an event last recorded in a capturing stream")                   \
    X(cudaErrorStreamCaptureWrongThread,                                                           \
      "attempt to terminate a thread-local capture sequence from another thread")                  \
    X(cudaErrorUnknown, "unknown error")

const char *cudaGetErrorName(cudaError_t error) {
#define X(code, text) \
    if (error == code) return #code;
    ERRORS(X)
#undef X
    return "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t error) {
#define X(code, text) \
    if (error == code) return text;
    ERRORS(X)
#undef X
    return "unrecognized error code";
}

//------------------------------------------------------------------------------
// streams (called with the lock held, up to the API sections)
//------------------------------------------------------------------------------

static void wait_changed(void) { pthread_cond_wait(&changed, &lock); }

static void drop_work(work *w) {
    if (--w->refs > 0) return;
    if (w->w.drop) w->w.drop(w->w.arg);
    free(w);
}

static work *new_work(fake_work w) {
    work *made = calloc(1, sizeof *made);
    if (!made) abort();
    made->w = w;
    made->refs = 1;
    return made;
}

static void add_work(works *list, work *w) {
    if (list->n == list->capacity) {
        list->capacity = list->capacity ? 2 * list->capacity : 16;
        list->item = realloc(list->item, list->capacity * sizeof *list->item);
        if (!list->item) abort();
    }
    list->item[list->n++] = w;
}

static void drop_works(works *list) {
    for (size_t i = 0; i < list->n; i++) drop_work(list->item[i]);
    free(list->item);
}

// Returns true if an entry must wait. The NULL stream and the blocking streams of a device wait for
// each other's earlier entries.
static bool must_wait(cudaStream_t s, const node *n) {
    if (s->flags & cudaStreamNonBlocking) return false;
    for (cudaStream_t other = streams; other; other = other->next)
        if (other->is_null != s->is_null && other->device == s->device &&
            !(other->flags & cudaStreamNonBlocking) && other->head && other->head->seq < n->seq)
            return true;
    return false;
}

static void unlink_stream(cudaStream_t s) {
    for (cudaStream_t *at = &streams; *at; at = &(*at)->next)
        if (*at == s) {
            *at = s->next;
            break;
        }
    free(s);
}

static void *stream_thread(void *arg) {
    cudaStream_t s = arg;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!s->head && !s->destroyed) wait_changed();
        node *n = s->head;
        if (!n) break;
        while (must_wait(s, n)) wait_changed();
        pthread_mutex_unlock(&lock);
        if (config.delay_us && !n->work->w.instant) usleep(config.delay_us);
        n->work->w.run(n->work->w.arg, n->ticket);
        pthread_mutex_lock(&lock);
        s->head = n->next;
        if (!s->head) s->tail = &s->head;
        drop_work(n->work);
        free(n);
        pthread_cond_broadcast(&changed);
    }
    unlink_stream(s);
    pthread_mutex_unlock(&lock);
    return NULL;
}

static void start_stream(cudaStream_t s) {
    pthread_t thread;
    pthread_attr_t attr;
    sigset_t all, old;
    if (s->started) return;
    s->started = true;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &old);
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&thread, &attr, stream_thread, s) != 0) abort();
    pthread_attr_destroy(&attr);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
}

static void push(cudaStream_t s, work *w) {
    node *n = calloc(1, sizeof *n);
    if (!n) abort();
    n->work = w;
    n->seq = ++sequence;
    n->ticket = w->w.ticket ? w->w.ticket(w->w.arg) : 0;
    *s->tail = n;
    s->tail = &n->next;
    start_stream(s);
    pthread_cond_broadcast(&changed);
}

static void link_stream(cudaStream_t s) {
    s->device = current_device;
    s->tail = &s->head;
    s->next = streams;
    streams = s;
}

static cudaStream_t find_stream(cudaStream_t stream) {
    if (stream == NULL || stream == cudaStreamLegacy) {
        cudaStream_t s = &null_streams[current_device];
        if (!s->is_null) {
            s->is_null = true;
            link_stream(s);
        }
        return s;
    }
    for (cudaStream_t s = streams; s; s = s->next)
        if (s == stream && !s->destroyed) return s;
    if (config.destroyed_ends) {
        fprintf(stderr, "a stream is used that was destroyed\n");
        abort();
    }
    return NULL;
}

static void wait_stream(cudaStream_t s, uint64_t seq) {
    while (s->head && s->head->seq <= seq) wait_changed();
}

static void wait_device(int device) {
    uint64_t seq = sequence;
    for (cudaStream_t s = streams; s;) {
        if (s->device == device && s->head && s->head->seq <= seq) {
            wait_changed();
            s = streams; // the stream may be gone
        } else s = s->next;
    }
}

static cudaError_t spoil(capture *c, cudaError_t error) {
    c->invalid = true;
    return error;
}

// Checks a call such as cudaMalloc, which is not allowed during a capture, by the rules of
// cudaStreamCaptureMode.
static cudaError_t check_unsafe(void) {
    for (cudaStream_t s = streams; s; s = s->next) {
        capture *c = s->capture;
        if (!c || thread_mode == cudaStreamCaptureModeRelaxed) continue;
        if (pthread_equal(c->thread, pthread_self())) {
            if (c->mode != cudaStreamCaptureModeRelaxed)
                return spoil(c, cudaErrorStreamCaptureUnsupported);
        } else if (c->mode == cudaStreamCaptureModeGlobal &&
                   thread_mode == cudaStreamCaptureModeGlobal)
            return spoil(c, cudaErrorStreamCaptureUnsupported);
    }
    return cudaSuccess;
}

// If `s` is the NULL stream, returns a capturing stream that the NULL stream would have to wait
// for. Otherwise, or without such a stream, returns NULL.
static cudaStream_t in_the_way(cudaStream_t s) {
    for (cudaStream_t other = streams; s->is_null && other; other = other->next)
        if (other->capture && other->device == s->device && !(other->flags & cudaStreamNonBlocking))
            return other;
    return NULL;
}
static cudaError_t check_implicit(cudaStream_t s) {
    cudaStream_t other = in_the_way(s);
    return other ? spoil(other->capture, cudaErrorStreamCaptureImplicit) : cudaSuccess;
}

static int count_queued(cudaStream_t s) {
    int count = 0;
    for (const node *n = s->head; n; n = n->next) count++;
    return count;
}

static cudaError_t enqueue(cudaStream_t s, fake_work w) {
    work *made = new_work(w);
    while (config.queue_limit && !s->capture && count_queued(s) >= config.queue_limit)
        wait_changed();
    cudaError_t error =
        s->capture ? (s->capture->invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess)
                   : check_implicit(s);
    if (error) {
        drop_work(made);
    } else if (s->capture) {
        add_work(&s->capture->works, made);
        s->last_step = ++s->capture->n_steps;
    } else push(s, made);
    return error;
}

cudaError_t fake_enqueue(cudaStream_t stream, fake_work w) {
    pthread_mutex_lock(&lock);
    cudaStream_t s = find_stream(stream);
    if (s) return unlock(enqueue(s, w));
    if (w.drop) w.drop(w.arg);
    return unlock(cudaErrorInvalidResourceHandle);
}

//------------------------------------------------------------------------------
// memory
//------------------------------------------------------------------------------

static block *find_block(const void *pointer) {
    uintptr_t at = (uintptr_t)pointer;
    for (block *b = blocks; b; b = b->next)
        if (at >= (uintptr_t)b->base && at - (uintptr_t)b->base < b->size) return b;
    return NULL;
}

static bool on_device(const block *b) {
    return b && (b->kind == BLOCK_DEVICE || b->kind == BLOCK_IMPORTED);
}

static bool inside(const block *b, const void *pointer, size_t nbytes) {
    return nbytes <= b->size - (size_t)((const char *)pointer - b->base);
}

static char *view_of(const block *b, const void *pointer) {
    return b->view + ((const char *)pointer - b->base);
}

void *fake_reach(const void *pointer, size_t nbytes) {
    pthread_mutex_lock(&lock);
    block *b = find_block(pointer);
    void *at = b && inside(b, pointer, nbytes) ? view_of(b, pointer) : NULL;
    pthread_mutex_unlock(&lock);
    return at;
}

bool fake_is_reached(const void *pointer, int device) {
    pthread_mutex_lock(&lock);
    block *b = find_block(pointer);
    cudaMemPool_t pool = b ? b->pool : NULL;
    bool reached = !pool || pool->device == device || pool->reached[device];
    pthread_mutex_unlock(&lock);
    return reached;
}

void fake_break(cudaError_t error) { atomic_store(&broken, (int)error); }

void *fake_host_view(const void *device_pointer) {
    pthread_mutex_lock(&lock);
    block *b = find_block(device_pointer);
    void *at = on_device(b) ? view_of(b, device_pointer) : NULL;
    pthread_mutex_unlock(&lock);
    return at;
}

static void *map(size_t size, int protection, int fd) {
    void *at =
        mmap(NULL, size, protection, fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED, fd, 0);
    return at == MAP_FAILED ? NULL : at;
}

static void drop_pool(cudaMemPool_t pool) {
    bool is_default = pool >= default_pools && pool < default_pools + MAX_DEVICES;
    if (pool && !is_default && --pool->refs == 0) free(pool);
}

static void free_block(block *b) {
    for (block **at = &blocks; *at; at = &(*at)->next)
        if (*at == b) {
            *at = b->next;
            break;
        }
    if (b->kind != BLOCK_REGISTERED && b->base) munmap(b->base, b->size);
    if (on_device(b) && b->view) munmap(b->view, b->size);
    if (b->fd >= 0) close(b->fd);
    drop_pool(b->pool);
    free(b);
}

// Fills fresh memory, so that it does not hold zeros by chance. Large memory is filled at both ends
// only. The arenas of a world of six take 384 MiB, and filling them took longer than the rest of a
// test.
static void fill_fresh(char *memory, size_t size) {
    if (size <= FILL_LIMIT) {
        memset(memory, 0xA5, size);
        return;
    }
    memset(memory, 0xA5, FILL_END);
    memset(memory + size - FILL_END, 0xA5, FILL_END);
}

// Makes a block. `fd` is the descriptor of the exporter's memory, or -1.
static block *new_block(block_kind kind, size_t size, int fd) {
    struct stat st;
    block *b = calloc(1, sizeof *b);
    if (!b) abort();
    b->kind = kind;
    b->size = size;
    b->device = current_device;
    b->bus = config.bus[current_device];
    b->fd = fd;
    b->n_opened = 1;
    if (kind == BLOCK_DEVICE) {
        b->fd = memfd_create("fake-cuda", MFD_CLOEXEC);
        if (b->fd < 0 || ftruncate(b->fd, (off_t)size) != 0) return free_block(b), NULL;
    }
    if (on_device(b)) {
        b->base = map(size, PROT_NONE, b->fd);
        b->view = map(size, PROT_READ | PROT_WRITE, b->fd);
        if (fstat(b->fd, &st) == 0) b->inode = st.st_ino;
    } else b->base = b->view = map(size, PROT_READ | PROT_WRITE, -1);
    if (!b->base || !b->view) return free_block(b), NULL;
    if (kind != BLOCK_IMPORTED) fill_fresh(b->view, size);
    b->next = blocks;
    blocks = b;
    return b;
}

static cudaError_t allocate_anyway(void **pointer, size_t size, block_kind kind) {
    *pointer = NULL;
    if (size == 0) return unlock(cudaSuccess);
    block *b = size < (size_t)1 << 40 ? new_block(kind, size, -1) : NULL;
    if (b) *pointer = b->base;
    return unlock(b ? cudaSuccess : cudaErrorMemoryAllocation);
}

static cudaError_t allocate(void **pointer, size_t size, block_kind kind) {
    pthread_mutex_lock(&lock);
    cudaError_t error = pointer ? check_unsafe() : cudaErrorInvalidValue;
    if (!error && config.alloc_waits) wait_device(current_device);
    return error ? unlock(error) : allocate_anyway(pointer, size, kind);
}

static cudaError_t release(void *pointer, block_kind kind, cudaError_t unknown) {
    pthread_mutex_lock(&lock);
    cudaError_t error = check_unsafe();
    if (error || (!pointer && kind != BLOCK_REGISTERED && kind != BLOCK_IMPORTED))
        return unlock(error);
    block *b = find_block(pointer);
    if (!b || b->kind != kind || b->base != pointer) return unlock(unknown);
    wait_device(b->device);
    b = find_block(pointer); // the lock was released meanwhile
    if (b && --b->n_opened == 0) free_block(b);
    return unlock(cudaSuccess);
}

fake_traffic fake_traffic_now(void) {
    fake_traffic t = {atomic_load(&n_read), atomic_load(&n_written)};
    return t;
}

// A copy, or a memset if src is NULL.
typedef struct copy {
    char *dst;
    const char *src;
    // n_read and n_written count bytes of device memory.
    size_t nbytes, n_read, n_written;
    int value;
    bool between_devices;
    char captured[];
} copy;

static void run_copy(void *arg, uint64_t ticket) {
    copy *c = arg;
    (void)ticket;
    while (c->between_devices && config.stuck_peers) pause();
    if (c->between_devices && config.corrupt_peers) memset(c->dst, 0xff, c->nbytes);
    else if (c->src) memmove(c->dst, c->src, c->nbytes);
    else memset(c->dst, c->value, c->nbytes);
    atomic_fetch_add(&n_read, c->n_read);
    atomic_fetch_add(&n_written, c->n_written);
}

static copy *new_copy(char *dst, const char *src, size_t nbytes, bool capture_source) {
    copy *c = calloc(1, sizeof *c + (capture_source ? nbytes : 0));
    if (!c) abort();
    *c = (copy){.dst = dst, .src = capture_source ? c->captured : src, .nbytes = nbytes};
    if (capture_source) memcpy(c->captured, src, nbytes);
    return c;
}

static cudaError_t check_direction(const block *dst, const block *src, enum cudaMemcpyKind kind) {
    if ((int)kind < 0 || kind > cudaMemcpyDefault) return cudaErrorInvalidMemcpyDirection;
    if (kind == cudaMemcpyDefault) return cudaSuccess;
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    return to_device == on_device(dst) && from_device == on_device(src) ? cudaSuccess
                                                                        : cudaErrorInvalidValue;
}

static cudaError_t copy_on(cudaStream_t stream, void *dst, const void *src, size_t nbytes,
                           enum cudaMemcpyKind kind, bool sync) {
    cudaStream_t s = find_stream(stream);
    if (!s) return cudaErrorInvalidResourceHandle;
    block *to = find_block(dst), *from = find_block(src);
    cudaError_t error = check_direction(to, from, kind);
    if (error || nbytes == 0) return error;
    if (!dst || !src || (to && !inside(to, dst, nbytes)) || (from && !inside(from, src, nbytes)))
        return cudaErrorInvalidValue;
    bool captured = !from && on_device(to), pinned_to_host = to && !on_device(to);
    bool blocks_host = !to || (!from && pinned_to_host) ||
                       (sync && !captured && !(on_device(to) && on_device(from)));
    if (s->capture && (captured || blocks_host))
        return spoil(s->capture, cudaErrorStreamCaptureUnsupported);
    if (captured && (sync || nbytes > CAPTURED_AT_ONCE)) wait_stream(s, sequence);
    copy *c =
        new_copy(to ? view_of(to, dst) : dst, from ? view_of(from, src) : src, nbytes, captured);
    if (on_device(from)) c->n_read = nbytes;
    if (on_device(to)) c->n_written = nbytes;
    c->between_devices = on_device(to) && on_device(from) && to->bus != from->bus;
    error = enqueue(s, (fake_work){run_copy, NULL, free, c, false});
    if (!error && blocks_host) wait_stream(s, sequence);
    return error;
}

static cudaError_t set_on(cudaStream_t stream, void *dst, int value, size_t nbytes, bool sync) {
    cudaStream_t s = find_stream(stream);
    if (!s) return cudaErrorInvalidResourceHandle;
    block *to = find_block(dst);
    if (nbytes == 0) return cudaSuccess;
    if (!to || !inside(to, dst, nbytes)) return cudaErrorInvalidValue;
    copy *c = new_copy(view_of(to, dst), NULL, nbytes, false);
    c->value = value;
    if (on_device(to)) c->n_written = nbytes;
    cudaError_t error = enqueue(s, (fake_work){run_copy, NULL, free, c, false});
    if (!error && sync && !on_device(to)) wait_stream(s, sequence);
    return error;
}

//------------------------------------------------------------------------------
// API: memory
//------------------------------------------------------------------------------

cudaError_t cudaMalloc(void **pointer, size_t size) {
    ENTER();
    if (config.alloc_us) usleep(config.alloc_us);
    return allocate(pointer, size, BLOCK_DEVICE);
}

cudaError_t cudaMallocHost(void **pointer, size_t size) {
    ENTER();
    return allocate(pointer, size, BLOCK_PINNED);
}

cudaError_t cudaFree(void *pointer) {
    ENTER();
    return release(pointer, BLOCK_DEVICE, cudaErrorInvalidValue);
}

cudaError_t cudaFreeHost(void *pointer) {
    ENTER();
    return release(pointer, BLOCK_PINNED, cudaErrorInvalidValue);
}

cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags) {
    ENTER();
    (void)flags;
    REQUIRE(pointer && size, cudaErrorInvalidValue);
    pthread_mutex_lock(&lock);
    cudaError_t error = check_unsafe();
    if (error) return unlock(error);
    if (config.alloc_waits) wait_device(current_device);
    uintptr_t at = (uintptr_t)pointer;
    for (block *b = blocks; b; b = b->next)
        if (at < (uintptr_t)b->base + b->size && (uintptr_t)b->base < at + size)
            return unlock(cudaErrorHostMemoryAlreadyRegistered);
    block *b = calloc(1, sizeof *b);
    if (!b) abort();
    *b = (block){blocks, BLOCK_REGISTERED, pointer, pointer, size, current_device, -1, 1, 0, 0,
                 NULL};
    blocks = b;
    return unlock(cudaSuccess);
}

cudaError_t cudaHostUnregister(void *pointer) {
    ENTER();
    REQUIRE(pointer, cudaErrorInvalidValue);
    return release(pointer, BLOCK_REGISTERED, cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t nbytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
    ENTER();
    pthread_mutex_lock(&lock);
    return unlock(copy_on(stream, dst, src, nbytes, kind, false));
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t nbytes, enum cudaMemcpyKind kind) {
    ENTER();
    pthread_mutex_lock(&lock);
    cudaError_t error = check_unsafe();
    return unlock(error ? error : copy_on(NULL, dst, src, nbytes, kind, true));
}

cudaError_t cudaMemsetAsync(void *pointer, int value, size_t nbytes, cudaStream_t stream) {
    ENTER();
    pthread_mutex_lock(&lock);
    return unlock(set_on(stream, pointer, value, nbytes, false));
}

cudaError_t cudaMemset(void *pointer, int value, size_t nbytes) {
    ENTER();
    pthread_mutex_lock(&lock);
    cudaError_t error = check_unsafe();
    return unlock(error ? error : set_on(NULL, pointer, value, nbytes, true));
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes,
                                     const void *pointer) {
    ENTER();
    REQUIRE(attributes, cudaErrorInvalidValue);
    pthread_mutex_lock(&lock);
    block *b = find_block(pointer);
    memset(attributes, 0, sizeof *attributes);
    attributes->type = on_device(b) ? cudaMemoryTypeDevice
                       : b          ? cudaMemoryTypeHost
                                    : cudaMemoryTypeUnregistered;
    attributes->device = b ? b->device : -2;
    attributes->devicePointer = b ? (void *)(uintptr_t)pointer : NULL;
    attributes->hostPointer = on_device(b) ? NULL : (void *)(uintptr_t)pointer;
    return unlock(cudaSuccess);
}

//------------------------------------------------------------------------------
// API: devices
//------------------------------------------------------------------------------

cudaError_t cudaRuntimeGetVersion(int *version) {
    if (!version) return result(cudaErrorInvalidValue);
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    if (!version) return result(cudaErrorInvalidValue);
    *version = fake_enter(__func__) != cudaErrorInsufficientDriver ? CUDART_VERSION
               : config.n_devices == -1                            ? 0
                                                                   : 11040;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count) {
    ENTER();
    REQUIRE(count, cudaErrorInvalidValue);
    *count = config.n_devices;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    ENTER();
    REQUIRE(device >= 0 && device < config.n_devices, cudaErrorInvalidDevice);
    current_device = device;
    atomic_store(&contexts[device], true);
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
    ENTER();
    REQUIRE(device, cudaErrorInvalidValue);
    *device = current_device;
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
    ENTER();
    pthread_mutex_lock(&lock);
    cudaError_t error = check_unsafe();
    if (!error) wait_device(current_device);
    return unlock(error);
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int nbytes, int device) {
    ENTER();
    REQUIRE(device >= 0 && device < config.n_devices, cudaErrorInvalidDevice);
    REQUIRE(text && nbytes >= 13, cudaErrorInvalidValue);
    snprintf(text, (size_t)nbytes, "0000:%02X:00.0", (unsigned)config.bus[device] & 0xffu);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    ENTER();
    REQUIRE(device >= 0 && device < config.n_devices, cudaErrorInvalidDevice);
    REQUIRE(value, cudaErrorInvalidValue);
    *value = attribute == cudaDevAttrComputeCapabilityMajor ? config.major[device] : 0;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    ENTER();
    REQUIRE(device >= 0 && device < config.n_devices, cudaErrorInvalidDevice);
    REQUIRE(properties, cudaErrorInvalidValue);
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "fake GPU %d", config.bus[device] - 0x10);
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    ENTER();
    REQUIRE(can, cudaErrorInvalidValue);
    REQUIRE(device >= 0 && device < config.n_devices && peer >= 0 && peer < config.n_devices,
            cudaErrorInvalidDevice);
    *can = device != peer;
    return cudaSuccess;
}

// Only checks the arguments, because here every device can access all memory.
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    ENTER();
    REQUIRE(peer >= 0 && peer < config.n_devices && peer != current_device && flags == 0,
            cudaErrorInvalidDevice);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    ENTER();
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}

//------------------------------------------------------------------------------
// API: streams
//------------------------------------------------------------------------------

static cudaError_t create_stream(cudaStream_t *stream, unsigned flags, int priority) {
    REQUIRE(stream && !(flags & ~(unsigned)cudaStreamNonBlocking), cudaErrorInvalidValue);
    cudaStream_t s = calloc(1, sizeof *s);
    if (!s) abort();
    s->flags = flags;
    s->priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
    pthread_mutex_lock(&lock);
    link_stream(s);
    pthread_mutex_unlock(&lock);
    *stream = s;
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    ENTER();
    return create_stream(stream, cudaStreamDefault, 0);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    ENTER();
    return create_stream(stream, flags, 0);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    ENTER();
    return create_stream(stream, flags, priority);
}

int fake_count_streams(int priority) {
    int n = 0;
    pthread_mutex_lock(&lock);
    for (cudaStream_t s = streams; s; s = s->next)
        n += !s->is_null && !s->destroyed && s->priority == priority;
    pthread_mutex_unlock(&lock);
    return n;
}

int fake_count_queued(cudaStream_t stream) {
    pthread_mutex_lock(&lock);
    cudaStream_t s = find_stream(stream);
    int count = s ? count_queued(s) : 0;
    pthread_mutex_unlock(&lock);
    return count;
}

// Returns at once. The stream's thread ends when the queue is empty.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    ENTER();
    pthread_mutex_lock(&lock);
    cudaStream_t s = find_stream(stream);
    if (!s || s->is_null) return unlock(cudaErrorInvalidResourceHandle);
    if (s->capture) return unlock(spoil(s->capture, cudaErrorStreamCaptureUnsupported));
    s->destroyed = true;
    if (!s->started) unlink_stream(s);
    pthread_cond_broadcast(&changed);
    return unlock(cudaSuccess);
}

// Checks a call that waits for a stream or queries it. Such calls are not allowed during a capture.
static cudaError_t check_waitable(cudaStream_t s) {
    if (!s) return cudaErrorInvalidResourceHandle;
    if (s->capture) return spoil(s->capture, cudaErrorStreamCaptureUnsupported);
    cudaError_t error = check_implicit(s);
    return error ? error : check_unsafe();
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    ENTER();
    pthread_mutex_lock(&lock);
    cudaStream_t s = find_stream(stream);
    cudaError_t error = check_waitable(s);
    if (!error) wait_stream(s, sequence);
    return unlock(error);
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    ENTER();
    pthread_mutex_lock(&lock);
    cudaStream_t s = find_stream(stream);
    cudaError_t error = check_waitable(s);
    return unlock(error ? error : s->head ? cudaErrorNotReady : cudaSuccess);
}

typedef struct host_call {
    cudaHostFn_t function;
    void *data;
} host_call;

static void run_host_call(void *arg, uint64_t ticket) {
    host_call *call = arg;
    (void)ticket;
    call->function(call->data);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    ENTER();
    REQUIRE(function, cudaErrorInvalidValue);
    host_call *call = calloc(1, sizeof *call);
    if (!call) abort();
    *call = (host_call){function, data};
    return fake_enqueue(stream, (fake_work){run_host_call, NULL, free, call, false});
}

// Allocates memory in stream order. Here the memory exists at once, and is freed when the stream
// reaches the call that frees it. Memory that a graph allocated stays. A NULL pool means the
// default pool.
static cudaError_t allocate_in_order(void **pointer, size_t size, cudaMemPool_t pool,
                                     cudaStream_t stream) {
    pthread_mutex_lock(&lock);
    cudaStream_t s = find_stream(stream);
    *pointer = NULL;
    if (!s) return unlock(cudaErrorInvalidResourceHandle);
    if (s->capture && s->capture->invalid) return unlock(cudaErrorStreamCaptureInvalidated);
    if (!pool) {
        pool = &default_pools[s->device];
        pool->device = s->device;
    }
    block *b = size && size < (size_t)1 << 40 ? new_block(BLOCK_DEVICE, size, -1) : NULL;
    if (!b) return unlock(size ? cudaErrorMemoryAllocation : cudaSuccess);
    b->pool = pool;
    pool->refs++;
    *pointer = b->base;
    return unlock(cudaSuccess);
}

cudaError_t cudaMallocAsync(void **pointer, size_t size, cudaStream_t stream) {
    ENTER();
    REQUIRE(pointer, cudaErrorInvalidValue);
    return allocate_in_order(pointer, size, NULL, stream);
}

cudaError_t cudaMallocFromPoolAsync(void **pointer, size_t size, cudaMemPool_t pool,
                                    cudaStream_t stream) {
    ENTER();
    REQUIRE(pointer && pool, cudaErrorInvalidValue);
    return allocate_in_order(pointer, size, pool, stream);
}

static bool is_device(const struct cudaMemLocation *at) {
    return at->type == cudaMemLocationTypeDevice && at->id >= 0 && at->id < config.n_devices;
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t *pool, const struct cudaMemPoolProps *props) {
    ENTER();
    REQUIRE(pool && props && props->allocType == cudaMemAllocationTypePinned &&
                is_device(&props->location),
            cudaErrorInvalidValue);
    cudaMemPool_t made = calloc(1, sizeof *made);
    if (!made) abort();
    made->refs = 1;
    made->device = props->location.id;
    *pool = made;
    return cudaSuccess;
}

// Memory allocated from the pool stays until it is freed.
cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
    ENTER();
    REQUIRE(pool, cudaErrorInvalidValue);
    pthread_mutex_lock(&lock);
    drop_pool(pool);
    return unlock(cudaSuccess);
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc *list,
                                 size_t count) {
    ENTER();
    REQUIRE(pool && (list || !count), cudaErrorInvalidValue);
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < count; i++) {
        if (!is_device(&list[i].location)) return unlock(cudaErrorInvalidDevice);
        if (list[i].location.id == pool->device) return unlock(cudaErrorInvalidValue);
        pool->reached[list[i].location.id] = list[i].flags == cudaMemAccessFlagsProtReadWrite;
    }
    return unlock(cudaSuccess);
}

static void run_free(void *arg, uint64_t ticket) {
    (void)ticket;
    pthread_mutex_lock(&lock);
    block *b = find_block(arg);
    if (b) free_block(b);
    pthread_mutex_unlock(&lock);
}

cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) {
    ENTER();
    if (!pointer) return cudaSuccess;
    REQUIRE(fake_host_view(pointer), cudaErrorInvalidValue);
    pthread_mutex_lock(&lock);
    cudaStream_t s = find_stream(stream);
    bool stays = s && s->capture;
    pthread_mutex_unlock(&lock);
    if (stays) return cudaSuccess;
    return fake_enqueue(stream, (fake_work){run_free, NULL, NULL, pointer, true});
}

//------------------------------------------------------------------------------
// API: events
//------------------------------------------------------------------------------

// One record of an event.
typedef struct moment {
    cudaEvent_t event;
    uint64_t n;
} moment;

static void drop_event(cudaEvent_t e) {
    if (--e->refs > 0) return;
    free(e);
}

static void drop_moment(void *arg) {
    moment *m = arg;
    drop_event(m->event);
    free(m);
}

static bool has_passed(cudaEvent_t e, uint64_t n) { return n == 0 || e->done[n % MARKS] >= n; }

static void wait_event(cudaEvent_t e, uint64_t n) {
    while (!has_passed(e, n)) wait_changed();
}

static void run_record(void *arg, uint64_t ticket) {
    moment *m = arg;
    (void)ticket;
    pthread_mutex_lock(&lock);
    m->event->done[m->n % MARKS] = m->n;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static void run_wait(void *arg, uint64_t ticket) {
    moment *m = arg;
    (void)ticket;
    pthread_mutex_lock(&lock);
    wait_event(m->event, m->n);
    pthread_mutex_unlock(&lock);
}

static cudaError_t enqueue_moment(cudaStream_t s, cudaEvent_t e, uint64_t n,
                                  void (*run)(void *, uint64_t)) {
    moment *m = calloc(1, sizeof *m);
    if (!m) abort();
    *m = (moment){e, n};
    e->refs++;
    return enqueue(s, (fake_work){run, NULL, drop_moment, m, true});
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    ENTER();
    REQUIRE(event && !(flags & ~(unsigned)cudaEventDisableTiming), cudaErrorInvalidValue);
    cudaEvent_t e = calloc(1, sizeof *e);
    if (!e) abort();
    e->refs = 1;
    e->device = current_device;
    *event = e;
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    ENTER();
    REQUIRE(event, cudaErrorInvalidResourceHandle);
    pthread_mutex_lock(&lock);
    drop_event(event);
    return unlock(cudaSuccess);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    ENTER();
    pthread_mutex_lock(&lock);
    cudaStream_t s = find_stream(stream);
    if (!s || !event || event->device != s->device) return unlock(cudaErrorInvalidResourceHandle);
    if (s->capture) {
        if (s->capture->invalid) return unlock(cudaErrorStreamCaptureInvalidated);
        event->capture_id = s->capture->id;
        event->capture_step = s->capture->n_steps;
        event->capture_stream = s;
        return unlock(cudaSuccess);
    }
    cudaError_t error = check_implicit(s);
    if (error) return unlock(error);
    event->capture_id = 0;
    return unlock(enqueue_moment(s, event, ++event->recorded, run_record));
}

static capture *find_capture(uint64_t id) {
    for (cudaStream_t s = streams; s; s = s->next)
        if (s->capture && s->capture->id == id) return s->capture;
    return NULL;
}

// Handles a wait for an event that was recorded in a capture. The stream becomes part of the
// capture, or joins the stream that it forked from.
static cudaError_t join_capture(cudaStream_t s, cudaEvent_t event) {
    capture *c = find_capture(event->capture_id);
    if (!c) return cudaErrorCapturedEvent;
    if (c->invalid) return cudaErrorStreamCaptureInvalidated;
    if (s->is_null) return spoil(c, cudaErrorStreamCaptureImplicit);
    if (s->capture && s->capture != c)
        return spoil(s->capture, spoil(c, cudaErrorStreamCaptureMerge));
    if (!s->capture) {
        s->capture = c;
        s->last_step = ++c->n_steps;
        s->joined_step = 0;
    }
    if (s != event->capture_stream) event->capture_stream->joined_step = event->capture_step;
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    ENTER();
    REQUIRE(flags == 0, cudaErrorInvalidValue);
    pthread_mutex_lock(&lock);
    cudaStream_t s = find_stream(stream);
    if (!s || !event) return unlock(cudaErrorInvalidResourceHandle);
    if (event->capture_id) return unlock(join_capture(s, event));
    uint64_t n = event->recorded;
    if (n == 0) return unlock(cudaSuccess);
    if (s->capture) return unlock(spoil(s->capture, cudaErrorStreamCaptureIsolation));
    return unlock(enqueue_moment(s, event, n, run_wait));
}

static cudaError_t check_event(cudaEvent_t event) {
    if (!event) return cudaErrorInvalidResourceHandle;
    if (event->capture_id) {
        capture *c = find_capture(event->capture_id);
        return c ? spoil(c, cudaErrorCapturedEvent) : cudaErrorCapturedEvent;
    }
    return check_unsafe();
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    ENTER();
    pthread_mutex_lock(&lock);
    cudaError_t error = check_event(event);
    if (!error && !has_passed(event, event->recorded)) error = cudaErrorNotReady;
    return unlock(error);
}

//------------------------------------------------------------------------------
// API: kernels
//------------------------------------------------------------------------------

enum {
    N_REDUCE = 4,
    N_KERNELS = 5,
    // Number of threads per block, which is the kernels' launch bound.
    KERNEL_THREADS = 512
};

struct CUkern_st {
    bool found, loaded;
};
struct CUlib_st {
    struct CUlib_st *next;
    struct CUkern_st kernels[N_KERNELS];
};
static cudaLibrary_t libraries;

static const struct {
    const char *name;
    size_t size; // size of an element that is reduced
    void (*reduce)(idist_reduce_args args, idist_reduce_size first, idist_reduce_size step);
    void (*pack)(idist_pack_args args, idist_reduce_size first, idist_reduce_size step);
} kernels[N_KERNELS] = {{"idist_reduce_f32", 4, idist_reduce_f32, NULL},
                        {"idist_reduce_f64", 8, idist_reduce_f64, NULL},
                        {"idist_reduce_f16", 2, idist_reduce_f16, NULL},
                        {"idist_reduce_bf16", 2, idist_reduce_bf16, NULL},
                        {"idist_pack_halves", 0, NULL, idist_pack_halves}};

typedef struct launch {
    int which, bus;
    uint64_t n_threads;
    union {
        idist_reduce_args reduce;
        idist_pack_args pack;
    } args;
} launch;

// Replaces a kernel operand with the address that a stream's thread can access.
static cudaError_t reach_operand(const void **pointer, uint64_t count, size_t size,
                                 size_t alignment) {
    if ((uintptr_t)*pointer % alignment) return cudaErrorMisalignedAddress;
    *pointer = count <= SIZE_MAX / size ? fake_reach(*pointer, (size_t)count * size) : NULL;
    return *pointer ? cudaSuccess : cudaErrorIllegalAddress;
}

static bool is_elsewhere(const launch *l, const void *pointer) {
    pthread_mutex_lock(&lock);
    block *b = find_block(pointer);
    bool elsewhere = on_device(b) && b->bus != l->bus;
    pthread_mutex_unlock(&lock);
    return elsewhere;
}

static cudaError_t run_reduce(const launch *l) {
    idist_reduce_args a = l->args.reduce;
    const void *out = a.out, *also = a.also;
    size_t size = kernels[l->which].size;
    void *ones = NULL; // data that arrives from another device, if corrupted
    if (a.count == 0) return cudaSuccess;
    cudaError_t error =
        a.n >= 1 && a.n <= 16 ? reach_operand(&out, a.count, size, size) : cudaErrorIllegalAddress;
    if (!error && also) error = reach_operand(&also, a.count, size, size);
    for (int k = 0; !error && k < a.n; k++) {
        bool corrupt = config.corrupt_peers && is_elsewhere(l, a.in[k]);
        error = reach_operand(&a.in[k], a.count, size, size);
        if (error || !corrupt) continue;
        if (!ones && (ones = malloc((size_t)a.count * size)) == NULL) abort();
        a.in[k] = memset(ones, 0xff, (size_t)a.count * size);
    }
    if (!error) {
        a.out = (void *)(uintptr_t)out;
        a.also = (void *)(uintptr_t)also;
        for (uint64_t i = 0; i < l->n_threads; i++) kernels[l->which].reduce(a, i, l->n_threads);
        atomic_fetch_add(&n_read, (uint64_t)a.count * size * (unsigned)a.n);
        atomic_fetch_add(&n_written, (also ? 2 : 1) * a.count * size);
    }
    free(ones);
    return error;
}

static cudaError_t run_pack(const launch *l) {
    idist_pack_args a = l->args.pack;
    bool widens = a.op >= IDIST_UNPACK_F16;
    size_t from = widens ? 2 : 4, to = widens ? 4 : 2; // bytes per element
    const void *out = a.out;
    if (a.count == 0) return cudaSuccess;
    cudaError_t error = reach_operand(&a.in, a.count, from, from);
    if (!error) error = reach_operand(&out, a.count, to, to);
    if (error) return error;
    a.out = (void *)(uintptr_t)out;
    for (uint64_t i = 0; i < l->n_threads; i++) kernels[l->which].pack(a, i, l->n_threads);
    return cudaSuccess;
}

static void run_kernel(void *arg, uint64_t ticket) {
    const launch *l = arg;
    cudaError_t error = l->which < N_REDUCE ? run_reduce(l) : run_pack(l);
    (void)ticket;
    if (error) atomic_store(&broken, (int)error);
}

cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *code, enum cudaJitOption *jit,
                                void **jit_values, unsigned n_jit, enum cudaLibraryOption *options,
                                void **values, unsigned n_options) {
    ENTER();
    char entry[64];
    REQUIRE(library && code, cudaErrorInvalidValue);
    REQUIRE((!n_jit || (jit && jit_values)) && (!n_options || (options && values)),
            cudaErrorInvalidValue);
    REQUIRE(strncmp(code, ".version ", 9) == 0, cudaErrorInvalidKernelImage);
    pthread_mutex_lock(&lock);
    cudaError_t error = check_unsafe();
    if (error) return unlock(error);
    cudaLibrary_t made = calloc(1, sizeof *made);
    if (!made) abort();
    for (int i = 0; i < N_KERNELS; i++) {
        snprintf(entry, sizeof entry, ".entry %s(", kernels[i].name);
        made->kernels[i].found = strstr(code, entry) != NULL;
    }
    made->next = libraries;
    *library = libraries = made;
    return unlock(cudaSuccess);
}

static cudaLibrary_t *find_library(cudaLibrary_t library) {
    cudaLibrary_t *at = &libraries;
    while (*at && *at != library) at = &(*at)->next;
    return at;
}

cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name) {
    ENTER();
    REQUIRE(kernel && name, cudaErrorInvalidValue);
    pthread_mutex_lock(&lock);
    cudaLibrary_t found = *find_library(library);
    if (!found) return unlock(cudaErrorInvalidResourceHandle);
    for (int i = 0; i < N_KERNELS; i++) {
        if (!found->kernels[i].found || strcmp(kernels[i].name, name) != 0) continue;
        *kernel = &found->kernels[i];
        return unlock(cudaSuccess);
    }
    return unlock(cudaErrorSymbolNotFound);
}

cudaError_t cudaLibraryUnload(cudaLibrary_t library) {
    ENTER();
    pthread_mutex_lock(&lock);
    cudaLibrary_t *at = find_library(library);
    if (!*at) return unlock(cudaErrorInvalidResourceHandle);
    *at = library->next;
    free(library);
    return unlock(cudaSuccess);
}

static struct CUkern_st *find_kernel(const void *function, int *which) {
    for (cudaLibrary_t l = libraries; l; l = l->next)
        for (*which = 0; *which < N_KERNELS; ++*which)
            if (function == &l->kernels[*which]) return &l->kernels[*which];
    return NULL;
}

static cudaError_t load_kernel(struct CUkern_st *kernel) {
    if (kernel->loaded) return cudaSuccess;
    wait_device(current_device);
    if (config.jit_ms) {
        pthread_mutex_unlock(&lock);
        usleep(config.jit_ms * 1000);
        pthread_mutex_lock(&lock);
    }
    if (config.jit_code) return (cudaError_t)config.jit_code;
    kernel->loaded = true;
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    ENTER();
    int which;
    REQUIRE(attributes, cudaErrorInvalidValue);
    pthread_mutex_lock(&lock);
    struct CUkern_st *kernel = find_kernel(function, &which);
    if (!kernel) return unlock(cudaErrorInvalidDeviceFunction);
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = KERNEL_THREADS;
    return unlock(load_kernel(kernel));
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 threads, void **args,
                             size_t shared, cudaStream_t stream) {
    ENTER();
    unsigned limit = 1024;
    REQUIRE(args && args[0], cudaErrorInvalidValue);
    REQUIRE(grid.x && grid.y && grid.z && threads.x && threads.y && threads.z,
            cudaErrorInvalidConfiguration);
    REQUIRE(grid.x <= INT32_MAX && threads.x <= limit && threads.y <= limit && threads.z <= 64,
            cudaErrorInvalidConfiguration);
    REQUIRE(threads.x * threads.y * threads.z <= limit && shared <= 48 << 10,
            cudaErrorInvalidConfiguration);
    REQUIRE(threads.x * threads.y * threads.z <= KERNEL_THREADS, cudaErrorLaunchOutOfResources);
    REQUIRE(grid.y == 1 && grid.z == 1 && threads.y == 1 && threads.z == 1, cudaErrorNotSupported);
    pthread_mutex_lock(&lock);
    cudaStream_t s = find_stream(stream);
    int which;
    struct CUkern_st *kernel = find_kernel(function, &which);
    if (!kernel) return unlock(cudaErrorInvalidDeviceFunction);
    if (!s) return unlock(cudaErrorInvalidResourceHandle);
    cudaError_t error = load_kernel(kernel);
    if (error) return unlock(error);
    launch *l = calloc(1, sizeof *l);
    if (!l) abort();
    *l = (launch){.which = which,
                  .bus = config.bus[s->device],
                  .n_threads = (uint64_t)grid.x * threads.x};
    if (which < N_REDUCE) memcpy(&l->args.reduce, args[0], sizeof l->args.reduce);
    else memcpy(&l->args.pack, args[0], sizeof l->args.pack);
    return unlock(enqueue(s, (fake_work){run_kernel, NULL, free, l, false}));
}

//------------------------------------------------------------------------------
// API: capture and graphs
//------------------------------------------------------------------------------

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    ENTER();
    REQUIRE(mode && (int)*mode >= 0 && *mode <= cudaStreamCaptureModeRelaxed,
            cudaErrorInvalidValue);
    enum cudaStreamCaptureMode old = thread_mode;
    thread_mode = *mode;
    *mode = old;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    ENTER();
    REQUIRE((int)mode >= 0 && mode <= cudaStreamCaptureModeRelaxed, cudaErrorInvalidValue);
    pthread_mutex_lock(&lock);
    cudaStream_t s = find_stream(stream);
    if (!s) return unlock(cudaErrorInvalidResourceHandle);
    if (s->is_null) return unlock(cudaErrorStreamCaptureUnsupported);
    if (s->capture) return unlock(cudaErrorIllegalState);
    s->capture = calloc(1, sizeof *s->capture);
    if (!s->capture) abort();
    *s->capture =
        (capture){.id = ++n_captures, .origin = s, .thread = pthread_self(), .mode = mode};
    return unlock(cudaSuccess);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    ENTER();
    REQUIRE(status, cudaErrorInvalidValue);
    pthread_mutex_lock(&lock);
    cudaStream_t s = find_stream(stream);
    if (!s) return unlock(cudaErrorInvalidResourceHandle);
    if (in_the_way(s)) return unlock(cudaErrorStreamCaptureImplicit); // asking is harmless
    *status = !s->capture           ? cudaStreamCaptureStatusNone
              : s->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                    : cudaStreamCaptureStatusActive;
    return unlock(cudaSuccess);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    ENTER();
    REQUIRE(graph, cudaErrorInvalidValue);
    *graph = NULL;
    pthread_mutex_lock(&lock);
    cudaStream_t s = find_stream(stream);
    if (!s) return unlock(cudaErrorInvalidResourceHandle);
    capture *c = s->capture;
    if (!c) return unlock(cudaErrorIllegalState);
    if (c->origin != s) return unlock(spoil(c, cudaErrorStreamCaptureUnmatched));
    if (c->mode != cudaStreamCaptureModeRelaxed && !pthread_equal(c->thread, pthread_self()))
        return unlock(cudaErrorStreamCaptureWrongThread);
    cudaError_t error = c->invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
    for (cudaStream_t other = streams; other; other = other->next) {
        if (other->capture != c) continue;
        if (other != s && other->joined_step < other->last_step && !error)
            error = cudaErrorStreamCaptureUnjoined;
        other->capture = NULL;
    }
    if (error) {
        drop_works(&c->works);
    } else {
        *graph = calloc(1, sizeof **graph);
        if (!*graph) abort();
        (*graph)->works = c->works;
    }
    free(c);
    return unlock(error);
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph,
                                 unsigned long long flags) {
    ENTER();
    (void)flags;
    REQUIRE(exec && graph, cudaErrorInvalidValue);
    cudaGraphExec_t made = calloc(1, sizeof *made);
    if (!made) abort();
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < graph->works.n; i++) {
        graph->works.item[i]->refs++;
        add_work(&made->works, graph->works.item[i]);
    }
    *exec = made;
    return unlock(cudaSuccess);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    ENTER();
    REQUIRE(exec, cudaErrorInvalidValue);
    pthread_mutex_lock(&lock);
    cudaStream_t s = find_stream(stream);
    if (!s) return unlock(cudaErrorInvalidResourceHandle);
    if (s->capture) return unlock(spoil(s->capture, cudaErrorStreamCaptureUnsupported));
    cudaError_t error = check_implicit(s);
    for (size_t i = 0; !error && i < exec->works.n; i++) {
        exec->works.item[i]->refs++;
        push(s, exec->works.item[i]);
    }
    return unlock(error);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    ENTER();
    REQUIRE(exec, cudaErrorInvalidValue);
    pthread_mutex_lock(&lock);
    drop_works(&exec->works);
    free(exec);
    return unlock(cudaSuccess);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    ENTER();
    REQUIRE(graph, cudaErrorInvalidValue);
    pthread_mutex_lock(&lock);
    drop_works(&graph->works);
    free(graph);
    return unlock(cudaSuccess);
}

//------------------------------------------------------------------------------
// API: memory of another process
//------------------------------------------------------------------------------

_Static_assert(sizeof(ipc_handle) <= sizeof(cudaIpcMemHandle_t), "a handle holds what we need");

// Opens the exporter's memfd. Returns a descriptor, or -1.
static int open_exported(const ipc_handle *h) {
    char path[64];
    struct stat st;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", h->pid, h->fd);
    int fd = h->magic == IPC_MAGIC ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return -1;
    if (fstat(fd, &st) == 0 && st.st_ino == h->inode && (uint64_t)st.st_size == h->size) return fd;
    close(fd);
    return -1;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer) {
    ENTER();
    REQUIRE(handle, cudaErrorInvalidValue);
    pthread_mutex_lock(&lock);
    block *b = find_block(pointer);
    if (!b || b->kind != BLOCK_DEVICE) return unlock(cudaErrorInvalidValue);
    ipc_handle h = {IPC_MAGIC, b->inode, b->size, getpid(), b->fd, b->bus};
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &h, sizeof h);
    return unlock(cudaSuccess);
}

cudaError_t cudaIpcOpenMemHandle(void **pointer, cudaIpcMemHandle_t handle, unsigned flags) {
    ENTER();
    ipc_handle h;
    memcpy(&h, &handle, sizeof h);
    REQUIRE(pointer && flags == cudaIpcMemLazyEnablePeerAccess && h.magic == IPC_MAGIC,
            cudaErrorInvalidValue);
    REQUIRE(h.pid != getpid(), cudaErrorDeviceUninitialized);
    pthread_mutex_lock(&lock);
    cudaError_t error = check_unsafe();
    if (error) return unlock(error);
    for (block *b = blocks; b; b = b->next)
        if (b->kind == BLOCK_IMPORTED && b->inode == h.inode) {
            b->n_opened++;
            *pointer = b->base;
            return unlock(cudaSuccess);
        }
    int fd = open_exported(&h);
    block *b = fd >= 0 ? new_block(BLOCK_IMPORTED, (size_t)h.size, fd) : NULL;
    if (b) *pointer = b->base;
    if (b) b->bus = h.bus;
    return unlock(b ? cudaSuccess : cudaErrorInvalidResourceHandle);
}

// Returns true if an operation of a stream reads this memory of another process.
static bool is_read_by(const work *w, const block *b) {
    if (w->w.run == run_copy) {
        const char *from = ((const copy *)w->w.arg)->src;
        return from >= b->view && from < b->view + b->size;
    }
    if (w->w.run != run_kernel || ((const launch *)w->w.arg)->which >= N_REDUCE) return false;
    const idist_reduce_args *a = &((const launch *)w->w.arg)->args.reduce;
    for (int k = 0; k < a->n && k < 16; k++) {
        const char *from = a->in[k];
        if (from >= b->base && from < b->base + b->size) return true;
    }
    return false;
}

static bool is_in_use(const block *b) {
    for (cudaStream_t s = streams; s; s = s->next)
        for (const node *n = s->head; n; n = n->next)
            if (is_read_by(n->work, b)) return true;
    return false;
}

cudaError_t cudaIpcCloseMemHandle(void *pointer) {
    ENTER();
    pthread_mutex_lock(&lock);
    block *b = find_block(pointer);
    if (b && b->kind == BLOCK_IMPORTED && b->n_opened == 1 && is_in_use(b))
        atomic_store(&broken, (int)cudaErrorIllegalAddress);
    pthread_mutex_unlock(&lock);
    return release(pointer, BLOCK_IMPORTED, cudaErrorInvalidValue);
}
