// train/ddp/ddp_piece.h: buckets whose gradients are scattered in memory
//
// If such a bucket were copied as a whole, it would leave the caches before it is reduced, and
// again before it is copied back. The data would pass through memory three times instead of once.
// Therefore the bucket is reduced in pieces. If the group shares memory, a piece is reduced where
// its gradients are, unless these gradients are very small. Otherwise pieces are copied to a few
// slots that stay in the cache. A piece is copied into its slot when it is launched:
//
//     gradients    [    0    ]     [1]  [2]    [     3     ]
//     pieces       [  a  |  b        |  c        |    d    ]
//     slots        [ a ][ b ][ c ]     d is launched when a has been reduced and copied back
//
// idist_ddp_ready launches pieces while slots are free, and idist_ddp_wait launches the rest.
// Between hosts, idist_ddp_wait keeps several pieces in flight. Within a host it launches one piece
// after the other, because collectives in shared memory do not overlap, and requests would only
// cost time.
//
// A bucket that is scattered on one rank is reduced in pieces on all ranks, because all ranks make
// the same calls. A piece may be contiguous on a rank, for example because it is part of a single
// gradient. In that case the rank reduces the piece where it is, without a slot.
//
// Buckets are copied as a whole in these cases:
//
//     hook           it must see whole buckets
//     compression    its state belongs to a whole bucket
//     find_unused    only the end of the iteration tells whether a gradient changes
//     on_device      there are no pieces in device memory
#pragma once

#include "calls/collective.h"
#include "train/compress/tensor_memory.h"
#include "train/ddp/ddp_model.h"
#include "train/ddp/ddp_bucket.h"

// Copies the gradients of a piece to its slot, or from its slot if `back` is set. A rank without
// data writes zeros to the slot.
static void idist__ddp_piece_copy(const idist_ddp *d, const idist__ddp_piece *piece, bool back) {
    const idist_bucket *exposed = &piece->bucket->exposed;
    size_t first = piece->first, end = first + piece->exposed.count;
    size_t size = idist_dtype_size(exposed->dtype);
    char *slot = (char *)piece->exposed.data;
    int k;

    if (piece->in_place) return;

    for (k = piece->gradient; first < end; k++) {
        const idist_tensor *gradient = &d->grads[exposed->gradients[k]];
        size_t skipped = first - exposed->displs[k], count = gradient->count - skipped;
        char *data;

        if (!count) continue;
        if (count > end - first) count = end - first;
        data = (char *)gradient->data + skipped * size;

        if (back) memcpy(data, slot, count * size);
        else if (d->joining) memset(slot, 0, count * size);
        else memcpy(slot, data, count * size);

        first += count;
        slot += count * size;
    }
}

// Returns the address of a piece if its elements are contiguous in memory, or NULL otherwise. Also
// returns NULL for a scattered bucket on a rank without data, which needs memory for its zeros.
static void *idist__ddp_piece_find(const idist_ddp *d, const idist__ddp_piece *piece) {
    const idist_bucket *bucket = &piece->bucket->exposed;
    size_t size = idist_dtype_size(bucket->dtype), skipped, count;
    const idist_tensor *gradient;
    char *data, *end;
    int k = piece->gradient;

    if (!piece->bucket->scattered) return (char *)bucket->data + piece->first * size;
    if (d->joining) return NULL;

    while (!d->grads[bucket->gradients[k]].count) k++;
    gradient = &d->grads[bucket->gradients[k]];
    skipped = piece->first - bucket->displs[k];
    data = (char *)gradient->data + skipped * size;
    count = gradient->count - skipped;
    end = data + count * size;

    while (count < piece->exposed.count) {
        gradient = &d->grads[bucket->gradients[++k]];
        if (gradient->count && gradient->data != end) return NULL;
        count += gradient->count;
        end += gradient->count * size;
    }

    return data;
}

// Lists the parts of gradients in a piece. Returns the number of parts, or 0 if there are too many.
static int idist__ddp_piece_list(const idist_ddp *d, idist__ddp_piece *piece) {
    const idist_bucket *bucket = &piece->bucket->exposed;
    size_t size = idist_dtype_size(bucket->dtype), total = 0;
    int k, n = 0;

    for (k = piece->gradient; total < piece->exposed.count; k++) {
        const idist_tensor *gradient = &d->grads[bucket->gradients[k]];
        size_t skipped = n ? 0 : piece->first - bucket->displs[k],
               count = gradient->count - skipped;

        if (!count) continue;
        if (n == IDIST__DDP_PARTS) return 0;
        if (count > piece->exposed.count - total) count = piece->exposed.count - total;
        total += count;
        piece->parts[n].data = (char *)gradient->data + skipped * size;
        piece->parts[n++].end = total;
    }

    return n;
}

