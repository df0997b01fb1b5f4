// test_nccl: tests how idist uses NCCL: the choice of backend, errors and time-outs of enqueued
// calls, calls held back by idist_group_begin, and communicators of groups. Runs on the stand-ins
// for libcudart and libnccl.
#include "gpu_ranks.h"

// Rank 0 enqueues many calls before any other rank begins. Only then does rank 0 send the messages
// that the other ranks wait for. No call of rank 0 may block.
static void runs_ahead(idist_group *world, int rank, int n, void *arg) {
    enum { K = 40 };
    cudaStream_t s = new_stream();
    int32_t *x = device_of(1, 1), word = rank;
    idist_opts o = on_stream(world, s), host = opts_of(world);
    (void)arg;
    if (rank) rank_ok(rank, idist_recv(&word, 1, IDIST_I32, 0, 9, NULL, &host));
    for (int k = 0; k < K; k++) rank_ok(rank, idist_all_reduce(x, x, 1, IDIST_I32, IDIST_MAX, &o));
    for (int k = 1; k < n && !rank; k++)
        rank_ok(rank, idist_send(&word, 1, IDIST_I32, k, 9, &host));
    rank_ok(rank, idist_all_reduce(x, x, 1, IDIST_I32, IDIST_SUM, &o));
    CUDA(cudaStreamSynchronize(s));
    rank_check(first_of(x) == n, "rank %d: got %d", rank, first_of(x));
    cudaFree(x);
    cudaStreamDestroy(s);
}

// Lets rank 0 run ahead with every collective that NCCL has, in sizes for which NCCL uses different
// algorithms. The first call of each algorithm would wait on the host.
static void runs_ahead_of_all(idist_group *world, int rank, int n, void *arg) {
    enum { MOST = 1 << 13, SIZES = 3 };
    static const size_t sizes[SIZES] = {1, 600, MOST};
    cudaStream_t s = new_stream();
    int32_t *x = device_of(1, MOST * (size_t)n), *y = device_of(1, MOST * (size_t)n), word = rank;
    idist_opts o = on_stream(world, s), host = opts_of(world);
    (void)arg;
    if (rank) rank_ok(rank, idist_recv(&word, 1, IDIST_I32, 0, 9, NULL, &host));
    for (int k = 0; k < SIZES; k++) {
        size_t counts[RANKS_MAX];
        for (int i = 0; i < n; i++) counts[i] = sizes[k];
        rank_ok(rank, idist_all_reduce(x, x, sizes[k], IDIST_F32, IDIST_SUM, &o));
        rank_ok(rank, idist_all_reduce(x, x, sizes[k], IDIST_I32, IDIST_PROD, &o));
        rank_ok(rank, idist_all_reduce(x, x, sizes[k], IDIST_I32, IDIST_MAX, &o));
        rank_ok(rank, idist_reduce_scatter(x, y, sizes[k], IDIST_F32, IDIST_SUM, &o));
        rank_ok(rank, idist_reduce_scatter(x, y, sizes[k], IDIST_I32, IDIST_PROD, &o));
        rank_ok(rank, idist_all_gather(x, y, sizes[k], IDIST_I32, &o));
        rank_ok(rank, idist_all_gatherv(x, sizes[k], y, counts, NULL, IDIST_I32, &o));
        rank_ok(rank, idist_broadcast(y, sizes[k], IDIST_I32, n - 1, &o));
        rank_ok(rank, idist_reduce(x, y, sizes[k], IDIST_I32, IDIST_MAX, 0, &o));
        rank_ok(rank, idist_barrier(&o));
    }
    for (int k = 1; k < n && !rank; k++)
        rank_ok(rank, idist_send(&word, 1, IDIST_I32, k, 9, &host));
    rank_ok(rank, idist_barrier(&o));
    CUDA(cudaStreamSynchronize(s));
    cudaFree(x);
    cudaFree(y);
    cudaStreamDestroy(s);
}

// Lets messages run ahead. The first message of a pair connects the pair and would wait. An
// all_to_all connects all pairs, so messages after the all_to_all must run ahead.
static void messages_run_ahead(idist_group *world, int rank, int n, void *arg) {
    cudaStream_t s = new_stream();
    int32_t *x = device_of(rank, (size_t)n), *y = device_of(-1, (size_t)n), word = rank;
    idist_opts o = on_stream(world, s), host = opts_of(world);
    int next = (rank + 1) % n, before = (rank + n - 1) % n;
    (void)arg;
    rank_ok(rank, idist_all_to_all(x, y, 1, IDIST_I32, &o));
    if (rank) rank_ok(rank, idist_recv(&word, 1, IDIST_I32, 0, 9, NULL, &host));
    rank_ok(rank, idist_sendrecv(x, 1, next, 3, y, 1, before, 3, IDIST_I32, NULL, &o));
    rank_ok(rank, idist_gather(x, y, 1, IDIST_I32, n - 1, &o));
    for (int k = 1; k < n && !rank; k++)
        rank_ok(rank, idist_send(&word, 1, IDIST_I32, k, 9, &host));
    rank_ok(rank, idist_barrier(&o));
    CUDA(cudaStreamSynchronize(s));
    cudaFree(x);
    cudaFree(y);
    cudaStreamDestroy(s);
}

// Makes calls in place, for which idist sends a copy of the buffer. The GPUs of the other ranks of
// this process must be able to access the copy like the program's own memory. These GPUs must also
// be able to access the memory with which idist connects a communicator.
static void in_place(idist_group *world, int rank, int n, void *arg) {
    cudaStream_t s = new_stream();
    int32_t *x = device_of(rank, (size_t)n), host[RANKS_MAX];
    idist_opts o = on_stream(world, s);
    idist_group *all = NULL;
    (void)arg;
    rank_ok(rank, idist_all_to_all(x, x, 1, IDIST_I32, &o));
    CUDA(cudaMemcpyAsync(host, x, (size_t)n * sizeof *x, cudaMemcpyDeviceToHost, s));
    CUDA(cudaStreamSynchronize(s));
    for (int k = 0; k < n; k++)
        rank_check(host[k] == k, "rank %d: got %d of rank %d", rank, host[k], k);
    if (rank_ok(rank, idist_split(world, 0, rank, &all))) {
        o.group = all;
        rank_ok(rank, idist_all_to_all(x, x, 1, IDIST_I32, &o));
        CUDA(cudaStreamSynchronize(s));
        rank_check(first_of(x) == rank, "rank %d: got %d", rank, first_of(x));
        rank_ok(rank, idist_free_group(&all));
    }
    cudaFree(x);
    cudaStreamDestroy(s);
}

// A rank waits inside NCCL for a rank that does not come. The time-out must end the wait, and no
// abort may run while the rank is inside the call.
static void stuck_inside(idist_group *world, int rank, int n, void *arg) {
    cudaStream_t s = new_stream();
    int32_t *x = device_of(1, (size_t)n), *y = device_of(1, (size_t)n), none = 0;
    idist_opts o = on_stream(world, s), host = opts_of(world);
    int64_t start = tap_now_ms();
    idist_status status;
    (void)arg;
    o.timeout_ms = host.timeout_ms = 300;
    if (rank != 1) {
        status = idist_all_to_all(x, y, 1, IDIST_I32, &o);
        if (status == IDIST_OK) status = idist_barrier(&host);
        rank_check(status == IDIST_ERR_TIMEOUT, "rank %d: %s", rank, idist_status_name(status));
        rank_check(text_names_rank(idist_last_error(), 1), "rank %d: got \"%s\"", rank,
                   idist_last_error());
        CUDA(cudaStreamSynchronize(s));
        rank_check(tap_now_ms() - start < 2500 * test_slow_factor(), "rank %d: %d ms", rank,
                   (int)(tap_now_ms() - start));
    } else {
        host.timeout_ms = 5000;
        rank_is(rank, idist_recv(&none, 1, IDIST_I32, 0, 99, NULL, &host), IDIST_ERR_TIMEOUT);
    }
    cudaFree(x);
    cudaFree(y);
    cudaStreamDestroy(s);
}

