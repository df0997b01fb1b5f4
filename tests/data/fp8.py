#!/usr/bin/env python3
"""fp8.py - writes fp8.txt: 8-bit floats, as ml_dtypes (of JAX) converts them, for
tests/unit/fp8.c

    python3 tests/data/fp8.py >tests/data/fp8.txt

Numbers are hexadecimal: the bits of a float, or an 8-bit code. "widen" and the format are followed
by the floats of codes 0 to ff. "narrow", the format and a count are followed by that many pairs of
a float and its code. The floats are the midpoints between neighbors and the floats next to these
midpoints, random numbers, and some numbers that are too small. Numbers that overflow are left out:
ml_dtypes converts them to infinity or NaN, but idist, like CUDA, to the largest number. A NaN is
written as 7fc00000.
"""
import ml_dtypes
import numpy as np

print(f"# made by fp8.py with ml_dtypes {ml_dtypes.__version__}")
rng = np.random.default_rng(8)
for name, dtype in (("F8E4M3", ml_dtypes.float8_e4m3fn), ("F8E5M2", ml_dtypes.float8_e5m2)):
    wide = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    print("widen", name)
    bits = np.where(np.isnan(wide), np.uint32(0x7FC00000), wide.view(np.uint32))
    for row in bits.reshape(32, 8):
        print(*(f"{x:08x}" for x in row))
    numbers = np.sort(wide[np.isfinite(wide) & (wide >= 0) & ~np.signbit(wide)])
    middle = ((numbers[1:] + numbers[:-1]) / 2).view(np.uint32)
    drawn = rng.integers(0x35000000, 0x48000000, 1000, dtype=np.uint32)
    small = np.array([0, 1, 0x007FFFFF, 0x00800000, 0x2F800000], np.uint32)
    x = np.concatenate([middle - 1, middle, middle + 1, drawn, small])
    x = np.concatenate([x, x | np.uint32(0x80000000)])
    codes = x.view(np.float32).astype(dtype)
    keep = np.isfinite(codes.astype(np.float32))
    pairs = list(zip(x[keep], codes.view(np.uint8)[keep]))
    print("narrow", name, f"{len(pairs):x}")
    for i in range(0, len(pairs), 8):
        print(*(f"{a:08x} {c:02x}" for a, c in pairs[i : i + 8]))
