#!/usr/bin/env bash
# cifar10.sh - tests examples/apps/cifar10. All ranks end with equal weights, and two ranks get the
# same weights however they are started. A training that was stopped continues bit for bit. Batch
# norms over all ranks, accumulated gradients and clipped gradients have the right values. The
# program reads the files of CIFAR-10 and refuses other files.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/examples.sh
. tests/lib/examples.sh
# shellcheck source=tests/lib/mpi.sh
. tests/lib/mpi.sh

ln -s "$ROOT"/idist*.h "$ROOT/examples" "$WORK"/
build_example examples/apps/cifar10/main.c cifar10 || done_testing
PROGRAM=$WORK/cifar10
OUT=$WORK/out
DIGITS=$ROOT/examples/data/digits.csv
export OMP_NUM_THREADS=1

# A network so small that the ranks of this test finish in a second, with 22 iterations per epoch.
SMALL=(--data "$DIGITS" --output_path "$OUT" --side 16 --width 4 --num_epochs 3
    --num_warmup_epochs 1 --validate_every 1)

checksum() { sed -n 's/.*checksum of the weights \([0-9a-f]*\) on all .*/\1/p' "$@"; }
losses() { sed -n 's/.*Epoch \[\([0-9]*\)\/[0-9]*\]: loss \([0-9.]*\),.*/\1 \2/p' "$@"; }
accuracy() { sed -n 's/.*Best accuracy \([0-9.]*\);.*/\1/p' "$@"; }
# same_losses NAME FILE FILE: compares the loss of each epoch, up to rounding.
same_losses() {
    paste <(losses "$2") <(losses "$3") | awk '
        { d = $2 - $4; if (NF != 4 || d > 0.0005 || d < -0.0005) bad = 1 }
        END { exit bad || NR != 2 }'
    ok $? "$1" || paste <(losses "$2") <(losses "$3") | diag
}
at_least() { awk -v a="${1:-0}" -v b="$2" 'BEGIN { exit !(a >= b) }'; }

says() { # NAME PATTERN [FILE]
    grep -Eq -- "$2" "${3:-$WORK/log}"
    ok $? "$1" || tail -n 8 "${3:-$WORK/log}" | diag
}
same_weights() { # NAME FILE CHECKSUM
    [ -n "$3" ] && [ "$(checksum "$2")" = "$3" ]
    ok $? "$1" || tail -n 5 "$2" | diag
}
refused() { # NAME PATTERN ARGS...
    local name=$1 pattern=$2
    shift 2
    ok_run 2 "$name" 30 "$PROGRAM" "$@" && says "$name: says why" "$pattern"
}

# ---- one rank, two ranks ----
ok_run 0 "1 rank" 60 "$PROGRAM" "${SMALL[@]}"
losses "$WORK/log" | awk \
    'NR == 1 { first = $2 } { last = $2 } END { exit !(NR == 3 && last < 0.8 * first) }'
ok $? "1 rank: the loss falls" || diag <"$WORK/log"
says "1 rank: says so" 'CIFAR10-Training INFO: Best accuracy .* on all 1 ranks'
says "1 rank: metrics" 'Epoch 3 - Evaluation time \(seconds\): [0-9.]+ - Test metrics:'
alone=$(losses "$WORK/log" | head -n 1)
rm -rf "$OUT"

ok_run 0 "2 ranks, spawned" 60 "$PROGRAM" "${SMALL[@]}" --nproc_per_node 2
says "2 ranks: the summary of the run" 'INFO: Run of [0-9.]+ s on 2 ranks: [0-9.]+ examples/s$'
says "2 ranks: the slowest rank" 'INFO:     slowest: rank [01], which computed for [0-9.]+ s;'
says "2 ranks: equal weights" 'on all 2 ranks'
two=$(checksum "$WORK/log")
cp "$WORK/log" "$WORK/two"
# Each batch norm sees half a batch, so the curve differs, but not much.
echo "$alone $(losses "$WORK/log" | head -n 1)" |
    awk '{ d = $2 - $4; exit !(NF == 4 && d < 0.1 && d > -0.1) }'
