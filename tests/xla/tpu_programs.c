// tpu_programs.c - checks that libtpu's compiler, which needs no TPU, accepts the programs that
// idist writes
//
// tpu_programs LIBTPU TOPOLOGY: for example ".../libtpu.so v5e:2x2". Compiles programs of all
// kinds, dtypes and ops, for four ranks whose devices are not in the order of their ids. is_refused
// lists what TPUs refuse.
#define IDIST_IMPLEMENTATION
#include "idist.h"
#include "idist_xla.h"

#include "pjrt_c_api.h"

#include "tap.h"

static const PJRT_Api *api;
static PJRT_TopologyDescription *topology;

// Returns true if there was an error, and stores its text in `text`.
static bool failed(PJRT_Error *error, char *text, size_t capacity) {
    return !idist__pjrt_check((const idist__pjrt_api *)api, error, text, capacity);
}

static bool open_topology(const char *file, const char *name) {
    PJRT_TopologyDescription_Create_Args args;
    PJRT_Plugin_Initialize_Args init;
    const PJRT_Api *(*get)(void);
    char text[300] = "";
    void *library = idist__os_library_open(file), *at;
    memset(&args, 0, sizeof args);
    memset(&init, 0, sizeof init);
    at = library ? idist__os_library_find(library, "GetPjrtApi") : NULL;
    if (!tap_ok(at, "libtpu is loaded: %s", library ? "" : idist__os_library_error())) return false;
    memcpy(&get, &at, sizeof get);
    api = get();
    init.struct_size = PJRT_Plugin_Initialize_Args_STRUCT_SIZE;
    args.struct_size = PJRT_TopologyDescription_Create_Args_STRUCT_SIZE;
    args.topology_name = name;
    args.topology_name_size = strlen(name);
    tap_ok(!failed(api->PJRT_Plugin_Initialize(&init), text, sizeof text), "initialized: %s", text);
    tap_ok(!failed(api->PJRT_TopologyDescription_Create(&args), text, sizeof text), "%s: %s", name,
           text);
    topology = args.topology;
    return topology != NULL;
}

// Compiles a program for the topology. Returns true if the compiler accepts it.
static bool compiles(char *code, const char *options, size_t nbytes, char *text, size_t capacity) {
    PJRT_Executable_Destroy_Args destroy;
    PJRT_Compile_Args args;
    PJRT_Program program;
    memset(&program, 0, sizeof program);
    memset(&args, 0, sizeof args);
    memset(&destroy, 0, sizeof destroy);
    program.struct_size = PJRT_Program_STRUCT_SIZE;
    program.code = code;
    program.code_size = strlen(code);
    program.format = "mlir";
    program.format_size = 4;
    args.struct_size = PJRT_Compile_Args_STRUCT_SIZE;
    args.topology = topology;
    args.program = &program;
    args.compile_options = options;
    args.compile_options_size = nbytes;
    if (failed(api->PJRT_Compile(&args), text, capacity)) return false;
    destroy.struct_size = PJRT_Executable_Destroy_Args_STRUCT_SIZE;
    destroy.executable = args.executable;
    api->PJRT_Executable_Destroy(&destroy);
    return true;
}

// Returns true if TPUs refuse the call. TPUs sum 64-bit numbers as pairs of 32 bits, but have no
// other reduction of them, and no reduce_scatter of F64.
static bool is_refused(const idist__call *call) {
    bool is_wide = call->dtype == IDIST_I64 || call->dtype == IDIST_U64 || call->dtype == IDIST_F64;
    if (!is_wide || !idist__kind_reduces(call->kind)) return false;
    if (call->dtype == IDIST_F64 && call->kind == IDIST__REDUCE_SCATTER) return true;
    return call->op != IDIST_SUM && call->op != IDIST_AVG;
}

static void fill_buffer(idist__xla_buffer *b, size_t count, idist_dtype dtype) {
    memset(b, 0, sizeof *b);
    b->dims[0] = (int64_t)count;
    b->dim_count = 1;
    b->count = count;
    b->dtype = dtype;
}

// Compiles one call on `count` elements per rank.
static void try_call(const idist_group *g, idist__kind kind, idist_dtype dtype, idist_op op,
                     size_t count, int *n_accepted) {
    size_t n = (size_t)g->size, in = count, out = count, nbytes;
    char options[600], text[400] = "", *code;
    idist__xla_buffer from, to;
    idist__call call;
    bool accepted;
    idist__call_init(&call, kind, NULL, NULL, count, dtype);
    call.op = op;
    call.root = kind == IDIST__BROADCAST || kind == IDIST__REDUCE ? 1 : -1;
    if (!idist__hlo_supports(g, &call)) return;
    if (kind == IDIST__REDUCE_SCATTER || kind == IDIST__ALL_TO_ALL) in *= n;
    if (kind == IDIST__ALL_GATHER || kind == IDIST__ALL_TO_ALL) out *= n;
    fill_buffer(&from, in, dtype);
    fill_buffer(&to, out, dtype);
    code = idist__hlo_write(g, &call, &from, &to);
    nbytes = idist__proto_write(g, options, sizeof options);
    TAP_REQUIRE(code && nbytes <= sizeof options);
    accepted = compiles(code, options, nbytes, text, sizeof text);
    *n_accepted += accepted;
    if (accepted == is_refused(&call))
        tap_ok(false, "%s of %zu %s, op %d, was %s: %s", idist__kind_names[kind], count,
               idist__pjrt_type_of(dtype)->name, (int)op, accepted ? "accepted" : "refused", text);
    idist__mem_free(NULL, code);
}

int main(int argc, char **argv) {
    static const idist__kind kinds[] = {IDIST__ALL_REDUCE,     IDIST__REDUCE,
                                        IDIST__BROADCAST,      IDIST__ALL_GATHER,
                                        IDIST__REDUCE_SCATTER, IDIST__ALL_TO_ALL};
    static const idist_op ops[] = {IDIST_SUM, IDIST_PROD, IDIST_MIN, IDIST_MAX, IDIST_AVG};
    static const int ids[4] = {3, 1, 0, 2};
    idist__xla_rank_info infos[4];
    int ranks[4] = {0, 1, 2, 3}, n_accepted = 0;
    idist__world w;
    idist__xla x;
    TAP_REQUIRE(argc == 3);
    tap_deadline(1500);
    memset(&w, 0, sizeof w);
    memset(&x, 0, sizeof x);
    memset(infos, 0, sizeof infos);
    for (int i = 0; i < 4; i++) infos[i].device_id = ids[i];
    x.infos = infos;
    w.device = &x;
    w.group.w = &w;
    w.group.size = 4;
    w.group.ranks = ranks;
    if (!open_topology(argv[1], argv[2])) return tap_done();
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++)
        for (int d = 0; idist__pjrt_type_of((idist_dtype)d); d++)
            for (size_t o = 0; o < (idist__kind_reduces(kinds[k]) ? sizeof ops / sizeof ops[0] : 1);
                 o++)
                for (size_t count = 3; count < 5000; count += 4092)
                    try_call(&w.group, kinds[k], (idist_dtype)d, ops[o], count, &n_accepted);
    tap_ok(n_accepted > 300, "%d programs are accepted", n_accepted);
    return tap_done();
}
