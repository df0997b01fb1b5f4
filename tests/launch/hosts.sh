#!/usr/bin/env bash
# hosts.sh - runs the distributed tests that place their ranks on several hosts. The hosts are
# network namespaces, connected by a fast switch, by links of 300 Mbit/s, and by a slow network that
# loses and reorders packets.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/net.sh
. tests/lib/net.sh
net_hosts 8 || { ok 1 "eight hosts" && done_testing; }
tests=(hosts stress all_reduce broadcast all_to_all v_forms p2p groups)
ok_run 0 "the programs build" 300 make -s "${tests[@]/#/build/tests/dist/}" || done_testing
export IDIST_TEST_NETWORK=/run/netns/$NET. IDIST_TEST_MASTER=10.7.0.1 IDIST_SECRET=0123456789abcdef
export IDIST_LOG=error IDIST_TEST_QUICK=1 IDIST_TEST_SLOW=2

IDIST_TEST_THIN=3 passes "a switch" eth0 32 150 "${tests[@]}"

for h in 0 1 2 3 4 5 6 7; do
    on_host $h tc qdisc add dev eth0 root tbf rate 300mbit burst 128kb latency 50ms
done
IDIST_TEST_THIN=20 passes "300 Mbit/s" eth0 32 150 stress all_reduce groups
for h in 0 1 2 3 4 5 6 7; do on_host $h tc qdisc del dev eth0 root; done

net_far delay=2 loss=1 reorder=20
ok $? "a slow network"
export IDIST_SOCKET_IFNAME=far0 IDIST_TEST_MASTER=10.9.0.1
IDIST_TEST_THIN=40 passes "loss and reordering" far0 32 150 p2p all_reduce groups
done_testing
