/* Shared parts of the workloads on page tables: files to map, stamped pages, CPUs and memory nodes. They
 * need only a kernel: these programs also run statically linked, as the only files of a small system. */
#ifndef CALMALLOC_WORKLOADS_PAGING_H
#define CALMALLOC_WORKLOADS_PAGING_H

#include <stdbool.h>
#include <stddef.h>

/* With which a program ends that this machine has nothing to do for, after one line that says why. */
enum { STATUS_NOT_HERE = 3 };

_Noreturn void not_here(const char *program, const char *what);

size_t page_bytes(void);

/* The pages that so many bytes are, and at least one. */
unsigned long pages_of(unsigned long bytes);

/* A file to map, of whole pages. */
struct paged_file {
    int descriptor;
    unsigned long pages;
    bool ours; /* made by this program, and so what its pages begin with is known */
};

enum contents { CONTENTS_STAMPED, CONTENTS_HOLE };

/* Opens what lies at a path, for reading only; or makes a file there, or where temporary files belong if path
 * is NULL. What it makes has no name any more when it returns: nothing is left of it, however the program
 * ends. */
struct paged_file paged_file_open(const char *program, const char *path, unsigned long pages,
                                  enum contents contents);

/* The same, for writing: ends the program if something lies there already. */
struct paged_file paged_file_make(const char *program, const char *path, unsigned long pages,
                                  enum contents contents);

/* All of it, with MAP_SHARED or MAP_PRIVATE; writable unless it is shared and not ours. */
char *paged_file_map(const char *program, const struct paged_file *file, int flags);

/* What a stamped file's page begins with. */
unsigned long long page_stamp(unsigned long page);

/* The first number of a page in memory, which other threads may use at the same time. */
static inline unsigned long long page_load(const char *page) {
    return __atomic_load_n((const unsigned long long *)page, __ATOMIC_RELAXED);
}

static inline void page_store(char *page, unsigned long long number) {
    unsigned long long *first = (unsigned long long *)page;
    __atomic_store_n(first, number, __ATOMIC_RELAXED);
}

/* Shuffles count numbers. */
void shuffle(unsigned *numbers, unsigned long count, unsigned long long seed);

/* The part of pages that one of several threads has: all are within a page of each other. */
struct part {
    unsigned long first;
    unsigned long end;
};

struct part part_of(unsigned long pages, unsigned long thread, unsigned long threads);

/* Says to the CPU that nothing is done here but waiting. */
static inline void busy_wait(void) {
#ifdef __x86_64__
    __builtin_ia32_pause();
#else
    __asm__ volatile("" ::: "memory");
#endif
}

/* The memory nodes that this process may use, at most most of them; at least one. */
unsigned long memory_nodes(unsigned *nodes, unsigned long most);

#endif
