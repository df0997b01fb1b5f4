// xla/xla_buffer.h: handles of device memory, and their addresses
#pragma once

#include "os/thread.h"
#include "os/memory.h"
#include "base/mem.h"
#include "xla/xla_model.h"
#include "xla/xla_home.h"
#include "xla/xla_value.h"

// Returns true if a pointer is in the range of addresses for buffers. Takes no lock, because the
// range never moves. For a call on host memory, this check is the only cost of XLA.
static bool idist__xla_buffer_is(const void *p) {
    const char *arena = __atomic_load_n(&idist__xla_home_one.arena, __ATOMIC_ACQUIRE);

    return arena && (uintptr_t)p - (uintptr_t)arena < idist__xla_home_one.arena_nbytes;
}

// Returns the index in home->buffers of the first buffer that ends above an address. Called with
// home->lock held.
static size_t idist__xla_buffer_search(const idist__xla_home *home, const char *p) {
    size_t low = 0, high = home->buffer_count;

    while (low < high) {
        size_t middle = (low + high) / 2;

        if (home->buffers[middle]->at + home->buffers[middle]->nbytes > p) high = middle;
        else low = middle + 1;
    }

    return low;
}

// Returns the buffer that has an address and counts one more user of it, or NULL if no buffer has
// the address.
static idist__xla_buffer *idist__xla_buffer_take(idist__xla_home *home, const void *p) {
    const char *at = (const char *)p;
    idist__xla_buffer *buffer = NULL;
    size_t place;

    if (!idist__xla_buffer_is(p)) return NULL;
    idist__os_mutex_lock(&home->lock);
    place = idist__xla_buffer_search(home, at);
    if (place < home->buffer_count && home->buffers[place]->at <= at &&
        !home->buffers[place]->freed)
        buffer = home->buffers[place];
    if (buffer) buffer->users++;
    idist__os_mutex_unlock(&home->lock);

    return buffer;
}

// Counts one user less. The last user releases the addresses and the contents.
static void idist__xla_buffer_drop(idist__xla_home *home, idist__xla_buffer *buffer) {
    idist__xla_buffer **at;
    bool last;
    size_t place;

    if (!buffer) return;
    idist__os_mutex_lock(&home->lock);
    last = --buffer->users == 0;

    if (last) {
        place = idist__xla_buffer_search(home, buffer->at);
        at = &home->buffers[place];
        home->buffer_count--;
        memmove(at, at + 1, (home->buffer_count - place) * sizeof *at);
    }

    idist__os_mutex_unlock(&home->lock);
    if (!last) return;
    idist__xla_value_drop(home, buffer->value);
    idist__mem_free(NULL, buffer);
    idist__xla_home_leave(home);
}

// Reserves the range of addresses. Halves the size until the limit of the process allows the range.
// Called with home->lock held.
static bool idist__xla_buffer_reserve(idist__xla_home *home) {
    int bits = IDIST__XLA_ARENA_BITS < sizeof(size_t) * 8 ? IDIST__XLA_ARENA_BITS : 30;
    char *arena = NULL;

    if (home->arena) return true;
    for (; bits >= 24 && !arena; bits--) arena = idist__os_memory_addresses((size_t)1 << bits);
    if (!arena) return false;
    home->arena_nbytes = (size_t)1 << (bits + 1);
    __atomic_store_n(&home->arena, arena, __ATOMIC_RELEASE);

    return true;
}

// Grows home->buffers if needed, so that one more entry fits. Called with home->lock held.
static bool idist__xla_buffer_grow(idist__xla_home *home) {
    size_t capacity = home->buffer_capacity ? 2 * home->buffer_capacity : 64;
    idist__xla_buffer **buffers;

    if (home->buffer_count < home->buffer_capacity) return true;
    buffers = (idist__xla_buffer **)idist__mem_alloc(NULL, capacity * sizeof(void *));
    if (!buffers) return false;
    if (home->buffer_count) memcpy(buffers, home->buffers, home->buffer_count * sizeof(void *));
    idist__mem_free(NULL, home->buffers);
    home->buffers = buffers;
    home->buffer_capacity = capacity;

    return true;
}

// Finds addresses for a buffer, after the last buffer or in the first gap, and adds the buffer to
// home->buffers. At least one page stays free between two buffers. Called with home->lock held.
static bool idist__xla_buffer_place(idist__xla_home *home, idist__xla_buffer *buffer) {
    size_t page = idist__os_memory_page_nbytes(), at = 0, end, place = home->buffer_count;
    size_t wanted = (buffer->nbytes + 2 * page - 1) & ~(page - 1);
    const idist__xla_buffer *last = place ? home->buffers[place - 1] : NULL;

    if (wanted < buffer->nbytes || wanted > home->arena_nbytes) return false;
    if (last) at = ((size_t)(last->at - home->arena) + last->nbytes + 2 * page - 1) & ~(page - 1);

    if (at > home->arena_nbytes - wanted) { // the first gap that is large enough
        for (at = 0, place = 0; place < home->buffer_count; place++) {
            if ((size_t)(home->buffers[place]->at - home->arena) >= at + wanted) break;
            end = (size_t)(home->buffers[place]->at - home->arena) + home->buffers[place]->nbytes;
            at = (end + 2 * page - 1) & ~(page - 1);
        }

        if (at > home->arena_nbytes - wanted) return false;
    }

    buffer->at = home->arena + at;
    memmove(&home->buffers[place + 1], &home->buffers[place],
            (home->buffer_count - place) * sizeof(void *));
    home->buffers[place] = buffer;
    home->buffer_count++;

    return true;
}

// Gives a buffer its addresses, and counts the buffer as a user of the client. The buffer owns its
// value. Returns false, and changes nothing, if memory or addresses run out.
static bool idist__xla_buffer_enter(idist__xla_home *home, idist__xla_buffer *buffer) {
    bool ok;

    idist__os_mutex_lock(&home->lock);
    ok = idist__xla_buffer_reserve(home) && idist__xla_buffer_grow(home) &&
         idist__xla_buffer_place(home, buffer);
    if (ok) home->users++;
    idist__os_mutex_unlock(&home->lock);

    return ok;
}
