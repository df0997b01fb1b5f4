// calls/life.h: opens and closes a world
//
//     idist__life_open
//       idist__life_new           allocates the world and chooses a backend
//       open                      the ranks meet
//       idist__life_count_nodes   computes local and node ranks
//       idist__life_settle_in     decides how this rank waits
//       group_open                opens the group of all ranks
//       wrap                      puts the device backend, if there is one, in front
//
// idist__life_close runs a last barrier and then undoes these steps in reverse order.
#pragma once

#include "os/clock.h"
#include "os/process.h"
#include "os/cpu.h"
#include "os/thread.h"
#include "os/socket.h"
#include "base/fail.h"
#include "base/text.h"
#include "base/mem.h"
#include "base/window.h"
#include "base/log.h"
#include "launch/env.h"
#include "launch/pmi.h"
#include "launch/draw.h"
#include "launch/config.h"
#include "core/model.h"
#include "core/backend.h"
#include "core/world.h"
#include "core/task.h"
#include "core/together.h"
#include "core/group.h"
#include "core/wait.h"
#include "core/call.h"
#include "calls/choose_backend.h"

static idist__os_mutex idist__life_lock = IDIST__OS_MUTEX_INIT; // held by initialize and finalize

// The default world cannot be closed while a thread holds this lock.
static idist__os_mutex idist__default_lock = IDIST__OS_MUTEX_INIT;

// Resets the global locks and lists in a child made by fork. Another thread of the parent may have
// held these locks, or have been changing a list of handles. So the lists start empty. The data
// that the other locks guard changes by a single pointer store and needs no reset.
static void idist__life_after_fork(void) {
    idist__os_mutex_init(&idist__windows_lock);
    idist__os_mutex_init(&idist__log_lock);
    idist__os_mutex_init(&idist__pmi_known.lock);
    idist__os_mutex_init(&idist__backend_lock);
    idist__os_mutex_init(&idist__ended_lock);
    idist__os_mutex_init(&idist__life_lock);
    idist__os_mutex_init(&idist__default_lock);
    memset(&idist__ended_groups, 0, sizeof idist__ended_groups);
    memset(&idist__ended_worlds, 0, sizeof idist__ended_worlds);
}

// Registers idist__life_after_fork when the first world opens, so that every later fork prepares
// its child. If registering fails for lack of memory, children are not prepared until a later world
// registers it.
static void idist__life_watch_forks(void) {
    static bool watches;

    idist__os_mutex_lock(&idist__default_lock);
    if (!watches) watches = idist__os_process_on_fork(idist__life_after_fork);
    idist__os_mutex_unlock(&idist__default_lock);
}

// Computes local and node ranks from the table of hosts. Uneven and cyclic placements work, too.
static void idist__life_count_nodes(idist__world *w) {
    int i, k, n = w->group.size;

    w->nnodes = 0;

    for (i = 0; i < n; i++) {
        idist__rank_info *a = &w->nodes[i];
        a->local_rank = 0;
        a->local_size = 0;
        a->node_rank = -1;

        for (k = 0; k < n; k++) {
            if (w->nodes[k].host != a->host) continue;

            if (k < i) {
                a->local_rank++;
                a->node_rank = w->nodes[k].node_rank;
            }

            a->local_size++;
        }

        if (a->node_rank < 0) a->node_rank = w->nnodes++;
    }
}

static void idist__life_free(idist__world *w) {
    idist_allocator mem = w->cfg.mem;

    while (w->group.next) idist__group_free(w->group.next);
    idist__draw_close(&w->cfg);

    if (w->life.abandoned) {
        idist__group_abandon(&w->group);
        return;
    }

    while (w->groups.freed) {
        idist_group *g = w->groups.freed;
        w->groups.freed = g->next;
        idist__ended_keep(&idist__ended_groups, g);
    }

    while (w->tasks.all) {
        idist__task *t = w->tasks.all;
        w->tasks.all = t->older;
        idist__mem_free(&mem, t);
    }

    idist__mem_free_list(&mem, w->group.planned);
    idist__mem_free(&mem, w->group.ranks);
    idist__mem_free(&mem, w->group.impl);
    idist__mem_free(&mem, w->nodes);
    idist__os_cond_destroy(&w->changed);
    idist__os_cond_destroy(&w->work);
    idist__os_mutex_destroy(&w->lock);
    memset(w, 0, sizeof *w); // erases the secret, too
    idist__ended_keep(&idist__ended_worlds, &w->group);
}

