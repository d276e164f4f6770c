/* Preloaded, before an allocator, into a program that is told of the model's CPUs (topology.h): imitates the
 * registration for restartable sequences, which QEMU refuses. A thread's area then has the numbers of its CPU
 * and node: the plugin puts them into the first thread's area, and gives those of other threads by getcpu(2).
 * No sequence is ever restarted, since no other thread runs on a thread's CPU.
 *
 * glibc ends the program where it cannot register a thread whose creator was registered. So the number that
 * glibc looks at says of every thread but the first that it is not registered, and of the first from its
 * first new thread on: calmalloc looks at it once, at the start, and then at the number of the virtual CPU.
 */
#include <dlfcn.h>
#include <errno.h>
#include <linux/rseq.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/auxv.h>
#include <sys/syscall.h>

#define EXPORT __attribute__((visibility("default")))

#ifndef AT_RSEQ_FEATURE_SIZE
#define AT_RSEQ_FEATURE_SIZE 27
#endif
enum { AREA_BYTES = 32, LARGEST_ERROR = 4095, ARGUMENTS = 6 };

/* The start of struct rseq, with what Linux 6.3 added. */
struct area {
    uint32_t cpu_id_start;
    uint32_t cpu_id;
    uint64_t sequence;
    uint32_t flags;
    uint32_t node_id;
    uint32_t mm_cid;
};
enum { FEATURE_BYTES = offsetof(struct area, mm_cid) + sizeof(uint32_t) };

struct start {
    void *(*run)(void *);
    void *argument;
};

typedef int create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument);

extern unsigned long __getauxval(unsigned long type);
extern const ptrdiff_t __rseq_offset __attribute__((weak)); /* since glibc 2.35 */

/* Takes the place of the C library's, which is 0 since the registration failed. */
EXPORT extern const unsigned int __rseq_size;
const unsigned int __rseq_size = AREA_BYTES;

EXPORT unsigned long getauxval(unsigned long type) {
    return type == AT_RSEQ_FEATURE_SIZE ? FEATURE_BYTES : __getauxval(type);
}

static long kernel(long number, const long *arguments) {
#if defined(__x86_64__)
    long result;
    register long a4 __asm__("r10") = arguments[3];
    register long a5 __asm__("r8") = arguments[4];
    register long a6 __asm__("r9") = arguments[5];
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(arguments[0]), "S"(arguments[1]), "d"(arguments[2]), "r"(a4), "r"(a5),
                       "r"(a6)
                     : "rcx", "r11", "memory");
    return result;
#else
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = arguments[0];
    register long x1 __asm__("x1") = arguments[1];
    register long x2 __asm__("x2") = arguments[2];
    register long x3 __asm__("x3") = arguments[3];
    register long x4 __asm__("x4") = arguments[4];
    register long x5 __asm__("x5") = arguments[5];
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
#endif
}

/* gcc before 11 has no __builtin_thread_pointer for x86-64. */
static char *thread_pointer(void) {
    char *pointer;
#if defined(__x86_64__)
    __asm__("mov %%fs:0, %0" : "=r"(pointer));
#else
    __asm__("mrs %0, tpidr_el0" : "=r"(pointer));
#endif
    return pointer;
}

static volatile struct area *own_area(void) {
    static struct area unused;
    if (&__rseq_offset == NULL) {
        return &unused;
    }
    return (volatile struct area *)(void *)(thread_pointer() + __rseq_offset);
}

static void put_numbers(volatile struct area *area) {
    uint32_t cpu = 0;
    uint32_t node = 0;
    const long arguments[ARGUMENTS] = {(long)&cpu, (long)&node};
    (void)kernel(SYS_getcpu, arguments);
    area->cpu_id_start = cpu;
    area->node_id = node;
    area->mm_cid = cpu;
}

static void *begin(void *started) {
    struct start start = *(struct start *)started;
    put_numbers(own_area());
    free(started);
    return start.run(start.argument);
}

EXPORT int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *argument) {
    create *next = (create *)dlsym(RTLD_NEXT, "pthread_create");
    struct start *start = next != NULL ? malloc(sizeof *start) : NULL;
    if (start == NULL) {
        return EAGAIN;
    }
    *start = (struct start){run, argument};
    own_area()->cpu_id = (uint32_t)RSEQ_CPU_ID_REGISTRATION_FAILED;
    int error = next(thread, attributes, begin, start);
    if (error != 0) {
        free(start);
    }
    return error;
}

/* tcmalloc registers an area of its own by this function. The plugin sees the call. */
EXPORT long syscall(long number, ...) {
    long arguments[ARGUMENTS];
    va_list list;
    va_start(list, number);
    for (unsigned i = 0; i < ARGUMENTS; i++) {
        arguments[i] = va_arg(list, long);
    }
    va_end(list);
    long result = kernel(number, arguments);
    if (number == SYS_rseq && result == -ENOSYS) {
        volatile struct area *area = (volatile struct area *)arguments[0];
        if ((arguments[2] & RSEQ_FLAG_UNREGISTER) == 0) {
            put_numbers(area);
            area->cpu_id = area->mm_cid;
        }
        return 0;
    }
    if (result < 0 && result >= -LARGEST_ERROR) {
        errno = (int)-result;
        return -1;
    }
    return result;
}