// Makes the group fail while a graph holds a call. No rank may wait for the graph, and the program
// must be able to destroy the graph later.
static cudaGraphExec_t left_graphs[RANKS_MAX];
static ncclComm_t left_comms[RANKS_MAX];
static int64_t left_ms[RANKS_MAX];
static void live_graph(idist_group *world, int rank, int n, void *arg) {
    cudaStream_t s = new_stream();
    int32_t *x = device_of(1, 1);
    idist_opts o = on_stream(world, s), host = opts_of(world);
    cudaGraph_t graph;
    (void)n;
    (void)arg;
    rank_ok(rank, idist_all_reduce(x, x, 1, IDIST_I32, IDIST_MAX, &o));
    CUDA(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    rank_ok(rank, idist_all_reduce(x, x, 1, IDIST_I32, IDIST_SUM, &o));
    CUDA(cudaStreamEndCapture(s, &graph));
    CUDA(cudaGraphInstantiate(&left_graphs[rank], graph, 0));
    CUDA(cudaGraphDestroy(graph));
    left_comms[rank] = (ncclComm_t)idist_nccl_comm(world);
    CUDA(cudaGraphLaunch(left_graphs[rank], s));
    CUDA(cudaStreamSynchronize(s));
    // Rank 0 may leave the barrier first and abort it for another rank.
    (void)!idist_barrier(&host);
    left_ms[rank] = tap_now_ms();
    if (rank == 0) rank_ok(rank, idist_abort(world));
    while (idist_barrier(&host) == IDIST_OK) continue;
    cudaStreamDestroy(s);
}

static void with_live_graph(const char *version) {
    tap_running("a live graph, NCCL %s", version);
    ranks_reset();
    fake_set_env("FAKE_NCCL_VERSION", version);
    ranks_threads_fault(2, NULL, live_graph, NULL);
    for (int k = 0; k < 2; k++) {
        int took = (int)(tap_now_ms() - left_ms[k]);
        rank_check(took < 2500 * test_slow_factor(), "rank %d: the end took %d ms", k, took);
        cudaGraphExecDestroy(left_graphs[k]);
        if (strcmp(version, "22807") >= 0)
            rank_check(ncclCommAbort(left_comms[k]) == ncclSuccess, "rank %d: it was freed", k);
    }
    fake_set_env("FAKE_NCCL_VERSION", NULL);
    ranks_report("a graph that holds a call outlives its group, NCCL %s", version);
}

// Makes a call with a different count on one rank. No rank may block in this call. The next calls
// must report the mismatch, and the stream must complete.
static void enqueued_mismatch(idist_group *world, int rank, int n, void *arg) {
    cudaStream_t s = new_stream();
    int32_t *x = device_of(1, 8);
    idist_opts o = on_stream(world, s);
    idist_status status = IDIST_OK;
    int64_t start = tap_now_ms();
    (void)n;
    (void)arg;
    (void)!idist_all_reduce(x, x, rank == 1 ? 7 : 8, IDIST_I32, IDIST_SUM, &o);
    while (status == IDIST_OK && tap_now_ms() - start < 3000) {
        tap_sleep_ms(5);
        status = idist_all_reduce(x, x, 8, IDIST_I32, IDIST_SUM, &o);
    }
    rank_check(status == IDIST_ERR_MISMATCH && strstr(idist_last_error(), "count") != NULL,
               "rank %d: %s: %s", rank, idist_status_name(status), idist_last_error());
    CUDA(cudaStreamSynchronize(s));
    rank_check(tap_now_ms() - start < 3000 * test_slow_factor(), "rank %d: %d ms", rank,
               (int)(tap_now_ms() - start));
    cudaFree(x);
    cudaStreamDestroy(s);
}

// One rank does not come, and the other ranks wait only for their streams. The time-out must end
// their waits.
static void enqueued_late(idist_group *world, int rank, int n, void *arg) {
    cudaStream_t s = new_stream();
    int32_t *x = device_of(1, 8);
    idist_opts o = on_stream(world, s);
    int64_t start = tap_now_ms();
    (void)n;
    (void)arg;
    o.timeout_ms = 200;
    if (rank != 1) {
        rank_ok(rank, idist_all_reduce(x, x, 8, IDIST_I32, IDIST_SUM, &o));
        CUDA(cudaStreamSynchronize(s));
        rank_check(tap_now_ms() - start < 1500 * test_slow_factor(), "rank %d: %d ms", rank,
                   (int)(tap_now_ms() - start));
        rank_is(rank, idist_barrier(&o), IDIST_ERR_TIMEOUT);
        rank_check(text_names_rank(idist_last_error(), 1), "rank %d: got \"%s\"", rank,
                   idist_last_error());
    } else {
        int32_t none = 0; // this rank waits for something else
        idist_opts host = opts_of(world);
        rank_is(rank, idist_recv(&none, 1, IDIST_I32, 0, 99, NULL, &host), IDIST_ERR_TIMEOUT);
    }
    cudaFree(x);
    cudaStreamDestroy(s);
}

// Sends messages on streams. Between group_begin and group_end, the messages must progress
// together, in any order.
static void messages(idist_group *world, int rank, int n, void *arg) {
    enum { COUNT = 100000 };
    cudaStream_t s = new_stream();
    int32_t *x = device_of(rank, COUNT), *y = device_of(-1, COUNT), *z = device_of(-1, COUNT);
    idist_opts o = on_stream(world, s);
    int next = (rank + 1) % n, before = (rank + n - 1) % n;
    (void)arg;
    rank_ok(rank, idist_group_begin());
    rank_ok(rank, idist_send(x, COUNT, IDIST_I32, next, 1, &o));
    rank_ok(rank, idist_send(x, COUNT, IDIST_I32, before, 2, &o));
    rank_ok(rank, idist_recv(y, COUNT, IDIST_I32, before, 1, NULL, &o));
    rank_ok(rank, idist_recv(z, COUNT, IDIST_I32, next, 2, NULL, &o));
    rank_ok(rank, idist_group_end());
    CUDA(cudaStreamSynchronize(s));
    rank_check(first_of(y) == before && first_of(z) == next, "rank %d: got %d and %d", rank,
               first_of(y), first_of(z));
    rank_ok(rank, idist_sendrecv(x, COUNT, before, 3, y, COUNT, next, 3, IDIST_I32, NULL, &o));
    CUDA(cudaStreamSynchronize(s));
    rank_check(first_of(y) == next, "rank %d: got %d", rank, first_of(y));
    rank_is(rank, idist_recv(y, 1, IDIST_I32, IDIST_ANY_SOURCE, 1, NULL, &o),
            IDIST_ERR_UNSUPPORTED);
    cudaFree(x);
    cudaFree(y);
    cudaFree(z);
    cudaStreamDestroy(s);
}

// Receives a message with a different size, or without a stream.
static void other_message(idist_group *world, int rank, int n, void *arg) {
    bool plain = *(const bool *)arg;
    cudaStream_t s = new_stream();
    int32_t *x = device_of(rank, 100);
    idist_opts o = on_stream(world, s), blocking = opts_of(world);
    idist_status status = IDIST_OK;
    int64_t start = tap_now_ms();
    (void)n;
    if (rank == 0) status = idist_send(x, 100, IDIST_I32, 1, 1, &o);
    if (rank == 1 && plain) status = idist_recv(x, 100, IDIST_I32, 0, 1, NULL, &blocking);
    if (rank == 1 && !plain) status = idist_recv(x, 99, IDIST_I32, 0, 1, NULL, &o);
    if (plain && rank == 1) {
        rank_check(status == IDIST_ERR_MISMATCH, "got %s", idist_status_name(status));
        rank_ok(rank, idist_abort(world));
    }
    while (status == IDIST_OK && tap_now_ms() - start < 3000) status = idist_barrier(&blocking);
    rank_check(status == IDIST_ERR_MISMATCH || (plain && status == IDIST_ERR_ABORTED),
               "rank %d: got %s", rank, idist_status_name(status));
    CUDA(cudaStreamSynchronize(s));
    cudaFree(x);
    cudaStreamDestroy(s);
}

// Uses groups. Each group has its own communicator, which is created at the group's first use and
// freed with the group.
static void groups(idist_group *world, int rank, int n, void *arg) {
    cudaStream_t s = new_stream();
    int32_t *x = device_of(1, 1), *y = device_of(1, 1);
    (void)arg;
    for (int turn = 0; turn < 3; turn++) {
        idist_group *half = NULL, *all = NULL;
        rank_ok(rank, idist_split(world, rank % 2, rank, &half));
        rank_ok(rank, idist_split(world, 0, -rank, &all));
        idist_opts a = on_stream(half, s), b = on_stream(all, s);
        int size = idist_group_size(half);
        // The first calls of two groups cannot be held back together.
        rank_ok(rank, idist_all_reduce(x, x, 1, IDIST_I32, IDIST_MAX, &a));
        rank_ok(rank, idist_all_reduce(y, y, 1, IDIST_I32, IDIST_MAX, &b));
        rank_ok(rank, idist_group_begin());
        rank_ok(rank, idist_all_reduce(x, x, 1, IDIST_I32, IDIST_SUM, &a));
        rank_ok(rank, idist_all_reduce(y, y, 1, IDIST_I32, IDIST_SUM, &b));
        rank_ok(rank, idist_group_end());
        CUDA(cudaStreamSynchronize(s));
        rank_check(first_of(x) == size && first_of(y) == n, "rank %d: got %d and %d", rank,
                   first_of(x), first_of(y));
        int count = 0, at = -1;
        ncclComm_t comm = (ncclComm_t)idist_nccl_comm(half);
        rank_check(comm && ncclCommCount(comm, &count) == ncclSuccess && count == size,
                   "rank %d: %d", rank, count);
        comm = (ncclComm_t)idist_nccl_comm(all);
        rank_check(comm && ncclCommUserRank(comm, &at) == ncclSuccess && at == n - 1 - rank,
                   "rank %d: %d", rank, at);
        rank_ok(rank, idist_free_group(&half));
        rank_ok(rank, idist_free_group(&all));
        int32_t one = 1;
        CUDA(cudaMemcpyAsync(x, &one, sizeof one, cudaMemcpyHostToDevice, s));
        CUDA(cudaMemcpyAsync(y, &one, sizeof one, cudaMemcpyHostToDevice, s));
        CUDA(cudaStreamSynchronize(s));
    }
    cudaFree(x);
    cudaFree(y);
    cudaStreamDestroy(s);
}

// Alternates requests, calls on a stream and blocking calls, with calls on host memory between
// them. The all_reduces on device memory run over NCCL, and the scans are staged.
static void in_turn(idist_group *world, int rank, int n, void *arg) {
    enum { K = 6, COUNT = 1000 };
    cudaStream_t s = new_stream();
    int32_t *x[K], *y = device_of(rank, 1), host = 1;
    idist_request r[K];
    (void)arg;
    memset(r, 0, sizeof r);
    for (int k = 0; k < K; k++) {
        idist_opts o = opts_of(world), blocking = o, stream = on_stream(world, s);
        x[k] = device_of(k, COUNT);
        if (k % 3 == 0 || k == 4) o.stream = s;
        if (k % 3 == 1) o.request = &r[k];
        rank_ok(rank, idist_all_reduce(x[k], x[k], COUNT, IDIST_I32, IDIST_SUM, &o));
        rank_ok(rank, idist_all_reduce(&host, &host, 1, IDIST_I32, IDIST_MAX, &blocking));
        rank_ok(rank, idist_scan(y, y, 1, IDIST_I32, IDIST_MAX, k % 2 ? &stream : &blocking));
        CUDA(cudaStreamSynchronize(s));
    }
    rank_ok(rank, idist_wait(&r[1]));
    rank_ok(rank, idist_wait_stream(&r[4], s));
    CUDA(cudaStreamSynchronize(s));
    for (int k = 0; k < K; k++) {
        rank_check(first_of(x[k]) == k * n, "rank %d: call %d: got %d", rank, k, first_of(x[k]));
        cudaFree(x[k]);
    }
    rank_check(first_of(y) == rank && host == 1, "rank %d: got %d and %d", rank, first_of(y), host);
    cudaFree(y);
    cudaStreamDestroy(s);
}

// Tests group_begin with more calls than may run ahead, and with a request that is waited for
// before group_end. A group must not be freed while its calls are held back.
static void held_back(idist_group *world, int rank, int n, void *arg) {
    cudaStream_t s = new_stream();
    int32_t *x = device_of(1, 1), *y = device_of(1, 1);
    idist_opts o = on_stream(world, s);
    idist_request r = {NULL};
    idist_group *g = NULL;
    (void)arg;
    rank_ok(rank, idist_split(world, 0, rank, &g));
    rank_ok(rank, idist_group_begin());
    for (int k = 0; k < 1200; k++)
        rank_ok(rank, idist_all_reduce(x, x, 1, IDIST_I32, IDIST_MAX, &o));
    idist_opts later = opts_async(world, &r);
    rank_ok(rank, idist_all_reduce(y, y, 1, IDIST_I32, IDIST_SUM, &later));
    rank_ok(rank, idist_wait(&r));
    rank_check(first_of(y) == n, "rank %d: got %d", rank, first_of(y));
    rank_is(rank, idist_free_group(&g), IDIST_ERR_STATE);
    rank_ok(rank, idist_group_end());
    CUDA(cudaStreamSynchronize(s));
    rank_check(first_of(x) == 1, "rank %d: got %d", rank, first_of(x));
    rank_ok(rank, idist_free_group(&g));
    cudaFree(x);
    cudaFree(y);
    cudaStreamDestroy(s);
}

// Makes requests in both directions, the send first. A send of this size does not complete before
// its receive has started.
static void crosswise(idist_group *world, int rank, int n, void *arg) {
    enum { COUNT = 1 << 20 };
    cudaStream_t s = new_stream();
    int32_t *x = device_of(rank, COUNT), *y = device_of(-1, COUNT);
    idist_request r[2] = {{NULL}, {NULL}};
    idist_opts o = opts_async(world, &r[0]);
    (void)arg;
    o.stream = s;
    rank_ok(rank, idist_send(x, COUNT, IDIST_I32, (rank + 1) % n, 1, &o));
    o.request = &r[1];
    rank_ok(rank, idist_recv(y, COUNT, IDIST_I32, (rank + n - 1) % n, 1, NULL, &o));
    rank_ok(rank, idist_wait_all(r, 2));
    rank_check(first_of(y) == (rank + n - 1) % n, "rank %d: got %d", rank, first_of(y));
    cudaFree(x);
    cudaFree(y);
    cudaStreamDestroy(s);
}

//------------------------------------------------------------------------------
// choice of the backend, in processes of their own
//------------------------------------------------------------------------------

typedef struct way {
    const char *env[2][4];      // environment of rank 0 and rank 1: NAME, value, ...
    idist_status status;        // expected status of idist_open
    const char *backend, *text; // expected backend, or text of the error
    int port;
} way;

static int goes(int number, void *arg) {
    const way *w = (const way *)arg;
    idist_group *world = NULL;
    idist_desc d = desc_with(NULL, NULL);
    for (int k = 0; k < 4 && w->env[number][k]; k += 2)
        setenv(w->env[number][k], w->env[number][k + 1], 1);
    d.rank = number;
    d.world_size = 2;
    d.master_addr = "127.0.0.1";
    d.master_port = w->port;
    // The time-out expires in the cases with IDIST_ERR_DEVICE.
    d.init_timeout_ms = w->status == IDIST_ERR_DEVICE ? 1000 + 500 * test_slow_factor() : 10000;
    d.timeout_ms = 10000;
    int64_t start = tap_now_ms();
    idist_status s = idist_initialize(&d);
    rank_check(tap_now_ms() - start < 6000 * test_slow_factor(), "rank %d: %d ms", number,
               (int)(tap_now_ms() - start));
    rank_check(s == w->status, "rank %d: %s: %s", number, idist_status_name(s), idist_last_error());
    if (w->text)
        rank_check(strstr(idist_last_error(), w->text) != NULL, "rank %d: got \"%s\"", number,
                   idist_last_error());
    if (s != IDIST_OK) return 0;
    rank_check(strcmp(idist_device_backend(), w->backend) == 0, "rank %d: %s", number,
               idist_device_backend());
    int32_t *x = device_of(1, 5);
    idist_opts o = opts_of(world);
    rank_ok(number, idist_all_reduce(x, x, 5, IDIST_I32, IDIST_SUM, &o));
    rank_check(first_of(x) == 2, "rank %d: got %d", number, first_of(x));
    cudaFree(x);
    rank_ok(number, idist_finalize());
    return 0;
}

#define BOTH(...)                      \
    {                                  \
        {__VA_ARGS__}, { __VA_ARGS__ } \
    }
static way all_ways[] = {
    {BOTH("FAKE_CUDA_DEVICES", "2"), IDIST_OK, "nccl", NULL, 0},
    {BOTH("FAKE_CUDA_DEVICES", "1"), IDIST_OK, "ipc", NULL, 0},
    {BOTH("FAKE_CUDA_DEVICES", "1", "IDIST_DEVICE_BACKEND", "staged"), IDIST_OK, "staged", NULL, 0},
    {BOTH("FAKE_CUDA_DEVICES", "2", "IDIST_DEVICE_BACKEND", "ipc"), IDIST_OK, "ipc", NULL, 0},
    {BOTH("FAKE_CUDA_DEVICES", "2", "IDIST_DEVICE_BACKEND", "gloo"), IDIST_ERR_ENV, NULL,
     "auto, nccl, ipc, staged", 0},
    {BOTH("FAKE_CUDA_DEVICES", "1", "IDIST_DEVICE_BACKEND", "nccl"), IDIST_ERR_UNSUPPORTED, NULL,
     "share the GPU", 0},
    {{{"FAKE_CUDA_DEVICES", "2", "IDIST_DEVICE_BACKEND", "nccl"}, {"FAKE_CUDA_DEVICES", "2"}},
     IDIST_ERR_ENV,
     NULL,
     "differ in IDIST_DEVICE_BACKEND",
     0},
    {{{"FAKE_CUDA_DEVICES", "2"},
      {"FAKE_CUDA_DEVICES", "2", "IDIST_NCCL_LIB", "/nowhere/libnccl.so.2"}},
     IDIST_OK,
     "ipc",
     NULL,
     0},
    {BOTH("IDIST_DEVICE_BACKEND", "nccl", "IDIST_NCCL_LIB", "/nowhere/libnccl.so.2"),
     IDIST_ERR_NO_DEVICE, NULL, "could not be loaded: /nowhere", 0},
    {{{"FAKE_CUDA_DEVICES", "2"}, {"FAKE_CUDA_DEVICES", "2", "FAKE_NCCL_VERSION", "21805"}},
     IDIST_OK,
     "ipc",
     NULL,
     0},
    {{{"IDIST_DEVICE_BACKEND", "nccl", "FAKE_CUDA_DEVICES", "2"},
      {"IDIST_DEVICE_BACKEND", "nccl", "FAKE_NCCL_VERSION", "21805"}},
     IDIST_ERR_NO_DEVICE,
     NULL,
     "rank 1 has NCCL 21805",
     0},
    {{{"FAKE_CUDA_DEVICES", "2"}, {"FAKE_CUDA_DEVICES", "2", "FAKE_NCCL_FAIL", "2"}},
     IDIST_ERR_DEVICE,
     NULL,
     "ncclCommInitRank",
     0},
    {{{"FAKE_CUDA_DEVICES", "2"}, {"FAKE_CUDA_DEVICES", "2", "FAKE_NCCL_INIT_HANGS", "1"}},
     IDIST_ERR_DEVICE,
     NULL,
     "ncclCommInitRank has not returned after",
     0},
};

static void ways(void) {
    for (size_t i = 0; i < sizeof all_ways / sizeof all_ways[0]; i++) {
        way *w = &all_ways[i];
        tap_running("way %zu", i);
        ranks_reset();
        w->port = free_port();
        procs_run(2, 20000, goes, w);
        ranks_report("%s %s %s %s: %s", w->env[1][0], w->env[1][1],
                     w->env[1][2] ? w->env[1][2] : "", w->env[1][3] ? w->env[1][3] : "",
                     w->text ? w->text : w->backend);
    }
    setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
    fake_set_env("FAKE_NCCL_VERSION", "23003");
    way forced = {BOTH("FAKE_CUDA_DEVICES", "1", "IDIST_DEVICE_BACKEND", "nccl"), IDIST_OK, "nccl",
                  NULL, free_port()};
    ranks_reset();
    procs_run(2, 20000, goes, &forced);
    ranks_report("NCCL 2.30.3 takes two ranks on a GPU where the user says so");
    unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
    fake_set_env("FAKE_NCCL_VERSION", NULL);
}

// NCCL reports that a peer is lost or late. If the peer has died, the host finds out a little
// later, and the error must name the peer. Otherwise the error must be that of NCCL.
typedef struct remote {
    const char *remote; // value of FAKE_NCCL_REMOTE
    bool dies;          // true if rank 1 dies after half a second
    idist_status status;
    int port;
} remote;

static int loses(int number, void *arg) {
    const remote *r = (const remote *)arg;
    idist_desc d = desc_with(NULL, NULL);
    int64_t start;
    int32_t *x;
    idist_opts o = opts_of(NULL);
    idist_status status;
    setenv("FAKE_CUDA_DEVICES", "3", 1);
    d.rank = number;
    d.world_size = 3;
    d.master_addr = "127.0.0.1";
    d.master_port = r->port;
    d.timeout_ms = 10000;
    if (!rank_ok(number, idist_initialize(&d))) return 0;
    fake_set_env("FAKE_NCCL_TIMEOUT_MS", "50");
    fake_set_env("FAKE_NCCL_REMOTE", r->remote);
    x = device_of(1, 5);
    start = tap_now_ms();
    if (number == 1) {
        tap_sleep_ms(r->dies ? 500 : 2500);
        if (r->dies) return 0;
        (void)!idist_all_reduce(x, x, 5, IDIST_I32, IDIST_SUM, &o);
        (void)!idist_finalize();
        return 0;
    }
    o.stream = number == 2 ? new_stream() : NULL;
    for (status = IDIST_OK; status == IDIST_OK && tap_now_ms() - start < 5000; tap_sleep_ms(5))
        status = idist_all_reduce(x, x, 5, IDIST_I32, IDIST_SUM, &o);
    rank_check(status == r->status, "rank %d: %s: %s", number, idist_status_name(status),
               idist_last_error());
    rank_check(strstr(idist_last_error(), r->dies ? "rank 1" : "NCCL") != NULL,
               "rank %d: got \"%s\"", number, idist_last_error());
    rank_check(tap_now_ms() - start < 2500 * test_slow_factor(), "rank %d: %d ms", number,
               (int)(tap_now_ms() - start));
    (void)!idist_finalize();
    return 0;
}

static void remotes(void) {
    static const char *const names[] = {"its network's connection breaks, and rank 1 dies",
                                        "its network's connection breaks",
                                        "it has waited for too long"};
    remote all[] = {{"2", true, IDIST_ERR_PEER_LOST, 0},
                    {"2", false, IDIST_ERR_PEER_LOST, 0},
                    {"0", false, IDIST_ERR_TIMEOUT, 0}};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        tap_running("remote %zu", i);
        ranks_reset();
        all[i].port = free_port();
        procs_run(3, 20000, loses, &all[i]);
        ranks_report("NCCL says: %s", names[i]);
    }
}

