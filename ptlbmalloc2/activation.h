/*
 * Whether the library governs glibc: from its start, if nothing stands against it and glibc is proved, until
 * it meets something that it does not know. From then on all is left to glibc, with glibc's default settings.
 */
#ifndef PTLBMALLOC2_ACTIVATION_H
#define PTLBMALLOC2_ACTIVATION_H

#include <stdatomic.h>
#include <stdbool.h>

struct arena;

/* Published as counter `state`. */
enum activation { ACTIVATION_PENDING, ACTIVATION_ON, ACTIVATION_OFF };
extern _Atomic(int) activation;

/* Stands for every arena while nothing is governed: its top never moves. */
extern struct arena *const no_arena;

/* What the free path may read without a call. */
extern struct governed {
    struct arena *_Atomic main_arena;
    _Atomic(bool) heaps_proved; /* the heaps of blocks from other arenas may be looked up */
} governed;

/* Proves glibc, and takes over trimming unless something stands against it. At most once. */
bool activation_start(void);

/* Thread-safe. */
bool activation_is_on(void);

/* Thread-safe. The caller holds no arena. */
void activation_end(const char *why_not);

/* Why it is not on: constant text. */
extern const char *activation_why_not;

#endif
