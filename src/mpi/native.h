// mpi/native.h: runs one call as calls of MPI
//
// This file translates an idist__call into MPI's arguments and calls MPI, with blocking functions
// or with requests. Most calls become one call of MPI. There are these exceptions:
//
//     counts above INT_MAX       reductions and broadcasts run in pieces, all other calls as
//                                messages between each pair of ranks
//     floats of 16 and 8 bits    reduced as F32, in scratch memory
//     premultiplied sums         scaled in scratch memory, then summed
//     user-defined ops           an op and a datatype of MPI for this one call
//     in place on some ranks     made in place on all ranks, by copies
//
// The path of a call:
//
//     idist__native_init    allocates and prepares everything that can fail
//     idist__native_begin   calls MPI
//     idist__native_done    tests the requests
//     idist__native_end     waits for the remaining requests, writes the result, frees
//                           everything; after an error it abandons the requests
#pragma once

#include "os/clock.h"
#include "base/mem.h"
#include "base/dtype.h"
#include "base/reduce_op.h"
#include "base/small_float.h"
#include "base/reduce.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/world.h"
#include "core/group.h"
#include "core/extent.h"
#include "mpi/mpi_model.h"
#include "mpi/mpi_type.h"

// Adds a request to the call. Returns its address, or NULL if memory is exhausted.
static MPI_Request *idist__native_request(idist__native *nat) {
    const idist_allocator *mem = &nat->group->w->cfg.mem;

    if (nat->request_count == nat->request_capacity) {
        size_t capacity = (size_t)nat->request_capacity * 2;
        MPI_Request *more = (MPI_Request *)idist__mem_raw(mem, sizeof *more * capacity);
        if (!more) return NULL;
        memcpy(more, nat->requests, sizeof *more * (size_t)nat->request_count);
        if (nat->requests != nat->first_requests) idist__mem_free(mem, nat->requests);
        nat->requests = more;
        nat->request_capacity = (int)capacity;
    }

    nat->requests[nat->request_count] = MPI_REQUEST_NULL;

    return &nat->requests[nat->request_count++];
}

// Calls function_ of MPI or, if the call does not block, i_function with a new request. Does
// nothing after an error.
#define IDIST__NATIVE(nat, function_, i_function, ...)              \
    do {                                                            \
        if ((nat)->blocking && (nat)->error == MPI_SUCCESS) {       \
            (nat)->function = #function_;                           \
            (nat)->error = function_(__VA_ARGS__);                  \
        } else IDIST__NATIVE_REQUEST(nat, i_function, __VA_ARGS__); \
    } while (0)
#define IDIST__NATIVE_REQUEST(nat, i_function, ...)                                   \
    do {                                                                              \
        MPI_Request *request_ = idist__native_request(nat);                           \
        if ((nat)->error != MPI_SUCCESS) break;                                       \
        (nat)->function = #i_function;                                                \
        (nat)->error = request_ ? i_function(__VA_ARGS__, request_) : MPI_ERR_NO_MEM; \
    } while (0)

// Runs a collective that only moves data as messages between each pair of ranks, because its counts
// are too large for MPI.
static void idist__native_pairs(idist__native *nat) {
    int i, own = nat->group->rank, size = nat->group->size;

    for (i = 0; i < size && nat->error == MPI_SUCCESS; i++) {
        size_t send_count, recv_count, at, n;
        char *send = idist__extent_part(nat->call, (char *)nat->in, own, i, true, &send_count),
             *recv = idist__extent_part(nat->call, nat->out, i, own, false, &recv_count);

        if (i == own) {
            if (recv_count) idist__block_copy(recv, send, recv_count * nat->element_size);
            continue;
        }

        for (at = 0; at < recv_count; at += n) {
            n = recv_count - at < IDIST__MPI_COUNT ? recv_count - at : IDIST__MPI_COUNT;
            IDIST__NATIVE_REQUEST(nat, MPI_Irecv, recv + at * nat->element_size, (int)n, nat->type,
                                  i, IDIST__TAG_PAIRS, nat->comm);
        }

        for (at = 0; at < send_count; at += n) {
            n = send_count - at < IDIST__MPI_COUNT ? send_count - at : IDIST__MPI_COUNT;
            IDIST__NATIVE_REQUEST(nat, MPI_Isend, send + at * nat->element_size, (int)n, nat->type,
                                  i, IDIST__TAG_PAIRS, nat->comm);
        }
    }
}

// Returns the number of elements that this rank contributes to a reduction.
static size_t idist__native_input_count(const idist__native *nat) {
    const idist__call *call = nat->call;
    return idist__kind_scatters_sum(call->kind) ? idist__extent_block_at(call, nat->group->size)
                                                : call->count;
}

