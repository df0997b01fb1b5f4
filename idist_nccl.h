/* idist_nccl.h - v0.2.0 - device pointers for idist: the same calls take CUDA memory - MIT license

DO THIS

    Include this file in the file that defines IDIST_IMPLEMENTATION, or on the command line, and
    link the CUDA runtime:

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

    idist_initialize picks a device for each rank and makes it the calling thread's current device.
    The device is the local rank modulo the number of devices; desc.device or IDIST_DEVICE overrides
    that. If another thread has not chosen a device, its first call on device memory makes this
    device current. A thread that has chosen a device keeps its own.

    From then on, every communication call takes device pointers as well as host pointers. The CUDA
    runtime tells them apart. Managed memory counts as host memory.

    NCCL 2.14 or later is loaded at run time unless the program is linked with it. Its header is not
    needed. idist looks for NCCL in the file that IDIST_NCCL_LIB names. Otherwise it looks for
    libnccl.so.2 where the loader looks, and in the Python package nvidia-nccl (VIRTUAL_ENV,
    CONDA_PREFIX, ~/.local and the system).

HOW DEVICE MEMORY TRAVELS

    idist_device_backend() returns the device backend in use. desc.device_backend or
    IDIST_DEVICE_BACKEND selects one, and must be the same on all ranks.

        nccl     where each rank has a GPU of its own. NCCL 2.30.3 or later also takes several ranks
                 on one GPU, if you ask for nccl here and set NCCL_MULTI_RANK_GPU_ENABLE=1.
        ipc      for ranks of one host that share a GPU: they read each other's memory
        staged   everywhere: through pinned memory and the host's backend, a chunk at a time

    Calls that the device backend does not support are staged. With nccl these are scan, exscan,
    MINLOC, MAXLOC, bitwise and logical ops, user-defined ops except premultiplied sums, messages
    without a stream, and reductions of I16, U16 and 8-bit floats. With ipc all messages, v-forms
    and reductions of integers are staged as well. NCCL reduces 8-bit floats from 2.24 on, if all
    ranks have GPUs of compute capability 9.0 or more; then these are not staged.

    NCCL rounds 16-bit and 8-bit floats at every step. For an AVG it multiplies by 1/n before it
    sums. It does not define MIN and MAX of a NaN. The other device backends give the same bits as
    the host. MPI always gets host memory, even if it was built for CUDA.

CALLS

    blocking          starts after the work in the legacy default stream; the result is there on
                      return. Synchronize other streams yourself. (The call clears CUDA's last
                      error: read cudaGetLastError before it.)
    opts.stream       starts after the work in that stream; work added to the stream later sees the
                      result. A call that NCCL supports is enqueued and returns. It may be captured
                      into a graph, except for the first call of a group. (Destroy the graph before
                      the group: NCCL waits for that.) Other calls block while the host does its
                      part. Keep the buffers until the stream has finished with them. An error after
                      the return is reported by a later call.
    opts.request      runs in the background until idist_wait or idist_test completes it, or
                      idist_wait_stream makes a stream wait for it. With a stream as well, it starts
                      after the work that is in the stream now.
    idist_group_begin / _end   hand all calls between them to NCCL at once, in idist_group_end. (A
                      lock that orders the calls of several threads must be held all that time.)

    In one collective, either all ranks pass device memory or none does; otherwise the call fails
    with IDIST_ERR_MISMATCH. A rank that neither contributes nor receives anything in a v-form
    passes any device pointer, or its stream, to show that the other ranks use device memory. A
    message may go from a device to the host memory of another rank.

    If several threads of a process are ranks, NCCL reads and writes the buffers of each from the
    GPUs of the others. Memory from cudaMallocAsync must allow this access (cudaMemPoolSetAccess).

    Over NCCL, a send on a stream (without a request) needs a receive on a stream, of the same
    count. The send blocks its stream until the receive starts, so ranks that send to each other
    must do so between group_begin and group_end. Messages between two ranks arrive in the order in
    which they were sent. A tag does not select a message; it is only compared with the tag of the
    next message.

    The first call of a group on device memory waits for the other members; for the world that
    happens in idist_initialize. It also connects the members for every collective. By itself, NCCL
    connects them in the first call of each algorithm, and that call waits on the host until all
    ranks make it. idist tries the algorithms with calls of up to IDIST_NCCL_CONNECT_BYTES (default
    16 MiB; 0 tries none). Define this macro where the implementation is compiled, with the same
    value for all ranks. If NCCL chooses an algorithm only for larger calls, the first such call
    waits on the host.

    Some calls move data between pairs of ranks: messages on a stream, all_to_all, gather, scatter,
    gatherv, scatterv and all_to_allv. NCCL connects a pair in the pair's first such call, which
    waits on the host for the other rank. One all_to_all connects all pairs of a group.

FAILURES

    The ranks compare their calls and watch each other through the host's backend, independently of
    NCCL. Different calls, late ranks and lost ranks give the same errors as on the host. The
    communicator is aborted. Streams that waited for it continue, with undefined contents in the
    buffers. A progress thread notices the failure and aborts, even while you wait for a stream.
    (Where idist_mpi.h cannot have such a thread, the next call notices.)

    From 2.28.7 on, ncclCommRevoke releases a call that waits inside NCCL. For an older NCCL, idist
    creates non-blocking communicators. A blocking communicator of yours (desc.nccl_comm,
    desc.nccl_config) is not aborted before the call has returned.

    After a failure, do not relaunch a graph that contains calls of the group. Until the graph is
    destroyed, a thread waits in ncclCommAbort; from 2.28.7 on, the communicator stays in memory
    instead.

    NCCL itself may report that a peer is gone or late (over InfiniBand and sockets, not inside a
    host). idist then takes up to a second to find out which peer, through the host's backend. If
    idist cannot find out, the error is IDIST_ERR_PEER_LOST or IDIST_ERR_TIMEOUT without the name of
    a rank.

OPTIONS

    desc.high_priority_stream (IDIST_HIGH_PRIORITY_STREAM=1) gives blocking calls and requests
    priority over other work of the device, for example for the gradients of a backward pass. A call
    with opts.stream alone has the priority of that stream.

    desc.nccl_comm provides a communicator for the world. You keep ownership, but the communicator
    is aborted, and so freed, if the world fails. desc.nccl_config configures the communicators that
    idist creates. Pinned memory is kept until the world is closed.

WHEN THERE IS NO DEVICE

    If there is no driver or no device, even on one rank only, the world has no device. Then
    idist_device() is "cpu", calls on host memory work as usual, and a call with opts.stream returns
    IDIST_ERR_NO_DEVICE with the reason.

    If any rank asks for a device by name ("cuda", "cuda:1"), idist_initialize fails on all ranks
    instead. It also fails if NCCL or IPC is requested and cannot be used. A program that must start
    without libcudart.so links libcudart_static.a. Either all ranks include this header or none
    does.

    A warning with reason and remedy is logged if a usable GPU stays idle, or if GPUs communicate
    without NCCL. A machine without a driver or a GPU causes no warning.

CONTENTS

    [nccl:api] has the declarations. The implementation follows. Its files are in src/gpu/.
    Generated from src/ by tools/drop_ins.py: change the files there.
*/
#ifndef IDIST_H
#include "idist.h"
#endif
#if IDIST_VERSION_MAJOR != 0 || IDIST_VERSION_MINOR != 2 || IDIST_VERSION_PATCH != 0
#error "idist_nccl.h is version 0.2.0, and idist.h another one: copy both from the same release"
#endif
#ifndef IDIST_NCCL_H
#define IDIST_NCCL_H

#ifdef __cplusplus
extern "C" {
#endif

//------------------------------------------------------------------------------
// [nccl:api]  the backend's table, and what else programs call
//------------------------------------------------------------------------------

// Returns the backend that moves device memory, beside the world's backend for host memory.
IDIST_API const idist_backend_api *idist_nccl_backend(void);

// Returns the ncclComm_t of a group (NULL: the world), for calls of your own. Returns NULL if the
// group does not use NCCL; idist_last_error says why. idist keeps ownership of the communicator.
// The first such call on a group is collective, as is the group's first call on device memory.
IDIST_API void *idist_nccl_comm(idist_group *group);

// Returns an allocator of pinned host memory, for the batches of a loader (idist_train.h), for
// example. Copies between pinned memory and a device run asynchronously.
IDIST_API idist_allocator idist_pinned_allocator(void);

#ifdef __cplusplus
} // extern "C"
#endif

#endif // IDIST_NCCL_H

// Only here for the API? Stop reading.

#if defined(IDIST_IMPLEMENTATION) && !defined(IDIST_NCCL_IMPLEMENTATION_DONE)
#define IDIST_NCCL_IMPLEMENTATION_DONE

#include <cuda_runtime_api.h>

// ---- base/begin.h --------------------------------------------------------------------------------

// base/begin.h: macros and compiler settings for the implementation
//
// Included where the implementation of each src/idist*.h begins. base/end.h ends the implementation
// and restores the settings. Has no include guard, so that each drop-in gets a copy.

// System headers may define these words as macros, as windows.h does.
#pragma push_macro("small")
#undef small
#pragma push_macro("lock")
#undef lock
#pragma push_macro("min")
#undef min
#pragma push_macro("max")
#undef max

// C++ programs may enable these warnings, but code that must also compile as C needs the casts and
// the NULLs that they report.
#if defined(__cplusplus) && defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wold-style-cast"
#pragma GCC diagnostic ignored "-Wzero-as-null-pointer-constant"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wuseless-cast"
#endif
#endif

// gcc's thread sanitizer does not support fences, and warns about each fence for shared memory.
#if defined(__SANITIZE_THREAD__) && !defined(__clang__) && __GNUC__ >= 11
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wtsan"
#endif

#if defined(__GNUC__) && !defined(__clang__)
#define IDIST__VECTORIZE __attribute__((optimize("O3")))
#define IDIST__NO_ALIAS _Pragma("GCC ivdep")
#elif defined(__clang__)
#define IDIST__VECTORIZE
#define IDIST__NO_ALIAS _Pragma("clang loop vectorize(assume_safety)")
#else
#define IDIST__VECTORIZE
#define IDIST__NO_ALIAS
#endif
#define IDIST__PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#define IDIST__UNUSED __attribute__((unused))
#define IDIST__NOINLINE __attribute__((noinline))
#define IDIST__INLINE static inline __attribute__((always_inline))
#define IDIST__TLS static __thread

// IDIST__TRY(result = fn(arg)) calls a function of the program. In C++ with exceptions, the macro
// catches every exception and records in idist__me.thrown what was thrown. Otherwise an exception
// ends the process as if fn were noexcept: std::terminate prints the exception. A function that
// uses the macro must be IDIST__NOINLINE.
#if defined(__cplusplus) && defined(__EXCEPTIONS)
#include <exception>
#ifdef __GLIBCXX__
#include <cxxabi.h>
// clang-format off
#define IDIST__CATCH_EXIT catch (abi::__forced_unwind &) { throw; } // pthread_exit
// clang-format on
#else
#define IDIST__CATCH_EXIT
#endif
#define IDIST__TRY(statement)                                                     \
    do {                                                                          \
        try {                                                                     \
            statement;                                                            \
        }                                                                         \
        IDIST__CATCH_EXIT                                                         \
        catch (const std::exception &thrown_) {                                   \
            idist__callback_note(thrown_.what());                                 \
        }                                                                         \
        catch (...) {                                                             \
            idist__callback_note("an exception not derived from std::exception"); \
        }                                                                         \
    } while (0)
#else
// Marks the return address as undefined, which tells the unwinder that the stack ends in this
// function. Without unwind tables the stack ends here anyway.
#if defined(__GCC_HAVE_DWARF2_CFI_ASM) && defined(__x86_64__)
#define IDIST__UNWIND_END __asm__ volatile(".cfi_undefined 16" ::: "memory")
#elif defined(__GCC_HAVE_DWARF2_CFI_ASM) && defined(__i386__)
#define IDIST__UNWIND_END __asm__ volatile(".cfi_undefined 8" ::: "memory")
#elif defined(__GCC_HAVE_DWARF2_CFI_ASM) && defined(__aarch64__)
#define IDIST__UNWIND_END __asm__ volatile(".cfi_undefined 30" ::: "memory")
#else
#define IDIST__UNWIND_END (void)0
#endif
#define IDIST__TRY(statement)                                 \
    do {                                                      \
        IDIST__UNWIND_END;                                    \
        statement;                                            \
        __asm__ volatile("" ::: "memory"); /* no tail call */ \
    } while (0)
#endif

// IDIST__CALLBACK(statement) is IDIST__TRY for a callback, which must not call idist and runs with
// cancellation disabled: see base/fail.h.
#define IDIST__CALLBACK(statement)                           \
    do {                                                     \
        int cancel_state_ = idist__os_unwind_block_cancel(); \
                                                             \
        idist__me.callbacks++;                               \
        IDIST__TRY(statement);                               \
        idist__me.callbacks--;                               \
        idist__os_unwind_allow_cancel(cancel_state_);        \
    } while (0)

// ---- os/mutex_init.h -----------------------------------------------------------------------------

// os/mutex_init.h: the initial value of a lock in static memory
//
// Included by base/begin.h. Neither file has an include guard, because every drop-in contains its
// own copy of both.

#define IDIST__OS_MUTEX_INIT PTHREAD_MUTEX_INITIALIZER

#define IDIST__COUNT_OF(a) (sizeof(a) / sizeof((a)[0]))

// A program may be built with -ffast-math or -Ofast, but idist needs standard arithmetic. A NaN
// that one rank contributes must reach all ranks, the conversions in base/small_float.h rely on the
// order of their steps, and gradient norms check that numbers are finite.
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__) || \
    defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__)
#define IDIST__FAST_MATH 1
#if defined(__clang__)
#pragma float_control(precise, on, push)
#elif defined(__GNUC__)
// In C, pop_options alone would leave these macros undefined.
#pragma push_macro("__FAST_MATH__")
#pragma push_macro("__FINITE_MATH_ONLY__")
#pragma push_macro("__ASSOCIATIVE_MATH__")
#pragma push_macro("__RECIPROCAL_MATH__")
#pragma push_macro("__NO_SIGNED_ZEROS__")
#pragma push_macro("__NO_TRAPPING_MATH__")
#pragma push_macro("__NO_MATH_ERRNO__")
#pragma GCC push_options
#pragma GCC optimize("no-fast-math")
#endif
#endif

// ---- gpu/gpu_model.h -----------------------------------------------------------------------------

// gpu/gpu_model.h: what the device adds to worlds, groups and calls
//
// This file defines the device backend's data structures. gpu_device.h, pinned.h, gpu_task.h and
// stage.h operate on these structures. gpu/ipc and gpu/nccl build on these files, and gpu/route
// chooses between IPC, NCCL and staging.
//
// Each of the core's structures has a `device` member that points to one of these:
//
//     idist__world.device -> idist__gpu         the device of this rank, NCCL, pinned memory
//     idist_group.device  -> idist__gpu_group   streams, communicator or arenas, queue of calls
//     idist__task.device  -> idist__gpu_op      a call on device memory, and its progress
//
// The world's lock protects all three structures, until the world has ended and a single thread
// closes it. Some CUDA and NCCL calls may wait for work on the device, which may wait for another
// rank. Such calls are made without the lock. Meanwhile gpu->user_count keeps the structures alive.
// A function that releases the lock says so. Its callers must check again what may have changed:
// the group's status, the queue, gpu->stuck.
//
// Anything that has not returned by its deadline is abandoned. Its memory stays allocated:
//
//     what does not return                    flag                   what stays in memory
//     copies on the streams of a group        gg->stuck              pinned memory of its calls
//     anything that waits for the device      gpu->stuck             all mapped or pinned memory
//     the probe of a group's arenas           setup.stuck            the arena; sets gpu->stuck
//     a job with a thread of its own          IDIST__JOB_STATE_LEFT  the job, until its thread ends
//     a thread of the program, inside a call  w->life.abandoned      the world; sets gpu->stuck

#define IDIST__GPU_SPIN_NS ((int64_t)30000)  // how long a waiting thread polls before it sleeps
#define IDIST__GPU_SLEEP_NS ((int64_t)20000) // first sleep of a waiting thread, between checks
#define IDIST__GPU_SLEEP_LONG_NS ((int64_t)1000000) // longest sleep of a waiting thread
#define IDIST__GPU_CHUNK ((size_t)4 << 20)          // bytes staged at a time
#define IDIST__GPU_SLOTS 3       // chunks in flight: leaving, with the host's backend, arriving
#define IDIST__GPU_AHEAD 1000    // calls that a rank may enqueue before other ranks begin them
#define IDIST__GPU_GRACE_MS 200  // time that an abort waits for the device to finish
#define IDIST__GPU_FAULT_MS 1000 // time for the host to find the rank behind an NCCL error
#ifndef IDIST__GPU_ABORT_MS      // tests set a smaller value
#define IDIST__GPU_ABORT_MS 5000 // time that ncclCommAbort, or another clean-up, may take
#endif
#ifndef IDIST__IPC_CHUNK                    // tests set a smaller value
#define IDIST__IPC_CHUNK ((size_t)16 << 20) // bytes that the other ranks read at a time
#endif
#define IDIST__IPC_LOAD_MS 300000 // time that another thread may take to load the kernels
#define IDIST__IPC_SLOTS 4        // chunks in an arena
#define IDIST__IPC_SMALL 65536    // largest all_reduce, in bytes, that every rank reduces in full
#define IDIST__IPC_RANKS 16
#define IDIST__IPC_KERNELS (CUDART_VERSION >= 12080) // this CUDA version can load PTX kernels

// States of a job that has a thread of its own. If a waiter may leave the job behind, the thread
// and the waiter change the state by atomic exchange. Whichever of the two is second frees the job.
enum {
    IDIST__JOB_STATE_RUNS = 0,
    IDIST__JOB_STATE_DONE = 1,
    IDIST__JOB_STATE_LEFT = 2 // nobody waits for the job any more
};

// The path on which a call moves its data.
typedef enum idist__gpu_path {
    IDIST__BY_HOST_MEMORY, // the call uses no device memory
    IDIST__BY_NCCL,
    IDIST__BY_IPC,
    IDIST__BY_STAGING
} idist__gpu_path;

// Host memory for staging. The memory is kept for the next call, because pinning takes as long as
// many copies.
typedef struct idist__pinned {
    struct idist__pinned *next;
    void *data;
    size_t nbytes;
    bool is_pinned; // if false, a copy waits for earlier work in the stream, with the lock held
} idist__pinned;

// An arena: IDIST__IPC_SLOTS chunks of device memory that other ranks map. Mapped memory must not
// be freed, so the arena of a closed group is kept for the next group. All arenas are unmapped
// before the last barrier of the world and freed after the barrier. (A world that has failed ends
// without this barrier. A peer that still reads an arena then gets an error or garbage, but only in
// a call that fails.)
typedef struct idist__ipc_arena {
    struct idist__ipc_arena *next;
    char *data;
    int rank;        // the owner's rank in the world
    uint32_t serial; // number of the arena among the owner's arenas
} idist__ipc_arena;

// Results of the search for this rank's device, from best to worst.
typedef enum idist__gpu_presence {
    IDIST__GPU_FOUND,
    IDIST__GPU_NONE,    // no device found and none requested by name, or "cpu" requested
    IDIST__GPU_MISSING, // requested by name, but not found
    IDIST__GPU_BAD_NAME
} idist__gpu_presence;

// The information that each rank sends to all ranks when the world begins.
typedef struct idist__gpu_rank_info {
    int32_t presence;
    int32_t named;             // true if the device was requested by name
    int32_t wanted_backend;    // the path that cfg.device_backend names, or 0 for any path
    int32_t nccl;              // NCCL's version, or 0 without NCCL
    int32_t major;             // major number of the compute capability
    int32_t has_user_comm;     // true if cfg.nccl_comm is set
    int32_t allows_shared_gpu; // true if the user lets NCCL run several ranks on a GPU
    int32_t cuda_error;        // an error other than a missing driver or GPU, or 0
    // The machine on which bus_id identifies the device. The key ignores the user's host id, as
    // NCCL does.
    uint64_t machine_key;
    uint64_t process; // the result of idist__ipc_arena_process
    int32_t device;   // number of the device in this process
    char bus_id[28];
    char reason[160];
    char no_nccl_reason[160];
} idist__gpu_rank_info;

struct idist__nccl;      // NCCL's functions (gpu/nccl/nccl_load.h)
struct idist__nccl_gate; // says whether a thread is inside NCCL (gpu/nccl/nccl_job.h)
struct idist__nccl_job;  // a thread that makes a blocking NCCL call (gpu/nccl/nccl_job.h)

// The device backend's data for a world.
typedef struct idist__gpu {
    idist_backend_api api;                 // the world's backend
    const idist_backend_api *host_backend; // the backend below, which moves host memory
    struct idist__nccl *nccl;
    void *nccl_config; // a copy of desc.nccl_config, or NULL
    bool nccl_reduces_f8;
    int device;
    const idist__os_thread *thread; // the world's progress thread
    // cuDevicePrimaryCtxGetState, or NULL if not found.
    int (*context_state)(int device, unsigned *flags, int *active);
    idist__gpu_rank_info *rank_infos; // one for each rank
    idist__pinned *free_pinned;
    idist__pinned *abandoned_pinned;     // a copy to or from the memory may never end
    struct idist__pinning *pinning_job;  // pins memory for free_pinned, or NULL
    int waiting_call_count;              // calls that wait for the device
    int64_t sleep_ns;                    // next sleep of a thread that waits for the device
    int64_t spin_until_ns;               // until this time, a waiting thread does not sleep
    bool queue_changed;                  // a call left its group's queue: the next call may start
    int64_t checked_nccl_ns;             // time of the last check for NCCL errors
    struct idist__nccl_job *ending_jobs; // jobs that finalize or abort a communicator
    int *barrier_word; // word that stream barriers reduce; NULL without NCCL, or after an error
    // Pool for memory that idist allocates on a stream and gives to NCCL. If NULL, the default pool
    // is used.
    cudaMemPool_t pool;
    idist__ipc_arena *arenas;  // arenas of this rank that no group uses
    idist__ipc_arena *imports; // arenas mapped from other ranks
    uint32_t arena_count;      // arenas that this rank has ever made
    cudaError_t nccl_error;    // error from allocating barrier_word and pool
    bool closed;    // idist_finalize has begun: the memory of other ranks is no longer read
    bool stuck;     // some work on the device never ends: no mapped or pinned memory is freed
    int user_count; // threads that use this struct or an idist__gpu_group without the lock
    int64_t leave_deadline_ns; // deadline of these threads when the world closes, or 0
    bool loading;              // a thread is loading the kernels, without the lock
#if IDIST__IPC_KERNELS
    cudaLibrary_t library;
    cudaKernel_t kernels[5]; // numbered in gpu/ipc/ptx.h
#endif
    idist__task *held_calls; // calls held back by idist_group_begin of any thread, oldest first
} idist__gpu;

// The streams of a group. IPC uses only the first stream.
enum { IDIST__STREAM_OUT, IDIST__STREAM_IN, IDIST__STREAM_NCCL, IDIST__STREAM_COUNT };

// The device backend's data for a group, created by the group's first call on device memory.
typedef struct idist__gpu_group {
    idist__gpu_path path;
    bool preparing, ready; // state of the set-up that the members share
    cudaStream_t stream[IDIST__STREAM_COUNT];
    idist__task *queue, **queue_end; // calls with parts left for the host's backend, in order
    void *comm;                      // NULL if there is none, or if comm was aborted
    bool adopted;                    // comm belongs to the user
    bool captured;                   // a CUDA graph may hold calls of the group
    uint32_t ticket_count;           // tickets given out; NCCL gets the calls in ticket order
    uint32_t turn;                   // the ticket whose turn it is
    // Says whether a thread is inside NCCL with comm. Freed with the group, or by the job that
    // aborts comm.
    struct idist__nccl_gate *gate;
    int fault;                 // NCCL's error about another rank, or 0
    int64_t fault_deadline_ns; // deadline for finding the rank that caused it
    // comm must be aborted. Without ncclCommRevoke, a thread inside NCCL starts the abort when its
    // call returns.
    bool must_abort;
    struct idist__nccl_job *abort_job; // aborts the former comm; NULL once in gpu->ending_jobs
    bool waited_for_abort;             // has waited for abort_job, and must not wait again
    bool stuck;                        // copies on the group's streams never end
    idist__ipc_arena *own_arena;
    char *arena[IDIST__IPC_RANKS]; // each member's arena, as mapped in this process
} idist__gpu_group;

// A chunk that is being staged.
typedef struct idist__gpu_slot {
    idist__pinned *memory;
    cudaEvent_t out, in;
} idist__gpu_slot;

typedef enum idist__gpu_state {
    IDIST__GPU_WAIT, // waits for earlier work in the caller's stream
    IDIST__GPU_MOVE, // chunks are moving
    IDIST__GPU_END   // waits only for op->event, if at all
} idist__gpu_state;

// A call on device memory. When the task is used again, the members from `event` on are kept.
typedef struct idist__gpu_op {
    idist__gpu_path path;
    idist__gpu_state state;
    idist__call call;               // the program's call; the host's backend gets parts of it
    idist__fingerprint fingerprint; // what the ranks compare
    idist__user_op user;            // a copy, because the program may free the op meanwhile
    bool waits_for_device;          // true if counted in gpu->waiting_call_count
    bool waits_for_memory;          // true if the next chunk waits for pinned memory
    bool with_backend;              // the host's backend is performing a part of the call
    uint32_t ticket; // place in NCCL's order of the group's calls (idist__nccl_launch_call)
    bool launched;   // the call was handed to NCCL, even if NCCL refused it
    bool met;        // NCCL: all ranks have made the call
    // NCCL: the error if a message failed on the host, or if the ranks' counts differ.
    idist_status meeting_status;
    size_t size;        // bytes per element
    size_t chunk_count; // elements of each part that move at a time
    size_t nchunks;
    size_t enqueued_count;      // chunks (IPC: phases) enqueued on the device
    size_t started_count;       // chunks (IPC: phases) given to the host's backend
    cudaError_t error;          // the first error of a copy, reported at the next safe point
    idist_recv_info info;       // for a staged receive, if the program passes no info
    uint64_t message_nbytes;    // NCCL: size of a message, which the sender tells the receiver
    void *comm;                 // the communicator of this call; NULL if aborted
    void *send_copy;            // copy of the send buffer of an in-place all_to_all
    uint64_t *counts;           // v-forms: sent by us, sent to us, expected by us, each by rank
    const void *holding_thread; // the thread whose idist_group_begin holds the call back
    idist__task *next_held;     // next call in gpu->held_calls
    idist__task *next_queued;   // next call in the group's queue
    cudaEvent_t event;
    uint64_t *counts_memory;
    idist__gpu_slot slots[IDIST__GPU_SLOTS];
} idist__gpu_op;

static idist__gpu *idist__gpu_of(const idist__world *w) { return (idist__gpu *)w->device; }

static idist__gpu_group *idist__gpu_group_of(const idist_group *g) {
    return (idist__gpu_group *)g->device;
}

static idist__gpu_op *idist__gpu_op_of(const idist__task *t) { return (idist__gpu_op *)t->device; }

// ---- gpu/gpu_device.h ----------------------------------------------------------------------------

// gpu/gpu_device.h: CUDA errors and the current device

// Waits briefly: yields in turns 1 to 50, sleeps 50 us in turns 51 to 100, and then sleeps 1 ms per
// turn.
static void idist__gpu_device_nap(int *turns) {
    if (++*turns <= 50) idist__os_thread_yield();
    else idist__os_clock_pause_ns(*turns <= 100 ? 50000 : 1000000);
}

static idist_status idist__gpu_device_fail(const char *what, cudaError_t error) {
    cudaGetLastError(); // clears the error, which is reported here
    if (error == cudaErrorMemoryAllocation)
        return idist__fail(IDIST_ERR_NO_MEMORY, "%s: %s", what, cudaGetErrorString(error));

    return idist__fail(
        IDIST_ERR_DEVICE, "%s: %s (%s)%s", what, cudaGetErrorString(error), cudaGetErrorName(error),
        error == cudaErrorInvalidResourceHandle
            ? "; was the stream created on idist_device()? cudaSetDevice applies to one thread"
            : "");
}

static cudaError_t idist__gpu_device_owns_pointer(const void *p, bool *holds) {
    struct cudaPointerAttributes a;
    cudaError_t error = p ? cudaPointerGetAttributes(&a, p) : cudaErrorInvalidValue;

    *holds = error == cudaSuccess && a.type == cudaMemoryTypeDevice;
    if (error == cudaSuccess || !p) return cudaSuccess;
    cudaGetLastError();
    // Old runtimes return cudaErrorInvalidValue for plain host memory.
    return error == cudaErrorInvalidValue ? cudaSuccess : error;
}

// Fails the group with this rank as the cause. The reason is the text of idist_last_error.
static void idist__gpu_device_fail_group(idist_group *g, idist_status status) {
    char cause[300];
    snprintf(cause, sizeof cause, "rank %d: %.250s", g->w->cfg.rank, idist__me.text);
    idist__group_fail(g, status, cause);
}

// Finds cuDevicePrimaryCtxGetState. Searches the program first, which may be linked with the
// driver's library. Then searches libcuda.so.1, which the runtime has already loaded.
static void idist__gpu_device_find_context_state(idist__gpu *gpu) {
    static const char name[] = "cuDevicePrimaryCtxGetState";
    void *library = idist__os_library_open(NULL),
         *at = library ? idist__os_library_find(library, name) : NULL;

    if (!at) library = idist__os_library_loaded("libcuda.so.1");
    if (!at && library) at = idist__os_library_find(library, name);
    memcpy(&gpu->context_state, &at, sizeof at);
}

// Returns true if cudaSetDevice(device) would create a context on a device that has none, as CUDA
// does from version 12 on. A context takes hundreds of MB of memory on a GPU that may belong to
// another rank. (Restoring device 0 may do this in a thread that has never chosen a device, where
// cudaGetDevice returns 0.)
static bool idist__gpu_device_lacks_context(const idist__gpu *gpu, int device) {
    unsigned flags = 0;
    int active = 1;

    if (CUDART_VERSION < 12000 || !gpu->context_state) return false;
    return gpu->context_state(device, &flags, &active) == 0 && !active;
}

// Makes our device the current one. Returns the previous device, for idist__gpu_device_restore.
static int idist__gpu_device_set(const idist__gpu *gpu) {
    int device = gpu->device;

    cudaGetDevice(&device);
    if (device != gpu->device) cudaSetDevice(gpu->device);
    return device;
}

// Makes the previous device the current one again. A thread that had not chosen a device keeps our
// device, and so does our progress thread.
static void idist__gpu_device_restore(const idist__gpu *gpu, int device) {
    if (device == gpu->device || idist__gpu_device_lacks_context(gpu, device)) return;
    if (gpu->thread && idist__os_thread_equal(*gpu->thread, idist__os_thread_self())) return;
    cudaSetDevice(device);
}

