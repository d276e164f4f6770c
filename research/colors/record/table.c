#include "table.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    BUCKET_BITS = 16,
    BEGIN_MS = 20000, /* until a sample begins, and until it is done */
    DONE_MS = 60000,
    MAX_PATH = 512,
    TABLES_AT = 1 << 24, /* in the file, behind its records */
    TABLES_ALIGNMENT = 1 << 16
};

static const size_t file_bytes = RECORDS_AT + MAX_RECORDS * sizeof(struct record);

/* Protects all that follows; recursive, because handlers of fork may allocate while it is held. */
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static struct header *_Atomic file;
static char folder_name[MAX_PATH - 64];
static size_t min_block_bytes;
static uint64_t peak_bytes; /* live_bytes at the last sample of a peak */

/*
 * The records in private memory; the file has a copy. A child of fork gets them as they were at that moment,
 * whatever its parent writes to the file meanwhile. Chains of records by their hashed addresses, and of free
 * ones, are numbers of records plus 1; 0 ends a chain. Buckets are read without the lock by table_may_have.
 * All of it is a private mapping of the file, whose name tells calm that it is not the program's memory.
 */
static _Alignas(TABLES_ALIGNMENT) struct {
    struct record records[MAX_RECORDS];
    _Atomic uint32_t buckets[1 << BUCKET_BITS];
    _Atomic uint32_t next[MAX_RECORDS];
} tables;

/* The same of the counts of the header. */
static uint32_t used;
static uint64_t live_bytes;
static uint64_t lost;
static uint64_t serial;
static unsigned mappings; /* the number of records of mappings */
static uint32_t free_records;

static _Atomic uint32_t *bucket_of(uint64_t address) {
    return &tables.buckets[(address >> 4) * UINT64_C(0x9e3779b97f4a7c15) >> (64 - BUCKET_BITS)];
}

static struct record *find(uint64_t address) {
    uint32_t number = *bucket_of(address);
    while (number != 0 && tables.records[number - 1].address != address) {
        number = tables.next[number - 1];
    }
    return number != 0 ? &tables.records[number - 1] : NULL;
}

/* Copies a record to the file, where calm may be reading it. */
static void show_record(struct header *header, const struct record *record) {
    enum { BEGIN = offsetof(struct record, kind) };
    struct record *shown = (struct record *)((char *)header + RECORDS_AT) + (record - tables.records);
    atomic_fetch_add_explicit(&shown->sequence, 1, memory_order_acq_rel);
    atomic_thread_fence(memory_order_seq_cst);
    memcpy((char *)shown + BEGIN, (const char *)record + BEGIN, sizeof *shown - BEGIN);
    atomic_fetch_add_explicit(&shown->sequence, 1, memory_order_release);
}

static void show_counts(struct header *header) {
    header->used = used;
    header->bytes = live_bytes;
    header->lost = lost;
}

static void drop(struct header *header, struct record *record) {
    uint32_t number = (uint32_t)(record - tables.records) + 1;
    _Atomic uint32_t *link = bucket_of(record->address);
    while (*link != number) {
        link = &tables.next[*link - 1];
    }
    *link = tables.next[number - 1];
    tables.next[number - 1] = free_records;
    free_records = number;
    live_bytes -= record->bytes;
    mappings -= record->kind == KIND_MAPPING;
    record->address = 0;
    show_record(header, record);
    show_counts(header);
}

static void cut_one(struct header *header, struct record *record, uint64_t from, uint64_t to);

static void insert(struct header *header, const struct record *block) {
    struct record *had = find(block->address);
    if (had != NULL && had->kind == KIND_MAPPING) {
        /* Another thread has unmapped its front, and is about to cut it. */
        cut_one(header, had, block->address, block->address + block->bytes);
    } else if (had != NULL) {
        drop(header, had);
    }
    uint32_t number = free_records;
    if (number != 0) {
        free_records = tables.next[number - 1];
    } else if (used < MAX_RECORDS) {
        number = ++used;
    } else {
        lost++;
        show_counts(header);
        return;
    }
    _Atomic uint32_t *head = bucket_of(block->address);
    memcpy(&tables.records[number - 1], block, sizeof *block);
    tables.next[number - 1] = *head;
    *head = number;
    mappings += block->kind == KIND_MAPPING;
    live_bytes += block->bytes;
    show_record(header, &tables.records[number - 1]);
    show_counts(header);
}

