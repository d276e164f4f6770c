#include "os/thread.h"

#include "os/address_space.h"
#include "os/syscall.h"

#if defined(__SANITIZE_THREAD__)
#include <pthread.h>
#include <stdlib.h>
#endif
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/prctl.h>

#if defined(__SANITIZE_THREAD__)

/* Watched as any other: by its runtime, which must know of each thread. Never in what is preloaded. */
struct body {
    void (*body)(void *argument);
    void *argument;
};

static void *enter_watched(void *argument) {
    struct body this = *(struct body *)argument;
    free(argument);
    this.body(this.argument);
    return NULL;
}

bool thread_start(void (*body)(void *argument), void *argument, size_t stack_bytes) {
    (void)stack_bytes;
    pthread_t thread;
    struct body *this = malloc(sizeof *this);
    if (this == NULL) {
        return false;
    }
    *this = (struct body){body, argument};
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = pthread_create(&thread, NULL, enter_watched, this) == 0 && pthread_detach(thread) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return started;
}

#else

/* linux/sched.h */
#define THREAD_FLAGS                                                                                 \
    (0x00000100 /* VM */ | 0x00000200 /* FS */ | 0x00000400 /* FILES */ | 0x00000800 /* SIGHAND */ | \
     0x00010000 /* THREAD */ | 0x00040000 /* SYSVSEM */ | 0x00080000 /* SETTLS */)

/* What code compiled for threads may read or write around the thread pointer: a canary, errno. */
#define LOCAL_BYTES ((size_t)16 << 10)

/* Where glibc keeps what it shares with the kernel; below all thread-local storage in newer ones. */
extern const ptrdiff_t __rseq_offset __attribute__((weak));

static size_t local_bytes(void) {
    ptrdiff_t below = &__rseq_offset == NULL ? 0 : -__rseq_offset;
    size_t page = os_page_size();
    return below <= 0 ? LOCAL_BYTES : LOCAL_BYTES + (((size_t)below + page - 1) & ~(page - 1));
}

static void enter(void (*body)(void *argument), void *argument) {
    os_syscall(SYS_prctl, PR_SET_NAME, (long)"calmalloc", 0, 0, 0, 0);
    body(argument);
    os_syscall(SYS_exit, 0, 0, 0, 0, 0, 0);
}

/* The new thread starts with nothing but its stack: what it is to do lies there. */
static long clone_thread(const uintptr_t *stack, void *local) {
    long result;
#if defined(__x86_64__)
    register void *r8 __asm__("r8") = local;
    __asm__ volatile("syscall\n\t"
                     "testq %%rax, %%rax\n\t"
                     "jnz 1f\n\t"
                     "xorl %%ebp, %%ebp\n\t"
                     "popq %%rdi\n\t"
                     "popq %%rsi\n\t"
                     "popq %%rax\n\t"
                     "popq %%rcx\n\t" /* aligns the stack */
                     "callq *%%rax\n\t"
                     "ud2\n"
                     "1:"
                     : "=a"(result)
                     : "a"(SYS_clone), "D"(THREAD_FLAGS), "S"(stack), "d"(0), "r"(r8)
                     : "rcx", "r11", "memory");
#else
    register long x8 __asm__("x8") = SYS_clone;
    register long x0 __asm__("x0") = THREAD_FLAGS;
    register const uintptr_t *x1 __asm__("x1") = stack;
    register long x2 __asm__("x2") = 0;
    register void *x3 __asm__("x3") = local;
    register long x4 __asm__("x4") = 0;
    __asm__ volatile("svc 0\n\t"
                     "cbnz x0, 1f\n\t"
                     "mov x29, xzr\n\t"
                     "mov x30, xzr\n\t"
                     "ldp x0, x1, [sp]\n\t"
                     "ldr x2, [sp, 16]\n\t"
                     "add sp, sp, 32\n\t"
                     "blr x2\n\t"
                     "brk 0\n"
                     "1:"
                     : "+r"(x0)
                     : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
                     : "memory", "x30");
    result = x0;
#endif
    return result;
}

bool thread_start(void (*body)(void *argument), void *argument, size_t stack_bytes) {
    size_t below = local_bytes();
    size_t bytes = stack_bytes + below + LOCAL_BYTES;
    char *memory = os_reserve(bytes, os_page_size());
    if (memory == NULL || !os_commit(memory, bytes)) {
        return false;
    }
    /* A thread pointer points to itself. */
    void **local = (void **)(void *)(memory + stack_bytes + below);
    *local = local;
    uintptr_t *stack = (uintptr_t *)(void *)(memory + stack_bytes - 64);
    stack[0] = (uintptr_t)body;
    stack[1] = (uintptr_t)argument;
    stack[2] = (uintptr_t)enter;
    stack[3] = 0;

    uint64_t all = ~(uint64_t)0;
    uint64_t before;
    os_syscall(SYS_rt_sigprocmask, SIG_SETMASK, (long)&all, (long)&before, sizeof all, 0, 0);
    long thread = clone_thread(stack, local);
    os_syscall(SYS_rt_sigprocmask, SIG_SETMASK, (long)&before, 0, sizeof all, 0, 0);
    if (thread < 0) {
        os_release(memory, bytes);
        return false;
    }
    return true;
}

#endif

/* linux/close_range.h */
#define RANGE_UNSHARED 2

void thread_leave_files(void) {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) /* which report from any thread */
    os_syscall(SYS_close_range, 0, ~0U, RANGE_UNSHARED, 0, 0, 0);
#endif
}
