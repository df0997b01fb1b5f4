// core/matching.h: the rules for which receive takes a message
#pragma once

#include "base/dtype.h"
#include "core/model.h"
#include "core/world.h"
#include "core/fingerprint.h"
#include "core/task.h"

// Largest size in bytes of a message that is sent before its receive asks for it.
static const size_t IDIST__EAGER_BYTES = (size_t)64 * 1024;

// Returns true if a receive takes messages with this tag. IDIST_ANY_TAG does not match the negative
// tags of idist's own messages, which the program does not see.
static bool idist__matching_has_tag(const idist__call *recv, int tag) {
    return recv->tag == tag || (recv->tag == IDIST_ANY_TAG && tag >= 0);
}

// Returns true if a receive takes a message with this tag from this rank of the world.
IDIST__UNUSED static bool idist__matching_matches(const idist__task *t, int rank, int tag) {
    const idist__call *call = &t->call;
    return (call->root == IDIST_ANY_SOURCE || t->group->ranks[call->root] == rank) &&
           idist__matching_has_tag(call, tag);
}

static void idist__matching_describe(const idist__call *call, int source, int tag,
                                     idist_dtype dtype, size_t count) {
    if (!call->info) return;
    call->info->source = source;
    call->info->tag = tag;
    call->info->count = count;
    call->info->dtype = dtype;
}

// Returns the dtype of a message, or IDIST_DTYPE_COUNT if this rank has not created the dtype.
static idist_dtype idist__matching_dtype(const idist__world *w, const idist__fingerprint *sent) {
    idist_dtype dtype = idist__world_dtype(w, sent->dtype);
    int user = idist__dtype_user_number(dtype);

    if (user < 0 || w->user.dtypes[user].tag == sent->check >> (64 - IDIST__TAG_BITS)) return dtype;
    return IDIST_DTYPE_COUNT;
}

// Tags of matched messages: 2^30 - 1 numbers below the tags of idist_new_group_by_members.
enum { IDIST__MATCHED_FIRST = INT32_MIN, IDIST__MATCHED_COUNT = 0x3fffffff };

// Gives a new tag to the message that a matched probe has found. Only idist_mrecv asks for this
// tag.
static void idist__matching_match(const idist__task *t, int *tag) {
    idist_message *message = t->call.u.message;

    *tag = IDIST__MATCHED_FIRST +
           (int)(t->group->w->tasks.matched_count++ % (uint32_t)IDIST__MATCHED_COUNT);
    message->group = t->group;
    message->world = t->group->w->groups.serial;
    message->ctx = t->group->ctx;
    message->number = *tag;
}

// Returns true if the receive may take a message. Otherwise the receive ends with *status and the
// text, and the message stays for another receive. The message then has the tag *tag, which may be
// new. The rank `source` is a rank in the group.
static bool idist__matching_fits(const idist__task *t, const idist__fingerprint *sent, int source,
                                 int *tag, idist_status *status, char *text, size_t cap) {
    const idist__call *recv = &t->call;
    const idist__world *w = t->group->w;
    size_t count = (size_t)idist__fingerprint_count(sent);
    bool same = sent->dtype == (uint8_t)recv->dtype &&
                sent->check == idist__fingerprint_tagged(w, recv, count);
    idist_dtype dtype = same ? recv->dtype : idist__matching_dtype(w, sent);
    int sent_tag = recv->label == IDIST__MRECV ? recv->u.message->info.tag : *tag;

    *status = IDIST_OK;
    text[0] = 0;
    idist__matching_describe(recv, source, sent_tag, dtype, count);

    if (recv->peeks) {
        if (recv->u.message) idist__matching_match(t, tag);
        return false;
    }

    if (!same) {
        *status = IDIST_ERR_MISMATCH;
        snprintf(text, cap,
                 "rank %d sent %s x %zu with tag %d: the dtype differs. The message is kept for "
                 "another receive",
                 source,
                 dtype == IDIST_DTYPE_COUNT ? "a dtype that this rank has not created"
                                            : idist__world_dtype_name(w, dtype),
                 count, sent_tag);
    } else if (count > recv->count) {
        *status = IDIST_ERR_TRUNCATED;
        snprintf(text, cap,
                 "rank %d sent %zu elements with tag %d. The message is kept for a larger receive",
                 source, count, sent_tag);
    } else if (recv->u.message) {
        recv->u.message->group = NULL;
    }

    return *status == IDIST_OK;
}

static void idist__matching_received(idist__task *t, int source, int tag, size_t count) {
    idist__matching_describe(&t->call, source, tag, t->call.dtype, count);
    idist__task_complete(t, IDIST_OK, "");
}
