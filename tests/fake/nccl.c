// nccl.c - a stand-in for libnccl 2.28, for tests on machines without a GPU.
//
// The stand-in needs cuda.c, is linked only into tests, and is compiled against the real nccl.h.
//
// Like the real library
//   - Ranks are processes or threads that meet by the unique id. The process that made the id must
//     live until all ranks have met.
//   - An operation runs in its stream, after the work that is queued there, and waits for its peers
//     in the stream. Operations of one communicator run in the order of the calls, whatever their
//     streams.
//   - An operation waits forever for a peer that died or that called something else.
//     cudaStreamQuery says "not ready" and ncclCommGetAsyncError returns 0 until ncclCommAbort is
//     called. Then the stream continues, and the result is garbage.
//   - Small messages are sent without waiting for the receiver, so the root of a broadcast may end
//     first.
//   - The first collective of an algorithm on a communicator blocks the calling thread until the
//     peers make their call, because the call connects the ranks. The first send and receive of a
//     pair block in the same way. The algorithm depends on the kind of call, its size, type and
//     operator. With NCCL_RUNTIME_CONNECT=0, or a version before 22200, init connects the
//     collectives.
//   - ncclCommAbort and ncclCommDestroy must not run while a thread is inside a call with that
//     communicator, including ncclCommGetAsyncError. ncclCommFinalize must not run while a thread
//     is in a call that enqueues. Here such a call ends the program. ncclCommRevoke (from 22807 on)
//     is allowed: it ends operations and connection attempts, and frees nothing.
//   - Finalize, destroy and abort wait until the graphs that hold calls of the communicator are
//     destroyed. An abort after ncclCommRevoke does not wait, and destroying such a graph later
//     accesses freed memory. Here, such an access ends the program.
//   - Calls between ncclGroupStart and ncclGroupEnd start at the end; their sends and receives
//     progress together. Init may be in a group.
//   - ncclAvg and PreMulSum multiply floats in their own type before the sum; integers are divided
//     after the sum.
//   - 8-bit floats exist from version 22400 on. They are reduced only if all devices have compute
//     capability 9.0 or more.
//   - Two ranks on one GPU give "Duplicate GPU detected", unless NCCL_HOSTID differs or, for
//     version >= 23003, NCCL_MULTI_RANK_GPU_ENABLE=1. Ranks of different versions are refused.
//   - Ranks of one process read and write each other's buffers, unless NCCL_P2P_DIRECT_DISABLE=1.
//     Memory of a pool that the other devices cannot access is then an illegal address. The real
//     library accesses buffers directly only between devices that are peers, in calls that are
//     large enough; here all calls do so.
//   - With blocking=0 in the configuration, init and revoke return ncclInProgress, and so does the
//     first query after each group. A caller that does not query again gets an error.
//   - Finalize and destroy wait for the other ranks of the host. A call with count 0 does nothing
//     at all.
//   - Without a driver ncclGetUniqueId returns 0 and ncclCommInitRank returns 1.
// Unlike the real library
//   - Sums are always computed in ascending rank order. All data passes through shared memory, with
//     at most 64 ranks.
//   - A host pointer that is not pinned is refused with ncclInvalidArgument; the real library would
//     fault on the device.
//   - Only the functions that idist calls exist: no CommInitAll, Split, Shrink, Register, MemAlloc,
//     Gather, Scatter, AlltoAll, scalars on the device, windows, SimulateEnd or device API. A
//     program that uses them does not link.
//
// Environment
//   FAKE_NCCL_VERSION=n
//       result of ncclGetVersion (default NCCL_VERSION_CODE)
//   FAKE_NCCL_FAIL=code
//       initialization fails with this code, in each process that has the variable
//   FAKE_NCCL_REMOTE=1
//       a peer whose process ended is noticed, as over a network: ncclCommGetAsyncError and each
//       call from then on return ncclRemoteError; the operations still never end
//   FAKE_NCCL_TIMEOUT_MS=n
//       operations that wait longer set ncclTimeout (8); with FAKE_NCCL_REMOTE=2 they set
//       ncclRemoteError, as if a connection broke that only NCCL uses
//   FAKE_NCCL_INIT_HANGS=1
//       initialization never ends (ncclCommAbort ends it if blocking=0)
//   FAKE_NCCL_RUN_HANGS=1
//       running operations never end, until an abort or a revoke
//   FAKE_NCCL_LATER_HANGS=1
//       operations begun on nonblocking communicators stay in progress, until an abort or a revoke
//   FAKE_NCCL_QUERY_US=n
//       ncclCommGetAsyncError takes that long if nothing was enqueued for 100 ms
//   FAKE_NCCL_STAYS_MS=n
//       a thread that waits for a peer in a call returns that long after the abort or the revoke
//   FAKE_NCCL_REVOKE_HANGS=1
//       a revoke of a nonblocking communicator stays in progress
//   FAKE_NCCL_IN_PROGRESS=1
//       calls between ncclGroupStart and ncclGroupEnd on a nonblocking communicator return
//       ncclInProgress
//   FAKE_NCCL_GROUP_FAIL=code
//       the end of a group of several calls fails with this code, and nothing is started
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "fake.h"

#include <cuda_fp8.h>
#include <errno.h>
#include <fcntl.h>
#include <nccl.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAX_RANKS 64
#define MAX_OPS 64
#define RING_BYTES (256 * 1024)
#define BLOCK_BYTES (128 * 1024) // block of a reduction
#define TIMED_OUT 8              // ncclTimeout, from 2.30.3 on

//------------------------------------------------------------------------------
// shared memory of a communicator
//------------------------------------------------------------------------------

// Contents of an ncclUniqueId: a memfd of the process that made it.
typedef struct unique_id {
    uint64_t magic, inode;
    int pid, fd;
} unique_id;
#define ID_MAGIC 0x66616b656e63636cu
_Static_assert(sizeof(unique_id) <= sizeof(ncclUniqueId), "an id holds what we need");

typedef struct peer {
    atomic_int arrived, finalized;
    int version, major; // major number of the compute capability
    long bus;
    uint64_t host;
    int pid, device;                                        // the device's number in that process
    atomic_uint connected;                                  // bits of algorithms
    atomic_bool sends_to[MAX_RANKS], recvs_from[MAX_RANKS]; // pairs
} peer;

// Bytes from one rank to another.
typedef struct ring {
    atomic_ulong head, tail;
    char data[RING_BYTES];
} ring;

typedef struct segment {
    atomic_int fd_closed;
    peer peers[MAX_RANKS];
    ring rings[]; // index: from * n_ranks + to
} segment;

typedef struct reduction {
    // ncclSum, ncclProd, ncclMax or ncclMin; Avg and PreMulSum are mapped to one of them
    ncclRedOp_t op;
    bool used, scaled, divided;
    ncclDataType_t type;
    char scalar[8];
} reduction;

struct ncclComm {
    int rank, n_ranks, device, version;
    bool blocking, finalized;
    segment *shared;
    size_t nbytes;
    ncclUniqueId id;
    atomic_int refs, async, polls, n_running;
    atomic_int inside; // threads in a call that enqueues
    atomic_int asking; // threads in ncclCommGetAsyncError
    _Atomic int64_t enqueued_ms;
    atomic_int persistent; // number of operations that graphs hold
    atomic_bool aborted, revoked, freed;
    unsigned connected; // this rank's own copy of the members of peer with these names
    bool sends_to[MAX_RANKS], recvs_from[MAX_RANKS];
    atomic_ulong tickets, done;
    reduction ops[MAX_OPS];
    // The pending job: its function, and where its result is stored.
    ncclResult_t (*job)(ncclComm_t);
    ncclComm_t *where, next;
    pthread_t thread;
};

