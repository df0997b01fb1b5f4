# net.sh - hosts for tests: network namespaces connected by a switch. Source it after tap.sh. It
# skips the test if the namespaces cannot be created, and removes them when the test ends.
# shellcheck shell=bash

NET=idist$$ # host number i is the namespace $NET.i, and the switch is $NET.s
NET_COUNT=0

net_remove() {
    net_near
    local i
    for ((i = 0; i < NET_COUNT; i++)); do
        ip netns del "$NET.$i" 2>/dev/null
        rm -rf "/etc/netns/$NET.$i"
    done
    ip netns del "$NET.s" 2>/dev/null
}

# net_hosts N: creates N hosts. Host i has the addresses 10.7.0.(i+1) and fd07::(i+1) at eth0.
net_hosts() {
    local i
    if ! command -v ip >/dev/null || ! ip netns add "$NET.s" 2>/dev/null; then
        echo "1..0 # SKIP no network namespaces: Debian package iproute2, and root"
        exit 0
    fi
    trap 'net_remove; rm -rf "$WORK"' EXIT
    NET_COUNT=$1
    ip -n "$NET.s" link add br0 type bridge mcast_snooping 0 && ip -n "$NET.s" link set br0 up
    for ((i = 0; i < NET_COUNT; i++)); do
        ip netns add "$NET.$i" && ip -n "$NET.$i" link set lo up && net_port "$i" eth0 "p$i" br0 &&
            ip -n "$NET.$i" addr add "10.7.0.$((i + 1))/24" dev eth0 &&
            ip -n "$NET.$i" addr add "fd07::$((i + 1))/64" dev eth0 nodad || return
    done
}

# net_port HOST INTERFACE PORT BRIDGE: connects an interface of a host to a port of the switch.
net_port() {
    ip -n "$NET.s" link add "$3" type veth peer name "$2" netns "$NET.$1" &&
        ip -n "$NET.s" link set "$3" master "$4" up && ip -n "$NET.$1" link set "$2" up
}

on_host() { # HOST COMMAND...
    local host=$1
    shift
    ip netns exec "$NET.$host" "$@"
}

# host_knows HOST LINE...: writes the /etc/hosts of a host, which on_host puts into place.
host_knows() {
    local host=$1
    shift
    mkdir -p "/etc/netns/$NET.$host"
    printf '127.0.0.1 localhost\n%s\n' "$@" >"/etc/netns/$NET.$host/hosts"
}

# net_far OPTION...: adds a slow network, see far.c. Host i has the address 10.9.0.(i+1) at far0. A
# second call replaces the slow network.
net_far() {
    local i tries=100
    [ -x build/far ] && [ build/far -nt tests/lib/far.c ] ||
        cc -O2 -Wall -Wextra tests/lib/far.c -o build/far || return
    net_near
    build/far "$NET." "$NET_COUNT" "$@" >"$WORK/far" &
    NET_FAR=$!
    until grep -qs ready "$WORK/far"; do
        [ $((tries--)) -gt 0 ] && kill -0 "$NET_FAR" || return
        sleep 0.05
    done
    for ((i = 0; i < NET_COUNT; i++)); do
        ip -n "$NET.$i" addr add "10.9.0.$((i + 1))/24" dev far0 &&
            ip -n "$NET.$i" link set far0 up || return
    done
}
net_near() { # ends the slow network
    [ -z "${NET_FAR:-}" ] || { kill "$NET_FAR" && wait "$NET_FAR"; } 2>/dev/null
    NET_FAR=
}

# Prints the number of bytes that host 0 has sent through a device.
sent() { ip netns exec "$NET.0" cat "/sys/class/net/$1/statistics/tx_bytes"; }
# passes NAME DEVICE KIB SECONDS TEST...: runs the tests and checks that host 0 has sent at least
# KIB through the device. A test may have arguments.
passes() {
    local name=$1 device=$2 kib=$3 seconds=$4 test before words
    shift 4
    for test; do
        before=$(sent "$device")
        read -ra words <<<"$test"
        ok_run 0 "$name: dist/$test" "$seconds" "build/tests/dist/${words[0]}" "${words[@]:1}"
        [ $((($(sent "$device") - before) / 1024)) -ge "$kib" ]
        ok $? "$name: dist/$test: it was over the network" ||
            echo "$((($(sent "$device") - before) / 1024)) KiB" | diag
    done
}
