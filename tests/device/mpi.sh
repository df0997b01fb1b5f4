#!/usr/bin/env bash
# mpi.sh - tests device memory over idist_mpi.h on the stand-ins for CUDA and NCCL (tests/fake),
# with the first MPI library that is installed.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/on_fake.sh
. tests/lib/on_fake.sh
# shellcheck source=tests/lib/mpi.sh
. tests/lib/mpi.sh

library=
for library in $MPI_LIBRARIES; do
    [ -n "$(mpi_missing "$library")" ] || break
    library=
done
if [ -z "$library" ]; then
    echo "1..0 # SKIP no MPI library (make deps, make peers)"
    exit 0
fi

export IDIST_LOG=error
build_ahead plain
parts plain "plain"
mpi_cc "$library" "${flags[@]}" "${NOT_OPTIMIZED[@]}" -rdynamic tests/fake/test_mpi.c \
    "$PARTS"/{cuda,nccl}.o -o "$WORK/test" -lpthread -ldl -lm >"$WORK/log" 2>&1
ok $? "tests/fake/test_mpi.c builds with $library" || diag <"$WORK/log"
mpi_run_command "$library" 2
for backend in staged ipc nccl; do
    ok_run 0 "device memory over $library, $backend" 60 env FAKE_CUDA_DEVICES=2 \
        FAKE_CUDA_DELAY_US=200000 IDIST_DEVICE_BACKEND=$backend "${MPI_RUN[@]}" "$WORK/test"
done
done_testing
