// net/address.h: addresses as texts
//
// Ranks exchange addresses as texts: "unix:NAME" is a local socket, "tcp:HOST:PORT" a TCP port,
// with brackets around an IPv6 HOST.
#pragma once

#include "os/socket.h"
#include "base/fail.h"
#include "base/text.h"

// Whether a host as the user writes it is this host's loopback interface.
static bool idist__address_host_is_loopback(const char *host) {
    return strcmp(host, "localhost") == 0 || strncmp(host, "127.", 4) == 0 ||
           strcmp(host, "::1") == 0;
}

// Whether a text can be a name or an address at all, rather than one with a port or in brackets, or
// a URL.
static bool idist__address_host_is_possible(const char *host) {
    const char *colon = strchr(host, ':'); // two or more: IPv6, perhaps with %SCOPE
    char end = host[strspn(host, "0123456789abcdefABCDEF:.")];

    if (colon) return strchr(colon + 1, ':') && (!end || end == '%');
    return !strpbrk(host, "/[]@ ");
}

// Returns true if the text is a local socket.
static bool idist__address_is_local(const char *text) { return strncmp(text, "unix:", 5) == 0; }

static bool idist__address_is_tcp(const char *text) { return strncmp(text, "tcp:", 4) == 0; }

// Returns true if the text is a port of this host's loopback interface, as ranks write it.
IDIST__UNUSED static bool idist__address_is_loopback(const char *text) {
    return strncmp(text, "tcp:[127.", 9) == 0;
}

static idist_status idist__address_local(idist__os_address *address, const char *name) {
    if (idist__os_socket_local_address(address, name)) return IDIST_OK;
    return idist__fail(IDIST_ERR_ARG, "the socket name \"%s\" is empty or longer than %d bytes",
                       name, IDIST__OS_SOCKET_NAME_MAX);
}

// One of the addresses of a host, see idist__os_socket_resolve. Blocks while the name is looked up.
// The resolver takes a name of digits only, as jobs and nodes may have it, for an address in
// 0.0.0.0/8.
static idist_status idist__address_one_of(idist__os_address *address, const char *host, int port,
                                          int which, int *count) {
    const char *error;

    memset(address, 0, sizeof *address);
    if (host[strspn(host, "0123456789")] == 0)
        return idist__fail(IDIST_ERR_ARG,
                           "the host name \"%s\" would be taken for a number: use the address, or "
                           "the name with its domain",
                           host);

    error = idist__os_socket_resolve(address, host, port, which, count);
    if (!error) return IDIST_OK;

    return idist__fail(IDIST_ERR_SYSTEM, "the host name \"%s\" cannot be resolved: %s", host,
                       error);
}

// The first of them.
static idist_status idist__address_tcp(idist__os_address *address, const char *host, int port) {
    int count;
    return idist__address_one_of(address, host, port, 0, &count);
}

// Address number `which`, modulo *count, of those that the text stands for. IDIST_ERR_ARG: it is no
// address; other failures may pass.
static idist_status idist__address_parse_one_of(idist__os_address *address, const char *text,
                                                int which, int *count) {
    char host[256];
    int port;

    *count = 1;
    memset(address, 0, sizeof *address);
    if (idist__address_is_local(text)) return idist__address_local(address, text + 5);
    if (idist__address_is_tcp(text) && idist__parse_host_port(text + 4, host, sizeof host, &port))
        return idist__address_one_of(address, host, port, which, count);
    return idist__fail(IDIST_ERR_ARG, "\"%s\" is not an address", text);
}

// The first of them.
static idist_status idist__address_parse(idist__os_address *address, const char *text) {
    int count;
    return idist__address_parse_one_of(address, text, 0, &count);
}
