/* idist_join.h - v0.2.0 - how ranks meet - MIT licence

    What idist_initialize does in the ring backend: the ranks meet in a key-value store, learn where
    each of them listens, agree on shared memory inside each host, and connect the pairs that have
    none: all of them, or in a world of many ranks some ([join:links]). From then on nobody needs
    the store, and nobody listens any more, unless connections are still to be made.

    Part of the implementation of idist: idist_ring.h includes it. The way in is idist__join_open.

CONTENTS

      [join:state]    what the sections below share
      [join:failure]  a rank that gives up, and how the others learn why
      [join:store]    opening the store, and values that a rank waits for
      [join:table]    the number of the job, and a record of every rank
      [join:links]    connections that ranks need from the start
      [join:share]    memory shared inside a host
      [join:open]     all steps in order; making and freeing the ring

STEPS

    What the ranks write into the store, in order; R is a rank. All names begin with a prefix that
    no other world uses.

      idist/ranks in a file: whether ranks are drawn (rank 0)     idist__draw_check_given
      idist/R     how many worlds rank R has opened here          idist__join_store_open
      job         number of the job, number of ranks (rank 0)     idist__records_agree_on_job
      node/R      what rank R says about itself                   idist__records_exchange
      nodes       all of these, collected by rank 0
      tcp/R       where rank R listens for other hosts            idist__records_listen_tcp
      -           ranks of a host map one file in memory          idist__join_share_share
      -           each rank connects to other, lower ones         idist__links_connect
      joined/R    rank R is done; rank 0 awaits all of them and   idist__join_store_leave
                  closes the store

    And when a rank cannot join:

      failed      why a rank gave up                              idist__join_failure_tell
      heard       how many ranks have read that
*/
#ifndef IDIST_JOIN_H
#define IDIST_JOIN_H

//------------------------------------------------------------------------------
// [join:state]  what the sections below share
// uses clock store:table server client store:store model msg:types connector
//------------------------------------------------------------------------------

// Values of idist__config.transport that matter here.
enum { IDIST__JOIN_AUTO = 0, IDIST__JOIN_TCP_ONLY = 2 };

typedef struct idist__record { // what a rank says about itself
    char hostname[64];
    uint64_t host;       // equal for all ranks of a host
    char local[64];      // address of its local socket, or ""
    uint64_t processors; // equal for all ranks that have the same ones
    uint32_t shm;        // whether it takes part in shared memory
    uint32_t algorithm;  // its setting IDIST_ALGO, which must be equal on all ranks
    uint64_t loopback;   // idist__config_reach_key, if it has reached the store by loopback; else 0
} idist__record;

typedef struct idist__tcp_record {
    char text[160];         // where a rank listens: "tcp:[ADDRESS]:PORT"
    uint32_t round_trip_us; // to the server of the store; 0: not known
    uint32_t mbits;         // bandwidth of the interface; 0: not known
    uint32_t sockets;       // its setting IDIST_SOCKETS; 0: automatic
    uint64_t window_nbytes; // that can be under way in one socket; 0: not known
} idist__tcp_record;

typedef struct idist__join {
    idist__world *w;
    idist__ring *ring;
    idist_store *store;
    bool owns_store;              // we opened it; otherwise it is the user's
    bool others_know;             // somebody else has told all ranks why we give up
    bool told_by_server;          // ... namely the server, for a process that ended
    bool voting;                  // we gave up while the connections of this host carry votes
    bool warned;                  // that the server has refused a process
    char prefix[64];              // of our names in the store
    idist__tcp_record *tcp;       // by rank; NULL: there is no TCP
    const idist__record *records; // by rank
    idist__connector *connector;
    bool *wanted;     // by rank: a connection is needed now, and there is none yet
    int wanted_count; // ranks of which that is true
    int64_t deadline_ns;
} idist__join;

// The name of a value in the store, of one rank or (rank < 0) of all.
static void idist__join_state_name(const idist__join *j, char *name, size_t capacity,
                                   const char *what, int rank) {
    if (rank < 0) snprintf(name, capacity, "%s%s", j->prefix, what);
    else snprintf(name, capacity, "%s%s/%d", j->prefix, what, rank);
}

static idist_status idist__join_state_set(idist__join *j, const char *what, int rank,
                                          const void *value, size_t nbytes) {
    char name[128];
    idist__join_state_name(j, name, sizeof name, what, rank);
    return idist__store_post(j->store, name, value, nbytes);
}

// Whether the store is that of a torch agent, which outlives the workers.
static bool idist__join_state_is_torch(const idist__join *j) {
    return strncmp(j->w->cfg.where, "torch:", 6) == 0;
}

// The server of our store, if it runs in this process.
static const idist__server *idist__join_state_server(const idist__join *j) {
    if (!j->owns_store || j->store->run != idist__client_run) return NULL;
    return ((const idist__client_store *)j->store->impl)->server;
}

// How often a waiting rank asks whether another one has given up: less often in a large world,
// where all ranks ask one server.
static int idist__join_state_ask_ms(const idist__join *j) {
    return j->w->group.size < 800 ? 100 + j->w->group.size / 2 : 500;
}

// Milliseconds until the deadline, at least 1; negative: there is none.
static int idist__join_state_ms_left(const idist__join *j) {
    int64_t left;

    if (j->deadline_ns == IDIST__FOREVER) return -1;
    left = (j->deadline_ns - idist__os_clock_now_ns()) / IDIST__MS;
    if (left < 1) return 1;
    return left > INT32_MAX ? INT32_MAX : (int)left;
}

//------------------------------------------------------------------------------
// [join:failure]  a rank that gives up, and how the others learn why
// uses clock fail text base:log server store:store claim state
//
// If one rank cannot join, no rank can. A rank that has joined by then learns it from its first
// call, because the group of the world has failed. To spare the others their
// time-out, the rank writes the reason into the store ("failed"), where waiting ranks look for it
// now and then. A rank that has read it counts itself in "heard"; the owner of the store keeps the
// store open until all of them have, or for half a second.
//
// A process that dies cannot do that. The store sets "failed" for it, see [launch:claim].
//------------------------------------------------------------------------------

enum { IDIST__FAILURE_STAY_MS = 500, IDIST__FAILURE_LOST_MS = 300 };

// Rank 0 has a connection of the store and the sockets of a link for each rank.
static idist_status idist__join_failure_no_fds(const idist__join *j) {
    int sockets = j->connector ? j->connector->socket_count : 1;

    return idist__fail(
        IDIST_ERR_NO_FDS,
        "initialize: out of file descriptors; a world of %d needs up to %d: raise ulimit -n",
        j->w->group.size, (1 + sockets) * j->w->group.size + 8);
}

// Adds what the server knows to the error text that names the late ranks.
static idist_status idist__join_failure_hint(const idist__join *j) {
    const idist__server *server = idist__join_state_server(j);
    int refused = server ? __atomic_load_n(&server->refused_count, __ATOMIC_RELAXED) : 0;

    if (server && __atomic_load_n(&server->other_byte_order, __ATOMIC_RELAXED))
        idist__text_append(
            idist__me.text, sizeof idist__me.text,
            ". A rank runs on a machine of another byte order; mixed worlds are not supported");
    else if (server && __atomic_load_n(&server->is_unlike, __ATOMIC_ACQUIRE))
        idist__text_append(idist__me.text, sizeof idist__me.text, ". Meanwhile %s", server->unlike);
    else if (refused)
        idist__text_append(
            idist__me.text, sizeof idist__me.text,
            ". %d connections were refused or broke off: a wrong secret, another build, "
            "a stranger, or a rank that died",
            refused);

    return IDIST_ERR_TIMEOUT;
}

// If the server of the store ended, says which process that was.
static void idist__join_failure_of_store(const idist__join *j, idist_status status) {
    bool by_rank_0 = j->w->cfg.store == NULL && !idist__join_state_is_torch(j);
    char text[sizeof idist__me.text];
    const char *cause = text;

    memcpy(text, idist__me.text, sizeof text);
    if (strncmp(cause, "initialize: ", 12) == 0) cause += 12;
    if (status != IDIST_ERR_PEER_LOST || strncmp(cause, "store: ", 7) != 0) return;
    idist__fail(status, "initialize: %s: %s",
                by_rank_0 ? "rank 0 was lost, or gave up" : "the store's server was lost",
                cause + 7);
}

// Reports a process that has another secret at once, because the ranks may wait for that process
// until their time-out. It may as well be a stranger.
static void idist__join_failure_warn(idist__join *j) {
    const idist__server *server = idist__join_state_server(j);

    if (j->warned || !server || !__atomic_load_n(&server->is_unlike, __ATOMIC_ACQUIRE)) return;
    j->warned = true;
    idist__log_print(&j->w->log, IDIST_LOG_WARN,
                     "initialize: %s (unless that is no process of this job)", server->unlike);
}

// Fails for the same reason if some rank has given up.
static idist_status idist__join_failure_check(idist__join *j) {
    const idist__server *server = idist__join_state_server(j);
    idist__failure failure;
    char name[128];
    const char *names[1];
    bool exists = false;
    size_t nbytes = 0;
    idist_status status;

    if (server && __atomic_load_n(&server->out_of_fds, __ATOMIC_RELAXED))
        return idist__join_failure_no_fds(j);
    idist__join_failure_warn(j);

    names[0] = name;
    idist__join_state_name(j, name, sizeof name, "failed", -1);
    status = idist_store_check(j->store, names, 1, &exists);
    if (status == IDIST_ERR_PEER_LOST) return status;
    if (status != IDIST_OK || !exists) return IDIST_OK;
    status = idist_store_get(j->store, name, &failure, sizeof failure, &nbytes, 1000);
    if (status != IDIST_OK || nbytes != sizeof failure) return IDIST_OK;

    failure.text[sizeof failure.text - 1] = 0;
    j->others_know = true;
    j->told_by_server = failure.by_will != 0;

    if (failure.status == IDIST_ERR_TIMEOUT) { // its text names the ranks that are late
        idist__fail(IDIST_ERR_TIMEOUT, "initialize: %s", failure.text);
        return idist__join_failure_hint(j);
    }

    if (failure.rank < 0)
        return idist__fail((idist_status)failure.status,
                           "initialize: a process that had drawn its rank could not join: %s",
                           failure.text);

    return idist__fail((idist_status)failure.status, "initialize: rank %d could not join: %s",
                       (int)failure.rank, failure.text);
}

// Keeps the store open until all others have read why, or for a moment.
static void idist__join_failure_stay(idist__join *j) {
    int64_t until_ns = idist__os_clock_deadline(IDIST__FAILURE_STAY_MS);
    int64_t heard = 0;
    int others = j->w->group.size - 1 - (j->told_by_server ? 1 : 0);
    char name[128];

    idist__join_state_name(j, name, sizeof name, "heard", -1);

    while (idist_store_add(j->store, name, 0, &heard) == IDIST_OK && heard < others) {
        if (idist__os_clock_now_ns() >= until_ns) break;
        idist__os_clock_pause_ms(5);
    }
}

