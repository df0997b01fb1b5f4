// core/timer.h: deadlines, announcements and warnings
//
// A task that waits goes through these steps. Times count from its start:
//
//     20 ms            announce: the other members learn that this rank waits, and may report a
//                      mismatch
//     59 s             ask the members again whether they are alive
//     60 s             log a warning that names the missing ranks
//     the deadline     fail with IDIST_ERR_TIMEOUT; the text names the missing ranks
//
// The members are also asked again before the deadline: a second before it, or half of the time-out
// if that is less.
//
// Thousands of tasks may be running, and idist__timer_run is called before every sleep. So the
// tasks are looked at only when something is due (w->wait.timers_due_ns). Announcements are delayed
// slightly so that several are made together.
#pragma once

#include "os/clock.h"
#include "base/text.h"
#include "base/log.h"
#include "core/kind.h"
#include "core/model.h"
#include "core/explain.h"
#include "core/task.h"
#include "core/group.h"

#ifndef IDIST__WARN_NS // a test sets a shorter time
#define IDIST__WARN_NS (60000 * IDIST__MS)
#endif
#define IDIST__TIMERS_NS (5 * IDIST__MS) // a polling thread runs the timers this often
#define IDIST__ASK_NS (1000 * IDIST__MS)

// Returns the time in ns when the announcement of a task is due. While a task waits for the device,
// its announcement is postponed until the host backend has the task.
static int64_t idist__timer_announce_at(const idist__task *t, int64_t now) {
    int64_t at = t->started_ns + IDIST__ANNOUNCE_NS;

    if (t->state == IDIST__TASK_ON_DEVICE && at < now + IDIST__MS) return now + IDIST__MS;
    if (at > now && at < now + IDIST__TIMERS_NS) return now + IDIST__TIMERS_NS;
    return at;
}

// Returns how long the members have to answer, in ns: a second or half of the time-out, whichever
// is less.
static int64_t idist__timer_patience(const idist__task *t) {
    int64_t half = t->timeout_ms < 0 ? IDIST__ASK_NS : t->timeout_ms * IDIST__MS / 2;
    return half < IDIST__ASK_NS ? half : IDIST__ASK_NS;
}

// Returns the time in ns when the next question to the members is due, or IDIST__FOREVER. Members
// are asked again because a rank that has entered the call may have been stopped since. Sets
// *until_ns to the time when the answers are used.
static int64_t idist__timer_ask_at(const idist__task *t, int64_t *until_ns) {
    int64_t end = t->late.warned ? IDIST__FOREVER : t->started_ns + IDIST__WARN_NS;

    if (t->deadline_ns < end) end = t->deadline_ns;
    *until_ns = end;
    return end == IDIST__FOREVER ? IDIST__FOREVER : end - idist__timer_patience(t);
}

// Returns the time in ns of the latest question that the members should have answered by now, or 0
// if there is none. A question that has just been asked for another task of the group does not
// count; the question before it does.
IDIST__UNUSED static int64_t idist__timer_asked_ns(const idist__task *t) {
    const idist_group *g = t->group;
    int64_t age = idist__os_clock_now_ns() - g->asked_ns;

    return age < idist__timer_patience(t) / 2 ? g->asked_before_ns : g->asked_ns;
}

// Ends a task whose deadline has passed. Returns false if the task gets more time instead: a
// receive whose message is arriving waits for the rest of the message.
static bool idist__timer_expire(idist__world *w, idist__task *t, int64_t now) {
    char cause[400];
    int missing;

    snprintf(cause, sizeof cause, "not done after %lld ms",
             (long long)((now - t->started_ns) / IDIST__MS));
    idist__text_append(cause, sizeof cause, "; missing: ");
    missing = w->backend->missing(t, cause, sizeof cause);

    if (t->call.kind == IDIST__RECV && !missing && !t->patient) {
        t->patient = true;
        t->deadline_ns =
            w->cfg.timeout_ms < 0 ? IDIST__FOREVER : now + w->cfg.timeout_ms * IDIST__MS;
        return false;
    }

    if (!missing)
        idist__text_append(cause, sizeof cause, "nobody, but the data did not reach rank %d",
                           w->group.rank);
    if (idist__kind_is_p2p(t->call.kind) && w->backend->cancel(t))
        idist__task_complete(t, IDIST_ERR_TIMEOUT, cause);
    else idist__group_fail(t->group, IDIST_ERR_TIMEOUT, cause);

    return true;
}

