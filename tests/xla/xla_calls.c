// xla_calls.c - tests what is special about calls on memory of XLA: buffers as handles, requests,
// groups, shapes, parts of buffers, order of launches, and errors before any rank enters XLA. The
// programs of tests/dist test the grid of all operations (see tests/device/xla.sh).
//
// xla_calls PATH [processes]: PATH is the device backend that the ranks must have: xla or staged.
// With a second argument, ranks are processes, otherwise threads.
#define IDIST_IMPLEMENTATION
#include "idist.h"
#include "idist_xla.h"
#include "idist_train.h" // after idist_xla.h, whose buffers idist_ddp then refuses

#include "ranks.h"
#include "xla_world.h"

static const char *expected_path;

// Creates a buffer of n floats: first, first + step, ...
static idist_xla_buffer *floats(idist_group *world, size_t n, float first, float step) {
    float data[4096];
    idist_xla_buffer *b = NULL;
    for (size_t i = 0; i < n; i++) data[i] = first + step * (float)i;
    TAP_REQUIRE(n <= 4096);
    if (idist_xla_buffer_put(data, n, IDIST_F32, world, &b) != IDIST_OK)
        rank_fail("put: %s", idist_last_error());
    return b;
}

// Checks n floats of a buffer: first, first + step, ...
static void check_floats(idist_xla_buffer *b, size_t n, float first, float step, const char *what) {
    float data[4096];
    rank_check(idist_xla_buffer_get(b, data, n * 4, 10000) == IDIST_OK, "%s: %s", what,
               idist_last_error());
    for (size_t i = 0; i < n; i++)
        if (data[i] != first + step * (float)i) {
            rank_fail("%s: element %zu is %g, not %g", what, i, (double)data[i],
                      (double)(first + step * (float)i));
            return;
        }
}

static void handles(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    idist_xla_buffer *a, *b, *zeros = NULL, *gone;
    float x[4] = {1, 2, 3, 4};
    (void)arg;
    rank_check(strcmp(((idist_group *)world)->w->about.device_backend, expected_path) == 0,
               "device backend %s", world->w->about.device_backend);
    rank_check(strncmp(world->w->about.device_name, "xla:", 4) == 0, "device %s",
               world->w->about.device_name);
    a = floats(world, 100, (float)rank, 1);
    b = floats(world, 100, 7, 0);
    rank_ok(rank, idist_all_reduce(a, b, 100, IDIST_F32, IDIST_SUM, &o));
    check_floats(b, 100, (float)(n * (n - 1) / 2), (float)n, "sum");
    check_floats(a, 100, (float)rank, 1, "the input stays");
    void *before = idist_xla_buffer_pjrt(b);
    rank_ok(rank, idist_all_reduce(b, b, 100, IDIST_F32, IDIST_MAX, &o));
    check_floats(b, 100, (float)(n * (n - 1) / 2), (float)n, "in place");
    rank_check(before && idist_xla_buffer_pjrt(b) != before, "a result is a new PJRT_Buffer");

    rank_ok(rank, idist_xla_buffer_put(NULL, 5, IDIST_F64, world, &zeros));
    double z[5] = {1, 1, 1, 1, 1};
    rank_ok(rank, idist_xla_buffer_get(zeros, z, sizeof z, -1));
    rank_check(z[0] == 0 && z[4] == 0, "zeros");
    rank_check(idist_xla_buffer_get(zeros, z, 8, -1) == IDIST_ERR_ARG, "a smaller get");
    rank_check(idist_xla_buffer_get(zeros, NULL, 40, -1) == IDIST_ERR_ARG, "a get to NULL");

    // errors that concern this rank alone
    rank_check(idist_all_reduce(a, x, 4, IDIST_F32, IDIST_SUM, &o) == IDIST_ERR_ARG,
               "mixed memory");
    rank_check(strstr(idist_last_error(), "one buffer is an idist_xla_buffer"), "the text: %s",
               idist_last_error());
    o.stream = &o;
    rank_check(idist_all_reduce(a, b, 100, IDIST_F32, IDIST_SUM, &o) == IDIST_ERR_UNSUPPORTED,
               "a stream");
    o.stream = NULL;
    rank_check(idist_xla_buffer_put(x, 0, IDIST_F32, world, &gone) == IDIST_ERR_ARG && !gone,
               "no element");
    rank_check(idist_xla_buffer_put(x, 1, IDIST_F32_I64, world, &gone) == IDIST_ERR_ARG, "a pair");
    rank_check(idist_xla_buffer_put(x, 1, IDIST_F32, world, NULL) == IDIST_ERR_ARG, "NULL");
    gone = a;
    rank_ok(rank, idist_xla_buffer_free(&a));
    rank_check(!a, "the pointer is NULL");
    rank_check(idist_xla_buffer_get(gone, x, 16, -1) == IDIST_ERR_ARG, "a freed buffer");
    rank_check(!idist_xla_buffer_pjrt(gone), "its PJRT_Buffer");
    rank_ok(rank, idist_xla_buffer_free(&a));
    rank_ok(rank, idist_xla_buffer_free(&b));
    rank_ok(rank, idist_xla_buffer_free(&zeros));
}

