// core/backend.h: the registered backends, and the hooks of a timeline
#pragma once

#include "os/thread.h"
#include "base/fail.h"
#include "base/mem.h"
#include "core/model.h"

//------------------------------------------------------------------------------
// the registered backends, and how a backend fills its table
//
// A backend registers before main, in a constructor in its header. A program may also register a
// backend at any time with idist_register_backend. New entries are added only at the head, and none
// is removed, so readers need no lock.
//------------------------------------------------------------------------------

// Constructor priorities of idist's own backends. A backend with a higher priority registers later
// and is asked earlier.
enum {
    IDIST__REGISTER_LAST_RESORT = 1000, // serves a world of 1
    IDIST__REGISTER_GENERAL = 1001,     // serves any world
    IDIST__REGISTER_SPECIAL = 1002,     // serves the worlds of one kind of launcher
    IDIST__REGISTER_XLA = 1003,         // devices of XLA
    IDIST__REGISTER_DEVICE = 1004       // CUDA devices, which are looked for first
};

typedef struct idist__backend_entry {
    const struct idist__backend_entry *next;
    const idist_backend_api *api;
} idist__backend_entry;

static idist__os_mutex idist__backend_lock = IDIST__OS_MUTEX_INIT;
static const idist__backend_entry *idist__backend_list;
// The first entries are static, so that a plugin that contains idist leaks nothing when unloaded.
static idist__backend_entry idist__backend_first_entries[8];
static size_t idist__backend_count;

// Returns the entry of the backend that was registered last. `next` leads to the earlier ones.
static const idist__backend_entry *idist__backend_first(void) {
    return __atomic_load_n(&idist__backend_list, __ATOMIC_ACQUIRE);
}

// Registers a valid table. Called with idist__backend_lock held.
static idist_status idist__backend_add(const idist_backend_api *api) {
    const idist__backend_entry *entry;
    idist__backend_entry *added;

    for (entry = idist__backend_first(); entry; entry = entry->next) {
        if (entry->api == api) return IDIST_OK;
        if (strcmp(entry->api->name, api->name) == 0)
            return idist__fail(IDIST_ERR_ARG,
                               "register_backend: a backend named \"%s\" is already registered",
                               api->name);
    }

    if (idist__backend_count < IDIST__COUNT_OF(idist__backend_first_entries))
        added = &idist__backend_first_entries[idist__backend_count];
    else added = (idist__backend_entry *)idist__mem_alloc(NULL, sizeof *added);

    if (!added) return IDIST_ERR_NO_MEMORY;
    idist__backend_count++;
    added->api = api;
    added->next = idist__backend_first();
    __atomic_store_n(&idist__backend_list, (const idist__backend_entry *)added, __ATOMIC_RELEASE);

    return IDIST_OK;
}

idist_status idist_register_backend(const idist_backend_api *backend) {
    idist_status status;

    if (!backend) return idist__fail(IDIST_ERR_ARG, "register_backend: backend is NULL");
    if (backend->abi != IDIST__BACKEND_ABI || backend->size != sizeof *backend)
        return idist__fail(IDIST_ERR_NO_BACKEND,
                           "register_backend: the backend was compiled against another version of "
                           "idist.h: rebuild all files");
    if (!backend->name || !backend->name[0])
        return idist__fail(IDIST_ERR_ARG, "register_backend: the backend has no name");

    idist__os_mutex_lock(&idist__backend_lock);
    status = idist__backend_add(backend);
    idist__os_mutex_unlock(&idist__backend_lock);

    return status;
}

// Fills the table `api` at the first call. Returns `api`. The function `fill` sets fields by name,
// because C++11 has no designated initializers. The remaining fields are zero. The field abi is
// stored last: it tells later callers, in any thread, that the table is complete.
static const idist_backend_api *idist__backend_fill(idist_backend_api *api,
                                                    void (*fill)(idist_backend_api *api)) {
    if (__atomic_load_n(&api->abi, __ATOMIC_ACQUIRE) == IDIST__BACKEND_ABI) return api;

    idist__os_mutex_lock(&idist__backend_lock);

    if (api->abi != IDIST__BACKEND_ABI) {
        api->size = sizeof *api;
        fill(api);
        __atomic_store_n(&api->abi, (uint32_t)IDIST__BACKEND_ABI, __ATOMIC_RELEASE);
    }

    idist__os_mutex_unlock(&idist__backend_lock);

    return api;
}

//------------------------------------------------------------------------------
// the hooks of a timeline
//
// trace/trace_call.h sets the table while it records. Otherwise the pointer to the table is NULL,
// and each hook costs one load.
//------------------------------------------------------------------------------

typedef struct idist__tracer {
    void (*joined)(const idist__world *w); // this thread has joined a world; opens the timeline
    void (*left)(void);
    // Runs idist__call_locked and records the call.
    idist_status (*call)(idist_group *g, const idist__call *call, const idist_opts *opts);
    // Called before and after every wait of this thread that `call` does not record. If the thread
    // waits for several calls, g and call are NULL.
    void (*begin)(const char *category, const char *name, const idist_group *g,
                  const idist__call *call);
    void (*end)(idist_status status);
    // Records that a task with a lane is done. Called in any thread, with the world's lock held.
    void (*done)(const idist__task *t);
} idist__tracer;

static const idist__tracer *idist__tracer_set;

// Sets idist__tracer_set if the environment asks for a timeline. Called before a world is joined.
static void (*idist__tracer_prepare)(void);

static const idist__tracer *idist__tracer_now(void) {
    return __atomic_load_n(&idist__tracer_set, __ATOMIC_ACQUIRE);
}

static void idist__tracer_begin(const char *category, const char *name, const idist_group *g,
                                const idist__call *call) {
    if (idist__tracer_now()) idist__tracer_now()->begin(category, name, g, call);
}

static idist_status idist__tracer_end(idist_status status) {
    if (idist__tracer_now()) idist__tracer_now()->end(status);
    return status;
}
