/*
 * Functions of loaded libraries, including libraries that dlopen loaded into a
 * scope of their own. The callers find C++'s new handler, the functions of the
 * kernel's vDSO, and the functions that this library's own functions hide.
 *
 * Unlike dlopen and dlsym, these functions allocate nothing, and static
 * programs have them. Any thread may call them.
 */
#ifndef CALM_OS_SYMBOLS_H
#define CALM_OS_SYMBOLS_H

#include <link.h>
#include <stdbool.h>

typedef void (*any_function)(void);

/* Returns the function that a loaded library defines; the name of the library's
 * file begins with `library`. Returns NULL if there is none. Waits while
 * another thread loads a library. */
any_function symbols_find(const char *library, const char *name);

/* Returns the function in the loaded object with this ELF header. Returns NULL
 * if there is none, or if the header is NULL. */
any_function symbols_find_in_image(const void *header, const char *name);

/* Compares names. A sanitizer may have replaced strcmp, and its replacement may
 * not be ready yet. */
static inline bool symbols_same_name(const char *name, const char *other) {
    while (*name != '\0' && *name == *other) {
        name++, other++;
    }
    return *name == *other;
}

/* Returns the symbol that the object with this dynamic section, loaded at
 * `base`, defines. Returns NULL if there is none. Calls no other library. */
const ElfW(Sym) * symbols_look_up(ElfW(Addr) base, const ElfW(Dyn) * dynamic, const char *name);

/* Returns the function of the first library that defines it, among the
 * libraries that were loaded after the one with this dynamic section. Returns
 * NULL if there is none. Waits while another thread loads a library. */
any_function symbols_find_after(const ElfW(Dyn) * dynamic, const char *name);

#endif
