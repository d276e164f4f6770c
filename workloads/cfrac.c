/* Factors a number by the continued-fraction method of Morrison and Brillhart, "A Method of Factoring and the
 * Factorization of F7" (1975), as the cfrac program of the allocator literature does (Zorn; Berger et al.):
 * every intermediate result is a number of its own on the heap, with a count of its owners, so that a great
 * many tiny blocks live very shortly. Written from the method's description, sharing no code with that
 * program.
 *
 * The continued fraction of sqrt(kN) gives pairs A, Q with A^2 = (-1)^n Q (mod N) and Q small. Those whose Q
 * splits into small primes are collected, until some of them multiply to a square on both sides: X^2 = Y^2
 * (mod N), and gcd(X - Y, N) is likely a factor. */
#include "support.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char program_name[] = "cfrac";

/* A whole number, never negative. It does not change once it is made; who takes a further reference holds it,
 * and the last one to drop it frees it. Functions borrow what they are given and return a new reference. */
struct number {
    uint32_t owners;
    uint32_t length;  /* limbs that count: the last one is not 0 */
    uint32_t limbs[]; /* the lowest first */
};

static unsigned long numbers_made;

static struct number *make(uint32_t length) {
    struct number *number = checked(malloc(sizeof *number + length * sizeof number->limbs[0]), program_name);
    number->owners = 1;
    number->length = length;
    numbers_made++;
    return number;
}

static struct number *hold(struct number *number) {
    number->owners++;
    return number;
}

static void drop(struct number *number) {
    if (--number->owners == 0) {
        free(number);
    }
}

/* For x = f(x, ...). */
static void replace(struct number **place, struct number *number) {
    drop(*place);
    *place = number;
}

static struct number *trimmed(struct number *number) {
    while (number->length > 0 && number->limbs[number->length - 1] == 0) {
        number->length--;
    }
    return number;
}

static struct number *from(uint64_t value) {
    struct number *number = make(2);
    number->limbs[0] = (uint32_t)value;
    number->limbs[1] = (uint32_t)(value >> 32);
    return trimmed(number);
}

static bool is(const struct number *number, uint32_t value) {
    return value == 0 ? number->length == 0 : number->length == 1 && number->limbs[0] == value;
}