// Tells the others why this rank gives up, unless the reason came from them.
static void idist__join_failure_tell(idist__join *j, idist_status status) {
    idist__failure failure;
    char name[128], text[sizeof idist__me.text];
    int64_t heard;

    if (!j->store || !j->prefix[0]) return;
    memcpy(text, idist__me.text, sizeof text); // the store may overwrite it
    memset(&failure, 0, sizeof failure);
    failure.status = (int32_t)status;
    failure.rank = j->w->group.rank;
    idist__text_copy(failure.text, sizeof failure.text,
                     strncmp(text, "initialize: ", 12) == 0 ? text + 12 : text);

    // If this does not reach the store, the others learn of it when the store ends.
    idist__join_state_name(j, name, sizeof name, "failed", -1);
    if (!j->others_know) idist_store_set(j->store, name, &failure, sizeof failure);
    idist__store_drop_will(j->store);

    idist__join_state_name(j, name, sizeof name, "heard", -1);
    if (failure.rank > 0) idist_store_add(j->store, name, 1, &heard);
    else if (j->owns_store) idist__join_failure_stay(j);
    memcpy(idist__me.text, text, sizeof text);
}

// The connection to a rank ended. It may have given up and said why, or the server is about to say
// that it died.
static idist_status idist__join_failure_lost(idist__join *j, int rank, const char *how) {
    int64_t until_ns = idist__os_clock_deadline(IDIST__FAILURE_LOST_MS);
    char text[300];

    idist__text_copy(text, sizeof text, how); // it may lie where a failure writes its text

    do {
        idist_status status = idist__join_failure_check(j);
        if (status != IDIST_OK) return status;
        idist__os_clock_pause_ms(10);
    } while (idist__os_clock_ms_until(until_ns) != 0);

    return idist__fail(IDIST_ERR_PEER_LOST, "initialize: rank %d on %s was lost: %s", rank,
                       j->w->nodes[rank].hostname, text);
}

// The time is up, and the server of the store has not said who is missing.
static idist_status idist__join_failure_silent(const idist__join *j) {
    bool by_rank_0 = j->w->cfg.store == NULL && !idist__join_state_is_torch(j);

    return idist__fail(IDIST_ERR_TIMEOUT,
                       "initialize: %s does not answer any more: it is stopped, or the network to "
                       "it broke",
                       by_rank_0 ? "rank 0" : "the store's server");
}

// The time is up, and rank 0 has not set this value, without which there is no job.
static idist_status idist__join_failure_without_0(idist__join *j, const char *name) {
    const char *names[1];
    bool exists;

    names[0] = name;
    if (idist_store_check(j->store, names, 1, &exists) == IDIST_ERR_TIMEOUT)
        return idist__join_failure_silent(j);

    idist__fail(IDIST_ERR_TIMEOUT, "initialize: rank 0 did not show up within %d ms",
                j->w->cfg.init_timeout_ms);

    return idist__join_failure_hint(j);
}

// The time is up: names the ranks, from `rank` on, that have not set this value.
static idist_status idist__join_failure_late(idist__join *j, const char *what, int rank) {
    char name[128], text[300] = "";
    int i, missing = 0;
    idist_status status;

    for (i = rank; i < j->w->group.size; i++) {
        const char *names[1];
        bool exists = true;

        names[0] = name;
        idist__join_state_name(j, name, sizeof name, what, i);
        status = idist_store_check(j->store, names, 1, &exists);
        if (status == IDIST_ERR_TIMEOUT) return idist__join_failure_silent(j);
        if (status != IDIST_OK || exists) continue;
        if (missing++ < 16)
            idist__text_append(text, sizeof text, "%s%d", missing > 1 ? ", " : "", i);
    }

    if (!missing)
        return idist__fail(IDIST_ERR_TIMEOUT, "initialize: rank %d showed up too late, after %d ms",
                           rank, j->w->cfg.init_timeout_ms);

    if (strcmp(what, "joined") == 0) {
        idist__fail(
            IDIST_ERR_TIMEOUT,
            "initialize: %d of %d ranks showed up, but did not finish connecting to others "
            "within %d ms: rank %s%s. A firewall, a missing route or a rank that is stopped "
            "can be why",
            missing, j->w->group.size, j->w->cfg.init_timeout_ms, text,
            missing > 16 ? ", ..." : "");
        return idist__join_failure_hint(j);
    }

    idist__fail(IDIST_ERR_TIMEOUT,
                "initialize: %d of %d ranks did not show up within %d ms: rank %s%s", missing,
                j->w->group.size, j->w->cfg.init_timeout_ms, text, missing > 16 ? ", ..." : "");
    if (!j->w->cfg.store && strncmp(j->w->cfg.where, "unix:", 5) == 0)
        idist__text_append(
            idist__me.text, sizeof idist__me.text,
            ". The ranks meet at a local socket, which those of another user, network "
            "namespace (container) or host cannot reach");
    if (j->w->cfg.rank_drawn)
        idist__text_append(idist__me.text, sizeof idist__me.text,
                           ". Ranks are drawn from %s: start %d processes there",
                           j->w->cfg.where + 5, j->w->group.size);

    return idist__join_failure_hint(j);
}

//------------------------------------------------------------------------------
// [join:store]  opening the store, and values that a rank waits for
// uses clock os:env fail client store:store launch:env pmi claim draw state
// uses failure
//
// Worlds made one after another through the same store must not see each other's values. So each
// rank counts its worlds in the store, and the count is part of all names. In a store of our own
// the count can only be 1; a higher one means that two processes have the same rank. A torch agent
// keeps its store when it restarts the workers, so there the number of restarts is part of the
// names too.
//------------------------------------------------------------------------------

enum { IDIST__JOIN_BATCH = 64 }; // values that one request waits for

// Waits for a value. After a time-out the error names the ranks that have not set it, or that have
// not set `cause`, a value that must exist first. A value of the job, without a rank, is rank 0's.
static idist_status idist__join_store_get(idist__join *j, const char *what, int rank,
                                          const char *cause, void *value, size_t nbytes) {
    char name[128];
    size_t received = 0;
    int ask_ms = idist__join_state_ask_ms(j);
    idist_status status;

    idist__join_state_name(j, name, sizeof name, what, rank);

    do {
        int ms = idist__join_state_ms_left(j);

        if (ms < 0 || ms > ask_ms) ms = ask_ms;
        status = idist_store_get(j->store, name, value, nbytes, &received, ms);
        if (status == IDIST_OK && received != nbytes)
            return idist__fail(IDIST_ERR_UNSUPPORTED,
                               "initialize: rank %d was built from another version of idist.h",
                               rank < 0 ? 0 : rank); // values of the job come from rank 0
        if (status != IDIST_ERR_TIMEOUT) return status;
        status = idist__join_failure_check(j);
        if (status != IDIST_OK) return status;
    } while (idist__os_clock_ms_until(j->deadline_ns) != 0);

    if (rank < 0 && !cause) return idist__join_failure_without_0(j, name);

    return idist__join_failure_late(j, cause ? cause : what, rank < 0 ? 0 : rank);
}

// Waits until these ranks, at most IDIST__JOIN_BATCH of them, have set a value.
static idist_status idist__join_store_await_some(idist__join *j, const char *what, int first,
                                                 int count) {
    char names[IDIST__JOIN_BATCH][128];
    const char *list[IDIST__JOIN_BATCH];
    int i, ask_ms = idist__join_state_ask_ms(j);
    idist_status status;

    for (i = 0; i < count; i++) {
        idist__join_state_name(j, names[i], sizeof names[i], what, first + i);
        list[i] = names[i];
    }

    do {
        int ms = idist__join_state_ms_left(j);

        if (ms < 0 || ms > ask_ms) ms = ask_ms;
        status = idist__store_await_keys(j->store, list, (size_t)count, ms);
        if (status != IDIST_ERR_TIMEOUT) return status;
        status = idist__join_failure_check(j);
        if (status != IDIST_OK) return status;
    } while (idist__os_clock_ms_until(j->deadline_ns) != 0);

    return idist__join_failure_late(j, what, 0);
}

// Waits until all ranks have set a value, by few requests: each of them may have to wait for a
// processor that hundreds of ranks want.
static idist_status idist__join_store_await_all(idist__join *j, const char *what) {
    int first, n = j->w->group.size;
    idist_status status = IDIST_OK;

    for (first = 0; first < n && status == IDIST_OK; first += IDIST__JOIN_BATCH) {
        int left = n - first;

        if (left > IDIST__JOIN_BATCH) left = IDIST__JOIN_BATCH;
        status = idist__join_store_await_some(j, what, first, left);
    }

    return status;
}

// Opens the store of a new world. Rank 0 may still serve, at the same address, the store of the
// last world that this thread joined or failed to join. It may also close that store during our
// handshake. This can happen once, so a second loss is that of the new rank 0.
static idist_status idist__join_store_open_new(idist__join *j, const idist_store_desc *desc) {
    idist__config *cfg = &j->w->cfg;
    uint64_t last = desc->server ? 0 : idist__me.join_server;
    idist_store_desc d = *desc;
    bool may_close = last != 0;

    for (;;) {
        idist_status status = idist__store_open(cfg->where, &d, cfg->listener, &j->store);
        bool closes = may_close && status == IDIST_ERR_PEER_LOST;

        if (closes) may_close = false;
        cfg->listener = -1; // the store owns it now

        if (status == IDIST_OK && last && idist__store_server_id(j->store) == last) {
            idist_store_close(&j->store);
            closes = true;
        }

        if (status == IDIST_OK && !closes) idist__me.join_server = idist__store_server_id(j->store);
        if (!closes) return status;
        if (idist__os_clock_ms_until(j->deadline_ns) == 0)
            return idist__fail(IDIST_ERR_TIMEOUT, "store: rank 0 at %s has not begun another world",
                               cfg->where);
        idist__os_clock_pause_ms(1);
        d.timeout_ms = idist__join_state_ms_left(j);
    }
}

// Opens the store of a new world at the address, and in a file waits until that of the last world,
// which this thread may have given up before the others, is gone.
static idist_status idist__join_store_open_next(idist__join *j, idist_store_desc *desc) {
    idist__config *cfg = &j->w->cfg;
    bool again = false;

    for (;;) {
        idist_status status = idist__join_store_open_new(j, desc);

        if (status == IDIST_ERR_ADDR_IN_USE && cfg->may_draw)
            return idist__fail(status,
                               "initialize: %s (this process is rank 0; to draw a rank, set none, "
                               "or desc.rank -1)",
                               idist__me.text);
        if (status != IDIST_OK) return idist__fail(status, "initialize: %s", idist__me.text);
        j->owns_store = true;
        if (!cfg->may_draw) return IDIST_OK;
        status = idist__draw_check_given(cfg, j->store, &again);
        if (!again) return status;

        idist_store_close(&j->store);
        j->owns_store = false;
        if (idist__os_clock_ms_until(j->deadline_ns) == 0) return idist__draw_still_held(cfg);
        idist__os_clock_pause_ms(IDIST__DRAW_AGAIN_MS);
        desc->timeout_ms = idist__join_state_ms_left(j);
    }
}

