/* Compiles as C and C++: exits with 0 if malloc is calmalloc's and its interface is available. */
#include <calmalloc.h>

#include <stdio.h>
#include <stdlib.h>

static uint64_t in_use(void) {
    struct calm_stats stats;
    return calm_stats(&stats, sizeof stats) == 0 ? stats.in_use : 0;
}

int main(void) {
    const size_t bytes = (size_t)1 << 20;
    uint64_t before = in_use();
    void *block = malloc(bytes);
    uint64_t held = in_use() - before;
    free(block);
    if (held < bytes) {
        fprintf(stderr, "calmalloc knows nothing of this malloc\n");
        return 1;
    }
    puts("served by calmalloc");
    return 0;
}
