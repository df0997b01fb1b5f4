// train/checkpoint/checkpoint.h: the format of a checkpoint file, and its checksum
#pragma once

#include "os/file.h"
#include "base/fail.h"

//------------------------------------------------------------------------------
// the checksum of a checkpoint
//
// The checksum has four lanes, each a chain of x = rotate((x ^ word) * odd). A processor computes
// the lanes side by side. Every step is invertible: two inputs that differ in one lane only, for
// example in a single word, never have the same checksum.
//------------------------------------------------------------------------------

typedef struct idist__checksum {
    uint64_t lane[4];
} idist__checksum;

#define IDIST__CHECKSUM_BLOCK sizeof(idist__checksum)
#define IDIST__CHECKSUM_ODD 0x9fb21c651e98df25u

static idist__checksum idist__checksum_begin(void) {
    idist__checksum sum;
    int i;

    for (i = 0; i < 4; i++) sum.lane[i] = IDIST__CHECKSUM_ODD * (uint64_t)(i + 1);
    return sum;
}

// Adds bytes to a checksum. A last block that is not full counts as if it were padded with zeros.
static void idist__checksum_add(idist__checksum *sum, const void *data, size_t nbytes) {
    const char *from = (const char *)data;

    while (nbytes) {
        uint64_t word[4] = {0, 0, 0, 0};
        size_t n = nbytes < sizeof word ? nbytes : sizeof word;
        int i;

        if (n == sizeof word) memcpy(word, from, sizeof word);
        else memcpy(word, from, n);

        for (i = 0; i < 4; i++) {
            uint64_t x = (sum->lane[i] ^ word[i]) * IDIST__CHECKSUM_ODD;
            sum->lane[i] = x << 29 | x >> 35;
        }

        from += n;
        nbytes -= n;
    }
}

static uint64_t idist__checksum_end(const idist__checksum *sum) {
    uint64_t hash = 0;
    int i;

    for (i = 0; i < 4; i++) {
        hash = (hash ^ sum->lane[i]) * IDIST__CHECKSUM_ODD;
        hash ^= hash >> 32;
    }

    return hash;
}

//------------------------------------------------------------------------------
// the format of a checkpoint file
//
// Numbers have 64 bits and the byte order of the machine. Each part except the last is padded with
// zeros to a multiple of 32 bytes:
//
//     header      "idistckp" | version | tensors n | step | score | bytes of info |
//                 bytes of the file | checksum of these seven words
//     table       for each of n tensors: count | dtype
//     info
//     tensor 0, tensor 1, ...
//     checksum of everything before it
//
// A program allocates its tensors before it loads a file, so it knows every size. No allocation and
// no offset depends on a value read from a file. Later versions of the format keep the first two
// words, and the checksum of the first seven words in the eighth word.
//------------------------------------------------------------------------------

#define IDIST__CHECKPOINT_VERSION 1
#define IDIST__CHECKPOINT_PIECE ((size_t)1 << 18) // bytes read at a time to verify a file

static const char idist__checkpoint_magic[8] = {'i', 'd', 'i', 's', 't', 'c', 'k', 'p'};

// The words of a header.
enum {
    IDIST__HEADER_MAGIC,
    IDIST__HEADER_VERSION,
    IDIST__HEADER_TENSORS, // number of tensors
    IDIST__HEADER_STEP,
    IDIST__HEADER_SCORE, // the bits of a double
    IDIST__HEADER_INFO,  // bytes of info
    IDIST__HEADER_FILE,  // bytes of the file
    IDIST__HEADER_CHECKSUM,
    IDIST__HEADER_WORDS
};

// The words of a table entry. There is one entry per tensor.
enum { IDIST__TABLE_COUNT, IDIST__TABLE_DTYPE, IDIST__TABLE_WORDS };

// The parts of a file. Tensor i is part IDIST__PART_TENSORS + i.
enum { IDIST__PART_HEADER, IDIST__PART_TABLE, IDIST__PART_INFO, IDIST__PART_TENSORS };

// A checkpoint in memory.
typedef struct idist__checkpoint {
    uint64_t header[IDIST__HEADER_WORDS];
    uint64_t *table;
    const void *info;
    const idist_tensor *tensors;
    int part_count; // not counting the checksum at the end
} idist__checkpoint;

static uint64_t idist__checkpoint_header_checksum(const uint64_t *header) {
    idist__checksum sum = idist__checksum_begin();

    idist__checksum_add(&sum, header, IDIST__HEADER_CHECKSUM * sizeof *header);
    return idist__checksum_end(&sum);
}

static size_t idist__checkpoint_table_nbytes(uint64_t tensors) {
    return (size_t)tensors * IDIST__TABLE_WORDS * sizeof(uint64_t);
}

// Returns the data of a part, and sets *nbytes to the size without padding.
static const void *idist__checkpoint_part(const idist__checkpoint *checkpoint, int part,
                                          size_t *nbytes) {
    const idist_tensor *tensor;

    switch (part) {
    case IDIST__PART_HEADER: *nbytes = sizeof checkpoint->header; return checkpoint->header;
    case IDIST__PART_TABLE:
        *nbytes = idist__checkpoint_table_nbytes(checkpoint->header[IDIST__HEADER_TENSORS]);
        return checkpoint->table;
    case IDIST__PART_INFO:
        *nbytes = (size_t)checkpoint->header[IDIST__HEADER_INFO];
        return checkpoint->info;
    default: break;
    }

    tensor = &checkpoint->tensors[part - IDIST__PART_TENSORS];
    *nbytes = tensor->count * idist_dtype_size(tensor->dtype);

    return tensor->data;
}