// The state that idist__gpu_device_enter saves for idist__gpu_device_leave. Between these two calls
// our device is the current one, and a stream capture in another thread does not make CUDA calls
// fail.
typedef struct idist__gpu_guard {
    int device;
    enum cudaStreamCaptureMode mode;
} idist__gpu_guard;

static idist__gpu_guard idist__gpu_device_enter(const idist__gpu *gpu) {
    idist__gpu_guard guard;

    guard.device = idist__gpu_device_set(gpu);
    guard.mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&guard.mode);
    return guard;
}

static void idist__gpu_device_leave(const idist__gpu *gpu, idist__gpu_guard guard) {
    cudaThreadExchangeStreamCaptureMode(&guard.mode);
    idist__gpu_device_restore(gpu, guard.device);
}

// The device that the most recent world chose, plus 1, or 0 if no world has chosen a device.
// Atomic. The value outlives the world, as does the device's context.
static int idist__gpu_home_device;

// The state between idist__gpu_device_home_enter and idist__gpu_device_home_leave. The two
// functions act like idist__gpu_device_enter and idist__gpu_device_leave, but for memory that
// belongs to no world. They do nothing if no world has ever had a device.
typedef struct idist__gpu_home {
    idist__gpu gpu; // only the members that the guard needs
    idist__gpu_guard guard;
} idist__gpu_home;

static void idist__gpu_device_home_enter(idist__gpu_home *home) {
    memset(home, 0, sizeof *home);
    home->gpu.device = __atomic_load_n(&idist__gpu_home_device, __ATOMIC_ACQUIRE) - 1;
    if (home->gpu.device < 0) return;
    idist__gpu_device_find_context_state(&home->gpu);
    home->guard = idist__gpu_device_enter(&home->gpu);
}

static void idist__gpu_device_home_leave(const idist__gpu_home *home) {
    if (home->gpu.device >= 0) idist__gpu_device_leave(&home->gpu, home->guard);
}

// ---- gpu/pinned.h --------------------------------------------------------------------------------

// gpu/pinned.h: pinned host memory, which the device copies to and from

// A job that pins memory in a thread of its own. Pinning may wait for all work on the device, for
// example for an NCCL kernel that waits for a lost rank. The thread that would abort the kernel
// needs the world's lock, so no thread that holds the lock may wait for the pinning.
typedef struct idist__pinning {
    idist__pinned *memory;
    int device;
    cudaError_t error;
    int state; // atomic: IDIST__JOB_STATE_RUNS or IDIST__JOB_STATE_DONE; the waiter frees the job
    idist__os_thread thread;
} idist__pinning;

// Pins the memory of a job. Memory that cannot be pinned is used as well, but staging is slower
// (idist__stage_may_copy).
static void *idist__pinned_work(void *arg) {
    idist__pinning *job = (idist__pinning *)arg;
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;

    cudaSetDevice(job->device);
    cudaThreadExchangeStreamCaptureMode(&mode);
    job->error = cudaHostRegister(job->memory->data, job->memory->nbytes, cudaHostRegisterPortable);
    __atomic_store_n(&job->state, IDIST__JOB_STATE_DONE, __ATOMIC_RELEASE);
    return NULL;
}

// Allocates memory that the ranks on a host share, if the backend provides such memory. Otherwise
// allocates plain memory. Memory is reused, and not freed before the world ends, so sizes are
// rounded up to powers of two.
static idist__pinned *idist__pinned_make(const idist__world *w, size_t nbytes) {
    const idist_backend_api *under = idist__gpu_of(w)->host_backend;
    idist__pinned *p = (idist__pinned *)idist__mem_alloc(&w->cfg.mem, sizeof *p);

    if (!p) return NULL;
    for (p->nbytes = 65536; p->nbytes < nbytes && p->nbytes < SIZE_MAX / 2;) p->nbytes *= 2;
    p->data = under->alloc ? under->alloc((idist__world *)(uintptr_t)w, p->nbytes) : NULL;
    if (!p->data) p->data = idist__os_memory_aligned(4096, p->nbytes);
    if (p->data) return p;

    idist__mem_free(&w->cfg.mem, p);

    return NULL;
}

// If the pinning thread has finished, moves its memory to the list of free memory. Returns false if
// the thread is still pinning.
static bool idist__pinned_finish(const idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);
    idist__pinning *job = gpu->pinning_job;

    if (!job) return true;
    if (!__atomic_load_n(&job->state, __ATOMIC_ACQUIRE)) return false;
    idist__os_thread_join(job->thread);
    job->memory->is_pinned = job->error == cudaSuccess;
    if (!job->memory->is_pinned)
        idist__log_print(&w->log, IDIST_LOG_WARN,
                         "cudaHostRegister: %s: device memory is staged without pinned memory, "
                         "which is slower",
                         cudaGetErrorString(job->error));
    job->memory->next = gpu->free_pinned;
    gpu->free_pinned = job->memory;
    gpu->pinning_job = NULL;
    free(job);

    return true;
}

// Takes at least nbytes of memory, pinned if possible: the smallest free block that fits, or a new
// block. Returns NULL and sets *later if a thread is pinning memory; the caller tries again later.
// Returns NULL and clears *later if memory cannot be allocated.
static idist__pinned *idist__pinned_take(const idist__world *w, size_t nbytes, bool *later) {
    idist__gpu *gpu = idist__gpu_of(w);
    idist__pinned **at, **best = NULL, *p;
    idist__pinning *job;

    *later = !idist__pinned_finish(w);
    for (at = &gpu->free_pinned; *at; at = &(*at)->next)
        if ((*at)->nbytes >= nbytes && (!best || (*at)->nbytes < (*best)->nbytes)) best = at;

    if (best) {
        p = *best;
        *best = p->next;
        return p;
    }

    if (*later || (p = idist__pinned_make(w, nbytes)) == NULL) return NULL;

    job = gpu->stuck ? NULL : (idist__pinning *)calloc(1, sizeof *job);
    if (job) {
        job->memory = p;
        job->device = gpu->device;
    }

    if (!job || idist__os_thread_start(&job->thread, idist__pinned_work, job) != 0) {
        free(job);
        return p;
    }

    gpu->pinning_job = job;
    *later = true;

    return NULL;
}

static void idist__pinned_give(idist__gpu *gpu, idist__pinned **p) {
    if (!*p) return;
    (*p)->next = gpu->free_pinned;
    gpu->free_pinned = *p;
    *p = NULL;
}

// Moves memory to the list of abandoned memory, because a copy may still use the memory. Sets *p to
// NULL.
static void idist__pinned_abandon(idist__gpu *gpu, idist__pinned **p) {
    if (!*p) return;
    (*p)->next = gpu->abandoned_pinned;
    gpu->abandoned_pinned = *p;
    *p = NULL;
}

// When the world ends, waits for the thread that pins memory. If the thread does not return within
// IDIST__GPU_ABORT_MS, the device is busy: the thread is detached, and gpu->stuck is set.
static void idist__pinned_end(const idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);
    int64_t deadline = idist__os_clock_deadline(IDIST__GPU_ABORT_MS);
    int turns = 0;

    while (!idist__pinned_finish(w)) {
        idist__gpu_device_nap(&turns);
        if (idist__os_clock_now_ns() < deadline) continue;
        idist__log_print(&w->log, IDIST_LOG_ERROR,
                         "cudaHostRegister has not returned: the device is busy");
        idist__os_thread_detach(gpu->pinning_job->thread);
        gpu->stuck = true;
        return;
    }
}

// Frees a list of memory that is no longer pinned. If the device is stuck, the memory is still
// pinned and stays allocated.
static void idist__pinned_free_list(const idist__world *w, idist__pinned *list) {
    idist__pinned *p;

    while ((p = list) != NULL) {
        list = p->next;
        if (!idist__gpu_of(w)->stuck) idist_free(p->data);
        idist__mem_free(&w->cfg.mem, p);
    }
}

static void *idist__pinned_alloc(size_t nbytes, void *user) {
    void *p = NULL;
    idist__gpu_home home;

    (void)user;
    idist__gpu_device_home_enter(&home);

    if (cudaMallocHost(&p, nbytes ? nbytes : 1) != cudaSuccess) {
        cudaGetLastError(); // the caller reports the error
        p = NULL;
    }

    idist__gpu_device_home_leave(&home);

    return p;
}

static void idist__pinned_free(void *p, void *user) {
    idist__gpu_home home;
    (void)user;
    idist__gpu_device_home_enter(&home);
    cudaFreeHost(p);
    idist__gpu_device_home_leave(&home);
}

idist_allocator idist_pinned_allocator(void) {
    idist_allocator a;
    a.alloc_fn = idist__pinned_alloc;
    a.free_fn = idist__pinned_free;
    a.user = NULL;
    return a;
}

// ---- gpu/gpu_task.h ------------------------------------------------------------------------------

// gpu/gpu_task.h: calls on device memory, and the parts that the host's backend gets

static void idist__gpu_task_set_waiting(idist__task *t, bool waits) {
    idist__gpu *gpu = idist__gpu_of(t->group->w);
    idist__gpu_op *op = idist__gpu_op_of(t);

    if (op->waits_for_device == waits) return;
    op->waits_for_device = waits;
    gpu->waiting_call_count += waits ? 1 : -1;
    if (waits) gpu->sleep_ns = IDIST__GPU_SLEEP_NS;
    if (waits) gpu->spin_until_ns = idist__os_clock_now_ns() + IDIST__GPU_SPIN_NS;
    if (waits && t->group->w->wait.driver != IDIST__DRIVER_NONE)
        gpu->host_backend->wake(t->group->w); // a driver that sleeps must poll the device now
}

// Returns true if the event that a call waits for has completed. After a CUDA error, fails the
// group and returns false; the task must not be used any more.
static bool idist__gpu_task_event_done(idist__task *t, cudaEvent_t event) {
    idist__gpu_op *op = idist__gpu_op_of(t);

    if (op->error == cudaSuccess) op->error = cudaEventQuery(event);

    if (op->error == cudaSuccess) {
        idist__gpu_of(t->group->w)->sleep_ns = IDIST__GPU_SLEEP_NS;
        return true;
    }

    if (op->error != cudaErrorNotReady) {
        idist__gpu_device_fail_group(t->group, idist__gpu_device_fail("the device", op->error));
        return false;
    }

    op->error = cudaSuccess;
    cudaGetLastError();

    return false;
}

// Gives a part of a call to the host's backend. The first part of a collective call carries the
// fingerprint that the ranks compare. The part may be complete on return.
static void idist__gpu_task_start_part(idist__task *t, const idist__call *part) {
    idist__gpu *gpu = idist__gpu_of(t->group->w);
    idist__gpu_op *op = idist__gpu_op_of(t);

    t->call = *part;
    t->call.label = op->call.label;
    t->state = IDIST__TASK_ON_HOST;
    t->late.announced = false;
    t->group->w->wait.timers_due_ns = 0; // timers check the task again
    op->with_backend = true;
    idist__gpu_task_set_waiting(t, false);

    if (!idist__kind_is_p2p(part->kind)) {
        t->seq = ++t->group->seq;

        if (!t->whole.kind) {
            t->whole = op->fingerprint;
            t->whole.seq = t->seq;
        }
    }

    memset(t->impl, 0, gpu->host_backend->task_nbytes); // to the backend this is a new task
    gpu->host_backend->start(t);
}

// Starts a part that moves no data, in which the ranks meet and compare fingerprints.
static void idist__gpu_task_start_barrier(idist__task *t) {
    idist__call part;
    idist__call_init(&part, IDIST__BARRIER, NULL, NULL, 0, IDIST_U8);
    idist__gpu_task_start_part(t, &part);
}

// The number of parts of `count` elements in each buffer of a call.
typedef struct idist__gpu_shape {
    size_t send, recv;   // on this rank; 0 if there is no such buffer
    size_t most;         // largest number on any rank
    size_t contribution; // largest number that other ranks read from a rank
} idist__gpu_shape;

static idist__gpu_shape idist__gpu_task_shape_of(const idist_group *g, const idist__call *call) {
    size_t n = (size_t)g->size;
    bool root = call->root == g->rank;
    idist__gpu_shape shape;

    shape.send = shape.recv = shape.most = shape.contribution = 1;

    switch (call->kind) {
    case IDIST__REDUCE: shape.recv = root; break;
    case IDIST__BROADCAST: shape.send = 0; break;
    case IDIST__ALL_GATHER: shape.recv = shape.most = n; break;
    case IDIST__GATHER:
        shape.recv = root ? n : 0;
        shape.most = n;
        break;
    case IDIST__SCATTER:
        shape.send = root ? n : 0;
        shape.most = shape.contribution = n;
        break;
    case IDIST__REDUCE_SCATTER: shape.send = shape.most = shape.contribution = n; break;
    case IDIST__ALL_TO_ALL: shape.send = shape.recv = shape.most = shape.contribution = n; break;
    case IDIST__BARRIER: shape.send = shape.recv = 0; break;
    default: break;
    }

    return shape;
}

// Copies k elements of each of `parts` parts. Parts are to_count elements apart in `to`, and
// from_count elements apart in `from`.
static cudaError_t idist__gpu_task_copy(void *to, size_t to_count, const void *from,
                                        size_t from_count, size_t k, size_t parts, size_t size,
                                        cudaStream_t stream) {
    cudaError_t error = cudaSuccess;
    size_t i;

    for (i = 0; i < parts && k && to != from && error == cudaSuccess; i++)
        error = cudaMemcpyAsync((char *)to + i * to_count * size,
                                (const char *)from + i * from_count * size, k * size,
                                cudaMemcpyDefault, stream);
    return error;
}

static void idist__gpu_task_dequeue(idist__task *t) {
    idist__gpu_group *gg = idist__gpu_group_of(t->group);
    idist__task **at;

    for (at = &gg->queue; *at; at = &idist__gpu_op_of(*at)->next_queued) {
        if (*at != t) continue;
        if ((*at = idist__gpu_op_of(t)->next_queued) == NULL) gg->queue_end = at;
        idist__gpu_of(t->group->w)->queue_changed = true;
        return;
    }
}

static void idist__gpu_task_release(idist__task *t) {
    idist__gpu_op *op = idist__gpu_op_of(t);
    int i;

    idist__gpu_task_set_waiting(t, false);
    idist__gpu_task_dequeue(t);
    // The copies are done, or the device runs them before the copies of the next call.
    for (i = 0; i < IDIST__GPU_SLOTS; i++)
        idist__pinned_give(idist__gpu_of(t->group->w), &op->slots[i].memory);
}

static void idist__gpu_task_complete(idist__task *t) {
    idist__gpu_op_of(t)->state = IDIST__GPU_END;
    idist__task_complete(t, IDIST_OK, "");
}

static bool idist__gpu_task_op_is_premul(const idist_group *g, const idist__call *call) {
    return idist__reduce_op_is_user(call->op) && !idist__world_user_op(g, call)->fn;
}

// ---- gpu/gpu_agree.h -----------------------------------------------------------------------------

// gpu/gpu_agree.h: how the members of a group exchange information

// Waits until `ready` returns true or the deadline passes, while the backend watches the other
// ranks. Returns false if the deadline has passed. Called with the lock held. Releases the lock
// between checks.
static bool idist__gpu_agree_wait_until(idist__world *w, bool (*ready)(const void *arg),
                                        const void *arg, int64_t deadline_ns) {
    while (!ready(arg)) {
        if (idist__os_clock_now_ns() > deadline_ns) return false;
        idist__os_mutex_unlock(&w->lock);
        idist__os_clock_pause_ms(1);
        idist__world_lock(w);
        if (w->wait.driver == IDIST__DRIVER_NONE && !w->progress.stops) w->backend->progress(w);
    }

    return true;
}

// The result that each member sends to the other members.
typedef struct idist__gpu_outcome {
    int32_t failed;
    char reason[200];
} idist__gpu_outcome;

// Sets *all to true if all members succeeded. Otherwise replaces `reason` with the rank and the
// reason of the first member that failed.
static idist_status idist__gpu_agree_all_succeeded(idist_group *g, bool failed, char *reason,
                                                   size_t capacity, bool *all) {
    idist__gpu_outcome mine, *theirs;
    idist_status status;
    int i;

    *all = false;
    theirs = (idist__gpu_outcome *)idist__mem_alloc(&g->w->cfg.mem, sizeof mine * (size_t)g->size);
    if (!theirs) return IDIST_ERR_NO_MEMORY;

    memset(&mine, 0, sizeof mine);
    mine.failed = failed;
    idist__text_copy(mine.reason, sizeof mine.reason, reason);
    status = idist__survey(g, &mine, theirs, sizeof mine);
    for (i = 0; status == IDIST_OK && i < g->size && !theirs[i].failed; i++) continue;
    *all = status == IDIST_OK && i == g->size;
    if (status == IDIST_OK && !*all)
        snprintf(reason, capacity, "rank %d: %.200s", g->ranks[i], theirs[i].reason);
    idist__mem_free(&g->w->cfg.mem, theirs);

    return status;
}

// ---- gpu/gpu_leave.h -----------------------------------------------------------------------------

// gpu/gpu_leave.h: how closing a world waits for the threads that use the world
//
// The thread that closes a world calls idist__gpu_leave_wait_unused. A thread that has released the
// lock calls idist__gpu_leave_goes_on when it holds the lock again. If the world is being closed,
// the thread returns from its call.

// Returns `status`, or IDIST_ERR_STATE instead of IDIST_OK if another thread is closing the world
// and waits for this thread to leave. Called when this thread has reacquired the lock.
static idist_status idist__gpu_leave_goes_on(const idist_group *g, idist_status status) {
    if (status != IDIST_OK || !g->w->progress.stops) return status;
    return idist__fail(IDIST_ERR_STATE, "another thread is closing the world");
}

static bool idist__gpu_leave_is_unused(const void *arg) {
    return !idist__gpu_of((const idist__world *)arg)->user_count;
}

// Sets the deadline by which other threads must have left the world, unless the deadline is already
// set.
static void idist__gpu_leave_set_deadline(idist__gpu *gpu) {
    if (!gpu->leave_deadline_ns)
        gpu->leave_deadline_ns = idist__os_clock_deadline(IDIST__GPU_ABORT_MS);
}

// Locks the world in the thread that closes it. Returns false if another thread still holds the
// lock at the deadline; the world is then abandoned.
static bool idist__gpu_leave_lock(idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);
    int turns = 0;

    idist__gpu_leave_set_deadline(gpu);

    while (!w->life.abandoned && !idist__os_mutex_try_lock(&w->lock)) {
        w->life.abandoned = idist__os_clock_now_ns() > gpu->leave_deadline_ns;
        idist__gpu_device_nap(&turns);
    }

    return !w->life.abandoned;
}

// Waits for the threads that use the world without holding the lock. Called before closing the
// world frees the memory that these threads use. If a thread has not left by the deadline, the
// world is abandoned (w->life.abandoned), and nothing that such a thread uses is freed. Called once
// per world, without the lock.
static void idist__gpu_leave_wait_unused(idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);

    if (idist__gpu_leave_lock(w)) {
        w->life.abandoned =
            !idist__gpu_agree_wait_until(w, idist__gpu_leave_is_unused, w, gpu->leave_deadline_ns);
        idist__os_mutex_unlock(&w->lock);
    }

    gpu->stuck = gpu->stuck || w->life.abandoned;
}

// ---- gpu/stage.h ---------------------------------------------------------------------------------

// gpu/stage.h: calls that go through pinned memory, one chunk at a time
//
// Any call on device memory that no other path supports is staged. The host's backend gets each
// chunk as a call of its own, with pinned memory for its buffers. Meanwhile the next chunk leaves
// the device, and the previous chunk returns to the device:
//
//     out   0  1  2  3        If a buffer has n parts, a chunk is a piece of each part. A chunk of
//     host     0  1  2  3     any collective of k elements per rank is therefore a collective of
//     in          0  1  2  3  fewer elements per rank.
//
// Calls whose parts differ in size (v-forms, send and receive) consist of one chunk.
//
//     idist__stage_step  advances the head of the group's queue: copies chunks out while slots are
//                        free, and gives the next copied chunk to the host's backend
//     idist__stage_part_done  copies a chunk in when the host's backend has finished it

static bool idist__stage_is_unchunked(const idist__call *call) {
    return idist__kind_is_v(call->kind) || idist__kind_is_p2p(call->kind);
}

static void idist__stage_plan_chunks(idist__task *t, size_t nbytes, size_t parts) {
    idist__gpu_op *op = idist__gpu_op_of(t);
    const idist__call *call = &op->call;

    op->enqueued_count = op->started_count = 0;
    op->nchunks = 1;
    op->chunk_count = call->count;
    if (idist__stage_is_unchunked(call) || call->kind == IDIST__BARRIER) return;
    op->chunk_count = nbytes / parts / op->size;
    if (op->chunk_count > 1024) op->chunk_count &= ~(size_t)1023;
    if (!op->chunk_count) op->chunk_count = 1;
    if (op->chunk_count > call->count) op->chunk_count = call->count;
    if (op->chunk_count) op->nchunks = (call->count + op->chunk_count - 1) / op->chunk_count;
}

// Fills in the host's call for chunk `nth`. The call's buffers are in pinned memory. Except in an
// all_to_all, one buffer is inside the other, as in an in-place call. Returns false if there is no
// pinned memory yet (op->waits_for_memory), or no memory at all.
static bool idist__stage_slot(idist__task *t, size_t nth, idist__call *part) {
    idist_group *g = t->group;
    idist__gpu_op *op = idist__gpu_op_of(t);
    idist__gpu_slot *slot = &op->slots[nth % IDIST__GPU_SLOTS];
    size_t at = nth * op->chunk_count, nsend, nrecv, recv_at = 0;
    idist__extent e;

    *part = op->call;
    if (!idist__stage_is_unchunked(part))
        part->count = part->count - at < op->chunk_count ? part->count - at : op->chunk_count;
    if (part->kind == IDIST__RECV && !part->info) part->info = &op->info;
    if (op->user.used) part->u.user = &op->user;
    if (idist__extent_of(g, part, &e) != IDIST_OK) return false; // the call was checked before
    nsend = e.send * op->size;
    nrecv = e.recv * op->size;
    if (part->kind == IDIST__ALL_TO_ALL || part->kind == IDIST__ALL_TO_ALLV)
        recv_at = (nsend + 63) & ~(size_t)63;
    else if (e.send) recv_at = e.send_at * op->size;
    if (!slot->memory && (slot->memory = idist__pinned_take(g->w, nsend + nrecv + 64,
                                                            &op->waits_for_memory)) == NULL)
        return false;
    op->waits_for_memory = false;
    part->recv = (char *)slot->memory->data + recv_at;
    part->send = (char *)slot->memory->data + (e.recv ? e.recv_at * op->size : 0);
    if (!e.send) part->send = NULL;
    if (!e.recv) part->recv = NULL;

    return true;
}

// Returns true if a copy between the device and this memory may be enqueued. If the memory is not
// pinned, the copy blocks this thread until the stream reaches it, so the group's streams must be
// idle.
static bool idist__stage_may_copy(const idist__task *t, const idist__pinned *memory) {
    const idist__gpu_group *gg = idist__gpu_group_of(t->group);
    int i;

    for (i = IDIST__STREAM_OUT; i <= IDIST__STREAM_IN && !memory->is_pinned; i++) {
        if (cudaStreamQuery(gg->stream[i]) != cudaErrorNotReady) continue;
        cudaGetLastError();
        return false;
    }

    return true;
}

// Copies the next chunk from the device. Returns false if there is no pinned memory for the chunk
// (yet), or if the copy would block.
static bool idist__stage_out(idist__task *t) {
    idist_group *g = t->group;
    idist__gpu_group *gg = idist__gpu_group_of(g);
    idist__gpu_op *op = idist__gpu_op_of(t);
    const idist__call *call = &op->call;
    idist__gpu_slot *slot = &op->slots[op->enqueued_count % IDIST__GPU_SLOTS];
    size_t at = op->enqueued_count * op->chunk_count * op->size;
    cudaError_t error = cudaSuccess;
    idist__call part;
    idist__extent e;

    if (!idist__stage_slot(t, op->enqueued_count, &part)) {
        if (op->waits_for_memory) return false;
        idist__group_fail_self(g, IDIST_ERR_NO_MEMORY, "has no memory to stage a device buffer in");
        return false;
    }

    if (!idist__stage_may_copy(t, slot->memory)) return false;
    if (op->enqueued_count >= IDIST__GPU_SLOTS)
        error = cudaStreamWaitEvent(gg->stream[IDIST__STREAM_OUT], slot->in, 0);
    if (error == cudaSuccess && idist__stage_is_unchunked(call) && part.send &&
        idist__extent_of(g, &part, &e) == IDIST_OK)
        error = idist__gpu_task_copy((void *)(uintptr_t)part.send, 0, call->send, 0, e.send, 1,
                                     op->size, gg->stream[IDIST__STREAM_OUT]);
    else if (error == cudaSuccess && call->kind == IDIST__BROADCAST && call->root == g->rank)
        error = idist__gpu_task_copy(part.recv, 0, (char *)call->recv + at, 0, part.count, 1,
                                     op->size, gg->stream[IDIST__STREAM_OUT]);
    else if (error == cudaSuccess && !idist__stage_is_unchunked(call) && part.send)
        error = idist__gpu_task_copy((void *)(uintptr_t)part.send, part.count,
                                     (const char *)call->send + at, call->count, part.count,
                                     idist__gpu_task_shape_of(g, call).send, op->size,
                                     gg->stream[IDIST__STREAM_OUT]);
    if (op->error == cudaSuccess) op->error = error; // the first error is reported
    if (op->error == cudaSuccess)
        op->error = cudaEventRecord(slot->out, gg->stream[IDIST__STREAM_OUT]);
    op->enqueued_count++;

    return true;
}

// Copies to the device the data that a call of one chunk has received: the parts of a v-form, or a
// message.
static cudaError_t idist__stage_in_whole(idist__task *t, const idist__call *part,
                                         cudaStream_t stream) {
    const idist_group *g = t->group;
    idist__gpu_op *op = idist__gpu_op_of(t);
    const idist__call *call = &op->call;
    cudaError_t error = cudaSuccess;
    size_t count;
    int i;

    if (call->kind == IDIST__RECV || call->kind == IDIST__SCATTERV ||
        call->kind == IDIST__REDUCE_SCATTERV) {
        count = call->kind == IDIST__RECV ? part->info->count : call->count;
        return idist__gpu_task_copy(call->recv, 0, part->recv, 0, count, 1, op->size, stream);
    }

    for (i = 0; i < g->size && error == cudaSuccess; i++) {
        char *to = idist__extent_part(call, (char *)call->recv, i, g->rank, false, &count);
        error = idist__gpu_task_copy(to, 0, (char *)part->recv + (to - (char *)call->recv), 0,
                                     count, 1, op->size, stream);
    }

    return error;
}

// Copies to the device the chunk that the host's backend has just finished.
static cudaError_t idist__stage_in(idist__task *t) {
    idist_group *g = t->group;
    idist__gpu_group *gg = idist__gpu_group_of(g);
    idist__gpu_op *op = idist__gpu_op_of(t);
    const idist__call *call = &op->call;
    size_t nth = op->started_count - 1, at = nth * op->chunk_count * op->size;
    idist__gpu_slot *slot = &op->slots[nth % IDIST__GPU_SLOTS];
    bool keeps = (call->kind == IDIST__BROADCAST && call->root == g->rank) ||
                 (call->kind == IDIST__EXSCAN && g->rank == 0);
    cudaError_t error = cudaSuccess;
    idist__call part;

    if (!idist__stage_slot(t, nth, &part)) return cudaErrorMemoryAllocation;
    if (idist__stage_is_unchunked(call) && part.recv)
        error = idist__stage_in_whole(t, &part, gg->stream[IDIST__STREAM_IN]);
    else if (part.recv && !keeps)
        error = idist__gpu_task_copy((char *)call->recv + at, call->count, part.recv, part.count,
                                     part.count, idist__gpu_task_shape_of(g, call).recv, op->size,
                                     gg->stream[IDIST__STREAM_IN]);
    if (error == cudaSuccess) error = cudaEventRecord(slot->in, gg->stream[IDIST__STREAM_IN]);

    return error;
}

// Advances the call at the head of its group's queue by one step. Returns false if the call waits
// or has failed.
static bool idist__stage_step(idist__task *t) {
    idist__gpu_op *op = idist__gpu_op_of(t);
    const idist__gpu_slot *slot = &op->slots[op->started_count % IDIST__GPU_SLOTS];
    idist__call part;

    if (op->with_backend) return false;
    idist__gpu_task_set_waiting(t, true);

    if (op->state == IDIST__GPU_WAIT) {
        if (!idist__gpu_task_event_done(t, op->event)) return false;
        op->state = IDIST__GPU_MOVE;
    }

    while (op->enqueued_count < op->nchunks &&
           op->enqueued_count < op->started_count + IDIST__GPU_SLOTS && op->error == cudaSuccess)
        if (!idist__stage_out(t)) {
            if (t->group->status != IDIST_OK || op->enqueued_count == op->started_count)
                return false;
            break; // the chunks that are already out proceed
        }

    if (!idist__gpu_task_event_done(t, slot->out)) return false;
    // When the part is done, idist__stage_in copies to the device and must not block.
    if (!idist__stage_may_copy(t, slot->memory)) return false;
    idist__stage_slot(t, op->started_count++, &part);
    if (op->started_count == op->nchunks)
        idist__gpu_task_dequeue(t); // the next call in the queue may use the backend now
    idist__gpu_task_start_part(t, &part);

    return true;
}

// Handles a chunk that the host's backend has finished. Returns true if the call is complete. After
// the last chunk, the call completes when op->event does. The caller's stream therefore need not
// wait for the event. With idist_wait_stream, a stream waits for the event instead (t->followed).
static bool idist__stage_part_done(idist__task *t) {
    idist__gpu_op *op = idist__gpu_op_of(t);
    cudaError_t error = idist__stage_in(t);

    if (op->error == cudaSuccess) op->error = error;
    if (op->started_count < op->nchunks) return false;
    op->state = IDIST__GPU_END;
    if (op->error == cudaSuccess && !idist__gpu_task_shape_of(t->group, &op->call).recv)
        return true;
    if (op->error == cudaSuccess)
        op->error =
            cudaEventRecord(op->event, idist__gpu_group_of(t->group)->stream[IDIST__STREAM_IN]);
    t->followed = op->error == cudaSuccess;

    return false;
}

// ---- gpu/ipc/ptx.h -------------------------------------------------------------------------------

// gpu/ipc/ptx.h: kernels that reduce and pack data that one GPU can read
//
// idist_reduce_f32, _f64, _f16 and _bf16 compute out[i] = in[0][i] (op) ... (op) in[n - 1][i]. The
// results have the same bits as idist__reduce_many's results. idist_pack_halves converts between
// floats and 16-bit floats, with the same bits as train/compress/compress.h. No kernel waits for
// anything.
//
// The strings below, joined, are the PTX that the driver compiles for its GPU. The strings are
// generated from tests/gpu/reduce.cu and tests/gpu/pack.cu.

