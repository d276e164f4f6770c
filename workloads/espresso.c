/* Minimizes two-level logic in the manner of Espresso (Brayton et al., "Logic Minimization Algorithms for
 * VLSI Synthesis", 1984), one of the programs used to compare allocators since Zorn and Grunwald. Covers of
 * cubes are expanded, made irredundant and reduced until they no longer shrink; every cofactor, complement
 * and trial cube on the way is a set of bits on the heap. The functions are random, and every result is
 * compared with its function on all inputs. Written from the algorithm's description; shares no code with
 * that program. */
#include "support.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char program_name[] = "espresso";

enum { MOST_INPUTS = 16, MOST_OUTPUTS = 64, MOST_WORDS = 2 };

/* A cube has two bits for each input, "may be 0" and "may be 1", and one bit for each output that it is part
 * of: the outputs are one more variable, of many values. A cube with a variable that may have no value is
 * empty. */
struct space {
    unsigned inputs;
    unsigned outputs;
    unsigned words;
    uint64_t low[MOST_WORDS];    /* the first bit of each input */
    uint64_t output[MOST_WORDS]; /* all bits of the outputs */
    uint64_t everything[MOST_WORDS];
};

struct cover {
    uint64_t **cubes;
    size_t count;
    size_t room;
};

static unsigned long cubes_made;

static struct space make_space(unsigned inputs, unsigned outputs) {
    struct space space = {.inputs = inputs, .outputs = outputs, .words = 1 + (2 * inputs + outputs - 1) / 64};
    for (unsigned bit = 0; bit < 2 * inputs + outputs; bit++) {
        uint64_t mask = 1ULL << bit % 64;
        space.everything[bit / 64] |= mask;
        space.low[bit / 64] |= bit < 2 * inputs && bit % 2 == 0 ? mask : 0;
        space.output[bit / 64] |= bit < 2 * inputs ? 0 : mask;
    }
    return space;
}

/* Variables: each input, and then the outputs together. */
static unsigned first_bit(unsigned variable) {
    return 2 * variable;
}

static unsigned values_of(const struct space *space, unsigned variable) {
    return variable < space->inputs ? 2 : space->outputs;
}

static uint64_t *copy(const struct space *space, const uint64_t *cube) {
    uint64_t *made = checked(malloc(space->words * sizeof *made), program_name);
    memcpy(made, cube, space->words * sizeof *made);
    cubes_made++;
    return made;
}

static bool has_bit(const uint64_t *cube, unsigned bit) {
    return (cube[bit / 64] >> bit % 64 & 1) != 0;
}

static bool same(const struct space *space, const uint64_t *a, const uint64_t *b) {
    return memcmp(a, b, space->words * sizeof *a) == 0;
}

static bool is_everything(const struct space *space, const uint64_t *cube) {
    return same(space, cube, space->everything);
}

static bool within(const struct space *space, const uint64_t *inner, const uint64_t *outer) {
    for (unsigned i = 0; i < space->words; i++) {
        if ((inner[i] & ~outer[i]) != 0) {
            return false;
        }
    }
    return true;
}

/* Whether both may have a value in common in every variable. */
static bool meet(const struct space *space, const uint64_t *a, const uint64_t *b) {
    uint64_t outputs = 0;
    for (unsigned i = 0; i < space->words; i++) {
        uint64_t both = a[i] & b[i];
        if (((both | both >> 1) & space->low[i]) != space->low[i]) {
            return false;
        }
        outputs |= both & space->output[i];
    }
    return outputs != 0;
}

static bool is_full(const struct space *space, const uint64_t *cube, unsigned variable) {
    for (unsigned value = 0; value < values_of(space, variable); value++) {
        if (!has_bit(cube, first_bit(variable) + value)) {
            return false;
        }
    }
    return true;
}

/* Everything with one value only of a variable. */
static uint64_t *literal(const struct space *space, unsigned variable, unsigned value) {
    uint64_t *cube = copy(space, space->everything);
    for (unsigned other = 0; other < values_of(space, variable); other++) {
        unsigned bit = first_bit(variable) + other;
        if (other != value) {
            cube[bit / 64] &= ~(1ULL << bit % 64);
        }
    }
    return cube;
}

