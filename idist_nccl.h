/* idist_nccl.h - v0.2.0 - device pointers for idist: the same calls take CUDA memory - MIT licence

DO THIS

    Include it in the file that defines IDIST_IMPLEMENTATION, or on the command line, with
    idist_gpu.h and idist_ipc.h beside it, and link the CUDA runtime:

        cc -DIDIST_IMPLEMENTATION -include idist_nccl.h -isystem $CUDA_HOME/include app.c \
            -L$CUDA_HOME/lib64 -lcudart -o app

        // app.c: every rank contributes 1; all of them get the number of ranks
        #include <cuda_runtime_api.h>
        #include <stdio.h>
        int main(void) {
            float one = 1, *x = NULL;
            bool ok = idist_initialize(NULL) == IDIST_OK;
            ok = ok && cudaMalloc((void **)&x, sizeof *x) == cudaSuccess;
            if (ok) cudaMemcpy(x, &one, sizeof one, cudaMemcpyHostToDevice);
            if (!ok || idist_all_reduce(x, x, 1, IDIST_F32, IDIST_SUM, NULL) != IDIST_OK)
                return printf("no GPU, or %s\n", idist_last_error()), 1;
            cudaMemcpy(&one, x, sizeof one, cudaMemcpyDeviceToHost);
            printf("rank %d on %s: %g\n", idist_get_rank(), idist_device(), one);
            return idist_finalize() != IDIST_OK;
        }

    idist_initialize picks a device for each rank (local rank modulo the number of devices;
    desc.device or IDIST_DEVICE overrides that) and makes it the calling thread's current device.
    (Another thread that has not chosen a device gets it with its first call on device memory; one
    that has keeps its own.) From then on every communication call takes device pointers as well as
    host pointers; the CUDA runtime tells them apart. Managed memory counts as host memory.

    NCCL 2.14 or later is loaded at run time unless the program is linked with it; its header is not
    needed. It is looked for in the file that IDIST_NCCL_LIB names, or else as libnccl.so.2 where
    the loader looks and in Python's package nvidia-nccl (in VIRTUAL_ENV, CONDA_PREFIX, ~/.local and
    the system).

HOW DEVICE MEMORY TRAVELS

    idist_device_backend() names the device backend in use. desc.device_backend or
    IDIST_DEVICE_BACKEND asks for one, which must be the same on all ranks.

        nccl     where each rank has a GPU of its own. NCCL 2.30.3 or later also takes several ranks
                 on one GPU, if you ask for nccl here and set NCCL_MULTI_RANK_GPU_ENABLE=1.
        ipc      for ranks of one host that share a GPU: they read each other's memory (idist_ipc.h)
        staged   everywhere: through pinned memory and the host's backend, a chunk at a time

    What the device backend does not support is staged: scan, exscan, user-defined ops, bitwise and
    logical ops, messages without a stream, and reductions of I16, U16 and 8-bit floats. (NCCL
    supports the latter from 2.24 on if all ranks have GPUs of compute capability 9.0 or more.)

    NCCL rounds 16-bit and 8-bit floats at every step, multiplies by 1/n before it sums for an AVG,
    and does not define MIN and MAX of a NaN. The other device backends give the same bits as the
    host. MPI is always given host memory, even if it was built for CUDA.

CALLS

    blocking          starts after the work in the legacy default stream; the result is there on
                      return. Synchronise other streams yourself. (The call clears CUDA's last
                      error: read cudaGetLastError before it.)
    opts.stream       starts after the work in that stream; work added to the stream later sees the
                      result. A call that NCCL supports is enqueued and returns; it may be captured
                      into a graph, except for the first call of a group. (Destroy the graph before
                      the group: NCCL waits for that.) Other calls block while the host does its
                      part. Keep the buffers until the stream has finished with them; an error after
                      the return is reported by a later call.
    opts.request      proceeds beside the program until idist_wait or idist_test, or until
                      idist_wait_stream makes a stream wait for it. With a stream as well, it starts
                      after the work that is in the stream now.
    idist_group_begin / _end   hand all calls between them to NCCL at once, in idist_group_end. (A
                      lock that orders the calls of several threads must be held all that time.)

    In one collective either all ranks pass device memory or none does; otherwise the call is
    IDIST_ERR_MISMATCH. A rank that contributes and receives nothing (in a v-form) shows with any
    device pointer, or with its stream, that the others use device memory. A message may go from a
    device to the host memory of another rank.

    If several threads of a process are ranks, NCCL reads and writes the buffers of each from the
    GPUs of the others: memory of cudaMallocAsync has to allow that (cudaMemPoolSetAccess).

    Over NCCL a send on a stream (without a request) needs a receive on a stream, of the same count.
    It blocks its stream until then, so ranks that send to each other must do so between group_begin
    and group_end. Tags are compared, not matched: messages between two ranks arrive in order.

    The first call of a group on device memory waits for the other members; for the world that
    happens in idist_initialize. It also connects the members for every collective, because NCCL
    alone connects them in the first call of each algorithm, which then waits on the host until all
    ranks make it. Algorithms are tried with up to IDIST_NCCL_CONNECT_BYTES (default 16 MiB; defined
    where the implementation is compiled, the same for all ranks; 0 tries none): one that NCCL
    chooses only for larger calls waits once.

    What NCCL moves between pairs of ranks (messages on a stream, all_to_all, gather, scatter, and
    the v-forms except all_gatherv) connects a pair in its first call, and that call does wait on
    the host for the other rank. One all_to_all connects all pairs of a group.

FAILURES

    The ranks compare their calls and watch each other through the host's backend, beside NCCL.
    Different calls, late ranks and lost ranks give the same errors as on the host. The communicator
    is aborted, and streams that waited for it go on, with undefined contents in the buffers. A
    progress thread does this while you wait for a stream. (An MPI without MPI_THREAD_MULTIPLE
    allows no such thread: there the next call notices.)

    A call that waits inside NCCL is released by ncclCommRevoke, from 2.28.7 on. For an older NCCL
    idist creates non-blocking communicators; a blocking one of yours (desc.nccl_comm,
    desc.nccl_config) is not aborted before the call has returned. After a failure, do not launch a
    graph again that holds calls of the group. Until the graph is destroyed a thread waits in
    ncclCommAbort; from 2.28.7 on the communicator stays in memory instead.

    When NCCL itself reports that a peer is gone or late (over InfiniBand and sockets, not inside a
    host), the host has a second to find out which. After that the error is IDIST_ERR_PEER_LOST or
    IDIST_ERR_TIMEOUT without the name of a rank.

OPTIONS

    desc.high_priority_stream (IDIST_HIGH_PRIORITY_STREAM=1) gives blocking calls and requests
    priority over other work of the device: for the gradients of a backward pass, say. A call with
    opts.stream alone has the priority of that stream.

    desc.nccl_comm provides a communicator for the world. It stays yours, but is aborted, and so
    freed, when the world fails. desc.nccl_config configures the communicators that idist creates.
    Pinned memory is kept until the end of the world.

WHEN THERE IS NO DEVICE

    If there is no driver or no device, even on one rank only, the world has no device:
    idist_device() is "cpu", calls on host memory work as ever, and a call with opts.stream is
    IDIST_ERR_NO_DEVICE with the reason. If any rank asks for a device by name ("cuda", "cuda:1"),
    idist_initialize fails on all ranks instead; so it does when NCCL or IPC is asked for and cannot
    be used. A program that must start without libcudart.so links libcudart_static.a. Either all
    ranks include this header or none does.

    A warning with reason and remedy is logged when a usable GPU stays idle, or when GPUs
    communicate without NCCL. A machine without a driver or a GPU causes no warning.

CONTENTS

      [nccl:api]     the backend's table, and what else programs call
      [nccl:load]    NCCL's functions, found at run time
      [nccl:job]     NCCL calls that may never return, each in a thread of its own
      [nccl:issue]   which functions of NCCL serve a call
      [nccl:abort]   errors of NCCL, and aborting a communicator
      [nccl:launch]  calls that NCCL serves
      [nccl:setup]   how a group moves device memory
      [nccl:route]   which calls are for the device
      [nccl:engine]  the device's part of a backend
      [nccl:join]    the device and the device backend that all ranks agree on
*/
#ifndef IDIST_H
#include "idist.h"
#endif
#ifndef IDIST_NCCL_H
#define IDIST_NCCL_H

#ifdef __cplusplus
extern "C" {
#endif

//------------------------------------------------------------------------------
// [nccl:api]  the backend's table, and what else programs call
//------------------------------------------------------------------------------

// Moves device memory, beside the backend that the world has for host memory.
IDIST_API const idist_backend_api *idist_nccl_backend(void);

// The ncclComm_t of a group (NULL: the world), for calls of your own. NULL if the group does not
// use NCCL; idist_last_error says why. The communicator stays idist's. The first such call on a
// group is collective, as is the group's first call on device memory.
IDIST_API void *idist_nccl_comm(idist_group *group);

// Pinned host memory, for the batches of a loader (idist_train.h), say: copies between it and a
// device run asynchronously.
IDIST_API idist_allocator idist_pinned_allocator(void);

#ifdef __cplusplus
} // extern "C"
#endif

#endif // IDIST_NCCL_H

// Only here for the API? Stop reading.

#if defined(IDIST_IMPLEMENTATION) && !defined(IDIST_NCCL_IMPLEMENTATION_DONE)
#define IDIST_NCCL_IMPLEMENTATION_DONE

#include <cuda_runtime_api.h>

#include "idist_begin.h"

#define IDIST__INSIDE_NCCL_H
#include "idist_gpu.h"
#include "idist_ipc.h"
#undef IDIST__INSIDE_NCCL_H

//------------------------------------------------------------------------------
// [nccl:load]  NCCL's functions, found at run time
// uses os:env library
//------------------------------------------------------------------------------

typedef struct idist__nccl_id { // ncclUniqueId
    char bytes[128];
} idist__nccl_id;

// NCCL's enums are ints and ncclComm_t is a pointer: nccl.h is not needed. tests/gpu/nccl_abi.c
// compares these numbers with those of an nccl.h.
enum {
    IDIST__NCCL_OK = 0,
    IDIST__NCCL_CUDA_ERROR = 1,
    IDIST__NCCL_INTERNAL_ERROR = 3,
    IDIST__NCCL_IN_PROGRESS = 7
};
enum { IDIST__NCCL_REMOTE_ERROR = 6, IDIST__NCCL_TIMEOUT = 8 }; // another rank is the cause
enum { IDIST__NCCL_U8 = 1, IDIST__NCCL_I32 = 2, IDIST__NCCL_F32 = 7 };
enum {
    IDIST__NCCL_SUM = 0,
    IDIST__NCCL_PROD = 1,
    IDIST__NCCL_MAX = 2,
    IDIST__NCCL_MIN = 3,
    IDIST__NCCL_AVG = 4
};

// clang-format off
#define IDIST__NCCL_FUNCTIONS(X)                                                                  \
    X(int, GetVersion, (int *version))                                                            \
    X(int, GetUniqueId, (idist__nccl_id *id))                                                     \
    X(const char *, GetErrorString, (int result))                                                 \
    X(const char *, GetLastError, (void *comm))                                                   \
    X(int, CommInitRankConfig, (void **comm, int size, idist__nccl_id id, int rank,               \
                                void *config))                                                    \
    X(int, CommFinalize, (void *comm))                                                            \
    X(int, CommDestroy, (void *comm))                                                             \
    X(int, CommAbort, (void *comm))                                                               \
    X(int, CommGetAsyncError, (void *comm, int *result))                                          \
    X(int, CommCount, (void *comm, int *size))                                                    \
    X(int, CommUserRank, (void *comm, int *rank))                                                 \
    X(int, CommCuDevice, (void *comm, int *device))                                               \
    X(int, RedOpCreatePreMulSum, (int *op, void *factor, int type, int on_host, void *comm))      \
    X(int, RedOpDestroy, (int op, void *comm))                                                    \
    X(int, GroupStart, (void))                                                                    \
    X(int, GroupEnd, (void))                                                                      \
    X(int, AllReduce, (const void *send, void *recv, size_t count, int type, int op,              \
                       void *comm, cudaStream_t))                                                 \
    X(int, Reduce, (const void *send, void *recv, size_t count, int type, int op,                 \
                    int root, void *comm, cudaStream_t))                                          \
    X(int, Broadcast, (const void *send, void *recv, size_t count, int type, int root,            \
                       void *comm, cudaStream_t))                                                 \
    X(int, AllGather, (const void *send, void *recv, size_t count, int type,                      \
                       void *comm, cudaStream_t))                                                 \
    X(int, ReduceScatter, (const void *send, void *recv, size_t count, int type,                  \
                           int op, void *comm, cudaStream_t))                                     \
    X(int, Send, (const void *send, size_t count, int type, int to, void *comm, cudaStream_t))    \
    X(int, Recv, (void *recv, size_t count, int type, int from, void *comm, cudaStream_t))
// clang-format on

typedef struct idist__nccl {
    int version;                              // 22809 is 2.28.9; 0: no NCCL
    int (*CommRevoke)(void *comm, int flags); // NULL: not in this version
#define IDIST__X(result, name, args) result(*name) args;
    IDIST__NCCL_FUNCTIONS(IDIST__X)
#undef IDIST__X
} idist__nccl;

#ifndef IDIST__NCCL_FILE
#define IDIST__NCCL_FILE "libnccl.so.2"
#endif

// The library of a Python package (nvidia-nccl-cu12, which PyTorch installs) below this folder.
static void *idist__nccl_load_in_python(const char *prefix, const char *below) {
    char pattern[512];

    if (!prefix) return NULL;
    snprintf(pattern, sizeof pattern,
             "%s%s/lib*/python3*/*-packages/nvidia/nccl/lib/" IDIST__NCCL_FILE, prefix, below);

    return idist__os_library_match(pattern);
}

// Looks where the loader does, then in Python's environments.
static void *idist__nccl_load_library(void) {
    void *library = idist__os_library_open(IDIST__NCCL_FILE);

    if (!library) library = idist__nccl_load_in_python(idist__os_env("VIRTUAL_ENV"), "");
    if (!library) library = idist__nccl_load_in_python(idist__os_env("CONDA_PREFIX"), "");
    if (!library) library = idist__nccl_load_in_python(idist__os_env("HOME"), "/.local");
    if (!library) library = idist__nccl_load_in_python("/usr/local", "");
    if (!library) library = idist__nccl_load_in_python("/usr", "");
    return library ? library : idist__os_library_open(IDIST__NCCL_FILE); // for the reason
}

