/* After the benchmark "Migrate" of Amit, "Optimizing the TLB Shootdown Algorithm with Page Access Tracking":
 * a program reads a mapped file, and the file's memory is moved between memory nodes while other threads run
 * an empty loop. When a page is moved, no CPU may keep its translation, although only the readers' CPUs can
 * hold it. */
#define _GNU_SOURCE /* syscall */
#include "paging.h"
#include "support.h"

#include <limits.h>
#include <linux/mempolicy.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static const char program_name[] = "migrate";

enum call { CALL_MIGRATE_PAGES, CALL_MOVE_PAGES };
enum again { AGAIN_NONE, AGAIN_READ, AGAIN_MAP };

static const char *const call_names[] = {"migrate_pages", "move_pages", NULL};
static const char *const again_names[] = {"none", "read", "map", NULL};

enum { MOST_NODES = 64, AT_ONCE = 512 };

struct migration {
    struct paged_file file;
    unsigned long rounds;
    unsigned long readers;
    enum call call;
    enum again again;
    bool pin;
    unsigned nodes[MOST_NODES];
    unsigned long node_count;
    char *memory;
    /* How often readers were asked to read, and how often one of them has. Who waits for the mover never
     * sleeps: a CPU that sleeps needs no shootdown. */
    atomic_ulong asked;
    atomic_ulong answered;
    atomic_bool over;
    unsigned long moved;
    double moving_s;
};

static void read_part(const struct migration *migration, unsigned long reader) {
    struct part part = part_of(migration->file.pages, reader, migration->readers);
    for (unsigned long i = part.first; i < part.end; i++) {
        unsigned long long found = page_load(migration->memory + i * page_bytes());
        if (migration->file.ours && found != page_stamp(i)) {
            fail(program_name, "a page does not hold what the file does");
        }
    }
}

/* The nodes that pages lie on, without touching them; what is not there is nowhere. */
static void nodes_of(const struct migration *migration, unsigned long first, unsigned long count,
                     int *on_nodes) {
    void *pages[AT_ONCE];
    for (unsigned long i = 0; i < count; i++) {
        pages[i] = migration->memory + (first + i) * page_bytes();
    }
    if (syscall(SYS_move_pages, 0, count, pages, NULL, on_nodes, 0) < 0) {
        fail(program_name, "move_pages does not say where pages are");
    }
}

static unsigned long pages_on(const struct migration *migration, unsigned node) {
    unsigned long found = 0;
    for (unsigned long first = 0; first < migration->file.pages; first += AT_ONCE) {
        unsigned long left = migration->file.pages - first;
        unsigned long count = left < AT_ONCE ? left : AT_ONCE;
        int on_nodes[AT_ONCE];
        nodes_of(migration, first, count, on_nodes);
        for (unsigned long i = 0; i < count; i++) {
            found += on_nodes[i] == (int)node;
        }
    }
    return found;
}

/* What the tool migratepages asks for: all memory of this process, from all other nodes. */
static void migrate_all(const struct migration *migration, unsigned node) {
    enum { BITS = sizeof(unsigned long) * CHAR_BIT };
    unsigned long from[MOST_NODES / BITS + 1] = {0};
    unsigned long to[MOST_NODES / BITS + 1] = {0};
    for (unsigned long i = 0; i < migration->node_count; i++) {
        unsigned one = migration->nodes[i];
        (one == node ? to : from)[one / BITS] |= 1UL << one % BITS;
    }
    if (syscall(SYS_migrate_pages, 0, (unsigned long)MOST_NODES + 1, from, to) < 0) {
        fail(program_name, "migrate_pages refused");
    }
}

static void move_each(const struct migration *migration, unsigned node) {
    for (unsigned long first = 0; first < migration->file.pages; first += AT_ONCE) {
        void *pages[AT_ONCE];
        int targets[AT_ONCE];
        int status[AT_ONCE];
        unsigned long count = 0;
        for (; count < AT_ONCE && first + count < migration->file.pages; count++) {
            pages[count] = migration->memory + (first + count) * page_bytes();
            targets[count] = (int)node;
        }
        /* A number above zero is of pages that could not be moved: they are counted as what they are. */
        if (syscall(SYS_move_pages, 0, count, pages, targets, status, MPOL_MF_MOVE) < 0) {
            fail(program_name, "move_pages refused");
        }
    }
}

/* The node after that where most pages are. */
static unsigned next_node(const struct migration *migration) {
    unsigned long most = 0;
    unsigned long at = 0;
    for (unsigned long i = 0; i < migration->node_count; i++) {
        unsigned long pages = pages_on(migration, migration->nodes[i]);
        at = pages > most ? i : at;
        most = pages > most ? pages : most;
    }
    return migration->nodes[at + 1 < migration->node_count ? at + 1 : 0];
}

