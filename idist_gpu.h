/* idist_gpu.h - v0.2.0 - what NCCL, CUDA IPC and staging have in common - MIT licence

    The lower half of idist_nccl.h, which includes it; there is nothing in it to call. It holds the
    data structures of device memory, the current device of a thread, pinned memory, the parts in
    which a call goes to the backend of the host, and staging: the way of device memory through
    pinned memory, which needs neither NCCL nor CUDA IPC. idist_ipc.h and idist_nccl.h are built on
    it.

CONTENTS

      [gpu:types]   worlds, groups and calls, as device memory sees them
      [gpu:device]  CUDA errors, and whose device is the current one
      [gpu:pinned]  host memory that devices copy from
      [gpu:task]    calls, and the parts of them that the host's backend gets
      [gpu:agree]   what the members of a group tell each other
      [gpu:leave]   closing a world waits for the threads that use it
      [gpu:stage]   calls that go through pinned memory, a chunk at a time
*/
#ifndef IDIST_NCCL_H
#include "idist_nccl.h" // which includes this file where it belongs
#endif

#if defined(IDIST__INSIDE_NCCL_H) && !defined(IDIST_GPU_IMPLEMENTATION_DONE)
#define IDIST_GPU_IMPLEMENTATION_DONE

//------------------------------------------------------------------------------
// [gpu:types]  worlds, groups and calls, as device memory sees them
// uses os:thread model
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
//     a thread of the program, inside a call  w->abandoned           the world; sets gpu->stuck
//------------------------------------------------------------------------------

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
struct idist__nccl_job;  // ... and threads that wait for them: all in idist_nccl.h

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
    cudaKernel_t kernels[7]; // numbered in [ipc:ptx]
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
                     // once it comes out
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

//------------------------------------------------------------------------------
// [gpu:device]  CUDA errors, and whose device is the current one
// uses clock os:thread library fail model core:group types
//------------------------------------------------------------------------------

// Waits a little, longer from turn to turn: yields at first, later sleeps up to 1 ms.
static void idist__gpu_device_nap(int *turns) {
    if (++*turns <= 50) idist__os_thread_yield();
    else idist__os_clock_pause_ns(*turns <= 100 ? 50000 : 1000000);
}

static idist_status idist__gpu_device_fail(const char *what, cudaError_t error) {
    cudaGetLastError(); // reported here: nobody else should get it again
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
    // Old runtimes call plain memory invalid.
    return error == cudaErrorInvalidValue ? cudaSuccess : error;
}

// Fails the group because of this rank, for the reason in idist_last_error.
static void idist__gpu_device_fail_group(idist_group *g, idist_status status) {
    char cause[300];
    snprintf(cause, sizeof cause, "rank %d: %.250s", g->w->cfg.rank, idist__me.text);
    idist__group_fail(g, status, cause);
}

// Looks in the program, if it is linked with the driver's library, or in that library, which the
// runtime has loaded by now.
static void idist__gpu_device_find_context_state(idist__gpu *gpu) {
    static const char name[] = "cuDevicePrimaryCtxGetState";
    void *library = idist__os_library_open(NULL),
         *at = library ? idist__os_library_find(library, name) : NULL;

    if (!at) library = idist__os_library_loaded("libcuda.so.1");
    if (!at && library) at = idist__os_library_find(library, name);
    memcpy(&gpu->context_state, &at, sizeof at);
}

// Whether cudaSetDevice(device) would create a context there, as it does from CUDA 12 on where none
// exists. A context takes hundreds of MB of a GPU that is another rank's. (cudaGetDevice is 0 in a
// thread that never chose a device.)
static bool idist__gpu_device_lacks_context(const idist__gpu *gpu, int device) {
    unsigned flags = 0;
    int active = 1;

    if (CUDART_VERSION < 12000 || !gpu->context_state) return false;
    return gpu->context_state(device, &flags, &active) == 0 && !active;
}

// Makes our device the current one. Returns the one before, for idist__gpu_device_restore.
static int idist__gpu_device_set(const idist__gpu *gpu) {
    int device = gpu->device;

    cudaGetDevice(&device);
    if (device != gpu->device) cudaSetDevice(gpu->device);
    return device;
}

// A thread that had not chosen a device keeps ours, and so does our own thread.
static void idist__gpu_device_restore(const idist__gpu *gpu, int device) {
    if (device == gpu->device || idist__gpu_device_lacks_context(gpu, device)) return;
    if (gpu->thread && idist__os_thread_equal(*gpu->thread, idist__os_thread_self())) return;
    cudaSetDevice(device);
}

