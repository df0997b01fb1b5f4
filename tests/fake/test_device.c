// test_device: tests idist with device memory beyond the calls themselves: streams, requests,
// order, errors, and ranks without a device. Runs on the CUDA runtime or its stand-in, whose
// operations take some time (FAKE_CUDA_DELAY_US).
#include "idist_nccl.h"

#include <cuda_runtime_api.h>

#include "ranks.h"

#define CUDA(call) rank_check((call) == cudaSuccess, "%s", #call)

static int32_t *device_of(const int32_t *values, size_t count) {
    int32_t *p = NULL;
    CUDA(cudaMalloc((void **)&p, count * sizeof *p));
    if (values) CUDA(cudaMemcpy(p, values, count * sizeof *p, cudaMemcpyHostToDevice));
    // A copy from pageable memory may still be in progress.
    CUDA(cudaStreamSynchronize(cudaStreamLegacy));
    return p;
}

static int32_t first_of(const int32_t *device) {
    int32_t x = -1;
    CUDA(cudaMemcpy(&x, device, sizeof x, cudaMemcpyDeviceToHost));
    return x;
}

static idist_opts on_stream(idist_group *g, cudaStream_t stream) {
    idist_opts o = opts_of(g);
    o.stream = stream;
    return o;
}

// Makes calls on a stream without any synchronization. A call must see the stream's earlier work,
// and later work must see the call's result.
static void streams(idist_group *world, int rank, int n, void *arg) {
    enum { COUNT = 1000 };
    cudaStream_t stream = NULL;
    int32_t *x = device_of(NULL, COUNT), *y = NULL;
    (void)arg;
    CUDA(cudaMallocHost((void **)&y, COUNT * sizeof *y));
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (int turn = 1; turn <= 5; turn++) {
        idist_opts o = on_stream(world, stream);
        CUDA(cudaMemsetAsync(x, turn + rank, COUNT * sizeof *x, stream));
        rank_ok(rank, idist_all_reduce(x, x, COUNT, IDIST_I32, IDIST_MAX, &o));
        CUDA(cudaMemcpyAsync(y, x, COUNT * sizeof *y, cudaMemcpyDeviceToHost, stream));
        CUDA(cudaStreamSynchronize(stream));
        int32_t want = 0x01010101 * (turn + n - 1);
        rank_check(y[0] == want && y[COUNT - 1] == want, "rank %d turn %d: got %x expected %x",
                   rank, turn, y[0], want);
    }
    cudaFreeHost(y);
    cudaFree(x);
    cudaStreamDestroy(stream);
}

// Has many requests in flight, every third one on host memory and the others on device memory. Each
// request must get its own result.
static void in_flight(idist_group *world, int rank, int n, void *arg) {
    enum { K = 12, COUNT = 5000 };
    int32_t *x[K];
    idist_request r[K];
    int32_t *host = (int32_t *)malloc(COUNT * sizeof *host);
    (void)arg;
    memset(r, 0, sizeof r);
    for (int k = 0; k < K; k++) {
        idist_opts o = opts_async(world, &r[k]);
        for (int i = 0; i < COUNT; i++) host[i] = 100 * k + rank;
        if (k % 3 == 2) {
            x[k] = (int32_t *)malloc(COUNT * sizeof *host);
            memcpy(x[k], host, COUNT * sizeof *host);
        } else {
            x[k] = device_of(host, COUNT);
        }
        rank_ok(rank, idist_all_reduce(x[k], x[k], COUNT, IDIST_I32, IDIST_SUM, &o));
    }
    for (int k = 0; k < K; k++) {
        size_t index = K;
        rank_ok(rank, idist_wait_any(r, K, &index));
        if (index >= K) break;
        int32_t got = index % 3 == 2 ? x[index][0] : first_of(x[index]),
                want = n * 100 * (int)index + n * (n - 1) / 2;
        rank_check(got == want, "rank %d: call %zu: got %d expected %d", rank, index, got, want);
    }
    for (int k = 0; k < K; k++) {
        if (k % 3 == 2) free(x[k]);
        else cudaFree(x[k]);
    }
    free(host);
}

