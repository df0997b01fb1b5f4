/* idist_calls.h - v0.1.0 - the public functions, except those that spawn - MIT licence

    Part of the implementation of idist; idist.h includes it where IDIST_IMPLEMENTATION is defined.

CONTENTS

      [calls:life]   open and close a world; the getters
      [calls:coll]   the public collectives: each fills one call
      [calls:p2p]    send, receive, requests, and calls that progress together
      [calls:group]  groups and user ops
      [calls:help]   one rank first, one rank only
*/
#ifndef IDIST_CALLS_H
#define IDIST_CALLS_H

//------------------------------------------------------------------------------
// [calls:life]  open and close a world; the getters
// uses os err mem base:log config world core:call self
//------------------------------------------------------------------------------

idist_backend_list idist_backend_list_of(const idist_backend_api *a, const idist_backend_api *b,
                                         const idist_backend_api *c) {
    idist_backend_list list;

    memset(&list, 0, sizeof list);
    list.items[0] = a;
    list.items[1] = b;
    list.items[2] = c;
    return list;
}

// The list with `self` behind it, checked; names for texts.
static idist_status idist__backends_check(idist_backend_list *list, char *names, size_t cap) {
    size_t i, last = 0;

    names[0] = 0;
    for (i = 0; i + 1 < IDIST__COUNT_OF(list->items); i++)
        if (list->items[i]) last = i + 1;
    list->items[last] = idist_self_backend();

    for (i = 0; i <= last; i++) {
        const idist_backend_api *b = list->items[i];
        if (!b) continue;
        if (b->abi != IDIST__BACKEND_ABI || b->size != sizeof *b)
            return idist__fail(
                IDIST_ERR_NO_BACKEND,
                "a backend was compiled against another version of idist.h: rebuild all files");
        idist__append(names, cap, "%s%s", names[0] ? "," : "", b->name);
    }

    return IDIST_OK;
}

static const idist_backend_api *idist__backend_named(const idist_backend_list *list,
                                                     const char *name, size_t n) {
    size_t i;

    for (i = 0; i < IDIST__COUNT_OF(list->items); i++)
        if (list->items[i] && strlen(list->items[i]->name) == n &&
            memcmp(list->items[i]->name, name, n) == 0)
            return list->items[i];
    return NULL;
}

static bool idist__text_is(const char *text, size_t n, const char *word) {
    return strlen(word) == n && memcmp(text, word, n) == 0;
}

// The backend that a name asks for. Two names of torch.distributed and Ignite are no backends here:
// ring plays the part of gloo, and nccl is ring for what lies on the host, with NCCL beside it for
// what lies on devices.
static const idist_backend_api *idist__backend_asked(const idist_backend_list *list,
                                                     const char *name, size_t n) {
    const idist_backend_api *named = idist__backend_named(list, name, n);
    if (idist__text_is(name, n, "gloo") || (named && named->wrap))
        return idist__backend_named(list, "ring", 4);
    return named;
}

static idist_status idist__backend_unknown(const char *backends, const char *name, size_t n) {
    bool device = idist__text_is(name, n, "nccl"), gloo = idist__text_is(name, n, "gloo");

    if (device && !strstr(backends, "nccl"))
        return idist__fail(IDIST_ERR_NO_BACKEND,
                           "backend \"nccl\" (ring for host memory, NCCL for that of devices) "
                           "needs idist_nccl.h: include "
                           "it where idist_initialize is called. There are: %s",
                           backends);
    if (device || gloo || idist__text_is(name, n, "ring"))
        return idist__fail(
            IDIST_ERR_NO_BACKEND,
            "backend \"%.*s\" needs idist_ring.h, which IDIST_NO_RING leaves out. There are: %s",
            (int)n, name, backends);
    if (idist__text_is(name, n, "mpi"))
        return idist__fail(IDIST_ERR_NO_BACKEND,
                           "backend \"mpi\" is not built in: include idist_mpi.h where "
                           "idist_initialize is called. There are: "
                           "%s",
                           backends);

    return idist__fail(IDIST_ERR_NO_BACKEND,
                       "there is no backend \"%.*s\". The names are self, ring (or gloo), mpi and "
                       "nccl; there are: %s",
                       (int)n, name, backends);
}

// The first backend that fits: of those asked for by name, else of all; alone, `self`.
static idist_status idist__backend_choose(idist__world *w, const idist_backend_list *list) {
    const char *at = w->cfg.backends, *why = "none was built in";
    idist_status s = IDIST_ERR_NO_BACKEND;
    size_t i;

    while (*at && s == IDIST_ERR_NO_BACKEND) {
        size_t n = strcspn(at, ",");
        w->backend = idist__backend_asked(list, at, n);
        if (!w->backend) return idist__backend_unknown(w->backends, at, n);
        s = w->backend->claim(&w->cfg, &why);
        if (s == IDIST_OK && idist__text_is(at, n, "gloo"))
            idist__log_print(&w->log, IDIST_LOG_INFO,
                             "the backend asked for is \"gloo\", whose part ring plays");

        if (s == IDIST_OK && idist__text_is(at, n, "nccl")) {
            if (!w->cfg.device_backend) w->cfg.device_backend = IDIST__DEVICE_BACKEND_NCCL;
            idist__log_print(&w->log, IDIST_LOG_INFO,
                             "the backend asked for is \"nccl\": ring for host memory, NCCL for "
                             "that of devices (device_backend)");
        }

        at += n + (at[n] == ',');
    }

    for (i = 0;
         !w->cfg.backends[0] && s == IDIST_ERR_NO_BACKEND && i < IDIST__COUNT_OF(list->items); i++)
        if ((w->backend = list->items[i]) != NULL) s = w->backend->claim(&w->cfg, &why);
    if (s != IDIST_ERR_NO_BACKEND) return s;

    return idist__fail(IDIST_ERR_NO_BACKEND, "no backend for a world of %d among %s: %s",
                       w->cfg.world_size, w->backends, why);
}

