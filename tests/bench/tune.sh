#!/usr/bin/env bash
# tune.sh - finds the size at which the algorithm with few steps and the algorithm with few bytes
# take equally long (make tune)
#
# Measures each operation with IDIST_ALGO=latency and =bandwidth in turn. Prints the size of one
# rank's contribution from which on the bandwidth algorithm is faster, and the limit in the table of
# src/ring/algo/choose.h (idist__choose_table), which idist uses for up to 8 ranks of one host.
# Between hosts idist computes the limit from the network, see idist__choose_limit in that file.
#
#     tests/bench/tune.sh                                # processes of this host, over TCP
#     LAUNCH='mpirun -n 8 --hostfile hosts' tests/bench/tune.sh
#     LAUNCH='srun -N 8' tests/bench/tune.sh
#
# From the environment:
#     OPS      broadcast reduce all_reduce reduce_scatter all_gather gather scatter all_to_all scan
#     RANKS    4: processes on this host, unless LAUNCH starts them
#     LAUNCH   starts the ranks; it must pass IDIST_ALGO and IDIST_TRANSPORT on to them
#     ROUNDS   3: a point is the median of the rounds' p50
#     FROM TO  256 1M: bytes
set -u
export LC_ALL=C
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
ROUNDS=${ROUNDS:-3}
RANKS=${RANKS:-4}
read -ra OPS <<<"${OPS:-broadcast reduce all_reduce reduce_scatter all_gather gather scatter \
all_to_all scan}"
read -ra START <<<"${LAUNCH:-}"
RANK_OPTION=()
[ -n "${LAUNCH:-}" ] || RANK_OPTION=(-n "$RANKS")
export IDIST_TRANSPORT=${IDIST_TRANSPORT:-tcp} IDIST_LOG=${IDIST_LOG:-error}

WORK=$(mktemp -d) || exit 1
trap 'rm -rf "$WORK"' EXIT
trap 'exit 130' INT TERM

# measure OPERATION: prints lines "ALGORITHM BYTES US", one per round and size
measure() {
    local round algorithm

    for ((round = 0; round < ROUNDS; round++)); do
        for algorithm in latency bandwidth; do
            IDIST_ALGO=$algorithm "${START[@]}" build/idist_perf -op "$1" "${RANK_OPTION[@]}" \
                -b "${FROM:-256}" -e "${TO:-1M}" -f 2 -i 30 --json >"$WORK/json" || return 1
            sed -n 's/.*"count": \([0-9]*\),.*"p50_us": \([0-9.]*\),.*/\1 \2/p' "$WORK/json" |
                awk -v algorithm=$algorithm '{ print algorithm, 4 * $1, $2 }'
        done
    done
}

# Prints the limit in the header's table, in KiB.
limit_of() {
    awk -v kind="{IDIST__${1^^}," '$1 == kind { gsub(",", ""); print $3 }' src/ring/algo/choose.h
}

printf '%-15s %14s %14s   %s\n' operation measured table \
    'latency / bandwidth algorithm in us, by bytes of a rank'

for op in "${OPS[@]}"; do
    measure "$op" >"$WORK/points" || {
        echo "$op failed: see above" >&2
        exit 1
    }
    awk -f tests/bench/tune.awk -v op="$op" -v limit="$(limit_of "$op")" "$WORK/points"
done
