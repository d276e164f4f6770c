#include "os/text.h"

#include "base/size.h"
#include "os/file.h"

#include <stdarg.h>

#define MAX_DIGITS 23 /* "0x", 20 digits, NUL */

/* Writes the digits at the end of the buffer, and returns the first one. */
static const char *digits_of(char *buffer, uint64_t number, bool hexadecimal) {
    unsigned base = hexadecimal ? 16 : 10;
    char *first = buffer + MAX_DIGITS - 1;
    *first = '\0';
    do {
        *--first = "0123456789abcdef"[number % base];
        number /= base;
    } while (number > 0);
    if (hexadecimal) {
        *--first = 'x';
        *--first = '0';
    }
    return first;
}

/* Appends to the first `length` bytes as much as fits, and a NUL. Returns the
 * length that the whole text would have. */
static size_t text_print_list(char *bytes, size_t size, size_t length, const char *format,
                              va_list arguments) {
    char digits[MAX_DIGITS];
    for (; *format != '\0'; format++) {
        const char *part = (char[]){*format, '\0'};
        size_t part_bytes = SIZE_MAX;
        if (*format == '%') {
            if (*++format == '.') {
                part_bytes = (size_t)va_arg(arguments, int);
                format += 2;
            }
            bool is_long = *format == 'l' || *format == 'z';
            format += is_long;
            if (*format == 's') {
                part = va_arg(arguments, const char *);
            } else if (*format == 'p') {
                part = digits_of(digits, va_arg(arguments, uintptr_t), true);
            } else if (*format == 'u') {
                uint64_t number = is_long ? va_arg(arguments, unsigned long) : va_arg(arguments, unsigned);
                part = digits_of(digits, number, false);
            }
        }
        for (; part_bytes > 0 && *part != '\0'; part_bytes--, part++, length++) {
            if (length < size - 1) {
                bytes[length] = *part;
            }
        }
    }
    bytes[size_min(length, size - 1)] = '\0';
    return length;
}

void text_format(struct text *text, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    size_t length = text_print_list(text->bytes, sizeof text->bytes, text->length, format, arguments);
    text->length = size_min(length, TEXT_MAX_BYTES);
    va_end(arguments);
}

const char *text_print(char *buffer, size_t bytes, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    size_t length = text_print_list(buffer, bytes, 0, format, arguments);
    va_end(arguments);
    buffer[length < bytes ? length : 0] = '\0';
    return buffer;
}

void text_json_string(struct text *text, const char *string) {
    text_format(text, "\"");
    for (; *string != '\0'; string++) {
        const char byte[] = {(char)((unsigned char)*string < ' ' ? ' ' : *string), '\0'};
        text_format(text, *string == '"' || *string == '\\' ? "\\%s" : "%s", byte);
    }
    text_format(text, "\"");
}

void text_hundredths(struct text *text, uint64_t hundredths) {
    text_format(text, "%lu.%lu%lu", hundredths / 100, hundredths / 10 % 10, hundredths % 10);
}

void text_write(const struct text *text, int descriptor) {
    file_write(descriptor, text->bytes, text->length);
}

void text_write_line(int descriptor, const char *format, ...) {
    struct text line = {0};
    va_list arguments;
    va_start(arguments, format);
    size_t length = text_print_list(line.bytes, TEXT_MAX_BYTES, 0, format, arguments);
    line.length = size_min(length, TEXT_MAX_BYTES - 1); /* leaves room for the end of the line */
    va_end(arguments);
    text_format(&line, "\n");
    text_write(&line, descriptor);
}
