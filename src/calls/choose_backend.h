// calls/choose_backend.h: chooses the backend of a world
//
// The registered backends are asked in turn, the most recently registered first. A world without a
// list of names takes the first host backend that claims the configuration. A world with a list
// tries the names in the order of the list. To move device memory, a world also lists the device
// backends that claim the configuration, and takes the first one that finds a device
// (idist__life_wrap). The choice depends on no particular backend's name. The table
// idist__backend_hints only improves error texts and serves programs written for torch.distributed
// and Ignite.
#pragma once

#include "base/fail.h"
#include "base/text.h"
#include "base/log.h"
#include "launch/where.h"
#include "core/model.h"
#include "core/backend.h"

// A backend name that the library knows even if the backend is not registered.
typedef struct idist__backend_hint {
    const char *name;
    const char *header;         // registers the backend, or the backend that serves instead
    const char *host;           // the backend that moves host memory for this name, or NULL
    const char *device_backend; // a device backend that must be registered as well, or NULL
    const char *device;         // the device that the name asks for, or NULL
} idist__backend_hint;

static const idist__backend_hint idist__backend_hints[] = {
    {"ring", "idist_ring.h, which IDIST_NO_RING leaves out", NULL, NULL, NULL},
    {"gloo", "idist_ring.h, which IDIST_NO_RING leaves out", "ring", NULL, NULL},
    {"mpi", "idist_mpi.h", NULL, NULL, NULL},
    {"nccl", "idist_nccl.h", "ring", "nccl", NULL},
    {"xla", "idist_xla.h", "ring", "xla", "xla"},
    {"xla-tpu", "idist_xla.h", "ring", "xla", "tpu"}, // Ignite's name
};

// Lists the names of the registered backends, as in "mpi,ring,self".
static void idist__choose_backend_names(char *names, size_t cap) {
    const idist__backend_entry *entry;

    names[0] = 0;
    for (entry = idist__backend_first(); entry; entry = entry->next)
        idist__text_append(names, cap, "%s%s", names[0] ? "," : "", entry->api->name);
}

// Returns true if the n bytes of `text`, a part of a list such as "ring,mpi", equal `word`.
static bool idist__choose_backend_is(const char *text, size_t n, const char *word) {
    return strlen(word) == n && memcmp(text, word, n) == 0;
}

static const idist_backend_api *idist__choose_backend_find(const char *name, size_t n) {
    const idist__backend_entry *entry;

    for (entry = idist__backend_first(); entry; entry = entry->next)
        if (idist__choose_backend_is(name, n, entry->api->name)) return entry->api;
    return NULL;
}

static const idist__backend_hint *idist__choose_backend_hint_of(const char *name, size_t n) {
    size_t i;

    for (i = 0; i < IDIST__COUNT_OF(idist__backend_hints); i++)
        if (idist__choose_backend_is(name, n, idist__backend_hints[i].name))
            return &idist__backend_hints[i];
    return NULL;
}

// Returns the device backend that a name asks for, if the program has that device backend, or NULL.
static const idist_backend_api *idist__choose_backend_device_of(const char *name, size_t n) {
    const idist_backend_api *named = idist__choose_backend_find(name, n);
    const idist__backend_hint *hint = idist__choose_backend_hint_of(name, n);

    if (hint && hint->device_backend)
        named = idist__choose_backend_find(hint->device_backend, strlen(hint->device_backend));

    return named && named->wrap ? named : NULL;
}

// Returns true if a name can be served. Sets *host to the backend that then moves host memory, or
// to NULL if any host backend may.
static bool idist__choose_backend_resolve(const char *name, size_t n,
                                          const idist_backend_api **host) {
    const idist_backend_api *named = idist__choose_backend_find(name, n);
    const idist__backend_hint *hint = idist__choose_backend_hint_of(name, n);

    *host = named && !named->wrap ? named : NULL;
    if (*host) return true;
    if (!hint || !hint->host) return named != NULL; // a device backend works with any host backend
    if (hint->device_backend && !idist__choose_backend_device_of(name, n)) return false;
    *host = idist__choose_backend_find(hint->host, strlen(hint->host));

    return *host != NULL;
}

static idist_status idist__choose_backend_unknown(const char *names, const char *name, size_t n) {
    const idist__backend_hint *hint = idist__choose_backend_hint_of(name, n);
    char known[200] = "";
    size_t i;

    if (hint && hint->host &&
        idist__choose_backend_device_of(name, n)) // only its host backend is missing
        hint = idist__choose_backend_hint_of(hint->host, strlen(hint->host));
    if (hint)
        return idist__fail(IDIST_ERR_NO_BACKEND,
                           "backend \"%.*s\" needs %s: include it in the file that defines "
                           "IDIST_IMPLEMENTATION. This program has: %s",
                           (int)n, name, hint->header, names);

    for (i = 0; i < IDIST__COUNT_OF(idist__backend_hints); i++)
        idist__text_append(known, sizeof known, "%s%s", i ? ", " : "",
                           idist__backend_hints[i].name);

    return idist__fail(IDIST_ERR_NO_BACKEND,
                       "there is no backend \"%.*s\". This program has: %s. Headers of idist "
                       "provide: %s",
                       (int)n, name, names, known);
}

