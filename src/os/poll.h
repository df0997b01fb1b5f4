// os/poll.h: closing descriptors, waiting for them, and waking the thread that waits
#pragma once

#include "os/system.h"

//------------------------------------------------------------------------------
// closing descriptors
//------------------------------------------------------------------------------

// Closes a descriptor, if it is open (not negative), and sets it to -1.
static void idist__os_descriptor_close(int *fd);

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

// Fills an entry: which events of the descriptor to wait for. The end of a stream and errors are
// always reported. An entry without a descriptor (-1) never becomes ready.
IDIST__UNUSED static void idist__os_poll_watch(idist__os_poll_entry *entry, int fd, int events);

// Blocks until an entry is ready, for at most timeout_ms: 0 does not block, -1 waits forever.
// Returns the number of entries that are ready, 0 after the time-out, or -1 and errno; EINTR means
// that a signal arrived.
IDIST__UNUSED static int idist__os_poll(idist__os_poll_entry *entries, int count, int timeout_ms);

// Whether the last idist__os_poll found anything about the descriptor, if only an error.
IDIST__UNUSED static bool idist__os_poll_ready(const idist__os_poll_entry *entry);

// Blocks until one descriptor is ready for `events`, has failed or was closed by the peer. False:
// the deadline has passed, or poll failed.
static bool idist__os_poll_wait(int fd, int events, int64_t deadline_ns);

// A new wake-up, or -1 and errno.
IDIST__UNUSED static int idist__os_poll_wakeup_new(void);

// Makes the wake-up readable. Does not block; any thread may call it.
IDIST__UNUSED static void idist__os_poll_wakeup_signal(int wakeup);

// Makes it unreadable again. Does not block.
IDIST__UNUSED static void idist__os_poll_wakeup_clear(int wakeup);

//------------------------------------------------------------------------------
// waiting for descriptors that are watched again and again
//
// The cost of a look does not grow with the number of descriptors: epoll on Linux, a kqueue on
// macOS. A watch is itself a descriptor, readable while one of those is ready, and closed by
// idist__os_descriptor_close. A descriptor is removed before it is closed.
//------------------------------------------------------------------------------

// A new watch, or -1 and errno.
IDIST__UNUSED static int idist__os_watch_new(void);

// Watches a descriptor from now on for bytes and the end of its stream (input), for space (output),
// for both or for neither; its events carry this tag. False: errno says why it cannot.
IDIST__UNUSED static bool idist__os_watch_set(int watch, int fd, int tag, bool input, bool output);

// Takes what has happened, without blocking. Returns the number of events, in turns of all
// descriptors that are ready.
IDIST__UNUSED static int idist__os_watch_take(int watch, idist__os_watch_events *events);

IDIST__UNUSED static int idist__os_watch_tag(const idist__os_watch_events *events, int i);

// As idist__os_poll_writable and idist__os_poll_readable.
IDIST__UNUSED static bool idist__os_watch_writable(const idist__os_watch_events *events, int i);

IDIST__UNUSED static bool idist__os_watch_readable(const idist__os_watch_events *events, int i);
