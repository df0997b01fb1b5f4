// core/survey.h: what the members of a group tell each other beside the program's calls
#pragma once

#include "core/model.h"
#include "core/together.h"
#include "core/call.h"

// Gathers nbytes of each member, for a device backend. Collective. Called with the world's lock
// held; releases the lock while it waits. Blocks even inside an idist_group_begin of the caller.
IDIST__UNUSED static idist_status idist__survey(idist_group *g, const void *mine, void *all,
                                                size_t nbytes) {
    int depth = idist__together_now.depth;
    idist__call call;
    idist_opts opts;
    idist_status status;

    memset(&opts, 0, sizeof opts);
    opts.group = g;
    idist__call_init(&call, IDIST__ALL_GATHER, mine, all, nbytes, IDIST_U8);
    call.label = IDIST__FIRST_DEVICE_CALL;
    idist__together_now.depth = 0;
    status = idist__call_locked(g, &call, &opts);
    idist__together_now.depth = depth;

    return status;
}
