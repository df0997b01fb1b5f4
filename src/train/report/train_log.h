// train/report/train_log.h: what a training run prints, on rank 0 only
#pragma once

#include "os/unwind.h"
#include "os/clock.h"
#include "os/thread.h"
#include "base/fail.h"
#include "base/text.h"
#include "base/log.h"
#include "core/model.h"
#include "core/world.h"
#include "calls/get.h"

// Removes a progress bar, so that a line can take its place. Called with idist__log_lock held.
static void idist__train_log_clear_bar(void) {
    fputs(idist__log_before, stderr);
    idist__log_before = "";
}

static void idist__train_log_line(const char *line) {
    const idist__world *world = idist__world_default();
    const idist_logger *logger = world ? &world->log.logger : NULL;
    int cancel_state = idist__os_unwind_block_cancel();

    idist__os_mutex_lock(&idist__log_lock);
    idist__train_log_clear_bar();
    if (!logger || !logger->log_fn || !idist__log_call(logger, IDIST_LOG_INFO, line))
        idist__log_to_stderr(line);
    idist__os_mutex_unlock(&idist__log_lock);
    idist__os_unwind_allow_cancel(cancel_state);
}

void idist_train_log(const char *name, const char *format, ...) {
    char line[2048], when[32], *at;
    int64_t now_ns;
    va_list args;

    if (idist_get_rank() != 0 || idist__me.callbacks) return; // a logger must not log

    now_ns = idist__os_calendar_ns();
    idist__os_calendar_print(now_ns, when, sizeof when);
    snprintf(line, sizeof line, "%s,%03d %s INFO: ", when, (int)(now_ns / 1000000 % 1000),
             name ? name : "training");
    va_start(args, format);
    vsnprintf(line + strlen(line), sizeof line - strlen(line), format, args);
    va_end(args);

    for (at = line; *at; at++)
        if (*at == '\n') *at = ' ';
    idist__train_log_line(line);
}

void idist_train_log_config(const char *name) {
    char text[sizeof idist__get_own.config], *line, *end;

    if (idist_get_rank() != 0) return;
    idist_train_log(name, "- idist version: %s", IDIST_VERSION);
    idist_train_log(name, "- backend: %s", idist_backend());
    idist_train_log(name, "- device: %s", idist_device());
    idist_train_log(name, "- world size: %d", idist_get_world_size());
    idist_train_log(name, "Distributed setting:");
    idist__text_copy(text, sizeof text, idist_show_config());

    for (line = text; *line; line = end) {
        end = line + strcspn(line, "\n");
        if (*end) *end++ = 0;
        idist_train_log(name, "    %s", line);
    }
}

void idist_train_log_metrics(const char *name, int epoch, double seconds, const char *tag,
                             const char *const *names, const double *values, int n) {
    char text[IDIST__NUMBER_NBYTES];
    int i;

    idist_train_log(name, "Epoch %d - Evaluation time (seconds): %s - %s metrics:", epoch,
                    idist__number_print_fixed(text, seconds, 2), tag ? tag : "");
    for (i = 0; i < n && names && values; i++)
        idist_train_log(name, "    %s: %s", names[i], idist__number_print(text, values[i], 6));
}
