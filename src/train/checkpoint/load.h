// train/checkpoint/load.h: reads a checkpoint on rank 0 and copies it to all ranks
//
//     idist__load_open      rank 0: opens the file, verifies the checksum of the whole file, and
//                           compares header and table with the tensors; writes nothing
//     idist__load_compare   all ranks: get the header from rank 0, and check that every rank passed
//                           the same tensors
//     idist__load_copy      all ranks: rank 0 reads each part into its memory and broadcasts it; at
//                           the end each rank verifies the checksum over its memory
#pragma once

#include "os/file.h"
#include "base/fail.h"
#include "train/agree.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/flaw.h"

static idist_status idist__load_fail(const char *path, int error) {
    if (error == IDIST__CHECKPOINT_ENDS) error = EIO; // the file was longer when it was opened
    return idist__checkpoint_fail("checkpoint_load", path, "", error);
}

// Checks that entry i of a file's table describes tensor i.
static idist_status idist__load_match_entry(const idist__checkpoint *checkpoint, int i,
                                            idist__os_file file, const char *path) {
    const idist_tensor *tensor = &checkpoint->tensors[i];
    uint64_t entry[IDIST__TABLE_WORDS], dtype;
    uint64_t at = sizeof checkpoint->header + (uint64_t)i * sizeof entry;
    int error = idist__checkpoint_read(file, at, entry, sizeof entry);

    if (error) return idist__load_fail(path, error);
    if (entry[IDIST__TABLE_COUNT] == tensor->count &&
        entry[IDIST__TABLE_DTYPE] == (uint64_t)tensor->dtype)
        return IDIST_OK;

    dtype = entry[IDIST__TABLE_DTYPE];
    if (dtype > IDIST_DTYPE_COUNT) dtype = IDIST_DTYPE_COUNT; // printed as an invalid dtype

    return idist__fail(
        IDIST_ERR_ARG,
        "checkpoint_load: %s: tensor %d is %s x %llu in the file, but %s x %zu in this call", path,
        i, idist_dtype_name((idist_dtype)dtype), (unsigned long long)entry[IDIST__TABLE_COUNT],
        idist_dtype_name(tensor->dtype), tensor->count);
}

// Checks that a valid file has the tensors of this call. Copies its header, which contains the step
// and the score.
static idist_status idist__load_match(idist__checkpoint *checkpoint, const uint64_t *header,
                                      idist__os_file file, const char *path) {
    int i, n = checkpoint->part_count - IDIST__PART_TENSORS;

    if (header[IDIST__HEADER_TENSORS] != (uint64_t)n)
        return idist__fail(IDIST_ERR_ARG, "checkpoint_load: %s has %llu tensors, expected %d", path,
                           (unsigned long long)header[IDIST__HEADER_TENSORS], n);
    if (header[IDIST__HEADER_INFO] != checkpoint->header[IDIST__HEADER_INFO])
        return idist__fail(IDIST_ERR_ARG,
                           "checkpoint_load: %s has %llu bytes of info, expected %llu", path,
                           (unsigned long long)header[IDIST__HEADER_INFO],
                           (unsigned long long)checkpoint->header[IDIST__HEADER_INFO]);

    for (i = 0; i < n; i++) {
        idist_status status = idist__load_match_entry(checkpoint, i, file, path);
        if (status != IDIST_OK) return status;
    }

    if (header[IDIST__HEADER_FILE] != checkpoint->header[IDIST__HEADER_FILE])
        return idist__fail(IDIST_ERR_ARG,
                           "checkpoint_load: the size of %s does not match its tensors", path);
    memcpy(checkpoint->header, header, sizeof checkpoint->header);

    return IDIST_OK;
}

static idist_status idist__load_fail_flaw(const char *path, idist__flaw flaw) {
    bool is_corrupt = idist__flaw_status(flaw) == IDIST_ERR_CORRUPT;

    return idist__fail(idist__flaw_status(flaw), "checkpoint_load: %s %s%s", path,
                       idist__flaw_text(flaw),
                       is_corrupt ? "; idist_checkpoint_find finds the valid files" : "");
}

// Checks that the padding is zero. Otherwise the checksum over the file could be right although the
// checksum over a rank's memory is wrong.
static idist_status idist__load_check_padding(const idist__checkpoint *checkpoint,
                                              idist__os_file file, const char *path) {
    char padding[IDIST__CHECKSUM_BLOCK];
    uint64_t at = 0;
    int part, error;

    for (part = 0; part < checkpoint->part_count; part++) {
        size_t nbytes, padded, i;

        idist__checkpoint_part(checkpoint, part, &nbytes);
        padded = idist__checkpoint_padded(nbytes);
        error = idist__checkpoint_read(file, at + nbytes, padding, padded - nbytes);
        if (error) return idist__load_fail(path, error);

        for (i = 0; i < padded - nbytes; i++)
            if (padding[i]) return idist__load_fail_flaw(path, IDIST__FLAW_PADDING);
        at += padded;
    }

    return IDIST_OK;
}

