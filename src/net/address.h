// net/address.h: addresses as texts
//
// Ranks exchange addresses as text: "unix:NAME" for a local socket, "tcp:HOST:PORT" for a TCP port.
// HOST may be in brackets; an IPv6 HOST always is.
#pragma once

#include "os/socket.h"
#include "base/fail.h"
#include "base/text.h"

// Returns true if a host, as the user writes it, names this host's loopback interface.
static bool idist__address_host_is_loopback(const char *host) {
    return strcmp(host, "localhost") == 0 || strncmp(host, "127.", 4) == 0 ||
           strcmp(host, "::1") == 0;
}

// Returns true if a text can be a host name or an address. Returns false for a text with a port or
// in brackets, and for a URL.
static bool idist__address_host_is_possible(const char *host) {
    const char *colon = strchr(host, ':'); // two or more colons: IPv6, perhaps with %SCOPE
    char end = host[strspn(host, "0123456789abcdefABCDEF:.")];

    if (colon) return strchr(colon + 1, ':') && (!end || end == '%');
    return !strpbrk(host, "/[]@ ");
}

// Returns true if the text is the address of a local socket.
static bool idist__address_is_local(const char *text) { return strncmp(text, "unix:", 5) == 0; }

static bool idist__address_is_tcp(const char *text) { return strncmp(text, "tcp:", 4) == 0; }

// Returns true if the text names a port of this host's loopback interface, in the form that ranks
// write.
IDIST__UNUSED static bool idist__address_is_loopback(const char *text) {
    return strncmp(text, "tcp:[127.", 9) == 0;
}

static idist_status idist__address_local(idist__os_address *address, const char *name) {
    if (idist__os_socket_local_address(address, name)) return IDIST_OK;
    return idist__fail(IDIST_ERR_ARG, "the socket name \"%s\" is empty or longer than %d bytes",
                       name, IDIST__OS_SOCKET_NAME_MAX);
}

// Resolves a host to one of its addresses; see idist__os_socket_resolve. Blocks while the name is
// looked up. Refuses a name that has only digits, which a job or a node may have. The resolver
// would parse such a name as an address in 0.0.0.0/8.
static idist_status idist__address_one_of(idist__os_address *address, const char *host, int port,
                                          int which, int *count) {
    const char *error;

    memset(address, 0, sizeof *address);
    if (host[strspn(host, "0123456789")] == 0)
        return idist__fail(
            IDIST_ERR_ARG,
            "the host name \"%s\" would be parsed as a number: use the address, or the name with "
            "its domain",
            host);

    error = idist__os_socket_resolve(address, host, port, which, count);
    if (!error) return IDIST_OK;

    return idist__fail(IDIST_ERR_SYSTEM, "the host name \"%s\" cannot be resolved: %s", host,
                       error);
}

// Resolves a host to its first address.
static idist_status idist__address_tcp(idist__os_address *address, const char *host, int port) {
    int count;
    return idist__address_one_of(address, host, port, 0, &count);
}

// Parses a text and resolves it to an address. Sets *count to the number of addresses found;
// `which` modulo *count selects one. Returns IDIST_ERR_ARG if the text is not an address. Other
// failures may be temporary.
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

// Parses a text and resolves it to its first address.
static idist_status idist__address_parse(idist__os_address *address, const char *text) {
    int count;
    return idist__address_parse_one_of(address, text, 0, &count);
}