// Sends messages alternately from host and device memory. The messages must arrive in the order of
// the sends.
static void messages_in_order(idist_group *world, int rank, int n, void *arg) {
    enum { K = 10 };
    idist_opts o = opts_of(world);
    (void)n;
    (void)arg;
    for (int32_t k = 0; k < K && rank < 2; k++) {
        int32_t *x = k % 2 ? device_of(&k, 1) : &k, y = -1, *z = k % 3 ? device_of(&y, 1) : &y;
        if (rank == 0) rank_ok(rank, idist_send(x, 1, IDIST_I32, 1, 3, &o));
        if (rank == 1) rank_ok(rank, idist_recv(z, 1, IDIST_I32, 0, 3, NULL, &o));
        if (rank == 1)
            rank_check((k % 3 ? first_of(z) : y) == k, "message %d: got %d", k,
                       k % 3 ? first_of(z) : y);
        if (k % 2) cudaFree(x);
        if (k % 3) cudaFree(z);
    }
}

// Starts a send from device memory, which waits for a copy, and then a send from host memory to the
// same peer. The second message must not overtake the first message.
static void requests_in_order(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    (void)n;
    (void)arg;
    for (int32_t k = 0; k < 20; k += 2) {
        int32_t *x = device_of(&k, 1), host = k + 1, got = -1;
        if (rank == 0) {
            idist_request r[2];
            idist_opts first = opts_async(world, &r[0]), second = opts_async(world, &r[1]);
            rank_ok(rank, idist_send(x, 1, IDIST_I32, 1, 3, &first));
            rank_ok(rank, idist_send(&host, 1, IDIST_I32, 1, 3, &second));
            rank_ok(rank, idist_wait_all(r, 2));
        }
        for (int i = 0; i < 2 && rank == 1; i++) {
            rank_ok(rank, idist_recv(&got, 1, IDIST_I32, 0, 3, NULL, &o));
            rank_check(got == k + i, "message %d: got %d", k + i, got);
        }
        cudaFree(x);
    }
}

// Passes host memory on one rank and device memory on the other ranks. This must work for a
// message, and must be an error for a collective.
static void mixed(idist_group *world, int rank, int n, void *arg) {
    int32_t host = 10 + rank, other = -1, *x = rank == n - 1 ? &host : device_of(&host, 1);
    idist_opts o = opts_of(world);
    (void)arg;
    if (rank == n - 2) rank_ok(rank, idist_send(x, 1, IDIST_I32, n - 1, 1, &o));
    if (rank == n - 1) rank_ok(rank, idist_recv(&other, 1, IDIST_I32, n - 2, 1, NULL, &o));
    if (rank == n - 1) rank_check(other == 10 + n - 2, "got %d", other);
    // Ranks that complete the barrier early may already fail in the next call.
    (void)!idist_barrier(&o);
    rank_is(rank, idist_all_reduce(x, x, 1, IDIST_I32, IDIST_SUM, &o), IDIST_ERR_MISMATCH);
    rank_check(strstr(idist_last_error(), "memory differs") != NULL, "got \"%s\"",
               idist_last_error());
    if (x != &host) cudaFree(x);
}

static void mixed_buffers(idist_group *world, int rank, int n, void *arg) {
    int32_t from = 5 + rank, *y = device_of(&from, 1);
    idist_opts o = opts_of(world);
    (void)arg;
    rank_is(rank, idist_all_reduce(&from, y, 1, IDIST_I32, IDIST_MAX, &o), IDIST_ERR_ARG);
    rank_is(rank, idist_all_reduce(y, &from, 1, IDIST_I32, IDIST_SUM, &o), IDIST_ERR_ARG);
    rank_ok(rank, idist_all_reduce(y, y, 1, IDIST_I32, IDIST_MAX, &o));
    size_t nbytes = 4;
    rank_ok(rank, idist_broadcast_bytes(y, 4, &nbytes, 0, &o));
    rank_check(nbytes == 4 && first_of(y) == 5 + n - 1, "rank %d: got %d", rank, first_of(y));
    cudaFree(y);
}

