// train/convert.h: conversions between floating-point dtypes
#pragma once

#include "base/fail.h"
#include "base/dtype.h"
#include "base/isa.h"
#include "base/small_float.h"

enum { IDIST__CONVERT_PIECE = 256 }; // elements converted at a time

// Returns the address of an element of a tensor.
static char *idist__convert_at(const idist_tensor *tensor, size_t first) {
    return (char *)tensor->data + first * idist_dtype_size(tensor->dtype);
}

// Reads elements first .. first + count - 1 of a tensor as floats.
static void idist__convert_read(const idist_tensor *tensor, size_t first, size_t count, float *x) {
    const char *from = idist__convert_at(tensor, first);
    double wide[IDIST__CONVERT_PIECE];
    size_t i;

    if (tensor->dtype == IDIST_F32) {
        memcpy(x, from, count * sizeof *x);
        return;
    }

    if (tensor->dtype != IDIST_F64) {
        idist__small_float_widen(x, from, count, tensor->dtype);
        return;
    }

    memcpy(wide, from, count * sizeof *wide);
    for (i = 0; i < count; i++) x[i] = (float)wide[i];
}

// Writes floats to elements first .. first + count - 1 of a tensor.
static void idist__convert_write(const idist_tensor *tensor, size_t first, size_t count,
                                 const float *x) {
    char *to = idist__convert_at(tensor, first);
    double wide[IDIST__CONVERT_PIECE];
    size_t i;

    if (tensor->dtype == IDIST_F32) {
        memcpy(to, x, count * sizeof *x);
        return;
    }

    if (tensor->dtype != IDIST_F64) {
        idist__small_float_narrow(to, x, count, tensor->dtype);
        return;
    }

    for (i = 0; i < count; i++) wide[i] = (double)x[i];
    memcpy(to, wide, count * sizeof *wide);
}

// Converts the elements of a tensor.
static void idist__convert_tensor(const idist_tensor *from, const idist_tensor *to) {
    float x[IDIST__CONVERT_PIECE];
    size_t first, count;

    if (from->data == to->data || !from->count) return;

    if (from->dtype == to->dtype) {
        memcpy(to->data, from->data, from->count * idist_dtype_size(from->dtype));
        return;
    }

    for (first = 0; first < from->count; first += count) {
        count = from->count - first;
        if (count > IDIST__CONVERT_PIECE) count = IDIST__CONVERT_PIECE;
        idist__convert_read(from, first, count, x);
        idist__convert_write(to, first, count, x);
    }
}

static idist_status idist__convert_check(const idist_tensor *tensors, int n, const char *name) {
    int i;

    for (i = 0; i < n; i++) {
        const idist_tensor *tensor = &tensors[i];

        if (!idist__dtype_is_float(tensor->dtype) || !idist_dtype_size(tensor->dtype))
            return idist__fail(IDIST_ERR_ARG, "convert: %s[%d] must be of a floating dtype, not %s",
                               name, i, idist_dtype_name(tensor->dtype));
        if (tensor->count && !tensor->data)
            return idist__fail(IDIST_ERR_ARG, "convert: %s[%d] is NULL", name, i);
    }

    return IDIST_OK;
}

idist_status idist_convert(const idist_tensor *from, const idist_tensor *to, int n) {
    uint32_t mode;
    int i;
    idist_status status;

    if (n < 0 || (n && (!from || !to)))
        return idist__fail(IDIST_ERR_ARG, "convert: %d tensors, or a list is NULL", n);
    status = idist__convert_check(from, n, "from");
    if (status == IDIST_OK) status = idist__convert_check(to, n, "to");
    if (status != IDIST_OK) return status;

    for (i = 0; i < n; i++) {
        if (from[i].count != to[i].count)
            return idist__fail(IDIST_ERR_ARG, "convert: from[%d] has %zu elements, but to[%d] %zu",
                               i, from[i].count, i, to[i].count);
        if (from[i].data == to[i].data && from[i].count && from[i].dtype != to[i].dtype)
            return idist__fail(IDIST_ERR_ARG,
                               "convert: from[%d] and to[%d] are the same memory, but %s and %s", i,
                               i, idist_dtype_name(from[i].dtype), idist_dtype_name(to[i].dtype));
    }

    mode = idist__mode_enter(); // all ranks round in the same way
    for (i = 0; i < n; i++) idist__convert_tensor(&from[i], &to[i]);
    idist__mode_leave(mode);

    return IDIST_OK;
}
