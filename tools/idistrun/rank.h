// rank.h: a rank: its environment, its log files, its program
//
// A rank learns its place from environment variables. The values are stored under idist's names and
// under torchrun's names, so that PyTorch programs run too.
#pragma once

#include "base.h"
#include "error_file.h"
#include "options.h"
#include "place.h"
#include "timeline.h"

#include <fcntl.h>
#include <limits.h>

// Sets the variables that are numbers.
static void rank_set_numbers(int local_rank, const struct attempt *attempt) {
    const int rank = place.first_rank + local_rank;
    const struct {
        const char *name;
        int value;
    } numbers[] = {
        {"IDIST_RANK", rank},
        {"RANK", rank},
        {"ROLE_RANK", rank},
        {"IDIST_WORLD_SIZE", place.world_size},
        {"WORLD_SIZE", place.world_size},
        {"ROLE_WORLD_SIZE", place.world_size},
        {"IDIST_LOCAL_RANK", local_rank},
        {"LOCAL_RANK", local_rank},
        {"IDIST_LOCAL_WORLD_SIZE", place.rank_count},
        {"LOCAL_WORLD_SIZE", place.rank_count},
        {"GROUP_RANK", place.node_rank},
        {"NODE_RANK", place.node_rank},
        {"GROUP_WORLD_SIZE", place.node_count},
        {"MASTER_PORT", attempt->master_port},
        {"TORCHELASTIC_RESTART_COUNT", attempt->restart},
        {"TORCHELASTIC_MAX_RESTARTS", options.max_restarts},
    };

    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        char text[16];

        snprintf(text, sizeof text, "%d", numbers[i].value);
        setenv(numbers[i].name, text, 1);
    }
}

// Sets the variables that name files of the rank. Without such files, unsets the variables, because
// the values inherited from idistrun name other files.
static void rank_set_error_files(int rank) {
    if (!error_file_can_be()) {
        unsetenv("TORCHELASTIC_ERROR_FILE");
        unsetenv("IDIST_LOST_FILE");
        return;
    }

    setenv("TORCHELASTIC_ERROR_FILE", error_file_path(rank), 1);
    setenv("IDIST_LOST_FILE", error_file_lost_path(rank), 1);
}

// Sets all variables of a rank, in the process that becomes the rank.
static void rank_set_environment(int local_rank, const struct attempt *attempt) {
    rank_set_numbers(local_rank, attempt);
    rank_set_error_files(place.first_rank + local_rank);

    setenv("MASTER_ADDR", place.master_addr, 1);
    setenv("TORCHELASTIC_RUN_ID", place.job_id, 1);
    setenv("TORCHELASTIC_USE_AGENT_STORE", "False", 1);

    if (options.secret_file) setenv("IDIST_SECRET_FILE", options.secret_file, 1);
    if (options.bind) setenv("IDIST_BIND", "core", 1);
    if (options.trace) setenv("IDIST_TRACE", timeline_path("trace.json"), 1);
}

// Opens a rank's "out" or "err" file in --log-dir.
static int rank_open_log(int rank, const char *kind) {
    char path[PATH_MAX];
    int fd;

    snprintf(path, sizeof path, "%s/%d.%s", options.log_dir, rank, kind);
    fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (fd < 0) base_die(path);

    return fd;
}

// Turns this process into the user's program. Does not return.
static void rank_become_program(int local_rank, const struct attempt *attempt) {
    char **command = options.command;
    int error;

    rank_set_environment(local_rank, attempt);
    execvp(command[0], command);
    error = errno;

    fprintf(stderr, "idistrun: cannot run %s: %s\n", command[0], strerror(error));
    _exit(error == ENOENT ? BASE_CODE_NOT_FOUND : BASE_CODE_NOT_RUN);
}
