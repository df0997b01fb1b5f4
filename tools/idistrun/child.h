// child.h: the children of idistrun: ranks, or on the head one ssh per node
//
//     CHILD_ENDED --child_start--> CHILD_RUNS --waitpid--> CHILD_DEAD --child_end--> CHILD_ENDED
//
// Each child leads its own process group. So Ctrl-C reaches only idistrun, and idistrun can kill
// processes that a rank leaves behind. The kernel kills a child when idistrun dies.
#pragma once

#include "base.h"
#include "error_file.h"
#include "hosts.h"
#include "node.h"
#include "options.h"
#include "place.h"
#include "rank.h"

#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/prctl.h>
#include <sys/types.h>

enum { CHILD_STDIN_NBYTES = 1 << 20 };

// The stdout or the stderr of a child, if idistrun reads it. child_start() opens the stream, and
// output.h reads and closes it.
struct stream {
    int fd; // -1 if the stream has ended or idistrun does not read it
    char *line;
    size_t nbytes; // bytes in `line`
};
enum stream_kind { STREAM_OUT, STREAM_ERR, STREAM_KINDS };

enum child_state {
    CHILD_ENDED, // has ended, or was never started
    CHILD_RUNS,
    CHILD_DEAD // has ended, but its status has not been handled yet
};

struct child {
    enum child_state state;
    int index; // index of a rank on this host, or of a node
    pid_t pid;
    int status;        // status from waitpid()
    int to;            // the stdin of an ssh, or -1
    bool node_started; // idistrun runs on the node
    struct stream streams[STREAM_KINDS];
};

static struct {
    struct child *items;
    int count, alive_count;
} children;

// Allocates the children, which are started later.
static void child_make_all(void) {
    children.count = place.role == PLACE_HEAD ? hosts.count : place.rank_count;
    children.items = base_or_die(calloc((size_t)children.count, sizeof *children.items));

    for (int i = 0; i < children.count; i++) children.items[i].index = i;
}

// Returns the rank number of a child. On the head, no child is a rank.
static int child_rank(const struct child *child) { return place.first_rank + child->index; }

// Creates a pipe that no other child inherits.
static void child_make_pipe(int *from, int *to) {
    int ends[2];

    if (pipe2(ends, O_CLOEXEC) != 0) base_die("pipe");
    *from = ends[0];
    *to = ends[1];
}

// Opens the stdin of a child: a pipe for an ssh, or /dev/null for a rank.
static int child_open_stdin(struct child *child) {
    int fd;

    child->to = -1;
    if (place.role != PLACE_HEAD) return open("/dev/null", O_RDONLY | O_CLOEXEC);

    // The pipe is large, so that even long arguments fit in before ssh is connected.
    child_make_pipe(&fd, &child->to);
    fcntl(child->to, F_SETPIPE_SZ, CHILD_STDIN_NBYTES);
    return fd;
}

// Opens a stream of a child. Returns the descriptor of a log file or of a pipe to idistrun, or -1
// to keep idistrun's own stream.
static int child_open_stream(struct child *child, enum stream_kind kind) {
    struct stream *stream = &child->streams[kind];
    int fd = -1;

    stream->fd = -1;
    stream->nbytes = 0;

    if (place.role != PLACE_HEAD && options.log_dir)
        return rank_open_log(child_rank(child), kind == STREAM_OUT ? "out" : "err");
    if (options.tag || place.role != PLACE_LOCAL) child_make_pipe(&stream->fd, &fd);
    return fd;
}

// Prepares the new process: unblocks all signals, and sets up the process group and the
// descriptors. Exits if idistrun has already died.
static void child_enter(const int ends[3], pid_t parent) {
    sigset_t none;

    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);

    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(BASE_CODE_SYSTEM);

    for (int fd = 0; fd < 3; fd++)
        if (ends[fd] >= 0) dup2(ends[fd], fd);
}

// Prints the process id of a child.
static void child_announce(const struct child *child) {
    if (place.role == PLACE_HEAD)
        base_say("the ssh to %s is process %d", hosts.items[child->index].name, (int)child->pid);
    else base_say("rank %d is process %d", child_rank(child), (int)child->pid);
}

// Starts a rank, or the ssh to a node.
static void child_start(struct child *child, const struct attempt *attempt) {
    pid_t parent = getpid();
    int ends[3]; // the child's stdin, stdout and stderr, or -1 to keep idistrun's

    child->node_started = false;
    if (place.role != PLACE_HEAD) error_file_remove(child_rank(child));
    ends[STDIN_FILENO] = child_open_stdin(child);
    ends[STDOUT_FILENO] = child_open_stream(child, STREAM_OUT);
    ends[STDERR_FILENO] = child_open_stream(child, STREAM_ERR);

    fflush(NULL);
    child->pid = fork();
    if (child->pid < 0) base_die("fork");

    if (child->pid == 0) {
        child_enter(ends, parent);
        if (place.role == PLACE_HEAD) node_become_ssh(&hosts.items[child->index]);
        rank_become_program(child->index, attempt);
    }

    setpgid(child->pid, child->pid); // the child does this too: either process may run first
    for (int fd = 0; fd < 3; fd++)
        if (ends[fd] >= 0) close(ends[fd]);

    child->state = CHILD_RUNS;
    children.alive_count++;
    if (options.verbose) child_announce(child);
}

// Stores the status of a process that has ended.
static void child_note_death(pid_t pid, int status) {
    for (int i = 0; i < children.count; i++) {
        struct child *child = &children.items[i];

        if (child->state != CHILD_RUNS || child->pid != pid) continue;
        child->state = CHILD_DEAD;
        child->status = status;
    }
}

// Closes the stdin of an ssh.
static void child_close_stdin(struct child *child) {
    if (child->to >= 0) close(child->to);
    child->to = -1;
}

// Sends a signal to the ranks of a node, or to all processes in the group of a rank.
static void child_signal(struct child *child, int number) {
    if (child->to < 0) {
        if (child->state != CHILD_ENDED) kill(-child->pid, number);
        return;
    }

    node_tell_signal(child->to, number);
    if (number == SIGKILL) child_close_stdin(child); // the next signal goes to ssh itself
}

// Cleans up after a dead child, and kills the remaining processes of its group.
static void child_end(struct child *child) {
    kill(-child->pid, SIGKILL);
    child->state = CHILD_ENDED;
    children.alive_count--;
    child_close_stdin(child);
}