ok $? "2 ranks: the first epoch is that of 1 rank, almost" || losses "$WORK/log" | diag
ok $(($(find "$OUT" -name 'best_*' | wc -l) != 2)) "the two best networks are kept" ||
    find "$OUT" | diag
ok $(($(find "$OUT" -name 'training_*' | wc -l) != 1)) "and the last of the training" ||
    find "$OUT" | diag
awk -F, '$2 == 3 { n[$3]++ }
    END { exit !(n["train/loss"] && n["train/rate"] && n["train/accuracy"] &&
                 n["test/accuracy"] && n["test/loss"]) }' "$OUT/scalars.csv"
ok $? "the curves of three epochs" || diag <"$OUT/scalars.csv"
refused "2 ranks: another start into that folder" \
    "$OUT already holds .*training_.*--resume_from latest.*another --output_path" \
    "${SMALL[@]}" --nproc_per_node 2
ok $(($(grep -c resume_from "$WORK/log") != 1)) "2 ranks: once" || diag <"$WORK/log"
rm -rf "$OUT"

run_ranks 2 60 "$PROGRAM" "${SMALL[@]}"
ok $? "2 ranks, started by hand" || tail -n 5 "$WORK"/rank.? | diag
same_weights "2 ranks, started by hand: the same weights" "$WORK/rank.0" "$two"
ok "$(wc -l <"$WORK/rank.1")" "2 ranks, started by hand: rank 1 is silent" || diag <"$WORK/rank.1"
rm -rf "$OUT"

ok_run 0 "bf16" 60 "$PROGRAM" "${SMALL[@]}" --nproc_per_node 2 --bf16
says "bf16: equal weights" 'on all 2 ranks'
[ "$(checksum "$WORK/log")" != "$two" ]
ok $? "bf16: not those of full gradients" || diag <"$WORK/log"
losses "$WORK/two" | paste - <(losses "$WORK/log") |
    awk '{ d = $2 - $4; if (NF != 4 || d > 0.1 || d < -0.1) bad = 1 } END { exit bad || NR != 3 }'
ok $? "bf16: about the same losses" || losses "$WORK/log" | diag
rm -rf "$OUT"

# ---- stopped and resumed: in the middle of an epoch, at the end of one, twice ----
for stops in 30 22 "7 50"; do
    from=()
    for stop in $stops; do
        ok_run 0 "stopped after $stop iterations" 60 "$PROGRAM" "${SMALL[@]}" --nproc_per_node 2 \
            --stop_iteration "$stop" \
            "${from[@]}"
        if [ "$stop" = 7 ]; then
            says "stopped after $stop iterations: no accuracy" \
                'Not validated yet; checksum of the weights [0-9a-f]{16} '
            ok "$(grep -c 'Best accuracy' "$WORK/log")" \
                "stopped after $stop iterations: none at all" || diag <"$WORK/log"
        elif [ "$stop" != 22 ]; then
            says "stopped after $stop iterations: the best so far" 'Best accuracy 0\.[0-9]*[1-9]'
        fi
        from=(--resume_from latest)
    done
    ok_run 0 "resumed" 60 "$PROGRAM" "${SMALL[@]}" --nproc_per_node 2 "${from[@]}" --num-workers 0
    same_weights "resumed after $stops: the weights of a training that was not stopped" \
        "$WORK/log" "$two"
    ok "$(grep -c nan "$OUT/scalars.csv")" "resumed after $stops: the curves have numbers only" ||
        diag <"$OUT/scalars.csv"
    [ "$stops" = 30 ] || rm -rf "$OUT"
    [ "$stops" = 30 ] && mv "$OUT" "$WORK/kept"
done
file=$(find "$WORK/kept" -name 'training_*')
ok_run 0 "by its name, when all is done" 30 "$PROGRAM" "${SMALL[@]}" --nproc_per_node 2 \
    --resume-from "$file"
same_weights "by its name: the same weights" "$WORK/log" "$two"
head -c 30000 "$file" >"$WORK/torn"
refused "resumed with another seed" 'other data, seed' "${SMALL[@]}" --resume-from "$file" --seed 7
refused "resumed with more images per step" 'batch_size times accumulate' "${SMALL[@]}" \
    --resume-from "$file" --accumulate 2
