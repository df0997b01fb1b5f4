/* idist_calls.h - v0.2.0 - the public functions, except those that spawn - MIT licence

    Part of the implementation of idist; idist.h includes it where IDIST_IMPLEMENTATION is defined.

    Every function that idist.h declares stands here, except those of the store, the launcher and
    the spawn API. A communication call fills one idist__call and hands it to idist__call_run
    (idist_core.h); nothing here touches a connection. idist_spawn.h opens and closes worlds
    through [calls:world].

CONTENTS

      [calls:backend]     which backend serves a world
      [calls:world]       open and close a world
      [calls:get]         the getters
      [calls:collective]  the public collectives: each fills one call
      [calls:p2p]         send and receive
      [calls:request]     requests: wait and test
      [calls:plan]        calls that are prepared once and made often
      [calls:several]     calls that progress together: sendrecv, group_begin and group_end
      [calls:group]       groups
      [calls:split]       a split that is begun and waited for later
      [calls:op]          ops and dtypes of the program's own
      [calls:memory]      memory for buffers
      [calls:one]         one rank first, one rank only
*/
#ifndef IDIST_CALLS_H
#define IDIST_CALLS_H

//------------------------------------------------------------------------------
// [calls:backend]  which backend serves a world
// uses fail text base:log where model core:backend
//
// The registered backends are asked from the latest to the first. A world takes the first of those
// it asks for by name, or of all, that claims the configuration; and, to move device memory, the
// first device backend that claims it. Nothing here needs to know a backend by its name; the hints
// only improve error texts and serve programs written for torch.distributed and Ignite.
//------------------------------------------------------------------------------

// What is known of a name that may not be registered.
typedef struct idist__backend_hint {
    const char *name;
    const char *header; // that registers it, or the backend which serves instead
    const char *host;   // not NULL: this backend moves host memory when the name is asked for
    bool device;        // a device backend, which must be registered, too
} idist__backend_hint;

static const idist__backend_hint idist__backend_hints[] = {
    {"ring", "idist_ring.h, which IDIST_NO_RING leaves out", NULL, false},
    {"gloo", "idist_ring.h, which IDIST_NO_RING leaves out", "ring", false},
    {"mpi", "idist_mpi.h", NULL, false},
    {"nccl", "idist_nccl.h", "ring", true},
};

// "mpi,ring,self"
static void idist__choose_backend_names(char *names, size_t cap) {
    const idist__backend_entry *entry;

    names[0] = 0;
    for (entry = idist__backend_first(); entry; entry = entry->next)
        idist__text_append(names, cap, "%s%s", names[0] ? "," : "", entry->api->name);
}

// Names come as parts of "ring,mpi", of n bytes.
static bool idist__choose_backend_is(const char *text, size_t n, const char *word) {
    return strlen(word) == n && memcmp(text, word, n) == 0;
}

static const idist_backend_api *idist__choose_backend_find(const char *name, size_t n) {
    const idist__backend_entry *entry;

    for (entry = idist__backend_first(); entry; entry = entry->next)
        if (idist__choose_backend_is(name, n, entry->api->name)) return entry->api;
    return NULL;
}

static const idist__backend_hint *idist__choose_backend_hint_of(const char *name, size_t n) {
    size_t i;

    for (i = 0; i < IDIST__COUNT_OF(idist__backend_hints); i++)
        if (idist__choose_backend_is(name, n, idist__backend_hints[i].name))
            return &idist__backend_hints[i];
    return NULL;
}

// Whether a name can be served. *host: the backend that moves host memory then; NULL: any.
static bool idist__choose_backend_resolve(const char *name, size_t n,
                                          const idist_backend_api **host) {
    const idist_backend_api *named = idist__choose_backend_find(name, n);
    const idist__backend_hint *hint = idist__choose_backend_hint_of(name, n);

    *host = named && !named->wrap ? named : NULL;
    if (*host) return true;
    if (!hint || !hint->host) return named != NULL; // a device backend goes with any host backend
    if (hint->device && !named) return false;
    *host = idist__choose_backend_find(hint->host, strlen(hint->host));

    return *host != NULL;
}

static idist_status idist__choose_backend_unknown(const char *names, const char *name, size_t n) {
    const idist__backend_hint *hint = idist__choose_backend_hint_of(name, n);
    char known[200] = "";
    size_t i;

    if (hint && hint->host &&
        idist__choose_backend_find(name, n)) // what is missing is its host backend
        hint = idist__choose_backend_hint_of(hint->host, strlen(hint->host));
    if (hint)
        return idist__fail(IDIST_ERR_NO_BACKEND,
                           "backend \"%.*s\" needs %s: include it in the file that defines "
                           "IDIST_IMPLEMENTATION. This program has: %s",
                           (int)n, name, hint->header, names);

    for (i = 0; i < IDIST__COUNT_OF(idist__backend_hints); i++)
        idist__text_append(known, sizeof known, "%s%s", i ? ", " : "",
                           idist__backend_hints[i].name);

    return idist__fail(IDIST_ERR_NO_BACKEND,
                       "there is no backend \"%.*s\". This program has: %s. Headers of idist "
                       "provide: %s",
                       (int)n, name, names, known);
}

// A name was resolved and its host backend has claimed the configuration: sets what else the name
// asks for.
static void idist__choose_backend_settle(idist__world *w, const char *name, size_t n) {
    const idist_backend_api *named = idist__choose_backend_find(name, n);
    const char *device = named && named->wrap ? named->name : NULL;

    if (named == w->backend) return;
    if (device && !w->cfg.device_backend[0])
        idist__text_copy(w->cfg.device_backend, sizeof w->cfg.device_backend, device);
    idist__log_print(&w->log, IDIST_LOG_INFO, "backend \"%.*s\" was asked for: %s %s%s%s", (int)n,
                     name, w->backend->name, device ? "moves host memory, " : "serves in its place",
                     device ? device : "", device ? " device memory (see device_backend)" : "");
}

// Sets w->backend to the first host backend, or to `only`, if it claims the configuration.
static idist_status idist__choose_backend_claim(idist__world *w, const idist_backend_api *only,
                                                const char **why) {
    const idist__backend_entry *entry;
    idist_status status = IDIST_ERR_NO_BACKEND;

    for (entry = idist__backend_first(); entry && status == IDIST_ERR_NO_BACKEND;
         entry = entry->next) {
        if (entry->api->wrap || (only && entry->api != only)) continue;
        w->backend = entry->api;
        status = w->backend->claim(&w->cfg, why);
    }

    return status;
}

// Sets w->backend to the first that claims the configuration: of those asked for by name, or if
// none is, of all.
static idist_status idist__choose_backend_pick(idist__world *w) {
    const char *at = w->cfg.backends, *why = "";
    idist_status status = IDIST_ERR_NO_BACKEND;
    const idist_backend_api *host;

    if (!at[0]) status = idist__choose_backend_claim(w, NULL, &why);

    while (*at && status == IDIST_ERR_NO_BACKEND) {
        size_t n = strcspn(at, ",");

        if (!idist__choose_backend_resolve(at, n, &host))
            return idist__choose_backend_unknown(w->backends, at, n);
        status = idist__choose_backend_claim(w, host, &why);
        if (status == IDIST_OK) idist__choose_backend_settle(w, at, n);
        at += n + (at[n] == ',');
    }

    if (status == IDIST_OK) return idist__where_check_lone(&w->cfg);
    if (status != IDIST_ERR_NO_BACKEND) return status;

    return idist__fail(IDIST_ERR_NO_BACKEND, "no backend for a world of %d among %s: %s",
                       w->cfg.world_size, w->backends, why);
}

// Finds the device backend that the program has and that claims the configuration, or why there is
// none.
static idist_status idist__choose_backend_find_device(idist__world *w) {
    const char *why = "this program has no device backend: include idist_nccl.h in the file that "
                      "defines IDIST_IMPLEMENTATION";
    const idist__backend_entry *entry;
    idist_status status = IDIST_ERR_NO_BACKEND;

    for (entry = idist__backend_first(); entry && status == IDIST_ERR_NO_BACKEND;
         entry = entry->next)
        if (entry->api->wrap) {
            status = entry->api->claim(&w->cfg, &why);
            if (status == IDIST_OK) w->wrap = entry->api->wrap;
        }

    if (status != IDIST_ERR_NO_BACKEND) return status;
    idist__text_copy(w->no_device, sizeof w->no_device, why);

    return IDIST_OK;
}

//------------------------------------------------------------------------------
// [calls:world]  open and close a world
// uses clock cpu os:thread mutex cond socket process fail text mem base:window
// uses base:log launch:env pmi draw config kind model core:backend core:world
// uses tracer core:task core:ended core:group core:wait core:call backend
//
//     idist__life_open
//       idist__life_new           allocate; choose a backend
//       open                       the ranks meet
//       idist__life_count_nodes   local and node ranks
//       idist__life_settle_in     how this rank waits
//       group_open                 the group of all ranks
//       wrap                       the device backend, if the program has one
//
// idist__life_close undoes it in the opposite order, after a last barrier.
//------------------------------------------------------------------------------

static idist__os_mutex idist__life_lock = IDIST__OS_MUTEX_INIT; // initialize and finalize

// The default world stays while it is held.
static idist__os_mutex idist__default_lock = IDIST__OS_MUTEX_INIT;

// For a child made by fork. Another thread of its parent may have held these locks, or been in
// the middle of changing a list of handles, so the lists begin anew. What the other locks guard
// changes by the store of one pointer.
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

// From the first world on, every fork of the program prepares its child. Without the memory for
// that, children go without.
static void idist__life_watch_forks(void) {
    static bool watches;

    idist__os_mutex_lock(&idist__default_lock);
    if (!watches) watches = idist__os_process_on_fork(idist__life_after_fork);
    idist__os_mutex_unlock(&idist__default_lock);
}

// Local and node ranks follow from the table of hosts, so that uneven and cyclic placements come
// out right.
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

    if (w->abandoned) {
        idist__group_abandon(&w->group);
        return;
    }

    while (w->freed_groups) {
        idist_group *g = w->freed_groups;
        w->freed_groups = g->next;
        idist__ended_keep(&idist__ended_groups, g);
    }

    while (w->all_tasks) {
        idist__task *t = w->all_tasks;
        w->all_tasks = t->older;
        idist__mem_free(&mem, t);
    }

    idist__mem_free_list(&mem, w->group.planned);
    idist__mem_free(&mem, w->group.ranks);
    idist__mem_free(&mem, w->group.impl);
    idist__mem_free(&mem, w->nodes);
    idist__os_cond_destroy(&w->changed);
    idist__os_cond_destroy(&w->work);
    idist__os_mutex_destroy(&w->lock);
    memset(w, 0, sizeof *w); // with the secret
    idist__ended_keep(&idist__ended_worlds, &w->group);
}

// The group of all ranks, and the tables by rank.
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

static uint64_t idist__world_serial; // of the world that was made last

// On failure *out is NULL or a world that idist__life_free frees.
static idist_status idist__life_new(const idist__config *cfg, idist__world **out) {
    // A world begins with its group, so its memory comes from the list of ended worlds.
    idist__world *w = (idist__world *)(void *)idist__ended_reuse(&idist__ended_worlds,
                                                                 IDIST__ENDED_WORLDS, sizeof *w);
    idist_status status;

    *out = w;
    if (!w) return IDIST_ERR_NO_MEMORY;
    w->serial = __atomic_add_fetch(&idist__world_serial, (uint64_t)1, __ATOMIC_RELAXED);
    w->cfg = *cfg;
    idist__os_mutex_init(&w->lock);
    idist__os_cond_init(&w->changed);
    idist__os_cond_init(&w->work);
    if (!idist__os_socket_host_name(w->hostname, sizeof w->hostname))
        idist__text_copy(w->hostname, sizeof w->hostname, "localhost");

    status = idist__log_init(&w->log, &cfg->logger);
    idist__choose_backend_names(w->backends, sizeof w->backends);
    if (status == IDIST_OK) status = idist__choose_backend_find_device(w);
    if (status == IDIST_OK) status = idist__choose_backend_pick(w);
    if (status == IDIST_OK && w->cfg.rank == IDIST__RANK_DRAWN) status = idist__draw_rank(&w->cfg);
    if (status != IDIST_OK) return status;
    snprintf(w->log.who, sizeof w->log.who, "rank %d/%d %s", w->cfg.rank, w->cfg.world_size,
             w->hostname);

    return idist__life_new_group(w);
}

// Where this rank runs, and how it waits. Polling occupies a core, so it is bounded; with
// more ranks than cores it would take the core from the rank that everybody waits for. Such ranks
// begin evenly spread, because the kernel would need a good part of a second to see that one core
// has three of them and another has one.
static void idist__life_settle_in(idist__world *w) {
    const idist__rank_info *me = &w->nodes[w->group.rank];
    int own = idist__os_cpu_count(), ncores = w->ncores ? w->ncores : own;
    int rank = me->local_rank, size = me->local_size;
    bool oversubscribed;

    if (w->sharing_size > size) {
        rank = w->sharing_rank;
        size = w->sharing_size;
        ncores = own;
    }

    oversubscribed = size > ncores;
    w->spin_ns = w->spin_budget_ns = oversubscribed ? 0 : IDIST__SPIN_NS;
    if (own < 2 || !(w->cfg.bind || oversubscribed)) return;
    if (idist__os_cpu_bind(rank % own, w->cfg.bind)) return;
    idist__log_print(&w->log, w->cfg.bind ? IDIST_LOG_WARN : IDIST_LOG_INFO,
                     "could not bind to a processor: %s", strerror(errno));
}

// Clears the default world, so that no new call can enter it. Waits for idist_abort, which may be
// running in any thread.
static void idist__life_retire(idist__world *w) {
    idist__os_mutex_lock(&idist__default_lock);
    if (w == idist__world_default())
        __atomic_store_n(&idist__default_world, (idist__world *)NULL, __ATOMIC_RELEASE);
    idist__os_mutex_unlock(&idist__default_lock);
}

