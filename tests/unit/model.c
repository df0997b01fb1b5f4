// model.c - the schedules of all collectives over messages, on a network that exists in numbers
// only
//
//     build/tests/unit/model              the tests
//     build/tests/unit/model -table       projected times for 8 to 4,096 hosts (make model)
//         [-L us] [-o us] [-g us] [-G Gbit/s] [-R GB/s]
//
// All ranks run in this one process. The algorithms are those of ring/algo, compiled against two
// functions of this file in place of idist__send_step and idist__recv_step. Time is virtual, and a
// message takes what the LogGP model says:
//
//   L   latency: from the last byte sent to the last byte received
//   o   overhead: a processor is busy this long with each send and each receive
//   g   gap: a network card begins a message at most this often
//   G   gap per byte, of a card that sends or of one that receives; given as a bandwidth
//   R   time per byte of a reduction; given as a bandwidth
//
// Messages above IDIST__EAGER_BYTES leave when the receive has been posted and its grant is there.
// A rank here stands for a host: inside a host, ranks share memory.
//
// Source: Alexandrov, Ionescu, Schauser, Scheiman, "LogGP: Incorporating Long Messages into the
// LogP Model", 1995.
#pragma GCC diagnostic ignored "-Wunused-function"
#define IDIST_IMPLEMENTATION
#define IDIST_NO_RING
#include "idist.h"

#include "base/begin.h"

#include "ring/msg/recv.h"
#include "ring/share/share.h"

// What the algorithms see instead.
static void model_send_step(idist__task *t, int to, uint32_t step, const void *data, size_t nbytes);
static void model_recv_step(idist__task *t, int slot, int from, uint32_t step, void *data,
                            size_t nbytes);
static void model_copy(void *to, const void *from, size_t nbytes);
#define idist__send_step model_send_step
#define idist__recv_step model_recv_step
#define idist__block_copy model_copy
#include "ring/algo/choose.h"
#undef idist__block_copy

#include "tap.h"

#include <sys/mman.h>

enum { MODEL_BUCKETS = 64, LARGEST = 4096 };

//---- the network ----

static double latency = 20e-6, overhead = 2e-6, gap = 0.5e-6;
static double gap_per_byte = 8 / 25e9, reduction_per_byte = 1 / 8e9;

typedef struct message {
    struct message *next; // in a bucket, or free
    int from, to, slot, depth;
    uint32_t tag;
    size_t nbytes;
    const void *data; // of a send; once it has left, a copy
    void *buffer;     // of a receive
    double at;        // sent, posted or arrived
} message;

typedef enum event_kind { SENT, ARRIVED } event_kind;

typedef struct event {
    double at;
    uint64_t order; // of two at the same time the older one comes first
    event_kind kind;
    message *m;
} event;

typedef struct member { // a rank and its network card
    idist__world w;
    idist_group g;
    idist__ring_group part;
    idist__task t;
    idist__op op;
    char *in, *out;
    double now, out_free, in_free;
    int depth; // messages in the longest chain that has led here
    size_t sent_nbytes;
    uint8_t *is_peer; // by rank: a message goes there or comes from there
    message *posted[MODEL_BUCKETS], *arrived[MODEL_BUCKETS], *held[MODEL_BUCKETS];
} member;

static member *members;
static int member_count;
static size_t latency_nbytes; // what the ranks know of their network; 0: nothing
static bool has_data;         // otherwise no byte is read or written, and buffers have no memory
static member *current;
static int *rank_table;
static char *nowhere; // addresses without memory
static message *idle_messages;
static event *heap;
static size_t event_count, event_capacity;
static uint64_t event_order;

static member *member_of(const idist__task *t) { return &members[t->group->rank]; }

static message *message_new(int from, int to, uint32_t tag, size_t nbytes) {
    message *m = idle_messages;
    if (m) idle_messages = m->next;
    else m = (message *)malloc(sizeof *m);
    TAP_REQUIRE(m);
    memset(m, 0, sizeof *m);
    m->from = from;
    m->to = to;
    m->tag = tag;
    m->nbytes = nbytes;
    return m;
}

