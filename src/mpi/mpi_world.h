// mpi/mpi_world.h: opening and closing a world
//
// Opening duplicates the communicator twice, exchanges hosts and settings, and finds out which
// ranks share a host. Only the first step has a deadline: after it, all ranks are known to be here.
//
// Closing waits for control messages in flight and frees what MPI still lets us free. After the
// last world it finalizes MPI if idist initialized MPI.
#pragma once

#include "os/clock.h"
#include "os/process.h"
#include "os/cpu.h"
#include "os/thread.h"
#include "base/fail.h"
#include "base/text.h"
#include "base/mem.h"
#include "base/window.h"
#include "base/log.h"
#include "launch/env.h"
#include "launch/config.h"
#include "core/model.h"
#include "core/group.h"
#include "mpi/mpi_model.h"
#include "mpi/mpi_error.h"
#include "mpi/mpi_type.h"
#include "mpi/control.h"
#include "mpi/mpi_engine.h"
#include "mpi/mpi_life.h"

// Exchanges the table of ranks, and checks that settings are equal where they must be.
static idist_status idist__mpi_world_exchange_ranks(idist__mpi *mpi) {
    const idist__config *cfg = &mpi->w->cfg;
    idist__rank_info *nodes = mpi->w->nodes, *own = &nodes[cfg->rank];
    int64_t nbytes = cfg->shm_asked ? (int64_t)cfg->shm_nbytes : 0, check = !cfg->unchecked;
    int64_t settings[4] = {nbytes, -nbytes, check, -check}, max[4]; // max(-x) is -min(x)
    bool same_nbytes, same_check;
    int error;

    idist__text_copy(own->hostname, sizeof own->hostname, mpi->w->about.hostname);
    own->host = idist__config_host_key(cfg);
    error = MPI_Allgather(MPI_IN_PLACE, 0, MPI_BYTE, nodes, sizeof *nodes, MPI_BYTE, mpi->p2p_comm);
    if (error == MPI_SUCCESS)
        error = MPI_Allreduce(settings, max, 4, MPI_INT64_T, MPI_MAX, mpi->p2p_comm);
    if (error != MPI_SUCCESS) return idist__mpi_error_fail("MPI_Allgather", error);

    same_nbytes = max[0] == -max[1];
    same_check = max[2] == -max[3];
    if (same_nbytes && same_check) return IDIST_OK;

    return idist__fail(IDIST_ERR_ENV,
                       "initialize: %s differs between ranks; set the same value on all ranks",
                       same_nbytes ? "IDIST_CHECK" : "IDIST_SHM_MIB (desc.shm_nbytes)");
}

