/* Calls between vfork and exec, by a child that shares its parent's memory: see vfork.c. */
#ifndef CALM_API_VFORK_H
#define CALM_API_VFORK_H

#include <stdbool.h>

/* Once, when the mode of calm_caches is known. */
void vfork_prepare(void);

/* Whether the caller is a child of vfork. Without restartable sequences it may be one unknown. */
bool vfork_is_child(void);

#endif
