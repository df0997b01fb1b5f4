#!/usr/bin/env bash
# idistrun.sh - tests idistrun: placement of ranks, whole lines of output, the first failure,
# signals, cleanup and restarts
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/launch.sh
. tests/lib/launch.sh
launch_build
compile_once
RUN=$WORK/idistrun
ok_run 0 "idistrun builds with its one line" 240 cc -O2 tools/idistrun/idistrun.c -o "$RUN" ||
    done_testing
two=("launcher idist, size 2, nodes 1" "rank 0: local 0 of 2, node 0"
    "rank 1: local 1 of 2, node 0")

ok_run 0 "two ranks" 30 "$RUN" -n 2 "$WHO"
says "two ranks" "${two[@]}"
ok_run 0 "two ranks, tagged and bound" 30 "$RUN" --nproc-per-node=2 --standalone --tag --bind -v \
    "$WHO"
says "two ranks, tagged and bound" "${two[@]}"
[ "$(grep -c '^\[0\] ' "$WORK/log")" = 3 ]
ok $? "--tag: the lines say whose they are" || diag <"$WORK/log"
trains "idistrun" 60 "$RUN" -n 2

# Four ranks write lines in pieces at the same time. Every line must arrive whole.
cat >"$WORK/pieces" <<'END'
#!/usr/bin/env perl
$| = 1;
for my $i (1 .. 40) { for my $k (1 .. 20) { print $ENV{RANK} x 50 } print "\n" }
print "end of $ENV{RANK}";
END
chmod +x "$WORK/pieces"
ok_run 0 "lines in pieces" 30 "$RUN" -n 4 --tag "$WORK/pieces"
bad=$(grep -Evc '^\[([0-3])\] (\1{1000}|end of \1)$' "$WORK/log")
[ "$bad" = 0 ] && [ "$(wc -l <"$WORK/log")" = 164 ]
ok $? "no line is torn, and the last one has its end" || { cut -c1-60 "$WORK/log" | head | diag; }
ok_run 0 "--log-dir" 30 "$RUN" -n 2 --log-dir "$WORK/logs" "$WORK/pieces"
[ "$(wc -l <"$WORK/logs/1.out")" = 40 ] && [ -e "$WORK/logs/0.err" ] && ! [ -s "$WORK/log" ]
ok $? "--log-dir: a file for each rank"

# The first failure decides the exit status, and is named.
ok_run 7 "a rank that fails" 30 "$RUN" -n 3 "$WHO" 7 1
grep -q "rank 1 on host $(hostname): exited with status 7" "$WORK/log"
ok $? "its rank, host and status are named" || diag <"$WORK/log"
# shellcheck disable=SC2016 # for the shell of the rank
ok_run 139 "a rank that crashes" 30 "$RUN" -n 3 sh -c '[ $RANK = 2 ] && kill -SEGV $$; sleep 30'
grep -q "rank 2 on host .*: killed by signal 11 (Segmentation fault)" "$WORK/log"
ok $? "the signal is named" || diag <"$WORK/log"
ok_run 127 "a program that is not there" 30 "$RUN" -n 2 "$WORK/nothing"

# Ranks that ignore SIGTERM are gone after the grace period, together with the processes that they
# started.
NAP=1$$ # seconds; no other test has such a command line
start=$(date +%s%N)
# shellcheck disable=SC2016
ok_run 3 "a rank fails beside stubborn ones" 30 "$RUN" -n 3 --grace 1 \
    sh -c 'trap "" TERM; [ $RANK = 0 ] && sleep 0.3 && exit 3; sleep $0 & sleep $0; sleep $0' $NAP
ms=$((($(date +%s%N) - start) / 1000000))
[ $ms -lt 2800 ] && gone "sleep $NAP" 0
ok $? "all is gone after the grace period" || echo "after $ms ms, $(left "sleep $NAP") left" | diag

# Waits up to 20 seconds until a command succeeds.
await() { # COMMAND...
    local tries=400
    until "$@"; do
        [ $((tries--)) -gt 0 ] || return 1
        sleep 0.05
    done
}
# shellcheck disable=SC2317 # await calls it
said() { [ "$(grep -c "$2" "$WORK/said_now")" -ge "$1" ]; } # LINES PATTERN

# Signals go to all ranks.
: >"$WORK/said_now"
"$RUN" -n 2 sh -c 'trap "exit 5" TERM; echo ready; while :; do sleep 0.1; done' \
    >"$WORK/said_now" 2>&1 &
