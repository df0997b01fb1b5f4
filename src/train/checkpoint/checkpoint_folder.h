// train/checkpoint/checkpoint_folder.h: the checkpoints in a folder, and the best of them
//
// Functions: idist__folder_*.
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

// A file with the name of a checkpoint.
typedef struct idist__folder_entry {
    uint64_t step; // step and score are from the header
    double score;
    idist__flaw flaw; // found in the header, or in the whole file if `verified`
    int error;        // for IDIST__FLAW_UNREADABLE: the errno
    bool verified;    // the whole file was read
    idist__os_file_version version;
    char name[256];
} idist__folder_entry;

// The files in a folder that have names of checkpoints. The caller frees `entries`.
typedef struct idist__folder_list {
    idist__folder_entry *entries;
    int count, capacity;
} idist__folder_list;

// Returns true if a name has the form PREFIX_STEP_score=SCORE.idist.
static bool idist__folder_is_checkpoint(const char *name, const char *prefix) {
    size_t prefix_length = strlen(prefix), length = strlen(name);
    const char *step = name + prefix_length + 1;

    if (strncmp(name, prefix, prefix_length) != 0 || name[prefix_length] != '_') return false;
    if (*step < '0' || *step > '9') return false;
    while (*step >= '0' && *step <= '9') step++;

    return strncmp(step, "_score=", 7) == 0 && length > 6 &&
           strcmp(name + length - 6, ".idist") == 0;
}

// Returns true if a name has the form .NAME.tmp, where NAME is the name of a checkpoint. A crash
// may leave such a file behind.
static bool idist__folder_is_temporary(const char *name, const char *prefix) {
    char inner[256];
    size_t length = strlen(name);

    if (name[0] != '.' || length < 6 || length - 5 >= sizeof inner) return false;
    if (strcmp(name + length - 4, ".tmp") != 0) return false;
    memcpy(inner, name + 1, length - 5);
    inner[length - 5] = 0;

    return idist__folder_is_checkpoint(inner, prefix);
}

static bool idist__folder_is_better(const idist__folder_entry *a, const idist__folder_entry *b,
                                    bool low_is_best) {
    if (a->score != b->score) return low_is_best ? a->score < b->score : a->score > b->score;
    return a->step > b->step;
}

static bool idist__folder_is_later(const idist__folder_entry *a, const idist__folder_entry *b,
                                   bool low_is_best) {
    if (a->step != b->step) return a->step > b->step;
    if (a->version.modified_ns != b->version.modified_ns)
        return a->version.modified_ns > b->version.modified_ns; // the newer file replaces the other
    return idist__folder_is_better(a, b, low_is_best);
}

// Reads the header of a file, or the whole file if `all` is set. Returns false if the file no
// longer exists, or if the name is a dangling link.
static bool idist__folder_read_entry(idist__os_folder folder, idist__folder_entry *entry,
                                     bool all) {
    uint64_t header[IDIST__HEADER_WORDS], sum;
    idist__os_file file;
    int error = idist__os_folder_read_file(folder, entry->name, &file);

    memset(&entry->version, 0, sizeof entry->version);
    entry->flaw = IDIST__FLAW_UNREADABLE;
    entry->error = error;
    entry->verified = all;
    if (error == ENOENT) return false;
    if (error == ELOOP || error == ENXIO) entry->flaw = IDIST__FLAW_IRREGULAR; // link loop, socket
    if (error) return true;

    idist__os_file_version_of(file, &entry->version);
    entry->flaw = idist__flaw_read_header(file, header, &entry->error);
    entry->step = header[IDIST__HEADER_STEP];
    memcpy(&entry->score, &header[IDIST__HEADER_SCORE], sizeof entry->score);
    if (all && !entry->flaw) entry->flaw = idist__flaw_read_all(file, header, &sum, &entry->error);
    idist__os_file_close(&file);

    return true;
}

// Checks that a file with a valid header is valid as a whole. Reads all of the file unless this
// version of it was seen before.
static void idist__folder_verify(idist__os_folder folder, idist__folder_entry *entry) {
    if (entry->flaw || entry->verified) return;

    entry->verified = idist__seen_find(&entry->version, &entry->flaw);
    if (entry->verified) return;

    if (!idist__folder_read_entry(folder, entry, true)) entry->flaw = IDIST__FLAW_UNREADABLE;
    if (entry->flaw != IDIST__FLAW_UNREADABLE) idist__seen_add(&entry->version, entry->flaw);
}

