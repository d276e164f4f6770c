/* Text, formatted without the C library. */
#include "os/text.h"

#include <errno.h>
#include <string.h>

#include "check.h"

static void test_text(void) {
    static const uintptr_t values[] = {1, 9, 10, 15, 16, 0xabc, 0xdeadbeef, 0x7fffffffffff, UINTPTR_MAX};
    static struct text text;
    char expected[64];
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        text.length = 0;
        text_format(&text, "%p", (void *)values[i]);
        int length = snprintf(expected, sizeof expected, "%p", (void *)values[i]);
        CHECK_EQUAL(text.length, length);
        CHECK(memcmp(text.bytes, expected, text.length) == 0);
    }
    text.length = 0;
    text_format(&text, "%p", NULL);
    CHECK(text.length == 3 && memcmp(text.bytes, "0x0", 3) == 0);

    text.length = 0;
    text_format(&text, "%u,%lu,", 0U, UINT64_MAX);
    text_hundredths(&text, 1205);
    text_json_string(&text, "a\"b\\c\nd");
    static const char all[] = "0,18446744073709551615,12.05\"a\\\"b\\\\c d\"";
    CHECK_EQUAL(text.length, sizeof all - 1);
    CHECK(memcmp(text.bytes, all, text.length) == 0);
    while (text.length < TEXT_MAX_BYTES) {
        text_format(&text, "no more than fits ");
    }
    text_format(&text, "%u", 1U);
    CHECK_EQUAL(text.length, TEXT_MAX_BYTES);

    text.length = 0;
    text_format(&text, "%s: %u of %lu, %zu%% at %p\n", "part", 7U, UINT64_MAX, (size_t)12, (void *)0xabc);
    static const char formatted[] = "part: 7 of 18446744073709551615, 12% at 0xabc\n";
    CHECK_EQUAL(text.length, sizeof formatted - 1);
    CHECK(memcmp(text.bytes, formatted, text.length) == 0);
    text.length = 0;
    text_format(&text, "%.*s|%.*s|%.*s", 2, "cut", 9, "whole", 0, "none");
    CHECK(strcmp(text.bytes, "cu|whole|") == 0);
    errno = KEPT_ERRNO;
    text_write(&text, -1);
    CHECK_EQUAL(errno, KEPT_ERRNO);
}

static void test_print(void) {
    char path[8];
    CHECK(text_print(path, sizeof path, "/a/%u", 123U) == path && strcmp(path, "/a/123") == 0);
    CHECK(strcmp(text_print(path, sizeof path, "/%s", "123456"), "/123456") == 0);
    CHECK(strcmp(text_print(path, sizeof path, "/%s", "1234567"), "") == 0);
    CHECK(strcmp(text_print(path, sizeof path, "/%s%u", "1234567", 8U), "") == 0);
}

int main(void) {
    test_text();
    test_print();
    return 0;
}
