// store.c - checks the rendezvous store. Runs the same checks over mem://, tcp:// and file://, and
// also tests failures that only one of these stores can have.
#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "ranks.h"

#include <sys/stat.h>

// handles[0] owns the table, and the other handles are clients. For mem:// all handles are the
// same.
#define N_HANDLES 3
#define N_ADDERS 8   // number of threads that add at the same time
#define N_ADDS 200   // number of adds of each thread
#define SHORT_MS 200 // a time-out that should expire
// Time within which a call that should not wait must return. It is generous, because machines may
// be busy.
#define PROMPT_MS 5000
#define PATIENT_MS 10000 // a time-out that should not expire

typedef enum store_kind { MEM, TCP, STORE_FILE, N_KINDS } store_kind;
static const char *const kind_names[N_KINDS] = {"mem", "tcp", "file"};

typedef struct fixture {
    store_kind kind;
    char url[200]; // URL that clients open
    char folder[64];
    idist_store *handles[N_HANDLES];
} fixture;

static idist_store_desc store_desc(bool server) {
    idist_store_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.server = server;
    desc.timeout_ms = PATIENT_MS;
    return desc;
}

static bool is_prompt(int64_t since_ms) {
    return tap_now_ms() - since_ms < (int64_t)PROMPT_MS * test_slow_factor();
}

// Returns true if a wait of SHORT_MS lasted about that long.
static bool is_short_wait(int64_t since_ms) {
    return tap_now_ms() - since_ms >= SHORT_MS - 20 && is_prompt(since_ms);
}

static void make_folder(char folder[64]) {
    snprintf(folder, 64, "/tmp/store_test_XXXXXX");
    TAP_REQUIRE(mkdtemp(folder) != NULL);
}

static bool fixture_open(fixture *k, store_kind kind) {
    idist_store_desc server = store_desc(true), client = store_desc(false);
    memset(k, 0, sizeof *k);
    k->kind = kind;
    snprintf(k->url, sizeof k->url, "%s", kind == MEM ? "mem://" : "tcp://127.0.0.1:0");
    if (kind == STORE_FILE) {
        make_folder(k->folder);
        snprintf(k->url, sizeof k->url, "file://%s/store", k->folder);
    }
    if (!tap_is(idist_store_open(k->url, kind == MEM ? NULL : &server, &k->handles[0]), IDIST_OK,
                "%s: open the server", kind_names[kind])) {
        tap_diag("%s", idist_last_error());
        return false;
    }
    if (kind == TCP)
        snprintf(k->url, sizeof k->url, "tcp://127.0.0.1:%d", idist_store_port(k->handles[0]));
    tap_ok((idist_store_port(k->handles[0]) != 0) == (kind == TCP),
           "%s: only a tcp server has a port", kind_names[kind]);
    for (int i = 1; i < N_HANDLES; i++) {
        if (kind == MEM) k->handles[i] = k->handles[0];
        else if (!tap_is(idist_store_open(k->url, &client, &k->handles[i]), IDIST_OK,
                         "%s: open client %d", kind_names[kind], i))
            return false;
    }
    return true;
}

static void fixture_close(fixture *k) {
    for (int i = N_HANDLES - 1; i >= 0; i--) {
        if (k->kind == MEM && i > 0) continue;
        tap_is(idist_store_close(&k->handles[i]), IDIST_OK, "%s: close handle %d",
               kind_names[k->kind], i);
        tap_ok(k->handles[i] == NULL, "%s: closing handle %d sets the pointer to NULL",
               kind_names[k->kind], i);
    }
    if (k->kind == STORE_FILE) {
        tap_is(count_entries(k->folder, ""), 0, "file: nothing is left in the folder");
        rmdir(k->folder);
    }
}

//------------------------------------------------------------------------------
// one check per operation
//------------------------------------------------------------------------------

static bool holds(idist_store *store, const char *key, const void *value, size_t nbytes) {
    char got[64];
    size_t got_nbytes = 0;
    idist_status status = idist_store_get(store, key, got, sizeof got, &got_nbytes, PATIENT_MS);
    return status == IDIST_OK && got_nbytes == nbytes && memcmp(got, value, nbytes) == 0;
}

static void check_set_get(const fixture *k, const char *name) {
    char value[16];
    size_t nbytes = 99;
    tap_is(idist_store_set(k->handles[0], "set/a", "one\0two", 7), IDIST_OK, "%s: set", name);
    tap_ok(holds(k->handles[1], "set/a", "one\0two", 7),
           "%s: another handle gets it, zero byte and all", name);
    tap_is(idist_store_set(k->handles[2], "set/a", "three", 5), IDIST_OK, "%s: overwrite", name);
    tap_ok(holds(k->handles[0], "set/a", "three", 5), "%s: the newer value is there", name);

    memset(value, 'x', sizeof value);
    tap_is(idist_store_get(k->handles[1], "set/a", value, 4, &nbytes, PATIENT_MS),
           IDIST_ERR_TRUNCATED, "%s: a capacity that is too small", name);
    tap_ok(nbytes == 5 && value[0] == 'x' && value[3] == 'x',
           "%s: says what is needed and writes nothing", name);
    tap_is(idist_store_get(k->handles[1], "set/a", value, 5, &nbytes, PATIENT_MS), IDIST_OK,
           "%s: exactly enough room", name);
    tap_ok(nbytes == 5 && value[5] == 'x', "%s: nothing behind it is written", name);
    tap_is(idist_store_get(k->handles[1], "set/a", NULL, 0, &nbytes, PATIENT_MS),
           IDIST_ERR_TRUNCATED, "%s: ask for the size", name);
    tap_is(nbytes, 5, "%s: the size", name);

    tap_is(idist_store_set(k->handles[1], "set/empty", NULL, 0), IDIST_OK, "%s: set an empty value",
           name);
    tap_is(idist_store_get(k->handles[2], "set/empty", NULL, 0, &nbytes, PATIENT_MS), IDIST_OK,
           "%s: get it", name);
    tap_is(nbytes, 0, "%s: its size is 0", name);
}

static void check_large(const fixture *k, const char *name) {
    const size_t limit = (size_t)8 << 20;
    size_t nbytes = 0;
    char *value = (char *)calloc(1, limit + 1), *got = (char *)calloc(1, limit);
    TAP_REQUIRE(value && got);
    for (size_t i = 0; i < limit; i++) value[i] = (char)(i * 7 + i / 4093);
    tap_is(idist_store_set(k->handles[1], "large", value, limit), IDIST_OK, "%s: set 8 MiB", name);
    tap_is(idist_store_get(k->handles[2], "large", got, limit, &nbytes, PATIENT_MS), IDIST_OK,
           "%s: get 8 MiB", name);
    tap_ok(nbytes == limit && memcmp(value, got, limit) == 0, "%s: they are the same", name);
    tap_is(idist_store_set(k->handles[1], "large/no", value, limit + 1), IDIST_ERR_ARG,
           "%s: one byte more is refused", name);
    tap_is(idist_store_delete(k->handles[0], "large", NULL), IDIST_OK, "%s: delete it", name);
    free(value);
    free(got);
}