// Passes the address of a freed buffer, and the buffer of another rank. The calls must fail on rank
// 0 alone and before they begin, so the next call must succeed.
static void stale(idist_group *world, int rank, int n, void *arg) {
    static idist_xla_buffer *others[8]; // by rank
    idist_opts o = opts_of(world);
    idist_xla_buffer *a = floats(world, 4, 1, 0), *b = floats(world, 4, 1, 0), *gone = b;
    (void)arg;
    others[rank] = a;
    rank_ok(rank, idist_barrier(&o));
    if (rank == 0) {
        idist_xla_buffer_free(&b);
        rank_check(idist_all_reduce(a, gone, 4, IDIST_F32, IDIST_SUM, &o) == IDIST_ERR_ARG,
                   "a freed buffer: %s", idist_last_error());
        rank_check(strstr(idist_last_error(), "no idist_xla_buffer of this rank"), "%s",
                   idist_last_error());
        rank_check(idist_broadcast(others[1], 4, IDIST_F32, 0, &o) == IDIST_ERR_ARG,
                   "another rank's buffer: %s", idist_last_error());
    }
    rank_ok(rank, idist_all_reduce(a, a, 4, IDIST_F32, IDIST_SUM, &o));
    check_floats(a, 4, (float)n, 0, "the next call");
    idist_xla_buffer_free(&a);
    idist_xla_buffer_free(&b);
}

// Makes calls on parts of buffers, which are staged. The other elements of the buffer must not
// change.
static void parts(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    idist_xla_buffer *a = floats(world, 64, 1, 0);
    float x[64];
    (void)arg;
    char *at = (char *)a;
    rank_ok(rank, idist_all_reduce(at + 16 * 4, at + 16 * 4, 8, IDIST_F32, IDIST_SUM, &o));
    rank_ok(rank, idist_xla_buffer_get(a, x, sizeof x, -1));
    for (int i = 0; i < 64; i++)
        rank_check(x[i] == (i >= 16 && i < 24 ? (float)n : 1.0f), "element %d: %g", i,
                   (double)x[i]);
    // from a whole buffer to a part of another buffer
    idist_xla_buffer *whole = floats(world, 8, 2, 0), *large = floats(world, 64, 5, 0);
    char *part = (char *)large + 40 * 4;
    rank_ok(rank, idist_all_reduce(whole, part, 8, IDIST_F32, IDIST_SUM, &o));
    rank_ok(rank, idist_xla_buffer_get(large, x, sizeof x, -1));
    for (int i = 0; i < 64; i++)
        rank_check(x[i] == (i >= 40 && i < 48 ? (float)(2 * n) : 5.0f), "element %d: %g", i,
                   (double)x[i]);
    idist_xla_buffer_free(&whole);
    idist_xla_buffer_free(&large);
    // rank 0 passes a part of a buffer, the other ranks a whole buffer
    idist_xla_buffer *b = floats(world, 8, (float)rank, 0);
    rank_ok(rank, idist_all_reduce(rank ? (char *)b : at + 32, rank ? (char *)b : at + 32, 8,
                                   IDIST_F32, IDIST_SUM, &o));
    rank_ok(rank, idist_xla_buffer_get(rank ? b : a, x, rank ? 32 : sizeof x, -1));
    rank_check(x[rank ? 0 : 8] == (float)(n * (n - 1) / 2 + 1), "a part with whole buffers: %g",
               (double)x[rank ? 0 : 8]);
    // a message that is shorter than the receive buffer, then one from host memory
    if (n > 1 && rank == 0) rank_ok(rank, idist_send(at, 3, IDIST_F32, 1, 4, &o));
    if (rank == 1) {
        idist_recv_info info;
        rank_ok(rank, idist_recv(at + 8, 10, IDIST_F32, 0, 4, &info, &o));
        rank_ok(rank, idist_xla_buffer_get(a, x, sizeof x, -1));
        rank_check(info.count == 3 && x[2] == 1 && x[5] == 1, "a short message");
        rank_ok(rank, idist_send(x, 2, IDIST_F32, 0, 5, &o));
    }
    if (n > 1 && rank == 0) rank_ok(rank, idist_recv(at, 2, IDIST_F32, 1, 5, NULL, &o));
    idist_xla_buffer_free(&a);
    idist_xla_buffer_free(&b);
}