static void message_free(message *m) {
    m->next = idle_messages;
    idle_messages = m;
}

static message **bucket_of(message **buckets, int from, uint32_t tag) {
    return &buckets[((uint32_t)from * 31 + tag) % MODEL_BUCKETS];
}

static void message_put(message **buckets, message *m) {
    message **at = bucket_of(buckets, m->from, m->tag);
    while (*at) at = &(*at)->next;
    *at = m;
    m->next = NULL;
}

static message *message_take(message **buckets, int from, uint32_t tag) {
    message **at = bucket_of(buckets, from, tag), *m;
    while (*at && ((*at)->from != from || (*at)->tag != tag)) at = &(*at)->next;
    m = *at;
    if (m) *at = m->next;
    return m;
}

static bool event_before(const event *a, const event *b) {
    return a->at != b->at ? a->at < b->at : a->order < b->order;
}

static void event_push(double at, event_kind kind, message *m) {
    event e = {at, event_order++, kind, m};
    size_t i = event_count++;
    if (event_count > event_capacity) {
        event_capacity = 2 * event_count + 1024;
        heap = (event *)realloc(heap, event_capacity * sizeof *heap);
        TAP_REQUIRE(heap);
    }
    for (; i && event_before(&e, &heap[(i - 1) / 2]); i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
    heap[i] = e;
}

static event event_pop(void) {
    event first = heap[0], last = heap[--event_count];
    size_t i = 0;
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= event_count) break;
        if (child + 1 < event_count && event_before(&heap[child + 1], &heap[child])) child++;
        if (!event_before(&heap[child], &last)) break;
        heap[i] = heap[child];
        i = child;
    }
    if (event_count) heap[i] = last;
    return first;
}

static double later(double a, double b) { return a > b ? a : b; }

// The message leaves at this time, or when the card is free.
static void launch(message *m, double at) {
    member *from = &members[m->from], *to = &members[m->to];
    double bytes = gap_per_byte * (double)(m->nbytes + IDIST__FRAME_BYTES);
    double start = later(at, from->out_free);
    message *sent = message_new(m->from, m->to, m->tag, m->nbytes);
    if (has_data && m->nbytes) { // the sender may change its buffer once the message has left
        void *copy = malloc(m->nbytes);
        TAP_REQUIRE(copy);
        m->data = memcpy(copy, m->data, m->nbytes);
    }
    from->out_free = start + later(gap, bytes);
    to->in_free = later(start + latency, to->in_free) + bytes;
    from->sent_nbytes += m->nbytes;
    from->is_peer[m->to] = to->is_peer[m->from] = 1;
    event_push(from->out_free, SENT, sent);
    event_push(to->in_free, ARRIVED, m);
}

static void model_send_step(idist__task *t, int to, uint32_t step, const void *data,
                            size_t nbytes) {
    member *self = member_of(t);
    message *m = message_new(t->group->rank, to, step, nbytes), *receive;
    self->op.sends_pending++;
    self->now += overhead;
    m->data = data;
    m->depth = self->depth + 1;
    m->at = self->now;
    if (nbytes <= IDIST__EAGER_BYTES) {
        launch(m, m->at);
        return;
    }
    receive = message_take(members[to].posted, m->from, step);
    if (!receive) {
        message_put(members[to].held, m);
        return;
    }
    message_put(members[to].posted, receive);
    launch(m, later(m->at, receive->at + latency));
}

static void model_recv_step(idist__task *t, int slot, int from, uint32_t step, void *data,
                            size_t nbytes) {
    member *self = member_of(t);
    message *receive = message_new(from, t->group->rank, step, nbytes), *m;
    self->op.recvs_pending++;
    if (slot >= 0) self->op.slots_pending |= 1u << slot;
    receive->slot = slot;
    receive->buffer = data;
    receive->at = self->now;
    message_put(self->posted, receive);
    m = message_take(self->arrived, from, step);
    if (m) event_push(later(self->now, m->at), ARRIVED, m);
    m = message_take(self->held, from, step);
    if (m) launch(m, later(m->at, self->now + latency));
}

