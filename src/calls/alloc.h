// calls/alloc.h: allocates and frees buffers
#pragma once

#include "os/memory.h"
#include "base/fail.h"
#include "base/window.h"
#include "core/model.h"
#include "core/world.h"

void *idist_alloc(size_t nbytes, const idist_opts *opts) {
    idist__world *w = opts && opts->group ? opts->group->w : idist__world_default();
    size_t padded = nbytes ? (nbytes + 63) & ~(size_t)63 : 64;
    void *p = NULL;

    if (opts && opts->group && !w) {
        idist__fail(IDIST_ERR_STATE, "alloc: the world of this group was closed");
        return NULL;
    }

    if (w && !idist__world_forked(w) && w->backend->alloc) p = w->backend->alloc(w, nbytes);
    if (p) return p;

    if (nbytes <= SIZE_MAX / 2) p = idist__os_memory_aligned(64, padded);

    if (!p) {
        idist__fail(IDIST_ERR_NO_MEMORY, "alloc: no memory for %zu bytes", nbytes);
        return NULL;
    }

    memset(p, 0, nbytes ? nbytes : 1);

    return p;
}

void idist_free(void *ptr) {
    if (ptr && !idist__window_free(ptr)) idist__os_memory_free_aligned(ptr);
}