// Whether a thread may begin to close the world, which is locked. What a request or an open
// idist_group_begin refers to would be freed.
static idist_status idist__life_check_unused(const idist__world *w) {
    const idist_group *g;

    if (w->deferred_count)
        return idist__fail(IDIST_ERR_STATE,
                           "finalize: an idist_group_begin of another thread is open");
    for (g = &w->group; g; g = g->next)
        if (g->open_request_count)
            return idist__fail(IDIST_ERR_STATE,
                               "finalize: requests are still open; wait for them first");

    return IDIST_OK;
}

// The last barrier. A rank that finalizes while others are in another call is a mismatch, and both
// are told.
static idist_status idist__life_last_barrier(idist__world *w) {
    idist__call c;
    idist_opts o;

    memset(&o, 0, sizeof o);
    idist__call_init(&c, IDIST__BARRIER, NULL, NULL, 0, IDIST_U8);
    c.label = IDIST__FINALIZE;
    return idist__call_traced(&w->group, &c, &o);
}

// Afterwards nothing touches the caller's buffers. If the world has failed, so do the groups of
// these calls: the other members would wait for this rank. All other groups go on until a call
// needs this rank, see `close` of idist_backend_api.
static void idist__life_cancel_tasks(idist__world *w) {
    while (w->tasks) {
        idist__task *t = w->tasks;
        idist_group *g = t->group;

        w->backend->cancel(t);
        idist__task_complete(t, IDIST_ERR_ABORTED, "the world was closed");
        if (w->group.status != IDIST_OK && !g->inner)
            idist__group_fail(g, w->group.status, w->group.cause);
    }
}

// How long threads may take to come back from calls that were ended.
enum { IDIST__LEAVE_MS = 5000 };

// Whether no other thread is inside a call.
static bool idist__life_is_left(const idist__world *w) {
    return !w->blocked_count && !w->making_count && w->driver == IDIST__DRIVER_NONE &&
           !__atomic_load_n(&w->lock_waiter_count, __ATOMIC_RELAXED);
}

// Ends the calls of other threads and waits until the threads have left them: what they use is
// freed next. A thread that waited for the lock may begin a call meanwhile, which is ended as well.
// False: one has not left.
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

// Frees the world, unless a thread is still inside a call: then nothing is freed that it uses.
static void idist__life_end(idist__world *w) {
    idist_group *g;

    if (!w->abandoned) {
        if (w->device_api) w->device_api->end_calls(w);
        while (w->group.next) idist__group_free(w->group.next);
        w->backend->group_close(&w->group);
        w->backend->close(w, !w->leaves);
    }

    if (idist__tracer_now()) idist__tracer_now()->left();
    idist__log_print(&w->log, IDIST_LOG_INFO, "left the world");
    if (w->abandoned)
        idist__log_print(
            &w->log, IDIST_LOG_WARN,
            "a thread has not come back from a call: the closed world stays in memory");
    for (g = w->group.next; g; g = g->next) idist__group_abandon(g); // the backend has them still
    w->group.next = NULL;
    idist__life_free(w);
}

static bool idist__life_is_settled(void *arg) { return !((const idist__world *)arg)->let_go_count; }

// force: a worker that failed, with requests open and without the last barrier. For the others it
// is a lost rank. An idist_group_begin of this thread ends with it; one of another thread still
// finds its tasks.
static idist_status idist__life_close(idist__world *w, bool force) {
    idist_status status = IDIST_OK;
    bool has_thread;

    if (idist__world_enter("finalize", w) != IDIST_OK) return IDIST_ERR_STATE;
    if (idist__me.group_depth && !force)
        return idist__fail(IDIST_ERR_STATE,
                           "finalize: inside idist_group_begin; call idist_group_end first");
    if (force) idist__call_forget(w);
    idist__world_lock(w);
    if (w->closing) status = idist__call_check_open(w, "finalize");
    else if (!force) status = idist__life_check_unused(w);

    if (status != IDIST_OK) {
        idist__os_mutex_unlock(&w->lock);
        return status;
    }

    idist__fail_begin();
    w->closing = true;
    if (!force) idist__wait_until(w, idist__life_is_settled, w); // requests that were let go
    if (!force) status = idist__life_last_barrier(w);

    w->thread_stops = true;
    has_thread = w->thread_running;
    idist__os_cond_broadcast(&w->work);
    w->backend->wake(w);
    idist__os_mutex_unlock(&w->lock);
    idist__life_retire(w);
    if (has_thread) idist__os_thread_join(w->thread);

    idist__world_lock(w);
    w->abandoned = !idist__life_end_calls(w) || w->deferred_count;
    w->leaves = status != IDIST_OK || force;
    idist__os_mutex_unlock(&w->lock);

    idist__life_end(w);

    return idist__fail_end(status);
}

// The ranks meet. On failure the world is freed.
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

// Lets the device backend, if there is one, put itself in front. On failure the world is closed: by
// a last barrier where all ranks have the same error, else at once. The error is that of the
// device.
static idist_status idist__life_wrap(idist__world *w) {
    char text[sizeof idist__me.text];
    idist_status status = w->wrap ? w->wrap(w) : IDIST_OK;

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
    status = idist__launch_config(&cfg, desc);
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
        status =
            idist__fail(IDIST_ERR_STATE, "initialize: the world exists already; finalize it first");
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
        if (g == &g->w->group && g->status == IDIST_OK) g->w->is_cause = true;
        snprintf(cause, sizeof cause, "rank %d on %s called idist_abort", g->w->group.rank,
                 g->w->hostname);
        // Members would take such a frame from a rank outside the group for malformed, and drop it.
        if (g->rank >= 0) idist__group_fail(g, IDIST_ERR_ABORTED, cause);
        else status = idist__fail(IDIST_ERR_STATE, "abort: this rank is not a member of the group");
        idist__os_mutex_unlock(&g->w->lock);
    }

    idist__os_mutex_unlock(&idist__default_lock);

    return status;
}

//------------------------------------------------------------------------------
// [calls:get]  the getters
// uses limit cpu socket fail text interface launch:env detect model core:world
// uses backend
//
// Without a world they answer as in a world of 1; none of them fails.
//------------------------------------------------------------------------------

static const idist__rank_info *idist__get_own_info(void) {
    idist__world *w = idist__world_default();
    return w ? &w->nodes[w->group.rank] : NULL;
}

bool idist_is_initialized(void) { return idist__world_default() != NULL; }

int idist_group_rank(const idist_group *group) {
    const idist__world *w = group ? NULL : idist__world_default();

    if (group) return group->rank;
    return w ? w->group.rank : 0;
}

int idist_group_size(const idist_group *group) {
    const idist__world *w = group ? NULL : idist__world_default();

    if (group) return group->size;
    return w ? w->group.size : 1;
}

int idist_get_rank(void) { return idist_group_rank(NULL); }
int idist_get_world_size(void) { return idist_group_size(NULL); }

int idist_get_local_rank(void) {
    const idist__rank_info *own = idist__get_own_info();
    return own ? own->local_rank : 0;
}

int idist_get_nproc_per_node(void) {
    const idist__rank_info *own = idist__get_own_info();
    return own ? own->local_size : 1;
}

int idist_get_nnodes(void) {
    const idist__world *w = idist__world_default();
    return w ? w->nnodes : 1;
}

int idist_get_node_rank(void) {
    const idist__rank_info *own = idist__get_own_info();
    return own ? own->node_rank : 0;
}

const char *idist_backend(void) {
    const idist__world *w = idist__world_default();
    return w ? w->backend->name : "self";
}

const char *idist_device(void) {
    const idist__world *w = idist__world_default();
    return w && w->device ? w->device_name : "cpu";
}

const char *idist_device_backend(void) {
    const idist__world *w = idist__world_default();
    return w && w->device ? w->device_backend : "none";
}

const char *idist_launcher(void) {
    idist__config c;

    if (idist__world_default()) return idist__world_default()->cfg.launcher;
    idist__fail_begin();
    memset(&c, 0, sizeof c);
    c.launcher = "none";
    idist__launch_detect(&c); // idist_initialize will say what is wrong with it
    idist__fail_end(IDIST_OK);

    return c.launcher;
}

const char *idist_hostname(void) {
    idist__world *w = idist__world_default();

    if (w) return w->hostname;
    if (!idist__os_socket_host_name(idist__me.hostname, sizeof idist__me.hostname))
        idist__text_copy(idist__me.hostname, sizeof idist__me.hostname, "localhost");
    return idist__me.hostname;
}

const char *idist_available_backends(void) {
    idist__choose_backend_names(idist__me.names, sizeof idist__me.names);
    return idist__me.names;
}

static void idist__get_append_limit(char *text, size_t capacity, const char *name, long long limit,
                                    const char *unit) {
    if (limit < 0) idist__text_append(text, capacity, "%s: unlimited\n", name);
    else idist__text_append(text, capacity, "%s: %lld%s\n", name, limit, unit);
}

// Appends what the program and this host have to offer, whether the world uses it or not.
static void idist__get_append_host(char *text, size_t capacity) {
    long long locked_nbytes = idist__os_limit_locked_nbytes();
    char names[sizeof idist__me.names];
    int count;

    idist__choose_backend_names(names, sizeof names);
    idist__text_append(text, capacity, "available backends: %s\ncores: %d\n", names,
                       idist__os_cpu_count());
    idist__get_append_limit(text, capacity, "descriptors", idist__os_limit_descriptors(), "");
    idist__get_append_limit(text, capacity, "processes", idist__os_limit_processes(), "");
    idist__get_append_limit(text, capacity, "locked memory",
                            locked_nbytes < 0 ? -1 : locked_nbytes / 1024, " KiB");
    idist__text_append(text, capacity, "interfaces: ");
    count = idist__interface_list(text, capacity - 1); // and the end of the line
    if (count <= 0)
        idist__text_append(text, capacity, "%s", count < 0 ? "cannot be listed" : "none");
    idist__text_append(text, capacity, "\n");
}

const char *idist_show_config(void) {
    idist__world *w = idist__world_default();
    char *buf = idist__me.config;
    size_t cap = sizeof idist__me.config;

    snprintf(buf, cap, "backend: %s\ndevice: %s\ndevice backend: %s\nhostname: %s\n",
             idist_backend(), idist_device(), idist_device_backend(), w ? w->hostname : "-");
    idist__text_append(buf, cap,
                       "world size: %d\nrank: %d\nlocal rank: %d\nnum processes per node: %d\nnum "
                       "nodes: %d\nnode rank: %d\n",
                       idist_get_world_size(), idist_get_rank(), idist_get_local_rank(),
                       idist_get_nproc_per_node(), idist_get_nnodes(), idist_get_node_rank());
    idist__text_append(buf, cap, "launcher: %s", idist_launcher());
    if (w && w->cfg.rank_var)
        idist__text_append(buf, cap, " by %s and %s", w->cfg.rank_var, w->cfg.size_var);
    else if (w && w->cfg.size_var) idist__text_append(buf, cap, " by %s", w->cfg.size_var);
    if (w && w->cfg.rank_drawn) idist__text_append(buf, cap, ", rank drawn");
    idist__text_append(buf, cap, "\n");
    if (w)
        idist__text_append(buf, cap, "rendezvous: %s\ntimeout: %d ms\n",
                           w->cfg.where[0] ? w->cfg.where : "none", w->cfg.timeout_ms);
    if (w && w->advertised[0]) idist__text_append(buf, cap, "advertising %s\n", w->advertised);
    if (w && w->network[0]) idist__text_append(buf, cap, "network: %s\n", w->network);
    if (w && w->sharing[0]) idist__text_append(buf, cap, "on this host: %s\n", w->sharing);
    idist__get_append_host(buf, cap);

    return buf;
}

//------------------------------------------------------------------------------
// [calls:collective]  the public collectives: each fills one call
// uses mutex os:memory fail base:type hash kind model fingerprint core:group
// uses check core:call core:message world get
//------------------------------------------------------------------------------

// All but the v-forms. op is IDIST_SUM where nothing is reduced; root is -1 where there is none;
// label is the public call this is part of, or the kind itself.
static idist_status idist__collective_run(idist__kind kind, idist__kind label, const void *send,
                                          void *recv, size_t count, idist_dtype dtype, idist_op op,
                                          int root, const idist_opts *opts) {
    idist__call c;

    idist__call_init(&c, kind, send, recv, count, dtype);
    c.label = label;
    c.op = op;
    c.root = root;
    return idist__call_run(&c, opts);
}

idist_status idist_all_reduce(const void *send, void *recv, size_t count, idist_dtype dtype,
                              idist_op op, const idist_opts *opts) {
    return idist__collective_run(IDIST__ALL_REDUCE, IDIST__ALL_REDUCE, send, recv, count, dtype, op,
                                 -1, opts);
}

idist_status idist_reduce(const void *send, void *recv, size_t count, idist_dtype dtype,
                          idist_op op, int root, const idist_opts *opts) {
    return idist__collective_run(IDIST__REDUCE, IDIST__REDUCE, send, recv, count, dtype, op, root,
                                 opts);
}

idist_status idist_reduce_scatter(const void *send, void *recv, size_t count, idist_dtype dtype,
                                  idist_op op, const idist_opts *opts) {
    return idist__collective_run(IDIST__REDUCE_SCATTER, IDIST__REDUCE_SCATTER, send, recv, count,
                                 dtype, op, -1, opts);
}

idist_status idist_scan(const void *send, void *recv, size_t count, idist_dtype dtype, idist_op op,
                        const idist_opts *opts) {
    return idist__collective_run(IDIST__SCAN, IDIST__SCAN, send, recv, count, dtype, op, -1, opts);
}

idist_status idist_exscan(const void *send, void *recv, size_t count, idist_dtype dtype,
                          idist_op op, const idist_opts *opts) {
    return idist__collective_run(IDIST__EXSCAN, IDIST__EXSCAN, send, recv, count, dtype, op, -1,
                                 opts);
}

idist_status idist_broadcast(void *buf, size_t count, idist_dtype dtype, int root,
                             const idist_opts *opts) {
    return idist__collective_run(IDIST__BROADCAST, IDIST__BROADCAST, NULL, buf, count, dtype,
                                 IDIST_SUM, root, opts);
}