// Rank 0 has a call on a stream that waits for rank 1, which dies. Rank 0 then stages its first
// call with rank 2. Staging pins memory, which may wait for the device. Meanwhile another thread of
// idist must notice that rank 1 is dead.
//
// The world has already failed at this point. A rank that ends the world also ends the group of
// ranks 0 and 2, even if the other rank is still copying. Each rank therefore ends the world only
// when both ranks are done.
typedef struct pair {
    int port;
    int *through; // number of ranks that are done; in shared memory
} pair;

static int pins(int number, void *arg) {
    const pair *p = (const pair *)arg;
    idist_desc d = desc_with(NULL, NULL);
    idist_opts o = opts_of(NULL), two = opts_of(NULL);
    int64_t start;
    int32_t *x, word = 0;
    setenv("FAKE_CUDA_DEVICES", "3", 1);
    setenv("FAKE_CUDA_ALLOC_WAITS", "1", 1);
    d.rank = number;
    d.world_size = 3;
    d.master_addr = "127.0.0.1";
    d.master_port = p->port;
    d.timeout_ms = 10000;
    if (!rank_ok(number, idist_initialize(&d))) return 0;
    rank_ok(number, idist_split(NULL, number == 1, number, &two.group));
    x = device_of(1, 5);
    start = tap_now_ms();
    if (number == 1) {
        tap_sleep_ms(300);
        return 0;
    }
    o.stream = new_stream();
    if (number == 0) rank_ok(number, idist_all_reduce(x, x, 5, IDIST_I32, IDIST_SUM, &o));
    rank_ok(number, idist_scan(x + 1, x + 1, 1, IDIST_I32, IDIST_SUM, &two));
    CUDA(cudaStreamSynchronize((cudaStream_t)o.stream));
    if (number == 2) rank_ok(number, idist_recv(&word, 1, IDIST_I32, 0, 1, NULL, &two));
    if (number == 0) rank_ok(number, idist_send(&word, 1, IDIST_I32, 1, 1, &two));
    rank_check(tap_now_ms() - start < 3000 * test_slow_factor(), "rank %d: %d ms", number,
               (int)(tap_now_ms() - start));
    __atomic_add_fetch(p->through, 1, __ATOMIC_ACQ_REL);
    while (__atomic_load_n(p->through, __ATOMIC_ACQUIRE) < 2 &&
           tap_now_ms() - start < 5000 * test_slow_factor())
        tap_sleep_ms(5);
    (void)!idist_finalize();
    return 0;
}

