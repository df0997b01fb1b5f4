#!/usr/bin/env bash
# bench_net.sh - compares all_reduce between hosts in idist, Open MPI and gloo, over TCP and in one
# run (make bench-net). Also compares all_reduce and the message rate over TCP on one host.
#
# The hosts are network namespaces behind a bridge, so all of them share the processors of this
# machine. Values are checked before calls are timed, by the rule of rule.h. A point is the median
# of the rounds' p50. The script needs root, iproute2, and the peers that you want to compare.
#
#     tests/bench/bench_net.sh                          # everything, a quarter of an hour
#     PARTS=rate ROUNDS=1 tests/bench/bench_net.sh
#     tests/bench/bench_net.sh report                   # the last run's report again
#
# From the environment:
#     PARTS      rate       links of RATE: shows the share of the bandwidth that is used
#                free       links without a limit
#                small      small calls
#                loopback   TCP on one host; also rate (see bench_peers.sh), except for gloo
#                far        hosts that are 20 ms apart, 100 Mbit/s
#     ROUNDS     3
#     RATE       1000: Mbit/s of each host, in either direction
#     LIBRARIES  idist openmpi4 gloo
#     LIMIT      120: seconds after which a run is ended; its measurements up to then count
set -u
export LC_ALL=C
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
ROUNDS=${ROUNDS:-3}
RATE=${RATE:-1000}
LIMIT=${LIMIT:-120}
read -ra PARTS <<<"${PARTS:-rate free small loopback far}"
read -ra LIBRARIES <<<"${LIBRARIES:-idist openmpi4 gloo}"
OUT=$PWD/build/bench
CSV=$OUT/net.csv
CPUS=$(nproc)
mkdir -p "$OUT"

report() {
    awk -f tests/bench/net.awk -v rate="$RATE" "$CSV"
}

if [ "${1:-}" = report ]; then
    [ -s "$CSV" ] || {
        echo "nothing was measured yet" >&2
        exit 1
    }
    report
    exit
fi

WORK=$(mktemp -d) || exit 1
trap 'rm -rf "$WORK"' EXIT
trap 'exit 130' INT TERM
# shellcheck source=tests/lib/net.sh
. tests/lib/net.sh
net_hosts 8 || exit 1
for ((h = 0; h < NET_COUNT; h++)); do
    mapfile -t names < <(for ((k = 0; k < NET_COUNT; k++)); do echo "10.7.0.$((k + 1)) h$k"; done)
    host_knows $h "${names[@]}"
done

#------------------------------------------------------------------------------
# building
#------------------------------------------------------------------------------

build_library() {
    case $1 in
    idist) make -s --no-print-directory build/idist_perf ;;
    openmpi4)
        command -v mpicc.openmpi >/dev/null &&
            mpicc.openmpi -O2 tests/bench/peer_mpi.c -o "$OUT/peer_openmpi4"
        ;;
    gloo)
        [ -e /usr/include/gloo/context.h ] &&
            c++ -O2 tests/bench/peer_gloo.cc -o "$OUT/peer_gloo" -lgloo -lpthread
        ;;
    *) false ;;
    esac || echo "$1 is left out: it is not installed (make deps), or cannot be built" >&2
}

#------------------------------------------------------------------------------
# running
#------------------------------------------------------------------------------

FAR= # not empty: use the slow network
device() { if [ -n "$FAR" ]; then echo far0; else echo eth0; fi; }
address() { if [ -n "$FAR" ]; then echo "10.9.0.$(($1 + 1))"; else echo "10.7.0.$(($1 + 1))"; fi; }

# run_LIBRARY PLACES ARGS...: PLACES has the host of each rank, or "lo" if all ranks run on this
# host. The output of rank 0 goes to $WORK/out.

