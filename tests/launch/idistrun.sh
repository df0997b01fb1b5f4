#!/usr/bin/env bash
# idistrun.sh - our own launcher: where the ranks are, whole lines, the first failure, signals, nothing left, restarts
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/launch.sh
. tests/lib/launch.sh
launch_build
RUN=$WORK/idistrun
ok_run 0 "idistrun builds with its one line" 60 cc -O2 examples/idistrun.c -o "$RUN" || done_testing
two=("launcher idist, size 2, nodes 1" "rank 0: local 0 of 2, node 0" "rank 1: local 1 of 2, node 0")

ok_run 0 "two ranks" 30 "$RUN" -n 2 "$WHO"
says "two ranks" "${two[@]}"
ok_run 0 "two ranks, tagged and bound" 30 "$RUN" --nproc-per-node=2 --standalone --tag --bind -v "$WHO"
says "two ranks, tagged and bound" "${two[@]}"
[ "$(grep -c '^\[0\] ' "$WORK/log")" = 3 ]
ok $? "--tag: the lines say whose they are" || diag <"$WORK/log"
trains "idistrun" 60 "$RUN" -n 2

# Lines that are written in pieces, by four ranks at a time, arrive whole.
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

# The first failure decides and is named.
ok_run 7 "a rank that fails" 30 "$RUN" -n 3 "$WHO" 7 1
grep -q "rank 1 on host $(hostname): exited with status 7" "$WORK/log"
ok $? "its rank, host and status are named" || diag <"$WORK/log"
# shellcheck disable=SC2016 # for the shell of the rank
ok_run 139 "a rank that crashes" 30 "$RUN" -n 3 sh -c '[ $RANK = 2 ] && kill -SEGV $$; sleep 30'
grep -q "rank 2 on host .*: killed by signal 11 (Segmentation fault)" "$WORK/log"
ok $? "the signal is named" || diag <"$WORK/log"
ok_run 127 "a program that is not there" 30 "$RUN" -n 2 "$WORK/nothing"

# Ranks that do not want to end are gone after the grace period, and what they started with them.
NAP=1$$ # seconds: a command line that no other test has
start=$(date +%s%N)
# shellcheck disable=SC2016
ok_run 3 "a rank fails beside stubborn ones" 30 "$RUN" -n 3 --grace 1 \
    sh -c 'trap "" TERM; [ $RANK = 0 ] && sleep 0.3 && exit 3; sleep $0 & sleep $0; sleep $0' $NAP
ms=$((($(date +%s%N) - start) / 1000000))
[ $ms -lt 2800 ] && gone "sleep $NAP" 0
ok $? "all is gone after the grace period" || echo "after $ms ms, $(left "sleep $NAP") left" | diag

# Signals go to all ranks.
"$RUN" -n 2 sh -c 'trap "exit 5" TERM; while :; do sleep 0.1; done' >"$WORK/log" 2>&1 &
pid=$!
sleep 0.5
kill -TERM $pid
wait $pid
[ $? = 5 ]
ok $? "SIGTERM reaches the ranks, which decide" || diag <"$WORK/log"
env --default-signal=INT "$RUN" -n 2 sleep $NAP >"$WORK/log" 2>&1 & # a shell has its background ignore it
pid=$!
sleep 0.5
kill -INT $pid
wait $pid
[ $? = 130 ] && gone "sleep $NAP" 0
ok $? "SIGINT ends the job" || diag <"$WORK/log"
"$RUN" -n 2 sleep $NAP &
pid=$!
sleep 0.5
kill -KILL $pid
wait $pid 2>/dev/null
gone "sleep $NAP" 1
ok $? "SIGKILL of idistrun leaves no rank"

# A failure, and all again.
# shellcheck disable=SC2016
ok_run 0 "a restart" 30 "$RUN" -n 2 --max-restarts 1 sh -c \
    '[ $RANK = 1 ] && mkdir "$1" 2>/dev/null && exit 9; exec "$2"' sh "$WORK/once" "$WHO"
says "a restart" "${two[@]}"
ok_run 9 "no more restarts than allowed" 30 "$RUN" -n 2 --max-restarts 2 sh -c 'exit 9'
[ "$(grep -c "starting again" "$WORK/log")" = 2 ]
ok $? "two restarts" || diag <"$WORK/log"

# Two hosts, as far as one machine can play them.
export IDIST_ADDR=127.0.0.1
node=("$RUN" -n 2 --nnodes 2 --master-addr 127.0.0.1 --master-port "$(free_port)")
IDIST_HOSTID=b timeout -k 5 30 "${node[@]}" --node-rank 1 "$WHO" >"$WORK/other" 2>&1 </dev/null &
other=$!
IDIST_HOSTID=a ok_run 0 "two nodes" 30 "${node[@]}" --node-rank 0 "$WHO"
wait $other
ok $? "two nodes: the other one" || diag <"$WORK/other"
says "two nodes" "launcher idist, size 4, nodes 2" "rank 0: local 0 of 2, node 0" "rank 1: local 1 of 2, node 0" \
    "rank 2: local 0 of 2, node 1" "rank 3: local 1 of 2, node 1"

for wrong in "" "-n 0 true" "-n 2x true" "--nnodes 2 true" "--nnodes 2 --node-rank 2 true" "--frobnicate true"; do
    # shellcheck disable=SC2086 # a list
    ok_run 2 "refused: $wrong" 10 "$RUN" $wrong
done

# A program of PyTorch's, by the variables of torchrun
if torch_python; then
    cat >"$WORK/torch.py" <<'END'
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(3) * (dist.get_rank() + 1)
dist.all_reduce(x)
print("torch", dist.get_rank(), x[0].item(), flush=True)
END
    ok_run 0 "a PyTorch program" 90 "$RUN" -n 2 "$PYTHON" "$WORK/torch.py"
    grep -q "torch 0 3.0" "$WORK/log" && grep -q "torch 1 3.0" "$WORK/log"
    ok $? "a PyTorch program finds its world" || diag <"$WORK/log"
else
    skip "a PyTorch program" "no torch: Debian package python3-torch"
fi
done_testing
