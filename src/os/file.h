// os/file.h: files, locks on single bytes of them, folders
#pragma once

#include "os/system.h"

//------------------------------------------------------------------------------
// files, and locks on single bytes of them
//
// Transfers block as long as the file system takes. Lock calls never wait for a lock. Failures
// leave the reason in errno. Open files are closed on exec. They belong to the caller, who closes
// them with idist__os_file_close.
//
// A lock belongs to the open file, not to the process, so the ranks of one process can exclude each
// other. The lock ends when the last descriptor of the open file is closed. The kernel closes the
// descriptors of a process that dies. The locked byte need not exist. Windows has such locks
// (LockFileEx). On macOS, a lock of flock also belongs to the open file, but covers the whole file.
//------------------------------------------------------------------------------

typedef enum idist__os_file_mode {
    IDIST__OS_FILE_READ,   // an existing file
    IDIST__OS_FILE_UPDATE, // an existing file, to read and write; no symbolic link
    IDIST__OS_FILE_CREATE, // like UPDATE, but creates a missing file, for this user only
    IDIST__OS_FILE_OUTPUT  // to read and write, also through a link; created with mode 0666
} idist__os_file_mode;

typedef enum idist__os_file_lock {
    IDIST__OS_FILE_UNKNOWN, // the file system cannot tell
    IDIST__OS_FILE_FREE,
    IDIST__OS_FILE_LOCKED // another open file has the lock
} idist__os_file_lock;

// Opens a file. Returns IDIST__OS_NO_FILE on failure. In mode READ, blocks on a named pipe until
// the pipe has a writer.
static idist__os_file idist__os_file_open(const char *path, idist__os_file_mode mode);

// Closes a file, if it is open, and sets it to IDIST__OS_NO_FILE. Returns false if an earlier write
// failed.
static bool idist__os_file_close(idist__os_file *file);

// Reads from the start of a file, or from where the last call ended. Returns the number of bytes, 0
// at the end of the file, or -1.
static ptrdiff_t idist__os_file_read(idist__os_file file, void *buf, size_t capacity);

// Reads exactly nbytes at a position. Returns false on failure; errno is 0 if the file ends too
// early.
static bool idist__os_file_read_at(idist__os_file file, void *buf, size_t nbytes, uint64_t at);

// Writes nbytes at a position. Returns false on failure; some of the bytes may then be written.
static bool idist__os_file_write_at(idist__os_file file, const void *buf, size_t nbytes,
                                    uint64_t at);

// Waits until the bytes of a file are on the disk. Returns false with errno on failure.
IDIST__UNUSED static bool idist__os_file_sync(idist__os_file file);

// Returns true if an error of a sync means that the file system or a sandbox cannot sync this kind
// of file or folder. Other errors mean that data may be lost. The fsync manual names EINVAL and
// EROFS for this case. Sandboxes, network file systems and user-space file systems return other
// errors, which this function also knows.
IDIST__UNUSED static bool idist__os_file_refuses_sync(int error);

// Truncates a file, or extends it with zeros.
static bool idist__os_file_resize(idist__os_file file, uint64_t nbytes);

// Returns the size of a regular file, or -1 on failure. For a folder, a pipe or a device, returns
// -1 with errno 0.
static int64_t idist__os_file_size(idist__os_file file);

// A version of a file: numbers that differ between two files and change with a file's contents.
typedef struct idist__os_file_version {
    uint64_t device, number, nbytes, modified_ns, changed_ns;
} idist__os_file_version;

// Gets the version of an open file, or all zeros if the version is unknown.
IDIST__UNUSED static void idist__os_file_version_of(idist__os_file file,
                                                    idist__os_file_version *version);

// Returns true if an error of a write means that the disk is full or that this user's quota is
// exhausted.
IDIST__UNUSED static bool idist__os_file_no_space(int error);

// Returns true if the file belongs to this user and nobody else may read or write it.
static bool idist__os_file_is_private(idist__os_file file);

// Returns true if the path still leads to the open file.
static bool idist__os_file_is_at(idist__os_file file, const char *path);

// Removes the name of a file. Processes that have the file open keep it. Fails silently.
static void idist__os_file_remove(const char *path);

// Returns true if the folder that would contain a file at this path exists.
static bool idist__os_file_has_folder(const char *path);

// Tries to lock one byte against all other open files. Returns false on failure, with errno EAGAIN
// if another open file has the lock.
static bool idist__os_file_try_lock(idist__os_file file, uint64_t byte);

// Unlocks one byte.
static void idist__os_file_unlock(idist__os_file file, uint64_t byte);

// Reports whether another open file has locked a byte.
static idist__os_file_lock idist__os_file_locked(idist__os_file file, uint64_t byte);

//------------------------------------------------------------------------------
// the names in a folder
//
// Calls return 0 or an errno unless their comments say otherwise, and may block as long as the disk
// takes. Names are looked up in the open folder, even after the folder has been moved. The caller
// closes the folders and files that it opens.
//------------------------------------------------------------------------------

// Creates a folder. An existing folder is no error.
IDIST__UNUSED static int idist__os_folder_make(const char *path);

// Opens an existing folder. Sets *folder to IDIST__OS_NO_FOLDER on failure.
IDIST__UNUSED static int idist__os_folder_open(const char *path, idist__os_folder *folder);

// Closes a folder, if it is open, and sets it to IDIST__OS_NO_FOLDER.
IDIST__UNUSED static void idist__os_folder_close(idist__os_folder *folder);

// Waits until the names in a folder are on the disk.
IDIST__UNUSED static int idist__os_folder_sync(idist__os_folder folder);

// Opens a file for reading. If the file is a pipe, does not wait for a writer.
IDIST__UNUSED static int idist__os_folder_read_file(idist__os_folder folder, const char *name,
                                                    idist__os_file *file);

// Creates a file for writing. EEXIST means that the name is taken.
IDIST__UNUSED static int idist__os_folder_new_file(idist__os_folder folder, const char *name,
                                                   idist__os_file *file);

// Renames a file within the folder atomically. Replaces a file that has the new name.
IDIST__UNUSED static int idist__os_folder_rename(idist__os_folder folder, const char *from,
                                                 const char *to);

// Removes a file. ENOENT means that no file has this name.
IDIST__UNUSED static int idist__os_folder_remove(idist__os_folder folder, const char *name);

// Begins a walk at the first name. The walk may miss or see names that are added or removed
// meanwhile.
IDIST__UNUSED static int idist__os_folder_begin(idist__os_folder_walk *walk,
                                                idist__os_folder folder);

// Returns the next name, which is valid until the next call. Returns NULL at the end, with *error
// set to 0, and on failure, with *error set to an errno.
IDIST__UNUSED static const char *idist__os_folder_next(const idist__os_folder_walk *walk,
                                                       int *error);

// Ends a walk and frees its resources.
IDIST__UNUSED static void idist__os_folder_end(const idist__os_folder_walk *walk);