// Sends messages to this rank itself, for which the backend matches receives with sends
// immediately.
static void to_itself(idist_group *world, int rank, int n, void *arg) {
    int32_t value = 31 + rank, none = -1, *x = device_of(&value, 1), *y = device_of(&none, 1);
    idist_request r[2] = {{NULL}, {NULL}};
    (void)n;
    (void)arg;
    for (int turn = 0; turn < 20; turn++) {
        idist_opts s = opts_async(world, &r[0]), v = opts_async(world, &r[1]);
        CUDA(cudaMemcpy(y, &none, sizeof none, cudaMemcpyHostToDevice));
        rank_ok(rank, idist_send(x, 1, IDIST_I32, rank, turn, &s));
        rank_ok(rank, idist_recv(y, 1, IDIST_I32, rank, turn, NULL, &v));
        rank_ok(rank, idist_wait_all(r, 2));
        rank_check(first_of(y) == value, "turn %d: got %d", turn, first_of(y));
    }
    cudaFree(x);
    cudaFree(y);
}

// Makes calls on a stream, some without data: a scatterv with empty parts, a barrier, and a
// sendrecv around the ring of ranks.
static void streams_without_data(idist_group *world, int rank, int n, void *arg) {
    cudaStream_t stream = NULL;
    size_t counts[RANKS_MAX];
    int32_t values[2] = {4, 5}, *x = device_of(values, 2), *y = device_of(values, 2);
    (void)arg;
    for (int k = 0; k < n; k++) counts[k] = k == 0 ? 2 : 0;
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    idist_opts o = on_stream(world, stream);
    rank_ok(rank, idist_scatterv(x, counts, NULL, rank ? NULL : y, counts[rank], IDIST_I32, 0, &o));
    rank_ok(rank, idist_barrier(&o));
    rank_ok(rank, idist_sendrecv(x, 2, (rank + 1) % n, 1, y, 2, (rank + n - 1) % n, 1, IDIST_I32,
                                 NULL, &o));
    CUDA(cudaStreamSynchronize(stream));
    rank_check(first_of(y) == 4, "rank %d: got %d", rank, first_of(y));
    idist_status s = idist_sendrecv(values, 2, (rank + 1) % n, 1, y, 2, (rank + n - 1) % n, 1,
                                    IDIST_I32, NULL, &o);
    rank_check(s == IDIST_ERR_ARG, "host memory with a stream: got %s", idist_status_name(s));
    cudaStreamDestroy(stream);
    cudaFree(x);
    cudaFree(y);
}

static void largest(const void *in, void *inout, size_t count, idist_dtype dtype, void *arg) {
    const int32_t *a = (const int32_t *)in;
    int32_t *b = (int32_t *)inout;
    (void)dtype;
    (void)arg;
    for (size_t i = 0; i < count; i++)
        if (a[i] > b[i]) b[i] = a[i];
}

static void spoils(const void *in, void *inout, size_t count, idist_dtype dtype, void *arg) {
    int32_t *b = (int32_t *)inout;
    (void)in;
    (void)dtype;
    (void)arg;
    for (size_t i = 0; i < count; i++) b[i] = -99;
}

