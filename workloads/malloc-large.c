/* Repeatedly frees a random one of 20 large live blocks and replaces it by one of random size. An allocator
 * either requests each block from the kernel, with page faults for all its pages, or keeps free memory. The
 * name, the sizes (5 to 25 MiB) and the number of live blocks are those of malloc-large of mimalloc-bench,
 * according to its description; the rest is original. */
#include "support.h"

#include <stdio.h>
#include <stdlib.h>

static const char program_name[] = "malloc-large";

static const size_t page_size = 4096;

enum touch { TOUCH_ENDS, TOUCH_PAGES };

static const char *const touch_names[] = {"ends", "pages", NULL};

struct slot {
    unsigned char *block;
    size_t size;
};

static void fill(struct slot *slot, size_t size, enum touch touch) {
    unsigned char mark = (unsigned char)(size % 251);
    slot->size = size;
    slot->block = checked(malloc(size), program_name);
    if (touch == TOUCH_PAGES) {
        for (size_t at = 0; at < size; at += page_size) {
            ((volatile unsigned char *)slot->block)[at] = mark;
        }
    }
    slot->block[0] = mark;
    slot->block[size - 1] = mark;
}

static void empty(struct slot *slot) {
    unsigned char mark = (unsigned char)(slot->size % 251);
    if (slot->block[0] != mark || slot->block[slot->size - 1] != mark) {
        fail(program_name, "a block does not hold what was written to it");
    }
    free(slot->block);
    slot->block = NULL;
}

int main(int argc, char **argv) {
    unsigned long rounds = 1500;
    unsigned long blocks = 20;
    unsigned long least = 5UL << 20;
    unsigned long most = 25UL << 20;
    unsigned long touch = TOUCH_PAGES;
    const struct option_spec options[] = {
        {"rounds", "blocks that are replaced", OPTION_COUNT, &rounds, 1, 1000000000, NULL},
        {"blocks", "blocks that live at once", OPTION_COUNT, &blocks, 1, 100000, NULL},
        {"min", "minimum bytes in a block", OPTION_COUNT, &least, 1, 1UL << 40, NULL},
        {"max", "maximum bytes in a block", OPTION_COUNT, &most, 1, 1UL << 40, NULL},
        {"touch", "write the first and last byte of a block, or one of each page too", OPTION_CHOICE, &touch,
         0, 0, touch_names},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "One thread replaces random ones of its large blocks.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);
    if (least > most) {
        reject_arguments(program_name, "--min is more than --max");
    }

    struct slot *slots = checked(calloc(blocks, sizeof *slots), program_name);
    unsigned long long random = 0;
    unsigned long bytes = 0;
    double begin = now_seconds();
    for (unsigned long i = 0; i < blocks + rounds; i++) {
        struct slot *slot = i < blocks ? &slots[i] : &slots[random_next(&random) % blocks];
        if (slot->block != NULL) {
            empty(slot);
        }
        fill(slot, random_between(&random, least, most), (enum touch)touch);
        bytes += slot->size;
    }
    for (unsigned long i = 0; i < blocks; i++) {
        empty(&slots[i]);
    }
    double seconds = now_seconds() - begin;
    free(slots);
    printf("{\"workload\": \"malloc-large\", \"rounds\": %lu, \"blocks\": %lu, \"min\": %lu, \"max\": %lu, "
           "\"touch\": \"%s\", \"allocations\": %lu, \"bytes\": %lu, \"seconds\": %.6f}\n",
           rounds, blocks, least, most, touch_names[touch], blocks + rounds, bytes, seconds);
    return 0;
}
