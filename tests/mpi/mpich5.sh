#!/usr/bin/env bash
# Runs the distributed tests over MPICH 5, see tests/lib/mpi_tests.sh.
# shellcheck source=tests/lib/mpi_tests.sh
. "$(dirname "$0")/../lib/mpi_tests.sh" mpich5
