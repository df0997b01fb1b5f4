// train/tensor.h: broadcasts tensors, and compares shapes and options between ranks
#pragma once

#include "base/fail.h"
#include "base/text.h"
#include "train/agree.h"

//------------------------------------------------------------------------------
// shapes and options that must be equal on all ranks
//------------------------------------------------------------------------------

// Values of `dtype` in a shape that stands for an option. The value of the option is in `count`.
enum { IDIST__SHAPE_INTEGER = -1, IDIST__SHAPE_REAL = -2 };

// The shape of a tensor, or the value of an option.
typedef struct idist__shape {
    const char *what; // "parameter", or the name of the option
    int index;        // of the tensor, or -1 for an option
    int64_t count;    // elements; for an option, its integer or the bits of its double
    int64_t dtype;
} idist__shape;

// The words that are broadcast for each shape.
enum { IDIST__SHAPE_COUNT, IDIST__SHAPE_DTYPE, IDIST__SHAPE_WORDS };

static idist__shape idist__shape_of_option(const char *what, int64_t value) {
    idist__shape shape;

    shape.what = what;
    shape.index = -1;
    shape.count = value;
    shape.dtype = IDIST__SHAPE_INTEGER;

    return shape;
}

static void idist__shape_of_tensors(idist__shape *shapes, const char *what,
                                    const idist_tensor *tensors, int n) {
    int i;

    for (i = 0; i < n; i++) {
        shapes[i].what = what;
        shapes[i].index = i;
        shapes[i].count = (int64_t)tensors[i].count;
        shapes[i].dtype = (int64_t)tensors[i].dtype;
    }
}

// Prints a shape in the form "F32 x 1024", or the value of an option.
static void idist__shape_print(char *text, size_t capacity, int64_t count, int64_t dtype) {
    char number[IDIST__NUMBER_NBYTES];
    double real;

    memcpy(&real, &count, sizeof real);
    if (dtype == IDIST__SHAPE_REAL)
        idist__text_copy(text, capacity, idist__number_print(number, real, 6));
    else if (dtype == IDIST__SHAPE_INTEGER) snprintf(text, capacity, "%lld", (long long)count);
    else
        snprintf(text, capacity, "%s x %lld", idist_dtype_name((idist_dtype)dtype),
                 (long long)count);
}

static idist_status idist__shape_mismatch(const char *name, const idist__shape *shape,
                                          const int64_t *of_root, int root) {
    char here[64], there[64], index[16] = "";

    idist__shape_print(here, sizeof here, shape->count, shape->dtype);
    idist__shape_print(there, sizeof there, of_root[IDIST__SHAPE_COUNT],
                       of_root[IDIST__SHAPE_DTYPE]);
    if (shape->index >= 0) snprintf(index, sizeof index, " %d", shape->index);

    return idist__fail(IDIST_ERR_MISMATCH, "%s: %s%s is %s here, and %s on rank %d", name,
                       shape->what, index, here, there, root);
}

// Checks that all ranks have the root's shapes[first .. end-1]. `words` has space for all shapes.
// Collective.
static idist_status idist__shape_compare(const char *name, const idist__shape *shapes, int first,
                                         int end, int64_t *words, int root,
                                         const idist_opts *opts) {
    size_t word_count = IDIST__SHAPE_WORDS * (size_t)(end - first);
    int i;
    idist_status status;

    for (i = first; i < end; i++) {
        words[IDIST__SHAPE_WORDS * i + IDIST__SHAPE_COUNT] = shapes[i].count;
        words[IDIST__SHAPE_WORDS * i + IDIST__SHAPE_DTYPE] = shapes[i].dtype;
    }

    status = idist_broadcast(words + IDIST__SHAPE_WORDS * first, word_count, IDIST_I64, root, opts);
    if (status != IDIST_OK) return status;

    for (i = first; i < end && status == IDIST_OK; i++) {
        const int64_t *of_root = words + IDIST__SHAPE_WORDS * i;

        if (of_root[IDIST__SHAPE_COUNT] != shapes[i].count ||
            of_root[IDIST__SHAPE_DTYPE] != shapes[i].dtype)
            status = idist__shape_mismatch(name, &shapes[i], of_root, root);
    }

    return idist__agree(status, opts);
}

