#include "os/parse.h"

#include <string.h>

const char *parse_number(const char *text, uint64_t *number) {
    uint64_t value = 0;
    for (; *text >= '0' && *text <= '9'; text++) {
        if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, *text - '0', &value)) {
            value = UINT64_MAX; /* and stays there */
        }
    }
    *number = value;
    return text;
}

uint64_t parse_named_number(const char *line, const char *name) {
    size_t length = strlen(name);
    if (strncmp(line, name, length) != 0 || (line[length] != ' ' && line[length] != ':')) {
        return UINT64_MAX;
    }
    uint64_t number;
    parse_number(line + length + strspn(line + length, " :"), &number);
    return number;
}

const char *parse_stat_field(const char *text, unsigned number) {
    /* The name may hold anything, parentheses too. */
    const char *at = strrchr(text, ')');
    for (unsigned blanks = 0; at != NULL && blanks <= number; blanks++) {
        at = strchr(at + 1, ' ');
    }
    return at == NULL ? NULL : at + 1;
}