refused "a network of another width" 'checkpoint_load' "${SMALL[@]}" --resume-from "$file" --width 6
refused "a torn checkpoint" 'checkpoint_load' "${SMALL[@]}" --resume-from "$WORK/torn"
refused "no checkpoint" 'checkpoint_find' "${SMALL[@]}" --resume-from latest

# ---- batch norms over all ranks: 2 or 3 ranks that share a batch learn what 1 rank does ----
# The learning rate is low, because a higher rate amplifies rounding errors from step to step.
SLOW=("${SMALL[@]}" --num_epochs 2 --num_warmup_epochs 0 --learning_rate 0.001
    --validate_every 2)
slow() { # FILE ARGS...
    local file=$WORK/$1
    shift
    ok_run 0 "slowly: $*" 60 "$PROGRAM" "${SLOW[@]}" "$@"
    mv "$WORK/log" "$file"
    rm -rf "$OUT"
}
slow one --batch_size 60
slow parts --batch_size 60 --nproc_per_node 2
for n in 2 3; do
    slow sync --batch_size 60 --nproc_per_node $n --sync-bn
    same_losses "--sync-bn: $n ranks are as 1" "$WORK/one" "$WORK/sync"
    says "--sync-bn, $n ranks: equal weights" "on all $n ranks" "$WORK/sync"
done
slow sync --batch_size 60 --nproc_per_node 2 --sync-bn --no-overlap
same_losses "--sync-bn after the backward pass: 2 ranks are as 1" "$WORK/one" "$WORK/sync"
paste <(losses "$WORK/one") <(losses "$WORK/parts") |
    awk '{ d = $2 - $4; if (d > 0.0005 || d < -0.0005) other = 1 } END { exit !other }'
ok $? "without --sync-bn they are not" || losses "$WORK/parts" | diag

# ---- gradients of several passes: 1,442 images are 48 passes of 30, or 24 of 60 ----
slow twice --batch_size 30 --accumulate 2
says "--accumulate 2: a step after 2 passes" 'Trained after 48 iterations' "$WORK/twice"
paste <(losses "$WORK/one") <(losses "$WORK/twice") |
    awk '{ d = $2 - $4; if (NF != 4 || d > 0.02 || d < -0.02) bad = 1 } END { exit bad || NR != 2 }'
ok $? "--accumulate 2: about the losses of twice the batch, of which a batch norm sees half" ||
    losses "$WORK/twice" | diag
slow both --batch_size 30 --accumulate 2 --nproc_per_node 2 --sync-bn
same_losses "--accumulate 2: 2 ranks are as 1" "$WORK/twice" "$WORK/both"
slow five --batch_size 30 --accumulate 5 --nproc_per_node 2
says "--accumulate 5: the last step of an epoch has 3 passes" 'Trained after 20 iterations' \
    "$WORK/five"
ok_run 0 "--accumulate 5, stopped" 60 "$PROGRAM" "${SLOW[@]}" --batch_size 30 --accumulate 5 \
    --nproc_per_node 2 --stop_iteration 13
slow resumed --batch_size 30 --accumulate 5 --nproc_per_node 2 --resume_from latest
same_weights "--accumulate 5, resumed: the weights of a training that was not stopped" \
    "$WORK/resumed" "$(checksum "$WORK/five")"

# ---- clipped gradients: a norm that is never reached; half of a norm at twice the rate ----
slow unclipped --batch_size 60 --nproc_per_node 2 --clip 1e6
same_weights "--clip 1e6: changes nothing" "$WORK/unclipped" "$(checksum "$WORK/parts")"
slow clipped --nproc_per_node 2 --weight_decay 0 --learning_rate 0.25 --clip 0.0625
slow half --nproc_per_node 2 --weight_decay 0 --learning_rate 0.5 --clip 0.03125
same_weights "--clip: the length of a step is rate times norm" "$WORK/half" \
    "$(checksum "$WORK/clipped")"