// Opens a store of our own at the address from the launcher or the environment.
static idist_status idist__join_store_open_own(idist__join *j) {
    idist__config *cfg = &j->w->cfg;
    idist_store_desc desc;
    idist_status status;

    if (!cfg->where[0])
        return idist__fail(IDIST_ERR_ENV,
                           "rank %d of %d (%s): MASTER_ADDR is not set, so the ranks cannot find "
                           "each other. Set MASTER_ADDR and MASTER_PORT to rank 0's host and a "
                           "free port there (127.0.0.1 when all ranks are on this host)",
                           cfg->rank, cfg->world_size,
                           cfg->rank_var ? cfg->rank_var : cfg->launcher);

    if (strcmp(cfg->where, "pmi:") == 0) {
        status = idist__pmi_share_address(cfg);
        if (status != IDIST_OK) return status;
    }

    if (cfg->drawn) { // our rank came from it
        j->store = cfg->drawn;
        cfg->drawn = NULL;
        j->owns_store = true;
        return IDIST_OK;
    }

    memset(&desc, 0, sizeof desc);
    desc.server = cfg->rank == 0;
    desc.timeout_ms = cfg->init_timeout_ms;
    desc.secret = cfg->secret.nbytes ? cfg->secret.bytes : NULL;
    desc.secret_nbytes = cfg->secret.nbytes;
    desc.allocator = cfg->mem;

    return idist__join_store_open_next(j, &desc);
}

static idist_status idist__join_store_rank_taken(const idist__join *j) {
    const idist__config *cfg = &j->w->cfg;

    return idist__fail(IDIST_ERR_RANK_TAKEN,
                       "initialize: another process is already rank %d of this job (%s)", cfg->rank,
                       cfg->rank_var ? cfg->rank_var : "desc.rank");
}

// Whether this rank's number comes together with the answer to its next request, which saves a
// round trip. See idist__join_store_claim.
static bool idist__join_store_claims_late(const idist__join *j) {
    if (!j->owns_store || j->w->cfg.rank == 0 || idist__join_state_is_torch(j)) return false;
    return j->store->run == idist__client_run; // NOLINT(clang-analyzer-core.NullDereference)
}

// The request after the number has ended with this status: whether we are the only process with
// this rank. If we are not, or cannot tell, the others are told nothing of us.
static idist_status idist__join_store_claim(idist__join *j, idist_status status) {
    if (!idist__join_store_claims_late(j)) return status;

    if (idist__store_posted_sum(j->store) == 1) return status;
    j->prefix[0] = 0;

    return status == IDIST_OK ? idist__join_store_rank_taken(j) : status;
}

static idist_status idist__join_store_open(idist__join *j) {
    const idist__config *cfg = &j->w->cfg;
    const char *restart = idist__os_env("TORCHELASTIC_RESTART_COUNT");
    bool torch = idist__join_state_is_torch(j);
    char base[40] = "idist", name[64], failed[64];
    int64_t world_number = 0;
    idist_status status;

    j->store = cfg->store;

    if (!j->store) {
        status = idist__join_store_open_own(j);
        if (status != IDIST_OK) return status;
    }

    if (torch) snprintf(base, sizeof base, "idist-%.20s", restart ? restart : "0");
    snprintf(name, sizeof name, "%s/%d", base, cfg->rank);
    snprintf(failed, sizeof failed, "%s/%%/failed", base);

    if (idist__join_store_claims_late(j)) {
        snprintf(j->prefix, sizeof j->prefix, "%s/1/", base);
        return idist__claim_run(j->store, name, failed, cfg->rank, NULL);
    }

    status = idist__claim_run(j->store, name, failed, cfg->rank, &world_number);
    if (status != IDIST_OK) return status;
    if (j->owns_store && world_number != 1 && !torch) return idist__join_store_rank_taken(j);

    snprintf(j->prefix, sizeof j->prefix, "%s/%lld/", base, (long long)world_number);

    return IDIST_OK;
}

// This rank is done. Rank 0 closes the store only when all ranks are, because until then they learn
// of a death through it. (It may close the store before it has answered the last request.) The
// others wait for that if the store is in a file: should they open another world there, they must
// not find the store of this one. Over sockets, idist__join_store_open_new sees to that, without
// another round trip for all who do not.
static idist_status idist__join_store_leave(idist__join *j) {
    char one = 1;
    idist_status status = idist__join_state_set(j, "joined", j->w->group.rank, &one, sizeof one);

    if (status == IDIST_OK) idist__store_drop_will(j->store);
    if (!j->owns_store || status != IDIST_OK) return status;
    if (j->w->group.rank == 0) return idist__join_store_await_all(j, "joined");
    idist__store_await_end(j->store, j->deadline_ns);

    return IDIST_OK;
}

//------------------------------------------------------------------------------
// [join:table]  the number of the job, and a record of every rank
// uses os:random os:env socket fail text mem sha address interface connection
// uses secret client config model msg:types state store
//
// Rank 0 draws a random job number, from which the key of all connections is derived. Each rank
// then publishes a record: its host, and where its local socket listens. Rank 0 collects the
// records in one table, so that n ranks take 2 n requests rather than n * n. The table tells
// whether TCP is needed at all.
//------------------------------------------------------------------------------

// Rank 0 publishes the job number and the number of ranks, which every other rank compares with its
// own.
static idist_status idist__records_agree_on_job(idist__join *j) {
    uint64_t job[2] = {0, 0}; // number of the job, number of ranks
    uint8_t key[32];
    idist_status status;

    if (j->w->group.rank == 0) {
        idist__os_random(job, sizeof job);
        job[1] = (uint64_t)j->w->group.size;
        status = idist__join_state_set(j, "job", -1, job, sizeof job);
    } else {
        status = idist__join_store_get(j, "job", -1, NULL, job, sizeof job);
        status = idist__join_store_claim(j, status);
    }

    if (status != IDIST_OK) return status;
    if (job[1] != (uint64_t)j->w->group.size)
        return idist__fail(
            IDIST_ERR_ENV,
            "initialize: rank 0 was started with a world of %llu ranks, this rank with %d%s",
            (unsigned long long)job[1], j->w->group.size,
            j->owns_store ? ""
                          : "; or that was an earlier world at desc.store: give each world a view "
                            "with a prefix of its own (idist_store_prefix)");

    j->connector->job = job[0];
    idist__secret_key(&j->w->cfg.secret, key);
    idist__sha_hmac(key, "links", &job[0], sizeof job[0], NULL, 0, j->connector->key);

    return IDIST_OK;
}

static idist_status idist__records_listen_local(idist__join *j, idist__record *me) {
    idist__os_address address;
    uint64_t id[2];
    idist_status status;

    idist__os_random(id, sizeof id);
    snprintf(me->local, sizeof me->local, "unix:idist-%016llx%016llx", (unsigned long long)id[0],
             (unsigned long long)id[1]);
    status = idist__address_parse(&address, me->local);
    if (status != IDIST_OK) return status;

    return idist__connection_listen(&address, me->local, &j->connector->listeners[0]);
}

// Our end of the connection to the store. False: it is no TCP connection of ours.
static bool idist__records_store_address(const idist__join *j, idist__os_address *address) {
    return j->owns_store && j->store->run == idist__client_run &&
           idist__os_socket_own_address(((idist__client_store *)j->store->impl)->fd, address) &&
           !idist__os_socket_is_local(address);
}

// The address to publish. by_loopback: all ranks are on one host, and use TCP because the user
// wants it, or have reached the store through loopback, so that they reach each other as well.
static idist_status idist__records_own_address(const idist__join *j, bool by_loopback,
                                               idist__own_address *own) {
    idist__os_address hint;

    if (!by_loopback || idist__os_env("IDIST_ADDR"))
        return idist__interface_choose(idist__records_store_address(j, &hint) ? &hint : NULL, own);

    memset(own, 0, sizeof *own);
    idist__text_copy(own->ip, sizeof own->ip, "127.0.0.1");

    return IDIST_OK;
}

// Listens on all addresses where a secret keeps strangers out, or else at the one that is
// published. Ranks of this host look that up here, those of other hosts elsewhere.
static idist_status idist__records_listen_at(idist__join *j, const idist__own_address *own,
                                             bool by_loopback) {
    const idist__secret *secret = &j->w->cfg.secret;
    int *listener = &j->connector->listeners[1];
    bool is_loopback = idist__address_host_is_loopback(own->ip);
    idist__os_address address, hint;
    bool has_hint = idist__records_store_address(j, &hint);
    idist_status status;

    if (secret->nbytes && !is_loopback)
        return idist__connection_listen_everywhere(0, own->ip, listener);
    if (secret->insecure && !is_loopback && !by_loopback)
        return idist__connection_listen_beyond(own, has_hint ? &hint : NULL, 0, own->ip, listener);

    status = idist__address_tcp(&address, own->ip, 0);
    if (status != IDIST_OK && (is_loopback || secret->insecure))
        return idist__fail(status, "initialize: IDIST_ADDR: %s", idist__me.text);
    if (status == IDIST_OK && (secret->insecure || idist__os_socket_is_loopback(&address)))
        return idist__connection_listen(&address, own->ip, listener);

    return idist__fail(IDIST_ERR_NO_SECRET,
                       "initialize: listening at %s, beyond this host, needs a shared secret: set "
                       "IDIST_SECRET or IDIST_SECRET_FILE on all ranks, or IDIST_INSECURE=1 to "
                       "trust the network",
                       own->ip);
}

static idist_status idist__records_listen_tcp(idist__join *j, bool by_loopback) {
    idist__world *w = j->w;
    idist__tcp_record *me = &j->tcp[w->group.rank];
    idist__os_address address;
    idist__own_address own;
    idist_status status = idist__records_own_address(j, by_loopback, &own);

    if (status == IDIST_OK) status = idist__records_listen_at(j, &own, by_loopback);
    if (status != IDIST_OK) return status;
    if (!idist__os_socket_own_address(j->connector->listeners[1], &address))
        return idist__fail_errno("initialize: asking for the port of a listener", errno);
    snprintf(me->text, sizeof me->text, "tcp:[%s]:%d", own.ip, idist__os_socket_port(&address));
    snprintf(w->advertised, sizeof w->advertised, own.ifname[0] ? "%s (%s)" : "%s", own.ip,
             own.ifname);

    if (idist__records_store_address(j, &address))
        me->round_trip_us =
            idist__os_socket_round_trip_us(((idist__client_store *)j->store->impl)->fd);
    if (own.ifname[0]) me->mbits = idist__os_socket_interface_mbits(own.ifname);
    me->sockets = (uint32_t)w->cfg.sockets;
    me->window_nbytes = idist__os_socket_window_nbytes();

    return IDIST_OK;
}