idist_status idist_barrier(const idist_opts *opts) {
    return idist__collective_run(IDIST__BARRIER, IDIST__BARRIER, NULL, NULL, 0, IDIST_U8, IDIST_SUM,
                                 -1, opts);
}

idist_status idist_all_gather(const void *send, void *recv, size_t count, idist_dtype dtype,
                              const idist_opts *opts) {
    return idist__collective_run(IDIST__ALL_GATHER, IDIST__ALL_GATHER, send, recv, count, dtype,
                                 IDIST_SUM, -1, opts);
}

idist_status idist_gather(const void *send, void *recv, size_t count, idist_dtype dtype, int root,
                          const idist_opts *opts) {
    return idist__collective_run(IDIST__GATHER, IDIST__GATHER, send, recv, count, dtype, IDIST_SUM,
                                 root, opts);
}

idist_status idist_scatter(const void *send, void *recv, size_t count, idist_dtype dtype, int root,
                           const idist_opts *opts) {
    return idist__collective_run(IDIST__SCATTER, IDIST__SCATTER, send, recv, count, dtype,
                                 IDIST_SUM, root, opts);
}

idist_status idist_all_to_all(const void *send, void *recv, size_t count, idist_dtype dtype,
                              const idist_opts *opts) {
    return idist__collective_run(IDIST__ALL_TO_ALL, IDIST__ALL_TO_ALL, send, recv, count, dtype,
                                 IDIST_SUM, -1, opts);
}

// An all_reduce in place of a buffer that is in parts. *taken false: this rank cannot make the call
// like that, and has not begun it.
IDIST__UNUSED static idist_status
idist__collective_all_reduce_parts(const idist__part *parts, int part_count, idist_dtype dtype,
                                   idist_op op, const idist_opts *opts, bool *taken) {
    idist_group *g;
    idist__call c;

    *taken = false;
    if (idist__call_enter("all_reduce", opts->group, &g) != IDIST_OK) return IDIST_OK;

    idist__call_init(&c, IDIST__ALL_REDUCE, parts[0].data, parts[0].data, parts[part_count - 1].end,
                     dtype);
    c.op = op;
    c.parts = parts;
    c.part_count = part_count;
    if (g->rank >= 0 && g->status == IDIST_OK && g->w->backend->takes_parts)
        *taken = g->w->backend->takes_parts(g, &c);
    idist__os_mutex_unlock(&g->w->lock);

    return *taken ? idist__call_run(&c, opts) : IDIST_OK;
}

// Counts that must agree on all ranks go into the fingerprint as a hash. Counts that concern two
// ranks are checked against the length of the message between them.
idist_status idist_all_gatherv(const void *send, size_t sendcount, void *recv,
                               const size_t *recvcounts, const size_t *recvdispls,
                               idist_dtype dtype, const idist_opts *opts) {
    idist__call c;
    int n = idist_group_size(opts ? opts->group : NULL);

    idist__call_init(&c, IDIST__ALL_GATHERV, send, recv, sendcount, dtype);
    c.recvcounts = recvcounts;
    c.recvdispls = recvdispls;
    c.check = recvcounts ? idist__hash(recvcounts, sizeof *recvcounts * (size_t)n) : 0;
    return idist__call_run(&c, opts);
}

idist_status idist_gatherv(const void *send, size_t sendcount, void *recv, const size_t *recvcounts,
                           const size_t *recvdispls, idist_dtype dtype, int root,
                           const idist_opts *opts) {
    idist__call c;

    idist__call_init(&c, IDIST__GATHERV, send, recv, sendcount, dtype);
    c.recvcounts = recvcounts;
    c.recvdispls = recvdispls;
    c.root = root;
    c.check = 0;
    return idist__call_run(&c, opts);
}

idist_status idist_scatterv(const void *send, const size_t *sendcounts, const size_t *senddispls,
                            void *recv, size_t recvcount, idist_dtype dtype, int root,
                            const idist_opts *opts) {
    idist__call c;

    idist__call_init(&c, IDIST__SCATTERV, send, recv, recvcount, dtype);
    c.sendcounts = sendcounts;
    c.senddispls = senddispls;
    c.root = root;
    c.check = 0;
    return idist__call_run(&c, opts);
}

idist_status idist_all_to_allv(const void *send, const size_t *sendcounts, const size_t *senddispls,
                               void *recv, const size_t *recvcounts, const size_t *recvdispls,
                               idist_dtype dtype, const idist_opts *opts) {
    idist__call c;

    bool in_place = send == recv && (send || !sendcounts);

    idist__call_init(&c, IDIST__ALL_TO_ALLV, send, recv, 0, dtype);
    c.sendcounts = in_place ? recvcounts : sendcounts;
    c.senddispls = in_place ? recvdispls : senddispls;
    c.recvcounts = recvcounts;
    c.recvdispls = recvdispls;
    return idist__call_run(&c, opts);
}

// The blocks of the send buffer are what sendcounts says.
idist_status idist_reduce_scatterv(const void *send, void *recv, const size_t *recvcounts,
                                   idist_dtype dtype, idist_op op, const idist_opts *opts) {
    idist__call c;
    int n = idist_group_size(opts ? opts->group : NULL);
    int rank = idist_group_rank(opts ? opts->group : NULL);
    size_t count = recvcounts && rank >= 0 ? recvcounts[rank] : 0;

    idist__call_init(&c, IDIST__REDUCE_SCATTERV, send, recv, count, dtype);
    c.sendcounts = recvcounts;
    c.op = op;
    c.check = recvcounts ? idist__hash(recvcounts, sizeof *recvcounts * (size_t)n) : 0;
    return idist__call_run(&c, opts);
}

// A rank whose buffer is too small takes part all the same, with a buffer of its own, so that the
// others are not held up. Without memory for that it aborts the group. *spare is NULL if the
// caller's buffer is large enough; the caller frees it.
static idist_status idist__collective_spare(const char *name, uint64_t nbytes, size_t capacity,
                                            const idist_opts *opts, void **spare) {
    *spare = NULL;
    if (nbytes <= capacity) return IDIST_OK;
    *spare = malloc((size_t)nbytes);
    if (*spare) return IDIST_OK;
    idist_abort(opts ? opts->group : NULL);

    return idist__fail(IDIST_ERR_NO_MEMORY, "%s: no memory for %llu bytes", name,
                       (unsigned long long)nbytes);
}

static idist_status idist__collective_fits(const char *name, uint64_t nbytes, size_t capacity) {
    if (nbytes <= capacity) return IDIST_OK;
    return idist__fail(IDIST_ERR_TRUNCATED, "%s: %llu bytes arrived, the buffer has %zu", name,
                       (unsigned long long)nbytes, capacity);
}

idist_status idist_broadcast_bytes(void *buf, size_t capacity, size_t *nbytes, int root,
                                   const idist_opts *opts) {
    const char *name = "broadcast_bytes";
    bool is_root = idist_group_rank(opts ? opts->group : NULL) == root;
    uint64_t n = 0;
    void *spare;
    idist_status status = idist__check_blocking(name, opts);

    if (status != IDIST_OK) return status;
    if (!nbytes || (capacity && !buf))
        return idist__fail(IDIST_ERR_ARG, "%s: buf or nbytes is NULL", name);
    if (is_root && *nbytes > capacity)
        return idist__fail(IDIST_ERR_ARG, "%s: root says %zu bytes in a buffer of %zu", name,
                           *nbytes, capacity);

    if (is_root) n = *nbytes;
    status = idist__collective_run(IDIST__BROADCAST, IDIST__BROADCAST_BYTES, NULL, &n, 1, IDIST_U64,
                                   IDIST_SUM, root, opts);
    if (status == IDIST_OK) status = idist__collective_spare(name, n, capacity, opts, &spare);
    if (status != IDIST_OK) return status;

    status = idist__collective_run(IDIST__BROADCAST, IDIST__BROADCAST_BYTES, NULL,
                                   spare ? spare : buf, (size_t)n, IDIST_U8, IDIST_SUM, root, opts);
    free(spare);
    if (status != IDIST_OK) return status;
    *nbytes = (size_t)n;

    return idist__collective_fits(name, n, capacity);
}

idist_status idist_all_gather_bytes(const void *send, size_t nbytes, void *buf, size_t capacity,
                                    size_t *sizes, const idist_opts *opts) {
    const char *name = "all_gather_bytes";
    const char *from = (const char *)send, *to = (const char *)buf;
    int i, n = idist_group_size(opts ? opts->group : NULL);
    size_t total = 0, own = nbytes;
    void *spare;
    idist__call c;
    idist_status status = idist__check_blocking(name, opts);

    if (status != IDIST_OK) return status;
    if (!sizes || (capacity && !buf) || (nbytes && !send))
        return idist__fail(IDIST_ERR_ARG, "%s: send, buf or sizes is NULL", name);
    if (nbytes && capacity && from < to + capacity && to < from + nbytes)
        return idist__fail(IDIST_ERR_ARG, "%s: send and buf overlap; there is no in-place form",
                           name);

    status = idist__collective_run(IDIST__ALL_GATHER, IDIST__ALL_GATHER_BYTES, &own, sizes,
                                   sizeof own, IDIST_U8, IDIST_SUM, -1, opts);
    if (status != IDIST_OK) return status;
    for (i = 0; i < n; i++) total += sizes[i];
    status = idist__collective_spare(name, total, capacity, opts, &spare);
    if (status != IDIST_OK) return status;

    idist__call_init(&c, IDIST__ALL_GATHERV, send, spare ? spare : buf, nbytes, IDIST_U8);
    c.label = IDIST__ALL_GATHER_BYTES;
    c.recvcounts = sizes;
    c.check = idist__hash(sizes, sizeof *sizes * (size_t)n);
    status = idist__call_run(&c, opts);
    free(spare);
    if (status != IDIST_OK) return status;

    return idist__collective_fits(name, total, capacity);
}

// Memory for the result of a call that the other ranks are in already: without it, the group fails.
static idist_status idist__collective_alloc(const char *name, uint64_t nbytes,
                                            const idist_opts *opts, void **recv) {
    idist_group *g = NULL;
    size_t padded = nbytes < SIZE_MAX / 2 ? (size_t)((nbytes + 1 + 63) & ~(uint64_t)63) : 0;

    *recv = padded ? idist__os_memory_aligned(64, padded) : NULL;

    if (*recv) {
        ((char *)*recv)[nbytes] = 0;
        return IDIST_OK;
    }

    if (idist__call_enter(name, opts ? opts->group : NULL, &g) == IDIST_OK) {
        idist__group_fail_memory(g);
        idist__os_mutex_unlock(&g->w->lock);
    }

    return idist__fail(IDIST_ERR_NO_MEMORY, "%s: no memory for %llu bytes", name,
                       (unsigned long long)nbytes);
}

// The result of a failed call is given back.
static idist_status idist__collective_alloc_end(idist_status status, void **recv) {
    if (status == IDIST_OK) return IDIST_OK;
    idist__os_memory_free_aligned(*recv);
    *recv = NULL;

    return status;
}

// What root tells about its buffer. The dtype is one that the others can name if they have created
// it.
typedef struct idist__collective_head {
    uint64_t count, nbytes, check;
    uint64_t dtype;
} idist__collective_head;

// Checks what this rank wants to send in a call that allocates its result, and describes it.
static idist_status idist__collective_head_of(idist__kind label, const void *send, size_t count,
                                              idist_dtype dtype, const idist_opts *opts,
                                              idist__collective_head *head) {
    const char *name = idist__kind_names[label];
    idist_group *g = NULL;
    idist__call c;
    idist_status status;

    if (count && !send)
        return idist__fail(IDIST_ERR_ARG, "%s: send is NULL and count is not 0", name);
    status = idist__call_enter(name, opts ? opts->group : NULL, &g);

    if (status != IDIST_OK) return status;
    idist__call_init(&c, IDIST__BROADCAST, send, NULL, count, dtype);
    c.label = label;
    c.root = g->rank;
    c.recv = (void *)(uintptr_t)send; // a broadcast has one buffer
    status = idist__check_call(g, &c);
    head->count = count;
    head->nbytes = count * idist_dtype_size(dtype);
    head->dtype = (uint8_t)dtype;
    head->check = idist__fingerprint_tagged(g->w, &c, count);
    idist__os_mutex_unlock(&g->w->lock);

    return status;
}

// The dtype of this rank that root means.
static idist_dtype idist__collective_dtype(const idist__collective_head *head,
                                           const idist_opts *opts) {
    idist_dtype dtype = IDIST_DTYPE_COUNT;
    idist_group *g = NULL;
    idist__fingerprint sent;

    memset(&sent, 0, sizeof sent);
    sent.dtype = (uint8_t)head->dtype;
    sent.check = head->check;
    if (idist__call_enter("broadcast_alloc", opts ? opts->group : NULL, &g) != IDIST_OK)
        return dtype;
    dtype = idist__matching_dtype(g->w, &sent);
    idist__os_mutex_unlock(&g->w->lock);

    return dtype;
}

idist_status idist_broadcast_alloc(const void *send, size_t count, idist_dtype dtype, int root,
                                   void **recv, size_t *recvcount, idist_dtype *recvdtype,
                                   const idist_opts *opts) {
    const idist__kind label = IDIST__BROADCAST_ALLOC;
    bool is_root = idist_group_rank(opts ? opts->group : NULL) == root;
    idist__collective_head head;
    idist_status status;

    if (recv) *recv = NULL;
    if (!recv || !recvcount)
        return idist__fail(IDIST_ERR_ARG, "broadcast_alloc: recv or recvcount is NULL");
    *recvcount = 0;
    memset(&head, 0, sizeof head);
    status = idist__check_blocking("broadcast_alloc", opts);
    if (status == IDIST_OK && is_root)
        status = idist__collective_head_of(label, send, count, dtype, opts, &head);
    if (status == IDIST_OK)
        status = idist__collective_run(IDIST__BROADCAST, label, NULL, &head, 4, IDIST_U64,
                                       IDIST_SUM, root, opts);
    if (status == IDIST_OK)
        status = idist__collective_alloc("broadcast_alloc", head.nbytes, opts, recv);
    if (status != IDIST_OK) return status;

    if (is_root && head.nbytes) memcpy(*recv, send, (size_t)head.nbytes);
    status = idist__collective_run(IDIST__BROADCAST, label, NULL, *recv, (size_t)head.nbytes,
                                   IDIST_U8, IDIST_SUM, root, opts);
    if (status != IDIST_OK) return idist__collective_alloc_end(status, recv);
    *recvcount = (size_t)head.count;
    if (recvdtype) *recvdtype = idist__collective_dtype(&head, opts);

    return IDIST_OK;
}

