// train/checkpoint/flaw.h: the flaws of checkpoint files, and the files verified so far
//
// Functions: idist__flaw_*, idist__seen_*, idist__sync_*.
#pragma once

#include "os/thread.h"
#include "os/file.h"
#include "base/log.h"
#include "train/checkpoint/checkpoint.h"

//------------------------------------------------------------------------------
// the flaws of a checkpoint file
//------------------------------------------------------------------------------

// The flaws. Each row contains a name, the status that idist_checkpoint_load returns, and the
// wording for error texts.
#define IDIST__FLAW_MAP(X)                                                             \
    X(NONE, OK, "is valid")                                                            \
    X(UNREADABLE, ERR_SYSTEM, "cannot be read")                                        \
    X(IRREGULAR, ERR_ARG, "is not a regular file")                                     \
    X(EMPTY, ERR_CORRUPT, "is empty")                                                  \
    X(FOREIGN, ERR_CORRUPT, "is not a checkpoint, or its first bytes are damaged")     \
    X(NEWER, ERR_UNSUPPORTED, "was written by a newer version of idist")               \
    X(BYTE_ORDER, ERR_UNSUPPORTED, "was written by a machine with another byte order") \
    X(HEADER, ERR_CORRUPT, "is damaged: the checksum of its header is wrong")          \
    X(SHORT, ERR_CORRUPT, "is truncated")                                              \
    X(LONG, ERR_CORRUPT, "is damaged: it is longer than its header says")              \
    X(CONTENTS, ERR_CORRUPT, "is damaged: its checksum is wrong")                      \
    X(PADDING, ERR_CORRUPT, "is damaged: its padding is not zero")

typedef enum idist__flaw {
#define IDIST__X(name, status, text) IDIST__FLAW_##name,
    IDIST__FLAW_MAP(IDIST__X)
#undef IDIST__X
} idist__flaw;

static const char *idist__flaw_text(idist__flaw flaw) {
    static const char *const texts[] = {
#define IDIST__X(name, status, text) text,
        IDIST__FLAW_MAP(IDIST__X)
#undef IDIST__X
    };

    return texts[flaw];
}

static idist_status idist__flaw_status(idist__flaw flaw) {
    static const idist_status statuses[] = {
#define IDIST__X(name, status, text) IDIST_##status,
        IDIST__FLAW_MAP(IDIST__X)
#undef IDIST__X
    };

    return statuses[flaw];
}

// Returns the flaw of a header whose magic is right. `nbytes` is the size of the file.
static idist__flaw idist__flaw_of_header(const uint64_t *header, uint64_t nbytes) {
    uint64_t version = header[IDIST__HEADER_VERSION], double_bits = header[IDIST__HEADER_SCORE];
    bool sound = header[IDIST__HEADER_CHECKSUM] == idist__checkpoint_header_checksum(header);
    double score;

    memcpy(&score, &double_bits, sizeof score);
    if (version && !(version << 8)) return IDIST__FLAW_BYTE_ORDER;
    if (!sound || version < IDIST__CHECKPOINT_VERSION) return IDIST__FLAW_HEADER;
    if (version > IDIST__CHECKPOINT_VERSION) return IDIST__FLAW_NEWER;
    if (score != score) return IDIST__FLAW_HEADER;
    if (header[IDIST__HEADER_FILE] > nbytes) return IDIST__FLAW_SHORT;
    if (header[IDIST__HEADER_FILE] < nbytes) return IDIST__FLAW_LONG;

    return IDIST__FLAW_NONE;
}

// Reads and checks the header of a file, which need not be a checkpoint. If the result is
// IDIST__FLAW_UNREADABLE, *error is the errno.
static idist__flaw idist__flaw_read_header(idist__os_file file, uint64_t *header, int *error) {
    int64_t nbytes = idist__os_file_size(file);
    size_t magic_nbytes = sizeof idist__checkpoint_magic, header_nbytes, some;

    header_nbytes = IDIST__HEADER_WORDS * sizeof *header;
    memset(header, 0, header_nbytes);
    *error = nbytes < 0 ? errno : 0;
    if (*error) return IDIST__FLAW_UNREADABLE;
    if (nbytes < 0) return IDIST__FLAW_IRREGULAR;
    if (!nbytes) return IDIST__FLAW_EMPTY;

    some = (uint64_t)nbytes < header_nbytes ? (size_t)nbytes : header_nbytes;
    *error = idist__checkpoint_read(file, 0, header, some);
    if (*error == IDIST__CHECKPOINT_ENDS) *error = EIO; // the file was longer a moment ago
    if (*error) return IDIST__FLAW_UNREADABLE;

    if (memcmp(header, idist__checkpoint_magic, some < magic_nbytes ? some : magic_nbytes) != 0)
        return IDIST__FLAW_FOREIGN;
    if (some < header_nbytes) return IDIST__FLAW_SHORT;

    return idist__flaw_of_header(header, (uint64_t)nbytes);
}

