// xla/xla_api.h: the public functions: buffers, and access to the plug-in
#pragma once

#include "os/clock.h"
#include "os/thread.h"
#include "base/fail.h"
#include "base/mem.h"
#include "core/model.h"
#include "core/call.h"
#include "xla/pjrt.h"
#include "xla/xla_model.h"
#include "xla/compile_options.h"
#include "xla/xla_home.h"
#include "xla/xla_value.h"
#include "xla/xla_buffer.h"
#include "xla/xla_engine.h"
#include "xla/xla_join.h"

// Locks the world of a group, which must have a device of XLA. On failure nothing is locked.
static idist_status idist__xla_api_enter(const char *name, idist_group *group, idist_group **g) {
    idist_status status = idist__call_enter(name, group, g);
    const idist__world *w;

    if (status != IDIST_OK) return status;
    w = (*g)->w;
    if (w->device_api && w->backend->start == idist__xla_engine_start) return IDIST_OK;
    status = idist__fail(IDIST_ERR_NO_DEVICE, "%s: the world has no device of XLA%s%s", name,
                         w->about.no_device[0] ? ": " : "", w->about.no_device);
    idist__os_mutex_unlock(&(*g)->w->lock);

    return status;
}

const void *idist_xla_api(void) {
    return __atomic_load_n(&idist__xla_home_one.api, __ATOMIC_ACQUIRE);
}

void *idist_xla_client(idist_group *group) {
    idist_group *g;
    void *client;

    if (idist__xla_api_enter("xla_client", group, &g) != IDIST_OK) return NULL;
    client = idist__xla_of(g->w)->home->client;
    idist__os_mutex_unlock(&g->w->lock);

    return client;
}

void *idist_xla_device(idist_group *group) {
    idist_group *g;
    void *device;

    if (idist__xla_api_enter("xla_device", group, &g) != IDIST_OK) return NULL;
    device = idist__xla_of(g->w)->device;
    idist__os_mutex_unlock(&g->w->lock);

    return device;
}

size_t idist_xla_compile_options(idist_group *group, void *options, size_t capacity) {
    idist_group *g;
    size_t nbytes = 0;
    char why[240];

    if (idist__xla_api_enter("xla_compile_options", group, &g) != IDIST_OK) return 0;
    if (g->rank < 0)
        idist__fail(IDIST_ERR_STATE, "xla_compile_options: this rank is not a member of the group");
    else if (!idist__xla_join_may_run(g, why, sizeof why))
        idist__fail(IDIST_ERR_UNSUPPORTED,
                    "xla_compile_options: no program can run over the ranks: %s", why);
    else nbytes = idist__proto_write(g, (char *)options, capacity);
    idist__os_mutex_unlock(&g->w->lock);

    return nbytes;
}

// Creates a buffer like `shape` whose value is this PJRT_Buffer. Takes ownership of the PJRT_Buffer
// on success.
static idist_status idist__xla_api_enter_buffer(idist__xla_home *home, idist__xla_buffer *shape,
                                                void *pjrt, const char *name,
                                                idist_xla_buffer **out) {
    idist__xla_buffer *buffer = (idist__xla_buffer *)idist__mem_alloc(NULL, sizeof *buffer);
    idist__xla_value *value = buffer ? idist__xla_value_new(pjrt) : NULL;

    if (value) {
        *buffer = *shape;
        buffer->value = value;
        buffer->users = 1;
    }

    if (value && idist__xla_buffer_enter(home, buffer)) {
        *out = (idist_xla_buffer *)buffer->at;
        return IDIST_OK;
    }

    idist__mem_free(NULL, value);
    idist__mem_free(NULL, buffer);

    return idist__fail(IDIST_ERR_NO_MEMORY,
                       "%s: no memory, or no addresses (ulimit -v), for %zu "
                       "bytes",
                       name, shape->nbytes);
}

// Creates a buffer with the caller's data, or with zeros if data is NULL. Blocks, without the
// world's lock.
static idist_status idist__xla_api_put(idist__xla_home *home, idist__xla_buffer *shape,
                                       const void *data, idist_xla_buffer **buffer) {
    void *zeros = data ? NULL : idist__mem_alloc(NULL, shape->nbytes), *pjrt;
    char why[IDIST__XLA_REASON];
    idist_status status;

    if (!data && !zeros) return IDIST_ERR_NO_MEMORY;
    pjrt = idist__xla_value_put(home, shape, data ? data : zeros, why, sizeof why);
    idist__mem_free(NULL, zeros);
    if (!pjrt) return idist__fail(IDIST_ERR_DEVICE, "xla_buffer_put: %s", why);
    status = idist__xla_api_enter_buffer(home, shape, pjrt, "xla_buffer_put", buffer);
    if (status != IDIST_OK) idist__pjrt_destroy(home->api, IDIST__PJRT_BUFFER_DESTROY, pjrt);

    return status;
}

