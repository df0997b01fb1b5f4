// xla/stablehlo.h: a call as a StableHLO program
//
// A program has one replica per member of the group. It flattens the input, performs the
// collective, and gives the result the shape of the buffer that receives it:
//
//     func @main(%in: tensor<2x3xf32>) -> tensor<2x3xf32> {
//       %flat = reshape %in
//       %done = "stablehlo.all_reduce"(%flat) ({ ... add ... }) {replica_groups = [[0, 1]]}
//       %out = reshape %done
//       return %out
//     }
//
// XLA has no broadcast on CPUs and TPUs. Instead, a program adds the root's bits and the other
// ranks' zeros as unsigned integers, which is exact even for NaN and -0.
#pragma once

#include "base/text.h"
#include "base/mem.h"
#include "core/kind.h"
#include "core/model.h"
#include "xla/pjrt.h"
#include "xla/xla_model.h"

// A program while it is being written.
typedef struct idist__hlo {
    char *text;
    size_t capacity;
    const idist_group *g;
    const idist__call *call;
    const idist__pjrt_type *type;
    char flat_in[48], flat_out[48]; // types: "tensor<6xf32>"
    char in[320], out[320];         // "tensor<2x3xf32>"
} idist__hlo;

// Appends a line.
IDIST__PRINTF(2, 3) static void idist__hlo_put(idist__hlo *hlo, const char *fmt, ...) {
    size_t used = strlen(hlo->text);
    va_list args;

    va_start(args, fmt);
    vsnprintf(hlo->text + used, hlo->capacity - used, fmt, args);
    va_end(args);
    idist__text_append(hlo->text, hlo->capacity, "\n");
}

// Writes the type of a buffer.
static void idist__hlo_shape(char *text, size_t capacity, const idist__xla_buffer *buffer) {
    int i;

    snprintf(text, capacity, "tensor<");
    for (i = 0; i < buffer->dim_count; i++)
        idist__text_append(text, capacity, "%lldx", (long long)buffer->dims[i]);
    idist__text_append(text, capacity, "%s>", idist__pjrt_type_of(buffer->dtype)->name);
}

// Appends the attribute that says which replicas take part: all of them, in order.
static void idist__hlo_put_groups(idist__hlo *hlo) {
    int i;

    idist__text_append(hlo->text, hlo->capacity, "      replica_groups = dense<[[");
    for (i = 0; i < hlo->g->size; i++)
        idist__text_append(hlo->text, hlo->capacity, "%s%d", i ? ", " : "", i);
    idist__hlo_put(hlo, "]]> : tensor<1x%dxi64>", hlo->g->size);
}

// Appends the function that reduces two elements.
static void idist__hlo_put_region(idist__hlo *hlo, const char *op, const char *type) {
    idist__hlo_put(hlo, "    ^bb0(%%x: tensor<%s>, %%y: tensor<%s>):", type, type);
    idist__hlo_put(hlo, "      %%z = stablehlo.%s %%x, %%y : tensor<%s>", op, type);
    idist__hlo_put(hlo, "      stablehlo.return %%z : tensor<%s>", type);
}

// Returns XLA's name for an op, or NULL if programs do not support the op.
static const char *idist__hlo_op(idist_op op) {
    switch (op) {
    case IDIST_SUM:
    case IDIST_AVG: return "add";
    case IDIST_PROD: return "multiply";
    case IDIST_MIN: return "minimum";
    case IDIST_MAX: return "maximum";
    case IDIST_BAND: return "and";
    case IDIST_BOR: return "or";
    case IDIST_BXOR: return "xor";
    default: return NULL;
    }
}

// Returns true if a dtype represents the number of ranks exactly, so that an AVG can divide by it.
// Returns false for 8-bit floats.
static bool idist__hlo_can_divide(idist_dtype dtype, int n) {
    switch (dtype) {
    case IDIST_I8: return n <= 127;
    case IDIST_U8: return n <= 255;
    case IDIST_I16: return n <= 32767;
    case IDIST_F16: return n <= 2048;
    case IDIST_BF16: return n <= 256;
    case IDIST_F8E4M3:
    case IDIST_F8E5M2: return false;
    default: return true;
    }
}

