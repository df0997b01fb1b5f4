// train/checkpoint/save.h: writes a checkpoint atomically and removes files that are not kept
//
// Rank 0 does all the work, and the other ranks wait for its status. Rank 0 takes these steps:
//
//     1. list the folder and remove temporary files left by crashes
//     2. verify the files in the folder
//     3. decide whether the new file is wanted
//     4. write a temporary file, sync it, rename it, and sync the folder
//     5. list the folder again and remove all valid files but the best and the latest
#pragma once

#include "os/file.h"
#include "base/fail.h"
#include "base/text.h"
#include "base/log.h"
#include "core/model.h"
#include "core/world.h"
#include "train/agree.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/flaw.h"
#include "train/checkpoint/checkpoint_folder.h"

// Writes all parts of a checkpoint and its checksum. Returns 0 or an errno.
static int idist__save_write_parts(const idist__checkpoint *checkpoint, idist__os_file file) {
    static const char zeros[IDIST__CHECKSUM_BLOCK] = {0};
    uint64_t at = 0, sum = idist__checkpoint_sum(checkpoint);
    int part;

    for (part = 0; part < checkpoint->part_count; part++) {
        size_t nbytes, padded;
        const void *data = idist__checkpoint_part(checkpoint, part, &nbytes);

        padded = idist__checkpoint_padded(nbytes);
        if (!idist__os_file_write_at(file, data, nbytes, at) ||
            !idist__os_file_write_at(file, zeros, padded - nbytes, at + nbytes))
            return errno;
        at += padded;
    }

    return idist__os_file_write_at(file, &sum, sizeof sum, at) ? 0 : errno;
}

// Records that a file that was just written is valid.
static void idist__save_remember(idist__os_folder folder, const char *name) {
    idist__os_file_version version;
    idist__os_file file;

    if (idist__os_folder_read_file(folder, name, &file) != 0) return;
    idist__os_file_version_of(file, &version);
    idist__os_file_close(&file);
    idist__seen_add(&version, IDIST__FLAW_NONE);
}

// Writes a file. The file gets its final name only when all its bytes are on the disk. Returns 0 or
// an errno.
static int idist__save_write(const idist__checkpoint *checkpoint, const idist_checkpoint_desc *desc,
                             idist__os_folder folder, const char *temporary, const char *name,
                             const idist__log *log) {
    idist__os_file file;
    int error = idist__os_folder_new_file(folder, temporary, &file);

    if (error) return error;
    error = idist__save_write_parts(checkpoint, file);
    if (!error && !idist__os_file_sync(file))
        error = idist__sync_judge(errno, "checkpoint_save", desc->folder, log);
    if (!idist__os_file_close(&file) && !error) error = errno;
    if (!error) error = idist__os_folder_rename(folder, temporary, name);

    if (error) {
        idist__os_folder_remove(folder, temporary);
        return error;
    }

    idist__save_remember(folder, name);
    error = idist__os_folder_sync(folder);

    return idist__sync_judge(error, "checkpoint_save", desc->folder, log);
}

// Returns a better file of another step, which makes the new file unwanted. If better files have
// later steps, returns the best of these, and otherwise the best file of an earlier step. Returns
// NULL if the new file is wanted.
static const idist__folder_entry *idist__save_find_better(const idist_checkpoint_desc *desc,
                                                          const idist__folder_list *list,
                                                          const idist__folder_entry *entry) {
    const idist__folder_entry *picked = NULL;
    int i;

    if (idist__folder_keeps(desc, list, entry)) return NULL;

    for (i = 0; i < list->count; i++) {
        const idist__folder_entry *other = &list->entries[i];
        bool later = other->step > entry->step, picked_later;

        if (other->flaw || other->step == entry->step) continue;
        if (!idist__folder_is_better(other, entry, desc->low_is_best)) continue;

        picked_later = picked && picked->step > entry->step;
        if (!picked || later > picked_later) picked = other;
        else if (later == picked_later && idist__folder_is_better(other, picked, desc->low_is_best))
            picked = other;
    }

    return picked;
}

static void idist__save_log_better(const idist_checkpoint_desc *desc,
                                   const idist__folder_entry *entry,
                                   const idist__folder_entry *better, const idist__log *log) {
    bool later = better->step > entry->step;

    idist__log_print(
        log, later ? IDIST_LOG_WARN : IDIST_LOG_INFO,
        "checkpoint_save: %s is not written to %s, because %s in that folder is better%s",
        entry->name, desc->folder, better->name,
        later ? " and has a later step: files of an earlier run count as well" : "");
}

// Verifies the files of a list, unless all files are kept. Warns about a damaged file the first
// time it is seen.
static void idist__save_verify(const idist_checkpoint_desc *desc, idist__os_folder folder,
                               idist__folder_list *list, const idist__log *log) {
    bool keeps_all = desc->keep < 0 || desc->keep_latest < 0;
    int i;

    for (i = 0; i < list->count; i++) {
        idist__folder_entry *entry = &list->entries[i];
        idist__flaw flaw;
        bool seen = idist__seen_find(&entry->version, &flaw);

        if (!keeps_all) idist__folder_verify(folder, entry);
        if (seen || !entry->flaw || entry->flaw == IDIST__FLAW_UNREADABLE) continue;

        idist__seen_add(&entry->version, entry->flaw);
        idist__log_print(log, IDIST_LOG_WARN,
                         "checkpoint_save: %s/%s %s; it does not count, and is not removed",
                         desc->folder, entry->name, idist__flaw_text(entry->flaw));
    }
}