// Every rank has filled in its own row of a table: rank 0 collects them, under `row`, and publishes
// the whole, as `all`.
static idist_status idist__records_exchange(idist__join *j, const char *row, const char *all,
                                            void *table, size_t row_nbytes) {
    char *rows = (char *)table;
    int i, n = j->w->group.size, me = j->w->group.rank;
    idist_status status =
        idist__join_state_set(j, row, me, rows + (size_t)me * row_nbytes, row_nbytes);

    if (status != IDIST_OK) return status;
    if (me) return idist__join_store_get(j, all, -1, row, table, row_nbytes * (size_t)n);

    for (i = 1; i < n; i++) {
        status = idist__join_store_get(j, row, i, NULL, rows + (size_t)i * row_nbytes, row_nbytes);
        if (status != IDIST_OK) return status;
    }

    return idist__join_state_set(j, all, -1, table, row_nbytes * (size_t)n);
}

// What is known of the network: of all records the longest round trip, the lowest speed of an
// interface, the smallest window and the highest number of sockets. All ranks have the same table,
// and so get the same.
static idist__tcp_record idist__records_network(const idist__join *j) {
    idist__tcp_record all;
    int i;

    memset(&all, 0, sizeof all);

    for (i = 0; i < j->w->group.size; i++) {
        const idist__tcp_record *record = &j->tcp[i];
        uint64_t window_nbytes = record->window_nbytes;

        if (record->round_trip_us > all.round_trip_us) all.round_trip_us = record->round_trip_us;
        if (record->mbits && (!all.mbits || record->mbits < all.mbits)) all.mbits = record->mbits;
        if (record->sockets > all.sockets && record->sockets <= IDIST__SOCKETS_MAX)
            all.sockets = record->sockets;
        if (window_nbytes && (!all.window_nbytes || window_nbytes < all.window_nbytes))
            all.window_nbytes = window_nbytes;
    }

    return all;
}

// What is under way while the network is full: bandwidth times round trip. Virtual interfaces
// report a bandwidth that is too low, or none; unneeded posted receives cost little.
static uint64_t idist__records_network_nbytes(const idist__tcp_record *network) {
    enum { LEAST_MBITS = 1000 };
    uint64_t least = LEAST_MBITS, mbits = network->mbits > least ? network->mbits : least;

    return network->round_trip_us * mbits / 8;
}

// How many sockets it takes to fill the network, when each of them holds a window of it. Only what
// the interface reports counts: unneeded sockets compete with each other on a slow link.
static int idist__records_fill_sockets(const idist__tcp_record *network) {
    uint64_t nbytes = (uint64_t)network->round_trip_us * network->mbits / 8;
    uint64_t count = network->window_nbytes ? nbytes / network->window_nbytes + 1 : 1;

    return count < IDIST__SOCKETS_MAX ? (int)count : IDIST__SOCKETS_MAX;
}

// What is known of the network between the hosts, and how many sockets a link gets.
static void idist__records_measure(idist__join *j, bool by_loopback) {
    enum { OVERHEAD_US = 5 }; // of a sender and a receiver
    idist__tcp_record network = idist__records_network(j);
    char *text = j->w->network;
    size_t capacity = sizeof j->w->network;

    if (!by_loopback) j->w->network_nbytes = idist__records_network_nbytes(&network);
    j->connector->socket_count = by_loopback ? 1 : idist__records_fill_sockets(&network);
    if (network.sockets) j->connector->socket_count = (int)network.sockets;

    if (!by_loopback && network.round_trip_us && network.mbits) {
        uint64_t one_way_us = network.round_trip_us / 2 + OVERHEAD_US;

        j->w->latency_nbytes = one_way_us * network.mbits / 8;
        snprintf(text, capacity, "%u us there and back, %u Mbit/s, ", network.round_trip_us,
                 network.mbits);
    }

    if (text[0] || j->connector->socket_count > 1)
        idist__text_append(text, capacity, "%d socket%s to each rank", j->connector->socket_count,
                           j->connector->socket_count > 1 ? "s" : "");
}

// The same for the addresses of the TCP sockets.
static idist_status idist__records_exchange_tcp(idist__join *j, bool by_loopback) {
    size_t i, n = (size_t)j->w->group.size;
    idist_status status;

    j->tcp = (idist__tcp_record *)idist__mem_alloc(&j->w->cfg.mem, sizeof *j->tcp * n);
    if (!j->tcp) return IDIST_ERR_NO_MEMORY;
    status = idist__records_listen_tcp(j, by_loopback);
    if (status != IDIST_OK) return status;

    status = idist__records_exchange(j, "tcp", "tcps", j->tcp, sizeof *j->tcp);
    for (i = 0; i < n; i++) j->tcp[i].text[sizeof j->tcp->text - 1] = 0;
    if (status == IDIST_OK) idist__records_measure(j, by_loopback);

    return status;
}

// Checks the record of a rank and remembers its host.
static idist_status idist__records_enter(idist__join *j, idist__record *record, int rank) {
    idist__world *w = j->w;

    record->hostname[sizeof record->hostname - 1] = 0;
    record->local[sizeof record->local - 1] = 0;
    idist__text_copy(w->nodes[rank].hostname, sizeof w->nodes[rank].hostname, record->hostname);
    w->nodes[rank].host = record->host;

    if (record->algorithm != (uint32_t)w->cfg.algorithm)
        return idist__fail(
            IDIST_ERR_ENV,
            "initialize: IDIST_ALGO (desc.algorithm) differs between rank %d and rank %d", rank,
            w->group.rank);

    return IDIST_OK;
}

static idist_status idist__records_make(idist__join *j, idist__record *records) {
    idist__world *w = j->w;
    idist__record *me = &records[w->group.rank];
    uint64_t host = idist__config_host_key(&w->cfg);
    bool one_host = true, all_local = true, all_loopback = true;
    idist__os_address address;
    idist_status status = IDIST_OK;
    int i;

    idist__text_copy(me->hostname, sizeof me->hostname, w->hostname);
    me->host = host;
    me->processors = idist__config_processor_key();
    me->shm = w->cfg.transport == IDIST__JOIN_AUTO;
    me->algorithm = (uint32_t)w->cfg.algorithm;
    if (idist__records_store_address(j, &address) && idist__os_socket_is_loopback(&address))
        me->loopback = idist__config_reach_key();
    if (w->cfg.transport != IDIST__JOIN_TCP_ONLY) status = idist__records_listen_local(j, me);
    if (status == IDIST_OK)
        status = idist__records_exchange(j, "node", "nodes", records, sizeof *records);

    for (i = 0; i < w->group.size && status == IDIST_OK; i++) {
        status = idist__records_enter(j, &records[i], i);
        if (records[i].host != host) one_host = false;
        if (!records[i].local[0]) all_local = false; // this rank uses TCP only
        if (!me->loopback || records[i].loopback != me->loopback) all_loopback = false;
        if (records[i].processors != me->processors) continue;
        if (i < w->group.rank) w->sharing_rank++;
        w->sharing_size++;
    }

    j->records = records;
    if (status == IDIST_OK && !(one_host && all_local)) // the same on all ranks
        status = idist__records_exchange_tcp(j, one_host || all_loopback);

    return status;
}

//------------------------------------------------------------------------------
// [join:links]  connections that ranks need from the start
// uses clock poll socket fail text mem parse address msg:transport attempt
// uses connector state failure
//
// Ranks that share memory need no connection in the end: they connect in a tree, over which they
// agree on the memory; then they close it. Of all other pairs, in a world of up to
// IDIST__LINKS_MANY ranks, all connect. In a larger one those connect whose distance is a power of
// two, around the ring of all ranks: the partners in the algorithms of few steps, and the
// neighbours in rings. News of a failure spreads over these. The rest connect when they need to.
//
//   idist__links_want       asks for a connection to a rank
//   idist__links_connect    makes those that are wanted: of two ranks, the higher one connects
//
// A failed incoming handshake is ignored. A failed outgoing one fails the join, unless the
// connection merely broke, or the name of the host is not known yet: then it is tried again.
//------------------------------------------------------------------------------

enum {
    IDIST__LINKS_POLL_MS = 20,
    IDIST__LINKS_ASK_MS = 400 // before it asks for the first time whether a rank has given up
};

#ifndef IDIST__LINKS_MANY // a test has few ranks
#define IDIST__LINKS_MANY 64
#endif
#ifndef IDIST__LINKS_NEAR // a test has none of these: all connections are made on demand
#define IDIST__LINKS_NEAR 1
#endif

// Whether two ranks connect in a world of many ranks before they need to.
static bool idist__links_are_near(int a, int b, int n) {
    int there = a < b ? b - a : a - b, back = n - there;
    return IDIST__LINKS_NEAR && (!(there & (there - 1)) || !(back & (back - 1)));
}

// Where the ranks listen for us: at a local socket on this host, or else at TCP.
static void idist__links_find(idist__join *j) {
    const idist__record *me = &j->records[j->w->group.rank];
    int i;

    for (i = 0; i < j->w->group.size; i++) {
        const idist__record *other = &j->records[i];
        bool local = j->w->cfg.transport != IDIST__JOIN_TCP_ONLY && other->host == me->host &&
                     other->local[0];
        const char *where = local ? other->local : j->tcp[i].text;

        idist__text_copy(j->connector->where[i].text, sizeof j->connector->where->text, where);
        idist__sockets_set_count(&j->ring->links[i].sockets,
                                 local ? 1 : j->connector->socket_count);
    }
}

static idist_status idist__links_late(const idist__join *j) {
    const idist__connector *c = j->connector;
    char text[300] = "";
    int i, missing = 0;

    for (i = 0; i < j->w->group.size; i++)
        if (j->wanted[i] && missing++ < 16)
            idist__text_append(text, sizeof text, "%s%d", missing > 1 ? ", " : "", i);

    // The other ranks repeat this text, so it names this one.
    if (c->unknown[0] && j->wanted[c->unknown_rank])
        return idist__fail(IDIST_ERR_TIMEOUT,
                           "initialize: rank %d on %s was not connected within %d ms to rank %s%s: "
                           "%s (IDIST_ADDR of rank %d)",
                           j->w->group.rank, j->w->hostname, j->w->cfg.init_timeout_ms, text,
                           missing > 16 ? ", ..." : "", c->unknown, c->unknown_rank);
    return idist__fail(IDIST_ERR_TIMEOUT,
                       "initialize: rank %d on %s was not connected within %d ms to rank %s%s. A "
                       "firewall, a missing route or a rank that is stopped can be why",
                       j->w->group.rank, j->w->hostname, j->w->cfg.init_timeout_ms, text,
                       missing > 16 ? ", ..." : "");
}

