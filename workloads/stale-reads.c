/* A test of a kernel's TLB coherence. When a system call that removed, moved or protected a page has
 * returned, no CPU may use the page's former translation. Such an access is normally invisible; here it ends
 * the program.
 *
 * Changers repeatedly unmap, move, replace, protect, copy, reclaim, merge and migrate pages, each one slot
 * (a range of pages) at a time. Meanwhile, readers on all CPUs read and write the pages. All pages are
 * stamped: words throughout a page identify its slot and its generation. So a reader that uses an old
 * translation finds an old generation, or the stamps of the frame's new owner, or no fault where there must
 * be one.
 *
 * Why there are no false alarms:
 *
 * Each slot has a sequence number, which is odd while its changer works on it. The changer makes it odd
 * before a change, followed by a full barrier. After the change, when the system call has returned and the
 * stamps are written, it publishes the new state, and makes the number even with release semantics.
 *
 * A reader loads the number (acquire), the published state, and then the word; after a full barrier, it
 * loads the number again. It ignores the word unless both numbers are equal and even. If they are, the
 * access began after the change was complete, and any effect of the next change would have come with that
 * change's odd number. So the published state was valid for the whole access, even if the thread migrated or
 * slept meanwhile.
 *
 * Only a slot's changer writes its stamps, with a generation that no other state of the slot has (within
 * 2^32 changes). Readers write marks, to separate words without stamps. So a late write, to an address that
 * is another mapping by then, does not affect what is checked: a mark identifies its reader and its
 * location.
 *
 * A reader checks only its own mark: in the page, as the kernel finds it (/proc/self/mem), between the same
 * two loads of the number. Marks increase with each write, so a file must hold a mark at least as high as
 * any that was recorded, after it had been checked, before the file was unmapped.
 *
 * While the threads run, no thread maps memory at an address that the kernel chooses, and none allocates: a
 * hole stays a hole until its changer fills it, by a call that fails if another thread has filled it.
 *
 * The kernel's own operations on a page (migration, swap, merging, huge pages) must not change what is read
 * or lose what is written, so they may happen while the published state is valid.
 *
 * A fault is a result like any other. A fault where memory is mapped is reported, too: it is not a stale
 * translation, but equally wrong.
 *
 * --plant shows that the test can fail: it makes accesses behave as if through a stale translation. */
#define _GNU_SOURCE /* memfd_create, mremap's flags */
#include "paging.h"
#include "stale.h"
#include "support.h"

#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

const char program_name[] = "stale-reads";

const char *const operation_names[] = {
    [OP_MUNMAP] = "munmap",     [OP_DONTNEED] = "dontneed", [OP_MREMAP] = "mremap",  [OP_MMAP] = "mmap",
    [OP_MPROTECT] = "mprotect", [OP_COW] = "cow",           [OP_FORK] = "fork",      [OP_FREE] = "free",
    [OP_PAGEOUT] = "pageout",   [OP_AGE] = "age",           [OP_MSYNC] = "msync",    [OP_PUNCH] = "punch",
    [OP_HUGE] = "huge",         [OP_KSM] = "ksm",           [OP_MIGRATE] = "migrate"};

static const char *const plant_names[] = {"none", "read", "write", "stray", "share", "lose", NULL};

static void *checked_map(void *got) {
    if (got == MAP_FAILED) {
        fail(program_name, "out of memory");
    }
    return got;
}

/* One reservation: homes side by side, so that slots share page tables as neighbours do, the other homes
 * behind them, and then, on their boundaries, as much as a huge page has. */