#define IDIST__PTX_OPERANDS 16
#define IDIST__PTX_SCALED 16   // an op: the SUM of all operands, each times `factor`
#define IDIST__PTX_THREADS 512 // per block, at most
#define IDIST__PTX_NBYTES 16   // bytes of each operand that a thread handles per turn

// The only parameter of a reduction kernel. All pointers are aligned to an element. The kernel is
// faster if all pointers are aligned to 16 bytes. `out` and `also` may equal any of in[]; otherwise
// no buffers overlap.
typedef struct idist__ptx_args {
    const void *in[IDIST__PTX_OPERANDS];
    void *out;
    void *also; // receives the same data as out, or NULL
    unsigned long long count;
    double factor;
    int n;  // number of operands in in[], 1 or more
    int op; // an idist_op, or IDIST__PTX_SCALED
} idist__ptx_args;

// Indices of idist__gpu.kernels. Kernels 0 to 3 reduce F16, BF16, F32 and F64 (dtype - IDIST_F16).
enum { IDIST__PACK_HALVES = 4 };
// Values of idist__pack_args.op, for kernel IDIST__PACK_HALVES.
enum { IDIST__PACK_F16, IDIST__PACK_BF16, IDIST__UNPACK_F16, IDIST__UNPACK_BF16 };

typedef struct idist__pack_args {
    const void *in;
    void *out;
    unsigned long long count; // floats
    int op;
} idist__pack_args;

// Made by tests/gpu/make_ptx.sh with nvcc 13.0.88.
// clang-format off
static const char *const idist__ptx[] IDIST__UNUSED = {
    ".version 6.4\n.target sm_60\n.address_size 64\n.visible .entry idist_reduce_f32(.param ",
    ".align 8 .b8 a[168]).maxntid 512,1,1{.reg .pred p<45>;.reg .f32 f<60>;.reg .b32 r<105>;",
    ".reg .f64 g<10>;.reg .b64 d<47>;mov.b64 d25,a;mov.u32 r46,%ctaid.x;mov.u32 r47,%ntid.x;",
    "mul.wide.u32 d26,r46,r47;mov.u32 r48,%tid.x;cvt.u64.u32 d27,r48;add.s64 d45,d26,d27;",
    "add.s64 d3,d25,128;ld.param.u64 d28,[a+136];ld.param.u64 d29,[a+128];or.b64 d43,d28,d29;",
    "mov.u32 r86,0;ld.param.u32 r1,[a+160];L1:.pragma \"nounroll\";mul.wide.s32 d30,r86,8;",
    "add.s64 d31,d25,d30;ld.param.u64 d32,[d31];or.b64 d43,d32,d43;add.s32 r86,r86,1;",
    "setp.lt.s32 p2,r86,r1;@p2 bra L1;and.b64 d7,d43,15;ld.param.u32 r4,[d3+36];ld.param.u64 d8,",
    "[d3+16];shl.b64 d44,d45,2;setp.ge.u64 p3,d44,d8;@p3 bra L50;ld.param.f64 g1,[d3+24];",
    "ld.param.u64 d10,[d3];ld.param.u64 d11,[d3+8];ld.param.u32 r5,[d3+32];cvt.rn.f32.s32 f1,r5;",
    "or.b32 r55,r4,1;cvta.to.global.u64 d40,d10;L4:.pragma \"nounroll\";sub.s64 d14,d8,d44;",
    "setp.gt.u64 p4,d14,3;setp.eq.s64 p5,d7,0;and.pred p1,p5,p4;mov.u32 r87,1;setp.eq.s32 p6,",
    "r55,3;selp.f32 f43,0f7F800000,0f80000000,p6;setp.eq.s32 p7,r4,1;selp.f32 f52,0f3F800000,",
    "f43,p7;mov.u32 r100,0;mov.u64 d46,d25;mov.f32 f53,f52;mov.f32 f54,f52;mov.f32 f55,f52;",
    "mov.u32 r101,r100;mov.u32 r102,r100;mov.u32 r103,r100;mov.u32 r104,r100;L5:.pragma ",
    "\"nounroll\";mov.u32 r6,r87;setp.eq.s32 p8,r104,0;@!p8 bra L6;ld.param.u64 d33,[d46];",
    "cvta.to.global.u64 d34,d33;shl.b64 d35,d45,4;add.s64 d18,d34,d35;@!p1 bra L8;",
    "ld.global.v4.u32{r99,r98,r97,r96},[d18];mov.u32 r104,0;setp.ge.s32 p13,r6,r5;@p13 bra L18;",
    "ld.param.u64 d36,[d46+8];cvta.to.global.u64 d37,d36;add.s64 d39,d37,d35;ld.global.v4.u32{",
    "r100,r101,r102,r103},[d39];mov.u32 r104,1;bra L18;L6:mov.u32 r104,0;mov.u32 r96,r103;",
    "mov.u32 r97,r102;mov.u32 r98,r101;mov.u32 r99,r100;bra L18;L8:setp.eq.s64 p9,d14,0;mov.u32 ",
    "r98,0;mov.u32 r99,r98;@!p9 ld.global.u32 r99,[d18];setp.lt.u64 p10,d14,2;@!p10 ",
    "ld.global.u32 r98,[d18+4];setp.lt.u64 p11,d14,3;mov.u32 r104,0;mov.u32 r97,r104;@!p11 ",
    "ld.global.u32 r97,[d18+8];setp.lt.u64 p12,d14,4;mov.u32 r96,r104;@!p12 ld.global.u32 r96,",
    "[d18+12];L18:setp.eq.s32 p14,r4,3;selp.b32 r73,-2147483648,0,p14;xor.b32 r74,r99,r73;",
    "xor.b32 r75,r98,r73;xor.b32 r76,r97,r73;xor.b32 r77,r96,r73;mov.b32 f18,r74;mov.b32 f17,",
    "r75;mov.b32 f16,r76;mov.b32 f15,r77;setp.ne.s32 p15,r4,16;@p15 bra L20;cvt.f64.f32 g2,f18;",
    "mul.rn.f64 g3,g2,g1;cvt.rn.f32.f64 f18,g3;cvt.f64.f32 g4,f17;mul.rn.f64 g5,g4,g1;",
    "cvt.rn.f32.f64 f17,g5;cvt.f64.f32 g6,f16;mul.rn.f64 g7,g6,g1;cvt.rn.f32.f64 f16,g7;",
    "cvt.f64.f32 g8,f15;mul.rn.f64 g9,g8,g1;cvt.rn.f32.f64 f15,g9;L20:@!p7 bra L21;mul.rn.f32 ",
    "f55,f55,f18;mul.rn.f32 f54,f54,f17;mul.rn.f32 f53,f53,f16;mul.rn.f32 f52,f52,f15;bra L25;",
    "L21:@!p6 bra L22;setp.gt.f32 p18,f18,f55;setp.nan.f32 p19,f55,f55;or.pred p20,p18,p19;",
    "selp.f32 f55,f55,f18,p20;setp.nan.f32 p21,f54,f54;setp.lt.f32 p22,f54,f17;or.pred p23,p22,",
    "p21;selp.f32 f54,f54,f17,p23;setp.nan.f32 p24,f53,f53;setp.lt.f32 p25,f53,f16;or.pred p26,",
    "p25,p24;selp.f32 f53,f53,f16,p26;setp.nan.f32 p27,f52,f52;setp.lt.f32 p28,f52,f15;or.pred ",
    "p29,p28,p27;selp.f32 f52,f52,f15,p29;bra L25;L22:add.rn.f32 f55,f55,f18;add.rn.f32 f54,f54,",
    "f17;add.rn.f32 f53,f53,f16;add.rn.f32 f52,f52,f15;L25:add.s32 r87,r6,1;add.s64 d46,d46,8;",
    "shl.b64 d20,d45,4;setp.lt.s32 p30,r6,r5;@p30 bra L5;setp.ne.s32 p31,r4,4;@p31 bra L28;",
    "div.rn.f32 f55,f55,f1;div.rn.f32 f54,f54,f1;div.rn.f32 f53,f53,f1;div.rn.f32 f52,f52,f1;",
    "L28:mov.b32 r80,f55;xor.b32 r41,r73,r80;mov.b32 r81,f54;xor.b32 r42,r73,r81;mov.b32 r82,",
    "f53;xor.b32 r43,r73,r82;mov.b32 r83,f52;xor.b32 r44,r73,r83;add.s64 d21,d40,d20;@!p1 bra ",
    "L29;st.global.v4.u32[d21],{r41,r42,r43,r44};bra L38;L29:setp.eq.s64 p33,d14,0;@!p33 ",
    "st.global.u32[d21],r41;setp.lt.u64 p34,d14,2;@!p34 st.global.u32[d21+4],r42;setp.lt.u64 ",
    "p35,d14,3;@!p35 st.global.u32[d21+8],r43;setp.lt.u64 p36,d14,4;@!p36 st.global.u32[d21+12],",
    "r44;L38:setp.ne.s64 p37,d11,0;and.pred p38,p1,p37;cvta.to.global.u64 d41,d11;add.s64 d22,",
    "d41,d20;@!p38 bra L39;st.global.v4.u32[d22],{r41,r42,r43,r44};bra L49;L39:setp.eq.s64 p39,",
    "d11,0;@p39 bra L49;setp.eq.s64 p40,d14,0;@!p40 st.global.u32[d22],r41;setp.lt.u64 p41,d14,",
    "2;@!p41 st.global.u32[d22+4],r42;setp.lt.u64 p42,d14,3;@!p42 st.global.u32[d22+8],r43;",
    "setp.lt.u64 p43,d14,4;@!p43 st.global.u32[d22+12],r44;L49:mov.u32 r84,%nctaid.x;",
    "mul.wide.u32 d42,r84,r47;add.s64 d45,d45,d42;shl.b64 d44,d45,2;setp.lt.u64 p44,d44,d8;@p44 ",
    "bra L4;L50:ret;}.visible .entry idist_reduce_f64(.param .align 8 .b8 a[168]).maxntid 512,1,",
    "1{.reg .pred p<37>;.reg .b32 r<106>;.reg .f64 g<33>;.reg .b64 d<65>;mov.b64 d26,a;mov.u32 ",
    "r51,%ctaid.x;mov.u32 r52,%ntid.x;mul.wide.u32 d27,r51,r52;mov.u32 r53,%tid.x;cvt.u64.u32 ",
    "d28,r53;add.s64 d63,d27,d28;add.s64 d3,d26,128;ld.param.u64 d29,[a+136];ld.param.u64 d30,",
    "[a+128];or.b64 d61,d29,d30;mov.u32 r86,0;ld.param.u32 r1,[a+160];L1:.pragma \"nounroll\";",
    "mul.wide.s32 d31,r86,8;add.s64 d32,d26,d31;ld.param.u64 d33,[d32];or.b64 d61,d33,d61;",
    "add.s32 r86,r86,1;setp.lt.s32 p2,r86,r1;@p2 bra L1;ld.param.u32 r4,[d3+36];ld.param.u64 d7,",
    "[d3+16];shl.b64 d62,d63,1;setp.ge.u64 p3,d62,d7;@p3 bra L47;ld.param.f64 g1,[d3+24];",
    "ld.param.u64 d9,[d3];ld.param.u64 d10,[d3+8];ld.param.u32 r5,[d3+32];cvt.rn.f64.s32 g2,r5;",
    "and.b64 d11,d61,15;or.b32 r60,r4,1;cvta.to.global.u64 d58,d9;L4:.pragma \"nounroll\";",
    "sub.s64 d34,d7,d62;shl.b64 d14,d34,1;mov.u32 r87,1;setp.gt.u64 p4,d14,3;setp.eq.s64 p5,d11,",
    "0;and.pred p1,p5,p4;setp.eq.s32 p6,r60,3;selp.f64 g24,0d7FF0000000000000,",
    "0d8000000000000000,p6;setp.eq.s32 p7,r4,1;selp.f64 g29,0d3FF0000000000000,g24,p7;mov.u32 ",
    "r101,0;mov.u64 d64,d26;mov.f64 g30,g29;mov.u32 r102,r101;mov.u32 r103,r101;mov.u32 r104,",
    "r101;mov.u32 r105,r101;L5:.pragma \"nounroll\";mov.u32 r6,r87;setp.eq.s32 p8,r105,0;@!p8 ",
    "bra L6;ld.param.u64 d18,[d64];@!p1 bra L8;cvta.to.global.u64 d47,d18;shl.b64 d48,d63,4;",
    "add.s64 d49,d47,d48;ld.global.v4.u32{r99,r100,r97,r98},[d49];setp.ge.s32 p13,r6,r5;mov.u32 ",
    "r105,0;@p13 bra L19;ld.param.u64 d50,[d64+8];cvta.to.global.u64 d51,d50;add.s64 d53,d51,",
    "d48;ld.global.v4.u32{r101,r102,r103,r104},[d53];mov.u32 r105,1;bra L19;L6:mov.u32 r105,0;",
    "mov.u32 r97,r103;mov.u32 r98,r104;mov.u32 r99,r101;mov.u32 r100,r102;bra L19;L8:",
    "setp.eq.s64 p9,d14,0;mov.u32 r100,0;mov.u32 r99,r100;@p9 bra L10;cvta.to.global.u64 d35,",
    "d18;shl.b64 d36,d63,4;add.s64 d37,d35,d36;ld.global.u32 r99,[d37];L10:@p9 bra L12;",
    "cvta.to.global.u64 d38,d18;shl.b64 d39,d63,4;add.s64 d40,d38,d39;ld.global.u32 r100,",
    "[d40+4];L12:setp.lt.u64 p11,d14,3;mov.u32 r98,0;mov.u32 r97,r98;@p11 bra L14;",
    "cvta.to.global.u64 d41,d18;shl.b64 d42,d63,4;add.s64 d43,d41,d42;ld.global.u32 r97,[d43+8];",
    "L14:setp.lt.u64 p12,d14,4;@p12 bra L16;cvta.to.global.u64 d44,d18;shl.b64 d45,d63,4;",
    "add.s64 d46,d44,d45;ld.global.u32 r98,[d46+12];L16:mov.u32 r105,0;L19:setp.eq.s32 p14,r4,3;",
    "selp.b32 r77,-2147483648,0,p14;xor.b32 r78,r100,r77;mov.b64 d54,{r99,r78};mov.b64 g11,d54;",
    "xor.b32 r79,r98,r77;mov.b64 d55,{r97,r79};mov.b64 g10,d55;setp.ne.s32 p15,r4,16;@p15 bra ",
    "L21;mul.rn.f64 g11,g11,g1;mul.rn.f64 g10,g10,g1;L21:@!p7 bra L22;mul.rn.f64 g30,g30,g11;",
    "mul.rn.f64 g29,g29,g10;bra L26;L22:@!p6 bra L23;setp.lt.f64 p18,g30,g11;setp.nan.f64 p19,",
    "g30,g30;or.pred p20,p18,p19;selp.f64 g30,g30,g11,p20;setp.nan.f64 p21,g29,g29;setp.lt.f64 ",
    "p22,g29,g10;or.pred p23,p22,p21;selp.f64 g29,g29,g10,p23;bra L26;L23:add.rn.f64 g30,g30,",
    "g11;add.rn.f64 g29,g29,g10;L26:add.s32 r87,r6,1;add.s64 d64,d64,8;shl.b64 d20,d63,4;",
    "setp.lt.s32 p24,r6,r5;@p24 bra L5;setp.ne.s32 p25,r4,4;@p25 bra L29;div.rn.f64 g30,g30,g2;",
    "div.rn.f64 g29,g29,g2;L29:mov.b64 d56,g30;mov.b64{r48,r82},d56;xor.b32 r46,r82,r77;mov.b64 ",
    "d57,g29;mov.b64{r49,r83},d57;xor.b32 r47,r83,r77;add.s64 d21,d58,d20;@!p1 bra L30;",
    "st.global.v4.u32[d21],{r48,r46,r49,r47};bra L37;L30:setp.eq.s64 p27,d14,0;@p27 bra L32;",
    "st.global.u32[d21],r48;st.global.u32[d21+4],r46;L32:setp.lt.u64 p28,d14,3;@!p28 ",
    "st.global.u32[d21+8],r49;setp.lt.u64 p29,d14,4;@!p29 st.global.u32[d21+12],r47;L37:",
    "setp.ne.s64 p30,d10,0;and.pred p31,p1,p30;cvta.to.global.u64 d59,d10;add.s64 d23,d59,d20;",
    "@!p31 bra L38;st.global.v4.u32[d23],{r48,r46,r49,r47};bra L46;L38:setp.eq.s64 p32,d10,0;",
    "@p32 bra L46;setp.eq.s64 p33,d14,0;@p33 bra L41;st.global.u32[d23],r48;",
    "st.global.u32[d23+4],r46;L41:setp.lt.u64 p34,d14,3;@!p34 st.global.u32[d23+8],r49;",
    "setp.lt.u64 p35,d14,4;@!p35 st.global.u32[d23+12],r47;L46:mov.u32 r84,%nctaid.x;",
    "mul.wide.u32 d60,r84,r52;add.s64 d63,d63,d60;shl.b64 d62,d63,1;setp.lt.u64 p36,d62,d7;@p36 ",
    "bra L4;L47:ret;}.visible .entry idist_reduce_f16(.param .align 8 .b8 a[168]).maxntid 512,1,",
    "1{.reg .pred p<69>;.reg .b16 h<17>;.reg .f32 f<132>;.reg .b32 r<137>;.reg .f64 g<18>;.reg ",
    ".b64 d<47>;mov.b64 d25,a;mov.u32 r54,%ctaid.x;mov.u32 r55,%ntid.x;mul.wide.u32 d26,r54,r55;",
    "mov.u32 r56,%tid.x;cvt.u64.u32 d27,r56;add.s64 d45,d26,d27;add.s64 d3,d25,128;ld.param.u64 ",
    "d28,[a+136];ld.param.u64 d29,[a+128];or.b64 d43,d28,d29;mov.u32 r114,0;ld.param.u32 r1,",
    "[a+160];L1:.pragma \"nounroll\";mul.wide.s32 d30,r114,8;add.s64 d31,d25,d30;ld.param.u64 ",
    "d32,[d31];or.b64 d43,d32,d43;add.s32 r114,r114,1;setp.lt.s32 p2,r114,r1;@p2 bra L1;and.b64 ",
    "d7,d43,15;ld.param.u32 r4,[d3+36];ld.param.u64 d8,[d3+16];shl.b64 d44,d45,3;setp.ge.u64 p3,",
    "d44,d8;@p3 bra L74;ld.param.f64 g1,[d3+24];ld.param.u64 d10,[d3];ld.param.u64 d11,[d3+8];",
    "ld.param.u32 r5,[d3+32];cvt.rn.f32.s32 f1,r5;or.b32 r63,r4,1;cvta.to.global.u64 d40,d10;L4:",
    ".pragma \"nounroll\";sub.s64 d14,d8,d44;setp.gt.u64 p4,d14,7;setp.eq.s64 p5,d7,0;and.pred ",
    "p1,p5,p4;mov.u32 r115,1;setp.eq.s32 p6,r63,3;selp.f32 f83,0f7F800000,0f80000000,p6;",
    "setp.eq.s32 p7,r4,1;selp.f32 f116,0f3F800000,f83,p7;mov.u32 r132,0;mov.u64 d46,d25;mov.f32 ",
    "f117,f116;mov.f32 f118,f116;mov.f32 f119,f116;mov.f32 f120,f116;mov.f32 f121,f116;mov.f32 ",
    "f122,f116;mov.f32 f123,f116;mov.u32 r133,r132;mov.u32 r134,r132;mov.u32 r135,r132;mov.u32 ",
    "r136,r132;L5:.pragma \"nounroll\";mov.u32 r6,r115;setp.eq.s32 p8,r136,0;@!p8 bra L6;",
    "ld.param.u64 d33,[d46];cvta.to.global.u64 d34,d33;shl.b64 d35,d45,4;add.s64 d18,d34,d35;",
    "@!p1 bra L8;ld.global.v4.u32{r131,r130,r129,r128},[d18];mov.u32 r136,0;setp.ge.s32 p17,r6,",
    "r5;@p17 bra L26;ld.param.u64 d36,[d46+8];cvta.to.global.u64 d37,d36;add.s64 d39,d37,d35;",
    "ld.global.v4.u32{r132,r133,r134,r135},[d39];mov.u32 r136,1;bra L26;L6:mov.u32 r136,0;",
    "mov.u32 r128,r135;mov.u32 r129,r134;mov.u32 r130,r133;mov.u32 r131,r132;bra L26;L8:",
    "setp.eq.s64 p9,d14,0;mov.u32 r131,0;@!p9 ld.global.u16 r131,[d18];setp.lt.u64 p10,d14,2;",
    "@p10 bra L12;ld.global.u16 r66,[d18+2];shl.b32 r67,r66,16;or.b32 r131,r67,r131;L12:",
    "setp.lt.u64 p11,d14,3;mov.u32 r130,0;@!p11 ld.global.u16 r130,[d18+4];setp.lt.u64 p12,d14,",
    "4;@p12 bra L16;ld.global.u16 r69,[d18+6];shl.b32 r70,r69,16;or.b32 r130,r70,r130;L16:",
    "setp.lt.u64 p13,d14,5;mov.u32 r129,0;@!p13 ld.global.u16 r129,[d18+8];setp.lt.u64 p14,d14,",
    "6;@p14 bra L20;ld.global.u16 r72,[d18+10];shl.b32 r73,r72,16;or.b32 r129,r73,r129;L20:",
    "setp.lt.u64 p15,d14,7;mov.u32 r136,0;mov.u32 r128,r136;@!p15 ld.global.u16 r128,[d18+12];",
    "setp.lt.u64 p16,d14,8;@p16 bra L26;ld.global.u16 r77,[d18+14];shl.b32 r78,r77,16;or.b32 ",
    "r128,r78,r128;L26:setp.eq.s32 p18,r4,3;selp.b32 r89,-2147450880,0,p18;xor.b32 r90,r131,r89;",
    "xor.b32 r91,r130,r89;xor.b32 r92,r129,r89;xor.b32 r93,r128,r89;cvt.u16.u32 h1,r90;",
    "cvt.f32.f16 f34,h1;shr.u32 r94,r90,16;cvt.u16.u32 h2,r94;cvt.f32.f16 f33,h2;cvt.u16.u32 h3,",
    "r91;cvt.f32.f16 f32,h3;shr.u32 r95,r91,16;cvt.u16.u32 h4,r95;cvt.f32.f16 f31,h4;",
    "cvt.u16.u32 h5,r92;cvt.f32.f16 f30,h5;shr.u32 r96,r92,16;cvt.u16.u32 h6,r96;cvt.f32.f16 ",
    "f29,h6;cvt.u16.u32 h7,r93;cvt.f32.f16 f28,h7;shr.u32 r97,r93,16;cvt.u16.u32 h8,r97;",
    "cvt.f32.f16 f27,h8;setp.ne.s32 p19,r4,16;@p19 bra L28;cvt.f64.f32 g2,f34;mul.rn.f64 g3,g2,",
    "g1;cvt.rn.f32.f64 f34,g3;cvt.f64.f32 g4,f33;mul.rn.f64 g5,g4,g1;cvt.rn.f32.f64 f33,g5;",
    "cvt.f64.f32 g6,f32;mul.rn.f64 g7,g6,g1;cvt.rn.f32.f64 f32,g7;cvt.f64.f32 g8,f31;mul.rn.f64 ",
    "g9,g8,g1;cvt.rn.f32.f64 f31,g9;cvt.f64.f32 g10,f30;mul.rn.f64 g11,g10,g1;cvt.rn.f32.f64 ",
    "f30,g11;cvt.f64.f32 g12,f29;mul.rn.f64 g13,g12,g1;cvt.rn.f32.f64 f29,g13;cvt.f64.f32 g14,",
    "f28;mul.rn.f64 g15,g14,g1;cvt.rn.f32.f64 f28,g15;cvt.f64.f32 g16,f27;mul.rn.f64 g17,g16,g1;",
    "cvt.rn.f32.f64 f27,g17;L28:@!p7 bra L29;mul.rn.f32 f123,f123,f34;mul.rn.f32 f122,f122,f33;",
    "mul.rn.f32 f121,f121,f32;mul.rn.f32 f120,f120,f31;mul.rn.f32 f119,f119,f30;mul.rn.f32 f118,",
    "f118,f29;mul.rn.f32 f117,f117,f28;mul.rn.f32 f116,f116,f27;bra L33;L29:@!p6 bra L30;",
    "setp.lt.f32 p22,f123,f34;setp.nan.f32 p23,f123,f123;or.pred p24,p22,p23;selp.f32 f123,f123,",
    "f34,p24;setp.nan.f32 p25,f122,f122;setp.lt.f32 p26,f122,f33;or.pred p27,p26,p25;selp.f32 ",
    "f122,f122,f33,p27;setp.nan.f32 p28,f121,f121;setp.lt.f32 p29,f121,f32;or.pred p30,p29,p28;",
    "selp.f32 f121,f121,f32,p30;setp.nan.f32 p31,f120,f120;setp.lt.f32 p32,f120,f31;or.pred p33,",
    "p32,p31;selp.f32 f120,f120,f31,p33;setp.nan.f32 p34,f119,f119;setp.lt.f32 p35,f119,f30;",
    "or.pred p36,p35,p34;selp.f32 f119,f119,f30,p36;setp.nan.f32 p37,f118,f118;setp.lt.f32 p38,",
    "f118,f29;or.pred p39,p38,p37;selp.f32 f118,f118,f29,p39;setp.nan.f32 p40,f117,f117;",
    "setp.lt.f32 p41,f117,f28;or.pred p42,p41,p40;selp.f32 f117,f117,f28,p42;setp.nan.f32 p43,",
    "f116,f116;setp.lt.f32 p44,f116,f27;or.pred p45,p44,p43;selp.f32 f116,f116,f27,p45;bra L33;",
    "L30:add.rn.f32 f123,f123,f34;add.rn.f32 f122,f122,f33;add.rn.f32 f121,f121,f32;add.rn.f32 ",
    "f120,f120,f31;add.rn.f32 f119,f119,f30;add.rn.f32 f118,f118,f29;add.rn.f32 f117,f117,f28;",
    "add.rn.f32 f116,f116,f27;L33:add.s32 r115,r6,1;add.s64 d46,d46,8;shl.b64 d20,d45,4;",
    "setp.lt.s32 p46,r6,r5;@p46 bra L5;setp.ne.s32 p47,r4,4;@p47 bra L36;div.rn.f32 f123,f123,",
    "f1;div.rn.f32 f122,f122,f1;div.rn.f32 f121,f121,f1;div.rn.f32 f120,f120,f1;div.rn.f32 f119,",
    "f119,f1;div.rn.f32 f118,f118,f1;div.rn.f32 f117,f117,f1;div.rn.f32 f116,f116,f1;L36:",
    "cvt.rn.f16.f32 h9,f123;cvt.rn.f16.f32 h10,f122;mov.b32 r100,{h9,h10};cvt.rn.f16.f32 h11,",
    "f121;cvt.rn.f16.f32 h12,f120;mov.b32 r101,{h11,h12};cvt.rn.f16.f32 h13,f119;cvt.rn.f16.f32 ",
    "h14,f118;mov.b32 r102,{h13,h14};cvt.rn.f16.f32 h15,f117;cvt.rn.f16.f32 h16,f116;mov.b32 ",
    "r103,{h15,h16};xor.b32 r49,r100,r89;xor.b32 r50,r101,r89;xor.b32 r51,r102,r89;xor.b32 r52,",
    "r103,r89;add.s64 d21,d40,d20;@!p1 bra L37;st.global.v4.u32[d21],{r49,r50,r51,r52};bra L54;",
    "L37:setp.eq.s64 p49,d14,0;@!p49 st.global.u16[d21],r49;setp.lt.u64 p50,d14,2;@p50 bra L41;",
    "shr.u32 r104,r49,16;st.global.u16[d21+2],r104;L41:setp.lt.u64 p51,d14,3;@!p51 ",
    "st.global.u16[d21+4],r50;setp.lt.u64 p52,d14,4;@p52 bra L45;shr.u32 r105,r50,16;",
    "st.global.u16[d21+6],r105;L45:setp.lt.u64 p53,d14,5;@!p53 st.global.u16[d21+8],r51;",
    "setp.lt.u64 p54,d14,6;@p54 bra L49;shr.u32 r106,r51,16;st.global.u16[d21+10],r106;L49:",
    "setp.lt.u64 p55,d14,7;@!p55 st.global.u16[d21+12],r52;setp.lt.u64 p56,d14,8;@p56 bra L54;",
    "shr.u32 r107,r52,16;st.global.u16[d21+14],r107;L54:setp.ne.s64 p57,d11,0;and.pred p58,p1,",
    "p57;cvta.to.global.u64 d41,d11;add.s64 d22,d41,d20;@!p58 bra L55;st.global.v4.u32[d22],{",
    "r49,r50,r51,r52};bra L73;L55:setp.eq.s64 p59,d11,0;@p59 bra L73;setp.eq.s64 p60,d14,0;",
    "@!p60 st.global.u16[d22],r49;setp.lt.u64 p61,d14,2;@p61 bra L60;shr.u32 r108,r49,16;",
    "st.global.u16[d22+2],r108;L60:setp.lt.u64 p62,d14,3;@!p62 st.global.u16[d22+4],r50;",
    "setp.lt.u64 p63,d14,4;@p63 bra L64;shr.u32 r109,r50,16;st.global.u16[d22+6],r109;L64:",
    "setp.lt.u64 p64,d14,5;@!p64 st.global.u16[d22+8],r51;setp.lt.u64 p65,d14,6;@p65 bra L68;",
    "shr.u32 r110,r51,16;st.global.u16[d22+10],r110;L68:setp.lt.u64 p66,d14,7;@!p66 ",
    "st.global.u16[d22+12],r52;setp.lt.u64 p67,d14,8;@p67 bra L73;shr.u32 r111,r52,16;",
    "st.global.u16[d22+14],r111;L73:mov.u32 r112,%nctaid.x;mul.wide.u32 d42,r112,r55;add.s64 ",
    "d45,d45,d42;shl.b64 d44,d45,3;setp.lt.u64 p68,d44,d8;@p68 bra L4;L74:ret;}.visible .entry ",
    "idist_reduce_bf16(.param .align 8 .b8 a[168]).maxntid 512,1,1{.reg .pred p<77>;.reg .f32 ",
    "f<122>;.reg .b32 r<229>;.reg .f64 g<18>;.reg .b64 d<47>;mov.b64 d25,a;mov.u32 r78,%ctaid.x;",
    "mov.u32 r79,%ntid.x;mul.wide.u32 d26,r78,r79;mov.u32 r80,%tid.x;cvt.u64.u32 d27,r80;",
    "add.s64 d45,d26,d27;add.s64 d3,d25,128;ld.param.u64 d28,[a+136];ld.param.u64 d29,[a+128];",
    "or.b64 d43,d28,d29;mov.u32 r198,0;ld.param.u32 r1,[a+160];L1:.pragma \"nounroll\";",
    "mul.wide.s32 d30,r198,8;add.s64 d31,d25,d30;ld.param.u64 d32,[d31];or.b64 d43,d32,d43;",
    "add.s32 r198,r198,1;setp.lt.s32 p2,r198,r1;@p2 bra L1;and.b64 d7,d43,15;ld.param.u32 r4,",
    "[d3+36];ld.param.u64 d8,[d3+16];shl.b64 d44,d45,3;setp.ge.u64 p3,d44,d8;@p3 bra L74;",
    "ld.param.f64 g1,[d3+24];ld.param.u64 d10,[d3];ld.param.u64 d11,[d3+8];ld.param.u32 r5,",
    "[d3+32];cvt.rn.f32.s32 f1,r5;or.b32 r87,r4,1;cvta.to.global.u64 d40,d10;L4:.pragma ",
    "\"nounroll\";sub.s64 d14,d8,d44;setp.gt.u64 p4,d14,7;setp.eq.s64 p5,d7,0;and.pred p1,p5,p4;",
    "mov.u32 r199,1;setp.eq.s32 p6,r87,3;selp.f32 f60,0f7F800000,0f80000000,p6;setp.eq.s32 p7,",
    "r4,1;selp.f32 f106,0f3F800000,f60,p7;mov.u32 r216,0;mov.u64 d46,d25;mov.f32 f107,f106;",
    "mov.f32 f108,f106;mov.f32 f109,f106;mov.f32 f110,f106;mov.f32 f111,f106;mov.f32 f112,f106;",
    "mov.f32 f113,f106;mov.u32 r217,r216;mov.u32 r218,r216;mov.u32 r219,r216;mov.u32 r220,r216;",
    "L5:.pragma \"nounroll\";mov.u32 r6,r199;setp.eq.s32 p8,r220,0;@!p8 bra L6;ld.param.u64 d33,",
    "[d46];cvta.to.global.u64 d34,d33;shl.b64 d35,d45,4;add.s64 d18,d34,d35;@!p1 bra L8;",
    "ld.global.v4.u32{r215,r214,r213,r212},[d18];mov.u32 r220,0;setp.ge.s32 p17,r6,r5;@p17 bra ",
    "L26;ld.param.u64 d36,[d46+8];cvta.to.global.u64 d37,d36;add.s64 d39,d37,d35;",
    "ld.global.v4.u32{r216,r217,r218,r219},[d39];mov.u32 r220,1;bra L26;L6:mov.u32 r220,0;",
    "mov.u32 r212,r219;mov.u32 r213,r218;mov.u32 r214,r217;mov.u32 r215,r216;bra L26;L8:",
    "setp.eq.s64 p9,d14,0;mov.u32 r215,0;@!p9 ld.global.u16 r215,[d18];setp.lt.u64 p10,d14,2;",
    "@p10 bra L12;ld.global.u16 r90,[d18+2];shl.b32 r91,r90,16;or.b32 r215,r91,r215;L12:",
    "setp.lt.u64 p11,d14,3;mov.u32 r214,0;@!p11 ld.global.u16 r214,[d18+4];setp.lt.u64 p12,d14,",
    "4;@p12 bra L16;ld.global.u16 r93,[d18+6];shl.b32 r94,r93,16;or.b32 r214,r94,r214;L16:",
    "setp.lt.u64 p13,d14,5;mov.u32 r213,0;@!p13 ld.global.u16 r213,[d18+8];setp.lt.u64 p14,d14,",
    "6;@p14 bra L20;ld.global.u16 r96,[d18+10];shl.b32 r97,r96,16;or.b32 r213,r97,r213;L20:",
    "setp.lt.u64 p15,d14,7;mov.u32 r220,0;mov.u32 r212,r220;@!p15 ld.global.u16 r212,[d18+12];",
    "setp.lt.u64 p16,d14,8;@p16 bra L26;ld.global.u16 r101,[d18+14];shl.b32 r102,r101,16;or.b32 ",
    "r212,r102,r212;L26:setp.eq.s32 p18,r4,3;selp.b32 r113,-2147450880,0,p18;xor.b32 r114,r215,",
    "r113;xor.b32 r115,r214,r113;xor.b32 r116,r213,r113;xor.b32 r117,r212,r113;shl.b32 r228,",
    "r114,16;and.b32 r70,r114,-65536;shl.b32 r69,r115,16;and.b32 r68,r115,-65536;shl.b32 r67,",
    "r116,16;and.b32 r66,r116,-65536;shl.b32 r65,r117,16;and.b32 r64,r117,-65536;setp.ne.s32 ",
    "p19,r4,16;@p19 bra L28;mov.b32 f61,r228;cvt.f64.f32 g2,f61;mul.rn.f64 g3,g2,g1;",
    "cvt.rn.f32.f64 f62,g3;mov.b32 r228,f62;mov.b32 f63,r70;cvt.f64.f32 g4,f63;mul.rn.f64 g5,g4,",
    "g1;cvt.rn.f32.f64 f64,g5;mov.b32 r70,f64;mov.b32 f65,r69;cvt.f64.f32 g6,f65;mul.rn.f64 g7,",
    "g6,g1;cvt.rn.f32.f64 f66,g7;mov.b32 r69,f66;mov.b32 f67,r68;cvt.f64.f32 g8,f67;mul.rn.f64 ",
    "g9,g8,g1;cvt.rn.f32.f64 f68,g9;mov.b32 r68,f68;mov.b32 f69,r67;cvt.f64.f32 g10,f69;",
    "mul.rn.f64 g11,g10,g1;cvt.rn.f32.f64 f70,g11;mov.b32 r67,f70;mov.b32 f71,r66;cvt.f64.f32 ",
    "g12,f71;mul.rn.f64 g13,g12,g1;cvt.rn.f32.f64 f72,g13;mov.b32 r66,f72;mov.b32 f73,r65;",
    "cvt.f64.f32 g14,f73;mul.rn.f64 g15,g14,g1;cvt.rn.f32.f64 f74,g15;mov.b32 r65,f74;mov.b32 ",
    "f75,r64;cvt.f64.f32 g16,f75;mul.rn.f64 g17,g16,g1;cvt.rn.f32.f64 f76,g17;mov.b32 r64,f76;",
    "L28:mov.b32 f11,r228;@!p7 bra L29;mul.rn.f32 f113,f113,f11;mov.b32 f91,r70;mul.rn.f32 f112,",
    "f112,f91;mov.b32 f92,r69;mul.rn.f32 f111,f111,f92;mov.b32 f93,r68;mul.rn.f32 f110,f110,f93;",
    "mov.b32 f94,r67;mul.rn.f32 f109,f109,f94;mov.b32 f95,r66;mul.rn.f32 f108,f108,f95;mov.b32 ",
    "f96,r65;mul.rn.f32 f107,f107,f96;mov.b32 f97,r64;mul.rn.f32 f106,f106,f97;bra L33;L29:@!p6 ",
    "bra L30;setp.lt.f32 p22,f113,f11;setp.nan.f32 p23,f113,f113;or.pred p24,p22,p23;selp.f32 ",
    "f113,f113,f11,p24;mov.b32 f84,r70;setp.lt.f32 p25,f112,f84;setp.nan.f32 p26,f112,f112;",
    "or.pred p27,p25,p26;selp.f32 f112,f112,f84,p27;mov.b32 f85,r69;setp.lt.f32 p28,f111,f85;",
    "setp.nan.f32 p29,f111,f111;or.pred p30,p28,p29;selp.f32 f111,f111,f85,p30;mov.b32 f86,r68;",
    "setp.lt.f32 p31,f110,f86;setp.nan.f32 p32,f110,f110;or.pred p33,p31,p32;selp.f32 f110,f110,",
    "f86,p33;mov.b32 f87,r67;setp.lt.f32 p34,f109,f87;setp.nan.f32 p35,f109,f109;or.pred p36,",
    "p34,p35;selp.f32 f109,f109,f87,p36;mov.b32 f88,r66;setp.lt.f32 p37,f108,f88;setp.nan.f32 ",
    "p38,f108,f108;or.pred p39,p37,p38;selp.f32 f108,f108,f88,p39;mov.b32 f89,r65;setp.lt.f32 ",
    "p40,f107,f89;setp.nan.f32 p41,f107,f107;or.pred p42,p40,p41;selp.f32 f107,f107,f89,p42;",
    "mov.b32 f90,r64;setp.lt.f32 p43,f106,f90;setp.nan.f32 p44,f106,f106;or.pred p45,p43,p44;",
    "selp.f32 f106,f106,f90,p45;bra L33;L30:add.rn.f32 f113,f113,f11;mov.b32 f77,r70;add.rn.f32 ",
    "f112,f112,f77;mov.b32 f78,r69;add.rn.f32 f111,f111,f78;mov.b32 f79,r68;add.rn.f32 f110,",
    "f110,f79;mov.b32 f80,r67;add.rn.f32 f109,f109,f80;mov.b32 f81,r66;add.rn.f32 f108,f108,f81;",
    "mov.b32 f82,r65;add.rn.f32 f107,f107,f82;mov.b32 f83,r64;add.rn.f32 f106,f106,f83;L33:",
    "add.s32 r199,r6,1;add.s64 d46,d46,8;shl.b64 d20,d45,4;setp.lt.s32 p46,r6,r5;@p46 bra L5;",
    "setp.ne.s32 p47,r4,4;@p47 bra L36;div.rn.f32 f113,f113,f1;div.rn.f32 f112,f112,f1;",
    "div.rn.f32 f111,f111,f1;div.rn.f32 f110,f110,f1;div.rn.f32 f109,f109,f1;div.rn.f32 f108,",
    "f108,f1;div.rn.f32 f107,f107,f1;div.rn.f32 f106,f106,f1;L36:mov.b32 r120,f113;shr.u32 r121,",
    "r120,16;and.b32 r122,r121,1;or.b32 r123,r120,4194304;add.s32 r124,r120,r122;add.s32 r125,",
    "r124,32767;setp.nan.f32 p49,f113,f113;selp.b32 r126,r123,r125,p49;shr.u32 r127,r126,16;",
    "mov.b32 r128,f112;shr.u32 r129,r128,16;and.b32 r130,r129,1;or.b32 r131,r128,4194304;",
    "add.s32 r132,r128,r130;add.s32 r133,r132,32767;setp.nan.f32 p50,f112,f112;selp.b32 r134,",
    "r131,r133,p50;and.b32 r135,r134,-65536;or.b32 r136,r127,r135;mov.b32 r137,f111;shr.u32 ",
    "r138,r137,16;and.b32 r139,r138,1;or.b32 r140,r137,4194304;add.s32 r141,r137,r139;add.s32 ",
    "r142,r141,32767;setp.nan.f32 p51,f111,f111;selp.b32 r143,r140,r142,p51;shr.u32 r144,r143,",
    "16;mov.b32 r145,f110;shr.u32 r146,r145,16;and.b32 r147,r146,1;or.b32 r148,r145,4194304;",
    "add.s32 r149,r145,r147;add.s32 r150,r149,32767;setp.nan.f32 p52,f110,f110;selp.b32 r151,",
    "r148,r150,p52;and.b32 r152,r151,-65536;or.b32 r153,r144,r152;mov.b32 r154,f109;shr.u32 ",
    "r155,r154,16;and.b32 r156,r155,1;or.b32 r157,r154,4194304;add.s32 r158,r154,r156;add.s32 ",
    "r159,r158,32767;setp.nan.f32 p53,f109,f109;selp.b32 r160,r157,r159,p53;shr.u32 r161,r160,",
    "16;mov.b32 r162,f108;shr.u32 r163,r162,16;and.b32 r164,r163,1;or.b32 r165,r162,4194304;",
    "add.s32 r166,r162,r164;add.s32 r167,r166,32767;setp.nan.f32 p54,f108,f108;selp.b32 r168,",
    "r165,r167,p54;and.b32 r169,r168,-65536;or.b32 r170,r161,r169;mov.b32 r171,f107;shr.u32 ",
    "r172,r171,16;and.b32 r173,r172,1;or.b32 r174,r171,4194304;add.s32 r175,r171,r173;add.s32 ",
    "r176,r175,32767;setp.nan.f32 p55,f107,f107;selp.b32 r177,r174,r176,p55;shr.u32 r178,r177,",
    "16;mov.b32 r179,f106;shr.u32 r180,r179,16;and.b32 r181,r180,1;or.b32 r182,r179,4194304;",
    "add.s32 r183,r179,r181;add.s32 r184,r183,32767;setp.nan.f32 p56,f106,f106;selp.b32 r185,",
    "r182,r184,p56;and.b32 r186,r185,-65536;or.b32 r187,r178,r186;xor.b32 r73,r136,r113;xor.b32 ",
    "r74,r153,r113;xor.b32 r75,r170,r113;xor.b32 r76,r187,r113;add.s64 d21,d40,d20;@!p1 bra L37;",
    "st.global.v4.u32[d21],{r73,r74,r75,r76};bra L54;L37:setp.eq.s64 p57,d14,0;@!p57 ",
    "st.global.u16[d21],r73;setp.lt.u64 p58,d14,2;@p58 bra L41;shr.u32 r188,r73,16;",
    "st.global.u16[d21+2],r188;L41:setp.lt.u64 p59,d14,3;@!p59 st.global.u16[d21+4],r74;",
    "setp.lt.u64 p60,d14,4;@p60 bra L45;shr.u32 r189,r74,16;st.global.u16[d21+6],r189;L45:",
    "setp.lt.u64 p61,d14,5;@!p61 st.global.u16[d21+8],r75;setp.lt.u64 p62,d14,6;@p62 bra L49;",
    "shr.u32 r190,r75,16;st.global.u16[d21+10],r190;L49:setp.lt.u64 p63,d14,7;@!p63 ",
    "st.global.u16[d21+12],r76;setp.lt.u64 p64,d14,8;@p64 bra L54;shr.u32 r191,r76,16;",
    "st.global.u16[d21+14],r191;L54:setp.ne.s64 p65,d11,0;and.pred p66,p1,p65;",
    "cvta.to.global.u64 d41,d11;add.s64 d22,d41,d20;@!p66 bra L55;st.global.v4.u32[d22],{r73,",
    "r74,r75,r76};bra L73;L55:setp.eq.s64 p67,d11,0;@p67 bra L73;setp.eq.s64 p68,d14,0;@!p68 ",
    "st.global.u16[d22],r73;setp.lt.u64 p69,d14,2;@p69 bra L60;shr.u32 r192,r73,16;",
    "st.global.u16[d22+2],r192;L60:setp.lt.u64 p70,d14,3;@!p70 st.global.u16[d22+4],r74;",
    "setp.lt.u64 p71,d14,4;@p71 bra L64;shr.u32 r193,r74,16;st.global.u16[d22+6],r193;L64:",
    "setp.lt.u64 p72,d14,5;@!p72 st.global.u16[d22+8],r75;setp.lt.u64 p73,d14,6;@p73 bra L68;",
    "shr.u32 r194,r75,16;st.global.u16[d22+10],r194;L68:setp.lt.u64 p74,d14,7;@!p74 ",
    "st.global.u16[d22+12],r76;setp.lt.u64 p75,d14,8;@p75 bra L73;shr.u32 r195,r76,16;",
    "st.global.u16[d22+14],r195;L73:mov.u32 r196,%nctaid.x;mul.wide.u32 d42,r196,r79;add.s64 ",
    "d45,d45,d42;shl.b64 d44,d45,3;setp.lt.u64 p76,d44,d8;@p76 bra L4;L74:ret;}.visible .entry ",
    "idist_pack_halves(.param .align 8 .b8 a[32]).maxntid 512,1,1{.reg .pred p<10>;.reg .b16 ",
    "h<11>;.reg .f32 f<4>;.reg .b32 r<32>;.reg .b64 d<54>;ld.param.u32 r2,[a+24];ld.param.u64 ",
    "d22,[a+16];ld.param.u64 d21,[a+8];ld.param.u64 d20,[a];cvta.to.global.u64 d1,d20;",
    "cvta.to.global.u64 d2,d21;mov.u32 r3,%ctaid.x;mov.u32 r4,%ntid.x;mul.wide.u32 d23,r3,r4;",
    "mov.u32 r5,%tid.x;cvt.u64.u32 d24,r5;add.s64 d53,d23,d24;setp.ge.u64 p1,d53,d22;@p1 bra ",
    "L12;setp.gt.s32 p2,r2,1;@!p2 bra L2;setp.eq.s32 p7,r2,2;@!p7 bra L8;mov.u32 r31,%nctaid.x;",
    "mul.wide.u32 d17,r31,r4;L11:shl.b64 d46,d53,1;add.s64 d47,d1,d46;ld.global.u16 h10,[d47];",
    "cvt.f32.f16 f3,h10;shl.b64 d48,d53,2;add.s64 d49,d2,d48;st.global.f32[d49],f3;add.s64 d53,",
    "d53,d17;setp.lt.u64 p9,d53,d22;@p9 bra L11;bra L12;L2:setp.eq.s32 p3,r2,0;@p3 bra L5;",
    "add.s64 d50,d23,d24;mov.u32 r9,%nctaid.x;mul.wide.u32 d5,r9,r4;L4:shl.b64 d28,d50,2;",
    "add.s64 d29,d1,d28;ld.global.f32 f1,[d29];mov.b32 r10,f1;shr.u32 r11,r10,16;and.b32 r12,",
    "r11,1;setp.nan.f32 p4,f1,f1;or.b32 r13,r10,4194304;add.s32 r14,r10,r12;add.s32 r15,r14,",
    "32767;selp.b32 r16,r13,r15,p4;shr.u32 r17,r16,16;shl.b64 d30,d50,1;add.s64 d31,d2,d30;",
    "st.global.u16[d31],r17;add.s64 d50,d50,d5;setp.lt.u64 p5,d50,d22;@p5 bra L4;bra L12;L8:",
    "add.s64 d52,d23,d24;mov.u32 r25,%nctaid.x;mul.wide.u32 d13,r25,r4;L9:shl.b64 d40,d52,1;",
    "add.s64 d41,d1,d40;ld.global.u16 r26,[d41];shl.b32 r27,r26,16;shl.b64 d42,d52,2;add.s64 ",
    "d43,d2,d42;st.global.u32[d43],r27;add.s64 d52,d52,d13;setp.lt.u64 p8,d52,d22;@p8 bra L9;",
    "bra L12;L5:add.s64 d51,d23,d24;mov.u32 r21,%nctaid.x;mul.wide.u32 d9,r21,r4;L6:shl.b64 d34,",
    "d51,2;add.s64 d35,d1,d34;ld.global.f32 f2,[d35];cvt.rn.f16.f32 h9,f2;shl.b64 d36,d51,1;",
    "add.s64 d37,d2,d36;st.global.u16[d37],h9;add.s64 d51,d51,d9;setp.lt.u64 p6,d51,d22;@p6 bra ",
    "L6;L12:ret;}"};