/* The cover takes the cube. */
static void append(struct cover *cover, uint64_t *cube) {
    if (cover->count == cover->room) {
        cover->room = cover->room == 0 ? 4 : 2 * cover->room;
        cover->cubes =
            checked(realloc((void *)cover->cubes, cover->room * sizeof *cover->cubes), program_name);
    }
    cover->cubes[cover->count++] = cube;
}

static void append_copies(const struct space *space, struct cover *cover, const struct cover *other) {
    for (size_t i = 0; i < other->count; i++) {
        append(cover, copy(space, other->cubes[i]));
    }
}

static void remove_at(struct cover *cover, size_t place) {
    free(cover->cubes[place]);
    cover->count--;
    memmove((void *)&cover->cubes[place], (void *)&cover->cubes[place + 1],
            (cover->count - place) * sizeof *cover->cubes);
}

static void clear(struct cover *cover) {
    for (size_t i = 0; i < cover->count; i++) {
        free(cover->cubes[i]);
    }
    free((void *)cover->cubes);
    *cover = (struct cover){0};
}

/* Adds to result what a cover looks like from within a cube: its cubes that meet it, with each variable full
 * that has all the values that it has in there. The cube at place without is passed over. */
static void add_cofactor(const struct space *space, struct cover *result, const struct cover *cover,
                         const uint64_t *cube, size_t without) {
    for (size_t i = 0; i < cover->count; i++) {
        if (i != without && meet(space, cover->cubes[i], cube)) {
            uint64_t *seen = copy(space, cover->cubes[i]);
            for (unsigned word = 0; word < space->words; word++) {
                seen[word] |= space->everything[word] & ~cube[word];
            }
            append(result, seen);
        }
    }
}

static struct cover cofactor(const struct space *space, const struct cover *cover, const uint64_t *cube) {
    struct cover result = {0};
    add_cofactor(space, &result, cover, cube, SIZE_MAX);
    return result;
}

/* The variable that the most cubes restrict. */
static unsigned most_active(const struct space *space, const struct cover *cover) {
    unsigned best = 0;
    size_t most = 0;
    for (unsigned variable = 0; variable <= space->inputs; variable++) {
        size_t restricted = 0;
        for (size_t i = 0; i < cover->count; i++) {
            restricted += !is_full(space, cover->cubes[i], variable);
        }
        if (restricted > most) {
            most = restricted;
            best = variable;
        }
    }
    return best;
}

static bool has_everything(const struct space *space, const struct cover *cover) {
    for (size_t i = 0; i < cover->count; i++) {
        if (is_everything(space, cover->cubes[i])) {
            return true;
        }
    }
    return false;
}

/* Whether the cubes together are everything. */
static bool is_tautology(const struct space *space, const struct cover *cover) {
    if (has_everything(space, cover)) {
        return true;
    }
    /* No cube has the value: no cover has it. */
    uint64_t together[MOST_WORDS] = {0};
    for (size_t i = 0; i < cover->count; i++) {
        for (unsigned word = 0; word < space->words; word++) {
            together[word] |= cover->cubes[i][word];
        }
    }
    if (!is_everything(space, together)) {
        return false;
    }
    unsigned variable = most_active(space, cover);
    bool all = true;
    for (unsigned value = 0; all && value < values_of(space, variable); value++) {
        uint64_t *half = literal(space, variable, value);
        struct cover seen = cofactor(space, cover, half);
        all = is_tautology(space, &seen);
        clear(&seen);
        free(half);
    }
    return all;
}

/* What is not in one cube: for each variable, all with a value that the cube has not. */
static struct cover complement_of_cube(const struct space *space, const uint64_t *cube) {
    struct cover result = {0};
    for (unsigned variable = 0; variable <= space->inputs; variable++) {
        if (is_full(space, cube, variable)) {
            continue;
        }
        uint64_t *other = copy(space, space->everything);
        for (unsigned value = 0; value < values_of(space, variable); value++) {
            unsigned bit = first_bit(variable) + value;
            if (has_bit(cube, bit)) {
                other[bit / 64] &= ~(1ULL << bit % 64);
            }
        }
        append(&result, other);
    }
    return result;
}

