/*
 * A program for a debugger to look at: pointers of each kind in variables, then stops(), then work within the
 * heap's lock. It prints nothing, and ends well if the debugger has changed nothing.
 */
#include "api.h"
#include "names.h"

#include <string.h>

enum { MANY = 2000 };

extern void *used, *inside, *cached, *in_depot, *in_slab, *large, *large_inside, *dirty, *clean, *on_stack,
    *wild;
void *used, *inside, *cached, *in_depot, *in_slab, *large, *large_inside, *dirty, *clean, *on_stack, *wild;
static void *many[MANY];

/* Where the debugger has a breakpoint. */
void stops(void);
__attribute__((noinline)) void stops(void) {
    __asm__ volatile("");
}

static void *new_block(size_t bytes) {
    void *block = malloc(bytes);
    CHECK(block != NULL);
    fill(block, bytes, bytes);
    return block;
}

static void free_all(size_t except) {
    for (size_t i = 0; i < MANY; i++) {
        if (i != except) {
            free(many[i]);
        }
    }
}

/* Freed blocks of a slab that one of them keeps, and half of a large one: a trim puts each into its last
 * place. What is allocated later takes the lowest clean pages, not those. */
static void *make_trimmed(void **above) {
    for (size_t i = 0; i < MANY; i++) {
        many[i] = new_block(200);
    }
    void *kept = many[MANY / 2];
    in_slab = hidden(many[MANY / 2 + 1]);
    free_all(MANY / 2);
    char *freed = new_block(16 * MIB);
    clean = hidden(freed + 15 * MIB);
    *above = new_block(3 * MIB);
    free(freed);
    calm_trim(0);
    return kept;
}

static void make_cached(void) {
    for (size_t i = 0; i < MANY; i++) {
        many[i] = new_block(64);
    }
    free_all(MANY);
    for (size_t i = 0; i < MANY && in_depot == NULL; i++) {
        in_depot = strstr(calm_debug_block(many[i]), "depot") != NULL ? many[i] : NULL;
    }
    cached = hidden(new_block(48));
    free(cached);
}

int main(void) {
    int local;
    on_stack = &local;
    wild = (void *)0x123456789abcdef;
    void *above;
    void *kept = make_trimmed(&above);
    used = new_block(48);
    inside = (char *)used + 16;
    make_cached();
    large = new_block(3 * MIB);
    large_inside = (char *)large + 1234567;
    dirty = hidden(new_block(512 * KIB));
    void *last = new_block(3 * MIB);
    free(dirty);
    WAIT_UNTIL(strstr(calm_debug_block(dirty), ": free") != NULL); /* a server may have it later */
    stats_now();
    stops();

    use_blocks(1, 20000);
    CHECK(is_filled(used, 48, 48) && is_filled(kept, 200, 200));
    CHECK(is_filled(large, 3 * MIB, 3 * MIB) && is_filled(above, 3 * MIB, 3 * MIB));
    CHECK(is_filled(last, 3 * MIB, 3 * MIB));
    stats_now();
    return 0;
}
