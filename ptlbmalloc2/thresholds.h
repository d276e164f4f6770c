/*
 * The trim threshold and the padding of each arena: what the policy (src/policy) makes of the state, what is
 * in force, and the padding claimed ahead of an arena's top. A setting by the user or the program has
 * precedence.
 */
#ifndef PTLBMALLOC2_THRESHOLDS_H
#define PTLBMALLOC2_THRESHOLDS_H

#include <stdbool.h>
#include <stddef.h>

struct arena;

/* At start-up. */
void thresholds_start(void);

/* A block of so many bytes was cleared in an arena. A few calls in many are noted, by bytes. */
void thresholds_note_calloc(size_t bytes);

/* Whether a threshold has left the band of a quarter around the one in force. */
bool thresholds_have_moved(void);

/*
 * Puts the policy's thresholds in force. May wait for the main arena in mallopt: the caller holds
 * state.busy, for which no thread waits, and no arena.
 */
void thresholds_update(void);

/*
 * Claims padding (ptlbmalloc2, section 6.2.2) once the usable top of a locked arena is less than a quarter of
 * the arena's share. Returns how much the thread may allocate before that can happen again. The main arena's
 * padding is glibc's own top_pad.
 */
size_t thresholds_claim_padding(const struct arena *arena);

#endif
