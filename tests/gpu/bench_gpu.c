// bench_gpu - measures how long idist takes with device memory, for each device backend, number of
// ranks, operation, type and size
//
//     tests/gpu/bench_gpu.sh       builds and runs it; --fake: on the stand-ins of tests/fake,
//                                  where the figures mean nothing
//     bench_gpu [-backends nccl,ipc,staged] [-ranks 2,4,8] [-b BYTES] [-e BYTES] [-rounds N]
//               [-copy BYTES] [-fake] [-markdown FILE] [-part 2/3]
//
// Sizes and bandwidths follow nccl-tests, with algbw = S / t and a count of at least 1:
//
//     all_reduce                    S = count * size        busbw = algbw * 2(n-1)/n
//     all_gather, reduce_scatter    S = count * size * n    busbw = algbw * (n-1)/n
//
// Each time is the time per call of several consecutive calls on a stream, on the slowest rank. The
// result is the median of the rounds. Each round begins with a barrier. After the rounds, every
// element is checked.
//
// Ranks that share a GPU move nothing between GPUs. Each byte of S is read and written in one
// memory. The best possible time is then 2 * ranks * S / (rate of copies within the device). This
// rate counts read and written bytes together.
#include "gpu.h"

typedef struct options {
    const char *backends, *ranks, *part, *markdown;
    size_t first, last, copy_nbytes;
    int rounds;
    bool fake;
} options;

static options opt = {NULL, NULL, NULL, NULL, 4, (size_t)256 << 20, (size_t)1 << 30, 7, false};

enum { N_OPS = 3, N_DTYPES = 2, N_COLUMNS = N_OPS * N_DTYPES, MAX_SIZES = 32, MAX_ROUNDS = 99 };
static const char *const op_names[N_OPS] = {"all_reduce", "all_gather", "reduce_scatter"};
static const idist_dtype dtypes[N_DTYPES] = {IDIST_F32, IDIST_BF16};

// Results of the ranks of a world.
typedef struct figures {
    size_t nbytes[MAX_SIZES];
    double us[MAX_SIZES][N_COLUMNS]; // 0 if not measured
    int n_sizes;
    // Time of a call in us, indexed by size (one float, 64 KiB) and by way (through idist, NCCL
    // alone).
    double enqueue_us[2][2];
    char no_enqueue[200];
    double copy_rate; // bytes per second, read and written
} figures;

static figures *found; // in shared memory
static FILE *markdown;

