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
    SLOTS = 2 * MOST_RECORDS,
    FILTER = 1 << 16,
    BEGIN_MS = 20000, /* until calm begins to look, and until it is done */
    DONE_MS = 60000,
    MOST_PATH = 512
};

static const size_t file_bytes = RECORDS_AT + MOST_RECORDS * sizeof(struct record);

/* All that follows is written under the lock; recursive, because handlers of fork may allocate while it is
 * held. */
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static struct header *_Atomic file;
static char folder_name[MOST_PATH - 64];
static size_t least_bytes;
static uint64_t own_range[2];
static uint64_t shown_bytes; /* memory, when calm last looked at a peak */

/*
 * The records themselves, and what the header counts, in memory that calm does not see: the file has a copy.
 * A child of fork has them as they were then, and so all that follows fits them, whatever its parent has
 * written into the file meanwhile.
 */
static struct record records[MOST_RECORDS];
static uint32_t used;
static uint64_t live_bytes;
static uint64_t lost;
static uint64_t serial;

/* Which record an address has: linear probing. */
static uint64_t slot_address[SLOTS];
static uint32_t slot_record[SLOTS];

/* How many addresses that live fall into each place: free() looks here first, without the lock. */
static _Atomic uint32_t filter[FILTER];

/* Records that are free again, as a stack of their numbers. */
static uint32_t free_records[MOST_RECORDS];
static uint32_t free_count;

static unsigned mappings; /* how many of the records are */

static uint64_t mixed(uint64_t address) {
    return (address >> 4) * UINT64_C(0x9e3779b97f4a7c15);
}

static _Atomic uint32_t *filter_of(uint64_t address) {
    return &filter[mixed(address) >> 48];
}

static uint32_t home_of(uint64_t address) {
    return (uint32_t)(mixed(address) >> 40) % SLOTS;
}

static struct record *records_of(struct header *header) {
    return (struct record *)((char *)header + RECORDS_AT);
}

static uint32_t find_slot(uint64_t address) {
    uint32_t at = home_of(address);
    while (slot_address[at] != 0 && slot_address[at] != address) {
        at = (at + 1) % SLOTS;
    }
    return at;
}

/* Moves up what would not be found any more with a hole before it. */
static void empty_slot(uint32_t hole) {
    for (uint32_t at = (hole + 1) % SLOTS; slot_address[at] != 0; at = (at + 1) % SLOTS) {
        uint32_t distance = (at - home_of(slot_address[at]) + SLOTS) % SLOTS;
        if (distance >= (at - hole + SLOTS) % SLOTS) {
            slot_address[hole] = slot_address[at];
            slot_record[hole] = slot_record[at];
            hole = at;
        }
    }
    slot_address[hole] = 0;
}

/* Into the file, where calm may be reading it. */
static void show_record(struct header *header, uint32_t number) {
    enum { BEGIN = offsetof(struct record, kind) };
    struct record *shown = &records_of(header)[number];
    atomic_fetch_add_explicit(&shown->sequence, 1, memory_order_acq_rel);
    atomic_thread_fence(memory_order_seq_cst);
    memcpy((char *)shown + BEGIN, (char *)&records[number] + BEGIN, sizeof *shown - BEGIN);
    atomic_fetch_add_explicit(&shown->sequence, 1, memory_order_release);
}

static void show_counts(struct header *header) {
    atomic_store_explicit(&header->used, used, memory_order_release);
    atomic_store_explicit(&header->bytes, live_bytes, memory_order_relaxed);
    atomic_store_explicit(&header->lost, lost, memory_order_relaxed);
}

static void drop(struct header *header, uint32_t slot) {
    uint32_t number = slot_record[slot];
    struct record *record = &records[number];
    atomic_fetch_sub_explicit(filter_of(slot_address[slot]), 1, memory_order_relaxed);
    live_bytes -= record->bytes;
    mappings -= record->kind == KIND_MAPPING;
    record->address = 0;
    free_records[free_count++] = number;
    empty_slot(slot);
    show_record(header, number);
    show_counts(header);
}

static void cut_one(struct header *header, struct record *record, uint64_t from, uint64_t to);