pid=$!
await said 2 ready
kill -TERM $pid
wait $pid
[ $? = 5 ]
ok $? "SIGTERM reaches the ranks, which decide" || diag <"$WORK/said_now"
: >"$WORK/said_now"
env --default-signal=INT "$RUN" -n 2 sh -c "echo ready; exec sleep $NAP" >"$WORK/said_now" 2>&1 & \
    # a shell starts background commands with SIGINT ignored
pid=$!
await said 2 ready
kill -INT $pid
wait $pid
[ $? = 130 ] && gone "sleep $NAP" 0
ok $? "SIGINT ends the job" || diag <"$WORK/said_now"
: >"$WORK/said_now"
"$RUN" -n 2 sh -c "echo ready; exec sleep $NAP" >"$WORK/said_now" 2>&1 &
pid=$!
await said 2 ready
kill -KILL $pid
wait $pid 2>/dev/null
gone "sleep $NAP" 1
ok $? "SIGKILL of idistrun leaves no rank"

# The next run of idistrun removes the temporary folder of a killed idistrun, and no other folder. A
# user's folders may have such names. They stay if other users may enter them, or if they contain
# other files.
mkdir "$WORK/tmp" "$WORK/tmp/idistrun-$(hostname)-others"
mkdir -m 755 "$WORK/tmp/idistrun-$(hostname)-traces"
mkdir -m 700 "$WORK/tmp/idistrun-$(hostname)-backup"
touch "$WORK/tmp/idistrun-$(hostname)"-{traces,backup}/trace.0.json \
    "$WORK/tmp/idistrun-$(hostname)-backup/data.json"
folders() { find "$WORK/tmp" -name 'idistrun-*-??????' ! -name '*-others' ! -name '*-traces' \
    ! -name '*-backup'; }
stay() { # starts a job in the background, and waits until both ranks have a file in its folder
    : >"$WORK/said_now"
    # shellcheck disable=SC2016
    TMPDIR=$WORK/tmp "$RUN" -n 2 sh -c \
        'echo "{}" >"$TORCHELASTIC_ERROR_FILE"; echo ready; exec sleep $0' $NAP \
        >"$WORK/said_now" 2>&1 &
    pid=$!
    await said 2 ready
}
stay
kill -KILL $pid
wait $pid 2>/dev/null
killed=$(folders)
stay
alive=$(folders)
TMPDIR=$WORK/tmp ok_run 0 "beside a job, after one that was killed" 30 "$RUN" -n 1 true
[ -n "$killed" ] && [ -n "$alive" ] && [ "$killed" != "$alive" ] && [ "$(folders)" = "$alive" ] &&
    [ -e "$alive/0.error.json" ]
ok $? "the folder of the one that was killed is gone, that of the job is not" ||
    { echo "$killed, then $alive" && find "$WORK/tmp"; } | diag
ok $(($(find "$WORK/tmp" -name '*.json' -path '*-traces/*' -o -name '*.json' -path '*-backup/*' |
    wc -l) != 3)) "folders of a user stay whole" || find "$WORK/tmp" | diag
kill -TERM $pid
wait $pid
[ -z "$(folders)" ]
ok $? "nor is it left" || find "$WORK/tmp" | diag
rm -r "$WORK/tmp"

# A rank fails, and all ranks start again.
# shellcheck disable=SC2016
ok_run 0 "a restart" 30 "$RUN" -n 2 --max-restarts 1 sh -c \
    '[ $RANK = 1 ] && mkdir "$1" 2>/dev/null && exit 9; exec "$2"' sh "$WORK/once" "$WHO"
says "a restart" "${two[@]}"
ok_run 9 "no more restarts than allowed" 30 "$RUN" -n 2 --max-restarts 2 sh -c 'exit 9'
[ "$(grep -c "starting again" "$WORK/log")" = 2 ]
ok $? "two restarts" || diag <"$WORK/log"

# A rank is killed after epoch 2 of 9. All ranks start again from the checkpoint, and reach the
# accuracy of one rank that nobody killed.
"$TRAIN" --epochs 9 --ranks 1 --seed 7 >"$WORK/alone9" 2>&1
train=("$TRAIN" --epochs 9 --seed 7 --checkpoint "$WORK/saved")
timeout -k 5 90 "$RUN" -n 2 -v --max-restarts 1 "${train[@]}" >"$WORK/log" 2>&1 </dev/null &
pid=$!
for _ in $(seq 600); do
    grep -q "epoch   2/" "$WORK/log" && break
    sleep 0.05
