/*
 * The file in which a process tells `calm colors` of its large blocks while it runs; calm/colors/blocks.py
 * reads it. One file for each process, named by its id, in a folder that calm gives: a header, and records
 * from RECORDS_AT on. All numbers are the machine's own.
 */
#ifndef CALM_COLORS_LAYOUT_H
#define CALM_COLORS_LAYOUT_H

#include <stdatomic.h>
#include <stdint.h>

#define RECORDS_FOLDER "CALM_COLORS_RECORDS"
#define RECORDS_LEAST  "CALM_COLORS_LEAST"
#define RECORDS_MAGIC  "calmcol1"
#define RECORDS_AT     4096

enum { FRAMES = 16, MOST_RECORDS = 1 << 16 };

enum kind { KIND_BLOCK = 1, KIND_MAPPING = 2 };

/* Why a look is asked for: memory is about to fall from an eighth more than was ever shown; the process ends.
 */
enum moment { MOMENT_PEAK = 1, MOMENT_EXIT = 2 };

/* A block that lives, or room for one (address 0). Whoever writes it makes the sequence odd for that time. */
struct record {
    _Atomic uint32_t sequence;
    uint16_t kind;
    uint16_t depth;
    _Atomic uint64_t address;
    _Atomic uint64_t bytes;
    uint64_t serial; /* the how manieth it was */
    uint64_t thread;
    uint64_t frames[FRAMES]; /* return addresses, the innermost first */
};

struct header {
    char magic[8];
    uint32_t record_bytes;
    int32_t pid;
    /* libcalmcolors.so, whose memory is not the program's: its tables are in its bss, which has no name. */
    uint64_t own_start;
    uint64_t own_end;
    _Atomic uint32_t used; /* no record beyond was ever written */
    _Atomic uint32_t moment;
    _Atomic uint64_t bytes; /* of all that live */
    _Atomic uint64_t lost;  /* blocks that found no room here */
    /* A look is asked for by counting on. calm says when it begins, and when it is done, with the same
     * number. */
    _Atomic uint32_t asked;
    _Atomic uint32_t begun;
    _Atomic uint32_t done;
    _Atomic uint32_t closed; /* nobody answers */
};

#endif