static void pinned(void) {
    pair p = {free_port(), (int *)shared_alloc(sizeof *p.through)};
    tap_running("pinned memory");
    ranks_reset();
    procs_run(3, 8000 * test_slow_factor(), pins, &p);
    munmap(p.through, sizeof *p.through);
    ranks_report("pinning memory beside a call that waits for a dead rank comes back");
}

// Checks the warning of a world that uses less of the machine than it could. The warning must give
// the reason and a remedy. Without a driver or a GPU there must be no warning.
typedef struct quiet {
    const char *env[2][4]; // environment of rank 0 and rank 1: NAME, value, ...
    // Rank 1 uses CUDA and then forks. The child continues as rank 1.
    bool used;
    const char *said[3]; // texts in the warning of rank 1, or none if it must not warn
    int port;
} quiet;

static int says(int number, void *arg) {
    const quiet *q = (const quiet *)arg;
    idist_desc d = desc_with(NULL, NULL);
    float x = 1;
    for (int k = 0; k < 4 && q->env[number][k]; k += 2)
        setenv(q->env[number][k], q->env[number][k + 1], 1);
    if (q->used && number == 1) {
        int n, status;
        pid_t child;
        if (cudaGetDeviceCount(&n) != cudaSuccess) return 1;
        if ((child = fork()) != 0) return waitpid(child, &status, 0) == child ? status != 0 : 2;
    }
    d.rank = number;
    d.world_size = 2;
    d.master_addr = "127.0.0.1";
    d.master_port = q->port;
    d.timeout_ms = 10000;
    d.logger.log_fn = keep_said;
    setenv("IDIST_LOG", "warn", 1);
    if (!rank_ok(number, idist_initialize(&d))) return 0;
    rank_ok(number, idist_all_reduce(&x, &x, 1, IDIST_F32, IDIST_SUM, NULL));
    for (int k = 0; k < 3 && q->said[k] && number == 1; k++)
        rank_check(strstr(said, q->said[k]) != NULL, "no \"%s\" in \"%s\"", q->said[k], said);
    if (!q->said[0] || number == 0) rank_check(!said[0], "rank %d: got \"%s\"", number, said);
    rank_ok(number, idist_finalize());
    return 0;
}

