/* idist_gpu.h - v0.1.0 - device memory, below NCCL and CUDA IPC - MIT licence */
#ifndef IDIST_NCCL_H
#include "idist_nccl.h" // which includes this file where it belongs
#endif

#if defined(IDIST__INSIDE_NCCL_H) && !defined(IDIST_GPU_IMPLEMENTATION_DONE)
#define IDIST_GPU_IMPLEMENTATION_DONE

//------------------------------------------------------------------------------
// [gpu:types]  worlds, groups and calls, as device memory sees them
// uses world
//------------------------------------------------------------------------------

#define IDIST__GPU_SPIN_NS ((int64_t)30000)        // that who waits for it looks before it sleeps
#define IDIST__GPU_LOOK_NS ((int64_t)20000)        // how long it sleeps at first, ...
#define IDIST__GPU_LOOK_LONG_NS ((int64_t)1000000) // ... and later
#define IDIST__GPU_CHUNK ((size_t)4 << 20)         // bytes that are staged at a time
#define IDIST__GPU_SLOTS 3    // one on its way out, one with the backend, one on its way in
#define IDIST__GPU_AHEAD 1000 // calls that a rank may have enqueued and the others not begun
#define IDIST__GPU_LET_MS 200 // how long who has given up waits for the device to be free
#define IDIST__GPU_FAULT_MS \
    1000                    // how long the host may take to find the rank that NCCL complains of
#ifndef IDIST__GPU_ABORT_MS // tests wait for less
#define IDIST__GPU_ABORT_MS 5000 // how long ncclCommAbort, or another end, may take
#endif
#ifndef IDIST__IPC_CHUNK                    // tests make do with less
#define IDIST__IPC_CHUNK ((size_t)16 << 20) // bytes that others read at a time
#endif
#define IDIST__IPC_LOAD_MS 300000 // how long another thread may take to load the kernels
#define IDIST__IPC_SLOTS 4        // chunks that an arena has room for
#define IDIST__IPC_SMALL 65536    // up to here each rank adds up everything itself
#define IDIST__IPC_RANKS 16
#define IDIST__IPC_KERNELS (CUDART_VERSION >= 12080) // it can load them

// How far a job has come that has a thread of its own. It changes hands by atomic exchange: whoever
// comes second frees the job.
enum {
    IDIST__JOB_RUNS = 0,
    IDIST__JOB_DONE = 1,
    IDIST__JOB_LEFT = 2 // nobody waits for it any more
};

// How device memory gets to the other ranks. The numbers are those of cfg.device_backend. HOST: it
// is host memory.
typedef enum idist__gpu_path {
    IDIST__BY_HOST_MEMORY,
    IDIST__BY_NCCL,
    IDIST__BY_IPC,
    IDIST__BY_STAGING
} idist__gpu_path;

// Pinned memory, kept for the next call: to make it takes as long as many copies.
typedef struct idist__pinned {
    struct idist__pinned *next;
    void *at;
    size_t nbytes;
} idist__pinned;

// IDIST__IPC_SLOTS chunks on a device, which other ranks map. Nobody frees one that is mapped:
// those of a group that is gone wait for the next group, and all are closed before the last barrier
// of a world and freed after it.
typedef struct idist__ipc_arena {
    struct idist__ipc_arena *next;
    char *at;
    int rank;        // of the world, whose it is
    uint32_t serial; // of those of that rank
} idist__ipc_arena;

// What a rank tells the others when the world begins.
typedef struct idist__gpu_card {
    int32_t has, named; // LACKS: it was asked for by name
    int32_t wanted;     // cfg.device_backend
    int32_t nccl;       // its version; 0: none
    int32_t major;      // of the compute capability
    int32_t adopts;     // cfg.nccl_comm is there
    int32_t forced;     // several ranks on a GPU: the user says that NCCL takes it
    int32_t unwell;     // an error of CUDA's that is not the plain absence of a driver or a GPU
    uint64_t machine;   // where bus says which device it is; NCCL cares for that, and not for host
                        // ids that the user gave
    char bus[32], why[160], why_no_nccl[160];
} idist__gpu_card;

