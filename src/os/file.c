#include "os/file.h"

#include "os/filters.h"
#include "os/syscall.h"
#include "os/thread.h"

#include <errno.h>
#include <fcntl.h>

bool file_may_open(void) {
    return thread_is_alone() && filters_now() != FILTERS_ADDED;
}

long file_read(const char *path, char *text, size_t size) {
    long descriptor = os_syscall(SYS_openat, AT_FDCWD, (long)path, O_RDONLY | O_CLOEXEC, 0, 0, 0);
    if (descriptor < 0) {
        return -1;
    }
    long length = os_syscall(SYS_read, descriptor, (long)text, (long)size - 1, 0, 0, 0);
    os_syscall(SYS_close, descriptor, 0, 0, 0, 0, 0);
    if (length < 0) {
        return -1;
    }
    text[length] = '\0';
    return length;
}

/* Takes whole lines from the front of a buffer. Returns how many bytes are left of the last one. */
static size_t take_lines(char *text, size_t length, bool *passing, void (*take)(void *, const char *),
                         void *context) {
    size_t start = 0;
    for (size_t at = 0; at < length; at++) {
        if (text[at] == '\n') {
            text[at] = '\0';
            if (!*passing) {
                take(context, text + start);
            }
            *passing = false;
            start = at + 1;
        }
    }
    for (size_t i = start; i < length; i++) {
        text[i - start] = text[i];
    }
    return length - start;
}

bool file_each_line(const char *path, void (*take)(void *context, const char *line), void *context) {
    char text[FILE_LINE_BYTES] = {0};
    long descriptor = os_syscall(SYS_openat, AT_FDCWD, (long)path, O_RDONLY | O_CLOEXEC, 0, 0, 0);
    if (descriptor < 0) {
        return false;
    }
    size_t held = 0;
    bool passing = false; /* the line is too long */
    long length;
    while ((length = os_syscall(SYS_read, descriptor, (long)(text + held), (long)(sizeof text - 1 - held), 0,
                                0, 0)) > 0) {
        held = take_lines(text, held + (size_t)length, &passing, take, context);
        if (held == sizeof text - 1) {
            passing = true;
            held = 0;
        }
    }
    os_syscall(SYS_close, descriptor, 0, 0, 0, 0, 0);
    if (held > 0 && !passing) {
        text[held] = '\0';
        take(context, text);
    }
    return length == 0;
}

uint64_t file_line_number(const char *line, const char *name) {
    while (*name != '\0' && *line == *name) {
        line++;
        name++;
    }
    if (*name != '\0' || (*line != ' ' && *line != ':')) {
        return UINT64_MAX;
    }
    while (*line == ' ' || *line == ':') {
        line++;
    }
    uint64_t number = 0;
    for (; *line >= '0' && *line <= '9'; line++) {
        number = number * 10 + (uint64_t)(*line - '0');
    }
    return number;
}

void file_write(int descriptor, const char *text, size_t length) {
    while (length > 0) {
        long done = os_syscall(SYS_write, descriptor, (long)text, (long)length, 0, 0, 0);
        if (done == -EINTR) {
            continue;
        }
        if (done <= 0) {
            return;
        }
        text += done;
        length -= (size_t)done;
    }
}