static void model_copy(void *to, const void *from, size_t nbytes) {
    if (has_data && nbytes && to != from) memmove(to, from, nbytes);
}

static void model_reduce(void *out, const void *lo, const void *hi, size_t count) {
    const int64_t *a = (const int64_t *)lo, *b = (const int64_t *)hi;
    current->now += reduction_per_byte * (double)(count * sizeof *a);
    for (size_t i = 0; has_data && i < count; i++) ((int64_t *)out)[i] = a[i] + b[i];
}

static void resume(member *self) {
    current = self;
    idist__op_run(&self->t);
}

static void arrive(message *m, double at) {
    member *self = &members[m->to];
    message *receive = message_take(self->posted, m->from, m->tag);
    m->at = at;
    if (!receive) {
        message_put(self->arrived, m);
        return;
    }
    TAP_REQUIRE(receive->nbytes == m->nbytes);
    self->now = later(self->now, at) + overhead;
    if (m->depth > self->depth) self->depth = m->depth;
    if (has_data && m->nbytes) {
        memcpy(receive->buffer, m->data, m->nbytes);
        free((void *)(uintptr_t)m->data);
    }
    self->op.recvs_pending--;
    if (receive->slot >= 0) self->op.slots_pending &= ~(1u << receive->slot);
    message_free(receive);
    message_free(m);
    resume(self);
}

static void depart(message *m, double at) {
    member *self = &members[m->from];
    self->now = later(self->now, at);
    self->op.sends_pending--;
    message_free(m);
    resume(self);
}

static void run_events(void) {
    while (event_count) {
        event e = event_pop();
        if (e.kind == SENT) depart(e.m, e.at);
        else arrive(e.m, e.at);
    }
}

//---- a collective on it ----

typedef struct outcome { // of a collective
    double seconds;      // until the last rank is done
    int rounds;          // messages in the longest chain
    size_t sent_nbytes;  // most bytes that a rank sends
    int peer_count;      // most ranks that a rank talks to
    bool done;           // on all ranks
} outcome;

static void *alloc_nowhere(size_t nbytes, void *user) {
    (void)nbytes;
    (void)user;
    return nowhere;
}

static void free_nowhere(void *ptr, void *user) {
    (void)ptr;
    (void)user;
}

static void members_new(int n) {
    static idist__ring ring; // in which nothing fails
    member_count = n;
    members = (member *)calloc((size_t)n, sizeof *members);
    rank_table = (int *)calloc((size_t)n, sizeof *rank_table);
    TAP_REQUIRE(members && rank_table);
    for (int r = 0; r < n; r++) {
        member *self = &members[r];
        rank_table[r] = r;
        self->is_peer = (uint8_t *)calloc((size_t)n, 1);
        TAP_REQUIRE(self->is_peer);
        self->w.impl = &ring;
        self->w.group.size = n;
        self->w.group.rank = r;
        self->g.w = &self->w;
        self->g.size = n;
        self->g.rank = r;
        self->g.ranks = rank_table;
        self->g.impl = &self->part;
        self->t.group = &self->g;
        self->t.impl = &self->op;
    }
}

static void members_free(void) {
    for (int r = 0; r < member_count; r++) {
        free(members[r].is_peer);
        if (has_data) free(members[r].in);
        if (has_data) free(members[r].out);
    }
    free(members);
    free(rank_table);
}

// Blocks of `count` elements in the send and receive buffers of a call of n ranks.
static int blocks_in(idist__kind kind, int n) {
    return kind == IDIST__REDUCE_SCATTER || kind == IDIST__SCATTER || kind == IDIST__ALL_TO_ALL ? n
                                                                                                : 1;
}

