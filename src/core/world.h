// core/world.h: the world, its lock, and who may enter it
//
// One mutex per world guards everything in it. A caller that waits drives the backend itself; when
// several wait, one drives (w->wait.driver) and the others sleep on w->changed until it completes
// their task or stops driving. Requests that nobody waits for are driven by the progress thread
// (core/progress_thread.h).
#pragma once

#include "os/thread.h"
#include "os/memory.h"
#include "base/fail.h"
#include "base/dtype.h"
#include "core/model.h"

static idist__world *idist__default_world; // set by idist_initialize, the one global

// The number of this process; a child made by fork has none until it makes a world. The word stays
// for good, because threads may look at it whose world is being freed. NULL: there was no world
// yet, or the kernel does not tell.
static uint32_t *idist__world_process_word;

// Gives this process a number that none of its ancestors has. 0: the kernel does not tell.
static uint32_t idist__world_process(void) {
    static uint32_t count; // a child begins with that of its parent
    uint32_t *word = __atomic_load_n(&idist__world_process_word, __ATOMIC_ACQUIRE), *made;
    uint32_t number = 0, next;

    if (!word) {
        made = idist__os_memory_fork_word();
        if (__atomic_compare_exchange_n(&idist__world_process_word, &word, made, false,
                                        __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            word = made;
        else idist__os_memory_fork_word_free(made); // another thread was first
        if (!word) return 0;
    }

    next = __atomic_add_fetch(&count, 1u, __ATOMIC_RELAXED);
    if (__atomic_compare_exchange_n(word, &number, next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        return next;

    return number;
}

// A child made by fork has none of its parent's worlds. A world that was freed has process 0.
static bool idist__world_forked(const idist__world *w) {
    const uint32_t *word = __atomic_load_n(&idist__world_process_word, __ATOMIC_RELAXED);
    return word && w->process && __atomic_load_n(word, __ATOMIC_RELAXED) != w->process;
}

// Whether this thread may call into a world at all.
static idist_status idist__world_enter(const char *name, const idist__world *w) {
    if (idist__world_forked(w))
        return idist__fail(
            IDIST_ERR_STATE,
            "%s: this process was forked after idist_initialize; the world belongs to its parent",
            name);
    if (idist__me.callbacks)
        return idist__fail(IDIST_ERR_STATE, "%s: a callback must not call idist", name);

    return IDIST_OK;
}

static idist__world *idist__world_default(void) {
    idist__world *w = __atomic_load_n(&idist__default_world, __ATOMIC_ACQUIRE);
    return w && !idist__world_forked(w) ? w : NULL;
}

// A thread that polls holds the lock most of the time. Counting those who wait for it tells that
// thread when to release the lock.
static void idist__world_lock(idist__world *w) {
    if (idist__os_mutex_try_lock(&w->lock)) return;
    __atomic_fetch_add(&w->wait.lock_waiter_count, 1u, __ATOMIC_RELAXED);
    idist__os_mutex_lock(&w->lock);
    __atomic_fetch_sub(&w->wait.lock_waiter_count, 1u, __ATOMIC_RELAXED);
}

#define IDIST__YIELDS 1000 // about half a millisecond of the waiting rank's own time

// Releases the lock and the core for a moment. A thread that waits for the lock has to wake up
// first, so with one waiting we yield until it has the lock.
static void idist__world_give_way(idist__world *w) {
    uint32_t asking = __atomic_load_n(&w->wait.lock_waiter_count, __ATOMIC_RELAXED);
    int turns;

    idist__os_mutex_unlock(&w->lock);
    idist__os_thread_yield();

    for (turns = 0; asking && turns < IDIST__YIELDS; turns++) {
        if (__atomic_load_n(&w->wait.lock_waiter_count, __ATOMIC_RELAXED) < asking) break;
        idist__os_thread_yield();
    }

    idist__os_mutex_lock(&w->lock);
}

// For a thread that has moved the backend or ended tasks while another one drives. It may have
// consumed the event that the driver sleeps on, so the driver must be woken explicitly.
static void idist__world_wake_driver(idist__world *w) {
    if (w->wait.driver != IDIST__DRIVER_NONE) w->backend->wake(w);
}

IDIST__UNUSED static idist_group *idist__world_find_group(idist__world *w, uint64_t ctx) {
    idist_group *g;
    for (g = &w->group; g; g = g->next)
        if (g->ctx == ctx && g->rank >= 0) return g;
    return NULL;
}

// The op of a call that names a registered one.
static const idist__user_op *idist__world_user_op(const idist_group *g, const idist__call *call) {
    return call->u.user ? call->u.user : &g->w->user.ops[(int)call->op - IDIST_OP_USER];
}

// The dtype with the number that a fingerprint carries; IDIST_DTYPE_COUNT if there is none.
static idist_dtype idist__world_dtype(const idist__world *w, uint8_t number) {
    int user = (int)number - IDIST_DTYPE_USER;

    if (number < IDIST_DTYPE_COUNT) return (idist_dtype)number;
    if (user < 0 || user >= IDIST__USER_DTYPES || !w->user.dtypes[user].used)
        return IDIST_DTYPE_COUNT;
    return w->user.dtypes[user].dtype;
}

// What the program calls a dtype.
static const char *idist__world_dtype_name(const idist__world *w, idist_dtype dtype) {
    int user = idist__dtype_user_number(dtype);

    if (user < 0 || !w->user.dtypes[user].used) return idist_dtype_name(dtype);
    return w->user.dtypes[user].name;
}