typedef struct idist__gpu {         // of a world
    idist_backend_api api;          // what the world's backend is now, ...
    const idist_backend_api *under; // ... and what it was, which moves the host's memory
    struct idist__nccl *nccl;       // its functions (idist_nccl.h)
    bool nccl_f8;                   // it reduces floats of 8 bits
    int device;
    const pthread_t *thread; // the world's own
    int (*context_state)(int device, unsigned *flags,
                         int *active); // cuDevicePrimaryCtxGetState; NULL: not found
    idist__gpu_card *cards;            // of all ranks
    idist__pinned *spare;
    struct idist__pinning *pinning; // memory that will be spare
    int nwaiting;                   // calls that wait for the device
    int64_t nap_ns;                 // of who waits for it
    int64_t spin_until_ns;          // until then they take no nap
    bool stirred;                   // a call left the queue of its group: the next one may go on
    int64_t looked_ns;              // when NCCL was asked for errors
    struct idist__nccl_job *ending; // communicators
    int *word;                      // barriers on streams work on it; NULL: no NCCL, or no memory
    idist__ipc_arena *arenas, *imports; // our own that no group has; those of others
    uint32_t narenas;
    bool closed;      // idist_finalize has begun: the memory of other ranks is read no more
    bool stuck;       // something on the device never ends: what would wait for it is left alone
    int nusers;       // threads that use this, or what a group has of a device, without the lock
    int64_t leave_ns; // the end of the world waits for them until then; 0: it has not come
    bool loading;     // a thread loads what follows, without the lock
#if IDIST__IPC_KERNELS
    cudaLibrary_t library;
    cudaKernel_t kernels[7]; // F16, BF16, F32, F64; then those that pack
#endif
    idist__task *held; // by idist_group_begin, in their order
} idist__gpu;

// The device's part of a group, made by its first call on device memory.
typedef struct idist__gpu_group {
    idist__gpu_path path;
    bool making, ready;            // what the members have together
    cudaStream_t stream[3];        // out, or all of IPC; in; NCCL
    idist__task *queue, **last;    // calls that still want something of the backend, in their order
    void *comm;                    // NULL also: it was aborted
    bool adopted;                  // it is the user's
    bool captured;                 // a graph may hold calls
    bool launching;                // a thread hands calls to NCCL, without the lock
    struct idist__nccl_gate *gate; // whether it is inside
    int fault;                     // what NCCL says of another rank; 0: nothing
    int64_t fault_ns;              // when the host will not find out any more which one it is
    struct idist__nccl_job *job;   // the abort
    bool waited;                   // for the abort
    idist__ipc_arena *own;
    char *arena[IDIST__IPC_RANKS]; // of each member
} idist__gpu_group;

typedef struct idist__gpu_slot { // a chunk that is staged
    idist__pinned *memory;
    cudaEvent_t out, in;
} idist__gpu_slot;

typedef enum idist__gpu_state {
    IDIST__GPU_WAIT, // for what the caller's stream holds
    IDIST__GPU_MOVE, // its chunks go their way
    IDIST__GPU_END   // nothing is left to do but to wait for op->event
} idist__gpu_state;

// A call on device memory.
typedef struct idist__gpu_op {
    idist__gpu_path path;
    idist__gpu_state state;
    idist__call call;            // as the program made it; the backend gets parts of it
    idist__print print;          // what the ranks compare
    idist__user_op user;         // a copy: the program may free the op meanwhile
    bool waiting;                // counted in gpu->nwaiting
    bool running;                // the backend has a part of it
    bool launched;               // NCCL has it
    bool landed;                 // and all ranks have come
    idist_status doomed;         // the host's part of a send or receive on a stream failed
    bool pinning;                // it waits for pinned memory
    size_t size;                 // bytes per element
    size_t chunk;                // elements of each part of the buffers that move at a time
    size_t nchunks, nout, nhost; // all of them; sent to the host; given to the backend
    cudaError_t error;           // of a copy, to be told when nobody is in the middle of something
    idist_recv_info info;
    uint64_t slip[2]; // before a send on a stream: how many bytes
    void *comm;       // NULL: it was aborted
    void *away;       // what an all_to_all in place sends, out of the way
    uint64_t
        *counts; // where only pairs of ranks know them: ours, theirs, and what we expect of them
    const void *holder; // the thread whose idist_group_begin holds it back
    idist__task *held;  // the next of those
    idist__task *after; // the next in the group's queue
    cudaEvent_t event;  // not cleared from here on
    uint64_t *room;     // of counts
    idist__gpu_slot slots[IDIST__GPU_SLOTS];
} idist__gpu_op;