typedef enum kind { ALL_REDUCE, REDUCE, REDUCE_SCATTER, BROADCAST, ALL_GATHER, SEND, RECV } kind;
static const char *const kind_names[] = {"AllReduce", "Reduce", "ReduceScatter", "Broadcast",
                                         "AllGather", "Send",   "Recv"};

typedef struct call {
    kind kind;
    const char *send;
    char *recv;
    size_t count;
    ncclDataType_t type;
    int op, root; // root, or the peer
    ncclComm_t comm;
    cudaStream_t stream;
    reduction reduction;
    bool out_of_reach; // true if another rank of this process cannot access a buffer
} call;

static _Thread_local struct {
    int depth, n, capacity;
    call *calls;
    ncclComm_t jobs;
    ncclResult_t error;
} group;

static pthread_mutex_t text_lock = PTHREAD_MUTEX_INITIALIZER;
static char last_text[512];

static ncclResult_t fail(ncclResult_t code, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
static ncclResult_t fail(ncclResult_t code, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    pthread_mutex_lock(&text_lock);
    vsnprintf(last_text, sizeof last_text, fmt, args);
    pthread_mutex_unlock(&text_lock);
    va_end(args);
    if (group.depth > 0) group.error = code;
    return code;
}

static ncclResult_t cuda_failed(cudaError_t error) {
    return fail(ncclUnhandledCudaError, "Cuda failure '%s'", cudaGetErrorString(error));
}

// Waits briefly. A thread that has waited for a long time wakes less often. Otherwise, tests of
// hanging calls would spend most of their time here.
enum { SHORT_TURNS = 200 };
static void nap(int *turns) {
    if (++*turns <= 20) sched_yield();
    else usleep(*turns <= SHORT_TURNS ? 50 : 500);
}

static size_t size_of(ncclDataType_t type) {
    static const unsigned char sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return sizes[type];
}

static ncclResult_t make_id(ncclUniqueId *out) {
    struct stat st;
    unique_id id = {ID_MAGIC, 0, getpid(), memfd_create("fake-nccl", MFD_CLOEXEC)};
    if (id.fd < 0 || fstat(id.fd, &st) != 0)
        return fail(ncclSystemError, "memfd_create: errno %d", errno);
    id.inode = st.st_ino;
    memset(out, 0, sizeof *out);
    memcpy(out, &id, sizeof id);
    return ncclSuccess;
}

static ncclResult_t map_segment(ncclComm_t comm) {
    unique_id id;
    char path[64];
    struct stat st;
    memcpy(&id, &comm->id, sizeof id);
    comm->nbytes = sizeof(segment) + (size_t)(comm->n_ranks * comm->n_ranks) * sizeof(ring);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", id.pid, id.fd);
    int fd = id.magic == ID_MAGIC ? open(path, O_RDWR | O_CLOEXEC) : -1;
    bool ok = fd >= 0 && fstat(fd, &st) == 0 && st.st_ino == id.inode;
    if (ok && (size_t)st.st_size < comm->nbytes) ok = ftruncate(fd, (off_t)comm->nbytes) == 0;
    void *at =
        ok ? mmap(NULL, comm->nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    if (fd >= 0) close(fd);
    if (at == MAP_FAILED)
        return fail(ncclSystemError,
                    "socketStartConnect: Connect to the root of this unique id failed");
    comm->shared = at;
    return ncclSuccess;
}

static atomic_int n_comms;
int fake_count_comms(void) { return atomic_load(&n_comms); }

static void drop_comm(ncclComm_t comm) {
    if (atomic_fetch_sub(&comm->refs, 1) > 1) return;
    if (comm->shared) munmap(comm->shared, comm->nbytes);
    free(comm);
    atomic_fetch_sub(&n_comms, 1);
}

//------------------------------------------------------------------------------
// the environment
//------------------------------------------------------------------------------

// Held to read or change the environment. idist's threads read the environment in calls, while a
// test may change it.
static pthread_mutex_t env_lock = PTHREAD_MUTEX_INITIALIZER;

void fake_set_env(const char *name, const char *value) {
    pthread_mutex_lock(&env_lock);
    if (value) setenv(name, value, 1);
    else unsetenv(name);
    pthread_mutex_unlock(&env_lock);
}

static const char *read_env(const char *name) {
    pthread_mutex_lock(&env_lock);
    const char *value = getenv(name);
    pthread_mutex_unlock(&env_lock);
    return value;
}

static int number_of(const char *name) {
    const char *text = read_env(name);
    return text && *text ? atoi(text) : 0;
}

//------------------------------------------------------------------------------
// initialization and the end
//------------------------------------------------------------------------------

static int version(void) {
    const char *text = read_env("FAKE_NCCL_VERSION");
    return text && *text ? atoi(text) : NCCL_VERSION_CODE;
}

static uint64_t hash_text(const char *text) {
    uint64_t h = 0xcbf29ce484222325u;
    for (; *text; text++) h = (h ^ (unsigned char)*text) * 0x100000001b3u;
    return h;
}

static void introduce(ncclComm_t comm, peer *me) {
    char text[32] = "", digits[32];
    int n = 0, device = comm->device;
    const char *host = read_env("NCCL_HOSTID");
    cudaDeviceGetPCIBusId(text, sizeof text, device);
    for (char *c = text; *c; c++)
        if (*c != ':' && *c != '.') digits[n++] = *c;
    digits[n] = 0;
    me->bus = strtol(digits, NULL, 16);
    me->host = hash_text(host && *host ? host : "this machine");
    me->version = comm->version = version();
    me->pid = getpid();
    me->device = device;
    cudaDeviceGetAttribute(&me->major, cudaDevAttrComputeCapabilityMajor, device);
}

// Checks whether the ranks fit together. If they do not, all ranks get an error.
static ncclResult_t check_peers(ncclComm_t comm) {
    const peer *peers = comm->shared->peers, *me = &peers[comm->rank];
    const char *several = read_env("NCCL_MULTI_RANK_GPU_ENABLE");
    bool allowed = several && atoi(several) == 1 && comm->version >= 23003, duplicates = false;
    for (int i = 0; i < comm->n_ranks; i++)
        if (peers[i].version != peers[0].version)
            return fail(ncclInvalidUsage,
                        "Mismatched NCCL version detected : rank %d version %d rank %d version %d",
                        i, peers[i].version, 0, peers[0].version);
    for (int i = 0; i < comm->n_ranks && !allowed; i++) {
        if (i != comm->rank && peers[i].host == me->host && peers[i].bus == me->bus)
            return fail(ncclInvalidUsage,
                        "Duplicate GPU detected : rank %d and rank %d both on CUDA device %lx",
                        comm->rank, i, (unsigned long)me->bus);
        for (int j = 0; j < i; j++)
            duplicates |= peers[i].host == peers[j].host && peers[i].bus == peers[j].bus;
    }
    if (duplicates)
        return fail(ncclRemoteError, "socketProgress: Connection closed by remote peer");
    return ncclSuccess;
}

static ncclResult_t job_init(ncclComm_t comm) {
    const char *failing = read_env("FAKE_NCCL_FAIL"), *hangs = read_env("FAKE_NCCL_INIT_HANGS");
    int turns = 0;
    while (hangs && atoi(hangs) == 1 && !comm->aborted) nap(&turns);
    if (failing && atoi(failing) != 0)
        return fail((ncclResult_t)atoi(failing), "FAKE_NCCL_FAIL=%s", failing);
    if (comm->aborted) return ncclInternalError;
    ncclResult_t rc = map_segment(comm);
    if (rc) return rc;
    peer *peers = comm->shared->peers;
    if (atomic_exchange(&peers[comm->rank].arrived, 1))
        return fail(ncclSystemError, "Bootstrap Root : rank %d of %d ranks has already checked in",
                    comm->rank, comm->n_ranks);
    introduce(comm, &peers[comm->rank]);
    atomic_store(&peers[comm->rank].arrived, 2);
    for (int i = 0; i < comm->n_ranks; i++)
        while (atomic_load(&peers[i].arrived) < 2) {
            if (comm->aborted) return ncclInternalError;
            nap(&turns);
        }
    unique_id id;
    memcpy(&id, &comm->id, sizeof id);
    if (id.pid == getpid() && !atomic_exchange(&comm->shared->fd_closed, 1)) close(id.fd);
    return check_peers(comm);
}

static ncclResult_t job_finalize(ncclComm_t comm) {
    peer *peers = comm->shared->peers;
    int turns = 0;
    while (!comm->aborted && (comm->done < comm->tickets || comm->persistent > 0)) nap(&turns);
    atomic_store(&peers[comm->rank].finalized, 1);
    for (int i = 0; i < comm->n_ranks; i++)
        while (!comm->aborted && peers[i].host == peers[comm->rank].host &&
               !atomic_load(&peers[i].finalized))
            nap(&turns);
    return ncclSuccess;
}

static void *job_thread(void *arg) {
    ncclComm_t comm = arg;
    cudaSetDevice(comm->device);
    atomic_store(&comm->async, comm->job(comm));
    drop_comm(comm);
    return NULL;
}

// Runs a job. The job of a blocking communicator runs in this thread, and the job of a nonblocking
// communicator runs in a thread of its own. Within a group, the job of a blocking communicator runs
// in a thread that ncclGroupEnd joins.
static ncclResult_t start_job(ncclComm_t comm, ncclResult_t (*job)(ncclComm_t)) {
    if (comm->blocking && group.depth == 0) return job(comm);
    comm->job = job;
    atomic_store(&comm->async, ncclInProgress);
    atomic_fetch_add(&comm->refs, 1);
    if (pthread_create(&comm->thread, NULL, job_thread, comm) != 0) abort();
    if (!comm->blocking) {
        pthread_detach(comm->thread);
        return ncclInProgress;
    }
    comm->next = group.jobs;
    group.jobs = comm;
    return ncclSuccess;
}

static ncclResult_t join_jobs(void) {
    ncclResult_t rc = ncclSuccess;
    for (ncclComm_t comm = group.jobs, next; comm; comm = next) {
        next = comm->next;
        pthread_join(comm->thread, NULL);
        ncclResult_t mine = (ncclResult_t)comm->async;
        if (mine && comm->where) *comm->where = NULL;
        if (mine && comm->where) drop_comm(comm);
        if (mine) rc = mine;
    }
    group.jobs = NULL;
    return rc;
}

static ncclResult_t start_comm(ncclComm_t comm, const ncclConfig_t *config, ncclComm_t *out) {
    comm->blocking = config ? config->blocking != 0 : true;
    atomic_store(&comm->refs, 1);
    atomic_fetch_add(&n_comms, 1);
    comm->where = out;
    *out = comm;
    ncclResult_t rc = start_job(comm, job_init);
    if (rc && rc != ncclInProgress) {
        *out = NULL;
        drop_comm(comm);
    }
    return rc;
}

static ncclResult_t check_config(const ncclConfig_t *config) {
    if (!config || (config->magic == 0xcafebeef && config->size != 0)) return ncclSuccess;
    return fail(ncclInvalidArgument,
                "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
}

static ncclResult_t init(const char *name, ncclComm_t *out, int n_ranks, ncclUniqueId id, int rank,
                         const ncclConfig_t *config) {
    cudaError_t error = fake_enter(name);
    if (error) return cuda_failed(error);
    if (!out) return fail(ncclInvalidArgument, "CommInitRank : newcomm argument is NULL");
    *out = NULL;
    if (n_ranks < 1 || n_ranks > MAX_RANKS || rank < 0 || rank >= n_ranks)
        return fail(ncclInvalidArgument, "Invalid rank requested : %d/%d", rank, n_ranks);
    ncclResult_t rc = check_config(config);
    if (rc) return rc;
    ncclComm_t comm = calloc(1, sizeof *comm);
    if (!comm) abort();
    comm->rank = rank;
    comm->n_ranks = n_ranks;
    comm->id = id;
    cudaGetDevice(&comm->device);
    return start_comm(comm, config, out);
}

// Checks that a communicator can be used, which means that its previous call has ended.
static ncclResult_t check_ready(ncclComm_t comm, const char *name) {
    if (!comm) return fail(ncclInvalidArgument, "%s : comm argument is NULL", name);
    if (comm->revoked) return fail(ncclInvalidUsage, "%s : the communicator was revoked", name);
    int state = comm->polls > 0 && comm->async == ncclSuccess ? ncclInProgress : comm->async;
    if (state == ncclInProgress)
        return fail(
            ncclInvalidArgument,
            "Attempt to use communicator before the previous operation returned ncclSuccess");
    return state ? fail((ncclResult_t)state, "%s : the communicator has failed", name)
                 : ncclSuccess;
}

//------------------------------------------------------------------------------
// numbers
//------------------------------------------------------------------------------

static float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 31u,
             fraction = h & 0x3ffu, bits;
    float f;
    if (exponent == 0) {
        f = (float)fraction * 0x1p-24f;
        return sign ? -f : f;
    }
    bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112u) << 23) | fraction << 13;
    memcpy(&f, &bits, 4);
    return f;
}