// From idist__gpu_device_enter to idist__gpu_device_leave our device is the current one, and a
// stream capture of another thread does not make CUDA calls fail.
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

// The device that a world chose last, plus 1; 0: none ever did. Atomic. It outlives the world, as
// its context does.
static int idist__gpu_home_device;

// The same as idist__gpu_device_enter and idist__gpu_device_leave, for memory that belongs to no
// world. Does nothing if no world ever had a device.
typedef struct idist__gpu_home {
    idist__gpu gpu; // only what the guard needs
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

//------------------------------------------------------------------------------
// [gpu:pinned]  host memory that devices copy from
// uses clock os:thread os:memory mem base:log model calls:memory types device
//------------------------------------------------------------------------------

// Pinning memory may wait for all work of the device: for an NCCL kernel, say, that waits for a
// lost rank. Whoever would abort it needs the world's lock, so a thread of its own pins the memory.
typedef struct idist__pinning {
    idist__pinned *memory;
    int device;
    cudaError_t error;
    int state; // atomic: IDIST__JOB_STATE_RUNS or IDIST__JOB_STATE_DONE; the waiter frees the job
    idist__os_thread thread;
} idist__pinning;

// Memory that cannot be pinned serves all the same, only slower (idist__stage_may_copy).
static void *idist__pinned_work(void *arg) {
    idist__pinning *job = (idist__pinning *)arg;
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;

    cudaSetDevice(job->device);
    cudaThreadExchangeStreamCaptureMode(&mode);
    job->error = cudaHostRegister(job->memory->data, job->memory->nbytes, cudaHostRegisterPortable);
    __atomic_store_n(&job->state, IDIST__JOB_STATE_DONE, __ATOMIC_RELEASE);
    return NULL;
}

// Memory that the ranks of a host share, if the backend provides it; otherwise plain memory. None
// is ever given back, so sizes are powers of two.
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

// Collects the memory that a thread has pinned. False: the thread is still at it.
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

// At least nbytes of memory, pinned if that is possible: the smallest that fits. NULL with *later:
// a thread is pinning memory, ask again. NULL without: out of memory.
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

// Like idist__pinned_give, but nobody gets the memory any more: a copy may still use it.
static void idist__pinned_abandon(idist__gpu *gpu, idist__pinned **p) {
    if (!*p) return;
    (*p)->next = gpu->abandoned_pinned;
    gpu->abandoned_pinned = *p;
    *p = NULL;
}

// At the end of a world: waits for the thread that pins memory. If it does not come back the device
// is busy.
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

// Frees memory that has been unpinned. If the device is stuck, it is still pinned, and is kept.
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
        cudaGetLastError(); // the caller reports it
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

//------------------------------------------------------------------------------
// [gpu:task]  calls, and the parts of them that the host's backend gets
// uses clock kind model core:world core:task core:call types device pinned
//------------------------------------------------------------------------------

static void idist__gpu_task_set_waiting(idist__task *t, bool waits) {
    idist__gpu *gpu = idist__gpu_of(t->group->w);
    idist__gpu_op *op = idist__gpu_op_of(t);

    if (op->waits_for_device == waits) return;
    op->waits_for_device = waits;
    gpu->waiting_call_count += waits ? 1 : -1;
    if (waits) gpu->sleep_ns = IDIST__GPU_SLEEP_NS;
    if (waits) gpu->spin_until_ns = idist__os_clock_now_ns() + IDIST__GPU_SPIN_NS;
    if (waits && t->group->w->driver != IDIST__DRIVER_NONE)
        gpu->host_backend->wake(t->group->w); // a sleeping driver polls the device too
}

// Whether the event that a call waits for has come. On an error of CUDA the call has failed and is
// gone.
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

// Gives the host's backend a part of a call. The first part carries the fingerprint that the ranks
// compare. The part may be done on return.
static void idist__gpu_task_start_part(idist__task *t, const idist__call *part) {
    idist__gpu *gpu = idist__gpu_of(t->group->w);
    idist__gpu_op *op = idist__gpu_op_of(t);

    t->call = *part;
    t->call.label = op->call.label;
    t->away = t->announced = false;
    t->group->w->timers_due_ns = 0; // timers look at it again
    op->with_backend = true;
    idist__gpu_task_set_waiting(t, false);

    if (!idist__kind_is_p2p(part->kind)) {
        t->seq = ++t->group->seq;

        if (!t->whole.kind) {
            t->whole = op->fingerprint;
            t->whole.seq = t->seq;
        }
    }

    memset(t->impl, 0, gpu->host_backend->task_nbytes); // a new task to the backend
    gpu->host_backend->start(t);
}

// A part that moves no data: the ranks meet and compare fingerprints.
static void idist__gpu_task_start_barrier(idist__task *t) {
    idist__call part;
    idist__call_init(&part, IDIST__BARRIER, NULL, NULL, 0, IDIST_U8);
    idist__gpu_task_start_part(t, &part);
}

// How many parts of `count` elements the buffers of a call have.
typedef struct idist__gpu_shape {
    size_t send, recv;   // on this rank; 0: no such buffer
    size_t most;         // the largest number on any rank
    size_t contribution; // the largest number that others read from a rank
} idist__gpu_shape;

static idist__gpu_shape idist__gpu_task_shape_of(const idist_group *g, const idist__call *c) {
    size_t n = (size_t)g->size;
    bool root = c->root == g->rank;
    idist__gpu_shape shape;

    shape.send = shape.recv = shape.most = shape.contribution = 1;

    switch (c->kind) {
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

// Copies k elements of each of `parts` parts, which lie to_count and from_count elements apart.
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
    for (i = 0; i < IDIST__GPU_SLOTS; i++) // the copies are done, or ordered before the next user's
        idist__pinned_give(idist__gpu_of(t->group->w), &op->slots[i].memory);
}

static void idist__gpu_task_complete(idist__task *t) {
    idist__gpu_op_of(t)->state = IDIST__GPU_END;
    t->away = false;
    idist__task_complete(t, IDIST_OK, "");
}

static bool idist__gpu_task_op_is_premul(const idist_group *g, const idist__call *c) {
    return (int)c->op >= IDIST_OP_USER && !idist__world_user_op(g, c)->fn;
}

//------------------------------------------------------------------------------
// [gpu:agree]  what the members of a group tell each other
// uses clock mutex fail text mem kind model core:world core:call
//------------------------------------------------------------------------------

// Waits until `ready` or the deadline, while the backend watches the other ranks. The lock is held,
// and released meanwhile. False: the deadline has passed.
static bool idist__gpu_agree_wait_until(idist__world *w, bool (*ready)(const void *arg),
                                        const void *arg, int64_t deadline_ns) {
    while (!ready(arg)) {
        if (idist__os_clock_now_ns() > deadline_ns) return false;
        idist__os_mutex_unlock(&w->lock);
        idist__os_clock_pause_ms(1);
        idist__world_lock(w);
        if (w->driver == IDIST__DRIVER_NONE && !w->thread_stops) w->backend->progress(w);
    }

    return true;
}

// All-gathers nbytes of each member. Called with the lock, which is released while waiting.
static idist_status idist__gpu_agree_exchange(idist_group *g, const void *mine, void *all,
                                              size_t nbytes) {
    idist__call c;
    idist_opts o;
    idist_status status;
    int depth = idist__me.group_depth; // of idist_group_begin, which must not hold this call back

    memset(&o, 0, sizeof o);
    o.group = g;
    idist__call_init(&c, IDIST__ALL_GATHER, mine, all, nbytes, IDIST_U8);
    c.label = IDIST__FIRST_DEVICE_CALL;
    idist__me.group_depth = 0;
    status = idist__call_locked(g, &c, &o);
    idist__me.group_depth = depth;

    return status;
}

// What one member tells the others.
typedef struct idist__gpu_outcome {
    int32_t failed;
    char reason[200];
} idist__gpu_outcome;

// Whether all members succeeded. If not, `reason` becomes that of the first that did not.
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
    status = idist__gpu_agree_exchange(g, &mine, theirs, sizeof mine);
    for (i = 0; status == IDIST_OK && i < g->size && !theirs[i].failed; i++) continue;
    *all = status == IDIST_OK && i == g->size;
    if (status == IDIST_OK && !*all)
        snprintf(reason, capacity, "rank %d: %.200s", g->ranks[i], theirs[i].reason);
    idist__mem_free(&g->w->cfg.mem, theirs);

    return status;
}

//------------------------------------------------------------------------------
// [gpu:leave]  closing a world waits for the threads that use it
// uses clock mutex fail model types device agree
//
// The thread that closes a world calls idist__gpu_leave_wait_unused. A thread that has released the
// lock asks idist__gpu_leave_goes_on when it has it again, and leaves if the world is being closed.
//------------------------------------------------------------------------------

// Called when the lock has been released meanwhile: another thread may be closing the world, and
// waits for us to leave it.
static idist_status idist__gpu_leave_goes_on(const idist_group *g, idist_status status) {
    if (status != IDIST_OK || !g->w->thread_stops) return status;
    return idist__fail(IDIST_ERR_STATE, "another thread closes the world");
}

static bool idist__gpu_leave_is_unused(const void *arg) {
    return !idist__gpu_of((const idist__world *)arg)->user_count;
}

// Sets, once, the deadline by which other threads must have left the world.
static void idist__gpu_leave_set_deadline(idist__gpu *gpu) {
    if (!gpu->leave_deadline_ns)
        gpu->leave_deadline_ns = idist__os_clock_deadline(IDIST__GPU_ABORT_MS);
}

// Takes the lock in the thread that closes the world. False: another thread never releases it; the
// world is abandoned.
static bool idist__gpu_leave_lock(idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);
    int turns = 0;

    idist__gpu_leave_set_deadline(gpu);

    while (!w->abandoned && !idist__os_mutex_try_lock(&w->lock)) {
        w->abandoned = idist__os_clock_now_ns() > gpu->leave_deadline_ns;
        idist__gpu_device_nap(&turns);
    }

    return !w->abandoned;
}

