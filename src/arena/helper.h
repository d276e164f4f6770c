/*
 * The helper: a thread of the allocator that purges after a program that went
 * idle. helper.c has its states.
 *
 * The helper has no thread-local storage, calls nothing of the C library that
 * needs any, and blocks signals. It runs epoch_advance between waits. It has a
 * file table of its own and no capabilities.
 *
 * A thread that leaves the heap starts the helper. The first thread starts one
 * only if more memory may be kept with it. The helper ends after half a second
 * without work, or once the first thread is alone and keeps little. A forked
 * child has no helper. Calls that change what the process may do stop the
 * helper first (api/own_threads.h).
 */
#ifndef CALM_ARENA_HELPER_H
#define CALM_ARENA_HELPER_H

#include "arena/state.h"

/* Returns whether a thread of the allocator exists. */
bool helper_exists(const struct arenas *arenas);

/* Returns whether the option `background` allows a helper. */
bool helper_is_wanted(const struct arenas *arenas);

/* Starts the helper if its state still is the one that was seen. Returns
 * whether this call started it. Any thread may call it. */
bool helper_start(struct arenas *arenas, enum helper_state seen);

/* Holds back the start of helpers until helper_resume. Any thread may call it,
 * also in a signal handler. */
void helper_hold(void);

/*
 * Stops the helper, and holds back the start of helpers until helper_resume.
 * Any thread may call it, also in a signal handler, and in a child of vfork.
 * Returns false if a helper still exists after the timeout, because a debugger
 * stopped it, or because it waits for a thread that waits for the caller. Such
 * a helper ends as soon as it can.
 */
bool helper_stop(struct arenas *arenas, uint64_t timeout_ns);
void helper_resume(void);

/* Returns whether the arena's helper belongs to this process. In a child of
 * vfork, and in a child that was forked without the C library's handlers, the
 * helper is the parent's. */
bool helper_is_of_this_process(const struct arenas *arenas);

/* Called in a forked child, which has no helper. The child may then start a
 * helper of its own. */
void helper_forget(struct arenas *arenas);

/*
 * Called at the end of the process, when the kernel takes all its memory. If no
 * helper runs, none starts from now on, and no thread ends an epoch in its
 * place. A helper that runs continues. A signal handler may call it, whatever
 * it interrupted.
 */
void helper_end(struct arenas *arenas);

#endif
