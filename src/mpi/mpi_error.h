// mpi/mpi_error.h: MPI's errors, lost ranks, and waiting with a deadline
#pragma once

#include "os/clock.h"
#include "os/thread.h"
#include "base/fail.h"
#include "core/group.h"
#include "mpi/mpi_model.h"

static idist_status idist__mpi_error_fail(const char *what, int error) {
    char text[MPI_MAX_ERROR_STRING + 1];
    int error_class = MPI_ERR_OTHER, length = 0;

    MPI_Error_class(error, &error_class);
    MPI_Error_string(error, text, &length);
    return idist__fail(error_class == MPI_ERR_NO_MEM ? IDIST_ERR_NO_MEMORY : IDIST_ERR_SYSTEM,
                       "%s: %.*s", what, length, text);
}

// Returns true if an error means that a process is lost. A revoked communicator counts: another
// rank revokes it to report a loss.
static bool idist__mpi_error_is_loss(int error) {
#ifdef IDIST__ULFM
    int error_class = MPI_SUCCESS;
    MPI_Error_class(error, &error_class);
    return error_class == MPIX_ERR_PROC_FAILED || error_class == MPIX_ERR_PROC_FAILED_PENDING ||
           error_class == MPIX_ERR_REVOKED;
#else
    (void)error;
    return false;
#endif
}

// Asks MPI which ranks are lost, and fails every group that contains a lost rank.
static void idist__mpi_error_find_lost(idist__mpi *mpi) {
#ifdef IDIST__ULFM
    MPI_Group all, failed;
    int i, failed_count = 0;

    if (!mpi->fault_tolerant || MPIX_Comm_failure_ack(mpi->p2p_comm) != MPI_SUCCESS) return;
    if (MPIX_Comm_failure_get_acked(mpi->p2p_comm, &failed) != MPI_SUCCESS) return;
    MPI_Comm_group(mpi->p2p_comm, &all);
    MPI_Group_size(failed, &failed_count);

    for (i = 0; i < failed_count; i++) {
        int rank = -1;
        MPI_Group_translate_ranks(failed, 1, &i, all, &rank);
        if (rank < 0 || rank >= mpi->w->group.size || mpi->peers[rank].lost) continue;
        mpi->peers[rank].lost = true;
        idist__group_lose_rank(mpi->w, rank, "its process ended");
    }

    MPI_Group_free(&failed);
    MPI_Group_free(&all);
#else
    (void)mpi;
#endif
}

// Fails a group in which a call of MPI failed. After a loss MPI may take a moment to find out which
// rank is lost, so this function keeps asking for up to IDIST__FIND_LOST_MS. Receiving may itself
// fail and call this function again; finding_lost ends the recursion.
static void idist__mpi_error_fail_group(idist__mpi *mpi, idist_group *g, const char *what,
                                        int error) {
    char cause[400];
    idist_status status;
    int64_t deadline_ns = idist__os_clock_deadline(IDIST__FIND_LOST_MS);

    while (idist__mpi_error_is_loss(error) && !mpi->finding_lost && g->status == IDIST_OK &&
           idist__os_clock_now_ns() < deadline_ns) {
        mpi->finding_lost = true;
        idist__mpi_error_find_lost(mpi);
        mpi->receive(mpi); // another rank may tell us what happened
        mpi->finding_lost = false;
    }

    status = idist__mpi_error_fail(what, error);
    snprintf(cause, sizeof cause, "on rank %d %.350s", mpi->w->cfg.rank, idist__me.text);
    idist__group_fail(g, idist__mpi_error_is_loss(error) ? IDIST_ERR_PEER_LOST : status, cause);
}

// Waits for a request of MPI, forever if timeout_ms < 0. After IDIST_ERR_TIMEOUT MPI still owns the
// request.
static idist_status idist__mpi_error_await(MPI_Request *request, int timeout_ms, const char *what) {
    int64_t deadline_ns = timeout_ms < 0 ? IDIST__FOREVER : idist__os_clock_deadline(timeout_ms);
    int done = 0, error;

    for (;;) {
        error = MPI_Test(request, &done, MPI_STATUS_IGNORE);
        if (error != MPI_SUCCESS) return idist__mpi_error_fail(what, error);
        if (done) return IDIST_OK;
        if (idist__os_clock_now_ns() > deadline_ns)
            return idist__fail(IDIST_ERR_TIMEOUT,
                               "%s: not all ranks of the communicator arrived within %d ms", what,
                               timeout_ms);
        idist__os_thread_yield();
    }
}
