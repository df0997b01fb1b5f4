// auth: base/hash.h, net/auth.h and net/pending.h: published test vectors, handshakes in which
// one bit is changed in transit (each bit in turn), and how long an unauthenticated client may stay
// pending.
#define IDIST_IMPLEMENTATION
#define IDIST_NO_RING // compiles in half the time
#include "idist.h"

#include "tap.h"

static bool hex_is(const uint8_t got[32], const char *hex) {
    char text[65];
    for (int i = 0; i < 32; i++) snprintf(text + 2 * i, 3, "%02x", got[i]);
    if (strcmp(text, hex) != 0) tap_diag("got %s expected %s", text, hex);
    return strcmp(text, hex) == 0;
}

static void sha_of(const void *data, size_t nbytes, size_t step, uint8_t out[32]) {
    idist__sha s;
    idist__sha_begin(&s);
    for (size_t at = 0; at < nbytes; at += step)
        idist__sha_add(&s, (const char *)data + at, nbytes - at < step ? nbytes - at : step);
    idist__sha_end(&s, out);
}

// Checks the examples of FIPS 180-4 and cases 1 to 3 of RFC 4231.
static void vectors(void) {
    static const char two_blocks[] = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
    static char million[1000000];
    uint8_t out[32], key[32] = {0}, data[50];
    memset(million, 'a', sizeof million);
    sha_of("", 0, 1, out);
    tap_ok(hex_is(out, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
           "SHA-256 of nothing");
    sha_of("abc", 3, 3, out);
    tap_ok(hex_is(out, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
           "SHA-256 of abc");
    for (size_t step = 1; step < sizeof two_blocks; step += 9) {
        sha_of(two_blocks, sizeof two_blocks - 1, step, out);
        tap_ok(hex_is(out, "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"),
               "two blocks, %d bytes at a time", (int)step);
    }
    sha_of(million, sizeof million, 4097, out);
    tap_ok(hex_is(out, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"),
           "a million times a");
    memset(key, 0x0b, 20);
    idist__sha_hmac(key, "", "Hi There", 8, NULL, 0, out);
    tap_ok(hex_is(out, "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"),
           "HMAC, case 1");
    memset(key, 0, sizeof key);
    memcpy(key, "Jefe", 4);
    idist__sha_hmac(key, "what do ya ", "want for ", 9, "nothing?", 8, out);
    tap_ok(hex_is(out, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"),
           "HMAC, case 2, in pieces");
    memset(key, 0, sizeof key);
    memset(key, 0xaa, 20);
    memset(data, 0xdd, sizeof data);
    idist__sha_hmac(key, "", data, sizeof data, NULL, 0, out);
    tap_ok(hex_is(out, "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"),
           "HMAC, case 3");
}

// Result of a handshake through a man in the middle. The man in the middle flips one bit: number
// `flip` in the sequence of all bytes that pass in either direction. If `flip` is -1, no bit is
// flipped. It forwards no read that would pass more than `cut` bytes in total. The flags say which
// end accepted the other.
typedef struct talk {
    bool client_sure, server_sure;
    idist_status client, server;
} talk;

static void set_nonblocking(int fd) { fcntl(fd, F_SETFL, O_NONBLOCK); }

static size_t pass_on(int from, int to, size_t seen, long flip, size_t cut) {
    unsigned char buf[256];
    ptrdiff_t n = idist__os_socket_read(from, buf, sizeof buf);
    if (n <= 0) return 0;
    for (ptrdiff_t i = 0; i < n; i++)
        if (flip >= 0 && (size_t)flip / 8 == seen + (size_t)i)
            buf[i] ^= (unsigned char)(1u << (flip % 8));
    if (seen + (size_t)n > cut) return (size_t)n;
    if (write(to, buf, (size_t)n) != n) tap_bail("write");
    return (size_t)n;
}

static talk handshake(const uint8_t client_key[32], const uint8_t server_key[32],
                      uint64_t client_job, uint64_t server_job, long flip, size_t cut) {
    int a[2], b[2];
    idist__handshake c, s;
    talk t = {false, false, IDIST_OK, IDIST_OK};
    size_t seen = 0;
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, a) != 0 || socketpair(AF_UNIX, SOCK_STREAM, 0, b) != 0)
        tap_bail("socketpair");
    for (int i = 0; i < 2; i++) {
        set_nonblocking(a[i]);
        set_nonblocking(b[i]);
    }
    idist__auth_begin(&c, a[0], false, client_key, IDIST__ROLE_LINK, client_job, 1, 2,
                      IDIST__FOREVER);
    idist__auth_begin(&s, b[0], true, server_key, IDIST__ROLE_LINK, server_job, 0, 2,
                      IDIST__FOREVER);
    for (int turn = 0; turn < 8; turn++) {
        if (t.client == IDIST_OK && !t.client_sure) t.client = idist__auth_step(&c, &t.client_sure);
        seen += pass_on(a[1], b[1], seen, flip, cut);
        if (t.server == IDIST_OK && !t.server_sure) t.server = idist__auth_step(&s, &t.server_sure);
        seen += pass_on(b[1], a[1], seen, flip, cut);
    }
    for (int i = 0; i < 2; i++) {
        close(a[i]);
        close(b[i]);
    }
    return t;
}

static void key_of(const char *text, uint8_t key[32]) {
    idist__secret secret;
    if (idist__secret_find(&secret, text, strlen(text)) != IDIST_OK) tap_bail("secret");
    idist__secret_key(&secret, key);
}

static int64_t in_ms(int64_t ms) { return idist__os_clock_now_ns() + ms * 1000000; }

// Checks how the list of pending connections gives slots to newcomers. Free slots go first, then
// slots of strangers whose time has expired. Next are slots of clients that have sent nothing for
// 50 ms, then slots of clients that have been pending for a second. No other slot is given away.
static void pending(void) {
    idist__pending p;
    idist__pending_init(&p);
    tap_ok(idist__pending_slot(&p) == &p.place[0], "a free place");
    tap_ok(!idist__pending_evict(&p), "an empty list of pending connections has none to evict");
    for (int i = 0; i < IDIST__PENDING_SLOTS; i++) {
        p.place[i].fd = dup(STDOUT_FILENO);
        p.place[i].stage = 1;
        p.place[i].deadline_ns = in_ms(IDIST__PENDING_MS);
    }
    tap_ok(idist__pending_slot(&p) == NULL, "a list full of newcomers has no room");
    p.place[3].stage = 0;
    tap_ok(idist__pending_slot(&p) == NULL, "one of them may still say something");
    tap_ok(idist__pending_evict(&p) && p.place[3].fd >= 0, "also where descriptors are short");
    p.place[7].deadline_ns = in_ms(IDIST__PENDING_MS - 2000);
    p.place[9].deadline_ns = in_ms(IDIST__PENDING_MS - 1500);
    tap_ok(idist__pending_slot(&p) == &p.place[7],
           "the oldest has to go after a second when all places are taken");
    p.place[3].deadline_ns = in_ms(IDIST__PENDING_MS - 60);
    tap_ok(idist__pending_slot(&p) == &p.place[3],
           "before him whoever has said nothing for a while");
    p.place[3].done = 1;
    tap_ok(idist__pending_slot(&p) == &p.place[7], "one byte is something");
    p.place[5].deadline_ns = in_ms(-1);
    tap_ok(idist__pending_slot(&p) == &p.place[5], "whose time is over has to go");
    int fd = p.place[5].fd;
    tap_ok(idist__pending_evict(&p) && fcntl(fd, F_GETFD) < 0 && p.place[5].fd == -1,
           "his connection is closed");
    tap_ok(p.place[9].fd >= 0, "the others stay");
    idist__pending_close(&p);
}

// Connects to a local socket as another user. Abstract sockets have no permissions, so the library
// must check that the peer belongs to the same user.
static void other_users(void) {
    char name[64];
    idist__os_address a;
    int listener = -1, wait_status = 0, fd = -1;
    if (geteuid() != 0) {
        tap_skip("local sockets of other users", "needs root, to be somebody else");
        return;
    }
    snprintf(name, sizeof name, "unix:idist-auth-test-%d", (int)getpid());
    if (idist__address_parse(&a, name) != IDIST_OK ||
        idist__connection_listen(&a, name, &listener) != IDIST_OK)
        tap_bail("listen");
    for (int same = 0; same < 2; same++) {
        pid_t pid = fork();
        if (pid == 0) {
            if (!same && setuid(65534) != 0) _exit(3);
            int peer = idist__os_socket_connect(&a, in_ms(5000));
            if (peer < 0) _exit(errno == EPERM ? 1 : 2);
            _exit(0);
        }
        waitpid(pid, &wait_status, 0);
        tap_is(WEXITSTATUS(wait_status), same ? 0 : 1, "a listener of %s",
               same ? "the same user" : "another user");
        fd = idist__os_socket_accept(listener);
        tap_ok((fd >= 0) == (same == 1), "a connection of %s",
               same ? "the same user" : "another user");
    }
    close(fd);
    close(listener);
}

int main(void) {
    uint8_t key[32], other[32];
    int wrong = 0;
    talk t;
    tap_deadline(60);
    vectors();
    key_of("0123456789abcdef", key);
    key_of("0123456789abcdeF", other);
    t = handshake(key, key, 7, 7, -1, SIZE_MAX);
    tap_ok(t.client_sure && t.server_sure, "the same secret: both are sure");
    t = handshake(key, other, 7, 7, -1, SIZE_MAX);
    tap_ok(!t.client_sure && !t.server_sure && t.client == IDIST_ERR_AUTH,
           "another secret: nobody is");
    t = handshake(key, key, 7, 8, -1, SIZE_MAX);
    tap_ok(!t.client_sure && !t.server_sure && t.server == IDIST_ERR_AUTH,
           "another job: nobody is");
    for (long flip = 0; flip < 192 * 8; flip++) {
        t = handshake(key, key, 7, 7, flip, SIZE_MAX);
        if (t.client_sure && t.server_sure) wrong++;
        if (flip / 8 < 64 + 96 && (t.client_sure || t.server_sure))
            wrong++; // a change in a hello or in the first tag: both ends refuse
    }
    tap_is(wrong, 0, "each of the 1536 bits changed: never accepted");
    for (size_t cut = 0; cut < 192; cut++) {
        t = handshake(key, key, 7, 7, -1, cut);
        if (t.server_sure) wrong++;
    }
    tap_is(wrong, 0, "cut off after each byte: never accepted");
    pending();
    other_users();
    return tap_done();
}
