// train/loader.h: batches, fetched ahead by worker threads
//
// Batches are in a ring of slots. The ring has one slot per batch fetched ahead, and one for the
// batch that the program is using. A worker takes the next batch that no worker has taken, so
// batches start in order. The program waits for each batch in turn:
//
//     slot    0        1        2        3        4         2 workers, 2 batches ahead for each
//     batch   5        6        7        3        4
//             fetching fetching free     program  ready
//
// A batch passes through these functions:
//
//     idist__loader_work    a worker takes the batch and calls fetch
//     idist__loader_take    the program waits for the slot of the batch
//     idist_loader_next     returns the batch to the program and moves the sampler
//
// The loader copies the indices, so the program may move the sampler at any time. The next call
// notices the move, and restarts the loader at the sampler's new position.
#pragma once

#include "os/clock.h"
#include "os/process.h"
#include "os/thread.h"
#include "base/fail.h"
#include "base/text.h"
#include "base/mem.h"
#include "train/sampler.h"

typedef struct idist__loader_slot {
    void *data;
    bool ready;       // fetched, and not yet given to the program
    int result;       // returned by fetch
    char thrown[160]; // text of the exception that fetch threw, or ""
} idist__loader_slot;

struct idist_loader {
    idist_loader_desc desc;
    idist_sampler *own_sampler; // created by idist_auto_loader, or NULL
    idist__os_process process;  // the process that has the workers; a forked child has none
    idist__os_thread *threads;
    int thread_count, slot_count;
    idist__loader_slot *slots;

    // The rest of the epoch, from the position where the loader started. Written only while no
    // worker is busy.
    size_t *indices;
    size_t index_count;

    // The state in which the loader left the sampler. If the sampler's state differs, the program
    // has moved the sampler.
    size_t start_position;   // position of the first copied index
    size_t sampler_position; // position after the last call
    uint64_t deal_count;     // deal_count of the sampler when the indices were copied
    bool ended;              // the last call returned the end of the epoch

    idist__os_mutex lock; // protects the fields below and the slots
    idist__os_cond work;  // signaled when there may be a batch to take, or the loader stops
    idist__os_cond done;  // signaled when a batch is fetched
    size_t batch_count;   // batches of the epoch
    size_t taken_count;   // batches taken by workers
    size_t given_count;   // batches given to the program
    int busy_count;       // workers inside fetch
    int stopping_count;   // once `stops` is set: workers that have not ended yet
    bool paused;          // workers must not take a batch
    bool stops;
    bool orphaned; // no thread waits for the workers; the last worker frees the loader
};

static size_t idist__loader_batches(const idist_loader *loader, size_t samples) {
    size_t full = samples / loader->desc.batch_size, rest = samples % loader->desc.batch_size;
    return !loader->desc.drop_last && rest ? full + 1 : full;
}

// Returns the indices of a batch, and sets *count to their number.
static const size_t *idist__loader_indices(const idist_loader *loader, size_t batch,
                                           size_t *count) {
    size_t first = batch * loader->desc.batch_size, rest = loader->index_count - first;
    *count = rest < loader->desc.batch_size ? rest : loader->desc.batch_size;
    return loader->indices + first;
}

static idist__loader_slot *idist__loader_slot_of(const idist_loader *loader, size_t batch) {
    return &loader->slots[batch % (size_t)loader->slot_count];
}

// Fetches a batch. Returns the result of fetch, or 1 if fetch throws an exception. In that case the
// slot contains the exception's text.
IDIST__NOINLINE static int idist__loader_fetch(const idist_loader *loader, size_t batch) {
    size_t count;
    const size_t *indices = idist__loader_indices(loader, batch, &count);
    idist__loader_slot *slot = idist__loader_slot_of(loader, batch);
    int result = 1;

    IDIST__CALLBACK(result = loader->desc.fetch(slot->data, indices, count, loader->desc.arg));
    idist__text_copy(slot->thrown, sizeof slot->thrown, idist__me.thrown);
    idist__me.thrown[0] = 0;

    return result;
}

// Frees the loader. Called when no other thread uses it.
static void idist__loader_destroy(idist_loader *loader) {
    int i;

    if (loader->process == idist__os_process_id()) {
        idist__os_cond_destroy(&loader->work);
        idist__os_cond_destroy(&loader->done);
        idist__os_mutex_destroy(&loader->lock);
    }

    for (i = 0; loader->slots && i < loader->slot_count; i++)
        idist__mem_free(&loader->desc.allocator, loader->slots[i].data);
    idist_sampler_free(&loader->own_sampler);
    free(loader->slots);
    free(loader->threads);
    free(loader->indices);
    free(loader);
}

