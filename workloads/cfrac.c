/* Factors a number by the continued-fraction method of Morrison and Brillhart, "A Method of Factoring and
 * the Factorization of F7" (1975), like the cfrac program of the allocator literature (Zorn; Berger et al.):
 * every intermediate result is a reference-counted number on the heap, so that very many tiny blocks live
 * very briefly. Written from the method's description; shares no code with that program.
 *
 * The continued fraction of sqrt(kN) yields pairs A, Q with A^2 = (-1)^n Q (mod N) and small Q. Pairs whose
 * Q splits into small primes are collected until some of them multiply to a square on both sides: X^2 = Y^2
 * (mod N), and gcd(X - Y, N) is probably a factor. */
#include "number.h"
#include "support.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char program_name[] = "cfrac";

static struct number *multiply_modulo(const struct number *a, const struct number *b,
                                      struct number *modulus) {
    struct number *product = number_multiply(a, b);
    number_replace(&product, number_modulo(product, modulus));
    return product;
}

static struct number *power_modulo(struct number *base, const struct number *exponent,
                                   struct number *modulus) {
    struct number *result = number_from(1);
    for (uint32_t i = 32 * exponent->length; i > 0; i--) {
        number_replace(&result, multiply_modulo(result, result, modulus));
        if ((exponent->limbs[(i - 1) / 32] >> (i - 1) % 32 & 1) != 0) {
            number_replace(&result, multiply_modulo(result, base, modulus));
        }
    }
    return result;
}

static struct number *common_divisor(struct number *a, struct number *b) {
    struct number *x = number_hold(a);
    struct number *y = number_hold(b);
    while (!number_is(y, 0)) {
        struct number *rest = number_modulo(x, y);
        number_drop(x);
        x = y;
        y = rest;
    }
    number_drop(y);
    return x;
}

static struct number *parse(const char *text) {
    struct number *number = number_from(0);
    struct number *ten = number_from(10);
    for (; *text != '\0'; text++) {
        struct number *digit = number_from((uint64_t)(*text - '0'));
        number_replace(&number, number_multiply(number, ten));
        number_replace(&number, number_add(number, digit));
        number_drop(digit);
    }
    number_drop(ten);
    return number;
}

enum { MOST_DIGITS = 60, TEXT_ROOM = 80 };

static void print_to(char text[TEXT_ROOM], struct number *number) {
    char reversed[TEXT_ROOM];
    size_t count = 0;
    struct number *left = number_hold(number);
    do {
        uint32_t digit;
        number_replace(&left, number_divide_small(left, 10, &digit));
        reversed[count++] = (char)('0' + digit);
    } while (!number_is(left, 0) && count < TEXT_ROOM - 1);
    number_drop(left);
    for (size_t i = 0; i < count; i++) {
        text[i] = reversed[count - 1 - i];
    }
    text[count] = '\0';
}

/* Miller and Rabin's test for the first primes as bases: enough below 3.3e24, and likely enough above. */
static bool is_prime(struct number *n) {
    static const uint32_t bases[] = {2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41};
    struct number *one = number_from(1);
    struct number *less = number_subtract(n, one);
    struct number *odd = number_hold(less);
    unsigned twos = 0;
    while (odd->limbs[0] % 2 == 0) {
        uint32_t rest;
        number_replace(&odd, number_divide_small(odd, 2, &rest));
        twos++;
    }
    bool prime = true;
    for (size_t i = 0; prime && i < sizeof bases / sizeof bases[0]; i++) {
        struct number *base = number_from(bases[i]);
        struct number *power = power_modulo(base, odd, n);
        bool passes = number_is(power, 1) || number_compare(power, less) == 0 || number_compare(base, n) == 0;
        for (unsigned square = 1; !passes && square < twos; square++) {
            number_replace(&power, multiply_modulo(power, power, n));
            passes = number_compare(power, less) == 0;
        }
        prime = passes;
        number_drop(power);
        number_drop(base);
    }
    number_drop(odd);
    number_drop(less);
    number_drop(one);
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
            number_drop(number_divide_small(kn, candidate, &rest));
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
    struct number *left = number_hold(q);
    uint32_t abort_length = q->length;
    for (unsigned i = 0; i < search->base.count && !number_is(left, 1); i++) {
        if (i == search->base.count / 8 && left->length >= abort_length && abort_length > 1) {
            break;
        }
        for (;;) {
            uint32_t rest;
            struct number *quotient = number_divide_small(left, search->base.primes[i], &rest);
            if (rest != 0) {
                number_drop(quotient);
                break;
            }
            number_replace(&left, quotient);
            odd[(i + 1) / 64] ^= 1ULL << (i + 1) % 64;
        }
    }
    bool all = number_is(left, 1);
    number_drop(left);
    return all;
}

static void consider(struct search *search, struct number *a, struct number *q, bool minus) {
    struct relation *relation = &search->relations[search->found];
    memset(relation->odd, 0, search->words * sizeof(uint64_t));
    relation->odd[0] = minus;
    search->tried++;
    if (split(search, q, relation->odd)) {
        relation->a = number_hold(a);
        relation->q = number_hold(q);
        search->found++;
    }
}

