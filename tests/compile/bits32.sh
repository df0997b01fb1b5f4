#!/usr/bin/env bash
# bits32.sh - tests idist on a machine where a long and a pointer have 32 bits: no warnings, the
# same results, and the system calls that are special to such a machine. Runs with a time_t of 32
# bits and of 64 bits.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"

# gcc-multilib, which has the folder asm, cannot be installed beside a cross compiler. So the native
# headers' folder asm is used.
m32=(-m32 -isystem "/usr/include/$(uname -m)-linux-gnu")
printf '#include <stdio.h>\nint main(void) { return 0; }\n' >"$WORK/try.c"
{ gcc "${m32[@]}" "$WORK/try.c" -o "$WORK/try" && "$WORK/try"; } >/dev/null 2>&1 || {
    echo "1..0 # SKIP gcc -m32 builds no program that runs here: apt-get install gcc-12-multilib"
    exit 0
}
warn=(-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror)
time64=(-D_TIME_BITS=64 -D_FILE_OFFSET_BITS=64)
export IDIST_TEST_QUICK=1

# Replaces results of the kernel and of libc with results that they would not give here.
# IDIST_IMPLEMENTATION comes first, as idist.h demands.
cat >"$WORK/system.c" <<'END'
#define IDIST_IMPLEMENTATION
#define _GNU_SOURCE
#include "idist_train.h"
#include <dlfcn.h>

static int no_getrandom, broken_folder;

long syscall(long number, ...) {
    long (*real)(long, ...), a[6];
    va_list args;
    int i;
    if (number == SYS_getrandom && no_getrandom) {
        no_getrandom++;
        errno = ENOSYS;
        return -1;
    }
    *(void **)&real = dlsym(RTLD_NEXT, "syscall");
    va_start(args, number);
    for (i = 0; i < 6; i++) a[i] = va_arg(args, long);
    va_end(args);
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

struct dirent *readdir(DIR *dir) {
    struct dirent *(*real)(DIR *);
    if (broken_folder) {
        errno = EOVERFLOW;
        return NULL;
    }
    *(void **)&real = dlsym(RTLD_NEXT, sizeof(ino_t) == sizeof(long) ? "readdir" : "readdir64");
    return real(dir);
}

#define CHECK(condition) \
    if (!(condition)) return printf("line %d: %s\n", __LINE__, idist_last_error()), 1

int main(int argc, char **argv) {
    unsigned char bytes[4096], counts[256] = {0};
    float most = 3e38f, average = 0;
    const void *in[2] = {&most, &most};
    idist_checkpoint_desc desc;
    uint32_t word = 1;
    int64_t before;
    char file[512];
    int i, distinct = 0;
    CHECK(argc == 2);

    // The sum of an average is infinite, also where a register holds more.
    idist__reduce_many(&average, in, 2, 1, IDIST_F32, IDIST_AVG, 2);
    CHECK(average > most);

    // A sleeper sleeps until its time, neither less nor for ever.
    before = idist__os_clock_now_ns();
    while (idist__os_clock_now_ns() - before < 100 * IDIST__MS) {
        distinct++;
        idist__os_wake_await_word(&word, 1, before + 100 * IDIST__MS);
    }
    CHECK(distinct < 20);

    // Without getrandom: not the clock, in which half of the bytes are the same every time.
    no_getrandom = 1;
    idist__os_random(bytes, sizeof bytes);
    CHECK(no_getrandom > 1);
    no_getrandom = 0;
    for (i = 0; i < 4096; i++) counts[bytes[i]] = 1;
    for (i = distinct = 0; i < 256; i++) distinct += counts[i];
    CHECK(distinct > 250);
    for (i = 12; i < 4096; i += 8) CHECK(memcmp(bytes + i, bytes + i - 8, 4) != 0);

    // A folder that cannot be read to its end is not one without a checkpoint.
    CHECK(idist_initialize(NULL) == IDIST_OK);
    memset(&desc, 0, sizeof desc);
    desc.folder = argv[1];
    CHECK(idist_checkpoint_find(&desc, true, file, sizeof file, NULL) == IDIST_ERR_NOT_FOUND);
    broken_folder = 1;
    CHECK(idist_checkpoint_find(&desc, true, file, sizeof file, NULL) == IDIST_ERR_SYSTEM);
    CHECK(strstr(idist_last_error(), "too large"));
    CHECK(sizeof(off_t) == 8);
    return idist_finalize() == IDIST_OK ? 0 : 1;
}
END
# glibc before 2.25 has no sys/random.h.
mkdir -p "$WORK/old/sys" "$WORK/folder"
echo '#error "sys/random.h is not there"' >"$WORK/old/sys/random.h"

printf '#define IDIST_IMPLEMENTATION\n#include "idist_train.h"\n' >"$WORK/impl.c"
cp "$WORK/impl.c" "$WORK/impl.cpp"
# ID COMPILER FLAGS: compile the headers with a time_t of 32 or 64 bits. One build is optimized, for
# the warnings that need the optimizer. The other builds differ only in the front end.
plan="gcc gcc -std=gnu11 -O2 impl.c
gcc-time64 gcc -std=c99 ${NOT_OPTIMIZED[*]} ${time64[*]} impl.c
g++ g++ -std=c++11 ${NOT_OPTIMIZED[*]} impl.cpp
clang clang -std=gnu11 -O0 impl.c
clang++ clang++ -std=c++11 -O0 ${time64[*]} impl.cpp"
while read -r id compiler flags; do
    # shellcheck disable=SC2086 # a list
    command -v "$compiler" >/dev/null &&
        later "$id" 100 "$compiler" "${m32[@]}" "${warn[@]}" -I. ${flags% *} \
        -c "$WORK/${flags##* }" -o "$WORK/$id.o"
done <<<"$plan"

# The same checks must also hold where a long has 64 bits.
system() { # system ID FLAGS...
    local id=$1
    shift
    later "$id" 100 gcc -std=gnu11 "${NOT_OPTIMIZED[@]}" -Wall -Werror "$@" -I"$WORK/old" -I. \
        "$WORK/system.c" -o "$WORK/$id" -pthread -ldl
}
system system64
system system32 "${m32[@]}" -O1 # -O1 keeps floats in registers
system system32-time64 "${m32[@]}" "${time64[@]}"
program() { # program ID FILE FLAGS...
    local id=$1 file=$2
    shift 2
    later "$id" 100 gcc -std=gnu11 "${NOT_OPTIMIZED[@]}" -Wall -Wextra -Werror "${m32[@]}" "$@" \
        -I. -Itests/lib "$file" -o "$WORK/$id" -pthread
}
program types tests/unit/types.c -O1 -DIDIST_IMPLEMENTATION # with the x87 floats of a 32-bit build
program sampler tests/unit/sampler.c
program p2p tests/dist/p2p.c "${time64[@]}" -DIDIST_IMPLEMENTATION

while read -r id compiler flags; do
    if command -v "$compiler" >/dev/null; then
        # The 32-bit libstdc++ or libgcc may be absent, but nothing is linked here.
        ok_later "$id" "$compiler -m32 ${flags% *}: no warning"
    else
        skip "$compiler -m32" "$compiler is not installed"
    fi
done <<<"$plan"
for id in system64 system32 system32-time64; do
    ok_later $id "$id: compiles" || continue
    ok_run 0 "$id: averages, sleeps, draws random bytes, and tells a broken folder" 60 \
        "$WORK/$id" "$WORK/folder"
done
for id in types sampler p2p; do
    ok_later $id "$id: compiles" && ok_run 0 "$id: passes with 32 bits" 120 "$WORK/$id"
done
done_testing
