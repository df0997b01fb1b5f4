/* idist.h - v0.1.0 - distributed computing you can embed - MIT licence - https://github.com/idist/idist

DO THIS

    In ONE C or C++ file:                          in all others, just:

        #define IDIST_IMPLEMENTATION                   #include "idist.h"
        #include "idist.h"

    In the file with IDIST_IMPLEMENTATION put it before the system headers. No library to link, no configure step, no
    install: copy idist.h and idist_ring.h into your project.

A COMPLETE PROGRAM

        #define IDIST_IMPLEMENTATION
        #include "idist.h"
        #include <stdio.h>

        static int work(int local_rank, void *arg) {
            float x[2] = {1.0f + (float)local_rank, 2.0f};
            (void)arg;
            if (idist_all_reduce(x, x, 2, IDIST_F32, IDIST_SUM, NULL) != IDIST_OK) {
                fprintf(stderr, "%s\n", idist_last_error());
                return 1;
            }
            printf("rank %d of %d: %g %g\n", idist_get_rank(), idist_get_world_size(), x[0], x[1]);
            return 0;
        }

        int main(void) {
            if (idist_spawn(work, NULL, 4, NULL) == IDIST_OK) return 0;
            fprintf(stderr, "%s\n", idist_last_error());
            return 1;
        }

    cc app.c -o app && ./app

        rank 2 of 4: 10 8        (four lines, in any order)

    The same function under a launcher instead of idist_spawn: idist_initialize(NULL); work(...); idist_finalize();
    or one call for both: idist_parallel_run(&desc, work, NULL).

CONTENTS

    Search for the tags.

    declarations
      [api:status]     what can go wrong
      [api:types]      element types, operations, options
      [api:desc]       how to start
      [api:life]       begin, end, and who am I
      [api:coll]       collectives
      [api:p2p]        from one rank to another
      [api:group]      groups
      [api:op]         reductions of your own
      [api:spawn]      processes
      [api:memory]     buffers
      [api:store]      a key-value table for rendezvous
      [api:backend]    backends, and the lists of them
    implementation
      [impl:os]        the only place that knows the operating system
      [impl:err]       status names, and the text of a thread's last failure
      [impl:mem]       memory through the caller's allocator
      [impl:log]       one line at a time, to the caller's logger or to stderr
      [impl:type]      dtypes: sizes, names, floats of 16 and 8 bits
      [impl:reduce]    out = lo (op) hi, for all dtypes and ops
      [impl:sha]       SHA-256 and HMAC
      [impl:sock]      stream sockets
      [impl:auth]      a mutual handshake on every connection
      [impl:store]     the key-value table in memory, in a file, behind a socket
      [impl:launch]    the configuration: explicit field, then environment, then built-in
      [impl:world]     worlds, groups and tasks
      [impl:call]      every communication call passes through here
      [impl:self]      the backend of a world of 1
      [impl:life]      open and close a world; the getters
      [impl:coll]      the public collectives
      [impl:p2p]       send, receive, requests, calls that progress together
      [impl:group]     groups and user ops
      [impl:help]      one rank first, one rank only
      [impl:spawn]     worker processes, and Ignite's Parallel

WHAT IT IS

    Ranks, collectives, send and receive, barriers, groups, worker processes, rendezvous and data-parallel helpers,
    as a header: what ignite.distributed, torch.distributed and Horovod give a Python program. The same source runs
    alone, spawned by itself, or under a launcher that sets RANK and WORLD_SIZE. Ranks of one host talk through shared
    memory, ranks of several hosts over TCP.

    It is not a task scheduler, a parameter server or a serialisation format; it moves arrays of numbers and bytes.
    It is not for the open internet: connections are authenticated, but nothing is encrypted. All ranks run the same
    build on machines of one byte order.

BUILD AND LINK

    C99 or later, C++11 or later; gcc, clang, nvcc. Linux. Needs libc and pthread (with glibc before 2.34: -lpthread).

        cc app.c                                        IDIST_IMPLEMENTATION defined in app.c
        cc -DIDIST_IMPLEMENTATION app.c                 or on the command line, for a program of one file
        cc -c idist.c && ar rcs libidist.a idist.o      idist.c: the two lines of DO THIS

    Optimise: the loops that add up are in this header. Under -std=c99 or -std=c11 system headers hide what the
    implementation needs unless idist.h comes first (or _DEFAULT_SOURCE is defined); an #error says so.

OPTIONS

    macro                  where                   effect
    IDIST_IMPLEMENTATION   one file                compiles the implementation there
    IDIST_NO_RING          everywhere              leaves idist_ring.h out: worlds of 1, and what other headers add
    IDIST_API              everywhere              decorates each declaration; default: extern

CONCEPTS

    A world is a number of ranks, 0 .. n-1, each a process (or, with idist_open, a thread). idist_initialize joins
    the default world; NULL for a group means that one. A group is some ranks of a world in an order of its own;
    ranks given to a call are always ranks of the group it runs on. Texts of errors and the log name world ranks.

    A collective is called by all ranks of the group, in the same order, with matching arguments. Every call may be
    blocking (the default) or immediate (with idist_opts.request). Without a launcher idist_initialize makes a world
    of 1, in which everything works: the results are its own contributions. Before it, the getters answer as for
    such a world, and communication is IDIST_ERR_STATE.

    Results are reproducible: the same input on the same number of ranks gives the same bits in every run and, where
    several ranks get the result, on each of them. The order of operands depends on sizes and ranks only. A
    different number of ranks, or another size of message, may round differently.

BACKENDS

    self   a world of 1. Always there.
    ring   any number of ranks; idist_ring.h, included by this header.
    mpi    the ranks of an MPI communicator; idist_mpi.h, which you include, says what MPI does not give.

    gloo   another name of ring, which does what gloo does for torch.distributed.
    nccl   ring with the device backend nccl, as in Ignite; takes idist_nccl.h.

    idist_nccl.h adds device memory to any of them. Including a backend's header before the call of idist_initialize (a
    macro) is all it takes to have it in the list, IDIST_BACKENDS. desc.backend or IDIST_BACKEND chooses by name; otherwise
    the first that fits is taken.

LAUNCHING

    What decides rank and size, first match wins: desc.rank and desc.world_size; IDIST_RANK, IDIST_WORLD_SIZE; RANK,
    WORLD_SIZE (torchrun, or your own loop); JOB_COMPLETION_INDEX, WORLD_SIZE; HOROVOD_RANK, _SIZE; OMPI_COMM_WORLD_RANK,
    _SIZE; MV2_COMM_WORLD_RANK, _SIZE; JSM_NAMESPACE_RANK, _SIZE; PALS_RANKID, PMI_SIZE; FLUX_TASK_RANK, FLUX_JOB_SIZE;
    PMI_RANK, PMI_SIZE; SLURM_PROCID, SLURM_STEP_NUM_TASKS, in a step of srun only; TF_CONFIG. None: a world of 1. Half a
    pair (but for JOB_COMPLETION_INDEX, which pods of their own have), text that is no number, a rank that is not below the
    size, or RANK and WORLD_SIZE that contradict Slurm's is IDIST_ERR_ENV and names the variable. An empty variable counts
    as not set. IDIST_LAUNCHER=slurm (or none, idist, env, torchrun, indexed, horovodrun, openmpi, mvapich2, jsrun, pals,
    flux, hydra, tf_config) picks one.

    What the ranks meet at: desc.store; else desc.init_method or IDIST_INIT_METHOD:
        env://             (the default) MASTER_ADDR and MASTER_PORT; without them a place of the job where the launcher
                           has one: one host, the agent of torchrun, PMI-1, the first host of a step of Slurm
        tcp://host:port    the same, explicit
        tcp://239.x.y.z:port  a multicast group (224 to 239): rank 0 is found in it by those of its subnet
        file:///path       a file on a file system that all ranks share and that can lock
    When the address is a loopback one, or LOCAL_WORLD_SIZE says that all ranks are on this host, the ranks meet at a
    local socket named after the port, and no TCP port is opened at all.

        for r in 0 1 2; do
            RANK=$r WORLD_SIZE=3 LOCAL_RANK=$r MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 ./app &
        done; wait

    More variables: IDIST_TIMEOUT_MS, IDIST_INIT_TIMEOUT_MS, IDIST_TRANSPORT=auto|socket|tcp,
    IDIST_ALGO=auto|latency|bandwidth|chunked, IDIST_SHM_MIB (shared memory per rank, in MiB), IDIST_HOSTID (ranks with
    equal values share a host), IDIST_ADDR (the address other hosts reach this one at), IDIST_BIND=core (each rank stays on
    one processor), IDIST_CHECK=0 (mpi leaves out the comparison of calls; ring never does), IDIST_START_METHOD=fork|exec,
    IDIST_LOG, IDIST_TRACE (idist_trace.h), and those of SECURITY. A time-out of 0 means the default, -1 none. LOCAL_RANK and
    LOCAL_WORLD_SIZE are optional. The environment is read, never changed; workers run anew find IDIST_SPAWN in theirs.

    idist_spawn forks. Fork before you start threads, open a GPU or initialise MPI, or take start_method "exec", or a
    launcher.

BUFFERS

    Yours, at any address (aligned or not). Send and receive buffers are disjoint, or exactly where the in-place rule of
    the call puts them (NCCL's rules). The send buffer is never written, except in place. When a call fails, the contents
    of receive buffers are undefined. The library keeps no pointer after a call, or after idist_wait, returns.

ERRORS

    Functions return idist_status. idist_last_error() then says what happened, to whom, and what to do, for this
    thread:

        all_reduce #42 (F32 x 1048576, SUM): rank 3 on node7 was lost: its process ended, or closed the connection
        without idist_finalize

    Three kinds:
        local          IDIST_ERR_ARG, _STATE, _TRUNCATED, _UNSUPPORTED ...: this call did nothing. Everything goes on.
        of a group     IDIST_ERR_PEER_LOST, _MISMATCH, _TIMEOUT (not of a receive), _ABORTED: all its ranks get the same
                       status, from the call they are in or the next one, and the group is unusable from then on.
        of the start   IDIST_ERR_ENV, _NO_BACKEND, _AUTH ...: there is no world.

    A rank that dies, or exits without idist_finalize, is noticed by every rank that is blocked in a call, within
    milliseconds, through the end of its connection. A machine that vanishes without a word is noticed by the
    time-out.

    Ranks that call different things get IDIST_ERR_MISMATCH, naming two of them and the field that differs
    (operation, dtype, op, root, count, group, sequence). A rank whose own part was already done gets it from its
    next call that waits for others, at the latest from the fifth. Two ranks that wait for each other in calls on
    different groups, or in a receive and a collective, or in two sends or two receives, get it too, if that is all they
    do; longer cycles, and calls on two groups over several hosts, may end by the time-out. A receive whose message has
    another dtype gets it alone, and nothing is broken.

TIME-OUTS AND ABORT

    Every call has a deadline: idist_opts.timeout_ms, else desc.timeout_ms, else 30 minutes. IDIST_ERR_TIMEOUT names
    the ranks that have not come, or that came and no longer answer, and where they were seen last. A call that waits
    longer than a minute logs a warning with the same names. idist_abort ends everything on a group at once, from any
    thread. Joining a world has a deadline of its own, 5 minutes; a rank that dies after it has reached the store is
    IDIST_ERR_PEER_LOST on the others at once.

THREADS

    Any thread may call anything. Calls on one group must be made in one order on all ranks, so two threads that use
    the same group at the same time need a lock of yours, or a group each. Callbacks (user ops, logger, allocator)
    run in whichever thread is inside the library. The first immediate call of a world starts one thread, which
    moves requests on while the program computes; idist_finalize ends it. A thread takes no signals, and the library
    installs no handlers. After fork(), a child has no world: its calls give IDIST_ERR_STATE. Let it exec or end
    before its rank does: a child that keeps the connections hides the death of its rank from the others.

MEMORY

    desc.allocator serves everything but idist_alloc, shared memory, the handles of worlds and groups, and a few
    short-lived buffers. Handles of closed worlds (up to 16) and of their groups (up to 256), about 340 KiB in all, are
    kept for what is told of them under idist_close. A world of the ring takes 32 KiB, and per connection 32 KiB, and up
    to 1 MiB of messages that came early, if there are any. Large reductions over sockets use scratch of up to twice
    their size.

    Ranks of one host share a file in memory that has no name: 4 MiB per rank (desc.shm_nbytes), reserved when they
    join, gone with the last of them. Where it cannot be had (no memfd, a limit on memory, addresses or file sizes)
    they talk over local sockets, and a line at info level says why. Large buffers are read straight from the memory
    of the other process where the kernel allows that (a program that changes its user after it has joined must set
    IDIST_TRANSPORT=socket). idist_alloc gives memory that all of them have mapped.

WAITING

    A rank that waits polls for half a millisecond at most, when there is a core for each rank of the host; with more
    ranks than cores it yields the core to the others. Then it sleeps and uses no CPU to speak of.

LOGGING

    IDIST_LOG=error|warn|info|debug, default warn, to desc.logger or stderr. Nothing is ever printed to stdout.

SECURITY

    Every connection begins with a handshake that proves, both ways, the knowledge of a secret (HMAC-SHA256).
    idist_spawn makes one by itself. Otherwise it comes from desc.secret, the file IDIST_SECRET_FILE (mode 600), or
    IDIST_SECRET. Local sockets also check the user. A listener beyond loopback without a secret is refused
    (IDIST_ERR_NO_SECRET) unless IDIST_INSECURE=1. Shared memory is handed over through these local sockets. The data
    itself is neither encrypted nor signed: on a network you do not trust, use a tunnel.

WRITING A BACKEND

    Fill an idist_backend_api (its contract stands above it, in impl:world) and export a function that returns it.
    A call arrives as one struct; end it with idist__complete. Let your header redefine an IDIST__ENTRY_ macro, as
    idist_ring.h does.

LIMITS

    Linux only. Up to some hundred ranks per world of the ring: everybody is connected to everybody. 224
    user ops per world. Tags 0 .. 2^31-1. A world of the ring does not shrink: after a loss, finalize and start again.

HISTORY

    See CHANGELOG.md. Licence at the end of this file.
*/
#if defined(IDIST_IMPLEMENTATION) && !defined(_DEFAULT_SOURCE)
#define _DEFAULT_SOURCE // clock_gettime, sockets and the like, also with -std=c99
#endif
#if defined(IDIST_IMPLEMENTATION) && !defined(_FILE_OFFSET_BITS)
#define _FILE_OFFSET_BITS \
    64 // files above 2 GiB, and inode numbers above 2^32, also where a long has 32 bits
