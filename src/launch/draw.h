// launch/draw.h: a process claims its rank, or is assigned one from a file
//
// Functions: idist__draw_*, idist__claim_*.
#pragma once

#include "os/clock.h"
#include "os/random.h"
#include "os/socket.h"
#include "base/fail.h"
#include "base/text.h"
#include "net/meet.h"
#include "store/store.h"
#include "launch/env.h"

//------------------------------------------------------------------------------
// a process claims its rank, and the other ranks learn if the process ends
//
// A process that tells the store its rank leaves a will in the same request (see
// idist__store_request). If the process then ends before it has joined, the store sets the key in
// which the other ranks look for failures. Before that request, the other ranks do not know that
// the process exists, and wait until their time-out. The will does not cover:
//
//     a process that ends before its handshake with the store is complete, or never starts
//     rank 0, whose process runs the store, for ranks that have not reached the store yet
//     torch's store, which has no wills; there torchrun's agent ends the other workers
//------------------------------------------------------------------------------

// The reason why a rank failed to join. Value of the key "failed" (ring/join/join_failure.h).
typedef struct idist__failure {
    int32_t status;
    int32_t rank;    // -1 if the process had no rank yet
    int32_t by_will; // 1 if the store wrote this because the process ended
    char text[400];
} idist__failure;

// Adds 1 to the number stored under `key` and leaves a will. If this process ends before it
// withdraws the will, the store sets the key `failed`, in which the sum replaces '%'. For a NULL
// sum, see idist__store_claim.
IDIST__UNUSED static idist_status idist__claim_run(idist_store *store, const char *key,
                                                   const char *failed, int rank, int64_t *sum) {
    idist__failure will;
    char host[64];

    memset(&will, 0, sizeof will);
    will.status = (int32_t)IDIST_ERR_PEER_LOST;
    will.rank = rank;
    will.by_will = 1;
    if (!idist__os_socket_host_name(host, sizeof host))
        idist__text_copy(host, sizeof host, "localhost");
    snprintf(will.text, sizeof will.text, "its process on %s ended during idist_initialize", host);

    return idist__store_claim(store, key, failed, &will, sizeof will, sum);
}

//------------------------------------------------------------------------------
// ranks that are assigned from a file
//
// The processes know the file, the size of their world, and perhaps the name of a group. They do
// not know their ranks:
//
//     the first process that opens the file is the server of its store, and rank 0
//     rank 0 sets idist/ranks to {drawn, a random number of this world}
//     the other processes read idist/ranks and claim idist/drawn; the sum is the rank
//
// From then on everything works as if the ranks were given. The server's lock ends with the
// server's process, so the lock distinguishes a new world from the remains of a dead one. If ranks
// are given, rank 0 also sets idist/ranks, so that a process without a rank gets an error that says
// so.
//
// A rank may leave a world while rank 0 still holds the file. When the rank joins again, it finds
// the number of its last world in the file and waits until the file is gone. This applies to
// assigned and to given ranks. Each thread stores its own last number, because threads can be
// ranks.
//------------------------------------------------------------------------------

typedef struct idist__draw_mark { // the value of idist/ranks
    uint64_t drawn;               // 0 if the ranks are given
    uint64_t world;               // random number of the world
} idist__draw_mark;

enum { IDIST__DRAW_AGAIN_MS = 3 };

// Random number of the last world that this thread found in a file.
IDIST__TLS uint64_t idist__draw_last_world;

static const char *idist__draw_file(const idist__config *config) { return config->meet.name; }

static idist_status idist__draw_set_mark(idist_store *store, bool drawn) {
    idist__draw_mark mark;

    mark.drawn = drawn;
    idist__os_random(&mark.world, sizeof mark.world);
    idist__draw_last_world = mark.world;
    return idist_store_set(store, "idist/ranks", &mark, sizeof mark);
}

static idist_status idist__draw_get_mark(const idist__config *config, idist_store *store,
                                         idist__draw_mark *mark) {
    size_t nbytes = 0;
    idist_status status;

    memset(mark, 0, sizeof *mark);
    status = idist_store_get(store, "idist/ranks", mark, sizeof *mark, &nbytes, 0);

    if (status == IDIST_ERR_TRUNCATED || (status == IDIST_OK && nbytes != sizeof *mark))
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "initialize: rank 0 at %s was built from another version of idist.h",
                           idist__draw_file(config));
    return status;
}

static idist_status idist__draw_still_held(const idist__config *config) {
    return idist__fail(IDIST_ERR_TIMEOUT,
                       "initialize: an earlier world of this rank still holds %s",
                       idist__draw_file(config));
}

