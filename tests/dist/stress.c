// stress: all collectives and messages in a random order, over a world and overlapping groups,
// several at a time.
//
// A seed and the number of a call determine what all ranks call: operation, group, dtype, op, root
// and size. Most sizes are at a threshold at which the library changes its algorithm. Each rank
// then decides for itself: blocking or with a request, in place or not, and in which order to wait.
// Each rank also chooses malloc or idist_alloc, and the offset of each buffer. Every element that
// arrives is compared with a value computed from (rank, index, call). IDIST_TEST_SECONDS sets how
// long the test runs. The default is 6 seconds, or 4 in the quick form.
//
// A rank that waits announces itself after 20 ms, and the announcement wakes the other ranks. Such
// an announcement would turn a lost wake-up into a short stall that no test detects. Here the
// announcement never comes, so a lost wake-up becomes a hang.
#ifndef RANKS_MPI
#define IDIST__ANNOUNCE_NS ((int64_t)3600 * 1000000000)
#define IDIST_IMPLEMENTATION
#endif
#include "idist.h"

#include "grid.h"

enum {
    // Values repeat after PERIOD elements. PERIOD is prime, so no size by which the library divides
    // buffers is a multiple of it, and a misplaced piece shows.
    PERIOD = 1021,
    MOST_CALLS = 6,
    MOST_RANKS = 10,
    MOST_BYTES = 5 << 20,
    GROUPS = 4,
    N_SLICES = 21, // time slices; each has its own number of ranks, transport and algorithm
    GUARD = 64
};

typedef enum {
    BARRIER,
    ALL_REDUCE,
    REDUCE,
    SCAN,
    EXSCAN,
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
    REDUCE_SCATTERV,
    MESSAGE,
    // SENDRECV and the kinds after it are blocking calls, which cannot appear between group_begin
    // and group_end.
    SENDRECV,
    BROADCAST_BYTES,
    ALL_GATHER_BYTES,
    N_KINDS
} kind;
static const char *const kind_names[N_KINDS] = {
    "barrier", "all_reduce",     "reduce",          "scan",
    "exscan",  "reduce_scatter", "broadcast",       "all_gather",
    "gather",  "scatter",        "all_to_all",      "all_gatherv",
    "gatherv", "scatterv",       "all_to_allv",     "reduce_scatterv",
    "message", "sendrecv",       "broadcast_bytes", "all_gather_bytes"};

// User ops, in addition to the built-in ops.
enum { MIXED = IDIST_MINLOC, AFFINE, PREMUL, N_OPS };

typedef struct stress {
    uint64_t seed;
    int64_t end_ns;
    int64_t n_calls; // calls of rank 0; atomic
} stress;

typedef struct rank_state {
    stress *shared;
    idist_group *groups[GROUPS];
    int rank, n;
    idist_op user_ops[3];
    uint64_t own; // random numbers of this rank only
    uint64_t number;
    // A value was wrong. The rank continues until the ranks next agree whether to stop, so that no
    // rank waits for it.
    bool wrong;
    bool broken; // a call failed
} rank_state;

// A buffer between guards.
typedef struct area {
    unsigned char *base, *p;
    size_t nbytes, before;
    bool window;
} area;

// One call. The fields from `number` to `tag` are the same on all ranks of its group.
typedef struct doing {
    uint64_t number, salt;
    kind what;
    int group, op, root;
    idist_dtype dtype;
    size_t count;
    int src, dst, tag; // source, destination and tag of a message
    idist_group *world, *g;
    int n, r; // size of the group, and our rank in it
    bool in_place, async, started;
    area send, recv;
    unsigned char *to; // where the result goes
    size_t scounts[MOST_RANKS], sdispls[MOST_RANKS], rcounts[MOST_RANKS], rdispls[MOST_RANKS];
    size_t nbytes, sizes[MOST_RANKS];
    idist_recv_info info;
    idist_request request[2];
} doing;

static uint64_t own_random(rank_state *s) { return tap_rand(&s->own); }

static void describe(const rank_state *s, const doing *d, char *text, size_t cap) {
    snprintf(text, cap,
             "n=%d rank %d call %llu: %s x %zu %s op %d root %d on group %d (%d of %d)%s%s%s%s",
             s->n, s->rank, (unsigned long long)d->number, kind_names[d->what], d->count,
             idist_dtype_name(d->dtype), d->op, d->root, d->group, d->r, d->n,
             d->in_place ? " in place" : "", d->async ? " async" : "",
             d->send.window ? " send shared" : "", d->recv.window ? " recv shared" : "");
}

static void complain(rank_state *s, const doing *d, const char *fmt, ...) TAP_PRINTF(3, 4);
static void complain(rank_state *s, const doing *d, const char *fmt, ...) {
    char head[300], text[300];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    describe(s, d, head, sizeof head);
    rank_fail("%s: %s", head, text);
    s->wrong = true;
}

//------------------------------------------------------------------------------
// memory
//------------------------------------------------------------------------------

