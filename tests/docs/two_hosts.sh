#!/usr/bin/env bash
# two_hosts.sh - runs README.md's commands for two hosts, exactly as printed, in two network
# namespaces that know each other as node0 and node1. Each host has its own folder, with copies of
# the three files that the text names.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/net.sh
. tests/lib/net.sh
net_hosts 2 || { ok 1 "two hosts" && done_testing; }
for h in 0 1; do host_knows $h "10.7.0.1 node0" "10.7.0.2 node1"; done
compile_once

# part TEXT: prints the commands below the comment "# TEXT:" in the block for two hosts.
part() {
    awk -v text="# $1:" '
        /^<!-- test: hosts/ { here = 1 }
        /^```/ && inside { exit }
        /^```/ { inside = here; next }
        inside && /^#/ { mine = $0 == text; next }
        inside && mine { print }' README.md
}
part "once, on node0; then scp -p copies the file to node1" >"$WORK/once.sh"
for h in 0 1; do part "on node$h" >"$WORK/node$h.sh"; done
for file in once node0 node1; do
    [ -s "$WORK/$file.sh" ]
    ok $? "README.md: there are commands for $file"
done

awk '/^```c$/ { inside = 1; next } /^```/ && inside { exit } inside' README.md >"$WORK/app.c"
ok_run 0 "app.c builds" 100 cc "${NOT_OPTIMIZED[@]}" -I. "$WORK/app.c" -o "$WORK/app" -pthread
ok_run 0 "idistrun builds" 100 cc "${NOT_OPTIMIZED[@]}" tools/idistrun/idistrun.c \
    -o "$WORK/idistrun" -pthread
(cd "$WORK" && sh once.sh)
ok $? "the secret is made"
for h in 0 1; do
    mkdir "$WORK/$h"
    cp -p "$WORK/app" "$WORK/idistrun" "$WORK/secret" "$WORK/$h"
    (cd "$WORK/$h" && on_host $h timeout -k 5 60 sh "$WORK/node$h.sh" >"$WORK/out.$h" 2>&1) &
    pids[h]=$!
done
for h in 0 1; do
    wait "${pids[h]}"
    ok $? "node$h: the command ends well" || diag <"$WORK/out.$h"
done
for r in 0 1 2 3; do
    grep -qx "rank $r of 4: 6 8" "$WORK/out.$((r / 2))"
    ok $? "node$((r / 2)): rank $r has the sum" || diag <"$WORK/out.$((r / 2))"
done

# A host with another secret is refused, and its error text mentions the secret.
echo "not the secret of node0" >"$WORK/1/secret"
for h in 0 1; do
    (cd "$WORK/$h" && on_host $h env IDIST_INIT_TIMEOUT_MS=4000 timeout -k 5 60 \
        sh "$WORK/node$h.sh" >"$WORK/out.$h" 2>&1) &
    pids[h]=$!
done
wait "${pids[0]}"
wait "${pids[1]}"
ok $(($? == 0)) "node1: another secret is an error"
grep -q 'secret' "$WORK/out.1"
ok $? "node1: the error says so" || diag <"$WORK/out.1"
done_testing