static void out(const char *fmt, ...) TAP_PRINTF(1, 2);
static void out(const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    vprintf(fmt, args);
    va_end(args);
    fflush(stdout);
    if (!markdown) return;
    va_start(args, fmt);
    vfprintf(markdown, fmt, args);
    va_end(args);
    fflush(markdown);
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int n) {
    qsort(values, (size_t)n, sizeof *values, by_value);
    return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

static double seconds_now(void) { return (double)tap_now_ns() / 1e9; }

//------------------------------------------------------------------------------
// the rate of copies within the device
//------------------------------------------------------------------------------

static void measure_copies(void) {
    enum { COPIES = 10 };
    char *from = NULL, *to = NULL;
    cudaStream_t stream = NULL;
    double rates[MAX_ROUNDS];
    CUDA(cudaSetDevice(0));
    CUDA(cudaMalloc((void **)&from, opt.copy_nbytes));
    CUDA(cudaMalloc((void **)&to, opt.copy_nbytes));
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA(cudaMemsetAsync(from, 1, opt.copy_nbytes, stream));
    for (int r = -1; r < opt.rounds; r++) { // the first round warms up
        CUDA(cudaStreamSynchronize(stream));
        double start = seconds_now();
        for (int i = 0; i < COPIES; i++)
            CUDA(cudaMemcpyAsync(to, from, opt.copy_nbytes, cudaMemcpyDeviceToDevice, stream));
        CUDA(cudaStreamSynchronize(stream));
        if (r >= 0) rates[r] = 2.0 * COPIES * (double)opt.copy_nbytes / (seconds_now() - start);
    }
    found->copy_rate = median(rates, opt.rounds);
}

//------------------------------------------------------------------------------
// one operation
//------------------------------------------------------------------------------

typedef struct bench {
    gpu_rank *me;
    gpu_tables *tables;
    char *send, *recv, *host; // host is pinned and holds HOST_NBYTES
    int op;
    idist_dtype dtype;
} bench;

enum { HOST_NBYTES = 8 << 20 };

// Returns the count of a call whose size S is `nbytes`. As in NCCL, it is per rank.
static size_t count_of(const bench *b, size_t nbytes) {
    size_t each = idist_dtype_size(b->dtype) * (b->op == 0 ? 1 : (size_t)b->me->n);
    return nbytes < each ? 1 : nbytes / each;
}

static void fill_send(const bench *b, size_t nbytes) {
    size_t size = b->tables->size, step = HOST_NBYTES / size, count = nbytes / size + 1;
    for (size_t i = 0; i < count; i += step) {
        size_t k = count - i < step ? count - i : step;
        gpu_fill(b->tables, b->me->rank, i, b->host, k);
        CUDA(cudaMemcpyAsync(b->send + i * size, b->host, k * size, cudaMemcpyHostToDevice,
                             b->me->stream));
        CUDA(cudaStreamSynchronize(b->me->stream));
    }
}

// Checks `count` elements of the receive buffer from `at` on. They must equal the values of a rank,
// or the reduced values for GPU_REDUCED, from `start` on.
static void check_block(const bench *b, size_t at, size_t count, int rank, size_t start) {
    size_t size = b->tables->size, step = HOST_NBYTES / size;
    for (size_t i = 0; i < count; i += step) {
        size_t k = count - i < step ? count - i : step;
        CUDA(cudaMemcpyAsync(b->host, b->recv + (at + i) * size, k * size, cudaMemcpyDeviceToHost,
                             b->me->stream));
        CUDA(cudaStreamSynchronize(b->me->stream));
        size_t bad = gpu_compare(b->tables, rank, start + i, b->host, k);
        if (bad == k) continue;
        gpu_fail("rank %d: %s %s x %zu: element %zu is wrong", b->me->rank, op_names[b->op],
                 idist_dtype_name(b->dtype), count, at + i + bad);
        return;
    }
}

static void check_result(const bench *b, size_t count) {
    if (b->op == 0) check_block(b, 0, count, GPU_REDUCED, 0);
    if (b->op == 2) check_block(b, 0, count, GPU_REDUCED, (size_t)b->me->rank * count);
    for (int k = 0; k < b->me->n && b->op == 1; k++) check_block(b, (size_t)k * count, count, k, 0);
}

static void call(const bench *b, size_t count, const idist_opts *o) {
    if (b->op == 0)
        IDIST_OK_OR_LEAVE(idist_all_reduce(b->send, b->recv, count, b->dtype, IDIST_SUM, o));
    else if (b->op == 1) IDIST_OK_OR_LEAVE(idist_all_gather(b->send, b->recv, count, b->dtype, o));
    else IDIST_OK_OR_LEAVE(idist_reduce_scatter(b->send, b->recv, count, b->dtype, IDIST_SUM, o));
}

static double slowest(double value) {
    double all = 0;
    IDIST_OK_OR_LEAVE(idist_all_reduce(&value, &all, 1, IDIST_F64, IDIST_MAX, NULL));
    return all;
}

// Makes `iterations` calls on the stream. Returns the seconds per call on the slowest rank.
static double one_round(const bench *b, size_t count, int iterations) {
    idist_opts o;
    memset(&o, 0, sizeof o);
    o.stream = b->me->stream;
    IDIST_OK_OR_LEAVE(idist_barrier(NULL));
    double start = seconds_now();
    for (int i = 0; i < iterations; i++) call(b, count, &o);
    CUDA(cudaStreamSynchronize(b->me->stream));
    return slowest((seconds_now() - start) / iterations);
}

static double measure(const bench *b, size_t nbytes) {
    size_t count = count_of(b, nbytes);
    double rounds[MAX_ROUNDS], once, target = opt.fake ? 0.002 : 0.02;
    CUDA(cudaMemsetAsync(b->recv, 0x5a, nbytes < 64 ? 64 : nbytes, b->me->stream));
    one_round(b, count, 1);
    once = one_round(b, count, 2);
    int iterations = once > target ? 1 : (int)(target / once) + 1, n = once > 0.3 ? 3 : opt.rounds;
    if (iterations > 100) iterations = 100;
    if (n > opt.rounds) n = opt.rounds;
    for (int r = 0; r < n; r++) rounds[r] = one_round(b, count, iterations);
    check_result(b, count);
    return median(rounds, n);
}

//------------------------------------------------------------------------------
// the cost of a call compared with NCCL alone
//------------------------------------------------------------------------------

// ncclAllReduce as libnccl.so.2 declares it, so that nccl.h is not needed.
typedef int (*all_reduce_fn)(const void *, void *, size_t, int dtype, int op, void *comm,
                             cudaStream_t);
enum { NCCL_SUCCESS = 0, NCCL_FLOAT = 7, NCCL_SUM = 0 };

// Returns the seconds that the caller spends per call. The calls themselves complete later.
static double enqueue(const bench *b, size_t count, all_reduce_fn nccl, void *comm) {
    enum { CALLS = 32 };
    idist_opts o;
    memset(&o, 0, sizeof o);
    o.stream = b->me->stream;
    IDIST_OK_OR_LEAVE(idist_barrier(NULL));
    double start = seconds_now();
    for (int i = 0; i < CALLS; i++)
        if (!nccl)
            IDIST_OK_OR_LEAVE(idist_all_reduce(b->send, b->recv, count, IDIST_F32, IDIST_SUM, &o));
        else if (nccl(b->send, b->recv, count, NCCL_FLOAT, NCCL_SUM, comm, b->me->stream) !=
                 NCCL_SUCCESS)
            gpu_give_up("ncclAllReduce", "failed");
    double seconds = (seconds_now() - start) / CALLS;
    CUDA(cudaStreamSynchronize(b->me->stream));
    return seconds;
}

static void measure_enqueue(bench *b) {
    static const size_t counts[2] = {1, 16384};
    // the library that idist has loaded
    void *library = dlopen(gpu_nccl_file(), RTLD_NOW | RTLD_LOCAL);
    void *comm = idist_nccl_comm(NULL);
    all_reduce_fn nccl = NULL;
    if (library) *(void **)&nccl = dlsym(library, "ncclAllReduce");
    if (!comm || !nccl) {
        snprintf(found->no_enqueue, sizeof found->no_enqueue, "%s",
                 comm ? "no ncclAllReduce in the library" : "idist_nccl_comm(NULL) is NULL");
        return;
    }
    for (int size = 0; size < 2; size++) {
        double rounds[2][MAX_ROUNDS];
        int n = 3 * opt.rounds > MAX_ROUNDS ? MAX_ROUNDS : 3 * opt.rounds;
        for (int r = -1; r < n; r++) // alternately; the order changes in each round
            for (int k = 0; k < 2; k++) {
                int alone = (k + r + 2) % 2;
                double seconds = enqueue(b, counts[size], alone ? nccl : NULL, comm);
                if (r >= 0) rounds[alone][r] = seconds;
            }
        for (int alone = 0; alone < 2; alone++) {
            double us = slowest(median(rounds[alone], n)) * 1e6;
            if (b->me->rank == 0) found->enqueue_us[size][alone] = us;
        }
    }
}

//------------------------------------------------------------------------------
// worlds
//------------------------------------------------------------------------------

static bool is_nccl(const gpu_world *w) { return strcmp(w->backend, "nccl") == 0; }

// Returns the largest size to measure. NCCL over loopback sockets is not a realistic use of NCCL,
// so smaller sizes are enough to see that it works.
static size_t last_size(const gpu_world *w) {
    size_t most = is_nccl(w) && !w->each_its_own ? (size_t)16 << 20 : opt.last;
    return opt.last < most ? opt.last : most;
}

static void run_sizes(bench *b) {
    size_t last = last_size(b->me->world);
    for (int op = 0; op < N_OPS; op++)
        for (int d = 0; d < N_DTYPES; d++) {
            double seconds = 0;
            int row = 0;
            b->op = op;
            b->dtype = dtypes[d];
            gpu_make_tables(b->tables, b->dtype, IDIST_SUM, b->me->n);
            fill_send(b, last);
            for (size_t nbytes = opt.first; nbytes <= last && row < MAX_SIZES; nbytes *= 4, row++) {
                if (seconds > 1.5) break; // all ranks have the same value
                seconds = measure(b, nbytes);
                if (b->me->rank) continue;
                found->nbytes[row] = nbytes;
                found->us[row][op * N_DTYPES + d] = seconds * 1e6;
                if (row >= found->n_sizes) found->n_sizes = row + 1;
            }
        }
}

static void run(gpu_rank *me) {
    static gpu_tables tables; // too large for the stack
    bench b;
    size_t nbytes = last_size(me->world) + 65536;
    memset(&b, 0, sizeof b);
    b.me = me;
    b.tables = &tables;
    CUDA(cudaMalloc((void **)&b.send, nbytes));
    CUDA(cudaMalloc((void **)&b.recv, nbytes));
    CUDA(cudaMallocHost((void **)&b.host, HOST_NBYTES));
    if (me->n > 1) run_sizes(&b);
    if (is_nccl(me->world)) measure_enqueue(&b);
    IDIST_OK_OR_LEAVE(idist_barrier(NULL));
    CUDA(cudaFree(b.send));
    CUDA(cudaFree(b.recv));
    CUDA(cudaFreeHost(b.host));
}

static double bus_factor(int op, int n) { return (op == 0 ? 2.0 : 1.0) * (n - 1) / n; }

static void print_sizes(const gpu_world *w) {
    out("\nus per call; algbw, busbw in GB/s\n\n|       bytes |");
    for (int c = 0; c < N_COLUMNS; c++)
        out(" %14s %-14s |", op_names[c / N_DTYPES], idist_dtype_name(dtypes[c % N_DTYPES]));
    out("\n| ----------: |");
    for (int c = 0; c < N_COLUMNS; c++) out(" ----------------------------: |");
    for (int row = 0; row < found->n_sizes; row++) {
        out("\n| %11zu |", found->nbytes[row]);
        for (int c = 0; c < N_COLUMNS; c++) {
            double us = found->us[row][c],
                   algbw = us > 0 ? (double)found->nbytes[row] / us / 1e3 : 0;
            if (us > 0)
                out(" %10.1f %8.3f %9.3f |", us, algbw, algbw * bus_factor(c / N_DTYPES, w->n));
            else out(" %29s |", "too slow");
        }
    }
    out("\n");
}

static void print_enqueue(void) {
    static const char *const sizes[2] = {"1 float", "64 KiB"};
    if (found->no_enqueue[0])
        out("\nThe cost of a call beside NCCL's own: not measured, %s.\n", found->no_enqueue);
    for (int size = 0; size < 2 && !found->no_enqueue[0]; size++) {
        const double *us = found->enqueue_us[size];
        out("\nA call on a stream, %s: idist_all_reduce %.2f us, ncclAllReduce alone %.2f us, "
            "difference %+.2f us%s.\n",
            sizes[size], us[0], us[1], us[0] - us[1],
            us[0] - us[1] <= 1 ? "" : " (more than the 1 us that is the target)");
    }
}

// Runs a world. Returns the time in us of its largest F32 all_reduce, or 0 if there is none.
static double run_world(const char *backend, int n, bool each_its_own, bool *failed) {
    gpu_world w = {backend, n, each_its_own, gpu_seconds(300), false, -1};
    gpu_shared *shared = gpu_shared_area();
    char why[1000], name[100];
    double copy_rate = found->copy_rate;
    if (!gpu_takes_world()) return 0;
    gpu_describe(&w, name, sizeof name);
    tap_deadline(w.seconds + 30);
    tap_running("%s", name);
    memset(found, 0, sizeof *found);
    found->copy_rate = copy_rate;
    bool ended = gpu_run(&w, run, NULL, why, sizeof why);
    out("\n## %s\n", name);
    if (is_nccl(&w) && n > 1 && !each_its_own)
        out("\nNCCL takes these ranks for different hosts (NCCL_HOSTID): they talk through "
            "loopback sockets.\n");
    if (shared->no_world[0]) out("\nNot run: %s\n", shared->no_world);
    else if (ended && strcmp(shared->backend, backend) != 0)
        out("\nNot run: the backend here is %s\n", shared->backend);
    else {
        if (n > 1) print_sizes(&w);
        if (is_nccl(&w)) print_enqueue();
        for (int k = 0; k < shared->cases[0].n_texts && k < 6; k++)
            out("\nFAILED: %s\n", shared->cases[0].text[k]);
        if (shared->cases[0].left[0]) out("\nFAILED: %s\n", shared->cases[0].left);
        if (!ended) out("\nFAILED: %s\n", why);
        if (!ended || shared->cases[0].n_failures) *failed = true;
        else out("\nEvery element was right.\n");
    }
    int row = found->n_sizes - 1;
    return row >= 0 && found->nbytes[row] * 4 > opt.last ? found->us[row][0] : 0;
}

static void print_head(const gpu_machine *m) {
    char date[32];
    time_t now = time(NULL);
    struct tm utc;
    strftime(date, sizeof date, "%Y-%m-%d %H:%M", gmtime_r(&now, &utc));
    out("# bench_gpu%s%s\n\n", opt.part ? ", part " : "", opt.part ? opt.part : "");
    if (opt.fake) out("ON THE STAND-IN FOR CUDA: it works; no figure below means a thing.\n\n");
    out("- run: %s UTC, idist %s\n- device: %d x %s\n- driver: %s\n- CUDA: runtime %d, driver's "
        "%d\n- NCCL: %d\n",
        date, IDIST_VERSION, m->n_devices, m->name, m->driver_text, m->runtime, m->driver, m->nccl);
}

static void print_summary(double us[3][GPU_MAX_RANKS + 1]) {
    double bound = found->copy_rate > 0 ? 2.0 * 4 * (double)opt.last / found->copy_rate * 1e6 : 0;
    out("\n## all_reduce, F32, %zu bytes, 4 ranks sharing one GPU\n\n", opt.last);
    out("2 x ranks x bytes / copy rate: %.1f us\n", bound);
    if (us[1][4] > 0)
        out("\nipc: %.1f us, %.2f times that (target: 2)\n", us[1][4], us[1][4] / bound);
    if (us[2][4] > 0) out("\nstaged: %.1f us, %.2f times that\n", us[2][4], us[2][4] / bound);
    if (us[1][4] > 0 && us[2][4] > 0)
        out("\nstaged / ipc: %.1f (target: 20)\n", us[2][4] / us[1][4]);
    if (!(us[1][4] > 0)) out("\nipc was not measured%s.\n", opt.part ? " in this part" : "");
}

//------------------------------------------------------------------------------
// the command line
//------------------------------------------------------------------------------

static void fail_usage(void) {
    fputs("usage: bench_gpu [-backends nccl,ipc,staged] [-ranks 2,4,8] [-b BYTES] [-e BYTES] "
          "[-rounds N] [-copy BYTES]\n"
          "                 [-fake] [-markdown FILE] [-part 2/3]\n",
          stderr);
    exit(2);
}

static size_t number(const char *text) {
    char *end;
    unsigned long long value = strtoull(text, &end, 10);
    if (*end == 'K' || *end == 'M' || *end == 'G')
        value <<= *end == 'K' ? 10 : *end == 'M' ? 20 : 30, end++;
    if (*end || value == 0 || value > (unsigned long long)1 << 40) fail_usage();
    return (size_t)value;
}

static void parse(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i], *text = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(name, "-fake") == 0) {
            opt.fake = true;
            continue;
        }
        if (!text) fail_usage();
        if (strcmp(name, "-backends") == 0) opt.backends = text;
        else if (strcmp(name, "-ranks") == 0) opt.ranks = text;
        else if (strcmp(name, "-b") == 0) opt.first = number(text);
        else if (strcmp(name, "-e") == 0) opt.last = number(text);
        else if (strcmp(name, "-copy") == 0) opt.copy_nbytes = number(text);
        else if (strcmp(name, "-rounds") == 0) opt.rounds = (int)number(text);
        else if (strcmp(name, "-markdown") == 0) opt.markdown = text;
        else if (strcmp(name, "-part") == 0 && gpu_parse_part(text)) opt.part = text;
        else fail_usage();
        i++;
    }
    if (opt.rounds > MAX_ROUNDS || opt.first > opt.last) fail_usage();
}