// Checks that all ranks have the root's shapes. Succeeds on all ranks or on none, and fails if
// `mine` is not IDIST_OK on some rank. On that rank shapes may be NULL. The first option_count
// shapes are compared first, because they include the number of the other shapes; option_count is
// the same on all ranks. Collective.
static idist_status idist__shape_agree(const char *name, const idist__shape *shapes,
                                       int option_count, int count, idist_status mine, int root,
                                       const idist_opts *opts) {
    size_t word_count = IDIST__SHAPE_WORDS * ((size_t)count + 1);
    int64_t *words = (int64_t *)malloc(word_count * sizeof *words);
    idist_status status = mine;

    if (status == IDIST_OK && !words)
        status =
            idist__fail(IDIST_ERR_NO_MEMORY, "%s: no memory to compare %d tensors", name, count);
    status = idist__agree(status, opts);
    if (status == IDIST_OK)
        status = idist__shape_compare(name, shapes, 0, option_count, words, root, opts);
    if (status == IDIST_OK)
        status = idist__shape_compare(name, shapes, option_count, count, words, root, opts);
    free(words);

    return status;
}

//------------------------------------------------------------------------------
// arrays copied from one rank to all
//------------------------------------------------------------------------------

// Checks a list of tensors. If data_too is set, every tensor with elements must have memory. Local.
static idist_status idist__tensor_check(const char *name, const char *what,
                                        const idist_tensor *tensors, int n, bool data_too) {
    int i;

    if (n < 0)
        return idist__fail(IDIST_ERR_ARG, "%s: the number of %ss must not be negative, got %d",
                           name, what, n);
    if (n && !tensors)
        return idist__fail(IDIST_ERR_ARG, "%s: %d %ss, but the list is NULL", name, n, what);

    for (i = 0; i < n; i++) {
        if (!idist_dtype_size(tensors[i].dtype))
            return idist__fail(IDIST_ERR_ARG, "%s: %s %d: invalid dtype %d", name, what, i,
                               (int)tensors[i].dtype);
        if (tensors[i].count > SIZE_MAX / 64)
            return idist__fail(IDIST_ERR_ARG, "%s: %s %d has too many elements: %zu", name, what, i,
                               tensors[i].count);
        if (data_too && tensors[i].count && !tensors[i].data)
            return idist__fail(IDIST_ERR_ARG, "%s: %s %d is NULL", name, what, i);
    }

    return IDIST_OK;
}

// Compares two pointers to tensors by the addresses of the tensors' memory, for qsort.
static int idist__tensor_compare(const void *a, const void *b) {
    uintptr_t x = (uintptr_t)(*(const idist_tensor *const *)a)->data;
    uintptr_t y = (uintptr_t)(*(const idist_tensor *const *)b)->data;

    return (x > y) - (x < y);
}

// Finds two tensors that overlap in memory, and sets *first < *second to their indices. Sets both
// to -1 if no tensors overlap. Ignores tensors without memory.
static idist_status idist__tensor_find_overlap(const char *name, const idist_tensor *tensors, int n,
                                               int *first, int *second) {
    const idist_tensor **sorted;
    size_t count = 0, k;
    int i;

    *first = *second = -1;
    sorted = (const idist_tensor **)malloc(((size_t)n + 1) * sizeof *sorted);
    if (!sorted)
        return idist__fail(IDIST_ERR_NO_MEMORY, "%s: no memory to compare %d tensors", name, n);

    for (i = 0; i < n; i++)
        if (tensors[i].data && tensors[i].count) sorted[count++] = &tensors[i];
    qsort(sorted, count, sizeof *sorted, idist__tensor_compare);

    for (k = 1; k < count && *first < 0; k++) {
        const idist_tensor *below = sorted[k - 1], *above = sorted[k];
        size_t nbytes = below->count * idist_dtype_size(below->dtype);

        if ((uintptr_t)above->data - (uintptr_t)below->data >= nbytes) continue;
        *first = (int)((below < above ? below : above) - tensors);
        *second = (int)((below < above ? above : below) - tensors);
    }

    free(sorted);

    return IDIST_OK;
}

#define IDIST__TENSORS_AT_ONCE 64

