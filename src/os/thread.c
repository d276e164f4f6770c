#include "os/thread.h"

#include "os/address_space.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/syscall.h"

#if defined(__SANITIZE_THREAD__)
#include <pthread.h>
#include <stdlib.h>
#endif
#include <linux/capability.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

uint64_t thread_block_signals(void) {
    uint64_t all = ~(uint64_t)0;
    uint64_t before = 0;
    os_syscall(SYS_rt_sigprocmask, SIG_SETMASK, (long)&all, (long)&before, sizeof all, 0, 0);
    return before;
}

void thread_restore_signals(uint64_t mask) {
    os_syscall(SYS_rt_sigprocmask, SIG_SETMASK, (long)&mask, 0, sizeof mask, 0, 0);
}

#if defined(__SANITIZE_THREAD__)

/* Watched as any other: by its runtime, which must know of each thread. Never in what is preloaded. */
struct body {
    struct thread *thread;
    void (*body)(void *argument);
    void *argument;
};

static void *enter_watched(void *argument) {
    struct body this = *(struct body *)argument;
    free(argument);
    this.body(this.argument);
    atomic_store_explicit(&this.thread->id, 0, memory_order_release);
    os_syscall(SYS_futex, (long)&this.thread->id, FUTEX_WAKE, 1, 0, 0, 0);
    return NULL;
}