// Makes requests on the two halves of one buffer. Neither request may undo what the other request
// wrote. Also makes a call that is longer than its buffer, and frees a buffer twice during a call.
static void halves(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    (void)arg;
    for (int i = 0; i < 20; i++) {
        idist_request r[2];
        idist_opts first = opts_async(world, &r[0]), second = opts_async(world, &r[1]);
        idist_xla_buffer *a = floats(world, 64, 1, 0), *again = a;
        char *low = (char *)a, *high = low + 32 * 4;
        float x[64];
        rank_check(idist_all_reduce(high, high, 33, IDIST_F32, IDIST_SUM, &o) == IDIST_ERR_ARG,
                   "a call beyond the buffer");
        rank_check(strstr(idist_last_error(), "has 128 bytes from that address on, and the call "
                                              "needs 132"),
                   "the text: %s", idist_last_error());
        rank_ok(rank, idist_scan(low, low, 32, IDIST_F32, IDIST_SUM, &first));
        rank_ok(rank, idist_scan(high, high, 32, IDIST_F32, IDIST_SUM, &second));
        rank_ok(rank, idist_wait_all(r, 2));
        rank_ok(rank, idist_xla_buffer_get(a, x, sizeof x, -1));
        rank_check(x[0] == (float)(rank + 1) && x[32] == (float)(rank + 1), "round %d: %g %g", i,
                   (double)x[0], (double)x[32]);
        rank_ok(rank, idist_all_reduce(a, a, 64, IDIST_F32, IDIST_MAX, &first));
        rank_ok(rank, idist_xla_buffer_free(&a));
        rank_check(idist_xla_buffer_free(&again) == IDIST_ERR_ARG, "freed twice");
        rank_ok(rank, idist_wait(&r[0]));
    }
    (void)n;
}

// Checks that messages from device and host memory to one peer arrive in the order in which they
// were sent.
static void order_of_messages(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    (void)arg;
    if (n < 2 || rank > 1) return;
    for (int k = 0; k < 200; k++) {
        float host[2] = {(float)(2 * k + 1), 0}, got;
        if (rank == 0) {
            idist_xla_buffer *a = floats(world, 1, (float)(2 * k), 0);
            idist_request r[2];
            idist_opts o0 = opts_async(world, &r[0]), o1 = opts_async(world, &r[1]);
            rank_ok(rank, idist_send(a, 1, IDIST_F32, 1, 9, &o0));
            rank_ok(rank, idist_send(host, 1, IDIST_F32, 1, 9, &o1));
            rank_ok(rank, idist_wait_all(r, 2));
            idist_xla_buffer_free(&a);
        } else {
            for (int i = 0; i < 2; i++) {
                rank_ok(rank, idist_recv(&got, 1, IDIST_F32, 0, 9, NULL, &o));
                rank_check(got == (float)(2 * k + i), "message %d: %g", 2 * k + i, (double)got);
            }
        }
    }
}

// Begins requests on two groups. Neighboring ranks use opposite orders, and one rank makes blocking
// calls. If the ranks launched the programs in the order of their calls, two devices would wait for
// each other.
static void order_of_launches(idist_group *world, int rank, int n, void *arg) {
    idist_group *g[2] = {NULL, NULL};
    idist_xla_buffer *a = floats(world, 16, 1, 0), *b[2];
    (void)arg;
    for (int k = 0; k < 2; k++) {
        rank_ok(rank, idist_split(world, 0, rank, &g[k]));
        b[k] = floats(world, 16, 0, 0);
    }
    for (int i = 0; i < 300; i++) {
        idist_request r[2];
        bool blocks = rank == i % (n + 1); // in some rounds, no rank
        for (int k = 0; k < 2; k++) {
            int w = ((rank + i / 3) & 1) ^ k;
            idist_opts o = opts_async(g[w], &r[w]);
            r[w].impl = NULL;
            if (blocks) o.request = NULL;
            rank_ok(rank, idist_all_reduce(a, b[w], 16, IDIST_F32, IDIST_SUM, &o));
        }
        rank_ok(rank, idist_wait_all(r, 2));
        for (int k = 0; k < 2; k++) check_floats(b[k], 16, (float)n, 0, "sum");
    }
    for (int k = 0; k < 2; k++) {
        idist_xla_buffer_free(&b[k]);
        rank_ok(rank, idist_free_group(&g[k]));
    }
    idist_xla_buffer_free(&a);
}

