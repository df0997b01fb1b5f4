// error_file.h: the files in which a rank reports why it fails
//
//     R.error.json   an exception: torch's @record writes the file TORCHELASTIC_ERROR_FILE
//     R.lost         empty: idist creates the file IDIST_LOST_FILE when it has told the rank that
//                    another rank was lost
//
// Both files are in --log-dir, or in a temporary folder if --log-dir is not given. If the temporary
// folder cannot be created, the ranks have no such files.
#pragma once

#include "base.h"
#include "error_json.h"
#include "folder.h"
#include "options.h"
#include "place.h"

#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>

enum { ERROR_FILE_NBYTES = 60000 }; // a larger file is ignored

static struct {
    char folder[PATH_MAX]; // "" if there is none
} error_files;

// Returns true if there is a folder for the files.
static bool error_file_can_be(void) { return error_files.folder[0] != 0; }

// Returns the path of the file for a rank's exception. The next call overwrites the text.
static const char *error_file_path(int rank) {
    static char path[PATH_MAX + 32];

    snprintf(path, sizeof path, "%s/%d.error.json", error_files.folder, rank);
    return path;
}

// Returns the path of the file that shows that a rank has lost another rank. The next call
// overwrites the text.
static const char *error_file_lost_path(int rank) {
    static char path[PATH_MAX + 32];

    snprintf(path, sizeof path, "%s/%d.lost", error_files.folder, rank);
    return path;
}

// Removes the files of a rank.
static void error_file_remove(int rank) {
    if (!error_file_can_be()) return;
    unlink(error_file_path(rank));
    unlink(error_file_lost_path(rank));
}

// Removes all files and the temporary folder when idistrun ends.
static void error_file_remove_all(void) {
    for (int i = 0; i < place.rank_count; i++) error_file_remove(place.first_rank + i);
    rmdir(error_files.folder);
}

// Chooses the folder. Ranks may change their working folder, so the path is absolute.
static void error_file_choose_folder(void) {
    if (options.log_dir) {
        if (!realpath(options.log_dir, error_files.folder)) base_die(options.log_dir);
        return;
    }

    folder_make(error_files.folder);
    if (error_file_can_be()) atexit(error_file_remove_all);
}

// Returns true if the rank lost another rank before it ended. Removes the file that says so.
static bool error_file_take_lost(int rank) {
    return error_file_can_be() && unlink(error_file_lost_path(rank)) == 0;
}

// Reads at most `capacity` bytes of a file. Returns the number of bytes, 0 if there is no file, or
// -1 if reading fails.
static ssize_t error_file_read_bytes(const char *path, char *text, size_t capacity) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t nbytes = fd < 0 ? 0 : read(fd, text, capacity);

    if (fd >= 0) close(fd);
    return nbytes;
}

// Returns the JSON of a rank's exception in one line. Returns NULL if there is none, or if the rank
// was killed before it had written all of the JSON. The next call overwrites the text.
static const char *error_file_read(int rank) {
    static char text[ERROR_FILE_NBYTES];
    char message[8];
    ssize_t nbytes;

    if (!error_file_can_be()) return NULL;
    nbytes = error_file_read_bytes(error_file_path(rank), text, sizeof text);

    // In JSON, tabs and newlines occur only between tokens.
    for (ssize_t i = 0; i < nbytes; i++)
        if (strchr("\t\r\n", text[i])) text[i] = ' ';
    while (nbytes > 0 && text[nbytes - 1] == ' ') nbytes--;

    if (nbytes < 1 || nbytes == (ssize_t)sizeof text || text[nbytes - 1] != '}') return NULL;
    text[nbytes] = 0;

    return error_json_read(text, message, sizeof message) ? text : NULL;
}
