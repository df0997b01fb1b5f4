// launch/pmi.h: PMI-1, the text protocol of MPICH's launchers
//
// The protocol sends lines of "cmd=NAME key=value ..." over a socket. The launcher (hydra) passes
// the socket down as PMI_FD, or we connect to PMI_PORT (mpiexec -pmi-port). We need three things
// from PMI: our rank and size, a key-value space in which rank 0 publishes its address, and one
// barrier:
//
//     idist__pmi_introduce   initack -> set size, set rank             (with PMI_PORT only)
//     idist__pmi_share_address        init, get_my_kvsname, put (rank 0), barrier_in, get, finalize
//
// The launcher accepts one client per process. If an MPI library is linked into the program, that
// library is the client, whether or not idist uses MPI. In this case idist does not use PMI.
#pragma once

#include "os/clock.h"
#include "os/random.h"
#include "os/process.h"
#include "os/thread.h"
#include "os/poll.h"
#include "os/socket.h"
#include "base/fail.h"
#include "base/text.h"
#include "net/address.h"
#include "net/meet.h"
#include "net/interface.h"
#include "net/connection.h"
#include "launch/env.h"

#ifdef __cplusplus
extern "C" int MPI_Pcontrol(const int level, ...) __attribute__((weak));
#else
int MPI_Pcontrol(const int level, ...) __attribute__((weak));
#endif

// Returns true if an MPI library in the program speaks PMI.
static bool idist__pmi_is_taken(void) { return MPI_Pcontrol != NULL; }

typedef struct idist__pmi {
    int fd;
    bool answers; // the launcher answers
    int64_t deadline_ns;
    char line[600]; // the last answer
} idist__pmi;

// PMI's answers to this process. We ask only once, because the launcher no longer listens after
// `finalize`.
static struct {
    idist__os_mutex lock;
    int fd;          // connection to PMI_PORT, -1 if none
    int size, rank;  // size is 0 before we have asked
    char where[320]; // where rank 0 listens, "" before we have asked
} idist__pmi_known = {IDIST__OS_MUTEX_INIT, -1, 0, 0, ""};

// Reads one line byte by byte, because the bytes after it belong to the next line. The launcher's
// socket is in blocking mode, so each read waits for a byte first.
static bool idist__pmi_read_line(idist__pmi *pmi) {
    size_t nbytes = 0;

    while (nbytes + 1 < sizeof pmi->line &&
           idist__os_poll_wait(pmi->fd, IDIST__OS_READABLE, pmi->deadline_ns) &&
           idist__connection_read_all(pmi->fd, pmi->line + nbytes, 1, pmi->deadline_ns) &&
           pmi->line[nbytes] != '\n')
        nbytes++;
    pmi->line[nbytes] = 0;
    return nbytes > 0;
}

// Sends a line and reads answers until one begins with `answer`. Returns false if this answer
// reports an error or does not arrive.
static bool idist__pmi_request(idist__pmi *pmi, const char *line, const char *answer) {
    if (!idist__connection_write_all(pmi->fd, line, strlen(line), pmi->deadline_ns)) return false;

    do {
        if (!idist__pmi_read_line(pmi)) return false;
    } while (strncmp(pmi->line, answer, strlen(answer)) != 0);

    return !strstr(pmi->line, "rc=") || strstr(pmi->line, "rc=0") != NULL;
}

// Returns the text after "name=" in the last answer, or "" if there is none. `name` includes the
// '='.
static const char *idist__pmi_value(const idist__pmi *pmi, const char *name) {
    const char *at = strstr(pmi->line, name);
    return at ? at + strlen(name) : "";
}

// Connects to PMI_PORT and reads rank and size. The connection stays open for
// idist__pmi_share_address.
static bool idist__pmi_connect(const char *port, const char *id, int64_t deadline_ns) {
    idist__pmi pmi;
    char text[320];
    idist__os_address address;
    int value = 0;
    bool ok;

    pmi.deadline_ns = deadline_ns;
    pmi.fd = -1;
    snprintf(text, sizeof text, "tcp:%.300s", port);
    if (idist__address_parse(&address, text) == IDIST_OK)
        pmi.fd = idist__os_socket_connect(&address, deadline_ns);
    snprintf(text, sizeof text, "cmd=initack pmiid=%.100s\n", id);
    ok = pmi.fd >= 0 && idist__pmi_request(&pmi, text, "cmd=initack");

    while (ok && !strstr(pmi.line, "debug=")) { // "debug=" is in the last line of the answer
        ok = idist__pmi_read_line(&pmi);
        if (sscanf(pmi.line, "cmd=set size=%d", &value) == 1) idist__pmi_known.size = value;
        if (sscanf(pmi.line, "cmd=set rank=%d", &value) == 1) idist__pmi_known.rank = value;
    }

    if (!ok) idist__os_descriptor_close(&pmi.fd);
    idist__pmi_known.fd = pmi.fd;

    return ok;
}