// Allocates a buffer between guards. In some calls all buffers of all ranks are shared. In other
// calls each rank decides for each buffer whether it is shared.
static area area_make(rank_state *s, const doing *d, size_t nbytes) {
    static const size_t offsets[6] = {0, 0, 0, 1, 8, 13};
    uint64_t h = own_random(s);
    size_t offset = offsets[h % 6], all = nbytes + 2 * GUARD + offset;
    idist_opts o = opts_of(s->groups[0]);
    area a;
    a.window = (d->salt >> 20) % 4 == 0 || (h >> 8) % 2 == 0;
    a.base = (unsigned char *)(a.window ? idist_alloc(all, &o) : malloc(all));
    TAP_REQUIRE(a.base != NULL);
    a.before = GUARD + offset;
    a.p = a.base + a.before;
    a.nbytes = nbytes;
    memset(a.base, 0xA5, a.before);
    memset(a.p, 0x5A, nbytes);
    memset(a.p + nbytes, 0xA5, GUARD);
    return a;
}

static void area_free(area *a) {
    if (a->window) idist_free(a->base);
    else free(a->base);
    a->base = NULL;
}

static bool area_guards_hold(const area *a) {
    for (size_t i = 0; i < a->before; i++)
        if (a->base[i] != 0xA5) return false;
    for (size_t i = 0; i < GUARD; i++)
        if (a->p[a->nbytes + i] != 0xA5) return false;
    return true;
}

//------------------------------------------------------------------------------
// user ops
//------------------------------------------------------------------------------

// Computes (1 + a)(1 + b) - 1 modulo 2^32.
static void op_mixed(const void *in, void *inout, size_t count, idist_dtype dtype, void *arg) {
    const unsigned char *a = (const unsigned char *)in;
    unsigned char *b = (unsigned char *)inout;
    uint32_t x, y;
    (void)dtype;
    (void)arg;
    for (size_t i = 0; i < count; i++) {
        memcpy(&x, a + 4 * i, 4);
        memcpy(&y, b + 4 * i, 4);
        y = x + y + x * y;
        memcpy(b + 4 * i, &y, 4);
    }
}

// Composes two maps x -> p x + q modulo 2^16, each packed as p << 16 | q. The operation does not
// commute.
static uint32_t compose(uint32_t first, uint32_t second) {
    uint32_t p = (first >> 16) * (second >> 16) & 0xFFFF,
             q = ((first & 0xFFFF) * (second >> 16) + (second & 0xFFFF)) & 0xFFFF;
    return p << 16 | q;
}

static void op_affine(const void *in, void *inout, size_t count, idist_dtype dtype, void *arg) {
    const unsigned char *a = (const unsigned char *)in;
    unsigned char *b = (unsigned char *)inout;
    uint32_t x, y;
    (void)dtype;
    (void)arg;
    for (size_t i = 0; i < count; i++) {
        memcpy(&x, a + 4 * i, 4);
        memcpy(&y, b + 4 * i, 4);
        y = compose(x, y);
        memcpy(b + 4 * i, &y, 4);
    }
}

static uint32_t user_value(int rank, size_t i, uint64_t salt) {
    return (uint32_t)(pattern_bits(rank, i, salt) >> 16);
}

static double premul_factor(int world_rank) { return world_rank % 2 ? 0.5 : 2.0; }

//------------------------------------------------------------------------------
// values
//------------------------------------------------------------------------------

static bool reduces(kind what) {
    return (what >= ALL_REDUCE && what <= REDUCE_SCATTER) || what == REDUCE_SCATTERV;
}

static uint64_t block_salt(const doing *d, int block) {
    return d->salt + (uint64_t)block * 0xD1342543DE82EF95u;
}

// Repeats the first PERIOD elements up to `count`.
static void repeat(unsigned char *p, size_t count, size_t esize) {
    for (size_t have = PERIOD; have < count; have *= 2)
        memcpy(p + have * esize, p, (count - have < have ? count - have : have) * esize);
}

// Fills p with what `rank` of the group contributes to `block`.
static void fill_block(const doing *d, unsigned char *p, int rank, int block, size_t count) {
    size_t esize = idist_dtype_size(d->dtype), first = count < PERIOD ? count : PERIOD;
    uint64_t salt = block_salt(d, block);
    if (!reduces(d->what)) {
        pattern_fill(p, 0, first, esize, rank, salt);
    } else if (d->op == MIXED || d->op == AFFINE) {
        for (size_t i = 0; i < first; i++) {
            uint32_t v = user_value(rank, i, salt);
            memcpy(p + 4 * i, &v, 4);
        }
    } else {
        reduced_fill(p, d->dtype, d->op == PREMUL ? IDIST_SUM : (idist_op)d->op, d->n, 0, first,
                     rank, salt);
    }
    repeat(p, count, esize);
}

// Computes element i of the reduction over ranks lo .. hi - 1 of the group.
static void reduced(const doing *d, int lo, int hi, int block, size_t i, unsigned char *out) {
    uint64_t salt = block_salt(d, block);
    if (d->op == MIXED || d->op == AFFINE) {
        uint32_t acc = user_value(lo, i, salt);
        for (int k = lo + 1; k < hi; k++) {
            uint32_t v = user_value(k, i, salt);
            acc = d->op == MIXED ? acc + v + acc * v : compose(acc, v);
        }
        memcpy(out, &acc, 4);
    } else if (d->op == PREMUL) {
        double sum = 0;
        for (int k = lo; k < hi; k++)
            sum += premul_factor(idist_group_translate(d->g, k, d->world)) *
                   reduced_float(d->dtype, IDIST_SUM, d->n, k, i, salt);
        store_double(out, d->dtype, sum);
    } else {
        reduced_expected(out, d->dtype, (idist_op)d->op, d->n, lo, hi, i, salt);
    }
}

