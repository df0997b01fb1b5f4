/* idist_join.h - v0.1.0 - how the ranks meet and connect to each other - MIT licence

    Part of the implementation of idist; idist.h includes it where IDIST_IMPLEMENTATION is defined.

CONTENTS

      [join:join]  how the ranks meet, connect to each other, and part
*/
#ifndef IDIST_JOIN_H
#define IDIST_JOIN_H

//------------------------------------------------------------------------------
// [join:join]  how the ranks meet, connect to each other, and part
// uses os err mem base:log hash sock auth store config world segment msg:types
// uses msg:transport link share
//
// Through the store everybody learns the job's number, each rank's host, and where each rank
// listens: a local socket for ranks of one host, TCP for the others. Then every rank connects to
// the lower ones and accepts the higher ones; each connection is authenticated. Once all are there
// nobody needs the store or listens any more.
//------------------------------------------------------------------------------

typedef struct idist__record { // what a rank says about itself
    char hostname[64];
    uint64_t host;
    char local[64];     // address of its local socket, or ""
    uint32_t shm;       // whether it takes part in shared memory
    uint32_t algorithm; // what it was told to use
} idist__record;

typedef struct idist__join {
    idist__world *w;
    idist__ring *ring;
    idist_store *store; // opened by us, or the user's
    bool own_store;
    bool told; // the others know that a rank gave up
    bool told_by_will;
    char prefix[64];
    uint64_t job;
    uint8_t key[32];
    int listeners[2]; // local, tcp; -1
    char tcp[128];    // where our TCP socket listens
    bool need_tcp;
    const idist__record *records; // by rank
    idist__handshake *shakes;     // outgoing, by rank; only to lower ranks
    int64_t
        *again_ns; // when to connect to a lower rank once more; 0: it is connecting, or connected
    idist__porch *porch; // incoming
    int nlinks;          // connected
    int64_t deadline_ns;
} idist__join;

static void idist__join_key(const idist__join *j, char *key, size_t cap, const char *what,
                            int rank) {
    if (rank < 0) snprintf(key, cap, "%s%s", j->prefix, what);
    else snprintf(key, cap, "%s%s/%d", j->prefix, what, rank);
}

static int idist__join_ms_left(const idist__join *j) {
    int64_t left =
        j->deadline_ns == IDIST__FOREVER ? -1 : (j->deadline_ns - idist__os_now_ns()) / IDIST__MS;

    return j->deadline_ns == IDIST__FOREVER ? -1
           : left < 1                       ? 1
           : left > INT32_MAX               ? INT32_MAX
                                            : (int)left;
}

typedef struct idist__join_failure { // why a rank could not join: the others need not wait for it
    int32_t status, rank;
    int32_t by_will; // it ended without a word; the store says so for it
    char text[400];
} idist__join_failure;

enum { IDIST__JOIN_STAY_MS = 500 };

static idist_status idist__join_no_fds(const idist__join *j) {
    return idist__fail(
        IDIST_ERR_NO_FDS,
        "initialize: out of file descriptors; a world of %d needs about %d: raise ulimit -n",
        j->w->group.size, 2 * j->w->group.size + 8);
}

// The server of our own store, in the process that has it.
static const idist__server *idist__join_server(const idist__join *j) {
    return j->own_store && j->store->run == idist__tcp_store_run
               ? ((idist__tcp_store *)j->store->impl)->server
               : NULL;
}

// What rank 0 knows beyond the names of those who are late.
static idist_status idist__join_hint(const idist__join *j) {
    const idist__server *sv = idist__join_server(j);
    int refused = sv ? __atomic_load_n(&sv->nrefused, __ATOMIC_RELAXED) : 0;

    if (sv && __atomic_load_n(&sv->other_order, __ATOMIC_RELAXED))
        idist__append(
            idist__me.text, sizeof idist__me.text,
            ". Some rank runs on a machine of another byte order; mixed worlds are not supported");
    else if (refused)
        idist__append(idist__me.text, sizeof idist__me.text,
                      ". %d connections were refused or broke off: another secret, another build, "
                      "strangers, or a rank that died",
                      refused);

    return IDIST_ERR_TIMEOUT;
}

// When the store's server ended, says who that was.
static void idist__join_store_lost(const idist__join *j, idist_status status) {
    bool by_rank_0 = j->w->cfg.store == NULL && strncmp(j->w->cfg.where, "torch:", 6) != 0;
    char text[sizeof idist__me.text];
    const char *cause = text;

    memcpy(text, idist__me.text, sizeof text);
    if (strncmp(cause, "initialize: ", 12) == 0) cause += 12;
    if (status != IDIST_ERR_PEER_LOST || strncmp(cause, "store: ", 7) != 0) return;
    idist__fail(status, "initialize: %s: %s",
                by_rank_0 ? "rank 0 was lost, or gave up" : "the store's server was lost",
                cause + 7);
}

// Whether a rank has given up; then so do we, with its reason.
static idist_status idist__join_failed(idist__join *j) {
    const idist__server *sv = idist__join_server(j);
    idist__join_failure f;
    char key[128];
    const char *keys[1];
    bool there = false;
    size_t n = 0;
    idist_status s;

    keys[0] = key;
    if (sv && __atomic_load_n(&sv->no_fds, __ATOMIC_RELAXED)) return idist__join_no_fds(j);
    idist__join_key(j, key, sizeof key, "failed", -1);
    s = idist_store_check(j->store, keys, 1, &there);
    if (s == IDIST_ERR_PEER_LOST) return s;
    if (s != IDIST_OK || !there) return IDIST_OK;
    if (idist_store_get(j->store, key, &f, sizeof f, &n, 1000) != IDIST_OK || n != sizeof f)
        return IDIST_OK;
    f.text[sizeof f.text - 1] = 0;
    j->told = true;
    j->told_by_will = f.by_will != 0;

    if (f.status == IDIST_ERR_TIMEOUT) { // it names who is late
        idist__fail(IDIST_ERR_TIMEOUT, "initialize: %s", f.text);
        return idist__join_hint(j);
    }

    return idist__fail((idist_status)f.status, "initialize: rank %d could not join: %s",
                       (int)f.rank, f.text);
}

// How often a rank that waits asks whether another one has given up. Hundreds of them ask one
// server.
static int idist__join_slice_ms(const idist__join *j) {
    return j->w->group.size < 800 ? 100 + j->w->group.size / 2 : 500;
}

