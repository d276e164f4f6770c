/* Schoolbook arithmetic on limbs of 32 bits. */
#include "number.h"

#include "support.h"

#include <stdlib.h>
#include <string.h>

static const char program_name[] = "cfrac";

static unsigned long made;

unsigned long number_made(void) {
    return made;
}

static struct number *make(uint32_t length) {
    struct number *number = checked(malloc(sizeof *number + length * sizeof number->limbs[0]), program_name);
    number->owners = 1;
    number->length = length;
    made++;
    return number;
}

struct number *number_hold(struct number *number) {
    number->owners++;
    return number;
}

void number_drop(struct number *number) {
    if (--number->owners == 0) {
        free(number);
    }
}

void number_replace(struct number **place, struct number *number) {
    number_drop(*place);
    *place = number;
}

static struct number *trimmed(struct number *number) {
    while (number->length > 0 && number->limbs[number->length - 1] == 0) {
        number->length--;
    }
    return number;
}

struct number *number_from(uint64_t value) {
    struct number *number = make(2);
    number->limbs[0] = (uint32_t)value;
    number->limbs[1] = (uint32_t)(value >> 32);
    return trimmed(number);
}

bool number_is(const struct number *number, uint32_t value) {
    return value == 0 ? number->length == 0 : number->length == 1 && number->limbs[0] == value;
}

int number_compare(const struct number *a, const struct number *b) {
    if (a->length != b->length) {
        return a->length < b->length ? -1 : 1;
    }
    for (uint32_t i = a->length; i > 0; i--) {
        if (a->limbs[i - 1] != b->limbs[i - 1]) {
            return a->limbs[i - 1] < b->limbs[i - 1] ? -1 : 1;
        }
    }
    return 0;
}

struct number *number_add(const struct number *a, const struct number *b) {
    uint32_t longer = a->length > b->length ? a->length : b->length;
    struct number *sum = make(longer + 1);
    uint64_t carry = 0;
    for (uint32_t i = 0; i < longer; i++) {
        carry += i < a->length ? a->limbs[i] : 0;
        carry += i < b->length ? b->limbs[i] : 0;
        sum->limbs[i] = (uint32_t)carry;
        carry >>= 32;
    }
    sum->limbs[longer] = (uint32_t)carry;
    return trimmed(sum);
}

struct number *number_subtract(const struct number *a, const struct number *b) {
    struct number *difference = make(a->length);
    int64_t borrow = 0;
    for (uint32_t i = 0; i < a->length; i++) {
        borrow += (int64_t)a->limbs[i] - (i < b->length ? b->limbs[i] : 0);
        difference->limbs[i] = (uint32_t)borrow;
        borrow = borrow < 0 ? -1 : 0;
    }
    return trimmed(difference);
}

struct number *number_multiply(const struct number *a, const struct number *b) {
    struct number *product = make(a->length + b->length);
    memset(product->limbs, 0, product->length * sizeof product->limbs[0]);
    for (uint32_t i = 0; i < a->length; i++) {
        uint64_t carry = 0;
        for (uint32_t j = 0; j < b->length; j++) {
            carry += (uint64_t)a->limbs[i] * b->limbs[j] + product->limbs[i + j];
            product->limbs[i + j] = (uint32_t)carry;
            carry >>= 32;
        }
        product->limbs[i + b->length] = (uint32_t)carry;
    }
    return trimmed(product);
}

struct number *number_divide_small(const struct number *a, uint32_t divisor, uint32_t *rest) {
    struct number *quotient = make(a->length);
    uint64_t carry = 0;
    for (uint32_t i = a->length; i > 0; i--) {
        carry = carry << 32 | a->limbs[i - 1];
        quotient->limbs[i - 1] = (uint32_t)(carry / divisor);
        carry %= divisor;
    }
    *rest = (uint32_t)carry;
    return trimmed(quotient);
}

/* a * 2^bits, with one limb more than may be needed, which is left in place. */
static struct number *shifted(const struct number *a, unsigned bits) {
    struct number *result = make(a->length + 1);
    uint64_t carry = 0;
    for (uint32_t i = 0; i < a->length; i++) {
        carry |= (uint64_t)a->limbs[i] << bits;
        result->limbs[i] = (uint32_t)carry;
        carry >>= 32;
    }
    result->limbs[a->length] = (uint32_t)carry;
    return result;
}