// Checks got[0 .. count) against `want`, which holds only the first PERIOD elements.
static void compare(rank_state *s, const doing *d, const unsigned char *got,
                    const unsigned char *want, size_t count, int from) {
    size_t esize = idist_dtype_size(d->dtype), first = count < PERIOD ? count : PERIOD, i = 0;
    bool head = memcmp(got, want, first * esize) == 0;
    if (head &&
        (count <= PERIOD || memcmp(got + PERIOD * esize, got, (count - PERIOD) * esize) == 0))
        return;
    while (i < count && memcmp(got + i * esize, want + i % PERIOD * esize, esize) == 0) i++;
    char a[40] = "", b[40] = "";
    if (i < count) {
        grid_hex(got + i * esize, esize, a);
        grid_hex(want + i % PERIOD * esize, esize, b);
    }
    complain(s, d, "element %zu of %zu from rank %d: got 0x%s expected 0x%s", i, count, from, a, b);
}

static void check_block(rank_state *s, const doing *d, const unsigned char *got, int rank,
                        int block, size_t count) {
    unsigned char want[PERIOD * 8];
    fill_block(d, want, rank, block, count < PERIOD ? count : PERIOD);
    compare(s, d, got, want, count, rank);
}

static void check_reduced(rank_state *s, const doing *d, const unsigned char *got, int lo, int hi,
                          int block, size_t count) {
    unsigned char want[PERIOD * 8];
    size_t esize = idist_dtype_size(d->dtype);
    for (size_t i = 0; i < count && i < PERIOD; i++) reduced(d, lo, hi, block, i, want + i * esize);
    compare(s, d, got, want, count, -1);
}

//------------------------------------------------------------------------------
// the plan of a call
//------------------------------------------------------------------------------

static bool wide(kind what) {
    return what == REDUCE_SCATTER || (what >= ALL_GATHER && what <= REDUCE_SCATTERV) ||
           what == ALL_GATHER_BYTES;
}

static size_t plan_count(uint64_t h, size_t esize, size_t blocks) {
    static const size_t borders[8] = {32,        4096,      8192,      128 << 10,
                                      256 << 10, 384 << 10, 512 << 10, 2 << 20};
    size_t nbytes = borders[h % 8] / (h >> 8 & 1 ? blocks : 1), count;
    uint64_t pick = (h >> 16) % 8;
    if (pick == 0) return (size_t)((h >> 24) % 4);
    if (pick == 1) nbytes = (size_t)((h >> 24) % 40000) / blocks;
    if (pick == 2 && (h >> 40) % 4 == 0) nbytes = (size_t)((h >> 24) % MOST_BYTES);
    count = nbytes / esize + (size_t)((h >> 48) % 3);
    if (count) count--;
    while (count * esize * blocks > MOST_BYTES) count /= 2;
    return count;
}

static void plan_op(doing *d, uint64_t h) {
    d->op = (int)(h % N_OPS);
    if (d->op == MIXED || d->op == AFFINE) d->dtype = IDIST_U32;
    if (d->op == PREMUL) d->dtype = (idist_dtype)(IDIST_F16 + (h >> 8) % (N_NUMBERS - IDIST_F16));
    if (d->op < IDIST_MINLOC && !op_allowed((idist_op)d->op, d->dtype)) d->op = IDIST_SUM;
    if (d->op == IDIST_AVG && (d->what == SCAN || d->what == EXSCAN)) d->op = IDIST_SUM;
}

// Plans call `number`, which stands between group_begin and group_end if `between` is true. Returns
// false if this rank is not in the group of the call.
static bool plan(rank_state *s, doing *d, uint64_t number, bool between) {
    uint64_t x = s->shared->seed ^ (number * 0x9E3779B97F4A7C15u), h = tap_rand(&x);
    memset(d, 0, sizeof *d);
    d->number = number;
    d->salt = tap_rand(&x) >> 16;
    d->what = (kind)(h % (between ? SENDRECV : N_KINDS));
    d->group = (h >> 8) % 3 == 0 ? 0 : (int)((h >> 12) % GROUPS);
    d->world = s->groups[0];
    d->g = s->groups[d->group];
    d->n = idist_group_size(d->g);
    d->r = idist_group_rank(d->g);
    d->dtype = (idist_dtype)((h >> 16) % N_NUMBERS);
    if (d->what >= BROADCAST_BYTES) d->dtype = IDIST_U8;
    if (d->r < 0) return false;
    if (reduces(d->what)) plan_op(d, h >> 24);
    d->root = (int)((h >> 40) % (uint64_t)d->n);
    d->src = (int)((h >> 44) % (uint64_t)d->n);
    d->dst = (int)((h >> 48) % (uint64_t)d->n);
    d->tag = (int)((h >> 52) % 3);
    if (d->what != BARRIER)
        d->count =
            plan_count(tap_rand(&x), idist_dtype_size(d->dtype), wide(d->what) ? (size_t)d->n : 1);
    return true;
}

//------------------------------------------------------------------------------
// the v-forms
//------------------------------------------------------------------------------