// Completes the choice after the host backend of a name has claimed the configuration. If the name
// asks for a device or a device backend, sets cfg.device or cfg.device_backend, unless the program
// has set that field.
static void idist__choose_backend_settle(idist__world *w, const char *name, size_t n) {
    const idist_backend_api *api = idist__choose_backend_device_of(name, n);
    const idist__backend_hint *hint = idist__choose_backend_hint_of(name, n);
    const char *device = api ? api->name : NULL;

    if (idist__choose_backend_find(name, n) == w->backend) return;
    if (hint && hint->device && !w->cfg.device[0])
        idist__text_copy(w->cfg.device, sizeof w->cfg.device, hint->device);
    else if (device && (!hint || !hint->device) && !w->cfg.device_backend[0])
        idist__text_copy(w->cfg.device_backend, sizeof w->cfg.device_backend, device);
    idist__log_print(&w->log, IDIST_LOG_INFO, "backend \"%.*s\" was requested: %s %s%s%s", (int)n,
                     name, w->backend->name, device ? "moves host memory, " : "serves in its place",
                     device ? device : "", device ? " device memory (see device_backend)" : "");
}

// Sets w->backend to the first host backend that claims the configuration. If `only` is not NULL,
// asks only that backend.
static idist_status idist__choose_backend_claim(idist__world *w, const idist_backend_api *only,
                                                const char **why) {
    const idist__backend_entry *entry;
    idist_status status = IDIST_ERR_NO_BACKEND;

    for (entry = idist__backend_first(); entry && status == IDIST_ERR_NO_BACKEND;
         entry = entry->next) {
        if (entry->api->wrap || (only && entry->api != only)) continue;
        w->backend = entry->api;
        status = w->backend->claim(&w->cfg, why);
    }

    return status;
}

// Sets w->backend to the first backend that claims the configuration. Tries the backends that the
// configuration names, or all backends if it names none.
static idist_status idist__choose_backend_pick(idist__world *w) {
    const char *at = w->cfg.backends, *why = "";
    idist_status status = IDIST_ERR_NO_BACKEND;
    const idist_backend_api *host;

    if (!at[0]) status = idist__choose_backend_claim(w, NULL, &why);

    while (*at && status == IDIST_ERR_NO_BACKEND) {
        size_t n = strcspn(at, ",");

        if (!idist__choose_backend_resolve(at, n, &host))
            return idist__choose_backend_unknown(w->about.backends, at, n);
        status = idist__choose_backend_claim(w, host, &why);
        if (status == IDIST_OK) idist__choose_backend_settle(w, at, n);
        at += n + (at[n] == ',');
    }

    if (status == IDIST_OK) return idist__where_check_lone(&w->cfg);
    if (status != IDIST_ERR_NO_BACKEND) return status;
    if (!w->cfg.backends[0] && !idist__choose_backend_find("ring", 4))
        why = "to connect ranks, copy idist_ring.h beside idist.h, and do not define IDIST_NO_RING";

    return idist__fail(IDIST_ERR_NO_BACKEND, "no backend for a world of %d among %s: %s",
                       w->cfg.world_size, w->about.backends, why);
}

// Lists the device backends of the program that claim the configuration. If there is none, writes
// the reason to w->about.no_device. Fails if the program has device backends, none of them claims
// the configuration, and the configuration names a device or a device backend.
static idist_status idist__choose_backend_find_device(idist__world *w) {
    const char *why = "this program has no device backend: include idist_nccl.h or idist_xla.h in "
                      "the file that defines IDIST_IMPLEMENTATION";
    const idist__backend_entry *entry;
    bool has_any = false;

    for (entry = idist__backend_first(); entry; entry = entry->next) {
        idist_status status;

        if (!entry->api->wrap || w->device_backend_count == IDIST__DEVICE_BACKENDS) continue;
        has_any = true;
        status = entry->api->claim(&w->cfg, &why);
        if (status == IDIST_OK) w->device_backends[w->device_backend_count++] = entry->api;
        else if (status != IDIST_ERR_NO_BACKEND) return status;
    }

    if (w->device_backend_count) return IDIST_OK;
    if (has_any && (w->cfg.device_backend[0] || w->cfg.device[0]))
        return idist__fail(IDIST_ERR_NO_BACKEND,
                           "no device backend serves device \"%s\" with device_backend \"%s\": %s",
                           w->cfg.device, w->cfg.device_backend, why);
    idist__text_copy(w->about.no_device, sizeof w->about.no_device, why);

    return IDIST_OK;
}
