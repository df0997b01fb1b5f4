// lightgbm_network.h - LightGBM's network, which is idist or LightGBM's own sockets
//
// LightGBM can call two functions instead of its own network: reduce_scatter and all_gather. They
// return nothing, so they cannot report an error. C has no exceptions, and a longjmp across the C++
// functions of LightGBM is undefined. So LightGBM trains in a thread of its own. If a call of idist
// fails in this thread, the thread prints the error, wakes the main thread and sleeps:
//
//     main thread                 training thread
//     network_run                 LightGBM
//         waits                       network_reduce_scatter
//                                         idist_reduce_scatterv fails
//         wakes up   <------------------- network_fail
//     ends the process                        sleeps until the process ends
//
// LightGBM keeps the network in thread-local variables, so all calls of LightGBM are made in the
// training thread.
#ifndef LIGHTGBM_NETWORK_H
#define LIGHTGBM_NETWORK_H

#include "../../lib/check.h"
#include "lightgbm_api.h"
#include "lightgbm_options.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

enum { NETWORK_MAX_DTYPES = 100, NETWORK_TIMEOUT_MINUTES = 2 };

// LightGBM passes nothing to the two functions that could point to this struct.
static struct network {
    pthread_mutex_t lock; // for the next three
    pthread_cond_t done;
    bool is_done;
    int exit_code;

    int (*run)(void *arg); // what the training thread runs
    void *arg;
    lightgbm_reducer reducer; // of the present reduce_scatter
    idist_op op;              // calls the reducer
    int dtype_count;
    idist_dtype dtypes[NETWORK_MAX_DTYPES]; // one per size of an element
} network = {.lock = PTHREAD_MUTEX_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

// ---- the training thread ----

// Tells the main thread the exit code of the training.
static void network_tell(int exit_code) {
    pthread_mutex_lock(&network.lock);
    network.exit_code = exit_code;
    network.is_done = true;
    pthread_cond_signal(&network.done);
    pthread_mutex_unlock(&network.lock);
}

// Ends the training inside of a call from LightGBM. Does not return.
static void network_fail(const char *call) {
    fprintf(stderr, "rank %d: %s failed: %s\n", idist_get_rank(), call, idist_last_error());
    network_tell(1);
    for (;;) pause();
}

static void *network_thread(void *arg) {
    (void)arg;
    network_tell(network.run(network.arg));
    return NULL;
}

// Calls run(arg) in the training thread. Returns the result, or 1 after network_fail.
static int network_run(int (*run)(void *arg), void *arg) {
    pthread_t thread;
    int error;

    network.run = run;
    network.arg = arg;
    error = pthread_create(&thread, NULL, network_thread, NULL);
    if (error) {
        fprintf(stderr, "no training thread: %s\n", strerror(error));
        return 1;
    }
    pthread_detach(thread);
    pthread_mutex_lock(&network.lock);
    while (!network.is_done) pthread_cond_wait(&network.done, &network.lock);
    pthread_mutex_unlock(&network.lock);

    return network.exit_code;
}

// ---- idist as the network ----

// Returns the dtype for elements of LightGBM. Only LightGBM's reducers know what the elements
// contain. All ranks need a new size in the same call, so they create the dtypes in the same order.
static idist_dtype network_dtype(size_t nbytes) {
    int i = 0;

    while (i < network.dtype_count && idist_dtype_size(network.dtypes[i]) != nbytes) i++;
    if (i < network.dtype_count) return network.dtypes[i];
    if (i == NETWORK_MAX_DTYPES) {
        idist_set_last_error("LightGBM has too many sizes of elements");
        network_fail("network_dtype");
    }
    if (idist_dtype_create(nbytes, "lightgbm", NULL, &network.dtypes[i]) != IDIST_OK)
        network_fail("idist_dtype_create");
    network.dtype_count++;

    return network.dtypes[i];
}

// Reduces with LightGBM's function. An idist_op_fn.
static void network_reduce(const void *in, void *inout, size_t count, idist_dtype dtype,
                           void *arg) {
    size_t nbytes = idist_dtype_size(dtype);

    (void)arg;
    network.reducer((const char *)in, (char *)inout, (int)nbytes, (int32_t)(count * nbytes));
}

// A lightgbm_reduce_scatter. Reduces in place, because LightGBM may pass the same buffer twice, and
// allows that the buffer is written. LightGBM's blocks follow each other, as those of idist do.
static void network_reduce_scatter(char *send, int32_t send_nbytes, int element_nbytes,
                                   const int32_t *starts, const int32_t *nbytes, int ranks,
                                   char *recv, int32_t recv_nbytes,
                                   const lightgbm_reducer *reducer) {
    size_t counts[LIGHTGBM_MAX_RANKS];
    int rank = idist_get_rank();
    char *own = send + starts[rank];
    idist_dtype dtype = network_dtype((size_t)element_nbytes);

    (void)send_nbytes;
    (void)recv_nbytes;
    for (int r = 0; r < ranks; r++) counts[r] = (size_t)(nbytes[r] / element_nbytes);
    network.reducer = *reducer;
    if (idist_reduce_scatterv(send, own, counts, dtype, network.op, NULL) != IDIST_OK)
        network_fail("idist_reduce_scatterv");
    memmove(recv, own, (size_t)nbytes[rank]);
}

// A lightgbm_all_gather. Gathers in place, because LightGBM may pass the same buffer twice, with
// the block to send at its start.
static void network_all_gather(char *send, int32_t send_nbytes, const int32_t *starts,
                               const int32_t *nbytes, int ranks, char *recv, int32_t recv_nbytes) {
    size_t counts[LIGHTGBM_MAX_RANKS], displs[LIGHTGBM_MAX_RANKS];
    char *own = recv + starts[idist_get_rank()];

    (void)recv_nbytes;
    for (int r = 0; r < ranks; r++) {
        counts[r] = (size_t)nbytes[r];
        displs[r] = (size_t)starts[r];
    }
    memmove(own, send, (size_t)send_nbytes);
    if (idist_all_gatherv(own, (size_t)send_nbytes, recv, counts, displs, IDIST_U8, NULL) !=
        IDIST_OK)
        network_fail("idist_all_gatherv");
}

// ---- LightGBM's sockets as the network, on one host ----

// Returns a free port of this host, or 0.
static int network_free_port(void) {
    struct sockaddr_in address = {0};
    socklen_t nbytes = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM, 0), port = 0;

    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (fd >= 0 && bind(fd, (struct sockaddr *)&address, sizeof address) == 0 &&
        getsockname(fd, (struct sockaddr *)&address, &nbytes) == 0)
        port = ntohs(address.sin_port);
    if (fd >= 0) close(fd);

    return port;
}