// What the store's server is to tell the others when our process ends before all have met. NULL
// takes that back.
static void idist__join_will(idist__join *j, const idist__join_failure *failure) {
    idist__req r;
    char key[128] = "";

    if (j->store->run != idist__tcp_store_run && j->store->run != idist__file_store_run) return;
    if (strncmp(j->w->cfg.where, "torch:", 6) == 0) return; // a server that does not know of wills
    memset(&r, 0, sizeof r);
    if (failure) idist__join_key(j, key, sizeof key, "failed", -1);
    r.op = IDIST__REQ_WILL;
    r.key.data = key;
    r.key.nbytes = strlen(key);
    r.a.data = (const char *)failure;
    r.a.nbytes = failure ? sizeof *failure : 0;
    r.deadline_ns = j->deadline_ns;
    j->store->run(j->store, &r); // if the connection is gone, the next request says so
}

// The owner of the store stays until all others have read why, or for a moment.
static void idist__join_stay(idist__join *j) {
    int64_t until_ns = idist__os_deadline(IDIST__JOIN_STAY_MS), there = 0;
    int others = j->w->group.size - 1 - (j->told_by_will ? 1 : 0);
    char key[128];

    idist__join_key(j, key, sizeof key, "heard", -1);

    while (idist_store_add(j->store, key, 0, &there) == IDIST_OK && there < others) {
        if (idist__os_now_ns() >= until_ns) break;
        idist__os_pause_ms(5);
    }
}

// Tells the others why we give up, unless we have it from them.
static void idist__join_tell(idist__join *j, idist_status status) {
    idist__join_failure f;
    char key[128], text[sizeof idist__me.text];
    int64_t there;

    if (!j->store || !j->prefix[0]) return;
    memset(&f, 0, sizeof f);
    memcpy(text, idist__me.text, sizeof text);
    f.status = (int32_t)status;
    f.rank = j->w->group.rank;
    idist__copy_text(f.text, sizeof f.text,
                     strncmp(text, "initialize: ", 12) == 0 ? text + 12 : text);

    idist__join_key(j, key, sizeof key, "failed", -1);
    if (!j->told)
        idist_store_set(j->store, key, &f,
                        sizeof f); // if that fails they learn it from the store's end
    idist__join_will(j, NULL);
    idist__join_key(j, key, sizeof key, "heard", -1);
    if (f.rank > 0) idist_store_add(j->store, key, 1, &there);
    else if (j->own_store) idist__join_stay(j);
    memcpy(idist__me.text, text, sizeof text);
}

// Which ranks, from `rank` on, have not put this value there.
static idist_status idist__join_missing(idist__join *j, const char *what, int rank) {
    char key[128], text[300] = "";
    int i, missing = 0;

    for (i = rank; i < j->w->group.size; i++) {
        const char *keys[1];
        bool there = true;
        keys[0] = key;
        idist__join_key(j, key, sizeof key, what, i);
        if (idist_store_check(j->store, keys, 1, &there) != IDIST_OK || there) continue;
        if (missing++ < 16) idist__append(text, sizeof text, "%s%d", missing > 1 ? ", " : "", i);
    }

    if (!missing)
        return idist__fail(IDIST_ERR_TIMEOUT, "initialize: rank %d showed up too late, after %d ms",
                           rank, j->w->cfg.init_timeout_ms);
    idist__fail(IDIST_ERR_TIMEOUT,
                "initialize: %d of %d ranks did not show up within %d ms: rank %s%s", missing,
                j->w->group.size, j->w->cfg.init_timeout_ms, text, missing > 16 ? ", ..." : "");
    if (!j->w->cfg.store && strncmp(j->w->cfg.where, "unix:", 5) == 0)
        idist__append(idist__me.text, sizeof idist__me.text,
                      ". The ranks meet at a local socket, which those of another user, network "
                      "namespace (container) or "
                      "host cannot reach");

    return idist__join_hint(j);
}

// Gets a value that a rank puts there when it starts; the time-out names the ranks that did not, or
// those without `cause` if it is made of what these put there.
static idist_status idist__join_get(idist__join *j, const char *what, int rank, const char *cause,
                                    void *value, size_t nbytes) {
    char key[128];
    size_t n = 0;
    idist_status s;
    int slice_ms = idist__join_slice_ms(j);

    idist__join_key(j, key, sizeof key, what, rank);

    do {
        int ms = idist__join_ms_left(j);
        s = idist_store_get(j->store, key, value, nbytes, &n,
                            ms < 0 || ms > slice_ms ? slice_ms : ms);
        if (s == IDIST_OK && n != nbytes)
            return idist__fail(IDIST_ERR_UNSUPPORTED,
                               "rank %d was built from another version of idist.h", rank);
        if (s != IDIST_ERR_TIMEOUT) return s;
        if ((s = idist__join_failed(j)) != IDIST_OK) return s;
    } while (idist__os_ms_until(j->deadline_ns) != 0);

    return idist__join_missing(j, cause ? cause : what, rank < 0 ? 0 : rank);
}

static idist_status idist__join_set(idist__join *j, const char *what, int rank, const void *value,
                                    size_t nbytes) {
    char key[128];
    idist__join_key(j, key, sizeof key, what, rank);
    return idist_store_set(j->store, key, value, nbytes);
}

// Opens the store. Worlds made one after the other through one store must not see each other's
// keys: each rank counts its worlds there. In a store of our own the count can only be 1; more
// means that two processes have the same rank.
static idist_status idist__join_store(idist__join *j) {
    idist__config *cfg = &j->w->cfg;
    idist_store_desc d;
    bool torch = strncmp(cfg->where, "torch:", 6) == 0, pmi = strcmp(cfg->where, "pmi:") == 0;
    const char *restart = idist__os_env("TORCHELASTIC_RESTART_COUNT");
    char base[40] = "idist", key[64];
    int64_t nth = 0;
    idist__join_failure will;
    idist_status s;

    j->store = cfg->store;

    if (!j->store) {
        if (!cfg->where[0])
            return idist__fail(IDIST_ERR_ENV,
                               "rank %d of %d (%s): MASTER_ADDR is not set, so the ranks cannot "
                               "find each other. Set "
                               "MASTER_ADDR and MASTER_PORT to rank 0's host and a free port there "
                               "(127.0.0.1 when all "
                               "ranks are on this host)",
                               cfg->rank, cfg->world_size,
                               cfg->rank_var ? cfg->rank_var : cfg->launcher);
        if (pmi && (s = idist__pmi_meet(cfg)) != IDIST_OK) return s;
        memset(&d, 0, sizeof d);
        d.server = cfg->rank == 0;
        d.timeout_ms = cfg->init_timeout_ms;
        d.secret = cfg->secret.nbytes ? cfg->secret.bytes : NULL;
        d.secret_nbytes = cfg->secret.nbytes;
        d.allocator = cfg->mem;
        s = idist__store_open(cfg->where, &d, cfg->listener, &j->store);
        cfg->listener = -1; // the store owns it now
        if (s != IDIST_OK) return idist__fail(s, "initialize: %s", idist__me.text);
        j->own_store = true;
    }

    if (torch)
        snprintf(base, sizeof base, "idist-%.20s",
                 restart ? restart : "0"); // the agent keeps it over restarts
    snprintf(key, sizeof key, "%s/%d", base, cfg->rank);
    if ((s = idist_store_add(j->store, key, 1, &nth)) != IDIST_OK) return s;
    if (j->own_store && nth != 1 && !torch)
        return idist__fail(IDIST_ERR_RANK_TAKEN,
                           "initialize: another process already is rank %d of this job (%s)",
                           cfg->rank, cfg->rank_var ? cfg->rank_var : "desc.rank");
    snprintf(j->prefix, sizeof j->prefix, "%s/%lld/", base, (long long)nth);
    memset(&will, 0, sizeof will);
    will.status = (int32_t)IDIST_ERR_PEER_LOST;
    will.rank = cfg->rank;
    will.by_will = 1;
    snprintf(will.text, sizeof will.text, "its process on %s ended during idist_initialize",
             j->w->hostname);
    if (cfg->rank > 0) idist__join_will(j, &will); // that of rank 0 takes the store with it

    return IDIST_OK;
}