// Returns the size of a part with its padding.
static size_t idist__checkpoint_padded(size_t nbytes) {
    return (nbytes + IDIST__CHECKSUM_BLOCK - 1) / IDIST__CHECKSUM_BLOCK * IDIST__CHECKSUM_BLOCK;
}

// Computes the checksum at the end of the file from the parts in memory.
static uint64_t idist__checkpoint_sum(const idist__checkpoint *checkpoint) {
    idist__checksum sum = idist__checksum_begin();
    int part;

    for (part = 0; part < checkpoint->part_count; part++) {
        size_t nbytes;
        const void *data = idist__checkpoint_part(checkpoint, part, &nbytes);

        idist__checksum_add(&sum, data, nbytes);
    }

    return idist__checksum_end(&sum);
}

static idist_status idist__checkpoint_check_tensor(const char *name, int i,
                                                   const idist_tensor *tensor, uint64_t limit) {
    size_t size = idist_dtype_size(tensor->dtype);

    if (!size)
        return idist__fail(IDIST_ERR_ARG, "%s: tensor %d: invalid dtype %d", name, i,
                           (int)tensor->dtype);
    if (tensor->count && !tensor->data)
        return idist__fail(IDIST_ERR_ARG, "%s: tensor %d is NULL", name, i);
    if (tensor->count > limit / size)
        return idist__fail(IDIST_ERR_ARG, "%s: tensor %d has more bytes than a file can have", name,
                           i);

    return IDIST_OK;
}

// Checks the arguments of a call and fills in the checkpoint. The caller frees checkpoint->table,
// even after a failure.
static idist_status idist__checkpoint_init(const char *name, idist__checkpoint *checkpoint,
                                           const idist_tensor *tensors, int n, const void *info,
                                           size_t info_nbytes) {
    const uint64_t limit = (uint64_t)(SIZE_MAX < INT64_MAX ? SIZE_MAX : INT64_MAX) / 4;
    uint64_t total = info_nbytes;
    int i;

    memset(checkpoint, 0, sizeof *checkpoint);
    if (n < 0 || (n && !tensors))
        return idist__fail(IDIST_ERR_ARG, "%s: %d tensors, or tensors is NULL", name, n);
    if (info_nbytes && !info)
        return idist__fail(IDIST_ERR_ARG, "%s: %zu bytes of info, but info is NULL", name,
                           info_nbytes);
    checkpoint->table = (uint64_t *)malloc(idist__checkpoint_table_nbytes((uint64_t)n + 1));
    if (!checkpoint->table)
        return idist__fail(IDIST_ERR_NO_MEMORY, "%s: no memory for a table of %d tensors", name, n);

    for (i = 0; i < n; i++) {
        uint64_t *entry = checkpoint->table + IDIST__TABLE_WORDS * i;
        idist_status status = idist__checkpoint_check_tensor(name, i, &tensors[i], limit);

        if (status != IDIST_OK) return status;
        if (total > limit) break;
        entry[IDIST__TABLE_COUNT] = tensors[i].count;
        entry[IDIST__TABLE_DTYPE] = (uint64_t)tensors[i].dtype;
        total += idist__checkpoint_padded(tensors[i].count * idist_dtype_size(tensors[i].dtype));
    }

    if (total > limit)
        return idist__fail(IDIST_ERR_ARG, "%s: more bytes than a file can have", name);
    total += idist__checkpoint_padded(info_nbytes) - info_nbytes;
    total += sizeof checkpoint->header +
             idist__checkpoint_padded(idist__checkpoint_table_nbytes((uint64_t)n));
    total += sizeof(uint64_t); // the checksum

    checkpoint->info = info;
    checkpoint->tensors = tensors;
    checkpoint->part_count = IDIST__PART_TENSORS + n;
    memcpy(&checkpoint->header[IDIST__HEADER_MAGIC], idist__checkpoint_magic,
           sizeof idist__checkpoint_magic);
    checkpoint->header[IDIST__HEADER_VERSION] = IDIST__CHECKPOINT_VERSION;
    checkpoint->header[IDIST__HEADER_TENSORS] = (uint64_t)n;
    checkpoint->header[IDIST__HEADER_INFO] = info_nbytes;
    checkpoint->header[IDIST__HEADER_FILE] = total;

    return IDIST_OK;
}

// Fails with the text of an errno. `file` is a name within the folder, or "" for the folder itself.
static idist_status idist__checkpoint_fail(const char *name, const char *folder, const char *file,
                                           int error) {
    char what[700];

    snprintf(what, sizeof what, "%s: %.400s%s%.250s", name, folder, file[0] ? "/" : "", file);
    return idist__fail_errno(what, idist__os_file_no_space(error) ? ENOSPC : error);
}

enum { IDIST__CHECKPOINT_ENDS = -1 }; // returned instead of an errno; an errno is never negative

// Reads nbytes from position `at`. Returns 0, an errno, or IDIST__CHECKPOINT_ENDS if the file ends
// too early.
static int idist__checkpoint_read(idist__os_file file, uint64_t at, void *data, size_t nbytes) {
    if (idist__os_file_read_at(file, data, nbytes, at)) return 0;
    return errno ? errno : IDIST__CHECKPOINT_ENDS;
}
