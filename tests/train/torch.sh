#!/usr/bin/env bash
# torch.sh - tests examples/apps/torch, the backend idist of torch.distributed, in a real torch.
# Every collective and the training by DDP, PowerSGD and FSDP2 give gloo's results. A lost or late
# rank is named in time. Ignite's tutorial runs. Process groups leave nothing behind.
#
# torch from PyPI takes several GB, so `make peers` does not install it. IDIST_TORCH_PYTHON names a
# Python that has torch and pytorch-ignite; without it, the test uses build/peers/torch, which
# `make build/peers/torch/installed` makes.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"

PYTHON=${IDIST_TORCH_PYTHON:-$ROOT/build/peers/torch/bin/python}
if ! [ -x "$PYTHON" ]; then
    skip "torch" "no IDIST_TORCH_PYTHON, and no make build/peers/torch/installed"
    done_testing
fi
if ! command -v ninja >/dev/null || ! command -v c++ >/dev/null; then
    skip "torch" "no ninja or no C++ compiler"
    done_testing
fi

# The build is kept: it takes a minute, and its folder depends on the sources.
export TORCH_EXTENSIONS_DIR=$ROOT/build/torch
export PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
# Two processes import the module at the same time. One compiles, and the other waits.
import() { PYTHONPATH=examples/apps/torch timeout 900 "$PYTHON" -c 'import idist_torch'; }
import >"$WORK/import.1" 2>&1 &
import >"$WORK/import.2" 2>&1
ok $? "the extension compiles" || tail -n 20 "$WORK/import.2" | diag
wait $!
ok $? "a second process waits for it" || tail -n 20 "$WORK/import.1" | diag
! grep -Eq 'warning: ' "$WORK"/import.?
ok $? "without a warning" || grep -h -m 5 -A 5 'warning: ' "$WORK"/import.? | diag

run_python() { # NAME SECONDS FILE ARGUMENT...
    ok_run 0 "$1" "$2" "$PYTHON" "tests/train/$3" "${@:4}"
}
for n in 2 3 4; do
    run_python "every collective equals gloo's: $n ranks" 100 torch_collectives.py $n
done
run_python "what gloo does not have; groups, futures, threads, arguments" 60 torch_alone.py
run_python "DDP, PowerSGD and FSDP2 have gloo's losses" 100 torch_train.py
for name in killed killed_async killed_receive killed_in_group late late_call late_wait mismatch \
    aborted absent not_destroyed again; do
    run_python "faults: $name" 30 torch_faults.py $name
done
if "$PYTHON" -c 'import ignite' 2>/dev/null; then
    run_python "Ignite's tutorial" 30 torch_ignite.py
else
    skip "Ignite's tutorial" "no pytorch-ignite"
fi

# The example must print what its head promises.
sed -n 's/^    \(.*\)/\1/p' examples/apps/torch/train_ddp.py |
    sed -n '/^2 ranks over/,/^the same weights/p' >"$WORK/expected"
ok_run 0 "train_ddp.py" 60 "$PYTHON" -m torch.distributed.run --nproc-per-node 2 \
    examples/apps/torch/train_ddp.py
grep -vE '^[WE][0-9]{4} ' "$WORK/log" | cmp -s - "$WORK/expected"
ok $? "train_ddp.py prints what its head says" || diff "$WORK/expected" "$WORK/log" | diag
# Different hosts: the ranks meet over TCP.
# shellcheck disable=SC2016 # the ranks expand it
ok_run 0 "two hosts" 60 "$PYTHON" -m torch.distributed.run --nproc-per-node 2 --no-python \
    sh -c 'IDIST_HOSTID=host$RANK IDIST_ADDR=127.0.0.1 exec "$0" examples/apps/torch/train_ddp.py' \
    "$PYTHON"
grep -q '^the same weights' "$WORK/log"
ok $? "two hosts: the same weights"
done_testing
