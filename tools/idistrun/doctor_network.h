// doctor_network.h: interfaces, the loopback interface, the address for ranks on other hosts
#pragma once

#include "../../idist.h"
#include "doctor_line.h"
#include "doctor_settings.h"

#include <stdbool.h>
#include <stdlib.h>

enum { DOCTOR_NETWORK_CONNECT_MS = 500 };

// Prints the interfaces that are up.
static void doctor_network_print_interfaces(void) {
    char text[400] = "";
    int count = idist__interface_list(text, sizeof text);

    doctor_line_print("interfaces", count > 0 ? DOCTOR_FINE : DOCTOR_NOTE,
                      "none is up: ip link set lo up", "%s", count > 0 ? text : "none");
}

// Returns true if a TCP connection over the loopback interface succeeds.
static bool doctor_network_has_loopback(void) {
    int64_t deadline_ns = idist__os_clock_deadline(DOCTOR_NETWORK_CONNECT_MS);
    idist__os_address address;
    int listener = -1, fd = -1;

    if (idist__address_tcp(&address, "127.0.0.1", 0) != IDIST_OK) return false;
    listener = idist__os_socket_listen(&address);
    if (listener >= 0 && idist__os_socket_own_address(listener, &address))
        fd = idist__os_socket_connect(&address, deadline_ns);

    idist__os_descriptor_close(&listener);
    if (fd < 0) return false;
    idist__os_descriptor_close(&fd);

    return true;
}

// Prints whether the loopback interface works. Only IDIST_TRANSPORT=tcp needs it.
static void doctor_network_print_loopback(void) {
    bool is_needed = doctor_settings.config.transport == IDIST__TRANSPORT_TCP;

    if (doctor_network_has_loopback())
        doctor_line_print("loopback", DOCTOR_FINE, NULL, "works: TCP on 127.0.0.1");
    else
        doctor_line_print("loopback", is_needed ? DOCTOR_WRONG : DOCTOR_NOTE, "ip link set lo up",
                          "no TCP on 127.0.0.1, for IDIST_TRANSPORT=tcp");
}

// Prints the address at which ranks on other hosts reach this host. Having no address is wrong only
// if the user asked for one.
static void doctor_network_print_address(void) {
    idist__own_address own;
    bool is_asked = getenv("IDIST_ADDR") || getenv("IDIST_SOCKET_IFNAME");
    char why[300];

    if (idist__interface_choose(NULL, &own) == IDIST_OK) {
        doctor_line_print("address", DOCTOR_FINE, NULL, "%s (%s), told to ranks on other hosts",
                          own.ip, own.ifname[0] ? own.ifname : "IDIST_ADDR");
        return;
    }

    doctor_line_copy_failure(why, sizeof why);
    if (is_asked) doctor_line_print("address", DOCTOR_WRONG, NULL, "%s", why);
    else
        doctor_line_print("address", DOCTOR_NOTE, "one host only; for more set IDIST_ADDR",
                          "none that other hosts can reach");
}