// Runs a reduction or a broadcast in pieces whose counts fit into MPI's int. Most calls are one
// piece.
static void idist__native_pieces(idist__native *nat) {
    const idist__call *call = nat->call;
    size_t at, n, max = IDIST__MPI_COUNT, count;
    MPI_Datatype type = nat->type;
    MPI_Comm comm = nat->comm;
    bool is_root = call->root == nat->group->rank;

    count = idist__native_input_count(nat);

    for (at = 0; at < count; at += n) {
        const void *in = nat->in_place ? MPI_IN_PLACE : nat->in + at * nat->element_size;
        char *out = nat->out + at * nat->element_size, *root_out = is_root ? out : NULL;
        int k;
        n = count - at < max ? count - at : max;
        k = (int)n;

        switch (call->kind) {
        case IDIST__ALL_REDUCE:
        case IDIST__REDUCE_SCATTER: // only if its counts are too large for MPI's function
        case IDIST__REDUCE_SCATTERV:
            IDIST__NATIVE(nat, MPI_Allreduce, MPI_Iallreduce, in, out, k, type, nat->op, comm);
            break;
        case IDIST__REDUCE:
            IDIST__NATIVE(nat, MPI_Reduce, MPI_Ireduce, in, root_out, k, type, nat->op, call->root,
                          comm);
            break;
        case IDIST__SCAN:
            IDIST__NATIVE(nat, MPI_Scan, MPI_Iscan, in, out, k, type, nat->op, comm);
            break;
        case IDIST__EXSCAN:
            IDIST__NATIVE(nat, MPI_Exscan, MPI_Iexscan, in, out, k, type, nat->op, comm);
            break;
        default: IDIST__NATIVE(nat, MPI_Bcast, MPI_Ibcast, out, k, type, call->root, comm); break;
        }
    }
}

// Returns true if the counts of this rank, and their sum, fit into MPI's int. All ranks get the
// same answer, except in v-forms.
static bool idist__native_fits(const idist_group *g, const idist__call *call) {
    idist__extent e;
    int i;

    // MPI_Iallgatherv of Intel MPI 2021 hangs when one rank sends much and another sends nothing.
    for (i = 0; call->kind == IDIST__ALL_GATHERV && i < g->size; i++)
        if (!call->recvcounts[i]) return false;
    if (!idist__kind_is_v(call->kind)) return call->count <= IDIST__MPI_COUNT / (size_t)g->size;

    return idist__extent_of(g, call, &e) == IDIST_OK && e.send <= IDIST__MPI_COUNT &&
           e.recv <= IDIST__MPI_COUNT;
}

// Writes n counts, followed by n displacements, to `ints`.
static void idist__native_ints(const size_t *counts, const size_t *displs, int n, int *ints) {
    size_t at = 0;
    int i;

    for (i = 0; i < n; i++) {
        if (displs) at = displs[i];
        ints[i] = (int)counts[i];
        ints[n + i] = (int)at;
        at += counts[i];
    }
}

static void idist__native_move_v(idist__native *nat) {
    const idist__call *call = nat->call;
    int size = nat->group->size, n = (int)call->count, *sends = nat->counts,
        *recvs = sends + 2 * size;
    const void *in = nat->in_place ? MPI_IN_PLACE : nat->in;
    void *out = nat->out, *part = nat->in_place ? MPI_IN_PLACE : out;
    MPI_Datatype type = nat->type;
    MPI_Comm comm = nat->comm;
    bool is_root = call->root == nat->group->rank;

    if (call->sendcounts && (is_root || call->kind != IDIST__SCATTERV))
        idist__native_ints(call->sendcounts, call->senddispls, size, sends);
    if (call->recvcounts && (is_root || call->kind != IDIST__GATHERV))
        idist__native_ints(call->recvcounts, call->recvdispls, size, recvs);

    switch (call->kind) {
    case IDIST__ALL_GATHERV:
        IDIST__NATIVE(nat, MPI_Allgatherv, MPI_Iallgatherv, in, n, type, out, recvs, recvs + size,
                      type, comm);
        break;
    case IDIST__GATHERV:
        IDIST__NATIVE(nat, MPI_Gatherv, MPI_Igatherv, in, n, type, out, recvs, recvs + size, type,
                      call->root, comm);
        break;
    case IDIST__SCATTERV:
        IDIST__NATIVE(nat, MPI_Scatterv, MPI_Iscatterv, nat->in, sends, sends + size, type, part, n,
                      type, call->root, comm);
        break;
    case IDIST__REDUCE_SCATTERV:
        IDIST__NATIVE(nat, MPI_Reduce_scatter, MPI_Ireduce_scatter, in, out, sends, type, nat->op,
                      comm);
        break;
    default:
        IDIST__NATIVE(nat, MPI_Alltoallv, MPI_Ialltoallv, nat->in, sends, sends + size, type, out,
                      recvs, recvs + size, type, comm);
        break;
    }
}