// Counts one more user of the open client.
static void idist__xla_api_stay(idist__xla_home *home) {
    idist__os_mutex_lock(&home->lock);
    home->users++;
    idist__os_mutex_unlock(&home->lock);
}

idist_status idist_xla_buffer_put(const void *data, size_t count, idist_dtype dtype,
                                  idist_group *group, idist_xla_buffer **buffer) {
    idist__xla_buffer shape;
    idist__xla_home *home;
    idist_status status;
    idist_group *g;

    if (!buffer) return idist__fail(IDIST_ERR_ARG, "xla_buffer_put: buffer is NULL");
    *buffer = NULL;
    if (!idist__pjrt_type_of(dtype))
        return idist__fail(IDIST_ERR_ARG, "xla_buffer_put: XLA has no dtype %d", (int)dtype);
    if (!count || count > SIZE_MAX / 16)
        return idist__fail(IDIST_ERR_ARG, "xla_buffer_put: a buffer needs at least one element, "
                                          "and must fit into memory");
    status = idist__xla_api_enter("xla_buffer_put", group, &g);
    if (status != IDIST_OK) return status;

    memset(&shape, 0, sizeof shape);
    home = idist__xla_of(g->w)->home;
    shape.device = idist__xla_of(g->w)->device;
    shape.type = idist__pjrt_type_of(dtype)->number;
    shape.dtype = dtype;
    shape.count = count;
    shape.nbytes = count * idist_dtype_size(dtype);
    shape.dims[0] = (int64_t)count;
    shape.dim_count = 1;
    idist__xla_api_stay(home); // the world may end meanwhile
    idist__os_mutex_unlock(&g->w->lock);

    status = idist__xla_api_put(home, &shape, data, buffer);
    idist__xla_home_leave(home);

    return status;
}

// Asks a PJRT_Buffer for its shape.
static idist_status idist__xla_api_describe(const idist__xla_home *home, void *pjrt,
                                            idist__xla_buffer *shape) {
    char why[IDIST__XLA_REASON];
    idist__pjrt_dims args;
    size_t i;

    shape->type = idist__pjrt_ask_number(home->api, IDIST__PJRT_BUFFER_TYPE, pjrt, why, sizeof why);
    shape->dtype = idist__pjrt_dtype(shape->type);
    shape->device = idist__pjrt_ask(home->api, IDIST__PJRT_BUFFER_DEVICE, pjrt, why, sizeof why);
    idist__pjrt_init(&args, sizeof args);
    args.buffer = pjrt;
    if (!shape->device ||
        !idist__pjrt_call(home->api, IDIST__PJRT_BUFFER_DIMS, &args, why, sizeof why))
        return idist__fail(IDIST_ERR_DEVICE, "xla_buffer_adopt: %s", why);
    if (shape->dtype == IDIST_DTYPE_COUNT)
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "xla_buffer_adopt: idist does not have the type of this buffer");
    if (args.count > IDIST__PJRT_DIMS)
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "xla_buffer_adopt: a buffer of %zu dimensions; idist takes up to %d",
                           args.count, IDIST__PJRT_DIMS);

    shape->count = 1;
    shape->dim_count = (int)args.count;

    for (i = 0; i < args.count; i++) {
        shape->dims[i] = args.dims[i];
        shape->count *= (size_t)args.dims[i];
    }

    shape->nbytes = shape->count * idist_dtype_size(shape->dtype);
    if (!shape->count)
        return idist__fail(IDIST_ERR_ARG, "xla_buffer_adopt: the buffer has no element");

    return IDIST_OK;
}