// Makes requests, calls on host memory while the requests are pending, and a call whose buffer is
// freed before the call ends.
static void requests(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    (void)arg;
    for (int i = 0; i < 20; i++) {
        idist_request r[3];
        idist_opts ob = opts_async(world, &r[0]), oc = opts_async(world, &r[1]),
                   od = opts_async(world, &r[2]);
        int32_t host = rank, sum = 0;
        idist_xla_buffer *a = floats(world, 32, 1, 0), *b = floats(world, 32, 0, 0),
                         *c = floats(world, 32, (float)rank, 0), *lost = floats(world, 32, 2, 0);
        rank_ok(rank, idist_all_reduce(a, b, 32, IDIST_F32, IDIST_SUM, &ob));
        rank_ok(rank, idist_scan(c, c, 32, IDIST_F32, IDIST_SUM, &oc)); // staged
        rank_ok(rank, idist_all_reduce(lost, lost, 32, IDIST_F32, IDIST_SUM, &od));
        idist_xla_buffer_free(&lost);
        rank_ok(rank, idist_all_reduce(&host, &sum, 1, IDIST_I32, IDIST_SUM, &o));
        rank_check(sum == n * (n - 1) / 2, "host memory in between: %d", (int)sum);
        rank_ok(rank, idist_wait_all(r, 3));
        check_floats(b, 32, (float)n, 0, "request");
        check_floats(c, 32, (float)(rank * (rank + 1) / 2), 0, "staged request");
        rank_ok(rank, idist_group_begin());
        rank_ok(rank, idist_all_reduce(a, a, 32, IDIST_F32, IDIST_MAX, &o));
        rank_ok(rank, idist_broadcast(c, 32, IDIST_F32, n - 1, &o));
        rank_ok(rank, idist_group_end());
        check_floats(a, 32, 1, 0, "between group_begin and group_end");
        check_floats(c, 32, (float)(n * (n - 1) / 2), 0, "broadcast");
        idist_xla_buffer_free(&a);
        idist_xla_buffer_free(&b);
        idist_xla_buffer_free(&c);
    }
}

// Creates a PJRT_Buffer of `rows` x `columns` without idist, as a user's program can.
static void *pjrt_put(idist_group *world, const void *data, int type, int64_t rows,
                      int64_t columns) {
    const idist__pjrt_api *api = (const idist__pjrt_api *)idist_xla_api();
    const int64_t dims[2] = {rows, columns};
    idist__pjrt_put put;
    char why[300];
    idist__pjrt_init(&put, sizeof put);
    put.client = idist_xla_client(world);
    put.device = idist_xla_device(world);
    put.data = data;
    put.type = type;
    put.dims = dims;
    put.dim_count = 2;
    put.semantics = IDIST__PJRT_UNTIL_TRANSFERRED;
    rank_check(idist__pjrt_call(api, IDIST__PJRT_PUT, &put, why, sizeof why) &&
                   idist__pjrt_await(api, put.done, why, sizeof why),
               "put: %s", why);
    return put.buffer;
}

// Uses a buffer of two dimensions, which the test creates without idist (pjrt_put).
static void shapes(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    float x[6] = {1, 2, 3, 4, 5, 6}, got[6];
    idist_xla_buffer *a = NULL, *flat, *none;
    (void)arg;
    rank_ok(rank, idist_xla_buffer_adopt(pjrt_put(world, x, 11, 2, 3), world, &a)); // F32
    rank_ok(rank, idist_all_reduce(a, a, 6, IDIST_F32, IDIST_SUM, &o));
    rank_ok(rank, idist_xla_buffer_get(a, got, sizeof got, -1));
    for (int i = 0; i < 6; i++) rank_check(got[i] == x[i] * (float)n, "2x3: %g", (double)got[i]);
    // from one shape to another, and shapes that differ between ranks
    flat = floats(world, 6, 0, 0);
    rank_ok(rank, idist_all_reduce(a, flat, 6, IDIST_F32, IDIST_MAX, &o));
    check_floats(flat, 6, (float)n, (float)n, "2x3 to 6");
    rank_ok(rank, idist_all_reduce(rank ? a : flat, rank ? a : flat, 6, IDIST_F32, IDIST_SUM, &o));
    rank_ok(rank, idist_xla_buffer_get(rank ? a : flat, got, sizeof got, -1));
    rank_check(got[5] == (float)(6 * n * n), "2x3 with 6: %g", (double)got[5]);
    rank_check(idist_xla_buffer_adopt(NULL, world, &none) == IDIST_ERR_ARG, "adopt NULL");
    idist_xla_buffer_free(&a);
    idist_xla_buffer_free(&flat);
}

