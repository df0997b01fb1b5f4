// ring/join/join_failure.h: a rank that cannot join tells the other ranks why
//
// If one rank cannot join, no rank can. A rank that has already joined learns of the failure in its
// first call, because the world's group has failed. The other ranks should not have to wait for the
// time-out. Therefore the rank that gives up writes the reason into the store under "failed", which
// waiting ranks check regularly. A rank that has read the reason counts itself in "heard". The
// owner of the store keeps the store open until all ranks have read the reason, but for at most
// half a second.
//
// A process that dies cannot write the reason. The store's server sets "failed" on behalf of that
// process; see launch/draw.h.
#pragma once

#include "os/clock.h"
#include "base/fail.h"
#include "base/text.h"
#include "base/log.h"
#include "net/meet.h"
#include "store/server.h"
#include "store/store.h"
#include "launch/draw.h"
#include "ring/join/join_state.h"

enum { IDIST__FAILURE_STAY_MS = 500, IDIST__FAILURE_LOST_MS = 300 };

// Fails because descriptors are short. Rank 0 needs the most descriptors: for each rank, one
// connection to the store and the sockets of a link.
static idist_status idist__join_failure_no_fds(const idist__join *j) {
    int sockets = j->connector ? j->connector->socket_count : 1;

    return idist__fail(
        IDIST_ERR_NO_FDS,
        "initialize: out of file descriptors; a world of %d needs up to %d: raise ulimit -n",
        j->w->group.size, (1 + sockets) * j->w->group.size + 8);
}

// Appends a possible cause, which the server has observed, to the error text that names the late
// ranks.
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
            ". %d connections were refused or broke: a wrong secret, another build, a process of "
            "another job, or a rank that died",
            refused);

    return IDIST_ERR_TIMEOUT;
}

// If joining failed because the server of the store ended, changes the error text so that it names
// the server's process.
static void idist__join_failure_of_store(const idist__join *j, idist_status status) {
    bool by_rank_0 = j->w->cfg.store == NULL && !idist__join_state_is_torch(j);
    bool lost = j->lost_server || (j->store && j->store->is_lost);
    const char *cause = idist__text_behind(idist__me.text, "initialize: ");

    if (status != IDIST_ERR_PEER_LOST || !lost) return;
    idist__fail(status, "initialize: %s: %s",
                by_rank_0 ? "rank 0 was lost, or gave up" : "the store's server was lost",
                idist__text_behind(cause, "store: "));
}

// Immediately logs that a process with another secret has connected, because the ranks may wait for
// that process until they time out. The process may also be unrelated to the job.
static void idist__join_failure_warn(idist__join *j) {
    const idist__server *server = idist__join_state_server(j);

    if (j->warned || !server || !__atomic_load_n(&server->is_unlike, __ATOMIC_ACQUIRE)) return;
    j->warned = true;
    idist__log_print(&j->w->log, IDIST_LOG_WARN,
                     "initialize: %s (unless that process is not part of this job)",
                     server->unlike);
}

// If some rank has given up, fails for the same reason. Otherwise returns IDIST_OK.
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

    if (failure.status == IDIST_ERR_TIMEOUT) { // the text names the ranks that are late
        idist__fail(IDIST_ERR_TIMEOUT, "initialize: %s", failure.text);
        return idist__join_failure_hint(j);
    }

    if (failure.rank < 0)
        return idist__fail((idist_status)failure.status,
                           "initialize: a process with an assigned rank could not join: %s",
                           failure.text);

    return idist__fail((idist_status)failure.status, "initialize: rank %d could not join: %s",
                       (int)failure.rank, failure.text);
}

// Keeps the store open until all other ranks have read the reason, but for at most
// IDIST__FAILURE_STAY_MS.
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

// Tells the other ranks why this rank gives up, unless they know the reason already.
static void idist__join_failure_tell(idist__join *j, idist_status status) {
    idist__failure failure;
    char name[128], text[sizeof idist__me.text];
    int64_t heard;

    if (!j->store || !j->prefix[0]) return;
    memcpy(text, idist__me.text, sizeof text); // the store may overwrite the text
    memset(&failure, 0, sizeof failure);
    failure.status = (int32_t)status;
    failure.rank = j->w->group.rank;
    idist__text_copy(failure.text, sizeof failure.text, idist__text_behind(text, "initialize: "));

    // If the reason does not reach the store, the other ranks find out when the store ends.
    idist__join_state_name(j, name, sizeof name, "failed", -1);
    if (!j->others_know) idist_store_set(j->store, name, &failure, sizeof failure);
    idist__store_drop_will(j->store);

    idist__join_state_name(j, name, sizeof name, "heard", -1);
    if (failure.rank > 0) idist_store_add(j->store, name, 1, &heard);
    else if (j->owns_store) idist__join_failure_stay(j);
    memcpy(idist__me.text, text, sizeof text);
}

// Fails because the connection to a rank ended. First waits for up to IDIST__FAILURE_LOST_MS for a
// reason in the store. The rank may have given up and stored its reason, or the server may be about
// to report that the rank died.
static idist_status idist__join_failure_lost(idist__join *j, int rank, const char *how) {
    int64_t until_ns = idist__os_clock_deadline(IDIST__FAILURE_LOST_MS);
    char text[300];

    idist__text_copy(text, sizeof text, how); // `how` may point to the text of the last failure

    do {
        idist_status status = idist__join_failure_check(j);
        if (status != IDIST_OK) return status;
        idist__os_clock_pause_ms(10);
    } while (idist__os_clock_ms_until(until_ns) != 0);

    return idist__fail(IDIST_ERR_PEER_LOST, "initialize: rank %d on %s was lost: %s", rank,
                       j->w->nodes[rank].hostname, text);
}

// Fails because the time is up and the store's server does not answer.
static idist_status idist__join_failure_silent(const idist__join *j) {
    bool by_rank_0 = j->w->cfg.store == NULL && !idist__join_state_is_torch(j);

    return idist__fail(
        IDIST_ERR_TIMEOUT,
        "initialize: %s no longer answers: it is stopped, or the network to it is down",
        by_rank_0 ? "rank 0" : "the store's server");
}

// Fails because the time is up and rank 0 has not set a value that the whole job needs.
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

// Fails because the time is up. Names the ranks at or above `rank` that have not set a value.
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
            "initialize: %d of %d ranks showed up, but did not finish connecting to others within "
            "%d ms: rank %s%s. Possible causes: a firewall, a missing route, or a stopped rank",
            missing, j->w->group.size, j->w->cfg.init_timeout_ms, text,
            missing > 16 ? ", ..." : "");
        return idist__join_failure_hint(j);
    }

    idist__fail(IDIST_ERR_TIMEOUT,
                "initialize: %d of %d ranks did not show up within %d ms: rank %s%s", missing,
                j->w->group.size, j->w->cfg.init_timeout_ms, text, missing > 16 ? ", ..." : "");
    if (!j->w->cfg.store && j->w->cfg.meet.kind == IDIST__MEET_LOCAL)
        idist__text_append(
            idist__me.text, sizeof idist__me.text,
            ". The ranks meet at a local socket; ranks of another user, network namespace "
            "(container) or host cannot reach it");
    if (j->w->cfg.rank_drawn)
        idist__text_append(idist__me.text, sizeof idist__me.text,
                           ". Ranks are assigned at %s: start %d processes that meet there",
                           j->w->cfg.meet.name, j->w->group.size);

    return idist__join_failure_hint(j);
}
