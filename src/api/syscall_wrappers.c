/*
 * prctl and syscall. By them a program adds a seccomp filter, gives up the
 * right to gain privileges, enters other namespaces, or copies itself. The
 * wrappers stop the allocator's own threads around such a call, because it
 * would not apply to them, and because a copy would keep the locks that they
 * hold. Once there is a filter, the allocator makes only system calls that the
 * C library's malloc makes, too.
 *
 * This file also wraps vfork. It is one of the calls of syscall that return
 * twice, on one stack or on two: see the end.
 */
#ifndef CALM_WITHOUT_THREADS
#include "api/features.h"
#include "api/own_threads.h"
#include "api/range_calls.h"
#include "api/registration.h"
#include "os/thread.h"
#endif
#include "os/filters.h"
#include "os/process.h"
#include "os/syscall.h"

#include <linux/sched.h>
#include <linux/seccomp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <sys/prctl.h>

#ifndef CALM_WITHOUT_MALLOC

#define EXPORT __attribute__((visibility("default")))

#ifndef SYS_landlock_restrict_self
#define SYS_landlock_restrict_self 446
#endif

#ifdef CALM_WITHOUT_THREADS
static bool own_threads_stop(void) {
    return false; /* this library has no threads of its own */
}
static void own_threads_resume(bool stopped) {
    (void)stopped;
}
static bool registration_is_suspended(void) {
    return false;
}
static bool registration_before_child(uint64_t flags) {
    (void)flags;
    return false;
}
static void registration_after_child(long result) {
    (void)result;
}
static long registration_call(const long *arguments) {
    return os_syscall(SYS_rseq, arguments[0], arguments[1], arguments[2], arguments[3]);
}
static bool thread_is_single(void) {
    return false;
}
static void heap_profile_apply(void) {
}
/* glibc unmaps large blocks, and their marks end with the mapping. */
static long marks_call(long number, const long *arguments) {
    return os_syscall(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4],
                      arguments[5]);
}
#endif

/* The number of filters that were added. One thread may add a filter while the
 * kernel refuses the filter of another thread. */
static _Atomic(unsigned) filters_added;

static long wrapper_syscall(bool filters, long number, const long *arguments) {
    unsigned added = atomic_load_explicit(&filters_added, memory_order_relaxed);
    enum filters before = filters_now();
    filters = filters && !registration_is_suspended(); /* a child of vfork adds no filter to its parent */
    bool stopped = own_threads_stop();
    if (filters) {
        if (before != FILTERS_ADDED) {
            process_remember();
        }
        filters_set(FILTERS_ADDED);
        heap_profile_apply();
    }
    long result = marks_call(number, arguments);
    if (filters && result >= 0) {
        atomic_fetch_add_explicit(&filters_added, 1, memory_order_relaxed);
        filters_set(FILTERS_ADDED);
    } else if (filters && atomic_load_explicit(&filters_added, memory_order_relaxed) == added) {
        filters_set(before);
    }
    own_threads_resume(stopped);
    return result;
}

EXPORT int prctl(int option, ...) {
    va_list list;
    va_start(list, option);
    long arguments[6] = {option};
    for (int i = 1; i < 5; i++) {
        arguments[i] = va_arg(list, long);
    }
    va_end(list);
    switch (option) {
    case PR_SET_SECCOMP:
    case PR_SET_NO_NEW_PRIVS:
    case PR_SET_SECUREBITS:
    case PR_CAPBSET_DROP:
    case PR_CAP_AMBIENT:
        return (int)libc_result(wrapper_syscall(option == PR_SET_SECCOMP, SYS_prctl, arguments));
    default:
        return (int)libc_result(marks_call(SYS_prctl, arguments));
    }
}

/* How a system call makes a process or a thread. */
struct copying {
    bool copies;
    bool own_stack; /* the copy runs on another stack, and does not return from here */
    uint64_t flags; /* those of clone(2) */
};

static struct copying copying_by(long number, const long *arguments) {
    struct copying by = {.copies = true};
#ifdef SYS_fork
    if (number == SYS_fork) {
        return by;
    }
#endif
#ifdef SYS_vfork
    if (number == SYS_vfork) {
        by.flags = CLONE_VM | CLONE_VFORK;
        return by;
    }
#endif
    if (number == SYS_clone) {
        by.flags = (uint32_t)arguments[0];
        by.own_stack = arguments[1] != 0;
        return by;
    }
    /* The kernel refuses shorter arguments. */
    if (number != SYS_clone3 || arguments[0] == 0 || (unsigned long)arguments[1] < CLONE_ARGS_SIZE_VER0) {
        return (struct copying){0};
    }
    struct clone_args copied;
    memcpy(&copied, (const void *)arguments[0], CLONE_ARGS_SIZE_VER0);
    by.flags = copied.flags;
    by.own_stack = copied.stack != 0;
    return by;
}