// Rank 0 names the job; everybody else compares the size of the world with what rank 0 thinks.
static idist_status idist__join_job(idist__join *j) {
    uint64_t job[2] = {0, 0}; // its number, and the number of ranks
    idist_status s;
    uint8_t key[32];

    if (j->w->group.rank == 0) {
        idist__os_random(job, sizeof job);
        job[1] = (uint64_t)j->w->group.size;
        s = idist__join_set(j, "job", -1, job, sizeof job);
    } else {
        s = idist__join_get(j, "job", -1, NULL, job, sizeof job);
    }

    if (s != IDIST_OK) return s;
    if (job[1] != (uint64_t)j->w->group.size)
        return idist__fail(IDIST_ERR_ENV,
                           "initialize: rank 0 says the world has %llu ranks, this rank says %d",
                           (unsigned long long)job[1], j->w->group.size);
    j->job = job[0];
    idist__auth_key(&j->w->cfg.secret, key);
    idist__hmac(key, "links", &j->job, sizeof j->job, NULL, 0, j->key);

    return IDIST_OK;
}

static idist_status idist__join_listen_local(idist__join *j, idist__record *me) {
    idist__addr addr;
    uint64_t id[2];
    idist_status s;

    idist__os_random(id, sizeof id);
    snprintf(me->local, sizeof me->local, "unix:idist-%016llx%016llx", (unsigned long long)id[0],
             (unsigned long long)id[1]);
    if ((s = idist__addr_parse(&addr, me->local)) != IDIST_OK) return s;

    return idist__sock_listen(&addr, me->local, &j->listeners[0]);
}

// The address under which other hosts reach this one: what the user says, or that of the connection
// to the store.
static idist_status idist__join_own_ip(idist__join *j, bool one_host, char *ip, size_t cap) {
    const char *env = idist__os_env("IDIST_ADDR");
    idist__addr a;

    memset(&a, 0, sizeof a);
    a.nbytes = sizeof a.sa;
    if (env) idist__copy_text(ip, cap, env);
    else if (one_host) idist__copy_text(ip, cap, "127.0.0.1");
    else if (j->own_store && strncmp(j->w->cfg.where, "file:", 5) != 0 &&
             getsockname(((idist__tcp_store *)j->store->impl)->fd, (struct sockaddr *)&a.sa,
                         &a.nbytes) == 0 &&
             a.sa.ss_family != AF_UNIX)
        idist__addr_host_text(&a, ip, cap);
    else
        return idist__fail(IDIST_ERR_ENV, "initialize: which address do other hosts reach this one "
                                          "at? Set IDIST_ADDR, or use tcp://");

    return IDIST_OK;
}

static idist_status idist__join_listen_tcp(idist__join *j, bool one_host) {
    idist__addr addr;
    char ip[64];
    idist_status s = idist__join_own_ip(j, one_host, ip, sizeof ip);

    if (s != IDIST_OK || (s = idist__addr_tcp(&addr, ip, 0)) != IDIST_OK) return s;
    if (!idist__addr_is_loopback(&addr) && !j->w->cfg.secret.nbytes && !j->w->cfg.secret.insecure)
        return idist__fail(
            IDIST_ERR_NO_SECRET,
            "initialize: listening at %s, beyond this host, needs a shared secret: set "
            "IDIST_SECRET or "
            "IDIST_SECRET_FILE on all ranks, or IDIST_INSECURE=1 to trust the network",
            ip);
    if ((s = idist__sock_listen(&addr, ip, &j->listeners[1])) != IDIST_OK) return s;
    addr.nbytes = sizeof addr.sa;
    if (getsockname(j->listeners[1], (struct sockaddr *)&addr.sa, &addr.nbytes) != 0)
        return idist__fail_errno("getsockname", errno);
    snprintf(j->tcp, sizeof j->tcp, "tcp:[%s]:%d", ip, idist__addr_port(&addr));

    return idist__join_set(j, "tcp", j->w->group.rank, j->tcp, sizeof j->tcp);
}

// What every rank says about itself, on all of them. Rank 0 collects it: n requests and as many
// answers.
static idist_status idist__join_records(idist__join *j, idist__record *records) {
    int i, n = j->w->group.size, me = j->w->group.rank;
    idist_status s = idist__join_set(j, "node", me, &records[me], sizeof *records);

    if (s != IDIST_OK) return s;
    if (me) return idist__join_get(j, "nodes", -1, "node", records, sizeof *records * (size_t)n);
    for (i = 1; i < n && s == IDIST_OK; i++)
        s = idist__join_get(j, "node", i, NULL, &records[i], sizeof *records);

    return s == IDIST_OK ? idist__join_set(j, "nodes", -1, records, sizeof *records * (size_t)n)
                         : s;
}

