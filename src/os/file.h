/* Small files of /proc and /sys, read and written whole, without libc's buffers. */
#ifndef CALM_OS_FILE_H
#define CALM_OS_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Whether a file may be opened by a thread of the program's after the start: no other thread can close it by
 * mistake or miss its number, and no filter ends the process for it. */
bool file_may_open(void);

/* Reads at most size - 1 bytes and ends them with NUL. Returns how many; -1 if there is nothing to read.
 * Thread-safe; preserves errno; allocates nothing. */
long file_read(const char *path, char *text, size_t size);

#define FILE_LINE_BYTES 1024 /* with its NUL */

/* Calls take with each line, without its end; longer ones than FILE_LINE_BYTES are passed over. False if
 * there is nothing to read. The same holds. */
bool file_each_line(const char *path, void (*take)(void *context, const char *line), void *context);

/* The number that a line "name: 12" or "name 12" has behind its name; UINT64_MAX if it is not that name's. */
uint64_t file_line_number(const char *line, const char *name);

/* Writes all of it to a descriptor, as far as it takes it. */
void file_write(int descriptor, const char *text, size_t length);

#endif
