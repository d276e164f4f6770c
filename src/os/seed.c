#include "os/seed.h"

#include "os/mix.h"
#include "os/syscall.h"

#include <string.h>
#include <sys/auxv.h>

uint64_t os_process_seed(void) {
    uint64_t random[2] = {0};
    const void *given = (const void *)getauxval(AT_RANDOM); /* 16 bytes */
    if (given != NULL) {
        memcpy(random, given, sizeof random);
    }
    /* What the C library guards its stacks and pointers by is not to be read off block addresses. */
    uint64_t seed = (random[0] ^ random[1] >> 32) + (uint64_t)os_syscall(SYS_getpid, 0, 0, 0, 0, 0, 0);
    return os_mixed(seed);
}