# ---- two nodes on this host, each with its own workers ----
# nodes RANKS ARGS...: node 0 writes to $WORK/node.0
nodes() {
    local n=$1 port node pids=() failed=0
    shift
    port=$(free_port)
    for node in 0 1; do
        IDIST_HOSTID=node$node IDIST_SECRET=0123456789abcdef timeout -k 5 60 "$PROGRAM" \
            "${SMALL[@]}" --nproc_per_node "$n" --nnodes 2 --node-rank $node \
            --master-addr 127.0.0.1 --master-port "$port" "$@" >"$WORK/node.$node" 2>&1 </dev/null &
        pids+=($!)
    done
    for node in 0 1; do wait "${pids[$node]}" || failed=1; done
    rm -rf "$OUT"
    return $failed
}
nodes 1
ok $? "2 nodes with 1 rank" || tail -n 5 "$WORK"/node.? | diag
says "2 nodes with 1 rank: 2 nodes" 'num nodes: 2' "$WORK/node.0"
same_weights "2 nodes with 1 rank: the weights of 2 ranks" "$WORK/node.0" "$two"
ok "$(wc -l <"$WORK/node.1")" "2 nodes with 1 rank: node 1 is silent" || diag <"$WORK/node.1"
nodes 2 --sync-bn
ok $? "2 nodes with 2 ranks" || tail -n 5 "$WORK"/node.? | diag
says "2 nodes with 2 ranks: equal weights" 'on all 4 ranks' "$WORK/node.0"
says "2 nodes with 2 ranks: 2 of each" 'num processes per node: 2' "$WORK/node.0"

# ---- the confusion matrix: test images of class 3 look like images of class 5 ----
# The bits of the class number plus one select the bright quarters of an image.
perl -e 'for $i (0 .. 19) { for $c (0 .. 9) {
    $bits = 1 + ($c == 3 && $i % 5 == 4 ? 5 : $c);
    print join(",", map { ($bits >> (int($_ / 32) * 2 | $_ / 4 % 2)) % 2 * 16 } 0 .. 63), ",$c\n"
} }' >"$WORK/swapped.csv"
ok_run 0 "confused classes" 60 "$PROGRAM" --data "$WORK/swapped.csv" --output_path "$OUT" \
    --side 16 --width 4 --batch_size 16 --num_epochs 12 --nproc_per_node 2
says "confused classes: the pair that is" 'Most confused: 3 is taken for 5, 4 of 4 times'
rm -rf "$OUT"

# ---- CIFAR-10's files: five of 8 images, and one of 9, in which class k has brightness 20 k ----
mkdir "$WORK/cifar"
perl -e 'for $f (0 .. 5) {
    open F, ">:raw", $f ? "$ARGV[0]/data_batch_$f.bin" : "$ARGV[0]/test_batch.bin";
    for $i (0 .. ($f ? 7 : 8)) {
        $c = ($f + $i) % 10; print F pack("C", $c), pack("C", 20 * $c + $i) x 3072
    }
}' "$WORK/cifar"
CIFAR=(--data "$WORK/cifar" --output_path "$OUT" --width 2 --batch_size 10 --num_epochs 2)
ok_run 0 "CIFAR-10" 60 "$PROGRAM" "${CIFAR[@]}" --nproc-per-node 2
says "CIFAR-10: all images" "40 images to train, 9 to test"
says "CIFAR-10: equal weights" 'on all 2 ranks'
truncate -s -1 "$WORK/cifar/data_batch_3.bin"
refused "a torn file" 'data_batch_3.bin: image 8: the last record is torn' "${CIFAR[@]}"
says "a torn file: what it should be" 'MD5 c32a1d4ab5d03f1284b67883e8d87530'
says "a torn file: how long it should be" 'test_batch.bin of 30,730,000 bytes each'
printf '\012' | dd of="$WORK/cifar/data_batch_2.bin" bs=1 seek=3073 conv=notrunc status=none
refused "a label of 10" 'data_batch_2.bin: image 2: a label is above 9' "${CIFAR[@]}" \
    --nproc_per_node=2