// Fills the table, or stores the reason why not. A library that is linked with the program comes
// first. The library is never unloaded, because it has threads.
static void idist__nccl_load_once(idist__nccl *nccl, char *reason, size_t capacity) {
    const char *file = idist__os_env("IDIST_NCCL_LIB"), *missing = NULL;
    void *library = file ? NULL : idist__os_library_open(NULL); // the program and its libraries
    void *at;

    if (library && !idist__os_library_find(library, "ncclGetVersion")) library = NULL;
    if (!library) library = file ? idist__os_library_open(file) : idist__nccl_load_library();

    if (!library) {
        snprintf(reason, capacity, "NCCL could not be loaded: %s", idist__os_library_error());
        return;
    }
#define IDIST__X(result, name, args)                                                   \
    if ((at = idist__os_library_find(library, "nccl" #name)) == NULL) missing = #name; \
    memcpy(&nccl->name, &at, sizeof at); // C does not convert object pointers to function pointers
    IDIST__NCCL_FUNCTIONS(IDIST__X)
#undef IDIST__X
    if (missing)
        snprintf(reason, capacity, "the NCCL that was loaded has no nccl%s; use 2.14 or later",
                 missing);
    else if (nccl->GetVersion(&nccl->version) != IDIST__NCCL_OK)
        snprintf(reason, capacity, "ncclGetVersion failed");

    at = nccl->version >= 22807 ? idist__os_library_find(library, "ncclCommRevoke") : NULL;
    memcpy(&nccl->CommRevoke, &at, sizeof at);
}

//------------------------------------------------------------------------------
// [nccl:job]  NCCL calls that may never return, each in a thread of its own
// uses clock os:thread gpu:types device load
//
// Creating, aborting and finalizing a communicator may wait for other ranks for ever. A job does it
// in a thread; whoever started the job waits for it until a deadline, and then leaves it to itself:
//
//     group set up     JOB_INIT       idist__gpu_setup_init_wait, up to the init time-out
//     group failed     JOB_ABORT      idist__nccl_abort_wait for a moment, then
//     idist__nccl_abort_reap group closed     JOB_FINALIZE   idist__nccl_abort_reap, at the end of
//     the world
//
// NCCL must not be inside a call with a communicator that is aborted. From 2.28.7 on ncclCommRevoke
// makes every call return first. Before that idist makes communicators non-blocking, so that calls
// return at once, and the abort waits at the gate until nobody is inside.
//------------------------------------------------------------------------------

#define IDIST__NCCL_CONFIG_MAGIC 0xcafebeef

// ncclConfig_t of NCCL 2.14, which later versions accept too.
typedef struct idist__nccl_config {
    size_t nbytes;
    unsigned magic, version;
    int blocking;
} idist__nccl_config;

typedef enum idist__nccl_job_kind {
    IDIST__JOB_INIT,    // creates a communicator and connects its ranks
    IDIST__JOB_ABORT,   // releases whoever is inside, and frees it
    IDIST__JOB_FINALIZE // ends it together with the other ranks
} idist__nccl_job_kind;

// Whether a thread is inside a call of NCCL with a communicator. On the heap, because a job that
// never ends outlives the world.
typedef struct idist__nccl_gate {
    int inside; // atomic
} idist__nccl_gate;

// The phases of a JOB_INIT.
typedef enum idist__nccl_phase {
    IDIST__INIT_CREATING,
    IDIST__INIT_CONNECTING, // the communicator exists
    IDIST__INIT_DONE,       // the job no longer owns the communicator
    IDIST__INIT_GIVEN_UP    // nobody waits for the job any more
} idist__nccl_phase;
typedef struct idist__nccl_job {
    idist__nccl nccl; // a copy: the job may outlive the world
    idist__nccl_job_kind kind;
    int device, rank, size;
    int result;
    int state; // atomic: IDIST__JOB_STATE_*
    void *comm;
    idist__os_thread thread;
    struct idist__nccl_job *next; // in gpu->ending_jobs
    // JOB_INIT:
    int phase; // atomic: idist__nccl_phase
    idist__nccl_id id;
    void *config;        // a copy
    cudaStream_t stream; // where it connects the ranks, ...
    char *buffer;        // ... with this memory; its thread frees both
    // JOB_ABORT:
    idist__nccl_gate *gate;           // it waits until nobody is inside, ...
    struct idist__nccl_job *init_job; // ... and until this JOB_INIT ends, which it then frees
    int64_t deadline_ns;              // of both waits
    bool keep_memory;                 // a graph holds calls: do not free the communicator
} idist__nccl_job;

#ifndef IDIST_NCCL_CONNECT_BYTES
#define IDIST_NCCL_CONNECT_BYTES (16 << 20)
#endif
#define IDIST__NCCL_LEAVE_MS 4000 // how long an abort waits for a thread to leave NCCL

static bool idist__nccl_job_is_given_up(const idist__nccl_job *job) {
    return __atomic_load_n(&job->phase, __ATOMIC_ACQUIRE) == IDIST__INIT_GIVEN_UP;
}

// Whether a job must stop waiting. A JOB_FINALIZE waits for the other ranks until the world is
// gone.
static bool idist__nccl_job_must_stop(const idist__nccl_job *job) {
    if (job->kind == IDIST__JOB_INIT) return idist__nccl_job_is_given_up(job);
    if (job->kind == IDIST__JOB_ABORT) return idist__os_clock_now_ns() > job->deadline_ns;
    return __atomic_load_n(&job->state, __ATOMIC_ACQUIRE) == IDIST__JOB_STATE_LEFT;
}

// The final result of a call with a non-blocking communicator; IN_PROGRESS if the job must stop
// waiting first.
static int idist__nccl_job_wait_result(const idist__nccl_job *job, int result) {
    int turns = 0;

    while (result == IDIST__NCCL_IN_PROGRESS && !idist__nccl_job_must_stop(job)) {
        idist__gpu_device_nap(&turns);
        if (job->nccl.CommGetAsyncError(job->comm, &result) != IDIST__NCCL_OK)
            return IDIST__NCCL_INTERNAL_ERROR;
    }

    return result;
}

// NCCL connects ranks when it first uses an algorithm (NCCL_RUNTIME_CONNECT). That call waits on
// the host until all ranks make it, and a program whose ranks run ahead of each other would hang
// there. So every algorithm is used once here, where all ranks are.
//
// Which algorithm NCCL takes depends on the operation, the size, and whether a switch can do the
// reduction (sums of floats, yes; products, no). Broadcast and reduce use the ring, as do products
// of some size. On large clusters, calls larger than IDIST_NCCL_CONNECT_BYTES may get an algorithm
// that no smaller size gets. Pairs of ranks are left to their first message: connecting all of them
// would take hundreds of MB that a program without messages never needs.
static int idist__nccl_job_connect(idist__nccl_job *job) {
    const idist__nccl *nccl = &job->nccl;
    char *at = job->buffer;
    size_t nbytes;
    int step, result = IDIST__NCCL_OK;

    for (nbytes = 8; nbytes <= (size_t)IDIST_NCCL_CONNECT_BYTES; nbytes *= 8) {
        size_t n = nbytes / 4, each = n / (size_t)job->size ? n / (size_t)job->size : 1;
        char *mine = at + (size_t)job->rank * each * 4;

        for (step = 0; step < 5 && result == IDIST__NCCL_OK; step++) {
            int type = step % 2 ? IDIST__NCCL_I32 : IDIST__NCCL_F32;
            int op = step % 2 ? IDIST__NCCL_PROD : IDIST__NCCL_SUM;

            if (idist__nccl_job_is_given_up(job)) result = IDIST__NCCL_INTERNAL_ERROR;
            else if (step < 2)
                result = nccl->AllReduce(at, at, n, type, op, job->comm, job->stream);
            else if (step < 4)
                result = nccl->ReduceScatter(at, mine, each, type, op, job->comm, job->stream);
            else result = nccl->AllGather(mine, at, each, type, job->comm, job->stream);
            result = idist__nccl_job_wait_result(job, result);
        }
    }

    return result;
}

// Waits for the calls of idist__nccl_job_connect to finish on the device.
static int idist__nccl_job_connected(idist__nccl_job *job) {
    int turns = 0, result = IDIST__NCCL_OK;
    cudaError_t error;

    while ((error = cudaStreamQuery(job->stream)) == cudaErrorNotReady &&
           result == IDIST__NCCL_OK) {
        cudaGetLastError();
        if (idist__nccl_job_is_given_up(job)) return IDIST__NCCL_INTERNAL_ERROR;
        idist__gpu_device_nap(&turns);
        if (job->nccl.CommGetAsyncError(job->comm, &result) != IDIST__NCCL_OK)
            result = IDIST__NCCL_INTERNAL_ERROR;
    }

    if (result == IDIST__NCCL_OK && error != cudaSuccess) result = IDIST__NCCL_CUDA_ERROR;

    return result;
}

// Moves a JOB_INIT on to its next phase. False: it was given up.
static bool idist__nccl_job_enter_phase(idist__nccl_job *job, idist__nccl_phase to) {
    int from = (int)to - 1;

    return __atomic_compare_exchange_n(&job->phase, &from, (int)to, false, __ATOMIC_ACQ_REL,
                                       __ATOMIC_ACQUIRE);
}

// If the job has been given up it aborts the communicator itself, unless another job does that
// (idist__gpu_setup_give_up).
static void idist__nccl_job_run_init(idist__nccl_job *job) {
    const idist__nccl *nccl = &job->nccl;

    if (!job->comm)
        job->result =
            nccl->CommInitRankConfig(&job->comm, job->size, job->id, job->rank, job->config);
    if (job->comm) job->result = idist__nccl_job_wait_result(job, job->result);

    if (!idist__nccl_job_enter_phase(job, IDIST__INIT_CONNECTING)) {
        if (job->comm) nccl->CommAbort(job->comm);
        return;
    }

    if (job->result == IDIST__NCCL_OK && job->size > 1) {
        job->result = idist__nccl_job_connect(job);
        if (job->result == IDIST__NCCL_OK) job->result = idist__nccl_job_connected(job);
    }

    if (!idist__nccl_job_enter_phase(job, IDIST__INIT_DONE) && !nccl->CommRevoke)
        nccl->CommAbort(job->comm);
}

// Frees a JOB_INIT's resources on the device. Neither call waits for the work there.
static void idist__nccl_job_free_buffer(idist__nccl_job *job) {
    if (job->buffer) cudaFreeAsync(job->buffer, job->stream);
    if (job->stream) cudaStreamDestroy(job->stream);
    job->buffer = NULL;
    job->stream = NULL;
}

static bool idist__nccl_job_done(const idist__nccl_job *job) {
    return __atomic_load_n(&job->state, __ATOMIC_ACQUIRE) != 0;
}

// A thread still inside NCCL looks at the gate when it comes out.
static void idist__nccl_job_free(idist__nccl_job *job) {
    if (job->kind == IDIST__JOB_ABORT && job->result != IDIST__NCCL_IN_PROGRESS) free(job->gate);
    free(job->config);
    free(job);
}

// Waits for a job until the deadline and frees it. False: it has not ended, is left to itself, and
// *result is IN_PROGRESS.
static bool idist__nccl_job_join(idist__nccl_job *job, int64_t deadline_ns, int *result) {
    idist__os_thread thread;

    while (!idist__nccl_job_done(job) && idist__os_clock_now_ns() < deadline_ns)
        idist__os_clock_pause_ns(100000);

    thread = job->thread;
    *result = IDIST__NCCL_IN_PROGRESS;

    if (__atomic_exchange_n(&job->state, IDIST__JOB_STATE_LEFT, __ATOMIC_ACQ_REL) !=
        IDIST__JOB_STATE_DONE) {
        idist__os_thread_detach(thread); // the job frees itself
        return false;
    }

    idist__os_thread_join(thread);
    *result = job->result;
    idist__nccl_job_free(job);

    return true;
}

// In four steps, because NCCL frees what other threads may still use: a revocation, where NCCL has
// it, brings back what is inside NCCL; the thread that creates the communicator ends; so do the
// threads behind the gate; then the communicator is freed. Where a thread stays inside NCCL beyond
// the deadline, the communicator stays in memory and the result is IN_PROGRESS.
static void idist__nccl_job_run_abort(idist__nccl_job *job) {
    const idist__nccl *nccl = &job->nccl;
    int turns = 0, revoked = IDIST__NCCL_OK, ignored;

    job->deadline_ns = idist__os_clock_deadline(IDIST__NCCL_LEAVE_MS);
    job->result = IDIST__NCCL_IN_PROGRESS;
    if (nccl->CommRevoke)
        revoked = idist__nccl_job_wait_result(job, nccl->CommRevoke(job->comm, 0));
    if (job->init_job && !idist__nccl_job_join(job->init_job, job->deadline_ns, &ignored)) return;
    if (revoked == IDIST__NCCL_IN_PROGRESS) return;

    while (job->gate && __atomic_load_n(&job->gate->inside, __ATOMIC_SEQ_CST)) {
        if (idist__nccl_job_must_stop(job)) return;
        idist__gpu_device_nap(&turns);
    }

    job->result =
        job->keep_memory && nccl->CommRevoke ? IDIST__NCCL_OK : nccl->CommAbort(job->comm);
}

static void *idist__nccl_job_run(void *arg) {
    idist__nccl_job *job = (idist__nccl_job *)arg;
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;

    cudaSetDevice(job->device);
    cudaThreadExchangeStreamCaptureMode(&mode);

    if (job->kind == IDIST__JOB_INIT) {
        idist__nccl_job_run_init(job);
        idist__nccl_job_free_buffer(job);
    } else if (job->kind == IDIST__JOB_ABORT) {
        idist__nccl_job_run_abort(job);
    } else {
        job->result = idist__nccl_job_wait_result(job, job->nccl.CommFinalize(job->comm));
        if (job->result == IDIST__NCCL_OK) job->result = job->nccl.CommDestroy(job->comm);
    }

    if (__atomic_exchange_n(&job->state, IDIST__JOB_STATE_DONE, __ATOMIC_ACQ_REL) ==
        IDIST__JOB_STATE_LEFT)
        idist__nccl_job_free(job);

    return NULL;
}

static idist__nccl_job *idist__nccl_job_new(const idist__nccl *nccl, idist__nccl_job_kind what,
                                            int device, void *comm) {
    idist__nccl_job *job = (idist__nccl_job *)calloc(1, sizeof *job);

    if (!job) return NULL;
    job->nccl = *nccl;
    job->kind = what;
    job->device = device;
    job->comm = comm;
    return job;
}

// Frees a job that has no thread. NULL: nothing.
static void idist__nccl_job_discard(idist__nccl_job *job) {
    if (!job) return;
    idist__nccl_job_free_buffer(job);
    free(job->config);
    free(job);
}

// Frees the job if it cannot start a thread.
static bool idist__nccl_job_start(idist__nccl_job *job) {
    if (job && idist__os_thread_start(&job->thread, idist__nccl_job_run, job) == 0) return true;
    idist__nccl_job_discard(job);
    return false;
}

//------------------------------------------------------------------------------
// [nccl:issue]  which of NCCL's functions serve a call
// uses base:type float kind model core:world extent gpu:types gpu:task load
//------------------------------------------------------------------------------

static const char *idist__nccl_issue_text(const idist__nccl *nccl, int result, char *text,
                                          size_t capacity) {
    const char *last = result == IDIST__NCCL_OK ? NULL : nccl->GetLastError(NULL);
    snprintf(text, capacity, "%s%s%.160s", nccl->GetErrorString(result), last && *last ? ": " : "",
             last ? last : "");
    return text;
}

// ncclDataType_t of a dtype; -1: NCCL has none.
static int idist__nccl_issue_type(idist_dtype dtype) {
    static const signed char types[] = {0, 1, -1, -1, 2, 3, 4, 5, 6, 9, 7, 8, 10, 11};
    return (size_t)dtype < IDIST__COUNT_OF(types) ? types[dtype] : -1;
}

// Whether NCCL supports the call, which all ranks answer alike. Messages only on a stream: NCCL has
// no tags and matches by order alone. What a probe has matched did not come through NCCL.
static bool idist__nccl_issue_supports(const idist_group *g, const idist__call *c,
                                       const void *stream) {
    if (idist__kind_is_p2p(c->kind)) return stream != NULL && c->label != IDIST__MRECV;
    if (c->kind == IDIST__SCAN || c->kind == IDIST__EXSCAN) return false;
    if (!idist__kind_reduces(c->kind)) return true;
    if ((c->dtype == IDIST_F8E4M3 || c->dtype == IDIST_F8E5M2) &&
        !idist__gpu_of(g->w)->nccl_reduces_f8)
        return false;
    return idist__nccl_issue_type(c->dtype) >= 0 &&
           (c->op <= IDIST_AVG || idist__gpu_task_op_is_premul(g, c));
}

// With a non-blocking communicator, IN_PROGRESS is no error of a call in a group.
static bool idist__nccl_issue_is_ok(int result) {
    return result == IDIST__NCCL_OK || result == IDIST__NCCL_IN_PROGRESS;
}

// The result of a group: the first error, otherwise whether it is in progress.
static int idist__nccl_issue_merge_results(int calls, int end) {
    if (!idist__nccl_issue_is_ok(calls)) return calls;
    return end == IDIST__NCCL_OK ? calls : end;
}

// A reduction to each rank.
static int idist__nccl_issue_reduce_scatterv(const idist__nccl *nccl, const idist_group *g,
                                             const idist__call *c, int type, int op, void *comm,
                                             cudaStream_t stream) {
    size_t size = idist_dtype_size(c->dtype);
    int result = nccl->GroupStart(), end;
    int i;

    for (i = 0; i < g->size && idist__nccl_issue_is_ok(result); i++) {
        const char *block = (const char *)c->send + idist__extent_block_at(c, i) * size;
        if (c->sendcounts[i])
            result = nccl->Reduce(block, c->recv, c->sendcounts[i], type, op, i, comm, stream);
    }

    end = nccl->GroupEnd();

    return idist__nccl_issue_merge_results(result, end);
}

static int idist__nccl_issue_reduce(const idist__nccl *nccl, const idist_group *g,
                                    const idist__call *c, void *comm, cudaStream_t stream) {
    static const int ops[] = {IDIST__NCCL_SUM, IDIST__NCCL_PROD, IDIST__NCCL_MIN, IDIST__NCCL_MAX,
                              IDIST__NCCL_AVG};
    int type = idist__nccl_issue_type(c->dtype);
    bool premul = idist__gpu_task_op_is_premul(g, c);
    int op = premul ? IDIST__NCCL_SUM : ops[c->op];
    int result = IDIST__NCCL_OK;
    double factor = premul ? idist__world_user_op(g, c)->factor : 1;
    float narrow = (float)factor;
    void *scalar = c->dtype == IDIST_F64 ? (void *)&factor : &narrow;

    if (idist__dtype_is_narrow(c->dtype))
        idist__small_float_narrow(&narrow, &narrow, 1, c->dtype); // in place: its first bytes
    if (premul) result = nccl->RedOpCreatePreMulSum(&op, scalar, type, 1, comm);
    if (result != IDIST__NCCL_OK) return result;
    if (c->kind == IDIST__ALL_REDUCE)
        result = nccl->AllReduce(c->send, c->recv, c->count, type, op, comm, stream);
    else if (c->kind == IDIST__REDUCE)
        result = nccl->Reduce(c->send, c->recv, c->count, type, op, c->root, comm, stream);
    else if (c->kind == IDIST__REDUCE_SCATTERV)
        result = idist__nccl_issue_reduce_scatterv(nccl, g, c, type, op, comm, stream);
    else result = nccl->ReduceScatter(c->send, c->recv, c->count, type, op, comm, stream);
    if (premul) nccl->RedOpDestroy(op, comm);

    return result;
}

// Exchanges between all pairs of ranks, as sends and receives of bytes. A rank copies its own part.
static int idist__nccl_issue_exchange(const idist__nccl *nccl, const idist_group *g,
                                      const idist__call *c, const void *send, void *comm,
                                      cudaStream_t stream) {
    size_t size = idist_dtype_size(c->dtype), sent, got;
    int result = nccl->GroupStart(), end;
    int i, me = g->rank;

    for (i = 0; i < g->size && idist__nccl_issue_is_ok(result); i++) {
        const char *from = idist__extent_part(c, (char *)(uintptr_t)send, me, i, true, &sent);
        char *to = idist__extent_part(c, (char *)c->recv, i, me, false, &got);
        if (i == me && sent && from != to &&
            cudaMemcpyAsync(to, from, sent * size, cudaMemcpyDefault, stream) != cudaSuccess)
            result = IDIST__NCCL_CUDA_ERROR;
        if (i != me && sent)
            result = nccl->Send(from, sent * size, IDIST__NCCL_U8, i, comm, stream);
        if (i != me && got && idist__nccl_issue_is_ok(result))
            result = nccl->Recv(to, got * size, IDIST__NCCL_U8, i, comm, stream);
    }

    end = nccl->GroupEnd();

    return idist__nccl_issue_merge_results(result, end);
}

// Allocates memory for NCCL in the order of a stream; cudaFreeAsync frees it.
static cudaError_t idist__nccl_issue_alloc(const idist__gpu *gpu, void **p, size_t nbytes,
                                           cudaStream_t stream) {
    return gpu->pool ? cudaMallocFromPoolAsync(p, nbytes, gpu->pool, stream)
                     : cudaMallocAsync(p, nbytes, stream);
}

// An all_to_all or all_to_allv in place sends a copy of its buffer, which the caller frees in
// stream order.
static int idist__nccl_issue_all_to_all_in_place(const idist__nccl *nccl, const idist_group *g,
                                                 const idist__call *c, void *comm,
                                                 cudaStream_t stream, void **away) {
    const idist__gpu *gpu = idist__gpu_of(g->w);
    size_t count = (size_t)g->size * c->count, nbytes;

    if (c->kind == IDIST__ALL_TO_ALLV)
        count = idist__extent_end(c->sendcounts, c->senddispls, g->size);
    nbytes = count * idist_dtype_size(c->dtype);
    if (!nbytes) return IDIST__NCCL_OK;
    if (idist__nccl_issue_alloc(gpu, away, nbytes, stream) != cudaSuccess ||
        cudaMemcpyAsync(*away, c->send, nbytes, cudaMemcpyDefault, stream) != cudaSuccess)
        return IDIST__NCCL_CUDA_ERROR;
    return idist__nccl_issue_exchange(nccl, g, c, *away, comm, stream);
}

static int idist__nccl_issue_all_gatherv(const idist__nccl *nccl, const idist_group *g,
                                         const idist__call *c, void *comm, cudaStream_t stream) {
    size_t size = idist_dtype_size(c->dtype);
    int result = nccl->GroupStart(), end;
    int i;

    for (i = 0; i < g->size && idist__nccl_issue_is_ok(result); i++) {
        char *to = (char *)c->recv + idist__extent_displ(c->recvcounts, c->recvdispls, i) * size;
        if (c->recvcounts[i])
            result = nccl->Broadcast(i == g->rank ? c->send : to, to, c->recvcounts[i] * size,
                                     IDIST__NCCL_U8, i, comm, stream);
    }

    end = nccl->GroupEnd();

    return idist__nccl_issue_merge_results(result, end);
}

static int idist__nccl_issue_call(const idist__gpu *gpu, const idist_group *g, idist__gpu_op *op,
                                  cudaStream_t stream) {
    const idist__nccl *nccl = gpu->nccl;
    const idist__call *c = &op->call;
    void *comm = op->comm;
    size_t nbytes = c->count * idist_dtype_size(c->dtype);

    if (!comm) return IDIST__NCCL_OK; // the group has failed
    if (c->kind == IDIST__BARRIER)
        return nccl->AllReduce(gpu->barrier_word, gpu->barrier_word, 1, IDIST__NCCL_I32,
                               IDIST__NCCL_MAX, comm, stream);
    if (c->kind == IDIST__ALL_GATHERV)
        return idist__nccl_issue_all_gatherv(nccl, g, c, comm, stream);
    if (c->kind == IDIST__REDUCE_SCATTERV)
        return idist__nccl_issue_reduce(nccl, g, c, comm, stream);
    if ((c->kind == IDIST__ALL_TO_ALL || c->kind == IDIST__ALL_TO_ALLV) && c->send == c->recv)
        return idist__nccl_issue_all_to_all_in_place(nccl, g, c, comm, stream, &op->send_copy);
    if (idist__kind_is_v(c->kind) || c->kind == IDIST__ALL_TO_ALL || c->kind == IDIST__GATHER ||
        c->kind == IDIST__SCATTER)
        return idist__nccl_issue_exchange(nccl, g, c, c->send, comm, stream);
    if (!nbytes) return IDIST__NCCL_OK;
    if (c->kind == IDIST__BROADCAST)
        return nccl->Broadcast(c->recv, c->recv, nbytes, IDIST__NCCL_U8, c->root, comm, stream);
    if (c->kind == IDIST__ALL_GATHER)
        return nccl->AllGather(c->send, c->recv, nbytes, IDIST__NCCL_U8, comm, stream);
    if (c->kind == IDIST__SEND)
        return nccl->Send(c->send, nbytes, IDIST__NCCL_U8, c->root, comm, stream);
    if (c->kind == IDIST__RECV)
        return nccl->Recv(c->recv, nbytes, IDIST__NCCL_U8, c->root, comm, stream);

    return idist__nccl_issue_reduce(nccl, g, c, comm, stream);
}

//------------------------------------------------------------------------------
// [nccl:abort]  the end of a communicator
// uses clock fail base:log model gpu:types device load job issue
//------------------------------------------------------------------------------

// Whether a thread is inside a call of NCCL with the group's communicator.
static bool idist__nccl_abort_is_inside(const idist__gpu_group *gg) {
    return gg->gate && __atomic_load_n(&gg->gate->inside, __ATOMIC_SEQ_CST);
}

// Starts to abort the communicator, which ends the group's work on the device. Without
// ncclCommRevoke a thread that is inside NCCL starts it when it comes out: at once, unless the
// communicator is a blocking one of the user's.
static void idist__nccl_abort_group(idist_group *g) {
    idist__gpu *gpu = idist__gpu_of(g->w);
    idist__gpu_group *gg = idist__gpu_group_of(g);

    if (!gg || !gg->comm) return;
    gg->must_abort = true;
    if (!gpu->nccl->CommRevoke && idist__nccl_abort_is_inside(gg)) return;

    gg->abort_job = idist__nccl_job_new(gpu->nccl, IDIST__JOB_ABORT, gpu->device, gg->comm);
    gg->comm = NULL;

    if (gg->abort_job) {
        gg->abort_job->gate = gg->gate;
        gg->abort_job->keep_memory = gg->captured;
    }

    if (gg->captured)
        idist__log_print(&g->w->log, IDIST_LOG_WARN,
                         "a CUDA graph may hold calls of the group that failed: do not launch it "
                         "again; %s",
                         gpu->nccl->CommRevoke ? "the communicator stays in memory"
                                               : "a thread waits in NCCL until it is destroyed");
    if (idist__nccl_job_start(gg->abort_job)) return;

    gg->abort_job = NULL;
    idist__log_print(&g->w->log, IDIST_LOG_ERROR,
                     "cannot start a thread to abort NCCL: the device may stay busy");
}

// Aborts, and gives the device a little time to leave the caller's buffers. The rest of the abort
// proceeds by itself, because NCCL also waits for the program's own work on its streams.
static void idist__nccl_abort_wait(idist_group *g) {
    idist__gpu_group *gg = idist__gpu_group_of(g);
    int64_t deadline = idist__os_clock_deadline(IDIST__GPU_GRACE_MS);
    int turns = 0;

    idist__nccl_abort_group(g);
    if (!gg || !gg->abort_job || gg->waited_for_abort) return;
    gg->waited_for_abort = true;
    while (!idist__nccl_job_done(gg->abort_job) && idist__os_clock_now_ns() < deadline)
        idist__gpu_device_nap(&turns);
}

// Leaves an abort to itself: idist__nccl_abort_reap collects its thread. The gate goes with it.
static void idist__nccl_abort_leave(idist_group *g) {
    idist__gpu *gpu = idist__gpu_of(g->w);
    idist__gpu_group *gg = idist__gpu_group_of(g);

    if (!gg) return;
    gg->must_abort = gg->waited_for_abort = false;
    if (!gg->abort_job) return;
    gg->abort_job->next = gpu->ending_jobs;
    gpu->ending_jobs = gg->abort_job;
    gg->abort_job = NULL;
    if (!idist__nccl_abort_is_inside(gg)) gg->gate = NULL; // else the group stays, too
}

static void idist__nccl_abort_log_stays(const idist__world *w) {
    idist__log_print(&w->log, IDIST_LOG_WARN,
                     "a call of NCCL, or ncclCommRevoke, has not returned: the communicator of a "
                     "group that has ended stays in memory, and the device may stay busy");
}

// The abort of a group that is freed.
static void idist__nccl_abort_end(idist_group *g) {
    idist__gpu_group *gg = idist__gpu_group_of(g);

    idist__nccl_abort_group(g);
    if (gg->comm) idist__nccl_abort_log_stays(g->w);
    gg->comm = NULL;
    idist__nccl_abort_leave(g);
}

// Says what has become of a communicator that was aborted. IN_PROGRESS without `left`: it stays in
// memory.
static void idist__nccl_abort_log(const idist__world *w, int result, bool left) {
    char text[256];

    if (left)
        idist__log_print(&w->log, IDIST_LOG_ERROR,
                         "ncclCommAbort has not returned: the device may stay busy");
    else if (result == IDIST__NCCL_IN_PROGRESS) idist__nccl_abort_log_stays(w);
    else if (result != IDIST__NCCL_OK)
        idist__log_print(&w->log, IDIST_LOG_WARN, "ncclCommAbort: %s",
                         idist__nccl_issue_text(idist__gpu_of(w)->nccl, result, text, sizeof text));
}

// Waits for a thread that ends a communicator until the deadline. False: it has not come back. If a
// graph holds calls, an old NCCL stays in the abort until the graph is destroyed: it gets little
// time, and is no error.
static bool idist__nccl_abort_reap_job(const idist__world *w, idist__nccl_job *job,
                                       int64_t deadline_ns) {
    bool aborts = job->kind == IDIST__JOB_ABORT;
    bool stays = aborts && job->keep_memory && !job->nccl.CommRevoke;
    int64_t soon_ns = idist__os_clock_deadline(IDIST__GPU_GRACE_MS);
    int result;
    bool ended;

    if (stays && soon_ns < deadline_ns) deadline_ns = soon_ns;
    ended = idist__nccl_job_join(job, deadline_ns, &result);
    if (aborts && (ended || !stays)) idist__nccl_abort_log(w, result, !ended);

    return ended || aborts;
}

// Collects the threads that have ended a communicator; with a deadline, all of them. False: one
// that finalizes has not come back.
static bool idist__nccl_abort_reap(const idist__world *w, int64_t deadline_ns) {
    idist__nccl_job **at = &idist__gpu_of(w)->ending_jobs, *job;
    bool all = true;

    while ((job = *at) != NULL) {
        if (!deadline_ns && !idist__nccl_job_done(job)) {
            at = &job->next;
            continue;
        }

        *at = job->next;
        all = idist__nccl_abort_reap_job(w, job, deadline_ns) && all;
    }

    return all;
}

// Handles an error that NCCL reports. If another rank is the cause, NCCL does not say which; the
// host's backend knows, or will within a second. Until then no call of the group completes,
// whatever its event says.
static void idist__nccl_abort_report_error(idist_group *g, int result) {
    idist__gpu_group *gg = idist__gpu_group_of(g);
    char text[256];

    if (g->status != IDIST_OK || gg->fault) return;

    if (result == IDIST__NCCL_REMOTE_ERROR || result == IDIST__NCCL_TIMEOUT) {
        gg->fault = result;
        gg->fault_deadline_ns = idist__os_clock_deadline(IDIST__GPU_FAULT_MS);
        return;
    }

    idist__nccl_issue_text(idist__gpu_of(g->w)->nccl, result, text, sizeof text);
    idist__gpu_device_fail_group(g, idist__fail(IDIST_ERR_DEVICE, "NCCL: %s", text));
}

static void idist__nccl_abort_check_errors(idist_group *g) {
    const idist__nccl *nccl = idist__gpu_of(g->w)->nccl;
    idist__gpu_group *gg = idist__gpu_group_of(g);
    int state = IDIST__NCCL_OK;
    char text[256];

    if (!gg || !gg->comm || g->status != IDIST_OK) return;

    if (gg->fault) {
        if (idist__os_clock_now_ns() < gg->fault_deadline_ns) return;
        idist__nccl_issue_text(nccl, gg->fault, text, sizeof text);
        idist__gpu_device_fail_group(
            g, idist__fail(
                   gg->fault == IDIST__NCCL_TIMEOUT ? IDIST_ERR_TIMEOUT : IDIST_ERR_PEER_LOST,
                   "NCCL: %s; the host found no rank missing: check the network between the GPUs",
                   text));
        return;
    }

    if (nccl->CommGetAsyncError(gg->comm, &state) == IDIST__NCCL_OK &&
        (state == IDIST__NCCL_OK || state == IDIST__NCCL_IN_PROGRESS))
        return;
    idist__nccl_abort_report_error(g, state);
}

//------------------------------------------------------------------------------
// [nccl:launch]  calls that NCCL serves
// uses mutex cond mem kind model core:world explain core:task core:group
// uses core:wait extent core:call gpu:types device gpu:task load job issue
// uses abort
//
// NCCL gets a call at once, on the caller's stream or on the group's own. At the same time the
// ranks meet through the host's backend, which finds calls that differ, late ranks and lost ones as
// it does for host memory; NCCL alone would hang. When a group fails its communicator is aborted,
// which ends the group's work on the device.
//
//     idist__gpu_engine_start          the call gets its fingerprint and enters the group's queue
//     idist__nccl_launch_start_meeting the host's backend gets a barrier, or the counts, with it
//     idist__nccl_launch_call        NCCL gets the call: now, or at idist_group_end
//     idist__gpu_engine_part_done      the ranks have met
//     idist__gpu_engine_complete_calls the event behind the call has come: the call is complete
//------------------------------------------------------------------------------

// The stream that a call is enqueued on.
static cudaStream_t idist__nccl_launch_stream(const idist__task *t) {
    return idist__task_on_stream(t) ? (cudaStream_t)t->stream
                                    : idist__gpu_group_of(t->group)->stream[IDIST__STREAM_NCCL];
}

// Whether a call has been ended before NCCL gets it.
static bool idist__nccl_launch_is_ended(const idist__task *t) {
    return t->group->status != IDIST_OK || t->group->w->thread_stops;
}

// Whether it is the turn of these calls in all their groups. A thread before them may stay inside
// an old NCCL: calls that have been ended do not wait for it.
static bool idist__nccl_launch_can_launch(void *arg) {
    const idist__task *t;

    for (t = (const idist__task *)arg; t; t = idist__gpu_op_of(t)->next_held)
        if (idist__gpu_op_of(t)->ticket != idist__gpu_group_of(t->group)->turn &&
            !idist__nccl_launch_is_ended(t))
            return false;

    return true;
}

// In most v-forms only the two ranks of a pair know how much one sends to the other. Stores what
// this rank sends, leaves room for what the others say they send, and stores what this rank expects
// of them: the caller's counts may be gone when they answer.
static bool idist__nccl_launch_save_counts(idist__task *t) {
    const idist_group *g = t->group;
    idist__gpu_op *op = idist__gpu_op_of(t);
    int i, n = g->size;

    if (!idist__kind_is_by_pair(op->call.kind)) return true; // they are in the fingerprint
    if (!op->counts_memory)
        op->counts_memory =
            (uint64_t *)idist__mem_alloc(&g->w->cfg.mem,
                                         3 * sizeof *op->counts_memory * (size_t)g->w->group.size);

    if ((op->counts = op->counts_memory) == NULL) {
        idist__group_fail_memory(t->group);
        return false;
    }

    for (i = 0; i < n; i++) {
        op->counts[i] = idist__extent_pair(g, &op->call, i, true);
        op->counts[2 * n + i] = idist__extent_pair(g, &op->call, i, false);
    }

    return true;
}

// Starts the meeting on the host: with all ranks, or with the other side of a message.
static void idist__nccl_launch_start_meeting(idist__task *t) {
    idist__gpu_op *op = idist__gpu_op_of(t);
    const idist__call *c = &op->call;
    idist__call part;

    idist__call_init(&part, IDIST__BARRIER, NULL, NULL, 0, IDIST_U8);
    if (op->counts)
        idist__call_init(&part, IDIST__ALL_TO_ALL, op->counts, op->counts + t->group->size, 1,
                         IDIST_U64);

    if (idist__kind_is_p2p(c->kind)) {
        idist__call_init(&part, c->kind, &op->message_nbytes, &op->message_nbytes, 1, IDIST_U64);
        part.root = c->root;
        part.tag = c->tag;
        op->message_nbytes = c->kind == IDIST__SEND ? c->count * op->size : 0;
    }

    idist__gpu_task_start_part(t, &part);
}

// The meeting on the host is over. Compares the counts that pairs of ranks have told each other,
// which NCCL does not. False: they differ, as the text says.
static bool idist__nccl_launch_check_counts(const idist__task *t, char *text, size_t capacity) {
    const idist_group *g = t->group;
    const idist__gpu_op *op = idist__gpu_op_of(t);
    int i;

    if (op->call.kind == IDIST__RECV && op->message_nbytes != op->call.count * op->size) {
        idist__explain_sizes("count", g->ranks[op->call.root], op->message_nbytes,
                             g->ranks[g->rank], op->call.count * op->size, t, text, capacity);
        return false;
    }

    for (i = 0; op->counts && i < g->size; i++) {
        const uint64_t *sent = op->counts + g->size, *expected = sent + g->size;
        if (sent[i] == expected[i]) continue;
        idist__explain_pair(g->ranks[i], sent[i], g->ranks[g->rank], expected[i], t, text,
                            capacity);
        return false;
    }

    return true;
}

// Remembers a message that failed, or counts that differ: the device would wait for ever.
static void idist__nccl_launch_end_meeting(idist__task *t, idist_status status) {
    idist__gpu_op *op = idist__gpu_op_of(t);
    char text[300];
    if (status != IDIST_OK) op->meeting_status = status; // a message
    else if (!idist__nccl_launch_check_counts(t, text, sizeof text))
        op->meeting_status = IDIST_ERR_MISMATCH;
}

// All ranks have made the call and NCCL has it. True: nothing else is left to wait for.
static bool idist__nccl_launch_set_complete(idist__task *t) {
    idist__gpu_op *op = idist__gpu_op_of(t);
    op->state = IDIST__GPU_END;
    if (!idist__task_on_stream(t) || op->meeting_status) idist__gpu_task_set_waiting(t, true);
    return !op->waits_for_device;
}

// Tells an abort whether this thread is inside NCCL with the communicators of these calls.
static void idist__nccl_launch_set_inside(const idist__task *first, int inside) {
    const idist__task *t;

    for (t = first; t; t = idist__gpu_op_of(t)->next_held) {
        idist__nccl_gate *gate = idist__gpu_group_of(t->group)->gate;
        if (gate && idist__gpu_op_of(t)->comm)
            __atomic_store_n(&gate->inside, inside, __ATOMIC_SEQ_CST);
    }
}

// Waits until non-blocking communicators have begun these calls. They may be aborted meanwhile, and
// are when the world is closed. Releases the lock between looks.
static int idist__nccl_launch_wait_begun(const idist__task *first) {
    idist__world *w = first->group->w;
    const idist__nccl *nccl = idist__gpu_of(w)->nccl;
    int turns = 0, result = IDIST__NCCL_OK;
    const idist__task *t = first;

    while (t) {
        void *comm;

        idist__world_lock(w);
        comm = idist__gpu_group_of(t->group)->comm;
        if (!comm || w->thread_stops) result = IDIST__NCCL_INTERNAL_ERROR; // it was aborted
        else if (nccl->CommGetAsyncError(comm, &result) != IDIST__NCCL_OK)
            result = IDIST__NCCL_INTERNAL_ERROR;
        idist__os_mutex_unlock(&w->lock);

        if (result == IDIST__NCCL_IN_PROGRESS) idist__gpu_device_nap(&turns);
        else if (result == IDIST__NCCL_OK) t = idist__gpu_op_of(t)->next_held;
        else return result;
    }

    return result;
}

// Hands calls to NCCL: after the work in the callers' streams, as one group if there are several.
// Runs without the lock, because NCCL may wait for other ranks here.
static int idist__nccl_launch_hand_over(idist__task *first, cudaError_t *error) {
    idist__world *w = first->group->w;
    idist__gpu *gpu = idist__gpu_of(w);
    bool several = idist__gpu_op_of(first)->next_held != NULL;
    int result = IDIST__NCCL_OK;
    idist__task *t;

    for (t = first; t && *error == cudaSuccess; t = idist__gpu_op_of(t)->next_held) {
        if (idist__task_on_stream(t)) continue;
        *error = cudaEventRecord(idist__gpu_op_of(t)->event,
                                 t->stream ? (cudaStream_t)t->stream : cudaStreamLegacy);
        if (*error == cudaSuccess)
            *error =
                cudaStreamWaitEvent(idist__nccl_launch_stream(t), idist__gpu_op_of(t)->event, 0);
    }

    if (several) result = gpu->nccl->GroupStart();
    for (t = first; t && *error == cudaSuccess && idist__nccl_issue_is_ok(result);
         t = idist__gpu_op_of(t)->next_held)
        result =
            idist__nccl_issue_merge_results(idist__nccl_issue_call(gpu, t->group,
                                                                   idist__gpu_op_of(t),
                                                                   idist__nccl_launch_stream(t)),
                                            result);
    if (several) result = idist__nccl_issue_merge_results(result, gpu->nccl->GroupEnd());
    idist__nccl_launch_set_inside(first, 0);
    if (result == IDIST__NCCL_IN_PROGRESS) result = idist__nccl_launch_wait_begun(first);

    for (t = first; t && *error == cudaSuccess; t = idist__gpu_op_of(t)->next_held) {
        idist__gpu_op *op = idist__gpu_op_of(t);
        if (op->send_copy) *error = cudaFreeAsync(op->send_copy, idist__nccl_launch_stream(t));
        if (idist__task_on_stream(t) || result != IDIST__NCCL_OK || *error != cudaSuccess) continue;
        *error = cudaEventRecord(op->event, idist__nccl_launch_stream(t));
    }

    return result;
}

// Handles what has happened to a call's group in the meantime. If the world is being closed, that
// has ended the call, and aborts the communicator if it must.
static void idist__nccl_launch_end(const idist__task *t, int result, cudaError_t error) {
    idist_group *g = t->group;

    if (g->w->thread_stops) return;
    if (g->status != IDIST_OK && idist__task_on_stream(t)) idist__nccl_abort_group(g);
    else if (g->status != IDIST_OK) idist__nccl_abort_wait(g);
    if (g->status == IDIST_OK && error != cudaSuccess)
        idist__gpu_device_fail_group(g, idist__gpu_device_fail("handing a call to NCCL", error));
    else if (result != IDIST__NCCL_OK) idist__nccl_abort_report_error(g, result);
}

// Gives the calls of this thread their places in the order in which NCCL gets the calls of a group:
// that of their numbers, since the lock has not been released in between. Calls of one group share
// a place.
static void idist__nccl_launch_draw_tickets(idist__task *first) {
    idist__task *t;

    for (t = first; t; t = idist__gpu_op_of(t)->next_held)
        idist__gpu_op_of(t)->ticket = idist__gpu_group_of(t->group)->ticket_count;
    for (t = first; t; t = idist__gpu_op_of(t)->next_held)
        idist__gpu_group_of(t->group)->ticket_count = idist__gpu_op_of(t)->ticket + 1;
}

// Hands calls of this thread to NCCL, in their turn; their groups launch no other call meanwhile. A
// call that all ranks have made in that time completes here. Releases the lock while NCCL has them.
static void idist__nccl_launch_call(idist__task *first) {
    idist__world *w = first->group->w;
    idist__gpu *gpu = idist__gpu_of(w);
    bool alone = idist__task_on_stream(first) &&
                 !idist__gpu_op_of(first)->next_held; // NCCL handles captures
    int result, device = gpu->device;
    cudaError_t error = cudaSuccess;
    idist__task *t, *next;
    idist__gpu_guard guard;

    idist__nccl_launch_draw_tickets(first);
    idist__wait_until(w, idist__nccl_launch_can_launch, first);

    for (t = first; t; t = idist__gpu_op_of(t)->next_held)
        idist__gpu_op_of(t)->comm = // which stays while we are inside
            idist__nccl_launch_is_ended(t) ? NULL : idist__gpu_group_of(t->group)->comm;

    idist__nccl_launch_set_inside(first, 1);
    gpu->user_count++; // the end of the world waits for us
    idist__os_mutex_unlock(&w->lock);
    if (alone) device = idist__gpu_device_set(gpu);
    else guard = idist__gpu_device_enter(gpu);
    result = idist__nccl_launch_hand_over(first, &error);
    if (alone) idist__gpu_device_restore(gpu, device);
    else idist__gpu_device_leave(gpu, guard);
    idist__world_lock(w);
    gpu->user_count--;

    for (t = first; t; t = next) {
        idist__gpu_op *op = idist__gpu_op_of(t);
        next = op->next_held;
        op->next_held = NULL;
        op->launched = true;
        t->followed = !idist__task_on_stream(t) && result == IDIST__NCCL_OK && error == cudaSuccess;
        idist__gpu_group_of(t->group)->turn = op->ticket + 1;
        idist__nccl_launch_end(t, result, error);
        if (op->met && !t->done && idist__nccl_launch_set_complete(t))
            idist__task_complete(t, IDIST_OK, "");
        t->pinned = false;
        t->group->detached_count--;
        if (t->freed) idist__task_free(t);
    }

    if (w->blocked_count) idist__os_cond_broadcast(&w->changed); // whoever waits for its turn
    idist__world_wake_driver(w);                                 // who may be one of them
}

//------------------------------------------------------------------------------
// [nccl:setup]  how a group moves device memory
// uses clock os:thread mutex cond fail mem base:log model core:world core:group
// uses core:thread gpu:types device gpu:agree gpu:leave arena ipc:setup load
// uses job issue abort
//------------------------------------------------------------------------------

// Whether two members share a GPU.
static bool idist__gpu_setup_is_same_device(const idist_group *g, int a, int b) {
    const idist__gpu *gpu = idist__gpu_of(g->w);
    const idist__gpu_rank_info *x = &gpu->rank_infos[g->ranks[a]];
    const idist__gpu_rank_info *y = &gpu->rank_infos[g->ranks[b]];
    return x->machine_key == y->machine_key && !strcmp(x->bus_id, y->bus_id);
}

// Finds two members that share a GPU.
static bool idist__gpu_setup_find_shared(const idist_group *g, int *a, int *b) {
    for (*a = 1; *a < g->size; ++*a)
        for (*b = 0; *b < *a; ++*b)
            if (idist__gpu_setup_is_same_device(g, *a, *b)) return true;
    return false;
}

static bool idist__gpu_setup_is_one_host(const idist_group *g) {
    int i;
    for (i = 1; i < g->size && g->w->nodes[g->ranks[i]].host == g->w->nodes[g->ranks[0]].host; i++)
        continue;
    return i >= g->size;
}

// NCCL if each rank has a GPU of its own, IPC on one host, otherwise staging; or what was asked
// for.
static idist__gpu_path idist__gpu_setup_choose_path(const idist_group *g) {
    const idist__gpu *gpu = idist__gpu_of(g->w);
    const idist__gpu_rank_info *first = &gpu->rank_infos[0];
    int a, b;

    if (first->wanted_backend) return (idist__gpu_path)first->wanted_backend;
    if (gpu->nccl->version && !idist__gpu_setup_find_shared(g, &a, &b)) return IDIST__BY_NCCL;

    return IDIST__IPC_KERNELS && g->size <= IDIST__IPC_RANKS && idist__gpu_setup_is_one_host(g)
               ? IDIST__BY_IPC
               : IDIST__BY_STAGING;
}

// Gives up a communicator that is not created, or not connected, yet. False: its thread proceeds
// for now, with its resources.
static bool idist__gpu_setup_give_up(idist__nccl_job *job) {
    int phase = __atomic_exchange_n(&job->phase, (int)IDIST__INIT_GIVEN_UP, __ATOMIC_ACQ_REL);
    int ignored;
    bool ours =
        phase == IDIST__INIT_DONE || (phase == IDIST__INIT_CONNECTING && job->nccl.CommRevoke);
    idist__nccl_job *abort =
        ours ? idist__nccl_job_new(&job->nccl, IDIST__JOB_ABORT, job->device, job->comm) : NULL;

    if (abort) abort->init_job = job;
    if (abort && idist__nccl_job_start(abort)) job = abort;

    return idist__nccl_job_join(job, idist__os_clock_deadline(IDIST__GPU_GRACE_MS), &ignored);
}

// Waits for the communicator until the init time-out, while the backend watches the other ranks.
// Releases the lock between looks.
static bool idist__gpu_setup_init_wait(idist_group *g, idist__nccl_job *job, char *reason,
                                       size_t capacity) {
    idist__world *w = g->w;
    int64_t deadline = w->cfg.init_timeout_ms < 0
                           ? IDIST__FOREVER
                           : idist__os_clock_deadline(w->cfg.init_timeout_ms);
    idist__gpu_group *gg = idist__gpu_group_of(g);
    int phase, result;
    bool ended;
    char text[200];

    while (!idist__nccl_job_done(job) && g->status == IDIST_OK && !w->thread_stops &&
           idist__os_clock_now_ns() < deadline) {
        idist__os_mutex_unlock(&w->lock);
        idist__os_clock_pause_ms(1);
        idist__world_lock(w);
        if (w->driver == IDIST__DRIVER_NONE) w->backend->progress(w);
    }

    if (!idist__nccl_job_done(job)) {
        phase = __atomic_load_n(&job->phase, __ATOMIC_ACQUIRE);
        snprintf(reason, capacity, "%s has not come back after %d ms%s",
                 phase == IDIST__INIT_CREATING ? "ncclCommInitRank" : "NCCL's first call",
                 w->cfg.init_timeout_ms, w->thread_stops ? ", and the world is closed" : "");
        idist__os_mutex_unlock(&w->lock);
        ended = idist__gpu_setup_give_up(job);
        idist__world_lock(w);
        if (!ended)
            idist__log_print(&w->log, IDIST_LOG_WARN,
                             "%s; until it does, its thread and its memory on the device stay",
                             reason);
        return false;
    }

    gg->comm = job->comm;
    idist__nccl_job_join(job, 0, &result);
    if (result == IDIST__NCCL_OK) return true;
    idist__nccl_abort_group(g); // NCCL may have created a part of it
    snprintf(reason, capacity, "ncclCommInitRank: %s",
             idist__nccl_issue_text(idist__gpu_of(w)->nccl, result, text, sizeof text));

    return false;
}

// The user's own communicator, for the world. NULL: it does not fit, for `reason`.
static void *idist__gpu_setup_adopt(idist_group *g, char *reason, size_t capacity) {
    const idist__gpu *gpu = idist__gpu_of(g->w);
    void *comm = *(void *const *)g->w->cfg.nccl_comm;
    int n = 0, rank = -1, device = -1;

    if (gpu->nccl->CommCount(comm, &n) != IDIST__NCCL_OK ||
        gpu->nccl->CommUserRank(comm, &rank) != IDIST__NCCL_OK ||
        gpu->nccl->CommCuDevice(comm, &device) != IDIST__NCCL_OK)
        snprintf(reason, capacity, "desc.nccl_comm is no communicator");
    else if (n != g->size || rank != g->rank || device != gpu->device)
        snprintf(reason, capacity,
                 "desc.nccl_comm has rank %d of %d on device %d, idist rank %d of %d on device %d",
                 rank, n, device, g->rank, g->size, gpu->device);
    else {
        idist__gpu_group_of(g)->adopted = true;
        return comm;
    }

    return NULL;
}

// The bytes of a configuration that NCCL_CONFIG_INITIALIZER has made. NCCL refuses any other by its
// first members.
static size_t idist__gpu_setup_config_nbytes(const idist__nccl_config *config) {
    return config->magic == IDIST__NCCL_CONFIG_MAGIC && config->nbytes > sizeof *config
               ? config->nbytes
               : sizeof *config;
}

// Creates a communicator, or takes the user's, and connects the ranks. The job gets a copy of the
// configuration, because it may outlive the world.
static bool idist__gpu_setup_init(idist_group *g, const idist__nccl_id *id, idist__nccl_job *job,
                                  char *reason, size_t capacity) {
    static const idist__nccl_config patient = {sizeof patient, IDIST__NCCL_CONFIG_MAGIC, 21400, 0};
    const idist__nccl_config *config = (const idist__nccl_config *)g->w->cfg.nccl_config;

    if (!config && !job->nccl.CommRevoke) config = &patient;
    if (config) job->config = malloc(idist__gpu_setup_config_nbytes(config));
    if (job->config) memcpy(job->config, config, idist__gpu_setup_config_nbytes(config));
    job->id = *id;
    job->rank = g->rank;
    job->size = g->size;

    if (config && !job->config) {
        idist__nccl_job_discard(job);
        snprintf(reason, capacity, "out of memory");
        return false;
    }

    if (idist__nccl_job_start(job)) return idist__gpu_setup_init_wait(g, job, reason, capacity);

    snprintf(reason, capacity, "cannot start a thread for NCCL");

    return false;
}

// What each member tells the others before the communicator is created.
typedef struct idist__nccl_rank_info {
    int32_t failed;
    idist__nccl_id id;
} idist__nccl_rank_info;

// If ranks of this process have other GPUs, NCCL reads and writes a buffer of this rank from those
// (unless NCCL_P2P_DIRECT_DISABLE=1). Memory of the default pool, which is the program's, they do
// not reach: it would be an illegal address to them. So idist takes a pool of its own.
static cudaError_t idist__gpu_setup_make_pool(const idist__world *w, cudaMemPool_t *pool) {
    const idist__gpu *gpu = idist__gpu_of(w);
    const idist__gpu_rank_info *infos = gpu->rank_infos, *mine = &infos[w->group.rank];
    cudaError_t error = cudaSuccess;
    struct cudaMemPoolProps props;
    struct cudaMemAccessDesc access;
    int i, can;

    memset(&props, 0, sizeof props);
    props.allocType = cudaMemAllocationTypePinned;
    props.location.type = cudaMemLocationTypeDevice;
    props.location.id = gpu->device;
    memset(&access, 0, sizeof access);
    access.location.type = cudaMemLocationTypeDevice;
    access.flags = cudaMemAccessFlagsProtReadWrite;

    for (i = 0; i < w->group.size && error == cudaSuccess; i++) {
        if (infos[i].process != mine->process || infos[i].device == gpu->device) continue;
        error = cudaDeviceCanAccessPeer(&can, infos[i].device, gpu->device);
        if (error != cudaSuccess || !can) continue; // NCCL does not reach it directly, either
        if (!*pool) error = cudaMemPoolCreate(pool, &props);
        access.location.id = infos[i].device;
        if (error == cudaSuccess) error = cudaMemPoolSetAccess(*pool, &access, 1);
    }

    return error;
}

// Allocates what all communicators need: the word that barriers on streams reduce, and a pool.
// Once, before a second thread can know the world, because freeing a second word would wait for the
// device. Releases the lock meanwhile.
static void idist__gpu_setup_alloc_shared(idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);
    cudaMemPool_t pool = NULL;
    void *word = NULL;
    cudaError_t error;
    idist__gpu_guard guard;

    if (!gpu->nccl->version) return;
    gpu->user_count++;
    idist__os_mutex_unlock(&w->lock);
    guard = idist__gpu_device_enter(gpu);
    error = cudaMalloc(&word, sizeof *gpu->barrier_word);
    if (error == cudaSuccess) error = idist__gpu_setup_make_pool(w, &pool);
    if (error != cudaSuccess) cudaGetLastError();
    idist__gpu_device_leave(gpu, guard);
    idist__world_lock(w);
    gpu->user_count--;
    gpu->barrier_word = (int *)word;
    gpu->pool = pool;
    gpu->nccl_error = error;
}

// Allocates what a JOB_INIT needs on the device. It is the job's own, because the job may outlive
// the group. cudaMalloc may wait for all work of the device, for instance for a call that another
// rank makes only when this group is done: hence cudaMallocAsync. Releases the lock meanwhile.
static cudaError_t idist__gpu_setup_alloc_buffer(idist_group *g, idist__nccl_job *job) {
    size_t nbytes = (size_t)IDIST_NCCL_CONNECT_BYTES + 8 * (size_t)g->size; // rounding up
    cudaError_t error = cudaSuccess;

    if (g->size == 1) return cudaSuccess;
    idist__os_mutex_unlock(&g->w->lock);
    error = cudaStreamCreateWithFlags(&job->stream, cudaStreamNonBlocking);
    if (error == cudaSuccess)
        error = idist__nccl_issue_alloc(idist__gpu_of(g->w), (void **)&job->buffer, nbytes,
                                        job->stream);
    idist__world_lock(g->w);

    return error;
}

// Does everything that needs no other rank. NULL: out of memory; otherwise info->failed says
// whether this rank could do it, and `reason` why not.
static idist__nccl_job *idist__gpu_setup_prepare_local(idist_group *g, idist__nccl_rank_info *info,
                                                       char *reason, size_t capacity) {
    idist__gpu *gpu = idist__gpu_of(g->w);
    idist__gpu_group *gg = idist__gpu_group_of(g);
    idist__nccl_job *job = idist__nccl_job_new(gpu->nccl, IDIST__JOB_INIT, gpu->device, NULL);
    bool adopt = g == &g->w->group && g->w->cfg.nccl_comm;
    cudaError_t error;

    if (!gg->gate) gg->gate = (idist__nccl_gate *)calloc(1, sizeof *gg->gate);

    if (!job || !gg->gate) {
        free(job);
        return NULL;
    }

    memset(info, 0, sizeof *info);
    snprintf(reason, capacity, "ncclGetUniqueId failed");
    if (g->rank == 0 && !adopt) info->failed = gpu->nccl->GetUniqueId(&info->id) != IDIST__NCCL_OK;
    if (adopt && (job->comm = idist__gpu_setup_adopt(g, reason, capacity)) == NULL)
        info->failed = true;

    error = gpu->nccl_error;
    if (error == cudaSuccess) error = idist__gpu_setup_alloc_buffer(g, job);
    if (error == cudaSuccess || info->failed) return job;
    info->failed = true;
    snprintf(reason, capacity, "cudaMalloc: %s", cudaGetErrorString(error));
    cudaGetLastError();

    return job;
}

// The members have told each other how they are. Creates the communicator if all of them did their
// part; otherwise frees the job. False: this rank failed.
static bool idist__gpu_setup_create(idist_group *g, const idist__nccl_rank_info *infos,
                                    idist__nccl_job *job, char *reason, size_t capacity) {
    bool own_failed = infos[g->rank].failed;
    int i;

    for (i = 0; i < g->size && !infos[i].failed; i++) continue;
    if (i == g->size) return idist__gpu_setup_init(g, &infos[0].id, job, reason, capacity);

    idist__nccl_job_discard(job);

    return !own_failed;
}

// Exchanges what the members need, and creates the communicator; the same outcome for all of them.
static idist_status idist__gpu_setup_agree(idist_group *g, bool has_thread) {
    const idist_allocator *mem = &g->w->cfg.mem;
    size_t nbytes = sizeof(idist__nccl_rank_info) * (size_t)g->size;
    idist__nccl_rank_info mine, *infos = (idist__nccl_rank_info *)idist__mem_alloc(mem, nbytes);
    idist__nccl_job *job = NULL;
    idist_status status = IDIST_ERR_NO_MEMORY;
    bool ok = false, all = false;
    char reason[256] = "";

    if (infos) job = idist__gpu_setup_prepare_local(g, &mine, reason, sizeof reason);
    if (job) status = idist__gpu_leave_goes_on(g, IDIST_OK);
    if (status == IDIST_OK) status = idist__gpu_agree_exchange(g, &mine, infos, sizeof mine);

    if (status == IDIST_OK) {
        ok = idist__gpu_setup_create(g, infos, job, reason, sizeof reason);
    } else {
        idist__nccl_job_discard(job);
    }

    status = idist__gpu_leave_goes_on(g, status);
    if (ok && !has_thread)
        snprintf(reason, sizeof reason, "cannot start a thread to watch the other ranks");
    if (status == IDIST_OK)
        status = idist__gpu_agree_all_succeeded(g, !ok || !has_thread, reason, sizeof reason, &all);
    if (status == IDIST_OK && !all)
        status =
            idist__fail(IDIST_ERR_DEVICE, "%s; IDIST_DEVICE_BACKEND=staged needs no NCCL", reason);
    idist__mem_free(mem, infos);

    return status;
}

// Makes NCCL ready for a group. From now on the progress thread watches the other ranks: nobody
// else would notice that one is lost, not even while they are being connected. If that fails, the
// next call may try again.
static idist_status idist__gpu_setup_prepare_comm(idist_group *g) {
    idist__world *w = g->w;
    bool has_thread = idist__progress_thread_need(w) == IDIST_OK;
    int nthreads = idist__os_thread_count();
    idist_status status;

    w->watched = true;
    idist__os_cond_signal(&w->work); // it sleeps until it has something to watch
    status = idist__gpu_setup_agree(g, has_thread);

    if (status != IDIST_OK) {
        idist__nccl_abort_wait(g);
        idist__nccl_abort_leave(g);
    }

    if (w->foreign_thread_count < INT32_MAX / 4 && idist__os_thread_count() > nthreads)
        w->foreign_thread_count += idist__os_thread_count() - nthreads; // NCCL's own

    return status;
}

static void idist__gpu_setup_group_free(idist_group *g) {
    idist__gpu_group *gg = idist__gpu_group_of(g);
    int i;

    if (!gg) return;
    if (gg->path == IDIST__BY_IPC) idist__ipc_arena_release(g);
    for (i = 0; i < IDIST__STREAM_COUNT; i++)
        if (gg->stream[i]) cudaStreamDestroy(gg->stream[i]);
    cudaGetLastError();
    free(gg->gate);
    g->device = NULL;
    idist__mem_free(&g->w->cfg.mem, gg);
}

// Creates the group's streams, this rank's part of it.
static idist_status idist__gpu_setup_group_make(idist_group *g) {
    idist__gpu_group *gg = (idist__gpu_group *)idist__mem_alloc(&g->w->cfg.mem, sizeof *gg);
    idist__gpu_guard guard = idist__gpu_device_enter(idist__gpu_of(g->w));
    cudaError_t error = cudaSuccess;
    int i, least = 0, greatest = 0, priority = 0; // 0: the default, the lowest

    if (g->w->cfg.high_priority) {
        error = cudaDeviceGetStreamPriorityRange(&least, &greatest);
        priority = greatest;
    }

    for (i = 0; i < IDIST__STREAM_COUNT && gg && error == cudaSuccess; i++)
        error = cudaStreamCreateWithPriority(&gg->stream[i], cudaStreamNonBlocking, priority);

    if (gg) {
        gg->queue_end = &gg->queue;
        g->device = gg;
        gg->path = idist__gpu_setup_choose_path(g);
    }

    if (error != cudaSuccess) idist__gpu_setup_group_free(g);
    idist__gpu_device_leave(idist__gpu_of(g->w), guard);
    if (gg && error == cudaSuccess) return IDIST_OK;
    idist__gpu_device_fail_group(g, gg ? idist__gpu_device_fail("cudaStreamCreate", error)
                                       : IDIST_ERR_NO_MEMORY);

    return g->status;
}

static bool idist__gpu_setup_is_prepared(const void *arg) {
    const idist_group *g = (const idist_group *)arg;
    return !idist__gpu_group_of(g)->preparing || g->w->thread_stops;
}

// When a thread that prepares a group must be done: two exchanges and the set-up take that long.
static int64_t idist__gpu_setup_prepare_deadline(const idist__world *w) {
    int64_t call_ms = w->cfg.timeout_ms, init_ms = w->cfg.init_timeout_ms;

    if (call_ms <= 0 || init_ms <= 0) return IDIST__FOREVER;
    return idist__os_clock_deadline(2 * call_ms + init_ms);
}

// Sets up what the members of a group have in common, on the way that the group takes.
static idist_status idist__gpu_setup_prepare_path(idist_group *g) {
    const idist__gpu *gpu = idist__gpu_of(g->w);
    idist__gpu_group *gg = idist__gpu_group_of(g);
    idist__gpu_guard guard = idist__gpu_device_enter(gpu);
    idist_status status = IDIST_OK;

    gg->preparing = true;
    if (gg->path == IDIST__BY_NCCL) status = idist__gpu_setup_prepare_comm(g);
    if (gg->path == IDIST__BY_IPC) status = idist__ipc_setup_prepare(g);
    idist__gpu_device_leave(gpu, guard);
    if (status == IDIST_ERR_NO_MEMORY && !g->w->thread_stops)
        idist__group_fail_memory(g); // the other members wait for it
    gg->preparing = false;
    gg->ready = status == IDIST_OK;

    return status;
}

// Prepares a group, or waits for the thread that does; releases the lock meanwhile. All members
// call it, in their first call on device memory.
static idist_status idist__gpu_setup_prepare(idist_group *g) {
    idist__world *w = g->w;
    idist__gpu *gpu = idist__gpu_of(w);
    idist_status status;

    gpu->user_count++;  // the end of the world waits for us, ...
    g->running_count++; // ... and nobody frees the group
    if (!idist__gpu_agree_wait_until(w, idist__gpu_setup_is_prepared, g,
                                     idist__gpu_setup_prepare_deadline(w)))
        status = idist__fail(IDIST_ERR_TIMEOUT,
                             "another thread's first call of the group on device memory has not "
                             "returned: is the device busy?");
    else status = idist__gpu_leave_goes_on(g, IDIST_OK);
    if (status == IDIST_OK && !idist__gpu_group_of(g)->ready)
        status = idist__gpu_setup_prepare_path(g);
    gpu->user_count--;
    g->running_count--;
    if (w->blocked_count) idist__os_cond_broadcast(&w->changed); // another thread waits for it

    return status;
}

//------------------------------------------------------------------------------
// [nccl:route]  which calls are for the device
// uses fail kind model core:wait extent gpu:types device ipc:leave ipc:call
// uses issue setup
//------------------------------------------------------------------------------

// Whether the buffers are device memory. A rank without elements says by its pointers, or by its
// stream, where the others have theirs.
static idist_status idist__gpu_route_check_buffers(const idist_group *g, const idist__call *c,
                                                   const idist_opts *o, bool *on_device) {
    const char *name = idist__kind_names[c->label];
    bool send, recv, host;
    cudaError_t error = idist__gpu_device_owns_pointer(c->send, &send);
    idist__extent e;

    recv = send;
    if (error == cudaSuccess && c->recv != c->send)
        error = idist__gpu_device_owns_pointer(c->recv, &recv);
    if (error != cudaSuccess) return idist__gpu_device_fail(name, error);
    *on_device = send || recv || o->stream;
    if (!*on_device || idist__extent_of(g, c, &e) != IDIST_OK) return IDIST_OK;
    host = (e.send && !send) || (e.recv && !recv);
    if (host && (send || recv))
        return idist__fail(IDIST_ERR_ARG, "%s: one buffer is device memory, the other is not",
                           name);
    if (host)
        return idist__fail(IDIST_ERR_ARG,
                           "%s: a stream is for device memory, and these buffers are not", name);

    return IDIST_OK;
}

static bool idist__gpu_route_may_run_ahead(void *arg) {
    const idist_group *g = (const idist_group *)arg;
    return g->detached_count < IDIST__GPU_AHEAD || g->status != IDIST_OK;
}

static idist__gpu_path idist__gpu_route_path_of(const idist_group *g, const idist__call *c,
                                                const void *stream) {
    idist__gpu_path path = idist__gpu_group_of(g)->path;
    if (path == IDIST__BY_NCCL && idist__nccl_issue_supports(g, c, stream)) return path;
    return path == IDIST__BY_IPC && idist__ipc_call_supports(g, c) ? path : IDIST__BY_STAGING;
}

// A capture cannot take a call in which the host has a part, nor one that waits for the default
// stream while a stream is captured which the default stream waits for.
static idist_status idist__gpu_route_check_capture(const char *name, const idist_opts *o,
                                                   const char *what) {
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    cudaError_t error =
        cudaStreamIsCapturing(o->stream ? (cudaStream_t)o->stream : cudaStreamLegacy, &capture);

    if (error != cudaSuccess) cudaGetLastError();
    if (error == cudaErrorStreamCaptureImplicit)
        return idist__fail(
            IDIST_ERR_UNSUPPORTED,
            "%s: the default stream cannot be used while a stream that blocks it is captured",
            name);
    if (error != cudaSuccess) return idist__fail(IDIST_ERR_ARG, "%s: no valid stream", name);
    if (capture == cudaStreamCaptureStatusNone) return IDIST_OK;

    return idist__fail(IDIST_ERR_UNSUPPORTED, "%s: %s cannot be captured into a graph", name, what);
}

static bool idist__gpu_route_is_capturing(cudaStream_t stream) {
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;

    if (cudaStreamIsCapturing(stream, &capture) != cudaSuccess) cudaGetLastError();
    return capture != cudaStreamCaptureStatusNone;
}

// Refuses a capture that the call cannot be a part of.
static idist_status idist__gpu_route_check_stream(const idist_group *g, const idist__call *c,
                                                  const idist_opts *o) {
    const char *name = idist__kind_names[c->label];
    void *stream = o->request ? NULL : o->stream;

    if (idist__gpu_route_path_of(g, c, stream) != IDIST__BY_NCCL)
        return idist__gpu_route_check_capture(name, o, "a call that NCCL does not serve");
    if (!stream || stream == (void *)cudaStreamLegacy)
        return idist__gpu_route_check_capture(name, o, "a call with a request");

    return IDIST_OK;
}

// Prepares the group, which is collective, if this is its first call.
static idist_status idist__gpu_route_check_ready(idist_group *g, const idist__call *c,
                                                 const idist_opts *o) {
    const char *name = idist__kind_names[c->label];
    void *stream = o->request ? NULL : o->stream;
    idist_status status;

    if (idist__gpu_group_of(g)->ready) return IDIST_OK;
    if (idist__gpu_route_path_of(g, c, stream) == IDIST__BY_STAGING) return IDIST_OK;
    if (idist__kind_is_p2p(c->kind))
        return idist__fail(IDIST_ERR_STATE,
                           "%s: NCCL is not there yet: make a collective call on the group first",
                           name);

    status = idist__gpu_route_check_capture(name, o, "the first call on a device of a group");
    if (status != IDIST_OK) return status;

    return idist__gpu_setup_prepare(g);
}

// What NCCL cannot do for a call that it serves.
static idist_status idist__gpu_route_check_call(const idist_group *g, const idist__call *c) {
    const char *name = idist__kind_names[c->label];

    if (idist__kind_is_p2p(c->kind) && (c->root < 0 || c->tag < 0))
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "%s: on a stream NCCL takes no IDIST_ANY_SOURCE and no IDIST_ANY_TAG",
                           name);
    if (idist__me.group_depth && idist__me.held_world && idist__me.held_world != g->w)
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "%s: device memory of two worlds between group_begin and group_end",
                           name);

    return IDIST_OK;
}

