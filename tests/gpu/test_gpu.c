// test_gpu - tests idist on device memory, on a machine with one or more GPUs: every call over
// every device backend
//
//     tests/gpu/test_gpu.sh            builds and runs it; --fake: on the stand-ins of tests/fake
//     test_gpu [-backends nccl,ipc,staged] [-ranks 1,2,4] [-small] [-thin N] [-part 2/5]
//
// Ranks are processes that share the first GPU. With several GPUs, the tests also run with one GPU
// per rank. NCCL accepts several ranks on a GPU only because each rank pretends to be on another
// host (NCCL_HOSTID). Such runs test whether the results are right, and say nothing about speed.
//
// -small omits the largest messages. -thin N runs every Nth combination. The default is all
// combinations with 1 and 2 ranks, and every 5th with more ranks.
#include "gpu.h"

#include "idist_train.h"

typedef struct options {
    const char *backends, *ranks, *part;
    bool small;
    int thin;
} options;

static options opt = {NULL, NULL, NULL, false, 0};
static int thin; // -thin of this world

enum { LARGEST = 3 << 20, GUARD = 96, MAX_PARTS = GPU_MAX_RANKS };

//------------------------------------------------------------------------------
// one call: inputs and expected results
//------------------------------------------------------------------------------

typedef enum kind {
    ALL_REDUCE,
    REDUCE,
    REDUCE_SCATTER,
    BROADCAST,
    ALL_GATHER,
    GATHER,
    SCATTER,
    ALL_TO_ALL,
    ALL_GATHERV,
    GATHERV,
    SCATTERV,
    ALL_TO_ALLV,
    N_KINDS
} kind;

static const char *const kind_names[N_KINDS] = {"all_reduce", "reduce",     "reduce_scatter",
                                                "broadcast",  "all_gather", "gather",
                                                "scatter",    "all_to_all", "all_gatherv",
                                                "gatherv",    "scatterv",   "all_to_allv"};

// How a call is made, and what waits for it.
typedef enum style { BLOCKING, ON_STREAM, REQUEST, REQUEST_ON_STREAM, WAIT_STREAM, N_STYLES } style;
static const char *const style_names[N_STYLES] = {"blocking", "on a stream", "request",
                                                  "request on a stream",
                                                  "request on a stream, another stream waits"};

// Elements of a receive buffer and their source.
typedef struct part {
    size_t at, count;
    int from; // a rank, or GPU_REDUCED
    size_t start;
} part;

typedef struct plan {
    kind kind;
    idist_dtype dtype;
    idist_op op;
    size_t count;
    int root;
    style style;
    bool in_place, can_in_place;
    size_t nsend, nrecv; // number of elements in this rank's buffers, including gaps
    // for an in-place call: where the send and receive elements begin in the single buffer
    size_t send_at, recv_at;
    int nparts;
    part parts[MAX_PARTS]; // in ascending order of `at`
    size_t counts[2][GPU_MAX_RANKS], displs[2][GPU_MAX_RANKS];
} plan;

// Buffers of a rank, large enough for every call.
typedef struct bench {
    gpu_rank *me;
    size_t nbytes;
    char *device[2], *work;     // work keeps a stream busy
    char *in, *out, *send_back; // pinned
    gpu_tables *tables;
    idist_op premul;
    int n_calls;
} bench;

static void add_part(plan *p, size_t at, size_t count, int from, size_t start) {
    part x = {at, count, from, start};
    if (count) p->parts[p->nparts++] = x;
}

// Returns the count of rank k in a v-form, and the count that rank a sends to rank b in
// all_to_allv.
static size_t v_count(size_t count, int k) { return k % 3 == 2 ? 0 : k % 2 ? count : count / 2; }
static size_t v_between(size_t count, int a, int b) {
    return count / (size_t)(1 + (a + 2 * b) % 3);
}

// Computes displacements that leave gaps of three elements.
static void lay_out(size_t *counts, size_t *displs, int n) {
    size_t at = 1;
    for (int k = 0; k < n; k++) {
        displs[k] = at;
        at += counts[k] + 3;
    }
}

// Returns the number of elements from the start of the buffer to the end of the last nonempty
// block.
static size_t extent(const size_t *counts, const size_t *displs, int n) {
    size_t end = 0;
    for (int k = 0; k < n; k++)
        if (counts[k] && displs[k] + counts[k] > end) end = displs[k] + counts[k];
    return end;
}

static void plan_v(plan *p, int rank, int n) {
    size_t *counts = p->counts[1], *displs = p->displs[1];
    bool root = rank == p->root || p->kind == ALL_GATHERV;
    for (int k = 0; k < n; k++) {
        p->counts[0][k] = v_between(p->count, rank, k);
        counts[k] = p->kind == ALL_TO_ALLV ? v_between(p->count, k, rank) : v_count(p->count, k);
    }
    lay_out(p->counts[0], p->displs[0], n);
    lay_out(counts, displs, n);
    if (p->kind == ALL_TO_ALLV) {
        p->nsend = extent(p->counts[0], p->displs[0], n);
        p->nrecv = extent(counts, displs, n);
        for (int k = 0; k < n; k++) { // at[] is where the blocks of rank k's send buffer begin
            size_t theirs[GPU_MAX_RANKS], at[GPU_MAX_RANKS];
            for (int m = 0; m < n; m++) theirs[m] = v_between(p->count, k, m);
            lay_out(theirs, at, n);
            add_part(p, displs[k], counts[k], k, at[rank]);
        }
        return;
    }
    if (p->kind == SCATTERV) {
        p->nsend = root ? extent(counts, displs, n) : 0;
        p->nrecv = counts[rank];
        add_part(p, 0, counts[rank], p->root, displs[rank]);
        p->recv_at = displs[rank];
    } else {
        p->nsend = counts[rank];
        p->nrecv = root ? extent(counts, displs, n) : 0;
        for (int k = 0; k < n && root; k++) add_part(p, displs[k], counts[k], k, 0);
        p->send_at = displs[rank];
    }
    p->can_in_place = root;
}

static void plan_call(plan *p, int rank, int n) {
    size_t count = p->count, all = count * (size_t)n, own = count * (size_t)rank;
    bool root = rank == p->root;
    p->nparts = 0;
    p->send_at = p->recv_at = 0;
    p->can_in_place = true;
    p->nsend = p->nrecv = count;
    if (p->kind >= ALL_GATHERV) {
        plan_v(p, rank, n);
    } else if (p->kind == ALL_REDUCE || p->kind == REDUCE) {
        if (p->kind == ALL_REDUCE || root) add_part(p, 0, count, GPU_REDUCED, 0);
        else p->nrecv = 0;
    } else if (p->kind == REDUCE_SCATTER) {
        p->nsend = all;
        p->recv_at = own;
        add_part(p, 0, count, GPU_REDUCED, own);
    } else if (p->kind == BROADCAST) {
        if (!root) p->nsend = 0;
        p->in_place = root; // because there is only one buffer
        add_part(p, 0, count, p->root, 0);
    } else if (p->kind == ALL_GATHER || p->kind == GATHER) {
        p->send_at = own;
        p->nrecv = p->kind == ALL_GATHER || root ? all : 0;
        for (int k = 0; k < n && p->nrecv; k++) add_part(p, (size_t)k * count, count, k, 0);
    } else if (p->kind == SCATTER) {
        p->nsend = root ? all : 0;
        p->recv_at = own;
        add_part(p, 0, count, p->root, own);
    } else { // all_to_all
        p->nsend = p->nrecv = all;
        for (int k = 0; k < n; k++) add_part(p, (size_t)k * count, count, k, own);
    }
    if (!p->nsend || !p->nrecv) p->can_in_place = false;
    if (!p->can_in_place) p->in_place = false;
}