static void move_round(struct migration *migration) {
    unsigned node = next_node(migration);
    unsigned long before = pages_on(migration, node);
    double begin = now_seconds();
    if (migration->call == CALL_MIGRATE_PAGES) {
        migrate_all(migration, node);
    } else {
        move_each(migration, node);
    }
    migration->moving_s += now_seconds() - begin;
    unsigned long after = pages_on(migration, node);
    migration->moved += after > before ? after - before : 0;
}

static void have_it_read(struct migration *migration) {
    unsigned long times = atomic_fetch_add(&migration->asked, 1) + 1;
    while (atomic_load(&migration->answered) < times * migration->readers) {
        sleep_seconds(1e-4);
    }
}

static void move(struct migration *migration) {
    for (unsigned long round = 0; round < migration->rounds; round++) {
        if (round > 0 && migration->again == AGAIN_MAP) {
            (void)munmap(migration->memory, migration->file.pages * page_bytes());
            migration->memory = paged_file_map(program_name, &migration->file, MAP_SHARED);
        }
        if (round == 0 || migration->again != AGAIN_NONE) {
            have_it_read(migration);
        }
        move_round(migration);
    }
    atomic_store(&migration->over, true);
}

static void work(unsigned long thread, void *shared) {
    struct migration *migration = shared;
    if (migration->pin) {
        pin_thread(program_name, thread);
    }
    if (thread == 0) {
        move(migration);
        return;
    }
    bool reader = thread <= migration->readers;
    unsigned long answers = 0;
    while (!atomic_load_explicit(&migration->over, memory_order_relaxed)) {
        if (reader && answers < atomic_load_explicit(&migration->asked, memory_order_acquire)) {
            read_part(migration, thread - 1);
            answers++;
            (void)atomic_fetch_add(&migration->answered, 1);
        }
        busy_wait();
    }
}

int main(int argc, char **argv) {
    unsigned long path = 0;
    unsigned long size = 64UL << 20;
    unsigned long threads = 14;
    unsigned long readers = 1;
    unsigned long rounds = 2;
    unsigned long call = CALL_MIGRATE_PAGES;
    unsigned long again = AGAIN_NONE;
    unsigned long pin = 0;
    const struct option_spec options[] = {
        {"file", "file to map, created and filled if missing (default: a temporary file)", OPTION_PATH, &path,
         0, 0, NULL},
        {"size", "the file's size in bytes", OPTION_COUNT, &size, 1, 1UL << 40, NULL},
        {"threads", "threads that run an empty loop", OPTION_COUNT, &threads, 1, 4096, NULL},
        {"readers", "threads that each read a part of the file, and then also run the loop", OPTION_COUNT,
         &readers, 1, 4096, NULL},
        {"rounds", "times that the memory is moved from node to node", OPTION_COUNT, &rounds, 1, 1000000,
         NULL},
        {"call", "system call that moves it", OPTION_CHOICE, &call, 0, 0, call_names},
        {"again", "what readers do before each further round: nothing, read again, or read a fresh mapping",
         OPTION_CHOICE, &again, 0, 0, again_names},
        {"pin", "each thread stays on one CPU", OPTION_FLAG, &pin, 0, 1, NULL},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "Moves the memory of a mapped file between memory nodes while threads are busy.\n"
                   "Exits with 3 if there is only one node.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);

    struct migration migration = {.rounds = rounds,
                                  .readers = readers,
                                  .call = (enum call)call,
                                  .again = (enum again)again,
                                  .pin = pin != 0};
    migration.node_count = memory_nodes(migration.nodes, MOST_NODES);
    if (migration.node_count < 2) {
        not_here(program_name, "there is one memory node here: nothing can move");
    }
    migration.file = paged_file_open(program_name, (const char *)path, pages_of(size), CONTENTS_STAMPED);
    migration.memory = paged_file_map(program_name, &migration.file, MAP_SHARED);
    double seconds = run_threads(program_name, 1 + readers + threads, work, &migration);
    if (migration.moved == 0) {
        fail(program_name, "no page moved: this file's pages cannot, or other nodes have no room");
    }
    printf("{\"workload\": \"migrate\", \"size\": %lu, \"threads\": %lu, \"readers\": %lu, \"rounds\": %lu, "
           "\"call\": \"%s\", \"again\": \"%s\", \"nodes\": %lu, \"pages\": %lu, \"pages_moved\": %lu, "
           "\"seconds\": %.6f, \"moving_seconds\": %.6f}\n",
           size, threads, readers, rounds, call_names[call], again_names[again], migration.node_count,
           migration.file.pages, migration.moved, seconds, migration.moving_s);
    (void)munmap(migration.memory, migration.file.pages * page_bytes());
    (void)close(migration.file.descriptor);
    return 0;
}
