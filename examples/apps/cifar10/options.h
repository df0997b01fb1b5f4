// options.h - parses a command line that a table describes: "--name value", "--name=value",
// "--switch"
//
//     static int ranks = 2;
//     static bool verbose;
//     static const option_row ROWS[] = {
//         {"ranks", OPTION_WHOLE, &ranks, 1, 64, "how many to start"},
//         {"verbose", OPTION_SWITCH, &verbose, 0, 0, "say more"},
//     };
//     static const option_table TABLE = {"program", ROWS, 2, NULL};
//
//     int code = options_parse(&TABLE, argc, argv);
//     if (code != 0) return code == OPTIONS_HELP ? 0 : 2;
//
// The variables hold the defaults. A name in the table has '_' between words; the command line may
// use '-' instead. Works in C and C++.
#ifndef OPTIONS_H
#define OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum option_kind {
    OPTION_WHOLE,  // int, from min to max
    OPTION_REAL,   // double, from min to max
    OPTION_TEXT,   // const char *
    OPTION_SWITCH, // bool; given without a value
} option_kind;

typedef struct option_row {
    const char *name;
    option_kind kind;
    void *value;
    double min, max;
    const char *help;
} option_row;

typedef struct option_table {
    const char *program;
    const option_row *rows;
    int count;
    const char *notes; // printed at the end of --help, or NULL
} option_table;

enum { OPTIONS_GOOD = 0, OPTIONS_HELP = 1, OPTIONS_WRONG = 2 };

// Returns the value as text, or "-" for a text that is not set. Both --help and logs use this text.
static inline const char *option_text(const option_row *row, char *text, size_t capacity) {
    const char *s = row->kind == OPTION_TEXT ? *(const char *const *)row->value : NULL;

    if (row->kind == OPTION_SWITCH) s = *(const bool *)row->value ? "yes" : "no";
    if (row->kind == OPTION_WHOLE) snprintf(text, capacity, "%d", *(const int *)row->value);
    else if (row->kind == OPTION_REAL) snprintf(text, capacity, "%g", *(const double *)row->value);
    else snprintf(text, capacity, "%s", s ? s : "-");

    return text;
}

static inline void options_usage(const option_table *table, FILE *out) {
    char text[256];
    int i;

    fprintf(out, "usage: %s [options]; - and _ are the same in their names\n", table->program);
    for (i = 0; i < table->count; i++)
        fprintf(out, "  --%-18s %s [%s]\n", table->rows[i].name, table->rows[i].help,
                option_text(&table->rows[i], text, sizeof text));
    if (table->notes) fprintf(out, "\n%s", table->notes);
}

// Returns how many characters of `s` spell the name, up to the end or a '='. Returns 0 if `s` is
// another name.
static inline size_t options_match(const char *s, const char *name) {
    size_t i = 0;

    while (name[i] && (s[i] == name[i] || (s[i] == '-' && name[i] == '_'))) i++;

    return !name[i] && (!s[i] || s[i] == '=') ? i : 0;
}

// Returns the row that an argument names, or NULL. Sets *value to the text after its '=', or to
// NULL.
static inline const option_row *options_find(const option_table *table, const char *argument,
                                             const char **value) {
    int i;

    for (i = 0; i < table->count && argument[0] == '-' && argument[1] == '-'; i++) {
        size_t n = options_match(argument + 2, table->rows[i].name);

        if (n == 0) continue;
        *value = argument[2 + n] ? argument + 3 + n : NULL;
        return &table->rows[i];
    }

    return NULL;
}

// Sets an option's variable. Prints an error and returns false if `text` is not a valid value.
static inline bool options_set(const option_row *row, const char *text) {
    char *end = NULL;
    double number;

    if (row->kind == OPTION_TEXT) *(const char **)row->value = text;
    if (row->kind == OPTION_SWITCH) *(bool *)row->value = true;
    if (row->kind == OPTION_TEXT || row->kind == OPTION_SWITCH) return true;

    number = strtod(text, &end);
    if (end == text || *end || !(number >= row->min && number <= row->max) ||
        (row->kind == OPTION_WHOLE && number != (double)(int)number)) {
        fprintf(stderr, "--%s %s: expected a %snumber from %.10g to %.10g\n", row->name, text,
                row->kind == OPTION_WHOLE ? "whole " : "", row->min, row->max);
        return false;
    }
    if (row->kind == OPTION_WHOLE) *(int *)row->value = (int)number;
    else *(double *)row->value = number;

    return true;
}

// Goes through the command line once. Sets the variables only if `sets` is true.
static inline int options_walk(const option_table *table, int argc, char **argv, bool sets) {
    int i;

    for (i = 1; i < argc; i++) {
        const char *value = NULL;
        const option_row *row = options_find(table, argv[i], &value);

        if (!row && (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h"))) {
            options_usage(table, stdout);
            return OPTIONS_HELP;
        }
        if (!row) {
            fprintf(stderr, "unknown option %s\n", argv[i]);
            options_usage(table, stderr);
            return OPTIONS_WRONG;
        }
        if (row->kind == OPTION_SWITCH && value) {
            fprintf(stderr, "--%s takes no value\n", row->name);
            return OPTIONS_WRONG;
        }
        if (row->kind != OPTION_SWITCH && !value && (value = argv[++i]) == NULL) {
            fprintf(stderr, "--%s needs a value\n", row->name);
            return OPTIONS_WRONG;
        }
        if (sets && !options_set(row, value)) return OPTIONS_WRONG;
    }

    return OPTIONS_GOOD;
}

// Parses the command line. Returns OPTIONS_GOOD if the command line is right, and OPTIONS_WRONG
// after printing an error on stderr. With --help or -h, prints the usage on stdout and returns
// OPTIONS_HELP. The usage shows the defaults, so it is printed before any variable is set.
static inline int options_parse(const option_table *table, int argc, char **argv) {
    int code = options_walk(table, argc, argv, false);

    return code == OPTIONS_GOOD ? options_walk(table, argc, argv, true) : code;
}

#endif // OPTIONS_H
