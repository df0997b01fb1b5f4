// gpu.h - shared parts of test_gpu.c and bench_gpu.c: what this machine has, ranks as processes,
// values.
//
// The process that starts the ranks never calls CUDA, so that it can fork. Each rank is a process
// with a deadline of its own. Ranks that exceed their deadline are killed by their process id.
// Ranks write their results to memory that all of them share.
#ifndef GPU_H
#define GPU_H

#include "idist_nccl.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <math.h>

#include "tap.h"

#define GPU_MAX_RANKS 16

//------------------------------------------------------------------------------
// results of the ranks
//------------------------------------------------------------------------------

// A step that the ranks of a world do together, and its outcome.
typedef struct gpu_case {
    char name[60];
    int n_begun, n_ended, n_checks, n_failures, n_texts; // atomic
    char text[6][500];
    char left[500], note[300]; // why a rank could not continue, and a remark
} gpu_case;

typedef struct gpu_machine {
    int n_devices, runtime, driver, nccl; // the last three are versions, or 0 if unknown
    char name[256], driver_text[64], why[300];
} gpu_machine;

enum { GPU_MAX_CASES = 16 };

// A run may be split into parts, so that it ends within a known time. Each part runs a share of the
// worlds. The worlds are then walked twice, the first time to count them.
enum { GPU_PART_SECONDS = 480 };
typedef struct gpu_parts {
    int part, of; // 0 to run everything
    int n_worlds, nth;
    bool counts;
} gpu_parts;
static gpu_parts gpu_cut = {0, 0, 0, 0, false};

// Parses a part such as "2/3", the second of three. Returns false if the text is not a part.
static bool gpu_parse_part(const char *text) {
    int end = 0;
    if (sscanf(text, "%d/%d%n", &gpu_cut.part, &gpu_cut.of, &end) != 2 || text[end]) return false;
    return gpu_cut.part >= 1 && gpu_cut.part <= gpu_cut.of;
}

// Called once for each world, in order. Returns true if the world must run now.
static bool gpu_takes_world(void) {
    if (!gpu_cut.counts && !gpu_cut.of) return true;
    if (!gpu_cut.counts) return gpu_cut.nth++ * gpu_cut.of / gpu_cut.n_worlds == gpu_cut.part - 1;
    gpu_cut.n_worlds++;
    return false;
}

// Walks all worlds. `worlds` calls gpu_takes_world before each world.
static void gpu_all_worlds(void (*worlds)(void)) {
    gpu_cut.counts = gpu_cut.of > 0;
    if (gpu_cut.counts) worlds();
    gpu_cut.counts = false;
    worlds();
}

// Returns the time limit in seconds for a set of ranks. In a part, all worlds together must not
// take longer than GPU_PART_SECONDS.
static int gpu_seconds(int without) {
    const char *text = getenv("WORLD_SECONDS");
    int most = text && atoi(text) > 0 ? atoi(text) : without;
    if (!gpu_cut.of) return most;
    int share = GPU_PART_SECONDS / (gpu_cut.n_worlds / gpu_cut.of + 1);
    return share < most ? share : most;
}

typedef struct gpu_shared {
    gpu_machine machine;
    gpu_case cases[GPU_MAX_CASES];
    // How the world moves device memory, and why there is no world.
    char backend[32], no_world[700];
    int64_t died_ns;               // when a rank killed itself
    double results[GPU_MAX_RANKS]; // for the program's own use
} gpu_shared;

