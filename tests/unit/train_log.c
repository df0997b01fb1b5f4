// train_log: checks that only rank 0 prints log lines, in the format of Ignite's CIFAR10 tutorial.
// Also checks that the progress bar appears on a terminal and nowhere else.
#define _GNU_SOURCE // posix_openpt, wcwidth
#include "idist.h"

#include "idist_train.h"

#include "tap.h"

#include <locale.h>
#include <sys/ioctl.h>
#include <wchar.h>

typedef struct lines {
    int n;
    char text[64][300];
} lines;

static void take(idist_log_level level, const char *line, void *user) {
    lines *l = (lines *)user;
    if (level == IDIST_LOG_INFO && l->n < 64)
        snprintf(l->text[l->n++], sizeof l->text[0], "%s", line);
}

// Checks that a line begins with "2026-01-30 19:26:12,180 NAME INFO: ". Returns the text after this
// head, or NULL if the line differs.
static const char *after_head(const char *line, const char *name) {
    static const char shape[] = "dddd-dd-dd dd:dd:dd,ddd ";
    size_t n = strlen(shape);
    for (size_t i = 0; i < n; i++)
        if (shape[i] == 'd' ? line[i] < '0' || line[i] > '9' : line[i] != shape[i]) return NULL;
    line += n;
    if (strncmp(line, name, strlen(name)) != 0) return NULL;
    line += strlen(name);
    return strncmp(line, " INFO: ", 7) == 0 ? line + 7 : NULL;
}

static bool has_line(const lines *l, const char *name, const char *text) {
    for (int i = 0; i < l->n; i++) {
        const char *rest = after_head(l->text[i], name);
        if (rest && strcmp(rest, text) == 0) return true;
    }
    for (int i = 0; i < l->n; i++) tap_diag("%s", l->text[i]);
    return false;
}

static void say_all(void) {
    static const char *const names[2] = {"Accuracy", "Loss"};
    static const double values[2] = {0.7125, 1.5};
    idist_train_log("CIFAR10-Training", "Train on %s", "CIFAR10");
    idist_train_log_metrics("CIFAR10-Training", 3, 4.0249, "Test", names, values, 2);
    idist_train_log_config("setting");
}

static int worker(int local_rank, void *arg) {
    (void)arg;
    idist_train_log("CIFAR10-Training", "rank %d", local_rank);
    return 0;
}

static void to_a_logger(void) {
    lines l;
    idist_desc desc;
    memset(&l, 0, sizeof l);
    memset(&desc, 0, sizeof desc);
    desc.logger.log_fn = take;
    desc.logger.user = &l;
    TAP_REQUIRE(idist_initialize(&desc) == IDIST_OK);
    l.n = 0;
    say_all();
    tap_ok(has_line(&l, "CIFAR10-Training", "Train on CIFAR10"), "a line as the tutorial's");
    tap_ok(has_line(&l, "CIFAR10-Training",
                    "Epoch 3 - Evaluation time (seconds): 4.02 - Test metrics:"),
           "the epoch");
    tap_ok(has_line(&l, "CIFAR10-Training", "    Accuracy: 0.7125") &&
               has_line(&l, "CIFAR10-Training", "    Loss: 1.5"),
           "and its metrics");
    tap_ok(has_line(&l, "setting", "- world size: 1") && has_line(&l, "setting", "- backend: self"),
           "the configuration");
    tap_ok(has_line(&l, "setting", "    backend: self"), "line by line");
    idist_train_log(NULL, "%s", "");
    tap_ok(after_head(l.text[l.n - 1], "training") != NULL, "a training without a name");
    char large[3000];
    memset(large, 'x', sizeof large);
    large[sizeof large - 1] = 0;
    idist_train_log("a", "%s", large);
    tap_ok(strncmp(after_head(l.text[l.n - 1], "a"), "xxx", 3) == 0,
           "a line that is too long is cut");
    TAP_REQUIRE(idist_finalize() == IDIST_OK);
}

static int columns; // columns of the terminal, or 0 if the terminal does not report them

// Runs `body` with a terminal or a pipe as stderr, and collects what it writes.
static void capture(void (*body)(void), bool terminal, char *text, size_t cap) {
    int ends[2], from;
    size_t n = 0;
    if (terminal) {
        ends[0] = posix_openpt(O_RDWR | O_NOCTTY);
        TAP_REQUIRE(ends[0] >= 0 && grantpt(ends[0]) == 0 && unlockpt(ends[0]) == 0);
        ends[1] = open(ptsname(ends[0]), O_RDWR | O_NOCTTY);
        struct winsize size = {24, (unsigned short)columns, 0, 0};
        TAP_REQUIRE(ends[1] >= 0 && ioctl(ends[1], TIOCSWINSZ, &size) == 0);
    } else {
        TAP_REQUIRE(pipe(ends) == 0);
    }
    pid_t pid = fork();
    TAP_REQUIRE(pid >= 0);
    if (pid == 0) {
        dup2(ends[1], STDERR_FILENO);
        body();
        _exit(0);
    }
    close(ends[1]);
    from = ends[0];
    for (ssize_t k; (k = read(from, text + n, cap - 1 - n)) > 0;)
        n += (size_t)k; // reading the end of a terminal fails with EIO
    text[n] = 0;
    close(from);
    TAP_REQUIRE(waitpid(pid, NULL, 0) == pid);
}

