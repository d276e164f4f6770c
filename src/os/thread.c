#include "os/thread.h"

#include "base/assert.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/rseq.h"
#include "os/syscall.h"
#include "os/vm.h"

#if defined(__SANITIZE_THREAD__)
#include <pthread.h>
#endif
#include <linux/capability.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <time.h>

_Atomic(uint32_t) thread_start_holds;

#if defined(__SANITIZE_THREAD__)

/* ThreadSanitizer must know each thread, so this is a thread of the C library.
 * The preloaded library never contains it. */
static void *enter_watched(void *started) {
    struct thread *thread = started;
    thread->body(thread->argument);
    atomic_store_explicit(&thread->id, 0, memory_order_release);
    os_syscall(SYS_futex, &thread->id, FUTEX_WAKE, 1);
    return NULL;
}

bool thread_start(struct thread *thread, void (*body)(void *argument), void *argument, size_t stack_bytes) {
    (void)stack_bytes;
    pthread_t watched;
    thread->body = body;
    thread->argument = argument;
    atomic_store_explicit(&thread->id, 1, memory_order_relaxed);
    uint64_t before = thread_block_signals();
    bool started = pthread_create(&watched, NULL, enter_watched, thread) == 0;
    if (started) {
        pthread_detach(watched);
    } else {
        atomic_store_explicit(&thread->id, 0, memory_order_relaxed);
    }
    thread_set_signals(before);
    return started;
}

#else

/* from linux/sched.h */
#define THREAD_FLAGS                                                                                 \
    (0x00000100 /* VM */ | 0x00000200 /* FS */ | 0x00000400 /* FILES */ | 0x00000800 /* SIGHAND */ | \
     0x00010000 /* THREAD */ | 0x00040000 /* SYSVSEM */ | 0x00080000 /* SETTLS */ |                  \
     0x00100000 /* PARENT_SETTID */ | 0x00200000 /* CHILD_CLEARTID */)

/* The bytes around the thread pointer that code compiled for threads may read
 * or write: a canary, errno. */
#define LOCAL_BYTES ((size_t)16 << 10)

/* Returns the bytes on each side of the thread pointer, of which the area of
 * rseq.h is one part. In newer versions of glibc, the area is below all
 * thread-local storage. */
static size_t local_bytes(void) {
    ptrdiff_t offset = rseq_area_offset();
    return LOCAL_BYTES + vm_round_up((size_t)(offset < 0 ? -offset : offset));
}

static void thread_enter(struct thread *thread) {
    /* The thread itself sets last_id, because it may end before its starter
     * continues. */
    uint32_t id = atomic_load_explicit(&thread->id, memory_order_relaxed);
    atomic_store_explicit(&thread->last_id, id, memory_order_relaxed);
    os_syscall(SYS_prctl, PR_SET_NAME, "calmalloc");
    thread->body(thread->argument);
    os_syscall(SYS_exit);
}

/* Starts a thread. At first the thread has only its stack, from which it takes
 * thread_enter and the argument. The kernel sets `id` before the thread runs,
 * and clears it when the thread has ended. */
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
                     "popq %%rax\n\t"
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
                     "ldp x0, x1, [sp], 16\n\t"
                     "blr x1\n\t"
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
    calm_assert(atomic_load_explicit(&thread->id, memory_order_relaxed) == 0 && stack_bytes > 64,
                stack_bytes);
    size_t local_size = local_bytes();
    if (thread->memory == NULL) {
        thread->memory = vm_map(stack_bytes + 2 * local_size);
    }
    if (thread->memory == NULL) {
        return false;
    }
    /* A thread pointer points to itself. */
    void **local = (void **)(void *)(thread->memory + stack_bytes + local_size);
    *local = local;
    uintptr_t *stack = (uintptr_t *)(void *)(thread->memory + stack_bytes - 64);
    stack[0] = (uintptr_t)thread;
    stack[1] = (uintptr_t)thread_enter;
    thread->body = body;
    thread->argument = argument;

    uint64_t before = thread_set_signals(~(uint64_t)0);
    long started = clone_thread(stack, local, &thread->id);
    thread_set_signals(before);
    return started > 0;
}

#endif

void thread_wait(struct thread *thread, uint64_t ns) {
    uint32_t id = atomic_load_explicit(&thread->id, memory_order_acquire);
    struct timespec timeout = clock_timespec(ns);
    if (id != 0) {
        /* The kernel's wake-up at the end of a thread is not private, so this
         * is not FUTEX_WAIT_PRIVATE. */
        os_syscall(SYS_futex, &thread->id, FUTEX_WAIT, id, ns == 0 ? NULL : &timeout);
    }
}

void thread_wait_uncounted(struct thread *thread, uint64_t ns) {
    uint32_t id = atomic_load_explicit(&thread->last_id, memory_order_relaxed);
    if (id == 0) {
        return;
    }
    long process = os_syscall(SYS_getpid);
    uint64_t start = clock_now_ns();
    while (os_syscall(SYS_tgkill, process, id) == 0) {
        if (ns == 0) {
            return;
        }
        if (clock_now_ns() - start >= ns) {
            break; /* the kernel may have given the number to a thread of the program */
        }
        os_syscall(SYS_sched_yield);
    }
    atomic_store_explicit(&thread->last_id, 0, memory_order_relaxed);
}

void thread_forget(struct thread *thread) {
    if (atomic_load_explicit(&thread->last_id, memory_order_relaxed) != 0) {
        atomic_store_explicit(&thread->last_id, 0, memory_order_relaxed);
    }
    if (!thread_is_gone(thread)) {
        atomic_store_explicit(&thread->id, 0, memory_order_relaxed);
    }
}

/* ---- what the calling thread gives up ---- */

/* from linux/close_range.h, and glibc 2.34 */
#define RANGE_UNSHARED 2
#ifndef SYS_close_range
#define SYS_close_range 436
#endif

bool thread_leave_files(void) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) /* a sanitizer may report from here */
    return false;
#else
    return os_syscall(SYS_close_range, 0, ~0U, RANGE_UNSHARED) == 0;
#endif
}

void thread_drop_capabilities(void) {
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct none[_LINUX_CAPABILITY_U32S_3] = {{0}};
    os_syscall(SYS_capset, &header, none);
}

void thread_schedule_normally(const struct cpu_set *cpus) {
    long policy = os_syscall(SYS_sched_getscheduler) & ~SCHED_RESET_ON_FORK;
    if (policy == SCHED_FIFO || policy == SCHED_RR) {
        const struct sched_param param = {0};
        os_syscall(SYS_sched_setscheduler, 0, SCHED_OTHER, &param);
    }
    os_syscall(SYS_sched_setaffinity, 0, sizeof *cpus, cpus); /* the kernel refuses an empty set */
}

/* ---- the program's threads ---- */

const char thread_not_single;
const char *thread_single = &thread_not_single;

unsigned thread_count(void) {
    enum { FIELD_THREADS = 17 };
    char text[1024];
    uint64_t count = 0;
    if (file_read("/proc/self/stat", text, sizeof text) > 0) {
        parse_number(parse_stat_field(text, FIELD_THREADS), &count);
    }
    return (unsigned)count;
}