static idist__gpu *idist__gpu_of(const idist__world *w) { return (idist__gpu *)w->device; }
static idist__gpu_group *idist__gpu_group_of(const idist_group *g) {
    return (idist__gpu_group *)g->device;
}
static idist__gpu_op *idist__gpu_op_of(const idist__task *t) { return (idist__gpu_op *)t->device; }

//------------------------------------------------------------------------------
// [gpu:device]  CUDA errors, and whose device is the current one
// uses err world types
//------------------------------------------------------------------------------

// Waits a little, longer from turn to turn.
static void idist__gpu_nap(int *turns) {
    struct timespec nap = {0, 50000};

    if (++*turns <= 50) {
        sched_yield();
        return;
    }

    if (*turns > 100) nap.tv_nsec = 1000000;
    nanosleep(&nap, NULL);
}

static idist_status idist__gpu_fail(const char *what, cudaError_t error) {
    cudaGetLastError(); // it is told here; the next to ask shall not hear it again
    if (error == cudaErrorMemoryAllocation)
        return idist__fail(IDIST_ERR_NO_MEMORY, "%s: %s", what, cudaGetErrorString(error));

    return idist__fail(
        IDIST_ERR_DEVICE, "%s: %s (%s)%s", what, cudaGetErrorString(error), cudaGetErrorName(error),
        error == cudaErrorInvalidResourceHandle
            ? "; is the stream one of idist_device()? Each thread chooses by cudaSetDevice"
            : "");
}

// The group fails because of this rank; idist_last_error has the reason.
static void idist__gpu_fail_group(idist_group *g, idist_status status) {
    char cause[300];
    snprintf(cause, sizeof cause, "rank %d: %.250s", g->w->cfg.rank, idist__me.text);
    idist__group_fail(g, status, cause);
}

// From the program, where it has the driver's library, or from that library, which the runtime has
// loaded by now.
static void idist__gpu_find_context_state(idist__gpu *gpu) {
    static const char name[] = "cuDevicePrimaryCtxGetState";
    void *library = dlopen(NULL, RTLD_NOW), *at = library ? dlsym(library, name) : NULL;

    if (!at) library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (!at && library) at = dlsym(library, name);
    memcpy(&gpu->context_state, &at, sizeof at);
}

// Whether cudaSetDevice(device) would make a context there, which takes hundreds of MB of a GPU
// that is another rank's. From CUDA 12 on it does, where there is none. In a thread that never
// chose a device cudaGetDevice says 0.
static bool idist__gpu_is_fresh(const idist__gpu *gpu, int device) {
    unsigned flags = 0;
    int active = 1;

    if (CUDART_VERSION < 12000 || !gpu->context_state) return false;
    return gpu->context_state(device, &flags, &active) == 0 && !active;
}

// The caller's device, while ours is the current one.
static int idist__gpu_visit(const idist__gpu *gpu) {
    int device = gpu->device;

    cudaGetDevice(&device);
    if (device != gpu->device) cudaSetDevice(gpu->device);
    return device;
}

// A thread that had none stays on ours, and so does our own one.
static void idist__gpu_return(const idist__gpu *gpu, int device) {
    if (device == gpu->device || idist__gpu_is_fresh(gpu, device)) return;
    if (gpu->thread && pthread_equal(*gpu->thread, pthread_self())) return;
    cudaSetDevice(device);
}

// Our own device and no capture of another thread in the way, for as long as this thread is in
// here.
typedef struct idist__gpu_guard {
    int device;
    enum cudaStreamCaptureMode mode;
} idist__gpu_guard;

static idist__gpu_guard idist__gpu_enter(const idist__gpu *gpu) {
    idist__gpu_guard guard;

    guard.device = idist__gpu_visit(gpu);
    guard.mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&guard.mode);
    return guard;
}

static void idist__gpu_leave(const idist__gpu *gpu, idist__gpu_guard guard) {
    cudaThreadExchangeStreamCaptureMode(&guard.mode);
    idist__gpu_return(gpu, guard.device);
}

// The device of the world that was the last to choose one, plus 1; 0: none has. Atomic. It outlives
// the world, as its context does.
static int idist__home_device;

// As idist__gpu_enter and _leave, for what belongs to no world. They do nothing where no world ever
// had a device.
typedef struct idist__home {
    idist__gpu gpu; // only what the guard needs
    idist__gpu_guard guard;
} idist__home;