static idist_status call(const plan *p, const char *send, char *recv, const idist_opts *o) {
    const size_t *counts = p->counts[1], *displs = p->displs[1];
    size_t own = counts[o->group ? idist_group_rank(o->group) : idist_get_rank()];
    switch (p->kind) {
    case ALL_REDUCE: return idist_all_reduce(send, recv, p->count, p->dtype, p->op, o);
    case REDUCE: return idist_reduce(send, recv, p->count, p->dtype, p->op, p->root, o);
    case REDUCE_SCATTER: return idist_reduce_scatter(send, recv, p->count, p->dtype, p->op, o);
    case BROADCAST: return idist_broadcast(recv, p->count, p->dtype, p->root, o);
    case ALL_GATHER: return idist_all_gather(send, recv, p->count, p->dtype, o);
    case GATHER: return idist_gather(send, recv, p->count, p->dtype, p->root, o);
    case SCATTER: return idist_scatter(send, recv, p->count, p->dtype, p->root, o);
    case ALL_TO_ALL: return idist_all_to_all(send, recv, p->count, p->dtype, o);
    case ALL_GATHERV: return idist_all_gatherv(send, own, recv, counts, displs, p->dtype, o);
    case GATHERV: return idist_gatherv(send, own, recv, counts, displs, p->dtype, p->root, o);
    case SCATTERV: return idist_scatterv(send, counts, displs, recv, own, p->dtype, p->root, o);
    default:
        return idist_all_to_allv(send, p->counts[0], p->displs[0], recv, counts, displs, p->dtype,
                                 o);
    }
}

//------------------------------------------------------------------------------
// running it
//------------------------------------------------------------------------------

static void describe(const bench *b, const plan *p, char *text, size_t cap) {
    const char *op = b->tables->op == GPU_PREMUL ? "PREMUL" : idist_op_name(p->op);
    bool reduces = p->kind <= REDUCE_SCATTER;
    snprintf(text, cap, "call %d, rank %d: %s %s%s%s x %zu, root %d, %s, %s", b->n_calls,
             b->me->rank, kind_names[p->kind], reduces ? op : "", &" "[!reduces],
             idist_dtype_name(p->dtype), p -> count, p -> root,
             p -> in_place ? "in place" : "not in place", style_names[p->style]);
}

static void check_bytes(const bench *b, const plan *p, const char *at, size_t nbytes,
                        const char *what) {
    char text[300];
    for (size_t i = 0; i < nbytes; i++)
        if ((unsigned char)at[i] != 0x5a) {
            describe(b, p, text, sizeof text);
            gpu_fail("%s: %s was written, byte %zu of it", text, what, i);
            return;
        }
}

// Checks all parts of the receive buffer, and the bytes between and after the parts.
static void check_received(const bench *b, const plan *p, const char *recv) {
    size_t size = b->tables->size, end = 0;
    char text[300];
    for (int k = 0; k < p->nparts; k++) {
        const part *x = &p->parts[k];
        if (!p->in_place) check_bytes(b, p, recv + end * size, (x->at - end) * size, "a gap");
        end = x->at + x->count;
        size_t bad = gpu_compare(b->tables, x->from, x->start, recv + x->at * size, x->count);
        if (bad == x->count) continue;
        describe(b, p, text, sizeof text);
        const unsigned char *want = &b->tables->of[x->from][(x->start + bad) % GPU_PERIOD * size];
        gpu_fail("%s: element %zu: got %g expected %g", text, x->at + bad,
                 gpu_decode(recv + (x->at + bad) * size, p->dtype), gpu_decode(want, p->dtype));
        return;
    }
    if (!p->in_place)
        check_bytes(b, p, recv + end * size, (p->nrecv - end) * size + GUARD,
                    "what is behind the buffer");
}

// Makes the call in its style. All work before and after the call is queued on the streams without
// waiting.
static idist_status call_in_style(bench *b, const plan *p, const char *send, char *recv) {
    idist_request request = {NULL};
    idist_opts o;
    idist_status s;
    memset(&o, 0, sizeof o);
    if (p->style >= REQUEST) o.request = &request;
    if (p->style != BLOCKING && p->style != REQUEST) o.stream = b->me->stream;
    s = call(p, send, recv, &o);
    if (s != IDIST_OK || !o.request) return s;
    return p->style == WAIT_STREAM ? idist_wait_stream(&request, b->me->other)
                                   : idist_wait(&request);
}

static void run_call(bench *b, const plan *p) {
    size_t size = b->tables->size,
           shift = (size_t)(b->n_calls % 3) * size; // aligned only to an element
    size_t nsend = p->nsend * size, nrecv = p->nrecv * size, send_at = shift + p->send_at * size;
    cudaStream_t stream = b->me->stream, after = stream;
    bool host_waits = p->style == BLOCKING || p->style == REQUEST;
    char *send = b->device[0] + (p->in_place ? send_at : shift);
    char *recv = b->device[p->in_place ? 0 : 1] + (p->in_place ? shift + p->recv_at * size : shift);
    memset(b->in, 0x5a, shift + nsend + send_at + GUARD);
    gpu_fill(b->tables, b->me->rank, 0, b->in + (send - b->device[0]), p->nsend);
    CUDA(cudaMemcpyAsync(b->work, b->work + b->nbytes / 2, b->nbytes / 2, cudaMemcpyDeviceToDevice,
                         stream));
    if (!p->in_place) CUDA(cudaMemsetAsync(b->device[1], 0x5a, shift + nrecv + GUARD, stream));
    CUDA(cudaMemcpyAsync(b->device[0], b->in, (size_t)(send - b->device[0]) + nsend + GUARD,
                         cudaMemcpyHostToDevice, stream));
    if (host_waits) CUDA(cudaStreamSynchronize(stream));
    // Passes at least one pointer. On a rank without elements, this pointer shows that the buffers
    // are in device memory, as on the other ranks.
    IDIST_OK_OR_LEAVE(call_in_style(b, p, nsend || !nrecv ? send : NULL, nrecv ? recv : NULL));
    if (p->style == REQUEST_ON_STREAM || p->style == WAIT_STREAM) after = b->me->other;
    CUDA(cudaMemcpyAsync(b->out, recv, nrecv + (p->in_place ? 0 : GUARD), cudaMemcpyDeviceToHost,
                         after));
    if (!p->in_place && nsend <= 8000)
        CUDA(cudaMemcpyAsync(b->send_back, send, nsend + 1, cudaMemcpyDeviceToHost, after));
    CUDA(cudaStreamSynchronize(after));
    if (after != stream) CUDA(cudaStreamSynchronize(stream));
    check_received(b, p, b->out);
    if (!p->in_place && nsend <= 8000 &&
        memcmp(b->send_back, b->in + (send - b->device[0]), nsend) != 0) {
        char text[300];
        describe(b, p, text, sizeof text);
        gpu_fail("%s: the send buffer was written", text);
    }
    b->n_calls++;
    __atomic_add_fetch(&gpu_shared_area()->cases[gpu_current_case].n_checks, 1, __ATOMIC_RELAXED);
}

//------------------------------------------------------------------------------
// the cases, each run by all ranks of a world
//------------------------------------------------------------------------------

static const size_t all_counts[] = {0, 1, 7, 1000, 65537, LARGEST};
static const idist_dtype all_dtypes[] = {IDIST_F32, IDIST_F64, IDIST_F16,    IDIST_BF16,  IDIST_I32,
                                         IDIST_U8,  IDIST_I64, IDIST_F8E4M3, IDIST_F8E5M2};
static const int all_ops[] = {IDIST_SUM, IDIST_AVG, IDIST_MIN, IDIST_MAX, IDIST_PROD, GPU_PREMUL};
enum { N_COUNTS = 6, N_DTYPES = 9, N_OPS = 6 };

// Runs a kind with every count, in place and not in place. Each call has a different style and a
// different root.
static void run_kind(bench *b, kind k, int *turn) {
    const gpu_tables *t = b->tables;
    size_t n = (size_t)b->me->n;
    for (int c = 0; c < N_COUNTS; c++)
        for (int in_place = 0; in_place < (k == BROADCAST || k == ALL_TO_ALLV ? 1 : 2);
             in_place++) {
            plan p;
            memset(&p, 0, sizeof p);
            p.kind = k;
            p.dtype = t->dtype;
            p.op = t->op == GPU_PREMUL ? b->premul
                   : t->op == GPU_MOVE ? IDIST_SUM
                                       : (idist_op)t->op;
            p.count = all_counts[c];
            if (p.count == LARGEST && k > REDUCE && k != BROADCAST)
                p.count = LARGEST / n; // of all ranks together
            p.in_place = in_place != 0;
            bool large = c == N_COUNTS - 1,
                 often = t->dtype == IDIST_F32 || t->op == IDIST_SUM || t->op == GPU_MOVE;
            if (large && (opt.small || !often)) continue;
            if (++*turn % thin) continue;
            p.style = (style)(*turn / thin % N_STYLES);
            p.root = *turn / thin % b->me->n;
            plan_call(&p, b->me->rank, b->me->n);
            run_call(b, &p);
        }
}

