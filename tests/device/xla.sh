#!/usr/bin/env bash
# xla.sh - idist_xla.h on a stand-in for PJRT with faults and several processes (tests/fake/pjrt.c),
# and on XLA's real CPU plug-ins, the oldest and the newest ABI that PyPI has.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"
# shellcheck source=tests/lib/mpi.sh
. tests/lib/mpi.sh

export IDIST_LOG=error IDIST_TEST_QUICK=1 IDIST_XLA_CPU_DEVICES=8 XLA_WORLDS=$WORK
flags=(-std=gnu11 -g -Wall -Wextra "${NOT_OPTIMIZED[@]}" -Isrc -Itests/lib -Itests/fake)
build() { # NAME FLAGS...
    local name=$1
    shift
    later "$name" 100 cc "${flags[@]}" "$@" -lpthread -lm -o "$WORK/$name"
}
stand_in=(-Wno-unused-function -fPIC -shared "-Wl,-Bsymbolic" tests/fake/pjrt.c)

# ---- compiled beside each other ----

build calls tests/xla/xla_calls.c
build pjrt.so "${stand_in[@]}"
build faults tests/xla/xla_faults.c
build tpu tests/xla/tpu.c
for library in $MPI_LIBRARIES none; do
    [ -n "$(mpi_missing "$library")" ] || break
done
[ "$library" = none ] || later mpi 100 bash -c '. tests/lib/mpi.sh; mpi_cc "$@"' - "$library" \
    "${flags[@]}" tests/xla/xla_mpi.c -lpthread -lm -o "$WORK/mpi"
for sanitizer in address,undefined thread; do
    build "$sanitizer-calls" -fsanitize=$sanitizer -Wno-tsan tests/xla/xla_calls.c
    build "$sanitizer.so" -fsanitize=$sanitizer -Wno-tsan "${stand_in[@]}"
done
later on_device.o 100 cc "${flags[@]}" -DON_XLA -c tests/fake/on_device.c -o "$WORK/on_device.o"
awk '/^        \/\/ app.c/ { inside = 1 } inside; inside && /^        }$/ { exit }' idist_xla.h \
    >"$WORK/doc.c"
later doc 100 cc "$WORK/doc.c" -I. -o "$WORK/doc"

# ---- the stand-in ----

export IDIST_XLA_LIB=$WORK/pjrt.so
ok_later calls "the test of calls builds"
ok_later pjrt.so "the stand-in builds"
ok_run 0 "calls, ranks that are threads" 60 "$WORK/calls" xla
ok_run 0 "calls, ranks that are processes" 60 "$WORK/calls" xla processes
ok_run 0 "calls, everything staged" 60 env IDIST_DEVICE_BACKEND=staged "$WORK/calls" staged
ok_later faults "the test of faults builds"
ok_run 0 "faults" 120 env IDIST_TEST_SLOW=2 "$WORK/faults"
ok_later tpu "the test of TPU variables builds"
ok_run 0 "TPU variables" 20 env -u IDIST_XLA_LIB "$WORK/tpu"
if [ "$library" = none ]; then
    skip "idist_mpi.h with one thread" "no MPI library (make deps, make peers)"
else
    ok_later mpi "the test with $library builds"
    mpi_run_command "$library" 2
    for path in xla staged; do
        ok_run 0 "one thread calls $library, $path" 60 env IDIST_DEVICE_BACKEND=$path \
            FAKE_PJRT_WORLD="$WORK/mpi.$path" "${MPI_RUN[@]}" "$WORK/mpi"
    done
fi
for sanitizer in address,undefined thread; do
    ok_later "$sanitizer-calls" "calls with -fsanitize=$sanitizer builds"
    ok_later "$sanitizer.so" "the stand-in with -fsanitize=$sanitizer builds"
    ok_run 0 "calls, $sanitizer" 100 env IDIST_TEST_SLOW=5 IDIST_XLA_LIB="$WORK/$sanitizer.so" \
        TSAN_OPTIONS=exitcode=99 ASAN_OPTIONS=exitcode=99 "$WORK/$sanitizer-calls" xla
