// node.h: the messages between the head and its nodes
//
//     head                                   node: idistrun --node, started by ssh
//       |  items, through ssh's stdin          |
//       |    dir FOLDER                        |   go to this folder
//       |    set NAME=VALUE                    |   an IDIST_* variable
//       |    arg TEXT                          |   one of the head's own arguments
//       |    go NODE RESTART PORT ADDR ID ---> |   start the ranks
//       |    signal NUMBER                ---> |   pass on a signal
//       |                                      |
//       |  lines, through the node's stderr    |
//       | <---------------------------- runs   |   idistrun is running here
//       | <------ failed CODE \t TEXT \t JSON  |   the first failure
//       | <------------------------ event JSON |   an event of the timeline, at the end
//
// An item ends with a zero byte. The items are not on ssh's command line, because all users of a
// host can read command lines, and because shells would split the items. A message from a node
// starts with NODE_MARK, because the output of the ranks is in the same stream. When a node's stdin
// ends, the head is gone, and the node ends its ranks.
#pragma once

#include "base.h"
#include "hosts.h"
#include "options.h"
#include "place.h"

#include <limits.h>
#include <stdbool.h>

#define NODE_MARK "\036"
#define NODE_RUNS NODE_MARK "runs"
#define NODE_FAILED NODE_MARK "failed "
#define NODE_EVENT NODE_MARK "event "

#define NODE_SSH "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=10"

enum { NODE_HEAD_IS_GONE = -1 };

//------------------------------------------------------------------------------
// the head
//------------------------------------------------------------------------------

// Creates a secret for the job, unless the user gives one. The nodes get the secret as a variable.
static void node_make_secret(void) {
    unsigned char bytes[32];
    char text[2 * sizeof bytes + 1];

    if (options.secret_file || getenv("IDIST_SECRET") || getenv("IDIST_SECRET_FILE")) return;
    if (getentropy(bytes, sizeof bytes) != 0) base_die("getentropy");

    for (size_t i = 0; i < sizeof bytes; i++) sprintf(text + 2 * i, "%02x", bytes[i]);
    setenv("IDIST_SECRET", text, 1);
}

// Writes the command for the shell of another host: the path of this program, quoted, and --node.
static void node_write_command(char command[4 * PATH_MAX + 32]) {
    char self[PATH_MAX];
    ssize_t nbytes = readlink("/proc/self/exe", self, sizeof self);
    char *end = command;

    end += sprintf(end, "exec '");
    for (ssize_t i = 0; i < nbytes; i++) {
        if (self[i] == '\'') end += sprintf(end, "'\\''");
        else *end++ = self[i];
    }
    sprintf(end, "' --node");
}

// Turns this process into the ssh that starts idistrun on a host. A shell splits IDIST_RSH into
// words. Does not return.
static void node_become_ssh(const struct host *host) {
    const char *rsh = getenv("IDIST_RSH");
    char script[4096], command[4 * PATH_MAX + 32];

    node_write_command(command);
    snprintf(script, sizeof script, "exec %s \"$@\"", rsh ? rsh : NODE_SSH);
    execl("/bin/sh", "sh", "-c", script, "sh", host->login, command, (char *)NULL);
    _exit(BASE_CODE_NOT_FOUND);
}

// Returns true for a variable that the nodes get. IDIST_ADDR and IDIST_HOSTID belong to one host.
static bool node_shares_variable(const char *variable) {
    return strncmp(variable, "IDIST_", 6) == 0 && strncmp(variable, "IDIST_ADDR=", 11) != 0 &&
           strncmp(variable, "IDIST_HOSTID=", 13) != 0;
}

// Tells a node what to run and where its ranks are among all ranks.
static void node_tell_orders(int to, int node_rank, const struct attempt *attempt) {
    char folder[PATH_MAX];

    if (!getcwd(folder, sizeof folder)) base_die("getcwd");
    dprintf(to, "dir %s%c", folder, 0);

    for (char **variable = environ; *variable; variable++)
        if (node_shares_variable(*variable)) dprintf(to, "set %s%c", *variable, 0);

    for (char **arg = options.argv + 1; *arg; arg++) dprintf(to, "arg %s%c", *arg, 0);

    dprintf(to, "go %d %d %d %s %s%c", node_rank, attempt->restart, attempt->master_port,
            place.master_addr, place.job_id, 0);
}

