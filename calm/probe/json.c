#include "json.h"

#include <inttypes.h>

static void quoted(struct json *json, const char *text) {
    fputc('"', json->file);
    for (; *text != '\0'; text++) {
        unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\') {
            fprintf(json->file, "\\%c", c);
        } else if (c < 0x20) {
            fprintf(json->file, "\\u%04x", c);
        } else {
            fputc(c, json->file);
        }
    }
    fputc('"', json->file);
}

static void field(struct json *json, const char *name) {
    if (json->started) {
        fputs(", ", json->file);
    }
    json->started = true;
    if (name != NULL) {
        quoted(json, name);
        fputs(": ", json->file);
    }
}

void json_begin(struct json *json, const char *name) {
    field(json, name);
    fputc('{', json->file);
    json->started = false;
}

void json_end(struct json *json) {
    fputc('}', json->file);
    json->started = true; /* of the enclosing object, which has this one */
}

void json_uint(struct json *json, const char *name, uint64_t value) {
    field(json, name);
    fprintf(json->file, "%" PRIu64, value);
}

void json_real(struct json *json, const char *name, double value) {
    field(json, name);
    fprintf(json->file, "%.3f", value);
}

void json_bool(struct json *json, const char *name, bool value) {
    field(json, name);
    fputs(value ? "true" : "false", json->file);
}

void json_text(struct json *json, const char *name, const char *value) {
    field(json, name);
    quoted(json, value);
}

void json_null(struct json *json, const char *name) {
    field(json, name);
    fputs("null", json->file);
}
