#!/usr/bin/env bash
# limited.sh - runs every operation on large buffers between hosts whose links have a limited
# bandwidth or a delay. The hosts are network namespaces.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/net.sh
. tests/lib/net.sh
net_hosts 8 || { ok 1 "eight hosts" && done_testing; }
ok_run 0 "the programs build" 300 make -s build/tests/dist/hosts build/tests/dist/stress ||
    done_testing
export IDIST_TEST_NETWORK=/run/netns/$NET. IDIST_TEST_MASTER=10.7.0.1 IDIST_SECRET=0123456789abcdef
export IDIST_LOG=error IDIST_TEST_QUICK=1 IDIST_TEST_SLOW=2

# Sizes of a buffer in MiB at 1 Gbit/s: `large` for the placement that once hung, and `small` for
# all other placements. large_far and small_far are the sizes for distant hosts.
large=64 small=4 large_far=8 small_far=2
[ "${IDIST_TEST_FULL:-0}" = 1 ] && small=64 large_far=64 small_far=16

for h in 0 1 2 3 4 5 6 7; do
    on_host $h tc qdisc add dev eth0 root tbf rate 1gbit burst 256kb latency 50ms
done
passes "1 Gbit/s" eth0 4096 300 "hosts $large 2+2+2+2" \
    "hosts $small 2+2 1+1+1+1+1+1+1+1 3+1+2 4+4"
for h in 0 1 2 3 4 5 6 7; do on_host $h tc qdisc del dev eth0 root; done

net_far delay=5 rate=400
ok $? "a network of 5 ms and 400 Mbit/s"
export IDIST_SOCKET_IFNAME=far0 IDIST_TEST_MASTER=10.9.0.1
passes "5 ms" far0 4096 300 "hosts $large_far 2+2+2+2" \
    "hosts $small_far 1+1+1+1+1+1+1+1 3+1+2"
passes "5 ms" far0 32 300 stress # sends a random amount, in one run only 177 KiB
done_testing