// Returns bits >> shift, rounded to nearest, ties to even.
static uint32_t shift_round(uint32_t bits, unsigned shift) {
    uint32_t low = bits & ((1u << shift) - 1u), half = 1u << (shift - 1), high = bits >> shift;
    return high + (low > half || (low == half && (high & 1u)));
}

static uint16_t float_to_half(float f) {
    uint32_t bits, magnitude, exponent;
    memcpy(&bits, &f, 4);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000u);
    magnitude = bits & 0x7fffffffu;
    exponent = magnitude >> 23;
    if (magnitude > 0x7f800000u) return sign | 0x7e00u;
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u;
    if (exponent >= 113) return sign | (uint16_t)shift_round(magnitude - (112u << 23), 13);
    if (exponent < 102) return sign;
    return sign | (uint16_t)shift_round((magnitude & 0x7fffffu) | 0x800000u, 126u - exponent);
}

static bool is_f8(ncclDataType_t type) { return type == ncclFloat8e4m3 || type == ncclFloat8e5m2; }
static __nv_fp8_interpretation_t f8_of(ncclDataType_t type) {
    return type == ncclFloat8e4m3 ? __NV_E4M3 : __NV_E5M2;
}

static double load_float(ncclDataType_t type, const char *at) {
    uint16_t h;
    uint32_t bits;
    float f;
    double d;
    if (is_f8(type))
        return (double)half_to_float(__nv_cvt_fp8_to_halfraw((unsigned char)*at, f8_of(type)).x);
    switch ((int)type) {
    case ncclFloat64: return memcpy(&d, at, 8), d;
    case ncclFloat32: return memcpy(&f, at, 4), (double)f;
    case ncclFloat16: return memcpy(&h, at, 2), (double)half_to_float(h);
    default: break;
    }
    memcpy(&h, at, 2);
    bits = (uint32_t)h << 16;
    return memcpy(&f, &bits, 4), (double)f;
}