// Frees a user-defined op while the call still waits for its copies. The call must complete.
static void freed_op(idist_group *world, int rank, int n, void *arg) {
    int32_t value = rank, *x = device_of(&value, 1);
    idist_request r = {NULL};
    idist_opts o = opts_async(world, &r);
    idist_request host_request = {NULL};
    idist_opts host_opts = opts_async(world, &host_request);
    idist_op op = IDIST_SUM, next = IDIST_SUM;
    int32_t host = rank, most = -1;
    (void)arg;
    rank_ok(rank, idist_op_create(largest, NULL, true, world, &op));
    rank_ok(rank, idist_all_reduce(x, x, 1, IDIST_I32, op, &o));
    rank_ok(rank, idist_all_reduce(&host, &most, 1, IDIST_I32, op, &host_opts));
    rank_ok(rank, idist_op_free(op, world));
    rank_ok(rank, idist_op_create(spoils, NULL, true, world, &next)); // gets the number of `op`
    rank_ok(rank, idist_wait(&r));
    rank_ok(rank, idist_wait(&host_request));
    rank_check(first_of(x) == n - 1, "rank %d: got %d", rank, first_of(x));
    rank_check(most == n - 1, "rank %d: on the host: got %d", rank, (int)most);
    rank_ok(rank, idist_op_free(next, world));
    cudaFree(x);
}

// Sets a time-out that is shorter than the stream's pending work takes. The error must name this
// rank itself.
static void late_stream(idist_group *world, int rank, int n, void *arg) {
    cudaStream_t stream = NULL;
    int32_t *x = device_of(NULL, 1);
    idist_request r = {NULL};
    (void)n;
    (void)arg;
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    idist_opts o = on_stream(world, stream);
    o.request = &r;
    for (int i = 0; i < 2000; i++) CUDA(cudaMemsetAsync(x, i, sizeof *x, stream)); // 300 us each
    o.timeout_ms = 100;
    int64_t start = tap_now_ms();
    rank_ok(rank, idist_all_reduce(x, x, 1, IDIST_I32, IDIST_SUM, &o));
    rank_is(rank, idist_wait(&r), IDIST_ERR_TIMEOUT);
    rank_check(strstr(idist_last_error(), "itself") != NULL, "got \"%s\"", idist_last_error());
    rank_check(tap_now_ms() - start < 400 * test_slow_factor(), "after %d ms",
               (int)(tap_now_ms() - start));
    CUDA(cudaStreamSynchronize(stream));
    cudaStreamDestroy(stream);
    cudaFree(x);
}

// Makes wrong calls on one rank. The errors must be reported on that rank and must not break the
// world.
static void local_errors(idist_group *world, int rank, int n, void *arg) {
    int32_t host = 1, *x = device_of(&host, 1);
    cudaStream_t stream = NULL;
    cudaGraph_t graph = NULL;
    (void)arg;
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    idist_opts o = opts_of(world), s = on_stream(world, stream);
    rank_is(rank, idist_all_reduce(&host, &host, 1, IDIST_I32, IDIST_SUM, &s), IDIST_ERR_ARG);
    s.stream = cudaStreamPerThread;
    rank_is(rank, idist_all_reduce(x, x, 1, IDIST_I32, IDIST_SUM, &s), IDIST_ERR_UNSUPPORTED);
    s.stream = stream;
    if (cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess) {
        rank_is(rank, idist_scan(x, x, 1, IDIST_I32, IDIST_SUM, &s), IDIST_ERR_UNSUPPORTED);
        CUDA(cudaStreamEndCapture(stream, &graph));
        cudaGraphDestroy(graph);
    }
    rank_ok(rank, idist_all_reduce(x, x, 1, IDIST_I32, IDIST_SUM, &o));
    rank_check(first_of(x) == n, "rank %d: got %d", rank, first_of(x));
    cudaStreamDestroy(stream);
    cudaFree(x);
}

