// place.h: the place of this idistrun's ranks among all ranks
//
// A job has nodes, which are hosts with ranks. The nodes are numbered from 0, and the ranks are
// numbered node by node:
//
//     --hosts alpha:4,beta:2        node 0 on alpha: ranks 0 to 3
//                                   node 1 on beta:  ranks 4 and 5
//
// place_choose() computes `place` once, from the options and, on a node, from the head's orders.
#pragma once

#include "base.h"
#include "hosts.h"
#include "options.h"

#include <arpa/inet.h>
#include <sched.h>
#include <stdbool.h>
#include <sys/socket.h>

enum place_role {
    PLACE_LOCAL, // starts ranks here: all ranks, or the ranks of one node of --nnodes
    PLACE_HEAD,  // starts a node, which is another idistrun, on each of --hosts
    PLACE_NODE   // starts ranks here for a head
};

static struct {
    enum place_role role;
    int node_rank, node_count;
    int rank_count, first_rank; // number of ranks here, first rank here
    int world_size;
    int master_port; // 0 if each attempt chooses one
    const char *master_addr, *job_id;
    char hostname[256]; // name of this host in messages
} place;

// The settings that the head chooses for a node.
struct place_orders {
    int node_rank, restart, master_port;
    const char *master_addr, *job_id;
};

// One start of all ranks.
struct attempt {
    int restart; // 0 for the first start
    int master_port;
};

// Exits if two options contradict each other, or if an option needs another option that is missing.
static void place_check_options(void) {
    if (options.hosts && (options.nnodes > 1 || options.node_rank))
        base_usage_error("--hosts and --nnodes exclude each other: use one");
    if (options.nnodes > 1 && (!options.master_addr || !options.master_port))
        base_usage_error("--nnodes needs --master-addr and --master-port");
}

// Returns the number of cores that this process may use.
static int place_count_cores(void) {
    cpu_set_t cores;

    return sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

// Numbers the ranks. Without a list of hosts, all nodes have the same number of ranks.
static void place_number_ranks(void) {
    int nproc = options.nproc;

    if (!nproc && !options.hosts) nproc = place_count_cores();

    for (int node = 0; node < place.node_count; node++) {
        int rank_count = options.hosts ? hosts.items[node].rank_count : nproc;

        if (node < place.node_rank) place.first_rank += rank_count;
        if (node == place.node_rank) place.rank_count = rank_count;
        place.world_size += rank_count;
    }
}

// Returns the address at which all ranks reach rank 0's host.
static const char *place_choose_address(void) {
    if (options.master_addr) return options.master_addr;
    if (!options.hosts) return "127.0.0.1";

    // Every other host would take "localhost" for its own name.
    if (hosts_is_loopback(hosts.items[0].name) && !hosts_are_all_loopback()) return place.hostname;
    return hosts.items[0].name;
}

// Returns the name of the job. Nodes that users start one by one need a name that all nodes know.
static const char *place_choose_id(void) {
    static char own[64];

    if (options.rdzv_id) return options.rdzv_id;
    if (options.nnodes > 1) return "idistrun";

    snprintf(own, sizeof own, "idistrun-%d-%lld", (int)getpid(), base_now_ms());
    return own;
}

// Fills in `place`. `orders` is NULL unless this is a node. Exits if the options are wrong.
static void place_choose(const struct place_orders *orders) {
    place_check_options();
    if (options.hosts) hosts_parse(options.hosts, options.nproc ? options.nproc : 1);

    place.role = orders ? PLACE_NODE : options.hosts ? PLACE_HEAD : PLACE_LOCAL;
    place.node_count = options.hosts ? hosts.count : options.nnodes;
    place.node_rank = orders ? orders->node_rank : options.node_rank;
    if (place.node_rank >= place.node_count)
        base_usage_error("--node-rank %d must be less than --nnodes %d", place.node_rank,
                         place.node_count);
    place_number_ranks();

    gethostname(place.hostname, sizeof place.hostname - 1);
    if (orders && options.hosts)
        snprintf(place.hostname, sizeof place.hostname, "%s", hosts.items[place.node_rank].name);

    place.master_addr = orders ? orders->master_addr : place_choose_address();
    place.master_port = orders ? orders->master_port : options.master_port;
    place.job_id = orders ? orders->job_id : place_choose_id();
}

// Returns a port of this host that is free now.
static int place_find_free_port(void) {
    struct sockaddr_in address;
    socklen_t nbytes = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);

    if (fd < 0 || bind(fd, (struct sockaddr *)&address, nbytes) != 0 ||
        getsockname(fd, (struct sockaddr *)&address, &nbytes) != 0)
        base_die("no free port");
    close(fd);

    return ntohs(address.sin_port);
}

// Returns a random port, which is probably free. Used if rank 0 is on another host, where idistrun
// cannot look for a free port.
static int place_draw_port(void) {
    unsigned random;

    if (getentropy(&random, sizeof random) != 0) base_die("getentropy");
    return 15000 + (int)(random % 10000);
}

// Describes one start of all ranks. Each attempt uses a new port, unless the user gave one.
static struct attempt place_make_attempt(int restart) {
    const char *first = hosts.count ? hosts.items[0].name : place.hostname;
    struct attempt attempt = {.restart = restart, .master_port = place.master_port};
    bool is_here = hosts_is_loopback(first) || strcmp(first, place.hostname) == 0;

    if (attempt.master_port) return attempt;
    attempt.master_port = is_here ? place_find_free_port() : place_draw_port();

    return attempt;
}
