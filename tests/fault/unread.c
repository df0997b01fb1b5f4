// unread: a rank that has not yet read the one frame that differs must not return IDIST_OK from the
// next call.
//
// One rank, the odd rank, calls with a different root than all other ranks. No rank waits for
// another rank in that call, and the message that reveals the mismatch stays unread. The test holds
// back reads from the connections of the odd rank until one rank, the witness, has its result. The
// call itself or the barrier after it returns this result. Depending on the case, the barrier uses
// messages, shared memory, or the algorithm for several hosts.
#include <stdatomic.h>
#include <stdbool.h>

#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "ranks.h"

enum { N_RANKS = 4, MOST = 710 };

typedef enum one_way { GATHER, SCATTER, REDUCE } one_way;

typedef struct setting {
    const char *name, *placement;
    one_way call;
    int odd_rank; // uses the last rank as root; all other ranks use root 0
    int witness;
    // If true, no rank reads what the odd rank sends. If false, only the witness does not read it.
    // In both cases the odd rank reads nothing.
    bool all_deaf;
} setting;

typedef struct plan {
    const setting *set;
    bool mismatch;
    size_t odd_count;      // number of elements on the odd rank
    _Atomic int n_ready;   // number of ranks whose connections are held back
    _Atomic int n_through; // number of ranks that have their result
    _Atomic bool answered; // the witness has its result, or the odd rank has failed
} plan;

static plan *running;

static ptrdiff_t read_stream_later(void *port, void *buf, size_t nbytes) {
    return running->answered ? idist__sockets_read(port, buf, nbytes) : 0;
}

static ptrdiff_t read_pipe_later(void *port, void *buf, size_t nbytes) {
    return running->answered ? idist__pipe_read(port, buf, nbytes) : 0;
}

static bool is_deaf(const plan *p, int rank, int to) {
    const setting *set = p->set;
    if (!p->mismatch || rank == to) return false;
    if (rank == set->odd_rank) return true;
    return to == set->odd_rank && (set->all_deaf || rank == set->witness);
}

// Makes the link read nothing until the witness has its result.
static void hold_back(idist__link *link, idist__transport *held) {
    bool is_pipe = link->transport->read == idist__pipe_read;
    *held = *link->transport;
    held->read = is_pipe ? read_pipe_later : read_stream_later;
    link->transport = held;
}

static idist_status call(const plan *p, int rank, const idist_opts *o) {
    static float s[N_RANKS][N_RANKS * MOST], r[N_RANKS][N_RANKS * MOST];
    bool odd = p->mismatch && rank == p->set->odd_rank;
    size_t count = odd ? p->odd_count : 700;
    int root = odd ? N_RANKS - 1 : 0;
    idist_op halved;
    idist_status status;

    if (p->set->call == GATHER) return idist_gather(s[rank], r[rank], count, IDIST_F32, root, o);
    if (p->set->call == SCATTER) return idist_scatter(s[rank], r[rank], count, IDIST_F32, root, o);
    // A premultiplied sum uses messages even if the ranks share memory.
    status = idist_op_create_premul_sum(0.5, o->group, &halved);
    if (status == IDIST_OK)
        status = idist_reduce(s[rank], r[rank], count, IDIST_BF16, halved, root, o);
    return status;
}

static void body(idist_group *world, int rank, int n, void *arg) {
    plan *p = (plan *)arg;
    idist_opts o = opts_of(world);
    idist__transport held[N_RANKS];
    const idist__transport *original[N_RANKS];
    idist__link *links = idist__ring_of(world->w)->links;
    idist_status got;

    for (int peer = 0; peer < n; peer++) {
        original[peer] = links[peer].transport;
        if (is_deaf(p, rank, peer)) hold_back(&links[peer], &held[peer]);
    }
    p->n_ready++;
    while (p->n_ready < n) tap_sleep_ms(1);

    got = call(p, rank, &o);
    if (got == IDIST_OK) got = idist_barrier(&o);

    if (rank == p->set->witness || (rank == p->set->odd_rank && got)) p->answered = true;
    rank_is(rank, got, p->mismatch ? IDIST_ERR_MISMATCH : IDIST_OK);
    if (p->mismatch && got)
        rank_check(text_names_rank(idist_last_error(), p->set->odd_rank) &&
                       text_has_word(idist_last_error(), "root differs"),
                   "rank %d: the text names rank %d and the root: got \"%s\"", rank,
                   p->set->odd_rank, idist_last_error());

    p->n_through++;
    while (p->n_through < n) tap_sleep_ms(1);
    for (int peer = 0; peer < n; peer++) links[peer].transport = original[peer];
}

int main(void) {
    static const setting settings[] = {
        {"gather over TCP", "tcp", GATHER, 0, N_RANKS - 1, false},
        {"scatter over two hosts", "blocks", SCATTER, N_RANKS - 1, 2, true},
        {"reduce beside shared memory", "auto", REDUCE, 0, N_RANKS - 1, false},
    };
    tap_deadline(60);
    for (size_t k = 0; k < sizeof settings / sizeof settings[0]; k++) {
        idist_desc d = desc_with(settings[k].placement, "auto");
        d.timeout_ms = 5000 * test_slow_factor();
        for (size_t i = 0; i < 12; i++) {
            plan p = {&settings[k], i > 1, 698 + i, 0, 0, false};
            running = &p;
            if (p.mismatch)
                ranks_case_fault(N_RANKS, &d, body, &p, "%s: another root, count %zu",
                                 settings[k].name, p.odd_count);
            else
                ranks_case_fault(N_RANKS, &d, body, &p, "%s: nothing differs, round %zu",
                                 settings[k].name, i);
        }
    }
    return tap_done();
}