static void store_float(ncclDataType_t type, char *at, double d) {
    float f = (float)d;
    uint32_t bits;
    uint16_t h;
    memcpy(&bits, &f, 4);
    switch ((int)type) {
    case ncclFloat64: memcpy(at, &d, 8); return;
    case ncclFloat32: memcpy(at, &f, 4); return;
    case ncclFloat8e4m3:
    case ncclFloat8e5m2: *at = (char)__nv_cvt_float_to_fp8(f, __NV_SATFINITE, f8_of(type)); return;
    case ncclFloat16: h = float_to_half(f); break;
    default: h = f != f ? 0x7fff : (uint16_t)shift_round(bits, 16); break;
    }
    memcpy(at, &h, 2);
}

static bool is_float(ncclDataType_t type) { return type >= ncclFloat16; }
static bool is_signed(ncclDataType_t type) {
    return type == ncclInt8 || type == ncclInt32 || type == ncclInt64;
}

static uint64_t load_int(ncclDataType_t type, const char *at) {
    uint64_t bits = 0;
    size_t nbytes = size_of(type);
    memcpy(&bits, at, nbytes); // little endian, as on every system with CUDA
    unsigned unused = 64u - 8u * (unsigned)nbytes;
    return is_signed(type) && unused ? (uint64_t)((int64_t)(bits << unused) >> unused) : bits;
}

static bool less(uint64_t a, uint64_t b, bool with_sign) {
    return with_sign ? (int64_t)a < (int64_t)b : a < b;
}

// Combines one element: at = at op from.
static void combine(ncclRedOp_t op, ncclDataType_t type, char *at, const char *from) {
    if (is_float(type)) {
        double a = load_float(type, at), b = load_float(type, from);
        double c = op == ncclSum                     ? a + b
                   : op == ncclProd                  ? a * b
                   : (op == ncclMax ? a < b : b < a) ? b
                                                     : a;
        store_float(type, at, c);
        return;
    }
    uint64_t a = load_int(type, at), b = load_int(type, from);
    bool with_sign = is_signed(type);
    uint64_t c = op == ncclSum                              ? a + b
                 : op == ncclProd                           ? a * b
                 : less(a, b, with_sign) == (op == ncclMax) ? b
                                                            : a;
    memcpy(at, &c, size_of(type));
}

// Combines many elements. Fast for the operations that tests call on large buffers.
static void combine_all(ncclRedOp_t op, ncclDataType_t type, char *at, const char *from,
                        size_t nbytes) {
    size_t width = size_of(type);
    float a, b;
    uint32_t x, y;
    if (type == ncclFloat32 && op == ncclSum) {
        for (size_t i = 0; i < nbytes; i += 4) {
            memcpy(&a, at + i, 4), memcpy(&b, from + i, 4);
            a = (float)((double)a + (double)b);
            memcpy(at + i, &a, 4);
        }
    } else if (type == ncclInt32 && (op == ncclSum || op == ncclProd)) {
        for (size_t i = 0; i < nbytes; i += 4) {
            memcpy(&x, at + i, 4), memcpy(&y, from + i, 4);
            x = op == ncclSum ? x + y : x * y;
            memcpy(at + i, &x, 4);
        }
    } else
        for (size_t i = 0; i < nbytes; i += width) combine(op, type, at + i, from + i);
}

static void scale(const reduction *r, ncclDataType_t type, char *data, size_t count) {
    for (size_t i = 0; r->scaled && i < count; i++)
        combine(ncclProd, type, data + i * size_of(type), r->scalar);
}

static void divide(ncclDataType_t type, char *data, size_t count, int by) {
    for (size_t i = 0; i < count; i++) {
        char *at = data + i * size_of(type);
        uint64_t a = load_int(type, at);
        a = is_signed(type) ? (uint64_t)((int64_t)a / by) : a / (uint64_t)by;
        memcpy(at, &a, size_of(type));
    }
}

// Resolves Avg and the operators of this communicator to a plain reduction with factors.
static ncclResult_t resolve_op(call *c) {
    const char *name = kind_names[c->kind];
    reduction *r = &c->reduction;
    for (int i = 0; i < c->comm->n_ranks && is_f8(c->type); i++)
        if (c->comm->shared->peers[i].major < 9)
            return fail(ncclInvalidArgument,
                        "FP8 reduction support begins with sm90 capable devices.");
    if (c->op < 0)
        return fail(ncclInvalidArgument, "%s : invalid reduction operation %d", name, c->op);
    if (c->op >= ncclNumOps) {
        int slot = c->op - ncclNumOps;
        if (slot >= MAX_OPS || !c->comm->ops[slot].used)
            return fail(ncclInvalidArgument,
                        "%s : reduction operation %d unknown to this communicator", name, c->op);
        *r = c->comm->ops[slot];
        if (r->type != c->type)
            return fail(ncclInvalidArgument, "Data type supplied to user-created ncclRedOp_t does "
                                             "not match type given to reduction operation");
        return ncclSuccess;
    }
    *r = (reduction){.op = c->op == ncclAvg ? ncclSum : (ncclRedOp_t)c->op, .type = c->type};
    r->scaled = c->op == ncclAvg && is_float(c->type);
    r->divided = c->op == ncclAvg && !is_float(c->type);
    if (r->scaled) store_float(c->type, r->scalar, 1.0 / c->comm->n_ranks);
    return ncclSuccess;
}

//------------------------------------------------------------------------------
// moving data, in the thread of a stream
//------------------------------------------------------------------------------

// The data that this rank and another rank exchange, in units of the count.
typedef struct route {
    bool out, in;
    size_t out_at, in_at;
} route;

static route route_to(const call *c, int other) {
    int rank = c->comm->rank;
    size_t at = (size_t)other;
    switch (c->kind) {
    case ALL_REDUCE: return (route){true, true, 0, 0};
    case REDUCE: return (route){other == c->root, rank == c->root, 0, 0};
    case REDUCE_SCATTER: return (route){true, true, at, 0};
    case BROADCAST: return (route){rank == c->root, other == c->root, 0, 0};
    case ALL_GATHER: return (route){true, true, 0, at};
    case SEND: return (route){other == c->root, false, 0, 0};
    default: return (route){false, other == c->root, 0, 0};
    }
}

