/*
 * Options: by name, from CALM_OPTIONS=name=value,... at the start, by calm_set later. One table in options.c
 * says all there is to say of each, and is where the manual's table comes from.
 */
#ifndef CALM_API_OPTIONS_H
#define CALM_API_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>

enum { OPTION_CACHE_AUTO, OPTION_CACHE_LOCKED, OPTION_CACHE_OFF };
enum { OPTION_MISUSE_ABORT, OPTION_MISUSE_WARN };
enum { OPTION_OFFLOAD_OFF, OPTION_OFFLOAD_ON, OPTION_OFFLOAD_SYNC };
enum {
    OPTION_OFFLOAD_CPU_AUTO,
    OPTION_OFFLOAD_CPU_SIBLING,
    OPTION_OFFLOAD_CPU_CORE,
    OPTION_OFFLOAD_CPU_SOCKET,
    OPTION_OFFLOAD_CPU_FIRST, /* and this much more than a CPU's number */
};
enum { OPTION_REPORT_OFF, OPTION_REPORT_EXIT };

/* Where to find CALM_OPTIONS while environ is NULL. */
void options_keep_environment(char **environment);

/* Reads CALM_OPTIONS if the environment is there yet; options_read_late, if it was not, and then returns
 * true. */
void options_read(void);
bool options_read_late(void);

int options_cache(void);
int options_misuse(void);
int options_report(void);
int options_offload(void);
int options_offload_cpu(void);      /* one of the above, or a CPU's number beyond OPTION_OFFLOAD_CPU_FIRST */
int options_offload_patience(void); /* milliseconds */
int options_profile(void);          /* bytes; 0: off */
const char *options_profile_file(void);

/* The option is known: profiles if it says so. */
void options_apply_profile(void);

/* 0, ENOENT, EINVAL or EBUSY. */
int options_set(const char *name, const char *value, size_t value_length);

/* The option number of the table, from 0 on: its name, or NULL past the end. */
const char *options_name(size_t number);
/* Its value as text: a word, or a number, of which *word is NULL. */
void options_value(size_t number, const char **word, int *value);

#endif
