#!/usr/bin/env bash
# horovod.sh - tests the real horovodrun of the PyPI package horovod, built without frameworks, with
# its controllers gloo and mpi
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/mpi.sh
. tests/lib/mpi.sh
# shellcheck source=tests/lib/launch.sh
. tests/lib/launch.sh
HOROVOD=$ROOT/build/peers/horovod
[ -x "$HOROVOD/bin/horovodrun" ] || {
    echo "1..0 # skipped: no horovodrun: PyPI package horovod (make peers)"
    exit 0
}
launch_build
# horovodrun refuses a controller that no framework was built with. But starting processes needs no
# framework.
cat >"$WORK/start.py" <<'END'
import horovod.runner.launch as launch

launch.gloo_built = launch.mpi_built = lambda verbose=False: True
if __name__ == "__main__":
    launch.run_commandline()
END
# Without --disable-cache, horovodrun would leave a file in the user's home folder.
horovodrun=("$HOROVOD/bin/python3" "$WORK/start.py" --disable-cache)
# "late": rank 2 waits until the file "go" exists. "fails": rank 1 ends before it joins the other
# ranks.
cat >"$WORK/rank" <<END
#!/bin/sh
case \$1-\${HOROVOD_RANK:-\$OMPI_COMM_WORLD_RANK} in
late-2) touch "$WORK/waits"; until [ -e "$WORK/go" ]; do sleep 0.05; done ;;
fails-1) exit 7 ;;
esac
exec "$WHO"
END
chmod +x "$WORK/rank"
two=("rank 0: local 0 of 2, node 0" "rank 1: local 1 of 2, node 0")
three=("rank 0: local 0 of 3, node 0" "rank 1: local 1 of 3, node 0" "rank 2: local 2 of 3, node 0")

controller() { # NAME LAUNCHER END COMMAND...: END is the status of a job whose rank ended with 7
    local name=$1 launcher=$2 end=$3 other
    shift 3
    ok_run 0 "$name: three ranks" 30 "$@" -np 3 "$WHO"
    says "$name" "launcher $launcher, size 3, nodes 1" "${three[@]}"
    # Runs a whole job while the ranks of another job are still joining.
    rm -f "$WORK/waits" "$WORK/go"
    timeout -k 5 60 "$@" -np 3 "$WORK/rank" late >"$WORK/other" 2>&1 </dev/null &
    other=$!
    timeout 20 sh -c "until [ -e '$WORK/waits' ]; do sleep 0.05; done"
    ok_run 0 "$name: two ranks beside another job" 30 "$@" -np 2 -H localhost:2 "$WHO"
    says "$name: two ranks beside another job" "launcher $launcher, size 2, nodes 1" "${two[@]}"
    touch "$WORK/go"
    wait $other
    ok $? "$name: and that one"
    cp "$WORK/other" "$WORK/log"
    says "$name: and that one" "launcher $launcher, size 3, nodes 1" "${three[@]}"
    # The failed rank ends the job. The other ranks do not wait for it until their time-out.
    ok_run "$end" "$name: a rank that fails ends the job" 20 "$@" -np 3 "$WORK/rank" fails
    if [ "$end" -ne 7 ]; then
        grep -q 'Exit code: 7$' "$WORK/log"
        ok $? "$name: which says how the rank ended" || tail -n 15 "$WORK/log" | diag
    fi
    ! readlink /proc/[0-9]*/exe 2>/dev/null | grep -qxF "$WHO"
    ok $? "$name: and nothing stays"
    trains "$name" 60 "$@" -np 2
}

controller gloo horovodrun 1 "${horovodrun[@]}" --gloo
# horovodrun takes two names of this machine for two nodes, and does not give them the address of
# rank 0.
nodes=("${horovodrun[@]}" --gloo -np 3 -H "localhost:2,127.0.0.1:1" "$WHO")
ok_run 1 "gloo: two nodes" 30 "${nodes[@]}"
grep -q "MASTER_ADDR is not set" "$WORK/log"
ok $? "gloo: two nodes need MASTER_ADDR" || tail -n 15 "$WORK/log" | diag
ok_run 0 "gloo: two nodes with MASTER_ADDR" 30 env MASTER_ADDR=127.0.0.1 \
    MASTER_PORT="$(free_port)" "${nodes[@]}"
says "gloo: two nodes with MASTER_ADDR" "launcher horovodrun, size 3, nodes 1" "${three[@]}"

# horovodrun takes the first mpirun in PATH. It refuses the mpirun of Debian's MPICH with "Unknown
# MPI implementation".
reason=$(mpi_missing openmpi4)
if [ -n "$reason" ]; then
    skip "openmpi4" "$reason"
else
    mkdir "$WORK/bin"
    ln -s "$(command -v mpirun.openmpi)" "$WORK/bin/mpirun"
    controller openmpi4 openmpi 7 env PATH="$WORK/bin:$PATH" "${horovodrun[@]}" --mpi
fi
done_testing
