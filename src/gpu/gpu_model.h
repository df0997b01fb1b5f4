// gpu/gpu_model.h: worlds, groups and calls, as device memory sees them
//
// The data of device memory: what the device adds to a world, a group and a task. gpu_device.h,
// pinned.h, gpu_task.h and stage.h work on the data; gpu/ipc and gpu/nccl build on those, and
// gpu/route chooses between them.
//
// Each of the core's structures has a `device` member that points to one of these:
//
//     idist__world.device -> idist__gpu         the device of this rank, NCCL, pinned memory
//     idist_group.device  -> idist__gpu_group   streams, communicator or arenas, queue of calls
//     idist__task.device  -> idist__gpu_op      a call on device memory, and how far it has come
//
// The world's lock protects them all, until the world has ended and one thread closes it. Some
// calls of CUDA and NCCL may wait for the device, and whatever runs there may wait for another
// rank; such calls are made without the lock, and gpu->user_count keeps the structures alive
// meanwhile. The functions that release the lock say so; what calls them has to look again at what
// may have changed: the group's status, the queue, gpu->stuck.
//
// What never comes back is given up at a deadline, and its memory is kept instead of freed:
//
//     what does not come back                 flag                   what stays in memory
//     copies on the streams of a group        gg->stuck              pinned memory of its calls
//     anything that waits for the device      gpu->stuck             what is mapped or pinned there
//     the probe of a group's arenas           setup.stuck            the arena; sets gpu->stuck
//     a job with a thread of its own          IDIST__JOB_STATE_LEFT  the job, until its thread ends
//     a thread of the program, inside a call  w->life.abandoned      the world; sets gpu->stuck
#pragma once

#include "os/thread.h"
#include "core/model.h"

#define IDIST__GPU_SPIN_NS ((int64_t)30000)         // a waiting thread polls that long, ...
#define IDIST__GPU_SLEEP_NS ((int64_t)20000)        // ... then sleeps, at first that long, ...
#define IDIST__GPU_SLEEP_LONG_NS ((int64_t)1000000) // ... and finally that long, between looks
#define IDIST__GPU_CHUNK ((size_t)4 << 20)          // bytes staged at a time
#define IDIST__GPU_SLOTS 3       // chunks in flight: leaving, with the backend, arriving
#define IDIST__GPU_AHEAD 1000    // calls a rank may enqueue before the others begin them
#define IDIST__GPU_GRACE_MS 200  // how long an abort waits for the device to finish
#define IDIST__GPU_FAULT_MS 1000 // how long the host may search for the rank NCCL complains of
#ifndef IDIST__GPU_ABORT_MS      // tests set less
#define IDIST__GPU_ABORT_MS 5000 // how long ncclCommAbort, or another clean-up, may take
#endif
#ifndef IDIST__IPC_CHUNK                    // tests set less
#define IDIST__IPC_CHUNK ((size_t)16 << 20) // bytes that the other ranks read at a time
#endif
#define IDIST__IPC_LOAD_MS 300000 // how long another thread may take to load the kernels
#define IDIST__IPC_SLOTS 4        // chunks in an arena
#define IDIST__IPC_SMALL 65536    // all_reduce: up to here each rank reduces everything itself
#define IDIST__IPC_RANKS 16
#define IDIST__IPC_KERNELS (CUDART_VERSION >= 12080) // this CUDA can load kernels from PTX

// The state of a job with a thread of its own. Jobs that can be left behind change it by atomic
// exchange: of the two, thread and waiter, the one that comes second frees the job.
enum {
    IDIST__JOB_STATE_RUNS = 0,
    IDIST__JOB_STATE_DONE = 1,
    IDIST__JOB_STATE_LEFT = 2 // nobody waits for it any more
};

// How the memory of a call travels.
typedef enum idist__gpu_path {
    IDIST__BY_HOST_MEMORY, // it is no device memory
    IDIST__BY_NCCL,
    IDIST__BY_IPC,
    IDIST__BY_STAGING
} idist__gpu_path;

// Host memory that is staged in, kept for the next call: pinning takes as long as many copies.
typedef struct idist__pinned {
    struct idist__pinned *next;
    void *data;
    size_t nbytes;
    bool is_pinned; // else copying it waits for what the stream holds, with the lock held
} idist__pinned;