#endif
#ifndef IDIST_H
#define IDIST_H

#define IDIST_VERSION_MAJOR 0
#define IDIST_VERSION_MINOR 1
#define IDIST_VERSION_PATCH 0
#define IDIST_VERSION "0.1.0"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifndef IDIST_API
#define IDIST_API extern
#endif

#ifdef __cplusplus
extern "C" {
#endif

//------------------------------------------------------------------------------
// [api:status]  what can go wrong
//------------------------------------------------------------------------------

// One list: name, value, sentence. Everything that can fail returns one of these; 0 is success, errors are negative.
#define IDIST_STATUS_MAP(X)                                                                    \
    X(OK, 0, "success")                                                                        \
    X(ERR_ARG, -1, "an argument is wrong")                                                     \
    X(ERR_STATE, -2, "the call does not fit the state the library is in")                      \
    X(ERR_NO_MEMORY, -3, "out of memory")                                                      \
    X(ERR_SYSTEM, -4, "a call of the operating system failed")                                 \
    X(ERR_TIMEOUT, -5, "the deadline passed")                                                  \
    X(ERR_PEER_LOST, -6, "a rank died or its connection broke")                                \
    X(ERR_MISMATCH, -7, "ranks called different operations, or the same with other arguments") \
    X(ERR_ABORTED, -8, "a rank called idist_abort")                                            \
    X(ERR_TRUNCATED, -9, "a message is longer than the buffer for it")                         \
    X(ERR_NO_BACKEND, -10, "no backend fits")                                                  \
    X(ERR_UNSUPPORTED, -11, "not supported by this backend or build")                          \
    X(ERR_AUTH, -12, "the other side does not know the shared secret")                         \
    X(ERR_NO_SECRET, -13, "a listener beyond this host needs a shared secret")                 \
    X(ERR_NO_SPACE, -14, "no space left")                                                      \
    X(ERR_NO_FDS, -15, "out of file descriptors")                                              \
    X(ERR_RANK_TAKEN, -16, "another process already has this rank")                            \
    X(ERR_ADDR_IN_USE, -17, "the rendezvous address is taken")                                 \
    X(ERR_NOT_FOUND, -18, "no such key")                                                       \
    X(ERR_WORKER_FAILED, -19, "a worker ended with a failure")                                 \
    X(ERR_ENV, -20, "an environment variable is missing or makes no sense")                    \
    X(ERR_CALLBACK, -21, "a function given by the caller reported failure")                    \
    X(ERR_NO_DEVICE, -22, "no usable device, driver or device library")                        \
    X(ERR_INTERNAL, -23, "a bug in idist")                                                     \
    X(ERR_DEVICE, -24, "a call of the device's library failed")

typedef enum idist_status {
#define IDIST__X(name, value, text) IDIST_##name = value,
    IDIST_STATUS_MAP(IDIST__X)
#undef IDIST__X
} idist_status;

// The name of a status ("IDIST_ERR_TIMEOUT") and what it means in general. Never NULL.
IDIST_API const char *idist_status_name(idist_status status);
IDIST_API const char *idist_status_string(idist_status status);

// What the last failure in this thread was about: operation, ranks, cause, and what to do. "" when nothing failed yet.
// Valid until the next failure in this thread.
IDIST_API const char *idist_last_error(void);

//------------------------------------------------------------------------------
// [api:types]  element types, operations, options
//------------------------------------------------------------------------------

// Integers travel and add up exactly, modulo 2^bits. F16 is IEEE binary16, BF16 the upper half of a float; F8E4M3 and F8E5M2
// are OCP's, as __nv_fp8_e4m3 and __nv_fp8_e5m2. Sums and products of these four are carried in float and rounded once, at
// the end; in 8 bits what is too large, infinity too, becomes the largest finite number (448, 57344).
typedef enum idist_dtype {
    IDIST_I8 = 0,
    IDIST_U8 = 1, // bytes, bool, char
    IDIST_I16 = 2,
    IDIST_U16 = 3,
    IDIST_I32 = 4,
    IDIST_U32 = 5,
    IDIST_I64 = 6,
    IDIST_U64 = 7,
    IDIST_F16 = 8,
    IDIST_BF16 = 9,
    IDIST_F32 = 10,
    IDIST_F64 = 11,
    IDIST_F8E4M3 = 12,
    IDIST_F8E5M2 = 13,
    IDIST_DTYPE_COUNT = 14
} idist_dtype;

// How two elements become one. The order of the operands is fixed by the algorithm, never by timing, so that every
// rank gets the same bits in every run. MIN and MAX give NaN when any operand is NaN. The bitwise and logical ones
// take integers only; the logical ones give 0 or 1. AVG is SUM divided by the number of ranks (integers: towards zero).
// Values from IDIST_OP_USER on come from idist_op_create.
typedef enum idist_op {
    IDIST_SUM = 0,
    IDIST_PROD = 1,
    IDIST_MIN = 2,
    IDIST_MAX = 3,
    IDIST_AVG = 4,
    IDIST_BAND = 5,
    IDIST_BOR = 6,
    IDIST_BXOR = 7,
    IDIST_LAND = 8,
    IDIST_LOR = 9,
    IDIST_OP_COUNT = 10,
    IDIST_OP_USER = 16, // the first of 224 values that idist_op_create hands out
    IDIST_OP_LAST = 239
} idist_op;

// Bytes per element; 0 for a value that is no dtype. The names are "F32", "SUM", ...; never NULL.
IDIST_API size_t idist_dtype_size(idist_dtype dtype);
IDIST_API const char *idist_dtype_name(idist_dtype dtype);
IDIST_API const char *idist_op_name(idist_op op);

typedef struct idist_group idist_group; // some ranks in a fixed order; NULL means the world
typedef struct idist_store idist_store; // a small key-value table that all ranks reach

// A running operation. Put its address into idist_opts.request (what it held before does not matter), then call
// idist_wait or idist_test; until then neither the request nor the buffers of the operation may move, be written, or
// (the receive side) be read. All zero is an empty request: waiting for it succeeds at once.
typedef struct idist_request {
    void *impl; // private
} idist_request;

// The last argument of every communication call. NULL, or all zero: the world, blocking, the group's time-out.
typedef struct idist_opts {
    idist_group *group; // NULL: the world. Roots, sources and destinations are ranks of this group.
    idist_request *
        request; // NULL: block until done. Else return at once and complete in idist_wait / idist_test.
    void *
        stream; // cudaStream_t, for device buffers: begins after what it holds; without a request, what comes
        // to it later sees the result. idist_nccl.h says more. Else NULL.
    int timeout_ms; // 0: the group's default. < 0: none.
} idist_opts;

#define IDIST_ANY_SOURCE (-1)
#define IDIST_ANY_TAG (-1)

// What a receive got.
typedef struct idist_recv_info {
    int source;   // rank in the group
    int tag;      //
    size_t count; // elements that arrived; at most the count of the receive
} idist_recv_info;

// IDIST_DTYPE(ptr): the dtype that a pointer points to, at compile time. C11 and C++; plain C99 has no such thing.
// idist_all_reduce(x, x, n, IDIST_DTYPE(x), IDIST_SUM, NULL). bool counts as U8, char as I8.
#ifndef __cplusplus
#if defined(__STDC_VERSION__) && __STDC_VERSION__ >= 201112L
// clang-format off
#define IDIST_DTYPE(ptr)                                         \
    _Generic(*(ptr),                                             \
        char: IDIST_I8,                                          \
        signed char: IDIST_I8,                                   \
        unsigned char: IDIST_U8,                                 \
        _Bool: IDIST_U8,                                         \
        short: IDIST_I16,                                        \
        unsigned short: IDIST_U16,                               \
        int: IDIST_I32,                                          \
        unsigned int: IDIST_U32,                                 \
        long: (sizeof(long) == 8 ? IDIST_I64 : IDIST_I32),       \
        unsigned long: (sizeof(long) == 8 ? IDIST_U64 : IDIST_U32), \
        long long: IDIST_I64,                                    \
        unsigned long long: IDIST_U64,                           \
        float: IDIST_F32,                                        \
        double: IDIST_F64)
// clang-format on
#endif
#endif

//------------------------------------------------------------------------------
// [api:desc]  how to start
//------------------------------------------------------------------------------

typedef enum idist_log_level {
    IDIST_LOG_ERROR = 1,
    IDIST_LOG_WARN = 2,
    IDIST_LOG_INFO = 3,
    IDIST_LOG_DEBUG = 4
} idist_log_level;

// Where log lines go. Called from any thread that calls idist and from the progress thread, one call at a time.
// The line has no newline and already names rank and host. log_fn == NULL: stderr.
typedef struct idist_logger {
    void (*log_fn)(idist_log_level level, const char *line, void *user);
    void *user;
} idist_logger;

// Where memory comes from. Both or none; called from any thread. alloc_fn returns memory aligned as malloc's, or NULL.
typedef struct idist_allocator {
    void *(*alloc_fn)(size_t nbytes, void *user);
    void (*free_fn)(void *ptr, void *user);
    void *user;
} idist_allocator;

// What idist_spawn tells about the first worker that failed. rank is -1 when none did.
typedef struct idist_report {
    int rank;
    int exit_code;  // -1 when a signal ended it
    int signal;     // 0 when it exited
    char text[512]; // one sentence; carries the worker's own last error when it left one
} idist_report;

// Everything about a world. All zero is valid: the environment decides, and where it is silent, a world of 1.
// An explicit field beats the environment, the environment beats the built-in default.
typedef struct idist_desc {
    const char *
        backend; // "ring", "self", or a list "mpi,ring" to take the first that fits; IDIST_BACKEND. "gloo" is
        // another name of "ring"; "nccl" is "ring" with device_backend "nccl",
        // unless that says more
    const char *
        init_method; // "env://", "tcp://host:port", "tcp://239.x.y.z:port", "file:///path"; IDIST_INIT_METHOD.
                     // Needs rank and world_size in this struct or in the environment.
    idist_store *store; // rendezvous through this store instead; the caller keeps owning it
    int world_size;     // 0: ask the environment. Else rank counts too.
    int rank;           // 0 .. world_size - 1
    int nproc_per_node; // workers of idist_spawn and idist_parallel_run on this host. 0: idist_spawn takes one per
                        // core; idist_parallel_run joins what a launcher made
    int nnodes;              // idist_parallel_run over several hosts: how many, ...
    int node_rank;           // ... and which of them this is
    const char *master_addr; // host of rank 0; MASTER_ADDR
    int master_port;         // port of the rendezvous there; MASTER_PORT
    int timeout_ms;          // deadline of each call; IDIST_TIMEOUT_MS; 0: 30 minutes; < 0: none
    int init_timeout_ms; // deadline for all ranks to show up; IDIST_INIT_TIMEOUT_MS; 0: 5 minutes
    const void *
        secret; // shared by all ranks of the job, at least 16 bytes; IDIST_SECRET_FILE, IDIST_SECRET
    size_t secret_nbytes; //
    const char *
        transport; // "auto" (shared memory inside a host, TCP between hosts), "socket" (local sockets inside a
                   // host) or "tcp"; IDIST_TRANSPORT
    const char *
        algorithm; // "auto"; for tests "latency" or "bandwidth" (messages) or "chunked" (shared memory, never
                   // the short way); IDIST_ALGO
    const char
        *bind; // "none", or "core": each rank stays on one of the processors it may use; IDIST_BIND
    size_t shm_nbytes; // shared memory each rank reserves; IDIST_SHM_MIB (in MiB); 0: 4 MiB
    const char *
        host_id; // ranks with equal ids share a host; IDIST_HOSTID. NULL: boot id, user, network namespace
    const void *
        mpi_comm; // an MPI_Comm *, for idist_mpi.h: the communicator whose ranks become those of the world. It is
        // duplicated and stays yours. NULL: MPI_COMM_WORLD
    idist_allocator allocator;
    idist_logger logger;
    int grace_ms;         // idist_spawn: time the others get after a first failure; 0: 2 s
    bool keep_going;      // idist_spawn: leave the survivors of a failure alone
    idist_report *report; // idist_spawn: filled when a worker failed. May be NULL.
    const char *
        device; // "cuda:1", "cuda" (local rank modulo devices), "cpu"; IDIST_DEVICE. NULL: "cuda" where all
                // ranks have one and the program includes idist_nccl.h, else "cpu"
    const char *
        start_method; // idist_spawn: "fork", or "exec" (the program is run anew); IDIST_START_METHOD
    const char
        *device_backend; // "nccl", "ipc" or "staged"; IDIST_DEVICE_BACKEND. NULL: see idist_nccl.h
    const void *
        nccl_comm; // an ncclComm_t * with the ranks of the world, yours until the world fails and aborts it
    const void *nccl_config; // an ncclConfig_t * for those that idist makes. May be NULL.
    bool
        high_priority_stream; // idist's own work on the device goes first; IDIST_HIGH_PRIORITY_STREAM=1
} idist_desc;

//------------------------------------------------------------------------------
// [api:life]  begin, end, and who am I
//------------------------------------------------------------------------------

// Joins the world: finds rank and size, meets the other ranks, connects to them. Collective over all ranks of the
// job; blocks until all are there (IDIST_ERR_TIMEOUT names the missing ones). desc may be NULL. A macro, so that it
// sees which backend headers you included. Calling it twice is IDIST_ERR_STATE.
#define idist_initialize(desc) idist_initialize_with((desc), IDIST_BACKENDS)

// Leaves the world; collective. Waits for the others to get here (their pending calls with this rank complete first),
// then frees everything. With requests or a group_begin still open it fails with IDIST_ERR_STATE and does nothing; in
// every other case the world is gone afterwards, also when it returns an error (the error the world
// died of), and all its groups with it: a call on one of them gives IDIST_ERR_STATE, and
// idist_free_group only sets the pointer to NULL.
IDIST_API idist_status idist_finalize(void);

// True between idist_initialize and idist_finalize.
IDIST_API bool idist_is_initialized(void);

// Getters never fail: outside a world they answer as a world of 1. Any thread.
IDIST_API int idist_get_rank(void);
IDIST_API int idist_get_world_size(void);
IDIST_API int idist_get_local_rank(void);     // rank among the ranks of this host, by rank
IDIST_API int idist_get_nproc_per_node(void); // ranks on this host
IDIST_API int idist_get_nnodes(void);         // hosts
IDIST_API int idist_get_node_rank(void);      // hosts are numbered by their lowest rank
IDIST_API const char *idist_backend(void);    // "self", "ring", ...
IDIST_API const char *idist_device(void);     // "cpu", "cuda:0"
IDIST_API const char *
idist_device_backend(void); // "none"; with idist_nccl.h "nccl", "ipc", "staged"
IDIST_API const char *idist_hostname(void);
// Who started the ranks: "none", "spawn", "torchrun", "env", "openmpi", ... Before idist_initialize, what the environment
// says.
IDIST_API const char *idist_launcher(void);
#define idist_available_backends() \
    idist_available_backends_of(IDIST_BACKENDS) // those the program has, "ring,self"

// The configuration of the world as text, one "name: value" per line. The string lives until this thread calls it
// again.
IDIST_API const char *idist_show_config(void);

// Ends every pending and later call of the group with IDIST_ERR_ABORTED, on all its ranks. NULL: the world. From any
// thread. Returns at once.
IDIST_API idist_status idist_abort(idist_group *group);

// A further, independent world; several may be open at once, in any thread. Its group is returned: put it into
// idist_opts.group, and end it with idist_close. Collective over the ranks of that world. *world is NULL on failure.
// idist_close is to this world what idist_finalize is to the default one, and sets the pointer to
// NULL. Copies of it, and the groups made from it, are of no more use: IDIST_ERR_STATE, as there
// (16 worlds and 256 groups later at the latest such a handle may become that of a new one).
#define idist_open(desc, world) idist_open_with((desc), (world), IDIST_BACKENDS)
IDIST_API idist_status idist_close(idist_group **world);

//------------------------------------------------------------------------------
// [api:coll]  collectives
//
// All ranks of the group make the same call in the same order, with the same count, dtype, op and root. When they do
// not, every rank gets IDIST_ERR_MISMATCH naming two of them and what differs. When a rank dies, the others get
// IDIST_ERR_PEER_LOST; when one does not come, IDIST_ERR_TIMEOUT. After one of these the group is unusable and gives
// the same error at once. IDIST_ERR_ARG and IDIST_ERR_STATE are local: nothing was sent, nothing is broken.
//
// count is in elements; n is the number of ranks, r the own rank. Send and receive buffers are disjoint, or placed as
// the in-place rule says. count may be 0, and then buffers may be NULL. Any thread, but one order on all ranks.
//------------------------------------------------------------------------------

// recv[i] = op over all ranks of send[i], on every rank; bitwise the same everywhere. send: count. recv: count.
// In place: send == recv.
IDIST_API idist_status idist_all_reduce(const void *send, void *recv, size_t count,
                                        idist_dtype dtype, idist_op op, const idist_opts *opts);

// As all_reduce, the result on root only; recv is not touched elsewhere and may be NULL there. In place: send == recv.
IDIST_API idist_status idist_reduce(const void *send, void *recv, size_t count, idist_dtype dtype,
                                    idist_op op, int root, const idist_opts *opts);

// buf of root is copied to buf of all. buf: count.
IDIST_API idist_status idist_broadcast(void *buf, size_t count, idist_dtype dtype, int root,
                                       const idist_opts *opts);

// Returns when all ranks have called it.
IDIST_API idist_status idist_barrier(const idist_opts *opts);

// recv[k*count + i] = send[i] of rank k, on every rank. send: count. recv: n*count. In place: send == recv + r*count.
IDIST_API idist_status idist_all_gather(const void *send, void *recv, size_t count,
                                        idist_dtype dtype, const idist_opts *opts);

// As all_gather, on root only; recv may be NULL elsewhere. In place, on root: send == recv + r*count.
IDIST_API idist_status idist_gather(const void *send, void *recv, size_t count, idist_dtype dtype,
                                    int root, const idist_opts *opts);

// recv[i] = send[r*count + i] of root. send: n*count, on root; may be NULL elsewhere. recv: count.
// In place, on root: recv == send + r*count.
IDIST_API idist_status idist_scatter(const void *send, void *recv, size_t count, idist_dtype dtype,
                                     int root, const idist_opts *opts);

// recv[i] = op over all ranks of send[r*count + i]. send: n*count. recv: count. In place: recv == send + r*count.
IDIST_API idist_status idist_reduce_scatter(const void *send, void *recv, size_t count,
                                            idist_dtype dtype, idist_op op, const idist_opts *opts);

// recv[k*count + i] = send[r*count + i] of rank k. send: n*count. recv: n*count. In place: send == recv.
IDIST_API idist_status idist_all_to_all(const void *send, void *recv, size_t count,
                                        idist_dtype dtype, const idist_opts *opts);

// recv[i] = op over the ranks 0 .. r of send[i]. AVG is refused. send: count. recv: count. In place: send == recv.
IDIST_API idist_status idist_scan(const void *send, void *recv, size_t count, idist_dtype dtype,
                                  idist_op op, const idist_opts *opts);

// recv[i] = op over the ranks 0 .. r-1 of send[i]; recv of rank 0 is not touched. Otherwise as scan.
IDIST_API idist_status idist_exscan(const void *send, void *recv, size_t count, idist_dtype dtype,
                                    idist_op op, const idist_opts *opts);

// The v-forms: rank k contributes counts[k] elements, which lie at element displs[k] of the large buffer. displs ==
// NULL: one after the other. Counts that say how much goes from rank a to rank b must agree on a and b. The arrays,
// like the buffers, must stay until the operation is complete.

// send: sendcount == recvcounts[r]. recv: on every rank. recvcounts and recvdispls: n, the same counts on all ranks.
// In place: send == recv + recvdispls[r].
IDIST_API idist_status idist_all_gatherv(const void *send, size_t sendcount, void *recv,
                                         const size_t *recvcounts, const size_t *recvdispls,
                                         idist_dtype dtype, const idist_opts *opts);

// As all_gatherv, on root only; recv, recvcounts and recvdispls are not looked at elsewhere.
IDIST_API idist_status idist_gatherv(const void *send, size_t sendcount, void *recv,
                                     const size_t *recvcounts, const size_t *recvdispls,
                                     idist_dtype dtype, int root, const idist_opts *opts);

// The reverse of gatherv. send, sendcounts and senddispls are looked at on root only. recv: recvcount.
// In place, on root: recv == send + senddispls[r].
IDIST_API idist_status idist_scatterv(const void *send, const size_t *sendcounts,
                                      const size_t *senddispls, void *recv, size_t recvcount,
                                      idist_dtype dtype, int root, const idist_opts *opts);

// Rank r sends sendcounts[k] elements at send + senddispls[k] to rank k, and receives recvcounts[k] elements from it at
// recv + recvdispls[k]. Not in place: the buffers are disjoint.
IDIST_API idist_status idist_all_to_allv(const void *send, const size_t *sendcounts,
                                         const size_t *senddispls, void *recv,
                                         const size_t *recvcounts, const size_t *recvdispls,
                                         idist_dtype dtype, const idist_opts *opts);

// Bytes and strings of sizes that the receivers do not know. Blocking only.

// data of root (nbytes there) arrives in buf, which has room for capacity bytes; *nbytes is the size on every rank.
// On root buf holds the data and *nbytes its size. IDIST_ERR_TRUNCATED on a rank whose buf is too small: *nbytes
// then says what is needed, buf is untouched, and nothing is broken.
IDIST_API idist_status idist_broadcast_bytes(void *buf, size_t capacity, size_t *nbytes, int root,
                                             const idist_opts *opts);

// The bytes of all ranks, in rank order, one after the other in buf; sizes[k] (n entries) is what rank k gave. send:
// nbytes, which may differ from rank to rank. When capacity is below the total: IDIST_ERR_TRUNCATED on that rank, sizes
// is filled, buf is untouched, and nothing is broken.
IDIST_API idist_status idist_all_gather_bytes(const void *send, size_t nbytes, void *buf,
                                              size_t capacity, size_t *sizes,
                                              const idist_opts *opts);

//------------------------------------------------------------------------------
// [api:p2p]  from one rank to another
//
// Messages from one rank to another with the same tag arrive in the order they were sent. A send may return before the
// receiver asked for the message (up to some KiB), or only then: never rely on either. Tags are 0 .. 2^31 - 1.
// A receive that runs into its time-out before a message came is cancelled: IDIST_ERR_TIMEOUT, nothing lost or broken. A
// send that does, of more than some KiB, takes the group with it: the other side has heard of the message.
//------------------------------------------------------------------------------

IDIST_API idist_status idist_send(const void *buf, size_t count, idist_dtype dtype, int dst,
                                  int tag, const idist_opts *opts);

// buf: count at most; info (may be NULL) says what came. src may be IDIST_ANY_SOURCE, tag IDIST_ANY_TAG
// (which also takes what was meant for a later receive). A message that
// is longer gives IDIST_ERR_TRUNCATED, one of another dtype IDIST_ERR_MISMATCH; both stay there for another receive.
IDIST_API idist_status idist_recv(void *buf, size_t count, idist_dtype dtype, int src, int tag,
                                  idist_recv_info *info, const idist_opts *opts);

// Both at once, so that neighbours can exchange without a deadlock. Blocking only. The buffers are disjoint.
IDIST_API idist_status idist_sendrecv(const void *send, size_t sendcount, int dst, int sendtag,
                                      void *recv, size_t recvcount, int src, int recvtag,
                                      idist_dtype dtype, idist_recv_info *info,
                                      const idist_opts *opts);

// Blocks until the operation is complete, returns its status, and empties the request. Any thread, one at a time.
IDIST_API idist_status idist_wait(idist_request *request);
// Does not block. *done: whether it is complete; if so, as idist_wait. Requests also progress while the program
// computes.
IDIST_API idist_status idist_test(idist_request *request, bool *done);
// For device memory: what comes to this stream (a cudaStream_t) from now on sees the result. Ends the request without
// waiting for the device, only for the host's part of a call that is staged; a later failure is one of the group.
IDIST_API idist_status idist_wait_stream(idist_request *request, void *stream);
// Waits for all of them, also after a failure; returns the first failure by index.
IDIST_API idist_status idist_wait_all(idist_request *requests, size_t n);
// Waits for any of them and empties it; *index says which. When all are empty: *index = n, IDIST_OK.
IDIST_API idist_status idist_wait_any(idist_request *requests, size_t n, size_t *index);

// Calls of this thread between begin and end start at once and complete together in idist_group_end, so that their
// order does not matter: exchange patterns that would deadlock one by one go through. They return when started; their
// results are valid after idist_group_end, which returns the first failure. Begin / end may nest; the outermost end
// waits.
IDIST_API idist_status idist_group_begin(void);
IDIST_API idist_status idist_group_end(void);

//------------------------------------------------------------------------------
// [api:group]  groups
//------------------------------------------------------------------------------

// A group of the ranks listed (world ranks, no duplicates, sorted ascending for you). Collective over the world: every
// world rank calls it with the same list. Ranks that are not in it get a group whose rank is -1 and on which
// communication is IDIST_ERR_STATE.
IDIST_API idist_status idist_new_group(const int *ranks, int n, idist_group **group);
// Groups by color: ranks of parent (NULL: the world) with the same color >= 0 form one, ordered by key, then by rank in
// parent. color < 0: none, a group whose rank is -1. Collective over parent.
IDIST_API idist_status idist_split(idist_group *parent, int color, int key, idist_group **group);
// Frees a group made by the two above and sets the pointer to NULL. Each member calls it; it does not wait for the
// others, but for calls with opts.stream to have begun on all. With requests still open on it: IDIST_ERR_STATE.
IDIST_API idist_status idist_free_group(idist_group **group);

// After the loss of a rank: a group of the members of `group` (NULL: the world) that live, in the same order. Collective
// over them; blocks until all of them call it. The old group stays failed, and is freed as any other. What is lost
// without having been noticed yet is noticed here. Backends that cannot: IDIST_ERR_UNSUPPORTED.
IDIST_API idist_status idist_shrink(idist_group *group, idist_group **survivors);
// *flag becomes the bitwise AND of all members that live, the same on each of them, also in a group that has failed:
// "did it go well everywhere?" Collective over them. Backends that cannot: IDIST_ERR_UNSUPPORTED.
IDIST_API idist_status idist_agree(idist_group *group, int *flag);

// NULL: the world. Rank in the group, -1 for a non-member; number of members.
IDIST_API int idist_group_rank(const idist_group *group);
IDIST_API int idist_group_size(const idist_group *group);
// Which rank of `to` is rank `rank` of `from`; -1 when it is not in it. Both groups of one world.
IDIST_API int idist_group_translate(const idist_group *from, int rank, const idist_group *to);

//------------------------------------------------------------------------------
// [api:op]  reductions of your own
//------------------------------------------------------------------------------

// inout[i] = in[i] (op) inout[i] for i < count; `in` comes from the lower ranks. Must be associative. Runs in any
// thread that is inside idist, also the progress thread; must not call idist.
typedef void (*idist_op_fn)(const void *in, void *inout, size_t count, idist_dtype dtype,
                            void *arg);

// commutative == false keeps the ranks in order, at some cost. Collective in the sense that all ranks of the world of
// `group` (NULL: the default world) create their ops in the same order; purely local otherwise. Up to 224 at a time.
IDIST_API idist_status idist_op_create(idist_op_fn fn, void *arg, bool commutative,
                                       idist_group *group, idist_op *op);
// SUM of factor * send: each rank's own factor. Floating dtypes only.
IDIST_API idist_status idist_op_create_premul_sum(double factor, idist_group *group, idist_op *op);
// Frees the number for the next op, at once. It waits for nothing: what is under way with the op,
// pending requests too, runs to its end with it, so fn and arg must stay until that is complete.
// IDIST_ERR_ARG for what is no op of this world.
IDIST_API idist_status idist_op_free(idist_op op, idist_group *group);

// inout[i] = in[i] (op) inout[i], in this process. For built-in ops except AVG.
IDIST_API idist_status idist_reduce_local(const void *in, void *inout, size_t count,
                                          idist_dtype dtype, idist_op op);

//------------------------------------------------------------------------------
// [api:spawn]  processes
//------------------------------------------------------------------------------

// What a worker runs; its result becomes the exit code of the process, modulo 256 (0: success; others never become 0).
typedef int (*idist_worker_fn)(int local_rank, void *arg);
typedef struct idist_workers idist_workers;

// Forks nproc_per_node processes (0: one per core), each of which joins a new world, calls fn, finalizes and exits.
// Blocks until all ended. IDIST_OK only if all returned 0; otherwise IDIST_ERR_WORKER_FAILED with the first failure
// in desc->report and idist_last_error(). After it the others have desc->grace_ms to end by themselves, then they get
// SIGTERM, then SIGKILL. When this process (or the thread that calls) dies, they are killed, unless they have changed their
// user. Nothing else of the calling
// process changes: not its signal handlers, not its environment. Workers never return to the caller's code and run no
// atexit handlers.
//
// desc->start_method "exec", for programs that have started threads, opened a GPU or initialised MPI: each worker is the
// program run anew, with its arguments (as it has them now), environment, folder, stdin and signal mask. It comes through
// main to the same call, with arg as main makes it there, and runs fn in it. Calls of idist_spawn before that one return
// IDIST_OK at once in a worker: they have been made. So all calls come from one thread, and not from a worker. A worker that
// has not come to its call within desc->init_timeout_ms has failed.
#define idist_spawn(fn, arg, nproc_per_node, desc) \
    idist_spawn_with((fn), (arg), (nproc_per_node), (desc), IDIST_BACKENDS)

// The same beside the caller: returns when the workers have been started. End it with idist_spawn_wait from the same
// thread; desc->report must live until then. *workers is NULL on failure.
#define idist_spawn_start(fn, arg, nproc_per_node, desc, workers) \
    idist_spawn_start_with((fn), (arg), (nproc_per_node), (desc), (workers), IDIST_BACKENDS)

// *done: all have ended. Never blocks. Nobody else looks after the workers: what follows a first failure is done in here
// and in idist_spawn_wait.
IDIST_API idist_status idist_spawn_poll(idist_workers *workers, bool *done);

// Waits until all have ended, frees `workers` and returns what idist_spawn would. After timeout_ms (< 0: none)
// IDIST_ERR_TIMEOUT, and nothing has changed. NULL is IDIST_OK, here and above.
IDIST_API idist_status idist_spawn_wait(idist_workers *workers, int timeout_ms);

// Sends a signal to all that still run.
IDIST_API idist_status idist_spawn_kill(idist_workers *workers, int signal_number);

// Ignite's Parallel: with desc->nproc_per_node set, idist_spawn; otherwise joins the world that a launcher made,
// calls fn in this process, and finalizes. Logs what it does at info level.
#define idist_parallel_run(desc, fn, arg) \
    idist_parallel_run_with((desc), (fn), (arg), #fn, IDIST_BACKENDS)

// A task for the two below; 0 is success.
typedef int (*idist_task_fn)(void *arg);

// The chosen rank runs fn first, the others after it is through: "rank 0 downloads, the rest finds the file". With
// local, the chosen local rank of each host goes first on that host. When fn fails on the first rank the others do
// not run it and all get IDIST_ERR_CALLBACK. Collective over the world.
IDIST_API idist_status idist_one_rank_first(idist_task_fn fn, void *arg, int rank, bool local,
                                            const idist_opts *opts);
// Only this rank runs fn. With barrier, the others wait for it, and learn of its failure.
IDIST_API idist_status idist_one_rank_only(idist_task_fn fn, void *arg, int rank, bool barrier,
                                           const idist_opts *opts);

//------------------------------------------------------------------------------
// [api:memory]  buffers
//------------------------------------------------------------------------------

// Memory for communication buffers, aligned to 64 bytes at least, zeroed. Any rank may call it at any time. All ranks of
// the host can read and write it, so a collective whose buffers all lie in such memory moves the data straight from one to
// the other: worth it from some 16 KiB on. opts->group selects the world; NULL: the default one. Without a world, or
// where the ranks share no memory, it is plain memory. NULL when there is none (idist_last_error says why).
//
// idist_free takes NULL and what idist_alloc gave, before or after the end of the world.
IDIST_API void *idist_alloc(size_t nbytes, const idist_opts *opts);
IDIST_API void idist_free(void *ptr);

//------------------------------------------------------------------------------
// [api:store]  a key-value table for rendezvous
//
// Keys are strings of 1 .. 1024 bytes, values up to 8 MiB. Any thread. Every call but set, add and delete can wait; the
// time-outs are in milliseconds, 0 means the store's own (5 minutes), < 0 none.
//------------------------------------------------------------------------------

typedef struct idist_store_desc {
    bool
        server; // tcp, file: this process owns the table (rank 0). Exactly one does; it ends with it.
    int timeout_ms;       // default of every wait; 0: 5 minutes
    const void *secret;   // as in idist_desc. tcp beyond loopback needs one (or IDIST_INSECURE=1).
    size_t secret_nbytes; //
    idist_allocator allocator;
} idist_store_desc;

// "tcp://host:port"    a server in one process, the others connect; speaks the wire format of torch's TCPStore behind a
//                      mutual authentication. Port 0 on the server takes a free one, see idist_store_port.
// "file:///path"       a file that all can lock; the server removes it when it closes. A file left by a dead server is
//                      recognised and not used.
// "unix://name"        as tcp, inside this host, network namespace and user; leaves no file.
// "mem://"             inside this process: share the pointer between threads.
// desc may be NULL. Waits until the server is there.
IDIST_API idist_status idist_store_open(const char *url, const idist_store_desc *desc,
                                        idist_store **store);
// A view in which every key has `prefix` before it. Closing it leaves `parent` open; parent must outlive it.
IDIST_API idist_status idist_store_prefix(idist_store *parent, const char *prefix,
                                          idist_store **store);
IDIST_API idist_status idist_store_close(idist_store **store);
IDIST_API int idist_store_port(const idist_store *store); // of a tcp server; otherwise 0

IDIST_API idist_status idist_store_set(idist_store *store, const char *key, const void *value,
                                       size_t nbytes);
// Waits for the key. *nbytes is its size; IDIST_ERR_TRUNCATED if above capacity (value untouched).
IDIST_API idist_status idist_store_get(idist_store *store, const char *key, void *value,
                                       size_t capacity, size_t *nbytes, int timeout_ms);
// Adds to a decimal number, which starts as 0; *result is the new value.
IDIST_API idist_status idist_store_add(idist_store *store, const char *key, int64_t delta,
                                       int64_t *result);
// If the key holds `expected` (nothing there counts as an empty one), it becomes `desired`. *nbytes bytes of value:
// what it holds afterwards.
IDIST_API idist_status idist_store_compare_set(idist_store *store, const char *key,
                                               const void *expected, size_t nexpected,
                                               const void *desired, size_t ndesired, void *value,
                                               size_t capacity, size_t *nbytes);
// Waits until all keys exist.
IDIST_API idist_status idist_store_wait(idist_store *store, const char *const *keys, size_t n,
                                        int timeout_ms);
// *ready: whether all keys exist now.
IDIST_API idist_status idist_store_check(idist_store *store, const char *const *keys, size_t n,
                                         bool *ready);
IDIST_API idist_status idist_store_delete(idist_store *store, const char *key, bool *deleted);
// Keys in the whole table, also through a view with a prefix.
IDIST_API idist_status idist_store_num_keys(idist_store *store, size_t *n);

//------------------------------------------------------------------------------
// [api:backend]  backends, and the lists of them
//------------------------------------------------------------------------------

typedef struct idist_backend_api
    idist_backend_api; // a table of functions; see the implementation part for the contract

// Backends in order of preference. IDIST_BACKENDS is the list of those whose headers you included before the call.
typedef struct idist_backend_list {
    const idist_backend_api *items[8]; // NULL entries are skipped
} idist_backend_list;

IDIST_API idist_backend_list idist_backend_list_of(const idist_backend_api *a,
                                                   const idist_backend_api *b,
                                                   const idist_backend_api *c);
IDIST_API const idist_backend_api *
idist_self_backend(void); // a world of 1; always there, always last

// What the macros above stand for.
IDIST_API idist_status idist_initialize_with(const idist_desc *desc, idist_backend_list backends);
IDIST_API const char *idist_available_backends_of(idist_backend_list backends);
IDIST_API idist_status idist_open_with(const idist_desc *desc, idist_group **world,
                                       idist_backend_list backends);
IDIST_API idist_status idist_spawn_with(idist_worker_fn fn, void *arg, int nproc_per_node,
                                        const idist_desc *desc, idist_backend_list backends);
IDIST_API idist_status idist_spawn_start_with(idist_worker_fn fn, void *arg, int nproc_per_node,
                                              const idist_desc *desc, idist_workers **workers,
                                              idist_backend_list backends);
IDIST_API idist_status idist_parallel_run_with(const idist_desc *desc, idist_worker_fn fn,
                                               void *arg, const char *name,
                                               idist_backend_list backends);

#define IDIST_BACKENDS idist_backend_list_of(IDIST__ENTRY_NCCL, IDIST__ENTRY_MPI, IDIST__ENTRY_RING)
#ifndef IDIST__ENTRY_NCCL
#define IDIST__ENTRY_NCCL NULL
#endif
#ifndef IDIST__ENTRY_MPI
#define IDIST__ENTRY_MPI NULL
#endif
#ifndef IDIST__ENTRY_RING
#define IDIST__ENTRY_RING NULL
#endif

#ifdef __cplusplus
} // extern "C"

inline idist_dtype idist_dtype_of(const char *) { return IDIST_I8; }
inline idist_dtype idist_dtype_of(const signed char *) { return IDIST_I8; }
inline idist_dtype idist_dtype_of(const unsigned char *) { return IDIST_U8; }
inline idist_dtype idist_dtype_of(const bool *) { return IDIST_U8; }
inline idist_dtype idist_dtype_of(const short *) { return IDIST_I16; }
inline idist_dtype idist_dtype_of(const unsigned short *) { return IDIST_U16; }
inline idist_dtype idist_dtype_of(const int *) { return IDIST_I32; }
inline idist_dtype idist_dtype_of(const unsigned int *) { return IDIST_U32; }
inline idist_dtype idist_dtype_of(const long *) {
    return sizeof(long) == 8 ? IDIST_I64 : IDIST_I32;
}
inline idist_dtype idist_dtype_of(const unsigned long *) {
    return sizeof(long) == 8 ? IDIST_U64 : IDIST_U32;
}
inline idist_dtype idist_dtype_of(const long long *) { return IDIST_I64; }
inline idist_dtype idist_dtype_of(const unsigned long long *) { return IDIST_U64; }
inline idist_dtype idist_dtype_of(const float *) { return IDIST_F32; }
inline idist_dtype idist_dtype_of(const double *) { return IDIST_F64; }
#define IDIST_DTYPE(ptr) (::idist_dtype_of(ptr))
#endif

#endif // IDIST_H

// Only here for the API? Stop reading.

#if defined(IDIST_IMPLEMENTATION) && !defined(IDIST_IMPLEMENTATION_DONE)
#define IDIST_IMPLEMENTATION_DONE

#include "idist_begin.h"
#include "idist_os.h"
#include "idist_base.h"
#include "idist_net.h"
#include "idist_store.h"
#include "idist_launch.h"
#include "idist_core.h"
#include "idist_calls.h"
#include "idist_spawn.h"
#include "idist_end.h"

#endif // IDIST_IMPLEMENTATION

#ifndef IDIST_NO_RING
#include "idist_ring.h"
#endif

/*
MIT License

Copyright (c) 2026 idist contributors

Permission is hereby granted, free of charge, to any person obtaining a copy
of this software and associated documentation files (the "Software"), to deal
in the Software without restriction, including without limitation the rights
to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
copies of the Software, and to permit persons to whom the Software is
furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all
copies or substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
SOFTWARE.
*/