// Returns true if a worker may take the next batch. Called with the lock held.
static bool idist__loader_has_work(const idist_loader *loader) {
    size_t ahead = loader->taken_count - loader->given_count;

    if (loader->paused || loader->taken_count == loader->batch_count) return false;
    return ahead < (size_t)loader->slot_count - 1;
}

// Runs a worker thread: fetches batches until the loader stops.
static void *idist__loader_work(void *arg) {
    idist_loader *loader = (idist_loader *)arg;
    bool must_free;

    idist__os_mutex_lock(&loader->lock);

    while (!loader->stops) {
        size_t batch = loader->taken_count;
        idist__loader_slot *slot;
        int result;

        if (!idist__loader_has_work(loader)) {
            idist__os_cond_wait(&loader->work, &loader->lock, IDIST__FOREVER);
            continue;
        }

        loader->taken_count++;
        loader->busy_count++;
        idist__os_mutex_unlock(&loader->lock);
        result = idist__loader_fetch(loader, batch);
        idist__os_mutex_lock(&loader->lock);

        slot = idist__loader_slot_of(loader, batch);
        slot->ready = true;
        slot->result = result;
        loader->busy_count--;
        idist__os_cond_signal(&loader->done);
    }

    loader->stopping_count--;
    must_free = loader->stopping_count == 0 && loader->orphaned;
    idist__os_mutex_unlock(&loader->lock);
    if (must_free) idist__loader_destroy(loader);

    return NULL;
}

static int idist__loader_timeout(const idist_loader *loader) {
    return loader->desc.timeout_ms ? loader->desc.timeout_ms : 300000;
}

// Waits until no fetch is running. Returns false if the timeout expires first. Called with the lock
// held.
static bool idist__loader_settle(idist_loader *loader) {
    int64_t deadline_ns = idist__os_clock_deadline(idist__loader_timeout(loader));

    while (loader->busy_count && idist__os_clock_ms_until(deadline_ns) != 0)
        idist__os_cond_wait(&loader->done, &loader->lock, deadline_ns);

    return loader->busy_count == 0;
}

// Waits for the running fetches, drops the batches fetched ahead, and starts at the sampler's
// position.
static idist_status idist__loader_restart(idist_loader *loader) {
    const idist_sampler *sampler = loader->desc.sampler;
    size_t count = sampler->count - sampler->position;
    size_t *indices = (size_t *)malloc((count + 1) * sizeof *indices);
    int i, busy_count;

    if (!indices)
        return idist__fail(IDIST_ERR_NO_MEMORY, "loader: no memory for %zu indices", count);
    memcpy(indices, sampler->indices + sampler->position, count * sizeof *indices);
    idist__os_mutex_lock(&loader->lock);
    loader->paused = true;

    if (!idist__loader_settle(loader)) { // the loader stays paused; the next call tries again
        busy_count = loader->busy_count;
        idist__os_mutex_unlock(&loader->lock);
        free(indices);
        return idist__fail(IDIST_ERR_TIMEOUT,
                           "loader: %d earlier fetches are still running after %d ms", busy_count,
                           idist__loader_timeout(loader));
    }

    free(loader->indices);
    loader->indices = indices;
    loader->index_count = count;
    loader->start_position = sampler->position;
    loader->sampler_position = sampler->position;
    loader->deal_count = sampler->deal_count;
    loader->ended = false;

    loader->batch_count = idist__loader_batches(loader, count);
    loader->taken_count = 0;
    loader->given_count = 0;
    for (i = 0; i < loader->slot_count; i++) loader->slots[i].ready = false;
    loader->paused = false;
    idist__os_cond_broadcast(&loader->work);
    idist__os_mutex_unlock(&loader->lock);

    return IDIST_OK;
}

