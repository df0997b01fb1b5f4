// core/explain.h: error texts about calls that failed
//
// The words are the same whichever backend notices the failure. Ranks are ranks of the world,
// because a reader of the log knows no others. Only the root or peer in the description of a call
// is a rank of the group, as the program passed it.
#pragma once

#include "base/text.h"
#include "launch/env.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/world.h"
#include "core/fingerprint.h"

static void idist__explain_task(const idist__task *t, char *buf, size_t cap) {
    const idist__call *call = &t->call;

    if (!idist__kind_is_p2p(call->kind)) {
        idist__fingerprint print = idist__fingerprint_of_task(t, IDIST__ALGO_AUTO);
        idist__fingerprint_text(t->group->w, &print, buf, cap);
        return;
    }

    snprintf(buf, cap, "%s (", idist__kind_names[call->label]);
    if (!(call->label >= IDIST__PROBE && call->label <= IDIST__IMPROBE) &&
        call->label != IDIST__NEW_GROUP_BY_MEMBERS)
        idist__text_append(buf, cap, "%s x %zu, ",
                           idist__world_dtype_name(t->group->w, call->dtype), call->count);
    idist__text_append(buf, cap, call->kind == IDIST__SEND ? "to " : "from ");
    if (call->root == IDIST_ANY_SOURCE) idist__text_append(buf, cap, "any rank");
    else idist__text_append(buf, cap, "rank %d", call->root);
    if (call->tag == IDIST_ANY_TAG) idist__text_append(buf, cap, ", any tag)");
    else if (call->tag < 0) idist__text_append(buf, cap, ")"); // a message of idist itself
    else idist__text_append(buf, cap, ", tag %d)", call->tag);
}

// Writes what two ranks of the world have called and in which field the calls differ. If field is
// NULL, the ranks have made their calls in different orders.
IDIST__UNUSED static void idist__explain_mismatch(const idist__world *w, const char *field, int a,
                                                  const idist__fingerprint *of_a, int b,
                                                  const idist__fingerprint *of_b, char *buf,
                                                  size_t cap) {
    char first[128], second[128];

    idist__fingerprint_text(w, of_a, first, sizeof first);
    idist__fingerprint_text(w, of_b, second, sizeof second);
    if (!field) field = "sequence";

    // The counts of a v-form, the members of a group and the definitions of dtypes are compared as
    // hashes. So the texts may be equal although the calls differ.
    if (!strcmp(first, second))
        snprintf(buf, cap, "the %s differs between rank %d and rank %d in %s", field, a, b, first);
    else
        snprintf(buf, cap, "the %s differs: rank %d called %s, rank %d called %s", field, a, first,
                 b, second);
}

// Writes how many bytes one rank sends in a collective and how many bytes its peer expects. `field`
// names what differs.
IDIST__UNUSED static void idist__explain_sizes(const char *field, int from, uint64_t sent, int to,
                                               uint64_t expected, const idist__task *t, char *buf,
                                               size_t cap) {
    snprintf(buf, cap,
             "the %s differs: rank %d sends %llu bytes to rank %d, which expects %llu, in %s #%u",
             field, from, (unsigned long long)sent, to, (unsigned long long)expected,
             idist__kind_names[t->call.label], (unsigned)t->seq);
}

// Writes the count and dtype in a value of idist__fingerprint_pair, for example "5 F32".
static void idist__explain_pair_text(const idist__world *w, uint64_t pair, char *buf, size_t cap) {
    idist_dtype dtype = idist__world_dtype(w, (uint8_t)(pair >> 56));

    snprintf(buf, cap, "%llu %s", (unsigned long long)idist__fingerprint_pair_count(pair),
             pair ? idist__world_dtype_name(w, dtype) : "elements");
}

// Writes what one rank sends to another rank and what the other rank expects. `sent` and `expected`
// are values of idist__fingerprint_pair.
IDIST__UNUSED static void idist__explain_pair(int from, uint64_t sent, int to, uint64_t expected,
                                              const idist__task *t, char *buf, size_t cap) {
    const idist__world *w = t->group->w;
    char given[64], wanted[64];

    idist__explain_pair_text(w, sent, given, sizeof given);
    idist__explain_pair_text(w, expected, wanted, sizeof wanted);
    snprintf(buf, cap, "the %s differs: rank %d sends %s to rank %d, which expects %s, in %s #%u",
             idist__fingerprint_pair_difference(sent, expected), from, given, to, wanted,
             idist__kind_names[t->call.label], (unsigned)t->seq);
}

// Writes that two ranks wait for each other and would wait forever. This rank waits in `ours`. The
// rank `peer` waits in the call whose fingerprint is `print`. If same_group is true, both calls
// belong to the same group.
IDIST__UNUSED static void idist__explain_deadlock(const idist__task *ours, int peer,
                                                  const idist__fingerprint *print, bool same_group,
                                                  char *text, size_t cap) {
    char a[128], b[128];
    int me = ours->group->w->group.rank;
    bool p2p = idist__kind_is_p2p(ours->call.kind) && idist__kind_is_p2p((idist__kind)print->kind);

    idist__explain_task(ours, a, sizeof a);
    idist__fingerprint_text(ours->group->w, print, b, sizeof b);
    snprintf(text, cap, "rank %d waits for rank %d in %s, rank %d waits for rank %d in %s%s: ", me,
             peer, a, peer, me, b, same_group ? "" : " of another group");
    if (p2p) idist__text_append(text, cap, "a deadlock; use idist_sendrecv, or requests");
    else idist__text_append(text, cap, "the %s differs", same_group ? "operation" : "group");
}

// Appends a member that has not entered the call, and the call in which it was last seen. Used by a
// backend's `missing`. Only the first eight missing ranks are named; `already` is the number of
// missing ranks so far.
IDIST__UNUSED static void idist__explain_missing_rank(const idist_group *g, int rank,
                                                      const idist__fingerprint *seen, int already,
                                                      char *text, size_t cap) {
    char last[128];

    if (already >= 8) return;
    idist__text_append(text, cap, "%srank %d on %s", already ? ", " : "", g->ranks[rank],
                       g->w->nodes[g->ranks[rank]].hostname);
    if (!seen->seq) return;
    idist__fingerprint_text(g->w, seen, last, sizeof last);
    idist__text_append(text, cap, " (last seen in %s)", last);
}

// Appends the peer of a send or receive and what the peer has not done. Used by a backend's
// `missing`. Returns 1, the number of missing ranks.
IDIST__UNUSED static int idist__explain_missing_peer(const idist__task *t, char *text, size_t cap) {
    const idist_group *g = t->group;
    int peer = t->call.root < 0 ? -1 : g->ranks[t->call.root];

    if (peer < 0) {
        idist__text_append(text, cap, "a message from any rank");
        return 1;
    }

    idist__text_append(text, cap, "rank %d on %s, which ", peer, g->w->nodes[peer].hostname);
    if (t->call.kind == IDIST__SEND) // names this rank, because other ranks may read the text
        idist__text_append(text, cap, "has not received the message of rank %d", g->w->group.rank);
    else idist__text_append(text, cap, "has sent no matching message");

    return 1;
}
