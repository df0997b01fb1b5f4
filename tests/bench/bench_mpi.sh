#!/usr/bin/env bash
# bench_mpi.sh - measures what idist adds to a call of each installed MPI (make bench-mpi), see
# mpi_overhead.c
#
# From the environment: RANKS (2 4), LIBRARIES (openmpi4 mpich4 openmpi5 mpich5 impi)
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
# shellcheck source=tests/lib/mpi.sh
. tests/lib/mpi.sh
mkdir -p build/bench
failed=0
for library in ${LIBRARIES:-$MPI_LIBRARIES}; do
    missing=$(mpi_missing "$library")
    if [ -n "$missing" ]; then
        echo "$library: $missing"
        continue
    fi
    program=build/bench/mpi_overhead_$library
    mpi_cc "$library" -O2 -DIDIST_IMPLEMENTATION -I. tests/bench/mpi_overhead.c -o "$program" ||
        exit 1
    for n in ${RANKS:-2 4}; do
        # The collectives of both versions of MPICH take milliseconds if ranks outnumber cores, so
        # these cases are skipped.
        case $library in mpich*) [ "$n" -gt "$(nproc)" ] && continue ;; esac
        mpi_run_command "$library" "$n"
        timeout -k 5 120 "${MPI_RUN[@]}" "$program" >build/bench/mpi.out || failed=1
        sed "s/^/$(printf '%-9s' "$library")/" build/bench/mpi.out
    done
done
exit $failed