static void insert(struct header *header, enum kind kind, uint64_t address, uint64_t bytes,
                   const struct stack *stack, uint64_t order, uint64_t thread) {
    uint32_t slot = find_slot(address);
    if (slot_address[slot] != 0) {
        struct record *had = &records[slot_record[slot]];
        if (had->kind == KIND_MAPPING) {
            /* Unmapped at its front by another thread, which is about to cut it. */
            cut_one(header, had, address, address + bytes);
        } else {
            drop(header, slot);
        }
        slot = find_slot(address);
    }
    uint32_t number;
    if (free_count > 0) {
        number = free_records[--free_count];
    } else if (used < MOST_RECORDS) {
        number = used++;
    } else {
        lost++;
        show_counts(header);
        return;
    }
    slot_address[slot] = address;
    slot_record[slot] = number;
    struct record *record = &records[number];
    record->kind = (uint16_t)kind;
    record->depth = (uint16_t)stack->depth;
    memcpy(record->frames, stack->frames, stack->depth * sizeof stack->frames[0]);
    record->serial = order;
    record->thread = thread;
    record->bytes = bytes;
    record->address = address;
    mappings += kind == KIND_MAPPING;
    live_bytes += bytes;
    atomic_fetch_add_explicit(filter_of(address), 1, memory_order_relaxed);
    show_record(header, number);
    show_counts(header);
}

/* The file, if it is this process's: a child of vfork, or of a bare clone, has its parent's. */
static struct header *own_file(void) {
    struct header *header = atomic_load_explicit(&file, memory_order_acquire);
    return header != NULL && header->pid == getpid() ? header : NULL;
}