// clang-format on
// End of what tests/gpu/make_ptx.sh made.

// ---- gpu/ipc/ipc_kernel.h ------------------------------------------------------------------------

// gpu/ipc/ipc_kernel.h: loading the kernels, and launching them

#if IDIST__IPC_KERNELS
static bool idist__ipc_kernel_is_loaded(const idist__gpu *gpu) { return gpu->library != NULL; }

static void idist__ipc_kernel_unload(idist__gpu *gpu) {
    if (gpu->library) cudaLibraryUnload(gpu->library);
    gpu->library = NULL;
}

// Loads the kernels. The driver compiles a kernel when the kernel is first needed. Querying the
// kernel's attributes makes the driver compile it now. PTX that the driver cannot compile is
// therefore found before a call needs the kernels, and no launch waits for the compiler.
static cudaError_t idist__ipc_kernel_load(idist__gpu *gpu) {
    static const char *const names[] = {"idist_reduce_f16", "idist_reduce_bf16", "idist_reduce_f32",
                                        "idist_reduce_f64", "idist_pack_halves"};
    struct cudaFuncAttributes attributes;
    size_t i, nbytes = 1, at = 0;
    cudaError_t error;
    char *text;

    for (i = 0; i < IDIST__COUNT_OF(idist__ptx); i++) nbytes += strlen(idist__ptx[i]);
    if ((text = (char *)malloc(nbytes)) == NULL) return cudaErrorMemoryAllocation;
    for (i = 0; i < IDIST__COUNT_OF(idist__ptx); at += strlen(idist__ptx[i++]))
        memcpy(text + at, idist__ptx[i], strlen(idist__ptx[i]) + 1);
    error = cudaLibraryLoadData(&gpu->library, text, NULL, NULL, 0, NULL, NULL, 0);
    free(text);

    for (i = 0; i < IDIST__COUNT_OF(names) && error == cudaSuccess; i++) {
        error = cudaLibraryGetKernel(&gpu->kernels[i], gpu->library, names[i]);
        if (error != cudaSuccess) break;
        error = cudaFuncGetAttributes(&attributes, (const void *)gpu->kernels[i]);
    }

    if (error != cudaSuccess) idist__ipc_kernel_unload(gpu);

    return error;
}

// Launches a kernel with one thread for each of `count` items, or with fewer threads that each
// handle several items.
static cudaError_t idist__ipc_kernel_launch(const idist__gpu *gpu, int kernel, const void *args,
                                            size_t count, cudaStream_t stream) {
    void *params[1];
    dim3 grid, block;

    params[0] = (void *)(uintptr_t)args;
    block.x = IDIST__PTX_THREADS;
    grid.x = (unsigned)(count / IDIST__PTX_THREADS < 1024 ? count / IDIST__PTX_THREADS + 1 : 1024);
    grid.y = grid.z = block.y = block.z = 1;
    return cudaLaunchKernel((const void *)gpu->kernels[kernel], grid, block, params, 0, stream);
}

// Reduces on the device. The caller sets args->out, args->also and args->count. Each operand in[i]
// that is NULL is read from offset `at` of rank i's arena.
static cudaError_t idist__ipc_kernel_reduce(const idist__task *t, char *const *arena, size_t at,
                                            idist__ptx_args *args) {
    const idist_group *g = t->group;
    const idist__call *call = &idist__gpu_op_of(t)->call;
    const idist__gpu *gpu = idist__gpu_of(g->w);
    size_t size = idist_dtype_size(call->dtype), nbytes = args->count * size;
    cudaStream_t stream = idist__gpu_group_of(g)->stream[IDIST__STREAM_OUT];
    cudaError_t error = cudaSuccess;
    void *out = args->out, *away = NULL;
    int i;

    if (!args->count) return cudaSuccess;

    for (i = 0; i < g->size; i++)
        if (!args->in[i]) args->in[i] = arena[i] + at;
    args->n = g->size;
    args->op = idist__reduce_op_is_arithmetic(call->op) ? (int)call->op : IDIST_SUM;

    // The kernel needs output that is aligned to an element.
    if ((uintptr_t)out % size) error = cudaMallocAsync(&away, nbytes, stream);
    if (away) args->out = away;
    if (error == cudaSuccess)
        error = idist__ipc_kernel_launch(gpu, (int)call->dtype - IDIST_F16, args, args->count / 4,
                                         stream);
    if (error == cudaSuccess && away)
        error = cudaMemcpyAsync(out, away, nbytes, cudaMemcpyDefault, stream);
    if (away) cudaFreeAsync(away, stream);

    return error;
}

static cudaError_t idist__ipc_kernel_scale(const idist__gpu *gpu, void *data, size_t count,
                                           idist_dtype dtype, double factor, cudaStream_t stream) {
    idist__ptx_args args;

    memset(&args, 0, sizeof args);
    args.in[0] = args.out = data;
    args.count = count;
    args.n = 1;
    args.op = IDIST__PTX_SCALED;
    args.factor = factor;

    return count ? idist__ipc_kernel_launch(gpu, (int)dtype - IDIST_F16, &args, count / 4, stream)
                 : cudaSuccess;
}
#else
static bool idist__ipc_kernel_is_loaded(const idist__gpu *gpu) {
    (void)gpu;
    return false;
}
static cudaError_t idist__ipc_kernel_load(idist__gpu *gpu) {
    (void)gpu;
    return cudaErrorNotSupported;
}
static void idist__ipc_kernel_unload(idist__gpu *gpu) { (void)gpu; }
static cudaError_t idist__ipc_kernel_reduce(const idist__task *t, char *const *arena, size_t at,
                                            idist__ptx_args *args) {
    (void)t;
    (void)arena;
    (void)at;
    (void)args;
    return cudaErrorNotSupported;
}
static cudaError_t idist__ipc_kernel_scale(const idist__gpu *gpu, void *data, size_t count,
                                           idist_dtype dtype, double factor, cudaStream_t stream) {
    (void)gpu;
    (void)data;
    (void)count;
    (void)dtype;
    (void)factor;
    (void)stream;
    return cudaErrorNotSupported;
}
static cudaError_t idist__ipc_kernel_launch(const idist__gpu *gpu, int kernel, const void *args,
                                            size_t count, cudaStream_t stream) {
    (void)gpu;
    (void)kernel;
    (void)args;
    (void)count;
    (void)stream;
    return cudaErrorNotSupported;
}
#endif

static bool idist__ipc_kernel_has_loaded(const void *arg) {
    const idist__world *w = (const idist__world *)arg;
    return !idist__gpu_of(w)->loading || w->progress.stops;
}

// Loads the kernels once per world. Called with the lock held. Releases the lock meanwhile, because
// loading may wait for the device. On the device, an NCCL kernel may be waiting for a lost rank,
// and the thread that aborts this kernel needs the lock. The caller is counted in gpu->user_count.
static cudaError_t idist__ipc_kernel_need(idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);
    int most_ms = w->cfg.init_timeout_ms > 0 ? w->cfg.init_timeout_ms : IDIST__IPC_LOAD_MS;
    cudaError_t error;

    if (!idist__gpu_agree_wait_until(w, idist__ipc_kernel_has_loaded, w,
                                     idist__os_clock_deadline(most_ms)))
        return cudaErrorNotReady;
    if (gpu->loading) return cudaErrorNotReady;
    if (idist__ipc_kernel_is_loaded(gpu)) return cudaSuccess;

    gpu->loading = true;
    idist__os_mutex_unlock(&w->lock);
    error = idist__ipc_kernel_load(gpu);
    idist__world_lock(w);
    gpu->loading = false;

    return error;
}

// ---- gpu/ipc/ipc_arena.h -------------------------------------------------------------------------

// gpu/ipc/ipc_arena.h: device memory that other ranks map
//
// Each rank of a group has an arena: IDIST__IPC_SLOTS chunks of device memory, which the other
// members map once. Allocating and mapping device memory may wait for all work on the device, so
// these CUDA calls are made without the lock.

// The information that each member sends to the other members about its arena.
typedef struct idist__ipc_rank_info {
    cudaIpcMemHandle_t handle;
    char *data; // for ranks of the same process, which cannot open the handle
    uint64_t process;
    int32_t device;
    uint32_t serial;
    int32_t failed; // true if there is nothing to map; the reason follows later
} idist__ipc_rank_info;

// Returns a number that identifies this process. The number depends on the container, because
// processes in different containers may have the same process id.
static uint64_t idist__ipc_arena_process(void) {
    return idist__hash_mix((uint64_t)idist__os_process_id(), idist__os_process_space());
}

// Takes an arena for this rank: the arena of a closed group, or a new arena. Releases the lock
// while it allocates.
static cudaError_t idist__ipc_arena_take(idist_group *g, idist__ipc_rank_info *info) {
    idist__gpu *gpu = idist__gpu_of(g->w);
    idist__ipc_arena *a = gpu->arenas;
    cudaError_t error = cudaSuccess;

    if (a) {
        gpu->arenas = a->next;
    } else {
        a = (idist__ipc_arena *)idist__mem_alloc(&g->w->cfg.mem, sizeof *a);
        if (!a) return cudaErrorMemoryAllocation;
        idist__os_mutex_unlock(&g->w->lock);
        error = cudaMalloc((void **)&a->data, IDIST__IPC_SLOTS * IDIST__IPC_CHUNK);
        idist__world_lock(g->w);
        if (error == cudaSuccess) a->serial = ++gpu->arena_count;
    }

    if (error != cudaSuccess) {
        idist__mem_free(&g->w->cfg.mem, a);
        return error;
    }

    idist__gpu_group_of(g)->own_arena = a;
    info->data = a->data;
    info->device = gpu->device;
    info->serial = a->serial;

    return g->size > 1 ? cudaIpcGetMemHandle(&info->handle, a->data) : cudaSuccess;
}

// Maps an arena of another rank, unless the arena is already mapped. Releases the lock meanwhile.
static cudaError_t idist__ipc_arena_map(idist__world *w, int rank, const idist__ipc_rank_info *info,
                                        char **at) {
    idist__gpu *gpu = idist__gpu_of(w);
    idist__ipc_arena *a;
    cudaError_t error;

    for (a = gpu->imports; a && (a->rank != rank || a->serial != info->serial); a = a->next)
        continue;

    if (a) {
        *at = a->data;
        return cudaSuccess;
    }

    a = (idist__ipc_arena *)idist__mem_alloc(&w->cfg.mem, sizeof *a);
    if (!a) return cudaErrorMemoryAllocation;
    idist__os_mutex_unlock(&w->lock);
    error = cudaIpcOpenMemHandle((void **)&a->data, info->handle, cudaIpcMemLazyEnablePeerAccess);
    idist__world_lock(w);

    if (error != cudaSuccess) {
        idist__mem_free(&w->cfg.mem, a);
        return error;
    }

    a->rank = rank;
    a->serial = info->serial;
    a->next = gpu->imports;
    gpu->imports = a;
    *at = a->data;

    return cudaSuccess;
}

// Maps the arenas of all other ranks of the group. Releases the lock meanwhile.
static cudaError_t idist__ipc_arena_map_all(idist_group *g, const idist__ipc_rank_info *infos) {
    idist__gpu_group *gg = idist__gpu_group_of(g);
    cudaError_t error = cudaSuccess;
    int i;

    for (i = 0; i < g->size && error == cudaSuccess; i++) {
        gg->arena[i] = infos[i].data;
        if (infos[i].failed) return cudaSuccess;

        if (infos[i].process != infos[g->rank].process) {
            error = idist__ipc_arena_map(g->w, g->ranks[i], &infos[i], &gg->arena[i]);
        } else if (infos[i].device != infos[g->rank].device) {
            idist__os_mutex_unlock(&g->w->lock);
            error = cudaDeviceEnablePeerAccess(infos[i].device, 0);
            idist__world_lock(g->w);
        }

        if (error == cudaErrorPeerAccessAlreadyEnabled) error = cudaSuccess;
    }

    return error;
}

static void idist__ipc_arena_release(idist_group *g) {
    idist__gpu *gpu = idist__gpu_of(g->w);
    idist__gpu_group *gg = idist__gpu_group_of(g);

    if (!gg->own_arena) return;
    gg->own_arena->next = gpu->arenas;
    gpu->arenas = gg->own_arena;
    gg->own_arena = NULL;
}

