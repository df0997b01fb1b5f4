#!/usr/bin/env bash
# doctor.sh - tests idistrun --doctor: what each line says on this machine, and when something is
# missing
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
unset IDIST_ADDR IDIST_SOCKET_IFNAME IDIST_SECRET IDIST_SECRET_FILE IDIST_INSECURE
RUN=$WORK/idistrun
ok_run 0 "idistrun builds" 240 cc -O1 '-Doptimize(level)=' -Wall -Wextra -Wconversion -Wshadow \
    -Werror tools/idistrun/idistrun.c -o "$RUN" || done_testing

# doctor STATUS NAME COMMAND...: runs idistrun --doctor through COMMAND. Leaves its output in
# $WORK/log, and checks the form of the output.
doctor() {
    local want=$1 name=$2
    shift 2
    ok_run "$want" "$name: status $want" 30 "$@" "$RUN" --doctor || return
    [ "$(wc -l <"$WORK/log")" -le 24 ] &&
        [ "$(awk '{print length}' "$WORK/log" | sort -n | tail -n 1)" -le 100 ] &&
        ! grep -vqE '^(([0-9] ranks, (host|tcp)|[A-Za-z]+( [a-z]+)?)  *[^ ]| {16}[^ ])' "$WORK/log"
    ok $? "$name: at most 24 lines of 100 columns" || diag <"$WORK/log"
}
line() { # TEST NAME PATTERN: checks the line NAME and its continuation lines
    sed -E ':again; N; $!b again; s/\n {16}/ /g' "$WORK/log" | grep "^$2  *" |
        sed "s/^$2  *//" | grep -qE -- "$3"
    ok $? "$1: $2" || {
        echo "expected $3"
        cat "$WORK/log"
    } | diag
}
fine() { # TEST NAME...: checks that these lines give no advice
    local test=$1 name
    shift
    for name in "$@"; do line "$test" "$name" '^[^[]*$'; done
}

doctor 0 "as it is" env
fine "as it is" idist launcher meeting settings secret MPI GPU "2 ranks, host" "2 ranks, tcp"
version=$(sed -n 's/^#define IDIST_VERSION "\(.*\)"/\1/p' idist.h)
line "as it is" idist "^$version on $(hostname), Linux"
line "as it is" "file store" '^works: ranks can meet at file:///tmp/\.\.\.$'
line "as it is" cores "^$(nproc) of "
line "as it is" "shared memory" '^works \(memfd\); /dev/shm'
line "as it is" loopback 'works'
line "as it is" launcher '^none'
line "as it is" MPI "$(command -v mpirun || command -v mpiexec || echo "no mpirun")"
line "as it is" descriptors "^$(ulimit -n)"
for row in "2 ranks, host" "2 ranks, tcp"; do
    line "as it is" "$row" 'right; 4 B in [0-9.]+ us, 4 MiB at [0-9.]+ GB/s$'
done
[ "$(grep -c 'ranks, ' "$WORK/log")" = $(($(nproc) > 2 ? 4 : 2)) ]
ok $? "as it is: more ranks where there are more cores" || diag <"$WORK/log"
[ "$(tail -n 1 "$WORK/log")" = "verdict         nothing is wrong" ]
ok $? "as it is: nothing is wrong" || diag <"$WORK/log"
"$RUN" --help | grep -q -- --doctor
ok $? "--help names it"

# Limits
doctor 0 "ulimit -n 64" bash -c 'ulimit -n 64; "$@"' -
line "ulimit -n 64" descriptors '^64 \[note: enough for 28 ranks; ulimit -n 4096\]$'
doctor 1 "ulimit -n 10" bash -c 'ulimit -n 10; "$@"' -
line "ulimit -n 10" descriptors '^10 \[wrong: enough for 1 ranks'
line "ulimit -n 10" verdict '^[1-9] of the lines above \[wrong\]$'

# Forbids system calls. The ranks must work without them.
cat >"$WORK/forbid.c" <<'END'
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>
int main(int argc, char **argv) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)atoi(argv[1]), 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    struct sock_fprog program = {4, code};
    if (argc < 3 || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
        return 125;
    execv(argv[2], argv + 2);
    return 126;
}
END
number() { printf '#include <sys/syscall.h>\nSYS_%s\n' "$1" | cc -E - | tail -n 1; }
if cc -w "$WORK/forbid.c" -o "$WORK/forbid" && "$WORK/forbid" 9999 /bin/true; then
    doctor 0 "no process_vm_readv" "$WORK/forbid" "$(number process_vm_readv)"
    line "no process_vm_readv" "reading others" '^not permitted.* \[note: large buffers take two'
    line "no process_vm_readv" "shared memory" '^works'
    fine "no process_vm_readv" "2 ranks, host"
    doctor 0 "no memfd_create" "$WORK/forbid" "$(number memfd_create)"
    line "no memfd_create" "shared memory" \
        '^none: Operation not permitted \[note: slower; allow memfd, raise ulimit -v, -f, -l\]$'
    line "no memfd_create" "reading others" '^not known'
    fine "no memfd_create" "2 ranks, host"