static gpu_shared *gpu_shared_area(void) {
    static gpu_shared *area = NULL; // mapped by main, before the first fork
    if (area) return area;
    area = (gpu_shared *)mmap(NULL, sizeof *area, PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    TAP_REQUIRE(area != MAP_FAILED);
    return area;
}

static int gpu_current_case; // of this rank

static void gpu_fail(const char *fmt, ...) TAP_PRINTF(1, 2);
static void gpu_fail(const char *fmt, ...) {
    gpu_case *c = &gpu_shared_area()->cases[gpu_current_case];
    __atomic_add_fetch(&c->n_failures, 1, __ATOMIC_ACQ_REL);
    int slot = __atomic_fetch_add(&c->n_texts, 1, __ATOMIC_ACQ_REL);
    if (slot >= (int)(sizeof c->text / sizeof c->text[0])) return;
    va_list args;
    va_start(args, fmt);
    vsnprintf(c->text[slot], sizeof c->text[slot], fmt, args);
    va_end(args);
}

// Ends a rank that cannot continue. The other ranks learn of the failure through idist.
static void gpu_give_up(const char *what, const char *why) {
    gpu_case *c = &gpu_shared_area()->cases[gpu_current_case];
    __atomic_add_fetch(&c->n_failures, 1, __ATOMIC_ACQ_REL);
    snprintf(c->left, sizeof c->left, "%.100s: %.380s", what, why); // the last text wins
    _exit(91);
}

#define CUDA(call)                                                               \
    do {                                                                         \
        cudaError_t error_ = (call);                                             \
        if (error_ != cudaSuccess) gpu_give_up(#call, cudaGetErrorName(error_)); \
    } while (0)

// Makes the call once. Ends the rank if the call fails, because the group has then failed, and no
// rank can continue.
#define IDIST_OK_OR_LEAVE(call)                                         \
    do {                                                                \
        if ((call) != IDIST_OK) gpu_give_up(#call, idist_last_error()); \
    } while (0)

//------------------------------------------------------------------------------
// ranks as processes
//------------------------------------------------------------------------------

typedef struct gpu_world {
    const char *backend; // the requested backend
    int n;
    bool each_its_own; // true for one GPU per rank; false if all ranks share the first GPU
    int seconds;       // deadline
    // For NCCL 2.30.3 and later: ranks share a GPU directly and do not pretend to be on different
    // hosts.
    bool multi_rank;
    int dies; // the rank that is meant to die, or -1
} gpu_world;

typedef struct gpu_rank {
    const gpu_world *world;
    int rank, n;
    void *arg;
    cudaStream_t stream, other;
} gpu_rank;

typedef void (*gpu_body)(gpu_rank *me);

static void gpu_describe(const gpu_world *w, char *text, size_t cap) {
    snprintf(text, cap, "%s, %d rank%s%s", w->backend, w->n, w->n == 1 ? "" : "s",
             w->n == 1         ? ""
             : w->each_its_own ? ", one per GPU"
             : w->multi_rank   ? " sharing one GPU by NCCL_MULTI_RANK_GPU_ENABLE"
                               : " sharing one GPU");
}

// Sets the environment of a rank. NCCL accepts ranks on one GPU if it believes that they are on
// different hosts. The ranks then communicate through the loopback device.
static void gpu_environment(const gpu_world *w, int rank) {
    char host[32];
    setenv("IDIST_DEVICE_BACKEND", w->backend, 1);
    if (strcmp(w->backend, "nccl") != 0 || w->n == 1 || w->each_its_own) return;
    if (w->multi_rank) {
        setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
        // Limits the part of the GPU that each rank occupies while it waits for the other ranks.
        setenv("NCCL_MAX_CTAS", "2", 1);
        return;
    }
    snprintf(host, sizeof host, "idist%d", rank);
    setenv("NCCL_HOSTID", host, 1);
    setenv("NCCL_SOCKET_IFNAME", "lo", 1);
    setenv("NCCL_IB_DISABLE", "1", 1);
    setenv("NCCL_MNNVL_ENABLE", "0", 1);
    setenv("NCCL_MAX_NCHANNELS", "2", 1);
    setenv("NCCL_ALGO", "Ring", 1);
    setenv("NCCL_PROTO", "Simple", 1);
}

static void gpu_child(const gpu_world *w, int rank, int port, gpu_body body, void *arg) {
    char device[32], url[64];
    idist_desc desc;
    gpu_rank me = {w, rank, w->n, arg, NULL, NULL};
    gpu_shared *shared = gpu_shared_area();
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm((unsigned)w->seconds);
    dup2(STDERR_FILENO, STDOUT_FILENO); // because NCCL prints warnings to stdout
    gpu_environment(w, rank);
    memset(&desc, 0, sizeof desc);
    snprintf(device, sizeof device, "cuda:%d", w->each_its_own ? rank : 0);
    snprintf(url, sizeof url, "tcp://127.0.0.1:%d", port);
    desc.init_method = url;
    desc.device = device;
    desc.rank = rank;
    desc.world_size = w->n;
    desc.init_timeout_ms = desc.timeout_ms = 500 * w->seconds;
    if (idist_initialize(&desc) != IDIST_OK) {
        if (rank == 0)
            snprintf(shared->no_world, sizeof shared->no_world, "idist_initialize: %.600s",
                     idist_last_error());
        _exit(90);
    }
    if (rank == 0) snprintf(shared->backend, sizeof shared->backend, "%s", idist_device_backend());
    if (strcmp(idist_device_backend(), w->backend) == 0) {
        CUDA(cudaStreamCreateWithFlags(&me.stream, cudaStreamNonBlocking));
        CUDA(cudaStreamCreateWithFlags(&me.other, cudaStreamNonBlocking));
        body(&me);
        CUDA(cudaStreamDestroy(me.stream));
        CUDA(cudaStreamDestroy(me.other));
    }
    if (idist_finalize() != IDIST_OK) gpu_give_up("idist_finalize", idist_last_error());
    _exit(0);
}

// Reaps the ranks. Returns false if a rank hung or ended abnormally, with the reason in `why`.
static bool gpu_reap(const gpu_world *w, pid_t *pids, char *why, size_t cap) {
    int64_t end_ms = tap_now_ms() + 1000 * (int64_t)w->seconds + 2000;
    int n_left = w->n;
    why[0] = 0;
    while (n_left > 0) {
        bool late = tap_now_ms() > end_ms;
        for (int k = 0; k < w->n; k++) {
            int status = 0;
            if (!pids[k]) continue;
            if (late) kill(pids[k], SIGKILL);
            if (waitpid(pids[k], &status, late ? 0 : WNOHANG) == 0) continue;
            tap_forget_child(pids[k]);
            pids[k] = 0;
            n_left--;
            bool alarmed = WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM;
            size_t used = strlen(why);
            if (k == w->dies) continue;
            if (late || alarmed) snprintf(why + used, cap - used, "rank %d: hang. ", k);
            else if (WIFSIGNALED(status))
                snprintf(why + used, cap - used, "rank %d: signal %d. ", k, WTERMSIG(status));
            else if (status)
                snprintf(why + used, cap - used, "rank %d: exit status %d. ", k,
                         WEXITSTATUS(status));
        }
        if (n_left > 0) tap_sleep_ms(2);
    }
    return !why[0];
}

// Runs `body` in each rank of a world. Clears the cases, `backend` and `no_world` first.
static bool gpu_run(const gpu_world *w, gpu_body body, void *arg, char *why, size_t cap) {
    static int n_worlds;
    gpu_shared *shared = gpu_shared_area();
    pid_t pids[GPU_MAX_RANKS] = {0};
    // On the loopback device this is the name of a local socket. No port is opened.
    int port = 20000 + ((int)getpid() * 64 + n_worlds++) % 40000;
    TAP_REQUIRE(w->n >= 1 && w->n <= GPU_MAX_RANKS);
    memset(shared->cases, 0, sizeof shared->cases);
    memset(shared->results, 0, sizeof shared->results);
    shared->backend[0] = shared->no_world[0] = 0;
    for (int k = 0; k < w->n; k++) {
        pid_t pid = fork();
        TAP_REQUIRE(pid >= 0);
        if (pid == 0) gpu_child(w, k, port, body, arg);
        pids[k] = pid;
        tap_register_child(pid);
    }
    return gpu_reap(w, pids, why, cap);
}

// Begins a case. All ranks enter the cases in the same order. Results belong to a case until the
// next one begins.
static inline void gpu_case_begin(const char *name) {
    gpu_case *c = &gpu_shared_area()->cases[++gpu_current_case];
    TAP_REQUIRE(gpu_current_case < GPU_MAX_CASES);
    snprintf(c->name, sizeof c->name, "%s", name);
    __atomic_add_fetch(&c->n_begun, 1, __ATOMIC_ACQ_REL);
}

static inline void gpu_case_end(void) {
    __atomic_add_fetch(&gpu_shared_area()->cases[gpu_current_case].n_ended, 1, __ATOMIC_ACQ_REL);
}

//------------------------------------------------------------------------------
// what this machine has
//------------------------------------------------------------------------------

static const char *gpu_nccl_file(void) {
    const char *file = getenv("IDIST_NCCL_LIB");
    return file && *file ? file : "libnccl.so.2";
}

// Finds out what this machine has. Runs in a process of its own, because the caller must be able to
// fork later.
static void gpu_probe_here(void) {
    gpu_machine *m = &gpu_shared_area()->machine;
    static struct cudaDeviceProp prop;
    int (*get_version)(int *) = NULL;
    void *nccl = dlopen(gpu_nccl_file(), RTLD_NOW | RTLD_LOCAL);
    if (nccl) *(void **)&get_version = dlsym(nccl, "ncclGetVersion");
    if (get_version) get_version(&m->nccl);
    cudaRuntimeGetVersion(&m->runtime);
    cudaDriverGetVersion(&m->driver);
    cudaError_t error = cudaGetDeviceCount(&m->n_devices);
    if (error == cudaSuccess && m->n_devices == 0) error = cudaErrorNoDevice;
    if (error == cudaSuccess) error = cudaGetDeviceProperties(&prop, 0);
    if (error != cudaSuccess) {
        m->n_devices = 0;
        snprintf(m->why, sizeof m->why, "no GPU: %s (%s)", cudaGetErrorString(error),
                 cudaGetErrorName(error));
    }
    snprintf(m->name, sizeof m->name, "%s", prop.name);
}

// Finds the version in "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun ...".
static void gpu_driver_text(char *text, size_t cap) {
    char line[512];
    FILE *file = fopen("/proc/driver/nvidia/version", "r");
    snprintf(text, cap, "unknown");
    if (!file) return;
    if (fgets(line, sizeof line, file))
        for (char *word = strtok(line, " \t\n"); word; word = strtok(NULL, " \t\n"))
            if (word[0] >= '0' && word[0] <= '9' && strchr(word, '.')) {
                snprintf(text, cap, "%.*s", (int)cap - 1, word);
                break;
            }
    fclose(file);
}

// Runs fn in a child process. Returns the wait status of the child.
static int gpu_alone(void (*fn)(void), int seconds) {
    int status = 0;
    pid_t pid = fork();
    TAP_REQUIRE(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        alarm((unsigned)seconds);
        fn();
        _exit(0);
    }
    TAP_REQUIRE(waitpid(pid, &status, 0) == pid);
    return status;
}

static const gpu_machine *gpu_probe(void) {
    gpu_machine *m = &gpu_shared_area()->machine;
    int status = gpu_alone(gpu_probe_here, 60);
    if (status) {
        m->n_devices = 0;
        snprintf(m->why, sizeof m->why, "looking for a GPU ended with wait status %d", status);
    }
    gpu_driver_text(m->driver_text, sizeof m->driver_text);
    return m;
}

// Returns true if a comma-separated list contains this word. An empty list contains every word.
static bool gpu_listed(const char *list, const char *word) {
    size_t n = strlen(word);
    if (!list || !*list) return true;
    for (const char *p = list; p; p = strchr(p, ',') ? strchr(p, ',') + 1 : NULL)
        if (strncmp(p, word, n) == 0 && (p[n] == ',' || !p[n])) return true;
    return false;
}

static bool gpu_listed_number(const char *list, int number) {
    char word[16];
    snprintf(word, sizeof word, "%d", number);
    return gpu_listed(list, word);
}

//------------------------------------------------------------------------------
// values: element i of a rank's send buffer is entry i % GPU_PERIOD, a prime, of that rank's table.
// Whole buffers are therefore filled and compared at the speed of memory, and an element in the
// wrong place is noticed.
//------------------------------------------------------------------------------

enum { GPU_PERIOD = 4099, GPU_REDUCED = GPU_MAX_RANKS, GPU_PREMUL = 100, GPU_MOVE = 101 };

typedef struct gpu_tables {
    idist_dtype dtype;
    int op; // an idist_op, GPU_PREMUL or GPU_MOVE
    int n;
    size_t size;
    double tolerance; // 0 for exact equality
    // Indexed by rank. The last table holds the reduced values.
    _Alignas(8) unsigned char of[GPU_MAX_RANKS + 1][GPU_PERIOD * sizeof(double)];
} gpu_tables;

static unsigned gpu_mix(int rank, int j) {
    return (unsigned)(tap_mix((uint64_t)rank * 1000003u + (uint64_t)j) >> 33);
}

static bool gpu_is_f8(idist_dtype dtype) { return dtype == IDIST_F8E4M3 || dtype == IDIST_F8E5M2; }

// Returns a value small enough that sums, products and factors are exact in every type. In floats
// of 8 bits they are exact with up to 8 ranks.
static int gpu_value(idist_dtype dtype, int op, int n, int rank, int j) {
    unsigned mixed = gpu_mix(rank, j);
    bool negative = dtype != IDIST_U8;
    if (gpu_is_f8(dtype) && op != IDIST_PROD)
        return op == GPU_PREMUL && rank > 1 ? 0 : (int)(mixed % 3) - 1;
    if (op == IDIST_PROD) return (rank + j) % n < 3 ? 2 : 1;
    if (op == IDIST_SUM || op == IDIST_AVG || op == GPU_PREMUL)
        return negative ? (int)(mixed % 7) - 3 : (int)(mixed % 4);
    return negative ? (int)(mixed % 127) - 63 : (int)(mixed % 128);
}

static double gpu_factor(int rank) { return rank % 2 ? 0.5 : 2.0; }

static double gpu_reduced_value(idist_dtype dtype, int op, int n, int j) {
    double x = 0;
    for (int k = 0; k < n; k++) {
        double y = gpu_value(dtype, op, n, k, j);
        if (op == GPU_PREMUL) y *= gpu_factor(k);
        if (k == 0) x = y;
        else if (op == IDIST_PROD) x *= y;
        else if (op == IDIST_MIN) x = y < x ? y : x;
        else if (op == IDIST_MAX) x = y > x ? y : x;
        else x += y;
    }
    if (op != IDIST_AVG) return x;
    return dtype >= IDIST_F16 ? x / n : (double)((int)x / n);
}

// Returns the mantissa bits and the exponent bias of a 16- or 8-bit float type.
static void gpu_format(idist_dtype dtype, int *mantissa, int *bias) {
    *mantissa = dtype == IDIST_F16 ? 10 : dtype == IDIST_BF16 ? 7 : dtype == IDIST_F8E4M3 ? 3 : 2;
    *bias = dtype == IDIST_BF16 ? 127 : dtype == IDIST_F8E4M3 ? 7 : 15;
}

// Converts a number that is neither large nor tiny.
static uint16_t gpu_half(double x, idist_dtype dtype) {
    int mantissa, bias;
    int exponent;
    if (x == 0) return 0;
    gpu_format(dtype, &mantissa, &bias);
    long bits = lrint(ldexp(frexp(fabs(x), &exponent), mantissa + 1));
    if (bits >> (mantissa + 1)) bits >>= 1, exponent++;
    return (uint16_t)((x < 0 ? gpu_is_f8(dtype) ? 0x80 : 0x8000 : 0) |
                      ((exponent - 1 + bias) << mantissa) | (bits & ((1 << mantissa) - 1)));
}

static double gpu_half_value(uint16_t h, idist_dtype dtype) {
    int mantissa, bias, sign = gpu_is_f8(dtype) ? 0x80 : 0x8000;
    gpu_format(dtype, &mantissa, &bias);
    int exponent = (h & (sign - 1)) >> mantissa;
    double x = ldexp((h & ((1 << mantissa) - 1)) | (exponent ? 1 << mantissa : 0),
                     exponent - bias - mantissa);
    return h & sign ? -x : x;
}

static void gpu_encode(void *at, idist_dtype dtype, double x) {
    float f = (float)x;
    int64_t word = (int64_t)x;
    uint16_t half = gpu_half(x, dtype);
    if (dtype == IDIST_F64) memcpy(at, &x, sizeof x);
    else if (dtype == IDIST_F32) memcpy(at, &f, sizeof f);
    else if (dtype >= IDIST_F16) memcpy(at, &half, idist_dtype_size(dtype)); // little endian
    else memcpy(at, &word, idist_dtype_size(dtype)); // the low bytes, little endian
}

static double gpu_decode(const void *at, idist_dtype dtype) {
    double d;
    float f;
    uint16_t half = 0;
    int32_t i;
    int64_t l;
    switch ((int)dtype) {
    case IDIST_F64: memcpy(&d, at, sizeof d); return d;
    case IDIST_F32: memcpy(&f, at, sizeof f); return (double)f;
    case IDIST_F16:
    case IDIST_BF16:
    case IDIST_F8E4M3:
    case IDIST_F8E5M2:
        memcpy(&half, at, idist_dtype_size(dtype));
        return gpu_half_value(half, dtype);
    case IDIST_I32: memcpy(&i, at, sizeof i); return i;
    case IDIST_I64: memcpy(&l, at, sizeof l); return (double)l;
    default: return *(const unsigned char *)at;
    }
}

static void gpu_make_tables(gpu_tables *t, idist_dtype dtype, int op, int n) {
    // Indexed by dtype, from F16 on.
    static const double epsilons[] = {0x1p-11, 0x1p-8, 0x1p-24, 0x1p-53, 0x1p-4, 0x1p-3};
    double epsilon = dtype < IDIST_F16 ? 0 : epsilons[dtype - IDIST_F16];
    t->dtype = dtype;
    t->op = op;
    t->n = n;
    t->size = idist_dtype_size(dtype);
    // Averages get a tolerance, because each backend rounds at different points.
    t->tolerance = op == IDIST_AVG && dtype >= IDIST_F16 ? 4 * n * epsilon : 0;
    for (int j = 0; j < GPU_PERIOD; j++) {
        size_t at = (size_t)j * t->size;
        for (int k = 0; k < n; k++) gpu_encode(&t->of[k][at], dtype, gpu_value(dtype, op, n, k, j));
        if (op != GPU_MOVE)
            gpu_encode(&t->of[GPU_REDUCED][at], dtype, gpu_reduced_value(dtype, op, n, j));
    }
}

// Fills `to` with `count` elements of a rank's buffer from element `start` on.
static void gpu_fill(const gpu_tables *t, int rank, size_t start, void *to, size_t count) {
    char *p = (char *)to;
    while (count > 0) {
        size_t j = start % GPU_PERIOD, k = GPU_PERIOD - j < count ? GPU_PERIOD - j : count;
        memcpy(p, &t->of[rank][j * t->size], k * t->size);
        p += k * t->size;
        start += k;
        count -= k;
    }
}

// Compares `count` elements with the values of a rank, or the reduced values for GPU_REDUCED, from
// `start` on. Returns the index of the first wrong element, or `count` if all are right.
static size_t gpu_compare(const gpu_tables *t, int rank, size_t start, const void *from,
                          size_t count) {
    const char *p = (const char *)from;
    for (size_t i = 0; i < count;) {
        size_t j = (start + i) % GPU_PERIOD,
               k = GPU_PERIOD - j < count - i ? GPU_PERIOD - j : count - i;
        const unsigned char *want = &t->of[rank][j * t->size];
        if (memcmp(p + i * t->size, want, k * t->size) != 0)
            for (size_t m = 0; m < k; m++) {
                const char *got = p + (i + m) * t->size;
                if (memcmp(got, want + m * t->size, t->size) == 0) continue;
                double error =
                    fabs(gpu_decode(got, t->dtype) - gpu_decode(want + m * t->size, t->dtype));
                if (!(error <= t->tolerance)) return i + m; // true for a NaN, too
            }
        i += k;
    }
    return count;
}

#endif // GPU_H
