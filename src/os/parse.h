/*
 * Numbers and fields in text that the kernel or a user wrote. Pure; any thread.
 */
#ifndef CALM_OS_PARSE_H
#define CALM_OS_PARSE_H

#include <stdint.h>

/*
 * The decimal number that text begins with: UINT64_MAX if it is larger than that, 0 if there is no digit.
 * Returns where its digits end, which is text itself if there is none. Takes no sign, blank or unit.
 */
const char *parse_number(const char *text, uint64_t *number);

/* The number in a line "name: 12" or "name 12"; UINT64_MAX if the line has another name. */
uint64_t parse_named_number(const char *line, const char *name);

/* A field of /proc/PID/stat, counted from the state, which is number 0 and follows the name in parentheses.
 * NULL if there is none. */
const char *parse_stat_field(const char *text, unsigned number);

#endif
