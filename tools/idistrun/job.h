// job.h: the job: starts all children, waits, passes on signals, ends the remaining ranks
//
// One thread does everything, in a loop around poll(). The loop wakes up for output, for a signal
// (through a signalfd; SIGCHLD is one of the signals), for an item from the head, or at a set time:
//
//     job_wait -> output_read            writes lines of the children
//              -> job_interrupt          passes on a signal to this process or from the head
//     job_reap -> job_end_child          finds children that have ended, and handles their end
//     outcome_settle                     decides on a held failure
//     job_end_ranks                      after a failure: SIGTERM, and later SIGKILL
#pragma once

#include "base.h"
#include "child.h"
#include "error_file.h"
#include "node.h"
#include "options.h"
#include "outcome.h"
#include "output.h"
#include "place.h"
#include "timeline.h"

#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>

enum { JOB_INSIST_MS = 400 }; // between one SIGKILL and the next
enum { JOB_NOT_ENDING = -1 };

// Indices of the descriptors for poll(). The streams of all children follow the first two.
enum { JOB_POLL_SIGNALS, JOB_POLL_HEAD, JOB_POLL_STREAMS };

static struct {
    long long kill_at_ms; // when SIGKILL is due, or JOB_NOT_ENDING if no rank has been asked to end
    int signal_fd;
    bool hears_head; // this is a node, and its head is connected
    struct pollfd *poll_fds;
} job;

//------------------------------------------------------------------------------
// signals
//------------------------------------------------------------------------------

// Sends a signal to all ranks.
static void job_signal_all(int number) {
    for (int i = 0; i < children.count; i++) child_signal(&children.items[i], number);
}

// Ends the job because of a signal. The second signal kills the ranks.
static void job_interrupt(int number) {
    bool is_ending = job.kill_at_ms != JOB_NOT_ENDING;
    bool is_first = outcome.signal == 0;

    if (options.verbose) base_say("signal %d goes to all ranks", number);
    outcome_note_signal(number);

    // The ranks already got a SIGTERM when the first rank failed.
    if (is_ending && is_first && number == SIGTERM) return;

    job_signal_all(is_ending ? SIGKILL : number);
    job.kill_at_ms = base_now_ms() + (is_ending ? JOB_INSIST_MS : 1000LL * options.grace_s);
}

// Handles the next item from the head. Ends the job if the head is gone.
static void job_hear_head(void) {
    int number = node_hear_signal();

    if (number == NODE_HEAD_IS_GONE) {
        job.hears_head = false;
        if (job.kill_at_ms == JOB_NOT_ENDING) job_interrupt(SIGTERM);
    } else if (number) {
        job_interrupt(number);
    }
}

// Handles a signal to this process. SIGCHLD only wakes up the loop.
static void job_hear_signal(void) {
    struct signalfd_siginfo info;

    if (read(job.signal_fd, &info, sizeof info) != (ssize_t)sizeof info) return;
    if (info.ssi_signo != SIGCHLD) job_interrupt((int)info.ssi_signo);
}

// Opens the descriptor for signals. Ignores SIGPIPE, so that a write to a closed pipe returns an
// error.
static void job_open_signals(void) {
    static const int numbers[] = {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT};
    sigset_t mask;

    sigemptyset(&mask);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) sigaddset(&mask, numbers[i]);
    sigprocmask(SIG_BLOCK, &mask, NULL);
    signal(SIGPIPE, SIG_IGN);

    job.signal_fd = signalfd(-1, &mask, SFD_CLOEXEC);
    if (job.signal_fd < 0) base_die("signalfd");
}

// Asks the ranks to end after a failure, and kills them after the grace period.
static void job_end_ranks(void) {
    if (job.kill_at_ms == JOB_NOT_ENDING) {
        if (!outcome.code) return;
        job_signal_all(SIGTERM);
        job.kill_at_ms = base_now_ms() + 1000LL * options.grace_s;
    } else if (base_now_ms() >= job.kill_at_ms) {
        job_signal_all(SIGKILL);
        job.kill_at_ms = base_now_ms() + JOB_INSIST_MS;
    }
}

//------------------------------------------------------------------------------
// children that have ended
//------------------------------------------------------------------------------

// Decides whether the end of a child is the first failure. After a signal no failure is printed.
static void job_judge(const struct child *child, bool had_lost_another) {
    int code = outcome_code_of(child->status);

    if (!code || outcome.code) return;

    if (outcome.signal) outcome_note_code(code);
    else if (place.role == PLACE_HEAD) // a node reports the failures of its ranks
        outcome_node_lost(hosts.items[child->index].name, child->node_started, child->status);
    else outcome_rank_failed(child_rank(child), child->status, had_lost_another);
}