// Asks the members once more whether they are alive, or asks the peer of a message which rank the
// peer waits for. Returns true if the question was due.
static bool idist__timer_ask(idist__world *w, idist__task *t, int64_t now) {
    int64_t until_ns, ask_at = idist__timer_ask_at(t, &until_ns);
    bool p2p = idist__kind_is_p2p(t->call.kind);

    if (now < ask_at || (p2p && t->late.asked)) return false;
    if (!p2p && (t->group->asked_ns >= ask_at || now < t->group->asked_until_ns)) return false;

    if (p2p) {
        t->late.asked = true;
    } else {
        t->group->asked_before_ns = t->group->asked_ns;
        t->group->asked_ns = now;
        t->group->asked_until_ns = until_ns;
    }

    w->backend->announce(t);

    return true;
}

// Announces a task, or asks its members once more. Returns true if the announcement or the question
// was due.
static bool idist__timer_announce(idist__world *w, idist__task *t, int64_t now) {
    if (t->late.announced) return idist__timer_ask(w, t, now);
    if (now < idist__timer_announce_at(t, now)) return false;
    t->late.announced = true;
    // In idist_new_group_by_members, a rank may rightly wait while the other members are in other
    // calls.
    if (t->call.label != IDIST__NEW_GROUP_BY_MEMBERS) w->backend->announce(t);

    return true;
}

static void idist__timer_warn(idist__world *w, idist__task *t, int64_t now) {
    char what[128], missing[400];

    if (!t->late.announced || t->late.warned || now < t->started_ns + IDIST__WARN_NS) return;
    t->late.warned = true;
    t->late.asked = false; // the peer is asked again before the deadline
    idist__explain_task(t, what, sizeof what);
    missing[0] = 0;
    w->backend->missing(t, missing, sizeof missing);
    idist__log_print(&w->log, IDIST_LOG_WARN, "%s has waited for 60 s; missing: %s", what,
                     missing[0] ? missing : "nobody");
}

// Returns the time in ns when a task needs attention next.
static int64_t idist__timer_next(const idist__task *t, int64_t now) {
    int64_t at, ask_at, until_ns;

    if (t->late.announced) {
        at = t->late.warned ? IDIST__FOREVER : t->started_ns + IDIST__WARN_NS;
        ask_at = idist__timer_ask_at(t, &until_ns);
        if (now < ask_at && ask_at < at) at = ask_at;
    } else {
        at = idist__timer_announce_at(t, now);
    }

    return t->deadline_ns < at ? t->deadline_ns : at;
}

// Does everything that is due. Returns the time in ns when the timers must run again.
static int64_t idist__timer_run(idist__world *w) {
    int64_t now = idist__os_clock_now_ns(), next = IDIST__FOREVER;
    idist__task *t, *following;

    if (now < w->wait.timers_due_ns) return w->wait.timers_due_ns;
    w->wait.timers_due_ns = IDIST__FOREVER; // a task that starts meanwhile lowers it

    for (t = w->tasks.running; t; t = following) {
        uint32_t ended = w->wait.ended_count;
        int64_t at;
        following = t->next;

        if (now >= t->deadline_ns) {
            if (!idist__timer_expire(w, t, now)) next = now;
            else if (t->state != IDIST__TASK_DONE || w->wait.ended_count != ended + 1)
                following = w->tasks.running; // other tasks may have ended, too
            continue;
        }

        if (idist__timer_announce(w, t, now)) {
            if (w->wait.ended_count != ended)
                following = w->tasks.running; // any task may have ended
            next = now;
            continue;
        }

        idist__timer_warn(w, t, now);
        at = idist__timer_next(t, now);
        if (at < next) next = at;
    }

    if (next < w->wait.timers_due_ns) w->wait.timers_due_ns = next;

    return w->wait.timers_due_ns;
}