// Adds a broadcast per tensor to the group of calls that idist_group_begin has started, and ends
// the group.
static idist_status idist__tensor_broadcast_group(const idist_tensor *tensors, int n, int root,
                                                  const idist_opts *opts) {
    int i;
    idist_status status = IDIST_OK, end_status;

    for (i = 0; i < n && status == IDIST_OK; i++)
        status = idist_broadcast(tensors[i].data, tensors[i].count, tensors[i].dtype, root, opts);
    end_status = idist_group_end();

    return status == IDIST_OK ? end_status : status;
}

// Broadcasts all tensors, many at a time, so that small tensors do not wait for one another.
// Collective.
static idist_status idist__tensor_broadcast(const idist_tensor *tensors, int n, int root,
                                            const idist_opts *opts) {
    int i, count;
    idist_status status;

    for (i = 0; i < n; i += count) {
        count = n - i < IDIST__TENSORS_AT_ONCE ? n - i : IDIST__TENSORS_AT_ONCE;
        status = idist_group_begin();
        if (status != IDIST_OK) return status;
        status = idist__tensor_broadcast_group(tensors + i, count, root, opts);
        if (status != IDIST_OK)
            return idist__agree_break("broadcast of tensors", opts->group, status);
    }

    return IDIST_OK;
}

// Returns the options and shapes that must be equal on all ranks, or NULL if there is no memory.
// The caller frees them.
static idist__shape *idist__tensor_shapes(const char *what, const char *number,
                                          const idist_tensor *tensors, int n, size_t options_nbytes,
                                          int *option_count) {
    idist__shape *shapes;

    *option_count = 2;
    shapes = (idist__shape *)malloc(((size_t)n + (size_t)*option_count) * sizeof *shapes);
    if (!shapes) return NULL;
    shapes[0] = idist__shape_of_option(number, n);
    shapes[1] = idist__shape_of_option("options_nbytes", (int64_t)options_nbytes);
    idist__shape_of_tensors(shapes + *option_count, what, tensors, n);

    return shapes;
}

// Compares and broadcasts tensors and options, for idist_broadcast_parameters and
// idist_broadcast_optimizer_state. Collective.
static idist_status idist__tensor_share(const char *name, const char *what,
                                        const idist_tensor *tensors, int n, void *options,
                                        size_t options_nbytes, int root, const idist_opts *opts) {
    char number[48];
    int group_size, option_count = 0;
    idist__shape *shapes = NULL;
    idist_opts own_opts;
    idist_status status = idist__agree_enter(name, opts, &own_opts);

    if (status != IDIST_OK) return status;
    group_size = idist_group_size(own_opts.group);
    status = idist__tensor_check(name, what, tensors, n, true);
    if (status == IDIST_OK && (root < 0 || root >= group_size))
        status = idist__fail(IDIST_ERR_ARG, "%s: root %d is not a rank of a group of %d", name,
                             root, group_size);
    if (status == IDIST_OK && options_nbytes && !options)
        status = idist__fail(IDIST_ERR_ARG, "%s: options is NULL", name);

    if (status == IDIST_OK) {
        snprintf(number, sizeof number, "number of %ss", what);
        shapes = idist__tensor_shapes(what, number, tensors, n, options_nbytes, &option_count);
        if (!shapes)
            status = idist__fail(IDIST_ERR_NO_MEMORY, "%s: no memory for %d tensors", name, n);
    }

    status = idist__shape_agree(name, shapes, option_count, shapes ? option_count + n : 0, status,
                                root, &own_opts);
    free(shapes);

    if (status == IDIST_OK) status = idist__tensor_broadcast(tensors, n, root, &own_opts);
    if (status == IDIST_OK && options_nbytes)
        status = idist_broadcast(options, options_nbytes, IDIST_U8, root, &own_opts);
    if (status != IDIST_OK) return status;

    return idist__agree(status, &own_opts);
}

idist_status idist_broadcast_parameters(const idist_tensor *params, int n, int root,
                                        const idist_opts *opts) {
    return idist__tensor_share("broadcast_parameters", "parameter", params, n, NULL, 0, root, opts);
}

idist_status idist_broadcast_optimizer_state(const idist_tensor *state, int n, void *options,
                                             size_t options_nbytes, int root,
                                             const idist_opts *opts) {
    return idist__tensor_share("broadcast_optimizer_state", "tensor", state, n, options,
                               options_nbytes, root, opts);
}
