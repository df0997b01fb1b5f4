// ring/shm/transport.h: the functions that move the bytes of a link
#pragma once

#include "os/socket.h"

enum { IDIST__HEADER_BYTES = 64 }; // size of a frame without its payload

// A transport moves the bytes of one link. No function blocks. `port` is the transport's own end of
// the link, and belongs to whoever opened it. `close` closes what the port contains.
//
// Every transport has `name`, `read`, `write`, `close` and `descriptor`. The other functions are
// optional. A function is NULL if no link of this transport can do it, and the comment above the
// function says what happens instead. A function that fills in a transport sets the fields by name.
// It leaves at NULL and false what the transport does not have.
typedef struct idist__transport {
    const char *name;

    // Both functions return the number of bytes moved, which may be fewer than requested, or 0 if
    // nothing can move now. They return -1 if the stream has ended (errno is 0) or is broken (errno
    // is not 0).
    ptrdiff_t (*read)(void *port, void *buf, size_t nbytes);
    ptrdiff_t (*write)(void *port, const idist__os_part *parts, int nparts);

    void (*close)(void *port);

    // Returns the descriptor that a rank watches to learn that the next `read` may find something.
    // If `output` is true, the rank learns that the next `write` may accept something. Returns -1
    // if there is no descriptor. The descriptor may change after each read or write.
    int (*descriptor)(void *port, bool output);

    // True if a read costs a system call. With many links, ring->watch then tells when to read.
    bool polled;
    // True if closing with unread bytes may destroy what the peer has not read yet.
    bool lossy_close;

    // Functions for whole messages: a header of IDIST__HEADER_BYTES, and nbytes of payload.
    // `peek_header` copies the next header and consumes nothing. It returns false if the header has
    // not arrived. `read_message` drops that header and copies the payload behind it. It returns
    // false, and consumes nothing, if the message has not arrived completely. `write_message`
    // returns false, and writes nothing, if there is no space for the whole message. All three are
    // NULL if messages always go through `read` and `write`.
    bool (*peek_header)(void *port, void *header);
    bool (*read_message)(void *port, void *payload, size_t nbytes);
    bool (*write_message)(void *port, const void *header, const void *payload, size_t nbytes);

    // Returns true if the peer may read messages in the memory of this process. The result is the
    // same on both sides of a link, and decides how large messages are sent. If the result is true,
    // and `withdrawn` is not NULL, sets *withdrawn to the number of sends that have ended early so
    // far, modulo 256. The peer passes that number to `pull`. The function is NULL if the peer can
    // never read such memory; large messages then go through the link.
    bool (*exposes_memory)(void *port, uint8_t *withdrawn);

    // Returns true if reading the memory of the peer is slower than a copy through this transport.
    // The result is the same on both sides of a link. The function is NULL if such reads are as
    // fast, or not possible.
    bool (*reads_slowly)(void *port);

    // Returns true if the peer is in a call that waits, so that it sees at once what is written.
    // The function is NULL if the transport cannot tell; a large message is then pulled if
    // possible.
    bool (*attends)(void *port);

    // Copies from an address in the peer's process. Returns false if that is not possible. Also
    // returns false if the peer has withdrawn sends since it sent `withdrawn`, because the memory
    // may hold something else by now. The function is NULL if pulling is never possible; the
    // receiver then asks for DATA.
    bool (*pull)(void *port, uint64_t address, uint8_t withdrawn, void *buf, size_t nbytes);
} idist__transport;
