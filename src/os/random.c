#include "os/random.h"

#include "os/clock.h"

#include <string.h>
#include <sys/auxv.h>

uint64_t random_process_seed(void) {
    uint64_t random[2] = {0};
    const void *given = (const void *)getauxval(AT_RANDOM); /* 16 bytes */
    if (given != NULL) {
        memcpy(random, given, sizeof random);
    }
    /* The C library protects stacks and pointers with these random bytes. The
     * mix hides them, so that block addresses do not reveal them. */
    return random_mix((random[0] ^ random[1] >> 32) + clock_now_ns());
}
