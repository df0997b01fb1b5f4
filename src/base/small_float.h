// base/small_float.h: floats of 16 and 8 bits
//
// The conversions have no branches, so that compilers can vectorize the loops that use them. Each
// conversion also computes the result for zero and subnormals, and selects one of the two results
// by a mask.
#pragma once

#include "base/isa.h"

IDIST__INLINE float idist__small_float_from_bits(uint32_t u) {
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

IDIST__INLINE uint32_t idist__small_float_to_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

// Converts from a float with e exponent bits and m fraction bits, laid out as in IEEE 754.
// `special` is the first code that is not a finite number: infinity, or NaN in formats without
// infinity.
IDIST__INLINE float idist__small_float_decode(uint32_t x, uint32_t e, uint32_t m,
                                              uint32_t special) {
    uint32_t abs = x & ((1u << (e + m)) - 1), sign = x >> (e + m) << 31,
             bias = 128 - (1u << (e - 1)); // difference of the exponent biases
    uint32_t u = (abs << (23 - m)) + (bias << 23), low = 0 - (uint32_t)(abs >> m == 0);
    float subnormal = (float)(int32_t)abs * idist__small_float_from_bits((bias + 1 - m) << 23);

    if ((int32_t)abs >= (int32_t)special) u |= 0x7f800000u;
    if ((int32_t)abs > (int32_t)special) u |= 0x400000u; // makes the NaN quiet
    return idist__small_float_from_bits(sign | (u & ~low) |
                                        (idist__small_float_to_bits(subnormal) & low));
}

// Converts to a float with e exponent bits and m fraction bits. Rounds to nearest, ties to even.
// Codes above `most` become `most`, and a NaN becomes `nan`. To round subnormals, adds a float
// whose last bit has the value of the smallest subnormal.
IDIST__INLINE uint32_t idist__small_float_encode(float f, uint32_t e, uint32_t m, uint32_t most,
                                                 uint32_t nan) {
    uint32_t u = idist__small_float_to_bits(f), abs = u & 0x7fffffffu, bias = 128 - (1u << (e - 1)),
             unit = (bias + 24 - m) << 23;
    uint32_t low = 0 - (uint32_t)((int32_t)abs < (int32_t)((bias + 1) << 23));
    uint32_t subnormal = idist__small_float_to_bits(idist__small_float_from_bits(abs) +
                                                    idist__small_float_from_bits(unit)) -
                         unit;
    uint32_t x = (abs - (bias << 23) + (1u << (22 - m)) - 1 + ((abs >> (23 - m)) & 1u)) >> (23 - m);

    x = (x & ~low) | (subnormal & low);
    if ((int32_t)x > (int32_t)most) x = most;

    return (int32_t)abs > 0x7f800000 ? nan : x | u >> 31 << (e + m);
}

// Converts F16 as the hardware does (F16C, Arm). Overflow gives infinity. A NaN becomes quiet and
// keeps its payload.
IDIST__INLINE float idist__small_float_from_half(uint16_t h) {
    return idist__small_float_decode(h, 5, 10, 0x7c00);
}
IDIST__INLINE uint16_t idist__small_float_to_half(float f) {
    uint32_t u = idist__small_float_to_bits(f),
             nan = ((u >> 16) & 0x8000u) | 0x7e00u | ((u >> 13) & 0x3ffu);
    return (uint16_t)idist__small_float_encode(f, 5, 10, 0x7c00, nan);
}

// Converts F8 as CUDA's __nv_fp8_e4m3 and __nv_fp8_e5m2 do. A number that is too large, even
// infinity, becomes the largest finite number.
IDIST__INLINE float idist__small_float_from_f8e4m3(uint8_t h) {
    return idist__small_float_decode(h, 4, 3, 0x7f);
}
IDIST__INLINE float idist__small_float_from_f8e5m2(uint8_t h) {
    return idist__small_float_decode(h, 5, 2, 0x7c);
}
IDIST__INLINE uint8_t idist__small_float_to_f8e4m3(float f) {
    return (uint8_t)idist__small_float_encode(f, 4, 3, 0x7e, 0x7f);
}
IDIST__INLINE uint8_t idist__small_float_to_f8e5m2(float f) {
    return (uint8_t)idist__small_float_encode(f, 5, 2, 0x7b, 0x7f);
}

IDIST__INLINE float idist__small_float_from_bf16(uint16_t h) {
    return idist__small_float_from_bits((uint32_t)h << 16);
}
IDIST__INLINE uint16_t idist__small_float_to_bf16(float f) {
    uint32_t u = idist__small_float_to_bits(f), quiet = ~u & 0x400000u,
             round = 0x7fffu + ((u >> 16) & 1u);
    return (uint16_t)((u + ((int32_t)(u & 0x7fffffffu) > 0x7f800000 ? quiet : round)) >> 16);
}

// Element types that may lie at any address, because user buffers need not be aligned.
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

// clang warns about loops that it does not vectorize, for example at -O0. The warning stays off
// until the end of the kernels in base/reduce.h.
#ifdef __clang__
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"
#endif

#define IDIST__CONVERTERS(name, type, from, to, isa)                                        \
    IDIST__VECTORIZE IDIST__ISA_##isa static void idist__small_float_widen_##name##_##isa(  \
        float *dst, const void *src, size_t count) {                                        \
        const idist__any_##type *s = (const idist__any_##type *)src;                        \
        size_t i;                                                                           \
        IDIST__NO_ALIAS                                                                     \
        for (i = 0; i < count; i++) dst[i] = from(s[i]);                                    \
    }                                                                                       \
    IDIST__VECTORIZE IDIST__ISA_##isa static void idist__small_float_narrow_##name##_##isa( \
        void *dst, const float *src, size_t count) {                                        \
        idist__any_##type *d = (idist__any_##type *)dst;                                    \
        size_t i;                                                                           \
        IDIST__NO_ALIAS                                                                     \
        for (i = 0; i < count; i++) d[i] = to(src[i]);                                      \
    }