static void idist__native_move(idist__native *nat) {
    const idist__call *call = nat->call;
    const void *in = nat->in_place ? MPI_IN_PLACE : nat->in;
    void *out = nat->out, *part = nat->in_place ? MPI_IN_PLACE : out;
    MPI_Datatype type = nat->type;
    MPI_Comm comm = nat->comm;
    int n = (int)call->count;

    switch (call->kind) {
    case IDIST__BARRIER: IDIST__NATIVE(nat, MPI_Barrier, MPI_Ibarrier, comm); break;
    case IDIST__ALL_GATHER:
        IDIST__NATIVE(nat, MPI_Allgather, MPI_Iallgather, in, n, type, out, n, type, comm);
        break;
    case IDIST__GATHER:
        IDIST__NATIVE(nat, MPI_Gather, MPI_Igather, in, n, type, out, n, type, call->root, comm);
        break;
    case IDIST__SCATTER:
        IDIST__NATIVE(nat, MPI_Scatter, MPI_Iscatter, nat->in, n, type, part, n, type, call->root,
                      comm);
        break;
    case IDIST__REDUCE_SCATTER:
        IDIST__NATIVE(nat, MPI_Reduce_scatter_block, MPI_Ireduce_scatter_block, in, out, n, type,
                      nat->op, comm);
        break;
    default:
        IDIST__NATIVE(nat, MPI_Alltoall, MPI_Ialltoall, in, n, type, out, n, type, comm);
        break;
    }
}

// Makes a datatype for the elements of this call.
static void idist__native_own_type(idist__native *nat) {
    nat->error = MPI_Type_contiguous((int)nat->element_size, MPI_BYTE, &nat->type);
    nat->owns_type = nat->error == MPI_SUCCESS;
    if (nat->error == MPI_SUCCESS) nat->error = MPI_Type_commit(&nat->type);
    if (nat->error != MPI_SUCCESS) nat->function = "MPI_Type_contiguous";
}

// Creates an MPI op for the user's op. The datatype of the call leads MPI's callback to the hook.
static void idist__native_user_op(idist__native *nat, const idist__user_op *user) {
    nat->hook = (idist__mpi_hook *)idist__mem_alloc(&nat->group->w->cfg.mem, sizeof *nat->hook);

    if (nat->hook) {
        nat->hook->user = *user;
        nat->hook->dtype = nat->call->dtype;
        if (!nat->owns_type) idist__native_own_type(nat);
    } else {
        nat->error = MPI_ERR_NO_MEM;
    }

    if (nat->error == MPI_SUCCESS)
        nat->error = MPI_Type_set_attr(nat->type, idist__mpi_keyval, nat->hook);
    if (nat->error == MPI_SUCCESS)
        nat->error = MPI_Op_create(idist__mpi_type_user, user->commutative, &nat->op);
    nat->owns_op = nat->error == MPI_SUCCESS;
    if (nat->error != MPI_SUCCESS) nat->function = "MPI_Op_create";
}

static void idist__native_allocate_scratch(idist__native *nat, size_t nbytes) {
    nat->scratch = (char *)idist__mem_raw(&nat->group->w->cfg.mem, nbytes);
    if (!nat->scratch) nat->error = MPI_ERR_NO_MEM;
}

// Copies `count` elements of the contribution to scratch memory, widens and scales them as the call
// requires, and lets MPI work there.
static void idist__native_stage(idist__native *nat, size_t count, idist_dtype dtype,
                                const idist__user_op *user) {
    const idist__call *call = nat->call;
    bool widen = dtype != call->dtype;
    bool scatters = idist__kind_scatters_sum(call->kind) && !nat->large_counts;
    bool in_place = call->kind != IDIST__REDUCE && !scatters;
    size_t nbytes = count * nat->element_size;
    size_t result_nbytes = call->count * nat->element_size;

    // MPICH 4 crashes in an in-place MPI_Reduce and MPI_Reduce_scatter, so these calls get a second
    // buffer.
    idist__native_allocate_scratch(nat, in_place ? nbytes : nbytes + result_nbytes + 1);
    if (!nat->scratch) return;

    if (widen)
        idist__small_float_widen((float *)(void *)nat->scratch, call->send, count, call->dtype);
    else idist__block_copy(nat->scratch, call->send, nbytes);
    if (user && !user->fn) idist__reduce_scale(nat->scratch, count, dtype, user->factor);

    nat->in = nat->scratch;
    nat->out = nat->scratch + (in_place ? 0 : nbytes);
    nat->in_place = in_place;
}

