// xla/xla_value.h: contents of buffers, and copies between host and device
//
// A PJRT_Buffer never changes: whoever writes to a buffer creates a new value. A thread that still
// reads the old value is one of its users.
#pragma once

#include "os/clock.h"
#include "os/thread.h"
#include "base/mem.h"
#include "xla/pjrt.h"
#include "xla/xla_model.h"

// Wraps a PJRT_Buffer, and takes ownership of it. Returns NULL if memory cannot be allocated; the
// caller keeps the PJRT_Buffer then.
static idist__xla_value *idist__xla_value_new(void *pjrt) {
    idist__xla_value *value = (idist__xla_value *)idist__mem_alloc(NULL, sizeof *value);

    if (!value) return NULL;
    value->pjrt = pjrt;
    value->users = 1;

    return value;
}

// Counts one more user of a buffer's value, so that the value stays. The caller drops the value.
static idist__xla_value *idist__xla_value_take(idist__xla_home *home, idist__xla_buffer *buffer) {
    idist__xla_value *value;

    idist__os_mutex_lock(&home->lock);
    value = buffer->value;
    value->users++;
    idist__os_mutex_unlock(&home->lock);

    return value;
}

// Returns true if only the buffer and the caller use a value.
static bool idist__xla_value_is_alone(idist__xla_home *home, const idist__xla_value *value) {
    bool alone;

    idist__os_mutex_lock(&home->lock);
    alone = value->users == 2;
    idist__os_mutex_unlock(&home->lock);

    return alone;
}

// Counts one user less. The last one destroys the PJRT_Buffer.
static void idist__xla_value_drop(idist__xla_home *home, idist__xla_value *value) {
    bool last;

    idist__os_mutex_lock(&home->lock);
    last = --value->users == 0;
    idist__os_mutex_unlock(&home->lock);
    if (!last) return;
    idist__pjrt_destroy(home->api, IDIST__PJRT_BUFFER_DESTROY, value->pjrt);
    idist__mem_free(NULL, value);
}

// Gives a buffer new contents. Takes ownership of the PJRT_Buffer. Returns false if memory cannot
// be allocated; then the PJRT_Buffer is destroyed and the buffer keeps its old contents.
static bool idist__xla_value_replace(idist__xla_home *home, idist__xla_buffer *buffer, void *pjrt) {
    idist__xla_value *value = idist__xla_value_new(pjrt), *old;

    if (!value) {
        idist__pjrt_destroy(home->api, IDIST__PJRT_BUFFER_DESTROY, pjrt);
        return false;
    }

    idist__os_mutex_lock(&home->lock);
    old = buffer->value;
    buffer->value = value;
    idist__os_mutex_unlock(&home->lock);
    idist__xla_value_drop(home, old);

    return true;
}

// Copies host memory to the device of a buffer, and returns a PJRT_Buffer of its shape, or NULL
// with the reason in `why`. Blocks until the plug-in has read the memory.
static void *idist__xla_value_put(const idist__xla_home *home, const idist__xla_buffer *shape,
                                  const void *data, char *why, size_t capacity) {
    idist__pjrt_put args;

    idist__pjrt_init(&args, sizeof args);
    args.client = home->client;
    args.data = data;
    args.type = shape->type;
    args.dims = shape->dims;
    args.dim_count = (size_t)shape->dim_count;
    args.semantics = IDIST__PJRT_UNTIL_TRANSFERRED;
    args.device = shape->device;
    if (!idist__pjrt_call(home->api, IDIST__PJRT_PUT, &args, why, capacity)) return NULL;
    if (idist__pjrt_await(home->api, args.done, why, capacity)) return args.buffer;
    idist__pjrt_destroy(home->api, IDIST__PJRT_BUFFER_DESTROY, args.buffer);

    return NULL;
}

// Copies a value to host memory, in row-major order whatever its layout on the device is. Blocks
// until the value has been computed and copied. Returns false with the reason in `why`.
static bool idist__xla_value_get(const idist__xla_home *home, const idist__xla_buffer *shape,
                                 const idist__xla_value *value, void *data, char *why,
                                 size_t capacity) {
    idist__pjrt_tiled_layout layout;
    int64_t minor_to_major[IDIST__PJRT_DIMS];
    idist__pjrt_get args;
    int i;

    for (i = 0; i < shape->dim_count; i++) minor_to_major[i] = shape->dim_count - 1 - i;
    idist__pjrt_init(&layout, sizeof layout);
    idist__pjrt_init(&layout.tiled, sizeof layout.tiled);
    layout.tiled.minor_to_major = minor_to_major;
    layout.tiled.minor_to_major_count = (size_t)shape->dim_count;
    layout.type = IDIST__PJRT_TILED;

    idist__pjrt_init(&args, sizeof args);
    args.buffer = value->pjrt;
    args.layout = shape->dim_count > 1 ? &layout : NULL;
    args.data = data;
    args.data_nbytes = shape->nbytes;
    if (!idist__pjrt_call(home->api, IDIST__PJRT_GET, &args, why, capacity)) return false;

    return idist__pjrt_await(home->api, args.done, why, capacity);
}

// Waits until a value has been computed, or the deadline. Returns false on a failure of the device,
// with the reason in `why`, or at the deadline, with *late set.
static bool idist__xla_value_wait(const idist__xla_home *home, const idist__xla_value *value,
                                  int64_t deadline_ns, bool *late, char *why, size_t capacity) {
    void *event = idist__pjrt_ask(home->api, IDIST__PJRT_BUFFER_READY, value->pjrt, why, capacity);
    idist__pjrt_flag args;
    int turns = 0;

    *late = false;
    if (!event) return false;

    for (;;) {
        idist__pjrt_init(&args, sizeof args);
        args.object = event;
        if (!idist__pjrt_call(home->api, IDIST__PJRT_EVENT_IS_READY, &args, why, capacity) ||
            args.out)
            break;
        *late = idist__os_clock_now_ns() > deadline_ns;
        if (*late) break;
        if (++turns <= 50) idist__os_thread_yield();
        else idist__os_clock_pause_ns(turns <= 100 ? 50000 : 1000000);
    }

    if (!*late) return idist__pjrt_await(home->api, event, why, capacity);
    idist__pjrt_destroy(home->api, IDIST__PJRT_EVENT_DESTROY, event);

    return false;
}
