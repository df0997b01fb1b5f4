// train/permutation.h: random numbers and permutations as PyTorch and Python draw them
#pragma once

//------------------------------------------------------------------------------
// the Mersenne Twister
//
// The generator is by Matsumoto and Nishimura (1998) and has 624 words of state. PyTorch seeds it
// from 32 bits with Knuth's recurrence. Python seeds it with the authors' init_by_array (2002),
// from as many words as the seed has.
//------------------------------------------------------------------------------

#define IDIST__TWISTER_WORDS 624

typedef struct idist__twister {
    uint32_t word[IDIST__TWISTER_WORDS];
    int next; // index of the next word to draw; IDIST__TWISTER_WORDS if all are used
} idist__twister;

static void idist__twister_seed(idist__twister *twister, uint32_t seed) {
    uint32_t *word = twister->word, i;

    word[0] = seed;
    for (i = 1; i < IDIST__TWISTER_WORDS; i++)
        word[i] = 1812433253u * (word[i - 1] ^ (word[i - 1] >> 30)) + i;
    twister->next = IDIST__TWISTER_WORDS;
}

// Returns the index after i. After the last word, copies the last word to word 0 and returns 1.
static uint32_t idist__twister_step(uint32_t *word, uint32_t i) {
    if (i + 1 < IDIST__TWISTER_WORDS) return i + 1;
    word[0] = word[IDIST__TWISTER_WORDS - 1];
    return 1;
}

// Seeds the generator as init_by_array does. The key has one word, or two if the seed needs them.
static void idist__twister_seed_array(idist__twister *twister, uint64_t seed) {
    uint32_t key[2], key_words = seed >> 32 ? 2 : 1;
    uint32_t *word = twister->word, i = 1, j = 0, round;

    key[0] = (uint32_t)seed;
    key[1] = (uint32_t)(seed >> 32);
    idist__twister_seed(twister, 19650218u);

    for (round = 0; round < IDIST__TWISTER_WORDS; round++) {
        uint32_t mixed = (word[i - 1] ^ (word[i - 1] >> 30)) * 1664525u;

        word[i] = (word[i] ^ mixed) + key[j] + j;
        i = idist__twister_step(word, i);
        j = (j + 1) % key_words;
    }

    for (round = 1; round < IDIST__TWISTER_WORDS; round++) {
        uint32_t mixed = (word[i - 1] ^ (word[i - 1] >> 30)) * 1566083941u;

        word[i] = (word[i] ^ mixed) - i;
        i = idist__twister_step(word, i);
    }

    word[0] = 0x80000000u;
}

// Replaces all words with new ones.
static void idist__twister_refill(idist__twister *twister) {
    uint32_t *word = twister->word;
    int i;

    for (i = 0; i < IDIST__TWISTER_WORDS; i++) {
        uint32_t low = word[(i + 1) % IDIST__TWISTER_WORDS];
        uint32_t y = (word[i] & 0x80000000u) | (low & 0x7fffffffu);
        uint32_t twist = y & 1 ? 0x9908b0dfu : 0u;

        word[i] = word[(i + 397) % IDIST__TWISTER_WORDS] ^ (y >> 1) ^ twist;
    }

    twister->next = 0;
}

static uint32_t idist__twister_next(idist__twister *twister) {
    uint32_t y;

    if (twister->next == IDIST__TWISTER_WORDS) idist__twister_refill(twister);
    y = twister->word[twister->next++];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;

    return y ^ (y >> 18);
}

//------------------------------------------------------------------------------
// the permutations of PyTorch and Python
//------------------------------------------------------------------------------

static void idist__permutation_swap(size_t *indices, size_t i, size_t k) {
    size_t kept = indices[k];
    indices[k] = indices[i];
    indices[i] = kept;
}

// For this number of indices or more, PyTorch 2.6 draws 64 bits per index, because the remainder of
// a 32-bit number would visibly favor some indices.
static const size_t IDIST__RANDOM_LARGE = UINT32_MAX / 20;

// Makes a permutation by the "inside-out" shuffle, which fills `indices` as it goes. Stores each
// new index i at a random position from 0 to i, and moves the index that was there to position i.
static void idist__permutation_make_large(size_t *indices, size_t count, idist__twister *twister) {
    size_t i;

    for (i = 0; i < count; i++) {
        uint64_t high = idist__twister_next(twister), low = idist__twister_next(twister);
        size_t place = (size_t)((high << 32 | low) % (i + 1));

        indices[i] = indices[place];
        indices[place] = i;
    }
}

// Makes the permutation of torch.randperm on the CPU. Swaps each element, beginning with the first,
// with a random element that is not final yet. For `large` or more indices, uses the inside-out
// shuffle, as PyTorch has done since version 2.6. `large` is IDIST__RANDOM_LARGE except in tests.
static void idist__permutation_make(size_t *indices, size_t count, uint64_t seed, size_t large) {
    idist__twister twister;
    size_t i;

    idist__twister_seed(&twister, (uint32_t)seed);

    if (count >= large) {
        idist__permutation_make_large(indices, count, &twister);
        return;
    }

    for (i = 0; i < count; i++) indices[i] = i;

    for (i = 0; i + 1 < count; i++)
        idist__permutation_swap(indices, i, i + idist__twister_next(&twister) % (count - i));
}

// Returns a random number below `limit`, as Python's random.randrange(limit) does. Draws as many
// bits as the limit has, and draws again until the number is below the limit.
static size_t idist__permutation_below(idist__twister *twister, size_t limit) {
    size_t number;
    int bits = 0;

    while (limit >> bits) bits++;
    do number = idist__twister_next(twister) >> (32 - bits);
    while (number >= limit);

    return number;
}

// Makes the permutation of Python's random.shuffle. Swaps each element, beginning with the last,
// with a random element that is not final yet.
static void idist__permutation_shuffle(size_t *indices, size_t count, uint64_t seed) {
    idist__twister twister;
    size_t i;

    idist__twister_seed_array(&twister, seed);
    for (i = 0; i < count; i++) indices[i] = i;

    for (i = count; i-- > 1;)
        idist__permutation_swap(indices, i, idist__permutation_below(&twister, i + 1));
}
