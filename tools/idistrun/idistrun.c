// idistrun: starts the ranks of a program, watches them, and ends them all when one fails
//
//     cc -O2 tools/idistrun/idistrun.c -o idistrun
//     ./idistrun -n 4 --tag ./sim args
//     ./idistrun --hosts alpha:4,beta:2 ./sim args
//     ./idistrun --doctor            what this machine gives, and a self test of 2 seconds
//
// RANKS. Each rank finds its place in the environment: IDIST_RANK and its siblings, and what
// torchrun would set, so that programs for PyTorch run as well.
//
// HOSTS. With --hosts the idistrun that you call is the head. The head has ssh start one more
// idistrun on every host, a node: the same file, in the same folder. IDIST_RSH is the command, if
// yours needs options: IDIST_RSH="ssh -p 2222 -i key". ssh must not ask for anything. Through ssh's
// stdin the head tells each node what to run, the variables IDIST_* of its environment (IDIST_ADDR
// and IDIST_HOSTID belong to one host and stay), a secret for the job, and later which signals to
// pass on. When that stdin ends, the ranks do. Without ssh run idistrun once on each host, with
// --nnodes, --node-rank, --master-addr and --master-port.
//
// FAILURES. The first rank that fails decides: its code is idistrun's, its name is printed, and all
// others get SIGTERM and, after the grace period, SIGKILL. idist makes the file IDIST_LOST_FILE
// when it has told a rank that another rank was lost. If a rank fails after that, its failure
// decides only if no other is known half a second later, because the lost rank may be on another
// host. If a rank wrote an exception to the file TORCHELASTIC_ERROR_FILE, as torch's @record does,
// the exception is printed as well. SIGINT (Ctrl-C), SIGTERM, SIGHUP and SIGQUIT go to all ranks; a
// second one kills them. Codes of idistrun itself: 2 for a wrong option, 125 for a host that cannot
// be reached, 126 and 127 for a program that cannot be run.
//
// TIMELINE. With --trace each rank writes its events to a file of its own in a temporary folder.
// When all ranks have ended, however they did, these files become one; nodes send theirs to the
// head. After restarts, only the last attempt is in the file.
//
// FILES. Each includes what it uses, and only what stands above it here:
//
//     base.h         messages, errors, memory, the clock
//     options.h      the command line
//     hosts.h        the list of --hosts
//     place.h        where the ranks are among all ranks; the role of this idistrun
//     node.h         what the head and its nodes tell each other
//     folder.h       temporary folders
//     error_json.h   the text in torchrun's error files
//     error_file.h   the files by which a rank says why it fails
//     outcome.h      how the job ends: the first failure, or a signal
//     timeline.h     --trace
//     rank.h         a rank's environment and program
//     child.h        processes: ranks, or one ssh per node
//     output.h       what the children write
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