// Abandons this rank's arena in a group in which some rank's copy never ends. No other group gets
// the arena, and the arena is never freed.
static void idist__ipc_arena_abandon(idist_group *g) {
    idist__gpu_group *gg = idist__gpu_group_of(g);

    idist__mem_free(&g->w->cfg.mem, gg->own_arena);
    gg->own_arena = NULL;
}

// ---- gpu/ipc/ipc_leave.h -------------------------------------------------------------------------

// gpu/ipc/ipc_leave.h: how the end of a world frees device memory
//
//     idist_finalize      idist__ipc_leave_unmap_arenas   this rank no longer maps any arena
//                         the ranks meet                  no rank still maps our arenas
//     groups are closed   gpu/gpu_leave.h                 other threads leave the world
//     world is freed      idist__ipc_leave_free_all       frees all memory that the device uses

// A clean-up job, which frees the device's memory in a thread of its own. The thread is needed
// because each CUDA call that frees memory may wait for all work on the device.
typedef struct idist__ipc_cleanup {
    idist__gpu gpu; // only the device, and what the thread frees: imports, arenas, library,
                    // free_pinned, barrier_word, pool
    int state;      // atomic: IDIST__JOB_STATE_*
} idist__ipc_cleanup;

static void *idist__ipc_leave_cleanup_run(void *arg) {
    idist__ipc_cleanup *job = (idist__ipc_cleanup *)arg;
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    const idist__ipc_arena *a;
    const idist__pinned *p;

    cudaSetDevice(job->gpu.device);
    cudaThreadExchangeStreamCaptureMode(&mode);
    for (a = job->gpu.imports; a; a = a->next) cudaIpcCloseMemHandle(a->data);
    for (a = job->gpu.arenas; a; a = a->next) cudaFree(a->data);
    for (p = job->gpu.free_pinned; p; p = p->next)
        if (p->is_pinned) cudaHostUnregister(p->data);
    cudaFree(job->gpu.barrier_word);
    if (job->gpu.pool) cudaMemPoolDestroy(job->gpu.pool);
    idist__ipc_kernel_unload(&job->gpu);

    if (__atomic_exchange_n(&job->state, IDIST__JOB_STATE_DONE, __ATOMIC_ACQ_REL) ==
        IDIST__JOB_STATE_LEFT)
        free(job);

    return NULL;
}

// Frees the memory that `what` lists, in a thread of its own, and waits up to IDIST__GPU_ABORT_MS
// for the thread. Returns false if the thread has not finished by this deadline, because the device
// is busy. The thread then continues by itself. Also returns false if the thread cannot be started.
// Called without the lock.
static bool idist__ipc_leave_clean_up(const idist__gpu *what) {
    idist__ipc_cleanup *job = (idist__ipc_cleanup *)calloc(1, sizeof *job);
    int64_t deadline = idist__os_clock_deadline(IDIST__GPU_ABORT_MS);
    idist__os_thread thread;
    int turns = 0;

    if (!job) return false;
    job->gpu = *what;

    if (idist__os_thread_start(&thread, idist__ipc_leave_cleanup_run, job) != 0) {
        free(job);
        return false;
    }

    while (!__atomic_load_n(&job->state, __ATOMIC_ACQUIRE) && idist__os_clock_now_ns() < deadline)
        idist__gpu_device_nap(&turns);

    if (__atomic_exchange_n(&job->state, IDIST__JOB_STATE_LEFT, __ATOMIC_ACQ_REL) !=
        IDIST__JOB_STATE_DONE) {
        idist__os_thread_detach(thread); // the thread frees the job
        return false;
    }

    idist__os_thread_join(thread);
    free(job);

    return true;
}

static void idist__ipc_leave_free_list(const idist__world *w, idist__ipc_arena *list) {
    idist__ipc_arena *a;

    while ((a = list) != NULL) {
        list = a->next;
        idist__mem_free(&w->cfg.mem, a);
    }
}

// Returns true if no thread of this rank reads, or is about to read, the memory of other ranks.
static bool idist__ipc_leave_is_idle(const void *arg) {
    const idist__world *w = (const idist__world *)arg;
    const idist_group *g;
    const idist__task *t;

    for (t = w->tasks.running; t; t = t->next)
        if (t->on_device && idist__gpu_op_of(t)->path == IDIST__BY_IPC) return false;

    for (g = &w->group; g; g = g->next) {
        const idist__gpu_group *gg = idist__gpu_group_of(g);
        if (gg && gg->preparing && gg->path == IDIST__BY_IPC) return false;
    }

    return true;
}

// Unmaps the arenas of the other ranks. A rank frees its arenas only when all ranks have unmapped
// them. Waits for the calls of other threads to end.
static void idist__ipc_leave_unmap_arenas(idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);
    idist__gpu what;
    bool closed;

    if (!idist__gpu_agree_wait_until(w, idist__ipc_leave_is_idle, w,
                                     idist__os_clock_deadline(IDIST__GPU_ABORT_MS))) {
        idist__log_print(
            &w->log, IDIST_LOG_WARN,
            "finalize: a call in another thread still reads the memory of other ranks");
        return;
    }

    gpu->closed = true;
    if (!gpu->imports || gpu->stuck) return;
    memset(&what, 0, sizeof what);
    what.device = gpu->device;
    what.imports = gpu->imports;
    gpu->imports = NULL;

    idist__os_mutex_unlock(&w->lock);
    closed = idist__ipc_leave_clean_up(&what);
    idist__world_lock(w);
    if (closed) idist__ipc_leave_free_list(w, what.imports);
    else gpu->stuck = true;
}

// Frees all of this rank's memory that the device uses. Each of these CUDA calls may wait for the
// device, on which an NCCL kernel that could not be aborted may still run.
static void idist__ipc_leave_free_all(idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);
    // If the device is stuck, a thread may still be loading the kernels.
    bool any = !gpu->stuck && (gpu->imports || gpu->arenas || gpu->free_pinned ||
                               gpu->barrier_word || gpu->pool || idist__ipc_kernel_is_loaded(gpu));
    bool busy = any && !idist__ipc_leave_clean_up(gpu);

    if (!busy && !w->life.abandoned) { // otherwise, a thread may still read the lists
        idist__ipc_leave_free_list(w, gpu->imports);
        idist__ipc_leave_free_list(w, gpu->arenas);
        idist__pinned_free_list(w, gpu->free_pinned);
        idist__pinned_free_list(w, gpu->abandoned_pinned);
    }

    gpu->stuck = gpu->stuck || busy;
    if (!gpu->stuck) return;
    idist__log_print(
        &w->log, IDIST_LOG_WARN,
        "GPU %d has not finished its work: its memory stays allocated until the process ends",
        gpu->device);
}

// ---- gpu/ipc/ipc_probe.h -------------------------------------------------------------------------

// gpu/ipc/ipc_probe.h: checks that this rank can read the memory of other ranks
//
// Each rank writes a pattern into its arena, and all ranks read it. The pattern's values are
// nonzero integers, small enough that their sum over all ranks is exact. A driver that grants peer
// access does not know whether the data arrives intact. An IOMMU, or the access control (ACS) of a
// PCIe switch, may corrupt the data that one GPU reads from another. The GPU then reads zeros or
// garbage, without an error.

#define IDIST__IPC_PROBE 4096
#define IDIST__IPC_PROBE_MS 10000 // time that reading the patterns may take

static float idist__ipc_probe_value(int rank, size_t i) {
    uint64_t mixed = idist__hash_mix((uint64_t)rank + 1, i);
    return (float)((mixed & 0xfffff) | 1);
}

typedef struct idist__ipc_probe {
    cudaStream_t stream; // for the probe alone; abandoned if a copy never ends
    float *seen;         // pinned memory for the data that the probe reads
    int64_t deadline_ns;
    char text[200];
} idist__ipc_probe;

// Sets the deadline for one step of the probe. Each step has its own deadline, because the ranks
// may begin a step at very different times.
static void idist__ipc_probe_set_deadline(const idist__world *w, idist__ipc_probe *probe) {
    int most_ms = w->cfg.init_timeout_ms / 2;

    if (most_ms <= 0 || most_ms > IDIST__IPC_PROBE_MS) most_ms = IDIST__IPC_PROBE_MS;
    probe->deadline_ns = idist__os_clock_deadline(most_ms);
}

// Waits until the stream finishes, or until the deadline, because the stream may never finish.
// Returns false at the deadline or after an error.
static bool idist__ipc_probe_wait(const idist__ipc_probe *probe, cudaError_t *error) {
    int turns = 0;

    while (*error == cudaSuccess) {
        *error = cudaStreamQuery(probe->stream);
        if (*error == cudaSuccess) return true;
        if (*error != cudaErrorNotReady || idist__os_clock_now_ns() > probe->deadline_ns)
            return false;
        *error = cudaSuccess;
        idist__gpu_device_nap(&turns);
    }

    return false;
}

static cudaError_t idist__ipc_probe_write(const idist_group *g, idist__ipc_probe *probe) {
    size_t i, nbytes = IDIST__IPC_PROBE * sizeof(float);
    char *at = idist__gpu_group_of(g)->own_arena->data;
    cudaError_t error = cudaStreamCreateWithFlags(&probe->stream, cudaStreamNonBlocking);

    if (error == cudaSuccess) error = cudaMallocHost((void **)&probe->seen, nbytes);
    if (error != cudaSuccess) return error;

    idist__ipc_probe_set_deadline(g->w, probe);
    for (i = 0; i < IDIST__IPC_PROBE; i++) probe->seen[i] = idist__ipc_probe_value(g->rank, i);
    error = cudaMemcpyAsync(at, probe->seen, nbytes, cudaMemcpyDefault, probe->stream);
    idist__ipc_probe_wait(probe, &error);

    return error;
}

// Copies device memory at `from` to the host. Returns true if the copy equals the pattern of
// `rank`, or the sum of all ranks' patterns if `rank` is -1.
static bool idist__ipc_probe_check(const idist_group *g, idist__ipc_probe *probe, const char *from,
                                   int rank, cudaError_t *error) {
    size_t i, nbytes = IDIST__IPC_PROBE * sizeof(float);
    int k, first = rank < 0 ? 0 : rank, last = rank < 0 ? g->size - 1 : rank;
    float want;

    if (*error == cudaSuccess)
        *error = cudaMemcpyAsync(probe->seen, from, nbytes, cudaMemcpyDefault, probe->stream);
    if (!idist__ipc_probe_wait(probe, error)) return false;

    for (i = 0; i < IDIST__IPC_PROBE; i++) {
        for (want = 0, k = first; k <= last; k++) want += idist__ipc_probe_value(k, i);
        if (probe->seen[i] != want) return false;
    }

    return true;
}

// Checks that this rank reads correct data from all ranks' arenas, both by copies from device to
// device and with a kernel. A copy to the host would prove nothing, because the device that owns
// the memory would make the copy.
static cudaError_t idist__ipc_probe_read(const idist_group *g, idist__ipc_probe *probe) {
    const idist__gpu *gpu = idist__gpu_of(g->w);
    const idist__gpu_group *gg = idist__gpu_group_of(g);
    const char *mine = gpu->rank_infos[g->ranks[g->rank]].bus_id, *other = mine, *cause = "";
    size_t nbytes = IDIST__IPC_PROBE * sizeof(float);
    char *copied = gg->own_arena->data + nbytes, *sum = copied + nbytes;
    cudaError_t error = cudaSuccess;
    idist__ptx_args args;
    bool right = true;
    int i;

    idist__ipc_probe_set_deadline(g->w, probe);
    memset(&args, 0, sizeof args);

    for (i = 0; i < g->size && right; i++) {
        args.in[i] = gg->arena[i];
        other = gpu->rank_infos[g->ranks[i]].bus_id;
        error = cudaMemcpyAsync(copied, gg->arena[i], nbytes, cudaMemcpyDefault, probe->stream);
        right = idist__ipc_probe_check(g, probe, copied, i, &error);
    }

    if (right) {
        args.out = sum;
        args.count = IDIST__IPC_PROBE;
        args.n = g->size;
        args.op = IDIST_SUM;
        error =
            idist__ipc_kernel_launch(gpu, IDIST_F32 - IDIST_F16, &args, args.count, probe->stream);
        right = idist__ipc_probe_check(g, probe, sum, -1, &error);
        for (i = 0; i < g->size && !right && !strcmp(mine, other); i++)
            other = gpu->rank_infos[g->ranks[i]].bus_id; // a GPU that may be the cause
    }

    if (right || (error != cudaSuccess && error != cudaErrorNotReady)) return error;

    if (strcmp(mine, other))
        cause =
            ": an IOMMU or PCIe ACS redirects the reads of peers; boot with iommu=pt, or disable "
            "ACS";
    snprintf(probe->text, sizeof probe->text, "GPU %.16s %s GPU %.16s%s", mine,
             error == cudaSuccess ? "reads wrong data from" : "timed out reading from", other,
             cause);

    return cudaErrorUnknown;
}

// Frees the probe. Returns false if the stream has not finished. Such a stream may never finish, so
// the stream and the memory that it uses are abandoned.
static bool idist__ipc_probe_free(idist__ipc_probe *probe) {
    cudaError_t error = cudaSuccess;
    bool done =
        !probe->stream || idist__ipc_probe_wait(probe, &error) || error != cudaErrorNotReady;

    if (probe->stream && done) {
        cudaStreamDestroy(probe->stream);
        cudaFreeHost(probe->seen);
    }

    cudaGetLastError();

    return done;
}

// ---- gpu/ipc/ipc_setup.h -------------------------------------------------------------------------

// gpu/ipc/ipc_setup.h: what the members of a group set up in the group's first call
//
//     own     load the kernels; take an arena, and write a pattern into it
//     others  exchange the handles; map the other ranks' arenas, and read the patterns
//     agree   if any rank has failed, the group is staged

// Handles a group in which a rank cannot use IPC. Fails if the user requires IPC. Otherwise warns,
// and stages the group from now on.
static idist_status idist__ipc_setup_without(idist_group *g, const char *reason) {
    idist__ipc_arena_release(g); // a later call of the group may set up an arena again
    if (idist__gpu_of(g->w)->rank_infos[0].wanted_backend == IDIST__BY_IPC)
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "CUDA IPC cannot be used: %s; IDIST_DEVICE_BACKEND=staged needs no IPC",
                           reason);
    idist__log_print(&g->w->log, IDIST_LOG_WARN,
                     "CUDA IPC cannot be used (%s): device memory is staged", reason);
    idist__gpu_group_of(g)->path = IDIST__BY_STAGING;

    return IDIST_OK;
}

typedef struct idist__ipc_setup {
    idist__ipc_rank_info mine, *infos; // of this rank, and of all ranks
    idist__ipc_probe probe;
    bool stuck;        // true if the probe never ends
    cudaError_t error; // the first error of this rank
} idist__ipc_setup;

// Sets up this rank's part: loads the kernels, takes an arena and writes a pattern into the arena.
// Releases the lock meanwhile.
static void idist__ipc_setup_own(idist_group *g, idist__ipc_setup *setup) {
    idist__world *w = g->w;
    const idist__gpu *gpu = idist__gpu_of(w);

    setup->mine.process = idist__ipc_arena_process();
    setup->error = gpu->stuck || gpu->closed ? cudaErrorNotReady : idist__ipc_kernel_need(w);
    if (setup->error == cudaSuccess) setup->error = idist__ipc_arena_take(g, &setup->mine);
    idist__os_mutex_unlock(&w->lock);
    if (setup->error == cudaSuccess && g->size > 1)
        setup->error = idist__ipc_probe_write(g, &setup->probe);
    idist__world_lock(w);
    setup->mine.failed = setup->error != cudaSuccess;
}

// Maps the arenas of the other ranks and reads each arena once. Releases the lock meanwhile.
static idist_status idist__ipc_setup_others(idist_group *g, idist__ipc_setup *setup) {
    idist__world *w = g->w;
    idist_status status = idist__survey(g, &setup->mine, setup->infos, sizeof setup->mine);
    bool all_have_arenas = status == IDIST_OK && g->size > 1;
    int i;

    if (status == IDIST_OK && setup->error == cudaSuccess)
        setup->error = idist__ipc_arena_map_all(g, setup->infos);
    for (i = 0; i < g->size && all_have_arenas; i++) all_have_arenas = !setup->infos[i].failed;
    if (!all_have_arenas || setup->error != cudaSuccess) return status;

    idist__os_mutex_unlock(&w->lock);
    setup->error = idist__ipc_probe_read(g, &setup->probe);
    idist__world_lock(w);

    return status;
}

// Abandons the arenas of all ranks if any rank's probe never ends. Such a probe may read the arena
// of any other rank.
static idist_status idist__ipc_setup_strand_all(idist_group *g, idist__ipc_setup *setup) {
    idist_status status;
    bool any = false;
    int i;

    setup->mine.failed = setup->stuck;
    status = idist__survey(g, &setup->mine, setup->infos, sizeof setup->mine);
    for (i = 0; i < g->size && status == IDIST_OK; i++) any = any || setup->infos[i].failed;
    if (any) idist__ipc_arena_abandon(g);

    return status;
}

// Agrees on the outcome, which is the same for all members: the group uses IPC, is staged, or
// fails.
static idist_status idist__ipc_setup_agree(idist_group *g, idist__ipc_setup *setup) {
    bool failed = setup->error != cudaSuccess, all = false;
    char reason[256] = "";
    idist_status status;

    if (failed) idist__text_copy(reason, sizeof reason, cudaGetErrorString(setup->error));
    if (setup->probe.text[0]) idist__text_copy(reason, sizeof reason, setup->probe.text);
    status = idist__gpu_agree_all_succeeded(g, failed, reason, sizeof reason, &all);
    if (status == IDIST_OK && !all) status = idist__ipc_setup_strand_all(g, setup);

    return status == IDIST_OK && !all ? idist__ipc_setup_without(g, reason) : status;
}

// Sets up the arenas of a group. If a rank cannot set up its arena, the group is staged, or the
// call fails if the user requires IPC. All members call this function. Releases the lock meanwhile.
static idist_status idist__ipc_setup_prepare(idist_group *g) {
    idist__world *w = g->w;
    idist__gpu *gpu = idist__gpu_of(w);
    idist__ipc_setup setup;
    idist_status status = IDIST_ERR_NO_MEMORY;

    memset(&setup, 0, sizeof setup);
    setup.infos = (idist__ipc_rank_info *)idist__mem_alloc(&w->cfg.mem,
                                                           sizeof *setup.infos * (size_t)g->size);
    if (setup.infos) status = IDIST_OK;
    gpu->user_count++;
    idist__ipc_setup_own(g, &setup);
    status = idist__gpu_leave_goes_on(g, status);
    if (status == IDIST_OK) status = idist__ipc_setup_others(g, &setup);

    idist__os_mutex_unlock(&w->lock);
    setup.stuck = !idist__ipc_probe_free(&setup.probe);
    idist__world_lock(w);

    if (setup.stuck) {
        gpu->stuck = true;
        idist__ipc_arena_abandon(g);
    }

    status = idist__gpu_leave_goes_on(g, status);
    if (status == IDIST_OK) status = idist__ipc_setup_agree(g, &setup);
    idist__mem_free(&w->cfg.mem, setup.infos);
    gpu->user_count--;

    return status;
}

// ---- gpu/ipc/ipc_call.h --------------------------------------------------------------------------

// gpu/ipc/ipc_call.h: calls of ranks that read each other's device memory
//
// On one host, idist uses CUDA IPC if NCCL cannot be used: because ranks share a GPU, or because
// NCCL is missing. IPC needs CUDA 12.8 or later. With an older CUDA, and wherever IPC does not
// work, the group is staged through host memory.
//
// The device backend "ipc" supports all collectives except barriers, prefix sums and v-forms. The
// backend reduces F16, BF16, F32 and F64 by SUM, PROD, MIN, MAX and AVG, and F32 and F64 also by
// premultiplied sums. All other calls are staged. Operands are combined in rank order, so the
// results have the same bits as a reduction in host memory that the ranks share.
//
// WHAT IT COSTS
//
// In each group that makes IPC calls, every rank allocates 64 MiB of device memory. When the group
// is closed, the memory is kept for the next group. Each call first copies its data into this
// memory.
//
// The kernels are compiled once per world, in the world's first IPC call. The first call of each
// group also reads the memory of every rank once. If the driver is too old for the kernels, the
// group is staged, with a warning. The group is also staged, with a warning, if the machine
// corrupts the data that one GPU reads from another. An IOMMU or PCIe ACS may cause such errors:
// boot with iommu=pt, or disable ACS.
//
// The ranks of a host can read each other's device memory, even if they share a GPU. Each rank has
// an arena that the other ranks map. A chunk of a call is first given and then taken:
//
//     give      own contribution -> own arena      (device)
//     take      others' arenas -> receive buffer   (device: a reduction kernel, or copies)
//
// In a large all_reduce, each rank takes and reduces only its own slice, and then collects the
// slices that other ranks reduced:
//
//     give      all but the own slice -> own arena
//     take      own slice, from the send buffer and from the others' arenas
//                   -> own arena and receive buffer
//     collect   the slices that the others have reduced -> receive buffer
//
// For each byte of the message, the device reads and writes 2 (n - 1) / n bytes in `give` and as
// many in `collect`, and 1 + 2 / n bytes in `take`. The sum is 5 - 2 / n bytes. Two bytes are
// unavoidable. To reach two, the ranks would have to map the program's own buffers. But mapped
// memory must not be freed, and idist cannot know when the program frees a buffer.
//
// The device's work for a call is divided into phases. A rank that has finished a phase meets the
// other ranks on the host, where the first meeting compares the ranks' calls. Data that is given in
// one phase can therefore be taken `depth` phases later:
//
//     phase      0      1      2      3      4      5      6         three chunks, depth 2
//     give       0      1      2
//     take                     0      1      2
//     collect                                0      1      2
//     met            0      1      2      3      4      5      6     the device runs the next phase
//
// Phase p begins when all ranks have met for phase p - depth. Chunk c is in slot c % 4 of the
// arena. In phase c + 4 a rank gives chunk c + 4 into the same slot. Before phase c + 4 begins, all
// ranks have finished phase c + 2, in which they took chunk c. A rank's own slice of the slot holds
// the result of the reduction. The other ranks collect this result in phase c + 4, and the rank
// overwrites it only in phase c + 6. A single chunk needs no pipeline: its depth is 1. The ranks
// also meet after the last phase, so that no rank reads an arena whose owner has finished the call.
//
// No kernel waits for another rank, so processes that share a GPU may take turns on the GPU.
//
//     idist__gpu_engine_start      the call gets its fingerprint and enters the group's queue
//     idist__ipc_call_step         enqueues the next phases; starts a meeting when a phase ends
//     idist__gpu_engine_part_done  the ranks have met; idist__ipc_call_step is called again

enum { IDIST__IPC_ELEMENT = 256 }; // largest element, in bytes

// Returns true if IPC supports a call. All ranks get the same answer.
static bool idist__ipc_call_supports(const idist_group *g, const idist__call *call) {
    if (idist__kind_is_p2p(call->kind) || idist__kind_is_v(call->kind)) return false;
    if (call->kind == IDIST__SCAN || call->kind == IDIST__EXSCAN || call->kind == IDIST__BARRIER)
        return false;
    if (idist_dtype_size(call->dtype) > IDIST__IPC_ELEMENT) return false; // a chunk must hold many
    if (!idist__kind_reduces(call->kind)) return true;
    if (!idist__dtype_is_float(call->dtype) || idist_dtype_size(call->dtype) < 2) return false;
    if (idist__gpu_task_op_is_premul(g, call))
        return !idist__dtype_is_narrow(call->dtype); // a 16-bit float would be rounded twice

    return idist__reduce_op_is_arithmetic(call->op);
}

static bool idist__ipc_call_is_large(const idist__task *t) {
    const idist__gpu_op *op = idist__gpu_op_of(t);
    if (op->call.kind != IDIST__ALL_REDUCE || t->group->size == 1) return false;
    return op->call.count * op->size > IDIST__IPC_SMALL;
}

// Returns the index of the first element of the slice of `rank` in a chunk of k elements. Slices
// consist of whole cache lines and are at the same place in all chunks of a call. So a rank can
// give the other slices of a new chunk while the other ranks collect its own slice of the slot's
// previous chunk.
static size_t idist__ipc_call_slice_begin(const idist__task *t, size_t k, int rank) {
    const idist__gpu_op *op = idist__gpu_op_of(t);
    size_t line = 128 / op->size, n = (size_t)t->group->size;
    size_t at = ((op->chunk_count + n - 1) / n + line - 1) / line * line * (size_t)rank;
    return at < k ? at : k;
}

// Multiplies this rank's contribution to a premultiplied sum by the rank's own factor. Does nothing
// for other calls.
static cudaError_t idist__ipc_call_premultiply(const idist__task *t, void *data, size_t count) {
    const idist_group *g = t->group;
    const idist__call *call = &idist__gpu_op_of(t)->call;

    if (!idist__kind_reduces(call->kind) || !idist__gpu_task_op_is_premul(g, call))
        return cudaSuccess;
    return idist__ipc_kernel_scale(idist__gpu_of(g->w), data, count, call->dtype,
                                   idist__world_user_op(g, call)->factor,
                                   idist__gpu_group_of(g)->stream[IDIST__STREAM_OUT]);
}

// Gives the elements from `begin` up to `end` of a large all_reduce: copies them from the send
// buffer to the same place in the arena.
static cudaError_t idist__ipc_call_give_part(const idist__task *t, char *arena, const char *send,
                                             size_t begin, size_t end) {
    size_t size = idist__gpu_op_of(t)->size, count = end - begin;
    cudaStream_t stream = idist__gpu_group_of(t->group)->stream[IDIST__STREAM_OUT];
    char *to = arena + begin * size;
    cudaError_t error;

    if (!count) return cudaSuccess;
    error = idist__gpu_task_copy(to, 0, send + begin * size, 0, count, 1, size, stream);
    return error == cudaSuccess ? idist__ipc_call_premultiply(t, to, count) : error;
}

// Gives this rank's contribution to the chunk of k elements that begins at element `at`.
static cudaError_t idist__ipc_call_give(const idist__task *t, char *arena, size_t at, size_t k) {
    const idist_group *g = t->group;
    const idist__gpu_op *op = idist__gpu_op_of(t);
    const idist__call *call = &op->call;
    idist__gpu_shape shape = idist__gpu_task_shape_of(g, call);
    const void *buffer = call->kind == IDIST__BROADCAST ? call->recv : call->send;
    const char *from = (const char *)buffer + at * op->size;
    cudaStream_t stream = idist__gpu_group_of(g)->stream[IDIST__STREAM_OUT];
    cudaError_t error;

    if (idist__ipc_call_is_large(t)) {
        error = idist__ipc_call_give_part(t, arena, from, 0,
                                          idist__ipc_call_slice_begin(t, k, g->rank));
        if (error != cudaSuccess) return error;
        return idist__ipc_call_give_part(t, arena, from,
                                         idist__ipc_call_slice_begin(t, k, g->rank + 1), k);
    }

    if (call->kind == IDIST__BROADCAST) shape.send = call->root == g->rank;
    error = idist__gpu_task_copy(arena, k, from, call->count, k, shape.send, op->size, stream);

    return error == cudaSuccess ? idist__ipc_call_premultiply(t, arena, k * shape.send) : error;
}

// Reduces this rank's slice of a large all_reduce into the rank's arena and receive buffer. If one
// of the program's buffers is not aligned to 16 bytes, a separate copy is faster than a kernel that
// accesses unaligned data.
static cudaError_t idist__ipc_call_take_slice(const idist__task *t, char *const *arena, size_t at,
                                              size_t k) {
    const idist_group *g = t->group;
    const idist__gpu_op *op = idist__gpu_op_of(t);
    const idist__call *call = &op->call;
    size_t begin = idist__ipc_call_slice_begin(t, k, g->rank);
    size_t count = idist__ipc_call_slice_begin(t, k, g->rank + 1) - begin;
    size_t offset = begin * op->size;
    const char *send = (const char *)call->send + at * op->size;
    char *out = arena[g->rank] + offset, *to = (char *)call->recv + at * op->size + offset;
    bool premul = idist__gpu_task_op_is_premul(g, call),
         aligned = (uintptr_t)to % IDIST__PTX_NBYTES == 0;
    cudaError_t error = cudaSuccess;
    idist__ptx_args args;

    memset(&args, 0, sizeof args);
    args.out = out;
    args.also = aligned ? to : NULL;
    args.count = count;
    if (premul || (uintptr_t)(send + offset) % IDIST__PTX_NBYTES)
        error = idist__ipc_call_give_part(t, arena[g->rank], send, begin, begin + count);
    else args.in[g->rank] = send + offset;

    if (error == cudaSuccess) error = idist__ipc_kernel_reduce(t, arena, offset, &args);
    if (error != cudaSuccess || aligned) return error;

    return idist__gpu_task_copy(to, 0, out, 0, count, 1, op->size,
                                idist__gpu_group_of(g)->stream[IDIST__STREAM_OUT]);
}

// Reads this rank's part of a chunk from the arenas of all ranks, and reduces or copies the part to
// the receive buffer.
static cudaError_t idist__ipc_call_take(const idist__task *t, char *const *arena, size_t at,
                                        size_t k) {
    const idist_group *g = t->group;
    const idist__gpu_op *op = idist__gpu_op_of(t);
    const idist__call *call = &op->call;
    cudaStream_t stream = idist__gpu_group_of(g)->stream[IDIST__STREAM_OUT];
    char *to = (char *)call->recv + at * op->size;
    size_t row = (size_t)g->rank * k * op->size;
    bool root = call->root == g->rank;
    cudaError_t error = cudaSuccess;
    idist__ptx_args args;
    int i;

    if (idist__ipc_call_is_large(t)) return idist__ipc_call_take_slice(t, arena, at, k);
    memset(&args, 0, sizeof args);
    args.out = to;
    args.count = k;

    switch (call->kind) {
    case IDIST__ALL_REDUCE: return idist__ipc_kernel_reduce(t, arena, 0, &args);
    case IDIST__REDUCE: return root ? idist__ipc_kernel_reduce(t, arena, 0, &args) : cudaSuccess;
    case IDIST__REDUCE_SCATTER: return idist__ipc_kernel_reduce(t, arena, row, &args);
    case IDIST__BROADCAST:
        return root ? cudaSuccess
                    : idist__gpu_task_copy(to, k, arena[call->root], k, k, 1, op->size, stream);
    case IDIST__SCATTER:
        return idist__gpu_task_copy(to, k, arena[call->root] + row, k, k, 1, op->size, stream);
    case IDIST__GATHER:
        if (!root) return cudaSuccess;
        break;
    default: break;
    }

    if (call->kind != IDIST__ALL_TO_ALL) row = 0;
    for (i = 0; i < g->size && error == cudaSuccess; i++) // gather, all_gather, all_to_all
        error = idist__gpu_task_copy(to + (size_t)i * call->count * op->size, k, arena[i] + row, k,
                                     k, 1, op->size, stream);

    return error;
}

