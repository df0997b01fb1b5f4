#!/usr/bin/env bash
# slurm.sh - tests a real Slurm with three nodes on this machine: srun with uneven placement,
# sbatch, salloc, pmi2 and pmix
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/launch.sh
. tests/lib/launch.sh
# shellcheck source=tests/lib/mpi.sh
. tests/lib/mpi.sh
# shellcheck source=tests/lib/slurm.sh
. tests/lib/slurm.sh
reason=$(slurm_missing)
[ -z "$reason" ] || {
    echo "1..0 # skipped: $reason"
    exit 0
}
launch_build
trap 'slurm_stop; rm -rf "$WORK"' EXIT
slurm_start "$WORK/slurm"
ok $? "Slurm is there" || { tail -n 5 "$WORK"/slurm/*.log | diag && done_testing; }
uneven=("launcher slurm, size 5, nodes 1" "rank 0: local 0 of 5, node 0"
    "rank 1: local 1 of 5, node 0"
    "rank 2: local 2 of 5, node 0" "rank 3: local 3 of 5, node 0" "rank 4: local 4 of 5, node 0")

ok_run 0 "srun -N1 -n2" 60 srun -N1 -n2 "$WHO"
says "srun -N1 -n2" "launcher slurm, size 2, nodes 1" "rank 0: local 0 of 2, node 0" \
    "rank 1: local 1 of 2, node 0"
# The nodes are one host, as the ranks find out from the table of hosts.
ok_run 0 "srun -N3 -n5" 60 srun -N3 -n5 "$WHO"
says "srun -N3 -n5" "${uneven[@]}"
# With a different IDIST_HOSTID on each node, the nodes are three hosts with unequal numbers of
# ranks.
ok_run 0 "three hosts" 60 srun -N3 -n5 sh -c "IDIST_HOSTID=\$SLURMD_NODENAME exec '$WHO'"
says "three hosts" "launcher slurm, size 5, nodes 3" "rank 0: local 0 of 3, node 0" \
    "rank 1: local 1 of 3, node 0" \
    "rank 2: local 2 of 3, node 0" "rank 3: local 0 of 1, node 1" "rank 4: local 0 of 1, node 2"
ok_run 0 "three hosts, cyclic" 60 srun -N3 -n5 -m cyclic sh -c \
    "IDIST_HOSTID=\$SLURMD_NODENAME exec '$WHO'"
says "three hosts, cyclic" "launcher slurm, size 5, nodes 3" "rank 0: local 0 of 3, node 0" \
    "rank 1: local 0 of 1, node 1" \
    "rank 2: local 0 of 1, node 2" "rank 3: local 1 of 3, node 0" "rank 4: local 2 of 3, node 0"
# Variables that scripts for torch export, and variables that another job left.
ok_run 0 "torch's variables" 60 srun -N3 -n5 sh -c "RANK=\$SLURM_PROCID WORLD_SIZE=\$SLURM_NTASKS \
    MASTER_ADDR=127.0.0.1 MASTER_PORT=29517 exec '$WHO'"
says "torch's variables" "${uneven[@]}"
ok_run 1 "RANK left over" 60 srun -N1 -n2 sh -c "RANK=0 WORLD_SIZE=1 exec '$WHO'"
[ "$(grep -c 'RANK=0 and WORLD_SIZE=1 are inconsistent with SLURM_PROCID' "$WORK/log")" = 2 ]
ok $? "RANK left over: both ranks say so" || diag <"$WORK/log"
for mpi in pmi2 pmix; do
    ok_run 0 "srun --mpi=$mpi" 60 srun --mpi=$mpi -N1 -n2 "$WHO"
    says "srun --mpi=$mpi" "launcher slurm, size 2, nodes 1" "rank 0: local 0 of 2, node 0" \
        "rank 1: local 1 of 2, node 0"
done
trains "srun" 90 srun -N3 -n3
# cifar10 must get the same weights under srun as with two ranks that it spawns itself.
cifar=(build/cifar10 --side 16 --num-epochs 1 --num-workers 0 --output-path "$WORK/out")
ok_run 0 "cifar10 builds" 120 make -s build/cifar10
ok_run 0 "cifar10, two ranks spawned" 60 "${cifar[@]}" --nproc-per-node 2
own=$(grep -o 'checksum of the weights [0-9a-f]*' "$WORK/log")
rm -rf "$WORK/out"
ok_run 0 "cifar10 under srun" 60 srun -N1 -n2 "${cifar[@]}"
[ -n "$own" ] && [ "$(grep -o 'checksum of the weights [0-9a-f]*' "$WORK/log")" = "$own" ]
ok $? "cifar10 under srun: the same weights" || tail -n 3 "$WORK/log" | diag
# Over MPI. srun starts each library by the protocol that the library supports.
for with in mpich4:pmi2 openmpi4:pmix; do
    reason=$(mpi_missing ${with%:*})
    [ -z "$reason" ] || { skip "srun --mpi=${with#*:} over MPI" "$reason" && continue; }
    mpi_cc ${with%:*} -O1 -DIDIST_IMPLEMENTATION -include idist_mpi.h examples/apps/digits/main.c \
        -o "$WORK/train_mpi"
    TRAIN=$WORK/train_mpi trains "srun --mpi=${with#*:}, ${with%:*}" 60 srun --mpi=${with#*:} -N1 \
        -n2
    grep -q "backend mpi, launcher slurm" "$WORK/log"
    ok $? "srun --mpi=${with#*:}, ${with%:*}: over MPI" || tail -n 5 "$WORK/log" | diag
done

# The body of a batch script is a world of one process, whatever its variables say. Each step is a
# world, even if two steps run at the same time.
cat >"$WORK/batch" <<END
#!/bin/sh
"$WHO"
srun --overlap -N1 -n2 "$WHO" &
srun --overlap -N1 -n2 "$WHO"
wait
echo over
END
ok_run 0 "sbatch" 60 sbatch -W -N1 -n4 -o "$WORK/batch.log" "$WORK/batch"
cp "$WORK/batch.log" "$WORK/log"
two=("launcher slurm, size 2, nodes 1" "rank 0: local 0 of 2, node 0"
    "rank 1: local 1 of 2, node 0")
sort "$WORK/log" >"$WORK/sorted"
for line in "launcher none, size 1, nodes 1" "rank 0: local 0 of 1, node 0" "${two[@]}" \
    "${two[@]}" over; do
    echo "$line"
done | sort | cmp -s - "$WORK/sorted"
ok $? "sbatch: its body is alone, its steps are worlds" || diag <"$WORK/log"
ok_run 0 "salloc" 60 salloc -N1 -n2 "$WHO"
says "salloc" "launcher none, size 1, nodes 1" "rank 0: local 0 of 1, node 0"
done_testing