static void reductions(bench *b) {
    int turn = 0;
    for (int d = 0; d < N_DTYPES; d++)
        for (int o = 0; o < N_OPS; o++) {
            if (all_ops[o] == GPU_PREMUL && all_dtypes[d] < IDIST_F16) continue;
            gpu_make_tables(b->tables, all_dtypes[d], all_ops[o], b->me->n);
            for (int k = ALL_REDUCE; k <= REDUCE_SCATTER; k++) run_kind(b, (kind)k, &turn);
        }
}

static void moves(bench *b) {
    int turn = 0;
    for (int d = 0; d < N_DTYPES; d++) {
        gpu_make_tables(b->tables, all_dtypes[d], GPU_MOVE, b->me->n);
        for (int k = BROADCAST; k <= ALL_TO_ALL; k++) run_kind(b, (kind)k, &turn);
    }
}

static void v_forms(bench *b) {
    int turn = 0;
    for (int d = 0; d < N_DTYPES; d++) {
        gpu_make_tables(b->tables, all_dtypes[d], GPU_MOVE, b->me->n);
        for (int k = ALL_GATHERV; k <= ALL_TO_ALLV; k++) run_kind(b, (kind)k, &turn);
    }
}

// Exchanges messages between all ranks, including a rank with itself, on a stream between
// group_begin and group_end.
static void messages(bench *b) {
    static const size_t counts[] = {1, 1000, 65537};
    gpu_rank *me = b->me;
    gpu_make_tables(b->tables, IDIST_F32, GPU_MOVE, me->n);
    for (int turn = 0; turn < 3; turn++) {
        size_t count = counts[turn], each = count * sizeof(float), all = each * (size_t)me->n;
        idist_opts o;
        memset(&o, 0, sizeof o);
        o.stream = me->stream;
        gpu_fill(b->tables, me->rank, 0, b->in, count * (size_t)me->n);
        CUDA(cudaMemsetAsync(b->device[1], 0x5a, all, me->stream));
        CUDA(cudaMemcpyAsync(b->device[0], b->in, all, cudaMemcpyHostToDevice, me->stream));
        IDIST_OK_OR_LEAVE(idist_group_begin());
        for (int k = 0; k < me->n; k++) {
            size_t at = (size_t)k * each;
            IDIST_OK_OR_LEAVE(idist_send(b->device[0] + at, count, IDIST_F32, k, 0, &o));
            IDIST_OK_OR_LEAVE(idist_recv(b->device[1] + at, count, IDIST_F32, k, 0, NULL, &o));
        }
        IDIST_OK_OR_LEAVE(idist_group_end());
        CUDA(cudaMemcpyAsync(b->out, b->device[1], all, cudaMemcpyDeviceToHost, me->stream));
        CUDA(cudaStreamSynchronize(me->stream));
        for (int k = 0; k < me->n; k++) {
            size_t bad = gpu_compare(b->tables, k, (size_t)me->rank * count,
                                     b->out + (size_t)k * each, count);
            if (bad != count)
                gpu_fail("rank %d: %zu floats from rank %d: element %zu is wrong", me->rank, count,
                         k, bad);
        }
        __atomic_add_fetch(&gpu_shared_area()->cases[gpu_current_case].n_checks, 1,
                           __ATOMIC_RELAXED);
    }
}

// Starts eight all_reduces on two streams before it waits for any of them. Each must get its own
// result, in whatever order the program waits.
static void in_flight(bench *b) {
    enum { K = 8, COUNT = 5000 };
    gpu_rank *me = b->me;
    idist_request requests[K];
    int n = me->n, total = n * (n - 1) / 2;
    int32_t *in = (int32_t *)(void *)b->in, *out = (int32_t *)(void *)b->out;
    int32_t *x = (int32_t *)(void *)b->device[0];
    memset(requests, 0, sizeof requests);
    for (int i = 0; i < K * COUNT; i++) in[i] = 100 * (i / COUNT) + me->rank + i % COUNT;
    for (int k = 0; k < K; k++) {
        cudaStream_t stream = k % 2 ? me->other : me->stream;
        idist_opts o;
        memset(&o, 0, sizeof o);
        o.request = &requests[k];
        o.stream = stream;
        CUDA(cudaMemcpyAsync(x + k * COUNT, in + k * COUNT, sizeof *x * COUNT,
                             cudaMemcpyHostToDevice, stream));
        IDIST_OK_OR_LEAVE(
            idist_all_reduce(x + k * COUNT, x + k * COUNT, COUNT, IDIST_I32, IDIST_SUM, &o));
    }
    for (int k = K - 1; k >= 0; k--) {
        if (k % 3 == 0) IDIST_OK_OR_LEAVE(idist_wait_stream(&requests[k], me->stream));
        else IDIST_OK_OR_LEAVE(idist_wait(&requests[k]));
        CUDA(cudaMemcpyAsync(out + k * COUNT, x + k * COUNT, sizeof *x * COUNT,
                             cudaMemcpyDeviceToHost, me->stream));
    }
    CUDA(cudaStreamSynchronize(me->stream));
    for (int i = 0; i < K * COUNT; i++) {
        int want = n * (100 * (i / COUNT) + i % COUNT) + total;
        if (out[i] != want) {
            gpu_fail("rank %d: call %d, element %d: got %d expected %d", me->rank, i / COUNT,
                     i % COUNT, out[i], want);
            return;
        }
    }
}

// Tests idist_ddp with parameters and gradients on the device. Three gradients are contiguous; the
// other gradients are separate.
enum { N_PARAMS = 6, EACH = 3000, APART = 64 };

static void check_ddp(bench *b, const float *grads, size_t total, int step, int active,
                      double scale) {
    gpu_rank *me = b->me;
    float *out = (float *)(void *)b->out;
    CUDA(cudaMemcpyAsync(out, grads, sizeof *out * total, cudaMemcpyDeviceToHost, me->stream));
    CUDA(cudaStreamSynchronize(me->stream));
    for (int p = 0; p < N_PARAMS; p++) {
        size_t at = (size_t)p * EACH + (p > 2 ? (size_t)(p - 2) * APART : 0);
        for (size_t i = at; i < at + EACH; i++) {
            // Rank r contributes 100 r + i % 50 + step. Only the last `active` ranks take part.
            double sum = 0, off;
            for (int r = me->n - active; r < me->n; r++) sum += 100 * r + (double)(i % 50) + step;
            off = (double)out[i] - sum * scale;
            if (off * off <= 1e-8 * sum * sum * scale * scale + 1e-12) continue;
            gpu_fail("rank %d, step %d: gradient %d[%zu]: got %g expected %g", me->rank, step, p,
                     i - at, (double)out[i], sum * scale);
            return;
        }
    }
}

static void run_ddp(bench *b, bool uneven, double prescale) {
    gpu_rank *me = b->me;
    size_t total = N_PARAMS * EACH + 3 * APART;
    float *in = (float *)(void *)b->in, *grads = (float *)(void *)b->device[0],
          *params = (float *)(void *)b->device[1];
    idist_tensor p[N_PARAMS], g[N_PARAMS];
    idist_ddp_desc desc;
    idist_ddp *ddp = NULL;
    int steps = uneven ? 2 + me->rank : 3, last = -1;
    memset(&desc, 0, sizeof desc);
    for (int k = 0; k < N_PARAMS; k++) {
        size_t at = (size_t)k * EACH + (k > 2 ? (size_t)(k - 2) * APART : 0);
        p[k].data = params + at;
        g[k].data = grads + at;
        p[k].count = g[k].count = EACH;
        p[k].dtype = g[k].dtype = IDIST_F32;
    }
    for (size_t i = 0; i < total; i++) in[i] = (float)(me->rank + 1);
    CUDA(cudaMemcpyAsync(params, in, sizeof *in * total, cudaMemcpyHostToDevice, me->stream));
    CUDA(cudaStreamSynchronize(me->stream));
    desc.params = p;
    desc.grads = g;
    desc.n = N_PARAMS;
    desc.bucket_nbytes = 2 * EACH * sizeof(float);
    desc.on_device = true;
    desc.stream = me->stream;
    desc.uneven = uneven;
    desc.prescale = prescale;
    IDIST_OK_OR_LEAVE(idist_ddp_create(&desc, &ddp));
    CUDA(cudaMemcpyAsync(b->out, params, sizeof *in * total, cudaMemcpyDeviceToHost, me->stream));
    CUDA(cudaStreamSynchronize(me->stream));
    if (((float *)(void *)b->out)[5] != 1)
        gpu_fail("rank %d: the parameters are not those of rank 0", me->rank);
    for (int step = 0; step < steps; step++) {
        for (size_t i = 0; i < total; i++) in[i] = (float)(100 * me->rank + (int)(i % 50) + step);
        CUDA(cudaMemcpyAsync(grads, in, sizeof *in * total, cudaMemcpyHostToDevice, me->stream));
        for (int k = N_PARAMS - 1; k >= 0; k--) IDIST_OK_OR_LEAVE(idist_ddp_ready(ddp, k));
        IDIST_OK_OR_LEAVE(idist_ddp_wait(ddp));
        int active = !uneven || step < 2 ? me->n : me->n - (step - 1);
        check_ddp(b, grads, total, step, active, (prescale != 0 ? prescale : 1) / me->n);
    }
    if (uneven) IDIST_OK_OR_LEAVE(idist_ddp_join(ddp, &last));
    if (uneven && last != me->n - 1) gpu_fail("rank %d: rank %d came last", me->rank, last);
    CUDA(cudaStreamSynchronize(me->stream));
    idist_ddp_free(&ddp);
}

