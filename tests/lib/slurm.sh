# slurm.sh - a Slurm of three nodes on this machine: slurm_start, slurm_stop. Source it after
# tap.sh.
# shellcheck shell=bash

# Prints why Slurm cannot run, or nothing if it can.
slurm_missing() {
    if ! command -v slurmctld >/dev/null || ! command -v slurmd >/dev/null; then
        echo "no Slurm: Debian package slurm-wlm"
    elif ! command -v munged >/dev/null; then
        echo "no munge: Debian package munge"
    elif [ "$(id -u)" != 0 ] || ! unshare -m true 2>/dev/null; then
        echo "Slurm's daemons need root, and a mount namespace"
    fi
}

# Starts Slurm. All files are in FOLDER, and SLURM_CONF points there. The nodes are n1 to n3 and use
# the ports $SLURM_PORT+1 to $SLURM_PORT+3.
slurm_start() { # FOLDER
    local dir=$1 i host
    host=$(hostname -s)
    SLURM_DIR=$dir
    SLURM_PORT=${SLURM_PORT:-$((20000 + RANDOM % 10000))}
    mkdir -p "$dir/state"
    if ! [ -s /etc/munge/munge.key ]; then
        head -c 1024 /dev/urandom >/etc/munge/munge.key
        chmod 400 /etc/munge/munge.key
        chown munge: /etc/munge/munge.key
    fi
    if ! munge -n >/dev/null 2>&1; then
        mkdir -p /run/munge /var/log/munge /var/lib/munge
        chown munge: /run/munge /var/log/munge /var/lib/munge
        setpriv --reuid munge --regid munge --clear-groups munged --force
        SLURM_OWN_MUNGE=1
    fi
    local ports="$((SLURM_PORT + 1))-$((SLURM_PORT + 3))"
    cat >"$dir/slurm.conf" <<CONF
ClusterName=t
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$SLURM_PORT
AuthType=auth/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/ctld.pid
SlurmdPidFile=$dir/d-%n.pid
SlurmctldLogFile=$dir/ctld.log
SlurmdLogFile=$dir/d-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=DEFAULT CPUs=4 RealMemory=1000 State=UNKNOWN
NodeName=n[1-3] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$ports]
PartitionName=p Nodes=n[1-3] Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
CONF
    export SLURM_CONF=$dir/slurm.conf
    slurmctld -f "$SLURM_CONF" || return 1
    # Only processes on the nodes know the names of the nodes.
    { cat /etc/hosts && echo "127.0.0.1 n1 n2 n3"; } >"$dir/hosts"
    for i in 1 2 3; do
        unshare -m sh -c \
            "mount --bind '$dir/hosts' /etc/hosts && exec slurmd -N n$i -f '$SLURM_CONF'" ||
            return 1
    done
    for i in $(seq 100); do
        [ "$(sinfo -h -o %D -t idle 2>/dev/null)" = 3 ] && return 0
        sleep 0.2
    done
    return 1
}

slurm_stop() {
    local file
    for file in "$SLURM_DIR"/d-*.pid "$SLURM_DIR/ctld.pid" \
        ${SLURM_OWN_MUNGE:+/run/munge/munged.pid}; do
        [ -s "$file" ] && kill "$(cat "$file")" 2>/dev/null
    done
}