// Local and node ranks from the table of hosts, so that uneven and cyclic placements come out
// right.
static void idist__world_count_nodes(idist__world *w) {
    int i, k, n = w->group.size;

    w->nnodes = 0;

    for (i = 0; i < n; i++) {
        idist__node *a = &w->nodes[i];
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

static pthread_mutex_t idist__life_lock = PTHREAD_MUTEX_INITIALIZER; // initialize and finalize
static pthread_mutex_t idist__default_lock =
    PTHREAD_MUTEX_INITIALIZER; // the default world stays while it is held

static void idist__world_free(idist__world *w) {
    idist_allocator mem = w->cfg.mem;

    while (w->group.next) idist__group_free(w->group.next);

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

    idist__mem_free(&mem, w->group.ranks);
    idist__mem_free(&mem, w->group.impl);
    idist__mem_free(&mem, w->nodes);
    idist__os_fork_guard_free(w->fork_guard);
    pthread_cond_destroy(&w->changed);
    pthread_cond_destroy(&w->work);
    pthread_mutex_destroy(&w->lock);
    memset(w, 0, sizeof *w); // the secret among it
    idist__ended_keep(&idist__ended_worlds, &w->group);
}

static idist_status idist__world_new(const idist__config *cfg, idist_backend_list *list,
                                     idist__world **out) {
    // A world is its group, which comes first in it.
    idist__world *w = (idist__world *)(void *)idist__ended_reuse(&idist__ended_worlds,
                                                                 IDIST__ENDED_WORLDS, sizeof *w);
    idist_status s;
    int i, n;

    *out = w;
    if (!w) return IDIST_ERR_NO_MEMORY;
    w->cfg = *cfg;
    pthread_mutex_init(&w->lock, NULL);
    idist__os_cond_init(&w->changed);
    idist__os_cond_init(&w->work);
    if (gethostname(w->hostname, sizeof w->hostname - 1) != 0)
        idist__copy_text(w->hostname, sizeof w->hostname, "localhost");
    if ((s = idist__log_init(&w->log, &cfg->logger)) != IDIST_OK) return s;
    if ((s = idist__backends_check(list, w->backends, sizeof w->backends)) != IDIST_OK) return s;
    if ((s = idist__backend_choose(w, list)) != IDIST_OK) return s;
    for (i = 0; i < (int)IDIST__COUNT_OF(list->items); i++)
        if (list->items[i] && list->items[i]->wrap) w->wrap = list->items[i]->wrap;
    if (!w->wrap)
        idist__copy_text(w->no_device, sizeof w->no_device,
                         "this program has no device backend: include idist_nccl.h where "
                         "idist_initialize is called");
    n = w->cfg.world_size;
    snprintf(w->log.who, sizeof w->log.who, "rank %d/%d %s", w->cfg.rank, n, w->hostname);
    w->group.w = w;
    w->group.ctx = 1;
    w->group.rank = w->cfg.rank;
    w->group.size = n;
    w->group.ranks = (int *)idist__mem_alloc(&cfg->mem, sizeof(int) * (size_t)n);
    w->group.impl = idist__mem_alloc(&cfg->mem, w->backend->group_nbytes);
    w->nodes = (idist__node *)idist__mem_alloc(&cfg->mem, sizeof *w->nodes * (size_t)n);
    w->fork_guard = idist__os_fork_guard();
    if (!w->group.ranks || !w->group.impl || !w->nodes) return IDIST_ERR_NO_MEMORY;
    for (i = 0; i < n; i++) w->group.ranks[i] = i;

    return IDIST_OK;
}

// Where this rank runs, and how it waits. Polling costs the power of a core, so it is bounded; with
// more ranks than cores it would take the core from the rank that everybody waits for. Such ranks
// begin evenly spread: the kernel would take a good part of a second to see that one core has three
// of them and the other one has one.
static void idist__world_settle_in(idist__world *w) {
    const idist__node *me = &w->nodes[w->group.rank];
    int own = idist__os_ncores(), ncores = w->ncores ? w->ncores : own;
    bool crowded = me->local_size > ncores;

    w->spin_ns = w->patience_ns = crowded ? 0 : IDIST__SPIN_NS;
    if (own > 1 && (w->cfg.bind || crowded) && !idist__os_bind(me->local_rank % own, w->cfg.bind))
        idist__log_print(&w->log, w->cfg.bind ? IDIST_LOG_WARN : IDIST_LOG_INFO,
                         "could not choose a processor: %s", strerror(errno));
}

static idist_status idist__world_close(idist__world *w, bool force);

static idist_status idist__world_open(const idist__config *cfg, idist_backend_list list,
                                      idist__world **out) {
    idist__world *w = NULL;
    idist_status s = idist__world_new(cfg, &list, &w);

    *out = NULL;
    if (s == IDIST_OK) s = w->backend->open(w);

    if (s == IDIST_OK) {
        idist__world_count_nodes(w);
        idist__world_settle_in(w);
        s = w->backend->group_open(&w->group);
        while (s != IDIST_OK && w->group.next) idist__group_free(w->group.next);
        if (s != IDIST_OK) w->backend->close(w, false);
    }

    if (s != IDIST_OK) {
        if (w) idist__world_free(w);
        return s;
    }

    if (w->wrap && (s = w->wrap(w)) != IDIST_OK) {
        char text[sizeof idist__me.text];
        memcpy(text, idist__me.text, sizeof text);
        idist__world_close(w,
                           w->group.status != IDIST_OK); // together, where all have the same error
        memcpy(idist__me.text, text, sizeof text);
        return s;
    }

    if (w->cfg.notice[0]) idist__log_print(&w->log, IDIST_LOG_WARN, "%s", w->cfg.notice);
    idist__log_print(&w->log, IDIST_LOG_INFO, "joined a world of %d, backend %s, launcher %s%s%s",
                     w->group.size, w->backend->name, w->cfg.launcher, cfg->rank_var ? " by " : "",
                     cfg->rank_var ? cfg->rank_var : "");
    if (idist__tracer_now()) idist__tracer_now()->joined(w);
    *out = w;

    return IDIST_OK;
}

// From here on nobody finds the default world any more; idist_abort, which any thread may be in, is
// waited for.
static void idist__world_retire(idist__world *w) {
    pthread_mutex_lock(&idist__default_lock);
    if (w == idist__world_default())
        __atomic_store_n(&idist__default_world, (idist__world *)NULL, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&idist__default_lock);
}

static bool idist__world_has_requests(idist__world *w) {
    idist_group *g;
    for (g = &w->group; g; g = g->next)
        if (g->nrequests) return true;
    return false;
}

// The last barrier. A rank that finalizes while others are in another call is a mismatch, and both
// learn of it.
static idist_status idist__world_last_barrier(idist__world *w) {
    idist__call c;
    idist_opts o;

    memset(&o, 0, sizeof o);
    idist__call_init(&c, IDIST__BARRIER, NULL, NULL, 0, IDIST_U8);
    c.label = IDIST__FINALIZE;
    return idist__call_traced(&w->group, &c, &o);
}

// force: without the last barrier and with requests open: a worker that failed. The others learn of
// it as of a lost rank.
static idist_status idist__world_close(idist__world *w, bool force) {
    idist_status s;

    if (idist__world_enter("finalize", w) != IDIST_OK) return IDIST_ERR_STATE;
    if (idist__me.group_depth && !force)
        return idist__fail(IDIST_ERR_STATE,
                           "finalize: inside idist_group_begin; call idist_group_end first");
    idist__world_lock(w);

    if (!force && idist__world_has_requests(w)) {
        pthread_mutex_unlock(&w->lock);
        return idist__fail(IDIST_ERR_STATE,
                           "finalize: requests are still open; wait for them first");
    }

    idist__me.group_depth = 0;
    idist__me.group_tasks = NULL;
    s = force ? IDIST_OK : idist__world_last_barrier(w);
    w->thread_stops = true;
    pthread_cond_broadcast(&w->work);
    w->backend->wake(w);
    pthread_mutex_unlock(&w->lock);
    idist__world_retire(w);
    if (w->thread_running) pthread_join(w->thread, NULL);
    idist__world_lock(w);

    while (w->tasks) { // forced: from here on nothing touches the caller's buffers
        idist__task *t = w->tasks;
        w->backend->cancel(t);
        idist__complete(t, IDIST_ERR_ABORTED, "the world was closed");
    }

    w->leaves = s != IDIST_OK || force;

    if (w->group.status !=
        IDIST_OK) { // members of other groups hear why we leave, and do not take us for the cause
        idist_group *g;
        for (g = w->group.next; g; g = g->next)
            if (g->rank >= 0 && g->size > 1 && !g->inner)
                idist__group_fail(g, w->group.status, w->group.cause);
    }

    pthread_mutex_unlock(&w->lock);
    while (w->group.next) idist__group_free(w->group.next);
    w->backend->group_close(&w->group);
    w->backend->close(w, !w->leaves);
    if (idist__tracer_now()) idist__tracer_now()->left();
    idist__log_print(&w->log, IDIST_LOG_INFO, "left the world");
    idist__world_free(w);

    return s;
}

idist_status idist_open_with(const idist_desc *desc, idist_group **world,
                             idist_backend_list backends) {
    idist__config cfg;
    idist__world *w = NULL;
    idist_status s;

    if (!world) return idist__fail(IDIST_ERR_ARG, "open: world is NULL");
    *world = NULL;
    if ((s = idist__launch_config(&cfg, desc)) != IDIST_OK) return s;
    s = idist__world_open(&cfg, backends, &w);
    if (s == IDIST_OK) *world = &w->group;

    return s;
}

idist_status idist_close(idist_group **world) {
    idist_status s;

    if (world && *world && !(*world)->w)
        return idist__fail(IDIST_ERR_STATE, "close: the world was closed already");
    if (!world || !*world || *world != &(*world)->w->group)
        return idist__fail(IDIST_ERR_ARG, "close: not a world that idist_open returned");
    s = idist__world_close((*world)->w, false);
    if (s != IDIST_ERR_STATE) *world = NULL;

    return s;
}

idist_status idist_initialize_with(const idist_desc *desc, idist_backend_list backends) {
    idist_group *world = NULL;
    idist_status s;

    pthread_mutex_lock(&idist__life_lock);
    if (idist__world_default())
        s = idist__fail(IDIST_ERR_STATE, "initialize: the world exists already; finalize it first");
    else s = idist_open_with(desc, &world, backends);
    if (world) __atomic_store_n(&idist__default_world, world->w, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&idist__life_lock);

    return s;
}

idist_status idist_finalize(void) {
    idist_status s;
    idist__world *w;

    pthread_mutex_lock(&idist__life_lock);
    w = idist__world_default();
    s = w ? idist__world_close(w, false)
          : idist__fail(IDIST_ERR_STATE,
                        "finalize: there is no world; call idist_initialize first");
    pthread_mutex_unlock(&idist__life_lock);

    return s;
}

bool idist_is_initialized(void) { return idist__world_default() != NULL; }

idist_status idist_abort(idist_group *group) {
    idist_group *g = NULL;
    char cause[200];
    idist_status s;

    pthread_mutex_lock(&idist__default_lock);
    s = idist__call_enter("abort", group, &g);

    if (g) {
        snprintf(cause, sizeof cause, "rank %d on %s called idist_abort", g->w->group.rank,
                 g->w->hostname);
        idist__group_fail(g, IDIST_ERR_ABORTED, cause);
        pthread_mutex_unlock(&g->w->lock);
    }

    pthread_mutex_unlock(&idist__default_lock);

    return s;
}

static const idist__node *idist__own_node(void) {
    idist__world *w = idist__world_default();
    return w ? &w->nodes[w->group.rank] : NULL;
}

int idist_group_rank(const idist_group *group) {
    const idist__world *w = group ? NULL : idist__world_default();
    return group ? group->rank : w ? w->group.rank : 0;
}

int idist_group_size(const idist_group *group) {
    const idist__world *w = group ? NULL : idist__world_default();
    return group ? group->size : w ? w->group.size : 1;
}

int idist_get_rank(void) { return idist_group_rank(NULL); }
int idist_get_world_size(void) { return idist_group_size(NULL); }
int idist_get_local_rank(void) { return idist__own_node() ? idist__own_node()->local_rank : 0; }
int idist_get_nproc_per_node(void) { return idist__own_node() ? idist__own_node()->local_size : 1; }
int idist_get_nnodes(void) { return idist__world_default() ? idist__world_default()->nnodes : 1; }
int idist_get_node_rank(void) { return idist__own_node() ? idist__own_node()->node_rank : 0; }
const char *idist_backend(void) {
    return idist__world_default() ? idist__world_default()->backend->name : "self";
}
const char *idist_device(void) {
    idist__world *w = idist__world_default();
    return w && w->device ? w->device_name : "cpu";
}
const char *idist_device_backend(void) {
    idist__world *w = idist__world_default();
    return w && w->device ? w->device_backend : "none";
}

const char *idist_launcher(void) {
    idist__config c;
    char text[sizeof idist__me.text];

    if (idist__world_default()) return idist__world_default()->cfg.launcher;
    memcpy(text, idist__me.text, sizeof text);
    memset(&c, 0, sizeof c);
    c.launcher = "none";
    idist__launch_detect(&c); // what is wrong with it idist_initialize will say
    memcpy(idist__me.text, text, sizeof text);

    return c.launcher;
}

const char *idist_hostname(void) {
    idist__world *w = idist__world_default();
    if (w) return w->hostname;
    if (gethostname(idist__me.hostname, sizeof idist__me.hostname - 1) != 0)
        idist__copy_text(idist__me.hostname, sizeof idist__me.hostname, "localhost");
    return idist__me.hostname;
}

const char *idist_available_backends_of(idist_backend_list backends) {
    if (idist__backends_check(&backends, idist__me.names, sizeof idist__me.names) != IDIST_OK)
        return "self";
    return idist__me.names;
}

const char *idist_show_config(void) {
    idist__world *w = idist__world_default();
    char *buf = idist__me.config;
    size_t cap = sizeof idist__me.config;

    snprintf(buf, cap, "backend: %s\ndevice: %s\ndevice backend: %s\nhostname: %s\n",
             idist_backend(), idist_device(), idist_device_backend(), w ? w->hostname : "-");
    idist__append(buf, cap,
                  "world size: %d\nrank: %d\nlocal rank: %d\nnum processes per node: %d\nnum "
                  "nodes: %d\nnode rank: %d\n",
                  idist_get_world_size(), idist_get_rank(), idist_get_local_rank(),
                  idist_get_nproc_per_node(), idist_get_nnodes(), idist_get_node_rank());
    idist__append(buf, cap, "launcher: %s", idist_launcher());
    if (w && w->cfg.rank_var)
        idist__append(buf, cap, " by %s and %s", w->cfg.rank_var, w->cfg.size_var);
    idist__append(buf, cap, "\n");
    if (w)
        idist__append(buf, cap, "rendezvous: %s\ntimeout: %d ms\n",
                      w->cfg.where[0] ? w->cfg.where : "none", w->cfg.timeout_ms);

    return buf;
}

//------------------------------------------------------------------------------
// [calls:coll]  the public collectives: each fills one call
// uses err hash world core:call life
//------------------------------------------------------------------------------

// All but the v-forms. SUM where nothing is reduced, -1 where there is no root; label: what it is a
// part of, or its kind.
static idist_status idist__collective(idist__kind kind, idist__kind label, const void *send,
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
    return idist__collective(IDIST__ALL_REDUCE, IDIST__ALL_REDUCE, send, recv, count, dtype, op, -1,
                             opts);
}

idist_status idist_reduce(const void *send, void *recv, size_t count, idist_dtype dtype,
                          idist_op op, int root, const idist_opts *opts) {
    return idist__collective(IDIST__REDUCE, IDIST__REDUCE, send, recv, count, dtype, op, root,
                             opts);
}

idist_status idist_reduce_scatter(const void *send, void *recv, size_t count, idist_dtype dtype,
                                  idist_op op, const idist_opts *opts) {
    return idist__collective(IDIST__REDUCE_SCATTER, IDIST__REDUCE_SCATTER, send, recv, count, dtype,
                             op, -1, opts);
}

idist_status idist_scan(const void *send, void *recv, size_t count, idist_dtype dtype, idist_op op,
                        const idist_opts *opts) {
    return idist__collective(IDIST__SCAN, IDIST__SCAN, send, recv, count, dtype, op, -1, opts);
}

idist_status idist_exscan(const void *send, void *recv, size_t count, idist_dtype dtype,
                          idist_op op, const idist_opts *opts) {
    return idist__collective(IDIST__EXSCAN, IDIST__EXSCAN, send, recv, count, dtype, op, -1, opts);
}

idist_status idist_broadcast(void *buf, size_t count, idist_dtype dtype, int root,
                             const idist_opts *opts) {
    return idist__collective(IDIST__BROADCAST, IDIST__BROADCAST, NULL, buf, count, dtype, IDIST_SUM,
                             root, opts);
}

idist_status idist_barrier(const idist_opts *opts) {
    return idist__collective(IDIST__BARRIER, IDIST__BARRIER, NULL, NULL, 0, IDIST_U8, IDIST_SUM, -1,
                             opts);
}

idist_status idist_all_gather(const void *send, void *recv, size_t count, idist_dtype dtype,
                              const idist_opts *opts) {
    return idist__collective(IDIST__ALL_GATHER, IDIST__ALL_GATHER, send, recv, count, dtype,
                             IDIST_SUM, -1, opts);
}

idist_status idist_gather(const void *send, void *recv, size_t count, idist_dtype dtype, int root,
                          const idist_opts *opts) {
    return idist__collective(IDIST__GATHER, IDIST__GATHER, send, recv, count, dtype, IDIST_SUM,
                             root, opts);
}

idist_status idist_scatter(const void *send, void *recv, size_t count, idist_dtype dtype, int root,
                           const idist_opts *opts) {
    return idist__collective(IDIST__SCATTER, IDIST__SCATTER, send, recv, count, dtype, IDIST_SUM,
                             root, opts);
}

idist_status idist_all_to_all(const void *send, void *recv, size_t count, idist_dtype dtype,
                              const idist_opts *opts) {
    return idist__collective(IDIST__ALL_TO_ALL, IDIST__ALL_TO_ALL, send, recv, count, dtype,
                             IDIST_SUM, -1, opts);
}

// The counts that must agree on all ranks go into the fingerprint as a hash; those that concern two
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

    idist__call_init(&c, IDIST__ALL_TO_ALLV, send, recv, 0, dtype);
    c.sendcounts = sendcounts;
    c.senddispls = senddispls;
    c.recvcounts = recvcounts;
    c.recvdispls = recvdispls;
    return idist__call_run(&c, opts);
}

static idist_status idist__check_blocking(const char *name, const idist_opts *opts) {
    if (opts && opts->request)
        return idist__fail(IDIST_ERR_ARG, "%s: blocking only; opts.request must be NULL", name);
    if (idist__me.group_depth)
        return idist__fail(IDIST_ERR_STATE, "%s: not between idist_group_begin and idist_group_end",
                           name);
    return IDIST_OK;
}

idist_status idist_broadcast_bytes(void *buf, size_t capacity, size_t *nbytes, int root,
                                   const idist_opts *opts) {
    const idist_group *group = opts ? opts->group : NULL;
    bool is_root = idist_group_rank(group) == root;
    uint64_t n = 0;
    void *waste = NULL;
    idist_status s = idist__check_blocking("broadcast_bytes", opts);

    if (s != IDIST_OK) return s;
    if (!nbytes || (capacity && !buf))
        return idist__fail(IDIST_ERR_ARG, "broadcast_bytes: buf or nbytes is NULL");
    if (is_root && *nbytes > capacity)
        return idist__fail(IDIST_ERR_ARG, "broadcast_bytes: root says %zu bytes in a buffer of %zu",
                           *nbytes, capacity);
    if (is_root) n = *nbytes;
    s = idist__collective(IDIST__BROADCAST, IDIST__BROADCAST_BYTES, NULL, &n, 1, IDIST_U64,
                          IDIST_SUM, root, opts);
    if (s != IDIST_OK) return s;

    // A rank whose buffer is too small takes part all the same, so that the others are not held up.
    if (n > capacity && (waste = malloc((size_t)n)) == NULL) {
        idist_abort(opts ? opts->group : NULL);
        return idist__fail(IDIST_ERR_NO_MEMORY, "broadcast_bytes: no memory for %llu bytes",
                           (unsigned long long)n);
    }

    s = idist__collective(IDIST__BROADCAST, IDIST__BROADCAST_BYTES, NULL, waste ? waste : buf,
                          (size_t)n, IDIST_U8, IDIST_SUM, root, opts);
    free(waste);
    if (s != IDIST_OK) return s;
    *nbytes = (size_t)n;
    if (n > capacity)
        return idist__fail(IDIST_ERR_TRUNCATED,
                           "broadcast_bytes: %llu bytes came, the buffer has %zu",
                           (unsigned long long)n, capacity);

    return IDIST_OK;
}

idist_status idist_all_gather_bytes(const void *send, size_t nbytes, void *buf, size_t capacity,
                                    size_t *sizes, const idist_opts *opts) {
    int i, n = idist_group_size(opts ? opts->group : NULL);
    size_t total = 0, own = nbytes;
    void *waste = NULL;
    idist__call c;
    idist_status s = idist__check_blocking("all_gather_bytes", opts);

    if (s != IDIST_OK) return s;
    if (!sizes || (capacity && !buf) || (nbytes && !send))
        return idist__fail(IDIST_ERR_ARG, "all_gather_bytes: send, buf or sizes is NULL");
    if (nbytes && capacity && (const char *)send < (const char *)buf + capacity &&
        (const char *)buf < (const char *)send + nbytes)
        return idist__fail(IDIST_ERR_ARG,
                           "all_gather_bytes: send and buf overlap; there is no in-place form");
    s = idist__collective(IDIST__ALL_GATHER, IDIST__ALL_GATHER_BYTES, &own, sizes, sizeof own,
                          IDIST_U8, IDIST_SUM, -1, opts);
    if (s != IDIST_OK) return s;
    for (i = 0; i < n; i++) total += sizes[i];

    if (total > capacity && (waste = malloc(total)) == NULL) {
        idist_abort(opts ? opts->group : NULL);
        return idist__fail(IDIST_ERR_NO_MEMORY, "all_gather_bytes: no memory for %zu bytes", total);
    }

    idist__call_init(&c, IDIST__ALL_GATHERV, send, waste ? waste : buf, nbytes, IDIST_U8);
    c.label = IDIST__ALL_GATHER_BYTES;
    c.recvcounts = sizes;
    c.check = idist__hash(sizes, sizeof *sizes * (size_t)n);
    s = idist__call_run(&c, opts);
    free(waste);
    if (s == IDIST_OK && total > capacity)
        return idist__fail(IDIST_ERR_TRUNCATED,
                           "all_gather_bytes: %zu bytes came, the buffer has %zu", total, capacity);

    return s;
}

//------------------------------------------------------------------------------
// [calls:p2p]  send, receive, requests, and calls that progress together
// uses err base:type world core:call coll
//------------------------------------------------------------------------------

static idist_status idist__p2p(idist__kind kind, const void *send, void *recv, size_t count,
                               idist_dtype dtype, int peer, int tag, idist_recv_info *info,
                               const idist_opts *opts) {
    idist__call c;

    idist__call_init(&c, kind, send, recv, count, dtype);
    c.root = peer;
    c.tag = tag;
    c.info = info;
    return idist__call_run(&c, opts);
}

idist_status idist_send(const void *buf, size_t count, idist_dtype dtype, int dst, int tag,
                        const idist_opts *opts) {
    return idist__p2p(IDIST__SEND, buf, NULL, count, dtype, dst, tag, NULL, opts);
}

idist_status idist_recv(void *buf, size_t count, idist_dtype dtype, int src, int tag,
                        idist_recv_info *info, const idist_opts *opts) {
    return idist__p2p(IDIST__RECV, NULL, buf, count, dtype, src, tag, info, opts);
}

// The task of a request, with its world locked; NULL: there is none, or an error.
static idist__task *idist__request_enter(const char *name, const idist_request *request,
                                         idist_status *s) {
    idist__task *t = request ? (idist__task *)request->impl : NULL;

    *s = request ? IDIST_OK : idist__fail(IDIST_ERR_ARG, "%s: request is NULL", name);
    if (t && (*s = idist__world_enter(name, t->group->w)) != IDIST_OK) return NULL;
    if (t) idist__world_lock(t->group->w);
    if (t && idist__me.held_world == t->group->w)
        t->group->w->device_api->launch(t->group->w); // it may be one of those
    return t;
}

static bool idist__task_followed(void *t) {
    return ((idist__task *)t)->done || ((idist__task *)t)->followed;
}

static idist_status idist__request_wait(const char *name, idist_request *request, bool follow,
                                        void *stream) {
    idist_status s;
    idist__task *t = idist__request_enter(name, request, &s);
    idist__world *w;

    if (!t) return s;
    w = t->group->w;
    idist__trace_begin("wait", name, t->group, &t->call);
    if (follow) idist__world_wait(w, idist__task_followed, t);
    else idist__wait_task(t);
    request->impl = NULL;
    s = idist__trace_end(t->done ? idist__wait_result(t) : w->device_api->follow(t, stream));
    pthread_mutex_unlock(&w->lock);

    return s;
}

idist_status idist_wait(idist_request *request) {
    return idist__request_wait("wait", request, false, NULL);
}

idist_status idist_wait_stream(idist_request *request, void *stream) {
    return idist__request_wait("wait_stream", request, true, stream);
}

idist_status idist_test(idist_request *request, bool *done) {
    idist_status s;
    idist__task *t = done ? idist__request_enter("test", request, &s) : NULL;
    idist__world *w;

    if (!done) return idist__fail(IDIST_ERR_ARG, "test: done is NULL");
    *done = true;
    if (!t) return s;
    w = t->group->w;
    if (!t->done && w->driver == IDIST__DRIVER_NONE) {
        w->backend->progress(w);
        if (!t->done) idist__timer_run(w);
    }

    *done = t->done;

    if (t->done) {
        request->impl = NULL;
        s = idist__wait_result(t);
    }

    pthread_mutex_unlock(&w->lock);

    return s;
}

idist_status idist_wait_all(idist_request *requests, size_t n) {
    idist_status first = IDIST_OK;
    char text[sizeof idist__me.text];
    size_t i;

    if (n && !requests) return idist__fail(IDIST_ERR_ARG, "wait_all: requests is NULL");

    for (i = 0; i < n; i++) {
        idist_status s = idist_wait(&requests[i]);
        if (s == IDIST_OK || first != IDIST_OK) continue;
        first = s;
        memcpy(text, idist__me.text, sizeof text);
    }

    if (first != IDIST_OK) memcpy(idist__me.text, text, sizeof text);

    return first;
}

typedef struct idist__several { // several requests, and the first of them that is complete
    const idist__world *w;
    const idist_request *requests;
    size_t n, at;
    uint32_t ended; // w->nended when they were looked at
} idist__several;

static bool idist__several_ready(void *arg) {
    idist__several *any = (idist__several *)arg;

    if (any->w->nended == any->ended) return false; // there may be thousands

    for (any->at = 0; any->at < any->n; any->at++) {
        const idist__task *t = (const idist__task *)any->requests[any->at].impl;
        if (t && t->done) return true;
    }

    any->ended = any->w->nended;

    return false;
}

idist_status idist_wait_any(idist_request *requests, size_t n, size_t *index) {
    idist__world *w = NULL;
    idist__several any;
    idist_status s;
    size_t i;

    if ((n && !requests) || !index)
        return idist__fail(IDIST_ERR_ARG, "wait_any: requests or index is NULL");
    *index = n;

    for (i = 0; i < n; i++) {
        const idist__task *t = (const idist__task *)requests[i].impl;
        if (t && w && t->group->w != w)
            return idist__fail(IDIST_ERR_ARG, "wait_any: the requests belong to different worlds");
        if (t) w = t->group->w;
    }

    if (!w) return IDIST_OK;
    if (idist__world_enter("wait_any", w) != IDIST_OK) return IDIST_ERR_STATE;
    any.w = w;
    any.requests = requests;
    any.n = n;
    idist__world_lock(w);
    any.ended = w->nended - 1;
    idist__trace_begin("wait", "wait_any", NULL, NULL);
    idist__world_wait(w, idist__several_ready, &any);
    *index = any.at;
    s = idist__trace_end(idist__wait_result((idist__task *)requests[any.at].impl));
    requests[any.at].impl = NULL;
    pthread_mutex_unlock(&w->lock);

    return s;
}

idist_status idist_sendrecv(const void *send, size_t sendcount, int dst, int sendtag, void *recv,
                            size_t recvcount, int src, int recvtag, idist_dtype dtype,
                            idist_recv_info *info, const idist_opts *opts) {
    idist__thread *self = &idist__me;
    struct {
        idist__call send, recv;
    } pair;
    idist_group *g = NULL;
    idist_opts o;
    size_t size = idist_dtype_size(dtype);
    const char *a = (const char *)send, *b = (const char *)recv;
    bool quick, detached, on_device[2] = {false, false};
    idist_status s = idist__check_blocking("sendrecv", opts);
    idist__task *first, *t, *next;

    if (s != IDIST_OK) return s;
    if (size && sendcount && recvcount && a && b && a < b + recvcount * size &&
        b < a + sendcount * size)
        return idist__fail(IDIST_ERR_ARG, "sendrecv: send and receive buffers overlap");
    memset(&o, 0, sizeof o);
    if (opts) o = *opts;
    if ((s = idist__call_enter("sendrecv", o.group, &g)) != IDIST_OK) return s;
    idist__call_init(&pair.recv, IDIST__RECV, NULL, recv, recvcount, dtype);
    pair.recv.root = src;
    pair.recv.tag = recvtag;
    pair.recv.info = info;
    idist__call_init(&pair.send, IDIST__SEND, send, NULL, sendcount, dtype);
    pair.send.root = dst;
    pair.send.tag = sendtag;
    if ((s = idist__call_check(g, &pair.send)) == IDIST_OK &&
        (s = idist__call_check(g, &pair.recv)) == IDIST_OK &&
        (s = idist__call_route(g, &pair.send, &o, &on_device[0], &detached)) ==
            IDIST_OK) // both, before either begins
        s = idist__call_route(g, &pair.recv, &o, &on_device[1], &detached);
    idist__trace_begin("call", "sendrecv", g, s == IDIST_OK ? &pair.send : NULL);
    quick = s == IDIST_OK && !on_device[0] && !on_device[1] && idist__call_quick(g, &pair.send, &o);
    self->group_depth = quick ? 0 : 1;
    self->group_status = IDIST_OK;
    if (s == IDIST_OK) s = idist__call_locked(g, &pair.recv, &o);
    if (s == IDIST_OK && !quick) s = idist__call_locked(g, &pair.send, &o);
    self->group_depth = 0;
    if (g->w->device_api) g->w->device_api->launch(g->w);
    first = self->group_tasks; // the receive, then the send; none or one when something went wrong
    self->group_tasks = NULL;
    for (t = first; t; t = t->list_next) idist__wait_task(t);

    for (t = first; t; t = next) {
        next = t->list_next;
        if (s == IDIST_OK) s = idist__wait_result(t);
        else idist__wait_drop(t);
    }

    pthread_mutex_unlock(&g->w->lock);

    return idist__trace_end(s);
}

idist_status idist_group_begin(void) {
    if (!idist__me.group_depth++) idist__me.group_status = IDIST_OK;
    return IDIST_OK;
}

idist_status idist_group_end(void) {
    idist__thread *self = &idist__me;
    char text[sizeof self->text];
    idist_status first;

    if (!self->group_depth)
        return idist__fail(IDIST_ERR_STATE, "group_end: without idist_group_begin");
    if (--self->group_depth) return IDIST_OK;
    idist__trace_begin("wait", "group_end", NULL, NULL);

    if (self->held_world) {
        idist__world *w = self->held_world;
        idist__world_lock(w);
        w->device_api->launch(w);
        pthread_mutex_unlock(&w->lock);
    }

    first = self->group_status;
    memcpy(text, self->group_text, sizeof text);

    while (self->group_tasks) {
        idist__task *t = self->group_tasks;
        idist__world *w = t->group->w;
        idist_status s;
        self->group_tasks = t->list_next;
        idist__world_lock(w);
        idist__wait_task(t);
        s = idist__wait_result(t);
        pthread_mutex_unlock(&w->lock);
        if (s == IDIST_OK || first != IDIST_OK) continue;
        first = s;
        memcpy(text, self->text, sizeof text);
    }

    if (first != IDIST_OK) memcpy(self->text, text, sizeof text);

    return idist__trace_end(first);
}

//------------------------------------------------------------------------------
// [calls:group]  groups and user ops
// uses err mem hash world core:call life coll
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

// Members agree on ctx without talking: it follows from the parent's, the number of groups made
// from it, and the color.
static uint64_t idist__group_ctx(const idist_group *parent, uint32_t nchildren, uint64_t color) {
    uint64_t ctx = idist__mix(idist__mix(parent->ctx, nchildren), color);
    return ctx ? ctx : 1;
}

// g has been made before the members agreed on it: from here on the others count on this rank.
static idist_status idist__group_make(idist_group *parent, idist_group *g, uint64_t color,
                                      const int *ranks, int n, idist_group **out) {
    idist__world *w = parent->w;
    idist_status s = IDIST_OK;

    idist__group_set(g, idist__group_ctx(parent, parent->nchildren, color), ranks, n);
    g->next = w->group.next;
    w->group.next = g;
    g->parent = parent;
    if (g->rank >= 0) s = w->backend->group_open(g);

    if (s != IDIST_OK) {
        g->rank = -1; // was never opened
        idist__group_free(g);
        idist__group_fail(parent, s, "a rank could not make its part of a new group");
        return s;
    }

    *out = g;

    return IDIST_OK;
}

// The members of a new group exchange what its backend wants to know. If the group fails meanwhile,
// because a member has aborted it or died, it exists all the same, as it does for those who had
// come further.
static idist_status idist__group_meet(idist_group **group, idist__kind label) {
    idist_group *g = *group;
    idist__world *w = g->w;
    idist_opts o;
    idist_status s;
    uint64_t *offers;

    if (g->rank < 0 || g->size == 1 || !w->backend->group_meet) {
        g->parent = NULL;
        return IDIST_OK;
    }

    if (g->parent->status !=
        IDIST_OK) { // failed meanwhile, perhaps because a member could not make its part
        idist__world_lock(w);
        idist__group_fail(g, g->parent->status, g->parent->cause);
        pthread_mutex_unlock(&w->lock);
    }

    offers = (uint64_t *)idist__mem_alloc(&w->cfg.mem, sizeof *offers * (size_t)(g->size + 1));
    if (!offers) {
        idist_abort(g);
        s = IDIST_ERR_NO_MEMORY;
    } else {
        memset(&o, 0, sizeof o);
        o.group = g;
        idist__world_lock(w);
        offers[g->size] = w->backend->group_offer(g);
        pthread_mutex_unlock(&w->lock);
        s = idist__collective(IDIST__ALL_GATHER, label, &offers[g->size], offers, 1, IDIST_U64,
                              IDIST_SUM, -1, &o);
        idist__world_lock(w);
        if (s == IDIST_OK && (s = w->backend->group_meet(g, offers)) != IDIST_OK)
            idist__group_fail(g, s, "a rank is out of memory");
        pthread_mutex_unlock(&w->lock);
    }

    g->parent = NULL;
    idist__mem_free(&w->cfg.mem, offers);
    if (s != IDIST_OK && g->status != IDIST_OK) s = IDIST_OK;

    if (s != IDIST_OK) {
        idist__world_lock(w);
        idist__group_free(g);
        pthread_mutex_unlock(&w->lock);
        *group = NULL;
    }

    return s;
}

// Lets go of the lock. The group is allocated before anybody counts on this rank. A backend without
// group_meet blocks while it opens a group: two at a time, in two orders on two ranks, would wait
// for each other.
static idist_status idist__group_making(const char *name, idist__world *w, int room,
                                        idist_group **g) {
    bool one = w->making_count && w->group.size > 1 && !w->backend->group_meet;

    *g = one ? NULL : idist__group_new(w, room);
    if (*g) w->making_count++;
    pthread_mutex_unlock(&w->lock);
    if (one)
        return idist__fail(IDIST_ERR_STATE,
                           "%s: another thread makes a group; with the backend %s one at a time",
                           name, w->backend->name);

    return *g ? IDIST_OK : IDIST_ERR_NO_MEMORY;
}

// The ranks agree, or not (s): opens the group, or frees it.
static idist_status idist__group_agreed(idist_group *parent, idist_group *g, idist_status s,
                                        uint64_t color, const int *ranks, int n, idist__kind label,
                                        idist_group **out) {
    idist__world *w = parent->w;

    idist__world_lock(w);
    if (s == IDIST_OK) parent->nchildren++;
    if (s == IDIST_OK) s = idist__group_make(parent, g, color, ranks, n, out);
    else idist__group_free(g);
    pthread_mutex_unlock(&w->lock);
    if (s == IDIST_OK) s = idist__group_meet(out, label);
    idist__world_lock(w);
    w->making_count--;
    pthread_mutex_unlock(&w->lock);

    return s;
}

static int idist__compare_ints(const void *a, const void *b) {
    int x = *(const int *)a, y = *(const int *)b;
    return (x > y) - (x < y);
}

// A barrier whose fingerprint carries the list, which is ascending.
static idist_status idist__group_barrier(int world_size, const int *ranks, int n) {
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
    idist_status s;

    if (!group) return idist__fail(IDIST_ERR_ARG, "new_group: group is NULL");
    *group = NULL;
    if ((s = idist__check_blocking("new_group", NULL)) != IDIST_OK) return s;
    if ((s = idist__call_enter("new_group", NULL, &world)) != IDIST_OK) return s;

    if (!ranks || n < 1 || n > world->size) {
        pthread_mutex_unlock(&world->w->lock);
        return idist__fail(IDIST_ERR_ARG, "new_group: needs 1 to %d ranks", world->size);
    }

    s = idist__group_making("new_group", world->w, n, &g);
    if (!g) return s;
    memcpy(g->ranks, ranks, sizeof(int) * (size_t)n);
    qsort(g->ranks, (size_t)n, sizeof(int), idist__compare_ints);
    s = idist__group_barrier(world->size, g->ranks, n);

    return idist__group_agreed(world, g, s, 0, g->ranks, n, IDIST__NEW_GROUP, group);
}

// The members of one color, ordered by key, then by rank in the parent. all: color and key of each
// rank.
static int idist__split_members(const idist_group *parent, const int *all, int color, int *ranks) {
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
    idist_status s;
    int mine[2], *all, n = 0;

    if (!group) return idist__fail(IDIST_ERR_ARG, "split: group is NULL");
    *group = NULL;
    if ((s = idist__check_blocking("split", NULL)) != IDIST_OK) return s;
    if ((s = idist__call_enter("split", parent, &p)) != IDIST_OK) return s;
    s = idist__group_making("split", p->w, p->size, &g);
    if (!g) return s;
    all = (int *)idist__mem_alloc(&p->w->cfg.mem, sizeof(int) * 4 * (size_t)p->size);
    memset(&o, 0, sizeof o);
    o.group = p;
    mine[0] = color < 0 ? -1 : color;
    mine[1] = key;
    s = all ? idist__collective(IDIST__ALL_GATHER, IDIST__SPLIT, mine, all, 2, IDIST_I32, IDIST_SUM,
                                -1, &o)
            : IDIST_ERR_NO_MEMORY;
    if (s == IDIST_OK) n = idist__split_members(p, all, mine[0], all + 2 * p->size);
    s = idist__group_agreed(p, g, s, (uint64_t)(int64_t)mine[0] + 1, all + 2 * p->size, n,
                            IDIST__SPLIT, group);
    idist__mem_free(&p->w->cfg.mem, all);

    return s;
}

static bool idist__group_settled(void *arg) { return !((const idist_group *)arg)->ndetached; }

idist_status idist_free_group(idist_group **group) {
    idist_group *g;
    idist__world *w;
    idist_status s = IDIST_OK;

    if (!group || !*group)
        return idist__fail(IDIST_ERR_ARG, "free_group: the group is NULL (freed already?)");
    g = *group;
    if (!g->w) { // the world has taken it along
        *group = NULL;
        return IDIST_OK;
    }

    if (g->freed) return idist__fail(IDIST_ERR_STATE, "free_group: the group was freed already");
    if (idist__world_enter("free_group", g->w) || idist__check_blocking("free_group", NULL))
        return IDIST_ERR_STATE;
    if (g == &g->w->group)
        return idist__fail(IDIST_ERR_ARG,
                           "free_group: a world ends by idist_finalize or idist_close");
    w = g->w;
    idist__world_lock(w);
    idist__world_wait(w, idist__group_settled, g);

    if (g->running_count || g->nrequests) {
        s = idist__fail(IDIST_ERR_STATE,
                        "free_group: requests are still open on it; wait for them first");
    } else {
        w->backend->progress(
            w); // messages for it that lie there: once it is gone nobody knows where they belong
        if (g->host_group) idist__group_free(g->host_group);
        idist__group_free(g);
        idist__world_wake_driver(w);
        *group = NULL;
    }

    pthread_mutex_unlock(&w->lock);

    return s;
}

static idist_status idist__needs_ulfm(const char *name) {
    return idist__fail(
        IDIST_ERR_UNSUPPORTED,
        "%s: by no backend but mpi, and that with Open MPI 5 under mpirun --with-ft ulfm", name);
}

idist_status idist_shrink(idist_group *group, idist_group **survivors) {
    idist_group *g, *made;
    idist_status s;
    uint32_t serial;
    int *ranks, n = 0;

    if (!survivors) return idist__fail(IDIST_ERR_ARG, "shrink: survivors is NULL");
    *survivors = NULL;
    if ((s = idist__check_blocking("shrink", NULL)) != IDIST_OK) return s;
    if ((s = idist__call_enter("shrink", group, &g)) != IDIST_OK) return s;
    made = idist__group_new(g->w, g->size);
    ranks = made ? (int *)idist__mem_alloc(&g->w->cfg.mem, sizeof(int) * (size_t)g->size) : NULL;
    serial = g->nchildren + 1;
    if (g->rank < 0)
        s = idist__fail(IDIST_ERR_STATE, "shrink: this rank is not a member of the group");
    else if (!g->w->backend->shrink) s = idist__needs_ulfm("shrink");
    else s = ranks ? g->w->backend->shrink(g, ranks, &n, &serial) : IDIST_ERR_NO_MEMORY;

    if (s == IDIST_OK) {
        g->nchildren = serial; // members may have come to different numbers when they lost a rank
        s = idist__group_make(g, made, 0, ranks, n, survivors);
        if (s == IDIST_OK) (*survivors)->parent = NULL; // there is nothing more to do for it
    } else if (made) {
        idist__group_free(made);
    }

    pthread_mutex_unlock(&g->w->lock);
    idist__mem_free(&g->w->cfg.mem, ranks);

    return s;
}

idist_status idist_agree(idist_group *group, int *flag) {
    idist_group *g;
    idist_status s;

    if (!flag) return idist__fail(IDIST_ERR_ARG, "agree: flag is NULL");
    if ((s = idist__check_blocking("agree", NULL)) != IDIST_OK) return s;
    if ((s = idist__call_enter("agree", group, &g)) != IDIST_OK) return s;
    if (g->rank < 0)
        s = idist__fail(IDIST_ERR_STATE, "agree: this rank is not a member of the group");
    else if (g->size > 1 && !g->w->backend->agree) s = idist__needs_ulfm("agree");
    else if (g->size > 1) s = g->w->backend->agree(g, flag);
    pthread_mutex_unlock(&g->w->lock);

    return s;
}

static idist_status idist__op_add(const char *name, idist_op_fn fn, void *arg, double factor,
                                  bool commutative, idist_group *group, idist_op *op) {
    idist_group *g;
    idist_status s;
    size_t i;

    if (!op) return idist__fail(IDIST_ERR_ARG, "%s: op is NULL", name);
    *op = IDIST_OP_COUNT;
    if ((s = idist__call_enter(name, group, &g)) != IDIST_OK) return s;
    for (i = 0; i < IDIST__COUNT_OF(g->w->ops) && g->w->ops[i].used; i++) continue;

    if (i == IDIST__COUNT_OF(g->w->ops)) {
        s = idist__fail(IDIST_ERR_NO_SPACE, "%s: a world has room for %zu ops", name, i);
    } else {
        idist__user_op *u = &g->w->ops[i];
        u->fn = fn;
        u->arg = arg;
        u->factor = factor;
        u->commutative = commutative;
        u->used = true;
        *op = (idist_op)(IDIST_OP_USER + (int)i);
    }

    pthread_mutex_unlock(&g->w->lock);

    return s;
}

idist_status idist_op_create(idist_op_fn fn, void *arg, bool commutative, idist_group *group,
                             idist_op *op) {
    if (!fn) return idist__fail(IDIST_ERR_ARG, "op_create: fn is NULL");
    return idist__op_add("op_create", fn, arg, 1, commutative, group, op);
}

idist_status idist_op_create_premul_sum(double factor, idist_group *group, idist_op *op) {
    return idist__op_add("op_create_premul_sum", NULL, NULL, factor, true, group, op);
}

idist_status idist_op_free(idist_op op, idist_group *group) {
    idist_group *g;
    idist_status s = idist__call_enter("op_free", group, &g);

    if (s != IDIST_OK) return s;
    if ((int)op < IDIST_OP_USER || (int)op > IDIST_OP_LAST || !g->w->ops[op - IDIST_OP_USER].used)
        s = idist__fail(IDIST_ERR_ARG, "op_free: %d is no user op of this world", (int)op);
    else g->w->ops[op - IDIST_OP_USER].used = false;
    pthread_mutex_unlock(&g->w->lock);

    return s;
}

void *idist_alloc(size_t nbytes, const idist_opts *opts) {
    idist__world *w = opts && opts->group ? opts->group->w : idist__world_default();
    void *p = NULL;

    if (opts && opts->group && !w) {
        idist__fail(IDIST_ERR_STATE, "alloc: the world of this group was closed");
        return NULL;
    }

    if (w && !idist__world_forked(w) && w->backend->alloc &&
        (p = w->backend->alloc(w, nbytes)) != NULL)
        return p;

    if (nbytes > SIZE_MAX / 2 ||
        posix_memalign(&p, 64, nbytes ? (nbytes + 63) & ~(size_t)63 : 64) != 0) {
        idist__fail(IDIST_ERR_NO_MEMORY, "alloc: no memory for %zu bytes", nbytes);
        return NULL;
    }

    memset(p, 0, nbytes ? nbytes : 1);

    return p;
}

void idist_free(void *ptr) {
    if (ptr && !idist__window_free(ptr)) free(ptr);
}

//------------------------------------------------------------------------------
// [calls:help]  one rank first, one rank only
// uses err world core:call life coll group
//------------------------------------------------------------------------------

// fn's result goes to everybody by a broadcast, so that a failure ends the wait instead of
// prolonging it.
static idist_status idist__tell_result(idist__kind label, int rank, bool mine, int result,
                                       const idist_opts *o) {
    int32_t r = mine ? (int32_t)result : 0;
    idist_status s =
        idist__collective(IDIST__BROADCAST, label, NULL, &r, 1, IDIST_I32, IDIST_SUM, rank, o);

    if (s != IDIST_OK || !r) return s;
    return idist__fail(IDIST_ERR_CALLBACK, "%s: the function failed on rank %d with %d",
                       idist__kind_names[label], rank, (int)r);
}

idist_status idist_one_rank_first(idist_task_fn fn, void *arg, int rank, bool local,
                                  const idist_opts *opts) {
    idist_opts o;
    idist_status s;
    idist_group *g;
    bool first;
    int result = 0;

    memset(&o, 0, sizeof o);
    if (opts) o = *opts;
    if (!fn) return idist__fail(IDIST_ERR_ARG, "one_rank_first: fn is NULL");
    if ((s = idist__check_blocking("one_rank_first", opts)) != IDIST_OK) return s;
    if ((s = idist__call_enter("one_rank_first", o.group, &g)) != IDIST_OK) return s;
    if (g->status != IDIST_OK)
        s = idist__fail(g->status, "one_rank_first: the group failed earlier: %s", g->cause);
    pthread_mutex_unlock(&g->w->lock);
    if (s != IDIST_OK) return s;

    if (local && !g->host_group && g->rank >= 0) {
        idist_group *node = NULL;
        s = idist_split(g, g->w->nodes[g->w->group.rank].node_rank, 0, &node);
        if (s != IDIST_OK) return s;
        g->host_group = node;
    }

    if (local) o.group = g->host_group;
    if (rank < 0 || rank >= idist_group_size(local ? g->host_group : g))
        return idist__fail(IDIST_ERR_ARG,
                           "one_rank_first: rank should be between 0 and %d, but is %d",
                           idist_group_size(local ? g->host_group : g) - 1, rank);
    first = idist_group_rank(local ? g->host_group : g) == rank;
    if (first) result = fn(arg);
    if ((s = idist__tell_result(IDIST__ONE_RANK_FIRST, rank, first, result, &o)) != IDIST_OK ||
        first)
        return s;
    result = fn(arg);

    return result ? idist__fail(IDIST_ERR_CALLBACK,
                                "one_rank_first: the function failed here with %d", result)
                  : IDIST_OK;
}

idist_status idist_one_rank_only(idist_task_fn fn, void *arg, int rank, bool barrier,
                                 const idist_opts *opts) {
    const idist_group *group = opts ? opts->group : NULL;
    idist_group *g = NULL;
    idist_status s;
    bool mine = idist_group_rank(group) == rank;
    int result = 0;

    if (!fn) return idist__fail(IDIST_ERR_ARG, "one_rank_only: fn is NULL");
    if ((s = idist__check_blocking("one_rank_only", opts)) != IDIST_OK) return s;
    if (rank < 0 || rank >= idist_group_size(group))
        return idist__fail(IDIST_ERR_ARG,
                           "one_rank_only: rank should be between 0 and %d, but is %d",
                           idist_group_size(group) - 1, rank);
    s = idist__call_enter("one_rank_only", opts ? opts->group : NULL, &g);
    if (!g) return s;
    pthread_mutex_unlock(&g->w->lock);
    if (mine) result = fn(arg);
    if (barrier) return idist__tell_result(IDIST__ONE_RANK_ONLY, rank, mine, result, opts);

    return result ? idist__fail(IDIST_ERR_CALLBACK,
                                "one_rank_only: the function failed here with %d", result)
                  : IDIST_OK;
}

#endif // IDIST_CALLS_H