// Everybody's host; afterwards it is known whether TCP is needed at all.
static idist_status idist__join_table(idist__join *j, idist__record *records) {
    idist__world *w = j->w;
    idist__record *me = &records[w->group.rank];
    uint64_t host = idist__host_key(&w->cfg);
    uint32_t algorithm = (uint32_t)w->cfg.algorithm;
    bool one_host = true;
    idist_status s = IDIST_OK;
    int i;

    idist__copy_text(me->hostname, sizeof me->hostname, w->hostname);
    me->host = host;
    me->shm = w->cfg.transport == 0;
    me->algorithm = algorithm;
    if (w->cfg.transport != 2) s = idist__join_listen_local(j, me);
    if (s == IDIST_OK) s = idist__join_records(j, records);

    for (i = 0; i < w->group.size && s == IDIST_OK; i++) {
        records[i].hostname[sizeof records[i].hostname - 1] = 0;
        records[i].local[sizeof records[i].local - 1] = 0;
        idist__copy_text(w->nodes[i].hostname, sizeof w->nodes[i].hostname, records[i].hostname);
        w->nodes[i].host = records[i].host;
        if (records[i].host != host) one_host = false;
        if (records[i].algorithm != algorithm)
            s = idist__fail(
                IDIST_ERR_ENV,
                "initialize: IDIST_ALGO (desc.algorithm) differs between rank %d and rank %d", i,
                w->group.rank);
    }

    j->records = records;
    if (s == IDIST_OK && (w->cfg.transport == 2 || !one_host))
        s = idist__join_listen_tcp(j, one_host);

    return s;
}

static void idist__join_linked(idist__join *j, int rank, int fd, bool local) {
    idist__link *l = &j->ring->links[rank];

    l->transport = local ? &idist__transport_unix : &idist__transport_tcp;
    l->fd = fd;
    l->port = &l->fd;
    l->open = true;
    j->ring->nstreams++;
    j->nlinks++;
}

// A rank is gone. It may have given up and said why, or the store's server is about to say that it
// died.
static idist_status idist__join_lost(idist__join *j, int rank, const char *how) {
    int64_t soon = idist__os_deadline(300);
    char text[300];

    idist__copy_text(text, sizeof text, how); // may lie where a failure writes its text

    do {
        idist_status s = idist__join_failed(j);
        if (s != IDIST_OK) return s;
        idist__os_pause_ms(10);
    } while (idist__os_ms_until(soon) != 0);

    return idist__fail(IDIST_ERR_PEER_LOST, "initialize: rank %d on %s was lost: %s", rank,
                       j->w->nodes[rank].hostname, text);
}

static bool idist__join_is_local(const idist__join *j, int rank) {
    const idist__record *me = &j->records[j->w->group.rank], *other = &j->records[rank];
    return j->w->cfg.transport != 2 && other->host == me->host && other->local[0];
}

// Begins the connection to a lower rank, or says when to try again: its queue of newcomers may be
// full.
static idist_status idist__join_connect(idist__join *j, int rank) {
    idist__addr addr;
    char where[128], how[200];
    int64_t soon = idist__os_deadline(3000);
    idist_status s;
    int fd;

    j->again_ns[rank] = 0;
    idist__copy_text(where, sizeof where, j->records[rank].local);
    if (!idist__join_is_local(j, rank) &&
        (s = idist__join_get(j, "tcp", rank, NULL, where, sizeof where)) != IDIST_OK)
        return s;
    where[sizeof where - 1] = 0;
    if ((s = idist__addr_parse(&addr, where)) != IDIST_OK) return s;

    fd = idist__sock_connect(&addr, soon < j->deadline_ns ? soon : j->deadline_ns);
    if (fd < 0 && (errno == EMFILE || errno == ENFILE)) return idist__join_no_fds(j);

    if (fd < 0 && (errno == EAGAIN || errno == ETIMEDOUT || errno == EINTR)) {
        j->again_ns[rank] = idist__os_deadline(20);
        return idist__join_failed(j);
    }

    if (fd < 0 && idist__sock_cut_off(errno))
        return idist__fail(IDIST_ERR_SYSTEM,
                           "initialize: rank %d on %s cannot be reached at %s (%s): the network "
                           "interface is down, or no "
                           "route leads there",
                           rank, j->w->nodes[rank].hostname, where, strerror(errno));

    if (fd < 0) {
        snprintf(how, sizeof how, "no connection to %s: %s", where, strerror(errno));
        return idist__join_lost(j, rank, how);
    }

    idist__auth_begin(&j->shakes[rank], fd, false, j->key, IDIST__ROLE_LINK, j->job,
                      j->w->group.rank, j->w->group.size, j->deadline_ns);
    j->shakes[rank].ready = true;

    return IDIST_OK;
}

static idist_status idist__join_accept(idist__join *j, int listener) {
    idist__handshake *h;

    while ((h = idist__porch_place(j->porch)) != NULL) {
        int fd = idist__sock_accept(listener);

        if (fd < 0 && (errno == EMFILE || errno == ENFILE)) {
            if (!idist__porch_make_way(j->porch)) return idist__join_no_fds(j);
            idist__os_pause_ms(1); // no spin while descriptors are short
            return IDIST_OK;
        }

        if (fd < 0) return IDIST_OK;
        idist__os_close(&h->fd);
        idist__auth_begin(h, fd, true, j->key, IDIST__ROLE_LINK, j->job, j->w->group.rank,
                          j->w->group.size, idist__os_deadline(IDIST__PORCH_MS));
        h->ready = true;
    }

    return IDIST_OK;
}

// Moves a handshake on; a finished one becomes a link. An incoming one that fails is somebody
// else's problem; an outgoing one that broke off is tried again, and any other failure of it is
// fatal.
static idist_status idist__join_step(idist__join *j, idist__handshake *h, int to) {
    bool done = false, incoming = to < 0, local;
    idist_status s;
    struct sockaddr_storage sa;
    socklen_t n = sizeof sa;
    int rank;

    h->ready = false;
    s = idist__auth_step(h, &done);
    if (s == IDIST_OK && !done) return IDIST_OK;
    rank = s == IDIST_OK ? (int)h->theirs.rank : -1;
    if (s == IDIST_OK &&
        (incoming ? rank <= j->w->group.rank || rank >= j->w->group.size : rank != to))
        s = IDIST_ERR_AUTH;
    if (s == IDIST_OK && j->ring->links[rank].open) s = IDIST_ERR_RANK_TAKEN;

    if (s != IDIST_OK) {
        if (incoming)
            idist__log_print(&j->w->log, IDIST_LOG_DEBUG, "a connection was refused: %s",
                             idist__me.text);
        idist__os_close(&h->fd);
        if (incoming) return IDIST_OK;

        if (h->broke) {
            j->again_ns[to] = idist__os_deadline(5 + to % 16); // not all at the same moment
            return IDIST_OK;
        }

        return idist__fail(s, "initialize: connecting to rank %d on %s: %s", to,
                           j->w->nodes[to].hostname, idist__me.text);
    }

    local = getsockname(h->fd, (struct sockaddr *)&sa, &n) == 0 && sa.ss_family == AF_UNIX;
    idist__join_linked(j, rank, h->fd, local);
    h->fd = -1;

    return IDIST_OK;
}