// Opens the file and checks all of it. The caller closes *file, even after a failure. Called on
// rank 0.
static idist_status idist__load_open(idist__checkpoint *checkpoint, const char *path,
                                     idist__os_file *file, uint64_t *sum) {
    uint64_t header[IDIST__HEADER_WORDS];
    int error;
    idist__flaw flaw;
    idist_status status;

    *file = IDIST__OS_NO_FILE;
    if (!path) return idist__fail(IDIST_ERR_ARG, "checkpoint_load: path is NULL");
    error = idist__os_folder_read_file(IDIST__OS_HERE, path, file);
    if (error == ENOENT)
        return idist__fail(IDIST_ERR_NOT_FOUND, "checkpoint_load: %s does not exist", path);
    if (error) return idist__load_fail(path, error);

    flaw = idist__flaw_read_header(*file, header, &error);
    if (!flaw) flaw = idist__flaw_read_all(*file, header, sum, &error);
    if (flaw == IDIST__FLAW_UNREADABLE) return idist__load_fail(path, error);
    if (flaw) return idist__load_fail_flaw(path, flaw);

    status = idist__load_match(checkpoint, header, *file, path);
    if (status != IDIST_OK) return status;

    return idist__load_check_padding(checkpoint, *file, path);
}

// Gets the header from rank 0, and checks that this rank has the same tensors as rank 0. Broadcasts
// with different counts would break the group. Collective.
static idist_status idist__load_compare(idist__checkpoint *checkpoint, uint64_t *sum,
                                        const idist_opts *opts) {
    enum { IDIST__ROOT_SUM = IDIST__HEADER_WORDS, IDIST__ROOT_TABLE_SUM, IDIST__ROOT_WORDS };
    uint64_t root[IDIST__ROOT_WORDS], own_table_sum;
    idist__checksum table_sum = idist__checksum_begin();
    idist_status status;

    idist__checksum_add(&table_sum, checkpoint->table,
                        idist__checkpoint_table_nbytes(checkpoint->header[IDIST__HEADER_TENSORS]));
    own_table_sum = idist__checksum_end(&table_sum);
    memcpy(root, checkpoint->header, sizeof checkpoint->header);
    root[IDIST__ROOT_SUM] = *sum;
    root[IDIST__ROOT_TABLE_SUM] = own_table_sum;
    status = idist_broadcast(root, IDIST__ROOT_WORDS, IDIST_U64, 0, opts);
    if (status != IDIST_OK) return status;

    if (root[IDIST__HEADER_TENSORS] != checkpoint->header[IDIST__HEADER_TENSORS] ||
        root[IDIST__HEADER_INFO] != checkpoint->header[IDIST__HEADER_INFO] ||
        root[IDIST__ROOT_TABLE_SUM] != own_table_sum)
        status = idist__fail(IDIST_ERR_ARG,
                             "checkpoint_load: tensors or info differ from those on rank 0");
    memcpy(checkpoint->header, root, sizeof checkpoint->header);
    *sum = root[IDIST__ROOT_SUM];

    return idist__agree(status, opts);
}

// Reads each part on rank 0 and broadcasts it to all ranks. If rank 0 cannot read a part, it still
// makes the remaining broadcasts, so that the other ranks do not hang. Collective.
static idist_status idist__load_copy(idist__checkpoint *checkpoint, void *info, idist__os_file file,
                                     const char *path, uint64_t sum, const idist_opts *opts) {
    uint64_t at = idist__checkpoint_padded(sizeof checkpoint->header);
    size_t nbytes;
    int part, error = 0;
    idist_status status = IDIST_OK;

    idist__checkpoint_part(checkpoint, IDIST__PART_TABLE, &nbytes);
    at += idist__checkpoint_padded(nbytes);

    for (part = IDIST__PART_INFO; part < checkpoint->part_count; part++) {
        void *data =
            part == IDIST__PART_INFO ? info : checkpoint->tensors[part - IDIST__PART_TENSORS].data;

        idist__checkpoint_part(checkpoint, part, &nbytes);
        if (file != IDIST__OS_NO_FILE && !error)
            error = idist__checkpoint_read(file, at, data, nbytes);
        at += idist__checkpoint_padded(nbytes);
        if (nbytes) status = idist_broadcast(data, nbytes, IDIST_U8, 0, opts);
        if (status != IDIST_OK) return status;
    }

    if (error) status = idist__load_fail(path, error);
    else if (idist__checkpoint_sum(checkpoint) != sum)
        status = idist__fail(IDIST_ERR_SYSTEM,
                             "checkpoint_load: the data received differ from the data in the file");

    return idist__agree(status, opts);
}

idist_status idist_checkpoint_load(const char *path, const idist_tensor *tensors, int n, void *info,
                                   size_t info_nbytes, const idist_opts *opts) {
    idist__checkpoint checkpoint;
    idist_opts own_opts;
    uint64_t sum = 0;
    idist__os_file file = IDIST__OS_NO_FILE;
    idist_status status = idist__agree_enter("checkpoint_load", opts, &own_opts);

    if (status != IDIST_OK) return status;
    status = idist__checkpoint_init("checkpoint_load", &checkpoint, tensors, n, info, info_nbytes);
    if (status == IDIST_OK && idist_group_rank(own_opts.group) == 0)
        status = idist__load_open(&checkpoint, path, &file, &sum);
    status = idist__agree(status, &own_opts);

    if (status == IDIST_OK) status = idist__load_compare(&checkpoint, &sum, &own_opts);
    if (status == IDIST_OK)
        status = idist__load_copy(&checkpoint, info, file, path, sum, &own_opts);
    idist__os_file_close(&file);
    free(checkpoint.table);

    return status;
}