// Makes receives fail. A failed receive must leave the buffer unchanged, and a message that does
// not fit must remain for another receive.
static void receives(idist_group *world, int rank, int n, void *arg) {
    int32_t host[3] = {7, 8, 9}, *x = device_of(host, 3);
    idist_recv_info info = {-1, -1, 0, IDIST_I8};
    idist_opts o = opts_of(world);
    (void)n;
    (void)arg;
    if (rank == 1) {
        o.timeout_ms = 50;
        rank_is(rank, idist_recv(x, 3, IDIST_I32, 0, 77, NULL, &o), IDIST_ERR_TIMEOUT);
        rank_check(first_of(x) == 7, "touched: %d", first_of(x));
        o.timeout_ms = 0;
        rank_is(rank, idist_recv(x, 1, IDIST_I32, 0, 5, NULL, &o), IDIST_ERR_TRUNCATED);
        rank_check(first_of(x) == 7, "touched: %d", first_of(x));
        rank_is(rank, idist_recv(x, 3, IDIST_F32, IDIST_ANY_SOURCE, 5, &info, &o),
                IDIST_ERR_MISMATCH);
        rank_check(info.source == 0 && info.tag == 5 && info.count == 2 && info.dtype == IDIST_I32,
                   "got %d, %d, %zu, %s", info.source, info.tag, info.count,
                   idist_dtype_name(info.dtype));
        info.count = 0;
        rank_ok(rank, idist_recv(x, 3, IDIST_I32, 0, 5, &info, &o));
        CUDA(cudaMemcpy(host, x, sizeof host, cudaMemcpyDeviceToHost));
        rank_check(info.count == 2 && host[0] == 1 && host[1] == 2 && host[2] == 9,
                   "got %zu: %d %d %d", info.count, host[0], host[1], host[2]);
    } else if (rank == 0) {
        int32_t two[2] = {1, 2}, *y = device_of(two, 2);
        rank_ok(rank, idist_send(y, 2, IDIST_I32, 1, 5, &o));
        cudaFree(y);
    }
    cudaFree(x);
}

// Cancels receives. A receive into device memory must not be canceled, and the caller must learn
// this. A receive into host memory must be canceled.
static void cancelled(idist_group *world, int rank, int n, void *arg) {
    int32_t host[1] = {7}, *x = device_of(host, 1), y = 5;
    idist_request r[2] = {{NULL}, {NULL}};
    idist_opts o = opts_of(world), a = opts_async(world, &r[0]), b = opts_async(world, &r[1]);
    bool is_cancelled = true;
    (void)n;
    (void)arg;
    if (rank == 1) {
        rank_ok(rank, idist_recv(x, 1, IDIST_I32, 0, 6, NULL, &a));
        rank_is(rank, idist_cancel(&r[0], &is_cancelled), IDIST_ERR_UNSUPPORTED);
        rank_check(!is_cancelled && strstr(idist_last_error(), "device memory"), "got \"%s\"",
                   idist_last_error());
        rank_ok(rank, idist_recv(&y, 1, IDIST_I32, 0, 7, NULL, &b));
        rank_ok(rank, idist_cancel(&r[1], &is_cancelled));
        rank_check(is_cancelled, "host memory");
        rank_is(rank, idist_wait(&r[1]), IDIST_ERR_CANCELLED);
    }
    rank_ok(rank, idist_barrier(&o));
    if (rank == 0) rank_ok(rank, idist_send(x, 1, IDIST_I32, 1, 6, &o));
    rank_ok(rank, idist_wait(&r[0]));
    rank_check(first_of(x) == 7 && y == 5, "rank %d: got %d, %d", rank, first_of(x), y);
    cudaFree(x);
}