static void warnings(void) {
    quiet all[] = {
        {BOTH("FAKE_CUDA_DEVICES", "-1"), false, {NULL}, 0},
        {BOTH("FAKE_CUDA_DEVICES", "0"), false, {NULL}, 0},
        {BOTH("FAKE_CUDA_DEVICES", "2"), false, {NULL}, 0},
        {BOTH("FAKE_CUDA_DEVICES", "1", "IDIST_NCCL_LIB", "/nowhere/libnccl.so.2"),
         false,
         {NULL},
         0}, // ipc is the best backend
        {BOTH("FAKE_CUDA_DEVICES", "2", "IDIST_DEVICE_BACKEND", "staged"), false, {NULL}, 0},
        {{{"FAKE_CUDA_DEVICES", "2"}, {"IDIST_DEVICE", "cpu"}}, false, {NULL}, 0},
        {{{"FAKE_CUDA_DEVICES", "2"},
          {"FAKE_CUDA_DEVICES", "2", "IDIST_NCCL_LIB", "/nowhere/libnccl.so.2"}},
         false,
         {"/nowhere", "IDIST_NCCL_LIB", "nvidia-nccl"},
         0},
        {{{"FAKE_CUDA_DEVICES", "2"}, {"FAKE_CUDA_DEVICES", "-1"}}, false, {"driver", "cpu"}, 0},
        {{{"FAKE_CUDA_DEVICES", "-1"}, {"FAKE_CUDA_DEVICES", "-2"}},
         false,
         {"CUDA 11.4", "update the driver"},
         0},
        {{{"FAKE_CUDA_DEVICES", "-1"}, {"FAKE_CUDA_DEVICES", "2"}},
         true,
         {"cudaErrorInitializationError", "exec"},
         0},
        {{{"FAKE_CUDA_DEVICES", "-1"},
          {"FAKE_CUDA_DEVICES", "2", "FAKE_CUDA_FAIL", "cudaSetDevice:0:46"}},
         false,
         {"cudaErrorDevicesUnavailable", "nvidia-smi -c 0"},
         0},
        {{{"FAKE_CUDA_DEVICES", "-1"},
          {"FAKE_CUDA_DEVICES", "2", "FAKE_CUDA_FAIL", "cudaGetDeviceCount:0:803"}},
         false,
         {"803", "reboot"},
         0},
        {{{"FAKE_CUDA_DEVICES", "-1"},
          {"FAKE_CUDA_DEVICES", "2", "FAKE_CUDA_FAIL", "cudaGetDeviceCount:0:802"}},
         false,
         {"802", "fabric"},
         0},
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        tap_running("warning %zu", i);
        ranks_reset();
        all[i].port = free_port();
        procs_run(2, 20000, says, &all[i]);
        ranks_report("%s %s: %s", all[i].env[1][0], all[i].env[1][1],
                     all[i].said[0] ? all[i].said[0] : "no warning");
    }
}