done
ok_later doc "the program in the header builds"
ok_run 0 "it runs" 20 "$WORK/doc"
grep -q '^rank 0 on xla:3: 1$' "$WORK/log"
ok $? "and prints what it should" || diag <"$WORK/log"

# ---- errors of the user ----

says() { # NAME TEXT ENVIRONMENT...
    ok_run 1 "$1" 20 env "${@:3}" "$WORK/doc"
    grep -qF "$2" "$WORK/log"
    ok $? "says so" || diag <"$WORK/log"
}
says "no plug-in" "has no device of XLA: rank 0 has none: this machine has no TPU" IDIST_XLA_LIB=
says "a TPU that is not there" "rank 0 has no device: this machine has no TPU" IDIST_XLA_LIB= \
    IDIST_BACKEND=xla-tpu
says "a TPU, and a plug-in for others" 'has devices of platform "fake", not TPUs' \
    IDIST_BACKEND=xla-tpu
says "PJRT_DEVICE=TPU" "rank 0 has no device" IDIST_XLA_LIB= PJRT_DEVICE=TPU
says "no such file" "cannot open shared object file" IDIST_XLA_LIB=/no/such.so IDIST_DEVICE=xla
says "another library" "it is no PJRT plug-in" IDIST_XLA_LIB=libm.so.6 IDIST_DEVICE=xla
says "a device that is not there" "device 9 of 8" IDIST_DEVICE=xla:9
says "no such device" 'device "gpu" is none of' IDIST_DEVICE=gpu
says "no such path" 'device backend "fast" (IDIST_DEVICE_BACKEND) is none of' \
    IDIST_DEVICE_BACKEND=fast
says "what NCCL has" "names a device or a path of idist_nccl.h" IDIST_DEVICE_BACKEND=nccl
says "the processor" 'the requested device is "cpu"' IDIST_DEVICE=cpu
says "no number of devices" "IDIST_XLA_CPU_DEVICES=many" IDIST_DEVICE=xla IDIST_XLA_CPU_DEVICES=many

# ---- the real plug-ins ----

cat >"$WORK/packages" <<'END'
xla-cpu-pjrt==0.0.1 --hash=sha256:55837b6b7b47daa717f2d9a5a03563ea0ceaa338d06a81a1e2d3f060d960decc
lammps-jax-pjrt-cpu==0.11.2 \
    --hash=sha256:1319390d948b39f69f7dade496b7c385149d9ca6097a6b62114da113216d9ad1
END
fetched=build/xla/fetched
if ! { command -v python3 && [ "$(uname -m)" = x86_64 ]; } >/dev/null; then
    skip "XLA's CPU plug-ins" "no python3, or another processor"
elif ! cmp -s "$WORK/packages" $fetched && ! timeout 300 python3 -m pip download -q \
    --disable-pip-version-check --no-deps --require-hashes -r "$WORK/packages" -d "$WORK/wheels" \
    >"$WORK/log" 2>&1; then
    skip "XLA's CPU plug-ins" "PyPI does not give them: $(tail -n 1 "$WORK/log")"
