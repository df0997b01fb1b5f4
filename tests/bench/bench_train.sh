#!/usr/bin/env bash
# bench_train.sh - measures how cifar10 scales from one rank to several at a fixed batch size per
# rank, how much waiting the overlap hides, what idist_ddp adds to all_reduces of the same bytes,
# and what idist_zero saves (make bench-train)
#
#     RANKS=2 ROUNDS=5 EPOCHS=3 BATCH=32 ARGS="--side 16" tests/bench/bench_train.sh
#
# Every rank has its own processor (IDIST_BIND=core). The ways take turns within a round. The report
# shows medians over all epochs except the first of each run. BATCH is the batch size of one rank.
set -eu
cd "$(dirname "$0")/../.."
RANKS=${RANKS:-2} ROUNDS=${ROUNDS:-5} EPOCHS=${EPOCHS:-3} BATCH=${BATCH:-32} ARGS=${ARGS:---side 16}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
export IDIST_BIND=core IDIST_LOG=error

cc -O2 -DIDIST_IMPLEMENTATION examples/apps/cifar10/main.c -o "$WORK/cifar10"
cc -O2 -DIDIST_IMPLEMENTATION -I. tests/bench/ddp_overhead.c -o "$WORK/ddp_overhead"
cc -O2 -DIDIST_IMPLEMENTATION -I. tests/bench/zero_overhead.c -o "$WORK/zero_overhead"

# way NAME RANKS OPTIONS...: appends the images per second and the share of time spent waiting to a
# file of that name, for each epoch except the first
way() {
    local name=$1 ranks=$2
    shift 2
    # shellcheck disable=SC2086 # a list
    "$WORK/cifar10" --nproc-per-node "$ranks" --batch-size $((BATCH * ranks)) --num-workers 0 \
        --num-epochs "$EPOCHS" \
        --validate-every 100000 --checkpoint-every 1000000 --log-every-iters 1000000 --output-path \
        "$WORK/out" $ARGS "$@" \
        >"$WORK/log" 2>&1 || { tail -n 5 "$WORK/log"; exit 1; }
    sed -n 's|.*Epoch \[\([0-9]*\)/.* \([0-9]*\) images/s, \([0-9.]*\) %.*|\1 \2 \3|p' "$WORK/log" |
        awk '$1 > 1 { print $2, $3 }' >>"$WORK/$name"
    rm -rf "$WORK/out"
}

for ((round = 0; round < ROUNDS; round++)); do
    way one 1
    way overlap "$RANKS"
    way plain "$RANKS" --no-overlap
done

median() { # FILE COLUMN
    awk -v k="$2" '{ print $k }' "$1" | sort -n |
        awk '{ x[NR] = $1 }
            END { m = int((NR + 1) / 2); print NR % 2 ? x[m] : (x[m] + x[m + 1]) / 2 }'
}

awk -v one="$(median "$WORK/one" 1)" -v overlap="$(median "$WORK/overlap" 1)" -v \
    plain="$(median "$WORK/plain" 1)" \
    -v wait_overlap="$(median "$WORK/overlap" 2)" -v wait_plain="$(median "$WORK/plain" 2)" -v \
    n="$RANKS" -v batch="$BATCH" '
BEGIN {
    printf "cifar10, batch of %d per rank, medians\n\n", batch
    print "| ranks | overlap | images/s | efficiency | in wait for gradients |"
    print "|---|---|---|---|---|"
    printf "| 1 | - | %.0f | 1 | - |\n", one
    printf "| %d | no | %.0f | %.2f | %.1f %% |\n", n, plain, plain / one / n, wait_plain
    printf "| %d | yes | %.0f | %.2f | %.1f %% |\n\n", n, overlap, overlap / one / n, wait_overlap
    # waiting per image, with and without overlap
    hidden = 1 - (wait_overlap / overlap) / (wait_plain / plain)
    printf "hidden by overlap: %.0f %% of the wait\n\n", 100 * hidden
}'
"$WORK/ddp_overhead" "$RANKS" 101
echo
"$WORK/zero_overhead" "$RANKS" "$ROUNDS"