static void check_add(const fixture *k, const char *name) {
    int64_t result = 0;
    tap_is(idist_store_add(k->handles[1], "add/n", 5, &result), IDIST_OK, "%s: add to nothing",
           name);
    tap_is(result, 5, "%s: counts from 0", name);
    tap_is(idist_store_add(k->handles[2], "add/n", -7, &result), IDIST_OK,
           "%s: add a negative number", name);
    tap_is(result, -2, "%s: the sum", name);
    tap_ok(holds(k->handles[0], "add/n", "-2", 2), "%s: the value is a decimal number", name);
    tap_is(idist_store_set(k->handles[0], "add/m", "9007199254740993", 16), IDIST_OK,
           "%s: set a number", name);
    tap_is(idist_store_add(k->handles[1], "add/m", 0, &result), IDIST_OK, "%s: add 0 reads it",
           name);
    tap_is(result, 9007199254740993, "%s: all 64 bits of it", name);
    tap_is(idist_store_add(k->handles[0], "add/m", 1, NULL), IDIST_OK, "%s: the result may be NULL",
           name);
    tap_is(idist_store_set(k->handles[0], "add/text", "12x", 3), IDIST_OK, "%s: set a text", name);
    tap_ok(idist_store_add(k->handles[1], "add/text", 1, &result) < 0,
           "%s: adding to a text is an error", name);
    tap_ok(holds(k->handles[2], "add/text", "12x", 3), "%s: and leaves it alone", name);
    tap_is(idist_store_set(k->handles[0], "add/bytes", "12\0x", 4), IDIST_OK, "%s: set bytes",
           name);
    tap_is(idist_store_add(k->handles[1], "add/bytes", 1, &result), IDIST_ERR_ARG,
           "%s: adding to a number with more bytes behind it", name);
    tap_ok(holds(k->handles[2], "add/bytes", "12\0x", 4), "%s: leaves them alone, too", name);
    tap_is(idist_store_add(k->handles[0], "add/limit", INT64_MAX, NULL), IDIST_OK,
           "%s: add the largest number", name);
    tap_is(idist_store_add(k->handles[1], "add/limit", 1, NULL), IDIST_ERR_ARG,
           "%s: a sum that has no room", name);
    tap_ok(holds(k->handles[2], "add/limit", "9223372036854775807", 19),
           "%s: leaves the value alone", name);
    tap_is(idist_store_add(k->handles[0], "add/lowest", -INT64_MAX, NULL), IDIST_OK,
           "%s: add the smallest number", name);
    tap_is(idist_store_add(k->handles[1], "add/lowest", -1, NULL), IDIST_ERR_ARG,
           "%s: -2^63 is no sum", name);
    tap_like(idist_last_error(), "between -2^63 + 1 and", "%s: the text says so", name);
    tap_ok(holds(k->handles[1], "add/m", "9007199254740994", 16), "%s: the handle still works",
           name);
}

static void check_compare_set(const fixture *k, const char *name) {
    char value[16];
    size_t nbytes = 99;
    bool ready = true;
    const char *key = "cas/none";
    memset(value, 0, sizeof value);
    tap_is(idist_store_compare_set(k->handles[1], "cas/a", NULL, 0, "one", 3, value, sizeof value,
                                   &nbytes),
           IDIST_OK, "%s: compare_set from nothing", name);
    tap_ok(nbytes == 3 && memcmp(value, "one", 3) == 0, "%s: it is set", name);
    tap_is(idist_store_compare_set(k->handles[2], "cas/a", "two", 3, "three", 5, value,
                                   sizeof value, &nbytes),
           IDIST_OK, "%s: compare_set of something else", name);
    tap_ok(nbytes == 3 && memcmp(value, "one", 3) == 0, "%s: says what is there", name);
    tap_is(idist_store_compare_set(k->handles[2], "cas/a", "one", 3, "three", 5, value,
                                   sizeof value, &nbytes),
           IDIST_OK, "%s: compare_set of what is there", name);
    tap_ok(nbytes == 5 && memcmp(value, "three", 5) == 0, "%s: says the new value", name);
    tap_ok(holds(k->handles[0], "cas/a", "three", 5), "%s: all see it", name);
    tap_is(idist_store_compare_set(k->handles[1], "cas/a", "three", 5, "seven!", 6, value, 5,
                                   &nbytes),
           IDIST_ERR_TRUNCATED, "%s: compare_set to a value longer than the buffer", name);
    tap_ok(nbytes == 6 && memcmp(value, "three", 5) == 0, "%s: says how long it is", name);
    tap_ok(holds(k->handles[0], "cas/a", "seven!", 6), "%s: and has set it", name);
    idist_store_compare_set(k->handles[1], key, "x", 1, "y", 1, value, sizeof value, &nbytes);
    tap_is(idist_store_check(k->handles[0], &key, 1, &ready), IDIST_OK,
           "%s: check after a compare_set that failed", name);
    tap_ok(!ready, "%s: it made no key", name);
}

static void check_keys(const fixture *k, const char *name) {
    const char *both[2] = {"keys/a", "keys/b"};
    size_t before = 0, after = 0;
    bool ready = true, deleted = false;
    tap_is(idist_store_num_keys(k->handles[1], &before), IDIST_OK, "%s: num_keys", name);
    tap_is(idist_store_set(k->handles[1], "keys/a", "1", 1), IDIST_OK, "%s: one key more", name);
    tap_is(idist_store_num_keys(k->handles[2], &after), IDIST_OK, "%s: num_keys again", name);
    tap_is(after, before + 1, "%s: it counts one more", name);
    tap_is(idist_store_check(k->handles[2], both, 2, &ready), IDIST_OK, "%s: check", name);
    tap_ok(!ready, "%s: one of two is not enough", name);
    tap_is(idist_store_set(k->handles[0], "keys/b", "2", 1), IDIST_OK, "%s: the second", name);
    tap_is(idist_store_check(k->handles[1], both, 2, &ready), IDIST_OK, "%s: check again", name);
    tap_ok(ready, "%s: both are there", name);
    tap_is(idist_store_wait(k->handles[2], both, 2, PATIENT_MS), IDIST_OK,
           "%s: wait for keys that are there", name);
    tap_is(idist_store_delete(k->handles[1], "keys/a", &deleted), IDIST_OK, "%s: delete", name);
    tap_ok(deleted, "%s: it was there", name);
    tap_is(idist_store_delete(k->handles[2], "keys/a", &deleted), IDIST_OK, "%s: delete again",
           name);
    tap_ok(!deleted, "%s: it was not there any more", name);
    tap_is(idist_store_check(k->handles[0], both, 2, &ready), IDIST_OK,
           "%s: check after the delete", name);
    tap_ok(!ready, "%s: it is gone", name);
}

static void check_timeouts(const fixture *k, const char *name) {
    const char *missing[2] = {"keys/b", "never"};
    char value[4];
    size_t nbytes;
    int64_t start_ms = tap_now_ms();
    tap_is(idist_store_get(k->handles[1], "never", value, sizeof value, &nbytes, SHORT_MS),
           IDIST_ERR_TIMEOUT, "%s: get of a key that does not come", name);
    tap_ok(is_short_wait(start_ms), "%s: in time (%lld ms)", name,
           (long long)(tap_now_ms() - start_ms));
    tap_like(idist_last_error(), "never", "%s: the error names the key", name);
    start_ms = tap_now_ms();
    tap_is(idist_store_wait(k->handles[2], missing, 2, SHORT_MS), IDIST_ERR_TIMEOUT,
           "%s: wait for it", name);
    tap_ok(is_short_wait(start_ms), "%s: in time (%lld ms)", name,
           (long long)(tap_now_ms() - start_ms));
    for (int i = 0; i < 5; i++) { // the first missing key has index i
        const char *keys[5] = {"keys/b", "keys/b", "keys/b", "keys/b", "never either"};
        keys[i] = "never";
        tap_is(idist_store_wait(k->handles[2], keys, 5, 1), IDIST_ERR_TIMEOUT,
               "%s: wait for five keys", name);
        tap_like(idist_last_error(), "\"never\"", "%s: the error names number %d", name, i);
    }
    tap_is(idist_store_set(k->handles[2], "after", "1", 1), IDIST_OK,
           "%s: a time-out breaks nothing: set", name);
    tap_ok(holds(k->handles[1], "after", "1", 1), "%s: a time-out breaks nothing: get", name);
}

