// gpu/route/gpu_route.h: decides which calls the device serves, and on which path
#pragma once

#include "base/fail.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/together.h"
#include "core/wait.h"
#include "core/extent.h"
#include "gpu/gpu_model.h"
#include "gpu/gpu_device.h"
#include "gpu/ipc/ipc_leave.h"
#include "gpu/ipc/ipc_call.h"
#include "gpu/nccl/nccl_issue.h"
#include "gpu/route/gpu_setup.h"

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
