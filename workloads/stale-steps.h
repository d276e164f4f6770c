/* Changers of stale-reads, and the steps of their operations. */
#ifndef CALMALLOC_WORKLOADS_STALE_STEPS_H
#define CALMALLOC_WORKLOADS_STALE_STEPS_H

#include "stale.h"

#include <sys/types.h>

/* More than a kernel flushes one by one (33 on x86). */
enum { FLUSHED_PAGES = 64 };

/* What a forked child and its parent share. */
struct family {
    atomic_uint phase;
    struct finding finding; /* if what is not NULL */
};

struct changer {
    struct test *test;
    unsigned long number;
    unsigned long long random;
    struct slot *slot;
    enum operation operation;
    uint64_t audience;
    struct view before[HOMES]; /* the change that is being made */
    struct changer_counts *counts;
    char *planted[HOMES];
    /* Memory that is taken when a slot's is given up. */
    char *taken;
    unsigned long taken_pages;
    uint64_t taken_generation;
    enum operation taken_by;
    char *flushed;
    struct family *family;
    uint64_t *records;
    char *buffer;
};

/* Once in so many times. */
bool chance(struct changer *changer, unsigned long one_in);

size_t bytes_of(const struct changer *changer, unsigned long pages);
char *page_at(const struct changer *changer, unsigned home, unsigned long page);
uint64_t load_at(const char *at);
void put_stamps(const struct changer *changer, char *page, unsigned slot, unsigned long number,
                uint64_t generation);

/* Ends the program: a call failed that must not. */
_Noreturn void refused(const char *call);

/* mmap of readable and writable memory that gets the address it asks for. */
void *mapped(char *at, size_t bytes, int flags, int descriptor, off_t offset);

/* Steps. Between open_slot and settle nothing is true of the slot; what is afterwards, its views say. */

void open_slot(struct changer *changer);
void settle(struct changer *changer);

/* After something that must not show: what was true is, and all may look at it anew. */
void look_again(struct changer *changer);

/* At an operation's start: who may touch the slot, and an end to what was taken in the last one. */
void choose_readers(struct changer *changer);
void give_up_taken(struct changer *changer);

/* Stamps all pages of a home that is mapped and writable. */
void stamp(struct changer *changer, unsigned home);

/* A step by itself. */
void stamp_anew(struct changer *changer);

/* Few pages as often as many. */
unsigned long some_pages(struct changer *changer);

/* What readers wrote must lie where they wrote it: a mark elsewhere has come through a stale translation. */
void check_marks(struct changer *changer, unsigned home);

/* madvise of all pages of a home, in one call or in two. */
bool advise(struct changer *changer, unsigned home, int advice);
void advise_or_fail(struct changer *changer, unsigned home, int advice, const char *call);

void unmap(struct changer *changer, unsigned home);

/* Anonymous memory of as many pages as the view says, over what is there; or into a hole, where nothing may
 * be: nobody else maps anything while threads run, and if somebody did, that must not be taken for a stale
 * page. */
void map_anonymous(struct changer *changer, unsigned home, bool hole);

/* Steps by themselves: fresh anonymous memory, stamped or not; and stamped memory, fresh or the slot's, with
 * all that has happened to it. */
void renew(struct changer *changer);
void have_stamped(struct changer *changer);

/* Opens the slot, and maps the half of its range of a file that was not mapped, so stamped that no CPU has
 * its translation. */
void map_file(struct changer *changer, enum backing backing, bool shared);

/* One of the files that there are. */
enum backing some_file(struct changer *changer);

off_t file_offset(const struct changer *changer, unsigned half, unsigned long page);

/* Into the changer's buffer. */
void read_page(const struct changer *changer, int descriptor, off_t offset);

/* Of the first home. */
unsigned long pages_not_there(struct changer *changer);

/* stale-operations.c, stale-fork.c: what changers do. Each returns the pages on which it was seen to take
 * effect. */

extern unsigned long (*const change[])(struct changer *changer);

unsigned long change_fork(struct changer *changer);

#endif
