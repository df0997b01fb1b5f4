// base/hash.h: SHA-256, HMAC, and fast hashes for ids
#pragma once

//------------------------------------------------------------------------------
// SHA-256 (FIPS 180-4) and HMAC (RFC 2104)
//------------------------------------------------------------------------------

typedef struct idist__sha {
    uint32_t h[8];
    uint64_t nbytes;
    uint8_t block[64];
} idist__sha;

static void idist__sha_block(idist__sha *s, const uint8_t *p) {
    static const uint32_t k[64] = {0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b,
                                   0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
                                   0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7,
                                   0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
                                   0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152,
                                   0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
                                   0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc,
                                   0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
                                   0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819,
                                   0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
                                   0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
                                   0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
                                   0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
    uint32_t w[64], v[8], t1, t2;
    int i;

#define IDIST__ROR(x, n) (((x) >> (n)) | ((x) << (32 - (n))))

    for (i = 0; i < 16; i++)
        w[i] = (uint32_t)p[4 * i] << 24 | (uint32_t)p[4 * i + 1] << 16 |
               (uint32_t)p[4 * i + 2] << 8 | p[4 * i + 3];
    for (i = 16; i < 64; i++)
        w[i] = w[i - 16] + w[i - 7] +
               (IDIST__ROR(w[i - 15], 7) ^ IDIST__ROR(w[i - 15], 18) ^ (w[i - 15] >> 3)) +
               (IDIST__ROR(w[i - 2], 17) ^ IDIST__ROR(w[i - 2], 19) ^ (w[i - 2] >> 10));
    memcpy(v, s->h, sizeof v);

    for (i = 0; i < 64; i++) {
        t1 = v[7] + (IDIST__ROR(v[4], 6) ^ IDIST__ROR(v[4], 11) ^ IDIST__ROR(v[4], 25)) +
             ((v[4] & v[5]) ^ (~v[4] & v[6])) + k[i] + w[i];
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

// Computes out = HMAC-SHA256(key, label | a | b). HMAC hashes only a key longer than a block of 64
// bytes, so this key is used as it is.
static void idist__sha_hmac(const uint8_t key[32], const char *label, const void *a, size_t na,
                            const void *b, size_t nb, uint8_t out[32]) {
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

//------------------------------------------------------------------------------
// fast hashes for ids
//
// These hashes do not protect secrets.
//------------------------------------------------------------------------------

// Mixes two 64-bit numbers into one with the finalizer of splitmix64.
static uint64_t idist__hash_mix(uint64_t a, uint64_t b) {
    uint64_t x = a + b * 0x9e3779b97f4a7c15u + 0x632be59bd9b4e019u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// Returns the FNV-1a hash of nbytes, mixed.
static uint64_t idist__hash(const void *data, size_t nbytes) {
    const uint8_t *p = (const uint8_t *)data;
    uint64_t h = 0xcbf29ce484222325u;
    size_t i;

    for (i = 0; i < nbytes; i++) h = (h ^ p[i]) * 0x100000001b3u;
    return idist__hash_mix(h, nbytes);
}
