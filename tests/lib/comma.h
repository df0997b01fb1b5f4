// comma.h - a locale with a different decimal point, created for one test
//
// Do this:
//     if (!locale_begin("<U002C>", "1,5")) return;      // has printed why it skips
//     ...                                               // printf("%g", 1.5) prints "1,5"
//     locale_end();
#ifndef COMMA_H
#define COMMA_H

#include "tap.h"

#include <locale.h>

static char locale_folder[64];

// Sets a locale whose decimal point is `symbol`, a symbol name of localedef. `expected` is the text
// that the locale prints for 1.5. Returns false, after a skip, if the locale cannot be created.
static inline bool locale_begin(const char *symbol, const char *expected) {
    char path[100], command[400], text[64] = "";
    FILE *f;
    snprintf(locale_folder, sizeof locale_folder, "/tmp/idist-locale-XXXXXX");
    TAP_REQUIRE(mkdtemp(locale_folder));
    snprintf(path, sizeof path, "%s/source", locale_folder);
    f = fopen(path, "w");
    TAP_REQUIRE(f);
    fprintf(f,
            "comment_char %%\nescape_char /\nLC_NUMERIC\ndecimal_point \"%s\"\n"
            "thousands_sep \"\"\ngrouping -1\nEND LC_NUMERIC\n",
            symbol);
    TAP_REQUIRE(fclose(f) == 0);
    snprintf(command, sizeof command,
             "localedef -c --no-archive -f UTF-8 -i '%s' '%s/other' >/dev/null 2>&1", path,
             locale_folder);
    if (system(command) < 0) tap_diag("no shell");
    setenv("LOCPATH", locale_folder, 1);
    if (setlocale(LC_NUMERIC, "other")) snprintf(text, sizeof text, "%g", 1.5);
    if (strcmp(text, expected) == 0) return true;
    tap_skip("another decimal point", "localedef (Debian package locales) cannot make one");
    return false;
}

static inline void locale_end(void) {
    char command[100];
    setlocale(LC_NUMERIC, "C");
    unsetenv("LOCPATH");
    snprintf(command, sizeof command, "rm -rf '%s'", locale_folder);
    TAP_REQUIRE(system(command) == 0);
}

#endif // COMMA_H
