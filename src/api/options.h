/*
 * The options' values, and how they are set by name: from CALM_OPTIONS=name=value,... at the start, by
 * calm_set later. options.def lists the options, and which of them the governor has.
 *
 * This only parses, stores and prints; what else follows from a value is in settings.h. Values may be read at
 * any time, by any thread; texts change only at the start.
 */
#ifndef CALM_API_OPTIONS_H
#define CALM_API_OPTIONS_H

#include "os/text.h"

#include <stdatomic.h>

struct options {
#define HERE(name, ...)                                   _Atomic(int) name;
#define GOVERNOR(name, ...)                               /* in calm_governor.settings */
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
enum {
    OPTION_OFFLOAD_OFF,
    OPTION_OFFLOAD_ON,
    OPTION_OFFLOAD_SIBLING,
    OPTION_OFFLOAD_CORE,
    OPTION_OFFLOAD_SOCKET,
    OPTION_OFFLOAD_CPU_0, /* and so on: CPUs by number */
};
enum { OPTION_REPORT_OFF, OPTION_REPORT_EXIT };

/* Where to find CALM_OPTIONS while environ is NULL. */
void options_keep_environment(char **environment);

/* Sets the initial values at the first call, and reads CALM_OPTIONS as soon as there is an environment. True
 * if this call has read it. */
bool options_read(void);

/* Returns 0, with the option that was set; ENOENT, EINVAL, or EBUSY if it is fixed after the start. */
int options_set(const char *name, const char *value, enum option *which);

const char *options_name(enum option which);

/* Whether reports show it: test options only where their values are not the initial ones. */
bool options_is_reported(enum option which);

/* Appends a value as text. Returns whether it is a number. */
bool options_print(enum option which, struct text *text);

#endif
