/* The order by address and the list by age, compared with sorted arrays: random, ascending and descending. */
#include "heap/span.h"

#include <stddef.h>
#include <string.h>

#include "check.h"

#define SPANS 1500
#define STEPS 60000

static struct span spans[SPANS];
static bool present[SPANS];
static uint64_t random_state;

static uint64_t next_random(void) {
    return check_random(&random_state);
}

/* Children lie higher than their parent, and links lead both ways. Returns how many there are. */
static size_t check_tree(const struct span *root) {
    static const struct span *left[SPANS];
    size_t count = 0;
    size_t waiting = 0;
    if (root != NULL) {
        CHECK(root->previous == NULL && root->next == NULL);
        left[waiting++] = root;
    }
    while (waiting > 0) {
        const struct span *parent = left[--waiting];
        count++;
        const struct span *before = parent;
        for (const struct span *child = parent->child; child != NULL; child = child->next) {
            CHECK(child->page > parent->page);
            CHECK(child->previous == before);
            CHECK(waiting < SPANS);
            left[waiting++] = child;
            before = child;
        }
    }
    return count;
}

static const struct span *lowest_present(void) {
    const struct span *lowest = NULL;
    for (size_t i = 0; i < SPANS; i++) {
        if (present[i] && (lowest == NULL || spans[i].page < lowest->page)) {
            lowest = &spans[i];
        }
    }
    return lowest;
}

static void number_pages(int order) {
    memset(spans, 0, sizeof spans);
    memset(present, 0, sizeof present);
    for (uint32_t i = 0; i < SPANS; i++) {
        spans[i].page = order >= 0 ? i + 1 : SPANS - i;
    }
    for (uint32_t i = SPANS - 1; order == 0 && i > 0; i--) {
        uint32_t j = (uint32_t)(next_random() % (i + 1));
        uint32_t page = spans[i].page;
        spans[i].page = spans[j].page;
        spans[j].page = page;
    }
}

/* All in, then all out from the front: a sort. */
static void test_sorts(int order) {
    struct span *root = NULL;
    number_pages(order);
    for (size_t i = 0; i < SPANS; i++) {
        address_order_insert(&root, &spans[i]);
    }
    CHECK_EQUAL(check_tree(root), SPANS);
    for (uint32_t page = 1; page <= SPANS; page++) {
        struct span *first = root;
        CHECK(first != NULL);
        CHECK_EQUAL(first->page, page);
        address_order_remove(&root, first);
        CHECK(first->child == NULL && first->next == NULL && first->previous == NULL);
    }
    CHECK(root == NULL);
}

static void test_removes_anywhere(void) {
    struct span *root = NULL;
    size_t count = 0;
    number_pages(0);
    for (size_t step = 0; step < STEPS; step++) {
        size_t i = next_random() % SPANS;
        /* Grows and shrinks in waves, by the front too. */
        bool grow = step / (2 * SPANS) % 2 == 0;
        if (present[i] && (!grow || next_random() % 4 == 0)) {
            if (next_random() % 4 == 0) {
                i = (size_t)(root - spans);
            }
            address_order_remove(&root, &spans[i]);
            present[i] = false;
            count--;
        } else if (!present[i] && (grow || next_random() % 4 == 0)) {
            address_order_insert(&root, &spans[i]);
            present[i] = true;
            count++;
        }
        CHECK((root == NULL) == (count == 0));
        if (step % 16 == 0) {
            CHECK(root == lowest_present());
        }
        if (step % 256 == 0) {
            CHECK_EQUAL(check_tree(root), count);
        }
    }
}

static void check_ages(const struct span_ages *ages, struct span *const *model, size_t count) {
    const struct span *span = ages->coldest;
    const struct span *colder = NULL;
    for (size_t i = 0; i < count; i++) {
        CHECK(span == model[i]);
        CHECK(span->age.colder == colder);
        colder = span;
        span = span->age.hotter;
    }
    CHECK(span == NULL);
    CHECK(ages->hottest == colder);
}

static void test_ages(void) {
    static struct span *model[SPANS];
    struct span_ages ages = {NULL, NULL};
    size_t count = 0;
    number_pages(0);
    check_ages(&ages, model, 0);
    for (size_t step = 0; step < STEPS / 4; step++) {
        size_t i = next_random() % SPANS;
        bool grow = step / SPANS % 2 == 0;
        if (!present[i] && (grow || next_random() % 8 == 0)) {
            span_ages_append(&ages, &spans[i]);
            model[count++] = &spans[i];
            present[i] = true;
        } else if (count > 0 && (!grow || next_random() % 8 == 0)) {
            /* The coldest, the hottest, or any. */
            size_t place = next_random() % 3 == 0   ? 0
                           : next_random() % 2 == 0 ? count - 1
                                                    : next_random() % count;
            span_ages_remove(&ages, model[place]);
            CHECK(model[place]->age.colder == NULL && model[place]->age.hotter == NULL);
            present[model[place] - spans] = false;
            memmove(&model[place], &model[place + 1], (count - place - 1) * sizeof *model);
            count--;
        }
        if (step % 32 == 0) {
            check_ages(&ages, model, count);
        }
    }
    while (count > 0) {
        span_ages_remove(&ages, model[--count]);
    }
    check_ages(&ages, model, 0);
}

int main(void) {
    random_state = check_seed(88172645463325252U);
    for (int order = -1; order <= 1; order++) {
        test_sorts(order);
    }
    test_removes_anywhere();
    test_ages();
    return 0;
}
