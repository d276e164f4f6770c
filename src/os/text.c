#include "os/text.h"

#include "os/file.h"

static void put(struct text *text, char byte) {
    if (text->length < TEXT_MAX_BYTES) {
        text->bytes[text->length++] = byte;
    }
}

void text_string(struct text *text, const char *string) {
    while (*string != '\0') {
        put(text, *string++);
    }
}

void text_json_string(struct text *text, const char *string) {
    put(text, '"');
    for (; *string != '\0'; string++) {
        if (*string == '"' || *string == '\\') {
            put(text, '\\');
        }
        put(text, (char)((unsigned char)*string < ' ' ? ' ' : *string));
    }
    put(text, '"');
}

void text_number(struct text *text, uint64_t number) {
    char digits[20];
    size_t count = 0;
    do {
        digits[count++] = (char)('0' + number % 10);
        number /= 10;
    } while (number > 0);
    while (count > 0) {
        put(text, digits[--count]);
    }
}

void text_pointer(struct text *text, const void *pointer) {
    uintptr_t value = (uintptr_t)pointer;
    unsigned digits = 1;
    while (digits < 2 * sizeof value && value >> (4 * digits) != 0) {
        digits++;
    }
    text_string(text, "0x");
    while (digits > 0) {
        put(text, "0123456789abcdef"[value >> (4 * --digits) & 15]);
    }
}

void text_hundredths(struct text *text, uint64_t hundredths) {
    text_number(text, hundredths / 100);
    put(text, '.');
    put(text, (char)('0' + hundredths / 10 % 10));
    put(text, (char)('0' + hundredths % 10));
}

bool text_end(struct text *text) {
    if (text->length >= TEXT_MAX_BYTES) {
        return false;
    }
    text->bytes[text->length] = '\0';
    return true;
}

void text_write(const struct text *text, int descriptor) {
    file_write(descriptor, text->bytes, text->length);
}
