// mpi/exchange.h: the header exchange before a collective
//
// Every rank has a header of 56 bytes and needs the headers of all other ranks. The exchange is an
// all_gather by dissemination (Bruck et al., 1997). In step k a rank sends all headers it has to
// the rank 2^k before it: its own, and the headers of the 2^k - 1 ranks after it. Rank r of 5 has:
//
//         own      | r+1      | r+2 r+3  | r+4
//         header   | step 0   | step 1   | step 2
//
// The exchange takes ceil(log2 n) steps of one message each, and every rank sends n - 1 headers. It
// uses sends and receives, because MPI_Allgather cannot be abandoned at a deadline and cannot tell
// us which ranks are missing. Headers of consecutive calls cannot be confused: every step receives
// from one rank, on the group's communicator, and MPI keeps messages in order.
//
// A second exchange of the same headers commits: it tells every rank that this rank has all headers
// and will enter MPI (mpi/mpi_coll.h).
#pragma once

#include "base/reduce_op.h"
#include "base/reduce.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/fingerprint.h"
#include "core/explain.h"
#include "mpi/mpi_model.h"

// Posts the send and the receive of the current step.
static void idist__exchange_post(idist_group *g) {
    idist__mpi_group *mg = idist__mpi_model_group(g);
    int size = g->size, have = mg->header_count, count = size - have < have ? size - have : have,
        step = 0;
    size_t nbytes = sizeof(idist__mpi_header) * (size_t)count;

    while ((1 << step) < have) step++;

    // The send goes first, because another rank waits for it.
    mg->exchange_error =
        MPI_Isend(mg->headers, (int)nbytes, MPI_BYTE, (g->rank - have + size) % size,
                  IDIST__TAG_HEADER + step, mg->comm, &mg->requests[1]);
    if (mg->exchange_error == MPI_SUCCESS)
        mg->exchange_error =
            MPI_Irecv(mg->headers + have, (int)nbytes, MPI_BYTE, (g->rank + have) % size,
                      IDIST__TAG_HEADER + step, mg->comm, &mg->requests[0]);
}

// Starts the exchange for the call that the fingerprint describes. `data` is our contribution.
static void idist__exchange_begin(idist_group *g, const idist__fingerprint *fingerprint,
                                  uint32_t flags, const void *data, size_t nbytes) {
    idist__mpi_group *mg = idist__mpi_model_group(g);
    idist__mpi_header *own = &mg->headers[0];

    own->fingerprint = *fingerprint;
    own->flags = flags;
    own->nbytes = (uint32_t)nbytes;
    if (nbytes) memcpy(own->data, data, nbytes);
    mg->entered = *fingerprint;
    mg->exchange_seq = fingerprint->seq;
    mg->header_count = 1;
    if (g->size > 1) idist__exchange_post(g);
}

typedef enum idist__exchange_state {
    IDIST__EXCHANGE_FAILED = -1,
    IDIST__EXCHANGE_PENDING = 0,
    IDIST__EXCHANGE_DONE = 1
} idist__exchange_state;

// Advances the exchange without blocking. On FAILED, *error is the error code of MPI.
static idist__exchange_state idist__exchange_step(idist_group *g, int *error) {
    idist__mpi_group *mg = idist__mpi_model_group(g);

    while (mg->header_count < g->size) {
        int done = 0, i;
        *error = mg->exchange_error;
        if (*error != MPI_SUCCESS) return IDIST__EXCHANGE_FAILED;

        for (i = 0; i < 2; i++) {
            *error = MPI_Test(&mg->requests[i], &done, MPI_STATUS_IGNORE);
            if (*error != MPI_SUCCESS) return IDIST__EXCHANGE_FAILED;
            if (!done) return IDIST__EXCHANGE_PENDING;
        }

        g->w->wait.moved_count++;
        mg->header_count = 2 * mg->header_count < g->size ? 2 * mg->header_count : g->size;
        if (mg->header_count < g->size) idist__exchange_post(g);
    }

    return IDIST__EXCHANGE_DONE;
}

// Starts the second exchange of the headers, which commits this rank to the call.
static void idist__exchange_commit(idist_group *g) {
    idist__mpi_group *mg = idist__mpi_model_group(g);

    if (idist__mpi_of(g->w)->multithreaded) mg->headers[0].flags |= IDIST__HEADER_BUSY;
    mg->committed_seq = mg->exchange_seq;
    mg->header_count = 1;
    idist__exchange_post(g);
}

static void idist__exchange_cancel(idist_group *g) {
    idist__mpi_group *mg = idist__mpi_model_group(g);
    int sent = 1;

    if (mg->requests[0] != MPI_REQUEST_NULL) MPI_Cancel(&mg->requests[0]);
    MPI_Wait(&mg->requests[0], MPI_STATUS_IGNORE);
    MPI_Test(&mg->requests[1], &sent, MPI_STATUS_IGNORE);

    if (!sent) {
        mg->headers = NULL; // MPI still reads them, so they are never freed
        MPI_Request_free(&mg->requests[1]);
    }
}