// Asks the plug-in for the type of a buffer.
static int type_of(const idist_xla_buffer *b) {
    char why[300];
    return idist__pjrt_ask_number((const idist__pjrt_api *)idist_xla_api(), IDIST__PJRT_BUFFER_TYPE,
                                  idist_xla_buffer_pjrt(b), why, sizeof why);
}

// Checks that a buffer of XLA's bools still holds bools after a call on the whole buffer or on a
// part. A sum other than 0 must become 1.
static void bools(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    unsigned char x[6] = {1, 0, 1, 0, 0, 0}, got[6];
    idist_xla_buffer *a = NULL, *bytes = NULL;
    (void)arg;
    x[3] = rank == n - 1;
    rank_ok(rank, idist_xla_buffer_adopt(pjrt_put(world, x, 1, 2, 3), world, &a)); // PRED
    rank_ok(rank, idist_xla_buffer_put(x, 6, IDIST_U8, world, &bytes));
    rank_ok(rank, idist_all_reduce(a, a, 6, IDIST_U8, IDIST_SUM, &o));
    rank_ok(rank, idist_xla_buffer_get(a, got, sizeof got, -1));
    for (int i = 0; i < 6; i++)
        rank_check(got[i] == (i == 0 || i == 2 || i == 3), "any, element %d: %d", i, got[i]);
    rank_check(type_of(a) == IDIST__PJRT_BOOL, "type %d after a whole result", type_of(a));
    rank_ok(rank, idist_all_reduce((char *)a + 2, (char *)a + 2, 3, IDIST_U8, IDIST_SUM, &o));
    rank_ok(rank, idist_xla_buffer_get(a, got, sizeof got, -1));
    for (int i = 0; i < 6; i++)
        rank_check(got[i] == (i == 0 || i == 2 || i == 3), "a part, element %d: %d", i, got[i]);
    rank_check(type_of(a) == IDIST__PJRT_BOOL, "type %d after a part", type_of(a));
    rank_ok(rank, idist_all_reduce(a, bytes, 6, IDIST_U8, IDIST_SUM, &o));
    rank_ok(rank, idist_xla_buffer_get(bytes, got, sizeof got, -1));
    rank_check(got[0] == n && got[1] == 0 && got[3] == n, "bools into bytes: %d", got[0]);
    idist_xla_buffer_free(&a);
    idist_xla_buffer_free(&bytes);
}

// Checks that a process forked from a process that uses XLA gets errors, and does not touch the
// plug-in.
static void forked(idist_group *world, int rank, int n, void *arg) {
    idist_xla_buffer *a = floats(world, 4, 1, 0), *b = NULL;
    idist_desc desc = {0};
    idist_group *own = NULL;
    float x[4] = {0};
    int wait_status = 0;
    pid_t child;
    (void)n;
    (void)arg;
    child = rank == 0 ? fork() : -1;
    if (child == 0) {
        int bad = 0;
        desc.world_size = 1;
        desc.device = "xla";
        bad |= (idist_xla_buffer_get(a, x, sizeof x, 1000) != IDIST_ERR_STATE) << 0;
        bad |= (strstr(idist_last_error(), "forked") == NULL) << 1;
        bad |= (idist_xla_buffer_pjrt(a) != NULL) << 2;
        bad |= (idist_xla_buffer_put(x, 4, IDIST_F32, world, &b) == IDIST_OK) << 3;
        bad |= (idist_open(&desc, &own) != IDIST_ERR_NO_DEVICE) << 4;
        bad |= (strstr(idist_last_error(), "forked") == NULL) << 5;
        b = a;
        bad |= (idist_xla_buffer_free(&b) != IDIST_ERR_STATE) << 6;
        _exit(bad);
    }
    rank_check(rank != 0 || waitpid(child, &wait_status, 0) == child, "fork");
    rank_check(wait_status == 0, "the child: 0x%x", (unsigned)wait_status);
    check_floats(a, 4, 1, 0, "the parent's buffer");
    idist_xla_buffer_free(&a);
}

static void adds(const void *in, void *inout, size_t count, idist_dtype dtype, void *arg) {
    const float *x = (const float *)in;
    float *y = (float *)inout;
    (void)dtype;
    (void)arg;
    for (size_t i = 0; i < count; i++) y[i] += x[i];
}

