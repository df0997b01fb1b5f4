// digits_checkpoint.h - the checkpoint file, from which a training run resumes
#ifndef EXAMPLES_DIGITS_CHECKPOINT_H
#define EXAMPLES_DIGITS_CHECKPOINT_H

#include "digits_job.h"

typedef struct job_checkpoint {
    char magic[8];
    uint64_t fingerprint;
    job_state state;
    uint64_t hash; // of all bytes before it
} job_checkpoint;

// Writes the checkpoint to a new file and renames the file, so a crash leaves the old checkpoint or
// the new one. Prints an error and returns false on failure.
static inline bool job_save(const job *j) {
    static job_checkpoint c;
    char path[1100];
    FILE *f;
    bool ok;

    if (!j->checkpoint) return true;
    memcpy(c.magic, "DIGITS1", 8);
    c.fingerprint = job_fingerprint(j);
    c.state = j->state;
    c.hash = fnv1a(FNV_START, &c, offsetof(job_checkpoint, hash));

    snprintf(path, sizeof path, "%s.new", j->checkpoint);
    f = fopen(path, "wb");
    ok = f && fwrite(&c, sizeof c, 1, f) == 1 && fflush(f) == 0 && fsync(fileno(f)) == 0;
    if (f && fclose(f) != 0) ok = false;
    if (ok && rename(path, j->checkpoint) == 0) return true;
    fprintf(stderr, "%s: %s\n", j->checkpoint, strerror(errno));
    unlink(path);
    return false;
}

// Fills j->state from the checkpoint, or with new weights if there is no checkpoint. Prints an
// error and returns false if the file is bad.
static inline bool job_resume(job *j) {
    static job_checkpoint c;
    FILE *f = j->checkpoint ? fopen(j->checkpoint, "rb") : NULL;
    bool ok;

    convnet_initialize(j->state.w, j->seed);
    if (!f && (!j->checkpoint || errno == ENOENT)) return true;
    ok = f && fread(&c, sizeof c, 1, f) == 1 && fgetc(f) == EOF && !memcmp(c.magic, "DIGITS1", 8) &&
         c.hash == fnv1a(FNV_START, &c, offsetof(job_checkpoint, hash)) &&
         c.fingerprint == job_fingerprint(j);
    if (f) fclose(f);
    if (!ok) {
        fprintf(stderr,
                "%s is not a checkpoint of this training: other data, other options, or damaged\n",
                j->checkpoint);
        return false;
    }
    j->state = c.state;
    if (c.state.done)
        printf("resumed   after epoch %d, from %s\n", (int)c.state.done, j->checkpoint);
    return true;
}

#endif // EXAMPLES_DIGITS_CHECKPOINT_H