// Counts the cores that the ranks of this host may use together, and makes the window for
// idist_alloc.
static idist_status idist__mpi_world_share_host(idist__mpi *mpi) {
    idist__world *w = mpi->w;
    idist__os_cpu_set own, together;
    MPI_Comm host;
    void *base = NULL;
    int error, size = 1;

    error = MPI_Comm_split_type(mpi->p2p_comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
    if (error != MPI_SUCCESS) return idist__mpi_error_fail("MPI_Comm_split_type", error);
    MPI_Comm_set_errhandler(host, MPI_ERRORS_RETURN);
    MPI_Comm_size(host, &size);
    idist__os_cpu_usable(&own);
    error = MPI_Allreduce(&own, &together, (int)sizeof own, MPI_UINT8_T, MPI_BOR, host);
    if (error == MPI_SUCCESS) w->machine.ncores = idist__os_cpu_set_count(&together);

    if (error == MPI_SUCCESS && size > 1 && w->cfg.shm_asked) {
        if (MPI_Win_allocate_shared((MPI_Aint)w->cfg.shm_nbytes, 1, MPI_INFO_NULL, host, &base,
                                    &mpi->win) != MPI_SUCCESS)
            mpi->win = MPI_WIN_NULL;
        if (mpi->win != MPI_WIN_NULL)
            mpi->window = idist__window_adopt((char *)base, w->cfg.shm_nbytes);
    }

    MPI_Comm_free(&host);

    return error == MPI_SUCCESS ? IDIST_OK : idist__mpi_error_fail("MPI_Allreduce", error);
}

static idist_status idist__mpi_world_allocate(idist__mpi *mpi) {
    const idist_allocator *mem = &mpi->w->cfg.mem;
    size_t size = (size_t)mpi->w->group.size, i;

    mpi->peers = (idist__mpi_peer *)idist__mem_alloc(mem, sizeof *mpi->peers * size);
    mpi->sent_counts = (uint32_t *)idist__mem_alloc(mem, sizeof(uint32_t) * size);
    if (!mpi->peers || !mpi->sent_counts) return IDIST_ERR_NO_MEMORY;

    for (i = 1; i < size; i++) {
        idist__mpi_outgoing *o =
            (idist__mpi_outgoing *)idist__mem_alloc(mem, sizeof *o + IDIST__CONTROL_MAX_NBYTES);
        if (!o) return IDIST_ERR_NO_MEMORY;
        o->next = mpi->reserve;
        mpi->reserve = o;
    }

    return IDIST_OK;
}

// Makes both communicators. Once the first one exists, all ranks are here, so the second one needs
// no deadline.
static idist_status idist__mpi_world_duplicate(idist__mpi *mpi) {
    const idist__config *cfg = &mpi->w->cfg;
    MPI_Request request;
    idist_status status;
    int error = MPI_Comm_idup(idist__mpi_life_base_comm(cfg), &mpi->p2p_comm, &request);

    if (error != MPI_SUCCESS) return idist__mpi_error_fail("initialize: MPI_Comm_idup", error);
    status = idist__mpi_error_await(&request, cfg->init_timeout_ms, "initialize");
    if (status != IDIST_OK) return status;

    MPI_Comm_set_errhandler(mpi->p2p_comm, MPI_ERRORS_RETURN);
    error = MPI_Comm_dup(mpi->p2p_comm, &mpi->world_comm);
    if (error != MPI_SUCCESS) return idist__mpi_error_fail("initialize: MPI_Comm_dup", error);

#ifdef IDIST__ULFM
    mpi->fault_tolerant =
        idist__os_env("OMPI_MCA_mpi_ft_enable") != NULL; // mpirun --with-ft ulfm sets it
#endif

    return IDIST_OK;
}

static idist_status idist__mpi_world_make_ops(idist__mpi *mpi) {
    static MPI_User_function *const functions[4] = {idist__mpi_type_sum, idist__mpi_type_prod,
                                                    idist__mpi_type_min, idist__mpi_type_max};
    int error, i;

    if (idist__mpi_keyval == MPI_KEYVAL_INVALID)
        MPI_Type_create_keyval(MPI_TYPE_NULL_COPY_FN, MPI_TYPE_NULL_DELETE_FN, &idist__mpi_keyval,
                               NULL);

    for (i = 0; i < 4; i++) {
        error = MPI_Op_create(functions[i], 1, &mpi->ops[i]);
        if (error != MPI_SUCCESS) return idist__mpi_error_fail("MPI_Op_create", error);
    }

    return IDIST_OK;
}

static idist_status idist__mpi_world_make(idist__mpi *mpi) {
    idist__world *w = mpi->w;
    int level = MPI_THREAD_SINGLE;
    bool one_thread;
    idist_status status = idist__mpi_world_allocate(mpi);

    if (status != IDIST_OK) return status;
    MPI_Query_thread(&level);
    one_thread = level < MPI_THREAD_SERIALIZED;
    w->machine.one_thread_calls = one_thread;
    w->machine.foreign_thread_count = idist__mpi_thread_count;
    w->machine.single_threaded =
        one_thread || (idist__mpi_world_count && level < MPI_THREAD_MULTIPLE);

    status = idist__mpi_world_duplicate(mpi);
    if (status == IDIST_OK) status = idist__mpi_world_exchange_ranks(mpi);
    if (status == IDIST_OK) status = idist__mpi_world_share_host(mpi);
    if (status == IDIST_OK) status = idist__mpi_world_make_ops(mpi);
    if (status == IDIST_OK) idist__control_post_receive(mpi);

    return status;
}

static void idist__mpi_world_free(idist__mpi *mpi) {
    const idist_allocator *mem = &mpi->w->cfg.mem;

    idist__mem_free_list(mem, mpi->unexpected);
    idist__mem_free_list(mem, mpi->comms);
    idist__mem_free_list(mem, mpi->free_outgoing);
    idist__mem_free_list(mem, mpi->reserve);
    idist__mem_free(mem, mpi->peers);
    idist__mem_free(mem, mpi->sent_counts);
    idist__mem_free(mem, mpi);
}

static void idist__mpi_world_stop_receiving(idist__mpi *mpi) {
    if (mpi->incoming == MPI_REQUEST_NULL) return;
    MPI_Cancel(&mpi->incoming);
    MPI_Wait(&mpi->incoming, MPI_STATUS_IGNORE);
}

static void idist__mpi_world_close_window(idist__mpi *mpi) {
    if (mpi->window) idist__window_close(mpi->window);
    mpi->window = NULL;
}

// Fails the world because the program calls MPI_Finalize while the world is open. MPI_Finalize
// first deletes our attribute of MPI_COMM_SELF, and the deletion calls this function. The world
// fails here and on the other ranks, and never uses MPI again. Closing the world also calls this
// function, which then does nothing.
static int idist__mpi_world_finalizes(MPI_Comm comm, int keyval, void *value, void *unused) {
    idist__mpi *mpi = (idist__mpi *)value;
    idist__world *w = mpi->w;
    idist_group *g;

    (void)comm;
    (void)keyval;
    (void)unused;
    if (w->group.rank < 0) return MPI_SUCCESS; // the world is closing: see idist__mpi_world_close

    idist__os_mutex_lock(&w->lock);
    idist__group_fail_self(&w->group, IDIST_ERR_STATE,
                           "called MPI_Finalize before idist_finalize (or idist_close)");
    for (g = w->group.next; g; g = g->next)
        if (g->rank >= 0) idist__group_fail(g, w->group.status, w->group.cause);
    idist__mpi_engine_flush(w, idist__os_clock_deadline(IDIST__FLUSH_MS));
    idist__mpi_world_stop_receiving(mpi);
    idist__mpi_world_close_window(mpi);
    mpi->fault_tolerant = false;
    mpi->finalized = true;
    idist__os_mutex_unlock(&w->lock);

    return MPI_SUCCESS;
}

// Adds the attribute that detects MPI_Finalize. If MPI cannot create the attribute, the call goes
// undetected.
static void idist__mpi_world_watch_finalize(idist__mpi *mpi) {
    int keyval;

    mpi->self_keyval = MPI_KEYVAL_INVALID;
    if (MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, idist__mpi_world_finalizes, &keyval, NULL) !=
        MPI_SUCCESS)
        return;
    if (MPI_Comm_set_attr(MPI_COMM_SELF, keyval, mpi) == MPI_SUCCESS) mpi->self_keyval = keyval;
    else MPI_Comm_free_keyval(&keyval);
}