// Everything about a call that depends on where its memory is, before it becomes a task. *detached:
// it returns when NCCL has it.
static idist_status idist__gpu_route_call(idist_group *g, const idist__call *c, const idist_opts *o,
                                          bool *on_device, bool *detached) {
    idist_status status = idist__gpu_route_check_buffers(g, c, o, on_device);
    idist__gpu_group *gg;
    bool nccl;

    if (c->label == IDIST__FINALIZE)
        idist__ipc_leave_unmap_arenas(g->w); // before the others free theirs
    if (status != IDIST_OK || !*on_device || g->status != IDIST_OK) return status;
    if (o->stream == (void *)cudaStreamPerThread)
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "%s: cudaStreamPerThread: another thread may finish the call",
                           idist__kind_names[c->label]);

    if (!g->device) status = idist__gpu_setup_group_make(g);
    if (status != IDIST_OK) return status;
    gg = idist__gpu_group_of(g);
    nccl = idist__gpu_route_path_of(g, c, o->request ? NULL : o->stream) == IDIST__BY_NCCL;
    status = idist__gpu_route_check_stream(g, c, o);
    if (status == IDIST_OK) status = idist__gpu_route_check_ready(g, c, o);
    if (status != IDIST_OK || g->status != IDIST_OK) return status;
    if (nccl) status = idist__gpu_route_check_call(g, c);
    if (status != IDIST_OK) return status;

    *detached = nccl && o->stream && !o->request;
    if (!*detached) return IDIST_OK;
    if (!gg->captured) gg->captured = idist__gpu_route_is_capturing((cudaStream_t)o->stream);
    if (!idist__me.group_depth) idist__wait_until(g->w, idist__gpu_route_may_run_ahead, g);

    return IDIST_OK;
}