static void idist__home_enter(idist__home *home) {
    memset(home, 0, sizeof *home);
    home->gpu.device = __atomic_load_n(&idist__home_device, __ATOMIC_ACQUIRE) - 1;
    if (home->gpu.device < 0) return;
    idist__gpu_find_context_state(&home->gpu);
    home->guard = idist__gpu_enter(&home->gpu);
}

static void idist__home_leave(const idist__home *home) {
    if (home->gpu.device >= 0) idist__gpu_leave(&home->gpu, home->guard);
}

//------------------------------------------------------------------------------
// [gpu:pinned]  host memory that devices copy from
// uses os mem world types device
//------------------------------------------------------------------------------

// To pin memory may wait for all that the device has to do: an NCCL kernel, say, that waits for a
// rank which is lost. Who would abort it needs the world's lock, so a thread of its own does it.
typedef struct idist__pinning {
    idist__pinned *memory;
    int device;
    int done; // atomic
    pthread_t thread;
} idist__pinning;

// If it cannot be pinned it serves all the same, slower.
static void *idist__pinned_work(void *arg) {
    idist__pinning *job = (idist__pinning *)arg;
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;

    cudaSetDevice(job->device);
    cudaThreadExchangeStreamCaptureMode(&mode);
    cudaHostRegister(job->memory->at, job->memory->nbytes, cudaHostRegisterPortable);
    __atomic_store_n(&job->done, 1, __ATOMIC_RELEASE);
    return NULL;
}

// Memory that the ranks of a host share if the backend has such, else plain memory.
static idist__pinned *idist__pinned_make(const idist__world *w, size_t nbytes) {
    const idist_backend_api *under = idist__gpu_of(w)->under;
    idist__pinned *p = (idist__pinned *)idist__mem_alloc(&w->cfg.mem, sizeof *p);

    if (!p) return NULL;
    for (p->nbytes = 65536; p->nbytes < nbytes && p->nbytes < SIZE_MAX / 2;)
        p->nbytes *= 2; // none is ever given back
    p->at = under->alloc ? under->alloc((idist__world *)(uintptr_t)w, p->nbytes) : NULL;
    if (!p->at && posix_memalign(&p->at, 4096, p->nbytes) != 0) p->at = NULL;
    if (p->at) return p;

    idist__mem_free(&w->cfg.mem, p);

    return NULL;
}

// What a thread has pinned is spare now. False: it is not through.
static bool idist__pinned_reap(idist__gpu *gpu) {
    idist__pinning *job = gpu->pinning;

    if (!job) return true;
    if (!__atomic_load_n(&job->done, __ATOMIC_ACQUIRE)) return false;
    pthread_join(job->thread, NULL);
    job->memory->next = gpu->spare;
    gpu->spare = job->memory;
    gpu->pinning = NULL;
    free(job);

    return true;
}

// Of nbytes at least. NULL with *later: a thread is pinning it, or other memory; ask again.
static idist__pinned *idist__pinned_take(const idist__world *w, size_t nbytes, bool *later) {
    idist__gpu *gpu = idist__gpu_of(w);
    idist__pinned **at, **best = NULL, *p;
    idist__pinning *job;

    *later = !idist__pinned_reap(gpu);
    for (at = &gpu->spare; *at; at = &(*at)->next)
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

    if (!job || idist__os_thread(&job->thread, idist__pinned_work, job) != 0) {
        free(job);
        return p;
    }

    gpu->pinning = job;
    *later = true;

    return NULL;
}

static void idist__pinned_give(idist__gpu *gpu, idist__pinned **p) {
    if (!*p) return;
    (*p)->next = gpu->spare;
    gpu->spare = *p;
    *p = NULL;
}

static void *idist__pinned_alloc(size_t nbytes, void *user) {
    void *p = NULL;
    idist__home home;

    (void)user;
    idist__home_enter(&home);
    if (cudaMallocHost(&p, nbytes ? nbytes : 1) != cudaSuccess) p = NULL;
    idist__home_leave(&home);
    return p;
}

static void idist__pinned_free(void *p, void *user) {
    idist__home home;
    (void)user;
    idist__home_enter(&home);
    cudaFreeHost(p);
    idist__home_leave(&home);
}

idist_allocator idist_pinned_allocator(void) {
    idist_allocator a;
    a.alloc_fn = idist__pinned_alloc;
    a.free_fn = idist__pinned_free;
    a.user = NULL;
    return a;
}

