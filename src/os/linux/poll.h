// os/linux/poll.h: closing descriptors, waiting for them, and waking the thread that waits
#pragma once

#include "os/poll.h"
#include "os/unwind.h"
#include "os/clock.h"

static void idist__os_descriptor_close(int *fd) {
    if (*fd >= 0) IDIST__OS_CALL(close(*fd));
    *fd = -1;
}

IDIST__UNUSED static void idist__os_poll_watch(idist__os_poll_entry *entry, int fd, int events) {
    entry->fd = fd;
    entry->events = (short)events;
    entry->revents = 0;
}

IDIST__UNUSED static int idist__os_poll(idist__os_poll_entry *entries, int count, int timeout_ms) {
    return IDIST__OS_CALL(poll(entries, (nfds_t)count, timeout_ms));
}

IDIST__UNUSED static bool idist__os_poll_ready(const idist__os_poll_entry *entry) {
    return entry->revents != 0;
}

// Returns true if the last idist__os_poll found that the descriptor accepts bytes.
IDIST__UNUSED static bool idist__os_poll_writable(const idist__os_poll_entry *entry) {
    return (entry->revents & POLLOUT) != 0;
}

// Returns true if the last idist__os_poll found bytes, the end of the stream, or an error.
IDIST__UNUSED static bool idist__os_poll_readable(const idist__os_poll_entry *entry) {
    return (entry->revents & ~POLLOUT) != 0;
}

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

IDIST__UNUSED static int idist__os_poll_wakeup_new(void) {
    return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
}

IDIST__UNUSED static void idist__os_poll_wakeup_signal(int wakeup) {
    uint64_t one = 1;
    while (IDIST__OS_CALL(write(wakeup, &one, sizeof one)) < 0 && errno == EINTR) continue;
}

IDIST__UNUSED static void idist__os_poll_wakeup_clear(int wakeup) {
    uint64_t count;
    while (IDIST__OS_CALL(read(wakeup, &count, sizeof count)) < 0 && errno == EINTR) continue;
}

IDIST__UNUSED static int idist__os_watch_new(void) { return epoll_create1(EPOLL_CLOEXEC); }

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

IDIST__UNUSED static int idist__os_watch_take(int watch, idist__os_watch_events *events) {
    int n = IDIST__OS_CALL(epoll_wait(watch, events->event, IDIST__OS_WATCH_EVENTS, 0));
    return n < 0 ? 0 : n;
}

IDIST__UNUSED static int idist__os_watch_tag(const idist__os_watch_events *events, int i) {
    return (int)events->event[i].data.u32;
}

IDIST__UNUSED static bool idist__os_watch_writable(const idist__os_watch_events *events, int i) {
    return (events->event[i].events & EPOLLOUT) != 0;
}

IDIST__UNUSED static bool idist__os_watch_readable(const idist__os_watch_events *events, int i) {
    return (events->event[i].events & ~(uint32_t)EPOLLOUT) != 0;
}
