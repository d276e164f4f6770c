/*
 * Small files of /proc and /sys, read without the C library's buffers, and messages written whole.
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

/* Writes all of it, or as much as the descriptor takes. */
void file_write(int descriptor, const char *text, size_t length);

#endif
