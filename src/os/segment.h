// os/segment.h: passing a file in memory to another process of this host
//
// A descriptor travels with a short message over a local socket. Where sockets cannot carry one, a
// port uses a name instead (shm_open, CreateFileMapping) and passes that.
#pragma once

#include "os/system.h"

// Sends a message, with a descriptor unless fd is -1. Does not block. Returns the bytes sent, or -1
// and errno; EAGAIN: the socket is full.
IDIST__UNUSED static ptrdiff_t idist__os_segment_send(int sock, const void *buf, size_t nbytes,
                                                      int fd);

// Receives a message; *fd becomes its descriptor, which the caller closes, or -1. Does not block.
// Returns the bytes received, 0 at the end of the stream, or -1 and errno.
IDIST__UNUSED static ptrdiff_t idist__os_segment_receive(int sock, void *buf, size_t nbytes,
                                                         int *fd);

// The size of such a file; 0 when it cannot be told.
IDIST__UNUSED static size_t idist__os_segment_nbytes(int fd);

// The memory of this host in bytes.
IDIST__UNUSED static uint64_t idist__os_segment_ram(void);
