// ring/msg/sockets.h: the transports tcp, unix and none (a link without a connection)
//
// A link over TCP has one or several sockets, because one socket cannot always saturate a network.
// The socket buffers that the system allows limit the number of bytes in flight, and some clouds
// limit the bandwidth of each connection. In each direction, the bytes are striped across the
// sockets:
//
//   stripe   | 0 | 1 | 2 | 3 | 4 | ...     IDIST__STRIPE_BYTES each
//   socket     0   1   2   0   1
//
// Sender and receiver both count bytes, so no frame has to say where a stripe begins. A stripe is
// so large that its end rarely falls inside a small message, but small compared with the number of
// bytes in flight.
#pragma once

#include "os/poll.h"
#include "os/socket.h"
#include "ring/shm/transport.h"
#include "ring/msg/ring_model.h"

#ifndef IDIST__STRIPE_BYTES // a test makes stripes so small that they cut frames and payloads
#define IDIST__STRIPE_BYTES ((size_t)256 * 1024)
#endif

static size_t idist__sockets_stripe(const idist__sockets *s) {
    return s->count > 1 ? IDIST__STRIPE_BYTES : SIZE_MAX;
}

static void idist__sockets_init(idist__sockets *s) {
    int i;

    memset(s, 0, sizeof *s);
    for (i = 0; i < IDIST__SOCKETS_MAX; i++) s->fds[i] = -1;
}

// Sets the number of sockets of a link, before they are connected.
static void idist__sockets_set_count(idist__sockets *s, int count) {
    s->count = count;
    s->in_left = idist__sockets_stripe(s);
    s->out_left = idist__sockets_stripe(s);
}

static bool idist__sockets_is_complete(const idist__sockets *s) {
    int i;

    for (i = 0; i < s->count; i++)
        if (s->fds[i] < 0) return false;

    return true;
}

// Accounts for nbytes that were moved through socket number *turn. *left is the number of bytes
// that remain in the stripe of this socket. When it reaches 0, switches to the next socket.
static void idist__sockets_moved(const idist__sockets *s, int *turn, size_t *left, size_t nbytes) {
    *left -= nbytes;
    if (*left) return;
    *turn = (*turn + 1) % s->count;
    *left = idist__sockets_stripe(s);
}

static ptrdiff_t idist__sockets_read(void *port, void *buf, size_t nbytes) {
    idist__sockets *s = (idist__sockets *)port;
    size_t most = nbytes < s->in_left ? nbytes : s->in_left;
    ptrdiff_t n = idist__os_socket_read(s->fds[s->in], buf, most);

    if (n > 0) idist__sockets_moved(s, &s->in, &s->in_left, (size_t)n);

    return n;
}

static ptrdiff_t idist__sockets_write(void *port, const idist__os_part *parts, int nparts) {
    idist__sockets *s = (idist__sockets *)port;
    idist__os_part of_stripe[IDIST__PARTS];
    size_t left = s->out_left;
    ptrdiff_t n;
    int i;

    for (i = 0; i < nparts && i < IDIST__PARTS && left; i++) {
        of_stripe[i] = parts[i];
        if (of_stripe[i].nbytes > left) of_stripe[i].nbytes = left;
        left -= of_stripe[i].nbytes;
    }

    n = idist__os_socket_write(s->fds[s->out], of_stripe, i);

    // Only the read path reports why a link broke, and it may be reading another socket of the
    // link. So a failed write ends all sockets.
    for (i = 0; n < 0 && s->count > 1 && i < s->count; i++) idist__os_socket_end(s->fds[i]);

    if (n > 0) idist__sockets_moved(s, &s->out, &s->out_left, (size_t)n);

    return n;
}

static void idist__sockets_close(void *port) {
    idist__sockets *s = (idist__sockets *)port;
    int i;

    for (i = 0; i < IDIST__SOCKETS_MAX; i++) idist__os_descriptor_close(&s->fds[i]);
}

static int idist__sockets_descriptor(void *port, bool output) {
    const idist__sockets *s = (const idist__sockets *)port;
    return s->fds[output ? s->out : s->in];
}

// The functions below are the transport of a link without a connection. The output of such a link
// stays queued until there is a connection. Such a link counts as polled, so that the rank sleeps
// in poll, where the connector's sockets can wake it.

static ptrdiff_t idist__sockets_read_nothing(void *port, void *buf, size_t nbytes) {
    (void)port;
    (void)buf;
    (void)nbytes;
    return 0;
}

static ptrdiff_t idist__sockets_write_nothing(void *port, const idist__os_part *parts, int nparts) {
    (void)port;
    (void)parts;
    (void)nparts;
    return 0;
}

static void idist__sockets_close_nothing(void *port) { (void)port; }

static int idist__sockets_no_descriptor(void *port, bool output) {
    (void)port;
    (void)output;
    return -1;
}

static void idist__sockets_fill_stream(idist__transport *transport, const char *name) {
    transport->name = name;
    transport->read = idist__sockets_read;
    transport->write = idist__sockets_write;
    transport->close = idist__sockets_close;
    transport->descriptor = idist__sockets_descriptor;
    transport->polled = true;
}

static void idist__sockets_fill_none(idist__transport *transport) {
    transport->name = "none";
    transport->read = idist__sockets_read_nothing;
    transport->write = idist__sockets_write_nothing;
    transport->close = idist__sockets_close_nothing;
    transport->descriptor = idist__sockets_no_descriptor;
    transport->polled = true;
}

static idist__transport idist__transport_tcp, idist__transport_unix, idist__transport_none;

// Fills in the socket transports. Called before the first world opens.
static void idist__sockets_fill_transports(void) {
    idist__sockets_fill_stream(&idist__transport_tcp, "tcp");
    idist__transport_tcp.lossy_close = true;
    idist__sockets_fill_stream(&idist__transport_unix, "unix");
    idist__sockets_fill_none(&idist__transport_none);
}