else
    found=build/xla/packages
    for wheel in "$WORK"/wheels/*.whl; do
        [ ! -e "$wheel" ] || python3 -m zipfile -e "$wheel" $found
    done
    cp "$WORK/packages" $fetched
    build abi -I$found/xla_plugins/xla_cpu_pjrt/include tests/xla/pjrt_abi.c
    later example 100 cc "${NOT_OPTIMIZED[@]}" -DIDIST_IMPLEMENTATION examples/13_xla_train.c \
        -o "$WORK/example"
    ok_later abi "the test of the ABI builds"
    ok_run 0 "the ABI is that of the real pjrt_c_api.h" 20 "$WORK/abi"
    ok_later on_device.o "idist for tests on device memory builds"
    tests="all_reduce broadcast all_gather reduce_scatter all_to_all reduce gather scan v_forms"
    for test in $tests; do
        build "dist_$test" -DON_XLA -include tests/fake/on_device.h tests/dist/"$test".c \
            "$WORK/on_device.o"
    done
    for plugin in $found/xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so \
        $found/lammps_jax_pjrt_cpu/pjrt_c_api_cpu_plugin.so; do
        name=$(basename "$plugin")
        export IDIST_XLA_LIB=$ROOT/$plugin
        [ -e "$WORK/ran" ] || ok_later example "examples/13_xla_train.c builds"
        ok_run 0 "$name: the example runs" 60 "$WORK/example"
        sed -n 's/^\/\/    \(.*\)/\1/p' examples/13_xla_train.c | grep -E 'loss|weights' |
            diff - <(grep -E 'loss|weights' "$WORK/log") >"$WORK/ran"
        ok $? "$name: and prints what its head says" || diag <"$WORK/ran"
        ok_run 0 "$name: calls, ranks that are threads" 100 "$WORK/calls" xla
        ok_run 0 "$name: calls, ranks that are processes" 100 "$WORK/calls" staged processes
        [ "${IDIST_TEST_FULL:-0}" = 1 ] || [ ! -e "$WORK/built_all_reduce" ] ||
            tests="all_reduce reduce_scatter v_forms" # the second plug-in
        for test in $tests; do
            thin=60 # one case in 60 of the grid
            [ "${IDIST_TEST_FULL:-0}" != 1 ] || thin=4
            [ -e "$WORK/built_$test" ] || ok_later "dist_$test" "tests/dist/$test.c builds"
            : >"$WORK/built_$test"
            [ "$test" != all_reduce ] || thin=$((thin * 4)) # it has most cases, and most programs
            ok_run 0 "$name: $test" 150 env IDIST_TEST_NCCL=1 IDIST_TEST_SLOW=2 \
                IDIST_TEST_THIN="$thin" \
                "$WORK/dist_$test"
            grep -Eq '^# [1-9][0-9]+ calls on the device' "$WORK/log"
            ok $? "$name: $test was on device memory" || tail -n 3 "$WORK/log" | diag
        done
    done
fi

# ---- the compiler for TPUs ----

printf "libtpu==0.0.52 --hash=sha256:%s\n" \
    f5e2e596eaea9357fbb5a6755a7a9007c6ab75bfde4a55191b03eff402971140 >"$WORK/packages"
if [ "${IDIST_TEST_FULL:-0}" != 1 ]; then
    skip "libtpu's compiler" "137 MB and four minutes: with IDIST_TEST_FULL=1"
elif [ ! -e "${WORK}/abi" ] || ! timeout 300 python3 -m pip download -q --no-deps \
    --disable-pip-version-check --python-version 3.11 --only-binary=:all: --require-hashes \
    -r "$WORK/packages" -d "$WORK/libtpu_wheel" >"$WORK/log" 2>&1; then
    skip "libtpu's compiler" "PyPI does not give it: $(tail -n 1 "$WORK/log")"
else
    python3 -m zipfile -e "$WORK"/libtpu_wheel/*.whl "$WORK/libtpu"
    build tpu_programs -I"$found"/xla_plugins/xla_cpu_pjrt/include tests/xla/tpu_programs.c
    ok_later tpu_programs "the test of programs for TPUs builds"
    for topology in v5e:2x2 v6e:2x2; do # without the variables libtpu looks for a metadata server
        ok_run 0 "libtpu accepts the programs for $topology" 600 env TPU_SKIP_MDS_QUERY=1 \
            TPU_ACCELERATOR_TYPE=v5litepod-4 TPU_WORKER_HOSTNAMES=localhost \
            "$WORK/tpu_programs" "$WORK/libtpu/libtpu/libtpu.so" $topology
    done
fi
done_testing