static size_t v_count(const doing *d, int from, int to) {
    uint64_t h = tap_mix(d->salt + (uint64_t)(from * 97 + to * 7));
    if (h % 4 == 0 || d->count == 0) return 0;
    return h % 4 == 1 ? d->count : (size_t)(h >> 8) % (d->count + 1);
}

// Places the blocks at random; each rank chooses its own layout. Returns the extent.
static size_t v_layout(rank_state *s, const doing *d, const size_t *counts, size_t *displs) {
    uint64_t h = own_random(s);
    size_t at = (size_t)(h % 3);
    for (int i = 0; i < d->n; i++) {
        int k = h >> 8 & 1 ? d->n - 1 - i : i;
        displs[k] = at;
        at += counts[k] + (size_t)((h >> 16) % 3);
    }
    return at;
}

static void check_gaps(rank_state *s, const doing *d, const area *a, const size_t *counts,
                       const size_t *displs) {
    size_t esize = idist_dtype_size(d->dtype), at = 0;
    while (at < a->nbytes / esize) {
        int k = 0;
        while (k < d->n && !(counts[k] && displs[k] == at)) k++;
        if (k < d->n) {
            at += counts[k];
            continue;
        }
        for (size_t i = 0; i < esize; i++) {
            if (a->p[at * esize + i] == 0x5A) continue;
            complain(s, d, "element %zu lies between the blocks and was written", at);
            return;
        }
        at++;
    }
}

static void make_v_areas(rank_state *s, doing *d) {
    size_t esize = idist_dtype_size(d->dtype), scatter = 0, gather = 0;
    bool root = d->r == d->root;
    for (int k = 0; k < d->n; k++) {
        d->scounts[k] = d->what == SCATTERV ? v_count(d, k, k) : v_count(d, d->r, k);
        d->rcounts[k] = d->what == ALL_TO_ALLV ? v_count(d, k, d->r) : v_count(d, k, k);
    }
    if (d->what == ALL_TO_ALLV || (d->what == SCATTERV && root))
        scatter = v_layout(s, d, d->scounts, d->sdispls);
    if (d->what == ALL_TO_ALLV || d->what == ALL_GATHERV || (d->what == GATHERV && root))
        gather = v_layout(s, d, d->rcounts, d->rdispls);
    if (d->what == ALL_GATHERV || d->what == GATHERV) scatter = d->rcounts[d->r];
    if (d->what == SCATTERV || d->what == REDUCE_SCATTERV) gather = d->rcounts[d->r];
    if (d->what == REDUCE_SCATTERV)
        for (int k = 0; k < d->n; k++) {
            d->sdispls[k] = scatter;
            d->scounts[k] = d->rcounts[k];
            scatter += d->rcounts[k];
        }
    d->send = area_make(s, d, scatter * esize);
    d->recv = area_make(s, d, gather * esize);
    d->in_place = d->in_place && d->what != ALL_TO_ALLV &&
                  (root || d->what == ALL_GATHERV || d->what == REDUCE_SCATTERV);
    if (d->what == SCATTERV || d->what == ALL_TO_ALLV || d->what == REDUCE_SCATTERV)
        for (int k = 0; k < d->n && scatter; k++)
            fill_block(d, d->send.p + d->sdispls[k] * esize, d->r, k, d->scounts[k]);
    else
        fill_block(d, d->in_place ? d->recv.p + d->rdispls[d->r] * esize : d->send.p, d->r, 0,
                   d->rcounts[d->r]);
    d->to = d->recv.p;
    if (d->in_place && (d->what == SCATTERV || d->what == REDUCE_SCATTERV))
        d->to = d->send.p + d->sdispls[d->r] * esize;
}

static idist_status call_v(rank_state *s, doing *d, const idist_opts *o) {
    idist_op op = d->op < IDIST_MINLOC ? (idist_op)d->op : s->user_ops[d->op - IDIST_MINLOC];
    size_t esize = idist_dtype_size(d->dtype), own = d->rcounts[d->r];
    const void *from = d->in_place ? d->recv.p + d->rdispls[d->r] * esize : d->send.p;
    bool root = d->r == d->root;
    switch (d->what) {
    case ALL_GATHERV:
        return idist_all_gatherv(from, own, d->recv.p, d->rcounts, d->rdispls, d->dtype, o);
    case GATHERV:
        return idist_gatherv(from, own, root ? d->recv.p : NULL, root ? d->rcounts : NULL,
                             root ? d->rdispls : NULL, d->dtype, d->root, o);
    case SCATTERV:
        return idist_scatterv(root ? d->send.p : NULL, root ? d->scounts : NULL,
                              root ? d->sdispls : NULL, d->to, own, d->dtype, d->root, o);
    case REDUCE_SCATTERV:
        return idist_reduce_scatterv(d->send.p, d->to, d->rcounts, d->dtype, op, o);
    default:
        return idist_all_to_allv(d->send.p, d->scounts, d->sdispls, d->recv.p, d->rcounts,
                                 d->rdispls, d->dtype, o);
    }
}

