// base/text.h: text: copying and decoding; numbers and host:port as text
//
// Functions: idist__text_*, idist__number_*, idist__parse_*.
#pragma once

//------------------------------------------------------------------------------
// copying, appending and decoding text
//------------------------------------------------------------------------------

// Returns the text after `prefix`, or the whole text if it does not begin with `prefix`. Used when
// one error text quotes another; no decision depends on the result.
IDIST__UNUSED static const char *idist__text_behind(const char *text, const char *prefix) {
    size_t nbytes = strlen(prefix);
    return strncmp(text, prefix, nbytes) == 0 ? text + nbytes : text;
}

// Appends to a string in a buffer of `capacity` bytes. Truncates the string if it does not fit.
IDIST__PRINTF(3, 4)
static void idist__text_append(char *buf, size_t capacity, const char *fmt, ...) {
    size_t used = strlen(buf);
    va_list args;

    va_start(args, fmt);
    vsnprintf(buf + used, capacity - used, fmt, args);
    va_end(args);
}

// Copies a string to a buffer of `capacity` bytes. Truncates the copy if it does not fit.
static void idist__text_copy(char *to, size_t capacity, const char *from) {
    size_t nbytes = strlen(from);

    if (nbytes >= capacity) nbytes = capacity - 1;
    memcpy(to, from, nbytes);
    to[nbytes] = 0;
}

// Decodes the first character of a UTF-8 text. Returns the number of bytes of the character, 0 at
// the end of the text, or -1 if the text does not begin with a character.
IDIST__UNUSED static int idist__text_decode(const char *text, uint32_t *code) {
    static const uint32_t lowest[5] = {0, 0, 0x80, 0x800,
                                       0x10000}; // lowest code, by number of bytes
    const unsigned char *from = (const unsigned char *)text;
    int i, nbytes = from[0] < 0x80 ? 1 : from[0] < 0xe0 ? 2 : from[0] < 0xf0 ? 3 : 4;

    *code = from[0];
    if (nbytes == 1) return from[0] ? 1 : 0;
    if (from[0] < 0xc0 || from[0] > 0xf7) return -1;
    *code &= 0x7fu >> nbytes;

    for (i = 1; i < nbytes; i++) {
        if ((from[i] & 0xc0) != 0x80) return -1;
        *code = *code << 6 | (from[i] & 0x3fu);
    }

    if (*code < lowest[nbytes] || *code > 0x10ffff || (*code >= 0xd800 && *code < 0xe000))
        return -1;

    return nbytes;
}

//------------------------------------------------------------------------------
// numbers with fractions as text, in every locale
//
// The functions printf and strtod use the decimal point of the program's locale. The rest of idist
// prints numbers with fractions only through this section; `make lint` checks this rule.
//------------------------------------------------------------------------------

enum { IDIST__NUMBER_NBYTES = 40 }; // size of a number as text, with its final NUL

// Copies the output of printf to text. The decimal point becomes a period, and -nan becomes nan.
static const char *idist__number_convert(char *text, const char *printed) {
    const char *from = printed;
    char *to = text;
    bool in_point = false;

    if (strstr(printed, "nan")) from = "nan";

    for (; *from; from++) {
        // The decimal point of a locale may have several bytes.
        bool is_point = !strchr("0123456789+-einfa", *from);

        if (!is_point) *to++ = *from;
        else if (!in_point) *to++ = '.';
        in_point = is_point;
    }

    *to = 0;

    return text;
}

// Prints like %.*g with at most 17 digits. Returns text, which has IDIST__NUMBER_NBYTES bytes.
IDIST__UNUSED static const char *idist__number_print(char *text, double value, int digits) {
    char printed[64];

    snprintf(printed, sizeof printed, "%.*g", digits, value);
    return idist__number_convert(text, printed);
}

// Prints like %.*f with at most 9 decimals, or like %g if the magnitude is 1e15 or more. Returns
// text.
IDIST__UNUSED static const char *idist__number_print_fixed(char *text, double value, int decimals) {
    char printed[64];

    if (!(value > -1e15 && value < 1e15)) return idist__number_print(text, value, 6);
    snprintf(printed, sizeof printed, "%.*f", decimals, value);
    return idist__number_convert(text, printed);
}

// Prints the fewest digits, from 15 to 17, that read back as the same double. Returns text.
IDIST__UNUSED static const char *idist__number_print_exact(char *text, double value) {
    char printed[64];
    int digits;

    for (digits = 15; digits <= 17; digits++) {
        snprintf(printed, sizeof printed, "%.*g", digits, value);
        if (strtod(printed, NULL) == value) break;
    }

    return idist__number_convert(text, printed);
}

//------------------------------------------------------------------------------
// numbers and host:port in texts
//------------------------------------------------------------------------------

// Parses a decimal number within limits. Returns false, and leaves *value unchanged, unless the
// whole text is such a number.
static bool idist__parse_int(const char *text, int64_t lowest, int64_t highest, int64_t *value) {
    char *end = NULL;
    long long number;

    if (!text || !(text[0] == '-' || (text[0] >= '0' && text[0] <= '9'))) return false;
    errno = 0;
    number = strtoll(text, &end, 10);
    if (errno || !end || *end || number < lowest || number > highest) return false;
    *value = number;

    return true;
}

// Parses "host:port" or "[v6]:port". Removes the brackets. Returns false if the text has another
// form or the host does not fit.
static bool idist__parse_host_port(const char *text, char *host, size_t capacity, int *port) {
    const char *colon = strrchr(text, ':');
    size_t nbytes = colon ? (size_t)(colon - text) : 0;
    int64_t value;

    if (!colon || !idist__parse_int(colon + 1, 0, 65535, &value)) return false;

    if (nbytes >= 2 && text[0] == '[' && text[nbytes - 1] == ']') {
        text++;
        nbytes -= 2;
    }

    if (!nbytes || nbytes >= capacity) return false;
    memcpy(host, text, nbytes);
    host[nbytes] = 0;
    *port = (int)value;

    return true;
}