static idist_status idist__join_late(const idist__join *j) {
    char text[300] = "";
    int i, missing = 0;

    for (i = 0; i < j->w->group.size; i++)
        if (i != j->w->group.rank && !j->ring->links[i].open && missing++ < 16)
            idist__append(text, sizeof text, "%s%d", missing > 1 ? ", " : "", i);
    return idist__fail(IDIST_ERR_TIMEOUT, "initialize: not connected within %d ms to rank %s%s",
                       j->w->cfg.init_timeout_ms, text, missing > 16 ? ", ..." : "");
}

// What poll should look at: the listeners while there is room for newcomers, then the outgoing
// handshakes in the order of ranks, then the incoming ones. Returns how many.
static int idist__join_poll_set(const idist__join *j, bool room, struct pollfd *fds) {
    int i, n = 0;

    for (i = 0; i < 2; i++) {
        if (j->listeners[i] < 0 || !room) continue;
        fds[n].fd = j->listeners[i];
        fds[n++].events = POLLIN;
    }

    for (i = 0; i < j->w->group.rank; i++) {
        if (j->shakes[i].fd < 0) continue;
        fds[n].fd = j->shakes[i].fd;
        fds[n++].events = idist__auth_writes(&j->shakes[i]) ? POLLOUT : POLLIN;
    }

    return n + idist__porch_poll(j->porch, fds + n);
}

// Goes on with what poll has seen.
static idist_status idist__join_polled(idist__join *j, bool room, const struct pollfd *fds) {
    int i, n = 0, me = j->w->group.rank;
    idist_status s = IDIST_OK;

    for (i = 0; i < 2; i++) n += room && j->listeners[i] >= 0;
    for (i = 0; i < me; i++)
        if (j->shakes[i].fd >= 0) j->shakes[i].ready = fds[n++].revents != 0;
    idist__porch_polled(j->porch, fds + n);

    for (i = 0; i < 2 && s == IDIST_OK; i++)
        if (j->listeners[i] >= 0) s = idist__join_accept(j, j->listeners[i]);

    for (i = 0; i < me && s == IDIST_OK; i++) {
        if (j->shakes[i].fd >= 0 && j->shakes[i].ready) s = idist__join_step(j, &j->shakes[i], i);
        else if (j->again_ns[i] && idist__os_now_ns() >= j->again_ns[i])
            s = idist__join_connect(j, i);
    }

    for (i = 0; i < IDIST__PORCH && s == IDIST_OK; i++)
        if (j->porch->place[i].fd >= 0 && j->porch->place[i].ready)
            s = idist__join_step(j, &j->porch->place[i], -1);

    return s;
}

// All handshakes at once, so that no order of ranks can block another.
static idist_status idist__join_links(idist__join *j) {
    int i, n, size = j->w->group.size;
    size_t room_for = (size_t)size + IDIST__PORCH + 2;
    struct pollfd *fds = (struct pollfd *)idist__mem_alloc(&j->w->cfg.mem, sizeof *fds * room_for);
    int64_t asked_ns = idist__os_now_ns();
    idist_status s = fds ? IDIST_OK : IDIST_ERR_NO_MEMORY;

    for (i = 0; i < j->w->group.rank && s == IDIST_OK; i++) s = idist__join_connect(j, i);

    while (s == IDIST_OK && j->nlinks < size - 1) {
        bool room = idist__porch_place(j->porch) != NULL;
        n = idist__join_poll_set(j, room, fds);
        i = idist__os_ms_until(j->deadline_ns);
        if (i == 0) {
            s = idist__join_late(j);
            break;
        }

        i = poll(fds, (nfds_t)n, i < 0 || i > 20 ? 20 : i);
        if (i < 0 && errno != EINTR) s = idist__fail_errno("poll", errno);
        if (s == IDIST_OK) s = idist__join_polled(j, room, fds);

        if (s == IDIST_OK && idist__os_now_ns() - asked_ns > idist__join_slice_ms(j) * IDIST__MS) {
            s = idist__join_failed(j);
            asked_ns = idist__os_now_ns();
        }
    }

    idist__mem_free(&j->w->cfg.mem, fds);

    return s;
}

// ---- shared memory ----
//
// Once the links of a host are there, its lowest rank makes the file and passes it to the others
// through them; each maps it, reserves its own share, and says whether that went well. Only when it
// did for all is it used; if not, once more without windows (a limit on address space, say), and
// then the links stay what they are.

enum {
    IDIST__SHM_NO,
    IDIST__SHM_OK_FENCED,
    IDIST__SHM_OK
}; // votes of a rank; fenced: its kernel has no membarrier

typedef struct idist__shm_hello {
    uint64_t shm_nbytes, window_nbytes;
} idist__shm_hello;

static size_t idist__shm_nbytes(const idist__shm *m) {
    return m->window_at + (size_t)m->n * m->window_nbytes;
}

static void idist__shm_layout(idist__shm *m, size_t shm_nbytes, size_t window_nbytes) {
    size_t room, big;

    m->pipe_nbytes = 128 * 1024;
    while (m->pipe_nbytes > IDIST__PAGE && (size_t)m->n * m->pipe_nbytes > shm_nbytes / 4)
        m->pipe_nbytes /= 2;
    m->places_at = sizeof(idist__bell) + (size_t)m->n * (sizeof(idist__pipe) + m->pipe_nbytes);
    m->places_at = (m->places_at + IDIST__PAGE - 1) & ~(IDIST__PAGE - 1);
    room = shm_nbytes > m->places_at ? shm_nbytes - m->places_at : 0;
    m->chunk_nbytes[0] = room / (2 * IDIST__BUFFERS) < IDIST__CHUNK_MOST
                             ? room / (2 * IDIST__BUFFERS)
                             : IDIST__CHUNK_MOST;
    m->chunk_nbytes[1] = m->chunk_nbytes[0] / 4;
    m->chunk_nbytes[0] &= ~(IDIST__LINE - 1);
    m->chunk_nbytes[1] &= ~(IDIST__LINE - 1);
    big = idist__place_nbytes(m->chunk_nbytes[0]);
    m->nplaces = room < big ? 0 : 1 + (int)((room - big) / idist__place_nbytes(m->chunk_nbytes[1]));
    if (m->nplaces > (int)IDIST__COUNT_OF(m->taken)) m->nplaces = (int)IDIST__COUNT_OF(m->taken);
    m->share_nbytes = m->places_at;
    if (m->nplaces)
        m->share_nbytes += big + (size_t)(m->nplaces - 1) * idist__place_nbytes(m->chunk_nbytes[1]);
    m->window_at = IDIST__PAGE + (size_t)m->n * m->share_nbytes;
    m->window_nbytes = window_nbytes;
}

