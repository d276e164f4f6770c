/*
 * C++'s operators new and delete, under their mangled names (Itanium C++ ABI).
 * So the library is built without a C++ compiler, and loaded without a C++
 * library.
 *
 * new throws an exception through the program's own C++ library, by weak
 * symbols. These symbols do not bind to a C++ library that dlopen loads later,
 * or into a scope of its own. new looks such a library up by its file name when
 * memory is short.
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

/* Returns the function of this name in a loaded C++ library. Returns NULL if
 * there is none. */
static any_function find_late(const char *name) {
    any_function found = symbols_find("libstdc++.so.", name);
    found = found != NULL ? found : symbols_find("libc++.so.", name);
    return found != NULL ? found : symbols_find("libc++abi.so.", name);
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

/* The malloc of the process. The symbols are weak, so that a static program
 * with a malloc of its own gets no second one together with new. */
extern void *process_malloc(size_t size) __asm__("malloc") __attribute__((weak));
extern void *process_aligned_alloc(size_t alignment, size_t size) __asm__("aligned_alloc")
    __attribute__((weak));
extern void process_free(void *block) __asm__("free") __attribute__((weak));

/* Calls another malloc as a C++ library would. It may return NULL for 0 bytes,
 * and may align small blocks less than this allocator does. Its aligned_alloc
 * may refuse a size that is not a multiple of the alignment. */
static void *pass_on(size_t alignment, size_t size) {
    size += size == 0;
    if (alignment <= sizeof(void *)) {
        return process_malloc(size);
    }
    size_t whole = (size + alignment - 1) & -alignment;
    return whole < size ? NULL : process_aligned_alloc(alignment, whole);
}

/* Calls the program's new-handler until there is memory, or no handler. The
 * handler may throw. Preserves errno, because C++ reports a failure by an
 * exception. */
static void *allocate_or_handle(size_t alignment, size_t size) {
    int saved_errno = errno;
    for (;;) {
        void *block = calm_new_is_passed_on ? pass_on(alignment, size) : allocate_aligned(alignment, size);
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
    (void)allocator_ensure_started(); /* sets calm_new_is_passed_on */
    void *block = allocate_or_handle(alignment, size);
    if (block == NULL) {
        throw_bad_alloc();
        abort();
    }
    return block;
}

static __attribute__((noinline)) void delete_slow(void *block) {
    if (calm_new_is_passed_on) {
        process_free(block);
    } else {
        release_slow(block);
    }
}

/* The fast path, which needs no stack frame. new_slow tries it again. */
static inline __attribute__((always_inline)) void *new_any(size_t alignment, size_t size) {
    void *block;
    bool found = pop_cached(&calm_new_caches, aligned_class_for(alignment, size), &block);
    return __builtin_expect(found, 1) ? block : new_slow(alignment, size);
}

/* The nothrow forms of new belong to the C++ library, which calls the forms
 * here, or malloc. A new-handler may throw, and only C++ code can catch that.
 * size_t and std::align_val_t are passed as integers. delete ignores all
 * arguments but the pointer, so all of its forms are one function. */
EXPORT void *new_plain(size_t size) __asm__("_Znwm");
EXPORT void *new_plain(size_t size) {
    return new_any(1, size);
}

EXPORT void *new_aligned(size_t size, size_t alignment) __asm__("_ZnwmSt11align_val_t");
EXPORT void *new_aligned(size_t size, size_t alignment) {
    return new_any(alignment, size);
}

EXPORT void delete_plain(void *block) __asm__("_ZdlPv");
EXPORT void delete_plain(void *block) {
    if (!release_cached(&calm_new_caches, block)) {
        delete_slow(block);
    }
}

#define ALIAS(type, name, parameters, mangled, of) \
    EXPORT type name parameters __asm__(mangled) __attribute__((alias(of)));
#define DELETE(name, mangled) ALIAS(void, name, (void *block), mangled, "_ZdlPv")

ALIAS(void *, new_array, (size_t size), "_Znam", "_Znwm")
ALIAS(void *, new_array_aligned, (size_t size, size_t alignment), "_ZnamSt11align_val_t",
      "_ZnwmSt11align_val_t")
DELETE(delete_array, "_ZdaPv")
DELETE(delete_sized, "_ZdlPvm")
DELETE(delete_array_sized, "_ZdaPvm")
DELETE(delete_nothrow, "_ZdlPvRKSt9nothrow_t")
DELETE(delete_array_nothrow, "_ZdaPvRKSt9nothrow_t")
DELETE(delete_aligned, "_ZdlPvSt11align_val_t")
DELETE(delete_array_aligned, "_ZdaPvSt11align_val_t")
DELETE(delete_sized_aligned, "_ZdlPvmSt11align_val_t")
DELETE(delete_array_sized_aligned, "_ZdaPvmSt11align_val_t")
DELETE(delete_aligned_nothrow, "_ZdlPvSt11align_val_tRKSt9nothrow_t")
DELETE(delete_array_aligned_nothrow, "_ZdaPvSt11align_val_tRKSt9nothrow_t")

#endif
