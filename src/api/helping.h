/*
 * The threads of ours, around what changes what the process may do. No thread of ours runs from the return of
 * helping_stop to helping_resume; one that was started before would keep what the program gives up. Any
 * thread, also in a signal handler and in a child of vfork. Preserves errno.
 */
#ifndef CALM_API_HELPING_H
#define CALM_API_HELPING_H

#include <stdbool.h>

/* What helping_resume is to be told. */
bool helping_stop(void);
void helping_resume(bool stopped);

#endif
