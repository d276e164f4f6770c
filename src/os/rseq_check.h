/*
 * Whether the kernel does restart an interrupted sequence (os/rseq.h). Linux
 * does. Hosts that only look like Linux may take the registration, and even
 * keep the CPU's number up to date, while the address at which they would
 * restart a thread is not the one that the program means: a translator of
 * machine code, for example, or a kernel in user space.
 */
#ifndef CALM_OS_RSEQ_CHECK_H
#define CALM_OS_RSEQ_CHECK_H

#include "os/rseq.h"

/* Returns whether a kernel of this release (uname(2)) cannot have all that was
 * found: rseq_restart_all came with 5.10, and 6.3 and later tell the size of
 * the area, which is 0 if it was not told. */
bool rseq_is_suspect(const char *release, unsigned long area_size);

/* Interrupts sequences of the calling thread by rseq_restart_all, in a bare
 * thread. Returns whether the kernel restarted each. It may have done so for
 * another reason, too: because it preempted the thread. Returns false if there
 * is no answer, for example because the kernel refuses the thread. Called at
 * the start, after rseq_can_restart returned true. */
bool rseq_is_restarted(const struct rseq_offsets *offsets);

/* Returns whether this kernel is suspect, and fails the test. */
bool rseq_is_broken(const struct rseq_offsets *offsets);

#endif