/* Adds cube, of which one variable has a single value only; joined with one that is alike but for that. */
static void append_or_join(const struct space *space, struct cover *cover, uint64_t *cube,
                           unsigned variable) {
    uint64_t outside[MOST_WORDS];
    memcpy(outside, space->everything, sizeof outside);
    for (unsigned value = 0; value < values_of(space, variable); value++) {
        unsigned bit = first_bit(variable) + value;
        outside[bit / 64] &= ~(1ULL << bit % 64);
    }
    for (size_t i = 0; i < cover->count; i++) {
        uint64_t different = 0;
        for (unsigned word = 0; word < space->words; word++) {
            different |= (cover->cubes[i][word] ^ cube[word]) & outside[word];
        }
        if (different == 0) {
            for (unsigned word = 0; word < space->words; word++) {
                cover->cubes[i][word] |= cube[word];
            }
            free(cube);
            return;
        }
    }
    append(cover, cube);
}

static struct cover complement(const struct space *space, const struct cover *cover) {
    struct cover result = {0};
    if (has_everything(space, cover)) {
        return result;
    }
    if (cover->count == 0) {
        append(&result, copy(space, space->everything));
        return result;
    }
    if (cover->count == 1) {
        return complement_of_cube(space, cover->cubes[0]);
    }
    unsigned variable = most_active(space, cover);
    for (unsigned value = 0; value < values_of(space, variable); value++) {
        uint64_t *half = literal(space, variable, value);
        struct cover seen = cofactor(space, cover, half);
        struct cover missing = complement(space, &seen);
        clear(&seen);
        for (size_t i = 0; i < missing.count; i++) {
            uint64_t *cube = copy(space, missing.cubes[i]);
            for (unsigned word = 0; word < space->words; word++) {
                cube[word] &= half[word];
            }
            append_or_join(space, &result, cube, variable);
        }
        clear(&missing);
        free(half);
    }
    return result;
}

static unsigned bits_in(const struct space *space, const uint64_t *cube) {
    unsigned bits = 0;
    for (unsigned word = 0; word < space->words; word++) {
        bits += (unsigned)__builtin_popcountll(cube[word]);
    }
    return bits;
}

static bool meets_any(const struct space *space, const struct cover *cover, const uint64_t *cube) {
    for (size_t i = 0; i < cover->count; i++) {
        if (meet(space, cover->cubes[i], cube)) {
            return true;
        }
    }
    return false;
}

/* The bits that most cubes have are the first to be tried: so a cube grows towards the others. */
static uint64_t *grow(const struct space *space, const struct cover *cover, const struct cover *off,
                      uint64_t *cube) {
    unsigned bits = 2 * space->inputs + space->outputs;
    size_t *votes = checked(calloc(64UL * space->words, sizeof *votes), program_name);
    for (size_t i = 0; i < cover->count; i++) {
        for (unsigned bit = 0; bit < bits; bit++) {
            votes[bit] += has_bit(cover->cubes[i], bit);
        }
    }
    for (;;) {
        unsigned best = bits;
        for (unsigned bit = 0; bit < bits; bit++) {
            if (votes[bit] != SIZE_MAX && !has_bit(cube, bit) && (best == bits || votes[bit] > votes[best])) {
                best = bit;
            }
        }
        if (best == bits) {
            free(votes);
            return cube;
        }
        votes[best] = SIZE_MAX;
        uint64_t *trial = copy(space, cube);
        trial[best / 64] |= 1ULL << best % 64;
        if (meets_any(space, off, trial)) {
            free(trial);
        } else {
            free(cube);
            cube = trial;
        }
    }
}

/* Makes each cube as large as the complement of the function lets it be, the smallest ones first; those that
 * then lie within a grown one go. */
