// folder.h: temporary folders, and how folders of killed idistruns are removed
//
//     $TMPDIR/idistrun-HOST-XXXXXX      files of ranks, and of idistrun
//
// An idistrun locks its folder until it ends, for whatever reason. A folder without a lock belongs
// to an idistrun that was killed. The next idistrun of this user on this host removes such a
// folder. A folder that the user created may have such a name too. So a folder is kept if it
// contains other files, or if other users may enter it.
#pragma once

#include "base.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <sys/file.h>
#include <sys/stat.h>

enum { FOLDER_TRIES = 10 };

// Returns true for the name of a file that idistrun or a rank writes: 3.error.json, 3.lost,
// trace.json, trace.3.json, nodes.
static bool folder_knows(const char *name) {
    const char *after_rank = name + strspn(name, "0123456789");

    if (after_rank > name && strcmp(after_rank, ".error.json") == 0) return true;
    if (after_rank > name && strcmp(after_rank, ".lost") == 0) return true;
    if (strncmp(name, "trace.", 6) == 0 && strcmp(strrchr(name, '.'), ".json") == 0) return true;
    return strcmp(name, "nodes") == 0;
}

// Returns true if all files of a folder have names that idistrun knows.
static bool folder_is_ours(DIR *folder) {
    struct dirent *entry;

    while ((entry = readdir(folder)) != NULL) {
        bool is_dots = strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0;

        if (!is_dots && !folder_knows(entry->d_name)) return false;
    }
    return true;
}

// Removes a folder if all its files are idistrun's. `fd` is the open folder. Closing `fd` releases
// the lock.
static void folder_remove(int parent, const char *name, int fd) {
    DIR *folder = base_or_die(fdopendir(fd));
    struct dirent *entry;

    if (folder_is_ours(folder)) {
        rewinddir(folder);
        while ((entry = readdir(folder)) != NULL)
            if (folder_knows(entry->d_name)) unlinkat(fd, entry->d_name, 0);
        unlinkat(parent, name, AT_REMOVEDIR);
    }
    closedir(folder);
}

// Locks a folder that mkdtemp() may have created for this user. Returns false if the folder is
// somebody else's, or if its idistrun is still running.
static bool folder_take_stale(int fd) {
    struct stat status;

    return fstat(fd, &status) == 0 && status.st_uid == geteuid() &&
           (status.st_mode & 07777) == 0700 && flock(fd, LOCK_EX | LOCK_NB) == 0;
}

// Removes the folders that have no lock and whose names begin with the prefix.
static void folder_remove_stale(const char *parent_path, const char *prefix) {
    size_t nbytes = strlen(prefix);
    DIR *parent = opendir(parent_path);
    struct dirent *entry;

    if (!parent) return;

    while ((entry = readdir(parent)) != NULL) {
        const char *name = entry->d_name;
        int fd;

        if (strncmp(name, prefix, nbytes) != 0 || strlen(name) != nbytes + 6) continue;
        fd = openat(dirfd(parent), name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (fd < 0) continue;

        if (folder_take_stale(fd)) folder_remove(dirfd(parent), name, fd);
        else close(fd);
    }
    closedir(parent);
}

// Writes the prefix that the names of all idistrun folders on this host share.
static void folder_write_prefix(char *prefix, size_t capacity) {
    char hostname[65] = "";

    gethostname(hostname, sizeof hostname - 1);
    for (char *c = hostname; *c; c++)
        if (*c == '/') *c = '_';

    snprintf(prefix, capacity, "idistrun-%s-", hostname);
}

// Locks a new folder until this process ends. Returns false if another idistrun removed the folder
// as a stale one before it was locked.
static bool folder_lock(const char *path) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    // Any other error means that the file system does not support locks. In that case the folder is
    // used without a lock.
    bool is_taken = fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;

    if (!is_taken && access(path, F_OK) == 0) return true;
    if (fd >= 0) close(fd);
    return false;
}

// Creates a folder and writes its path, or "" if the folder cannot be created.
static void folder_make(char path[PATH_MAX]) {
    const char *parent = getenv("TMPDIR");
    char prefix[80];

    if (!parent) parent = "/tmp";
    folder_write_prefix(prefix, sizeof prefix);
    folder_remove_stale(parent, prefix);

    for (int tries = 0; tries < FOLDER_TRIES; tries++) {
        snprintf(path, PATH_MAX, "%s/%sXXXXXX", parent, prefix);
        if (!mkdtemp(path)) break;
        if (folder_lock(path)) return;
    }
    path[0] = 0;
}