// Adds a file to the list. Returns false if there is no memory.
static bool idist__folder_add(idist__folder_list *list, idist__os_folder folder, const char *name) {
    idist__folder_entry *entry;

    if (list->count == list->capacity) {
        size_t nbytes = sizeof *list->entries * ((size_t)list->capacity + 64);
        void *entries = realloc(list->entries, nbytes);

        if (!entries) return false;
        list->entries = (idist__folder_entry *)entries;
        list->capacity += 64;
    }

    entry = &list->entries[list->count];
    idist__text_copy(entry->name, sizeof entry->name, name);
    if (idist__folder_read_entry(folder, entry, false)) list->count++;

    return true;
}

// Lists the checkpoints of an open folder. If `tidy` is set, also removes temporary files left by
// crashes. Fails if the folder cannot be read, because a folder that seems empty would make any
// score the best.
static idist_status idist__folder_list_all(const char *path, const char *prefix,
                                           idist__os_folder folder, bool tidy,
                                           idist__folder_list *list) {
    idist__os_folder_walk walk;
    const char *name;
    bool has_memory = true;
    int error = idist__os_folder_begin(&walk, folder);

    memset(list, 0, sizeof *list);
    if (error) return idist__checkpoint_fail("checkpoint", path, "", error);

    while (has_memory) {
        name = idist__os_folder_next(&walk, &error);
        if (!name) break;
        if (tidy && idist__folder_is_temporary(name, prefix)) idist__os_folder_remove(folder, name);
        if (idist__folder_is_checkpoint(name, prefix))
            has_memory = idist__folder_add(list, folder, name);
    }

    idist__os_folder_end(&walk);
    if (!has_memory)
        return idist__fail(IDIST_ERR_NO_MEMORY, "checkpoint: no memory to list the files of %s",
                           path);
    if (error) return idist__checkpoint_fail("checkpoint", path, "", error);

    return IDIST_OK;
}

// Returns true if a file must be kept: fewer than `keep` valid files of other steps are better, or
// fewer than `keep_latest` are later.
static bool idist__folder_keeps(const idist_checkpoint_desc *desc, const idist__folder_list *list,
                                const idist__folder_entry *entry) {
    int i, keep = desc->keep ? desc->keep : 1, better_count = 0, later_count = 0;

    if (keep < 0 || desc->keep_latest < 0) return true;

    for (i = 0; i < list->count; i++) {
        const idist__folder_entry *other = &list->entries[i];

        if (other->flaw || other->step == entry->step) continue;
        better_count += idist__folder_is_better(other, entry, desc->low_is_best);
        later_count += idist__folder_is_later(other, entry, desc->low_is_best);
    }

    return better_count < keep || later_count < desc->keep_latest;
}

// Opens the folder of a desc. The caller closes *folder, even after a failure.
static idist_status idist__folder_open(const char *name, const idist_checkpoint_desc *desc,
                                       bool create, const char **prefix, idist__os_folder *folder) {
    int error = 0;

    *folder = IDIST__OS_NO_FOLDER;
    if (!desc || !desc->folder || !desc->folder[0])
        return idist__fail(IDIST_ERR_ARG, "%s: desc or its folder is NULL or empty", name);
    *prefix = desc->prefix ? desc->prefix : "checkpoint";
    if (!(*prefix)[0] || strchr(*prefix, '/') || strlen(*prefix) > 180)
        return idist__fail(IDIST_ERR_ARG, "%s: \"%.200s\" cannot be the prefix of a file name",
                           name, *prefix);

    if (create) error = idist__os_folder_make(desc->folder);
    if (!error) error = idist__os_folder_open(desc->folder, folder);
    if (!error) return IDIST_OK;
    if (!create && error == ENOENT)
        return idist__fail(IDIST_ERR_NOT_FOUND, "%s: there is no folder %s", name, desc->folder);

    return idist__checkpoint_fail(name, desc->folder, "", error);
}

// Returns the best valid file, or the latest one if `latest` is set. A crash may leave several
// files of a step; the newest of them is the latest. Returns NULL if no file is valid.
static idist__folder_entry *idist__folder_pick(const idist__folder_list *list, bool low_is_best,
                                               bool latest) {
    idist__folder_entry *picked = NULL;
    int i;

    for (i = 0; i < list->count; i++) {
        idist__folder_entry *entry = &list->entries[i];

        if (entry->flaw) continue;
        if (!picked || (latest ? idist__folder_is_later(entry, picked, low_is_best)
                               : idist__folder_is_better(entry, picked, low_is_best)))
            picked = entry;
    }

    return picked;
}