// Tells a node to send a signal to its ranks.
static void node_tell_signal(int to, int number) { dprintf(to, "signal %d%c", number, 0); }

// Finds a node's message in a line. Returns NULL if there is none. A rank's output without a
// newline may precede the message.
static char *node_find_message(char *line, size_t nbytes) {
    static const char *const marks[] = {NODE_FAILED, NODE_EVENT, NODE_RUNS};
    char *found = NULL;

    for (size_t i = 0; i < sizeof marks / sizeof *marks && !found; i++)
        found = memmem(line, nbytes, marks[i], strlen(marks[i]));

    return found;
}

// Returns the text after the mark, or NULL if the message does not start with the mark.
static char *node_after_mark(char *message, const char *mark) {
    size_t nbytes = strlen(mark);

    return strncmp(message, mark, nbytes) == 0 ? message + nbytes : NULL;
}

//------------------------------------------------------------------------------
// a node
//------------------------------------------------------------------------------

// Returns true if a head has started this idistrun.
static bool node_is_asked_for(int argc, char **argv) {
    return argc == 2 && strcmp(argv[1], "--node") == 0;
}

// Reads the item "go". Returns false for every other item.
static bool node_read_go(const char *item, struct place_orders *orders) {
    char addr[256];
    int at;

    if (sscanf(item, "go %d %d %d %255s %n", &orders->node_rank, &orders->restart,
               &orders->master_port, addr, &at) < 4)
        return false;

    orders->master_addr = base_copy(addr);
    orders->job_id = base_copy(item + at);
    return true;
}

// Appends one argument.
static void node_add_argument(int *argc, char ***argv, const char *arg) {
    *argv = base_or_die(realloc(*argv, ((size_t)*argc + 2) * sizeof **argv));
    (*argv)[(*argc)++] = base_copy(arg);
    (*argv)[*argc] = NULL;
}

// Reads and executes the head's items, up to "go". Sets argc and argv to the head's arguments.
static void node_hear_orders(struct place_orders *orders, int *argc, char ***argv) {
    char *item = NULL;
    size_t capacity = 0;

    *argc = 0;
    *argv = NULL;
    node_add_argument(argc, argv, program_invocation_name);
    setvbuf(stdin, NULL, _IONBF, 0); // poll() does not see what stdio has read ahead

    while (getdelim(&item, &capacity, 0, stdin) > 4) {
        const char *value = item + 4;

        if (strncmp(item, "dir ", 4) == 0 && chdir(value) != 0) base_die(value);
        if (strncmp(item, "set ", 4) == 0) putenv(base_copy(value));
        if (strncmp(item, "arg ", 4) == 0) node_add_argument(argc, argv, value);
        if (!node_read_go(item, orders)) continue;

        free(item);
        return;
    }
    exit(BASE_CODE_SYSTEM); // the head is gone
}

// Reads one item after "go". Returns the number of a signal, 0 for an unknown item, or
// NODE_HEAD_IS_GONE.
static int node_hear_signal(void) {
    static char *item;
    static size_t capacity;
    int number;

    if (getdelim(&item, &capacity, 0, stdin) <= 0) return NODE_HEAD_IS_GONE;
    return sscanf(item, "signal %d", &number) == 1 ? number : 0;
}

// Tells the head that idistrun is running here.
static void node_say_runs(void) { dprintf(STDERR_FILENO, NODE_RUNS "\n"); }

// Reports the first failure to the head. The JSON of the rank's error file may be NULL.
static void node_say_failed(int code, const char *text, const char *json) {
    dprintf(STDERR_FILENO, NODE_FAILED "%d\t%s\t%s\n", code, text, json ? json : "");
}
