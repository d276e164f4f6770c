/* What the kernel counts for a program and all its descendants: tracepoints and hardware events, each on its
 * own. */
#ifndef CALM_PROBE_COUNTERS_H
#define CALM_PROBE_COUNTERS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

enum counter_group {
    GROUP_TLB = 1 << 0,
    GROUP_SYSCALLS = 1 << 1,
    GROUP_HARDWARE = 1 << 2,
    GROUP_RECEIVED = 1 << 3, /* without it, interrupts received are counted where those sent cannot be */
    GROUP_ALL = GROUP_TLB | GROUP_SYSCALLS | GROUP_HARDWARE | GROUP_RECEIVED,
};

struct counter {
    const char *name;
    enum counter_group group;
    const char *tracepoint; /* "system/event"; NULL for a hardware event */
    const char *filter;     /* NULL: every event counts */
    uint32_t type;          /* hardware events only */
    uint64_t config;

    int fd;         /* -1: not counting, and reason says why */
    bool user_only; /* counts user mode alone: the kernel's part was not permitted */
    bool scaled;    /* had to share the hardware; value is an extrapolation */
    int64_t value;  /* -1: none, and reason says why */
    char reason[160];
};

/* The table of everything known. It is the one instance: counters are opened once for one program. */
extern struct counter counters[];
extern const unsigned counter_count;

/* Mounts tracefs where that is needed and permitted, and finds where it is. */
void counters_init(void);

/* Opens the groups' counters on pid, to start at its exec and to follow its descendants. Never fails as a
 * whole. */
void counters_open(pid_t pid, unsigned groups);

/* Starts them now: for calibration, where there is no exec. */
void counters_enable(void);

/* Reads what was counted, once the program has ended. */
void counters_read(void);

/* Counts one tracepoint for this process alone: for calibration. Returns the descriptor, or -1. */
int counters_open_self(const char *tracepoint);

#endif