// The world is being closed: waits, once, for the threads that use without the lock what is to be
// freed. If some still do (w->abandoned), nothing that they use is freed. Called without the lock.
static void idist__gpu_leave_wait_unused(idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);

    if (idist__gpu_leave_lock(w)) {
        w->abandoned =
            !idist__gpu_agree_wait_until(w, idist__gpu_leave_is_unused, w, gpu->leave_deadline_ns);
        idist__os_mutex_unlock(&w->lock);
    }

    gpu->stuck = gpu->stuck || w->abandoned;
}

//------------------------------------------------------------------------------
// [gpu:stage]  calls that go through pinned memory, a chunk at a time
// uses kind model core:group extent types pinned task
//
// Any call on device memory that no other path supports is staged. The host's backend gets each
// chunk as a call of its own, with pinned memory for its buffers. Meanwhile the next chunk leaves
// the device and the one before arrives there:
//
//     out   0  1  2  3        a chunk of a buffer of n parts is a piece of each part, so that any
//     host     0  1  2  3     collective of k elements per rank is one of fewer elements per rank
//     in          0  1  2  3
//
// Calls whose parts differ in size (v-forms, send and receive) are one chunk.
//
//     idist__stage_step  called for the head of the group's queue: copies chunks out as slots are
//                        free, and gives the next one that is out to the host's backend
//     idist__stage_part_done  the backend is done with a chunk: copies it in
//------------------------------------------------------------------------------