// Receives matched messages into device memory. A message that does not fit must stay in its
// idist_message.
static void matched(idist_group *world, int rank, int n, void *arg) {
    int32_t host[3] = {7, 8, 9}, *x = device_of(host, 3);
    idist_opts o = opts_of(world);
    idist_request request = {NULL};
    idist_opts a = opts_async(world, &request);
    idist_message m;
    (void)n;
    (void)arg;
    for (int i = 0; i < 2 && rank == 0; i++) rank_ok(rank, idist_send(x, 2, IDIST_I32, 1, 5, &o));
    for (int i = 0; i < 2 && rank == 1; i++) {
        rank_ok(rank, idist_mprobe(IDIST_ANY_SOURCE, 5, &m, &o));
        rank_is(rank, idist_mrecv(x, 1, IDIST_I32, &m, &o), IDIST_ERR_TRUNCATED);
        rank_check(strstr(idist_last_error(), "tag 5") != NULL, "got \"%s\"", idist_last_error());
        rank_check(m.group != NULL && m.info.count == 2, "the message has gone");
        CUDA(cudaMemset(x, 0, sizeof host));
        rank_ok(rank, idist_mrecv(x, 3, IDIST_I32, &m, i ? &a : &o));
        rank_ok(rank, idist_wait(&request));
        CUDA(cudaMemcpy(host, x, sizeof host, cudaMemcpyDeviceToHost));
        rank_check(!m.group && host[0] == 7 && host[1] == 8 && host[2] == 0, "got %d %d %d",
                   host[0], host[1], host[2]);
    }
    cudaFree(x);
}

static void other_counts(idist_group *world, int rank, int n, void *arg) {
    int32_t host[2] = {1, 1}, *x = device_of(host, 2);
    idist_opts o = opts_of(world);
    (void)n;
    (void)arg;
    rank_is(rank, idist_all_reduce(x, x, rank == 1 ? 2 : 1, IDIST_I32, IDIST_SUM, &o),
            IDIST_ERR_MISMATCH);
    rank_check(strstr(idist_last_error(), "count") != NULL, "got \"%s\"", idist_last_error());
    cudaFree(x);
}

// Aborts the world while copies are in progress. Afterwards no copy may write to the buffers.
static void aborted(idist_group *world, int rank, int n, void *arg) {
    enum { K = 8, COUNT = 20000 };
    cudaStream_t stream = NULL;
    int32_t *x[K];
    idist_request r[K];
    int failed = 0;
    idist_opts all = opts_of(world);
    (void)n;
    (void)arg;
    memset(r, 0, sizeof r);
    // After this barrier, no rank is still in idist_open. The status is not checked, because rank 0
    // may leave first and abort the barrier for the other ranks.
    (void)!idist_barrier(&all);
    for (int k = 0; k < K; k++) {
        idist_opts o = opts_async(world, &r[k]);
        x[k] = device_of(NULL, COUNT);
        if (idist_all_reduce(x[k], x[k], COUNT, IDIST_I32, IDIST_SUM, &o) != IDIST_OK) failed++;
        if (k == 3 && rank == 0) rank_ok(rank, idist_abort(world));
    }
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (int k = 0; k < K; k++)
        if (r[k].impl && idist_wait(&r[k]) == IDIST_ERR_ABORTED) failed++;
    for (int k = 0; k < K; k++) CUDA(cudaMemsetAsync(x[k], 0x55, COUNT * sizeof *x[k], stream));
    CUDA(cudaStreamSynchronize(stream));
    // A copy that was left behind would write within this time.
    tap_sleep_ms(20);
    for (int k = 0; k < K; k++) {
        rank_check(first_of(x[k]) == 0x55555555, "rank %d: buffer %d was touched after the end: %x",
                   rank, k, first_of(x[k]));
        CUDA(cudaFree(x[k]));
    }
    cudaStreamDestroy(stream);
    rank_check(failed > 0, "rank %d: nothing was aborted", rank);
}

static int dies(idist_group *world, int rank, int n, proc_slot *slot, void *arg) {
    int32_t one = 1, *x = device_of(&one, 1);
    idist_opts o = opts_of(world);
    (void)n;
    (void)arg;
    for (int i = 0;; i++) {
        if (rank == 1 && i == 5) raise(SIGKILL);
        idist_status s = idist_all_reduce(x, x, 1, IDIST_I32, IDIST_MAX, &o);
        if (s == IDIST_OK) continue;
        proc_result(slot, s);
        return 0;
    }
}