/* Returns whether the new process gets copies of the caller's memory and
 * stack. */
static bool copies_process(struct copying by) {
    return by.copies && !by.own_stack && (by.flags & CLONE_VM) == 0;
}

/* Makes any system call, as the C library does. The caller may pass fewer than
 * six arguments; the rest is passed on unchanged. */
__attribute__((used, visibility("hidden"))) long calm_syscall_by_c(long number, ...) {
    va_list list;
    va_start(list, number);
    long arguments[6];
    for (int i = 0; i < 6; i++) {
        arguments[i] = va_arg(list, long);
    }
    va_end(list);
    if (copies_process(copying_by(number, arguments))) {
        return libc_result(wrapper_syscall(false, number, arguments));
    }
    if (number == SYS_exit && thread_is_single()) {
        own_threads_resume(own_threads_stop()); /* so this thread's status becomes that of the process */
    }
    switch (number) {
    case SYS_rseq:
        return libc_result(registration_call(arguments));
    case SYS_prctl:
        return prctl((int)arguments[0], arguments[1], arguments[2], arguments[3], arguments[4]);
    case SYS_seccomp: {
        bool adds = arguments[0] == SECCOMP_SET_MODE_STRICT || arguments[0] == SECCOMP_SET_MODE_FILTER;
        return libc_result(wrapper_syscall(adds, number, arguments));
    }
    case SYS_landlock_restrict_self:
    case SYS_unshare:
    case SYS_setns:
    case SYS_capset:
        return libc_result(wrapper_syscall(false, number, arguments));
    default:
        return libc_result(marks_call(number, arguments));
    }
}

/* Some calls return twice. Assembly makes those that give the copy no memory
 * and stack of its own. On the parent's stack, the copy returns first, and its
 * calls overwrite the stack below. The parent therefore keeps everything that
 * it needs in registers. On another stack, the copy finds what the caller has
 * put there, as with the C library. */
enum { BY_C, IN_PLACE, IN_PLACE_UNREGISTERED };

__attribute__((used, visibility("hidden"))) int calm_syscall_way(long number, long first, long second) {
    struct copying by = copying_by(number, (const long[]){first, second});
    if (!by.copies || copies_process(by)) {
        return BY_C;
    }
    return registration_before_child(by.flags) ? IN_PLACE_UNREGISTERED : IN_PLACE;
}

__attribute__((used, visibility("hidden"))) long calm_syscall_result(long result) {
    return libc_result(result);
}

__attribute__((used, visibility("hidden"))) long calm_syscall_result_unregistered(long result) {
    registration_after_child(result);
    return libc_result(result);
}

#if defined(__x86_64__)

#ifndef CALM_WITHOUT_THREADS
/* Continues as syscall(SYS_vfork). */
__asm__(".pushsection .text\n\t"
        ".globl vfork\n\t"
        ".type vfork, @function\n\t"
        ".balign 16\n"
        "vfork:\n\t"
        ".cfi_startproc\n\t"
        "movl $58, %edi\n\t"
        "jmp syscall_in_place\n\t"
        ".cfi_endproc\n\t"
        ".size vfork, .-vfork\n\t"
        ".popsection");
#endif

/* 56, 58 and 435 are SYS_clone, SYS_vfork and SYS_clone3. The copy returns
 * directly. Its parent returns by one of the functions above, to the address in
 * r9. */