static bool idist__stage_is_unchunked(const idist__call *c) {
    return idist__kind_is_v(c->kind) || idist__kind_is_p2p(c->kind);
}

static void idist__stage_plan_chunks(idist__task *t, size_t nbytes, size_t parts) {
    idist__gpu_op *op = idist__gpu_op_of(t);
    const idist__call *c = &op->call;

    op->enqueued_count = op->started_count = 0;
    op->nchunks = 1;
    op->chunk_count = c->count;
    if (idist__stage_is_unchunked(c) || c->kind == IDIST__BARRIER) return;
    op->chunk_count = nbytes / parts / op->size;
    if (op->chunk_count > 1024) op->chunk_count &= ~(size_t)1023;
    if (!op->chunk_count) op->chunk_count = 1;
    if (op->chunk_count > c->count) op->chunk_count = c->count;
    if (op->chunk_count) op->nchunks = (c->count + op->chunk_count - 1) / op->chunk_count;
}

// The host's call for chunk `nth`: its buffers are pinned memory, the same for both where the call
// works in place. False: no memory yet (op->waits_for_memory), or none at all.
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

// Whether a copy between the device and this memory may be enqueued. If the memory is not pinned,
// the copy blocks this thread until the stream comes to it, so the group's streams must be idle.
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

// Copies the next chunk out of the device. False: there is no pinned memory for it (yet), or it is
// not its turn.
static bool idist__stage_out(idist__task *t) {
    idist_group *g = t->group;
    idist__gpu_group *gg = idist__gpu_group_of(g);
    idist__gpu_op *op = idist__gpu_op_of(t);
    const idist__call *c = &op->call;
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
    if (error == cudaSuccess && idist__stage_is_unchunked(c) && part.send &&
        idist__extent_of(g, &part, &e) == IDIST_OK)
        error = idist__gpu_task_copy((void *)(uintptr_t)part.send, 0, c->send, 0, e.send, 1,
                                     op->size, gg->stream[IDIST__STREAM_OUT]);
    else if (error == cudaSuccess && c->kind == IDIST__BROADCAST && c->root == g->rank)
        error = idist__gpu_task_copy(part.recv, 0, (char *)c->recv + at, 0, part.count, 1, op->size,
                                     gg->stream[IDIST__STREAM_OUT]);
    else if (error == cudaSuccess && !idist__stage_is_unchunked(c) && part.send)
        error = idist__gpu_task_copy((void *)(uintptr_t)part.send, part.count,
                                     (const char *)c->send + at, c->count, part.count,
                                     idist__gpu_task_shape_of(g, c).send, op->size,
                                     gg->stream[IDIST__STREAM_OUT]);
    if (op->error == cudaSuccess) op->error = error; // the first error is reported
    if (op->error == cudaSuccess)
        op->error = cudaEventRecord(slot->out, gg->stream[IDIST__STREAM_OUT]);
    op->enqueued_count++;

    return true;
}

