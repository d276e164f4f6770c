/*
 * Text that is built on the stack and written by one call, since printf may
 * call malloc. A text has one owner; the functions preserve errno and allocate
 * nothing.
 */
#ifndef CALM_OS_TEXT_H
#define CALM_OS_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TEXT_MAX_BYTES 4096

/* A text. All zero is the empty text. A text that does not fit is cut off. */
struct text {
    size_t length;
    char bytes[TEXT_MAX_BYTES + 1]; /* a string: a NUL follows the text */
};

/* Appends like printf, but knows only the conversions %s, %.*s, %u, %lu, %zu,
 * %p and %%. */
void text_format(struct text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));

void text_json_string(struct text *text, const char *string); /* quoted and escaped */
void text_hundredths(struct text *text, uint64_t hundredths); /* 250 as "2.50" */

/* Writes the whole text, or as much of it as the descriptor accepts. */
void text_write(const struct text *text, int descriptor);

/* Prints a path into a buffer, with a NUL, and returns the buffer. The
 * conversions are those of text_format. If the text does not fit, the buffer
 * holds the empty string. */
const char *text_print(char *buffer, size_t bytes, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Prints a line to a descriptor, in one write. The conversions are those of
 * text_format; the function adds the end of the line. */
void text_write_line(int descriptor, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
