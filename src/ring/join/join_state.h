// ring/join/join_state.h: the state of a join, and names of values in the store
#pragma once

#include "os/clock.h"
#include "net/meet.h"
#include "store/server.h"
#include "store/client.h"
#include "store/store.h"
#include "core/model.h"
#include "ring/msg/ring_model.h"
#include "ring/connect/connector.h"

typedef struct idist__record { // what a rank publishes about itself
    char hostname[64];
    uint64_t host;       // equal for all ranks of a host
    char local[64];      // address of the rank's local socket, or ""
    uint64_t processors; // equal for all ranks on the same processors
    uint32_t shm;        // nonzero if the rank takes part in shared memory
    uint32_t algorithm;  // the rank's IDIST_ALGO, which must be equal on all ranks
    // idist__config_reach_key if the rank has reached the store through loopback, otherwise 0.
    uint64_t loopback;
} idist__record;

typedef struct idist__tcp_record {
    char text[160];         // where a rank listens: "tcp:[ADDRESS]:PORT"
    uint32_t round_trip_us; // round trip to the store's server; 0 if not known
    uint32_t mbits;         // bandwidth of the interface; 0 if not known
    uint32_t sockets;       // the rank's IDIST_SOCKETS; 0 if automatic
    uint64_t window_nbytes; // bytes that can be in flight in one socket; 0 if not known
} idist__tcp_record;

typedef struct idist__join {
    idist__world *w;
    idist__ring *ring;
    idist_store *store;
    bool owns_store;              // we opened the store; otherwise it is a view of the user's store
    bool lost_server;             // the server ended while we opened the store
    bool others_know;             // another process has told all ranks why we give up
    bool told_by_server;          // the server has told all ranks, because a process has ended
    bool voting;                  // we gave up while the connections of this host carry votes
    bool warned;                  // we have logged that the server refused a process
    char prefix[64];              // prefix of our names in the store
    idist__tcp_record *tcp;       // by rank; NULL if there is no TCP
    const idist__record *records; // by rank
    idist__connector *connector;
    bool *wanted;     // by rank: true if a connection is needed now and missing
    int wanted_count; // number of entries of `wanted` that are true
    int64_t deadline_ns;
} idist__join;

// Formats the name of a value in the store: a value of one rank, or of the whole job if rank < 0.
static void idist__join_state_name(const idist__join *j, char *name, size_t capacity,
                                   const char *what, int rank) {
    if (rank < 0) snprintf(name, capacity, "%s%s", j->prefix, what);
    else snprintf(name, capacity, "%s%s/%d", j->prefix, what, rank);
}

static idist_status idist__join_state_set(idist__join *j, const char *what, int rank,
                                          const void *value, size_t nbytes) {
    char name[128];
    idist__join_state_name(j, name, sizeof name, what, rank);
    return idist__store_post(j->store, name, value, nbytes);
}

// Returns true if the store belongs to a torch agent, which outlives the workers.
static bool idist__join_state_is_torch(const idist__join *j) {
    return j->w->cfg.meet.kind == IDIST__MEET_TORCH;
}

// Returns the server of our store if it runs in this process, or NULL otherwise.
static const idist__server *idist__join_state_server(const idist__join *j) {
    if (!j->owns_store || j->store->run != idist__client_run) return NULL;
    return ((const idist__client_store *)j->store->impl)->server;
}

// Returns the interval in ms at which a waiting rank asks whether another rank has given up. The
// interval is longer in a large world, where all ranks ask one server.
static int idist__join_state_ask_ms(const idist__join *j) {
    return j->w->group.size < 800 ? 100 + j->w->group.size / 2 : 500;
}

// Returns the number of milliseconds until the deadline, at least 1, or -1 if there is no deadline.
static int idist__join_state_ms_left(const idist__join *j) {
    int64_t left;

    if (j->deadline_ns == IDIST__FOREVER) return -1;
    left = (j->deadline_ns - idist__os_clock_now_ns()) / IDIST__MS;
    if (left < 1) return 1;
    return left > INT32_MAX ? INT32_MAX : (int)left;
}
