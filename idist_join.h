/* idist_join.h - v0.2.0 - how ranks meet and connect to each other - MIT licence

    What idist_initialize does in the ring backend: the ranks meet in a key-value store, learn where
    each of them listens, connect every pair, and agree on shared memory inside each host. From then
    on nobody needs the store, and nobody listens any more.

    Part of the implementation of idist: idist_ring.h includes it. The way in is idist__ring_open.

CONTENTS

      [join:state]    what the sections below share
      [join:failure]  a rank that gives up, and how the others learn why
      [join:store]    opening the store, and values that a rank waits for
      [join:table]    the number of the job, and a record of every rank
      [join:links]    a connection between each pair of ranks
      [join:share]    memory shared inside a host
      [join:open]     all steps in order; making and freeing the ring

STEPS

    What the ranks write into the store, in order; R is a rank. All names begin with a prefix that
    no other world uses.

      idist/R     how many worlds rank R has opened here          idist__join_store_open
      job         number of the job, number of ranks (rank 0)     idist__table_agree_on_job
      node/R      what rank R says about itself                   idist__table_exchange
      nodes       all of these, collected by rank 0
      tcp/R       where rank R listens for other hosts            idist__table_listen_tcp
      -           each rank connects to the lower ones            idist__links_connect_all
      -           ranks of a host map one file in memory          idist__join_share_share
      joined/R    rank R is done                                  idist__join_store_leave
      njoined     how many ranks are
      all         all of them are: rank 0 may close the store

    And when a rank cannot join:

      failed      why a rank gave up                              idist__failure_tell
      heard       how many ranks have read that
*/
#ifndef IDIST_JOIN_H
#define IDIST_JOIN_H

//------------------------------------------------------------------------------
// [join:state]  what the sections below share
// uses clock auth pending store:table server client store:store model msg:types
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

typedef struct idist__tcp_text {
    char text[160]; // "tcp:[ADDRESS]:PORT"
} idist__tcp_text;

typedef struct idist__join {
    idist__world *w;
    idist__ring *ring;
    idist_store *store;
    bool owns_store;              // we opened it; otherwise it is the user's
    bool others_know;             // somebody else has told all ranks why we give up
    bool told_by_server;          // ... namely the server, for a process that ended
    char prefix[64];              // of our names in the store
    uint64_t job;                 // number of the job
    uint8_t key[32];              // authenticates connections of this job
    int listeners[2];             // local socket, TCP; -1: none
    idist__tcp_text *tcp;         // where the TCP socket of each rank listens; NULL: nowhere
    const idist__record *records; // by rank
    idist__handshake *outgoing;   // by rank, to lower ranks only
    int64_t *retry_ns;            // when to connect to a lower rank again; 0: under way, or done
    int64_t *connect_ns;          // when to give up an attempt to connect to a lower rank; 0: none
    idist__pending *incoming;
    int link_count; // connected ranks
    int64_t deadline_ns;
} idist__join;

// The name of a value in the store, of one rank or (rank < 0) of all.
static void idist__state_name(const idist__join *j, char *name, size_t capacity, const char *what,
                              int rank) {
    if (rank < 0) snprintf(name, capacity, "%s%s", j->prefix, what);
    else snprintf(name, capacity, "%s%s/%d", j->prefix, what, rank);
}

static idist_status idist__state_set(idist__join *j, const char *what, int rank, const void *value,
                                     size_t nbytes) {
    char name[128];
    idist__state_name(j, name, sizeof name, what, rank);
    return idist__store_post(j->store, name, value, nbytes);
}

// Whether the store is that of a torch agent, which outlives the workers and does not support last
// wills.
static bool idist__state_is_torch(const idist__join *j) {
    return strncmp(j->w->cfg.where, "torch:", 6) == 0;
}

// The server of our store, if it runs in this process.
static const idist__server *idist__state_server(const idist__join *j) {
    if (!j->owns_store || j->store->run != idist__client_run) return NULL;
    return ((const idist__client_store *)j->store->impl)->server;
}

// How often a waiting rank asks whether another one has given up: less often in a large world,
// where all ranks ask one server.
static int idist__state_ask_ms(const idist__join *j) {
    return j->w->group.size < 800 ? 100 + j->w->group.size / 2 : 500;
}

// Milliseconds until the deadline, at least 1; negative: there is none.
static int idist__state_ms_left(const idist__join *j) {
    int64_t left;

    if (j->deadline_ns == IDIST__FOREVER) return -1;
    left = (j->deadline_ns - idist__os_clock_now_ns()) / IDIST__MS;
    if (left < 1) return 1;
    return left > INT32_MAX ? INT32_MAX : (int)left;
}

static bool idist__state_is_out_of_fds(int error) { return error == EMFILE || error == ENFILE; }

//------------------------------------------------------------------------------
// [join:failure]  a rank that gives up, and how the others learn why
// uses clock fail text store:table store:file server client store:store state
//
// If one rank cannot join, no rank can: there are no partial worlds. To spare the others their
// time-out, the rank writes the reason into the store ("failed"), where waiting ranks look for it
// now and then. A rank that has read it counts itself in "heard"; the owner of the store keeps the
// store open until all of them have, or for half a second.
//
// A process that dies cannot do that. So each rank leaves a will with the server: the value of
// "failed", in case its connection ends before it has joined.
//------------------------------------------------------------------------------

enum { IDIST__FAILURE_STAY_MS = 500, IDIST__FAILURE_LOST_MS = 300 };

typedef struct idist__failure { // the value of "failed"
    int32_t status, rank;
    int32_t by_will; // the process ended; the server says so for it
    char text[400];
} idist__failure;

static idist_status idist__failure_no_fds(const idist__join *j) {
    return idist__fail(
        IDIST_ERR_NO_FDS,
        "initialize: out of file descriptors; a world of %d needs about %d: raise ulimit -n",
        j->w->group.size, 2 * j->w->group.size + 8);
}

// Adds what the server knows to the error text that names the late ranks.
static idist_status idist__failure_hint(const idist__join *j) {
    const idist__server *server = idist__state_server(j);
    int refused = server ? __atomic_load_n(&server->refused_count, __ATOMIC_RELAXED) : 0;

    if (server && __atomic_load_n(&server->other_byte_order, __ATOMIC_RELAXED))
        idist__text_append(
            idist__me.text, sizeof idist__me.text,
            ". A rank runs on a machine of another byte order; mixed worlds are not supported");
    else if (refused)
        idist__text_append(
            idist__me.text, sizeof idist__me.text,
            ". %d connections were refused or broke off: a wrong secret, another build, "
            "a stranger, or a rank that died",
            refused);

    return IDIST_ERR_TIMEOUT;
}

// If the server of the store ended, says which process that was.
static void idist__failure_of_store(const idist__join *j, idist_status status) {
    bool by_rank_0 = j->w->cfg.store == NULL && !idist__state_is_torch(j);
    char text[sizeof idist__me.text];
    const char *cause = text;

    memcpy(text, idist__me.text, sizeof text);
    if (strncmp(cause, "initialize: ", 12) == 0) cause += 12;
    if (status != IDIST_ERR_PEER_LOST || strncmp(cause, "store: ", 7) != 0) return;
    idist__fail(status, "initialize: %s: %s",
                by_rank_0 ? "rank 0 was lost, or gave up" : "the store's server was lost",
                cause + 7);
}