static void check_bad_arguments(const fixture *k, const char *name) {
    char key[1200], value[4];
    size_t nbytes;
    idist_store *s = k->handles[1];
    memset(key, 'k', sizeof key);
    key[1024] = 0;
    tap_is(idist_store_set(s, key, "1", 1), IDIST_OK, "%s: a key of 1024 bytes", name);
    tap_ok(holds(k->handles[2], key, "1", 1), "%s: is found again", name);
    key[1024] = 'k';
    key[1025] = 0;
    tap_is(idist_store_set(s, key, "1", 1), IDIST_ERR_ARG, "%s: a key of 1025 bytes is refused",
           name);
    tap_is(idist_store_get(s, key, value, 4, &nbytes, SHORT_MS), IDIST_ERR_ARG, "%s: also by get",
           name);
    tap_is(idist_store_add(s, key, 1, NULL), IDIST_ERR_ARG, "%s: also by add", name);
    tap_is(idist_store_set(s, "", "1", 1), IDIST_ERR_ARG, "%s: an empty key is refused", name);
    tap_is(idist_store_set(s, NULL, "1", 1), IDIST_ERR_ARG, "%s: key NULL is refused", name);
    tap_is(idist_store_set(s, "bad", NULL, 1), IDIST_ERR_ARG, "%s: value NULL of 1 byte is refused",
           name);
    tap_is(idist_store_set(NULL, "bad", "1", 1), IDIST_ERR_ARG, "%s: store NULL is refused", name);
    tap_is(idist_store_get(s, "after", NULL, 4, &nbytes, SHORT_MS), IDIST_ERR_ARG,
           "%s: a buffer NULL of 4 bytes is refused", name);
    tap_is(idist_store_wait(s, NULL, 1, SHORT_MS), IDIST_ERR_ARG, "%s: keys NULL is refused", name);
    tap_is(idist_store_check(s, NULL, 1, NULL), IDIST_ERR_ARG, "%s: ready NULL is refused", name);
    tap_is(idist_store_num_keys(s, NULL), IDIST_ERR_ARG, "%s: n NULL is refused", name);
    tap_ok(holds(s, "after", "1", 1), "%s: none of them broke anything", name);
}

static void check_many_keys(const fixture *k, const char *name) {
    enum { N = 9000 };
    static char key[1000];
    static const char *keys[N];
    bool ready = true;
    memset(key, 'k', sizeof key - 1);
    for (int i = 0; i < N; i++) keys[i] = key;
    tap_is(idist_store_check(k->handles[1], keys, N, &ready), IDIST_ERR_ARG,
           "%s: more than 8 MiB of keys are refused", name);
    tap_is(idist_store_check(k->handles[1], keys, 8000, &ready), IDIST_OK, "%s: fewer are not",
           name);
    tap_ok(!ready, "%s: and are not there", name);
}

static void check_prefix(const fixture *k, const char *name) {
    idist_store *view = NULL, *inner = NULL;
    const char *key = "key";
    bool ready = false, deleted = false;
    int64_t sum = 0;
    size_t n = 0, n_all = 1;
    char long_key[1025];
    tap_is(idist_store_prefix(k->handles[1], "view/", &view), IDIST_OK, "%s: prefix", name);
    tap_is(idist_store_prefix(view, "inner/", &inner), IDIST_OK, "%s: prefix of a prefix", name);
    tap_is(idist_store_set(inner, "key", "deep", 4), IDIST_OK, "%s: set in it", name);
    tap_ok(holds(k->handles[2], "view/inner/key", "deep", 4), "%s: outside it has its whole name",
           name);
    tap_is(idist_store_set(k->handles[0], "view/key", "flat", 4), IDIST_OK, "%s: set outside",
           name);
    tap_ok(holds(view, "key", "flat", 4), "%s: get inside", name);
    tap_ok(holds(inner, "key", "deep", 4), "%s: the views do not mix", name);
    tap_ok(idist_store_add(view, "n", 3, &sum) == IDIST_OK && sum == 3, "%s: add in a view", name);
    tap_ok(holds(k->handles[0], "view/n", "3", 1), "%s: adds outside", name);
    tap_ok(idist_store_num_keys(view, &n) == IDIST_OK &&
               idist_store_num_keys(k->handles[0], &n_all) == IDIST_OK && n == n_all,
           "%s: num_keys in a view is that of the store: got %zu expected %zu", name, n, n_all);
    tap_ok(idist_store_check(view, &key, 1, &ready) == IDIST_OK && ready, "%s: check in a view",
           name);
    tap_is(idist_store_wait(inner, &key, 1, SHORT_MS), IDIST_OK, "%s: wait in a view", name);
    tap_ok(idist_store_delete(view, "key", &deleted) == IDIST_OK && deleted, "%s: delete in a view",
           name);
    memset(long_key, 'k', sizeof long_key);
    long_key[1020] = 0;
    tap_is(idist_store_set(view, long_key, "1", 1), IDIST_ERR_ARG,
           "%s: prefix and key together have the limit", name);
    tap_is(idist_store_close(&inner), IDIST_OK, "%s: close the inner view", name);
    tap_is(idist_store_close(&view), IDIST_OK, "%s: close the view", name);
    tap_ok(view == NULL && holds(k->handles[1], "view/inner/key", "deep", 4),
           "%s: the parent stays open", name);
    tap_is(idist_store_prefix(NULL, "x", &view), IDIST_ERR_ARG, "%s: prefix of NULL is refused",
           name);
}

// Checks the key that the server sets when a client's connection ends (the client's will). The key
// must be set when the client has closed its store, and not before.
static void check_will(const fixture *k, const char *name) {
    const char *early[2] = {"will/1/end", "a%b/will/2/end"};
    const char *dropped = "dropped";
    idist_store_desc desc = store_desc(false);
    idist_store *store = NULL, *view = NULL;
    bool ready = true;
    int64_t sum = 0;
    if (k->kind == MEM) return;
    TAP_REQUIRE(idist_store_open(k->url, &desc, &store) == IDIST_OK);
    TAP_REQUIRE(idist_store_prefix(store, "a%b/", &view) == IDIST_OK);
    tap_ok(idist__store_claim(store, "will/n", "will/%/end", "one", 3, &sum) == IDIST_OK &&
               sum == 1 && holds(k->handles[0], "will/n", "1", 1),
           "%s: a claim counts", name);
    TAP_REQUIRE(idist_store_add(view, "will/n", 1, NULL) == IDIST_OK);
    tap_ok(idist__store_claim(view, "will/n", "will/%/end", "two", 3, &sum) == IDIST_OK && sum == 2,
           "%s: a claim in a view", name);
    tap_ok(idist_store_check(k->handles[1], early, 1, &ready) == IDIST_OK && !ready &&
               idist_store_check(k->handles[1], early + 1, 1, &ready) == IDIST_OK && !ready,
           "%s: nothing is set while the client is there", name);
    tap_is(idist_store_close(&store), IDIST_OK, "%s: the client closes", name);
    tap_ok(holds(k->handles[0], early[1], "two", 3), "%s: its latest will is carried out", name);
    tap_ok(idist_store_check(k->handles[1], early, 1, &ready) == IDIST_OK && !ready,
           "%s: the one before is not", name);
    idist_store_close(&view);

    TAP_REQUIRE(idist_store_open(k->url, &desc, &store) == IDIST_OK);
    tap_is(idist__store_claim(store, "a%b/will/n", dropped, "no", 2, &sum), IDIST_OK,
           "%s: another claims", name);
    idist__store_drop_will(store);
    idist_store_close(&store);
    tap_is(idist_store_wait(k->handles[0], &dropped, 1, SHORT_MS), IDIST_ERR_TIMEOUT,
           "%s: a will that was dropped is not carried out", name);
}

