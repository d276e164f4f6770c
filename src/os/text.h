/* Text put together on the stack and written in one go: printf may call malloc, and this is malloc. */
#ifndef CALM_OS_TEXT_H
#define CALM_OS_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TEXT_MAX_BYTES 4096

/* All zero is the empty text. What does not fit is cut off. */
struct text {
    size_t length;
    char bytes[TEXT_MAX_BYTES];
};

void text_string(struct text *text, const char *string);
void text_json_string(struct text *text, const char *string); /* quoted and escaped */
void text_number(struct text *text, uint64_t number);
void text_pointer(struct text *text, const void *pointer);    /* as printf's %p */
void text_hundredths(struct text *text, uint64_t hundredths); /* 250 as "2.50" */

/* Ends it as a string of C's, for a path. False if it was, or would be, cut off. */
bool text_end(struct text *text);

/* Writes all of it, or as much as the descriptor takes. */
void text_write(const struct text *text, int descriptor);

#endif
