/* Large blocks: grown, moved, zeroed, and in huge pages. */
#include "arena/large.h"

#include "arena/purger.h"
#include "whole_allocator.h"

#include <string.h>

static size_t heap_mappings(void) {
    const struct space *space = &calm_arenas.of[0].heap.space;
    return count_mappings((void *)space->base, space->quanta << SPACE_QUANTUM_SHIFT);
}

/* Vectors that grow step by step, and are gone at last: no mapping stays for any of them. */
static void test_grown_and_gone(void) {
    enum { VECTORS = 100 };
    set("huge_pages", "never");
    for (size_t bytes = 64 * KIB; bytes <= 4 * MIB; bytes += bytes / 2) {
        for (size_t i = 0; i < VECTORS; i++) {
            unsigned char *grown = calm_realloc(blocks[i], bytes);
            CHECK(grown != NULL);
            CHECK(blocks[i] == NULL || grown[0] == (unsigned char)(i + 1));
            grown[0] = (unsigned char)(i + 1);
            grown[bytes - 1] = 1;
            blocks[i] = grown;
        }
    }
    uint64_t moves = stats_now().large_moves;
    size_t grown = heap_mappings();
    free_all();
    calm_trim(0);
    size_t left = heap_mappings();
    printf("%llu moves of %d blocks: %zu mappings, %zu once they are gone\n", (unsigned long long)moves,
           VECTORS, grown, left);
    CHECK(moves > VECTORS || !pages_can_move());
    CHECK(left <= 8);
}

/* Whether the kernel was asked to fill huge pages around an address. */
static bool wants_huge_pages(const void *address) {
    char line[256];
    bool here = false;
    bool wants = false;
    FILE *maps = fopen("/proc/self/smaps", "r");
    CHECK(maps != NULL);
    while (fgets(line, sizeof line, maps) != NULL) {
        char *end;
        uintptr_t first = strtoull(line, &end, 16);
        if (*end == '-') {
            here = first <= (uintptr_t)address && (uintptr_t)address < strtoull(end + 1, NULL, 16);
        } else if (here && strncmp(line, "VmFlags:", 8) == 0) {
            wants = strstr(line, " hg") != NULL;
        }
    }
    fclose(maps);
    return wants;
}

static char *take_dense(size_t pages) {
    bool zero;
    lock_acquire(&calm_arenas.of[0].lock);
    char *block = heap_take_large(&calm_arenas.of[0].heap, pages, 1, RUN_FOR_HUGE_PAGES, false, &zero);
    lock_release(&calm_arenas.of[0].lock);
    CHECK(block != NULL);
    memset(block, 1, pages * page_size);
    return block;
}

/* Where a part of a huge page was given back, the kernel does not fill it again, as it does in its own time
 * where huge pages are wanted; and where all of it was, it is a huge page again at its next use. */
static void test_parts_of_huge_pages(void) {
    size_t region = calm_arenas.of[0].heap.runs.region_pages;
    if (region == 0) {
        printf("the kernel gives no huge pages\n");
        return;
    }
    set("memory_per_cpu", "1600"); /* so that a trim alone gives back */
    char *block = take_dense(3 * region);
    char *middle = block + region * page_size;
    CHECK(wants_huge_pages(block) && wants_huge_pages(middle));
    arena_put_large(&calm_arenas, block);
    CHECK(take_dense(region / 2) == block);
    purger_enter(&calm_arenas);
    purge_down(&calm_arenas, 0, 0, REASON_ASKED);
    purger_leave(&calm_arenas);
    CHECK_EQUAL(resident_pages(block, 3 * region * page_size), region / 2);
    CHECK(!wants_huge_pages(block) && !wants_huge_pages(middle - 1) && wants_huge_pages(middle));
    arena_put_large(&calm_arenas, block);
    calm_trim(0);
    CHECK(take_dense(2 * region) == block);
    CHECK(wants_huge_pages(block) && wants_huge_pages(middle - 1));
}

static char *zeroed(size_t bytes) {
    char *block = calm_calloc(bytes, 1);
    CHECK(block != NULL && (uintptr_t)block % page_size == 0);
    return block;
}

/* Of large blocks of calloc hardly anything is resident before it is touched, however much free memory is. */
static void test_zeros_are_not_resident(void) {
    if (!residency_is_told()) {
        return;
    }
    set("test_placement", "off"); /* so that blocks are the pages that they lie on */
    for (size_t i = 0; i < 100; i++) {
        blocks[i] = obtain(300 * KIB);
    }
    for (size_t i = 0; i < 100; i++) {
        calm_free(blocks[i]);
        blocks[i] = NULL;
    }
    CHECK(stats_now().dirty > 0);
    size_t resident = 0;
    for (size_t i = 0; i < 300; i++) {
        blocks[i] = zeroed(MIB);
        resident += resident_pages(blocks[i], MIB);
        CHECK_EQUAL(((char *)blocks[i])[MIB / 2], 0);
    }
    CHECK(resident * page_size <= 4 * MIB);
    free_all();
}

int main(void) {
    prepare_governor();
    set("background", "off"); /* the rest would be done by a helper, too, in its own time */
    in_child(test_grown_and_gone);
    in_child(test_parts_of_huge_pages);
    in_child(test_zeros_are_not_resident);
    return 0;
}
