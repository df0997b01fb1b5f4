// output.h: the output of the children: lines for the user, and the messages of nodes
//
// idistrun writes whole lines, each with its [rank] if --tag is set. A node tags the lines of its
// ranks. The head passes these lines on, and extracts the node's messages from its stderr.
#pragma once

#include "base.h"
#include "child.h"
#include "node.h"
#include "options.h"
#include "outcome.h"
#include "place.h"
#include "timeline.h"

#include <poll.h>
#include <stdbool.h>

enum {
    OUTPUT_LINE_NBYTES = 65536, // a longer line is split
    OUTPUT_TAG_NBYTES = 64,     // longest tag
    OUTPUT_DRAIN_READS = 64
};

// Handles the first failure of a node: CODE \t TEXT \t JSON. Ignores the failure as a consequence
// if another failure or a signal came first.
static void output_hear_failure(char *message) {
    char *text = strchr(message, '\t'), *json = text ? strchr(text + 1, '\t') : NULL;
    int code = atoi(message);

    if (!json || code < 1 || outcome_is_known()) return;
    *json++ = 0;
    json[strcspn(json, "\n")] = 0;

    outcome_report(code, text + 1, *json ? json : NULL);
}

// Handles a message of a node.
static void output_hear(struct child *child, char *message) {
    char *event = node_after_mark(message, NODE_EVENT);
    char *failure = node_after_mark(message, NODE_FAILED);

    if (node_after_mark(message, NODE_RUNS)) child->node_started = true;
    if (event) timeline_hear(event);
    if (failure) output_hear_failure(failure);
}

// Writes all bytes. Stops if a write fails.
static void output_write(int fd, const char *text, size_t nbytes) {
    size_t done = 0;

    while (done < nbytes) {
        ssize_t written = write(fd, text + done, nbytes - done);

        if (written < 0 && errno != EINTR) break;
        if (written > 0) done += (size_t)written;
    }
}

// Writes one line of a child. The last line of a stream may have no newline.
static void output_put_line(struct child *child, enum stream_kind kind, const char *line,
                            size_t line_nbytes) {
    bool is_head = place.role == PLACE_HEAD, has_tag = options.tag && !is_head;
    char text[OUTPUT_LINE_NBYTES + 2 * OUTPUT_TAG_NBYTES], *message = NULL;
    size_t nbytes = 0;

    if (has_tag) nbytes = (size_t)snprintf(text, OUTPUT_TAG_NBYTES, "[%d] ", child_rank(child));
    memcpy(text + nbytes, line, line_nbytes);
    nbytes += line_nbytes;
    if (has_tag && (!line_nbytes || line[line_nbytes - 1] != '\n')) text[nbytes++] = '\n';
    text[nbytes] = 0;

    if (is_head && kind == STREAM_ERR) message = node_find_message(text, nbytes);
    if (message) nbytes = (size_t)(message - text);

    output_write(kind == STREAM_OUT ? STDOUT_FILENO : STDERR_FILENO, text, nbytes);
    if (message) output_hear(child, message);
}

// Writes the complete lines of a stream. Returns the number of bytes in these lines.
static size_t output_put_lines(struct child *child, enum stream_kind kind) {
    struct stream *stream = &child->streams[kind];
    size_t from = 0;
    char *end;

    while ((end = memchr(stream->line + from, '\n', stream->nbytes - from)) != NULL) {
        size_t nbytes = (size_t)(end + 1 - stream->line) - from;

        output_put_line(child, kind, stream->line + from, nbytes);
        from += nbytes;
    }

    return from;
}

// Closes a stream.
static void output_close(struct stream *stream) {
    if (stream->fd >= 0) close(stream->fd);
    stream->fd = -1;
}

// Reads a stream once, and writes its complete lines. Writes an incomplete line too, at the end of
// the stream or when the buffer is full.
static void output_read(struct child *child, enum stream_kind kind) {
    struct stream *stream = &child->streams[kind];
    size_t capacity = OUTPUT_LINE_NBYTES, from;
    ssize_t got;

    if (place.role == PLACE_HEAD) capacity += OUTPUT_TAG_NBYTES;
    if (!stream->line) stream->line = base_or_die(malloc(capacity));

    got = read(stream->fd, stream->line + stream->nbytes, capacity - stream->nbytes);
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) return;
    if (got > 0) stream->nbytes += (size_t)got;

    from = output_put_lines(child, kind);
    if ((got <= 0 && from < stream->nbytes) || (from == 0 && stream->nbytes == capacity)) {
        output_put_line(child, kind, stream->line + from, stream->nbytes - from);
        from = stream->nbytes;
    }

    memmove(stream->line, stream->line + from, stream->nbytes - from);
    stream->nbytes -= from;
    if (got <= 0) output_close(stream);
}

// Returns true if a stream can be read without waiting.
static bool output_is_ready(const struct stream *stream) {
    struct pollfd poll_fd = {stream->fd, POLLIN, 0};

    return stream->fd >= 0 && poll(&poll_fd, 1, 0) == 1;
}

// Reads the remaining output of a dead child, and closes its streams. The number of reads is
// limited, because a process that the child left behind may keep writing.
static void output_drain(struct child *child) {
    for (enum stream_kind kind = STREAM_OUT; kind < STREAM_KINDS; kind++) {
        struct stream *stream = &child->streams[kind];

        for (int i = 0; i < OUTPUT_DRAIN_READS && output_is_ready(stream); i++)
            output_read(child, kind);

        if (stream->fd >= 0 && stream->nbytes)
            output_put_line(child, kind, stream->line, stream->nbytes);
        output_close(stream);
    }
}
