#include "offload/spare.h"

/* Blocks of a class, however small they are. */
#define BLOCKS_MOST 1024

uint32_t spare_prepare(struct server *server, uint32_t word, size_t class_bytes) {
    const struct size_classes *classes = server->owner.classes;
    uint32_t first = word;
    for (uint32_t class = 1; class < classes->count; ++class) {
        size_t most = class_bytes / classes->of[class].size;
        server->spare_start[class] = word;
        server->spare_most[class] = (uint16_t)(most < BLOCKS_MOST ? most : BLOCKS_MOST);
        word += server->spare_most[class];
    }
    return word - first;
}

size_t spare_take_unwanted(const struct server *server, struct endpoint *endpoint, uint32_t class,
                           void **blocks) {
    struct spare *spare = &endpoint->spares[class];
    void **stack = spare_stack(server, endpoint, class);
    uint32_t got = spare->least < MAGAZINE_BLOCKS_MOST ? spare->least : MAGAZINE_BLOCKS_MOST;
    if (got > 0) {
        uint32_t left = spare_level(endpoint, class) - got;
        memcpy(blocks, stack, got * sizeof *blocks);
        memmove(stack, stack + got, left * sizeof *stack);
        spare_set(endpoint, class, left);
        spare->least -= got;
    }
    return got;
}