static void expand(const struct space *space, struct cover *cover, const struct cover *off) {
    struct cover grown = {0};
    while (cover->count > 0) {
        size_t smallest = 0;
        for (size_t i = 1; i < cover->count; i++) {
            if (bits_in(space, cover->cubes[i]) < bits_in(space, cover->cubes[smallest])) {
                smallest = i;
            }
        }
        uint64_t *cube = grow(space, cover, off, copy(space, cover->cubes[smallest]));
        for (size_t i = cover->count; i > 0; i--) {
            if (within(space, cover->cubes[i - 1], cube)) {
                remove_at(cover, i - 1);
            }
        }
        for (size_t i = grown.count; i > 0; i--) {
            if (within(space, grown.cubes[i - 1], cube)) {
                remove_at(&grown, i - 1);
            }
        }
        append(&grown, cube);
    }
    clear(cover);
    *cover = grown;
}

/* What the other cubes and the inputs that do not matter look like from within a cube. */
static struct cover seen_from(const struct space *space, const struct cover *cover,
                              const struct cover *free_set, size_t place) {
    struct cover rest = {0};
    add_cofactor(space, &rest, cover, cover->cubes[place], place);
    add_cofactor(space, &rest, free_set, cover->cubes[place], SIZE_MAX);
    return rest;
}

static void make_irredundant(const struct space *space, struct cover *cover, const struct cover *free_set) {
    for (size_t i = cover->count; i > 0; i--) {
        struct cover rest = seen_from(space, cover, free_set, i - 1);
        if (is_tautology(space, &rest)) {
            remove_at(cover, i - 1);
        }
        clear(&rest);
    }
}

/* Makes each cube as small as the others let it be, so that it can grow in another direction. */
static void reduce(const struct space *space, struct cover *cover, const struct cover *free_set) {
    for (size_t i = cover->count; i > 0; i--) {
        struct cover rest = seen_from(space, cover, free_set, i - 1);
        struct cover alone = complement(space, &rest);
        if (alone.count == 0) {
            remove_at(cover, i - 1);
        } else {
            uint64_t *needed = copy(space, alone.cubes[0]);
            for (size_t j = 1; j < alone.count; j++) {
                for (unsigned word = 0; word < space->words; word++) {
                    needed[word] |= alone.cubes[j][word];
                }
            }
            for (unsigned word = 0; word < space->words; word++) {
                needed[word] &= cover->cubes[i - 1][word];
            }
            free(cover->cubes[i - 1]);
            cover->cubes[i - 1] = needed;
        }
        clear(&alone);
        clear(&rest);
    }
}

/* Fewer cubes are better; and as many of them, with fewer restrictions. */
static unsigned long cost(const struct space *space, const struct cover *cover) {
    unsigned long restrictions = 0;
    for (size_t i = 0; i < cover->count; i++) {
        restrictions += 2 * space->inputs + space->outputs - bits_in(space, cover->cubes[i]);
    }
    return cover->count << 32 | restrictions;
}

static struct cover minimise(const struct space *space, const struct cover *on,
                             const struct cover *free_set) {
    struct cover either = {0};
    append_copies(space, &either, on);
    append_copies(space, &either, free_set);
    struct cover off = complement(space, &either);
    clear(&either);

    struct cover best = {0};
    struct cover now = {0};
    append_copies(space, &now, on);
    for (bool first = true;; first = false) {
        expand(space, &now, &off);
        make_irredundant(space, &now, free_set);
        if (!first && cost(space, &now) >= cost(space, &best)) {
            break;
        }
        clear(&best);
        append_copies(space, &best, &now);
        reduce(space, &now, free_set);
    }
    clear(&now);
    clear(&off);
    return best;
}

/* The outputs that a cover sets for an input, one bit each. */
static uint64_t evaluate(const struct space *space, const struct cover *cover, unsigned long input) {
    uint64_t point = 0; /* MOST_INPUTS inputs fit into the first word */
    for (unsigned variable = 0; variable < space->inputs; variable++) {
        point |= ((input >> variable & 1) != 0 ? 2ULL : 1ULL) << 2 * variable;
    }
    uint64_t outputs = 0;
    for (size_t i = 0; i < cover->count; i++) {
        for (unsigned output = 0; (point & ~cover->cubes[i][0]) == 0 && output < space->outputs; output++) {
            outputs |= (uint64_t)has_bit(cover->cubes[i], 2 * space->inputs + output) << output;
        }
    }
    return outputs;
}

