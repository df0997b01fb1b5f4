// train/report/columns.h: how many columns of a terminal a text takes
//
// The function wcwidth depends on the locale, which a program may not have set. The tables below
// are from Unicode 14 (general category and East_Asian_Width, UAX #11). They err on the side of
// more columns. Marks of rare scripts count as one column, and whole blocks of emoji and ideographs
// count as wide. A line may then end early, but it does not wrap.
#pragma once

#include "base/text.h"

typedef struct idist__columns_range {
    uint32_t first, last;
} idist__columns_range;

// Characters that take no column: combining marks, vowels of Hangul, format characters.
static const idist__columns_range idist__columns_none[] = {
    {0x300, 0x36f},   {0x483, 0x489},     {0x591, 0x5bd},    {0x5bf, 0x5bf},   {0x5c1, 0x5c2},
    {0x5c4, 0x5c5},   {0x5c7, 0x5c7},     {0x610, 0x61a},    {0x61c, 0x61c},   {0x64b, 0x65f},
    {0x670, 0x670},   {0x6d6, 0x6dc},     {0x6df, 0x6e4},    {0x6e7, 0x6e8},   {0x6ea, 0x6ed},
    {0x711, 0x711},   {0x730, 0x74a},     {0x7a6, 0x7b0},    {0x7eb, 0x7f3},   {0x7fd, 0x7fd},
    {0x816, 0x819},   {0x81b, 0x823},     {0x825, 0x827},    {0x829, 0x82d},   {0x859, 0x85b},
    {0x898, 0x89f},   {0x8ca, 0x8e1},     {0x8e3, 0x902},    {0x93a, 0x93a},   {0x93c, 0x93c},
    {0x941, 0x948},   {0x94d, 0x94d},     {0x951, 0x957},    {0x962, 0x963},   {0x981, 0x981},
    {0x9bc, 0x9bc},   {0x9c1, 0x9c4},     {0x9cd, 0x9cd},    {0x9e2, 0x9e3},   {0x9fe, 0xa02},
    {0xa3c, 0xa3c},   {0xa41, 0xa51},     {0xa70, 0xa71},    {0xa75, 0xa75},   {0xa81, 0xa82},
    {0xabc, 0xabc},   {0xac1, 0xac8},     {0xacd, 0xacd},    {0xae2, 0xae3},   {0xafa, 0xb01},
    {0xb3c, 0xb3c},   {0xb3f, 0xb3f},     {0xb41, 0xb44},    {0xb4d, 0xb56},   {0xb62, 0xb63},
    {0xb82, 0xb82},   {0xbc0, 0xbc0},     {0xbcd, 0xbcd},    {0xc00, 0xc00},   {0xc04, 0xc04},
    {0xc3c, 0xc3c},   {0xc3e, 0xc40},     {0xc46, 0xc56},    {0xc62, 0xc63},   {0xc81, 0xc81},
    {0xcbc, 0xcbc},   {0xcbf, 0xcbf},     {0xcc6, 0xcc6},    {0xccc, 0xccd},   {0xce2, 0xce3},
    {0xd00, 0xd01},   {0xd3b, 0xd3c},     {0xd41, 0xd44},    {0xd4d, 0xd4d},   {0xd62, 0xd63},
    {0xd81, 0xd81},   {0xdca, 0xdca},     {0xdd2, 0xdd6},    {0xe31, 0xe31},   {0xe34, 0xe3a},
    {0xe47, 0xe4e},   {0xeb1, 0xeb1},     {0xeb4, 0xebc},    {0xec8, 0xecd},   {0xf18, 0xf19},
    {0xf35, 0xf35},   {0xf37, 0xf37},     {0xf39, 0xf39},    {0xf71, 0xf7e},   {0xf80, 0xf84},
    {0xf86, 0xf87},   {0xf8d, 0xfbc},     {0xfc6, 0xfc6},    {0x102d, 0x1030}, {0x1032, 0x1037},
    {0x1039, 0x103a}, {0x103d, 0x103e},   {0x1058, 0x1059},  {0x105e, 0x1060}, {0x1071, 0x1074},
    {0x1082, 0x1082}, {0x1085, 0x1086},   {0x108d, 0x108d},  {0x109d, 0x109d}, {0x1160, 0x11ff},
    {0x135d, 0x135f}, {0x1712, 0x1714},   {0x17b4, 0x17b5},  {0x17b7, 0x17bd}, {0x17c6, 0x17c6},
    {0x17c9, 0x17d3}, {0x180b, 0x180f},   {0x1ab0, 0x1ace},  {0x1dc0, 0x1dff}, {0x200b, 0x200f},
    {0x202a, 0x202e}, {0x2060, 0x206f},   {0x20d0, 0x20f0},  {0x2de0, 0x2dff}, {0x302a, 0x302d},
    {0x3099, 0x309a}, {0xd7b0, 0xd7ff},   {0xfb1e, 0xfb1e},  {0xfe00, 0xfe0e}, {0xfe20, 0xfe2f},
    {0xfeff, 0xfeff}, {0xe0001, 0xe007f}, {0xe0100, 0xe01ef}};