// Returns true if a program can perform a call. All members get the same answer.
static bool idist__hlo_supports(const idist_group *g, const idist__call *call) {
    if (!call->count || !idist__pjrt_type_of(call->dtype)) return false;

    switch (call->kind) {
    case IDIST__ALL_REDUCE:
    case IDIST__REDUCE:
    case IDIST__REDUCE_SCATTER:
        if (!idist__hlo_op(call->op)) return false;
        return call->op != IDIST_AVG || idist__hlo_can_divide(call->dtype, g->size);
    case IDIST__BROADCAST:
    case IDIST__ALL_GATHER:
    case IDIST__ALL_TO_ALL: return true;
    default: return false;
    }
}

// Appends an all_reduce or reduce_scatter that reads %flat and defines %done.
static void idist__hlo_put_reduce(idist__hlo *hlo) {
    bool scatters = hlo->call->kind == IDIST__REDUCE_SCATTER, divides = hlo->call->op == IDIST_AVG;
    const char *type = hlo->type->name;
    bool is_float = type[0] == 'f' || type[0] == 'b';

    idist__hlo_put(hlo, "    %%%s = \"stablehlo.%s\"(%%flat) ({", divides ? "sum" : "done",
                   scatters ? "reduce_scatter" : "all_reduce");
    idist__hlo_put_region(hlo, idist__hlo_op(hlo->call->op), type);
    idist__hlo_put(hlo, "    }) {%s", scatters ? "scatter_dimension = 0 : i64," : "");
    idist__hlo_put_groups(hlo);
    idist__hlo_put(hlo, "    } : (%s) -> %s", hlo->flat_in, hlo->flat_out);
    if (!divides) return;
    idist__hlo_put(hlo, "    %%n = stablehlo.constant dense<%d%s> : %s", hlo->g->size,
                   is_float ? ".0" : "", hlo->flat_out);
    idist__hlo_put(hlo, "    %%done = stablehlo.divide %%sum, %%n : %s", hlo->flat_out);
}

// Appends a broadcast that reads %flat and defines %done.
static void idist__hlo_put_broadcast(idist__hlo *hlo) {
    char bits[48];

    snprintf(bits, sizeof bits, "tensor<%zux%s>", hlo->call->count, hlo->type->bits);
    idist__hlo_put(hlo, "    %%id = stablehlo.replica_id : tensor<ui32>");
    idist__hlo_put(hlo, "    %%root = stablehlo.constant dense<%d> : tensor<ui32>",
                   hlo->call->root);
    idist__hlo_put(hlo, "    %%is_root = stablehlo.compare EQ, %%id, %%root : (tensor<ui32>, "
                        "tensor<ui32>) -> tensor<i1>");
    idist__hlo_put(hlo, "    %%own = stablehlo.bitcast_convert %%flat : (%s) -> %s", hlo->flat_in,
                   bits);
    idist__hlo_put(hlo, "    %%zero = stablehlo.constant dense<0> : %s", bits);
    idist__hlo_put(hlo,
                   "    %%part = \"stablehlo.select\"(%%is_root, %%own, %%zero) : "
                   "(tensor<i1>, %s, %s) -> %s",
                   bits, bits, bits);

    idist__hlo_put(hlo, "    %%sum = \"stablehlo.all_reduce\"(%%part) ({");
    idist__hlo_put_region(hlo, "add", hlo->type->bits);
    idist__hlo_put(hlo, "    }) {");
    idist__hlo_put_groups(hlo);
    idist__hlo_put(hlo, "    } : (%s) -> %s", bits, bits);

    idist__hlo_put(hlo, "    %%done = stablehlo.bitcast_convert %%sum : (%s) -> %s", bits,
                   hlo->flat_out);
}

