// idistrun: starts the ranks of a program, watches them, and ends them all when one fails
//
//     cc -O2 tools/idistrun/idistrun.c -o idistrun
//     ./idistrun -n 4 --tag ./sim args
//     ./idistrun --hosts alpha:4,beta:2 ./sim args
//     ./idistrun --doctor            a report on this machine, and a 2-second self test
//
// RANKS. Each rank learns its place from environment variables: IDIST_RANK and related variables,
// and the variables that torchrun would set, so that PyTorch programs run too.
//
// HOSTS. With --hosts, the idistrun that you start is the head. Through ssh, the head starts
// another idistrun, called a node, on every host. The idistrun file and the working folder must
// have the same paths on every host. If ssh needs options, set IDIST_RSH to the command:
// IDIST_RSH="ssh -p 2222 -i key". ssh must not prompt for anything. The head sends its orders to a
// node through ssh's stdin. The orders contain the command, the head's IDIST_* variables, a secret
// for the job, and later the signals to pass on. IDIST_ADDR and IDIST_HOSTID belong to one host and
// are not sent. When a node's stdin ends, the node ends its ranks. Without ssh, run idistrun once
// on each host, with --nnodes, --node-rank, --master-addr and --master-port.
//
// FAILURES. The first rank that fails decides the outcome: idistrun exits with that rank's code and
// prints which rank failed. All other ranks get SIGTERM and, after the grace period, SIGKILL. When
// idist has told a rank that another rank was lost, idist creates the file IDIST_LOST_FILE. If a
// rank fails after that, the lost rank may be on another host. So this failure decides only if no
// other failure is known half a second later. If a rank wrote an exception to the file
// TORCHELASTIC_ERROR_FILE, as torch's @record does, idistrun prints the exception too. SIGINT
// (Ctrl-C), SIGTERM, SIGHUP and SIGQUIT go to all ranks; a second signal kills the ranks. The exit
// code of idistrun itself is 2 for a wrong option, 125 for a host that cannot be reached, and 126
// or 127 for a program that cannot be run.
//
// TIMELINE. With --trace, each rank writes its events to its own file in a temporary folder. When
// all ranks have ended, for whatever reason, idistrun merges these files. Nodes send their events
// to the head. After restarts, the result contains only the last attempt.
//
// FILES. Each file includes the files that it uses, and only files that are listed above it here:
//
//     base.h         messages, errors, memory, the clock
//     options.h      the command line
//     hosts.h        the list of --hosts
//     place.h        the place of this host's ranks among all ranks; the role of this idistrun
//     node.h         the messages between the head and its nodes
//     folder.h       temporary folders
//     error_json.h   the text in torchrun's error files
//     error_file.h   the files in which a rank reports why it fails
//     outcome.h      how the job ends: the first failure, or a signal
//     timeline.h     --trace
//     rank.h         a rank's environment and program
//     child.h        processes: ranks, or one ssh per node
//     output.h       the output of the children
//     job.h          the loop: signals, failures, restarts
//     doctor*.h      --doctor, the only part that calls idist
#define _GNU_SOURCE
#define IDIST_IMPLEMENTATION
#include "../../idist.h"

#include "doctor.h"
#include "job.h"
#include "node.h"
#include "options.h"
#include "place.h"

#include <stdio.h>

int main(int argc, char **argv) {
    bool is_node = node_is_asked_for(argc, argv);
    struct place_orders orders = {0};

    if (is_node) {
        node_hear_orders(&orders, &argc, &argv);
        node_say_runs();
    }

    switch (options_parse(argc, argv)) {
    case OPTIONS_RUN: break;
    case OPTIONS_HELP: fputs(options_usage, stdout); return 0;
    case OPTIONS_DOCTOR: return doctor_run();
    }

    place_choose(is_node ? &orders : NULL);
    return job_run(orders.restart);
}
