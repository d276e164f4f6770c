/* The functions of calmalloc.h for colored memory. Left out of a build without the feature. */
#include "calmalloc.h"

#include "api/misuse.h"
#include "colored/colored.h"

#include <errno.h>
#include <string.h>

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
        misuse_report_now(MISUSE_INVALID_FREE, block);
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
