// lightgbm_rows.h - this rank's share of the rows, from a CSV file or from a formula
#ifndef LIGHTGBM_ROWS_H
#define LIGHTGBM_ROWS_H

#include "../../lib/numbers.h"
#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LIGHTGBM_COLUMNS = 20 }; // of the formula

// The rows from `first` to first + count - 1 of all rows.
typedef struct lightgbm_rows {
    int total, first, count, columns;
    double *values; // count times columns
    float *labels;  // 0 or 1
} lightgbm_rows;

// Allocates the memory for a share of the rows. Prints an error and returns false if there is no
// row for every rank, or no memory.
static inline bool lightgbm_rows_share(lightgbm_rows *rows, int part, int parts) {
    size_t count;

    if (rows->total < parts) {
        fprintf(stderr, "%d rows are too few for %d ranks\n", rows->total, parts);
        return false;
    }
    rows->first = (int)((int64_t)rows->total * part / parts);
    rows->count = (int)((int64_t)rows->total * (part + 1) / parts) - rows->first;
    count = (size_t)rows->count;
    rows->values = (double *)malloc((count * (size_t)rows->columns + 1) * sizeof(double));
    rows->labels = (float *)malloc((count + 1) * sizeof(float));
    if (rows->values && rows->labels) return true;
    fprintf(stderr, "no memory for %d rows of %d columns\n", rows->count, rows->columns);
    return false;
}

// Computes a share of `total` rows. A row depends only on its index.
static inline bool lightgbm_rows_make(lightgbm_rows *rows, int total, int part, int parts) {
    double *value;

    rows->total = total;
    rows->columns = LIGHTGBM_COLUMNS;
    if (!lightgbm_rows_share(rows, part, parts)) return false;
    value = rows->values;
    for (int i = 0; i < rows->count; i++) {
        uint64_t state = (uint64_t)(rows->first + i) * LIGHTGBM_COLUMNS * 0x9e3779b97f4a7c15u;
        double score = -2.3; // about half of the labels are 1

        for (int k = 0; k < LIGHTGBM_COLUMNS; k++, value++) {
            *value = random_unit(&state);
            score += (k % 3 ? 1 : -1) * *value * *value;
        }
        rows->labels[i] = score > 0;
    }
    return true;
}

// Reads the numbers of a line: the label, then the values, of which `capacity` are stored. Returns
// the number of values, or -1 if the line is not a list of numbers.
static inline int lightgbm_rows_line(const char *line, float *label, double *values, int capacity) {
    int count = -1; // without the label
    char *end;

    for (;; line = end + 1, count++) {
        double value = strtod(line, &end);

        if (end == line || count == INT_MAX - 1) return -1;
        if (count < 0) *label = (float)value;
        else if (count < capacity) values[count] = value;
        if (*end != ',') break;
    }
    return *end == '\n' || *end == '\r' || *end == '\0' ? count + 1 : -1;
}

// Counts the rows and the columns, which all rows must have.
static inline bool lightgbm_rows_count(lightgbm_rows *rows, FILE *file, const char *path) {
    char *line = NULL;
    size_t capacity = 0;
    float label;
    bool good = true;

    while (good && rows->total < INT_MAX - 1 && getline(&line, &capacity, file) >= 0) {
        int columns = lightgbm_rows_line(line, &label, NULL, 0);

        if (rows->total++ == 0) rows->columns = columns;
        good = columns > 0 && columns == rows->columns;
    }
    if (!good)
        fprintf(stderr, "%s:%d: expected a label and values, as many as in the first line\n", path,
                rows->total);
    free(line);
    return good;
}

// Reads the rows of this rank's share, which lightgbm_rows_count has seen.
static inline bool lightgbm_rows_load(lightgbm_rows *rows, FILE *file, const char *path) {
    char *line = NULL;
    size_t capacity = 0;
    int at = -rows->first; // in this share

    while (at < rows->count && getline(&line, &capacity, file) >= 0) {
        double *values = rows->values + (size_t)(at < 0 ? 0 : at) * (size_t)rows->columns;

        if (at >= 0 &&
            lightgbm_rows_line(line, rows->labels + at, values, rows->columns) != rows->columns)
            break;
        at++;
    }
    free(line);
    if (at == rows->count) return true;
    fprintf(stderr, "%s has changed\n", path);
    return false;
}

// Reads a share of the rows of a CSV file without a head. The first column is the label.
static inline bool lightgbm_rows_read(lightgbm_rows *rows, const char *path, int part, int parts) {
    FILE *file = fopen(path, "r");
    bool good;

    if (!file) {
        fprintf(stderr, "%s: %s\n", path, strerror(errno));
        return false;
    }
    good = lightgbm_rows_count(rows, file, path) && lightgbm_rows_share(rows, part, parts);
    rewind(file);
    good = good && lightgbm_rows_load(rows, file, path);
    fclose(file);
    return good;
}

static inline void lightgbm_rows_free(lightgbm_rows *rows) {
    free(rows->values);
    free(rows->labels);
}

#endif // LIGHTGBM_ROWS_H
