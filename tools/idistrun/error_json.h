// error_json.h: the text in torchrun's error files
//
//     {"message": {"message": "...", "extraInfo": {"py_callstack": "...", "timestamp": "..."}}}
//
// The message of an exception is the inner "message". A program may also write an outer "message"
// that is a string.
#pragma once

#include "base.h"

#include <stdbool.h>

// Writes a character as UTF-8. Returns the number of bytes, at most 4.
static size_t error_json_put_utf8(unsigned code, char *to) {
    size_t more = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3, nbytes = 0;

    if (!more) {
        *to = (char)code;
        return 1;
    }

    to[nbytes++] = (char)((0xff00 >> (more + 1) & 0xff) | code >> 6 * more);
    while (more--) to[nbytes++] = (char)(0x80 | (code >> 6 * more & 0x3f));

    return nbytes;
}

// Reads the four digits after \u. A character above U+FFFF is written as two such escapes, a
// surrogate pair.
static unsigned error_json_read_code(const char **from) {
    unsigned code = 0, low;

    sscanf(*from, "%4x", &code);
    *from += 4;

    if (code >> 10 == 0xd800 >> 10 && sscanf(*from, "\\u%4x", &low) == 1 &&
        low >> 10 == 0xdc00 >> 10) {
        code = 0x10000 + ((code & 0x3ff) << 10) + (low & 0x3ff);
        *from += 6;
    }

    return code;
}

// Decodes and copies one character of a string. Returns the number of bytes written, at most 4.
static size_t error_json_read_char(const char **from, char *to) {
    static const char letters[] = "bfnrt", meanings[] = "\b\f\n\r\t";
    const char *letter;

    if (**from != '\\' || !(*from)[1]) {
        *to = *(*from)++;
        return 1;
    }

    *from += 2;
    if ((*from)[-1] == 'u' && strspn(*from, "0123456789abcdefABCDEF") >= 4)
        return error_json_put_utf8(error_json_read_code(from), to);

    letter = strchr(letters, (*from)[-1]);
    *to = letter ? meanings[letter - letters] : (*from)[-1];
    return 1;
}

// Finds and decodes the message. Truncates a message that is too long. Returns false if there is no
// message.
static bool error_json_read(const char *json, char *text, size_t capacity) {
    size_t nbytes = 0;

    do {
        json = strstr(json, "\"message\"");
        if (!json) return false;
        json += strlen("\"message\"");
        json += strspn(json, " :");
    } while (*json == '{');
    if (*json++ != '"') return false;

    while (*json && *json != '"' && nbytes + 5 < capacity)
        nbytes += error_json_read_char(&json, text + nbytes);
    text[nbytes] = 0;

    return true;
}

// Writes a text as a JSON string without the quotes. Truncates a text that is too long.
static void error_json_quote(const char *text, char *quoted, size_t capacity) {
    size_t nbytes = 0;

    for (; *text && nbytes + 7 < capacity; text++) {
        unsigned char c = (unsigned char)*text;

        if (c >= ' ' && c < 0x7f && c != '"' && c != '\\') quoted[nbytes++] = (char)c;
        else nbytes += (size_t)sprintf(quoted + nbytes, "\\u%04x", c);
    }
    quoted[nbytes] = 0;
}

// Returns the JSON for a failure without an exception. The text also serves as the call stack,
// because torchrun prints the call stack instead of the message, even if the call stack is empty.
static const char *error_json_make(const char *text) {
    static char json[8192];
    char quoted[3600];

    error_json_quote(text, quoted, sizeof quoted);
    snprintf(json, sizeof json,
             "{\"message\": {\"message\": \"%s\", \"extraInfo\": {\"py_callstack\": \"%s\", "
             "\"timestamp\": \"%lld\"}}}",
             quoted, quoted, (long long)time(NULL));

    return json;
}