static void spoils(const void *in, void *inout, size_t count, idist_dtype dtype, void *arg) {
    float *y = (float *)inout;
    (void)in;
    (void)dtype;
    (void)arg;
    for (size_t i = 0; i < count; i++) y[i] = -99;
}

// Frees a user op while a call on host memory waits behind a call on device memory. The next op
// gets the number of the freed op, but the call must still use the op with which it was made.
static void freed_op(idist_group *world, int rank, int n, void *arg) {
    (void)arg;
    for (int k = 0; k < 20; k++) {
        idist_request r[2];
        idist_opts first = opts_async(world, &r[0]), second = opts_async(world, &r[1]);
        idist_xla_buffer *a = floats(world, 8, 1, 0);
        float x = 1, y = 0;
        idist_op op, other;
        rank_ok(rank, idist_op_create(adds, NULL, true, world, &op));
        rank_ok(rank, idist_all_reduce(a, a, 8, IDIST_F32, IDIST_SUM, &first));
        rank_ok(rank, idist_all_reduce(&x, &y, 1, IDIST_F32, op, &second));
        rank_ok(rank, idist_op_free(op, world));
        rank_ok(rank, idist_op_create(spoils, NULL, true, world, &other));
        rank_ok(rank, idist_wait_all(r, 2));
        rank_check(y == (float)n, "round %d: %g", k, (double)y);
        rank_ok(rank, idist_op_free(other, world));
        idist_xla_buffer_free(&a);
    }
}

// Passes buffers to idist_ddp_create, which refuses them.
static void ddp(idist_group *world, int rank, int n, void *arg) {
    idist_xla_buffer *p = floats(world, 4, 1, 0), *g = floats(world, 4, 1, 0);
    idist_tensor param = {p, 4, IDIST_F32}, grad = {g, 4, IDIST_F32};
    idist_ddp_desc desc = {.params = &param, .grads = &grad, .n = 1, .group = world};
    idist_ddp *created = NULL;
    (void)n;
    (void)arg;
    rank_check(idist_ddp_create(&desc, &created) == IDIST_ERR_UNSUPPORTED && !created,
               "rank %d: %s", rank, idist_last_error());
    rank_check(strstr(idist_last_error(), "idist_xla_buffer"), "%s", idist_last_error());
    idist_xla_buffer_free(&p);
    idist_xla_buffer_free(&g);
}

// Checks idist_xla_compile_options. Ranks that share a device cannot run a program together, so
// their group has no options. A group of one rank has options.
static void shared_device(idist_group *world, int rank, int n, void *arg) {
    idist_group *own = NULL;
    char options[200];
    (void)n;
    (void)arg;
    rank_check(idist_xla_compile_options(world, options, sizeof options) == 0 &&
                   strstr(idist_last_error(), "rank 0 and rank 1: they share a device"),
               "rank %d: %s", rank, idist_last_error());
    rank_ok(rank, idist_split(world, rank, 0, &own));
    rank_check(idist_xla_compile_options(own, options, sizeof options) > 0, "a group of one: %s",
               idist_last_error());
    rank_ok(rank, idist_free_group(&own));
}

static void test_shared_device(void) {
    const char *devices = getenv("IDIST_XLA_CPU_DEVICES");
    char kept[16];
    snprintf(kept, sizeof kept, "%s", devices ? devices : "");
    setenv("IDIST_XLA_CPU_DEVICES", "1", 1);
    xla_world_begin(false);
    ranks_case(2, NULL, shared_device, NULL, "ranks that share a device");
    setenv("IDIST_XLA_CPU_DEVICES", kept, 1);
}

// A PJRT client that the program opens itself.
typedef struct owned {
    idist__pjrt_api api; // a copy of the plug-in's table
    void *client;
} owned;

static bool owned_open(owned *o) {
    char why[300] = "";
    const idist__pjrt_api *loaded = idist__pjrt_load(why, sizeof why);
    idist__pjrt_client_create create;
    idist__pjrt_init(&create, sizeof create);
    if (!loaded || !idist__pjrt_call(loaded, IDIST__PJRT_CLIENT_CREATE, &create, why, sizeof why)) {
        printf("# %s\n", why);
        return false;
    }
    o->api = *loaded;
    o->client = create.client;
    return true;
}

