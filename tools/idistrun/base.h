// base.h: messages of idistrun itself, errors that end it, memory, the clock
//
// idistrun prints to the same terminal as its ranks. Each of its messages is one line that begins
// with "idistrun: ". A single write() prints the line, so that no output of a rank splits it.
#pragma once

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

// The exit codes of idistrun itself. In all other cases, the first rank that fails determines the
// code.
enum base_code {
    BASE_CODE_USAGE = 2,       // a wrong option
    BASE_CODE_SYSTEM = 125,    // a host cannot be reached, or the system refuses something
    BASE_CODE_NOT_RUN = 126,   // the program cannot be run
    BASE_CODE_NOT_FOUND = 127, // there is no such program
    BASE_CODE_SIGNAL = 128     // plus the number of the signal, as in a shell
};

// Prints a message. Truncates a message that is too long.
static void base_vsay(const char *format, va_list args) __attribute__((format(printf, 1, 0)));
static void base_vsay(const char *format, va_list args) {
    char text[8192];
    int nbytes = snprintf(text, sizeof text, "idistrun: ");

    nbytes += vsnprintf(text + nbytes, sizeof text - (size_t)nbytes - 1, format, args);
    if (nbytes > (int)sizeof text - 2) nbytes = (int)sizeof text - 2;
    text[nbytes++] = '\n';

    if (write(STDERR_FILENO, text, (size_t)nbytes) < 0) return; // nobody reads stderr
}

// Prints a message. Takes a format and arguments as printf does, and adds a newline.
static void base_say(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void base_say(const char *format, ...) {
    va_list args;

    va_start(args, format);
    base_vsay(format, args);
    va_end(args);
}

// Prints what is wrong with the command line, and exits.
static void base_usage_error(const char *format, ...)
    __attribute__((format(printf, 1, 2), noreturn));
static void base_usage_error(const char *format, ...) {
    va_list args;

    va_start(args, format);
    base_vsay(format, args);
    va_end(args);
    exit(BASE_CODE_USAGE);
}

// Prints what failed and the text of errno, and exits.
static void base_die(const char *what) __attribute__((noreturn));
static void base_die(const char *what) {
    base_say("%s: %s", what, strerror(errno));
    exit(BASE_CODE_SYSTEM);
}

// Returns `pointer`, the result of a C library function. Exits if the pointer is NULL.
static void *base_or_die(void *pointer) {
    if (!pointer) base_die("memory");
    return pointer;
}

// Copies a text to the heap.
static char *base_copy(const char *text) { return base_or_die(strdup(text)); }

// Returns the time in ms since a fixed point in the past. Setting the system clock does not change
// this time.
static long long base_now_ms(void) {
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}