typedef struct transfer {
    int other;
    bool out, begun;
    char *data;
    size_t nbytes, n_done;
    uint64_t signature; // a receiver does not take a message that a different call sent
} transfer;
typedef struct transfers {
    transfer *item;
    int n;
} transfers;

static uint64_t signature(const call *c) {
    uint64_t parts[] = {c->kind, c->count, c->type, (uint64_t)c->op, (uint64_t)c->root}, h = 0;
    if (c->kind == SEND || c->kind == RECV) return SEND;
    for (int i = 0; i < 5; i++) h = (h ^ parts[i]) * 0x9E3779B97F4A7C15u + 1;
    return h;
}

static void add_transfer(transfers *list, const call *c, int other, bool out, const void *data,
                         size_t nbytes) {
    list->item[list->n++] =
        (transfer){other, out, false, (char *)(uintptr_t)data, nbytes, 0, signature(c)};
}

static size_t ring_copy(ring *r, bool out, char *data, size_t wanted) {
    unsigned long head = atomic_load(&r->head), tail = atomic_load(&r->tail);
    size_t there = out ? RING_BYTES - (tail - head) : tail - head;
    size_t n = wanted < there ? wanted : there, at = (out ? tail : head) % RING_BYTES;
    size_t first = n < RING_BYTES - at ? n : RING_BYTES - at;
    if (out) memcpy(r->data + at, data, first), memcpy(r->data, data + first, n - first);
    else memcpy(data, r->data + at, first), memcpy(data + first, r->data, n - first);
    if (n) atomic_store(out ? &r->tail : &r->head, (out ? tail : head) + n);
    return n;
}

// Moves the data that can be moved now. Returns true if anything was moved.
static bool progress(ncclComm_t comm, transfer *t) {
    int from = t->out ? comm->rank : t->other, to = t->out ? t->other : comm->rank;
    ring *r = &comm->shared->rings[from * comm->n_ranks + to];
    uint64_t header[2] = {t->signature, t->nbytes}, found[2];
    if (!t->begun) {
        unsigned long head = atomic_load(&r->head), there = atomic_load(&r->tail) - head;
        if (t->out ? RING_BYTES - there < sizeof header : there < sizeof header) return false;
        if (t->out) ring_copy(r, true, (char *)header, sizeof header);
        else {
            ring_copy(r, false, (char *)found, sizeof found);
            if (memcmp(found, header, sizeof header) != 0) {
                // the message is of a different call: leave it there, and wait
                atomic_store(&r->head, head);
                return false;
            }
        }
        t->begun = true;
    }
    size_t n = ring_copy(r, t->out, t->data + t->n_done, t->nbytes - t->n_done);
    t->n_done += n;
    return n > 0 || t->nbytes == 0;
}

// Returns true if a process has ended, even if nobody has waited for it.
static bool has_ended(int pid) {
    char path[64], state = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *f = fopen(path, "r");
    bool known = f && fscanf(f, "%*d %*s %c", &state) == 1;
    if (f) fclose(f);
    return !known || state == 'Z' || state == 'X';
}

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

// Checks for failures that a waiting operation detects by itself, as the network threads and the
// watchdog do in later versions.
static void look_round(ncclComm_t comm, int64_t since_ms) {
    int limit = number_of("FAKE_NCCL_TIMEOUT_MS"), none = ncclSuccess;
    for (int i = 0; i < comm->n_ranks && number_of("FAKE_NCCL_REMOTE") == 1; i++)
        if (has_ended(comm->shared->peers[i].pid))
            atomic_compare_exchange_strong(&comm->async, &none, (int)ncclRemoteError);
    if (limit && now_ms() - since_ms > limit) {
        int code = number_of("FAKE_NCCL_REMOTE") == 2 ? (int)ncclRemoteError : TIMED_OUT;
        atomic_compare_exchange_strong(&comm->async, &none, code);
    }
}

// Completes a list of transfers. Returns false if the communicator was aborted. Messages between
// two ranks keep their order; everything else progresses together.
static bool exchange(ncclComm_t comm, transfers *list) {
    int64_t since_ms = now_ms();
    int turns = 0;
    for (;;) {
        bool busy[2][MAX_RANKS] = {{false}}, moved = false, ended = true;
        for (int i = 0; i < list->n; i++) {
            transfer *t = &list->item[i];
            if (t->begun && t->n_done == t->nbytes) continue;
            if (!busy[t->out][t->other]) moved |= progress(comm, t);
            if (!t->begun || t->n_done < t->nbytes) busy[t->out][t->other] = true, ended = false;
        }
        if (ended) return true;
        if (comm->aborted) return false;
        if (moved) turns = 0, since_ms = now_ms();
        else nap(&turns);
        if (turns >= SHORT_TURNS && turns % 20 == 0) look_round(comm, since_ms);
    }
}

static void add_moves(const call *c, transfers *list) {
    size_t nbytes = c->count * size_of(c->type);
    for (int other = 0; other < c->comm->n_ranks; other++) {
        route r = route_to(c, other);
        if (other == c->comm->rank && r.out && r.in) {
            memmove(c->recv + r.in_at * nbytes, c->send + r.out_at * nbytes, nbytes);
            continue;
        }
        if (r.out) add_transfer(list, c, other, true, c->send + r.out_at * nbytes, nbytes);
        if (r.in) add_transfer(list, c, other, false, c->recv + r.in_at * nbytes, nbytes);
    }
}

// Reduces one block: exchanges pieces with every rank, then sums them in rank order. `room` holds
// two blocks per rank, one to send and one to receive.
static bool reduce_block(const call *c, transfers *list, char *room, size_t block_bytes,
                         size_t from, size_t count) {
    ncclComm_t comm = c->comm;
    size_t width = size_of(c->type), nbytes = count * width;
    bool any = false;
    list->n = 0;
    for (int other = 0; other < comm->n_ranks; other++) {
        route r = route_to(c, other);
        char *out = room + (size_t)(2 * other) * block_bytes, *in = out + block_bytes;
        if (r.out) {
            memcpy(out, c->send + (r.out_at * c->count + from) * width, nbytes);
            scale(&c->reduction, c->type, out, count);
        }
        any |= r.in;
        if (other == comm->rank) memcpy(in, out, nbytes);
        if (other == comm->rank) continue;
        if (r.out) add_transfer(list, c, other, true, out, nbytes);
        if (r.in) add_transfer(list, c, other, false, in, nbytes);
    }
    if (!exchange(comm, list)) return false;
    if (!any) return true;
    char *sum = c->recv + from * width;
    memcpy(sum, room + block_bytes, nbytes);
    for (int other = 1; other < comm->n_ranks; other++)
        combine_all(c->reduction.op, c->type, sum, room + (size_t)(2 * other + 1) * block_bytes,
                    nbytes);
    if (c->reduction.divided) divide(c->type, sum, count, comm->n_ranks);
    return true;
}

static bool run_reduction(const call *c, transfers *list) {
    size_t width = size_of(c->type), most = BLOCK_BYTES / width;
    if (most > c->count) most = c->count;
    char *room = malloc(2 * (size_t)c->comm->n_ranks * most * width + 1);
    bool ok = room != NULL;
    for (size_t from = 0; ok && from < c->count; from += most)
        ok = reduce_block(c, list, room, most * width, from,
                          c->count - from < most ? c->count - from : most);
    free(room);
    return ok;
}

