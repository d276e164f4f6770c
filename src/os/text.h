/*
 * Text that is built on the stack and written in one go, since printf may call malloc. Single-owner;
 * preserves errno; allocates nothing.
 */
#ifndef CALM_OS_TEXT_H
#define CALM_OS_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TEXT_MAX_BYTES 4096

/* All zero is the empty text. What does not fit is cut off. */
struct text {
    size_t length;
    char bytes[TEXT_MAX_BYTES + 1]; /* a string: NUL follows what is in it */
};

/* Appends like printf, which has more conversions: here are %s, %.*s, %u, %lu, %zu, %p and %%. */
void text_format(struct text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));

void text_json_string(struct text *text, const char *string); /* quoted and escaped */
void text_hundredths(struct text *text, uint64_t hundredths); /* 250 as "2.50" */

/* Writes all of it, or as much as the descriptor takes. */
void text_write(const struct text *text, int descriptor);

/* Like text_format, into a buffer and with a NUL, for paths. Returns the buffer: the empty string if the text
 * does not fit. */
const char *text_print(char *buffer, size_t bytes, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Like text_format, to a descriptor, and a line's end with it, in one write. */
void text_write_line(int descriptor, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
