// os/file.h: files, locks on single bytes of them, folders
#pragma once

#include "os/system.h"

//------------------------------------------------------------------------------
// files, and locks on single bytes of them
//
// Transfers block as long as the file system takes; locks are only tried. Failures leave the reason
// in errno. Open files are closed on exec and belong to the caller, who closes them with
// idist__os_file_close.
//
// A lock belongs to the open file, not to the process, so the ranks of one process can exclude each
// other; it ends when the last descriptor of that open file is closed, at the latest when the
// process dies. The locked byte need not exist. macOS and Windows have the same in flock and
// LockFileEx.
//------------------------------------------------------------------------------

typedef enum idist__os_file_mode {
    IDIST__OS_FILE_READ,   // an existing file
    IDIST__OS_FILE_UPDATE, // an existing file, to read and write; no symbolic link
    IDIST__OS_FILE_CREATE, // the same; a missing file is made, for this user only
    IDIST__OS_FILE_OUTPUT  // to read and write, perhaps through a link; made as other programs do
} idist__os_file_mode;

typedef enum idist__os_file_lock {
    IDIST__OS_FILE_UNKNOWN, // the file system cannot tell
    IDIST__OS_FILE_FREE,
    IDIST__OS_FILE_LOCKED // by another open file
} idist__os_file_lock;

// IDIST__OS_NO_FILE on failure. Blocks where the path is a pipe, until it has a writer.
static idist__os_file idist__os_file_open(const char *path, idist__os_file_mode mode);

// Closes a file, if it is open, and sets it to IDIST__OS_NO_FILE. False: an earlier write failed.
static bool idist__os_file_close(idist__os_file *file);

// Reads from the start of a file or from where the last call ended. Returns bytes, 0 at the end of
// the file, or -1.
static ptrdiff_t idist__os_file_read(idist__os_file file, void *buf, size_t capacity);

// All bytes or none. False: errno is 0 where the file ends before.
static bool idist__os_file_read_at(idist__os_file file, void *buf, size_t nbytes, uint64_t at);

// After a failure some of the bytes may be written.
static bool idist__os_file_write_at(idist__os_file file, const void *buf, size_t nbytes,
                                    uint64_t at);

// Returns when the bytes of a file are on the disk. False: errno.
IDIST__UNUSED static bool idist__os_file_sync(idist__os_file file);

// Returns true if an error of a sync means that the file system, or a sandbox, does not sync such a
// file or folder. Other errors mean that something may be lost. The manual of fsync names EINVAL
// and EROFS for this; file systems of networks and of user space, and sandboxes, use the others.
IDIST__UNUSED static bool idist__os_file_refuses_sync(int error);

// Cuts a file off, or prolongs it with zeros.
static bool idist__os_file_resize(idist__os_file file, uint64_t nbytes);

// The size of a regular file; -1 for a folder, a pipe or a device (errno 0), and on failure.
static int64_t idist__os_file_size(idist__os_file file);

// What tells the present contents of a file from those of other files and other times.
typedef struct idist__os_file_version {
    uint64_t device, number, nbytes, modified_ns, changed_ns;
} idist__os_file_version;

// Gets the version of an open file. All zero: it is not known.
IDIST__UNUSED static void idist__os_file_version_of(idist__os_file file,
                                                    idist__os_file_version *version);

// Whether an error of a write means that there is no space left, for anybody or for this user.
IDIST__UNUSED static bool idist__os_file_no_space(int error);

// Whether the file is ours and nobody else may read or write it.
static bool idist__os_file_is_private(idist__os_file file);

// Whether a path still leads to an open file.
static bool idist__os_file_is_at(idist__os_file file, const char *path);

// Removes the name; those who have the file open keep it. Fails silently.
static void idist__os_file_remove(const char *path);

// Whether the folder exists in which a file at this path lies.
static bool idist__os_file_has_folder(const char *path);

// Tries to lock one byte against all other open files. False: errno EAGAIN when another has it.
static bool idist__os_file_try_lock(idist__os_file file, uint64_t byte);

// Gives the byte back.
static void idist__os_file_unlock(idist__os_file file, uint64_t byte);

// Whether another open file has locked a byte.
static idist__os_file_lock idist__os_file_locked(idist__os_file file, uint64_t byte);

//------------------------------------------------------------------------------
// the names in a folder
//
// Calls return 0 or an errno, and may block for as long as the disk takes. A name is looked up in
// the open folder, even if that has been moved. The caller closes what it has opened.
//------------------------------------------------------------------------------

// Creates a folder. It is no error if there is one already.
IDIST__UNUSED static int idist__os_folder_make(const char *path);

// Opens an existing folder. *folder is IDIST__OS_NO_FOLDER on failure.
IDIST__UNUSED static int idist__os_folder_open(const char *path, idist__os_folder *folder);

// Closes a folder, if it is open, and sets it to IDIST__OS_NO_FOLDER.
IDIST__UNUSED static void idist__os_folder_close(idist__os_folder *folder);

// Returns when the names in a folder are on the disk.
IDIST__UNUSED static int idist__os_folder_sync(idist__os_folder folder);

// Opens a file for reading. If it is a pipe, does not wait for its writer.
IDIST__UNUSED static int idist__os_folder_read_file(idist__os_folder folder, const char *name,
                                                    idist__os_file *file);

// Creates a file for writing. EEXIST: the name is taken.
IDIST__UNUSED static int idist__os_folder_new_file(idist__os_folder folder, const char *name,
                                                   idist__os_file *file);

// Renames a file within the folder, atomically. It replaces a file that has the new name.
IDIST__UNUSED static int idist__os_folder_rename(idist__os_folder folder, const char *from,
                                                 const char *to);

// Removes a file. ENOENT: there is none of this name.
IDIST__UNUSED static int idist__os_folder_remove(idist__os_folder folder, const char *name);

// Begins a walk at the first name. Names that come or go meanwhile may be missed or seen.
IDIST__UNUSED static int idist__os_folder_begin(idist__os_folder_walk *walk,
                                                idist__os_folder folder);

// The next name, valid until the next call. NULL: the end, or *error is not 0.
IDIST__UNUSED static const char *idist__os_folder_next(const idist__os_folder_walk *walk,
                                                       int *error);

// Ends a walk and frees what it has used.
IDIST__UNUSED static void idist__os_folder_end(const idist__os_folder_walk *walk);