static void ddp(bench *b) {
    run_ddp(b, false, 0);
    run_ddp(b, false, 0.5);
    run_ddp(b, true, 0);
}

// One combination of the other options of idist_ddp. The results on the device must match the
// results on the host.
typedef struct ddp_way {
    idist_compression compression;
    // Relative to the largest summand. The results may differ, because libraries may add and round
    // in another order.
    double tolerance;
    bool find_unused, uneven, by_active, hook, own_memory, part_of_world;
    double prescale, postscale;
    int shift; // misalignment of the gradients in bytes
} ddp_way;

static idist_status hook_start(idist_bucket *bucket, void *arg) {
    ++*(int *)arg;
    return idist_all_reduce(bucket->data, bucket->data, bucket->count, bucket->dtype, IDIST_AVG,
                            &bucket->opts);
}

static idist_status hook_finish(idist_bucket *bucket, void *arg) {
    (void)bucket;
    ++*(int *)arg;
    return IDIST_OK;
}

static bool is_unused(const ddp_way *w, int k, int rank, int step) {
    return w->find_unused && ((k + rank + step) % 3 == 0 || (k == 1 && step == 2));
}

// Returns a multiple of 1/4, which F16 represents exactly.
static float ddp_value(int k, int rank, int step, int i) {
    unsigned x = (unsigned)(i * 7 + k * 11 + rank * 5 + step * 3);
    return (float)((int)(x % 61) - 30) / 4;
}

static void ddp_step(bench *b, const ddp_way *w, idist_ddp *ddp, bool device, int step,
                     float *result) {
    gpu_rank *me = b->me;
    float *staged = (float *)(void *)b->in;
    for (int k = 0; k < N_PARAMS; k++) {
        void *grad = idist_ddp_grad(ddp, k);
        for (int i = 0; i < EACH; i++) staged[k * EACH + i] = ddp_value(k, me->rank, step, i);
        if (device)
            CUDA(cudaMemcpyAsync(grad, staged + k * EACH, sizeof *staged * EACH,
                                 cudaMemcpyHostToDevice, me->stream));
        else memcpy(grad, staged + k * EACH, sizeof *staged * EACH);
    }
    // A gradient that is ready in a pass that sends nothing must count as used.
    if (w->find_unused && step == 3) {
        IDIST_OK_OR_LEAVE(idist_ddp_no_sync(ddp, true));
        IDIST_OK_OR_LEAVE(idist_ddp_ready(ddp, (step + me->rank) % N_PARAMS));
        IDIST_OK_OR_LEAVE(idist_ddp_no_sync(ddp, false));
    }
    for (int k = N_PARAMS - 1; k >= 0; k--)
        if (!is_unused(w, k, me->rank, step)) IDIST_OK_OR_LEAVE(idist_ddp_ready(ddp, k));
    IDIST_OK_OR_LEAVE(idist_ddp_wait(ddp));
    for (int k = 0; k < N_PARAMS; k++, result += EACH + 1) {
        void *grad = idist_ddp_grad(ddp, k);
        if (device)
            CUDA(cudaMemcpyAsync(b->out, grad, sizeof *result * EACH, cudaMemcpyDeviceToHost,
                                 me->stream));
        if (device) CUDA(cudaStreamSynchronize(me->stream));
        memcpy(result, device ? b->out : grad, sizeof *result * EACH);
        result[EACH] = idist_ddp_used(ddp, k);
    }
}

// Runs the training steps. Returns how often the hook was called.
static int ddp_iterations(bench *b, const ddp_way *w, idist_group *g, bool device, int steps,
                          float *results) {
    gpu_rank *me = b->me;
    size_t total = N_PARAMS * EACH + 3 * APART;
    float *host = (float *)calloc(2 * total + 1, sizeof *host);
    float *grads = device ? (float *)(void *)b->device[0] : host;
    float *params = device ? (float *)(void *)b->device[1] : host + total + 1;
    idist_tensor p[N_PARAMS], t[N_PARAMS];
    idist_ddp_desc desc;
    idist_ddp_hook hook = {hook_start, hook_finish, NULL, NULL};
    idist_ddp *ddp = NULL;
    int n_calls = 0, last;
    memset(&desc, 0, sizeof desc);
    for (int k = 0; k < N_PARAMS; k++) {
        size_t at = (size_t)k * EACH + (k > 2 ? (size_t)(k - 2) * APART : 0);
        p[k].data = params + at;
        t[k].data = (char *)(grads + at) + w->shift;
        p[k].count = t[k].count = EACH;
        p[k].dtype = t[k].dtype = IDIST_F32;
    }
    hook.arg = &n_calls;
    desc.params = p;
    desc.grads = w->own_memory ? NULL : t;
    desc.n = N_PARAMS;
    desc.group = g;
    desc.bucket_nbytes = 2 * EACH * sizeof(float);
    desc.compression = w->compression;
    desc.find_unused = w->find_unused;
    desc.uneven = w->uneven;
    desc.divide_by_active = w->by_active;
    desc.hook = w->hook ? &hook : NULL;
    desc.prescale = w->prescale;
    desc.postscale = w->postscale;
    desc.on_device = device;
    desc.stream = device ? me->stream : NULL;
    IDIST_OK_OR_LEAVE(idist_ddp_create(&desc, &ddp));
    for (int step = 0; step < steps; step++)
        ddp_step(b, w, ddp, device, step, results + (size_t)step * N_PARAMS * (EACH + 1));
    if (w->uneven) IDIST_OK_OR_LEAVE(idist_ddp_join(ddp, &last));
    CUDA(cudaStreamSynchronize(me->stream));
    idist_ddp_free(&ddp);
    free(host);
    return n_calls;
}

// One rank passes host memory; the other ranks pass device memory. The call must fail on all ranks,
// and only their group must fail.
static void ddp_odd_one_out(bench *b) {
    gpu_rank *me = b->me;
    float host[100] = {0}, *params = (float *)(void *)b->device[1];
    idist_tensor p = {me->rank == me->n - 1 ? host : params, 100, IDIST_F32};
    idist_group *g = NULL;
    idist_ddp *ddp = NULL;
    idist_ddp_desc desc;
    IDIST_OK_OR_LEAVE(idist_split(NULL, 0, me->rank, &g));
    memset(&desc, 0, sizeof desc);
    desc.params = &p;
    desc.n = 1;
    desc.group = g;
    desc.on_device = true;
    desc.stream = me->stream;
    idist_status s = idist_ddp_create(&desc, &ddp);
    if (s == IDIST_OK && me->n > 1)
        gpu_fail("rank %d: ddp_create with the host memory of another rank: got %s", me->rank,
                 idist_status_name(s));
    idist_ddp_free(&ddp);
    IDIST_OK_OR_LEAVE(idist_free_group(&g));
    IDIST_OK_OR_LEAVE(idist_barrier(NULL));
}

