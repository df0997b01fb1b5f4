// os/poll.h: closing descriptors, waiting for them, and waking the thread that waits
#pragma once

#include "os/unwind.h"
#include "os/clock.h"

//------------------------------------------------------------------------------
// closing descriptors
//------------------------------------------------------------------------------

// Closes a descriptor, if it is open (not negative), and sets it to -1.
static void idist__os_descriptor_close(int *fd) {
    if (*fd >= 0) IDIST__OS_CALL(close(*fd));
    *fd = -1;
}

//------------------------------------------------------------------------------
// waiting for descriptors, and waking the thread that waits
//
// A poll set is an array of entries, one per descriptor. Where there is no poll(2), WSAPoll takes
// the same entries. Other files use an entry through these functions only.
//
// A wake-up is a descriptor that one thread watches in its poll set and any thread may signal:
// eventfd on Linux, a kqueue with EVFILT_USER on macOS, a UDP socket connected to itself on
// Windows. It is closed by idist__os_descriptor_close.
//------------------------------------------------------------------------------

typedef struct pollfd idist__os_poll_entry;

enum { IDIST__OS_READABLE = POLLIN, IDIST__OS_WRITABLE = POLLOUT };

// Fills an entry: which events of the descriptor to wait for. The end of a stream and errors are
// always reported. An entry without a descriptor (-1) never becomes ready.
IDIST__UNUSED static void idist__os_poll_watch(idist__os_poll_entry *entry, int fd, int events) {
    entry->fd = fd;
    entry->events = (short)events;
    entry->revents = 0;
}

// Blocks until an entry is ready, for at most timeout_ms: 0 does not block, -1 waits forever.
// Returns the number of entries that are ready, 0 after the time-out, or -1 and errno; EINTR means
// that a signal arrived.
IDIST__UNUSED static int idist__os_poll(idist__os_poll_entry *entries, int count, int timeout_ms) {
    return IDIST__OS_CALL(poll(entries, (nfds_t)count, timeout_ms));
}

// Whether the last idist__os_poll found anything about the descriptor, if only an error.
IDIST__UNUSED static bool idist__os_poll_ready(const idist__os_poll_entry *entry) {
    return entry->revents != 0;
}

// Whether it found that the descriptor takes bytes.
IDIST__UNUSED static bool idist__os_poll_writable(const idist__os_poll_entry *entry) {
    return (entry->revents & POLLOUT) != 0;
}

// Whether it found bytes, the end of the stream, or an error.
IDIST__UNUSED static bool idist__os_poll_readable(const idist__os_poll_entry *entry) {
    return (entry->revents & ~POLLOUT) != 0;
}

// Blocks until one descriptor is ready for `events`, has failed or was closed by the peer. False:
// the deadline has passed, or poll failed.
static bool idist__os_poll_wait(int fd, int events, int64_t deadline_ns) {
    for (;;) {
        idist__os_poll_entry entry;
        int rc;

        idist__os_poll_watch(&entry, fd, events);
        rc = idist__os_poll(&entry, 1, idist__os_clock_ms_until(deadline_ns));
        if (rc > 0) return true;
        if (rc == 0 && idist__os_clock_ms_until(deadline_ns) == 0)
            return false; // poll's own limit may be shorter than the deadline
        if (rc < 0 && errno != EINTR) return false;
    }
}

// A new wake-up, or -1 and errno.
IDIST__UNUSED static int idist__os_poll_wakeup_new(void) {
    return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
}

// Makes the wake-up readable. Does not block; any thread may call it.
IDIST__UNUSED static void idist__os_poll_wakeup_signal(int wakeup) {
    uint64_t one = 1;
    while (IDIST__OS_CALL(write(wakeup, &one, sizeof one)) < 0 && errno == EINTR) continue;
}

// Makes it unreadable again. Does not block.
IDIST__UNUSED static void idist__os_poll_wakeup_clear(int wakeup) {
    uint64_t count;
    while (IDIST__OS_CALL(read(wakeup, &count, sizeof count)) < 0 && errno == EINTR) continue;
}

//------------------------------------------------------------------------------
// waiting for descriptors that are watched again and again
//
// The cost of a look does not grow with the number of descriptors: epoll on Linux, a kqueue on
// macOS. A watch is itself a descriptor, readable while one of those is ready, and closed by
// idist__os_descriptor_close. A descriptor is removed before it is closed.
//------------------------------------------------------------------------------

enum { IDIST__OS_WATCH_EVENTS = 32 }; // that are taken at once, at most

typedef struct idist__os_watch_events {
    struct epoll_event event[IDIST__OS_WATCH_EVENTS];
} idist__os_watch_events;

// A new watch, or -1 and errno.
IDIST__UNUSED static int idist__os_watch_new(void) { return epoll_create1(EPOLL_CLOEXEC); }

// Watches a descriptor from now on for bytes and the end of its stream (input), for space (output),
// for both or for neither; its events carry this tag. False: errno says why it cannot.
IDIST__UNUSED static bool idist__os_watch_set(int watch, int fd, int tag, bool input, bool output) {
    struct epoll_event event;

    memset(&event, 0, sizeof event);
    if (input) event.events |= EPOLLIN;
    if (output) event.events |= EPOLLOUT;
    event.data.u32 = (uint32_t)tag;

    if (!event.events) return epoll_ctl(watch, EPOLL_CTL_DEL, fd, &event) == 0;
    if (epoll_ctl(watch, EPOLL_CTL_MOD, fd, &event) == 0) return true;

    return errno == ENOENT && epoll_ctl(watch, EPOLL_CTL_ADD, fd, &event) == 0;
}

// Takes what has happened, without blocking. Returns the number of events, in turns of all
// descriptors that are ready.
IDIST__UNUSED static int idist__os_watch_take(int watch, idist__os_watch_events *events) {
    int n = IDIST__OS_CALL(epoll_wait(watch, events->event, IDIST__OS_WATCH_EVENTS, 0));
    return n < 0 ? 0 : n;
}

IDIST__UNUSED static int idist__os_watch_tag(const idist__os_watch_events *events, int i) {
    return (int)events->event[i].data.u32;
}

// As idist__os_poll_writable and idist__os_poll_readable.
IDIST__UNUSED static bool idist__os_watch_writable(const idist__os_watch_events *events, int i) {
    return (events->event[i].events & EPOLLOUT) != 0;
}

IDIST__UNUSED static bool idist__os_watch_readable(const idist__os_watch_events *events, int i) {
    return (events->event[i].events & ~(uint32_t)EPOLLOUT) != 0;
}
