/* Integers of any size for cfrac, each a separate block on the heap. */
#ifndef CALMALLOC_WORKLOADS_NUMBER_H
#define CALMALLOC_WORKLOADS_NUMBER_H

#include <stdbool.h>
#include <stdint.h>

/* A whole number, never negative. It does not change once it is made; who takes a further reference holds it,
 * and the last one to drop it frees it. Functions borrow what they are given and return a new reference. */
struct number {
    uint32_t owners;
    uint32_t length;  /* limbs that count: the last one is not 0 */
    uint32_t limbs[]; /* the lowest first */
};

struct number *number_from(uint64_t value);

/* Takes a further reference, and drops one. */
struct number *number_hold(struct number *number);
void number_drop(struct number *number);

/* For x = f(x, ...): drops what was in place. */
void number_replace(struct number **place, struct number *number);

/* How many numbers have been made. */
unsigned long number_made(void);

bool number_is(const struct number *number, uint32_t value);

/* Less than 0, 0 or more than 0, as a is less than b, the same or more. */
int number_compare(const struct number *a, const struct number *b);

struct number *number_add(const struct number *a, const struct number *b);

/* a is not less than b. */
struct number *number_subtract(const struct number *a, const struct number *b);
struct number *number_multiply(const struct number *a, const struct number *b);

/* Returns the quotient; no divisor is 0. rest may be NULL in number_divide. */
struct number *number_divide_small(const struct number *a, uint32_t divisor, uint32_t *rest);
struct number *number_divide(struct number *a, struct number *b, struct number **rest);
struct number *number_modulo(struct number *a, struct number *b);

/* The whole part of it. */
struct number *number_square_root(struct number *a);

#endif