static int blocks_out(idist__kind kind, int n) {
    return kind == IDIST__ALL_GATHER || kind == IDIST__GATHER || kind == IDIST__ALL_TO_ALL ? n : 1;
}

// What rank r puts into element i of its send buffer.
static int64_t value_of(int r, size_t i) { return (r + 1) * (int64_t)1000003 + (int64_t)i * 7; }

static void begin(int r, idist__kind kind, size_t count, idist__algorithm setting) {
    member *self = &members[r];
    idist__call *c = &self->t.call;
    int n = member_count;
    size_t in = count * (size_t)blocks_in(kind, n), out = count * (size_t)blocks_out(kind, n);
    self->in = self->out = nowhere;
    if (has_data) {
        self->in = (char *)calloc(in + 1, sizeof(int64_t));
        self->out = (char *)calloc(out + 1, sizeof(int64_t));
        TAP_REQUIRE(self->in && self->out);
        for (size_t i = 0; i < in; i++) ((int64_t *)(void *)self->in)[i] = value_of(r, i);
        if (kind == IDIST__BROADCAST) memcpy(self->out, self->in, count * sizeof(int64_t));
    } else {
        self->w.cfg.mem.alloc_fn = alloc_nowhere;
        self->w.cfg.mem.free_fn = free_nowhere;
    }
    c->kind = c->label = kind;
    c->send = kind == IDIST__BROADCAST ? self->out : self->in;
    c->recv = self->out;
    c->count = c->check = count;
    c->dtype = IDIST_I64;
    c->op = IDIST_SUM;
    self->w.cfg.algorithm = setting;
    self->w.latency_nbytes = latency_nbytes;
    self->part.spans_hosts = true;
    self->w.tasks = &self->t;
    self->t.seq = 1;
}

static outcome run(int n, idist__kind kind, size_t count, idist__algorithm setting) {
    outcome all = {0, 0, 0, 0, true};
    members_new(n);
    event_count = 0;
    for (int r = 0; r < n; r++) begin(r, kind, count, setting);
    for (int r = 0; r < n; r++) {
        member *self = &members[r];
        idist__algorithm algorithm = idist__choose_over_messages(&self->g, &self->t.call);
        TAP_REQUIRE(algorithm == idist__choose_over_messages(&members[0].g, &self->t.call));
        TAP_REQUIRE(idist__choose_begin(&self->t, algorithm));
        self->op.reduce = model_reduce;
        current = self;
        idist__choose_run(&self->t);
        resume(self);
    }
    run_events();
    for (int r = 0; r < n; r++) {
        const member *self = &members[r];
        int peers = 0;
        for (int k = 0; k < n; k++) peers += self->is_peer[k];
        all.done = all.done && self->t.done;
        all.seconds = later(all.seconds, self->now);
        if (self->depth > all.rounds) all.rounds = self->depth;
        if (self->sent_nbytes > all.sent_nbytes) all.sent_nbytes = self->sent_nbytes;
        if (peers > all.peer_count) all.peer_count = peers;
    }
    return all;
}

//---- the schedules compute what they should ----

// Element i of the result of rank r; the root is rank 0.
static int64_t expected(idist__kind kind, int n, int r, size_t count, size_t i) {
    int64_t sum = 0;
    int first = 0, end = n;
    size_t at = kind == IDIST__REDUCE_SCATTER ? (size_t)r * count + i : i;
    switch (kind) {
    case IDIST__BROADCAST: return value_of(0, i);
    case IDIST__ALL_GATHER:
    case IDIST__GATHER: return value_of((int)(i / count), i % count);
    case IDIST__SCATTER: return value_of(0, (size_t)r * count + i);
    case IDIST__ALL_TO_ALL: return value_of((int)(i / count), (size_t)r * count + i % count);
    case IDIST__SCAN: end = r + 1; break;
    case IDIST__EXSCAN: end = r; break;
    default: break;
    }
    for (int k = first; k < end; k++) sum += value_of(k, at);
    return sum;
}

