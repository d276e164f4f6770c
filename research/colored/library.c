/*
 * The library's own part: the functions of calmcolored.h, their errno and their end, and the handler of
 * forks.
 */
#include "colored/calmcolored.h"

#include "colored/colored.h"
#include "os/text.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Independent of malloc's handlers: it takes no lock, and allocates nothing. */
__attribute__((constructor)) static void colored_prepare(void) {
    pthread_atfork(NULL, NULL, colored_after_fork);
}

void *calm_colored_alloc(size_t bytes, unsigned cache) {
    void *block = NULL;
    int error = colored_alloc("", bytes, cache, &block);
    if (error != 0) {
        errno = error;
    }
    return block;
}

void calm_colored_free(void *block) {
    if (block != NULL && !colored_free(block)) {
        text_write_line(STDERR_FILENO, "calmcolored: invalid free: %p is no colored block", block);
        abort();
    }
}

int calm_colored_stats(const void *block, struct calm_colored *colored, size_t size) {
    struct calm_colored stats;
    if (colored == NULL || size < offsetof(struct calm_colored, level) || !colored_stats(block, &stats)) {
        errno = EINVAL;
        return -1;
    }
    stats.size = (uint32_t)(size < sizeof stats ? size : sizeof stats);
    memcpy(colored, &stats, stats.size);
    return 0;
}