static void check_v(rank_state *s, const doing *d) {
    size_t esize = idist_dtype_size(d->dtype);
    bool root = d->r == d->root;
    if (d->what == REDUCE_SCATTERV) {
        check_reduced(s, d, d->to, 0, d->n, d->r, d->rcounts[d->r]);
        return;
    }
    if (d->what == SCATTERV) {
        check_block(s, d, d->to, d->root, d->r, d->rcounts[d->r]);
        for (int k = 0; k < d->n && root; k++)
            check_block(s, d, d->send.p + d->sdispls[k] * esize, d->root, k, d->scounts[k]);
        return;
    }
    if (d->what != GATHERV || root) {
        for (int k = 0; k < d->n; k++)
            check_block(s, d, d->recv.p + d->rdispls[k] * esize, k,
                        d->what == ALL_TO_ALLV ? d->r : 0, d->rcounts[k]);
        check_gaps(s, d, &d->recv, d->rcounts, d->rdispls);
    }
    if (d->what == ALL_TO_ALLV)
        for (int k = 0; k < d->n; k++)
            check_block(s, d, d->send.p + d->sdispls[k] * esize, d->r, k, d->scounts[k]);
    else if (!d->in_place) check_block(s, d, d->send.p, d->r, 0, d->rcounts[d->r]);
}

//------------------------------------------------------------------------------
// messages, and bytes of sizes that only the sender knows
//------------------------------------------------------------------------------

static size_t sent_count(const doing *d, int rank) {
    return d->count + (d->salt % 2 ? (size_t)rank : 0);
}

// Returns how many bytes `rank` contributes to a broadcast_bytes or all_gather_bytes.
static size_t bytes_of(const doing *d, int rank) {
    return d->what == BROADCAST_BYTES ? d->count : v_count(d, rank, 0);
}

// Returns the rank that this rank sends to in a sendrecv if `sends`, otherwise the rank that it
// receives from. Ranks exchange around a ring or in pairs.
static int partner(const doing *d, bool sends) {
    int shift = (int)((d->salt >> 8) % (uint64_t)d->n);
    if (d->salt >> 4 & 1) return (shift - d->r + d->n) % d->n;
    return (d->r + (sends ? shift : d->n - shift)) % d->n;
}

static void make_message_areas(rank_state *s, doing *d) {
    size_t esize = idist_dtype_size(d->dtype), more = d->salt >> 12 & 1 ? 5 : 0;
    size_t total = 0;
    if (d->what == MESSAGE || d->what == SENDRECV) {
        bool sends = d->what == SENDRECV || d->r == d->src;
        int from = d->what == SENDRECV ? partner(d, false) : d->src;
        bool gets = d->what == SENDRECV || d->r == d->dst;
        d->send = area_make(s, d, sends ? sent_count(d, d->r) * esize : 0);
        d->recv = area_make(s, d, gets ? (sent_count(d, from) + more) * esize : 0);
        if (sends) fill_block(d, d->send.p, d->r, 0, sent_count(d, d->r));
        return;
    }
    for (int k = 0; k < d->n; k++) total += bytes_of(d, k);
    d->send = area_make(s, d, d->what == BROADCAST_BYTES ? 0 : bytes_of(d, d->r));
    d->recv = area_make(s, d, d->what == BROADCAST_BYTES ? d->count : total);
    if (d->what == ALL_GATHER_BYTES) fill_block(d, d->send.p, d->r, 0, d->send.nbytes);
    else if (d->r == d->root) fill_block(d, d->recv.p, d->r, 0, d->count);
    d->nbytes = d->r == d->root ? d->count : 0;
}

static idist_status receive_matched(doing *d, size_t room, const idist_opts *o) {
    idist_opts plain = opts_of(d->g);
    idist_message message;
    idist_status status = idist_mprobe(d->src, d->tag, &message, &plain);
    if (status != IDIST_OK) return status;
    d->info = message.info;
    return idist_mrecv(d->recv.p, room, d->dtype, &message, o);
}

static idist_status call_message(doing *d, const idist_opts *o, bool between) {
    size_t esize = idist_dtype_size(d->dtype), sent = sent_count(d, d->r),
           room = d->recv.nbytes / esize;
    idist_opts plain = opts_of(d->g), other = opts_async(d->g, &d->request[1]);
    idist_status status = IDIST_OK;
    if (d->what == SENDRECV)
        return idist_sendrecv(d->send.p, sent, partner(d, true), d->tag, d->recv.p, room,
                              partner(d, false), d->tag, d->dtype, &d->info, &plain);
    if (d->what == BROADCAST_BYTES)
        return idist_broadcast_bytes(d->recv.p, d->recv.nbytes, &d->nbytes, d->root, &plain);
    if (d->what == ALL_GATHER_BYTES)
        return idist_all_gather_bytes(d->send.p, d->send.nbytes, d->recv.p, d->recv.nbytes,
                                      d->sizes, &plain);
    // If the rank sends to itself, the send or the receive must not block.
    if (d->r == d->src && d->r == d->dst) {
        status = idist_send(d->send.p, sent, d->dtype, d->dst, d->tag, between ? &plain : &other);
    } else if (d->r == d->src) {
        status = idist_send(d->send.p, sent, d->dtype, d->dst, d->tag, o);
    }
    if (status != IDIST_OK || d->r != d->dst) return status;
    if (!between && d->salt >> 16 & 1) return receive_matched(d, room, o);
    return idist_recv(d->recv.p, room, d->dtype, d->src, d->tag, &d->info, o);
}