//------------------------------------------------------------------------------
// calls and groups
//------------------------------------------------------------------------------

// The calls of one communicator in one group.
typedef struct launch {
    ncclComm_t comm;
    bool persistent; // true if a graph holds it
    int n;
    call calls[];
} launch;

static uint64_t launch_ticket(void *arg) {
    return atomic_fetch_add(&((launch *)arg)->comm->tickets, 1);
}

static void complain(const char *text) {
    fprintf(stderr, "%s\n", text);
    abort();
}

static void launch_drop(void *arg) {
    launch *l = arg;
    if (l->persistent && l->comm->freed)
        complain("a graph is destroyed whose communicator was freed before");
    if (l->persistent) atomic_fetch_sub(&l->comm->persistent, 1);
    drop_comm(l->comm);
    free(l);
}

static void launch_run(void *arg, uint64_t ticket) {
    launch *l = arg;
    ncclComm_t comm = l->comm;
    transfers list = {calloc((size_t)(2 * comm->n_ranks + l->n), sizeof(transfer)), 0};
    int turns = 0;
    bool ok = list.item != NULL;
    atomic_fetch_add(&comm->n_running, 1);
    bool hangs = number_of("FAKE_NCCL_RUN_HANGS") != 0;
    while (!comm->aborted && (hangs || atomic_load(&comm->done) != ticket)) nap(&turns);
    for (int i = 0; ok && i < l->n && !comm->aborted; i++) {
        const call *c = &l->calls[i];
        list.n = 0;
        if (c->out_of_reach) fake_break(cudaErrorIllegalAddress);
        if (c->kind >= SEND) continue;
        if (c->kind <= REDUCE_SCATTER) ok = run_reduction(c, &list);
        else {
            add_moves(c, &list);
            ok = exchange(comm, &list);
        }
    }
    list.n = 0;
    for (int i = 0; i < l->n; i++)
        if (l->calls[i].kind >= SEND) add_moves(&l->calls[i], &list);
    if (ok && !comm->aborted) exchange(comm, &list);
    free(list.item);
    atomic_fetch_add(&comm->done, 1);
    atomic_fetch_sub(&comm->n_running, 1);
}

static cudaError_t order_streams(cudaStream_t before, cudaStream_t after) {
    cudaEvent_t event;
    cudaError_t error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    if (error) return error;
    error = cudaEventRecord(event, before);
    if (!error) error = cudaStreamWaitEvent(after, event, 0);
    cudaEventDestroy(event);
    return error;
}

// Launches on the stream of the first call. That stream waits for the earlier work of the other
// calls' streams. These streams then wait for the launch.
static cudaError_t launch_comm(ncclComm_t comm, const call *calls, int n) {
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    launch *l = calloc(1, sizeof *l + (size_t)n * sizeof(call));
    if (!l) abort();
    l->comm = comm;
    cudaError_t error = cudaSuccess;
    for (int i = 0; i < n; i++)
        if (calls[i].comm == comm) l->calls[l->n++] = calls[i];
    cudaStream_t stream = l->calls[0].stream, others[MAX_RANKS];
    int n_others = 0;
    for (int i = 1; i < l->n && n_others < MAX_RANKS; i++) {
        bool known = l->calls[i].stream == stream;
        for (int k = 0; k < n_others; k++) known |= others[k] == l->calls[i].stream;
        if (!known) others[n_others++] = l->calls[i].stream;
    }
    for (int i = 0; !error && i < n_others; i++) error = order_streams(others[i], stream);
    atomic_fetch_add(&comm->refs, 1);
    if (error) return launch_drop(l), error;
    l->persistent = cudaStreamIsCapturing(stream, &capture) == cudaSuccess &&
                    capture != cudaStreamCaptureStatusNone;
    if (l->persistent) atomic_fetch_add(&comm->persistent, 1);
    error = fake_enqueue(stream, (fake_work){launch_run, launch_ticket, launch_drop, l, false});
    for (int i = 0; !error && i < n_others; i++) error = order_streams(stream, others[i]);
    return error;
}

// The connections that a collective needs. The thresholds are far below the real ones. Small and
// large calls need different connections, and so do calls that a switch can reduce.
enum { RING = 1, TREE = 2, PAT = 4, NVLS = 8 };
static unsigned algorithm(const call *c) {
    size_t parts =
        c->kind == ALL_GATHER || c->kind == REDUCE_SCATTER ? (size_t)c->comm->n_ranks : 1;
    size_t nbytes = c->count * size_of(c->type) * parts;
    bool reduces = c->kind <= REDUCE_SCATTER;
    bool by_switch =
        nbytes >= 1 << 14 &&
        (!reduces || ((c->op == ncclSum || c->op == ncclAvg) && c->type >= ncclFloat16));
    if (c->kind == BROADCAST || c->kind == REDUCE) return RING;
    if (by_switch) return NVLS;
    if (nbytes >= 1 << 11) return RING;
    return c->kind == ALL_REDUCE ? TREE : PAT;
}

// Publishes the connections that a call needs and that do not exist yet. Returns false if there are
// none.
static bool offer(const call *c) {
    ncclComm_t comm = c->comm;
    peer *me = &comm->shared->peers[comm->rank];
    const char *lazy = read_env("NCCL_RUNTIME_CONNECT");
    bool any = false;
    if (comm->n_ranks == 1) return false;
    if (c->kind <= ALL_GATHER) {
        if (comm->version < 22200 || (lazy && atoi(lazy) == 0) || (comm->connected & algorithm(c)))
            return false;
        comm->connected |= algorithm(c);
        atomic_fetch_or(&me->connected, algorithm(c));
        return true;
    }
    for (int other = 0; other < comm->n_ranks; other++) {
        route r = route_to(c, other);
        if (other == comm->rank) continue;
        any |= (r.out && !comm->sends_to[other]) || (r.in && !comm->recvs_from[other]);
        comm->sends_to[other] |= r.out, comm->recvs_from[other] |= r.in;
        if (r.out) atomic_store(&me->sends_to[other], true);
        if (r.in) atomic_store(&me->recvs_from[other], true);
    }
    return any;
}

static bool is_offered(const call *c) {
    ncclComm_t comm = c->comm;
    peer *peers = comm->shared->peers;
    const char *lazy = read_env("NCCL_RUNTIME_CONNECT");
    bool all = true;
    if (comm->n_ranks == 1 ||
        (c->kind <= ALL_GATHER && (comm->version < 22200 || (lazy && atoi(lazy) == 0))))
        return true;
    for (int other = 0; other < comm->n_ranks && all; other++) {
        route r = route_to(c, other);
        if (c->kind <= ALL_GATHER) all = (atomic_load(&peers[other].connected) & algorithm(c)) != 0;
        else if (other != comm->rank && r.out)
            all = atomic_load(&peers[other].recvs_from[comm->rank]);
        if (c->kind > ALL_GATHER && all && other != comm->rank && r.in)
            all = atomic_load(&peers[other].sends_to[comm->rank]);
    }
    return all;
}