idist_status idist_all_gather_alloc(const void *send, size_t count, idist_dtype dtype, void **recv,
                                    size_t *recvcounts, const idist_opts *opts) {
    const char *name = "all_gather_alloc";
    int i, n = idist_group_size(opts ? opts->group : NULL);
    size_t total = 0, own = count, size = idist_dtype_size(dtype);
    idist__collective_head unused;
    idist__call c;
    idist_status status;

    if (recv) *recv = NULL;
    if (!recv || !recvcounts)
        return idist__fail(IDIST_ERR_ARG, "%s: recv or recvcounts is NULL", name);
    status = idist__check_blocking(name, opts);
    if (status == IDIST_OK)
        status =
            idist__collective_head_of(IDIST__ALL_GATHER_ALLOC, send, count, dtype, opts, &unused);
    if (status != IDIST_OK) return status;

    status = idist__collective_run(IDIST__ALL_GATHER, IDIST__ALL_GATHER_ALLOC, &own, recvcounts,
                                   sizeof own, IDIST_U8, IDIST_SUM, -1, opts);
    if (status != IDIST_OK) return status;
    for (i = 0; i < n; i++) total += recvcounts[i];
    status = idist__collective_alloc(name, (uint64_t)total * size, opts, recv);
    if (status != IDIST_OK) return status;

    idist__call_init(&c, IDIST__ALL_GATHERV, send, *recv, count, dtype);
    c.label = IDIST__ALL_GATHER_ALLOC;
    c.recvcounts = recvcounts;
    c.check = idist__hash(recvcounts, sizeof *recvcounts * (size_t)n);

    return idist__collective_alloc_end(idist__call_run(&c, opts), recv);
}

//------------------------------------------------------------------------------
// [calls:p2p]  send and receive
// uses mutex fail kind model core:task core:wait check core:call
//------------------------------------------------------------------------------

static void idist__p2p_init(idist__call *c, idist__kind kind, const void *send, void *recv,
                            size_t count, idist_dtype dtype, int peer, int tag,
                            idist_recv_info *info) {
    idist__call_init(c, kind, send, recv, count, dtype);
    c->root = peer;
    c->tag = tag;
    c->info = info;
}

idist_status idist_send(const void *buf, size_t count, idist_dtype dtype, int dst, int tag,
                        const idist_opts *opts) {
    idist__call c;
    idist__p2p_init(&c, IDIST__SEND, buf, NULL, count, dtype, dst, tag, NULL);
    return idist__call_message(&c, opts);
}

idist_status idist_recv(void *buf, size_t count, idist_dtype dtype, int src, int tag,
                        idist_recv_info *info, const idist_opts *opts) {
    idist__call c;
    idist__p2p_init(&c, IDIST__RECV, NULL, buf, count, dtype, src, tag, info);
    return idist__call_message(&c, opts);
}

// A call ends before it has begun.
static idist_status idist__p2p_refuse(const char *why, const idist_opts *opts) {
    return idist__call_ended(idist__fail(IDIST_ERR_ARG, "%s", why), opts ? opts->request : NULL);
}

// A probe is a receive that leaves the message. message: NULL, or where a matched probe puts it.
static void idist__p2p_init_probe(idist__call *c, idist__kind label, int src, int tag,
                                  idist_recv_info *info, idist_message *message) {
    idist__p2p_init(c, IDIST__RECV, NULL, NULL, 0, IDIST_U8, src, tag, info);
    c->label = label;
    c->peeks = true;
    c->u.message = message;
}

idist_status idist_probe(int src, int tag, idist_recv_info *info, const idist_opts *opts) {
    idist__call c;

    if (!info) return idist__p2p_refuse("probe: info is NULL", opts);
    idist__p2p_init_probe(&c, IDIST__PROBE, src, tag, info, NULL);

    return idist__call_run(&c, opts);
}

idist_status idist_mprobe(int src, int tag, idist_message *message, const idist_opts *opts) {
    idist__call c;

    if (!message) return idist__p2p_refuse("mprobe: message is NULL", opts);
    message->group = NULL;
    idist__p2p_init_probe(&c, IDIST__MPROBE, src, tag, &message->info, message);

    return idist__call_run(&c, opts);
}

// Begins a probe, moves what can move, and takes it back if it has found nothing.
static idist_status idist__p2p_probe_now(idist_group *g, const idist__call *c, bool *found) {
    const char *name = idist__kind_names[c->label];
    idist__world *w = g->w;
    idist_opts none;
    idist__task *t;

    if (g->status != IDIST_OK)
        return idist__fail(g->status, "%s: the group failed earlier: %s", name, g->cause);
    if (w->thread_stops)
        return idist__fail(IDIST_ERR_ABORTED, "%s: another thread closes the world", name);
    t = idist__task_new(g);
    if (!t) return idist__fail(IDIST_ERR_NO_MEMORY, "%s: out of memory", name);

    memset(&none, 0, sizeof none);
    idist__call_task_init(t, c, &none, false);
    idist__task_start(t);
    idist__fail_begin();
    if (!t->done && w->driver == IDIST__DRIVER_NONE) w->backend->progress(w);
    idist__fail_end(IDIST_OK);
    *found = t->done && t->status == IDIST_OK;

    if (!t->done) {
        w->backend->cancel(t);
        idist__task_complete(t, IDIST_OK, "");
    }

    return idist__wait_result(t);
}

// A probe without waiting.
static idist_status idist__p2p_probe_try(const idist__call *c, bool *found,
                                         const idist_opts *opts) {
    const char *name = idist__kind_names[c->label];
    idist_group *g = NULL;
    idist_status status;

    if (!found) return idist__fail(IDIST_ERR_ARG, "%s: found is NULL", name);
    *found = false;
    status = idist__check_blocking(name, opts);
    if (status != IDIST_OK) return status;
    status = idist__call_enter(name, opts ? opts->group : NULL, &g);
    if (status != IDIST_OK) return status;

    status = idist__check_call(g, c);
    if (status == IDIST_OK) status = idist__p2p_probe_now(g, c, found);
    idist__os_mutex_unlock(&g->w->lock);

    return status;
}

idist_status idist_iprobe(int src, int tag, bool *found, idist_recv_info *info,
                          const idist_opts *opts) {
    idist_recv_info unused;
    idist__call c;

    idist__p2p_init_probe(&c, IDIST__IPROBE, src, tag, info ? info : &unused, NULL);

    return idist__p2p_probe_try(&c, found, opts);
}

idist_status idist_improbe(int src, int tag, bool *found, idist_message *message,
                           const idist_opts *opts) {
    idist__call c;

    if (!message) return idist__fail(IDIST_ERR_ARG, "improbe: message is NULL");
    message->group = NULL;
    idist__p2p_init_probe(&c, IDIST__IMPROBE, src, tag, &message->info, message);

    return idist__p2p_probe_try(&c, found, opts);
}

idist_status idist_mrecv(void *buf, size_t count, idist_dtype dtype, idist_message *message,
                         const idist_opts *opts) {
    idist_opts o;
    idist__call c;

    if (!message || !message->group)
        return idist__p2p_refuse("mrecv: the message is empty: no probe has matched it", opts);
    if (opts && opts->plan) return idist__p2p_refuse("mrecv: opts.plan must be NULL", opts);

    memset(&o, 0, sizeof o);
    if (opts) o = *opts;
    o.group = message->group;
    idist__p2p_init(&c, IDIST__RECV, NULL, buf, count, dtype, message->info.source,
                    (int)message->number, NULL);
    c.label = IDIST__MRECV;
    c.u.message = message;

    return idist__call_run(&c, &o);
}

//------------------------------------------------------------------------------
// [calls:request]  requests: wait and test
// uses clock os:thread mutex fail kind model core:world tracer core:task timer
// uses core:wait core:call
//
// A request is a pointer to its task (request->impl), NULL once it was waited for, or to
// idist__call_complete.
//------------------------------------------------------------------------------

// Some requests: contiguous, or reached through pointers.
typedef struct idist__request_list {
    idist_request *requests;
    idist_request *const *pointers;
    size_t n;
    const idist__world *w; // wait_any in one world: that one, ...
    size_t found;          // ... the first request that is complete, ...
    uint32_t seen_ended;   // ... and w->ended_count when they were looked at
} idist__request_list;

static idist__request_list idist__request_list_of(idist_request *requests,
                                                  idist_request *const *pointers, size_t n) {
    idist__request_list list;

    memset(&list, 0, sizeof list);
    list.requests = requests;
    list.pointers = pointers;
    list.n = n;

    return list;
}

// Request number i, or an empty one.
static idist_request *idist__request_at(const idist__request_list *list, size_t i,
                                        idist_request *empty) {
    empty->impl = NULL;
    if (!list->pointers) return &list->requests[i];
    return list->pointers[i] ? list->pointers[i] : empty;
}

// Empties a request, which another thread may be about to cancel.
static void idist__request_empty(idist_request *request) {
    __atomic_store_n(&request->impl, (void *)NULL, __ATOMIC_RELEASE);
}

// The task of a request, with its world locked. NULL: there is none, or *status says why not.
static idist__task *idist__request_enter(const char *name, idist_request *request,
                                         idist_status *status) {
    idist__task *t;
    idist__world *w;

    *status = IDIST_OK;

    if (!request) {
        *status = idist__fail(IDIST_ERR_ARG, "%s: request is NULL", name);
        return NULL;
    }

    if (idist__call_was_complete(request)) idist__request_empty(request);
    t = (idist__task *)request->impl;
    if (!t) return NULL;
    w = t->group->w;
    *status = idist__world_enter(name, w);
    if (*status != IDIST_OK) return NULL;
    idist__world_lock(w);
    if (idist__me.held_world == w) w->device_api->launch(w); // it may be held back

    return t;
}

// Whether a request is complete, once the tasks that follow its first one are. The lock is held.
static bool idist__request_settle(idist_request *request) {
    idist__task *t = (idist__task *)request->impl;

    while (t->done && t->then) {
        t->then(t, request);
        t = (idist__task *)request->impl;
    }

    return t->done;
}

// Waits for the task of a request, and those that follow it. Empties the request.
static idist_status idist__request_wait(idist_request *request) {
    idist__task *t;

    do {
        t = (idist__task *)request->impl;
        idist__wait_task(t);
    } while (!idist__request_settle(request));

    t = (idist__task *)request->impl;
    idist__request_empty(request);

    return idist__wait_result(t);
}

static bool idist__request_followed(void *t) {
    return ((idist__task *)t)->done || ((idist__task *)t)->followed;
}

idist_status idist_wait(idist_request *request) {
    const char *name = "wait";
    idist_status status;
    idist__task *t = idist__request_enter(name, request, &status);
    idist__world *w;

    if (!t) return status;
    w = t->group->w;
    idist__tracer_begin("wait", name, t->group, &t->call);
    status = idist__tracer_end(idist__request_wait(request));
    idist__os_mutex_unlock(&w->lock);

    return status;
}

idist_status idist_wait_stream(idist_request *request, void *stream) {
    const char *name = "wait_stream";
    idist_status status;
    idist__task *t = idist__request_enter(name, request, &status);
    idist__world *w;

    if (!t) return status;
    w = t->group->w;
    idist__tracer_begin("wait", name, t->group, &t->call);

    if (t->then) {
        status = idist__request_wait(request);
    } else {
        idist__wait_until(w, idist__request_followed, t);
        idist__request_empty(request);
        status = t->done ? idist__wait_result(t) : w->device_api->follow(t, stream);
    }

    idist__tracer_end(status);
    idist__os_mutex_unlock(&w->lock);

    return status;
}

idist_status idist_test(idist_request *request, bool *done) {
    idist_status status;
    idist__task *t;
    idist__world *w;

    if (!done) return idist__fail(IDIST_ERR_ARG, "test: done is NULL");
    *done = true;
    t = idist__request_enter("test", request, &status);
    if (!t) return status;
    w = t->group->w;

    if (!t->done && w->driver == IDIST__DRIVER_NONE) {
        w->drive_count++;
        idist__fail_begin();
        w->backend->progress(w);
        if (!t->done) idist__timer_run(w);
        idist__fail_end(IDIST_OK);
    }

    *done = idist__request_settle(request);

    if (*done) {
        t = (idist__task *)request->impl;
        idist__request_empty(request);
        status = idist__wait_result(t);
    }

    idist__os_mutex_unlock(&w->lock);

    return status;
}

idist_status idist_request_free(idist_request *request) {
    idist_status status;
    idist__task *t = idist__request_enter("request_free", request, &status);
    idist__world *w;

    if (!t) return status;
    w = t->group->w;

    if (t->then) {
        status = idist__fail(IDIST_ERR_ARG, "request_free: a split has to be waited for");
    } else {
        idist__request_empty(request);
        if (t->done) status = idist__wait_result(t);
        else idist__task_let_go(t);
    }

    idist__os_mutex_unlock(&w->lock);

    return status;
}

// The task of a request for which another thread may be waiting, with its world locked. NULL: it is
// empty or complete, or *status says why not. The task may be in use again by the time the lock is
// there; then the request is empty.
static idist__task *idist__request_find(const idist_request *request, idist_status *status) {
    void *impl = __atomic_load_n(&request->impl, __ATOMIC_ACQUIRE);
    idist__task *t = impl == &idist__call_complete ? NULL : (idist__task *)impl;

    *status = IDIST_OK;
    if (!t) return NULL;
    *status = idist__world_enter("cancel", t->w);
    if (*status != IDIST_OK) return NULL;
    idist__world_lock(t->w);
    if (__atomic_load_n(&request->impl, __ATOMIC_RELAXED) == impl) return t;
    idist__os_mutex_unlock(&t->w->lock);

    return NULL;
}