// Copies in what a call in one chunk has received: the parts of a v-form, or the message.
static cudaError_t idist__stage_in_whole(idist__task *t, const idist__call *part,
                                         cudaStream_t stream) {
    const idist_group *g = t->group;
    idist__gpu_op *op = idist__gpu_op_of(t);
    const idist__call *c = &op->call;
    cudaError_t error = cudaSuccess;
    size_t count;
    int i;

    if (c->kind == IDIST__RECV || c->kind == IDIST__SCATTERV || c->kind == IDIST__REDUCE_SCATTERV) {
        count = c->kind == IDIST__RECV ? part->info->count : c->count;
        return idist__gpu_task_copy(c->recv, 0, part->recv, 0, count, 1, op->size, stream);
    }

    for (i = 0; i < g->size && error == cudaSuccess; i++) {
        char *to = idist__extent_part(c, (char *)c->recv, i, g->rank, false, &count);
        error = idist__gpu_task_copy(to, 0, (char *)part->recv + (to - (char *)c->recv), 0, count,
                                     1, op->size, stream);
    }

    return error;
}

// Copies the chunk that the host's backend has just finished to the device.
static cudaError_t idist__stage_in(idist__task *t) {
    idist_group *g = t->group;
    idist__gpu_group *gg = idist__gpu_group_of(g);
    idist__gpu_op *op = idist__gpu_op_of(t);
    const idist__call *c = &op->call;
    size_t nth = op->started_count - 1, at = nth * op->chunk_count * op->size;
    idist__gpu_slot *slot = &op->slots[nth % IDIST__GPU_SLOTS];
    bool keeps = (c->kind == IDIST__BROADCAST && c->root == g->rank) ||
                 (c->kind == IDIST__EXSCAN && g->rank == 0);
    cudaError_t error = cudaSuccess;
    idist__call part;

    if (!idist__stage_slot(t, nth, &part)) return cudaErrorMemoryAllocation;
    if (idist__stage_is_unchunked(c) && part.recv)
        error = idist__stage_in_whole(t, &part, gg->stream[IDIST__STREAM_IN]);
    else if (part.recv && !keeps)
        error = idist__gpu_task_copy((char *)c->recv + at, c->count, part.recv, part.count,
                                     part.count, idist__gpu_task_shape_of(g, c).recv, op->size,
                                     gg->stream[IDIST__STREAM_IN]);
    if (error == cudaSuccess) error = cudaEventRecord(slot->in, gg->stream[IDIST__STREAM_IN]);

    return error;
}

// One step of the call at the head of its group's queue. False: it waits, or has failed.
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
            break; // chunks that are out already proceed
        }

    if (!idist__gpu_task_event_done(t, slot->out)) return false;
    if (!idist__stage_may_copy(t, slot->memory)) return false; // in again, when the part is done
    idist__stage_slot(t, op->started_count++, &part);
    if (op->started_count == op->nchunks)
        idist__gpu_task_dequeue(t); // the next calls may use the backend now
    idist__gpu_task_start_part(t, &part);

    return true;
}

// The host's backend is done with a chunk. True: the call is complete. The caller's stream need not
// wait for op->event, because the call itself does before it returns.
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

#endif // IDIST__INSIDE_NCCL_H
