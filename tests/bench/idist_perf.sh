#!/usr/bin/env bash
# idist_perf.sh - checks that idist_perf runs every operation with right results, writes JSON, and
# refuses invalid options. The test ignores the measured times.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"

PERF=$WORK/idist_perf
mkdir -p "$WORK/tests/bench"
ln -s "$ROOT"/idist*.h "$WORK"/
cp tests/bench/idist_perf.c tests/bench/rule.h "$WORK/tests/bench/"
ok_run 0 "builds where it lies" 120 cc -fsyntax-only "$WORK/tests/bench/idist_perf.c" ||
    done_testing
ok_run 0 "builds" 120 cc "${NOT_OPTIMIZED[@]}" -I. tests/bench/idist_perf.c -o "$PERF" ||
    done_testing

for op in all_reduce reduce broadcast all_gather gather scatter reduce_scatter all_to_all barrier \
    sendrecv scan; do
    ok_run 0 "$op" 60 "$PERF" -op $op -n 3 -b 4 -e 256K -f 16 -i 3 -w 1 -r 2
    ok $(($(grep -cE ' 0$' "$WORK/log") < 1)) "$op: there is a row without wrong results"
done
for op in all_reduce reduce all_gather gather scatter reduce_scatter all_to_all scan; do
    ok_run 0 "$op out of place" 60 "$PERF" -op $op -n 2 -d F64 -b 64K -e 64K -i 3 -w 1 -p out
done
for type in I8 U8 I16 U16 I32 U32 I64 U64 F16 BF16 F32 F64 F8E4M3 F8E5M2; do
    ok_run 0 "all_reduce AVG $type" 60 "$PERF" -n 3 -d $type -o AVG -b 10K -e 10K -i 2 -w 0
done
for reduction in SUM PROD MIN MAX BAND BOR BXOR LAND LOR; do
    ok_run 0 "reduce_scatter $reduction" 60 "$PERF" -op reduce_scatter -n 3 -d I32 -o $reduction \
        -b 10K -e 10K -i 2 -w 0
done
ok_run 0 "buffers from idist_alloc" 60 "$PERF" -n 2 -e 1K -m idist -i 2
ok_run 0 "-a, the same" 60 "$PERF" -n 2 -e 1K -a -i 2
for op in all_reduce broadcast all_gather reduce_scatter all_to_all barrier sendrecv; do
    ok_run 0 "by the rule of the peers: $op" 60 "$PERF" -op $op -n 3 -s 4,16,64K -l 20
    ok $(($(grep -cE "^$op,(barrier|b2b),3,[0-9]+,[0-9.]+,[0-9.]+\$" "$WORK/log") < 2)) \
        "by their rule: $op has lines"
done
ok_run 0 "by the rule of the peers: buffers from idist_alloc" 60 "$PERF" -n 2 -s 64K -x b2b -a -l 20
# Windows of messages. 20 B is not a multiple of a cache line, and messages of 5M share buffers.
windows_run() { # NAME OPS RANKS SIZES COMMAND...
    local name=$1 ops=$2 n=$3 sizes=$4 op lines
    shift 4
    for op in $ops; do
        ok_run 0 "$name: $op, $n ranks" 60 "$@" -op "$op" -s "$sizes" -l 20
        lines=$(grep -cE "^$op,(barrier|b2b),$n,[0-9]+,[0-9.]+,[0-9.]+\$" "$WORK/log")
        ok $((lines != 2 * $(tr , '\n' <<<"$sizes" | wc -l))) \
            "$name: $op, $n ranks: a line for each size and mode" || diag <"$WORK/log"
    done
}
for transport in auto tcp; do
    for grouped in "" -g; do
        # shellcheck disable=SC2086 # nothing or -g
        windows_run "windows over $transport${grouped:+ $grouped}" "rate bw bibw" 2 4,4K \
            env IDIST_TRANSPORT=$transport "$PERF" -n 2 $grouped
    done
    windows_run "windows over $transport" rate 4 8,64K env IDIST_TRANSPORT=$transport "$PERF" -n 4