static double times[3][GPU_MAX_RANKS + 1];
static bool failed;

static void run_worlds(void) {
    static const char *const backends[] = {"nccl", "ipc", "staged"};
    static const int shared_by[] = {1, 2, 4, 8};
    const gpu_machine *m = &gpu_shared_area()->machine;
    int each = m->n_devices > GPU_MAX_RANKS ? GPU_MAX_RANKS : m->n_devices;
    for (int b = 0; b < 3; b++) {
        if (!gpu_listed(opt.backends, backends[b])) continue;
        for (int k = 0; k < 4; k++) {
            int n = shared_by[k];
            bool wanted = b == 0 ? n <= 4 : n > 1;
            if (wanted && gpu_listed_number(opt.ranks, n))
                times[b][n] = run_world(backends[b], n, false, &failed);
        }
        if (each > 1 && gpu_listed_number(opt.ranks, each))
            run_world(backends[b], each, true, &failed);
    }
}

int main(int argc, char **argv) {
    parse(argc, argv);
    tap_deadline(200);
    const gpu_machine *m = gpu_probe();
    if (m->n_devices == 0) return tap_skip_all(m->why);
    found = (figures *)mmap(NULL, sizeof *found, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                            -1, 0);
    TAP_REQUIRE(found != MAP_FAILED);
    if (opt.markdown && (markdown = fopen(opt.markdown, "w")) == NULL)
        tap_bail("%s: %s", opt.markdown, strerror(errno));
    print_head(m);
    if (gpu_alone(measure_copies, 100) != 0) failed = true;
    out("- copies of %zu bytes within the device: %.1f GB/s, read and written\n", opt.copy_nbytes,
        found->copy_rate / 1e9);
    gpu_all_worlds(run_worlds);
    print_summary(times);
    if (failed) out("\nSOMETHING FAILED: see above.\n");
    tap__end();
    return failed;
}
