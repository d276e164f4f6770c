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