else
    skip "forbidden system calls" "seccomp is not allowed here"
fi

# The kernel reads other processes, but slowly. The ranks measure the speed if each rank has a core.
cat >"$WORK/slow.c" <<'END'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>
long syscall(long number, ...) {
    long (*real)(long, ...) = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    long at[6];
    __builtin_va_list list;
    __builtin_va_start(list, number);
    for (int i = 0; i < 6; i++) at[i] = __builtin_va_arg(list, long);
    __builtin_va_end(list);
    if (number == SYS_process_vm_readv) usleep(200);
    return real(number, at[0], at[1], at[2], at[3], at[4], at[5]);
}
END
if [ "$(nproc)" -gt 1 ]; then
    ok_run 0 "the library with a slow process_vm_readv builds" 60 cc -w -shared -fPIC \
        "$WORK/slow.c" -o "$WORK/slow.so"
    doctor 0 "a slow process_vm_readv" env LD_PRELOAD="$WORK/slow.so"
    line "a slow process_vm_readv" "reading others" '^works, but slowly: .* take two copies$'
else
    skip "a slow process_vm_readv" "only one core"
fi

# Settings
doctor 0 "IDIST_TRANSPORT=socket" env IDIST_TRANSPORT=socket
line "IDIST_TRANSPORT=socket" "shared memory" '\[note: off by IDIST_TRANSPORT\]$'
line "IDIST_TRANSPORT=socket" settings 'IDIST_TRANSPORT=socket'
doctor 1 "IDIST_ALGO=magic" env IDIST_ALGO=magic
line "IDIST_ALGO=magic" settings '^IDIST_ALGO=magic: use one of .* \[wrong\]$'
line "IDIST_ALGO=magic" launcher '^none'
doctor 1 "IDIST_SOCKET_IFNAME=nothing0" env IDIST_SOCKET_IFNAME==nothing0
line "IDIST_SOCKET_IFNAME=nothing0" address '^IDIST_SOCKET_IFNAME==nothing0 leaves no interface'
doctor 0 "IDIST_SECRET" env IDIST_SECRET=0123456789abcdef
line "IDIST_SECRET" secret '^given$'
line "IDIST_SECRET" settings 'IDIST_SECRET( |$)'
! grep -q 0123456789abcdef "$WORK/log"
ok $? "IDIST_SECRET: is not printed"
doctor 1 "IDIST_SECRET and another fault" env IDIST_SECRET=0123456789abcdef IDIST_ALGO=magic
line "IDIST_SECRET and another fault" secret '^given; see settings$'
doctor 1 "a short IDIST_SECRET" env IDIST_SECRET=short
line "a short IDIST_SECRET" settings '^IDIST_SECRET has 5 bytes .*\[wrong\]$'
line "a short IDIST_SECRET" secret '^given; see settings$'
line "a short IDIST_SECRET" "file store" '^IDIST_SECRET has 5 bytes .* 256 \[note\]$'
doctor 1 "no IDIST_SECRET_FILE" env IDIST_SECRET_FILE="$WORK/nothing"
line "no IDIST_SECRET_FILE" secret '^given; see settings$'
doctor 0 "an empty PATH" env PATH=/nonexistent
line "an empty PATH" MPI '^no mpirun'

# Launchers
doctor 1 "two faults" env RANK=0 IDIST_ALGO=magic
line "two faults" launcher '^RANK is set but WORLD_SIZE is not'
line "two faults" settings '^IDIST_ALGO=magic: use one of'
line "two faults" "2 ranks, host" '^IDIST_ALGO=magic.*\[wrong: see the lines above\]$'
doctor 1 "RANK alone" env RANK=0
line "RANK alone" launcher '^RANK is set but WORLD_SIZE is not.*\[wrong\]$'
torch=(RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=a)
doctor 0 "torchrun" env "${torch[@]}" MASTER_ADDR=127.0.0.1 MASTER_PORT=29500
line "torchrun" launcher '^torchrun by RANK and WORLD_SIZE: rank 1 of 2$'
line "torchrun" meeting '^unix:'
doctor 1 "torchrun without MASTER_PORT" env "${torch[@]}" MASTER_ADDR=127.0.0.1
line "torchrun without MASTER_PORT" launcher '^torchrun by'
line "torchrun without MASTER_PORT" settings \
    '^MASTER_ADDR .* is set but MASTER_PORT .* is not: .*\[wrong\]$'
