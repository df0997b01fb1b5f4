// store.c - fuzzes the store's request parser: whatever the input, the parser rejects it or returns
// a request that lies inside the input
#define IDIST_IMPLEMENTATION
#include "idist.h"

static idist__blob keys[256];

static void inside(const char *data, size_t nbytes, idist__blob b) {
    if (b.nbytes && (b.data < data || b.data + b.nbytes > data + nbytes)) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes) {
    const char *text = (const char *)data;
    idist__table table;
    memset(&table, 0, sizeof table);
    while (nbytes) {
        static char value[4096];
        idist__store_request r;
        bool wait, changed;
        ptrdiff_t n = idist__wire_parse(text, nbytes, &r, keys, 256);
        if (n <= 0) break;
        if ((size_t)n > nbytes) abort();
        inside(text, nbytes, r.key);
        inside(text, nbytes, r.a);
        inside(text, nbytes, r.b);
        for (size_t i = 0; i < r.nkeys; i++) inside(text, nbytes, r.keys[i]);
        r.value = value;
        r.capacity = sizeof value;
        idist__table_apply(&table, &r, &wait, &changed);
        text += n;
        nbytes -= (size_t)n;
    }
    idist__table_clear(&table);
    return 0;
}