// On our device, because asking about a pointer creates a context, too.
static idist_status idist__gpu_route_find(idist_group *g, const idist__call *c, const idist_opts *o,
                                          bool *on_device, bool *detached) {
    const idist__gpu *gpu = idist__gpu_of(g->w);
    int device = idist__gpu_device_set(gpu);
    idist_status status = idist__gpu_route_call(g, c, o, on_device, detached);

    idist__gpu_device_restore(gpu, device);
    return status;
}

//------------------------------------------------------------------------------
// [nccl:engine]  the device's part of a backend
// uses clock mutex fail text mem base:log base:type kind model core:world
// uses fingerprint core:task core:group core:wait core:call core:message
// uses gpu:types device pinned gpu:task gpu:leave stage ipc:leave ipc:call job
// uses abort launch setup route
//
// A world with a device has a backend that consists of these functions; they pass on to the host's
// backend what concerns host memory.
//
// A group gives the host's backend its calls, and the parts of them, in the program's order, so
// that all ranks number them alike. A call whose next part is not ready holds up those behind it,
// even those on host memory.
//------------------------------------------------------------------------------

// Passes on a call on host memory that had to wait for those before it.
static void idist__gpu_engine_host_part(idist__task *t) {
    t->away = false;
    if (!idist__kind_is_p2p(t->call.kind)) t->seq = ++t->group->seq;
    idist__gpu_of(t->group->w)->host_backend->start(t);
}