static void bar(void) {
    idist_progress p;
    memset(&p, 0, sizeof p);
    p.title = "Epoch [3/24]";
    p.total = 391;
    idist_progress_update(&p, 0, "loss=2.3");
    idist_progress_update(&p, 1, "too soon");
    p.shown_ns -= 200000000;
    idist_progress_update(&p, 196, "loss=1.2");
    idist_train_log("t", "between");
    p.shown_ns -= 200000000;
    idist_progress_update(&p, 200, "loss=1.15");
    setenv("IDIST_LOG", "info", 1);
    if (idist_initialize(NULL) != IDIST_OK || idist_finalize() != IDIST_OK)
        _exit(1); // logs that it joined a world
    p.shown_ns -= 200000000;
    idist_progress_update(&p, 391, "loss=1.1");
    idist_progress_update(&p, 391, NULL); // starts the bar again
    p.total = 0;
    idist_progress_update(&p, 5, NULL);
    idist_progress_update(NULL, 5, NULL);
}

static void draw_within(idist_log_level level, const char *line, void *user) {
    idist_progress *p = (idist_progress *)user;
    (void)level;
    fprintf(stderr, "<%s>\n", strrchr(line, ' ') + 1);
    idist_progress_update(p, 3, "within");
}

// Draws the bar from a logger. Regression test: the bar used to wait for the lock that the logger's
// caller holds.
static void bar_of_a_logger(void) {
    idist_progress p;
    idist_desc desc;
    memset(&p, 0, sizeof p);
    memset(&desc, 0, sizeof desc);
    p.total = 9;
    desc.logger.log_fn = draw_within;
    desc.logger.user = &p;
    alarm(10); // ends the process if it hangs
    if (idist_initialize(&desc) != IDIST_OK) _exit(1);
    idist_train_log("t", "a line");
    idist_progress_update(&p, 4, "without");
    if (idist_finalize() != IDIST_OK) _exit(1);
}

static void three(void) {
    idist_desc desc;
    memset(&desc, 0, sizeof desc);
    if (idist_spawn(worker, NULL, 3, &desc) != IDIST_OK) _exit(1);
}

// Draws long lines in which some characters take several bytes.
static void wide_bar(void) {
    idist_progress p;
    memset(&p, 0, sizeof p);
    p.title = "\xc3\x89poque na\xc3\xafve [3/24]";
    p.total = 391;
    for (uint64_t done = 0; done <= 391; done += 17) {
        p.shown_ns = p.started_ns ? 1 : 0;
        idist_progress_update(&p, done, "loss=1.23456789, accuracy=0.5");
    }
}

// Draws one line of `length` columns.
static void bar_of(size_t length) {
    char text[200];
    idist_progress p;
    memset(&p, 0, sizeof p);
    p.title = "T";
    p.total = 9;
    memset(text, 'x', sizeof text);
    text[length - strlen("T: [1/9]  11%|#         |  [00:00<00:00]")] = 0;
    idist_progress_update(&p, 1, text);
}

static void bar_of_79(void) { bar_of(79); }
static void bar_of_80(void) { bar_of(80); }
static void bar_of_81(void) { bar_of(81); }

// Draws bars with titles and texts of all kinds. Every bar must take exactly one line.
static void odd_bars(void) {
    static char large[3000];
    static const char *const texts[] = {
        "",
        "a\nb\rc\td\x01",
        "\xe6\x97\xa5\xe6\x9c\xac\xe8\xaa\x9e\xe6\x97\xa5\xe6\x9c\xac\xe8\xaa\x9e", // wide
        "\xf0\x9f\x9a\x80 \xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x9a\x80",            // emoji
        "e\xcc\x81\xcc\x81 \xe2\x80\x8b\xe0\xb8\x81\xe0\xb8\xb3\xe0\xb8\xb1",       // combining
        "\xff\xe6\x97 \x80",                                                        // not UTF-8
        "\033[31mred\033[0m and \033[2J\033]0;title\007",
        "\033[1mbold to the end",
        large,
    };
    memset(large, 'y', sizeof large - 1);
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        for (size_t k = 0; k < sizeof texts / sizeof *texts; k++) {
            idist_progress p;
            memset(&p, 0, sizeof p);
            p.title = texts[i];
            p.total = k % 2 ? UINT64_MAX : 7;
            idist_progress_update(&p, p.total, texts[k]);
        }
    }
}