// Handles the end of a child: reads the rest of its output, and evaluates its status.
static void job_end_child(struct child *child) {
    bool is_rank = place.role != PLACE_HEAD;
    bool had_lost_another = is_rank && error_file_take_lost(child_rank(child));

    child_end(child);
    output_drain(child);

    if (options.verbose && is_rank)
        base_say("rank %d has ended, status %d", child_rank(child), outcome_code_of(child->status));
    job_judge(child, had_lost_another);
}

// Handles the end of dead children: those that a signal killed if `killed` is true, else all
// others.
static void job_end_dead(bool killed) {
    for (int i = 0; i < children.count; i++) {
        struct child *child = &children.items[i];

        if (child->state == CHILD_DEAD && WIFSIGNALED(child->status) == killed)
            job_end_child(child);
    }
}

// Finds the children that have ended. Handles children that a signal killed first, because other
// children may have failed as a consequence.
static void job_reap(void) {
    int status;
    pid_t pid;

    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) child_note_death(pid, status);
    job_end_dead(true);
    job_end_dead(false);
}

//------------------------------------------------------------------------------
// the loop
//------------------------------------------------------------------------------

// Returns how long poll() may wait in ms, or -1 if there is no limit.
static int job_timeout_ms(void) {
    long long next_ms = job.kill_at_ms, held_until_ms = outcome_held_until_ms(), left_ms;

    if (held_until_ms >= 0 && (next_ms < 0 || held_until_ms < next_ms)) next_ms = held_until_ms;
    if (next_ms < 0) return -1;

    left_ms = next_ms - base_now_ms();
    return left_ms < 0 ? 0 : (int)left_ms;
}

// Waits in poll() and handles the events. Handles output first, so that the last output of a rank
// is printed before its failure.
static void job_wait(void) {
    struct pollfd *fds = job.poll_fds;
    int i, stream_count = children.count * STREAM_KINDS;

    fds[JOB_POLL_SIGNALS] = (struct pollfd){job.signal_fd, POLLIN, 0};
    fds[JOB_POLL_HEAD] = (struct pollfd){job.hears_head ? STDIN_FILENO : -1, POLLIN, 0};
    for (i = 0; i < stream_count; i++) {
        struct child *child = &children.items[i / STREAM_KINDS];

        fds[JOB_POLL_STREAMS + i] = (struct pollfd){child->streams[i % STREAM_KINDS].fd, POLLIN, 0};
    }

    if (poll(fds, (nfds_t)stream_count + JOB_POLL_STREAMS, job_timeout_ms()) < 0 && errno != EINTR)
        base_die("poll");

    for (i = 0; i < stream_count; i++)
        if (fds[JOB_POLL_STREAMS + i].revents)
            output_read(&children.items[i / STREAM_KINDS], (enum stream_kind)(i % STREAM_KINDS));
    if (fds[JOB_POLL_SIGNALS].revents) job_hear_signal();
    if (fds[JOB_POLL_HEAD].revents) job_hear_head();
}

// Starts all children, and waits until all have ended and no failure is held.
static void job_run_once(int restart) {
    struct attempt attempt = place_make_attempt(restart);

    job.kill_at_ms = JOB_NOT_ENDING;
    if (options.trace) timeline_begin();
    outcome_begin();

    for (int i = 0; i < children.count; i++) {
        struct child *child = &children.items[i];

        child_start(child, &attempt);
        if (place.role == PLACE_HEAD) node_tell_orders(child->to, i, &attempt);
    }

    while (children.alive_count || outcome_held_until_ms() >= 0) {
        job_wait();
        job_reap();
        outcome_settle(children.alive_count || place.role == PLACE_NODE);
        job_end_ranks();
    }
}

// Prepares everything that the attempts share. Exits if one of these steps fails.
static void job_prepare(void) {
    child_make_all();
    job.poll_fds = base_or_die(
        calloc((size_t)children.count * STREAM_KINDS + JOB_POLL_STREAMS, sizeof *job.poll_fds));

    if (place.role == PLACE_HEAD) node_make_secret();
    if (place.role != PLACE_HEAD) {
        if (options.log_dir && mkdir(options.log_dir, 0777) != 0 && errno != EEXIST)
            base_die(options.log_dir);
        error_file_choose_folder();
    }

    if (options.trace) timeline_prepare();
    outcome_choose_error_file();
    job.hears_head = place.role == PLACE_NODE;
    job_open_signals();
}

// Returns true if another attempt follows. The head restarts the whole job, so a node restarts
// nothing.
static bool job_may_restart(int restart) {
    return outcome.code && !outcome.signal && place.role != PLACE_NODE &&
           restart < options.max_restarts;
}

// Runs the job, with its restarts, and returns idistrun's exit code.
static int job_run(int restart) {
    job_prepare();
    job_run_once(restart);

    while (job_may_restart(restart)) {
        restart++;
        base_say("starting again, %d of %d", restart, options.max_restarts);
        job_run_once(restart);
    }

    if (options.trace) timeline_end();
    return outcome_exit_code();
}