/* Cuts the range from a mapping: what precedes it stays, or else what follows. The end behind a hole is
 * dropped. */
static void cut_one(struct header *header, struct record *record, uint64_t from, uint64_t to) {
    struct record rest;
    memcpy(&rest, record, sizeof rest);
    uint64_t end = rest.address + rest.bytes;
    if (rest.address < from) {
        end = from;
    } else {
        rest.address = to < end ? to : end;
    }
    rest.bytes = end - rest.address;
    drop(header, record);
    if (rest.bytes >= min_block_bytes) {
        insert(header, &rest);
    }
}

/* The file, if it is this process's: a child of vfork, or of a bare clone, has its parent's. */
static struct header *own_file(void) {
    struct header *header = atomic_load_explicit(&file, memory_order_acquire);
    return header != NULL && header->pid == getpid() ? header : NULL;
}

/* Locks the table, unless the file is not this process's. */
static struct header *enter(void) {
    struct header *header = own_file();
    if (header != NULL) {
        pthread_mutex_lock(&lock);
    }
    return header;
}

static void leave(void) {
    pthread_mutex_unlock(&lock);
}

/* Makes the file of this process with all records, and then lets calm see it. */
static void create(void) {
    char part[MAX_PATH];
    char name[MAX_PATH];
    int pid = getpid();
    (void)snprintf(name, sizeof name, "%s/%d", folder_name, pid);
    (void)snprintf(part, sizeof part, "%s/%d.part", folder_name, pid);
    int descriptor = open(part, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (descriptor < 0) {
        return;
    }
    struct header *header = MAP_FAILED;
    if (ftruncate(descriptor, TABLES_AT + (off_t)sizeof tables) == 0) {
        const long rights = PROT_READ | PROT_WRITE;
        header = (struct header *)syscall(SYS_mmap, NULL, file_bytes, rights, MAP_SHARED, descriptor, 0L);
        /* A child of fork keeps its parent's, unless that is empty. */
        if (header != MAP_FAILED && used == 0) {
            (void)syscall(SYS_mmap, &tables, sizeof tables, rights, MAP_PRIVATE | MAP_FIXED, descriptor,
                          (long)TABLES_AT);
        }
    }
    (void)close(descriptor);
    if (header == MAP_FAILED) {
        (void)unlink(part);
        return;
    }
    memcpy(header->magic, RECORDS_MAGIC, sizeof header->magic);
    header->record_bytes = sizeof(struct record);
    header->pid = pid;
    for (uint32_t number = 0; number < used; number++) {
        show_record(header, &tables.records[number]);
    }
    show_counts(header);
    if (rename(part, name) != 0) {
        atomic_store(&header->closed, 1);
    }
    atomic_store_explicit(&file, header, memory_order_release);
}

void table_open(const char *folder, size_t min_bytes) {
    int kept = errno;
    if (strlen(folder) < sizeof folder_name) {
        memcpy(folder_name, folder, strlen(folder) + 1);
        min_block_bytes = min_bytes;
        create();
    }
    errno = kept;
}

bool table_wants(size_t bytes) {
    return bytes >= min_block_bytes && atomic_load_explicit(&file, memory_order_relaxed) != NULL;
}

void table_add(struct record *block) {
    struct header *header = enter();
    if (header != NULL) {
        block->thread = (uint64_t)syscall(SYS_gettid);
        block->serial = serial++;
        insert(header, block);
        leave();
    }
}

bool table_may_have(const void *address) {
    return atomic_load_explicit(bucket_of((uint64_t)(uintptr_t)address), memory_order_relaxed) != 0;
}

/* True once for each peak: memory is an eighth more than at the last sample of one. */
static bool is_peak(void) {
    if (live_bytes <= peak_bytes + peak_bytes / 8) {
        return false;
    }
    peak_bytes = live_bytes;
    return true;
}

bool table_remove(const void *address, struct record *gone) {
    struct header *header = enter();
    if (header == NULL) {
        return false;
    }
    struct record *found = find((uint64_t)(uintptr_t)address);
    if (found != NULL && is_peak()) {
        leave();
        table_show(MOMENT_PEAK);
        pthread_mutex_lock(&lock);
        found = find((uint64_t)(uintptr_t)address);
    }
    if (found != NULL) {
        memcpy(gone, found, sizeof *gone);
        drop(header, found);
    }
    leave();
    return found != NULL;
}

void table_restore(const struct record *gone) {
    struct header *header = enter();
    if (header != NULL) {
        insert(header, gone);
        leave();
    }
}

/* The next mapping from a number on that was added before, and overlaps the range; NULL if there is none. */
static struct record *find_mapping(uint32_t number, uint64_t from, uint64_t to, uint64_t before) {
    for (unsigned left = mappings; left > 0 && number < used; number++) {
        struct record *record = &tables.records[number];
        if (record->address == 0 || record->kind != KIND_MAPPING) {
            continue;
        }
        left--;
        if (record->serial < before && record->address < to && record->address + record->bytes > from) {
            return record;
        }
    }
    return NULL;
}

uint64_t table_before_cut(const void *address, size_t bytes) {
    uint64_t from = (uint64_t)(uintptr_t)address;
    if (enter() == NULL) {
        return 0;
    }
    uint64_t before = find_mapping(0, from, from + bytes, serial) != NULL ? serial : 0;
    bool peak = before != 0 && is_peak();
    leave();
    if (peak) {
        table_show(MOMENT_PEAK);
    }
    return before;
}

void table_cut(const void *address, size_t bytes, uint64_t before) {
    uint64_t from = (uint64_t)(uintptr_t)address;
    struct header *header = before != 0 ? enter() : NULL;
    if (header != NULL) {
        struct record *record = tables.records;
        while ((record = find_mapping((uint32_t)(record - tables.records), from, from + bytes, before)) !=
               NULL) {
            cut_one(header, record, from, from + bytes);
        }
        leave();
    }
}

static int64_t now_ms(void) {
    struct timespec now = {0, 0};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Waits until the word reaches the number. By plain system calls: free() is no cancellation point. */
static bool wait_for(struct header *header, _Atomic uint32_t *word, uint32_t number, int limit_ms) {
    int64_t until = now_ms() + limit_ms;
    while ((int32_t)(atomic_load(word) - number) < 0) {
        if (atomic_load(&header->closed) != 0 || now_ms() > until) {
            return false;
        }
        struct timespec pause = {0, 1000000};
        (void)syscall(SYS_nanosleep, &pause, NULL);
    }
    return true;
}

void table_show(enum moment moment) {
    int kept = errno;
    struct header *header = own_file();
    if (header != NULL && atomic_load(&header->closed) == 0) {
        atomic_store(&header->moment, (uint32_t)moment);
        uint32_t number = atomic_fetch_add(&header->asked, 1) + 1;
        if (!wait_for(header, &header->begun, number, BEGIN_MS) ||
            !wait_for(header, &header->done, number, DONE_MS)) {
            atomic_store(&header->closed, 1);
        }
    }
    errno = kept;
}

void table_before_fork(void) {
    pthread_mutex_lock(&lock);
}

void table_after_fork(bool is_child) {
    if (!is_child) {
        leave();
        return;
    }
    int kept = errno;
    /* The owner of the lock is a thread of the parent. */
    pthread_mutex_t fresh = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
    memcpy(&lock, &fresh, sizeof lock);
    struct header *had = atomic_load(&file);
    if (had != NULL) {
        atomic_store(&file, NULL);
        create();
        (void)syscall(SYS_munmap, had, file_bytes);
    }
    errno = kept;
}