// Gives the host's backend the parts that are ready.
static void idist__gpu_engine_run_queue(idist_group *g) {
    idist__gpu *gpu = idist__gpu_of(g->w);
    idist__gpu_group *gg = idist__gpu_group_of(g);
    idist__task *t;
    bool moved = true;

    while (moved && (t = gg->queue) != NULL) {
        idist__gpu_path path = idist__gpu_op_of(t)->path;
        idist__gpu_guard guard;

        if (path == IDIST__BY_IPC || path == IDIST__BY_STAGING) {
            guard = idist__gpu_device_enter(gpu);
            moved = (path == IDIST__BY_IPC ? idist__ipc_call_step(t) : idist__stage_step(t)) ||
                    gg->queue != t;
            idist__gpu_device_leave(gpu, guard);
            continue;
        }

        idist__gpu_task_dequeue(t); // it has one part only
        if (t->on_device) idist__nccl_launch_start_meeting(t);
        else idist__gpu_engine_host_part(t);
    }
}

// The host's backend is done with a part of a call. False: the call goes on. May be called in the
// middle of any function of the backend.
static bool idist__gpu_engine_part_done(idist__task *t, idist_status status) {
    idist__gpu *gpu = idist__gpu_of(t->group->w);
    idist__gpu_op *op = idist__gpu_op_of(t);
    bool nccl = op->path == IDIST__BY_NCCL, over;
    idist__gpu_guard guard;

    op->with_backend = false;
    t->away = true;

    if (nccl && t->group->status == IDIST_OK && op->state != IDIST__GPU_END) {
        idist__nccl_launch_end_meeting(t, status);
        op->met = true;
        over = op->launched && idist__nccl_launch_set_complete(t);
    } else if (op->state == IDIST__GPU_END || status != IDIST_OK) {
        over = true;
    } else {
        guard = idist__gpu_device_enter(gpu);
        over = op->path == IDIST__BY_STAGING && idist__stage_part_done(t);
        idist__gpu_device_leave(gpu, guard);
        if (!over) idist__gpu_task_set_waiting(t, true);
    }

    if (over) idist__gpu_task_release(t);

    return over;
}