// Makes all kinds of calls in a thread of the program that has chosen no device. No call may leave
// a context on device 0, which belongs to rank 0. A context would cost hundreds of MB of memory for
// each such rank.
extern int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active);

typedef struct stranger {
    int number;
    // Calls on the stream use only y and z, because the calls on x do not wait for the stream's
    // work.
    int32_t *x, *y, *z;
    cudaStream_t stream;
} stranger;

static void *calls_as_stranger(void *arg) {
    const stranger *a = (const stranger *)arg;
    idist_opts o = opts_of(NULL), on = on_stream(NULL, a->stream);
    idist_request r = {NULL};
    int32_t host = 1;
    rank_ok(a->number, idist_all_reduce(&host, &host, 1, IDIST_I32, IDIST_SUM, &o));
    rank_ok(a->number, idist_all_reduce(a->x, a->x, 5, IDIST_I32, IDIST_MAX, &o));
    rank_ok(a->number, idist_all_reduce(a->z, a->z, 5, IDIST_I32, IDIST_MAX, &on));
    rank_ok(a->number, idist_all_to_all(a->z, a->y, 1, IDIST_I32, &on));
    rank_ok(a->number, idist_scan(a->x, a->x, 5, IDIST_I32, IDIST_MAX, &o));
    rank_ok(a->number, idist_scan(a->z, a->z, 5, IDIST_I32, IDIST_MAX, &on));
    o.request = &r;
    rank_ok(a->number, idist_all_reduce(a->x, a->x, 5, IDIST_I32, IDIST_MAX, &o));
    rank_ok(a->number, idist_wait_stream(&r, a->stream));
    rank_ok(a->number, idist_all_reduce(a->x, a->x, 5, IDIST_I32, IDIST_MAX, &o));
    rank_ok(a->number, idist_wait(&r));
    rank_ok(a->number, idist_group_begin());
    for (int k = 0; k < 2; k++)
        rank_ok(a->number, idist_all_reduce(a->z, a->z, 5, IDIST_I32, IDIST_MAX, &on));
    rank_ok(a->number, idist_group_end());
    return NULL;
}

static int has_strangers(int number, void *arg) {
    idist_desc d = desc_with(NULL, NULL);
    stranger a;
    pthread_t thread;
    unsigned flags;
    int active = -1, device = -1;
    setenv("FAKE_CUDA_DEVICES", "2", 1);
    d.rank = number;
    d.world_size = 2;
    d.master_addr = "127.0.0.1";
    d.master_port = *(const int *)arg;
    d.timeout_ms = 10000;
    if (!rank_ok(number, idist_initialize(&d))) return 0;
    a.number = number;
    a.x = device_of(1, 5);
    a.y = device_of(1, 5);
    a.z = device_of(1, 5);
    a.stream = new_stream();
    rank_check(pthread_create(&thread, NULL, calls_as_stranger, &a) == 0, "no thread");
    pthread_join(thread, NULL);
    CUDA(cudaStreamSynchronize(a.stream));
    rank_ok(number, idist_finalize());
    if (number == 1) {
        rank_check(cuDevicePrimaryCtxGetState(0, &flags, &active) == 0 && !active,
                   "there is a context on device 0");

        // A thread that has chosen another device keeps its choice.
        CUDA(cudaSetDevice(0));
    }
    d.master_port = ((const int *)arg)[1];
    rank_ok(number, idist_initialize(&d));
    CUDA(cudaSetDevice(1 - number));
    rank_ok(number, idist_all_reduce(a.x, a.x, 5, IDIST_I32, IDIST_MAX, NULL));
    CUDA(cudaGetDevice(&device));
    if (number == 1) rank_check(device == 0, "rank %d: on device %d", number, device);
    rank_ok(number, idist_finalize());
    return 0;
}

static void strangers(void) {
    int ports[2] = {free_port(), free_port()};
    tap_running("threads without a device");
    ranks_reset();
    procs_run(2, 20000, has_strangers, ports);
    ranks_report("a thread that has chosen no device leaves no context on device 0");
}

// Checks that idist's own streams have the requested priority, set in idist_desc or in the
// environment.
typedef struct wish {
    const char *environment;
    bool desc, high;
    int port;
} wish;

static int has_priority(int number, void *arg) {
    const wish *p = (const wish *)arg;
    idist_desc d = desc_with(NULL, NULL);
    idist_group *half = NULL;
    idist_opts o = opts_of(NULL);
    int least, greatest;
    int32_t *x;
    setenv("FAKE_CUDA_DEVICES", "2", 1);
    if (p->environment) setenv("IDIST_HIGH_PRIORITY_STREAM", p->environment, 1);
    d.rank = number;
    d.world_size = 2;
    d.master_addr = "127.0.0.1";
    d.master_port = p->port;
    d.timeout_ms = 10000;
    d.high_priority_stream = p->desc;
    if (!rank_ok(number, idist_initialize(&d))) return 0;
    rank_ok(number, idist_split(NULL, 0, number, &half));
    x = device_of(1, 5);
    o.group = half;
    rank_ok(number, idist_all_reduce(x, x, 5, IDIST_I32, IDIST_SUM, &o));
    CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    rank_check(fake_count_streams(greatest) == (p->high ? 6 : 0), "rank %d: %d", number,
               fake_count_streams(greatest));
    rank_check(fake_count_streams(least) == (p->high ? 0 : 6), "rank %d: %d", number,
               fake_count_streams(least));
    cudaFree(x);
    rank_ok(number, idist_finalize());
    return 0;
}

static void priorities(void) {
    wish all[] = {{NULL, false, false, 0},
                  {NULL, true, true, 0},
                  {"1", false, true, 0},
                  {"0", false, false, 0}};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        tap_running("priority %zu", i);
        ranks_reset();
        all[i].port = free_port();
        procs_run(2, 20000, has_priority, &all[i]);
        ranks_report("streams of %s priority: desc %d, environment %s",
                     all[i].high ? "high" : "usual", all[i].desc,
                     all[i].environment ? all[i].environment : "without");
    }
}

// Allocates pinned memory in a thread that has chosen no device. Frees the memory in another
// thread, once while a world exists and once after the end of the world.
typedef struct pinning {
    idist_allocator from;
    void *p[2];
} pinning;

static void *pins_memory(void *arg) {
    pinning *a = (pinning *)arg;
    for (int k = 0; k < 2; k++) a->p[k] = a->from.alloc_fn(1000, a->from.user);
    return NULL;
}

static void *frees_pinned(void *arg) {
    const pinning *a = (const pinning *)arg;
    a->from.free_fn(a->p[0], a->from.user);
    return NULL;
}

