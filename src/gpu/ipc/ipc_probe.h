// gpu/ipc/ipc_probe.h: checks that this rank can read the memory of other ranks
//
// Each rank writes a pattern into its arena, and all ranks read it. The pattern's values are
// nonzero integers, small enough that their sum over all ranks is exact. A driver that grants peer
// access does not know whether the data arrives intact. An IOMMU, or the access control (ACS) of a
// PCIe switch, may corrupt the data that one GPU reads from another. The GPU then reads zeros or
// garbage, without an error.
#pragma once

#include "os/clock.h"
#include "base/hash.h"
#include "core/model.h"
#include "gpu/gpu_model.h"
#include "gpu/gpu_device.h"
#include "gpu/ipc/ptx.h"
#include "gpu/ipc/ipc_kernel.h"

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
