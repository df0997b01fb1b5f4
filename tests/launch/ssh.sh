#!/usr/bin/env bash
# ssh.sh - tests idistrun --hosts over a real sshd: one machine under two names, with unequal
# numbers of ranks; failures, signals and lost connections
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/launch.sh
. tests/lib/launch.sh
SSHD=$(PATH=$PATH:/usr/sbin command -v sshd)
for missing in "${SSHD:-openssh-server}" "$(command -v ssh || echo openssh-client)"; do
    case $missing in openssh-*) echo "1..0 # skipped: no ssh: Debian package $missing" &&
        exit 0 ;; esac
done

# Starts an sshd for this user and this test. It listens at 127.0.0.1 only, so 127.0.0.2 is a host
# that refuses connections.
PORT=$(free_port)
for key in host user; do ssh-keygen -q -t ed25519 -N '' -f "$WORK/$key" || exit 1; done
echo "[localhost]:$PORT,[127.0.0.1]:$PORT $(cat "$WORK/host.pub")" >"$WORK/known"
cat >"$WORK/sshd_config" <<END
Port $PORT
ListenAddress 127.0.0.1
HostKey $WORK/host
AuthorizedKeysFile $WORK/user.pub
PidFile $WORK/sshd.pid
UsePAM no
UseDNS no
StrictModes no
PermitRootLogin yes
SetEnv HOME=$WORK/home
END
mkdir "$WORK/home" # what the start-up files of the user's shell print is not part of the test
[ "$(id -u)" != 0 ] || mkdir -p /run/sshd
"$SSHD" -D -f "$WORK/sshd_config" -E "$WORK/sshd.log" </dev/null &
DAEMON=$!
trap 'kill $DAEMON; rm -rf "$WORK"' EXIT
export IDIST_RSH="ssh -F none -p $PORT -i '$WORK/user' -o BatchMode=yes -o ConnectTimeout=5 \
    -o IdentitiesOnly=yes -o UserKnownHostsFile='$WORK/known' -o LogLevel=ERROR"

launch_build
RUN="$WORK/a runner's/idistrun" # the shell of the other host parses this path
mkdir "$WORK/a runner's"
cp build/idistrun "$RUN"
NAP=1$$ # seconds: a command line that no other test has
two=("$RUN" --hosts "localhost:2,127.0.0.1")

ok_run 0 "two hosts" 30 "${two[@]}" "$WHO" || tail -n 5 "$WORK/sshd.log" | diag
says "two hosts" "launcher idist, size 3, nodes 1" "rank 0: local 0 of 3, node 0" \
    "rank 1: local 1 of 3, node 0" \
    "rank 2: local 2 of 3, node 0"
# With two values of IDIST_HOSTID, the names are two hosts, which communicate over TCP.
# shellcheck disable=SC2016 # for the shell of the rank
IDIST_TRANSPORT=tcp ok_run 0 "told apart" 30 "${two[@]}" \
    sh -c 'IDIST_ADDR=127.0.0.1 IDIST_HOSTID=$GROUP_RANK exec "$0"' "$WHO"
says "told apart" "launcher idist, size 3, nodes 2" "rank 0: local 0 of 2, node 0" \
    "rank 1: local 1 of 2, node 0" \
    "rank 2: local 0 of 1, node 1"
trains "ssh" 60 "${two[@]}"

# Checks what the ranks get: their place, the folder, the variables and the arguments.
cat >"$WORK/told" <<'END'
#!/usr/bin/env perl
my @place = map { $ENV{$_} }
    qw(RANK LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE WORLD_SIZE MASTER_ADDR);
