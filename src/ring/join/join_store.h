// ring/join/join_store.h: opens the store, and waits for values in it
//
// Successive worlds in the same store must not see each other's values. Therefore each rank counts
// its worlds in the store, and the count is part of all names. In a store that idist has opened
// itself, the count can only be 1; a higher count means that two processes have the same rank. A
// torch agent keeps its store when it restarts the workers, so with torch the number of restarts is
// also part of the names.
#pragma once

#include "os/clock.h"
#include "os/process.h"
#include "base/fail.h"
#include "net/meet.h"
#include "store/client.h"
#include "store/store.h"
#include "launch/env.h"
#include "launch/pmi.h"
#include "launch/draw.h"
#include "ring/join/join_state.h"
#include "ring/join/join_failure.h"

enum { IDIST__JOIN_BATCH = 64 }; // values that one request waits for

// Identifies the server of the store through which this thread last tried to join.
IDIST__TLS uint64_t idist__join_store_last_server;

// Waits for a value. After a time-out the error names the ranks that have not set the value. If
// `cause` is given, the error instead names the ranks that have not set `cause`, a value that must
// exist first. For a value of the whole job, which rank 0 sets, `rank` is -1.
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

// Waits until the `count` ranks that begin with `first` have set a value. `count` is at most
// IDIST__JOIN_BATCH.
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

// Waits until all ranks have set a value. Makes few requests, because each request may have to wait
// for a processor that hundreds of ranks compete for.
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
// last world that this thread joined or failed to join. Rank 0 may also close that store during our
// handshake. Such a close can happen only once. So a server that is lost after that is the server
// of the new world.
static idist_status idist__join_store_open_new(idist__join *j, const idist_store_desc *desc) {
    idist__config *cfg = &j->w->cfg;
    uint64_t last = desc->server ? 0 : idist__join_store_last_server;
    idist_store_desc d = *desc;
    bool may_close = last != 0;
    char text[IDIST__MEET_NBYTES];

    for (;;) {
        idist_status status = idist__store_open(&cfg->meet, &d, cfg->listener, &j->store);
        bool closes = may_close && status == IDIST_ERR_PEER_LOST;

        if (closes) may_close = false;
        cfg->listener = -1; // the store owns the listener now

        if (status == IDIST_OK && last && idist__store_server_id(j->store) == last) {
            idist_store_close(&j->store);
            closes = true;
        }

        if (status == IDIST_OK && !closes)
            idist__join_store_last_server = idist__store_server_id(j->store);
        if (!closes) return status;
        if (idist__os_clock_ms_until(j->deadline_ns) == 0)
            return idist__fail(IDIST_ERR_TIMEOUT,
                               "store: rank 0 at %s has not started the next world",
                               idist__meet_print(&cfg->meet, text, sizeof text));
        idist__os_clock_pause_ms(1);
        d.timeout_ms = idist__join_state_ms_left(j);
    }
}

// Opens the store of a new world at the job's address. If the store is in a file, waits until the
// last world's store is gone. This thread may have left the last world before the other ranks.
static idist_status idist__join_store_open_next(idist__join *j, idist_store_desc *desc) {
    idist__config *cfg = &j->w->cfg;
    bool again = false;

    for (;;) {
        idist_status status = idist__join_store_open_new(j, desc);

        if (status == IDIST_ERR_ADDR_IN_USE && cfg->may_draw)
            return idist__fail(
                status,
                "initialize: %s (this process is rank 0; to have a rank assigned, set no rank, or "
                "desc.rank -1)",
                idist__me.text);
        j->lost_server = status == IDIST_ERR_PEER_LOST;
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

// Opens a store of our own, at the address from the launcher or the environment.
static idist_status idist__join_store_open_own(idist__join *j) {
    idist__config *cfg = &j->w->cfg;
    idist_store_desc desc;
    idist_status status;

    if (cfg->meet.kind == IDIST__MEET_NONE)
        return idist__fail(IDIST_ERR_ENV,
                           "rank %d of %d (%s): MASTER_ADDR is not set, so the ranks cannot find "
                           "each other. Set MASTER_ADDR and MASTER_PORT to rank 0's host and a "
                           "free port there (127.0.0.1 when all ranks are on this host)",
                           cfg->rank, cfg->world_size,
                           cfg->rank_var ? cfg->rank_var : cfg->launcher);

    if (cfg->meet.kind == IDIST__MEET_PMI) {
        status = idist__pmi_share_address(cfg);
        if (status != IDIST_OK) return status;
    }

    if (cfg->drawn) { // our rank was assigned from this store
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

// Returns true if the count of this rank's worlds arrives with the answer to its next request,
// which saves a round trip. See idist__join_store_claim.
static bool idist__join_store_claims_late(const idist__join *j) {
    if (!j->owns_store || j->w->cfg.rank == 0 || idist__join_state_is_torch(j)) return false;
    return j->store->run == idist__client_run; // NOLINT(clang-analyzer-core.NullDereference)
}

// Checks that no other process has claimed our rank. `status` is the result of the request sent
// after our claim. If another process has the rank, or we cannot tell, this rank publishes nothing
// about itself.
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

    // A view of the caller's store has its own answer_by_ns, so setting it does not change the
    // caller's store.
    status =
        cfg->store ? idist_store_prefix(cfg->store, "", &j->store) : idist__join_store_open_own(j);
    if (status != IDIST_OK) return status;
    j->store->answer_by_ns = j->deadline_ns; // NOLINT(clang-analyzer-core.NullDereference)

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

// Publishes that this rank is done. Rank 0 closes the store only when all ranks are done, because
// until then the ranks learn through the store that a process has died. This rank does not wait for
// an answer, because rank 0 may close the store before it answers.
//
// If the store is in a file, the other ranks wait until the store has ended. If they open another
// world in the same file, they must not find the store of this world. Over sockets,
// idist__join_store_open_new ensures this, and saves a round trip for ranks that open no other
// world.
static idist_status idist__join_store_leave(idist__join *j) {
    char one = 1;
    idist_status status = idist__join_state_set(j, "joined", j->w->group.rank, &one, sizeof one);

    if (status == IDIST_OK) idist__store_drop_will(j->store);
    if (!j->owns_store || status != IDIST_OK) return status;
    if (j->w->group.rank == 0) return idist__join_store_await_all(j, "joined");
    idist__store_await_end(j->store, j->deadline_ns);

    return IDIST_OK;
}