static idist_status idist__save_remove(const idist_checkpoint_desc *desc, idist__os_folder folder,
                                       const char *name) {
    int error = idist__os_folder_remove(folder, name);

    if (!error || error == ENOENT) return IDIST_OK;
    return idist__checkpoint_fail("checkpoint_save: cannot remove", desc->folder, name, error);
}

// Removes the files that the saved file replaces, from the folder and from the list. These are the
// other valid files of its step.
static idist_status idist__save_remove_replaced(const idist_checkpoint_desc *desc,
                                                idist__os_folder folder, idist__folder_list *list,
                                                const idist__folder_entry *saved) {
    int i, kept_count = 0;
    idist_status status = IDIST_OK;

    for (i = 0; i < list->count; i++) {
        const idist__folder_entry *entry = &list->entries[i];
        bool replaced =
            !entry->flaw && entry->step == saved->step && strcmp(entry->name, saved->name) != 0;

        if (replaced && status == IDIST_OK) status = idist__save_remove(desc, folder, entry->name);
        if (!replaced) list->entries[kept_count++] = *entry;
    }

    list->count = kept_count;

    return status;
}

// Removes the files that the saved file replaces, and all other valid files but the best and the
// latest.
static idist_status idist__save_remove_rest(const idist_checkpoint_desc *desc, const char *prefix,
                                            idist__os_folder folder,
                                            const idist__folder_entry *saved,
                                            const idist__log *log) {
    idist__folder_list list;
    int i;
    idist_status status = idist__folder_list_all(desc->folder, prefix, folder, false, &list);

    if (status == IDIST_OK) idist__save_verify(desc, folder, &list, log);
    if (status == IDIST_OK) status = idist__save_remove_replaced(desc, folder, &list, saved);

    for (i = 0; i < list.count && status == IDIST_OK; i++) {
        const idist__folder_entry *entry = &list.entries[i];

        if (!entry->flaw && !idist__folder_keeps(desc, &list, entry))
            status = idist__save_remove(desc, folder, entry->name);
    }

    free(list.entries);

    return status;
}

// Saves a checkpoint to an open folder.
static idist_status idist__save_to_folder(const idist_checkpoint_desc *desc,
                                          idist__os_folder folder, const char *prefix,
                                          const idist__checkpoint *checkpoint,
                                          const idist__folder_entry *entry, const idist__log *log) {
    idist__folder_list list;
    const idist__folder_entry *better = NULL;
    char temporary[300];
    int error;
    idist_status status = idist__folder_list_all(desc->folder, prefix, folder, true, &list);

    if (status == IDIST_OK) idist__save_verify(desc, folder, &list, log);
    if (status == IDIST_OK) better = idist__save_find_better(desc, &list, entry);
    if (better) idist__save_log_better(desc, entry, better, log);
    free(list.entries);
    if (status != IDIST_OK || better) return status;

    snprintf(temporary, sizeof temporary, ".%s.tmp", entry->name);
    error = idist__save_write(checkpoint, desc, folder, temporary, entry->name, log);
    if (error)
        return idist__checkpoint_fail("checkpoint_save", desc->folder,
                                      error == EEXIST ? temporary : entry->name, error);

    return idist__save_remove_rest(desc, prefix, folder, entry, log);
}

// Completes the header and saves the checkpoint to the folder of the desc. Called on rank 0.
static idist_status idist__save_on_root(const idist_checkpoint_desc *desc, uint64_t step,
                                        double score, idist__checkpoint *checkpoint,
                                        const idist__log *log) {
    idist__folder_entry entry;
    char text[IDIST__NUMBER_NBYTES];
    const char *prefix = NULL;
    idist__os_folder folder;
    idist_status status;

    memset(&entry, 0, sizeof entry);
    if (score != score) return idist__fail(IDIST_ERR_ARG, "checkpoint_save: the score is NaN");
    status = idist__folder_open("checkpoint_save", desc, true, &prefix, &folder);

    if (status == IDIST_OK) {
        entry.step = step;
        entry.score = score;
        snprintf(entry.name, sizeof entry.name, "%s_%llu_score=%s.idist", prefix,
                 (unsigned long long)step, idist__number_print(text, score, 6));
        checkpoint->header[IDIST__HEADER_STEP] = step;
        memcpy(&checkpoint->header[IDIST__HEADER_SCORE], &score, sizeof score);
        checkpoint->header[IDIST__HEADER_CHECKSUM] =
            idist__checkpoint_header_checksum(checkpoint->header);
        status = idist__save_to_folder(desc, folder, prefix, checkpoint, &entry, log);
    }

    idist__os_folder_close(&folder);

    return status;
}

idist_status idist_checkpoint_save(const idist_checkpoint_desc *desc, uint64_t step, double score,
                                   const idist_tensor *tensors, int n, const void *info,
                                   size_t info_nbytes, const idist_opts *opts) {
    idist__checkpoint checkpoint;
    const idist__world *world;
    idist_opts own_opts;
    idist_status status = idist__agree_enter("checkpoint_save", opts, &own_opts);

    if (status != IDIST_OK) return status;
    if (idist_group_rank(own_opts.group) != 0) return idist__agree(IDIST_OK, &own_opts);

    world = own_opts.group ? own_opts.group->w : idist__world_default();
    status = idist__checkpoint_init("checkpoint_save", &checkpoint, tensors, n, info, info_nbytes);
    if (status == IDIST_OK)
        status = idist__save_on_root(desc, step, score, &checkpoint, &world->log);
    free(checkpoint.table);

    return idist__agree(status, &own_opts);
}
