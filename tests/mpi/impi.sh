#!/usr/bin/env bash
# Runs the distributed tests over Intel MPI, see tests/lib/mpi_tests.sh.
# shellcheck source=tests/lib/mpi_tests.sh
. "$(dirname "$0")/../lib/mpi_tests.sh" impi
