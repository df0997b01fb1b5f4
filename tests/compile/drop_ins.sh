#!/usr/bin/env bash
# drop_ins.sh - tests the headers at the root, as a program copies them. They must match src/, each
# must be complete by itself, and files of two versions must refuse each other. compile.sh tests
# idist.h in every language and arrangement.
# shellcheck source=tests/lib/tap.sh
. "$(dirname "$0")/../lib/tap.sh"

DROP_INS=(idist.h idist_ring.h idist_mpi.h idist_nccl.h idist_xla.h idist_train.h)

# ---- generated, and not stale ----

if command -v python3 >/dev/null; then
    ok_run 0 "the drop-ins are what src/ gives" 30 tools/drop_ins.py --check
    mkdir "$WORK/clone"
    cp -r src tools "${DROP_INS[@]}" "$WORK/clone"
    sed -i 's/^static void idist__world_lock/\/\/ changed\n&/' "$WORK/clone/src/core/world.h"
    ok_run 1 "a changed source is noticed" 30 "$WORK/clone/tools/drop_ins.py" --check
    grep -qx 'stale: idist.h; run make drop-ins, and commit what it writes' "$WORK/log"
    ok $? "and the stale drop-in named" || diag <"$WORK/log"
    ok_run 0 "it is rewritten" 30 "$WORK/clone/tools/drop_ins.py"
    cmp -s idist_ring.h "$WORK/clone/idist_ring.h" && grep -q '^// changed$' "$WORK/clone/idist.h"
    ok $? "and no other one"

    mkdir "$WORK/lines"
    ok_run 0 "with #line" 30 tools/drop_ins.py --line-directives "$WORK/lines"
    : >"$WORK/wrong"
    for file in core/task ring/msg/link ring/ring_backend train/ddp/ddp_step; do
        at=$(grep -nm 1 '^static.*) {$' "src/$file.h" | cut -d : -f 1)
        line=$(sed -n "${at}p" "src/$file.h")
        for header in "${DROP_INS[@]}"; do awk -v line="$line" -v file="$header" '
            $1 == "#line" { at = $2 - 1; source = $3; next }
            $0 == line { print source, at + 1; exit }
            { at++ }' "$WORK/lines/$header"; done | sort -u >"$WORK/at"
        grep -qx "\"src/$file.h\" $at" "$WORK/at" ||
            { echo "$file $at" && cat "$WORK/at"; } >>"$WORK/wrong"
    done
    ok "$(wc -l <"$WORK/wrong")" "lines are those of src/" || diag <"$WORK/wrong"
else
    skip "the drop-ins are what src/ gives" "no python3"
fi
# Lists the parts of all drop-ins, except the parts that every drop-in has.
grep -h '^// ---- [^ ]*\.h -' "${DROP_INS[@]}" | awk '{ print $3 }' | sort >"$WORK/parts"
grep -vE '^(base/(begin|end)|os/mutex_init)\.h$' "$WORK/parts" | uniq -d >"$WORK/log"
ok "$(wc -l <"$WORK/log")" "no part is in two drop-ins, or twice in one" || diag <"$WORK/log"
(cd src && find . -mindepth 2 -name '*.h') | sed 's/^..//' | sort >"$WORK/sources"
sort -u "$WORK/parts" | diff "$WORK/sources" - >"$WORK/log"
ok $? "every file of src/ is in one" || diag <"$WORK/log"

# ---- copied alone ----

