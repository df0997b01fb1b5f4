// ring/shm/transport.h: the functions that move the bytes of a link
#pragma once

#include "os/socket.h"

enum { IDIST__HEADER_BYTES = 64 }; // size of a frame without its payload

// A transport moves the bytes of one link. No function blocks. `port` is this rank's end of the
// link. The code that opened the link owns the port. `close` closes the contents of the port, but
// does not free it.
//
// Every transport has `name`, `read`, `write`, `close` and `descriptor`. The other functions are
// optional. If no link of a transport can perform a function, the function is NULL, and the comment
// above the function says what happens instead. The code that fills in a transport sets the fields
// by name. Fields that it does not set stay NULL or false.
typedef struct idist__transport {
    const char *name;

    // `read` and `write` return the number of bytes moved, which may be fewer than requested, or 0
    // if nothing can move now. They return -1 if the stream has ended (errno is 0) or is broken
    // (errno is not 0).
    ptrdiff_t (*read)(void *port, void *buf, size_t nbytes);
    ptrdiff_t (*write)(void *port, const idist__os_part *parts, int nparts);

    void (*close)(void *port);

    // Returns the descriptor that becomes readable when the next `read` may return data. If
    // `output` is true, returns the descriptor that becomes writable when the next `write` may
    // accept data. Returns -1 if there is no such descriptor. The descriptor may change after each
    // read or write.
    int (*descriptor)(void *port, bool output);

    // True if a read costs a system call. If a rank has many such links, it reads only those that
    // ring->watch reports as readable.
    bool polled;
    // True if closing a link that holds unread input may destroy output that the peer has not read
    // yet.
    bool lossy_close;

    // Functions for whole messages: a header of IDIST__HEADER_BYTES, and nbytes of payload.
    // `peek_header` copies the next header and consumes nothing. It returns false if the header has
    // not arrived. `read_message` consumes that header and copies the payload that follows it. It
    // returns false, and consumes nothing, if the message has not arrived completely.
    // `write_message` returns false, and writes nothing, if there is no space for the whole
    // message. All three are NULL if messages always go through `read` and `write`.
    bool (*peek_header)(void *port, void *header);
    bool (*read_message)(void *port, void *payload, size_t nbytes);
    bool (*write_message)(void *port, const void *header, const void *payload, size_t nbytes);

    // Returns true if the peer may read messages directly from the memory of this process. The
    // result is the same at both ends of a link, and decides how large messages are sent. If the
    // result is true, and `withdrawn` is not NULL, sets *withdrawn to the number of sends that have
    // ended early so far, modulo 256. The peer passes that number to `pull`. The function is NULL
    // if the peer can never read such memory; large messages then go through the link.
    bool (*exposes_memory)(void *port, uint8_t *withdrawn);

    // Returns true if reading the memory of the peer is slower than a copy through this transport.
    // The result is the same at both ends of a link. The function is NULL if such reads are at
    // least as fast as a copy, or are not possible.
    bool (*reads_slowly)(void *port);

    // Returns true if the peer is waiting in a call, and so reads immediately what is written. The
    // function is NULL if the transport cannot tell; a large message is then pulled if possible.
    bool (*attends)(void *port);

    // Copies from an address in the peer's process. Returns false if that is not possible. Also
    // returns false if the peer has withdrawn sends since it sent `withdrawn`, because the peer may
    // have reused the memory. The function is NULL if pulling is never possible. The receiver then
    // answers with CTS, and the message arrives in DATA frames.
    bool (*pull)(void *port, uint64_t address, uint8_t withdrawn, void *buf, size_t nbytes);
} idist__transport;