// As much as the host has memory, a power of two: only addresses are taken.
static size_t idist__shm_window_nbytes(int n) {
    uint64_t ram = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE),
             nbytes = (uint64_t)1 << 30;
    if (sizeof(void *) < 8) return 0;
    while (nbytes < ram && nbytes * (uint64_t)n < (uint64_t)1 << 42) nbytes *= 2;
    return (size_t)nbytes;
}

// Maps the file and reserves our share. Takes fd. 0, or an errno.
static int idist__shm_map(idist__shm *m, int fd) {
    struct stat st;
    idist__cpus cpus;
    int i, err = 0;

    if (fstat(fd, &st) != 0 || (uint64_t)st.st_size < idist__shm_nbytes(m)) err = EINVAL;
    if (!err)
        err = idist__os_reserve(fd, IDIST__PAGE + (size_t)m->me * m->share_nbytes, m->share_nbytes);
    if (!err && m->me == 0) err = idist__os_reserve(fd, 0, IDIST__PAGE);

    if (err) {
        close(fd);
        return err;
    }

    m->window =
        idist__window_open(fd, idist__shm_nbytes(m),
                           m->window_at + (size_t)m->me * m->window_nbytes, m->window_nbytes);
    if (!m->window) return ENOMEM;
    m->base = m->window->map;
    idist__os_cpus(&cpus);
    for (i = 0; i < IDIST__CPU_WORDS; i++)
        __atomic_fetch_or(&idist__shm_head_of(m)->cpus.bits[i], cpus.bits[i], __ATOMIC_RELAXED);
    idist__os_random(&m->proof, sizeof m->proof);
    idist__shm_bell(m, m->me)->pid = getpid();
    idist__shm_bell(m, m->me)->proof = m->proof;
    idist__shm_bell(m, m->me)->proof_at = (uint64_t)(uintptr_t)&m->proof;

    return 0;
}

// Whether we can read the memory of all others, and they are who we think.
static bool idist__shm_sees_all(idist__shm *m) {
    int i;

    for (i = 0; i < m->n; i++) {
        const idist__bell *b = idist__shm_bell(m, i);
        uint64_t proof = 0, at = b->proof_at;
        m->pids[i] = (pid_t)b->pid;
        if (m->pids[i] <= 0 || idist__shm_pull(m, i, at, &proof, sizeof proof) != 0 ||
            proof != b->proof)
            return false;
    }

    return true;
}

// Sends a message with a descriptor, which may be -1.
static bool idist__shm_send_fd(int sock, const void *buf, size_t nbytes, int fd,
                               int64_t deadline_ns) {
    struct msghdr msg;
    struct iovec part;
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;

    memset(&msg, 0, sizeof msg);
    memset(&control, 0, sizeof control);
    part.iov_base = (void *)(uintptr_t)buf;
    part.iov_len = nbytes;
    msg.msg_iov = &part;
    msg.msg_iovlen = 1;

    if (fd >= 0) {
        msg.msg_control = control.bytes;
        msg.msg_controllen = sizeof control.bytes;
        control.head.cmsg_level = SOL_SOCKET;
        control.head.cmsg_type = SCM_RIGHTS;
        control.head.cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(&control.head), &fd, sizeof fd);
    }

    for (;;) {
        ssize_t n = sendmsg(sock, &msg, MSG_NOSIGNAL);
        if (n == (ssize_t)nbytes) return true;
        if (n >= 0 || (errno != EINTR && errno != EAGAIN))
            return false; // a short message of a new socket is never cut
        if (errno == EAGAIN && !idist__sock_wait(sock, POLLOUT, deadline_ns)) return false;
    }
}