/* Takes digit * divisor from the limbs of rest at position; gives one divisor back if that was too much. Both
 * divisor and the stretch of rest have one limb on top for the carry. Returns the true digit. */
static uint32_t take_multiple(struct number *rest, uint32_t position, const struct number *divisor,
                              uint32_t length, uint32_t digit) {
    uint32_t *limbs = rest->limbs + position;
    uint64_t product = 0;
    int64_t borrow = 0;
    for (uint32_t i = 0; i <= length; i++) {
        product += (uint64_t)digit * divisor->limbs[i];
        borrow += (int64_t)limbs[i] - (int64_t)(uint32_t)product;
        limbs[i] = (uint32_t)borrow;
        borrow >>= 32;
        product >>= 32;
    }
    if (borrow == 0) {
        return digit;
    }
    uint64_t carry = 0;
    for (uint32_t i = 0; i <= length; i++) {
        carry += (uint64_t)limbs[i] + divisor->limbs[i];
        limbs[i] = (uint32_t)carry;
        carry >>= 32;
    }
    return digit - 1;
}

/* Long division (Knuth, The Art of Computer Programming, volume 2, section 4.3.1). */
struct number *number_divide(struct number *a, struct number *b, struct number **rest) {
    if (b->length < 2 || number_compare(a, b) < 0) {
        uint32_t small = 0;
        bool less = number_compare(a, b) < 0;
        struct number *quotient = less ? number_from(0) : number_divide_small(a, b->limbs[0], &small);
        if (rest != NULL) {
            *rest = less ? number_hold(a) : number_from(small);
        }
        return quotient;
    }
    /* The divisor's highest bit set makes the guess of a digit at most 2 too large; then the next limb of
     * both makes it at most 1. */
    uint32_t length = b->length;
    unsigned bits = (unsigned)__builtin_clz(b->limbs[length - 1]);
    struct number *divisor = shifted(b, bits);
    struct number *left = shifted(a, bits);
    struct number *quotient = make(a->length - length + 1);
    for (uint32_t i = quotient->length; i > 0; i--) {
        const uint32_t *top = left->limbs + i - 1 + length;
        uint64_t high = (uint64_t)top[0] << 32 | top[-1];
        uint64_t digit = high / divisor->limbs[length - 1];
        uint64_t over = high % divisor->limbs[length - 1];
        while (over <= UINT32_MAX &&
               (digit > UINT32_MAX || digit * divisor->limbs[length - 2] > (over << 32 | top[-2]))) {
            digit--;
            over += divisor->limbs[length - 1];
        }
        quotient->limbs[i - 1] = take_multiple(left, i - 1, divisor, length, (uint32_t)digit);
    }
    number_drop(divisor);
    if (rest != NULL) {
        /* The rest's lowest limbs move down by the same bits. */
        struct number *unshifted = make(length);
        for (uint32_t i = 0; i < length; i++) {
            uint64_t pair = (uint64_t)left->limbs[i + 1] << 32 | left->limbs[i];
            unshifted->limbs[i] = (uint32_t)(pair >> bits);
        }
        *rest = trimmed(unshifted);
    }
    number_drop(left);
    return trimmed(quotient);
}

struct number *number_modulo(struct number *a, struct number *b) {
    struct number *rest;
    number_drop(number_divide(a, b, &rest));
    return rest;
}

/* The whole part of the square root, by Newton's iteration from above. */
struct number *number_square_root(struct number *a) {
    struct number *power = make(a->length / 2 + 2);
    memset(power->limbs, 0, power->length * sizeof power->limbs[0]);
    power->limbs[power->length - 1] = 1;
    struct number *root = power;
    for (;;) {
        struct number *quotient = number_divide(a, root, NULL);
        number_replace(&quotient, number_add(root, quotient));
        uint32_t odd;
        number_replace(&quotient, number_divide_small(quotient, 2, &odd));
        if (number_compare(quotient, root) >= 0) {
            number_drop(quotient);
            return root;
        }
        number_replace(&root, quotient);
    }
}