// Ranks of one host connect by local sockets or loopback. Whether they are of one host may be what
// the user says.
static bool idist__links_trust_host_id(const idist__join *j, const char *where) {
    bool is_local = strncmp(where, "unix:", 5) == 0 || strncmp(where, "tcp:[127.", 9) == 0;
    return is_local && j->w->cfg.host_id[0];
}

// Whether another host has told us a loopback address, which only its IDIST_ADDR can give.
static bool idist__links_misled(const idist__join *j, int rank, const char *where) {
    bool same_host = j->records[rank].host == j->records[j->w->group.rank].host;
    char host[sizeof j->tcp->text];
    int port;

    return !same_host && strncmp(where, "tcp:", 4) == 0 &&
           idist__parse_host_port(where + 4, host, sizeof host, &port) &&
           idist__address_host_is_loopback(host);
}

// A connection could not be made.
static idist_status idist__links_failed(idist__join *j, const idist__connect_event *event) {
    const char *where = event->rank < 0 ? "" : j->connector->where[event->rank].text;
    char how[sizeof idist__me.text];

    if (event->status == IDIST_ERR_NO_FDS) return idist__join_failure_no_fds(j);

    if (idist__os_socket_is_unreachable(event->error))
        return idist__fail(IDIST_ERR_SYSTEM,
                           "initialize: rank %d on %s cannot be reached at %s (%s): the network "
                           "interface is down, no route leads there, or rank %d on %s has no "
                           "address of that kind",
                           event->rank, j->w->nodes[event->rank].hostname, where,
                           strerror(event->error), j->w->group.rank, j->w->hostname);

    idist__text_copy(how, sizeof how, idist__me.text);
    if (!event->error)
        return idist__fail(event->status, "initialize: connecting to rank %d on %s: %s",
                           event->rank, j->w->nodes[event->rank].hostname, how);

    snprintf(how, sizeof how, "no connection to %s: %s", where, strerror(event->error));
    if (idist__links_trust_host_id(j, where))
        idist__text_append(how, sizeof how,
                           ". It has our IDIST_HOSTID (desc.host_id), \"%s\", which only ranks of "
                           "one host may have",
                           j->w->cfg.host_id);
    else if (idist__links_misled(j, event->rank, where))
        idist__text_append(how, sizeof how,
                           ". That is a loopback address, which the IDIST_ADDR of rank %d gives: "
                           "other hosts cannot reach it",
                           event->rank);

    return idist__join_failure_lost(j, event->rank, how);
}

// Goes on with all connections, as far as possible.
static idist_status idist__links_progress(idist__join *j) {
    idist__connect_event event;

    while (idist__connector_next(j->connector, &event)) {
        if (event.status != IDIST_OK) return idist__links_failed(j, &event);
        if (j->wanted[event.rank]) j->wanted_count--;
        j->wanted[event.rank] = false;
    }

    return IDIST_OK;
}

// Sleeps until something is ready, and goes on.
static idist_status idist__links_turn(idist__join *j, idist__os_poll_entry *entries) {
    int count = idist__connector_polls(j->connector, entries);
    int ms = idist__os_clock_ms_until(j->deadline_ns), ready;

    if (ms == 0) return idist__links_late(j);
    if (ms < 0 || ms > IDIST__LINKS_POLL_MS) ms = IDIST__LINKS_POLL_MS;
    ready = idist__os_poll(entries, count, ms);
    if (ready < 0 && errno != EINTR) return idist__fail_errno("poll", errno);
    if (ready > 0) idist__connector_polled(j->connector);

    return idist__links_progress(j);
}

// Asks for a connection to a rank, unless there is one.
static void idist__links_want(idist__join *j, int rank) {
    if (j->wanted[rank] || j->ring->links[rank].open) return;
    j->wanted[rank] = true;
    j->wanted_count++;
}

// Makes the connections that are wanted.
static idist_status idist__links_connect(idist__join *j) {
    size_t capacity = idist__connector_capacity(j->connector);
    idist__os_poll_entry *entries =
        (idist__os_poll_entry *)idist__mem_alloc(&j->w->cfg.mem, sizeof *entries * capacity);
    int64_t asked_ns = idist__os_clock_now_ns();
    int64_t ask_ns = IDIST__LINKS_ASK_MS * IDIST__MS;
    idist_status status = entries ? IDIST_OK : IDIST_ERR_NO_MEMORY;
    int i;

    j->connector->waits_for_names = true;
    for (i = 0; i < j->w->group.rank && status == IDIST_OK; i++)
        if (j->wanted[i] && !idist__connector_start(j->connector, i)) status = IDIST_ERR_NO_MEMORY;
    if (status == IDIST_OK) status = idist__links_progress(j);

    while (status == IDIST_OK && j->wanted_count) {
        status = idist__links_turn(j, entries);

        if (status == IDIST_OK && idist__os_clock_now_ns() - asked_ns > ask_ns) {
            int64_t begun_ns = idist__os_clock_now_ns();

            status = idist__join_failure_check(j); // handshakes stand still while we ask
            asked_ns = idist__os_clock_now_ns();
            ask_ns = idist__join_state_ask_ms(j) * IDIST__MS + 4 * (asked_ns - begun_ns);
        }
    }

    j->connector->waits_for_names = false;
    idist__mem_free(&j->w->cfg.mem, entries);

    return status;
}

//------------------------------------------------------------------------------
// [join:share]  memory shared inside a host
// uses clock os:random descriptor cpu os:memory poll socket beacon process
// uses os:segment fail mem base:window base:log address connection shm:segment
// uses shm:window pipe msg:types msg:transport link region pool state failure
// uses links
//
// The ranks of a host form a binomial tree, whose root is the lowest one. Each of them connects to
// its parent. The root makes the file ([shm:segment]) and sends its descriptor to its children, as
// every rank does that gets it. Each rank maps the file, reserves its own pipes and first region,
// and votes on whether that worked:
//
//   root           makes the file    sends it    maps it   collects votes   sends the lowest
//   other ranks    receive it        send it     map it    collect votes,   receive the lowest
//                                                          send the lowest  and send it
//
// The file is used only if it worked everywhere; then the connections of the tree are closed. If it
// did not, the connections of the tree stay, all other pairs connect as well, and every rank knows
// from the vote which rank could not map the file, and why.
//
// A second vote decides whether they read each other's memory through the kernel. Each rank tries
// to read a random number at the address that every other rank has left in the file.
//------------------------------------------------------------------------------

enum { IDIST__JOIN_CHILDREN = 32 }; // of a rank, at most

typedef struct idist__join_share { // memory of this host that is being agreed on
    idist__segment *m;
    const int *ranks; // world ranks of those that take part, by rank on this host
    int parent;       // the world rank of our parent in the tree; -1: we are the root
    int children[IDIST__JOIN_CHILDREN];
    int child_count;
    int error; // why there can be no beacons: an errno, or 0
} idist__join_share;

// Votes; the lowest one decides.
enum {
    IDIST__VOTE_FAILED,
    IDIST__VOTE_FENCED, // mapped, but the kernel has no membarrier: writers need a fence
    IDIST__VOTE_MAPPED
};

enum { // votes as well: how a rank reads the memory of the others
    IDIST__READS_NOT,
    IDIST__READS_SLOWLY,
    IDIST__READS_FAST
};

typedef struct idist__ballot { // travels through the tree; the lowest vote stays
    char vote;
    char why[255]; // IDIST__VOTE_FAILED: which rank could not, and why
} idist__ballot;

typedef struct idist__join_share_hello { // comes with the descriptor
    uint64_t shm_nbytes, window_nbytes;
} idist__join_share_hello;

// ---- where things lie in the file ----

static size_t idist__join_share_nbytes(const idist__segment *m) {
    return m->window_at + (size_t)m->n * m->window_nbytes;
}

static size_t idist__join_share_round_up(size_t nbytes) {
    return (nbytes + IDIST__PAGE - 1) & ~(IDIST__PAGE - 1);
}

// See [shm:segment]. Region 0 has large buffers, the others a quarter of that; there are as many as
// fit into shm_nbytes for each rank.
static void idist__join_share_layout(idist__segment *m, size_t shm_nbytes, size_t window_nbytes) {
    size_t used, room, first, other, chunk, page = idist__os_memory_page_nbytes();

    m->pipe_nbytes = IDIST__PIPE_MAX;
    while (m->pipe_nbytes > IDIST__PAGE && (size_t)m->n * m->pipe_nbytes > shm_nbytes / 4)
        m->pipe_nbytes /= 2;

    m->pipes_at = sizeof(idist__catalog) + (size_t)m->n * sizeof(uint32_t);
    m->pipes_at = (m->pipes_at + IDIST__LINE - 1) & ~(IDIST__LINE - 1);
    m->buffers_at = m->pipes_at + (size_t)m->n * (sizeof(idist__pipe) + m->pipe_nbytes);
    m->buffers_at = idist__join_share_round_up(m->buffers_at) + IDIST__BUFFERS_SKEW;
    used = sizeof(idist__doorbell) + m->buffers_at;
    room = shm_nbytes > used ? shm_nbytes - used : 0;

    chunk = room / (2 * IDIST__BUFFERS);
    if (chunk > IDIST__CHUNK_MAX) chunk = IDIST__CHUNK_MAX;
    m->chunk_nbytes[0] = chunk & ~(IDIST__LINE - 1);
    m->chunk_nbytes[1] = (chunk / 4) & ~(IDIST__LINE - 1);
    first = IDIST__REGION_HEAD_BYTES + IDIST__BUFFERS * m->chunk_nbytes[0];
    other = IDIST__REGION_HEAD_BYTES + IDIST__BUFFERS * m->chunk_nbytes[1];

    m->region_count = room < first ? 0 : 1 + (int)((room - first) / other);
    if (m->region_count > (int)IDIST__COUNT_OF(m->taken))
        m->region_count = (int)IDIST__COUNT_OF(m->taken);

    m->front_nbytes = sizeof(idist__doorbell);
    m->part_nbytes = m->buffers_at;

    if (m->region_count) {
        m->front_nbytes += IDIST__REGION_HEAD_BYTES;
        m->part_nbytes += IDIST__BUFFERS * m->chunk_nbytes[0];
        m->part_nbytes += (size_t)(m->region_count - 1) * other;
    }

    m->front_nbytes = idist__join_share_round_up(m->front_nbytes);
    m->part_nbytes = idist__join_share_round_up(m->part_nbytes);
    m->parts_at = IDIST__PAGE + (size_t)m->n * m->front_nbytes;
    m->window_at = m->parts_at + (size_t)m->n * m->part_nbytes;
    m->window_at = (m->window_at + page - 1) / page * page; // mapped by itself
    m->window_nbytes = window_nbytes;
    m->reserved_count = 0;
}

