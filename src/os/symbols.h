/*
 * Functions of loaded libraries, also of those that dlopen loaded into a scope of their own. Called to find
 * C++'s new handler, the kernel's vDSO functions, and what this library's own functions stand before.
 *
 * Unlike dlopen and dlsym, these allocate nothing and are available to static programs. Any thread.
 */
#ifndef CALM_OS_SYMBOLS_H
#define CALM_OS_SYMBOLS_H

#include <link.h>
#include <stdbool.h>

typedef void (*any_function)(void);

/* The function that a loaded library defines; the library's file name begins with `library`. NULL if there is
 * none. Waits while another thread loads a library. */
any_function symbols_find(const char *library, const char *name);

/* The function in the loaded object with this ELF header; NULL if there is none, or no header. */
any_function symbols_find_in_image(const void *header, const char *name);

/* Not strcmp, which a sanitizer may have replaced and not yet be ready for. */
static inline bool symbols_same_name(const char *name, const char *other) {
    while (*name != '\0' && *name == *other) {
        name++, other++;
    }
    return *name == *other;
}

/* What the object that was loaded at base, with this dynamic section, defines; NULL if there is none.
 * Calls nothing. */
const ElfW(Sym) * symbols_look_up(ElfW(Addr) base, const ElfW(Dyn) * dynamic, const char *name);

/* The function that the first library defines which was loaded after the one with this dynamic section. NULL
 * if there is none. Waits while another thread loads a library. */
any_function symbols_find_after(const ElfW(Dyn) * dynamic, const char *name);

#endif