done
kill -KILL "$(sed -n 's/.*rank 1 is process \([0-9]*\).*/\1/p' "$WORK/log")"
wait $pid
ok $? "a rank is killed in training: the job ends well" || tail -n 15 "$WORK/log" | diag
grep -q "rank 1 on host .*: killed by signal 9" "$WORK/log" &&
    grep -q "resumed   after epoch [2-8]" "$WORK/log" &&
    [ "$(grep -o 'accuracy.*' "$WORK/log")" = "$(grep -o 'accuracy.*' "$WORK/alone9")" ]
ok $? "a rank is killed in training: the same accuracy" || tail -n 15 "$WORK/log" "$WORK/alone9" |
    diag

# A rank is killed, and another rank fails because of that, before idistrun notices either failure.
process_of() { sed -n "s/.*rank $1 is process \([0-9]*\).*/\1/p" "$WORK/said_now"; } # RANK
# shellcheck disable=SC2317 # await calls it
has_ended() { [[ $(cat "/proc/$1/stat") == *") Z "* ]]; } # PID: the process is a zombie
: >"$WORK/said_now"
# shellcheck disable=SC2016
"$RUN" -n 2 -v sh -c \
    '[ $RANK = 1 ] && exec sleep 976; until [ -e "$0" ]; do sleep 0.05; done; exit 1' \
    "$WORK/fail" >"$WORK/said_now" 2>&1 &
pid=$!
await said 2 'rank [01] is process'
kill -STOP $pid
kill -KILL "$(process_of 1)"
touch "$WORK/fail"
await has_ended "$(process_of 0)"
await has_ended "$(process_of 1)"
kill -CONT $pid
wait $pid
[ $? = 137 ] && grep -q "rank 1 on host .*: killed by signal 9" "$WORK/said_now"
ok $? "of two failures the one by a signal is named" || diag <"$WORK/said_now"

# Two hosts, simulated on one machine by two values of IDIST_HOSTID.
export IDIST_ADDR=127.0.0.1
node=("$RUN" -n 2 --nnodes 2 --master-addr 127.0.0.1 --master-port "$(free_port)")
IDIST_HOSTID=b timeout -k 5 30 "${node[@]}" --node-rank 1 "$WHO" >"$WORK/other" 2>&1 </dev/null &
other=$!
IDIST_HOSTID=a ok_run 0 "two nodes" 30 "${node[@]}" --node-rank 0 "$WHO"
wait $other
ok $? "two nodes: the other one" || diag <"$WORK/other"
says "two nodes" "launcher idist, size 4, nodes 2" "rank 0: local 0 of 2, node 0" \
    "rank 1: local 1 of 2, node 0" \
    "rank 2: local 0 of 2, node 1" "rank 3: local 1 of 2, node 1"

# Two hosts started by --hosts, with a stand-in for ssh that runs the command on this machine.
cat >"$WORK/here" <<'END'
#!/bin/sh
export IDIST_HOSTID="$1"
shift
sh -c "$*; exit \$?"
END
chmod +x "$WORK/here"
export IDIST_RSH="'$WORK/here'"
hosts=("$RUN" --hosts "a:2,b:2" --master-addr 127.0.0.1)
ok_run 0 "two hosts" 30 "${hosts[@]}" "$WHO"
ok_run 0 "two hosts: --node-rank 0 is the head's own" 30 "${hosts[@]}" --node-rank 0 "$WHO"

# idistrun names the rank that failed first. The other host may report earlier that another rank
# ended because of this failure.
first_cause() { # FATE STATUS CAUSE COMMAND...
    local rank=${1%% *} status=$2 cause=$3 trial got
    for trial in 1 2 3 4 5 6 7 8 9 10; do
        WHO_FATE=$1 IDIST_LOG=error timeout -k 5 30 "${@:4}" >"$WORK/log" 2>&1 </dev/null
        got=$?
        [ $got = "$status" ] || break
        [ "$(grep -c '^idistrun: ' "$WORK/log")" = 1 ] || break
        grep -q "^idistrun: rank $rank on host [a-z0-9]*: $cause$" "$WORK/log" || break
    done
    [ "$trial" = 10 ]
    ok $? "rank $1: it is named" || { echo "trial $trial: status $got" && cat "$WORK/log"; } | diag
}
for fate in kill "kill A" exit "exit A" abort "abort A"; do
    cause="exited with status 9" status=9
    [ "${fate% A}" != kill ] || cause="killed by signal 9 (Killed)" status=137
    [ "${fate% A}" != exit ] || cause="exited with status 7" status=7
    first_cause "2 ${fate/ /}" $status "$cause" "${hosts[@]}" "$WHO"
    first_cause "1 ${fate/ /}" $status "$cause" "$RUN" -n 3 "$WHO"
