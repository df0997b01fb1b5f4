// model.h - the schedules of all collectives over messages, on a simulated network
//
// unit/model.c uses this file to test the schedules, and bench/model.c to print projected times. A
// program defines IDIST_IMPLEMENTATION before it includes this file, and calls model_init first.
//
// All ranks run in one process. The algorithms come from ring/algo, compiled against two functions
// of this file that replace idist__send_step and idist__recv_step. Time is virtual, and the LogGP
// model determines how long a message takes:
//
//   L   latency: from the last byte sent to the last byte received
//   o   overhead: a processor is busy this long with each send and each receive
//   g   gap: a network card begins messages at least this far apart
//   G   gap per byte of the sending and the receiving card; given as a bandwidth
//   R   time per byte of a reduction; given as a bandwidth
//
// A message above IDIST__EAGER_BYTES leaves when the receive has been posted and its grant has
// arrived. A rank of the model stands for a host, because ranks on one host share memory.
//
// Source: Alexandrov, Ionescu, Schauser, Scheiman, "LogGP: Incorporating Long Messages into the
// LogP Model", 1995.
#pragma once
#pragma GCC diagnostic ignored "-Wunused-function"
#define IDIST_NO_RING
#include "idist.h"

#include "base/begin.h"

#include "ring/msg/recv.h"
#include "ring/share/share.h"

// Functions that the algorithms call instead of the library's.
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

enum { MODEL_BUCKETS = 64 };

//---- the network ----

static double latency = 20e-6, overhead = 2e-6, gap = 0.5e-6;
static double gap_per_byte = 8 / 25e9, reduction_per_byte = 1 / 8e9;

typedef struct message {
    struct message *next; // in a bucket or in the free list
    int from, to, slot, depth;
    uint32_t tag;
    size_t nbytes;
    const void *data; // data of a send, replaced by a copy once the message has left
    void *buffer;     // buffer of a receive
    double at;        // time when the message was sent, posted, or arrived
} message;

typedef enum event_kind { SENT, ARRIVED } event_kind;

typedef struct event {
    double at;
    uint64_t order; // of two events at the same time, the older one comes first
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
    int depth; // number of messages in the longest chain that has led here
    size_t sent_nbytes;
    uint8_t *is_peer; // by rank: 1 if messages are exchanged with this rank
    message *posted[MODEL_BUCKETS], *arrived[MODEL_BUCKETS], *held[MODEL_BUCKETS];
} member;

static member *members;
static int member_count;
static size_t latency_nbytes; // what the ranks know of their network, or 0 if they know nothing
static bool has_data;         // if false, no byte is read or written, and buffers have no memory
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

// Sends a message at time `at`, or later when the sender's card is free.
static void launch(message *m, double at) {
    member *from = &members[m->from], *to = &members[m->to];
    double bytes = gap_per_byte * (double)(m->nbytes + IDIST__FRAME_BYTES);
    double start = later(at, from->out_free);
    message *sent = message_new(m->from, m->to, m->tag, m->nbytes);
    if (has_data && m->nbytes) { // once the message has left, the sender may change its buffer
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

//---- a collective on the network ----

typedef struct outcome { // the result of a collective
    double seconds;      // time until the last rank is done
    int rounds;          // number of messages in the longest chain
    size_t sent_nbytes;  // largest number of bytes that a rank sends
    int peer_count;      // largest number of ranks that a rank exchanges messages with
    bool done;           // true if all ranks are done
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
    static idist__ring ring; // a ring in which nothing fails
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

// Returns the number of blocks of `count` elements in the send buffer of a call on n ranks.
static int blocks_in(idist__kind kind, int n) {
    return kind == IDIST__REDUCE_SCATTER || kind == IDIST__SCATTER || kind == IDIST__ALL_TO_ALL ? n
                                                                                                : 1;
}

// Returns the number of blocks of `count` elements in the receive buffer of a call on n ranks.
static int blocks_out(idist__kind kind, int n) {
    return kind == IDIST__ALL_GATHER || kind == IDIST__GATHER || kind == IDIST__ALL_TO_ALL ? n : 1;
}

// Returns the value of element i in the send buffer of rank r.
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
    self->w.machine.latency_nbytes = latency_nbytes;
    self->part.spans_hosts = true;
    self->w.tasks.running = &self->t;
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
        all.done = all.done && self->t.state == IDIST__TASK_DONE;
        all.seconds = later(all.seconds, self->now);
        if (self->depth > all.rounds) all.rounds = self->depth;
        if (self->sent_nbytes > all.sent_nbytes) all.sent_nbytes = self->sent_nbytes;
        if (peers > all.peer_count) all.peer_count = peers;
    }
    return all;
}

// Reserves the addresses of buffers without memory.
static void model_init(void) {
    nowhere = (char *)mmap(NULL, (size_t)1 << 40, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TAP_REQUIRE(nowhere != MAP_FAILED);
}