// Sets up the group of all ranks and allocates the tables that are indexed by rank.
static idist_status idist__life_new_group(idist__world *w) {
    const idist_allocator *mem = &w->cfg.mem;
    int i, n = w->cfg.world_size;

    w->group.w = w;
    w->group.ctx = 1;
    w->group.rank = w->cfg.rank;
    w->group.size = n;
    w->group.ranks = (int *)idist__mem_alloc(mem, sizeof(int) * (size_t)n);
    w->group.impl = idist__mem_alloc(mem, w->backend->group_nbytes);
    w->nodes = (idist__rank_info *)idist__mem_alloc(mem, sizeof *w->nodes * (size_t)n);
    w->process = idist__world_process();
    if (!w->group.ranks || !w->group.impl || !w->nodes) return IDIST_ERR_NO_MEMORY;
    for (i = 0; i < n; i++) w->group.ranks[i] = i;

    return IDIST_OK;
}

static uint64_t idist__world_serial; // of the most recent world

// Allocates a world, chooses its backends, and assigns this process a rank if it was not given one.
// On failure, *out is NULL or a world that the caller frees with idist__life_free.
static idist_status idist__life_new(const idist__config *cfg, idist__world **out) {
    // A world starts with its group, so its memory can come from the list of ended worlds.
    idist__world *w = (idist__world *)(void *)idist__ended_reuse(&idist__ended_worlds,
                                                                 IDIST__ENDED_WORLDS, sizeof *w);
    idist_status status;

    *out = w;
    if (!w) return IDIST_ERR_NO_MEMORY;
    w->groups.serial = __atomic_add_fetch(&idist__world_serial, (uint64_t)1, __ATOMIC_RELAXED);
    w->cfg = *cfg;
    idist__os_mutex_init(&w->lock);
    idist__os_cond_init(&w->changed);
    idist__os_cond_init(&w->work);
    if (!idist__os_socket_host_name(w->about.hostname, sizeof w->about.hostname))
        idist__text_copy(w->about.hostname, sizeof w->about.hostname, "localhost");

    status = idist__log_init(&w->log, &cfg->logger);
    idist__choose_backend_names(w->about.backends, sizeof w->about.backends);
    if (status == IDIST_OK) status = idist__choose_backend_pick(w);
    if (status == IDIST_OK) status = idist__choose_backend_find_device(w);
    if (status == IDIST_OK && w->cfg.rank == IDIST__RANK_DRAWN) status = idist__draw_rank(&w->cfg);
    if (status != IDIST_OK) return status;
    snprintf(w->log.who, sizeof w->log.who, "rank %d/%d %s", w->cfg.rank, w->cfg.world_size,
             w->about.hostname);

    return idist__life_new_group(w);
}

// Decides where this rank runs and how it waits. Polling occupies a core, so its time is bounded.
// With more ranks than cores, ranks do not poll, because polling would take the core from the rank
// that everybody waits for. Such ranks start evenly spread over the cores. Otherwise the kernel
// would take a good part of a second to notice that one core has three ranks and another has one.
static void idist__life_settle_in(idist__world *w) {
    const idist__rank_info *me = &w->nodes[w->group.rank];
    int own = idist__os_cpu_count(), ncores = w->machine.ncores ? w->machine.ncores : own;
    int rank = me->local_rank, size = me->local_size;
    bool oversubscribed;

    if (w->machine.sharing_size > size) {
        rank = w->machine.sharing_rank;
        size = w->machine.sharing_size;
        ncores = own;
    }

    oversubscribed = size > ncores;
    w->wait.spin_ns = w->wait.spin_budget_ns = oversubscribed ? 0 : IDIST__SPIN_NS;
    if (own < 2 || !(w->cfg.bind || oversubscribed)) return;
    if (idist__os_cpu_bind(rank % own, w->cfg.bind)) return;
    idist__log_print(&w->log, w->cfg.bind ? IDIST_LOG_WARN : IDIST_LOG_INFO,
                     "could not bind to a processor: %s", strerror(errno));
}

