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
#pragma once

#include "os/thread.h"
#include "core/model.h"

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