// Checks that rank 0 was given its rank, as this process was. On rank 0, records in the store that
// ranks are given. `store` is the open store in the file. Sets *again if the store belongs, or
// belonged, to our last world; the caller must then open the next store.
IDIST__UNUSED static idist_status idist__draw_check_given(const idist__config *config,
                                                          idist_store *store, bool *again) {
    uint64_t last = idist__draw_last_world;
    idist__draw_mark mark;
    idist_status status;

    *again = false;
    if (config->rank == 0) return idist__draw_set_mark(store, false);
    status = idist__draw_get_mark(config, store, &mark);

    if (status == IDIST_ERR_PEER_LOST && last) {
        *again = true;
        idist__draw_last_world = 0; // a second loss means that the new rank 0 was lost
        return IDIST_OK;
    }

    if (status != IDIST_OK) return status;
    *again = mark.world == last;
    if (!mark.drawn) idist__draw_last_world = mark.world;
    if (*again || !mark.drawn) return IDIST_OK;

    return idist__fail(
        IDIST_ERR_ENV,
        "initialize: this process was given rank %d (%s), but rank 0 at %s was given "
        "none: give a rank to all processes, or to none",
        config->rank, config->rank_var ? config->rank_var : "desc.rank", idist__draw_file(config));
}

// Tries to get a rank from the store. Sets *again if this world is not ours but the next one may
// be.
static idist_status idist__draw_try(idist__config *config, bool *again) {
    idist_store *store = config->drawn;
    idist__draw_mark mark;
    int64_t rank = 0;
    idist_status status;

    *again = false;
    config->rank = 0;
    if (idist__store_is_file_server(store)) return idist__draw_set_mark(store, true);

    status = idist__draw_get_mark(config, store, &mark);

    if (status == IDIST_OK && !mark.drawn)
        return idist__fail(IDIST_ERR_ENV,
                           "initialize: this process was given no rank, but rank 0 at %s was: give "
                           "a rank to all processes (RANK or desc.rank), or to none",
                           idist__draw_file(config));
    if (status == IDIST_OK) *again = mark.world == idist__draw_last_world;
    if (status == IDIST_OK && !*again)
        status = idist__claim_run(store, "idist/drawn", "idist/1/failed", -1, &rank);

    if (status == IDIST_ERR_PEER_LOST) { // the server ended before we had a rank
        *again = true;
        return IDIST_OK;
    }

    if (status != IDIST_OK || *again) return status;

    if (rank >= config->world_size) {
        idist__store_drop_will(store);
        return idist__fail(
            IDIST_ERR_RANK_TAKEN,
            "initialize: all %d ranks of the world at %s (group \"%s\") are taken: start %d "
            "processes, or give each job a file or a group name (IDIST_GROUP_NAME) of its own",
            config->world_size, idist__draw_file(config), config->group_name, config->world_size);
    }

    config->rank = (int)rank;
    idist__draw_last_world = mark.world;

    return IDIST_OK;
}

static idist_status idist__draw_open(idist__config *config, int64_t deadline_ns) {
    idist__meet meet = config->meet;
    int64_t left_ms = idist__os_clock_ms_until(deadline_ns);
    idist_store_desc desc;

    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = left_ms == 0 ? 1 : (int)left_ms;
    desc.secret = config->secret.nbytes ? config->secret.bytes : NULL;
    desc.secret_nbytes = config->secret.nbytes;
    desc.allocator = config->mem;
    meet.kind = IDIST__MEET_DRAW;

    return idist__store_open(&meet, &desc, -1, &config->drawn);
}

// Closes the store that assigned our rank, if there is one and no world has taken it over.
static void idist__draw_close(idist__config *config) {
    char text[sizeof idist__me.text];

    memcpy(text, idist__me.text, sizeof text); // closing may overwrite the text
    idist_store_close(&config->drawn);
    memcpy(idist__me.text, text, sizeof text);
}

// Gets a rank for a configuration that has none. Leaves the store in config->drawn.
static idist_status idist__draw_rank(idist__config *config) {
    int64_t deadline_ns = idist__os_clock_deadline(config->init_timeout_ms);
    idist_status status = IDIST_OK;
    bool again = true;

    while (again && status == IDIST_OK) {
        status = idist__draw_open(config, deadline_ns);
        if (status != IDIST_OK) return idist__fail(status, "initialize: %s", idist__me.text);
        status = idist__draw_try(config, &again);
        config->rank_drawn = status == IDIST_OK && !again;
        if (config->rank_drawn) return IDIST_OK;

        idist__draw_close(config);
        if (status == IDIST_OK && idist__os_clock_ms_until(deadline_ns) == 0)
            status = idist__draw_still_held(config);
        if (status == IDIST_OK) idist__os_clock_pause_ms(IDIST__DRAW_AGAIN_MS);
    }

    return status;
}