// Collects the slices of a large all_reduce that the other ranks have reduced.
static cudaError_t idist__ipc_call_collect(const idist__task *t, char *const *arena, size_t at,
                                           size_t k) {
    const idist__gpu_op *op = idist__gpu_op_of(t);
    char *to = (char *)op->call.recv + at * op->size;
    cudaStream_t stream = idist__gpu_group_of(t->group)->stream[IDIST__STREAM_OUT];
    cudaError_t error = cudaSuccess;
    int i;

    for (i = 0; i < t->group->size && error == cudaSuccess; i++) {
        size_t offset = idist__ipc_call_slice_begin(t, k, i) * op->size;
        size_t count =
            idist__ipc_call_slice_begin(t, k, i + 1) - idist__ipc_call_slice_begin(t, k, i);
        const char *from = arena[i] + offset;
        if (i == t->group->rank) continue;
        error = idist__gpu_task_copy(to + offset, 0, from, 0, count, 1, op->size, stream);
    }

    return error;
}

typedef enum idist__ipc_phase_step {
    IDIST__IPC_GIVE,
    IDIST__IPC_TAKE,
    IDIST__IPC_COLLECT
} idist__ipc_phase_step;

static size_t idist__ipc_call_depth(const idist__gpu_op *op) { return op->nchunks > 1 ? 2 : 1; }

// Enqueues one step of the next phase, if there is a chunk for the step.
static cudaError_t idist__ipc_call_enqueue_step(const idist__task *t, idist__ipc_phase_step step) {
    const idist__gpu_group *gg = idist__gpu_group_of(t->group);
    const idist__gpu_op *op = idist__gpu_op_of(t);
    size_t behind = (size_t)step * idist__ipc_call_depth(op), nth = op->enqueued_count - behind;
    size_t at = nth * op->chunk_count, k, slot;
    char *arena[IDIST__IPC_RANKS];
    int i;

    if (op->enqueued_count < behind || nth >= op->nchunks) return cudaSuccess;
    if (idist__gpu_of(t->group->w)->closed) return cudaErrorNotPermitted;

    k = op->call.count - at < op->chunk_count ? op->call.count - at : op->chunk_count;
    slot = nth % IDIST__IPC_SLOTS * IDIST__IPC_CHUNK;
    for (i = 0; i < t->group->size; i++) arena[i] = gg->arena[i] + slot;
    if (step == IDIST__IPC_GIVE) return idist__ipc_call_give(t, arena[t->group->rank], at, k);
    if (step == IDIST__IPC_TAKE) return idist__ipc_call_take(t, arena, at, k);

    return idist__ipc_call_collect(t, arena, at, k);
}

// Performs one step of the call at the head of its group's queue. op->enqueued_count is the number
// of phases that are enqueued. For op->started_count of these phases, the ranks have met or are
// about to meet. Returns false if the call waits or has failed.
static bool idist__ipc_call_step(idist__task *t) {
    idist__gpu_op *op = idist__gpu_op_of(t);
    size_t depth = idist__ipc_call_depth(op), lag = idist__ipc_call_is_large(t) ? 2 : 1;
    size_t nphases = op->nchunks + lag * depth, ahead;
    int step, last_step = idist__ipc_call_is_large(t) ? IDIST__IPC_COLLECT : IDIST__IPC_TAKE;
    cudaStream_t stream = idist__gpu_group_of(t->group)->stream[IDIST__STREAM_OUT];

    if (op->with_backend) return false;
    idist__gpu_task_set_waiting(t, true);

    if (op->state == IDIST__GPU_WAIT) {
        if (!idist__gpu_task_event_done(t, op->event)) return false;
        op->state = IDIST__GPU_MOVE;
    }

    ahead = op->started_count + depth < nphases ? op->started_count + depth : nphases;

    for (; op->enqueued_count < ahead && op->error == cudaSuccess; op->enqueued_count++) {
        for (step = IDIST__IPC_GIVE; step <= last_step && op->error == cudaSuccess; step++)
            op->error = idist__ipc_call_enqueue_step(t, (idist__ipc_phase_step)step);
        if (op->error == cudaSuccess)
            op->error = cudaEventRecord(op->slots[op->enqueued_count % 2].out, stream);
    }

    if (op->started_count == nphases) {
        idist__gpu_task_complete(t);
        return true;
    }

    if (!idist__gpu_task_event_done(t, op->slots[op->started_count % 2].out)) return false;
    op->started_count++;
    idist__gpu_task_start_barrier(t);

    return true;
}

// ---- gpu/ipc/own.h -------------------------------------------------------------------------------

// gpu/ipc/own.h: device memory of this rank alone, for idist_train.h
//
// All work is enqueued on the program's stream (opts->stream).

typedef struct idist__own {
    idist__world *w;
    idist__gpu *gpu;
    idist__gpu_guard guard;
    cudaStream_t stream;
    cudaError_t error;
} idist__own;

// Makes the device of the group's world the current device until idist__own_end. Loads the kernels
// if `kernels` is true. The lock is not held meanwhile, because allocating memory, or enqueuing on
// a full queue, may wait for the device. Closing the world waits for us.
static idist_status idist__own_begin(idist__own *own, const char *name, const idist_opts *opts,
                                     bool kernels) {
    idist_group *g;
    idist_status status;

    memset(own, 0, sizeof *own);
    status = idist__call_enter(name, opts->group, &g);
    if (status != IDIST_OK) return status;
    own->w = g->w;
    own->gpu = idist__gpu_of(g->w);
    own->stream = (cudaStream_t)opts->stream;
    if (!own->gpu || !own->gpu->host_backend)
        status = idist__fail(IDIST_ERR_NO_DEVICE, "%s: %s", name, g->w->about.no_device);
    else if (g->w->progress.stops)
        status = idist__fail(IDIST_ERR_STATE, "%s: another thread is closing the world", name);

    if (status == IDIST_OK) {
        own->gpu->user_count++;
        own->guard = idist__gpu_device_enter(own->gpu);
        if (kernels) own->error = idist__ipc_kernel_need(g->w);
    }

    idist__os_mutex_unlock(&own->w->lock);

    return status;
}

static idist_status idist__own_end(const idist__own *own, const char *name) {
    idist__gpu_device_leave(own->gpu, own->guard);
    idist__world_lock(own->w);
    own->gpu->user_count--;
    idist__os_mutex_unlock(&own->w->lock);
    return own->error == cudaSuccess ? IDIST_OK : idist__gpu_device_fail(name, own->error);
}

// Copies nbytes of device memory, or zeroes the memory at `to` if `from` is NULL.
IDIST__UNUSED static idist_status idist__own_copy(const char *name, const idist_opts *opts,
                                                  void *to, const void *from, size_t nbytes) {
    idist__own own;
    idist_status status = idist__own_begin(&own, name, opts, false);

    if (status != IDIST_OK) return status;
    own.error = from ? cudaMemcpyAsync(to, from, nbytes, cudaMemcpyDeviceToDevice, own.stream)
                     : cudaMemsetAsync(to, 0, nbytes, own.stream);
    return idist__own_end(&own, name);
}

// Allocates zeroed memory. The caller frees the memory with idist__own_free.
IDIST__UNUSED static idist_status idist__own_alloc(const char *name, const idist_opts *opts,
                                                   void **p, size_t nbytes) {
    idist__own own;
    idist_status status = idist__own_begin(&own, name, opts, false);

    *p = NULL;
    if (status != IDIST_OK) return status;
    own.error = cudaMalloc(p, nbytes ? nbytes : 1);
    if (own.error == cudaSuccess) own.error = cudaMemsetAsync(*p, 0, nbytes, own.stream);
    return idist__own_end(&own, name);
}

IDIST__UNUSED static void idist__own_free(void *p) {
    idist__gpu_home home;

    if (!p) return;
    idist__gpu_device_home_enter(&home);
    cudaFree(p);
    cudaGetLastError();
    idist__gpu_device_home_leave(&home);
}

// Checks that the rank has a device and, if `kernels` is true, that the kernels can be loaded.
IDIST__UNUSED static idist_status idist__own_ready(const char *name, const idist_opts *opts,
                                                   bool kernels) {
    idist__own own;
    idist_status status = idist__own_begin(&own, name, opts, kernels);
    return status == IDIST_OK ? idist__own_end(&own, name) : status;
}

// Sets *holds to true if p is in device memory. On a rank without a device, *holds is always false.
IDIST__UNUSED static idist_status idist__own_holds(const char *name, const idist_opts *opts,
                                                   const void *p, bool *holds) {
    idist__own own;
    idist_status status = idist__own_begin(&own, name, opts, false);

    *holds = false;
    if (status != IDIST_OK) return status == IDIST_ERR_NO_DEVICE ? IDIST_OK : status;
    own.error = idist__gpu_device_owns_pointer(p, holds);
    return idist__own_end(&own, name);
}

// Multiplies elements of type F16, BF16, F32 or F64 by a factor. The data must be aligned to an
// element.
IDIST__UNUSED static idist_status idist__own_scale(const char *name, const idist_opts *opts,
                                                   void *data, size_t count, idist_dtype dtype,
                                                   double factor) {
    idist__own own;
    idist_status status = idist__own_begin(&own, name, opts, true);

    if (status != IDIST_OK) return status;
    if (own.error == cudaSuccess)
        own.error = idist__ipc_kernel_scale(own.gpu, data, count, dtype, factor, own.stream);
    return idist__own_end(&own, name);
}

// Converts floats to 16-bit floats, or 16-bit floats to floats.
IDIST__UNUSED static idist_status idist__own_pack(const char *name, const idist_opts *opts,
                                                  const idist__pack_args *args) {
    idist__own own;
    idist_status status = idist__own_begin(&own, name, opts, true);

    if (status != IDIST_OK) return status;
    if (own.error == cudaSuccess && args->count)
        own.error =
            idist__ipc_kernel_launch(own.gpu, IDIST__PACK_HALVES, args, args->count, own.stream);

    return idist__own_end(&own, name);
}

// ---- gpu/nccl/nccl_load.h ------------------------------------------------------------------------

// gpu/nccl/nccl_load.h: NCCL's functions, found at run time

typedef struct idist__nccl_id { // ncclUniqueId
    char bytes[128];
} idist__nccl_id;

// NCCL's enums are ints and ncclComm_t is a pointer, so nccl.h is not needed. tests/gpu/nccl_abi.c
// compares these numbers with those in an nccl.h.
enum {
    IDIST__NCCL_OK = 0,
    IDIST__NCCL_CUDA_ERROR = 1,
    IDIST__NCCL_INTERNAL_ERROR = 3,
    IDIST__NCCL_IN_PROGRESS = 7
};
enum { IDIST__NCCL_REMOTE_ERROR = 6, IDIST__NCCL_TIMEOUT = 8 }; // another rank is the cause
enum {                                                          // ncclDataType_t
    IDIST__NCCL_I8 = 0,
    IDIST__NCCL_U8 = 1,
    IDIST__NCCL_I32 = 2,
    IDIST__NCCL_U32 = 3,
    IDIST__NCCL_I64 = 4,
    IDIST__NCCL_U64 = 5,
    IDIST__NCCL_F16 = 6,
    IDIST__NCCL_F32 = 7,
    IDIST__NCCL_F64 = 8,
    IDIST__NCCL_BF16 = 9,
    IDIST__NCCL_F8E4M3 = 10,
    IDIST__NCCL_F8E5M2 = 11
};
enum { // ncclRedOp_t
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
    int version;                              // 22809 is 2.28.9; 0 if there is no NCCL
    int (*CommRevoke)(void *comm, int flags); // NULL if this version has none
#define IDIST__X(result, name, args) result(*name) args;
    IDIST__NCCL_FUNCTIONS(IDIST__X)
#undef IDIST__X
} idist__nccl;

#ifndef IDIST__NCCL_FILE
#define IDIST__NCCL_FILE "libnccl.so.2"
#endif

// Opens NCCL's library where the loader finds it, or otherwise in Python's environments.
static void *idist__nccl_load_library(void) {
    void *library = idist__os_library_open(IDIST__NCCL_FILE);

    if (!library) library = idist__python_library("nvidia/nccl/lib/" IDIST__NCCL_FILE);
    return library ? library : idist__os_library_open(IDIST__NCCL_FILE); // for the error text
}

// Fills the table of functions, or stores in `reason` why NCCL cannot be used. IDIST_NCCL_LIB names
// the library to load. If it is not set, a library that is linked with the program takes
// precedence. The library is never unloaded, because its threads may still run.
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
        snprintf(reason, capacity,
                 "the NCCL library that was loaded has no nccl%s; use NCCL 2.14 or later", missing);
    else if (nccl->GetVersion(&nccl->version) != IDIST__NCCL_OK)
        snprintf(reason, capacity, "ncclGetVersion failed");

    at = nccl->version >= 22807 ? idist__os_library_find(library, "ncclCommRevoke") : NULL;
    memcpy(&nccl->CommRevoke, &at, sizeof at);
}

// ---- gpu/nccl/nccl_job.h -------------------------------------------------------------------------

// gpu/nccl/nccl_job.h: NCCL calls that may never return, each in a thread of its own
//
// Creating, aborting or finalizing a communicator may wait for other ranks forever. A job makes
// such a call in a thread of its own. The thread that started the job waits until a deadline, and
// then leaves the job to itself:
//
//     group set up   init job      idist__gpu_setup_init_wait, up to the init time-out
//     group failed   abort job     idist__nccl_abort_wait for a moment, then idist__nccl_abort_reap
//     group closed   finalize job  idist__nccl_abort_reap, when the world is closed
//
// A communicator must not be aborted while a thread uses the communicator inside NCCL. From NCCL
// 2.28.7 on, the abort first calls ncclCommRevoke, which makes every such call return. With earlier
// versions, idist makes communicators non-blocking, so that calls return at once. In all versions,
// the abort then waits at the gate until no thread is inside.

#define IDIST__NCCL_CONFIG_MAGIC 0xcafebeef

// ncclConfig_t as of NCCL 2.14. Later versions accept this structure, too.
typedef struct idist__nccl_config {
    size_t nbytes;
    unsigned magic, version;
    int blocking;
} idist__nccl_config;

typedef enum idist__nccl_job_kind {
    IDIST__JOB_INIT,    // creates a communicator and connects its ranks
    IDIST__JOB_ABORT,   // ends the calls inside NCCL, and frees the communicator
    IDIST__JOB_FINALIZE // ends the communicator together with the other ranks
} idist__nccl_job_kind;

// A flag that is set while a thread is inside an NCCL call with a communicator. Allocated on the
// heap, because a job that never ends outlives the world.
typedef struct idist__nccl_gate {
    int inside; // atomic: 1 or 0
} idist__nccl_gate;

// The phases of an init job.
typedef enum idist__nccl_phase {
    IDIST__INIT_CREATING,
    IDIST__INIT_CONNECTING, // the communicator exists
    IDIST__INIT_DONE,       // the job no longer owns the communicator
    IDIST__INIT_GIVEN_UP    // no thread waits for the job any more
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
    // Init jobs only:
    int phase; // atomic: idist__nccl_phase
    idist__nccl_id id;
    void *config;        // a copy
    cudaStream_t stream; // stream on which the job connects the ranks
    char *buffer;        // memory for connecting; the job's thread frees both
    // Abort jobs only:
    idist__nccl_gate *gate;           // the job waits until no thread is inside
    struct idist__nccl_job *init_job; // the job waits for this init job, and frees it
    int64_t deadline_ns;              // deadline of both waits
    bool keep_memory; // a CUDA graph holds calls: do not free a revoked communicator
} idist__nccl_job;

#ifndef IDIST_NCCL_CONNECT_BYTES
#define IDIST_NCCL_CONNECT_BYTES (16 << 20)
#endif
#define IDIST__NCCL_LEAVE_MS 4000 // how long an abort waits for a thread to leave NCCL

static bool idist__nccl_job_is_given_up(const idist__nccl_job *job) {
    return __atomic_load_n(&job->phase, __ATOMIC_ACQUIRE) == IDIST__INIT_GIVEN_UP;
}

// Returns true if a job must stop waiting. A finalize job waits for the other ranks until the
// closing world leaves the job to itself.
static bool idist__nccl_job_must_stop(const idist__nccl_job *job) {
    if (job->kind == IDIST__JOB_INIT) return idist__nccl_job_is_given_up(job);
    if (job->kind == IDIST__JOB_ABORT) return idist__os_clock_now_ns() > job->deadline_ns;
    return __atomic_load_n(&job->state, __ATOMIC_ACQUIRE) == IDIST__JOB_STATE_LEFT;
}

// Waits for the final result of a call with a non-blocking communicator. Returns
// IDIST__NCCL_IN_PROGRESS if the job must stop waiting first.
static int idist__nccl_job_wait_result(const idist__nccl_job *job, int result) {
    int turns = 0;

    while (result == IDIST__NCCL_IN_PROGRESS && !idist__nccl_job_must_stop(job)) {
        idist__gpu_device_nap(&turns);
        if (job->nccl.CommGetAsyncError(job->comm, &result) != IDIST__NCCL_OK)
            return IDIST__NCCL_INTERNAL_ERROR;
    }

    return result;
}

// Makes NCCL connect the ranks, by using every algorithm once. NCCL connects ranks when it first
// uses an algorithm (NCCL_RUNTIME_CONNECT), and that call waits on the host until all ranks make
// the call. A program whose ranks run ahead of each other would hang there. Here, all ranks make
// the calls together.
//
// The algorithm that NCCL chooses depends on the operation, the size, and whether a switch can
// perform the reduction (sums of floats, yes; products, no). Broadcast and reduce use the ring, as
// do products of some sizes. On large clusters, calls larger than IDIST_NCCL_CONNECT_BYTES may get
// an algorithm that no smaller size gets. Pairs of ranks are connected only by their first message.
// Connecting all pairs here would take hundreds of MB of memory that a program without messages
// never needs.
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

// Waits until the device has finished the calls of idist__nccl_job_connect.
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

// Moves an init job to its next phase. Returns false if the job was given up.
static bool idist__nccl_job_enter_phase(idist__nccl_job *job, idist__nccl_phase to) {
    int from = (int)to - 1;

    return __atomic_compare_exchange_n(&job->phase, &from, (int)to, false, __ATOMIC_ACQ_REL,
                                       __ATOMIC_ACQUIRE);
}

// Runs an init job. If the job is given up, its thread aborts the communicator, unless another job
// does so (idist__gpu_setup_give_up).
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

// Frees an init job's stream and device memory. Neither CUDA call waits for work on the device.
static void idist__nccl_job_free_buffer(idist__nccl_job *job) {
    if (job->buffer) cudaFreeAsync(job->buffer, job->stream);
    if (job->stream) cudaStreamDestroy(job->stream);
    job->buffer = NULL;
    job->stream = NULL;
}

static bool idist__nccl_job_done(const idist__nccl_job *job) {
    return __atomic_load_n(&job->state, __ATOMIC_ACQUIRE) != 0;
}

// Frees a job and, after a completed abort, the gate. If the result is IDIST__NCCL_IN_PROGRESS, a
// thread is still inside NCCL and clears the gate when its call returns.
static void idist__nccl_job_free(idist__nccl_job *job) {
    if (job->kind == IDIST__JOB_ABORT && job->result != IDIST__NCCL_IN_PROGRESS) free(job->gate);
    free(job->config);
    free(job);
}

// Waits for a job until the deadline, then frees the job. Returns false if the job has not ended.
// The job is then left to itself, and *result is IDIST__NCCL_IN_PROGRESS.
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

// Aborts a communicator. NCCL frees what other threads may still use, so the abort has four steps:
//
//     1. Revoke the communicator, if NCCL can. Every call inside NCCL then returns.
//     2. Wait until the thread that creates the communicator ends.
//     3. Wait until the threads behind the gate have left NCCL.
//     4. Free the communicator, unless it was revoked and keep_memory is set.
//
// If a thread stays inside NCCL beyond the deadline, the communicator stays in memory and the
// result is IDIST__NCCL_IN_PROGRESS.
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

// Frees a job that has no thread. Does nothing if `job` is NULL.
static void idist__nccl_job_discard(idist__nccl_job *job) {
    if (!job) return;
    idist__nccl_job_free_buffer(job);
    free(job->config);
    free(job);
}

// Starts the thread of a job. If the thread cannot be started, frees the job and returns false.
// Also returns false if `job` is NULL.
static bool idist__nccl_job_start(idist__nccl_job *job) {
    if (job && idist__os_thread_start(&job->thread, idist__nccl_job_run, job) == 0) return true;
    idist__nccl_job_discard(job);
    return false;
}

// ---- gpu/nccl/nccl_issue.h -----------------------------------------------------------------------

// gpu/nccl/nccl_issue.h: the NCCL functions that serve a call

static const char *idist__nccl_issue_text(const idist__nccl *nccl, int result, char *text,
                                          size_t capacity) {
    const char *last = result == IDIST__NCCL_OK ? NULL : nccl->GetLastError(NULL);
    snprintf(text, capacity, "%s%s%.160s", nccl->GetErrorString(result), last && *last ? ": " : "",
             last ? last : "");
    return text;
}

// Returns the ncclDataType_t of a dtype, or -1 if NCCL has none.
static int idist__nccl_issue_type(idist_dtype dtype) {
    switch ((int)dtype) {
    case IDIST_I8: return IDIST__NCCL_I8;
    case IDIST_U8: return IDIST__NCCL_U8;
    case IDIST_I32: return IDIST__NCCL_I32;
    case IDIST_U32: return IDIST__NCCL_U32;
    case IDIST_I64: return IDIST__NCCL_I64;
    case IDIST_U64: return IDIST__NCCL_U64;
    case IDIST_F16: return IDIST__NCCL_F16;
    case IDIST_BF16: return IDIST__NCCL_BF16;
    case IDIST_F32: return IDIST__NCCL_F32;
    case IDIST_F64: return IDIST__NCCL_F64;
    case IDIST_F8E4M3: return IDIST__NCCL_F8E4M3;
    case IDIST_F8E5M2: return IDIST__NCCL_F8E5M2;
    default: return -1;
    }
}

// Returns the ncclRedOp_t of an op that NCCL supports.
static int idist__nccl_issue_op(idist_op op) {
    switch ((int)op) {
    case IDIST_PROD: return IDIST__NCCL_PROD;
    case IDIST_MIN: return IDIST__NCCL_MIN;
    case IDIST_MAX: return IDIST__NCCL_MAX;
    case IDIST_AVG: return IDIST__NCCL_AVG;
    default: return IDIST__NCCL_SUM;
    }
}

// Returns true if NCCL supports the call. All ranks get the same answer. NCCL has no tags and
// matches messages by order alone, so messages are supported only on a stream. A message that a
// probe has matched (IDIST__MRECV) was not sent through NCCL.
static bool idist__nccl_issue_supports(const idist_group *g, const idist__call *call,
                                       const void *stream) {
    if (idist__kind_is_p2p(call->kind)) return stream != NULL && call->label != IDIST__MRECV;
    if (call->kind == IDIST__SCAN || call->kind == IDIST__EXSCAN) return false;
    if (!idist__kind_reduces(call->kind)) return true;
    if ((call->dtype == IDIST_F8E4M3 || call->dtype == IDIST_F8E5M2) &&
        !idist__gpu_of(g->w)->nccl_reduces_f8)
        return false;
    return idist__nccl_issue_type(call->dtype) >= 0 &&
           (idist__reduce_op_is_arithmetic(call->op) || idist__gpu_task_op_is_premul(g, call));
}

// Returns true if NCCL reports no error. In an NCCL group, a call with a non-blocking communicator
// may return IDIST__NCCL_IN_PROGRESS, which is not an error.
static bool idist__nccl_issue_is_ok(int result) {
    return result == IDIST__NCCL_OK || result == IDIST__NCCL_IN_PROGRESS;
}

// Returns the result of an NCCL group: the first error, or otherwise IDIST__NCCL_IN_PROGRESS if
// NCCL is still working on the group.
static int idist__nccl_issue_merge_results(int calls, int end) {
    if (!idist__nccl_issue_is_ok(calls)) return calls;
    return end == IDIST__NCCL_OK ? calls : end;
}

// Performs a reduce_scatterv as one reduction to each rank.
static int idist__nccl_issue_reduce_scatterv(const idist__nccl *nccl, const idist_group *g,
                                             const idist__call *call, int type, int op, void *comm,
                                             cudaStream_t stream) {
    size_t size = idist_dtype_size(call->dtype);
    int result = nccl->GroupStart(), end;
    int i;

    for (i = 0; i < g->size && idist__nccl_issue_is_ok(result); i++) {
        const char *block = (const char *)call->send + idist__extent_block_at(call, i) * size;
        if (call->sendcounts[i])
            result =
                nccl->Reduce(block, call->recv, call->sendcounts[i], type, op, i, comm, stream);
    }

    end = nccl->GroupEnd();

    return idist__nccl_issue_merge_results(result, end);
}

static int idist__nccl_issue_reduce(const idist__nccl *nccl, const idist_group *g,
                                    const idist__call *call, void *comm, cudaStream_t stream) {
    int type = idist__nccl_issue_type(call->dtype);
    bool premul = idist__gpu_task_op_is_premul(g, call);
    int op = premul ? IDIST__NCCL_SUM : idist__nccl_issue_op(call->op);
    int result = IDIST__NCCL_OK;
    double factor = premul ? idist__world_user_op(g, call)->factor : 1;
    float narrow = (float)factor;
    void *scalar = call->dtype == IDIST_F64 ? (void *)&factor : &narrow;

    if (idist__dtype_is_narrow(call->dtype))
        idist__small_float_narrow(&narrow, &narrow, 1, call->dtype); // into its first bytes
    if (premul) result = nccl->RedOpCreatePreMulSum(&op, scalar, type, 1, comm);
    if (result != IDIST__NCCL_OK) return result;
    if (call->kind == IDIST__ALL_REDUCE)
        result = nccl->AllReduce(call->send, call->recv, call->count, type, op, comm, stream);
    else if (call->kind == IDIST__REDUCE)
        result =
            nccl->Reduce(call->send, call->recv, call->count, type, op, call->root, comm, stream);
    else if (call->kind == IDIST__REDUCE_SCATTERV)
        result = idist__nccl_issue_reduce_scatterv(nccl, g, call, type, op, comm, stream);
    else result = nccl->ReduceScatter(call->send, call->recv, call->count, type, op, comm, stream);
    if (premul) nccl->RedOpDestroy(op, comm);

    return result;
}

// Exchanges data between all pairs of ranks, as sends and receives of bytes. Each rank copies its
// own part.
static int idist__nccl_issue_exchange(const idist__nccl *nccl, const idist_group *g,
                                      const idist__call *call, const void *send, void *comm,
                                      cudaStream_t stream) {
    size_t size = idist_dtype_size(call->dtype), sent, got;
    int result = nccl->GroupStart(), end;
    int i, me = g->rank;

    for (i = 0; i < g->size && idist__nccl_issue_is_ok(result); i++) {
        const char *from = idist__extent_part(call, (char *)(uintptr_t)send, me, i, true, &sent);
        char *to = idist__extent_part(call, (char *)call->recv, i, me, false, &got);
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

// Allocates memory for NCCL in stream order. The caller frees the memory with cudaFreeAsync.
static cudaError_t idist__nccl_issue_alloc(const idist__gpu *gpu, void **p, size_t nbytes,
                                           cudaStream_t stream) {
    return gpu->pool ? cudaMallocFromPoolAsync(p, nbytes, gpu->pool, stream)
                     : cudaMallocAsync(p, nbytes, stream);
}

// Performs an in-place all_to_all or all_to_allv by sending a copy of the buffer. Stores the copy's
// address in *away; the caller frees the copy in stream order.
static int idist__nccl_issue_all_to_all_in_place(const idist__nccl *nccl, const idist_group *g,
                                                 const idist__call *call, void *comm,
                                                 cudaStream_t stream, void **away) {
    const idist__gpu *gpu = idist__gpu_of(g->w);
    size_t count = (size_t)g->size * call->count, nbytes;

    if (call->kind == IDIST__ALL_TO_ALLV)
        count = idist__extent_end(call->sendcounts, call->senddispls, g->size);
    nbytes = count * idist_dtype_size(call->dtype);
    if (!nbytes) return IDIST__NCCL_OK;
    if (idist__nccl_issue_alloc(gpu, away, nbytes, stream) != cudaSuccess ||
        cudaMemcpyAsync(*away, call->send, nbytes, cudaMemcpyDefault, stream) != cudaSuccess)
        return IDIST__NCCL_CUDA_ERROR;
    return idist__nccl_issue_exchange(nccl, g, call, *away, comm, stream);
}

static int idist__nccl_issue_all_gatherv(const idist__nccl *nccl, const idist_group *g,
                                         const idist__call *call, void *comm, cudaStream_t stream) {
    size_t size = idist_dtype_size(call->dtype);
    int result = nccl->GroupStart(), end;
    int i;

    for (i = 0; i < g->size && idist__nccl_issue_is_ok(result); i++) {
        char *to =
            (char *)call->recv + idist__extent_displ(call->recvcounts, call->recvdispls, i) * size;
        if (call->recvcounts[i])
            result = nccl->Broadcast(i == g->rank ? call->send : to, to, call->recvcounts[i] * size,
                                     IDIST__NCCL_U8, i, comm, stream);
    }

    end = nccl->GroupEnd();

    return idist__nccl_issue_merge_results(result, end);
}

static int idist__nccl_issue_call(const idist__gpu *gpu, const idist_group *g, idist__gpu_op *op,
                                  cudaStream_t stream) {
    const idist__nccl *nccl = gpu->nccl;
    const idist__call *call = &op->call;
    void *comm = op->comm;
    size_t nbytes = call->count * idist_dtype_size(call->dtype);

    if (!comm) return IDIST__NCCL_OK; // the group has failed
    if (call->kind == IDIST__BARRIER)
        return nccl->AllReduce(gpu->barrier_word, gpu->barrier_word, 1, IDIST__NCCL_I32,
                               IDIST__NCCL_MAX, comm, stream);
    if (call->kind == IDIST__ALL_GATHERV)
        return idist__nccl_issue_all_gatherv(nccl, g, call, comm, stream);
    if (call->kind == IDIST__REDUCE_SCATTERV)
        return idist__nccl_issue_reduce(nccl, g, call, comm, stream);
    if ((call->kind == IDIST__ALL_TO_ALL || call->kind == IDIST__ALL_TO_ALLV) &&
        call->send == call->recv)
        return idist__nccl_issue_all_to_all_in_place(nccl, g, call, comm, stream, &op->send_copy);
    if (idist__kind_is_v(call->kind) || call->kind == IDIST__ALL_TO_ALL ||
        call->kind == IDIST__GATHER || call->kind == IDIST__SCATTER)
        return idist__nccl_issue_exchange(nccl, g, call, call->send, comm, stream);
    if (!nbytes) return IDIST__NCCL_OK;
    if (call->kind == IDIST__BROADCAST)
        return nccl->Broadcast(call->recv, call->recv, nbytes, IDIST__NCCL_U8, call->root, comm,
                               stream);
    if (call->kind == IDIST__ALL_GATHER)
        return nccl->AllGather(call->send, call->recv, nbytes, IDIST__NCCL_U8, comm, stream);
    if (call->kind == IDIST__SEND)
        return nccl->Send(call->send, nbytes, IDIST__NCCL_U8, call->root, comm, stream);
    if (call->kind == IDIST__RECV)
        return nccl->Recv(call->recv, nbytes, IDIST__NCCL_U8, call->root, comm, stream);

    return idist__nccl_issue_reduce(nccl, g, call, comm, stream);
}

// ---- gpu/nccl/nccl_abort.h -----------------------------------------------------------------------

// gpu/nccl/nccl_abort.h: aborting communicators, and handling NCCL errors

// Returns true if a thread is inside an NCCL call with the group's communicator.
static bool idist__nccl_abort_is_inside(const idist__gpu_group *gg) {
    return gg->gate && __atomic_load_n(&gg->gate->inside, __ATOMIC_SEQ_CST);
}

// Starts to abort the communicator, which ends the group's work on the device. Without
// ncclCommRevoke, a thread that is inside NCCL starts the abort when its call returns. That call
// returns at once, unless the user supplied a blocking communicator.
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
                         gpu->nccl->CommRevoke
                             ? "the communicator stays in memory"
                             : "a thread waits in NCCL until the graph is destroyed");
    if (idist__nccl_job_start(gg->abort_job)) return;

    gg->abort_job = NULL;
    idist__log_print(&g->w->log, IDIST_LOG_ERROR,
                     "cannot start a thread to abort NCCL: the device may stay busy");
}