// At least the memory of the host, a power of two. A hole in the file costs nothing.
static size_t idist__join_share_window_nbytes(int n) {
    uint64_t ram = idist__os_segment_ram();
    uint64_t nbytes = (uint64_t)1 << 30;

    if (sizeof(void *) < 8) return 0;
    while (nbytes < ram && nbytes * (uint64_t)n < (uint64_t)1 << 42) nbytes *= 2;

    return (size_t)nbytes;
}

// ---- mapping it ----

// Reserves memory for our doorbell, our catalog and the pipes to us. 0, or an errno.
static int idist__join_share_reserve(const idist__segment *m) {
    size_t me = (size_t)m->me;
    int fd = m->fd, error = 0;

    if (idist__os_segment_nbytes(fd) < idist__join_share_nbytes(m)) return EINVAL;
    if (!me) error = idist__os_memory_reserve(fd, 0, IDIST__PAGE);
    if (!error)
        error = idist__os_memory_reserve(fd, IDIST__PAGE + me * m->front_nbytes,
                                         sizeof(idist__doorbell));
    if (!error)
        error = idist__os_memory_reserve(fd, m->parts_at + me * m->part_nbytes, m->buffers_at);

    return error;
}

// Leaves what the next rank reads to find out which way is faster: a block of our memory, and one
// in our part of the file, in the pipe from that rank, which writes to it only afterwards. Both are
// then in our cache, as contributions usually are.
static void idist__join_share_leave_sample(const idist__segment *m) {
    if (m->n == 1 || m->pipe_nbytes < IDIST__SAMPLE_BYTES) return;
    memset(m->remote_pieces, 1, IDIST__SAMPLE_BYTES);
    memset(idist__segment_pipe(m, (m->me + 1) % m->n, m->me) + 1, 1, IDIST__SAMPLE_BYTES);
}

// Maps the file and reserves our memory in it. 0, or an errno.
static int idist__join_share_map(idist__segment *m) {
    idist__doorbell *bell;
    idist__os_cpu_set cpus;
    int i, error = idist__join_share_reserve(m);

    if (error) return error;
    m->base = (char *)idist__os_memory_map(m->fd, 0, m->window_at);
    if (!m->base) return errno;

    if (m->window_nbytes) {
        size_t at = m->window_at + (size_t)m->me * m->window_nbytes;
        m->window = idist__window_open(m->fd, at, m->window_nbytes);
        if (!m->window) return ENOMEM;
    }

    idist__os_cpu_usable(&cpus);
    for (i = 0; i < IDIST__CPU_WORDS; i++)
        __atomic_fetch_or(&idist__segment_header_of(m)->cpus.bits[i], cpus.bits[i],
                          __ATOMIC_RELAXED);

    idist__os_random(&m->proof, sizeof m->proof);
    bell = idist__segment_doorbell(m, m->me);
    bell->pid = idist__os_process_id();
    bell->proof = m->proof;
    bell->proof_address = (uint64_t)(uintptr_t)&m->proof;
    bell->sample_address = (uint64_t)(uintptr_t)m->remote_pieces;
    idist__join_share_leave_sample(m);

    // The world's: its members take for granted that all of them have it.
    return m->region_count ? idist__pool_reserve(m, 0) : 0;
}

// Whether we can read the memory of all others, and they are the processes we take them for.
static bool idist__join_share_reads_all(idist__segment *m) {
    int i;

    for (i = 0; i < m->n; i++) {
        const idist__doorbell *bell = idist__segment_doorbell(m, i);
        uint64_t proof = 0;
        uint64_t proof_address = bell->proof_address;

        m->processes[i] = (idist__os_process)bell->pid;
        if (m->processes[i] <= 0) return false;
        if (idist__segment_read_remote(m, i, proof_address, &proof, sizeof proof) != 0)
            return false;
        if (proof != bell->proof) return false;
    }

    return true;
}

// Whether the kernel reads the memory of another process at least half as fast as we read memory
// that we share with it. Some processors need five times as long for what is in the other one's
// cache. In small pieces, of which the fastest counts, because the others may have been
// interrupted.
static bool idist__join_share_reads_fast(const idist__segment *m) {
    int from = (m->me + m->n - 1) % m->n;
    const char *shared = (const char *)(idist__segment_pipe(m, m->me, from) + 1);
    uint64_t address = idist__segment_doorbell(m, from)->sample_address;
    char *to = m->remote_pieces + IDIST__SAMPLE_BYTES;
    int64_t remote_ns = IDIST__FOREVER, shared_ns = IDIST__FOREVER;
    size_t at;

    for (at = 0; at < IDIST__SAMPLE_BYTES; at += IDIST__PAGE) to[at] = shared[at]; // maps the pages

    for (at = 0; at < IDIST__SAMPLE_BYTES; at += IDIST__SAMPLE_PIECE) {
        int64_t begin_ns = idist__os_clock_now_ns(), between_ns, end_ns;

        if (idist__segment_read_remote(m, from, address + at, to, IDIST__SAMPLE_PIECE) != 0)
            return false;
        between_ns = idist__os_clock_now_ns();
        memcpy(to, shared + at, IDIST__SAMPLE_PIECE);
        end_ns = idist__os_clock_now_ns();
        if (between_ns - begin_ns < remote_ns) remote_ns = between_ns - begin_ns;
        if (end_ns - between_ns < shared_ns) shared_ns = end_ns - between_ns;
    }

    return remote_ns <= 2 * shared_ns;
}

// How this rank reads the memory of others, as a vote. Ranks that share cores cannot measure it.
// Rank 0 may not have written head->ncores yet.
static char idist__join_share_reads(idist__segment *m) {
    const idist__segment_header *head = idist__segment_header_of(m);

    if (!idist__join_share_reads_all(m)) return IDIST__READS_NOT;
    if (m->n == 1 || m->n > idist__os_cpu_set_count(&head->cpus)) return IDIST__READS_FAST;
    if (m->pipe_nbytes < IDIST__SAMPLE_BYTES) return IDIST__READS_FAST;
    return idist__join_share_reads_fast(m) ? IDIST__READS_FAST : IDIST__READS_SLOWLY;
}

// ---- messages between the ranks of the host ----

// Sends a message with a descriptor, which may be -1.
static bool idist__join_share_send(int sock, const void *buf, size_t nbytes, int fd,
                                   int64_t deadline_ns) {
    ptrdiff_t sent = idist__os_segment_send(sock, buf, nbytes, fd);

    while (sent < 0 && errno == EAGAIN) {
        if (!idist__os_poll_wait(sock, IDIST__OS_WRITABLE, deadline_ns)) return false;
        sent = idist__os_segment_send(sock, buf, nbytes, fd);
    }

    return sent == (ptrdiff_t)nbytes; // a new socket never cuts a short message
}

// Receives one; *fd is -1 if it has no descriptor. On failure errno is 0 if the peer has ended.
static bool idist__join_share_receive(int sock, void *buf, size_t nbytes, int *fd,
                                      int64_t deadline_ns) {
    ptrdiff_t received;

    *fd = -1;
    errno = ETIMEDOUT;
    if (!idist__os_poll_wait(sock, IDIST__OS_READABLE, deadline_ns)) return false;
    received = idist__os_segment_receive(sock, buf, nbytes, fd);
    if (received == 0) errno = 0;
    if (received <= 0) return false;

    return idist__connection_read_all(sock, (char *)buf + received, nbytes - (size_t)received,
                                      deadline_ns);
}

static idist_status idist__join_share_broken(idist__join *j, int rank) {
    if (errno == ETIMEDOUT)
        return idist__fail(IDIST_ERR_TIMEOUT,
                           "initialize: rank %d on %s did not answer while the ranks of this host "
                           "set up their shared memory: it is stopped, too slow, or waits for a "
                           "rank that is",
                           rank, j->w->nodes[rank].hostname);

    return idist__join_failure_lost(
        j, rank, "its connection ended while the ranks of this host agreed on shared memory");
}

// Waits until a link has something to read. Now and then it asks whether a rank has given up, which
// may be why nothing arrives.
static idist_status idist__join_share_await(idist__join *j, int rank) {
    idist_status status;

    for (;;) {
        int64_t ask_ns = idist__os_clock_deadline(idist__join_state_ask_ms(j));

        if (idist__os_poll_wait(j->ring->links[rank].sockets.fds[0], IDIST__OS_READABLE,
                                ask_ns < j->deadline_ns ? ask_ns : j->deadline_ns))
            return IDIST_OK;
        status = idist__join_failure_check(j);
        if (status != IDIST_OK) return status;
        errno = ETIMEDOUT;
        if (idist__os_clock_ms_until(j->deadline_ns) == 0) return idist__join_share_broken(j, rank);
    }
}

// Gets the next message of a rank in a vote.
static idist_status idist__join_share_hear(idist__join *j, int rank, idist__ballot *ballot) {
    int sock = j->ring->links[rank].sockets.fds[0];
    idist_status status = idist__join_share_await(j, rank);

    if (status != IDIST_OK) return status;
    if (!idist__connection_read_all(sock, ballot, sizeof *ballot, j->deadline_ns))
        return idist__join_share_broken(j, rank);
    ballot->why[sizeof ballot->why - 1] = 0;

    return IDIST_OK;
}

static idist_status idist__join_share_say(idist__join *j, int rank, const idist__ballot *ballot) {
    int sock = j->ring->links[rank].sockets.fds[0];

    if (idist__connection_write_all(sock, ballot, sizeof *ballot, j->deadline_ns)) return IDIST_OK;
    return idist__join_share_broken(j, rank);
}

// Sets *ballot to that of the lowest vote of the ranks of this host: up the tree, and down again.
static idist_status idist__join_share_vote(idist__join *j, const idist__join_share *share,
                                           idist__ballot *ballot) {
    idist_status status = IDIST_OK;
    int i;

    for (i = 0; i < share->child_count && status == IDIST_OK; i++) {
        idist__ballot other;

        status = idist__join_share_hear(j, share->children[i], &other);
        if (status == IDIST_OK && other.vote < ballot->vote) *ballot = other;
    }

    if (share->parent >= 0 && status == IDIST_OK) {
        status = idist__join_share_say(j, share->parent, ballot);
        if (status == IDIST_OK) status = idist__join_share_hear(j, share->parent, ballot);
    }

    for (i = 0; i < share->child_count && status == IDIST_OK; i++)
        status = idist__join_share_say(j, share->children[i], ballot);
    if (status != IDIST_OK) ballot->vote = IDIST__VOTE_FAILED;

    return status;
}

// ---- making the file ----