__asm__(".pushsection .text\n\t"
        ".globl syscall\n\t"
        ".type syscall, @function\n\t"
        ".balign 16\n\t"
        ".cfi_startproc\n"
        "syscall:\n\t"
        "cmpq $58, %rdi\n\t"
        "je 2f\n\t"
        "cmpq $56, %rdi\n\t"
        "je 2f\n\t"
        "cmpq $435, %rdi\n\t"
        "je 2f\n"
        "1:\n\t"
        "jmp calm_syscall_by_c\n"
        "2:\n"
        "syscall_in_place:\n\t"
        "pushq %rdi; .cfi_adjust_cfa_offset 8\n\t"
        "pushq %rsi; .cfi_adjust_cfa_offset 8\n\t"
        "pushq %rdx; .cfi_adjust_cfa_offset 8\n\t"
        "pushq %rcx; .cfi_adjust_cfa_offset 8\n\t"
        "pushq %r8; .cfi_adjust_cfa_offset 8\n\t"
        "pushq %r9; .cfi_adjust_cfa_offset 8\n\t"
        "pushq %rax; .cfi_adjust_cfa_offset 8\n\t"
        "call calm_syscall_way\n\t"
        "addq $8, %rsp; .cfi_adjust_cfa_offset -8\n\t"
        "popq %r9; .cfi_adjust_cfa_offset -8\n\t"
        "popq %r8; .cfi_adjust_cfa_offset -8\n\t"
        "popq %rcx; .cfi_adjust_cfa_offset -8\n\t"
        "popq %rdx; .cfi_adjust_cfa_offset -8\n\t"
        "popq %rsi; .cfi_adjust_cfa_offset -8\n\t"
        "popq %rdi; .cfi_adjust_cfa_offset -8\n\t"
        "cmpl $1, %eax\n\t"
        "jb 1b\n\t"
        "movq %rdi, %rax\n\t"
        "movq %rsi, %rdi\n\t"
        "movq %rdx, %rsi\n\t"
        "movq %rcx, %rdx\n\t"
        "movq %r8, %r10\n\t"
        "movq %r9, %r8\n\t"
        "ja 3f\n\t"
        "movq (%rsp), %r9\n\t"
        "syscall\n\t"
        "testq %rax, %rax\n\t"
        "jz 4f\n\t"
        "movq %r9, (%rsp)\n\t"
        "movq %rax, %rdi\n\t"
        "jmp calm_syscall_result\n"
        "3:\n\t"
        "movq (%rsp), %r9\n\t"
        "syscall\n\t"
        "testq %rax, %rax\n\t"
        "jz 4f\n\t"
        "movq %r9, (%rsp)\n\t"
        "movq %rax, %rdi\n\t"
        "jmp calm_syscall_result_unregistered\n"
        "4:\n\t"
        "ret\n\t"
        ".cfi_endproc\n\t"
        ".size syscall, .-syscall\n\t"
        ".popsection");

#else

#ifndef CALM_WITHOUT_THREADS
/* Continues as syscall(SYS_clone, CLONE_VM | CLONE_VFORK | SIGCHLD, 0, ...),
 * which is vfork on this processor. */
__asm__(".pushsection .text\n\t"
        ".globl vfork\n\t"
        ".type vfork, %function\n\t"
        ".balign 16\n"
        "vfork:\n\t"
        ".cfi_startproc\n\t"
        "hint #34\n\t" /* bti c */
        "mov x0, #220\n\t"
        "mov x1, #0x4111\n\t"
        "mov x2, #0\n\t"
        "mov x3, #0\n\t"
        "mov x4, #0\n\t"
        "mov x5, #0\n\t"
        "b syscall_in_place\n\t"
        ".cfi_endproc\n\t"
        ".size vfork, .-vfork\n\t"
        ".popsection");
#endif

/* The kernel keeps all registers but x0, so w9 still has the way afterwards. */
__asm__(".pushsection .text\n\t"
        ".globl syscall\n\t"
        ".type syscall, %function\n\t"
        ".balign 16\n"
        "syscall:\n\t"
        ".cfi_startproc\n\t"
        "hint #34\n\t"
        "cmp x0, #220\n\t" /* SYS_clone */
        "b.eq 1f\n\t"
        "cmp x0, #435\n\t" /* SYS_clone3 */
        "b.eq 1f\n"
        "2:\n\t"
        "b calm_syscall_by_c\n"
        "1:\n"
        "syscall_in_place:\n\t"
        "stp x29, x30, [sp, #-64]!\n\t"
        ".cfi_def_cfa_offset 64\n\t"
        ".cfi_offset x29, -64\n\t"
        ".cfi_offset x30, -56\n\t"
        "stp x0, x1, [sp, #16]\n\t"
        "stp x2, x3, [sp, #32]\n\t"
        "stp x4, x5, [sp, #48]\n\t"
        "bl calm_syscall_way\n\t"
        "mov w9, w0\n\t"
        "ldp x0, x1, [sp, #16]\n\t"
        "ldp x2, x3, [sp, #32]\n\t"
        "ldp x4, x5, [sp, #48]\n\t"
        "ldp x29, x30, [sp], #64\n\t"
        ".cfi_restore x29\n\t"
        ".cfi_restore x30\n\t"
        ".cfi_def_cfa_offset 0\n\t"
        "cbz w9, 2b\n\t"
        "mov x8, x0\n\t"
        "mov x0, x1\n\t"
        "mov x1, x2\n\t"
        "mov x2, x3\n\t"
        "mov x3, x4\n\t"
        "mov x4, x5\n\t"
        "svc 0\n\t"
        "cbz x0, 3f\n\t"
        "cmp w9, #1\n\t"
        "b.eq 4f\n\t"
        "b calm_syscall_result_unregistered\n"
        "4:\n\t"
        "b calm_syscall_result\n"
        "3:\n\t"
        "ret\n\t"
        ".cfi_endproc\n\t"
        ".size syscall, .-syscall\n\t"
        ".popsection");

#endif

#endif
