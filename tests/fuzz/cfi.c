/*
 * The reader of unwind tables on foreign bytes: a module of an input's bytes, whose tables a few steps up the
 * stack follow. Nothing may be read outside of the module, nor of the stack but by `load`.
 *
 * An input: where in the module the tables begin, the registers, the stack, and the module. A word of the
 * stack or a register that begins with one of two marks stands for an address in the tables or on the stack.
 */
#include "profile/cfi.h"
#include "check.h"
#include "input.h"

#include <stdlib.h>

#define MAX_STEPS   16
#define MAX_WORDS   64
#define OF_TABLES   0xc0deU
#define OF_STACK    0x57acU
#define MARK_SHIFT  48
#define STACK_START ((uintptr_t)1 << 40)

struct context {
    uintptr_t tables;
    uint64_t words[MAX_WORDS];
    size_t count;
};

/* A number of the input as an address: a distance of 32 bits is signed. */
static uintptr_t address_of(const struct context *context, uint64_t number) {
    uintptr_t distance = (uintptr_t)(intptr_t)(int32_t)number;
    switch (number >> MARK_SHIFT) {
    case OF_TABLES:
        return context->tables + distance;
    case OF_STACK:
        return STACK_START + distance;
    default:
        return number;
    }
}

/* The stack is at no real address: a direct read of it faults. */
static bool load(void *argument, uintptr_t address, uintptr_t *word) {
    const struct context *context = argument;
    uintptr_t offset = address - STACK_START;
    if (address < STACK_START || offset % sizeof *word != 0 || offset / sizeof *word >= context->count) {
        return false;
    }
    *word = address_of(context, context->words[offset / sizeof *word]);
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count) {
    struct input input = {bytes, count};
    struct context context = {0};
    unsigned detail = input_byte(&input);
    size_t skip = input_byte(&input);
    int32_t address = (int32_t)input_number(&input, 4);
    int32_t frame = (int32_t)input_number(&input, 4);
    context.count = input_below(&input, MAX_WORDS + 1);
    for (size_t i = 0; i < context.count; i++) {
        context.words[i] = input_number(&input, 8);
    }
    /* Of the exact size, so that a sanitizer sees what is read beyond it. */
    size_t size = input.left;
    uint8_t *image = malloc(size == 0 ? 1 : size);
    CHECK(image != NULL);
    input_bytes(&input, image, size);
    const struct cfi_module module = {
        .start = (uintptr_t)image, .end = (uintptr_t)image + size, .tables = (uintptr_t)image + skip};
    context.tables = module.tables;
    struct cfi_registers registers = {.in_signal = (detail & 1) != 0};
    registers.of[CFI_PC] = module.tables + (uintptr_t)(intptr_t)address;
    registers.of[CFI_STACK] = STACK_START;
    registers.of[CFI_FRAME] = STACK_START + (uintptr_t)(intptr_t)frame;
    for (int step = 0; step < MAX_STEPS; step++) {
        struct cfi_registers before = registers;
        if (cfi_step(&module, &registers, load, &context) != CFI_STEPPED) {
            CHECK(memcmp(&before, &registers, sizeof before) == 0);
            break;
        }
    }
    free(image);
    return 0;
}