IDIST__CONVERTERS(half, u16, idist__small_float_from_half, idist__small_float_to_half, base)
IDIST__CONVERTERS(bf16, u16, idist__small_float_from_bf16, idist__small_float_to_bf16, base)
IDIST__CONVERTERS(f8e4m3, u8, idist__small_float_from_f8e4m3, idist__small_float_to_f8e4m3, base)
IDIST__CONVERTERS(f8e5m2, u8, idist__small_float_from_f8e5m2, idist__small_float_to_f8e5m2, base)

#ifdef IDIST__X86
IDIST__CONVERTERS(bf16, u16, idist__small_float_from_bf16, idist__small_float_to_bf16, avx2)
IDIST__CONVERTERS(bf16, u16, idist__small_float_from_bf16, idist__small_float_to_bf16, avx512)
IDIST__CONVERTERS(f8e4m3, u8, idist__small_float_from_f8e4m3, idist__small_float_to_f8e4m3, avx2)
IDIST__CONVERTERS(f8e5m2, u8, idist__small_float_from_f8e5m2, idist__small_float_to_f8e5m2, avx2)

// The F16 loops use assembly, because <immintrin.h> would cost every program a quarter of a second
// of compile time.
typedef float idist__f32x8 __attribute__((vector_size(32), aligned(1), may_alias));
typedef uint16_t idist__u16x8 __attribute__((vector_size(16), aligned(1), may_alias));

IDIST__ISA_avx2 static void idist__small_float_widen_half_avx2(float *dst, const void *src,
                                                               size_t count) {
    const idist__any_u16 *s = (const idist__any_u16 *)src;
    size_t i;

    for (i = 0; i + 8 <= count; i += 8) {
        idist__f32x8 v;
        __asm__("vcvtph2ps %1, %0" : "=x"(v) : "m"(*(const idist__u16x8 *)(const void *)(s + i)));
        *(idist__f32x8 *)(void *)(dst + i) = v;
    }

    for (; i < count; i++) dst[i] = idist__small_float_from_half(s[i]);
}

IDIST__ISA_avx2 static void idist__small_float_narrow_half_avx2(void *dst, const float *src,
                                                                size_t count) {
    idist__any_u16 *d = (idist__any_u16 *)dst;
    size_t i;

    for (i = 0; i + 8 <= count; i += 8) { // $0 rounds to nearest, ties to even
        idist__f32x8 v = *(const idist__f32x8 *)(const void *)(src + i);
        __asm__("vcvtps2ph $0, %1, %0" : "=m"(*(idist__u16x8 *)(void *)(d + i)) : "x"(v));
    }

    for (; i < count; i++) d[i] = idist__small_float_to_half(src[i]);
}
#endif

// The converters by instruction set, and by dtype from F16 on.
#define IDIST__CONVERTER(name, isa) \
    { idist__small_float_widen_##name##_##isa, idist__small_float_narrow_##name##_##isa }
#define IDIST__CONVERTER_ROW(isa, wide)                                            \
    {                                                                              \
        IDIST__CONVERTER(half, isa), IDIST__CONVERTER(bf16, wide), {0, 0}, {0, 0}, \
            IDIST__CONVERTER(f8e4m3, isa), IDIST__CONVERTER(f8e5m2, isa)           \
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

static void idist__small_float_widen(float *dst, const void *src, size_t count, idist_dtype dtype) {
    uint32_t mode = idist__mode_enter();

    idist__type_converters[idist__isa_used][dtype - IDIST_F16].widen(dst, src, count);
    idist__mode_leave(mode);
}

static void idist__small_float_narrow(void *dst, const float *src, size_t count,
                                      idist_dtype dtype) {
    uint32_t mode = idist__mode_enter();

    idist__type_converters[idist__isa_used][dtype - IDIST_F16].narrow(dst, src, count);
    idist__mode_leave(mode);
}