//------------------------------------------------------------------------------
// several threads
//------------------------------------------------------------------------------

typedef struct worker {
    pthread_t thread;
    const fixture *fixture;
    int index;
    int n_failed;
} worker;

// Returns the store handle of a thread. The threads of mem:// share one handle, and for the other
// stores each thread opens its own.
static idist_store *worker_open(const fixture *k) {
    idist_store_desc desc = store_desc(false);
    idist_store *store = NULL;
    if (k->kind == MEM) return k->handles[0];
    return idist_store_open(k->url, &desc, &store) == IDIST_OK ? store : NULL;
}

static void *adder(void *arg) {
    worker *w = (worker *)arg;
    idist_store *store = worker_open(w->fixture);
    int64_t last = 0, now = 0;
    for (int i = 0; i < N_ADDS; i++) {
        if (!store || idist_store_add(store, "sum", 1, &now) != IDIST_OK || now <= last)
            w->n_failed++;
        last = now;
    }
    if (store && w->fixture->kind != MEM) idist_store_close(&store);
    return NULL;
}

// Passes a token around. Each thread blocks in get for its own key, then sets the key of the next
// thread.
static void *runner(void *arg) {
    worker *w = (worker *)arg;
    idist_store *store = worker_open(w->fixture);
    char mine[32], next[32], token[4];
    size_t nbytes = 0;
    snprintf(mine, sizeof mine, "token/%d", w->index);
    snprintf(next, sizeof next, "token/%d", w->index + 1);
    if (!store ||
        idist_store_get(store, mine, token, sizeof token, &nbytes, PATIENT_MS) != IDIST_OK)
        w->n_failed++;
    if (!store || idist_store_set(store, next, token, nbytes) != IDIST_OK) w->n_failed++;
    if (store && w->fixture->kind != MEM) idist_store_close(&store);
    return NULL;
}

static void start_workers(worker *workers, const fixture *k, void *(*fn)(void *)) {
    for (int i = 0; i < N_ADDERS; i++) {
        workers[i].fixture = k;
        workers[i].index = i;
        workers[i].n_failed = 0;
        TAP_REQUIRE(pthread_create(&workers[i].thread, NULL, fn, &workers[i]) == 0);
    }
}

static int join_workers(worker *workers) {
    int n_failed = 0;
    for (int i = 0; i < N_ADDERS; i++) {
        TAP_REQUIRE(pthread_join(workers[i].thread, NULL) == 0);
        n_failed += workers[i].n_failed;
    }
    return n_failed;
}

static void check_threads(const fixture *k, const char *name) {
    worker workers[N_ADDERS];
    int64_t sum = 0;
    tap_running("%s: threads that add", name);
    start_workers(workers, k, adder);
    tap_is(join_workers(workers), 0, "%s: %d threads add %d times, each sees it grow", name,
           N_ADDERS, N_ADDS);
    tap_is(idist_store_add(k->handles[0], "sum", 0, &sum), IDIST_OK, "%s: read the sum", name);
    tap_is(sum, N_ADDERS * N_ADDS, "%s: nothing was lost", name);
    tap_running("%s: threads that wait for one another", name);
    start_workers(workers, k, runner);
    tap_is(idist_store_set(k->handles[1], "token/0", "go", 2), IDIST_OK, "%s: start the token",
           name);
    tap_is(join_workers(workers), 0, "%s: gets that block are woken by sets", name);
    tap_ok(holds(k->handles[2], "token/8", "go", 2), "%s: the token arrived", name);
}

static void test_kind(store_kind kind) {
    static void (*const checks[])(const fixture *, const char *) = {
        check_set_get,  check_add,           check_compare_set, check_keys,
        check_timeouts, check_bad_arguments, check_prefix,      check_large,
        check_threads,  check_many_keys,     check_will};
    const char *name = kind_names[kind];
    fixture k;
    tap_running("%s: open", name);
    if (!fixture_open(&k, kind)) return;
    for (size_t i = 0; i < sizeof checks / sizeof checks[0]; i++) {
        tap_running("%s: check %zu", name, i);
        checks[i](&k, name);
    }
    tap_running("%s: close", name);
    fixture_close(&k);
}

//------------------------------------------------------------------------------
// opening
//------------------------------------------------------------------------------

static idist_status open_status(const char *url, bool server, int timeout_ms, const char *secret) {
    idist_store_desc desc = store_desc(server);
    idist_store *store = (idist_store *)&desc; // anything but NULL
    desc.timeout_ms = timeout_ms;
    desc.secret = secret;
    desc.secret_nbytes = secret ? strlen(secret) : 0;
    idist_status status = idist_store_open(url, &desc, &store);
    if (status && store) tap_diag("a failed open leaves a pointer behind");
    if (!status) idist_store_close(&store);
    return status;
}

static void test_open(void) {
    char url[200], folder[64];
    idist_store *null_store = NULL;
    int64_t start_ms;
    tap_running("open");
    tap_is(idist_store_open("mem://", NULL, NULL), IDIST_ERR_ARG, "open: a result NULL is refused");
    tap_is(open_status(NULL, false, SHORT_MS, NULL), IDIST_ERR_ARG, "open: url NULL is refused");
    tap_is(open_status("", false, SHORT_MS, NULL), IDIST_ERR_ARG, "open: an empty url is refused");
    tap_is(open_status("ftp://127.0.0.1:1", false, SHORT_MS, NULL), IDIST_ERR_ARG,
           "open: an unknown scheme is refused");
    tap_is(open_status("tcp://127.0.0.1", false, SHORT_MS, NULL), IDIST_ERR_ARG,
           "open: tcp without a port is refused");
    tap_is(open_status("tcp://127.0.0.1:65536", false, SHORT_MS, NULL), IDIST_ERR_ARG,
           "open: port 65536 is refused");
    tap_is(open_status("tcp://127.0.0.1:12x", false, SHORT_MS, NULL), IDIST_ERR_ARG,
           "open: port 12x is refused");
    tap_is(open_status("tcp://127.0.0.1:0", false, SHORT_MS, NULL), IDIST_ERR_ARG,
           "open: a client of port 0 is refused");
    tap_is(open_status("file://", false, SHORT_MS, NULL), IDIST_ERR_ARG,
           "open: a file without a path is refused");
    tap_is(idist_store_close(NULL), IDIST_ERR_ARG, "close: NULL is refused");
    tap_ok(idist_store_close(&null_store) <= 0, "close: a NULL store does no harm");
    tap_is(idist_store_port(NULL), 0, "port: of NULL is 0");

    snprintf(url, sizeof url, "tcp://127.0.0.1:%d", free_port());
    start_ms = tap_now_ms();
    tap_is(open_status(url, false, SHORT_MS, NULL), IDIST_ERR_TIMEOUT,
           "open: a tcp server that does not come");
    tap_ok(is_short_wait(start_ms), "open: in time (%lld ms)",
           (long long)(tap_now_ms() - start_ms));
    make_folder(folder);
    snprintf(url, sizeof url, "file://%s/store", folder);
    start_ms = tap_now_ms();
    tap_is(open_status(url, false, SHORT_MS, NULL), IDIST_ERR_TIMEOUT,
           "open: a file that does not come");
    tap_ok(is_short_wait(start_ms), "open: in time (%lld ms)",
           (long long)(tap_now_ms() - start_ms));
    tap_is(count_entries(folder, ""), 0, "open: the client that gave up left no file");
    tap_like(idist_last_error(), "has not started", "open: the text names the server");
    rmdir(folder);
    tap_is(open_status(url, false, SHORT_MS, NULL), IDIST_ERR_TIMEOUT,
           "open: a folder that does not come");
    tap_like(idist_last_error(), "its folder does not exist here", "open: the text says so");
}

