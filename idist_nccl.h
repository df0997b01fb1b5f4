/* idist_nccl.h - v0.1.0 - device pointers for idist: the same calls take CUDA memory - MIT licence

DO THIS

    Include it where idist.h is included, or on the command line, and link the CUDA runtime:

        cc -DIDIST_IMPLEMENTATION -include idist_nccl.h -isystem $CUDA_HOME/include app.c -L$CUDA_HOME/lib64 -lcudart -o app

    idist_initialize picks a device for each rank (local rank modulo devices; desc.device or IDIST_DEVICE) and makes it the
    current one of the calling thread. From then on every communication call takes device pointers as well as host pointers;
    the runtime knows which are which. Managed memory counts as host memory.

WHAT IT IS

    Device buffers are staged: copied into pinned host memory, handed to the backend of the world (ring or mpi), and copied
    back. That works with any number of ranks on a GPU, between GPUs that cannot reach each other, and between hosts.

    A blocking call begins after what the legacy default stream holds, and its result is there on return; work on other
    streams is yours to synchronise. With opts.stream it begins after what that stream holds, blocks while the host's part
    runs, and later work of that stream sees the result. It cannot be captured into a graph. With opts.request it goes on
    beside the program until idist_wait or idist_test.

    Any buffer of any rank may be device memory or not, also of one call. User ops get host memory. A receive buffer goes
    back as a whole where a call fills only parts of it (v-forms, receives): leave all of it alone meanwhile. As much memory
    as the largest calls need stays pinned until the end of the world.

WHEN THERE IS NO DEVICE

    No driver, no device, or none on one of the ranks: the world has none (idist_device() is "cpu"), the CPU path works as
    ever, and a call with opts.stream is IDIST_ERR_NO_DEVICE with the reason. Asked for by name ("cuda", "cuda:1") on any
    rank, it is an error of idist_initialize on all. All ranks include this header, or none does.

CONTENTS

      [nccl:api]     the backend's entry in IDIST_BACKENDS
      [nccl:types]   worlds, groups, tasks
      [nccl:cuda]    errors, pinned memory
      [nccl:route]   which calls are for the device
      [nccl:stage]   a call from the first copy to the last
      [nccl:engine]  the part of a backend that concerns device memory, over the one that moves host memory
      [nccl:join]    which device, agreed by all ranks
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
// [nccl:api]  the backend's entry in IDIST_BACKENDS
//------------------------------------------------------------------------------

// Device memory, beside the backend that the world has for host memory.
IDIST_API const idist_backend_api *idist_nccl_backend(void);

#undef IDIST__ENTRY_NCCL
#define IDIST__ENTRY_NCCL idist_nccl_backend()

#ifdef __cplusplus
} // extern "C"
#endif

#endif // IDIST_NCCL_H

// Only here for the API? Stop reading.

#if defined(IDIST_IMPLEMENTATION) && !defined(IDIST_NCCL_IMPLEMENTATION_DONE)
#define IDIST_NCCL_IMPLEMENTATION_DONE

#include <cuda_runtime_api.h>
#include <limits.h>

#ifdef __cplusplus
extern "C" {
#endif

//------------------------------------------------------------------------------
// [nccl:types]  worlds, groups, tasks
// used by cuda route stage engine join
//------------------------------------------------------------------------------

#define IDIST__GPU_LOOK_NS ((int64_t)20000) // how long who waits for a copy sleeps at most

// Pinned memory, kept for the next call: to make it takes as long as many copies.
typedef struct idist__pinned {
    struct idist__pinned *next;
    void *at;
    size_t nbytes;
} idist__pinned;

typedef struct idist__gpu {         // of a world
    idist_backend_api api;          // what the world's backend is now, ...
    const idist_backend_api *under; // ... and what it was, which moves the host's memory
    int device;
    cudaStream_t stream; // all copies
    idist__pinned *spare;
    int ncopying;                // calls that wait for copies
    idist__task *behind, **last; // those of them that the backend has not got yet, in their order
} idist__gpu;

typedef enum idist__gpu_state { IDIST__GPU_WAIT, IDIST__GPU_OUT, IDIST__GPU_HOST, IDIST__GPU_IN } idist__gpu_state;

// A call on device memory: waits for what the caller's stream holds; out to pinned memory; through the backend of the world;
// in to the device.
typedef struct idist__gpu_op {
    idist__gpu_state state;
    cudaEvent_t event; // what it waits for
    cudaError_t error; // of a copy, to be told when nobody is in the middle of something
    idist__pinned *send, *recv;
    size_t nsend, nrecv; // bytes on the device
    const void *device_send;
    void *device_recv;
    idist__user_op user; // a copy: the program may free the op meanwhile
    idist__task *after;  // the next of those that are behind
} idist__gpu_op;

static idist__gpu *idist__gpu_of(const idist__world *w) { return (idist__gpu *)w->device; }
static idist__gpu_op *idist__gpu_op_of(const idist__task *t) { return (idist__gpu_op *)t->device; }

//------------------------------------------------------------------------------
// [nccl:cuda]  errors, pinned memory
// uses types . used by route stage engine join
//------------------------------------------------------------------------------

static idist_status idist__gpu_fail(const char *what, cudaError_t error) {
    cudaGetLastError(); // it is told here; the next to ask shall not hear it again
    if (error == cudaErrorMemoryAllocation)
        return idist__fail(IDIST_ERR_NO_MEMORY, "%s: %s", what, cudaGetErrorString(error));
    return idist__fail(IDIST_ERR_DEVICE, "%s: %s (%s)", what, cudaGetErrorString(error), cudaGetErrorName(error));
}

// Our own device and no capture of another thread in the way, for as long as this thread is in here.
typedef struct idist__gpu_guard {
    int device;
    enum cudaStreamCaptureMode mode;
} idist__gpu_guard;

static idist__gpu_guard idist__gpu_enter(const idist__gpu *gpu) {
    idist__gpu_guard guard;
    guard.device = gpu->device;
    guard.mode = cudaStreamCaptureModeRelaxed;
    cudaGetDevice(&guard.device);
    if (guard.device != gpu->device) cudaSetDevice(gpu->device);
    cudaThreadExchangeStreamCaptureMode(&guard.mode);
    return guard;
}

static void idist__gpu_leave(const idist__gpu *gpu, idist__gpu_guard guard) {
    cudaThreadExchangeStreamCaptureMode(&guard.mode);
    if (guard.device != gpu->device) cudaSetDevice(guard.device);
}

// Plain memory that is pinned afterwards, so that another rank can read it through the kernel. If it cannot be pinned it
// serves all the same, slower.
static bool idist__pinned_grow(idist__pinned *p, size_t nbytes) {
    if (p->at) cudaHostUnregister(p->at);
    free(p->at);
    p->nbytes = nbytes < 65536 ? 65536 : (nbytes + 4095) & ~(size_t)4095;
    if (posix_memalign(&p->at, 4096, p->nbytes) != 0) p->at = NULL;
    if (!p->at) p->nbytes = 0;
    if (p->at) cudaHostRegister(p->at, p->nbytes, cudaHostRegisterPortable);
    cudaGetLastError();
    return p->at != NULL;
}

static idist__pinned *idist__pinned_take(idist__gpu *gpu, const idist_allocator *mem, size_t nbytes) {
    idist__pinned **at, **best = NULL, *p;
    for (at = &gpu->spare; *at; at = &(*at)->next)
        if ((*at)->nbytes >= nbytes && (!best || (*at)->nbytes < (*best)->nbytes)) best = at;
    if (!best && gpu->spare) best = &gpu->spare; // too small: it grows
    if (best) {
        p = *best;
        *best = p->next;
    } else if ((p = (idist__pinned *)idist__mem_alloc(mem, sizeof *p)) == NULL) {
        return NULL;
    }
    if (p->nbytes >= nbytes || idist__pinned_grow(p, nbytes)) return p;
    idist__mem_free(mem, p);
    return NULL;
}

static void idist__pinned_give(idist__gpu *gpu, idist__pinned **p) {
    if (!*p) return;
    (*p)->next = gpu->spare;
    gpu->spare = *p;
    *p = NULL;
}

//------------------------------------------------------------------------------
// [nccl:route]  which calls are for the device
// uses cuda . used by engine join
//------------------------------------------------------------------------------

static bool idist__gpu_holds(const void *p) {
    struct cudaPointerAttributes a;
    if (!p) return false;
    if (cudaPointerGetAttributes(&a, p) == cudaSuccess) return a.type == cudaMemoryTypeDevice;
    cudaGetLastError();
    return false;
}

static idist_status idist__gpu_route(const idist_group *g, const idist__call *c, const idist_opts *o, bool *on_device) {
    const char *name = idist__kind_names[c->label];
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    idist__extent e;
    *on_device = false;
    if (idist__extent_of(g, c, &e) != IDIST_OK) return IDIST_OK;
    *on_device = (e.send && idist__gpu_holds(c->send)) || (e.recv && idist__gpu_holds(c->recv));
    if (!o->stream) return IDIST_OK;
    if ((e.send || e.recv) && !*on_device) // without buffers (a barrier, a rank with nothing to give) it is as good as any
        return idist__fail(IDIST_ERR_ARG, "%s: a stream is for device memory, and these buffers are not", name);
    if (o->request) return idist__fail(IDIST_ERR_ARG, "%s: give a stream or a request, not both", name);
    if (o->stream == (void *)cudaStreamPerThread)
        return idist__fail(IDIST_ERR_UNSUPPORTED, "%s: cudaStreamPerThread: another thread may finish the call", name);
    if (cudaStreamIsCapturing((cudaStream_t)o->stream, &capture) == cudaSuccess && capture != cudaStreamCaptureStatusNone)
        return idist__fail(IDIST_ERR_UNSUPPORTED, "%s: a staged call cannot be captured into a graph", name);
    *on_device = true;
    return IDIST_OK;
}

//------------------------------------------------------------------------------
// [nccl:stage]  a call from the first copy to the last
// uses route . used by engine
//
// The backend gets a call as it was, with pinned memory for its buffers, so that host and device memory may meet in one
// call, and all it promises holds. It gets calls in their order: one on host memory, too, waits for the copies of those
// before it.
//------------------------------------------------------------------------------

static void idist__gpu_fail_task(idist__task *t, const char *what, cudaError_t error) {
    idist_group *g = t->group;
    char cause[300];
    idist_status s = idist__gpu_fail(what, error);
    snprintf(cause, sizeof cause, "rank %d: %.250s", g->w->cfg.rank, idist__me.text);
    idist__group_fail(g, s, cause);
}

// Where the backend finds the buffers. In place stays in place.
static bool idist__gpu_layout(idist__task *t) {
    idist__gpu *gpu = idist__gpu_of(t->group->w);
    idist__gpu_op *op = idist__gpu_op_of(t);
    idist__call *c = &t->call;
    const idist_allocator *mem = &t->group->w->cfg.mem;
    size_t size = idist_dtype_size(c->dtype), nbytes;
    idist__extent e;
    bool in_place;
    idist__extent_of(t->group, c, &e);
    op->nsend = idist__gpu_holds(c->send) ? e.send * size : 0;
    op->nrecv = idist__gpu_holds(c->recv) ? e.recv * size : 0;
    op->device_send = c->send;
    op->device_recv = c->recv;
    in_place = op->nsend && op->nrecv && idist__extent_in_place(&e, c);
    if (in_place && (char *)c->recv == (const char *)c->send + e.send_at * size && !e.recv_at) {
        nbytes = e.send_at * size + op->nrecv;
        if ((op->send = idist__pinned_take(gpu, mem, nbytes > op->nsend ? nbytes : op->nsend)) == NULL) return false;
        c->send = op->send->at;
        c->recv = (char *)op->send->at + e.send_at * size;
    } else if (in_place) {
        nbytes = e.recv_at * size + op->nsend;
        if ((op->recv = idist__pinned_take(gpu, mem, nbytes > op->nrecv ? nbytes : op->nrecv)) == NULL) return false;
        c->recv = op->recv->at;
        c->send = (char *)op->recv->at + e.recv_at * size;
    } else {
        if (op->nsend && (op->send = idist__pinned_take(gpu, mem, op->nsend)) == NULL) return false;
        if (op->nrecv && (op->recv = idist__pinned_take(gpu, mem, op->nrecv)) == NULL) return false;
        if (op->send) c->send = op->send->at;
        if (op->recv) c->recv = op->recv->at;
    }
    return true;
}

// What a call leaves alone in its receive buffer (the gaps between parts, the end of a short message) comes along, since
// the buffer goes back as a whole.
static cudaError_t idist__gpu_copy_out(idist__task *t) {
    idist__gpu *gpu = idist__gpu_of(t->group->w);
    idist__gpu_op *op = idist__gpu_op_of(t);
    const idist__call *c = &t->call;
    bool keeps = idist__kind_is_v(c->kind) || c->kind == IDIST__RECV || c->kind == IDIST__EXSCAN ||
                 (c->kind == IDIST__BROADCAST && c->root == t->group->rank);
    cudaError_t error = cudaSuccess;
    if (op->nrecv && keeps)
        error = cudaMemcpyAsync(c->recv, op->device_recv, op->nrecv, cudaMemcpyDeviceToHost, gpu->stream);
    if (error == cudaSuccess && op->nsend)
        error = cudaMemcpyAsync((void *)(uintptr_t)c->send, op->device_send, op->nsend, cudaMemcpyDeviceToHost, gpu->stream);
    return error == cudaSuccess ? cudaEventRecord(op->event, gpu->stream) : error;
}

// False: there is nothing to wait for.
static bool idist__gpu_copy_in(idist__task *t) {
    idist__gpu *gpu = idist__gpu_of(t->group->w);
    idist__gpu_op *op = idist__gpu_op_of(t);
    if (!op->nrecv || (t->call.kind == IDIST__BROADCAST && t->call.root == t->group->rank)) return false;
    op->error = cudaMemcpyAsync(op->device_recv, t->call.recv, op->nrecv, cudaMemcpyHostToDevice, gpu->stream);
    if (op->error == cudaSuccess) op->error = cudaEventRecord(op->event, gpu->stream);
    if (op->error == cudaSuccess && t->stream) op->error = cudaStreamWaitEvent((cudaStream_t)t->stream, op->event, 0);
    return !t->stream || op->error != cudaSuccess;
}

// Whether what a call waits for is there. When it cannot be told, the call has failed and is gone.
static bool idist__gpu_arrived(idist__task *t) {
    idist__gpu_op *op = idist__gpu_op_of(t);
    if (op->error == cudaSuccess) op->error = cudaEventQuery(op->event);
    if (op->error == cudaSuccess) return true;
    if (op->error != cudaErrorNotReady) {
        idist__gpu_fail_task(t, "copying between host and device", op->error);
        return false;
    }
    op->error = cudaSuccess;
    cudaGetLastError();
    return false;
}

// The backend is through with a call. Its result goes back to the device, and the call ends when it is there; with a stream
// at once, since the stream waits for it. Whoever is in the middle of the backend goes on as if it had ended.
static bool idist__gpu_landed(idist__task *t, idist_status status) {
    idist__world *w = t->group->w;
    idist__gpu *gpu = idist__gpu_of(w);
    idist__gpu_op *op = idist__gpu_op_of(t);
    idist__gpu_guard guard = idist__gpu_enter(gpu);
    bool waits = status == IDIST_OK && op->state == IDIST__GPU_HOST && idist__gpu_copy_in(t);
    idist__gpu_leave(gpu, guard);
    if (waits) {
        op->state = IDIST__GPU_IN;
        t->away = true;
        gpu->ncopying++;
        if (w->driver != IDIST__DRIVER_NONE) gpu->under->wake(w); // who sleeps there looks at copies from now on
        return false;
    }
    idist__pinned_give(gpu, &op->send); // the next to use them comes after these copies in our stream
    idist__pinned_give(gpu, &op->recv);
    return true;
}

// Gives the backend what has come that far, in the order of the calls.
static void idist__gpu_release(idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);
    while (gpu->behind) {
        idist__task *t = gpu->behind;
        idist__gpu_op *op = idist__gpu_op_of(t);
        if (t->on_device && !idist__gpu_arrived(t)) {
            if (gpu->behind == t) return;
            continue; // it failed, and is gone
        }
        if (t->on_device && op->state == IDIST__GPU_WAIT) {
            op->state = IDIST__GPU_OUT;
            op->error = idist__gpu_copy_out(t);
            continue;
        }
        if ((gpu->behind = op->after) == NULL) gpu->last = &gpu->behind;
        gpu->ncopying--;
        t->away = false;
        op->state = IDIST__GPU_HOST;
        gpu->under->start(t);
    }
}

//------------------------------------------------------------------------------
// [nccl:engine]  the part of a backend that concerns device memory, over the one that moves host memory
// uses stage . used by join
//------------------------------------------------------------------------------

static bool idist__gpu_op_make(idist__task *t) {
    const idist_allocator *mem = &t->group->w->cfg.mem;
    idist__gpu_op *op = (idist__gpu_op *)t->device;
    cudaError_t error;
    if (op) return true;
    if ((op = (idist__gpu_op *)idist__mem_alloc(mem, sizeof *op)) == NULL) {
        idist__group_fail(t->group, IDIST_ERR_NO_MEMORY, "a rank is out of memory");
        return false;
    }
    if ((error = cudaEventCreateWithFlags(&op->event, cudaEventDisableTiming)) != cudaSuccess) {
        idist__mem_free(mem, op);
        idist__gpu_fail_task(t, "cudaEventCreate", error);
        return false;
    }
    t->device = op;
    return true;
}

// A part of a call that is under way, and a call on host memory with nothing before it, is the backend's at once.
static void idist__gpu_start(idist__task *t) {
    idist_group *g = t->group;
    idist__gpu *gpu = idist__gpu_of(g->w);
    bool on_device = t->on_device;
    idist__gpu_guard guard;
    idist__gpu_op *op;
    if (!on_device && (!gpu->behind || t->whole.kind)) {
        gpu->under->start(t);
        return;
    }
    t->on_device = false; // as long as there is nothing to take back
    t->away = true;
    memset(t->impl, 0, gpu->under->task_nbytes); // so that the backend takes it for nothing
    guard = idist__gpu_enter(gpu);
    if (idist__gpu_op_make(t)) {
        op = idist__gpu_op_of(t);
        op->state = IDIST__GPU_WAIT;
        op->error = cudaSuccess;
        op->after = NULL;
        t->on_device = on_device;
        if (!t->call.user && idist__kind_reduces(t->call.kind) && (int)t->call.op >= IDIST_OP_USER) {
            op->user = *idist__call_user_op(g, &t->call);
            t->call.user = &op->user;
        }
        *gpu->last = t;
        gpu->last = &op->after;
        gpu->ncopying++;
        if (on_device && !idist__gpu_layout(t))
            idist__group_fail(g, IDIST_ERR_NO_MEMORY, "a rank has no memory to stage a device buffer in");
        else if (on_device) op->error = cudaEventRecord(op->event, t->stream ? (cudaStream_t)t->stream : cudaStreamLegacy);
        idist__gpu_release(g->w);
    }
    idist__gpu_leave(gpu, guard);
}

static void idist__gpu_progress(idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);
    idist__gpu_guard guard;
    idist__task *t, *next;
    gpu->under->progress(w);
    if (!gpu->ncopying) return;
    guard = idist__gpu_enter(gpu);
    idist__gpu_release(w);
    for (t = w->tasks; t; t = next) {
        uint32_t ended = w->nended;
        next = t->next;
        if (t->on_device && t->away && idist__gpu_op_of(t)->state == IDIST__GPU_IN && idist__gpu_arrived(t)) {
            gpu->ncopying--;
            t->away = false;
            idist__complete(t, IDIST_OK, "");
        }
        if (w->nended != ended) next = w->tasks; // this one, or any other, is gone
    }
    idist__gpu_leave(gpu, guard);
}

static void idist__gpu_sleep(idist__world *w, int64_t until_ns) {
    int64_t soon = idist__os_now_ns() + IDIST__GPU_LOOK_NS;
    if (idist__gpu_of(w)->ncopying && soon < until_ns) until_ns = soon;
    idist__gpu_of(w)->under->sleep(w, until_ns);
}

static bool idist__gpu_cancel(idist__task *t) {
    idist__gpu *gpu = idist__gpu_of(t->group->w);
    idist__gpu_op *op = idist__gpu_op_of(t);
    idist__gpu_guard guard;
    idist__task **at;
    bool done = true;
    if (!t->away) done = gpu->under->cancel(t);
    else if (t->on_device && op->state == IDIST__GPU_IN) gpu->ncopying--;
    for (at = &gpu->behind; t->away && *at; at = &idist__gpu_op_of(*at)->after) {
        if (*at != t) continue;
        if ((*at = op->after) == NULL) gpu->last = at;
        gpu->ncopying--;
        break;
    }
    if (!t->on_device || (!done && t->group->status == IDIST_OK)) return done; // it goes on
    t->away = false;
    op->state = IDIST__GPU_IN; // whatever comes, there is nothing to copy any more
    guard = idist__gpu_enter(gpu);
    cudaStreamSynchronize(gpu->stream); // copies under way; it holds nothing else
    cudaGetLastError();
    idist__gpu_leave(gpu, guard);
    idist__pinned_give(gpu, &op->send);
    idist__pinned_give(gpu, &op->recv);
    return done;
}

static void idist__gpu_announce(idist__task *t) {
    if (!t->away) idist__gpu_of(t->group->w)->under->announce(t);
}

static int idist__gpu_missing(idist__task *t, char *text, size_t cap) {
    if (!t->away) return idist__gpu_of(t->group->w)->under->missing(t, text, cap);
    idist__append(text, cap, "this rank itself, whose stream or copies are not done");
    return 1;
}

static void idist__gpu_free(idist__world *w) {
    idist__gpu *gpu = idist__gpu_of(w);
    const idist_allocator *mem = &w->cfg.mem;
    idist__task *t;
    for (t = w->all_tasks; t; t = t->older) {
        if (!t->device) continue;
        cudaEventDestroy(idist__gpu_op_of(t)->event);
        idist__mem_free(mem, t->device);
        t->device = NULL;
    }
    if (gpu->stream) cudaStreamSynchronize(gpu->stream);
    while (gpu->spare) {
        idist__pinned *p = gpu->spare;
        gpu->spare = p->next;
        cudaHostUnregister(p->at);
        free(p->at);
        idist__mem_free(mem, p);
    }
    if (gpu->stream) cudaStreamDestroy(gpu->stream);
    cudaGetLastError();
    if (gpu->under) w->backend = gpu->under;
    w->device = NULL;
    w->route = NULL;
    idist__mem_free(mem, gpu);
}

static void idist__gpu_close(idist__world *w, bool clean) {
    idist__gpu_free(w);
    w->backend->close(w, clean);
}

//------------------------------------------------------------------------------
// [nccl:join]  which device, agreed by all ranks
// uses engine . used by -
//------------------------------------------------------------------------------

typedef enum idist__gpu_has { IDIST__GPU_HAS, IDIST__GPU_HAS_NONE, IDIST__GPU_LACKS, IDIST__GPU_BAD_NAME } idist__gpu_has;

// What a rank tells the others.
typedef struct idist__gpu_card {
    int32_t has, named; // LACKS: it was asked for by name
    char bus[32];
    char why[160];
} idist__gpu_card;

static void idist__gpu_has_none(idist__gpu_card *card, const char *what, cudaError_t error) {
    card->has = IDIST__GPU_HAS_NONE;
    snprintf(card->why, sizeof card->why, "%s: %s (%s)", what, cudaGetErrorString(error), cudaGetErrorName(error));
    cudaGetLastError();
}

// Finds the device of this rank and makes everything that can fail.
static void idist__gpu_probe(idist__world *w, idist__gpu *gpu, idist__gpu_card *card) {
    const char *asked = w->cfg.device;
    int n = 0, number = w->nodes[w->group.rank].local_rank;
    bool named = strncmp(asked, "cuda", 4) == 0;
    cudaError_t error;
    int64_t value;
    memset(card, 0, sizeof *card);
    card->named = named;
    if (strcmp(asked, "cpu") == 0) {
        card->has = IDIST__GPU_HAS_NONE;
        snprintf(card->why, sizeof card->why, "the device asked for is \"cpu\"");
        return;
    }
    if (asked[0] && strcmp(asked, "cuda") != 0) {
        if (strncmp(asked, "cuda:", 5) != 0 || !idist__parse_int(asked + 5, 0, 4095, &value)) {
            card->has = IDIST__GPU_BAD_NAME;
            snprintf(card->why, sizeof card->why, "device \"%.40s\" is none of cpu, cuda, cuda:0, cuda:1, ...", asked);
            return;
        }
        number = (int)value;
    }
    error = cudaGetDeviceCount(&n);
    if (error == cudaSuccess && n == 0) error = cudaErrorNoDevice;
    if (error == cudaSuccess && asked[0] && asked[4] == ':' && number >= n) error = cudaErrorInvalidDevice;
    if (error != cudaSuccess) idist__gpu_has_none(card, "cudaGetDeviceCount", error);
    else if ((error = cudaSetDevice(gpu->device = number % n)) != cudaSuccess)
        idist__gpu_has_none(card, "cudaSetDevice", error);
    else if ((error = cudaStreamCreateWithFlags(&gpu->stream, cudaStreamNonBlocking)) != cudaSuccess)
        idist__gpu_has_none(card, "cudaStreamCreate", error);
    else if ((error = cudaDeviceGetPCIBusId(card->bus, (int)sizeof card->bus, gpu->device)) != cudaSuccess)
        idist__gpu_has_none(card, "cudaDeviceGetPCIBusId", error);
    if (card->has == IDIST__GPU_HAS_NONE && named) card->has = IDIST__GPU_LACKS;
}

// One outcome for all: a device each, none for anybody, or the same error.
static idist_status idist__gpu_agree(idist__world *w, const idist__gpu_card *cards, bool *all) {
    int i, k, n = w->group.size, worst = 0, shared = 0, named = 0;
    for (i = 0; i < n; i++) {
        if (cards[i].has > cards[worst].has) worst = i;
        named |= cards[i].named;
    }
    *all = cards[worst].has == IDIST__GPU_HAS;
    if (cards[worst].has == IDIST__GPU_BAD_NAME)
        return idist__fail(IDIST_ERR_ENV, "initialize: rank %d: %s", worst, cards[worst].why);
    if (named && !*all)
        return idist__fail(IDIST_ERR_NO_DEVICE, "initialize: rank %d has no device: %s", worst, cards[worst].why);
    for (i = 0; *all && i < n; i++)
        for (k = 0; k < i; k++) shared += w->nodes[i].host == w->nodes[k].host && !strcmp(cards[i].bus, cards[k].bus);
    if (!*all) snprintf(w->no_device, sizeof w->no_device, "rank %d has none: %.160s", worst, cards[worst].why);
    if (!*all) idist__log_print(&w->log, IDIST_LOG_INFO, "no device: %s", w->no_device);
    if (shared) idist__log_print(&w->log, IDIST_LOG_INFO, "ranks share a GPU");
    return IDIST_OK;
}

static idist_status idist__gpu_wrap(idist__world *w) {
    int n = w->group.size;
    idist__gpu *gpu = (idist__gpu *)idist__mem_alloc(&w->cfg.mem, sizeof *gpu);
    idist__gpu_card mine, *cards = (idist__gpu_card *)idist__mem_alloc(&w->cfg.mem, sizeof *cards * (size_t)n);
    idist_opts o;
    idist_status s = gpu && cards ? IDIST_OK : IDIST_ERR_NO_MEMORY;
    bool all = false;
    int depth = idist__me.group_depth, nthreads = idist__os_nthreads();
    memset(&o, 0, sizeof o);
    o.group = &w->group;
    if (s == IDIST_OK) {
        w->device = gpu;
        idist__gpu_probe(w, gpu, &mine);
        if (w->nforeign < INT_MAX / 4) w->nforeign += idist__os_nthreads() - nthreads; // CUDA's own
        idist__me.group_depth = 0; // the caller may be between group_begin and group_end
        s = idist_all_gather(&mine, cards, sizeof mine, IDIST_U8, &o);
        idist__me.group_depth = depth;
    }
    if (s == IDIST_OK) s = idist__gpu_agree(w, cards, &all);
    idist__mem_free(&w->cfg.mem, cards);
    if (s != IDIST_OK || !all) {
        if (w->device) idist__gpu_free(w);
        else idist__mem_free(&w->cfg.mem, gpu);
        return s;
    }
    gpu->under = w->backend;
    gpu->last = &gpu->behind;
    gpu->api = *w->backend;
    gpu->api.start = idist__gpu_start;
    gpu->api.progress = idist__gpu_progress;
    gpu->api.sleep = idist__gpu_sleep;
    gpu->api.cancel = idist__gpu_cancel;
    gpu->api.announce = idist__gpu_announce;
    gpu->api.missing = idist__gpu_missing;
    gpu->api.close = idist__gpu_close;
    snprintf(w->device_name, sizeof w->device_name, "cuda:%d", gpu->device);
    idist__world_lock(w);
    w->backend = &gpu->api;
    w->route = idist__gpu_route;
    w->landed = idist__gpu_landed;
    pthread_mutex_unlock(&w->lock);
    return IDIST_OK;
}

static idist_status idist__gpu_claim(idist__config *config, const char **why) {
    (void)config;
    *why = "nccl moves device memory, beside another backend";
    return IDIST_ERR_NO_BACKEND;
}

const idist_backend_api *idist_nccl_backend(void) {
    // clang-format off
    static const idist_backend_api api = {
        IDIST__BACKEND_ABI, sizeof(idist_backend_api), "nccl", 0, 0, idist__gpu_claim,
        NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
        idist__gpu_wrap};
    // clang-format on
    return &api;
}

#ifdef __cplusplus
} // extern "C"
#endif

#endif // IDIST_IMPLEMENTATION
