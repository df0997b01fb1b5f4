#!/usr/bin/env bash
# mpi.sh - tests programs without MPI that the mpirun or mpiexec of five MPIs starts. Each process
# must find its rank, the number of ranks and the other ranks.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/mpi.sh
. tests/lib/mpi.sh
# shellcheck source=tests/lib/launch.sh
. tests/lib/launch.sh
launch_build

for library in $MPI_LIBRARIES; do
    reason=$(mpi_missing "$library")
    if [ -n "$reason" ]; then
        skip "$library" "$reason"
        continue
    fi
    case $library in openmpi*) name=openmpi ;; *) name=hydra ;; esac
    mpi_run_command "$library" 3
    ok_run 0 "$library: three ranks" 30 "${MPI_RUN[@]}" "$WHO"
    says "$library" "launcher $name, size 3, nodes 1" "rank 0: local 0 of 3, node 0" \
        "rank 1: local 1 of 3, node 0" \
        "rank 2: local 2 of 3, node 0"
    ok_run 0 "$library: behind a shell" 30 "${MPI_RUN[@]}" sh -c "'$WHO'; exit \$?"
    says "$library, behind a shell" "launcher $name, size 3, nodes 1" \
        "rank 0: local 0 of 3, node 0" \
        "rank 1: local 1 of 3, node 0" "rank 2: local 2 of 3, node 0"
    # Two jobs at the same time meet at different places.
    mpi_run_command "$library" 2
    timeout -k 5 30 "${MPI_RUN[@]}" "$WHO" >"$WORK/other" 2>&1 </dev/null &
    other=$!
    ok_run 0 "$library: beside another job" 30 "${MPI_RUN[@]}" "$WHO"
    wait $other
    ok $? "$library: and that one" || diag <"$WORK/other"
    trains "$library" 60 "${MPI_RUN[@]}"
done

# Rank 1 never joins. Rank 0 reports this at its time-out, although its blocking connection to the
# launcher has no time-out.
if [ -z "$(mpi_missing mpich4)" ]; then
    # shellcheck disable=SC2016 # for the shell of the rank
    IDIST_INIT_TIMEOUT_MS=1000 timeout -k 5 20 mpiexec.mpich -n 2 sh -c \
        'if [ $PMI_RANK = 1 ]; then until [ -e "$2" ]; do sleep 0.05; done; exit 0; fi
        "$1"; echo "status $?"; touch "$2"; sleep 2' sh "$WHO" "$WORK/has_given_up" \
        >"$WORK/log" 2>&1 </dev/null
    grep -q "not all ranks reached the launcher.s barrier" "$WORK/log" &&
        grep -q "status 1" "$WORK/log"
    ok $? "mpich4: a rank that never comes is noticed at the time-out" || diag <"$WORK/log"
fi

# Hydra without an inherited connection
if [ -z "$(mpi_missing mpich4)" ]; then
    ok_run 0 "mpich4 -pmi-port" 30 mpiexec.mpich -pmi-port -n 2 "$WHO"
    says "mpich4 -pmi-port" "launcher hydra, size 2, nodes 1" "rank 0: local 0 of 2, node 0" \
        "rank 1: local 1 of 2, node 0"
else
    skip "mpich4 -pmi-port" "$(mpi_missing mpich4)"
fi
done_testing
