// checkpoint.c - fuzzes the reader of checkpoints. Whatever a file contains, the reader must accept
// it as the requested checkpoint or reject it.
//
// The first byte of the input says which fields are corrected before the file is read. Bit 0
// corrects the checksum of the header, bit 1 the last checksum, and bit 2 the file length in the
// header. The rest of the input is the file.
#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "idist_train.h"

static uint64_t file[512];
static unsigned char bytes[2][64];

static void mend(int how, size_t nbytes) {
    idist__checksum sum = idist__checksum_begin();
    if (nbytes < 72) return;
    if (how & 4) file[IDIST__HEADER_FILE] = nbytes;
    if (how & 1) file[IDIST__HEADER_CHECKSUM] = idist__checkpoint_header_checksum(file);
    idist__checksum_add(&sum, file, nbytes - 8);
    uint64_t last = idist__checksum_end(&sum);
    if (how & 2) memcpy((char *)file + nbytes - 8, &last, 8);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes) {
    static int fd = -1;
    static char path[64], folder[] = "/tmp/idist-fuzz-XXXXXX";
    const idist_tensor t[2] = {{bytes[0], 5, IDIST_F32}, {bytes[1] + 1, 9, IDIST_U8}};
    idist_checkpoint_desc desc = {folder, NULL, 0, false};
    char info[8], found[128];
    if (nbytes < 1 || nbytes - 1 > sizeof file) return 0;
    if (fd < 0) {
        if (idist_initialize(NULL) != IDIST_OK || !mkdtemp(folder)) abort();
        snprintf(path, sizeof path, "%s/checkpoint_1_score=1.idist", folder);
        fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (fd < 0) abort();
    }
    memset(file, 0, sizeof file);
    memcpy(file, data + 1, nbytes - 1);
    mend(data[0], nbytes - 1);
    if (ftruncate(fd, 0) != 0 || pwrite(fd, file, nbytes - 1, 0) != (ssize_t)(nbytes - 1)) abort();
    memset(bytes, 7, sizeof bytes);
    memset(info, 7, sizeof info);
    idist_status status = idist_checkpoint_load(path, t, 2, info, sizeof info, NULL);
    if (status != IDIST_OK && status != IDIST_ERR_ARG && status != IDIST_ERR_CORRUPT &&
        status != IDIST_ERR_UNSUPPORTED)
        abort();
    // No byte after the tensors may change.
    if (bytes[0][20] != 7 || bytes[1][0] != 7 || bytes[1][10] != 7) abort();
    if (status != IDIST_OK &&
        (bytes[0][0] != 7 || bytes[1][1] != 7 || info[0] != 7 || !idist_last_error()[0]))
        abort();
    if (status == IDIST_OK && nbytes - 1 != 64 + 32 + 32 + 32 + 32 + 8) abort();
    idist_status found_status = idist_checkpoint_find(&desc, false, found, sizeof found, NULL);
    if (found_status != IDIST_OK && found_status != IDIST_ERR_CORRUPT) abort();
    if (found_status == IDIST_OK ? strcmp(found, path) != 0 : status == IDIST_OK) abort();
    if (found_status == IDIST_OK && status == IDIST_ERR_UNSUPPORTED) abort();
    return 0;
}