// Fails for the same reason if some rank has given up.
static idist_status idist__failure_check(idist__join *j) {
    const idist__server *server = idist__state_server(j);
    idist__failure failure;
    char name[128];
    const char *names[1];
    bool exists = false;
    size_t nbytes = 0;
    idist_status status;

    if (server && __atomic_load_n(&server->out_of_fds, __ATOMIC_RELAXED))
        return idist__failure_no_fds(j);

    names[0] = name;
    idist__state_name(j, name, sizeof name, "failed", -1);
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
        return idist__failure_hint(j);
    }

    return idist__fail((idist_status)failure.status, "initialize: rank %d could not join: %s",
                       (int)failure.rank, failure.text);
}

// Leaves a will with the server, or takes it back (NULL). If the connection is gone, the next
// request says so.
static void idist__failure_will(idist__join *j, const idist__failure *failure) {
    idist__store_request request;
    char name[128] = "";

    if (j->store->run != idist__client_run && j->store->run != idist__file_run) return;
    if (idist__state_is_torch(j)) return;

    if (failure) idist__state_name(j, name, sizeof name, "failed", -1);
    memset(&request, 0, sizeof request);
    request.op = IDIST__STORE_SET_WILL;
    request.key.data = name;
    request.key.nbytes = strlen(name);
    request.a.data = (const char *)failure;
    request.a.nbytes = failure ? sizeof *failure : 0;
    request.deadline_ns = j->deadline_ns;
    j->store->run(j->store, &request);
}

// Keeps the store open until all others have read why, or for a moment.
static void idist__failure_stay(idist__join *j) {
    int64_t until_ns = idist__os_clock_deadline(IDIST__FAILURE_STAY_MS);
    int64_t heard = 0;
    int others = j->w->group.size - 1 - (j->told_by_server ? 1 : 0);
    char name[128];

    idist__state_name(j, name, sizeof name, "heard", -1);

    while (idist_store_add(j->store, name, 0, &heard) == IDIST_OK && heard < others) {
        if (idist__os_clock_now_ns() >= until_ns) break;
        idist__os_clock_pause_ms(5);
    }
}

// Tells the others why this rank gives up, unless the reason came from them.
static void idist__failure_tell(idist__join *j, idist_status status) {
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
    idist__state_name(j, name, sizeof name, "failed", -1);
    if (!j->others_know) idist_store_set(j->store, name, &failure, sizeof failure);
    idist__failure_will(j, NULL);

    idist__state_name(j, name, sizeof name, "heard", -1);
    if (failure.rank > 0) idist_store_add(j->store, name, 1, &heard);
    else if (j->owns_store) idist__failure_stay(j);
    memcpy(idist__me.text, text, sizeof text);
}

// The connection to a rank ended. It may have given up and said why, or the server is about to say
// that it died.
static idist_status idist__failure_lost(idist__join *j, int rank, const char *how) {
    int64_t until_ns = idist__os_clock_deadline(IDIST__FAILURE_LOST_MS);
    char text[300];

    idist__text_copy(text, sizeof text, how); // it may lie where a failure writes its text

    do {
        idist_status status = idist__failure_check(j);
        if (status != IDIST_OK) return status;
        idist__os_clock_pause_ms(10);
    } while (idist__os_clock_ms_until(until_ns) != 0);

    return idist__fail(IDIST_ERR_PEER_LOST, "initialize: rank %d on %s was lost: %s", rank,
                       j->w->nodes[rank].hostname, text);
}

// The time is up: names the ranks, from `rank` on, that have not set this value.
static idist_status idist__failure_late(idist__join *j, const char *what, int rank) {
    char name[128], text[300] = "";
    int i, missing = 0;

    for (i = rank; i < j->w->group.size; i++) {
        const char *names[1];
        bool exists = true;

        names[0] = name;
        idist__state_name(j, name, sizeof name, what, i);
        if (idist_store_check(j->store, names, 1, &exists) != IDIST_OK || exists) continue;
        if (missing++ < 16)
            idist__text_append(text, sizeof text, "%s%d", missing > 1 ? ", " : "", i);
    }

    if (!missing)
        return idist__fail(IDIST_ERR_TIMEOUT, "initialize: rank %d showed up too late, after %d ms",
                           rank, j->w->cfg.init_timeout_ms);

    idist__fail(IDIST_ERR_TIMEOUT,
                "initialize: %d of %d ranks did not show up within %d ms: rank %s%s", missing,
                j->w->group.size, j->w->cfg.init_timeout_ms, text, missing > 16 ? ", ..." : "");
    if (!j->w->cfg.store && strncmp(j->w->cfg.where, "unix:", 5) == 0)
        idist__text_append(
            idist__me.text, sizeof idist__me.text,
            ". The ranks meet at a local socket, which those of another user, network "
            "namespace (container) or host cannot reach");

    return idist__failure_hint(j);
}

//------------------------------------------------------------------------------
// [join:store]  opening the store, and values that a rank waits for
// uses clock os:env fail client store:store launch:env pmi state failure
//
// Worlds made one after another through the same store must not see each other's values. So each
// rank counts its worlds in the store, and the count is part of all names. In a store of our own
// the count can only be 1; a higher one means that two processes have the same rank. A torch agent
// keeps its store when it restarts the workers, so there the number of restarts is part of the
// names too.
//------------------------------------------------------------------------------

// Waits for a value. After a time-out the error names the ranks that have not set it, or that have
// not set `cause`, a value that must exist first.
static idist_status idist__join_store_get(idist__join *j, const char *what, int rank,
                                          const char *cause, void *value, size_t nbytes) {
    char name[128];
    size_t received = 0;
    int ask_ms = idist__state_ask_ms(j);
    idist_status status;

    idist__state_name(j, name, sizeof name, what, rank);

    do {
        int ms = idist__state_ms_left(j);

        if (ms < 0 || ms > ask_ms) ms = ask_ms;
        status = idist_store_get(j->store, name, value, nbytes, &received, ms);
        if (status == IDIST_OK && received != nbytes)
            return idist__fail(IDIST_ERR_UNSUPPORTED,
                               "initialize: rank %d was built from another version of idist.h",
                               rank < 0 ? 0 : rank); // values of the job come from rank 0
        if (status != IDIST_ERR_TIMEOUT) return status;
        status = idist__failure_check(j);
        if (status != IDIST_OK) return status;
    } while (idist__os_clock_ms_until(j->deadline_ns) != 0);

    return idist__failure_late(j, cause ? cause : what, rank < 0 ? 0 : rank);
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

    memset(&desc, 0, sizeof desc);
    desc.server = cfg->rank == 0;
    desc.timeout_ms = cfg->init_timeout_ms;
    desc.secret = cfg->secret.nbytes ? cfg->secret.bytes : NULL;
    desc.secret_nbytes = cfg->secret.nbytes;
    desc.allocator = cfg->mem;
    status = idist__store_open(cfg->where, &desc, cfg->listener, &j->store);
    cfg->listener = -1; // the store owns it now
    if (status != IDIST_OK) return idist__fail(status, "initialize: %s", idist__me.text);
    j->owns_store = true;

    return IDIST_OK;
}

