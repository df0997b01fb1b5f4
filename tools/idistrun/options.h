// options.h: the command line
//
// The table options_rows has one row per option, in the order of the usage text. To add an option,
// add a line to the usage text, a field to struct options, and a row to the table.
#pragma once

#include "base.h"

#include <getopt.h>
#include <stdbool.h>

static const char *const options_usage =
    "usage: idistrun [options] program [arguments]\n"
    "  -n, --nproc N        ranks on this host (default: one per core), or on each host\n"
    "                       of --hosts without :N (default: 1)\n"
    "      --hosts A:4,B    start ranks over ssh: 4 on host A, 1 on host B\n"
    "      --nnodes N       number of hosts, all with the same number of ranks; start idistrun on\n"
    "                       each of them (default 1)\n"
    "      --node-rank K    number of this host, from 0\n"
    "      --master-addr A  address of host 0 (default 127.0.0.1, or the first of --hosts)\n"
    "      --master-port P  a free port of host 0 (default: found, unless --nnodes is given)\n"
    "      --rdzv-id ID     name of the job (default with --nnodes: idistrun)\n"
    "      --secret-file F  file with the secret that the ranks of several hosts share\n"
    "      --max-restarts R start all ranks again after a failure, up to R times\n"
    "      --tag            begin each line of output with [rank]\n"
    "      --log-dir DIR    write output of rank R to DIR/R.out and DIR/R.err, and exceptions to\n"
    "                       DIR/R.error.json\n"
    "      --error-file F   write the first failure to F, in torchrun's format (default:\n"
    "                       TORCHELASTIC_ERROR_FILE)\n"
    "      --trace F        write a timeline of all ranks, for Perfetto or examples/trace.html\n"
    "                       (with --nnodes: of the ranks on this host)\n"
    "      --bind           bind each rank to its own core\n"
    "      --grace SECONDS  time between the first failure, or a signal, and SIGKILL (default 5)\n"
    "      --doctor         report what this machine offers, and test it for 2 s; exit\n"
    "                       status 1 if something is wrong\n"
    "  -v                   print what idistrun does\n"
    "IDIST_RSH is the ssh of --hosts (default: ssh -o BatchMode=yes -o ConnectTimeout=10 -o\n"
    "ServerAliveInterval=10).\n";

// The values on the command line. place.h derives the place of the ranks from these values.
struct options {
    int nproc; // 0 if not given
    int nnodes, node_rank;
    int master_port; // 0 if not given
    int max_restarts, grace_s;
    const char *hosts, *master_addr, *rdzv_id, *secret_file; // NULL if not given, like all texts
    const char *log_dir, *error_file, *trace;
    bool tag, bind, verbose;
    char **argv;    // all arguments of idistrun
    char **command; // the part of argv that is the program with its arguments
};
static struct options options = {.nnodes = 1, .grace_s = 5};

// The action that the command line asks for.
enum options_action { OPTIONS_RUN, OPTIONS_HELP, OPTIONS_DOCTOR };

// One option. At most one of number, text, flag and action is set, and determines what the option
// does.
struct options_row {
    const char *name;           // name after two dashes, NULL for an option with only a letter
    char letter;                // letter after one dash, or 0
    int *number, least;         // takes a whole number of at least `least`
    const char **text;          // takes a text
    bool *flag;                 // takes nothing
    enum options_action action; // takes nothing, and ends the parsing
};

static const struct options_row options_rows[] = {
    {.name = "nproc", .letter = 'n', .number = &options.nproc, .least = 1},
    {.name = "nproc-per-node", .letter = 'n', .number = &options.nproc, .least = 1},
    {.name = "hosts", .text = &options.hosts},
    {.name = "nnodes", .number = &options.nnodes, .least = 1},
    {.name = "node-rank", .number = &options.node_rank},
    {.name = "master-addr", .text = &options.master_addr},
    {.name = "master-port", .number = &options.master_port, .least = 1},
    {.name = "rdzv-id", .text = &options.rdzv_id},
    {.name = "secret-file", .text = &options.secret_file},
    {.name = "max-restarts", .number = &options.max_restarts},
    {.name = "tag", .flag = &options.tag},
    {.name = "log-dir", .text = &options.log_dir},
    {.name = "error-file", .text = &options.error_file},
    {.name = "trace", .text = &options.trace},
    {.name = "bind", .flag = &options.bind},
    {.name = "grace", .number = &options.grace_s},
    {.name = "doctor", .action = OPTIONS_DOCTOR},
    {.name = "standalone"}, // an option of torchrun for one host, which is idistrun's default
    {.name = "help", .letter = 'h', .action = OPTIONS_HELP},
    {.letter = 'v', .flag = &options.verbose},
};
enum {
    OPTIONS_ROW_COUNT = sizeof options_rows / sizeof *options_rows,
    OPTIONS_FIRST_CODE = 256, // above all letters
    OPTIONS_MOST_NUMBER = 1000000
};

// Returns the whole number in a text. If there is none, exits with a message that names the option.
static int options_number(const char *text, const char *name, int least) {
    char *end;
    long value = strtol(text, &end, 10);

    if (end == text || *end || value < least || value > OPTIONS_MOST_NUMBER)
        base_usage_error("%s %s: expected a whole number of at least %d", name, text, least);

    return (int)value;
}

// Returns the code that getopt_long returns for a row. Rows with the same letter are different
// names of one option.
static int options_code(int row) {
    return options_rows[row].letter ? options_rows[row].letter : OPTIONS_FIRST_CODE + row;
}

// Returns the first row with a code, or NULL.
static const struct options_row *options_find(int code) {
    for (int row = 0; row < OPTIONS_ROW_COUNT; row++)
        if (options_code(row) == code) return &options_rows[row];
    return NULL;
}

// Fills in the list of long names that getopt_long takes. An entry of zeros ends the list.
static void options_list_names(struct option names[OPTIONS_ROW_COUNT + 1]) {
    memset(names, 0, (OPTIONS_ROW_COUNT + 1) * sizeof *names);

    for (int row = 0; row < OPTIONS_ROW_COUNT; row++) {
        const struct options_row *from = &options_rows[row];

        if (!from->name) continue;
        names->name = from->name;
        names->has_arg = from->number || from->text ? required_argument : no_argument;
        names->val = options_code(row);
        names++;
    }
}

// Stores the value of an option.
static void options_set(const struct options_row *row, const char *value) {
    char shown[32] = {'-', row->letter};

    if (!row->letter) snprintf(shown, sizeof shown, "--%s", row->name);

    if (row->number) *row->number = options_number(value, shown, row->least);
    if (row->text) *row->text = value;
    if (row->flag) *row->flag = true;
}

// Prints the usage text to stderr, and exits.
static void options_fail(void) __attribute__((noreturn));
static void options_fail(void) {
    fputs(options_usage, stderr);
    exit(BASE_CODE_USAGE);
}

// Fills in `options` and returns the action that the user asks for. --help and --doctor end the
// parsing. Exits if the command line is wrong.
static enum options_action options_parse(int argc, char **argv) {
    struct option names[OPTIONS_ROW_COUNT + 1];
    int code;

    options_list_names(names);

    // The + makes getopt_long stop at the program, which has its own options.
    while ((code = getopt_long(argc, argv, "+n:vh", names, NULL)) != -1) {
        const struct options_row *row = options_find(code);

        if (!row) options_fail();
        if (row->action != OPTIONS_RUN) return row->action;
        options_set(row, optarg);
    }
    if (optind >= argc) options_fail();

    options.argv = argv;
    options.command = argv + optind;
    return OPTIONS_RUN;
}
