/* Writes one JSON object, field by field. Strings are the probe's own words or the system's, all of them
 * ASCII. */
#ifndef CALM_PROBE_JSON_H
#define CALM_PROBE_JSON_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

struct json {
    FILE *file;
    bool started; /* the innermost object has a field already */
};

void json_begin(struct json *json, const char *name); /* name is NULL for the outermost object */
void json_end(struct json *json);
void json_int(struct json *json, const char *name, int64_t value); /* null below 0 */
void json_real(struct json *json, const char *name, double value); /* null below 0 */
void json_bool(struct json *json, const char *name, bool value);
void json_text(struct json *json, const char *name, const char *value);
void json_null(struct json *json, const char *name);

#endif