static struct header *create(void) {
    char part[MOST_PATH];
    char name[MOST_PATH];
    int pid = getpid();
    (void)snprintf(name, sizeof name, "%s/%d", folder_name, pid);
    (void)snprintf(part, sizeof part, "%s/%d.part", folder_name, pid);
    int descriptor = open(part, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (descriptor < 0) {
        return NULL;
    }
    struct header *header = MAP_FAILED;
    if (ftruncate(descriptor, (off_t)file_bytes) == 0) {
        header = (struct header *)syscall(SYS_mmap, NULL, file_bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
                                          descriptor, 0L);
    }
    (void)close(descriptor);
    if (header == MAP_FAILED) {
        (void)unlink(part);
        return NULL;
    }
    memcpy(header->magic, RECORDS_MAGIC, sizeof header->magic);
    header->record_bytes = sizeof(struct record);
    header->pid = pid;
    header->own_start = own_range[0];
    header->own_end = own_range[1];
    return header;
}

/* Lets calm see it, as it is now whole. */
static void publish(struct header *header) {
    char part[MOST_PATH];
    char name[MOST_PATH];
    (void)snprintf(name, sizeof name, "%s/%d", folder_name, header->pid);
    (void)snprintf(part, sizeof part, "%s/%d.part", folder_name, header->pid);
    if (rename(part, name) != 0) {
        atomic_store(&header->closed, 1);
    }
    atomic_store_explicit(&file, header, memory_order_release);
}

void table_open(const char *folder, size_t least, uintptr_t own_start, uintptr_t own_end) {
    int kept = errno;
    if (folder != NULL && strlen(folder) < sizeof folder_name) {
        memcpy(folder_name, folder, strlen(folder) + 1);
        least_bytes = least;
        own_range[0] = own_start;
        own_range[1] = own_end;
        struct header *header = create();
        if (header != NULL) {
            publish(header);
        }
    }
    errno = kept;
}

bool table_wants(size_t bytes) {
    return bytes >= least_bytes && atomic_load_explicit(&file, memory_order_relaxed) != NULL;
}

void table_add(enum kind kind, const void *address, size_t bytes, const struct stack *stack) {
    int kept = errno;
    struct header *header = own_file();
    if (header != NULL) {
        uint64_t thread = (uint64_t)syscall(SYS_gettid);
        pthread_mutex_lock(&lock);
        insert(header, kind, (uint64_t)(uintptr_t)address, bytes, stack, serial++, thread);
        pthread_mutex_unlock(&lock);
    }
    errno = kept;
}

bool table_may_have(const void *address) {
    return atomic_load_explicit(filter_of((uint64_t)(uintptr_t)address), memory_order_relaxed) != 0;
}

/* True once for each time that memory is about to fall from an eighth more than was ever shown. */
static bool is_peak(void) {
    if (live_bytes <= shown_bytes + shown_bytes / 8) {
        return false;
    }
    shown_bytes = live_bytes;
    return true;
}

bool table_remove(const void *address, struct record *gone) {
    int kept = errno;
    struct header *header = own_file();
    bool found = false;
    bool peak = false;
    if (header != NULL) {
        pthread_mutex_lock(&lock);
        peak = slot_address[find_slot((uint64_t)(uintptr_t)address)] != 0 && is_peak();
        pthread_mutex_unlock(&lock);
        if (peak) {
            table_show(MOMENT_PEAK);
        }
        pthread_mutex_lock(&lock);
        uint32_t slot = find_slot((uint64_t)(uintptr_t)address);
        found = slot_address[slot] != 0;
        if (found) {
            memcpy(gone, &records[slot_record[slot]], sizeof *gone);
            drop(header, slot);
        }
        pthread_mutex_unlock(&lock);
    }
    errno = kept;
    return found;
}

void table_restore(const struct record *gone) {
    struct stack stack = {.depth = gone->depth};
    memcpy(stack.frames, gone->frames, sizeof stack.frames);
    struct header *header = own_file();
    if (header != NULL) {
        pthread_mutex_lock(&lock);
        insert(header, gone->kind, gone->address, gone->bytes, &stack, gone->serial, gone->thread);
        pthread_mutex_unlock(&lock);
    }
}

/* Of a mapping, without what lies in the range: its front stays, or else its end; what remains behind a hole
 * is not kept. */
static void cut_one(struct header *header, struct record *record, uint64_t from, uint64_t to) {
    struct record had;
    memcpy(&had, record, sizeof had);
    uint64_t end = had.address + had.bytes;
    uint64_t start = had.address;
    if (start >= from) {
        start = to < end ? to : end;
    } else {
        end = from;
    }
    drop(header, find_slot(had.address));
    if (end - start >= least_bytes) {
        had.address = start;
        had.bytes = end - start;
        table_restore(&had);
    }
}

/* The next that was added before, of mappings that have something in the range; `used` if there is none. */
static uint32_t find_mapping(uint32_t number, uint64_t from, uint64_t to, uint64_t before) {
    for (unsigned left = mappings; left > 0 && number < used; number++) {
        const struct record *record = &records[number];
        if (record->address == 0 || record->kind != KIND_MAPPING) {
            continue;
        }
        left--;
        if (record->serial < before && record->address < to && record->address + record->bytes > from) {
            return number;
        }
    }
    return used;
}

uint64_t table_before_cut(const void *address, size_t bytes) {
    int kept = errno;
    uint64_t before = 0;
    if (own_file() != NULL) {
        uint64_t from = (uint64_t)(uintptr_t)address;
        pthread_mutex_lock(&lock);
        if (find_mapping(0, from, from + bytes, serial) < used) {
            before = serial;
        }
        bool peak = before != 0 && is_peak();
        pthread_mutex_unlock(&lock);
        if (peak) {
            table_show(MOMENT_PEAK);
        }
    }
    errno = kept;
    return before;
}

void table_cut(const void *address, size_t bytes, uint64_t before) {
    int kept = errno;
    struct header *header = before != 0 ? own_file() : NULL;
    if (header != NULL) {
        uint64_t from = (uint64_t)(uintptr_t)address;
        uint64_t to = from + bytes;
        pthread_mutex_lock(&lock);
        for (uint32_t number = 0; (number = find_mapping(number, from, to, before)) < used; number++) {
            cut_one(header, &records[number], from, to);
        }
        pthread_mutex_unlock(&lock);
    }
    errno = kept;
}

static int64_t now_ms(void) {
    struct timespec now = {0, 0};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Until the word has reached the number. A plain system call: no thread can be cancelled within free(). */
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
        pthread_mutex_unlock(&lock);
        return;
    }
    int kept = errno;
    /* The lock's owner was a thread of the parent. */
    pthread_mutex_t fresh = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
    memcpy(&lock, &fresh, sizeof lock);
    struct header *had = atomic_load(&file);
    if (had != NULL) {
        atomic_store(&file, NULL);
        struct header *header = create();
        if (header != NULL) {
            memcpy(records_of(header), records, used * sizeof(struct record));
            show_counts(header);
            publish(header);
        }
        (void)syscall(SYS_munmap, had, file_bytes);
    }
    errno = kept;
}