static void own_client(idist_group *world, int rank, int n, void *arg) {
    owned *own = (owned *)arg;
    idist_opts o = opts_of(world);
    idist_xla_buffer *a = floats(world, 4, 1, 1);
    idist_desc other = {0};
    idist_group *second = NULL;
    rank_check(idist_xla_client(world) == own->client && idist_xla_api() == &own->api,
               "the program's client and table");
    rank_ok(rank, idist_all_reduce(a, a, 4, IDIST_F32, IDIST_SUM, &o));
    check_floats(a, 4, (float)n, (float)n, "sum");
    idist_xla_buffer_free(&a);
    other.world_size = 1;
    for (int k = 0; k < 3; k++) { // only xla_api, only xla_client, or another client
        other.xla_api = k == 1 ? NULL : &own->api;
        other.xla_client = k == 0 ? NULL : k == 1 ? own->client : (void *)own;
        rank_check(idist_open(&other, &second) == (k < 2 ? IDIST_ERR_ARG : IDIST_ERR_NO_DEVICE),
                   "case %d: opened", k);
        rank_check(strstr(idist_last_error(), k < 2 ? "or neither" : "desc.xla_client must be the"),
                   "case %d: %s", k, idist_last_error());
    }
}

// Runs a world with the program's client, and then a world with a client that idist opens. idist
// must keep nothing of the first world, whose table of functions no longer exists.
static void test_own_client(void) {
    owned own;
    idist_desc desc = {0};
    xla_world_begin(false);
    tap_ok(idist_xla_api() == NULL || idist__xla_home_one.users == 0, "no world is open");
    if (!owned_open(&own)) {
        tap_ok(false, "a client of the program's own");
        return;
    }
    desc.xla_api = &own.api;
    desc.xla_client = own.client;
    ranks_case(1, &desc, own_client, &own, "desc.xla_api and desc.xla_client");
    tap_ok(idist_xla_api() != &own.api, "the table is forgotten");
    idist__pjrt_destroy(&own.api, IDIST__PJRT_CLIENT_DESTROY, own.client);
    memset(&own, 0, sizeof own);
    ranks_case(2, NULL, bools, NULL, "then a client of idist");
}

// Checks that calls that only move data keep the bits of every NaN, although XLA may compute narrow
// floats as F32.
static void bits_of_nan(idist_group *world, int rank, int n, void *arg) {
    static const idist_dtype dtypes[] = {IDIST_BF16, IDIST_F16, IDIST_F32};
    idist_opts o = opts_of(world);
    (void)arg;
    for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++) {
        size_t size = idist_dtype_size(dtypes[d]), nbytes = size * (size_t)n;
        uint32_t nan = size == 4 ? 0xff810123 : dtypes[d] == IDIST_F16 ? 0xfd23 : 0xff9b;
        unsigned char x[4 * 8], got[4 * 8];
        idist_xla_buffer *a = NULL, *b = NULL, *all = NULL;
        for (int i = 0; i < n; i++) memcpy(x + (size_t)i * size, &nan, size);
        rank_ok(rank, idist_xla_buffer_put(x, 1, dtypes[d], world, &a));
        rank_ok(rank, idist_xla_buffer_put(x, (size_t)n, dtypes[d], world, &b));
        rank_ok(rank, idist_xla_buffer_put(NULL, (size_t)n, dtypes[d], world, &all));
        rank_ok(rank, idist_all_gather(a, all, 1, dtypes[d], &o));
        rank_ok(rank, idist_xla_buffer_get(all, got, nbytes, -1));
        rank_check(memcmp(got, x, nbytes) == 0, "all_gather, dtype %d", (int)dtypes[d]);
        rank_ok(rank, idist_all_to_all(b, all, 1, dtypes[d], &o));
        rank_ok(rank, idist_xla_buffer_get(all, got, nbytes, -1));
        rank_check(memcmp(got, x, nbytes) == 0, "all_to_all, dtype %d", (int)dtypes[d]);
        rank_ok(rank, idist_broadcast(b, (size_t)n, dtypes[d], 0, &o));
        rank_ok(rank, idist_xla_buffer_get(b, got, nbytes, -1));
        rank_check(memcmp(got, x, nbytes) == 0, "broadcast, dtype %d", (int)dtypes[d]);
        idist_xla_buffer_free(&a);
        idist_xla_buffer_free(&b);
        idist_xla_buffer_free(&all);
    }
}