static void idist__gpu_engine_op_free(idist__task *t) {
    idist__gpu_op *op = (idist__gpu_op *)t->device;
    int i;

    if (!op) return;
    if (op->event) cudaEventDestroy(op->event);

    for (i = 0; i < IDIST__GPU_SLOTS; i++) {
        if (op->slots[i].out) cudaEventDestroy(op->slots[i].out);
        if (op->slots[i].in) cudaEventDestroy(op->slots[i].in);
    }

    idist__mem_free(&t->group->w->cfg.mem, op->counts_memory);
    idist__mem_free(&t->group->w->cfg.mem, op);
    t->device = NULL;
}

static bool idist__gpu_engine_op_make(idist__task *t) {
    idist__gpu *gpu = idist__gpu_of(t->group->w);
    const idist_allocator *mem = &t->group->w->cfg.mem;
    idist__gpu_op *op = (idist__gpu_op *)t->device;
    idist__gpu_guard guard;
    cudaError_t error;
    int i;

    if (op) return true;

    op = (idist__gpu_op *)idist__mem_alloc(mem, sizeof *op);

    if (!op) {
        idist__group_fail_memory(t->group);
        return false;
    }

    t->device = op; // freed with the world
    guard = idist__gpu_device_enter(gpu);
    error = cudaEventCreateWithFlags(&op->event, cudaEventDisableTiming);

    for (i = 0; i < IDIST__GPU_SLOTS && error == cudaSuccess; i++) {
        error = cudaEventCreateWithFlags(&op->slots[i].out, cudaEventDisableTiming);
        if (error == cudaSuccess)
            error = cudaEventCreateWithFlags(&op->slots[i].in, cudaEventDisableTiming);
    }

    idist__gpu_device_leave(gpu, guard);
    if (error == cudaSuccess) return true;
    idist__gpu_engine_op_free(t);
    idist__gpu_device_fail_group(t->group, idist__gpu_device_fail("cudaEventCreate", error));

    return false;
}

static void idist__gpu_engine_enqueue(idist__task *t) {
    idist__gpu_group *gg = idist__gpu_group_of(t->group);
    *gg->queue_end = t;
    gg->queue_end = &idist__gpu_op_of(t)->next_queued;
}

// Gives the call to NCCL: now, or with the others at idist_group_end.
static void idist__gpu_engine_start_nccl(idist__task *t) {
    idist__world *w = t->group->w;
    idist__gpu_op *op = idist__gpu_op_of(t);
    idist__task **last = &idist__gpu_of(w)->held_calls;

    if (!idist__nccl_launch_save_counts(t)) return;
    t->pinned = true; // until it is launched
    t->group->detached_count++;
    idist__gpu_engine_enqueue(t);
    idist__gpu_engine_run_queue(t->group);

    if (!idist__me.group_depth) {
        idist__nccl_launch_call(t);
        return;
    }

    op->holding_thread = &idist__me;
    while (*last) last = &idist__gpu_op_of(*last)->next_held;
    *last = t;
    if (!idist__me.held_world) w->deferred_count++;
    idist__me.held_world = w;
}

// From here to idist__gpu_engine_relock the lock is not held, for a call of CUDA that adds to a
// stream of the program's: it waits where the stream's queue is full, perhaps behind a kernel of
// NCCL's that waits for a lost rank, and whoever aborts that needs the lock.
static idist__gpu_guard idist__gpu_engine_unlock(idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);
    idist__gpu_guard guard = idist__gpu_device_enter(gpu);

    gpu->user_count++; // the end of the world waits for us
    idist__os_mutex_unlock(&w->lock);

    return guard;
}

static void idist__gpu_engine_relock(idist__world *w, idist__gpu_guard guard) {
    idist__gpu *gpu = idist__gpu_of(w);

    idist__gpu_device_leave(gpu, guard);
    idist__world_lock(w);
    gpu->user_count--;
}

// Notes where the program's stream stands, before which the call does not begin. False: the call
// was cancelled meanwhile. Releases the lock, because the stream's queue may be full.
static bool idist__gpu_engine_record_begin(idist__task *t) {
    idist__world *w = t->group->w;
    idist__gpu_op *op = idist__gpu_op_of(t);
    cudaStream_t stream = t->stream ? (cudaStream_t)t->stream : cudaStreamLegacy;
    idist__gpu_guard guard = idist__gpu_engine_unlock(w);
    cudaError_t error = cudaEventRecord(op->event, stream);

    idist__gpu_engine_relock(w, guard);
    if (!t->done) op->error = error;

    return !t->done;
}

// A part of a running call, and a call on host memory with nothing before it, go to the host's
// backend at once.
static void idist__gpu_engine_start(idist__task *t) {
    idist_group *g = t->group;
    idist__gpu *gpu = idist__gpu_of(g->w);
    idist__gpu_group *gg = idist__gpu_group_of(g);
    bool on_device = t->on_device;
    idist__gpu_op *op;

    if (!on_device && (!gg || !gg->queue)) {
        gpu->host_backend->start(t);
        return;
    }

    t->on_device = false; // until there is something to undo
    t->away = true;
    if (t->seq) g->seq--; // numbered when the backend gets it
    t->seq = 0;
    memset(t->impl, 0, gpu->host_backend->task_nbytes); // not started, to the backend
    if (!idist__gpu_engine_op_make(t)) return;
    op = idist__gpu_op_of(t);
    memset(op, 0, offsetof(idist__gpu_op, event));
    op->call = t->call;
    op->size = idist_dtype_size(t->call.dtype);
    t->on_device = on_device;

    if (!on_device) { // passed on when those before it are
        idist__gpu_engine_enqueue(t);
        return;
    }

    op->path = idist__gpu_route_path_of(g, &t->call, t->async ? NULL : t->stream);
    op->fingerprint = idist__fingerprint_of_call(g->w, &t->call, 0);
    op->fingerprint.algorithm = IDIST__ON_DEVICE;

    if (!t->call.u.user && idist__kind_reduces(t->call.kind) && (int)t->call.op >= IDIST_OP_USER) {
        op->user = *idist__world_user_op(g, &t->call);
        op->call.u.user = &op->user;
    }

    if (op->path == IDIST__BY_NCCL) {
        if (t->call.info)
            idist__matching_describe(&t->call, t->call.root, t->call.tag, t->call.dtype,
                                     t->call.count);
        idist__gpu_engine_start_nccl(t);
        return;
    }

    if (op->path == IDIST__BY_IPC)
        idist__stage_plan_chunks(t, IDIST__IPC_CHUNK,
                                 idist__gpu_task_shape_of(g, &op->call).contribution);
    else idist__stage_plan_chunks(t, IDIST__GPU_CHUNK, idist__gpu_task_shape_of(g, &op->call).most);
    if (!idist__gpu_engine_record_begin(t)) return;
    idist__gpu_engine_enqueue(t);
    idist__gpu_engine_run_queue(g);
}

// Launches the calls that idist_group_begin of this thread has held back.
static void idist__gpu_engine_launch_held(idist__world *w) {
    idist__task **at = &idist__gpu_of(w)->held_calls, *first = NULL, **last = &first, *t;

    if (idist__me.held_world == w) w->deferred_count--;
    idist__me.held_world = NULL;

    while ((t = *at) != NULL) {
        idist__gpu_op *op = idist__gpu_op_of(t);

        if (op->holding_thread != &idist__me) {
            at = &op->next_held;
            continue;
        }

        *at = op->next_held;
        op->next_held = NULL;
        *last = t;
        last = &op->next_held;
    }

    if (first) idist__nccl_launch_call(first);
}