// Passes a gradient in device memory without on_device. The call must fail before the host touches
// the gradient.
static void ddp_not_on_device(bench *b) {
    gpu_rank *me = b->me;
    float host[200] = {0};
    idist_tensor p[2] = {{host, 100, IDIST_F32}, {host + 100, 100, IDIST_F32}};
    idist_tensor g[2] = {{host, 100, IDIST_F32}, {b->device[0], 100, IDIST_F32}};
    idist_ddp *ddp = NULL;
    idist_ddp_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.params = p;
    desc.grads = g;
    desc.n = 2;
    idist_status s = idist_ddp_create(&desc, &ddp);
    if (s != IDIST_ERR_ARG || !strstr(idist_last_error(), "gradient 1 is in device memory"))
        gpu_fail("rank %d: ddp_create without on_device: got %s, \"%s\"", me->rank,
                 idist_status_name(s), s == IDIST_OK ? "" : idist_last_error());
    idist_ddp_free(&ddp);
    IDIST_OK_OR_LEAVE(idist_barrier(NULL));
}

static void ddp_as_on_host(bench *b) {
    static const ddp_way ways[] = {
        {IDIST_COMPRESS_F16, 1e-3, false, false, false, false, false, false, 0, 0, 0},
        {IDIST_COMPRESS_BF16, 1e-2, false, true, true, false, false, true, 0.5, 0.25, 0},
        {IDIST_COMPRESS_F16, 1e-3, true, true, true, false, true, true, 0.5, 3, 0},
        {IDIST_COMPRESS_F16, 1e-3, true, false, false, false, false, false, 0, 3, 2},
        {IDIST_COMPRESS_NONE, 1e-6, true, false, false, false, false, false, 0, 0, 0},
        {IDIST_COMPRESS_NONE, 1e-6, false, true, true, false, false, true, 0.5, 0.25, 0},
        {IDIST_COMPRESS_NONE, 1e-6, true, true, false, true, false, false, 0, 0, 0},
        {IDIST_COMPRESS_NONE, 1e-6, true, false, false, false, true, false, 0, 3, 0},
        {IDIST_COMPRESS_NONE, 1e-6, false, false, false, false, false, false, 0.5, 0, 1}};
    gpu_rank *me = b->me;
    for (size_t i = 0; i < sizeof ways / sizeof ways[0]; i++) {
        const ddp_way *w = &ways[i];
        int steps = w->uneven ? 2 + me->rank : 4, n_calls[2];
        size_t size = (size_t)steps * N_PARAMS * (EACH + 1);
        float *want = (float *)calloc(2 * size, sizeof *want), *got = want + size;
        double allowed = 7.5 * w->tolerance * (w->prescale != 0 ? w->prescale : 1) *
                         (w->postscale != 0 ? w->postscale : 1);
        bool outside = w->part_of_world && me->n > 2 && me->rank == me->n - 1;
        idist_group *g = NULL;
        if (w->part_of_world) IDIST_OK_OR_LEAVE(idist_split(NULL, outside ? -1 : 0, me->rank, &g));
        for (int device = 0; device < 2 && !outside; device++)
            n_calls[device] = ddp_iterations(b, w, g, device, steps, device ? got : want);
        for (size_t k = 0; k < size && !outside; k++) {
            double off = (double)got[k] - (double)want[k];
            if (off <= allowed && -off <= allowed) continue;
            gpu_fail("rank %d, way %zu, step %zu, parameter %zu, element %zu: %.9g on the device, "
                     "%.9g on the host",
                     me->rank, i, k / (N_PARAMS * (EACH + 1)), k / (EACH + 1) % N_PARAMS,
                     k % (EACH + 1), (double)got[k], (double)want[k]);
            break;
        }
        if (!outside && (n_calls[0] != n_calls[1] || (n_calls[0] > 0) != w->hook))
            gpu_fail("rank %d, way %zu: the hook was called %d and %d times", me->rank, i,
                     n_calls[0], n_calls[1]);
        if (g) IDIST_OK_OR_LEAVE(idist_free_group(&g));
        free(want);
    }
    ddp_odd_one_out(b);
    ddp_not_on_device(b);
}

//------------------------------------------------------------------------------
// idist_zero on the device as on the host
//------------------------------------------------------------------------------

// Updates a shard on the host. Copies it from the device and back if it is there.
static void zero_update(bench *b, const idist_shard *shard, bool device) {
    size_t nbytes = shard->count * sizeof(float), at = 0;
    float *const arrays[3] = {shard->weights, shard->grad, shard->states[0]}, *x[3];
    cudaStream_t stream = b->me->stream;
    for (int k = 0; k < 3; k++, at += shard->count) {
        x[k] = device ? (float *)(void *)b->in + at : arrays[k];
        if (device) CUDA(cudaMemcpyAsync(x[k], arrays[k], nbytes, cudaMemcpyDeviceToHost, stream));
    }
    if (device) CUDA(cudaStreamSynchronize(stream));
    for (size_t i = 0; i < shard->count; i++) {
        x[2][i] = 0.5f * x[2][i] + x[1][i];
        x[0][i] -= 0.125f * x[2][i];
    }
    for (int k = 0; k < 3 && device; k++)
        CUDA(cudaMemcpyAsync(arrays[k], x[k], nbytes, cudaMemcpyHostToDevice, stream));
    if (device) CUDA(cudaStreamSynchronize(stream));
}

// Fills an array on the host or the device with numbers of a dtype.
static void zero_fill(bench *b, const idist_tensor *to, bool device, int k, int step) {
    float *x = (float *)(void *)b->in;
    void *narrow = b->in + EACH * sizeof *x;
    idist_tensor from = {x, EACH, IDIST_F32}, converted = {narrow, EACH, to->dtype};
    size_t nbytes = EACH * idist_dtype_size(to->dtype);
    for (int i = 0; i < EACH; i++) x[i] = ddp_value(k, b->me->rank, step, i);
    IDIST_OK_OR_LEAVE(idist_convert(&from, &converted, 1));
    if (!device) {
        memcpy(to->data, narrow, nbytes);
        return;
    }
    CUDA(cudaMemcpyAsync(to->data, narrow, nbytes, cudaMemcpyHostToDevice, b->me->stream));
    CUDA(cudaStreamSynchronize(b->me->stream));
}

// Trains for four steps. Writes the parameters and, on rank 0, the state to `result`.
static void zero_train(bench *b, idist_dtype dtype, bool apart, bool device, char *result) {
    gpu_rank *me = b->me;
    size_t size = idist_dtype_size(dtype), nbytes = EACH * size, room = 8 * N_PARAMS * EACH;
    char *host = (char *)calloc(3, room), *base = device ? b->device[1] : host;
    idist_tensor p[N_PARAMS], states[2 * N_PARAMS], g;
    idist_zero_desc desc;
    idist_zero *zero = NULL;
    memset(&desc, 0, sizeof desc);
    for (int k = 0; k < 2 * N_PARAMS; k++) {
        states[k].data = (device ? b->device[0] : host + room) + (size_t)k * EACH * sizeof(float);
        states[k].count = EACH;
        states[k].dtype = IDIST_F32;
    }
    for (int k = 0; k < N_PARAMS; k++) {
        p[k].data = base + (size_t)k * (nbytes + (apart ? APART : 0));
        p[k].count = EACH;
        p[k].dtype = dtype;
        zero_fill(b, &p[k], device, k, 9);
    }
    desc.params = p;
    desc.n = N_PARAMS;
    desc.states = 1;
    desc.bucket_nbytes = 2 * nbytes;
    desc.on_device = device;
    desc.stream = device ? me->stream : NULL;
    IDIST_OK_OR_LEAVE(idist_zero_create(&desc, &zero));
    for (int step = 0; step < 4; step++) {
        for (int k = N_PARAMS; k-- > 0;) {
            g = p[k];
            g.data = idist_zero_grad(zero, k);
            zero_fill(b, &g, device, k, step);
            IDIST_OK_OR_LEAVE(idist_zero_ready(zero, k));
        }
        IDIST_OK_OR_LEAVE(idist_zero_wait(zero));
        for (int k = 0; k < idist_zero_shards(zero); k++)
            zero_update(b, idist_zero_shard(zero, k), device);
        IDIST_OK_OR_LEAVE(idist_zero_gather(zero));
    }
    int arrays = idist_zero_state_count(zero);
    IDIST_OK_OR_LEAVE(idist_zero_get_state(zero, states, 0));
    IDIST_OK_OR_LEAVE(idist_zero_set_state(zero, states, 0)); // changes nothing
    for (int k = 0; k < N_PARAMS; k++, result += nbytes)
        CUDA(cudaMemcpyAsync(result, p[k].data, nbytes, cudaMemcpyDefault, me->stream));
    for (int k = 0; k < arrays * N_PARAMS && me->rank == 0; k++, result += EACH * sizeof(float))
        CUDA(cudaMemcpyAsync(result, states[k].data, EACH * sizeof(float), cudaMemcpyDefault,
                             me->stream));
    CUDA(cudaStreamSynchronize(me->stream));
    idist_zero_free(&zero);
    free(host);
}