// Starts the abort, and waits up to IDIST__GPU_GRACE_MS for the device to stop using the caller's
// buffers. The rest of the abort proceeds by itself, because NCCL also waits for the program's own
// work on the streams.
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

// Leaves the rest of an abort to its thread, which idist__nccl_abort_reap collects later. The gate
// then belongs to the job.
static void idist__nccl_abort_leave(idist_group *g) {
    idist__gpu *gpu = idist__gpu_of(g->w);
    idist__gpu_group *gg = idist__gpu_group_of(g);

    if (!gg) return;
    gg->must_abort = gg->waited_for_abort = false;
    if (!gg->abort_job) return;
    gg->abort_job->next = gpu->ending_jobs;
    gpu->ending_jobs = gg->abort_job;
    gg->abort_job = NULL;
    if (!idist__nccl_abort_is_inside(gg)) gg->gate = NULL; // else gg is not freed
}

static void idist__nccl_abort_log_stays(const idist__world *w) {
    idist__log_print(
        &w->log, IDIST_LOG_WARN,
        "a call of NCCL, or ncclCommRevoke, has not returned: the communicator of the group stays "
        "in memory, and the device may stay busy");
}

// Starts the abort of a group that is about to be freed, and leaves the abort to its thread. Warns
// if a thread inside NCCL prevents the abort: the communicator then stays in memory.
static void idist__nccl_abort_end(idist_group *g) {
    idist__gpu_group *gg = idist__gpu_group_of(g);

    idist__nccl_abort_group(g);
    if (gg->comm) idist__nccl_abort_log_stays(g->w);
    gg->comm = NULL;
    idist__nccl_abort_leave(g);
}

// Logs how an abort ended, unless it succeeded. `left` is true if ncclCommAbort has not returned.
// If `left` is false and the result is IDIST__NCCL_IN_PROGRESS, the communicator stays in memory.
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

// Waits until the deadline for a thread that ends a communicator. Returns false if the thread
// finalizes a communicator and has not returned. If a CUDA graph holds calls, an NCCL without
// ncclCommRevoke stays in the abort until the graph is destroyed. The wait for such an abort takes
// at most IDIST__GPU_GRACE_MS. If the abort has still not returned, this is not an error.
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

// Collects the threads that end communicators. If deadline_ns is 0, collects only jobs that have
// finished. Otherwise waits for all threads until the deadline. Returns false if a thread that
// finalizes a communicator has not returned.
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

// Handles an error that NCCL reports. If another rank is the cause, NCCL does not say which rank.
// The host's backend knows the rank, or finds out within IDIST__GPU_FAULT_MS. During this time no
// call of the group completes, even if the call's event is complete.
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
            g,
            idist__fail(gg->fault == IDIST__NCCL_TIMEOUT ? IDIST_ERR_TIMEOUT : IDIST_ERR_PEER_LOST,
                        "NCCL: %s; no rank is lost, so check the network between the GPUs", text));
        return;
    }

    if (nccl->CommGetAsyncError(gg->comm, &state) == IDIST__NCCL_OK &&
        (state == IDIST__NCCL_OK || state == IDIST__NCCL_IN_PROGRESS))
        return;
    idist__nccl_abort_report_error(g, state);
}

// ---- gpu/nccl/nccl_launch.h ----------------------------------------------------------------------

// gpu/nccl/nccl_launch.h: calls that NCCL serves
//
// NCCL gets a call at once, on the caller's stream or on the group's own stream. At the same time
// the ranks meet through the host's backend. The host's backend detects calls that differ, late
// ranks and lost ranks, as it does for host memory. In these cases, NCCL alone would hang. When a
// group fails, its communicator is aborted, which ends the group's work on the device.
//
//     idist__gpu_engine_start           the call gets its fingerprint, and enters the group's queue
//     idist__nccl_launch_start_meeting  the host's backend sends the fingerprint, and any counts
//     idist__nccl_launch_call           NCCL gets the call: now, or at idist_group_end
//     idist__gpu_engine_part_done       the ranks have met
//     idist__gpu_engine_complete_calls  the event after the call is complete: completes the call

// Returns the stream that a call is enqueued on.
static cudaStream_t idist__nccl_launch_stream(const idist__task *t) {
    return idist__task_on_stream(t) ? (cudaStream_t)t->stream
                                    : idist__gpu_group_of(t->group)->stream[IDIST__STREAM_NCCL];
}

// Returns true if a call was ended before NCCL received the call.
static bool idist__nccl_launch_is_ended(const idist__task *t) {
    return t->group->status != IDIST_OK || t->group->w->progress.stops;
}

// Returns true if it is the turn of these calls in all their groups. A thread with an earlier turn
// may be stuck inside an old version of NCCL. Calls that were ended therefore do not wait for their
// turn.
static bool idist__nccl_launch_can_launch(void *arg) {
    const idist__task *t;

    for (t = (const idist__task *)arg; t; t = idist__gpu_op_of(t)->next_held)
        if (idist__gpu_op_of(t)->ticket != idist__gpu_group_of(t->group)->turn &&
            !idist__nccl_launch_is_ended(t))
            return false;

    return true;
}

// Saves the counts of a call, because the caller's counts may be gone when the other ranks answer.
// In most v-forms, only the two ranks of a pair know how much one sends to the other. Stores what
// this rank sends to each rank and what it expects from each rank. Between the two arrays is space
// for the counts that the other ranks report. Returns false if memory cannot be allocated; the
// group has then failed.
static bool idist__nccl_launch_save_counts(idist__task *t) {
    const idist_group *g = t->group;
    idist__gpu_op *op = idist__gpu_op_of(t);
    int i, n = g->size;

    if (!idist__kind_is_by_pair(op->call.kind)) return true; // the fingerprint holds the counts
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

// Starts the meeting on the host: with all ranks, or with the peer of a message.
static void idist__nccl_launch_start_meeting(idist__task *t) {
    idist__gpu_op *op = idist__gpu_op_of(t);
    const idist__call *call = &op->call;
    idist__call part;

    idist__call_init(&part, IDIST__BARRIER, NULL, NULL, 0, IDIST_U8);
    if (op->counts)
        idist__call_init(&part, IDIST__ALL_TO_ALL, op->counts, op->counts + t->group->size, 1,
                         IDIST_U64);

    if (idist__kind_is_p2p(call->kind)) {
        idist__call_init(&part, call->kind, &op->message_nbytes, &op->message_nbytes, 1, IDIST_U64);
        part.root = call->root;
        part.tag = call->tag;
        op->message_nbytes = call->kind == IDIST__SEND ? call->count * op->size : 0;
    }

    idist__gpu_task_start_part(t, &part);
}

// Compares the counts that pairs of ranks have exchanged in the meeting on the host. NCCL does not
// compare counts. Returns false and explains the difference in `text` if counts differ.
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

// Stores in op->meeting_status that a message failed on the host, or that counts differ. The device
// would wait forever for such a call.
static void idist__nccl_launch_end_meeting(idist__task *t, idist_status status) {
    idist__gpu_op *op = idist__gpu_op_of(t);
    char text[300];
    if (status != IDIST_OK) op->meeting_status = status; // a message failed
    else if (!idist__nccl_launch_check_counts(t, text, sizeof text))
        op->meeting_status = IDIST_ERR_MISMATCH;
}

// Moves a call that all ranks have made, and that NCCL has accepted, to its final state. Returns
// true if there is nothing left to wait for.
static bool idist__nccl_launch_set_complete(idist__task *t) {
    idist__gpu_op *op = idist__gpu_op_of(t);
    op->state = IDIST__GPU_END;
    if (!idist__task_on_stream(t) || op->meeting_status) idist__gpu_task_set_waiting(t, true);
    return !op->waits_for_device;
}

// Records in the gates, where an abort looks, whether this thread is inside NCCL with the
// communicators of these calls.
static void idist__nccl_launch_set_inside(const idist__task *first, int inside) {
    const idist__task *t;

    for (t = first; t; t = idist__gpu_op_of(t)->next_held) {
        idist__nccl_gate *gate = idist__gpu_group_of(t->group)->gate;
        if (gate && idist__gpu_op_of(t)->comm)
            __atomic_store_n(&gate->inside, inside, __ATOMIC_SEQ_CST);
    }
}

// Waits until non-blocking communicators have begun these calls. Called without the lock; takes the
// lock for each check. Another thread may abort the communicators meanwhile, for example to close
// the world.
static int idist__nccl_launch_wait_begun(const idist__task *first) {
    idist__world *w = first->group->w;
    const idist__nccl *nccl = idist__gpu_of(w)->nccl;
    int turns = 0, result = IDIST__NCCL_OK;
    const idist__task *t = first;

    while (t) {
        void *comm;

        idist__world_lock(w);
        comm = idist__gpu_group_of(t->group)->comm;
        if (!comm || w->progress.stops) result = IDIST__NCCL_INTERNAL_ERROR; // it was aborted
        else if (nccl->CommGetAsyncError(comm, &result) != IDIST__NCCL_OK)
            result = IDIST__NCCL_INTERNAL_ERROR;
        idist__os_mutex_unlock(&w->lock);

        if (result == IDIST__NCCL_IN_PROGRESS) idist__gpu_device_nap(&turns);
        else if (result == IDIST__NCCL_OK) t = idist__gpu_op_of(t)->next_held;
        else return result;
    }

    return result;
}

// Hands calls to NCCL, as one NCCL group if there are several calls. On the device, the calls run
// after the earlier work in the callers' streams. Runs without the lock, because NCCL may wait for
// other ranks here.
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

// Fails the call's group if handing the call to NCCL failed. Aborts the communicator if the group
// failed meanwhile. If the world is being closed, the closing thread has ended the call, and aborts
// the communicator if necessary.
static void idist__nccl_launch_end(const idist__task *t, int result, cudaError_t error) {
    idist_group *g = t->group;

    if (g->w->progress.stops) return;
    if (g->status != IDIST_OK && idist__task_on_stream(t)) idist__nccl_abort_group(g);
    else if (g->status != IDIST_OK) idist__nccl_abort_wait(g);
    if (g->status == IDIST_OK && error != cudaSuccess)
        idist__gpu_device_fail_group(g, idist__gpu_device_fail("handing a call to NCCL", error));
    else if (result != IDIST__NCCL_OK) idist__nccl_abort_report_error(g, result);
}

// Assigns tickets to the calls of this thread. NCCL gets the calls of a group in ticket order. This
// thread's calls on the same group share a ticket. Tickets follow the numbers of the calls, because
// the lock has not been released since the calls were numbered. Calls that idist_group_begin holds
// back are in order, too: no other thread may use their groups before idist_group_end.
static void idist__nccl_launch_draw_tickets(idist__task *first) {
    idist__task *t;

    for (t = first; t; t = idist__gpu_op_of(t)->next_held)
        idist__gpu_op_of(t)->ticket = idist__gpu_group_of(t->group)->ticket_count;
    for (t = first; t; t = idist__gpu_op_of(t)->next_held)
        idist__gpu_group_of(t->group)->ticket_count = idist__gpu_op_of(t)->ticket + 1;
}

// Hands this thread's calls to NCCL when it is their turn. Their groups launch no other call
// meanwhile. Completes each call that all ranks have already made and that need not wait for the
// device. Releases the lock while it waits for its turn and while it is inside NCCL.
static void idist__nccl_launch_call(idist__task *first) {
    idist__world *w = first->group->w;
    idist__gpu *gpu = idist__gpu_of(w);
    bool alone = idist__task_on_stream(first) &&
                 !idist__gpu_op_of(first)->next_held; // NCCL handles stream captures itself
    int result, device = gpu->device;
    cudaError_t error = cudaSuccess;
    idist__task *t, *next;
    idist__gpu_guard guard;

    idist__nccl_launch_draw_tickets(first);
    idist__wait_until(w, idist__nccl_launch_can_launch, first);

    for (t = first; t; t = idist__gpu_op_of(t)->next_held)
        idist__gpu_op_of(t)->comm = // not freed while we are inside
            idist__nccl_launch_is_ended(t) ? NULL : idist__gpu_group_of(t->group)->comm;

    idist__nccl_launch_set_inside(first, 1);
    gpu->user_count++; // closing the world waits for us
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
        bool left;

        next = op->next_held;
        op->next_held = NULL;
        op->launched = true;
        t->followed = !idist__task_on_stream(t) && result == IDIST__NCCL_OK && error == cudaSuccess;
        idist__gpu_group_of(t->group)->turn = op->ticket + 1;
        idist__nccl_launch_end(t, result, error);
        if (op->met && t->state != IDIST__TASK_DONE && idist__nccl_launch_set_complete(t))
            idist__task_complete(t, IDIST_OK, "");
        left = t->pin == IDIST__PIN_LEFT;
        t->pin = IDIST__PIN_FREE;
        t->group->detached_count--;
        if (left) idist__task_free(t);
    }

    // Other threads may be waiting for their turn, and the driver may be one of them.
    if (w->wait.blocked_count) idist__os_cond_broadcast(&w->changed);
    idist__world_wake_driver(w);
}

// ---- gpu/route/gpu_setup.h -----------------------------------------------------------------------

// gpu/route/gpu_setup.h: chooses and sets up the path on which a group moves device memory

// Returns true if two members share a GPU.
static bool idist__gpu_setup_is_same_device(const idist_group *g, int a, int b) {
    const idist__gpu *gpu = idist__gpu_of(g->w);
    const idist__gpu_rank_info *x = &gpu->rank_infos[g->ranks[a]];
    const idist__gpu_rank_info *y = &gpu->rank_infos[g->ranks[b]];
    return x->machine_key == y->machine_key && !strcmp(x->bus_id, y->bus_id);
}

// Finds two members that share a GPU. Returns false if no two members do.
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

// Returns the path that the user asked for. If the user asked for none, returns NCCL if each rank
// has a GPU of its own, otherwise IPC on one host, otherwise staging.
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

// Abandons a communicator that is not yet created or not yet connected. Returns false if the job's
// thread is still running, and keeps its resources for now.
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
// Returns false and stores the reason if the communicator cannot be used. Releases the lock between
// checks.
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

    while (!idist__nccl_job_done(job) && g->status == IDIST_OK && !w->progress.stops &&
           idist__os_clock_now_ns() < deadline) {
        idist__os_mutex_unlock(&w->lock);
        idist__os_clock_pause_ms(1);
        idist__world_lock(w);
        if (w->wait.driver == IDIST__DRIVER_NONE) w->backend->progress(w);
    }

    if (!idist__nccl_job_done(job)) {
        phase = __atomic_load_n(&job->phase, __ATOMIC_ACQUIRE);
        snprintf(reason, capacity, "%s has not returned after %d ms%s",
                 phase == IDIST__INIT_CREATING ? "ncclCommInitRank" : "NCCL's first call",
                 w->cfg.init_timeout_ms, w->progress.stops ? ", and the world is closed" : "");
        idist__os_mutex_unlock(&w->lock);
        ended = idist__gpu_setup_give_up(job);
        idist__world_lock(w);
        if (!ended)
            idist__log_print(&w->log, IDIST_LOG_WARN,
                             "%s; its thread and device memory stay in use until it returns",
                             reason);
        return false;
    }

    gg->comm = job->comm;
    idist__nccl_job_join(job, 0, &result);
    if (result == IDIST__NCCL_OK) return true;
    idist__nccl_abort_group(g); // NCCL may have partly created the communicator
    snprintf(reason, capacity, "ncclCommInitRank: %s",
             idist__nccl_issue_text(idist__gpu_of(w)->nccl, result, text, sizeof text));

    return false;
}

// Returns the user's own communicator, for the world's group. Returns NULL and stores the reason if
// the communicator does not match the world.
static void *idist__gpu_setup_adopt(idist_group *g, char *reason, size_t capacity) {
    const idist__gpu *gpu = idist__gpu_of(g->w);
    void *comm = *(void *const *)g->w->cfg.nccl_comm;
    int n = 0, rank = -1, device = -1;

    if (gpu->nccl->CommCount(comm, &n) != IDIST__NCCL_OK ||
        gpu->nccl->CommUserRank(comm, &rank) != IDIST__NCCL_OK ||
        gpu->nccl->CommCuDevice(comm, &device) != IDIST__NCCL_OK)
        snprintf(reason, capacity, "desc.nccl_comm is not a valid communicator");
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

// Returns the size in bytes of a configuration that NCCL_CONFIG_INITIALIZER has initialized. NCCL
// refuses any other configuration because of its first members.
static size_t idist__gpu_setup_config_nbytes(const idist__nccl_config *config) {
    return config->magic == IDIST__NCCL_CONFIG_MAGIC && config->nbytes > sizeof *config
               ? config->nbytes
               : sizeof *config;
}

// Creates a communicator, or takes the user's, and connects the ranks. Returns false and stores the
// reason on failure. The job gets a copy of the configuration, because the job may outlive the
// world.
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

// The information that each member sends to all members before the communicator is created.
typedef struct idist__nccl_rank_info {
    int32_t failed;
    idist__nccl_id id;
} idist__nccl_rank_info;

// Creates a memory pool that the other GPUs of this process can access. If ranks of this process
// have other GPUs, NCCL reads and writes this rank's buffers from these GPUs (unless
// NCCL_P2P_DIRECT_DISABLE=1). The default pool belongs to the program, and its addresses are
// illegal on other GPUs. Leaves *pool NULL if no other GPU accesses our memory.
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
        if (error != cudaSuccess || !can) continue; // NCCL cannot access our memory directly either
        if (!*pool) error = cudaMemPoolCreate(pool, &props);
        access.location.id = infos[i].device;
        if (error == cudaSuccess) error = cudaMemPoolSetAccess(*pool, &access, 1);
    }

    return error;
}

// Allocates what all communicators share: the word that barriers on streams reduce, and a pool.
// Called once, before a second thread can use the world. If two threads each allocated a word,
// freeing the spare word would wait for the device. Releases the lock meanwhile.
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

// Creates the stream and allocates the device memory that an init job needs. The job owns them,
// because the job may outlive the group. The function uses cudaMallocAsync, because cudaMalloc may
// wait for all work on the device. This work may include a call that ends only when another rank
// makes it, after this group is set up. Releases the lock meanwhile.
static cudaError_t idist__gpu_setup_alloc_buffer(idist_group *g, idist__nccl_job *job) {
    size_t nbytes = (size_t)IDIST_NCCL_CONNECT_BYTES + 8 * (size_t)g->size; // space to round up
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

// Performs all steps of the set-up that need no other rank. Returns NULL if memory cannot be
// allocated. Otherwise info->failed is true if this rank failed, and `reason` says why.
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

// Creates the communicator if `infos` shows that no member failed. Otherwise frees the job. Returns
// false if this rank failed.
static bool idist__gpu_setup_create(idist_group *g, const idist__nccl_rank_info *infos,
                                    idist__nccl_job *job, char *reason, size_t capacity) {
    bool own_failed = infos[g->rank].failed;
    int i;

    for (i = 0; i < g->size && !infos[i].failed; i++) continue;
    if (i == g->size) return idist__gpu_setup_init(g, &infos[0].id, job, reason, capacity);

    idist__nccl_job_discard(job);

    return !own_failed;
}

// Exchanges the members' information and creates the communicator. All members get the same
// outcome.
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
    if (status == IDIST_OK) status = idist__survey(g, &mine, infos, sizeof mine);

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

// Makes NCCL ready for a group. From now on the progress thread watches the other ranks. Without
// this thread, a lost rank would go unnoticed, even while NCCL connects the ranks. If the thread
// cannot be started, or if the set-up fails, the next call may try again.
static idist_status idist__gpu_setup_prepare_comm(idist_group *g) {
    idist__world *w = g->w;
    bool has_thread = idist__progress_thread_need(w) == IDIST_OK;
    int nthreads = idist__os_thread_count();
    idist_status status;

    w->progress.watched = true;
    idist__os_cond_signal(&w->work); // the progress thread sleeps until it has something to watch
    status = idist__gpu_setup_agree(g, has_thread);

    if (status != IDIST_OK) {
        idist__nccl_abort_wait(g);
        idist__nccl_abort_leave(g);
    }

    if (idist__os_thread_count() > nthreads)
        w->machine.foreign_thread_count += idist__os_thread_count() - nthreads; // NCCL's own

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

// Creates the streams that this rank uses for the group, and chooses the group's path.
static idist_status idist__gpu_setup_group_make(idist_group *g) {
    idist__gpu_group *gg = (idist__gpu_group *)idist__mem_alloc(&g->w->cfg.mem, sizeof *gg);
    idist__gpu_guard guard = idist__gpu_device_enter(idist__gpu_of(g->w));
    cudaError_t error = cudaSuccess;
    int i, least = 0, greatest = 0, priority = 0; // 0 is the default and the lowest priority

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
    return !idist__gpu_group_of(g)->preparing || g->w->progress.stops;
}

// Returns the time until which a thread waits for another thread to prepare the group. This allows
// for the time-outs of two exchanges and of the set-up.
static int64_t idist__gpu_setup_prepare_deadline(const idist__world *w) {
    int64_t call_ms = w->cfg.timeout_ms, init_ms = w->cfg.init_timeout_ms;

    if (call_ms <= 0 || init_ms <= 0) return IDIST__FOREVER;
    return idist__os_clock_deadline(2 * call_ms + init_ms);
}

// Sets up what the members of a group share on the group's path.
static idist_status idist__gpu_setup_prepare_path(idist_group *g) {
    const idist__gpu *gpu = idist__gpu_of(g->w);
    idist__gpu_group *gg = idist__gpu_group_of(g);
    idist__gpu_guard guard = idist__gpu_device_enter(gpu);
    idist_status status = IDIST_OK;

    gg->preparing = true;
    if (gg->path == IDIST__BY_NCCL) status = idist__gpu_setup_prepare_comm(g);
    if (gg->path == IDIST__BY_IPC) status = idist__ipc_setup_prepare(g);
    idist__gpu_device_leave(gpu, guard);
    if (status == IDIST_ERR_NO_MEMORY && !g->w->progress.stops)
        idist__group_fail_memory(g); // the other members are waiting for this rank
    gg->preparing = false;
    gg->ready = status == IDIST_OK;

    return status;
}

// Prepares a group, or waits for the thread that prepares the group. Releases the lock meanwhile.
// All members call this function, in their first call on device memory.
static idist_status idist__gpu_setup_prepare(idist_group *g) {
    idist__world *w = g->w;
    idist__gpu *gpu = idist__gpu_of(w);
    idist_status status;

    gpu->user_count++;  // closing the world waits for us
    g->running_count++; // keeps other threads from freeing the group
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
    if (w->wait.blocked_count) idist__os_cond_broadcast(&w->changed); // wakes threads that wait

    return status;
}

// ---- gpu/route/gpu_route.h -----------------------------------------------------------------------

// gpu/route/gpu_route.h: decides which calls the device serves, and on which path

// Sets *on_device if the buffers of a call are device memory. For a rank without elements, its
// pointers or its stream show that the other ranks use device memory. Fails if only one of two
// buffers is device memory, or if a call on host memory has a stream.
static idist_status idist__gpu_route_check_buffers(const idist_group *g, const idist__call *call,
                                                   const idist_opts *opts, bool *on_device) {
    const char *name = idist__kind_names[call->label];
    bool send, recv, host;
    cudaError_t error = idist__gpu_device_owns_pointer(call->send, &send);
    idist__extent e;

    recv = send;
    if (error == cudaSuccess && call->recv != call->send)
        error = idist__gpu_device_owns_pointer(call->recv, &recv);
    if (error != cudaSuccess) return idist__gpu_device_fail(name, error);
    *on_device = send || recv || opts->stream;
    if (!*on_device || idist__extent_of(g, call, &e) != IDIST_OK) return IDIST_OK;
    host = (e.send && !send) || (e.recv && !recv);
    if (host && (send || recv))
        return idist__fail(IDIST_ERR_ARG, "%s: one buffer is device memory, the other is not",
                           name);
    if (host)
        return idist__fail(IDIST_ERR_ARG,
                           "%s: a stream needs device memory, but the buffers are host memory",
                           name);

    return IDIST_OK;
}

static bool idist__gpu_route_may_run_ahead(void *arg) {
    const idist_group *g = (const idist_group *)arg;
    return g->detached_count < IDIST__GPU_AHEAD || g->status != IDIST_OK;
}

static idist__gpu_path idist__gpu_route_path_of(const idist_group *g, const idist__call *call,
                                                const void *stream) {
    idist__gpu_path path = idist__gpu_group_of(g)->path;
    if (path == IDIST__BY_NCCL && idist__nccl_issue_supports(g, call, stream)) return path;
    return path == IDIST__BY_IPC && idist__ipc_call_supports(g, call) ? path : IDIST__BY_STAGING;
}

// Refuses a call while its stream is being captured, because a graph cannot hold the part of the
// call that the host performs. Refuses the default stream while a capture is running on a stream
// that the default stream waits for.
static idist_status idist__gpu_route_check_capture(const char *name, const idist_opts *opts,
                                                   const char *what) {
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    cudaError_t error =
        cudaStreamIsCapturing(opts->stream ? (cudaStream_t)opts->stream : cudaStreamLegacy,
                              &capture);

    if (error != cudaSuccess) cudaGetLastError();
    if (error == cudaErrorStreamCaptureImplicit)
        return idist__fail(
            IDIST_ERR_UNSUPPORTED,
            "%s: the default stream cannot be used while a stream that blocks it is captured",
            name);
    if (error != cudaSuccess) return idist__fail(IDIST_ERR_ARG, "%s: the stream is invalid", name);
    if (capture == cudaStreamCaptureStatusNone) return IDIST_OK;

    return idist__fail(IDIST_ERR_UNSUPPORTED, "%s: %s cannot be captured into a graph", name, what);
}

static bool idist__gpu_route_is_capturing(cudaStream_t stream) {
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;

    if (cudaStreamIsCapturing(stream, &capture) != cudaSuccess) cudaGetLastError();
    return capture != cudaStreamCaptureStatusNone;
}

// Refuses a call that cannot be captured, if its stream is being captured.
static idist_status idist__gpu_route_check_stream(const idist_group *g, const idist__call *call,
                                                  const idist_opts *opts) {
    const char *name = idist__kind_names[call->label];
    void *stream = opts->request ? NULL : opts->stream;

    if (idist__gpu_route_path_of(g, call, stream) != IDIST__BY_NCCL)
        return idist__gpu_route_check_capture(name, opts, "a call that NCCL does not serve");
    if (!stream || stream == (void *)cudaStreamLegacy)
        return idist__gpu_route_check_capture(name, opts, "a call with a request");

    return IDIST_OK;
}

// Prepares the group if this is its first call on NCCL or IPC. The preparation is collective, so a
// send or receive cannot be the first call.
static idist_status idist__gpu_route_check_ready(idist_group *g, const idist__call *call,
                                                 const idist_opts *opts) {
    const char *name = idist__kind_names[call->label];
    void *stream = opts->request ? NULL : opts->stream;
    idist_status status;

    if (idist__gpu_group_of(g)->ready) return IDIST_OK;
    if (idist__gpu_route_path_of(g, call, stream) == IDIST__BY_STAGING) return IDIST_OK;
    if (idist__kind_is_p2p(call->kind))
        return idist__fail(
            IDIST_ERR_STATE,
            "%s: NCCL is not set up for this group yet: make a collective call on device memory "
            "first",
            name);

    status = idist__gpu_route_check_capture(name, opts, "a group's first call on device memory");
    if (status != IDIST_OK) return status;

    return idist__gpu_setup_prepare(g);
}

// Refuses what NCCL cannot do: a send or receive with wildcards, and calls on device memory of two
// worlds between idist_group_begin and idist_group_end.
static idist_status idist__gpu_route_check_call(const idist_group *g, const idist__call *call) {
    const char *name = idist__kind_names[call->label];

    if (idist__kind_is_p2p(call->kind) && (call->root < 0 || call->tag < 0))
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "%s: NCCL does not support IDIST_ANY_SOURCE or IDIST_ANY_TAG", name);
    if (idist__together_now.depth && idist__together_now.held_world &&
        idist__together_now.held_world != g->w)
        return idist__fail(
            IDIST_ERR_UNSUPPORTED,
            "%s: calls between group_begin and group_end may use device memory of only one world",
            name);

    return IDIST_OK;
}

// Performs the checks and the set-up that depend on the kind of memory, before a call becomes a
// task. Sets *detached if the call returns as soon as NCCL has received the call.
static idist_status idist__gpu_route_call(idist_group *g, const idist__call *call,
                                          const idist_opts *opts, bool *on_device, bool *detached) {
    idist_status status = idist__gpu_route_check_buffers(g, call, opts, on_device);
    idist__gpu_group *gg;
    bool nccl;

    if (call->label == IDIST__FINALIZE)
        idist__ipc_leave_unmap_arenas(g->w); // before other ranks free their arenas
    if (status != IDIST_OK || !*on_device || g->status != IDIST_OK) return status;
    if (opts->stream == (void *)cudaStreamPerThread)
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "%s: cudaStreamPerThread: another thread may finish the call",
                           idist__kind_names[call->label]);

    if (!g->device) status = idist__gpu_setup_group_make(g);
    if (status != IDIST_OK) return status;
    gg = idist__gpu_group_of(g);
    nccl = idist__gpu_route_path_of(g, call, opts->request ? NULL : opts->stream) == IDIST__BY_NCCL;
    status = idist__gpu_route_check_stream(g, call, opts);
    if (status == IDIST_OK) status = idist__gpu_route_check_ready(g, call, opts);
    if (status != IDIST_OK || g->status != IDIST_OK) return status;
    if (nccl) status = idist__gpu_route_check_call(g, call);
    if (status != IDIST_OK) return status;

    *detached = nccl && opts->stream && !opts->request;
    if (!*detached) return IDIST_OK;
    if (!gg->captured) gg->captured = idist__gpu_route_is_capturing((cudaStream_t)opts->stream);
    if (!idist__together_now.depth) idist__wait_until(g->w, idist__gpu_route_may_run_ahead, g);

    return IDIST_OK;
}

