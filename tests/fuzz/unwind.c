/*
 * The unwinder on a foreign stack: from an instruction of this program, whose real tables say how to go on,
 * with the input's words as the stack. It may read nothing that is not mapped, whatever the stack leads to,
 * and each step must lead up the stack, but for one around a signal handler.
 */
#include "profile/unwind.c"

#include "check.h"
#include "input.h"

#include <stdlib.h>
#include <sys/mman.h>

#define MAX_STEPS   64
#define STACK_BYTES 4096

enum mark { NUMBER, OF_STACK, OF_CODE, OF_FUNCTION, NEAR_END, MARKS };

/* Between two pages without access. */
static char *new_stack(void) {
    size_t page = vm_page_size();
    size_t bytes = STACK_BYTES > page ? STACK_BYTES : page;
    char *memory = mmap(NULL, bytes + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    CHECK(mprotect(memory + page, bytes, PROT_READ | PROT_WRITE) == 0);
    return memory + page;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);

/* A word by its mark: a number, or an address on the stack or in the code of this program or the C library.
 */
static uintptr_t read_word(struct input *input, const char *stack) {
    /* The entries of functions that have little in common. */
    static void *const functions[] = {(void *)LLVMFuzzerTestOneInput,
                                      (void *)unwind_here,
                                      (void *)cfi_step,
                                      (void *)qsort,
                                      (void *)abort,
                                      (void *)memcpy};
    unsigned mark = input_byte(input);
    uintptr_t value = input_number(input, 3);
    switch (mark % MARKS) {
    case OF_STACK:
        return (uintptr_t)stack + value % (2 * STACK_BYTES);
    case OF_CODE:
        return (uintptr_t)unwind_here + value - (value % 2 == 0 ? 0 : (uintptr_t)1 << 23);
    case OF_FUNCTION:
        return (uintptr_t)functions[mark / MARKS % (sizeof functions / sizeof *functions)] + value % 1024;
    case NEAR_END:
        return (uintptr_t)stack + STACK_BYTES - value % 64;
    default:
        return value << (mark / MARKS % 41);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count) {
    static char *stack;
    if (stack == NULL) {
        stack = new_stack();
        unwind_learn_modules();
    }
    struct input input = {bytes, count};
    struct cfi_registers registers = {0};
    registers.of[CFI_PC] = read_word(&input, stack);
    registers.of[CFI_STACK] = read_word(&input, stack);
    registers.of[CFI_FRAME] = read_word(&input, stack);
    registers.in_signal = (input_byte(&input) & 1) != 0;
    memset(stack, 0, STACK_BYTES);
    for (size_t at = 0; at + sizeof(uintptr_t) <= STACK_BYTES && input.left > 0; at += sizeof(uintptr_t)) {
        uintptr_t word = read_word(&input, stack);
        memcpy(stack + at, &word, sizeof word);
    }
    uintptr_t known_page = 0;
    for (int i = 0; i < MAX_STEPS; i++) {
        uintptr_t before = registers.of[CFI_STACK];
        bool in_signal = registers.in_signal;
        if (!step(&known_page, &registers)) {
            break;
        }
        CHECK(registers.of[CFI_PC] != 0);
        CHECK(registers.of[CFI_STACK] > before || in_signal || registers.in_signal);
    }
    return 0;
}