// If possible, starts to reduce a piece where its gradients are, and sets piece->in_place.
static idist_status idist__ddp_piece_start_parts(const idist_ddp *d, idist__ddp_piece *piece) {
    const idist_bucket *exposed = &piece->exposed;
    double prescale = d->desc.prescale != 0 ? d->desc.prescale : 1;
    int n;

    if (d->joining || prescale != 1 || d->reduction.postscale != 1) return IDIST_OK;
    n = idist__ddp_piece_list(d, piece);
    if (!n) return IDIST_OK;

    return idist__collective_all_reduce_parts(piece->parts, n, exposed->dtype, d->reduction.op,
                                              &exposed->opts, &piece->in_place);
}

// Launches the next piece of a bucket. If `alone` is set, no piece is in flight. In that case the
// call blocks, unless pieces overlap and another piece follows.
static idist_status idist__ddp_piece_start(idist_ddp *d, const idist__ddp_bucket *bucket,
                                           bool alone) {
    const idist_bucket *all = &bucket->exposed;
    size_t slot = d->started_pieces % d->slot_limit, left = all->count - d->next_first;
    size_t most = d->piece_nbytes / idist_dtype_size(all->dtype);
    double prescale = d->desc.prescale != 0 ? d->desc.prescale : 1;
    idist__ddp_piece *piece = &d->slots[slot];
    idist_bucket *exposed = &piece->exposed;
    idist_status status;

    piece->bucket = bucket;
    piece->first = d->next_first;
    piece->gradient = d->next_gradient;
    exposed->dtype = all->dtype;
    exposed->count = left < most ? left : most;
    exposed->opts = d->reduction.memory.opts;
    if (!alone || (d->pieces_overlap && left > most)) exposed->opts.request = &piece->request;
    exposed->data = idist__ddp_piece_find(d, piece);
    piece->in_place = exposed->data != NULL;
    status = piece->in_place ? IDIST_OK : idist__ddp_piece_start_parts(d, piece);

    if (exposed->data || !piece->in_place) {
        if (!exposed->data) exposed->data = d->slot_memory + slot * d->piece_nbytes;
        idist__ddp_piece_copy(d, piece, false);
        status = idist__tensor_memory_scale(&d->reduction.memory, exposed->data, exposed->count,
                                            exposed->dtype, prescale);
        if (status == IDIST_OK) status = idist__ddp_hook_start(d, exposed);
    }

    if (status != IDIST_OK) return status;

    d->started_pieces++;
    d->next_first += exposed->count;
    while (d->next_gradient < all->gradient_count - 1 &&
           all->displs[d->next_gradient + 1] <= d->next_first)
        d->next_gradient++;

    return IDIST_OK;
}

// Waits for the oldest piece in flight, finishes it and copies it back.
static idist_status idist__ddp_piece_finish(idist_ddp *d) {
    idist__ddp_piece *piece = &d->slots[d->finished_pieces++ % d->slot_limit];
    idist_status status = idist_wait(&piece->request);

    if (status == IDIST_OK) status = idist__ddp_hook_finish(d, &piece->exposed);
    if (status == IDIST_OK && !d->joining) idist__ddp_piece_copy(d, piece, true);

    return status;
}

// Finishes all pieces in flight.
static idist_status idist__ddp_piece_settle(idist_ddp *d) {
    idist_status status = IDIST_OK, piece_status;

    while (d->finished_pieces < d->started_pieces) {
        piece_status = idist__ddp_piece_finish(d);
        if (status == IDIST_OK) status = piece_status;
    }

    return status;
}

// Launches the remaining pieces of a bucket while slots are free. If `ending` is set, waits for
// slots to become free. In that case, if pieces do not overlap (d->pieces_overlap), launches one
// piece at a time, without a request.
static idist_status idist__ddp_piece_launch(idist_ddp *d, const idist__ddp_bucket *bucket,
                                            bool ending) {
    idist_status status = IDIST_OK;

    while (status == IDIST_OK && d->next_first < bucket->exposed.count) {
        size_t in_flight = d->started_pieces - d->finished_pieces;
        size_t limit = ending && !d->pieces_overlap ? 1 : d->slot_limit;
        idist_request *oldest = &d->slots[d->finished_pieces % d->slot_limit].request;
        bool done = ending;

        if (in_flight < limit) {
            status = idist__ddp_piece_start(d, bucket, ending && !in_flight);
            continue;
        }

        if (!ending) status = idist_test(oldest, &done);
        if (status != IDIST_OK) d->finished_pieces++; // there is nothing to copy back
        if (status != IDIST_OK || !done) return status;
        status = idist__ddp_piece_finish(d);
    }

    if (status != IDIST_OK) return status;
    d->next_first = 0;
    d->next_gradient = 0;
    d->launched_count++;

    return IDIST_OK;
}
