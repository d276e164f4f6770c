/*
 * The parser of options: an input is a text as of CALM_OPTIONS, or a name and a value as of calm_set.
 * Whatever it is, each option keeps a value that it can have, and what is printed of that is taken again.
 */
#include "api/options.c"

#include "check.h"
#include "input.h"

#include <stdarg.h>
#include <stdlib.h>

struct arenas calm_arenas;

void __wrap_text_write_line(int descriptor, const char *format, ...);

/* A message is not printed: a run has millions. It is formatted, since that reads the text again. */
void __wrap_text_write_line(int descriptor, const char *format, ...) {
    CHECK_EQUAL(descriptor, 2);
    CHECK(strstr(format, "%.*s") != NULL);
    va_list arguments;
    va_start(arguments, format);
    const char *what = va_arg(arguments, const char *);
    int length = va_arg(arguments, int);
    const char *text = va_arg(arguments, const char *);
    const char *wanted = va_arg(arguments, const char *);
    va_end(arguments);
    struct text line = {0};
    text_format(&line, "%s %.*s%s", what, length, text, wanted);
    CHECK(line.length < TEXT_MAX_BYTES);
}

static void check_values(void) {
    for (enum option which = 0; which < OPTION_COUNT; which++) {
        const struct option_entry *entry = &entries[which];
        struct text text = {0};
        bool is_number = options_print(which, &text);
        CHECK_EQUAL(strlen(text.bytes), text.length);
        if (entry->text != NULL) {
            CHECK(text.length <= (size_t)entry->max);
            continue;
        }
        int words = find_word(entry->words, NULL, 0);
        int number = *entry->number;
        CHECK(number >= 0);
        CHECK(number < words || (number - words >= entry->min && number - words <= entry->max));
        CHECK_EQUAL(is_number, number >= words);
        CHECK_EQUAL(option_parse(entry, text.bytes, text.length), number);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count) {
    static bool started;
    if (!started) {
        started = true;
        options_read();
    }
    for (size_t i = 0; i < OPTION_COUNT; i++) {
        CHECK(option_set(&entries[i], entries[i].initial, strlen(entries[i].initial)));
    }
    /* A string of the exact size, so that a sanitizer sees what is read beyond it. */
    char *text = malloc(count + 1);
    CHECK(text != NULL);
    struct input input = {bytes, count};
    input_bytes(&input, text, count);
    text[count] = '\0';
    option_read_list(text);
    check_values();
    char *value = strchr(text, '=');
    enum option which = OPTION_COUNT;
    if (value != NULL) {
        *value++ = '\0';
        int result = options_set(text, value, &which);
        CHECK(result == 0 || result == ENOENT || result == EINVAL || result == EBUSY);
        CHECK_EQUAL(result == ENOENT, which == OPTION_COUNT);
        check_values();
    }
    free(text);
    return 0;
}