done
# shellcheck disable=SC2016 # the consequence is reported long before the cause
ok_run 139 "a late cause" 30 "${hosts[@]}" sh -c 'case $RANK in
    0) : >"$IDIST_LOST_FILE"; : >"$0"; exit 3 ;;
    3) until [ -e "$0" ]; do sleep 0.02; done; sleep 0.2; kill -SEGV $$ ;;
    *) sleep 30 ;;
    esac' "$WORK/gone"
grep -q "idistrun: rank 3 on host b: killed by signal 11" "$WORK/log"
ok $? "the cause is named, not the consequence" || diag <"$WORK/log"
# shellcheck disable=SC2016
ok_run 3 "a consequence without a cause" 30 "${hosts[@]}" sh -c \
    '[ $RANK = 2 ] || exec sleep 30; : >"$IDIST_LOST_FILE"; exit 3'
grep -q "rank 2 on host b: exited with status 3, after it had lost another rank" "$WORK/log"
ok $? "it says that it is one" || diag <"$WORK/log"

# The connection to a host breaks in the middle of a job.
ends() { # NAME COMMAND PATTERN: sends SIGKILL to the process that the command prints
    timeout -k 5 30 "${hosts[@]}" sleep 9$NAP >"$WORK/log" 2>&1 </dev/null &
    local pid=$! tries=200
    until [ "$(pgrep -xfc "sleep 9$NAP")" = 4 ] || [ $((tries--)) = 0 ]; do sleep 0.05; done
    kill -KILL "$($2 "$(pgrep -of "$WORK/here b")")"
    wait $pid
    [ $? = 125 ] && [ "$(grep -c '^idistrun: ' "$WORK/log")" = 1 ] && grep -q "$3" "$WORK/log" &&
        gone "sleep 9$NAP" 2
    ok $? "$1" || diag <"$WORK/log"
}
# shellcheck disable=SC2317 # ends calls it
node_below() { pgrep -P "$1"; }
ends "ssh is killed" echo "^idistrun: host b: its ssh was killed by signal 9 (Killed)$"
ends "idistrun on a host is killed" node_below \
    "^idistrun: host b: idistrun ended there without a report (status 137: Killed)$"
printf '#!/bin/sh\nexit 255\n' >"$WORK/nowhere"
chmod +x "$WORK/nowhere"
IDIST_RSH="'$WORK/nowhere'" ok_run 125 "no connection" 10 "${hosts[@]}" true
grep -q "host [ab]: no connection (ssh ended with status 255)" "$WORK/log"
ok $? "it is said" || diag <"$WORK/log"
unset IDIST_RSH

for wrong in "" "-n 0 true" "-n 2x true" "--nnodes 2 true" "--nnodes 2 --node-rank 2 true" \
    "--frobnicate true"; do
    # shellcheck disable=SC2086 # a list
    ok_run 2 "refused: $wrong" 10 "$RUN" $wrong
done

# Ctrl-C at a terminal, typed once if it ends the ranks, and twice if the ranks catch it and
# continue.
cat >"$WORK/typed.py" <<'END'
import os, pty, sys, time
pid, terminal = pty.fork()
if pid == 0:
    os.execvp(sys.argv[2], sys.argv[2:])
times, seen = int(sys.argv[1]), b""
try:
    while True:
        seen += os.read(terminal, 4096)
        if times and seen.count(b"ready") >= 2:
            os.write(terminal, b"\x03")
            times -= 1
            time.sleep(0.3)
except OSError:  # the end of a terminal that nobody has open
    pass
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
END
if command -v python3 >/dev/null; then
    start=$(date +%s%N)
    ok_run 130 "Ctrl-C" 30 python3 "$WORK/typed.py" 1 "$RUN" -n 2 sh -c \
        "echo ready; exec sleep $NAP"
    # shellcheck disable=SC2016
    ok_run 130 "Ctrl-C twice" 30 python3 "$WORK/typed.py" 2 "$RUN" -n 2 \
        sh -c 'trap "echo ready" INT; echo ready; sleep $0; sleep $0; sleep $0' $NAP
    ms=$((($(date +%s%N) - start) / 1000000))
    [ $ms -lt 4000 ] && gone "sleep $NAP" 0
    ok $? "both at once, and nothing is left" || echo "after $ms ms, $(left "sleep $NAP") left" |
        diag
else
    skip "Ctrl-C" "no python3: Debian package python3"
fi

