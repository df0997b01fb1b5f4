// os/linux/file.h: files, locks on single bytes of them, folders
#pragma once

#include "os/file.h"
#include "os/unwind.h"

static idist__os_file idist__os_file_open(const char *path, idist__os_file_mode mode) {
    static const int flags[] = {O_RDONLY, O_RDWR | O_NOFOLLOW, O_RDWR | O_NOFOLLOW | O_CREAT,
                                O_RDWR | O_CREAT};
    return IDIST__OS_CALL(
        open(path, flags[mode] | O_CLOEXEC, mode == IDIST__OS_FILE_OUTPUT ? 0666 : 0600));
}

static bool idist__os_file_close(idist__os_file *file) {
    bool good = *file < 0 || IDIST__OS_CALL(close(*file)) == 0;

    *file = IDIST__OS_NO_FILE;
    return good;
}

static ptrdiff_t idist__os_file_read(idist__os_file file, void *buf, size_t capacity) {
    ssize_t n;
    do n = IDIST__OS_CALL(read(file, buf, capacity));
    while (n < 0 && errno == EINTR);
    return n;
}

static const size_t IDIST__OS_FILE_AT_ONCE = (size_t)1 << 30; // bytes per system call

static bool idist__os_file_read_at(idist__os_file file, void *buf, size_t nbytes, uint64_t at) {
    char *to = (char *)buf;

    while (nbytes) {
        size_t wanted = nbytes < IDIST__OS_FILE_AT_ONCE ? nbytes : IDIST__OS_FILE_AT_ONCE;
        ssize_t n = IDIST__OS_CALL(pread(file, to, wanted, (off_t)at));

        if (n < 0 && errno == EINTR) continue;
        if (n == 0) errno = 0;
        if (n <= 0) return false;

        to += n;
        at += (uint64_t)n;
        nbytes -= (size_t)n;
    }

    return true;
}

static bool idist__os_file_write_at(idist__os_file file, const void *buf, size_t nbytes,
                                    uint64_t at) {
    const char *from = (const char *)buf;

    while (nbytes) {
        size_t wanted = nbytes < IDIST__OS_FILE_AT_ONCE ? nbytes : IDIST__OS_FILE_AT_ONCE;
        ssize_t n = IDIST__OS_CALL(pwrite(file, from, wanted, (off_t)at));

        if (n < 0 && errno == EINTR) continue;
        if (n == 0) errno = ENOSPC;
        if (n <= 0) return false;

        from += n;
        at += (uint64_t)n;
        nbytes -= (size_t)n;
    }

    return true;
}

IDIST__UNUSED static bool idist__os_file_sync(idist__os_file file) {
    int rc;

    do rc = IDIST__OS_CALL(fsync(file));
    while (rc != 0 && errno == EINTR);

    return rc == 0;
}

IDIST__UNUSED static bool idist__os_file_refuses_sync(int error) {
    return error == EINVAL || error == ENOTSUP || error == EOPNOTSUPP || error == ENOSYS ||
           error == EBADF || error == EISDIR || error == EPERM || error == EACCES || error == EROFS;
}

static bool idist__os_file_resize(idist__os_file file, uint64_t nbytes) {
    return IDIST__OS_CALL(ftruncate(file, (off_t)nbytes)) == 0;
}

static int64_t idist__os_file_size(idist__os_file file) {
    struct stat about;

    if (fstat(file, &about) != 0) return -1;
    errno = 0;
    return S_ISREG(about.st_mode) ? (int64_t)about.st_size : -1;
}

IDIST__UNUSED static void idist__os_file_version_of(idist__os_file file,
                                                    idist__os_file_version *version) {
    struct stat about;

    memset(version, 0, sizeof *version);
    if (fstat(file, &about) != 0) return;
    version->device = (uint64_t)about.st_dev;
    version->number = (uint64_t)about.st_ino;
    version->nbytes = (uint64_t)about.st_size;
    version->modified_ns = (uint64_t)about.st_mtim.tv_sec * 1000000000;
    version->modified_ns += (uint64_t)about.st_mtim.tv_nsec;
    version->changed_ns = (uint64_t)about.st_ctim.tv_sec * 1000000000;
    version->changed_ns += (uint64_t)about.st_ctim.tv_nsec;
}

IDIST__UNUSED static bool idist__os_file_no_space(int error) {
    return error == ENOSPC || error == EDQUOT;
}

static bool idist__os_file_is_private(idist__os_file file) {
    struct stat about;
    return fstat(file, &about) == 0 && !(about.st_mode & 077) && about.st_uid == geteuid();
}

static bool idist__os_file_is_at(idist__os_file file, const char *path) {
    struct stat open_file, at_path;
    return fstat(file, &open_file) == 0 && stat(path, &at_path) == 0 &&
           open_file.st_dev == at_path.st_dev && open_file.st_ino == at_path.st_ino;
}

static void idist__os_file_remove(const char *path) { unlink(path); }