// Makes the stream wait for a call that is complete but for its event (t->followed). The event may
// come meanwhile. Releases the lock, because the stream's queue may be full.
static idist_status idist__gpu_engine_follow(idist__task *t, void *stream) {
    idist__world *w = t->group->w;
    idist_status status = IDIST_OK;
    idist__gpu_guard guard = idist__gpu_engine_unlock(w);
    cudaError_t error = cudaStreamWaitEvent((cudaStream_t)stream, idist__gpu_op_of(t)->event, 0);

    idist__gpu_engine_relock(w, guard);
    if (t->done) status = idist__wait_result(t);
    else idist__task_detach(t);

    return error == cudaSuccess ? status : idist__gpu_device_fail("wait_stream", error);
}

static void idist__gpu_engine_fail_mismatch(idist__task *t) {
    char text[400] =
        "a send or receive on a stream met one that is not on a stream, or of another size";
    if (idist__gpu_op_of(t)->meeting_status == IDIST_ERR_MISMATCH)
        idist__nccl_launch_check_counts(t, text, sizeof text);
    idist__group_fail(t->group, idist__gpu_op_of(t)->meeting_status, text);
}

// Completes the calls that only waited for an event of the device.
static void idist__gpu_engine_complete_calls(idist__world *w) {
    idist__task *t, *next;

    for (t = w->tasks; t; t = next) {
        const idist__gpu_op *op = t->on_device ? idist__gpu_op_of(t) : NULL;
        uint32_t ended = w->ended_count;
        next = t->next;

        if (op && op->waits_for_device && op->state == IDIST__GPU_END) {
            if (op->meeting_status) idist__gpu_engine_fail_mismatch(t);
            else if (op->path == IDIST__BY_NCCL && idist__gpu_group_of(t->group)->fault) continue;
            else if (idist__gpu_task_event_done(t, op->event)) idist__gpu_task_complete(t);
        }

        if (w->ended_count != ended) next = w->tasks; // a task is gone, perhaps the next one
    }
}

static void idist__gpu_engine_progress(idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);
    idist__gpu_guard guard;
    idist_group *g;
    int64_t now;

    gpu->host_backend->progress(w);

    if (gpu->waiting_call_count || gpu->queue_changed) {
        gpu->queue_changed = false;
        guard = idist__gpu_device_enter(gpu);
        for (g = &w->group; g; g = g->next)
            if (g->device && idist__gpu_group_of(g)->queue) idist__gpu_engine_run_queue(g);
        idist__gpu_engine_complete_calls(w);
        idist__gpu_device_leave(gpu, guard);
    }

    if (!w->watched ||
        (now = idist__os_clock_now_ns()) < gpu->checked_nccl_ns + IDIST__GPU_SLEEP_LONG_NS)
        return;
    gpu->checked_nccl_ns = now;

    for (g = &w->group; g; g = g->next) {
        idist__nccl_abort_check_errors(g);
        if (g->status != IDIST_OK) idist__nccl_abort_group(g);
    }
}

static void idist__gpu_engine_sleep(idist__world *w, int64_t until_ns) {
    idist__gpu *gpu = idist__gpu_of(w);
    int64_t now = idist__os_clock_now_ns(), soon = now + gpu->sleep_ns;

    // Sleeping and waking up takes longer than most small calls take on the device. With fewer
    // cores than ranks another rank needs the core.
    if (gpu->waiting_call_count && w->spin_ns && now < gpu->spin_until_ns) {
        idist__world_give_way(w);
        return;
    }

    if (gpu->waiting_call_count && soon < until_ns) {
        until_ns = soon;
        if (gpu->sleep_ns < IDIST__GPU_SLEEP_LONG_NS) gpu->sleep_ns += gpu->sleep_ns / 4;
    }

    gpu->host_backend->sleep(w, until_ns);
}

// Waits until the copies of a call have left the caller's buffers. They wait for no other rank, but
// the device may never get to them: then the call's pinned memory is used for nothing else.
static void idist__gpu_engine_end_copies(idist__task *t) {
    idist__gpu *gpu = idist__gpu_of(t->group->w);
    idist__gpu_group *gg = idist__gpu_group_of(t->group);
    int64_t deadline = idist__os_clock_deadline(IDIST__GPU_ABORT_MS);
    int i, turns = 0;

    for (i = IDIST__STREAM_OUT; i <= IDIST__STREAM_IN; i++)
        while (!gg->stuck && cudaStreamQuery(gg->stream[i]) == cudaErrorNotReady) {
            cudaGetLastError();
            gg->stuck = idist__os_clock_now_ns() > deadline;
            idist__gpu_device_nap(&turns);
        }

    if (!gg->stuck) return;
    gpu->stuck = true;
    for (i = 0; i < IDIST__GPU_SLOTS; i++)
        idist__pinned_abandon(gpu, &idist__gpu_op_of(t)->slots[i].memory);
}

static bool idist__gpu_engine_cancel(idist__task *t) {
    idist_group *g = t->group;
    idist__gpu *gpu = idist__gpu_of(g->w);
    idist__gpu_op *op = idist__gpu_op_of(t);
    idist__gpu_guard guard;
    bool done = true;

    if (!t->on_device) {
        if (!t->away) return gpu->host_backend->cancel(t);
        if (op) idist__gpu_task_dequeue(t);
        t->away = false;
        return true;
    }

    if (op->with_backend) done = gpu->host_backend->cancel(t);
    // Other ranks are involved, or NCCL has it: too late. At the end of the world that does not
    // matter.
    if (g->status == IDIST_OK && !g->w->thread_stops && (!done || op->path == IDIST__BY_NCCL))
        return false;
    op->with_backend = t->away = false;
    op->state = IDIST__GPU_END; // nothing is moved any more
    guard = idist__gpu_device_enter(gpu);

    if (op->path == IDIST__BY_NCCL) idist__nccl_abort_wait(g);
    else if (g->device) idist__gpu_engine_end_copies(t);

    cudaGetLastError();
    idist__gpu_device_leave(gpu, guard);
    idist__gpu_task_release(t);

    return done;
}

// A receive into host memory may wait for calls on the device that come before it.
static bool idist__gpu_engine_retract(idist__task *t) {
    if (t->away) return idist__gpu_engine_cancel(t);
    return idist__gpu_of(t->group->w)->host_backend->retract(t);
}

static void idist__gpu_engine_tell(idist_group *g) {
    idist__gpu_of(g->w)->host_backend->tell(g);
    idist__nccl_abort_group(g);
}

static void idist__gpu_engine_announce(idist__task *t) {
    if (!t->away) idist__gpu_of(t->group->w)->host_backend->announce(t);
}

static int idist__gpu_engine_missing(idist__task *t, char *text, size_t capacity) {
    if (!t->away) return idist__gpu_of(t->group->w)->host_backend->missing(t, text, capacity);
    if (idist__gpu_op_of(t)->holding_thread && !idist__gpu_op_of(t)->launched)
        idist__text_append(text, capacity, "this rank itself: it has not called idist_group_end");
    else if (idist__gpu_op_of(t)->path == IDIST__BY_NCCL)
        idist__text_append(
            text, capacity,
            "the device: earlier work on a stream, of this rank itself or of another");
    else idist__text_append(text, capacity, "this rank itself, whose device has not finished");

    return 1;
}

// NCCL finalizes a communicator when all its ranks do, and does not say who waits for whom: a
// thread of its own does it.
static void idist__gpu_engine_finalize(idist_group *g) {
    idist__gpu *gpu = idist__gpu_of(g->w);
    idist__gpu_group *gg = idist__gpu_group_of(g);
    idist__nccl_job *job;

    if (!gg->comm || gg->adopted) return;
    job = idist__nccl_job_new(gpu->nccl, IDIST__JOB_FINALIZE, gpu->device, gg->comm);

    if (!idist__nccl_job_start(job)) {
        idist__log_print(&g->w->log, IDIST_LOG_WARN,
                         "cannot start a thread to end NCCL's communicator: it stays in memory");
        return;
    }

    job->next = gpu->ending_jobs;
    gpu->ending_jobs = job;
}

// Ends the calls of other threads, as idist_device_api demands. They may wait for what runs on the
// device, in their own group or in another one.
static void idist__gpu_engine_end_calls(idist__world *w) {
    idist_group *g;

    if (w->leaves && idist__gpu_leave_lock(w)) {
        for (g = &w->group; g; g = g->next)
            if (g->device && !idist__gpu_group_of(g)->adopted) idist__nccl_abort_group(g);
        idist__os_mutex_unlock(&w->lock);
    }

    idist__gpu_leave_wait_unused(w);
}

static void idist__gpu_engine_group_close(idist_group *g) {
    idist__world *w = g->w;
    idist__gpu *gpu = idist__gpu_of(w);
    idist__gpu_group *gg = idist__gpu_group_of(g);
    idist__gpu_guard guard;

    if (gg) {
        guard = idist__gpu_device_enter(gpu);

        if (w->leaves && !w->abandoned && !gg->adopted)
            idist__nccl_abort_group(g); // a thread has created it meanwhile
        if (g->status != IDIST_OK || gg->must_abort) idist__nccl_abort_end(g);
        else if (!idist__nccl_abort_is_inside(gg)) idist__gpu_engine_finalize(g);
        idist__nccl_abort_reap(w, 0);
        if (!w->abandoned) idist__gpu_setup_group_free(g);
        idist__gpu_device_leave(gpu, guard);
    }

    gpu->host_backend->group_close(g);
}

// What threads still use that are inside a call stays (w->abandoned).
static void idist__gpu_engine_free(idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);
    const idist_allocator *mem = &w->cfg.mem;
    idist__task *t;
    int device = gpu->host_backend ? idist__gpu_device_set(gpu) : -1; // -1: not installed
    bool left = !w->abandoned;

    if (!idist__nccl_abort_reap(w, idist__os_clock_deadline(IDIST__GPU_ABORT_MS)))
        idist__log_print(&w->log, IDIST_LOG_WARN,
                         "ncclCommDestroy has not returned: another rank has not called it, or a "
                         "graph still holds calls");
    for (t = w->all_tasks; t && left; t = t->older) idist__gpu_engine_op_free(t);
    if (left) idist__pinned_end(w);
    idist__ipc_leave_free_all(w);

    cudaGetLastError();
    if (gpu->host_backend) w->backend = gpu->host_backend;
    if (idist__me.held_world == w) idist__me.held_world = NULL;
    if (device >= 0) idist__gpu_device_restore(gpu, device);
    if (!left) return;
    w->device = NULL;
    w->device_api = NULL;
    idist__mem_free(mem, gpu->nccl_config);
    idist__mem_free(mem, gpu->rank_infos);
    idist__mem_free(mem, gpu);
}

static void idist__gpu_engine_close(idist__world *w, bool clean) {
    idist__gpu_engine_free(w);
    w->backend->close(w, clean);
}

static void *idist__gpu_engine_comm_of(idist_group *g) {
    idist_status status = g->device ? IDIST_OK : idist__gpu_setup_group_make(g);
    void *comm;

    if (status == IDIST_OK) status = idist__gpu_setup_prepare(g);
    if (status != IDIST_OK) return NULL;
    comm = idist__gpu_group_of(g)->comm;
    if (!comm) idist__fail(IDIST_ERR_UNSUPPORTED, "nccl_comm: the group does not use NCCL");

    return comm;
}

void *idist_nccl_comm(idist_group *group) {
    idist_group *g = NULL;
    idist_status status;
    void *comm = NULL;

    status = idist__call_enter("nccl_comm", group, &g);
    if (status != IDIST_OK) return NULL;
    if (!g->w->device)
        idist__fail(IDIST_ERR_NO_DEVICE, "nccl_comm: the world has no device: %s", g->w->no_device);
    else if (g->rank < 0)
        idist__fail(IDIST_ERR_STATE, "nccl_comm: this rank is not a member of the group");
    else if (g->status != IDIST_OK)
        idist__fail(g->status, "nccl_comm: the group failed earlier: %s", g->cause);
    else comm = idist__gpu_engine_comm_of(g);
    idist__os_mutex_unlock(&g->w->lock);

    return comm;
}

//------------------------------------------------------------------------------
// [nccl:join]  which device and which way, agreed by all ranks
// uses os:env os:thread mutex fail mem base:log parse launch:env config model
// uses core:backend core:world gpu:types device gpu:agree arena load job setup
// uses route engine
//------------------------------------------------------------------------------

// Whether the user says that NCCL takes several ranks on a GPU: from 2.30.3 on with this variable;
// tests do it with host ids.
static bool idist__gpu_join_allows_shared_gpu(int version) {
    const char *enable = idist__os_env("NCCL_MULTI_RANK_GPU_ENABLE");
    return idist__os_env("NCCL_HOSTID") || (enable && strcmp(enable, "1") == 0 && version >= 23003);
}

// Whether an error of CUDA is more than "this machine has no GPU". 35 (cudaErrorInsufficientDriver)
// means no driver as well as one that is too old.
static bool idist__gpu_join_is_fault(cudaError_t error) {
    int driver = 0;

    if (error == cudaSuccess || error == cudaErrorNoDevice || error == cudaErrorStubLibrary)
        return false;
    return error != cudaErrorInsufficientDriver ||
           (cudaDriverGetVersion(&driver) == cudaSuccess && driver > 0);
}

