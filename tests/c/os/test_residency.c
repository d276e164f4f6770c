/* The resident pages at the end of a range, compared with their definition. */
#include "os/residency.h"

#include "os/filters.h"

#include <errno.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include "check.h"
#include "pages.h"

#define FIELD_PAGES (2 * RESIDENCY_CHUNK_PAGES + 5)

static unsigned char scratch[RESIDENCY_CHUNK_PAGES];

static struct residency tail_of(const unsigned char *start, size_t pages, size_t max_resident) {
    errno = KEPT_ERRNO;
    struct residency tail = residency_of_tail(start, pages * page_size, max_resident, scratch);
    CHECK(errno == KEPT_ERRNO);
    return tail;
}

/* The answer by the definition: as far from the end as the resident pages allow. */
static struct residency expected_tail(const bool *touched, size_t pages, size_t max_resident) {
    struct residency tail = {0};
    while (pages > 0) {
        size_t more = touched[--pages] ? page_size : 0;
        if (tail.resident_bytes + more > max_resident) {
            break;
        }
        tail.resident_bytes += more;
        tail.suffix_bytes += page_size;
    }
    return tail;
}

static void check_tail(const unsigned char *start, const bool *touched, size_t pages, size_t max_resident) {
    struct residency expected = expected_tail(touched, pages, max_resident);
    struct residency tail = tail_of(start, pages, max_resident);
    CHECK_EQUAL(tail.suffix_bytes, expected.suffix_bytes);
    CHECK_EQUAL(tail.resident_bytes, expected.resident_bytes);
}

static void test_residency(void) {
    static bool touched[FIELD_PAGES];
    unsigned char *pages = map_pages(FIELD_PAGES);

    struct residency none = tail_of(pages, FIELD_PAGES, 0);
    CHECK_EQUAL(none.suffix_bytes, FIELD_PAGES * page_size);
    CHECK_EQUAL(none.resident_bytes, 0);
    CHECK_EQUAL(tail_of(pages, 0, SIZE_MAX).suffix_bytes, 0);

    size_t resident = 0;
    for (size_t i = 0; i < FIELD_PAGES; i++) {
        /* Irregular, on both sides of each edge of a window, and with long gaps. */
        bool edge = i % RESIDENCY_CHUNK_PAGES < 2 || (FIELD_PAGES - i) % RESIDENCY_CHUNK_PAGES < 2;
        touched[i] = edge || i * i % 97 == 4 || (i > 5000 && i < 5300);
        if (touched[i]) {
            pages[i * page_size] = 1;
            resident++;
        }
    }
    for (size_t limit = 0; limit <= resident + 1; limit++) {
        check_tail(pages, touched, FIELD_PAGES, limit * page_size);
    }
    check_tail(pages, touched, FIELD_PAGES, page_size - 1);
    check_tail(pages, touched, FIELD_PAGES, 3 * page_size + page_size / 2);
    check_tail(pages, touched, FIELD_PAGES, SIZE_MAX);
    for (size_t length = 1; length < FIELD_PAGES; length += 131) {
        check_tail(pages, touched, length, 10 * page_size);
        check_tail(pages, touched, length, SIZE_MAX);
    }
    CHECK_EQUAL(tail_of(pages, FIELD_PAGES, SIZE_MAX).resident_bytes, resident * page_size);

    madvise(pages, FIELD_PAGES * page_size, MADV_DONTNEED);
    CHECK_EQUAL(tail_of(pages, FIELD_PAGES, 0).suffix_bytes, FIELD_PAGES * page_size);
}

/* Where the kernel does not say (here: ENOMEM), the caution is to count every page. */
static void test_residency_unknown(void) {
    unsigned char *pages = map_pages(FIELD_PAGES);
    CHECK(munmap(pages, FIELD_PAGES * page_size) == 0);
    struct residency tail = tail_of(pages, FIELD_PAGES, 5 * page_size);
    CHECK_EQUAL(tail.suffix_bytes, 5 * page_size);
    CHECK_EQUAL(tail.resident_bytes, 5 * page_size);
    tail = tail_of(pages, FIELD_PAGES, SIZE_MAX);
    CHECK_EQUAL(tail.suffix_bytes, FIELD_PAGES * page_size);
    CHECK_EQUAL(tail.resident_bytes, FIELD_PAGES * page_size);
}

/* Where each page counts as resident from the start, nothing is told, and nothing is found. */
static void test_residency_untold(void) {
    if (syscall(SYS_mlockall, MCL_FUTURE) != 0) { /* a sanitizer's function does nothing */
        CHECK(errno == EPERM || errno == ENOMEM);
        return;
    }
    unsigned char *pages = map_pages(16);
    size_t offset;
    CHECK_EQUAL(residency_first(pages, 16 * page_size, scratch, &offset), 0);
    CHECK(!residency_is_full(pages, 16 * page_size));
    CHECK_EQUAL(tail_of(pages, 16, SIZE_MAX).resident_bytes, 16 * page_size);
}

int main(void) {
    page_size = (size_t)sysconf(_SC_PAGESIZE);
    filters_detect();
    in_child(test_residency_untold);
    if (!residency_is_told()) {
        printf("the kernel does not tell which pages are resident\n");
        return 0;
    }
    test_residency();
    test_residency_unknown();
    return 0;
}