use Cwd;
$\ = "\n";
print "place @place";
print "folder ", getcwd;
print "set $ENV{IDIST_LOG} ", defined $ENV{IDIST_HOSTID} ? "shared" : "own";
print "arg <", join("> <", map { s/\n/N/r } @ARGV), ">";
END
chmod +x "$WORK/told"
# shellcheck disable=SC1003,SC2016 # as they are
awkward=(--tag "" "two words" "it's" '"$HOME"; *' $'a\nb' '\' -v)
IDIST_LOG=error IDIST_HOSTID=here ok_run 0 "what ranks are told" 30 "$RUN" --hosts \
    "$(id -un)@localhost,127.0.0.1:2" --tag \
    "$WORK/told" "${awkward[@]}"
for line in '0] place 0 0 1 0 2 3 localhost' '1] place 1 0 2 1 2 3 localhost' \
    '2] place 2 1 2 1 2 3 localhost' \
    "2] folder $PWD" "2] set error own" \
    "1] arg <--tag> <> <two words> <it's> <\"\$HOME\"; *> <aNb> <\\> <-v>"; do
    grep -qxF "[$line" "$WORK/log"
    ok $? "told: ${line%% *} ${line#* }" || diag <"$WORK/log"
done

cat >"$WORK/pieces" <<'END'
#!/usr/bin/env perl
$| = 1;
for my $i (1 .. 20) { for my $k (1 .. 20) { print $ENV{RANK} x 50 } print "\n" }
print "end of $ENV{RANK}";
END
chmod +x "$WORK/pieces"
ok_run 0 "lines in pieces" 30 "${two[@]}" --tag "$WORK/pieces"
[ "$(grep -Evc '^\[([0-3])\] (\1{1000}|end of \1)$' "$WORK/log")" = 0 ] &&
    [ "$(wc -l <"$WORK/log")" = 63 ]
ok $? "no line is torn" || { cut -c1-60 "$WORK/log" | head | diag; }

# The first failure decides the exit status, and is named once. The other ranks are gone after the
# grace period.
start=$(date +%s%N)
# shellcheck disable=SC2016
ok_run 139 "a rank crashes beside stubborn ones" 30 "${two[@]}" --grace 1 --error-file \
    "$WORK/error" \
    sh -c 'trap "" TERM; [ $RANK = 2 ] && sleep 1 && kill -SEGV $$; sleep $0; sleep $0' $NAP
ms=$((($(date +%s%N) - start) / 1000000))
[ "$(cat "$WORK/log")" = \
    "idistrun: rank 2 on host 127.0.0.1: killed by signal 11 (Segmentation fault)" ]
ok $? "its rank, host and signal are named" || diag <"$WORK/log"
[ $ms -lt 4000 ] && gone "sleep $NAP" 0
ok $? "all is gone after the grace period" || echo "after $ms ms, $(left "sleep $NAP") left" | diag
text='rank 2 on host 127.0.0.1: killed by signal 11 (Segmentation fault)'
grep -q "^{\"message\": {\"message\": \"$text\", " "$WORK/error"
ok $? "--error-file" || diag <"$WORK/error"
# shellcheck disable=SC2016 # the other ranks end before the grace period is over
ok_run 255 "a rank that ends as a lost connection would" 10 "${two[@]}" --grace 100 \
    sh -c '[ $RANK = 1 ] && exit 255; sleep 200'
[ "$(cat "$WORK/log")" = "idistrun: rank 1 on host localhost: exited with status 255" ]
ok $? "it is named all the same" || diag <"$WORK/log"
cat >"$WORK/message" <<'END'
#!/bin/sh
[ "$RANK" = 2 ] || exec sleep 30
printf '{"message":\n\t{"message": "two\\nlines", "extraInfo": {"timestamp": "1"}}}\n' \
    >"$TORCHELASTIC_ERROR_FILE"
printf 'a byte \036 of its own\n' >&2
printf 'words without an end' >&2
exit 4
END
chmod +x "$WORK/message"
ok_run 4 "a rank's own message" 30 "${two[@]}" --error-file "$WORK/error" "$WORK/message"
{
    printf 'a byte \036 of its own\nwords without an end'
    printf 'idistrun: rank 2 on host 127.0.0.1: exited with status 4: two\nlines\n'
} | cmp - "$WORK/log" &&
    [ "$(cat "$WORK/error")" = \
        '{"message":  {"message": "two\nlines", "extraInfo": {"timestamp": "1"}}}' ]
ok $? "it is shown, and its file passed on" || cat "$WORK/log" "$WORK/error" | diag
ok_run 127 "a program that is not there" 30 "${two[@]}" "$WORK/nothing"

# Hosts that do not answer
ok_run 125 "a host that refuses" 30 "$RUN" --hosts localhost,127.0.0.2 sleep $NAP
grep -q "idistrun: host 127.0.0.2: no connection" "$WORK/log" && gone "sleep $NAP" 0
ok $? "it is named, and nothing is left" || diag <"$WORK/log"
IDIST_RSH=$WORK/nothing ok_run 125 "no ssh" 30 "${two[@]}" true
job() { # COMMAND...: starts a job in the background, and waits until three ranks sleep
    env --default-signal=INT "${two[@]}" "$@" >"$WORK/log" 2>&1 </dev/null & \
        # a shell starts background commands with SIGINT ignored
    pid=$!
    for ((i = 0; i < 200; i++)); do [ "$(pgrep -xfc "sleep $NAP")" = 3 ] && return; sleep 0.05; done
}
job sleep $NAP
kill -KILL "$(pgrep -f -- "ssh .*-p $PORT .*localhost")"
wait $pid
[ $? = 125 ] && grep -q "host localhost: its ssh was killed by signal 9 (Killed)$" "$WORK/log" &&
    gone "sleep $NAP" 1
ok $? "a connection is lost" || diag <"$WORK/log"
job sleep $NAP
kill -KILL "$(pgrep -of "^$WORK/.*idistrun --node$")"
wait $pid
[ $? = 125 ] && gone "sleep $NAP" 1 &&
    grep -q "host [a-z0-9.]*: the connection or idistrun there was lost" "$WORK/log"
ok $? "idistrun on a host is killed" || diag <"$WORK/log"

# idistrun names the rank that failed first, whichever host reports first.
for trial in 1 2 3 4 5 6 7 8 9 10; do
    IDIST_LOG=error timeout -k 5 30 "${two[@]}" env "WHO_FATE=2 exitA" "$WHO" >"$WORK/log" 2>&1 \
        </dev/null
    [ $? = 7 ] || break
    grep -q "^idistrun: rank 2 on host 127.0.0.1: exited with status 7$" "$WORK/log" || break
done
[ "$trial" = 10 ]
ok $? "the first cause is named" || { echo "trial $trial" && cat "$WORK/log"; } | diag

# Signals
for signal in 2 15; do
    job sleep $NAP
    kill -$signal $pid
    wait $pid
    [ $? = $((128 + signal)) ] && gone "sleep $NAP" 0 && ! [ -s "$WORK/log" ]
    ok $? "signal $signal ends all" || diag <"$WORK/log"
done
job sleep $NAP
kill -KILL $pid
wait $pid 2>/dev/null
gone "sleep $NAP" 1 && gone "$WORK/.* --node" 1
ok $? "SIGKILL of the head leaves nothing"

# A restart starts all nodes again, with a higher restart count.
# shellcheck disable=SC2016
ok_run 0 "a restart" 30 "${two[@]}" --max-restarts 1 --error-file "$WORK/error" sh -c \
    '[ $RANK = 2 ] && mkdir "$0" 2>/dev/null && exit 9
    echo count $TORCHELASTIC_RESTART_COUNT; exec "$1"' \
    "$WORK/once" "$WHO"
says "a restart" "launcher idist, size 3, nodes 1" "rank 0: local 0 of 3, node 0" \
    "rank 1: local 1 of 3, node 0" \
    "rank 2: local 2 of 3, node 0"
[ "$(grep -c 'count 1' "$WORK/log")" = 3 ] && ! [ -e "$WORK/error" ]
ok $? "all started again, and there is no failure" || diag <"$WORK/log"

# idistrun creates a secret for each job. No command line may show the secret.
job sh -c "echo \$IDIST_SECRET; exec sleep $NAP"
cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\0' ' ' >"$WORK/lines"
kill -TERM $pid
wait $pid
secret=$(sort -u <"$WORK/log")
[[ $secret =~ ^[0-9a-f]{64}$ ]] && ! grep -qF "$secret" "$WORK/lines" &&
    grep -q "idistrun' --node" "$WORK/lines"
ok $? "the ranks have one secret, and nobody else" || diag <"$WORK/log"

for wrong in "--hosts , true" "--hosts a:0 true" "--hosts a,:2 true" \
    "--hosts -oProxyCommand=x true" \
    "--hosts a --nnodes 2 true"; do
    # shellcheck disable=SC2086 # a list
    ok_run 2 "refused: $wrong" 10 "$RUN" $wrong
done
done_testing