/* Expands sqrt(kN); stops early where the expansion repeats, which is where Q is 1 again. */
static void collect(struct search *search, struct number *kn) {
    struct number *root = number_square_root(kn);
    struct number *square = number_multiply(root, root);
    struct number *p = number_hold(root);              /* P(1) */
    struct number *q_before = number_from(1);          /* Q(0) */
    struct number *q = number_subtract(kn, square);    /* Q(1) */
    struct number *a_before = number_from(1);          /* A(-1) */
    struct number *a = number_modulo(root, search->n); /* A(0) */
    number_drop(square);
    for (bool minus = true; search->found < search->wanted && !number_is(q, 0); minus = !minus) {
        consider(search, a, q, minus);
        if (number_is(q, 1)) {
            break;
        }
        struct number *sum = number_add(root, p);
        struct number *rest;
        struct number *step = number_divide(sum, q, &rest);
        number_drop(sum);
        struct number *next_p = number_subtract(root, rest);
        number_drop(rest);
        /* Q(n+1) = Q(n-1) + step * (P(n) - P(n+1)), whose bracket may be negative. */
        bool grows = number_compare(p, next_p) >= 0;
        struct number *change = grows ? number_subtract(p, next_p) : number_subtract(next_p, p);
        number_replace(&change, number_multiply(step, change));
        struct number *next_q = grows ? number_add(q_before, change) : number_subtract(q_before, change);
        number_drop(change);
        struct number *next_a = number_multiply(step, a);
        number_drop(step);
        number_replace(&next_a, number_add(next_a, a_before));
        number_replace(&next_a, number_modulo(next_a, search->n));
        number_replace(&p, next_p);
        number_replace(&q_before, q);
        q = next_q;
        number_replace(&a_before, a);
        a = next_a;
    }
    number_drop(a);
    number_drop(a_before);
    number_drop(q);
    number_drop(q_before);
    number_drop(p);
    number_drop(root);
}

/* Multiplies the relations that origin names: X is the product of their A, and Y^2 that of their Q. Y is
 * built without the great product: what each new Q has in common with the product so far goes straight into
 * Y. */
static struct number *try_product(const struct search *search, const uint64_t *origin) {
    struct number *x = number_from(1);
    struct number *y = number_from(1);
    struct number *left = number_from(1);
    for (unsigned i = 0; i < search->found; i++) {
        if ((origin[i / 64] >> i % 64 & 1) == 0) {
            continue;
        }
        const struct relation *relation = &search->relations[i];
        number_replace(&x, multiply_modulo(x, relation->a, search->n));
        struct number *common = common_divisor(left, relation->q);
        number_replace(&y, multiply_modulo(y, common, search->n));
        number_replace(&left, number_divide(left, common, NULL));
        struct number *other = number_divide(relation->q, common, NULL);
        number_replace(&left, number_multiply(left, other));
        number_drop(other);
        number_drop(common);
    }
    struct number *root = number_square_root(left);
    struct number *square = number_multiply(root, root);
    if (number_compare(square, left) != 0) {
        fail(program_name, "a product that must be a square is none");
    }
    number_replace(&y, multiply_modulo(y, root, search->n));
    struct number *x_square = multiply_modulo(x, x, search->n);
    struct number *y_square = multiply_modulo(y, y, search->n);
    if (number_compare(x_square, y_square) != 0) {
        fail(program_name, "two squares that must be alike are not");
    }
    struct number *difference = number_compare(x, y) >= 0 ? number_subtract(x, y) : number_subtract(y, x);
    struct number *factor = common_divisor(difference, search->n);
    number_drop(difference);
    number_drop(y_square);
    number_drop(x_square);
    number_drop(square);
    number_drop(root);
    number_drop(left);
    number_drop(y);
    number_drop(x);
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
    bool *used = checked(calloc(search->wanted + 1UL, sizeof *used), program_name);
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
            if (number_is(factor, 1) || number_compare(factor, search->n) == 0) {
                number_drop(factor);
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
    struct number *k = number_from(multiplier);
    struct number *kn = number_multiply(n, k);
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
            number_drop(search.relations[i].a);
            number_drop(search.relations[i].q);
        }
        free(search.relations[i].odd);
        free(search.relations[i].origin);
    }
    free(search.relations);
    free(search.base.primes);
    number_drop(kn);
    number_drop(k);
    return factor;
}

/* A divisor that is a square or small needs no continued fraction. Returns NULL where there is none such. */
static struct number *factor_simply(struct number *n) {
    enum { SMALL = 1000 };
    for (uint32_t d = 2; d < SMALL; d++) {
        uint32_t rest;
        struct number *quotient = number_divide_small(n, d, &rest);
        bool proper = rest == 0 && !number_is(quotient, 1);
        number_drop(quotient);
        if (proper) {
            return number_from(d);
        }
    }
    struct number *root = number_square_root(n);
    struct number *square = number_multiply(root, root);
    bool whole = number_compare(square, n) == 0;
    number_drop(square);
    if (whole) {
        return root;
    }
    number_drop(root);
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
        {"number", "the number to factor: 2 to 60 decimal digits, not a prime", OPTION_TEXT, &digits, 0, 0,
         NULL},
        {"primes", "number of primes in the factor base", OPTION_COUNT, &primes, 8, 20000, NULL},
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
    struct number *other = number_divide(n, factor, NULL);
    double seconds = now_seconds() - begin;

    struct number *product = number_multiply(factor, other);
    if (number_compare(product, n) != 0 || number_is(factor, 1) || number_is(other, 1)) {
        fail(program_name, "the factors do not multiply to the number");
    }
    number_drop(product);
    struct number *smaller = number_compare(factor, other) < 0 ? factor : other;
    char smaller_text[TEXT_ROOM];
    char larger_text[TEXT_ROOM];
    print_to(smaller_text, smaller);
    print_to(larger_text, smaller == factor ? other : factor);
    number_drop(other);
    number_drop(factor);
    number_drop(n);
    printf("{\"workload\": \"cfrac\", \"number\": \"%s\", \"primes\": %lu, \"factors\": [\"%s\", \"%s\"], "
           "\"relations\": %lu, \"numbers\": %lu, \"seconds\": %.6f}\n",
           text, primes, smaller_text, larger_text, relations, number_made(), seconds);
    return 0;
}