static bool has_result(idist__kind kind, int r) {
    if (kind == IDIST__REDUCE || kind == IDIST__GATHER) return r == 0;
    return kind != IDIST__EXSCAN || r != 0;
}

static int wrong_values(idist__kind kind, int n, size_t count) {
    int wrong = 0;
    for (int r = 0; r < n; r++) {
        const int64_t *out = (const int64_t *)(const void *)members[r].out;
        for (size_t i = 0; has_result(kind, r) && i < count * (size_t)blocks_out(kind, n); i++)
            wrong += out[i] != expected(kind, n, r, count, i);
    }
    return wrong;
}

static const idist__kind kinds[] = {IDIST__BROADCAST,      IDIST__REDUCE,     IDIST__ALL_REDUCE,
                                    IDIST__REDUCE_SCATTER, IDIST__ALL_GATHER, IDIST__GATHER,
                                    IDIST__SCATTER,        IDIST__ALL_TO_ALL, IDIST__SCAN,
                                    IDIST__EXSCAN};

static void check_values(void) {
    static const int sizes[] = {2, 3, 4, 5, 7, 8, 12, 17};
    static const size_t counts[] = {1, 5, 40000};
    has_data = true;
    for (size_t k = 0; k < IDIST__COUNT_OF(kinds); k++) {
        int wrong = 0, not_done = 0;
        for (size_t s = 0; s < 3 * IDIST__COUNT_OF(sizes) * IDIST__COUNT_OF(counts); s++) {
            static const idist__algorithm settings[] = {IDIST__ALGO_AUTO, IDIST__ALGO_LATENCY,
                                                        IDIST__ALGO_BANDWIDTH};
            int n = sizes[s / 3 % IDIST__COUNT_OF(sizes)];
            size_t count = counts[s / 3 / IDIST__COUNT_OF(sizes)];
            not_done += !run(n, kinds[k], count, settings[s % 3]).done;
            wrong += wrong_values(kinds[k], n, count);
            members_free();
        }
        tap_is(not_done, 0, "%s ends on all ranks", idist__kind_names[kinds[k]]);
        tap_is(wrong, 0, "%s: values", idist__kind_names[kinds[k]]);
    }
    has_data = false;
}

//---- how they grow ----

static int log2_up(int n) {
    int log = 0;
    while (1 << log < n) log++;
    return log;
}

// Rounds that a collective of 8 bytes may take beyond log2 of n, rounded up; -1: it grows faster.
static int rounds_beyond_log(idist__kind kind) {
    switch (kind) {
    case IDIST__ALL_REDUCE: // ranks beyond a power of two join before and after
    case IDIST__REDUCE_SCATTER:
    case IDIST__EXSCAN: return 1;
    default: return 0;
    }
}

static const idist__kind small_kinds[] = {IDIST__BARRIER,        IDIST__BROADCAST,
                                          IDIST__REDUCE,         IDIST__ALL_REDUCE,
                                          IDIST__REDUCE_SCATTER, IDIST__ALL_GATHER,
                                          IDIST__GATHER,         IDIST__SCATTER,
                                          IDIST__ALL_TO_ALL,     IDIST__SCAN,
                                          IDIST__EXSCAN};

// Small messages: log2(n) rounds, and as many peers.
static void check_small(int n) {
    int log = log2_up(n);
    for (size_t k = 0; k < IDIST__COUNT_OF(small_kinds); k++) {
        idist__kind kind = small_kinds[k];
        const char *name = idist__kind_names[kind];
        outcome all = run(n, kind, kind == IDIST__BARRIER ? 0 : 1, IDIST__ALGO_LATENCY);
        int rounds = log + rounds_beyond_log(kind);
        members_free();
        tap_ok(all.done && all.rounds <= rounds,
               "%s of 8 bytes, %d ranks: at most %d rounds, got %d", name, n, rounds, all.rounds);
        tap_ok(all.peer_count <= 2 * log, "%s of 8 bytes, %d ranks: at most %d peers, got %d", name,
               n, 2 * log, all.peer_count);
    }
}

