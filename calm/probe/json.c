#include "json.h"

#include <inttypes.h>

static void quoted(struct json *json, const char *text) {
    fputc('"', json->file);
    for (; *text != '\0'; text++) {
        unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\' || c < 0x20) {
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

void json_null(struct json *json, const char *name) {
    field(json, name);
    fputs("null", json->file);
}

void json_int(struct json *json, const char *name, int64_t value) {
    if (value < 0) {
        json_null(json, name);
    } else {
        field(json, name);
        fprintf(json->file, "%" PRId64, value);
    }
}

void json_real(struct json *json, const char *name, double value) {
    if (value < 0) {
        json_null(json, name);
    } else {
        field(json, name);
        fprintf(json->file, "%.3f", value);
    }
}

void json_bool(struct json *json, const char *name, bool value) {
    field(json, name);
    fputs(value ? "true" : "false", json->file);
}

void json_text(struct json *json, const char *name, const char *value) {
    field(json, name);
    quoted(json, value);
}
