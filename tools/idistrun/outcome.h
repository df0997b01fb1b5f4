// outcome.h: how the job ends: the first failure, or a signal
//
// The first rank that fails by itself decides the outcome: its exit code becomes idistrun's, and
// its failure is printed. Later failures, and failures after a signal, are consequences.
//
// A rank may fail because it has lost another rank. The lost rank may be on another host, whose
// idistrun reports later. Such a failure is held for OUTCOME_HOLD_MS, and decides only if no other
// failure is known after this time:
//
//     outcome_rank_failed -> outcome_report                   the rank failed by itself
//                         -> outcome_hold -> outcome_settle   the rank had lost another rank
//
// A node reports its failure to the head instead of the user.
#pragma once

#include "base.h"
#include "error_file.h"
#include "error_json.h"
#include "node.h"
#include "options.h"
#include "place.h"

#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/stat.h>
#include <sys/wait.h>

enum { OUTCOME_HOLD_MS = 500, OUTCOME_TEXT_NBYTES = 512 };
enum { OUTCOME_SSH_CODE = 255 }; // exit code of ssh for its own errors

static struct {
    int code;               // exit code of the first failure, 0 if there is none
    int signal;             // signal that was sent to end the job, 0 if there is none
    const char *error_file; // file for a copy of the first failure, or NULL

    struct {
        int code; // 0 if no failure is held
        char text[OUTCOME_TEXT_NBYTES];
        char *json;
        long long until_ms;
    } held;
} outcome;

// Returns true if a failure or a signal has decided how the job ends.
static bool outcome_is_known(void) { return outcome.code || outcome.signal; }

// Returns idistrun's exit code.
static int outcome_exit_code(void) {
    if (outcome.code) return outcome.code;
    return outcome.signal ? BASE_CODE_SIGNAL + outcome.signal : 0;
}

// Records a signal that ends the job.
static void outcome_note_signal(int number) { outcome.signal = number; }

// Records the code of the first rank that fails after a signal. The code after SIGINT is 130,
// because some programs turn Ctrl-C into an exception and exit with 1.
static void outcome_note_code(int code) {
    outcome.code = outcome.signal == SIGINT ? BASE_CODE_SIGNAL + SIGINT : code;
}

// Chooses the error file. A node has no error file, because the head writes one.
static void outcome_choose_error_file(void) {
    if (place.role == PLACE_NODE) return;
    outcome.error_file = options.error_file;
    if (!outcome.error_file) outcome.error_file = getenv("TORCHELASTIC_ERROR_FILE");
}

// Clears the failure of an earlier attempt, and removes its error file.
static void outcome_begin(void) {
    struct stat status;

    outcome.code = 0;
    if (!outcome.error_file) return;
    if (lstat(outcome.error_file, &status) == 0 && S_ISREG(status.st_mode))
        unlink(outcome.error_file);
}

// Writes the error file.
static void outcome_write_error_file(const char *json) {
    int fd = open(outcome.error_file, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);

    if (fd < 0 || dprintf(fd, "%s\n", json) < 0)
        base_say("%s: %s", outcome.error_file, strerror(errno));
    if (fd >= 0) close(fd);
}

// Records the first failure, and reports it to the user or the head. `json` is the rank's
// exception, or NULL.
static void outcome_report(int code, const char *text, const char *json) {
    char message[4096];

    outcome.code = code;

    if (place.role == PLACE_NODE) {
        node_say_failed(code, text, json);
        return;
    }

    if (json && error_json_read(json, message, sizeof message)) base_say("%s: %s", text, message);
    else base_say("%s", text);

    if (outcome.error_file) outcome_write_error_file(json ? json : error_json_make(text));
}

// Holds a failure that may be a consequence of another failure.
static void outcome_hold(int code, const char *text, const char *json) {
    if (outcome.held.code) return; // the first held failure stays

    outcome.held.code = code;
    snprintf(outcome.held.text, sizeof outcome.held.text, "%s", text);
    outcome.held.json = json ? base_copy(json) : NULL;
    outcome.held.until_ms = base_now_ms() + OUTCOME_HOLD_MS;
}

// Returns the time until which a failure is held, or -1 if no failure is held.
static long long outcome_held_until_ms(void) {
    return outcome.held.code ? outcome.held.until_ms : -1;
}

// Decides on the held failure when its time has passed, or when no other failure can occur. Reports
// the failure, or discards it if another failure or a signal has decided the outcome.
static void outcome_settle(bool others_may_come) {
    bool may_wait = others_may_come && !outcome_is_known();

    if (!outcome.held.code || (may_wait && base_now_ms() < outcome.held.until_ms)) return;

    if (!outcome_is_known())
        outcome_report(outcome.held.code, outcome.held.text, outcome.held.json);
    free(outcome.held.json);
    outcome.held.code = 0;
    outcome.held.json = NULL;
}

// Converts a status of waitpid() to the code that a shell would report.
static int outcome_code_of(int status) {
    return WIFSIGNALED(status) ? BASE_CODE_SIGNAL + WTERMSIG(status) : WEXITSTATUS(status);
}

// Describes a status of waitpid(). The next call overwrites the text.
static const char *outcome_describe(int status) {
    static char text[100];

    if (WIFSIGNALED(status))
        snprintf(text, sizeof text, "killed by signal %d (%s)", WTERMSIG(status),
                 strsignal(WTERMSIG(status)));
    else snprintf(text, sizeof text, "exited with status %d", WEXITSTATUS(status));

    return text;
}

// Handles the failure of a rank of this host.
static void outcome_rank_failed(int rank, int status, bool had_lost_another) {
    const char *json = error_file_read(rank);
    char text[OUTCOME_TEXT_NBYTES];

    snprintf(text, sizeof text, "rank %d on host %s: %s%s", rank, place.hostname,
             outcome_describe(status), had_lost_another ? ", after it had lost another rank" : "");

    if (had_lost_another) outcome_hold(outcome_code_of(status), text, json);
    else outcome_report(outcome_code_of(status), text, json);
}

// Describes a node that has ended without reporting a failure. The ssh exits with the code of the
// node's idistrun, or with OUTCOME_SSH_CODE after its own errors.
static void outcome_describe_node(const char *name, bool node_started, int status, char *text) {
    const size_t capacity = OUTCOME_TEXT_NBYTES;
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : 0;

    if (!code) snprintf(text, capacity, "host %s: its ssh was %s", name, outcome_describe(status));
    else if (!node_started)
        snprintf(text, capacity, "host %s: %s (ssh ended with status %d)", name,
                 code == OUTCOME_SSH_CODE ? "no connection" : "idistrun did not run there", code);
    else if (code == OUTCOME_SSH_CODE)
        snprintf(text, capacity,
                 "host %s: the connection or idistrun there was lost (ssh ended with status 255)",
                 name);
    else
        snprintf(text, capacity, "host %s: idistrun ended there without a report (status %d%s%s)",
                 name, code, code > BASE_CODE_SIGNAL ? ": " : "",
                 code > BASE_CODE_SIGNAL ? strsignal(code - BASE_CODE_SIGNAL) : "");
}

// Handles the loss of a node.
static void outcome_node_lost(const char *name, bool node_started, int status) {
    char text[OUTCOME_TEXT_NBYTES];

    outcome_describe_node(name, node_started, status, text);
    outcome_report(BASE_CODE_SYSTEM, text, NULL);
}
