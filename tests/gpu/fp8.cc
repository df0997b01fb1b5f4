// fp8.cc - compares the 8-bit floats of idist with cuda_fp8.h of CUDA, whose conversions also run
// on the host. Covers all codes and every STEP-th float. STEP is the first argument. It is 61 by
// default, and 1 covers all floats. Prints the values that differ.
#define IDIST_IMPLEMENTATION
#include "idist.h"

#include <cuda_fp8.h>

static bool is_nan(float x) { return x != x; }

// T is __nv_fp8_e4m3 or __nv_fp8_e5m2.
template <typename T> static int compare(idist_dtype d, uint32_t step) {
    enum { MANY = 4096 };
    static float x[MANY];
    static uint8_t got[MANY];
    uint64_t at = 0;
    int wrong = 0;
    for (int i = 0; i < 256; i++) {
        T theirs;
        theirs.__x = (__nv_fp8_storage_t)i;
        got[0] = (uint8_t)i;
        idist__small_float_widen(x, got, 1, d);
        float want = (float)theirs;
        if (is_nan(want) ? !is_nan(x[0])
                         : idist__small_float_to_bits(want) != idist__small_float_to_bits(x[0])) {
            printf("%s %02x: %g here, %g there\n", idist_dtype_name(d), (unsigned)i, (double)x[0],
                   (double)want);
            wrong++;
        }
    }
    while (at <= UINT32_MAX) {
        int n = 0;
        for (uint64_t k = at; n < MANY && k <= UINT32_MAX; k += step)
            x[n++] = idist__small_float_from_bits((uint32_t)k);
        idist__small_float_narrow(got, x, (size_t)n, d);
        for (int i = 0; i < n; i++) {
            T theirs(x[i]);
            if (theirs.__x != got[i] && wrong++ < 10)
                printf("%s of %08x: %02x here, %02x there\n", idist_dtype_name(d),
                       (unsigned)idist__small_float_to_bits(x[i]), (unsigned)got[i],
                       (unsigned)theirs.__x);
        }
        at += (uint64_t)MANY * step;
    }
    return wrong;
}

int main(int argc, char **argv) {
    uint32_t step = argc > 1 ? (uint32_t)atoi(argv[1]) : 61;
    return compare<__nv_fp8_e4m3>(IDIST_F8E4M3, step) + compare<__nv_fp8_e5m2>(IDIST_F8E5M2, step)
               ? 1
               : 0;
}
