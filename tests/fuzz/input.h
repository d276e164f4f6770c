/*
 * Reads a fuzzer's input as a stream of numbers. Past the end every number is 0, so that any bytes are a
 * valid input, and a target ends once nothing is left.
 */
#ifndef CALM_TESTS_FUZZ_INPUT_H
#define CALM_TESTS_FUZZ_INPUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct input {
    const uint8_t *at;
    size_t left;
};

/* Copies up to count bytes, and clears the rest. */
static inline void input_bytes(struct input *input, void *to, size_t count) {
    size_t taken = count < input->left ? count : input->left;
    memset(to, 0, count);
    if (taken > 0) {
        memcpy(to, input->at, taken);
    }
    input->at += taken;
    input->left -= taken;
}

/* A little-endian number of so many bytes, at most 8. */
static inline uint64_t input_number(struct input *input, size_t count) {
    uint8_t bytes[8] = {0};
    uint64_t number = 0;
    input_bytes(input, bytes, count);
    for (size_t i = count; i-- > 0;) {
        number = number << 8 | bytes[i];
    }
    return number;
}

static inline unsigned input_byte(struct input *input) {
    return (unsigned)input_number(input, 1);
}

/* A number below bound, which is at most 65,536, of as few bytes as that takes. */
static inline size_t input_below(struct input *input, size_t bound) {
    return bound <= 1 ? 0 : (size_t)input_number(input, bound > 256 ? 2 : 1) % bound;
}

/*
 * A size by its order of magnitude, since a mutated byte should reach every size class: three bits after the
 * leading one, and a small distance from that, so that sizes just below and above a class's are frequent.
 */
static inline size_t input_size(struct input *input, unsigned max_exponent) {
    unsigned exponent = input_byte(input) % (max_exponent + 1);
    unsigned detail = input_byte(input);
    size_t size = ((size_t)(8 + (detail & 7)) << exponent) / 8;
    return size + (detail >> 3 & 15) - (size < 8 ? 0 : 8);
}

#endif
