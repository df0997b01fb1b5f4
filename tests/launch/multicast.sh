#!/usr/bin/env bash
# multicast.sh - tests ranks on several hosts that find rank 0 through a multicast group. Two jobs
# in one group must not mix.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/launch.sh
. tests/lib/launch.sh
N=idist$$
if ! command -v ip >/dev/null || ! ip netns add "${N}a" 2>/dev/null; then
    echo "1..0 # skipped: no network namespaces: Debian package iproute2, and root"
    exit 0
fi
trap 'for h in a b c; do ip netns del "$N$h" 2>/dev/null; done; rm -rf "$WORK"' EXIT
launch_build

# Three hosts: a has a bridge, to which b and c are connected.
ip netns add "${N}b" && ip netns add "${N}c" &&
    ip -n "${N}a" link add br0 type bridge mcast_snooping 0 &&
    ip -n "${N}a" addr add 10.7.0.1/24 dev br0 && ip -n "${N}a" link set br0 up
for h in b:2 c:3; do
    ip -n "${N}a" link add "to${h%:*}" type veth peer name eth0 netns "$N${h%:*}" &&
        ip -n "${N}a" link set "to${h%:*}" master br0 up && ip -n "$N${h%:*}" link set eth0 up &&
        ip -n "$N${h%:*}" addr add "10.7.0.${h#*:}/24" dev eth0
done
for h in a b c; do
    ip -n "$N$h" link set lo up && ip -n "$N$h" route add 239.0.0.0/8 dev \
        "$([ $h = a ] && echo br0 || echo eth0)"
done
ok $? "three network namespaces"

# on HOST RANK JOB: starts one rank in the background
on() {
    RANK=$2 WORLD_SIZE=3 TORCHELASTIC_RUN_ID=$3 IDIST_INIT_METHOD=tcp://239.1.2.3:4567 \
        IDIST_SECRET=0123456789abcdef \
        IDIST_HOSTID=$1 ip netns exec "$N$1" timeout -k 5 30 "$WHO" >"$WORK/$3.$2" 2>&1 </dev/null &
}
# Two jobs run at the same time. Rank 0 of job one starts last, and job two has each rank on another
# host than job one.
on b 1 one && on c 2 one && on a 2 two && on b 0 two && on c 1 two && sleep 0.5 && on a 0 one
wait
for job in one two; do
    cat "$WORK/$job".? >"$WORK/log"
    says "job $job" "launcher torchrun, size 3, nodes 3" "rank 0: local 0 of 1, node 0" \
        "rank 1: local 0 of 1, node 1" \
        "rank 2: local 0 of 1, node 2"
done
done_testing