static const idist__mpi_header *idist__exchange_header(const idist_group *g, int rank) {
    return &idist__mpi_model_group(g)->headers[(rank - g->rank + g->size) % g->size];
}

static bool idist__exchange_same_call(const idist__mpi_header *a, const idist__mpi_header *b) {
    return memcmp(&a->fingerprint, &b->fingerprint, sizeof a->fingerprint) == 0;
}

// Explains how the calls of two ranks differ. Returns false if the calls are equal.
static bool idist__exchange_explain(const idist_group *g, int a, int b, char *text,
                                    size_t capacity) {
    const idist__fingerprint *of_a = &idist__exchange_header(g, a)->fingerprint,
                             *of_b = &idist__exchange_header(g, b)->fingerprint;

    if (idist__fingerprint_equal(of_a, of_b)) return false;
    idist__explain_mismatch(g->w, idist__fingerprint_difference(of_a, of_b), g->ranks[a], of_a,
                            g->ranks[b], of_b, text, capacity);

    return true;
}

// Returns true if all headers describe the same call. If not, every rank gets the same text. A rank
// without a plan agrees with every plan, so all other plans are compared with the first plan.
static bool idist__exchange_agree(const idist_group *g, char *text, size_t capacity) {
    const idist__mpi_header *headers = idist__mpi_model_group(g)->headers;
    int i, planned = 0;

    for (i = 1; i < g->size && idist__exchange_same_call(&headers[i], &headers[0]); i++) continue;
    if (i >= g->size) return true;

    for (i = 1; i < g->size; i++) {
        if (!idist__fingerprint_plan(&idist__exchange_header(g, planned)->fingerprint)) planned = i;
        if (idist__exchange_explain(g, 0, i, text, capacity) ||
            idist__exchange_explain(g, planned, i, text, capacity))
            return false;
    }

    return true;
}

static uint32_t idist__exchange_flags(const idist_group *g) {
    uint32_t flags = 0;
    int i;

    for (i = 0; i < g->size; i++) flags |= idist__mpi_model_group(g)->headers[i].flags;
    return flags;
}

// Returns the number of bytes that this rank contributes if the call fits into headers, or -1 if it
// does not. All ranks agree on whether the call fits.
static int idist__exchange_contribution(const idist_group *g, const idist__call *call) {
    size_t nbytes = idist_dtype_size(call->dtype);
    bool contributes;

    if (g->size > IDIST__HEADER_MAX_RANKS || idist__kind_is_v(call->kind)) return -1;
    if (call->count > IDIST__HEADER_DATA_NBYTES) return -1;
    if (idist__kind_reduces(call->kind) && idist__reduce_op_is_user(call->op)) return -1;
    nbytes *= call->count * (idist__kind_gives_blocks(call->kind) ? (size_t)g->size : 1);
    if (nbytes > IDIST__HEADER_DATA_NBYTES) return -1;
    contributes =
        (call->kind != IDIST__BROADCAST && call->kind != IDIST__SCATTER) || call->root == g->rank;

    return contributes ? (int)nbytes : 0;
}

// Computes the result of a call whose contributions are all in the headers. Reductions combine the
// operands in rank order, so the result is the same on all ranks.
static void idist__exchange_result(const idist_group *g, const idist__call *call) {
    size_t part = call->count * idist_dtype_size(call->dtype), at = 0;
    const void *in[IDIST__HEADER_MAX_RANKS];
    char *recv = (char *)call->recv;
    int i, n = g->size;

    if (call->kind == IDIST__SCAN) n = g->rank + 1;
    if (call->kind == IDIST__EXSCAN) n = g->rank;
    if (!part || !n) return;
    if ((call->kind == IDIST__GATHER || call->kind == IDIST__REDUCE) && call->root != g->rank)
        return;
    if (idist__kind_gives_blocks(call->kind)) at = part * (size_t)g->rank;

    if (call->kind == IDIST__BROADCAST || call->kind == IDIST__SCATTER) {
        if (call->kind == IDIST__SCATTER || call->root != g->rank)
            memcpy(recv, idist__exchange_header(g, call->root)->data + at, part);
        return;
    }

    for (i = 0; i < n; i++) in[i] = idist__exchange_header(g, i)->data + at;

    if (idist__kind_reduces(call->kind))
        idist__reduce_many(recv, in, n, call->count, call->dtype, call->op,
                           call->op == IDIST_AVG ? n : 0);
    else if (idist__kind_takes_blocks(call->kind))
        for (i = 0; i < n; i++) memcpy(recv + part * (size_t)i, in[i], part);
}