done
windows_run "windows of large messages" "bw bibw" 2 5M "$PERF" -n 2
windows_run "windows in buffers from idist_alloc" "rate bibw" 2 20,64K "$PERF" -n 2 -a
for mpi in openmpi mpich; do
    if command -v mpicc.$mpi >/dev/null && command -v mpiexec.$mpi >/dev/null; then
        mpiexec=(mpiexec.mpich)
        [ $mpi = mpich ] || mpiexec=(mpiexec.openmpi --allow-run-as-root --oversubscribe)
        ok_run 0 "peer_mpi builds: $mpi" 60 mpicc.$mpi -O2 tests/bench/peer_mpi.c \
            -o "$WORK/peer_$mpi"
        windows_run "windows over $mpi" "rate bw bibw" 2 4,20,100K \
            "${mpiexec[@]}" -n 2 "$WORK/peer_$mpi"
    else
        skip "windows over $mpi" "it is not installed"
    fi
done

ok_run 0 "by the rule of the peers: start" 60 "$PERF" -n 4 -x start -l 20
ok_run 0 "a world of 1" 60 "$PERF" -n 1 -e 1K -i 2
run_ranks 2 60 "$PERF" -e 1K -i 2
ok $? "ranks started by hand" || cat "$WORK"/rank.? | diag
ok "$(wc -l <"$WORK/rank.1")" "ranks started by hand: rank 1 is silent"

# The reports of the benchmarks, from made-up lines.
report_has() { # NAME LINE: ignores differences in spaces
    sed 's/  */ /g' "$WORK/log" | grep -qxF -- "$2"
    ok $? "$1" || diag <"$WORK/log"
}
cat >"$WORK/peers.csv" <<'END'
idist,1,all_reduce,barrier,2,4,0.5000,0.4000
openmpi4,1,all_reduce,barrier,2,4,1.0000,0.9000
idist,1,rate,b2b,2,8,0.0800,0.0700
idist,2,rate,b2b,2,8,0.1000,0.0700
idist,3,rate,b2b,2,8,0.9000,0.0700
openmpi4,1,rate,b2b,2,8,0.2000,0.1500
mpich4,1,rate,b2b,2,8,0.1500,0.1500
idist,1,rate,barrier,4,1024,0.5000,0.4000
openmpi4,1,rate,barrier,4,1024,0.2500,0.2000
idist,1,bw,b2b,2,1048576,100.0000,90.0000
mpich4,1,bw,b2b,2,1048576,50.0000,45.0000
idist,1,bibw,b2b,2,4096,0.5120,0.5000
openmpi4,1,bibw,b2b,2,4096,1.0240,1.0000
END
ok_run 0 "report on the peers" 10 awk -f tests/bench/peers.awk "$WORK/peers.csv"
report_has "report on the peers: rate is in ns" "rate, 2 ranks, back to back, ns per message"
report_has "report on the peers: rate, medians and ratios" \
    " 8 100.0 200.0 150.0 | mpich4 1.50 2.00 | 10.000"
report_has "report on the peers: rate of two pairs" \
    " 1 Ki 500.0 250.0 - | openmpi4 0.50 0.50 | 2.000"
report_has "report on the peers: bw is in MB/s" "bw, 2 ranks, back to back, MB/s"
report_has "report on the peers: bw, and no figure of a peer" " 1 Mi 10486 - 20972 | mpich4 0.50 -"
report_has "report on the peers: bibw" " 4 Ki 8000 4000 - | openmpi4 2.00 2.00"
report_has "report on the peers: others are in us" "all_reduce, 2 ranks, us"
report_has "report on the peers: all_reduce" " 4 0.50 1.00 - | openmpi4 2.00 2.00"
report_has "report on the peers: windows have no targets" "Targets met: 3, missed: 0"

cat >"$WORK/net.csv" <<'END'
loopback,lo lo,idist,all_reduce,barrier,2,8,10.0000,8.0000
loopback,lo lo,openmpi4,all_reduce,barrier,2,8,20.0000,18.0000
loopback,lo lo,gloo,all_reduce,barrier,2,8,30.0000,18.0000
loopback,lo lo,idist,rate,b2b,2,8,0.5000,0.4000
loopback,lo lo,idist,rate,b2b,2,8,0.4000,0.4000
loopback,lo lo,idist,rate,b2b,2,8,9.0000,0.4000
loopback,lo lo,openmpi4,rate,b2b,2,8,0.7500,0.7000
END
ok_run 0 "report on hosts" 10 awk -f tests/bench/net.awk -v rate=1000 "$WORK/net.csv"
report_has "report on hosts: all_reduce" " 8 10.0 20.0 30.0 2.00 3.00 1.25"
report_has "report on hosts: rate has a table of its own" \
    "loopback, rate, a rank on each of: lo lo"
