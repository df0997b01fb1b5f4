// store/wire.h: the protocol between client and server, the same as torch's TCPStore
//
// A request is one byte for the operation (IDIST__STORE_*, see store/table.h), followed by the
// fields of the operation. Numbers are in the client's byte order. A string is a u64 length
// followed by its bytes. Every key begins with '/'. A connection begins with VALIDATE and a magic
// number. A client of torch's server sends WAIT before each GET.
//
//     operation            fields                     answer
//     VALIDATE             u32 magic                  -
//     SET                  key, value                 -
//     COMPARE_SET          key, expected, desired     value
//     GET                  key                        value
//     ADD                  key, i64 delta             i64 sum
//     CHECK                u64 count, keys            u8: 0 all exist, 1 not all
//     WAIT                 u64 count, keys            u8: 0 all exist, 1 canceled
//     NUM_KEYS             -                          i64
//     DELETE               key                        i64: 1 deleted, 0 there was none
//     CANCEL_WAIT          -                          u8 1, or none if the WAIT was answered
//
// Our own server also accepts these requests. AWAIT_VALUE replaces WAIT and GET. For CLAIM and
// wills, see idist__store_request.
//
//     CLAIM                key, will key, will value  i64 sum
//     AWAIT_VALUE          key                        u8 as for WAIT, then value if u8 is 0
//     DROP_WILL            -                          -
#pragma once

#include "store/table.h"

#define IDIST__STORE_MAGIC 0x3C85F7CEu
#define IDIST__STORE_REQUEST_MAX ((size_t)IDIST__VALUE_MAX + 64 * 1024)

// The unread bytes of a request.
typedef struct idist__wire_reader {
    const char *next;
    size_t remaining;
    bool truncated; // the request needs more bytes than there are
    bool invalid;   // a length exceeds its limit
} idist__wire_reader;

static void idist__wire_read(idist__wire_reader *reader, void *value, size_t nbytes) {
    memset(value, 0, nbytes);
    if (reader->truncated || reader->invalid) return;

    if (reader->remaining < nbytes) {
        reader->truncated = true;
        return;
    }

    memcpy(value, reader->next, nbytes);
    reader->next += nbytes;
    reader->remaining -= nbytes;
}

static idist__blob idist__wire_read_blob(idist__wire_reader *reader, uint64_t limit) {
    idist__blob blob;
    uint64_t nbytes;

    idist__wire_read(reader, &nbytes, sizeof nbytes);
    blob.data = reader->next;
    blob.nbytes = 0;
    if (reader->truncated || reader->invalid) return blob;

    if (nbytes > limit) reader->invalid = true;
    else if (nbytes > reader->remaining) reader->truncated = true;
    else {
        blob.nbytes = (size_t)nbytes;
        reader->next += nbytes;
        reader->remaining -= (size_t)nbytes;
    }

    return blob;
}

// Returns the fields of an operation in order, one letter each, or NULL if there is no such
// operation. The letter m is the magic number, k a key, w the key of a will, v a value, h a value
// of at most half the limit, n a number, and l a list of keys.
static const char *idist__wire_fields(int op) {
    switch (op) {
    case IDIST__STORE_VALIDATE: return "m";
    case IDIST__STORE_SET: return "kv";
    case IDIST__STORE_CLAIM: return "kwv";
    case IDIST__STORE_COMPARE_SET: return "khh";
    case IDIST__STORE_GET:
    case IDIST__STORE_AWAIT_VALUE:
    case IDIST__STORE_DELETE: return "k";
    case IDIST__STORE_ADD: return "kn";
    case IDIST__STORE_CHECK:
    case IDIST__STORE_WAIT: return "l";
    case IDIST__STORE_NUM_KEYS:
    case IDIST__STORE_DROP_WILL:
    case IDIST__STORE_CANCEL_WAIT: return "";
    default: return NULL;
    }
}

static void idist__wire_read_keys(idist__wire_reader *reader, idist__store_request *request,
                                  idist__blob *keys, size_t keys_capacity) {
    uint64_t i, count;

    idist__wire_read(reader, &count, sizeof count);
    if (count > keys_capacity) reader->invalid = true;
    for (i = 0; i < count && !reader->truncated && !reader->invalid; i++)
        keys[i] = idist__wire_read_blob(reader, IDIST__KEY_MAX + 1);
    request->keys = keys;
    request->nkeys = (size_t)count;
}

// Reads one request from the front of a buffer. Returns the size of the request, 0 if more bytes
// are needed, or -1 if the request is invalid. The request points into the buffer and into `keys`.
static ptrdiff_t idist__wire_parse(const char *buf, size_t nbytes, idist__store_request *request,
                                   idist__blob *keys, size_t keys_capacity) {
    const char *field;
    idist__wire_reader reader;
    idist__blob *value = &request->a; // the next value goes into request->b
    uint32_t magic;
    uint64_t limit;

    memset(request, 0, sizeof *request);
    memset(&reader, 0, sizeof reader);
    if (!nbytes) return 0;
    reader.next = buf + 1;
    reader.remaining = nbytes - 1;
    request->op = (unsigned char)buf[0];
    field = idist__wire_fields(request->op);
    if (!field) return -1;

    for (; *field; field++) {
        switch (*field) {
        case 'm':
            idist__wire_read(&reader, &magic, sizeof magic);
            request->number = (int64_t)magic;
            break;
        case 'k': request->key = idist__wire_read_blob(&reader, IDIST__KEY_MAX + 1); break;
        case 'w':
        case 'v':
        case 'h':
            limit = *field == 'v' ? IDIST__VALUE_MAX : IDIST__VALUE_MAX / 2;
            if (*field == 'w') limit = IDIST__KEY_MAX + 1;
            *value = idist__wire_read_blob(&reader, limit);
            value = &request->b;
            break;
        case 'n': idist__wire_read(&reader, &request->number, sizeof request->number); break;
        case 'l': idist__wire_read_keys(&reader, request, keys, keys_capacity); break;
        default: return -1;
        }
    }

    if (reader.invalid) return -1;

    return reader.truncated ? 0 : reader.next - buf;
}