//------------------------------------------------------------------------------
// [gpu:task]  calls and their parts
// uses os world core:call types device pinned
//------------------------------------------------------------------------------

static void idist__gpu_waits(idist__task *t, bool waits) {
    idist__gpu *gpu = idist__gpu_of(t->group->w);
    idist__gpu_op *op = idist__gpu_op_of(t);

    if (op->waiting == waits) return;
    op->waiting = waits;
    gpu->nwaiting += waits ? 1 : -1;
    if (waits) gpu->nap_ns = IDIST__GPU_LOOK_NS;
    if (waits) gpu->spin_until_ns = idist__os_now_ns() + IDIST__GPU_SPIN_NS;
    if (waits && t->group->w->driver != IDIST__DRIVER_NONE)
        gpu->under->wake(t->group->w); // who sleeps there looks at it too
}

// Whether an event has come that a call waits for. When it cannot be told, the call has failed and
// is gone.
static bool idist__gpu_arrived(idist__task *t, cudaEvent_t event) {
    idist__gpu_op *op = idist__gpu_op_of(t);

    if (op->error == cudaSuccess) op->error = cudaEventQuery(event);

    if (op->error == cudaSuccess) {
        idist__gpu_of(t->group->w)->nap_ns = IDIST__GPU_LOOK_NS;
        return true;
    }

    if (op->error != cudaErrorNotReady) {
        idist__gpu_fail_group(t->group, idist__gpu_fail("the device", op->error));
        return false;
    }

    op->error = cudaSuccess;
    cudaGetLastError();

    return false;
}

// Gives the backend a part of a call. The first one carries what the ranks compare; the part may be
// through at once.
static void idist__gpu_part(idist__task *t, const idist__call *part) {
    idist__gpu *gpu = idist__gpu_of(t->group->w);
    idist__gpu_op *op = idist__gpu_op_of(t);

    t->call = *part;
    t->call.label = op->call.label;
    t->away = t->announced = false;
    t->group->w->due_ns = 0; // it is to be announced again
    op->running = true;
    idist__gpu_waits(t, false);

    if (!idist__kind_is_p2p(part->kind)) {
        t->seq = ++t->group->seq;

        if (!t->whole.kind) {
            t->whole = op->print;
            t->whole.seq = t->seq;
        }
    }

    memset(t->impl, 0, gpu->under->task_nbytes); // so that the backend takes it for nothing
    gpu->under->start(t);
}

// A part that moves nothing: all ranks come, and compare.
static void idist__gpu_meet(idist__task *t) {
    idist__call part;
    idist__call_init(&part, IDIST__BARRIER, NULL, NULL, 0, IDIST_U8);
    idist__gpu_part(t, &part);
}

// The part of each rank within the buffers at send and recv: elements, and how many such parts
// there are.
typedef struct idist__gpu_shape {
    size_t send, recv;   // parts that this rank has; 0: no such buffer
    size_t most;         // any rank's
    size_t contribution; // parts that others read, of whoever gives most
} idist__gpu_shape;

static idist__gpu_shape idist__gpu_shape_of(const idist_group *g, const idist__call *c) {
    size_t n = (size_t)g->size;
    bool root = c->root == g->rank;
    idist__gpu_shape s;

    s.send = s.recv = s.most = s.contribution = 1;

    switch (c->kind) {
    case IDIST__REDUCE: s.recv = root; break;
    case IDIST__BROADCAST: s.send = 0; break;
    case IDIST__ALL_GATHER: s.recv = s.most = n; break;
    case IDIST__GATHER:
        s.recv = root ? n : 0;
        s.most = n;
        break;
    case IDIST__SCATTER:
        s.send = root ? n : 0;
        s.most = s.contribution = n;
        break;
    case IDIST__REDUCE_SCATTER: s.send = s.most = s.contribution = n; break;
    case IDIST__ALL_TO_ALL: s.send = s.recv = s.most = s.contribution = n; break;
    case IDIST__BARRIER: s.send = s.recv = 0; break;
    default: break;
    }

    return s;
}

// Copies k elements of each of `parts` parts that lie to_count and from_count elements apart.
static cudaError_t idist__gpu_copy(void *to, size_t to_count, const void *from, size_t from_count,
                                   size_t k, size_t parts, size_t size, cudaStream_t stream) {
    cudaError_t error = cudaSuccess;
    size_t i;

    for (i = 0; i < parts && k && to != from && error == cudaSuccess; i++)
        error = cudaMemcpyAsync((char *)to + i * to_count * size,
                                (const char *)from + i * from_count * size, k * size,
                                cudaMemcpyDefault, stream);
    return error;
}