static void a_rank_dies(void) {
    procs p;
    tap_running("a rank dies");
    ranks_reset();
    procs_start(&p, 3, NULL, dies, NULL);
    rank_check(procs_wait(&p, 8000 * test_slow_factor()) == 0, "hang");
    for (int k = 0; k < 3; k++)
        if (k != 1)
            rank_check(p.slot[k].status == IDIST_ERR_PEER_LOST &&
                           text_names_rank(p.slot[k].text, 1),
                       "rank %d: %s", k, p.slot[k].text);
    ranks_report("a rank dies between calls on device memory: the others learn of it");
    procs_free(&p);
}

// Parameters of `lacks`, where rank 1 has no device, and of `copy_fails`, where a copy fails on
// rank 1. In copy_fails, `asked` is the value of FAKE_CUDA_FAIL, and `devices` is NULL for small
// calls.
typedef struct outcome {
    const char *asked, *devices;
    int port;
    int nth; // for copy_fails: number of the copy that fails
} outcome;

static int lacks(int number, void *arg) {
    const outcome *o = (const outcome *)arg;
    idist_group *world = NULL;
    idist_desc d = desc_with(NULL, NULL);
    float x = 1;
    if (number == 1) setenv("FAKE_CUDA_DEVICES", o->devices, 1);
    d.rank = number;
    d.world_size = 3;
    d.device = o->asked;
    d.master_addr = "127.0.0.1";
    d.master_port = o->port;
    d.init_timeout_ms = d.timeout_ms = 10000;
    int64_t start = tap_now_ms();
    idist_status s = idist_open(&d, &world);
    rank_check(tap_now_ms() - start < 1000 * test_slow_factor(), "rank %d: %d ms", number,
               (int)(tap_now_ms() - start));
    rank_check(s == (o->asked ? IDIST_ERR_NO_DEVICE : IDIST_OK), "rank %d: %s: %s", number,
               idist_status_name(s), idist_last_error());
    if (o->asked)
        rank_check(strstr(idist_last_error(), "rank 1 has no device") != NULL, "got \"%s\"",
                   idist_last_error());
    if (s != IDIST_OK) return 0;
    idist_opts opts = opts_of(world);
    rank_ok(number, idist_all_reduce(&x, &x, 1, IDIST_F32, IDIST_SUM, &opts));
    rank_check(x == 3, "rank %d: got %g", number, (double)x);
    opts.stream = &x;
    rank_is(number, idist_all_reduce(&x, &x, 1, IDIST_F32, IDIST_SUM, &opts), IDIST_ERR_NO_DEVICE);
    rank_ok(number, idist_close(&world));
    return 0;
}

static void without_devices(void) {
    for (int i = 0; i < 4; i++) {
        outcome o = {i / 2 ? "cuda" : NULL, i % 2 ? "0" : "-1", free_port(), 0};
        tap_running("rank 1 has no device");
        ranks_reset();
        procs_run(3, 20000, lacks, &o);
        ranks_report("rank 1 has no %s, asked for %s: one outcome on all",
                     i % 2 ? "device" : "driver", o.asked ? o.asked : "nothing");
    }
}

// Makes a copy fail on rank 1. This is the third copy of small calls, or the nth copy of a call in
// six chunks, with six copies out and six copies in. If the last copy fails, rank 0 may already
// have its result. The next call of rank 0 must then report the failure.
enum { COPIES = 12 };