/* By trying every input, without the cofactors and complements of the minimiser. */
static void verify(const struct space *space, const struct cover *on, const struct cover *free_set,
                   const struct cover *result) {
    for (unsigned long input = 0; input < 1UL << space->inputs; input++) {
        uint64_t must = evaluate(space, on, input);
        uint64_t may = evaluate(space, free_set, input);
        uint64_t does = evaluate(space, result, input);
        if ((must & ~may & ~does) != 0 || (does & ~(must | may)) != 0) {
            fail(program_name, "a minimised function differs from the given one");
        }
    }
}

/* Each input is restricted in three cubes of four: to 0 or to 1. */
static void add_random(const struct space *space, struct cover *cover, unsigned count,
                       unsigned long long *random) {
    for (unsigned i = 0; i < count; i++) {
        uint64_t *cube = copy(space, space->everything);
        unsigned long long dice = random_next(random);
        for (unsigned variable = 0; variable < space->inputs; variable++, dice >>= 3) {
            unsigned bit = 2 * variable + (unsigned)(dice & 1);
            if ((dice >> 1 & 3) != 0) {
                cube[bit / 64] &= ~(1ULL << bit % 64);
            }
        }
        dice = random_next(random);
        unsigned kept = (unsigned)(random_next(random) % space->outputs);
        for (unsigned output = 0; output < space->outputs; output++, dice >>= 1) {
            unsigned bit = 2 * space->inputs + output;
            if (output != kept && (dice & 1) != 0) {
                cube[bit / 64] &= ~(1ULL << bit % 64);
            }
        }
        append(cover, cube);
    }
}

struct totals {
    unsigned long before;
    unsigned long after;
    unsigned long literals;
    double seconds;
};

static void minimise_random(unsigned long number, unsigned inputs, unsigned outputs, unsigned cubes,
                            struct totals *totals) {
    unsigned long long random = number;
    struct space space = make_space((unsigned)random_between(&random, (inputs + 1) / 2, inputs),
                                    (unsigned)random_between(&random, 1, outputs));
    struct cover on = {0};
    struct cover free_set = {0};
    add_random(&space, &on, (unsigned)random_between(&random, (cubes + 1) / 2, cubes), &random);
    add_random(&space, &free_set, cubes / 8, &random);

    double begin = now_seconds();
    struct cover result = minimise(&space, &on, &free_set);
    totals->seconds += now_seconds() - begin;

    verify(&space, &on, &free_set, &result);
    totals->before += on.count;
    totals->after += result.count;
    for (size_t i = 0; i < result.count; i++) {
        for (unsigned variable = 0; variable < space.inputs; variable++) {
            totals->literals += !is_full(&space, result.cubes[i], variable);
        }
    }
    clear(&result);
    clear(&free_set);
    clear(&on);
}

int main(int argc, char **argv) {
    unsigned long functions = 60;
    unsigned long inputs = 12;
    unsigned long outputs = 16;
    unsigned long cubes = 400;
    const struct option_spec options[] = {
        {"functions", "random functions to minimize", OPTION_COUNT, &functions, 1, 1000000, NULL},
        {"inputs", "maximum inputs of a function; the minimum is half of it", OPTION_COUNT, &inputs, 2,
         MOST_INPUTS, NULL},
        {"outputs", "maximum outputs of a function", OPTION_COUNT, &outputs, 1, MOST_OUTPUTS, NULL},
        {"cubes", "maximum cubes of a function's description; the minimum is half of it", OPTION_COUNT,
         &cubes, 1, 10000, NULL},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "Minimizes two-level logic, with every set of bits on the heap.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);

    struct totals totals = {0};
    for (unsigned long number = 0; number < functions; number++) {
        minimise_random(number, (unsigned)inputs, (unsigned)outputs, (unsigned)cubes, &totals);
    }
    printf("{\"workload\": \"espresso\", \"functions\": %lu, \"inputs\": %lu, \"outputs\": %lu, "
           "\"cubes\": %lu, \"cubes_before\": %lu, \"cubes_after\": %lu, \"literals_after\": %lu, "
           "\"cubes_made\": %lu, \"seconds\": %.6f}\n",
           functions, inputs, outputs, cubes, totals.before, totals.after, totals.literals, cubes_made,
           totals.seconds);
    return 0;
}
