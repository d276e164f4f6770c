/*
 * The loaded objects in the order in which the dynamic linker looks for a name. In the shared library for
 * glibc only. Calls nothing, and takes no lock: what was loaded at the start comes first, and is never
 * unloaded.
 */
#ifndef CALM_API_LINK_ORDER_H
#define CALM_API_LINK_ORDER_H

#include "os/symbols.h"

#include <link.h>
#include <stdbool.h>

/* The object with this dynamic section; *first is the first of its namespace. NULL if it is in none that is
 * known. */
const struct link_map *link_order_object(const ElfW(Dyn) * dynamic, const struct link_map **first);

/* What an object, or the next after it that defines a name, has under it. NULL if there is none. */
any_function link_order_find(const struct link_map *object, const char *name);

/* Whether the malloc that other objects call is this library's: no object that comes before defines one.
 * Everywhere: init.c has one for where there is no such order. */
bool link_order_has_own_malloc(void) __attribute__((visibility("hidden")));

#endif