// Asks PMI for rank and size, which mpiexec -pmi-port does not put into the environment.
static idist_status idist__pmi_introduce(idist__config *config, const char *port, const char *id) {
    int timeout_ms = config->init_timeout_ms > 0 ? config->init_timeout_ms : 5000;
    bool ok = true;

    idist__os_mutex_lock(&idist__pmi_known.lock);
    if (!idist__pmi_known.size)
        ok = idist__pmi_connect(port, id, idist__os_clock_deadline(timeout_ms));
    config->launcher_kind = IDIST__LAUNCHER_HYDRA;
    config->launcher = "hydra";
    config->rank_var = "PMI_ID";
    config->size_var = "PMI_PORT";
    config->world_size = idist__pmi_known.size;
    config->rank = idist__pmi_known.rank;
    idist__os_mutex_unlock(&idist__pmi_known.lock);

    idist__env_index("MPI_LOCALRANKID", &config->local_rank);
    idist__env_count("MPI_LOCALNRANKS", &config->local_size);
    if (ok && config->rank >= 0 && config->rank < config->world_size) return IDIST_OK;

    return idist__fail(IDIST_ERR_ENV,
                       "PMI_PORT=%s: no launcher of MPICH answers there; unset it to run alone",
                       port);
}

// Chooses the address at which other ranks reach rank 0. Prefers the address of this host's name,
// if one of the host's interfaces has that address.
static idist_status idist__pmi_choose_address(idist__own_address *own) {
    char name[256];
    idist__os_address address;
    bool known = idist__os_socket_host_name(name, sizeof name) &&
                 idist__address_tcp(&address, name, 0) == IDIST_OK;

    return idist__interface_choose(known ? &address : NULL, own);
}

// Opens the TCP listener of rank 0, for ranks on several hosts, or for ranks on one host if the
// user wants TCP.
static idist_status idist__pmi_listen_tcp(idist__config *config, char *where, size_t capacity) {
    bool one_host = config->local_size == config->world_size;
    bool by_loopback = one_host && !idist__os_env("IDIST_ADDR");
    idist__os_address address;
    idist__own_address own;
    idist_status status = IDIST_OK;

    if (!by_loopback && !config->secret.nbytes && !config->secret.insecure)
        return idist__fail(
            IDIST_ERR_NO_SECRET,
            "initialize: ranks on several hosts need a shared secret: set IDIST_SECRET or "
            "IDIST_SECRET_FILE on all ranks, or IDIST_INSECURE=1 to trust the network");

    if (by_loopback) idist__text_copy(own.ip, sizeof own.ip, "127.0.0.1");
    else status = idist__pmi_choose_address(&own);
    if (status != IDIST_OK) return status;

    if (!by_loopback && config->secret.nbytes) {
        status = idist__connection_listen_everywhere(0, "a free port", &config->listener);
    } else if (!one_host) {
        status = idist__connection_listen_beyond(&own, NULL, 0, own.ip, &config->listener);
    } else { // the address to which the other ranks of this host connect
        status = idist__address_tcp(&address, own.ip, 0);
        if (status == IDIST_OK)
            status = idist__connection_listen(&address, own.ip, &config->listener);
    }

    if (status != IDIST_OK) return status;
    if (!idist__os_socket_own_address(config->listener, &address))
        return idist__fail_errno("initialize: asking for the port of a listener", errno);
    snprintf(where, capacity, "tcp:[%s]:%d", own.ip, idist__os_socket_port(&address));

    return IDIST_OK;
}

// Opens the listener of rank 0 and sets `where` to its address. Rank 0 listens before it publishes
// the address, so that nobody else can take the address.
static idist_status idist__pmi_listen(idist__config *config, char *where, size_t capacity) {
    idist__os_address address;
    uint64_t id[2];
    idist_status status;

    if (config->local_size != config->world_size || config->transport == IDIST__TRANSPORT_TCP)
        return idist__pmi_listen_tcp(config, where, capacity);

    idist__os_random(id, sizeof id);
    snprintf(where, capacity, "unix:idist-%016llx%016llx", (unsigned long long)id[0],
             (unsigned long long)id[1]);
    status = idist__address_parse(&address, where);
    if (status != IDIST_OK) return status;

    return idist__connection_listen(&address, where, &config->listener);
}