static void idist__gpu_dequeue(idist__task *t) {
    idist__gpu_group *gg = idist__gpu_group_of(t->group);
    idist__task **at;

    for (at = &gg->queue; *at; at = &idist__gpu_op_of(*at)->after) {
        if (*at != t) continue;
        if ((*at = idist__gpu_op_of(t)->after) == NULL) gg->last = at;
        idist__gpu_of(t->group->w)->stirred = true;
        return;
    }
}

static void idist__gpu_release(idist__task *t) {
    idist__gpu_op *op = idist__gpu_op_of(t);
    int i;

    idist__gpu_waits(t, false);
    idist__gpu_dequeue(t);
    for (i = 0; i < IDIST__GPU_SLOTS; i++) // the next to use them comes after these copies
        idist__pinned_give(idist__gpu_of(t->group->w), &op->slots[i].memory);
}

static void idist__gpu_over(idist__task *t) {
    idist__gpu_op_of(t)->state = IDIST__GPU_END;
    t->away = false;
    idist__complete(t, IDIST_OK, "");
}

static bool idist__gpu_op_is_premul(const idist_group *g, const idist__call *c) {
    return (int)c->op >= IDIST_OP_USER && !idist__call_user_op(g, c)->fn;
}

//------------------------------------------------------------------------------
// [gpu:agree]  what the members of a group tell each other
// uses err mem world core:call
//------------------------------------------------------------------------------

// Each member's nbytes, to all. The lock is held, and given up while waiting.
static idist_status idist__gpu_exchange(idist_group *g, const void *mine, void *all,
                                        size_t nbytes) {
    idist__call c;
    idist_opts o;
    idist_status s;
    int depth = idist__me.group_depth; // the caller may be between group_begin and group_end

    memset(&o, 0, sizeof o);
    o.group = g;
    idist__call_init(&c, IDIST__ALL_GATHER, mine, all, nbytes, IDIST_U8);
    c.label = IDIST__FIRST_DEVICE_CALL;
    idist__me.group_depth = 0;
    s = idist__call_locked(g, &c, &o);
    idist__me.group_depth = depth;

    return s;
}

typedef struct idist__gpu_outcome { // of one member
    int32_t failed;
    char why[200];
} idist__gpu_outcome;

// Whether all of them could do it. If not, *why is the reason of the first that could not.
static idist_status idist__gpu_all_could(idist_group *g, bool failed, char *why, size_t cap,
                                         bool *all) {
    idist__gpu_outcome mine,
        *theirs =
            (idist__gpu_outcome *)idist__mem_alloc(&g->w->cfg.mem, sizeof mine * (size_t)g->size);
    idist_status s;
    int i;

    *all = false;
    if (!theirs) return IDIST_ERR_NO_MEMORY;
    memset(&mine, 0, sizeof mine);
    mine.failed = failed;
    idist__copy_text(mine.why, sizeof mine.why, why);
    s = idist__gpu_exchange(g, &mine, theirs, sizeof mine);
    for (i = 0; s == IDIST_OK && i < g->size && !theirs[i].failed; i++) continue;
    *all = s == IDIST_OK && i == g->size;
    if (s == IDIST_OK && !*all) snprintf(why, cap, "rank %d: %.200s", g->ranks[i], theirs[i].why);
    idist__mem_free(&g->w->cfg.mem, theirs);

    return s;
}

//------------------------------------------------------------------------------
// [gpu:stage]  calls that go through pinned memory, a chunk at a time
// uses world core:call types pinned task
//
// The backend of the host gets each chunk as a call of its own, with pinned memory for its buffers.
// While it has one, the next is on its way out of the device and the one before on its way in:
//
//     out   0  1  2  3        a chunk of a buffer of n parts is a piece of each part, so that any
//     host     0  1  2  3     collective of k elements per rank is one of fewer elements per rank
//     in          0  1  2  3
//
// Calls whose parts differ in size (v-forms, send and receive) go as a whole.
//------------------------------------------------------------------------------

static bool idist__gpu_goes_whole(const idist__call *c) {
    return idist__kind_is_v(c->kind) || idist__kind_is_p2p(c->kind);
}