// Characters that take two columns: ideographs, Hangul, full-width forms, emoji.
static const idist__columns_range idist__columns_two[] = {
    {0x1100, 0x115f},   {0x231a, 0x231b},   {0x2329, 0x232a},   {0x23e9, 0x23ec},
    {0x23f0, 0x23f0},   {0x23f3, 0x23f3},   {0x25fd, 0x25fe},   {0x2614, 0x2615},
    {0x2648, 0x2653},   {0x267f, 0x267f},   {0x2693, 0x2693},   {0x26a1, 0x26a1},
    {0x26aa, 0x26ab},   {0x26bd, 0x26be},   {0x26c4, 0x26c5},   {0x26ce, 0x26ce},
    {0x26d4, 0x26d4},   {0x26ea, 0x26ea},   {0x26f2, 0x26f3},   {0x26f5, 0x26f5},
    {0x26fa, 0x26fa},   {0x26fd, 0x26fd},   {0x2705, 0x2705},   {0x270a, 0x270b},
    {0x2728, 0x2728},   {0x274c, 0x274c},   {0x274e, 0x274e},   {0x2753, 0x2755},
    {0x2757, 0x2757},   {0x2795, 0x2797},   {0x27b0, 0x27b0},   {0x27bf, 0x27bf},
    {0x2b1b, 0x2b1c},   {0x2b50, 0x2b50},   {0x2b55, 0x2b55},   {0x2e80, 0x303e},
    {0x3041, 0xa4cf},   {0xa960, 0xa97f},   {0xac00, 0xd7a3},   {0xf900, 0xfaff},
    {0xfe10, 0xfe19},   {0xfe30, 0xfe6f},   {0xff01, 0xff60},   {0xffe0, 0xffe6},
    {0x16fe0, 0x1b2ff}, {0x1f004, 0x1f004}, {0x1f0cf, 0x1f0cf}, {0x1f18e, 0x1f18e},
    {0x1f191, 0x1f19a}, {0x1f200, 0x1f64f}, {0x1f680, 0x1f6ff}, {0x1f7e0, 0x1f7f0},
    {0x1f900, 0x1faff}, {0x20000, 0x3fffd}};

// A line for a terminal.
typedef struct idist__columns_line {
    char text[1024];
    size_t nbytes, columns;
    size_t limit; // in columns
    bool cut;     // something did not fit
    bool colored; // the line must end with the default color
} idist__columns_line;

static bool idist__columns_has(const idist__columns_range *ranges, size_t n, uint32_t code) {
    size_t low = 0, high = n;

    while (low < high) {
        size_t middle = (low + high) / 2;

        if (code > ranges[middle].last) low = middle + 1;
        else high = middle;
    }

    return low < n && code >= ranges[low].first;
}

// Returns the number of columns that a character takes. The character must not be a control
// character. The selector U+FE0F counts as one column, because some terminals widen the character
// before it.
static size_t idist__columns_of(uint32_t code) {
    const size_t none_count = sizeof idist__columns_none / sizeof *idist__columns_none;
    const size_t two_count = sizeof idist__columns_two / sizeof *idist__columns_two;

    if (code < 0x300) return 1;
    if (idist__columns_has(idist__columns_none, none_count, code)) return 0;

    return idist__columns_has(idist__columns_two, two_count, code) ? 2 : 1;
}

// Returns the end of an escape sequence (ECMA-48) that begins with ESC. Sets *is_color to true if
// the sequence is complete and sets a color or another rendition.
static const char *idist__columns_skip(const char *text, bool *is_color) {
    const char *at = text + 1, *parameters;

    *is_color = false;

    if (*at && strchr("]PX^_", *at)) { // a string, up to BEL or ESC and backslash
        while (*at && *at != 7 && *at != 27) at++;
        if (*at == 27 && at[1] == 92) at++;
        return *at && *at != 27 ? at + 1 : at;
    }

    if (*at == '[') {
        parameters = ++at;
        at += strspn(at, "0123456789:;");
        *is_color = *at == 'm';
        if (at == parameters || !*is_color) at += strspn(at, "0123456789:;<=>?");
    }

    while (*at >= ' ' && *at <= '/') at++; // intermediate bytes

    return *at >= '0' && *at <= '~' ? at + 1 : at;
}

// Adds bytes that take `columns` columns, if they fit. After the first bytes that do not fit, adds
// nothing more.
static void idist__columns_put(idist__columns_line *line, const char *bytes, size_t nbytes,
                               size_t columns) {
    if (line->columns + columns > line->limit || line->nbytes + nbytes >= sizeof line->text)
        line->cut = true;
    if (line->cut) return;

    memcpy(line->text + line->nbytes, bytes, nbytes);
    line->nbytes += nbytes;
    line->columns += columns;
    line->text[line->nbytes] = 0;
}

static void idist__columns_begin(idist__columns_line *line, size_t limit) {
    memset(line, 0, sizeof *line);
    line->limit = limit;
}

// Adds a text. Replaces control characters with spaces, and bytes that are not UTF-8 with question
// marks. Keeps escape sequences for colors, and drops other escape sequences.
static void idist__columns_add(idist__columns_line *line, const char *text) {
    while (*text && !line->cut) {
        uint32_t code;
        int nbytes = idist__text_decode(text, &code);
        const char *end = text + (nbytes > 0 ? nbytes : 1);
        bool is_color;

        if (code == 27) {
            end = idist__columns_skip(text, &is_color);
            if (is_color) idist__columns_put(line, text, (size_t)(end - text), 0);
            if (is_color) line->colored = true;
        } else if (nbytes < 0) {
            idist__columns_put(line, "?", 1, 1);
        } else if (code < ' ' || (code >= 0x7f && code < 0xa0) || code == 0x2028 ||
                   code == 0x2029) {
            idist__columns_put(line, " ", 1, 1);
        } else {
            idist__columns_put(line, text, (size_t)(end - text), idist__columns_of(code));
        }

        text = end;
    }
}