// Connects LightGBM's own sockets. LightGBM finds its rank in the list of the machines.
static int network_connect_sockets(const lightgbm_api *api) {
    char machines[LIGHTGBM_MAX_RANKS * 24];
    int32_t ports[LIGHTGBM_MAX_RANKS], port = network_free_port();
    int ranks = idist_get_world_size(), used = 0;

    CHECK(idist_all_gather(&port, ports, 1, IDIST_I32, NULL));
    for (int r = 0; r < ranks; r++)
        used += snprintf(machines + used, sizeof machines - (size_t)used, "%s127.0.0.1:%d",
                         r ? "," : "", ports[r]);
    LGBM_CHECK(api, NetworkInit(machines, port, NETWORK_TIMEOUT_MINUTES, ranks));
    return 0;
}

// Gives LightGBM its network. Call it in the training thread.
static int network_connect(const lightgbm_api *api, int kind) {
    int ranks = idist_get_world_size();

    if (kind == NETWORK_SOCKET) return ranks > 1 ? network_connect_sockets(api) : 0;
    CHECK(idist_op_create(network_reduce, NULL, true, NULL, &network.op));
    LGBM_CHECK(api, NetworkInitWithFunctions(ranks, idist_get_rank(), network_reduce_scatter,
                                             network_all_gather));
    return 0;
}

#endif // LIGHTGBM_NETWORK_H