idist_status idist_xla_buffer_adopt(void *pjrt_buffer, idist_group *group,
                                    idist_xla_buffer **buffer) {
    idist__xla_buffer shape;
    idist__xla_home *home;
    idist_status status;
    idist_group *g;
    void *device;

    if (!buffer || !pjrt_buffer)
        return idist__fail(IDIST_ERR_ARG, "xla_buffer_adopt: %s is NULL",
                           buffer ? "pjrt_buffer" : "buffer");
    *buffer = NULL;
    status = idist__xla_api_enter("xla_buffer_adopt", group, &g);
    if (status != IDIST_OK) return status;

    memset(&shape, 0, sizeof shape);
    home = idist__xla_of(g->w)->home;
    device = idist__xla_of(g->w)->device;
    status = idist__xla_api_describe(home, pjrt_buffer, &shape);
    if (status == IDIST_OK && shape.device != device)
        status = idist__fail(IDIST_ERR_ARG,
                             "xla_buffer_adopt: the buffer is not on the device of this rank");
    if (status == IDIST_OK)
        status = idist__xla_api_enter_buffer(home, &shape, pjrt_buffer, "xla_buffer_adopt", buffer);
    idist__os_mutex_unlock(&g->w->lock);

    return status;
}

// Finds the buffer of a handle, and counts one more user.
static idist_status idist__xla_api_take(const char *name, const idist_xla_buffer *handle,
                                        idist__xla_buffer **buffer) {
    *buffer = NULL;
    if (!idist__xla_home_is_own(&idist__xla_home_one))
        return idist__fail(IDIST_ERR_STATE,
                           "%s: this process was forked from the one that has the buffer", name);
    *buffer = idist__xla_buffer_take(&idist__xla_home_one, handle);
    if (*buffer && (*buffer)->at == (const char *)handle) return IDIST_OK;
    idist__xla_buffer_drop(&idist__xla_home_one, *buffer);

    return idist__fail(IDIST_ERR_ARG, "%s: no such buffer (freed already?)", name);
}

void *idist_xla_buffer_pjrt(const idist_xla_buffer *buffer) {
    idist__xla_buffer *found;
    void *pjrt;

    if (idist__xla_api_take("xla_buffer_pjrt", buffer, &found) != IDIST_OK) return NULL;
    idist__os_mutex_lock(&idist__xla_home_one.lock);
    pjrt = found->value->pjrt;
    idist__os_mutex_unlock(&idist__xla_home_one.lock);
    idist__xla_buffer_drop(&idist__xla_home_one, found);

    return pjrt;
}

idist_status idist_xla_buffer_get(const idist_xla_buffer *buffer, void *data, size_t nbytes,
                                  int timeout_ms) {
    int64_t deadline_ns = timeout_ms < 0 ? IDIST__FOREVER : idist__os_clock_deadline(timeout_ms);
    idist__xla_home *home = &idist__xla_home_one;
    idist_status status = IDIST_OK;
    char why[IDIST__XLA_REASON];
    idist__xla_buffer *found;
    idist__xla_value *value;
    bool late;

    if (!data) return idist__fail(IDIST_ERR_ARG, "xla_buffer_get: data is NULL");
    status = idist__xla_api_take("xla_buffer_get", buffer, &found);
    if (status != IDIST_OK) return status;
    value = idist__xla_value_take(home, found);

    if (nbytes != found->nbytes)
        status = idist__fail(IDIST_ERR_ARG, "xla_buffer_get: the buffer has %zu bytes, not %zu",
                             found->nbytes, nbytes);
    else if (!idist__xla_value_wait(home, value, deadline_ns, &late, why, sizeof why))
        status = late ? idist__fail(IDIST_ERR_TIMEOUT,
                                    "xla_buffer_get: the device has not finished after %d ms",
                                    timeout_ms)
                      : idist__fail(IDIST_ERR_DEVICE, "xla_buffer_get: %s", why);
    else if (!idist__xla_value_get(home, found, value, data, why, sizeof why))
        status = idist__fail(IDIST_ERR_DEVICE, "xla_buffer_get: %s", why);

    idist__xla_value_drop(home, value);
    idist__xla_buffer_drop(home, found);

    return status;
}

idist_status idist_xla_buffer_free(idist_xla_buffer **buffer) {
    idist__xla_buffer *found;
    idist_status status;
    bool first;

    if (!buffer || !*buffer) return IDIST_OK;
    status = idist__xla_api_take("xla_buffer_free", *buffer, &found);
    *buffer = NULL;
    if (status != IDIST_OK) return status;
    idist__os_mutex_lock(&idist__xla_home_one.lock);
    first = !found->freed; // another thread may free the buffer at this moment
    found->freed = true;
    idist__os_mutex_unlock(&idist__xla_home_one.lock);
    idist__xla_buffer_drop(&idist__xla_home_one, found);
    if (first) idist__xla_buffer_drop(&idist__xla_home_one, found); // the program's own use

    return IDIST_OK;
}