// Clears the default world if it is w, so that no new call can enter w. Waits for idist_abort,
// which may be running in any thread.
static void idist__life_retire(idist__world *w) {
    idist__os_mutex_lock(&idist__default_lock);
    if (w == idist__world_default())
        __atomic_store_n(&idist__default_world, (idist__world *)NULL, __ATOMIC_RELEASE);
    idist__os_mutex_unlock(&idist__default_lock);
}

// Checks that a thread may begin to close the world. Called with the world's lock held. Fails while
// requests or another thread's idist_group_begin are open, because closing would free the tasks
// they refer to.
static idist_status idist__life_check_unused(const idist__world *w) {
    const idist_group *g;

    if (w->tasks.deferred_count)
        return idist__fail(IDIST_ERR_STATE, "finalize: another thread is inside idist_group_begin");
    for (g = &w->group; g; g = g->next)
        if (g->open_request_count)
            return idist__fail(IDIST_ERR_STATE,
                               "finalize: requests are still open; wait for them first");

    return IDIST_OK;
}

// Runs the last barrier. If a rank finalizes while other ranks are in another call, all of them
// report a mismatch.
static idist_status idist__life_last_barrier(idist__world *w) {
    idist__call call;
    idist_opts opts;

    memset(&opts, 0, sizeof opts);
    idist__call_init(&call, IDIST__BARRIER, NULL, NULL, 0, IDIST_U8);
    call.label = IDIST__FINALIZE;
    return idist__call_traced(&w->group, &call, &opts);
}

// Cancels all running tasks, so that nothing touches the callers' buffers afterwards. If the world
// has failed, also fails the groups of these tasks, whose other members would otherwise wait for
// this rank. All other groups keep working until a call needs this rank; see `close` of
// idist_backend_api.
static void idist__life_cancel_tasks(idist__world *w) {
    while (w->tasks.running) {
        idist__task *t = w->tasks.running;
        idist_group *g = t->group;

        w->backend->cancel(t);
        idist__task_complete(t, IDIST_ERR_ABORTED, "the world was closed");
        if (w->group.status != IDIST_OK && !g->inner)
            idist__group_fail(g, w->group.status, w->group.cause);
    }
}

// Time in ms that threads have to return from calls that were ended.
enum { IDIST__LEAVE_MS = 5000 };

// Returns true if no other thread is inside a call.
static bool idist__life_is_left(const idist__world *w) {
    return !w->wait.blocked_count && !w->groups.making_count &&
           w->wait.driver == IDIST__DRIVER_NONE &&
           !__atomic_load_n(&w->wait.lock_waiter_count, __ATOMIC_RELAXED);
}

// Ends the calls of other threads and waits until the threads have left, because the caller then
// frees what they use. Meanwhile a thread that was waiting for the lock may begin another call,
// which this function ends as well. Returns false if a thread has not left after IDIST__LEAVE_MS.
static bool idist__life_end_calls(idist__world *w) {
    int64_t deadline_ns = idist__os_clock_deadline(IDIST__LEAVE_MS);

    idist__life_cancel_tasks(w);

    while (!idist__life_is_left(w)) {
        if (idist__os_clock_now_ns() > deadline_ns) return false;
        idist__os_cond_broadcast(&w->changed);
        idist__world_wake_driver(w);
        idist__os_mutex_unlock(&w->lock);
        idist__os_clock_pause_ms(1);
        idist__world_lock(w);
        idist__life_cancel_tasks(w);
    }

    return true;
}