# torchrun's error file, which says what failed
error=$WORK/error.json
failure='rank 1 on host \S*: killed by signal 9 (Killed)'
# shellcheck disable=SC2016
TORCHELASTIC_ERROR_FILE=$error TMPDIR=$WORK ok_run 137 "an error file" 30 "$RUN" -n 2 \
    sh -c '[ $TORCHELASTIC_ERROR_FILE != "$0" ] && [ $RANK = 0 ] || kill -KILL $$; sleep $1' \
    "$error" $NAP
extra="{\"py_callstack\": \"$failure\", \"timestamp\": \"[0-9]*\"}"
grep -q "^{\"message\": {\"message\": \"$failure\", \"extraInfo\": $extra}}$" "$error"
ok $? "it names the failure as torchrun would read it" || cat "$error" "$WORK/log" | diag
ok_run 0 "no failure" 30 "$RUN" -n 1 --error-file "$error" true
[ ! -e "$error" ] && [ -z "$(find "$WORK" -name 'idistrun-*')" ]
ok $? "an old file is gone, and the ranks' own" ||
    find "$WORK" -name "*err*" -o -name "idistrun-*" | diag
# A rank writes its own message, which may contain any characters. A restart does not report the
# message of the first try. Half a file counts as no message.
cat >"$WORK/message" <<'END'
#!/usr/bin/env perl
exit 4 if $ENV{TORCHELASTIC_RESTART_COUNT} == 1;
open F, ">", $ENV{TORCHELASTIC_ERROR_FILE};
print F q({"message": {"message": "half) and exit 4 if $ENV{TORCHELASTIC_RESTART_COUNT} == 2;
print F q({"message": {"extraInfo": {"py_callstack": "at \"message\": x", "timestamp": "1"},), "\n",
    q("message": "a \"quoted\\\\\" \u00e4\u20ac\ud83d\ude00\ttab"}});
exit 4;
END
chmod +x "$WORK/message"
ok_run 4 "a rank's own message" 30 "$RUN" -n 1 --error-file "$error" --log-dir "$WORK/logs" \
    "$WORK/message"
printf 'idistrun: rank 0 on host %s: exited with status 4: ' "$(hostname)" >"$WORK/lines"
printf 'a "quoted\\" \xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80\ttab\n' >>"$WORK/lines"
cmp "$WORK/lines" "$WORK/log" && [ "$(tr '\n' ' ' <"$WORK/logs/0.error.json")" = "$(cat "$error")" ]
ok $? "it is shown, and its file passed on" || cat "$WORK/log" "$error" | diag
ok_run 4 "messages and restarts" 30 "$RUN" -n 1 --max-restarts 2 --error-file "$error" \
    "$WORK/message"
[ "$(grep -c quoted "$WORK/log")" = 1 ] &&
    grep -q '{"message": "rank 0 on host .*: exited with status 4",' "$error"
ok $? "each try has its own" || cat "$WORK/log" "$error" | diag

# PyTorch programs, which find their world by torchrun's variables and report failures in torchrun's
# error file
if torch_python; then
    cat >"$WORK/world.py" <<'END'
import os, sys, torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    dist.init_process_group("gloo")
    x = torch.ones(3) * (dist.get_rank() + 1)
    dist.all_reduce(x)
    print("torch", dist.get_rank(), x[0].item(), flush=True)
    if len(sys.argv) > 1 and dist.get_rank() == 1:
        raise ValueError("the \"b\u00e4d\" one")
    dist.barrier()
main()
END
    ok_run 0 "a PyTorch program" 90 "$RUN" -n 2 --tag "$PYTHON" "$WORK/world.py"
    grep -q "torch 0 3.0" "$WORK/log" && grep -q "torch 1 3.0" "$WORK/log"
    ok $? "a PyTorch program finds its world" || diag <"$WORK/log"
    # Rank 0 may also fail, because it lost rank 1, but only later.
    ok_run 1 "a PyTorch program that fails" 90 "$RUN" -n 2 --error-file "$error" "$PYTHON" \
        "$WORK/world.py" fail
    text='exited with status 1: ValueError: the "b'$'\xc3\xa4''d" one'
    grep -q "idistrun: rank 1 on host .*: $text" "$WORK/log"
    ok $? "its exception is shown" || diag <"$WORK/log"
    "$PYTHON" - "$error" >"$WORK/log" 2>&1 <<'END'
import sys
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
failure = ProcessFailure(0, 1, 1, sys.argv[1])
assert failure.message["message"] == "ValueError: the \"b\u00e4d\" one", failure.message
assert "in main" in failure.message["extraInfo"]["py_callstack"] and failure.timestamp > 1600000000
END
    ok $? "torch reads the error file" || diag <"$WORK/log"
else
    skip "a PyTorch program" "no torch: Debian package python3-torch"
fi
done_testing
