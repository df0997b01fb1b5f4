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
#define _FILE_OFFSET_BITS 64 // files above 2 GiB, and inode numbers above 2^32, also where a long has 32 bits
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
    idist_group *group;     // NULL: the world. Roots, sources and destinations are ranks of this group.
    idist_request *request; // NULL: block until done. Else return at once and complete in idist_wait / idist_test.
    void *stream;           // cudaStream_t, for device buffers: begins after what it holds; without a request, what comes
                            // to it later sees the result. idist_nccl.h says more. Else NULL.
    int timeout_ms;         // 0: the group's default. < 0: none.
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
    const char *backend;     // "ring", "self", or a list "mpi,ring" to take the first that fits; IDIST_BACKEND. "gloo" is
                             // another name of "ring"; "nccl" is "ring" with device_backend "nccl",
                             // unless that says more
    const char *init_method; // "env://", "tcp://host:port", "tcp://239.x.y.z:port", "file:///path"; IDIST_INIT_METHOD.
                             // Needs rank and world_size in this struct or in the environment.
    idist_store *store;      // rendezvous through this store instead; the caller keeps owning it
    int world_size;          // 0: ask the environment. Else rank counts too.
    int rank;                // 0 .. world_size - 1
    int nproc_per_node;      // workers of idist_spawn and idist_parallel_run on this host. 0: idist_spawn takes one per
                             // core; idist_parallel_run joins what a launcher made
    int nnodes;              // idist_parallel_run over several hosts: how many, ...
    int node_rank;           // ... and which of them this is
    const char *master_addr; // host of rank 0; MASTER_ADDR
    int master_port;         // port of the rendezvous there; MASTER_PORT
    int timeout_ms;          // deadline of each call; IDIST_TIMEOUT_MS; 0: 30 minutes; < 0: none
    int init_timeout_ms;     // deadline for all ranks to show up; IDIST_INIT_TIMEOUT_MS; 0: 5 minutes
    const void *secret;      // shared by all ranks of the job, at least 16 bytes; IDIST_SECRET_FILE, IDIST_SECRET
    size_t secret_nbytes;    //
    const char *transport;   // "auto" (shared memory inside a host, TCP between hosts), "socket" (local sockets inside a
                             // host) or "tcp"; IDIST_TRANSPORT
    const char *algorithm;   // "auto"; for tests "latency" or "bandwidth" (messages) or "chunked" (shared memory, never
                             // the short way); IDIST_ALGO
    const char *bind;        // "none", or "core": each rank stays on one of the processors it may use; IDIST_BIND
    size_t shm_nbytes;       // shared memory each rank reserves; IDIST_SHM_MIB (in MiB); 0: 4 MiB
    const char *host_id;     // ranks with equal ids share a host; IDIST_HOSTID. NULL: boot id, user, network namespace
    const void *mpi_comm;    // an MPI_Comm *, for idist_mpi.h: the communicator whose ranks become those of the world. It is
                             // duplicated and stays yours. NULL: MPI_COMM_WORLD
    idist_allocator allocator;
    idist_logger logger;
    int grace_ms;               // idist_spawn: time the others get after a first failure; 0: 2 s
    bool keep_going;            // idist_spawn: leave the survivors of a failure alone
    idist_report *report;       // idist_spawn: filled when a worker failed. May be NULL.
    const char *device;         // "cuda:1", "cuda" (local rank modulo devices), "cpu"; IDIST_DEVICE. NULL: "cuda" where all
                                // ranks have one and the program includes idist_nccl.h, else "cpu"
    const char *start_method;   // idist_spawn: "fork", or "exec" (the program is run anew); IDIST_START_METHOD
    const char *device_backend; // "nccl", "ipc" or "staged"; IDIST_DEVICE_BACKEND. NULL: see idist_nccl.h
    const void *nccl_comm;      // an ncclComm_t * with the ranks of the world, yours until the world fails and aborts it
    const void *nccl_config;    // an ncclConfig_t * for those that idist makes. May be NULL.
    bool high_priority_stream;  // idist's own work on the device goes first; IDIST_HIGH_PRIORITY_STREAM=1
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
IDIST_API int idist_get_local_rank(void);         // rank among the ranks of this host, by rank
IDIST_API int idist_get_nproc_per_node(void);     // ranks on this host
IDIST_API int idist_get_nnodes(void);             // hosts
IDIST_API int idist_get_node_rank(void);          // hosts are numbered by their lowest rank
IDIST_API const char *idist_backend(void);        // "self", "ring", ...
IDIST_API const char *idist_device(void);         // "cpu", "cuda:0"
IDIST_API const char *idist_device_backend(void); // "none"; with idist_nccl.h "nccl", "ipc", "staged"
IDIST_API const char *idist_hostname(void);
// Who started the ranks: "none", "spawn", "torchrun", "env", "openmpi", ... Before idist_initialize, what the environment
// says.
IDIST_API const char *idist_launcher(void);
#define idist_available_backends() idist_available_backends_of(IDIST_BACKENDS) // those the program has, "ring,self"

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
IDIST_API idist_status idist_all_reduce(const void *send, void *recv, size_t count, idist_dtype dtype, idist_op op,
                                        const idist_opts *opts);

// As all_reduce, the result on root only; recv is not touched elsewhere and may be NULL there. In place: send == recv.
IDIST_API idist_status idist_reduce(const void *send, void *recv, size_t count, idist_dtype dtype, idist_op op, int root,
                                    const idist_opts *opts);

// buf of root is copied to buf of all. buf: count.
IDIST_API idist_status idist_broadcast(void *buf, size_t count, idist_dtype dtype, int root, const idist_opts *opts);

// Returns when all ranks have called it.
IDIST_API idist_status idist_barrier(const idist_opts *opts);

// recv[k*count + i] = send[i] of rank k, on every rank. send: count. recv: n*count. In place: send == recv + r*count.
IDIST_API idist_status idist_all_gather(const void *send, void *recv, size_t count, idist_dtype dtype,
                                        const idist_opts *opts);

// As all_gather, on root only; recv may be NULL elsewhere. In place, on root: send == recv + r*count.
IDIST_API idist_status idist_gather(const void *send, void *recv, size_t count, idist_dtype dtype, int root,
                                    const idist_opts *opts);

// recv[i] = send[r*count + i] of root. send: n*count, on root; may be NULL elsewhere. recv: count.
// In place, on root: recv == send + r*count.
IDIST_API idist_status idist_scatter(const void *send, void *recv, size_t count, idist_dtype dtype, int root,
                                     const idist_opts *opts);

// recv[i] = op over all ranks of send[r*count + i]. send: n*count. recv: count. In place: recv == send + r*count.
IDIST_API idist_status idist_reduce_scatter(const void *send, void *recv, size_t count, idist_dtype dtype, idist_op op,
                                            const idist_opts *opts);

// recv[k*count + i] = send[r*count + i] of rank k. send: n*count. recv: n*count. In place: send == recv.
IDIST_API idist_status idist_all_to_all(const void *send, void *recv, size_t count, idist_dtype dtype,
                                        const idist_opts *opts);

// recv[i] = op over the ranks 0 .. r of send[i]. AVG is refused. send: count. recv: count. In place: send == recv.
IDIST_API idist_status idist_scan(const void *send, void *recv, size_t count, idist_dtype dtype, idist_op op,
                                  const idist_opts *opts);

// recv[i] = op over the ranks 0 .. r-1 of send[i]; recv of rank 0 is not touched. Otherwise as scan.
IDIST_API idist_status idist_exscan(const void *send, void *recv, size_t count, idist_dtype dtype, idist_op op,
                                    const idist_opts *opts);

// The v-forms: rank k contributes counts[k] elements, which lie at element displs[k] of the large buffer. displs ==
// NULL: one after the other. Counts that say how much goes from rank a to rank b must agree on a and b. The arrays,
// like the buffers, must stay until the operation is complete.

// send: sendcount == recvcounts[r]. recv: on every rank. recvcounts and recvdispls: n, the same counts on all ranks.
// In place: send == recv + recvdispls[r].
IDIST_API idist_status idist_all_gatherv(const void *send, size_t sendcount, void *recv, const size_t *recvcounts,
                                         const size_t *recvdispls, idist_dtype dtype, const idist_opts *opts);

// As all_gatherv, on root only; recv, recvcounts and recvdispls are not looked at elsewhere.
IDIST_API idist_status idist_gatherv(const void *send, size_t sendcount, void *recv, const size_t *recvcounts,
                                     const size_t *recvdispls, idist_dtype dtype, int root, const idist_opts *opts);

// The reverse of gatherv. send, sendcounts and senddispls are looked at on root only. recv: recvcount.
// In place, on root: recv == send + senddispls[r].
IDIST_API idist_status idist_scatterv(const void *send, const size_t *sendcounts, const size_t *senddispls, void *recv,
                                      size_t recvcount, idist_dtype dtype, int root, const idist_opts *opts);

// Rank r sends sendcounts[k] elements at send + senddispls[k] to rank k, and receives recvcounts[k] elements from it at
// recv + recvdispls[k]. Not in place: the buffers are disjoint.
IDIST_API idist_status idist_all_to_allv(const void *send, const size_t *sendcounts, const size_t *senddispls, void *recv,
                                         const size_t *recvcounts, const size_t *recvdispls, idist_dtype dtype,
                                         const idist_opts *opts);

// Bytes and strings of sizes that the receivers do not know. Blocking only.

// data of root (nbytes there) arrives in buf, which has room for capacity bytes; *nbytes is the size on every rank.
// On root buf holds the data and *nbytes its size. IDIST_ERR_TRUNCATED on a rank whose buf is too small: *nbytes
// then says what is needed, buf is untouched, and nothing is broken.
IDIST_API idist_status idist_broadcast_bytes(void *buf, size_t capacity, size_t *nbytes, int root, const idist_opts *opts);

// The bytes of all ranks, in rank order, one after the other in buf; sizes[k] (n entries) is what rank k gave. send:
// nbytes, which may differ from rank to rank. When capacity is below the total: IDIST_ERR_TRUNCATED on that rank, sizes
// is filled, buf is untouched, and nothing is broken.
IDIST_API idist_status idist_all_gather_bytes(const void *send, size_t nbytes, void *buf, size_t capacity, size_t *sizes,
                                              const idist_opts *opts);

//------------------------------------------------------------------------------
// [api:p2p]  from one rank to another
//
// Messages from one rank to another with the same tag arrive in the order they were sent. A send may return before the
// receiver asked for the message (up to some KiB), or only then: never rely on either. Tags are 0 .. 2^31 - 1.
// A receive that runs into its time-out before a message came is cancelled: IDIST_ERR_TIMEOUT, nothing lost or broken. A
// send that does, of more than some KiB, takes the group with it: the other side has heard of the message.
//------------------------------------------------------------------------------

IDIST_API idist_status idist_send(const void *buf, size_t count, idist_dtype dtype, int dst, int tag,
                                  const idist_opts *opts);

// buf: count at most; info (may be NULL) says what came. src may be IDIST_ANY_SOURCE, tag IDIST_ANY_TAG
// (which also takes what was meant for a later receive). A message that
// is longer gives IDIST_ERR_TRUNCATED, one of another dtype IDIST_ERR_MISMATCH; both stay there for another receive.
IDIST_API idist_status idist_recv(void *buf, size_t count, idist_dtype dtype, int src, int tag, idist_recv_info *info,
                                  const idist_opts *opts);

// Both at once, so that neighbours can exchange without a deadlock. Blocking only. The buffers are disjoint.
IDIST_API idist_status idist_sendrecv(const void *send, size_t sendcount, int dst, int sendtag, void *recv, size_t recvcount,
                                      int src, int recvtag, idist_dtype dtype, idist_recv_info *info,
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
typedef void (*idist_op_fn)(const void *in, void *inout, size_t count, idist_dtype dtype, void *arg);

// commutative == false keeps the ranks in order, at some cost. Collective in the sense that all ranks of the world of
// `group` (NULL: the default world) create their ops in the same order; purely local otherwise. Up to 224 at a time.
IDIST_API idist_status idist_op_create(idist_op_fn fn, void *arg, bool commutative, idist_group *group, idist_op *op);
// SUM of factor * send: each rank's own factor. Floating dtypes only.
IDIST_API idist_status idist_op_create_premul_sum(double factor, idist_group *group, idist_op *op);
// Frees the number for the next op, at once. It waits for nothing: what is under way with the op,
// pending requests too, runs to its end with it, so fn and arg must stay until that is complete.
// IDIST_ERR_ARG for what is no op of this world.
IDIST_API idist_status idist_op_free(idist_op op, idist_group *group);

// inout[i] = in[i] (op) inout[i], in this process. For built-in ops except AVG.
IDIST_API idist_status idist_reduce_local(const void *in, void *inout, size_t count, idist_dtype dtype, idist_op op);

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
#define idist_spawn(fn, arg, nproc_per_node, desc) idist_spawn_with((fn), (arg), (nproc_per_node), (desc), IDIST_BACKENDS)

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
#define idist_parallel_run(desc, fn, arg) idist_parallel_run_with((desc), (fn), (arg), #fn, IDIST_BACKENDS)

// A task for the two below; 0 is success.
typedef int (*idist_task_fn)(void *arg);

// The chosen rank runs fn first, the others after it is through: "rank 0 downloads, the rest finds the file". With
// local, the chosen local rank of each host goes first on that host. When fn fails on the first rank the others do
// not run it and all get IDIST_ERR_CALLBACK. Collective over the world.
IDIST_API idist_status idist_one_rank_first(idist_task_fn fn, void *arg, int rank, bool local, const idist_opts *opts);
// Only this rank runs fn. With barrier, the others wait for it, and learn of its failure.
IDIST_API idist_status idist_one_rank_only(idist_task_fn fn, void *arg, int rank, bool barrier, const idist_opts *opts);

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
    bool server;          // tcp, file: this process owns the table (rank 0). Exactly one does; it ends with it.
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
IDIST_API idist_status idist_store_open(const char *url, const idist_store_desc *desc, idist_store **store);
// A view in which every key has `prefix` before it. Closing it leaves `parent` open; parent must outlive it.
IDIST_API idist_status idist_store_prefix(idist_store *parent, const char *prefix, idist_store **store);
IDIST_API idist_status idist_store_close(idist_store **store);
IDIST_API int idist_store_port(const idist_store *store); // of a tcp server; otherwise 0

IDIST_API idist_status idist_store_set(idist_store *store, const char *key, const void *value, size_t nbytes);
// Waits for the key. *nbytes is its size; IDIST_ERR_TRUNCATED if above capacity (value untouched).
IDIST_API idist_status idist_store_get(idist_store *store, const char *key, void *value, size_t capacity, size_t *nbytes,
                                       int timeout_ms);
// Adds to a decimal number, which starts as 0; *result is the new value.
IDIST_API idist_status idist_store_add(idist_store *store, const char *key, int64_t delta, int64_t *result);
// If the key holds `expected` (nothing there counts as an empty one), it becomes `desired`. *nbytes bytes of value:
// what it holds afterwards.
IDIST_API idist_status idist_store_compare_set(idist_store *store, const char *key, const void *expected, size_t nexpected,
                                               const void *desired, size_t ndesired, void *value, size_t capacity,
                                               size_t *nbytes);
// Waits until all keys exist.
IDIST_API idist_status idist_store_wait(idist_store *store, const char *const *keys, size_t n, int timeout_ms);
// *ready: whether all keys exist now.
IDIST_API idist_status idist_store_check(idist_store *store, const char *const *keys, size_t n, bool *ready);
IDIST_API idist_status idist_store_delete(idist_store *store, const char *key, bool *deleted);
// Keys in the whole table, also through a view with a prefix.
IDIST_API idist_status idist_store_num_keys(idist_store *store, size_t *n);

//------------------------------------------------------------------------------
// [api:backend]  backends, and the lists of them
//------------------------------------------------------------------------------

typedef struct idist_backend_api idist_backend_api; // a table of functions; see the implementation part for the contract

// Backends in order of preference. IDIST_BACKENDS is the list of those whose headers you included before the call.
typedef struct idist_backend_list {
    const idist_backend_api *items[8]; // NULL entries are skipped
} idist_backend_list;

IDIST_API idist_backend_list idist_backend_list_of(const idist_backend_api *a, const idist_backend_api *b,
                                                   const idist_backend_api *c);
IDIST_API const idist_backend_api *idist_self_backend(void); // a world of 1; always there, always last

// What the macros above stand for.
IDIST_API idist_status idist_initialize_with(const idist_desc *desc, idist_backend_list backends);
IDIST_API const char *idist_available_backends_of(idist_backend_list backends);
IDIST_API idist_status idist_open_with(const idist_desc *desc, idist_group **world, idist_backend_list backends);
IDIST_API idist_status idist_spawn_with(idist_worker_fn fn, void *arg, int nproc_per_node, const idist_desc *desc,
                                        idist_backend_list backends);
IDIST_API idist_status idist_spawn_start_with(idist_worker_fn fn, void *arg, int nproc_per_node, const idist_desc *desc,
                                              idist_workers **workers, idist_backend_list backends);
IDIST_API idist_status idist_parallel_run_with(const idist_desc *desc, idist_worker_fn fn, void *arg, const char *name,
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
inline idist_dtype idist_dtype_of(const long *) { return sizeof(long) == 8 ? IDIST_I64 : IDIST_I32; }
inline idist_dtype idist_dtype_of(const unsigned long *) { return sizeof(long) == 8 ? IDIST_U64 : IDIST_U32; }
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

// Where all of a program is one file, a header of its system may have made macros of these words,
// as windows.h does.
#pragma push_macro("lock")
#undef lock
#pragma push_macro("max")
#undef max

// Programs in C++ may be compiled with these warnings; code that is C as well cannot do without
// such casts.
#if defined(__cplusplus) && defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wold-style-cast"
#pragma GCC diagnostic ignored "-Wzero-as-null-pointer-constant"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wuseless-cast"
#endif
#endif

//------------------------------------------------------------------------------
// [impl:os]  the only place that knows the operating system: time, randomness, memory pages, descriptors
// used by everything below
//------------------------------------------------------------------------------

#if !defined(__linux__)
#error "idist: only Linux so far. A port goes into the section [impl:os] and the socket section below it."
#endif

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>

#if !defined(CLOCK_MONOTONIC) || !defined(SYS_getpid) || !defined(AI_PASSIVE)
#error "where IDIST_IMPLEMENTATION is defined, include idist.h before every system header (or use -D_DEFAULT_SOURCE)"
#endif

#if defined(__GNUC__) && !defined(__clang__)
#define IDIST__VECTORIZE __attribute__((optimize("O3")))
#define IDIST__NO_ALIAS _Pragma("GCC ivdep")
#elif defined(__clang__)
#define IDIST__VECTORIZE
#define IDIST__NO_ALIAS _Pragma("clang loop vectorize(assume_safety)")
#else
#define IDIST__VECTORIZE
#define IDIST__NO_ALIAS
#endif
#define IDIST__PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#define IDIST__UNUSED __attribute__((unused))
#define IDIST__INLINE static inline __attribute__((always_inline))
#define IDIST__TLS static __thread

static const int64_t IDIST__MS = 1000000; // nanoseconds in a millisecond
static const int64_t IDIST__FOREVER = INT64_MAX;
#define IDIST__COUNT_OF(a) (sizeof(a) / sizeof((a)[0]))

static int64_t idist__os_now_ns(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

// The moment `timeout_ms` from now; negative means never.
static int64_t idist__os_deadline(int64_t timeout_ms) {
    return timeout_ms < 0 ? IDIST__FOREVER : idist__os_now_ns() + timeout_ms * IDIST__MS;
}

// Milliseconds until a deadline, rounded up, as poll(2) wants them.
static int idist__os_ms_until(int64_t deadline_ns) {
    int64_t left;
    if (deadline_ns == IDIST__FOREVER) return -1;
    left = deadline_ns - idist__os_now_ns();
    if (left <= 0) return 0;
    left = (left + IDIST__MS - 1) / IDIST__MS;
    return left > 1000000 ? 1000000 : (int)left;
}

static void idist__os_pause_ms(int ms) {
    struct timespec ts;
    ts.tv_sec = ms / 1000;
    ts.tv_nsec = (long)(ms % 1000) * 1000000;
    nanosleep(&ts, NULL); // cut short by a signal: the callers loop over deadlines
}

// By number, since glibc before 2.25 has no getrandom(); kernels before 3.17 have none either.
static ssize_t idist__os_random_some(void *buf, size_t nbytes) {
    ssize_t n = -1;
    int fd;

#ifdef SYS_getrandom
    n = syscall(SYS_getrandom, buf, nbytes, 0);
    if (n >= 0 || errno == EINTR) return n;
#endif
    fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;

    do n = read(fd, buf, nbytes);
    while (n < 0 && errno == EINTR);
    close(fd);
    return n > 0 ? n : -1;
}

static void idist__os_random(void *buf, size_t nbytes) {
    unsigned char *p = (unsigned char *)buf;
    while (nbytes) {
        ssize_t n = idist__os_random_some(p, nbytes);
        if (n > 0) {
            p += n;
            nbytes -= (size_t)n;
        } else if (errno != EINTR) {
            // Neither (an old sandbox). Nonces must differ, so clock and process id are better than
            // nothing.
            int64_t mix = idist__os_now_ns() ^ ((int64_t)getpid() << 32) ^ (int64_t)(uintptr_t)p;
            size_t k = nbytes < sizeof mix ? nbytes : sizeof mix;
            memcpy(p, &mix, k);
            p += k;
            nbytes -= k;
        }
    }
}

// A value of the environment; an empty one counts as not set, as in torch's env://.
static const char *idist__os_env(const char *name) {
    const char *v = getenv(name);
    return v && v[0] ? v : NULL;
}

// The processors a thread may run on, a bit for each.
enum { IDIST__CPU_WORDS = 128 };
typedef struct idist__cpus {
    unsigned long bits[IDIST__CPU_WORDS]; // 8192 processors
} idist__cpus;

static void idist__os_cpus(idist__cpus *cpus) {
    memset(cpus, 0, sizeof *cpus);
    if (syscall(SYS_sched_getaffinity, 0, sizeof *cpus, cpus) <= 0) cpus->bits[0] = 1;
}

static int idist__cpus_count(const idist__cpus *cpus) {
    int i, n = 0;
    for (i = 0; i < IDIST__CPU_WORDS; i++) n += __builtin_popcountl(cpus->bits[i]);
    return n;
}

static int idist__os_ncores(void) {
    idist__cpus cpus;
    idist__os_cpus(&cpus);
    return idist__cpus_count(&cpus);
}

// Moves the calling thread to the k-th of the processors it may use, and, if it is to stay there, keeps it from the others.
static bool idist__os_bind(int k, bool stay) {
    idist__cpus cpus, one;
    int i, bit, width = 8 * (int)sizeof cpus.bits[0];
    idist__os_cpus(&cpus);
    memset(&one, 0, sizeof one);
    for (i = 0; i < IDIST__CPU_WORDS * width; i++) {
        bit = (int)(cpus.bits[i / width] >> (i % width) & 1);
        if (bit && k-- == 0) {
            one.bits[i / width] = 1ul << (i % width);
            if (syscall(SYS_sched_setaffinity, 0, sizeof one, &one) != 0) return false;
            return stay || syscall(SYS_sched_setaffinity, 0, sizeof cpus, &cpus) == 0; // by then it is there
        }
    }
    return false;
}

// Threads of this process; a large number when that cannot be told.
IDIST__UNUSED static int idist__os_nthreads(void) {
    char text[512], *at;
    ssize_t n;
    int i, fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 1000;
    do n = read(fd, text, sizeof text - 1);
    while (n < 0 && errno == EINTR);
    close(fd);
    if (n <= 0) return 1000;
    text[n] = 0;
    at = strrchr(text, ')'); // field 2 is the name, which may contain anything; 20 is the number
    for (i = 2; at && i < 20; i++) at = strchr(at + 1, ' ');
    return at ? atoi(at) : 1000;
}

static void idist__os_close(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

// A word that reads 1 in this process and 0 in a child made by fork, without a system call per look.
static int *idist__os_fork_guard(void) {
    long page = sysconf(_SC_PAGESIZE);
    void *p = mmap(NULL, (size_t)page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NULL;
    if (madvise(p, (size_t)page, 18 /* MADV_WIPEONFORK */) != 0) {
        munmap(p, (size_t)page);
        return NULL;
    }
    *(int *)p = 1;
    return (int *)p;
}

static void idist__os_fork_guard_free(int *guard) {
    if (guard) munmap(guard, (size_t)sysconf(_SC_PAGESIZE));
}

static void idist__os_cond_init(pthread_cond_t *cond) {
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attr);
    pthread_condattr_destroy(&attr);
}

static void idist__os_cond_wait(pthread_cond_t *cond, pthread_mutex_t *lock, int64_t deadline_ns) {
    struct timespec ts;
    if (deadline_ns == IDIST__FOREVER) {
        pthread_cond_wait(cond, lock);
        return;
    }
    ts.tv_sec = (time_t)(deadline_ns / 1000000000);
    ts.tv_nsec = (long)(deadline_ns % 1000000000);
    pthread_cond_timedwait(cond, lock, &ts);
}

// Tells the processor that this is a loop that waits.
IDIST__UNUSED static void idist__os_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

// A number in shared memory that is read and written atomically. i386 would align it to 4 bytes,
// which can lie in two cache lines.
typedef uint64_t idist__counter __attribute__((aligned(8)));

// Before something is said through shared memory, and after it was heard. Ranks that are threads of one process have it
// mapped at different addresses, so the thread sanitizer cannot see what one says to the other.
IDIST__UNUSED static void idist__os_handover(void) {
#if defined(__SANITIZE_THREAD__)
    static uint32_t word;
    __atomic_fetch_add(&word, 1u, __ATOMIC_ACQ_REL);
#endif
}

// Asks for a cache line that will be written soon, without waiting for it.
IDIST__UNUSED static void idist__os_claim(const void *p) {
#if defined(__x86_64__)
    __asm__ __volatile__("prefetchw %0" : : "m"(*(const char *)p)); // the builtin only reads where the target is old
#else
    __builtin_prefetch(p, 1);
#endif
}

// The system call takes a time of its own: two longs also where time_t has 64 bits and a long 32.
// Architectures that began with such a time_t have another call instead.
#ifdef SYS_futex
enum { IDIST__OS_FUTEX = SYS_futex };
#else
enum { IDIST__OS_FUTEX = SYS_futex_time64 };
#endif
#if !defined(SYS_futex) || (defined(__x86_64__) && defined(__ILP32__))
typedef int64_t idist__os_futex_part;
#else
typedef long idist__os_futex_part;
#endif

// Sleeps while a word that processes share has this value; may wake up for no reason.
IDIST__UNUSED static void idist__os_futex_wait(uint32_t *word, uint32_t value, int64_t until_ns) {
    struct {
        idist__os_futex_part seconds, nanoseconds;
    } ts;
    int64_t left = until_ns - idist__os_now_ns(), seconds = left / 1000000000;

    if (left <= 0) return;
    ts.seconds = (idist__os_futex_part)(seconds < INT32_MAX ? seconds : INT32_MAX);
    ts.nanoseconds = (idist__os_futex_part)(left % 1000000000);
    syscall(IDIST__OS_FUTEX, word, 0 /* FUTEX_WAIT */, value, until_ns == IDIST__FOREVER ? NULL : &ts, NULL, 0);
}

IDIST__UNUSED static void idist__os_futex_wake(uint32_t *word) {
    syscall(IDIST__OS_FUTEX, word, 1 /* FUTEX_WAKE */, INT32_MAX, NULL, NULL, 0);
}

// Lets all other processes that have announced themselves here (announce) pass a full memory fence before it returns.
IDIST__UNUSED static bool idist__os_fence_others(bool announce) {
#ifdef SYS_membarrier
    return syscall(SYS_membarrier, announce ? 1 << 2 : 1 << 1 /* (REGISTER_)GLOBAL_EXPEDITED */, 0, 0) == 0;
#else
    (void)announce;
    return false;
#endif
}

// A file in memory without a name, of a size that can never change again; -1 and errno.
IDIST__UNUSED static int idist__os_memfd(size_t nbytes) {
    struct rlimit limit;
    int err, fd;
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < nbytes) {
        errno = EFBIG; // found out by trying, it would be a signal
        return -1;
    }
    fd = (int)syscall(SYS_memfd_create, "idist", 3 /* MFD_CLOEXEC | MFD_ALLOW_SEALING */);
    if (fd < 0) return -1;
    if (ftruncate(fd, (off_t)nbytes) == 0 && fcntl(fd, 1033 /* F_ADD_SEALS */, 7 /* SEAL | SHRINK | GROW */) == 0) return fd;
    err = errno;
    close(fd);
    errno = err;
    return -1;
}

// Copies from the memory of another process of this user. 0, or an errno: ESRCH, EPERM, EFAULT.
IDIST__UNUSED static int idist__os_read_other(pid_t pid, uint64_t at, void *buf, size_t nbytes) {
    char *to = (char *)buf;
    while (nbytes) {
        struct iovec here, there;
        long n;
        here.iov_base = to;
        there.iov_base = (void *)(uintptr_t)at;
        here.iov_len = there.iov_len = nbytes;
        n = syscall(SYS_process_vm_readv, (long)pid, &here, 1L, &there, 1L, 0L);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return n < 0 ? errno : EFAULT;
        to += n;
        at += (uint64_t)n;
        nbytes -= (size_t)n;
    }
    return 0;
}

// Takes memory for a part of such a file now, so that no access to it can fail later. 0 or an errno.
static int idist__os_reserve(int fd, size_t at, size_t nbytes) {
    int rc;
    do rc = posix_fallocate(fd, (off_t)at, (off_t)nbytes);
    while (rc == EINTR);
    return rc;
}

// A thread that takes no signals: they belong to the program's own threads.
static int idist__os_thread(pthread_t *thread, void *(*fn)(void *), void *arg) {
    sigset_t all, before;
    int rc;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    rc = pthread_create(thread, NULL, fn, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return rc;
}

//------------------------------------------------------------------------------
// [impl:err]  status names, and the text of a thread's last failure
// uses os . used by everything below
//------------------------------------------------------------------------------

typedef struct idist__task idist__task;
typedef struct idist__world idist__world;

// All that a thread has of its own.
typedef struct idist__thread {
    char text[1024];           // idist_last_error
    char config[2048];         // idist_show_config
    char names[128];           // idist_available_backends
    char hostname[64];         // idist_hostname before there is a world
    char group_text[1024];     // of the first failure inside idist_group_begin
    int callbacks;             // we are inside a function of the caller's: it must not call us
    int group_depth;           // open idist_group_begin calls
    idist_status group_status; // first failure inside them
    idist__task *group_tasks;  // what they started
    idist__task *group_last;   // and the last of it, if there is any
    idist__world *held_world;  // whose device backend holds some of it back until the end
} idist__thread;

IDIST__TLS idist__thread idist__me;

const char *idist_status_name(idist_status status) {
    switch (status) {
#define IDIST__X(name, value, text) \
    case IDIST_##name: return "IDIST_" #name;
        IDIST_STATUS_MAP(IDIST__X)
#undef IDIST__X
    }
    return "IDIST_ERR_UNKNOWN";
}

const char *idist_status_string(idist_status status) {
    switch (status) {
#define IDIST__X(name, value, text) \
    case IDIST_##name: return text;
        IDIST_STATUS_MAP(IDIST__X)
#undef IDIST__X
    }
    return "unknown status";
}

const char *idist_last_error(void) { return idist__me.text; }

// Every failure passes through here at the place where it is noticed. The text says what, to whom, and what to do.
// The text may contain the previous one (a caller adds what it was doing).
IDIST__PRINTF(2, 3) static idist_status idist__fail(idist_status status, const char *fmt, ...) {
    char text[sizeof idist__me.text];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    memcpy(idist__me.text, text, sizeof text);
    return status;
}

// The same for a failed system call; keeps errno's own words.
static idist_status idist__fail_errno(const char *what, int err) {
    idist_status status = IDIST_ERR_SYSTEM;
    if (err == EMFILE || err == ENFILE) status = IDIST_ERR_NO_FDS;
    if (err == ENOMEM) status = IDIST_ERR_NO_MEMORY;
    if (err == ENOSPC) status = IDIST_ERR_NO_SPACE;
    if (err == EADDRINUSE) status = IDIST_ERR_ADDR_IN_USE;
    return idist__fail(status, "%s: %s", what, strerror(err));
}

// Appends to a text in a buffer of `cap` bytes; cuts it off at the end.
IDIST__PRINTF(3, 4) static void idist__append(char *buf, size_t cap, const char *fmt, ...) {
    size_t used = strlen(buf);
    va_list args;
    va_start(args, fmt);
    vsnprintf(buf + used, cap - used, fmt, args);
    va_end(args);
}

static void idist__copy_text(char *dst, size_t cap, const char *src) {
    size_t n = strlen(src);
    if (n >= cap) n = cap - 1;
    memcpy(dst, src, n);
    dst[n] = 0;
}

//------------------------------------------------------------------------------
// [impl:mem]  memory through the caller's allocator
// uses err . used by store world and the backends
//------------------------------------------------------------------------------

static void *idist__mem_alloc(const idist_allocator *a, size_t nbytes) {
    void *p;
    if (!nbytes) nbytes = 1;
    p = a && a->alloc_fn ? a->alloc_fn(nbytes, a->user) : malloc(nbytes);
    if (p) memset(p, 0, nbytes);
    else idist__fail(IDIST_ERR_NO_MEMORY, "out of memory: %zu bytes were asked for", nbytes);
    return p;
}

// As alloc, but not zeroed: for large buffers that are written before they are read.
static void *idist__mem_raw(const idist_allocator *a, size_t nbytes) {
    void *p;
    if (!nbytes) nbytes = 1;
    p = a && a->alloc_fn ? a->alloc_fn(nbytes, a->user) : malloc(nbytes);
    if (!p) idist__fail(IDIST_ERR_NO_MEMORY, "out of memory: %zu bytes were asked for", nbytes);
    return p;
}

static void idist__mem_free(const idist_allocator *a, void *p) {
    if (!p) return;
    if (a && a->free_fn) a->free_fn(p, a->user);
    else free(p);
}

// All of a list whose entries begin with the pointer to the next one.
IDIST__UNUSED static void idist__mem_free_list(const idist_allocator *mem, void *first) {
    while (first) {
        void *next = *(void **)first;
        idist__mem_free(mem, first);
        first = next;
    }
}

// A window is our part of a file that all ranks of the host have mapped; idist_alloc takes pages from it. Blocks may
// outlive the world, and the mapping goes with the last of them. idist_free finds the window by the address, hence
// the list of all.
typedef struct idist__block {
    struct idist__block *next; // by address
    size_t at, nbytes;         // within the window
} idist__block;

typedef struct idist__window {
    struct idist__window *next;
    int fd;    // the file
    pid_t pid; // a child made by fork must not give pages back that its parent uses
    char *map; // all of it
    size_t map_nbytes;
    size_t at, nbytes; // our part
    idist__block *blocks;
    bool closed;
} idist__window;

static pthread_mutex_t idist__windows_lock = PTHREAD_MUTEX_INITIALIZER;
static idist__window *idist__windows;

static void idist__window_unmap(idist__window *win) {
    idist__window **at;
    for (at = &idist__windows; *at != win; at = &(*at)->next) continue;
    *at = win->next;
    if (win->fd >= 0) munmap(win->map, win->map_nbytes);
    if (win->fd >= 0) close(win->fd);
    free(win);
}

static idist__window *idist__window_list(idist__window *win) {
    pthread_mutex_lock(&idist__windows_lock);
    win->next = idist__windows;
    idist__windows = win;
    pthread_mutex_unlock(&idist__windows_lock);
    return win;
}

// Maps the whole file; the window owns fd from here on, also when this fails (NULL).
IDIST__UNUSED static idist__window *idist__window_open(int fd, size_t map_nbytes, size_t at, size_t nbytes) {
    idist__window *win = (idist__window *)calloc(1, sizeof *win);
    void *map = MAP_FAILED;
    if (win) map = mmap(NULL, map_nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (map == MAP_FAILED) {
        free(win);
        close(fd);
        return NULL;
    }
    madvise(map, map_nbytes, MADV_DONTDUMP);
    win->fd = fd;
    win->pid = getpid();
    win->map = (char *)map;
    win->map_nbytes = map_nbytes;
    win->at = at;
    win->nbytes = nbytes;
    return idist__window_list(win);
}

// A window in memory that somebody else has mapped, and unmaps when the window is closed.
IDIST__UNUSED static idist__window *idist__window_adopt(char *memory, size_t nbytes) {
    idist__window *win = (idist__window *)calloc(1, sizeof *win);
    if (!win) return NULL;
    win->fd = -1;
    win->map = memory;
    win->nbytes = nbytes;
    return idist__window_list(win);
}

IDIST__UNUSED static void idist__window_close(idist__window *win) {
    pthread_mutex_lock(&idist__windows_lock);
    win->closed = true;
    if (!win->blocks) idist__window_unmap(win);
    pthread_mutex_unlock(&idist__windows_lock);
}

// The first gap that is large enough; zeroed pages. NULL: no room, or no memory.
IDIST__UNUSED static void *idist__window_alloc(idist__window *win, size_t nbytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), at = 0;
    idist__block **link, *b = (idist__block *)malloc(sizeof *b);
    if (!b || nbytes > win->nbytes) {
        free(b);
        return NULL;
    }
    nbytes = (nbytes + page - 1) / page * page + (nbytes ? 0 : page);
    pthread_mutex_lock(&idist__windows_lock);
    for (link = &win->blocks; *link && (*link)->at - at < nbytes; link = &(*link)->next) at = (*link)->at + (*link)->nbytes;
    if (win->nbytes - at < nbytes || (win->fd >= 0 && idist__os_reserve(win->fd, win->at + at, nbytes) != 0)) {
        free(b);
        b = NULL;
    } else {
        b->at = at;
        b->nbytes = nbytes;
        b->next = *link;
        *link = b;
        if (win->fd < 0) memset(win->map + at, 0, nbytes);
    }
    pthread_mutex_unlock(&idist__windows_lock);
    return b ? win->map + win->at + at : NULL;
}

// Whether p lies in a window; its block, if one begins there, now is free.
static bool idist__window_free(void *p) {
    idist__window *win;
    idist__block **link, *b = NULL;
    bool ours = false;
    pthread_mutex_lock(&idist__windows_lock);
    for (win = idist__windows; win && !ours; win = win->next) {
        char *base = win->map + win->at;
        ours = (char *)p >= base && (char *)p < base + win->nbytes;
        if (!ours) continue;
        for (link = &win->blocks; *link && (char *)p != base + (*link)->at; link = &(*link)->next) continue;
        if ((b = *link) == NULL) break; // freed already
        *link = b->next;
        if (win->fd >= 0 && win->pid == getpid())
            madvise(p, b->nbytes, 9 /* MADV_REMOVE: the pages go back to the system */);
        if (win->closed && !win->blocks) idist__window_unmap(win);
        break;
    }
    pthread_mutex_unlock(&idist__windows_lock);
    free(b);
    return ours;
}

//------------------------------------------------------------------------------
// [impl:log]  one line at a time, to the caller's logger or to stderr
// uses os err . used by launch world spawn and the backends
//------------------------------------------------------------------------------

typedef struct idist__log {
    idist_logger logger;
    idist_log_level level;
    char who[96]; // "rank 3/8 host"
} idist__log;

static pthread_mutex_t idist__log_lock = PTHREAD_MUTEX_INITIALIZER;
static const char *idist__log_before = ""; // takes away the progress bar that a line would be glued to; under the lock

static idist_status idist__log_init(idist__log *log, const idist_logger *logger) {
    static const char *const names[] = {"", "error", "warn", "info", "debug"};
    const char *env = idist__os_env("IDIST_LOG");
    int i;
    memset(log, 0, sizeof *log);
    if (logger) log->logger = *logger;
    log->level = IDIST_LOG_WARN;
    if (!env) return IDIST_OK;
    for (i = 1; i <= 4; i++)
        if (strcmp(env, names[i]) == 0) {
            log->level = (idist_log_level)i;
            return IDIST_OK;
        }
    return idist__fail(IDIST_ERR_ENV, "IDIST_LOG=%s: use error, warn, info or debug", env);
}

IDIST__PRINTF(3, 4) static void idist__log_print(const idist__log *log, idist_log_level level, const char *fmt, ...) {
    static const char *const names[] = {"", "error", "warning", "info", "debug"};
    char text[1024], line[1200];
    va_list args;
    if (level > log->level) return;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    snprintf(line, sizeof line, "idist %s%s%s: %s", log->who, log->who[0] ? " " : "", names[level], text);
    pthread_mutex_lock(&idist__log_lock);
    idist__me.callbacks++;
    if (log->logger.log_fn) log->logger.log_fn(level, line, log->logger.user);
    else fprintf(stderr, "%s%s\n", idist__log_before, line), idist__log_before = "";
    idist__me.callbacks--;
    pthread_mutex_unlock(&idist__log_lock);
}

// A program may be built with -ffast-math or -Ofast, but a NaN that one rank hands in must come out
// on all, and converters rely on the order of their steps. Until the end of [impl:reduce].
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__) || defined(__ASSOCIATIVE_MATH__) || \
    defined(__RECIPROCAL_MATH__)
#define IDIST__FAST_MATH 1
#if defined(__clang__)
#pragma float_control(precise, on, push)
#elif defined(__GNUC__)
// As C, pop_options alone would leave these undefined.
#pragma push_macro("__FAST_MATH__")
#pragma push_macro("__FINITE_MATH_ONLY__")
#pragma push_macro("__ASSOCIATIVE_MATH__")
#pragma push_macro("__RECIPROCAL_MATH__")
#pragma push_macro("__NO_SIGNED_ZEROS__")
#pragma push_macro("__NO_TRAPPING_MATH__")
#pragma push_macro("__NO_MATH_ERRNO__")
#pragma GCC push_options
#pragma GCC optimize("no-fast-math")
#endif
#endif

//------------------------------------------------------------------------------
// [impl:type]  dtypes: sizes, names, floats of 16 and 8 bits
// uses - . used by reduce call and the backends
//------------------------------------------------------------------------------

static const char *const idist__dtype_names[IDIST_DTYPE_COUNT] = {"I8",  "U8",  "I16",  "U16", "I32", "U32",    "I64",
                                                                  "U64", "F16", "BF16", "F32", "F64", "F8E4M3", "F8E5M2"};
static const uint8_t idist__dtype_sizes[IDIST_DTYPE_COUNT] = {1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8, 1, 1};
static const char *const idist__op_names[IDIST_OP_COUNT] = {"SUM",  "PROD", "MIN",  "MAX",  "AVG",
                                                            "BAND", "BOR",  "BXOR", "LAND", "LOR"};

size_t idist_dtype_size(idist_dtype dtype) {
    return (unsigned)dtype < IDIST_DTYPE_COUNT ? idist__dtype_sizes[(unsigned)dtype] : 0;
}

const char *idist_dtype_name(idist_dtype dtype) {
    return (unsigned)dtype < IDIST_DTYPE_COUNT ? idist__dtype_names[(unsigned)dtype] : "unknown dtype";
}

const char *idist_op_name(idist_op op) {
    if ((unsigned)op < IDIST_OP_COUNT) return idist__op_names[(unsigned)op];
    return (int)op >= IDIST_OP_USER && (int)op <= IDIST_OP_LAST ? "user op" : "unknown op";
}

static bool idist__type_is_float(idist_dtype d) { return d >= IDIST_F16; }
// Floats of 16 and 8 bits, which are reduced as F32.
static bool idist__type_is_narrow(idist_dtype d) { return idist__type_is_float(d) && d != IDIST_F32 && d != IDIST_F64; }

IDIST__INLINE float idist__bits_to_float(uint32_t u) {
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

IDIST__INLINE uint32_t idist__float_to_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

// Floats of e bits of exponent and m of fraction as IEEE has them; `special` is the first code that is no finite number: an
// infinity, or where there is none a NaN. Branches would keep the loops that do this from being vectorized: zero and
// subnormals are computed as well, and taken by a mask.
IDIST__INLINE float idist__small_to_float(uint32_t x, uint32_t e, uint32_t m, uint32_t special) {
    uint32_t abs = x & ((1u << (e + m)) - 1), sign = x >> (e + m) << 31, bias = 128 - (1u << (e - 1)); // of the exponents
    uint32_t u = (abs << (23 - m)) + (bias << 23), low = 0 - (uint32_t)(abs >> m == 0);
    float subnormal = (float)(int32_t)abs * idist__bits_to_float((bias + 1 - m) << 23);
    if ((int32_t)abs >= (int32_t)special) u |= 0x7f800000u;
    if ((int32_t)abs > (int32_t)special) u |= 0x400000u; // quiet
    return idist__bits_to_float(sign | (u & ~low) | (idist__float_to_bits(subnormal) & low));
}

// Round to nearest, ties to even; what is larger becomes the code `most`, a NaN becomes `nan`. A float that is added to one
// whose last bit is worth the smallest subnormal is rounded to a multiple of that.
IDIST__INLINE uint32_t idist__float_to_small(float f, uint32_t e, uint32_t m, uint32_t most, uint32_t nan) {
    uint32_t u = idist__float_to_bits(f), abs = u & 0x7fffffffu, bias = 128 - (1u << (e - 1)), unit = (bias + 24 - m) << 23;
    uint32_t low = 0 - (uint32_t)((int32_t)abs < (int32_t)((bias + 1) << 23));
    uint32_t subnormal = idist__float_to_bits(idist__bits_to_float(abs) + idist__bits_to_float(unit)) - unit;
    uint32_t x = (abs - (bias << 23) + (1u << (22 - m)) - 1 + ((abs >> (23 - m)) & 1u)) >> (23 - m);
    x = (x & ~low) | (subnormal & low);
    if ((int32_t)x > (int32_t)most) x = most;
    return (int32_t)abs > 0x7f800000 ? nan : x | u >> 31 << (e + m);
}

// Both as the hardware does (F16C, Arm): overflow gives infinity, a NaN becomes a quiet one and keeps its payload.
IDIST__INLINE float idist__half_to_float(uint16_t h) { return idist__small_to_float(h, 5, 10, 0x7c00); }
IDIST__INLINE uint16_t idist__float_to_half(float f) {
    uint32_t u = idist__float_to_bits(f), nan = ((u >> 16) & 0x8000u) | 0x7e00u | ((u >> 13) & 0x3ffu);
    return (uint16_t)idist__float_to_small(f, 5, 10, 0x7c00, nan);
}

// As CUDA's __nv_fp8_e4m3 and __nv_fp8_e5m2: infinity, too, gives the largest finite number.
IDIST__INLINE float idist__f8e4m3_to_float(uint8_t h) { return idist__small_to_float(h, 4, 3, 0x7f); }
IDIST__INLINE float idist__f8e5m2_to_float(uint8_t h) { return idist__small_to_float(h, 5, 2, 0x7c); }
IDIST__INLINE uint8_t idist__float_to_f8e4m3(float f) { return (uint8_t)idist__float_to_small(f, 4, 3, 0x7e, 0x7f); }
IDIST__INLINE uint8_t idist__float_to_f8e5m2(float f) { return (uint8_t)idist__float_to_small(f, 5, 2, 0x7b, 0x7f); }

IDIST__INLINE float idist__bf16_to_float(uint16_t h) { return idist__bits_to_float((uint32_t)h << 16); }
IDIST__INLINE uint16_t idist__float_to_bf16(float f) {
    uint32_t u = idist__float_to_bits(f), quiet = ~u & 0x400000u, round = 0x7fffu + ((u >> 16) & 1u);
    return (uint16_t)((u + ((int32_t)(u & 0x7fffffffu) > 0x7f800000 ? quiet : round)) >> 16);
}

// Element types that may lie at any address: user buffers need not be aligned.
#define IDIST__UNALIGNED __attribute__((aligned(1), may_alias))
typedef uint8_t IDIST__UNALIGNED idist__any_u8;
typedef int8_t IDIST__UNALIGNED idist__any_i8;
typedef uint16_t IDIST__UNALIGNED idist__any_u16;
typedef int16_t IDIST__UNALIGNED idist__any_i16;
typedef uint32_t IDIST__UNALIGNED idist__any_u32;
typedef int32_t IDIST__UNALIGNED idist__any_i32;
typedef uint64_t IDIST__UNALIGNED idist__any_u64;
typedef int64_t IDIST__UNALIGNED idist__any_i64;
typedef float IDIST__UNALIGNED idist__any_f32;
typedef double IDIST__UNALIGNED idist__any_f64;

// Every loop over elements exists once per instruction set, here and in [impl:reduce]: base is what the compiler was asked
// for, the others run where the processor has them. All give the same bits, so a world's machines may differ.
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <cpuid.h>
#define IDIST__X86 1
#define IDIST__ISA_avx2 __attribute__((target("avx2,f16c")))
#define IDIST__ISA_avx512 __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512vl,avx512dq")))
#endif
#define IDIST__ISA_base

typedef enum idist__isa { IDIST__BASE, IDIST__AVX2, IDIST__AVX512, IDIST__ISA_COUNT } idist__isa;

static idist__isa idist__type_isa; // set once, before main, by idist__reduce_start

// The best instruction set of this processor that its operating system lets us use.
static idist__isa idist__type_best_isa(void) {
#ifdef IDIST__X86
    unsigned a, b, c, d;
    __builtin_cpu_init();
    // Not all compilers know the name f16c.
    if (!__builtin_cpu_supports("avx2") || !__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_F16C)) return IDIST__BASE;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
        !__builtin_cpu_supports("avx512dq"))
        return IDIST__AVX2;
    return IDIST__AVX512;
#else
    return IDIST__BASE;
#endif
}

#ifdef __clang__ // says so where it does not vectorize, as at -O0; until the end of the kernels
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"
#endif

#define IDIST__CONVERTERS(name, type, isa)                                                                                  \
    IDIST__VECTORIZE IDIST__ISA_##isa static void idist__widen_##name##_##isa(float *dst, const void *src, size_t count) {  \
        const idist__any_##type *s = (const idist__any_##type *)src;                                                        \
        size_t i;                                                                                                           \
        IDIST__NO_ALIAS                                                                                                     \
        for (i = 0; i < count; i++) dst[i] = idist__##name##_to_float(s[i]);                                                \
    }                                                                                                                       \
    IDIST__VECTORIZE IDIST__ISA_##isa static void idist__narrow_##name##_##isa(void *dst, const float *src, size_t count) { \
        idist__any_##type *d = (idist__any_##type *)dst;                                                                    \
        size_t i;                                                                                                           \
        IDIST__NO_ALIAS                                                                                                     \
        for (i = 0; i < count; i++) d[i] = idist__float_to_##name(src[i]);                                                  \
    }

IDIST__CONVERTERS(half, u16, base)
IDIST__CONVERTERS(bf16, u16, base)
IDIST__CONVERTERS(f8e4m3, u8, base)
IDIST__CONVERTERS(f8e5m2, u8, base)

#ifdef IDIST__X86
IDIST__CONVERTERS(bf16, u16, avx2)
IDIST__CONVERTERS(bf16, u16, avx512)
IDIST__CONVERTERS(f8e4m3, u8, avx2)
IDIST__CONVERTERS(f8e5m2, u8, avx2)

// In assembly because reading <immintrin.h> would cost every program a quarter of a second.
typedef float idist__f32x8 __attribute__((vector_size(32), aligned(1), may_alias));
typedef uint16_t idist__u16x8 __attribute__((vector_size(16), aligned(1), may_alias));

IDIST__ISA_avx2 static void idist__widen_half_avx2(float *dst, const void *src, size_t count) {
    const idist__any_u16 *s = (const idist__any_u16 *)src;
    size_t i;
    for (i = 0; i + 8 <= count; i += 8) {
        idist__f32x8 v;
        __asm__("vcvtph2ps %1, %0" : "=x"(v) : "m"(*(const idist__u16x8 *)(const void *)(s + i)));
        *(idist__f32x8 *)(void *)(dst + i) = v;
    }
    for (; i < count; i++) dst[i] = idist__half_to_float(s[i]);
}

IDIST__ISA_avx2 static void idist__narrow_half_avx2(void *dst, const float *src, size_t count) {
    idist__any_u16 *d = (idist__any_u16 *)dst;
    size_t i;
    for (i = 0; i + 8 <= count; i += 8) { // 0 rounds to nearest, ties to even
        idist__f32x8 v = *(const idist__f32x8 *)(const void *)(src + i);
        __asm__("vcvtps2ph $0, %1, %0" : "=m"(*(idist__u16x8 *)(void *)(d + i)) : "x"(v));
    }
    for (; i < count; i++) d[i] = idist__float_to_half(src[i]);
}
#endif

// Of an instruction set, from F16 on.
#define IDIST__CONVERTER(name, isa) \
    { idist__widen_##name##_##isa, idist__narrow_##name##_##isa }
#define IDIST__CONVERTER_ROW(isa, wide)                                                                           \
    {                                                                                                             \
        IDIST__CONVERTER(half, isa), IDIST__CONVERTER(bf16, wide), {0, 0}, {0, 0}, IDIST__CONVERTER(f8e4m3, isa), \
            IDIST__CONVERTER(f8e5m2, isa)                                                                         \
    }
static const struct {
    void (*widen)(float *dst, const void *src, size_t count);
    void (*narrow)(void *dst, const float *src, size_t count);
} idist__type_converters[][IDIST_DTYPE_COUNT - IDIST_F16] = {
    IDIST__CONVERTER_ROW(base, base),
#ifdef IDIST__X86
    IDIST__CONVERTER_ROW(avx2, avx2),
    IDIST__CONVERTER_ROW(avx2, avx512),
#endif
};

static void idist__type_widen(float *dst, const void *src, size_t count, idist_dtype dtype) {
    idist__type_converters[idist__type_isa][dtype - IDIST_F16].widen(dst, src, count);
}

static void idist__type_narrow(void *dst, const float *src, size_t count, idist_dtype dtype) {
    idist__type_converters[idist__type_isa][dtype - IDIST_F16].narrow(dst, src, count);
}

//------------------------------------------------------------------------------
// [impl:reduce]  out = lo (op) hi, for all dtypes and ops
// uses type . used by call and the backends
//------------------------------------------------------------------------------

// `lo` comes from the lower ranks. Equal operands in equal order give equal bits on every processor, whichever instance of
// a kernel it runs and wherever an element lies in its buffer. out may be lo or hi: element i is read before it is
// written, and no other element depends on it, which is what IDIST__NO_ALIAS promises.
typedef void (*idist__reduce_fn)(void *out, const void *lo, const void *hi, size_t count);
typedef idist__reduce_fn idist__reduce_row[IDIST_OP_COUNT];

#define IDIST__KERNEL(name, isa, type, wide, expr)                                                                 \
    IDIST__VECTORIZE IDIST__ISA_##isa static void idist__##name##_##isa(void *out, const void *lo, const void *hi, \
                                                                        size_t count) {                            \
        idist__any_##type *o = (idist__any_##type *)out;                                                           \
        const idist__any_##type *a = (const idist__any_##type *)lo, *b = (const idist__any_##type *)hi;            \
        size_t i;                                                                                                  \
        IDIST__NO_ALIAS                                                                                            \
        for (i = 0; i < count; i++) {                                                                              \
            wide x = (wide)a[i], y = (wide)b[i];                                                                   \
            o[i] = (idist__any_##type)(expr);                                                                      \
        }                                                                                                          \
    }

// Sums and products wrap modulo 2^bits: computed unsigned, in a type that C does not promote to a signed one.
#define IDIST__KERNELS_INT(i, u, wide, isa)                       \
    IDIST__KERNEL(min_##i, isa, i, idist__any_##i, x < y ? x : y) \
    IDIST__KERNEL(max_##i, isa, i, idist__any_##i, x > y ? x : y) \
    IDIST__KERNEL(min_##u, isa, u, idist__any_##u, x < y ? x : y) \
    IDIST__KERNEL(max_##u, isa, u, idist__any_##u, x > y ? x : y) \
    IDIST__KERNEL(sum_##u, isa, u, wide, x + y)                   \
    IDIST__KERNEL(prod_##u, isa, u, wide, x *y)                   \
    IDIST__KERNEL(band_##u, isa, u, wide, x &y)                   \
    IDIST__KERNEL(bor_##u, isa, u, wide, x | y)                   \
    IDIST__KERNEL(bxor_##u, isa, u, wide, x ^ y)                  \
    IDIST__KERNEL(land_##u, isa, u, wide, (x && y) ? 1 : 0)       \
    IDIST__KERNEL(lor_##u, isa, u, wide, (x || y) ? 1 : 0)
// Of two NaNs a processor returns one, and a compiler may swap the operands: here x wins. x < y is false when either is NaN,
// so MIN and MAX let a NaN of either side through.
#define IDIST__KERNELS_FLOAT(f, wide, isa)                          \
    IDIST__KERNEL(sum_##f, isa, f, wide, x + (x != x ? x : y))      \
    IDIST__KERNEL(prod_##f, isa, f, wide, x *(x != x ? x : y))      \
    IDIST__KERNEL(min_##f, isa, f, wide, (x < y || x != x) ? x : y) \
    IDIST__KERNEL(max_##f, isa, f, wide, (x > y || x != x) ? x : y)

#define IDIST__ROW_INT(type, u, isa)                                                                           \
    {                                                                                                          \
        idist__sum_##u##_##isa, idist__prod_##u##_##isa, idist__min_##type##_##isa, idist__max_##type##_##isa, \
            idist__sum_##u##_##isa, idist__band_##u##_##isa, idist__bor_##u##_##isa, idist__bxor_##u##_##isa,  \
            idist__land_##u##_##isa, idist__lor_##u##_##isa                                                    \
    }
#define IDIST__ROW_FLOAT(f, isa)                                                                         \
    {                                                                                                    \
        idist__sum_##f##_##isa, idist__prod_##f##_##isa, idist__min_##f##_##isa, idist__max_##f##_##isa, \
            idist__sum_##f##_##isa, 0, 0, 0, 0, 0                                                        \
    }

// Above the first-level cache AVX-512 beats AVX2 only where AVX2 lacks an instruction: products, MIN and MAX of 64 bits. It
// has the floats too, for sums that never leave that cache; more instances would only make this header slower to compile.
#define IDIST__KERNELS_NARROW(isa)              \
    IDIST__KERNELS_INT(i8, u8, uint32_t, isa)   \
    IDIST__KERNELS_INT(i16, u16, uint32_t, isa) \
    IDIST__KERNELS_INT(i32, u32, uint32_t, isa)
#define IDIST__KERNELS_WIDE(isa)                \
    IDIST__KERNELS_INT(i64, u64, uint64_t, isa) \
    IDIST__KERNELS_FLOAT(f32, float, isa)       \
    IDIST__KERNELS_FLOAT(f64, double, isa)

IDIST__KERNELS_NARROW(base)
IDIST__KERNELS_WIDE(base)
#ifdef IDIST__X86
IDIST__KERNELS_NARROW(avx2)
IDIST__KERNELS_WIDE(avx2)
IDIST__KERNELS_WIDE(avx512)
#endif

#ifdef __clang__
#pragma clang diagnostic pop
#endif

// [isa][dtype][op]; AVG adds, the division comes at the end. Narrow floats are reduced as F32.
#define IDIST__REDUCE_TABLE(narrow, wide)                                                                         \
    {                                                                                                             \
        IDIST__ROW_INT(i8, u8, narrow), IDIST__ROW_INT(u8, u8, narrow), IDIST__ROW_INT(i16, u16, narrow),         \
            IDIST__ROW_INT(u16, u16, narrow), IDIST__ROW_INT(i32, u32, narrow), IDIST__ROW_INT(u32, u32, narrow), \
            IDIST__ROW_INT(i64, u64, wide), IDIST__ROW_INT(u64, u64, wide), IDIST__ROW_FLOAT(f32, wide),          \
            IDIST__ROW_FLOAT(f32, wide), IDIST__ROW_FLOAT(f32, wide), IDIST__ROW_FLOAT(f64, wide),                \
            IDIST__ROW_FLOAT(f32, wide), IDIST__ROW_FLOAT(f32, wide)                                              \
    }
static const idist__reduce_row idist__reduce_tables[][IDIST_DTYPE_COUNT] = {
    IDIST__REDUCE_TABLE(base, base),
#ifdef IDIST__X86
    IDIST__REDUCE_TABLE(avx2, avx2),
    IDIST__REDUCE_TABLE(avx2, avx512),
#endif
};

static const idist__reduce_row *idist__reduce_table = idist__reduce_tables[IDIST__BASE]; // [dtype][op] for this processor

static void idist__reduce_use(idist__isa isa) {
    idist__type_isa = isa;
    idist__reduce_table = idist__reduce_tables[isa];
}

// Before main, so that no thread can see it happen and no call has to look.
__attribute__((constructor)) static void idist__reduce_start(void) { idist__reduce_use(idist__type_best_isa()); }

// buf[i] = buf[i] / n: the end of AVG.
IDIST__VECTORIZE static void idist__reduce_divide(void *buf, size_t count, idist_dtype dtype, int n) {
    bool power = (n & (n - 1)) == 0; // then 1 / n is exact, and a product has the bits of the quotient
    size_t i;
    if (dtype == IDIST_F32 && power) {
        for (i = 0; i < count; i++) ((idist__any_f32 *)buf)[i] *= 1 / (float)n;
        return;
    }
    if (dtype == IDIST_F64 && power) {
        for (i = 0; i < count; i++) ((idist__any_f64 *)buf)[i] *= 1 / (double)n;
        return;
    }
    switch (dtype) {
#define IDIST__DIVIDE(id, type, cast)                                                                     \
    case id:                                                                                              \
        for (i = 0; i < count; i++)                                                                       \
            ((idist__any_##type *)buf)[i] = (idist__any_##type)(((idist__any_##type *)buf)[i] / (cast)n); \
        break;
        IDIST__DIVIDE(IDIST_I8, i8, int)
        IDIST__DIVIDE(IDIST_U8, u8, int)
        IDIST__DIVIDE(IDIST_I16, i16, int)
        IDIST__DIVIDE(IDIST_U16, u16, int)
        IDIST__DIVIDE(IDIST_I32, i32, int)
        IDIST__DIVIDE(IDIST_U32, u32, uint32_t)
        IDIST__DIVIDE(IDIST_I64, i64, int64_t)
        IDIST__DIVIDE(IDIST_U64, u64, uint64_t)
        IDIST__DIVIDE(IDIST_F32, f32, float)
        IDIST__DIVIDE(IDIST_F64, f64, double)
    default: break;
#undef IDIST__DIVIDE
    }
}

// What a reduction still needs when all is combined: the division of AVG; 0 or 1 for the logical ops, also when one
// rank alone contributed.
static void idist__reduce_finish(void *buf, size_t count, idist_dtype dtype, idist_op op, int n) {
    if (op == IDIST_AVG) idist__reduce_divide(buf, count, dtype, n);
    if ((op == IDIST_LAND || op == IDIST_LOR) && dtype < IDIST_F16)
        idist__reduce_table[(unsigned)dtype][IDIST_LAND](buf, buf, buf, count);
}

// Pieces of 4 KiB: what is between two operands stays in the first-level cache, memory sees each input once and out once.
// out is written by the last operand only, since it may be one of those not read yet.
__attribute__((noinline)) static void idist__reduce_pieces(void *out, const void *const *in, int n, size_t count,
                                                           idist_dtype dtype, idist_op op, int divide_by) {
    enum { PIECE = 4096 };
    // For any dtype. Vectors that straddle cache lines would cost a third of the speed.
    float sum[PIECE / sizeof(float)] __attribute__((aligned(64))), wide[PIECE / sizeof(float)] __attribute__((aligned(64)));
    bool narrow = idist__type_is_narrow(dtype);
    size_t size = idist_dtype_size(dtype), at, k;
    size_t piece = PIECE / (narrow ? sizeof(float) : size); // NOLINT(clang-analyzer-core.DivideZero)
    idist__reduce_fn fn = idist__reduce_table[(unsigned)dtype][(unsigned)op];
    int i;
    for (at = 0; at < count; at += k) {
        char *o = (char *)out + at * size;
        const void *lo = (const char *)in[0] + at * size;
        k = count - at < piece ? count - at : piece;
        if (narrow) idist__type_widen(sum, lo, k, dtype), lo = sum;
        for (i = 1; i < n; i++) {
            const void *hi = (const char *)in[i] + at * size;
            if (narrow) idist__type_widen(wide, hi, k, dtype), hi = wide;
            fn(narrow || i < n - 1 ? (void *)sum : o, lo, hi, k);
            lo = sum;
        }
        if (divide_by) idist__reduce_divide(narrow ? (void *)sum : o, k, narrow ? IDIST_F32 : dtype, divide_by);
        if (narrow) idist__type_narrow(o, sum, k, dtype);
    }
}

// out = in[0] (op) in[1] ... (op) in[n - 1] from left to right, then divided by `divide_by` unless that is 0. n >= 1. out
// may be any one of in[]; otherwise they do not overlap. Narrow floats are rounded once, at the end.
static void idist__reduce_many(void *out, const void *const *in, int n, size_t count, idist_dtype dtype, idist_op op,
                               int divide_by) {
    bool narrow = idist__type_is_narrow(dtype);
    if (n == 1 && (op == IDIST_LAND || op == IDIST_LOR)) { // 0 or 1, also when one rank alone contributes
        idist__reduce_table[(unsigned)dtype][(unsigned)op](out, in[0], in[0], count);
    } else if (n == 1 && !(narrow && divide_by)) {
        if (out != in[0] && count) memcpy(out, in[0], count * idist_dtype_size(dtype));
        if (divide_by) idist__reduce_divide(out, count, dtype, divide_by);
    } else if (n == 2 && !narrow && !divide_by) {
        idist__reduce_table[(unsigned)dtype][(unsigned)op](out, in[0], in[1], count);
    } else {
        idist__reduce_pieces(out, in, n, count, dtype, op, divide_by);
    }
}

// buf[i] = buf[i] * factor, of any floating dtype: the beginning of a premultiplied sum.
static void idist__reduce_scale(void *buf, size_t count, idist_dtype dtype, double factor) {
    float wide[256];
    size_t at, i, k;
    if (dtype == IDIST_F64)
        for (i = 0; i < count; i++) ((idist__any_f64 *)buf)[i] *= factor;
    if (dtype == IDIST_F32)
        for (i = 0; i < count; i++) ((idist__any_f32 *)buf)[i] = (float)(((idist__any_f32 *)buf)[i] * factor);
    for (at = 0; idist__type_is_narrow(dtype) && at < count; at += k) {
        char *p = (char *)buf + at * idist_dtype_size(dtype);
        k = count - at < IDIST__COUNT_OF(wide) ? count - at : IDIST__COUNT_OF(wide);
        idist__type_widen(wide, p, k, dtype);
        for (i = 0; i < k; i++) wide[i] = (float)(wide[i] * factor);
        idist__type_narrow(p, wide, k, dtype);
    }
}

idist_status idist_reduce_local(const void *in, void *inout, size_t count, idist_dtype dtype, idist_op op) {
    const void *operands[2];
    if (!idist_dtype_size(dtype)) return idist__fail(IDIST_ERR_ARG, "reduce_local: %d is no dtype", (int)dtype);
    if ((unsigned)op >= IDIST_OP_COUNT || op == IDIST_AVG)
        return idist__fail(IDIST_ERR_ARG, "reduce_local: op %s (%d) is not supported here", idist_op_name(op), (int)op);
    if (!idist__reduce_table[(unsigned)dtype][(unsigned)op])
        return idist__fail(IDIST_ERR_ARG, "reduce_local: %s takes integers only", idist_op_name(op));
    if (count && (!in || !inout)) return idist__fail(IDIST_ERR_ARG, "reduce_local: a buffer is NULL");
    operands[0] = in;
    operands[1] = inout;
    idist__reduce_many(inout, operands, 2, count, dtype, op, 0);
    return IDIST_OK;
}

#ifdef IDIST__FAST_MATH
#if defined(__clang__)
#pragma float_control(pop)
#elif defined(__GNUC__)
#pragma GCC pop_options
#pragma pop_macro("__NO_MATH_ERRNO__")
#pragma pop_macro("__NO_TRAPPING_MATH__")
#pragma pop_macro("__NO_SIGNED_ZEROS__")
#pragma pop_macro("__RECIPROCAL_MATH__")
#pragma pop_macro("__ASSOCIATIVE_MATH__")
#pragma pop_macro("__FINITE_MATH_ONLY__")
#pragma pop_macro("__FAST_MATH__")
#endif
#undef IDIST__FAST_MATH
#endif

//------------------------------------------------------------------------------
// [impl:sha]  SHA-256 (FIPS 180-4) and HMAC (RFC 2104)
// uses - . used by auth store launch
//------------------------------------------------------------------------------

typedef struct idist__sha {
    uint32_t h[8];
    uint64_t nbytes;
    uint8_t block[64];
} idist__sha;

static void idist__sha_block(idist__sha *s, const uint8_t *p) {
    static const uint32_t k[64] = {0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4,
                                   0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe,
                                   0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f,
                                   0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7,
                                   0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc,
                                   0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
                                   0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116,
                                   0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
                                   0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7,
                                   0xc67178f2};
    uint32_t w[64], v[8], t1, t2;
    int i;
#define IDIST__ROR(x, n) (((x) >> (n)) | ((x) << (32 - (n))))
    for (i = 0; i < 16; i++)
        w[i] = (uint32_t)p[4 * i] << 24 | (uint32_t)p[4 * i + 1] << 16 | (uint32_t)p[4 * i + 2] << 8 | p[4 * i + 3];
    for (i = 16; i < 64; i++)
        w[i] = w[i - 16] + w[i - 7] + (IDIST__ROR(w[i - 15], 7) ^ IDIST__ROR(w[i - 15], 18) ^ (w[i - 15] >> 3)) +
               (IDIST__ROR(w[i - 2], 17) ^ IDIST__ROR(w[i - 2], 19) ^ (w[i - 2] >> 10));
    memcpy(v, s->h, sizeof v);
    for (i = 0; i < 64; i++) {
        t1 = v[7] + (IDIST__ROR(v[4], 6) ^ IDIST__ROR(v[4], 11) ^ IDIST__ROR(v[4], 25)) + ((v[4] & v[5]) ^ (~v[4] & v[6])) +
             k[i] + w[i];
        t2 = (IDIST__ROR(v[0], 2) ^ IDIST__ROR(v[0], 13) ^ IDIST__ROR(v[0], 22)) +
             ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
        memmove(v + 1, v, 7 * sizeof v[0]);
        v[4] += t1;
        v[0] = t1 + t2;
    }
    for (i = 0; i < 8; i++) s->h[i] += v[i];
#undef IDIST__ROR
}

static void idist__sha_begin(idist__sha *s) {
    static const uint32_t h0[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                   0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memset(s, 0, sizeof *s);
    memcpy(s->h, h0, sizeof h0);
}

static void idist__sha_add(idist__sha *s, const void *data, size_t nbytes) {
    const uint8_t *p = (const uint8_t *)data;
    while (nbytes) {
        size_t at = (size_t)(s->nbytes & 63), k = 64 - at < nbytes ? 64 - at : nbytes;
        memcpy(s->block + at, p, k);
        s->nbytes += k;
        p += k;
        nbytes -= k;
        if ((s->nbytes & 63) == 0) idist__sha_block(s, s->block);
    }
}

static void idist__sha_end(idist__sha *s, uint8_t out[32]) {
    uint64_t nbits = s->nbytes * 8;
    uint8_t tail[8], pad = 0x80;
    int i;
    idist__sha_add(s, &pad, 1);
    pad = 0;
    while ((s->nbytes & 63) != 56) idist__sha_add(s, &pad, 1);
    for (i = 0; i < 8; i++) tail[i] = (uint8_t)(nbits >> (56 - 8 * i));
    idist__sha_add(s, tail, 8);
    for (i = 0; i < 32; i++) out[i] = (uint8_t)(s->h[i / 4] >> (24 - 8 * (i % 4)));
}

// out = HMAC-SHA256(key, label | a | b). Keys are 32 bytes here, so they are never hashed first.
static void idist__hmac(const uint8_t key[32], const char *label, const void *a, size_t na, const void *b, size_t nb,
                        uint8_t out[32]) {
    idist__sha s;
    uint8_t pad[64], inner[32];
    int i;
    for (i = 0; i < 64; i++) pad[i] = (uint8_t)((i < 32 ? key[i] : 0) ^ 0x36);
    idist__sha_begin(&s);
    idist__sha_add(&s, pad, 64);
    idist__sha_add(&s, label, strlen(label));
    idist__sha_add(&s, a, na);
    idist__sha_add(&s, b, nb);
    idist__sha_end(&s, inner);
    for (i = 0; i < 64; i++) pad[i] ^= 0x36 ^ 0x5c;
    idist__sha_begin(&s);
    idist__sha_add(&s, pad, 64);
    idist__sha_add(&s, inner, 32);
    idist__sha_end(&s, out);
}

// A well-mixed 64-bit number from two: splitmix64's finaliser. For ids, not for secrets.
static uint64_t idist__mix(uint64_t a, uint64_t b) {
    uint64_t x = a + b * 0x9e3779b97f4a7c15u + 0x632be59bd9b4e019u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static uint64_t idist__hash(const void *data, size_t nbytes) {
    const uint8_t *p = (const uint8_t *)data;
    uint64_t h = 0xcbf29ce484222325u; // FNV-1a
    size_t i;
    for (i = 0; i < nbytes; i++) h = (h ^ p[i]) * 0x100000001b3u;
    return idist__mix(h, nbytes);
}

//------------------------------------------------------------------------------
// [impl:sock]  stream sockets: addresses, listen, connect, and transfers with a deadline
// uses os err . used by auth store and the ring
//------------------------------------------------------------------------------

// An address is text: "unix:NAME" is a socket in the abstract namespace, which leaves no file behind and is seen inside
// one network namespace only, exactly as loopback TCP is; "tcp:HOST:PORT" has an IPv6 HOST in brackets.
typedef struct idist__addr {
    struct sockaddr_storage sa;
    socklen_t nbytes;
} idist__addr;

static bool idist__sock_host_is_loopback(const char *host) {
    return strcmp(host, "localhost") == 0 || strncmp(host, "127.", 4) == 0 || strcmp(host, "::1") == 0;
}

static bool idist__addr_is_loopback(const idist__addr *a) {
    if (a->sa.ss_family == AF_UNIX) return true;
    if (a->sa.ss_family == AF_INET) {
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)&a->sa;
        return (ntohl(v4->sin_addr.s_addr) >> 24) == 127;
    }
    return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)&a->sa)->sin6_addr) != 0;
}

static idist_status idist__addr_unix(idist__addr *a, const char *name) {
    struct sockaddr_un *un = (struct sockaddr_un *)&a->sa;
    size_t n = strlen(name);
    memset(a, 0, sizeof *a);
    if (!n || n > sizeof un->sun_path - 1)
        return idist__fail(IDIST_ERR_ARG, "socket name \"%s\" is empty or longer than %zu", name, sizeof un->sun_path - 1);
    un->sun_family = AF_UNIX;
    memcpy(un->sun_path + 1, name, n);
    a->nbytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n);
    return IDIST_OK;
}

static idist_status idist__addr_tcp(idist__addr *a, const char *host, int port) {
    struct addrinfo hints, *list = NULL;
    char service[16];
    int rc;
    memset(a, 0, sizeof *a);
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    snprintf(service, sizeof service, "%d", port);
    rc = getaddrinfo(host, service, &hints, &list);
    if (rc != 0 || !list)
        return idist__fail(IDIST_ERR_SYSTEM, "the host name \"%s\" cannot be resolved: %s", host, gai_strerror(rc));
    memcpy(&a->sa, list->ai_addr, list->ai_addrlen);
    a->nbytes = list->ai_addrlen;
    freeaddrinfo(list);
    return IDIST_OK;
}

// Numbers in a given text only; the whole text must be a number within the limits.
static bool idist__parse_int(const char *text, int64_t lo, int64_t hi, int64_t *value) {
    char *end = NULL;
    long long v;
    if (!text || !(text[0] == '-' || (text[0] >= '0' && text[0] <= '9'))) return false;
    errno = 0;
    v = strtoll(text, &end, 10);
    if (errno || !end || *end || v < lo || v > hi) return false;
    *value = v;
    return true;
}

// "host:port" or "[v6]:port".
static bool idist__parse_host_port(const char *text, char *host, size_t cap, int *port) {
    const char *colon = strrchr(text, ':');
    size_t n = colon ? (size_t)(colon - text) : 0;
    int64_t value;
    if (!colon || !idist__parse_int(colon + 1, 0, 65535, &value)) return false;
    if (n >= 2 && text[0] == '[' && text[n - 1] == ']') {
        text++;
        n -= 2;
    }
    if (!n || n >= cap) return false;
    memcpy(host, text, n);
    host[n] = 0;
    *port = (int)value;
    return true;
}

static idist_status idist__addr_parse(idist__addr *a, const char *text) {
    char host[256];
    int port;
    memset(a, 0, sizeof *a);
    if (strncmp(text, "unix:", 5) == 0) return idist__addr_unix(a, text + 5);
    if (strncmp(text, "tcp:", 4) == 0 && idist__parse_host_port(text + 4, host, sizeof host, &port))
        return idist__addr_tcp(a, host, port);
    return idist__fail(IDIST_ERR_ARG, "\"%s\" is no address", text);
}

// Text of an IP address, without the port.
static void idist__addr_host_text(const idist__addr *a, char *buf, size_t cap) {
    const void *ip = a->sa.ss_family == AF_INET ? (const void *)&((const struct sockaddr_in *)&a->sa)->sin_addr
                                                : (const void *)&((const struct sockaddr_in6 *)&a->sa)->sin6_addr;
    if (!inet_ntop(a->sa.ss_family, ip, buf, (socklen_t)cap)) idist__copy_text(buf, cap, "?");
}

static int idist__addr_port(const idist__addr *a) {
    if (a->sa.ss_family == AF_INET) return ntohs(((const struct sockaddr_in *)&a->sa)->sin_port);
    if (a->sa.ss_family == AF_INET6) return ntohs(((const struct sockaddr_in6 *)&a->sa)->sin6_port);
    return 0;
}

// Non-blocking, closed on exec; TCP without Nagle's delay.
static int idist__sock_open(int family) {
    int one = 1, fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0 && family != AF_UNIX) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

static idist_status idist__sock_listen(const idist__addr *a, const char *what, int *fd) {
    int one = 1, err;
    *fd = idist__sock_open(a->sa.ss_family);
    if (*fd < 0) return idist__fail_errno("socket", errno);
    if (a->sa.ss_family != AF_UNIX) setsockopt(*fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(*fd, (const struct sockaddr *)&a->sa, a->nbytes) == 0 && listen(*fd, 4096) == 0) return IDIST_OK;
    err = errno;
    idist__os_close(fd);
    if (err == EADDRINUSE)
        return idist__fail(IDIST_ERR_ADDR_IN_USE,
                           "%s is taken: another job or server runs there. Choose another MASTER_PORT, or end it", what);
    return idist__fail_errno(what, err);
}

// Whether the process at the other end of a local socket belongs to our user: abstract sockets have no permissions.
static bool idist__sock_same_user(int fd) {
    struct {
        pid_t pid;
        uid_t uid;
        gid_t gid;
    } cred;
    socklen_t n = sizeof cred;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &n) == 0 && cred.uid == geteuid();
}

// -1 and errno EAGAIN when nobody is waiting. Connections of other users are closed at once.
static int idist__sock_accept(int listener) {
    struct sockaddr_storage sa;
    socklen_t n = sizeof sa;
    int one = 1, fd = accept(listener, (struct sockaddr *)&sa, &n);
    if (fd < 0) return -1;
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    if (sa.ss_family != AF_UNIX) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (sa.ss_family != AF_UNIX || idist__sock_same_user(fd)) return fd;
    close(fd);
    errno = EAGAIN;
    return -1;
}

static bool idist__sock_wait(int fd, short events, int64_t deadline_ns);

// One attempt. errno says why not; the caller decides whether to try again. EPERM: another user listens there.
static int idist__sock_connect(const idist__addr *a, int64_t deadline_ns) {
    int fd = idist__sock_open(a->sa.ss_family), err = 0;
    socklen_t n = sizeof err;
    if (fd < 0) return -1;
    if (connect(fd, (const struct sockaddr *)&a->sa, a->nbytes) != 0) err = errno;
    if (err == EINPROGRESS || err == EINTR) {
        if (!idist__sock_wait(fd, POLLOUT, deadline_ns)) err = ETIMEDOUT;
        else if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &err, &n) != 0) err = errno;
    }
    if (!err && a->sa.ss_family == AF_UNIX && !idist__sock_same_user(fd)) err = EPERM;
    if (!err) return fd;
    close(fd);
    errno = err;
    return -1;
}

// Whether it is the network that is missing, and not the other side.
static bool idist__sock_cut_off(int err) {
    return err == ENETUNREACH || err == ENETDOWN || err == EHOSTUNREACH || err == EHOSTDOWN;
}

// Moves what is possible now. > 0: bytes; 0: would block; -1: end of stream (errno 0) or an error.
static ptrdiff_t idist__sock_read(int fd, void *buf, size_t nbytes) {
    for (;;) {
        ssize_t n = recv(fd, buf, nbytes, 0);
        if (n > 0) return n;
        if (n == 0) {
            errno = 0;
            return -1;
        }
        if (errno == EINTR) continue;
        return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -1;
    }
}

static ptrdiff_t idist__sock_write(int fd, const struct iovec *parts, int nparts) {
    struct msghdr m;
    memset(&m, 0, sizeof m);
    m.msg_iov = (struct iovec *)(uintptr_t)parts;
    m.msg_iovlen = (size_t)nparts;
    for (;;) {
        ssize_t n = sendmsg(fd, &m, MSG_NOSIGNAL);
        if (n >= 0) return n;
        if (errno == EINTR) continue;
        return errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS ? 0 : -1;
    }
}

// Whether the other side has ended, and everything that it wrote was read.
IDIST__UNUSED static bool idist__sock_at_end(int fd) {
    char c;
    ssize_t n;
    do n = recv(fd, &c, 1, MSG_PEEK | MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    return n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK);
}

static bool idist__sock_wait(int fd, short events, int64_t deadline_ns) {
    for (;;) {
        struct pollfd p;
        int rc;
        p.fd = fd;
        p.events = events;
        rc = poll(&p, 1, idist__os_ms_until(deadline_ns));
        if (rc > 0) return true;
        if (rc == 0 && idist__os_ms_until(deadline_ns) == 0) return false; // poll's own limit is shorter
        if (rc < 0 && errno != EINTR) return false;
    }
}

// The whole buffer or an error; errno ETIMEDOUT when the deadline passed, 0 at the end of the stream.
static bool idist__sock_read_all(int fd, void *buf, size_t nbytes, int64_t deadline_ns) {
    char *p = (char *)buf;
    while (nbytes) {
        ptrdiff_t n = idist__sock_read(fd, p, nbytes);
        if (n < 0) return false;
        if (n == 0 && !idist__sock_wait(fd, POLLIN, deadline_ns)) {
            errno = ETIMEDOUT;
            return false;
        }
        p += n;
        nbytes -= (size_t)n;
    }
    return true;
}

static bool idist__sock_write_all(int fd, const void *buf, size_t nbytes, int64_t deadline_ns) {
    const char *p = (const char *)buf;
    while (nbytes) {
        struct iovec part;
        ptrdiff_t n;
        part.iov_base = (void *)(uintptr_t)p;
        part.iov_len = nbytes;
        n = idist__sock_write(fd, &part, 1);
        if (n < 0) return false;
        if (n == 0 && !idist__sock_wait(fd, POLLOUT, deadline_ns)) {
            errno = ETIMEDOUT;
            return false;
        }
        p += n;
        nbytes -= (size_t)n;
    }
    return true;
}

//------------------------------------------------------------------------------
// [impl:auth]  who is there: a mutual handshake on every connection
// uses sha sock err . used by store and the ring
//
//   client                                     server
//     hello C (64 bytes, with a nonce)  ------>
//                          <------  hello S (64 bytes, with a nonce) | HMAC(K, "S" | C | S)
//     HMAC(K, "C" | C | S)              ------>
//                                       <------  one byte: you are in
//
// K comes from the job's secret. Different labels keep one side's answer from being thrown back at it, the nonces
// keep an old conversation from being replayed, and the tags cover version, role, rank and job, so that nothing in
// them can be changed on the way. A stranger makes the server read 96 bytes and allocate none. Nothing is encrypted.
// A hello that does not fit is answered all the same, so that the client can say what differs. A client whose connection
// ends before the last byte was turned away because all places were taken, and tries again; see idist__porch_place.
// Without a secret K is a constant: then this only keeps out other programs and other versions.
//------------------------------------------------------------------------------

#define IDIST__WIRE_VERSION 3
#define IDIST__HELLO_BYTES 64

typedef struct idist__hello {
    char magic[4]; // "IDST"
    uint16_t version;
    uint16_t min_version;
    uint32_t byte_order; // 0x01020304 as this machine writes it
    uint32_t role;
    uint64_t job;
    uint32_t rank;
    uint32_t world_size;
    uint64_t epoch;
    uint8_t nonce[16];
    uint8_t zero[8];
} idist__hello;

enum { IDIST__ROLE_STORE = 1, IDIST__ROLE_LINK = 2 };

typedef struct idist__handshake {
    int fd;
    bool server;
    int stage;   // client: write hello, read answer, write tag, read byte. server: the other side of each.
    size_t done; // bytes of this stage
    bool broke;  // the connection ended, or broke
    bool ready;  // poll has seen something there, or it is new
    const uint8_t *key;
    idist__hello mine, theirs;
    uint8_t out[96], in[96];
    int64_t deadline_ns;
} idist__handshake;

static void idist__auth_begin(idist__handshake *h, int fd, bool server, const uint8_t key[32], uint32_t role, uint64_t job,
                              int rank, int world_size, int64_t deadline_ns) {
    memset(h, 0, sizeof *h);
    h->fd = fd;
    h->server = server;
    h->key = key;
    h->deadline_ns = deadline_ns;
    memcpy(h->mine.magic, "IDST", 4);
    h->mine.version = h->mine.min_version = IDIST__WIRE_VERSION;
    h->mine.byte_order = 0x01020304;
    h->mine.role = role;
    h->mine.job = job;
    h->mine.rank = (uint32_t)rank;
    h->mine.world_size = (uint32_t)world_size;
    idist__os_random(h->mine.nonce, sizeof h->mine.nonce);
    memcpy(h->out, &h->mine, IDIST__HELLO_BYTES);
}

static void idist__auth_tag(const idist__handshake *h, const char *label, uint8_t tag[32]) {
    const idist__hello *c = h->server ? &h->theirs : &h->mine, *s = h->server ? &h->mine : &h->theirs;
    idist__hmac(h->key, label, c, IDIST__HELLO_BYTES, s, IDIST__HELLO_BYTES, tag);
}

static bool idist__auth_tag_is(const idist__handshake *h, const char *label, const uint8_t *theirs) {
    uint8_t want[32], diff = 0;
    int i;
    idist__auth_tag(h, label, want);
    for (i = 0; i < 32; i++) diff |= (uint8_t)(want[i] ^ theirs[i]); // no early exit: time tells nothing
    return diff == 0;
}

static bool idist__auth_other_order(const idist__handshake *h) {
    return memcmp(h->theirs.magic, "IDST", 4) == 0 && h->theirs.byte_order == 0x04030201;
}

static idist_status idist__auth_check_hello(const idist__handshake *h) {
    const idist__hello *t = &h->theirs;
    if (memcmp(t->magic, "IDST", 4) != 0) return idist__fail(IDIST_ERR_AUTH, "the other side does not speak idist");
    if (t->byte_order != h->mine.byte_order)
        return idist__fail(IDIST_ERR_UNSUPPORTED, "the other side has another byte order; mixed worlds are not supported");
    if (t->min_version > h->mine.version || t->version < h->mine.min_version)
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "the other side speaks version %u of the protocol, this one %u: build all "
                           "ranks from the same idist.h",
                           (unsigned)t->version, (unsigned)h->mine.version);
    if (t->role != h->mine.role || t->job != h->mine.job)
        return idist__fail(IDIST_ERR_AUTH, "the other side belongs to another job (or an earlier run of this one)");
    if (t->world_size != h->mine.world_size)
        return idist__fail(IDIST_ERR_ENV, "the other side says the world has %u ranks, this one %u", (unsigned)t->world_size,
                           (unsigned)h->mine.world_size);
    return IDIST_OK;
}

// Moves one stage as far as it goes. 1: stage complete, 0: would block, -1: failed.
static int idist__auth_move(idist__handshake *h, bool write, uint8_t *buf, size_t nbytes) {
    while (h->done < nbytes) {
        struct iovec part;
        ptrdiff_t n;
        part.iov_base = buf + h->done;
        part.iov_len = nbytes - h->done;
        n = write ? idist__sock_write(h->fd, &part, 1) : idist__sock_read(h->fd, part.iov_base, part.iov_len);
        if (n < 0) return -1;
        if (n == 0) return 0;
        h->done += (size_t)n;
        // A stranger is recognised by his first bytes.
        if (!write && h->server && h->stage == 0 && h->done >= 4 && memcmp(buf, "IDST", 4) != 0) h->done = nbytes;
    }
    h->done = 0;
    return 1;
}

static bool idist__auth_writes(const idist__handshake *h) { return (h->stage % 2 == 1) == h->server; }

// A stage is complete: checks what it has brought, prepares what comes next.
static idist_status idist__auth_next(idist__handshake *h) {
    h->stage++;
    if (h->server && h->stage == 1) {
        memcpy(&h->theirs, h->in, IDIST__HELLO_BYTES);
        if (memcmp(h->theirs.magic, "IDST", 4) != 0) return idist__auth_check_hello(h);
        idist__auth_tag(h, "S", h->out + 64);
    } else if (h->server && h->stage == 2) {
        return idist__auth_check_hello(h);
    } else if (h->server && h->stage == 3) {
        if (!idist__auth_tag_is(h, "C", h->in))
            return idist__fail(IDIST_ERR_AUTH, "the other side does not know the secret of this job");
        h->out[0] = 1;
    } else if (!h->server && h->stage == 2) {
        idist_status status;
        memcpy(&h->theirs, h->in, IDIST__HELLO_BYTES);
        status = idist__auth_check_hello(h);
        if (status != IDIST_OK) return status;
        if (!idist__auth_tag_is(h, "S", h->in + 64))
            return idist__fail(IDIST_ERR_AUTH, "the other side does not know the secret of this job");
        idist__auth_tag(h, "C", h->out);
    }
    return IDIST_OK;
}

// IDIST_OK with *done set when both sides are sure of each other. Does not block. h->broke: the connection ended.
static idist_status idist__auth_step(idist__handshake *h, bool *done) {
    static const size_t nbytes[4] = {64, 96, 32, 1};
    idist_status status = IDIST_OK;

    *done = false;
    while (h->stage < 4) {
        bool write = idist__auth_writes(h);
        int rc = idist__auth_move(h, write, write ? h->out : h->in, nbytes[h->stage]);
        if (rc == 0) return IDIST_OK;
        h->broke = rc < 0;
        if (rc < 0 && errno) return idist__fail(IDIST_ERR_PEER_LOST, "the handshake broke off: %s", strerror(errno));
        if (rc < 0)
            return idist__fail(IDIST_ERR_PEER_LOST,
                               "the other side closed the connection during the handshake: it ended, it had no room for "
                               "one more connection, or it does not speak idist");

        status = idist__auth_next(h);
        if (status != IDIST_OK) return status;
    }
    *done = true;
    return IDIST_OK;
}

// The whole handshake, blocking until the deadline in it.
static idist_status idist__auth_run(idist__handshake *h) {
    bool done = false;
    for (;;) {
        idist_status s = idist__auth_step(h, &done);
        if (s != IDIST_OK || done) return s;
        if (!idist__sock_wait(h->fd, idist__auth_writes(h) ? POLLOUT : POLLIN, h->deadline_ns))
            return idist__fail(IDIST_ERR_TIMEOUT, "the other side did not answer the handshake in time");
    }
}

typedef struct idist__secret {
    uint8_t bytes[256];
    size_t nbytes; // 0: none
    bool insecure; // IDIST_INSECURE: listen beyond this host all the same
} idist__secret;

// The key of a job from its secret; the constant one without.
static void idist__auth_key(const idist__secret *secret, uint8_t key[32]) {
    idist__sha s;
    idist__sha_begin(&s);
    idist__sha_add(&s, "idist v1", 8);
    idist__sha_add(&s, secret->bytes, secret->nbytes);
    idist__sha_end(&s, key);
}

// IDIST_SECRET_FILE must be a file that only its owner can read.
static idist_status idist__secret_from_file(idist__secret *secret, const char *path) {
    uint8_t text[sizeof secret->bytes + 1];
    struct stat st;
    ssize_t n = -1;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return idist__fail(IDIST_ERR_ENV, "IDIST_SECRET_FILE=%s cannot be read: %s", path, strerror(errno));
    if (fstat(fd, &st) != 0 || (st.st_mode & 077) || st.st_uid != geteuid()) {
        close(fd);
        return idist__fail(IDIST_ERR_ENV, "IDIST_SECRET_FILE=%s must be yours and readable by nobody else (chmod 600)",
                           path);
    }
    do n = read(fd, text, sizeof text);
    while (n < 0 && errno == EINTR);
    close(fd);
    if (n < 16 || n > (ssize_t)sizeof secret->bytes)
        return idist__fail(IDIST_ERR_ENV, "IDIST_SECRET_FILE=%s must hold 16 to %zu bytes", path, sizeof secret->bytes);
    memcpy(secret->bytes, text, (size_t)n);
    secret->nbytes = (size_t)n;
    return IDIST_OK;
}

// The secret of a desc, else that of the environment, else none.
static idist_status idist__secret_find(idist__secret *secret, const void *field, size_t nbytes) {
    const char *text = idist__os_env("IDIST_SECRET"), *file = idist__os_env("IDIST_SECRET_FILE");
    const char *insecure = idist__os_env("IDIST_INSECURE");
    memset(secret, 0, sizeof *secret);
    secret->insecure = insecure && strcmp(insecure, "0") != 0;
    if (field || nbytes) {
        if (!field || nbytes < 16 || nbytes > sizeof secret->bytes)
            return idist__fail(IDIST_ERR_ARG, "a secret needs a pointer and 16 to %zu bytes", sizeof secret->bytes);
        text = (const char *)field;
    } else if (file) {
        return idist__secret_from_file(secret, file);
    } else if (text) {
        nbytes = strlen(text);
        if (nbytes < 16 || nbytes > sizeof secret->bytes)
            return idist__fail(IDIST_ERR_ENV, "IDIST_SECRET has %zu bytes; 16 to %zu are needed", nbytes,
                               sizeof secret->bytes);
    }
    if (nbytes) memcpy(secret->bytes, text, nbytes);
    secret->nbytes = nbytes;
    return IDIST_OK;
}

// Where strangers wait until their handshake is through: a fixed number of places, so that nobody makes us allocate.
// When all are taken, newcomers stay in the listener's queue until a connection may be evicted: the oldest that has sent
// nothing for 50 ms; failing that, the oldest handshake that is more than a second old. An honest client that is evicted
// because it got no processor time tries again.
enum { IDIST__PORCH = 256, IDIST__PORCH_MS = 5000, IDIST__PORCH_SILENT_MS = 50, IDIST__PORCH_SLOW_MS = 1000 };

typedef struct idist__porch {
    idist__handshake place[IDIST__PORCH]; // fd -1: free
} idist__porch;

static void idist__porch_init(idist__porch *p) {
    int i;
    memset(p, 0, sizeof *p);
    for (i = 0; i < IDIST__PORCH; i++) p->place[i].fd = -1;
}

static void idist__porch_close(idist__porch *p) {
    int i;
    for (i = 0; i < IDIST__PORCH; i++) idist__os_close(&p->place[i].fd);
}

// The stranger who may be sent away first, or NULL: nobody may.
static idist__handshake *idist__porch_oldest(idist__porch *p) {
    int64_t now = idist__os_now_ns();
    idist__handshake *silent = NULL, *slow = NULL;
    int i;

    for (i = 0; i < IDIST__PORCH; i++) {
        idist__handshake *h = &p->place[i];
        idist__handshake **oldest = h->stage || h->done ? &slow : &silent;
        if (h->fd < 0) continue;
        if (now >= h->deadline_ns) return h;
        if (!*oldest || h->deadline_ns < (*oldest)->deadline_ns) *oldest = h;
    }
    if (silent && now >= silent->deadline_ns - (IDIST__PORCH_MS - IDIST__PORCH_SILENT_MS) * IDIST__MS) return silent;
    if (slow && now >= slow->deadline_ns - (IDIST__PORCH_MS - IDIST__PORCH_SLOW_MS) * IDIST__MS) return slow;
    return NULL;
}

// The place for a newcomer: a free one, else that of the stranger who may be sent away, which the caller does by closing
// his connection when the newcomer is there. NULL: there is none now.
static idist__handshake *idist__porch_place(idist__porch *p) {
    int i;
    for (i = 0; i < IDIST__PORCH; i++)
        if (p->place[i].fd < 0) return &p->place[i];
    return idist__porch_oldest(p);
}

// Descriptors are short: sends a stranger away if one may be. False: there are none, so we need more descriptors ourselves.
static bool idist__porch_make_way(idist__porch *p) {
    idist__handshake *h = idist__porch_oldest(p);
    int i;

    if (h) idist__os_close(&h->fd);
    for (i = 0; !h && i < IDIST__PORCH; i++)
        if (p->place[i].fd >= 0) h = &p->place[i];
    return h != NULL;
}

// What poll should look at; returns how many.
static int idist__porch_poll(const idist__porch *p, struct pollfd *fds) {
    int i, n = 0;
    for (i = 0; i < IDIST__PORCH; i++) {
        if (p->place[i].fd < 0) continue;
        fds[n].fd = p->place[i].fd;
        fds[n++].events = idist__auth_writes(&p->place[i]) ? POLLOUT : POLLIN;
    }
    return n;
}

// What poll has seen there. The places are those of idist__porch_poll.
static void idist__porch_polled(idist__porch *p, const struct pollfd *fds) {
    int i, n = 0;
    for (i = 0; i < IDIST__PORCH; i++) {
        if (p->place[i].fd < 0) continue;
        p->place[i].ready = fds[n++].revents != 0;
    }
}

//------------------------------------------------------------------------------
// [impl:store]  rendezvous: a key-value table in memory, in a file, or behind a socket
// uses os err mem sock auth . used by world
//
// Every call of the public API fills one idist__req and gives it to the store's `run`. The table itself, and what each
// request does to it, is written once (idist__table_apply) and serves all three kinds.
//------------------------------------------------------------------------------

enum { // the numbers of torch's TCPStore, which is what travels over the wire
    IDIST__REQ_VALIDATE = 0,
    IDIST__REQ_SET = 1,
    IDIST__REQ_COMPARE_SET = 2,
    IDIST__REQ_GET = 3,
    IDIST__REQ_ADD = 4,
    IDIST__REQ_CHECK = 5,
    IDIST__REQ_WAIT = 6,
    IDIST__REQ_NUM_KEYS = 7,
    IDIST__REQ_DELETE = 8,
    IDIST__REQ_CANCEL_WAIT = 12,
    IDIST__REQ_WILL = 100 // not torch's: set this key when my connection ends
};

#define IDIST__KEY_MAX 1024u
#define IDIST__VALUE_MAX (8u << 20)
#define IDIST__KEYS_MAX 65536u
// The length in an answer to a GET whose key is not there (any more), and the answer to an ADD that
// found text; torch's protocol has no word for it.
static const uint64_t IDIST__NO_VALUE = UINT64_MAX;
static const int64_t IDIST__NOT_A_NUMBER = INT64_MIN;

typedef struct idist__blob { // bytes with a length, not owned
    const char *data;
    size_t nbytes;
} idist__blob;

typedef struct idist__req {
    int op;
    idist__blob key;
    idist__blob a, b;        // SET: value; COMPARE_SET: expected, desired
    int64_t number;          // ADD: delta in, new value out; NUM_KEYS: out
    const idist__blob *keys; // CHECK, WAIT
    size_t nkeys;
    void *value; // GET, COMPARE_SET: where the value goes
    size_t capacity;
    size_t nbytes; // its size
    bool flag;     // CHECK: all there; DELETE: was there
    int64_t deadline_ns;
} idist__req;

typedef struct idist__entry {
    struct idist__entry *next;
    char *key, *value;
    size_t nkey, nvalue;
} idist__entry;

typedef struct idist__table {
    idist_allocator mem;
    idist__entry *bucket[256];
    size_t count;
} idist__table;

struct idist_store {
    idist_status (*run)(idist_store *store, idist__req *req);
    void (*close)(idist_store *store);
    idist_allocator mem;
    int timeout_ms;
    int port;
    void *impl;
};

static idist__entry **idist__table_find(idist__table *t, const char *key, size_t nkey) {
    idist__entry **e = &t->bucket[idist__hash(key, nkey) & 255];
    while (*e && ((*e)->nkey != nkey || memcmp((*e)->key, key, nkey) != 0)) e = &(*e)->next;
    return e;
}

static idist_status idist__table_put(idist__table *t, idist__blob key, const void *value, size_t nbytes) {
    idist__entry **at = idist__table_find(t, key.data, key.nbytes), *e = *at;
    char *copy = (char *)idist__mem_alloc(&t->mem, nbytes);
    if (!copy) return IDIST_ERR_NO_MEMORY;
    if (nbytes) memcpy(copy, value, nbytes);
    if (!e) {
        e = (idist__entry *)idist__mem_alloc(&t->mem, sizeof *e + key.nbytes);
        if (!e) {
            idist__mem_free(&t->mem, copy);
            return IDIST_ERR_NO_MEMORY;
        }
        e->key = (char *)(e + 1);
        e->nkey = key.nbytes;
        memcpy(e->key, key.data, key.nbytes);
        *at = e;
        t->count++;
    }
    idist__mem_free(&t->mem, e->value);
    e->value = copy;
    e->nvalue = nbytes;
    return IDIST_OK;
}

static bool idist__table_remove(idist__table *t, idist__blob key) {
    idist__entry **at = idist__table_find(t, key.data, key.nbytes), *e = *at;
    if (!e) return false;
    *at = e->next;
    t->count--;
    idist__mem_free(&t->mem, e->value);
    idist__mem_free(&t->mem, e);
    return true;
}

static void idist__table_clear(idist__table *t) {
    size_t i;
    for (i = 0; i < IDIST__COUNT_OF(t->bucket); i++)
        while (t->bucket[i]) {
            idist__blob key;
            key.data = t->bucket[i]->key;
            key.nbytes = t->bucket[i]->nkey;
            idist__table_remove(t, key);
        }
}

static bool idist__table_has_all(idist__table *t, const idist__req *r) {
    size_t i;
    for (i = 0; i < r->nkeys; i++)
        if (!*idist__table_find(t, r->keys[i].data, r->keys[i].nbytes)) return false;
    return true;
}

static idist_status idist__table_add(idist__table *t, idist__req *r) {
    idist__entry *e = *idist__table_find(t, r->key.data, r->key.nbytes);
    char text[32];
    int64_t old = 0;
    if (e) {
        bool number = e->nvalue < sizeof text;
        if (number) {
            memcpy(text, e->value, e->nvalue);
            text[e->nvalue] = 0;
            number = idist__parse_int(text, INT64_MIN, INT64_MAX, &old);
        }
        if (!number) return idist__fail(IDIST_ERR_ARG, "store: add to a key whose value is no number");
    }
    r->number = (int64_t)((uint64_t)old + (uint64_t)r->number);
    snprintf(text, sizeof text, "%lld", (long long)r->number);
    return idist__table_put(t, r->key, text, strlen(text));
}

// Gives a value to the caller; IDIST_ERR_TRUNCATED when it does not fit.
static idist_status idist__req_give(idist__req *r, const void *value, size_t nbytes) {
    r->nbytes = nbytes;
    if (nbytes > r->capacity)
        return idist__fail(IDIST_ERR_TRUNCATED, "store: the value has %zu bytes, the buffer %zu", nbytes, r->capacity);
    if (nbytes) memcpy(r->value, value, nbytes);
    return IDIST_OK;
}

// Carries a request out. *wait is set when it has to be tried again after the table changed; *changed when it did
// change the table (then r->key holds what idist__table_find finds).
static idist_status idist__table_apply(idist__table *t, idist__req *r, bool *wait, bool *changed) {
    idist__entry *e;
    idist_status s;
    *wait = *changed = false;
    switch (r->op) {
    case IDIST__REQ_SET: *changed = true; return idist__table_put(t, r->key, r->a.data, r->a.nbytes);
    case IDIST__REQ_COMPARE_SET:
        e = *idist__table_find(t, r->key.data, r->key.nbytes);
        if ((e ? e->nvalue : 0) == r->a.nbytes && (!r->a.nbytes || memcmp(e->value, r->a.data, r->a.nbytes) == 0)) {
            if ((s = idist__table_put(t, r->key, r->b.data, r->b.nbytes)) != IDIST_OK) return s;
            *changed = true;
            return idist__req_give(r, r->b.data, r->b.nbytes);
        }
        return idist__req_give(r, e ? e->value : NULL, e ? e->nvalue : 0);
    case IDIST__REQ_GET:
        e = *idist__table_find(t, r->key.data, r->key.nbytes);
        *wait = !e;
        return e ? idist__req_give(r, e->value, e->nvalue) : IDIST_OK;
    case IDIST__REQ_ADD:
        s = idist__table_add(t, r);
        *changed = s == IDIST_OK;
        return s;
    case IDIST__REQ_CHECK: r->flag = idist__table_has_all(t, r); return IDIST_OK;
    case IDIST__REQ_WAIT: *wait = !idist__table_has_all(t, r); return IDIST_OK;
    case IDIST__REQ_NUM_KEYS: r->number = (int64_t)t->count; return IDIST_OK;
    case IDIST__REQ_DELETE: *changed = r->flag = idist__table_remove(t, r->key); return IDIST_OK;
    default: return idist__fail(IDIST_ERR_ARG, "store: unknown request %d", r->op);
    }
}

// Which keys a waiting request lacks, for the time-out's text.
static idist_status idist__req_late(const idist__req *r, idist__table *t) {
    const idist__blob *missing = r->nkeys ? &r->keys[0] : &r->key;
    size_t i;
    for (i = 0; t && i < r->nkeys; i++)
        if (!*idist__table_find(t, r->keys[i].data, r->keys[i].nbytes)) {
            missing = &r->keys[i];
            break;
        }
    return idist__fail(IDIST_ERR_TIMEOUT, "store: the key \"%.*s\" did not appear in time", (int)missing->nbytes,
                       missing->data);
}

// ---- in this process ----

typedef struct idist__mem_store {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    idist__table table;
} idist__mem_store;

static idist_status idist__mem_store_run(idist_store *store, idist__req *r) {
    idist__mem_store *m = (idist__mem_store *)store->impl;
    bool wait, changed;
    idist_status s;
    pthread_mutex_lock(&m->lock);
    for (;;) {
        s = idist__table_apply(&m->table, r, &wait, &changed);
        if (changed) pthread_cond_broadcast(&m->changed);
        if (!wait) break;
        if (idist__os_ms_until(r->deadline_ns) == 0) {
            s = idist__req_late(r, &m->table);
            break;
        }
        idist__os_cond_wait(&m->changed, &m->lock, r->deadline_ns);
    }
    pthread_mutex_unlock(&m->lock);
    return s;
}

static void idist__mem_store_close(idist_store *store) {
    idist__mem_store *m = (idist__mem_store *)store->impl;
    idist__table_clear(&m->table);
    pthread_cond_destroy(&m->changed);
    pthread_mutex_destroy(&m->lock);
    idist__mem_free(&store->mem, m);
}

static idist_status idist__mem_store_open(idist_store *store) {
    idist__mem_store *m = (idist__mem_store *)idist__mem_alloc(&store->mem, sizeof *m);
    if (!m) return IDIST_ERR_NO_MEMORY;
    m->table.mem = store->mem;
    pthread_mutex_init(&m->lock, NULL);
    idist__os_cond_init(&m->changed);
    store->impl = m;
    store->run = idist__mem_store_run;
    store->close = idist__mem_store_close;
    return IDIST_OK;
}

// ---- in a file ----
//
//   0   "IDSTORE1"
//   8   number of committed bytes after the header (u64)
//   16  records: u32 nkey, u32 nvalue (0xffffffff: deleted), key, value
//
// A key that begins with a zero byte is a will: the place of a byte (u64) that its maker keeps locked; its value is what is
// to be set when that lock is gone: u32 nkey, key, value. Any process that waits carries it out.
//
// Byte 0 of the file stays locked by the server as long as it lives: a file without that lock was left by a dead job.
// Byte 1 is locked by whoever reads or appends. The locks belong to the open file (F_OFD_*), not to the process, so
// threads may be ranks. A writer that dies halfway leaves bytes beyond the committed ones, which the next writer
// overwrites.

enum { IDIST__OFD_GETLK = 36, IDIST__OFD_SETLK = 37, IDIST__OFD_SETLKW = 38 }; // names that strict modes hide

typedef struct idist__file_store {
    pthread_mutex_t lock;
    int fd;
    bool server;
    char *path;
    idist__table table; // what the records read so far amount to
    idist__table wills; // the same, of wills
    uint64_t applied;   // bytes of records in both
    uint64_t will_at;   // the byte that is locked for our own will; 0: none
    int64_t looked_ns;  // when the makers of the wills were last looked for
} idist__file_store;

enum { IDIST__WILL_KEY_BYTES = 9, IDIST__WILLS_MS = 50 };

static int idist__file_lock(int fd, int cmd, short type, off_t byte, struct flock *fl) {
    memset(fl, 0, sizeof *fl);
    fl->l_type = type;
    fl->l_whence = SEEK_SET;
    fl->l_start = byte;
    fl->l_len = 1;
    return fcntl(fd, cmd, fl);
}

// Takes or gives back the lock of the records. Holders keep it for microseconds, unless they are stopped; a dead
// holder's lock is gone.
static bool idist__file_records(int fd, bool take, int64_t deadline_ns) {
    struct flock fl;
    for (;;) {
        if (idist__file_lock(fd, IDIST__OFD_SETLK, take ? F_WRLCK : F_UNLCK, 1, &fl) == 0) return true;
        if (errno == EINTR) continue;
        if ((errno != EAGAIN && errno != EACCES) || idist__os_ms_until(deadline_ns) == 0) return false;
        idist__os_pause_ms(1);
    }
}

static idist_status idist__file_late(const idist__file_store *f) {
    return idist__fail(IDIST_ERR_TIMEOUT,
                       "store: %s stays locked: a process that uses it is stopped, or the file system cannot lock", f->path);
}

static bool idist__file_server_lives(int fd) {
    struct flock fl;
    return idist__file_lock(fd, IDIST__OFD_GETLK, F_WRLCK, 0, &fl) == 0 && fl.l_type != F_UNLCK;
}

// Reads into `to`, or else writes what is at `from`.
static bool idist__file_move(int fd, char *to, const char *from, size_t nbytes, uint64_t at) {
    size_t done = 0;
    while (done < nbytes) {
        off_t place = (off_t)(at + done);
        ssize_t n = to ? pread(fd, to + done, nbytes - done, place) : pwrite(fd, from + done, nbytes - done, place);
        if (n <= 0 && !(n < 0 && errno == EINTR)) return false;
        if (n > 0) done += (size_t)n;
    }
    return true;
}

static bool idist__file_pread(int fd, void *buf, size_t nbytes, uint64_t at) {
    return idist__file_move(fd, (char *)buf, NULL, nbytes, at);
}

static bool idist__file_pwrite(int fd, const void *buf, size_t nbytes, uint64_t at) {
    return idist__file_move(fd, NULL, (const char *)buf, nbytes, at);
}

static idist__table *idist__file_table(idist__file_store *f, idist__blob key) {
    bool will = key.nbytes == IDIST__WILL_KEY_BYTES && !key.data[0];
    return will ? &f->wills : &f->table;
}

static void idist__file_forget(idist__file_store *f) {
    idist__table_clear(&f->table);
    idist__table_clear(&f->wills);
    f->applied = 0;
}

// Brings the tables up to date. Called with the records locked.
static idist_status idist__file_replay(idist__file_store *f) {
    char magic[8];
    uint64_t committed;
    if (!idist__file_pread(f->fd, magic, 8, 0) || memcmp(magic, "IDSTORE1", 8) != 0 ||
        !idist__file_pread(f->fd, &committed, 8, 8))
        return idist__fail(IDIST_ERR_ARG, "store: %s is no store file", f->path);
    while (f->applied < committed) {
        uint32_t size[2];
        idist__blob key;
        size_t nvalue;
        char *buf;
        idist_status s = IDIST_OK;
        if (!idist__file_pread(f->fd, size, 8, 16 + f->applied)) return idist__fail_errno("reading the store file", errno);
        nvalue = size[1] == 0xffffffffu ? 0 : size[1];
        if (size[0] > IDIST__KEY_MAX + 1 || nvalue > IDIST__VALUE_MAX)
            return idist__fail(IDIST_ERR_ARG, "store: %s is damaged", f->path);
        buf = (char *)idist__mem_alloc(&f->table.mem, size[0] + nvalue);
        if (!buf) return IDIST_ERR_NO_MEMORY;
        key.data = buf;
        key.nbytes = size[0];
        if (!idist__file_pread(f->fd, buf, size[0] + nvalue, 24 + f->applied))
            s = idist__fail_errno("reading the store file", errno);
        else if (size[1] == 0xffffffffu) idist__table_remove(idist__file_table(f, key), key);
        else s = idist__table_put(idist__file_table(f, key), key, buf + size[0], nvalue);
        idist__mem_free(&f->table.mem, buf);
        if (s != IDIST_OK) return s;
        f->applied += 8 + size[0] + nvalue;
    }
    return IDIST_OK;
}

// Appends what a request did to its key.
static idist_status idist__file_append(idist__file_store *f, idist__blob key) {
    idist__entry *e = *idist__table_find(idist__file_table(f, key), key.data, key.nbytes);
    uint32_t size[2];
    uint64_t at = 16 + f->applied, committed;
    size[0] = (uint32_t)key.nbytes;
    size[1] = e ? (uint32_t)e->nvalue : 0xffffffffu;
    committed = f->applied + 8 + key.nbytes + (e ? e->nvalue : 0);
    if (!idist__file_pwrite(f->fd, size, 8, at) || !idist__file_pwrite(f->fd, key.data, key.nbytes, at + 8) ||
        (e && !idist__file_pwrite(f->fd, e->value, e->nvalue, at + 8 + key.nbytes)) ||
        !idist__file_pwrite(f->fd, &committed, 8, 8))
        return idist__fail_errno("writing the store file", errno);
    f->applied = committed;
    return IDIST_OK;
}

// The key of the will whose maker locks the byte `at`.
static idist__blob idist__will_key(uint64_t at, char *buf) {
    idist__blob key;

    buf[0] = 0;
    memcpy(buf + 1, &at, sizeof at);
    key.data = buf;
    key.nbytes = IDIST__WILL_KEY_BYTES;
    return key;
}

// Takes our will back, if there is one.
static idist_status idist__file_revoke(idist__file_store *f) {
    char buf[IDIST__WILL_KEY_BYTES];
    idist__blob key = idist__will_key(f->will_at, buf);
    idist_status status = IDIST_OK;
    struct flock fl;

    if (!f->will_at) return IDIST_OK;
    if (idist__table_remove(&f->wills, key)) status = idist__file_append(f, key);
    idist__file_lock(f->fd, IDIST__OFD_SETLK, F_UNLCK, (off_t)f->will_at, &fl);
    f->will_at = 0;
    return status;
}

// The place of its record, which nobody else has, names the byte to be locked. An empty key only takes the old will back.
static idist_status idist__file_bequeath(idist__file_store *f, const idist__req *r) {
    char buf[IDIST__WILL_KEY_BYTES];
    uint32_t nkey = (uint32_t)r->key.nbytes;
    size_t nbytes = sizeof nkey + r->key.nbytes + r->a.nbytes;
    idist_status status = idist__file_revoke(f);
    idist__blob key;
    struct flock fl;
    char *value;

    if (status != IDIST_OK || !nkey) return status;
    value = (char *)idist__mem_alloc(&f->table.mem, nbytes);
    if (!value) return IDIST_ERR_NO_MEMORY;
    memcpy(value, &nkey, sizeof nkey);
    memcpy(value + sizeof nkey, r->key.data, nkey);
    memcpy(value + sizeof nkey + nkey, r->a.data, r->a.nbytes);

    f->will_at = 16 + f->applied;
    key = idist__will_key(f->will_at, buf);
    if (idist__file_lock(f->fd, IDIST__OFD_SETLK, F_WRLCK, (off_t)f->will_at, &fl) != 0)
        status = idist__fail_errno("locking the store file", errno);
    else status = idist__table_put(&f->wills, key, value, nbytes);
    if (status == IDIST_OK) status = idist__file_append(f, key);
    idist__mem_free(&f->table.mem, value);
    return status;
}

// Sets what the maker of a will wanted to be set.
static idist_status idist__file_execute(idist__file_store *f, const idist__entry *will) {
    char buf[IDIST__WILL_KEY_BYTES];
    idist__blob key, will_key = {buf, IDIST__WILL_KEY_BYTES};
    uint32_t nkey;
    idist_status status;

    memcpy(buf, will->key, sizeof buf);
    memcpy(&nkey, will->value, sizeof nkey);
    key.data = will->value + sizeof nkey;
    key.nbytes = nkey;
    status = idist__table_put(&f->table, key, key.data + nkey, will->nvalue - sizeof nkey - nkey);
    if (status == IDIST_OK) status = idist__file_append(f, key);
    idist__table_remove(&f->wills, will_key);
    if (status == IDIST_OK) status = idist__file_append(f, will_key);
    return status;
}

// Whether the process that made a will has ended without taking it back.
static bool idist__file_will_is_due(const idist__file_store *f, const idist__entry *will) {
    uint64_t at;
    uint32_t nkey = 0;
    struct flock fl;

    memcpy(&at, will->key + 1, sizeof at);
    if (will->nvalue >= sizeof nkey) memcpy(&nkey, will->value, sizeof nkey);
    if (at == f->will_at || !nkey || nkey > will->nvalue - sizeof nkey) return false;
    return idist__file_lock(f->fd, IDIST__OFD_GETLK, F_WRLCK, (off_t)at, &fl) == 0 && fl.l_type == F_UNLCK;
}

// Carries out the wills of processes that ended. Called with the records locked.
static idist_status idist__file_wills(idist__file_store *f) {
    int64_t now = idist__os_now_ns();
    idist_status status = IDIST_OK;
    size_t i;

    if (!f->wills.count || now - f->looked_ns < IDIST__WILLS_MS * IDIST__MS) return IDIST_OK;
    f->looked_ns = now;
    for (i = 0; i < IDIST__COUNT_OF(f->wills.bucket); i++) {
        idist__entry *e, *next;
        for (e = f->wills.bucket[i]; e && status == IDIST_OK; e = next) {
            next = e->next;
            if (idist__file_will_is_due(f, e)) status = idist__file_execute(f, e);
        }
    }
    return status;
}

// Carries out a request. Called with the records locked.
static idist_status idist__file_apply(idist__file_store *f, idist__req *r, bool *wait, bool *changed) {
    idist_status status = idist__file_replay(f);

    if (status == IDIST_OK) status = idist__file_wills(f);
    if (status != IDIST_OK) return status;
    if (r->op == IDIST__REQ_WILL) return idist__file_bequeath(f, r);
    status = idist__table_apply(&f->table, r, wait, changed);
    return *changed ? idist__file_append(f, r->key) : status;
}

static idist_status idist__file_request(idist__file_store *f, idist__req *r, bool *wait) {
    bool changed = false;
    idist_status s;

    if (!idist__file_records(f->fd, true, r->deadline_ns)) return idist__file_late(f);
    s = idist__file_apply(f, r, wait, &changed);
    if (s != IDIST_OK) idist__file_forget(f); // the tables may be ahead of the file: read it anew
    idist__file_records(f->fd, false, r->deadline_ns);

    if (s == IDIST_OK && (*wait || changed || r->op == IDIST__REQ_CHECK) && !f->server && !idist__file_server_lives(f->fd))
        s = idist__fail(IDIST_ERR_PEER_LOST, "store: the process that owns %s ended", f->path);
    if (s == IDIST_OK && *wait && idist__os_ms_until(r->deadline_ns) == 0) s = idist__req_late(r, &f->table);
    return s;
}

static idist_status idist__file_store_run(idist_store *store, idist__req *r) {
    idist__file_store *f = (idist__file_store *)store->impl;
    int pause_ms = 1;
    for (;;) {
        bool wait = false;
        idist_status s;
        pthread_mutex_lock(&f->lock);
        s = idist__file_request(f, r, &wait);
        pthread_mutex_unlock(&f->lock);
        if (s != IDIST_OK || !wait) return s;
        idist__os_pause_ms(pause_ms);
        if (pause_ms < 16) pause_ms *= 2;
    }
}

static bool idist__file_is_at(int fd, const char *path);

static void idist__file_store_close(idist_store *store) {
    idist__file_store *f = (idist__file_store *)store->impl;
    if (f->server && f->fd >= 0 && idist__file_is_at(f->fd, f->path)) unlink(f->path);
    idist__os_close(&f->fd);
    idist__file_forget(f);
    pthread_mutex_destroy(&f->lock);
    idist__mem_free(&store->mem, f->path);
    idist__mem_free(&store->mem, f);
}

// Whether a file may be emptied: it is empty, or a store's.
static bool idist__file_is_store(int fd) {
    struct stat st;
    char magic[8];
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) return false;
    return st.st_size == 0 || (idist__file_pread(fd, magic, 8, 0) && memcmp(magic, "IDSTORE1", 8) == 0);
}

// Whether the path still leads to the open file: a server that ends removes its file, perhaps between our open and
// our lock.
static bool idist__file_is_at(int fd, const char *path) {
    struct stat a, b;
    return fstat(fd, &a) == 0 && stat(path, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

// The server makes the file its own: an empty table under the lock of the living.
static idist_status idist__file_claim(idist__file_store *f, int64_t deadline_ns) {
    struct flock fl;
    uint64_t zero = 0;
    idist_status s = IDIST_OK;
    for (;;) {
        f->fd = open(f->path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (f->fd < 0) return idist__fail(IDIST_ERR_SYSTEM, "store: %s cannot be opened: %s", f->path, strerror(errno));
        if (!idist__file_records(f->fd, true, deadline_ns)) return idist__file_late(f);
        if (idist__file_is_at(f->fd, f->path)) break;
        idist__os_close(&f->fd);
    }
    if (idist__file_lock(f->fd, IDIST__OFD_SETLK, F_WRLCK, 0, &fl) != 0)
        s = idist__fail(IDIST_ERR_ADDR_IN_USE, "store: %s belongs to a job that is running", f->path);
    else if (!idist__file_is_store(f->fd))
        s = idist__fail(IDIST_ERR_ARG, "store: %s exists and is no store file; it is left alone", f->path);
    else if (ftruncate(f->fd, 0) != 0 || !idist__file_pwrite(f->fd, "IDSTORE1", 8, 0) ||
             !idist__file_pwrite(f->fd, &zero, 8, 8))
        s = idist__fail_errno("writing the store file", errno);
    idist__file_records(f->fd, false, deadline_ns);
    if (s != IDIST_OK) idist__os_close(&f->fd); // before anybody takes us for the owner
    return s;
}

// The others wait for a file whose server lives, and look it up by name again each time: it may have been replaced.
static idist_status idist__file_join(idist__file_store *f, int64_t deadline_ns) {
    for (;;) {
        bool alive = false;
        char magic[8];
        f->fd = open(f->path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
        if (f->fd >= 0 && idist__file_records(f->fd, true, deadline_ns)) {
            alive = idist__file_server_lives(f->fd) && idist__file_pread(f->fd, magic, 8, 0) &&
                    memcmp(magic, "IDSTORE1", 8) == 0;
            idist__file_records(f->fd, false, deadline_ns);
        }
        if (alive) return IDIST_OK;
        if (f->fd < 0 && errno != ENOENT)
            return idist__fail(IDIST_ERR_SYSTEM, "store: %s cannot be opened: %s", f->path, strerror(errno));
        idist__os_close(&f->fd);
        if (idist__os_ms_until(deadline_ns) == 0)
            return idist__fail(IDIST_ERR_TIMEOUT, "store: no living process owns %s: rank 0 has not started", f->path);
        idist__os_pause_ms(5);
    }
}

static idist_status idist__file_store_open(idist_store *store, const char *path, bool server, int64_t deadline_ns) {
    idist__file_store *f = (idist__file_store *)idist__mem_alloc(&store->mem, sizeof *f);
    if (!f) return IDIST_ERR_NO_MEMORY;
    f->fd = -1;
    f->table.mem = f->wills.mem = store->mem;
    f->server = server;
    pthread_mutex_init(&f->lock, NULL);
    store->impl = f;
    store->run = idist__file_store_run;
    store->close = idist__file_store_close;
    f->path = (char *)idist__mem_alloc(&store->mem, strlen(path) + 1);
    if (!f->path) return IDIST_ERR_NO_MEMORY;
    memcpy(f->path, path, strlen(path) + 1);
    return server ? idist__file_claim(f, deadline_ns) : idist__file_join(f, deadline_ns);
}

// ---- behind a socket: the wire ----
//
// torch's TCPStore: one byte of request, strings as u64 length and bytes, every key with a '/' before it. The first
// request is VALIDATE with a magic number. A client sends WAIT before GET. See IDIST__REQ_* for the numbers.

#define IDIST__STORE_MAGIC 0x3C85F7CEu
#define IDIST__STORE_REQUEST_MAX ((size_t)IDIST__VALUE_MAX + 64 * 1024)

typedef struct idist__reader {
    const char *p;
    size_t left;
    bool more; // ran out of bytes
    bool bad;  // a length is beyond what is allowed
} idist__reader;

static uint64_t idist__read_u64(idist__reader *r) {
    uint64_t v = 0;
    if (r->more || r->left < 8) r->more = true;
    else {
        memcpy(&v, r->p, 8);
        r->p += 8;
        r->left -= 8;
    }
    return v;
}

static idist__blob idist__read_blob(idist__reader *r, uint64_t max) {
    idist__blob b;
    uint64_t n = idist__read_u64(r);
    b.data = r->p;
    b.nbytes = 0;
    if (r->more) return b;
    if (n > max) r->bad = true;
    else if (n > r->left) r->more = true;
    else {
        b.nbytes = (size_t)n;
        r->p += n;
        r->left -= (size_t)n;
    }
    return b;
}

// Reads one request from the front of a buffer. > 0: its size, 0: more bytes are needed, -1: nonsense. The request
// points into the buffer; keys has room for `maxkeys`.
static ptrdiff_t idist__store_parse(const char *buf, size_t nbytes, idist__req *req, idist__blob *keys, size_t maxkeys) {
    idist__reader r;
    uint32_t magic;
    uint64_t i, n;
    memset(req, 0, sizeof *req);
    memset(&r, 0, sizeof r);
    if (!nbytes) return 0;
    r.p = buf + 1;
    r.left = nbytes - 1;
    req->op = (unsigned char)buf[0];
    switch (req->op) {
    case IDIST__REQ_VALIDATE:
        if (r.left < 4) return 0;
        memcpy(&magic, r.p, sizeof magic); // in the client's byte order, as all numbers here and in torch's protocol
        req->number = (int64_t)magic;
        r.p += sizeof magic;
        break;
    case IDIST__REQ_SET:
    case IDIST__REQ_WILL:
        req->key = idist__read_blob(&r, IDIST__KEY_MAX + 1);
        if (!r.more && !r.bad) req->a = idist__read_blob(&r, IDIST__VALUE_MAX);
        break;
    case IDIST__REQ_COMPARE_SET:
        req->key = idist__read_blob(&r, IDIST__KEY_MAX + 1);
        if (!r.more && !r.bad) req->a = idist__read_blob(&r, IDIST__VALUE_MAX / 2);
        if (!r.more && !r.bad) req->b = idist__read_blob(&r, IDIST__VALUE_MAX / 2);
        break;
    case IDIST__REQ_GET:
    case IDIST__REQ_DELETE: req->key = idist__read_blob(&r, IDIST__KEY_MAX + 1); break;
    case IDIST__REQ_ADD:
        req->key = idist__read_blob(&r, IDIST__KEY_MAX + 1);
        if (!r.more && !r.bad) req->number = (int64_t)idist__read_u64(&r);
        break;
    case IDIST__REQ_CHECK:
    case IDIST__REQ_WAIT:
        n = idist__read_u64(&r);
        if (!r.more && n > maxkeys) r.bad = true;
        for (i = 0; i < n && !r.more && !r.bad; i++) keys[i] = idist__read_blob(&r, IDIST__KEY_MAX + 1);
        req->keys = keys;
        req->nkeys = (size_t)n;
        break;
    case IDIST__REQ_NUM_KEYS:
    case IDIST__REQ_CANCEL_WAIT: break;
    default: return -1;
    }
    if (r.bad) return -1;
    return r.more ? 0 : r.p - buf;
}

// ---- behind a socket: found by multicast ----
//
// "cast:GROUP:PORT/JOB". Who looks for the server asks the group, and the server answers the asker alone:
//
//     question | tag 16 | 0 2 |        answer | tag 16 | port 2 |        tag: HMAC(key, JOB), port: big endian
//
// What is found this way is believed only after the handshake.

typedef struct idist__cast {
    int fd;
    idist__addr group;
    uint8_t tag[32];
    char ip[64]; // ours, where packets for the group leave
} idist__cast;

static idist_status idist__cast_open(idist__cast *c, const char *text, bool server, const uint8_t key[32]) {
    const char *job = strchr(text, '/'), *own = idist__os_env("IDIST_ADDR");
    char group[300];
    struct ip_mreq member;
    idist__addr a;
    idist_status s;
    int yes = 1;
    memset(&member, 0, sizeof member);
    snprintf(group, sizeof group, "tcp:%.*s", (int)(job - text), text);
    idist__hmac(key, "multicast", job, strlen(job), NULL, 0, c->tag);
    if ((s = idist__addr_parse(&c->group, group)) != IDIST_OK) return s;
    c->fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (c->fd < 0) return idist__fail_errno("socket", errno);
    if (own) s = idist__addr_tcp(&a, own, 0);
    if (s == IDIST_OK && own && a.sa.ss_family != AF_INET)
        s = idist__fail(IDIST_ERR_ENV, "store: IDIST_ADDR=%s: multicast takes an IPv4 address", own);
    if (s != IDIST_OK) return s;
    a.nbytes = sizeof a.sa;
    if (!own && (connect(c->fd, (struct sockaddr *)&c->group.sa, c->group.nbytes) != 0 ||
                 getsockname(c->fd, (struct sockaddr *)&a.sa, &a.nbytes) != 0))
        return idist__fail(IDIST_ERR_SYSTEM, "store: no way to %s (%s): set IDIST_ADDR to this host's address", group + 4,
                           strerror(errno));
    idist__addr_host_text(&a, c->ip, sizeof c->ip);
    idist__os_close(&c->fd); // a socket that was connected hears its peer only
    c->fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    member.imr_multiaddr = ((struct sockaddr_in *)&c->group.sa)->sin_addr;
    member.imr_interface = ((struct sockaddr_in *)&a.sa)->sin_addr;
    if (c->fd < 0 ||
        setsockopt(c->fd, IPPROTO_IP, IP_MULTICAST_IF, &member.imr_interface, sizeof member.imr_interface) != 0 ||
        (server && (setsockopt(c->fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) != 0 ||
                    bind(c->fd, (struct sockaddr *)&c->group.sa, c->group.nbytes) != 0 ||
                    setsockopt(c->fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &member, sizeof member) != 0)))
        return idist__fail(IDIST_ERR_SYSTEM, "store: multicast to %s by the interface of %s%s: %s", group + 4, c->ip,
                           own ? " (IDIST_ADDR)" : "", strerror(errno));
    return IDIST_OK;
}

// The server's part: answers all questions that are there.
static void idist__cast_answer(const idist__cast *c, int port) {
    uint8_t msg[18];
    idist__addr a;
    a.nbytes = sizeof a.sa;
    while (recvfrom(c->fd, msg, sizeof msg, MSG_TRUNC, (struct sockaddr *)&a.sa, &a.nbytes) >= 0) {
        if (memcmp(msg, c->tag, 16) == 0 && !msg[16] && !msg[17]) {
            msg[16] = (uint8_t)(port >> 8);
            msg[17] = (uint8_t)port;
            sendto(c->fd, msg, sizeof msg, MSG_NOSIGNAL, (struct sockaddr *)&a.sa, a.nbytes); // lost: it asks again
        }
        a.nbytes = sizeof a.sa;
    }
}

// The others': asks until somebody says where the server is.
static idist_status idist__cast_ask(const idist__cast *c, char *addr_text, size_t cap, int64_t deadline_ns) {
    uint8_t msg[18];
    char ip[64];
    idist__addr a;
    for (;;) {
        memset(msg, 0, sizeof msg);
        memcpy(msg, c->tag, 16);
        sendto(c->fd, msg, sizeof msg, MSG_NOSIGNAL, (const struct sockaddr *)&c->group.sa, c->group.nbytes);
        idist__sock_wait(c->fd, POLLIN, idist__os_deadline(100));
        for (;;) {
            a.nbytes = sizeof a.sa;
            if (recvfrom(c->fd, msg, sizeof msg, MSG_TRUNC, (struct sockaddr *)&a.sa, &a.nbytes) != sizeof msg) break;
            if (memcmp(msg, c->tag, 16) != 0 || (!msg[16] && !msg[17])) continue;
            idist__addr_host_text(&a, ip, sizeof ip);
            snprintf(addr_text, cap, "tcp:%s:%d", ip, msg[16] << 8 | msg[17]);
            return IDIST_OK;
        }
        if (idist__os_ms_until(deadline_ns) == 0)
            return idist__fail(
                IDIST_ERR_TIMEOUT,
                "store: nobody in the multicast group has answered: rank 0 has not started, its secret or the "
                "size of its world is another one, or no multicast gets from there to %s",
                c->ip);
    }
}

// ---- behind a socket: the server ----

typedef struct idist__client { // one connection of the server
    int fd;
    bool valid;   // said the magic number
    bool waiting; // its first request waits for keys
    char *in;
    size_t nin, capin;
    char *out;
    size_t nout, capout;
    char *will; // key and value, behind each other: put into the table when the client is gone and has not taken it back
    size_t will_nkey, will_nbytes;
} idist__client;

typedef struct idist__server {
    idist_allocator mem;
    uint8_t key[32];
    int listener, wake, port;
    idist__cast cast; // its fd is -1: nobody asks where we are
    pthread_t thread;
    bool running;
    idist__table table;
    idist__blob *keys; // scratch for the parser
    char *value;       // scratch for replies
    struct pollfd *polls;
    idist__porch porch;
    idist__client *clients[4096];
    int nclients;
    bool executed;   // a will: the table has changed
    int nrefused;    // handshakes that failed, for the text of a time-out
    int other_order; // one of them came from a machine of another byte order
    int no_fds;      // a connection could not be accepted for want of a descriptor
} idist__server;

// The client has gone without taking its will back. A value that stands there already stays.
static void idist__client_execute(idist__server *sv, const idist__client *c) {
    idist__blob key;
    key.data = c->will;
    key.nbytes = c->will_nkey;
    if (*idist__table_find(&sv->table, key.data, key.nbytes)) return;
    sv->executed = idist__table_put(&sv->table, key, c->will + c->will_nkey, c->will_nbytes - c->will_nkey) == IDIST_OK;
}

static void idist__server_drop(idist__server *sv, int i) {
    idist__client *c = sv->clients[i];
    idist__os_close(&c->fd);
    if (c->will_nkey) idist__client_execute(sv, c);
    idist__mem_free(&sv->mem, c->will);
    idist__mem_free(&sv->mem, c->in);
    idist__mem_free(&sv->mem, c->out);
    idist__mem_free(&sv->mem, c);
    sv->clients[i] = sv->clients[--sv->nclients];
}

static bool idist__buffer_reserve(const idist_allocator *mem, char **buf, size_t *cap, size_t used, size_t want) {
    size_t n = *cap ? *cap : 512;
    char *p;
    if (want <= *cap) return true;
    while (n < want) n *= 2;
    p = (char *)idist__mem_raw(mem, n);
    if (!p) return false;
    if (used) memcpy(p, *buf, used);
    idist__mem_free(mem, *buf);
    *buf = p;
    *cap = n;
    return true;
}

static bool idist__client_reply(idist__server *sv, idist__client *c, const void *data, size_t nbytes) {
    if (!idist__buffer_reserve(&sv->mem, &c->out, &c->capout, c->nout, c->nout + nbytes)) return false;
    if (nbytes) memcpy(c->out + c->nout, data, nbytes);
    c->nout += nbytes;
    return true;
}

static bool idist__client_answer(idist__server *sv, idist__client *c, const idist__req *r) {
    uint8_t byte = 0;
    uint64_t n = r->nbytes;
    int64_t number = r->number;
    switch (r->op) {
    case IDIST__REQ_GET:
    case IDIST__REQ_COMPARE_SET: return idist__client_reply(sv, c, &n, 8) && idist__client_reply(sv, c, r->value, r->nbytes);
    case IDIST__REQ_ADD:
    case IDIST__REQ_NUM_KEYS: return idist__client_reply(sv, c, &number, 8);
    case IDIST__REQ_DELETE: number = r->flag ? 1 : 0; return idist__client_reply(sv, c, &number, 8);
    case IDIST__REQ_CHECK: byte = r->flag ? 0 : 1; return idist__client_reply(sv, c, &byte, 1);
    case IDIST__REQ_WAIT: return idist__client_reply(sv, c, &byte, 1);
    default: return true;
    }
}

// An empty key takes the will back.
static bool idist__client_bequeath(idist__server *sv, idist__client *c, const idist__req *r) {
    idist__mem_free(&sv->mem, c->will);
    c->will_nkey = c->will_nbytes = 0;
    c->will = r->key.nbytes ? (char *)idist__mem_raw(&sv->mem, r->key.nbytes + r->a.nbytes) : NULL;
    if (!c->will) return !r->key.nbytes;
    memcpy(c->will, r->key.data, r->key.nbytes);
    if (r->a.nbytes) memcpy(c->will + r->key.nbytes, r->a.data, r->a.nbytes);
    c->will_nkey = r->key.nbytes;
    c->will_nbytes = r->key.nbytes + r->a.nbytes;
    return true;
}

// Carries out one request of a client. *wait: it has to be tried again when the table has changed. False: drop the
// client.
static bool idist__client_request(idist__server *sv, idist__client *c, idist__req *r, bool *wait, bool *changed) {
    static const uint64_t gone = IDIST__NO_VALUE;
    bool touched = false;
    *wait = false;
    if (r->op == IDIST__REQ_VALIDATE) return c->valid = r->number == (int64_t)IDIST__STORE_MAGIC;
    if (!c->valid) return false;
    if (r->op == IDIST__REQ_CANCEL_WAIT) return true; // nothing waits any more: it crossed our answer
    if (r->op == IDIST__REQ_WILL) return idist__client_bequeath(sv, c, r);
    r->value = sv->value;
    r->capacity = IDIST__VALUE_MAX;
    if (idist__table_apply(&sv->table, r, wait, &touched) != IDIST_OK) {
        if (r->op != IDIST__REQ_ADD) return false;
        r->number = IDIST__NOT_A_NUMBER;
    }
    if (touched) *changed = true;
    if (*wait && r->op == IDIST__REQ_GET) { // the key went between the client's WAIT and its GET: it waits again
        *wait = false;
        return idist__client_reply(sv, c, &gone, 8);
    }
    return *wait || idist__client_answer(sv, c, r);
}

// Serves what lies in a client's buffer, up to a request that has to wait; while it does, the client is silent, or
// cancels. *changed is set when the table changed. False: drop the client.
static bool idist__client_serve(idist__server *sv, idist__client *c, bool *changed) {
    static const uint8_t canceled = 1;
    size_t used = 0;
    c->waiting = false;
    while (!c->waiting) {
        idist__req r;
        bool wait;
        ptrdiff_t n = idist__store_parse(c->in + used, c->nin - used, &r, sv->keys, IDIST__KEYS_MAX);
        if (n == 0 && c->nin - used < IDIST__STORE_REQUEST_MAX) break;
        if (n <= 0 || !idist__client_request(sv, c, &r, &wait, changed)) return false;
        if (wait && c->nin - used > (size_t)n && c->in[used + (size_t)n] == IDIST__REQ_CANCEL_WAIT) {
            n++;
            if (!idist__client_reply(sv, c, &canceled, 1)) return false;
        } else if (wait) {
            c->waiting = true;
            break;
        }
        used += (size_t)n;
    }
    if (used) memmove(c->in, c->in + used, c->nin - used);
    c->nin -= used;
    return c->nout < 8 * IDIST__STORE_REQUEST_MAX; // it asks and asks, and never reads
}

// Reads what has come. False: drop the client.
static bool idist__client_read(idist__server *sv, idist__client *c) {
    for (;;) {
        ptrdiff_t n;
        if (c->nin >= IDIST__STORE_REQUEST_MAX) return true; // a whole request is there: serve it first
        if (!idist__buffer_reserve(&sv->mem, &c->in, &c->capin, c->nin, c->nin + 4096)) return false;
        n = idist__sock_read(c->fd, c->in + c->nin, c->capin - c->nin);
        if (n <= 0) return n == 0;
        c->nin += (size_t)n;
    }
}

static bool idist__client_write(idist__client *c) {
    size_t sent = 0;
    while (sent < c->nout) {
        struct iovec part;
        ptrdiff_t n;
        part.iov_base = c->out + sent;
        part.iov_len = c->nout - sent;
        n = idist__sock_write(c->fd, &part, 1);
        if (n < 0) return false;
        if (n == 0) break;
        sent += (size_t)n;
    }
    if (sent) memmove(c->out, c->out + sent, c->nout - sent);
    c->nout -= sent;
    return true;
}

// Takes newcomers onto the porch while it has room.
static void idist__server_accept(idist__server *sv) {
    idist__handshake *h;
    while ((h = idist__porch_place(&sv->porch)) != NULL) {
        int fd = idist__sock_accept(sv->listener);
        if (fd < 0 && (errno == EMFILE || errno == ENFILE)) {
            if (!idist__porch_make_way(&sv->porch)) __atomic_store_n(&sv->no_fds, 1, __ATOMIC_RELAXED);
            idist__os_pause_ms(1); // no spin while descriptors are short
        }
        if (fd < 0) return;
        idist__os_close(&h->fd);
        idist__auth_begin(h, fd, true, sv->key, IDIST__ROLE_STORE, 0, 0, 0, idist__os_deadline(IDIST__PORCH_MS));
        h->ready = true;
    }
}

// Handshakes go on; whoever is through becomes a client.
static void idist__server_porch(idist__server *sv) {
    int i;
    for (i = 0; i < IDIST__PORCH; i++) {
        idist__handshake *h = &sv->porch.place[i];
        bool done = false;
        idist__client *c;
        if (h->fd >= 0 && idist__os_now_ns() >= h->deadline_ns) idist__os_close(&h->fd);
        if (h->fd < 0 || !h->ready) continue;
        h->ready = false;
        if (idist__auth_step(h, &done) != IDIST_OK) {
            if (idist__auth_other_order(h)) __atomic_store_n(&sv->other_order, 1, __ATOMIC_RELAXED);
            idist__os_close(&h->fd);
            __atomic_add_fetch(&sv->nrefused, 1, __ATOMIC_RELAXED);
        }
        if (h->fd < 0 || !done) continue;
        c = sv->nclients < (int)IDIST__COUNT_OF(sv->clients) ? (idist__client *)idist__mem_alloc(&sv->mem, sizeof *c) : NULL;
        if (c) {
            c->fd = h->fd;
            sv->clients[sv->nclients++] = c;
            h->fd = -1;
        } else {
            idist__os_close(&h->fd);
        }
    }
}

static bool idist__server_client(idist__server *sv, idist__client *c, bool *changed) {
    bool alive = idist__client_read(sv, c); // what it said before it left still counts
    return idist__client_serve(sv, c, changed) && alive && idist__client_write(c);
}

static void *idist__server_main(void *arg) {
    idist__server *sv = (idist__server *)arg;
    struct pollfd *fds = sv->polls;
    for (;;) {
        int i, n = sv->nclients, strangers;
        bool changed = false, room = idist__porch_place(&sv->porch) != NULL;
        fds[0].fd = sv->wake;
        fds[1].fd = room ? sv->listener : -1;
        fds[2].fd = sv->cast.fd;
        fds[0].events = fds[1].events = fds[2].events = POLLIN;
        for (i = 0; i < n; i++) {
            fds[i + 3].fd = sv->clients[i]->fd;
            fds[i + 3].events = (short)(POLLIN | (sv->clients[i]->nout ? POLLOUT : 0));
        }
        strangers = idist__porch_poll(&sv->porch, fds + n + 3);
        i = !strangers ? -1 : room ? 100 : 10;
        if (poll(fds, (nfds_t)n + 3 + (nfds_t)strangers, i) < 0 && errno != EINTR) return NULL;
        if (fds[0].revents) return NULL;
        idist__porch_polled(&sv->porch, fds + n + 3);
        for (i = n - 1; i >= 0; i--) // downwards: a dropped client is replaced by the last one
            if (fds[i + 3].revents && !idist__server_client(sv, sv->clients[i], &changed)) idist__server_drop(sv, i);
        while (changed || sv->executed) {
            changed = sv->executed = false;
            for (i = sv->nclients - 1; i >= 0; i--) {
                idist__client *c = sv->clients[i];
                if (c->waiting && !(idist__client_serve(sv, c, &changed) && idist__client_write(c)))
                    idist__server_drop(sv, i);
            }
        }
        if (fds[2].revents) idist__cast_answer(&sv->cast, sv->port);
        if (room && fds[1].revents) idist__server_accept(sv);
        idist__server_porch(sv);
    }
}

static void idist__server_stop(idist__server *sv) {
    uint64_t one = 1;
    if (sv->running) {
        while (write(sv->wake, &one, sizeof one) < 0 && errno == EINTR) continue;
        pthread_join(sv->thread, NULL);
    }
    while (sv->nclients) idist__server_drop(sv, 0);
    idist__porch_close(&sv->porch);
    idist__os_close(&sv->wake);
    idist__os_close(&sv->listener);
    idist__os_close(&sv->cast.fd);
    idist__table_clear(&sv->table);
    idist__mem_free(&sv->mem, sv->keys);
    idist__mem_free(&sv->mem, sv->value);
    idist__mem_free(&sv->mem, sv->polls);
    idist__mem_free(&sv->mem, sv);
}

// Serves on a listening socket, which it owns from now on (as that of `cast`), in a thread of its own.
static idist_status idist__server_start(const idist_allocator *mem, int listener, int port, idist__cast *cast,
                                        const uint8_t key[32], idist__server **out) {
    idist__server *sv = (idist__server *)idist__mem_alloc(mem, sizeof *sv);
    *out = NULL;
    if (!sv) {
        idist__os_close(&listener);
        idist__os_close(&cast->fd);
        return IDIST_ERR_NO_MEMORY;
    }
    if (mem) sv->mem = *mem;
    sv->table.mem = sv->mem;
    memcpy(sv->key, key, 32);
    sv->listener = listener;
    sv->port = port;
    sv->cast = *cast;
    idist__porch_init(&sv->porch);
    sv->polls = (struct pollfd *)idist__mem_raw(mem, sizeof *sv->polls * (IDIST__COUNT_OF(sv->clients) + IDIST__PORCH + 3));
    sv->keys = (idist__blob *)idist__mem_raw(mem, sizeof *sv->keys * IDIST__KEYS_MAX);
    sv->value = (char *)idist__mem_raw(mem, IDIST__VALUE_MAX);
    sv->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (!sv->polls || !sv->keys || !sv->value || sv->wake < 0) {
        idist_status s = sv->wake < 0 ? idist__fail_errno("eventfd", errno) : IDIST_ERR_NO_MEMORY;
        idist__server_stop(sv);
        return s;
    }
    if (idist__os_thread(&sv->thread, idist__server_main, sv) != 0) {
        idist__server_stop(sv);
        return idist__fail(IDIST_ERR_SYSTEM, "store: no thread for the server");
    }
    sv->running = true;
    *out = sv;
    return IDIST_OK;
}

// ---- behind a socket: the client ----

// How long a request that does not wait for keys may take, and how long a thread that waits keeps the connection to
// itself.
enum { IDIST__ANSWER_MS = 30000, IDIST__SLICE_MS = 50, IDIST__PROBE_MS = 5000 };

// How long a client that was turned away tries again.
enum { IDIST__RETRY_MS = 10000 };

typedef struct idist__tcp_store {
    pthread_mutex_t lock;
    int nwant; // threads that want the lock
    int fd;
    idist__server *server; // in the process that owns the table
    char *out;
    size_t nout, capout;
    idist_status broken; // the connection is unusable since this
} idist__tcp_store;

static void idist__put(idist_store *store, const void *data, size_t nbytes, bool *ok) {
    idist__tcp_store *t = (idist__tcp_store *)store->impl;
    *ok = *ok && idist__buffer_reserve(&store->mem, &t->out, &t->capout, t->nout, t->nout + nbytes);
    if (!*ok) return;
    if (nbytes) memcpy(t->out + t->nout, data, nbytes);
    t->nout += nbytes;
}

static void idist__put_blob(idist_store *store, idist__blob b, const char *prefix, bool *ok) {
    uint64_t n = b.nbytes + strlen(prefix);
    idist__put(store, &n, 8, ok);
    idist__put(store, prefix, strlen(prefix), ok);
    idist__put(store, b.data, b.nbytes, ok);
}

// One request on the wire. GET needs a WAIT before it, which is a request of its own.
static bool idist__tcp_encode(idist_store *store, const idist__req *r) {
    idist__tcp_store *t = (idist__tcp_store *)store->impl;
    uint8_t op = (uint8_t)r->op;
    uint64_t n = r->nkeys;
    size_t i;
    bool ok = true;
    t->nout = 0;
    idist__put(store, &op, 1, &ok);
    switch (r->op) {
    case IDIST__REQ_CHECK:
    case IDIST__REQ_WAIT:
        idist__put(store, &n, 8, &ok);
        for (i = 0; i < r->nkeys; i++) idist__put_blob(store, r->keys[i], "/", &ok);
        break;
    case IDIST__REQ_SET:
    case IDIST__REQ_WILL:
        idist__put_blob(store, r->key, r->key.nbytes || r->op == IDIST__REQ_SET ? "/" : "", &ok);
        idist__put_blob(store, r->a, "", &ok);
        break;
    case IDIST__REQ_COMPARE_SET:
        idist__put_blob(store, r->key, "/", &ok);
        idist__put_blob(store, r->a, "", &ok);
        idist__put_blob(store, r->b, "", &ok);
        break;
    case IDIST__REQ_ADD:
        idist__put_blob(store, r->key, "/", &ok);
        idist__put(store, &r->number, 8, &ok);
        break;
    case IDIST__REQ_GET:
    case IDIST__REQ_DELETE: idist__put_blob(store, r->key, "/", &ok); break;
    default: break;
    }
    return ok;
}

static idist_status idist__tcp_broken(idist__tcp_store *t) {
    int err = errno;
    if (err == ETIMEDOUT) t->broken = idist__fail(IDIST_ERR_TIMEOUT, "store: the server did not answer in time");
    else
        t->broken = idist__fail(IDIST_ERR_PEER_LOST, "store: the connection to the server broke: %s",
                                err ? strerror(err) : "it closed");
    return t->broken;
}

// The reply to GET and COMPARE_SET: into the caller's buffer, or thrown away when it does not fit.
static idist_status idist__tcp_value(idist__tcp_store *t, idist__req *r, int64_t deadline_ns) {
    uint64_t n, left;
    if (!idist__sock_read_all(t->fd, &n, 8, deadline_ns)) return idist__tcp_broken(t);
    r->flag = n == IDIST__NO_VALUE;
    if (r->flag) return IDIST_OK;
    if (n > IDIST__VALUE_MAX) {
        errno = EPROTO;
        return idist__tcp_broken(t);
    }
    r->nbytes = (size_t)n;
    if (n <= r->capacity) {
        if (n && !idist__sock_read_all(t->fd, r->value, (size_t)n, deadline_ns)) return idist__tcp_broken(t);
        return IDIST_OK;
    }
    for (left = n; left;) {
        char waste[4096];
        size_t k = left < sizeof waste ? (size_t)left : sizeof waste;
        if (!idist__sock_read_all(t->fd, waste, k, deadline_ns)) return idist__tcp_broken(t);
        left -= k;
    }
    return idist__fail(IDIST_ERR_TRUNCATED, "store: the value has %zu bytes, the buffer %zu", (size_t)n, r->capacity);
}

// Waits for keys, at most for a slice of time, after which other threads get their turn on the connection. r->flag:
// they are there.
static idist_status idist__tcp_wait_slice(idist_store *store, idist__req *r) {
    idist__tcp_store *t = (idist__tcp_store *)store->impl;
    int64_t slice = idist__os_deadline(IDIST__SLICE_MS), probe = idist__os_deadline(IDIST__PROBE_MS), soon;
    uint8_t answer = 0, cancel = IDIST__REQ_CANCEL_WAIT;
    bool there;
    do {
        if (slice > r->deadline_ns) slice = r->deadline_ns;
        there = idist__sock_read_all(t->fd, &answer, 1, slice);
        if (there || errno != ETIMEDOUT || slice == r->deadline_ns) break;
        slice = idist__os_deadline(IDIST__SLICE_MS);
        // Nobody else wants the connection: no need to ask anew, but for finding out whether the server still answers.
    } while (!__atomic_load_n(&t->nwant, __ATOMIC_RELAXED) && idist__os_ms_until(probe) != 0);
    if (!there) {
        if (errno != ETIMEDOUT) return idist__tcp_broken(t);
        soon = idist__os_deadline(IDIST__ANSWER_MS);
        if (!idist__sock_write_all(t->fd, &cancel, 1, soon) || !idist__sock_read_all(t->fd, &answer, 1, soon))
            return idist__tcp_broken(t);
    }
    r->flag = answer == 0;
    return IDIST_OK;
}

// One request and its answer, except that a WAIT may end without one (r->flag false).
static idist_status idist__tcp_exchange(idist_store *store, idist__req *r) {
    idist__tcp_store *t = (idist__tcp_store *)store->impl;
    int64_t soon = idist__os_deadline(IDIST__ANSWER_MS);
    uint8_t byte;
    if (t->broken != IDIST_OK) return idist__fail(t->broken, "store: the connection to the server broke earlier");
    if (!idist__tcp_encode(store, r)) return IDIST_ERR_NO_MEMORY;
    if (!idist__sock_write_all(t->fd, t->out, t->nout, soon)) return idist__tcp_broken(t);
    switch (r->op) {
    case IDIST__REQ_GET:
    case IDIST__REQ_COMPARE_SET: return idist__tcp_value(t, r, soon);
    case IDIST__REQ_ADD:
    case IDIST__REQ_NUM_KEYS:
    case IDIST__REQ_DELETE:
        if (!idist__sock_read_all(t->fd, &r->number, 8, soon)) return idist__tcp_broken(t);
        r->flag = r->number > 0;
        if (r->op == IDIST__REQ_ADD && r->number == IDIST__NOT_A_NUMBER)
            return idist__fail(IDIST_ERR_ARG, "store: add to a key whose value is no number");
        return IDIST_OK;
    case IDIST__REQ_CHECK:
        if (!idist__sock_read_all(t->fd, &byte, 1, soon)) return idist__tcp_broken(t);
        r->flag = byte == 0;
        return IDIST_OK;
    case IDIST__REQ_WAIT: return idist__tcp_wait_slice(store, r);
    default: return IDIST_OK;
    }
}

// SET has no answer of its own. A question behind it has: once that is answered, every other client sees the value.
static idist_status idist__tcp_confirm(idist_store *store, const idist__req *r) {
    idist__req check = *r;
    check.op = IDIST__REQ_CHECK;
    check.keys = &r->key;
    check.nkeys = 1;
    return idist__tcp_exchange(store, &check);
}

static idist_status idist__tcp_store_run(idist_store *store, idist__req *r) {
    idist__tcp_store *t = (idist__tcp_store *)store->impl;
    bool waits = r->op == IDIST__REQ_WAIT || r->op == IDIST__REQ_GET;
    for (;;) {
        idist__req w = *r;
        idist_status s = IDIST_OK;
        bool there = true;
        __atomic_add_fetch(&t->nwant, 1, __ATOMIC_RELAXED);
        pthread_mutex_lock(&t->lock);
        __atomic_sub_fetch(&t->nwant, 1, __ATOMIC_RELAXED);
        if (waits) { // a GET is preceded by a WAIT, as in torch's protocol
            w.op = IDIST__REQ_WAIT;
            w.keys = r->nkeys ? r->keys : &r->key;
            w.nkeys = r->nkeys ? r->nkeys : 1;
            s = idist__tcp_exchange(store, &w);
            there = w.flag;
        }
        if (s == IDIST_OK && there && r->op != IDIST__REQ_WAIT) s = idist__tcp_exchange(store, r);
        if (s == IDIST_OK && r->op == IDIST__REQ_SET) s = idist__tcp_confirm(store, r);
        if (s == IDIST_OK && r->op == IDIST__REQ_GET && r->flag) there = false;
        pthread_mutex_unlock(&t->lock);
        if (s != IDIST_OK || there) return s;
        if (idist__os_ms_until(r->deadline_ns) == 0) return idist__req_late(r, NULL);
        if (__atomic_load_n(&t->nwant, __ATOMIC_RELAXED)) idist__os_pause_ms(1); // a mutex alone is not fair
    }
}

static void idist__tcp_store_close(idist_store *store) {
    idist__tcp_store *t = (idist__tcp_store *)store->impl;
    idist__os_close(&t->fd);
    if (t->server) idist__server_stop(t->server);
    idist__mem_free(&store->mem, t->out);
    pthread_mutex_destroy(&t->lock);
    idist__mem_free(&store->mem, t);
}

// Nobody answers at an address: why that may be. It is tried again until the deadline passes.
static void idist__tcp_unreached(const char *addr_text, bool local, int err) {
    if (idist__sock_cut_off(err))
        idist__fail(IDIST_ERR_TIMEOUT,
                    "%s cannot be reached from here (%s): the network interface is down, or no route "
                    "leads there",
                    addr_text, strerror(err));
    else if (local)
        idist__fail(IDIST_ERR_TIMEOUT,
                    "nobody listens at %s (%s): rank 0 has not started, its MASTER_PORT differs, or it is of another "
                    "user, network namespace (container) or host. Ranks of one host meet at a local socket of their "
                    "user and network namespace",
                    addr_text, strerror(err));
    else
        idist__fail(IDIST_ERR_TIMEOUT,
                    "nobody listens at %s (%s): rank 0 has not started, or MASTER_ADDR / MASTER_PORT differ", addr_text,
                    strerror(err));
}

// Tries until the server is there. The first refusals are normal: it may start later than we do.
static idist_status idist__tcp_store_connect(idist__tcp_store *t, const char *addr_text, const uint8_t key[32],
                                             int64_t deadline_ns) {
    int pause_ms = 1;
    int64_t give_up_ns = 0; // the server has closed a connection, and is not to be asked again after this
    for (;;) {
        idist__addr addr;
        idist_status s = idist__addr_parse(&addr, addr_text);
        if (s == IDIST_OK && addr.sa.ss_family != AF_UNIX && idist__addr_port(&addr) == 0)
            s = idist__fail(IDIST_ERR_ARG, "store: a client needs the port of the server, not 0");
        if (s == IDIST_ERR_ARG) return s;
        if (s == IDIST_OK) {
            t->fd = idist__sock_connect(&addr, deadline_ns);
            if (t->fd < 0 && (errno == EMFILE || errno == ENFILE)) return idist__fail_errno("socket", errno);
            if (t->fd < 0 && errno == EPERM)
                return idist__fail(IDIST_ERR_AUTH, "another user of this machine listens at %s", addr_text);
            if (t->fd >= 0 && !key) return IDIST_OK;
            if (t->fd >= 0) {
                idist__handshake h;
                int64_t own = idist__os_deadline(IDIST__PORCH_MS); // our own server answers at once, if it can at all
                idist__auth_begin(&h, t->fd, false, key, IDIST__ROLE_STORE, 0, 0, 0,
                                  t->server && own < deadline_ns ? own : deadline_ns);
                s = idist__auth_run(&h);
                if (s != IDIST_OK && t->server && __atomic_load_n(&t->server->no_fds, __ATOMIC_RELAXED))
                    return idist__fail(IDIST_ERR_NO_FDS, "store: out of file descriptors: raise ulimit -n");
                if (!h.broke) return s;
                idist__os_close(&t->fd);
                if (!give_up_ns) give_up_ns = idist__os_deadline(IDIST__RETRY_MS);
                if (idist__os_ms_until(give_up_ns) == 0) return s;
            } else if (give_up_ns && errno == ECONNREFUSED) {
                return idist__fail(IDIST_ERR_PEER_LOST, "store: the server at %s (rank 0) was lost during the handshake",
                                   addr_text);
            } else {
                idist__tcp_unreached(addr_text, addr.sa.ss_family == AF_UNIX, errno);
            }
        }
        if (idist__os_ms_until(deadline_ns) == 0) return idist__fail(IDIST_ERR_TIMEOUT, "store: %s", idist__me.text);
        idist__os_pause_ms(pause_ms);
        if (pause_ms < 50) pause_ms *= 2;
    }
}

// Asks the group, and again when the answer was none: anybody may answer, and a server may be gone by then.
static idist_status idist__cast_connect(idist__tcp_store *t, const idist__cast *cast, const uint8_t key[32],
                                        int64_t deadline_ns) {
    char at[320];
    idist_status s;
    do {
        int64_t soon = idist__os_deadline(1000);
        if ((s = idist__cast_ask(cast, at, sizeof at, deadline_ns)) != IDIST_OK) return s;
        s = idist__tcp_store_connect(t, at, key, soon < deadline_ns ? soon : deadline_ns);
        if (s != IDIST_OK) idist__os_close(&t->fd);
    } while (s != IDIST_OK && s != IDIST_ERR_NO_FDS && idist__os_ms_until(deadline_ns) != 0);
    return s;
}

// The server: listens, unless it brings a socket that does, and says in `own` where. Takes that socket and that of `cast`.
static idist_status idist__tcp_store_serve(idist_store *store, const char *addr_text, int listener, idist__cast *cast,
                                           const uint8_t key[32], bool may_be_public, char *own, size_t cap) {
    idist__tcp_store *t = (idist__tcp_store *)store->impl;
    idist__addr addr;
    idist_status s = IDIST_OK;
    char ip[64];
    if (listener < 0) s = idist__addr_parse(&addr, addr_text);
    if (listener < 0 && s == IDIST_OK && !may_be_public && !idist__addr_is_loopback(&addr))
        s = idist__fail(IDIST_ERR_NO_SECRET,
                        "listening at %s, beyond this host, needs a shared secret: set IDIST_SECRET or "
                        "IDIST_SECRET_FILE on all ranks, or IDIST_INSECURE=1 to trust the network",
                        addr_text);
    if (listener < 0 && s == IDIST_OK) s = idist__sock_listen(&addr, addr_text, &listener);
    if (s != IDIST_OK) {
        idist__os_close(&cast->fd);
        return s;
    }
    idist__copy_text(own, cap, addr_text);
    memset(&addr, 0, sizeof addr);
    addr.nbytes = sizeof addr.sa;
    if (getsockname(listener, (struct sockaddr *)&addr.sa, &addr.nbytes) == 0 && addr.sa.ss_family != AF_UNIX) {
        store->port = idist__addr_port(&addr);
        idist__addr_host_text(&addr, ip, sizeof ip);
        snprintf(own, cap, "tcp:[%s]:%d", ip, store->port);
    }
    return idist__server_start(&store->mem, listener, store->port, cast, key, &t->server);
}

// addr: "unix:NAME", "tcp:HOST:PORT" or "cast:GROUP:PORT/JOB". A server may bring a listening socket (else -1), which is
// ours from here on. Without a key no handshake: with a server of torch.
static idist_status idist__tcp_store_open(idist_store *store, const char *addr_text, bool server, int listener,
                                          const uint8_t key[32], bool may_be_public, int64_t deadline_ns) {
    idist__tcp_store *t = (idist__tcp_store *)idist__mem_alloc(&store->mem, sizeof *t);
    uint32_t magic = IDIST__STORE_MAGIC;
    char hello[5], at[320], own[320];
    bool asks = strncmp(addr_text, "cast:", 5) == 0;
    idist__cast cast;
    idist_status s = IDIST_OK;
    if (!t) {
        idist__os_close(&listener);
        return IDIST_ERR_NO_MEMORY;
    }
    memset(&cast, 0, sizeof cast);
    t->fd = cast.fd = -1;
    pthread_mutex_init(&t->lock, NULL);
    store->impl = t;
    store->run = idist__tcp_store_run;
    store->close = idist__tcp_store_close;
    idist__copy_text(at, sizeof at, addr_text);
    if (asks) s = idist__cast_open(&cast, addr_text + 5, server, key);
    if (asks && server) snprintf(at, sizeof at, "tcp:%s:0", cast.ip);
    idist__copy_text(own, sizeof own, at);
    if (s == IDIST_OK && server) s = idist__tcp_store_serve(store, at, listener, &cast, key, may_be_public, own, sizeof own);
    else if (s == IDIST_OK && asks) s = idist__cast_connect(t, &cast, key, deadline_ns);
    if (!server || (s != IDIST_OK && !t->server)) idist__os_close(&cast.fd);
    if (s == IDIST_OK && (server || !asks)) s = idist__tcp_store_connect(t, own, key, deadline_ns);
    if (s != IDIST_OK) return s;
    hello[0] = IDIST__REQ_VALIDATE;
    memcpy(hello + 1, &magic, 4);
    if (!idist__sock_write_all(t->fd, hello, 5, deadline_ns)) return idist__tcp_broken(t);
    return IDIST_OK;
}

// ---- a view with a prefix ----

typedef struct idist__prefix_store {
    idist_store *parent;
    char prefix[IDIST__KEY_MAX + 1];
} idist__prefix_store;

static idist_status idist__prefix_run(idist_store *store, idist__req *r) {
    idist__prefix_store *p = (idist__prefix_store *)store->impl;
    size_t i, np = strlen(p->prefix), nkeys = r->nkeys ? r->nkeys : 1, total = 0; // NUM_KEYS has an empty key: harmless
    const idist__blob *from = r->nkeys ? r->keys : &r->key;
    idist__req inner = *r;
    idist__blob *keys;
    char *text;
    idist_status s;
    for (i = 0; i < nkeys; i++) {
        total += np + from[i].nbytes;
        if (np + from[i].nbytes > IDIST__KEY_MAX)
            return idist__fail(IDIST_ERR_ARG, "store: prefix and key together have at most %u bytes", IDIST__KEY_MAX);
    }
    keys = (idist__blob *)idist__mem_alloc(&store->mem, nkeys * sizeof *keys + total);
    if (!keys) return IDIST_ERR_NO_MEMORY;
    text = (char *)(keys + nkeys);
    for (i = 0; i < nkeys; i++) {
        keys[i].data = text;
        keys[i].nbytes = np + from[i].nbytes;
        memcpy(text, p->prefix, np);
        if (from[i].nbytes) memcpy(text + np, from[i].data, from[i].nbytes);
        text += keys[i].nbytes;
    }
    inner.key = keys[0];
    inner.keys = r->nkeys ? keys : NULL;
    s = p->parent->run(p->parent, &inner);
    r->number = inner.number;
    r->nbytes = inner.nbytes;
    r->flag = inner.flag;
    idist__mem_free(&store->mem, keys);
    return s;
}

static void idist__prefix_close(idist_store *store) { idist__mem_free(&store->mem, store->impl); }

// ---- public ----

static idist_store *idist__store_new(const idist_allocator *mem, int timeout_ms) {
    idist_store *store = (idist_store *)idist__mem_alloc(mem, sizeof *store);
    if (!store) return NULL;
    if (mem) store->mem = *mem;
    store->timeout_ms = timeout_ms ? timeout_ms : 300000;
    return store;
}

idist_status idist_store_close(idist_store **store) {
    idist_store *s;
    if (!store) return idist__fail(IDIST_ERR_ARG, "store_close: the pointer is NULL");
    s = *store;
    *store = NULL;
    if (!s) return IDIST_OK;
    if (s->impl) s->close(s);
    idist__mem_free(&s->mem, s);
    return IDIST_OK;
}

// All kinds: "mem:", "file:PATH", "unix:NAME", "tcp:HOST:PORT", "torch:HOST:PORT" (of an agent of torchrun).
static idist_status idist__store_open(const char *where, const idist_store_desc *d, int listener, idist_store **out) {
    idist_store *store = idist__store_new(&d->allocator, d->timeout_ms);
    int64_t deadline_ns;
    idist__secret secret;
    uint8_t key[32];
    idist_status s = idist__secret_find(&secret, d->secret, d->secret_nbytes);
    *out = NULL;
    if (s == IDIST_OK && !store) s = IDIST_ERR_NO_MEMORY;
    if (s != IDIST_OK) {
        idist__os_close(&listener);
        idist_store_close(&store);
        return s;
    }
    deadline_ns = idist__os_deadline(store->timeout_ms);
    idist__auth_key(&secret, key);
    if (strncmp(where, "file:", 5) == 0) s = idist__file_store_open(store, where + 5, d->server, deadline_ns);
    else if (strcmp(where, "mem:") == 0) s = idist__mem_store_open(store);
    else if (strncmp(where, "torch:", 6) == 0) {
        char addr[4096];
        snprintf(addr, sizeof addr, "tcp:%s", where + 6);
        s = idist__tcp_store_open(store, addr, false, -1, NULL, false, deadline_ns);
    } else s = idist__tcp_store_open(store, where, d->server, listener, key, secret.nbytes || secret.insecure, deadline_ns);
    if (s != IDIST_OK) idist_store_close(&store);
    else *out = store;
    return s;
}

idist_status idist_store_open(const char *url, const idist_store_desc *desc, idist_store **store) {
    idist_store_desc d;
    char where[4096];
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (!store) return idist__fail(IDIST_ERR_ARG, "store_open: store is NULL");
    *store = NULL;
    if (!url) return idist__fail(IDIST_ERR_ARG, "store_open: url is NULL");
    if (strlen(url) >= sizeof where) return idist__fail(IDIST_ERR_ARG, "store_open: the url is too long");
    if (strcmp(url, "mem://") == 0) idist__copy_text(where, sizeof where, "mem:");
    else if (strncmp(url, "file://", 7) == 0 && url[7] == '/') snprintf(where, sizeof where, "file:%s", url + 7);
    else if (strncmp(url, "tcp://", 6) == 0) snprintf(where, sizeof where, "tcp:%s", url + 6);
    else if (strncmp(url, "unix://", 7) == 0) snprintf(where, sizeof where, "unix:%s", url + 7);
    else
        return idist__fail(IDIST_ERR_ARG, "store_open: \"%s\" is none of tcp://host:port, unix://name, file:///path, mem://",
                           url);
    return idist__store_open(where, &d, -1, store);
}

idist_status idist_store_prefix(idist_store *parent, const char *prefix, idist_store **store) {
    idist__prefix_store *p;
    if (!store) return idist__fail(IDIST_ERR_ARG, "store_prefix: store is NULL");
    *store = NULL;
    if (!parent || !prefix || strlen(prefix) >= IDIST__KEY_MAX)
        return idist__fail(IDIST_ERR_ARG, "store_prefix: needs a parent and a prefix of less than %u bytes", IDIST__KEY_MAX);
    *store = idist__store_new(&parent->mem, parent->timeout_ms);
    if (!*store) return IDIST_ERR_NO_MEMORY;
    p = (idist__prefix_store *)idist__mem_alloc(&parent->mem, sizeof *p);
    if (!p) {
        idist_store_close(store);
        return IDIST_ERR_NO_MEMORY;
    }
    p->parent = parent;
    idist__copy_text(p->prefix, sizeof p->prefix, prefix);
    (*store)->impl = p;
    (*store)->run = idist__prefix_run;
    (*store)->close = idist__prefix_close;
    (*store)->port = parent->port;
    return IDIST_OK;
}

int idist_store_port(const idist_store *store) { return store ? store->port : 0; }

// Fills what all requests have, and looks at the keys.
static idist_status idist__store_begin(idist_store *store, idist__req *r, int op, const char *key, int timeout_ms) {
    memset(r, 0, sizeof *r);
    if (!store) return idist__fail(IDIST_ERR_ARG, "store: the store is NULL");
    r->op = op;
    r->deadline_ns = idist__os_deadline(timeout_ms ? timeout_ms : store->timeout_ms);
    if (op == IDIST__REQ_NUM_KEYS || op == IDIST__REQ_CHECK || op == IDIST__REQ_WAIT) return IDIST_OK;
    if (!key || !key[0] || strlen(key) > IDIST__KEY_MAX)
        return idist__fail(IDIST_ERR_ARG, "store: a key has 1 to %u bytes", IDIST__KEY_MAX);
    r->key.data = key;
    r->key.nbytes = strlen(key);
    return IDIST_OK;
}

static idist_status idist__store_value(idist__blob *blob, const void *value, size_t nbytes, size_t max) {
    if ((nbytes && !value) || nbytes > max)
        return idist__fail(IDIST_ERR_ARG, "store: a value is NULL or longer than %zu bytes", max);
    blob->data = (const char *)value;
    blob->nbytes = nbytes;
    return IDIST_OK;
}

idist_status idist_store_set(idist_store *store, const char *key, const void *value, size_t nbytes) {
    idist__req r;
    idist_status s = idist__store_begin(store, &r, IDIST__REQ_SET, key, 0);
    if (s == IDIST_OK) s = idist__store_value(&r.a, value, nbytes, IDIST__VALUE_MAX);
    return s == IDIST_OK ? store->run(store, &r) : s;
}

// Runs a request that brings a value.
static idist_status idist__store_fetch(const char *name, idist_store *store, idist__req *r, void *value, size_t capacity,
                                       size_t *nbytes) {
    idist_status s;
    if (capacity && !value) return idist__fail(IDIST_ERR_ARG, "%s: value is NULL", name);
    r->value = value;
    r->capacity = capacity;
    s = store->run(store, r);
    if (nbytes && (s == IDIST_OK || s == IDIST_ERR_TRUNCATED)) *nbytes = r->nbytes;
    return s;
}

idist_status idist_store_get(idist_store *store, const char *key, void *value, size_t capacity, size_t *nbytes,
                             int timeout_ms) {
    idist__req r;
    idist_status s = idist__store_begin(store, &r, IDIST__REQ_GET, key, timeout_ms);
    return s == IDIST_OK ? idist__store_fetch("store_get", store, &r, value, capacity, nbytes) : s;
}

idist_status idist_store_add(idist_store *store, const char *key, int64_t delta, int64_t *result) {
    idist__req r;
    idist_status s = idist__store_begin(store, &r, IDIST__REQ_ADD, key, 0);
    if (s != IDIST_OK) return s;
    r.number = delta;
    s = store->run(store, &r);
    if (s == IDIST_OK && result) *result = r.number;
    return s;
}

idist_status idist_store_compare_set(idist_store *store, const char *key, const void *expected, size_t nexpected,
                                     const void *desired, size_t ndesired, void *value, size_t capacity, size_t *nbytes) {
    idist__req r;
    idist_status s = idist__store_begin(store, &r, IDIST__REQ_COMPARE_SET, key, 0);
    if (s == IDIST_OK) s = idist__store_value(&r.a, expected, nexpected, IDIST__VALUE_MAX / 2);
    if (s == IDIST_OK) s = idist__store_value(&r.b, desired, ndesired, IDIST__VALUE_MAX / 2);
    return s == IDIST_OK ? idist__store_fetch("store_compare_set", store, &r, value, capacity, nbytes) : s;
}

static idist_status idist__store_keys(idist_store *store, int op, const char *const *keys, size_t n, int timeout_ms,
                                      bool *flag) {
    idist__req r;
    idist_status s = idist__store_begin(store, &r, op, NULL, timeout_ms);
    idist__blob *blobs;
    size_t i, total = 0;
    if (s != IDIST_OK) return s;
    if ((n && !keys) || n > IDIST__KEYS_MAX)
        return idist__fail(IDIST_ERR_ARG, "store: keys is NULL or more than %u", IDIST__KEYS_MAX);
    for (i = 0; i < n; i++) {
        if (!keys[i] || !keys[i][0] || strlen(keys[i]) > IDIST__KEY_MAX)
            return idist__fail(IDIST_ERR_ARG, "store: a key has 1 to %u bytes", IDIST__KEY_MAX);
        if ((total += strlen(keys[i]) + 9) > IDIST__VALUE_MAX)
            return idist__fail(IDIST_ERR_ARG, "store: the keys of one call have more than %u bytes", IDIST__VALUE_MAX);
    }
    if (flag) *flag = true;
    if (!n) return IDIST_OK;
    blobs = (idist__blob *)idist__mem_alloc(&store->mem, n * sizeof *blobs);
    if (!blobs) return IDIST_ERR_NO_MEMORY;
    for (i = 0; i < n; i++) {
        blobs[i].data = keys[i];
        blobs[i].nbytes = strlen(keys[i]);
    }
    r.keys = blobs;
    r.nkeys = n;
    s = store->run(store, &r);
    if (flag) *flag = r.flag;
    idist__mem_free(&store->mem, blobs);
    return s;
}

idist_status idist_store_wait(idist_store *store, const char *const *keys, size_t n, int timeout_ms) {
    return idist__store_keys(store, IDIST__REQ_WAIT, keys, n, timeout_ms, NULL);
}

idist_status idist_store_check(idist_store *store, const char *const *keys, size_t n, bool *ready) {
    if (!ready) return idist__fail(IDIST_ERR_ARG, "store_check: ready is NULL");
    return idist__store_keys(store, IDIST__REQ_CHECK, keys, n, 0, ready);
}

idist_status idist_store_delete(idist_store *store, const char *key, bool *deleted) {
    idist__req r;
    idist_status s = idist__store_begin(store, &r, IDIST__REQ_DELETE, key, 0);
    if (s == IDIST_OK) s = store->run(store, &r);
    if (s == IDIST_OK && deleted) *deleted = r.flag;
    return s;
}

idist_status idist_store_num_keys(idist_store *store, size_t *n) {
    idist__req r;
    idist_status s = idist__store_begin(store, &r, IDIST__REQ_NUM_KEYS, NULL, 0);
    if (s != IDIST_OK) return s;
    if (!n) return idist__fail(IDIST_ERR_ARG, "store_num_keys: n is NULL");
    s = store->run(store, &r);
    *n = s == IDIST_OK ? (size_t)r.number : 0;
    return s;
}

//------------------------------------------------------------------------------
// [impl:launch]  the configuration: explicit field, then environment, then built-in
// uses os err sock log auth . used by world spawn
//------------------------------------------------------------------------------

#define IDIST__SHM_MIB 4 // shared memory per rank

enum { IDIST__DEVICE_BACKEND_NCCL = 1 };

typedef struct idist__config {
    int rank, world_size;
    int local_rank, local_size;      // what the launcher says; -1: nothing
    const char *launcher;            // "none", "spawn", "explicit", "idist", "torchrun", ...
    const char *rank_var, *size_var; // which variables decided, or NULL
    const char *job_var;             // which one tells this job from others of the same launcher, or NULL
    char notice[200];                // a warning for the log of the world
    char where[4096];                // rendezvous: "unix:NAME", "tcp:HOST:PORT", "file:PATH"; "" for none
    idist_store *store;              // or this one
    int listener;                    // rank 0 of a spawn inherits a socket that already listens; else -1
    int timeout_ms, init_timeout_ms; // resolved: > 0, or -1 for none
    idist__secret secret;
    int transport;     // 0 shared memory inside a host, 1 local sockets there, 2 TCP everywhere
    int algorithm;     // 0 auto, 1 latency, 2 bandwidth, 3 chunked
    int bind;          // 1: each rank to a processor of its own, if there are enough
    size_t shm_nbytes; // of shared memory per rank
    bool shm_asked;    // that number is the user's
    const void *mpi_comm;
    bool unchecked; // a backend that has collectives of its own may leave out the comparison of calls
    char host_id[128];
    char device[32];    // asked for, or ""
    int device_backend; // 0 auto, 1 IDIST__DEVICE_BACKEND_NCCL, 2 ipc, 3 staged
    const void *nccl_comm, *nccl_config;
    bool high_priority; // of the streams on the device
    char backends[128]; // names asked for, or ""
    int *lost;          // a worker's mark for its parent: another rank was lost, what follows may be only a consequence
    idist_allocator mem;
    idist_logger logger;
} idist__config;

// Launchers that give each process its rank and the size in one pair of variables, inner ones first: a torchrun
// inside srun or mpirun wins over what it inherited, and mpirun over the step of Slurm that its daemon is.
typedef struct idist__launcher {
    const char *name, *rank, *size, *local_rank, *local_size, *job;
} idist__launcher;

static const idist__launcher idist__launchers[] = {
    {"idist", "IDIST_RANK", "IDIST_WORLD_SIZE", "IDIST_LOCAL_RANK", "IDIST_LOCAL_WORLD_SIZE", NULL},
    {"env", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", NULL}, // "torchrun", if it says so
    {"indexed", "JOB_COMPLETION_INDEX", "WORLD_SIZE", NULL, NULL, NULL},   // Kubernetes gives the first one
    {"horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE",
     "HOROVOD_GLOO_RENDEZVOUS_PORT"},
    {"openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
     "PMIX_NAMESPACE"},
    {"mvapich2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE",
     "MPIRUN_ID"},
    {"jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE",
     "PMIX_NAMESPACE"},
    {"pals", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "PALS_APID"},
    {"flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", NULL, "FLUX_JOB_ID"},
    {"hydra", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", NULL},
    {"slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", NULL, "SLURM_JOB_ID"}};

static idist_status idist__env_int(const char *name, int64_t lo, int64_t hi, int *value) {
    const char *text = name ? idist__os_env(name) : NULL;
    int64_t v;
    if (!text) return IDIST_OK;
    if (!idist__parse_int(text, lo, hi, &v))
        return idist__fail(IDIST_ERR_ENV, "%s=%s: expected a whole number from %lld to %lld", name, text, (long long)lo,
                           (long long)hi);
    *value = (int)v;
    return IDIST_OK;
}

// ---- Slurm ----

typedef bool (*idist__host_fn)(void *arg, const char *host); // false: enough

// One element of a host list from `at` on; `host` holds what comes before, of n bytes.
static bool idist__hosts_element(const char *at, const char *end, char *host, size_t n, idist__host_fn fn, void *arg) {
    const char *close;
    while (at < end && *at != '[' && *at != ']' && n < 255) host[n++] = *at++;
    host[n] = 0;
    if (at == end) return n && fn(arg, host);
    close = *at == '[' ? (const char *)memchr(at, ']', (size_t)(end - at)) : NULL;
    if (!close || n >= 240) return false;
    while (at < close) { // behind the bracket or a comma: "7" or "03-11", as wide as the first number
        char *rest;
        size_t width = strspn(++at, "0123456789");
        long v = strtol(at, &rest, 10), last = v;
        if (width < 1 || width > 9) return false;
        if (*rest == '-') {
            size_t digits = strspn(++rest, "0123456789");
            last = strtol(rest, NULL, 10);
            rest += digits;
            if (digits < 1 || digits > 9 || last < v || last - v > 65535) return false;
        }
        if (rest > close || (*rest != ',' && rest != close)) return false;
        for (; v <= last; v++) {
            int more = snprintf(host + n, 12, "%0*ld", (int)width, v);
            if (!idist__hosts_element(close + 1, end, host, n + (size_t)more, fn, arg)) return false;
        }
        at = rest;
    }
    return true;
}

// Slurm's compressed host lists, in the order given: "a,b[1-3,07],rack[0-1]n[1-2]". False: it is none, or fn had enough.
static bool idist__hosts_each(const char *list, idist__host_fn fn, void *arg) {
    char host[256];
    const char *at = list;
    do {
        const char *end;
        int depth = 0;
        at += strspn(at, " ");
        for (end = at; *end && (*end != ',' || depth); end++) depth += (*end == '[') - (*end == ']');
        if (!idist__hosts_element(at, end, host, 0, fn, arg)) return false;
        at = end;
    } while (*at++ == ',');
    return true;
}

static bool idist__hosts_first(void *arg, const char *host) {
    char *first = (char *)arg;
    if (!first[0]) idist__copy_text(first, 256, host);
    return true;
}

// "2(x3),1" says 2, 2, 2, 1: the entry of a node, or -1.
static int idist__slurm_tasks(const char *text, int node) {
    while (text && *text >= '0' && *text <= '9') {
        char *rest;
        long tasks = strtol(text, &rest, 10), times = 1;
        if (strncmp(rest, "(x", 2) == 0) {
            times = strtol(rest + 2, &rest, 10);
            if (times < 1 || *rest++ != ')') return -1;
        }
        if (node < times) return tasks > 0 && tasks <= 1000000 ? (int)tasks : -1;
        node -= (int)times;
        if (*rest != ',') return -1;
        text = rest + 1;
    }
    return -1;
}

// The first of these variables that is set; if none is, the last.
static const char *idist__env_either(const char *a, const char *b) { return idist__os_env(a) ? a : b; }

// Whether srun started this process. The body of a batch script and a shell of salloc have its variables too.
static bool idist__slurm_step(void) {
    int64_t id;
    return idist__parse_int(idist__os_env(idist__env_either("SLURM_STEP_ID", "SLURM_STEPID")), 0, 0xffffffefll, &id) &&
           idist__os_env("SLURM_PROCID");
}

// RANK and WORLD_SIZE inside a step of Slurm: of an inner launcher, or the same in other words. *use: they count.
static idist_status idist__slurm_compare(idist__config *c, bool *use) {
    int rank = 0, size = 1, procid = 0, tasks = 1, nodes = 1;
    const char *size_var = idist__env_either("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS");
    *use = true;
    if (idist__os_env("TORCHELASTIC_RUN_ID") || idist__os_env("LOCAL_WORLD_SIZE") || !idist__slurm_step()) return IDIST_OK;
    *use = idist__os_env("LOCAL_RANK") && idist__os_env("MASTER_ADDR") && idist__os_env("MASTER_PORT");
    if (!*use) {
        snprintf(c->notice, sizeof c->notice,
                 "RANK and WORLD_SIZE do not count inside a step of Slurm without LOCAL_RANK, MASTER_ADDR and MASTER_PORT");
        return IDIST_OK;
    }
    if (idist__env_int("RANK", 0, 1000000, &rank) != IDIST_OK || idist__env_int("WORLD_SIZE", 1, 1000000, &size) != IDIST_OK)
        return IDIST_OK; // which is said later
    idist__env_int("SLURM_PROCID", 0, 1000000, &procid);
    idist__env_int(size_var, 1, 1000000, &tasks);
    idist__env_int(idist__env_either("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES"), 1, 1000000, &nodes);
    if (nodes == 1 ? rank >= procid && size >= tasks : rank == procid && size == tasks) return IDIST_OK;
    return idist__fail(IDIST_ERR_ENV,
                       "RANK=%d and WORLD_SIZE=%d are inconsistent with SLURM_PROCID=%d and %s=%d: unset the ones that are "
                       "left over, or set IDIST_LAUNCHER=env or =slurm",
                       rank, size, procid, size_var, tasks);
}

// ---- PMI-1, the text protocol of MPICH's launcher ----

// MPI would speak it in our place, if the program has it.
#ifdef __cplusplus
extern "C" int MPI_Pcontrol(const int level, ...) __attribute__((weak));
#else
int MPI_Pcontrol(const int level, ...) __attribute__((weak));
#endif
#define IDIST__HAS_MPI (MPI_Pcontrol != NULL)

typedef struct idist__pmi {
    int fd;
    int64_t deadline_ns;
    char line[600]; // the last answer
} idist__pmi;

// A line, byte by byte: what follows is another one. What the launcher hands down is a blocking socket, so we wait first.
static bool idist__pmi_hear(idist__pmi *p) {
    size_t n = 0;
    while (n + 1 < sizeof p->line && idist__sock_wait(p->fd, POLLIN, p->deadline_ns) &&
           idist__sock_read_all(p->fd, p->line + n, 1, p->deadline_ns) && p->line[n] != '\n')
        n++;
    p->line[n] = 0;
    return n > 0;
}

// Says a line and hears the answer that begins so.
static bool idist__pmi_ask(idist__pmi *p, const char *line, const char *answer) {
    if (!idist__sock_write_all(p->fd, line, strlen(line), p->deadline_ns)) return false;
    do {
        if (!idist__pmi_hear(p)) return false;
    } while (strncmp(p->line, answer, strlen(answer)) != 0);
    return !strstr(p->line, "rc=") || strstr(p->line, "rc=0") != NULL;
}

static const char *idist__pmi_value(const idist__pmi *p, const char *name) {
    const char *at = strstr(p->line, name);
    return at ? at + strlen(name) : "";
}

// What PMI told this process, once: afterwards the launcher has taken leave of it.
static struct {
    pthread_mutex_t lock;
    int fd, size, rank; // of PMI_PORT; size 0: not asked yet
    char where[320];    // rank 0 is
} idist__pmi_known = {PTHREAD_MUTEX_INITIALIZER, -1, 0, 0, ""};

// With mpiexec -pmi-port nothing is inherited: connects, and hears who we are. The connection stays open for the rest.
static idist_status idist__pmi_introduce(idist__config *c, const char *port, const char *id) {
    idist__pmi p;
    char text[320];
    idist__addr addr;
    int value = 0;
    bool ok = true;
    pthread_mutex_lock(&idist__pmi_known.lock);
    p.deadline_ns = idist__os_deadline(c->init_timeout_ms > 0 ? c->init_timeout_ms : 5000);
    if (!idist__pmi_known.size) {
        snprintf(text, sizeof text, "tcp:%.300s", port);
        p.fd = idist__addr_parse(&addr, text) == IDIST_OK ? idist__sock_connect(&addr, p.deadline_ns) : -1;
        snprintf(text, sizeof text, "cmd=initack pmiid=%.100s\n", id);
        ok = p.fd >= 0 && idist__pmi_ask(&p, text, "cmd=initack");
        while (ok && !strstr(p.line, "debug=")) {
            ok = idist__pmi_hear(&p);
            if (sscanf(p.line, "cmd=set size=%d", &value) == 1) idist__pmi_known.size = value;
            if (sscanf(p.line, "cmd=set rank=%d", &value) == 1) idist__pmi_known.rank = value;
        }
        if (!ok) idist__os_close(&p.fd);
        idist__pmi_known.fd = p.fd;
    }
    c->launcher = "hydra";
    c->rank_var = "PMI_ID";
    c->size_var = "PMI_PORT";
    c->world_size = idist__pmi_known.size;
    c->rank = idist__pmi_known.rank;
    pthread_mutex_unlock(&idist__pmi_known.lock);
    idist__env_int("MPI_LOCALRANKID", 0, 1000000, &c->local_rank);
    idist__env_int("MPI_LOCALNRANKS", 1, 1000000, &c->local_size);
    if (ok && c->rank >= 0 && c->rank < c->world_size) return IDIST_OK;
    return idist__fail(IDIST_ERR_ENV, "PMI_PORT=%s: no launcher of MPICH answers there; unset it to run alone", port);
}

// Rank 0's place: it listens already, so that nobody else can have it.
static idist_status idist__pmi_listen(idist__config *c, char *where, size_t cap) {
    const char *host = idist__os_env("IDIST_ADDR");
    char name[256] = "";
    idist__addr addr;
    uint64_t id[2];
    idist_status s;
    idist__os_random(id, sizeof id);
    snprintf(where, cap, "unix:idist-%016llx%016llx", (unsigned long long)id[0], (unsigned long long)id[1]);
    if (c->local_size == c->world_size && c->transport != 2) {
        if ((s = idist__addr_parse(&addr, where)) != IDIST_OK) return s;
        return idist__sock_listen(&addr, where, &c->listener);
    }
    if (!c->secret.nbytes && !c->secret.insecure)
        return idist__fail(IDIST_ERR_NO_SECRET,
                           "initialize: ranks on several hosts need a shared secret: set IDIST_SECRET or "
                           "IDIST_SECRET_FILE on all ranks, or IDIST_INSECURE=1 to trust the network");
    gethostname(name, sizeof name - 1);
    if ((s = idist__addr_tcp(&addr, "0.0.0.0", 0)) != IDIST_OK) return s;
    if ((s = idist__sock_listen(&addr, "0.0.0.0", &c->listener)) != IDIST_OK) return s;
    addr.nbytes = sizeof addr.sa;
    if (getsockname(c->listener, (struct sockaddr *)&addr.sa, &addr.nbytes) != 0)
        return idist__fail_errno("getsockname", errno);
    snprintf(where, cap, "tcp:%s:%d", host ? host : name, idist__addr_port(&addr));
    return IDIST_OK;
}

// Rank 0 tells the others where it is.
IDIST__UNUSED static idist_status idist__pmi_meet(idist__config *c) {
    char kvs[256], text[900], where[320] = "-";
    idist__pmi p;
    idist_status s = IDIST_OK;
    bool ok = true;
    memset(&p, 0, sizeof p);
    p.deadline_ns = c->init_timeout_ms < 0 ? IDIST__FOREVER : idist__os_deadline(c->init_timeout_ms);
    pthread_mutex_lock(&idist__pmi_known.lock);
    p.fd = idist__pmi_known.fd;
    if (!idist__pmi_known.where[0]) {
        if (c->rank == 0 && (s = idist__pmi_listen(c, where, sizeof where)) != IDIST_OK) snprintf(where, sizeof where, "-");
        ok = (p.fd >= 0 || idist__env_int("PMI_FD", 0, INT32_MAX, &p.fd) == IDIST_OK) &&
             idist__pmi_ask(&p, "cmd=init pmi_version=1 pmi_subversion=1\n", "cmd=response_to_init") &&
             idist__pmi_ask(&p, "cmd=get_my_kvsname\n", "cmd=my_kvsname");
        snprintf(kvs, sizeof kvs, "%.*s", (int)strcspn(idist__pmi_value(&p, "kvsname="), " "),
                 idist__pmi_value(&p, "kvsname="));
        snprintf(text, sizeof text, "cmd=put kvsname=%s key=idist value=%s\n", kvs, where);
        if (c->rank == 0) ok = ok && idist__pmi_ask(&p, text, "cmd=put_result");
        ok = ok && idist__pmi_ask(&p, "cmd=barrier_in\n", "cmd=barrier_out");
        snprintf(text, sizeof text, "cmd=get kvsname=%s key=idist\n", kvs);
        ok = ok && idist__pmi_ask(&p, text, "cmd=get_result");
        idist__copy_text(where, sizeof where, ok ? idist__pmi_value(&p, "value=") : "-");
        if (ok && idist__pmi_ask(&p, "cmd=finalize\n", "cmd=finalize_ack") && where[0] != '-')
            idist__copy_text(idist__pmi_known.where, sizeof idist__pmi_known.where, where);
    }
    idist__copy_text(c->where, sizeof c->where, idist__pmi_known.where);
    pthread_mutex_unlock(&idist__pmi_known.lock);
    if (s != IDIST_OK || c->where[0]) return s;
    if (ok) return idist__fail(IDIST_ERR_PEER_LOST, "initialize: rank 0 could not listen; its own message says why");
    return idist__fail(IDIST_ERR_TIMEOUT, "initialize: not all ranks came to the barrier of the launcher (PMI) within %d ms",
                       c->init_timeout_ms);
}

// ---- which launcher ----

// Whether this launcher started us; its variables as they are called here. Half a pair is an error: guessing the rest would
// start N worlds of 1.
static idist_status idist__launch_match(idist__config *c, idist__launcher *l, bool asked, bool *match) {
    bool env = strcmp(l->name, "env") == 0, slurm = strcmp(l->name, "slurm") == 0, rank, size;
    const char *missing;
    *match = false;
    if (slurm) l->size = idist__env_either(l->size, "SLURM_NTASKS");
    rank = idist__os_env(l->rank) != NULL;
    size = idist__os_env(l->size) != NULL;
    missing = rank ? l->size : l->rank;
    if (slurm && !idist__slurm_step()) {
        rank = size = false;
        missing = idist__env_either("SLURM_STEP_ID", "SLURM_STEPID");
    }
    if (strcmp(l->name, "hydra") == 0 && !idist__os_env(l->local_rank) && idist__slurm_step() && !asked) return IDIST_OK;
    if (env && !rank && idist__os_env("JOB_COMPLETION_INDEX")) return IDIST_OK;
    if (strcmp(l->name, "indexed") == 0 && !(rank && size)) rank = size = false; // pods without a size are no world
    if (strcmp(l->name, "pals") == 0 && !rank) size = false;                     // PMI_SIZE is of others as well
    if (asked && strcmp(l->name, "hydra") == 0 && !rank && !size && idist__os_env("PMI_PORT")) return IDIST_OK;
    if (asked && !(rank && size))
        return idist__fail(IDIST_ERR_ENV, "IDIST_LAUNCHER=%s, but %s is not set: it did not start this process",
                           idist__os_env("IDIST_LAUNCHER"), missing);
    if (rank != size)
        return idist__fail(IDIST_ERR_ENV, "%s is set but %s is not: a launcher sets both; unset it to run alone",
                           rank ? l->rank : l->size, missing);
    *match = rank;
    return env && rank && !asked ? idist__slurm_compare(c, match) : IDIST_OK;
}

static idist_status idist__launch_numbers(idist__config *c, const idist__launcher *l) {
    int node = 0, nodes = 0;
    idist_status s;
    if ((s = idist__env_int(l->size, 1, 1000000, &c->world_size)) != IDIST_OK) return s;
    if ((s = idist__env_int(l->rank, 0, 1000000, &c->rank)) != IDIST_OK) return s;
    if ((s = idist__env_int(l->local_rank, 0, 1000000, &c->local_rank)) != IDIST_OK) return s;
    if ((s = idist__env_int(l->local_size, 1, 1000000, &c->local_size)) != IDIST_OK) return s;
    if (strcmp(l->name, "slurm") == 0) {
        idist__env_int("SLURM_NODEID", 0, 1000000, &node);
        c->local_size =
            idist__slurm_tasks(idist__os_env(idist__env_either("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")), node);
        idist__env_int(idist__env_either("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES"), 1, 1000000, &nodes);
        if (nodes == 1) c->local_size = c->world_size;
    }
    if (c->rank >= c->world_size)
        return idist__fail(IDIST_ERR_ENV, "%s=%d is not below %s=%d", l->rank, c->rank, l->size, c->world_size);
    if (c->local_rank >= (c->local_size > 0 ? c->local_size : c->world_size))
        return idist__fail(IDIST_ERR_ENV, "%s=%d is not below %s=%d", l->local_rank, c->local_rank,
                           c->local_size > 0 && l->local_size ? l->local_size : l->size,
                           c->local_size > 0 ? c->local_size : c->world_size);
    if (c->local_size > c->world_size)
        return idist__fail(IDIST_ERR_ENV, "%s=%d is more than %s=%d", l->local_size ? l->local_size : l->name, c->local_size,
                           l->size, c->world_size);
    return IDIST_OK;
}

// TensorFlow's description of a cluster: the chief, if there is one, then the workers are ranks. No JSON parser: it counts
// the strings of the lists that it knows.
static int idist__tf_hosts(const char *text, const char *list, char *first) {
    const char *at = strstr(text, list);
    int n = 0;
    while (at && at[strlen(list) + strspn(at + strlen(list), " \t\n")] != ':') at = strstr(at + 1, list); // a value
    at = at ? strpbrk(at, "[]{}") : NULL;
    if (!at || *at != '[') return 0;
    for (at = strpbrk(at + 1, "\"]"); at && *at == '"'; at = strpbrk(at, "\"]")) {
        size_t nbytes = strcspn(++at, "\"");
        if (!n++ && !first[0] && nbytes < 256) snprintf(first, nbytes + 1, "%s", at);
        at += nbytes + (at[nbytes] == '"');
    }
    return n;
}

static idist_status idist__launch_tf(idist__config *c, const char *text) {
    char first[256] = "", kind[32] = "", host[256];
    int nchiefs = idist__tf_hosts(text, "\"chief\"", first) + idist__tf_hosts(text, "\"master\"", first), index = -1,
        port = 0;
    int nworkers = idist__tf_hosts(text, "\"worker\"", first);
    const char *task = strstr(text, "\"task\""), *type = task ? strstr(task, "\"type\"") : NULL;
    const char *number = task ? strstr(task, "\"index\"") : NULL;
    bool worker, chief;
    c->launcher = "tf_config";
    c->rank_var = c->size_var = "TF_CONFIG";
    if (type) sscanf(type + 6, " : \"%31[a-z]\"", kind);
    if (number) sscanf(number + 7, " : %9d", &index);
    worker = strcmp(kind, "worker") == 0;
    chief = strcmp(kind, "chief") == 0 || strcmp(kind, "master") == 0;
    if (!(worker || chief) || index < 0 || index >= (worker ? nworkers : nchiefs))
        return idist__fail(IDIST_ERR_ENV,
                           "TF_CONFIG: task %s %d is none of its %d chiefs and %d workers, which are the ranks", kind, index,
                           nchiefs, nworkers);
    c->world_size = nchiefs + nworkers;
    c->rank = worker ? nchiefs + index : index;
    if (!idist__parse_host_port(first, host, sizeof host, &port) || !port)
        return idist__fail(IDIST_ERR_ENV, "TF_CONFIG: \"%s\", where rank 0 is, is no host:port", first);
    snprintf(c->where, sizeof c->where, "tcp:%s", first);
    return IDIST_OK;
}

// Takes the first launcher that fits, or the one that IDIST_LAUNCHER names.
static idist_status idist__launch_detect(idist__config *c) {
    const char *asked = idist__os_env("IDIST_LAUNCHER"), *tf = idist__os_env("TF_CONFIG");
    const char *port = idist__os_env("PMI_PORT"), *id = idist__os_env("PMI_ID");
    bool match = false, known = !asked || strcmp(asked, "none") == 0;
    size_t i;
    idist_status s;
    for (i = 0; i < IDIST__COUNT_OF(idist__launchers); i++) {
        idist__launcher l = idist__launchers[i];
        bool torchrun = i == 1 && idist__os_env("TORCHELASTIC_RUN_ID");
        if (asked && strcmp(asked, l.name) != 0 && !(i == 1 && strcmp(asked, "torchrun") == 0)) continue;
        known = true;
        s = idist__launch_match(c, &l, asked != NULL, &match);
        if (!match && s == IDIST_OK) continue;
        c->launcher = torchrun ? "torchrun" : l.name;
        c->rank_var = l.rank;
        c->size_var = l.size;
        c->job_var = l.job;
        return s == IDIST_OK ? idist__launch_numbers(c, &l) : s;
    }
    if (!known && strcmp(asked, "tf_config") != 0)
        return idist__fail(
            IDIST_ERR_ENV,
            "IDIST_LAUNCHER=%s: use none, idist, env, torchrun, indexed, horovodrun, openmpi, mvapich2, jsrun, "
            "pals, flux, hydra, slurm or tf_config",
            asked);
    if (asked && known && strcmp(asked, "hydra") != 0) return IDIST_OK;
    if (asked && !known && !tf) return idist__fail(IDIST_ERR_ENV, "IDIST_LAUNCHER=tf_config, but TF_CONFIG is not set");
    if (port && id && (!asked || known) && !IDIST__HAS_MPI) return idist__pmi_introduce(c, port, id);
    if (asked && known) return IDIST_OK;
    if (tf && (asked || strstr(tf, "\"cluster\""))) return idist__launch_tf(c, tf);
    if (idist__os_env("PMIX_RANK") && idist__os_env("PMIX_NAMESPACE"))
        return idist__fail(
            IDIST_ERR_ENV,
            "PMIX_RANK is set, but nothing in the environment says how many ranks there are: set IDIST_RANK and "
            "IDIST_WORLD_SIZE, or IDIST_LAUNCHER=none to run alone");
    return IDIST_OK;
}

static idist_status idist__launch_rank(idist__config *c, const idist_desc *d) {
    c->rank = 0;
    c->world_size = 1;
    c->local_rank = c->local_size = -1;
    c->launcher = "none";
    if (d->world_size == 0 && d->rank == 0) return idist__launch_detect(c);
    if (d->world_size < 1 || d->rank < 0 || d->rank >= d->world_size)
        return idist__fail(IDIST_ERR_ARG, "rank %d of world_size %d: both are needed, and 0 <= rank < world_size", d->rank,
                           d->world_size);
    c->launcher = "explicit";
    c->rank = d->rank;
    c->world_size = d->world_size;
    return IDIST_OK;
}

// Ranks that share a loopback address share a host, and need no TCP: the same address names a local socket, together with
// the run, since a port that nobody listens at may be that of two jobs.
static void idist__launch_where_tcp(idist__config *c, const char *host, int port) {
    const char *restart = idist__os_env("TORCHELASTIC_RESTART_COUNT"), *run = idist__os_env("TORCHELASTIC_RUN_ID");
    if (c->transport != 2 && (idist__sock_host_is_loopback(host) || c->local_size == c->world_size))
        snprintf(c->where, sizeof c->where, "unix:idist-%lu-%d-%s-%08x", (unsigned long)geteuid(), port,
                 restart ? restart : "0", run ? (unsigned)idist__hash(run, strlen(run)) : 0u);
    else snprintf(c->where, sizeof c->where, strchr(host, ':') ? "tcp:[%s]:%d" : "tcp:%s:%d", host, port);
}

// All ranks are on this host and nobody has said where they meet: at a place that belongs to the job.
static void idist__launch_where_job(idist__config *c) {
    const char *job = c->job_var ? idist__os_env(c->job_var) : NULL;
    const char *step =
        strcmp(c->launcher, "slurm") == 0 ? idist__os_env(idist__env_either("SLURM_STEP_ID", "SLURM_STEPID")) : "";
    char text[600];
    uint64_t name;
    if (job) snprintf(text, sizeof text, "%s %.300s %s", c->launcher, job, step);
    else snprintf(text, sizeof text, "%s %ld", c->launcher, (long)getppid()); // the launcher's part on this host
    name = idist__hash(text, strlen(text));
    if (c->transport == 2) snprintf(c->where, sizeof c->where, "tcp:127.0.0.1:%d", 15000 + (int)(name % 10000));
    else snprintf(c->where, sizeof c->where, "unix:idist-%lu-%016llx", (unsigned long)geteuid(), (unsigned long long)name);
}

// The first host of the step, and a port that follows from job and step: where rank 0 is, unless ranks were placed in an
// order of the user's.
static idist_status idist__launch_where_slurm(idist__config *c) {
    const char *var = idist__env_either("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), *list = idist__os_env(var);
    const char *order = idist__os_env("SLURM_DISTRIBUTION");
    char host[256] = "";
    int job = 0, step = 0;
    if (!list || (order && (strncmp(order, "arbitrary", 9) == 0 || strncmp(order, "plane", 5) == 0))) return IDIST_OK;
    if (!idist__hosts_each(list, idist__hosts_first, host) || !host[0])
        return idist__fail(IDIST_ERR_ENV, "%s=%s is no list of hosts", var, list);
    idist__env_int("SLURM_JOB_ID", 0, INT32_MAX, &job);
    idist__env_int(idist__env_either("SLURM_STEP_ID", "SLURM_STEPID"), 0, INT32_MAX, &step);
    idist__launch_where_tcp(c, host, 15000 + (job % 10000 + step % 10000) % 10000);
    return IDIST_OK;
}

static idist_status idist__launch_where_env(idist__config *c, const idist_desc *d) {
    const char *host = d->master_addr ? d->master_addr : idist__os_env("MASTER_ADDR"), *text = idist__os_env("MASTER_PORT"),
               *agent;
    bool local = c->local_size == c->world_size, own = c->job_var || strcmp(c->launcher, "hydra") == 0;
    int port = 29500;
    idist_status s = idist__env_int("MASTER_PORT", 1, 65535, &port);
    if (d->master_port) {
        if (d->master_port < 0 || d->master_port > 65535)
            return idist__fail(IDIST_ERR_ARG, "master_port %d is not between 1 and 65535", d->master_port);
        port = d->master_port;
    } else if (s != IDIST_OK) {
        return s;
    }
    if (host && !d->master_port && !text)
        return idist__fail(
            d->master_addr ? IDIST_ERR_ARG : IDIST_ERR_ENV,
            "MASTER_ADDR (desc.master_addr) is set but MASTER_PORT (desc.master_port) is not: give rank 0's port as well");
    agent = idist__os_env("TORCHELASTIC_USE_AGENT_STORE");
    if (!d->master_addr && !d->master_port && !local && host && agent && strcmp(agent, "True") == 0) {
        snprintf(c->where, sizeof c->where, strchr(host, ':') ? "torch:[%s]:%d" : "torch:%s:%d", host, port);
        return IDIST_OK; // the agent listens there, and nobody else can
    }
    if (!host && !d->master_port && !text && c->rank_var && strcmp(c->launcher, "hydra") == 0 && !IDIST__HAS_MPI &&
        (idist__os_env("PMI_FD") || idist__os_env("PMI_PORT"))) {
        idist__copy_text(c->where, sizeof c->where, "pmi:");
        return IDIST_OK;
    }
    if (!host && own && local && !d->master_port && !text) {
        idist__launch_where_job(c);
        return IDIST_OK;
    }
    if (!host && !local && strcmp(c->launcher, "slurm") == 0) return idist__launch_where_slurm(c);
    if (!host && !local) return IDIST_OK; // a backend that needs it will say so
    idist__launch_where_tcp(c, host ? host : "127.0.0.1", port);
    return IDIST_OK;
}

static idist_status idist__launch_where(idist__config *c, const idist_desc *d) {
    const char *init = d->init_method ? d->init_method : idist__os_env("IDIST_INIT_METHOD");
    char host[256];
    int port;
    c->store = d->store;
    if (c->world_size == 1 || c->store || (c->where[0] && !init)) return IDIST_OK;
    if (!init || strcmp(init, "env://") == 0) return idist__launch_where_env(c, d);
    if (strncmp(init, "file:///", 8) == 0 && strlen(init) < sizeof c->where) {
        snprintf(c->where, sizeof c->where, "file:%s", init + 7);
        return IDIST_OK;
    }
    if (strncmp(init, "tcp://", 6) == 0 && idist__parse_host_port(init + 6, host, sizeof host, &port) && port > 0) {
        int first = atoi(host); // 224 to 239 begin a multicast group
        if (first >= 224 && first < 240 && strspn(host, "0123456789.") == strlen(host)) {
            const char *run = idist__os_env("TORCHELASTIC_RUN_ID"), *restart = idist__os_env("TORCHELASTIC_RESTART_COUNT");
            snprintf(c->where, sizeof c->where, "cast:%s:%d/%d %.200s %.20s", host, port, c->world_size, run ? run : "",
                     restart ? restart : "0");
            return IDIST_OK;
        }
        idist__launch_where_tcp(c, host, port);
        return IDIST_OK;
    }
    return idist__fail(
        d->init_method ? IDIST_ERR_ARG : IDIST_ERR_ENV,
        "%s \"%s\" is none of env://, tcp://host:port (a port from 1 to 65535), tcp://239.x.y.z:port, file:///path",
        d->init_method ? "init_method" : "IDIST_INIT_METHOD", init);
}

static idist_status idist__launch_choice(const char *field, const char *var, const char *names, int *choice) {
    const char *text = field ? field : idist__os_env(var), *at = names;
    size_t n = text ? strlen(text) : 0;
    for (*choice = 0; text && at; ++*choice) {
        if (strncmp(at, text, n) == 0 && (at[n] == ',' || !at[n])) return IDIST_OK;
        if ((at = strchr(at, ',')) != NULL) at += 2;
    }
    *choice = 0;
    if (!text) return IDIST_OK;
    if (field) return idist__fail(IDIST_ERR_ARG, "desc: \"%s\" (%s) is none of %s", text, var, names);
    return idist__fail(IDIST_ERR_ENV, "%s=%s: use one of %s", var, text, names);
}

static idist_status idist__launch_timeout(int field, const char *var, int fallback, int *value) {
    idist_status s;
    *value = 0;
    if (field) *value = field;
    else if ((s = idist__env_int(var, -1, INT32_MAX, value)) != IDIST_OK) return s;
    if (!*value) *value = fallback;
    if (*value < 0) *value = -1;
    return IDIST_OK;
}

// The one place where defaults are filled in.
static idist_status idist__launch_config(idist__config *c, const idist_desc *desc) {
    idist_desc d;
    idist_status s;
    const char *text;
    int mib = 0, check = 1, priority = 0;
    memset(c, 0, sizeof *c);
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    c->listener = -1;
    c->mem = d.allocator;
    c->logger = d.logger;
    if (!c->mem.alloc_fn != !c->mem.free_fn)
        return idist__fail(IDIST_ERR_ARG, "allocator: give both alloc_fn and free_fn, or none");
    if ((s = idist__launch_choice(d.transport, "IDIST_TRANSPORT", "auto, socket, tcp", &c->transport)) ||
        (s = idist__launch_choice(d.algorithm, "IDIST_ALGO", "auto, latency, bandwidth, chunked", &c->algorithm)) ||
        (s = idist__launch_choice(d.bind, "IDIST_BIND", "none, core", &c->bind)) ||
        (s = idist__launch_choice(d.device_backend, "IDIST_DEVICE_BACKEND", "auto, nccl, ipc, staged",
                                  &c->device_backend)) ||
        (s = idist__launch_timeout(d.timeout_ms, "IDIST_TIMEOUT_MS", 30 * 60 * 1000, &c->timeout_ms)) ||
        (s = idist__launch_timeout(d.init_timeout_ms, "IDIST_INIT_TIMEOUT_MS", 5 * 60 * 1000, &c->init_timeout_ms)) ||
        (s = idist__env_int("IDIST_SHM_MIB", 0, 1024, &mib)) || (s = idist__env_int("IDIST_CHECK", 0, 1, &check)) ||
        (s = idist__env_int("IDIST_HIGH_PRIORITY_STREAM", 0, 1, &priority)))
        return s;
    c->unchecked = !check;
    c->mpi_comm = d.mpi_comm;
    c->shm_asked = d.shm_nbytes || mib;
    c->shm_nbytes = d.shm_nbytes ? d.shm_nbytes : (size_t)(mib ? mib : IDIST__SHM_MIB) << 20;
    text = d.host_id ? d.host_id : idist__os_env("IDIST_HOSTID");
    if (text) idist__copy_text(c->host_id, sizeof c->host_id, text);
    c->nccl_comm = d.nccl_comm;
    c->nccl_config = d.nccl_config;
    c->high_priority = d.high_priority_stream || priority;
    text = d.device ? d.device : idist__os_env("IDIST_DEVICE");
    if (text) idist__copy_text(c->device, sizeof c->device, text);
    text = d.backend ? d.backend : idist__os_env("IDIST_BACKEND");
    if (text) idist__copy_text(c->backends, sizeof c->backends, text);
    if ((s = idist__secret_find(&c->secret, d.secret, d.secret_nbytes)) != IDIST_OK) return s;
    if ((s = idist__launch_rank(c, &d)) != IDIST_OK) return s;
    return idist__launch_where(c, &d);
}

// What ranks of one host have in common.
IDIST__UNUSED static uint64_t idist__host_key(const idist__config *cfg) {
    char text[256];
    struct stat st;
    ssize_t n;
    int fd;
    if (cfg->host_id[0]) return idist__hash(cfg->host_id, strlen(cfg->host_id));
    memset(text, 0, sizeof text);
    fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        do n = read(fd, text, 64);
        while (n < 0 && errno == EINTR);
        close(fd);
    }
    if (!text[0] && gethostname(text, 64) != 0) text[0] = '?';
    // Local sockets live in a network namespace and are checked against the user.
    if (stat("/proc/self/ns/net", &st) == 0) idist__append(text, sizeof text, "/%llu", (unsigned long long)st.st_ino);
    idist__append(text, sizeof text, "/%lu", (unsigned long)geteuid());
    return idist__hash(text, strlen(text));
}

//------------------------------------------------------------------------------
// [impl:world]  worlds, groups and tasks: what the call path and the backends share
// uses os err mem log type launch . used by call self life and the backends
//
// One mutex per world guards everything in it. A caller that waits drives the backend itself; when several wait, one
// drives (w->driving) and the others sleep on w->changed until it completes their task or gives the wheel up.
// Requests that nobody waits for are driven by a progress thread, which exists from the first request on and steps
// back whenever a caller blocks.
//------------------------------------------------------------------------------

typedef enum idist__kind {
    IDIST__NONE,
    IDIST__ALL_REDUCE,
    IDIST__REDUCE,
    IDIST__BROADCAST,
    IDIST__BARRIER,
    IDIST__ALL_GATHER,
    IDIST__GATHER,
    IDIST__SCATTER,
    IDIST__REDUCE_SCATTER,
    IDIST__ALL_TO_ALL,
    IDIST__SCAN,
    IDIST__EXSCAN,
    IDIST__ALL_GATHERV,
    IDIST__GATHERV,
    IDIST__SCATTERV,
    IDIST__ALL_TO_ALLV,
    IDIST__SEND,
    IDIST__RECV,
    // Names of calls that are made of the ones above; they label the fingerprint.
    IDIST__BROADCAST_BYTES,
    IDIST__ALL_GATHER_BYTES,
    IDIST__NEW_GROUP,
    IDIST__SPLIT,
    IDIST__ONE_RANK_FIRST,
    IDIST__ONE_RANK_ONLY,
    IDIST__FINALIZE,
    IDIST__FIRST_DEVICE_CALL,
    IDIST__KIND_COUNT
} idist__kind;

static const char *const idist__kind_names[IDIST__KIND_COUNT] = {
    "nothing",  "all_reduce",     "reduce",        "broadcast", "barrier",          "all_gather",       "gather",
    "scatter",  "reduce_scatter", "all_to_all",    "scan",      "exscan",           "all_gatherv",      "gatherv",
    "scatterv", "all_to_allv",    "send",          "recv",      "broadcast_bytes",  "all_gather_bytes", "new_group",
    "split",    "one_rank_first", "one_rank_only", "finalize",  "first_device_call"};

typedef struct idist__user_op {
    idist_op_fn fn;
    void *arg;
    double factor; // premultiplied sum, when fn is NULL
    bool used, commutative;
} idist__user_op;

// An operation as data.
typedef struct idist__call {
    idist__kind kind;  // what is run
    idist__kind label; // what the user called
    const void *send;
    void *recv;
    size_t count; // as in the API; v-forms: the own contribution
    const size_t *sendcounts, *senddispls, *recvcounts, *recvdispls;
    idist_dtype dtype;
    idist_op op;
    int root; // or the peer of send and recv; -1 where there is none
    int tag;
    idist_recv_info *info;
    uint64_t check;             // what must be equal on all ranks besides: count, or a hash of counts
    const idist__user_op *user; // the op of a call that is a part of another one: it may be freed meanwhile
} idist__call;

// What two ranks compare about a call, 24 bytes of every message.
typedef struct idist__print {
    uint8_t kind, dtype, op, algorithm; // the last with IDIST__ON_DEVICE
    int32_t root;
    uint64_t check; // see idist__call; of a send: its count
    uint32_t seq;   // number of the call within its group
    uint32_t whole; // of a call that is a part of another one: the number of that; else 0
} idist__print;

enum { IDIST__ON_DEVICE = 0x80 }; // a collective on device memory

typedef enum idist__driver { IDIST__DRIVER_NONE, IDIST__DRIVER_CALLER, IDIST__DRIVER_THREAD } idist__driver;

struct idist__task {          // one operation under way
    idist__task *next, *prev; // in w->tasks while it runs
    idist__task *chain;       // in the list of an idist_group_begin
    idist__task *older;       // in w->all_tasks
    idist_group *group;
    idist__call call;
    idist_status status;
    bool done, async;
    bool patient;   // its deadline is the group's: the caller does not expect to come back without a result
    bool announced; // the others were told that we wait in this call
    bool warned;    // a log line said that it takes long
    uint32_t seq;
    idist__print whole;  // what it is a part of; kind 0: it is a call of its own
    uint16_t whole_past; // digest of the calls before that one
    int timeout_ms;
    int64_t started_ns, deadline_ns;
    bool on_device; // the device backend sees to it
    bool away;      // the backend has not got it, or is through with it: it waits for the device
    bool followed;  // idist_wait_stream needs not wait for the host any more
    bool detached;  // nobody waits for it: it goes when it is done
    bool pinned;    // a thread works on it without the lock, ...
    bool freed;     // ... and frees it
    void *stream;   // of the device: what it holds comes first
    void *impl;     // the backend's part, behind this struct
    void *lane;     // its place in the timeline, or NULL
    char text[512]; // why it failed; not cleared from here on
    void *device;   // the device backend's part; stays with the task
};

struct idist_group {
    idist__world *w;
    idist_group *next;
    uint64_t ctx; // the same on all members, unique in the world
    int rank;     // -1: not a member
    int size;
    int *ranks;   // world rank of each member
    uint32_t seq; // collectives started
    uint32_t nchildren;
    int ntasks;          // running
    int nrequests;       // not yet waited for
    int ndetached;       // running, and nobody waits for them; or pinned
    idist_status status; // not IDIST_OK: unusable since ...
    char cause[400];     // ... this happened
    bool freed;
    int64_t asked_ns;         // when the members were last asked whether they are still there; 0: never
    int64_t asked_until_ns;   // the answers are used then; nobody asks again before
    bool inner;               // of a backend's own making
    bool flushed;             // the others know of the failure, as far as we can tell
    idist_group *node;        // the members on this host, made when one_rank_first asks for it
    const idist_group *maker; // while it is being made: if that one fails, this one never will be
    void *impl;
    void *device; // the device backend's part
};

typedef struct idist__node { // what is known of a rank
    char hostname[64];
    uint64_t host; // equal on one host
    int local_rank, local_size, node_rank;
} idist__node;

// A backend. The core calls all but claim, open, close and alloc with the world's lock held; only for the group of the
// world itself group_open and group_close come when nobody else can use the world. None but open, close, sleep, flush,
// shrink and agree may block, and sleep and flush give the lock up meanwhile; quick and tell may take a moment. Over MPI
// group_open blocks as well, and so does a collective that all ranks have entered: MPI has it then.
struct idist_backend_api {
    uint32_t abi;  // IDIST__BACKEND_ABI
    uint32_t size; // of this struct
    const char *name;
    size_t task_nbytes;  // room it wants behind each task, not cleared
    size_t group_nbytes; // and behind each group
    // Whether it serves this configuration. If not: IDIST_ERR_NO_BACKEND, *why says the reason, and the next one is asked;
    // any other failure ends the start. A backend that knows rank and size better than the launcher's variables sets them.
    idist_status (*claim)(idist__config *config, const char **why);
    // Meets the other ranks within cfg.init_timeout_ms, fills w->nodes. On failure everything it made is gone again.
    idist_status (*open)(idist__world *w);
    // Frees all. clean: everybody is through the last barrier; otherwise say good-bye to whoever listens, and go.
    void (*close)(idist__world *w, bool clean);
    idist_status (*group_open)(idist_group *g);
    void (*group_close)(idist_group *g);
    // May be NULL, both. After group_open the members exchange one number each: what a rank offers the others, and
    // what all of them offered, by rank in the group.
    uint64_t (*group_offer)(idist_group *g);
    idist_status (*group_meet)(idist_group *g, const uint64_t *offers);
    // May be NULL. Tries a blocking call without a task, while there are no tasks: true when it went through, and, if
    // it is a collective, was counted in g->seq. If not, `start` follows for the same call.
    bool (*quick)(idist_group *g, const idist__call *c);
    // Begins a task; ends it by idist__complete, now or later.
    void (*start)(idist__task *t);
    // Moves everything that can move.
    void (*progress)(idist__world *w);
    // Sleeps until something has come (and looks after it), `wake` was called, or the moment is there. One thread at
    // a time.
    void (*sleep)(idist__world *w, int64_t until_ns);
    void (*wake)(idist__world *w);
    // Forgets a task: after it no byte of its buffers is touched. False when others were already involved in it, so
    // that its group cannot go on. Collectives are forgotten only when their group has failed, after `tell`.
    bool (*cancel)(idist__task *t);
    // Tells the other members that the group failed, as g->status and g->cause say.
    void (*tell)(idist_group *g);
    // Moves on until all that was to be told is out, or the moment is there. Gives the lock up while it sleeps.
    void (*flush)(idist__world *w, int64_t until_ns);
    // Tells the other members that this rank waits in t, so that they can object, and answer that they are there. Once when
    // t has waited for a while; for the call of a group that is about to be given up once more (g->asked_ns).
    void (*announce)(idist__task *t);
    // Appends who is missing in t ("rank 3 on host b (last seen in barrier #6)"); returns how many.
    int (*missing)(idist__task *t, char *text, size_t cap);
    // May be NULL. Memory that other ranks can reach, for idist_alloc; NULL: there is none, take plain memory.
    void *(*alloc)(idist__world *w, size_t nbytes);
    // May be NULL, both: then a group that lost a rank is of no use any more. shrink lists the members of a group that
    // still live, the same list on each of them (world ranks, in the group's order); *serial becomes
    // the largest of theirs; group_open for just these follows.
    // agree makes *flag the bitwise AND over the members that live. Both work in a group that has failed.
    idist_status (*shrink)(idist_group *g, int *ranks, int *n, uint32_t *serial);
    idist_status (*agree)(idist_group *g, int *flag);
    // Of a device backend, which has only its name, `claim` and this: takes the place of the world's backend, hands on to it
    // what concerns host memory, and sets w->device, w->route and the like. Collective; without a device: w->no_device only.
    idist_status (*wrap)(idist__world *w);
};

enum { IDIST__BACKEND_ABI = 6 };
#define IDIST__SPIN_NS 500000
#define IDIST__YIELDS 1000               // half a millisecond of the waiting rank's own time
#define IDIST__YIELD_NS 5000000          // and no more than this of everybody's
#define IDIST__TIMERS_NS (5 * IDIST__MS) // who polls looks at the timers this often
#ifndef IDIST__ANNOUNCE_NS               // a test sets it so high that an announcement never wakes anybody
#define IDIST__ANNOUNCE_NS (20 * IDIST__MS)
#endif
#ifndef IDIST__WARN_NS // a test has less patience
#define IDIST__WARN_NS (60000 * IDIST__MS)
#endif
#define IDIST__ASK_NS (1000 * IDIST__MS)
enum { IDIST__FLUSH_MS = 100 };
#define IDIST__WATCH_NS (10 * IDIST__MS)

struct idist__world {
    idist_group group; // all ranks; first, so that a world is its group
    idist__config cfg;
    idist__log log;
    const idist_backend_api *backend;
    void *impl;                            // the backend's
    idist_status (*wrap)(idist__world *w); // of the device backend that the program has, or NULL
    void *device;                          // its part, once it is there
    char device_name[32], no_device[200];  // "cuda:0"; or why there is none
    const char *device_backend;            // how it moves device memory
    // A task of the device that the backend is through with: false when it is not over yet.
    bool (*landed)(idist__task *t, idist_status status);
    // Whether a call is for the device backend; what is wrong with its buffers or its stream. The first such call of a group
    // waits in here for the other members. *detached: nobody is to wait for it.
    idist_status (*route)(idist_group *g, const idist__call *c, const idist_opts *o, bool *on_device, bool *detached);
    void (*launch)(idist__world *w);                      // hands the device what this thread's idist_group_begin held back
    idist_status (*follow)(idist__task *t, void *stream); // makes a stream wait for a `followed` task, and detaches it
    idist__task *detached;                                // those, running or done, newest first
    uint32_t ngone;                                       // of those, done
    char hostname[64];
    char backends[128]; // names of those built in
    idist__node *nodes; // of every rank
    int nnodes;
    idist_group *freed_groups;
    int *fork_guard;
    idist__user_op ops[IDIST_OP_LAST - IDIST_OP_USER + 1];

    pthread_mutex_t lock;
    pthread_cond_t changed;  // a task ended, or nobody drives any more: for callers
    pthread_cond_t work;     // there is a request and no caller: for the progress thread
    idist__task *tasks;      // running
    idist__task *idle_tasks; // to be used again
    idist__task *all_tasks;  // ever allocated; freed with the world
    int nasync;              // running, with a request
    int nblocked;            // callers inside idist__world_wait
    uint32_t nended;         // tasks that ended so far
    uint32_t nmoved;         // steps forward inside tasks
    idist__driver driver;    // who sleeps in the backend
    int64_t spin_ns;         // how long a caller polls before it sleeps; 0: it yields the core instead, a few times
    int64_t patience_ns;     // the same, as it has proved worth it lately
    uint32_t nasking;        // threads that want the lock while another one has it
    int64_t timers_ns;       // when somebody who polls looks at the timers again
    int64_t due_ns;          // before this no task has anything that idist__world_timers would do
    int ncores;              // that the ranks of this host may use together; 0: the backend could not tell
    bool thread_runs, thread_stops;
    int nforeign;    // threads that never call: those of another library; many, if only one thread may call at all
    bool threadless; // the backend bears one thread only: requests move on inside calls
    int nmaking;     // groups being made
    bool leaves;     // the end is near, and not a good one: the others are not at theirs
    bool watched;    // the device may wait for other ranks while nobody here does: the progress thread looks after them
    pthread_t thread;
};

static idist__world *idist__default_world; // set by idist_initialize, the one global

// Who follows the calls of this process, for a timeline: idist_trace.h, or nobody (NULL).
typedef struct idist__tracer {
    void (*joined)(const idist__world *w); // this thread has
    void (*left)(void);
    idist_status (*call)(idist_group *g, const idist__call *c, const idist_opts *o); // around idist__call_locked
    // Around what else waits in this thread, for one call, or several: then g and c are NULL.
    void (*begin)(const char *category, const char *name, const idist_group *g, const idist__call *c);
    void (*end)(idist_status status);
    void (*done)(const idist__task *t); // a task that has a lane is; in any thread, with the world's lock held
} idist__tracer;

static const idist__tracer *idist__tracer_set;

static const idist__tracer *idist__tracer_now(void) { return __atomic_load_n(&idist__tracer_set, __ATOMIC_ACQUIRE); }

static void idist__trace_begin(const char *category, const char *name, const idist_group *g, const idist__call *c) {
    if (idist__tracer_now()) idist__tracer_now()->begin(category, name, g, c);
}

static idist_status idist__trace_end(idist_status status) {
    if (idist__tracer_now()) idist__tracer_now()->end(status);
    return status;
}

// A child made by fork has none of its parent's worlds.
static bool idist__world_forked(const idist__world *w) { return w->fork_guard && !*w->fork_guard; }

// Whether this thread may call into a world at all.
static idist_status idist__world_enter(const char *name, const idist__world *w) {
    if (idist__world_forked(w))
        return idist__fail(IDIST_ERR_STATE,
                           "%s: this process was forked after idist_initialize; the world belongs to its parent", name);
    if (idist__me.callbacks) return idist__fail(IDIST_ERR_STATE, "%s: a callback must not call idist", name);
    return IDIST_OK;
}

static idist__world *idist__world_default(void) {
    idist__world *w = __atomic_load_n(&idist__default_world, __ATOMIC_ACQUIRE);
    return w && !idist__world_forked(w) ? w : NULL;
}

IDIST__UNUSED static idist_group *idist__world_find_group(idist__world *w, uint64_t ctx) {
    idist_group *g;
    for (g = &w->group; g; g = g->next)
        if (g->ctx == ctx && g->rank >= 0) return g;
    return NULL;
}

IDIST__UNUSED static int idist__world_rank(const idist_group *g, int rank) { return g->ranks[rank]; }

// The op of a call that names a user's.
static const idist__user_op *idist__call_user_op(const idist_group *g, const idist__call *c) {
    return c->user ? c->user : &g->w->ops[(int)c->op - IDIST_OP_USER];
}

static idist__print idist__call_print(const idist__call *c, uint32_t seq) {
    idist__print p;
    memset(&p, 0, sizeof p);
    p.kind = (uint8_t)c->label;
    p.dtype = (uint8_t)c->dtype;
    p.op = (uint8_t)c->op;
    p.root = c->root;
    p.check = c->check;
    p.seq = seq;
    return p;
}

static idist__print idist__task_print(const idist__task *t, int algorithm) {
    idist__print p = t->whole;
    if (p.kind) { // of a part the ranks compare what the user called
        p.whole = p.seq;
        p.seq = t->seq;
        p.algorithm = (uint8_t)(algorithm | (p.algorithm & IDIST__ON_DEVICE));
        return p;
    }
    p = idist__call_print(&t->call, t->seq);
    p.algorithm = (uint8_t)algorithm;
    return p;
}

static bool idist__kind_reduces(idist__kind kind) {
    return kind == IDIST__ALL_REDUCE || kind == IDIST__REDUCE || kind == IDIST__REDUCE_SCATTER || kind == IDIST__SCAN ||
           kind == IDIST__EXSCAN;
}

static bool idist__kind_is_p2p(idist__kind kind) { return kind == IDIST__SEND || kind == IDIST__RECV; }

static bool idist__kind_is_v(idist__kind kind) { return kind >= IDIST__ALL_GATHERV && kind <= IDIST__ALL_TO_ALLV; }

// "all_reduce #42 (F32 x 1024, SUM)"
static void idist__print_text(const idist__print *p, char *buf, size_t cap) {
    idist__kind kind = p->kind < IDIST__KIND_COUNT ? (idist__kind)p->kind : IDIST__NONE;
    snprintf(buf, cap, "%s", idist__kind_names[kind]);
    if (p->seq) idist__append(buf, cap, " #%u", (unsigned)(p->whole ? p->whole : p->seq));
    if (kind == IDIST__BARRIER || kind >= IDIST__SEND) return;
    idist__append(buf, cap, " (%s", idist_dtype_name((idist_dtype)p->dtype));
    if (!idist__kind_is_v(kind)) idist__append(buf, cap, " x %llu", (unsigned long long)p->check);
    if (idist__kind_reduces(kind)) idist__append(buf, cap, ", %s", idist_op_name((idist_op)p->op));
    if (p->root >= 0) idist__append(buf, cap, ", root %d", (int)p->root);
    idist__append(buf, cap, p->algorithm & IDIST__ON_DEVICE ? ", on a device)" : ")");
}

// What two ranks of the world have called, and where it differs.
IDIST__UNUSED static void idist__mismatch_text(const char *field, int a, const idist__print *of_a, int b,
                                               const idist__print *of_b, char *buf, size_t cap) {
    char first[128], second[128];
    idist__print_text(of_a, first, sizeof first);
    idist__print_text(of_b, second, sizeof second);
    snprintf(buf, cap, "the %s differs: rank %d called %s, rank %d called %s", field ? field : "sequence", a, first, b,
             second);
}

IDIST__UNUSED static void idist__counts_text(int from, uint64_t sent, int to, uint64_t expected, const char *unit,
                                             const idist__task *t, char *buf, size_t cap) {
    snprintf(buf, cap, "the count differs: rank %d sends %llu %s to rank %d, which expects %llu, in %s #%u", from,
             (unsigned long long)sent, unit, to, (unsigned long long)expected, idist__kind_names[t->call.label],
             (unsigned)t->seq);
}

// Whether a receive takes a message of a rank of the world.
IDIST__UNUSED static bool idist__recv_wants(const idist__task *t, int rank, int tag) {
    const idist__call *c = &t->call;
    return (c->root == IDIST_ANY_SOURCE || t->group->ranks[c->root] == rank) && (c->tag == IDIST_ANY_TAG || c->tag == tag);
}

// The field in which two calls differ, or NULL.
IDIST__UNUSED static const char *idist__print_difference(const idist__print *a, const idist__print *b) {
    if (a->kind != b->kind) return "operation";
    if (a->dtype != b->dtype) return "dtype";
    if (a->op != b->op) return "op";
    if (a->root != b->root) return "root";
    if (a->check != b->check) return a->kind == IDIST__NEW_GROUP ? "group" : "count";
    if ((a->algorithm ^ b->algorithm) & IDIST__ON_DEVICE) return "memory";
    if (a->algorithm != b->algorithm) return "algorithm";
    return NULL;
}

static void idist__task_text(const idist__task *t, char *buf, size_t cap) {
    const idist__call *c = &t->call;
    if (c->kind == IDIST__SEND || c->kind == IDIST__RECV) {
        snprintf(buf, cap, "%s (%s x %zu, %s ", idist__kind_names[c->label], idist_dtype_name(c->dtype), c->count,
                 c->kind == IDIST__SEND ? "to" : "from");
        if (c->root == IDIST_ANY_SOURCE) idist__append(buf, cap, "any rank");
        else idist__append(buf, cap, "rank %d", c->root);
        if (c->tag == IDIST_ANY_TAG) idist__append(buf, cap, ", any tag)");
        else idist__append(buf, cap, ", tag %d)", c->tag);
    } else {
        idist__print p = idist__task_print(t, 0);
        idist__print_text(&p, buf, cap);
    }
}

// Two ranks wait for each other for ever: `peer` in the call of this print, of the same group or another one.
IDIST__UNUSED static void idist__deadlock_text(const idist__task *ours, int peer, const idist__print *print, bool same_group,
                                               char *text, size_t cap) {
    char a[128], b[128];
    int me = ours->group->w->group.rank;
    bool p2p = idist__kind_is_p2p(ours->call.kind) && idist__kind_is_p2p((idist__kind)print->kind);
    idist__task_text(ours, a, sizeof a);
    idist__print_text(print, b, sizeof b);
    snprintf(text, cap, "rank %d waits for rank %d in %s, rank %d waits for rank %d in %s%s: ", me, peer, a, peer, me, b,
             same_group ? "" : " of another group");
    if (p2p) idist__append(text, cap, "a deadlock; use idist_sendrecv, or requests");
    else idist__append(text, cap, "the %s differs", same_group ? "operation" : "group");
}

// For `missing`: a member that has not come, and where it was seen last; the first eight of them.
IDIST__UNUSED static void idist__missing_rank(const idist_group *g, int rank, const idist__print *seen, int nth, char *text,
                                              size_t cap) {
    char last[128];
    if (nth >= 8) return;
    idist__append(text, cap, "%srank %d on %s", nth ? ", " : "", g->ranks[rank], g->w->nodes[g->ranks[rank]].hostname);
    if (!seen->seq) return;
    idist__print_text(seen, last, sizeof last);
    idist__append(text, cap, " (last seen in %s)", last);
}

// And the other side of a send or receive.
IDIST__UNUSED static int idist__missing_peer(const idist__task *t, char *text, size_t cap) {
    const idist_group *g = t->group;
    if (t->call.root == IDIST_ANY_SOURCE) idist__append(text, cap, "a message from any rank");
    else
        idist__append(text, cap, "rank %d on %s, which %s", g->ranks[t->call.root],
                      g->w->nodes[g->ranks[t->call.root]].hostname,
                      t->call.kind == IDIST__SEND ? "does not receive it" : "sent nothing that fits");
    return 1;
}

// Ends a task. text says why when it failed, without the name of the operation.
static void idist__complete(idist__task *t, idist_status status, const char *text) {
    idist__world *w = t->group->w;
    if (t->done || (t->on_device && !w->landed(t, status))) return;
    t->status = status;
    if (status != IDIST_OK) {
        idist__task_text(t, t->text, sizeof t->text);
        idist__append(t->text, sizeof t->text, ": %s", text);
    }
    if (t->prev) t->prev->next = t->next;
    else w->tasks = t->next;
    if (t->next) t->next->prev = t->prev;
    t->next = t->prev = NULL;
    t->done = true;
    w->nended++;
    t->group->ntasks--;
    if (t->detached) t->group->ndetached--, w->ngone++;
    if (t->async) w->nasync--;
    if (t->lane) idist__tracer_now()->done(t);
    if (w->nblocked) pthread_cond_broadcast(&w->changed);
}

// For a thread that has moved the backend or ended tasks while another one drives. It may have consumed the event that the
// driver is sleeping on, so the driver must be woken explicitly.
static void idist__world_rouse(idist__world *w) {
    if (w->driver != IDIST__DRIVER_NONE) w->backend->wake(w);
}

// The group fails, for this reason, once: its tasks end, later calls are refused, and the others are told, also when
// we were told ourselves: whoever sees our connection end after this must have heard the reason from us, or takes us
// for the cause.
static void idist__group_fail(idist_group *g, idist_status status, const char *cause) {
    idist__world *w = g->w;
    idist_group *child;
    idist__task *t, *next;
    if (g->status != IDIST_OK) return;
    g->status = status;
    idist__copy_text(g->cause, sizeof g->cause, cause);
    if (!g->inner) idist__log_print(&w->log, IDIST_LOG_WARN, "%s: %s", idist_status_name(status), cause);
    if (w->cfg.lost && (status == IDIST_ERR_PEER_LOST || status == IDIST_ERR_ABORTED))
        __atomic_store_n(w->cfg.lost, 1, __ATOMIC_RELEASE);
    w->backend->tell(g);
    for (t = w->tasks; t; t = next) {
        next = t->next;
        if (t->group != g) continue;
        w->backend->cancel(t);
        idist__complete(t, status, g->cause);
        next = w->tasks; // the backend may have ended others
    }
    for (child = w->group.next; child; child = child->next)
        if (child->maker == g) idist__group_fail(child, status, cause);
    idist__world_rouse(w); // the call that another thread sleeps for may be one of those that ended
}

// A rank is gone: every group with it fails.
IDIST__UNUSED static void idist__world_lost(idist__world *w, int rank, const char *how) {
    idist_group *g;
    char cause[400];
    int i;
    snprintf(cause, sizeof cause, "rank %d on %s was lost: %s", rank, w->nodes[rank].hostname, how);
    for (g = &w->group; g; g = g->next)
        for (i = 0; i < g->size && g->rank >= 0; i++)
            if (g->ranks[i] == rank) idist__group_fail(g, IDIST_ERR_PEER_LOST, cause);
}

// The call this rank is blocked in, if that is all it does. Its parts do not count.
IDIST__UNUSED static idist__task *idist__world_only_call(const idist__world *w) {
    idist__task *t, *only = NULL;
    for (t = w->tasks; t; t = t->next) {
        if (t->group->inner) continue;
        if (only || t->async || !t->patient) return NULL;
        only = t;
    }
    return only && idist__os_nthreads() - w->nforeign <= (w->thread_runs ? 2 : 1) ? only : NULL;
}

// Before a call is given up, or a warning says that it waits, its members are asked once more: a rank that has entered it
// may have been stopped since. They have a second to answer, or half of the time-out.
static int64_t idist__task_ask_at(const idist__task *t, int64_t *until_ns) {
    int64_t half = t->timeout_ms < 0 ? IDIST__ASK_NS : t->timeout_ms * IDIST__MS / 2;
    int64_t end = t->warned ? IDIST__FOREVER : t->started_ns + IDIST__WARN_NS;

    if (t->deadline_ns < end) end = t->deadline_ns;
    *until_ns = end;
    if (end == IDIST__FOREVER || idist__kind_is_p2p(t->call.kind)) return IDIST__FOREVER;
    return end - (half < IDIST__ASK_NS ? half : IDIST__ASK_NS);
}

// Deadlines and announcements of the running tasks; returns when to look again. Thousands may be
// running, and this is asked before every sleep: so it looks at them only when something is due,
// and lets announcements wait for each other a little.
static int64_t idist__world_timers(idist__world *w) {
    int64_t now = idist__os_now_ns(), next = IDIST__FOREVER;
    idist__task *t, *following;
    uint32_t ended;

    if (now < w->due_ns) return w->due_ns;
    w->due_ns = IDIST__FOREVER; // a task that begins meanwhile sets it

    for (t = w->tasks; t; t = following) {
        int64_t at = t->started_ns + IDIST__ANNOUNCE_NS, ask_at, until;
        char cause[400];
        following = t->next;
        ended = w->nended;
        if (t->away && at < now + IDIST__MS) at = now + IDIST__MS; // the others hear of it when the backend has it
        else if (at > now && at < now + IDIST__TIMERS_NS) at = now + IDIST__TIMERS_NS;
        if (now >= t->deadline_ns) {
            int missing;
            snprintf(cause, sizeof cause, "not done after %lld ms", (long long)((now - t->started_ns) / IDIST__MS));
            idist__append(cause, sizeof cause, "; missing: ");
            missing = w->backend->missing(t, cause, sizeof cause);
            if (t->call.kind == IDIST__RECV && !missing && !t->patient) { // its message is coming in: that goes to its end
                t->patient = true;
                t->deadline_ns = w->cfg.timeout_ms < 0 ? IDIST__FOREVER : now + w->cfg.timeout_ms * IDIST__MS;
                next = now;
                continue;
            }
            if (!missing) idist__append(cause, sizeof cause, "nobody, but the data did not come through");
            if (idist__kind_is_p2p(t->call.kind) && w->backend->cancel(t)) idist__complete(t, IDIST_ERR_TIMEOUT, cause);
            else idist__group_fail(t->group, IDIST_ERR_TIMEOUT, cause);
            if (!t->done || w->nended != ended + 1) following = w->tasks; // others may have ended, too
            continue;
        }
        if (!t->announced && now >= at) {
            t->announced = true;
            w->backend->announce(t);
            if (w->nended != ended) following = w->tasks; // any task may have ended
            next = now;
            continue;
        }
        ask_at = idist__task_ask_at(t, &until);
        if (t->announced && now >= ask_at && t->group->asked_ns < ask_at && now >= t->group->asked_until_ns) {
            t->group->asked_ns = now;
            t->group->asked_until_ns = until;
            w->backend->announce(t);
            if (w->nended != ended) following = w->tasks; // any task may have ended
            next = now;
            continue;
        }
        if (t->announced) at = t->started_ns + IDIST__WARN_NS;
        if (t->announced && !t->warned && now >= at) {
            char what[128];
            t->warned = true;
            ask_at = idist__task_ask_at(t, &until); // for the deadline, the next time
            idist__task_text(t, what, sizeof what);
            cause[0] = 0;
            w->backend->missing(t, cause, sizeof cause);
            idist__log_print(&w->log, IDIST_LOG_WARN, "%s has waited for 60 s; missing: %s", what,
                             cause[0] ? cause : "nobody");
        }
        if (t->announced && t->warned) at = IDIST__FOREVER;
        if (t->announced && now < ask_at && ask_at < at) at = ask_at;
        if (t->deadline_ns < at) at = t->deadline_ns;
        if (at < next) next = at;
    }

    if (next < w->due_ns) w->due_ns = next;
    return w->due_ns;
}

// One turn at the wheel: sleep until something happens, then move what moves. Not when the timers have just ended a
// task: it may be what the caller waits for.
static void idist__world_turn(idist__world *w, idist__driver driver) {
    uint32_t ended = w->nended;
    int64_t until = idist__world_timers(w);
    if (!w->tasks || w->nended != ended) return;
    w->driver = driver;
    w->backend->sleep(w, until);
    w->driver = IDIST__DRIVER_NONE;
    w->backend->progress(w);
    if (w->nblocked > (driver == IDIST__DRIVER_CALLER ? 1 : 0)) pthread_cond_broadcast(&w->changed);
}

typedef struct idist__waiter { // how long somebody has polled already, since the last step forward
    uint32_t turns;
    uint32_t all; // and since the beginning
    int64_t begun_ns;
    bool slept;
} idist__waiter;

// A thread that polls has the lock most of the time. It gives it to those who ask.
static void idist__world_lock(idist__world *w) {
    if (pthread_mutex_trylock(&w->lock) == 0) return;
    __atomic_fetch_add(&w->nasking, 1u, __ATOMIC_RELAXED);
    pthread_mutex_lock(&w->lock);
    __atomic_fetch_sub(&w->nasking, 1u, __ATOMIC_RELAXED);
}

static void idist__world_give_way(idist__world *w) {
    uint32_t asking = __atomic_load_n(&w->nasking, __ATOMIC_RELAXED);
    int turns;
    pthread_mutex_unlock(&w->lock);
    sched_yield();
    for (turns = 0; asking && turns < IDIST__YIELDS; turns++) { // the other one has to wake up first
        if (__atomic_load_n(&w->nasking, __ATOMIC_RELAXED) < asking) break;
        sched_yield();
    }
    pthread_mutex_lock(&w->lock);
}

// Whether to poll once more, after a short break, or to sleep. With a core for each rank we poll as long as that has
// proved worth it: a wait that ended in sleep halves our patience, one that did not restores it. With fewer cores
// we hand the core to the others, a bounded number of times; to be woken up costs as much as dozens of these.
static bool idist__waiter_polls(idist__waiter *p, idist__world *w) {
    int64_t now;
    p->turns++;
    p->all++;
    if (w->spin_ns) idist__os_relax();
    if (w->spin_ns && p->all % 16) return true;
    now = idist__os_now_ns();
    if (!p->begun_ns) p->begun_ns = now;
    if (now >= w->timers_ns) { // also of tasks that do not move while others do
        int64_t next = idist__world_timers(w);
        w->timers_ns = next < now + IDIST__TIMERS_NS ? next : now + IDIST__TIMERS_NS;
    }
    if (w->spin_ns) {
        if (now - p->begun_ns >= w->patience_ns) return false;
        if (__atomic_load_n(&w->nasking, __ATOMIC_RELAXED)) idist__world_give_way(w);
        return true;
    }
    if (p->turns > IDIST__YIELDS || now - p->begun_ns > IDIST__YIELD_NS) return false; // others may compute for long
    idist__world_give_way(w);
    return true;
}

static void idist__waiter_learns(const idist__waiter *p, idist__world *w) {
    if (p->turns < 16 || !w->spin_ns) return;
    w->patience_ns = p->slept ? w->patience_ns / 2 : w->patience_ns * 2;
    if (w->patience_ns > w->spin_ns) w->patience_ns = w->spin_ns;
    if (w->patience_ns < w->spin_ns / 32) w->patience_ns = w->spin_ns / 32;
}

// Waits until ready(arg): polls for a short while, then drives or follows. The lock is held, and given up while
// sleeping.
static void idist__world_wait(idist__world *w, bool (*ready)(void *arg), void *arg) {
    idist__waiter p;
    uint32_t moved = w->nmoved;
    if (ready(arg)) return;
    memset(&p, 0, sizeof p);
    w->nblocked++;
    while (!ready(arg)) {
        if (w->nmoved != moved) { // one wait is over, the next one begins
            idist__waiter_learns(&p, w);
            moved = w->nmoved;
            p.turns = 0;
            p.begun_ns = 0;
            p.slept = false;
        }
        if (w->driver == IDIST__DRIVER_NONE) {
            w->backend->progress(w);
            if (ready(arg) || idist__waiter_polls(&p, w) || ready(arg)) continue; // polling looks at the timers too
            idist__world_turn(w, IDIST__DRIVER_CALLER);
            p.slept = true;
        } else {
            if (w->driver == IDIST__DRIVER_THREAD) w->backend->wake(w); // it steps back for us
            idist__os_cond_wait(&w->changed, &w->lock, IDIST__FOREVER);
        }
    }
    idist__waiter_learns(&p, w);
    w->nblocked--;
    if (w->nblocked) pthread_cond_broadcast(&w->changed);
    else if (w->nasync && w->thread_runs) pthread_cond_signal(&w->work);
}

static bool idist__task_ready(void *arg) { return ((const idist__task *)arg)->done; }

static void idist__task_wait(idist__task *t) { idist__world_wait(t->group->w, idist__task_ready, t); }

static void *idist__world_thread(void *arg) {
    idist__world *w = (idist__world *)arg;
    pthread_mutex_lock(&w->lock);
    while (!w->thread_stops) {
        if (w->nasync && !w->nblocked && w->driver == IDIST__DRIVER_NONE) {
            idist__world_turn(w, IDIST__DRIVER_THREAD);
        } else {
            idist__os_cond_wait(&w->work, &w->lock, w->watched ? idist__os_now_ns() + IDIST__WATCH_NS : IDIST__FOREVER);
            if (!w->watched || w->nasync || w->nblocked || w->driver != IDIST__DRIVER_NONE || w->thread_stops) continue;
            w->driver = IDIST__DRIVER_THREAD;
            w->backend->sleep(w, idist__os_now_ns()); // not at all; there it looks for who is lost
            w->driver = IDIST__DRIVER_NONE;
            w->backend->progress(w);
            if (w->nblocked) pthread_cond_broadcast(&w->changed); // who came meanwhile follows
            idist__world_timers(w);
        }
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

static idist_status idist__world_need_thread(idist__world *w) {
    if (w->thread_runs || w->threadless) return IDIST_OK;
    if (idist__os_thread(&w->thread, idist__world_thread, w) != 0)
        return idist__fail(IDIST_ERR_SYSTEM, "no thread for the progress of requests");
    w->thread_runs = true;
    return IDIST_OK;
}

static void idist__task_free(idist__task *t) {
    idist__world *w = t->group->w;
    if ((t->freed = t->pinned)) return; // who has pinned it does it
    t->next = w->idle_tasks;
    w->idle_tasks = t;
}

// Frees those that nobody waits for, once they are done.
static void idist__task_sweep(idist__world *w) {
    idist__task **at = &w->detached, *t;
    for (w->ngone = 0; (t = *at) != NULL;) {
        if (!t->done) {
            at = &t->chain;
            continue;
        }
        *at = t->chain;
        idist__task_free(t);
    }
}

static idist__task *idist__task_new(idist_group *g) {
    idist__world *w = g->w;
    size_t nbytes = sizeof(idist__task) + w->backend->task_nbytes;
    idist__task *t;
    if (w->ngone >= 64) idist__task_sweep(w);
    if ((t = w->idle_tasks) != NULL) {
        idist__task *older = t->older;
        w->idle_tasks = t->next;
        memset(t, 0, offsetof(idist__task, text));
        t->older = older;
    } else {
        t = (idist__task *)idist__mem_alloc(&w->cfg.mem, nbytes);
        if (!t) return NULL;
        t->older = w->all_tasks;
        w->all_tasks = t;
    }
    t->impl = t + 1;
    t->group = g;
    return t;
}

// Nobody waits for it any more.
static void idist__task_detach(idist__task *t) {
    idist__world *w = t->group->w;
    t->detached = true;
    t->chain = w->detached;
    w->detached = t;
    t->group->ndetached++;
    if (t->async) {
        w->nasync--;
        t->group->nrequests--;
        t->async = false;
    }
}

// Puts a task among the running ones and hands it to the backend.
static void idist__task_start(idist__task *t) {
    idist_group *g = t->group;
    idist__world *w = g->w;
    t->started_ns = idist__os_now_ns();
    t->deadline_ns = t->timeout_ms < 0 ? IDIST__FOREVER : t->started_ns + t->timeout_ms * IDIST__MS;
    if (t->call.kind != IDIST__SEND && t->call.kind != IDIST__RECV) t->seq = ++g->seq;
    if (t->started_ns + IDIST__ANNOUNCE_NS < w->due_ns) w->due_ns = t->started_ns + IDIST__ANNOUNCE_NS;
    if (t->deadline_ns < w->due_ns) w->due_ns = t->deadline_ns;
    t->next = w->tasks;
    if (w->tasks) w->tasks->prev = t;
    w->tasks = t;
    g->ntasks++;
    if (t->async) {
        w->nasync++;
        g->nrequests++;
    }
    w->backend->start(t);
    idist__world_rouse(w); // also when t is done: starting it may have read from the links
    if (w->driver == IDIST__DRIVER_NONE && !t->done && t->async && w->thread_runs && !w->nblocked)
        pthread_cond_signal(&w->work);
}

static void idist__group_set(idist_group *g, uint64_t ctx, const int *ranks, int n) {
    int i;
    g->ctx = ctx;
    g->size = n;
    g->rank = -1;
    for (i = 0; i < n; i++) {
        g->ranks[i] = ranks[i];
        if (ranks[i] == g->w->group.rank) g->rank = i;
    }
}

// A program may keep the handle of a group, or of a world, beyond the end of the world, and call
// with it. That is an IDIST_ERR_STATE like any other, so the struct must still be there and say so.
// It lies in one of these lists, marked, until enough others have followed it and a new one takes
// its place. It is plain memory: the world's allocator may be gone.
typedef struct idist__ended {
    idist_group *first, *last; // the oldest, the newest
    int n;
} idist__ended;

enum { IDIST__ENDED_GROUPS = 256, IDIST__ENDED_WORLDS = 16 };

static pthread_mutex_t idist__ended_lock = PTHREAD_MUTEX_INITIALIZER;
static idist__ended idist__ended_groups, idist__ended_worlds; // a world is its group, and some more

static void idist__ended_keep(idist__ended *list, idist_group *g) {
    g->w = NULL;
    g->rank = -1;
    g->freed = true;
    g->next = NULL;

    pthread_mutex_lock(&idist__ended_lock);
    if (list->last) list->last->next = g;
    else list->first = g;
    list->last = g;
    list->n++;
    pthread_mutex_unlock(&idist__ended_lock);
}

// Zeroed memory for a handle, which the program may hold on to.
static idist_group *idist__ended_reuse(idist__ended *list, int most, size_t nbytes) {
    idist_group *g = NULL;

    pthread_mutex_lock(&idist__ended_lock);
    if (list->n >= most) {
        g = list->first;
        list->first = g->next;
        if (!list->first) list->last = NULL;
        list->n--;
    }
    pthread_mutex_unlock(&idist__ended_lock);

    if (!g) return (idist_group *)idist__mem_alloc(NULL, nbytes);
    memset(g, 0, nbytes);
    return g;
}

// Room for n ranks; in no list yet. Freed groups stay behind, marked, until a new one takes their place: a call on a stale
// pointer gets an error.
static idist_group *idist__group_new(idist__world *w, int n) {
    idist_group *g = w->freed_groups;
    if (g) {
        w->freed_groups = g->next;
        memset(g, 0, sizeof *g);
    } else {
        g = idist__ended_reuse(&idist__ended_groups, IDIST__ENDED_GROUPS, sizeof *g);
    }
    if (!g) return NULL;
    g->w = w;
    g->rank = -1;
    g->ranks = (int *)idist__mem_alloc(&w->cfg.mem, sizeof(int) * (size_t)(n + 1));
    g->impl = idist__mem_alloc(&w->cfg.mem, w->backend->group_nbytes);
    if (g->ranks && g->impl) return g;
    idist__mem_free(&w->cfg.mem, g->ranks);
    idist__mem_free(&w->cfg.mem, g->impl);
    memset(g, 0, sizeof *g);
    idist__ended_keep(&idist__ended_groups, g);
    return NULL;
}

static void idist__group_free(idist_group *g) {
    idist_group **at;
    idist__world *w = g->w;
    for (at = &w->group.next; *at && *at != g; at = &(*at)->next) continue;
    if (*at) {
        *at = g->next;
        if (g->rank >= 0) w->backend->group_close(g);
    }
    idist__mem_free(&w->cfg.mem, g->ranks);
    idist__mem_free(&w->cfg.mem, g->impl);
    memset(g, 0, sizeof *g);
    g->w = w;
    g->rank = -1;
    g->freed = true;
    g->next = w->freed_groups;
    w->freed_groups = g;
}

//------------------------------------------------------------------------------
// [impl:call]  every communication call passes through idist__call_run: checks, numbering, start, wait
// uses world . used by coll p2p group help
//------------------------------------------------------------------------------

// Where the elements of a call lie: how many at send and at recv, and where in-place has one start inside the other.
typedef struct idist__extent {
    size_t send, recv; // elements
    bool may_alias;    // in place is allowed ...
    size_t send_at;    // ... when recv starts at this element of send,
    size_t recv_at;    // or send at this element of recv
} idist__extent;

// Elements up to the end of the last part; SIZE_MAX when it overflows.
static size_t idist__extent_v(const size_t *counts, const size_t *displs, int n) {
    size_t total = 0, end;
    int i;
    for (i = 0; i < n; i++) {
        size_t at = displs ? displs[i] : total;
        if (counts[i] > SIZE_MAX / 16 || at > SIZE_MAX / 16) return SIZE_MAX;
        end = at + counts[i];
        if (!displs || (counts[i] && end > total)) total = end;
        if (total > SIZE_MAX / 16) return SIZE_MAX;
    }
    return total;
}

static size_t idist__displ(const size_t *counts, const size_t *displs, int k) {
    size_t at = 0;
    int i;
    if (displs) return displs[k];
    for (i = 0; i < k; i++) at += counts[i];
    return at;
}

static idist_status idist__extent_of(const idist_group *g, const idist__call *c, idist__extent *e) {
    size_t n = (size_t)g->size, r = (size_t)g->rank, count = c->count, all;
    bool root = c->root == g->rank;
    memset(e, 0, sizeof *e);
    if (count > SIZE_MAX / 16 / n) return IDIST_ERR_ARG;
    all = n * count;
    e->may_alias = true;
    switch (c->kind) {
    case IDIST__ALL_REDUCE:
    case IDIST__SCAN:
    case IDIST__EXSCAN: e->send = e->recv = count; break;
    case IDIST__REDUCE:
        e->send = count;
        e->recv = root ? count : 0;
        break;
    case IDIST__BROADCAST: e->recv = count; break;
    case IDIST__ALL_GATHER:
    case IDIST__GATHER:
        e->send = count;
        e->recv = c->kind == IDIST__ALL_GATHER || root ? all : 0;
        e->recv_at = r * count;
        break;
    case IDIST__SCATTER:
    case IDIST__REDUCE_SCATTER:
        e->send = c->kind == IDIST__REDUCE_SCATTER || root ? all : 0;
        e->recv = count;
        e->send_at = r * count;
        break;
    case IDIST__ALL_TO_ALL: e->send = e->recv = all; break;
    case IDIST__ALL_GATHERV:
    case IDIST__GATHERV:
        e->send = count;
        if (c->kind == IDIST__GATHERV && !root) break;
        e->recv = idist__extent_v(c->recvcounts, c->recvdispls, g->size);
        e->recv_at = idist__displ(c->recvcounts, c->recvdispls, g->rank);
        break;
    case IDIST__SCATTERV:
        e->recv = count;
        if (!root) break;
        e->send = idist__extent_v(c->sendcounts, c->senddispls, g->size);
        e->send_at = idist__displ(c->sendcounts, c->senddispls, g->rank);
        break;
    case IDIST__ALL_TO_ALLV:
        e->send = idist__extent_v(c->sendcounts, c->senddispls, g->size);
        e->recv = idist__extent_v(c->recvcounts, c->recvdispls, g->size);
        e->may_alias = false;
        break;
    case IDIST__SEND: e->send = count; break;
    case IDIST__RECV: e->recv = count; break;
    default: break;
    }
    return e->send == SIZE_MAX || e->recv == SIZE_MAX ? IDIST_ERR_ARG : IDIST_OK;
}

// Whether one buffer lies in the other as the in-place rule of the call has it.
static bool idist__extent_in_place(const idist__extent *e, const idist__call *c) {
    const char *send = (const char *)c->send, *recv = (const char *)c->recv;
    size_t size = idist_dtype_size(c->dtype);
    if (!e->may_alias || !e->send || !e->recv) return false;
    return (recv == send + e->send_at * size && !e->recv_at) || (send == recv + e->recv_at * size && !e->send_at);
}

IDIST__UNUSED static bool idist__call_in_place(const idist_group *g, const idist__call *c) {
    idist__extent e;
    return idist__extent_of(g, c, &e) == IDIST_OK && idist__extent_in_place(&e, c);
}

// Where the elements that go from rank `from` to rank `to` lie, in the buffer at base: the sender's or the receiver's.
static char *idist__call_part(const idist__call *c, char *base, int from, int to, bool at_sender, size_t *count) {
    const size_t *counts = at_sender ? c->sendcounts : c->recvcounts, *displs = at_sender ? c->senddispls : c->recvdispls;
    size_t size = idist_dtype_size(c->dtype);
    bool gather = c->kind == IDIST__GATHER || c->kind == IDIST__GATHERV, spread = counts && c->sendcounts && c->recvcounts;
    bool scatter = c->kind == IDIST__SCATTER || c->kind == IDIST__SCATTERV;
    int k = at_sender ? to : from; // which part of a buffer of many
    *count = 0;
    if ((gather && to != c->root) || (scatter && from != c->root)) return base;
    *count = c->count;
    if (c->kind != IDIST__ALL_TO_ALL && !spread && at_sender != scatter) return base; // a buffer of one part
    if (!idist__kind_is_v(c->kind) || !counts) return base + (size_t)k * c->count * size;
    *count = counts[k];
    return base + idist__displ(counts, displs, k) * size;
}

// In three of the v-forms only two ranks know how much goes from one to the other: what this rank says about it.
IDIST__UNUSED static size_t idist__call_count(const idist_group *g, const idist__call *c, int peer, bool sends) {
    int root = c->root, me = g->rank;
    if (c->kind == IDIST__ALL_TO_ALLV) return sends ? c->sendcounts[peer] : c->recvcounts[peer];
    if (c->kind == IDIST__GATHERV) return sends ? (peer == root ? c->count : 0) : me == root ? c->recvcounts[peer] : 0;
    return sends ? (me == root ? c->sendcounts[peer] : 0) : peer == root ? c->count : 0;
}

// A number for each count, added for what is sent and subtracted for what is expected: over all ranks the sum is 0 when all
// pairs agree, and else, as good as always, not.
IDIST__UNUSED static uint64_t idist__call_balance(const idist_group *g, const idist__call *c) {
    uint64_t sum = 0, me = (uint64_t)g->rank, n = (uint64_t)g->size;
    int i;
    if (c->kind == IDIST__ALL_GATHERV) return 0; // those are in the print
    for (i = 0; i < g->size; i++) {
        sum += idist__mix(me * n + (uint64_t)i, idist__call_count(g, c, i, true));
        sum -= idist__mix((uint64_t)i * n + me, idist__call_count(g, c, i, false));
    }
    return sum;
}

static idist_status idist__check_buffers(const idist_group *g, const idist__call *c) {
    const char *name = idist__kind_names[c->label], *send = (const char *)c->send, *recv = (const char *)c->recv;
    size_t size = idist_dtype_size(c->dtype), nsend, nrecv;
    idist__extent e;
    if (c->kind == IDIST__ALL_REDUCE && send == recv && send && c->count <= SIZE_MAX / 16) return IDIST_OK; // most common
    if (idist__extent_of(g, c, &e) != IDIST_OK)
        return idist__fail(IDIST_ERR_ARG, "%s: the counts are too large for memory", name);
    if (e.send && !send) return idist__fail(IDIST_ERR_ARG, "%s: the send buffer is NULL and count is not 0", name);
    if (e.recv && !recv) return idist__fail(IDIST_ERR_ARG, "%s: the receive buffer is NULL and count is not 0", name);
    nsend = e.send * size;
    nrecv = e.recv * size;
    if (!nsend || !nrecv || send + nsend <= recv || recv + nrecv <= send) return IDIST_OK; // disjoint
    if (idist__extent_in_place(&e, c)) return IDIST_OK;
    return idist__fail(IDIST_ERR_ARG, "%s: send and receive buffers overlap, and not in the way that in-place allows", name);
}

static idist_status idist__check_op(const idist__world *w, const idist__call *c) {
    const char *name = idist__kind_names[c->label];
    if ((unsigned)c->op < IDIST_OP_COUNT) {
        if (!idist__reduce_table[(unsigned)c->dtype][(unsigned)c->op])
            return idist__fail(IDIST_ERR_ARG, "%s: %s takes integers, not %s", name, idist_op_name(c->op),
                               idist_dtype_name(c->dtype));
        if (c->op == IDIST_AVG && (c->kind == IDIST__SCAN || c->kind == IDIST__EXSCAN))
            return idist__fail(IDIST_ERR_ARG, "%s: AVG is not defined for prefixes; use SUM and divide by rank + 1", name);
        return IDIST_OK;
    }
    if ((int)c->op >= IDIST_OP_USER && (int)c->op <= IDIST_OP_LAST && w->ops[c->op - IDIST_OP_USER].used) {
        if (!w->ops[c->op - IDIST_OP_USER].fn && !idist__type_is_float(c->dtype))
            return idist__fail(IDIST_ERR_ARG, "%s: a premultiplied sum takes floating dtypes, not %s", name,
                               idist_dtype_name(c->dtype));
        return IDIST_OK;
    }
    return idist__fail(IDIST_ERR_ARG, "%s: %d is no op of this world", name, (int)c->op);
}

static idist_status idist__check_peer(const idist_group *g, const idist__call *c) {
    const char *name = idist__kind_names[c->label];
    bool any = c->kind == IDIST__RECV;
    if (!(c->root >= 0 && c->root < g->size) && !(any && c->root == IDIST_ANY_SOURCE))
        return idist__fail(IDIST_ERR_ARG, "%s: rank %d is not in a group of %d", name, c->root, g->size);
    if (c->tag < 0 && !(any && c->tag == IDIST_ANY_TAG))
        return idist__fail(IDIST_ERR_ARG, "%s: tag %d is negative", name, c->tag);
    return IDIST_OK;
}

static bool idist__has_root(idist__kind kind) {
    return kind == IDIST__REDUCE || kind == IDIST__BROADCAST || kind == IDIST__GATHER || kind == IDIST__SCATTER ||
           kind == IDIST__GATHERV || kind == IDIST__SCATTERV;
}

static idist_status idist__check_counts(const idist_group *g, const idist__call *c) {
    const char *name = idist__kind_names[c->label];
    bool root = c->root == g->rank;
    if ((c->kind == IDIST__ALL_GATHERV || (c->kind == IDIST__GATHERV && root) || c->kind == IDIST__ALL_TO_ALLV) &&
        !c->recvcounts)
        return idist__fail(IDIST_ERR_ARG, "%s: recvcounts is NULL", name);
    if (((c->kind == IDIST__SCATTERV && root) || c->kind == IDIST__ALL_TO_ALLV) && !c->sendcounts)
        return idist__fail(IDIST_ERR_ARG, "%s: sendcounts is NULL", name);
    if ((c->kind == IDIST__ALL_GATHERV || (c->kind == IDIST__GATHERV && root)) && c->recvcounts[g->rank] != c->count)
        return idist__fail(IDIST_ERR_ARG, "%s: sendcount is %zu, but recvcounts[%d] is %zu", name, c->count, g->rank,
                           c->recvcounts[g->rank]);
    if (c->kind == IDIST__SCATTERV && root && c->sendcounts[g->rank] != c->count)
        return idist__fail(IDIST_ERR_ARG, "%s: recvcount is %zu, but sendcounts[%d] is %zu", name, c->count, g->rank,
                           c->sendcounts[g->rank]);
    if (c->kind == IDIST__ALL_TO_ALLV && c->sendcounts[g->rank] != c->recvcounts[g->rank])
        return idist__fail(IDIST_ERR_ARG, "%s: sendcounts and recvcounts of the own rank differ", name);
    return IDIST_OK;
}

// All that can be wrong with one rank's arguments. Nothing was sent yet, so nothing breaks.
static idist_status idist__call_check(const idist_group *g, const idist__call *c) {
    const char *name = idist__kind_names[c->label];
    idist_status s;
    if (g->rank < 0) return idist__fail(IDIST_ERR_STATE, "%s: this rank is not a member of the group", name);
    if (c->kind == IDIST__BARRIER) return IDIST_OK;
    if (!idist_dtype_size(c->dtype)) return idist__fail(IDIST_ERR_ARG, "%s: %d is no dtype", name, (int)c->dtype);
    if (c->kind == IDIST__SEND || c->kind == IDIST__RECV) {
        if ((s = idist__check_peer(g, c)) != IDIST_OK) return s;
    } else if (idist__has_root(c->kind) && (c->root < 0 || c->root >= g->size)) {
        return idist__fail(IDIST_ERR_ARG, "%s: root %d is not in a group of %d", name, c->root, g->size);
    }
    if (idist__kind_reduces(c->kind) && (s = idist__check_op(g->w, c)) != IDIST_OK) return s;
    if ((s = idist__check_counts(g, c)) != IDIST_OK) return s;
    return idist__check_buffers(g, c);
}

// Locks the world of a call and finds its group. On failure nothing is locked and *out is NULL.
static idist_status idist__call_enter(const char *name, idist_group *group, idist_group **out) {
    idist__world *w = group ? group->w : idist__world_default();
    *out = NULL;
    if (group && !w) return idist__fail(IDIST_ERR_STATE, "%s: the world of this group was closed", name);
    if (!w) return idist__fail(IDIST_ERR_STATE, "%s: no world yet, or no more: call idist_initialize first", name);
    if (idist__world_enter(name, w) != IDIST_OK) return IDIST_ERR_STATE;
    if (group && group->freed) return idist__fail(IDIST_ERR_STATE, "%s: the group was freed", name);
    idist__world_lock(w);
    *out = group ? group : &w->group;
    return IDIST_OK;
}

// A caller that hears of a failure may well end its process at once, and with it the connections. The others must
// have heard the reason by then, so it waits a moment for that.
static void idist__group_flush(idist_group *g) {
    idist__world *w = g->w;
    if (g->status == IDIST_OK || g->flushed || w->driver != IDIST__DRIVER_NONE) return;
    g->flushed = true;
    w->driver = IDIST__DRIVER_CALLER;
    w->backend->flush(w, idist__os_deadline(IDIST__FLUSH_MS));
    w->driver = IDIST__DRIVER_NONE;
    if (w->nblocked) pthread_cond_broadcast(&w->changed);
}

static void idist__task_drop(idist__task *t) {
    if (t->async) t->group->nrequests--;
    idist__task_free(t);
}

// The status of a finished task, as the caller gets it. Frees the task.
static idist_status idist__task_result(idist__task *t) {
    idist_status s = t->status;
    if (s != IDIST_OK) idist__group_flush(t->group);
    if (s != IDIST_OK) idist__fail(s, "%s", t->text);
    idist__task_drop(t);
    return s;
}

// A blocking call without a task, if the backend can do that now.
static bool idist__call_quick(idist_group *g, const idist__call *c, const idist_opts *o) {
    return !g->w->tasks && g->w->backend->quick && g->status == IDIST_OK && !o->request && !idist__me.group_depth &&
           g->w->backend->quick(g, c);
}

// Whether the device backend takes part in a call. A stream needs one.
static idist_status idist__call_route(idist_group *g, const idist__call *c, const idist_opts *o, bool *on_device,
                                      bool *detached) {
    const char *name = idist__kind_names[c->label];
    *on_device = *detached = false;
    if (g->w->route) return g->w->route(g, c, o, on_device, detached);
    if (o->stream && !g->w->wrap)
        return idist__fail(IDIST_ERR_UNSUPPORTED, "%s: a stream is for device memory, which takes idist_nccl.h", name);
    if (o->stream) return idist__fail(IDIST_ERR_NO_DEVICE, "%s: a stream is for device memory: %s", name, g->w->no_device);
    return IDIST_OK;
}

static idist_status idist__call_locked(idist_group *g, const idist__call *c, const idist_opts *o) {
    const char *name = idist__kind_names[c->label];
    idist__thread *self = &idist__me;
    idist_status s = idist__call_check(g, c);
    idist__task *t;
    bool on_device = false, detached = false;
    int timeout_ms = o->timeout_ms ? o->timeout_ms : g->w->cfg.timeout_ms;
    if (s != IDIST_OK) return s;
    if ((s = idist__call_route(g, c, o, &on_device, &detached)) != IDIST_OK) return s;
    if (g->status != IDIST_OK) return idist__fail(g->status, "%s: the group failed earlier: %s", name, g->cause);
    if (!on_device && idist__call_quick(g, c, o)) return IDIST_OK;
    if (o->request && (s = idist__world_need_thread(g->w)) != IDIST_OK) return s;
    if ((t = idist__task_new(g)) == NULL) {
        idist__group_fail(g, IDIST_ERR_NO_MEMORY, "a rank is out of memory"); // the others may count on it already
        return IDIST_ERR_NO_MEMORY;
    }
    t->call = *c;
    t->async = o->request != NULL;
    t->on_device = on_device;
    t->stream = o->stream;
    t->patient = o->timeout_ms == 0;
    t->timeout_ms = timeout_ms;
    if (detached) idist__task_detach(t);
    idist__task_start(t);
    if (detached) return g->status == IDIST_OK ? IDIST_OK : idist__fail(g->status, "%s: %s", name, g->cause);
    if (o->request) {
        o->request->impl = t;
        return IDIST_OK;
    }
    if (self->group_depth) { // idist_group_end waits for it
        if (self->group_tasks) self->group_last->chain = t;
        else self->group_tasks = t;
        self->group_last = t;
        return IDIST_OK;
    }
    idist__task_wait(t);
    return idist__task_result(t);
}

static idist_status idist__call_traced(idist_group *g, const idist__call *c, const idist_opts *o) {
    return idist__tracer_now() ? idist__tracer_now()->call(g, c, o) : idist__call_locked(g, c, o);
}

static idist_status idist__call_run(idist__call *c, const idist_opts *opts) {
    idist_opts o;
    idist_group *g = NULL;
    idist_status s;
    memset(&o, 0, sizeof o);
    if (opts) o = *opts;
    s = idist__call_enter(idist__kind_names[c->label], o.group, &g);
    if (g) {
        s = idist__call_traced(g, c, &o);
        pthread_mutex_unlock(&g->w->lock);
    }
    if (s != IDIST_OK && idist__me.group_depth && idist__me.group_status == IDIST_OK) {
        idist__me.group_status = s;
        memcpy(idist__me.group_text, idist__me.text, sizeof idist__me.group_text);
    }
    return s;
}

static void idist__call_init(idist__call *c, idist__kind kind, const void *send, void *recv, size_t count,
                             idist_dtype dtype) {
    memset(c, 0, sizeof *c);
    c->kind = kind;
    c->send = send;
    c->recv = recv;
    c->count = count;
    c->label = kind;
    c->check = count;
    c->dtype = dtype;
    c->root = -1;
}

//------------------------------------------------------------------------------
// [impl:self]  the backend of a world of 1, and what any backend does in a group of 1
// uses world reduce call . used by life and the ring
//------------------------------------------------------------------------------

static void idist__copy(void *dst, const void *src, size_t nbytes) {
    if (nbytes && dst != src) memmove(dst, src, nbytes);
}

// Any collective among one rank: its own contribution is the result.
static void idist__self_collective(idist__task *t) {
    const idist__call *c = &t->call;
    const idist__user_op *op = (int)c->op >= IDIST_OP_USER ? idist__call_user_op(t->group, c) : NULL;
    if (c->kind != IDIST__BARRIER && c->kind != IDIST__BROADCAST && c->kind != IDIST__EXSCAN) {
        size_t count;
        const char *from = idist__call_part(c, (char *)(uintptr_t)c->send, 0, 0, true, &count);
        idist__copy(idist__call_part(c, (char *)c->recv, 0, 0, false, &count), from, count * idist_dtype_size(c->dtype));
        if (idist__kind_reduces(c->kind) && op && !op->fn) idist__reduce_scale(c->recv, count, c->dtype, op->factor);
        if (idist__kind_reduces(c->kind) && !op) idist__reduce_finish(c->recv, count, c->dtype, c->op, 1);
    }
    idist__complete(t, IDIST_OK, "");
}

// Checks a message against the receive that takes it; true when it may be taken. The text goes to the receive.
static bool idist__message_fits(const idist__call *recv, idist_dtype dtype, size_t count, int source, int tag,
                                idist_status *status, char *text, size_t cap) {
    *status = IDIST_OK;
    if (dtype != recv->dtype) {
        *status = IDIST_ERR_MISMATCH;
        snprintf(text, cap, "rank %d sent %s x %zu with tag %d: the dtype differs. The message is kept for another receive",
                 source, idist_dtype_name(dtype), count, tag);
    } else if (count > recv->count) {
        *status = IDIST_ERR_TRUNCATED;
        snprintf(text, cap, "rank %d sent %zu elements with tag %d. The message is kept for a larger receive", source, count,
                 tag);
    }
    return *status == IDIST_OK;
}

static void idist__recv_tell(const idist__call *c, int source, int tag, size_t count) {
    if (!c->info) return;
    c->info->source = source;
    c->info->tag = tag;
    c->info->count = count;
}

static void idist__recv_done(idist__task *t, int source, int tag, size_t count) {
    idist__recv_tell(&t->call, source, tag, count);
    idist__complete(t, IDIST_OK, "");
}

// A message from this rank to itself. Small ones are copied so that a blocking send returns; large ones wait.
typedef struct idist__parcel {
    struct idist__parcel *next;
    int tag;
    idist_dtype dtype;
    size_t count;
    const void *data;
    idist__task *sender; // NULL: data is a copy behind this struct
} idist__parcel;

typedef struct idist__self_group {
    idist__parcel *parcels;
} idist__self_group;

// Messages up to this size are on their way before anybody asks for them.
static const size_t IDIST__EAGER_BYTES = (size_t)64 * 1024;

static void idist__self_drop(idist_group *g, idist__parcel **at) {
    idist__parcel *p = *at;
    *at = p->next;
    idist__mem_free(&g->w->cfg.mem, p);
}

// Gives the first parcel that fits to the oldest receive that wants it.
static void idist__self_match(idist_group *g) {
    idist__self_group *sg = (idist__self_group *)g->impl;
    idist__task *t, *oldest;
    do {
        idist__parcel **at = NULL, **p;
        oldest = NULL;
        for (t = g->w->tasks; t; t = t->next) { // the youngest comes first
            if (t->group != g || t->call.kind != IDIST__RECV || t->away) continue;
            for (p = &sg->parcels; *p; p = &(*p)->next)
                if (t->call.tag == IDIST_ANY_TAG || t->call.tag == (*p)->tag) {
                    oldest = t;
                    at = p;
                    break;
                }
        }
        if (oldest) {
            idist_status s;
            char text[256];
            if (!idist__message_fits(&oldest->call, (*at)->dtype, (*at)->count, 0, (*at)->tag, &s, text, sizeof text)) {
                idist__complete(oldest, s, text);
            } else {
                idist__task *sender = (*at)->sender;
                int tag = (*at)->tag;
                size_t count = (*at)->count;
                idist__copy(oldest->call.recv, (*at)->data, count * idist_dtype_size((*at)->dtype));
                idist__self_drop(g, at);
                if (sender) idist__complete(sender, IDIST_OK, "");
                idist__recv_done(oldest, 0, tag, count);
            }
        }
    } while (oldest);
}

static void idist__self_send(idist__task *t) {
    idist_group *g = t->group;
    idist__self_group *sg = (idist__self_group *)g->impl;
    size_t nbytes = t->call.count * idist_dtype_size(t->call.dtype);
    bool copy = nbytes <= IDIST__EAGER_BYTES;
    idist__parcel **last, *p = (idist__parcel *)idist__mem_alloc(&g->w->cfg.mem, sizeof *p + (copy ? nbytes : 0));
    if (!p) {
        idist__complete(t, IDIST_ERR_NO_MEMORY, "out of memory");
        return;
    }
    p->tag = t->call.tag;
    p->dtype = t->call.dtype;
    p->count = t->call.count;
    p->data = t->call.send;
    p->sender = copy ? NULL : t;
    if (copy) {
        p->data = p + 1;
        idist__copy(p + 1, t->call.send, nbytes);
    }
    for (last = &sg->parcels; *last; last = &(*last)->next) continue;
    *last = p;
    if (copy) idist__complete(t, IDIST_OK, "");
    idist__self_match(g);
}

static void idist__self_start(idist__task *t) {
    if (t->call.kind == IDIST__SEND) idist__self_send(t);
    else if (t->call.kind == IDIST__RECV) idist__self_match(t->group);
    else idist__self_collective(t);
}

static bool idist__self_cancel(idist__task *t) {
    idist__self_group *sg = (idist__self_group *)t->group->impl;
    idist__parcel **p;
    for (p = &sg->parcels; *p; p = &(*p)->next)
        if ((*p)->sender == t) {
            idist__self_drop(t->group, p);
            break;
        }
    return true;
}

// Nothing comes from outside a world of 1, so only wake or the deadline end the sleep.
static void idist__self_sleep(idist__world *w, int64_t until_ns) {
    int fd = *(int *)w->impl;
    uint64_t n;
    bool woken;
    pthread_mutex_unlock(&w->lock);
    woken = idist__sock_wait(fd, POLLIN, until_ns);
    pthread_mutex_lock(&w->lock);
    if (woken)
        while (read(fd, &n, sizeof n) < 0 && errno == EINTR) continue;
}

static void idist__self_wake(idist__world *w) {
    uint64_t one = 1;
    while (write(*(int *)w->impl, &one, sizeof one) < 0 && errno == EINTR) continue;
}

static idist_status idist__self_open(idist__world *w) {
    int *fd = (int *)idist__mem_alloc(&w->cfg.mem, sizeof *fd);
    if (!fd) return IDIST_ERR_NO_MEMORY;
    *fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (*fd < 0) {
        idist__mem_free(&w->cfg.mem, fd);
        return idist__fail_errno("eventfd", errno);
    }
    w->impl = fd;
    idist__copy_text(w->nodes[0].hostname, sizeof w->nodes[0].hostname, w->hostname);
    return IDIST_OK;
}

static void idist__self_close(idist__world *w, bool clean) {
    (void)clean;
    idist__os_close((int *)w->impl);
    idist__mem_free(&w->cfg.mem, w->impl);
}

static idist_status idist__self_group_open(idist_group *g) {
    (void)g;
    return IDIST_OK;
}

static void idist__self_group_close(idist_group *g) {
    idist__self_group *sg = (idist__self_group *)g->impl;
    while (sg->parcels) idist__self_drop(g, &sg->parcels);
}

static void idist__self_progress(idist__world *w) { (void)w; }
static void idist__self_tell(idist_group *g) { (void)g; }

static void idist__self_flush(idist__world *w, int64_t until_ns) {
    (void)w;
    (void)until_ns;
}

static void idist__self_announce(idist__task *t) { (void)t; }

static int idist__self_missing(idist__task *t, char *text, size_t cap) {
    idist__append(text, cap, t->call.kind == IDIST__SEND ? "a receive in this rank" : "a send in this rank");
    return 1;
}

static idist_status idist__self_claim(idist__config *c, const char **why) {
    *why = "it serves a world of 1 only";
    return c->world_size > 1 ? IDIST_ERR_NO_BACKEND : IDIST_OK;
}

const idist_backend_api *idist_self_backend(void) {
    static const idist_backend_api api = {IDIST__BACKEND_ABI,
                                          sizeof(idist_backend_api),
                                          "self",
                                          0,
                                          sizeof(idist__self_group),
                                          idist__self_claim,
                                          idist__self_open,
                                          idist__self_close,
                                          idist__self_group_open,
                                          idist__self_group_close,
                                          NULL,
                                          NULL,
                                          NULL,
                                          idist__self_start,
                                          idist__self_progress,
                                          idist__self_sleep,
                                          idist__self_wake,
                                          idist__self_cancel,
                                          idist__self_tell,
                                          idist__self_flush,
                                          idist__self_announce,
                                          idist__self_missing,
                                          NULL,
                                          NULL,
                                          NULL,
                                          NULL};
    return &api;
}

//------------------------------------------------------------------------------
// [impl:life]  open and close a world; the getters
// uses launch world call self . used by spawn
//------------------------------------------------------------------------------

idist_backend_list idist_backend_list_of(const idist_backend_api *a, const idist_backend_api *b,
                                         const idist_backend_api *c) {
    idist_backend_list list;
    memset(&list, 0, sizeof list);
    list.items[0] = a;
    list.items[1] = b;
    list.items[2] = c;
    return list;
}

// The list with `self` behind it, checked; names for texts.
static idist_status idist__backends_check(idist_backend_list *list, char *names, size_t cap) {
    size_t i, last = 0;
    names[0] = 0;
    for (i = 0; i + 1 < IDIST__COUNT_OF(list->items); i++)
        if (list->items[i]) last = i + 1;
    list->items[last] = idist_self_backend();
    for (i = 0; i <= last; i++) {
        const idist_backend_api *b = list->items[i];
        if (!b) continue;
        if (b->abi != IDIST__BACKEND_ABI || b->size != sizeof *b)
            return idist__fail(IDIST_ERR_NO_BACKEND,
                               "a backend was compiled against another version of idist.h: rebuild all files");
        idist__append(names, cap, "%s%s", names[0] ? "," : "", b->name);
    }
    return IDIST_OK;
}

static const idist_backend_api *idist__backend_named(const idist_backend_list *list, const char *name, size_t n) {
    size_t i;
    for (i = 0; i < IDIST__COUNT_OF(list->items); i++)
        if (list->items[i] && strlen(list->items[i]->name) == n && memcmp(list->items[i]->name, name, n) == 0)
            return list->items[i];
    return NULL;
}

static bool idist__text_is(const char *text, size_t n, const char *word) {
    return strlen(word) == n && memcmp(text, word, n) == 0;
}

// The backend that a name asks for. Two names of torch.distributed and Ignite are no backends here:
// ring plays the part of gloo, and nccl is ring for what lies on the host, with NCCL beside it for
// what lies on devices.
static const idist_backend_api *idist__backend_asked(const idist_backend_list *list, const char *name, size_t n) {
    const idist_backend_api *named = idist__backend_named(list, name, n);
    if (idist__text_is(name, n, "gloo") || (named && named->wrap)) return idist__backend_named(list, "ring", 4);
    return named;
}

static idist_status idist__backend_unknown(const char *backends, const char *name, size_t n) {
    bool device = idist__text_is(name, n, "nccl"), gloo = idist__text_is(name, n, "gloo");
    if (device && !strstr(backends, "nccl"))
        return idist__fail(IDIST_ERR_NO_BACKEND,
                           "backend \"nccl\" (ring for host memory, NCCL for that of devices) needs idist_nccl.h: include "
                           "it where idist_initialize is called. There are: %s",
                           backends);
    if (device || gloo || idist__text_is(name, n, "ring"))
        return idist__fail(IDIST_ERR_NO_BACKEND,
                           "backend \"%.*s\" needs idist_ring.h, which IDIST_NO_RING leaves out. There are: %s", (int)n,
                           name, backends);
    if (idist__text_is(name, n, "mpi"))
        return idist__fail(
            IDIST_ERR_NO_BACKEND,
            "backend \"mpi\" is not built in: include idist_mpi.h where idist_initialize is called. There are: "
            "%s",
            backends);
    return idist__fail(IDIST_ERR_NO_BACKEND,
                       "there is no backend \"%.*s\". The names are self, ring (or gloo), mpi and nccl; there are: %s",
                       (int)n, name, backends);
}

// The first backend that fits: of those asked for by name, else of all; alone, `self`.
static idist_status idist__backend_choose(idist__world *w, const idist_backend_list *list) {
    const char *at = w->cfg.backends, *why = "none was built in";
    idist_status s = IDIST_ERR_NO_BACKEND;
    size_t i;
    while (*at && s == IDIST_ERR_NO_BACKEND) {
        size_t n = strcspn(at, ",");
        w->backend = idist__backend_asked(list, at, n);
        if (!w->backend) return idist__backend_unknown(w->backends, at, n);
        s = w->backend->claim(&w->cfg, &why);
        if (s == IDIST_OK && idist__text_is(at, n, "gloo"))
            idist__log_print(&w->log, IDIST_LOG_INFO, "the backend asked for is \"gloo\", whose part ring plays");
        if (s == IDIST_OK && idist__text_is(at, n, "nccl")) {
            if (!w->cfg.device_backend) w->cfg.device_backend = IDIST__DEVICE_BACKEND_NCCL;
            idist__log_print(&w->log, IDIST_LOG_INFO,
                             "the backend asked for is \"nccl\": ring for host memory, NCCL for "
                             "that of devices (device_backend)");
        }
        at += n + (at[n] == ',');
    }
    for (i = 0; !w->cfg.backends[0] && s == IDIST_ERR_NO_BACKEND && i < IDIST__COUNT_OF(list->items); i++)
        if ((w->backend = list->items[i]) != NULL) s = w->backend->claim(&w->cfg, &why);
    if (s != IDIST_ERR_NO_BACKEND) return s;
    return idist__fail(IDIST_ERR_NO_BACKEND, "no backend for a world of %d among %s: %s", w->cfg.world_size, w->backends,
                       why);
}

// Local and node ranks from the table of hosts, so that uneven and cyclic placements come out right.
static void idist__world_count_nodes(idist__world *w) {
    int i, k, n = w->group.size;
    w->nnodes = 0;
    for (i = 0; i < n; i++) {
        idist__node *a = &w->nodes[i];
        a->local_rank = 0;
        a->local_size = 0;
        a->node_rank = -1;
        for (k = 0; k < n; k++) {
            if (w->nodes[k].host != a->host) continue;
            if (k < i) {
                a->local_rank++;
                a->node_rank = w->nodes[k].node_rank;
            }
            a->local_size++;
        }
        if (a->node_rank < 0) a->node_rank = w->nnodes++;
    }
}

static pthread_mutex_t idist__life_lock = PTHREAD_MUTEX_INITIALIZER;    // initialize and finalize
static pthread_mutex_t idist__default_lock = PTHREAD_MUTEX_INITIALIZER; // the default world stays while it is held

static void idist__world_free(idist__world *w) {
    idist_allocator mem = w->cfg.mem;
    while (w->group.next) idist__group_free(w->group.next);
    while (w->freed_groups) {
        idist_group *g = w->freed_groups;
        w->freed_groups = g->next;
        idist__ended_keep(&idist__ended_groups, g);
    }
    while (w->all_tasks) {
        idist__task *t = w->all_tasks;
        w->all_tasks = t->older;
        idist__mem_free(&mem, t);
    }
    idist__mem_free(&mem, w->group.ranks);
    idist__mem_free(&mem, w->group.impl);
    idist__mem_free(&mem, w->nodes);
    idist__os_fork_guard_free(w->fork_guard);
    pthread_cond_destroy(&w->changed);
    pthread_cond_destroy(&w->work);
    pthread_mutex_destroy(&w->lock);
    memset(w, 0, sizeof *w); // the secret among it
    idist__ended_keep(&idist__ended_worlds, &w->group);
}

static idist_status idist__world_new(const idist__config *cfg, idist_backend_list *list, idist__world **out) {
    // A world is its group, which comes first in it.
    idist__world *w = (idist__world *)(void *)idist__ended_reuse(&idist__ended_worlds, IDIST__ENDED_WORLDS, sizeof *w);
    idist_status s;
    int i, n;
    *out = w;
    if (!w) return IDIST_ERR_NO_MEMORY;
    w->cfg = *cfg;
    pthread_mutex_init(&w->lock, NULL);
    idist__os_cond_init(&w->changed);
    idist__os_cond_init(&w->work);
    if (gethostname(w->hostname, sizeof w->hostname - 1) != 0)
        idist__copy_text(w->hostname, sizeof w->hostname, "localhost");
    if ((s = idist__log_init(&w->log, &cfg->logger)) != IDIST_OK) return s;
    if ((s = idist__backends_check(list, w->backends, sizeof w->backends)) != IDIST_OK) return s;
    if ((s = idist__backend_choose(w, list)) != IDIST_OK) return s;
    for (i = 0; i < (int)IDIST__COUNT_OF(list->items); i++)
        if (list->items[i] && list->items[i]->wrap) w->wrap = list->items[i]->wrap;
    n = w->cfg.world_size;
    snprintf(w->log.who, sizeof w->log.who, "rank %d/%d %s", w->cfg.rank, n, w->hostname);
    w->group.w = w;
    w->group.ctx = 1;
    w->group.rank = w->cfg.rank;
    w->group.size = n;
    w->group.ranks = (int *)idist__mem_alloc(&cfg->mem, sizeof(int) * (size_t)n);
    w->group.impl = idist__mem_alloc(&cfg->mem, w->backend->group_nbytes);
    w->nodes = (idist__node *)idist__mem_alloc(&cfg->mem, sizeof *w->nodes * (size_t)n);
    w->fork_guard = idist__os_fork_guard();
    if (!w->group.ranks || !w->group.impl || !w->nodes) return IDIST_ERR_NO_MEMORY;
    for (i = 0; i < n; i++) w->group.ranks[i] = i;
    return IDIST_OK;
}

// Where this rank runs, and how it waits. Polling costs the power of a core, so it is bounded; with more ranks than cores
// it would take the core from the rank that everybody waits for. Such ranks begin evenly spread: the kernel would take a
// good part of a second to see that one core has three of them and the other one has one.
static void idist__world_settle_in(idist__world *w) {
    const idist__node *me = &w->nodes[w->group.rank];
    int own = idist__os_ncores(), ncores = w->ncores ? w->ncores : own;
    bool crowded = me->local_size > ncores;
    w->spin_ns = w->patience_ns = crowded ? 0 : IDIST__SPIN_NS;
    if (own > 1 && (w->cfg.bind || crowded) && !idist__os_bind(me->local_rank % own, w->cfg.bind))
        idist__log_print(&w->log, w->cfg.bind ? IDIST_LOG_WARN : IDIST_LOG_INFO, "could not choose a processor: %s",
                         strerror(errno));
}

static idist_status idist__world_close(idist__world *w, bool force);

static idist_status idist__world_open(const idist__config *cfg, idist_backend_list list, idist__world **out) {
    idist__world *w = NULL;
    idist_status s = idist__world_new(cfg, &list, &w);
    *out = NULL;
    if (s == IDIST_OK) s = w->backend->open(w);
    if (s == IDIST_OK) {
        idist__world_count_nodes(w);
        idist__world_settle_in(w);
        s = w->backend->group_open(&w->group);
        while (s != IDIST_OK && w->group.next) idist__group_free(w->group.next);
        if (s != IDIST_OK) w->backend->close(w, false);
    }
    if (s != IDIST_OK) {
        if (w) idist__world_free(w);
        return s;
    }
    if (w->wrap && (s = w->wrap(w)) != IDIST_OK) {
        char text[sizeof idist__me.text];
        memcpy(text, idist__me.text, sizeof text);
        idist__world_close(w, w->group.status != IDIST_OK); // together, where all have the same error
        memcpy(idist__me.text, text, sizeof text);
        return s;
    }
    if (w->cfg.notice[0]) idist__log_print(&w->log, IDIST_LOG_WARN, "%s", w->cfg.notice);
    idist__log_print(&w->log, IDIST_LOG_INFO, "joined a world of %d, backend %s, launcher %s%s%s", w->group.size,
                     w->backend->name, w->cfg.launcher, cfg->rank_var ? " by " : "", cfg->rank_var ? cfg->rank_var : "");
    if (idist__tracer_now()) idist__tracer_now()->joined(w);
    *out = w;
    return IDIST_OK;
}

// From here on nobody finds the default world any more; idist_abort, which any thread may be in, is waited for.
static void idist__world_retire(idist__world *w) {
    pthread_mutex_lock(&idist__default_lock);
    if (w == idist__world_default()) __atomic_store_n(&idist__default_world, (idist__world *)NULL, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&idist__default_lock);
}

static bool idist__world_has_requests(idist__world *w) {
    idist_group *g;
    for (g = &w->group; g; g = g->next)
        if (g->nrequests) return true;
    return false;
}

// The last barrier. A rank that finalizes while others are in another call is a mismatch, and both learn of it.
static idist_status idist__world_last_barrier(idist__world *w) {
    idist__call c;
    idist_opts o;
    memset(&o, 0, sizeof o);
    idist__call_init(&c, IDIST__BARRIER, NULL, NULL, 0, IDIST_U8);
    c.label = IDIST__FINALIZE;
    return idist__call_traced(&w->group, &c, &o);
}

// force: without the last barrier and with requests open: a worker that failed. The others learn of it as of a lost
// rank.
static idist_status idist__world_close(idist__world *w, bool force) {
    idist_status s;
    if (idist__world_enter("finalize", w) != IDIST_OK) return IDIST_ERR_STATE;
    if (idist__me.group_depth && !force)
        return idist__fail(IDIST_ERR_STATE, "finalize: inside idist_group_begin; call idist_group_end first");
    idist__world_lock(w);
    if (!force && idist__world_has_requests(w)) {
        pthread_mutex_unlock(&w->lock);
        return idist__fail(IDIST_ERR_STATE, "finalize: requests are still open; wait for them first");
    }
    idist__me.group_depth = 0;
    idist__me.group_tasks = NULL;
    s = force ? IDIST_OK : idist__world_last_barrier(w);
    w->thread_stops = true;
    pthread_cond_broadcast(&w->work);
    w->backend->wake(w);
    pthread_mutex_unlock(&w->lock);
    idist__world_retire(w);
    if (w->thread_runs) pthread_join(w->thread, NULL);
    idist__world_lock(w);
    while (w->tasks) { // forced: from here on nothing touches the caller's buffers
        idist__task *t = w->tasks;
        w->backend->cancel(t);
        idist__complete(t, IDIST_ERR_ABORTED, "the world was closed");
    }
    w->leaves = s != IDIST_OK || force;
    if (w->group.status != IDIST_OK) { // members of other groups hear why we leave, and do not take us for the cause
        idist_group *g;
        for (g = w->group.next; g; g = g->next)
            if (g->rank >= 0 && g->size > 1 && !g->inner) idist__group_fail(g, w->group.status, w->group.cause);
    }
    pthread_mutex_unlock(&w->lock);
    while (w->group.next) idist__group_free(w->group.next);
    w->backend->group_close(&w->group);
    w->backend->close(w, !w->leaves);
    if (idist__tracer_now()) idist__tracer_now()->left();
    idist__log_print(&w->log, IDIST_LOG_INFO, "left the world");
    idist__world_free(w);
    return s;
}

idist_status idist_open_with(const idist_desc *desc, idist_group **world, idist_backend_list backends) {
    idist__config cfg;
    idist__world *w = NULL;
    idist_status s;
    if (!world) return idist__fail(IDIST_ERR_ARG, "open: world is NULL");
    *world = NULL;
    if ((s = idist__launch_config(&cfg, desc)) != IDIST_OK) return s;
    s = idist__world_open(&cfg, backends, &w);
    if (s == IDIST_OK) *world = &w->group;
    return s;
}

idist_status idist_close(idist_group **world) {
    idist_status s;
    if (world && *world && !(*world)->w) return idist__fail(IDIST_ERR_STATE, "close: the world was closed already");
    if (!world || !*world || *world != &(*world)->w->group)
        return idist__fail(IDIST_ERR_ARG, "close: not a world that idist_open returned");
    s = idist__world_close((*world)->w, false);
    if (s != IDIST_ERR_STATE) *world = NULL;
    return s;
}

idist_status idist_initialize_with(const idist_desc *desc, idist_backend_list backends) {
    idist_group *world = NULL;
    idist_status s;
    pthread_mutex_lock(&idist__life_lock);
    if (idist__world_default()) s = idist__fail(IDIST_ERR_STATE, "initialize: the world exists already; finalize it first");
    else s = idist_open_with(desc, &world, backends);
    if (world) __atomic_store_n(&idist__default_world, world->w, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&idist__life_lock);
    return s;
}

idist_status idist_finalize(void) {
    idist_status s;
    idist__world *w;
    pthread_mutex_lock(&idist__life_lock);
    w = idist__world_default();
    s = w ? idist__world_close(w, false)
          : idist__fail(IDIST_ERR_STATE, "finalize: there is no world; call idist_initialize first");
    pthread_mutex_unlock(&idist__life_lock);
    return s;
}

bool idist_is_initialized(void) { return idist__world_default() != NULL; }

idist_status idist_abort(idist_group *group) {
    idist_group *g = NULL;
    char cause[200];
    idist_status s;
    pthread_mutex_lock(&idist__default_lock);
    s = idist__call_enter("abort", group, &g);
    if (g) {
        snprintf(cause, sizeof cause, "rank %d on %s called idist_abort", g->w->group.rank, g->w->hostname);
        idist__group_fail(g, IDIST_ERR_ABORTED, cause);
        pthread_mutex_unlock(&g->w->lock);
    }
    pthread_mutex_unlock(&idist__default_lock);
    return s;
}

static const idist__node *idist__own_node(void) {
    idist__world *w = idist__world_default();
    return w ? &w->nodes[w->group.rank] : NULL;
}

int idist_get_rank(void) { return idist_group_rank(NULL); }
int idist_get_world_size(void) { return idist_group_size(NULL); }
int idist_get_local_rank(void) { return idist__own_node() ? idist__own_node()->local_rank : 0; }
int idist_get_nproc_per_node(void) { return idist__own_node() ? idist__own_node()->local_size : 1; }
int idist_get_nnodes(void) { return idist__world_default() ? idist__world_default()->nnodes : 1; }
int idist_get_node_rank(void) { return idist__own_node() ? idist__own_node()->node_rank : 0; }
const char *idist_backend(void) { return idist__world_default() ? idist__world_default()->backend->name : "self"; }
const char *idist_device(void) {
    idist__world *w = idist__world_default();
    return w && w->device ? w->device_name : "cpu";
}
const char *idist_device_backend(void) {
    idist__world *w = idist__world_default();
    return w && w->device ? w->device_backend : "none";
}

const char *idist_launcher(void) {
    idist__config c;
    char text[sizeof idist__me.text];
    if (idist__world_default()) return idist__world_default()->cfg.launcher;
    memcpy(text, idist__me.text, sizeof text);
    memset(&c, 0, sizeof c);
    c.launcher = "none";
    idist__launch_detect(&c); // what is wrong with it idist_initialize will say
    memcpy(idist__me.text, text, sizeof text);
    return c.launcher;
}

const char *idist_hostname(void) {
    idist__world *w = idist__world_default();
    if (w) return w->hostname;
    if (gethostname(idist__me.hostname, sizeof idist__me.hostname - 1) != 0)
        idist__copy_text(idist__me.hostname, sizeof idist__me.hostname, "localhost");
    return idist__me.hostname;
}

const char *idist_available_backends_of(idist_backend_list backends) {
    if (idist__backends_check(&backends, idist__me.names, sizeof idist__me.names) != IDIST_OK) return "self";
    return idist__me.names;
}

const char *idist_show_config(void) {
    idist__world *w = idist__world_default();
    char *buf = idist__me.config;
    size_t cap = sizeof idist__me.config;
    snprintf(buf, cap, "backend: %s\ndevice: %s\ndevice backend: %s\nhostname: %s\n", idist_backend(), idist_device(),
             idist_device_backend(), w ? w->hostname : "-");
    idist__append(buf, cap,
                  "world size: %d\nrank: %d\nlocal rank: %d\nnum processes per node: %d\nnum nodes: %d\nnode rank: %d\n",
                  idist_get_world_size(), idist_get_rank(), idist_get_local_rank(), idist_get_nproc_per_node(),
                  idist_get_nnodes(), idist_get_node_rank());
    idist__append(buf, cap, "launcher: %s", idist_launcher());
    if (w && w->cfg.rank_var) idist__append(buf, cap, " by %s and %s", w->cfg.rank_var, w->cfg.size_var);
    idist__append(buf, cap, "\n");
    if (w)
        idist__append(buf, cap, "rendezvous: %s\ntimeout: %d ms\n", w->cfg.where[0] ? w->cfg.where : "none",
                      w->cfg.timeout_ms);
    return buf;
}

//------------------------------------------------------------------------------
// [impl:coll]  the public collectives: each fills one call
// uses call . used by group help spawn
//------------------------------------------------------------------------------

// All but the v-forms. SUM where nothing is reduced, -1 where there is no root; label: what it is a part of, or its kind.
static idist_status idist__collective(idist__kind kind, idist__kind label, const void *send, void *recv, size_t count,
                                      idist_dtype dtype, idist_op op, int root, const idist_opts *opts) {
    idist__call c;
    idist__call_init(&c, kind, send, recv, count, dtype);
    c.label = label;
    c.op = op;
    c.root = root;
    return idist__call_run(&c, opts);
}

idist_status idist_all_reduce(const void *send, void *recv, size_t count, idist_dtype dtype, idist_op op,
                              const idist_opts *opts) {
    return idist__collective(IDIST__ALL_REDUCE, IDIST__ALL_REDUCE, send, recv, count, dtype, op, -1, opts);
}

idist_status idist_reduce(const void *send, void *recv, size_t count, idist_dtype dtype, idist_op op, int root,
                          const idist_opts *opts) {
    return idist__collective(IDIST__REDUCE, IDIST__REDUCE, send, recv, count, dtype, op, root, opts);
}

idist_status idist_reduce_scatter(const void *send, void *recv, size_t count, idist_dtype dtype, idist_op op,
                                  const idist_opts *opts) {
    return idist__collective(IDIST__REDUCE_SCATTER, IDIST__REDUCE_SCATTER, send, recv, count, dtype, op, -1, opts);
}

idist_status idist_scan(const void *send, void *recv, size_t count, idist_dtype dtype, idist_op op, const idist_opts *opts) {
    return idist__collective(IDIST__SCAN, IDIST__SCAN, send, recv, count, dtype, op, -1, opts);
}

idist_status idist_exscan(const void *send, void *recv, size_t count, idist_dtype dtype, idist_op op,
                          const idist_opts *opts) {
    return idist__collective(IDIST__EXSCAN, IDIST__EXSCAN, send, recv, count, dtype, op, -1, opts);
}

idist_status idist_broadcast(void *buf, size_t count, idist_dtype dtype, int root, const idist_opts *opts) {
    return idist__collective(IDIST__BROADCAST, IDIST__BROADCAST, NULL, buf, count, dtype, IDIST_SUM, root, opts);
}

idist_status idist_barrier(const idist_opts *opts) {
    return idist__collective(IDIST__BARRIER, IDIST__BARRIER, NULL, NULL, 0, IDIST_U8, IDIST_SUM, -1, opts);
}

idist_status idist_all_gather(const void *send, void *recv, size_t count, idist_dtype dtype, const idist_opts *opts) {
    return idist__collective(IDIST__ALL_GATHER, IDIST__ALL_GATHER, send, recv, count, dtype, IDIST_SUM, -1, opts);
}

idist_status idist_gather(const void *send, void *recv, size_t count, idist_dtype dtype, int root, const idist_opts *opts) {
    return idist__collective(IDIST__GATHER, IDIST__GATHER, send, recv, count, dtype, IDIST_SUM, root, opts);
}

idist_status idist_scatter(const void *send, void *recv, size_t count, idist_dtype dtype, int root, const idist_opts *opts) {
    return idist__collective(IDIST__SCATTER, IDIST__SCATTER, send, recv, count, dtype, IDIST_SUM, root, opts);
}

idist_status idist_all_to_all(const void *send, void *recv, size_t count, idist_dtype dtype, const idist_opts *opts) {
    return idist__collective(IDIST__ALL_TO_ALL, IDIST__ALL_TO_ALL, send, recv, count, dtype, IDIST_SUM, -1, opts);
}

// The counts that must agree on all ranks go into the fingerprint as a hash; those that concern two ranks are checked
// against the length of the message between them.
idist_status idist_all_gatherv(const void *send, size_t sendcount, void *recv, const size_t *recvcounts,
                               const size_t *recvdispls, idist_dtype dtype, const idist_opts *opts) {
    idist__call c;
    int n = idist_group_size(opts ? opts->group : NULL);
    idist__call_init(&c, IDIST__ALL_GATHERV, send, recv, sendcount, dtype);
    c.recvcounts = recvcounts;
    c.recvdispls = recvdispls;
    c.check = recvcounts ? idist__hash(recvcounts, sizeof *recvcounts * (size_t)n) : 0;
    return idist__call_run(&c, opts);
}

idist_status idist_gatherv(const void *send, size_t sendcount, void *recv, const size_t *recvcounts,
                           const size_t *recvdispls, idist_dtype dtype, int root, const idist_opts *opts) {
    idist__call c;
    idist__call_init(&c, IDIST__GATHERV, send, recv, sendcount, dtype);
    c.recvcounts = recvcounts;
    c.recvdispls = recvdispls;
    c.root = root;
    c.check = 0;
    return idist__call_run(&c, opts);
}

idist_status idist_scatterv(const void *send, const size_t *sendcounts, const size_t *senddispls, void *recv,
                            size_t recvcount, idist_dtype dtype, int root, const idist_opts *opts) {
    idist__call c;
    idist__call_init(&c, IDIST__SCATTERV, send, recv, recvcount, dtype);
    c.sendcounts = sendcounts;
    c.senddispls = senddispls;
    c.root = root;
    c.check = 0;
    return idist__call_run(&c, opts);
}

idist_status idist_all_to_allv(const void *send, const size_t *sendcounts, const size_t *senddispls, void *recv,
                               const size_t *recvcounts, const size_t *recvdispls, idist_dtype dtype,
                               const idist_opts *opts) {
    idist__call c;
    idist__call_init(&c, IDIST__ALL_TO_ALLV, send, recv, 0, dtype);
    c.sendcounts = sendcounts;
    c.senddispls = senddispls;
    c.recvcounts = recvcounts;
    c.recvdispls = recvdispls;
    return idist__call_run(&c, opts);
}

static idist_status idist__check_blocking(const char *name, const idist_opts *opts) {
    if (opts && opts->request) return idist__fail(IDIST_ERR_ARG, "%s: blocking only; opts.request must be NULL", name);
    if (idist__me.group_depth)
        return idist__fail(IDIST_ERR_STATE, "%s: not between idist_group_begin and idist_group_end", name);
    return IDIST_OK;
}

idist_status idist_broadcast_bytes(void *buf, size_t capacity, size_t *nbytes, int root, const idist_opts *opts) {
    const idist_group *group = opts ? opts->group : NULL;
    bool is_root = idist_group_rank(group) == root;
    uint64_t n = 0;
    void *waste = NULL;
    idist_status s = idist__check_blocking("broadcast_bytes", opts);
    if (s != IDIST_OK) return s;
    if (!nbytes || (capacity && !buf)) return idist__fail(IDIST_ERR_ARG, "broadcast_bytes: buf or nbytes is NULL");
    if (is_root && *nbytes > capacity)
        return idist__fail(IDIST_ERR_ARG, "broadcast_bytes: root says %zu bytes in a buffer of %zu", *nbytes, capacity);
    if (is_root) n = *nbytes;
    s = idist__collective(IDIST__BROADCAST, IDIST__BROADCAST_BYTES, NULL, &n, 1, IDIST_U64, IDIST_SUM, root, opts);
    if (s != IDIST_OK) return s;
    // A rank whose buffer is too small takes part all the same, so that the others are not held up.
    if (n > capacity && (waste = malloc((size_t)n)) == NULL) {
        idist_abort(opts ? opts->group : NULL);
        return idist__fail(IDIST_ERR_NO_MEMORY, "broadcast_bytes: no memory for %llu bytes", (unsigned long long)n);
    }
    s = idist__collective(IDIST__BROADCAST, IDIST__BROADCAST_BYTES, NULL, waste ? waste : buf, (size_t)n, IDIST_U8,
                          IDIST_SUM, root, opts);
    free(waste);
    if (s != IDIST_OK) return s;
    *nbytes = (size_t)n;
    if (n > capacity)
        return idist__fail(IDIST_ERR_TRUNCATED, "broadcast_bytes: %llu bytes came, the buffer has %zu",
                           (unsigned long long)n, capacity);
    return IDIST_OK;
}

idist_status idist_all_gather_bytes(const void *send, size_t nbytes, void *buf, size_t capacity, size_t *sizes,
                                    const idist_opts *opts) {
    int i, n = idist_group_size(opts ? opts->group : NULL);
    size_t total = 0, own = nbytes;
    void *waste = NULL;
    idist__call c;
    idist_status s = idist__check_blocking("all_gather_bytes", opts);
    if (s != IDIST_OK) return s;
    if (!sizes || (capacity && !buf) || (nbytes && !send))
        return idist__fail(IDIST_ERR_ARG, "all_gather_bytes: send, buf or sizes is NULL");
    if (nbytes && capacity && (const char *)send < (const char *)buf + capacity &&
        (const char *)buf < (const char *)send + nbytes)
        return idist__fail(IDIST_ERR_ARG, "all_gather_bytes: send and buf overlap; there is no in-place form");
    s = idist__collective(IDIST__ALL_GATHER, IDIST__ALL_GATHER_BYTES, &own, sizes, sizeof own, IDIST_U8, IDIST_SUM, -1,
                          opts);
    if (s != IDIST_OK) return s;
    for (i = 0; i < n; i++) total += sizes[i];
    if (total > capacity && (waste = malloc(total)) == NULL) {
        idist_abort(opts ? opts->group : NULL);
        return idist__fail(IDIST_ERR_NO_MEMORY, "all_gather_bytes: no memory for %zu bytes", total);
    }
    idist__call_init(&c, IDIST__ALL_GATHERV, send, waste ? waste : buf, nbytes, IDIST_U8);
    c.label = IDIST__ALL_GATHER_BYTES;
    c.recvcounts = sizes;
    c.check = idist__hash(sizes, sizeof *sizes * (size_t)n);
    s = idist__call_run(&c, opts);
    free(waste);
    if (s == IDIST_OK && total > capacity)
        return idist__fail(IDIST_ERR_TRUNCATED, "all_gather_bytes: %zu bytes came, the buffer has %zu", total, capacity);
    return s;
}

//------------------------------------------------------------------------------
// [impl:p2p]  send, receive, requests, and calls that progress together
// uses call . used by -
//------------------------------------------------------------------------------

static idist_status idist__p2p(idist__kind kind, const void *send, void *recv, size_t count, idist_dtype dtype, int peer,
                               int tag, idist_recv_info *info, const idist_opts *opts) {
    idist__call c;
    idist__call_init(&c, kind, send, recv, count, dtype);
    c.root = peer;
    c.tag = tag;
    c.info = info;
    return idist__call_run(&c, opts);
}

idist_status idist_send(const void *buf, size_t count, idist_dtype dtype, int dst, int tag, const idist_opts *opts) {
    return idist__p2p(IDIST__SEND, buf, NULL, count, dtype, dst, tag, NULL, opts);
}

idist_status idist_recv(void *buf, size_t count, idist_dtype dtype, int src, int tag, idist_recv_info *info,
                        const idist_opts *opts) {
    return idist__p2p(IDIST__RECV, NULL, buf, count, dtype, src, tag, info, opts);
}

// The task of a request, with its world locked; NULL: there is none, or an error.
static idist__task *idist__request_enter(const char *name, const idist_request *request, idist_status *s) {
    idist__task *t = request ? (idist__task *)request->impl : NULL;
    *s = request ? IDIST_OK : idist__fail(IDIST_ERR_ARG, "%s: request is NULL", name);
    if (t && (*s = idist__world_enter(name, t->group->w)) != IDIST_OK) return NULL;
    if (t) idist__world_lock(t->group->w);
    if (t && idist__me.held_world == t->group->w) t->group->w->launch(t->group->w); // it may be one of those
    return t;
}

static bool idist__task_followed(void *t) { return ((idist__task *)t)->done || ((idist__task *)t)->followed; }

static idist_status idist__request_wait(const char *name, idist_request *request, bool follow, void *stream) {
    idist_status s;
    idist__task *t = idist__request_enter(name, request, &s);
    idist__world *w;
    if (!t) return s;
    w = t->group->w;
    idist__trace_begin("wait", name, t->group, &t->call);
    if (follow) idist__world_wait(w, idist__task_followed, t);
    else idist__task_wait(t);
    request->impl = NULL;
    s = idist__trace_end(t->done ? idist__task_result(t) : w->follow(t, stream));
    pthread_mutex_unlock(&w->lock);
    return s;
}

idist_status idist_wait(idist_request *request) { return idist__request_wait("wait", request, false, NULL); }

idist_status idist_wait_stream(idist_request *request, void *stream) {
    return idist__request_wait("wait_stream", request, true, stream);
}

idist_status idist_test(idist_request *request, bool *done) {
    idist_status s;
    idist__task *t = done ? idist__request_enter("test", request, &s) : NULL;
    idist__world *w;
    if (!done) return idist__fail(IDIST_ERR_ARG, "test: done is NULL");
    *done = true;
    if (!t) return s;
    w = t->group->w;
    if (!t->done && w->driver == IDIST__DRIVER_NONE) {
        w->backend->progress(w);
        if (!t->done) idist__world_timers(w);
    }
    *done = t->done;
    if (t->done) {
        request->impl = NULL;
        s = idist__task_result(t);
    }
    pthread_mutex_unlock(&w->lock);
    return s;
}

idist_status idist_wait_all(idist_request *requests, size_t n) {
    idist_status first = IDIST_OK;
    char text[sizeof idist__me.text];
    size_t i;
    if (n && !requests) return idist__fail(IDIST_ERR_ARG, "wait_all: requests is NULL");
    for (i = 0; i < n; i++) {
        idist_status s = idist_wait(&requests[i]);
        if (s == IDIST_OK || first != IDIST_OK) continue;
        first = s;
        memcpy(text, idist__me.text, sizeof text);
    }
    if (first != IDIST_OK) memcpy(idist__me.text, text, sizeof text);
    return first;
}

typedef struct idist__several { // several requests, and the first of them that is complete
    const idist__world *w;
    const idist_request *requests;
    size_t n, at;
    uint32_t ended; // w->nended when they were looked at
} idist__several;

static bool idist__several_ready(void *arg) {
    idist__several *any = (idist__several *)arg;
    if (any->w->nended == any->ended) return false; // there may be thousands
    for (any->at = 0; any->at < any->n; any->at++) {
        const idist__task *t = (const idist__task *)any->requests[any->at].impl;
        if (t && t->done) return true;
    }
    any->ended = any->w->nended;
    return false;
}

idist_status idist_wait_any(idist_request *requests, size_t n, size_t *index) {
    idist__world *w = NULL;
    idist__several any;
    idist_status s;
    size_t i;
    if ((n && !requests) || !index) return idist__fail(IDIST_ERR_ARG, "wait_any: requests or index is NULL");
    *index = n;
    for (i = 0; i < n; i++) {
        const idist__task *t = (const idist__task *)requests[i].impl;
        if (t && w && t->group->w != w)
            return idist__fail(IDIST_ERR_ARG, "wait_any: the requests belong to different worlds");
        if (t) w = t->group->w;
    }
    if (!w) return IDIST_OK;
    if (idist__world_enter("wait_any", w) != IDIST_OK) return IDIST_ERR_STATE;
    any.w = w;
    any.requests = requests;
    any.n = n;
    idist__world_lock(w);
    any.ended = w->nended - 1;
    idist__trace_begin("wait", "wait_any", NULL, NULL);
    idist__world_wait(w, idist__several_ready, &any);
    *index = any.at;
    s = idist__trace_end(idist__task_result((idist__task *)requests[any.at].impl));
    requests[any.at].impl = NULL;
    pthread_mutex_unlock(&w->lock);
    return s;
}

idist_status idist_sendrecv(const void *send, size_t sendcount, int dst, int sendtag, void *recv, size_t recvcount, int src,
                            int recvtag, idist_dtype dtype, idist_recv_info *info, const idist_opts *opts) {
    idist__thread *self = &idist__me;
    struct {
        idist__call send, recv;
    } pair;
    idist_group *g = NULL;
    idist_opts o;
    size_t size = idist_dtype_size(dtype);
    const char *a = (const char *)send, *b = (const char *)recv;
    bool quick, detached, on_device[2] = {false, false};
    idist_status s = idist__check_blocking("sendrecv", opts);
    idist__task *first, *t, *next;
    if (s != IDIST_OK) return s;
    if (size && sendcount && recvcount && a && b && a < b + recvcount * size && b < a + sendcount * size)
        return idist__fail(IDIST_ERR_ARG, "sendrecv: send and receive buffers overlap");
    memset(&o, 0, sizeof o);
    if (opts) o = *opts;
    if ((s = idist__call_enter("sendrecv", o.group, &g)) != IDIST_OK) return s;
    idist__call_init(&pair.recv, IDIST__RECV, NULL, recv, recvcount, dtype);
    pair.recv.root = src;
    pair.recv.tag = recvtag;
    pair.recv.info = info;
    idist__call_init(&pair.send, IDIST__SEND, send, NULL, sendcount, dtype);
    pair.send.root = dst;
    pair.send.tag = sendtag;
    if ((s = idist__call_check(g, &pair.send)) == IDIST_OK && (s = idist__call_check(g, &pair.recv)) == IDIST_OK &&
        (s = idist__call_route(g, &pair.send, &o, &on_device[0], &detached)) == IDIST_OK) // both, before either begins
        s = idist__call_route(g, &pair.recv, &o, &on_device[1], &detached);
    idist__trace_begin("call", "sendrecv", g, s == IDIST_OK ? &pair.send : NULL);
    quick = s == IDIST_OK && !on_device[0] && !on_device[1] && idist__call_quick(g, &pair.send, &o);
    self->group_depth = quick ? 0 : 1;
    self->group_status = IDIST_OK;
    if (s == IDIST_OK) s = idist__call_locked(g, &pair.recv, &o);
    if (s == IDIST_OK && !quick) s = idist__call_locked(g, &pair.send, &o);
    self->group_depth = 0;
    if (g->w->launch) g->w->launch(g->w);
    first = self->group_tasks; // the receive, then the send; none or one when something went wrong
    self->group_tasks = NULL;
    for (t = first; t; t = t->chain) idist__task_wait(t);
    for (t = first; t; t = next) {
        next = t->chain;
        if (s == IDIST_OK) s = idist__task_result(t);
        else idist__task_drop(t);
    }
    pthread_mutex_unlock(&g->w->lock);
    return idist__trace_end(s);
}

idist_status idist_group_begin(void) {
    if (!idist__me.group_depth++) idist__me.group_status = IDIST_OK;
    return IDIST_OK;
}

idist_status idist_group_end(void) {
    idist__thread *self = &idist__me;
    char text[sizeof self->text];
    idist_status first;
    if (!self->group_depth) return idist__fail(IDIST_ERR_STATE, "group_end: without idist_group_begin");
    if (--self->group_depth) return IDIST_OK;
    idist__trace_begin("wait", "group_end", NULL, NULL);
    if (self->held_world) {
        idist__world *w = self->held_world;
        idist__world_lock(w);
        w->launch(w);
        pthread_mutex_unlock(&w->lock);
    }
    first = self->group_status;
    memcpy(text, self->group_text, sizeof text);
    while (self->group_tasks) {
        idist__task *t = self->group_tasks;
        idist__world *w = t->group->w;
        idist_status s;
        self->group_tasks = t->chain;
        idist__world_lock(w);
        idist__task_wait(t);
        s = idist__task_result(t);
        pthread_mutex_unlock(&w->lock);
        if (s == IDIST_OK || first != IDIST_OK) continue;
        first = s;
        memcpy(text, self->text, sizeof text);
    }
    if (first != IDIST_OK) memcpy(self->text, text, sizeof text);
    return idist__trace_end(first);
}

//------------------------------------------------------------------------------
// [impl:group]  groups and user ops
// uses coll . used by help
//------------------------------------------------------------------------------

int idist_group_rank(const idist_group *group) {
    const idist__world *w = group ? NULL : idist__world_default();
    return group ? group->rank : w ? w->group.rank : 0;
}

int idist_group_size(const idist_group *group) {
    const idist__world *w = group ? NULL : idist__world_default();
    return group ? group->size : w ? w->group.size : 1;
}

int idist_group_translate(const idist_group *from, int rank, const idist_group *to) {
    int i, world_rank;
    if (!from && idist__world_default()) from = &idist__world_default()->group;
    if (!to && idist__world_default()) to = &idist__world_default()->group;
    if (!from || !to) return rank == 0 ? 0 : -1;
    if (from->w != to->w || rank < 0 || rank >= from->size) return -1;
    world_rank = from->ranks[rank];
    for (i = 0; i < to->size; i++)
        if (to->ranks[i] == world_rank) return i;
    return -1;
}

// Members agree on ctx without talking: it follows from the parent's, the number of groups made from it, and the color.
static uint64_t idist__group_ctx(const idist_group *parent, uint32_t nchildren, uint64_t color) {
    uint64_t ctx = idist__mix(idist__mix(parent->ctx, nchildren), color);
    return ctx ? ctx : 1;
}

// g has been made before the members agreed on it: from here on the others count on this rank.
static idist_status idist__group_make(idist_group *parent, idist_group *g, uint64_t color, const int *ranks, int n,
                                      idist_group **out) {
    idist__world *w = parent->w;
    idist_status s = IDIST_OK;
    idist__group_set(g, idist__group_ctx(parent, parent->nchildren, color), ranks, n);
    g->next = w->group.next;
    w->group.next = g;
    g->maker = parent;
    if (g->rank >= 0) s = w->backend->group_open(g);
    if (s != IDIST_OK) {
        g->rank = -1; // was never opened
        idist__group_free(g);
        idist__group_fail(parent, s, "a rank could not make its part of a new group");
        return s;
    }
    *out = g;
    return IDIST_OK;
}

// The members of a new group exchange what its backend wants to know. If the group fails meanwhile, because a member has
// aborted it or died, it exists all the same, as it does for those who had come further.
static idist_status idist__group_meet(idist_group **group, idist__kind label) {
    idist_group *g = *group;
    idist__world *w = g->w;
    idist_opts o;
    idist_status s;
    uint64_t *offers;
    if (g->rank < 0 || g->size == 1 || !w->backend->group_meet) {
        g->maker = NULL;
        return IDIST_OK;
    }
    if (g->maker->status != IDIST_OK) { // failed meanwhile, perhaps because a member could not make its part
        idist__world_lock(w);
        idist__group_fail(g, g->maker->status, g->maker->cause);
        pthread_mutex_unlock(&w->lock);
    }
    offers = (uint64_t *)idist__mem_alloc(&w->cfg.mem, sizeof *offers * (size_t)(g->size + 1));
    if (!offers) {
        idist_abort(g);
        s = IDIST_ERR_NO_MEMORY;
    } else {
        memset(&o, 0, sizeof o);
        o.group = g;
        idist__world_lock(w);
        offers[g->size] = w->backend->group_offer(g);
        pthread_mutex_unlock(&w->lock);
        s = idist__collective(IDIST__ALL_GATHER, label, &offers[g->size], offers, 1, IDIST_U64, IDIST_SUM, -1, &o);
        idist__world_lock(w);
        if (s == IDIST_OK && (s = w->backend->group_meet(g, offers)) != IDIST_OK)
            idist__group_fail(g, s, "a rank is out of memory");
        pthread_mutex_unlock(&w->lock);
    }
    g->maker = NULL;
    idist__mem_free(&w->cfg.mem, offers);
    if (s != IDIST_OK && g->status != IDIST_OK) s = IDIST_OK;
    if (s != IDIST_OK) {
        idist__world_lock(w);
        idist__group_free(g);
        pthread_mutex_unlock(&w->lock);
        *group = NULL;
    }
    return s;
}

// Lets go of the lock. The group is allocated before anybody counts on this rank. A backend without group_meet blocks while
// it opens a group: two at a time, in two orders on two ranks, would wait for each other.
static idist_status idist__group_making(const char *name, idist__world *w, int room, idist_group **g) {
    bool one = w->nmaking && w->group.size > 1 && !w->backend->group_meet;
    *g = one ? NULL : idist__group_new(w, room);
    if (*g) w->nmaking++;
    pthread_mutex_unlock(&w->lock);
    if (one)
        return idist__fail(IDIST_ERR_STATE, "%s: another thread makes a group; with the backend %s one at a time", name,
                           w->backend->name);
    return *g ? IDIST_OK : IDIST_ERR_NO_MEMORY;
}

// The ranks agree, or not (s): opens the group, or frees it.
static idist_status idist__group_agreed(idist_group *parent, idist_group *g, idist_status s, uint64_t color,
                                        const int *ranks, int n, idist__kind label, idist_group **out) {
    idist__world *w = parent->w;
    idist__world_lock(w);
    if (s == IDIST_OK) parent->nchildren++;
    if (s == IDIST_OK) s = idist__group_make(parent, g, color, ranks, n, out);
    else idist__group_free(g);
    pthread_mutex_unlock(&w->lock);
    if (s == IDIST_OK) s = idist__group_meet(out, label);
    idist__world_lock(w);
    w->nmaking--;
    pthread_mutex_unlock(&w->lock);
    return s;
}

static int idist__compare_ints(const void *a, const void *b) {
    int x = *(const int *)a, y = *(const int *)b;
    return (x > y) - (x < y);
}

// A barrier whose fingerprint carries the list, which is ascending.
static idist_status idist__group_barrier(int world_size, const int *ranks, int n) {
    idist__call c;
    int i;
    for (i = 0; i < n; i++)
        if (ranks[i] < 0 || ranks[i] >= world_size || (i && ranks[i] == ranks[i - 1]))
            return idist__fail(IDIST_ERR_ARG, "new_group: rank %d is listed twice or outside 0..%d", ranks[i],
                               world_size - 1);
    idist__call_init(&c, IDIST__BARRIER, NULL, NULL, 0, IDIST_U8);
    c.label = IDIST__NEW_GROUP;
    c.check = idist__hash(ranks, sizeof(int) * (size_t)n);
    return idist__call_run(&c, NULL);
}

idist_status idist_new_group(const int *ranks, int n, idist_group **group) {
    idist_group *world = NULL, *g;
    idist_status s;
    if (!group) return idist__fail(IDIST_ERR_ARG, "new_group: group is NULL");
    *group = NULL;
    if ((s = idist__check_blocking("new_group", NULL)) != IDIST_OK) return s;
    if ((s = idist__call_enter("new_group", NULL, &world)) != IDIST_OK) return s;
    if (!ranks || n < 1 || n > world->size) {
        pthread_mutex_unlock(&world->w->lock);
        return idist__fail(IDIST_ERR_ARG, "new_group: needs 1 to %d ranks", world->size);
    }
    s = idist__group_making("new_group", world->w, n, &g);
    if (!g) return s;
    memcpy(g->ranks, ranks, sizeof(int) * (size_t)n);
    qsort(g->ranks, (size_t)n, sizeof(int), idist__compare_ints);
    s = idist__group_barrier(world->size, g->ranks, n);
    return idist__group_agreed(world, g, s, 0, g->ranks, n, IDIST__NEW_GROUP, group);
}

// The members of one color, ordered by key, then by rank in the parent. all: color and key of each rank.
static int idist__split_members(const idist_group *parent, const int *all, int color, int *ranks) {
    int i, k, n = 0;
    int *order = ranks + parent->size;
    if (color < 0) return 0;
    for (i = 0; i < parent->size; i++) {
        if (all[2 * i] != color) continue;
        for (k = n++; k > 0 && all[2 * order[k - 1] + 1] > all[2 * i + 1]; k--) order[k] = order[k - 1];
        order[k] = i;
    }
    for (i = 0; i < n; i++) ranks[i] = parent->ranks[order[i]];
    return n;
}

idist_status idist_split(idist_group *parent, int color, int key, idist_group **group) {
    idist_group *p, *g;
    idist_opts o;
    idist_status s;
    int mine[2], *all, n = 0;
    if (!group) return idist__fail(IDIST_ERR_ARG, "split: group is NULL");
    *group = NULL;
    if ((s = idist__check_blocking("split", NULL)) != IDIST_OK) return s;
    if ((s = idist__call_enter("split", parent, &p)) != IDIST_OK) return s;
    s = idist__group_making("split", p->w, p->size, &g);
    if (!g) return s;
    all = (int *)idist__mem_alloc(&p->w->cfg.mem, sizeof(int) * 4 * (size_t)p->size);
    memset(&o, 0, sizeof o);
    o.group = p;
    mine[0] = color < 0 ? -1 : color;
    mine[1] = key;
    s = all ? idist__collective(IDIST__ALL_GATHER, IDIST__SPLIT, mine, all, 2, IDIST_I32, IDIST_SUM, -1, &o)
            : IDIST_ERR_NO_MEMORY;
    if (s == IDIST_OK) n = idist__split_members(p, all, mine[0], all + 2 * p->size);
    s = idist__group_agreed(p, g, s, (uint64_t)(int64_t)mine[0] + 1, all + 2 * p->size, n, IDIST__SPLIT, group);
    idist__mem_free(&p->w->cfg.mem, all);
    return s;
}

static bool idist__group_settled(void *arg) { return !((const idist_group *)arg)->ndetached; }

idist_status idist_free_group(idist_group **group) {
    idist_group *g;
    idist__world *w;
    idist_status s = IDIST_OK;
    if (!group || !*group) return idist__fail(IDIST_ERR_ARG, "free_group: the group is NULL (freed already?)");
    g = *group;
    if (!g->w) { // the world has taken it along
        *group = NULL;
        return IDIST_OK;
    }
    if (g->freed) return idist__fail(IDIST_ERR_STATE, "free_group: the group was freed already");
    if (idist__world_enter("free_group", g->w) || idist__check_blocking("free_group", NULL)) return IDIST_ERR_STATE;
    if (g == &g->w->group) return idist__fail(IDIST_ERR_ARG, "free_group: a world ends by idist_finalize or idist_close");
    w = g->w;
    idist__world_lock(w);
    idist__world_wait(w, idist__group_settled, g);
    if (g->ntasks || g->nrequests) {
        s = idist__fail(IDIST_ERR_STATE, "free_group: requests are still open on it; wait for them first");
    } else {
        w->backend->progress(w); // messages for it that lie there: once it is gone nobody knows where they belong
        if (g->node) idist__group_free(g->node);
        idist__group_free(g);
        idist__world_rouse(w);
        *group = NULL;
    }
    pthread_mutex_unlock(&w->lock);
    return s;
}

static idist_status idist__needs_ulfm(const char *name) {
    return idist__fail(IDIST_ERR_UNSUPPORTED,
                       "%s: by no backend but mpi, and that with Open MPI 5 under mpirun --with-ft ulfm", name);
}

idist_status idist_shrink(idist_group *group, idist_group **survivors) {
    idist_group *g, *made;
    idist_status s;
    uint32_t serial;
    int *ranks, n = 0;
    if (!survivors) return idist__fail(IDIST_ERR_ARG, "shrink: survivors is NULL");
    *survivors = NULL;
    if ((s = idist__check_blocking("shrink", NULL)) != IDIST_OK) return s;
    if ((s = idist__call_enter("shrink", group, &g)) != IDIST_OK) return s;
    made = idist__group_new(g->w, g->size);
    ranks = made ? (int *)idist__mem_alloc(&g->w->cfg.mem, sizeof(int) * (size_t)g->size) : NULL;
    serial = g->nchildren + 1;
    if (g->rank < 0) s = idist__fail(IDIST_ERR_STATE, "shrink: this rank is not a member of the group");
    else if (!g->w->backend->shrink) s = idist__needs_ulfm("shrink");
    else s = ranks ? g->w->backend->shrink(g, ranks, &n, &serial) : IDIST_ERR_NO_MEMORY;
    if (s == IDIST_OK) {
        g->nchildren = serial; // members may have come to different numbers when they lost a rank
        s = idist__group_make(g, made, 0, ranks, n, survivors);
        if (s == IDIST_OK) (*survivors)->maker = NULL; // there is nothing more to do for it
    } else if (made) {
        idist__group_free(made);
    }
    pthread_mutex_unlock(&g->w->lock);
    idist__mem_free(&g->w->cfg.mem, ranks);
    return s;
}

idist_status idist_agree(idist_group *group, int *flag) {
    idist_group *g;
    idist_status s;
    if (!flag) return idist__fail(IDIST_ERR_ARG, "agree: flag is NULL");
    if ((s = idist__check_blocking("agree", NULL)) != IDIST_OK) return s;
    if ((s = idist__call_enter("agree", group, &g)) != IDIST_OK) return s;
    if (g->rank < 0) s = idist__fail(IDIST_ERR_STATE, "agree: this rank is not a member of the group");
    else if (g->size > 1 && !g->w->backend->agree) s = idist__needs_ulfm("agree");
    else if (g->size > 1) s = g->w->backend->agree(g, flag);
    pthread_mutex_unlock(&g->w->lock);
    return s;
}

static idist_status idist__op_add(const char *name, idist_op_fn fn, void *arg, double factor, bool commutative,
                                  idist_group *group, idist_op *op) {
    idist_group *g;
    idist_status s;
    size_t i;
    if (!op) return idist__fail(IDIST_ERR_ARG, "%s: op is NULL", name);
    *op = IDIST_OP_COUNT;
    if ((s = idist__call_enter(name, group, &g)) != IDIST_OK) return s;
    for (i = 0; i < IDIST__COUNT_OF(g->w->ops) && g->w->ops[i].used; i++) continue;
    if (i == IDIST__COUNT_OF(g->w->ops)) {
        s = idist__fail(IDIST_ERR_NO_SPACE, "%s: a world has room for %zu ops", name, i);
    } else {
        idist__user_op *u = &g->w->ops[i];
        u->fn = fn;
        u->arg = arg;
        u->factor = factor;
        u->commutative = commutative;
        u->used = true;
        *op = (idist_op)(IDIST_OP_USER + (int)i);
    }
    pthread_mutex_unlock(&g->w->lock);
    return s;
}

idist_status idist_op_create(idist_op_fn fn, void *arg, bool commutative, idist_group *group, idist_op *op) {
    if (!fn) return idist__fail(IDIST_ERR_ARG, "op_create: fn is NULL");
    return idist__op_add("op_create", fn, arg, 1, commutative, group, op);
}

idist_status idist_op_create_premul_sum(double factor, idist_group *group, idist_op *op) {
    return idist__op_add("op_create_premul_sum", NULL, NULL, factor, true, group, op);
}

idist_status idist_op_free(idist_op op, idist_group *group) {
    idist_group *g;
    idist_status s = idist__call_enter("op_free", group, &g);
    if (s != IDIST_OK) return s;
    if ((int)op < IDIST_OP_USER || (int)op > IDIST_OP_LAST || !g->w->ops[op - IDIST_OP_USER].used)
        s = idist__fail(IDIST_ERR_ARG, "op_free: %d is no user op of this world", (int)op);
    else g->w->ops[op - IDIST_OP_USER].used = false;
    pthread_mutex_unlock(&g->w->lock);
    return s;
}

void *idist_alloc(size_t nbytes, const idist_opts *opts) {
    idist__world *w = opts && opts->group ? opts->group->w : idist__world_default();
    void *p = NULL;
    if (opts && opts->group && !w) {
        idist__fail(IDIST_ERR_STATE, "alloc: the world of this group was closed");
        return NULL;
    }
    if (w && !idist__world_forked(w) && w->backend->alloc && (p = w->backend->alloc(w, nbytes)) != NULL) return p;
    if (nbytes > SIZE_MAX / 2 || posix_memalign(&p, 64, nbytes ? (nbytes + 63) & ~(size_t)63 : 64) != 0) {
        idist__fail(IDIST_ERR_NO_MEMORY, "alloc: no memory for %zu bytes", nbytes);
        return NULL;
    }
    memset(p, 0, nbytes ? nbytes : 1);
    return p;
}

void idist_free(void *ptr) {
    if (ptr && !idist__window_free(ptr)) free(ptr);
}

//------------------------------------------------------------------------------
// [impl:help]  one rank first, one rank only
// uses coll group . used by -
//------------------------------------------------------------------------------

// fn's result goes to everybody by a broadcast, so that a failure ends the wait instead of prolonging it.
static idist_status idist__tell_result(idist__kind label, int rank, bool mine, int result, const idist_opts *o) {
    int32_t r = mine ? (int32_t)result : 0;
    idist_status s = idist__collective(IDIST__BROADCAST, label, NULL, &r, 1, IDIST_I32, IDIST_SUM, rank, o);
    if (s != IDIST_OK || !r) return s;
    return idist__fail(IDIST_ERR_CALLBACK, "%s: the function failed on rank %d with %d", idist__kind_names[label], rank,
                       (int)r);
}

idist_status idist_one_rank_first(idist_task_fn fn, void *arg, int rank, bool local, const idist_opts *opts) {
    idist_opts o;
    idist_status s;
    idist_group *g;
    bool first;
    int result = 0;
    memset(&o, 0, sizeof o);
    if (opts) o = *opts;
    if (!fn) return idist__fail(IDIST_ERR_ARG, "one_rank_first: fn is NULL");
    if ((s = idist__check_blocking("one_rank_first", opts)) != IDIST_OK) return s;
    if ((s = idist__call_enter("one_rank_first", o.group, &g)) != IDIST_OK) return s;
    if (g->status != IDIST_OK) s = idist__fail(g->status, "one_rank_first: the group failed earlier: %s", g->cause);
    pthread_mutex_unlock(&g->w->lock);
    if (s != IDIST_OK) return s;
    if (local && !g->node && g->rank >= 0) {
        idist_group *node = NULL;
        s = idist_split(g, g->w->nodes[g->w->group.rank].node_rank, 0, &node);
        if (s != IDIST_OK) return s;
        g->node = node;
    }
    if (local) o.group = g->node;
    if (rank < 0 || rank >= idist_group_size(local ? g->node : g))
        return idist__fail(IDIST_ERR_ARG, "one_rank_first: rank should be between 0 and %d, but is %d",
                           idist_group_size(local ? g->node : g) - 1, rank);
    first = idist_group_rank(local ? g->node : g) == rank;
    if (first) result = fn(arg);
    if ((s = idist__tell_result(IDIST__ONE_RANK_FIRST, rank, first, result, &o)) != IDIST_OK || first) return s;
    result = fn(arg);
    return result ? idist__fail(IDIST_ERR_CALLBACK, "one_rank_first: the function failed here with %d", result) : IDIST_OK;
}

idist_status idist_one_rank_only(idist_task_fn fn, void *arg, int rank, bool barrier, const idist_opts *opts) {
    const idist_group *group = opts ? opts->group : NULL;
    idist_group *g = NULL;
    idist_status s;
    bool mine = idist_group_rank(group) == rank;
    int result = 0;
    if (!fn) return idist__fail(IDIST_ERR_ARG, "one_rank_only: fn is NULL");
    if ((s = idist__check_blocking("one_rank_only", opts)) != IDIST_OK) return s;
    if (rank < 0 || rank >= idist_group_size(group))
        return idist__fail(IDIST_ERR_ARG, "one_rank_only: rank should be between 0 and %d, but is %d",
                           idist_group_size(group) - 1, rank);
    s = idist__call_enter("one_rank_only", opts ? opts->group : NULL, &g);
    if (!g) return s;
    pthread_mutex_unlock(&g->w->lock);
    if (mine) result = fn(arg);
    if (barrier) return idist__tell_result(IDIST__ONE_RANK_ONLY, rank, mine, result, opts);
    return result ? idist__fail(IDIST_ERR_CALLBACK, "one_rank_only: the function failed here with %d", result) : IDIST_OK;
}

//------------------------------------------------------------------------------
// [impl:spawn]  worker processes, and Ignite's Parallel
// uses life . used by -
//------------------------------------------------------------------------------

// What a worker leaves for its parent.
typedef struct idist__desk {
    int finished;  // returned from fn, and its result is in `code`
    int secondary; // failed because another rank was lost
    int code;
    int exec_errno; // the program could not be run anew
    int arrived;    // run anew, it has come to its call
    char text[400]; // its last error
} idist__desk;

// The memory that workers and parent share. A worker that runs the program anew knows nothing else of its parent.
typedef struct idist__hall {
    char magic[8];
    int first_rank, listener;
    idist__secret secret;
    char where[sizeof((idist__config *)0)->where];
    idist__desk desks[1]; // n of them
} idist__hall;

typedef struct idist__worker {
    pid_t pid;
    int pidfd;        // -1: this kernel has none, or the worker was reaped
    bool ended, lost; // lost: the program reaped it behind our back, so how it ended is not known
    bool late;        // run anew, it did not come to its call in time
    int wait_status;
} idist__worker;

struct idist_workers {
    idist__config cfg; // of worker 0
    idist_backend_list backends;
    idist_worker_fn fn;
    void *arg;
    int n, first_rank;
    int call; // the how manieth of this process
    idist__worker *workers;
    struct pollfd *fds; // for n
    idist__hall *hall;
    size_t hall_nbytes;
    int hall_fd; // -1: workers inherit the mapping itself
    idist__log log;
    int first_failed; // index, -1: none so far
    int running;
    int64_t decide_at, next_at; // when the first failure is decided on; when the next signal goes out
    int64_t arrive_at;          // when all that were run anew must have come to their call
    int stage;                  // of ending the others: 0 none, 1 grace, 2 SIGTERM or SIGKILL was sent
    int grace_ms;
    bool keep_going;
    idist_report *report; // the caller's, or NULL
};

static bool idist__is_worker; // this process

static void idist__worker_run(idist_workers *sp, int i) {
    idist__desk *desk = &sp->hall->desks[i];
    idist__config *cfg = &sp->cfg;
    idist__world *w = NULL;
    idist_status s;
    int code;
    idist__is_worker = true;
    if (i != 0) idist__os_close(&cfg->listener);
    cfg->rank = sp->first_rank + i;
    cfg->local_rank = i;
    cfg->lost = &desk->secondary;
    s = idist__world_open(cfg, sp->backends, &w);
    if (s == IDIST_OK) {
        __atomic_store_n(&idist__default_world, w, __ATOMIC_RELEASE);
        idist__me.text[0] = 0; // what is said of its failure shall be of its own
        code = sp->fn(i, sp->arg);
        desk->code = code & 255 ? code & 255 : code != 0;
        idist__copy_text(desk->text, sizeof desk->text, code ? idist__me.text : "");
        w = idist__world_default(); // fn may have finalized by itself
        if (w) s = idist__world_close(w, code != 0);
        if (s != IDIST_OK && !code && !desk->secondary) desk->code = 1;
    } else {
        desk->code = 1;
        desk->secondary = s == IDIST_ERR_PEER_LOST || s == IDIST_ERR_TIMEOUT;
    }
    if (desk->code && !desk->text[0]) idist__copy_text(desk->text, sizeof desk->text, idist__me.text);
    __atomic_store_n(&desk->finished, 1, __ATOMIC_RELEASE);
    if (sp->hall_fd < 0) fflush(NULL);
    fflush(stdout); // all of them would wait for a thread of main that sits in a read
    fflush(stderr);
    _exit(desk->code);
}

// ---- workers that run the program anew ----

// Everything such a worker is made of, prepared before the fork: after it only simple system calls are allowed, since
// other threads may have held any lock.
typedef struct idist__rerun {
    char path[4096], var[80]; // var: IDIST_SPAWN=, see idist__rerun_find
    char *args;               // of this process, one after the other
    char **argv, **envp;
} idist__rerun;

static void idist__rerun_free(idist__rerun *r, const idist_allocator *mem) {
    idist__mem_free(mem, r->args);
    idist__mem_free(mem, r->argv);
    idist__mem_free(mem, r->envp);
}

static idist_status idist__rerun_make(idist__rerun *r, const idist_allocator *mem) {
    extern char **environ;
    size_t nbytes = 0, cap = 0, argc = 0, envc = 0, i, n;
    ssize_t got = readlink("/proc/self/exe", r->path, sizeof r->path - 1);
    int fd = got > 0 ? open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return idist__fail(IDIST_ERR_SYSTEM,
                           "spawn: start_method \"exec\" finds the program in /proc (self/exe and self/cmdline), which "
                           "cannot be read: %s. Mount /proc, or take start_method \"fork\" or a launcher",
                           strerror(errno));
    r->path[got] = 0;
    for (got = 1; got > 0; nbytes += (size_t)got) {
        if (!idist__buffer_reserve(mem, &r->args, &cap, nbytes, nbytes + 4096)) break;
        do got = read(fd, r->args + nbytes, cap - nbytes - 1);
        while (got < 0 && errno == EINTR);
        if (got < 0) got = 0;
    }
    close(fd);
    for (i = 0; r->args && i < nbytes; i++) argc += !r->args[i];
    while (environ && environ[envc]) envc++;
    r->argv = (char **)idist__mem_alloc(mem, (argc + 1) * sizeof *r->argv);
    r->envp = (char **)idist__mem_alloc(mem, (envc + 2) * sizeof *r->envp);
    if (!r->args || !r->argv || !r->envp) return IDIST_ERR_NO_MEMORY;
    for (i = n = 0; n < argc; i += strlen(r->args + i) + 1) r->argv[n++] = r->args + i;
    r->envp[0] = r->var;
    for (i = 0, n = 1; i < envc; i++)
        if (strncmp(environ[i], "IDIST_SPAWN=", 12) != 0) r->envp[n++] = environ[i];
    return IDIST_OK;
}

static int idist__spawn_calls; // of this process, atomic

// In the child. Its descriptors of the hall and, for worker 0, of the listener go with it. The last number of the variable
// is its own process id.
static void idist__rerun_exec(idist_workers *sp, idist__rerun *r, int i) {
    char *at = r->var + strlen(r->var), digits[16];
    int pid = (int)getpid(), n = 0;
    for (; pid; pid /= 10) digits[n++] = (char)('0' + pid % 10);
    while (n) *at++ = digits[--n];
    fcntl(sp->hall_fd, F_SETFD, 0);
    if (i == 0 && sp->cfg.listener >= 0) fcntl(sp->cfg.listener, F_SETFD, 0);
    execve(r->path, r->argv, r->envp);
    execve("/proc/self/exe", r->argv, r->envp); // it was replaced or removed
    sp->hall->desks[i].exec_errno = errno;
    _exit(127);
}

// Whether this process was made to run one call of idist_spawn, and which: "call,worker,descriptor,pid". The variable is in
// the environment of what the worker starts, too, hence the pid.
static bool idist__rerun_find(int *call, int *worker, int *fd) {
    const char *text = idist__os_env("IDIST_SPAWN");
    int pid = 0, end = 0;
    return text && sscanf(text, "%d,%d,%d,%d%n", call, worker, fd, &pid, &end) == 4 && !text[end] && pid == (int)getpid();
}

// This process is worker i of the call it has come to, and ends in here.
static idist_status idist__rerun_worker(idist_workers *sp, int i, int fd) {
    struct stat st;
    idist__hall *hall = NULL;
    char magic[8];
    pid_t parent = getppid();
    prctl(PR_SET_PDEATHSIG, SIGKILL); // a program with capabilities has lost it
    if (getppid() != parent) _exit(1);
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    if (pread(fd, magic, 8, 0) != 8 || memcmp(magic, "IDSPAWN1", 8) != 0) // never on as if it were the parent
        return idist__fail(IDIST_ERR_STATE, "spawn: the program, run anew, has closed descriptors that it did not open");
    if (fstat(fd, &st) == 0 && (size_t)st.st_size == sp->hall_nbytes)
        hall = (idist__hall *)mmap(NULL, sp->hall_nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (!hall || (void *)hall == MAP_FAILED || i < 0 || i >= sp->n)
        return idist__fail(IDIST_ERR_STATE, "spawn: the program, run anew, asks for another number of workers");
    __atomic_store_n(&hall->desks[i].arrived, 1, __ATOMIC_RELEASE);
    sp->hall_fd = fd;
    sp->hall = hall;
    sp->first_rank = hall->first_rank;
    sp->cfg.secret = hall->secret;
    sp->cfg.listener = i == 0 ? hall->listener : -1;
    if (sp->cfg.listener >= 0) fcntl(sp->cfg.listener, F_SETFD, FD_CLOEXEC);
    memcpy(sp->cfg.where, hall->where, sizeof hall->where);
    idist__worker_run(sp, i);
    return IDIST_OK; // not reached
}

// ---- the parent's part ----

// One worker. It dies with the thread that started it: by signal, and by looking whether the parent went before it asked
// for that.
static idist_status idist__spawn_fork(idist_workers *sp, idist__rerun *rerun, int i) {
    pid_t parent = getpid(), pid;
    if (rerun) snprintf(rerun->var, sizeof rerun->var, "IDIST_SPAWN=%d,%d,%d,", sp->call, i, sp->hall_fd);
    pid = fork();
    if (pid < 0) return idist__fail_errno("fork", errno);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(1);
        if (rerun) idist__rerun_exec(sp, rerun, i);
        pthread_mutex_init(&idist__log_lock, NULL); // another thread may have held them during the fork
        pthread_mutex_init(&idist__life_lock, NULL);
        pthread_mutex_init(&idist__default_lock, NULL);
        memset(&idist__me, 0, sizeof idist__me);
        __atomic_store_n(&idist__default_world, (idist__world *)NULL, __ATOMIC_RELEASE);
        idist__worker_run(sp, i);
    }
    sp->workers[i].pid = pid;
    sp->running++;
    return IDIST_OK;
}

static bool idist__worker_failed(const idist_workers *sp, int i) {
    const idist__worker *k = &sp->workers[i];
    return k->ended && !(WIFEXITED(k->wait_status) && WEXITSTATUS(k->wait_status) == 0 &&
                         __atomic_load_n(&sp->hall->desks[i].finished, __ATOMIC_ACQUIRE));
}

// Collects the workers that ended. Returns whether one did.
static bool idist__spawn_reap(idist_workers *sp) {
    bool any = false;
    int i;
    for (i = 0; i < sp->n; i++) {
        idist__worker *k = &sp->workers[i];
        idist__desk *desk = &sp->hall->desks[i];
        pid_t rc;
        if (k->ended || k->pid <= 0) continue;
        do rc = waitpid(k->pid, &k->wait_status, WNOHANG);
        while (rc < 0 && errno == EINTR);
        if (rc == 0) continue;
        if (rc < 0) k->lost = !__atomic_load_n(&desk->finished, __ATOMIC_ACQUIRE); // else its desk tells
        if (rc < 0) k->wait_status = k->lost ? 0x7f00 : desk->code << 8;
        k->ended = any = true;
        sp->running--;
        idist__os_close(&k->pidfd);
    }
    return any;
}

// The first failure is the first that did not follow from another: a rank that ends because its peer was killed may
// well be reaped before that peer. While only such are known the decision waits a little.
static void idist__spawn_judge(idist_workers *sp) {
    int i, secondary = -1;
    for (i = 0; i < sp->n && sp->first_failed < 0; i++) {
        if (!idist__worker_failed(sp, i)) continue;
        if (!__atomic_load_n(&sp->hall->desks[i].secondary, __ATOMIC_ACQUIRE)) sp->first_failed = i;
        else if (secondary < 0) secondary = i;
    }
    if (sp->first_failed >= 0 || secondary < 0) return;
    if (sp->decide_at == IDIST__FOREVER) sp->decide_at = idist__os_deadline(500);
    if (!sp->running || idist__os_ms_until(sp->decide_at) == 0) sp->first_failed = secondary;
}

static void idist__worker_signal(const idist__worker *k, int sig) {
    if (k->ended || k->pid <= 0) return;
    if (syscall(424 /* pidfd_send_signal */, k->pidfd, sig, NULL, 0) != 0 && errno != ESRCH) kill(k->pid, sig); // no pidfd
}

static void idist__spawn_signal(idist_workers *sp, int sig) {
    int i;
    for (i = 0; i < sp->n; i++) idist__worker_signal(&sp->workers[i], sig);
}

// A program that is run anew and never comes to its call would be waited for without an end.
static void idist__spawn_expect(idist_workers *sp) {
    int i;
    if (sp->arrive_at == IDIST__FOREVER || idist__os_ms_until(sp->arrive_at) != 0) return;
    sp->arrive_at = IDIST__FOREVER;
    for (i = 0; i < sp->n; i++) {
        if (sp->workers[i].ended || __atomic_load_n(&sp->hall->desks[i].arrived, __ATOMIC_ACQUIRE)) continue;
        sp->workers[i].late = true;
        idist__worker_signal(&sp->workers[i], SIGKILL);
    }
}

static void idist__spawn_sleep(idist_workers *sp, int64_t until_ns) {
    int i, n = 0, ms = idist__os_ms_until(until_ns);
    bool blind = false;
    for (i = 0; i < sp->n; i++) {
        if (sp->workers[i].ended) continue;
        if (sp->workers[i].pidfd < 0) blind = true;
        sp->fds[n].fd = sp->workers[i].pidfd;
        sp->fds[n++].events = POLLIN;
    }
    if (blind && (ms < 0 || ms > 5)) ms = 5; // no pidfd: look often
    poll(sp->fds, (nfds_t)n, ms);
}

// Looks after the workers, once. After a first failure: grace, SIGTERM, 400 ms, SIGKILL.
static void idist__spawn_turn(idist_workers *sp) {
    if (idist__spawn_reap(sp) || sp->decide_at != IDIST__FOREVER) idist__spawn_judge(sp);
    if (!sp->running) return;
    idist__spawn_expect(sp);
    if (sp->stage == 0 && sp->first_failed >= 0 && !sp->keep_going) {
        sp->stage = 1;
        sp->next_at = idist__os_deadline(sp->grace_ms);
    } else if (sp->stage >= 1 && idist__os_ms_until(sp->next_at) == 0) {
        idist__log_print(&sp->log, IDIST_LOG_INFO, "spawn: %d workers still run: %s", sp->running,
                         sp->stage == 1 ? "SIGTERM" : "SIGKILL");
        idist__spawn_signal(sp, sp->stage == 1 ? SIGTERM : SIGKILL);
        if (sp->stage == 1) idist__spawn_signal(sp, SIGCONT); // a stopped one must hear it
        sp->next_at = idist__os_deadline(sp->stage == 1 ? 400 : 1000);
        sp->stage = 2;
    }
}

static idist_status idist__spawn_report(idist_workers *sp) {
    idist_report r;
    const idist__desk *desk;
    int ws;
    memset(&r, 0, sizeof r);
    r.rank = -1;
    if (sp->first_failed >= 0) {
        desk = &sp->hall->desks[sp->first_failed];
        ws = sp->workers[sp->first_failed].wait_status;
        r.rank = sp->first_rank + sp->first_failed;
        r.exit_code = WIFEXITED(ws) && !sp->workers[sp->first_failed].lost ? WEXITSTATUS(ws) : -1;
        r.signal = WIFSIGNALED(ws) ? WTERMSIG(ws) : 0;
        if (desk->exec_errno)
            snprintf(r.text, sizeof r.text, "rank %d: the program could not be run anew: %s", r.rank,
                     strerror(desk->exec_errno));
        else if (sp->workers[sp->first_failed].late)
            snprintf(r.text, sizeof r.text,
                     "rank %d: the program, run anew, has not come to its call of idist_spawn in %d ms", r.rank,
                     sp->cfg.init_timeout_ms);
        else if (sp->workers[sp->first_failed].lost)
            snprintf(r.text, sizeof r.text,
                     "rank %d ended before its function returned; how is not known: the program ignores or reaps SIGCHLD",
                     r.rank);
        else if (r.signal)
            snprintf(r.text, sizeof r.text, "rank %d was killed by signal %d (%s)", r.rank, r.signal, strsignal(r.signal));
        else if (r.exit_code == 0)
            snprintf(r.text, sizeof r.text,
                     "rank %d exited with code 0 before its function returned: a worker returns, it does not exit", r.rank);
        else snprintf(r.text, sizeof r.text, "rank %d ended with code %d", r.rank, r.exit_code);
        if (desk->text[0] && !r.signal) idist__append(r.text, sizeof r.text, ": %s", desk->text);
    }
    if (sp->report) *sp->report = r;
    return r.rank < 0 ? IDIST_OK : idist__fail(IDIST_ERR_WORKER_FAILED, "%s", r.text);
}

// Moves a descriptor out of the way of stdin, stdout and stderr, which may be closed.
static idist_status idist__spawn_above(int *fd) {
    int higher = fcntl(*fd, F_DUPFD_CLOEXEC, 3);
    if (higher < 0) return idist__fail_errno("spawn: fcntl", errno);
    close(*fd);
    *fd = higher;
    return IDIST_OK;
}

// Where the workers meet: a socket without a file, which listens before the first of them runs; their secret is in
// their memory.
static idist_status idist__spawn_meet(idist_workers *sp) {
    idist__addr addr;
    uint64_t id[2];
    idist_status s;
    if (sp->cfg.secret.nbytes == 0) {
        sp->cfg.secret.nbytes = 32;
        idist__os_random(sp->cfg.secret.bytes, 32);
    }
    idist__os_random(id, sizeof id);
    snprintf(sp->cfg.where, sizeof sp->cfg.where, "unix:idist-%016llx%016llx", (unsigned long long)id[0],
             (unsigned long long)id[1]);
    if ((s = idist__addr_parse(&addr, sp->cfg.where)) != IDIST_OK) return s;
    s = idist__sock_listen(&addr, sp->cfg.where, &sp->cfg.listener);
    return s == IDIST_OK ? idist__spawn_above(&sp->cfg.listener) : s;
}

static idist_status idist__spawn_config(idist_workers *sp, const idist_desc *d) {
    idist_desc alone = *d;
    idist_status s;
    int nnodes = d->nnodes > 1 ? d->nnodes : 1;
    alone.world_size = nnodes > 1 ? nnodes * sp->n : 1;
    alone.rank = nnodes > 1 ? d->node_rank * sp->n : 0;
    alone.store = NULL;
    if ((s = idist__launch_config(&sp->cfg, &alone)) != IDIST_OK) return s;
    sp->first_rank = alone.rank;
    sp->cfg.launcher = "spawn";
    sp->cfg.world_size = nnodes * sp->n;
    if (nnodes == 1) sp->cfg.local_size = sp->n;
    return IDIST_OK;
}

static void idist__spawn_free(idist_workers *sp) {
    idist_allocator mem = sp->cfg.mem;
    idist__os_close(&sp->cfg.listener);
    idist__os_close(&sp->hall_fd);
    if (sp->hall) munmap(sp->hall, sp->hall_nbytes);
    idist__mem_free(&mem, sp->workers);
    idist__mem_free(&mem, sp->fds);
    memset(&sp->cfg.secret, 0, sizeof sp->cfg.secret);
    idist__mem_free(&mem, sp);
}

// The hall, the tables, the place to meet.
static idist_status idist__spawn_prepare(idist_workers *sp, bool anew) {
    idist_status s;
    void *hall;
    int i;
    if (sp->cfg.world_size == sp->n && sp->n > 1 && (s = idist__spawn_meet(sp)) != IDIST_OK) return s;
    if (anew && (sp->hall_fd = idist__os_memfd(sp->hall_nbytes)) < 0) return idist__fail_errno("memfd_create", errno);
    if (anew && (s = idist__spawn_above(&sp->hall_fd)) != IDIST_OK) return s;
    hall = mmap(NULL, sp->hall_nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | (anew ? 0 : MAP_ANONYMOUS), sp->hall_fd, 0);
    sp->hall = hall == MAP_FAILED ? NULL : (idist__hall *)hall;
    sp->workers = (idist__worker *)idist__mem_alloc(&sp->cfg.mem, sizeof *sp->workers * (size_t)sp->n);
    sp->fds = (struct pollfd *)idist__mem_alloc(&sp->cfg.mem, sizeof *sp->fds * (size_t)sp->n);
    if (!sp->hall || !sp->workers || !sp->fds)
        return idist__fail(IDIST_ERR_NO_MEMORY, "spawn: no memory for the table of workers");
    for (i = 0; i < sp->n; i++) sp->workers[i].pidfd = -1;
    memcpy(sp->hall->magic, "IDSPAWN1", 8);
    sp->hall->first_rank = sp->first_rank;
    sp->hall->listener = sp->cfg.listener;
    sp->hall->secret = sp->cfg.secret;
    memcpy(sp->hall->where, sp->cfg.where, sizeof sp->hall->where);
    return IDIST_OK;
}

// Starts them all, or none.
static idist_status idist__spawn_begin(idist_workers *sp, bool anew) {
    idist__rerun rerun;
    idist_status s = idist__spawn_prepare(sp, anew);
    int i;
    memset(&rerun, 0, sizeof rerun);
    if (s == IDIST_OK && anew) s = idist__rerun_make(&rerun, &sp->cfg.mem);
    if (!anew) fflush(NULL); // or the workers print again what waits in the buffers
    for (i = 0; i < sp->n && s == IDIST_OK; i++) s = idist__spawn_fork(sp, anew ? &rerun : NULL, i);
    idist__rerun_free(&rerun, &sp->cfg.mem);
    if (anew && sp->cfg.init_timeout_ms > 0) sp->arrive_at = idist__os_deadline(sp->cfg.init_timeout_ms);
    idist__os_close(&sp->cfg.listener);
    idist__os_close(&sp->hall_fd);
    for (i = 0; sp->running && i < sp->n; i++)
        if (sp->workers[i].pid > 0) sp->workers[i].pidfd = (int)syscall(434 /* pidfd_open */, sp->workers[i].pid, 0);
    if (s == IDIST_OK) return IDIST_OK;
    if (sp->running) idist__spawn_signal(sp, SIGKILL);
    for (; sp->running; idist__os_pause_ms(1)) idist__spawn_reap(sp);
    return s;
}

idist_status idist_spawn_start_with(idist_worker_fn fn, void *arg, int nproc_per_node, const idist_desc *desc,
                                    idist_workers **workers, idist_backend_list backends) {
    int count = __atomic_add_fetch(&idist__spawn_calls, 1, __ATOMIC_RELAXED), call = 0, worker = 0, fd = -1, anew = 0;
    bool rerun = idist__rerun_find(&call, &worker, &fd);
    idist_workers own, *sp;
    idist_desc d;
    idist_status s;
    memset(&own, 0, sizeof own);
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (workers) *workers = NULL;
    if (d.report) {
        memset(d.report, 0, sizeof *d.report);
        d.report->rank = -1;
    }
    if (!fn || !workers) return idist__fail(IDIST_ERR_ARG, "spawn: %s is NULL", fn ? "workers" : "fn");
    if (d.nnodes < 0 || d.nnodes > 65536 || d.node_rank < 0 || (d.node_rank && d.node_rank >= d.nnodes))
        return idist__fail(IDIST_ERR_ARG, "spawn: node_rank %d of nnodes %d", d.node_rank, d.nnodes);
    if (nproc_per_node < 0 || nproc_per_node > 4096)
        return idist__fail(IDIST_ERR_ARG, "spawn: nproc_per_node should be positive and at most 4096, but is %d",
                           nproc_per_node);
    if ((s = idist__launch_choice(d.start_method, "IDIST_START_METHOD", "fork, exec", &anew)) != IDIST_OK) return s;
    if (rerun && count < call) return IDIST_OK; // the parent has been through this one
    if (anew && idist__is_worker)
        return idist__fail(IDIST_ERR_UNSUPPORTED, "spawn: a worker can start others with start_method \"fork\" only");
    own.call = count;
    own.n = nproc_per_node ? nproc_per_node : idist__os_ncores();
    own.fn = fn;
    own.arg = arg;
    own.backends = backends;
    own.first_failed = own.hall_fd = -1;
    own.decide_at = own.next_at = own.arrive_at = IDIST__FOREVER;
    own.grace_ms = d.grace_ms > 0 ? d.grace_ms : 2000;
    own.keep_going = d.keep_going;
    own.report = d.report;
    own.hall_nbytes = offsetof(idist__hall, desks) + sizeof(idist__desk) * (size_t)own.n;
    if ((s = idist__log_init(&own.log, &d.logger)) != IDIST_OK) return s;
    if ((s = idist__spawn_config(&own, &d)) != IDIST_OK) return s;
    sp = (idist_workers *)idist__mem_alloc(&own.cfg.mem, sizeof *sp);
    if (!sp) return IDIST_ERR_NO_MEMORY;
    *sp = own;
    s = rerun && count == call ? idist__rerun_worker(sp, worker, fd) : idist__spawn_begin(sp, anew == 1);
    if (s == IDIST_OK) *workers = sp;
    else idist__spawn_free(sp);
    return s;
}

idist_status idist_spawn_poll(idist_workers *workers, bool *done) {
    if (!done) return idist__fail(IDIST_ERR_ARG, "spawn_poll: done is NULL");
    *done = true;
    if (!workers) return IDIST_OK;
    idist__spawn_turn(workers);
    *done = !workers->running;
    return IDIST_OK;
}

idist_status idist_spawn_wait(idist_workers *workers, int timeout_ms) {
    int64_t deadline_ns = timeout_ms < 0 ? IDIST__FOREVER : idist__os_deadline(timeout_ms);
    idist_status s;
    if (!workers) return IDIST_OK;
    for (;;) {
        int64_t until_ns;
        idist__spawn_turn(workers);
        if (!workers->running) break;
        if (idist__os_ms_until(deadline_ns) == 0)
            return idist__fail(IDIST_ERR_TIMEOUT, "spawn_wait: %d workers still run", workers->running);
        until_ns = workers->next_at < deadline_ns ? workers->next_at : deadline_ns;
        if (workers->first_failed < 0 && workers->decide_at < until_ns) until_ns = workers->decide_at;
        if (workers->arrive_at < until_ns) until_ns = workers->arrive_at;
        idist__spawn_sleep(workers, until_ns);
    }
    s = idist__spawn_report(workers);
    idist__spawn_free(workers);
    return s;
}

idist_status idist_spawn_kill(idist_workers *workers, int signal_number) {
    if (signal_number < 0 || signal_number > 64)
        return idist__fail(IDIST_ERR_ARG, "spawn_kill: there is no signal %d", signal_number);
    if (workers) idist__spawn_signal(workers, signal_number);
    return IDIST_OK;
}

idist_status idist_spawn_with(idist_worker_fn fn, void *arg, int nproc_per_node, const idist_desc *desc,
                              idist_backend_list backends) {
    idist_workers *workers;
    idist_status s = idist_spawn_start_with(fn, arg, nproc_per_node, desc, &workers, backends);
    return s == IDIST_OK ? idist_spawn_wait(workers, -1) : s;
}

// The checks of Ignite's Parallel, in its order and close to its words.
static idist_status idist__parallel_check(const idist_desc *d, const idist_backend_list *backends) {
    const char *at = d->backend, *init = d->init_method ? d->init_method : idist__os_env("IDIST_INIT_METHOD");
    const char *addr = d->master_addr ? d->master_addr : idist__os_env("MASTER_ADDR"), *text = idist__os_env("MASTER_PORT");
    int port = d->master_port ? d->master_port : text ? atoi(text) : 0;
    while (at && *at) {
        size_t n = strcspn(at, ",");
        if (!(n == 4 && strncmp(at, "self", 4) == 0) && !idist__backend_asked(backends, at, n))
            return idist__fail(IDIST_ERR_NO_BACKEND, "Unknown backend '%.*s'. Available backends: %s", (int)n, at,
                               idist_available_backends_of(*backends));
        at += n + (at[n] == ',');
    }
    if (d->nproc_per_node < 0)
        return idist__fail(IDIST_ERR_ARG, "Argument nproc_per_node should positive, but given %d", d->nproc_per_node);
    if (d->nnodes < 0) return idist__fail(IDIST_ERR_ARG, "Argument nnodes should positive, but given %d", d->nnodes);
    if (!d->nproc_per_node) return IDIST_OK;
    if (d->node_rank < 0 || (d->node_rank > 0 && d->node_rank >= (d->nnodes ? d->nnodes : 1)))
        return idist__fail(IDIST_ERR_ARG, "Argument node_rank should be between 0 and %d, but given %d",
                           (d->nnodes ? d->nnodes : 1) - 1, d->node_rank);
    if (d->nnodes > 1 && !init && (!addr || !port))
        return idist__fail(IDIST_ERR_ARG,
                           "If number of nodes larger than one, arguments master_addr and master_port or init_method should "
                           "be specified, but given master_addr=%s, master_port=%d and init_method=NULL",
                           addr ? addr : "NULL", port);
    return IDIST_OK;
}

// Joins the world that a launcher made, and runs fn in this process.
static idist_status idist__parallel_join(const idist_desc *d, idist_worker_fn fn, void *arg, const char *name,
                                         const idist__log *log, idist_backend_list backends) {
    idist_status s;
    char backend[32];
    bool speaks;
    int code;
    if (d->nnodes || d->node_rank)
        idist__log_print(log, IDIST_LOG_WARN,
                         "parallel_run: nnodes and node_rank are ignored without nproc_per_node: the launcher decides");
    if ((s = idist_initialize_with(d, backends)) != IDIST_OK) return s;
    speaks = idist_get_rank() == 0;
    idist__copy_text(backend, sizeof backend, idist_backend());
    if (speaks) idist__log_print(log, IDIST_LOG_INFO, "Initialized processing group with backend: '%s'", backend);
    if (speaks) idist__log_print(log, IDIST_LOG_INFO, "- Run '%s' in %d processes", name, idist_get_world_size());
    idist__me.text[0] = 0; // what is said of its failure shall be of its own
    code = fn(idist_get_local_rank(), arg);
    if (speaks) idist__log_print(log, IDIST_LOG_INFO, "End of run");
    if (code && idist__world_default()) idist__world_close(idist__world_default(), true);
    else if (idist_is_initialized()) s = idist_finalize();
    if (speaks) idist__log_print(log, IDIST_LOG_INFO, "Finalized processing group with backend: '%s'", backend);
    if (code)
        return idist__fail(IDIST_ERR_WORKER_FAILED, "the function returned %d%s%.800s", code, idist__me.text[0] ? ": " : "",
                           idist__me.text);
    return s;
}

idist_status idist_parallel_run_with(const idist_desc *desc, idist_worker_fn fn, void *arg, const char *name,
                                     idist_backend_list backends) {
    idist__log log;
    idist_desc d;
    idist_status s;
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (!fn) return idist__fail(IDIST_ERR_ARG, "parallel_run: fn is NULL");
    if ((s = idist__log_init(&log, &d.logger)) != IDIST_OK) return s;
    if ((s = idist__parallel_check(&d, &backends)) != IDIST_OK) return s;
    if (!d.nproc_per_node) return idist__parallel_join(&d, fn, arg, name, &log, backends);
    idist__log_print(&log, IDIST_LOG_INFO, "Initialized distributed launcher with backend: '%s'",
                     d.backend ? d.backend : "auto");
    idist__log_print(&log, IDIST_LOG_INFO, "- Parameters to spawn processes: nproc_per_node: %d, nnodes: %d, node_rank: %d",
                     d.nproc_per_node, d.nnodes ? d.nnodes : 1, d.node_rank);
    idist__log_print(&log, IDIST_LOG_INFO, "Spawn function '%s' in %d processes", name, d.nproc_per_node);
    s = idist_spawn_with(fn, arg, d.nproc_per_node, &d, backends);
    idist__log_print(&log, IDIST_LOG_INFO, "End of run");
    return s;
}

// Nor shall such a program find any of these.
#undef IDIST__VECTORIZE
#undef IDIST__NO_ALIAS
#undef IDIST__PRINTF
#undef IDIST__UNUSED
#undef IDIST__INLINE
#undef IDIST__TLS
#undef IDIST__COUNT_OF
#undef IDIST__UNALIGNED
#undef IDIST__X86
#undef IDIST__ISA_avx2
#undef IDIST__ISA_avx512
#undef IDIST__ISA_base
#undef IDIST__CONVERTERS
#undef IDIST__CONVERTER
#undef IDIST__CONVERTER_ROW
#undef IDIST__KERNEL
#undef IDIST__KERNELS_INT
#undef IDIST__KERNELS_FLOAT
#undef IDIST__ROW_INT
#undef IDIST__ROW_FLOAT
#undef IDIST__KERNELS_NARROW
#undef IDIST__KERNELS_WIDE
#undef IDIST__REDUCE_TABLE
#undef IDIST__WIRE_VERSION
#undef IDIST__HELLO_BYTES
#undef IDIST__KEY_MAX
#undef IDIST__VALUE_MAX
#undef IDIST__KEYS_MAX
#undef IDIST__STORE_MAGIC
#undef IDIST__STORE_REQUEST_MAX
#undef IDIST__SHM_MIB
#undef IDIST__HAS_MPI
#undef IDIST__SPIN_NS
#undef IDIST__YIELDS
#undef IDIST__YIELD_NS
#undef IDIST__TIMERS_NS
#undef IDIST__ANNOUNCE_NS
#undef IDIST__WARN_NS
#undef IDIST__ASK_NS
#undef IDIST__WATCH_NS

#pragma pop_macro("max")
#pragma pop_macro("lock")
#if defined(__cplusplus) && defined(__GNUC__)
#pragma GCC diagnostic pop
#endif

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