// IDIST__IPC_SLOTS chunks on a device, mapped by other ranks. Memory that somebody maps must not be
// freed: the arena of a closed group is kept for the next group, and all arenas are unmapped before
// the last barrier of the world and freed after it. (A world that has failed ends without that
// barrier. A peer that still reads an arena then gets an error or garbage in a call that fails.)
typedef struct idist__ipc_arena {
    struct idist__ipc_arena *next;
    char *data;
    int rank;        // its owner, as a rank of the world
    uint32_t serial; // which of the owner's
} idist__ipc_arena;

// Whether a rank has a device, from best to worst.
typedef enum idist__gpu_presence {
    IDIST__GPU_FOUND,
    IDIST__GPU_NONE,    // none there, and none asked for by name
    IDIST__GPU_MISSING, // asked for by name, but not there
    IDIST__GPU_BAD_NAME
} idist__gpu_presence;

// What each rank tells the others when the world begins.
typedef struct idist__gpu_rank_info {
    int32_t presence;
    int32_t named;             // the device was asked for by name
    int32_t wanted_backend;    // the path that cfg.device_backend names; 0: any
    int32_t nccl;              // NCCL's version; 0: none
    int32_t major;             // of the compute capability
    int32_t has_user_comm;     // cfg.nccl_comm is set
    int32_t allows_shared_gpu; // the user says that NCCL takes several ranks on a GPU
    int32_t cuda_error;        // other than the absence of a driver or a GPU; 0: none
    uint64_t machine_key; // where bus_id identifies the device. NCCL goes by the machine, not by
                          // a host id of the user's.
    uint64_t process;     // idist__ipc_arena_process
    int32_t device;       // its number in that process
    char bus_id[28];
    char reason[160];
    char no_nccl_reason[160];
} idist__gpu_rank_info;

struct idist__nccl;      // NCCL's functions, ...
struct idist__nccl_gate; // ... who is inside them, ...
struct idist__nccl_job;  // ... and threads that wait for them: all in gpu/nccl

// The device of a world.
typedef struct idist__gpu {
    idist_backend_api api;                 // the world's backend, ...
    const idist_backend_api *host_backend; // ... and the one below, which moves host memory
    struct idist__nccl *nccl;
    void *nccl_config; // a copy of desc.nccl_config; NULL: none
    bool nccl_reduces_f8;
    int device;
    const idist__os_thread *thread; // the world's progress thread
    int (*context_state)(int device, unsigned *flags,
                         int *active); // cuDevicePrimaryCtxGetState; NULL: not found
    idist__gpu_rank_info *rank_infos;  // of all ranks
    idist__pinned *free_pinned;
    idist__pinned *abandoned_pinned;     // a copy to or from it may never end: never freed
    struct idist__pinning *pinning_job;  // memory that will be free_pinned
    int waiting_call_count;              // calls that wait for the device
    int64_t sleep_ns;                    // how long a thread that waits for it sleeps next
    int64_t spin_until_ns;               // until then it does not sleep
    bool queue_changed;                  // a call left its group's queue: the next one may go on
    int64_t checked_nccl_ns;             // when NCCL was last asked for errors
    struct idist__nccl_job *ending_jobs; // communicators being finalized, and aborted ones
    int *barrier_word;         // barriers on streams reduce it; NULL: no NCCL, or no memory
    cudaMemPool_t pool;        // for memory that idist allocates on a stream and gives to NCCL;
                               // NULL: the default pool is used
    idist__ipc_arena *arenas;  // our own that no group has
    idist__ipc_arena *imports; // mapped from other ranks
    uint32_t arena_count;      // our own ones ever made
    cudaError_t nccl_error;    // of making barrier_word and pool
    bool closed;               // idist_finalize has begun: no rank's memory is read any more
    bool stuck;                // something on the device never ends: nothing that waits for it is
                               // freed
    int user_count;            // threads that use this, or a group's part, without the lock
    int64_t leave_deadline_ns; // until then closing the world waits for them; 0: not begun
    bool loading;              // a thread loads the kernels, without the lock
#if IDIST__IPC_KERNELS
    cudaLibrary_t library;
    cudaKernel_t kernels[5]; // numbered in gpu/ipc/ptx.h
#endif
    idist__task *held_calls; // by the idist_group_begin of any thread, oldest first
} idist__gpu;

