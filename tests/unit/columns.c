// columns.c - checks how many columns of a terminal a text takes. The texts contain wide, combining
// and invisible characters, invalid bytes, control characters and escape sequences. Some lines are
// cut.
#define _GNU_SOURCE // wcwidth
#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "idist_train.h"

#include "tap.h"

#include <locale.h>
#include <wchar.h>

// Checks that a text becomes `want` on a line with this limit and takes the given number of
// columns.
static void becomes(const char *text, size_t limit, const char *want, int columns, bool cut) {
    idist__columns_line line;
    idist__columns_begin(&line, limit);
    idist__columns_add(&line, text);
    bool right = strcmp(line.text, want) == 0 && (int)line.columns == columns && line.cut == cut;
    if (!tap_ok(right, "\"%s\" in %zu columns", want, limit))
        tap_diag("got: \"%s\", %zu columns, cut: %d", line.text, line.columns, line.cut);
}

static void characters(void) {
    becomes("", 0, "", 0, false);
    becomes("abc", 3, "abc", 3, false);
    becomes("abc", 2, "ab", 2, true);
    becomes("abc", 0, "", 0, true);
    becomes("\xc3\xa9t\xc3\xa9", 2, "\xc3\xa9t", 2, true);                        // 2 bytes each
    becomes("\xe6\x97\xa5\xe6\x9c\xac", 4, "\xe6\x97\xa5\xe6\x9c\xac", 4, false); // wide
    becomes("\xe6\x97\xa5\xe6\x9c\xac", 3, "\xe6\x97\xa5", 2, true);
    becomes("\xf0\x9f\x9a\x80x", 2, "\xf0\x9f\x9a\x80", 2, true); // a rocket
    becomes("e\xcc\x81x", 1, "e\xcc\x81", 1, true);               // e and an acute accent
    becomes("e\xcc\x81x", 2, "e\xcc\x81x", 2, false);
    becomes("a\xe2\x80\x8b\xe2\x80\x8d\xef\xbb\xbf"
            "b",
            2,
            "a\xe2\x80\x8b\xe2\x80\x8d\xef\xbb\xbf"
            "b",
            2, false);                                                            // invisible
    becomes("\xe2\x98\x80\xef\xb8\x8f", 2, "\xe2\x98\x80\xef\xb8\x8f", 2, false); // an emoji
    becomes("\xed\x95\x9c", 2, "\xed\x95\x9c", 2, false);                         // Hangul
    becomes("\xe1\x84\x92\xe1\x85\xa1\xe1\x86\xab", 2, "\xe1\x84\x92\xe1\x85\xa1\xe1\x86\xab", 2,
            false); // the same syllable in three parts
}

static void no_characters(void) {
    becomes("a\x80z", 9, "a?z", 3, false);
    becomes("\xff\xfe", 9, "??", 2, false);
    becomes("\xc3", 9, "?", 1, false);
    becomes("\xe6\x97", 9, "??", 2, false);
    becomes("\xc0\xaf\xe0\x80\x80", 9, "?????", 5, false); // overlong encodings
    // surrogates, and a code that is too large
    becomes("\xed\xa0\x80\xf4\x90\x80\x80", 9, "???????", 7, false);
    becomes("\xf8\x88\x80\x80\x80", 9, "?????", 5, false);
    becomes("a\nb\r\tc\x7f\x01", 9, "a b  c  ", 8, false);
    // next line, CSI, line separator
    becomes("a\xc2\x85\xc2\x9b\xe2\x80\xa8z", 9, "a   z", 5, false);
}

static void escapes(void) {
    idist__columns_line line;
    becomes("\033[1;31mred\033[0m", 3, "\033[1;31mred\033[0m", 3, false);
    becomes("\033[38:5:9mred\033[m", 3, "\033[38:5:9mred\033[m", 3, false);
    becomes("\033[31mred\033[0m", 2, "\033[31mre", 2, true);
    becomes("a\033[2Jb\033[10;20Hc\033[K\033[?25ld", 4, "abcd", 4, false);
    // sequences that end with m but set no color
    becomes("a\033[>4;2mb\033[?1mc", 3, "abc", 3, false);
    becomes("a\033]0;title\007b\033]8;;x\033\\c", 3, "abc", 3, false);
    becomes("a\033Pq\033\\b\033_x\033\\c\033^y\007d", 4, "abcd", 4, false);
    becomes("a\033(Bb\0337c\033Md\033#8e", 5, "abcde", 5, false);
    becomes("a\033", 9, "a", 1, false); // incomplete
    becomes("a\033[", 9, "a", 1, false);
    becomes("a\033[31", 9, "a", 1, false);
    becomes("a\033]0;x", 9, "a", 1, false);
    becomes("a\033]0;x\033", 9, "a", 1, false);
    becomes("a\033[31\nb", 9, "a b", 3, false);
    idist__columns_begin(&line, 9);
    idist__columns_add(&line, "plain \033[2J");
    tap_ok(!line.colored, "no color");
    idist__columns_add(&line, "\033[1m");
    tap_ok(line.colored, "a color must be ended");
}

static void long_texts(void) {
    static char text[5000];
    idist__columns_line line;
    memset(text, 0xcc, sizeof text - 1); // combining marks of two bytes
    for (size_t i = 1; i < sizeof text - 1; i += 2) text[i] = (char)0x81;
    text[sizeof text - 2] = 0;
    idist__columns_begin(&line, 80);
    idist__columns_add(&line, text);
    tap_ok(line.cut && line.nbytes < sizeof line.text && line.nbytes % 2 == 0,
           "a text of invisible characters ends with a whole one");
    idist__columns_add(&line, "x");
    tap_ok(!strchr(line.text, 'x'), "and nothing follows it");
}

// Compares the library's column widths with libc's, whose Unicode tables may be of another version.
static void against_libc(void) {
    int n_less = 0, n_more = 0, n = 0;
    if (!setlocale(LC_CTYPE, "C.UTF-8")) {
        tap_skip("columns of all characters", "there is no locale C.UTF-8");
        return;
    }
    for (uint32_t code = 0xa0; code < 0x110000; code++) {
        int want = wcwidth((wchar_t)code), got = (int)idist__columns_of(code);
        if (want < 0 || code == 0xfe0f) continue;
        n++;
        n_more += got > want;
        if (got >= want) continue;
        if (n_less++ < 5) tap_diag("U+%04X: %d columns, %d by libc", (unsigned)code, got, want);
    }
    setlocale(LC_CTYPE, "C");
    tap_ok(n_less == 0, "no character of %d takes more columns than the table says", n);
    tap_ok(n_more < n / 100, "and few take less: %d", n_more);
}

int main(void) {
    tap_deadline(30);
    characters();
    no_characters();
    escapes();
    long_texts();
    against_libc();
    return tap_done();
}