static void idist__gpu_join_describe_error(const char *what, cudaError_t error,
                                           idist__gpu_rank_info *info) {
    int driver = 0, runtime = 0;

    info->cuda_error = idist__gpu_join_is_fault(error) ? (int32_t)error : 0;
    if (info->cuda_error && error == cudaErrorInsufficientDriver &&
        cudaDriverGetVersion(&driver) == cudaSuccess &&
        cudaRuntimeGetVersion(&runtime) == cudaSuccess)
        snprintf(info->reason, sizeof info->reason,
                 "%s: the driver is for CUDA %d.%d, the program for %d.%d", what, driver / 1000,
                 driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    else
        snprintf(info->reason, sizeof info->reason, "%s: %s (%s, %d)", what,
                 cudaGetErrorString(error), cudaGetErrorName(error), (int)error);
}

// What the user can do about an error.
static const char *idist__gpu_join_remedy(cudaError_t error) {
    switch ((int)error) {
    case cudaErrorInsufficientDriver: return "update the driver, or build with an older toolkit";
    case cudaErrorInitializationError:
        return "CUDA does not work in a child forked by a process that has used it: call "
               "idist_spawn with start_method \"exec\"";
    case cudaErrorDevicesUnavailable:
        return "another process uses the GPU exclusively: nvidia-smi -c 0 lets several use it";
    case cudaErrorMemoryAllocation: return "the GPU is out of memory: see nvidia-smi";
    case cudaErrorSystemNotReady:
        return "the fabric manager is not running: systemctl start nvidia-fabricmanager";
    case cudaErrorSystemDriverMismatch:
        return "libcuda.so.1 does not match the driver: reboot after a driver update";
    case cudaErrorCompatNotSupportedOnDevice:
        return "the GPU does not support cuda-compat: remove it from LD_LIBRARY_PATH";
    default: return "see nvidia-smi and the kernel's log";
    }
}

// The number of the device that desc.device names, in *number. False: none is to be used, or the
// name is wrong; info says so.
static bool idist__gpu_join_parse_device(const char *asked, idist__gpu_rank_info *info,
                                         int *number) {
    int64_t value;

    if (strcmp(asked, "cpu") == 0) {
        info->presence = IDIST__GPU_NONE;
        snprintf(info->reason, sizeof info->reason, "the device asked for is \"cpu\"");
        return false;
    }

    if (!asked[0] || strcmp(asked, "cuda") == 0) return true;

    if (strncmp(asked, "cuda:", 5) != 0 || !idist__parse_int(asked + 5, 0, 4095, &value)) {
        info->presence = IDIST__GPU_BAD_NAME;
        snprintf(info->reason, sizeof info->reason,
                 "device \"%.40s\" is none of cpu, cuda, cuda:0, cuda:1, ...", asked);
        return false;
    }

    *number = (int)value;

    return true;
}

// Makes a device the current one: this number, modulo the devices there are unless one was named.
// *what: the function of CUDA that has failed.
static cudaError_t idist__gpu_join_open_device(idist__gpu *gpu, idist__gpu_rank_info *info,
                                               int number, bool numbered, const char **what) {
    int n = 0;
    cudaError_t error = cudaGetDeviceCount(&n);

    *what = "cudaGetDeviceCount";
    if (error != cudaSuccess) return error;
    if (n == 0) return cudaErrorNoDevice;
    if (numbered && number >= n) return cudaErrorInvalidDevice;
    gpu->device = number % n;
    info->device = gpu->device;

    *what = "cudaSetDevice";
    error = cudaSetDevice(gpu->device);
    if (error != cudaSuccess) return error;

    *what = "cudaDeviceGetPCIBusId";
    error = cudaDeviceGetPCIBusId(info->bus_id, (int)sizeof info->bus_id, gpu->device);
    if (error != cudaSuccess) return error;

    *what = "cudaDeviceGetAttribute";
    return cudaDeviceGetAttribute(&info->major, cudaDevAttrComputeCapabilityMajor, gpu->device);
}

// The device of this rank.
static void idist__gpu_join_probe_device(const idist__world *w, idist__gpu *gpu,
                                         idist__gpu_rank_info *info) {
    const char *asked = w->cfg.device, *what;
    int number = w->nodes[w->group.rank].local_rank;
    cudaError_t error;

    if (!idist__gpu_join_parse_device(asked, info, &number)) return;

    error = idist__gpu_join_open_device(gpu, info, number, asked[0] && asked[4] == ':', &what);

    if (error != cudaSuccess) {
        info->presence = info->named ? IDIST__GPU_MISSING : IDIST__GPU_NONE;
        idist__gpu_join_describe_error(what, error, info);
        cudaGetLastError();
        return;
    }

    idist__gpu_device_find_context_state(gpu);
}

// By path; also what desc.device_backend may be, besides "auto".
static const char *const idist__gpu_path_names[] = {"none", "nccl", "ipc", "staged"};

// The path that desc.device_backend asks for; IDIST__BY_HOST_MEMORY: any. -1: there is none of this
// name.
static int idist__gpu_join_path_named(const char *asked) {
    int i;

    if (!asked[0]) return IDIST__BY_HOST_MEMORY;
    for (i = IDIST__BY_NCCL; i <= IDIST__BY_STAGING; i++)
        if (strcmp(asked, idist__gpu_path_names[i]) == 0) return i;
    return -1;
}

// Finds the device of this rank, and NCCL.
static void idist__gpu_join_probe(idist__world *w, idist__gpu *gpu, idist__gpu_rank_info *info) {
    idist__config real = w->cfg;

    memset(info, 0, sizeof *info);
    info->named = strncmp(w->cfg.device, "cuda", 4) == 0;
    info->wanted_backend = idist__gpu_join_path_named(w->cfg.device_backend);
    info->has_user_comm = w->cfg.nccl_comm != NULL;
    memset(real.host_id, 0, sizeof real.host_id);
    info->machine_key = idist__config_host_key(&real);
    info->process = idist__ipc_arena_process();
    snprintf(info->no_nccl_reason, sizeof info->no_nccl_reason, "not asked for");
    idist__gpu_join_probe_device(w, gpu, info);

    if (info->presence == IDIST__GPU_FOUND && info->wanted_backend <= IDIST__BY_NCCL) {
        idist__nccl_load_once(gpu->nccl, info->no_nccl_reason, sizeof info->no_nccl_reason);
        info->nccl = gpu->nccl->version;
        info->allows_shared_gpu = idist__gpu_join_allows_shared_gpu(info->nccl);
    }
}

// Ranks that keep all of them from using NCCL; -1: none.
typedef struct idist__nccl_obstacles {
    int without; // has no NCCL
    int other;   // has another version than rank 0
} idist__nccl_obstacles;

// Compares what the ranks have found, and sets what depends on all of them.
static idist_status idist__gpu_join_compare_infos(idist__world *w, idist__nccl_obstacles *nccl) {
    idist__gpu *gpu = idist__gpu_of(w);
    const idist__gpu_rank_info *infos = gpu->rank_infos;
    int i;

    nccl->without = nccl->other = -1;
    gpu->nccl_reduces_f8 = true;

    for (i = 0; i < w->group.size; i++) {
        if (infos[i].has_user_comm != infos[0].has_user_comm)
            return idist__fail(IDIST_ERR_ENV,
                               "initialize: rank 0 and rank %d differ in desc.nccl_comm", i);
        if (infos[i].wanted_backend != infos[0].wanted_backend)
            return idist__fail(IDIST_ERR_ENV,
                               "initialize: rank 0 and rank %d differ in IDIST_DEVICE_BACKEND", i);
        if (!infos[i].nccl && nccl->without < 0) nccl->without = i;
        if (infos[i].nccl != infos[0].nccl && nccl->other < 0) nccl->other = i;
        if (infos[i].nccl < 22400 || infos[i].major < 9) gpu->nccl_reduces_f8 = false;
    }

    if (nccl->without >= 0 || nccl->other >= 0) gpu->nccl->version = 0;

    return IDIST_OK;
}

// NCCL was asked for: an error if it cannot be used.
static idist_status idist__gpu_join_check_wanted(const idist__world *w,
                                                 const idist__nccl_obstacles *nccl) {
    const idist__gpu_rank_info *infos = idist__gpu_of(w)->rank_infos;
    int a, b;

    if (nccl->without >= 0)
        return idist__fail(IDIST_ERR_NO_DEVICE, "initialize: rank %d: %s", nccl->without,
                           infos[nccl->without].no_nccl_reason);
    if (nccl->other >= 0)
        return idist__fail(IDIST_ERR_NO_DEVICE,
                           "initialize: rank 0 has NCCL %d, rank %d has NCCL %d", infos[0].nccl,
                           nccl->other, infos[nccl->other].nccl);
    if (!idist__gpu_setup_find_shared(&w->group, &a, &b)) return IDIST_OK;
    if (infos[a].allows_shared_gpu && infos[b].allows_shared_gpu) return IDIST_OK;

    return idist__fail(IDIST_ERR_UNSUPPORTED,
                       "initialize: rank %d and rank %d share the GPU %s, which NCCL %d refuses; "
                       "from 2.30.3 on it takes them with NCCL_MULTI_RANK_GPU_ENABLE=1",
                       b, a, infos[a].bus_id, infos[a].nccl);
}

// No device backend was asked for: says why NCCL, which GPUs are best served by, is not used.
static void idist__gpu_join_log_obstacles(const idist__world *w,
                                          const idist__nccl_obstacles *nccl) {
    const idist__gpu_rank_info *infos = idist__gpu_of(w)->rank_infos;
    const idist_group *g = &w->group;
    int a, b;
    bool useful = g->size > 1 && !idist__gpu_setup_find_shared(g, &a, &b); // NCCL would serve them

    if (nccl->without >= 0)
        idist__log_print(&w->log,
                         useful && nccl->without == g->rank ? IDIST_LOG_WARN : IDIST_LOG_INFO,
                         "no NCCL, without which GPUs communicate at a fraction of their speed: "
                         "%s; install it (pip install nvidia-nccl-cu%d), or say where it is with "
                         "IDIST_NCCL_LIB",
                         infos[nccl->without].no_nccl_reason, CUDART_VERSION / 1000);
    else if (nccl->other >= 0)
        idist__log_print(&w->log, IDIST_LOG_WARN,
                         "no NCCL: rank 0 has version %d, rank %d has version %d", infos[0].nccl,
                         nccl->other, infos[nccl->other].nccl);
}

// One device backend for all: NCCL only if all ranks have the same version of it.
static idist_status idist__gpu_join_agree_backend(idist__world *w) {
    const idist__gpu_rank_info *infos = idist__gpu_of(w)->rank_infos;
    const idist_group *g = &w->group;
    idist__nccl_obstacles nccl;
    int a, b;
    idist_status status = idist__gpu_join_compare_infos(w, &nccl);

    if (status == IDIST_OK && infos[0].wanted_backend == IDIST__BY_NCCL)
        status = idist__gpu_join_check_wanted(w, &nccl);
    if (status != IDIST_OK) return status;

    if (infos[0].wanted_backend == IDIST__BY_IPC &&
        (!idist__gpu_setup_is_one_host(g) || g->size > IDIST__IPC_RANKS || !IDIST__IPC_KERNELS))
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "initialize: ipc is for up to %d ranks on one host, and CUDA 12.8",
                           IDIST__IPC_RANKS);

    if (!infos[0].wanted_backend) idist__gpu_join_log_obstacles(w, &nccl);
    if (idist__gpu_setup_find_shared(g, &a, &b))
        idist__log_print(&w->log, IDIST_LOG_INFO, "rank %d and rank %d share the GPU %s", b, a,
                         infos[a].bus_id);

    return IDIST_OK;
}

// No rank uses a device. If GPUs stay idle, the rank that is the cause logs a warning.
static void idist__gpu_join_log_no_device(const idist__world *w, int n_with) {
    const idist__gpu_rank_info *mine = &idist__gpu_of(w)->rank_infos[w->group.rank];

    if (mine->cuda_error)
        idist__log_print(&w->log, IDIST_LOG_WARN,
                         "no rank uses a GPU: %s; %s. (Set IDIST_DEVICE=cpu if that is intended)",
                         mine->reason, idist__gpu_join_remedy((cudaError_t)mine->cuda_error));
    else if (n_with && mine->presence == IDIST__GPU_NONE && strcmp(w->cfg.device, "cpu") != 0)
        idist__log_print(&w->log, IDIST_LOG_WARN,
                         "no rank uses a GPU, though %d have one: %s. (Set IDIST_DEVICE=cpu if "
                         "that is intended)",
                         n_with, mine->reason);
    else idist__log_print(&w->log, IDIST_LOG_INFO, "no device: %s", w->no_device);
}

// One outcome for all ranks: a device each, no device at all, or the same error.
static idist_status idist__gpu_join_agree_device(idist__world *w, bool *all) {
    const idist__gpu_rank_info *infos = idist__gpu_of(w)->rank_infos;
    int i, n = w->group.size, worst = 0, named = 0, n_with = 0;

    for (i = 0; i < n; i++) {
        if (infos[i].presence > infos[worst].presence ||
            (infos[i].presence == infos[worst].presence && infos[i].cuda_error &&
             !infos[worst].cuda_error))
            worst = i;
        n_with += infos[i].presence == IDIST__GPU_FOUND;
        named |= infos[i].named;
    }

    *all = infos[worst].presence == IDIST__GPU_FOUND;
    if (*all) return idist__gpu_join_agree_backend(w);
    if (infos[worst].presence == IDIST__GPU_BAD_NAME)
        return idist__fail(IDIST_ERR_ENV, "initialize: rank %d: %s", worst, infos[worst].reason);
    if (named)
        return idist__fail(IDIST_ERR_NO_DEVICE, "initialize: rank %d has no device: %s", worst,
                           infos[worst].reason);
    snprintf(w->no_device, sizeof w->no_device, "rank %d has none: %.160s", worst,
             infos[worst].reason);
    idist__gpu_join_log_no_device(w, n_with);

    return IDIST_OK;
}

static void idist__gpu_join_install(idist__world *w) {
    static const idist_device_api device_api = {idist__gpu_route_find,
                                                idist__gpu_engine_launch_held,
                                                idist__gpu_engine_part_done,
                                                idist__gpu_engine_follow,
                                                idist__gpu_engine_end_calls};
    idist__gpu *gpu = idist__gpu_of(w);

    gpu->host_backend = w->backend;
    gpu->thread = &w->thread;
    gpu->sleep_ns = IDIST__GPU_SLEEP_NS;
    gpu->api = *w->backend;
    gpu->api.start = idist__gpu_engine_start;
    gpu->api.progress = idist__gpu_engine_progress;
    gpu->api.sleep = idist__gpu_engine_sleep;
    gpu->api.cancel = idist__gpu_engine_cancel;
    if (gpu->api.retract) gpu->api.retract = idist__gpu_engine_retract;
    gpu->api.tell = idist__gpu_engine_tell;
    gpu->api.announce = idist__gpu_engine_announce;
    gpu->api.missing = idist__gpu_engine_missing;
    gpu->api.group_close = idist__gpu_engine_group_close;
    gpu->api.close = idist__gpu_engine_close;
    __atomic_store_n(&idist__gpu_home_device, gpu->device + 1, __ATOMIC_RELEASE);
    snprintf(w->device_name, sizeof w->device_name, "cuda:%d", gpu->device);
    w->backend = &gpu->api;
    w->device_api = &device_api;
}

// The memory that a world's `device` points to.
typedef struct idist__nccl_world {
    idist__gpu gpu; // first: it is freed by this address
    idist__nccl nccl;
} idist__nccl_world;

// Copies desc.nccl_config, which the program may free before a group uses it.
static idist_status idist__gpu_join_copy_config(idist__world *w) {
    const idist__nccl_config *theirs = (const idist__nccl_config *)w->cfg.nccl_config;
    size_t nbytes = theirs ? idist__gpu_setup_config_nbytes(theirs) : 0;

    if (!theirs) return IDIST_OK;
    w->cfg.nccl_config = idist__gpu_of(w)->nccl_config = idist__mem_alloc(&w->cfg.mem, nbytes);
    if (!w->cfg.nccl_config) return IDIST_ERR_NO_MEMORY;
    memcpy(idist__gpu_of(w)->nccl_config, theirs, nbytes);

    return IDIST_OK;
}

static idist_status idist__gpu_join_wrap(idist__world *w) {
    int n = w->group.size, nthreads = idist__os_thread_count();
    idist__nccl_world *both = (idist__nccl_world *)idist__mem_alloc(&w->cfg.mem, sizeof *both);
    idist__gpu *gpu = both ? &both->gpu : NULL;
    idist__gpu_rank_info mine;
    idist_status status = gpu ? IDIST_OK : IDIST_ERR_NO_MEMORY;
    bool all = false;

    if (gpu) gpu->nccl = &both->nccl;
    w->device = gpu;
    if (gpu && (gpu->rank_infos =
                    (idist__gpu_rank_info *)idist__mem_alloc(&w->cfg.mem,
                                                             sizeof mine * (size_t)n)) == NULL)
        status = IDIST_ERR_NO_MEMORY;
    if (status == IDIST_OK) status = idist__gpu_join_copy_config(w);
    idist__world_lock(w);

    if (status == IDIST_OK) {
        idist__gpu_join_probe(w, gpu, &mine);
        if (w->foreign_thread_count < INT32_MAX / 4)
            w->foreign_thread_count += idist__os_thread_count() - nthreads; // CUDA's own
        status = idist__gpu_agree_exchange(&w->group, &mine, gpu->rank_infos, sizeof mine);
    }

    if (status == IDIST_OK) status = idist__gpu_join_agree_device(w, &all);

    if (status == IDIST_OK && all) {
        idist__gpu_join_install(w);
        idist__gpu_setup_alloc_shared(w);
        status = idist__gpu_setup_group_make(&w->group);
        if (status == IDIST_OK) status = idist__gpu_setup_prepare(&w->group);
        w->device_backend =
            idist__gpu_path_names[w->group.device ? idist__gpu_group_of(&w->group)->path
                                                  : IDIST__BY_HOST_MEMORY];
    }

    // Ranks that finished this before us have already failed in a call; so will this one.
    if (w->group.status == IDIST_ERR_ABORTED || w->group.status == IDIST_ERR_MISMATCH)
        status = IDIST_OK;
    if (!all && !w->no_device[0])
        snprintf(w->no_device, sizeof w->no_device, "the world failed before it had one");
    idist__os_mutex_unlock(&w->lock);
    if (status == IDIST_OK && all)
        idist__log_print(&w->log, IDIST_LOG_INFO, "device %s, device backend %s", w->device_name,
                         w->device_backend);
    else if (gpu && !gpu->host_backend) idist__gpu_engine_free(w); // else the world is closed next

    return status;
}

static idist_status idist__gpu_join_claim(idist__config *config, const char **reason) {
    const char *asked = config->device_backend;

    (void)reason;
    if (idist__gpu_join_path_named(asked) >= 0) return IDIST_OK;
    if (config->device_backend_in_desc)
        return idist__fail(IDIST_ERR_ARG,
                           "desc: \"%s\" (IDIST_DEVICE_BACKEND) is not one of auto, nccl, ipc, "
                           "staged",
                           asked);

    return idist__fail(IDIST_ERR_ENV, "IDIST_DEVICE_BACKEND=%s: use one of auto, nccl, ipc, staged",
                       asked);
}

static void idist__gpu_join_fill(idist_backend_api *api) {
    api->name = "nccl";
    api->claim = idist__gpu_join_claim;
    api->wrap = idist__gpu_join_wrap;
}

const idist_backend_api *idist_nccl_backend(void) {
    static idist_backend_api api;
    return idist__backend_fill(&api, idist__gpu_join_fill);
}

__attribute__((constructor(IDIST__REGISTER_DEVICE))) static void idist__gpu_join_register(void) {
    (void)idist_register_backend(idist_nccl_backend());
}

// Tests set these from outside.
#undef IDIST__NCCL_FILE
#undef IDIST__GPU_ABORT_MS
#undef IDIST__IPC_CHUNK

#include "idist_end.h"

#endif // IDIST_IMPLEMENTATION