// Stops the workers. Returns false if some workers are still inside fetch when the timeout expires.
// The last of these workers then frees the loader.
static bool idist__loader_stop(idist_loader *loader) {
    idist__os_thread *threads = loader->threads;
    int i, thread_count = loader->thread_count;
    bool orphaned;

    idist__os_mutex_lock(&loader->lock);
    loader->stops = true;
    loader->stopping_count = thread_count;
    idist__os_cond_broadcast(&loader->work);
    orphaned = !idist__loader_settle(loader);
    loader->orphaned = orphaned;
    if (orphaned) loader->threads = NULL; // freed below, not by the worker that frees the loader
    idist__os_mutex_unlock(&loader->lock);

    for (i = 0; i < thread_count; i++) {
        if (orphaned) idist__os_thread_detach(threads[i]);
        else idist__os_thread_join(threads[i]);
    }

    if (orphaned) free(threads);

    return !orphaned;
}

void idist_loader_free(idist_loader **loader) {
    idist_loader *l = loader ? *loader : NULL;
    bool stopped = true;

    if (!l) return;
    *loader = NULL;

    // A forked child has no workers to stop, and the lock may have been held during the fork.
    if (l->process == idist__os_process_id()) stopped = idist__loader_stop(l);
    if (stopped) idist__loader_destroy(l);
}

static idist_status idist__loader_check(const idist_loader_desc *desc) {
    if (!desc || !desc->sampler || !desc->fetch)
        return idist__fail(IDIST_ERR_ARG, "loader_create: desc, sampler or fetch is NULL");
    if (!desc->batch_size || !desc->batch_nbytes)
        return idist__fail(
            IDIST_ERR_ARG,
            "loader_create: batch_size and batch_nbytes must be positive, got %zu and %zu",
            desc->batch_size, desc->batch_nbytes);
    if (!desc->allocator.alloc_fn != !desc->allocator.free_fn)
        return idist__fail(IDIST_ERR_ARG,
                           "loader_create: allocator: give both alloc_fn and free_fn, or neither");
    if (desc->num_workers < 0 || desc->num_workers > 1024)
        return idist__fail(IDIST_ERR_ARG, "loader_create: num_workers must be 0 to 1,024, got %d",
                           desc->num_workers);
    if (desc->prefetch < 0 || desc->prefetch > 65536)
        return idist__fail(IDIST_ERR_ARG, "loader_create: prefetch must be 0 to 65,536, got %d",
                           desc->prefetch);

    return IDIST_OK;
}

static idist_status idist__loader_alloc(idist_loader *loader) {
    const idist_loader_desc *desc = &loader->desc;
    int i;

    loader->slot_count = 1 + desc->num_workers * (desc->prefetch ? desc->prefetch : 2);
    loader->slots = (idist__loader_slot *)calloc((size_t)loader->slot_count, sizeof *loader->slots);
    loader->threads =
        (idist__os_thread *)calloc((size_t)desc->num_workers + 1, sizeof *loader->threads);
    if (!loader->slots || !loader->threads)
        return idist__fail(IDIST_ERR_NO_MEMORY, "loader_create: no memory for %d slots",
                           loader->slot_count);

    for (i = 0; i < loader->slot_count; i++) {
        void *data = idist__mem_alloc(&desc->allocator, desc->batch_nbytes);

        if (!data)
            return idist__fail(IDIST_ERR_NO_MEMORY,
                               "loader_create: no memory for %d batches of %zu bytes",
                               loader->slot_count, desc->batch_nbytes);
        loader->slots[i].data = data;
    }

    return IDIST_OK;
}

static idist_status idist__loader_start_workers(idist_loader *loader) {
    while (loader->thread_count < loader->desc.num_workers) {
        idist__os_thread *thread = &loader->threads[loader->thread_count];
        int error = idist__os_thread_start(thread, idist__loader_work, loader);

        if (error) return idist__fail_errno("loader_create: cannot start a worker thread", error);
        loader->thread_count++;
    }

    return IDIST_OK;
}

idist_status idist_loader_create(const idist_loader_desc *desc, idist_loader **loader) {
    idist_loader *l;
    idist_status status;

    if (!loader) return idist__fail(IDIST_ERR_ARG, "loader_create: loader is NULL");
    *loader = NULL;
    status = idist__loader_check(desc);
    if (status != IDIST_OK) return status;
    l = (idist_loader *)calloc(1, sizeof *l);
    if (!l) return idist__fail(IDIST_ERR_NO_MEMORY, "loader_create: no memory");

    l->desc = *desc;
    l->process = idist__os_process_id();
    idist__os_mutex_init(&l->lock);
    idist__os_cond_init(&l->work);
    idist__os_cond_init(&l->done);

    status = idist__loader_alloc(l);
    if (status == IDIST_OK) status = idist__loader_restart(l);
    if (status == IDIST_OK) status = idist__loader_start_workers(l);
    if (status == IDIST_OK) *loader = l;
    else idist_loader_free(&l);

    return status;
}