static void idist__join_store_leave_will(idist__join *j) {
    idist__failure will;

    if (j->w->cfg.rank == 0) return; // when rank 0 ends, the store ends too
    memset(&will, 0, sizeof will);
    will.status = (int32_t)IDIST_ERR_PEER_LOST;
    will.rank = j->w->cfg.rank;
    will.by_will = 1;
    snprintf(will.text, sizeof will.text, "its process on %s ended during idist_initialize",
             j->w->hostname);
    idist__failure_will(j, &will);
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
    return j->owns_store && j->w->cfg.rank != 0 && j->store->run == idist__client_run &&
           !idist__state_is_torch(j);
}

// The request after the number has ended with this status: whether we are the only process with
// this rank. If we are not, or cannot tell, the others are told nothing of us.
static idist_status idist__join_store_claim(idist__join *j, idist_status status) {
    if (!idist__join_store_claims_late(j)) return status;

    if (idist__store_posted_sum(j->store) != 1) {
        j->prefix[0] = 0;
        return status == IDIST_OK ? idist__join_store_rank_taken(j) : status;
    }

    if (status == IDIST_OK) idist__join_store_leave_will(j);

    return status;
}

static idist_status idist__join_store_open(idist__join *j) {
    const idist__config *cfg = &j->w->cfg;
    const char *restart = idist__os_env("TORCHELASTIC_RESTART_COUNT");
    bool torch = idist__state_is_torch(j);
    char base[40] = "idist", name[64];
    int64_t world_number = 0;
    idist_status status;

    j->store = cfg->store;

    if (!j->store) {
        status = idist__join_store_open_own(j);
        if (status != IDIST_OK) return status;
    }

    if (torch) snprintf(base, sizeof base, "idist-%.20s", restart ? restart : "0");
    snprintf(name, sizeof name, "%s/%d", base, cfg->rank);

    if (idist__join_store_claims_late(j)) {
        snprintf(j->prefix, sizeof j->prefix, "%s/1/", base);
        return idist__store_post_add(j->store, name, 1);
    }

    status = idist_store_add(j->store, name, 1, &world_number);
    if (status != IDIST_OK) return status;
    if (j->owns_store && world_number != 1 && !torch) return idist__join_store_rank_taken(j);

    snprintf(j->prefix, sizeof j->prefix, "%s/%lld/", base, (long long)world_number);
    idist__join_store_leave_will(j);

    return IDIST_OK;
}

// This rank is done. Rank 0 closes the store only when all ranks are, because until then they learn
// of a death through it. (It may close the store before it has answered the last request.)
static idist_status idist__join_store_leave(idist__join *j) {
    char one = 1;
    idist_status status = idist__state_set(j, "joined", j->w->group.rank, &one, sizeof one);
    int i;

    if (status == IDIST_OK) idist__failure_will(j, NULL);
    if (!j->owns_store || j->w->group.rank != 0) return status;

    for (i = 1; i < j->w->group.size && status == IDIST_OK; i++)
        status = idist__join_store_get(j, "joined", i, NULL, &one, sizeof one);

    return status;
}

//------------------------------------------------------------------------------
// [join:table]  the number of the job, and a record of every rank
// uses os:random os:env socket fail text mem sha address interface connection
// uses secret client config model state store
//
// Rank 0 draws a random job number, from which the key of all connections is derived. Each rank
// then publishes a record: its host, and where its local socket listens. Rank 0 collects the
// records in one table, so that n ranks take 2 n requests rather than n * n. The table tells
// whether TCP is needed at all.
//------------------------------------------------------------------------------

// Rank 0 publishes the job number and the number of ranks, which every other rank compares with its
// own.
static idist_status idist__table_agree_on_job(idist__join *j) {
    uint64_t job[2] = {0, 0}; // number of the job, number of ranks
    uint8_t key[32];
    idist_status status;

    if (j->w->group.rank == 0) {
        idist__os_random(job, sizeof job);
        job[1] = (uint64_t)j->w->group.size;
        status = idist__state_set(j, "job", -1, job, sizeof job);
    } else {
        status = idist__join_store_get(j, "job", -1, NULL, job, sizeof job);
        status = idist__join_store_claim(j, status);
    }

    if (status != IDIST_OK) return status;
    if (job[1] != (uint64_t)j->w->group.size)
        return idist__fail(
            IDIST_ERR_ENV,
            "initialize: rank 0 was started with a world of %llu ranks, this rank with %d",
            (unsigned long long)job[1], j->w->group.size);

    j->job = job[0];
    idist__secret_key(&j->w->cfg.secret, key);
    idist__sha_hmac(key, "links", &j->job, sizeof j->job, NULL, 0, j->key);

    return IDIST_OK;
}

static idist_status idist__table_listen_local(idist__join *j, idist__record *me) {
    idist__os_address address;
    uint64_t id[2];
    idist_status status;

    idist__os_random(id, sizeof id);
    snprintf(me->local, sizeof me->local, "unix:idist-%016llx%016llx", (unsigned long long)id[0],
             (unsigned long long)id[1]);
    status = idist__address_parse(&address, me->local);
    if (status != IDIST_OK) return status;

    return idist__connection_listen(&address, me->local, &j->listeners[0]);
}

// Our end of the connection to the store. False: it is no TCP connection of ours.
static bool idist__table_store_address(const idist__join *j, idist__os_address *address) {
    return j->owns_store && j->store->run == idist__client_run &&
           idist__os_socket_own_address(((idist__client_store *)j->store->impl)->fd, address) &&
           !idist__os_socket_is_local(address);
}

// The address to publish. by_loopback: all ranks are on one host, and use TCP because the user
// wants it, or have reached the store through loopback, so that they reach each other as well.
static idist_status idist__table_own_address(const idist__join *j, bool by_loopback,
                                             idist__own_address *own) {
    idist__os_address hint;

    if (!by_loopback || idist__os_env("IDIST_ADDR"))
        return idist__interface_choose(idist__table_store_address(j, &hint) ? &hint : NULL, own);

    memset(own, 0, sizeof *own);
    idist__text_copy(own->ip, sizeof own->ip, "127.0.0.1");

    return IDIST_OK;
}

// Listens on all addresses where a secret keeps strangers out, or else at the one that is
// published.
static idist_status idist__table_listen_tcp(idist__join *j, bool by_loopback) {
    idist__world *w = j->w;
    bool has_secret = w->cfg.secret.nbytes != 0;
    idist__os_address address;
    idist__own_address own;
    idist_status status = idist__table_own_address(j, by_loopback, &own);

    if (status == IDIST_OK) status = idist__address_tcp(&address, own.ip, 0);
    if (status != IDIST_OK) return status;
    if (!idist__os_socket_is_loopback(&address) && !has_secret && !w->cfg.secret.insecure)
        return idist__fail(
            IDIST_ERR_NO_SECRET,
            "initialize: listening at %s, beyond this host, needs a shared secret: set "
            "IDIST_SECRET or IDIST_SECRET_FILE on all ranks, or IDIST_INSECURE=1 to trust the "
            "network",
            own.ip);

    if (has_secret && !idist__os_socket_is_loopback(&address))
        status = idist__connection_listen_everywhere(0, own.ip, &j->listeners[1]);
    else status = idist__connection_listen(&address, own.ip, &j->listeners[1]);
    if (status != IDIST_OK) return status;
    if (!idist__os_socket_own_address(j->listeners[1], &address))
        return idist__fail_errno("initialize: asking for the port of a listener", errno);
    snprintf(j->tcp[w->group.rank].text, sizeof j->tcp->text, "tcp:[%s]:%d", own.ip,
             idist__os_socket_port(&address));
    snprintf(w->advertised, sizeof w->advertised, own.ifname[0] ? "%s (%s)" : "%s", own.ip,
             own.ifname);

    return IDIST_OK;
}