static int copy_fails(int number, void *arg) {
    const outcome *o = (const outcome *)arg;
    enum { COUNT = 6 << 20 };
    idist_group *world = NULL;
    idist_desc d = desc_with(NULL, NULL);
    int32_t one = 1;
    bool may_be_done = number == 0 && o->nth == COPIES;
    setenv("IDIST_DEVICE_BACKEND", "staged", 1);
    if (number == 1) setenv("FAKE_CUDA_FAIL", o->asked, 1);
    d.rank = number;
    d.world_size = 2;
    d.master_addr = "127.0.0.1";
    d.master_port = o->port;
    d.init_timeout_ms = d.timeout_ms = 10000;
    if (!rank_ok(number, idist_open(&d, &world))) return 0;
    idist_opts opts = opts_of(world);
    int32_t *x = device_of(o->devices ? NULL : &one, o->devices ? COUNT : 1);
    idist_status s = IDIST_OK;
    for (int i = 0; i < (o->devices ? 1 : 10) && s == IDIST_OK; i++)
        s = idist_all_reduce(x, x, o->devices ? COUNT : 1, IDIST_I32, IDIST_MAX, &opts);
    if (s == IDIST_OK && may_be_done) s = idist_all_reduce(x, x, 1, IDIST_I32, IDIST_MAX, &opts);
    rank_check(s == IDIST_ERR_DEVICE && strstr(idist_last_error(), "rank 1: the device"),
               "rank %d: %s: %s", number, idist_status_name(s), idist_last_error());
    cudaFree(x);
    idist_close(&world);
    return 0;
}

static void copies_fail(void) {
    for (int nth = 0; nth <= COPIES; nth++) {
        char which[64] = "cudaMemcpyAsync:3:700";
        if (nth) snprintf(which, sizeof which, "cudaMemcpyAsync:%d:700", nth);
        outcome o = {which, nth ? "large" : NULL, free_port(), nth};
        tap_running("a copy fails");
        ranks_reset();
        procs_run(2, 20000, copy_fails, &o);
        ranks_report("a copy fails on one rank, %s%s: all get the error, with its rank", which,
                     nth ? ", chunks" : "");
    }
}

int main(void) {
    idist_desc bad = desc_with(NULL, NULL);
    tap_deadline(100);
    // Tests that fork come first, because a process that has used CUDA must not fork.
    without_devices();
    copies_fail();
    a_rank_dies();
    for (int n = 1; n <= 4; n++) {
        ranks_case(n, NULL, streams, NULL, "streams, %d ranks", n);
        ranks_case(n, NULL, in_flight, NULL, "requests on host and device memory, %d ranks", n);
        ranks_case(n, NULL, mixed_buffers, NULL, "host and device memory in one call, %d ranks", n);
        ranks_case(n, NULL, local_errors, NULL, "errors of one rank, %d ranks", n);
        ranks_case(n, NULL, to_itself, NULL, "messages to oneself, %d ranks", n);
        ranks_case(n, NULL, streams_without_data, NULL, "streams and no data, %d ranks", n);
        ranks_case(n, NULL, freed_op, NULL, "an op freed early, %d ranks", n);
    }
    for (int n = 2; n <= 4; n++)
        ranks_case_fault(n, NULL, mixed, NULL,
                         "host memory on one rank, device memory on the others, %d ranks", n);
    ranks_case(2, NULL, messages_in_order, NULL, "messages stay in order");
    ranks_case(2, NULL, requests_in_order, NULL, "messages with requests stay in order");
    ranks_case(2, NULL, receives, NULL, "receives: in vain, too short, shorter than asked for");
    ranks_case(2, NULL, cancelled, NULL, "a receive into device memory is not cancelled");
    ranks_case(2, NULL, matched, NULL, "matched messages");
    ranks_case_fault(2, NULL, late_stream, NULL, "a time-out shorter than the stream");
    ranks_case_fault(3, NULL, other_counts, NULL, "counts differ: a mismatch on all ranks");
    for (int n = 2; n <= 4; n++)
        ranks_case_fault(n, NULL, aborted, NULL, "abort beside copies, %d ranks", n);
    bad.device = "gpu";
    bad.world_size = 1;
    idist_group *world = NULL;
    tap_is(idist_open(&bad, &world), IDIST_ERR_ENV, "no such device name");
    return tap_done();
}