static idist_status idist__loader_enter(const char *name, const idist_loader *loader) {
    if (!loader) return idist__fail(IDIST_ERR_ARG, "%s: loader is NULL", name);
    if (loader->thread_count && loader->process != idist__os_process_id())
        return idist__fail(
            IDIST_ERR_STATE,
            "%s: this process was forked and has no workers; create a new loader in this process",
            name);

    return IDIST_OK;
}

idist_status idist_loader_set_epoch(idist_loader *loader, uint64_t epoch) {
    idist_status status = idist__loader_enter("loader_set_epoch", loader);

    if (status == IDIST_OK) status = idist_sampler_set_epoch(loader->desc.sampler, epoch);
    if (status == IDIST_OK) status = idist__loader_restart(loader);

    return status;
}

size_t idist_loader_count(const idist_loader *loader) {
    return loader ? idist__loader_batches(loader, loader->desc.sampler->count) : 0;
}

idist_sampler *idist_loader_sampler(const idist_loader *loader) {
    return loader ? loader->desc.sampler : NULL;
}

// Waits for the next batch, or fetches it if there are no workers. Returns false if the timeout
// expires.
static bool idist__loader_take(idist_loader *loader, idist__loader_slot *slot) {
    int64_t deadline_ns;
    bool ready;

    if (!loader->thread_count) {
        slot->result = idist__loader_fetch(loader, loader->given_count);
        loader->given_count++;
        return true;
    }

    idist__os_mutex_lock(&loader->lock);
    deadline_ns = idist__os_clock_deadline(idist__loader_timeout(loader));
    while (!slot->ready && idist__os_clock_ms_until(deadline_ns) != 0)
        idist__os_cond_wait(&loader->done, &loader->lock, deadline_ns);
    ready = slot->ready;

    if (ready) {
        slot->ready = false;
        loader->given_count++;
        idist__os_cond_signal(&loader->work); // the slot of the previous batch is free
    }

    idist__os_mutex_unlock(&loader->lock);

    return ready;
}

static bool idist__loader_must_restart(const idist_loader *loader) {
    const idist_sampler *sampler = loader->desc.sampler;

    if (loader->ended || loader->paused) return true;
    return loader->deal_count != sampler->deal_count ||
           loader->sampler_position != sampler->position;
}

idist_status idist_loader_next(idist_loader *loader, idist_batch *batch) {
    idist_sampler *sampler;
    idist__loader_slot *slot;
    size_t number;
    idist_status status = idist__loader_enter("loader_next", loader);

    if (status != IDIST_OK) return status;
    if (!batch) return idist__fail(IDIST_ERR_ARG, "loader_next: batch is NULL");
    memset(batch, 0, sizeof *batch);
    sampler = loader->desc.sampler;
    if (idist__loader_must_restart(loader)) status = idist__loader_restart(loader);
    if (status != IDIST_OK) return status;
    number = loader->given_count; // only this thread writes it

    if (number == loader->batch_count) {
        loader->ended = true; // fetch nothing ahead, because most programs now begin another epoch
        loader->sampler_position = 0;
        idist__sampler_end(sampler);
        return IDIST_OK;
    }

    slot = idist__loader_slot_of(loader, number);
    if (!idist__loader_take(loader, slot))
        return idist__fail(IDIST_ERR_TIMEOUT,
                           "loader_next: the fetch of batch %zu has not returned after %d ms",
                           number, idist__loader_timeout(loader));

    batch->indices = idist__loader_indices(loader, number, &batch->n);
    sampler->position = loader->start_position + number * loader->desc.batch_size + batch->n;
    sampler->resumed = false;
    loader->sampler_position = sampler->position;
    if (slot->thrown[0])
        return idist__fail(IDIST_ERR_CALLBACK,
                           "loader_next: fetch threw an exception for %zu samples from index %zu "
                           "on: %s",
                           batch->n, batch->indices[0], slot->thrown);
    if (slot->result)
        return idist__fail(IDIST_ERR_CALLBACK,
                           "loader_next: fetch failed with %d for %zu samples from index %zu on",
                           slot->result, batch->n, batch->indices[0]);
    batch->data = slot->data;

    return IDIST_OK;
}
