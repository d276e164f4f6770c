#include "os/rseq_check.h"

#include "os/syscall.h"
#include "os/thread.h"

#include <sys/auxv.h>
#include <sys/utsname.h>

#define STACK_BYTES ((size_t)64 << 10)
#define TRIALS      3
/* More than a time slice, where the two threads share a CPU. A thread that is
 * never preempted gives up. */
#define MAX_SPINS (1 << 22)
#define WAIT_NS   100000000ULL
#define MAX_WAITS 10

static const char *read_number(const char *text, unsigned *number) {
    for (*number = 0; *text >= '0' && *text <= '9'; text++) {
        *number = *number * 10 + (unsigned)(*text - '0');
    }
    return text;
}

bool rseq_is_suspect(const char *release, unsigned long area_size) {
    unsigned major;
    unsigned minor;
    const char *rest = read_number(release, &major);
    read_number(*rest == '.' ? rest + 1 : rest, &minor);
    bool older = major < 5 || (major == 5 && minor < 10);
    bool tells_size = major > 6 || (major == 6 && minor >= 3);
    return older || (tells_size && area_size == 0);
}

/* What the two threads tell each other. */
struct trial {
    uint32_t entered; /* the sequence has begun; written within it */
    uint32_t over;    /* it should have been restarted */
};

static void interrupt(void *argument) {
    struct trial *trial = argument;
    while (__atomic_load_n(&trial->entered, __ATOMIC_ACQUIRE) == 0) {
        os_syscall(SYS_sched_yield);
    }
    rseq_restart_all();
    __atomic_store_n(&trial->over, 1, __ATOMIC_RELEASE);
}

/* Runs a sequence that waits until the trial is over. Returns whether it was
 * restarted before; that may be before it wrote anything. */
static bool wait_in_sequence(const struct rseq_offsets *offsets, struct trial *trial) {
    uint64_t restarted = 0;
    uint64_t left = MAX_SPINS;
    uint64_t scratch;
#if defined(__x86_64__)
    __asm__ volatile(".pushsection __rseq_cs, \"aw\"\n\t"
                     ".balign 32\n"
                     "3:\n\t"
                     ".long 0, 0\n\t"
                     ".quad 1f, 2f - 1f, 4f\n\t"
                     ".popsection\n\t"
                     "leaq 3b(%%rip), %[scratch]\n\t"
                     "movq %[scratch], %%fs:(%[sequence])\n"
                     "1:\n\t"
                     "movl $1, %[entered]\n"
                     "5:\n\t"
                     "pause\n\t"
                     "cmpl $0, %[over]\n\t"
                     "jne 2f\n\t"
                     "decl %k[left]\n\t"
                     "jnz 5b\n"
                     "2:\n\t"
                     ".pushsection .text.calm_restart, \"ax\"\n\t"
                     ".byte 0x0f, 0xb9, 0x3d\n\t"
                     ".long 0x53053053\n"
                     "4:\n\t"
                     "movl $1, %k[restarted]\n\t"
                     "jmp 2b\n\t"
                     ".popsection\n\t"
                     : [scratch] "=&r"(scratch), [restarted] "+r"(restarted), [left] "+r"(left),
                       [entered] "=m"(trial->entered)
                     : [sequence] "r"(offsets->sequence), [over] "m"(trial->over)
                     : "memory", "cc");
#else
    __asm__ volatile(".pushsection __rseq_cs, \"aw\"\n\t"
                     ".balign 32\n"
                     "3:\n\t"
                     ".long 0, 0\n\t"
                     ".quad 1f, 2f - 1f, 4f\n\t"
                     ".popsection\n\t"
                     "adrp %[scratch], 3b\n\t"
                     "add %[scratch], %[scratch], :lo12:3b\n\t"
                     "str %[scratch], [%[sequence]]\n"
                     "1:\n\t"
                     "str %w[left], [%[entered]]\n"
                     "5:\n\t"
                     "ldr %w[scratch], [%[over]]\n\t"
                     "cbnz %w[scratch], 2f\n\t"
                     "sub %[left], %[left], #1\n\t"
                     "cbnz %[left], 5b\n"
                     "2:\n\t"
                     ".pushsection .text.calm_restart, \"ax\"\n\t"
                     ".long 0xd428bc00\n"
                     "4:\n\t"
                     "mov %[restarted], #1\n\t"
                     "b 2b\n\t"
                     ".popsection\n\t"
                     : [scratch] "=&r"(scratch), [restarted] "+r"(restarted), [left] "+r"(left)
                     : [sequence] "r"((char *)thread_pointer() + offsets->sequence),
                       [entered] "r"(&trial->entered), [over] "r"(&trial->over)
                     : "memory", "cc");
#endif
    __atomic_store_n(&trial->entered, 1, __ATOMIC_RELEASE);
    return restarted != 0;
}

/* No handler may fork while there is a thread that a child would wait for. */
static bool try_once(const struct rseq_offsets *offsets) {
    static struct thread thread; /* static, as the thread may come late */
    static struct trial trial;
    trial = (struct trial){0};
    uint64_t mask = thread_block_signals();
    bool restarted =
        thread_start(&thread, interrupt, &trial, STACK_BYTES) && wait_in_sequence(offsets, &trial);
    for (int waits = 0; waits < MAX_WAITS && !thread_is_gone(&thread); waits++) {
        thread_wait(&thread, WAIT_NS);
    }
    thread_wait_uncounted(&thread, WAIT_NS);
    thread_set_signals(mask);
    return restarted && thread_is_gone(&thread);
}

bool rseq_is_restarted(const struct rseq_offsets *offsets) {
    int trials = 0;
    while (trials < TRIALS && try_once(offsets)) {
        trials++;
    }
    return trials == TRIALS;
}

bool rseq_is_broken(const struct rseq_offsets *offsets) {
    struct utsname system = {0};
    return os_syscall(SYS_uname, &system) == 0 &&
           rseq_is_suspect(system.release, getauxval(AT_RSEQ_FEATURE_SIZE)) && !rseq_is_restarted(offsets);
}