: >"$WORK/cifar/data_batch_1.bin"
refused "an empty file" 'data_batch_1.bin: .*no image' "${CIFAR[@]}"
rm "$WORK/cifar/data_batch_1.bin"
refused "a missing file" 'data_batch_1.bin: No such file' "${CIFAR[@]}"
says "a missing file: where it is from" 'cifar-10-binary.tar.gz from https://.*kriz/cifar.html'
ok "$(grep -c Python "$WORK/log")" "a missing file: nothing about other versions" ||
    diag <"$WORK/log"
mkdir "$WORK/cifar-10-batches-py"
for name in data_batch_{1..5} test_batch batches.meta; do printf '\200\002}q\001' \
    >"$WORK/cifar-10-batches-py/$name"; done
refused "the Python version" \
    'data_batch_1 is of .*Python version.* cifar-10-binary.tar.gz from https://.*kriz/cifar.html' \
    --data "$WORK/cifar-10-batches-py"
rm -rf "$OUT"
refused "no such data" 'nothing: No such file' --data "$WORK/nothing"
head -c 5000 "$DIGITS" >"$WORK/torn.csv"
refused "torn digits" 'torn.csv:[0-9]+: expected 65 numbers' --data "$WORK/torn.csv"

# ---- options ----
refused "an unknown option" 'unknown option --nonsense' --nonsense
refused "no value" '--seed needs a value' --seed
refused "a value too much" '--bf16 takes no value' --bf16=yes
refused "no number" '--num_epochs three: expected a whole number' --num-epochs three
refused "half an epoch" '--num_epochs 0.5: expected a whole number' --num-epochs 0.5
refused "a number out of bounds" '--momentum 2: expected a number from 0 to 1' --momentum 2
refused "no such model" '--model resnet9: expected resnet8' --model resnet9
refused "no such side" '--side 20: expected 16 or 32' --side 20
refused "a batch of more than there is" '--batch_size 2000 is more than' "${SMALL[@]}" \
    --batch-size 2000
refused "several nodes without workers" '--nnodes 2: expected --nproc_per_node' --nnodes 2
refused "a node of too high a rank" '--node_rank 2: expected less than --nnodes' --nnodes 2 \
    --node-rank 2 --nproc-per-node 1
ok_run 0 "--help" 30 "$PROGRAM" --num-warmup-epochs 7 --help
says "--help: all options, with their defaults" '--num_warmup_epochs .* \[4\]'
says "--help: where CIFAR-10 is from" 'cifar-10-binary.tar.gz from https://.*170,052,171 bytes'
says "--help: its checksum" 'MD5 c32a1d4ab5d03f1284b67883e8d87530'
says "--help: its files" '30,730,000 bytes each'

# ---- launchers: each must give the weights of two ranks ----
if command -v torchrun >/dev/null; then
    ok_run 0 "torchrun" 60 torchrun --no_python -r 1 -t 1 --log_dir "$WORK/torch" --standalone \
        --nnodes 1 \
        --nproc_per_node 2 "$PROGRAM" "${SMALL[@]}"
    same_weights "torchrun: the same weights" "$WORK/log" "$two"
else
    skip "torchrun" "no torchrun: Debian package python3-torch"
fi
for library in openmpi4 mpich4; do
    reason=$(mpi_missing $library)
    [ -n "$reason" ] && skip "$library" "$reason" && continue
    mpi_run_command $library 2
    ok_run 0 "$library" 60 "${MPI_RUN[@]}" "$PROGRAM" "${SMALL[@]}" --output_path "$WORK/$library"
    same_weights "$library: the same weights" "$WORK/log" "$two"
done

# ---- the command in the program's head, with a third of the epochs ----
ok_run 0 "8 epochs" 120 sh -c \
    "cd '$WORK' && ./cifar10 --side 16 --nproc-per-node 2 --num_epochs 8"
percent=$(accuracy "$WORK/log")
at_least "$percent" 0.95
ok $? "8 epochs: an accuracy of 0.95 or more (${percent:-none})" || tail -n 5 "$WORK/log" | diag
done_testing