static bool idist__shm_recv_fd(int sock, void *buf, size_t nbytes, int *fd, int64_t deadline_ns) {
    struct msghdr msg;
    struct iovec part;
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    ssize_t n;

    *fd = -1;
    memset(&msg, 0, sizeof msg);
    part.iov_base = buf;
    part.iov_len = nbytes;
    msg.msg_iov = &part;
    msg.msg_iovlen = 1;
    msg.msg_control = control.bytes;
    msg.msg_controllen = sizeof control.bytes;
    errno = ETIMEDOUT;
    if (!idist__sock_wait(sock, POLLIN, deadline_ns)) return false;
    do n = recvmsg(sock, &msg, MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    if (n > 0 && msg.msg_controllen >= CMSG_LEN(sizeof(int)) &&
        control.head.cmsg_level == SOL_SOCKET && control.head.cmsg_type == SCM_RIGHTS)
        memcpy(fd, CMSG_DATA(&control.head), sizeof *fd);
    if (n == 0) errno = 0;

    return n > 0 && idist__sock_read_all(sock, (char *)buf + n, nbytes - (size_t)n, deadline_ns);
}

static idist_status idist__join_broken(idist__join *j, int rank) {
    if (errno == ETIMEDOUT)
        return idist__fail(
            IDIST_ERR_TIMEOUT,
            "initialize: rank %d on %s did not come to the vote of this host on shared memory",
            rank, j->w->nodes[rank].hostname);
    return idist__join_lost(
        j, rank, "its connection ended while the ranks of this host agreed on shared memory");
}

// Waits until a link has something to read. Asks now and then whether somebody else has given up:
// this rank may be waiting just because of that.
static idist_status idist__join_await(idist__join *j, int rank) {
    idist_status s;

    for (;;) {
        int64_t slice = idist__os_deadline(idist__join_slice_ms(j));
        if (idist__sock_wait(j->ring->links[rank].fd, POLLIN,
                             slice < j->deadline_ns ? slice : j->deadline_ns))
            return IDIST_OK;
        s = idist__join_failed(j);
        if (s != IDIST_OK) return s;
        errno = ETIMEDOUT;
        if (idist__os_ms_until(j->deadline_ns) == 0) return idist__join_broken(j, rank);
    }
}

// The least of what the ranks of this host say, on all of them. The lowest one collects.
static idist_status idist__shm_vote(idist__join *j, const idist__shm *m, const int *ranks,
                                    char *vote) {
    const idist__link *links = j->ring->links;
    int i, n = m->me == 0 ? m->n : 1, lead = ranks[0];
    idist_status s;

    for (i = 1; i < n; i++) {
        char other = 0;
        s = idist__join_await(j, ranks[i]);
        if (s != IDIST_OK) return s;
        if (!idist__sock_read_all(links[ranks[i]].fd, &other, 1, j->deadline_ns))
            return idist__join_broken(j, ranks[i]);
        if (other < *vote) *vote = other;
    }

    for (i = 1; i < n; i++)
        if (!idist__sock_write_all(links[ranks[i]].fd, vote, 1, j->deadline_ns))
            return idist__join_broken(j, ranks[i]);
    if (!m->me) return IDIST_OK;

    if (!idist__sock_write_all(links[lead].fd, vote, 1, j->deadline_ns))
        return idist__join_broken(j, lead);
    s = idist__join_await(j, lead);
    if (s != IDIST_OK) return s;

    return idist__sock_read_all(links[lead].fd, vote, 1, j->deadline_ns)
               ? IDIST_OK
               : idist__join_broken(j, lead);
}

// Makes the file and passes it on, or receives it. all: everybody has mapped it.
static idist_status idist__shm_open(idist__join *j, idist__shm *m, const int *ranks, bool *all) {
    idist__shm_hello hello;
    int i, fd = -1, err = EINVAL;
    char vote;
    idist_status s = IDIST_OK;

    hello.shm_nbytes = j->w->cfg.shm_nbytes;
    hello.window_nbytes = m->window_nbytes;
    if (m->me) s = idist__join_await(j, ranks[0]);
    if (s != IDIST_OK) return s;
    if (m->me &&
        !idist__shm_recv_fd(j->ring->links[ranks[0]].fd, &hello, sizeof hello, &fd, j->deadline_ns))
        return idist__join_broken(j, ranks[0]);
    idist__shm_layout(m, (size_t)hello.shm_nbytes, (size_t)hello.window_nbytes);
    if (m->me == 0 && (fd = idist__os_memfd(idist__shm_nbytes(m))) < 0) err = errno;

    for (i = 1; i < m->n && m->me == 0; i++)
        if (!idist__shm_send_fd(j->ring->links[ranks[i]].fd, &hello, sizeof hello, fd,
                                j->deadline_ns)) {
            idist__os_close(&fd);
            return idist__join_broken(j, ranks[i]);
        }

    if (fd >= 0) err = idist__shm_map(m, fd);
    if (err) idist__log_print(&j->w->log, IDIST_LOG_INFO, "no shared memory: %s", strerror(err));
    vote = err                            ? IDIST__SHM_NO
           : idist__os_fence_others(true) ? IDIST__SHM_OK
                                          : IDIST__SHM_OK_FENCED;
    s = idist__shm_vote(j, m, ranks, &vote);
    *all = s == IDIST_OK && vote != IDIST__SHM_NO;
    if (!*all) return s;

    if (m->me == 0) {
        idist__shm_head *head = idist__shm_head_of(m);
        head->ncores = (uint32_t)idist__cpus_count(&head->cpus);
        head->fenced = vote == IDIST__SHM_OK_FENCED || m->n > (int)head->ncores;
    }

    vote = idist__shm_sees_all(m); // everybody has mapped it by now, and left its proof
    s = idist__shm_vote(j, m, ranks, &vote);
    m->far = vote != 0;

    return s;
}

static void idist__shm_free(const idist_allocator *mem, idist__shm *m) {
    if (!m) return;
    if (m->window) idist__window_close(m->window);
    idist__mem_free(mem, m->local);
    idist__mem_free(mem, m->pids);
    idist__mem_free(mem, m->pieces);
    idist__mem_free(mem, m->ports);
    idist__mem_free(mem, m);
}

// From here on the links inside this host go through pipes.
static void idist__shm_take_over(idist__join *j, idist__shm *m, const int *ranks) {
    const idist__shm_head *head = idist__shm_head_of(m);
    int i;

    m->fenced = head->fenced != 0;
    m->crowded = m->n > (int)head->ncores;
    j->w->ncores = (int)head->ncores;

    for (i = 0; i < m->n; i++) {
        idist__link *l = &j->ring->links[ranks[i]];
        idist__shm_port *p = &m->ports[i];
        m->local[ranks[i]] = i;
        p->fd = -1;
        if (i == m->me) continue;
        p->shm = m;
        p->peer = i;
        p->in = idist__shm_pipe(m, i, m->me);
        p->out = idist__shm_pipe(m, m->me, i);
        p->fd = l->fd;
        l->fd = -1;
        l->port = p;
        l->transport = &idist__transport_shm;
        j->ring->nstreams--;
    }

    j->ring->shm = m;
}

static idist_status idist__join_share(idist__join *j, const idist__record *records) {
    const idist_allocator *mem = &j->w->cfg.mem;
    int i, me = j->w->group.rank, n = 0, attempt, *ranks;
    idist__shm *m;
    bool all = false;
    idist_status s = IDIST_OK;

    if (!records[me].shm) return IDIST_OK;
    m = (idist__shm *)idist__mem_alloc(mem, sizeof *m);
    if (!m) return IDIST_ERR_NO_MEMORY;
    m->local = ranks = (int *)idist__mem_alloc(mem, sizeof(int) * 2 * (size_t)j->w->group.size);
    m->ports =
        (idist__shm_port *)idist__mem_alloc(mem, sizeof *m->ports * (size_t)j->w->group.size);
    m->pids = (pid_t *)idist__mem_alloc(mem, sizeof *m->pids * (size_t)j->w->group.size);
    m->pieces = (char *)idist__mem_raw(mem, IDIST__FAR_PIECE * (size_t)j->w->group.size);

    if (!m->local || !m->ports || !m->pids || !m->pieces) {
        idist__shm_free(mem, m);
        return IDIST_ERR_NO_MEMORY;
    }

    ranks += j->w->group.size;

    for (i = 0; i < j->w->group.size; i++) {
        m->local[i] = -1;
        if (!records[i].shm || records[i].host != records[me].host || !records[i].local[0])
            continue;
        if (i == me) m->me = n;
        ranks[n++] = i;
    }

    m->n = n;
    m->window_nbytes = idist__shm_window_nbytes(n);

    for (attempt = 0; attempt < 2 && n > 1 && s == IDIST_OK && !all; attempt++) {
        if (attempt) m->window_nbytes = 0;
        s = idist__shm_open(j, m, ranks, &all);
        if (m->window && !all) idist__window_close(m->window);
        if (!all) m->window = NULL;
    }

    if (s == IDIST_OK && all) idist__shm_take_over(j, m, ranks);
    else idist__shm_free(mem, m);

    return s;
}

// Everything is there. Rank 0 closes the store when that is so on all ranks: until then a death is
// told through it. Rank 0 may do so before it has answered whoever told it.
static idist_status idist__join_leave(idist__join *j) {
    int64_t there = 0;
    char key[128], one = 1;
    idist_status s;

    idist__join_key(j, key, sizeof key, "njoined", -1);
    s = idist__join_set(j, "joined", j->w->group.rank, &one, sizeof one);
    if (s == IDIST_OK) s = idist_store_add(j->store, key, 1, &there);
    if (s != IDIST_OK) return s;
    if (there == j->w->group.size) idist__join_set(j, "all", -1, &one, sizeof one);
    idist__join_will(j, NULL);

    return j->own_store && j->w->group.rank == 0
               ? idist__join_get(j, "all", -1, "joined", &one, sizeof one)
               : IDIST_OK;
}

static idist_status idist__join_run(idist__join *j) {
    idist__world *w = j->w;
    int i, n = w->group.size;
    idist__record *records =
        (idist__record *)idist__mem_alloc(&w->cfg.mem, sizeof *records * (size_t)n);
    idist_status s = IDIST_OK;

    j->shakes = (idist__handshake *)idist__mem_alloc(&w->cfg.mem, sizeof *j->shakes * (size_t)n);
    j->again_ns = (int64_t *)idist__mem_alloc(&w->cfg.mem, sizeof *j->again_ns * (size_t)n);
    j->porch = (idist__porch *)idist__mem_raw(&w->cfg.mem, sizeof *j->porch);
    if (j->porch) idist__porch_init(j->porch);

    if (!records || !j->shakes || !j->again_ns || !j->porch) {
        idist__mem_free(&w->cfg.mem, records);
        idist__mem_free(&w->cfg.mem, j->shakes);
        j->shakes = NULL;
        return IDIST_ERR_NO_MEMORY;
    }

    for (i = 0; i < n; i++) j->shakes[i].fd = -1;
    if (s == IDIST_OK) s = idist__join_job(j);
    if (s == IDIST_OK) s = idist__join_table(j, records);
    if (s == IDIST_OK) s = idist__join_links(j);
    if (s == IDIST_OK) s = idist__join_share(j, records);
    if (s == IDIST_OK) s = idist__join_leave(j);
    j->records = NULL;
    idist__mem_free(&w->cfg.mem, records);

    return s;
}

static void idist__ring_free(idist__ring *ring) {
    idist_allocator *mem = &ring->w->cfg.mem;
    int i;

    for (i = 0; ring->links && i < ring->w->group.size; i++) {
        idist__link *l = &ring->links[i];
        idist__message *m, *next;

        if (l->open) l->transport->close(l->port);
        idist__link_write_failed(ring, l); // frees what did not go out

        for (m = l->early; m; m = next) {
            next = m->next;
            idist__message_free(ring, l, m);
        }

        idist__mem_free(mem, l->stage);
    }

    while (ring->idle) {
        idist__verb *v = ring->idle;
        ring->idle = v->next;
        idist__mem_free(mem, v);
    }

    idist__os_close(&ring->wake);
    idist__shm_free(mem, ring->shm);
    idist__mem_free(mem, ring->links);
    idist__mem_free(mem, ring->polls);
    idist__mem_free(mem, ring->poll_ranks);
    idist__mem_free(mem, ring);
}

static idist_status idist__ring_new(idist__world *w, idist__ring **out) {
    idist__ring *ring = (idist__ring *)idist__mem_alloc(&w->cfg.mem, sizeof *ring);
    size_t n = (size_t)w->group.size, i;

    *out = ring;
    if (!ring) return IDIST_ERR_NO_MEMORY;
    ring->w = w;
    ring->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    ring->links = (idist__link *)idist__mem_alloc(&w->cfg.mem, sizeof *ring->links * n);
    ring->polls = (struct pollfd *)idist__mem_alloc(&w->cfg.mem, sizeof *ring->polls * 2 * (n + 1));
    ring->poll_ranks = (int *)idist__mem_alloc(&w->cfg.mem, sizeof(int) * 2 * (n + 1));
    if (!ring->links || !ring->polls || !ring->poll_ranks) return IDIST_ERR_NO_MEMORY;

    for (i = 0; i < n; i++) {
        idist__link *l = &ring->links[i];
        l->out_end = &l->out;
        l->early_end = &l->early;
        l->window = l->their_window = IDIST__WINDOW_BYTES;
        l->fd = -1;
        if ((l->stage = (char *)idist__mem_raw(&w->cfg.mem, IDIST__STAGE_BYTES)) == NULL)
            return IDIST_ERR_NO_MEMORY;
    }

    return ring->wake < 0 ? idist__fail_errno("eventfd", errno) : IDIST_OK;
}

static idist_status idist__ring_open(idist__world *w) {
    idist__join j;
    idist_status s = IDIST_OK;
    int i;

    memset(&j, 0, sizeof j);
    j.w = w;
    j.listeners[0] = j.listeners[1] = -1;
    j.deadline_ns = idist__os_deadline(w->cfg.init_timeout_ms);
    // Now, and not when it is needed: with a second thread, such as the server of the store, the
    // kernel takes 15 ms for it.
    if (w->cfg.transport == 0 && w->group.size > 1) idist__os_fence_others(true);
    if (w->group.size == 1)
        idist__copy_text(w->nodes[0].hostname, sizeof w->nodes[0].hostname, w->hostname);
    else
        s = idist__join_store(
            &j); // first, so that the others hear of everything that goes wrong here
    if (s == IDIST_OK) s = idist__ring_new(w, &j.ring);
    if (s == IDIST_OK && w->group.size > 1) s = idist__join_run(&j);
    idist__join_store_lost(&j, s);
    if (s != IDIST_OK) idist__join_tell(&j, s);
    idist__os_close(&w->cfg.listener);
    idist__os_close(&j.listeners[0]);
    idist__os_close(&j.listeners[1]);
    for (i = 0; j.shakes && i < w->group.size; i++) idist__os_close(&j.shakes[i].fd);
    if (j.porch) idist__porch_close(j.porch);
    idist__mem_free(&w->cfg.mem, j.porch);
    idist__mem_free(&w->cfg.mem, j.again_ns);
    idist__mem_free(&w->cfg.mem, j.shakes);

    if (j.own_store) {
        char text[sizeof idist__me.text];
        memcpy(text, idist__me.text, sizeof text);
        idist_store_close(&j.store);
        memcpy(idist__me.text, text, sizeof text);
    }

    w->impl = j.ring;
    if (s != IDIST_OK && j.ring) idist__ring_free(j.ring);

    return s;
}

#endif // IDIST_JOIN_H