// Reads element i of the results: parameters of a dtype, then states.
static double zero_element(const char *result, idist_dtype dtype, size_t i) {
    size_t params = N_PARAMS * EACH, size = idist_dtype_size(dtype);
    float x;
    idist_tensor from = {(char *)result + i * size, 1, dtype}, to = {&x, 1, IDIST_F32};
    if (i >= params) {
        from.data = (char *)result + params * size + (i - params) * sizeof x;
        from.dtype = IDIST_F32;
    }
    IDIST_OK_OR_LEAVE(idist_convert(&from, &to, 1));
    return (double)x;
}

static void zero_as_on_host(bench *b) {
    static const idist_dtype dtypes[3] = {IDIST_F32, IDIST_F16, IDIST_BF16};
    static const double tolerances[3] = {1e-5, 1e-2, 0.1}; // libraries add in different orders
    size_t room = 12 * N_PARAMS * EACH;
    char *results = (char *)malloc(2 * room);
    for (int i = 0; i < 6; i++) {
        idist_dtype dtype = dtypes[i % 3];
        memset(results, 0, 2 * room);
        for (int device = 0; device < 2; device++)
            zero_train(b, dtype, i > 2, device, results + (size_t)device * room);
        for (size_t k = 0; k < 3 * N_PARAMS * EACH; k++) {
            double want = zero_element(results, dtype, k);
            double off = zero_element(results + room, dtype, k) - want;
            if (off <= tolerances[i % 3] && -off <= tolerances[i % 3]) continue;
            gpu_fail("rank %d, %s, parameters %s, element %zu: %g on the host, off by %g",
                     b->me->rank, idist_dtype_name(dtype), i > 2 ? "apart" : "together", k, want,
                     off);
            break;
        }
    }
    free(results);
}

// Fetches a batch for idist_auto_loader. The batches are in pinned memory.
static int fetch_index(void *batch, const size_t *indices, size_t n, void *arg) {
    (void)arg;
    for (size_t i = 0; i < n; i++) ((float *)batch)[i] = (float)indices[i];
    return 0;
}

static void free_batch(void *ptr, void *user) {
    (void)user;
    free(ptr);
}

static void loader(bench *b) {
    gpu_rank *me = b->me;
    idist_sampler_desc samples;
    idist_loader_desc desc;
    idist_loader *l = NULL;
    idist_batch batch;
    struct cudaPointerAttributes attributes;
    memset(&samples, 0, sizeof samples);
    memset(&desc, 0, sizeof desc);
    samples.length = 100;
    samples.in_order = true;
    desc.batch_size = (size_t)(5 * me->n);
    desc.batch_nbytes = desc.batch_size * sizeof(float);
    desc.fetch = fetch_index;
    desc.num_workers = 2 * me->n;
    IDIST_OK_OR_LEAVE(idist_auto_loader(&desc, &samples, &l));
    for (size_t k = 0; k < idist_loader_count(l); k++) {
        IDIST_OK_OR_LEAVE(idist_loader_next(l, &batch));
        CUDA(cudaPointerGetAttributes(&attributes, batch.data));
        if (attributes.type != cudaMemoryTypeHost)
            gpu_fail("rank %d: batch %zu is not pinned", me->rank, k);
        float *out = (float *)(void *)b->out, *x = (float *)(void *)b->device[0];
        CUDA(cudaMemcpyAsync(x, batch.data, batch.n * sizeof *x, cudaMemcpyHostToDevice,
                             me->stream));
        CUDA(cudaMemcpyAsync(out, x, batch.n * sizeof *x, cudaMemcpyDeviceToHost, me->stream));
        CUDA(cudaStreamSynchronize(me->stream));
        for (size_t i = 0; i < batch.n; i++) {
            size_t want = (size_t)me->rank + (5 * k + i) * (size_t)me->n;
            if (out[i] != (float)(want % 100))
                gpu_fail("rank %d: batch %zu, sample %zu is %g", me->rank, k, i, (double)out[i]);
        }
    }
    idist_loader_free(&l);
    desc.allocator.free_fn = free_batch;
    if (idist_auto_loader(&desc, &samples, &l) != IDIST_ERR_ARG)
        gpu_fail("rank %d: half an allocator was accepted", me->rank);
    idist_loader_free(&l);
}

static cudaError_t instantiate(cudaGraphExec_t *exec, cudaGraph_t graph) {
#if CUDART_VERSION >= 12000
    return cudaGraphInstantiate(exec, graph, 0);
#else
    return cudaGraphInstantiate(exec, graph, NULL, NULL, 0);
#endif
}

typedef enum captured_call { SUMS, PIECES, IN_PLACE, N_CAPTURED } captured_call;
enum { CAPTURED = 4000, PIECE = 300 };

// Returns an integer that differs by rank, turn and position. An all_to_all sends one piece of
// PIECE values to each rank.
static int32_t value_of(int rank, int turn, int i) { return 1000000 * turn + 10000 * rank + i; }

static idist_status call_to_capture(bench *b, captured_call which, const idist_opts *o) {
    int32_t *x = (int32_t *)(void *)b->device[0], *y = (int32_t *)(void *)b->device[1];
    size_t counts[GPU_MAX_RANKS], displs[GPU_MAX_RANKS], back[GPU_MAX_RANKS], n = (size_t)b->me->n;
    for (size_t k = 0; k < n; k++) {
        counts[k] = PIECE;
        displs[k] = k * PIECE;
        back[k] = (n - 1 - k) * PIECE;
    }
    if (which == SUMS) return idist_all_reduce(x, y, CAPTURED, IDIST_I32, IDIST_SUM, o);
    if (which == PIECES) return idist_all_to_allv(x, counts, displs, y, counts, back, IDIST_I32, o);
    return idist_all_to_all(x, x, PIECE, IDIST_I32, o);
}

// Returns element i of the expected result.
static int32_t expected_of(const gpu_rank *me, captured_call which, int turn, int i) {
    int from = which == IN_PLACE ? i / PIECE : me->n - 1 - i / PIECE;
    if (which != SUMS) return value_of(from, turn, me->rank * PIECE + i % PIECE);
    return me->n * value_of(0, turn, i) + 10000 * (me->n * (me->n - 1) / 2);
}

static void check_captured(bench *b, captured_call which, int turn, const char *name) {
    gpu_rank *me = b->me;
    int32_t *out = (int32_t *)(void *)b->out;
    int count = which == SUMS ? CAPTURED : PIECE * me->n;
    CUDA(cudaMemcpyAsync(out, b->device[which != IN_PLACE], CAPTURED * sizeof *out,
                         cudaMemcpyDeviceToHost, me->stream));
    CUDA(cudaStreamSynchronize(me->stream));
    for (int i = 0; i < count; i++) {
        if (out[i] == expected_of(me, which, turn, i)) continue;
        gpu_fail("rank %d: %s, call %d, turn %d: element %d: got %d", me->rank, name, (int)which,
                 turn, i, out[i]);
        return;
    }
}

static void fill_captured(bench *b, int turn) {
    int32_t *in = (int32_t *)(void *)b->in;
    for (int i = 0; i < CAPTURED; i++) in[i] = value_of(b->me->rank, turn, i);
    CUDA(cudaMemcpyAsync(b->device[0], in, CAPTURED * sizeof *in, cudaMemcpyHostToDevice,
                         b->me->stream));
}

