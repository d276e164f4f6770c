/* Where the dynamic linker finds malloc. In the shared library for glibc only; elsewhere it is always here.
 */
#ifndef CALM_API_LOADER_H
#define CALM_API_LOADER_H

#include <stdbool.h>

/* Whether the malloc that other objects call is this library's: no object defines one that comes before it.
 * Calls nothing, and takes no lock. */
bool loader_finds_own_malloc(void) __attribute__((weak, visibility("hidden")));

#endif
