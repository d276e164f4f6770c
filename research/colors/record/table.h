/*
 * The live large blocks of this process, recorded in a file that research/colors/records.py reads at the
 * same time. Each process has a file, named by its id, in a folder that calm names: a header, and records
 * from RECORDS_AT on. All numbers are in the machine's byte order.
 *
 * All functions are thread-safe, preserve errno and never call malloc. After fork the child records its
 * blocks in a file of its own. Without a file, because none was asked for or it cannot be made, nothing is
 * recorded.
 */
#ifndef CALM_COLORS_TABLE_H
#define CALM_COLORS_TABLE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define RECORDS_FOLDER    "CALM_COLORS_RECORDS"
#define RECORDS_MIN_BYTES "CALM_COLORS_MIN_BYTES"
#define RECORDS_MAGIC     "calmcol2"
#define RECORDS_AT        4096

enum { FRAMES = 16, MAX_RECORDS = 1 << 16 };

enum kind { KIND_BLOCK = 1, KIND_MAPPING = 2 };

/* Why a sample is requested: memory is about to fall from a peak, an eighth above the last; the process ends.
 */
enum moment { MOMENT_PEAK = 1, MOMENT_EXIT = 2 };

/* A live block; free if the address is 0. The sequence is odd while the record is written. */
struct record {
    _Atomic uint32_t sequence;
    uint16_t kind;
    uint16_t depth;
    uint64_t address;
    uint64_t bytes;
    uint64_t serial; /* counts blocks */
    uint64_t thread;
    uint64_t frames[FRAMES]; /* return addresses, the innermost first */
};

struct header {
    char magic[8];
    uint32_t record_bytes;
    int32_t pid;
    _Atomic uint32_t used; /* records from here on were never written */
    _Atomic uint32_t moment;
    _Atomic uint64_t bytes; /* of all live blocks */
    _Atomic uint64_t lost;  /* blocks for which there was no room */
    /* The process requests a sample by incrementing `asked`. calm copies the number when the sample begins,
     * and when it is done. */
    _Atomic uint32_t asked;
    _Atomic uint32_t begun;
    _Atomic uint32_t done;
    _Atomic uint32_t closed; /* nothing answers */
};

/* Begins to record blocks of at least min_bytes in the folder; called once, early. */
void table_open(const char *folder, size_t min_bytes);

/* Whether blocks of this size are recorded. */
bool table_wants(size_t bytes);

/* Adds a block. Its record needs kind, address, bytes, depth and frames. */
void table_add(struct record *block);

/* Cheap, and true for all blocks that were added: whether there may be a block at the address. */
bool table_may_have(const void *address);

/*
 * Removes a block before it is freed, and copies its record for table_restore; false if there is none. At a
 * peak of memory, waits until calm has sampled the process.
 */
bool table_remove(const void *address, struct record *gone);

/* Adds a removed block again, as it was not freed after all. */
void table_restore(const struct record *gone);

/*
 * Around a call that unmaps memory or maps it anew, which ends or shortens mappings. table_before_cut waits
 * as table_remove does. table_cut, after the call has succeeded, cuts only mappings that were added before
 * it, as another thread may have been given the same addresses since; `before` is 0 if there were none.
 */
uint64_t table_before_cut(const void *address, size_t bytes);
void table_cut(const void *address, size_t bytes, uint64_t before);

/* Waits until calm has sampled the process, if it does. */
void table_show(enum moment moment);

void table_before_fork(void);
void table_after_fork(bool is_child);

#endif