static void idist__gpu_plan(idist__task *t, size_t nbytes, size_t parts) {
    idist__gpu_op *op = idist__gpu_op_of(t);
    const idist__call *c = &op->call;

    op->nout = op->nhost = 0;
    op->nchunks = 1;
    op->chunk = c->count;
    if (idist__gpu_goes_whole(c) || c->kind == IDIST__BARRIER) return;
    op->chunk = nbytes / parts / op->size;
    if (op->chunk > 1024) op->chunk &= ~(size_t)1023;
    if (!op->chunk) op->chunk = 1;
    if (op->chunk > c->count) op->chunk = c->count;
    if (op->chunk) op->nchunks = (c->count + op->chunk - 1) / op->chunk;
}

// Where chunk `nth` lies in pinned memory: in place where the call may be.
static bool idist__stage_slot(idist__task *t, size_t nth, idist__call *part) {
    idist_group *g = t->group;
    idist__gpu_op *op = idist__gpu_op_of(t);
    idist__gpu_slot *slot = &op->slots[nth % IDIST__GPU_SLOTS];
    size_t at = nth * op->chunk, nsend, nrecv, recv_at = 0;
    idist__extent e;

    *part = op->call;
    if (!idist__gpu_goes_whole(part))
        part->count = part->count - at < op->chunk ? part->count - at : op->chunk;
    if (part->kind == IDIST__RECV) part->info = &op->info;
    if (op->user.used) part->user = &op->user;
    if (idist__extent_of(g, part, &e) != IDIST_OK) return false; // it was looked at before
    nsend = e.send * op->size;
    nrecv = e.recv * op->size;
    if (!e.may_alias || part->kind == IDIST__ALL_TO_ALL) recv_at = (nsend + 63) & ~(size_t)63;
    else if (e.send) recv_at = e.send_at * op->size;
    if (!slot->memory &&
        (slot->memory = idist__pinned_take(g->w, nsend + nrecv + 64, &op->pinning)) == NULL)
        return false;
    op->pinning = false;
    part->recv = (char *)slot->memory->at + recv_at;
    part->send = (char *)slot->memory->at + (e.recv && e.may_alias ? e.recv_at * op->size : 0);
    if (!e.send) part->send = NULL;
    if (!e.recv) part->recv = NULL;

    return true;
}

// What goes from rank to rank starts at the device and ends there: the next chunk out, ...
static bool idist__stage_out(idist__task *t) {
    idist_group *g = t->group;
    idist__gpu_group *gg = idist__gpu_group_of(g);
    idist__gpu_op *op = idist__gpu_op_of(t);
    const idist__call *c = &op->call;
    idist__gpu_slot *slot = &op->slots[op->nout % IDIST__GPU_SLOTS];
    size_t at = op->nout * op->chunk * op->size;
    cudaError_t error = cudaSuccess;
    idist__call part;
    idist__extent e;

    if (!idist__stage_slot(t, op->nout, &part)) {
        if (op->pinning) return false;
        idist__group_fail(g, IDIST_ERR_NO_MEMORY,
                          "a rank has no memory to stage a device buffer in");
        return false;
    }

    if (op->nout >= IDIST__GPU_SLOTS) error = cudaStreamWaitEvent(gg->stream[0], slot->in, 0);
    if (error == cudaSuccess && idist__gpu_goes_whole(c) && part.send &&
        idist__extent_of(g, &part, &e) == IDIST_OK)
        error = idist__gpu_copy((void *)(uintptr_t)part.send, 0, c->send, 0, e.send, 1, op->size,
                                gg->stream[0]);
    else if (error == cudaSuccess && c->kind == IDIST__BROADCAST && c->root == g->rank)
        error = idist__gpu_copy(part.recv, 0, (char *)c->recv + at, 0, part.count, 1, op->size,
                                gg->stream[0]);
    else if (error == cudaSuccess && !idist__gpu_goes_whole(c) && part.send)
        error = idist__gpu_copy((void *)(uintptr_t)part.send, part.count,
                                (const char *)c->send + at, c->count, part.count,
                                idist__gpu_shape_of(g, c).send, op->size, gg->stream[0]);
    if (op->error == cudaSuccess) op->error = error; // the first one stays
    if (op->error == cudaSuccess) op->error = cudaEventRecord(slot->out, gg->stream[0]);
    op->nout++;

    return true;
}