static idist_status idist__mpi_world_open(idist__world *w) {
    idist__mpi *mpi = (idist__mpi *)idist__mem_alloc(&w->cfg.mem, sizeof *mpi);
    idist_status status;

    w->impl = mpi;
    if (!mpi) return IDIST_ERR_NO_MEMORY;
    mpi->w = w;
    mpi->receive = idist__control_progress;
    mpi->deliver = idist__mpi_engine_deliver;
    mpi->shrunk_comm = MPI_COMM_NULL;
    mpi->win = MPI_WIN_NULL;
    mpi->incoming = MPI_REQUEST_NULL;
    status = idist__mpi_world_make(mpi);

    // IDIST_ERR_ENV means that settings differ: all ranks are here, so the communicators can be
    // freed. After IDIST_ERR_TIMEOUT MPI still has the address of mpi->p2p_comm, so mpi stays.
    if (status != IDIST_OK) {
        if (status == IDIST_ERR_ENV) MPI_Comm_free(&mpi->world_comm);
        if (status == IDIST_ERR_ENV) MPI_Comm_free(&mpi->p2p_comm);
        if (status != IDIST_ERR_TIMEOUT) idist__mpi_world_free(mpi);
        return status;
    }

    idist__mpi_world_watch_finalize(mpi);
    idist__os_mutex_lock(&idist__mpi_lock);
    idist__mpi_world_count++;
    idist__os_mutex_unlock(&idist__mpi_lock);

    return IDIST_OK;
}

