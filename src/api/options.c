#include "api/options.h"

#include "api/instance.h"
#include "base/assert.h"
#include "os/file.h"

#include <errno.h>
#include <string.h>
#include <sys/auxv.h>
#include <unistd.h>

struct options calm_options;

static const struct option_entry {
    const char *name;
    const char *words; /* "first|second", stored as 0 and 1; a number is stored beyond the words */
    int min;
    int max; /* if less than min, no number is valid; for a text, its maximum of bytes */
    bool has_unit;
    const char *remark; /* describes further values in a complaint */
    const char *initial;
    enum { ANY_TIME, AT_START } change;
    _Atomic(int) *number;
    char *text; /* NULL if the value is a number */
} entries[] = {
#define WORDS(words)                      words, 1, 0, false, ""
#define WORDS_OR_NUMBER(words, max, what) words, 0, max, false, ", or " what
#define NUMBER(min, max)                  "", min, max, false, ""
#define BYTES(max)                        "", 0, max, true, " bytes; k, m or g may follow"
#define HERE(name, field)                 &calm_options.name
#define ARENA(name, field)                &calm_arenas.settings.field
#define OPTION(name, values, initial, change, place, field, ...) \
    {#name, values, initial, change, place(name, field), NULL},
#define TEXT_OPTION(name, max, change, ...) \
    {#name, "", 0, max, false, " bytes of text", "", change, NULL, calm_options.name},
#include "api/options.def"
};

static const struct {
    const char *name;
    const char *where;
} moved[] = {
#define OPTION(...)
#define TEXT_OPTION(...)
#define MOVED_OPTION(name, where) {#name, ": " where},
#include "api/options.def"
};

/* Returns the index of a word in "first|second", or -1. Returns the number of
 * words if `word` is NULL. */
static int find_word(const char *words, const char *word, size_t length) {
    int number = 0;
    for (; *words != '\0'; number++) {
        size_t each = (size_t)(strchrnul(words, '|') - words);
        if (word != NULL && each == length && memcmp(words, word, length) == 0) {
            return number;
        }
        words += each + (words[each] == '|');
    }
    return word == NULL ? number : -1;
}

/* Parses a decimal number of at most ten digits, and a unit if the option
 * allows one. Returns -1 for anything else. */
static int find_number(const struct option_entry *entry, const char *text, size_t length) {
    static const char units[] = "kKmMgG";
    bool may_have_unit = entry->has_unit && length > 0;
    const char *unit = may_have_unit ? memchr(units, text[length - 1], sizeof units - 1) : NULL;
    int shift = unit == NULL ? 0 : 10 * (1 + (int)(unit - units) / 2);
    length -= unit != NULL;
    uint64_t number;
    bool is_number = parse_number(text, &number) == text + length && length > 0 && length <= 10;
    bool in_range = number >= (uint64_t)entry->min && number <= (uint64_t)entry->max >> shift;
    return is_number && in_range ? (int)number << shift : -1;
}

/* Returns the number to store for a value, or -1 if it is invalid. For a text,
 * this is its length. */
static int option_parse(const struct option_entry *entry, const char *value, size_t length) {
    if (entry->text != NULL) {
        return length <= (size_t)entry->max ? (int)length : -1;
    }
    int word = find_word(entry->words, value, length);
    int number = find_number(entry, value, length);
    return word >= 0 || number < 0 ? word : find_word(entry->words, NULL, 0) + number;
}

static bool option_set(const struct option_entry *entry, const char *value, size_t length) {
    int number = option_parse(entry, value, length);
    if (number >= 0 && entry->text != NULL) {
        memcpy(entry->text, value, length);
        calm_assert(length <= (size_t)entry->max, length);
        entry->text[length] = '\0';
    } else if (number >= 0) {
        *entry->number = number;
    }
    return number >= 0;
}

static const struct option_entry *option_find(const char *name, size_t length) {
    for (const struct option_entry *entry = entries; entry < entries + OPTION_COUNT; entry++) {
        if (strlen(entry->name) == length && memcmp(entry->name, name, length) == 0) {
            return entry;
        }
    }
    return NULL;
}

int options_set(const char *name, const char *value, enum option *which) {
    const struct option_entry *entry = option_find(name, strlen(name));
    if (entry == NULL) {
        return ENOENT;
    }
    calm_assert(entry >= entries && entry < entries + OPTION_COUNT);
    *which = (enum option)(entry - entries);
    size_t length = strlen(value);
    if (entry->change == AT_START) {
        return option_parse(entry, value, length) >= 0 ? EBUSY : EINVAL;
    }
    return option_set(entry, value, length) ? 0 : EINVAL;
}

const char *options_name(enum option which) {
    return entries[which].name;
}

bool options_is_reported(enum option which) {
    static const char test[] = "test_";
    const struct option_entry *entry = &entries[which];
    return strncmp(entry->name, test, sizeof test - 1) != 0 ||
           *entry->number != option_parse(entry, entry->initial, strlen(entry->initial));
}

bool options_print(enum option which, struct text *text) {
    const struct option_entry *entry = &entries[which];
    if (entry->text != NULL) {
        text_format(text, "%s", entry->text);
        return false;
    }
    int number = atomic_load_explicit(entry->number, memory_order_relaxed);
    const char *word = entry->words;
    for (; number > 0 && *word != '\0'; number--) {
        word = strchrnul(word, '|');
        word += *word == '|';
    }
    if (*word == '\0') {
        text_format(text, "%u", (unsigned)number);
        return true;
    }
    text_format(text, "%.*s", (int)(strchrnul(word, '|') - word), word);
    return false;
}

/* The text may be of any length. Only its beginning is repeated. */
static void complain(const char *what, const char *text, size_t length, const char *wanted) {
    text_write_line(2, "calmalloc: %s '%.*s' in CALM_OPTIONS ignored%s", what, length < 64 ? (int)length : 64,
                    text, wanted);
}

static void complain_of_value(const struct option_entry *entry, const char *text, size_t length) {
    struct text wanted = {0};
    text_format(&wanted, ": %s takes %s", entry->name, entry->words);
    if (*entry->words == '\0') {
        text_format(&wanted, "%u to %u", (unsigned)entry->min, (unsigned)entry->max);
    }
    text_format(&wanted, "%s", entry->remark);
    complain("value of option", text, length, wanted.bytes);
}

/* Returns the end of the complaint about an unknown option. */
static const char *find_moved(const char *name, size_t length) {
    for (size_t i = 0; i < sizeof moved / sizeof *moved; i++) {
        if (strlen(moved[i].name) == length && memcmp(moved[i].name, name, length) == 0) {
            return moved[i].where;
        }
    }
    return "";
}

static void option_read(const char *text, size_t length) {
    const char *equals = memchr(text, '=', length);
    size_t name_length = equals == NULL ? length : (size_t)(equals - text);
    const struct option_entry *entry = option_find(text, name_length);
    if (entry == NULL) {
        complain("unknown option", text, length, find_moved(text, name_length));
    } else if (equals == NULL || !option_set(entry, equals + 1, length - name_length - 1)) {
        complain_of_value(entry, text, length);
    }
}

/* Parses CALM_OPTIONS: name=value,... */
static void option_read_list(const char *text) {
    while (*text != '\0') {
        size_t length = (size_t)(strchrnul(text, ',') - text);
        if (length > 0) {
            option_read(text, length);
        }
        text += length + (text[length] == ',');
    }
}

static char **first_environment;

void options_keep_environment(char **environment) {
    first_environment = environment;
}

/* Like secure_getenv, returns NULL if the program runs with elevated
 * privileges. */
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
        option_set(&entries[i], entries[i].initial, strlen(entries[i].initial));
    }
    have_initial = true;
    char **environment = environ != NULL ? environ : first_environment;
    if (environment == NULL || were_read) {
        return false;
    }
    were_read = true;
    const char *text = find_variable(environment, "CALM_OPTIONS");
    if (text != NULL) {
        option_read_list(text);
    }
    return true;
}
