#define _GNU_SOURCE /* sched_setaffinity, mkostemp */
#include "paging.h"

#include "support.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/mempolicy.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { BITS = sizeof(unsigned long) * CHAR_BIT, MOST_NODES = 1024 };

_Noreturn void not_here(const char *program, const char *what) {
    (void)fprintf(stderr, "%s: %s\n", program, what);
    exit(STATUS_NOT_HERE);
}

size_t page_bytes(void) {
    return (size_t)sysconf(_SC_PAGESIZE);
}

unsigned long pages_of(unsigned long bytes) {
    unsigned long pages = bytes / page_bytes();
    return pages == 0 ? 1 : pages;
}

unsigned long long page_stamp(unsigned long page) {
    unsigned long long state = page;
    return random_next(&state);
}

static _Noreturn void fail_on(const char *program, const char *doing, const char *path) {
    char line[PATH_MAX + 128];
    (void)snprintf(line, sizeof line, "cannot %s %s: %s", doing, path, strerror(errno));
    fail(program, line);
}

static void write_stamps(const char *program, const struct paged_file *file, const char *path) {
    enum { AT_ONCE = 64 };
    size_t page = page_bytes();
    char *buffer = checked(calloc(AT_ONCE, page), program);
    for (unsigned long first = 0; first < file->pages; first += AT_ONCE) {
        unsigned long count = file->pages - first < AT_ONCE ? file->pages - first : AT_ONCE;
        for (unsigned long i = 0; i < count; i++) {
            page_store(buffer + i * page, page_stamp(first + i));
        }
        for (size_t done = 0; done < count * page;) {
            ssize_t wrote =
                pwrite(file->descriptor, buffer + done, count * page - done, (off_t)(first * page + done));
            if (wrote < 0 && errno != EINTR) {
                fail_on(program, "fill", path);
            }
            done += wrote < 0 ? 0 : (size_t)wrote;
        }
    }
    free(buffer);
}

static int make_without_name(const char *program, const char *path) {
    char unnamed[PATH_MAX];
    if (path == NULL) {
        const char *folder = getenv("TMPDIR");
        (void)snprintf(unnamed, sizeof unnamed, "%s/%s-XXXXXX", folder == NULL ? "/tmp" : folder, program);
    } else {
        (void)snprintf(unnamed, sizeof unnamed, "%s", path);
    }
    int descriptor = path == NULL ? mkostemp(unnamed, O_CLOEXEC)
                                  : open(unnamed, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (descriptor < 0 || unlink(unnamed) != 0) {
        fail_on(program, "make", unnamed);
    }
    return descriptor;
}

struct paged_file paged_file_make(const char *program, const char *path, unsigned long pages,
                                  enum contents contents) {
    struct paged_file file = {make_without_name(program, path), pages, true};
    if (ftruncate(file.descriptor, (off_t)(pages * page_bytes())) != 0) {
        fail_on(program, "enlarge", path == NULL ? "a temporary file" : path);
    }
    if (contents == CONTENTS_STAMPED) {
        write_stamps(program, &file, path == NULL ? "a temporary file" : path);
    }
    return file;
}

struct paged_file paged_file_open(const char *program, const char *path, unsigned long pages,
                                  enum contents contents) {
    int descriptor = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) {
        if (path != NULL && errno != ENOENT) {
            fail_on(program, "open", path);
        }
        return paged_file_make(program, path, pages, contents);
    }
    struct stat status;
    if (fstat(descriptor, &status) != 0 || (unsigned long)status.st_size < pages * page_bytes()) {
        fail(program, "the file is smaller than --size");
    }
    return (struct paged_file){descriptor, pages, false};
}

char *paged_file_map(const char *program, const struct paged_file *file, int flags) {
    int protection = PROT_READ | (flags == MAP_PRIVATE || file->ours ? PROT_WRITE : 0);
    char *start = mmap(NULL, file->pages * page_bytes(), protection, flags, file->descriptor, 0);
    if (start == MAP_FAILED) {
        fail(program, "cannot map the file");
    }
    return start;
}

void shuffle(unsigned *numbers, unsigned long count, unsigned long long seed) {
    for (unsigned long i = count; i > 1; i--) {
        unsigned long j = random_between(&seed, 0, i - 1);
        unsigned kept = numbers[i - 1];
        numbers[i - 1] = numbers[j];
        numbers[j] = kept;
    }
}

struct part part_of(unsigned long pages, unsigned long thread, unsigned long threads) {
    return (struct part){pages * thread / threads, pages * (thread + 1) / threads};
}

unsigned long memory_nodes(unsigned *nodes, unsigned long most) {
    unsigned long mask[MOST_NODES / BITS] = {0};
    unsigned long found = 0;
    if (syscall(SYS_get_mempolicy, NULL, mask, (unsigned long)MOST_NODES, NULL, MPOL_F_MEMS_ALLOWED) == 0) {
        for (unsigned node = 0; node < MOST_NODES && found < most; node++) {
            if ((mask[node / BITS] >> node % BITS & 1) != 0) {
                nodes[found++] = node;
            }
        }
    }
    /* A kernel that knows of no nodes has one. */
    if (found == 0) {
        nodes[found++] = 0;
    }
    return found;
}