// A v-form puts back the parts that it filled, a receive what it got.
static cudaError_t idist__stage_in_whole(idist__task *t, const idist__call *part,
                                         cudaStream_t stream) {
    const idist_group *g = t->group;
    idist__gpu_op *op = idist__gpu_op_of(t);
    const idist__call *c = &op->call;
    cudaError_t error = cudaSuccess;
    size_t count;
    int i;

    if (c->kind == IDIST__RECV || c->kind == IDIST__SCATTERV) {
        count = c->kind == IDIST__RECV ? op->info.count : c->count;
        return idist__gpu_copy(c->recv, 0, part->recv, 0, count, 1, op->size, stream);
    }

    for (i = 0; i < g->size && error == cudaSuccess; i++) {
        char *to = idist__call_part(c, (char *)c->recv, i, g->rank, false, &count);
        error = idist__gpu_copy(to, 0, (char *)part->recv + (to - (char *)c->recv), 0, count, 1,
                                op->size, stream);
    }

    return error;
}

// ... and the one that the backend is through with, in.
static cudaError_t idist__stage_in(idist__task *t) {
    idist_group *g = t->group;
    idist__gpu_group *gg = idist__gpu_group_of(g);
    idist__gpu_op *op = idist__gpu_op_of(t);
    const idist__call *c = &op->call;
    size_t nth = op->nhost - 1, at = nth * op->chunk * op->size;
    idist__gpu_slot *slot = &op->slots[nth % IDIST__GPU_SLOTS];
    bool keeps = (c->kind == IDIST__BROADCAST && c->root == g->rank) ||
                 (c->kind == IDIST__EXSCAN && g->rank == 0);
    cudaError_t error = cudaSuccess;
    idist__call part;

    if (!idist__stage_slot(t, nth, &part)) return cudaErrorMemoryAllocation;
    if (idist__gpu_goes_whole(c) && part.recv)
        error = idist__stage_in_whole(t, &part, gg->stream[1]);
    else if (part.recv && !keeps)
        error = idist__gpu_copy((char *)c->recv + at, c->count, part.recv, part.count, part.count,
                                idist__gpu_shape_of(g, c).recv, op->size, gg->stream[1]);
    if (error == cudaSuccess) error = cudaEventRecord(slot->in, gg->stream[1]);

    return error;
}

// One step of the call at the head of its group's queue. False: it waits, or is gone.
static bool idist__stage_step(idist__task *t) {
    idist__gpu_op *op = idist__gpu_op_of(t);
    idist__call part;

    if (op->running) return false;
    idist__gpu_waits(t, true);

    if (op->state == IDIST__GPU_WAIT) {
        if (!idist__gpu_arrived(t, op->event)) return false;
        op->state = IDIST__GPU_MOVE;
    }

    while (op->nout < op->nchunks && op->nout < op->nhost + IDIST__GPU_SLOTS &&
           op->error == cudaSuccess)
        if (!idist__stage_out(t)) {
            if (!op->pinning || op->nout == op->nhost) return false;
            break; // what is out goes on
        }

    if (!idist__gpu_arrived(t, op->slots[op->nhost % IDIST__GPU_SLOTS].out)) return false;
    idist__stage_slot(t, op->nhost++, &part);
    if (op->nhost == op->nchunks)
        idist__gpu_dequeue(t); // the calls behind it may have the backend now
    idist__gpu_part(t, &part);

    return true;
}

// The backend is through with a chunk. True: the call is over.
static bool idist__stage_landed(idist__task *t) {
    idist__gpu_op *op = idist__gpu_op_of(t);
    cudaError_t error = idist__stage_in(t);

    if (op->call.info) *op->call.info = op->info;
    if (op->error == cudaSuccess) op->error = error;
    if (op->nhost < op->nchunks) return false;
    op->state = IDIST__GPU_END;
    if (op->error == cudaSuccess && !idist__gpu_shape_of(t->group, &op->call).recv) return true;
    if (op->error == cudaSuccess)
        op->error = cudaEventRecord(op->event, idist__gpu_group_of(t->group)->stream[1]);
    if (op->error == cudaSuccess && t->stream && !t->async)
        op->error = cudaStreamWaitEvent((cudaStream_t)t->stream, op->event, 0);
    t->followed = op->error == cudaSuccess;

    return false;
}

#endif // IDIST__INSIDE_NCCL_H
