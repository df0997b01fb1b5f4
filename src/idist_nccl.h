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

#include "base/begin.h"

#include "gpu/gpu_model.h"
#include "gpu/gpu_device.h"
#include "gpu/pinned.h"
#include "gpu/gpu_task.h"
#include "gpu/gpu_agree.h"
#include "gpu/gpu_leave.h"
#include "gpu/stage.h"

#include "gpu/ipc/ptx.h"
#include "gpu/ipc/ipc_kernel.h"
#include "gpu/ipc/ipc_arena.h"
#include "gpu/ipc/ipc_leave.h"
#include "gpu/ipc/ipc_probe.h"
#include "gpu/ipc/ipc_setup.h"
#include "gpu/ipc/ipc_call.h"
#include "gpu/ipc/own.h"

#include "gpu/nccl/nccl_load.h"
#include "gpu/nccl/nccl_job.h"
#include "gpu/nccl/nccl_issue.h"
#include "gpu/nccl/nccl_abort.h"
#include "gpu/nccl/nccl_launch.h"
#include "gpu/route/gpu_setup.h"
#include "gpu/route/gpu_route.h"
#include "gpu/route/gpu_engine.h"
#include "gpu/route/gpu_join.h"

#include "base/end.h"

#endif // IDIST_IMPLEMENTATION
