// core/world.h: the world, its lock, and which threads may enter it
//
// One mutex per world guards everything in the world. A caller that waits drives the backend
// itself. When several callers wait, one drives (w->wait.driver). The others sleep on w->changed
// until the driver completes their task or stops driving. The progress thread
// (core/progress_thread.h) drives the requests that no caller waits for.
#pragma once

#include "os/thread.h"
#include "os/memory.h"
#include "base/fail.h"
#include "base/dtype.h"
#include "core/model.h"

static idist__world *idist__default_world; // set by idist_initialize; the only global world

// Points to a word that holds the number of this process. In a child made by fork, the kernel sets
// the word to 0 (idist__os_memory_fork_word), and the child has no number until it makes a world.
// The word is never freed, because a thread may read it while the thread's world is being freed.
// The pointer is NULL if there was no world yet, or if the kernel does not offer such a word.
static uint32_t *idist__world_process_word;

// Returns the number of this process. At the first call, assigns a number that no ancestor has.
// Returns 0 if the kernel does not offer a word that fork clears.
static uint32_t idist__world_process(void) {
    static uint32_t count; // a child starts with its parent's count
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

// Returns true if this process is a forked child and one of its ancestors made the world. Returns
// false for a freed world, whose process is 0.
static bool idist__world_forked(const idist__world *w) {
    const uint32_t *word = __atomic_load_n(&idist__world_process_word, __ATOMIC_RELAXED);
    return word && w->process && __atomic_load_n(word, __ATOMIC_RELAXED) != w->process;
}

// Checks that this thread may call into a world: the process made the world, and no callback is
// running in this thread.
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

// Locks a world. A thread that polls holds the lock most of the time. The count of waiting threads
// tells the polling thread when to release the lock.
static void idist__world_lock(idist__world *w) {
    if (idist__os_mutex_try_lock(&w->lock)) return;
    __atomic_fetch_add(&w->wait.lock_waiter_count, 1u, __ATOMIC_RELAXED);
    idist__os_mutex_lock(&w->lock);
    __atomic_fetch_sub(&w->wait.lock_waiter_count, 1u, __ATOMIC_RELAXED);
}

#define IDIST__YIELDS 1000 // about half a millisecond of the waiting rank's own time

// Releases the lock and the core for a moment. A thread that waits for the lock has to wake up
// first. So if a thread waits, we yield until it has the lock, at most IDIST__YIELDS times.
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

// Wakes the driver, if there is one. Called by a thread that has advanced the backend or ended
// tasks, because it may have consumed the event that the driver sleeps on.
static void idist__world_wake_driver(idist__world *w) {
    if (w->wait.driver != IDIST__DRIVER_NONE) w->backend->wake(w);
}

IDIST__UNUSED static idist_group *idist__world_find_group(idist__world *w, uint64_t ctx) {
    idist_group *g;
    for (g = &w->group; g; g = g->next)
        if (g->ctx == ctx && g->rank >= 0) return g;
    return NULL;
}

// Returns the user op of a call whose op was registered by the program.
static const idist__user_op *idist__world_user_op(const idist_group *g, const idist__call *call) {
    return call->u.user ? call->u.user : &g->w->user.ops[(int)call->op - IDIST_OP_USER];
}

// Returns the dtype that has this number in fingerprints, or IDIST_DTYPE_COUNT if there is none.
static idist_dtype idist__world_dtype(const idist__world *w, uint8_t number) {
    int user = (int)number - IDIST_DTYPE_USER;

    if (number < IDIST_DTYPE_COUNT) return (idist_dtype)number;
    if (user < 0 || user >= IDIST__USER_DTYPES || !w->user.dtypes[user].used)
        return IDIST_DTYPE_COUNT;
    return w->user.dtypes[user].dtype;
}

// Returns the name of a dtype. For a user dtype, this is the name that the program chose.
static const char *idist__world_dtype_name(const idist__world *w, idist_dtype dtype) {
    int user = idist__dtype_user_number(dtype);

    if (user < 0 || !w->user.dtypes[user].used) return idist_dtype_name(dtype);
    return w->user.dtypes[user].name;
}
