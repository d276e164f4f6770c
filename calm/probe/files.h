/* The clock and the files of /proc, as several parts of the probe read them. */
#ifndef CALM_PROBE_FILES_H
#define CALM_PROBE_FILES_H

#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

static inline uint64_t clock_ns(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000U + (uint64_t)t.tv_nsec;
}

/* The beginning of a file as a string; returns its length, or -1 with errno. */
static inline ssize_t read_text(int fd, char *text, size_t size) {
    ssize_t got = pread(fd, text, size - 1, 0);
    text[got < 0 ? 0 : got] = '\0';
    return got;
}

static inline ssize_t read_path(const char *path, char *text, size_t size) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read_text(fd, text, size);
    if (fd >= 0) {
        close(fd);
    }
    return got;
}

#endif