static void check_message(rank_state *s, const doing *d) {
    int from = d->what == SENDRECV ? partner(d, false) : d->src;
    size_t at = 0;
    if (d->what == BROADCAST_BYTES) {
        if (d->nbytes != d->count)
            complain(s, d, "size: got %zu expected %zu", d->nbytes, d->count);
        else check_block(s, d, d->recv.p, d->root, 0, d->count);
        return;
    }
    if (d->what == ALL_GATHER_BYTES) {
        for (int k = 0; k < d->n; k++) {
            if (d->sizes[k] != bytes_of(d, k))
                complain(s, d, "size of rank %d: got %zu expected %zu", k, d->sizes[k],
                         bytes_of(d, k));
            else check_block(s, d, d->recv.p + at, k, 0, d->sizes[k]);
            at += bytes_of(d, k);
        }
        return;
    }
    if (d->what == SENDRECV || d->r == d->dst) {
        if (d->info.source != from || d->info.tag != d->tag || d->info.count != sent_count(d, from))
            complain(s, d, "info: got %d, %d, %zu expected %d, %d, %zu", d->info.source,
                     d->info.tag, d->info.count, from, d->tag, sent_count(d, from));
        else check_block(s, d, d->recv.p, from, 0, sent_count(d, from));
    }
    if (d->what == SENDRECV || d->r == d->src)
        check_block(s, d, d->send.p, d->r, 0, sent_count(d, d->r));
}

//------------------------------------------------------------------------------
// the other collectives
//------------------------------------------------------------------------------

// Returns the number of blocks in the send buffer of this rank.
static size_t send_blocks(const doing *d) {
    bool root = d->r == d->root;
    if (d->what == REDUCE_SCATTER || d->what == ALL_TO_ALL) return (size_t)d->n;
    if (d->what == SCATTER) return root ? (size_t)d->n : 0;
    return d->what == BARRIER || d->what == BROADCAST ? 0 : 1;
}

// Returns the number of blocks in the receive buffer of this rank.
static size_t recv_blocks(const doing *d) {
    bool root = d->r == d->root;
    if (d->what == ALL_GATHER || d->what == ALL_TO_ALL) return (size_t)d->n;
    if (d->what == GATHER) return root ? (size_t)d->n : 0;
    if (d->what == REDUCE) return root ? 1 : 0;
    return d->what == BARRIER ? 0 : 1;
}

static void make_areas(rank_state *s, doing *d) {
    size_t nbytes = d->count * idist_dtype_size(d->dtype);
    bool root = d->r == d->root,
         rooted = d->what == REDUCE || d->what == GATHER || d->what == SCATTER;
    unsigned char *from;
    if (d->what == BARRIER || d->what == BROADCAST || (rooted && !root)) d->in_place = false;
    d->send = area_make(s, d, send_blocks(d) * nbytes);
    d->recv = area_make(s, d, recv_blocks(d) * nbytes);
    d->to = d->recv.p;
    from = d->send.p;
    if (d->in_place && (d->what == ALL_GATHER || d->what == GATHER))
        from = d->recv.p + (size_t)d->r * nbytes;
    else if (d->in_place && (d->what == REDUCE_SCATTER || d->what == SCATTER))
        d->to = d->send.p + (size_t)d->r * nbytes;
    else if (d->in_place) d->to = d->send.p;
    for (size_t k = 0; k < send_blocks(d); k++)
        fill_block(d, from + k * nbytes, d->r, (int)k, d->count);
    if (d->what == BROADCAST && root) fill_block(d, d->recv.p, d->r, 0, d->count);
}

static idist_status call(rank_state *s, doing *d, const idist_opts *o) {
    size_t nbytes = d->count * idist_dtype_size(d->dtype);
    idist_op op = d->op < IDIST_MINLOC ? (idist_op)d->op : s->user_ops[d->op - IDIST_MINLOC];
    bool root = d->r == d->root, own = d->in_place && (d->what == ALL_GATHER || d->what == GATHER);
    const void *from = own ? d->recv.p + (size_t)d->r * nbytes : d->send.p;
    switch (d->what) {
    case BARRIER: return idist_barrier(o);
    case ALL_REDUCE: return idist_all_reduce(from, d->to, d->count, d->dtype, op, o);
    case REDUCE: return idist_reduce(from, root ? d->to : NULL, d->count, d->dtype, op, d->root, o);
    case SCAN: return idist_scan(from, d->to, d->count, d->dtype, op, o);
    case EXSCAN: return idist_exscan(from, d->to, d->count, d->dtype, op, o);
    case REDUCE_SCATTER: return idist_reduce_scatter(from, d->to, d->count, d->dtype, op, o);
    case BROADCAST: return idist_broadcast(d->recv.p, d->count, d->dtype, d->root, o);
    case ALL_GATHER: return idist_all_gather(from, d->recv.p, d->count, d->dtype, o);
    case GATHER: return idist_gather(from, root ? d->recv.p : NULL, d->count, d->dtype, d->root, o);
    case SCATTER: return idist_scatter(root ? from : NULL, d->to, d->count, d->dtype, d->root, o);
    default: return idist_all_to_all(from, d->to, d->count, d->dtype, o);
    }
}

