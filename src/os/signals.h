/*
 * The signals that the calling thread blocks.
 */
#ifndef CALM_OS_SIGNALS_H
#define CALM_OS_SIGNALS_H

#include <stdint.h>

/*
 * Blocks all signals but one for the calling thread. By the remaining signal,
 * setuid(2) and its relatives make each thread change its credentials. The
 * thread that sends this signal waits for all other threads, and may hold a
 * lock that the caller is about to wait for. Returns the previous mask, for
 * thread_set_signals.
 */
uint64_t thread_block_signals(void);
uint64_t thread_set_signals(uint64_t mask);

#endif
