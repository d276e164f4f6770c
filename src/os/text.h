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
    char bytes[TEXT_MAX_BYTES]; /* without NUL */
};

/* Appends like printf, which has more conversions: here are %s, %u, %lu, %zu, %p and %%. */
void text_format(struct text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));

void text_string(struct text *text, const char *string);
void text_json_string(struct text *text, const char *string); /* quoted and escaped */
void text_number(struct text *text, uint64_t number);
void text_pointer(struct text *text, const void *pointer);    /* as printf's %p */
void text_hundredths(struct text *text, uint64_t hundredths); /* 250 as "2.50" */

/* Ends it as a string of C's. False if it was, or would be, cut off. */
bool text_end(struct text *text);

/* Writes all of it, or as much as the descriptor takes. */
void text_write(const struct text *text, int descriptor);

/* Like text_format, into a buffer and with a NUL, for paths. Returns the buffer: the empty string if the text
 * does not fit. */
const char *text_print(char *buffer, size_t bytes, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Writes strings, up to a NULL, and a line's end at once. */
void text_write_line(int descriptor, const char *const *parts);
#define TEXT_PARTS(...) ((const char *const[]){__VA_ARGS__, NULL})

#endif
