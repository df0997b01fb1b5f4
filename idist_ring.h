/* idist_ring.h - v0.1.0 - the ring backend of idist: ranks on one host or many - MIT licence

DO THIS

    Nothing: idist.h includes this header at its end. Define IDIST_NO_RING to leave it out.

WHAT IT IS

    Every rank has one stream to every other: a pipe in shared memory inside a host (or a local socket), TCP between
    hosts. Messages up to 64 KiB (8 KiB through shared memory) go out at once (eager) within a window of 1 MiB that the
    receiver has to keep; larger ones are announced and sent when the receiver has named a place for them, or read by it
    in the sender's memory (rendezvous), so nothing is ever buffered without bound. Every message carries the
    fingerprint of the call it belongs to.

    A collective of ranks that share memory goes through places where all can read ([ring:share]). Otherwise it is an
    algorithm over non-blocking sends and receives of the group's ranks ([ring:algo]); it never sees a socket, and it
    is called again whenever one of them is through.

CONTENTS

      [ring:api]      the backend's entry in IDIST_BACKENDS
      [ring:backend]  leaving, and the table of the backend's functions

LIMITS

    n ranks need n descriptors each, and rank 0 about 2n + 8 while they meet. A dead machine (as opposed to a dead
    process) is noticed by the time-out only.
    Over several hosts gather, scatter, all_to_all, scan, the v-forms, and reductions of floats of 16 and 8 bits or
    in a fixed order, are made of messages among all.

    Licence: MIT, as idist.h.
*/
#ifndef IDIST_H
#include "idist.h"
#endif
#ifndef IDIST_RING_H
#define IDIST_RING_H

#ifdef __cplusplus
extern "C" {
#endif

//------------------------------------------------------------------------------
// [ring:api]  the backend's entry in IDIST_BACKENDS
//------------------------------------------------------------------------------

// Any number of ranks, on one host or several; CPU memory.
IDIST_API const idist_backend_api *idist_ring_backend(void);

#undef IDIST__ENTRY_RING
#define IDIST__ENTRY_RING idist_ring_backend()

#ifdef __cplusplus
} // extern "C"
#endif

#endif // IDIST_RING_H

// Only here for the API? Stop reading.

#if defined(IDIST_IMPLEMENTATION) && !defined(IDIST_RING_IMPLEMENTATION_DONE)
#define IDIST_RING_IMPLEMENTATION_DONE

#include "idist_begin.h"
#include "idist_shm.h"
#include "idist_msg.h"
#include "idist_share.h"
#include "idist_algo.h"
#include "idist_engine.h"
#include "idist_join.h"

//------------------------------------------------------------------------------
// [ring:backend]  leaving, and the table of the backend's functions
// uses os sock config world msg:types op link share progress engine:wait task
// uses cancel missing engine:group join:join
//------------------------------------------------------------------------------

// A connection that is closed with bytes in it that we have not read takes with it what the other
// side has not read. So we say that nothing more comes, and throw away what still does until the
// other side ends too, or for a moment.
static void idist__ring_linger(idist__ring *ring, int64_t until_ns) {
    char waste[4096];
    int i, left;

    do {
        struct pollfd *p = ring->polls;

        for (i = left = 0; i < ring->w->group.size; i++) {
            idist__link *l = &ring->links[i];
            if (!l->open || !l->transport->lossy_close) continue;
            shutdown(l->fd, SHUT_WR);
            while (l->transport->read(l->port, waste, sizeof waste) > 0) continue;
            p[left].fd = l->fd;
            p[left].events = POLLIN;
            if (idist__sock_at_end(l->fd)) continue;
            left++;
        }

        if (left) poll(p, (nfds_t)left, idist__os_ms_until(until_ns));
    } while (left && idist__os_ms_until(until_ns) != 0);
}

// After the last barrier everybody says BYE. Where closing a connection with unread bytes in it
// could destroy the other side's, we wait for its BYE. A rank that leaves otherwise only lets its
// last words (ABORT) go out.
static void idist__ring_close(idist__world *w, bool clean) {
    idist__ring *ring = idist__ring_of(w);
    int64_t deadline_ns = idist__os_deadline(clean ? 5000 : 200);
    idist__frame f;
    int i;

    memset(&f, 0, sizeof f);
    f.type = IDIST__BYE;
    pthread_mutex_lock(&w->lock);
    w->group.rank = -1; // frames that still come concern nobody
    for (i = 0; i < w->group.size && clean; i++)
        idist__link_control(ring, &ring->links[i], &f, NULL);
    idist__wait_drain(ring, clean, deadline_ns);
    if (!clean) idist__ring_linger(ring, deadline_ns);
    idist__share_free(&w->group);
    pthread_mutex_unlock(&w->lock);
    idist__ring_free(ring);
}

static idist_status idist__ring_claim(idist__config *config, const char **why) {
    *why = "a world of 1 needs no backend";
    return config->world_size == 1 && !config->backends[0] ? IDIST_ERR_NO_BACKEND : IDIST_OK;
}

const idist_backend_api *idist_ring_backend(void) {
    // clang-format off
    static const idist_backend_api api = {
        IDIST__BACKEND_ABI, sizeof(idist_backend_api), "ring", sizeof(idist__op), sizeof(idist__ring_group),
        idist__ring_claim, idist__ring_open, idist__ring_close,
        idist__ring_group_open, idist__ring_group_close, idist__share_offer_place, idist__ring_group_meet,
        idist__ring_quick, idist__ring_start, idist__ring_progress, idist__ring_sleep, idist__ring_wake,
        idist__ring_cancel, idist__ring_tell, idist__ring_flush, idist__ring_announce, idist__ring_missing,
        idist__ring_alloc, NULL, NULL, NULL};

    // clang-format on
    return &api;
}

#include "idist_end.h"

#endif // IDIST_IMPLEMENTATION
