/* Functions of libraries that are loaded, also of those that dlopen loaded into a scope of their own. */
#ifndef CALM_OS_SYMBOLS_H
#define CALM_OS_SYMBOLS_H

typedef void (*any_function)(void);

/*
 * The function of that name that a loaded library defines whose file's name begins so; NULL if there is none.
 * Unlike dlopen and dlsym it allocates nothing, and static programs may have it. Any thread; waits while
 * another thread loads a library.
 */
any_function symbol_find(const char *library, const char *name);

/* The function of that name in the loaded object whose header this is; NULL if there is none, or no header.
 */
any_function symbol_in_image(const void *header, const char *name);

#endif