// Sets the op and the datatype of a reduction. Stages the contribution if MPI cannot use the user's
// buffers.
static void idist__native_reduction(idist__native *nat) {
    const idist__call *call = nat->call;
    const idist__user_op *user = NULL;
    bool narrow = idist__dtype_is_narrow(call->dtype), custom, scaled,
         scatters = idist__kind_scatters_sum(call->kind);
    idist__user_op pair = idist__mpi_type_pair_op(call->op);
    idist_dtype dtype = call->dtype;

    if (idist__reduce_op_is_user(call->op)) user = idist__world_user_op(nat->group, call);
    else if (idist__dtype_is_pair(dtype)) user = &pair;
    custom = user && user->fn;  // uses the dtype unconverted
    scaled = user && !user->fn; // a premultiplied sum

    if (custom) {
        idist__native_user_op(nat, user);
        if (nat->error != MPI_SUCCESS) return;
    } else {
        if (narrow) dtype = IDIST_F32;
        nat->element_size = idist_dtype_size(dtype);
        nat->type = idist__mpi_type_of(dtype);
        nat->op = idist__mpi_type_builtin_op(idist__mpi_of(nat->group->w),
                                             user ? IDIST_SUM : call->op, dtype);
    }

    if ((narrow && !custom) || scaled || (scatters && nat->large_counts) ||
        (call->kind == IDIST__REDUCE && nat->in_place)) {
        idist__native_stage(nat, idist__native_input_count(nat), dtype, user);
    } else if (scatters && (nat->in_place || nat->in == nat->out)) {
        // Our result lies in the middle of the data that we send; MPI's in-place result lies at the
        // start. An empty result may have the same address without being in place.
        idist__native_allocate_scratch(nat, call->count * nat->element_size + 1);
        nat->out = nat->scratch;
        nat->in_place = false;
    }
}

// Makes the call in place on all ranks. Called if some rank is in place, because MPI requires that
// all ranks are or none is. Makes all_to_all in place on no rank, because MPI is slower in place.
static void idist__native_same_place(idist__native *nat) {
    const idist__call *call = nat->call;
    bool is_all_to_all = call->kind == IDIST__ALL_TO_ALL,
         first_of_exscan = call->kind == IDIST__EXSCAN && nat->group->rank == 0;
    size_t nbytes = call->count * nat->element_size, at = 0;

    if (call->root >= 0 || idist__kind_scatters_sum(call->kind) || nat->scratch) return;
    if (is_all_to_all) nbytes *= (size_t)nat->group->size;
    if (call->kind == IDIST__ALL_GATHER) at = nbytes * (size_t)nat->group->rank;
    if (call->kind == IDIST__ALL_GATHERV)
        at = idist__extent_displ(call->recvcounts, call->recvdispls, nat->group->rank) *
             nat->element_size;

    // exscan must not write to the receive buffer of its first rank.
    if (nat->in_place ? is_all_to_all : first_of_exscan) {
        idist__native_allocate_scratch(nat, nbytes);
        if (nat->scratch) memcpy(nat->scratch, call->send, nbytes);
        if (is_all_to_all) nat->in = nat->scratch;
        else nat->out = nat->scratch;
    } else if (!nat->in_place && !is_all_to_all) {
        idist__block_copy(nat->out + at, call->send, nbytes);
    }

    nat->in_place = !is_all_to_all;
}

// Does everything that can fail before MPI gets the call. `flags` is the union of the flags of all
// headers.
static void idist__native_init(idist__native *nat, const idist_group *g, const idist__call *call,
                               uint32_t flags) {
    memset(nat, 0, sizeof *nat);
    nat->function = "MPI";
    nat->group = g;
    nat->call = call;
    nat->comm = idist__mpi_model_group(g)->comm;
    nat->large_counts = (flags & IDIST__HEADER_LARGE) != 0;
    nat->error = MPI_SUCCESS;
    nat->requests = nat->first_requests;
    nat->request_capacity = (int)IDIST__COUNT_OF(nat->first_requests);
    nat->type = idist__mpi_type_of(call->dtype);
    nat->element_size = idist_dtype_size(call->dtype);
    nat->in = (const char *)call->send;
    nat->out = (char *)call->recv;
    nat->no_data =
        call->kind != IDIST__BARRIER && call->count == 0 && !idist__kind_is_v(call->kind);
    if (nat->no_data) return;

    if (!idist__mpi_type_exists(call->dtype)) idist__native_own_type(nat);
    if (nat->error != MPI_SUCCESS) return;
    nat->in_place = idist__extent_call_in_place(g, call);
    if (idist__kind_reduces(call->kind)) idist__native_reduction(nat);

    if (idist__kind_is_v(call->kind)) {
        nat->counts = (int *)idist__mem_alloc(&g->w->cfg.mem, sizeof(int) * 4 * (size_t)g->size);
        if (!nat->counts) nat->error = MPI_ERR_NO_MEM;
    }

    if (nat->error == MPI_SUCCESS && (flags & IDIST__HEADER_IN_PLACE))
        idist__native_same_place(nat);
}

