/*
 * Small files of /proc and /sys, read without the C library's buffers, and the
 * numbers and fields in their text.
 *
 * A function that reads a file holds a descriptor open for a moment. Another
 * thread of the program could close it by mistake: see thread_may_open_files.
 * The functions are thread-safe, preserve errno, and allocate nothing.
 */
#ifndef CALM_OS_FILE_H
#define CALM_OS_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FILE_MAX_PATH 1024 /* of a path that this library builds, with its NUL */
#define FILE_MAX_PART 1024 /* of a part (file_each_part), with its NUL */

/* Opens a file for reading. Returns the descriptor, or -errno. */
long file_open(const char *path);

/* Reads at most size - 1 bytes and appends a NUL. Returns the number of bytes,
 * or -1 if nothing can be read. */
long file_read(const char *path, char *text, size_t size);

/* Returns the number that a file begins with. Returns UINT64_MAX if there is no
 * number, as in "max" and "-1". */
uint64_t file_read_number(const char *path);

/* Calls `take` with each part of a file between two separators, for example
 * with each line, until `take` returns false. Skips parts longer than
 * FILE_MAX_PART. Returns false if nothing can be read. */
bool file_each_part(const char *path, char separator, bool (*take)(void *context, const char *part),
                    void *context);

/* Sets each number from the line "name: 12" or "name 12" of a file. A number
 * whose line is missing keeps its value. */
void file_read_named_numbers(const char *path, const char *const *names, uint64_t *numbers, size_t count);

/* Parses the decimal number at the start of a text. The number saturates at
 * UINT64_MAX; it is 0 if there is no digit. Returns the end of the digits,
 * which is `text` if there is none. Accepts no sign, blank or unit. */
const char *parse_number(const char *text, uint64_t *number);

/* Returns a field of /proc/PID/stat. Field 0 is the state, which follows the
 * name in parentheses. Returns the empty string if there is no such field. */
const char *parse_stat_field(const char *text, unsigned number);

/* Writes all bytes, or as many as the descriptor accepts. Raises no signal if
 * it accepts no more (at a limit, or in a pipe without a reader). Returns 0 or
 * an errno. */
int file_write(int descriptor, const void *bytes, size_t length);

#endif