// Large messages: no rank sends more than the fraction (n - 1) / n of the whole, or twice that, and
// the time is that of these bytes and of the rounds. Blocks may be one element larger than others.
static void check_large(int n) {
    static const struct {
        idist__kind kind;
        int times; // (n - 1) / n of the whole is sent so often
        bool per_rank;
    } rows[] = {{IDIST__ALL_REDUCE, 2, false},
                {IDIST__REDUCE_SCATTER, 1, true},
                {IDIST__ALL_GATHER, 1, true}};
    const size_t whole = (size_t)8 << 20; // elements
    double reduction = reduction_per_byte;
    reduction_per_byte = 0; // it overlaps with the transfers, as chunks allow
    for (size_t k = 0; k < IDIST__COUNT_OF(rows); k++) {
        size_t block = (whole + (size_t)n - 1) / (size_t)n, nbytes = block * sizeof(int64_t);
        size_t most = (size_t)rows[k].times * (size_t)(n - 1) * nbytes;
        outcome all = run(n, rows[k].kind, rows[k].per_rank ? block : whole, IDIST__ALGO_BANDWIDTH);
        double bound = gap_per_byte * (double)most, share = bound / all.seconds;
        members_free();
        tap_ok(all.done && all.sent_nbytes <= most,
               "%s of 64 MiB, %d ranks: a rank sends %zu bytes", idist__kind_names[rows[k].kind], n,
               all.sent_nbytes);
        tap_is(all.peer_count, n == 2 ? 1 : 2, "%s of 64 MiB, %d ranks: peers",
               idist__kind_names[rows[k].kind], n);
        tap_ok(share > 0.8 || n > 64, "%s of 64 MiB, %d ranks: %.0f %% of the bandwidth",
               idist__kind_names[rows[k].kind], n, 100 * share);
    }
    reduction_per_byte = reduction;
}

// A pipeline: the time of a broadcast hardly depends on the number of ranks.
static void check_pipeline(void) {
    const size_t count = (size_t)8 << 20;
    double few = run(4, IDIST__BROADCAST, count, IDIST__ALGO_BANDWIDTH).seconds, many;
    members_free();
    many = run(64, IDIST__BROADCAST, count, IDIST__ALGO_BANDWIDTH).seconds;
    members_free();
    tap_ok(many < 1.5 * few, "broadcast of 64 MiB: %.1f ms on 4 ranks, %.1f ms on 64", 1e3 * few,
           1e3 * many);
}

// Times of the choice, and of the better one of the two algorithms, at the size where the choice is
// worst.
static double worst_choice(idist__kind kind, int n, size_t *nbytes) {
    static const idist__algorithm settings[] = {IDIST__ALGO_AUTO, IDIST__ALGO_LATENCY,
                                                IDIST__ALGO_BANDWIDTH};
    size_t blocks = (size_t)(blocks_in(kind, n) * blocks_out(kind, n));
    double worst = 0;
    for (size_t count = 1; count * blocks <= (size_t)1 << 20; count *= 4) {
        double seconds[3];
        for (int a = 0; a < 3; a++) {
            seconds[a] = run(n, kind, count, settings[a]).seconds;
            members_free();
        }
        double best = seconds[1] < seconds[2] ? seconds[1] : seconds[2];
        if (seconds[0] / best <= worst) continue;
        worst = seconds[0] / best;
        *nbytes = count * sizeof(int64_t);
    }
    return worst;
}

typedef struct choice_row {
    idist__kind kind;
    double most; // times what the better algorithm takes
} choice_row;