static int compare(const struct number *a, const struct number *b) {
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

static struct number *add(const struct number *a, const struct number *b) {
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

/* a is not less than b. */
static struct number *subtract(const struct number *a, const struct number *b) {
    struct number *difference = make(a->length);
    int64_t borrow = 0;
    for (uint32_t i = 0; i < a->length; i++) {
        borrow += (int64_t)a->limbs[i] - (i < b->length ? b->limbs[i] : 0);
        difference->limbs[i] = (uint32_t)borrow;
        borrow = borrow < 0 ? -1 : 0;
    }
    return trimmed(difference);
}

static struct number *multiply(const struct number *a, const struct number *b) {
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

static struct number *divide_small(const struct number *a, uint32_t divisor, uint32_t *rest) {
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

/* Long division (Knuth, The Art of Computer Programming, volume 2, section 4.3.1). rest may be NULL. */
static struct number *divide(struct number *a, struct number *b, struct number **rest) {
    if (b->length < 2 || compare(a, b) < 0) {
        uint32_t small = 0;
        bool less = compare(a, b) < 0;
        struct number *quotient = less ? from(0) : divide_small(a, b->limbs[0], &small);
        if (rest != NULL) {
            *rest = less ? hold(a) : from(small);
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
    drop(divisor);
    if (rest != NULL) {
        /* The rest's lowest limbs move down by the same bits. */
        struct number *unshifted = make(length);
        for (uint32_t i = 0; i < length; i++) {
            uint64_t pair = (uint64_t)left->limbs[i + 1] << 32 | left->limbs[i];
            unshifted->limbs[i] = (uint32_t)(pair >> bits);
        }
        *rest = trimmed(unshifted);
    }
    drop(left);
    return trimmed(quotient);
}

static struct number *modulo(struct number *a, struct number *b) {
    struct number *rest;
    drop(divide(a, b, &rest));
    return rest;
}

static struct number *multiply_modulo(const struct number *a, const struct number *b,
                                      struct number *modulus) {
    struct number *product = multiply(a, b);
    replace(&product, modulo(product, modulus));
    return product;
}

static struct number *power_modulo(struct number *base, const struct number *exponent,
                                   struct number *modulus) {
    struct number *result = from(1);
    for (uint32_t i = 32 * exponent->length; i > 0; i--) {
        replace(&result, multiply_modulo(result, result, modulus));
        if ((exponent->limbs[(i - 1) / 32] >> (i - 1) % 32 & 1) != 0) {
            replace(&result, multiply_modulo(result, base, modulus));
        }
    }
    return result;
}

static struct number *common_divisor(struct number *a, struct number *b) {
    struct number *x = hold(a);
    struct number *y = hold(b);
    while (!is(y, 0)) {
        struct number *rest = modulo(x, y);
        drop(x);
        x = y;
        y = rest;
    }
    drop(y);
    return x;
}

/* The whole part of the square root, by Newton's iteration from above. */
static struct number *square_root(struct number *a) {
    struct number *power = make(a->length / 2 + 2);
    memset(power->limbs, 0, power->length * sizeof power->limbs[0]);
    power->limbs[power->length - 1] = 1;
    struct number *root = power;
    for (;;) {
        struct number *quotient = divide(a, root, NULL);
        replace(&quotient, add(root, quotient));
        uint32_t odd;
        replace(&quotient, divide_small(quotient, 2, &odd));
        if (compare(quotient, root) >= 0) {
            drop(quotient);
            return root;
        }
        replace(&root, quotient);
    }
}

static struct number *parse(const char *text) {
    struct number *number = from(0);
    struct number *ten = from(10);
    for (; *text != '\0'; text++) {
        struct number *digit = from((uint64_t)(*text - '0'));
        replace(&number, multiply(number, ten));
        replace(&number, add(number, digit));
        drop(digit);
    }
    drop(ten);
    return number;
}

enum { MOST_DIGITS = 60, TEXT_ROOM = 80 };

static void print_to(char text[TEXT_ROOM], struct number *number) {
    char reversed[TEXT_ROOM];
    size_t count = 0;
    struct number *left = hold(number);
    do {
        uint32_t digit;
        replace(&left, divide_small(left, 10, &digit));
        reversed[count++] = (char)('0' + digit);
    } while (!is(left, 0) && count < TEXT_ROOM - 1);
    drop(left);
    for (size_t i = 0; i < count; i++) {
        text[i] = reversed[count - 1 - i];
    }
    text[count] = '\0';
}

/* Miller and Rabin's test for the first primes as bases: enough below 3.3e24, and likely enough above. */
static bool is_prime(struct number *n) {
    static const uint32_t bases[] = {2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41};
    struct number *one = from(1);
    struct number *less = subtract(n, one);
    struct number *odd = hold(less);
    unsigned twos = 0;
    while (odd->limbs[0] % 2 == 0) {
        uint32_t rest;
        replace(&odd, divide_small(odd, 2, &rest));
        twos++;
    }
    bool prime = true;
    for (size_t i = 0; prime && i < sizeof bases / sizeof bases[0]; i++) {
        struct number *base = from(bases[i]);
        struct number *power = power_modulo(base, odd, n);
        bool passes = is(power, 1) || compare(power, less) == 0 || compare(base, n) == 0;
        for (unsigned square = 1; !passes && square < twos; square++) {
            replace(&power, multiply_modulo(power, power, n));
            passes = compare(power, less) == 0;
        }
        prime = passes;
        drop(power);
        drop(base);
    }
    drop(odd);
    drop(less);
    drop(one);
    return prime;
}

/* The primes that can divide a Q: those modulo which kN is a square. Column 0 of the matrix is the sign. */
struct base {
    uint32_t *primes;
    unsigned count;
};

static uint32_t power_small(uint64_t base, uint32_t exponent, uint32_t modulus) {
    uint64_t result = 1;
    for (; exponent > 0; exponent >>= 1) {
        result = exponent % 2 != 0 ? result * base % modulus : result;
        base = base * base % modulus;
    }
    return (uint32_t)result;
}

static bool prime_small(uint32_t candidate) {
    for (uint32_t d = 3; d * d <= candidate; d += 2) {
        if (candidate % d == 0) {
            return false;
        }
    }
    return true;
}

static struct base find_base(const struct number *kn, unsigned count) {
    struct base base = {checked(malloc(count * sizeof(uint32_t)), program_name), 0};
    base.primes[base.count++] = 2;
    for (uint32_t candidate = 3; base.count < count; candidate += 2) {
        if (prime_small(candidate)) {
            uint32_t rest;
            drop(divide_small(kn, candidate, &rest));
            if (rest == 0 || power_small(rest, (candidate - 1) / 2, candidate) == 1) {
                base.primes[base.count++] = candidate;
            }
        }
    }
    return base;
}

/* A pair whose Q splits: A^2 = +-Q (mod N). */
struct relation {
    struct number *a;
    struct number *q; /* a square, the sign aside, once relations have been multiplied */
    uint64_t *odd;    /* bit i: prime i-1 divides Q to an odd power; bit 0: the sign is minus */
    uint64_t *origin; /* bit i: relation i is part of this product */
};

struct search {
    struct number *n;
    struct base base;
    unsigned wanted; /* relations: some more than the columns of the matrix */
    unsigned words;  /* in a row of bits */
    unsigned found;
    unsigned long tried;
    struct relation *relations;
};

/* Most Qs do not split, and most of them show it early: one that has not become a limb shorter by an eighth
 * of the primes is given up (as by Pomerance's early abort). */
static bool split(const struct search *search, struct number *q, uint64_t *odd) {
    struct number *left = hold(q);
    uint32_t abort_length = q->length;
    for (unsigned i = 0; i < search->base.count && !is(left, 1); i++) {
        if (i == search->base.count / 8 && left->length >= abort_length && abort_length > 1) {
            break;
        }
        for (;;) {
            uint32_t rest;
            struct number *quotient = divide_small(left, search->base.primes[i], &rest);
            if (rest != 0) {
                drop(quotient);
                break;
            }
            replace(&left, quotient);
            odd[(i + 1) / 64] ^= 1ULL << (i + 1) % 64;
        }
    }
    bool all = is(left, 1);
    drop(left);
    return all;
}

static void consider(struct search *search, struct number *a, struct number *q, bool minus) {
    struct relation *relation = &search->relations[search->found];
    memset(relation->odd, 0, search->words * sizeof(uint64_t));
    relation->odd[0] = minus;
    search->tried++;
    if (split(search, q, relation->odd)) {
        relation->a = hold(a);
        relation->q = hold(q);
        search->found++;
    }
}

/* Expands sqrt(kN); stops early where the expansion repeats, which is where Q is 1 again. */
static void collect(struct search *search, struct number *kn) {
    struct number *root = square_root(kn);
    struct number *square = multiply(root, root);
    struct number *p = hold(root);              /* P(1) */
    struct number *q_before = from(1);          /* Q(0) */
    struct number *q = subtract(kn, square);    /* Q(1) */
    struct number *a_before = from(1);          /* A(-1) */
    struct number *a = modulo(root, search->n); /* A(0) */
    drop(square);
    for (bool minus = true; search->found < search->wanted && !is(q, 0); minus = !minus) {
        consider(search, a, q, minus);
        if (is(q, 1)) {
            break;
        }
        struct number *sum = add(root, p);
        struct number *rest;
        struct number *step = divide(sum, q, &rest);
        drop(sum);
        struct number *next_p = subtract(root, rest);
        drop(rest);
        /* Q(n+1) = Q(n-1) + step * (P(n) - P(n+1)), whose bracket may be negative. */
        bool grows = compare(p, next_p) >= 0;
        struct number *change = grows ? subtract(p, next_p) : subtract(next_p, p);
        replace(&change, multiply(step, change));
        struct number *next_q = grows ? add(q_before, change) : subtract(q_before, change);
        drop(change);
        struct number *next_a = multiply(step, a);
        drop(step);
        replace(&next_a, add(next_a, a_before));
        replace(&next_a, modulo(next_a, search->n));
        replace(&p, next_p);
        replace(&q_before, q);
        q = next_q;
        replace(&a_before, a);
        a = next_a;
    }
    drop(a);
    drop(a_before);
    drop(q);
    drop(q_before);
    drop(p);
    drop(root);
}

/* Multiplies the relations that origin names: X is the product of their A, and Y^2 that of their Q. Y is
 * built without the great product: what each new Q has in common with the product so far goes straight into
 * Y. */
static struct number *try_product(const struct search *search, const uint64_t *origin) {
    struct number *x = from(1);
    struct number *y = from(1);
    struct number *left = from(1);
    for (unsigned i = 0; i < search->found; i++) {
        if ((origin[i / 64] >> i % 64 & 1) == 0) {
            continue;
        }
        const struct relation *relation = &search->relations[i];
        replace(&x, multiply_modulo(x, relation->a, search->n));
        struct number *common = common_divisor(left, relation->q);
        replace(&y, multiply_modulo(y, common, search->n));
        replace(&left, divide(left, common, NULL));
        struct number *other = divide(relation->q, common, NULL);
        replace(&left, multiply(left, other));
        drop(other);
        drop(common);
    }
    struct number *root = square_root(left);
    struct number *square = multiply(root, root);
    if (compare(square, left) != 0) {
        fail(program_name, "a product that must be a square is none");
    }
    replace(&y, multiply_modulo(y, root, search->n));
    struct number *x_square = multiply_modulo(x, x, search->n);
    struct number *y_square = multiply_modulo(y, y, search->n);
    if (compare(x_square, y_square) != 0) {
        fail(program_name, "two squares that must be alike are not");
    }
    struct number *difference = compare(x, y) >= 0 ? subtract(x, y) : subtract(y, x);
    struct number *factor = common_divisor(difference, search->n);
    drop(difference);
    drop(y_square);
    drop(x_square);
    drop(square);
    drop(root);
    drop(left);
    drop(y);
    drop(x);
    return factor;
}

static bool has_column(const uint64_t *odd, unsigned column) {
    return (odd[column / 64] >> column % 64 & 1) != 0;
}

static void add_row(uint64_t *to, const uint64_t *other, unsigned words) {
    for (unsigned i = 0; i < words; i++) {
        to[i] ^= other[i];
    }
}

/* Gaussian elimination modulo 2. Each row that becomes empty is a product that is a square. Returns NULL if
 * none of them gives a factor. */
static struct number *combine(const struct search *search) {
    bool *used = checked(calloc(search->found, sizeof *used), program_name);
    for (unsigned i = 0; i < search->found; i++) {
        memset(search->relations[i].origin, 0, search->words * sizeof(uint64_t));
        search->relations[i].origin[i / 64] = 1ULL << i % 64;
    }
    for (unsigned column = 0; column <= search->base.count; column++) {
        unsigned pivot = 0;
        while (pivot < search->found && (used[pivot] || !has_column(search->relations[pivot].odd, column))) {
            pivot++;
        }
        for (unsigned i = 0; pivot < search->found && i < search->found; i++) {
            if (i != pivot && has_column(search->relations[i].odd, column)) {
                add_row(search->relations[i].odd, search->relations[pivot].odd, search->words);
                add_row(search->relations[i].origin, search->relations[pivot].origin, search->words);
            }
        }
        if (pivot < search->found) {
            used[pivot] = true;
        }
    }
    struct number *factor = NULL;
    for (unsigned i = 0; i < search->found && factor == NULL; i++) {
        if (!used[i]) {
            factor = try_product(search, search->relations[i].origin);
            if (is(factor, 1) || compare(factor, search->n) == 0) {
                drop(factor);
                factor = NULL;
            }
        }
    }
    free(used);
    return factor;
}

static struct number *factor_with(struct number *n, uint32_t multiplier, unsigned primes,
                                  unsigned long *relations) {
    enum { SPARE = 16 };
    struct number *k = from(multiplier);
    struct number *kn = multiply(n, k);
    struct search search = {.n = n, .base = find_base(kn, primes), .wanted = primes + 1 + SPARE};
    search.words = (search.wanted + 1 + 63) / 64;
    search.relations = checked(calloc(search.wanted + 1, sizeof *search.relations), program_name);
    for (unsigned i = 0; i <= search.wanted; i++) {
        search.relations[i].odd = checked(calloc(search.words, sizeof(uint64_t)), program_name);
        search.relations[i].origin = checked(calloc(search.words, sizeof(uint64_t)), program_name);
    }
    collect(&search, kn);
    struct number *factor = combine(&search);
    *relations += search.found;
    for (unsigned i = 0; i <= search.wanted; i++) {
        if (i < search.found) {
            drop(search.relations[i].a);
            drop(search.relations[i].q);
        }
        free(search.relations[i].odd);
        free(search.relations[i].origin);
    }
    free(search.relations);
    free(search.base.primes);
    drop(kn);
    drop(k);
    return factor;
}

/* A divisor that is a square or small needs no continued fraction. Returns NULL where there is none such. */
static struct number *factor_simply(struct number *n) {
    enum { SMALL = 1000 };
    for (uint32_t d = 2; d < SMALL; d++) {
        uint32_t rest;
        struct number *quotient = divide_small(n, d, &rest);
        bool proper = rest == 0 && !is(quotient, 1);
        drop(quotient);
        if (proper) {
            return from(d);
        }
    }
    struct number *root = square_root(n);
    struct number *square = multiply(root, root);
    bool whole = compare(square, n) == 0;
    drop(square);
    if (whole) {
        return root;
    }
    drop(root);
    return NULL;
}

static struct number *factor_of(struct number *n, unsigned primes, unsigned long *relations) {
    /* Where the expansion of one root repeats too soon, that of a multiple goes on. */
    static const uint32_t multipliers[] = {1, 2, 3, 5, 6, 7, 10, 11, 13, 14, 15, 17, 19, 21, 22, 23};
    struct number *factor = factor_simply(n);
    for (size_t i = 0; factor == NULL && i < sizeof multipliers / sizeof multipliers[0]; i++) {
        factor = factor_with(n, multipliers[i], primes, relations);
    }
    if (factor == NULL) {
        fail(program_name, "found no factor: try more primes");
    }
    return factor;
}

int main(int argc, char **argv) {
    unsigned long digits = (unsigned long)"8539734222673567172606511345051136291";
    unsigned long primes = 500;
    const struct option_spec options[] = {
        {"number", "what to factor: 2 to 60 decimal digits, no prime", OPTION_TEXT, &digits, 0, 0, NULL},
        {"primes", "primes that the numbers of a pair are split into", OPTION_COUNT, &primes, 8, 20000, NULL},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "Factors a number by continued fractions, with every intermediate number on the heap.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);
    const char *text = (const char *)digits;
    size_t length = strlen(text);
    if (length < 2 || length > MOST_DIGITS || strspn(text, "0123456789") != length || text[0] == '0') {
        reject_arguments(program_name, "--number is not a number of 2 to 60 digits");
    }

    struct number *n = parse(text);
    if (is_prime(n)) {
        reject_arguments(program_name, "--number is prime");
    }
    unsigned long relations = 0;
    double begin = now_seconds();
    struct number *factor = factor_of(n, (unsigned)primes, &relations);
    struct number *other = divide(n, factor, NULL);
    double seconds = now_seconds() - begin;

    struct number *product = multiply(factor, other);
    if (compare(product, n) != 0 || is(factor, 1) || is(other, 1)) {
        fail(program_name, "the factors do not multiply to the number");
    }
    drop(product);
    struct number *smaller = compare(factor, other) < 0 ? factor : other;
    char smaller_text[TEXT_ROOM];
    char larger_text[TEXT_ROOM];
    print_to(smaller_text, smaller);
    print_to(larger_text, smaller == factor ? other : factor);
    drop(other);
    drop(factor);
    drop(n);
    printf("{\"workload\": \"cfrac\", \"number\": \"%s\", \"primes\": %lu, \"factors\": [\"%s\", \"%s\"], "
           "\"relations\": %lu, \"numbers\": %lu, \"seconds\": %.6f}\n",
           text, primes, smaller_text, larger_text, relations, numbers_made, seconds);
    return 0;
}
