// xla/xla_worker.h: the thread that waits for the device
//
// The worker of a world takes one job after another. Jobs in x->jobs come first: they compile and
// copy, and need no other rank. Programs in x->ordered come next. All ranks must launch their
// programs in one order, because otherwise two devices could wait for each other. A program runs
// when its ticket is final and no smaller ticket is in the list, final or not. (Skeen's total order
// multicast: the members propose tickets, and the largest proposal becomes the ticket.)
//
// A proposal is made when all members have started the call. From then on, the ticket becomes final
// without any action by the user's program, so a proposal does not delay other calls for long.
#pragma once

#include "os/thread.h"
#include "base/mem.h"
#include "xla/pjrt.h"
#include "xla/xla_model.h"
#include "xla/xla_value.h"
#include "xla/xla_buffer.h"
#include "xla/xla_program.h"

// Frees a job and what the job holds.
static void idist__xla_worker_free(idist__xla *x, idist__xla_job *job) {
    const idist_allocator *mem = &x->w->cfg.mem;

    idist__xla_program_drop(x->home, job->program);
    idist__xla_buffer_drop(x->home, job->send);
    idist__xla_buffer_drop(x->home, job->recv);
    idist__pjrt_destroy(x->home->api, IDIST__PJRT_BUFFER_DESTROY, job->output);
    if (job->recv_copy != job->send_copy) idist__mem_free(mem, job->recv_copy);
    idist__mem_free(mem, job->send_copy);
    idist__mem_free(mem, job->ranges);
    idist__mem_free(NULL, job->source.text);
    idist__mem_free(NULL, job->source.options);
    idist__mem_free(mem, job);
}

// Hands the worker a job that compiles or copies.
static void idist__xla_worker_add(idist__xla *x, idist__xla_job *job, idist__xla_work work) {
    job->work = work;
    job->next = NULL;
    *x->jobs_end = job;
    x->jobs_end = &job->next;
    idist__os_cond_signal(&x->work);
}

// Inserts a job into x->ordered, sorted by ticket.
static void idist__xla_worker_order(idist__xla *x, idist__xla_job *job) {
    idist__xla_job **at = &x->ordered;

    while (*at && (*at)->ticket < job->ticket) at = &(*at)->next;
    job->work = IDIST__XLA_EXECUTE;
    job->next = *at;
    *at = job;
    idist__os_cond_signal(&x->work);
}

// Removes a job from its list. Does nothing if the job is in no list.
static void idist__xla_worker_remove(idist__xla *x, idist__xla_job *job) {
    idist__xla_job **at;

    for (at = &x->ordered; *at && *at != job; at = &(*at)->next) continue;

    if (*at) {
        *at = job->next;
        idist__os_cond_signal(&x->work); // the next one may be final
        return;
    }

    for (at = &x->jobs; *at && *at != job; at = &(*at)->next) continue;
    if (*at && (*at = job->next) == NULL) x->jobs_end = at;
}

// Detaches a job from its call. Frees the job, unless the worker is using it; then the worker frees
// the job.
static void idist__xla_worker_release(idist__xla *x, idist__xla_job *job) {
    idist__xla_worker_remove(x, job);
    job->task = NULL;
    if (!job->running) idist__xla_worker_free(x, job);
}

// If the members have agreed on the place of a job's program, detaches the job from its call, but
// leaves the program in x->ordered: the devices of the other members wait for it, without a
// deadline. The worker runs the program and drops the result. Otherwise changes nothing and returns
// false.
static bool idist__xla_worker_orphan(const idist__xla *x, idist__xla_job *job) {
    const idist__xla_job *ordered = x->ordered;

    while (ordered && ordered != job) ordered = ordered->next;
    if (!ordered || !job->placed) return false;
    job->task = NULL;

    return true;
}

// Copies the contents of a buffer to host memory.
static bool idist__xla_worker_get(idist__xla *x, idist__xla_buffer *buffer, char *data,
                                  idist__xla_job *job) {
    idist__xla_value *value = idist__xla_value_take(x->home, buffer);
    bool ok = idist__xla_value_get(x->home, buffer, value, data, job->why, sizeof job->why);

    idist__xla_value_drop(x->home, value);
    return ok;
}

// Copies the buffers of a staged call to host memory.
static bool idist__xla_worker_fetch(idist__xla *x, idist__xla_job *job) {
    if (job->send_copy && !idist__xla_worker_get(x, job->send, job->send_copy, job)) return false;
    if (!job->fetches_recv) return true;
    return idist__xla_worker_get(x, job->recv, job->recv_copy, job);
}