static void *frees_it_late(void *arg) {
    const pinning *a = (const pinning *)arg;
    a->from.free_fn(a->p[1], a->from.user);
    return NULL;
}

static int count_contexts(void) {
    unsigned flags;
    int n = 0, devices = 0;
    CUDA(cudaGetDeviceCount(&devices));
    for (int k = 0; k < devices; k++) {
        int active = 0;
        rank_check(cuDevicePrimaryCtxGetState(k, &flags, &active) == 0, "no state");
        n += active;
    }
    return n;
}

static void in_a_thread(void *(*work)(void *arg), void *arg, int number, const char *what) {
    pthread_t thread;
    rank_check(pthread_create(&thread, NULL, work, arg) == 0, "no thread");
    pthread_join(thread, NULL);
    int n = count_contexts();
    rank_check(n == 1, "rank %d: %d contexts when a thread had %s", number, n, what);
}

static int pins_as_stranger(int number, void *arg) {
    idist_desc d = desc_with(NULL, NULL);
    pinning a = {idist_pinned_allocator(), {NULL, NULL}};
    int device = -1;
    setenv("FAKE_CUDA_DEVICES", "2", 1);
    d.rank = number;
    d.world_size = 2;
    d.master_addr = "127.0.0.1";
    d.master_port = *(const int *)arg;
    d.timeout_ms = 10000;
    if (!rank_ok(number, idist_initialize(&d))) return 0;
    in_a_thread(pins_memory, &a, number, "pinned memory");
    rank_check(a.p[0] && a.p[1], "rank %d: no memory", number);
    in_a_thread(frees_pinned, &a, number, "freed it");
    rank_ok(number, idist_finalize());
    in_a_thread(frees_it_late, &a, number, "freed it when the world was gone");

    // A thread that has chosen another device keeps its choice.
    CUDA(cudaSetDevice(1 - number));
    void *p = a.from.alloc_fn(1000, a.from.user);
    CUDA(cudaGetDevice(&device));
    rank_check(p && device == 1 - number, "rank %d: on device %d", number, device);
    a.from.free_fn(p, a.from.user);

    // An allocation that fails returns NULL. The allocation leaves no error that the program's next
    // check of a kernel would find.
    p = a.from.alloc_fn((size_t)1 << 41, a.from.user);
    rank_check(!p && cudaGetLastError() == cudaSuccess, "rank %d: the last error stays", number);
    return 0;
}

static void pinning_strangers(void) {
    int port = free_port();
    tap_running("pinned memory in threads without a device");
    ranks_reset();
    procs_run(2, 20000, pins_as_stranger, &port);
    ranks_report("to pin and free memory makes no context in a thread that has chosen no device");
}

// Checks on rank `number` of three whether NCCL sums 8-bit floats, or whether the call is staged.
// The sum 2^(bits of the fraction + 1) + 1 + 1 shows which: NCCL rounds it twice, and a staged call
// rounds it once.
typedef struct eight {
    const char *env[3][4]; // environment of each rank: NAME, value, ...
    bool served;
    int port;
} eight;

static int adds_up(int number, void *arg) {
    const eight *e = (const eight *)arg;
    static const struct {
        idist_dtype dtype;
        // First the values 2^(bits of the fraction + 1), 1 and 2^(bits of the fraction + 1) / 2.
        // Then the sums, rounded by NCCL and rounded once.
        unsigned char big, one, half_of, by_nccl, once;
    } types[2] = {{IDIST_F8E4M3, 0x58, 0x38, 0x50, 0x58, 0x59},
                  {IDIST_F8E5M2, 0x48, 0x3c, 0x44, 0x48, 0x49}};
    cudaStream_t s;
    idist_op twice;
    idist_desc d = desc_with(NULL, NULL);
    for (int k = 0; k < 4 && e->env[number][k]; k += 2)
        setenv(e->env[number][k], e->env[number][k + 1], 1);
    d.rank = number;
    d.world_size = 3;
    d.master_addr = "127.0.0.1";
    d.master_port = e->port;
    if (!rank_ok(number, idist_initialize(&d))) return 0;
    rank_check(strcmp(idist_device_backend(), "nccl") == 0, "rank %d: %s", number,
               idist_device_backend());
    rank_ok(number, idist_op_create_premul_sum(number ? 1.0 : 2.0, NULL, &twice));
    s = new_stream();
    for (int k = 0; k < 2; k++) {
        unsigned char host[6] = {0}, want = e->served ? types[k].by_nccl : types[k].once, *x;
        idist_opts o = on_stream(NULL, s);
        host[0] = host[1] = number ? types[k].one : types[k].big;
        host[2] = number ? types[k].one : types[k].half_of;
        CUDA(cudaMalloc((void **)&x, sizeof host));
        CUDA(cudaMemcpy(x, host, sizeof host, cudaMemcpyHostToDevice));
        CUDA(cudaStreamSynchronize(cudaStreamLegacy));
        rank_ok(number, idist_all_reduce(x, x, 1, types[k].dtype, IDIST_SUM, NULL));
        rank_ok(number, idist_all_reduce(x + 1, x + 1, 1, types[k].dtype, IDIST_SUM, &o));
        rank_ok(number, idist_all_reduce(x + 2, x + 2, 1, types[k].dtype, twice, &o));
        // Every version of NCCL can move bytes.
        rank_ok(number, idist_all_gather(x + 3 + number, x + 3, 1, types[k].dtype, &o));
        CUDA(cudaStreamSynchronize(s));
        CUDA(cudaMemcpy(host, x, sizeof host, cudaMemcpyDeviceToHost));
        for (int i = 0; i < 3; i++)
            rank_check(host[i] == want, "rank %d: %s: sum %d is %02x, not %02x", number,
                       idist_dtype_name(types[k].dtype), i, host[i], want);
        cudaFree(x);
    }
    cudaStreamDestroy(s);
    rank_ok(number, idist_op_free(twice, NULL));
    rank_ok(number, idist_finalize());
    return 0;
}

static void eights(void) {
    eight all[] = {{{{NULL}}, true, 0},
                   {{{"FAKE_NCCL_VERSION", "22400"},
                     {"FAKE_NCCL_VERSION", "22400"},
                     {"FAKE_NCCL_VERSION", "22400"}},
                    true,
                    0},
                   {{{"FAKE_NCCL_VERSION", "22304"},
                     {"FAKE_NCCL_VERSION", "22304"},
                     {"FAKE_NCCL_VERSION", "22304"}},
                    false,
                    0},
                   {{{NULL}, {"FAKE_CUDA_CAPABILITY", "8"}}, false, 0},
                   {{{"FAKE_CUDA_CAPABILITY", "8"},
                     {"FAKE_CUDA_CAPABILITY", "12"},
                     {"FAKE_CUDA_CAPABILITY", "9"}},
                    false,
                    0},
                   {{{"FAKE_CUDA_CAPABILITY", "10"},
                     {"FAKE_CUDA_CAPABILITY", "12"},
                     {"FAKE_CUDA_CAPABILITY", "9"}},
                    true,
                    0}};
    setenv("FAKE_CUDA_DEVICES", "3", 1);
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        tap_running("8-bit floats %zu", i);
        ranks_reset();
        all[i].port = free_port();
        procs_run(3, 20000, adds_up, &all[i]);
        ranks_report("8-bit floats, rank 1 with %s %s: %s",
                     all[i].env[1][0] ? all[i].env[1][0] : "nothing",
                     all[i].env[1][0] ? all[i].env[1][1] : "",
                     all[i].served ? "NCCL adds them up" : "staged");
    }
}