static bool idist__os_file_has_folder(const char *path) {
    const char *slash = strrchr(path, '/');
    char folder[4096];

    if (!slash || slash == path) return true;
    if ((size_t)(slash - path) >= sizeof folder) return false;
    memcpy(folder, path, (size_t)(slash - path));
    folder[slash - path] = 0;

    return access(folder, F_OK) == 0;
}

// The fcntl commands for locks. In strict modes the headers hide their names.
enum { IDIST__OS_FILE_GETLK = 36 /* F_OFD_GETLK */, IDIST__OS_FILE_SETLK = 37 /* F_OFD_SETLK */ };

// Sets or queries a lock on one byte. Returns 0, or -1 with errno.
static int idist__os_file_fcntl(idist__os_file file, int command, uint64_t byte,
                                struct flock *lock_at) {
    lock_at->l_whence = SEEK_SET;
    lock_at->l_start = (off_t)byte;
    lock_at->l_len = 1;
    lock_at->l_pid = 0;
    return IDIST__OS_CALL(fcntl(file, command, lock_at));
}

static bool idist__os_file_try_lock(idist__os_file file, uint64_t byte) {
    struct flock lock_at;
    int rc;

    memset(&lock_at, 0, sizeof lock_at);
    lock_at.l_type = F_WRLCK;
    do rc = idist__os_file_fcntl(file, IDIST__OS_FILE_SETLK, byte, &lock_at);
    while (rc != 0 && errno == EINTR);
    if (rc != 0 && errno == EACCES) errno = EAGAIN;
    return rc == 0;
}

static void idist__os_file_unlock(idist__os_file file, uint64_t byte) {
    struct flock lock_at;

    memset(&lock_at, 0, sizeof lock_at);
    lock_at.l_type = F_UNLCK;
    while (idist__os_file_fcntl(file, IDIST__OS_FILE_SETLK, byte, &lock_at) != 0 && errno == EINTR)
        continue;
}

static idist__os_file_lock idist__os_file_locked(idist__os_file file, uint64_t byte) {
    struct flock lock_at;

    memset(&lock_at, 0, sizeof lock_at);
    lock_at.l_type = F_WRLCK;
    if (idist__os_file_fcntl(file, IDIST__OS_FILE_GETLK, byte, &lock_at) != 0)
        return IDIST__OS_FILE_UNKNOWN;
    return lock_at.l_type == F_UNLCK ? IDIST__OS_FILE_FREE : IDIST__OS_FILE_LOCKED;
}

IDIST__UNUSED static int idist__os_folder_make(const char *path) {
    return mkdir(path, 0777) != 0 && errno != EEXIST ? errno : 0;
}

IDIST__UNUSED static int idist__os_folder_open(const char *path, idist__os_folder *folder) {
    *folder = IDIST__OS_CALL(open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    return *folder < 0 ? errno : 0;
}

IDIST__UNUSED static void idist__os_folder_close(idist__os_folder *folder) {
    if (*folder >= 0) IDIST__OS_CALL(close(*folder));
    *folder = IDIST__OS_NO_FOLDER;
}

IDIST__UNUSED static int idist__os_folder_sync(idist__os_folder folder) {
    return idist__os_file_sync(folder) ? 0 : errno;
}

IDIST__UNUSED static int idist__os_folder_read_file(idist__os_folder folder, const char *name,
                                                    idist__os_file *file) {
    *file = IDIST__OS_CALL(openat(folder, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    return *file < 0 ? errno : 0;
}

IDIST__UNUSED static int idist__os_folder_new_file(idist__os_folder folder, const char *name,
                                                   idist__os_file *file) {
    *file = IDIST__OS_CALL(openat(folder, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    return *file < 0 ? errno : 0;
}

IDIST__UNUSED static int idist__os_folder_rename(idist__os_folder folder, const char *from,
                                                 const char *to) {
    return renameat(folder, from, folder, to) != 0 ? errno : 0;
}

IDIST__UNUSED static int idist__os_folder_remove(idist__os_folder folder, const char *name) {
    return unlinkat(folder, name, 0) != 0 ? errno : 0;
}

IDIST__UNUSED static int idist__os_folder_begin(idist__os_folder_walk *walk,
                                                idist__os_folder folder) {
    // The walk has its own handle, because duplicates would share the position in the folder.
    idist__os_folder own = IDIST__OS_CALL(openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    int error;

    walk->dir = own < 0 ? NULL : IDIST__OS_CALL(fdopendir(own));
    if (walk->dir) return 0;
    error = errno;
    idist__os_folder_close(&own);

    return error;
}

IDIST__UNUSED static const char *idist__os_folder_next(const idist__os_folder_walk *walk,
                                                       int *error) {
    struct dirent *entry;

    // readdir returns NULL both at the end and on failure, for example if an entry's inode number
    // does not fit into 32 bits.
    errno = 0;
    entry = IDIST__OS_CALL(readdir(walk->dir));
    *error = entry ? 0 : errno;

    return entry ? entry->d_name : NULL;
}

IDIST__UNUSED static void idist__os_folder_end(const idist__os_folder_walk *walk) {
    IDIST__OS_CALL(closedir(walk->dir));
}
