#include "os/seed.h"

#include "os/clock.h"
#include "os/mix.h"

#include <string.h>
#include <sys/auxv.h>

uint64_t os_process_seed(void) {
    uint64_t random[2] = {0};
    const void *given = (const void *)getauxval(AT_RANDOM); /* 16 bytes */
    if (given != NULL) {
        memcpy(random, given, sizeof random);
    }
    /* What the C library guards its stacks and pointers by is not to be read off block addresses. */
    return os_mixed((random[0] ^ random[1] >> 32) + clock_now_ns());
}
