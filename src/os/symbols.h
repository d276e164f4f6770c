/*
 * Functions of loaded libraries, also of those that dlopen loaded into a scope of their own. Called to find
 * C++'s new handler and the kernel's vDSO functions.
 *
 * Unlike dlopen and dlsym, these allocate nothing and are available to static programs. Any thread.
 */
#ifndef CALM_OS_SYMBOLS_H
#define CALM_OS_SYMBOLS_H

typedef void (*any_function)(void);

/* The function that a loaded library defines; the library's file name begins with `library`. NULL if there is
 * none. Waits while another thread loads a library. */
any_function symbols_find(const char *library, const char *name);

/* The function in the loaded object with this ELF header; NULL if there is none, or no header. */
any_function symbols_find_in_image(const void *header, const char *name);

#endif