report_has "report on hosts: rate, without gloo" " 8 0.500 0.750 - 1.50 - 1.25"

ok_run 0 "--json" 60 "$PERF" -n 2 -b 1K -e 4K -f 2 -i 2 --json
perl -MJSON::PP -e 'local $/; $j = decode_json(<STDIN>); $r = $j->{results};
    exit !(@$r == 3 && $r->[2]{size} == 4096 && $r->[2]{count} == 1024 && $r->[0]{wrong} == 0 &&
        $j->{ranks} == 2)' \
    <"$WORK/log"
ok $? "--json: can be read, and has three rows" || diag <"$WORK/log"
# -plot: FILE.gnuplot has one line per size, and the picture has two points per size.
picture="$WORK/it's a picture"
plot_run() { # STATUS NAME COMMAND...: measures four sizes
    local status=$1 name=$2
    shift 2
    rm -f "$picture".*
    ok_run "$status" "$name" 60 "$@" -b 1K -e 64K -f 4 -i 2 -plot "$picture.svg"
    ok $(($(grep -cE '^[0-9]+ [0-9.]+ [0-9.]+$' "$picture.gnuplot") != 4)) \
        "$name: figures of four sizes" || diag <"$picture.gnuplot"
}
if command -v gnuplot >/dev/null; then
    for n in 1 2; do
        plot_run 0 "-plot, ranks $n" "$PERF" -n $n
        points=$(grep -c "<use xlink:href='#gpPt[0-9]*' transform='translate" "$picture.svg")
        ok $((points != 8)) "-plot, ranks $n: two points per size ($points)"
        grep -q "all_reduce in place, F32, ranks $n, nodes 1" "$picture.svg"
        ok $? "-plot, ranks $n: says what it is of"
    done
    ok_run 0 "-plot, one size" 60 "$PERF" -b 4 -e 4 -i 2 -plot "$picture.svg"
    ok_run 0 "-plot beside --json" 60 "$PERF" -e 64 -i 2 -plot "$picture.svg" --json
    perl -MJSON::PP -e 'local $/; decode_json(<STDIN>)' <"$WORK/log"
    ok $? "-plot beside --json: can be read" || diag <"$WORK/log"
else
    skip "-plot" "no gnuplot: Debian package gnuplot-nox"
fi
mkdir "$WORK/bin"
plot_run 1 "-plot without gnuplot" env PATH="$WORK/bin" "$PERF" -n 2
grep -qF "there is no gnuplot here (Debian package gnuplot-nox)" "$WORK/log"
ok $? "-plot without gnuplot: says so" || diag <"$WORK/log"
printf '#!/bin/sh\nexit 3\n' >"$WORK/bin/gnuplot"
chmod +x "$WORK/bin/gnuplot"
plot_run 1 "-plot with a gnuplot that fails" env PATH="$WORK/bin" "$PERF" -n 2
grep -qF "picture.gnuplot failed" "$WORK/log"
ok $? "-plot with a gnuplot that fails: says so" || diag <"$WORK/log"
ok_run 1 "-plot to nowhere" 60 "$PERF" -e 4 -plot "$WORK/nowhere/a.svg"
grep -qF "nowhere/a.gnuplot: No such file or directory" "$WORK/log"
ok $? "-plot to nowhere: says so" || diag <"$WORK/log"

ok_run 0 "--help" 10 "$PERF" --help
for bad in "-x 1" "-n 0" "-n" "-b 0" "-b 4X" "-b 8 -e 4" "-f 1" "-d F31" "-o NOT" "-op not" "-c 2" \
    "-i 0" "-r 2 -n 2" \
    "-o BAND" "-op scan -o AVG" "-op sendrecv -p in" "-op broadcast -p out" "words" "-s 4,,8" \
    "-s 4X" \
    "-plot a.png" "-plot .svg" "-plot" "-op barrier -plot a.svg" "-s 4 -plot a.svg" \
    "-x never" "-l 0" "-s 4 -op scan" "-s 4 -d F64" "-op rate" "-op rate -b 4" "-s 4 -g" \
    "-op rate -n 3 -s 4" "-op bw -n 4 -s 4" "-op bibw -n 1 -s 4"; do
    # shellcheck disable=SC2086 # words are meant to split
    ok_run 2 "refused: $bad" 10 "$PERF" $bad
done
done_testing