// Returns how many times a terminal of `width` columns would break a line of the text. Needs a
// UTF-8 locale. Color sequences take no column.
static int broken_lines(const char *text, int width) {
    int at = 0, n = 0;
    while (*text) {
        wchar_t c;
        int nbytes = mbtowc(&c, text, MB_CUR_MAX);
        TAP_REQUIRE(nbytes > 0);
        if (*text == '\r' || *text == '\n') at = 0;
        else if (*text == '\033') nbytes = (int)strcspn(text, "Km") + 1;
        else {
            TAP_REQUIRE(wcwidth(c) >= 0);
            at += wcwidth(c);
            if (at > width) n++, at = wcwidth(c);
        }
        text += nbytes;
    }
    return n;
}

static void odd_texts(char *text, size_t cap) {
    static const int widths[] = {0, 1, 2, 3, 10, 40, 80, 1000, 65535};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        int n_lines = 0;
        columns = widths[i];
        capture(odd_bars, true, text, cap);
        TAP_REQUIRE(setlocale(LC_CTYPE, "C.UTF-8") != NULL);
        tap_is(broken_lines(text, columns ? columns : 80), 0, "no line breaks on %d columns",
               columns);
        setlocale(LC_CTYPE, "C");
        for (const char *at = text; (at = strchr(at, '\n')) != NULL; at++) n_lines++;
        tap_is(n_lines, 81, "and there is one per bar");
        tap_ok(!strstr(text, "\033[2J") && !strchr(text, 7), "the terminal is not cleared");
        if (columns < 80) continue;
        tap_like(text, "\033[31mred\033[0m and : [", "a color is passed on");
        tap_like(text, "\033[1mbold to the end", "or the weight of letters");
        tap_like(text, "\033[m\r\n", "and ends with the line");
        tap_like(text, "\r\na b c d : [7/7] 100%|##########|  [", "a title with line feeds");
        tap_like(text, "\r\n[7/7] 100%|", "or none");
    }
    columns = 0;
}

static void on_narrow_terminals(char *text, size_t cap) {
    static const int widths[] = {200, 81, 80, 79, 60, 40, 20, 2, 1};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        columns = widths[i];
        capture(wide_bar, true, text, cap);
        TAP_REQUIRE(setlocale(LC_CTYPE, "C.UTF-8") != NULL);
        tap_is(broken_lines(text, columns), 0, "no line breaks on %d columns", columns);
        setlocale(LC_CTYPE, "C");
        if (columns == 200)
            tap_like(text, "|##########| loss=1.23456789, accuracy=0.5 [",
                     "all of it on 200 columns");
        if (columns == 80)
            tap_like(text, "100% loss=1.23456789, accuracy=0.5 [00:0", "without the picture on 80");
        if (columns == 40) tap_like(text, "[391/391] 100% los\r\n", "without its end on 40");
    }
    columns = 80;
    capture(bar_of_79, true, text, cap);
    tap_like(text, "11%|#         | xx", "79 columns fit on 80");
    capture(bar_of_80, true, text, cap);
    tap_ok(!strchr(text, '|') && strstr(text, "xx [00:00<00:00]"),
           "80 do not: some terminals go on in the next line");
    capture(bar_of_81, true, text, cap);
    tap_ok(!strchr(text, '|') && strstr(text, "xx [00:00<00:00]"), "81 do not");
    columns = 0;
}

int main(void) {
    static char text[200000];
    tap_deadline(30);
    to_a_logger();
    capture(say_all, false, text, sizeof text);
    tap_ok(strstr(text, "CIFAR10-Training INFO: Train on CIFAR10\n") != NULL,
           "without a world to stderr");
    capture(three, false, text, sizeof text);
    const char *first = strstr(text, "INFO: rank 0\n");
    tap_ok(first && !strstr(first + 1, "INFO:") && !strstr(text, "rank 1"),
           "rank 0 of 3 speaks, nobody else: %s", text);
    capture(bar, false, text, sizeof text);
    tap_ok(!strchr(text, '#') && strstr(text, "between\n"), "no bar in a pipe");
    capture(bar, true, text, sizeof text);
    tap_ok(strstr(text, "Epoch [3/24]: [0/391]   0%|          | loss=2.3 [00:00<?]"),
           "the bar begins");
    tap_ok(!strstr(text, "too soon"), "it is not drawn too often");
    tap_ok(strstr(text, "[196/391]  50%|#####     | loss=1.2 [00:00<00:00]\r\033[K2"),
           "a line takes its place");
    tap_ok(strstr(text, "loss=1.15 [00:00<00:00]\r\033[Kidist "),
           "and a line of the library's own, too");
    tap_ok(strstr(text, "[391/391] 100%|##########| loss=1.1 [00:00<00:00]\r\n"),
           "it ends its line");
    tap_ok(strstr(text, "[0/0] 100%|##########|  ["), "of nothing all is done");
    capture(bar_of_a_logger, true, text, sizeof text);
    tap_ok(strstr(text, "<line>") && !strstr(text, "within") && strstr(text, "[4/9]"),
           "from inside a logger it is not drawn");
    if (setlocale(LC_CTYPE, "C.UTF-8")) {
        setlocale(LC_CTYPE, "C");
        on_narrow_terminals(text, sizeof text);
        odd_texts(text, sizeof text);
    } else {
        tap_skip("columns", "there is no locale C.UTF-8");
    }
    return tap_done();
}