static void check_choice(const choice_row *rows, size_t row_count, const char *where) {
    static const int sizes[] = {2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 64, 200};
    for (size_t k = 0; k < row_count * IDIST__COUNT_OF(sizes); k++) {
        const choice_row *row = &rows[k / IDIST__COUNT_OF(sizes)];
        int n = sizes[k % IDIST__COUNT_OF(sizes)];
        size_t nbytes = 0;
        double worst = worst_choice(row->kind, n, &nbytes);
        tap_ok(worst <= row->most, "%s, %d ranks, %s: the choice takes at most %.2f times the best",
               idist__kind_names[row->kind], n, where, worst);
        if (worst > 1.3) tap_diag("at %zu bytes of each rank", nbytes);
    }
}

// The network from here on; latency and overhead in us.
static void choose_for(double us, double overhead_us, double bytes_per_s) {
    latency = us * 1e-6;
    overhead = overhead_us * 1e-6;
    gap_per_byte = 1 / bytes_per_s;
    latency_nbytes = (size_t)((latency + 2 * overhead) / gap_per_byte);
}

static void check_choices(void) {
    static const choice_row rows[] = {{IDIST__BROADCAST, 1.15},     {IDIST__REDUCE, 1.1},
                                      {IDIST__ALL_REDUCE, 1.3},     {IDIST__ALL_GATHER, 1.25},
                                      {IDIST__REDUCE_SCATTER, 1.4}, {IDIST__SCAN, 1.1},
                                      {IDIST__EXSCAN, 1.2},         {IDIST__GATHER, 1.5},
                                      {IDIST__SCATTER, 1.9},        {IDIST__ALL_TO_ALL, 1.9}};
    static const choice_row fast[] = {{IDIST__BROADCAST, 1.15},     {IDIST__REDUCE, 1.25},
                                      {IDIST__ALL_REDUCE, 1.45},    {IDIST__ALL_GATHER, 1.3},
                                      {IDIST__REDUCE_SCATTER, 2.0}, {IDIST__SCAN, 1.25},
                                      {IDIST__EXSCAN, 1.3},         {IDIST__GATHER, 1.9},
                                      {IDIST__SCATTER, 1.8},        {IDIST__ALL_TO_ALL, 1.5}};
    choose_for(8, 1, 1e9);
    check_choice(rows, IDIST__COUNT_OF(rows), "10 us and 1 GB/s");
    choose_for(20, 2, 25e9 / 8);
    check_choice(rows, IDIST__COUNT_OF(rows), "24 us and 25 Gbit/s");
    choose_for(46, 2, 1e9 / 8);
    check_choice(rows, IDIST__COUNT_OF(rows), "50 us and 1 Gbit/s");
    // Here reducing takes longer than sending, which the choice leaves out.
    choose_for(46, 2, 25e9 / 8);
    check_choice(fast, IDIST__COUNT_OF(fast), "50 us and 25 Gbit/s");
    choose_for(20, 2, 100e9 / 8);
    check_choice(fast, IDIST__COUNT_OF(fast), "24 us and 100 Gbit/s");
}

// The limits on one host, of the table and beyond. A group on one host of several has the same.
static void check_limits(void) {
    static const struct {
        idist__kind kind;
        int n;
        size_t limit;
    } rows[] = {{IDIST__BROADCAST, 2, 262144},   {IDIST__BROADCAST, 64, 1091909},
                {IDIST__ALL_REDUCE, 8, 65536},   {IDIST__ALL_REDUCE, 9, 25422},
                {IDIST__ALL_REDUCE, 64, 221687}, {IDIST__REDUCE_SCATTER, 64, 12362},
                {IDIST__ALL_GATHER, 64, 29184},  {IDIST__ALL_TO_ALL, 64, 2048},
                {IDIST__GATHER, 1000, 2048},     {IDIST__EXSCAN, 64, 685607}};
    for (size_t k = 0; k < IDIST__COUNT_OF(rows); k++) {
        const idist__choice *row = idist__choose_row(rows[k].kind);
        member *self;
        members_new(rows[k].n);
        self = &members[0];
        self->w.latency_nbytes = 0;
        tap_is((long long)idist__choose_limit(&self->g, row), (long long)rows[k].limit,
               "%s on one host, %d ranks: the limit", idist__kind_names[rows[k].kind], rows[k].n);
        self->w.latency_nbytes = 75000;
        tap_is((long long)idist__choose_limit(&self->g, row), (long long)rows[k].limit,
               "the same, one of several hosts");
        members_free();
    }
}