// Returns true if, after a failure, all other ranks also close the world within a second. Otherwise
// MPI_Finalize would block forever. Returns false under ULFM, because MPI_Finalize of Open MPI 5
// may block after a loss in any case.
static bool idist__mpi_world_all_close(idist__mpi *mpi) {
    MPI_Request request;

    if (mpi->fault_tolerant || mpi->abandoned || mpi->finalized) return false;
    if (MPI_Ibarrier(mpi->p2p_comm, &request) != MPI_SUCCESS) return false;
    return idist__mpi_error_await(&request, IDIST__CLOSE_MS, "finalize") == IDIST_OK;
}

// Counts a world as closed. After the last one, finalizes MPI if idist initialized MPI and can
// finalize it.
static void idist__mpi_world_release(idist__world *w, bool all_closed) {
    idist__os_mutex_lock(&idist__mpi_lock);

    if (!all_closed && idist__mpi_initialized && !idist__mpi_of(w)->finalized &&
        !idist__mpi_never_finalize) {
        idist__mpi_never_finalize = true;
        idist__log_print(&w->log, IDIST_LOG_WARN,
                         "finalize: not all ranks closed the world, so MPI is not finalized; the "
                         "launcher ends the job when this process exits");
    }

    if (idist__mpi_of(w)->finalized) idist__mpi_never_finalize = true; // the program has done it
    idist__mpi_world_count--;
    if (idist__mpi_world_count == 0 && idist__mpi_initialized && !idist__mpi_never_finalize)
        MPI_Finalize();
    idist__os_mutex_unlock(&idist__mpi_lock);
}

// Frees the MPI objects that MPI still lets us free.
static void idist__mpi_world_free_handles(idist__mpi *mpi, bool clean) {
    int i;

    idist__mpi_world_stop_receiving(mpi);

    if (clean) {
        if (mpi->win != MPI_WIN_NULL) MPI_Win_free(&mpi->win);
        MPI_Comm_free(&mpi->world_comm);
        MPI_Comm_free(&mpi->p2p_comm);
    }

    for (i = 0; i < 4; i++) MPI_Op_free(&mpi->ops[i]);
    if (mpi->self_keyval == MPI_KEYVAL_INVALID) return;
    MPI_Comm_delete_attr(MPI_COMM_SELF, mpi->self_keyval);
    MPI_Comm_free_keyval(&mpi->self_keyval);
}

static void idist__mpi_world_close(idist__world *w, bool clean) {
    idist__mpi *mpi = idist__mpi_of(w);
    char text[sizeof idist__me.text];
    bool all_closed;

    memcpy(text, idist__me.text, sizeof text); // closing must not change the last error
    idist__os_mutex_lock(&w->lock);
    w->group.rank = -1; // messages that still arrive find no group
    idist__mpi_engine_flush(w, idist__os_clock_deadline(IDIST__FLUSH_MS));
    if (clean) idist__control_drain(mpi);
    all_closed = (clean && !mpi->abandoned) || idist__mpi_world_all_close(mpi);

    idist__mpi_world_close_window(mpi);
    if (!mpi->finalized) idist__mpi_world_free_handles(mpi, clean);
    idist__os_mutex_unlock(&w->lock);
    idist__mpi_world_release(w, all_closed);
    idist__mpi_world_free(mpi);
    memcpy(idist__me.text, text, sizeof text);
}

static void *idist__mpi_world_alloc(idist__world *w, size_t nbytes) {
    idist__window *window = idist__mpi_of(w)->window;
    return window ? idist__window_alloc(window, nbytes) : NULL;
}