// Ends a task if it is a receive without a message. Returns whether it was in time.
static bool idist__request_retract(idist__task *t, idist_status *status) {
    idist__world *w = t->group->w;
    const char *name = idist__kind_names[t->call.label];

    if (t->done && !t->then) return false;

    if (t->call.kind != IDIST__RECV || t->then) {
        *status = idist__fail(IDIST_ERR_ARG,
                              "cancel: other ranks already count on this %s; only a receive can be "
                              "cancelled",
                              name);
        return false;
    }

    if (t->on_device || !w->backend->retract) {
        *status = idist__fail(IDIST_ERR_UNSUPPORTED,
                              t->on_device ? "cancel: a %s into device memory cannot be cancelled"
                                           : "cancel: this backend cannot cancel a %s; wait for it",
                              name);
        return false;
    }

    if (!w->backend->retract(t)) return false;
    idist__task_complete(t, IDIST_ERR_CANCELLED, "cancelled by idist_cancel before a message came");
    idist__world_wake_driver(w); // it may be the thread that waits for this request

    return true;
}

idist_status idist_cancel(idist_request *request, bool *cancelled) {
    idist_status status;
    idist__task *t;

    if (cancelled) *cancelled = false;
    if (!request || !cancelled)
        return idist__fail(IDIST_ERR_ARG, "cancel: request or cancelled is NULL");
    t = idist__request_find(request, &status);
    if (!t) return status;
    *cancelled = idist__request_retract(t, &status);
    idist__os_mutex_unlock(&t->w->lock);

    return status;
}

static void idist__request_leave(idist__world *w) {
    idist__wait_leave(w);
    idist__os_mutex_unlock(&w->lock);
}

// Waits for a request. From one to the next of the same world, *held, this thread keeps the lock
// and counts as blocked, so that the progress thread stays out of the way.
static idist_status idist__request_wait_next(idist_request *request, idist__world **held) {
    idist_status status = IDIST_OK;
    idist__task *t = (idist__task *)request->impl;

    if (t->group->w != *held) {
        if (*held) idist__request_leave(*held);
        *held = NULL;
        t = idist__request_enter("wait_all", request, &status);
        if (!t) return status;
        *held = t->group->w;
        idist__wait_enter(*held);
    }

    return idist__request_wait(request);
}

// The failure of a wait for several requests: the one with the lowest index.
typedef struct idist__request_failure {
    idist_status status;
    size_t index;
    char text[sizeof idist__me.text];
} idist__request_failure;

static void idist__request_note(idist__request_failure *failure, idist_status status,
                                size_t index) {
    if (status == IDIST_OK || (failure->status != IDIST_OK && failure->index < index)) return;
    failure->status = status;
    failure->index = index;
    memcpy(failure->text, idist__me.text, sizeof failure->text);
}

// One after the other.
static void idist__request_wait_each(const idist__request_list *list,
                                     idist__request_failure *failure) {
    idist__world *held = NULL;
    idist_request empty;
    size_t i;

    for (i = 0; i < list->n; i++) {
        idist_request *request = idist__request_at(list, i, &empty);
        idist_status status;

        if (!request->impl) continue;

        if (idist__call_was_complete(request)) {
            idist__request_empty(request);
            continue;
        }

        status =
            idist__tracer_now() ? idist_wait(request) : idist__request_wait_next(request, &held);
        idist__request_note(failure, status, i);
    }

    if (held) idist__request_leave(held);
}

// There may be thousands of requests, so it looks only after a task has ended.
static bool idist__request_any_ready(void *arg) {
    idist__request_list *list = (idist__request_list *)arg;
    idist_request empty;

    if (list->w->ended_count == list->seen_ended) return false;

    for (list->found = 0; list->found < list->n; list->found++) {
        idist_request *request = idist__request_at(list, list->found, &empty);
        if (request->impl && idist__request_settle(request)) return true;
    }

    list->seen_ended = list->w->ended_count;

    return false;
}

// All requests are of one world.
static idist_status idist__request_wait_in(idist__request_list *list, idist__world *w) {
    idist_request empty, *request;
    idist__task *t;
    idist_status status = IDIST_OK;

    if (idist__world_enter("wait_any", w) != IDIST_OK) return IDIST_ERR_STATE;
    list->w = w;
    idist__world_lock(w);
    if (idist__me.held_world == w) w->device_api->launch(w);
    list->seen_ended = w->ended_count - 1;
    idist__tracer_begin("wait", "wait_any", NULL, NULL);
    idist__wait_until(w, idist__request_any_ready, list);
    request = idist__request_at(list, list->found, &empty);
    t = (idist__task *)request->impl;
    if (t) status = idist__wait_result(t);
    idist__tracer_end(status);
    idist__request_empty(request);
    idist__os_mutex_unlock(&w->lock);

    return status;
}

// They are of several worlds: tests one after the other. The pause between two looks grows.
static idist_status idist__request_wait_among(idist__request_list *list) {
    int64_t pause_ns = 0;
    idist_request empty;
    bool done = false;
    idist_status status;

    for (;;) {
        for (list->found = 0; list->found < list->n; list->found++) {
            idist_request *request = idist__request_at(list, list->found, &empty);

            if (!request->impl) continue;
            status = idist_test(request, &done);
            if (done || status != IDIST_OK) return status;
        }

        if (pause_ns < IDIST__MS) pause_ns += 1000;
        if (pause_ns < 50000) idist__os_thread_yield();
        else idist__os_clock_pause_ms(1);
    }
}

static idist_status idist__request_wait_any(idist__request_list *list, size_t *index) {
    idist__world *w = NULL;
    idist_request empty;
    idist_status status;
    bool one_world = true;
    size_t i;

    *index = list->n;

    for (i = 0; i < list->n; i++) {
        idist_request *request = idist__request_at(list, i, &empty);
        const idist__task *t;

        if (idist__call_was_complete(request)) {
            idist__request_empty(request);
            *index = i;
            return IDIST_OK;
        }

        t = (const idist__task *)request->impl;
        if (t && w && t->group->w != w) one_world = false;
        if (t) w = t->group->w;
    }

    if (!w) return IDIST_OK;
    list->found = list->n;
    status = one_world ? idist__request_wait_in(list, w) : idist__request_wait_among(list);
    *index = list->found;

    return status;
}

// Whether one of them goes on only in a wait for it (a split).
static bool idist__request_any_follows(const idist__request_list *list) {
    idist_request empty;
    size_t i;

    for (i = 0; i < list->n; i++) {
        idist_request *request = idist__request_at(list, i, &empty);
        if (request->impl && !idist__call_was_complete(request) &&
            ((const idist__task *)request->impl)->then)
            return true;
    }

    return false;
}

// While there are splits among them it waits for any: waiting for one at a time, two ranks that
// have them in different orders would wait for each other.
static idist_status idist__request_wait_all(idist__request_list *list) {
    idist__request_failure failure;
    idist_request empty;
    size_t i;

    failure.status = IDIST_OK;
    failure.index = 0;

    while (idist__request_any_follows(list)) {
        idist_status status = idist__request_wait_any(list, &i);

        // Still open: this thread may not wait, because it is in a callback, say.
        if (i == list->n || idist__request_at(list, i, &empty)->impl) break;
        idist__request_note(&failure, status, i);
    }

    idist__request_wait_each(list, &failure);
    if (failure.status != IDIST_OK) memcpy(idist__me.text, failure.text, sizeof failure.text);

    return failure.status;
}

idist_status idist_wait_all(idist_request *requests, size_t n) {
    idist__request_list list = idist__request_list_of(requests, NULL, n);

    if (n && !requests) return idist__fail(IDIST_ERR_ARG, "wait_all: requests is NULL");

    return idist__request_wait_all(&list);
}

idist_status idist_wait_all_of(idist_request *const *requests, size_t n) {
    idist__request_list list = idist__request_list_of(NULL, requests, n);

    if (n && !requests) return idist__fail(IDIST_ERR_ARG, "wait_all_of: requests is NULL");

    return idist__request_wait_all(&list);
}

idist_status idist_wait_any(idist_request *requests, size_t n, size_t *index) {
    idist__request_list list = idist__request_list_of(requests, NULL, n);

    if ((n && !requests) || !index)
        return idist__fail(IDIST_ERR_ARG, "wait_any: requests or index is NULL");

    return idist__request_wait_any(&list, index);
}

idist_status idist_wait_any_of(idist_request *const *requests, size_t n, size_t *index) {
    idist__request_list list = idist__request_list_of(NULL, requests, n);

    if ((n && !requests) || !index)
        return idist__fail(IDIST_ERR_ARG, "wait_any_of: requests or index is NULL");

    return idist__request_wait_any(&list, index);
}

idist_status idist_wait_some(idist_request *requests, size_t n, size_t *indices, size_t *count) {
    idist__request_list list = idist__request_list_of(requests, NULL, n);
    idist__request_failure failure;
    idist_status status;
    size_t first = n, i;
    bool done;

    if (count) *count = 0;
    if ((n && (!requests || !indices)) || !count)
        return idist__fail(IDIST_ERR_ARG, "wait_some: requests, indices or count is NULL");

    status = idist__request_wait_any(&list, &first);
    if (first == n || requests[first].impl) return status; // all were empty, or none is complete
    failure.status = IDIST_OK;
    failure.index = 0;
    idist__request_note(&failure, status, first);

    for (i = 0; i < n; i++) {
        done = i == first;
        if (requests[i].impl) {
            status = idist_test(&requests[i], &done);
            if (done) idist__request_note(&failure, status, i);
        }
        if (done) indices[(*count)++] = i;
    }

    if (failure.status != IDIST_OK) memcpy(idist__me.text, failure.text, sizeof failure.text);

    return failure.status;
}

idist_status idist_test_all(idist_request *requests, size_t n, bool *done) {
    idist__request_failure failure;
    size_t i;
    bool one;

    if ((n && !requests) || !done)
        return idist__fail(IDIST_ERR_ARG, "test_all: requests or done is NULL");

    *done = true;
    failure.status = IDIST_OK;
    failure.index = 0;

    for (i = 0; i < n; i++) {
        idist_status status = idist_test(&requests[i], &one);
        idist__request_note(&failure, status, i);
        *done = *done && one;
    }

    if (failure.status != IDIST_OK) memcpy(idist__me.text, failure.text, sizeof failure.text);

    return failure.status;
}

//------------------------------------------------------------------------------
// [calls:plan]  calls that are prepared once and made often
// uses mutex fail mem model tracer core:call
//
// A plan keeps an idist__call that has passed the check, and its hash of counts. What may have
// changed since is checked again: the group, ops and dtypes of the program.
//------------------------------------------------------------------------------

idist_status idist_plan_create(idist_plan **plan) {
    if (!plan) return idist__fail(IDIST_ERR_ARG, "plan_create: plan is NULL");
    *plan = (idist_plan *)idist__mem_alloc(NULL, sizeof **plan); // outlives any world
    return *plan ? IDIST_OK : IDIST_ERR_NO_MEMORY;
}

static idist_status idist__plan_run(idist_group *g, const idist_plan *plan, const idist_opts *o) {
    const idist__call *c = &plan->call;
    bool may_differ =
        (int)c->op >= IDIST_OP_USER || (int)c->dtype >= IDIST_DTYPE_USER || idist__tracer_now();

    if (g->w->serial != plan->world_serial || g->ctx != plan->ctx || g->rank != plan->rank ||
        g->size != plan->size)
        return idist__fail(IDIST_ERR_STATE, "plan_start: the group of this plan is gone");
    return may_differ ? idist__call_traced(g, c, o) : idist__call_checked(g, c, o);
}

idist_status idist_plan_start(const idist_plan *plan, idist_request *request) {
    idist_group *g = NULL;
    idist_opts o;
    idist_status status = IDIST_OK;

    if (!plan) status = idist__fail(IDIST_ERR_ARG, "plan_start: plan is NULL");
    else if (!plan->call.kind)
        status = idist__fail(IDIST_ERR_STATE,
                             "plan_start: the plan is empty: make a call with opts.plan first");
    else status = idist__call_enter("plan_start", plan->opts.group, &g);

    if (g) {
        o = plan->opts;
        o.request = request;
        status = idist__plan_run(g, plan, &o);
        idist__os_mutex_unlock(&g->w->lock);
    }

    return idist__call_ended(status, request);
}

idist_status idist_plan_free(idist_plan **plan) {
    if (!plan) return idist__fail(IDIST_ERR_ARG, "plan_free: plan is NULL");
    idist__mem_free(NULL, *plan);
    *plan = NULL;

    return IDIST_OK;
}

//------------------------------------------------------------------------------
// [calls:several]  calls that progress together: sendrecv, group_begin and group_end
// uses mutex fail base:type kind model core:world tracer core:wait check
// uses core:call p2p
//
// Between group_begin and group_end a blocking call starts its task and returns; the tasks gather
// in idist__me.group_tasks (idist__call_locked), and group_end waits for them. sendrecv does the
// same with two tasks, without releasing the lock in between.
//------------------------------------------------------------------------------

typedef struct idist__several_pair {
    idist__call send, recv;
} idist__several_pair;

// Checks both calls before either begins; *host: neither is for the device.
static idist_status idist__several_check(idist_group *g, const idist__several_pair *pair,
                                         const idist_opts *o, bool *host) {
    bool send_on_device = false, recv_on_device = false, detached;
    idist_status status = idist__check_call(g, &pair->send);

    if (status == IDIST_OK) status = idist__check_call(g, &pair->recv);
    if (status == IDIST_OK)
        status = idist__call_route(g, &pair->send, o, &send_on_device, &detached);
    if (status == IDIST_OK)
        status = idist__call_route(g, &pair->recv, o, &recv_on_device, &detached);
    *host = !send_on_device && !recv_on_device;

    return status;
}

