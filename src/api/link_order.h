/*
 * The loaded objects, in the order in which the dynamic linker searches them
 * for a name. Only in the shared library for glibc. The functions call no other
 * library, and take no lock. They need none, because the objects that were
 * loaded at the start come first, and are never unloaded.
 */
#ifndef CALM_API_LINK_ORDER_H
#define CALM_API_LINK_ORDER_H

#include "os/symbols.h"

#include <link.h>
#include <stdbool.h>

/* Returns the object with this dynamic section, and sets *first to the first
 * object of its namespace. Returns NULL if no known namespace has it. */
const struct link_map *link_order_object(const ElfW(Dyn) * dynamic, const struct link_map **first);

/* Returns the function of this name in `object`, or in the next object that
 * defines it. Returns NULL if there is none. */
any_function link_order_find(const struct link_map *object, const char *name);

/* Returns the function of this name in the next object after this library that
 * defines it. Returns NULL if there is none. */
any_function link_order_next(const char *name);

/* Returns whether other objects call this library's malloc. They do if no
 * object that the dynamic linker searches earlier defines one. Exists in all
 * builds; init.c defines it where there is no such order. */
bool link_order_has_own_malloc(void) __attribute__((visibility("hidden")));

#endif
