// summary.c - checks idist_summary_*. Records must equal the records of tensorboard
// (tests/data/events.txt, made by events.py beside this file). Also covers the CSV lines; files
// that are resumed, truncated, foreign or in use; full disks; and fork. Only rank 0 may write.
//
// The system calls that write are replaced in this file, so that a test can make them fail.
#define pwrite step_pwrite
#define fsync step_fsync
#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "idist_train.h"

#include "comma.h"
#include "ranks.h"

#include <math.h>

#define HEADER "wall_time,step,tag,value\n"
enum { TAG_NBYTES = 1000, LINE_NBYTES = 2 * TAG_NBYTES + 100 };

static struct {
    // Error that the next calls report, or 0 if they succeed.
    int error;
    // Number of bytes that a call writes before it fails.
    size_t some;
} disk;

ssize_t step_pwrite(int fd, const void *data, size_t nbytes, off_t at) {
    if (disk.error && nbytes > disk.some) {
        size_t some = disk.some;
        disk.some = 0;
        if (some) return syscall(SYS_pwrite64, fd, data, some, at);
        errno = disk.error;
        return -1;
    }
    return syscall(SYS_pwrite64, fd, data, nbytes, at);
}

static int sync_error; // error of fsync, or 0 to use the error of `disk`

int step_fsync(int fd) {
    errno = sync_error ? sync_error : disk.error;
    return errno ? -1 : (int)syscall(SYS_fsync, fd);
}

static void break_disk(int error, size_t some) {
    disk.error = error;
    disk.some = some;
}

static char folder[64]; // a new folder for each test

static void new_folder(void) {
    snprintf(folder, sizeof folder, "/tmp/idist-summary-XXXXXX");
    TAP_REQUIRE(mkdtemp(folder));
}

static void remove_folder(void) {
    char command[100];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    TAP_REQUIRE(system(command) == 0);
}

