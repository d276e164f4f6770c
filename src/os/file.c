#include "os/file.h"

#include "os/parse.h"
#include "os/syscall.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

static long open_file(const char *path) {
    return os_syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
}

static void close_file(long descriptor) {
    os_syscall(SYS_close, descriptor);
}

long file_read(const char *path, char *text, size_t size) {
    long descriptor = open_file(path);
    if (descriptor < 0) {
        return -1;
    }
    long length = os_syscall(SYS_read, descriptor, text, size - 1);
    close_file(descriptor);
    if (length < 0) {
        return -1;
    }
    text[length] = '\0';
    return length;
}

uint64_t file_read_number(const char *path) {
    char text[64];
    uint64_t number;
    return file_read(path, text, sizeof text) > 0 && parse_number(text, &number) != text ? number
                                                                                         : UINT64_MAX;
}

bool file_each_part(const char *path, char separator, bool (*take)(void *context, const char *part),
                    void *context) {
    char text[FILE_MAX_PART] = {0};
    long descriptor = open_file(path);
    long length = descriptor;
    size_t held = 0; /* bytes of a part whose end has not been read yet */
    bool too_long = false;
    bool more = descriptor >= 0;
    while (more && (length = os_syscall(SYS_read, descriptor, text + held, sizeof text - 1 - held)) > 0) {
        size_t start = 0;
        size_t end = held + (size_t)length;
        for (size_t at = held; at < end && more; at++) {
            if (text[at] == separator) {
                text[at] = '\0';
                more = too_long || take(context, text + start);
                too_long = false;
                start = at + 1;
            }
        }
        held = end - start;
        memmove(text, text + start, held);
        if (held == sizeof text - 1) {
            too_long = true;
            held = 0;
        }
    }
    if (descriptor >= 0) {
        close_file(descriptor);
    }
    if (more && held > 0 && !too_long) {
        text[held] = '\0';
        take(context, text);
    }
    return length >= 0;
}

void file_write(int descriptor, const char *text, size_t length) {
    while (length > 0) {
        long done = os_syscall(SYS_write, descriptor, text, length);
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
