#include "heap/span.h"

#include "base/assert.h"

#include <stddef.h>

static struct span *meld(struct span *a, struct span *b) {
    if (a == NULL || b == NULL) {
        return a == NULL ? b : a;
    }
    calm_assert(a != b && a->next == NULL && b->next == NULL, a->page, b->page);
    if (b->page < a->page) {
        struct span *lower = b;
        b = a;
        a = lower;
    }
    b->previous = a;
    b->next = a->child;
    if (b->next != NULL) {
        b->next->previous = b;
    }
    a->child = b;
    return a;
}

/* Melds siblings in pairs from the left, then melds the pairs from the right.
 * The two passes make removal logarithmic, amortized. */
static struct span *meld_siblings(struct span *first) {
    struct span *pairs = NULL; /* linked by next, the last pair first */
    while (first != NULL) {
        struct span *a = first;
        struct span *b = a->next;
        first = b == NULL ? NULL : b->next;
        a->next = a->previous = NULL;
        if (b != NULL) {
            b->next = b->previous = NULL;
        }
        struct span *pair = meld(a, b);
        pair->next = pairs;
        pairs = pair;
    }
    struct span *root = NULL;
    while (pairs != NULL) {
        struct span *pair = pairs;
        pairs = pair->next;
        pair->next = NULL;
        root = meld(pair, root);
    }
    return root;
}

void address_order_insert(struct span **root, struct span *span) {
    calm_assert(*root != span, span->page);
    span->child = span->next = span->previous = NULL;
    *root = meld(*root, span);
}

void address_order_remove(struct span **root, struct span *span) {
    calm_assert(*root == span || span->previous != NULL, span->page);
    struct span *below = meld_siblings(span->child);
    if (*root == span) {
        *root = below;
    } else {
        if (span->previous->child == span) {
            span->previous->child = span->next;
        } else {
            span->previous->next = span->next;
        }
        if (span->next != NULL) {
            span->next->previous = span->previous;
        }
        *root = meld(*root, below);
    }
    span->child = span->next = span->previous = NULL;
}

void span_ages_append(struct span_ages *ages, struct span *span) {
    calm_assert((ages->coldest == NULL) == (ages->hottest == NULL));
    calm_assert(ages->hottest != span && ages->coldest != span, span->page);
    span->age.hotter = NULL;
    span->age.colder = ages->hottest;
    *(ages->hottest == NULL ? &ages->coldest : &ages->hottest->age.hotter) = span;
    ages->hottest = span;
}

void span_ages_prepend(struct span_ages *ages, struct span *span) {
    calm_assert((ages->coldest == NULL) == (ages->hottest == NULL));
    calm_assert(ages->hottest != span && ages->coldest != span, span->page);
    span->age.colder = NULL;
    span->age.hotter = ages->coldest;
    *(ages->coldest == NULL ? &ages->hottest : &ages->coldest->age.colder) = span;
    ages->coldest = span;
}

void span_ages_remove(struct span_ages *ages, struct span *span) {
    calm_assert((span->age.colder == NULL) == (ages->coldest == span), span->page);
    calm_assert((span->age.hotter == NULL) == (ages->hottest == span), span->page);
    *(span->age.colder == NULL ? &ages->coldest : &span->age.colder->age.hotter) = span->age.hotter;
    *(span->age.hotter == NULL ? &ages->hottest : &span->age.hotter->age.colder) = span->age.colder;
    span->age.colder = span->age.hotter = NULL;
}