// Passes a communicator that the program has made, with ranks that are threads. idist must use the
// communicator and must not free it.
static void adopts(idist_group *world, int rank, int n, void *arg) {
    ncclComm_t comm = ((ncclComm_t *)arg)[rank];
    int32_t *x = device_of(1, 1);
    idist_opts o = opts_of(world);
    rank_check((ncclComm_t)idist_nccl_comm(world) == comm, "rank %d: another one", rank);
    rank_ok(rank, idist_all_reduce(x, x, 1, IDIST_I32, IDIST_SUM, &o));
    rank_check(first_of(x) == n, "rank %d: got %d", rank, first_of(x));
    cudaFree(x);
}

typedef struct adopter {
    int rank, n;
    ncclUniqueId id;
    idist_store *store;
    ncclComm_t comm;
} adopter;

static void *adopt(void *arg) {
    adopter *a = (adopter *)arg;
    idist_group *world = NULL;
    idist_desc d = desc_with(NULL, NULL);
    ncclComm_t comms[2];
    cudaSetDevice(a->rank);
    rank_check(ncclCommInitRank(&a->comm, a->n, a->id, a->rank) == ncclSuccess,
               "rank %d: no communicator", a->rank);
    d.rank = a->rank;
    d.world_size = a->n;
    d.store = a->store;
    d.nccl_comm = &a->comm;
    d.timeout_ms = d.init_timeout_ms = 10000;
    comms[a->rank] = a->comm;
    if (!rank_ok(a->rank, idist_open(&d, &world))) return NULL;
    adopts(world, a->rank, a->n, comms);
    rank_ok(a->rank, idist_close(&world));
    int count = 0;
    rank_check(ncclCommCount(a->comm, &count) == ncclSuccess && count == a->n,
               "rank %d: it is gone", a->rank);
    rank_check(ncclCommDestroy(a->comm) == ncclSuccess, "rank %d: destroy", a->rank);
    return NULL;
}

static void adopted(void) {
    adopter a[2];
    pthread_t t[2];
    memset(a, 0, sizeof a);
    tap_running("adopted");
    ranks_reset();
    TAP_REQUIRE(ncclGetUniqueId(&a[0].id) == ncclSuccess);
    TAP_REQUIRE(idist_store_open("mem://", NULL, &a[0].store) == IDIST_OK);
    for (int k = 0; k < 2; k++) {
        a[k].rank = k;
        a[k].n = 2;
        a[k].id = a[0].id;
        a[k].store = a[0].store;
        TAP_REQUIRE(pthread_create(&t[k], NULL, adopt, &a[k]) == 0);
    }
    for (int k = 0; k < 2; k++) pthread_join(t[k], NULL);
    idist_store_close(&a[0].store);
    ranks_report("a communicator of the program's is taken, and left to it");
}

// Clears the program's NCCL configuration before groups are created. idist must no longer need the
// configuration.
static void forgets_config(idist_group *world, int rank, int n, void *arg) {
    int32_t *x = device_of(1, 1);
    idist_opts o = opts_of(world);
    idist_group *all = NULL;
    rank_ok(rank, idist_barrier(&o));
    if (rank == 0) memset(arg, 0, sizeof(ncclConfig_t));
    rank_ok(rank, idist_barrier(&o));
    if (!rank_ok(rank, idist_split(world, 0, rank, &all))) return;
    o.group = all;
    rank_ok(rank, idist_all_reduce(x, x, 1, IDIST_I32, IDIST_SUM, &o));
    rank_check(first_of(x) == n, "rank %d: got %d", rank, first_of(x));
    rank_ok(rank, idist_free_group(&all));
    cudaFree(x);
}

static void forgotten_config(void) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    idist_desc d = desc_with(NULL, NULL);
    config.blocking = 0;
    d.nccl_config = &config;
    ranks_case(2, &d, forgets_config, &config, "desc.nccl_config is gone when groups are made");
}

// Makes calls while another thread captures a stream in the mode that forbids unsafe calls in all
// threads.
static void beside_capture(idist_group *world, int rank, int n, void *arg) {
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    (void)arg;
    CUDA(cudaThreadExchangeStreamCaptureMode(&mode)); // for the test's own calls
    int32_t *x = device_of(1, 1);
    CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
    idist_opts o = opts_of(world);
    rank_check(idist_nccl_comm(world) != NULL, "rank %d: no NCCL", rank);
    rank_ok(rank, idist_all_reduce(x, x, 1, IDIST_I32, IDIST_SUM, &o));
    rank_ok(rank, idist_scan(x, x, 1, IDIST_I32, IDIST_MAX, &o));
    CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
    rank_check(first_of(x) == n, "rank %d: got %d", rank, first_of(x));
    cudaFree(x);
    CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
}

static void captures_beside(void) {
    cudaStream_t s = new_stream();
    cudaGraph_t graph = NULL;
    tap_running("a world is opened while another thread captures");
    ranks_reset();
    CUDA(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    ranks_threads(2, NULL, beside_capture, NULL);
    CUDA(cudaStreamEndCapture(s, &graph));
    if (graph) CUDA(cudaGraphDestroy(graph));
    cudaStreamDestroy(s);
    ranks_report("a world is opened, used and closed while another thread captures a stream");
}

int main(void) {
    // Each version behaves like all later versions up to the next one.
    static const char *const versions[] = {"21403", "22806", "22809"};
    bool plain = true, sized = false;
    tap_deadline(140);
    ways(); // first, because it forks, and a process that has used CUDA must not fork
    eights();
    remotes();
    pinned();
    warnings();
    strangers();
    pinning_strangers();
    priorities();
    setenv("FAKE_CUDA_DEVICES", "8", 1);
    adopted();
    forgotten_config();
    captures_beside();
    for (int n = 1; n <= 4; n++) {
        if (n > 1) ranks_case(n, NULL, runs_ahead, NULL, "a rank runs ahead, %d ranks", n);
        if (n > 1)
            ranks_case(n, NULL, runs_ahead_of_all, NULL,
                       "a rank runs ahead, every collective, %d ranks", n);
        if (n > 1)
            ranks_case(n, NULL, messages_run_ahead, NULL,
                       "messages run ahead of their pair, %d ranks", n);
        ranks_case(n, NULL, in_place, NULL, "all_to_all in place, %d ranks", n);
        ranks_case(n, NULL, messages, NULL, "messages on a stream, %d ranks", n);
        ranks_case(n, NULL, groups, NULL, "groups, %d ranks", n);
        ranks_case(n, NULL, in_turn, NULL, "all kinds of calls in turn, %d ranks", n);
        ranks_case(n, NULL, held_back, NULL, "what group_begin holds back, %d ranks", n);
        ranks_case(n, NULL, crosswise, NULL, "requests in both directions, %d ranks", n);
    }
    for (int n = 2; n <= 4; n++) {
        ranks_case_fault(n, NULL, enqueued_mismatch, NULL,
                         "calls on a stream that differ, %d ranks", n);
        ranks_case_fault(n, NULL, enqueued_late, NULL,
                         "a rank does not come to a call on a stream, %d ranks", n);
    }
    for (size_t i = 0; i < sizeof versions / sizeof versions[0]; i++) {
        fake_set_env("FAKE_NCCL_VERSION", versions[i]);
        ranks_case_fault(3, NULL, stuck_inside, NULL, "a rank waits inside NCCL %s", versions[i]);
        ranks_case(3, NULL, runs_ahead, NULL, "a rank runs ahead, NCCL %s", versions[i]);
        with_live_graph(versions[i]);
    }
    ranks_case_fault(2, NULL, other_message, &sized,
                     "a message on a stream met one of another size");
    ranks_case_fault(2, NULL, other_message, &plain,
                     "a message on a stream met a receive that is not on one");
    return tap_done();
}