static void check_result(rank_state *s, const doing *d) {
    size_t nbytes = d->count * idist_dtype_size(d->dtype);
    bool root = d->r == d->root;
    switch (d->what) {
    case ALL_REDUCE: check_reduced(s, d, d->to, 0, d->n, 0, d->count); break;
    case REDUCE:
        if (root) check_reduced(s, d, d->to, 0, d->n, 0, d->count);
        break;
    case SCAN: check_reduced(s, d, d->to, 0, d->r + 1, 0, d->count); break;
    case EXSCAN:
        if (d->r > 0) check_reduced(s, d, d->to, 0, d->r, 0, d->count);
        else if (!d->in_place && nbytes &&
                 (d->to[0] != 0x5A || memcmp(d->to, d->to + 1, nbytes - 1) != 0))
            complain(s, d, "the receive buffer of rank 0 must stay untouched");
        break;
    case REDUCE_SCATTER: check_reduced(s, d, d->to, 0, d->n, d->r, d->count); break;
    case BROADCAST: check_block(s, d, d->recv.p, d->root, 0, d->count); break;
    case GATHER:
    case ALL_GATHER:
        for (int k = 0; k < d->n && (root || d->what == ALL_GATHER); k++)
            check_block(s, d, d->recv.p + (size_t)k * nbytes, k, 0, d->count);
        break;
    case SCATTER: check_block(s, d, d->to, d->root, d->r, d->count); break;
    case ALL_TO_ALL:
        for (int k = 0; k < d->n; k++)
            check_block(s, d, d->to + (size_t)k * nbytes, k, d->r, d->count);
        break;
    default: break;
    }
    if (d->in_place && d->what != SCATTER) return;
    for (size_t k = 0; k < send_blocks(d); k++)
        check_block(s, d, d->send.p + k * nbytes, d->r, (int)k, d->count);
}

//------------------------------------------------------------------------------
// rounds
//------------------------------------------------------------------------------

static void begin(rank_state *s, doing *d, bool between) {
    uint64_t h = own_random(s);
    idist_opts o = opts_of(d->g);
    idist_status status;
    d->in_place = h % 3 == 0;
    d->async = (h >> 8) % 2 == 0 && !between && d->what < SENDRECV;
    if (d->async) o.request = &d->request[0];
    if (d->what >= MESSAGE) make_message_areas(s, d);
    else if (d->what >= ALL_GATHERV) make_v_areas(s, d);
    else make_areas(s, d);
    d->started = true;
    if (d->what >= MESSAGE) status = call_message(d, &o, between);
    else if (d->what >= ALL_GATHERV) status = call_v(s, d, &o);
    else status = call(s, d, &o);
    if (status == IDIST_OK) return;
    complain(s, d, "got %s: %s", idist_status_name(status), idist_last_error());
    s->broken = true;
}

static void finish(rank_state *s, doing *d) {
    for (int i = 0; i < 2; i++) {
        idist_status status = IDIST_OK;
        bool done = false;
        if (own_random(s) % 4 == 0)
            while (status == IDIST_OK && !done && sched_yield() == 0)
                status = idist_test(&d->request[i], &done);
        else status = idist_wait(&d->request[i]);
        if (status == IDIST_OK) continue;
        complain(s, d, "wait: got %s: %s", idist_status_name(status), idist_last_error());
        s->broken = true;
    }
}

static void check(rank_state *s, doing *d) {
    if (!s->broken) {
        if (d->what >= MESSAGE) check_message(s, d);
        else if (d->what >= ALL_GATHERV) check_v(s, d);
        else check_result(s, d);
        if (!area_guards_hold(&d->send)) complain(s, d, "written outside of the send buffer");
        if (!area_guards_hold(&d->recv)) complain(s, d, "written outside of the receive buffer");
    }
    area_free(&d->send);
    area_free(&d->recv);
    d->started = false;
}

// Makes a few calls. All ranks make the same calls, but each rank waits for them in its own order.
static void one_round(rank_state *s, doing *calls) {
    uint64_t h = tap_mix(s->shared->seed + s->number);
    int k, n = 1 + (int)(h % MOST_CALLS);
    bool between = (h >> 8) % 8 == 0;
    if (between) idist_group_begin();
    for (k = 0; k < n; k++) {
        doing *d = &calls[k];
        if (plan(s, d, s->number++, between) && !s->broken) begin(s, d, between);
        if (!between && own_random(s) % 4 == 0) { // an early wait
            d = &calls[own_random(s) % (uint64_t)(k + 1)];
            if (d->started) finish(s, d);
        }
    }
    if (between) {
        idist_status status = idist_group_end();
        if (status != IDIST_OK) {
            rank_fail("rank %d: group_end: got %s: %s", s->rank, idist_status_name(status),
                      idist_last_error());
            s->broken = true;
        }
    }
    int first = (int)(own_random(s) % (uint64_t)n), step = own_random(s) % 2 ? 1 : n - 1;
    for (k = 0; k < n; k++) {
        doing *d = &calls[(first + k * step) % n];
        if (d->started) finish(s, d);
    }
    for (k = 0; k < n; k++)
        if (calls[k].started) check(s, &calls[k]);
}