// Hands the call to MPI. If `blocking` is true, returns when MPI is done. The caller then calls
// idist__native_end.
static void idist__native_begin(idist__native *nat, bool blocking) {
    const idist__call *call = nat->call;
    bool reduces = idist__kind_reduces(call->kind), scatters = idist__kind_scatters_sum(call->kind);

    nat->blocking = blocking;
    if (nat->error != MPI_SUCCESS || nat->no_data) return;

    if ((reduces && (nat->large_counts || !scatters)) || call->kind == IDIST__BROADCAST)
        idist__native_pieces(nat);
    else if (nat->large_counts) idist__native_pairs(nat);
    else if (idist__kind_is_v(call->kind)) idist__native_move_v(nat);
    else idist__native_move(nat);

    if (scatters && nat->large_counts)
        nat->out += idist__extent_block_at(call, nat->group->rank) * nat->element_size;
}

static bool idist__native_done(idist__native *nat) {
    while (nat->request_count && nat->error == MPI_SUCCESS) {
        int done = 0,
            error = MPI_Test(&nat->requests[nat->request_count - 1], &done, MPI_STATUS_IGNORE);
        if (error != MPI_SUCCESS) nat->error = error;
        else if (!done) return false;
        nat->request_count--;
    }

    return true;
}

// Finishes the result of a reduction and writes it to the user's buffer.
static void idist__native_finish(idist__native *nat) {
    const idist__call *call = nat->call;
    const idist_group *g = nat->group;

    if (!idist__kind_reduces(call->kind) || !call->count) return;
    if (call->kind == IDIST__REDUCE && call->root != g->rank) return;
    if (call->kind == IDIST__EXSCAN && g->rank == 0) return;

    if (idist__dtype_is_narrow(call->dtype) && !nat->hook) {
        if (call->op == IDIST_AVG) idist__reduce_divide(nat->out, call->count, IDIST_F32, g->size);
        idist__small_float_narrow(call->recv, (const float *)(const void *)nat->out, call->count,
                                  call->dtype);
        return;
    }

    if (nat->out != call->recv) memcpy(call->recv, nat->out, call->count * nat->element_size);
    if (!nat->hook) idist__reduce_finish(call->recv, call->count, call->dtype, call->op, g->size);
}

static void idist__native_free(idist__native *nat) {
    const idist_allocator *mem = &nat->group->w->cfg.mem;

    if (nat->owns_op) MPI_Op_free(&nat->op);
    if (nat->owns_type) MPI_Type_free(&nat->type);
    if (nat->requests != nat->first_requests) idist__mem_free(mem, nat->requests);
    idist__mem_free(mem, nat->scratch);
    idist__mem_free(mem, nat->counts);
    idist__mem_free(mem, nat->hook);
    nat->group = NULL;
}

// Abandons a call. An operation cannot be taken back from MPI, but usually ends soon, because all
// ranks have entered or one is lost. If the operation does not end, MPI keeps our memory and the
// user's buffers.
static void idist__native_abandon(idist__native *nat) {
    int64_t deadline_ns = idist__os_clock_deadline(IDIST__FLUSH_MS);
    int i;

    for (i = 0; i < nat->request_count; i++) {
        int done = 0;

        while (MPI_Test(&nat->requests[i], &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && !done) {
            if (idist__os_clock_now_ns() < deadline_ns) continue;
            idist__mpi_of(nat->group->w)->abandoned = true;
            nat->group = NULL;
            return;
        }
    }

    idist__native_free(nat);
}

// Waits for the remaining requests and ends the call. A blocking call also has requests if it runs
// as messages between pairs of ranks.
static int idist__native_end(idist__native *nat) {
    while (!idist__native_done(nat)) continue;

    if (nat->error != MPI_SUCCESS) {
        idist__native_abandon(nat);
        return nat->error;
    }

    idist__native_finish(nat);
    idist__native_free(nat);

    return MPI_SUCCESS;
}
