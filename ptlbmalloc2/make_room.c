/*
 * Calls that map memory: where address space is limited, glibc's free memory, of which glibc by itself would
 * have given back more, makes room for them. Each is passed on to the next definition.
 *
 * The dynamic linker goes by the address that dlopen will return to, so that dlopen ends in a jump, and room
 * is made before. The program's own mmap is left as it is: a signal handler may call it that interrupted
 * glibc's malloc, which then must not be called.
 */
#include "os/filters.h"
#include "os/symbols.h"
#include "os/vm.h"

#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* Not by dlsym, which older C libraries have in a library that the program may lack. */
static any_function make_room_next(_Atomic(any_function) *known, const char *name) {
    any_function next = atomic_load_explicit(known, memory_order_relaxed);
    if (next == NULL) {
        next = symbols_find_after(_DYNAMIC, name);
        atomic_store_explicit(known, next, memory_order_relaxed);
    }
    return next;
}

/* True if there is a limit, and so many bytes more were above it. */
static bool make_room(size_t bytes) {
    int saved_errno = errno;
    bool makes = filters_now() != FILTERS_ADDED && vm_limit_bytes() != SIZE_MAX && !vm_can_map(bytes);
    if (makes) {
        malloc_trim(0);
    }
    errno = saved_errno;
    return makes;
}

typedef int pthread_create_function(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

static _Atomic(any_function) libc_pthread_create;

EXPORT int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *argument) {
    pthread_create_function *next =
        (pthread_create_function *)make_room_next(&libc_pthread_create, "pthread_create");
    int error = next == NULL ? EAGAIN : next(thread, attributes, run, argument);
    if ((error == EAGAIN || error == ENOMEM) && next != NULL && make_room(SIZE_MAX)) {
        error = next(thread, attributes, run, argument);
    }
    return error;
}

/* What a library may take with those that it needs. */
#define LIBRARY_BYTES ((size_t)256 << 20)

static _Atomic(any_function) libc_dlopen;

__attribute__((used, visibility("hidden"))) any_function make_room_before_dlopen(void) {
    make_room(LIBRARY_BYTES);
    return make_room_next(&libc_dlopen, "dlopen");
}

#if defined(__x86_64__)
__asm__(".pushsection .text\n\t"
        ".globl dlopen\n\t"
        ".type dlopen, @function\n\t"
        ".balign 16\n"
        "dlopen:\n\t"
        ".cfi_startproc\n\t"
        "pushq %rdi\n\t"
        ".cfi_adjust_cfa_offset 8\n\t"
        "pushq %rsi\n\t"
        ".cfi_adjust_cfa_offset 8\n\t"
        "subq $8, %rsp\n\t"
        ".cfi_adjust_cfa_offset 8\n\t"
        "call make_room_before_dlopen\n\t"
        "addq $8, %rsp\n\t"
        ".cfi_adjust_cfa_offset -8\n\t"
        "popq %rsi\n\t"
        ".cfi_adjust_cfa_offset -8\n\t"
        "popq %rdi\n\t"
        ".cfi_adjust_cfa_offset -8\n\t"
        "jmp *%rax\n\t"
        ".cfi_endproc\n\t"
        ".size dlopen, .-dlopen\n\t"
        ".popsection");
#elif defined(__aarch64__)
__asm__(".pushsection .text\n\t"
        ".globl dlopen\n\t"
        ".type dlopen, %function\n\t"
        ".balign 16\n"
        "dlopen:\n\t"
        ".cfi_startproc\n\t"
        "hint #34\n\t" /* bti c */
        "stp x0, x1, [sp, #-32]!\n\t"
        ".cfi_adjust_cfa_offset 32\n\t"
        "str x30, [sp, #16]\n\t"
        ".cfi_rel_offset 30, 16\n\t"
        "bl make_room_before_dlopen\n\t"
        "mov x16, x0\n\t"
        "ldr x30, [sp, #16]\n\t"
        ".cfi_restore 30\n\t"
        "ldp x0, x1, [sp], #32\n\t"
        ".cfi_adjust_cfa_offset -32\n\t"
        "br x16\n\t"
        ".cfi_endproc\n\t"
        ".size dlopen, .-dlopen\n\t"
        ".popsection");
#endif
