// gpu/gpu_agree.h: how the members of a group exchange information
#pragma once

#include "os/clock.h"
#include "os/thread.h"
#include "base/text.h"
#include "base/mem.h"
#include "core/model.h"
#include "core/world.h"
#include "core/survey.h"

// Waits until `ready` returns true or the deadline passes, while the backend watches the other
// ranks. Returns false if the deadline has passed. Called with the lock held. Releases the lock
// between checks.
static bool idist__gpu_agree_wait_until(idist__world *w, bool (*ready)(const void *arg),
                                        const void *arg, int64_t deadline_ns) {
    while (!ready(arg)) {
        if (idist__os_clock_now_ns() > deadline_ns) return false;
        idist__os_mutex_unlock(&w->lock);
        idist__os_clock_pause_ms(1);
        idist__world_lock(w);
        if (w->wait.driver == IDIST__DRIVER_NONE && !w->progress.stops) w->backend->progress(w);
    }

    return true;
}

// The result that each member sends to the other members.
typedef struct idist__gpu_outcome {
    int32_t failed;
    char reason[200];
} idist__gpu_outcome;

// Sets *all to true if all members succeeded. Otherwise replaces `reason` with the rank and the
// reason of the first member that failed.
static idist_status idist__gpu_agree_all_succeeded(idist_group *g, bool failed, char *reason,
                                                   size_t capacity, bool *all) {
    idist__gpu_outcome mine, *theirs;
    idist_status status;
    int i;

    *all = false;
    theirs = (idist__gpu_outcome *)idist__mem_alloc(&g->w->cfg.mem, sizeof mine * (size_t)g->size);
    if (!theirs) return IDIST_ERR_NO_MEMORY;

    memset(&mine, 0, sizeof mine);
    mine.failed = failed;
    idist__text_copy(mine.reason, sizeof mine.reason, reason);
    status = idist__survey(g, &mine, theirs, sizeof mine);
    for (i = 0; status == IDIST_OK && i < g->size && !theirs[i].failed; i++) continue;
    *all = status == IDIST_OK && i == g->size;
    if (status == IDIST_OK && !*all)
        snprintf(reason, capacity, "rank %d: %.200s", g->ranks[i], theirs[i].reason);
    idist__mem_free(&g->w->cfg.mem, theirs);

    return status;
}
