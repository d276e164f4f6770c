#include "api/options.h"

#include <errno.h>
#include <string.h>
#include <sys/auxv.h>
#include <unistd.h>

struct options calm_options;

enum kind { KIND_WORDS, KIND_NUMBER, KIND_BYTES, KIND_WORDS_OR_CPU, KIND_TEXT };

static const struct entry {
    const char *name;
    enum kind kind;
    const char *words; /* "first|second": the values 0 and 1 */
    int min;
    int max; /* of a text: bytes */
    const char *initial;
    enum { ANY_TIME, AT_START } change;
    _Atomic(int) *number;
    char *text;
} entries[] = {
#define WORDS(words)                               KIND_WORDS, words, 0, 0
#define WORDS_OR_CPU(words, max)                   KIND_WORDS_OR_CPU, words, 0, max
#define NUMBER(min, max)                           KIND_NUMBER, "", min, max
#define BYTES(max)                                 KIND_BYTES, "", 0, max
#define OPTION(name, values, initial, change, ...) {#name, values, initial, change, &calm_options.name, NULL},
#define TEXT_OPTION(name, max, change, ...) \
    {#name, KIND_TEXT, "", 0, max, "", change, NULL, calm_options.name},
#include "api/options.def"
};

/* The index of a word in "first|second", or -1; without a word, how many there are. */
static int find_word(const char *words, const char *word, size_t length) {
    int number = 0;
    for (; *words != '\0'; number++) {
        size_t each = strcspn(words, "|");
        if (word != NULL && each == length && memcmp(words, word, length) == 0) {
            return number;
        }
        words += each + (words[each] == '|');
    }
    return word == NULL ? number : -1;
}

/* A decimal number in [min, max]; -1 for anything else. */
static int parse_number(const char *text, size_t length, int min, int max) {
    long number = 0;
    if (length == 0 || length > 10) {
        return -1;
    }
    for (size_t i = 0; i < length; i++) {
        if (text[i] < '0' || text[i] > '9') {
            return -1;
        }
        number = number * 10 + (text[i] - '0');
    }
    return number >= min && number <= max ? (int)number : -1;
}

/* The same, with an optional unit. */
static int parse_bytes(const char *text, size_t length, int max) {
    static const char units[] = "kKmMgG";
    const char *unit = length == 0 ? NULL : memchr(units, text[length - 1], sizeof units - 1);
    int shift = unit == NULL ? 0 : 10 * (1 + (int)(unit - units) / 2);
    int number = parse_number(text, length - (unit != NULL), 0, max >> shift);
    return number < 0 ? -1 : number << shift;
}

/* The number that is stored for a value (of a text its length), or -1 if it is invalid. */
static int parse(const struct entry *entry, const char *value, size_t length) {
    int number = find_word(entry->words, value, length);
    switch (entry->kind) {
    case KIND_WORDS:
        return number;
    case KIND_NUMBER:
        return parse_number(value, length, entry->min, entry->max);
    case KIND_BYTES:
        return parse_bytes(value, length, entry->max);
    case KIND_WORDS_OR_CPU:
        if (number < 0 && (number = parse_number(value, length, 0, entry->max)) >= 0) {
            number += find_word(entry->words, NULL, 0);
        }
        return number;
    case KIND_TEXT:
        break;
    }
    return length <= (size_t)entry->max ? (int)length : -1;
}

static bool set(const struct entry *entry, const char *value, size_t length) {
    int number = parse(entry, value, length);
    if (number >= 0 && entry->kind == KIND_TEXT) {
        memcpy(entry->text, value, length);
        entry->text[length] = '\0';
    } else if (number >= 0) {
        /* In the order that all threads see: code that copies it checks whether it changed. */
        *entry->number = number;
    }
    return number >= 0;
}

static const struct entry *find(const char *name, size_t length) {
    for (const struct entry *entry = entries; entry < entries + OPTION_COUNT; entry++) {
        if (strlen(entry->name) == length && memcmp(entry->name, name, length) == 0) {
            return entry;
        }
    }
    return NULL;
}

int options_set(const char *name, const char *value, size_t length, enum option *which) {
    const struct entry *entry = find(name, strlen(name));
    if (entry == NULL) {
        return ENOENT;
    }
    *which = (enum option)(entry - entries);
    if (entry->change == AT_START) {
        return parse(entry, value, length) >= 0 ? EBUSY : EINVAL;
    }
    return set(entry, value, length) ? 0 : EINVAL;
}

const char *options_name(enum option which) {
    return entries[which].name;
}

bool options_print(enum option which, struct text *text) {
    const struct entry *entry = &entries[which];
    if (entry->kind == KIND_TEXT) {
        text_format(text, "%s", entry->text);
        return false;
    }
    int number = atomic_load_explicit(entry->number, memory_order_relaxed);
    const char *word = entry->words;
    for (; number > 0 && *word != '\0'; number--) {
        word += strcspn(word, "|");
        word += *word == '|';
    }
    if (*word == '\0') {
        text_format(text, "%u", (unsigned)number);
        return true;
    }
    text_format(text, "%.*s", (int)strcspn(word, "|"), word);
    return false;
}

/* Of the text, which may be of any length, not all is repeated. */
static void complain(const char *what, const char *text, size_t length, const char *wanted) {
    text_write_line(2, "calmalloc: %s '%.*s' in CALM_OPTIONS ignored%s", what, length < 64 ? (int)length : 64,
                    text, wanted);
}

static void complain_of_value(const struct entry *entry, const char *text, size_t length) {
    static const char *const forms[] = {"", "", " bytes; k, m or g may follow", ", or a CPU's number",
                                        " bytes of text"};
    struct text wanted = {0};
    text_format(&wanted, ": %s takes %s", entry->name, entry->words);
    if (*entry->words == '\0') {
        text_format(&wanted, "%u to %u", (unsigned)entry->min, (unsigned)entry->max);
    }
    text_format(&wanted, "%s", forms[entry->kind]);
    complain("value of option", text, length, wanted.bytes);
}

static void read_one(const char *text, size_t length) {
    const char *equals = memchr(text, '=', length);
    size_t name_length = equals == NULL ? length : (size_t)(equals - text);
    const struct entry *entry = find(text, name_length);
    if (entry == NULL) {
        complain("unknown option", text, length, "");
    } else if (equals == NULL || !set(entry, equals + 1, length - name_length - 1)) {
        complain_of_value(entry, text, length);
    }
}

static char **first_environment;

void options_keep_environment(char **environment) {
    first_environment = environment;
}

/* Like secure_getenv: NULL if the program runs with elevated privileges. */
static const char *find_variable(char **environment, const char *name) {
    size_t length = strlen(name);
    for (; getauxval(AT_SECURE) == 0 && *environment != NULL; environment++) {
        if (strncmp(*environment, name, length) == 0 && (*environment)[length] == '=') {
            return *environment + length + 1;
        }
    }
    return NULL;
}

bool options_read(void) {
    static bool have_initial, were_read;
    for (size_t i = 0; !have_initial && i < OPTION_COUNT; i++) {
        set(&entries[i], entries[i].initial, strlen(entries[i].initial));
    }
    have_initial = true;
    char **environment = environ != NULL ? environ : first_environment;
    if (environment == NULL || were_read) {
        return false;
    }
    were_read = true;
    const char *text = find_variable(environment, "CALM_OPTIONS");
    while (text != NULL && *text != '\0') {
        size_t length = strcspn(text, ",");
        if (length > 0) {
            read_one(text, length);
        }
        text += length + (text[length] == ',');
    }
    return true;
}
