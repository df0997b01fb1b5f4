// timeline.h: --trace, a timeline of all ranks
//
// idistrun sets IDIST_TRACE, so each rank writes its events to its own file, one event per line.
// When all ranks have ended, for whatever reason, idistrun merges the files:
//
//     $TMPDIR/idistrun-HOST-XXXXXX/trace.0.json   rank 0
//                                  trace.1.json   rank 1
//                                  nodes          on the head: events from its nodes
//           |
//           v
//     FILE.PID, renamed to FILE when it is complete: {"traceEvents": [...]}
//
// A node sends its events to the head instead. The result contains only the events of the last
// attempt.
#pragma once

#include "base.h"
#include "folder.h"
#include "node.h"
#include "options.h"
#include "place.h"

#include <dirent.h>
#include <limits.h>
#include <stdbool.h>

static struct {
    char folder[PATH_MAX];          // where the ranks write
    char unfinished[PATH_MAX + 32]; // path of the result until it is complete, or ""
    FILE *from_nodes;               // the head's file of events, or NULL
} timeline;

// Returns the path of a file in the folder. The next call overwrites the text.
static const char *timeline_path(const char *name) {
    static char path[PATH_MAX + 300];

    snprintf(path, sizeof path, "%s/%s", timeline.folder, name);
    return path;
}

// Removes all files of the folder.
static void timeline_clear(void) {
    DIR *folder = opendir(timeline.folder);
    struct dirent *entry;

    if (!folder) return;
    while ((entry = readdir(folder)) != NULL)
        if (entry->d_name[0] != '.') unlink(timeline_path(entry->d_name));
    closedir(folder);
}

// Removes all temporary files when idistrun ends.
static void timeline_remove_all(void) {
    timeline_clear();
    rmdir(timeline.folder);
    if (timeline.unfinished[0]) unlink(timeline.unfinished);
}

// Creates the folder. Exits if the result cannot be written, because the user should learn this
// before the job starts, not hours later.
static void timeline_prepare(void) {
    FILE *file;

    folder_make(timeline.folder);
    if (!timeline.folder[0]) base_die("--trace: no temporary folder");
    atexit(timeline_remove_all);
    if (place.role == PLACE_NODE) return;

    snprintf(timeline.unfinished, sizeof timeline.unfinished, "%s.%d", options.trace,
             (int)getpid());
    file = fopen(timeline.unfinished, "wxe");
    if (!file) base_die(options.trace);
    fclose(file);
    unlink(timeline.unfinished); // so that a killed idistrun leaves no such file
}

// Removes the events of an earlier attempt.
static void timeline_begin(void) {
    timeline_clear();
    if (timeline.from_nodes) fclose(timeline.from_nodes);
    timeline.from_nodes = NULL;
    if (place.role == PLACE_HEAD)
        timeline.from_nodes = base_or_die(fopen(timeline_path("nodes"), "we"));
}

// Stores an event from a node.
static void timeline_hear(const char *line) {
    if (timeline.from_nodes) fputs(line, timeline.from_nodes);
}

// Writes an event, as a line for the head or as an element of the list.
static void timeline_write_event(FILE *to, const char *event, bool is_first) {
    if (place.role == PLACE_NODE) fprintf(to, NODE_EVENT "%s\n", event);
    else fprintf(to, "%s%s", is_first ? "\n" : ",\n", event);
}

// Copies the events of a file. Returns the number of events. Skips an incomplete event, which a
// killed rank may leave at the end.
static long timeline_copy_file(const char *path, FILE *to, long count_before) {
    FILE *from = fopen(path, "re");
    char *line = NULL;
    size_t capacity = 0;
    ssize_t nbytes;
    long count = 0;

    if (!from) return 0;

    while ((nbytes = getline(&line, &capacity, from)) > 0) {
        while (nbytes > 0 && strchr(", \n", line[nbytes - 1])) line[--nbytes] = 0;
        if (line[0] != '{' || line[nbytes - 1] != '}') continue;

        timeline_write_event(to, line, count_before + count == 0);
        count++;
    }

    free(line);
    fclose(from);
    return count;
}

// Copies the events of all files in the folder. Returns the number of events.
static long timeline_copy_all(FILE *to) {
    DIR *folder = opendir(timeline.folder);
    struct dirent *entry;
    long count = 0;

    if (!folder) return 0;
    while ((entry = readdir(folder)) != NULL)
        if (entry->d_name[0] != '.')
            count += timeline_copy_file(timeline_path(entry->d_name), to, count);
    closedir(folder);

    return count;
}

// Sends the events of this node to the head.
static void timeline_send(void) {
    FILE *to = fdopen(dup(STDERR_FILENO), "we");

    if (!to) return;
    timeline_copy_all(to);
    fclose(to);
}

// Writes the result, and renames the file when it is complete.
static void timeline_write(void) {
    FILE *to = fopen(timeline.unfinished, "we");
    bool is_written;
    long count = 0;

    if (timeline.from_nodes) fflush(timeline.from_nodes);

    if (to) {
        fputs("{\"traceEvents\": [", to);
        count = timeline_copy_all(to);
        fputs("\n]}\n", to);
    }
    is_written = to && !ferror(to);
    if (to && fclose(to) != 0) is_written = false;

    if (!is_written || rename(timeline.unfinished, options.trace) != 0)
        base_say("%s: %s", options.trace, strerror(errno));
    else timeline.unfinished[0] = 0;

    if (is_written && !count)
        base_say("%s has no events: did the ranks call idist_initialize?", options.trace);
}

// Writes the result, or sends the events to the head, when all ranks have ended.
static void timeline_end(void) {
    if (place.role == PLACE_NODE) timeline_send();
    else timeline_write();
}