// The streams of a group. IPC uses the first one only.
enum { IDIST__STREAM_OUT, IDIST__STREAM_IN, IDIST__STREAM_NCCL, IDIST__STREAM_COUNT };

// The device's part of a group, made by its first call on device memory.
typedef struct idist__gpu_group {
    idist__gpu_path path;
    bool preparing, ready; // what the members set up together
    cudaStream_t stream[IDIST__STREAM_COUNT];
    idist__task *queue, **queue_end; // calls with parts left for the backend, in order
    void *comm;                      // NULL: none, or aborted
    bool adopted;                    // comm is the user's
    bool captured;                   // a CUDA graph may hold calls
    uint32_t ticket_count;           // calls that are to be handed to NCCL, in this order, ...
    uint32_t turn;                   // ... and the ticket whose turn it is
    struct idist__nccl_gate *gate;   // whether a thread is inside NCCL with comm; freed with the
                                     // group, or by the job that aborts comm
    int fault;                       // NCCL's error about another rank; 0: none
    int64_t fault_deadline_ns;       // until then the host may find out which rank
    bool must_abort; // comm is to be aborted; without ncclCommRevoke by the thread inside NCCL,
                     // when its call returns
    struct idist__nccl_job *abort_job; // aborts what was comm, until the job is left to itself
    bool waited_for_abort;             // its grace has been spent: not again
    bool stuck;                        // its copies never end
    idist__ipc_arena *own_arena;
    char *arena[IDIST__IPC_RANKS]; // of each member
} idist__gpu_group;

// A chunk being staged.
typedef struct idist__gpu_slot {
    idist__pinned *memory;
    cudaEvent_t out, in;
} idist__gpu_slot;

typedef enum idist__gpu_state {
    IDIST__GPU_WAIT, // for what the caller's stream holds
    IDIST__GPU_MOVE, // chunks are moving
    IDIST__GPU_END   // only op->event is left to wait for
} idist__gpu_state;

// A call on device memory. Members from `event` on are kept when the task is used again.
typedef struct idist__gpu_op {
    idist__gpu_path path;
    idist__gpu_state state;
    idist__call call;               // as the program made it; the backend gets parts of it
    idist__fingerprint fingerprint; // what the ranks compare
    idist__user_op user;            // a copy: the program may free the op meanwhile
    bool waits_for_device;          // counted in gpu->waiting_call_count
    bool waits_for_memory;          // pinned memory
    bool with_backend;              // the host's backend has a part of it
    uint32_t ticket;             // its place in the order of its group, see idist__nccl_launch_call
    bool launched;               // NCCL has it
    bool met;                    // NCCL: all ranks have made the call
    idist_status meeting_status; // NCCL: the ranks met, but do not agree on a message
    size_t size;                 // bytes per element
    size_t chunk_count;          // elements of each part of the buffers that move at a time
    size_t nchunks;
    size_t enqueued_count;      // chunks (IPC: phases) enqueued on the device
    size_t started_count;       // those given to the host's backend
    cudaError_t error;          // of a copy, reported at the next safe place
    idist_recv_info info;       // of a staged receive, if the program does not ask for it
    uint64_t message_nbytes;    // of a send or receive over NCCL: the sender tells the receiver
    void *comm;                 // used by this call; NULL: aborted
    void *send_copy;            // of an all_to_all in place
    uint64_t *counts;           // v-forms: ours, theirs, and those we expect of them
    const void *holding_thread; // its idist_group_begin holds the call back
    idist__task *next_held;     // in gpu->held_calls
    idist__task *next_queued;   // in the group's queue
    cudaEvent_t event;
    uint64_t *counts_memory;
    idist__gpu_slot slots[IDIST__GPU_SLOTS];
} idist__gpu_op;

static idist__gpu *idist__gpu_of(const idist__world *w) { return (idist__gpu *)w->device; }

static idist__gpu_group *idist__gpu_group_of(const idist_group *g) {
    return (idist__gpu_group *)g->device;
}

static idist__gpu_op *idist__gpu_op_of(const idist__task *t) { return (idist__gpu_op *)t->device; }