// Makes the file, without windows if a limit on the size of files does not leave room for them. 0,
// or an errno.
static int idist__join_share_create(idist__segment *m, idist__join_share_hello *hello) {
    hello->window_nbytes = idist__join_share_window_nbytes(m->n);
    idist__join_share_layout(m, (size_t)hello->shm_nbytes, (size_t)hello->window_nbytes);
    m->fd = idist__os_memory_file(idist__join_share_nbytes(m));
    if (m->fd >= 0) return 0;

    hello->window_nbytes = 0;
    idist__join_share_layout(m, (size_t)hello->shm_nbytes, 0);
    m->fd = idist__os_memory_file(idist__join_share_nbytes(m));

    return m->fd < 0 ? errno : 0;
}

// Makes the file or receives it, and sends it to our children. Without a file *error says why; the
// ranks vote all the same.
static idist_status idist__join_share_pass(idist__join *j, const idist__join_share *share,
                                           int *error) {
    const idist__link *links = j->ring->links;
    idist__segment *m = share->m;
    idist__join_share_hello hello;
    idist_status status;
    int i;

    *error = EINVAL;
    hello.shm_nbytes = j->w->cfg.shm_nbytes;

    if (share->parent >= 0) {
        status = idist__join_share_await(j, share->parent);
        if (status != IDIST_OK) return status;
        if (!idist__join_share_receive(links[share->parent].sockets.fds[0], &hello, sizeof hello,
                                       &m->fd, j->deadline_ns))
            return idist__join_share_broken(j, share->parent);
        idist__join_share_layout(m, (size_t)hello.shm_nbytes, (size_t)hello.window_nbytes);
        if (m->fd >= 0) *error = 0;
    } else {
        *error = idist__join_share_create(m, &hello);
    }

    for (i = 0; i < share->child_count; i++)
        if (!idist__join_share_send(links[share->children[i]].sockets.fds[0], &hello, sizeof hello,
                                    m->fd, j->deadline_ns))
            return idist__join_share_broken(j, share->children[i]);

    return IDIST_OK;
}

// Says in the ballot that this rank cannot share memory, and why.
static void idist__join_share_refuse(const idist__join *j, const idist__join_share *share,
                                     int error, idist__ballot *ballot) {
    char limit[160] = "";

    ballot->vote = IDIST__VOTE_FAILED;
    if (!share->error) idist__os_memory_limit(share->m->window_at, limit, sizeof limit);
    snprintf(ballot->why, sizeof ballot->why, "rank %d: %s%s", j->w->group.rank,
             share->error ? "the processes of this host cannot see each other end: " : "",
             *limit ? limit : strerror(error));
}

// *all: every rank of this host has mapped the file, even if this function fails after that.
static idist_status idist__join_share_attempt(idist__join *j, const idist__join_share *share,
                                              bool *all) {
    idist__segment *m = share->m;
    int error;
    idist__ballot ballot;
    idist_status status = idist__join_share_pass(j, share, &error);

    if (status != IDIST_OK) return status;
    memset(&ballot, 0, sizeof ballot);
    ballot.vote = idist__os_cpu_fence_others(true) ? IDIST__VOTE_MAPPED : IDIST__VOTE_FENCED;
    if (share->error) error = share->error;
    if (!error) error = idist__join_share_map(m);
    if (error) idist__join_share_refuse(j, share, error, &ballot);

    status = idist__join_share_vote(j, share, &ballot);
    *all = status == IDIST_OK && ballot.vote > IDIST__VOTE_FAILED;

    if (status == IDIST_OK && !*all) {
        snprintf(j->w->sharing, sizeof j->w->sharing, "no shared memory: %s", ballot.why);
        idist__log_print(&j->w->log, IDIST_LOG_INFO, "%s", j->w->sharing);
    }

    if (!*all) return status;

    if (m->me == 0) {
        idist__segment_header *head = idist__segment_header_of(m);
        head->ncores = (uint32_t)idist__os_cpu_set_count(&head->cpus);
        head->fenced = ballot.vote == IDIST__VOTE_FENCED || m->n > (int)head->ncores;
    }

    ballot.vote = idist__join_share_reads(m); // by now all have left their proofs and samples
    status = idist__join_share_vote(j, share, &ballot);
    m->reads_remote = ballot.vote >= IDIST__READS_SLOWLY;
    m->reads_fast = ballot.vote == IDIST__READS_FAST;

    return status;
}

// ---- the shared memory of a ring ----

static void idist__join_share_free(const idist_allocator *mem, idist__segment *m) {
    if (!m) return;
    idist__view_unmap_all(m);
    if (m->base) idist__os_memory_unmap(m->base, m->window_at);
    idist__os_descriptor_close(&m->fd);
    idist__os_descriptor_close(&m->beacon);
    idist__os_descriptor_close(&m->observer);
    idist__mem_free(mem, m->views);
    idist__mem_free(mem, m->local);
    idist__mem_free(mem, m->processes);
    idist__mem_free(mem, m->remote_pieces);
    idist__mem_free(mem, m->ports);
    idist__mem_free(mem, m);
}

// NULL when memory is short.
static idist__segment *idist__join_share_new(const idist_allocator *mem, size_t world_size) {
    idist__segment *m = (idist__segment *)idist__mem_alloc(mem, sizeof *m);

    if (!m) return NULL;
    m->fd = -1;
    m->beacon = -1;
    m->observer = -1;
    m->local = (int *)idist__mem_alloc(mem, sizeof *m->local * 2 * world_size);
    m->ports = (idist__pipe_port *)idist__mem_alloc(mem, sizeof *m->ports * world_size);
    m->processes = (idist__os_process *)idist__mem_alloc(mem, sizeof *m->processes * world_size);
    m->remote_pieces = (char *)idist__mem_raw(mem, IDIST__REMOTE_PIECE * world_size);
    m->views = (idist__view *)idist__mem_alloc(mem, sizeof *m->views * world_size);
    if (m->local && m->ports && m->processes && m->remote_pieces && m->views) return m;

    idist__join_share_free(mem, m);

    return NULL;
}

// The beacon of a rank: its local socket has the same name without the last word.
static bool idist__join_share_beacon(const idist__join *j, int rank, idist__os_address *address) {
    char where[sizeof j->records->local + 8];

    snprintf(where, sizeof where, "%s-beacon", j->records[rank].local);

    return idist__address_parse(address, where) == IDIST_OK;
}

// Lights our beacon, before anybody may look for it. 0, or an errno.
static int idist__join_share_light(const idist__join *j, const idist__join_share *share) {
    idist__segment *m = share->m;
    int i;

    for (i = 0; i < m->n; i++)
        if (!idist__join_share_beacon(j, share->ranks[i], &m->ports[i].beacon)) return EINVAL;

    m->beacon = idist__os_beacon_light(&m->ports[m->me].beacon);
    if (m->beacon < 0) return errno;
    m->observer = idist__os_beacon_observer();
    if (m->observer < 0) return errno;
    m->next_look = m->me;

    return 0;
}

// Whether the system lets us see beacons: our own and those of our parent and children, which are
// lit because we are connected. 0, or an errno.
static int idist__join_share_see(const idist__segment *m) {
    int bit, error = idist__os_beacon_look(m->observer, &m->ports[m->me].beacon);

    if (!error && m->me)
        error = idist__os_beacon_look(m->observer, &m->ports[m->me & (m->me - 1)].beacon);
    for (bit = 1; !error && m->me + bit < m->n && !(m->me & bit); bit *= 2)
        error = idist__os_beacon_look(m->observer, &m->ports[m->me + bit].beacon);

    return error;
}

// From here on the links inside this host are pipes in the file. A rank that gives up takes over
// only those to ranks that are not its parent or children in the tree: the others may have joined,
// and can be told. Between parent and child votes may still be under way, which a frame would
// disturb; a child that has joined sees by its parent's beacon that it is gone.
static void idist__join_share_take_over(idist__join *j, const idist__join_share *share,
                                        idist_status status) {
    idist__segment *m = share->m;
    const idist__segment_header *head = idist__segment_header_of(m);
    int i;

    m->fenced = head->fenced != 0;
    m->oversubscribed = m->n > (int)head->ncores;
    j->w->ncores = (int)head->ncores;

    for (i = 0; i < m->n; i++) {
        idist__link *l = &j->ring->links[share->ranks[i]];
        idist__pipe_port *port = &m->ports[i];

        m->local[share->ranks[i]] = i;
        if (i == m->me || (status != IDIST_OK && idist__link_is_connected(l))) continue;
        port->shm = m;
        port->peer = i;
        port->in = idist__segment_pipe(m, i, m->me);
        port->out = idist__segment_pipe(m, m->me, i);
        idist__link_open(j->ring, l, &idist__pipe_transport, port); // closes the connection
    }

    j->ring->shm = m;
    snprintf(j->w->sharing, sizeof j->w->sharing, "shared memory, %zu KiB per rank%s; %s",
             j->w->cfg.shm_nbytes >> 10,
             m->region_count ? "" : ", too little for collectives, which are messages",
             m->reads_fast     ? "large buffers are read from the other process"
             : m->reads_remote ? "large buffers are copied, the kernel reads other processes slowly"
                               : "large buffers are copied");
    if (!m->region_count && m->me == 0)
        idist__log_print(&j->w->log, IDIST_LOG_WARN, "on this host: %s", j->w->sharing);
}

// The ranks of this host, and our place in their tree: the parent of a rank on this host is the
// rank without its lowest set bit.
static void idist__join_share_find(const idist__join *j, idist__join_share *share, int *ranks) {
    const idist__record *own = &j->records[j->w->group.rank];
    idist__segment *m = share->m;
    int i, bit;

    for (i = 0; i < j->w->group.size; i++) {
        const idist__record *record = &j->records[i];

        m->local[i] = -1;
        if (!record->shm || record->host != own->host || !record->local[0]) continue;
        if (i == j->w->group.rank) m->me = m->n;
        ranks[m->n++] = i;
    }

    share->ranks = ranks;
    share->parent = m->me ? ranks[m->me & (m->me - 1)] : -1;
    for (bit = 1; m->me + bit < m->n && !(m->me & bit); bit *= 2)
        share->children[share->child_count++] = ranks[m->me + bit];
}

// Agrees on memory with the other ranks of this host, if there are any. *all: all have mapped it,
// even if this rank fails after that.
static idist_status idist__join_share_agree(idist__join *j, idist__join_share *share, bool *all) {
    idist__segment *m = share->m;
    idist_status status;
    int i;

    if (m->n < 2) return IDIST_OK;
    share->error = idist__join_share_light(j, share);
    if (share->parent >= 0) idist__links_want(j, share->parent);
    for (i = 0; i < share->child_count; i++) idist__links_want(j, share->children[i]);
    status = idist__links_connect(j);
    if (!share->error) share->error = idist__join_share_see(m);
    if (status != IDIST_OK) return status;

    return idist__join_share_attempt(j, share, all);
}

