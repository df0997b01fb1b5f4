// base/log.h: one line at a time, to the caller's logger or to stderr
#pragma once

#include "os/unwind.h"
#include "os/process.h"
#include "os/thread.h"
#include "base/fail.h"

typedef struct idist__log {
    idist_logger logger;
    idist_log_level level;
    char who[96]; // prefix of each line, such as "rank 3/8 host"
} idist__log;

static idist__os_mutex idist__log_lock = IDIST__OS_MUTEX_INIT;
// Printed before the next line to erase a progress bar on the current line. Protected by
// idist__log_lock.
static const char *idist__log_before = "";

// Initializes a log with the caller's logger, if there is one, and with the level from IDIST_LOG.
// An unknown level is an error; the log then has the default level (warn).
static idist_status idist__log_init(idist__log *log, const idist_logger *logger) {
    static const char *const names[] = {"", "error", "warn", "info", "debug"};
    const char *env = idist__os_env("IDIST_LOG");
    int i;

    memset(log, 0, sizeof *log);
    if (logger) log->logger = *logger;
    log->level = IDIST_LOG_WARN;
    if (!env) return IDIST_OK;

    for (i = 1; i <= 4; i++)
        if (strcmp(env, names[i]) == 0) {
            log->level = (idist_log_level)i;
            return IDIST_OK;
        }

    return idist__fail(IDIST_ERR_ENV, "IDIST_LOG=%s: use error, warn, info or debug", env);
}

static void idist__log_to_stderr(const char *line) {
    int cancel_state = idist__os_unwind_block_cancel();

    fprintf(stderr, "%s%s\n", idist__log_before, line);
    idist__log_before = "";
    idist__os_unwind_allow_cancel(cancel_state);
}

// Calls a logger. Returns false if the logger has thrown an exception; then this function has
// logged the exception to stderr, and the caller must still log the line. Called with the lock
// held.
IDIST__NOINLINE static bool idist__log_call(const idist_logger *logger, idist_log_level level,
                                            const char *line) {
    char thrown[320];

    IDIST__CALLBACK(logger->log_fn(level, line, logger->user));
    if (!idist__me.thrown[0]) return true;

    snprintf(thrown, sizeof thrown, "idist: the logger threw an exception: %s", idist__me.thrown);
    idist__me.thrown[0] = 0;
    idist__log_to_stderr(thrown);

    return false;
}

// Logs one line if `level` is at most the level of the log.
IDIST__PRINTF(3, 4)
static void idist__log_print(const idist__log *log, idist_log_level level, const char *fmt, ...) {
    static const char *const names[] = {"", "error", "warning", "info", "debug"};
    char text[1024], line[1200];
    va_list args;

    if (level > log->level) return;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    snprintf(line, sizeof line, "idist %s%s%s: %s", log->who, log->who[0] ? " " : "", names[level],
             text);
    idist__os_mutex_lock(&idist__log_lock);
    if (!log->logger.log_fn || !idist__log_call(&log->logger, level, line))
        idist__log_to_stderr(line);
    idist__os_mutex_unlock(&idist__log_lock);
}