static bool no_memory; // makes scarce_alloc fail

static void *scarce_alloc(size_t nbytes, void *user) {
    (void)user;
    return no_memory ? NULL : malloc(nbytes);
}

static void scarce_free(void *ptr, void *user) {
    (void)user;
    free(ptr);
}

static void test_half_allocator(void) {
    for (int half = 0; half < 2; half++) {
        idist_store_desc desc = store_desc(true);
        idist_store *store = NULL;
        if (half) desc.allocator.alloc_fn = scarce_alloc;
        else desc.allocator.free_fn = scarce_free;
        tap_is(idist_store_open("mem://", &desc, &store), IDIST_ERR_ARG, "open: half an allocator");
        tap_like(idist_last_error(), "alloc_fn and free_fn", "open: the text says what is missing");
        idist_store_close(&store);
    }
}

static void test_no_memory(void) {
    idist_store_desc desc = store_desc(true);
    char folder[64], url[200];
    idist_store *store = NULL;
    tap_running("file without memory");
    desc.allocator.alloc_fn = scarce_alloc;
    desc.allocator.free_fn = scarce_free;
    make_folder(folder);
    snprintf(url, sizeof url, "file://%s/store", folder);
    if (!tap_is(idist_store_open(url, &desc, &store), IDIST_OK, "file: open")) return;
    tap_is(idist_store_set(store, "k", "old", 3), IDIST_OK, "file: set a key");
    no_memory = true;
    tap_is(idist_store_set(store, "k", "new", 3), IDIST_ERR_NO_MEMORY,
           "file: set it again without memory");
    no_memory = false;
    tap_ok(holds(store, "k", "old", 3), "file: it has its value still");
    tap_is(idist_store_close(&store), IDIST_OK, "file: close");
    rmdir(folder);
}