// Captures each call once in a graph and runs the graph three times with different values. Backends
// whose work on the host cannot be captured must refuse the call, and the capture must continue.
static void graph(bench *b) {
    gpu_rank *me = b->me;
    bool can = strcmp(me->world->backend, "nccl") == 0;
    idist_opts o;
    memset(&o, 0, sizeof o);
    o.stream = me->stream;
    for (int k = 0; k < N_CAPTURED; k++) {
        captured_call which = (captured_call)k;
        cudaGraph_t captured = NULL;
        cudaGraphExec_t exec = NULL;
        // The first call does the work that is done only once.
        IDIST_OK_OR_LEAVE(call_to_capture(b, which, &o));
        CUDA(cudaStreamBeginCapture(me->stream, cudaStreamCaptureModeThreadLocal));
        idist_status s = call_to_capture(b, which, &o);
        if (s != (can ? IDIST_OK : IDIST_ERR_UNSUPPORTED))
            gpu_fail("rank %d: in a capture: %s: %s", me->rank, idist_status_name(s),
                     s ? idist_last_error() : "");
        CUDA(cudaStreamEndCapture(me->stream, &captured));
        if (s == IDIST_OK) CUDA(instantiate(&exec, captured));
        for (int turn = 1; turn <= 3 && s == IDIST_OK; turn++) {
            fill_captured(b, turn);
            CUDA(cudaGraphLaunch(exec, me->stream));
            check_captured(b, which, turn, "replayed");
        }
        if (exec) CUDA(cudaGraphExecDestroy(exec));
        CUDA(cudaGraphDestroy(captured));
    }
}

// Captures a stream that blocks the default stream. A call that would wait for the default stream
// must be refused, and both the capture and the world must continue.
static void beside_a_capture(bench *b) {
    gpu_rank *me = b->me;
    cudaStream_t blocking;
    cudaGraph_t captured = NULL;
    idist_opts o;
    memset(&o, 0, sizeof o);
    CUDA(cudaStreamCreate(&blocking));
    for (int turn = 0; turn < 2; turn++) { // no stream; then the default stream by name
        o.stream = turn ? (void *)cudaStreamLegacy : NULL;
        CUDA(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeThreadLocal));
        idist_status s = call_to_capture(b, SUMS, &o);
        if (s != IDIST_ERR_UNSUPPORTED)
            gpu_fail("rank %d: beside a capture: %s", me->rank, idist_status_name(s));
        CUDA(cudaStreamEndCapture(blocking, &captured));
        CUDA(cudaGraphDestroy(captured));
        fill_captured(b, turn);
        CUDA(cudaStreamSynchronize(me->stream));
        IDIST_OK_OR_LEAVE(call_to_capture(b, SUMS, &o));
        CUDA(cudaDeviceSynchronize());
        check_captured(b, SUMS, turn, "after a capture");
    }
    CUDA(cudaStreamDestroy(blocking));
}

// Makes two in-place all_to_all calls between group_begin and group_end. The copies of their send
// buffers must be kept until both calls are complete.
static void held_back_in_place(bench *b) {
    gpu_rank *me = b->me;
    char *second = b->device[1];
    idist_opts o;
    memset(&o, 0, sizeof o);
    o.stream = me->stream;
    for (int turn = 1; turn <= 3; turn++) {
        fill_captured(b, turn);
        CUDA(cudaMemcpyAsync(second, b->device[0], CAPTURED * sizeof(int32_t),
                             cudaMemcpyDeviceToDevice, me->stream));
        IDIST_OK_OR_LEAVE(idist_group_begin());
        IDIST_OK_OR_LEAVE(idist_all_to_all(b->device[0], b->device[0], PIECE, IDIST_I32, &o));
        IDIST_OK_OR_LEAVE(idist_all_to_all(second, second, PIECE, IDIST_I32, &o));
        IDIST_OK_OR_LEAVE(idist_group_end());
        check_captured(b, IN_PLACE, turn, "the first of two");
        CUDA(cudaMemcpyAsync(b->device[0], second, CAPTURED * sizeof(int32_t),
                             cudaMemcpyDeviceToDevice, me->stream));
        check_captured(b, IN_PLACE, turn, "the second of two");
    }
}

// Runs copies on one stream and, if `reduce`, an all_reduce on another. Returns the time in ms on
// the slowest rank.
static double timed(bench *b, int ncopies, bool reduce, size_t count) {
    gpu_rank *me = b->me;
    idist_request request = {NULL};
    idist_opts o;
    memset(&o, 0, sizeof o);
    IDIST_OK_OR_LEAVE(idist_barrier(NULL));
    int64_t start = tap_now_ns();
    o.request = &request;
    o.stream = me->stream;
    for (int i = 0; i < ncopies; i++)
        CUDA(cudaMemcpyAsync(b->work, b->work + b->nbytes / 2, b->nbytes / 2,
                             cudaMemcpyDeviceToDevice, me->other));
    if (reduce)
        IDIST_OK_OR_LEAVE(
            idist_all_reduce(b->device[0], b->device[1], count, IDIST_F32, IDIST_SUM, &o));
    if (reduce) IDIST_OK_OR_LEAVE(idist_wait(&request));
    CUDA(cudaStreamSynchronize(me->other));
    double ms = (double)(tap_now_ns() - start) / 1e6, slowest = 0;
    IDIST_OK_OR_LEAVE(idist_all_reduce(&ms, &slowest, 1, IDIST_F64, IDIST_MAX, NULL));
    return slowest;
}

static void overlap(bench *b) {
    size_t count = opt.small ? 100000 : LARGEST;
    double reduce, copy, both;
    gpu_make_tables(b->tables, IDIST_F32, IDIST_SUM, b->me->n);
    gpu_fill(b->tables, b->me->rank, 0, b->in, count);
    CUDA(cudaMemcpyAsync(b->device[0], b->in, count * sizeof(float), cudaMemcpyHostToDevice,
                         b->me->stream));
    timed(b, 4, true, count);
    reduce = timed(b, 0, true, count);
    copy = timed(b, 16, false, count);
    // Copies that take about as long as the all_reduce. The number is the same on every rank.
    int ncopies = (int)(16 * reduce / copy) + 1;
    if (ncopies > 4000) ncopies = 4000;
    copy = timed(b, ncopies, false, count);
    both = timed(b, ncopies, true, count);
    CUDA(cudaMemcpyAsync(b->out, b->device[1], count * sizeof(float), cudaMemcpyDeviceToHost,
                         b->me->stream));
    CUDA(cudaStreamSynchronize(b->me->stream));
    size_t bad = gpu_compare(b->tables, GPU_REDUCED, 0, b->out, count);
    if (bad != count) gpu_fail("rank %d: element %zu is wrong", b->me->rank, bad);
    gpu_case *c = &gpu_shared_area()->cases[gpu_current_case];
    if (b->me->rank == 0)
        snprintf(c->note, sizeof c->note,
                 "all_reduce of %zu floats %.3f ms, %d copies %.3f ms, together %.3f ms", count,
                 reduce, ncopies, copy, both);
}

static void run_cases(gpu_rank *me) {
    static const struct {
        const char *name;
        void (*run)(bench *b);
    } list[] = {{"all_reduce, reduce, reduce_scatter", reductions},
                {"broadcast, all_gather, gather, scatter, all_to_all", moves},
                {"all_gatherv, gatherv, scatterv, all_to_allv", v_forms},
                {"send and recv on a stream in a group", messages},
                {"requests in flight on two streams", in_flight},
                {"ddp, even and uneven inputs", ddp},
                {"ddp on the device as on the host", ddp_as_on_host},
                {"idist_zero on the device as on the host", zero_as_on_host},
                {"a loader's batches", loader},
                {"in place and held back by group_begin", held_back_in_place},
                {"capture into a graph", graph},
                {"blocking calls beside a capture", beside_a_capture},
                {"overlap with copies", overlap}};
    static gpu_tables tables; // too large for the stack
    bench b;
    memset(&b, 0, sizeof b);
    thin = opt.thin ? opt.thin : me->n > 2 ? 5 : 1;
    b.me = me;
    b.tables = &tables;
    size_t largest = opt.small ? 65537 * (size_t)me->n : LARGEST;
    b.nbytes = 8 * (largest + 200) + 4096;
    for (int i = 0; i < 2; i++) CUDA(cudaMalloc((void **)&b.device[i], b.nbytes));
    CUDA(cudaMalloc((void **)&b.work, b.nbytes));
    CUDA(cudaMallocHost((void **)&b.in, b.nbytes));
    CUDA(cudaMallocHost((void **)&b.out, b.nbytes));
    CUDA(cudaMallocHost((void **)&b.send_back, b.nbytes));
    IDIST_OK_OR_LEAVE(idist_op_create_premul_sum(gpu_factor(me->rank), NULL, &b.premul));
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        gpu_case_begin(list[i].name);
        list[i].run(&b);
        gpu_case_end();
    }
    IDIST_OK_OR_LEAVE(idist_op_free(b.premul, NULL));
    IDIST_OK_OR_LEAVE(idist_barrier(NULL));
    for (int i = 0; i < 2; i++) CUDA(cudaFree(b.device[i]));
    CUDA(cudaFree(b.work));
    CUDA(cudaFreeHost(b.in));
    CUDA(cudaFreeHost(b.out));
    CUDA(cudaFreeHost(b.send_back));
}