// Closes the backend and frees the world. If a thread is still inside a call (life.abandoned),
// frees nothing that the thread uses.
static void idist__life_end(idist__world *w) {
    idist_group *g;

    if (!w->life.abandoned) {
        if (w->device_api) w->device_api->end_calls(w);
        while (w->group.next) idist__group_free(w->group.next);
        w->backend->group_close(&w->group);
        w->backend->close(w, !w->life.leaves);
    }

    if (idist__tracer_now()) idist__tracer_now()->left();
    idist__log_print(&w->log, IDIST_LOG_INFO, "left the world");
    if (w->life.abandoned)
        idist__log_print(&w->log, IDIST_LOG_WARN,
                         "a thread has not returned from a call: the closed world stays in memory");
    for (g = w->group.next; g; g = g->next) idist__group_abandon(g); // the backend still has them
    w->group.next = NULL;
    idist__life_free(w);
}

static bool idist__life_is_settled(void *arg) {
    return !((const idist__world *)arg)->tasks.freed_request_count;
}

// Closes a world. If `force` is set, the worker or the world has failed: requests may be open, and
// there is no last barrier. The other ranks then see a lost rank. With `force`, an open
// idist_group_begin of this thread ends. If another thread has one open, the world's memory stays,
// so that the thread still finds its tasks.
static idist_status idist__life_close(idist__world *w, bool force) {
    idist_status status = IDIST_OK;
    bool has_thread;

    if (idist__world_enter("finalize", w) != IDIST_OK) return IDIST_ERR_STATE;
    if (idist__together_now.depth && !force)
        return idist__fail(IDIST_ERR_STATE,
                           "finalize: inside idist_group_begin; call idist_group_end first");
    if (force) idist__call_forget(w);
    idist__world_lock(w);
    if (w->life.closing) status = idist__call_check_open(w, "finalize");
    else if (!force) status = idist__life_check_unused(w);

    if (status != IDIST_OK) {
        idist__os_mutex_unlock(&w->lock);
        return status;
    }

    idist__fail_begin();
    w->life.closing = true;
    if (!force) idist__wait_until(w, idist__life_is_settled, w); // waits for freed requests
    if (!force) status = idist__life_last_barrier(w);

    w->progress.stops = true;
    has_thread = w->progress.running;
    idist__os_cond_broadcast(&w->work);
    w->backend->wake(w);
    idist__os_mutex_unlock(&w->lock);
    idist__life_retire(w);
    if (has_thread) idist__os_thread_join(w->progress.thread);

    idist__world_lock(w);
    w->life.abandoned = !idist__life_end_calls(w) || w->tasks.deferred_count;
    w->life.leaves = status != IDIST_OK || force;
    idist__os_mutex_unlock(&w->lock);

    idist__life_end(w);

    return idist__fail_end(status);
}

// Opens the backend, where the ranks meet, and the group of all ranks. Frees the world on failure.
static idist_status idist__life_meet(idist__world *w) {
    idist_status status = w->backend->open(w);

    if (status == IDIST_OK) {
        idist__life_count_nodes(w);
        idist__life_settle_in(w);
        status = w->backend->group_open(&w->group);
        if (status == IDIST_OK) return IDIST_OK;
        while (w->group.next) idist__group_free(w->group.next);
        w->backend->close(w, false);
    }

    idist__life_free(w);

    return status;
}

// Calls `wrap` of the device backends in turn, until one of them finds a device on all ranks. On
// failure, closes the world and returns the error of the device backend. If the world's group has
// not failed, all ranks have the same error and run a last barrier. Otherwise the world closes at
// once.
static idist_status idist__life_wrap(idist__world *w) {
    char text[sizeof idist__me.text];
    idist_status status = IDIST_OK;
    int i;

    for (i = 0; i < w->device_backend_count && !w->device_api && status == IDIST_OK; i++)
        status = w->device_backends[i]->wrap(w);
    if (status == IDIST_OK) return IDIST_OK;
    memcpy(text, idist__me.text, sizeof text);
    idist__life_close(w, w->group.status != IDIST_OK);
    memcpy(idist__me.text, text, sizeof text);

    return status;
}