// Reads a whole file whose header is valid. Sets *sum to the last word of the file, which must be
// the checksum over everything before it. If the result is IDIST__FLAW_UNREADABLE, *error is the
// errno.
static idist__flaw idist__flaw_read_all(idist__os_file file, const uint64_t *header, uint64_t *sum,
                                        int *error) {
    char *piece = (char *)malloc(IDIST__CHECKPOINT_PIECE);
    uint64_t at = 0, end = header[IDIST__HEADER_FILE] - sizeof *sum;
    idist__checksum computed = idist__checksum_begin();

    *error = piece ? 0 : ENOMEM;

    while (at < end && !*error) {
        uint64_t rest = end - at;
        size_t n = rest < IDIST__CHECKPOINT_PIECE ? (size_t)rest : IDIST__CHECKPOINT_PIECE;

        *error = idist__checkpoint_read(file, at, piece, n);
        if (!*error) idist__checksum_add(&computed, piece, n);
        at += n;
    }

    free(piece);
    if (!*error) *error = idist__checkpoint_read(file, end, sum, sizeof *sum);
    if (*error == IDIST__CHECKPOINT_ENDS) *error = EIO; // the file was longer a moment ago
    if (*error) return IDIST__FLAW_UNREADABLE;

    return *sum == idist__checksum_end(&computed) ? IDIST__FLAW_NONE : IDIST__FLAW_CONTENTS;
}

//------------------------------------------------------------------------------
// files that this process has verified or written
//
// idist_checkpoint_save must know which files are valid before it removes other files in favor of
// them. It reads each file for this purpose only once, unless the file changes.
//------------------------------------------------------------------------------

enum { IDIST__SEEN_FILES = 1024 }; // a new entry replaces the oldest one

typedef struct idist__seen_file {
    idist__os_file_version version;
    idist__flaw flaw;
} idist__seen_file;

static idist__os_mutex idist__seen_lock = IDIST__OS_MUTEX_INIT; // protects the variables below
static idist__seen_file idist__seen_files[IDIST__SEEN_FILES];
static unsigned idist__seen_count; // number of files added so far

// Returns true if this version of a file was seen before, and sets *flaw to its flaw.
static bool idist__seen_find(const idist__os_file_version *version, idist__flaw *flaw) {
    bool found = false;
    unsigned i;

    idist__os_mutex_lock(&idist__seen_lock);

    for (i = 0; i < IDIST__SEEN_FILES && i < idist__seen_count && !found; i++) {
        const idist__seen_file *file = &idist__seen_files[i];

        found = memcmp(&file->version, version, sizeof *version) == 0;
        if (found) *flaw = file->flaw;
    }

    idist__os_mutex_unlock(&idist__seen_lock);

    return found;
}

static void idist__seen_add(const idist__os_file_version *version, idist__flaw flaw) {
    idist__seen_file *file;

    idist__os_mutex_lock(&idist__seen_lock);
    file = &idist__seen_files[idist__seen_count++ % IDIST__SEEN_FILES];
    file->version = *version;
    file->flaw = flaw;
    idist__os_mutex_unlock(&idist__seen_lock);
}

//------------------------------------------------------------------------------
// file systems that do not sync
//
// A sync can fail because the file system does not support it. In that case only the protection
// against a crash is missing, and the training need not stop. A sync can also fail because data did
// not reach the disk (EIO, ENOSPC, EDQUOT), which is a real error.
//------------------------------------------------------------------------------

static idist__os_mutex idist__sync_lock = IDIST__OS_MUTEX_INIT; // protects the variable below
static bool idist__sync_has_warned;

// Decides whether the error of a sync matters. If the file system refuses to sync, returns 0, and
// warns the first time in this process. Returns any other error unchanged. The caller holds no
// lock, because a logger may call idist.
static int idist__sync_judge(int error, const char *name, const char *folder,
                             const idist__log *log) {
    bool warns;

    if (!error || !idist__os_file_refuses_sync(error)) return error;

    idist__os_mutex_lock(&idist__sync_lock);
    warns = log && !idist__sync_has_warned;
    if (warns) idist__sync_has_warned = true;
    idist__os_mutex_unlock(&idist__sync_lock);

    if (warns)
        idist__log_print(
            log, IDIST_LOG_WARN,
            "%s: %s: the file system does not sync (%s): the file is complete, but may be lost if "
            "this machine crashes",
            name, folder, strerror(error));

    return 0;
}
