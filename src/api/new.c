/*
 * C++'s operators new and delete under their mangled names (Itanium C++ ABI): a C++
 * compiler is not needed to build the library, and a program that is not C++ needs no C++ library.
 *
 * new throws by way of the program's own C++ library, which then is surely there: the names are weak. It may
 * have come too late for them, or in a scope of its own, by dlopen: then it is asked for by its file's name,
 * once memory is short.
 */
#include "api/allocator.h"
#include "os/symbols.h"

#include <errno.h>
#include <stdlib.h>

#ifndef CALM_WITHOUT_MALLOC

#define EXPORT __attribute__((visibility("default")))

typedef void (*new_handler)(void);

#define GET_NEW_HANDLER      "_ZSt15get_new_handlerv"
#define THROW_BAD_ALLOC      "_ZSt17__throw_bad_allocv"
#define LLVM_THROW_BAD_ALLOC "_ZNSt3__117__throw_bad_allocEv"

extern new_handler cxx_get_new_handler(void) __asm__(GET_NEW_HANDLER) __attribute__((weak));
extern void cxx_throw_bad_alloc(void) __asm__(THROW_BAD_ALLOC) __attribute__((weak));
extern void llvm_throw_bad_alloc(void) __asm__(LLVM_THROW_BAD_ALLOC) __attribute__((weak));

/* The function of that name in a C++ library that is loaded; NULL if there is none. */
static any_function find_late(const char *name) {
    any_function found = symbol_find("libstdc++.so.", name);
    found = found != NULL ? found : symbol_find("libc++.so.", name);
    return found != NULL ? found : symbol_find("libc++abi.so.", name);
}

static new_handler find_new_handler(void) {
    new_handler (*get)(void) = cxx_get_new_handler;
    if (get == NULL) {
        get = (new_handler(*)(void))find_late(GET_NEW_HANDLER);
    }
    return get == NULL ? NULL : get();
}

/* Returns only if there is no C++ library. */
static void throw_bad_alloc(void) {
    any_function throws[] = {cxx_throw_bad_alloc, llvm_throw_bad_alloc};
    static const char *const names[] = {THROW_BAD_ALLOC, LLVM_THROW_BAD_ALLOC};
    for (int i = 0; i < 2; i++) {
        if (throws[i] != NULL) {
            throws[i]();
        }
    }
    for (int i = 0; i < 2; i++) {
        any_function late = find_late(names[i]);
        if (late != NULL) {
            late();
        }
    }
}

/*
 * Asks the program's new-handler for memory until there is some, or no handler. The handler may throw. errno
 * stays as it was: a C++ program learns of failure otherwise.
 */
static void *allocate_or_handle(size_t alignment, size_t size) {
    int saved_errno = errno;
    for (;;) {
        void *block = allocate_aligned(alignment, size);
        if (block != NULL) {
            return block;
        }
        errno = saved_errno;
        new_handler handler = find_new_handler();
        if (handler == NULL) {
            return NULL;
        }
        handler();
    }
}

static __attribute__((noinline)) void *new_slow(size_t alignment, size_t size) {
    void *block = allocate_or_handle(alignment, size);
    if (block == NULL) {
        throw_bad_alloc();
        abort();
    }
    return block;
}

/* The fast path without a frame; what it does not have, the slow one asks for again. */
static inline void *new_any(size_t size) {
    void *block;
    return cpu_cache_is_rseq() && rseq_pop(class_for(size), &block) ? block : new_slow(1, size);
}

/*
 * The forms of new that do not throw are the C++ library's, which calls the ones here, or malloc: a
 * new-handler may throw, and to catch that takes C++.
 *
 * size_t, std::align_val_t, const std::nothrow_t& and pointers are all passed as integers are.
 */
#define NEW(name, mangled)                           \
    EXPORT void *name(size_t size) __asm__(mangled); \
    EXPORT void *name(size_t size) {                 \
        return new_any(size);                        \
    }
#define NEW_ALIGNED(name, mangled)                                     \
    EXPORT void *name(size_t size, size_t alignment) __asm__(mangled); \
    EXPORT void *name(size_t size, size_t alignment) {                 \
        return new_slow(alignment, size);                              \
    }
#define DELETE(name, mangled)                       \
    EXPORT void name(void *block) __asm__(mangled); \
    EXPORT void name(void *block) {                 \
        release(block);                             \
    }
#define DELETE_1(name, mangled)                                    \
    EXPORT void name(void *block, size_t unused) __asm__(mangled); \
    EXPORT void name(void *block, size_t unused) {                 \
        (void)unused;                                              \
        release(block);                                            \
    }
#define DELETE_2(name, mangled)                                                    \
    EXPORT void name(void *block, size_t unused, size_t unused2) __asm__(mangled); \
    EXPORT void name(void *block, size_t unused, size_t unused2) {                 \
        (void)unused, (void)unused2;                                               \
        release(block);                                                            \
    }

NEW(new_plain, "_Znwm")
NEW(new_array, "_Znam")
NEW_ALIGNED(new_aligned, "_ZnwmSt11align_val_t")
NEW_ALIGNED(new_array_aligned, "_ZnamSt11align_val_t")

DELETE(delete_plain, "_ZdlPv")
DELETE(delete_array, "_ZdaPv")
DELETE_1(delete_sized, "_ZdlPvm")
DELETE_1(delete_array_sized, "_ZdaPvm")
DELETE_1(delete_nothrow, "_ZdlPvRKSt9nothrow_t")
DELETE_1(delete_array_nothrow, "_ZdaPvRKSt9nothrow_t")
DELETE_1(delete_aligned, "_ZdlPvSt11align_val_t")
DELETE_1(delete_array_aligned, "_ZdaPvSt11align_val_t")
DELETE_2(delete_sized_aligned, "_ZdlPvmSt11align_val_t")
DELETE_2(delete_array_sized_aligned, "_ZdaPvmSt11align_val_t")
DELETE_2(delete_aligned_nothrow, "_ZdlPvSt11align_val_tRKSt9nothrow_t")
DELETE_2(delete_array_aligned_nothrow, "_ZdaPvSt11align_val_tRKSt9nothrow_t")

#endif