static void lay_out(struct test *test) {
    size_t home = test->slots * test->pages * test->page;
    size_t huge = MOST_PAGES * test->page;
    size_t bytes = 2 * home + (test->changers + 1) * huge;
    char *start =
        checked_map(mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    char *behind = start + 2 * home;
    behind += (huge - (uintptr_t)behind % huge) % huge;
    unsigned long all = test->slots + test->changers;
    size_t size = all * sizeof *test->all;
    test->all = checked_map(mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    for (unsigned long i = 0; i < all; i++) {
        struct slot *slot = &test->all[i];
        slot->number = (unsigned)i;
        slot->huge = i >= test->slots;
        slot->most_pages = slot->huge ? MOST_PAGES : test->pages;
        if (slot->huge) {
            slot->homes[0] = behind + (i - test->slots) * huge;
        } else {
            slot->homes[0] = start + i * test->pages * test->page;
            slot->homes[1] = slot->homes[0] + home;
            slot->landed =
                checked(calloc(2 * test->pages * MOST_READERS, sizeof *slot->landed), program_name);
        }
        for (unsigned side = 0; side < HOMES; side++) {
            slot->now[side] = (struct view){.kind = KIND_ABSENT, .writes = WRITES_FAULT, .pages = 1};
        }
        slot_open(slot);
        slot_publish(slot, 0);
    }
}

/* Both have two ranges for each slot, so far apart that the page cache has no large folio for two of them. */
static void make_files(struct test *test, const char *folder) {
    unsigned long pages = 2 * test->slots * MOST_PAGES;
    char path[4096];
    int length = snprintf(path, sizeof path, "%s/stale-reads-%ld", folder, (long)getpid());
    if (length < 0 || (size_t)length >= sizeof path) {
        reject_arguments(program_name, "--directory is too long");
    }
    int disk = paged_file_make(program_name, path, pages, CONTENTS_HOLE).descriptor;
    /* What is mapped is no hole, for which there might be no room later. */
    for (unsigned long half = 0; half < 2 * test->slots; half++) {
        off_t offset = (off_t)(half * MOST_PAGES * test->page);
        if (posix_fallocate(disk, offset, (off_t)(test->pages * test->page)) != 0) {
            fail(program_name, "there is no room for a file in --directory");
        }
    }
    test->files[BACKING_DISK_FILE] = disk;
    test->files[BACKING_MEMORY_FILE] = memfd_create(program_name, MFD_CLOEXEC);
    if (test->files[BACKING_MEMORY_FILE] >= 0 &&
        ftruncate(test->files[BACKING_MEMORY_FILE], (off_t)(pages * test->page)) != 0) {
        fail(program_name, "cannot enlarge a file in memory");
    }
}

static void find_out(struct test *test) {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) {
        fail(program_name, "cannot find out which CPUs there are");
    }
    test->cpus = (unsigned long)CPU_COUNT(&allowed);
    test->self = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
    test->clear_refs = open("/proc/self/clear_refs", O_WRONLY | O_CLOEXEC);
    test->node_count = memory_nodes(test->nodes, 2);
    find_available(test);
}

/* A list with commas, or all; what is not to be had here is left out. */
static void choose_operations(struct test *test, const char *list) {
    bool all = strcmp(list, "all") == 0;
    bool asked[OPERATIONS] = {false};
    for (const char *at = list; !all && at != NULL;) {
        size_t length = strcspn(at, ",");
        unsigned i = 0;
        while (i < OPERATIONS &&
               (strlen(operation_names[i]) != length || strncmp(operation_names[i], at, length) != 0)) {
            i++;
        }
        if (i == OPERATIONS) {
            reject_arguments(program_name, "--ops has something that is none of those --help lists");
        }
        asked[i] = true;
        at = at[length] == ',' ? at + length + 1 : NULL;
    }
    for (unsigned i = 0; i < OPERATIONS; i++) {
        if ((all || asked[i]) && test->available[i]) {
            test->operations[test->operation_count++] = (enum operation)i;
        }
    }
    bool shared =
        test->operation_count == 1 && (test->operations[0] == OP_FORK || test->operations[0] == OP_KSM);
    if (test->operation_count == 0) {
        not_here(program_name, "none of these operations is to be had here");
    }
    if (test->plant == PLANT_SHARE && !shared) {
        reject_arguments(program_name, "--plant share is for --ops fork or --ops ksm");
    }
    if (test->plant == PLANT_LOSE && (test->operation_count != 1 || test->operations[0] != OP_MSYNC)) {
        reject_arguments(program_name, "--plant lose is for --ops msync");
    }
}

static void work(unsigned long thread, void *shared) {
    struct test *test = shared;
    if (thread < test->readers) {
        read_until_over(test, thread);
    } else if (thread < test->readers + test->changers) {
        change_until_over(test, thread - test->readers);
    } else {
        sleep_seconds((double)test->seconds);
        atomic_store(&test->over, true);
    }
}

static void print_operation(const struct test *test, unsigned operation) {
    struct reader_counts read = {0};
    struct changer_counts changed = {0};
    for (unsigned long i = 0; i < test->readers; i++) {
        const struct reader_counts *counts = &test->read[i][operation];
        read.reads += counts->reads;
        read.faults += counts->faults;
        read.writes += counts->writes;
        read.writes_checked += counts->writes_checked;
    }
    for (unsigned long i = 0; i < test->changers; i++) {
        changed.count += test->changed[i][operation].count;
        changed.pages += test->changed[i][operation].pages;
    }
    printf(
        "\"%s\": {\"count\": %lu, \"pages\": %lu, \"reads\": %lu, \"writes\": %lu, \"writes_checked\": %lu, "
        "\"faults\": %lu}",
        operation_names[operation], changed.count, changed.pages, read.reads, read.writes,
        read.writes_checked, read.faults);
}

static void print(const struct test *test, double seconds) {
    unsigned long unjudged = 0;
    for (unsigned long i = 0; i < test->readers; i++) {
        unjudged += test->unjudged[i];
    }
    /* Had there been one, nothing would be printed. */
    printf(
        "{\"workload\": \"stale-reads\", \"threads\": %lu, \"changers\": %lu, \"slots\": %lu, \"pages\": "
        "%lu, "
        "\"words\": %lu, \"seed\": %lu, \"cpus\": %lu, \"seconds\": %.6f, \"stale\": 0, \"unjudged\": %lu, "
        "\"operations\": {",
        test->readers, test->changers, test->slots, test->pages, test->words, test->seed, test->cpus, seconds,
        unjudged);
    for (unsigned long i = 0; i < test->operation_count; i++) {
        printf("%s", i == 0 ? "" : ", ");
        print_operation(test, test->operations[i]);
    }
    printf("}, \"not_here\": [");
    const char *comma = "";
    for (unsigned i = 0; i < OPERATIONS; i++) {
        if (!test->available[i]) {
            printf("%s\"%s\"", comma, operation_names[i]);
            comma = ", ";
        }
    }
    printf("]}\n");
}

int main(int argc, char **argv) {
    struct test test = {
        .seconds = 10, .readers = 16, .changers = 2, .slots = 16, .pages = 40, .words = 8, .seed = 1};
    unsigned long ops = (unsigned long)"all";
    unsigned long folder = (unsigned long)"/tmp";
    unsigned long moving = 0;
    unsigned long plant = PLANT_NONE;
    const struct option_spec options[] = {
        {"seconds", "duration in seconds", OPTION_COUNT, &test.seconds, 1, 1000000, NULL},
        {"threads", "threads that read and write, each on one CPU", OPTION_COUNT, &test.readers, 1,
         MOST_READERS, NULL},
        {"changers", "threads that change mappings", OPTION_COUNT, &test.changers, 1, MOST_CHANGERS, NULL},
        {"migrate-threads", "threads that read and write migrate from CPU to CPU", OPTION_FLAG, &moving, 0, 1,
         NULL},
        {"slots", "ranges of pages; each changer works on one at a time", OPTION_COUNT, &test.slots, 1,
         MOST_SLOTS - MOST_CHANGERS, NULL},
        {"pages", "maximum pages in a slot", OPTION_COUNT, &test.pages, 1, MOST_PAGES, NULL},
        {"words", "stamped words in each page", OPTION_COUNT, &test.words, 1, MOST_WORDS, NULL},
        {"ops",
         "the changers' operations, separated by commas: munmap, dontneed, mremap, mmap, mprotect, cow, "
         "fork, free, "
         "pageout, age, msync, punch, huge, ksm, migrate",
         OPTION_TEXT, &ops, 0, 0, NULL},
        {"directory", "folder for the file, preferably on a disk", OPTION_TEXT, &folder, 0, 0, NULL},
        {"seed", "seed of the random numbers", OPTION_COUNT, &test.seed, 1, 1UL << 32, NULL},
        {"plant", "stale translation to simulate, to show that it is detected", OPTION_CHOICE, &plant, 0, 0,
         plant_names},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "Threads check the contents of pages while others change mappings.\n"
                   "Exits with 1 and one line if a stale translation was used, and with 3 if none of the\n"
                   "operations is available.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);

    if (test.slots < test.changers) {
        reject_arguments(program_name, "--slots is less than --changers");
    }
    test.moving = moving != 0;
    test.plant = (enum plant)plant;
    test.page = page_bytes();
    test.read = checked(calloc(test.readers, sizeof *test.read), program_name);
    test.unjudged = checked(calloc(test.readers, sizeof *test.unjudged), program_name);
    test.changed = checked(calloc(test.changers, sizeof *test.changed), program_name);
    make_files(&test, (const char *)folder);
    find_out(&test);
    choose_operations(&test, (const char *)ops);
    lay_out(&test);
    changers_prepare(&test);
    faults_catch();
    double seconds = run_threads(program_name, test.readers + test.changers + 1, work, &test);
    print(&test, seconds);
    return 0;
}