// Starts what passed the check, the receive first, and waits for it.
static idist_status idist__several_run(idist_group *g, const idist__several_pair *pair,
                                       const idist_opts *o, bool quick, idist_status status) {
    idist__thread *self = &idist__me;
    idist__task *first, *t, *next;

    self->group_depth = quick ? 0 : 1;
    self->group_status = IDIST_OK;
    if (status == IDIST_OK) status = idist__call_locked(g, &pair->recv, o);
    if (status == IDIST_OK && !quick) status = idist__call_locked(g, &pair->send, o);
    self->group_depth = 0;
    if (g->w->device_api) g->w->device_api->launch(g->w);

    idist__call_undefer(g->w);
    first = self->group_tasks; // both, or after a failure one or none
    self->group_tasks = NULL;
    for (t = first; t; t = t->list_next) idist__wait_task(t);

    for (t = first; t; t = next) {
        next = t->list_next;
        if (status == IDIST_OK) status = idist__wait_result(t);
        else idist__wait_drop(t);
    }

    return status;
}

// Both calls of a pair in the group of o, which block until they are complete.
static idist_status idist__several_exchange(const idist__several_pair *pair, const char *name,
                                            const idist_opts *o) {
    idist_group *g = NULL;
    bool quick, host;
    idist_status status = idist__call_enter(name, o->group, &g);

    if (status != IDIST_OK) return status;
    status = idist__several_check(g, pair, o, &host);
    idist__tracer_begin("call", name, g, status == IDIST_OK ? &pair->send : NULL);
    quick = status == IDIST_OK && host && idist__call_quick(g, &pair->send, o);
    status = idist__several_run(g, pair, o, quick, status);
    idist__os_mutex_unlock(&g->w->lock);

    return idist__tracer_end(status);
}

idist_status idist_sendrecv(const void *send, size_t sendcount, int dst, int sendtag, void *recv,
                            size_t recvcount, int src, int recvtag, idist_dtype dtype,
                            idist_recv_info *info, const idist_opts *opts) {
    idist__several_pair pair;
    idist_opts o;
    size_t size = idist_dtype_size(dtype);
    const char *from = (const char *)send, *to = (const char *)recv;
    idist_status status = idist__check_blocking("sendrecv", opts);

    if (status != IDIST_OK) return status;
    if (size && sendcount && recvcount && from && to && from < to + recvcount * size &&
        to < from + sendcount * size)
        return idist__fail(IDIST_ERR_ARG, "sendrecv: send and receive buffers overlap");
    memset(&o, 0, sizeof o);
    if (opts) o = *opts;
    idist__p2p_init(&pair.recv, IDIST__RECV, NULL, recv, recvcount, dtype, src, recvtag, info);
    idist__p2p_init(&pair.send, IDIST__SEND, send, NULL, sendcount, dtype, dst, sendtag, NULL);

    return idist__several_exchange(&pair, "sendrecv", &o);
}

idist_status idist_group_begin(void) {
    if (!idist__me.group_depth++) idist__me.group_status = IDIST_OK;
    return IDIST_OK;
}

idist_status idist_group_end(void) {
    idist__thread *self = &idist__me;
    idist__world *held = self->held_world, *w = NULL;
    char text[sizeof self->text];
    idist_status first;

    if (!self->group_depth)
        return idist__fail(IDIST_ERR_STATE, "group_end: without idist_group_begin");
    if (--self->group_depth) return IDIST_OK;
    idist__tracer_begin("wait", "group_end", NULL, NULL);

    if (held) {
        idist__world_lock(held);
        held->device_api->launch(held);
        idist__os_mutex_unlock(&held->lock);
    }

    first = self->group_status;
    memcpy(text, self->group_text, sizeof text);

    while (self->group_tasks) {
        idist__task *t = self->group_tasks;
        idist_status status;

        if (!w ||
            t->group->w != w) { // else it stays locked: another thread might close it in between
            if (w) idist__os_mutex_unlock(&w->lock);
            w = t->group->w;
            idist__world_lock(w);
            idist__call_undefer(w);
        }

        self->group_tasks = t->list_next;
        idist__wait_task(t);
        status = idist__wait_result(t);
        if (status == IDIST_OK || first != IDIST_OK) continue;
        first = status;
        memcpy(text, self->text, sizeof text);
    }

    if (w) idist__os_mutex_unlock(&w->lock);
    if (first != IDIST_OK) memcpy(self->text, text, sizeof text);

    return idist__tracer_end(first);
}

//------------------------------------------------------------------------------
// [calls:group]  groups
// uses mutex fail mem hash kind model core:world core:group core:wait block
// uses check core:call collective p2p several
//
// new_group and split make a group in these steps, the same on every rank of the parent, or of
// those listed in new_group_by_members:
//
//     idist__new_group_reserve   allocates it, before anybody counts on this rank
//     a collective           the ranks agree: a barrier whose fingerprint carries the list, an
//                            all_gather of the colors, or messages between the members
//     idist__new_group_make      puts it into the world and opens it
//     idist__new_group_meet      its members exchange what the backend wants to know
//------------------------------------------------------------------------------

int idist_group_translate(const idist_group *from, int rank, const idist_group *to) {
    int i, world_rank;

    if (!from && idist__world_default()) from = &idist__world_default()->group;
    if (!to && idist__world_default()) to = &idist__world_default()->group;
    if (!from || !to) return rank == 0 ? 0 : -1;
    if (from->w != to->w || rank < 0 || rank >= from->size) return -1;
    world_rank = from->ranks[rank];
    for (i = 0; i < to->size; i++)
        if (to->ranks[i] == world_rank) return i;

    return -1;
}

// Members agree on ctx without a message: it follows from the parent's ctx, the number of groups
// made from it, and the color.
static uint64_t idist__new_group_ctx(const idist_group *parent, uint32_t child_count,
                                     uint64_t color) {
    uint64_t ctx = idist__hash_mix(idist__hash_mix(parent->ctx, child_count), color);
    return ctx ? ctx : 1;
}

// Allocates a group with room for n ranks. Called with the lock held, and releases it.
//
// A backend without group_meet blocks while it opens a group. Two threads that each open one would
// wait for each other if two ranks did so in different orders, so only one may.
static idist_status idist__new_group_reserve(const char *name, idist__world *w, int n,
                                             idist_group **g) {
    bool busy = w->making_count && w->group.size > 1 && !w->backend->group_meet;

    *g = busy ? NULL : idist__group_new(w, n);
    if (*g) w->making_count++;
    idist__os_mutex_unlock(&w->lock);
    if (busy)
        return idist__fail(IDIST_ERR_STATE,
                           "%s: another thread makes a group; backend %s makes one at a time", name,
                           w->backend->name);

    return *g ? IDIST_OK : IDIST_ERR_NO_MEMORY;
}

// From here on the other members count on this rank.
static idist_status idist__new_group_make(idist_group *parent, idist_group *g, uint32_t child_count,
                                          uint64_t color, const int *ranks, int n,
                                          idist_group **out) {
    idist__world *w = parent->w;
    idist_status status = IDIST_OK;

    idist__group_set(g, idist__new_group_ctx(parent, child_count, color), ranks, n);
    g->next = w->group.next;
    w->group.next = g;
    g->parent = parent;
    if (g->rank >= 0) status = w->backend->group_open(g);

    if (status != IDIST_OK) {
        g->rank = -1; // was never opened
        idist__group_free(g);
        idist__group_fail_self(parent, status, "could not make its part of a new group");
        return status;
    }

    *out = g;

    return IDIST_OK;
}

// Exchanges the members' offers. Fails the group if this rank cannot take part.
static idist_status idist__new_group_exchange(idist_group *g, idist__kind label) {
    idist__world *w = g->w;
    idist_opts o;
    idist_status status;
    uint64_t *offers =
        (uint64_t *)idist__mem_alloc(&w->cfg.mem, sizeof *offers * (size_t)(g->size + 1));

    if (!offers) {
        idist__world_lock(w);
        idist__group_fail_memory(g);
        idist__os_mutex_unlock(&w->lock);
        return IDIST_ERR_NO_MEMORY;
    }

    memset(&o, 0, sizeof o);
    o.group = g;
    idist__world_lock(w);
    offers[g->size] = w->backend->group_offer(g);
    idist__os_mutex_unlock(&w->lock);

    status = idist__collective_run(IDIST__ALL_GATHER, label, &offers[g->size], offers, 1, IDIST_U64,
                                   IDIST_SUM, -1, &o);

    if (status == IDIST_OK) {
        idist__world_lock(w);
        status = w->backend->group_meet(g, offers);
        if (status != IDIST_OK) idist__group_fail_memory(g);
        idist__os_mutex_unlock(&w->lock);
    }

    idist__mem_free(&w->cfg.mem, offers);

    return status;
}

// The members meet. If the group fails meanwhile, because a member has aborted it or died, it
// exists all the same, as it does for those who had come further; except where the members alone
// make it.
static idist_status idist__new_group_meet(idist_group **group, idist__kind label) {
    idist_group *g = *group;
    idist__world *w = g->w;
    idist_status status;

    if (g->rank < 0 || g->size == 1 || !w->backend->group_meet) {
        g->parent = NULL;
        return IDIST_OK;
    }

    // The parent failed meanwhile, perhaps because a member could not make its part.
    if (g->parent->status != IDIST_OK) {
        idist__world_lock(w);
        idist__group_fail(g, g->parent->status, g->parent->cause);
        idist__os_mutex_unlock(&w->lock);
    }

    status = idist__new_group_exchange(g, label);
    g->parent = NULL;
    if (status == IDIST_OK) return IDIST_OK;
    // Those who made it alone learn whether all have come.
    if (g->status != IDIST_OK && label != IDIST__NEW_GROUP_BY_MEMBERS) return IDIST_OK;

    idist__world_lock(w);
    idist__group_free(g);
    idist__os_mutex_unlock(&w->lock);
    *group = NULL;

    return status;
}

// Finishes what idist__new_group_reserve began: opens the group if the ranks agree (status),
// otherwise frees it.
static idist_status idist__new_group_finish(idist_group *parent, idist_group *g,
                                            idist_status status, uint64_t color, const int *ranks,
                                            int n, idist__kind label, idist_group **out) {
    idist__world *w = parent->w;
    uint32_t child_count = 0;

    idist__world_lock(w);

    if (status == IDIST_OK) {
        // Not all ranks of the parent count the groups that some make alone.
        if (label != IDIST__NEW_GROUP_BY_MEMBERS) child_count = ++parent->child_count;
        status = idist__new_group_make(parent, g, child_count, color, ranks, n, out);
    } else {
        idist__group_free(g);
    }

    idist__os_mutex_unlock(&w->lock);
    if (status == IDIST_OK) status = idist__new_group_meet(out, label);
    idist__world_lock(w);
    w->making_count--;
    idist__os_mutex_unlock(&w->lock);

    return status;
}

static int idist__new_group_compare_ranks(const void *a, const void *b) {
    int x = *(const int *)a, y = *(const int *)b;
    return (x > y) - (x < y);
}

// A barrier whose fingerprint carries the list, which is ascending.
static idist_status idist__new_group_barrier(int world_size, const int *ranks, int n) {
    idist__call c;
    int i;

    for (i = 0; i < n; i++)
        if (ranks[i] < 0 || ranks[i] >= world_size || (i && ranks[i] == ranks[i - 1]))
            return idist__fail(IDIST_ERR_ARG, "new_group: rank %d is listed twice or outside 0..%d",
                               ranks[i], world_size - 1);
    idist__call_init(&c, IDIST__BARRIER, NULL, NULL, 0, IDIST_U8);
    c.label = IDIST__NEW_GROUP;
    c.check = idist__hash(ranks, sizeof(int) * (size_t)n);

    return idist__call_run(&c, NULL);
}

idist_status idist_new_group(const int *ranks, int n, idist_group **group) {
    idist_group *world = NULL, *g;
    idist_status status;

    if (!group) return idist__fail(IDIST_ERR_ARG, "new_group: group is NULL");
    *group = NULL;
    status = idist__check_blocking("new_group", NULL);
    if (status == IDIST_OK) status = idist__call_enter("new_group", NULL, &world);
    if (status != IDIST_OK) return status;

    if (!ranks || n < 1 || n > world->size) {
        idist__os_mutex_unlock(&world->w->lock);
        return idist__fail(IDIST_ERR_ARG, "new_group: needs 1 to %d ranks, got %d", world->size,
                           ranks ? n : 0);
    }

    status = idist__new_group_reserve("new_group", world->w, n, &g);
    if (!g) return status;
    memcpy(g->ranks, ranks, sizeof(int) * (size_t)n);
    qsort(g->ranks, (size_t)n, sizeof(int), idist__new_group_compare_ranks);
    status = idist__new_group_barrier(world->size, g->ranks, n);

    return idist__new_group_finish(world, g, status, 0, g->ranks, n, IDIST__NEW_GROUP, group);
}

// The members exchange messages, as in a barrier by dissemination (see idist_algo.h), and find the
// largest of their serials, so that no two groups of the same members have the same one. me: index
// of this rank in the list, which has ranks of the parent.
static idist_status idist__new_group_agree(idist_group *parent, const int *ranks, int n, int me,
                                           uint64_t key, uint64_t *serial) {
    int tag = -2 - (int)(key % 0x40000000u), distance;
    idist__several_pair pair;
    idist_opts o;
    idist_status status = IDIST_OK;

    memset(&o, 0, sizeof o);
    o.group = parent;

    for (distance = 1; distance < n && status == IDIST_OK; distance *= 2) {
        uint64_t sent = *serial, received = 0;

        idist__p2p_init(&pair.recv, IDIST__RECV, NULL, &received, 1, IDIST_U64,
                        ranks[idist__block_wrap(me - distance, n)], tag, NULL);
        idist__p2p_init(&pair.send, IDIST__SEND, &sent, NULL, 1, IDIST_U64,
                        ranks[idist__block_wrap(me + distance, n)], tag, NULL);
        pair.recv.label = pair.send.label = IDIST__NEW_GROUP_BY_MEMBERS;
        status = idist__several_exchange(&pair, "new_group_by_members", &o);
        if (received > *serial) *serial = received;
    }

    return status;
}

