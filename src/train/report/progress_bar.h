// train/report/progress_bar.h: a progress bar on a terminal
#pragma once

#include "os/unwind.h"
#include "os/clock.h"
#include "os/process.h"
#include "os/thread.h"
#include "base/fail.h"
#include "base/log.h"
#include "train/report/train_log.h"
#include "train/report/columns.h"

#define IDIST__BAR_NS (100 * IDIST__MS) // least time between two updates of a progress bar

// Prints a duration, for example "02:07" or "1:02:07".
static void idist__progress_bar_print_time(char *text, size_t capacity, int64_t ns) {
    int64_t seconds = ns / 1000000000;
    int h = (int)(seconds / 3600), m = (int)(seconds / 60 % 60), s = (int)(seconds % 60);

    if (ns < 0 || seconds > 99 * 3600) snprintf(text, capacity, "?");
    else if (seconds >= 3600) snprintf(text, capacity, "%d:%02d:%02d", h, m, s);
    else snprintf(text, capacity, "%02d:%02d", m, s);
}

// Writes one line that the terminal does not wrap. After a wrap, the next update would start in the
// middle of the line. The last column stays free, because some terminals wrap as soon as it is
// written.
static void idist__progress_bar_draw(const char *title, const char *numbers, const char *picture,
                                     const char *text, const char *times, const char *end) {
    const char *parts[5];
    idist__columns_line line;
    size_t columns = idist__os_terminal_columns();
    int i, attempt;

    if (!columns) columns = 80;
    parts[0] = title;
    parts[1] = numbers;
    parts[2] = picture;
    parts[3] = text;
    parts[4] = times;

    for (attempt = 0; attempt < 2; attempt++) {
        idist__columns_begin(&line, columns - 1);
        for (i = 0; i < 5; i++) idist__columns_add(&line, parts[i]);
        if (!line.cut) break;
        parts[2] = " "; // without the picture
    }

    fprintf(stderr, "%s%s%s", line.text, line.colored ? "\033[m" : "", end);
}

static void idist__progress_bar_print_remaining(char *text, size_t capacity, int64_t elapsed_ns,
                                                uint64_t done, uint64_t total) {
    double remaining_ns = done ? (double)elapsed_ns / (double)done * (double)(total - done) : -1;

    if (remaining_ns > 9e18) remaining_ns = -1; // does not fit in 64 bits
    idist__progress_bar_print_time(text, capacity, (int64_t)remaining_ns);
}

void idist_progress_update(idist_progress *bar, uint64_t done, const char *text) {
    static const char cells[] = "##########          ";
    char elapsed[32], remaining[32], numbers[80], picture[16], times[80];
    const char *title = bar && bar->title ? bar->title : "";
    int64_t now_ns = idist__os_clock_now_ns();
    double fraction;
    int cancel_state;
    bool last;

    if (!bar || idist_get_rank() != 0 || idist__me.callbacks) return; // a logger must not draw
    if (!bar->started_ns) bar->started_ns = now_ns;
    last = done >= bar->total;
    if (!last && bar->shown_ns && now_ns - bar->shown_ns < IDIST__BAR_NS) return;
    bar->shown_ns = now_ns;
    if (!idist__os_terminal_has_stderr()) return;
    if (done > bar->total) done = bar->total;

    idist__progress_bar_print_time(elapsed, sizeof elapsed, now_ns - bar->started_ns);
    idist__progress_bar_print_remaining(remaining, sizeof remaining, now_ns - bar->started_ns, done,
                                        bar->total);

    cancel_state = idist__os_unwind_block_cancel();
    idist__os_mutex_lock(&idist__log_lock);
    idist__train_log_clear_bar();
    snprintf(numbers, sizeof numbers, "%s[%llu/%llu] %3d%%", title[0] ? ": " : "",
             (unsigned long long)done, (unsigned long long)bar->total,
             bar->total ? (int)(100.0 * (double)done / (double)bar->total) : 100);
    fraction = bar->total ? 10.0 * (double)done / (double)bar->total : 10;
    snprintf(picture, sizeof picture, "|%.10s| ", cells + 10 - (int)fraction);
    snprintf(times, sizeof times, " [%s<%s]", elapsed, remaining);
    idist__progress_bar_draw(title, numbers, picture, text ? text : "", times, last ? "\n" : "");
    fflush(stderr);
    if (!last) idist__log_before = "\r\033[K"; // clears the line
    idist__os_mutex_unlock(&idist__log_lock);
    idist__os_unwind_allow_cancel(cancel_state);

    if (last) bar->started_ns = bar->shown_ns = 0; // the struct can be used for another bar
}
