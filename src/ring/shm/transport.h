// ring/shm/transport.h: what a link needs of whatever moves its bytes
#pragma once

#include "os/socket.h"

enum { IDIST__HEADER_BYTES = 64 }; // of a frame

// A transport moves the bytes of one link. No function blocks. `port` is the transport's own end of
// the link and belongs to whoever opened it; `close` closes what is in it.
//
// Every transport has `name`, `read`, `write`, `close` and `descriptor`. The other functions are
// optional: NULL means that no link of this transport can do it, and the comment above the function
// says what happens instead. A function that fills a table sets the fields by name, and leaves at
// NULL and false what the transport does not have.
typedef struct idist__transport {
    const char *name;

    // > 0: bytes moved, perhaps fewer than asked for. 0: nothing can move now. -1: the stream has
    // ended (errno 0) or is broken (errno).
    ptrdiff_t (*read)(void *port, void *buf, size_t nbytes);
    ptrdiff_t (*write)(void *port, const idist__os_part *parts, int nparts);

    void (*close)(void *port);

    // The descriptor that a rank watches to learn that the next `read` may find something, or
    // (output) that the next `write` may take some; -1: there is none. It may be another one after
    // each read or write.
    int (*descriptor)(void *port, bool output);

    bool polled;      // a read costs a system call, so with many links ring->watch tells when to
    bool lossy_close; // closing with unread bytes may destroy what the peer has not read yet

    // Messages as a whole: a header of IDIST__HEADER_BYTES, and nbytes of payload. peek_header
    // copies the next header and consumes nothing; false: it has not arrived. read_message drops
    // that header and copies the payload behind it; false: not all has arrived, and nothing was
    // consumed. write_message: false: there is no space for all, and nothing was written.
    // All three are NULL where messages always go through `read` and `write`.
    bool (*peek_header)(void *port, void *header);
    bool (*read_message)(void *port, void *payload, size_t nbytes);
    bool (*write_message)(void *port, const void *header, const void *payload, size_t nbytes);

    // Whether the peer may read messages in the memory of this process. The same on both sides of a
    // link, which decides how large messages go. Then `withdrawn`, if not NULL, gets the count of
    // sends that ended early so far, modulo 256, for `pull` there. The function is NULL where the
    // peer never may: then large messages go through the link.
    bool (*exposes_memory)(void *port, uint8_t *withdrawn);

    // Whether such a read is slower than a copy through this transport. The same on both sides.
    // The function is NULL where such reads are as fast, or not possible.
    bool (*reads_slowly)(void *port);

    // Whether the peer is in a call that waits, so that it sees at once what is written. The
    // function is NULL where that is not known: then a large message is pulled if that is possible.
    bool (*attends)(void *port);

    // Copies from an address in the peer's process. False: not possible, or the peer has withdrawn
    // sends since it counted `withdrawn`, so the memory may hold something else by now. The
    // function is NULL where it is never possible: then the receiver asks for DATA.
    bool (*pull)(void *port, uint64_t address, uint8_t withdrawn, void *buf, size_t nbytes);
} idist__transport;
