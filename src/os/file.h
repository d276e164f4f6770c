/*
 * Small files of /proc and /sys, read without the C library's buffers, and the numbers and fields in their
 * text.
 *
 * Opens a descriptor for a moment, which another thread of the program could close by mistake: see
 * thread_may_open_files. Thread-safe; preserves errno; allocates nothing.
 */
#ifndef CALM_OS_FILE_H
#define CALM_OS_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FILE_MAX_PATH 1024 /* with its NUL: of paths that this library builds */
#define FILE_MAX_PART 1024 /* likewise, of parts below */

/* For reading. Returns the descriptor, or -errno. */
long file_open(const char *path);

/* Reads at most size - 1 bytes and ends them with NUL. Returns their number; -1 if nothing can be read. */
long file_read(const char *path, char *text, size_t size);

/* The number that a file begins with; UINT64_MAX where there is none, as in "max" and "-1". */
uint64_t file_read_number(const char *path);

/*
 * Calls take with each part of a file between two separators, such as each line, until it returns false.
 * Parts that are longer than FILE_MAX_PART are left out. False if nothing can be read.
 */
bool file_each_part(const char *path, char separator, bool (*take)(void *context, const char *part),
                    void *context);

/* Sets each number from the line "name: 12" or "name 12" of a file; without such a line it stays. */
void file_read_named_numbers(const char *path, const char *const *names, uint64_t *numbers, size_t count);

/*
 * The decimal number that text begins with: UINT64_MAX if it is larger than that, 0 if there is no digit.
 * Returns where its digits end, which is text itself if there is none. Takes no sign, blank or unit.
 */
const char *parse_number(const char *text, uint64_t *number);

/* A field of /proc/PID/stat, counted from the state, which is number 0 and follows the name in parentheses.
 * Empty if there is none. */
const char *parse_stat_field(const char *text, unsigned number);

/* Writes all of it, or as much as the descriptor takes; raises no signal where it takes no more (a limit, a
 * pipe without a reader). Returns 0 or an errno. */
int file_write(int descriptor, const void *bytes, size_t length);

#endif