// Fails if a file cannot be read. That file may be the right one, and a training run must not start
// over because the file was skipped.
static idist_status idist__folder_check_readable(const idist_checkpoint_desc *desc,
                                                 const idist__folder_list *list) {
    int i;

    for (i = 0; i < list->count; i++) {
        const idist__folder_entry *entry = &list->entries[i];

        if (entry->flaw == IDIST__FLAW_UNREADABLE)
            return idist__checkpoint_fail("checkpoint_find", desc->folder, entry->name,
                                          entry->error);
    }

    return IDIST_OK;
}

// Warns about the files that are not valid.
static void idist__folder_warn(const idist_checkpoint_desc *desc, const idist__folder_list *list,
                               const idist__log *log) {
    int i;

    for (i = 0; i < list->count; i++) {
        const idist__folder_entry *entry = &list->entries[i];

        if (entry->flaw)
            idist__log_print(log, IDIST_LOG_WARN, "checkpoint_find: %s/%s %s; it is skipped",
                             desc->folder, entry->name, idist__flaw_text(entry->flaw));
    }
}

// Fails because no file is valid.
static idist_status idist__folder_fail(const idist_checkpoint_desc *desc, const char *prefix,
                                       const idist__folder_list *list) {
    char names[600] = "";
    int i;

    if (!list->count)
        return idist__fail(IDIST_ERR_NOT_FOUND, "checkpoint_find: there is no %s_*.idist in %s",
                           prefix, desc->folder);

    for (i = 0; i < list->count && strlen(names) < 250; i++)
        idist__text_append(names, sizeof names, "%s%s %s", i ? "; " : "", list->entries[i].name,
                           idist__flaw_text(list->entries[i].flaw));
    if (i < list->count) idist__text_append(names, sizeof names, "; and %d more", list->count - i);

    return idist__fail(IDIST_ERR_CORRUPT,
                       "checkpoint_find: there is no valid %s_*.idist in %s: %s. Restore one, or "
                       "move them away to begin a new training",
                       prefix, desc->folder, names);
}

// Finds the best or latest file and writes its path. Called on rank 0.
static idist_status idist__folder_find(const idist_checkpoint_desc *desc, bool latest, char *path,
                                       size_t capacity, const idist__log *log) {
    idist__folder_list list = {NULL, 0, 0};
    idist__folder_entry *picked = NULL;
    const char *prefix = NULL;
    idist__os_folder folder;
    idist_status status = idist__folder_open("checkpoint_find", desc, false, &prefix, &folder);

    if (status == IDIST_OK)
        status = idist__folder_list_all(desc->folder, prefix, folder, false, &list);

    do {
        if (status == IDIST_OK) picked = idist__folder_pick(&list, desc->low_is_best, latest);
        if (picked) idist__folder_verify(folder, picked);
    } while (picked && picked->flaw);

    if (status == IDIST_OK) idist__folder_warn(desc, &list, log);
    if (status == IDIST_OK) status = idist__folder_check_readable(desc, &list);
    if (status == IDIST_OK && !picked) status = idist__folder_fail(desc, prefix, &list);
    if (status == IDIST_OK &&
        (size_t)snprintf(path, capacity, "%s/%s", desc->folder, picked->name) >= capacity)
        status = idist__fail(IDIST_ERR_TRUNCATED,
                             "checkpoint_find: the path is longer than %zu bytes", capacity);

    free(list.entries);
    idist__os_folder_close(&folder);

    return status;
}

idist_status idist_checkpoint_find(const idist_checkpoint_desc *desc, bool latest, char *path,
                                   size_t capacity, const idist_opts *opts) {
    char found[4096];
    const idist__world *world;
    idist_opts own_opts;
    idist_status status = idist__agree_enter("checkpoint_find", opts, &own_opts);

    if (status != IDIST_OK) return status;
    world = own_opts.group ? own_opts.group->w : idist__world_default();
    memset(found, 0, sizeof found);
    if (idist_group_rank(own_opts.group) == 0)
        status = idist__folder_find(desc, latest, found, sizeof found, &world->log);
    status = idist__agree(status, &own_opts);
    if (status == IDIST_OK) status = idist_broadcast(found, sizeof found, IDIST_U8, 0, &own_opts);
    if (status != IDIST_OK) return status;

    if (!path) status = idist__fail(IDIST_ERR_ARG, "checkpoint_find: path is NULL");
    else if (strlen(found) >= capacity)
        status = idist__fail(IDIST_ERR_TRUNCATED, "checkpoint_find: %s does not fit into %zu bytes",
                             found, capacity);
    status = idist__agree(status, &own_opts);
    if (status == IDIST_OK) memcpy(path, found, strlen(found) + 1);

    return status;
}
