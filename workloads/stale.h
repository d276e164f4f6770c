/* The parts of stale-reads; stale-reads.c describes what it does, and why it raises no false alarm.
 *
 * stale-slots.c: pages and their published state. stale-readers.c: threads that check the pages against it.
 * stale-changes.c: threads that change the pages by system calls. */
#ifndef CALMALLOC_WORKLOADS_STALE_H
#define CALMALLOC_WORKLOADS_STALE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

extern const char program_name[];

enum {
    MOST_READERS = 64,
    MOST_CHANGERS = 32,
    MOST_SLOTS = 2048,
    MOST_PAGES = 512,
    MOST_WORDS = 128,
    HOMES = 2
};

enum operation {
    OP_MUNMAP,
    OP_DONTNEED,
    OP_MREMAP,
    OP_MMAP,
    OP_MPROTECT,
    OP_COW,
    OP_FORK,
    OP_FREE,
    OP_PAGEOUT,
    OP_AGE,
    OP_MSYNC,
    OP_PUNCH,
    OP_HUGE,
    OP_KSM,
    OP_MIGRATE,
    OPERATIONS
};

extern const char *const operation_names[];

/* Each simulates what a kernel would do that has missed a flush, to show that it is found. */
enum plant {
    PLANT_NONE,
    PLANT_READ,  /* reads find what was there before the last change */
    PLANT_WRITE, /* writes go to where the page was before the last change */
    PLANT_STRAY, /* writes go to memory that others use by now, unnoticed by the writer */
    PLANT_SHARE, /* pages that are copied or merged behind the program's back are one for ever */
    PLANT_LOSE,  /* writes to a page that was made clean do not get to the file */
};

enum kind {
    KIND_ABSENT,  /* each access faults */
    KIND_ZERO,    /* all words are zero, but the marks */
    KIND_STAMPED, /* the words that are stamped have the generation's stamps */
    KIND_FREED,   /* each page is one of the last two, and may turn from stamped to zero at any time */
};

enum writes { WRITES_NONE, WRITES_FAULT, WRITES_LAND };

/* What is true of a home while its slot's sequence number stays as it is. */
struct view {
    enum kind kind;
    enum writes writes;
    enum operation operation; /* that made it so */
    bool same;                /* all pages have the stamps of page 0 */
    bool left;                /* absent, but was not before the last change */
    bool durable;             /* marks that have landed are recorded, and must get to the file */
    unsigned half;            /* of the slot's range of a file, which it maps */
    unsigned long pages;
    uint64_t generation;
    char *planted; /* where planted accesses go to; NULL where there are none */
};

enum backing { BACKING_ANONYMOUS, BACKING_MEMORY_FILE, BACKING_DISK_FILE, BACKINGS };

enum { VIEW_CELLS = 3 };

/* A range of pages that belongs to one changer at a time, and the place that it may move to and back from. */
struct slot {
    unsigned number;
    bool huge; /* homes[0] is a huge page's range, and the only one */
    unsigned long most_pages;
    char *homes[HOMES];
    atomic_flag taken;
    _Alignas(64) _Atomic uint64_t sequence; /* odd while a change is made */
    _Atomic uint64_t cells[HOMES][VIEW_CELLS];
    _Atomic uint64_t audience; /* the readers that may touch it, a bit for each */
    _Atomic uint64_t looked;   /* those that have, since the last change, about */
    _Atomic uint64_t window; /* where they begin, so that they come back to the same pages: a large number */

    /* Of the changer that has taken it. */
    _Alignas(64) struct view now[HOMES];
    enum backing backing;
    uint64_t generation;

    /* Of the half, page and reader: the last mark that was seen to land in a durable page, or 0. */
    _Atomic uint64_t *landed;
};

struct reader_counts {
    unsigned long reads;
    unsigned long faults;
    unsigned long writes;
    unsigned long writes_checked;
};

struct changer_counts {
    unsigned long count;
    unsigned long pages;
};

struct test {
    size_t page;
    unsigned long words; /* that are stamped, of each page */
    unsigned long pages;
    unsigned long slots; /* without the huge ones, of which each changer has one */
    unsigned long readers;
    unsigned long changers;
    unsigned long seconds;
    unsigned long seed;
    bool moving; /* readers move from CPU to CPU */
    enum plant plant;
    enum operation operations[OPERATIONS]; /* that are made */
    unsigned long operation_count;
    bool available[OPERATIONS];
    struct slot *all;                           /* the huge ones last */
    _Atomic unsigned long focus[MOST_CHANGERS]; /* the slot that each changer works on */
    atomic_bool over;
    int self;            /* /proc/self/mem, or -1 */
    int files[BACKINGS]; /* -1 where there is none */
    int clear_refs;      /* or -1 */
    unsigned nodes[2];   /* the first two */
    unsigned long node_count;
    unsigned long cpus;
    struct reader_counts (*read)[OPERATIONS];     /* by reader */
    unsigned long *unjudged;                      /* by reader: reads while a change was made */
    struct changer_counts (*changed)[OPERATIONS]; /* by changer */
};

/* stale-slots.c */

/* What a slot's page has in one of its stamped words; slots from MOST_SLOTS on are other memory. */
uint64_t stamp_of(unsigned slot, unsigned long page, unsigned long word, uint64_t generation);

/* What a reader writes to its own word of a page: rises with each count. */
uint64_t mark_of(unsigned slot, unsigned long page, unsigned long reader, uint64_t count);

/* Whether it is zero, or a mark that belongs into this word. */
bool mark_belongs(uint64_t found, unsigned slot, unsigned long page, unsigned long reader);

/* Where in a page they lie. */
size_t stamp_offset(const struct test *test, unsigned long word);
size_t mark_offset(const struct test *test, unsigned long reader);

/* Catches what accesses below cause. */
void faults_catch(void);

/* One access; false if it faulted. */
bool try_load(const char *at, uint64_t *found);
bool try_store(char *at, uint64_t number);

/* What memory holds, without the CPU's translation: the kernel looks for the page. */
bool true_load(const struct test *test, const char *at, uint64_t *found);
bool true_store(const struct test *test, char *at, uint64_t number);

/* From here on, nothing is true of the slot. */
void slot_open(struct slot *slot);

/* What its taker says now is true. */
void slot_publish(struct slot *slot, uint64_t audience);

void slot_view(const struct slot *slot, unsigned home, struct view *view);

/* Whether a stamped word is what the view says, or faults if it says so. */
bool word_right(const struct slot *slot, const struct view *view, unsigned long page, unsigned long word,
                bool there, uint64_t found);

/* One line, and the end: what is wrong, where, and what was found there. */
struct finding {
    enum operation operation;
    const char *what;
    const struct slot *slot;
    unsigned long page;
    const char *at;
    bool there;
    uint64_t found;
    char expected[64];
};

void expect(struct finding *finding, const struct view *view, unsigned long word);
void expect_number(struct finding *finding, uint64_t number);
void expect_text(struct finding *finding, const char *text);
_Noreturn void report(const struct test *test, const struct finding *finding);

/* stale-readers.c */

void read_until_over(struct test *test, unsigned long reader);

/* stale-changes.c */

/* Sets test->available, by trying. */
void find_available(struct test *test);

void change_until_over(struct test *test, unsigned long changer);

/* What changers need; before there are threads. */
void changers_prepare(struct test *test);

#endif