// Checks the list, and finds this rank in it.
static idist_status idist__new_group_check_members(const idist_group *parent, const int *ranks,
                                                   int n, int tag, int *me) {
    const char *name = "new_group_by_members";
    int i, k;

    *me = -1;
    if (parent->rank < 0)
        return idist__fail(IDIST_ERR_STATE, "%s: this rank is not a member of the parent", name);
    if (!ranks || n < 1 || n > parent->size)
        return idist__fail(IDIST_ERR_ARG, "%s: needs 1 to %d ranks, got %d", name, parent->size,
                           ranks ? n : 0);
    if (tag < 0) return idist__fail(IDIST_ERR_ARG, "%s: tag %d is negative", name, tag);

    for (i = 0; i < n; i++) {
        for (k = 0; k < i && ranks[k] != ranks[i]; k++) continue;
        if (ranks[i] < 0 || ranks[i] >= parent->size || k < i)
            return idist__fail(IDIST_ERR_ARG, "%s: rank %d is listed twice or outside 0..%d", name,
                               ranks[i], parent->size - 1);
        if (ranks[i] == parent->rank) *me = i;
    }

    if (*me >= 0) return IDIST_OK;

    return idist__fail(IDIST_ERR_ARG, "%s: this rank, %d, is not listed", name, parent->rank);
}

idist_status idist_new_group_by_members(idist_group *parent, const int *ranks, int n, int tag,
                                        idist_group **group) {
    const idist__kind label = IDIST__NEW_GROUP_BY_MEMBERS;
    idist_group *p, *g;
    idist_allocator mem;
    idist_status status;
    uint64_t key, serial;
    int *members, i, me;

    if (!group) return idist__fail(IDIST_ERR_ARG, "new_group_by_members: group is NULL");
    *group = NULL;
    status = idist__check_blocking("new_group_by_members", NULL);
    if (status == IDIST_OK) status = idist__call_enter("new_group_by_members", parent, &p);
    if (status != IDIST_OK) return status;
    status = idist__new_group_check_members(p, ranks, n, tag, &me);

    if (status != IDIST_OK) {
        idist__os_mutex_unlock(&p->w->lock);
        return status;
    }

    mem = p->w->cfg.mem;
    serial = p->w->member_groups;
    status = idist__new_group_reserve("new_group_by_members", p->w, n, &g);
    if (!g) return status;
    members = (int *)idist__mem_alloc(&mem, sizeof(int) * (size_t)n);
    if (!members) status = IDIST_ERR_NO_MEMORY;
    for (i = 0; members && i < n; i++) members[i] = p->ranks[ranks[i]];

    key = idist__hash_mix(idist__hash(ranks, sizeof(int) * (size_t)n), (uint64_t)tag);
    if (status == IDIST_OK) status = idist__new_group_agree(p, ranks, n, me, key, &serial);

    if (status == IDIST_OK) {
        idist__world_lock(p->w);
        if (p->w->member_groups <= serial) p->w->member_groups = serial + 1;
        idist__os_mutex_unlock(&p->w->lock);
    }

    status = idist__new_group_finish(p, g, status, idist__hash_mix(key, serial), members, n, label,
                                     group);
    idist__mem_free(&mem, members);

    return status;
}

// The members of one color, ordered by key, then by rank in the parent. all: color and key of each
// rank. ranks: room for twice the size of the parent.
static int idist__new_group_of_color(const idist_group *parent, const int *all, int color,
                                     int *ranks) {
    int i, k, n = 0;
    int *order = ranks + parent->size;

    if (color < 0) return 0;

    for (i = 0; i < parent->size; i++) {
        if (all[2 * i] != color) continue;
        for (k = n++; k > 0 && all[2 * order[k - 1] + 1] > all[2 * i + 1]; k--)
            order[k] = order[k - 1];
        order[k] = i;
    }

    for (i = 0; i < n; i++) ranks[i] = parent->ranks[order[i]];

    return n;
}

idist_status idist_split(idist_group *parent, int color, int key, idist_group **group) {
    idist_group *p, *g;
    idist_opts o;
    idist_status status;
    idist_allocator mem;
    int mine[2], *all, *ranks, n = 0;

    if (!group) return idist__fail(IDIST_ERR_ARG, "split: group is NULL");
    *group = NULL;
    status = idist__check_blocking("split", NULL);
    if (status == IDIST_OK) status = idist__call_enter("split", parent, &p);
    if (status != IDIST_OK) return status;
    status = idist__new_group_reserve("split", p->w, p->size, &g);
    if (!g) return status;

    mem = p->w->cfg.mem; // another thread may close the world when the group is finished
    all = (int *)idist__mem_alloc(&mem, sizeof(int) * 4 * (size_t)p->size);
    ranks = all ? all + 2 * p->size : NULL;
    memset(&o, 0, sizeof o);
    o.group = p;
    mine[0] = color < 0 ? -1 : color;
    mine[1] = key;
    status = all ? idist__collective_run(IDIST__ALL_GATHER, IDIST__SPLIT, mine, all, 2, IDIST_I32,
                                         IDIST_SUM, -1, &o)
                 : IDIST_ERR_NO_MEMORY;
    if (status == IDIST_OK) n = idist__new_group_of_color(p, all, mine[0], ranks);
    status = idist__new_group_finish(p, g, status, (uint64_t)(int64_t)mine[0] + 1, ranks, n,
                                     IDIST__SPLIT, group);
    idist__mem_free(&mem, all);

    return status;
}

static bool idist__new_group_is_settled(void *arg) {
    return !((const idist_group *)arg)->detached_count;
}

// Waits for the tasks that nobody else waits for, then frees the group.
static idist_status idist__new_group_release(idist_group *g) {
    idist__world *w = g->w;
    idist_status status = IDIST_OK;

    idist__world_lock(w);
    idist__wait_until(w, idist__new_group_is_settled, g);

    if (w->thread_stops) {
        status = idist__fail(IDIST_ERR_STATE, "free_group: another thread closes the world");
    } else if (g->running_count || g->open_request_count) {
        status = idist__fail(IDIST_ERR_STATE,
                             "free_group: calls are still under way on it, or requests are open; "
                             "wait for them first");
    } else {
        // Messages for it that have arrived belong to nobody once it is gone.
        w->backend->progress(w);
        if (g->host_group) idist__group_free(g->host_group);
        idist__group_free(g);
        idist__world_wake_driver(w);
    }

    idist__os_mutex_unlock(&w->lock);

    return status;
}

idist_status idist_free_group(idist_group **group) {
    idist_group *g;
    idist_status status;

    if (!group || !*group)
        return idist__fail(IDIST_ERR_ARG, "free_group: the group is NULL (freed already?)");
    g = *group;

    if (!g->w || g->w->abandoned) { // it was freed with its world
        *group = NULL;
        return IDIST_OK;
    }

    if (g->freed) return idist__fail(IDIST_ERR_STATE, "free_group: the group was freed already");
    if (idist__world_enter("free_group", g->w) || idist__check_blocking("free_group", NULL))
        return IDIST_ERR_STATE;
    if (g == &g->w->group)
        return idist__fail(IDIST_ERR_ARG,
                           "free_group: a world ends by idist_finalize or idist_close");
    status = idist__new_group_release(g);
    if (status == IDIST_OK) *group = NULL;

    return status;
}

static idist_status idist__new_group_needs_ulfm(const char *name) {
    return idist__fail(IDIST_ERR_UNSUPPORTED,
                       "%s: only backend mpi can do this, with Open MPI 5 under "
                       "mpirun --with-ft ulfm",
                       name);
}

idist_status idist_shrink(idist_group *group, idist_group **survivors) {
    idist_group *g, *made;
    idist__world *w;
    idist_status status;
    uint32_t serial;
    int *ranks, n = 0;

    if (!survivors) return idist__fail(IDIST_ERR_ARG, "shrink: survivors is NULL");
    *survivors = NULL;
    status = idist__check_blocking("shrink", NULL);
    if (status == IDIST_OK) status = idist__call_enter("shrink", group, &g);
    if (status != IDIST_OK) return status;

    w = g->w;
    made = idist__group_new(w, g->size);
    ranks = made ? (int *)idist__mem_alloc(&w->cfg.mem, sizeof(int) * (size_t)g->size) : NULL;
    serial = g->child_count + 1;
    if (g->rank < 0)
        status = idist__fail(IDIST_ERR_STATE, "shrink: this rank is not a member of the group");
    else if (!w->backend->shrink) status = idist__new_group_needs_ulfm("shrink");
    else status = ranks ? w->backend->shrink(g, ranks, &n, &serial) : IDIST_ERR_NO_MEMORY;

    if (status == IDIST_OK) {
        // Members may have made different numbers of groups before they lost a rank.
        g->child_count = serial;
        status = idist__new_group_make(g, made, serial, 0, ranks, n, survivors);
        if (status == IDIST_OK) (*survivors)->parent = NULL; // complete: there is no meeting
    } else if (made) {
        idist__group_free(made);
    }

    idist__os_mutex_unlock(&w->lock);
    idist__mem_free(&w->cfg.mem, ranks);

    return status;
}

idist_status idist_agree(idist_group *group, int *flag) {
    idist_group *g;
    idist_status status;

    if (!flag) return idist__fail(IDIST_ERR_ARG, "agree: flag is NULL");
    status = idist__check_blocking("agree", NULL);
    if (status == IDIST_OK) status = idist__call_enter("agree", group, &g);
    if (status != IDIST_OK) return status;

    if (g->rank < 0)
        status = idist__fail(IDIST_ERR_STATE, "agree: this rank is not a member of the group");
    else if (g->size > 1 && !g->w->backend->agree) status = idist__new_group_needs_ulfm("agree");
    else if (g->size > 1) status = g->w->backend->agree(g, flag);
    idist__os_mutex_unlock(&g->w->lock);

    return status;
}

//------------------------------------------------------------------------------
// [calls:split]  a split that is begun and waited for later
// uses mutex fail text mem kind model core:group core:wait check core:call
// uses group
//
//     idist_split_start        begins the all_gather of colors and keys
//     idist__split_make        when it is done: makes the group; begins the exchange of offers
//     idist__split_meet        when that is done: the members have met
//------------------------------------------------------------------------------

typedef struct idist__split {
    idist_group *parent, *made;
    idist_group **group; // of the program
    uint32_t child_count;
    int mine[2], *all, *ranks;
    uint64_t *offers;
} idist__split;

// One allocation for the struct and its arrays.
static idist__split *idist__split_new(idist_group *parent) {
    size_t n = (size_t)parent->size;
    size_t nbytes = sizeof(idist__split) + sizeof(uint64_t) * (n + 1) + sizeof(int) * 4 * n;
    idist__split *split = (idist__split *)idist__mem_alloc(&parent->w->cfg.mem, nbytes);

    if (!split) return NULL;
    split->parent = parent;
    split->offers = (uint64_t *)(void *)(split + 1);
    split->all = (int *)(void *)(split->offers + n + 1);
    split->ranks = split->all + 2 * n;
    split->made = idist__group_new(parent->w, parent->size);
    if (split->made) return split;
    idist__mem_free(&parent->w->cfg.mem, split);

    return NULL;
}

// The request is complete with this status; its text is that of the last failure in this thread.
static void idist__split_end(idist__task *t, idist_status status) {
    idist__split *split = (idist__split *)t->then_arg;

    if (status != IDIST_OK && t->status == IDIST_OK)
        idist__text_copy(t->text, sizeof t->text, idist__me.text);
    t->status = status;
    t->then = NULL;
    idist__mem_free(&t->group->w->cfg.mem, split);
}

// A group that failed meanwhile exists all the same, as in idist__new_group_meet.
static void idist__split_meet(idist__task *t, idist_request *request) {
    idist__split *split = (idist__split *)t->then_arg;
    idist_group *g = split->made;
    idist__world *w = g->w;
    idist_status status = t->status;

    (void)request;
    if (status == IDIST_OK) status = w->backend->group_meet(g, split->offers);
    if (status != IDIST_OK && t->status == IDIST_OK) idist__group_fail_memory(g);
    g->parent = NULL;
    *split->group = g;
    idist__split_end(t, IDIST_OK);
}

// Begins the exchange of offers in the new group, in the place of t, which is freed.
static void idist__split_exchange(idist__task *t, idist_request *request) {
    idist__split *split = (idist__split *)t->then_arg;
    idist_group *g = split->made;
    idist__call c;
    idist_opts o;
    idist_status status;

    split->offers[g->size] = g->w->backend->group_offer(g);
    idist__call_init(&c, IDIST__ALL_GATHER, &split->offers[g->size], split->offers, 1, IDIST_U64);
    c.label = IDIST__SPLIT;
    memset(&o, 0, sizeof o);
    o.group = g;
    o.request = request;
    if (split->parent->status != IDIST_OK)
        idist__group_fail(g, split->parent->status, split->parent->cause);
    status = idist__call_locked(g, &c, &o);

    if (status == IDIST_OK) {
        idist__task *next = (idist__task *)request->impl;
        next->then = idist__split_meet;
        next->then_arg = split;
        idist__wait_drop(t);
        return;
    }

    g->parent = NULL; // it has failed, but exists
    *split->group = g;
    idist__split_end(t, IDIST_OK);
}

static void idist__split_make(idist__task *t, idist_request *request) {
    idist__split *split = (idist__split *)t->then_arg;
    idist_group *g = split->made;
    int n = 0, color = split->mine[0];

    if (t->status != IDIST_OK) {
        idist__group_free(g);
        idist__split_end(t, t->status);
        return;
    }

    n = idist__new_group_of_color(split->parent, split->all, color, split->ranks);
    t->status = idist__new_group_make(split->parent, g, split->child_count,
                                      (uint64_t)(int64_t)color + 1, split->ranks, n, split->group);

    if (t->status != IDIST_OK) { // the group was freed, and the parent has failed
        idist__text_copy(t->text, sizeof t->text, idist__me.text);
        idist__split_end(t, t->status);
    } else if (g->rank < 0 || g->size == 1 || !g->w->backend->group_meet) {
        g->parent = NULL;
        idist__split_end(t, IDIST_OK);
    } else {
        *split->group = NULL; // not yet
        idist__split_exchange(t, request);
    }
}