//------------------------------------------------------------------------------
// a rank dies
//------------------------------------------------------------------------------

enum { VICTIM = 1, DIES_AT = 20, COUNT_OF_VICTIM = 20000 };

// Makes all_reduces one after the other, on a stream or as requests, until one fails. Does not wait
// for anything that might never end. Polls the stream for at most 50 ms and then calls idist again.
static void until_it_dies(gpu_rank *me) {
    const bool *by_request = (const bool *)me->arg;
    gpu_shared *shared = gpu_shared_area();
    float *x = NULL;
    idist_status s = IDIST_OK;
    gpu_case_begin("a rank dies");
    CUDA(cudaMalloc((void **)&x, sizeof *x * COUNT_OF_VICTIM));
    CUDA(cudaMemsetAsync(x, 0, sizeof *x * COUNT_OF_VICTIM, me->stream));
    for (int i = 0; s == IDIST_OK; i++) {
        idist_request request = {NULL};
        idist_opts o;
        memset(&o, 0, sizeof o);
        o.stream = me->stream;
        if (*by_request) o.request = &request;
        if (me->rank == VICTIM && i == DIES_AT) {
            __atomic_store_n(&shared->died_ns, tap_now_ns(), __ATOMIC_RELEASE);
            raise(SIGKILL);
        }
        s = idist_all_reduce(x, x, COUNT_OF_VICTIM, IDIST_F32, IDIST_SUM, &o);
        if (s == IDIST_OK && *by_request) s = idist_wait(&request);
        int64_t until = tap_now_ns() + 50000000;
        while (s == IDIST_OK && cudaStreamQuery(me->stream) == cudaErrorNotReady &&
               tap_now_ns() < until)
            usleep(20);
        cudaGetLastError();
    }
    int64_t now = tap_now_ns(), died = __atomic_load_n(&shared->died_ns, __ATOMIC_ACQUIRE);
    double ms = (double)(now - died) / 1e6;
    if (s != IDIST_ERR_PEER_LOST || !strstr(idist_last_error(), "rank 1"))
        gpu_fail("rank %d: %s: %s", me->rank, idist_status_name(s), idist_last_error());
    if (!died || ms > 2000) gpu_fail("rank %d: %.0f ms after the death", me->rank, ms);
    // must return, whatever the dead rank left on the stream
    CUDA(cudaStreamSynchronize(me->stream));
    CUDA(cudaMemset(x, 1, sizeof *x * COUNT_OF_VICTIM));
    CUDA(cudaFree(x));
    shared->results[me->rank] = ms;
    gpu_case_end();
    idist_finalize(); // reports why the world failed
    _exit(0);
}

//------------------------------------------------------------------------------
// worlds
//------------------------------------------------------------------------------

static const char usage[] =
    "usage: test_gpu [-backends nccl,ipc,staged] [-ranks 1,2,4] [-small] [-thin N] [-part 2/5]\n";

// Prints the cases of the world that has just ended.
static void report(const gpu_world *w, bool ended, const char *why) {
    gpu_shared *shared = gpu_shared_area();
    char name[100];
    gpu_describe(w, name, sizeof name);
    if (shared->no_world[0]) {
        tap_ok(false, "%s", name);
        tap_diag("%s", shared->no_world);
        return;
    }
    if (ended && strcmp(shared->backend, w->backend) != 0) {
        tap_ok(false, "%s: idist_device_backend() is %s", name, shared->backend);
        return;
    }
    for (int i = 0; i < GPU_MAX_CASES; i++) {
        const gpu_case *c = &shared->cases[i];
        if (!c->n_begun && !c->n_failures) continue;
        bool complete = i == 0 || c->n_ended >= w->n - (w->dies >= 0);
        tap_ok(c->n_failures == 0 && complete, "%s: %s", name, i ? c->name : "start");
        if (!complete) tap_diag("%d ranks began, %d came to its end", c->n_begun, c->n_ended);
        for (int k = 0; k < c->n_texts && k < 6; k++) tap_diag("%s", c->text[k]);
        if (c->left[0]) tap_diag("a rank gave up: %s", c->left);
        if (c->n_checks) tap_diag("%d calls checked", c->n_checks);
        if (c->note[0]) tap_diag("%s", c->note);
    }
    double last = 0;
    for (int k = 0; k < w->n; k++) last = shared->results[k] > last ? shared->results[k] : last;
    if (w->dies >= 0) tap_diag("the last to know did so after %.1f ms", last);
    tap_ok(ended, "%s: all ranks end as they should", name);
    if (!ended) tap_diag("%s", why);
}

static void run_world(const char *backend, int n, bool each_its_own, bool multi_rank) {
    gpu_world w = {backend, n, each_its_own, gpu_seconds(opt.small ? 60 : 120), multi_rank, -1};
    char why[1000], name[100];
    if (!gpu_takes_world()) return;
    gpu_describe(&w, name, sizeof name);
    tap_running("%s", name);
    tap_deadline(w.seconds + 30);
    bool ended = gpu_run(&w, run_cases, NULL, why, sizeof why);
    report(&w, ended, why);
}

static void run_death(const char *backend, int n, bool each_its_own) {
    if (!gpu_takes_world()) return;
    for (int turn = 0; turn < 2; turn++) {
        static bool by_request[2] = {false, true};
        gpu_world w = {backend, n, each_its_own, 30, false, VICTIM};
        char why[1000];
        tap_running("%s: a rank dies", backend);
        tap_deadline(w.seconds + 30);
        gpu_shared_area()->died_ns = 0;
        bool ended = gpu_run(&w, until_it_dies, &by_request[turn], why, sizeof why);
        report(&w, ended, why);
    }
}

static void parse(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *text = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(argv[i], "-small") == 0) {
            opt.small = true;
            continue;
        }
        if (text && strcmp(argv[i], "-backends") == 0) opt.backends = text;
        else if (text && strcmp(argv[i], "-ranks") == 0) opt.ranks = text;
        else if (text && strcmp(argv[i], "-thin") == 0 && atoi(text) > 0) opt.thin = atoi(text);
        else if (text && strcmp(argv[i], "-part") == 0 && gpu_parse_part(text)) opt.part = text;
        else {
            fputs(usage, stderr);
            exit(2);
        }
        i++;
    }
}

static void run_worlds(void) {
    static const char *const backends[] = {"nccl", "ipc", "staged"};
    static const int shared_by[] = {1, 2, 3, 4, 8};
    const gpu_machine *m = &gpu_shared_area()->machine;
    for (int b = 0; b < 3; b++) {
        bool nccl = b == 0;
        int each = m->n_devices > GPU_MAX_RANKS ? GPU_MAX_RANKS : m->n_devices;
        if (!gpu_listed(opt.backends, backends[b])) continue;
        for (int k = 0; k < 5; k++) {
            if (nccl && (shared_by[k] == 3 || shared_by[k] == 8)) continue;
            if (gpu_listed_number(opt.ranks, shared_by[k]))
                run_world(backends[b], shared_by[k], false, false);
        }
        if (each > 1 && gpu_listed_number(opt.ranks, each))
            run_world(backends[b], each, true, false);
        if (nccl && m->nccl >= 23003 && gpu_listed_number(opt.ranks, 2))
            run_world(backends[b], 2, false, true);
        run_death(backends[b], nccl ? 2 : 3, false);
        if (each > 1) run_death(backends[b], each, true);
    }
}

int main(int argc, char **argv) {
    parse(argc, argv);
    const gpu_machine *m = gpu_probe();
    if (m->n_devices == 0) return tap_skip_all(m->why);
    tap_diag("%d x %s, driver %s, CUDA %d (driver's: %d), NCCL %d", m->n_devices, m->name,
             m->driver_text, m->runtime, m->driver, m->nccl);
    gpu_all_worlds(run_worlds);
    if (opt.part) tap_diag("part %s: %d worlds in all parts", opt.part, gpu_cut.n_worlds);
    return tap_done();
}
