#include "os/clock.h"

#include "os/symbols.h"
#include "os/syscall.h"

#include <stdatomic.h>
#include <sys/auxv.h>

#if defined(__x86_64__)
#define NAME "__vdso_clock_gettime"
#else
#define NAME "__kernel_clock_gettime"
#endif

typedef int (*reader)(clockid_t clock, struct timespec *time);

static int read_by_call(clockid_t clock, struct timespec *time) {
    return (int)os_syscall(SYS_clock_gettime, clock, time);
}

int clock_read(clockid_t clock, struct timespec *time) {
    static _Atomic(reader) known;
    reader read = atomic_load_explicit(&known, memory_order_relaxed);
    if (read == NULL) {
        read = (reader)symbols_find_in_image((const void *)getauxval(AT_SYSINFO_EHDR), NAME);
        read = read == NULL ? read_by_call : read;
        atomic_store_explicit(&known, read, memory_order_relaxed);
    }
    return read(clock, time);
}