static idist_status idist__life_open(const idist__config *cfg, idist__world **out) {
    idist__world *w = NULL;
    idist_status status;

    *out = NULL;
    idist__life_watch_forks();
    if (idist__tracer_prepare) idist__tracer_prepare();
    status = idist__life_new(cfg, &w);

    if (status != IDIST_OK) {
        if (w) idist__life_free(w);
        return status;
    }

    status = idist__life_meet(w);
    if (status == IDIST_OK) status = idist__life_wrap(w);
    if (status != IDIST_OK) return status;

    idist__log_print(&w->log, IDIST_LOG_INFO, "joined a world of %d, backend %s, launcher %s%s%s",
                     w->group.size, w->backend->name, w->cfg.launcher, cfg->rank_var ? " by " : "",
                     cfg->rank_var ? cfg->rank_var : "");
    if (idist__tracer_now()) idist__tracer_now()->joined(w);
    *out = w;

    return IDIST_OK;
}

idist_status idist_open(const idist_desc *desc, idist_group **world) {
    idist__config cfg;
    idist__world *w = NULL;
    idist_status status;

    if (!world) return idist__fail(IDIST_ERR_ARG, "open: world is NULL");
    *world = NULL;
    idist__fail_begin();
    status = idist__config_fill(&cfg, desc);
    if (status == IDIST_OK) status = idist__life_open(&cfg, &w);
    if (status == IDIST_OK) *world = &w->group;
    if (status == IDIST_ERR_PEER_LOST || status == IDIST_ERR_TIMEOUT) idist__config_tell_lost(&cfg);

    return idist__fail_end(status);
}

idist_status idist_close(idist_group **world) {
    idist_status status;

    if (world && *world && (!(*world)->w || (*world)->freed))
        return idist__fail(IDIST_ERR_STATE, "close: the world was closed already");
    if (!world || !*world || *world != &(*world)->w->group)
        return idist__fail(IDIST_ERR_ARG, "close: not a world that idist_open returned");
    status = idist__life_close((*world)->w, false);
    if ((*world)->freed) *world = NULL;

    return status;
}

idist_status idist_initialize(const idist_desc *desc) {
    idist_group *world = NULL;
    idist_status status;

    idist__os_mutex_lock(&idist__life_lock);
    if (idist__world_default())
        status = idist__fail(IDIST_ERR_STATE,
                             "initialize: there is a world already; call idist_finalize first");
    else status = idist_open(desc, &world);
    if (world) __atomic_store_n(&idist__default_world, world->w, __ATOMIC_RELEASE);
    idist__os_mutex_unlock(&idist__life_lock);

    return status;
}

idist_status idist_finalize(void) {
    idist_status status;
    idist__world *w;

    idist__os_mutex_lock(&idist__life_lock);
    w = idist__world_default();
    status = w ? idist__life_close(w, false)
               : idist__fail(IDIST_ERR_STATE,
                             "finalize: there is no world; call idist_initialize first");
    idist__os_mutex_unlock(&idist__life_lock);

    return status;
}

idist_status idist_abort(idist_group *group) {
    idist_group *g = NULL;
    char cause[200];
    idist_status status;

    idist__os_mutex_lock(&idist__default_lock);
    status = idist__call_enter("abort", group, &g);

    if (g) {
        if (g == &g->w->group && g->status == IDIST_OK) g->w->life.is_cause = true;
        snprintf(cause, sizeof cause, "rank %d on %s called idist_abort", g->w->group.rank,
                 g->w->about.hostname);
        // Members would take an abort from outside the group as malformed, and close the link.
        if (g->rank >= 0) idist__group_fail(g, IDIST_ERR_ABORTED, cause);
        else status = idist__fail(IDIST_ERR_STATE, "abort: this rank is not a member of the group");
        idist__os_mutex_unlock(&g->w->lock);
    }

    idist__os_mutex_unlock(&idist__default_lock);

    return status;
}