// Splits the world into two halves, and makes two groups of some ranks, each in its own order.
static bool make_groups(rank_state *s) {
    uint64_t h = tap_mix(s->shared->seed ^ 77),
             mine = tap_mix(s->shared->seed + (uint64_t)s->rank * 13);
    bool ok =
        rank_ok(s->rank, idist_split(s->groups[0], s->rank % 2, (int)(mine % 5), &s->groups[1]));
    int last = (int)(h % (uint64_t)s->n);
    ok = ok && rank_ok(s->rank, idist_split(s->groups[0], s->rank >= last ? 0 : -1, -s->rank,
                                            &s->groups[2]));
    return ok && rank_ok(s->rank, idist_split(s->groups[0], mine >> 8 & 1 ? 0 : -1,
                                              (int)(mine >> 16 & 3), &s->groups[3]));
}

static bool make_ops(rank_state *s) {
    return rank_ok(s->rank, idist_op_create(op_mixed, NULL, true, s->groups[0], &s->user_ops[0])) &&
           rank_ok(s->rank,
                   idist_op_create(op_affine, NULL, false, s->groups[0], &s->user_ops[1])) &&
           rank_ok(s->rank, idist_op_create_premul_sum(premul_factor(s->rank), s->groups[0],
                                                       &s->user_ops[2]));
}

static void storm(idist_group *world, int rank, int n, void *arg) {
    static const uint64_t base = 0x5EED;
    rank_state s;
    doing *calls = (doing *)calloc(MOST_CALLS, sizeof *calls);
    idist_opts o = opts_of(world);
    TAP_REQUIRE(calls);
    memset(&s, 0, sizeof s);
    s.shared = (stress *)arg;
    s.groups[0] = world;
    s.rank = rank;
    s.n = n;
    s.own = tap_mix(s.shared->seed + base * (uint64_t)(rank + 1));
    bool ok = make_groups(&s) && make_ops(&s);
    while (ok) {
        int32_t stop = s.wrong || (rank == 0 && tap_now_ns() >= s.shared->end_ns);
        ok =
            !s.broken && rank_ok(rank, idist_all_reduce(&stop, &stop, 1, IDIST_I32, IDIST_MAX, &o));
        if (!ok || stop) break;
        for (int i = 0; i < 4 && !s.broken; i++) one_round(&s, calls);
        if (rank == 0) __atomic_store_n(&s.shared->n_calls, (int64_t)s.number, __ATOMIC_RELAXED);
    }
    for (int i = 1; i < GROUPS && ok; i++) rank_ok(rank, idist_free_group(&s.groups[i]));
    for (int i = 0; i < 3 && ok; i++) rank_ok(rank, idist_op_free(s.user_ops[i], world));
    free(calls);
}

int main(void) {
    static const char *const algorithms[6] = {"auto", "remote",  "chunked",
                                              "auto", "latency", "bandwidth"};
    static const size_t shm_nbytes[4] = {0, 0, (size_t)1 << 20, (size_t)300 << 10};
    static const struct {
        int n;
        const char *hosts;
    } placements[7] = {{8, "2+2+2+2"}, {9, "3+3+3"},           {10, "5+5"},  {9, "1+6+2"},
                       {7, "hosts"},   {8, "1+1+1+1+1+1+1+1"}, {8, "blocks"}};
    const char *text = getenv("IDIST_TEST_SECONDS");
    double seconds = text && atof(text) > 0 ? atof(text) : test_quick() ? 4 : 6;
    stress *shared = (stress *)shared_alloc(sizeof *shared);
    int64_t end_ns = tap_now_ns() + (int64_t)(seconds * 1e9),
            slice_ns = (int64_t)(seconds * 1e9) / N_SLICES;
    if (slice_ns > 1000000000) slice_ns = 1000000000;
    tap_deadline((int)seconds + 60);
    (void)ranks__log();
    tap_diag("seed %llu", (unsigned long long)tap_seed());
#ifdef RANKS_MPI // every process must arrive at the same number of slices
    end_ns = tap_now_ns();
    slice_ns = 200000000;
#endif
    for (uint64_t i = 0; i < N_SLICES || tap_now_ns() < end_ns; i++) {
        int n = 2 + (int)(i / 2 % 7);
        bool threads = i % 2 == 1;
        uint64_t h = tap_mix(tap_seed() + i);
        idist_desc d = desc_with(transport_names[(h >> 16) % 3 ? 0 : (h >> 20) % N_TRANSPORTS],
                                 algorithms[h % 6]);
#ifdef RANKS_MPI
        d = desc_with(NULL, NULL);
#else
        if (i % 3 == 2) { // alternately as threads and as processes
            n = placements[i / 3 % 7].n;
            d.transport = placements[i / 3 % 7].hosts;
        }
#endif
        d.shm_nbytes = shm_nbytes[(h >> 8) % 4];
        d.timeout_ms = RANKS_TIMEOUT_MS * test_slow_factor();
        shared->seed = h;
        shared->n_calls = 0;
        shared->end_ns = tap_now_ns() + slice_ns;
        tap_running("stress n=%d %s", n, threads ? "threads" : "processes");
        ranks_reset();
        if (threads) ranks_threads(n, &d, storm, shared);
        else ranks_processes(n, &d, storm, shared, (int)(slice_ns / 1000000) + RANKS_TIMEOUT_MS);
        ranks_report("n=%d %s transport=%s algorithm=%s shm=%zu: %lld random calls", n,
                     threads ? "threads" : "processes", d.transport ? d.transport : "any",
                     d.algorithm ? d.algorithm : "any", d.shm_nbytes, (long long)shared->n_calls);
    }
    return tap_done();
}