run_idist() {
    local places h rank=0 pids=() status=0
    read -ra places <<<"$1"
    shift
    if [ "${places[0]}" = lo ]; then
        IDIST_TRANSPORT=tcp build/idist_perf -n ${#places[@]} "$@" >"$WORK/out"
        return
    fi
    for h in "${places[@]}"; do
        on_host "$h" env RANK=$rank WORLD_SIZE=${#places[@]} MASTER_ADDR="$(address 0)" \
            MASTER_PORT=29500 IDIST_SECRET=0123456789abcdef build/idist_perf "$@" \
            >"$WORK/out.$rank" </dev/null &
        pids+=($!)
        rank=$((rank + 1))
    done
    for h in "${pids[@]}"; do wait "$h" || status=1; done
    cp "$WORK/out.0" "$WORK/out"
    return $status
}

# The program with which mpirun starts processes on another host.
cat >"$WORK/agent" <<END
#!/bin/sh
host=\$1
shift
exec ip netns exec $NET.\${host#h} unshare -u sh -c "hostname \$host; \$*"
END
chmod +x "$WORK/agent"

run_openmpi4() {
    local places hosts command
    read -ra places <<<"$1"
    shift
    command=(mpirun.openmpi -np ${#places[@]} --bind-to none --oversubscribe --mca pml ob1)
    [ ${#places[@]} -le "$CPUS" ] || command+=(--mca mpi_yield_when_idle 1)
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    if [ "${places[0]}" = lo ]; then
        "${command[@]}" --mca btl tcp,self --mca btl_tcp_if_include lo "$OUT/peer_openmpi4" "$@" \
            >"$WORK/out" </dev/null
        return
    fi
    hosts=$(printf 'h%s,' "${places[@]}")
    on_host 0 unshare -u sh -c 'hostname h0; exec "$@"' sh "${command[@]}" --host "${hosts%,}" \
        --mca plm_rsh_agent "$WORK/agent" --mca btl vader,tcp,self \
        --mca btl_tcp_if_include "$(device)" \
        --mca oob_tcp_if_include eth0 "$OUT/peer_openmpi4" "$@" >"$WORK/out" </dev/null
}

run_gloo() {
    local places
    read -ra places <<<"$1"
    shift
    [ "${places[0]}" = lo ] || export PEER_NAMESPACE=/run/netns/$NET. PEER_PLACES="${places[*]}"
    [ -z "$FAR" ] || export PEER_SUBNET=10.9.0.
    "$OUT/peer_gloo" -n ${#places[@]} "$@" >"$WORK/out" </dev/null
    local status=$?
    unset PEER_NAMESPACE PEER_PLACES PEER_SUBNET
    return $status
}

measure() { # PART HOSTS OP ARGS...: one round
    local part=$1 hosts=$2 op=$3 library status
    shift 3
    for library in "${LIBRARIES[@]}"; do
        [ "$op $library" != "rate gloo" ] || continue
        : >"$WORK/out"
        "run_$library" "$hosts" -l "$LIMIT" -op "$op" "$@" 2>"$WORK/err"
        status=$?
        [ $status = 0 ] ||
            echo "$library on $hosts: status $status: $(grep -m 1 . "$WORK/err")" >&2
        awk -F, -v head="$part,$hosts,$library" 'NF == 6 { print head "," $0 }' "$WORK/out" >>"$CSV"
    done
}

limit_links() { # COMMAND (add, del)
    local h limit=()
    [ "$1" = del ] || limit=(tbf rate "${RATE}mbit" burst 256kb latency 50ms)
    for ((h = 0; h < NET_COUNT; h++)); do
        ip netns exec "$NET.$h" tc qdisc "$1" dev eth0 root "${limit[@]}"
        ip netns exec "$NET.s" tc qdisc "$1" dev "p$h" root "${limit[@]}"
    done
}

measure_part() {
    case $1 in
    rate)
        limit_links add
        for hosts in "0 1 2 3" "0 0 1 1 2 2 3 3" "0 1 2 3 4 5 6 7" "0 0 0 1 2 2" \
            "0 0 0 0 1 1 1 1"; do
            measure rate "$hosts" all_reduce -s 4M,16M,64M -x barrier
        done
        limit_links del
        ;;
    free)
        for hosts in "0 1" "0 1 2 3"; do
            measure free "$hosts" all_reduce -s 1M,4M,16M,64M -x barrier
        done
        ;;
    small)
        for hosts in "0 1" "0 1 2 3"; do
            measure small "$hosts" all_reduce -s 4,64,1K,16K -x barrier
        done
        ;;
    loopback)
        for hosts in "lo lo" "lo lo lo lo"; do
            measure loopback "$hosts" all_reduce -s 4,256,4K,16K,64K,1M,4M,16M,64M -x barrier
            measure loopback "$hosts" rate -s 8,1K,64K -x b2b
        done
        ;;
    far)
        net_far delay=20 rate=100
        FAR=1
        measure far "0 1 2 3" all_reduce -s 4,4M,16M -x b2b
        FAR=
        net_near
        ;;
    *)
        echo "bench_net.sh: no part $1" >&2
        exit 2
        ;;
    esac
}

: >"$CSV"
for library in "${LIBRARIES[@]}"; do build_library "$library"; done
for ((round = 1; round <= ROUNDS; round++)); do
    for part in "${PARTS[@]}"; do
        echo "round $round: $part" >&2
        measure_part "$part"
    done
done
report | tee "$OUT/net.txt"