// Runs idist__gpu_route_call with our device as the current one, because a query about a pointer
// may create a context.
static idist_status idist__gpu_route_find(idist_group *g, const idist__call *call,
                                          const idist_opts *opts, bool *on_device, bool *detached) {
    const idist__gpu *gpu = idist__gpu_of(g->w);
    int device = idist__gpu_device_set(gpu);
    idist_status status = idist__gpu_route_call(g, call, opts, on_device, detached);

    idist__gpu_device_restore(gpu, device);
    return status;
}

// ---- gpu/route/gpu_engine.h ----------------------------------------------------------------------

// gpu/route/gpu_engine.h: the backend functions of a world with a device
//
// A world with a device has a backend that consists of these functions. The functions pass calls on
// host memory to the host's backend.
//
// A group gives calls, and parts of calls, to the host's backend in the program's order, so that
// all ranks number them alike. A call whose next part is not ready holds up all later calls, even
// calls on host memory.

// Passes to the host's backend a call on host memory that had to wait for earlier calls.
static void idist__gpu_engine_host_part(idist__task *t) {
    idist__gpu_op *op = idist__gpu_op_of(t);

    if (op->user.used) t->call.u.user = &op->user;
    t->state = IDIST__TASK_ON_HOST;
    if (!idist__kind_is_p2p(t->call.kind)) t->seq = ++t->group->seq;
    idist__gpu_of(t->group->w)->host_backend->start(t);
}

// Gives to the host's backend the parts that are ready.
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

        idist__gpu_task_dequeue(t); // the call has only one part
        if (t->on_device) idist__nccl_launch_start_meeting(t);
        else idist__gpu_engine_host_part(t);
    }
}

// Handles a part of a call that the host's backend has finished. Returns true if the whole call is
// complete, and false if it continues. May be called from within any function of the host's
// backend.
static bool idist__gpu_engine_part_done(idist__task *t, idist_status status) {
    idist__gpu *gpu = idist__gpu_of(t->group->w);
    idist__gpu_op *op = idist__gpu_op_of(t);
    bool nccl = op->path == IDIST__BY_NCCL, over;
    idist__gpu_guard guard;

    op->with_backend = false;
    t->state = IDIST__TASK_ON_DEVICE;

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

// Gives a call to NCCL: now, or at idist_group_end with the other calls that are held back.
static void idist__gpu_engine_start_nccl(idist__task *t) {
    idist__world *w = t->group->w;
    idist__gpu_op *op = idist__gpu_op_of(t);
    idist__task **last = &idist__gpu_of(w)->held_calls;

    if (!idist__nccl_launch_save_counts(t)) return;
    t->pin = IDIST__PIN_PINNED; // until the call is launched
    t->group->detached_count++;
    idist__gpu_engine_enqueue(t);
    idist__gpu_engine_run_queue(t->group);

    if (!idist__together_now.depth) {
        idist__nccl_launch_call(t);
        return;
    }

    op->holding_thread = &idist__me;
    while (*last) last = &idist__gpu_op_of(*last)->next_held;
    *last = t;
    if (!idist__together_now.held_world) w->tasks.deferred_count++;
    idist__together_now.held_world = w;
}

// Releases the lock until idist__gpu_engine_relock is called, for a CUDA call that enqueues work on
// one of the program's streams. The CUDA call blocks if the stream's queue is full, perhaps behind
// an NCCL kernel that waits for a lost rank. The thread that aborts the kernel needs the lock.
static idist__gpu_guard idist__gpu_engine_unlock(idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);
    idist__gpu_guard guard = idist__gpu_device_enter(gpu);

    gpu->user_count++; // closing the world waits for us
    idist__os_mutex_unlock(&w->lock);

    return guard;
}

static void idist__gpu_engine_relock(idist__world *w, idist__gpu_guard guard) {
    idist__gpu *gpu = idist__gpu_of(w);

    idist__gpu_device_leave(gpu, guard);
    idist__world_lock(w);
    gpu->user_count--;
}

// Records the point in the program's stream after which the call begins. Returns false if the call
// was canceled meanwhile. Releases the lock, because the stream's queue may be full.
static bool idist__gpu_engine_record_begin(idist__task *t) {
    idist__world *w = t->group->w;
    idist__gpu_op *op = idist__gpu_op_of(t);
    cudaStream_t stream = t->stream ? (cudaStream_t)t->stream : cudaStreamLegacy;
    idist__gpu_guard guard = idist__gpu_engine_unlock(w);
    cudaError_t error = cudaEventRecord(op->event, stream);

    idist__gpu_engine_relock(w, guard);
    if (t->state != IDIST__TASK_DONE) op->error = error;

    return t->state != IDIST__TASK_DONE;
}

// Undoes what the core did when it numbered and started a task. The task gets its number when the
// host's backend starts it.
static void idist__gpu_engine_unstart(idist__task *t) {
    t->state = IDIST__TASK_ON_DEVICE;
    if (t->seq) t->group->seq--;
    t->seq = 0;
    memset(t->impl, 0, idist__gpu_of(t->group->w)->host_backend->task_nbytes);
}

// Fills in the device backend's data for a call.
static void idist__gpu_engine_op_fill(idist__task *t) {
    idist_group *g = t->group;
    idist__gpu_op *op = idist__gpu_op_of(t);

    op->path = idist__gpu_route_path_of(g, &t->call, idist__task_is_async(t) ? NULL : t->stream);
    op->fingerprint = idist__fingerprint_of_call(g->w, &t->call, 0);
    op->fingerprint.algorithm = IDIST__ON_DEVICE;
}

// Copies the user op of a call, because the program may free the op while the call waits.
static void idist__gpu_engine_keep_user_op(idist__task *t) {
    idist__gpu_op *op = idist__gpu_op_of(t);

    if (t->call.u.user || !idist__kind_reduces(t->call.kind) ||
        !idist__reduce_op_is_user(t->call.op))
        return;
    op->user = *idist__world_user_op(t->group, &t->call);
    op->call.u.user = &op->user;
}

// Starts a call that moves its data in chunks, through CUDA IPC or pinned memory.
static void idist__gpu_engine_start_chunks(idist__task *t) {
    idist__gpu_op *op = idist__gpu_op_of(t);
    idist__gpu_shape shape = idist__gpu_task_shape_of(t->group, &op->call);

    if (op->path == IDIST__BY_IPC)
        idist__stage_plan_chunks(t, IDIST__IPC_CHUNK, shape.contribution);
    else idist__stage_plan_chunks(t, IDIST__GPU_CHUNK, shape.most);
    if (!idist__gpu_engine_record_begin(t)) return;
    idist__gpu_engine_enqueue(t);
    idist__gpu_engine_run_queue(t->group);
}

// Starts a task. If the task is on host memory and the group's queue is empty, passes the task
// directly to the host's backend.
static void idist__gpu_engine_start(idist__task *t) {
    idist__gpu_group *gg = idist__gpu_group_of(t->group);
    bool on_device = t->on_device;
    idist__gpu_op *op;

    if (!on_device && (!gg || !gg->queue)) {
        idist__gpu_of(t->group->w)->host_backend->start(t);
        return;
    }

    t->on_device = false; // until there is something to undo on the device
    idist__gpu_engine_unstart(t);
    if (!idist__gpu_engine_op_make(t)) return;
    op = idist__gpu_op_of(t);
    memset(op, 0, offsetof(idist__gpu_op, event));
    op->call = t->call;
    op->size = idist_dtype_size(t->call.dtype);
    idist__gpu_engine_keep_user_op(t);
    t->on_device = on_device;

    if (!on_device) { // the host's backend gets the call after all earlier calls
        idist__gpu_engine_enqueue(t);
        return;
    }

    idist__gpu_engine_op_fill(t);

    if (op->path != IDIST__BY_NCCL) {
        idist__gpu_engine_start_chunks(t);
        return;
    }

    if (t->call.info)
        idist__matching_describe(&t->call, t->call.root, t->call.tag, t->call.dtype, t->call.count);
    idist__gpu_engine_start_nccl(t);
}

// Sends or receives a message without a task. Returns false if a call waits in the group's queue,
// for the device or for pinned memory, because the message would overtake that call.
static bool idist__gpu_engine_quick_message(idist_group *g, const idist__call *call) {
    const idist__gpu_group *gg = idist__gpu_group_of(g);

    if (gg && gg->queue) return false;
    return idist__gpu_of(g->w)->host_backend->quick_message(g, call);
}

// Launches the calls that this thread's idist_group_begin has held back.
static void idist__gpu_engine_launch_held(idist__world *w) {
    idist__task **at = &idist__gpu_of(w)->held_calls, *first = NULL, **last = &first, *t;

    if (idist__together_now.held_world == w) w->tasks.deferred_count--;
    idist__together_now.held_world = NULL;

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

// Makes a stream wait for a call that is complete except for its event (t->followed), and detaches
// the task. Releases the lock, because the stream's queue may be full. The event may complete
// meanwhile.
static idist_status idist__gpu_engine_follow(idist__task *t, void *stream) {
    idist__world *w = t->group->w;
    idist_status status = IDIST_OK;
    idist__gpu_guard guard = idist__gpu_engine_unlock(w);
    cudaError_t error = cudaStreamWaitEvent((cudaStream_t)stream, idist__gpu_op_of(t)->event, 0);

    idist__gpu_engine_relock(w, guard);
    if (t->state == IDIST__TASK_DONE) status = idist__wait_result(t);
    else idist__task_detach(t);

    return error == cudaSuccess ? status : idist__gpu_device_fail("wait_stream", error);
}

static void idist__gpu_engine_fail_mismatch(idist__task *t) {
    char text[400] = "a send and its receive differ in size, or only one of them is on a stream";
    if (idist__gpu_op_of(t)->meeting_status == IDIST_ERR_MISMATCH)
        idist__nccl_launch_check_counts(t, text, sizeof text);
    idist__group_fail(t->group, idist__gpu_op_of(t)->meeting_status, text);
}

// Completes each call that waits only for an event of the device, if the event is complete.
static void idist__gpu_engine_complete_calls(idist__world *w) {
    idist__task *t, *next;

    for (t = w->tasks.running; t; t = next) {
        const idist__gpu_op *op = t->on_device ? idist__gpu_op_of(t) : NULL;
        uint32_t ended = w->wait.ended_count;
        next = t->next;

        if (op && op->waits_for_device && op->state == IDIST__GPU_END) {
            if (op->meeting_status) idist__gpu_engine_fail_mismatch(t);
            else if (op->path == IDIST__BY_NCCL && idist__gpu_group_of(t->group)->fault) continue;
            else if (idist__gpu_task_event_done(t, op->event)) idist__gpu_task_complete(t);
        }

        if (w->wait.ended_count != ended)
            next = w->tasks.running; // a task is gone, perhaps the next task
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

    if (!w->progress.watched ||
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

    // Polls at first, because sleeping and waking up take longer than most small calls take on the
    // device. With fewer cores than ranks, spin_ns is 0: another rank needs the core.
    if (gpu->waiting_call_count && w->wait.spin_ns && now < gpu->spin_until_ns) {
        idist__world_give_way(w);
        return;
    }

    if (gpu->waiting_call_count && soon < until_ns) {
        until_ns = soon;
        if (gpu->sleep_ns < IDIST__GPU_SLEEP_LONG_NS) gpu->sleep_ns += gpu->sleep_ns / 4;
    }

    gpu->host_backend->sleep(w, until_ns);
}

// Waits until the copies of a call no longer use the caller's buffers. The copies wait for no other
// rank, but the device may never run them. If the copies do not end, the call's pinned memory is
// never used again.
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
        if (t->state != IDIST__TASK_ON_DEVICE) return gpu->host_backend->cancel(t);
        if (op) idist__gpu_task_dequeue(t);
        t->state = IDIST__TASK_ON_HOST;
        return true;
    }

    if (op->with_backend) done = gpu->host_backend->cancel(t);
    // It is too late to cancel a call that already involves other ranks, or that NCCL has received.
    // If the group has failed or the world ends, this does not matter.
    if (g->status == IDIST_OK && !g->w->progress.stops && (!done || op->path == IDIST__BY_NCCL))
        return false;
    op->with_backend = false;
    t->state = IDIST__TASK_ON_HOST;
    op->state = IDIST__GPU_END; // no more data is moved
    guard = idist__gpu_device_enter(gpu);

    if (op->path == IDIST__BY_NCCL) idist__nccl_abort_wait(g);
    else if (g->device) idist__gpu_engine_end_copies(t);

    cudaGetLastError();
    idist__gpu_device_leave(gpu, guard);
    idist__gpu_task_release(t);

    return done;
}

// Retracts a receive. A receive into host memory may still be queued behind calls on the device.
static bool idist__gpu_engine_retract(idist__task *t) {
    if (t->state == IDIST__TASK_ON_DEVICE) return idist__gpu_engine_cancel(t);
    return idist__gpu_of(t->group->w)->host_backend->retract(t);
}

static void idist__gpu_engine_tell(idist_group *g) {
    idist__gpu_of(g->w)->host_backend->tell(g);
    idist__nccl_abort_group(g);
}

static void idist__gpu_engine_announce(idist__task *t) {
    if (t->state != IDIST__TASK_ON_DEVICE) idist__gpu_of(t->group->w)->host_backend->announce(t);
}

static int idist__gpu_engine_missing(idist__task *t, char *text, size_t capacity) {
    const idist__world *w = t->group->w;

    if (t->state != IDIST__TASK_ON_DEVICE)
        return idist__gpu_of(w)->host_backend->missing(t, text, capacity);
    if (idist__gpu_op_of(t)->holding_thread && !idist__gpu_op_of(t)->launched)
        idist__text_append(text, capacity,
                           "rank %d on %s itself, which has not called idist_group_end",
                           w->group.rank, w->about.hostname);
    else if (idist__gpu_op_of(t)->path == IDIST__BY_NCCL)
        idist__text_append(
            text, capacity,
            "the device: earlier work on a stream of rank %d on %s itself, or of another rank",
            w->group.rank, w->about.hostname);
    else
        idist__text_append(text, capacity, "rank %d on %s itself, whose device has not finished",
                           w->group.rank, w->about.hostname);

    return 1;
}

// Finalizes a communicator in a thread of its own. NCCL finalizes a communicator only when all of
// its ranks ask for this, and does not say which rank waits for which.
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

// Ends the calls of other threads, as idist_device_api requires. Such a call may wait for work on
// the device, of its own group or of another group.
static void idist__gpu_engine_end_calls(idist__world *w) {
    idist_group *g;

    if (w->life.leaves && idist__gpu_leave_lock(w)) {
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

        if (w->life.leaves && !w->life.abandoned && !gg->adopted)
            idist__nccl_abort_group(g); // a thread may have created comm meanwhile
        if (g->status != IDIST_OK || gg->must_abort) idist__nccl_abort_end(g);
        else if (!idist__nccl_abort_is_inside(gg)) idist__gpu_engine_finalize(g);
        idist__nccl_abort_reap(w, 0);
        if (!w->life.abandoned) idist__gpu_setup_group_free(g);
        idist__gpu_device_leave(gpu, guard);
    }

    gpu->host_backend->group_close(g);
}

// Frees the device backend's data for a world. If a thread is still inside a call
// (w->life.abandoned), everything that the thread may use stays in memory.
static void idist__gpu_engine_free(idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);
    const idist_allocator *mem = &w->cfg.mem;
    idist__task *t;
    int device = gpu->host_backend ? idist__gpu_device_set(gpu) : -1; // -1 if not installed
    bool left = !w->life.abandoned;

    if (!idist__nccl_abort_reap(w, idist__os_clock_deadline(IDIST__GPU_ABORT_MS)))
        idist__log_print(&w->log, IDIST_LOG_WARN,
                         "ncclCommDestroy has not returned: another rank has not called it, or a "
                         "graph still holds calls");
    for (t = w->tasks.all; t && left; t = t->older) idist__gpu_engine_op_free(t);
    if (left) idist__pinned_end(w);
    idist__ipc_leave_free_all(w);

    cudaGetLastError();
    if (gpu->host_backend) w->backend = gpu->host_backend;
    if (idist__together_now.held_world == w) idist__together_now.held_world = NULL;
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
        idist__fail(IDIST_ERR_NO_DEVICE, "nccl_comm: the world has no device: %s",
                    g->w->about.no_device);
    else if (g->rank < 0)
        idist__fail(IDIST_ERR_STATE, "nccl_comm: this rank is not a member of the group");
    else if (g->status != IDIST_OK)
        idist__fail(g->status, "nccl_comm: the group failed earlier: %s", g->cause);
    else comm = idist__gpu_engine_comm_of(g);
    idist__os_mutex_unlock(&g->w->lock);

    return comm;
}

// ---- gpu/route/gpu_join.h ------------------------------------------------------------------------

// gpu/route/gpu_join.h: how all ranks agree on their devices and on a device backend

// Returns true if the user lets NCCL run several ranks on one GPU. From 2.30.3 on, NCCL does so
// with NCCL_MULTI_RANK_GPU_ENABLE=1. Tests set NCCL_HOSTID instead.
static bool idist__gpu_join_allows_shared_gpu(int version) {
    const char *enable = idist__os_env("NCCL_MULTI_RANK_GPU_ENABLE");
    return idist__os_env("NCCL_HOSTID") || (enable && strcmp(enable, "1") == 0 && version >= 23003);
}

// Returns true if a CUDA error means more than "this machine has no GPU". Error 35
// (cudaErrorInsufficientDriver) means either no driver or a driver that is too old.
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
                 "%s: the driver supports CUDA %d.%d, but the program needs %d.%d", what,
                 driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    else
        snprintf(info->reason, sizeof info->reason, "%s: %s (%s, %d)", what,
                 cudaGetErrorString(error), cudaGetErrorName(error), (int)error);
}

// Returns a text that tells the user what to do about an error.
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

// Parses desc.device, and sets *number if the name contains a number. Returns false if no device is
// wanted, or if the name is invalid; info gives the reason.
static bool idist__gpu_join_parse_device(const char *asked, idist__gpu_rank_info *info,
                                         int *number) {
    int64_t value;

    if (strcmp(asked, "cpu") == 0) {
        info->presence = IDIST__GPU_NONE;
        snprintf(info->reason, sizeof info->reason, "the requested device is \"cpu\"");
        return false;
    }

    if (!asked[0] || strcmp(asked, "cuda") == 0) return true;

    if (strncmp(asked, "cuda:", 5) != 0 || !idist__parse_int(asked + 5, 0, 4095, &value)) {
        info->presence = IDIST__GPU_BAD_NAME;
        snprintf(info->reason, sizeof info->reason,
                 "invalid device \"%.40s\": use cpu, cuda, cuda:0, cuda:1, ...", asked);
        return false;
    }

    *number = (int)value;

    return true;
}

// Makes device `number` the current one. If the user gave no number, `number` is taken modulo the
// number of devices. Sets *what to the name of the CUDA function that failed.
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

// Finds and opens the device of this rank, or records in `info` why there is none.
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

// The names of the paths. desc.device_backend is "auto", or one of these names except "none".
static const char *const idist__gpu_path_names[] = {"none", "nccl", "ipc", "staged"};

// Returns the path that desc.device_backend asks for, IDIST__BY_HOST_MEMORY for any path, or -1 if
// no path has this name.
static int idist__gpu_join_path_named(const char *asked) {
    int i;

    if (!asked[0]) return IDIST__BY_HOST_MEMORY;
    for (i = IDIST__BY_NCCL; i <= IDIST__BY_STAGING; i++)
        if (strcmp(asked, idist__gpu_path_names[i]) == 0) return i;
    return -1;
}

// Fills in what this rank tells the other ranks about its device and its NCCL version.
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

// The ranks that prevent the world from using NCCL. A member is -1 if there is no such rank.
typedef struct idist__nccl_obstacles {
    int without; // the first rank without NCCL
    int other;   // the first rank whose version differs from the version of rank 0
} idist__nccl_obstacles;

// Compares the information of all ranks. Disables NCCL if a rank lacks it or has a different
// version, and sets gpu->nccl_reduces_f8.
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

// Returns an error if NCCL cannot be used. Called if the user asked for NCCL.
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

    return idist__fail(
        IDIST_ERR_UNSUPPORTED,
        "initialize: rank %d and rank %d share the GPU %s, which NCCL %d refuses; NCCL 2.30.3 and "
        "later allow this with NCCL_MULTI_RANK_GPU_ENABLE=1",
        b, a, infos[a].bus_id, infos[a].nccl);
}

// Logs why NCCL, the best backend for GPUs, is not used. Called if the user did not ask for a
// particular device backend.
static void idist__gpu_join_log_obstacles(const idist__world *w,
                                          const idist__nccl_obstacles *nccl) {
    const idist__gpu_rank_info *infos = idist__gpu_of(w)->rank_infos;
    const idist_group *g = &w->group;
    int a, b;
    bool useful = g->size > 1 && !idist__gpu_setup_find_shared(g, &a, &b); // NCCL could serve them

    if (nccl->without >= 0)
        idist__log_print(
            &w->log, useful && nccl->without == g->rank ? IDIST_LOG_WARN : IDIST_LOG_INFO,
            "no NCCL, without which GPUs communicate at a fraction of their speed: %s; install it "
            "(pip install nvidia-nccl-cu%d), or set its path in IDIST_NCCL_LIB",
            infos[nccl->without].no_nccl_reason, CUDART_VERSION / 1000);
    else if (nccl->other >= 0)
        idist__log_print(&w->log, IDIST_LOG_WARN,
                         "no NCCL: rank 0 has version %d, rank %d has version %d", infos[0].nccl,
                         nccl->other, infos[nccl->other].nccl);
}

// Agrees on one device backend for all ranks. NCCL is used only if all ranks have the same version.
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
        return idist__fail(
            IDIST_ERR_UNSUPPORTED,
            "initialize: ipc needs at most %d ranks, all on one host, and CUDA 12.8 or later",
            IDIST__IPC_RANKS);

    if (!infos[0].wanted_backend) idist__gpu_join_log_obstacles(w, &nccl);
    if (idist__gpu_setup_find_shared(g, &a, &b))
        idist__log_print(&w->log, IDIST_LOG_INFO, "rank %d and rank %d share the GPU %s", b, a,
                         infos[a].bus_id);

    return IDIST_OK;
}

// Logs that no rank uses a device. If GPUs stay idle, the rank that causes this logs a warning.
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
    else idist__log_print(&w->log, IDIST_LOG_INFO, "no device: %s", w->about.no_device);
}

// Decides on the same outcome for all ranks: a device for each rank, no device at all, or an error.
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
    snprintf(w->about.no_device, sizeof w->about.no_device, "rank %d has none: %.160s", worst,
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
    gpu->thread = &w->progress.thread;
    gpu->sleep_ns = IDIST__GPU_SLEEP_NS;
    gpu->api = *w->backend;
    gpu->api.start = idist__gpu_engine_start;
    gpu->api.progress = idist__gpu_engine_progress;
    gpu->api.sleep = idist__gpu_engine_sleep;
    gpu->api.cancel = idist__gpu_engine_cancel;
    if (gpu->api.retract) gpu->api.retract = idist__gpu_engine_retract;
    if (gpu->api.quick_message) gpu->api.quick_message = idist__gpu_engine_quick_message;
    gpu->api.tell = idist__gpu_engine_tell;
    gpu->api.announce = idist__gpu_engine_announce;
    gpu->api.missing = idist__gpu_engine_missing;
    gpu->api.group_close = idist__gpu_engine_group_close;
    gpu->api.close = idist__gpu_engine_close;
    __atomic_store_n(&idist__gpu_home_device, gpu->device + 1, __ATOMIC_RELEASE);
    snprintf(w->about.device_name, sizeof w->about.device_name, "cuda:%d", gpu->device);
    w->backend = &gpu->api;
    w->device_api = &device_api;
}

// The memory that a world's `device` points to.
typedef struct idist__nccl_world {
    idist__gpu gpu; // must be first, because its address is passed to free
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

// Allocates the device backend's data for a world.
static idist_status idist__gpu_join_allocate(idist__world *w) {
    const idist_allocator *mem = &w->cfg.mem;
    idist__nccl_world *device = (idist__nccl_world *)idist__mem_alloc(mem, sizeof *device);
    size_t nbytes = sizeof(idist__gpu_rank_info) * (size_t)w->group.size;

    w->device = device ? &device->gpu : NULL; // an idist__gpu
    if (!device) return IDIST_ERR_NO_MEMORY;
    device->gpu.nccl = &device->nccl;
    device->gpu.rank_infos = (idist__gpu_rank_info *)idist__mem_alloc(mem, nbytes);
    if (!device->gpu.rank_infos) return IDIST_ERR_NO_MEMORY;

    return idist__gpu_join_copy_config(w);
}

// Finds out which device each rank has. Sets *all if every rank has one. `nthreads` is the number
// of threads of this process before CUDA starts its own threads. Called with the world's lock held.
static idist_status idist__gpu_join_meet(idist__world *w, int nthreads, bool *all) {
    idist__gpu *gpu = idist__gpu_of(w);
    idist__gpu_rank_info mine;
    idist_status status;

    idist__gpu_join_probe(w, gpu, &mine);
    w->machine.foreign_thread_count += idist__os_thread_count() - nthreads;
    status = idist__survey(&w->group, &mine, gpu->rank_infos, sizeof mine);
    if (status != IDIST_OK) return status;

    return idist__gpu_join_agree_device(w, all);
}

// Puts the device backend in front of the host's backend. Called with the world's lock held.
static idist_status idist__gpu_join_begin(idist__world *w) {
    idist__gpu_path path = IDIST__BY_HOST_MEMORY;
    idist_status status;

    idist__gpu_join_install(w);
    idist__gpu_setup_alloc_shared(w);
    status = idist__gpu_setup_group_make(&w->group);
    if (status == IDIST_OK) status = idist__gpu_setup_prepare(&w->group);
    if (w->group.device) path = idist__gpu_group_of(&w->group)->path;
    w->about.device_backend = idist__gpu_path_names[path];

    return status;
}

// Looks for a device on each rank of a new world. If all ranks have a device, puts the device
// backend in front of the host's backend. Collective.
static idist_status idist__gpu_join_wrap(idist__world *w) {
    int nthreads = idist__os_thread_count();
    idist_status status = idist__gpu_join_allocate(w);
    idist__gpu *gpu = idist__gpu_of(w);
    bool all = false;

    idist__world_lock(w);
    if (status == IDIST_OK) status = idist__gpu_join_meet(w, nthreads, &all);
    if (status == IDIST_OK && all) status = idist__gpu_join_begin(w);
    // If the world has failed, this rank reports the failure in its next call, as do ranks that
    // returned from this function earlier.
    if (w->group.status == IDIST_ERR_ABORTED || w->group.status == IDIST_ERR_MISMATCH)
        status = IDIST_OK;
    if (!all && !w->about.no_device[0])
        snprintf(w->about.no_device, sizeof w->about.no_device,
                 "the world failed before it had one");
    idist__os_mutex_unlock(&w->lock);

    if (status == IDIST_OK && all)
        idist__log_print(&w->log, IDIST_LOG_INFO, "device %s, device backend %s",
                         w->about.device_name, w->about.device_backend);
    else if (gpu && !gpu->host_backend) idist__gpu_engine_free(w); // otherwise, closing frees it

    return status;
}

static idist_status idist__gpu_join_claim(idist__config *config, const char **reason) {
    const char *asked = config->device_backend, *device = config->device;

    *reason = "desc.device or desc.device_backend names a device or a path of idist_xla.h";
    if (strcmp(asked, "xla") == 0) return IDIST_ERR_NO_BACKEND;
    if (strncmp(device, "xla", 3) == 0 || strncmp(device, "tpu", 3) == 0)
        return IDIST_ERR_NO_BACKEND;
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

// ---- base/end.h ----------------------------------------------------------------------------------

// base/end.h: undoes the settings of base/begin.h
//
// In a drop-in, tools/drop_ins.py adds an #undef for each macro of the implementation here, so that
// no macro reaches the program. Has no include guard, because each drop-in includes this file.

#ifdef IDIST__FAST_MATH
#if defined(__clang__)
#pragma float_control(pop)
#elif defined(__GNUC__)
#pragma GCC pop_options
#pragma pop_macro("__NO_MATH_ERRNO__")
#pragma pop_macro("__NO_TRAPPING_MATH__")
#pragma pop_macro("__NO_SIGNED_ZEROS__")
#pragma pop_macro("__RECIPROCAL_MATH__")
#pragma pop_macro("__ASSOCIATIVE_MATH__")
#pragma pop_macro("__FINITE_MATH_ONLY__")
#pragma pop_macro("__FAST_MATH__")
#endif
#undef IDIST__FAST_MATH
#endif

#pragma pop_macro("max")
#pragma pop_macro("min")
#pragma pop_macro("lock")
#pragma pop_macro("small")
#if defined(__SANITIZE_THREAD__) && !defined(__clang__) && __GNUC__ >= 11
#pragma GCC diagnostic pop
#endif
#if defined(__cplusplus) && defined(__GNUC__)
#pragma GCC diagnostic pop
#endif

#undef IDIST__CALLBACK
#undef IDIST__CATCH_EXIT
#undef IDIST__COUNT_OF
#undef IDIST__GPU_ABORT_MS
#undef IDIST__GPU_AHEAD
#undef IDIST__GPU_CHUNK
#undef IDIST__GPU_FAULT_MS
#undef IDIST__GPU_GRACE_MS
#undef IDIST__GPU_SLEEP_LONG_NS
#undef IDIST__GPU_SLEEP_NS
#undef IDIST__GPU_SLOTS
#undef IDIST__GPU_SPIN_NS
#undef IDIST__INLINE
#undef IDIST__IPC_CHUNK
#undef IDIST__IPC_KERNELS
#undef IDIST__IPC_LOAD_MS
#undef IDIST__IPC_PROBE
#undef IDIST__IPC_PROBE_MS
#undef IDIST__IPC_RANKS
#undef IDIST__IPC_SLOTS
#undef IDIST__IPC_SMALL
#undef IDIST__NCCL_CONFIG_MAGIC
#undef IDIST__NCCL_FILE
#undef IDIST__NCCL_FUNCTIONS
#undef IDIST__NCCL_LEAVE_MS
#undef IDIST__NOINLINE
#undef IDIST__NO_ALIAS
#undef IDIST__OS_MUTEX_INIT
#undef IDIST__PRINTF
#undef IDIST__PTX_NBYTES
#undef IDIST__PTX_OPERANDS
#undef IDIST__PTX_SCALED
#undef IDIST__PTX_THREADS
#undef IDIST__TLS
#undef IDIST__TRY
#undef IDIST__UNUSED
#undef IDIST__UNWIND_END
#undef IDIST__VECTORIZE

#endif // IDIST_IMPLEMENTATION