static idist_status idist__join_share_share(idist__join *j) {
    const idist_allocator *mem = &j->w->cfg.mem;
    int size = j->w->group.size;
    idist__join_share share;
    bool all = false;
    idist_status status;

    if (!j->records[j->w->group.rank].shm) return IDIST_OK;
    memset(&share, 0, sizeof share);
    share.m = idist__join_share_new(mem, (size_t)size);
    if (!share.m) return IDIST_ERR_NO_MEMORY;

    // Room for the ranks was allocated with the other table.
    idist__join_share_find(j, &share, share.m->local + size);
    status = idist__join_share_agree(j, &share, &all);

    if (all) idist__join_share_take_over(j, &share, status);
    else idist__join_share_free(mem, share.m);
    j->voting = status != IDIST_OK;

    return status;
}

// Connects to the ranks with which we do not share memory, or only to some of them.
static idist_status idist__join_share_connect_others(idist__join *j) {
    int i, me = j->w->group.rank, n = j->w->group.size;
    bool many = n > IDIST__LINKS_MANY, lacks_some = false;
    idist_status status;

    for (i = 0; i < n; i++)
        if (i != me && (!many || idist__links_are_near(i, me, n))) idist__links_want(j, i);

    status = idist__links_connect(j);
    if (status != IDIST_OK || !many) return status;

    for (i = 0; i < n; i++) {
        idist__link *l = &j->ring->links[i];

        if (i == me || l->open) continue;
        idist__link_open(j->ring, l, &idist__transport_none, NULL);
        lacks_some = true;
    }

    if (lacks_some) { // the ring makes the rest
        j->ring->connector = j->connector;
        j->connector = NULL;
    }

    return IDIST_OK;
}

//------------------------------------------------------------------------------
// [join:open]  all steps in order; making and freeing the ring
// uses clock descriptor cpu os:memory poll os:watch fail text mem base:log
// uses store:store model shm:ended pipe msg:types msg:transport link
// uses msg:message connector engine:progress state failure store table links
// uses share
//------------------------------------------------------------------------------

enum { IDIST__OPEN_NBYTES = 20 << 20 }; // a thread's stack, the server of the store, buffers

static void idist__join_free(idist__ring *ring) {
    const idist_allocator *mem = &ring->w->cfg.mem;
    int i;

    if (ring->shm) idist__liveness_tell(ring->shm, ring->shm->me, IDIST__ENDED_LEFT);

    for (i = 0; ring->links && i < ring->w->group.size; i++) {
        idist__link *l = &ring->links[i];
        idist__message *m, *next;

        idist__link_close(ring, l);
        idist__sockets_close(&l->sockets); // the others had not been connected yet
        idist__link_write_failed(ring, l); // frees what was not written

        for (m = l->early; m; m = next) {
            next = m->next;
            idist__message_free(ring, l, m);
        }
    }

    while (ring->idle) {
        idist__transfer *v = ring->idle;
        ring->idle = v->next;
        idist__mem_free(mem, v);
    }

    idist__connector_free(ring->connector);
    idist__os_descriptor_close(&ring->wake);
    idist__os_descriptor_close(&ring->watch);
    idist__join_share_free(mem, ring->shm);
    idist__mem_free(mem, ring->links);
    idist__mem_free(mem, ring->stages);
    idist__mem_free(mem, ring->polls);
    idist__mem_free(mem, ring);
}

// On failure *out is NULL, or half made: the caller passes it to idist__join_free.
static idist_status idist__join_new(idist__world *w, idist__ring **out) {
    const idist_allocator *mem = &w->cfg.mem;
    idist__ring *ring = (idist__ring *)idist__mem_alloc(mem, sizeof *ring);
    size_t n = (size_t)w->group.size, i;

    *out = ring;
    if (!ring) return IDIST_ERR_NO_MEMORY;
    ring->w = w;
    ring->watch = -1;
    ring->wake = idist__os_poll_wakeup_new();
    if (ring->wake >= 0) ring->watch = idist__os_watch_new();
    if (ring->watch < 0)
        return idist__fail_errno("initialize: opening a wake-up descriptor", errno);

    ring->links = (idist__link *)idist__mem_alloc(mem, sizeof *ring->links * n);
    ring->stages = (char *)idist__mem_raw(mem, IDIST__STAGE_BYTES * n);
    if (!ring->links) return IDIST_ERR_NO_MEMORY;

    for (i = 0; i < n; i++) {
        idist__link *l = &ring->links[i];
        l->out_end = &l->out;
        l->early_end = &l->early;
        l->window = IDIST__WINDOW_BYTES;
        l->their_window = IDIST__WINDOW_BYTES;
        l->watched_in = -1;
        l->watched_out = -1;
        idist__sockets_init(&l->sockets);
        if (ring->stages) l->stage = ring->stages + i * IDIST__STAGE_BYTES;
    }

    return ring->stages ? IDIST_OK : IDIST_ERR_NO_MEMORY;
}

// Memory for poll sets, once it is known how many sockets there may be.
static idist_status idist__join_polls(idist__ring *ring) {
    int i;

    ring->poll_capacity = (size_t)IDIST__PROGRESS_WAKES + (size_t)IDIST__CONNECTOR_POLLS;
    for (i = 0; ring->links && i < ring->w->group.size; i++)
        ring->poll_capacity += (size_t)ring->links[i].sockets.count;
    ring->polls =
        (idist__os_poll_entry *)idist__mem_alloc(&ring->w->cfg.mem,
                                                 sizeof *ring->polls * 2 * ring->poll_capacity);

    return ring->polls ? IDIST_OK : IDIST_ERR_NO_MEMORY;
}

// Meets the other ranks; the store is open.
static idist_status idist__join_meet(idist__join *j) {
    const idist_allocator *mem = &j->w->cfg.mem;
    size_t n = (size_t)j->w->group.size;
    idist__record *records = (idist__record *)idist__mem_alloc(mem, sizeof *records * n);
    idist_status status;

    j->wanted = (bool *)idist__mem_alloc(mem, sizeof *j->wanted * n);
    j->connector = idist__connector_new(j->ring);

    if (!records || !j->wanted || !j->connector) {
        idist__mem_free(mem, records);
        return IDIST_ERR_NO_MEMORY;
    }

    status = idist__records_agree_on_job(j);
    if (status == IDIST_OK) status = idist__records_make(j, records);
    if (status == IDIST_OK) idist__links_find(j);
    if (status == IDIST_OK) status = idist__join_share_share(j);
    if (status == IDIST_OK) status = idist__join_share_connect_others(j);
    if (status == IDIST_OK) status = idist__join_polls(j->ring);
    if (status == IDIST_OK) status = idist__join_store_leave(j);

    j->records = NULL;
    idist__mem_free(mem, records);

    return status;
}

// Joining failed here, while others may have joined already: tells them why. The text of a time-out
// names the ranks that are late, and a reason that came from another rank names that one.
static void idist__join_tell_joined(const idist__join *j, idist_status status) {
    idist__ring *ring = j->ring;
    char text[sizeof idist__me.text], cause[IDIST__TEXT_BYTES] = "";
    int i;

    memcpy(text, idist__me.text, sizeof text); // sending may overwrite it
    if (!j->others_know && status != IDIST_ERR_TIMEOUT && status != IDIST_ERR_PEER_LOST)
        snprintf(cause, sizeof cause, "rank %d could not join: ", ring->w->group.rank);
    idist__text_append(cause, sizeof cause, "%s",
                       strncmp(text, "initialize: ", 12) == 0 ? text + 12 : text);

    for (i = 0; i < ring->w->group.size; i++) {
        idist__link *l = &ring->links[i];

        if (!idist__link_is_connected(l)) continue;
        if (j->voting && l->transport != &idist__pipe_transport) continue; // it votes as well
        idist__link_abort(ring, l, ring->w->group.ctx, status, cause);
    }

    memcpy(idist__me.text, text, sizeof text);
}

// Frees what only meeting needed, whether it succeeded or not.
static void idist__join_end(idist__join *j) {
    const idist_allocator *mem = &j->w->cfg.mem;

    idist__os_descriptor_close(&j->w->cfg.listener);
    idist__connector_free(j->connector);
    idist__mem_free(mem, j->wanted);
    idist__mem_free(mem, j->tcp);

    if (j->owns_store) {
        char text[sizeof idist__me.text];
        memcpy(text, idist__me.text, sizeof text); // closing may overwrite it
        idist_store_close(&j->store);
        memcpy(idist__me.text, text, sizeof text);
    }
}

// Warns of a limit on memory under which this rank may fail to join, or to share memory: an error
// text of another rank cannot name the limit.
static void idist__join_warn_of_limit(idist__world *w) {
    size_t needed = 2 * w->cfg.shm_nbytes + IDIST__OPEN_NBYTES;
    char limit[160];

    idist__os_memory_limit(needed, limit, sizeof limit);
    if (*limit)
        idist__log_print(&w->log, IDIST_LOG_WARN,
                         "initialize: %s; to share memory with the other ranks of this host, this "
                         "rank needs at least %zu KiB more",
                         limit, needed >> 10);
}

static idist_status idist__join_open(idist__world *w) {
    idist__join j;
    idist_status status = IDIST_OK;

    memset(&j, 0, sizeof j);
    j.w = w;
    j.deadline_ns = idist__os_clock_deadline(w->cfg.init_timeout_ms);
    idist__me.join_until_ns = j.deadline_ns;
    if (w->group.size > 1) idist__join_warn_of_limit(w);

    // Announced now rather than when it is needed: with a second thread, such as the server of the
    // store, the kernel takes 15 ms for it.
    if (w->cfg.transport == IDIST__JOIN_AUTO && w->group.size > 1) idist__os_cpu_fence_others(true);

    // The store comes first, so that the others learn of everything that fails after it.
    if (w->group.size > 1) status = idist__join_store_open(&j);
    else idist__text_copy(w->nodes[0].hostname, sizeof w->nodes[0].hostname, w->hostname);

    if (status == IDIST_OK) status = idist__join_new(w, &j.ring);
    if (status == IDIST_OK)
        status = w->group.size > 1 ? idist__join_meet(&j) : idist__join_polls(j.ring);
    idist__join_failure_of_store(&j, status);

    w->impl = j.ring;
    // Those that have joined first: they may be about to give up a call, and the store may be slow.
    if (status != IDIST_OK && j.ring && j.ring->links) idist__join_tell_joined(&j, status);
    if (status != IDIST_OK) idist__join_failure_tell(&j, status);
    idist__join_end(&j);
    idist__me.join_until_ns = 0;

    if (status == IDIST_OK && !j.ring->polled_link_count)
        idist__os_descriptor_close(&j.ring->watch); // nothing will ever be watched

    if (status != IDIST_OK && j.ring) idist__join_free(j.ring);

    return status;
}

#endif // IDIST_JOIN_H