// Every rank has filled in its own row of a table: rank 0 collects them, under `row`, and publishes
// the whole, as `all`.
static idist_status idist__table_exchange(idist__join *j, const char *row, const char *all,
                                          void *table, size_t row_nbytes) {
    char *rows = (char *)table;
    int i, n = j->w->group.size, me = j->w->group.rank;
    idist_status status = idist__state_set(j, row, me, rows + (size_t)me * row_nbytes, row_nbytes);

    if (status != IDIST_OK) return status;
    if (me) return idist__join_store_get(j, all, -1, row, table, row_nbytes * (size_t)n);

    for (i = 1; i < n; i++) {
        status = idist__join_store_get(j, row, i, NULL, rows + (size_t)i * row_nbytes, row_nbytes);
        if (status != IDIST_OK) return status;
    }

    return idist__state_set(j, all, -1, table, row_nbytes * (size_t)n);
}

// The same for the addresses of the TCP sockets.
static idist_status idist__table_exchange_tcp(idist__join *j, bool by_loopback) {
    size_t i, n = (size_t)j->w->group.size;
    idist_status status;

    j->tcp = (idist__tcp_text *)idist__mem_alloc(&j->w->cfg.mem, sizeof *j->tcp * n);
    if (!j->tcp) return IDIST_ERR_NO_MEMORY;
    status = idist__table_listen_tcp(j, by_loopback);
    if (status != IDIST_OK) return status;

    status = idist__table_exchange(j, "tcp", "tcps", j->tcp, sizeof *j->tcp);
    for (i = 0; i < n; i++) j->tcp[i].text[sizeof j->tcp->text - 1] = 0;

    return status;
}

