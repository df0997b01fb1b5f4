// net/secret.h: the secret that the ranks of a job share
//
// The secret comes from a field of the desc, a file or an environment variable. The secret has 16
// to 256 bytes.
#pragma once

#include "os/process.h"
#include "os/file.h"
#include "base/fail.h"
#include "base/hash.h"
#include "net/auth.h"

enum { IDIST__SECRET_MIN = 16 };

typedef struct idist__secret {
    uint8_t bytes[256];
    size_t nbytes; // 0 if there is no secret
    bool insecure; // IDIST_INSECURE is set: listen for other hosts without a secret
} idist__secret;

static int idist__secret_secrecy(const idist__secret *secret) {
    if (secret->nbytes) return IDIST__SECRECY_SECRET;
    return secret->insecure ? IDIST__SECRECY_INSECURE : IDIST__SECRECY_NONE;
}

// Derives the key of handshakes from the secret. Without a secret, the key is a constant.
static void idist__secret_key(const idist__secret *secret, uint8_t key[32]) {
    idist__sha sha;
    idist__sha_begin(&sha);
    idist__sha_add(&sha, "idist v1", 8);
    idist__sha_add(&sha, secret->bytes, secret->nbytes);
    idist__sha_end(&sha, key);
}

static bool idist__secret_fits(const idist__secret *secret, size_t nbytes) {
    return nbytes >= IDIST__SECRET_MIN && nbytes <= sizeof secret->bytes;
}

static void idist__secret_set(idist__secret *secret, const void *bytes, size_t nbytes) {
    memcpy(secret->bytes, bytes, nbytes);
    secret->nbytes = nbytes;
}

// Reads the secret from IDIST_SECRET_FILE, to which only its owner may have access.
static idist_status idist__secret_from_file(idist__secret *secret, const char *path) {
    uint8_t text[sizeof secret->bytes + 1];
    idist__os_file file = idist__os_file_open(path, IDIST__OS_FILE_READ);
    bool is_private = file >= 0 && idist__os_file_is_private(file);
    ptrdiff_t nbytes;

    if (file < 0)
        return idist__fail(IDIST_ERR_ENV, "IDIST_SECRET_FILE=%s cannot be read: %s", path,
                           strerror(errno));
    nbytes = is_private ? idist__os_file_read(file, text, sizeof text) : 0;
    idist__os_file_close(&file);

    if (!is_private)
        return idist__fail(
            IDIST_ERR_ENV,
            "IDIST_SECRET_FILE=%s must belong to you and be readable by nobody else (chmod 600)",
            path);
    if (nbytes < 0 || !idist__secret_fits(secret, (size_t)nbytes))
        return idist__fail(IDIST_ERR_ENV, "IDIST_SECRET_FILE=%s must hold %d to %zu bytes", path,
                           IDIST__SECRET_MIN, sizeof secret->bytes);
    idist__secret_set(secret, text, (size_t)nbytes);

    return IDIST_OK;
}

static idist_status idist__secret_from_field(idist__secret *secret, const void *field,
                                             size_t nbytes) {
    if (!field || !idist__secret_fits(secret, nbytes))
        return idist__fail(IDIST_ERR_ARG, "a secret needs a pointer and between %d and %zu bytes",
                           IDIST__SECRET_MIN, sizeof secret->bytes);
    idist__secret_set(secret, field, nbytes);
    return IDIST_OK;
}

static idist_status idist__secret_from_env(idist__secret *secret, const char *text) {
    if (!idist__secret_fits(secret, strlen(text)))
        return idist__fail(IDIST_ERR_ENV, "IDIST_SECRET has %zu bytes but needs %d to %zu",
                           strlen(text), IDIST__SECRET_MIN, sizeof secret->bytes);
    idist__secret_set(secret, text, strlen(text));
    return IDIST_OK;
}

// Finds the secret. Uses the desc's secret if there is one, otherwise IDIST_SECRET_FILE, otherwise
// IDIST_SECRET. Without any of these there is no secret.
static idist_status idist__secret_find(idist__secret *secret, const void *field, size_t nbytes) {
    const char *text = idist__os_env("IDIST_SECRET"), *file = idist__os_env("IDIST_SECRET_FILE");
    const char *insecure = idist__os_env("IDIST_INSECURE");

    memset(secret, 0, sizeof *secret);
    secret->insecure = insecure && strcmp(insecure, "0") != 0;
    if (field || nbytes) return idist__secret_from_field(secret, field, nbytes);
    if (file) return idist__secret_from_file(secret, file);
    if (text) return idist__secret_from_env(secret, text);

    return IDIST_OK;
}