// Blocks until the peers have offered the same connections, then launches the calls.
static ncclResult_t connect_and_launch(const call *calls, int n, bool later) {
    ncclResult_t rc = ncclSuccess;
    int device = 0, turns = 0;
    for (int i = 0; i < n; i++)
        while (!is_offered(&calls[i]) || (later && number_of("FAKE_NCCL_LATER_HANGS"))) {
            nap(&turns);
            if (!calls[i].comm->aborted && !calls[i].comm->revoked) continue;
            usleep(1000 * (unsigned)number_of("FAKE_NCCL_STAYS_MS"));
            return fail(ncclInternalError, "a connect was aborted");
        }
    cudaGetDevice(&device);
    for (int i = 0; i < n; i++) {
        ncclComm_t comm = calls[i].comm;
        bool first = true;
        for (int k = 0; k < i; k++) first &= calls[k].comm != comm;
        if (!first) continue;
        cudaSetDevice(comm->device);
        atomic_store(&comm->enqueued_ms, now_ms());
        cudaError_t error = launch_comm(comm, calls, n);
        if (error) rc = cuda_failed(error);
    }
    cudaSetDevice(device);
    return rc;
}

typedef struct later {
    call *calls;
    int n;
} later;

static void *later_thread(void *arg) {
    later *l = arg;
    cudaSetDevice(l->calls[0].comm->device);
    ncclResult_t rc = connect_and_launch(l->calls, l->n, true);
    for (int i = 0; i < l->n; i++) {
        atomic_store(&l->calls[i].comm->async, rc);
        drop_comm(l->calls[i].comm);
    }
    free(l->calls);
    free(l);
    return NULL;
}

// Starts a thread that connects nonblocking communicators.
static ncclResult_t launch_later(void) {
    pthread_t thread;
    later *l = malloc(sizeof *l);
    if (!l) abort();
    *l = (later){group.calls, group.n};
    for (int i = 0; i < group.n; i++) {
        atomic_store(&group.calls[i].comm->async, ncclInProgress);
        atomic_fetch_add(&group.calls[i].comm->refs, 1);
    }
    group.calls = NULL;
    if (pthread_create(&thread, NULL, later_thread, l) != 0) abort();
    pthread_detach(thread);
    return ncclInProgress;
}

static atomic_int n_inside;
int fake_count_inside(void) { return atomic_load(&n_inside); }

static ncclResult_t launch_group(void) {
    bool any = false, blocking = true;
    for (int i = 0; i < group.n; i++) {
        any |= offer(&group.calls[i]);
        blocking &= group.calls[i].comm->blocking;
    }
    if (!blocking && (any || number_of("FAKE_NCCL_LATER_HANGS"))) return launch_later();
    for (int i = 0; i < group.n; i++) atomic_fetch_add(&group.calls[i].comm->inside, 1);
    atomic_fetch_add(&n_inside, 1);
    ncclResult_t rc = connect_and_launch(group.calls, group.n, false);
    atomic_fetch_sub(&n_inside, 1);
    for (int i = 0; i < group.n; i++) {
        ncclComm_t comm = group.calls[i].comm;
        atomic_fetch_sub(&comm->inside, 1);
        if (!comm->blocking) atomic_store(&comm->polls, 1);
        if (!comm->blocking && !rc) rc = ncclInProgress;
    }
    return rc;
}

ncclResult_t ncclGroupStart(void) {
    group.depth++;
    return ncclSuccess;
}

// Checks that a rank's sends to itself match its receives from itself within a group.
static ncclResult_t check_self(void) {
    int balance = 0;
    for (int i = 0; i < group.n; i++) {
        const call *c = &group.calls[i];
        if (c->root == c->comm->rank && c->kind >= SEND) balance += c->kind == SEND ? 1 : -1;
    }
    return balance ? fail(ncclInvalidUsage, "Trying to send to self without a matching recv")
                   : ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) {
    if (group.depth == 0) return fail(ncclInvalidUsage, "ncclGroupEnd: not in a group call.");
    if (--group.depth > 0) return ncclSuccess;
    ncclResult_t rc = join_jobs();
    if (!rc) rc = group.error;
    if (!rc) rc = check_self();
    if (!rc && group.n > 1 && number_of("FAKE_NCCL_GROUP_FAIL"))
        rc = fail((ncclResult_t)number_of("FAKE_NCCL_GROUP_FAIL"), "FAKE_NCCL_GROUP_FAIL");
    if (!rc) rc = launch_group();
    free(group.calls);
    group.calls = NULL;
    group.n = group.capacity = 0;
    group.error = ncclSuccess;
    return rc;
}

static ncclResult_t check_buffers(call *c) {
    const char *name = kind_names[c->kind];
    size_t send = 0, recv = 0, nbytes = c->count * size_of(c->type);
    for (int other = 0; other < c->comm->n_ranks; other++) {
        route r = route_to(c, other);
        if (r.out && (r.out_at + 1) * nbytes > send) send = (r.out_at + 1) * nbytes;
        if (r.in && (r.in_at + 1) * nbytes > recv) recv = (r.in_at + 1) * nbytes;
    }
    const char *from = c->send, *to = c->recv;
    if (send && !(c->send = fake_reach(from, send)))
        return fail(ncclInvalidArgument, "%s : sendbuff %p is not a valid pointer", name,
                    (const void *)from);
    if (recv && !(c->recv = fake_reach(to, recv)))
        return fail(ncclInvalidArgument, "%s : recvbuff %p is not a valid pointer", name,
                    (const void *)to);
    return ncclSuccess;
}

static void check_reach(call *c) {
    const peer *peers = c->comm->shared->peers, *me = &peers[c->comm->rank];
    const char *disabled = read_env("NCCL_P2P_DIRECT_DISABLE");
    for (int i = 0; i < c->comm->n_ranks && !(disabled && atoi(disabled) == 1); i++) {
        route r = route_to(c, i);
        if (peers[i].pid != me->pid || peers[i].device == me->device) continue;
        if (r.out && !fake_is_reached(c->send, peers[i].device)) c->out_of_reach = true;
        if (r.in && !fake_is_reached(c->recv, peers[i].device)) c->out_of_reach = true;
    }
}

static ncclDataType_t n_types(ncclComm_t comm) {
    return comm->version < 22400 ? ncclFloat8e4m3 : ncclNumTypes;
}

static ncclResult_t submit(call c) {
    const char *name = kind_names[c.kind];
    ncclResult_t rc = check_ready(c.comm, name);
    if (rc) return rc;
    if ((int)c.type < 0 || c.type >= n_types(c.comm))
        return fail(ncclInvalidArgument, "%s : invalid type %d", name, c.type);
    if (c.root < 0 || c.root >= c.comm->n_ranks)
        return fail(ncclInvalidArgument, "%s : invalid root %d (root should be in the 0..%d range)",
                    name, c.root, c.comm->n_ranks);
    if (c.kind <= REDUCE_SCATTER && (rc = resolve_op(&c)) != ncclSuccess) return rc;
    if (c.count == 0) return ncclSuccess;
    check_reach(&c);
    if ((rc = check_buffers(&c)) != ncclSuccess) return rc;
    ncclGroupStart();
    if (group.n == group.capacity) {
        group.capacity = group.capacity ? 2 * group.capacity : 16;
        group.calls = realloc(group.calls, (size_t)group.capacity * sizeof c);
        if (!group.calls) abort();
    }
    group.calls[group.n++] = c;
    rc = ncclGroupEnd();
    if (rc || group.depth == 0 || c.comm->blocking || !number_of("FAKE_NCCL_IN_PROGRESS"))
        return rc;
    return ncclInProgress;
}