// Checks the record of a rank and remembers its host.
static idist_status idist__table_enter(idist__join *j, idist__record *record, int rank) {
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

static idist_status idist__table_make(idist__join *j, idist__record *records) {
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
    if (idist__table_store_address(j, &address) && idist__os_socket_is_loopback(&address))
        me->loopback = idist__config_reach_key();
    if (w->cfg.transport != IDIST__JOIN_TCP_ONLY) status = idist__table_listen_local(j, me);
    if (status == IDIST_OK)
        status = idist__table_exchange(j, "node", "nodes", records, sizeof *records);

    for (i = 0; i < w->group.size && status == IDIST_OK; i++) {
        status = idist__table_enter(j, &records[i], i);
        if (records[i].host != host) one_host = false;
        if (!records[i].local[0]) all_local = false; // this rank uses TCP only
        if (!me->loopback || records[i].loopback != me->loopback) all_loopback = false;
        if (records[i].processors != me->processors) continue;
        if (i < w->group.rank) w->sharing_rank++;
        w->sharing_size++;
    }

    j->records = records;
    if (status == IDIST_OK && !(one_host && all_local)) // the same on all ranks
        status = idist__table_exchange_tcp(j, one_host || all_loopback);

    return status;
}

//------------------------------------------------------------------------------
// [join:links]  a connection between each pair of ranks
// uses clock descriptor poll socket fail text mem base:log address auth pending
// uses msg:types msg:transport link state failure
//
// Each rank connects to all lower ones and accepts the higher ones: a local socket inside a host,
// TCP between hosts. Both ends prove that they know the key of the job, and exchange their ranks.
// All handshakes run concurrently, so no order of ranks can block another.
//
//   idist__links_connect    begins a connection, or says when to try again
//   idist__links_accept     accepts connections while there is room for more handshakes
//   idist__links_step       advances a handshake; a successful one becomes a link
//
// Strangers may connect too. An incoming handshake that fails is closed and forgotten. An outgoing
// one that breaks off is tried again, because the peer may have had no room for it; any other
// failure of an outgoing one is fatal.
//------------------------------------------------------------------------------

enum {
    IDIST__LINKS_CONNECT_MS = 3000,
    IDIST__LINKS_RETRY_MS = 20,
    IDIST__LINKS_POLL_MS = 20,
    IDIST__LINKS_ASK_MS = 400 // before it asks for the first time whether a rank has given up
};

static bool idist__links_is_local(const idist__join *j, int rank) {
    const idist__record *me = &j->records[j->w->group.rank];
    const idist__record *other = &j->records[rank];
    return j->w->cfg.transport != IDIST__JOIN_TCP_ONLY && other->host == me->host &&
           other->local[0];
}

// Where a rank listens for us.
static const char *idist__links_find(const idist__join *j, int rank) {
    return idist__links_is_local(j, rank) ? j->records[rank].local : j->tcp[rank].text;
}

// Connecting failed: schedules another attempt, or fails.
static idist_status idist__links_connect_failed(idist__join *j, int rank, const char *where,
                                                int error) {
    char how[200];

    if (idist__state_is_out_of_fds(error)) return idist__failure_no_fds(j);

    if (error == EAGAIN || error == ETIMEDOUT || error == EINTR) { // its accept queue may be full
        j->retry_ns[rank] = idist__os_clock_deadline(IDIST__LINKS_RETRY_MS);
        return idist__failure_check(j);
    }

    if (idist__os_socket_is_unreachable(error))
        return idist__fail(IDIST_ERR_SYSTEM,
                           "initialize: rank %d on %s cannot be reached at %s (%s): the network "
                           "interface is down, or no route leads there",
                           rank, j->w->nodes[rank].hostname, where, strerror(error));

    snprintf(how, sizeof how, "no connection to %s: %s", where, strerror(error));

    return idist__failure_lost(j, rank, how);
}

// Begins to connect.
static idist_status idist__links_connect(idist__join *j, int rank) {
    idist__os_address address;
    const char *where = idist__links_find(j, rank);
    idist_status status = idist__address_parse(&address, where);
    int fd;

    j->retry_ns[rank] = 0;
    if (status != IDIST_OK) return status;
    fd = idist__os_socket_connect_begin(&address);
    if (fd < 0) return idist__links_connect_failed(j, rank, where, errno);

    memset(&j->outgoing[rank], 0, sizeof j->outgoing[rank]);
    j->outgoing[rank].fd = fd;
    j->connect_ns[rank] = idist__os_clock_deadline(IDIST__LINKS_CONNECT_MS);

    return IDIST_OK;
}

// An attempt to connect has ended, or its time is up: begins the handshake, or schedules another
// attempt.
static idist_status idist__links_connected(idist__join *j, int rank) {
    idist__handshake *handshake = &j->outgoing[rank];
    int error = ETIMEDOUT, fd = handshake->fd;

    j->connect_ns[rank] = 0;
    if (handshake->ready) error = idist__os_socket_connect_end(&fd, idist__links_is_local(j, rank));
    else idist__os_descriptor_close(&fd);
    handshake->fd = -1;
    if (error) return idist__links_connect_failed(j, rank, idist__links_find(j, rank), error);

    idist__auth_begin(handshake, fd, false, j->key, IDIST__ROLE_LINK, j->job, j->w->group.rank,
                      j->w->group.size, j->deadline_ns);
    handshake->ready = true;

    return IDIST_OK;
}

static idist_status idist__links_accept(idist__join *j, int listener) {
    idist__handshake *handshake = idist__pending_slot(j->incoming);

    while (handshake) {
        int fd = idist__os_socket_accept(listener);

        if (fd < 0 && idist__state_is_out_of_fds(errno)) {
            if (!idist__pending_evict(j->incoming)) return idist__failure_no_fds(j);
            idist__os_clock_pause_ms(1); // rather than spin while descriptors are short
            return IDIST_OK;
        }

        if (fd < 0) return IDIST_OK;
        idist__os_descriptor_close(&handshake->fd);
        idist__auth_begin(handshake, fd, true, j->key, IDIST__ROLE_LINK, j->job, j->w->group.rank,
                          j->w->group.size, idist__os_clock_deadline(IDIST__PENDING_MS));
        handshake->ready = true;
        handshake = idist__pending_slot(j->incoming);
    }

    return IDIST_OK;
}

// A handshake has succeeded: its connection becomes a link.
static void idist__links_add(idist__join *j, int rank, int fd) {
    idist__link *l = &j->ring->links[rank];
    idist__os_address address;
    bool local = idist__os_socket_own_address(fd, &address) && idist__os_socket_is_local(&address);

    if (!local) idist__os_socket_measured(fd);
    l->fd = fd;
    idist__link_open(j->ring, l, local ? &idist__transport_unix : &idist__transport_tcp, &l->fd);
    j->link_count++;
}

// Checks which rank is at the other end. to: the rank that we connected to; -1: it connected to us.
static idist_status idist__links_check_rank(const idist__join *j, int rank, int to) {
    if (to >= 0 && rank != to) return IDIST_ERR_AUTH;
    if (to < 0 && (rank <= j->w->group.rank || rank >= j->w->group.size)) return IDIST_ERR_AUTH;
    return j->ring->links[rank].open ? IDIST_ERR_RANK_TAKEN : IDIST_OK;
}

// Advances a handshake.
static idist_status idist__links_step(idist__join *j, idist__handshake *handshake, int to) {
    bool done = false;
    idist_status status;

    handshake->ready = false;
    status = idist__auth_step(handshake, &done);
    if (status == IDIST_OK && !done) return IDIST_OK;
    if (status == IDIST_OK) status = idist__links_check_rank(j, (int)handshake->theirs.rank, to);

    if (status == IDIST_OK) {
        idist__links_add(j, (int)handshake->theirs.rank, handshake->fd);
        handshake->fd = -1;
        return IDIST_OK;
    }

    idist__os_descriptor_close(&handshake->fd);

    if (to < 0) {
        idist__log_print(&j->w->log, IDIST_LOG_DEBUG, "a connection was refused: %s",
                         idist__me.text);
        return IDIST_OK;
    }

    if (handshake->broke) {
        j->retry_ns[to] = idist__os_clock_deadline(5 + to % 16); // not all ranks at the same moment
        return IDIST_OK;
    }

    return idist__fail(status, "initialize: connecting to rank %d on %s: %s", to,
                       j->w->nodes[to].hostname, idist__me.text);
}

static idist_status idist__links_late(const idist__join *j) {
    char text[300] = "";
    int i, missing = 0;

    for (i = 0; i < j->w->group.size; i++)
        if (i != j->w->group.rank && !j->ring->links[i].open && missing++ < 16)
            idist__text_append(text, sizeof text, "%s%d", missing > 1 ? ", " : "", i);

    return idist__fail(IDIST_ERR_TIMEOUT, "initialize: not connected within %d ms to rank %s%s",
                       j->w->cfg.init_timeout_ms, text, missing > 16 ? ", ..." : "");
}

// ---- all of them at once ----

// Fills the poll set: the listeners, if there is room for another handshake; outgoing handshakes,
// in the order of ranks; incoming ones. Returns the number of entries.
static int idist__links_poll_set(const idist__join *j, bool accepts,
                                 idist__os_poll_entry *entries) {
    int i, count = 0;

    for (i = 0; i < 2; i++)
        if (j->listeners[i] >= 0 && accepts)
            idist__os_poll_watch(&entries[count++], j->listeners[i], IDIST__OS_READABLE);

    for (i = 0; i < j->w->group.rank; i++) {
        const idist__handshake *handshake = &j->outgoing[i];

        if (handshake->fd >= 0)
            idist__os_poll_watch(&entries[count++], handshake->fd,
                                 j->connect_ns[i] ? IDIST__OS_WRITABLE
                                                  : idist__auth_awaits(handshake));
    }

    return count + idist__pending_fill_polls(j->incoming, entries + count);
}

// Marks the handshakes that poll has reported; the entries are those of idist__links_poll_set.
static void idist__links_polled(idist__join *j, bool accepts, const idist__os_poll_entry *entries) {
    int i, count = 0;

    for (i = 0; i < 2; i++)
        if (j->listeners[i] >= 0 && accepts) count++;
    for (i = 0; i < j->w->group.rank; i++)
        if (j->outgoing[i].fd >= 0) j->outgoing[i].ready = idist__os_poll_ready(&entries[count++]);
    idist__pending_take_polls(j->incoming, entries + count);
}

// Advances everything that is ready.
static idist_status idist__links_progress(idist__join *j) {
    int i;
    idist_status status = IDIST_OK;

    for (i = 0; i < 2 && status == IDIST_OK; i++)
        if (j->listeners[i] >= 0) status = idist__links_accept(j, j->listeners[i]);

    for (i = 0; i < j->w->group.rank && status == IDIST_OK; i++) {
        idist__handshake *handshake = &j->outgoing[i];

        if (j->connect_ns[i]) {
            if (handshake->ready || idist__os_clock_now_ns() >= j->connect_ns[i])
                status = idist__links_connected(j, i);
        } else if (handshake->fd >= 0 && handshake->ready)
            status = idist__links_step(j, handshake, i);
        else if (j->retry_ns[i] && idist__os_clock_now_ns() >= j->retry_ns[i])
            status = idist__links_connect(j, i);
    }

    for (i = 0; i < IDIST__PENDING_SLOTS && status == IDIST_OK; i++) {
        idist__handshake *handshake = &j->incoming->place[i];
        if (handshake->fd >= 0 && handshake->ready) status = idist__links_step(j, handshake, -1);
    }

    return status;
}

// Sleeps until something is ready, and advances it.
static idist_status idist__links_turn(idist__join *j, idist__os_poll_entry *entries) {
    bool accepts = idist__pending_slot(j->incoming) != NULL;
    int count = idist__links_poll_set(j, accepts, entries);
    int ms = idist__os_clock_ms_until(j->deadline_ns);

    if (ms == 0) return idist__links_late(j);
    if (ms < 0 || ms > IDIST__LINKS_POLL_MS) ms = IDIST__LINKS_POLL_MS;
    if (idist__os_poll(entries, count, ms) < 0 && errno != EINTR)
        return idist__fail_errno("poll", errno);

    idist__links_polled(j, accepts, entries);

    return idist__links_progress(j);
}

static idist_status idist__links_connect_all(idist__join *j) {
    int i, size = j->w->group.size;
    size_t capacity = (size_t)size + IDIST__PENDING_SLOTS + 2;
    idist__os_poll_entry *entries =
        (idist__os_poll_entry *)idist__mem_alloc(&j->w->cfg.mem, sizeof *entries * capacity);
    int64_t asked_ns = idist__os_clock_now_ns();
    int64_t ask_ns = IDIST__LINKS_ASK_MS * IDIST__MS;
    idist_status status = entries ? IDIST_OK : IDIST_ERR_NO_MEMORY;

    for (i = 0; i < j->w->group.rank && status == IDIST_OK; i++)
        status = idist__links_connect(j, i);

    while (status == IDIST_OK && j->link_count < size - 1) {
        status = idist__links_turn(j, entries);

        if (status == IDIST_OK && idist__os_clock_now_ns() - asked_ns > ask_ns) {
            int64_t begun_ns = idist__os_clock_now_ns();

            status = idist__failure_check(j); // meanwhile no handshake advances
            asked_ns = idist__os_clock_now_ns();
            ask_ns = idist__state_ask_ms(j) * IDIST__MS + 4 * (asked_ns - begun_ns);
        }
    }

    idist__mem_free(&j->w->cfg.mem, entries);

    return status;
}

//------------------------------------------------------------------------------
// [join:share]  memory shared inside a host
// uses clock os:random descriptor cpu os:memory poll process os:segment fail
// uses mem base:window base:log connection shm:segment pipe msg:types link
// uses region state failure
//
// Once the ranks of a host are connected, the lowest one makes the file ([shm:segment]) and sends
// its descriptor to the others. Each rank maps the file, reserves its own part, and votes on
// whether that worked:
//
//   lowest rank    makes the file    sends it        maps it   collects votes   sends the lowest
//   other ranks                      receive it      map it    send votes       receive it
//
// The file is used only if it worked everywhere. If it did not, they try once more without windows,
// since a limit on address space may be the reason, and then the links stay sockets.
//
// A second vote decides whether they read each other's memory through the kernel. Each rank tries
// to read a random number at the address that every other rank has left in the file.
//------------------------------------------------------------------------------

// Votes; the lowest one decides.
enum {
    IDIST__VOTE_FAILED,
    IDIST__VOTE_FENCED, // mapped, but the kernel has no membarrier: writers need a fence
    IDIST__VOTE_MAPPED
};

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

// The part of a rank: doorbell | a pipe from each rank | regions. Region 0 has large buffers, the
// others a quarter of that; there are as many as fit.
static void idist__join_share_layout(idist__segment *m, size_t shm_nbytes, size_t window_nbytes) {
    size_t room, first, other, chunk;

    m->pipe_nbytes = 128 * 1024;
    while (m->pipe_nbytes > IDIST__PAGE && (size_t)m->n * m->pipe_nbytes > shm_nbytes / 4)
        m->pipe_nbytes /= 2;

    m->regions_at = sizeof(idist__doorbell) + (size_t)m->n * (sizeof(idist__pipe) + m->pipe_nbytes);
    m->regions_at = idist__join_share_round_up(m->regions_at);
    room = shm_nbytes > m->regions_at ? shm_nbytes - m->regions_at : 0;

    chunk = room / (2 * IDIST__BUFFERS);
    if (chunk > IDIST__CHUNK_MAX) chunk = IDIST__CHUNK_MAX;
    m->chunk_nbytes[0] = chunk & ~(IDIST__LINE - 1);
    m->chunk_nbytes[1] = (chunk / 4) & ~(IDIST__LINE - 1);
    first = idist__region_nbytes(m->chunk_nbytes[0]);
    other = idist__region_nbytes(m->chunk_nbytes[1]);

    m->region_count = room < first ? 0 : 1 + (int)((room - first) / other);
    if (m->region_count > (int)IDIST__COUNT_OF(m->taken))
        m->region_count = (int)IDIST__COUNT_OF(m->taken);

    m->part_nbytes = m->regions_at;
    if (m->region_count) m->part_nbytes += first + (size_t)(m->region_count - 1) * other;
    m->window_at = IDIST__PAGE + (size_t)m->n * m->part_nbytes;
    m->window_nbytes = window_nbytes;
}

// At least the memory of the host, a power of two; it costs nothing but addresses.
static size_t idist__join_share_window_nbytes(int n) {
    uint64_t ram = idist__os_segment_ram();
    uint64_t nbytes = (uint64_t)1 << 30;

    if (sizeof(void *) < 8) return 0;
    while (nbytes < ram && nbytes * (uint64_t)n < (uint64_t)1 << 42) nbytes *= 2;

    return (size_t)nbytes;
}

// ---- mapping it ----

// Maps the file and reserves our part of it. Takes the descriptor. 0, or an errno.
static int idist__join_share_map(idist__segment *m, int fd) {
    idist__doorbell *bell;
    idist__os_cpu_set cpus;
    int i, error = 0;

    if (idist__os_segment_nbytes(fd) < idist__join_share_nbytes(m)) error = EINVAL;
    if (!error)
        error = idist__os_memory_reserve(fd, IDIST__PAGE + (size_t)m->me * m->part_nbytes,
                                         m->part_nbytes);
    if (!error && m->me == 0) error = idist__os_memory_reserve(fd, 0, IDIST__PAGE);

    if (error) {
        idist__os_descriptor_close(&fd);
        return error;
    }

    m->window =
        idist__window_open(fd, idist__join_share_nbytes(m),
                           m->window_at + (size_t)m->me * m->window_nbytes, m->window_nbytes);
    if (!m->window) return ENOMEM;
    m->base = m->window->map;

    idist__os_cpu_usable(&cpus);
    for (i = 0; i < IDIST__CPU_WORDS; i++)
        __atomic_fetch_or(&idist__segment_header_of(m)->cpus.bits[i], cpus.bits[i],
                          __ATOMIC_RELAXED);

    idist__os_random(&m->proof, sizeof m->proof);
    bell = idist__segment_doorbell(m, m->me);
    bell->pid = idist__os_process_id();
    bell->proof = m->proof;
    bell->proof_address = (uint64_t)(uintptr_t)&m->proof;

    return 0;
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
        return idist__fail(
            IDIST_ERR_TIMEOUT,
            "initialize: rank %d on %s did not take part in this host's vote on shared memory",
            rank, j->w->nodes[rank].hostname);

    return idist__failure_lost(
        j, rank, "its connection ended while the ranks of this host agreed on shared memory");
}

// Waits until a link has something to read. Now and then it asks whether a rank has given up, which
// may be why nothing arrives.
static idist_status idist__join_share_await(idist__join *j, int rank) {
    idist_status status;

    for (;;) {
        int64_t ask_ns = idist__os_clock_deadline(idist__state_ask_ms(j));

        if (idist__os_poll_wait(j->ring->links[rank].fd, IDIST__OS_READABLE,
                                ask_ns < j->deadline_ns ? ask_ns : j->deadline_ns))
            return IDIST_OK;
        status = idist__failure_check(j);
        if (status != IDIST_OK) return status;
        errno = ETIMEDOUT;
        if (idist__os_clock_ms_until(j->deadline_ns) == 0) return idist__join_share_broken(j, rank);
    }
}

// Sets *vote to the lowest vote of the ranks of this host. The lowest rank collects them.
static idist_status idist__join_share_vote(idist__join *j, const idist__segment *m,
                                           const int *ranks, char *vote) {
    const idist__link *links = j->ring->links;
    int i, lead = ranks[0];
    int others = m->me == 0 ? m->n : 1; // of the lead: ranks[1 .. others)
    idist_status status;

    for (i = 1; i < others; i++) {
        char other = 0;

        status = idist__join_share_await(j, ranks[i]);
        if (status != IDIST_OK) return status;
        if (!idist__connection_read_all(links[ranks[i]].fd, &other, 1, j->deadline_ns))
            return idist__join_share_broken(j, ranks[i]);
        if (other < *vote) *vote = other;
    }

    for (i = 1; i < others; i++)
        if (!idist__connection_write_all(links[ranks[i]].fd, vote, 1, j->deadline_ns))
            return idist__join_share_broken(j, ranks[i]);
    if (!m->me) return IDIST_OK;

    if (!idist__connection_write_all(links[lead].fd, vote, 1, j->deadline_ns))
        return idist__join_share_broken(j, lead);
    status = idist__join_share_await(j, lead);
    if (status != IDIST_OK) return status;
    if (!idist__connection_read_all(links[lead].fd, vote, 1, j->deadline_ns))
        return idist__join_share_broken(j, lead);

    return IDIST_OK;
}

// ---- one attempt ----

// Makes the file and sends it to the others, or receives it. Without a file *fd is -1 and *error
// says why; the ranks vote all the same.
static idist_status idist__join_share_pass(idist__join *j, idist__segment *m, const int *ranks,
                                           int *fd, int *error) {
    const idist__link *links = j->ring->links;
    idist__join_share_hello hello;
    idist_status status;
    int i;

    *fd = -1;
    *error = EINVAL;
    hello.shm_nbytes = j->w->cfg.shm_nbytes;
    hello.window_nbytes = m->window_nbytes;

    if (m->me) {
        status = idist__join_share_await(j, ranks[0]);
        if (status != IDIST_OK) return status;
        if (!idist__join_share_receive(links[ranks[0]].fd, &hello, sizeof hello, fd,
                                       j->deadline_ns))
            return idist__join_share_broken(j, ranks[0]);
        idist__join_share_layout(m, (size_t)hello.shm_nbytes, (size_t)hello.window_nbytes);
        return IDIST_OK;
    }

    idist__join_share_layout(m, (size_t)hello.shm_nbytes, (size_t)hello.window_nbytes);
    *fd = idist__os_memory_file(idist__join_share_nbytes(m));
    if (*fd < 0) *error = errno;

    for (i = 1; i < m->n; i++)
        if (!idist__join_share_send(links[ranks[i]].fd, &hello, sizeof hello, *fd,
                                    j->deadline_ns)) {
            idist__os_descriptor_close(fd);
            return idist__join_share_broken(j, ranks[i]);
        }

    return IDIST_OK;
}

// *all: every rank of the host has mapped the file.
static idist_status idist__join_share_attempt(idist__join *j, idist__segment *m, const int *ranks,
                                              bool *all) {
    int fd, error;
    char vote;
    idist_status status = idist__join_share_pass(j, m, ranks, &fd, &error);

    if (status != IDIST_OK) return status;
    if (fd >= 0) error = idist__join_share_map(m, fd);
    if (error)
        idist__log_print(&j->w->log, IDIST_LOG_INFO, "no shared memory: %s", strerror(error));

    if (error) vote = IDIST__VOTE_FAILED;
    else vote = idist__os_cpu_fence_others(true) ? IDIST__VOTE_MAPPED : IDIST__VOTE_FENCED;
    status = idist__join_share_vote(j, m, ranks, &vote);
    *all = status == IDIST_OK && vote != IDIST__VOTE_FAILED;
    if (!*all) return status;

    if (m->me == 0) {
        idist__segment_header *head = idist__segment_header_of(m);
        head->ncores = (uint32_t)idist__os_cpu_set_count(&head->cpus);
        head->fenced = vote == IDIST__VOTE_FENCED || m->n > (int)head->ncores;
    }

    vote = idist__join_share_reads_all(m); // by now everybody has left its proof
    status = idist__join_share_vote(j, m, ranks, &vote);
    m->reads_remote = vote != 0;

    return status;
}

// ---- the shared memory of a ring ----

static void idist__join_share_free(const idist_allocator *mem, idist__segment *m) {
    if (!m) return;
    if (m->window) idist__window_close(m->window);
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
    m->local = (int *)idist__mem_alloc(mem, sizeof *m->local * 2 * world_size);
    m->ports = (idist__pipe_port *)idist__mem_alloc(mem, sizeof *m->ports * world_size);
    m->processes = (idist__os_process *)idist__mem_alloc(mem, sizeof *m->processes * world_size);
    m->remote_pieces = (char *)idist__mem_raw(mem, IDIST__REMOTE_PIECE * world_size);
    if (m->local && m->ports && m->processes && m->remote_pieces) return m;

    idist__join_share_free(mem, m);

    return NULL;
}

// From here on the links inside this host are pipes in the file.
static void idist__join_share_take_over(idist__join *j, idist__segment *m, const int *ranks) {
    const idist__segment_header *head = idist__segment_header_of(m);
    int i;

    m->fenced = head->fenced != 0;
    m->oversubscribed = m->n > (int)head->ncores;
    j->w->ncores = (int)head->ncores;

    for (i = 0; i < m->n; i++) {
        idist__link *l = &j->ring->links[ranks[i]];
        idist__pipe_port *port = &m->ports[i];

        m->local[ranks[i]] = i;
        port->fd = -1;
        if (i == m->me) continue;
        port->shm = m;
        port->peer = i;
        port->in = idist__segment_pipe(m, i, m->me);
        port->out = idist__segment_pipe(m, m->me, i);
        port->fd = l->fd;
        l->fd = -1;
        idist__link_open(j->ring, l, &idist__pipe_transport, port);
    }

    j->ring->shm = m;
}

static idist_status idist__join_share_share(idist__join *j) {
    const idist_allocator *mem = &j->w->cfg.mem;
    const idist__record *records = j->records;
    const idist__record *own = &records[j->w->group.rank];
    int i, attempt, size = j->w->group.size;
    int *ranks; // the ranks of this host that take part
    idist__segment *m;
    bool all = false;
    idist_status status = IDIST_OK;

    if (!own->shm) return IDIST_OK;
    m = idist__join_share_new(mem, (size_t)size);
    if (!m) return IDIST_ERR_NO_MEMORY;
    ranks = m->local + size; // room for these was allocated with it

    for (i = 0; i < size; i++) {
        m->local[i] = -1;
        if (!records[i].shm || records[i].host != own->host || !records[i].local[0]) continue;
        if (i == j->w->group.rank) m->me = m->n;
        ranks[m->n++] = i;
    }

    m->window_nbytes = idist__join_share_window_nbytes(m->n);

    for (attempt = 0; attempt < 2 && m->n > 1 && status == IDIST_OK && !all; attempt++) {
        if (attempt) m->window_nbytes = 0;
        status = idist__join_share_attempt(j, m, ranks, &all);
        if (m->window && !all) idist__window_close(m->window);
        if (!all) m->window = NULL;
    }

    if (status == IDIST_OK && all) idist__join_share_take_over(j, m, ranks);
    else idist__join_share_free(mem, m);

    return status;
}

//------------------------------------------------------------------------------
// [join:open]  all steps in order; making and freeing the ring
// uses clock descriptor cpu poll fail text mem auth pending store:store model
// uses msg:types link msg:message state failure store table links share
//------------------------------------------------------------------------------

static void idist__ring_free(idist__ring *ring) {
    const idist_allocator *mem = &ring->w->cfg.mem;
    int i;

    for (i = 0; ring->links && i < ring->w->group.size; i++) {
        idist__link *l = &ring->links[i];
        idist__message *m, *next;

        idist__link_close(ring, l);
        idist__link_write_failed(ring, l); // frees what was not written

        for (m = l->early; m; m = next) {
            next = m->next;
            idist__message_free(ring, l, m);
        }

        idist__mem_free(mem, l->stage);
    }

    while (ring->idle) {
        idist__transfer *v = ring->idle;
        ring->idle = v->next;
        idist__mem_free(mem, v);
    }

    idist__os_descriptor_close(&ring->wake);
    idist__join_share_free(mem, ring->shm);
    idist__mem_free(mem, ring->links);
    idist__mem_free(mem, ring->polls);
    idist__mem_free(mem, ring->poll_ranks);
    idist__mem_free(mem, ring);
}

// On failure *out is NULL, or half made: the caller passes it to idist__ring_free.
static idist_status idist__ring_new(idist__world *w, idist__ring **out) {
    const idist_allocator *mem = &w->cfg.mem;
    idist__ring *ring = (idist__ring *)idist__mem_alloc(mem, sizeof *ring);
    size_t n = (size_t)w->group.size, i;
    size_t poll_count = 2 * (n + 1); // two sets of each link and the wake-up

    *out = ring;
    if (!ring) return IDIST_ERR_NO_MEMORY;
    ring->w = w;
    ring->wake = idist__os_poll_wakeup_new();
    if (ring->wake < 0) return idist__fail_errno("initialize: opening a wake-up descriptor", errno);

    ring->links = (idist__link *)idist__mem_alloc(mem, sizeof *ring->links * n);
    ring->polls = (idist__os_poll_entry *)idist__mem_alloc(mem, sizeof *ring->polls * poll_count);
    ring->poll_ranks = (int *)idist__mem_alloc(mem, sizeof(int) * poll_count);
    if (!ring->links || !ring->polls || !ring->poll_ranks) return IDIST_ERR_NO_MEMORY;

    for (i = 0; i < n; i++) {
        idist__link *l = &ring->links[i];
        l->out_end = &l->out;
        l->early_end = &l->early;
        l->window = IDIST__WINDOW_BYTES;
        l->their_window = IDIST__WINDOW_BYTES;
        l->fd = -1;
    }

    for (i = 0; i < n; i++) {
        ring->links[i].stage = (char *)idist__mem_raw(mem, IDIST__STAGE_BYTES);
        if (!ring->links[i].stage) return IDIST_ERR_NO_MEMORY;
    }

    return IDIST_OK;
}

// Meets the other ranks; the store is open.
static idist_status idist__open_meet(idist__join *j) {
    const idist_allocator *mem = &j->w->cfg.mem;
    size_t n = (size_t)j->w->group.size, i;
    idist__record *records = (idist__record *)idist__mem_alloc(mem, sizeof *records * n);
    idist_status status;

    j->outgoing = (idist__handshake *)idist__mem_alloc(mem, sizeof *j->outgoing * n);
    j->retry_ns = (int64_t *)idist__mem_alloc(mem, sizeof *j->retry_ns * n);
    j->connect_ns = (int64_t *)idist__mem_alloc(mem, sizeof *j->connect_ns * n);
    j->incoming = (idist__pending *)idist__mem_raw(mem, sizeof *j->incoming);
    for (i = 0; j->outgoing && i < n; i++) j->outgoing[i].fd = -1;
    if (j->incoming) idist__pending_init(j->incoming);

    if (!records || !j->outgoing || !j->retry_ns || !j->connect_ns || !j->incoming) {
        idist__mem_free(mem, records);
        return IDIST_ERR_NO_MEMORY;
    }

    status = idist__table_agree_on_job(j);
    if (status == IDIST_OK) status = idist__table_make(j, records);
    if (status == IDIST_OK) status = idist__links_connect_all(j);
    if (status == IDIST_OK) status = idist__join_share_share(j);
    if (status == IDIST_OK) status = idist__join_store_leave(j);

    j->records = NULL;
    idist__mem_free(mem, records);

    return status;
}

// Frees what only meeting needed, whether it succeeded or not.
static void idist__open_end(idist__join *j) {
    const idist_allocator *mem = &j->w->cfg.mem;
    int i;

    idist__os_descriptor_close(&j->w->cfg.listener);
    idist__os_descriptor_close(&j->listeners[0]);
    idist__os_descriptor_close(&j->listeners[1]);
    for (i = 0; j->outgoing && i < j->w->group.size; i++)
        idist__os_descriptor_close(&j->outgoing[i].fd);
    if (j->incoming) idist__pending_close(j->incoming);
    idist__mem_free(mem, j->incoming);
    idist__mem_free(mem, j->retry_ns);
    idist__mem_free(mem, j->connect_ns);
    idist__mem_free(mem, j->tcp);
    idist__mem_free(mem, j->outgoing);

    if (j->owns_store) {
        char text[sizeof idist__me.text];
        memcpy(text, idist__me.text, sizeof text); // closing may overwrite it
        idist_store_close(&j->store);
        memcpy(idist__me.text, text, sizeof text);
    }
}

static idist_status idist__ring_open(idist__world *w) {
    idist__join j;
    idist_status status = IDIST_OK;

    memset(&j, 0, sizeof j);
    j.w = w;
    j.listeners[0] = -1;
    j.listeners[1] = -1;
    j.deadline_ns = idist__os_clock_deadline(w->cfg.init_timeout_ms);

    // Announced now rather than when it is needed: with a second thread, such as the server of the
    // store, the kernel takes 15 ms for it.
    if (w->cfg.transport == IDIST__JOIN_AUTO && w->group.size > 1) idist__os_cpu_fence_others(true);

    // The store comes first, so that the others learn of everything that fails after it.
    if (w->group.size > 1) status = idist__join_store_open(&j);
    else idist__text_copy(w->nodes[0].hostname, sizeof w->nodes[0].hostname, w->hostname);

    if (status == IDIST_OK) status = idist__ring_new(w, &j.ring);
    if (status == IDIST_OK && w->group.size > 1) status = idist__open_meet(&j);
    idist__failure_of_store(&j, status);
    if (status != IDIST_OK) idist__failure_tell(&j, status);
    idist__open_end(&j);

    w->impl = j.ring;
    if (status != IDIST_OK && j.ring) idist__ring_free(j.ring);

    return status;
}

#endif // IDIST_JOIN_H