doctor 1 "ranks without a place" env MV2_COMM_WORLD_RANK=0 MV2_COMM_WORLD_SIZE=2 \
    MV2_COMM_WORLD_LOCAL_SIZE=1
line "ranks without a place" meeting '^nothing says .*\[wrong: set MASTER_ADDR and MASTER_PORT\]$'
doctor 0 "a job of Slurm without a step" env -u SLURM_PROCID SLURM_JOB_ID=7
line "a job of Slurm without a step" launcher '^none.*\[note: in a job of Slurm'
slurm=(SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=0)
doctor 1 "half a step of Slurm" env -u SLURM_NTASKS -u SLURM_STEP_NUM_TASKS "${slurm[@]}"
line "half a step of Slurm" launcher '^SLURM_PROCID is set but SLURM_NTASKS is not.*\[wrong\]$'
doctor 0 "a step of Slurm" env "${slurm[@]}" SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=1
line "a step of Slurm" launcher '^slurm by SLURM_PROCID and SLURM_STEP_NUM_TASKS: rank 0 of 2$'
doctor 1 "a place, but no rank" env IDIST_INIT_METHOD=tcp://127.0.0.1:29500
line "a place, but no rank" settings \
    "^IDIST_INIT_METHOD tcp://127.0.0.1:29500 says where ranks meet, but"
doctor 0 "a drawn rank" env WORLD_SIZE=3 IDIST_INIT_METHOD="file://$WORK/meet"
line "a drawn rank" launcher '^env by WORLD_SIZE: an assigned rank of 3$'
line "a drawn rank" meeting "^file:$WORK/meet$"
line "a drawn rank" "file store" "^works: ranks can meet at file://$WORK/\.\.\.\$"
[ ! -e "$WORK/meet" ] && [ -z "$(find "$WORK" -name 'idist-doctor-*')" ]
ok $? "a drawn rank: is not drawn"
doctor 1 "no such folder" env WORLD_SIZE=3 IDIST_INIT_METHOD=file:///nonexistent/meet
line "no such folder" "file store" '/nonexistent/idist-doctor-[0-9]*.*No such file.*\[wrong\]$'

# No loopback interface
if unshare -n true 2>/dev/null; then
    doctor 0 "no loopback" unshare -n
    line "no loopback" interfaces '^none \[note: none is up'
    line "no loopback" loopback '\[note: ip link set lo up\]$'
    line "no loopback" address '^none.*\[note: one host only'
    line "no loopback" "2 ranks, host" 'right'
    line "no loopback" "2 ranks, tcp" '\[note: see the lines above\]$'
    doctor 1 "no loopback, but TCP" env IDIST_TRANSPORT=tcp unshare -n
    line "no loopback, but TCP" loopback '\[wrong: ip link set lo up\]$'
    line "no loopback, but TCP" "2 ranks, tcp" '\[wrong: see the lines above\]$'
else
    skip "no loopback" "unshare -n is not allowed here"
fi

# A rank stops as soon as it is forked. The self test must still end, and end the rank.
cat >"$WORK/stop.c" <<'END'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
pid_t fork(void) {
    static int count;
    pid_t (*real)(void) = (pid_t (*)(void))dlsym(RTLD_NEXT, "fork");
    pid_t child = real();
    if (child == 0 && !count) raise(SIGSTOP);
    if (child > 0 && !count++) {
        FILE *f = fopen(getenv("STOPPED"), "w");
        fprintf(f, "%d\n", (int)child);
        fclose(f);
    }
    return child;
}
END
ok_run 0 "the library that stops a rank builds" 60 cc -w -shared -fPIC "$WORK/stop.c" \
    -o "$WORK/stop.so"
doctor 1 "a rank that stops" env LD_PRELOAD="$WORK/stop.so" STOPPED="$WORK/stopped"
line "a rank that stops" "2 ranks, host" \
    '^(not done in|.*did not) .*\[wrong: see the lines above\]$'
line "a rank that stops" "2 ranks, tcp" '^not run: the time was up \[note: .*\]$'
[ -s "$WORK/stopped" ] && ! kill -0 "$(cat "$WORK/stopped")" 2>/dev/null
ok $? "a rank that stops: it is gone"
done_testing
