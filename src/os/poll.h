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
// A poll set is an array of entries, one per descriptor. A port to a system without poll(2) passes
// the same entries to WSAPoll. Other files access an entry through these functions only.
//
// A wake-up is a descriptor that one thread watches in its poll set and any thread may signal. The
// descriptor is an eventfd on Linux, a kqueue with EVFILT_USER on macOS, and a UDP socket connected
// to itself on Windows. The caller closes it with idist__os_descriptor_close.
//------------------------------------------------------------------------------

// Fills an entry with a descriptor and the events to wait for. Errors and the end of the stream are
// always reported. An entry without a descriptor (-1) never becomes ready.
IDIST__UNUSED static void idist__os_poll_watch(idist__os_poll_entry *entry, int fd, int events);

// Blocks until an entry is ready, for at most timeout_ms; 0 does not block, and -1 waits forever.
// Returns the number of entries that are ready, 0 after the time-out, or -1 with errno. EINTR means
// that a signal arrived.
IDIST__UNUSED static int idist__os_poll(idist__os_poll_entry *entries, int count, int timeout_ms);

// Returns true if the last idist__os_poll reported an event or an error for the descriptor.
IDIST__UNUSED static bool idist__os_poll_ready(const idist__os_poll_entry *entry);

// Blocks until a descriptor is ready for `events`, has failed or was closed by the peer. Returns
// false if the deadline has passed or poll failed.
static bool idist__os_poll_wait(int fd, int events, int64_t deadline_ns);

// Returns a new wake-up, or -1 with errno.
IDIST__UNUSED static int idist__os_poll_wakeup_new(void);

// Makes a wake-up readable. Does not block. Any thread may call this function.
IDIST__UNUSED static void idist__os_poll_wakeup_signal(int wakeup);

// Makes a wake-up unreadable again. Does not block.
IDIST__UNUSED static void idist__os_poll_wakeup_clear(int wakeup);

//------------------------------------------------------------------------------
// waiting for descriptors that are watched again and again
//
// The cost of a check does not grow with the number of descriptors. A watch is a descriptor that is
// readable while a descriptor in it is ready: an epoll instance on Linux, a kqueue on macOS. The
// caller closes the watch with idist__os_descriptor_close. Remove a descriptor from the watch
// before closing it.
//------------------------------------------------------------------------------

// Returns a new watch, or -1 with errno.
IDIST__UNUSED static int idist__os_watch_new(void);

// Watches a descriptor for data and the end of its stream (input), for free space (output), or for
// both. If both are false, removes the descriptor from the watch. The descriptor's events carry
// this tag. Returns false with errno on failure.
IDIST__UNUSED static bool idist__os_watch_set(int watch, int fd, int tag, bool input, bool output);

// Gets the pending events without blocking, and returns their number. If not all events fit, later
// calls report the other descriptors in turn.
IDIST__UNUSED static int idist__os_watch_take(int watch, idist__os_watch_events *events);

// Returns the tag of an event.
IDIST__UNUSED static int idist__os_watch_tag(const idist__os_watch_events *events, int i);

// Returns true if the descriptor of an event accepts more data.
IDIST__UNUSED static bool idist__os_watch_writable(const idist__os_watch_events *events, int i);

// Returns true if the descriptor of an event has data, the end of its stream, or an error.
IDIST__UNUSED static bool idist__os_watch_readable(const idist__os_watch_events *events, int i);