copied() { # FOLDER HEADER...
    mkdir "$WORK/$1"
    cp "${@:2}" "$WORK/$1"
}
copied all "${DROP_INS[@]}"
copied alone idist.h
cat >"$WORK/all/mpi_and_train.c" <<'END'
#define IDIST_IMPLEMENTATION
#include "idist_mpi.h"
#include "idist_xla.h"
#include "idist_train.h"
#include <stdio.h>
int main(void) {
    float weight = 1, gradient = 2;
    idist_tensor tensors[2];
    idist_ddp_desc desc;
    idist_ddp *ddp = NULL;
    int status = 0;
    memset(tensors, 0, sizeof tensors);
    memset(&desc, 0, sizeof desc);
    if (idist_initialize(NULL) != IDIST_OK) {
        fprintf(stderr, "%s\n", idist_last_error());
        return 1;
    }
    tensors[0].data = &weight;
    tensors[1].data = &gradient;
    tensors[0].count = tensors[1].count = 1;
    tensors[0].dtype = tensors[1].dtype = IDIST_F32;
    desc.params = &tensors[0];
    desc.grads = &tensors[1];
    desc.n = 1;
    gradient = (float)(2 * idist_get_rank());
    if (idist_ddp_create(&desc, &ddp) != IDIST_OK || idist_ddp_wait(ddp) != IDIST_OK) status = 2;
    printf("%s, rank %d of %d: %g\n", idist_backend(), idist_get_rank(), idist_get_world_size(),
           (double)gradient);
    idist_ddp_free(&ddp);
    if (idist_finalize() != IDIST_OK) status = 3;
    return status;
}
END
cat >"$WORK/alone/two.c" <<'END'
#define IDIST_IMPLEMENTATION
#include "idist.h"
#include <stdio.h>
static int nothing(int local_rank, void *arg) {
    (void)local_rank, (void)arg;
    return 0;
}
int main(void) {
    float x = 1;
    idist_status status;
    if (idist_initialize(NULL) != IDIST_OK) return 1;
    if (idist_all_reduce(&x, &x, 1, IDIST_F32, IDIST_SUM, NULL) != IDIST_OK) return 2;
    if (idist_finalize() != IDIST_OK) return 3;
    status = idist_spawn(nothing, NULL, 2, NULL);
    printf("%s: %s\n", idist_status_name(status), idist_last_error());
    return 0;
}
END
mpi=
for at in /usr/lib/*-linux-gnu/openmpi/include /usr/include/*-linux-gnu/mpich; do
    [ -e "$at/mpi.h" ] && mpi=$at
done
strict=(-Wall -Wextra -Werror '-Doptimize(level)=')
languages="gcc:c99:c gcc:c11:c clang:c99:c clang:c11:c
    g++:c++11:c++ g++:c++20:c++ clang++:c++11:c++ clang++:c++20:c++"
for entry in $languages; do
    IFS=: read -r compiler std language <<<"$entry"
    { command -v "$compiler" && [ -n "$mpi" ]; } >/dev/null || continue
    later "$compiler-$std" 60 "$compiler" -std="$std" "${strict[@]}" -isystem "$mpi" -fsyntax-only \
        -x "$language" "$WORK/all/mpi_and_train.c"
done
later alone 60 sh -c "cd '$WORK/alone' &&
    cc -O0 -Wall -Wextra -Werror two.c -o two -pthread && ./two"
mpicc=$(command -v mpicc.openmpi || command -v mpicc.mpich)
[ -z "$mpicc" ] || later mpicc 60 "$mpicc" -O0 "${strict[@]}" "$WORK/all/mpi_and_train.c" \
    -o "$WORK/all/app" -pthread
cuda=build/cuda/12.9/include
[ ! -e "$cuda/cuda_runtime_api.h" ] || later nccl 60 gcc -std=c99 "${strict[@]}" -isystem "$cuda" \
    -fsyntax-only -DIDIST_IMPLEMENTATION -x c "$WORK/all/idist_nccl.h"

for entry in $languages; do
    IFS=: read -r compiler std language <<<"$entry"
    name="$compiler -std=$std: idist_mpi.h, idist_xla.h and idist_train.h"
    if [ -n "${LATER[$compiler-$std]:-}" ]; then ok_later "$compiler-$std" "$name"; else
        skip "$name" "no $compiler, or no mpi.h"; fi
done
if [ -n "${LATER[nccl]:-}" ]; then ok_later nccl "gcc -std=c99: idist_nccl.h"; else
    skip "idist_nccl.h" "no $cuda: make peers fetches it"; fi
if [ -n "${LATER[mpicc]:-}" ]; then
    ok_later mpicc "a program with MPI and training compiles"
    mpirun=${mpicc/mpicc/mpirun}
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    ok_run 0 "two ranks of it run" 60 "$mpirun" -n 2 "$WORK/all/app"
    [ "$(grep -c '^mpi, rank [01] of 2: 1$' "$WORK/log")" = 2 ]
    ok $? "their gradients are averaged" || diag <"$WORK/log"
else
    skip "a program with MPI and training" "no mpicc"
fi
ok_later alone "idist.h without idist_ring.h: a world of 1 works"
grep -q 'no backend for a world of 2 .*copy idist_ring.h beside idist.h' "$WORK/log"
ok $? "a world of 2 asks for idist_ring.h" || diag <"$WORK/log"

# ---- two versions ----

for header in idist_ring.h idist_mpi.h idist_nccl.h idist_xla.h idist_train.h; do
    copied "old_$header" idist.h "$header"
    sed -i 's/^#define IDIST_VERSION_PATCH .*/#define IDIST_VERSION_PATCH 77/' \
        "$WORK/old_$header/idist.h"
    echo "#include \"$header\"" >"$WORK/old_$header/app.c"
    ok_run 1 "$header beside another idist.h" 30 cc -fsyntax-only "$WORK/old_$header/app.c"
    grep -q "#error.*$header is version .*copy both from the same release" "$WORK/log"
    ok $? "is refused by name" || diag <"$WORK/log"
done
done_testing