// Copies the parts that a staged call has written into `whole`, which holds the buffer's contents.
// A bool must be 0 or 1 on the device, so any other byte becomes 1.
static void idist__xla_worker_merge(const idist__xla_job *job, char *whole) {
    bool is_bool = job->recv->type == IDIST__PJRT_BOOL;
    size_t k;
    int i;

    for (i = 0; i < job->range_count; i++) {
        const idist__xla_range *range = &job->ranges[i];

        if (whole != job->recv_copy)
            memcpy(whole + range->at, job->recv_copy + range->at, range->nbytes);
        for (k = 0; k < range->nbytes && is_bool; k++)
            whole[range->at + k] = whole[range->at + k] != 0;
    }
}

// Copies to the device what a staged call has written. Other calls may have changed other parts of
// the buffer meanwhile, so the rest of the buffer is fetched now.
static bool idist__xla_worker_store(idist__xla *x, idist__xla_job *job) {
    bool is_whole = job->range_count == 1 && job->ranges[0].nbytes == job->recv->nbytes;
    char *whole = is_whole ? job->recv_copy : (char *)idist__mem_raw(NULL, job->recv->nbytes);

    job->lacks_memory = !whole;

    if (whole && (is_whole || idist__xla_worker_get(x, job->recv, whole, job))) {
        idist__xla_worker_merge(job, whole);
        job->output = idist__xla_value_put(x->home, job->recv, whole, job->why, sizeof job->why);
    }

    if (!is_whole) idist__mem_free(NULL, whole);

    return job->output != NULL;
}

// Runs the program of a call on this rank's device, and waits for the result. The result takes the
// memory of the input only if the call is in place and nobody else reads the input. This is decided
// here, because the program's text must be the same on all ranks.
static bool idist__xla_worker_execute(idist__xla *x, idist__xla_job *job) {
    idist__xla_buffer *in = job->send ? job->send : job->recv;
    idist__xla_value *value = idist__xla_value_take(x->home, in);
    static const int64_t first = 0;
    idist__pjrt_execute_options options;
    idist__pjrt_execute args;
    void *inputs[1], *outputs[1], *done[1] = {NULL};
    void *const *input_lists[1];
    void **output_lists[1];
    bool ok;

    inputs[0] = value->pjrt;
    input_lists[0] = inputs;
    outputs[0] = NULL;
    output_lists[0] = outputs;
    idist__pjrt_init(&options, sizeof options);
    options.launch_id = (int)((x->launch_base + job->ticket) & 0x7fffffff);
    options.not_donated = &first;
    job->donated = job->in_place && idist__xla_value_is_alone(x->home, value);
    options.not_donated_count = job->donated ? 0 : 1;
    idist__pjrt_init(&args, sizeof args);
    args.loaded = job->program->loaded;
    args.options = &options;
    args.inputs = input_lists;
    args.device_count = 1;
    args.input_count = 1;
    args.outputs = output_lists;
    args.done = done;
    args.device = x->device;

    ok = idist__pjrt_call(x->home->api, IDIST__PJRT_EXECUTE, &args, job->why, sizeof job->why);
    if (ok) job->output = outputs[0];
    if (ok) ok = idist__pjrt_await(x->home->api, done[0], job->why, sizeof job->why);
    idist__xla_value_drop(x->home, value);

    return ok;
}

// Does the work of a job, without the world's lock.
static bool idist__xla_worker_perform(idist__xla *x, idist__xla_job *job) {
    switch (job->work) {
    case IDIST__XLA_COMPILE:
        job->program = idist__xla_program_make(x->home, &job->source, job->why, sizeof job->why);
        job->lacks_memory = !job->program;
        return job->program != NULL;
    case IDIST__XLA_FETCH: return idist__xla_worker_fetch(x, job);
    case IDIST__XLA_STORE: return idist__xla_worker_store(x, job);
    default: return idist__xla_worker_execute(x, job);
    }
}

// Returns the next job, taken out of its list, or NULL if the worker has to wait.
static idist__xla_job *idist__xla_worker_next(idist__xla *x) {
    idist__xla_job *job = x->jobs;

    if (job) {
        x->jobs = job->next;
        if (!x->jobs) x->jobs_end = &x->jobs;
        return job;
    }

    job = x->ordered;
    if (!job || !job->placed) return NULL;
    x->ordered = job->next;

    return job;
}
