// doctor_line.h: one line of idistrun --doctor
//
//     descriptors     64 [note: enough for 28 ranks; ulimit -n 4096]
//     name            what was found [verdict: what to do]
//
// The verdict "wrong" marks a problem that keeps idist from working in the environment of this
// process. The verdict "note" marks a smaller problem. A line has at most 100 columns.
#pragma once

#include "../../idist.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

enum { DOCTOR_LINE_COLUMNS = 100, DOCTOR_LINE_NAME_COLUMNS = 16 };

enum doctor_verdict { DOCTOR_FINE, DOCTOR_NOTE, DOCTOR_WRONG };

static struct { int wrong_count; } doctor_lines;

// Writes the text in brackets, or "" if there is nothing to note. The advice may be NULL.
static void doctor_line_write_end(char *end, size_t capacity, enum doctor_verdict verdict,
                                  const char *advice) {
    const char *word = verdict == DOCTOR_WRONG ? "wrong" : "note";

    end[0] = 0;
    if (verdict == DOCTOR_FINE) return;
    snprintf(end, capacity, " [%s%s%s]", word, advice ? ": " : "", advice ? advice : "");
}

// Returns the length of the first of two lines. Breaks the text at a space near the end, if there
// is one.
static int doctor_line_break(const char *text, int room) {
    int nbytes = room;

    while (nbytes > room / 2 && text[nbytes] != ' ') nbytes--;
    return nbytes;
}

// Prints a line. Truncates a value that is too long, so that the advice fits. If the advice is
// NULL, the value itself says what to do, and may take a second line.
static void doctor_line_print(const char *name, enum doctor_verdict verdict, const char *advice,
                              const char *format, ...) __attribute__((format(printf, 4, 5)));
static void doctor_line_print(const char *name, enum doctor_verdict verdict, const char *advice,
                              const char *format, ...) {
    char value[1000], end[100];
    const char *at = value;
    int room;
    va_list args;

    va_start(args, format);
    vsnprintf(value, sizeof value, format, args);
    va_end(args);
    doctor_line_write_end(end, sizeof end, verdict, advice);
    room = DOCTOR_LINE_COLUMNS - DOCTOR_LINE_NAME_COLUMNS - (int)strlen(end);
    if (verdict == DOCTOR_WRONG) doctor_lines.wrong_count++;

    if (verdict == DOCTOR_WRONG && !advice && (int)strlen(value) > room) {
        int nbytes = doctor_line_break(value, room);

        printf("%-*s%.*s\n", DOCTOR_LINE_NAME_COLUMNS, name, nbytes, value);
        at = value + nbytes + (value[nbytes] == ' ');
        name = "";
    }

    if ((int)strlen(at) > room)
        printf("%-*s%.*s...%s\n", DOCTOR_LINE_NAME_COLUMNS, name, room - 3, at, end);
    else printf("%-*s%s%s\n", DOCTOR_LINE_NAME_COLUMNS, name, at, end);
}

// Prints the last line.
static void doctor_line_print_verdict(void) {
    int count = doctor_lines.wrong_count;

    if (count)
        printf("%-*s%d of the lines above [wrong]\n", DOCTOR_LINE_NAME_COLUMNS, "verdict", count);
    else printf("%-*snothing is wrong\n", DOCTOR_LINE_NAME_COLUMNS, "verdict");
}

// Copies the text of idist's last failure, without the name of the function that failed.
static void doctor_line_copy_failure(char *text, size_t capacity) {
    const char *from = idist_last_error();

    if (strncmp(from, "initialize: ", 12) == 0) from += 12;
    snprintf(text, capacity, "%s", from);
}
