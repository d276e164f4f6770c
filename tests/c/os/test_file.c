/* Files: read whole, part by part, and for their numbers; and numbers in text. */
#include "os/file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include "check.h"
#include "machine_files.h"

static int lowest_free_descriptor(void) {
    int descriptor = open("/dev/null", O_RDONLY | O_CLOEXEC);
    CHECK(descriptor >= 0);
    close(descriptor);
    return descriptor;
}

static void test_file(void) {
    char text[16];
    put("twelve bytes", "/file");
    errno = KEPT_ERRNO;
    int lowest = lowest_free_descriptor();
    CHECK_EQUAL(file_read(machine_path("/file"), text, sizeof text), 12);
    CHECK(strcmp(text, "twelve bytes") == 0);
    CHECK_EQUAL(file_read(machine_path("/file"), text, 7), 6);
    CHECK(strcmp(text, "twelve") == 0);
    CHECK_EQUAL(file_read(machine_path("/none"), text, sizeof text), -1L);
    CHECK_EQUAL(file_read(root, text, sizeof text), -1L);
    put("", "/file");
    CHECK(file_read(machine_path("/file"), text, sizeof text) <= 0);
    CHECK_EQUAL(lowest_free_descriptor(), lowest);
    CHECK_EQUAL(errno, KEPT_ERRNO);
    unlink(machine_path("/file"));
}

static void test_parse(void) {
    uint64_t number;
    static const char *const rests[] = {"", "x", "-1", " 2", "\n"};
    static const uint64_t values[] = {0, 9, 10, 4711, UINT64_MAX - 1, UINT64_MAX};
    for (size_t i = 0; i < sizeof rests / sizeof rests[0]; i++) {
        for (size_t j = 0; j < sizeof values / sizeof values[0]; j++) {
            char text[64];
            int digits = snprintf(text, sizeof text, "%llu", (unsigned long long)values[j]);
            strcpy(text + digits, rests[i]);
            CHECK(parse_number(text, &number) == text + digits);
            CHECK_EQUAL(number, values[j]);
        }
        if (rests[i][0] != '4') {
            CHECK(parse_number(rests[i], &number) == rests[i] && number == 0);
        }
    }
    static const char *const large[] = {"18446744073709551616", "18446744073709551620",
                                        "99999999999999999999999"};
    for (size_t i = 0; i < sizeof large / sizeof large[0]; i++) {
        CHECK(*parse_number(large[i], &number) == '\0' && number == UINT64_MAX);
    }
    static const char stat[] = "12 (a) b) (c) S 1 22 333\n";
    CHECK(strcmp(parse_stat_field(stat, 0), "S 1 22 333\n") == 0);
    CHECK(strcmp(parse_stat_field(stat, 2), "22 333\n") == 0);
    CHECK(*parse_stat_field(stat, 4) == '\0' && *parse_stat_field("12 (a", 0) == '\0');
}

static uint64_t named_number(const char *content, const char *name) {
    uint64_t number = UINT64_MAX;
    put(content, "/file");
    errno = KEPT_ERRNO;
    file_read_named_numbers(machine_path("/file"), &name, &number, 1);
    CHECK_EQUAL(errno, KEPT_ERRNO);
    return number;
}

static void test_named_numbers(void) {
    CHECK_EQUAL(named_number("MemTotal:   12 kB", "MemTotal"), 12);
    CHECK_EQUAL(named_number("anon 34", "anon"), 34);
    CHECK_EQUAL(named_number("anon_thp 34", "anon"), UINT64_MAX);
    CHECK_EQUAL(named_number("ano", "anon"), UINT64_MAX);
    unlink(machine_path("/file"));
}

static bool join_part(void *context, const char *part) {
    char *all = context;
    strcat(strcat(all, part), "|");
    return strcmp(part, "stop") != 0;
}

static void check_parts(const char *content, const char *expected) {
    char all[3000] = "";
    put(content, "/file");
    errno = KEPT_ERRNO;
    CHECK(file_each_part(machine_path("/file"), ',', join_part, all));
    CHECK_EQUAL(errno, KEPT_ERRNO);
    CHECK(strcmp(all, expected) == 0);
}

static void test_parts(void) {
    char all[8] = "";
    int lowest = lowest_free_descriptor();
    CHECK(!file_each_part(machine_path("/none"), ',', join_part, all) && *all == '\0');
    CHECK(!file_each_part(root, ',', join_part, all) && *all == '\0');
    check_parts("", "");
    check_parts("a", "a|");
    check_parts("a,b,,c\n", "a|b||c\n|");
    check_parts(",a,", "|a|");
    check_parts("a,stop,b", "a|stop|");
    static char content[8 * FILE_MAX_PART];
    static char expected[8 * FILE_MAX_PART];
    for (size_t length = FILE_MAX_PART - 3; length < FILE_MAX_PART + 3; length++) {
        /* Those that fit are whole wherever they begin, and those that do not are left out. */
        bool fits = length < FILE_MAX_PART - 1;
        memset(content, 'x', length);
        strcpy(content + length, ",y,stop,z");
        memset(expected, 'x', length);
        strcpy(expected + (fits ? length : 0), fits ? "|y|stop|" : "y|stop|");
        check_parts(content, expected);
    }
    memset(content, 'x', sizeof content - 1);
    check_parts(content, "");
    strcpy(content + sizeof content - 3, ",y");
    check_parts(content, "y|");
    put("4711 9\n", "/file");
    CHECK_EQUAL(file_read_number(machine_path("/file")), 4711);
    put("max\n", "/file");
    CHECK_EQUAL(file_read_number(machine_path("/file")), UINT64_MAX);
    CHECK_EQUAL(file_read_number(machine_path("/none")), UINT64_MAX);
    CHECK_EQUAL(lowest_free_descriptor(), lowest);
    unlink(machine_path("/file"));
}

int main(void) {
    CHECK(mkdtemp(root) != NULL);
    test_file();
    test_parse();
    test_named_numbers();
    test_parts();
    CHECK(rmdir(root) == 0);
    return 0;
}
