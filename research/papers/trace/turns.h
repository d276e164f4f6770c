/* One thread of the traced program runs at a time, for a quantum of instructions, and then the next one that
 * can: so a machine of few CPUs shows how threads meet that have a CPU each. Called by the plugin alone.
 *
 * A thread in a system call has no turn. One whose turn makes no progress for 20 ms (QEMU itself
 * may hold it back until the waiting ones have left their code) loses it; so a turn orders the threads, and
 * protects nothing. */
#ifndef CALM_TRACE_TURNS_H
#define CALM_TRACE_TURNS_H

#include <stdbool.h>
#include <stdint.h>

enum { TURNS_THREADS = 128 };

/* Whether it is this thread's turn. */
bool turns_mine(unsigned thread);

/* Waits for it. */
void turns_take(unsigned thread);

/* To be told now and then by the thread whose turn it is. */
void turns_progress(void);

/* Ends this thread's turn, if it has one; the next one that waits has it then. */
void turns_pass(unsigned thread);

/* Turns that were lost. */
uint64_t turns_lost(void);

#endif