// Begins the exchange of colors, with the lock held.
static idist_status idist__split_begin(idist_group *p, int color, int key, idist_group **group,
                                       idist_request *request) {
    idist__split *split;
    idist__task *t;
    idist__call c;
    idist_opts o;
    idist_status status;

    if (p->size > 1 && !p->w->backend->group_meet)
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "split_start: backend %s blocks while it makes a group; use idist_split",
                           p->w->backend->name);
    split = idist__split_new(p);
    if (!split) return IDIST_ERR_NO_MEMORY;
    split->group = group;
    split->mine[0] = color < 0 ? -1 : color;
    split->mine[1] = key;

    idist__call_init(&c, IDIST__ALL_GATHER, split->mine, split->all, 2, IDIST_I32);
    c.label = IDIST__SPLIT;
    memset(&o, 0, sizeof o);
    o.group = p;
    o.request = request;
    status = idist__call_locked(p, &c, &o);

    if (status != IDIST_OK) {
        idist__group_free(split->made);
        idist__mem_free(&p->w->cfg.mem, split);
        return status;
    }

    t = (idist__task *)request->impl;
    t->then = idist__split_make; // NOLINT(clang-analyzer-core.NullDereference)
    t->then_arg = split;
    split->child_count = ++p->child_count; // the order in which splits begin is that of all ranks

    return IDIST_OK;
}

idist_status idist_split_start(idist_group *parent, int color, int key, idist_group **group,
                               idist_request *request) {
    idist_group *p = NULL;
    idist_status status;

    if (request) request->impl = NULL;
    if (!group || !request)
        return idist__fail(IDIST_ERR_ARG, "split_start: group or request is NULL");
    *group = NULL;
    status = idist__check_blocking("split_start", NULL);
    if (status == IDIST_OK) status = idist__call_enter("split_start", parent, &p);
    if (status != IDIST_OK) return status;
    status = idist__split_begin(p, color, key, group, request);
    idist__os_mutex_unlock(&p->w->lock);

    return status;
}

//------------------------------------------------------------------------------
// [calls:op]  ops and dtypes of the program's own
// uses mutex fail text base:type hash model fingerprint core:call
//------------------------------------------------------------------------------

static idist_status idist__user_op_add(const char *name, const idist__user_op *user,
                                       idist_group *group, idist_op *op) {
    idist_group *g;
    idist_status status;
    size_t i;

    if (!op) return idist__fail(IDIST_ERR_ARG, "%s: op is NULL", name);
    *op = IDIST_OP_COUNT;
    status = idist__call_enter(name, group, &g);
    if (status != IDIST_OK) return status;
    for (i = 0; i < IDIST__COUNT_OF(g->w->ops) && g->w->ops[i].used; i++) continue;

    if (i == IDIST__COUNT_OF(g->w->ops)) {
        status =
            idist__fail(IDIST_ERR_NO_SPACE,
                        "%s: a world has room for %zu ops; free one with idist_op_free", name, i);
    } else {
        g->w->ops[i] = *user;
        g->w->ops[i].used = true;
        *op = (idist_op)(IDIST_OP_USER + (int)i);
    }

    idist__os_mutex_unlock(&g->w->lock);

    return status;
}

idist_status idist_op_create(idist_op_fn fn, void *arg, bool commutative, idist_group *group,
                             idist_op *op) {
    idist__user_op user;

    if (!fn) return idist__fail(IDIST_ERR_ARG, "op_create: fn is NULL");
    memset(&user, 0, sizeof user);
    user.fn = fn;
    user.arg = arg;
    user.factor = 1;
    user.commutative = commutative;
    return idist__user_op_add("op_create", &user, group, op);
}

idist_status idist_op_create_premul_sum(double factor, idist_group *group, idist_op *op) {
    idist__user_op user;

    memset(&user, 0, sizeof user);
    user.factor = factor;
    user.commutative = true;
    return idist__user_op_add("op_create_premul_sum", &user, group, op);
}

idist_status idist_op_free(idist_op op, idist_group *group) {
    idist_group *g;
    idist_status status = idist__call_enter("op_free", group, &g);

    if (status != IDIST_OK) return status;
    if ((int)op < IDIST_OP_USER || (int)op > IDIST_OP_LAST || !g->w->ops[op - IDIST_OP_USER].used)
        status = idist__fail(IDIST_ERR_ARG, "op_free: invalid user op %d in this world", (int)op);
    else g->w->ops[op - IDIST_OP_USER].used = false;
    idist__os_mutex_unlock(&g->w->lock);

    return status;
}

// The dtype with number `i`: that number in the lowest byte, the size above.
static idist_dtype idist__user_op_new_dtype(size_t nbytes, int i) {
    return (idist_dtype)(((unsigned)nbytes << 8) | (unsigned)(IDIST_DTYPE_USER + i));
}

idist_status idist_dtype_create(size_t nbytes, const char *name, idist_group *group,
                                idist_dtype *dtype) {
    idist__user_dtype *user;
    idist_group *g;
    idist_status status;
    uint64_t hash;
    int i;

    if (!dtype) return idist__fail(IDIST_ERR_ARG, "dtype_create: dtype is NULL");
    *dtype = IDIST_DTYPE_COUNT;
    if (!name || !name[0]) return idist__fail(IDIST_ERR_ARG, "dtype_create: the name is missing");
    if (nbytes < 1 || nbytes > IDIST__DTYPE_MAX_NBYTES)
        return idist__fail(IDIST_ERR_ARG, "dtype_create: an element has 1 to %d bytes, got %zu",
                           (int)IDIST__DTYPE_MAX_NBYTES, nbytes);
    status = idist__call_enter("dtype_create", group, &g);
    if (status != IDIST_OK) return status;
    for (i = 0; i < IDIST__USER_DTYPES && g->w->dtypes[i].used; i++) continue;

    if (i == IDIST__USER_DTYPES) {
        status = idist__fail(IDIST_ERR_NO_SPACE,
                             "dtype_create: a world has room for %d dtypes; free one with "
                             "idist_dtype_free",
                             i);
    } else {
        user = &g->w->dtypes[i];
        idist__text_copy(user->name, sizeof user->name, name);
        hash = idist__hash_mix(idist__hash(user->name, strlen(user->name)), nbytes);
        user->tag = (uint32_t)(hash >> (64 - IDIST__TAG_BITS)) | 1;
        user->dtype = idist__user_op_new_dtype(nbytes, i);
        user->used = true;
        *dtype = user->dtype;
    }

    idist__os_mutex_unlock(&g->w->lock);

    return status;
}

idist_status idist_dtype_free(idist_dtype dtype, idist_group *group) {
    int user = idist__dtype_user_number(dtype);
    idist_group *g;
    idist_status status = idist__call_enter("dtype_free", group, &g);

    if (status != IDIST_OK) return status;
    if (user < 0 || !g->w->dtypes[user].used || g->w->dtypes[user].dtype != dtype)
        status = idist__fail(IDIST_ERR_ARG, "dtype_free: %d is no dtype of this world", (int)dtype);
    else g->w->dtypes[user].used = false;
    idist__os_mutex_unlock(&g->w->lock);

    return status;
}

//------------------------------------------------------------------------------
// [calls:memory]  memory for buffers
// uses os:memory fail base:window model core:world
//------------------------------------------------------------------------------

void *idist_alloc(size_t nbytes, const idist_opts *opts) {
    idist__world *w = opts && opts->group ? opts->group->w : idist__world_default();
    size_t padded = nbytes ? (nbytes + 63) & ~(size_t)63 : 64;
    void *p = NULL;

    if (opts && opts->group && !w) {
        idist__fail(IDIST_ERR_STATE, "alloc: the world of this group was closed");
        return NULL;
    }

    if (w && !idist__world_forked(w) && w->backend->alloc) p = w->backend->alloc(w, nbytes);
    if (p) return p;

    if (nbytes <= SIZE_MAX / 2) p = idist__os_memory_aligned(64, padded);

    if (!p) {
        idist__fail(IDIST_ERR_NO_MEMORY, "alloc: no memory for %zu bytes", nbytes);
        return NULL;
    }

    memset(p, 0, nbytes ? nbytes : 1);

    return p;
}

void idist_free(void *ptr) {
    if (ptr && !idist__window_free(ptr)) idist__os_memory_free_aligned(ptr);
}

//------------------------------------------------------------------------------
// [calls:one]  one rank first, one rank only
// uses mutex fail text kind model check core:call get collective group
//------------------------------------------------------------------------------

enum { IDIST__ONE_THREW = INT32_MIN }; // the result of a function that threw an exception

typedef struct idist__one_result { // of a function
    int32_t code;                  // what it returned; IDIST__ONE_THREW: it threw an exception
    char thrown[256];              // which one
} idist__one_result;

// Runs a task, which may call idist.
IDIST__NOINLINE static void idist__one_rank_run(idist_task_fn fn, void *arg,
                                                idist__one_result *result) {
    int code = 0;

    IDIST__TRY(code = fn(arg));
    idist__text_copy(result->thrown, sizeof result->thrown, idist__me.thrown);
    idist__me.thrown[0] = 0;
    result->code = result->thrown[0] ? IDIST__ONE_THREW : code;
}

static idist_status idist__one_rank_own_result(idist__kind label, const idist__one_result *result) {
    if (!result->code) return IDIST_OK;
    if (result->code == IDIST__ONE_THREW)
        return idist__fail(IDIST_ERR_CALLBACK, "%s: the function threw an exception: %s",
                           idist__kind_names[label], result->thrown);

    return idist__fail(IDIST_ERR_CALLBACK, "%s: the function failed on this rank with %d",
                       idist__kind_names[label], (int)result->code);
}

// A broadcast takes the function's result to everybody, so that a failure ends the wait of the
// others instead of prolonging it.
static idist_status idist__one_rank_share_result(idist__kind label, int rank, bool mine,
                                                 const idist__one_result *own,
                                                 const idist_opts *o) {
    int32_t shared = mine ? own->code : 0;
    idist_status status = idist__collective_run(IDIST__BROADCAST, label, NULL, &shared, 1,
                                                IDIST_I32, IDIST_SUM, rank, o);

    if (status != IDIST_OK || !shared) return status;
    if (mine && own->code == IDIST__ONE_THREW) return idist__one_rank_own_result(label, own);
    if (shared == IDIST__ONE_THREW)
        return idist__fail(IDIST_ERR_CALLBACK, "%s: the function threw an exception on rank %d",
                           idist__kind_names[label], rank);

    return idist__fail(IDIST_ERR_CALLBACK, "%s: the function failed on rank %d with %d",
                       idist__kind_names[label], rank, (int)shared);
}

static idist_status idist__one_rank_check_rank(idist__kind label, int rank, int size) {
    if (rank >= 0 && rank < size) return IDIST_OK;
    return idist__fail(IDIST_ERR_ARG, "%s: rank must be between 0 and %d, got %d",
                       idist__kind_names[label], size - 1, rank);
}

// Makes the group of the members on this host, unless there is one. Collective.
static idist_status idist__one_rank_make_host_group(idist_group *g) {
    idist_group *made = NULL;
    idist_status status;

    if (g->host_group || g->rank < 0) return IDIST_OK;
    status = idist_split(g, g->w->nodes[g->w->group.rank].node_rank, 0, &made);
    if (status == IDIST_OK) g->host_group = made;

    return status;
}

idist_status idist_one_rank_first(idist_task_fn fn, void *arg, int rank, bool local,
                                  const idist_opts *opts) {
    idist_opts o;
    idist_status status;
    idist_group *g, *among;
    idist__one_result result;
    bool first;

    memset(&result, 0, sizeof result);
    memset(&o, 0, sizeof o);
    if (opts) o = *opts;
    if (!fn) return idist__fail(IDIST_ERR_ARG, "one_rank_first: fn is NULL");
    status = idist__check_blocking("one_rank_first", opts);
    if (status == IDIST_OK) status = idist__call_enter("one_rank_first", o.group, &g);
    if (status != IDIST_OK) return status;
    if (g->rank < 0)
        status =
            idist__fail(IDIST_ERR_STATE, "one_rank_first: this rank is not a member of the group");
    else if (g->status != IDIST_OK)
        status = idist__fail(g->status, "one_rank_first: the group failed earlier: %s", g->cause);
    idist__os_mutex_unlock(&g->w->lock);

    if (status == IDIST_OK && local) status = idist__one_rank_make_host_group(g);
    if (status != IDIST_OK) return status;
    if (local) o.group = g->host_group;
    among = local ? g->host_group : g;
    status = idist__one_rank_check_rank(IDIST__ONE_RANK_FIRST, rank, idist_group_size(among));
    if (status != IDIST_OK) return status;

    first = idist_group_rank(among) == rank;
    if (first) idist__one_rank_run(fn, arg, &result);
    status = idist__one_rank_share_result(IDIST__ONE_RANK_FIRST, rank, first, &result, &o);
    if (status != IDIST_OK || first) return status;
    idist__one_rank_run(fn, arg, &result);

    return idist__one_rank_own_result(IDIST__ONE_RANK_FIRST, &result);
}

idist_status idist_one_rank_only(idist_task_fn fn, void *arg, int rank, bool barrier,
                                 const idist_opts *opts) {
    idist_group *g = NULL;
    idist_status status;
    bool mine = false;
    idist__one_result result;

    memset(&result, 0, sizeof result);
    if (!fn) return idist__fail(IDIST_ERR_ARG, "one_rank_only: fn is NULL");
    status = idist__check_blocking("one_rank_only", opts);
    if (status == IDIST_OK)
        status = idist__call_enter("one_rank_only", opts ? opts->group : NULL, &g);

    if (g) {
        status = idist__one_rank_check_rank(IDIST__ONE_RANK_ONLY, rank, g->size);
        mine = g->rank == rank;
        idist__os_mutex_unlock(&g->w->lock);
    }

    if (status != IDIST_OK) return status;

    if (mine) idist__one_rank_run(fn, arg, &result);
    if (barrier)
        return idist__one_rank_share_result(IDIST__ONE_RANK_ONLY, rank, mine, &result, opts);

    return idist__one_rank_own_result(IDIST__ONE_RANK_ONLY, &result);
}

#endif // IDIST_CALLS_H