// Appends an all_gather or all_to_all that reads %flat and defines %done. Moves elements as
// unsigned integers, because XLA may move 16-bit and 8-bit floats as F32, which changes the bits of
// a NaN.
static void idist__hlo_put_exchange(idist__hlo *hlo) {
    bool gathers = hlo->call->kind == IDIST__ALL_GATHER;
    size_t n = (size_t)hlo->g->size, count = hlo->call->count;
    char in[48], out[48];

    snprintf(in, sizeof in, "tensor<%zux%s>", gathers ? count : n * count, hlo->type->bits);
    snprintf(out, sizeof out, "tensor<%zux%s>", n * count, hlo->type->bits);
    idist__hlo_put(hlo, "    %%own = stablehlo.bitcast_convert %%flat : (%s) -> %s", hlo->flat_in,
                   in);

    idist__hlo_put(hlo, "    %%all = \"stablehlo.%s\"(%%own) {",
                   gathers ? "all_gather" : "all_to_all");
    if (gathers) idist__hlo_put(hlo, "      all_gather_dim = 0 : i64,");
    else
        idist__hlo_put(hlo,
                       "      split_dimension = 0 : i64, concat_dimension = 0 : i64, "
                       "split_count = %d : i64,",
                       hlo->g->size);
    idist__hlo_put_groups(hlo);
    idist__hlo_put(hlo, "    } : (%s) -> %s", in, out);

    idist__hlo_put(hlo, "    %%done = stablehlo.bitcast_convert %%all : (%s) -> %s", out,
                   hlo->flat_out);
}

// Sets the types of a program. `in` and `out` are the buffers whose shapes the program has.
static void idist__hlo_set_types(idist__hlo *hlo, const idist__xla_buffer *in,
                                 const idist__xla_buffer *out) {
    hlo->type = idist__pjrt_type_of(hlo->call->dtype);
    idist__hlo_shape(hlo->in, sizeof hlo->in, in);
    idist__hlo_shape(hlo->out, sizeof hlo->out, out);
    snprintf(hlo->flat_in, sizeof hlo->flat_in, "tensor<%zux%s>", in->count, hlo->type->name);
    snprintf(hlo->flat_out, sizeof hlo->flat_out, "tensor<%zux%s>", out->count, hlo->type->name);
}

// Writes the program of a call for which idist__hlo_supports returns true. The input is shaped like
// `in`, and the result like `out`. Returns text that the caller frees, or NULL if memory cannot be
// allocated.
static char *idist__hlo_write(const idist_group *g, const idist__call *call,
                              const idist__xla_buffer *in, const idist__xla_buffer *out) {
    idist__hlo hlo;

    hlo.g = g;
    hlo.call = call;
    hlo.capacity = 6000 + 12 * (size_t)g->size;
    hlo.text = (char *)idist__mem_alloc(NULL, hlo.capacity);
    if (!hlo.text) return NULL;
    idist__hlo_set_types(&hlo, in, out);

    // The result may take the memory of the input. idist__xla_worker_execute decides whether it
    // does.
    idist__hlo_put(&hlo, "module @idist {");
    idist__hlo_put(&hlo, "  func.func public @main(%%in: %s%s) -> %s {", hlo.in,
                   strcmp(hlo.in, hlo.out) == 0 ? " {tf.aliasing_output = 0 : i32}" : "", hlo.out);
    idist__hlo_put(&hlo, "    %%flat = stablehlo.reshape %%in : (%s) -> %s", hlo.in, hlo.flat_in);

    if (call->kind == IDIST__BROADCAST) idist__hlo_put_broadcast(&hlo);
    else if (idist__kind_reduces(call->kind)) idist__hlo_put_reduce(&hlo);
    else idist__hlo_put_exchange(&hlo);

    idist__hlo_put(&hlo, "    %%out = stablehlo.reshape %%done : (%s) -> %s", hlo.flat_out,
                   hlo.out);
    idist__hlo_put(&hlo, "    return %%out : %s", hlo.out);
    idist__hlo_put(&hlo, "  }\n}");

    return hlo.text;
}
