// os/segment.h: passing a file in memory to another process of this host
//
// A descriptor travels with a short message over a local socket. If the sockets of a system cannot
// pass descriptors, a port passes a name instead (shm_open, CreateFileMapping).
#pragma once

#include "os/system.h"

// Sends a message, with a descriptor unless fd is -1. Does not block. Returns the number of bytes
// sent, or -1 with errno. EAGAIN means that the socket is full.
IDIST__UNUSED static ptrdiff_t idist__os_segment_send(int sock, const void *buf, size_t nbytes,
                                                      int fd);

// Receives a message. Sets *fd to its descriptor, which the caller closes, or to -1. Does not
// block. Returns the number of bytes received, 0 at the end of the stream, or -1 with errno.
IDIST__UNUSED static ptrdiff_t idist__os_segment_receive(int sock, void *buf, size_t nbytes,
                                                         int *fd);

// Returns the size of a file in memory that was received, or 0 if the size is unknown.
IDIST__UNUSED static size_t idist__os_segment_nbytes(int fd);

// Returns the size of this host's memory in bytes.
IDIST__UNUSED static uint64_t idist__os_segment_ram(void);