// If `puts` is true, as on rank 0, puts `where` into the key-value space. All ranks then get that
// value and store it in `where`. The value "-" means that rank 0 could not listen. Returns false if
// the launcher does not answer or reports an error.
static bool idist__pmi_exchange(idist__pmi *pmi, bool puts, char *where, size_t capacity) {
    char space[256], text[900];
    const char *value;
    bool ok;

    pmi->answers = (pmi->fd >= 0 || idist__env_int("PMI_FD", 0, INT32_MAX, &pmi->fd) == IDIST_OK) &&
                   idist__pmi_request(pmi, "cmd=init pmi_version=1 pmi_subversion=1\n",
                                      "cmd=response_to_init");
    ok = pmi->answers && idist__pmi_request(pmi, "cmd=get_my_kvsname\n", "cmd=my_kvsname");
    value = idist__pmi_value(pmi, "kvsname=");
    snprintf(space, sizeof space, "%.*s", (int)strcspn(value, " "), value);

    if (puts) {
        snprintf(text, sizeof text, "cmd=put kvsname=%s key=idist value=%s\n", space, where);
        ok = ok && idist__pmi_request(pmi, text, "cmd=put_result");
    }

    ok = ok && idist__pmi_request(pmi, "cmd=barrier_in\n", "cmd=barrier_out");
    snprintf(text, sizeof text, "cmd=get kvsname=%s key=idist\n", space);
    ok = ok && idist__pmi_request(pmi, text, "cmd=get_result");
    idist__text_copy(where, capacity, ok ? idist__pmi_value(pmi, "value=") : "-");

    return ok;
}

// Reports that the launcher does not answer. A program between mpiexec and this one may have closed
// the descriptor, as Python's subprocess does.
static idist_status idist__pmi_no_answer(void) {
    const char *name = idist__os_env("PMI_FD") ? "PMI_FD" : "PMI_PORT";
    const char *value = idist__os_env(name);

    return idist__fail(IDIST_ERR_ENV,
                       "%s=%s: no launcher of MPICH answers there. If a program between mpiexec "
                       "and this one has closed it, set MASTER_ADDR and MASTER_PORT",
                       name, value ? value : "");
}

// Sets config->meet to the address of rank 0. Rank 0 listens and passes its address to the other
// ranks through the launcher. Blocks until all ranks have called this function or init_timeout_ms
// has passed.
IDIST__UNUSED static idist_status idist__pmi_share_address(idist__config *config) {
    char where[320] = "-";
    idist__pmi pmi;
    idist_status status = IDIST_OK;
    bool ok = true;

    memset(&pmi, 0, sizeof pmi);
    pmi.answers = true;
    pmi.deadline_ns = idist__os_clock_deadline(config->init_timeout_ms);
    idist__os_mutex_lock(&idist__pmi_known.lock);
    pmi.fd = idist__pmi_known.fd;

    if (!idist__pmi_known.where[0]) {
        if (config->rank == 0) status = idist__pmi_listen(config, where, sizeof where);
        if (status != IDIST_OK) snprintf(where, sizeof where, "-");
        ok = idist__pmi_exchange(&pmi, config->rank == 0, where, sizeof where);
        if (ok && idist__pmi_request(&pmi, "cmd=finalize\n", "cmd=finalize_ack") && where[0] != '-')
            idist__text_copy(idist__pmi_known.where, sizeof idist__pmi_known.where, where);
    }

    idist__text_copy(where, sizeof where, idist__pmi_known.where);
    idist__os_mutex_unlock(&idist__pmi_known.lock);
    if (!pmi.answers) return idist__pmi_no_answer();
    if (status != IDIST_OK) return status;
    if (where[0]) return idist__meet_read(&config->meet, where);

    if (ok)
        return idist__fail(IDIST_ERR_PEER_LOST,
                           "initialize: rank 0 could not listen; its own message says why");

    return idist__fail(
        IDIST_ERR_TIMEOUT,
        "initialize: not all ranks reached the launcher's barrier (PMI) within %d ms",
        config->init_timeout_ms);
}