// Runs a server whose file cannot be written because of RLIMIT_FSIZE.
static void test_no_space(void) {
    struct rlimit old, limit;
    char folder[64], url[200], path[128];
    tap_running("no space");
    make_folder(folder);
    snprintf(path, sizeof path, "%s/store", folder);
    snprintf(url, sizeof url, "file://%s", path);
    TAP_REQUIRE(getrlimit(RLIMIT_FSIZE, &old) == 0);
    limit = old;
    limit.rlim_cur = 4;
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    TAP_REQUIRE(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    idist_status status = open_status(url, true, SHORT_MS, NULL);
    TAP_REQUIRE(setrlimit(RLIMIT_FSIZE, &old) == 0);
    signal(SIGXFSZ, handler);
    tap_is(status, IDIST_ERR_SYSTEM, "no space: the server fails");
    tap_like(idist_last_error(), path, "no space: the text names the file");
    tap_is(count_entries(folder, ""), 0, "no space: no file is left");
    unlink(path);
    rmdir(folder);
}

static void test_port_taken(void) {
    fixture k;
    if (!fixture_open(&k, TCP)) return;
    tap_is(open_status(k.url, true, SHORT_MS, NULL), IDIST_ERR_ADDR_IN_USE,
           "tcp: a second server on the port");
    fixture_close(&k);
}

static void test_secret(void) {
    static const char right[] = "sixteen bytes or more", wrong[] = "sixteen bytes or less";
    idist_store_desc desc = store_desc(true);
    idist_store *server = NULL;
    char url[64], address[64];
    int64_t start_ms;
    tap_running("secret");
    desc.secret = right;
    desc.secret_nbytes = strlen(right);
    tap_is(idist_store_open("tcp://127.0.0.1:0", &desc, &server), IDIST_OK,
           "secret: a server with one");
    snprintf(url, sizeof url, "tcp://127.0.0.1:%d", idist_store_port(server));
    tap_is(open_status(url, false, PATIENT_MS, right), IDIST_OK, "secret: the right one");
    start_ms = tap_now_ms();
    tap_is(open_status(url, false, PATIENT_MS, wrong), IDIST_ERR_AUTH, "secret: a wrong one");
    snprintf(address, sizeof address, "the server at tcp:127.0.0.1:%d", idist_store_port(server));
    tap_like(idist_last_error(), address, "secret: the text names the server");
    tap_ok(is_prompt(start_ms), "secret: and at once (%lld ms)",
           (long long)(tap_now_ms() - start_ms));
    tap_is(open_status(url, false, PATIENT_MS, NULL), IDIST_ERR_AUTH, "secret: none");
    tap_is(open_status(url, false, PATIENT_MS, "too short"), IDIST_ERR_ARG,
           "secret: less than 16 bytes are refused");
    tap_is(open_status(url, false, PATIENT_MS, right), IDIST_OK, "secret: the right one again");
    tap_is(idist_store_close(&server), IDIST_OK, "secret: close");
    unsetenv("IDIST_INSECURE");
    unsetenv("IDIST_SECRET");
    unsetenv("IDIST_SECRET_FILE");
    tap_is(open_status("tcp://0.0.0.0:0", true, SHORT_MS, NULL), IDIST_ERR_NO_SECRET,
           "secret: needed beyond loopback");
    tap_is(open_status("tcp://0.0.0.0:0", true, SHORT_MS, right), IDIST_OK,
           "secret: with one, beyond loopback");
}

// Checks the secret in the file that IDIST_SECRET_FILE names. The file must be refused if other
// users have access to it. Also checks IDIST_INSECURE.
static void test_secret_file(void) {
    static const char secret[] = "0123456789abcdef";
    static const int modes[4] = {0644, 0640, 0604, 0620};
    idist_store_desc desc = store_desc(true);
    idist_store *server = NULL;
    char folder[64], path[128], url[64];
    tap_running("secret file");
    make_folder(folder);
    snprintf(path, sizeof path, "%s/secret", folder);
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    TAP_REQUIRE(fd >= 0 && write(fd, secret, 16) == 16);
    setenv("IDIST_SECRET_FILE", path, 1);
    for (int i = 0; i < 4; i++) {
        TAP_REQUIRE(fchmod(fd, (mode_t)modes[i]) == 0);
        tap_is(open_status("tcp://127.0.0.1:0", true, SHORT_MS, NULL), IDIST_ERR_ENV,
               "secret file: of mode %o", (unsigned)modes[i]);
    }
    TAP_REQUIRE(fchmod(fd, 0600) == 0);
    tap_is(idist_store_open("tcp://0.0.0.0:0", &desc, &server), IDIST_OK,
           "secret file: of mode 600, beyond loopback");
    snprintf(url, sizeof url, "tcp://127.0.0.1:%d", idist_store_port(server));
    unsetenv("IDIST_SECRET_FILE");
    tap_is(open_status(url, false, PATIENT_MS, NULL), IDIST_ERR_AUTH,
           "secret file: without it nobody gets in");
    tap_is(open_status(url, false, PATIENT_MS, secret), IDIST_OK,
           "secret file: its bytes are the secret");
    tap_is(idist_store_close(&server), IDIST_OK, "secret file: close");
    close(fd);
    unlink(path);
    rmdir(folder);
    setenv("IDIST_INSECURE", "1", 1);
    tap_is(open_status("tcp://0.0.0.0:0", true, SHORT_MS, NULL), IDIST_OK,
           "IDIST_INSECURE=1: no secret beyond loopback");
    setenv("IDIST_INSECURE", "0", 1);
    tap_is(open_status("tcp://0.0.0.0:0", true, SHORT_MS, NULL), IDIST_ERR_NO_SECRET,
           "IDIST_INSECURE=0 allows nothing");
    unsetenv("IDIST_INSECURE");
}

//------------------------------------------------------------------------------
// what strangers can do to a tcp server
//------------------------------------------------------------------------------

static int connect_raw(int port) {
    struct sockaddr_in a;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    memset(&a, 0, sizeof a);
    a.sin_family = AF_INET;
    a.sin_port = htons((uint16_t)port);
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    TAP_REQUIRE(fd >= 0 && connect(fd, (struct sockaddr *)&a, sizeof a) == 0);
    return fd;
}

// Sends bytes and ignores errors, because the server may have closed the connection already.
static void send_raw(int fd, const void *data, size_t nbytes) {
    (void)!send(fd, data, nbytes, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void throw_garbage(int port, int *open_fds, int n_open) {
    static const char http[] = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    unsigned char noise[4096];
    uint64_t state = tap_seed();
    struct linger reset = {1, 0};
    // Half-open connections send nothing, or one byte, and stay open.
    for (int i = 0; i < n_open; i++) {
        open_fds[i] = connect_raw(port);
        if (i % 2) send_raw(open_fds[i], "I", 1);
    }
    for (int round = 0; round < 10; round++) {
        int fd = connect_raw(port);
        for (size_t i = 0; i < sizeof noise; i++) noise[i] = (unsigned char)tap_rand(&state);
        send_raw(fd, noise, (size_t)tap_rand(&state) % sizeof noise);
        close(fd);
        fd = connect_raw(port);
        send_raw(fd, http, sizeof http - 1);
        close(fd);
        fd = connect_raw(port);
        send_raw(fd, "\xff\xff\xff\xff\xff\xff\xff\xff", 8);
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
        close(fd);
    }
}

// Answers each connection as an HTTP server does, until the listener is shut down.
static void *answer_http(void *arg) {
    static const char answer[] =
        "HTTP/1.1 400 Bad Request\r\nContent-Type: text/html\r\nContent-Length: 0\r\n"
        "Server: another program\r\nConnection: close\r\n\r\n";
    const int *listener = (const int *)arg;
    for (;;) {
        int fd = accept(*listener, NULL, NULL);
        if (fd < 0) return NULL;
        send_raw(fd, answer, sizeof answer - 1);
        close(fd);
    }
}

static void test_other_server(void) {
    struct sockaddr_in a;
    socklen_t nbytes = sizeof a;
    pthread_t thread;
    char url[64], address[64];
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    tap_running("another server");
    memset(&a, 0, sizeof a);
    a.sin_family = AF_INET;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    TAP_REQUIRE(listener >= 0 && bind(listener, (struct sockaddr *)&a, sizeof a) == 0);
    TAP_REQUIRE(listen(listener, 8) == 0);
    TAP_REQUIRE(getsockname(listener, (struct sockaddr *)&a, &nbytes) == 0);
    TAP_REQUIRE(pthread_create(&thread, NULL, answer_http, &listener) == 0);
    snprintf(url, sizeof url, "tcp://127.0.0.1:%d", ntohs(a.sin_port));
    snprintf(address, sizeof address, "the server at tcp:127.0.0.1:%d", ntohs(a.sin_port));
    tap_is(open_status(url, false, PATIENT_MS, NULL), IDIST_ERR_AUTH,
           "another server: a client does not take it for ours");
    tap_like(idist_last_error(), address, "another server: the text names the address");
    tap_like(idist_last_error(), "another program", "another server: and says what it may be");
    shutdown(listener, SHUT_RDWR);
    TAP_REQUIRE(pthread_join(thread, NULL) == 0);
    close(listener);
}

static void test_garbage(void) {
    enum { N_OPEN = 20 };
    idist_store_desc desc = store_desc(false);
    idist_store *late = NULL;
    int open_fds[N_OPEN];
    int64_t start_ms;
    fixture k;
    tap_running("garbage on the port");
    if (!fixture_open(&k, TCP)) return;
    tap_is(idist_store_set(k.handles[1], "before", "1", 1), IDIST_OK, "garbage: set before it");
    throw_garbage(idist_store_port(k.handles[0]), open_fds, N_OPEN);
    start_ms = tap_now_ms();
    tap_ok(holds(k.handles[2], "before", "1", 1), "garbage: an open client does not notice");
    tap_is(idist_store_open(k.url, &desc, &late), IDIST_OK, "garbage: a new client gets in");
    if (late) {
        tap_ok(holds(late, "before", "1", 1), "garbage: and is served");
        tap_is(idist_store_close(&late), IDIST_OK, "garbage: and leaves");
    }
    tap_ok(is_prompt(start_ms), "garbage: without delay (%lld ms)",
           (long long)(tap_now_ms() - start_ms));
    for (int i = 0; i < N_OPEN; i++) close(open_fds[i]);
    fixture_close(&k);
}

// Opens more silent connections than there are slots for pending connections. unit/auth.c checks
// the rules with simulated times. This test waits in real time.
static void test_no_slot_left(void) {
    enum { N_OPEN = 80 };
    int open_fds[N_OPEN + 1];
    char byte;
    fixture k;
    if (!test_long()) {
        tap_skip("pending: more silent connections than slots",
                 "takes seven seconds; IDIST_TEST_LONG=1 runs it");
        return;
    }
    tap_running("no slot left");
    if (!fixture_open(&k, TCP)) return;
    int port = idist_store_port(k.handles[0]);
    struct pollfd first = {connect_raw(port), POLLIN, 0};
    tap_ok(poll(&first, 1, 8000 * test_slow_factor()) == 1 &&
               recv(first.fd, &byte, 1, MSG_DONTWAIT) == 0,
           "pending: who says nothing has to go after five seconds");
    open_fds[N_OPEN] = first.fd;
    for (int i = 0; i < N_OPEN; i++) open_fds[i] = connect_raw(port);
    int64_t start_ms = tap_now_ms();
    tap_is(open_status(k.url, false, PATIENT_MS, NULL), IDIST_OK,
           "pending: a client gets in past %d silent ones", N_OPEN);
    tap_ok(tap_now_ms() - start_ms < 3500 * test_slow_factor(), "pending: after %d ms",
           (int)(tap_now_ms() - start_ms));
    for (int i = 0; i <= N_OPEN; i++) close(open_fds[i]);
    fixture_close(&k);
}

static void *set_soon(void *arg) {
    tap_sleep_ms(5); // time for the get to begin to wait; the test does not need it
    idist_store_set((idist_store *)arg, "wake", "v", 1);
    return NULL;
}

// Checks that the set wakes a get that waits. The get must return before the client asks again,
// which it does every IDIST__CLIENT_SLICE_MS.
static void test_waiters_are_woken(void) {
    enum { N = 12 };
    int n_woken = 0;
    fixture k;
    tap_running("waiters are woken");
    if (!fixture_open(&k, TCP)) return;
    for (int i = 0; i < N; i++) {
        pthread_t thread;
        int64_t start_ms = tap_now_ms();
        TAP_REQUIRE(pthread_create(&thread, NULL, set_soon, k.handles[0]) == 0);
        bool there = holds(k.handles[1], "wake", "v", 1);
        if (there && tap_now_ms() - start_ms < IDIST__CLIENT_SLICE_MS - 10) n_woken++;
        TAP_REQUIRE(pthread_join(thread, NULL) == 0);
        idist_store_delete(k.handles[0], "wake", NULL);
    }
    tap_ok(n_woken > N / 2, "tcp: set wakes who waits: %d of %d gets returned at once", n_woken, N);
    fixture_close(&k);
}

// Sends the bytes of a get `times` times, without the wait that precedes a get.
static bool raw_get(idist_store *store, const char *key, int times) {
    idist__client_store *t = (idist__client_store *)store->impl;
    char bytes[1024];
    size_t n = 0;
    idist__store_request r;
    memset(&r, 0, sizeof r);
    r.op = IDIST__STORE_GET;
    r.key.data = key;
    r.key.nbytes = strlen(key);
    TAP_REQUIRE(idist__client_encode(store, &r) && t->nout * (size_t)times <= sizeof bytes);
    for (int i = 0; i < times; i++, n += t->nout) memcpy(bytes + n, t->out, t->nout);
    return idist__connection_write_all(t->fd, bytes, n, idist__os_clock_deadline(PROMPT_MS));
}

static void test_odd_clients(void) {
    const size_t limit = (size_t)8 << 20;
    char *value = (char *)calloc(1, limit);
    uint64_t answer = 0;
    fixture k;
    tap_running("odd clients");
    TAP_REQUIRE(value);
    if (!fixture_open(&k, TCP)) return;
    int fds[3] = {-1, ((idist__client_store *)k.handles[1]->impl)->fd,
                  ((idist__client_store *)k.handles[2]->impl)->fd};
    tap_ok(raw_get(k.handles[1], "gone", 1) &&
               idist__connection_read_all(fds[1], &answer, 8,
                                          idist__os_clock_deadline(PROMPT_MS)) &&
               answer == IDIST__NO_VALUE,
           "tcp: a key that went between wait and get is answered, not waited for");
    tap_is(idist_store_set(k.handles[1], "large", value, limit), IDIST_OK, "tcp: set 8 MiB");
    tap_ok(raw_get(k.handles[2], "large", 9) &&
               !idist__connection_read_all(fds[2], &answer, 8,
                                           idist__os_clock_deadline(PROMPT_MS)) &&
               errno != ETIMEDOUT,
           "tcp: who asks for 72 MiB before reading any is dropped");
    tap_is(idist_store_delete(k.handles[1], "large", NULL), IDIST_OK, "tcp: the others are served");
    fixture_close(&k);
    free(value);
}

// Sends lengths beyond the limits. The server must refuse such lengths immediately, however many
// bytes have arrived.
static void test_lengths(void) {
    static const struct {
        uint8_t op;
        uint64_t key, value;
        bool good;
    } cases[] = {{IDIST__STORE_SET, 1025, 8u << 20, true},
                 {IDIST__STORE_SET, 1026, 1, false},
                 {IDIST__STORE_SET, 1, (8u << 20) + 1, false},
                 {IDIST__STORE_GET, 1026, 0, false},
                 {IDIST__STORE_COMPARE_SET, 1, 4u << 20, true},
                 {IDIST__STORE_COMPARE_SET, 1, (4u << 20) + 1, false},
                 {IDIST__STORE_ADD, UINT64_MAX, 0, false}};
    char bytes[2048];
    idist__blob keys[1];
    idist__store_request r;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        size_t nkey = cases[i].key < 2000 ? (size_t)cases[i].key : 2000;
        memset(bytes, 'k', sizeof bytes);
        bytes[0] = (char)cases[i].op;
        memcpy(bytes + 1, &cases[i].key, 8);
        memcpy(bytes + 9 + nkey, &cases[i].value, 8);
        ptrdiff_t n = idist__wire_parse(bytes, 9 + nkey + 8, &r, keys, 1);
        tap_is(n, cases[i].good ? 0 : -1, "a request with a key of %llu bytes and a value of %llu",
               (unsigned long long)cases[i].key, (unsigned long long)cases[i].value);
    }
}

// Closes the server. Every request of its clients must fail in time.
static void test_server_gone(store_kind kind) {
    const char *name = kind_names[kind];
    char value[4];
    size_t nbytes;
    fixture k;
    tap_running("%s: the server goes away", name);
    if (!fixture_open(&k, kind)) return;
    const char *where = kind == TCP ? strrchr(k.url, ':') : k.folder;
    tap_is(idist_store_set(k.handles[1], "a", "1", 1), IDIST_OK,
           "%s: set while the server is there", name);
    tap_is(idist_store_close(&k.handles[0]), IDIST_OK, "%s: the server closes", name);
    int64_t start_ms = tap_now_ms();
    tap_is(idist_store_get(k.handles[1], "b", value, sizeof value, &nbytes, PATIENT_MS),
           IDIST_ERR_PEER_LOST, "%s: get without a server", name);
    tap_like(idist_last_error(), where, "%s: the error names the server", name);
    tap_is(idist_store_get(k.handles[1], "b", value, sizeof value, &nbytes, PATIENT_MS),
           IDIST_ERR_PEER_LOST, "%s: get once more", name);
    tap_like(idist_last_error(), where, "%s: that error, too", name);
    tap_is(idist_store_set(k.handles[2], "a", "2", 1), IDIST_ERR_PEER_LOST,
           "%s: set without a server", name);
    tap_ok(is_prompt(start_ms), "%s: in time (%lld ms)", name,
           (long long)(tap_now_ms() - start_ms));
    for (int i = 1; i < N_HANDLES; i++)
        tap_ok(idist_store_close(&k.handles[i]) <= 0, "%s: client %d closes", name, i);
    if (kind == STORE_FILE) {
        tap_is(count_entries(k.folder, ""), 0, "%s: nothing is left", name);
        rmdir(k.folder);
    }
}

//------------------------------------------------------------------------------
// a file whose server died
//------------------------------------------------------------------------------

typedef struct early_client {
    pthread_t thread;
    const char *url;
    idist_status status;
    char who[8];
} early_client;

static void *early_client_main(void *arg) {
    early_client *c = (early_client *)arg;
    idist_store_desc desc = store_desc(false);
    idist_store *store = NULL;
    size_t nbytes;
    c->status = idist_store_open(c->url, &desc, &store);
    if (!c->status)
        c->status = idist_store_get(store, "who", c->who, sizeof c->who, &nbytes, PATIENT_MS);
    if (!c->status) c->status = idist_store_set(store, "answer", "yes", 3);
    if (store) idist_store_close(&store);
    return NULL;
}

// Forks a process that serves url, opens a client of this server, and kills the server.
static void leave_stale_file(const char *url, idist_store **client) {
    idist_store_desc client_desc = store_desc(false);
    int pipe_fds[2];
    char byte = 0;
    TAP_REQUIRE(pipe(pipe_fds) == 0);
    pid_t pid = fork();
    TAP_REQUIRE(pid >= 0);
    if (pid == 0) {
        idist_store_desc desc = store_desc(true);
        idist_store *store = NULL;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        alarm(60);
        if (idist_store_open(url, &desc, &store) || idist_store_set(store, "who", "old", 4))
            _exit(1);
        (void)!write(pipe_fds[1], "x", 1);
        for (;;) pause();
    }
    tap_register_child(pid);
    close(pipe_fds[1]);
    tap_ok(read(pipe_fds[0], &byte, 1) == 1, "stale: the first server is up");
    close(pipe_fds[0]);
    tap_is(idist_store_open(url, &client_desc, client), IDIST_OK, "stale: it has a client");
    kill(pid, SIGKILL);
    TAP_REQUIRE(waitpid(pid, NULL, 0) == pid);
    tap_forget_child(pid);
}

static void test_stale_file(void) {
    char folder[64], url[200], path[128], answer[8];
    idist_store_desc desc = store_desc(true);
    idist_store *server = NULL, *survivor = NULL;
    early_client client;
    size_t nbytes = 0;
    tap_running("stale file");
    make_folder(folder);
    snprintf(path, sizeof path, "%s/store", folder);
    snprintf(url, sizeof url, "file://%s", path);
    leave_stale_file(url, &survivor);
    tap_is(access(path, F_OK), 0, "stale: it left its file");
    tap_is(open_status(url, false, SHORT_MS, NULL), IDIST_ERR_TIMEOUT,
           "stale: a client does not use it");

    memset(&client, 0, sizeof client);
    client.url = url;
    TAP_REQUIRE(pthread_create(&client.thread, NULL, early_client_main, &client) == 0);
    tap_sleep_ms(100); // time for the client to see the stale file first; the test does not need it
    tap_is(idist_store_open(url, &desc, &server), IDIST_OK, "stale: a new server takes the path");
    tap_is(idist_store_set(server, "who", "new", 4), IDIST_OK, "stale: and sets a key");
    TAP_REQUIRE(pthread_join(client.thread, NULL) == 0);
    tap_is(client.status, IDIST_OK, "stale: the client that was there before finds the new server");
    tap_ok(strcmp(client.who, "new") == 0, "stale: it read \"%s\"", client.who);
    tap_is(idist_store_get(server, "answer", answer, sizeof answer, &nbytes, SHORT_MS), IDIST_OK,
           "stale: and it wrote there");
    tap_is(idist_store_get(survivor, "answer", answer, sizeof answer, &nbytes, SHORT_MS),
           IDIST_ERR_PEER_LOST, "stale: the first server's client does not see the second one");
    tap_is(idist__store_post(survivor, "bye", "1", 1), IDIST_OK,
           "stale: what waits for no answer is no failure");
    tap_is(idist_store_close(&survivor), IDIST_OK, "stale: it closes");
    tap_is(idist_store_close(&server), IDIST_OK, "stale: close");
    tap_is(count_entries(folder, ""), 0, "stale: nothing is left");
    rmdir(folder);
}

static void *set_one(void *arg) {
    static idist_status status;
    status = idist_store_set((idist_store *)arg, "one", "1", 1);
    return &status;
}

// Waits until the lock on a byte of the file is in the wanted state. Returns false if that takes
// too long.
static bool becomes(int fd, uint64_t byte, idist__os_file_lock wanted) {
    int64_t start_ms = tap_now_ms();
    while (idist__os_file_locked(fd, byte) != wanted) {
        if (!is_prompt(start_ms)) return false;
        idist__os_clock_pause_ms(1);
    }
    return true;
}

// Sets a key in a loop, as a busy client does, until one set takes at least `enough_ms`. Returns
// the time of the longest set.
static int64_t longest_set_ms(idist_store *store, int64_t enough_ms) {
    int64_t begun_ms = tap_now_ms(), longest_ms = 0;
    while (longest_ms < enough_ms && is_prompt(begun_ms)) {
        int64_t start_ms = tap_now_ms();
        TAP_REQUIRE(idist_store_set(store, "busy", "b", 1) == IDIST_OK);
        if (tap_now_ms() - start_ms > longest_ms) longest_ms = tap_now_ms() - start_ms;
    }
    return longest_ms;
}

// Checks the queue for the lock of a file. A process that finds the file locked enters the queue,
// and a busy client lets that process take the lock first. The busy client does not wait forever,
// because the process in the queue may be stopped.
static void test_file_queue(void) {
    const uint64_t records = IDIST__FILE_RECORDS_BYTE, queue = IDIST__FILE_QUEUE_BYTE;
    pthread_t thread;
    void *result = NULL;
    fixture k;
    tap_running("the queue for a file");
    if (!fixture_open(&k, STORE_FILE)) return;
    int fd = open(k.url + strlen("file://"), O_RDWR | O_CLOEXEC);
    TAP_REQUIRE(fd >= 0 && becomes(fd, queue, IDIST__OS_FILE_FREE));
    TAP_REQUIRE(idist__os_file_try_lock(fd, records));
    TAP_REQUIRE(pthread_create(&thread, NULL, set_one, k.handles[1]) == 0);
    tap_ok(becomes(fd, queue, IDIST__OS_FILE_LOCKED), "file: who waits for the lock is in a queue");
    idist__os_file_unlock(fd, records);
    TAP_REQUIRE(pthread_join(thread, &result) == 0);
    tap_is(*(idist_status *)result, IDIST_OK, "file: it gets the lock");
    tap_ok(becomes(fd, queue, IDIST__OS_FILE_FREE), "file: and leaves the queue");

    TAP_REQUIRE(idist__os_file_try_lock(fd, queue));
    int64_t longest_ms = longest_set_ms(k.handles[2], IDIST__FILE_YIELD_MS - 5);
    tap_ok(longest_ms >= IDIST__FILE_YIELD_MS - 5,
           "file: a busy client lets who waits go first: for %d ms", (int)longest_ms);
    tap_ok(holds(k.handles[1], "busy", "b", 1), "file: but not for ever");
    close(fd);
    fixture_close(&k);
}

// Opens files that are not stores, that belong to a running job, or that are damaged.
static void test_foreign_files(void) {
    static const char letter[] = "Dear diary, this is no store";
    static const uint32_t beyond[2] = {0x7fffffff, 0x7fffffff};
    idist_store_desc desc = store_desc(true), client_desc = store_desc(false);
    idist_store *server = NULL, *client = NULL;
    char folder[64], path[128], url[200], text[64] = "";
    tap_running("foreign files");
    make_folder(folder);
    snprintf(path, sizeof path, "%s/store", folder);
    snprintf(url, sizeof url, "file://%s", path);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    TAP_REQUIRE(fd >= 0 && write(fd, letter, sizeof letter) == (ssize_t)sizeof letter);
    tap_is(open_status(url, true, SHORT_MS, NULL), IDIST_ERR_ARG,
           "file: one that is no store is refused");
    tap_is(open_status(url, false, SHORT_MS, NULL), IDIST_ERR_ARG, "file: by a client, too");
    tap_like(idist_last_error(), "is not a store file", "file: with a text that says it");
    tap_ok(pread(fd, text, sizeof text, 0) == (ssize_t)sizeof letter && strcmp(text, letter) == 0,
           "file: and left alone");
    close(fd);
    unlink(path);
    tap_is(idist_store_open(url, &desc, &server), IDIST_OK, "file: a server");
    tap_is(idist_store_set(server, "k", "v", 1), IDIST_OK, "file: its key");
    tap_is(open_status(url, true, SHORT_MS, NULL), IDIST_ERR_ADDR_IN_USE,
           "file: a second server of a running job");
    tap_ok(holds(server, "k", "v", 1), "file: takes nothing away");
    fd = open(path, O_WRONLY | O_CLOEXEC);
    // Overwrites the sizes in the first record.
    TAP_REQUIRE(fd >= 0 && pwrite(fd, beyond, sizeof beyond, 16) == (ssize_t)sizeof beyond);
    close(fd);
    tap_is(idist_store_open(url, &client_desc, &client), IDIST_OK, "file: a client");
    tap_is(idist_store_set(client, "x", "1", 1), IDIST_ERR_ARG, "file: damage is noticed");
    tap_like(idist_last_error(), "damaged", "file: and named");
    tap_is(idist_store_close(&client), IDIST_OK, "file: the client closes");
    tap_is(idist_store_close(&server), IDIST_OK, "file: the server closes");
    tap_is(count_entries(folder, ""), 0, "file: nothing is left");
    rmdir(folder);
}

int main(void) {
    int n_fds, n_threads;
    tap_deadline(90);
    test_stale_file(); // first, because it forks and there are no threads yet
    n_fds = count_fds();
    n_threads = count_threads();
    for (int i = 0; i < N_KINDS; i++) test_kind((store_kind)i);
    test_open();
    test_half_allocator();
    test_no_memory();
    test_no_space();
    test_port_taken();
    test_secret();
    test_secret_file();
    test_garbage();
    test_other_server();
    test_no_slot_left();
    test_waiters_are_woken();
    test_odd_clients();
    test_lengths();
    test_server_gone(TCP);
    test_server_gone(STORE_FILE);
    test_foreign_files();
    test_file_queue();
    tap_is(count_fds(), n_fds, "no descriptor is left open");
    tap_is(count_threads(), n_threads, "no thread is left");
    return tap_done();
}