static const char *in_folder(const char *name) {
    static char path[400];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void put_csv(const char *data, size_t nbytes) {
    FILE *f = fopen(in_folder("scalars.csv"), "wb");
    TAP_REQUIRE(f && fwrite(data, 1, nbytes, f) == nbytes && fclose(f) == 0);
}

// Returns the contents of a file, followed by a zero byte, or NULL if there is no such file.
static const char *get_file(const char *path, size_t *nbytes) {
    static char data[1 << 20];
    FILE *f = fopen(path, "rb");
    if (!f) return NULL;
    size_t n = fread(data, 1, sizeof data - 1, f);
    fclose(f);
    data[n] = 0;
    if (nbytes) *nbytes = n;
    return data;
}

static const char *get_csv(void) {
    const char *data = get_file(in_folder("scalars.csv"), NULL);
    return data ? data : "(no file)";
}

// Reads the only events file in the folder.
static const char *get_events(size_t *nbytes) {
    char path[400] = "";
    DIR *dir = opendir(folder);
    TAP_REQUIRE(dir);
    for (struct dirent *e = readdir(dir); e; e = readdir(dir))
        if (strncmp(e->d_name, "events.out.tfevents.", 20) == 0)
            snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
    closedir(dir);
    return get_file(path, nbytes);
}

static idist_summary *create(bool csv, bool tensorboard) {
    idist_summary_desc desc;
    idist_summary *summary = NULL;
    memset(&desc, 0, sizeof desc);
    desc.folder = folder;
    desc.no_csv = !csv;
    desc.no_tensorboard = !tensorboard;
    if (idist_summary_create(&desc, &summary) != IDIST_OK) tap_diag("%s", idist_last_error());
    return summary;
}

static int count_char(const char *text, char c) {
    int n = 0;
    for (; *text; text++) n += *text == c;
    return n;
}

//------------------------------------------------------------------------------
// records and lines
//------------------------------------------------------------------------------

static size_t from_hex(unsigned char *bytes, const char *hex) {
    size_t n = 0;
    unsigned byte;
    for (; sscanf(hex, "%2x", &byte) == 1; hex += 2) bytes[n++] = (unsigned char)byte;
    return n;
}

static void records(void) {
    static char line[8000], tag_hex[2100], hex[4000], number[64];
    static unsigned char tag[1100], want[2000];
    unsigned long long us, step;
    int n = 0, n_wrong = 0;
    FILE *f = fopen("tests/data/events.txt", "r");
    TAP_REQUIRE(f);
    while (fgets(line, sizeof line, f)) {
        idist__event record;
        if (line[0] == '#') continue;
        TAP_REQUIRE(
            sscanf(line, "%llu %llu %2099s %63s %3999s", &us, &step, tag_hex, number, hex) == 5);
        size_t nbytes = from_hex(want, hex);
        tag[from_hex(tag, tag_hex)] = 0;
        if (tag_hex[0] == '-') idist__event_version(&record, (double)us / 1e6);
        else
            idist__event_scalar(&record, (double)us / 1e6, step, (char *)tag, strtod(number, NULL));
        n++;
        if (record.nbytes == nbytes && memcmp(record.bytes, want, nbytes) == 0) continue;
        n_wrong++;
        tap_diag("%zu bytes, expected %zu: %.100s", record.nbytes, nbytes, line);
    }
    fclose(f);
    tap_ok(n == 12 && n_wrong == 0, "%d of %d records are those of tensorboard", n - n_wrong, n);
    tap_is(idist__event_crc((const unsigned char *)"123456789", 9), 0xe3069283,
           "the check value of CRC-32C");
}

static void line_is(const char *tag, double value, uint64_t step, const char *want) {
    char line[LINE_NBYTES + 1];
    line[idist__csv_line(line, 1769801172000123, step, tag, value)] = 0;
    tap_ok(strncmp(line, "1769801172.000123,", 18) == 0 && strcmp(line + 18, want) == 0, "line: %s",
           want);
    if (strcmp(line + 18, want) != 0) tap_diag("got: %s", line);
}

static void lines(void) {
    char longest[TAG_NBYTES + 1], line[LINE_NBYTES];
    uint64_t seed = tap_seed();
    int n_wrong = 0;
    line_is("train/loss", 0.5, 7, "7,train/loss,0.5\n");
    line_is("a", 0.1, UINT64_MAX, "18446744073709551615,a,0.1\n");
    line_is("a,b", 1, 0, "0,\"a,b\",1\n");
    line_is("say \"a\"", -1e-300, 0, "0,\"say \"\"a\"\"\",-1e-300\n");
    line_is("two\nlines", 1e22, 0, "0,\"two\nlines\",1e+22\n");
    line_is("\r", -0.0, 0, "0,\"\r\",-0\n");
    line_is("a b", (double)NAN, 0, "0,a b,nan\n");
    line_is("a", -(double)NAN, 0, "0,a,nan\n");
    line_is("a", (double)INFINITY, 0, "0,a,inf\n");
    line_is("a", -(double)INFINITY, 0, "0,a,-inf\n");
    line_is("a", 0.1 + 0.2, 0, "0,a,0.30000000000000004\n");
    for (int i = 0; i < 20000; i++) {
        uint64_t bits = tap_rand(&seed);
        double value, got;
        memcpy(&value, &bits, sizeof value);
        if (!isfinite(value)) continue;
        got = strtod(idist__number_print_exact(line, value), NULL);
        n_wrong += memcmp(&got, &value, sizeof got) != 0;
    }
    tap_is(n_wrong, 0, "any double comes back");
    memset(longest, '"', TAG_NBYTES);
    longest[TAG_NBYTES] = 0;
    size_t nbytes = idist__csv_line(line, INT64_MAX, UINT64_MAX, longest, -2.2250738585072014e-308);
    tap_ok(nbytes > 2 * TAG_NBYTES && nbytes <= sizeof line, "the longest line: %zu bytes", nbytes);
}

static void comma_locale(void) {
    if (!locale_begin("<U002C>", "1,5")) return;
    line_is("a", 1234567.25, 1, "1,a,1234567.25\n");
    line_is("a", 0.1, 1, "1,a,0.1\n");
    locale_end();
}

//------------------------------------------------------------------------------
// files
//------------------------------------------------------------------------------

// Builds the events file, without its first record, that matches a scalars.csv without quotes.
static size_t events_of(const char *csv, unsigned char *events) {
    size_t n = 0;
    for (const char *at = strchr(csv, '\n') + 1; *at; at = strchr(at, '\n') + 1) {
        unsigned long long seconds, us, step;
        char tag[100], number[64];
        idist__event record;
        TAP_REQUIRE(sscanf(at, "%llu.%llu,%llu,%99[^,],%63s", &seconds, &us, &step, tag, number) ==
                    5);
        idist__event_scalar(&record, (double)(seconds * 1000000 + us) / 1e6, step, tag,
                            strtod(number, NULL));
        memcpy(events + n, record.bytes, record.nbytes);
        n += record.nbytes;
    }
    return n;
}

// Returns true if the records of the only events file, after the first one, match scalars.csv.
static bool files_agree(void) {
    static unsigned char want[1 << 20];
    const size_t version_nbytes = 40;
    size_t n_want = events_of(get_csv(), want), n = 0;
    const char *events = get_events(&n);
    return n == version_nbytes + n_want && memcmp(events + version_nbytes, want, n_want) == 0;
}

static void both_files(void) {
    char inner[100], outer[64];
    int n_fds = count_fds();
    snprintf(outer, sizeof outer, "%s", folder);
    snprintf(inner, sizeof inner, "%.40s/a/b", folder);
    snprintf(folder, sizeof folder, "%.60s", inner);
    idist_summary *s = create(true, true);
    int64_t before_s = time(NULL);
    tap_ok(s != NULL, "a folder in folders that do not exist");
    for (int i = 0; i < 300; i++)
        if (idist_summary_add(s, i % 2 ? "train/loss" : "test", 1.0 / i, (uint64_t)i) != IDIST_OK)
            break;
    tap_is(count_char(get_csv(), '\n'), 301, "all lines are there without a flush");
    tap_ok(llabs(strtoll(strchr(get_csv(), '\n') + 1, NULL, 10) - before_s) < 100,
           "with the time of day");
    tap_ok(files_agree(), "and the records of the same times, steps, tags and values");
    tap_is(idist_summary_flush(s), IDIST_OK, "flush");
    idist_summary *second = create(false, true);
    tap_ok(second != NULL, "a second events file of this process and second");
    tap_is(count_entries(folder, "events.out.tfevents."), 2, "has a name of its own");
    tap_is(idist_summary_free(&second), IDIST_OK, "free");
    tap_is(idist_summary_free(&s), IDIST_OK, "free");
    tap_ok(s == NULL, "sets the handle to NULL");
    tap_is(idist_summary_free(&s), IDIST_OK, "again");
    tap_is(idist_summary_free(NULL), IDIST_OK, "NULL");
    tap_is(count_fds(), n_fds, "no descriptor stays");
    tap_is(count_entries(folder, ""), 3, "no file but these");
    snprintf(folder, sizeof folder, "%s", outer);
}

// Truncates the file at every length. Complete lines must stay, the incomplete line must go, and a
// new line must follow.
static void torn(void) {
    static const char *const parts[] = {HEADER, "1.5,1,a,0.5\n", "1.5,2,\"two\n\n,\",1\n",
                                        "1.5,3,\"say \"\"a\"\"\n\",nan\n", "1.5,4,b,2\n"};
    char all[400] = "", want[400];
    int n_wrong = 0;
    for (size_t i = 0; i < 5; i++) idist__text_append(all, sizeof all, "%s", parts[i]);
    for (size_t n = 0; n <= strlen(all); n++) {
        size_t whole = 0;
        for (size_t i = 0; i < 5 && whole + strlen(parts[i]) <= n; i++) whole += strlen(parts[i]);
        snprintf(want, sizeof want, "%.*s", whole ? (int)whole : (int)strlen(parts[0]), all);
        put_csv(all, n);
        idist_summary *s = create(true, false);
        bool good = s && idist_summary_add(s, "new", 3, 5) == IDIST_OK;
        good = idist_summary_free(&s) == IDIST_OK && good;
        const char *got = get_csv(), *end = strstr(got, ",5,new,3\n");
        good = good && end && end[9] == 0 && strncmp(got, want, strlen(want)) == 0 &&
               (int)strspn(got + strlen(want), "0123456789.") == end - got - (int)strlen(want);
        if (!good) tap_diag("%zu bytes became: %s", n, got);
        n_wrong += !good;
    }
    tap_is(n_wrong, 0, "a file torn at any byte");
}

// Reads a file that takes several reads, with quotes at the boundaries between the reads.
static void torn_large(void) {
    static char data[300100];
    size_t n = strlen(HEADER), last = 0, n_after = 0;
    snprintf(data, sizeof data, "%s", HEADER);
    for (int i = 0; n < 300000; i++) {
        last = n;
        n += (size_t)sprintf(
            data + n, "1.5,%d,\"\n%.*s\",1\n", i, i % 40 / 2 * 2,
            "\"\"\"\"\"\"\"\"\"\"\"\"\"\"\"\"\"\"\"\"\"\"\"\"\"\"\"\"\"\"\"\"\"\"\"\"\"\"\"\"");
    }
    n = (size_t)(strchr(data + last, '\n') + 1 - data); // cut within the quotes of the last line
    put_csv(data, n);
    idist_summary *s = create(true, false);
    tap_is(idist_summary_free(&s), IDIST_OK, "a torn file of %zu bytes", n);
    const char *got = get_file(in_folder("scalars.csv"), &n_after);
    tap_ok(n_after == last && memcmp(got, data, last) == 0, "has lost its last line only");
}

static void refused_file(const char *what, const char *data, size_t nbytes, const char *said) {
    size_t n = 0;
    idist_summary_desc desc;
    idist_summary *s;
    memset(&desc, 0, sizeof desc);
    desc.folder = folder;
    put_csv(data, nbytes);
    tap_is(idist_summary_create(&desc, &s), IDIST_ERR_ARG, "%s: refused", what);
    tap_like(idist_last_error(), said, "%s: says why", what);
    const char *got = get_file(in_folder("scalars.csv"), &n);
    tap_ok(!s && n == nbytes && memcmp(got, data, n) == 0, "%s: untouched", what);
    tap_is(count_entries(folder, ""), 1, "%s: no other file", what);
    TAP_REQUIRE(unlink(in_folder("scalars.csv")) == 0);
}

static void foreign(void) {
    static char long_line[3000], *at = long_line;
    refused_file("other columns", "step,loss\n1,2\n", 14, "does not begin with");
    refused_file("one more column", "wall_time,step,tag,value,run\n", 29, "does not begin with");
    refused_file("line ends of another system", "wall_time,step,tag,value\r\n", 26,
                 "does not begin with");
    refused_file("something short", "x", 1, "does not begin with");
    at += sprintf(at, "%s1.5,1,\"a,0.5\n", HEADER);
    while (at < long_line + 2500) at += sprintf(at, "1.5,2,b,0.25\n");
    refused_file("a quote without an end", long_line, (size_t)(at - long_line),
                 "begins at byte 25 has no end");
    memset(long_line, 0, sizeof long_line);
    memcpy(long_line, HEADER, 25);
    refused_file("zeros", long_line, sizeof long_line, "has no end");
}

static void refused_create(const char *what, idist_summary_desc desc, idist_status want,
                           const char *said) {
    idist_summary *s = (idist_summary *)&desc;
    tap_is(idist_summary_create(&desc, &s), want, "%s: refused", what);
    tap_like(idist_last_error(), said, "%s: says why", what);
    tap_ok(!s, "%s: no handle", what);
}

static void bad_descs(void) {
    static char long_path[5000];
    char csv[400];
    idist_summary_desc desc;
    idist_summary *s = NULL;
    int n_fds = count_fds();
    memset(&desc, 0, sizeof desc);
    refused_create("no folder", desc, IDIST_ERR_ARG, "the folder is NULL or empty");
    desc.folder = "";
    refused_create("an empty name", desc, IDIST_ERR_ARG, "the folder is NULL or empty");
    memset(long_path, '/', sizeof long_path - 1);
    desc.folder = long_path;
    refused_create("a long path", desc, IDIST_ERR_SYSTEM, "File name too long");
    desc.folder = folder;
    desc.no_csv = desc.no_tensorboard = true;
    refused_create("no file", desc, IDIST_ERR_ARG, "neither CSV nor TensorBoard");
    desc.no_csv = desc.no_tensorboard = false;
    tap_is(idist_summary_create(NULL, &s), IDIST_ERR_ARG, "no desc");
    tap_is(idist_summary_create(&desc, NULL), IDIST_ERR_ARG, "nowhere to put the handle");
    tap_is(idist_summary_add(NULL, "a", 1, 1), IDIST_ERR_ARG, "no summary to add to");
    tap_is(idist_summary_flush(NULL), IDIST_ERR_ARG, "no summary to flush");
    snprintf(csv, sizeof csv, "%s", in_folder("scalars.csv"));
    TAP_REQUIRE(mkdir(csv, 0700) == 0);
    refused_create("scalars.csv is a folder", desc, IDIST_ERR_SYSTEM,
                   "scalars.csv: Is a directory");
    TAP_REQUIRE(rmdir(csv) == 0 && mkfifo(csv, 0600) == 0);
    refused_create("scalars.csv is a pipe", desc, IDIST_ERR_ARG, "is not a regular file");
    TAP_REQUIRE(unlink(csv) == 0 && symlink("/dev/full", csv) == 0);
    refused_create("scalars.csv is a device", desc, IDIST_ERR_ARG, "is not a regular file");
    TAP_REQUIRE(unlink(csv) == 0);
    put_csv("", 0);
    desc.folder = csv;
    refused_create("the folder is a file", desc, IDIST_ERR_SYSTEM, "Not a directory");
    desc.no_csv = true;
    refused_create("the folder is a file, no CSV", desc, IDIST_ERR_SYSTEM, "Not a directory");
    tap_is(count_fds(), n_fds, "no descriptor stays");
}

static void bad_values(void) {
    static const char *const tags[] = {"",
                                       "\x80",
                                       "a\xff",
                                       "\xc0\xaf",
                                       "\xe0\x80\x80",
                                       "\xed\xa0\x80",
                                       "\xf4\x90\x80\x80",
                                       "\xc3",
                                       "\xe2\x82",
                                       "\xf8\x88\x80\x80\x80"};
    char tag[1002];
    int n_taken = 0;
    idist_summary *s = create(true, true);
    for (size_t i = 0; i < sizeof tags / sizeof *tags; i++)
        n_taken += idist_summary_add(s, tags[i], 1, 1) != IDIST_ERR_ARG;
    tap_is(n_taken, 0, "tags that are not UTF-8: refused");
    tap_is(idist_summary_add(s, NULL, 1, 1), IDIST_ERR_ARG, "no tag");
    memset(tag, 'x', sizeof tag - 1);
    tag[1001] = 0;
    tap_is(idist_summary_add(s, tag, 1, 1), IDIST_ERR_ARG, "a tag of 1,001 bytes");
    tap_like(idist_last_error(), "1 to 1000 bytes of UTF-8", "says so");
    tap_is(idist_summary_add(s, "a", 1, (uint64_t)INT64_MAX + 1), IDIST_ERR_ARG, "a large step");
    tap_ok(strcmp(get_csv(), HEADER) == 0, "nothing of it is written");
    tag[1000] = 0;
    tap_is(idist_summary_add(s, tag, 1, INT64_MAX), IDIST_OK, "a tag of 1,000 bytes");
    tap_is(idist_summary_add(s, "\xed\x9f\xbf \xee\x80\x80 \xf4\x8f\xbf\xbf \xc2\x80", 1, 1),
           IDIST_OK, "UTF-8 of 2, 3 and 4 bytes");
    tap_is(idist_summary_free(&s), IDIST_OK, "free");
}

static void in_use(void) {
    idist_summary_desc desc;
    idist_summary *first = create(true, false), *second;
    memset(&desc, 0, sizeof desc);
    desc.folder = folder;
    tap_is(idist_summary_create(&desc, &second), IDIST_ERR_STATE, "a folder that is in use");
    tap_like(idist_last_error(), "is writing", "says so");
    tap_is(count_entries(folder, "events."), 0, "and leaves no file");
    tap_is(idist_summary_free(&first), IDIST_OK, "free");
    first = create(true, false);
    tap_ok(first != NULL, "is no longer in use");
    tap_is(idist_summary_free(&first), IDIST_OK, "free");
}

static void some_files(void) {
    idist_summary *s = create(true, false);
    tap_is(idist_summary_add(s, "a", 1, 1), IDIST_OK, "CSV only");
    tap_is(idist_summary_flush(s), IDIST_OK, "flush");
    tap_is(idist_summary_free(&s), IDIST_OK, "free");
    tap_is(count_entries(folder, "events."), 0, "no events file");
    TAP_REQUIRE(unlink(in_folder("scalars.csv")) == 0);
    s = create(false, true);
    tap_is(idist_summary_add(s, "a", 1, 1), IDIST_OK, "TensorBoard only");
    tap_is(idist_summary_free(&s), IDIST_OK, "free");
    tap_is(count_entries(folder, ""), 1, "no scalars.csv");
}

//------------------------------------------------------------------------------
// disks that are full or broken
//------------------------------------------------------------------------------

static void full_for_a_while(void) {
    idist_summary *s = create(true, true);
    for (size_t some = 0; some < 12; some++) {
        idist_summary_add(s, "before", 1, some);
        break_disk(some % 2 ? EDQUOT : ENOSPC, some);
        if (idist_summary_add(s, "full", 2, some) != IDIST_ERR_NO_SPACE ||
            !strstr(idist_last_error(), "No space left on device"))
            rank_fail("full: %s", idist_last_error());
        const char *csv = get_csv();
        rank_check(csv[strlen(csv) - 1] == '\n', "the file ends with part of a line");
        rank_check(idist_summary_flush(s) == IDIST_ERR_NO_SPACE, "flush succeeds");
        break_disk(0, 0);
        rank_check(idist_summary_add(s, "after", 3, some) == IDIST_OK, "%s", idist_last_error());
    }
    ranks_report("a disk that is full for a while: named, no part of a line");
    tap_is(count_char(get_csv(), '\n'), 37, "no value is lost");
    tap_ok(files_agree(), "in either file");
    break_disk(EIO, 3);
    tap_is(idist_summary_add(s, "broken", 1, 1), IDIST_ERR_SYSTEM, "an error of the disk");
    tap_like(idist_last_error(), "summary_add: /tmp/idist-summary-", "names the folder");
    tap_like(idist_last_error(), ": Input/output error", "and the error");
    break_disk(0, 0);
    disk.error = EIO;
    disk.some = 100000;
    tap_is(idist_summary_flush(s), IDIST_ERR_SYSTEM, "fsync fails");
    break_disk(0, 0);
    tap_is(idist_summary_free(&s), IDIST_OK, "free writes the rest");
    tap_is(count_char(get_csv(), '\n'), 38, "all of it");
    tap_ok(files_agree(), "to both files");
}

static void full_for_long(void) {
    idist_summary *s = create(true, true);
    idist_status status = IDIST_OK;
    break_disk(ENOSPC, 0);
    for (uint64_t i = 0; i < 5000; i++) {
        status = idist_summary_add(s, "train/loss", 1, i);
        if (status != IDIST_ERR_NO_SPACE) break;
    }
    tap_is(status, IDIST_ERR_NO_SPACE, "a disk that is full for long");
    tap_ok(strcmp(get_csv(), HEADER) == 0, "nothing is written");
    break_disk(0, 0);
    tap_is(idist_summary_add(s, "last", 1, 5000), IDIST_OK, "then there is space again");
    int n = count_char(get_csv(), '\n');
    tap_ok(n > 1000 && n < 5000, "64 KiB of the others are there: %d lines", n);
    tap_is(idist_summary_free(&s), IDIST_ERR_NO_SPACE, "free says that some are lost");
    tap_like(idist_last_error(), "values were not written to /tmp/idist-summary-", "and where");
    s = create(true, true);
    tap_is(idist_summary_add(s, "a", 1, 1), IDIST_OK, "another handle");
    break_disk(ENOSPC, 7);
    tap_is(idist_summary_add(s, "a", 1, 2), IDIST_ERR_NO_SPACE, "and a full disk");
    tap_is(idist_summary_free(&s), IDIST_ERR_NO_SPACE, "until the end");
    tap_is(count_char(get_csv(), '\n'), n + 1, "no part of a line stays");
    idist_summary_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.folder = folder;
    int n_files = count_entries(folder, "");
    tap_is(idist_summary_create(&desc, &s), IDIST_ERR_NO_SPACE, "a full disk at the start");
    tap_is(count_entries(folder, ""), n_files, "leaves no file");
    break_disk(0, 0);
}

// Fills a real file system of 64 KiB, so that the error comes from the kernel.
static void full_disk(void) {
    int status;
    pid_t pid = fork();
    TAP_REQUIRE(pid >= 0);
    if (pid == 0) {
        const long new_mounts = 0x00020000; // CLONE_NEWNS
        if (syscall(SYS_unshare, new_mounts) != 0 ||
            mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0)
            _exit(77);
        if (mount("none", folder, "tmpfs", 0, "size=65536") != 0) _exit(77);
        idist_summary *s = create(true, true);
        idist_status result = IDIST_OK;
        for (uint64_t i = 0; i < 3000 && result == IDIST_OK; i++)
            result = idist_summary_add(s, "train/loss", 1, i);
        if (result != IDIST_ERR_NO_SPACE) _exit(1);
        if (idist_summary_free(&s) != IDIST_ERR_NO_SPACE) _exit(2);
        const char *csv = get_csv();
        _exit(csv[strlen(csv) - 1] == '\n' && count_char(csv, '\n') > 500 ? 0 : 3);
    }
    TAP_REQUIRE(waitpid(pid, &status, 0) == pid);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
        tap_skip("a full file system", "mounts are not allowed here");
    else tap_ok(status == 0, "a full file system (wait status 0x%x)", (unsigned)status);
}

static idist_summary *logged_summary;
static int log_count;

// A logger that adds its warnings to a summary as a curve.
static void log_to_summary(idist_log_level level, const char *line, void *user) {
    (void)user;
    if (level != IDIST_LOG_WARN || !strstr(line, "does not sync (Invalid argument)")) return;
    log_count++;
    tap_is(idist_summary_add(logged_summary, "warnings", log_count, 1), IDIST_OK,
           "a logger may add to the summary that warns");
}

// Uses a file system that refuses fsync. Every value must be written nevertheless.
static void refused_syncs(void) {
    idist_desc desc;
    memset(&desc, 0, sizeof desc);
    setenv("IDIST_LOG", "warn", 1);
    desc.logger.log_fn = log_to_summary;
    TAP_REQUIRE(idist_initialize(&desc) == IDIST_OK);
    idist_summary *s = logged_summary = create(true, true);
    sync_error = EINVAL;
    tap_is(idist_summary_add(s, "a", 1, 1), IDIST_OK, "add");
    tap_is(idist_summary_flush(s), IDIST_OK, "flush where nothing is synced");
    tap_is(idist_summary_flush(s), IDIST_OK, "and again");
    tap_is(log_count, 1, "warns once");
    sync_error = EIO;
    tap_is(idist_summary_flush(s), IDIST_ERR_SYSTEM, "an error of the disk is a failure");
    sync_error = EOPNOTSUPP;
    tap_is(idist_summary_free(&s), IDIST_OK, "free");
    sync_error = 0;
    tap_is(count_char(get_csv(), '\n'), 3, "both values are there");
    tap_ok(files_agree(), "in both files");
    TAP_REQUIRE(idist_finalize() == IDIST_OK);
}

// Uses a folder in which files may be created, but which may not be listed.
static void hidden_folder(void) {
    int status;
    TAP_REQUIRE(chmod(folder, 0333) == 0);
    pid_t pid = fork();
    TAP_REQUIRE(pid >= 0);
    if (pid == 0) {
        if (geteuid() == 0 && (setgid(65534) != 0 || setuid(65534) != 0)) _exit(77);
        if (access(folder, R_OK) == 0) _exit(77);
        idist_summary *s = NULL;
        idist_summary_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.folder = folder;
        if (idist_summary_create(&desc, &s) != IDIST_OK) _exit(1);
        if (idist_summary_add(s, "a", 1, 1) != IDIST_OK) _exit(2);
        _exit(idist_summary_free(&s) == IDIST_OK ? 0 : 3);
    }
    TAP_REQUIRE(waitpid(pid, &status, 0) == pid && chmod(folder, 0700) == 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
        tap_skip("a folder that cannot be listed", "this user may list every folder");
    else tap_ok(status == 0 && files_agree(), "a folder that cannot be listed (0x%x)", status);
}

//------------------------------------------------------------------------------
// processes, threads and ranks
//------------------------------------------------------------------------------

static void forked(void) {
    int status;
    idist_summary *s = create(true, true);
    idist_summary_add(s, "before", 1, 1);
    break_disk(ENOSPC, 0);
    tap_is(idist_summary_add(s, "pending", 1, 2), IDIST_ERR_NO_SPACE, "a value that is pending");
    break_disk(0, 0);
    pid_t pid = fork();
    TAP_REQUIRE(pid >= 0);
    if (pid == 0) {
        if (idist_summary_add(s, "child", 1, 1) != IDIST_ERR_STATE) _exit(1);
        if (!strstr(idist_last_error(), "child made by fork")) _exit(2);
        if (idist_summary_flush(s) != IDIST_ERR_STATE) _exit(3);
        _exit(idist_summary_free(&s) == IDIST_OK && !s ? 0 : 4);
    }
    TAP_REQUIRE(waitpid(pid, &status, 0) == pid);
    tap_is(status, 0, "a child cannot write, and frees its copy");
    tap_is(count_char(get_csv(), '\n'), 2, "it has written nothing");
    idist_summary *second = NULL;
    idist_summary_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.folder = folder;
    tap_is(idist_summary_create(&desc, &second), IDIST_ERR_STATE, "the parent's file is in use");
    tap_is(idist_summary_add(s, "after", 1, 3), IDIST_OK, "the parent goes on");
    tap_is(idist_summary_free(&s), IDIST_OK, "and ends");
    tap_is(count_char(get_csv(), '\n'), 4, "each value is there once");
    tap_ok(files_agree(), "in both files");
}

enum { N_THREADS = 4, N_ADDS = 200 };

static void *add_many(void *arg) {
    idist_summary *s = (idist_summary *)arg;
    for (uint64_t i = 0; i < N_ADDS; i++)
        if (idist_summary_add(s, "train/loss", 0.5, i) != IDIST_OK ||
            (i % 100 == 0 && idist_summary_flush(s) != IDIST_OK))
            return s;
    return NULL;
}

static void threads(void) {
    pthread_t thread[N_THREADS];
    int n_failed = 0;
    idist_summary *s = create(true, true);
    for (int i = 0; i < N_THREADS; i++)
        TAP_REQUIRE(pthread_create(&thread[i], NULL, add_many, s) == 0);
    for (int i = 0; i < N_THREADS; i++) {
        void *result;
        TAP_REQUIRE(pthread_join(thread[i], &result) == 0);
        n_failed += result != NULL;
    }
    tap_is(n_failed, 0, "%d threads add", N_THREADS);
    tap_is(idist_summary_free(&s), IDIST_OK, "free");
    tap_is(count_char(get_csv(), '\n'), 1 + N_THREADS * N_ADDS, "all values are there");
    tap_ok(files_agree(), "in both files, in the same order");
}

// A tracker that keeps what it gets.
typedef struct tracker {
    idist_scalar last;
    char tag[32];
    int count, result;
    int inside; // calls that run now
    bool overlapped;
} tracker;

static int track(const idist_scalar *scalar, void *arg) {
    tracker *t = (tracker *)arg;
    if (__atomic_fetch_add(&t->inside, 1, __ATOMIC_SEQ_CST)) t->overlapped = true;
    t->last = *scalar;
    copy_text(t->tag, sizeof t->tag, scalar->tag);
    t->count++;
    if (t->count % 64 == 0) usleep(1000);
    __atomic_fetch_sub(&t->inside, 1, __ATOMIC_SEQ_CST);
    return t->result;
}

static void trackers(void) {
    idist_summary_desc desc;
    idist_summary *s = NULL;
    pthread_t thread[N_THREADS];
    tracker t;
    double now = (double)time(NULL);
    memset(&desc, 0, sizeof desc);
    memset(&t, 0, sizeof t);
    desc.folder = folder;
    desc.track = track;
    desc.arg = &t;
    TAP_REQUIRE(idist_summary_create(&desc, &s) == IDIST_OK);
    tap_is(idist_summary_add(s, "train/loss", 0.25, 7), IDIST_OK, "a tracker gets a value");
    tap_ok(t.count == 1 && !strcmp(t.tag, "train/loss") && t.last.value == 0.25 && t.last.step == 7,
           "the tag, value and step");
    tap_ok(t.last.wall_time >= now && t.last.wall_time < now + 60, "the time");
    tap_is(idist_summary_add(s, "", 1, 8), IDIST_ERR_ARG, "a bad tag");
    tap_is(t.count, 1, "it does not reach the tracker");
    t.result = 5;
    tap_is(idist_summary_add(s, "a", 1, 8), IDIST_ERR_CALLBACK, "the tracker fails");
    tap_like(idist_last_error(), "the tracker failed with 5 for \"a\"", "the error says so");
    t.result = 0;
    for (int i = 0; i < N_THREADS; i++)
        TAP_REQUIRE(pthread_create(&thread[i], NULL, add_many, s) == 0);
    for (int i = 0; i < N_THREADS; i++) TAP_REQUIRE(pthread_join(thread[i], NULL) == 0);
    tap_ok(t.count == 2 + N_THREADS * N_ADDS && !t.overlapped, "one call at a time (%d)", t.count);
    break_disk(ENOSPC, 0);
    tap_is(idist_summary_add(s, "b", 2, 9), IDIST_ERR_NO_SPACE, "a full disk");
    tap_ok(!strcmp(t.tag, "b") && t.last.value == 2, "the tracker gets the value all the same");
    break_disk(0, 0);
    tap_is(idist_summary_free(&s), IDIST_OK, "free");
    tap_is(count_char(get_csv(), '\n'), 1 + t.count, "the file has the same values");

    remove_folder();
    new_folder();
    desc.folder = NULL;
    desc.no_csv = desc.no_tensorboard = true;
    TAP_REQUIRE(idist_summary_create(&desc, &s) == IDIST_OK);
    t.count = 0;
    tap_is(idist_summary_add(s, "c", 3, 10), IDIST_OK, "without files");
    tap_is(idist_summary_flush(s), IDIST_OK, "flush");
    tap_is(idist_summary_free(&s), IDIST_OK, "free");
    tap_ok(t.count == 1 && !strcmp(t.tag, "c"), "the tracker gets the value");
    tap_is(count_entries(folder, ""), 0, "no file is written");

    desc.folder = folder;
    desc.no_csv = false;
    TAP_REQUIRE(idist_summary_create(&desc, &s) == IDIST_OK);
    break_disk(ENOSPC, 0);
    tap_is(idist_summary_add(s, "d", 4, 11), IDIST_ERR_NO_SPACE, "a full disk, CSV only");
    break_disk(0, 0);
    tap_is(idist_summary_free(&s), IDIST_OK, "free");
}

// Only the rank that writes calls the tracker.
static void ranks_track(idist_group *world, int rank, int n, void *arg) {
    idist_summary_desc desc;
    idist_summary *s = NULL;
    tracker t;
    (void)n, (void)arg;
    memset(&desc, 0, sizeof desc);
    memset(&t, 0, sizeof t);
    desc.group = world;
    desc.no_csv = desc.no_tensorboard = true;
    desc.track = track;
    desc.arg = &t;
    rank_ok(rank, idist_summary_create(&desc, &s));
    rank_ok(rank, idist_summary_add(s, "rank", rank, 1));
    rank_check(t.count == (rank == 0), "rank %d: %d values", rank, t.count);
    rank_ok(rank, idist_summary_free(&s));
}

// Creates a summary for the world and one for a group in reverse order. Only rank 0 of the world
// and rank 0 of the group, which is rank n - 1 of the world, may write. The other ranks must not
// even read the folder.
static void ranks_write(idist_group *world, int rank, int n, void *arg) {
    idist_group *group = NULL;
    char own[100];
    (void)arg;
    if (!rank_ok(rank, idist_split(world, 0, n - rank, &group))) return;
    for (int i = 0; i < 2; i++) {
        idist_summary_desc desc;
        idist_summary *s = NULL;
        memset(&desc, 0, sizeof desc);
        desc.group = i ? group : world;
        snprintf(own, sizeof own, "%.60s/%s", folder, i ? "group" : "world");
        desc.folder = idist_group_rank(desc.group) == 0 ? own : i ? NULL : "/dev/null/not/there";
        rank_ok(rank, idist_summary_create(&desc, &s));
        rank_check(s != NULL, "rank %d: no handle", rank);
        rank_ok(rank, idist_summary_add(s, "rank", rank, 1));
        if (rank != (i ? n - 1 : 0)) rank_ok(rank, idist_summary_add(s, "", rank, UINT64_MAX));
        rank_ok(rank, idist_summary_flush(s));
        rank_ok(rank, idist_summary_free(&s));
    }
}

static void of_ranks(void) {
    char want[40];
    for (int n = 1; n <= 3; n++) {
        new_folder();
        ranks_case(n, NULL, ranks_write, NULL, "%d ranks", n);
        tap_is(count_entries(folder, ""), 2,
               "%d ranks: one folder for the world, one for the group", n);
        for (int i = 0; i < 2; i++) {
            const char *csv =
                get_file(in_folder(i ? "group/scalars.csv" : "world/scalars.csv"), NULL);
            snprintf(want, sizeof want, ",1,rank,%d\n", i ? n - 1 : 0);
            tap_like(csv, want, "%d ranks: rank 0 of the %s has written", n, i ? "group" : "world");
            tap_is(csv ? count_char(csv, '\n') : 0, 2, "%d ranks: nobody else has", n);
        }
        remove_folder();
    }
}

static char said[1000]; // the last log line about summaries

static void note_line(idist_log_level level, const char *line, void *user) {
    (void)user;
    (void)level;
    if (strstr(line, "summary")) copy_text(said, sizeof said, line);
}

static void after_finalize(void) {
    idist_desc desc;
    memset(&desc, 0, sizeof desc);
    setenv("IDIST_LOG", "warn", 1);
    desc.logger.log_fn = note_line;
    put_csv(HEADER "1.5,1,a,0.5\n1.5,2", 42);
    TAP_REQUIRE(idist_initialize(&desc) == IDIST_OK);
    idist_summary *s = create(true, true);
    tap_like(said, "removed an incomplete last line that a crash had left",
             "a torn line is logged");
    tap_is(idist_summary_add(s, "a", 1, 2), IDIST_OK, "in a world");
    TAP_REQUIRE(idist_finalize() == IDIST_OK);
    tap_is(idist_summary_add(s, "a", 1, 3), IDIST_OK, "after it");
    tap_is(idist_summary_free(&s), IDIST_OK, "free");
    tap_is(count_char(get_csv(), '\n'), 4, "both values are there");
}

static void in_new_folder(void (*body)(void)) {
    new_folder();
    body();
    break_disk(0, 0);
    remove_folder();
}

int main(void) {
    tap_deadline(100);
    ranks_reset();
    records();
    lines();
    in_new_folder(comma_locale);
    in_new_folder(both_files);
    in_new_folder(torn);
    in_new_folder(torn_large);
    in_new_folder(foreign);
    in_new_folder(bad_descs);
    in_new_folder(bad_values);
    in_new_folder(in_use);
    in_new_folder(some_files);
    in_new_folder(full_for_a_while);
    in_new_folder(full_for_long);
    in_new_folder(full_disk);
    in_new_folder(refused_syncs);
    in_new_folder(hidden_folder);
    in_new_folder(forked);
    in_new_folder(threads);
    in_new_folder(trackers);
    ranks_case(3, NULL, ranks_track, NULL, "only rank 0 tracks");
    of_ranks();
    in_new_folder(after_finalize);
    return tap_done();
}