bool thread_start(struct thread *thread, void (*body)(void *argument), void *argument, size_t stack_bytes) {
    (void)stack_bytes;
    pthread_t watched;
    struct body *this = malloc(sizeof *this);
    if (this == NULL) {
        return false;
    }
    *this = (struct body){thread, body, argument};
    atomic_store_explicit(&thread->id, 1, memory_order_relaxed);
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = pthread_create(&watched, NULL, enter_watched, this) == 0;
    if (started) {
        pthread_detach(watched);
    } else {
        atomic_store_explicit(&thread->id, 0, memory_order_relaxed);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return started;
}

#else

/* linux/sched.h */
#define THREAD_FLAGS                                                                                 \
    (0x00000100 /* VM */ | 0x00000200 /* FS */ | 0x00000400 /* FILES */ | 0x00000800 /* SIGHAND */ | \
     0x00010000 /* THREAD */ | 0x00040000 /* SYSVSEM */ | 0x00080000 /* SETTLS */ |                  \
     0x00100000 /* PARENT_SETTID */ | 0x00200000 /* CHILD_CLEARTID */)

/* What code compiled for threads may read or write around the thread pointer: a canary, errno. */
#define LOCAL_BYTES ((size_t)16 << 10)

/* Where glibc keeps what it shares with the kernel; below all thread-local storage in newer ones. */
extern const ptrdiff_t __rseq_offset __attribute__((weak));

static size_t local_bytes(void) {
    ptrdiff_t below = &__rseq_offset == NULL ? 0 : -__rseq_offset;
    size_t page = os_page_size();
    return below <= 0 ? LOCAL_BYTES : LOCAL_BYTES + (((size_t)below + page - 1) & ~(page - 1));
}

/* By itself: whoever started it may not come to that before it has ended. */
static void note_id(struct thread *thread) {
    uint32_t id = atomic_load_explicit(&thread->id, memory_order_relaxed);
    atomic_store_explicit(&thread->last_id, id, memory_order_relaxed);
}

static void enter(void (*body)(void *argument), void *argument, uintptr_t unused, struct thread *thread) {
    (void)unused;
    note_id(thread);
    os_syscall(SYS_prctl, PR_SET_NAME, (long)"calmalloc", 0, 0, 0, 0);
    body(argument);
    os_syscall(SYS_exit, 0, 0, 0, 0, 0, 0);
}

/* The new thread starts with nothing but its stack: what it is to do lies there, and is in the registers of
 * enter's arguments. The kernel keeps id, from before the thread runs until it has ended. */
static long clone_thread(const uintptr_t *stack, void *local, _Atomic(uint32_t) *id) {
    long result;
#if defined(__x86_64__)
    register void *r10 __asm__("r10") = id;
    register void *r8 __asm__("r8") = local;
    __asm__ volatile("syscall\n\t"
                     "testq %%rax, %%rax\n\t"
                     "jnz 1f\n\t"
                     "xorl %%ebp, %%ebp\n\t"
                     "popq %%rdi\n\t"
                     "popq %%rsi\n\t"
                     "popq %%rax\n\t"
                     "popq %%rcx\n\t"
                     "callq *%%rax\n\t"
                     "ud2\n"
                     "1:"
                     : "=a"(result)
                     : "a"(SYS_clone), "D"(THREAD_FLAGS), "S"(stack), "d"(id), "r"(r10), "r"(r8)
                     : "rcx", "r11", "memory");
#else
    register long x8 __asm__("x8") = SYS_clone;
    register long x0 __asm__("x0") = THREAD_FLAGS;
    register const uintptr_t *x1 __asm__("x1") = stack;
    register void *x2 __asm__("x2") = id;
    register void *x3 __asm__("x3") = local;
    register void *x4 __asm__("x4") = id;
    __asm__ volatile("svc 0\n\t"
                     "cbnz x0, 1f\n\t"
                     "mov x29, xzr\n\t"
                     "mov x30, xzr\n\t"
                     "ldp x0, x1, [sp]\n\t"
                     "ldp x2, x3, [sp, 16]\n\t"
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

bool thread_start(struct thread *thread, void (*body)(void *argument), void *argument, size_t stack_bytes) {
    size_t below = local_bytes();
    size_t bytes = stack_bytes + below + LOCAL_BYTES;
    if (thread->memory == NULL) {
        char *memory = os_reserve(bytes, os_page_size());
        if (memory != NULL && !os_commit(memory, bytes)) {
            os_release(memory, bytes);
            memory = NULL;
        }
        if (memory == NULL) {
            return false;
        }
        thread->memory = memory;
    }
    /* A thread pointer points to itself. */
    void **local = (void **)(void *)(thread->memory + stack_bytes + below);
    *local = local;
    uintptr_t *stack = (uintptr_t *)(void *)(thread->memory + stack_bytes - 64);
    stack[0] = (uintptr_t)body;
    stack[1] = (uintptr_t)argument;
    stack[2] = (uintptr_t)enter;
    stack[3] = (uintptr_t)thread;

    uint64_t before = thread_block_signals();
    long started = clone_thread(stack, local, &thread->id);
    thread_restore_signals(before);
    return started > 0;
}

#endif

void thread_wait(struct thread *thread, uint64_t ns) {
    uint32_t id = atomic_load_explicit(&thread->id, memory_order_acquire);
    struct timespec timeout = {(time_t)(ns / 1000000000U), (long)(ns % 1000000000U)};
    if (id != 0) {
        /* As the kernel wakes: not as within one process. */
        os_syscall(SYS_futex, (long)&thread->id, FUTEX_WAIT, (long)id, ns == 0 ? 0 : (long)&timeout, 0, 0);
    }
}

_Atomic(uint32_t) thread_stops;

static const char not_known;
const char *thread_alone = &not_known;

void thread_wait_uncounted(struct thread *thread, uint64_t ns) {
    uint32_t id = atomic_load_explicit(&thread->last_id, memory_order_relaxed);
    if (id == 0) {
        return;
    }
    long process = os_syscall(SYS_getpid, 0, 0, 0, 0, 0, 0);
    uint64_t start = clock_now_ns();
    while (os_syscall(SYS_tgkill, process, (long)id, 0, 0, 0, 0) == 0) {
        if (ns == 0) {
            return;
        }
        if (clock_now_ns() - start >= ns) {
            break; /* a thread of the program's may have its number by now */
        }
        os_syscall(SYS_sched_yield, 0, 0, 0, 0, 0, 0);
    }
    atomic_store_explicit(&thread->last_id, 0, memory_order_relaxed);
}

unsigned thread_count(void) {
    enum { AFTER_NAME = 18 }; /* fields from the name, which may hold anything, to the number of threads */
    char text[1024];
    const char *at = file_read("/proc/self/stat", text, sizeof text) > 0 ? strrchr(text, ')') : NULL;
    for (int field = 0; at != NULL && field < AFTER_NAME; field++) {
        at = strchr(at + 1, ' ');
    }
    unsigned count = 0;
    for (; at != NULL && at[1] >= '0' && at[1] <= '9'; at++) {
        count = count * 10 + (unsigned)(at[1] - '0');
    }
    return count;
}

void thread_forget(struct thread *thread) {
    if (atomic_load_explicit(&thread->last_id, memory_order_relaxed) != 0) {
        atomic_store_explicit(&thread->last_id, 0, memory_order_relaxed);
    }
    if (!thread_is_gone(thread)) {
        atomic_store_explicit(&thread->id, 0, memory_order_relaxed);
    }
}

/* linux/close_range.h */
#define RANGE_UNSHARED 2

bool thread_leave_files(void) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) /* which report from any thread */
    return false;
#else
    return os_syscall(SYS_close_range, 0, ~0U, RANGE_UNSHARED, 0, 0, 0) == 0;
#endif
}

void thread_drop_capabilities(void) {
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct none[_LINUX_CAPABILITY_U32S_3] = {{0}};
    os_syscall(SYS_capset, (long)&header, (long)none, 0, 0, 0, 0);
}

void thread_schedule_normally(const struct cpu_mask *mask) {
    long policy = os_syscall(SYS_sched_getscheduler, 0, 0, 0, 0, 0, 0) & ~SCHED_RESET_ON_FORK;
    if (policy == SCHED_FIFO || policy == SCHED_RR) {
        const struct sched_param param = {0};
        os_syscall(SYS_sched_setscheduler, 0, SCHED_OTHER, (long)&param, 0, 0, 0);
    }
    if (mask->bytes > 0) {
        os_syscall(SYS_sched_setaffinity, 0, (long)mask->bytes, (long)mask->words, 0, 0, 0);
    }
}