//---- projections ----

static void print_row(int n) {
    static const struct {
        idist__kind kind;
        size_t nbytes;
    } columns[] = {{IDIST__BARRIER, 0},           {IDIST__ALL_REDUCE, 8},
                   {IDIST__ALL_REDUCE, 65536},    {IDIST__ALL_REDUCE, 1 << 20},
                   {IDIST__ALL_REDUCE, 64 << 20}, {IDIST__BROADCAST, 1 << 20},
                   {IDIST__ALL_GATHER, 1024}};
    int peers = 0;
    printf("%6d", n);
    for (size_t k = 0; k < IDIST__COUNT_OF(columns); k++) {
        outcome all =
            run(n, columns[k].kind, columns[k].nbytes / sizeof(int64_t), IDIST__ALGO_AUTO);
        members_free();
        TAP_REQUIRE(all.done);
        if (all.peer_count > peers) peers = all.peer_count;
        printf(" %10.3f", 1e3 * all.seconds);
        fflush(stdout);
    }
    printf(" %6d\n", peers);
}

static int print_table(int argc, char **argv) {
    for (int i = 2; i + 1 < argc; i += 2) {
        double value = atof(argv[i + 1]);
        char which = argv[i][0] == '-' ? argv[i][1] : 0;
        if (!(value > 0) || !which || !strchr("LogGR", which)) {
            fprintf(stderr, "%s %s: see the head of tests/unit/model.c\n", argv[i], argv[i + 1]);
            return 2;
        }
        if (which == 'L') latency = value * 1e-6;
        if (which == 'o') overhead = value * 1e-6;
        if (which == 'g') gap = value * 1e-6;
        if (which == 'G') gap_per_byte = 8 / (value * 1e9);
        if (which == 'R') reduction_per_byte = 1 / (value * 1e9);
    }
    latency_nbytes = (size_t)((latency + 2 * overhead) / gap_per_byte);
    printf("LogGP model: L %.1f us, o %.1f us, g %.1f us, G %.1f Gbit/s, R %.1f GB/s\n",
           1e6 * latency, 1e6 * overhead, 1e6 * gap, 8e-9 / gap_per_byte,
           1e-9 / reduction_per_byte);
    printf("projected, not measured; milliseconds until the last host is done\n\n");
    printf("%6s %10s %10s %10s %10s %10s %10s %10s %6s\n", "", "", "all_reduce", "all_reduce",
           "all_reduce", "all_reduce", "broadcast", "all_gather", "most");
    printf("%6s %10s %10s %10s %10s %10s %10s %10s %6s\n", "hosts", "barrier", "8 B", "64 KiB",
           "1 MiB", "64 MiB", "1 MiB", "1 KiB each", "peers");
    for (int n = 8; n <= LARGEST; n *= 2) print_row(n);
    return 0;
}

int main(int argc, char **argv) {
    static const int sizes[] = {2, 3, 4, 5, 7, 8, 12, 16, 17, 31, 32, 33, 64, 100, 256, 511, 1000};
    nowhere = (char *)mmap(NULL, (size_t)1 << 40, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TAP_REQUIRE(nowhere != MAP_FAILED);
    if (argc > 1 && strcmp(argv[1], "-table") == 0) return print_table(argc, argv);
    tap_deadline(200);
    check_values();
    for (size_t i = 0; i < IDIST__COUNT_OF(sizes); i++) check_small(sizes[i]);
    for (int n = 2; n <= 256; n = 2 * n + (n == 8)) check_large(n);
    check_pipeline();
    check_limits();
    check_choices();
    return tap_done();
}
