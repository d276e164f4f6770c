#include "os/file.h"

#include "os/filters.h"
#include "os/syscall.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <time.h>

/* The signal's bit in a mask of the kernel's format. */
#define SIGNAL_BIT(number) ((uint64_t)1 << ((number)-1))

const char *parse_number(const char *text, uint64_t *number) {
    uint64_t value = 0;
    for (; *text >= '0' && *text <= '9'; text++) {
        if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, *text - '0', &value)) {
            value = UINT64_MAX; /* saturates, whatever digits follow */
        }
    }
    *number = value;
    return text;
}

const char *parse_stat_field(const char *text, unsigned number) {
    /* The name may contain any character, even parentheses. */
    const char *at = strrchr(text, ')');
    for (unsigned blanks = 0; at != NULL && blanks <= number; blanks++) {
        at = strchr(at + 1, ' ');
    }
    return at == NULL ? "" : at + 1;
}

long file_open(const char *path) {
    return os_syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
}

long file_read(const char *path, char *text, size_t size) {
    long descriptor = file_open(path);
    if (descriptor < 0) {
        return -1;
    }
    long length = os_syscall(SYS_read, descriptor, text, size - 1);
    os_syscall(SYS_close, descriptor);
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
    long descriptor = file_open(path);
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
        os_syscall(SYS_close, descriptor);
    }
    if (more && held > 0 && !too_long) {
        text[held] = '\0';
        take(context, text);
    }
    return length >= 0;
}

struct named_numbers {
    const char *const *names;
    uint64_t *numbers;
    size_t count;
};

static bool take_named(void *context, const char *line) {
    const struct named_numbers *named = context;
    for (size_t i = 0; i < named->count; i++) {
        size_t length = strlen(named->names[i]);
        if (strncmp(line, named->names[i], length) == 0 && (line[length] == ' ' || line[length] == ':')) {
            parse_number(line + length + strspn(line + length, " :"), &named->numbers[i]);
        }
    }
    return true;
}

void file_read_named_numbers(const char *path, const char *const *names, uint64_t *numbers, size_t count) {
    struct named_numbers named = {.names = names, .count = count};
    named.numbers = numbers;
    file_each_part(path, '\n', take_named, &named);
}

static int write_all(int descriptor, const void *bytes, size_t length) {
    while (length > 0) {
        long done = os_syscall(SYS_write, descriptor, bytes, length);
        if (done == -EINTR) {
            continue;
        }
        if (done <= 0) {
            return done == 0 ? EIO : (int)-done;
        }
        bytes = (const char *)bytes + done;
        length -= (size_t)done;
    }
    return 0;
}

/*
 * A write beyond the limit on file sizes raises SIGXFSZ in the writing thread,
 * and a write to a pipe without a reader raises SIGPIPE. The program must not
 * see these signals, so both are blocked during the write, and a raised one is
 * taken back. If the program's own signal was already waiting, the kernel
 * merged the new one into it, and it stays. A filter that the program added may
 * forbid these calls; then the signals are raised.
 */
int file_write(int descriptor, const void *bytes, size_t length) {
    const uint64_t signals = SIGNAL_BIT(SIGXFSZ) | SIGNAL_BIT(SIGPIPE);
    uint64_t before = 0;
    if (filters_now() == FILTERS_ADDED ||
        os_syscall(SYS_rt_sigprocmask, SIG_BLOCK, &signals, &before, sizeof signals) < 0) {
        return write_all(descriptor, bytes, length);
    }
    uint64_t waiting = 0;
    if ((before & signals) != 0) {
        os_syscall(SYS_rt_sigpending, &waiting, sizeof waiting);
    }
    int error = write_all(descriptor, bytes, length);
    uint64_t raised = (error == EFBIG   ? SIGNAL_BIT(SIGXFSZ)
                       : error == EPIPE ? SIGNAL_BIT(SIGPIPE)
                                        : 0) &
                      ~waiting;
    if (raised != 0) {
        const struct timespec at_once = {0, 0};
        os_syscall(SYS_rt_sigtimedwait, &raised, NULL, &at_once, sizeof raised);
    }
    os_syscall(SYS_rt_sigprocmask, SIG_SETMASK, &before, NULL, sizeof before);
    return error;
}