//------------------------------------------------------------------------------
// API
//------------------------------------------------------------------------------

ncclResult_t ncclGetVersion(int *out) {
    if (!out) return ncclInvalidArgument;
    *out = version();
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    if (!id) return fail(ncclInvalidArgument, "GetUniqueId : out argument is NULL");
    return make_id(id);
}

const char *ncclGetErrorString(ncclResult_t code) {
    switch ((int)code) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError:
        return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
        return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    case TIMED_OUT: return "timeout";
    default: return "unknown result code";
    }
}

// Returns the last error of any communicator, like the real function.
const char *ncclGetLastError(ncclComm_t comm) {
    static _Thread_local char text[sizeof last_text];
    (void)comm;
    pthread_mutex_lock(&text_lock);
    memcpy(text, last_text, sizeof text);
    pthread_mutex_unlock(&text_lock);
    return text;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int n_ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
    return init(__func__, comm, n_ranks, id, rank, config);
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int n_ranks, ncclUniqueId id, int rank) {
    return init(__func__, comm, n_ranks, id, rank, NULL);
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    if (!comm) return ncclSuccess;
    ncclResult_t rc = check_ready(comm, "CommFinalize");
    if (rc) return rc;
    if (comm->inside > 0)
        complain("ncclCommFinalize while a thread is inside a call with the communicator");
    if (comm->finalized)
        return fail(ncclInvalidArgument, "CommFinalize : comm %p has already been finalized",
                    (void *)comm);
    comm->finalized = true;
    comm->where = NULL;
    return start_job(comm, job_finalize);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    int turns = 0;
    if (!comm) return ncclSuccess;
    while (comm->async == ncclInProgress) nap(&turns);
    if (!comm->finalized && comm->async == ncclSuccess) job_finalize(comm);
    if (comm->inside + comm->asking > 0)
        complain("ncclCommDestroy while a thread is inside a call with the communicator");
    drop_comm(comm);
    return ncclSuccess;
}

static ncclResult_t job_revoke(ncclComm_t comm) {
    int turns = 0;
    while (comm->done < comm->tickets) nap(&turns);
    comm->finalized = true;
    while (!comm->blocking && number_of("FAKE_NCCL_REVOKE_HANGS")) usleep(1000);
    atomic_store(&comm->aborted, false);
    return ncclSuccess;
}

ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
    if (!comm) return ncclSuccess;
    if (flags != 0 || comm->version < 22807 || comm->finalized ||
        atomic_exchange(&comm->revoked, true))
        return fail(ncclInvalidArgument, "CommRevoke : invalid argument");
    atomic_store(&comm->aborted, true);
    return start_job(comm, job_revoke);
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    int turns = 0;
    if (!comm) return ncclSuccess;
    if (comm->inside + comm->asking > 0)
        complain("ncclCommAbort while a thread is inside a call with the communicator");
    atomic_store(&comm->aborted, true);
    while (comm->n_running > 0 || comm->async == ncclInProgress) nap(&turns);
    while (!comm->revoked && comm->persistent > 0) nap(&turns);
    atomic_store(&comm->freed, true);
    drop_comm(comm);
    return ncclSuccess;
}

static atomic_uint n_asked;
unsigned fake_count_asked(void) { return atomic_load(&n_asked); }

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *out) {
    if (!comm) return fail(ncclInvalidArgument, "ncclGetAsyncError : comm argument is NULL");
    if (!out) return fail(ncclInvalidArgument, "ncclGetAsyncError : asyncError argument is NULL");
    atomic_fetch_add(&n_asked, 1);
    atomic_fetch_add(&comm->asking, 1);
    int delay = number_of("FAKE_NCCL_QUERY_US");
    if (delay && comm->enqueued_ms && now_ms() - comm->enqueued_ms > 100) usleep((unsigned)delay);
    *out = (ncclResult_t)comm->async;
    if (*out == ncclSuccess && comm->polls > 0) {
        atomic_fetch_sub(&comm->polls, 1);
        *out = ncclInProgress;
    }
    atomic_fetch_sub(&comm->asking, 1);
    return ncclSuccess;
}

static ncclResult_t query(ncclComm_t comm, const char *name, int *out, int value_at) {
    ncclResult_t rc = check_ready(comm, name);
    if (rc) return rc;
    if (!out) return fail(ncclInvalidArgument, "%s : result argument is NULL", name);
    *out = value_at == 0 ? comm->n_ranks : value_at == 1 ? comm->device : comm->rank;
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) {
    return query(comm, "CommCount", count, 0);
}
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device) {
    return query(comm, "CommCuDevice", device, 1);
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
    return query(comm, "CommUserRank", rank, 2);
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t type,
                                      ncclScalarResidence_t residence, ncclComm_t comm) {
    ncclResult_t rc = check_ready(comm, "RedOpCreatePreMulSum");
    if (rc) return rc;
    if (!op || !scalar || (int)type < 0 || type >= n_types(comm) ||
        residence != ncclScalarHostImmediate)
        return fail(ncclInvalidArgument, "RedOpCreatePreMulSum : invalid argument");
    for (int i = 0; i < MAX_OPS; i++) {
        reduction *r = &comm->ops[i];
        if (r->used) continue;
        *r = (reduction){.op = ncclSum, .used = true, .scaled = true, .type = type};
        memcpy(r->scalar, scalar, size_of(type));
        *op = (ncclRedOp_t)(ncclNumOps + i);
        return ncclSuccess;
    }
    return fail(ncclInternalError, "RedOpCreatePreMulSum : the stand-in has room for %d operators",
                MAX_OPS);
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
    int slot = (int)op - (int)ncclNumOps;
    if (!comm) return fail(ncclInvalidArgument, "RedOpDestroy : comm argument is NULL");
    if (slot < 0)
        return fail(ncclInvalidArgument, "ncclRedOpDestroy : operator is a NCCL builtin.");
    if (slot >= MAX_OPS || !comm->ops[slot].used)
        return fail(ncclInvalidArgument,
                    "ncclRedOpDestroy : operator unknown to this communicator.");
    comm->ops[slot].used = false;
    return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return submit(
        (call){ALL_REDUCE, send, recv, count, type, (int)op, 0, comm, stream, {0}, false});
}

ncclResult_t ncclReduce(const void *send, void *recv, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
    return submit((call){REDUCE, send, recv, count, type, (int)op, root, comm, stream, {0}, false});
}

ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return submit(
        (call){REDUCE_SCATTER, send, recv, count, type, (int)op, 0, comm, stream, {0}, false});
}

ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
    return submit((call){BROADCAST, send, recv, count, type, 0, root, comm, stream, {0}, false});
}

ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
    return submit((call){ALL_GATHER, send, recv, count, type, 0, 0, comm, stream, {0}, false});
}

ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer_rank,
                      ncclComm_t comm, cudaStream_t stream) {
    return submit((call){SEND, send, NULL, count, type, 0, peer_rank, comm, stream, {0}, false});
}

ncclResult_t ncclRecv(void *recv, size_t count, ncclDataType_t type, int peer_rank, ncclComm_t comm,
                      cudaStream_t stream) {
    return submit((call){RECV, NULL, recv, count, type, 0, peer_rank, comm, stream, {0}, false});
}
