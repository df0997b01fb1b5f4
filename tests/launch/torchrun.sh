#!/usr/bin/env bash
# torchrun.sh - tests the real torchrun of Debian's torch: one node, two nodes, and a restart
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/launch.sh
. tests/lib/launch.sh
command -v torchrun >/dev/null || {
    echo "1..0 # skipped: no torchrun: Debian package python3-torch"
    exit 0
}
launch_build
# -r 1 -t 1, because torch 1.13 cannot use its own default under Python 3.11
torchrun_with=(torchrun --no_python -r 1 -t 1 --log_dir "$WORK/torch")
export OMP_NUM_THREADS=1

ok_run 0 "static" 60 "${torchrun_with[@]}" --nproc_per_node 3 --master_port "$(free_port)" "$WHO"
says "static" "launcher torchrun, size 3, nodes 1" "rank 0: local 0 of 3, node 0" \
    "rank 1: local 1 of 3, node 0" \
    "rank 2: local 2 of 3, node 0"
trains "standalone" 60 "${torchrun_with[@]}" --standalone --nnodes 1 --nproc_per_node 2

# Two agents run on one machine, with 2 and 1 workers. The workers meet in the agent's store. Either
# agent may be the first node.
nodes=("${torchrun_with[@]}" --nnodes 2 --rdzv_backend c10d --rdzv_endpoint
    "127.0.0.1:$(free_port)" --rdzv_id job)
timeout -k 5 60 "${nodes[@]}" --nproc_per_node 1 "$WHO" >"$WORK/other" 2>&1 </dev/null &
other=$!
ok_run 0 "two nodes by c10d" 60 "${nodes[@]}" --nproc_per_node 2 "$WHO"
wait $other
ok $? "two nodes by c10d: the other one" || tail -n 10 "$WORK/other" | diag
cat "$WORK/other" >>"$WORK/log"
says "two nodes by c10d" "launcher torchrun, size 3, nodes 1" "rank 0: local 0 of 3, node 0" \
    "rank 1: local 1 of 3, node 0" \
    "rank 2: local 2 of 3, node 0"

# A worker fails once. The agent starts all workers again, with a higher restart count.
cat >"$WORK/once" <<END
#!/bin/sh
[ "\$RANK" = 1 ] && mkdir "$WORK/failed" 2>/dev/null && exit 7
exec "$WHO"
END
chmod +x "$WORK/once"
ok_run 0 "a restart" 60 "${torchrun_with[@]}" --standalone --nnodes 1 --nproc_per_node 2 \
    --max_restarts 1 "$WORK/once"
says "a restart" "launcher torchrun, size 2, nodes 1" "rank 0: local 0 of 2, node 0" \
    "rank 1: local 1 of 2, node 0"

# idistrun is the only worker, and tells torchrun which of its ranks failed.
cat >"$WORK/crash" <<'END'
#!/bin/sh
[ "$RANK" = 1 ] && kill -SEGV $$
exec sleep 30
END
chmod +x "$WORK/crash"
cp build/idistrun "$WORK"
ok_run 1 "idistrun under torchrun" 60 "${torchrun_with[@]}" --standalone --nnodes 1 \
    --nproc_per_node 1 \
    "$WORK/idistrun" -n 2 "$WORK/crash"
grep -q 'exitcode *: 139' "$WORK/log" &&
    grep -q 'traceback *: rank 1 on host .*: killed by signal 11 (Segmentation fault)' "$WORK/log"
ok $? "torchrun's report names idistrun's rank" || tail -n 15 "$WORK/log" | diag
done_testing
