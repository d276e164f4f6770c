/*
 * The values of the options, and how they are set by name: by
 * CALM_OPTIONS=name=value,... at the start, and by calm_set later. options.def
 * lists the options, and which of them are settings of the arena.
 *
 * This file parses, stores and prints values. settings.h applies them. Any
 * thread may read a value at any time. Texts change only at the start.
 */
#ifndef CALM_API_OPTIONS_H
#define CALM_API_OPTIONS_H

#include "os/text.h"

#include <stdatomic.h>

struct options {
#define HERE(name, ...)                                   _Atomic(int) name;
#define ARENA(name, ...)                                  /* in calm_arenas.settings */
#define OPTION(name, values, initial, change, place, ...) place(name, )
#define TEXT_OPTION(name, max_bytes, ...)                 char name[(max_bytes) + 1];
#include "api/options.def"
};

extern struct options calm_options __attribute__((visibility("hidden")));

enum option {
#define OPTION(name, ...)      OPTION_##name,
#define TEXT_OPTION(name, ...) OPTION_##name,
#include "api/options.def"
    OPTION_COUNT
};

enum { OPTION_CACHE_AUTO, OPTION_CACHE_LOCKED, OPTION_CACHE_OFF };
enum { OPTION_MISUSE_ABORT, OPTION_MISUSE_WARN, OPTION_MISUSE_IMMEDIATE };
enum { OPTION_REPORT_OFF, OPTION_REPORT_EXIT };

/* Keeps the environment in which options_read finds CALM_OPTIONS while environ
 * is NULL. */
void options_keep_environment(char **environment);

/* Sets the initial values at the first call. Reads CALM_OPTIONS once there is
 * an environment. Returns true if this call has read it. */
bool options_read(void);

/* Returns 0, and the option that was set. Returns ENOENT if there is no such
 * option, EINVAL if the value is invalid, or EBUSY if the option is fixed after
 * the start. */
int options_set(const char *name, const char *value, enum option *which);

const char *options_name(enum option which);

/* Returns whether reports show the option. They show a test option only if its
 * value is not the initial one. */
bool options_is_reported(enum option which);

/* Appends a value as text. Returns whether it is a number. */
bool options_print(enum option which, struct text *text);

#endif
