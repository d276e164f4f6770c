#include <features.h>

#if defined(CALM_SHARED_LIBRARY) && defined(__GLIBC__)

#include "api/link_order.h"

#include <stddef.h>
#include <stdint.h>

/* glibc 2.35 and later link the lists of all namespaces. */
struct namespace_list {
    struct r_debug list;
    const struct namespace_list *next;
};

const struct link_map *link_order_object(const ElfW(Dyn) * dynamic, const struct link_map **first) {
    const struct namespace_list *namespace = (const void *)&_r_debug;
    while (namespace != NULL) {
        *first = namespace->list.r_map;
        for (const struct link_map *object = *first; object != NULL; object = object->l_next) {
            if (object->l_ld == dynamic) {
                return object;
            }
        }
        namespace = _r_debug.r_version > 1 ? namespace->next : NULL;
    }
    return NULL;
}

any_function link_order_find(const struct link_map *object, const char *name) {
    for (; object != NULL; object = object->l_next) {
        const ElfW(Sym) *symbol = symbols_look_up(object->l_addr, object->l_ld, name);
        if (symbol != NULL) {
            return (any_function)(uintptr_t)(object->l_addr + symbol->st_value);
        }
    }
    return NULL;
}

any_function link_order_next(const char *name) {
    const struct link_map *first;
    const struct link_map *own = link_order_object(_DYNAMIC, &first);
    if (own == NULL) {
        return symbols_find_after(_DYNAMIC, name); /* a namespace that older versions do not list */
    }
    any_function next = link_order_find(own->l_next, name);
    /* A library that was opened late comes after the C library. */
    for (const struct link_map *object = first; next == NULL && object != own; object = object->l_next) {
        const ElfW(Sym) *symbol = symbols_look_up(object->l_addr, object->l_ld, name);
        next = symbol == NULL ? NULL : (any_function)(uintptr_t)(object->l_addr + symbol->st_value);
    }
    return next;
}

bool link_order_has_own_malloc(void) {
    const struct link_map *first;
    const struct link_map *own = link_order_object(_DYNAMIC, &first);
    return own == NULL || link_order_find(first, "malloc") == link_order_find(own, "malloc");
}

#endif