// Makes rank 1 late. The other ranks must time out before they enter XLA, and must name rank 1.
static void late(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    idist_xla_buffer *a = floats(world, 16, 1, 0);
    idist_status s;
    (void)arg;
    o.timeout_ms = 500 * test_slow_factor();
    if (rank == 1) {
        struct timespec t = {1 * test_slow_factor(), 0};
        nanosleep(&t, NULL);
    }
    s = idist_all_reduce(a, a, 16, IDIST_F32, IDIST_SUM, &o);
    rank_check(s == IDIST_ERR_TIMEOUT || (rank == 1 && s == IDIST_ERR_ABORTED), "got %s: %s",
               idist_status_name(s), idist_last_error());
    if (rank != 1)
        rank_check(text_names_only(idist_last_error(), 1, rank, n), "%s", idist_last_error());
    idist_xla_buffer_free(&a);
}

// Makes another call on rank 1. All ranks must report the mismatch before they enter XLA.
static void mismatch(idist_group *world, int rank, int n, void *arg) {
    idist_opts o = opts_of(world);
    idist_xla_buffer *a = floats(world, 16, 1, 0);
    float host[16] = {0};
    int which = *(int *)arg;
    idist_status s;
    (void)n;
    if (rank != 1) s = idist_all_reduce(a, a, 16, IDIST_F32, IDIST_SUM, &o);
    else if (which == 0) s = idist_all_reduce(a, a, 16, IDIST_F32, IDIST_MAX, &o);
    else if (which == 1) s = idist_all_reduce(a, a, 15, IDIST_F32, IDIST_SUM, &o);
    else if (which == 2) s = idist_all_reduce(host, host, 16, IDIST_F32, IDIST_SUM, &o);
    else if (which == 3) s = idist_scan(a, a, 16, IDIST_F32, IDIST_SUM, &o);
    else s = idist_barrier(&o);
    rank_check(s == IDIST_ERR_MISMATCH, "case %d: got %s: %s", which, idist_status_name(s),
               idist_last_error());
    idist_xla_buffer_free(&a);
}

// Makes calls in the groups of the even and the odd ranks, both in reverse order.
static void groups(idist_group *world, int rank, int n, void *arg) {
    idist_group *half = NULL;
    idist_xla_buffer *a = floats(world, 8, (float)rank, 0), *all;
    (void)arg;
    rank_ok(rank, idist_split(world, rank % 2, -rank, &half));
    idist_opts o = opts_of(half);
    int size = idist_group_size(half), me = idist_group_rank(half);
    all = floats(world, 8 * (size_t)size, 0, 0);
    rank_ok(rank, idist_all_gather(a, all, 8, IDIST_F32, &o));
    float got[8 * 16];
    rank_ok(rank, idist_xla_buffer_get(all, got, 32 * (size_t)size, -1));
    for (int i = 0; i < size; i++) {
        int owner = rank + 2 * (me - i); // the group's rank 0 is its largest rank in the world
        rank_check(got[8 * i] == (float)owner, "part %d: %g, not %d", i, (double)got[8 * i], owner);
    }
    rank_ok(rank, idist_free_group(&half));
    idist_xla_buffer_free(&a);
    idist_xla_buffer_free(&all);
    (void)n;
}

static void run(int n, bool processes, ranks_fn fn, const char *name) {
    xla_world_begin(processes);
    if (processes) procs_case(n, NULL, fn, NULL, "%s, %d processes", name, n);
    else ranks_case(n, NULL, fn, NULL, "%s, %d threads", name, n);
}

int main(int argc, char **argv) {
    static const struct {
        ranks_fn fn;
        const char *name;
    } cases[] = {{handles, "handles"},
                 {parts, "parts of buffers"},
                 {halves, "halves of a buffer"},
                 {shapes, "shapes"},
                 {bools, "bools"},
                 {groups, "groups"},
                 {bits_of_nan, "bits of a NaN"},
                 {requests, "requests"},
                 {freed_op, "freed op"},
                 {order_of_messages, "order of messages"},
                 {order_of_launches, "order of launches"}};
    bool processes;
    expected_path = argc > 1 ? argv[1] : "xla";
    processes = argc > 2;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (int n = processes ? 2 : 1; n <= (processes ? 4 : 8); n *= 2)
            run(n, processes, cases[i].fn, cases[i].name);
    xla_world_begin(false);
    test_own_client();
    ranks_case(2, NULL, forked, NULL, "a forked process");
    ranks_case(2, NULL, ddp, NULL, "ddp of buffers");
    test_shared_device();
    xla_world_begin(false);
    ranks_case(3, NULL, stale, NULL, "the address of a freed buffer");
    ranks_case_fault(3, NULL, late, NULL, "a late rank");
    for (int which = 0; which < 5; which++)
        ranks_case_fault(2, NULL, mismatch, &which, "other calls, case %d", which);
    return tap_done();
}
